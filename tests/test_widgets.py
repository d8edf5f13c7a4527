"""Explorers without a browser: the pure views over all their choices, the shells by their controls."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace

import matplotlib.pyplot as plt
import pandas as pd
import pytest
import torch
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output
from matplotlib.figure import Figure
from traitlets.config import Config

from lib.captures import open_capture
from lib.checkpoints import load_draft
from lib.draft import DraftForward
from lib.widgets import (
    SHOWN,
    conversation_explorer,
    learning_explorer,
    norms_explorer,
    norms_view,
    wiring_explorer,
    wiring_view,
)
from tests.support import random_capture_tensors, speculators_draft, write_legacy

TAPS = ("embed", "layer3", "layer4", "layer6")
LENGTHS = (20, 40, 90)


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    """A tiny draft's forward, its contract, and three conversations."""
    folder, rng = tmp_path_factory.mktemp("toy"), torch.Generator().manual_seed(1)
    speculators_draft().save_pretrained(folder / "draft")
    draft = load_draft(folder / "draft")
    files = [
        write_legacy(folder / f"data_{i}.pt", random_capture_tensors(n, rng)) for i, n in enumerate(LENGTHS)
    ]
    captures = [open_capture(f, taps=TAPS) for f in files]
    return DraftForward(draft), draft.contract.change(taps=TAPS[:3]), captures


@pytest.fixture
def shell(tmp_path, monkeypatch):
    """IPython as a notebook has it, so that what a callback displays can be read."""
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    yield InteractiveShell.instance(config=Config(HistoryManager={"enabled": False}))
    InteractiveShell.clear_instance()


def decode(token: int) -> str:
    return f"<{token}>"


def controls(box):
    return {c.description: c for c in box.children[0].children}


def test_norms_view_for_every_choice(toy):
    """Every tap of every conversation: a figure of its own norms, on a log axis, with its name."""
    _, _, captures = toy
    for conversation, tap in itertools.product(range(len(captures)), captures[0].taps):
        figure = norms_view(captures, conversation, tap)
        axes = figure.axes[0]
        assert isinstance(figure, Figure) and axes.get_yscale() == "log"
        assert axes.get_title(loc="left") == f"data_{conversation}: norms at {tap}"
        assert len(axes.lines[0].get_ydata()) == LENGTHS[conversation]
        plt.close(figure)


def test_wiring_view_for_every_choice(toy):
    """All 4 x 4 x 4 slot choices of every conversation: the count agrees with the coloured tokens."""
    forward, contract, captures = toy
    views = {}
    for conversation, taps in itertools.product(range(len(captures)), itertools.product(TAPS, repeat=3)):
        view = wiring_view(forward, captures, contract, taps, conversation, decode)
        hits, known = map(int, re.search(r"(\d+) of (\d+) in-vocab", view).groups())
        scored = len(captures[conversation].scored)
        assert view.count("<span") == min(SHOWN, scored) and hits <= known <= scored
        if scored <= SHOWN:
            assert (view.count("#CFE8F5"), view.count("#F9DCCB")) == (hits, known - hits)
        assert ("(unchanged)" in view) == (taps == TAPS[:3])
        views[conversation, taps] = view
    # Two views differ even where their hits agree: each names its change.
    assert len(set(views.values())) == 64 * len(captures)
    assert "slot 0: embed -&gt; layer6" in views[1, ("layer6", "layer3", "layer4")]


def test_dangerous_text_is_escaped(toy):
    """Tokens are data: tags, quotes and newlines of a text never become markup of the page."""
    forward, contract, captures = toy
    evil = "<script>alert('x')</script>\"\n"
    view = wiring_view(forward, captures, contract, TAPS[:3], 1, lambda _token: evil)
    assert "<script" not in view and "&lt;script&gt;" in view and "&#9166;" in view
    for title in re.findall(r'title="([^"]*)"', view):
        assert "<" not in title and "&#x27;" in title
    assert view.count("<span") == view.count("</span>") == view.count('title="')
    empty = wiring_view(forward, captures, contract, TAPS[:3], 1, lambda _token: "")
    assert "&nbsp;" in empty, "an empty token must leave something to point at"


def test_norms_explorer_reacts(toy, shell):
    """Both controls redraw: a figure per change, and none left open behind."""
    _, _, captures = toy
    before = plt.get_fignums()
    with capture_output() as first:
        box = norms_explorer(captures)
    assert "explorer" in box._dom_classes and len(first.outputs) == 1
    for name, value in (("tap", captures[0].taps[3]), ("text", 2)):
        with capture_output() as seen:
            controls(box)[name].value = value
        assert len(seen.outputs) == 1 and "Figure" in seen.outputs[0].data["text/plain"], name
    assert plt.get_fignums() == before


def test_wiring_explorer_reacts(toy, shell):
    """Every control changes what is shown, and what is shown is the pure view of the choices."""
    forward, contract, captures = toy
    other = contract.change(norm_before_residual=True)
    with capture_output() as first:
        box = wiring_explorer({"a": forward, "b": forward}, {"a": contract, "b": other}, captures, decode)
    shown = [first.outputs[0].data["text/html"]]
    assert shown[0] == wiring_view(forward, captures, contract, contract.taps, 0, decode)
    by_name = controls(box)
    assert list(by_name) == ["draft", "slot 0", "slot 1", "slot 2", "text"]
    for name, value in (("text", 1), ("slot 0", captures[0].taps[3]), ("draft", "b")):
        with capture_output() as seen:
            by_name[name].value = value
        shown.append(seen.outputs[0].data["text/html"])
    taps = [captures[0].taps[3], *contract.taps[1:]]
    assert shown[-1] == wiring_view(forward, captures, other, taps, 1, decode)
    assert len(set(shown)) == 4, "a control changed nothing"


def test_conversation_explorer_reacts(toy, shell):
    """One slider: the view of the chosen text under the one contract given."""
    forward, contract, captures = toy
    with capture_output():
        box = conversation_explorer(forward, captures, contract, decode)
    with capture_output() as seen:
        controls(box)["text"].value = 2
    wanted = wiring_view(forward, captures, contract, contract.taps, 2, decode)
    assert seen.outputs[0].data["text/html"] == wanted


def test_learning_explorer_draws_every_metric(shell):
    """Each column of a training log can be chosen, and the axis names it."""
    rows = {"step": [100, 100], "split": ["train", "heldout"], "loss": [2.0, 2.1], "full_acc_0": [0.4, 0.3]}
    with capture_output():
        box = learning_explorer({"(a)": pd.DataFrame(rows)})
    metric = controls(box)["metric"]
    assert metric.options == ("loss", "full_acc_0")
    with capture_output() as seen:
        metric.value = "full_acc_0"
    assert "Figure" in seen.outputs[0].data["text/plain"]


def test_errors_show_and_free_the_controls(toy, shell):
    """A text of two tokens has nothing to score: the message appears, and the next choice works."""
    forward, contract, captures = toy
    short = captures[0]
    none = replace(short, loss_mask=short.loss_mask & False)
    with capture_output():
        box = wiring_explorer({"a": forward}, {"a": contract}, [short, none], decode)
    with capture_output() as failed:
        controls(box)["text"].value = 1
    assert "What to do:" in failed.stdout and not failed.outputs
    with capture_output() as again:
        controls(box)["text"].value = 0
    assert "in-vocab tokens right" in again.outputs[0].data["text/html"]


@pytest.mark.slow
def test_output_widget_changes_in_a_kernel(root):
    """In a real kernel, without a browser, a new value replaces what the Output widget holds."""
    import nbformat
    from nbclient import NotebookClient

    lines = """
from ipywidgets import IntSlider
from lib.widgets import _shell
from IPython.display import HTML, display
slider = IntSlider(1, 0, 9)
box = _shell({"n": slider}, lambda n: display(HTML(f"<b>{n}</b>")))
# cell
slider.value = 7
# cell
print([o["data"]["text/html"] for o in box.children[1].outputs])
"""
    cells = [nbformat.v4.new_code_cell(source) for source in lines.split("# cell")]
    notebook = nbformat.v4.new_notebook(cells=cells)
    NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(root)}}).execute()
    assert notebook.cells[2].outputs[0].text == "['<b>7</b>']\n"
