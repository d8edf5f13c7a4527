"""Explorers: each is a pure function from choices to something shown, plus a thin shell of widgets.

The pure functions are tested over their whole range without a browser; the shells only connect
controls to them. A callback that fails shows its error in the output, it never freezes a control.
"""

from __future__ import annotations

import html
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import ipywidgets as widgets
import matplotlib.pyplot as plt
import pandas as pd
from IPython.display import HTML, display
from IPython.utils.capture import capture_output
from matplotlib.figure import Figure

from lib.captures import Capture
from lib.contract import Contract, diff
from lib.decoding import Generation
from lib.draft import DraftForward
from lib.errors import WorkbookError
from lib.metrics import in_vocab_accuracy
from lib.plots import plot_learning, plot_speed_by_depth, plot_text_norms
from lib.speeds import Speed

# Draft tokens accepted in a round: 0, 1, 2, 3, 4 or more.
ROUND_COLOURS = ("#F9DCCB", "#DCEBF5", "#AFD3EA", "#6FB1D9", "#0072B2")
SHOWN = 48  # tokens of the answer in a view: what fits without scrolling


def norms_view(captures: Sequence[Capture], conversation: int, tap) -> Figure:
    """Norm per position of one conversation at one tap."""
    capture = captures[conversation]
    return plot_text_norms(capture, tap, f"{capture.name}: norms at {tap}")


def wiring_view(
    forward: DraftForward,
    captures: Sequence[Capture],
    base: Contract,
    taps: Sequence,
    conversation: int,
    decode: Callable[[int], str],
) -> str:
    """One conversation under a chosen wiring, as HTML: accuracy, the change, hit and missed tokens.

    Args:
        base: contract to change; its taps are the reference for the difference shown.
        taps: the wiring chosen, one per slot.
        decode: target id -> text.
    """
    contract = base.change(taps=tuple(taps))
    p = forward.predict([captures[conversation]], contract)
    ratio = in_vocab_accuracy(p)
    changes = "; ".join(diff(base, contract)) or "unchanged"
    fed = f"fed {' '.join(map(str, contract.taps))} ({changes})"
    cells = []
    for hit, known, truth, guess in zip(
        p.hit[:SHOWN, 0].tolist(), p.in_vocab[:SHOWN, 0].tolist(),
        p.truth[:SHOWN, 0].tolist(), p.target_ids[:SHOWN, 0].tolist(), strict=True,
    ):  # fmt: skip
        colour = "#CFE8F5" if hit else "#F9DCCB" if known else "#E6E6E6"
        text = html.escape(decode(truth)).replace("\n", "&#9166;") or "&nbsp;"
        tip = html.escape(f"draft said {decode(guess)!r}", quote=True)
        cells.append(f'<span title="{tip}" style="background:{colour};color:#111">{text}</span>')
    name = html.escape(captures[conversation].name)
    return (
        f"<p><b>{name}</b>: {ratio.numerator} of {ratio.denominator} in-vocab tokens right, "
        f"<b>{100 * ratio.value:.1f} %</b><br>{html.escape(fed)}</p>"
        f"<p style='line-height:1.9;max-width:60em;white-space:pre-wrap'>{''.join(cells)}</p>"
        "<p><small>blue: the draft's token equals the text's; orange: it does not; grey: the token "
        "is not in the draft's vocabulary. Hover for the draft's choice.</small></p>"
    )


def rounds_view(generation: Generation, decode: Callable[[int], str]) -> str:
    """A generated answer as HTML, each round coloured by how many draft tokens survived in it."""
    tokens = generation.tokens.tolist()
    cells = [_cell(decode(tokens[0]), "#E6E6E6", "from the prompt's pass, no draft yet")]
    at = 1
    for number, (accepted, gained) in enumerate(zip(generation.accepted, generation.gained, strict=True), 1):
        text = "".join(decode(token) for token in tokens[at : at + gained])
        tip = (
            f"round {number}: {accepted} of {generation.depth} draft tokens accepted, {gained} tokens gained"
        )
        cells.append(_cell(text, ROUND_COLOURS[min(accepted, len(ROUND_COLOURS) - 1)], tip))
        at += gained
    if not generation.depth:
        cells.append(_cell("".join(decode(t) for t in tokens[1:]), "#FFFFFF", "plain decoding"))
    counts = Counter(generation.accepted)
    twin = ", ".join(f"{counts[n]} rounds with {n} accepted" for n in sorted(counts)) or "no rounds"
    shades = " ".join(_cell(f" {n}{'+' * (n == 4)} ", c, "") for n, c in enumerate(ROUND_COLOURS))
    return (
        f"<p style='line-height:1.9;max-width:60em;white-space:pre-wrap'>{''.join(cells)}</p>"
        f"<p><small>draft tokens accepted in the round: {shades}. {twin}; "
        f"{generation.tokens_per_round:.2f} tokens a round, bonus included.</small></p>"
    )


def _cell(text: str, colour: str, tip: str) -> str:
    shown = html.escape(text).replace("\n", "&#9166;") or "&nbsp;"
    ink = "#fff" if colour == ROUND_COLOURS[-1] else "#111"
    style = f"background:{colour};color:{ink};border-right:2px solid #fff"
    return f'<span title="{html.escape(tip, quote=True)}" style="{style}">{shown}</span>'


def token_view(
    forward: DraftForward,
    capture: Capture,
    contracts: Mapping[str, Contract],
    index: int,
    decode: Callable[[int], str],
) -> str:
    """One scored position as HTML: norms per tap, and the draft's five best tokens under each contract."""
    table, position = {}, 0
    for name, contract in contracts.items():
        p = forward.predict([capture], contract, keep_logits=True)
        index = min(index, len(p.position) - 1)
        position, truth = int(p.position[index]), int(p.truth[index, 0])
        share, ids = p.logits[index, 0].float().softmax(-1).topk(5)
        target = forward.draft.to_target(ids, contract.vocab_map).tolist()
        table[name] = [
            f"{decode(i)!r} {100 * s:.0f} %{' (right)' * (i == truth)}"
            for i, s in zip(target, share.tolist(), strict=True)
        ]
    frame = pd.DataFrame(table, index=[f"{n}." for n in range(1, 6)])
    norms = ", ".join(f"{t} {float(capture.state(t)[position].float().norm()):.1f}" for t in capture.taps)
    ids = capture.token_ids.tolist()
    start = max(0, position - 12)
    before = "\u2026" * (start > 0) + "".join(decode(i) for i in ids[start : position + 2])
    wanted = decode(truth).replace("\n", "\u23ce")
    known = "" if forward.in_vocab[truth] else " (not in the draft's vocabulary)"
    return (
        f"<p>position {position} of {html.escape(capture.name)}: {html.escape(before)}<b>"
        f"[{html.escape(wanted)}]</b>{known}<br>norms of the states: {norms}</p>" + frame.to_html()
    )


def shell(controls: Mapping[str, widgets.Widget], draw: Callable[..., None]) -> widgets.VBox:
    """Controls above an output that `draw(**values)` fills; redrawn whenever a value changes.

    What is drawn is collected here and handed over whole. `with output:` would ask the front end to
    collect it, and nbclient, which plays the front end when no browser is there, sometimes stops then
    (nbclient#312: the cell never ends).
    """
    output = widgets.Output()

    def update(_change=None) -> None:
        with capture_output() as seen:
            try:
                draw(**{name: control.value for name, control in controls.items()})
            except WorkbookError as err:
                print(err)
        said = [{"output_type": "stream", "name": "stdout", "text": seen.stdout}] if seen.stdout else []
        shown = [
            {"output_type": "display_data", "data": o.data, "metadata": o.metadata or {}}
            for o in seen.outputs
        ]
        output.outputs = (*said, *shown)

    for control in controls.values():
        control.observe(update, names="value")
        if control.layout.width is None:
            control.layout.width = "190px" if isinstance(control, widgets.Dropdown) else "300px"
    row = widgets.HBox(list(controls.values()), layout=widgets.Layout(flex_flow="row wrap"))
    box = widgets.VBox([row, output])
    box.add_class("explorer")
    update()
    return box


def norms_explorer(captures: Sequence[Capture]) -> widgets.VBox:
    """Choose a tap and a conversation; see its norms."""
    controls = {
        "tap": widgets.Dropdown(
            options=[(str(t), t) for t in captures[0].taps], value=captures[0].taps[1],
            description="tap",
        ),
        "conversation": widgets.IntSlider(
            0, 0, len(captures) - 1, description="text", continuous_update=False
        ),
    }  # fmt: skip

    def draw(tap, conversation: int) -> None:
        figure = norms_view(captures, conversation, tap)
        display(figure)
        plt.close(figure)

    return shell(controls, draw)


def wiring_explorer(
    forwards: Mapping[str, DraftForward],
    contracts: Mapping[str, Contract],
    captures: Sequence[Capture],
    decode: Callable[[int], str],
) -> widgets.VBox:
    """Choose a draft and what feeds each slot; see one conversation's tokens hit or missed."""
    first = next(iter(forwards))
    options = [(str(t), t) for t in captures[0].taps]
    controls: dict[str, widgets.Widget] = {
        "draft": widgets.Dropdown(options=list(forwards), value=first, description="draft")
    }
    for slot, tap in enumerate(contracts[first].taps):
        controls[f"slot{slot}"] = widgets.Dropdown(options=options, value=tap, description=f"slot {slot}")
    controls["conversation"] = widgets.IntSlider(
        0, 0, len(captures) - 1, description="text", continuous_update=False
    )

    def draw(draft: str, conversation: int, **slots) -> None:
        taps = [slots[f"slot{i}"] for i in range(len(slots))]
        view = wiring_view(forwards[draft], captures, contracts[draft], taps, conversation, decode)
        display(HTML(view))

    return shell(controls, draw)


def conversation_explorer(
    forward: DraftForward,
    captures: Sequence[Capture],
    contract: Contract,
    decode: Callable[[int], str],
) -> widgets.VBox:
    """Choose a conversation; see which of its tokens the draft predicts under one contract."""
    controls = {
        "conversation": widgets.IntSlider(
            0, 0, len(captures) - 1, description="text", continuous_update=False
        )
    }  # fmt: skip

    def draw(conversation: int) -> None:
        display(HTML(wiring_view(forward, captures, contract, contract.taps, conversation, decode)))

    return shell(controls, draw)


def learning_explorer(logs: Mapping[str, pd.DataFrame]) -> widgets.VBox:
    """Choose a metric of the trainer's log; see it over the steps."""
    columns = [c for c in next(iter(logs.values())).columns if c not in ("step", "split")]
    controls = {"metric": widgets.Dropdown(options=columns, value=columns[0], description="metric")}

    def draw(metric: str) -> None:
        figure = plot_learning(
            logs, f"{metric}: lines while training, dots on held-out conversations", metric
        )
        display(figure)
        plt.close(figure)

    return shell(controls, draw)


def rounds_explorer(runs: Mapping[str, Sequence[Generation]], decode: Callable[[int], str]) -> widgets.VBox:
    """Choose a deployment and a prompt; see its rounds."""

    def draw(deployment: str, prompt: int) -> None:
        display(HTML(rounds_view(runs[deployment][prompt], decode)))

    longest = min(len(done) for done in runs.values())
    return shell(
        {
            "deployment": widgets.Dropdown(
                options=list(runs), value=list(runs)[-1], description="deployment"
            ),
            "prompt": widgets.IntSlider(0, 0, longest - 1, description="prompt", continuous_update=False),
        },
        draw,
    )


def token_explorer(
    forward: DraftForward,
    captures: Sequence[Capture],
    contracts: Mapping[str, Contract],
    decode: Callable[[int], str],
) -> widgets.VBox:
    """Choose a conversation and a position; see norms, the truth, and the draft's choices."""
    longest = max(len(c.scored) for c in captures)

    def draw(conversation: int, position: int) -> None:
        display(HTML(token_view(forward, captures[conversation], contracts, position, decode)))

    return shell(
        {
            "conversation": widgets.IntSlider(
                0, 0, len(captures) - 1, description="text", continuous_update=False
            ),
            "position": widgets.IntSlider(
                12, 0, longest - 1, description="position", continuous_update=False
            ),
        },
        draw,
    )


def speed_explorer(
    predicted: Mapping[str, pd.DataFrame], measured: Mapping[str, Mapping[int, Speed]]
) -> widgets.VBox:
    """Move the number of draft tokens; see what it costs and gives under each wiring."""
    depths = sorted(set.intersection(*(set(t.index) for t in predicted.values())))

    def draw(depth: int) -> None:
        display(pd.DataFrame({name: table.loc[depth] for name, table in predicted.items()}).T)
        figure = plot_speed_by_depth(predicted, measured, f"{depth} draft tokens a round", marked=depth)
        display(figure)
        plt.close(figure)

    slider = widgets.SelectionSlider(
        options=depths, value=depths[0], description="draft tokens", continuous_update=False
    )
    return shell({"depth": slider}, draw)


def costs_view(gains: Mapping[str, pd.Series], verify_cost: float, draft_cost: float) -> Figure:
    """Predicted speed against draft tokens, for costs in plain decoding steps.

    Args:
        gains: wiring ("declared", "best") -> tokens per round (bonus included) by draft tokens.
        verify_cost: a target pass over a round's tokens. draft_cost: one draft token.
    """
    tables = {
        name: pd.DataFrame({"ratio": gain / (verify_cost + draft_cost * gain.index.to_numpy())})
        for name, gain in gains.items()
    }
    title = f"Target pass {verify_cost:g} plain steps, a draft token {draft_cost:g}"
    return plot_speed_by_depth(tables, {}, title)


def costs_explorer(gains: Mapping[str, pd.Series], verify_cost: float, draft_cost: float) -> widgets.VBox:
    """Move the costs of a round; see where speculation pays under each wiring."""
    controls = {
        name: widgets.SelectionSlider(
            options=[(f"{v:g}", v) for v in sorted({value, *(round(step * i, 2) for i in range(1, 51))})],
            value=value, description=text, continuous_update=False,
            style={"description_width": "8em"},
        )
        for name, value, step, text in (
            ("verify_cost", verify_cost, 0.1, "target pass"),
            ("draft_cost", draft_cost, 0.02, "a draft token"),
        )
    }  # fmt: skip

    def draw(verify_cost: float, draft_cost: float) -> None:
        figure = costs_view(gains, verify_cost, draft_cost)
        display(figure)
        plt.close(figure)

    return shell(controls, draw)


def token_decoder(folder) -> Callable[[int], str]:
    """Target id -> text, from the target's own `tokenizer.json`."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return lambda token: tokenizer.decode([int(token)], skip_special_tokens=False)
