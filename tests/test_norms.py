"""Norm statistics: parts merge into the whole, and a sink does not hide in a mean."""

from __future__ import annotations

import functools
import math

import numpy as np
import pytest
import torch

from lib.captures import BLOCK, open_capture, row_blocks
from lib.errors import MetricError
from lib.norms import NormStats, TapNorms, norm_statistics, norm_table, position_norms, sink_mask
from lib.taps import Tap
from tests.support import random_capture_tensors, write_legacy

MOMENTS = ("count", "mean", "std", "low", "high")


@pytest.fixture
def norms(rng):
    """20,000 norms with a tail as long as that of real states."""
    return torch.exp(torch.randn(20_000, generator=rng) * 1.5 + 5)


def assert_same(a: NormStats, b: NormStats):
    for name in MOMENTS:
        assert getattr(a, name) == pytest.approx(getattr(b, name), rel=1e-9), name


@pytest.mark.parametrize("cuts", [(1,), (10_000,), (3, 4, 500, 19_999)])
def test_merged_parts_equal_the_whole(norms, cuts):
    """However the positions are spread over files, the statistics are those of all of them."""
    parts = [NormStats.of(torch.tensor(p)) for p in np.split(norms.numpy(), cuts)]
    assert_same(functools.reduce(NormStats.merge, parts), NormStats.of(norms))


def test_moments_equal_numpy(norms):
    """Count, mean, population spread and extremes are numpy's, in float64."""
    stats, wide = NormStats.of(norms), norms.double().numpy()
    expected = (len(wide), wide.mean(), wide.std(), wide.min(), wide.max())
    assert [getattr(stats, m) for m in MOMENTS] == pytest.approx(expected, rel=1e-12)


def test_quantiles_within_the_rank_error(norms):
    """The sketch's quantile of whole and merged sets lies within 1 % of the asked rank."""
    parts = [NormStats.of(p) for p in norms.split(777)]
    for stats in (NormStats.of(norms), functools.reduce(NormStats.merge, parts)):
        for q in (0.01, 0.25, 0.5, 0.75, 0.99):
            rank = (norms.double() <= stats.quantile(q)).double().mean().item()
            assert abs(rank - q) < 0.01, f"asked {q}, got rank {rank:.4f}"


def test_merging_is_associative(norms):
    """(a + b) + c is a + (b + c), and the order of the files does not matter."""
    a, b, c = (NormStats.of(p) for p in norms.split(8000))
    left = a.merge(b).merge(c)
    assert_same(left, a.merge(b.merge(c)))
    assert_same(left, c.merge(a).merge(b))


def test_empty_sets_are_neutral():
    """No positions change nothing; nothing at all has no spread and no quantile."""
    some, none = NormStats.of(torch.tensor([1.0, 3.0])), NormStats.of(torch.tensor([]))
    assert_same(some.merge(none), some)
    assert_same(none.merge(some), some)
    nothing = none.merge(NormStats())
    assert nothing.count == 0 and math.isnan(nothing.std) and math.isnan(nothing.quantile(0.5))


def test_a_sink_by_eye():
    """Norms 500, 1, 2, 3: the first is over ten times the median (2 of 1, 2, 3, 500)."""
    states = torch.tensor([[300.0, 400.0], [1.0, 0.0], [0.0, 2.0], [3.0, 0.0]])
    assert position_norms(states).tolist() == [500, 1, 2, 3]
    assert sink_mask(position_norms(states)).tolist() == [True, False, False, False]
    norms = TapNorms.of(states)
    assert norms.sink_share == 0.25
    assert {p: s.mean for p, s in norms.parts.items()} == {
        "all": 126.5, "without sinks": 2.0, "sinks": 500.0, "first position": 500.0,
    }  # fmt: skip


def test_a_sink_is_judged_by_its_own_text():
    """20 is a sink among ones and nothing special among twenties; merging does not judge again."""
    quiet, loud = torch.tensor([20.0, 1, 1, 1])[:, None], torch.full((4, 1), 20.0)
    merged = TapNorms.of(quiet).merge(TapNorms.of(loud))
    assert merged.parts["sinks"].count == 1 and merged.sink_share == 1 / 8


def test_parts_that_are_empty_merge():
    """Texts without any sink: the sinks' part stays empty, and the share is 0, not an error."""
    even = TapNorms.of(torch.ones(5, 2))
    both = even.merge(even)
    assert both.parts["sinks"].count == 0 and both.sink_share == 0 and TapNorms().sink_share == 0


def test_bf16_states_are_measured_in_fp32():
    """Squares of 300 overflow nothing and lose nothing but the states' own rounding."""
    states = torch.full((3, 4096), 300.0, dtype=torch.bfloat16)
    assert position_norms(states).dtype == torch.float32
    assert position_norms(states).tolist() == pytest.approx([300.0 * 64] * 3, rel=1e-5)


@pytest.mark.parametrize("length", [0, 1, 73, 74, 500])
def test_long_states_are_measured_in_blocks(length, rng):
    """Rows at and beyond the end of a block: the norms of the whole, in order; slots of a stack too."""
    width = 7168  # 73 rows a block
    states = torch.randn(length, 2, width, generator=rng).bfloat16()[:, 1]
    parts = row_blocks(states)
    assert [len(p) for p in parts[:-1]] == [BLOCK // width] * (len(parts) - 1) and len(parts[-1]) <= 73
    assert torch.equal(torch.cat(parts), states)
    whole = torch.linalg.vector_norm(states.float(), dim=-1)
    torch.testing.assert_close(position_norms(states), whole, rtol=1e-6, atol=0)


def test_table_over_captures(tmp_path, rng):
    """One row per stored state, every position counted, numbers those of all states put together."""
    tensors = [random_capture_tensors(n, rng) for n in (5, 8, 13)]
    files = [write_legacy(tmp_path / f"data_{i}.pt", t) for i, t in enumerate(tensors)]
    captures = [open_capture(f, taps=("embed", "layer3", "layer4", "layer6")) for f in files]
    table = norm_table(norm_statistics(captures))
    assert list(table.index) == ["embed", "layer3", "layer4", "layer6"]
    assert list(table.columns) == [
        "positions", "mean (all)", "mean (no sinks)", "std (no sinks)", "median", "p1", "p99",
        "min", "max", "first position", "sinks %",
    ]  # fmt: skip
    layer3 = torch.cat([t["hidden_states"][1] for t in tensors]).norm(dim=-1)
    row = table.loc["layer3"]
    assert row["positions"] == 26
    assert row["mean (all)"] == pytest.approx(layer3.mean().item(), rel=1e-6)
    assert row["max"] == pytest.approx(layer3.max().item(), rel=1e-6)
    assert list(norm_statistics(captures, [Tap(3)])) == [Tap(3)]


def test_no_captures_is_a_named_error():
    """Statistics of nothing are refused, with what to do."""
    with pytest.raises(MetricError, match="captures: expected at least one"):
        norm_statistics([])
