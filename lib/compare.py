"""Two reports of the same conversations: what changed, with intervals that pair the conversations.

    python -m lib.report compare BEFORE/report.json AFTER/report.json

A report stores sums per file, so nothing is computed on states again. Conversations are paired by
name, and a name must stand for the same tokens in both. Both sides of a pair are drawn together, so
that what one text has more of than another cancels.

Axes: M paired conversations.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from lib.errors import ReportError
from lib.metrics import bootstrap_interval, resample_weights
from lib.parts import writing
from lib.sweep import FEWEST

SCHEMA = Path(__file__).with_name("report.schema.json")
NAME, VERSION = "eagle3-workbook-report", 1
# Metric -> its numerator and denominator among the sums that a report keeps per file and depth.
METRICS = {
    "in-vocab accuracy": ("in_vocab_hits", "in_vocab"),
    "all-token accuracy": ("hits", "counted"),
    "joint accuracy": ("joint_hits", "counted"),
    "tokens per round": ("gained", "rounds"),
}
# Lists with one entry per depth, in files and in results.
PER_DEPTH = {n for pair in METRICS.values() for n in pair} | {
    "accepted", "in_vocab", "all_token", "coverage", "joint", "acceptance",
}  # fmt: skip
LARGEST = 2.0**53  # beyond it a float no longer counts in ones
LIKELIHOOD = "log-likelihood, nats a token"


def check_report(data: Any, where: str | Path) -> None:
    """Raise ReportError unless `data` keeps to `report.schema.json`."""
    import jsonschema

    found = jsonschema.Draft202012Validator(json.loads(SCHEMA.read_text()))
    error = jsonschema.exceptions.best_match(found.iter_errors(data))
    if error is not None:
        raise ReportError(
            where, error.json_path, expected=f"what {SCHEMA.name} describes", found=error.message[:300],
            remedy="write it with Report.save(); a file of another version belongs to another checkout",
        )  # fmt: skip
    there = data["results"]["best"] is not None
    if any((row["best"] is not None) != there for row in data["files"]["read"]):
        raise ReportError(
            where, "files: best", expected=f"sums of every file if there are results, else none ({there})",
            found="the other in some file", remedy="write the report again; it was edited",
        )  # fmt: skip
    if wrong := _not_sane(data, data["request"]["depth"]):
        path, expected, said = wrong
        raise ReportError(
            where, path, expected=expected, found=said, remedy="write the report again; it was edited",
        )  # fmt: skip


def _not_sane(value: Any, depth: int, at: str = "$") -> tuple[str, str, str] | None:
    """What a schema cannot say: path, expected and found of the first number or list that is wrong."""
    if isinstance(value, dict):
        pairs = [(f"{at}.{name}", inner, name) for name, inner in value.items()]
    elif isinstance(value, list):
        pairs = [(f"{at}[{i}]", inner, "") for i, inner in enumerate(value)]
    elif isinstance(value, int | float) and not abs(value) <= LARGEST:
        return at, f"a finite number of at most {LARGEST:.0e}", str(value)[:60]
    else:
        return None
    for path, inner, name in pairs:
        if name in PER_DEPTH and isinstance(inner, list) and len(inner) != depth:
            return path, f"{depth} entries, one per depth asked for", str(len(inner))
        if found := _not_sane(inner, depth, path):
            return found
    return None


def read_report(path: str | Path) -> dict[str, Any]:
    """A stored report as plain values, checked against its schema. Raises ReportError."""
    path = Path(path)
    try:
        data = json.loads(path.read_text(encoding="utf-8"), parse_constant=_no_constant)
    except (OSError, ValueError, RecursionError) as err:
        raise ReportError(
            path, "json", expected="a readable report.json", found=str(err)[:200],
            remedy="name the report.json that `python -m lib.report make` wrote",
        ) from err  # fmt: skip
    check_report(data, path)
    return data


def _no_constant(text: str) -> None:
    raise ValueError(f"{text} is no JSON number")


@dataclass(frozen=True)
class Difference:
    """One metric in both reports, over the paired conversations.

    Attributes:
        metric: a key of `METRICS`, or `LIKELIHOOD`.
        depth: draft token (0 the first), or draft tokens a round for "tokens per round"; None where
            there is no depth.
        before, after: the two values; difference: after minus before.
        low, high: 95 % interval of the difference.
        conversations: pairs in which the metric counts something on both sides.
    """

    metric: str
    depth: int | None
    before: float
    after: float
    difference: float
    low: float
    high: float
    conversations: int

    @property
    def clear(self) -> bool:
        """Whether the interval leaves out zero, and is one: over `FEWEST` conversations at least."""
        return self.conversations >= FEWEST and (self.low > 0 or self.high < 0)


@dataclass(frozen=True)
class Comparison:
    """The differences of two reports.

    Attributes:
        which: "declared" or "best", the contract compared in both.
        taps: the wiring in (before, after).
        rows: the differences.
        paired: names in both; only_before, only_after: names without a partner.
        notes: what a reader of the numbers must know.
    """

    which: str
    taps: tuple[tuple[str, ...], tuple[str, ...]]
    rows: tuple[Difference, ...]
    paired: tuple[str, ...]
    only_before: tuple[str, ...]
    only_after: tuple[str, ...]
    notes: tuple[str, ...]

    def table(self) -> pd.DataFrame:
        """One row per metric and depth."""
        rows = [
            {**asdict(r), "depth": "" if r.depth is None else r.depth, "clear": r.clear} for r in self.rows
        ]
        return pd.DataFrame(rows).set_index(["metric", "depth"])

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {"schema": "eagle3-workbook-comparison", "version": VERSION, **asdict(self)}

    def __str__(self) -> str:
        """What the command line prints."""
        lines = [
            f"{self.which} contract: {' '.join(self.taps[0])} -> {' '.join(self.taps[1])}",
            f"{len(self.paired)} conversations in both; {len(self.only_before)} only before, "
            f"{len(self.only_after)} only after",
            *self.notes,
            self.table().to_string(float_format=lambda x: f"{x:.4f}"),
        ]
        return "\n".join(lines)


def compare(before: str | Path, after: str | Path, which: str = "declared") -> Comparison:
    """Compare two report.json.

    Args:
        before, after: paths.
        which: "declared" or "best" contract, of each report its own.

    Raises ReportError for unreadable reports, other texts or loss masks under one name, no name in both, or
    nothing that counts in both.
    """
    if which not in ("declared", "best"):
        raise ReportError(
            "compare", "which", expected="'declared' or 'best'", found=repr(which),
            remedy="each report's own contract of that kind is compared",
        )  # fmt: skip
    data = read_report(before), read_report(after)
    files = [_by_name(d, path) for d, path in zip(data, (before, after), strict=True)]
    paired = tuple(n for n in files[0] if n in files[1])
    if not paired:
        raise ReportError(
            after, "files", expected=f"conversations that {before} has too", found="none of the same name",
            remedy="make both reports from captures of the same texts, with the same file names",
        )  # fmt: skip
    for name in paired:
        if files[0][name]["tokens"] != files[1][name]["tokens"]:
            raise ReportError(
                after, f"files: {name}", expected=f"the tokens that {before} has under this name",
                found="another text", remedy="pair captures of the same texts: name files alike only then",
            )  # fmt: skip
    notes, chosen = [], []
    for d, label in zip(data, ("before", "after"), strict=True):
        chosen.append(which if d["results"][which] is not None else "declared")
        if chosen[-1] != which:
            notes.append(f"{label}: the declared contract is the best one")
    sides = [[f[n][c] for n in paired] for f, c in zip(files, chosen, strict=True)]
    _same_positions(files, sides, paired, before, after)
    if len(paired) < FEWEST:
        notes.append(
            f"{len(paired)} conversations are too few for intervals (at least {FEWEST}): none is clear"
        )
    if [s["tokens"] for s in sides[0]] != [s["tokens"] for s in sides[1]]:
        notes.append("the draft vocabularies differ: in-vocab metrics count other positions before and after")
    rows = []
    for metric, (hits, counts) in METRICS.items():
        columns = [(_column(s, hits), _column(s, counts)) for s in sides]
        for d in range(min(c[0].shape[1] for c in columns)):
            depth = d + 1 if metric == "tokens per round" else d
            rows.append(_difference(metric, depth, *[[x[:, d] for x in c] for c in columns]))
    likelihoods = [(_column(s, "log_likelihood"), _column(s, "tokens")) for s in sides]
    rows.append(_difference(LIKELIHOOD, None, *likelihoods))
    taps = tuple(tuple(d["results"][c]["taps"]) for d, c in zip(data, chosen, strict=True))
    only = [tuple(n for n in a if n not in b) for a, b in (files, files[::-1])]
    found = tuple(r for r in rows if r is not None)
    if not found:
        raise ReportError(
            after, "files", expected="a conversation in which something is counted in both reports",
            found=f"none of {len(paired)}", remedy="check the loss masks: texts without scored tokens",
        )  # fmt: skip
    return Comparison(which, taps, found, paired, only[0], only[1], tuple(notes))


def _same_positions(files: list[dict], sides: list[list], paired: tuple[str, ...], before, after) -> None:
    """Raise ReportError where two reports score other positions of one text: other loss masks."""
    depth = min(len(side[0]["counted"]) for side in sides)
    for name, a, b in zip(paired, *sides, strict=True):
        said = [
            f"{f[name]['scored']} of {f[name]['positions']} positions, by depth {side['counted'][:depth]}"
            for f, side in zip(files, (a, b), strict=True)
        ]
        if said[0] != said[1]:
            raise ReportError(
                after, f"files: {name}: scored", expected=f"what {before} scores of this text: {said[0]}",
                found=said[1], remedy="make both reports with the same loss masks (loss_masks=...)",
            )  # fmt: skip


def save_comparison(found: Comparison, path: str | Path) -> None:
    """Write a comparison as JSON. Raises ReportError where nothing can be written."""
    with writing(path):
        Path(path).write_text(json.dumps(found.to_json(), indent=1) + "\n", encoding="utf-8")


def _by_name(data: dict, where: str | Path) -> dict[str, dict]:
    rows = data["files"]["read"]
    names = {row["name"]: row for row in rows}
    if len(names) != len(rows):
        raise ReportError(
            where, "files", expected="one row per name", found=f"{len(rows)} rows, {len(names)} names",
            remedy="write the report again; names are made unique then",
        )  # fmt: skip
    return names


def _column(rows: list[Mapping[str, Any]], name: str) -> Tensor:
    """(M, D) or (M,) of what each file stores."""
    return torch.tensor([r[name] for r in rows], dtype=torch.float64)


def _difference(metric: str, depth: int | None, before, after) -> Difference | None:
    """The paired difference of two ratios of sums; None where nothing counts on one of the sides.

    Args:
        before, after: numerators and denominators (M,).
    """
    used = (before[1] > 0) & (after[1] > 0)
    if not used.any():
        return None
    (hits_a, counts_a), (hits_b, counts_b) = ([x[used] for x in side] for side in (before, after))
    weights = resample_weights(int(used.sum()))
    low, high = bootstrap_interval(
        (weights @ hits_b) / (weights @ counts_b) - (weights @ hits_a) / (weights @ counts_a)
    )
    values = [float(h.sum() / c.sum()) for h, c in ((hits_a, counts_a), (hits_b, counts_b))]
    gain = values[1] - values[0]
    return Difference(metric, depth, *values, gain, low, high, int(used.sum()))
