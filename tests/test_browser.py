"""Notebooks driven as a reader would: JupyterLab in headless Chromium, all cells, the explorer.

JupyterLab's own model (`window.jupyterapp`) is only read, to know what has run; what a reader does
is done with the mouse and the keyboard.
"""

import json
import os
import secrets
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from selenium import webdriver
from selenium.common.exceptions import WebDriverException
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.ui import Select

from tests.support import chromium, needs_chromium

ROOT = Path(__file__).resolve().parents[1]
SCREENSHOTS = ROOT / "artefacts" / "browser"

# Each has an explorer; 06 has two, its game is one.
NOTEBOOKS = [f"{number}_*.ipynb" for number in ("00", "01", "02", "03", "04", "05", "06", "07", "08", "09")]

SECONDS_TO_START = 180  # a cold JupyterLab on two busy cores
SECONDS_TO_RUN = 1500  # a whole notebook, with another job on the machine
SECONDS_TO_RESPOND = 300  # one redraw of an explorer
WIDTH, HEIGHT, TALLEST = 1400, 1000, 14000  # pixels; Chromium draws nothing beyond 16384

pytestmark = [pytest.mark.browser, needs_chromium]


def wait_for(what: str, check: Callable[[], Any], seconds: float, details: Any = None) -> Any:
    """Poll until `check` returns something true; a page in motion may make single polls fail."""
    end, last = time.monotonic() + seconds, None
    while time.monotonic() < end:
        try:
            if last := check():
                return last
        except (WebDriverException, OSError) as err:
            last = err
        time.sleep(0.5)
    pytest.fail(f"waited {seconds:.0f} s for {what}; last: {details() if details else last}")


# --- the server and the browser -------------------------------------------------------------------


@dataclass(frozen=True)
class Lab:
    """A running JupyterLab over a copy of the workbook."""

    root: Path
    url: str
    token: str


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    root, home = tmp_path_factory.mktemp("workbook"), tmp_path_factory.mktemp("home")
    for name in ("notebooks", "lib", "data_samples", "bench"):
        if (ROOT / name).exists():
            shutil.copytree(ROOT / name, root / name)
    if (ROOT / ".work").exists():
        (root / ".work").symlink_to(ROOT / ".work")  # the target model: not fetched twice

    # Windowed modes take cells out of the page while they are out of sight; here all must be found.
    # No question about news either: it would cover a corner of every screenshot.
    for plugin, setting in (
        ("notebook-extension/tracker", {"windowingMode": "none"}),
        ("apputils-extension/notification", {"fetchNews": "false", "checkForUpdates": False}),
    ):
        file = home / "settings" / "@jupyterlab" / f"{plugin}.jupyterlab-settings"
        file.parent.mkdir(parents=True)
        file.write_text(json.dumps(setting))
    runtime, token = home / "runtime", secrets.token_hex(16)
    env = os.environ | {
        "JUPYTERLAB_SETTINGS_DIR": str(home / "settings"),
        "JUPYTERLAB_WORKSPACES_DIR": str(home / "workspaces"),
        "JUPYTER_CONFIG_DIR": str(home / "config"),
        "JUPYTER_DATA_DIR": str(home / "data"),
        "JUPYTER_RUNTIME_DIR": str(runtime),
        "IPYTHONDIR": str(home / "ipython"),
        "JUPYTER_TOKEN": token,  # not on the command line, which other users can read
        "PYTHONPATH": str(root),  # the copy's lib/, ahead of the checkout's
        "EAGLE3_ENGINE_VENV": str(home / "none"),  # the engine has tests of its own
    }
    command = [
        *(sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root"),
        *("--ServerApp.ip=127.0.0.1", "--ServerApp.port=0"),  # the system picks a free port
        *(f"--ServerApp.root_dir={root}", "--expose-app-in-browser"),
        "--LabApp.extension_manager=readonly",  # as `make lab`: no look at a package index
    ]
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    log = SCREENSHOTS / "jupyterlab.log"
    with log.open("w") as stream:
        server = subprocess.Popen(
            command, cwd=root, env=env, stdin=subprocess.DEVNULL, stdout=stream, stderr=stream
        )
        try:

            def started() -> str | None:
                if server.poll() is not None:
                    pytest.fail(f"JupyterLab ended with {server.returncode}; see {log}")
                for file in runtime.glob("jpserver-*.json"):
                    url = json.loads(file.read_text() or "{}").get("url")
                    if url and answers(f"{url}api/status?token={token}"):
                        return url
                return None

            url = wait_for(f"JupyterLab to start (log: {log})", started, SECONDS_TO_START)
            yield Lab(root, url, token)
        finally:
            server.terminate()  # the server ends its kernels
            try:
                server.wait(60)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()


def answers(url: str) -> bool:
    try:
        # No proxy: a proxy set for the registries does not know this machine's loopback.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        return opener.open(url, timeout=10).status == 200
    except (urllib.error.URLError, OSError):
        return False


@pytest.fixture
def page(tmp_path: Path) -> Iterator[webdriver.Chrome]:
    with chromium(tmp_path, WIDTH, HEIGHT) as driver:
        driver.set_page_load_timeout(SECONDS_TO_START)
        driver.set_script_timeout(60)
        yield driver


# --- what a reader does ---------------------------------------------------------------------------

STATE = """
const panel = window.jupyterapp?.shell.currentWidget;
if (!panel?.context?.isReady || !panel.content?.model) return null;
const cells = Array.from(panel.content.model.cells, (cell, index) => ({
  index,
  code: cell.type === "code" && cell.sharedModel.source.trim() !== "",
  count: cell.executionCount ?? null,
  busy: cell.executionState === "running",
  errors: Array.from({length: cell.outputs?.length ?? 0}, (_, i) => cell.outputs.get(i).toJSON())
    .filter(o => o.output_type === "error").map(o => `${o.ename}: ${o.evalue}`),
}));
return {path: panel.context.path, kernel: panel.sessionContext.session?.kernel?.status, cells};
"""


def state(page: webdriver.Chrome) -> dict | None:
    """Path, kernel status and code cells of the notebook in front, or None while it loads."""
    found = page.execute_script(STATE)
    if found:
        found["cells"] = [cell for cell in found["cells"] if cell["code"]]
    return found


def is_idle(page: webdriver.Chrome) -> bool:
    now = state(page)
    return bool(now) and now["kernel"] == "idle" and not any(c["busy"] for c in now["cells"])


def stays_idle(page: webdriver.Chrome) -> bool:
    """Idle on three looks in a row: between two cells a kernel is idle for a moment."""
    for _ in range(3):
        if not is_idle(page):
            return False
        time.sleep(1)
    return True


def open_notebook(page: webdriver.Chrome, lab: Lab, path: str) -> None:
    page.get(f"{lab.url}lab/tree/{path}?token={lab.token}")

    def ready() -> bool:
        now = state(page)
        return bool(now) and now["path"] == path and now["kernel"] == "idle"

    wait_for(f"{path} to open with a kernel", ready, SECONDS_TO_START, lambda: state(page))


def menu(page: webdriver.Chrome, bar: str, item: str) -> None:
    """Click `item` in the menu `bar`, as `Run` > `Run All Cells`."""
    page.find_element(
        By.XPATH, f"//*[contains(@class,'lm-MenuBar-itemLabel')][normalize-space()='{bar}']"
    ).click()
    xpath = f"//*[contains(@class,'lm-Menu-itemLabel')][normalize-space()='{item}']"
    found = wait_for(f"{bar} > {item}", lambda: page.find_elements(By.XPATH, xpath), 60)
    found[0].click()


def run_all(page: webdriver.Chrome) -> list[dict]:
    """Clear what is stored, run all cells, wait for the end; returns the code cells."""
    menu(page, "Edit", "Clear Outputs of All Cells")
    cleared = lambda: all(c["count"] is None for c in state(page)["cells"])  # noqa: E731
    wait_for("the stored outputs to go", cleared, 60)
    menu(page, "Run", "Run All Cells")

    def ended() -> list[dict] | None:
        cells = state(page)["cells"]
        ran = all(c["count"] for c in cells) or any(c["errors"] for c in cells)
        return state(page)["cells"] if ran and stays_idle(page) else None

    return wait_for("all cells to run", ended, SECONDS_TO_RUN, lambda: state(page))


# --- the explorer ---------------------------------------------------------------------------------

DRAWN = """
const cells = new Set(Array.from(document.querySelectorAll(".explorer"), e => e.closest(".jp-Cell")));
const shown = Array.from(cells).flatMap(cell => Array.from(cell.querySelectorAll(
  ".jp-RenderedImage img, .jp-RenderedSVG, .jp-RenderedText, .jp-RenderedHTML, " +
  ".widget-html-content, .widget-image"
))).map(e => e.src ?? (e.matches(".jp-RenderedSVG") ? e.innerHTML : e.textContent));
return shown.some(s => s.trim()) ? JSON.stringify(shown) : null;
"""


def drawn(page: webdriver.Chrome) -> str | None:
    """What the explorers show (images, tables, text), without their controls; None when empty."""
    return page.execute_script(DRAWN)


def controls(page: webdriver.Chrome) -> list[WebElement]:
    found = page.find_elements(By.CSS_SELECTOR, ".explorer select, .explorer .noUi-handle")
    return [c for c in found if c.is_displayed() and c.is_enabled()]


def move(control: WebElement) -> str:
    """Set a dropdown to another option, or a slider one step aside; says what was done."""
    if control.tag_name == "select":
        select = Select(control)
        now = select.first_selected_option.text
        other = next(o.text for o in select.options if o.text != now)
        select.select_by_visible_text(other)
        return f"dropdown from {now!r} to {other!r}"
    before = control.get_attribute("aria-valuenow")
    control.send_keys(Keys.ARROW_RIGHT)
    if control.get_attribute("aria-valuenow") == before:  # it stood at its end
        control.send_keys(Keys.ARROW_LEFT)
    return f"slider from {before} to {control.get_attribute('aria-valuenow')}"


def show(page: webdriver.Chrome, selector: str) -> None:
    page.execute_script("document.querySelector(arguments[0]).closest('.jp-Cell').scrollIntoView()", selector)
    time.sleep(1)  # let it paint


def screenshot_whole(page: webdriver.Chrome, name: str) -> None:
    """The notebook in one picture, and each output with a figure in its own, at full size."""
    height = page.execute_script(
        "return Math.max(...Array.from(document.querySelectorAll('.jp-NotebookPanel *'),"
        " e => e.scrollHeight))"
    )
    page.set_window_size(WIDTH, min(height + 200, TALLEST))  # the notebook scrolls, not the page
    time.sleep(3)
    page.save_screenshot(str(SCREENSHOTS / f"{name}.whole.png"))
    for number, cell in enumerate(page.find_elements(By.CSS_SELECTOR, ".jp-Notebook .jp-Cell")):
        for output in cell.find_elements(By.CSS_SELECTOR, ".jp-Cell-outputWrapper:has(img, svg)"):
            if output.is_displayed():
                output.screenshot(str(SCREENSHOTS / f"{name}.cell-{number:02}.png"))
    page.set_window_size(WIDTH, HEIGHT)
    time.sleep(1)


def play(page: webdriver.Chrome) -> None:
    """Notebook 06's game: commit to the guess that stands there; diagnosis, truth and score appear."""
    page.find_element(By.CSS_SELECTOR, ".fault-game button").send_keys(Keys.ENTER)

    def answered() -> bool:
        text = page.find_element(By.CSS_SELECTOR, ".fault-game").text
        return all(word in text for word in ("diagnosis:", "truth:", "of 1 so far")) and is_idle(page)

    wait_for("the game's answer", answered, SECONDS_TO_RESPOND)
    no_error_shown(page)
    show(page, ".fault-game button")


def no_error_shown(page: webdriver.Chrome) -> None:
    """Errors inside a widget are in no cell's outputs: the page has them, styled as stderr."""
    texts = [
        e.get_attribute("textContent")
        for e in page.find_elements(
            By.CSS_SELECTOR, '[data-mime-type$="jupyter.stderr"], .jupyter-widgets-error'
        )
    ]
    errors = [t for t in texts if "Traceback" in t or "Error" in t]  # not warnings, progress bars
    assert not errors, "an error is shown:\n" + "\n".join(errors)


# --- the test -------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("pattern", NOTEBOOKS)
def test_notebook_runs_and_its_explorer_responds(pattern: str, lab: Lab, page: webdriver.Chrome) -> None:
    notebooks = sorted((lab.root / "notebooks").glob(pattern))
    assert len(notebooks) == 1, f"notebooks/{pattern} names {[n.name for n in notebooks]}"
    name = notebooks[0].stem

    def screenshot(what: str) -> None:
        page.save_screenshot(str(SCREENSHOTS / f"{name}.{what}.png"))

    try:
        open_notebook(page, lab, f"notebooks/{name}.ipynb")
        cells = run_all(page)
        errors = {cell["index"]: cell["errors"] for cell in cells if cell["errors"]}
        assert cells and not errors, f"cells with errors (by position): {errors}"
        no_error_shown(page)
        screenshot_whole(page, name)

        wait_for("the explorer to draw", lambda: drawn(page), SECONDS_TO_RESPOND)
        show(page, ".explorer")
        screenshot("explorer-0")
        n_controls = len(controls(page))
        assert n_controls, "the explorer shows no dropdown and no slider"
        for i in range(n_controls):
            before = drawn(page)
            did = move(controls(page)[i])

            def redrawn(before: str | None = before) -> bool:
                now = drawn(page)
                return bool(now) and now != before and stays_idle(page) and drawn(page) == now

            wait_for(f"the explorer to change after: {did}", redrawn, SECONDS_TO_RESPOND)
            no_error_shown(page)
            show(page, ".explorer")
            screenshot(f"explorer-{i + 1}")
        # Other notebooks' tabs stay in the page, out of sight.
        if any(game.is_displayed() for game in page.find_elements(By.CSS_SELECTOR, ".fault-game")):
            play(page)
            screenshot("game")
    except BaseException:
        screenshot("failed")
        raise


@pytest.mark.slow
def test_the_form_of_notebook_07_makes_a_report(lab: Lab, page: webdriver.Chrome) -> None:
    """Set the number of files, press the button: the answers appear, the files are written."""
    (notebook,) = (lab.root / "notebooks").glob("07_*.ipynb")
    open_notebook(page, lab, f"notebooks/{notebook.name}")
    run_all(page)
    show(page, ".request-form")
    limit = page.find_element(By.CSS_SELECTOR, ".request-form input[type=number]")
    limit.send_keys(Keys.CONTROL, "a")
    limit.send_keys("2", Keys.TAB)
    page.find_element(By.CSS_SELECTOR, ".request-form button.mod-primary").send_keys(Keys.ENTER)

    def written() -> bool:
        text = page.find_element(By.CSS_SELECTOR, ".request-form").text
        return "report.json" in text and is_idle(page)

    try:
        wait_for("the form's report", written, SECONDS_TO_RESPOND)
    finally:
        show(page, ".request-form button.mod-primary")
        page.save_screenshot(str(SCREENSHOTS / f"{notebook.stem}.form.png"))
    no_error_shown(page)
    made = json.loads(next((lab.root / "reports").glob("*/report.json")).read_text())
    assert len(made["files"]["read"]) == 2
