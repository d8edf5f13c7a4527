"""Which contract was this draft trained under? Try many, exactly or as a race.

All candidates of a batch share its states, its (slot, tap) products and its embeddings' half of the
projections (`draft.Batch`), so 24 orders of 3 of 4 taps need 12 products, not 72.

A race evaluates candidates on growing, disjoint groups of conversations and drops those that are
clearly behind the leader, paired by conversation (Student's t, one-sided, Bonferroni over the
candidates; a spread no smaller than is usual among them). The last two run through everything: the
winner is confirmed, with its gap.
"""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd
import torch
from scipy.stats import t as student
from torch import Tensor

from lib.captures import Capture
from lib.contract import Contract
from lib.draft import Batch, DraftForward
from lib.errors import ContractError
from lib.metrics import bootstrap_interval, resample_weights
from lib.taps import Stored, Tap
from lib.transfer import batches_for

FEWEST = 5  # conversations; an interval over fewer says nothing: over one it has no width at all
GROWTH = 1.5  # how far a race's next round goes: more rounds drop losers sooner, each costs some error


def ordered_choices(taps: Sequence[Tap | Stored], slots: int) -> list[tuple[Tap | Stored, ...]]:
    """Every ordered choice of `slots` different taps: 24 for 3 of 4."""
    return list(itertools.permutations(taps, slots))


@dataclass(frozen=True)
class Sweep:
    """What every candidate scored on every conversation it was evaluated on.

    Candidates are ranked by the log-likelihood of the text's own in-vocab tokens, which is what
    training minimised (up to a constant); accuracy only sees when the first choice changes, and two
    wirings that differ in an unimportant slot can share almost all first choices.

    Attributes:
        contracts: C candidates.
        hits: (C, M) in-vocab hits at depth 0 per conversation.
        scores: (C, M) summed log-probability (nats) the draft gives the true in-vocab tokens.
        counts: (M,) in-vocab positions per conversation.
        seen: (C, M) bool; all true for an exact sweep.
    """

    contracts: tuple[Contract, ...]
    hits: Tensor
    scores: Tensor
    counts: Tensor
    seen: Tensor

    @property
    def accuracy(self) -> Tensor:
        """(C,) in-vocab accuracy over the conversations each candidate was evaluated on."""
        return self.hits.sum(1) / self._positions

    @property
    def log_likelihood(self) -> Tensor:
        """(C,) mean log-probability of a true token, nats, over the same conversations."""
        return self.scores.sum(1) / self._positions

    @property
    def _positions(self) -> Tensor:
        return (self.seen * self.counts).sum(1).clamp(min=1)

    @property
    def order(self) -> list[int]:
        """Candidates from best to worst; those that saw more come before those that dropped out."""
        seen, score = self.seen.sum(1).tolist(), self.log_likelihood.tolist()
        return sorted(range(len(seen)), key=lambda i: (-seen[i], -score[i]))

    @property
    def winner(self) -> Contract:
        """The best candidate."""
        return self.contracts[self.order[0]]

    @property
    def passes(self) -> float:
        """Work done, in single passes over all captures with one contract."""
        return float((self.seen * self.counts).sum() / self.counts.sum())

    def on(self, conversations: Tensor) -> Sweep:
        """The same candidates on a choice of conversations, (m,) indices; one may come more than once."""
        tables = (x[..., conversations] for x in (self.hits, self.scores, self.counts, self.seen))
        return Sweep(self.contracts, *tables)

    def gap(self) -> tuple[float, float, float]:
        """Best minus second best, nats per token, paired by conversation: value, low, high."""
        return self._gap(self.scores)

    def accuracy_gap(self) -> tuple[float, float, float]:
        """The same two candidates' difference in in-vocab accuracy: value, low, high."""
        return self._gap(self.hits)

    def _gap(self, amounts: Tensor) -> tuple[float, float, float]:
        first, second = self.order[:2]
        both = self.seen[first] & self.seen[second] & (self.counts > 0)
        gain = (amounts[first] - amounts[second])[both].double()
        counts = self.counts[both].double()
        weights = resample_weights(len(counts))
        low, high = bootstrap_interval((weights @ gain) / (weights @ counts))
        return float(gain.sum() / counts.sum()), low, high

    @property
    def decided(self) -> bool:
        """Whether the best is established: its gap's interval is above zero, over `FEWEST` conversations."""
        if len(self.contracts) < 2 or int((self.counts > 0).sum()) < FEWEST:
            return False
        return self.gap()[1] > 0

    def summary(self, raced: Sweep | None = None) -> dict[str, str]:
        """The answer in words: winner, gaps with intervals, work; and whether a race agrees."""
        value, low, high = self.gap()
        points = [100 * x for x in self.accuracy_gap()]
        first, second = self.order[:2]
        rows = {
            "winner": " ".join(map(str, self.contracts[first].taps)),
            "accuracy": f"{100 * float(self.accuracy[first]):.1f} %",
            "second": " ".join(map(str, self.contracts[second].taps)),
            "gap, nats a token": f"{value:.4f} [{low:.4f}, {high:.4f}]",
            "gap, points of accuracy": f"{points[0]:.1f} [{points[1]:.1f}, {points[2]:.1f}]",
            "passes": f"{self.passes:.0f}",
        }
        if raced is not None:
            rows["race: winner"] = "the same" if raced.winner == self.winner else "ANOTHER"
            rows["race: passes"] = f"{raced.passes:.1f}"
        return rows

    def table(self, top: int | None = None) -> pd.DataFrame:
        """Candidates from best to worst with both scores and conversations seen."""
        rows = [
            {
                "taps": " ".join(map(str, self.contracts[i].taps)),
                "nats a token": round(float(self.log_likelihood[i]), 3),
                "in-vocab accuracy %": round(100 * float(self.accuracy[i]), 1),
                "conversations": int(self.seen[i].sum()),
            }
            for i in self.order[:top]
        ]
        return pd.DataFrame(rows, index=range(1, len(rows) + 1))


def sweep(forward: DraftForward, captures: Sequence[Capture], contracts: Sequence[Contract]) -> Sweep:
    """Every candidate on every capture."""
    return _Runner(forward, captures, contracts).exact()


def race(
    forward: DraftForward,
    captures: Sequence[Capture],
    contracts: Sequence[Contract],
    *,
    error: float = 0.01,
    first: int = 2,
    seed: int = 5,
) -> Sweep:
    """The same winner for a fraction of the work.

    Args:
        error: chance that a candidate as good as the leader is dropped, over all candidates and
            rounds together.
        first: conversations in the first round; each later round grows what was seen by `GROWTH`.
        seed: order of the conversations.
    """
    return _Runner(forward, captures, contracts).race(error, first, seed)


def replay(known: Sweep, *, error: float = 0.01, first: int = 2, seed: int = 5) -> Sweep:
    """The race over scores that an exact sweep has: whom it would have dropped, without the work.

    Arguments as in `race`. Raises ContractError if a candidate has not seen every conversation.
    """
    if not known.seen.all():
        raise ContractError(
            "replay", "known", expected="every candidate evaluated on every conversation",
            found=f"{int((~known.seen).sum())} of {known.seen.numel()} missing",
            remedy="replay the result of sweep(), not of race()",
        )  # fmt: skip
    return _Replay(known).race(error, first, seed)


class _Race(ABC):
    """Scores of C candidates on M conversations, filled in as they are evaluated: at once, or as a race."""

    def __init__(self, contracts: Sequence[Contract], conversations: int) -> None:
        self.contracts = list(contracts)
        shape = (len(self.contracts), conversations)
        self.hits = torch.zeros(shape, dtype=torch.int64)
        self.scores = torch.zeros(shape, dtype=torch.float64)
        self.seen = torch.zeros(shape, dtype=torch.bool)
        self.counts = torch.zeros(conversations, dtype=torch.int64)

    def exact(self) -> Sweep:
        self._evaluate(range(len(self.contracts)), range(len(self.counts)))
        return self._result()

    def race(self, error: float, first: int, seed: int) -> Sweep:
        first = max(1, first)
        order = torch.randperm(len(self.counts), generator=torch.Generator().manual_seed(seed)).tolist()
        ends = [min(first, len(order))]
        while ends[-1] < len(order):
            ends.append(min(len(order), math.ceil(GROWTH * ends[-1])))
        alive, done = list(range(len(self.contracts))), 0
        threshold = error / (len(self.contracts) * len(ends))
        for end in ends:
            self._evaluate(alive, order[done:end])
            done = end
            alive = self._survivors(alive, order[:done], threshold)
        return self._result()

    def _survivors(self, alive: list[int], seen: list[int], threshold: float) -> list[int]:
        """Drop what is clearly behind the leader, but keep the best two: their gap is the answer."""
        n = len(seen)
        if n < 2:  # one conversation has no spread to test against
            return alive
        score = self.scores[alive][:, seen].sum(1)
        ranked = [alive[i] for i in torch.argsort(score, descending=True, stable=True).tolist()]
        leader, rest = ranked[0], ranked[2:]
        if not rest:
            return ranked
        behind = self.scores[leader, seen] - self.scores[rest][:, seen]  # (R, n)
        own = behind.std(1)
        # A few differences can be equal by luck: no spread is believed that is smaller than what is usual
        # among the candidates, nor than half a nat a text. So all of them speak for it.
        spread = own.clamp(min=max(float(own.median()), 0.5))
        limit = float(student.ppf(1 - threshold, (n - 1) * len(rest)))
        stays = (behind.sum(1) <= limit * n**0.5 * spread).tolist()
        return ranked[:2] + [c for c, kept in zip(rest, stays, strict=True) if kept]

    @abstractmethod
    def _evaluate(self, candidates: Sequence[int], conversations: Sequence[int]) -> None:
        """Fill in the scores of these candidates on these conversations."""

    def _result(self) -> Sweep:
        return Sweep(tuple(self.contracts), self.hits, self.scores, self.counts, self.seen)


class _Runner(_Race):
    """Candidates evaluated on captures."""

    def __init__(self, forward, captures, contracts) -> None:
        if not contracts:
            raise ContractError(
                "sweep", "contracts", expected="at least one candidate", found="none",
                remedy="build candidates with ordered_choices()",
            )  # fmt: skip
        for contract in contracts:
            forward.check(captures, contract)
        super().__init__(contracts, len(captures))
        self.forward, self.captures = forward, captures

    def _evaluate(self, candidates, conversations) -> None:
        chosen = [self.captures[i] for i in conversations]
        contracts = [self.contracts[i] for i in candidates]
        for batch in batches_for(self.forward, chosen, contracts):
            where = torch.tensor([list(conversations)[i] for i in batch.indices])
            found = self.forward.scores(batch, contracts)
            for candidate, columns in zip(candidates, found, strict=True):
                counts, hits, scores = (_per_text(batch, x) for x in columns)
                self.hits[candidate, where], self.scores[candidate, where] = hits.long(), scores
                self.seen[candidate, where] = True
                self.counts[where] = counts.long()


class _Replay(_Race):
    """Candidates looked up in an exact sweep."""

    def __init__(self, known: Sweep) -> None:
        super().__init__(known.contracts, len(known.counts))
        self.known = known

    def _evaluate(self, candidates, conversations) -> None:
        at = torch.tensor(list(candidates))[:, None], torch.tensor(list(conversations))
        self.hits[at], self.scores[at], self.seen[at] = self.known.hits[at], self.known.scores[at], True
        self.counts[at[1]] = self.known.counts[at[1]]


def _per_text(batch: Batch, values: Tensor) -> Tensor:
    """Sums of (S,) values over each conversation of the batch, float64."""
    total = torch.zeros(len(batch.indices), dtype=torch.float64)
    return total.index_add(0, batch.owner, values.double())
