"""The contract as a value: it cannot change under you, and it says who decided what."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, fields

import pytest

from lib.contract import Contract, Rope, Source, diff
from lib.errors import ContractError
from lib.taps import Stored, Tap

TRAINED = Contract(
    taps=("embed", "layer3", "layer31"),
    sources={
        "taps": Source("checkpoint", "config.json: eagle_aux_hidden_state_layer_ids"),
        "rope": Source("inferred"),
    },
)


def test_taps_are_values_whatever_they_were_written_as():
    """Names, numbers and taps are one thing inside the contract."""
    assert Contract(taps=("embed", 3, Stored(2))).taps == (Tap(0), Tap(3), Stored(2))


@pytest.mark.parametrize("name", [f.name for f in fields(Contract)])
def test_no_field_can_be_assigned(name):
    """A result carries its contract; the contract must still be the one that was used."""
    with pytest.raises(FrozenInstanceError):
        setattr(TRAINED, name, None)


def test_sources_cannot_be_edited_and_are_not_shared():
    """Neither through the contract nor through the dict it was made from."""
    given = {"taps": Source("user")}
    contract = Contract(taps=("embed",), sources=given)
    given["rope"] = Source("user")
    assert set(contract.sources) == {"taps"}
    with pytest.raises(TypeError):
        contract.sources["rope"] = Source("user")


def test_every_field_says_who_decided_it():
    """Checkpoint, inference, or a default that nobody chose; one row per field."""
    rows = {row["field"]: row for row in TRAINED.rows()}
    assert set(rows) == {f.name for f in fields(Contract)} - {"sources"}
    assert rows["taps"] == {
        "field": "taps",
        "value": "(embed, layer3, layer31)",
        "from": "checkpoint (config.json: eagle_aux_hidden_state_layer_ids)",
    }
    assert rows["rope"]["from"] == "inferred"
    assert rows["token_shift"]["from"] == "framework default (EAGLE-3 as published)"


def test_change_records_the_user_and_leaves_the_original():
    """The changed field is the user's, the others keep their source."""
    served = TRAINED.change("what the engine does", taps=("layer3", "layer31", "layer59"))
    assert str(served.source("taps")) == "user (what the engine does)"
    assert served.source("rope") == TRAINED.source("rope")
    assert TRAINED.taps[0] == Tap(0)
    assert TRAINED.source("taps").origin == "checkpoint"


def test_change_can_name_another_source():
    """A probe that finds a value records evidence, not the user's will."""
    found = TRAINED.change(Source("inferred", "norms fit layer3"), token_shift=0)
    assert str(found.source("token_shift")) == "inferred (norms fit layer3)"


def test_contracts_compare_by_what_they_say_not_by_who_said_it():
    """The same interface from two origins is the same interface; usable as a dict key."""
    same = Contract(taps=(0, 3, 31))
    assert same == TRAINED
    assert {same: 1}[TRAINED] == 1


def test_diff_of_one_slot_is_one_readable_line():
    """Exactly the words of the incident's account."""
    served = TRAINED.change(taps=("layer3", "layer3", "layer31"))
    assert diff(TRAINED, served) == ["slot 0: embed -> layer3"]
    assert diff(TRAINED, TRAINED) == []


def test_diff_of_the_incident():
    """`[:-1]` against `[1:]` moves every slot."""
    served = TRAINED.change(taps=("layer3", "layer31", "layer59"))
    assert diff(TRAINED, served) == [
        "slot 0: embed -> layer3",
        "slot 1: layer3 -> layer31",
        "slot 2: layer31 -> layer59",
    ]


def test_diff_names_counts_flags_and_rope():
    """A lost slot is said first; rotary settings stay on one line."""
    other = TRAINED.change(
        taps=("embed", "layer3"),
        feedback="post_norm",
        rope=Rope(theta=5e5, kind="linear", params=(("factor", 4.0),)),
    )
    assert diff(TRAINED, other) == [
        "slots: 3 -> 2",
        "feedback: pre_norm -> post_norm",
        "rope: default theta=10000 -> linear theta=500000 factor=4",
    ]


@pytest.mark.parametrize(
    "bad, message",
    [
        ({"fc_input_norm": "rms"}, r"fc_input_norm: expected one of \('none', 'input_norm', 'fc_norm'\)"),
        ({"feedback": "normed"}, r"feedback: expected one of .* found 'normed'"),
        ({"vocab_map": "relative"}, r"vocab_map: expected one of .* found 'relative'"),
        ({"taps": ()}, r"taps: expected at least one tap, found none"),
        ({"taps": ("layer 3",)}, r"expected 'embed', 'layerK', 'storedI' or 'normed', found 'layer 3'"),
        ({"taps": (-1,)}, r"after_block: expected a whole number from 0, found -1"),
        ({"sources": {"tap": Source("user")}}, r"sources: expected names of contract fields.*\['tap'\]"),
    ],
)
def test_bad_values_are_refused_when_made_and_when_changed(bad, message):
    """A contract that exists is a contract that makes sense."""
    with pytest.raises(ContractError, match=message):
        Contract(**{"taps": ("embed",), **bad})
    if "sources" not in bad:
        with pytest.raises(ContractError, match=message):
            TRAINED.change(**bad)
