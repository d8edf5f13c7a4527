"""The fault zoo's entries: complete texts, and plants that change what they say and nothing else."""

from __future__ import annotations

import math
from dataclasses import fields, is_dataclass, replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import get_args

import pytest
import torch
from torch import Tensor

from lib import errors, samples, zoo
from lib.captures import FINAL, open_capture, save_capture
from lib.case import Case
from lib.checkpoints import load_draft
from lib.contract import Contract
from lib.decoding import LiveTarget
from lib.draft import DraftForward
from lib.errors import ContractError
from lib.faults import FAULTS, NEEDS, WORDS, Part
from lib.plants import BLOCK
from lib.taps import Stored, Tap
from lib.target import record_states
from lib.target_head import TargetHead
from tests.support import HIDDEN, VOCAB, speculators_draft, tiny_llama

LAYERS = 8  # default triple 2, 4, 5; the tiny drafts are declared with 0, 3, 4
LENGTHS = (60, 52, 47, 41)
OTHERS = {"fc_norm_ignored": "input_norm", "layer_lost": "two", "rope_scaling_dropped": "scaled"}


@cache
def tiny_case(kind: str = "plain", copy: int = 0) -> Case:
    """Random draft, live target, four texts recaptured at every tap; equal for every `copy`."""
    rng = torch.Generator().manual_seed(4)
    options = {
        "plain": {"rope": {"rope_type": "default", "rope_theta": 50000.0}},
        "input_norm": {"norm_before_fc": True},
        "two": {"layers": 2},
        "scaled": {"rope": {
            "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 32,
        }},
    }[kind]  # fmt: skip
    model = tiny_llama(layers=LAYERS)
    with TemporaryDirectory() as scratch:
        folder = Path(scratch)
        speculators_draft(**options).save_pretrained(folder / "draft")
        draft = load_draft(folder / "draft")
        captures = []
        for i, length in enumerate(LENGTHS):
            ids = torch.randint(0, VOCAB, (length,), generator=rng)
            found = record_states(model, ids[None], [Tap(k) for k in range(LAYERS + 1)])
            states = {t: x[0].clone() for t, x in found.items()}
            path = folder / f"capture_{i}.safetensors"
            save_capture(
                path, token_ids=ids, loss_mask=torch.arange(length) >= 9, states=states,
                final=states[Tap(LAYERS)].clone(), final_kind="pre_norm",
            )  # fmt: skip
            capture = open_capture(path)
            read = {name: x() for name, x in capture.readers.items()}  # the files go
            readers = {name: (lambda x=x: x) for name, x in read.items()}
            captures.append(replace(capture, path=Path(path.name), readers=readers))
    weights = model.state_dict()
    head = TargetHead(
        Path("toy"), draft.embed, weights["model.norm.weight"], weights["lm_head.weight"], 1e-5, LAYERS,
        {"rope_parameters": {"rope_theta": 10000.0}},
    )  # fmt: skip
    return Case(replace(draft, path=Path("toy")), tuple(captures), head, LiveTarget(model))


@pytest.fixture(scope="module", params=["plain", "input_norm", "two", "scaled"])
def any_case(request) -> Case:
    return tiny_case(request.param)


@pytest.fixture(scope="module")
def case() -> Case:
    return tiny_case()


@pytest.fixture(scope="module")
def sample() -> Case:
    head = samples.target_head()
    draft = samples.draft("a", head)
    draft = replace(draft, contract=draft.contract.change(taps=samples.TRAINED_TAPS["a"]))
    return Case(draft, tuple(samples.captures(2)), head)


def seeded(seed: int = 1) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def same(a, b) -> bool:
    """Equality of anything in a case; NaN equals NaN, dtypes count."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.nan_to_num(7), b.nan_to_num(7))
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if is_dataclass(a) and type(a) is type(b) and not isinstance(a, Tap | Stored):
        return all(same(getattr(a, f.name), getattr(b, f.name)) for f in fields(a))
    return type(a) is type(b) and a == b


def changed(before: Case, after: Case) -> set[str]:
    """Names of what differs, down to fields of the contract, of layers, and single states."""
    found = {f"case.{n}" for n in ("live", "unread", "served") if getattr(before, n) is not getattr(after, n)}
    found |= _fields("head", before.head, after.head)
    found |= _fields("draft", before.draft, after.draft, without=("contract", "layers", "config"))
    found |= _fields("contract", before.draft.contract, after.draft.contract, without=("sources",))
    config, layer = before.draft.config, "transformer_layer_config"
    for key in config:
        inner = config[key].keys() if key == layer else [None]
        for k in inner:
            a, b = ((c.draft.config[key][k] if k else c.draft.config[key]) for c in (before, after))
            found |= {f"config.{k or key}"} if a != b else set()
    for old, new in zip(before.draft.layers, after.draft.layers, strict=False):
        found |= _fields("layer", old, new)
    if len(before.draft.layers) != len(after.draft.layers):
        found.add("draft.layers")
    if len(before.captures) != len(after.captures):
        found.add("case.captures")
    for old, new in zip(before.captures, after.captures, strict=False):
        found |= _fields("capture", old, new, without=("readers",))
        names = old.readers.keys() | new.readers.keys()
        shared = old.readers.keys() & new.readers.keys()
        found |= {"stored"} if names != shared else set()
        found |= {f"state.{n}" for n in shared if not same(old.readers[n](), new.readers[n]())}
    return found


def _fields(name: str, a, b, without: tuple[str, ...] = ()) -> set[str]:
    names = [f.name for f in fields(a) if f.name not in without]
    return {f"{name}.{n}" for n in names if not same(getattr(a, n), getattr(b, n))}


STATES = {f"state.{t}" for t in (*map(Tap, range(LAYERS + 1)), FINAL)}
USED = {f"state.{t}" for t in (Tap(0), Tap(3), Tap(4))}
TAPS = {"contract.taps", "config.eagle_aux_hidden_state_layer_ids"}
ROPE = {"contract.rope", "config.rope_parameters"}
NEW_TEXT = {"capture.token_ids", *STATES}
LAYER = {f"layer.{n}" for n in ("q", "k", "v", "o", "gate", "up", "down")}
LAYER_NORMS = {"layer.input_layernorm", "layer.hidden_norm", "layer.post_attention_layernorm"}
# What each plant may change: all of it; or, in a list, exactly one of it.
EXPECTED: dict[str, set[str] | list[str]] = {
    "incident_slice": TAPS, "taps_plus_one": TAPS, "taps_minus_one": TAPS, "default_triple": TAPS,
    "first_states": TAPS, "slot_order": TAPS, "slot_duplicated": TAPS, "slot_zero": sorted(USED),
    "fc_bypassed": {"contract.use_fc"}, "token_shift_0": {"contract.token_shift"},
    "token_shift_2": {"contract.token_shift"},
    "norm_before_residual": {"contract.norm_before_residual", "config.norm_before_residual"},
    "feedback": {"contract.feedback", "config.norm_output"}, "head_unnormed": {"contract.head_norm"},
    "fc_norm_ignored": {"contract.fc_input_norm"}, "hidden_norm_lost": {"layer.hidden_norm"},
    "norm_ones": ["draft.norm", *sorted(LAYER_NORMS)],
    "rope_theta_default": {"contract.rope"}, "rope_theta": ROPE, "rope_linear": ROPE, "rope_llama3": ROPE,
    "rope_yarn": ROPE, "rope_scaling_dropped": ROPE, "rope_interleaved": {"contract.rope"},
    "max_position": {"contract.max_position", "config.max_position_embeddings"},
    "position_step_0": {"contract.position_step"}, "position_step_2": {"contract.position_step"},
    "map_identity": {"contract.vocab_map"}, "map_absolute": {"contract.vocab_map"},
    "d2t_absolute": {"draft.d2t"}, "d2t_arange": {"draft.d2t"}, "d2t_zeros": {"draft.d2t"},
    "d2t_permuted": {"draft.d2t"}, "d2t_stale": {"draft.d2t", "draft.t2d"},
    "embed_random": {"draft.embed"}, "lm_head_overwritten": {"draft.lm_head"},
    "layer_unloaded": LAYER | LAYER_NORMS, "layer_lost": {"draft.layers"},
    "weights_nonfinite": {"layer.down"},
    "states_rotated": STATES, "rows_shifted": STATES, "files_swapped": STATES, "fp16_overflow": sorted(USED),
    "final_early": {"state.final"}, "final_is_slot": {"state.final"},
    "final_unnormed": {"capture.final_kind"}, "final_normed_twice": {"state.final"},
    "mask_ones": {"capture.loss_mask"}, "mask_shifted": {"capture.loss_mask"},
    "mask_empty": {"capture.loss_mask"}, "text_shuffled": NEW_TEXT,
    "text_of_others": NEW_TEXT | {"capture.loss_mask"}, "ids_beyond": {"capture.token_ids"},
    "engine_loses": {"case.served"}, "engine_all_or_nothing": {"case.served"},
    "control_offset": {"contract.position_offset"},
    "control_zero_map": {"draft.lm_head", "draft.d2t", "draft.t2d", "config.draft_vocab_size"},
    "control_target_theta": {"head.config"}, "control_weak": {"layer.gate", "layer.up", "layer.down"},
    "control_embed_scale": {"contract.embed_scale"}, "control_bf16": STATES, "control_fp8": LAYER,
    "control_unused_taps": {"capture.taps", "stored"}, "control_few": {"case.captures"},
}  # fmt: skip
SAMPLES_ONLY = {"inner_targets", "control_other_draft"}


def test_counts_and_keys() -> None:
    healthy = [f for f in FAULTS.values() if f.healthy]
    assert len(FAULTS) - len(healthy) >= 30 and len(healthy) >= 6
    assert sum(f.served for f in FAULTS.values()) >= 12
    assert set(EXPECTED) | SAMPLES_ONLY == set(FAULTS), "every entry has its row here"


@pytest.mark.parametrize("key", FAULTS)
def test_texts_are_complete(key: str) -> None:
    fault = FAULTS[key]
    assert fault.key == key and fault.part in get_args(Part)
    assert fault.sighting.startswith("https://") and " " not in fault.sighting
    assert fault.number is None or 1 <= fault.number <= 40, "rows of the reference's table"
    for text in (fault.title, fault.signature, fault.symptom, fault.change):
        assert text == text.strip() and text
    told = fault.change.format(before="BEFORE", after="AFTER")
    assert "BEFORE" in told and "AFTER" in told and told.endswith(".")
    assert fault.title.startswith("healthy:") == fault.healthy
    assert set(fault.needs) <= set(NEEDS)
    assert not set(fault.shown_by) & set(fault.hidden_by), "a metric cannot do both"


def test_predictions_are_bounds_on_numbers_that_effects_have() -> None:
    empty = zoo.Effect()
    for fault in FAULTS.values():
        assert len({b.number for b in fault.predicted}) == len(fault.predicted), f"{fault.key}: bounded twice"
        for bound in fault.predicted:
            assert bound.low <= bound.high and bound.says == bound.says.strip() and bound.says
            if bound.error:
                assert issubclass(getattr(errors, bound.error), errors.WorkbookError)
            else:
                assert (bound.against, bound.low, bound.high) in WORDS.values(), "numbers come from words"
                assert math.isnan(zoo.number(empty, bound.number)), bound.number
    assert sum(bool(f.predicted) for f in FAULTS.values()) >= 40


def test_healthy_controls_are_predicted_to_be_harmless() -> None:
    """A weak draft is the exception: lower, and nothing wrong."""
    for fault in FAULTS.values():
        if fault.healthy and fault.key != "control_weak":
            words = {(b.against, b.low, b.high) for b in fault.predicted}
            assert words <= {WORDS["no effect"]}, fault.key


def fitting(key: str, copy: int = 0) -> Case:
    return tiny_case(OTHERS.get(key, "plain"), copy)


@pytest.mark.parametrize("key", EXPECTED)
def test_plant_changes_what_it_says_and_nothing_else(key: str) -> None:
    fault, before = FAULTS[key], fitting(key)
    found = changed(before, fault.plant(before, seeded()))
    expected = EXPECTED[key]
    if isinstance(expected, list):
        assert len(found) == 1 and found <= set(expected), found
    else:
        assert found == expected
    left = changed(fitting(key, copy=1), before) - {"case.live"}
    assert not left, f"the original case was touched: {left}"


@pytest.mark.parametrize("key", EXPECTED)
def test_plant_is_reproducible_by_seed(key: str) -> None:
    before = fitting(key)
    one, two = (FAULTS[key].plant(before, seeded(9)) for _ in range(2))
    assert changed(one, two) - {"case.served"} == set()
    assert one.served == two.served


@pytest.mark.parametrize(
    "key",
    ["slot_order", "slot_duplicated", "d2t_permuted", "d2t_stale", "rope_theta", "rope_yarn", "max_position",
     "rows_shifted", "files_swapped", "text_shuffled", "control_offset", "norm_ones", "embed_random"],
)  # fmt: skip
def test_severity_is_drawn(case: Case, key: str) -> None:
    plants = [FAULTS[key].plant(case, seeded(i)) for i in range(8)]
    assert any(changed(plants[0], p) for p in plants[1:])


def test_needs_are_checked_and_named(any_case: Case) -> None:
    """What does not fit raises the typed error; what fits is planted."""
    for key, fault in FAULTS.items():
        if key in SAMPLES_ONLY or fault.lacking(any_case):
            with pytest.raises(ContractError, match=f"fault {key}.*What to do"):
                fault.plant(any_case, seeded())
        else:
            assert isinstance(fault.plant(any_case, seeded()), Case)
    bare = Case(any_case.draft, any_case.captures[:1])
    assert {"live", "head", "two texts"} <= {
        need for f in FAULTS.values() for need in f.needs if not NEEDS[need][1](bare)
    }


# ---- values ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "taps"),
    [
        ("incident_slice", (3, 4, 6)),
        ("taps_plus_one", (1, 4, 5)),
        ("taps_minus_one", (0, 2, 3)),
        ("default_triple", (2, 4, 5)),
        ("first_states", (0, 1, 2)),
    ],
)
def test_taps(case: Case, key: str, taps: tuple[int, ...]) -> None:
    assert FAULTS[key].plant(case, seeded()).draft.contract.taps == tuple(map(Tap, taps))


def test_a_planted_field_does_not_say_so(case: Case) -> None:
    """The source of a planted field is the file, like that of any other."""
    for key in ("incident_slice", "feedback", "rope_theta", "control_offset"):
        contract = FAULTS[key].plant(case, seeded()).draft.contract
        origins = {contract.source(f.name).origin for f in fields(Contract)}
        assert origins <= {"checkpoint", "framework default"}, key


@pytest.mark.parametrize("seed", range(6))
def test_slot_order_and_duplicate(case: Case, seed: int) -> None:
    taps = case.draft.contract.taps
    order = FAULTS["slot_order"].plant(case, seeded(seed)).draft.contract.taps
    assert set(order) == set(taps) and order != taps
    twice = FAULTS["slot_duplicated"].plant(case, seeded(seed)).draft.contract.taps
    assert len(set(twice)) == 2 and sum(a != b for a, b in zip(taps, twice, strict=True)) == 1


def test_maps(case: Case) -> None:
    draft, at = case.draft, torch.arange(case.draft.draft_vocab)
    ids = draft.to_target(at)
    planted = {k: FAULTS[k].plant(case, seeded()).draft for k in FAULTS if k.startswith("d2t_")}
    assert torch.equal(planted["d2t_absolute"].d2t, ids)
    assert torch.equal(planted["d2t_arange"].d2t, at) and not planted["d2t_zeros"].d2t.any()
    permuted = planted["d2t_permuted"].to_target(at)
    assert torch.equal(permuted.sort().values, ids.sort().values) and not torch.equal(permuted, ids)
    stale = planted["d2t_stale"].to_target(at)
    shared = len(set(stale.tolist()) & set(ids.tolist())) / len(ids)
    assert (stale.diff() > 0).all() and 0.25 < shared < 0.75
    assert torch.equal(planted["d2t_stale"].t2d.nonzero().flatten(), stale), "t2d is of the same stale run"


def test_rows_shifted_are_a_block_later(case: Case) -> None:
    after = FAULTS["rows_shifted"].plant(case, seeded())
    moved = 0
    for old, new in zip(case.captures, after.captures, strict=True):
        a, b = old.state(Tap(3)), new.state(Tap(3))
        rows = (a != b).any(-1).nonzero().flatten()
        if not len(rows):
            continue
        moved, start = moved + 1, int(rows[0])
        assert start % BLOCK == 0 and start > 0
        assert torch.equal(b[start : len(a) - BLOCK], a[start + BLOCK :])
        assert torch.equal(old.token_ids, new.token_ids) and len(a) == len(b)
    assert moved


def test_swapped_files_hold_another_files_states(case: Case) -> None:
    after = FAULTS["files_swapped"].plant(case, seeded())
    firsts = [c.state(Tap(3))[:9] for c in case.captures]
    owners = [
        next(i for i, old in enumerate(firsts) if torch.equal(new.state(Tap(3))[:9], old))
        for new in after.captures
    ]
    assert sorted(owners) == list(range(len(LENGTHS))) and sum(i != o for i, o in enumerate(owners)) >= 2


def test_rotation_keeps_norms_and_loses_direction(case: Case) -> None:
    after = FAULTS["states_rotated"].plant(case, seeded())
    a, b = case.captures[0].state(Tap(4)), after.captures[0].state(Tap(4))
    assert torch.allclose(a.norm(dim=-1), b.norm(dim=-1), rtol=1e-4)
    cosine = torch.nn.functional.cosine_similarity(a, b, dim=-1)
    assert cosine.abs().mean() < 4 / HIDDEN**0.5


def test_replaced_texts_carry_their_own_states(case: Case) -> None:
    model = case.live.model
    for key in ("text_shuffled", "text_of_others"):
        new = FAULTS[key].plant(case, seeded()).captures[1]
        wanted = record_states(model, new.token_ids[None], [Tap(4), Tap(LAYERS)])
        assert torch.equal(new.state(Tap(4)), wanted[Tap(4)][0]), key
        assert torch.equal(new.final(), wanted[Tap(LAYERS)][0]), key
        assert torch.equal(new.token_ids[:9], case.captures[1].token_ids[:9]), "the prompt stays"


def test_engine_counters(case: Case) -> None:
    fewer = FAULTS["engine_loses"].plant(case, seeded()).served
    assert 1 <= fewer.tokens_per_round and list(fewer.accepted_at) == sorted(fewer.accepted_at)[::-1]
    bounds = {
        FAULTS["engine_all_or_nothing"].plant(case, seeded(i)).served.tokens_per_round for i in range(8)
    }
    assert bounds == {1.0, 6.0}


# ---- controls ------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["control_offset", "control_target_theta", "control_unused_taps"])
def test_exact_controls_change_no_prediction(case: Case, key: str) -> None:
    after = FAULTS[key].plant(case, seeded())
    assert torch.equal(_ids(case), _ids(after))


@pytest.mark.parametrize(
    ("key", "agree"), [("control_embed_scale", 0.99), ("control_bf16", 0.98), ("control_offset", 0.995)]
)
def test_controls_on_the_samples(sample: Case, key: str, agree: float) -> None:
    after = FAULTS[key].plant(sample, seeded())
    a, b = _ids(sample), _ids(after)
    assert (a == b).float().mean() >= agree


def test_full_vocabulary_with_zero_map_says_the_same(sample: Case) -> None:
    """One text: lm_head has 49,152 rows here."""
    one = replace(sample, captures=sample.captures[:1])
    after = FAULTS["control_zero_map"].plant(one, seeded())
    assert after.draft.draft_vocab == after.draft.target_vocab and not after.draft.d2t.any()
    assert torch.equal(_ids(one, 1), _ids(after, 1))


def test_sample_drafts_are_planted_with_their_own_wiring(sample: Case) -> None:
    for key, letter in (("inner_targets", "c"), ("control_other_draft", "b")):
        after = FAULTS[key].plant(sample, seeded())
        assert after.draft.name == samples.DRAFTS[letter]
        assert after.draft.contract.taps == samples.TRAINED_TAPS[letter]
        assert after.captures is sample.captures


def _ids(case: Case, depths: int = 3) -> Tensor:
    return DraftForward(case.draft).predict(case.captures, depths=depths).target_ids
