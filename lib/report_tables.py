"""A finished report: its values as report.json holds them, and the tables that a reader is shown.

Measured and put together in `lib.report` and `lib.report_data`; two of them are compared in `lib.compare`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from lib.compare import check_report, read_report
from lib.errors import ReportError
from lib.evaluate import Totals
from lib.metrics import Ratio
from lib.parts import write_whole
from lib.request import Request, is_local

# What makes two requests two reports; files, depths, costs and device may differ in one.
PATHS = ("draft", "captures", "target", "finals", "loss_masks")
IDENTITY = (*PATHS, "taps", "convention", "layout", "dtype")


def check_place(asked: Mapping[str, Any], folder: Path) -> None:
    """Raise ReportError if the report's folder is a file, or holds the report of another request.

    Args:
        asked: the request's fields.
        folder: where the report goes.
    """
    path = folder / "report.json"
    if not is_local(str(folder)):
        return
    if not folder.is_dir():
        raise ReportError(
            folder, "out", expected="a folder for the report", found="a file",
            remedy="name another place: OUT=...",
        )  # fmt: skip
    if not path.is_file():
        return
    try:
        old = json.loads(path.read_text(encoding="utf-8"))["request"]
        differ = [name for name in IDENTITY if _same_form(name, old[name]) != _same_form(name, asked[name])]
        found = "; ".join(f"{name}: {old[name]!r}, now {asked[name]!r}" for name in differ)
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as err:
        found = f"another file of this name ({type(err).__name__}: {err})"
    if found:
        raise ReportError(
            path, "request", expected="no report there, or one of the same request", found=found[:500],
            remedy="name another folder with OUT=..., or move the old report away",
        )  # fmt: skip


def _same_form(name: str, value: str) -> str:
    """A field so that two spellings of one local path are equal."""
    return str(Path(value).resolve()) if name in PATHS and is_local(value) else value


@dataclass(frozen=True)
class Report:
    """A finished report: plain values as report.json holds them, and tables of them.

    Attributes:
        data: see `report.schema.json`.
        totals: what was merged, by "declared" and "best"; empty for a report read from a file.
    """

    data: dict[str, Any]
    totals: Mapping[str, Totals] = field(default_factory=dict, repr=False)

    @classmethod
    def load(cls, path: str | Path) -> Report:
        """A stored report. Raises ReportError."""
        return cls(read_report(path))

    def to_json(self) -> dict[str, Any]:
        """Plain values: the content of report.json."""
        return self.data

    def save(self, folder: str | Path | None = None) -> Path:
        """Write report.json, checked against its schema, into a folder (the request's if None).

        Raises ReportError also where nothing can be written, or another request's report lies there.
        """
        folder = Path(folder) if folder else Request(**self.data["request"]).folder
        check_report(self.data, folder / "report.json")
        check_place(self.data["request"], folder)
        path = folder / "report.json"
        text = json.dumps(self.data, indent=1, allow_nan=False) + "\n"
        write_whole(path, text.encode())
        return path

    @property
    def which(self) -> list[str]:
        """The contracts that results are there for: "declared", and "best" if it is another."""
        return [name for name, result in self.data["results"].items() if result is not None]

    def ratio(self, metric: str, depth: int = 0, which: str = "declared") -> Ratio | None:
        """One of the accuracies ("in_vocab", "all_token", "coverage", "joint"); None if nothing counts."""
        found = self.data["results"][which]["accuracy"][metric][depth]
        return None if found is None else Ratio(**{k: v for k, v in found.items() if k != "value"})

    def tokens_per_round(self, depth: int | None = None, which: str = "declared") -> Ratio | None:
        """With this many draft tokens a round (the deepest if None); None if there are no rounds."""
        rows = self.data["results"][which]["acceptance"]
        found = rows[-1 if depth is None else depth - 1]["tokens_per_round"]
        return None if found is None else Ratio(**{k: v for k, v in found.items() if k != "value"})

    def best_depth(self, which: str = "declared") -> dict[str, Any] | None:
        """The acceptance row with the highest predicted speed-up."""
        rows = [r for r in self.data["results"][which]["acceptance"] if r["speed_up"] is not None]
        return max(rows, key=lambda r: r["speed_up"], default=None)

    def summary(self) -> pd.DataFrame:
        """The answers in one table: a row per number, a column per contract."""
        rows: dict[str, dict[str, str]] = {}
        for which in self.which:
            result, last = self.data["results"][which], len(self.data["results"][which]["acceptance"])
            gain, best = self.tokens_per_round(which=which), self.best_depth(which)
            likelihood = result["log_likelihood"]
            rows[which] = {
                "slots": " ".join(result["taps"]),
                "in-vocab accuracy": _percent(self.ratio("in_vocab", which=which)),
                "all-token accuracy": _percent(self.ratio("all_token", which=which)),
                "coverage": _percent(self.ratio("coverage", which=which)),
                "log-likelihood, nats a token": f"{likelihood['value']:.3f}" if likelihood else "none",
                f"tokens per round, {last} drafted": _plain(gain),
                "best depth, with the costs given": "none"
                if best is None
                else f"{best['depth']}: {best['speed_up']:.2f}x",
            }
        return pd.DataFrame(rows)

    def detected_table(self) -> pd.DataFrame:
        """What was recognised, and why."""
        found = self.data["detected"]
        rows = [("draft", found["draft"]), *(("captures", c) for c in found["captures"])]
        rows += [("target", found["target"])] if found["target"] else []
        return pd.DataFrame(
            [
                {
                    "": role,
                    "format": f["format"],
                    "files": f["files"] or "",
                    "because": "; ".join(f["evidence"]),
                }
                for role, f in rows
            ]
        ).set_index("")  # fmt: skip

    def contract_table(self) -> pd.DataFrame:
        """Field by field: the declared value, who decided it, and the best one where it differs."""
        table = pd.DataFrame(self.data["contract"]["declared"]).set_index("field")
        if self.data["contract"]["best"] is not None:
            best = pd.DataFrame(self.data["contract"]["best"]).set_index("field")["value"]
            table["best"] = best.where(best != table["value"], "")
        return table

    def files_table(self) -> pd.DataFrame:
        """One row per file that was read, with its depth-0 accuracy and tokens per round."""
        rows = []
        for f in self.data["files"]["read"]:
            row = {
                "name": f["name"],
                "layout": f["layout"],
                "positions": f["positions"],
                "scored": f["scored"],
            }
            for which in self.which:
                s = f[which]
                row[f"{which}: in-vocab %"] = 100 * s["in_vocab_hits"][0] / max(1, s["in_vocab"][0])
                row[f"{which}: tokens per round"] = s["gained"][-1] / max(1, s["rounds"][-1])
            rows.append(row)
        return pd.DataFrame(rows).set_index("name")

    def skipped_table(self) -> pd.DataFrame:
        """One row per file that was not read: its name, and the whole error without its path."""
        skipped = self.data["files"]["skipped"]
        rows = [(Path(f["file"]).name, f["kind"], f["error"].removeprefix(f"{f['file']}: ")) for f in skipped]
        return pd.DataFrame(rows, columns=["file", "kind", "error"]).set_index("file")

    def norms_table(self) -> pd.DataFrame:
        """As `norms.norm_table`."""
        return pd.DataFrame(self.data["norms"]).set_index("tap")

    def accuracy_table(self, which: str = "declared") -> pd.DataFrame:
        """A row per depth, percent: the accuracies, coverage, and the interval of the in-vocab one."""
        found = self.data["results"][which]["accuracy"]
        rows = [
            {
                **{f"{name} %": None if v[d] is None else 100 * v[d]["value"] for name, v in found.items()},
                "of": 0 if found["in_vocab"][d] is None else found["in_vocab"][d]["denominator"],
            }
            for d in range(len(found["in_vocab"]))
        ]
        return pd.DataFrame(rows).rename_axis("depth")

    def acceptance_table(self, which: str = "declared") -> pd.DataFrame:
        """A row per number of draft tokens: tokens per round with interval, break-even, speed-up."""
        rows = []
        for r in self.data["results"][which]["acceptance"]:
            gain = r["tokens_per_round"] or {}
            rows.append(
                {
                    "draft tokens": r["depth"],
                    "tokens per round": gain.get("value"),
                    "low": gain.get("low"),
                    "high": gain.get("high"),
                    "rounds": gain.get("denominator", 0),
                    "break-even": r["break_even"],
                    "speed-up": r["speed_up"],
                }
            )
        return pd.DataFrame(rows).set_index("draft tokens")

    def sweep_table(self) -> pd.DataFrame:
        """The best candidates."""
        rows = [{**r, "taps": " ".join(r["taps"])} for r in self.data["sweep"]["rows"]]
        return pd.DataFrame(rows, index=range(1, len(rows) + 1))

    def metrics_table(self, which: str = "declared") -> pd.DataFrame | None:
        """As `metric_table.table`; None without a target or final states."""
        found = self.data["results"][which]["metrics"]
        return None if found is None else pd.DataFrame(found).astype({"step": "Int64"})


def _percent(r: Ratio | None) -> str:
    if r is None:
        return "none"
    return f"{100 * r.value:.1f} % [{100 * r.low:.1f}, {100 * r.high:.1f}] of {r.denominator}"


def _plain(r: Ratio | None) -> str:
    return "none" if r is None else f"{r.value:.2f} [{r.low:.2f}, {r.high:.2f}] in {r.denominator} rounds"
