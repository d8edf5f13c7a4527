"""Finished files as Parquet: one row per capture file, so that a run over any number of them can go on.

    OUT/<plan>/plan.json                        what was measured, to read
    OUT/<plan>/done/bucket=b3f/<key>.parquet     one row: sums, norms, and the part itself
    OUT/<plan>/failed/<key>.json                why a file was set aside

`<plan>` is the plan's fingerprint, `<key>` that of the file (`lib.parts`): a changed draft or file has
other names, so nothing old is counted. A row appears under its name whole or not at all. OUT is a path or
any URL that fsspec knows. To read the rows elsewhere: `pandas.read_parquet(".../done", columns=[...])`,
or Dask's; the columns are in `SCHEMA`.

Axes: W wirings, D depths, C candidates, K taps.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Collection, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path

import fsspec
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from fsspec.implementations.local import LocalFileSystem

from lib.evaluate import Plan
from lib.norms import TapNorms, merge_norms
from lib.parts import SUMS, Part, write_whole, writing

COUNTS = pa.list_(pa.int64())
SCHEMA = pa.schema(
    [
        ("key", pa.string()),
        ("file", pa.string()),
        ("stratum", pa.string()),
        ("bytes", pa.int64()),  # of the capture and of its final state's file
        ("seconds", pa.float64()),  # from the first byte to the finished part
        ("worker", pa.string()),
        ("layout", pa.string()),
        ("length", pa.int64()),
        ("scored", pa.int64()),
        ("tokens", pa.string()),  # sha256 of the token ids
        ("count", pa.int64()),  # in-vocab positions
        ("candidate_hits", COUNTS),  # (C,)
        ("candidate_nats", pa.list_(pa.float64())),  # (C,)
        *((name, pa.list_(COUNTS)) for name in SUMS),  # (W, D) each
        ("taps", pa.list_(pa.string())),  # (K,) that have norms
        ("norm_count", COUNTS),  # (K,)
        ("norm_mean", pa.list_(pa.float64())),  # (K,) all positions
        ("norm_mean_no_sinks", pa.list_(pa.float64())),  # (K,)
        ("norms", pa.binary()),  # mergeable statistics: a `Part` that holds nothing else
        ("part", pa.binary()),  # the rest of the `Part`
    ]
)
BLOBS = {"norms", "part"}
LIGHT = [name for name in SCHEMA.names if name not in BLOBS]


@dataclass(frozen=True)
class Source:
    """One capture file to measure.

    Attributes:
        file: path or URL; final: of the file with its final state, "" if none is needed.
        key: of both as they were when they were listed (`lib.parts.file_key`).
        stratum: the group it is drawn from when not all files are measured.
    """

    file: str
    final: str = ""
    key: str = ""
    stratum: str = ""


@dataclass(frozen=True)
class Store:
    """The folder of one plan's results; plain values, so that workers can be handed one.

    Attributes:
        out: path or URL.
        plan: fingerprint.
        whole: rows hold what there is per position too (a report needs it), not sums and norms alone.
    """

    out: str
    plan: str
    whole: bool = False

    @cached_property
    def _place(self) -> tuple[fsspec.AbstractFileSystem, str]:
        fs, root = fsspec.core.url_to_fs(self.out)
        return fs, f"{root.rstrip('/')}/{self.plan[:16]}{'-whole' if self.whole else ''}"

    def __getstate__(self):
        """Without the connection."""
        return {"out": self.out, "plan": self.plan, "whole": self.whole}

    @property
    def folder(self) -> str:
        """Where the rows are."""
        return f"{self._place[1]}/done"

    def describe(self, plan: Plan) -> None:
        """Write plan.json beside the rows."""
        text = json.dumps({"fingerprint": self.plan, **asdict(plan)}, indent=1)
        self._write(f"{self._place[1]}/plan.json", text.encode())

    def finished(self) -> set[str]:
        """Keys of all files that have a row."""
        return {n.removesuffix(".parquet") for n in self._names(self.folder) if n.endswith(".parquet")}

    def has(self, key: str) -> bool:
        """Whether this file has a row."""
        return self._place[0].exists(self._row(key))

    def add(self, row: dict) -> None:
        """Write a row. Raises ReportError for what the file system refuses."""
        blob = io.BytesIO()
        # Of one row, statistics, dictionaries and a second copy of the schema would be most of the file.
        table = pa.Table.from_pylist([row], schema=SCHEMA)
        pq.write_table(
            table, blob, compression="zstd", use_dictionary=False, write_statistics=False, store_schema=False
        )
        self._write(self._row(row["key"]), blob.getvalue())
        fs, root = self._place
        if fs.exists(failed := f"{root}/failed/{row['key']}.json"):
            fs.rm_file(failed)

    def set_aside(self, source: Source, error: str, kind: str) -> None:
        """Keep why a file has no row."""
        told = {"file": source.file, "error": error, "error_kind": kind, "key": source.key}
        self._write(f"{self._place[1]}/failed/{source.key}.json", json.dumps(told, indent=1).encode())

    def failed(self, keys: Collection[str]) -> pd.DataFrame:
        """File, error and error_kind of the files set aside among these keys."""
        fs, root = self._place
        names = sorted(n for n in self._names(f"{root}/failed") if n.removesuffix(".json") in keys)
        rows = [json.loads(fs.cat_file(f"{root}/failed/{n}")) for n in names]
        return pd.DataFrame(rows, columns=["file", "error", "error_kind", "key"])

    def rows(self, keys: Collection[str], columns: list[str] | None = None) -> pd.DataFrame:
        """Rows of these keys in order of key; without the blobs unless they are asked for."""
        paths = [self._row(k) for k in sorted(keys)]
        if not paths:
            return pd.DataFrame(columns=columns or LIGHT)
        table = pq.read_table(
            paths, filesystem=self._place[0], columns=columns or LIGHT, schema=SCHEMA, partitioning=None
        )
        return table.to_pandas()

    def parts(self, keys: Iterable[str]) -> Iterator[Part]:
        """Parts of these keys, in their order, one in memory at a time."""
        for key in keys:
            (row,) = pq.read_table(
                self._row(key), filesystem=self._place[0], columns=["norms", "part"], partitioning=None
            ).to_pylist()
            yield replace(Part.from_bytes(row["part"]), norms=Part.from_bytes(row["norms"]).norms)

    def norms(self, keys: Collection[str]) -> Part:
        """Merged norms of these keys: a part that holds nothing else, so that it can be sent."""
        merged: dict[str, TapNorms] = {}
        for blob in self.rows(keys, ["norms"])["norms"]:
            merged = merge_norms(merged, Part.from_bytes(blob).norms)
        return Part(self.plan, self.folder, "norms", norms=merged)

    def _row(self, key: str) -> str:
        return f"{self.folder}/bucket={bucket(key)}/{key}.parquet"

    def _names(self, folder: str) -> list[str]:
        fs, _ = self._place
        fs.invalidate_cache()
        return [os.path.basename(p) for p in fs.find(folder)] if fs.exists(folder) else []

    def _write(self, path: str, blob: bytes) -> None:
        fs, _ = self._place
        if isinstance(fs, LocalFileSystem):
            write_whole(Path(path), blob)
            return
        with writing(path):
            fs.makedirs(os.path.dirname(path), exist_ok=True)
            fs.pipe_file(path, blob)  # an object store shows what was put whole, or not at all


def bucket(key: str) -> str:
    """The partition of a key: 256 of them, so that no folder is long and norms merge in two steps.

    The letter keeps readers from taking "94" for a number and "3f" for a text.
    """
    return f"b{key[:2]}"


def to_row(part: Part, source: Source, *, size: int, seconds: float, worker: str, whole: bool) -> dict:
    """The row of a part.

    Args:
        size: bytes read. seconds: what it took. worker: who did it.
        whole: keep what is there per position too (a report needs it), not sums and norms alone.
    """
    norms = Part(part.plan, part.file, part.name, norms=part.norms)
    rest = replace(part if whole else _sums_alone(part), norms={})
    parts = [n.parts for n in part.norms.values()]
    return {
        "key": source.key, "file": source.file, "stratum": source.stratum, "bytes": size,
        "seconds": seconds, "worker": worker, "layout": part.layout, "length": part.length,
        "scored": part.scored, "tokens": part.tokens, "count": part.count,
        "candidate_hits": part.hits.tolist(), "candidate_nats": part.scores.tolist(),
        **{name: [r.of(name).tolist() for r in part.rollouts] for name in SUMS},
        "taps": list(part.norms), "norm_count": [p["all"].count for p in parts],
        "norm_mean": [p["all"].mean for p in parts],
        "norm_mean_no_sinks": [p["without sinks"].mean for p in parts],
        "norms": norms.to_bytes(), "part": rest.to_bytes(),
    }  # fmt: skip


def _sums_alone(part: Part) -> Part:
    none = torch.zeros(0, dtype=torch.int32)
    wide = none.view(0, 1)
    rolled = tuple(
        replace(r, position=none, draft_ids=wide, target_ids=wide, truth=wide, in_vocab=wide.bool())
        for r in part.rollouts
    )
    why = part.no_evidence or "the run kept sums alone"
    return replace(part, rollouts=rolled, evidence=(), no_evidence=why)
