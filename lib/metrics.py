"""What "accuracy" means: each metric a ratio with its numerator, denominator and interval.

Two that the incident turned on, from one table of predictions:

- in-vocab accuracy: only positions whose true next token the draft can produce at all;
- all-token accuracy: every position; tokens outside the draft's vocabulary count as misses.

And the trainer's own (speculators `models/metrics.py`), whose targets are the target model's argmax
*within the draft vocabulary*, not the text's tokens.

Positions of one conversation are not independent: intervals resample whole conversations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lib.captures import FINAL, Capture
from lib.checkpoints import Draft
from lib.draft import Predictions
from lib.errors import MetricError
from lib.taps import Stored, Tap
from lib.target_head import TargetHead

RESAMPLES = 2000
LEVEL = 0.95
SEED = 20251129


@dataclass(frozen=True)
class Ratio:
    """A metric: numerator over denominator, with a bootstrap interval over conversations."""

    name: str
    numerator: int
    denominator: int
    low: float
    high: float
    conversations: int

    @property
    def value(self) -> float:
        """The ratio itself."""
        return self.numerator / self.denominator

    def __str__(self) -> str:
        """`in-vocab accuracy 53.1 % [51.0, 55.2] (2655 / 5000 positions, 32 conversations)`."""
        return (
            f"{self.name} {100 * self.value:.1f} % [{100 * self.low:.1f}, {100 * self.high:.1f}] "
            f"({self.numerator} / {self.denominator} positions, {self.conversations} conversations)"
        )

    def row(self) -> dict:
        """For tables."""
        return {
            "metric": self.name,
            "%": round(100 * self.value, 1),
            "95 % interval": f"{100 * self.low:.1f} .. {100 * self.high:.1f}",
            "hits": self.numerator,
            "of": self.denominator,
            "conversations": self.conversations,
        }


def per_conversation(values: Tensor, capture: Tensor, n: int) -> Tensor:
    """Sums (n,) of flags or whole numbers (S,) in each conversation."""
    return torch.zeros(n, dtype=torch.int64).index_add_(0, capture, values.long())


def resample_weights(n: int, resamples: int = RESAMPLES, seed: int = SEED) -> Tensor:
    """(resamples, n) how often each conversation is drawn, n draws with replacement per row."""
    rng = torch.Generator().manual_seed(seed)
    draws = torch.randint(0, n, (resamples, n), generator=rng)
    return torch.zeros(resamples, n).scatter_add_(1, draws, torch.ones(resamples, n)).double()


def bootstrap_interval(values: Tensor, level: float = LEVEL) -> tuple[float, float]:
    """Percentile interval of resampled values."""
    tail = (1 - level) / 2
    low, high = torch.quantile(values, torch.tensor([tail, 1 - tail], dtype=values.dtype)).tolist()
    return low, high


def ratio(name: str, hits: Tensor, counts: Tensor) -> Ratio:
    """Ratio of sums with its interval.

    Args:
        hits, counts: (n,) numerator and denominator of each conversation.

    Raises MetricError if nothing counts.
    """
    used = counts > 0
    hits, counts = hits[used], counts[used]
    if not len(counts):
        raise MetricError(
            name, "denominator", expected="at least one position that counts", found="none",
            remedy="check the loss mask and the draft's vocabulary",
        )  # fmt: skip
    weights = resample_weights(len(counts))
    low, high = bootstrap_interval((weights @ hits.double()) / (weights @ counts.double()))
    return Ratio(name, int(hits.sum()), int(counts.sum()), low, high, len(counts))


def in_vocab_accuracy(p: Predictions, depth: int = 0) -> Ratio:
    """Hits over positions whose true token is in the draft's vocabulary (the incident's first metric)."""
    return _accuracy("in-vocab accuracy", p, depth, p.in_vocab[:, depth])


def all_token_accuracy(p: Predictions, depth: int = 0) -> Ratio:
    """Hits over all positions; a token outside the draft's vocabulary is a miss."""
    return _accuracy("all-token accuracy", p, depth, p.truth[:, depth] >= 0)


def coverage(p: Predictions, depth: int = 0) -> Ratio:
    """Share of true tokens that the draft can produce: the ceiling of all-token accuracy."""
    n = int(p.capture.max()) + 1
    counts = per_conversation(p.truth[:, depth] >= 0, p.capture, n)
    return ratio("coverage", per_conversation(p.in_vocab[:, depth], p.capture, n), counts)


def _accuracy(name: str, p: Predictions, depth: int, counted: Tensor) -> Ratio:
    n = int(p.capture.max()) + 1
    hits = per_conversation(p.hit[:, depth] & counted, p.capture, n)
    return ratio(name, hits, per_conversation(counted, p.capture, n))


def difference(a: Predictions, b: Predictions, depth: int = 0) -> tuple[float, float, float]:
    """In-vocab accuracy of `a` minus that of `b` on the same positions, paired by conversation.

    Returns: difference, and its interval's low and high end.
    """
    if not torch.equal(a.position, b.position) or not torch.equal(a.capture, b.capture):
        raise MetricError(
            "difference", "positions", expected="two predictions of the same positions",
            found="different ones", remedy="evaluate both on the same captures",
        )  # fmt: skip
    n, counted = int(a.capture.max()) + 1, a.in_vocab[:, depth]
    counts = per_conversation(counted, a.capture, n)
    gain = per_conversation(a.hit[:, depth] & counted, a.capture, n) - per_conversation(
        b.hit[:, depth] & counted, b.capture, n
    )
    used = counts > 0  # as in ratio(): a resample of empty conversations only would be 0 / 0
    gain, counts = gain[used], counts[used]
    if not len(counts):
        raise MetricError(
            "difference", "denominator", expected="at least one in-vocab position", found="none",
            remedy="check the loss mask and the draft's vocabulary",
        )  # fmt: skip
    weights = resample_weights(len(counts))
    low, high = bootstrap_interval((weights @ gain.double()) / (weights @ counts.double()))
    return int(gain.sum()) / int(counts.sum()), low, high


def judged_too_early(p: Predictions, captures: Sequence[Capture], in_vocab: Tensor) -> Predictions:
    """The same depth-0 predictions compared with the token that was fed, x_{t+1}: a misaligned test.

    Args:
        in_vocab: (V,) bool, ids the draft can produce.
    """
    pairs = zip(p.capture.tolist(), p.position.tolist(), strict=True)
    fed = torch.stack([captures[c].token_ids[t + 1] for c, t in pairs])
    return replace(p, truth=fed[:, None], in_vocab=in_vocab[fed][:, None])


def trainer_targets(
    captures: Sequence[Capture], draft: Draft, head: TargetHead, source: Tap | Stored | str = FINAL
) -> list[Tensor]:
    """Draft ids that the trainer scores against, per capture: (L - 1,) for pairs t = 0..L-2.

    The target's argmax at position t + 1, restricted to the draft's vocabulary (speculators
    `verifier_lm_head`). `source` is the state it is read from: the final one, or the inner state
    that a trainer mistook for it.
    """
    rows = draft.to_target(torch.arange(draft.draft_vocab))
    out = []
    for capture in captures:
        kind = capture.known_final_kind() if source == FINAL else "pre_norm"
        logits = head.logits(capture.state(source)[1:], final_kind=kind, rows=rows)
        out.append(logits.argmax(-1))
    return out


def speculators_accuracy(
    p: Predictions,
    captures: Sequence[Capture],
    targets: Sequence[Tensor],
    step: int,
    kind: str = "full",
) -> Ratio:
    """speculators' `full_acc_i` or `cond_acc_i` (`models/metrics.py:compute_accuracy_single_step`).

    A chain counts as correct at step i when it was correct at every step before (starting from the
    loss mask at its own start). `full` divides by the masked targets at step i, `cond` by the
    chains alive before it.

    Args:
        p: teacher-fed predictions at "all" positions, depths > step.
        targets: from `trainer_targets`.
    """
    if kind not in ("full", "cond"):
        raise MetricError(
            "speculators_accuracy", "kind", expected="'full' or 'cond'", found=repr(kind),
            remedy="see the docstring",
        )  # fmt: skip
    hits = torch.zeros(len(captures), dtype=torch.int64)
    counts = torch.zeros_like(hits)
    for i, (capture, target) in enumerate(zip(captures, targets, strict=True)):
        ids = p.draft_ids[p.capture == i]  # (L - 1, D)
        if len(ids) != len(capture) - 1:
            raise MetricError(
                "speculators_accuracy", "predictions", expected="positions='all'",
                found=f"{len(ids)} of {len(capture) - 1} pairs", remedy="predict all positions",
            )  # fmt: skip
        mask = capture.loss_mask[1:]  # (L - 1,) as `shift_batch` leaves it
        alive = mask.clone()
        for s in range(step + 1):
            n = len(ids) - s
            before = alive[:n]
            alive = before & (ids[:n, s] == target[s:])
        counted = mask[step:]
        hits[i] = (alive & counted).sum()
        counts[i] = counted.sum() if kind == "full" else before.sum()
    return ratio(f"{kind}_acc_{step}", hits, counts)
