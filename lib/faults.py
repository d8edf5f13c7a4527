"""Known faults of EAGLE-3 drafts and their data, one entry each: texts, a prediction, an edit that plants it.

A planted `Case` is what a reader would find on disk: another declared contract, another tensor, other states;
the edits are in `lib.plants`. `signature` is the field's prediction in our words, `predicted` the part of it
that can be measured here, as bounds; what was measured stands in the zoo's record (`lib.zoo.recorded`).
Healthy controls stand among the faults, because a diagnosis that accuses them is wrong in the same way.

The sightings are section B.1 of the formats reference; `number` is the row there.

Not to be planted on the shipped samples, but on drafts that have what it takes (`needs`): input_norm or
fc_norm ignored (16), a scaled rotary dropped (10), a second layer lost (27). Left out, with the reason:

- residual dropped between two layers (27): no field of a contract says it, and no file holds it;
- a position gap between prefill and decode that grows (8 as fixed): constant gaps are `position_step`;
- a shared rotary cache (13) and the draft's own embedding overwritten (25): the first is `rope_theta` seen
  from an engine, the second needs a draft that owns one; `lm_head_overwritten` stands for both tensors;
- contaminated draft caches (32): only counters show them: `engine_loses`;
- off-policy training tokens (39), files too short or of the wrong width (5, 29, 31): the first is trained
  in, the others are typed errors of the readers and never become a case;
- quantised INT4 heads (36): `control_fp8` is the rounding, their layout is the readers' matter.

Axes: L positions, H hidden, V target vocabulary, Vd draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf
from typing import Literal

import torch

from lib import plants
from lib.captures import FINAL
from lib.case import Case
from lib.checkpoints import Draft
from lib.errors import ContractError
from lib.plants import DEFAULT_THETA, Plant
from lib.taps import Tap, default_triple

Part = Literal["wiring", "norms", "rotary", "maps", "weights", "states", "mask", "text", "config", "training"]

Against = Literal["value", "ratio", "change"]
# What a word of the reference is taken to mean: of the number itself, of its ratio to the healthy case's, or
# of its change from it. Accuracies and shares are from 0 to 1: 0.005 is half a point.
WORDS: dict[str, tuple[Against, float, float]] = {
    "no effect": ("change", -0.005, 0.005),
    "slightly lower": ("change", -0.05, -0.005),
    "lower": ("change", -inf, -0.01),
    "clearly lower": ("change", -inf, -0.05),
    "low": ("ratio", -inf, 0.75),
    "half": ("ratio", -inf, 0.6),
    "a quarter": ("ratio", -inf, 0.3),
    "chance": ("value", -inf, 0.05),
    "far below 95 %": ("value", -inf, 0.8),
    "about 0.1 tokens": ("change", -0.2, -0.05),
    "1.2 tokens": ("value", -inf, 1.3),
    "1.0 tokens": ("value", -inf, 1.1),
    "exactly 1 token": ("value", 1.0, 1.0),
}


@dataclass(frozen=True)
class Bound:
    """One number that the reference predicts, as an interval.

    Attributes:
        number: of a `zoo.Effect`: "accuracy 0" (in-vocab, at a depth), "tokens 5" (a round, bonus included),
            "all tokens", "coverage", "nats", a metric by its name there, or "error".
        against: what is bounded: the value, its ratio to the healthy case's, its change from it.
        low, high: the interval, ends included.
        says: the words of the reference.
        error: class of the typed error that is expected, for the number "error".
    """

    number: str
    against: Against
    low: float
    high: float
    says: str
    error: str = ""


def _said(number: str, word: str, says: str) -> Bound:
    return Bound(number, *WORDS[word], says)


def _refused(error: str, says: str) -> Bound:
    return Bound("error", "value", 1.0, 1.0, says, error)


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One fault, or one healthy control.

    Attributes:
        key: its name in `FAULTS` and in `Finding.kind`.
        number: row of the reference's table; None if it has none.
        title: what is wrong, in one line.
        part: which part of the interface it is in.
        sighting: where it was reported.
        signature: what the reference predicts that a probe sees.
        predicted: what the reference's signature and symptom say of numbers that an offline run has, written
            from its words (`WORDS`), not from a measurement; empty if they say nothing that `zoo.Effect` has.
        symptom: what its owner sees.
        change: what to do, one sentence with {before} and {after}.
        shown_by, hidden_by: metrics that reveal it, and metrics that look fine: the trainer's as its own
            run computes them (its wiring, its map, its data), the engine's as it serves.
        silent: no framework raises an error.
        healthy: a control, nothing is wrong.
        served: a vLLM config or a weight edit expresses it (`lib.engine_draft`).
        needs: what the case must have, keys of `NEEDS`.
        edit: plants it.
    """

    key: str
    number: int | None
    title: str
    part: Part
    sighting: str
    signature: str
    symptom: str
    change: str
    shown_by: tuple[str, ...]
    hidden_by: tuple[str, ...]
    edit: Plant = field(repr=False)
    silent: bool = True
    healthy: bool = False
    served: bool = False
    needs: tuple[str, ...] = ()
    predicted: tuple[Bound, ...] = ()

    def lacking(self, case: Case) -> list[str]:
        """What the case lacks for this fault, in words."""
        return [NEEDS[need][0] for need in self.needs if not NEEDS[need][1](case)]

    def plant(self, case: Case, rng: torch.Generator) -> Case:
        """The case with this fault in it; the original is left as it is.

        Args:
            rng: draws the severity, where there is one (which slot, which rows, which theta).

        Raises ContractError if the case lacks something.
        """
        if lacking := self.lacking(case):
            raise ContractError(
                f"fault {self.key}", "case", expected="; ".join(lacking), found="a case without",
                remedy="plant it on another draft, or capture more taps (samples.wide_captures)",
            )  # fmt: skip
        return self.edit(case, rng)


def _has(case: Case, *taps: Tap) -> bool:
    return all(tap in c.readers for c in case.captures for tap in taps)


def _named(case: Case) -> list[Tap]:
    return [t for t in case.draft.contract.taps if isinstance(t, Tap)]


def _layers(case: Case) -> int:
    return case.head.n_layers if case.head else 0


def _is_sample(case: Case) -> bool:
    from lib.samples import DRAFTS, SAMPLES

    return case.draft.path.parent == SAMPLES / "drafts" and case.draft.path.name in DRAFTS.values()


NEEDS: dict[str, tuple[str, Callable[[Case], bool]]] = {
    "head": ("the target's head", lambda c: c.head is not None),
    "final": ("final states in every capture", lambda c: all(FINAL in x.readers for x in c.captures)),
    "pre_norm": (
        "final states before the norm", lambda c: all(x.final_kind == "pre_norm" for x in c.captures),
    ),
    "live": ("the live target", lambda c: c.live is not None),
    "named": ("taps with names", lambda c: len(_named(c)) == c.draft.n_slots),
    "above": (
        "captures one block after each tap",
        lambda c: _has(c, *(Tap(t.after_block + 1) for t in _named(c))),
    ),
    "below": (
        "captures one block before each tap",
        lambda c: _has(c, *(Tap(max(0, t.after_block - 1)) for t in _named(c))),
    ),
    "default": (
        "captures at the default triple",
        lambda c: bool(c.head) and _has(c, *default_triple(_layers(c))),
    ),
    "first": ("captures at embed, layer1 and layer2", lambda c: _has(c, Tap(0), Tap(1), Tap(2))),
    "embed first": (
        "embed in the first slot, and a capture two blocks before the end",
        lambda c: c.draft.contract.taps[0] == Tap(0) and bool(c.head) and _has(c, Tap(_layers(c) - 2)),
    ),
    "last but one": (
        "captures one block before the end", lambda c: bool(c.head) and _has(c, Tap(_layers(c) - 1)),
    ),
    "reduced": ("a draft vocabulary smaller than the target's, with d2t", lambda c: _reduced(c.draft)),
    "two texts": ("two conversations or more", lambda c: len(c.captures) > 1),
    "two slots": ("two slots or more", lambda c: c.draft.n_slots > 1),
    "one width": (
        "draft and target of one width", lambda c: c.draft.hidden_size == c.captures[0].hidden_size,
    ),
    "fc norm": ("a norm before fc", lambda c: c.draft.contract.fc_input_norm != "none"),
    "two layers": ("a draft of two layers", lambda c: len(c.draft.layers) > 1),
    "scaled": ("a draft trained with a scaled rotary", lambda c: c.draft.contract.rope.kind != "default"),
    "unscaled": ("a draft trained with a plain rotary", lambda c: c.draft.contract.rope.kind == "default"),
    "theta": ("a draft whose theta is not 10000", lambda c: c.draft.contract.rope.theta != DEFAULT_THETA),
    "samples": ("a shipped sample draft", _is_sample),
}  # fmt: skip


def _reduced(draft: Draft) -> bool:
    return draft.d2t is not None and draft.draft_vocab < draft.target_vocab


# ---- the entries ------------------------------------------------------------------------------

_ISSUE = "https://github.com/"
# Metrics by their names in lib/metric_table.py, with the framework in front.
SERVING = ("vLLM mean acceptance length", "SGLang spec_accept_length")
TRAINING = ("speculators full_acc_0", "SpecForge acc_0", "EAGLE acc_0", "Automodel accuracy")
ALL = (*TRAINING, *SERVING)
DEEPER = ("speculators cond_acc_1", "Automodel tau_sim", *SERVING)
TOP = ("speculators full_acc_0", "SpecForge acc_0", "EAGLE acc_0")

FAULTS: dict[str, Fault] = {
    f.key: f
    for f in (
        # ---- wiring
        Fault(
            key="incident_slice", number=5, part="wiring", title="states cut [1:] where training cut [:-1]",
            sighting=_ISSUE + "vllm-project/speculators/issues/705",
            signature="each slot gets the state of the next one; accuracy at depth 0 falls by half",
            predicted=(_said("accuracy 0", "half", "accuracy at depth 0 falls by half"),),
            symptom="acceptance collapses in serving although training looked fine; no error",
            change="Declare the taps {after}, which the draft was trained on, in place of {before}.",
            shown_by=SERVING, hidden_by=TRAINING, served=True, needs=("named", "embed first"),
            edit=plants.wired(plants.next_slots),
        ),
        Fault(
            key="taps_plus_one", number=2, part="wiring", title="every tap one block late",
            sighting=_ISSUE + "sgl-project/sglang/pull/25454",
            signature="small: a few per cent of accuracy, to be found by paired tests, not by thresholds",
            predicted=(
                _said("accuracy 0", "slightly lower", "a few % acc@0: small"),
                _said("tokens 5", "about 0.1 tokens", "~0.10 accept length lost only"),
            ),
            symptom="about 0.1 tokens a round are missing",
            change="Write the tap ids for {after}; as they stand they mean {before} (one convention adds 1).",
            shown_by=SERVING, hidden_by=TRAINING, served=True, needs=("named", "above"),
            edit=plants.wired(plants.moved(1)),
        ),
        Fault(
            key="taps_minus_one", number=3, part="wiring", title="every tap one block early",
            sighting=_ISSUE + "vllm-project/vllm/pull/43671",
            signature="accuracy at depth 0 is a quarter of what it is with every slot one block later",
            predicted=(_said("accuracy 0", "a quarter", "acc@0 x4 when all slots shift by +1"),),
            symptom="first-position acceptance near 10 % in place of 45 %",
            change="Write the tap ids for {after}; as they stand they mean {before} (the reader adds no 1).",
            shown_by=SERVING, hidden_by=TRAINING, served=True, needs=("named", "below"),
            edit=plants.wired(plants.moved(-1)),
        ),
        Fault(
            key="default_triple", number=4, part="wiring", title="written ids ignored, default triple used",
            sighting=_ISSUE + "lightseekorg/tokenspeed/pull/526",
            signature="chance at depth 0 with the default triple, normal with the ids as written",
            predicted=(
                _said("accuracy 0", "chance", "acc@0 about chance with the default triple"),
                _said("tokens 5", "1.0 tokens", "1.00 -> 2.39"),
            ),
            symptom="nothing is accepted; the config looks right",
            change="Put the ids of {after} where the engine looks (also in eagle_config); it used {before}.",
            shown_by=SERVING, hidden_by=TRAINING, served=True, needs=("named", "default"),
            edit=plants.wired(plants.default),
        ),
        Fault(
            key="first_states", number=37, part="wiring",
            title="hidden_states[0..2] of a plain model read as the three taps",
            sighting=_ISSUE + "SafeAILab/EAGLE/issues/239",
            signature="the first slot equals the embedding of the token",
            symptom="no acceptance with a target that returns all its states",
            change="Take the states {after} from the target; {before} are its first three.",
            shown_by=ALL, hidden_by=(), served=True, needs=("named", "first"),
            edit=plants.wired(plants.first),
        ),
        Fault(
            key="slot_order", number=None, part="wiring", title="slots in another order",
            sighting=_ISSUE + "sgl-project/sglang/pull/25454",
            signature="engines sort taps, so a list that does not ascend meets permuted columns of fc",
            predicted=(_said("accuracy 0", "low", "low acceptance with the right set of layers"),),
            symptom="low acceptance with the right set of layers",
            change="Order the taps as trained, {after}, or permute the columns of fc; declared is {before}.",
            shown_by=SERVING, hidden_by=TRAINING, served=True, needs=("named", "two slots"),
            edit=plants.wired(plants.permuted),
        ),
        Fault(
            key="slot_duplicated", number=31, part="wiring", title="one slot holds the state of another",
            sighting=_ISSUE + "vllm-project/vllm/pull/53052",
            signature="two slots are equal at every position",
            symptom="low acceptance under pipeline parallelism only",
            change="Feed slot by slot {after}; {before} has one state twice.",
            shown_by=SERVING, hidden_by=TRAINING, served=True, needs=("named", "two slots"),
            edit=plants.wired(plants.duplicated),
        ),
        Fault(
            key="slot_zero", number=31, part="states", title="one slot is zero",
            sighting=_ISSUE + "RBLN-SW/vllm-rbln/issues/1007",
            signature="the norms of one slot are zero",
            symptom="low acceptance when the target is split into pipeline stages",
            change="Recapture with the state in {before} carried across the stage boundary: {after}.",
            shown_by=ALL, hidden_by=(), edit=plants.slot_zero,
        ),
        Fault(
            key="fc_bypassed", number=1, part="wiring",
            title="EAGLE-3 draft served as EAGLE: fc is never applied",
            sighting=_ISSUE + "sgl-project/sglang/pull/21272",
            signature="accuracy near zero without fc, normal with it; the checkpoint is healthy",
            predicted=(
                _said("accuracy 0", "chance", "acc@0 about 0 with fc bypassed"),
                _said("tokens 5", "1.0 tokens", "accept_len exactly 1.00"),
            ),
            symptom="accept length 1.00, no warning",
            change="Serve it with the EAGLE3 algorithm: use_fc {before} -> {after}.",
            shown_by=SERVING, hidden_by=TRAINING, served=True, needs=("one width",),
            edit=plants.declared(use_fc=False),
        ),
        Fault(
            key="token_shift_0", number=34, part="wiring", title="each state paired with its own token",
            sighting=_ISSUE + "NickL77/BaldEagle/issues/17",
            signature="one token shift is clearly best, and it is not the declared one",
            predicted=(_said("accuracy 0", "clearly lower", "one shift is clearly best"),),
            symptom="low acceptance at every depth",
            change="Pair state t with token t + {after}, not t + {before}.",
            shown_by=ALL, hidden_by=(), edit=plants.declared(token_shift=0),
        ),
        Fault(
            key="token_shift_2", number=34, part="wiring",
            title="each state paired with the token it predicts",
            sighting=_ISSUE + "NickL77/BaldEagle/issues/17",
            signature="the answer is fed: a draft trained so is right offline and useless live",
            predicted=(_said("accuracy 0", "clearly lower", "one shift is clearly best"),),
            symptom="accuracy in training and acceptance in serving have nothing to do with each other",
            change="Pair state t with token t + {after}, not t + {before}.",
            shown_by=ALL, hidden_by=(), edit=plants.declared(token_shift=2),
        ),
        # ---- norms
        Fault(
            key="norm_before_residual", number=18, part="norms",
            title="norm_before_residual of the other value",
            sighting=_ISSUE
            + "vllm-project/speculators/blob/main/tests/e2e/regression/test_eagle3_conversion_acceptance.py",
            signature="accuracy at depth 0 is clearly higher for the other value",
            predicted=(_said("accuracy 0", "clearly lower", "acc@0 clearly higher for one value"),),
            symptom="low acceptance of a converted draft",
            change="Set norm_before_residual from {before} to {after} in config.json.",
            shown_by=SERVING, hidden_by=TRAINING, served=True, edit=plants.flip_residual,
        ),
        Fault(
            key="feedback", number=17, part="norms",
            title="norm_output of the other meaning: wrong state fed back",
            sighting=_ISSUE + "vllm-project/vllm/pull/46488",
            signature="depth 0 untouched; conditional accuracy falls from depth 1 on",
            predicted=(
                _said("accuracy 0", "no effect", "step-0 fine"),
                _said("accuracy 1", "clearly lower", "cond acc@1.. drop, deeper steps poor"),
            ),
            symptom="first position fine, deeper ones poor",
            change="Feed back the state {after} to the next depth, not {before} (norm_output).",
            shown_by=DEEPER, hidden_by=TOP, served=True, edit=plants.flip_feedback,
        ),
        Fault(
            key="head_unnormed", number=17, part="norms", title="lm_head fed the state before the final norm",
            sighting=_ISSUE + "sgl-project/SpecForge/pull/879",
            signature="accuracy at depth 0 low, logits huge",
            predicted=(
                _said("accuracy 0", "low", "un-normed lm_head: acc@0 low"),
                _said("nats", "lower", "logits norm huge"),
            ),
            symptom="low acceptance after an export between frameworks",
            change="Set head_norm from {before} to {after}: lm_head takes norm(h).",
            shown_by=("SpecForge acceptance_rate_0",), hidden_by=ALL, served=True,
            edit=plants.declared(head_norm=False),
        ),
        Fault(
            key="fc_norm_ignored", number=16, part="norms", title="norms before fc in the file, not applied",
            sighting=_ISSUE + "sgl-project/sglang/pull/32334",
            signature="accuracy jumps when the unused norm weights are applied",
            predicted=(_said("accuracy 0", "low", "acc jumps when input_norm is applied"),),
            symptom="the server runs, acceptance is low",
            change="Set fc_input_norm from {before} to {after}; the weights are in the file.",
            shown_by=SERVING, hidden_by=TRAINING, needs=("fc norm",),
            edit=plants.declared(fc_input_norm="none"),
        ),
        Fault(
            key="hidden_norm_lost", number=28, part="norms", title="hidden_norm not loaded and not applied",
            sighting=_ISSUE + "sgl-project/sglang/blob/main/python/sglang/srt/models/llama_eagle3.py",
            signature="the first layer sees states hundreds of times too large",
            predicted=(_said("tokens 5", "1.0 tokens", "AL about 1"),),
            symptom="low acceptance",
            change="Load hidden_norm.weight ({after}); the reader found {before}.",
            shown_by=ALL, hidden_by=(), edit=plants.hidden_norm_lost,
        ),
        Fault(
            key="norm_ones", number=28, part="norms", title="a norm weight that is one everywhere",
            sighting=_ISSUE + "sgl-project/sglang/blob/main/python/sglang/srt/models/llama_eagle3.py",
            signature="a weight of exact ones was never trained, or never loaded",
            symptom="slightly lower acceptance",
            change="Load the trained weight into {before}: {after}.",
            shown_by=SERVING, hidden_by=TRAINING, served=True, edit=plants.norm_of_ones,
        ),
        # ---- rotary
        Fault(
            key="rope_theta_default", number=11, part="rotary",
            title="rope_parameters not read: theta is 10000",
            sighting=_ISSUE + "sgl-project/SpecForge/pull/742",
            signature="the best theta is not the loaded one",
            predicted=(_said("accuracy 0", "lower", "best theta is not the loaded one; lower acceptance"),),
            symptom="lower acceptance after a move to transformers 5",
            change="Read theta {after} from rope_parameters; the reader used {before}.",
            shown_by=SERVING, hidden_by=TRAINING, served=True, needs=("theta",), edit=plants.theta_default,
        ),
        Fault(
            key="rope_theta", number=13, part="rotary", title="another theta than the draft was trained with",
            sighting=_ISSUE + "vllm-project/vllm-ascend/issues/6612",
            signature="the best theta is not the loaded one",
            predicted=(_said("accuracy 0", "lower", "accuracy and acceptance drop"),),
            symptom="lower acceptance of a draft whose theta is not its target's",
            change="Set rope_theta from {before} to {after}.",
            shown_by=SERVING, hidden_by=TRAINING, served=True, edit=plants.theta_other,
        ),
        Fault(
            key="rope_linear", number=10, part="rotary",
            title="a linear rotary scaling that training did not have",
            sighting=_ISSUE + "vllm-project/speculators/pull/574",
            signature="accuracy differs with position",
            symptom="lower acceptance, worse in long texts",
            change="Set rope_parameters from {before} to {after}.",
            shown_by=SERVING, hidden_by=TRAINING, served=True, needs=("unscaled",),
            edit=plants.scaling("linear"),
        ),
        Fault(
            key="rope_llama3", number=12, part="rotary",
            title="a llama3 rotary scaling that training did not have",
            sighting=_ISSUE + "NVIDIA-NeMo/Automodel/pull/2399",
            signature="equal at short positions, falls with position",
            predicted=(
                _said("accuracy 0", "no effect", "equal below original_max / 8; these texts are shorter"),
            ),
            symptom="acceptance decays in long contexts",
            change="Set rope_parameters from {before} to {after}.",
            shown_by=SERVING, hidden_by=TRAINING, served=True, needs=("unscaled",),
            edit=plants.scaling("llama3"),
        ),
        Fault(
            key="rope_yarn", number=12, part="rotary",
            title="a yarn rotary scaling that training did not have",
            sighting=_ISSUE + "NVIDIA-NeMo/Automodel/pull/2399",
            signature="equal at short positions, falls with position",
            predicted=(
                _said("accuracy 0", "no effect", "equal below original_max / 8; these texts are shorter"),
            ),
            symptom="acceptance decays in long contexts",
            change="Set rope_parameters from {before} to {after}.",
            shown_by=SERVING, hidden_by=TRAINING, served=True, needs=("unscaled",),
            edit=plants.scaling("yarn"),
        ),
        Fault(
            key="rope_scaling_dropped", number=10, part="rotary",
            title="the rotary scaling of training was dropped",
            sighting=_ISSUE + "vllm-project/speculators/pull/574",
            signature="accuracy falls with position",
            symptom="fine in short texts, poor in long ones",
            change="Restore rope_parameters from {before} to {after}.",
            shown_by=SERVING, hidden_by=TRAINING, served=True, needs=("scaled",), edit=plants.scaling_dropped,
        ),
        Fault(
            key="rope_interleaved", number=14, part="rotary",
            title="rotary pairs laid out the other way (NeoX, GPT-J)",
            sighting=_ISSUE + "NVIDIA/TensorRT-LLM/pull/19036",
            signature="the other layout restores accuracy at depth 0",
            predicted=(
                _said("accuracy 0", "chance", "interleaved restores acc@0"),
                _said("tokens 5", "1.0 tokens", "AL 1.012, 0.3 % accepted"),
            ),
            symptom="0.3 % accepted",
            change="Set the rotary layout from {before} to {after}.",
            shown_by=SERVING, hidden_by=TRAINING, served=True, edit=plants.interleaved,
        ),
        Fault(
            key="max_position", number=15, part="rotary", title="positions clamped at the training length",
            sighting=_ISSUE + "sgl-project/sglang/issues/6783",
            signature="a step in accuracy at the clamped position",
            predicted=(
                _said("accuracy 0", "low", "collapses past the clamp, which lies in the first half"),
            ),
            symptom="acceptance collapses in long contexts",
            change="Raise max_position_embeddings from {before} to {after}.",
            shown_by=SERVING, hidden_by=TRAINING, edit=plants.clamp,
        ),
        Fault(
            key="position_step_0", number=9, part="rotary", title="positions stand still while drafting",
            sighting=_ISSUE + "NVIDIA-NeMo/Automodel/pull/2376",
            signature="depth 0 untouched; deeper conditional accuracies lower",
            predicted=(
                _said("accuracy 0", "no effect", "depth 0 untouched"),
                _said("accuracy 1", "lower", "cond acc at step >= 1 higher with the right positions"),
            ),
            symptom="deeper positions a little worse",
            change="Advance positions by {after} per depth, not by {before}.",
            shown_by=DEEPER, hidden_by=TOP, edit=plants.declared(position_step=0),
        ),
        Fault(
            key="position_step_2", number=8, part="rotary", title="drafting skips positions",
            sighting=_ISSUE + "sgl-project/sglang/pull/25015",
            signature="depth 0 untouched; deeper depths slightly lower",
            predicted=(
                _said("accuracy 0", "no effect", "step-0 unaffected"),
                _said("accuracy 1", "slightly lower", "later depths slightly lower"),
            ),
            symptom="a little less acceptance at deeper positions",
            change="Advance positions by {after} per depth, not by {before}.",
            shown_by=DEEPER, hidden_by=TOP, edit=plants.declared(position_step=2),
        ),
        # ---- maps
        Fault(
            key="map_identity", number=19, part="maps", title="no d2t: draft ids taken as target ids",
            sighting=_ISSUE + "NVIDIA-NeMo/Automodel/pull/2447",
            signature="fine in the draft's own ids, near zero after mapping",
            predicted=(
                _said("all tokens", "chance", "mapped acc about 0"),
                _said("tokens 5", "1.0 tokens", "acceptance collapses"),
            ),
            symptom="acceptance collapses",
            change="Set the vocabulary map from {before} to {after}; d2t belongs in the checkpoint.",
            shown_by=("SpecForge acc_0", *SERVING),
            hidden_by=("speculators full_acc_0", "Automodel accuracy"),
            served=True, needs=("reduced",), edit=plants.declared(vocab_map="identity"),
        ),
        Fault(
            key="map_absolute", number=20, part="maps", title="offsets read as target ids",
            sighting=_ISSUE + "verl-project/verl-SpeCo/pull/67",
            signature="near zero after mapping",
            predicted=(_said("all tokens", "chance", "ids out of range, mapped acc about 0"),),
            symptom="acceptance collapses",
            change="Read d2t as {after}, not as {before}.",
            shown_by=("SpecForge acc_0", *SERVING),
            hidden_by=("speculators full_acc_0", "Automodel accuracy"),
            served=True, needs=("reduced",), edit=plants.declared(vocab_map="absolute"),
        ),
        Fault(
            key="d2t_absolute", number=20, part="maps", title="d2t holds target ids where offsets belong",
            sighting=_ISSUE + "verl-project/verl-SpeCo/pull/67",
            signature="d2t ascends strictly by itself, and mapped ids leave the vocabulary",
            predicted=(_said("all tokens", "chance", "ids out of range, mapped acc about 0"),),
            symptom="acceptance collapses, or ids beyond the vocabulary",
            change="Subtract 0..Vd-1 from d2t: from {before} to {after}.",
            shown_by=("SpecForge acc_0", *SERVING), hidden_by=("speculators full_acc_0",), needs=("reduced",),
            edit=plants.map_target_ids,
        ),
        Fault(
            key="d2t_arange", number=20, part="maps",
            title="d2t is 0, 1, 2, ...: a default that was never filled",
            sighting=_ISSUE + "verl-project/verl-SpeCo/pull/67",
            signature="d2t equals arange, so draft id i means 2i",
            predicted=(_said("all tokens", "chance", "T = 2i, mapped acc about 0"),),
            symptom="acceptance collapses",
            change="Write the map of the training run into d2t: from {before} to {after}.",
            shown_by=("SpecForge acc_0", *SERVING), hidden_by=("speculators full_acc_0",), served=True,
            needs=("reduced",),
            edit=plants.map_arange,
        ),
        Fault(
            key="d2t_zeros", number=21, part="maps", title="d2t all zeros with a reduced vocabulary",
            sighting=_ISSUE + "verl-project/verl-SpeCo/pull/66",
            signature="draft ids are target ids 0..Vd-1, which cover far less than 95 % of the text",
            predicted=(_said("coverage", "far below 95 %", "coverage of token ids by T far below 95 %"),),
            symptom="training looks good, serving is bad",
            change="Write the map of the training run into d2t: from {before} to {after}.",
            shown_by=("SpecForge acc_0", *SERVING),
            hidden_by=("speculators full_acc_0", "Automodel accuracy"),
            served=True, needs=("reduced",),
            edit=plants.map_zeros,
        ),
        Fault(
            key="d2t_permuted", number=22, part="maps", title="stale map: the right ids in another order",
            sighting=_ISSUE + "vllm-project/speculators/pull/602",
            signature="rows of lm_head resemble target rows that the map does not name; ids do not ascend",
            symptom="acceptance collapses after a cached map was reused",
            change="Use the map of the run that trained lm_head: {after} in place of {before}.",
            shown_by=("SpecForge acc_0", *SERVING), hidden_by=("Automodel accuracy",), served=True,
            needs=("reduced",),
            edit=plants.map_permuted,
        ),
        Fault(
            key="d2t_stale", number=22, part="maps", title="stale map: of another corpus",
            sighting=_ISSUE + "sgl-project/SpecForge/pull/602",
            signature="rows of lm_head resemble target rows that the map does not name; all else is in order",
            symptom="acceptance collapses after a cached map was reused",
            change="Use the map of the run that trained lm_head: {after} in place of {before}.",
            shown_by=("SpecForge acc_0", *SERVING), hidden_by=("Automodel accuracy",), served=True,
            needs=("reduced",),
            edit=plants.map_other_corpus,
        ),
        # ---- weights
        Fault(
            key="embed_random", number=23, part="weights", title="embed_tokens saved as it was initialised",
            sighting=_ISSUE + "lightseekorg/TorchSpec/issues/38",
            signature="rows have cosine 0 with the target's and a spread of 0.02",
            predicted=(_said("accuracy 0", "low", "poor in vLLM"),),
            symptom="poor in vLLM, fine in SGLang, which takes the target's table",
            change="Drop embed_tokens from the checkpoint, or save {after} in place of {before}.",
            shown_by=SERVING, hidden_by=TRAINING, served=True, edit=plants.embed_random,
        ),
        Fault(
            key="lm_head_overwritten", number=25, part="weights",
            title="the draft's lm_head replaced by the target's rows",
            sighting=_ISSUE + "vllm-project/vllm/pull/27737",
            signature="rows equal the target's; accuracy with the draft's own is higher",
            predicted=(_said("accuracy 0", "lower", "acc with own > acc with target's"),),
            symptom="lower acceptance in engines that always share",
            change="Keep the draft's own lm_head: {after} in place of {before}.",
            shown_by=SERVING, hidden_by=TRAINING, served=True, needs=("head", "one width"),
            edit=plants.lm_head_overwritten,
        ),
        Fault(
            key="layer_unloaded", number=28, part="weights",
            title="the layer was never loaded: a prefix did not match",
            sighting=_ISSUE + "sgl-project/sglang/blob/main/python/sglang/srt/models/llama_eagle3.py",
            signature="required names are missing after renaming; weights look freshly initialised",
            predicted=(_said("tokens 5", "1.0 tokens", "AL about 1"),),
            symptom="accept length near 1",
            change="Rename the layer's tensors from {before} to {after}.",
            shown_by=ALL, hidden_by=(), served=True, edit=plants.fresh_layer,
        ),
        Fault(
            key="weights_nonfinite", number=35, part="weights", title="NaN in a weight",
            sighting=_ISSUE + "vllm-project/speculators/pull/966",
            signature="a weight is not finite; every logit is NaN, and the candidates are the first ids",
            predicted=(_said("tokens 5", "exactly 1 token", "exactly 0 % acceptance"),),
            symptom="exactly 0 % accepted",
            change="Export again from a finite checkpoint: {after} in place of {before}.",
            shown_by=ALL, hidden_by=(), edit=plants.weight_nan,
        ),
        Fault(
            key="layer_lost", number=27, part="weights", title="the second layer was lost in conversion",
            sighting=_ISSUE + "vllm-project/vllm/pull/26164",
            signature="num_hidden_layers is more than the layers present",
            predicted=(_said("accuracy 0", "lower", "lower acceptance after conversion"),),
            symptom="lower acceptance after conversion",
            change="Convert all layers: {after} in place of {before}.",
            shown_by=ALL, hidden_by=(), served=True, needs=("two layers",), edit=plants.layer_lost,
        ),
        # ---- states
        Fault(
            key="states_rotated", number=24, part="states", title="states of a rotated target (QuaRot)",
            sighting=_ISSUE + "vllm-project/vllm-ascend/pull/7038",
            signature="norms as they should be, cosine with the unrotated states 0",
            predicted=(_said("tokens 5", "1.0 tokens", "AL 1.07 -> 3.09"),),
            symptom="accept length 1.07 with a quantised target, 3.09 with the original",
            change="Undo the rotation, or capture from the served target: {after} in place of {before}.",
            shown_by=ALL, hidden_by=(), edit=plants.rotated,
        ),
        Fault(
            key="rows_shifted", number=29, part="states",
            title="a block of rows missing: prefix cache during capture",
            sighting=_ISSUE + "sgl-project/sglang/pull/10846",
            signature="from some row on every state is that of 16 tokens later",
            symptom="a draft trained on such files is weak; no error when files are padded",
            change="Recapture with the prefix cache off: rows {before} should be {after}.",
            shown_by=ALL, hidden_by=(), needs=("two texts",), edit=plants.tail_shifted,
        ),
        Fault(
            key="files_swapped", number=30, part="states",
            title="some files hold another conversation's states",
            sighting=_ISSUE + "sgl-project/SpecForge/commit/9ca23a3d",
            signature="files fall into two groups, one near zero",
            symptom="a weak draft; averages look merely low",
            change="Recapture the files {before} one request at a time: {after}.",
            shown_by=ALL, hidden_by=(), needs=("two texts",), edit=plants.files_swapped,
        ),
        Fault(
            key="fp16_overflow", number=35, part="states", title="states overflowed in fp16",
            sighting=_ISSUE + "vllm-project/vllm/issues/55250",
            signature="Inf in some rows; the reader refuses them",
            predicted=(_refused("CaptureError", "Inf and NaN rows"),),
            symptom="0 % accepted, candidates 0, 1, 2, ...",
            change="Recapture in bf16 or fp32: {after} in place of {before}.",
            shown_by=(), hidden_by=(), edit=plants.overflow,
        ),
        Fault(
            key="final_early", number=6, part="states", title="the final state is one block early",
            sighting=_ISSUE + "lightseekorg/TorchSpec/issues/87",
            signature="argmax of the head on it agrees less with the next token; the slots are fine",
            predicted=(
                _said("accuracy 0", "no effect", "aux slots fine"),
                _said("SpecForge acc_0", "clearly lower", "argmax on it noticeably worse"),
            ),
            symptom="targets of training are an inner layer's; accuracy looks normal",
            change="Capture the final state after block {after}, not {before}.",
            shown_by=("speculators full_acc_0", "SpecForge acceptance_rate_0"), hidden_by=SERVING,
            needs=("final", "head", "last but one"), edit=plants.final_early,
        ),
        Fault(
            key="final_is_slot", number=5, part="states", title="the last slot taken for the final state",
            sighting=_ISSUE + "vllm-project/speculators/issues/705",
            signature="the head on it does not predict the next tokens",
            predicted=(
                _said("accuracy 0", "no effect", "it is the target that is wrong"),
                _said("SpecForge acc_0", "low", "disagrees with next tokens: an inner layer"),
            ),
            symptom="trainer metrics meaningless; a slot is missing",
            change="Capture with the last layer included: final state {after}, not {before}.",
            shown_by=TRAINING, hidden_by=SERVING, needs=("final", "head"), edit=plants.final_is_slot,
        ),
        Fault(
            key="final_unnormed", number=7, part="states",
            title="final state before the norm taken for one after it",
            sighting=_ISSUE + "vllm-project/speculators/pull/313",
            signature="the head agrees with the text only with the norm applied; row norms vary widely",
            predicted=(
                _said("accuracy 0", "no effect", "it is the target that is wrong"),
                _said("SpecForge acc_0", "low", "top-1 with norm far above that without; 25 % -> 40 %"),
            ),
            symptom="acceptance 25 % that becomes 40 % when fixed",
            change="Declare the final state {after}, not {before}, and apply the norm.",
            shown_by=TRAINING, hidden_by=SERVING, needs=("final", "pre_norm"), edit=plants.final_unnormed,
        ),
        Fault(
            key="final_normed_twice", number=7, part="states",
            title="final state after the norm, normed again",
            sighting=_ISSUE + "vllm-project/speculators/pull/313",
            signature="row norms are constant already; norming again changes the argmax",
            predicted=(
                _said("accuracy 0", "no effect", "it is the target that is wrong"),
                _said("SpecForge acc_0", "lower", "applying the norm again changes the argmax"),
            ),
            symptom="a little lower target agreement",
            change="Declare the final state {after}, not {before}.",
            shown_by=TRAINING, hidden_by=SERVING, needs=("final", "head", "pre_norm"),
            edit=plants.final_normed,
        ),
        # ---- mask and text
        Fault(
            key="mask_ones", number=33, part="mask", title="loss mask is one everywhere",
            sighting=_ISSUE + "NVIDIA-NeMo/Automodel/pull/3739",
            signature="no zeros in the mask; prompts are scored",
            symptom="metrics count prompts; training spends itself on them",
            change="Restore the mask of the assistant's tokens: {after} in place of {before}.",
            shown_by=TRAINING, hidden_by=(),
            edit=plants.mask_of(True),
        ),
        Fault(
            key="mask_shifted", number=33, part="mask", title="loss mask shifted by one token",
            sighting=_ISSUE + "sgl-project/SpecForge/issues/885",
            signature="the first or last token of an answer is not scored as its neighbours are",
            symptom="the first token of every answer is badly predicted",
            change="Shift the loss mask by one: start {after}, not {before}.",
            shown_by=(), hidden_by=ALL, edit=plants.mask_shifted,
        ),
        Fault(
            key="mask_empty", number=33, part="mask", title="loss mask is empty",
            sighting=_ISSUE + "NVIDIA-NeMo/Automodel/pull/3739",
            signature="the sum of the mask is zero",
            predicted=(_refused("ContractError", "sum(mask) == 0"),),
            symptom="nothing is trained, nothing is counted",
            change="Find the assistant's turns with the served chat template: {after} in place of {before}.",
            shown_by=(), hidden_by=(),
            edit=plants.mask_of(False),
        ),
        Fault(
            key="text_shuffled", number=34, part="text", title="answers that nobody would write",
            sighting=_ISSUE + "NickL77/BaldEagle/issues/17",
            signature="the target's first choice is the next token in far less than 70 % of the places",
            predicted=(_said("tokens 5", "1.2 tokens", "train acc high, accept about 1.2"),),
            symptom="high accuracy in training, 1.2 tokens a round in serving",
            change="Let the target write the answers again: {after} in place of {before}.",
            shown_by=ALL, hidden_by=(), needs=("live", "named"),
            edit=plants.text_shuffled,
        ),
        Fault(
            key="text_of_others", number=34, part="text",
            title="answers that are not the target's to these prompts",
            sighting=_ISSUE + "SafeAILab/EAGLE/issues/179",
            signature="the target's first choice agrees less with the next token than on its own greedy text",
            predicted=(_said("accuracy 0", "lower", "acc drops on other text"),),
            symptom="a little lower accuracy on training text than on served text",
            change="Let the target write the answers again: {after} in place of {before}.",
            shown_by=SERVING, hidden_by=TRAINING, needs=("live", "named", "two texts"),
            edit=plants.text_of_others,
        ),
        Fault(
            key="ids_beyond", number=40, part="text", title="token ids beyond the vocabulary",
            sighting=_ISSUE + "vllm-project/speculators/issues/514",
            signature="the largest token id is not below the rows of the embedding",
            predicted=(_refused("CaptureError", "garbage text or IndexError"),),
            symptom="an index error, or garbage",
            change="Use the tokenizer of the target: largest id {before}, should be {after}.",
            shown_by=(), hidden_by=(), silent=False, edit=plants.ids_beyond,
        ),
        # ---- training and engine
        Fault(
            key="inner_targets", number=6, part="training", title="trained on targets from an inner state",
            sighting=_ISSUE + "lightseekorg/TorchSpec/pull/89",
            signature="the draft agrees with the head on an inner state, more than with the text",
            symptom="low acceptance that no change of the wiring repairs",
            change="Train again with targets from {after}; this draft learned {before}.",
            shown_by=ALL, hidden_by=("its own training log",), served=True,
            needs=("samples", "head", "final"),
            edit=plants.sample_draft("c"),
        ),
        Fault(
            key="engine_loses", number=32, part="config",
            title="the engine accepts less than the draft earns",
            sighting=_ISSUE + "vllm-project/vllm/issues/14649",
            signature="every probe passes, and served tokens per round stay far below the offline ones",
            symptom="acceptance lower in serving than offline on the same text",
            change="Look at the engine: it counts {before} tokens a round where {after} are possible.",
            shown_by=SERVING, hidden_by=TRAINING, edit=plants.counted(plants.fewer),
        ),
        Fault(
            key="engine_all_or_nothing", number=38, part="config",
            title="the engine accepts everything or nothing",
            sighting=_ISSUE + "NVIDIA/TensorRT-LLM/pull/5146",
            signature="tokens per round exactly at a bound",
            symptom="1 or depth + 1 tokens a round, to the digit",
            change="Look for NaN logits in the engine: {before} tokens a round, offline {after}.",
            shown_by=SERVING, hidden_by=TRAINING, edit=plants.counted(plants.all_or_nothing),
        ),
        # ---- healthy controls
        Fault(
            key="control_offset", number=8, part="rotary",
            title="healthy: every position moved by a constant",
            sighting=_ISSUE + "sgl-project/sglang/pull/25015",
            signature="no effect: rotary attention sees differences of positions only",
            predicted=(
                _said("accuracy 0", "no effect", "constant offsets show NO effect"),
                _said("accuracy 1", "no effect", "constant offsets show NO effect"),
            ),
            symptom="none", change="Nothing: {before} and {after} are the same to rotary attention.",
            shown_by=(), hidden_by=(), healthy=True, served=True,
            edit=plants.positions_moved,
        ),
        Fault(
            key="control_zero_map", number=20, part="maps",
            title="healthy: d2t all zeros with the full vocabulary",
            sighting=_ISSUE + "SafeAILab/EAGLE/issues/222",
            signature="no effect: draft ids are target ids",
            predicted=(_said("all tokens", "no effect", "healthy head with an all-zero d2t"),),
            symptom="none", change="Nothing: {before} is right here, as {after} would be.",
            shown_by=(), hidden_by=(), healthy=True, served=True, needs=("reduced",),
            edit=plants.full_vocabulary,
        ),
        Fault(
            key="control_target_theta", number=13, part="rotary", served=True,
            title="healthy: the draft's theta is not the target's",
            sighting=_ISSUE + "vllm-project/vllm-ascend/issues/6612",
            signature="the draft's own theta is best",
            predicted=(_said("accuracy 0", "no effect", "not a fault by itself"),),
            symptom="none", change="Nothing: the draft keeps {before}; the target's is {after}.",
            shown_by=(), hidden_by=(), healthy=True, needs=("head",), edit=plants.target_theta,
        ),
        Fault(
            key="control_weak", number=None, part="weights", title="healthy: a weak draft (noise on the MLP)",
            sighting=_ISSUE + "vllm-project/speculators/issues/751",
            signature="lower everywhere, and no change of the wiring helps",
            predicted=(_said("accuracy 0", "lower", "lower everywhere"),),
            symptom="low acceptance", change="Train more; nothing is wired wrong ({before}, {after}).",
            shown_by=ALL, hidden_by=(), healthy=True, served=True, edit=plants.weak,
        ),
        Fault(
            key="control_other_draft", number=None, part="training",
            title="healthy: another draft (b), weaker, fed its own taps",
            sighting=_ISSUE + "vllm-project/speculators/issues/751",
            signature="right under its own taps",
            symptom="none", change="Nothing: {before} are its taps; {after} are another draft's.",
            shown_by=(), hidden_by=(), healthy=True, served=True, needs=("samples", "head", "embed first"),
            edit=plants.sample_draft("b"),
        ),
        Fault(
            key="control_embed_scale", number=26, part="norms", title="healthy: embeddings scaled by sqrt(H)",
            sighting=_ISSUE
            + "NVIDIA/Model-Optimizer/blob/main/examples/speculative_decoding/debug/README.md",
            signature="no effect: input_layernorm undoes any scale, up to its eps",
            predicted=(_said("accuracy 0", "no effect", "input_layernorm hides it: scale-free up to eps"),),
            symptom="none", change="Nothing: {before} and {after} are the same after the norm.",
            shown_by=(), hidden_by=(), healthy=True, served=True,
            edit=plants.embed_scaled,
        ),
        Fault(
            key="control_bf16", number=35, part="states", title="healthy: states rounded to bf16",
            sighting=_ISSUE + "vllm-project/speculators/pull/994",
            signature="no effect beyond near ties",
            predicted=(_said("accuracy 0", "no effect", "no effect beyond near ties"),),
            symptom="none", change="Nothing: {before} is as good as {after}.",
            shown_by=(), hidden_by=(), healthy=True, edit=plants.bf16,
        ),
        Fault(
            key="control_fp8", number=36, part="weights", title="healthy: weights rounded to fp8",
            sighting="https://huggingface.co/ginsongsong/eagle3-kimik2.5-w4a8",
            signature="a little lower everywhere",
            predicted=(_said("accuracy 0", "no effect", "not a fault"),),
            symptom="none", change="Nothing: {before} costs next to nothing against {after}.",
            shown_by=(), hidden_by=(), healthy=True, served=True, edit=plants.fp8,
        ),
        Fault(
            key="control_unused_taps", number=None, part="states",
            title="healthy: captures with more taps, in any order",
            sighting=_ISSUE + "vllm-project/speculators/issues/705",
            signature="no effect: taps are taken by name",
            predicted=(
                _said("accuracy 0", "no effect", "taps are taken by name"),
                _said("accuracy 1", "no effect", "taps are taken by name"),
            ),
            symptom="none", change="Nothing: {before} holds all that {after} needs.",
            shown_by=(), hidden_by=(), healthy=True, needs=("named",), edit=plants.unused_taps,
        ),
        Fault(
            key="control_few", number=None, part="states", title="healthy: three conversations only",
            sighting=_ISSUE + "vllm-project/speculators/issues/751",
            signature="no effect but wide intervals",
            symptom="none", change="Use more conversations: {before} are too few, {after} would do.",
            shown_by=(), hidden_by=(), healthy=True,
            edit=plants.few,
        ),
    )
}  # fmt: skip
