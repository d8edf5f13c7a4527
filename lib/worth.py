"""What a wiring is worth: accuracy, and tokens per round by rollouts; and when a gain is only a remark."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lib.acceptance import walk
from lib.captures import Capture
from lib.checkpoints import Draft
from lib.contract import Contract
from lib.draft import DraftForward
from lib.errors import MetricError

NEGLIGIBLE = (0.001, 0.02)  # accuracy, tokens per round: significant gains below both are remarks
DEPTH = 5  # draft tokens a round when worth is told in tokens per round


@dataclass(frozen=True)
class Worth:
    """What a wiring achieves.

    Attributes:
        accuracy: in-vocab accuracy at depth 0; n: its positions.
        hits: of all scored positions, whatever the map can say: comparable between maps.
        tokens: per round at depth `DEPTH`, bonus included; texts: conversations it was rolled out on.
    """

    accuracy: float
    n: int
    tokens: float
    texts: int
    hits: float = 0.0


def worth(draft: Draft, contract: Contract, captures: Sequence[Capture], limit: int = 8) -> Worth:
    """Accuracy over all captures, tokens per round by rollouts on the first `limit`."""
    forward = DraftForward(draft)
    known = draft.draft_ids(contract.vocab_map) >= 0
    p = forward.predict(captures, contract)
    counted = known[p.truth[:, 0].clamp(min=0)] & (p.truth[:, 0] >= 0)
    hits = p.hit[:, 0] & counted
    few = [c for c in captures if len(c.scored)][:limit]
    chains = forward.predict(few, contract, depths=DEPTH, feed="own")
    n = int(counted.sum())
    return Worth(
        float(hits.sum()) / max(1, n),
        n,
        tokens_per_round(chains, few),
        len(few),
        float(p.hit[:, 0].float().mean()),
    )


def tokens_per_round(chains, captures: Sequence[Capture]) -> float:
    """By `acceptance.walk`; texts of several answers: 1 + mean accepted over all positions."""
    try:
        return walk(chains, captures).tokens_per_round
    except MetricError:
        return 1 + float(chains.hit.int().cumprod(1).sum(1).float().mean())


def matters(before: Worth, after: Worth) -> bool:
    """Whether a gain is more than a remark: in hits, or in tokens per round without fewer hits."""
    gained, more = after.hits - before.hits, after.tokens - before.tokens
    return gained >= NEGLIGIBLE[0] or (gained >= 0 and more >= NEGLIGIBLE[1])
