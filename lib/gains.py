"""Statistics of a search: who drops out of the race, what a change gains, and how sure that is.

Gains are paired by conversation and tested with Student's t, one-sided, against all candidates of a round
(Bonferroni, the level shared between groups of candidates).

Axes: C candidates, M conversations.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from scipy.stats import t as student
from torch import Tensor

from lib.candidates import Candidate
from lib.metrics import bootstrap_interval, resample_weights

FIRST = 3  # conversations at the first look
FAR = 0.15  # nats a token behind the leader, in each of the first few texts: out without a test
SCALES = ("head_norm",)  # changes that mostly make logits larger or smaller: hits must gain as well, ...
LOUD = 1.0  # nats a token that the text becomes likelier by: no matter of calibration, whatever hits say
PROMISING = 0.1  # p below which it looks better
DROP = 1e-3  # chance, at each look, that a candidate as good as the leader is dropped


@dataclass(frozen=True)
class Gain:
    """What a candidate gains over the base, paired by conversation.

    Attributes:
        candidate: the change.
        nats: (value, low, high) per position.
        points: gain in hits per position at the depths judged.
        p_value: one-sided, corrected for all that was tried in the round (`corrections`).
        positions, conversations: n of both.
    """

    candidate: Candidate
    nats: tuple[float, float, float]
    points: float
    p_value: float
    positions: int
    conversations: int


def survivors(
    scores: Tensor, alive: list[int], patient: set[int] = frozenset(), counts: Tensor | None = None
) -> list[int]:
    """Who is not clearly behind the leader; the base (row 0) always stays, copies of the base do not.

    Args:
        scores: (1 + C, n) sums of the n conversations seen.
        patient: may equal the base for now (a clamp that only long texts feel).
        counts: (n,) positions; at the first look they allow to drop who is `FAR` behind in every text, where
            too few texts are there for a test.
    """
    n = scores.shape[1]
    rest = [i for i in alive if i and (i in patient or not torch.equal(scores[i], scores[0]))]
    if n < 2 or not rest:
        return [0, *rest]
    leader = max([0, *rest], key=lambda i: float(scores[i].sum()))
    limit = float(student.ppf(1 - DROP, n - 1))
    behind = scores[leader][None] - scores[rest]  # (R, n)
    if counts is not None and 1 < n <= FIRST:
        far = (behind > FAR * counts).all(1).tolist()
        return [0, *(i for i, out in zip(rest, far, strict=True) if not out)]
    spread = behind.std(1).clamp(min=0.5) * n**0.5
    return [0, *(i for i, b, s in zip(rest, behind.sum(1), spread, strict=True) if b <= limit * s)]


def promising(scores: Tensor, alive: list[int]) -> bool:
    """Whether anybody looks better than the base, before any correction."""
    return any(p_value(scores[i] - scores[0], 1) < PROMISING for i in alive if i)


SHARES = {"suspected": 2, "deep": 1, "rest": 5}  # of the level, between the groups that have candidates


def group(candidate: Candidate) -> str:
    """Whose share of the level it is tested with, a key of `SHARES`."""
    return "suspected" if candidate.suspected else "deep" if candidate.deep else "rest"


def corrections(every: Sequence[Candidate]) -> dict[str, float]:
    """What to multiply p-values with, by group: candidates of the group over its share of the level.

    Suspected ones are few and likely; deep ones are few, and would drown among the rest.
    """
    sizes = Counter(map(group, every))
    whole = sum(SHARES[g] for g in sizes)
    return {g: n * whole / SHARES[g] for g, n in sizes.items()}


def p_value(gain: Tensor, tries: float) -> float:
    """One-sided paired t test that the mean of `gain` (n,) is not above 0, corrected for `tries`.

    Half a nat a conversation is the least spread believed: equal differences by luck are no certainty.
    """
    n = len(gain)
    if n < 2:
        return 1.0
    t = float(gain.sum()) / (max(float(gain.std()), 0.5) * n**0.5)
    return min(1.0, tries * float(student.sf(t, n - 1)))


def gain_of(candidate: Candidate, scores: Tensor, hits: Tensor, counts: Tensor, tries: float) -> Gain:
    """A `Gain` from per-conversation differences (M,) in nats and hits, and position counts."""
    p = p_value(scores, tries)
    if candidate.field in SCALES and float(scores.sum()) < LOUD * float(counts.sum()):
        p = max(p, p_value(hits, tries))
    if candidate.deep:  # two tests, so each counts twice; both have to point the same way
        p = min(2 * p, 2 * p_value(hits, tries), 1.0) if float(scores.sum()) > 0 else 1.0
    weights = resample_weights(len(counts))
    low, high = bootstrap_interval((weights @ scores) / (weights @ counts.double()))
    total = int(counts.sum())
    return Gain(
        candidate, (float(scores.sum()) / total, low, high), float(hits.sum()) / total,
        p, total, len(counts),
    )  # fmt: skip
