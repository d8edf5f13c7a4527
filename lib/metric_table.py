"""What each framework means by "accuracy" and "acceptance": a table of definitions, computed.

Every row is one published metric with its formula as code. All rows are computed from one set of
predictions of one draft, so what differs between them is the definition and nothing else.

Notation of the formulas: pair t (state g_t with token x_{t+1}), step i of its chain, label u = t+1+i,
where the target's state predicts token x_{u+1}.

    m_u   loss mask of token x_u                    y_u   target's argmax at u, full vocabulary
    h_ti  step i of chain t predicts y_u            z_u   target's argmax at u within the draft vocabulary
    k_ti  step i of chain t predicts z_u            v_u   y_u is in the draft vocabulary
    d_ti  what step i of chain t predicts           a_r   drafted tokens of round r that entered the text
    R     rounds, K drafted tokens each

Two alignments of the loss mask are in use (read in each framework's code, see `Definition.mask`):
speculators, Automodel and Model-Optimizer shift it with the labels, so a pair counts when its own
token x_{t+1} is the assistant's (m_u); EAGLE and SpecForge do not, so it counts one pair later, when
x_t is (m_{u-1}). The masks themselves are the captures'; how a framework makes them is not modelled.

Axes: B captures, S pairs of all captures (t = 0..L-2 of each, in order), D depths, L positions,
V target vocabulary, Vd draft vocabulary, R rounds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property

import pandas as pd
import torch
from torch import Tensor

from lib.acceptance import Rounds, rollouts, walk
from lib.captures import FINAL, Capture
from lib.checkpoints import Draft
from lib.contract import Contract
from lib.draft import DraftForward, Predictions
from lib.errors import MetricError
from lib.metrics import (
    Ratio,
    all_token_accuracy,
    bootstrap_interval,
    in_vocab_accuracy,
    per_conversation,
    ratio,
    resample_weights,
    speculators_accuracy,
    trainer_targets,
)
from lib.target_head import TargetHead

VOCAB_CHUNK = 8192  # rows of the target's lm_head per product; bounds memory for any V
ROW_CHUNK = 1024  # positions per product: 32 MiB of logits with the chunk above
DEPTHS = 3  # speculators' default of training-time test steps (`ttt_steps`)


# ---- what the definitions are computed from -----------------------------------------------------


@dataclass(frozen=True)
class TargetSide:
    """What the target says at positions u = 1..L-1 of each capture; the same for every contract.

    Attributes:
        full: per capture (L - 1,) target ids y_u; -1 at positions that no loss mask reaches.
        log_z: per capture (L - 1,) log-sum-exp of the full-vocabulary logits, nats; NaN there.
        draft: per capture (L - 1,) draft ids z_u, at every position.
    """

    full: tuple[Tensor, ...]
    log_z: tuple[Tensor, ...]
    draft: tuple[Tensor, ...]


@dataclass(frozen=True)
class Evidence:
    """One set of predictions of one draft under one contract, and what they are judged against.

    Attributes:
        captures: B conversations.
        in_vocab: (V,) bool, target ids the draft can produce.
        predictions: teacher-fed, positions="all", D depths; rows t = 0..L-2 of each capture in order.
        target: the target's side.
        overlap: (S, D) sum over the draft vocabulary of min(target probability, draft probability),
            the former of the full-vocabulary softmax; NaN where `target.log_z` is or past the end.
        rounds: a greedy run of the draft through the texts.

    Raises MetricError if the parts are not of the same captures and pairs.
    """

    captures: tuple[Capture, ...]
    in_vocab: Tensor
    predictions: Predictions
    target: TargetSide
    overlap: Tensor
    rounds: Rounds

    def __post_init__(self) -> None:
        p, pairs = self.predictions, [len(c) - 1 for c in self.captures]
        wanted = torch.cat([torch.arange(n) for n in pairs])
        if not torch.equal(p.position, wanted) or not torch.equal(
            p.capture, torch.repeat_interleave(torch.arange(len(pairs)), torch.tensor(pairs))
        ):
            raise MetricError(
                "evidence", "predictions", expected=f"positions='all': pairs 0..L-2 of {len(pairs)} "
                f"captures in order ({len(wanted)})", found=f"{len(p.position)} other pairs",
                remedy="predict(captures, contract, depths=..., positions='all')",
            )  # fmt: skip
        if self.overlap.shape != p.draft_ids.shape:
            raise MetricError(
                "evidence", "overlap", expected=f"one value per pair and depth {tuple(p.draft_ids.shape)}",
                found=str(tuple(self.overlap.shape)), remedy="build it with evidence()",
            )  # fmt: skip
        if len(self.rounds) and int(self.rounds.capture.max()) >= len(pairs):
            raise MetricError(
                "evidence", "rounds", expected=f"rounds in {len(pairs)} captures",
                found=f"one in capture {int(self.rounds.capture.max())}",
                remedy="walk() the same captures",
            )  # fmt: skip
        for name in ("full", "log_z", "draft"):
            found = [len(x) for x in getattr(self.target, name)]
            if found != pairs:
                raise MetricError(
                    "evidence", f"target.{name}", expected=f"L - 1 values per capture {pairs}",
                    found=str(found), remedy="build it with target_side() from the same captures",
                )  # fmt: skip

    @property
    def depths(self) -> int:
        """D."""
        return self.predictions.draft_ids.shape[1]

    @cached_property
    def next_mask(self) -> Tensor:
        """(S, D) bool m_u of label u = t + 1 + i: the mask shifted with the labels."""
        return _ahead([c.loss_mask[1:] for c in self.captures], self.depths, False)

    @cached_property
    def own_mask(self) -> Tensor:
        """(S, D) bool m_{u-1}: the mask unshifted; the last position, which has no label, is left out."""
        return _ahead([c.loss_mask[:-1] for c in self.captures], self.depths, False)

    @cached_property
    def hit_full(self) -> Tensor:
        """(S, D) bool h_ti: the predicted id, mapped to the target's vocabulary, is y_u."""
        return self.predictions.target_ids == _ahead(self.target.full, self.depths, -1)

    @cached_property
    def hit_draft(self) -> Tensor:
        """(S, D) bool k_ti: the predicted draft id is z_u."""
        return self.predictions.draft_ids == _ahead(self.target.draft, self.depths, -1)

    @cached_property
    def known(self) -> Tensor:
        """(S, D) bool v_u; False past the end and where no loss mask reaches."""
        full = _ahead(self.target.full, self.depths, -1)
        return self.in_vocab[full.clamp(min=0)] & (full >= 0)

    @cached_property
    def scored(self) -> Predictions:
        """The rows of `Capture.scored` alone: what our own metrics count."""
        p = self.predictions
        rows = (self.next_mask[:, 0] & (p.truth[:, 0] >= 0)).nonzero().flatten()
        if not len(rows):
            raise MetricError(
                "evidence", "denominator", expected="at least one scored pair", found="none",
                remedy="use longer texts, and check their loss masks",
            )  # fmt: skip
        columns = ("capture", "position", "draft_ids", "target_ids", "truth", "in_vocab")
        return replace(p, **{name: getattr(p, name)[rows] for name in columns})


def _ahead(values: Sequence[Tensor], depths: int, fill: int | bool) -> Tensor:
    """(S, D) entry t + i of each capture's (L - 1,) values for its pairs t; `fill` past the end."""
    parts = [torch.cat((v, v.new_full((depths - 1,), fill))).unfold(0, depths, 1) for v in values if len(v)]
    return torch.cat(parts)


@torch.inference_mode()
def target_side(captures: Sequence[Capture], draft: Draft, head: TargetHead) -> TargetSide:
    """The target's argmax and normaliser at every position that a loss mask reaches.

    One product of the states with lm_head, in chunks of both; needed once for any number of contracts.
    The states are the captures' final ones (`FINAL`).
    """
    _check(captures, draft, head)
    # A label u is counted through m_u or m_{u-1}: positions that neither reaches are not computed.
    wanted = [c.loss_mask[1:] | c.loss_mask[:-1] for c in captures]
    kinds = {c.known_final_kind() for c in captures}
    if len(kinds) != 1:
        raise MetricError(
            "target_side", "final_kind", expected="final states of one kind", found=str(sorted(kinds)),
            remedy="evaluate captures of different frameworks separately",
        )  # fmt: skip
    states = torch.cat([c.final()[1:][w].float() for c, w in zip(captures, wanted, strict=True)])
    best = torch.full((len(states),), -math.inf)
    best_id = torch.full((len(states),), -1)
    log_z = torch.full((len(states),), -math.inf)
    vocab = head.lm_head.shape[0]
    for start in range(0, vocab, VOCAB_CHUNK):
        rows = torch.arange(start, min(start + VOCAB_CHUNK, vocab))
        for at in range(0, len(states), ROW_CHUNK):
            block = slice(at, at + ROW_CHUNK)
            logits = head.logits(states[block], final_kind=next(iter(kinds)), rows=rows)
            top, top_id = logits.max(-1)
            better = top > best[block]  # strictly: of equal logits the lowest id wins, as in argmax
            best[block] = torch.where(better, top, best[block])
            best_id[block] = torch.where(better, top_id + start, best_id[block])
            log_z[block] = torch.logaddexp(log_z[block], logits.logsumexp(-1))
    full, normaliser, at = [], [], 0
    for w in wanted:
        n = int(w.sum())
        full.append(torch.full((len(w),), -1).masked_scatter(w, best_id[at : at + n]))
        normaliser.append(torch.full((len(w),), math.nan).masked_scatter(w, log_z[at : at + n]))
        at += n
    return TargetSide(tuple(full), tuple(normaliser), tuple(trainer_targets(captures, draft, head)))


@torch.inference_mode()
def evidence(
    captures: Sequence[Capture],
    draft: Draft,
    head: TargetHead,
    contract: Contract | None = None,
    *,
    depths: int = DEPTHS,
    chain: int | None = None,
    target: TargetSide | None = None,
) -> Evidence:
    """Everything that the definitions need, for one contract.

    Args:
        captures: with final states; texts the target wrote greedily, if served metrics are to mean
            what an engine would report.
        contract: the draft's declared one if None.
        depths: D, training-time test steps.
        chain: K, drafted tokens per round of the greedy run; `depths` if None.
        target: from `target_side` of the same captures, to share between contracts.

    Memory: logits of one capture at a time, (L - 1) x D x Vd in fp32; kept are argmaxes and overlaps.
    """
    contract = contract or draft.contract
    _check(captures, draft, head)
    target = target or target_side(captures, draft, head)
    forward = DraftForward(draft)
    rows = draft.to_target(torch.arange(draft.draft_vocab))
    parts, overlaps = [], []
    for i, capture in enumerate(captures):
        if len(capture) < 2:
            continue  # a text of one token has no pair, here as in DraftForward
        p = forward.predict([capture], contract, depths=depths, positions="all", keep_logits=True)
        final = capture.final()[1:]
        kind = capture.known_final_kind()
        log_p = head.logits(final, final_kind=kind, rows=rows) - target.log_z[i][:, None]
        overlaps.append(_overlap(log_p.exp(), p.logits.float()))
        parts.append(replace(p, capture=p.capture + i, logits=None))
    columns = ("capture", "position", "draft_ids", "target_ids", "truth", "in_vocab")
    predictions = Predictions(
        *(torch.cat([getattr(p, name) for p in parts]) for name in columns), contract=contract
    )
    served = rollouts(forward, captures, contract, depths if chain is None else chain)
    return Evidence(
        tuple(captures), forward.in_vocab, predictions, target, torch.cat(overlaps), walk(served, captures)
    )


def _overlap(target: Tensor, logits: Tensor) -> Tensor:
    """Expected acceptance of a sampled draft token: (L-1, Vd), (L-1, D, Vd) -> (L-1, D); NaN past the end.

    sum_v min(p_v, q_v) (Leviathan et al. 2023, arXiv 2211.17192, section 3.2).
    """
    pairs, depths, _ = logits.shape
    out = torch.full((pairs, depths), math.nan)
    for i in range(min(depths, pairs)):
        draft = torch.softmax(logits[: pairs - i, i], -1)
        out[: pairs - i, i] = torch.minimum(target[i:], draft).sum(-1)
    return out


def _check(captures: Sequence[Capture], draft: Draft, head: TargetHead) -> None:
    """Everything that can be wrong between captures, draft and target head, before any work."""
    vocab = head.lm_head.shape[0]
    rows = draft.to_target(torch.arange(draft.draft_vocab))
    if int(rows.min()) < 0 or int(rows.max()) >= vocab or vocab > draft.target_vocab:
        raise MetricError(
            draft.path, "vocabulary", expected=f"draft ids inside the target's {vocab} rows of lm_head, "
            f"which the draft calls {draft.target_vocab}",
            found=f"target ids {int(rows.min())}..{int(rows.max())}",
            remedy="repair d2t (fault 20), or load the head of this draft's target",
        )  # fmt: skip
    for capture in captures:
        if FINAL not in capture.readers:
            raise MetricError(
                capture.path, FINAL, expected="the target's final state in every capture", found="none",
                remedy="join it with Capture.with_final(), or recapture with the last state",
            )  # fmt: skip
        if capture.hidden_size != head.hidden_size:
            raise MetricError(
                capture.path, FINAL, expected=f"states of width {head.hidden_size}, the target's",
                found=str(capture.hidden_size), remedy="load the head of the captures' target",
            )  # fmt: skip


# ---- one measured value -------------------------------------------------------------------------


@dataclass(frozen=True)
class Measured:
    """A value with what it was made of; None where a metric is not one ratio."""

    value: float
    numerator: float | None = None
    denominator: float | None = None
    low: float | None = None
    high: float | None = None


def _of(r: Ratio) -> Measured:
    return Measured(r.value, r.numerator, r.denominator, r.low, r.high)


def _pairs(e: Evidence, hits: Tensor, counted: Tensor) -> Measured:
    """Ratio over pairs: (S,) bool hits that count, over (S,) bool that count."""
    n = len(e.captures)
    hit = per_conversation(hits & counted, e.predictions.capture, n)
    return _of(ratio("pairs", hit, per_conversation(counted, e.predictions.capture, n)))


def _weighted(numerators: Tensor, denominators: Tensor) -> Measured:
    """As `lib.metrics.ratio`, for numerators (B,) that are not counts."""
    used = denominators > 0
    if not used.any():
        raise MetricError(
            "metric table", "denominator", expected="at least one position that counts", found="none",
            remedy="check the loss mask and the draft's vocabulary",
        )  # fmt: skip
    numerators, denominators = numerators[used].double(), denominators[used].double()
    weights = resample_weights(len(numerators))
    low, high = bootstrap_interval((weights @ numerators) / (weights @ denominators))
    total, count = float(numerators.sum()), float(denominators.sum())
    return Measured(total / count, total, count, low, high)


# ---- the definitions, as code -------------------------------------------------------------------


def _speculators(e: Evidence, i: int, kind: str) -> Measured:
    return _of(speculators_accuracy(e.predictions, e.captures, e.target.draft, i, kind))


def _specforge_acc(e: Evidence, i: int) -> Measured:
    return _pairs(e, e.hit_full[:, i], e.own_mask[:, i])


def _specforge_acc_in_vocab(e: Evidence, i: int) -> Measured:
    return _pairs(e, e.hit_draft[:, i], e.own_mask[:, i] & e.known[:, i])


def _specforge_acceptance(e: Evidence, i: int) -> Measured:
    counted, owner, n = e.own_mask[:, i] & e.known[:, i], e.predictions.capture, len(e.captures)
    sums = torch.zeros(n, dtype=torch.float64)
    sums.index_add_(0, owner[counted], e.overlap[counted, i].double())
    return _weighted(sums, per_conversation(counted, owner, n))


def _specforge_simulated(e: Evidence, _: int) -> Measured:
    accuracies = torch.tensor([_specforge_acc(e, i).value for i in range(e.depths)], dtype=torch.float64)
    return Measured(float(accuracies.cumprod(0).sum()))


def _eagle_counts(e: Evidence, i: int) -> tuple[Tensor, Tensor]:
    """Hits and counts (B,) of `acc_i`. The last position has no label but keeps its mask: a miss."""
    n, owner = len(e.captures), e.predictions.capture
    counted = e.own_mask[:, i]
    ends = torch.tensor([int(c.loss_mask[-1]) if len(c) > i else 0 for c in e.captures])
    hits = per_conversation(e.hit_draft[:, i] & e.known[:, i] & counted, owner, n)
    return hits, per_conversation(counted, owner, n) + ends


def _eagle_acc(e: Evidence, i: int) -> Measured:
    return _of(ratio("acc", *_eagle_counts(e, i)))


def _eagle_epoch_acc(e: Evidence, i: int) -> Measured:
    hits, counts = _eagle_counts(e, i)
    return _weighted(hits.double() / (counts.double() + 1e-6), torch.ones(len(hits)))


def _automodel_counts(e: Evidence) -> tuple[Tensor, Tensor]:
    """Hits and counts (B,) over all steps."""
    counted = e.next_mask & e.known
    n, owner = len(e.captures), e.predictions.capture
    hits = (e.hit_draft & counted).sum(1)
    return per_conversation(hits, owner, n), per_conversation(counted.sum(1), owner, n)


def _automodel_accuracy(e: Evidence, _: int) -> Measured:
    return _of(ratio("accuracy", *_automodel_counts(e)))


def _automodel_train_acc(e: Evidence, _: int) -> Measured:
    hits, counts = _automodel_counts(e)
    return _weighted(hits.double() / counts.clamp(min=1).double(), torch.ones(len(hits)))


def _automodel_tau_sim(e: Evidence, _: int) -> Measured:
    valid = e.next_mask.cumprod(1)  # (S, D) chains supervised at every step so far
    alive = (e.hit_draft & e.known & e.next_mask).cumprod(1)
    return Measured(1 + float((alive.sum(0).double() / valid.sum(0).clamp(min=1)).sum()))


def _model_optimizer_train_acc(e: Evidence, i: int) -> Measured:
    return _pairs(e, e.hit_draft[:, i], e.next_mask[:, i])


def _served(e: Evidence, numerator: Tensor, denominator: Tensor) -> Measured:
    """Ratio of sums over rounds: (R,) integers each."""
    n, owner = len(e.captures), e.rounds.capture
    counts = per_conversation(denominator, owner, n)
    return _of(ratio("rounds", per_conversation(numerator, owner, n), counts))


def _first_rounds(e: Evidence) -> Tensor:
    """(R,) bool: the first round of its response, after the token that prefill wrote."""
    owner = e.rounds.capture  # one response per capture: walk() refuses others
    return torch.cat((torch.ones(1, dtype=torch.bool), owner[1:] != owner[:-1]))


def _model_optimizer_ar(e: Evidence, _: int) -> Measured:
    n, owner, first = len(e.captures), e.rounds.capture, _first_rounds(e)
    tokens = per_conversation(e.rounds.gained + first, owner, n)  # the first token and every round's
    rounds = per_conversation(_drafts(e) + first, owner, n)
    return _weighted(tokens.double() / rounds.clamp(min=1), rounds > 0)


def _drafts(e: Evidence) -> Tensor:
    return torch.ones_like(e.rounds.accepted)


def _acceptance_rate(e: Evidence, _: int) -> Measured:
    return _served(e, e.rounds.accepted, e.rounds.depth * _drafts(e))


def _acceptance_length(e: Evidence, _: int) -> Measured:
    return _served(e, e.rounds.accepted + 1, _drafts(e))


def _per_position(e: Evidence, i: int) -> Measured:
    return _served(e, e.rounds.accepted > i, _drafts(e))


def _sglang_old_rate(e: Evidence, _: int) -> Measured:
    return _served(e, e.rounds.accepted + 1, (e.rounds.depth + 1) * _drafts(e))


def _bench_accept_length(e: Evidence, _: int) -> Measured:
    return _served(e, e.rounds.gained + _first_rounds(e), _drafts(e))


@dataclass(frozen=True, kw_only=True)
class Definition:
    """One published metric.

    Attributes:
        name: as published; "{i}" stands for the step.
        unit: "ratio", or "tokens/round".
        kind: "marginal" (step i whatever came before), "joint" (steps 0..i all right), "conditional"
            (step i given the steps before), "served" (a greedy run, rounds one after another).
        judged: what a prediction is compared with.
        mask: which loss-mask entry makes a pair count, or which rounds count.
        out_of_vocab: what happens where the judged token is not in the draft's vocabulary.
        bonus: whether the token that the target adds to each round is counted.
        source: file and version in which it was read.
        per_step: None, or "depths" / "chain" for one value per training depth / drafted token.
    """

    name: str
    framework: str
    unit: str
    kind: str
    judged: str
    formula: str
    numerator: str
    denominator: str
    mask: str
    out_of_vocab: str
    bonus: str
    source: str
    compute: Callable[[Evidence, int], Measured]
    per_step: str | None = None


_RIGHT = "right at step i, mask set"
_SPECULATORS = "speculators 0.9.0 models/metrics.py:compute_accuracy_single_step, models/eagle3/data.py"
_SPECFORGE = "SpecForge 0.2.0 (= a6b6b023)"
_EAGLE = "EAGLE cb7e084 eagle/traineagle3"
_AUTOMODEL = "Automodel 36044ad"
_VLLM = "vLLM 0.32.0 v1/spec_decode/metrics.py:SpecDecodingLogging.log"
_SGLANG = "SGLang c9cbe8f2 managers/scheduler_components/metrics_reporter.py"
_PAIR = "m_u: the pair's own token is the assistant's"
_START = "m_{t+1}: the chain starts on an assistant's token, and the text goes on"
_UNSHIFTED = "m_{u-1}: the token before the pair's is the assistant's; last position left out"
_ROUNDS = "rounds from a response's first token to its end"

_SERVED = {"kind": "served", "judged": "the target's greedy text", "mask": _ROUNDS, "out_of_vocab": "miss"}

DEFINITIONS: tuple[Definition, ...] = (
    Definition(
        name="in-vocab accuracy", framework="ours", unit="ratio", kind="marginal",
        judged="the text's token",
        formula="sum m_{t+1} [d_ti = x_{u+1}] / sum m_{t+1} [x_{u+1} in vocabulary]",
        numerator="right at step i", denominator="scored chains whose token at step i the draft can produce",
        mask=_START, out_of_vocab="left out", bonus="n/a", source="lib/metrics.py:in_vocab_accuracy",
        compute=lambda e, i: _of(in_vocab_accuracy(e.scored, i)), per_step="depths",
    ),
    Definition(
        name="all-token accuracy", framework="ours", unit="ratio", kind="marginal",
        judged="the text's token", formula="sum m_{t+1} [d_ti = x_{u+1}] / sum m_{t+1}",
        numerator="right at step i", denominator="scored chains whose text reaches step i",
        mask=_START, out_of_vocab="miss", bonus="n/a", source="lib/metrics.py:all_token_accuracy",
        compute=lambda e, i: _of(all_token_accuracy(e.scored, i)), per_step="depths",
    ),
    Definition(
        name="full_acc_{i}", framework="speculators", unit="ratio", kind="joint", judged="z_u",
        formula="sum m_{t+1} m_u prod_{j<=i} k_tj / sum m_u",
        numerator="chains right at steps 0..i, mask set at their start and at step i",
        denominator="masked labels at step i, broken chains too", mask=_PAIR,
        out_of_vocab="re-labelled: the best token in the vocabulary is the target", bonus="n/a",
        source=_SPECULATORS, compute=lambda e, i: _speculators(e, i, "full"), per_step="depths",
    ),
    Definition(
        name="cond_acc_{i}", framework="speculators", unit="ratio", kind="conditional", judged="z_u",
        formula="sum m_{t+1} m_u prod_{j<=i} k_tj / sum m_{t+1} prod_{j<i} k_tj",
        numerator="as full_acc_i",
        denominator="chains alive before step i, whether or not their label at step i is masked",
        mask=_PAIR, out_of_vocab="re-labelled: the best token in the vocabulary is the target",
        bonus="n/a", source=_SPECULATORS, compute=lambda e, i: _speculators(e, i, "cond"),
        per_step="depths",
    ),
    Definition(
        name="acc_{i}", framework="SpecForge", unit="ratio", kind="marginal", judged="y_u, through d2t",
        formula="sum m_{u-1} h_ti / sum m_{u-1}", numerator=_RIGHT, denominator="masked pairs",
        mask=_UNSHIFTED, out_of_vocab="miss", bonus="n/a",
        source=f"{_SPECFORGE} algorithms/eagle3/model.py:_acc_and_loss, data.py:normalize_offline_sample",
        compute=_specforge_acc, per_step="depths",
    ),
    Definition(
        name="acc_{i} (bcb2ec2a)", framework="SpecForge", unit="ratio", kind="marginal", judged="z_u",
        formula="sum m_{u-1} v_u k_ti / sum m_{u-1} v_u", numerator=_RIGHT,
        denominator="masked pairs whose target token is in the vocabulary", mask=_UNSHIFTED,
        out_of_vocab="left out", bonus="n/a",
        source="SpecForge bcb2ec2a core/eagle3.py:_compute_metric_acc; called by the Qwen-VL model only, "
        "the text model divided by the loss mask then as now",
        compute=_specforge_acc_in_vocab, per_step="depths",
    ),
    Definition(
        name="acceptance_rate_{i}", framework="SpecForge", unit="ratio", kind="marginal",
        judged="the target's distribution p, full softmax",
        formula="sum m_{u-1} v_u sum_w min(p_uw, q_tiw) / sum m_{u-1} v_u",
        numerator="expected acceptance of a token sampled from the draft's distribution q",
        denominator="masked pairs whose target token is in the vocabulary", mask=_UNSHIFTED,
        out_of_vocab="left out", bonus="n/a", source=f"{_SPECFORGE} core/lk_loss.py:compute_acceptance_rate",
        compute=_specforge_acceptance, per_step="depths",
    ),
    Definition(
        name="eval/simulated_acc_len", framework="SpecForge", unit="tokens/round", kind="marginal",
        judged="y_u, through d2t", formula="sum_i prod_{j<=i} acc_j",
        numerator="marginal accuracies, multiplied as if they were conditional",
        denominator="none: a sum of products", mask=_UNSHIFTED, out_of_vocab="miss", bonus="not counted",
        source=f"{_SPECFORGE} eval/evaluator.py:Evaluator._simulated_acc_len", compute=_specforge_simulated,
    ),
    Definition(
        name="accept_length", framework="SpecForge", unit="tokens/round", **_SERVED,
        formula="(sum_r tokens of round r + responses) / R",
        numerator="completion tokens, the response's first included (prefill wrote it)",
        denominator="verify rounds", bonus="counted",
        source="SpecForge a6b6b023 benchmarks/benchmarker/utils.py: completion_tokens / spec_verify_ct",
        compute=_bench_accept_length,
    ),
    Definition(
        name="acc_{i}", framework="EAGLE", unit="ratio", kind="marginal", judged="z_u, where v_u",
        formula="sum m_{u-1} v_u k_ti / (sum m_{u-1} + 1e-6)", numerator=_RIGHT,
        denominator="masked pairs, the last position included although it has no label",
        mask="m_{u-1}: the token before the pair's is the assistant's; last position kept, as a miss",
        out_of_vocab="miss", bonus="n/a", source=f"{_EAGLE}/cnets.py, as if all were one batch",
        compute=_eagle_acc, per_step="depths",
    ),
    Definition(
        name="epochacc_{i}", framework="EAGLE", unit="ratio", kind="marginal", judged="z_u, where v_u",
        formula="mean over batches of acc_i", numerator="sum of the batches' acc_i",
        denominator="batches (here: one conversation each)",
        mask="m_{u-1}: the token before the pair's is the assistant's; last position kept, as a miss",
        out_of_vocab="miss", bonus="n/a", source=f"{_EAGLE}/main.py: train/ and test/epochacc_i",
        compute=_eagle_epoch_acc, per_step="depths",
    ),
    Definition(
        name="accuracy", framework="Automodel", unit="ratio", kind="marginal", judged="z_u, where v_u",
        formula="sum_i sum m_u v_u k_ti / sum_i sum m_u v_u", numerator="right at any step, mask set",
        denominator="masked pairs of all steps whose target token is in the vocabulary", mask=_PAIR,
        out_of_vocab="left out", bonus="n/a",
        source=f"{_AUTOMODEL} components/speculative/eagle/core.py:Eagle3StepMetrics, target.py (mask "
        "shifted); as if all were one batch",
        compute=_automodel_accuracy,
    ),
    Definition(
        name="train_acc", framework="Automodel", unit="ratio", kind="marginal", judged="z_u, where v_u",
        formula="mean over micro-batches of accuracy", numerator="sum of the micro-batches' accuracy",
        denominator="micro-batches of the logging window (here: one conversation each)", mask=_PAIR,
        out_of_vocab="left out", bonus="n/a", source=f"{_AUTOMODEL} recipes/llm/train_eagle3.py",
        compute=_automodel_train_acc,
    ),
    Definition(
        name="tau_sim", framework="Automodel", unit="tokens/round", kind="joint", judged="z_u, where v_u",
        formula="1 + sum_i (sum_t prod_{j<=i} m_u v_u k_tj / sum_t prod_{j<=i} m_u)",
        numerator="chains right at steps 0..i", denominator="chains masked at steps 0..i", mask=_PAIR,
        out_of_vocab="miss: the chain breaks", bonus="counted",
        source=f"{_AUTOMODEL} components/speculative/eagle/core.py:simulated_accept_length",
        compute=_automodel_tau_sim,
    ),
    Definition(
        name="train_acc[{i}]", framework="Model-Optimizer", unit="ratio", kind="marginal", judged="z_u",
        formula="sum m_u k_ti / sum m_u", numerator=_RIGHT, denominator="masked pairs", mask=_PAIR,
        out_of_vocab="re-labelled: the best token in the vocabulary is the target", bonus="n/a",
        source="Model-Optimizer 1857500a torch/speculative/plugins/hf_eagle.py:_eagle_loss",
        compute=_model_optimizer_train_acc, per_step="depths",
    ),
    Definition(
        name="AR", framework="Model-Optimizer", unit="tokens/round", **_SERVED,
        formula="mean over responses of (1 + sum_r tokens of round r) / (1 + R)",
        numerator="the response's tokens", denominator="rounds, the first one without a draft included",
        bonus="counted",
        source="Model-Optimizer 109993fc torch/speculative/utils.py:AcceptanceRateValidation.validate, "
        "averaged by examples/speculative_decoding/scripts/ar_validate.py",
        compute=_model_optimizer_ar,
    ),
    Definition(
        name="draft acceptance rate", framework="vLLM", unit="ratio", **_SERVED,
        formula="sum_r a_r / (K R); logged in %", numerator="accepted draft tokens",
        denominator="drafted tokens", bonus="not counted", source=_VLLM, compute=_acceptance_rate,
    ),
    Definition(
        name="mean acceptance length", framework="vLLM", unit="tokens/round", **_SERVED,
        formula="1 + sum_r a_r / R", numerator="accepted draft tokens, and one per round",
        denominator="rounds", bonus="counted", source=_VLLM, compute=_acceptance_length,
    ),
    Definition(
        name="per-position acceptance rate", framework="vLLM", unit="ratio", **(_SERVED | {"kind": "joint"}),
        formula="sum_r [a_r > i] / R", numerator="rounds that accepted their tokens 0..i",
        denominator="rounds", bonus="not counted", source=_VLLM, compute=_per_position, per_step="chain",
    ),
    Definition(
        name="spec_accept_length", framework="SGLang", unit="tokens/round", **_SERVED,
        formula="(sum_r a_r + R) / R", numerator="accepted draft tokens, and one per round",
        denominator="verify rounds", bonus="counted",
        source=f"{_SGLANG}; a request's meta_info divides its completion tokens instead (SpecForge "
        "accept_length here)",
        compute=_acceptance_length,
    ),
    Definition(
        name="spec_accept_rate", framework="SGLang", unit="ratio", **_SERVED,
        formula="sum_r a_r / (K R)", numerator="accepted draft tokens",
        denominator="drafted tokens: speculative_num_draft_tokens - 1 per round",
        bonus="not counted",
        source=f"{_SGLANG}; meta_info likewise", compute=_acceptance_rate,
    ),
    Definition(
        name="spec_accept_rate (older gauge)", framework="SGLang", unit="ratio", **_SERVED,
        formula="(sum_r a_r + R) / ((K + 1) R)", numerator="accepted draft tokens, and one per round",
        denominator="speculative_num_draft_tokens per round: K drafted and the token they follow",
        bonus="counted",
        source="SGLang 00eef542 srt/observability/scheduler_metrics_mixin.py",
        compute=_sglang_old_rate,
    ),
)  # fmt: skip


# ---- the tables ---------------------------------------------------------------------------------


def definitions() -> pd.DataFrame:
    """The texts: one row per definition, nothing computed."""
    texts = [f.name for f in fields(Definition) if f.name not in ("compute", "per_step")]
    return pd.DataFrame([{f: getattr(d, f) for f in texts} for d in DEFINITIONS]).assign(
        name=[d.name.format(i="i") for d in DEFINITIONS]
    )


def steps(definition: Definition, e: Evidence) -> list[int | None]:
    """The steps for which a definition has a value: [None] if it has one for all of them together."""
    if definition.per_step is None:
        return [None]
    return list(range(e.rounds.depth if definition.per_step == "chain" else e.depths))


def table(e: Evidence) -> pd.DataFrame:
    """Every definition computed from one evidence.

    Returns: columns framework, metric, step (None: no single step), kind, unit, bonus, value,
        numerator, denominator, low and high (95 % over conversations, None where the metric is not a
        ratio), note. A ratio that nothing counts for is NaN, and the note says so.
    """
    rows = []
    for d in DEFINITIONS:
        for step in steps(d, e):
            try:
                m, note = d.compute(e, step or 0), ""
            except MetricError as err:
                if err.field != "denominator":
                    raise
                m, note = Measured(math.nan, 0, 0), f"undefined: nothing counts ({err.expected})"
            rows.append(
                {
                    "framework": d.framework,
                    "metric": d.name.format(i=step),
                    "step": step,
                    "kind": d.kind,
                    "unit": d.unit,
                    "bonus": d.bonus,
                    "value": m.value,
                    "numerator": m.numerator,
                    "denominator": m.denominator,
                    "low": m.low,
                    "high": m.high,
                    "note": note,
                }
            )
    return pd.DataFrame(rows).astype({"step": "Int64"})
