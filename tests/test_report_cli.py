"""`make report` as a reader runs it: on the samples, on a mixed folder with broken files, in a browser."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from bs4 import BeautifulSoup

from lib.notebook import ROOT, read_facts
from lib.samples import SAMPLES
from tests.support import needs_chromium
from tests.test_html import OUT_OF_REACH, WIDTHS, loads, page, requests, resize  # noqa: F401

SCREENSHOTS = ROOT / "artefacts" / "report"
BROKEN = ("data_90.pt", "data_91.pt", "hs_92.safetensors", "hs_93.safetensors", "notes.docx")

pytestmark = pytest.mark.slow


def report(out: Path, **options: str) -> dict:
    """The command line in a process of its own; report.json."""
    command = [sys.executable, "-m", "lib.report", "make", "--out", str(out)]
    command += [word for name, value in options.items() for word in (f"--{name}", value)]
    env = os.environ | {"HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    assert {f.name for f in out.iterdir()} >= {"report.ipynb", "report.html", "report.json"}
    return json.loads((out / "report.json").read_text())


@pytest.fixture(scope="module")
def mixed(tmp_path_factory) -> tuple[Path, dict]:
    """Three formats and five broken files in one folder; its report with sample draft (a)."""
    folder = tmp_path_factory.mktemp("mixed") / "captures"
    folder.mkdir()
    for name in ("incident/data_0.pt", "incident/data_1.pt", "speculators/hidden_states/hs_0.safetensors",
                 "workbook/capture_0.safetensors", "workbook/capture_1.safetensors"):  # fmt: skip
        shutil.copy(SAMPLES / "captures" / name, folder)
    whole = (folder / "data_0.pt").read_bytes()
    stack = (folder / "hs_0.safetensors").read_bytes()
    broken = (b"", whole[: len(whole) // 2], stack[:-1000], b"\xff" * 200, b"minutes of a meeting")
    for name, content in zip(BROKEN, broken, strict=True):
        (folder / name).write_bytes(content)
    out = folder.parent / "report"
    made = report(
        out, draft=str(SAMPLES / "drafts" / "a_incident"), captures=str(folder), target="sample",
        taps="embed,layer3,layer16,layer28", convention="sglang", depth="5",
    )  # fmt: skip
    return out, made


def test_a_mixed_folder_is_read_and_broken_files_are_named(mixed):
    """Five files of three formats count; five broken ones are listed with their reasons."""
    _, made = mixed
    assert sorted(f["layout"] for f in made["files"]["read"]) == [
        "speculators", "speculators-legacy", "speculators-legacy", "workbook", "workbook",
    ]  # fmt: skip
    skipped = {Path(f["file"]).name: f["error"] for f in made["files"]["skipped"]}
    assert set(skipped) == set(BROKEN) and all("What to do" in e for e in skipped.values())
    assert made["sweep"]["winner"] == ["embed", "layer3", "layer16"]
    assert any("5 of 10 files" in w for w in made["warnings"])


@pytest.mark.parametrize(
    ("draft", "winner"),
    [("a_incident", "embed layer3 layer16"), ("b_control", "layer3 layer16 layer28"),
     ("c_lens", "embed layer3 layer16")],
)  # fmt: skip
def test_the_sample_drafts_report_what_the_notebooks_say(draft, winner, tmp_path):
    """Winner of the sweep and, for (a), the numbers of notebooks 01, 03 and 05."""
    options = {"depth": "15"} if draft == "a_incident" else {"depth": "2"}
    captures = str(SAMPLES / "captures" / "incident")
    made = report(
        tmp_path / "out", draft=str(SAMPLES / "drafts" / draft), captures=captures,
        target="sample", taps="embed,layer3,layer16,layer28", convention="sglang", **options,
    )  # fmt: skip
    facts = read_facts("03")
    assert " ".join(made["sweep"]["winner"]) == winner == facts[f"sweep.{draft[0]}.winner"]
    assert made["sweep"]["gap"]["value"] == pytest.approx(facts[f"sweep.{draft[0]}.gap_nats"], abs=0.002)
    if draft != "a_incident":
        return
    for which, name in (("declared", "served"), ("best", "trained")):
        result = made["results"][which]
        assert result["accuracy"]["in_vocab"][0]["value"] == pytest.approx(
            facts[f"accuracy.{name}"], abs=0.005
        )
        tokens = result["acceptance"][14]["tokens_per_round"]["value"]
        assert tokens == pytest.approx(read_facts("05")[f"offline.tokens_per_round.{name}"], abs=0.02)
    norms = {row["tap"]: row["mean (no sinks)"] for row in made["norms"]}
    assert norms["layer3"] == pytest.approx(read_facts("01")["mean_norm.stored1"], rel=0.01)


def test_a_wrong_path_is_one_line_and_no_traceback(tmp_path):
    """Exit status 2; the line names the path and what to do."""
    command = [
        sys.executable,
        "-m",
        "lib.report",
        "make",
        "--draft",
        str(tmp_path / "none"),
        "--captures",
        "x",
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    lines = done.stderr.strip().splitlines()
    assert done.returncode == 2 and len(lines) == 1 and "What to do" in lines[0] and "none" in lines[0]


@pytest.mark.browser
@needs_chromium
@pytest.mark.parametrize("width", WIDTHS)
def test_the_page_loads_nothing_and_fits(width, mixed, page):  # noqa: F811
    """At desk and phone width: one request, nothing cut off, every box that scrolls reachable by key."""
    out, _ = mixed
    assert not loads(BeautifulSoup((out / "report.html").read_text(encoding="utf-8"), "html.parser"))
    url = (out / "report.html").as_uri()
    requests(page)
    resize(page, width, 900)
    page.get(url)
    size = page.execute_script(
        "const e = document.documentElement; return [innerWidth, e.scrollWidth, e.scrollHeight]"
    )
    assert size[0] == width and size[1] <= width
    assert not page.execute_script(OUT_OF_REACH)
    resize(page, width, min(size[2], 14000))
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    page.save_screenshot(str(SCREENSHOTS / f"report.{width}.png"))
    assert requests(page) == [url] and not page.get_log("browser")
