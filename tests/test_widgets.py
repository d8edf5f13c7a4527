"""Explorers without a browser: the pure views over all their choices, the shells by their controls."""

from __future__ import annotations

import html
import itertools
import re
from dataclasses import replace

import matplotlib.pyplot as plt
import pandas as pd
import pytest
import torch
from matplotlib.figure import Figure

from lib.captures import open_capture
from lib.checkpoints import load_draft
from lib.decoding import Generation
from lib.draft import DraftForward
from lib.speeds import Speed
from lib.widgets import (
    ROUND_COLOURS,
    SHOWN,
    conversation_explorer,
    costs_explorer,
    costs_view,
    learning_explorer,
    norms_explorer,
    norms_view,
    rounds_explorer,
    rounds_view,
    speed_explorer,
    token_explorer,
    token_view,
    wiring_explorer,
    wiring_view,
)
from tests.support import random_capture_tensors, speculators_draft, write_legacy

TAPS = ("embed", "layer3", "layer4", "layer6")
LENGTHS = (20, 40, 90)
EVIL = "<script>alert('x')</script>\"\n"


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
    view = wiring_view(forward, captures, contract, TAPS[:3], 1, lambda _token: EVIL)
    assert "<script" not in view and "&lt;script&gt;" in view and "&#9166;" in view
    for title in re.findall(r'title="([^"]*)"', view):
        assert "<" not in title and "&#x27;" in title
    assert view.count("<span") == view.count("</span>") == view.count('title="')
    empty = wiring_view(forward, captures, contract, TAPS[:3], 1, lambda _token: "")
    assert "&nbsp;" in empty, "an empty token must leave something to point at"


def generation(accepted, gained, depth, plain=0) -> Generation:
    """An answer with these rounds after its first token; or a plain one of `plain` tokens."""
    tokens = torch.arange(plain or 1 + sum(gained)) + 10
    return Generation(torch.arange(3), tokens, tuple(accepted), tuple(gained), 1.0, 0.1, depth)


def spans(view: str) -> list[tuple[str, str, str]]:
    """(tip, colour, text) of the answer's coloured cells; the legend below it is left out."""
    cells = re.findall(
        r'<span title="([^"]*)" style="background:(#\w+);[^"]*">(.*?)</span>', view.split("</p>")[0]
    )
    return [(html.unescape(tip), colour, html.unescape(text)) for tip, colour, text in cells]


def test_rounds_view_for_every_three_rounds():
    """0 to 6 draft tokens in each of three rounds: every token once, in order, one coloured cell a round."""
    for accepted in itertools.product(range(7), repeat=3):
        gained = [n + 1 for n in accepted]
        gained[-1] = max(1, gained[-1] - 1)  # the text ends inside the last round
        answer = generation(accepted, gained, depth=6)
        cells = spans(rounds_view(answer, decode))
        assert "".join(text for _, _, text in cells) == "".join(map(decode, answer.tokens.tolist()))
        assert [text.count("<") for _, _, text in cells] == [1, *gained]
        assert [colour for _, colour, _ in cells[1:]] == [ROUND_COLOURS[min(n, 4)] for n in accepted]
        assert cells[0][1] not in ROUND_COLOURS, "no draft took part in the first token"
        for number, (n, m, (tip, _, _)) in enumerate(zip(accepted, gained, cells[1:], strict=True), 1):
            assert tip == f"round {number}: {n} of 6 draft tokens accepted, {m} tokens gained"


def test_rounds_view_says_it_in_words():
    """The colours' twin: how many rounds of each kind, and the mean of tokens gained."""
    view = rounds_view(generation([0, 3, 0, 5], [1, 4, 1, 6], depth=5), decode)
    assert "2 rounds with 0 accepted, 1 rounds with 3 accepted, 1 rounds with 5 accepted; " in view
    assert "3.00 tokens a round, bonus included" in view
    legend = re.findall(r"background:(#\w+)[^>]*> (\d\+?) <", view.split("</p>")[1])
    assert legend == list(zip(ROUND_COLOURS, ["0", "1", "2", "3", "4+"], strict=True))


@pytest.mark.parametrize("length", [1, 2, 30])
def test_rounds_view_of_plain_decoding(length):
    """No rounds, no colour of a round: the prompt's token, then the rest."""
    answer = generation((), (), depth=0, plain=length)
    view = rounds_view(answer, decode)
    first, rest = spans(view)
    assert first[2] == decode(10) and rest[0] == "plain decoding"
    assert first[2] + rest[2].strip("\xa0") == "".join(map(decode, answer.tokens.tolist()))
    assert not {first[1], rest[1]} & set(ROUND_COLOURS)
    assert "no rounds; 1.00 tokens a round" in view


def test_rounds_view_of_a_draft_that_had_no_turn():
    """The prompt's pass ended the answer: nobody decoded plainly, there was nothing left to draft."""
    view = rounds_view(generation((), (), depth=5), decode)
    assert [text for _, _, text in spans(view)] == [decode(10)] and "no rounds" in view
    assert "plain decoding" not in view


def test_rounds_view_escapes_its_text():
    """Tags, quotes and newlines of tokens stay text; an empty token leaves something to point at."""
    view = rounds_view(generation([1, 0], [2, 1], depth=4), lambda _token: EVIL)
    assert "<script" not in view and "\n" not in view
    assert "".join(text for _, _, text in spans(view)) == 4 * EVIL.replace("\n", "\u23ce")
    assert view.count("<span") == view.count("</span>") == view.count('title="')
    empty = rounds_view(generation([1, 0], [2, 1], depth=4), lambda _token: "")
    assert [text for _, _, text in spans(empty)] == 3 * ["\xa0"]


def best_five(view: str, column: int, columns: int) -> list[tuple[int, int, bool]]:
    """(token, percent, marked as right) of one contract's column of `token_view`."""
    cells = [html.unescape(c) for c in re.findall(r"<td>(.*?)</td>", view)]
    assert len(cells) == 5 * columns
    rows = [re.fullmatch(r"'<(\d+)>' (\d+) %( \(right\))?", c).groups() for c in cells[column::columns]]
    return [(int(token), int(percent), bool(mark)) for token, percent, mark in rows]


def test_token_view_at_every_position(toy):
    """Every scored pair, two contracts: best first, `(right)` on the text's token and nowhere else."""
    forward, trained, captures = toy
    contracts = {"trained": trained, "served": trained.change(taps=TAPS[1:])}
    marked, unknown = 0, 0
    for capture in captures:
        alone = [forward.predict([capture], c) for c in contracts.values()]
        for index, t in enumerate(capture.scored.tolist()):
            view, truth = (
                token_view(forward, capture, contracts, index, decode),
                int(capture.token_ids[t + 2]),
            )
            shown = html.unescape(view)
            assert f"position {t} of {capture.name}: " in shown and f"<b>[{decode(truth)}]</b>" in shown
            before = "".join(map(decode, capture.token_ids[max(0, t - 12) : t + 2].tolist()))
            assert f"{chr(0x2026) * (t > 12)}{before}<b>" in shown
            known = bool(forward.in_vocab[truth])
            assert ("(not in the draft's vocabulary)" in view) is not known
            unknown += not known
            for column, p in enumerate(alone):
                best = best_five(view, column, columns=2)
                tokens, percents, right = zip(*best, strict=True)
                assert tokens[0] == int(p.target_ids[index, 0]) and len(set(tokens)) == 5
                assert list(percents) == sorted(percents, reverse=True) and sum(percents) <= 102
                assert list(right) == [token == truth for token in tokens]
                marked += sum(right)
    assert marked and unknown, "the toy shows neither a right token nor an unknown one: pick another seed"


def test_token_view_shows_the_norms_of_every_tap(toy):
    """Norms of the states at the shown position, each with its tap's name."""
    forward, contract, captures = toy
    t = int(captures[1].scored[5])
    norms = [f"{tap} {captures[1].state(tap)[t].norm():.1f}" for tap in captures[1].taps]
    assert "norms of the states: " + ", ".join(norms) in token_view(
        forward, captures[1], {"only": contract}, 5, decode
    )


def test_token_view_beyond_the_end_shows_the_last(toy):
    """A short text under a slider made for the longest one."""
    forward, contract, captures = toy
    last = len(captures[0].scored) - 1
    views = {token_view(forward, captures[0], {"only": contract}, last + n, decode) for n in (0, 1, 1000)}
    assert len(views) == 1


def test_token_view_escapes_its_text(toy):
    """Tokens, a capture's name and a contract's name are data."""
    forward, contract, captures = toy
    named = replace(captures[1], name="<i>")
    view = token_view(forward, named, {"<u>": contract}, 3, lambda _token: EVIL)
    assert not re.search("<script|<i>|<u>", view)
    assert "&lt;script&gt;" in view and "of &lt;i&gt;: " in view and "&lt;u&gt;" in view


def shown(box) -> list[dict]:
    """What an explorer shows, after making sure that nothing failed."""
    outputs = box.children[1].outputs
    assert all(o["output_type"] == "display_data" for o in outputs), outputs
    return [o["data"] for o in outputs]


def change(box, name: str, value) -> list[dict]:
    """Set one control; what is shown then."""
    controls(box)[name].value = value
    return shown(box)


def test_norms_explorer_reacts(toy, shell):
    """Both controls redraw: a figure per change, and none left open behind."""
    _, _, captures = toy
    before = plt.get_fignums()
    box = norms_explorer(captures)
    assert "explorer" in box._dom_classes and len(shown(box)) == 1
    for name, value in (("tap", captures[0].taps[3]), ("text", 2)):
        (seen,) = change(box, name, value)
        assert "Figure" in seen["text/plain"], name
    assert plt.get_fignums() == before


def test_wiring_explorer_reacts(toy, shell):
    """Every control changes what is shown, and what is shown is the pure view of the choices."""
    forward, contract, captures = toy
    other = contract.change(norm_before_residual=True)
    box = wiring_explorer({"a": forward, "b": forward}, {"a": contract, "b": other}, captures, decode)
    views = [shown(box)[0]["text/html"]]
    assert views[0] == wiring_view(forward, captures, contract, contract.taps, 0, decode)
    assert list(controls(box)) == ["draft", "slot 0", "slot 1", "slot 2", "text"]
    for name, value in (("text", 1), ("slot 0", captures[0].taps[3]), ("draft", "b")):
        views.append(change(box, name, value)[0]["text/html"])
    taps = [captures[0].taps[3], *contract.taps[1:]]
    assert views[-1] == wiring_view(forward, captures, other, taps, 1, decode)
    assert len(set(views)) == 4, "a control changed nothing"


def test_conversation_explorer_reacts(toy, shell):
    """One slider: the view of the chosen text under the one contract given."""
    forward, contract, captures = toy
    box = conversation_explorer(forward, captures, contract, decode)
    wanted = wiring_view(forward, captures, contract, contract.taps, 2, decode)
    assert change(box, "text", 2)[0]["text/html"] == wanted


def test_learning_explorer_draws_every_metric(shell):
    """Each column of a training log can be chosen, and the axis names it."""
    rows = {"step": [100, 100], "split": ["train", "heldout"], "loss": [2.0, 2.1], "full_acc_0": [0.4, 0.3]}
    box = learning_explorer({"(a)": pd.DataFrame(rows)})
    assert controls(box)["metric"].options == ("loss", "full_acc_0")
    assert "Figure" in change(box, "metric", "full_acc_0")[0]["text/plain"]


def test_rounds_explorer_shows_every_choice(shell):
    """Every prompt of every deployment: the pure view of it, the last deployment first."""
    runs = {
        "plain": [generation((), (), 0, plain=n) for n in (4, 5, 6)],
        "drafted": [generation([n, 0], [n + 1, 1], 3) for n in (0, 1, 3)],
    }
    box = rounds_explorer(runs, decode)
    assert shown(box)[0]["text/html"] == rounds_view(runs["drafted"][0], decode)
    assert (controls(box)["prompt"].min, controls(box)["prompt"].max) == (0, 2)
    views = set()
    for name, order in (("plain", (1, 2, 0)), ("drafted", (1, 2, 0))):
        change(box, "deployment", name)
        for prompt in order:
            (seen,) = change(box, "prompt", prompt)
            assert seen["text/html"] == rounds_view(runs[name][prompt], decode)
            views.add(seen["text/html"])
    assert len(views) == 6, "two choices look the same"


def test_rounds_explorer_offers_the_prompts_that_all_have(shell):
    """Where a deployment answered fewer prompts, the slider ends with it."""
    one = generation([1], [2], 3)
    box = rounds_explorer({"a": [one, one, one], "b": [one, one]}, decode)
    assert controls(box)["prompt"].max == 1


def test_token_explorer_shows_every_position(toy, shell):
    """Every position of every text, also those that only the longest one has."""
    forward, contract, captures = toy
    box = token_explorer(forward, captures, {"only": contract}, decode)
    slider = controls(box)["position"]
    assert shown(box)[0]["text/html"] == token_view(
        forward, captures[0], {"only": contract}, slider.value, decode
    )
    assert (slider.min, slider.max) == (0, len(captures[2].scored) - 1)
    for conversation in (1, 2, 0):
        views = [change(box, "text", conversation)[0]["text/html"]]
        for index in (*range(slider.value + 1, slider.max + 1), *range(slider.value + 1)):
            (seen,) = change(box, "position", index)
            views.append(seen["text/html"])
        # each scored pair has a view of its own, and the slider's whole range reached all of them
        assert len(set(views)) == len(captures[conversation].scored)
        assert views[-1] == token_view(
            forward, captures[conversation], {"only": contract}, slider.value, decode
        )


def test_token_explorer_of_short_texts(toy, shell):
    """Fewer positions than the slider's first value: it starts at the last one."""
    forward, contract, captures = toy
    box = token_explorer(forward, [captures[0].first(12)], {"only": contract}, decode)
    assert controls(box)["position"].value == controls(box)["position"].max < 12 and len(shown(box)) == 1


def test_speed_explorer_shows_every_depth(shell):
    """Every depth that all wirings have: its row of each table, a figure that marks it, none left open."""
    columns = {"tokens per round": 1.5, "ratio": 0.5}
    predicted = {
        "trained": pd.DataFrame({c: {d: v + d / 8 for d in (1, 2, 4, 8)} for c, v in columns.items()}),
        "served": pd.DataFrame({c: {d: v - d / 64 for d in (1, 2, 8, 15)} for c, v in columns.items()}),
    }
    measured = {"trained": {2: Speed((10.0, 12.0), (0.7, 0.8), 1.7)}}
    before = plt.get_fignums()
    box = speed_explorer(predicted, measured)
    slider = controls(box)["draft tokens"]
    assert slider.options == (1, 2, 8) and slider.value == 1 and len(shown(box)) == 2
    for depth in (2, 8, 1):
        table, figure = change(box, "draft tokens", depth)
        cells = [float(cell) for cell in re.findall("<td>(.*?)</td>", table["text/html"])]
        assert cells == [rows[c][depth] for rows in predicted.values() for c in columns], depth
        assert "Figure" in figure["text/plain"]
    assert plt.get_fignums() == before


def test_costs_view_is_the_arithmetic_of_a_round():
    """Ratio = tokens per round / (target pass + draft tokens x cost of one), for each wiring and depth."""
    gains = {"declared": pd.Series([1.2, 1.4], [1, 2]), "best": pd.Series([1.6, 2.4], [1, 2])}
    figure = costs_view(gains, 1.5, 0.25)
    lines = {line.get_label(): list(line.get_ydata()) for line in figure.axes[0].lines}
    assert lines["declared, predicted"] == pytest.approx([1.2 / 1.75, 1.4 / 2.0])
    assert lines["best, predicted"] == pytest.approx([1.6 / 1.75, 2.4 / 2.0])
    assert "1.5" in figure.axes[0].get_title(loc="left") and "0.25" in figure.axes[0].get_title(loc="left")
    plt.close(figure)


def test_costs_explorer_reacts_to_both_costs(shell):
    """Each slider redraws, and starts at the given cost even outside its usual range."""
    gains = {"declared": pd.Series([1.2, 1.4], [1, 2])}
    box = costs_explorer(gains, 7.5, 0.0)
    assert controls(box)["target pass"].value == 7.5 and controls(box)["a draft token"].value == 0.0
    for name, value in (("target pass", 2.0), ("a draft token", 0.5)):
        (seen,) = change(box, name, value)
        assert "image/png" in seen or "Figure" in seen["text/plain"]


def test_errors_show_and_free_the_controls(toy, shell):
    """A text of two tokens has nothing to score: the message appears, and the next choice works."""
    forward, contract, captures = toy
    short = captures[0]
    none = replace(short, loss_mask=short.loss_mask & False)
    box = wiring_explorer({"a": forward}, {"a": contract}, [short, none], decode)
    controls(box)["text"].value = 1
    (failed,) = box.children[1].outputs
    assert failed["output_type"] == "stream" and "What to do:" in failed["text"]
    assert "in-vocab tokens right" in change(box, "text", 0)[0]["text/html"]


@pytest.mark.slow
def test_output_widget_changes_in_a_kernel(root):
    """In a real kernel, without a browser, a new value replaces what the Output widget holds."""
    import nbformat
    from nbclient import NotebookClient

    lines = """
from ipywidgets import IntSlider
from lib.widgets import shell
from IPython.display import HTML, display
slider = IntSlider(1, 0, 9)
box = shell({"n": slider}, lambda n: display(HTML(f"<b>{n}</b>")))
# cell
slider.value = 7
# cell
print([o["data"]["text/html"] for o in box.children[1].outputs])
"""
    cells = [nbformat.v4.new_code_cell(source) for source in lines.split("# cell")]
    notebook = nbformat.v4.new_notebook(cells=cells)
    NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(root)}}).execute()
    assert notebook.cells[2].outputs[0].text == "['<b>7</b>']\n"
