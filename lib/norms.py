"""Norms of captured states per tap: mergeable statistics, with and without attention sinks.

The incident's first look at the data was a mean per state (1.04 for the embedding, 37.17 after layer
3). On many models a plain mean lies: the first position of a text is an attention sink whose norm is
a hundred times everybody else's, and one such position in two hundred doubles the mean.

Everything here is a sum, a count or a sketch, so statistics of two files merge into those of both.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pandas as pd
import torch
from datasketches import tdigest_double
from torch import Tensor

from lib.captures import Capture, row_blocks
from lib.errors import MetricError
from lib.taps import Stored, Tap

# A position is a sink when its norm exceeds this many times its own text's median at that tap.
SINK_FACTOR = 10.0
TOGETHER = 1 << 16  # norms put into a statistic at once: its costs are per call, not per norm
DIGEST_SIZE = 500  # t-digest compression: rank error under 1 % (200 gives 2 %), far less in the tails


@dataclass
class NormStats:
    """Count, mean, spread, extremes and quantiles of a set of norms; merges exactly but for quantiles.

    Mean and sum of squares are merged as Chan et al. (1979) do; quantiles by Apache DataSketches'
    t-digest, which is deterministic.
    """

    count: int = 0
    mean: float = 0.0
    m2: float = 0.0
    low: float = math.inf
    high: float = -math.inf
    digest: tdigest_double = field(default_factory=lambda: tdigest_double(DIGEST_SIZE), repr=False)

    @classmethod
    def of(cls, norms: Tensor) -> NormStats:
        """Statistics of (n,) norms, accumulated in float64."""
        stats = cls()
        if len(norms):
            wide = norms.double().numpy()  # numpy: a call on a few hundred numbers costs a third of torch's
            stats.count, stats.mean = len(wide), float(wide.mean())
            stats.m2 = float(np.square(wide - stats.mean).sum())
            stats.low, stats.high = float(wide.min()), float(wide.max())
            stats.digest.update(wide)
        return stats

    def merge(self, other: NormStats) -> NormStats:
        """Statistics of both sets together."""
        count = self.count + other.count
        if not (self.count and other.count):
            return replace(self if self.count else other)
        delta = other.mean - self.mean
        digest = tdigest_double(DIGEST_SIZE)
        digest.merge(self.digest)
        digest.merge(other.digest)
        return NormStats(
            count,
            self.mean + delta * other.count / count,
            self.m2 + other.m2 + delta**2 * self.count * other.count / count,
            min(self.low, other.low),
            max(self.high, other.high),
            digest,
        )

    @property
    def std(self) -> float:
        """Population standard deviation."""
        return math.sqrt(self.m2 / self.count) if self.count else math.nan

    def quantile(self, q: float) -> float:
        """The q-quantile, 0 <= q <= 1; NaN when empty."""
        return self.digest.get_quantile(q) if self.count else math.nan


PARTS = ("all", "without sinks", "sinks", "first position")


@dataclass
class TapNorms:
    """`NormStats` of one tap, for all positions and for the parts that behave differently."""

    parts: dict[str, NormStats] = field(default_factory=lambda: {p: NormStats() for p in PARTS})

    @classmethod
    def of(cls, states: Tensor) -> TapNorms:
        """Statistics of one capture's states (L, H) at one tap."""
        return cls.of_texts([position_norms(states)])

    @classmethod
    def of_texts(cls, texts: Sequence[Tensor]) -> TapNorms:
        """Statistics of several texts' norms (L,) at one tap; each has its own sinks and first position."""
        norms, mask = torch.cat(list(texts)), torch.cat([sink_mask(n) for n in texts])
        body, sinks = NormStats.of(norms[~mask]), NormStats.of(norms[mask])
        return cls(
            {
                "all": body.merge(sinks),  # the sketch takes in every norm once, not twice
                "without sinks": body,
                "sinks": sinks,
                "first position": NormStats.of(torch.cat([n[:1] for n in texts])),
            }
        )

    def merge(self, other: TapNorms) -> TapNorms:
        """Statistics of both together."""
        return TapNorms({p: self.parts[p].merge(other.parts[p]) for p in PARTS})

    @property
    def sink_share(self) -> float:
        """Share of positions that are sinks."""
        return self.parts["sinks"].count / max(1, self.parts["all"].count)


def position_norms(states: Tensor) -> Tensor:
    """Euclidean norm per position, (L, H) -> (L,) float32, without an fp32 copy of all states."""
    parts = [torch.linalg.vector_norm(part, dim=-1, dtype=torch.float32) for part in row_blocks(states)]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def checked_norms(capture: Capture, tap: Tap | Stored | str) -> Tensor:
    """(L,) float32 norms at one tap; CaptureError for NaN or Inf, as `Capture.state` raises it.

    One pass over the states does both: a norm is finite only if every number in it is.
    """
    norms = position_norms(capture.unchecked(tap))
    if math.isfinite(float(norms.sum())):
        return norms
    # Finite all the same: squares that overflow float32.
    return torch.linalg.vector_norm(capture.state(tap), dim=-1, dtype=torch.float64).float()


def sink_mask(norms: Tensor) -> Tensor:
    """(L,) bool: positions more than `SINK_FACTOR` times their text's median norm."""
    return norms > SINK_FACTOR * norms.median()


def merge_norms(a: Mapping[Any, TapNorms], b: Mapping[Any, TapNorms]) -> dict[Any, TapNorms]:
    """Statistics per tap of both."""
    return {**a, **{tap: a[tap].merge(one) if tap in a else one for tap, one in b.items()}}


def norm_statistics(
    captures: Iterable[Capture], taps: Sequence[Tap | Stored | str] | None = None
) -> dict[Tap | Stored | str, TapNorms]:
    """Statistics per tap over captures, one state in memory at a time (and `TOGETHER` norms per tap).

    Args:
        captures: read one after another.
        taps: which states; all stored ones (and "final" where present) if None.
    """
    total: dict[Tap | Stored | str, TapNorms] = {}
    waiting: dict[Tap | Stored | str, list[Tensor]] = {}
    lengths: Counter[Tap | Stored | str] = Counter()

    def put(tap: Tap | Stored | str) -> None:
        total.update(merge_norms(total, {tap: TapNorms.of_texts(waiting.pop(tap))}))
        lengths[tap] = 0

    for capture in captures:
        for tap in taps if taps is not None else capture.readers:
            norms = checked_norms(capture, tap)
            waiting.setdefault(tap, []).append(norms)
            lengths[tap] += len(norms)
            if lengths[tap] >= TOGETHER:
                put(tap)
    for tap in list(waiting):
        put(tap)
    if not total:
        raise MetricError(
            "norm_statistics", "captures", expected="at least one", found="none",
            remedy="open a folder with captures",
        )  # fmt: skip
    return total


def norm_table(statistics: dict) -> pd.DataFrame:
    """One row per tap: mean with and without sinks, median, 99th percentile, extremes, sink share."""
    rows = []
    for tap, norms in statistics.items():
        every, body = norms.parts["all"], norms.parts["without sinks"]
        rows.append(
            {
                "tap": str(tap),
                "positions": every.count,
                "mean (all)": every.mean,
                "mean (no sinks)": body.mean,
                "std (no sinks)": body.std,
                "median": every.quantile(0.5),
                "p1": every.quantile(0.01),
                "p99": every.quantile(0.99),
                "min": every.low,
                "max": every.high,
                "first position": norms.parts["first position"].mean,
                "sinks %": 100 * norms.sink_share,
            }
        )
    return pd.DataFrame(rows).set_index("tap")
