"""The README's table of benchmarks, from bench/results/*.json: aim, what was measured, and whether it is met.

    .venv/bin/python bench/table.py        (the last step of `make bench`)

Whether an aim is met is computed here, from the median. "-" stands for what has not been measured.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results"
BEGIN, END = "<!-- bench:begin (make bench writes this part) -->", "<!-- bench:end -->"
SHAPES = ("sample", "kimi")


@dataclass(frozen=True)
class Aim:
    """A bound on a ratio, and on which side of it the aim lies."""

    bound: float
    at_most: bool

    def __str__(self) -> str:
        """`at most 1.3`."""
        return f"at {'most' if self.at_most else 'least'} {self.bound:g}"

    def met(self, value: float) -> bool:
        return value <= self.bound if self.at_most else value >= self.bound


def at_most(bound: float) -> Aim:
    return Aim(bound, True)


def at_least(bound: float) -> Aim:
    return Aim(bound, False)


FORWARD, WINNER = "draft_forward", "share with the exact winner"
# Text, aim, record, and the keys in it; "*" stands for the shape, a row without it has one column for both.
ROWS: tuple[tuple[str, Aim | None, str, tuple[str, ...]], ...] = (
    ("scoring, ours / its matrix products alone", at_most(1.3), FORWARD, ("*", "step 0", "ours / floor")),
    ("scoring, speculators / the same products", None, FORWARD, ("*", "step 0", "speculators / floor")),
    ("scoring, speculators (at all positions) / ours", at_least(1.6), FORWARD,
     ("*", "step 0", "speculators / ours")),
    ("scoring at all positions, speculators / ours", None, FORWARD,
     ("*", "step 0", "speculators / ours, all positions")),
    ("scoring, SpecForge (at all positions) / ours", None, FORWARD, ("*", "step 0", "SpecForge / ours")),
    ("8 depths, ours / their matrix products alone", None, FORWARD, ("*", "depths", "ours / floor")),
    ("8 depths, speculators / the same products", None, FORWARD, ("*", "depths", "speculators / floor")),
    ("8 depths, speculators (at all positions) / ours", at_least(2.5), FORWARD,
     ("*", "depths", "speculators / ours")),
    ("8 depths at all positions, speculators / ours", None, FORWARD,
     ("*", "depths", "speculators / ours, all positions")),
    ("8 depths, SpecForge (at all positions) / ours", None, FORWARD, ("*", "depths", "SpecForge / ours")),
    ("8 depths, speculators / its own single step", None, FORWARD,
     ("*", "depths", "speculators / speculators, one step")),
    ("chains of 8 from every position / one pass", at_most(10), FORWARD,
     ("*", "rollouts", "rollouts / single pass")),
    ("24 orders, exact / one pass", None, FORWARD, ("*", "sweeps", "24 exact / single pass")),
    ("24 orders, raced / one pass", at_most(6), FORWARD, ("*", "sweeps", "24 raced / single pass")),
    ("200 contracts, raced / one pass", at_most(15), FORWARD, ("*", "sweeps", "200 raced / single pass")),
    ("resampled races of 24 with the exact winner", at_least(0.99), FORWARD,
     ("*", "sweeps", "24: resampled", WINNER)),
    ("resampled races of 200 with the exact winner", at_least(0.99), FORWARD,
     ("*", "sweeps", "200: resampled", WINNER)),
    ("norms of a folder / reading it once", at_most(1.3), "norms", ("*", "ours / read")),
    ("norms, torch's one-liner / ours", None, "norms", ("*", "torch / ours")),
    ("norms, numpy's / ours", None, "norms", ("*", "numpy / ours")),
    ("peak memory beside weights (hidden 1024), draft vocabulary 128k / 8k", at_most(1.1), "memory",
     ("draft vocabulary 128k / 8k", "beside weights")),
    ("peak memory beside weights (hidden 1024), 32 captures / 8", at_most(1.1), "memory",
     ("captures 32 / 8", "beside weights")),
    ("the same, 64 captures / 32", at_most(1.1), "memory", ("captures 64 / 32", "beside weights")),
    ("decoding, transformers' generate / ours", None, "decoding",
     ("baseline", "generate / decode, seconds")),
    ("decoding, transformers' generate / ours with the draft", None, "decoding",
     ("baseline", "generate / speculate, seconds")),
    ("decoding, transformers' prompt lookup / ours with the draft", None, "decoding",
     ("baseline", "assisted / speculate, seconds")),
)  # fmt: skip


def found(record: Any, keys: tuple[str, ...]) -> Any:
    """What a record has under these keys; None where it has nothing."""
    for key in keys:
        record = record.get(key) if isinstance(record, dict) else None
    return record


def machines_of(record: Any) -> set[str]:
    """Every machine that a record, or a part of it, names."""
    if not isinstance(record, dict):
        return set()
    own = {record["machine"]} if isinstance(record.get("machine"), str) else set()
    return own.union(*map(machines_of, record.values()))


def cell(value: Any, aim: Aim | None) -> str:
    """Median and range, and whether the aim is met; "-" for nothing."""
    if value is None:
        return "-"
    if isinstance(value, str):  # "1.70x (1.32 to 1.75)", as the older benches write it
        median, low, high = map(float, re.fullmatch(r"([\d.]+)x \(([\d.]+) to ([\d.]+)\)", value).groups())
        value = {"median": median, "low": low, "high": high}
    if isinstance(value, dict):
        number, text = value["median"], "{median:.3g} ({low:.3g} to {high:.3g})".format(**value)
    else:
        number, text = value, f"{value:.3g}"
    return text if aim is None else f"{text}, {'met' if aim.met(number) else '**missed**'}"


def readme_block(read: Callable[[str], Any]) -> str:
    """The README's part; `read` gives a record by name, or None."""
    lines = ["| | aim | sample draft (hidden 576) | Kimi's size (hidden 7168) |", "|---|---|---|---|"]
    for text, aim, name, keys in ROWS:
        record = read(name)
        shapes = SHAPES if "*" in keys else (None,)
        cells = [cell(found(record, tuple(s if k == "*" else k for k in keys)), aim) for s in shapes]
        # Live decoding needs a target: there is one at the sample's size only. Memory has a size of its own.
        lines.append(f"| {text} | {aim or ''} | {' | '.join(cells + [''] * (2 - len(cells)))} |")
    # Without the dtype at the end: rows differ in it.
    machines = {m.rpartition(", ")[0] for name in {row[2] for row in ROWS} for m in machines_of(read(name))}
    lines += [
        "",
        f"Median and range of ratios, run by run; -: not measured. {'; '.join(sorted(machines))}".rstrip(),
    ]
    return "\n".join([BEGIN, *lines, END])


def recorded(name: str) -> Any:
    """The committed record of a bench, or None."""
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text()) if path.is_file() else None


def main() -> None:
    path = ROOT / "README.md"
    text = path.read_text()
    start, end = text.index(BEGIN), text.index(END) + len(END)
    path.write_text(text[:start] + readme_block(recorded) + text[end:])


if __name__ == "__main__":
    main()
