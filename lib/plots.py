"""Figures: one function each, shared colours, the finding in the title (given by the notebook)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure

from lib.captures import Capture
from lib.metrics import Ratio
from lib.norms import position_norms
from lib.speeds import Speed
from lib.sweep import Sweep

# One colour per meaning in every notebook (Okabe-Ito, distinguishable without red and green).
COLOURS = {
    "trained": "#0072B2",
    "served": "#D55E00",
    "best": "#0072B2",  # in a report: the wiring that wins, and the one the files declare
    "declared": "#D55E00",
    "control": "#999999",
    "other": "#B8C4CC",
    "trainer's log": "#009E73",
    "embed": "#CC79A7",
    "layer3": "#E69F00",
    "layer16": "#56B4E9",
    "layer28": "#0072B2",
    "final": "#009E73",
}


def new_figure(width: float = 9.0, height: float = 3.8) -> tuple[Figure, plt.Axes]:
    """An empty figure in the style of all of them, inches."""
    figure, axes = plt.subplots(figsize=(width, height), layout="constrained", dpi=100)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def plot_norms(table: pd.DataFrame, title: str) -> Figure:
    """Per tap: 1st to 99th percentile, median, and both means, on a logarithmic axis."""
    figure, axes = new_figure()
    y = np.arange(len(table))[::-1]
    axes.hlines(y, table["p1"], table["p99"], color=COLOURS["other"], lw=9, label="1 % to 99 %")
    axes.plot(table["median"], y, "|", ms=16, mew=2, color="black", label="median")
    axes.plot(table["mean (no sinks)"], y, "o", color=COLOURS["trained"], label="mean without sinks")
    axes.plot(table["mean (all)"], y, "D", color=COLOURS["served"], label="mean of all")
    axes.plot(table["max"], y, "x", color="black", label="largest position")
    axes.set_yticks(y, table.index)
    axes.set_xscale("log")
    axes.set_xlabel("norm of the state at one position (log scale)")
    axes.set_title(title, loc="left")
    axes.legend(loc="upper right", fontsize=8, frameon=False)
    return figure


def plot_norm_profile(captures: Sequence[Capture], taps: Sequence, title: str) -> Figure:
    """Median norm over conversations at each position of the text, one line per tap."""
    figure, axes = new_figure()
    length = min(len(c) for c in captures)
    for tap in taps:
        norms = torch.stack([position_norms(c.state(tap)[:length]) for c in captures])
        label = str(tap)
        axes.plot(norms.median(0).values, label=label, color=COLOURS.get(label, "black"), lw=1.6)
    axes.set_yscale("log")
    axes.set_xlabel(f"position in the text (first {length}, median of {len(captures)} texts)")
    axes.set_ylabel("norm (log scale)")
    axes.set_title(title, loc="left")
    axes.legend(fontsize=8, frameon=False, ncols=len(taps), loc="upper right")
    return figure


def plot_text_norms(capture: Capture, tap, title: str) -> Figure:
    """Norm at each position of one text; the assistant's part shaded."""
    figure, axes = new_figure(9.0, 3.0)
    norms = position_norms(capture.state(tap))
    axes.plot(norms, color=COLOURS.get(str(tap), "black"), lw=1.4)
    answer = capture.loss_mask.nonzero().flatten()
    axes.axvspan(int(answer[0]), int(answer[-1]), color=COLOURS["other"], alpha=0.3, lw=0)
    axes.set_yscale("log")
    axes.set_xlabel("position (shaded: the assistant's answer)")
    axes.set_ylabel(f"norm at {tap}")
    axes.set_title(title, loc="left")
    return figure


def plot_ratios(rows: Mapping[str, Ratio], colours: Mapping[str, str], title: str) -> Figure:
    """Horizontal bars with intervals, one per variant."""
    figure, axes = new_figure(9.0, 0.9 + 0.5 * len(rows))
    names = list(rows)
    y = np.arange(len(names))[::-1]
    values = np.array([100 * rows[n].value for n in names])
    spread = np.array([[100 * (r.value - r.low), 100 * (r.high - r.value)] for r in rows.values()])
    axes.barh(
        y, values, 0.62, xerr=spread.T, color=[COLOURS[colours[n]] for n in names],
        error_kw={"lw": 1.2, "capsize": 3},
    )  # fmt: skip
    for at, value, (_, up) in zip(y, values, spread, strict=True):
        axes.text(value + up + 1, at, f"{value:.1f} %", va="center", fontsize=9)
    axes.set_yticks(y, names)
    axes.set_xlim(0, max(100, values.max() + 12))
    axes.set_xlabel("% (whiskers: 95 % interval over conversations)")
    axes.set_title(title, loc="left")
    return figure


def plot_sweep(sweep: Sweep, highlight: Mapping[tuple, str], title: str) -> Figure:
    """Every candidate's accuracy, best first; `highlight` maps a tap tuple to a colour name."""
    figure, axes = new_figure(9.5, 4.6)
    order = sweep.order
    labels = [" ".join(map(str, sweep.contracts[i].taps)) for i in order]
    colours = [COLOURS[highlight.get(sweep.contracts[i].taps, "other")] for i in order]
    values = [100 * float(sweep.accuracy[i]) for i in order]
    axes.bar(range(len(order)), values, color=colours)
    axes.set_xticks(range(len(order)), labels, rotation=90, fontsize=7.5)
    axes.set_ylabel("in-vocab accuracy, %")
    axes.set_title(title, loc="left")
    handles = [plt.Rectangle((0, 0), 1, 1, color=COLOURS[name]) for name in dict.fromkeys(highlight.values())]
    axes.legend(handles, dict.fromkeys(highlight.values()), frameon=False, fontsize=9)
    return figure


def plot_learning(logs: Mapping[str, pd.DataFrame], title: str, metric: str = "full_acc_0") -> Figure:
    """One of speculators' metrics: lines on training conversations, dots on held-out ones."""
    figure, axes = new_figure()
    for (name, log), colour in zip(logs.items(), ("#0072B2", "#D55E00", "#009E73"), strict=False):
        train, held = log[log.split == "train"], log[log.split == "heldout"]
        axes.plot(train.step, train[metric], color=colour, alpha=0.5, lw=1.4)
        axes.plot(held.step, held[metric], "o-", color=colour, label=f"{name}, held-out")
    axes.set_xlabel("step")
    axes.set_ylabel(metric)
    axes.set_title(title, loc="left")
    axes.legend(frameon=False, fontsize=9)
    return figure


def plot_speeds(panels: Mapping[str, Mapping[str, Speed]], colours: Mapping[str, str], title: str) -> Figure:
    """Speed as a ratio to no speculation, one panel per place; whiskers over repeats."""
    count = max(len(rows) for rows in panels.values())
    figure, all_axes = plt.subplots(
        1, len(panels), figsize=(4.9 * len(panels), 1.3 + 0.42 * count), layout="constrained",
        dpi=100, squeeze=False,
    )  # fmt: skip
    for axes, (place, rows) in zip(all_axes[0], panels.items(), strict=True):
        axes.spines[["top", "right"]].set_visible(False)
        y = np.arange(len(rows))[::-1]
        values = np.array([speed.ratio for speed in rows.values()])
        spread = np.array([[s.ratio - min(s.ratios), max(s.ratios) - s.ratio] for s in rows.values()])
        axes.barh(
            y, values, 0.62, xerr=spread.T, color=[COLOURS[colours[n]] for n in rows],
            error_kw={"lw": 1.2, "capsize": 3},
        )  # fmt: skip
        for at, speed, (_, up) in zip(y, rows.values(), spread, strict=True):
            axes.text(
                speed.ratio + up + 0.03,
                at,
                f"{speed.ratio:.2f}x  {speed.rate:.0f} tok/s",
                va="center",
                fontsize=8.5,
            )
        axes.axvline(1, color="black", lw=0.8)
        axes.set_yticks(y, list(rows), fontsize=9)
        axes.set_xlim(0, max(1.2, (values + spread[:, 1]).max()) * 1.42)
        axes.set_xlabel(f"{place}: speed / no speculation", fontsize=9)
    figure.suptitle(title, x=0.01, ha="left")
    return figure


def plot_speed_by_depth(
    predicted: Mapping[str, pd.DataFrame], measured: Mapping[str, Mapping[int, Speed]], title: str,
    marked: int | None = None,
) -> Figure:  # fmt: skip
    """Speed ratio against draft tokens a round: lines predicted, dots measured (whiskers over repeats)."""
    figure, axes = new_figure()
    for name, table in predicted.items():
        axes.plot(table.index, table["ratio"], color=COLOURS[name], label=f"{name}, predicted")
        for depth, speed in measured.get(name, {}).items():
            spread = [[speed.ratio - min(speed.ratios)], [max(speed.ratios) - speed.ratio]]
            axes.errorbar(depth, speed.ratio, yerr=spread, fmt="o", color=COLOURS[name], capsize=3)
    axes.axhline(1, color="black", lw=0.8)
    if marked is not None:
        axes.axvline(marked, color=COLOURS["control"], lw=6, alpha=0.3)
    axes.set_xlabel("draft tokens a round (dots: measured live)" if measured else "draft tokens a round")
    axes.set_ylabel("speed / no speculation")
    axes.set_ylim(bottom=0)
    axes.set_title(title, loc="left")
    axes.legend(frameon=False, fontsize=9)
    return figure


def plot_definitions(rows: pd.DataFrame, title: str) -> Figure:
    """One line per definition, its value under each wiring as a dot; columns are colour names."""
    figure, axes = new_figure(9.0, 0.9 + 0.33 * len(rows))
    y = np.arange(len(rows))[::-1]
    axes.hlines(y, 100 * rows.min(axis=1), 100 * rows.max(axis=1), color=COLOURS["other"], lw=1.5)
    for name in rows.columns:
        axes.plot(100 * rows[name], y, "o", color=COLOURS[name], label=name)
    axes.set_yticks(y, rows.index, fontsize=8.5)
    axes.set_xlabel("% at the first draft token")
    axes.set_xlim(left=0)
    axes.set_title(title, loc="left")
    axes.legend(frameon=False, fontsize=9, loc="center left")
    return figure
