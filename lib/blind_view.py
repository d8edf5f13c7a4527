"""What bench/blind.py recorded, as tables for notebook 06: totals, confusion, every miss with its reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pandas as pd

RECORD = Path(__file__).resolve().parents[1] / "bench" / "results" / "blind.json"
ROWS = {
    "clear": ("full", "clear", "named first, of clear faults"),
    "subtle": ("full", "subtle", "named first, of subtle faults"),
    "invisible": ("full", "invisible", "named first, of those that cost nothing here"),
    "accused": ("full", "controls accused", "accused, of healthy controls"),
    "pairs": ("pairs", "both named", "both named, of pairs of clear faults"),
    "headless.clear": ("no head", "clear", "named first without the target's head, of clear faults"),
    "headless.subtle": ("no head", "subtle", "named first without the target's head, of subtle faults"),
}


def record(path: Path = RECORD) -> dict[str, Any]:
    """The committed record of bench/blind.py: machine, date, `summary`, and one entry per case."""
    return json.loads(path.read_text())


def shares(told: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """Name in `ROWS` -> (cases named, or accused, of cases tried); names without a case are left out."""
    found = {}
    for name, (part, row, _) in ROWS.items():
        named, _, tried = told["summary"].get(part, {}).get(row, "0/0").partition("/")
        if int(tried):
            found[name] = (int(named), int(tried))
    return found


def summary_table(told: dict[str, Any]) -> pd.DataFrame:
    """One row per class of cases: how many were named, of how many, in %."""
    rows = [
        {"": ROWS[name][2], "cases": named, "of": tried, "%": round(100 * named / tried, 1)}
        for name, (named, tried) in shares(told).items()
    ]
    return pd.DataFrame(rows).set_index("")


def misses(told: dict[str, Any]) -> pd.DataFrame:
    """One row per planted fault that was not named first: its class, and why."""
    rows = [
        {"case": case, "class": told_of["class"], "planted": key, "why it was missed": why}
        for case, told_of in told["summary"]["misses"].items()
        for key, why in told_of.items() if key != "class"
    ]  # fmt: skip
    return pd.DataFrame(rows, columns=["case", "class", "planted", "why it was missed"]).set_index("case")


def confusion(told: dict[str, Any]) -> pd.DataFrame:
    """Planted fault x what stood first, with the head at hand: counts of cases; right ones are left out."""
    wrong = {k: {n: c for n, c in v.items() if n != k} for k, v in told["summary"]["confusion"].items()}
    rows = [{"planted": k, "first": n, "cases": c} for k, v in wrong.items() for n, c in v.items()]
    return pd.DataFrame(rows, columns=["planted", "first", "cases"])
