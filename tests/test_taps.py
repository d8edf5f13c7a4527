"""One state, many spellings: every framework's layer ids, and `Tap` against the live model."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lib.errors import ContractError, TargetError
from lib.taps import CONVENTIONS, Normed, Stored, Tap, default_ids, hypotheses, parse_tap, taps_from_ids
from lib.target import record_states
from tests.support import tiny_llama

BLOCKS = 6

# What is written in a config, and the state that is physically captured (formats A.0). n = 61 is the
# incident's target; its triples are (2, 30, 58) on paper and (3, 31, 59) in the trainer's files.
READINGS = [
    # framework, n, written ids, boundaries captured
    ("eagle", 61, [2, 30, 58], [2, 30, 58]),
    ("vllm", 61, [2, 30, 58], [2, 30, 58]),
    ("vllm", 61, [0, 3, 31, 59, 61], [0, 3, 31, 59, 61]),  # 0 is the embedding, n the last block
    ("speculators", 61, [2, 30, 58], [2, 30, 58]),
    ("speculators-legacy", 61, [2, 30, 58, 60], [3, 31, 59, 61]),
    ("sglang", 61, [1, 29, 57], [2, 30, 58]),
    ("sglang", 61, [2, 30, 58], [3, 31, 59]),
    ("sglang-25454", 61, [1, 29, 57], [2, 30, 58]),
    ("sglang-25454", 61, [2, 30, 58], [2, 30, 58]),
    ("sglang-25454", 61, [0, 30, 58], [0, 30, 58]),
    ("sglang-gpt-oss", 36, [24, 30, 36], [24, 30, 36]),  # nvidia/gpt-oss-120b-Eagle3-v3
    ("sglang-deepseek-v4", 61, [2, 30, 58], [3, 31, 59]),
    ("specforge", 61, [1, 29, 57], [2, 30, 58]),
    ("modelopt", 61, [1, 29, 57], [2, 30, 58]),
    ("modelopt-hf-dump-old", 61, [2, 30, 58], [2, 30, 58]),
    ("modelopt-hf-dump", 61, [1, 29, 57], [2, 30, 58]),
    ("modelopt-vllm-dump", 61, [1, 29, 57], [1, 29, 57]),  # one block earlier than the HF dump
    ("torchspec", 61, [2, 30, 58], [3, 31, 59]),
    ("dflash", 61, [1, 29, 57], [2, 30, 58]),
]

DEFAULTS = {
    "eagle": [2, 30, 58],
    "vllm": [2, 30, 58],
    "speculators": [2, 30, 58],
    "speculators-legacy": [3, 31, 59, 61],
    "sglang": [2, 30, 58],
    "specforge": [2, 30, 58],
    "modelopt": [2, 30, 58],
    "modelopt-hf-dump-old": [2, 30, 58],
    "modelopt-hf-dump": [2, 30, 58],
    "modelopt-vllm-dump": [1, 29, 57],
}


@pytest.mark.parametrize("framework, n, written, boundaries", READINGS)
def test_written_ids_land_on_the_stated_boundary(framework, n, written, boundaries):
    """The same list is a different set of states in different frameworks."""
    assert taps_from_ids(written, framework, n) == tuple(map(Tap, boundaries))


def test_every_convention_has_a_row():
    """A convention added to the table without its boundary being stated here fails."""
    assert {row[0] for row in READINGS} == set(CONVENTIONS)


@pytest.mark.parametrize("framework", DEFAULTS)
def test_default_of_each_framework(framework):
    """When no ids are written, what is captured still depends on who reads the config."""
    ids = default_ids(framework, 61)
    assert taps_from_ids(ids, framework, 61) == tuple(map(Tap, DEFAULTS[framework]))


def test_no_default_where_ids_are_demanded():
    """Explicit-only frameworks get no invented triple."""
    assert default_ids("sglang-deepseek-v4", 61) is None


def test_modelopt_loses_a_slot_on_tiny_models():
    """Its default is a set: at n = 4 the ids 1, 1, 0 are two, not three."""
    assert default_ids("modelopt", 4) == [0, 1]
    assert default_ids("specforge", 8) == [1, 3, 4]


def test_the_incident_in_taps():
    """One list in the config, three readings, and only one of them is in the trainer's files."""
    ids = [2, 30, 58]
    trainer = taps_from_ids([*ids, 60], "speculators-legacy", 61)
    assert [str(t) for t in trainer] == ["layer3", "layer31", "layer59", "layer61"]
    assert taps_from_ids(ids, "vllm", 61) != trainer[:3]
    assert taps_from_ids(ids, "sglang", 61) == trainer[:3]


@pytest.mark.parametrize(
    "ids, n, readings",
    [
        ([2, 30, 58], 61, [(2, 30, 58), (3, 31, 59)]),  # as is == default triple
        ([1, 29, 57], 61, [(1, 29, 57), (2, 30, 58)]),  # + 1 == default triple
        ([1, 17, 32], 36, [(1, 17, 32), (2, 18, 33)]),  # gpt-oss, long context
        ([24, 30, 36], 36, [(24, 30, 36), (2, 18, 33)]),  # + 1 would leave the model
        ([5, 20, 40], 61, [(5, 20, 40), (6, 21, 41), (2, 30, 58)]),
        (None, 61, [(2, 30, 58)]),
    ],
)
def test_ids_of_unknown_origin_give_every_reading(ids, n, readings):
    """Not one guess: all readings that stay inside the model, each once."""
    found = hypotheses(ids, n)
    assert list(found.values()) == [tuple(map(Tap, r)) for r in readings]
    assert len(set(found)) == len(readings), "every reading says why"


@pytest.mark.parametrize("framework", CONVENTIONS)
@pytest.mark.parametrize("bad", [[-1], [62], [2, 1000, 3], ["2"], [None]])
def test_ids_outside_the_model_are_refused(framework, bad):
    """-1 would silently mean "the last layer", 62 of 61 nothing at all."""
    with pytest.raises(ContractError, match=r"eagle_aux_hidden_state_layer_ids: expected ids that land"):
        taps_from_ids(bad, framework, 61)


def test_last_block_output_is_reachable_but_not_more():
    """Id 60 is the last layer of 61; under + 1 it is Tap(61), and 61 is one too many."""
    assert taps_from_ids([60], "sglang", 61) == (Tap(61),)
    with pytest.raises(ContractError, match=r"taps 0\.\.61 \(sglang: id \+ 1\), found 61"):
        taps_from_ids([61], "sglang", 61)


def test_unknown_framework_is_refused():
    """The message lists the known ones and points at hypotheses()."""
    with pytest.raises(ContractError, match=r"one of \['dflash'.*found 'sgl'.*hypotheses\(\)"):
        taps_from_ids([1], "sgl", 61)


@given(st.builds(Tap, st.integers(0, 10**6)) | st.builds(Stored, st.integers(0, 10**6)) | st.builds(Normed))
def test_name_and_value_round_trip(tap):
    """str() and parse_tap() are inverse, so names in files and tables are safe."""
    assert parse_tap(str(tap)) == parse_tap(tap) == tap


@pytest.mark.parametrize("text, tap", [("embed", Tap(0)), (0, Tap(0)), (31, Tap(31)), ("layer0", Tap(0))])
def test_parse_accepts_boundary_numbers(text, tap):
    """A bare number is a boundary; `layer0` is the embedding's longer name."""
    assert parse_tap(text) == tap


@pytest.mark.parametrize("text", ["layer", "layer-1", "layer 3", "block3", "", -1, 2.0, None])
def test_parse_refuses_the_rest(text):
    """One typed error, whatever the type of the nonsense."""
    with pytest.raises(ContractError):
        parse_tap(text)


@pytest.fixture(scope="module")
def live():
    """A tiny target, some tokens, transformers' own states, and ours at every tap."""
    model = tiny_llama(layers=BLOCKS)
    ids = torch.randint(0, 97, (2, 11), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        states = model.model(input_ids=ids, output_hidden_states=True).hidden_states
    return model, ids, states, record_states(model, ids, [Tap(k) for k in range(BLOCKS + 1)])


@pytest.mark.parametrize("k", range(BLOCKS))
def test_tap_is_transformers_hidden_state(live, k):
    """Tap(k) is hidden_states[k], bit for bit, for every k below the number of blocks."""
    _, _, states, taps = live
    assert torch.equal(taps[Tap(k)], states[Tap(k).hf_index])


def test_last_tap_is_before_the_final_norm(live):
    """hidden_states[n] is norm(Tap(n)), not Tap(n): the two must never be swapped."""
    model, _, states, taps = live
    last = taps[Tap(BLOCKS)]
    with torch.no_grad():
        assert torch.equal(model.model.norm(last), states[BLOCKS])
    assert (last - states[BLOCKS]).abs().max() > 0.1 * last.abs().max()


def hooks_on(model) -> int:
    return sum(len(module._forward_hooks) for module in model.modules())


def test_hooks_are_removed_even_when_the_forward_raises(live):
    """A failed forward pass must not leave the model slower and stranger than before."""
    model, ids, _, _ = live
    before = hooks_on(model)
    record_states(model, ids, [Tap(0), Tap(3)])
    assert hooks_on(model) == before
    with pytest.raises(IndexError):
        record_states(model, torch.full((1, 4), 10**6), [Tap(0), Tap(3)])  # no such token
    assert hooks_on(model) == before


def test_tap_beyond_the_model_is_refused(live):
    """Refused before any hook is set."""
    model, ids, _, _ = live
    before = hooks_on(model)  # transformers has some of its own
    with pytest.raises(TargetError, match=r"expected taps up to layer6, found \['layer7'\]"):
        record_states(model, ids, [Tap(2), Tap(BLOCKS + 1)])
    assert hooks_on(model) == before
