"""What one capture file contributed: a `Part`, its bytes on disk, and the keys by which it is found again.

`lib.evaluate` makes parts and puts them together; here is how one is stored. A part's file is named by a
key over the capture's name, path, size and time, and its final state's; it lies in a folder named by the
plan's fingerprint, which `model_stamp` feeds: the draft's and the target's JSON files, their safetensors
headers and every file's name, size and time. The weights themselves are not read for it.

Axes: C candidates, D depths, S scored pairs.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
from datasketches import tdigest_double
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from lib.draft_formats import draft_folder, meta_file
from lib.errors import ReportError
from lib.norms import PARTS, NormStats, TapNorms

VERSION = 2  # of what a part holds and how it is computed; older parts are not read
COLUMNS = ("position", "draft_ids", "target_ids", "truth", "in_vocab")
# Rows of `Rollout.sums`, one value per depth.
SUMS = ("in_vocab_hits", "in_vocab", "hits", "counted", "joint_hits", "rounds", "accepted", "gained")


@dataclass(frozen=True)
class Rollout:
    """Chains of one file under one wiring: the columns of `Predictions`, and their sums.

    Attributes:
        taps: in slot order.
        position: (S,); draft_ids, target_ids, truth, in_vocab: (S, D), as in `Predictions`.
        sums: (8, D) int64, rows as in `SUMS`. `joint_hits` counts chains right at every step so far;
            rounds, accepted and gained are those of a greedy run with D draft tokens, D = 1, 2, ...
        answers: separate answers in the text.
    """

    taps: tuple[str, ...]
    position: Tensor
    draft_ids: Tensor
    target_ids: Tensor
    truth: Tensor
    in_vocab: Tensor
    sums: Tensor
    answers: int

    def of(self, name: str) -> Tensor:
        """(D,) one row of the sums."""
        return self.sums[SUMS.index(name)]


@dataclass(frozen=True)
class Part:
    """What one file contributed, or why it did not.

    Attributes:
        plan: fingerprint of the plan.
        file, name: the path, and its stem.
        error: "" or the error's message; error_kind: its class.
        layout, length, scored, taps, notes: as in `Capture`; `scored` is a number of pairs.
        tokens: sha256 of the token ids, to pair the same text in two reports.
        norms: tap -> statistics.
        hits, scores: (C,) in-vocab hits, and summed log-probability (nats), of each candidate.
        count: in-vocab positions.
        rollouts: one per wiring.
        evidence: one dict of tensors per wiring, or empty; no_evidence: why it is empty.
    """

    plan: str
    file: str
    name: str
    error: str = ""
    error_kind: str = ""
    layout: str = ""
    length: int = 0
    scored: int = 0
    taps: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    tokens: str = ""
    norms: dict[str, TapNorms] = field(default_factory=dict, repr=False)
    hits: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64), repr=False)
    scores: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.float64), repr=False)
    count: int = 0
    rollouts: tuple[Rollout, ...] = field(default=(), repr=False)
    evidence: tuple[dict[str, Tensor], ...] = field(default=(), repr=False)
    no_evidence: str = ""

    def to_bytes(self) -> bytes:
        """One safetensors blob."""
        plain = {f.name: getattr(self, f.name) for f in fields(self) if f.name in _PLAIN}
        plain |= {"rollouts": [[r.taps, r.answers] for r in self.rollouts], "norms": list(self.norms)}
        plain["evidence"] = len(self.evidence)
        text = torch.frombuffer(bytearray(json.dumps(plain).encode()), dtype=torch.uint8)
        tensors = {"part": text, "hits": self.hits, "scores": self.scores}
        for i, rollout in enumerate(self.rollouts):
            tensors |= {f"rollout.{i}.{c}": getattr(rollout, c) for c in (*COLUMNS, "sums")}
        for i, one in enumerate(self.evidence):
            tensors |= {f"evidence.{i}.{k}": v for k, v in one.items()}
        for tap, norms in self.norms.items():
            tensors |= _norms_to_tensors(tap, norms)
        # Cloned: wirings share their loss mask, and safetensors refuses shared memory.
        return save({k: v.clone().contiguous() for k, v in tensors.items()})

    @classmethod
    def from_bytes(cls, blob: bytes) -> Part:
        """The part in a blob; SafetensorError, KeyError, ValueError or TypeError if it is none."""
        tensors = load(blob)
        plain = json.loads(tensors["part"].numpy().tobytes())
        rolled = tuple(
            Rollout(tuple(taps), *(tensors[f"rollout.{i}.{c}"] for c in (*COLUMNS, "sums")), answers=answers)
            for i, (taps, answers) in enumerate(plain.pop("rollouts"))
        )
        found = tuple(_under(tensors, f"evidence.{i}.") for i in range(plain.pop("evidence")))
        norms = {tap: _norms_from_tensors(tap, tensors) for tap in plain.pop("norms")}
        lists = {k: tuple(plain.pop(k)) for k in ("taps", "notes")}
        return cls(
            **plain, **lists, rollouts=rolled, evidence=found, norms=norms,
            hits=tensors["hits"], scores=tensors["scores"],
        )  # fmt: skip

    def __reduce__(self):
        """A worker process can hand a part back, sketches and all."""
        return Part.from_bytes, (self.to_bytes(),)

    def save(self, path: Path) -> None:
        """Write to this file, as `write_whole` does."""
        write_whole(path, self.to_bytes())

    @classmethod
    def load(cls, path: Path) -> Part | None:
        """The part in this file; None if there is none, or it is damaged."""
        try:
            return cls.from_bytes(path.read_bytes())
        except (OSError, SafetensorError, KeyError, ValueError, TypeError):
            return None


_PLAIN = {f.name for f in fields(Part)} - {"norms", "hits", "scores", "rollouts", "evidence"}


@contextmanager
def writing(path: str | Path) -> Iterator[None]:
    """What the system refuses while this is written (a file for a folder, a full disk) as a ReportError."""
    try:
        yield
    except OSError as err:
        raise ReportError(
            path, "file", expected="a place that can be written", found=str(err)[:300],
            remedy="make room or correct the rights, or name another folder (OUT=...)",
        ) from err  # fmt: skip


def write_whole(path: Path, blob: bytes) -> None:
    """Write under another name first: a file of this name is always whole. Raises ReportError."""
    unfinished = path.with_name(f".{path.name}.{uuid4().hex}")  # processes of other machines share numbers
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            unfinished.write_bytes(blob)
            os.replace(unfinished, path)
        finally:
            unfinished.unlink(missing_ok=True)


# ---- keys: what makes a part the one of this file, these models and this plan ---------------------


def digest(value: Any) -> str:
    """sha256 over plain values, as hexadecimal digits."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()


def stamp(path: Path) -> list:
    """Path, size and time of a file."""
    stat = path.stat()
    return [str(path.resolve()), stat.st_size, stat.st_mtime_ns]


def file_key(path: Path, final: Path | None) -> str:
    """16 hexadecimal digits over name, path, size and time of the capture and of its final state's file.

    The path is that of the file behind links; the name is the link's own, for loss masks go by it.
    """
    found = [[p.name, *stamp(p)] if p.exists() else str(p) for p in (path, final) if p is not None]
    return digest(found)[:16]


def model_stamp(path: Path) -> list:
    """Names, sizes and times of a checkpoint's files, its JSON files and its safetensors headers.

    Every file that a reader may open: those beside a weights file that is named itself, and Automodel's
    inner folder with the `eagle_meta.pt` around it. Shards lie beside their index, never deeper.
    """
    folder = draft_folder(path)
    files = {p for place in (path, folder) if place.is_dir() for p in place.glob("*") if p.is_file()}
    files |= {p for p in (meta_file(folder),) if p}
    stamps: list = []
    for file in sorted(files):
        stamps.append(stamp(file))
        if file.suffix == ".json":
            stamps.append(hashlib.sha256(file.read_bytes()).hexdigest())
        if file.suffix == ".safetensors":
            with file.open("rb") as f:  # 8 bytes of length, then the header (safetensors' format)
                length = min(int.from_bytes(f.read(8), "little"), file.stat().st_size)
                stamps.append(hashlib.sha256(f.read(length)).hexdigest())
    return stamps


# ---- tensors of a part ----------------------------------------------------------------------------


def _under(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}


_STATS = ("count", "mean", "m2", "low", "high")


def _norms_to_tensors(tap: str, norms: TapNorms) -> dict[str, Tensor]:
    """Numbers (4, 5) as float64 and each part's digest as bytes: JSON has no infinities."""
    rows = [[getattr(norms.parts[p], n) for n in _STATS] for p in PARTS]
    tensors = {f"norms.{tap}": torch.tensor(rows, dtype=torch.float64)}
    for i, part in enumerate(PARTS):
        raw = bytearray(norms.parts[part].digest.serialize())
        tensors[f"digest.{tap}.{i}"] = torch.frombuffer(raw, dtype=torch.uint8)
    return tensors


def _norms_from_tensors(tap: str, tensors: dict[str, Tensor]) -> TapNorms:
    parts = {}
    for i, (part, row) in enumerate(zip(PARTS, tensors[f"norms.{tap}"].tolist(), strict=True)):
        sketch = tdigest_double.deserialize(tensors[f"digest.{tap}.{i}"].numpy().tobytes())
        parts[part] = NormStats(int(row[0]), *row[1:], sketch)
    return TapNorms(parts)
