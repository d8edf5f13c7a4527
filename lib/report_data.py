"""What report.json holds: merged parts as plain values, in the shape of `report.schema.json`.

`lib.report` measures; `assemble` writes down what came out. Nothing is read or computed on states here.

Axes: C candidates, M files, D depths.
"""

from __future__ import annotations

import math
import platform
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pandas as pd
from torch import Tensor

from lib import metric_table
from lib.compare import NAME, VERSION
from lib.contract import Contract, diff
from lib.detect import detect
from lib.errors import WorkbookError
from lib.evaluate import Tools, Totals
from lib.metrics import bootstrap_interval, ratio, resample_weights
from lib.norms import norm_table
from lib.parts import SUMS
from lib.request import Request
from lib.sweep import FEWEST, Sweep
from lib.taps import Stored, Tap

TOP = 12  # rows of the sweep that a report keeps


@dataclass(frozen=True)
class Run:
    """What was measured under one contract.

    Attributes:
        contract: its taps are those of the first wiring of `totals`.
        totals: merged parts.
        candidate: its row in the sweep.
    """

    contract: Contract
    totals: Totals
    candidate: int


@dataclass(frozen=True)
class Measured:
    """Everything that a report is written from.

    Attributes:
        tools: the draft, the target and the plan.
        runs: "declared", and "best" if another contract wins the sweep.
        swept: the sweep.
        layouts: layout -> the files that could be opened as it.
        folder, ignored: where the captures are, and what there is none (path below it -> why).
        warnings: what was decided on the way.
        seconds: how long it took.
    """

    tools: Tools
    runs: Mapping[str, Run]
    swept: Sweep
    layouts: Mapping[str, Sequence[Path]]
    folder: Path
    ignored: Mapping[str, str]
    warnings: Sequence[str]
    seconds: float


def assemble(request: Request, measured: Measured) -> dict[str, Any]:
    """The content of report.json."""
    declared, best = measured.runs["declared"], measured.runs.get("best")
    totals, plan = declared.totals, measured.tools.plan
    n = len(totals.parts)
    found_sweep = _sweep_data(measured.swept)
    results = {name: _result(request, run, measured) for name, run in measured.runs.items()}
    notes = Counter(note for part in totals.parts for note in part.notes)
    why = Counter(part.no_evidence for part in totals.parts if part.no_evidence)
    data = {
        "schema": NAME,
        "version": VERSION,
        "made": {
            "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "seconds": measured.seconds,
            "python": platform.python_version(),
            "torch": version("torch"),
        },
        "request": asdict(request),
        "detected": {
            "draft": _detected(Path(plan.draft)),
            "captures": [
                {**_detected(files[0], len(files)), "format": layout}
                for layout, files in measured.layouts.items()
            ],
            "target": _detected(Path(plan.target)) if plan.target else None,
        },
        "contract": {
            "declared": declared.contract.rows(),
            "best": best.contract.rows() if best else None,
            "difference": diff(declared.contract, best.contract) if best else [],
        },
        "warnings": [*measured.warnings, *_doubts(totals, found_sweep)],
        "notes": [
            *measured.tools.forward.draft.notes,
            *(f"{note} ({count} of {n} files)" for note, count in notes.items()),
        ],
        "files": {
            "read": _file_rows(measured),
            "skipped": [{"file": p.file, "kind": p.error_kind, "error": p.error} for p in totals.failed],
            "ignored": [{"file": name, "why": reason} for name, reason in measured.ignored.items()],
        },
        "norms": norm_table(totals.norms).reset_index().to_dict("records"),
        "sweep": found_sweep,
        "results": {"declared": results["declared"], "best": results.get("best")},
        "metric_table": {
            "available": results["declared"]["metrics"] is not None,
            "why_not": "; ".join(f"{reason} ({count} of {n} files)" for reason, count in why.items()),
            "files": sum(bool(p.evidence) for p in totals.parts),
        },
    }
    return _finite(data)


def _detected(path: Path, count: int | None = None) -> dict[str, Any]:
    """What the path is and why; a reader may well open what the detector does not know."""
    try:
        found = detect(path)
        name, evidence = found.format, list(map(str, found.evidence))
    except WorkbookError as err:
        name, evidence = "unknown", [str(err)]
    return {"path": str(path), "format": name, "evidence": evidence, "files": count}


def _doubts(totals: Totals, found_sweep: Mapping[str, Any]) -> list[str]:
    """Warnings that the numbers themselves give."""
    doubts = []
    if totals.failed:
        doubts.append(f"{len(totals.failed)} of {len(totals.failed) + len(totals.parts)} files not read")
    if several := sum(part.rollouts[0].answers > 1 for part in totals.parts):
        doubts.append(
            f"{several} texts hold several answers: each is walked on its own, and they are left out of the "
            "metric table"
        )
    used = sum(part.count > 0 for part in totals.parts)
    if not used:
        doubts.append(
            "no scored position has a true token in the draft's vocabulary: no wiring can be compared, the "
            "declared one is kept; check the vocabulary map and the loss masks"
        )
    elif used < FEWEST:
        doubts.append(
            f"{used} conversations are too few for intervals (at least {FEWEST}): no winner is established"
        )
    elif found_sweep["gap"] is not None and not found_sweep["decided"]:
        doubts.append("the two best wirings cannot be told apart on these files: the gap may be zero")
    return doubts


def texts(taps: Iterable[Tap | Stored]) -> tuple[str, ...]:
    """Taps by name."""
    return tuple(map(str, taps))


def _finite(value: Any) -> Any:
    """Plain JSON values: NaN and infinities become null, numpy's and torch's numbers Python's."""
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    value = value.item() if hasattr(value, "item") else value
    if value is pd.NA or (isinstance(value, float) and not math.isfinite(value)):
        return None
    return value


def _ratio(name: str, hits: Tensor, counts: Tensor) -> dict[str, Any] | None:
    """`metrics.ratio` as plain values; None where nothing counts."""
    if not int(counts.sum()):
        return None
    found = ratio(name, hits, counts)
    return {**asdict(found), "value": found.value}


def _result(request: Request, run: Run, measured: Measured) -> dict[str, Any]:
    """Everything that was measured under one contract."""
    totals, swept = run.totals, measured.swept
    column = {n: totals.sums(0, n) for n in ("in_vocab_hits", "in_vocab", "hits", "counted", "joint_hits")}
    served = {n: totals.sums(0, n) for n in ("rounds", "gained")}

    def by_depth(name: str, hits: str, counts: str) -> list:
        return [_ratio(name, column[hits][:, d], column[counts][:, d]) for d in range(request.depth)]

    acceptance = []
    for d in range(request.depth):
        cost = request.verify_cost + (d + 1) * request.draft_cost
        gain = _ratio("tokens per round", served["gained"][:, d], served["rounds"][:, d])
        acceptance.append(
            {
                "depth": d + 1,
                "tokens_per_round": gain,
                "break_even": cost,
                "speed_up": gain["value"] / cost if gain else None,
            }
        )
    e = totals.evidence(0, run.contract, measured.tools.forward.in_vocab)
    counts = swept.counts.double()
    used = counts > 0
    scores, counts = swept.scores[run.candidate][used], counts[used]
    likelihood = None
    if len(counts):
        weights = resample_weights(len(counts))
        low, high = bootstrap_interval((weights @ scores) / (weights @ counts))
        likelihood = {
            "value": float(scores.sum() / counts.sum()), "low": low, "high": high, "tokens": counts.sum(),
        }  # fmt: skip
    return {
        "taps": texts(run.contract.taps),
        "accuracy": {
            "in_vocab": by_depth("in-vocab accuracy", "in_vocab_hits", "in_vocab"),
            "all_token": by_depth("all-token accuracy", "hits", "counted"),
            "coverage": by_depth("coverage", "in_vocab", "counted"),
            "joint": by_depth("joint accuracy", "joint_hits", "counted"),
        },
        "log_likelihood": likelihood,
        "acceptance": acceptance,
        "metrics": None if e is None else metric_table.table(e).astype(object).to_dict("records"),
    }


def _sweep_data(swept: Sweep) -> dict[str, Any]:
    """The candidates from best to worst, and how far the first is ahead of the second."""
    counted = int(swept.counts.sum()) > 0
    rows = [
        {
            "taps": texts(swept.contracts[i].taps),
            "nats_a_token": float(swept.log_likelihood[i]) if counted else None,
            "in_vocab_accuracy": float(swept.accuracy[i]) if counted else None,
        }
        for i in swept.order
    ]
    gaps = {"gap": None, "accuracy_gap": None}
    if len(rows) > 1 and counted:
        for name, (value, low, high) in (("gap", swept.gap()), ("accuracy_gap", swept.accuracy_gap())):
            gaps[name] = {"value": value, "low": low, "high": high}
    return {
        "tried": len(rows),
        "rows": rows[:TOP],
        "winner": rows[0]["taps"],
        "second": rows[1]["taps"] if len(rows) > 1 else None,
        "decided": swept.decided,
        **gaps,
    }


def _file_rows(measured: Measured) -> list[dict[str, Any]]:
    """Per file the sums that comparisons pair; a name that two files share is told apart by its path."""
    totals, folder = measured.runs["declared"].totals, measured.folder
    shared = {n for n, count in Counter(p.name for p in totals.parts).items() if count > 1}
    sums = {name: {p.file: p for p in run.totals.parts} for name, run in measured.runs.items()}
    rows = []
    for i, part in enumerate(totals.parts):
        path = Path(part.file)
        below = path != folder and path.is_relative_to(folder)  # `folder` may be the one file itself
        inside = str(path.relative_to(folder)) if below else path.name
        row = {
            "name": inside if part.name in shared else part.name,
            "file": inside, "layout": part.layout, "positions": part.length, "scored": part.scored,
            "answers": part.rollouts[0].answers, "tokens": part.tokens, "declared": None, "best": None,
        }  # fmt: skip
        for name, run in measured.runs.items():
            rollout = sums[name][part.file].rollouts[0]
            row[name] = {n: rollout.of(n).tolist() for n in SUMS}
            row[name] |= {
                "log_likelihood": float(measured.swept.scores[run.candidate, i]),
                "tokens": part.count,
            }
        rows.append(row)
    return rows
