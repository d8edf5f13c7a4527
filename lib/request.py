"""What a report is asked for: `Request`, the parameters of notebook 07, checked before anything is read.

`lib.report` answers a request, and `lib.request_form` asks for one with widgets.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch

from lib.errors import ReportError
from lib.taps import CONVENTIONS, parse_tap

ROOT = Path(__file__).resolve().parents[1]
SAMPLE = "sample"  # as a target: the workbook's own, which `lib.target` fetches and converts
DTYPES = ("float32", "bfloat16", "float16", "float64")


@dataclass(frozen=True)
class Request:
    """What a report is asked for; the parameters of notebook 07.

    Attributes:
        draft, captures, target: paths or hub ids; target "" if there is none, and "sample" for the sample
            target of this workbook (`lib.target.ensure_target`; a folder of that name is "./sample").
        finals: folder of captures of the same texts in the same order that hold the final state.
        taps: names of the stored states, `embed,layer3,layer16,layer28`; several lists, separated by
            ";", are chosen by a file's number of stored states. Only for files that do not say.
        convention: whose reading of the config's tap ids, a key of `taps.CONVENTIONS`.
        layout: of the captures, if their content leaves it open.
        loss_masks: folder of a speculators dataset with the captures' loss masks.
        device, dtype: of the draft.
        limit: read at most this many files; 0 for all.
        depth: draft tokens in a chain.
        verify_cost: one target pass over a round's tokens, in plain decoding steps.
        draft_cost: one draft token, in plain decoding steps. Both are assumptions until measured.
        out: folder of the report; "" means reports/<draft>-<captures>.
    """

    draft: str
    captures: str
    target: str = ""
    finals: str = ""
    taps: str = ""
    convention: str = "vllm"
    layout: str = ""
    loss_masks: str = ""
    device: str = "cpu"
    dtype: str = "float32"
    limit: int = 0
    depth: int = 15
    verify_cost: float = 1.0
    draft_cost: float = 0.1
    out: str = ""

    def __post_init__(self) -> None:
        """Refuse what no report can be made of, before anything is read."""
        for f in fields(self):
            wanted = {"str": str, "int": int, "float": int | float}[f.type]
            value = getattr(self, f.name)
            if not isinstance(value, wanted) or isinstance(value, bool):
                raise refused(f.name, f"a value of type {f.type}", value, "see the docstring of Request")
        for name in ("draft", "captures"):
            if not getattr(self, name):
                raise refused(name, "a path or a hub id", "", f"name the {name} to report on")
        if self.convention not in CONVENTIONS:
            raise refused(
                "convention", f"one of {sorted(CONVENTIONS)}", self.convention, "whose ids are they?"
            )
        if self.dtype not in DTYPES:
            raise refused("dtype", f"one of {DTYPES}", self.dtype, "float32 is what notebooks use")
        try:
            torch.empty(0, device=self.device)
        except (RuntimeError, AssertionError) as err:
            why = str(err).splitlines()[0]
            raise refused("device", "a device of this machine", self.device, f"use cpu ({why})") from err
        for name, least in (("limit", 0), ("depth", 1), ("draft_cost", 0), ("verify_cost", 0)):
            value = getattr(self, name)
            if not math.isfinite(value) or value < least or (name == "verify_cost" and value == 0):
                raise refused(
                    name, f"{'above' if name == 'verify_cost' else 'at least'} {least}", value,
                    "costs are in plain decoding steps",
                )  # fmt: skip
        lengths = Counter(map(len, self.names))
        if twice := [n for n, count in lengths.items() if count > 1]:
            raise refused("taps", "one list per number of stored states", self.taps, f"two of {twice[0]}")
        for names in self.names:
            if len({parse_tap(n) for n in names}) != len(names):
                raise refused("taps", "different names", ",".join(names), "name each stored state once")

    @property
    def names(self) -> tuple[tuple[str, ...], ...]:
        """`taps` as lists of names."""
        lists = [part.split(",") for part in self.taps.split(";") if part.strip()]
        return tuple(tuple(name.strip() for name in names) for names in lists)

    @property
    def folder(self) -> Path:
        """Where the report goes."""
        stems = [_name(p) for p in (self.draft, self.captures)]
        return Path(self.out) if self.out else ROOT / "reports" / "-".join(stems)


def _name(path_or_id: str) -> str:
    """The last name of a path, also of "." and of a link; of a hub id, without its revision."""
    if is_local(path_or_id):
        return Path(path_or_id).resolve().name
    return Path(path_or_id.partition("@")[0]).name


def is_local(path_or_id: str) -> bool:
    """Whether this is an existing path, which always wins over a hub id."""
    try:
        return bool(path_or_id) and Path(path_or_id).exists()
    except (OSError, ValueError):  # too long for a file name, or a zero byte in it
        return False


def refused(name: str, expected: str, found: Any, remedy: str) -> ReportError:
    """The error for a field that no report can be made with."""
    return ReportError("request", name, expected=expected, found=repr(found), remedy=remedy)
