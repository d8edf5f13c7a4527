"""`make html`: each notebook as one file that loads nothing, at desk and phone width."""

from __future__ import annotations

import json
import re

import nbformat
import pytest
from bs4 import BeautifulSoup

from lib.notebook import ROOT, formula, html, notebook_files
from tests.support import chromium, needs_chromium

SCREENSHOTS = ROOT / "artefacts" / "html"
WIDTHS = (1280, 390)  # pixels: a desk, a phone
FILES = notebook_files()

each = pytest.mark.parametrize("path", FILES, ids=lambda p: p.name[:2])


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """The folder that `make html` would fill."""
    out = tmp_path_factory.mktemp("html")
    html(FILES, out)
    return out


def parsed(folder, path) -> BeautifulSoup:
    return BeautifulSoup((folder / f"{path.stem}.html").read_text(encoding="utf-8"), "html.parser")


# ---- as written -----------------------------------------------------------------------------------


def loads(page: BeautifulSoup) -> list[str]:
    """What a browser would load from elsewhere, cut short; what stands in the file is not listed."""
    found = [
        str(e[name])
        for e in page.find_all(True)
        for name in ("src", "srcset", "href", "xlink:href", "data", "poster", "background", "action")
        if e.has_attr(name) and not (e.name == "a" and name == "href")
    ]
    css = [e.get_text() for e in page.find_all("style")] + [e["style"] for e in page.select("[style]")]
    for text in css:
        found += re.findall(r"""url\(\s*["']?([^"')]+)""", text) + re.findall(r"@import[^;]+", text)
    found += [e.get_text() for e in page.find_all("script") if e.get_text().strip()]
    return [f[:80] for f in found if not f.startswith(("data:", "#"))]


@pytest.mark.parametrize(
    ("text", "n"),
    [
        ('<a href="https://a.b/">x</a><img src="data:image/png;base64,AA=="><svg><use href="#i"/></svg>', 0),
        ('<script src="https://a.b/c.js"></script><link rel="stylesheet" href="c.css">', 2),
        ('<script>import("https://a.b/c.js")</script>', 1),
        ("<style>@import 'c.css'; p {background: url(data:image/png;base64,AA==)}</style>", 1),
        ('<p style="background: url( \'//a.b/c.png\')"><object data="c.svg"></object>', 2),
        ('<img srcset="https://a.b/c.png 2x"><iframe src="https://a.b"></iframe>', 2),
    ],
)
def test_loads_by_eye(text, n):
    """Links to follow and data in the file load nothing; all else is found."""
    assert len(loads(BeautifulSoup(text, "html.parser"))) == n


@each
def test_one_file_that_loads_nothing(path, exported):
    """No script, style sheet, font or image from elsewhere, and a policy that forbids them."""
    page = parsed(exported, path)
    assert not loads(page)
    assert not page.find_all(["script", "iframe", "base"])
    assert "default-src 'none'" in page.select_one("meta[http-equiv=Content-Security-Policy]")["content"]


@each
def test_everything_arrived(path, exported):
    """Headings, folded answers, figures, tables; and language, title, landmark, alternative texts."""
    page, cells = parsed(exported, path), nbformat.read(path, as_version=4).cells
    text = "\n".join(c.source for c in cells if c.cell_type == "markdown")
    text = re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
    wanted = [h.replace("`", "").strip() for h in re.findall(r"^#+ (.+)$", text, flags=re.M)]
    headings = [h.get_text().rstrip("¶") for h in page.select("h1, h2, h3, h4, h5, h6")]
    assert headings == wanted
    assert page.html["lang"] == "en" and page.title.get_text() == wanted[0] and page.main

    folded = page.select("details")
    assert len(folded) == text.count("<details>")
    assert all(d.get_text(strip=True) != d.summary.get_text(strip=True) for d in folded), "left outside"

    data = [o.get("data", {}) for c in cells if c.cell_type == "code" for o in c.outputs]
    figures = [i["src"] for i in page.select(".jp-RenderedImage img")]
    stored = [d["image/png"].strip() for d in data if "image/png" in d]
    assert figures == [f"data:image/png;base64,{png}" for png in stored]
    assert all(i.get("alt") and "No description" not in i["alt"] for i in page.select("img"))
    assert len(page.select(".jp-OutputArea table")) == sum("<table" in d.get("text/html", "") for d in data)


@each
def test_formulas_are_drawn(path, exported):
    """No MathJax comes: each formula is an image with its source beside it, none stays behind as `$`."""
    prose = parsed(exported, path).select(".jp-RenderedMarkdown")
    for code in (c for p in prose for c in p.select("code, pre")):
        code.extract()
    assert not [p.get_text() for p in prose if "$" in p.get_text()]
    cells = nbformat.read(path, as_version=4).cells
    text = "\n".join(c.source for c in cells if c.cell_type == "markdown")
    formulas = re.findall(r"(\${1,2})(.+?)\1", re.sub(r"`+[^`]*`+", "", text), flags=re.S)
    assert [i["alt"] for p in prose for i in p.select("img.formula")] == [f.strip() for _, f in formulas]


def test_a_formula_that_cannot_be_drawn_stays_readable():
    """Unknown LaTeX becomes code, escaped; the rest becomes an image."""
    assert formula(r"\nosuchthing < 1") == r"<code>\nosuchthing &lt; 1</code>"
    assert "image/svg+xml" in formula(r"\lVert g \rVert_2 \le 1")


@each
def test_links_lead_to_exported_pages(path, exported):
    """A link to a notebook leads to its page here, not to the .ipynb."""
    for link in parsed(exported, path).select("a[href]"):
        assert not re.fullmatch(r"\d\d_\w+\.ipynb", link["href"]), link["href"]
        if re.fullmatch(r"\d\d_\w+\.html", link["href"]):
            assert (exported / link["href"]).is_file()


# ---- as a browser shows it ------------------------------------------------------------------------

OUT_OF_REACH = """
const found = [], width = document.documentElement.clientWidth;
const overflow = e => getComputedStyle(e).overflowX;
for (const e of document.querySelectorAll("main, main *")) {
  const says = what => found.push(`${what}: ${e.tagName} ${e.className}`);
  const wider = e.scrollWidth > e.clientWidth + 1;
  if (wider && overflow(e) === "hidden") says("cut off");
  if (wider && ["auto", "scroll"].includes(overflow(e)) && e.tabIndex < 0) says("scrolls, not by key");
  let box = e.parentElement;
  while (box.parentElement && overflow(box) === "visible") box = box.parentElement;
  if (!box.parentElement && e.getBoundingClientRect().right > width + 1) says("beyond the edge");
}
return found;
"""


def requests(page) -> list[str]:
    """Addresses the page asked for since the last call, data in the file left out."""
    events = [json.loads(entry["message"])["message"] for entry in page.get_log("performance")]
    urls = [e["params"]["request"]["url"] for e in events if e["method"] == "Network.requestWillBeSent"]
    return [u for u in urls if not u.startswith("data:")]


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    folder = tmp_path_factory.mktemp("browser")
    logs = {"performance": "ALL", "browser": "ALL"}
    with chromium(folder, WIDTHS[0], 900, loggingPrefs=logs) as driver:
        driver.set_page_load_timeout(60)
        driver.execute_cdp_cmd("Network.enable", {})
        none = {"offline": True, "latency": 0, "downloadThroughput": 0, "uploadThroughput": 0}
        driver.execute_cdp_cmd("Network.emulateNetworkConditions", none)
        yield driver


def resize(page, width: int, height: int) -> None:
    """Not as a mobile device: that would widen its layout to what does not fit, and hide it."""
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
    page.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)


@pytest.mark.slow
@pytest.mark.browser
@needs_chromium
def test_the_checks_themselves(page, tmp_path):
    """A page that loads an image, is too wide, cuts text off and hides a scroller is found out."""
    bad = tmp_path / "bad.html"
    box = '<div style="width: 9em; overflow: {}"><p style="width: 40em">text</p></div>'
    image = '<img src="http://workbook.invalid/a.png" style="width: 3000px">'
    bad.write_text(f"<main>{image}{box.format('hidden')}{box.format('auto')}</main>")
    requests(page)
    resize(page, 390, 900)
    page.get(bad.as_uri())
    assert requests(page) == [bad.as_uri(), "http://workbook.invalid/a.png"]
    found = {line.split(":")[0] for line in page.execute_script(OUT_OF_REACH)}
    assert found == {"cut off", "scrolls, not by key", "beyond the edge"}
    assert page.get_log("browser")  # the image that failed; also empties the log


@pytest.mark.slow
@pytest.mark.browser
@needs_chromium
@pytest.mark.parametrize("width", WIDTHS)
@each
def test_loads_nothing_and_fits(path, width, exported, page):
    """One request, the file itself; nothing refused, nothing sideways, all of it within reach."""
    url = (exported / f"{path.stem}.html").as_uri()
    requests(page)
    resize(page, width, 900)
    page.get(url)
    size = page.execute_script(
        "const e = document.documentElement; return [innerWidth, e.scrollWidth, e.scrollHeight]"
    )
    assert size[0] == width and size[1] <= width
    out_of_reach = page.execute_script(OUT_OF_REACH)
    resize(page, width, min(size[2], 14000))  # the whole page in one picture
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    page.save_screenshot(str(SCREENSHOTS / f"{path.stem}.{width}.png"))
    assert not out_of_reach
    assert requests(page) == [url]
    assert not page.get_log("browser")  # a refused load would be reported here
