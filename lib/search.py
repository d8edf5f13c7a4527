"""Which contract or draft near the declared one explains the text better? The race.

What is tried is in `lib.candidates`, the statistics are in `lib.gains`. Every candidate changes one thing.
All are judged on the same positions (every scored one, whatever the candidate's vocabulary map can say) by
the log-likelihood of the text's tokens, paired by conversation. A race drops what is clearly behind; what is
left sees every conversation. Position step and feedback do nothing at depth 0: they are judged at depths 1 to
3, fed with the text, where few extreme tokens can outweigh the rest in nats, so that hits are tested too.

Axes: C candidates, M conversations, S scored pairs of a batch, Vd draft vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lib.attention import rms_norm
from lib.candidates import Candidate
from lib.captures import Capture
from lib.checkpoints import Draft
from lib.contract import Contract
from lib.draft import LOG_FLOOR, Batch, DraftForward
from lib.gains import FIRST, Gain, corrections, gain_of, group, promising, survivors

STAGES = (FIRST, 6, 10, 18)  # conversations seen after each early stage of the race; the last stage sees all
DEEP = 3  # depths 1 .. DEEP judge what depth 0 cannot see
DEEP_TEXTS = 10  # conversations after which what does not look better is given up there
CACHE_BYTES = 1 << 30  # (slot, tap) products kept between rounds


@dataclass(frozen=True)
class Round:
    """One search around one base.

    Attributes:
        gains: of every candidate that saw all conversations, best first.
        tried: candidates in the round; `dropped` of them clearly behind the leader early.
        scores, hits: (1 + C, M) sums over each conversation, the base first; NaN where not evaluated.
        counts: (M,) positions.
    """

    gains: tuple[Gain, ...]
    tried: int
    dropped: int
    scores: Tensor
    hits: Tensor
    counts: Tensor

    def significant(self, level: float) -> list[Gain]:
        """Gains with corrected p below `level`, best first."""
        return [g for g in self.gains if g.p_value < level]


class Bench:
    """Everything evaluated so far on a fixed list of captures, so that no contract is evaluated twice."""

    def __init__(self, draft: Draft, captures: Sequence[Capture], seed: int = 0) -> None:
        self.captures = [c for c in captures if len(c.scored)]
        self.draft = draft
        n = len(self.captures)
        order = torch.randperm(n, generator=torch.Generator().manual_seed(seed)).tolist()
        ends = sorted({min(s, n) for s in (*STAGES, n)})
        self.stages = [order[a:b] for a, b in zip([0, *ends], ends, strict=False)]
        self.forwards: dict[int, DraftForward] = {}
        self.batches: dict[int, list[Batch]] = {}
        self.known: dict[tuple, tuple[Tensor, Tensor]] = {}
        self.counts = torch.tensor([len(c.scored) for c in self.captures])

    def forward(self, draft: Draft) -> DraftForward:
        """The prepared draft; every token of the text counts as known, so that maps can be compared."""
        if id(draft) not in self.forwards:
            forward = DraftForward(draft)
            forward.in_vocab = torch.ones(draft.target_vocab, dtype=torch.bool)
            self.forwards[id(draft)] = forward
        return self.forwards[id(draft)]

    def stage_batches(self, stage: int, draft: Draft) -> Iterator[Batch]:
        """Batches of a stage, seen through `draft`; states and products are shared between drafts."""
        if stage not in self.batches:
            chosen = [self.captures[i] for i in self.stages[stage]]
            self.batches[stage] = list(self.forward(self.draft).batches(chosen))
        for batch in self.batches[stage]:
            yield batch if draft is self.draft else _through(batch, self.forward(draft))

    def evaluate(self, candidate: Candidate, stage: int) -> tuple[Tensor, Tensor]:
        """(scores, hits) per conversation of the stage, float64, in the order of `stages[stage]`."""
        draft, contract = candidate.on(self.draft), candidate.contract
        key = (id(draft), contract, candidate.deep, stage)
        if key not in self.known:
            forward = self.forward(draft)
            n = len(self.stages[stage])
            scores, hits = torch.zeros(n, dtype=torch.float64), torch.zeros(n, dtype=torch.float64)
            for batch in self.stage_batches(stage, draft):
                if candidate.deep:
                    hit, score = deep_scores(forward, batch, contract)
                else:
                    _, hit, score = forward.score(batch, contract)
                at = torch.tensor(batch.indices)[batch.owner]
                scores.index_add_(0, at, score.double())
                hits.index_add_(0, at, hit.double())
            self.known[key] = scores, hits
            self._trim(stage)
        return self.known[key]

    def _trim(self, stage: int) -> None:
        size = sum(
            p.numel() * p.element_size() for bs in self.batches.values() for b in bs
            for p in b.products.values()
        )  # fmt: skip
        if size > CACHE_BYTES:
            for batch in self.batches[stage]:
                batch.products.clear()

    def race(
        self, base: Candidate, candidates: Sequence[Candidate], every: Sequence[Candidate] = ()
    ) -> Round:
        """Candidates against the base, dropping what is clearly behind the leader; see the module.

        Args:
            base: evaluated on everything.
            candidates: all `deep` (as the base then), or none of them.
            every: all candidates of the round, if these are only a part of them; p-values are corrected for
                all.
        """
        tries = corrections(every or candidates)
        runners = [base, *candidates]
        shape = (len(runners), len(self.captures))
        scores, hits = (torch.full(shape, float("nan"), dtype=torch.float64) for _ in range(2))
        alive, seen = list(range(len(runners))), []
        for stage, texts in enumerate(self.stages):
            for i in alive:
                scores[i, texts], hits[i, texts] = self.evaluate(runners[i], stage)
            seen += texts
            clamps = {i for i in alive if i and candidates[i - 1].field == "max_position"}
            if stage < len(self.stages) - 1:  # whoever saw everything is in the result
                alive = survivors(scores[:, seen], alive, clamps, self.counts[seen])
            looks_better = promising(scores[:, seen], alive) or promising(hits[:, seen], alive)
            if base.deep and len(seen) >= DEEP_TEXTS and not looks_better:
                break
        used = torch.tensor(seen)
        gains = [
            gain_of(runners[i], scores[i, used] - scores[0, used], hits[i, used] - hits[0, used],
                    self.counts[used], tries[group(runners[i])])
            for i in alive if i
        ]  # fmt: skip
        gains.sort(key=lambda g: -g.nats[0])
        dropped = len(runners) - len(alive)
        return Round(tuple(gains), len(candidates), dropped, scores, hits, self.counts)


def _through(batch: Batch, forward: DraftForward) -> Batch:
    view = copy.copy(batch)
    view.forward = forward
    old = batch.forward.draft
    if forward.draft.fc is not old.fc:
        view.products = {}
    if forward.draft.embed is not old.embed or forward.draft.layers is not old.layers:
        view.embeds = {}
    return view


@torch.inference_mode()
def deep_scores(forward: DraftForward, batch: Batch, contract: Contract) -> tuple[Tensor, Tensor]:
    """Hits and log-probabilities (nats) of the text summed over depths 1..DEEP, fed with the text: (S,) each.

    Positions whose text has ended give 0; tokens that the map cannot produce give `LOG_FLOOR`.
    """
    d = forward.draft
    ids = d.draft_ids(contract.vocab_map)
    hidden, keys = forward.first_step(batch, contract)
    chains: list[list] = [[] for _ in d.layers]
    hit_sum, score_sum = torch.zeros(len(hidden)), torch.zeros(len(hidden), dtype=torch.float64)
    for depth in range(1, DEEP + 1):
        if contract.feedback == "post_norm":
            hidden = rms_norm(hidden, d.norm, d.eps)
        token = batch.token_at(contract.token_shift + depth, scored=True)
        hidden = forward.chain_step(batch, contract, depth, token, hidden, keys, chains)
        seen = rms_norm(hidden, d.norm, d.eps) if contract.head_norm else hidden
        truth = batch.truth(depth).cpu()
        wanted = torch.where(truth >= 0, ids[truth.clamp(min=0)], -1)
        done = 0
        for part in forward.in_chunks(seen):
            logits = (part @ d.lm_head.T).to(forward.wide)
            want = wanted[done : done + len(part)].to(logits.device)
            top = logits.gather(1, want.clamp(min=0)[:, None])[:, 0] - logits.logsumexp(-1)
            rows = slice(done, done + len(part))
            score = torch.where(want >= 0, top, LOG_FLOOR).cpu().double()
            score_sum[rows] += torch.where(truth[rows] >= 0, score, 0.0)
            hit_sum[rows] += ((logits.argmax(-1) == want) & (want >= 0)).cpu()
            done += len(part)
    return hit_sum, score_sum
