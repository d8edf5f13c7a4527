"""lib/partitions.py: a row holds its part, appears whole or not at all, and reads as plain Parquet."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path

import pandas as pd
import pytest
import torch

from lib.errors import ReportError
from lib.evaluate import Plan, Tools, evaluate_file
from lib.norms import PARTS, merge_norms
from lib.partitions import LIGHT, SCHEMA, Source, Store, bucket, to_row
from lib.parts import COLUMNS, SUMS, Part, file_key
from tests.support import random_capture_tensors, speculators_draft, tiny_llama, write_legacy

NAMES = ("embed", "layer3", "layer4", "layer6")


@pytest.fixture(scope="module")
def measured(tmp_path_factory) -> tuple[Plan, list[tuple[Source, Part]]]:
    """Three captures of a tiny draft, measured."""
    folder = tmp_path_factory.mktemp("rows")
    rng = torch.Generator().manual_seed(7)
    speculators_draft().save_pretrained(folder / "draft")
    tiny_llama().save_pretrained(folder / "target")
    plan = Plan(
        str(folder / "draft"), str(folder / "target"), names=(NAMES,), wirings=(NAMES[:3], NAMES[1:]),
        candidates=(NAMES[:3], NAMES[1:]), depth=3,
    )  # fmt: skip
    tools, found = Tools(plan), []
    for i, length in enumerate((201, 334, 227)):
        file = write_legacy(folder / f"data_{i}.pt", random_capture_tensors(length, rng))
        part = evaluate_file(file, plan, tools=tools)
        assert not part.error
        found.append((Source(str(file), key=file_key(file, None), stratum="s"), part))
    return plan, found


def filled(folder: Path, measured, whole: bool = False) -> Store:
    plan, found = measured
    store = Store(str(folder), found[0][1].plan, whole)
    store.describe(plan)
    for source, part in found:
        store.add(to_row(part, source, size=5, seconds=0.5, worker="w", whole=whole))
    return store


def test_a_row_holds_what_the_part_says(tmp_path, measured):
    store = filled(tmp_path, measured)
    assert store.finished() == {s.key for s, _ in measured[1]}
    rows = store.rows(store.finished()).set_index("key")
    for source, part in measured[1]:
        row = rows.loc[source.key]
        assert (row["file"], row["stratum"], row["bytes"], row["length"]) == (
            source.file,
            "s",
            5,
            part.length,
        )
        for name in SUMS:
            assert [list(w) for w in row[name]] == [r.of(name).tolist() for r in part.rollouts]
        assert list(row["candidate_hits"]) == part.hits.tolist()
        assert list(row["candidate_nats"]) == part.scores.tolist()
        assert list(row["taps"]) == list(part.norms)
        assert list(row["norm_mean"]) == [n.parts["all"].mean for n in part.norms.values()]


@pytest.mark.parametrize("whole", [False, True])
def test_the_part_comes_back(tmp_path, measured, whole):
    store = filled(tmp_path, measured, whole)
    keys = [s.key for s, _ in measured[1]]
    for (_, part), again in zip(measured[1], store.parts(keys), strict=True):
        assert (again.name, again.count, again.tokens, again.taps) == (
            part.name, part.count, part.tokens, part.taps,
        )  # fmt: skip
        for a, b in zip(part.rollouts, again.rollouts, strict=True):
            assert torch.equal(a.sums, b.sums) and a.taps == b.taps
            for column in COLUMNS:
                assert torch.equal(getattr(a, column), getattr(b, column)) == whole
        assert len(again.evidence) == (len(part.evidence) if whole else 0)
        assert whole or again.no_evidence
        for tap, norms in part.norms.items():
            assert all(again.norms[tap].parts[p].mean == norms.parts[p].mean for p in PARTS)


def test_sums_alone_are_small(tmp_path, measured):
    sizes = {}
    for whole in (False, True):
        store = filled(tmp_path / str(whole), measured, whole)
        sizes[whole] = sum(p.stat().st_size for p in Path(store.folder).rglob("*.parquet"))
    assert sizes[False] < 0.5 * sizes[True]


def test_norms_of_rows_are_those_of_the_parts(tmp_path, measured):
    store = filled(tmp_path, measured)
    merged: dict = {}
    for _, part in sorted(measured[1], key=lambda m: m[0].key):
        merged = merge_norms(merged, part.norms)
    found = pickle.loads(pickle.dumps(store.norms(store.finished()))).norms
    assert found.keys() == merged.keys()
    for tap, norms in merged.items():
        for p in PARTS:
            a, b = norms.parts[p], found[tap].parts[p]
            assert (a.count, a.mean, a.m2, a.low, a.high) == (b.count, b.mean, b.m2, b.low, b.high)
            assert not a.count or a.quantile(0.5) == b.quantile(0.5)


def test_others_read_the_rows_as_parquet(tmp_path, measured):
    import dask.dataframe

    store = filled(tmp_path, measured)
    rows = pd.read_parquet(store.folder)
    assert set(SCHEMA.names) <= set(rows.columns) and len(rows) == 3
    assert set(rows["bucket"].astype(str)) == {bucket(s.key) for s, _ in measured[1]}
    lazy = dask.dataframe.read_parquet(store.folder, columns=["length"])
    assert int(lazy["length"].sum().compute(scheduler="sync")) == 201 + 334 + 227


def test_plans_and_kinds_of_rows_have_folders_of_their_own(tmp_path, measured):
    places = {Store(str(tmp_path), p, whole).folder for p in ("a" * 64, "b" * 64) for whole in (False, True)}
    assert len(places) == 4
    store = filled(tmp_path, measured)
    told = json.loads((Path(store.folder).parent / "plan.json").read_text())
    assert told["fingerprint"] == store.plan and told["depth"] == 3


def test_a_file_set_aside_is_told_until_it_is_read(tmp_path, measured):
    source, part = measured[1][0]
    store = Store(str(tmp_path), part.plan)
    store.set_aside(source, "broken", "CaptureError")
    assert store.failed({source.key})["error"].tolist() == ["broken"]
    assert store.failed({"other"}).empty and not store.finished()
    store.add(to_row(part, source, size=1, seconds=1.0, worker="w", whole=False))
    assert store.failed({source.key}).empty and store.finished() == {source.key}


def test_a_half_written_row_is_no_row(tmp_path, measured):
    store = filled(tmp_path, measured)
    row = next(Path(store.folder).rglob("*.parquet"))
    row.rename(row.with_name(f".{row.name}.123"))  # what a killed writer leaves
    assert len(store.finished()) == 2 and len(pd.read_parquet(store.folder)) == 2
    assert list(store.rows(store.finished()).columns) == LIGHT


def test_no_row_is_an_empty_table(tmp_path):
    store = Store(str(tmp_path / "nothing"), "p" * 64)
    assert store.finished() == set() and store.rows(set()).empty and store.failed({"a"}).empty


def test_a_place_that_cannot_be_written(tmp_path, measured):
    (tmp_path / "file").write_text("in the way")
    _, found = measured
    store = Store(str(tmp_path / "file"), found[0][1].plan)
    with pytest.raises(ReportError, match="a place that can be written"):
        store.add(to_row(found[0][1], found[0][0], size=1, seconds=1.0, worker="w", whole=False))


def test_a_store_in_memory_works_as_an_object_store_does(measured):
    """fsspec's own memory file system: no renames, no local paths."""
    url = f"memory://rows-{os.getpid()}"
    store = filled(url, measured)
    again = pickle.loads(pickle.dumps(store))
    assert again.finished() == {s.key for s, _ in measured[1]}
    assert [p.name for p in again.parts(sorted(again.finished()))]
    assert len(again.rows(again.finished())) == 3
