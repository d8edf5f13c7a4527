"""The form of notebook 07: what is filled in is what is asked, and what goes wrong is shown."""

from __future__ import annotations

from pathlib import Path

import ipywidgets as widgets
import pytest
from ipyfilechooser import FileChooser
from IPython.utils.capture import capture_output

from lib.request import Request
from lib.request_form import PATHS, controls, request_form, request_of
from lib.taps import CONVENTIONS

DEFAULTS = Request(draft="d", captures="c", target="t", taps="embed,layer3", convention="sglang", depth=7)


def pressed(box: widgets.VBox) -> str:
    """Press the button; what was printed, without what clears an output where there is no browser."""
    (button,) = [w for w in box.children if isinstance(w, widgets.Button)]
    with capture_output() as seen:
        button.click()
    assert not button.disabled, "the button stays pressed"
    return seen.stdout.replace("\x1b[2K\r", "")


def test_the_form_starts_as_the_request_and_gives_it_back(tmp_path):
    """Unchanged, the form asks for what it was started with."""
    found, _ = controls(DEFAULTS, tmp_path)
    assert request_of({name: control.value for name, control in found.items()}) == DEFAULTS


def test_every_control_reaches_the_request(tmp_path):
    """Each control, changed alone, changes its own field and no other."""
    other = {
        "draft": "d2", "captures": "c2", "target": "", "finals": "f", "taps": "embed", "convention": "vllm",
        "limit": 3, "depth": 2, "verify_cost": 1.7, "draft_cost": 0.4, "out": "o",
    }  # fmt: skip
    found, rows = controls(DEFAULTS, tmp_path)
    assert set(other) | {"device"} == set(found), "a control without a test"
    for name, value in other.items():
        now, _ = controls(DEFAULTS, tmp_path)
        now[name].value = value
        asked = request_of({n: control.value for n, control in now.items()})
        changed = {n for n in vars(asked) if getattr(asked, n) != getattr(DEFAULTS, n)}
        assert changed == {name} and getattr(asked, name) == value
    assert len(rows) >= len(found)


@pytest.mark.parametrize("press", [False, True])
def test_what_has_no_control_or_lies_beyond_its_range_is_kept(shell, tmp_path, press):
    """A request of the parameters cell comes back whole: nothing is clamped or set to a default."""
    asked = Request(
        "d", "c", layout="speculators", loss_masks="m", device="meta", dtype="bfloat16", depth=40,
        verify_cost=0.004, draft_cost=2000.0, out="o",
    )  # fmt: skip
    if press:
        made = []
        pressed(request_form(made.append, asked, tmp_path))
        assert made == [asked]
    else:
        found, _ = controls(asked, tmp_path)
        assert request_of({name: control.value for name, control in found.items()}, asked) == asked


def test_blanks_around_a_text_are_dropped(tmp_path):
    """A pasted path brings blanks."""
    assert request_of({"draft": " d ", "captures": "c\n", "taps": ""}).draft == "d"


def test_choosing_a_folder_or_a_file_fills_the_text(tmp_path):
    """The chooser's answer stands in the field; a target's config.json means its folder."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "model.gguf").write_text("")
    found, rows = controls(DEFAULTS, tmp_path)
    choosers = {name: row.children[0] for name, row in zip(PATHS, rows, strict=False)}
    assert all(isinstance(c, FileChooser) for c in choosers.values())
    for name, folder, file, wanted in (
        ("draft", tmp_path / "model", "", tmp_path / "model"),
        ("target", tmp_path / "model", "config.json", tmp_path / "model"),
        ("target", tmp_path, "model.gguf", tmp_path / "model.gguf"),
    ):
        choosers[name].reset(str(folder), file)
        choosers[name]._apply_selection()
        choosers[name]._callback(choosers[name])
        assert Path(found[name].value) == wanted


def test_all_conventions_are_offered(tmp_path):
    """What the library can read, the form can ask for."""
    found, _ = controls(DEFAULTS, tmp_path)
    assert set(found["convention"].options) == set(CONVENTIONS)


def test_the_button_makes_the_report_with_what_is_filled_in(shell, tmp_path):
    """The function gets the request; what it prints is shown."""
    asked = []
    box = request_form(lambda r: (asked.append(r), print("made")), DEFAULTS, tmp_path)
    assert "made" in pressed(box) and asked == [DEFAULTS]


@pytest.mark.parametrize("at", ["request", "report"])
def test_a_refused_input_is_said_and_the_form_stays_usable(shell, tmp_path, at):
    """An empty draft is refused by the request itself, an unknown capture by the report."""

    def make(request: Request) -> None:
        from lib.captures import open_folder

        open_folder(request.captures)

    box = request_form(make, DEFAULTS, tmp_path)
    if at == "request":
        fields = [w for row in box.children if isinstance(row, widgets.VBox) for w in row.children]
        next(w for w in fields if isinstance(w, widgets.Text) and w.description == "draft").value = " "
    said = pressed(box)
    assert ("draft" if at == "request" else "no such folder") in said and "What to do" in said
    assert pressed(box) == said
