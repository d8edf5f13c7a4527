"""Which contract or draft near the declared one explains the text better? Candidates, a race, statistics.

Every candidate changes one thing. All are judged on the same positions (every scored one, whatever the
candidate's vocabulary map can say) by the log-likelihood of the text's tokens, paired by conversation. A race
drops what is clearly behind; what is left sees every conversation, and its gain over the declared contract is
tested (Student's t, one-sided) against all candidates of the round (Bonferroni). Position step and feedback
do nothing at depth 0: they are judged at depths 1 to 3, fed with the text, where few extreme tokens can
outweigh the rest in nats, so that hits are tested too.

Axes: C candidates, M conversations, S scored pairs of a batch, Vd draft vocabulary.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from scipy.stats import t as student
from torch import Tensor

from lib.acceptance import walk
from lib.attention import rms_norm
from lib.captures import Capture
from lib.checkpoints import Draft
from lib.contract import Contract, Rope
from lib.draft import LOG_FLOOR, Batch, DraftForward
from lib.errors import MetricError
from lib.metrics import bootstrap_interval, resample_weights
from lib.taps import Tap, hypotheses
from lib.target_head import TargetHead

STAGES = (3, 6, 10, 18)  # conversations seen after each early stage of the race; the last stage sees all
FAR = 0.15  # nats a token behind the leader, in each of the first few texts: out without a test
SCALES = ("head_norm",)  # changes that mostly make logits larger or smaller: hits must gain as well, ...
LOUD = 1.0  # ... unless the text becomes likelier by this many nats a token: no matter of calibration
DEEP = 3  # depths 1 .. DEEP judge what depth 0 cannot see
DEEP_TEXTS = 10  # conversations after which what does not look better is given up there
PROMISING = 0.1  # p below which it looks better
DROP = 1e-3  # chance, at each look, that a candidate as good as the leader is dropped
CACHE_BYTES = 1 << 30  # (slot, tap) products kept between rounds
NEGLIGIBLE = (0.001, 0.02)  # accuracy, tokens per round: significant gains below both are remarks
DEPTH = 5  # draft tokens a round when worth is told in tokens per round


@dataclass(frozen=True)
class Candidate:
    """One change of the contract or of the draft's files.

    Attributes:
        field: contract field, or tensor; before, after: in words.
        contract: the contract after the change.
        draft: the draft after the change; None if only the contract changes.
        deep: whether depth 0 cannot see it.
        kind: fault key if the change alone says which fault it is.
        suspected: something besides the text speaks for it (a probe, config.json, a clamp inside the texts),
            so that it is tested against the few such ones, with half of the level (see `corrections`).
    """

    field: str
    before: str
    after: str
    contract: Contract
    draft: Draft | None = field(default=None, repr=False, compare=False)
    deep: bool = False
    kind: str = ""
    suspected: bool = False

    def on(self, draft: Draft) -> Draft:
        """The draft that this candidate evaluates."""
        return self.draft or draft


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
            looks_better = _promising(scores[:, seen], alive) or _promising(hits[:, seen], alive)
            if base.deep and len(seen) >= DEEP_TEXTS and not looks_better:
                break
        used = torch.tensor(seen)
        gains = [
            gain_of(runners[i], scores[i, used] - scores[0, used], hits[i, used] - hits[0, used],
                    self.counts[used], tries[_group(runners[i])])
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
    ids = draft_ids(d, contract)
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


def draft_ids(draft: Draft, contract: Contract) -> Tensor:
    """(V,) draft id that means each target id under the contract's map; -1 where there is none."""
    produced = draft.to_target(torch.arange(draft.draft_vocab), contract.vocab_map)
    inside = (produced >= 0) & (produced < draft.target_vocab)
    ids = torch.full((draft.target_vocab,), -1)
    ids[produced[inside]] = inside.nonzero().flatten()
    return ids


# ---- candidates ---------------------------------------------------------------------------------

THETAS = (1e4, 1e5, 1.5e5, 5e5, 1e6, 1e7)
ALL_ORDERS = 60  # ordered choices of taps tried exhaustively; beyond, only neighbours


def neighbours(
    draft: Draft, contract: Contract, captures: Sequence[Capture], head: TargetHead | None = None
) -> list[Candidate]:
    """Every change of one thing around `contract` that the draft's weights and the captures allow."""
    out = [Candidate("taps", str(_names(contract.taps)), str(_names(t)), contract.change(taps=t))
           for t in tap_choices(draft, contract, captures, head)]  # fmt: skip
    stated = rope_of(draft.config.get("transformer_layer_config", draft.config))
    for name, values in _field_values(draft, contract, captures, head).items():
        now = getattr(contract, name)
        for value in dict.fromkeys(values):
            if value != now:
                deep = name in ("feedback", "position_step")
                prior = name == "max_position" or (name == "rope" and value == stated)
                out.append(
                    Candidate(
                        name,
                        str(now),
                        str(value),
                        contract.change(**{name: value}),
                        deep=deep,
                        suspected=prior,
                    )
                )
    return out


def _field_values(draft: Draft, contract: Contract, captures, head) -> dict[str, list]:
    longest = max(len(c) for c in captures)
    norms = ["none"] + ["input_norm"] * (draft.input_norm is not None) + ["fc_norm"] * bool(draft.fc_norm)
    bypass = [True] * (draft.fc is not None)
    if all(c.hidden_size == draft.hidden_size for c in captures):
        bypass.append(False)
    window = draft.config.get("transformer_layer_config", draft.config).get("max_position_embeddings")
    # A window that no text reaches is no clamp: None stands for it.
    clamps = [
        None,
        *(c for c in (contract.max_position, window) if c and c < longest + contract.position_offset),
    ]
    felt = len(clamps) > 1
    maps = ["identity", "offset", "absolute"] if draft.d2t is not None else ["identity"]
    return {
        "token_shift": [-1, 0, 1, 2, 3],
        "norm_before_residual": [True, False] if draft.layers[0].hidden_norm is not None else [],
        "fc_input_norm": norms if draft.fc is not None else [],
        "use_fc": bypass,
        "head_norm": [True, False],
        "feedback": ["pre_norm", "post_norm"],
        "rope": rope_grid(draft, contract.rope, head),
        "max_position": clamps if felt else [],
        "position_step": [0, 1, 2],
        "vocab_map": maps,
        "embed_scale": [1.0, draft.hidden_size**0.5],
    }


def rope_grid(draft: Draft, declared: Rope, head: TargetHead | None) -> list[Rope]:
    """Rotary settings one step from the declared ones: base, scaling, layout; and what configs say."""
    configs = [draft.config.get("transformer_layer_config", draft.config), head.config if head else {}]
    written = [r for r in (rope_of(c) for c in configs) if r is not None]
    grid = [replace(declared, theta=t) for t in (*THETAS, *(r.theta for r in written))]
    grid += [replace(r, interleaved=declared.interleaved) for r in written]
    grid += [replace(declared, kind="default", params=())]
    grid += [replace(declared, kind=r.kind, params=r.params) for r in written]
    grid += [replace(declared, interleaved=not declared.interleaved)]
    return grid


def rope_of(config: dict) -> Rope | None:
    """Rotary settings that a config states, under either of its two spellings; None if it states none."""
    config = config.get("text_config", config)
    values = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    theta = values.pop("rope_theta", config.get("rope_theta"))
    kind = values.pop("rope_type", values.pop("type", "default"))
    if theta is None or kind not in ("default", "linear", "llama3", "yarn"):
        return None
    partial = values.pop("partial_rotary_factor", config.get("partial_rotary_factor")) or 1.0
    numbers = {k: float(v) for k, v in values.items() if isinstance(v, int | float) and v is not True}
    return Rope(float(theta), kind, tuple(sorted(numbers.items())), partial=float(partial))


def stored_taps(captures: Sequence[Capture]) -> list:
    """States that every capture holds, in the first one's order."""
    return [t for t in captures[0].taps if all(t in c.readers for c in captures)]


def tap_choices(draft: Draft, contract: Contract, captures, head: TargetHead | None = None) -> list[tuple]:
    """Slot assignments worth trying: all ordered choices when few, else those that real faults produce."""
    stored, now = stored_taps(captures), contract.taps
    k = len(now)
    if math.perm(len(stored), k) <= ALL_ORDERS:
        choices = list(itertools.permutations(stored, k))
    else:
        choices = list(itertools.permutations(now)) if k <= 4 else []
        blocks = [t.after_block if isinstance(t, Tap) else None for t in now]
        if None not in blocks:
            for step in (-1, 1):
                moved = [Tap(max(0, b + step)) for b in blocks]
                # The embedding is named by itself in many configs, so that other ids can move without it.
                rest = [t if b else Tap(0) for b, t in zip(blocks, moved, strict=True)]
                choices += [tuple(moved), tuple(rest)]
                choices += [(*now[:i], moved[i], *now[i + 1 :]) for i in range(k)]
        # The incident's cut, both ways: the embedding pushed in front, or the last state pushed in behind.
        choices += [(stored[0], *now[:-1]), (*now[1:], stored[-1])]
        if None not in blocks and k > 1:  # and both at once: ids of another convention, then cut
            choices += [(stored[0], *(Tap(max(0, b + step)) for b in blocks[:-1])) for step in (-1, 1)]
        if head is not None and k == 3:
            ids = draft.config.get("eagle_aux_hidden_state_layer_ids")
            choices += list(hypotheses(ids, head.n_layers).values())
        # A slot at a time, any stored state: finds what no rule foresaw, one slot per round.
        choices += [(*now[:i], t, *now[i + 1 :]) for i in range(k) for t in stored if t not in now]
    allowed = set(stored)
    return [c for c in dict.fromkeys(choices) if c != now and len(c) == k and allowed.issuperset(c)]


def _names(taps: Sequence) -> str:
    return f"({', '.join(map(str, taps))})"


def edits(draft: Draft, contract: Contract, head: TargetHead | None) -> list[Candidate]:
    """Changes of the draft's files that can be made from what is at hand; none that changes nothing."""
    out = []
    rows = torch.arange(draft.draft_vocab)
    if draft.t2d is not None and int(draft.t2d.sum()) == draft.draft_vocab:
        d2t = draft.t2d.nonzero().flatten() - rows
        if draft.d2t is None or not torch.equal(d2t, draft.d2t.long()):
            made = replace(draft, d2t=d2t)
            out.append(
                Candidate("d2t", "as stored", "rebuilt from t2d", contract.change(vocab_map="offset"), made)
            )
    if head is None:
        return out
    if head.embed.shape == draft.embed.shape and not _same(head.embed, draft.embed):
        made = replace(draft, embed=head.embed)
        out.append(Candidate("embed_tokens", "the draft's own", "the target's", contract, made))
    produced = draft.to_target(rows, contract.vocab_map)
    if (
        head.hidden_size == draft.hidden_size
        and int(produced.min()) >= 0
        and int(produced.max()) < len(head.lm_head)
    ):
        weight = head.lm_head[produced].to(draft.lm_head.dtype)
        if not torch.equal(weight, draft.lm_head):
            made = replace(draft, lm_head=weight)
            out.append(
                Candidate("lm_head", "the draft's own", "the target's rows under the map", contract, made)
            )
    return out


def _same(a: Tensor, b: Tensor, rows: int = 512) -> bool:
    """Whether two tables agree on rows spread over them; enough to skip a candidate that changes nothing."""
    at = torch.linspace(0, len(a) - 1, min(rows, len(a))).long()
    return a is b or bool(torch.equal(a[at].float(), b[at].float()))


# ---- statistics ---------------------------------------------------------------------------------


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
    if counts is not None and 1 < n <= STAGES[0]:
        far = (behind > FAR * counts).all(1).tolist()
        return [0, *(i for i, out in zip(rest, far, strict=True) if not out)]
    spread = behind.std(1).clamp(min=0.5) * n**0.5
    return [0, *(i for i, b, s in zip(rest, behind.sum(1), spread, strict=True) if b <= limit * s)]


def _promising(scores: Tensor, alive: list[int]) -> bool:
    return any(p_value(scores[i] - scores[0], 1) < PROMISING for i in alive if i)


SHARES = {"suspected": 2, "deep": 1, "rest": 5}  # of the level, between the groups that have candidates


def _group(candidate: Candidate) -> str:
    return "suspected" if candidate.suspected else "deep" if candidate.deep else "rest"


def corrections(every: Sequence[Candidate]) -> dict[str, float]:
    """What to multiply p-values with, by group: candidates of the group over its share of the level.

    Suspected ones are few and likely; deep ones are few, and would drown among the rest.
    """
    sizes = Counter(map(_group, every))
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
    known = draft_ids(draft, contract) >= 0
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
