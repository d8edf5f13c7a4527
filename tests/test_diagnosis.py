"""The verdicts: the incident, faults alone and in pairs, healthy controls, and what cannot be told."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from lib import samples
from lib.candidates import Candidate
from lib.case import Case, Finding, Served
from lib.contract import Rope
from lib.diagnosis import MIN_TEXTS, _Peel, diagnose, kind_of, settle_names, table
from lib.draft import DraftForward
from lib.faults import FAULTS
from lib.probes import View
from lib.taps import Tap
from lib.worth import Worth
from tests.support import self_written

TAPS = (Tap(0), Tap(3), Tap(4), Tap(6))
TRUE = {"taps": (Tap(4), Tap(0), Tap(6)), "norm_before_residual": True, "head_norm": False}
LENGTH, TEXTS = 40, 12


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Case:
    """A tiny draft and texts that it wrote itself under one contract; head and target unknown."""
    draft, captures = self_written(tmp_path_factory.mktemp("tiny"), TAPS, TRUE, length=LENGTH, texts=TEXTS)
    return Case(draft, tuple(captures))


@pytest.fixture(scope="module")
def real() -> Case:
    """Sample draft (a) under its true contract, eight conversations."""
    head = samples.target_head()
    draft = samples.draft("a", head)
    draft = replace(draft, contract=draft.contract.change(taps=samples.TRAINED_TAPS["a"]))
    return Case(draft, tuple(samples.captures(8)), head)


def declared(case: Case, **changes) -> Case:
    """The case with another declared contract."""
    return replace(case, draft=replace(case.draft, contract=case.draft.contract.change(**changes)))


def plant(case: Case, *keys: str) -> Case:
    """The case with these faults of the zoo in it."""
    for key in keys:
        case = FAULTS[key].plant(case, torch.Generator().manual_seed(3))
    return case


def test_a_draft_under_its_own_contract_is_healthy(tiny):
    """Silent, with what was tried and what could not run."""
    d = diagnose(tiny)
    assert (d.verdict, d.findings) == ("healthy", ())
    assert d.numbers["tried"] > 30 and d.numbers["conversations"] == TEXTS
    assert "100.0 % in-vocab accuracy" in d.because and "text" in d.not_run
    assert table(d).empty


@pytest.mark.parametrize(
    "changes, kinds",
    [
        ({"token_shift": 0}, ["token_shift_0"]),
        ({"vocab_map": "identity"}, ["map_identity"]),
        ({"use_fc": False}, ["fc_bypassed"]),
        ({"taps": (Tap(0), Tap(4), Tap(6))}, ["slot_order"]),
        ({"taps": (Tap(4), Tap(4), Tap(6))}, ["slot_duplicated"]),
        ({"taps": (Tap(0), Tap(6), Tap(3))}, ["incident_slice"]),
        ({"rope": Rope(theta=1e4, interleaved=True)}, ["rope_interleaved"]),
        ({"max_position": 9}, ["max_position"]),
        ({"vocab_map": "identity", "norm_before_residual": False}, ["map_identity", "norm_before_residual"]),
        ({"use_fc": False, "token_shift": 2}, ["fc_bypassed", "token_shift_2"]),
        ({"taps": (Tap(0), Tap(4), Tap(6)), "vocab_map": "absolute"}, ["map_absolute", "slot_order"]),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, list) else "",
)
def test_faults_alone_and_in_pairs(tiny, changes, kinds):
    """Each fault by name and nothing else, whichever hides which; the fix is the true contract."""
    d = diagnose(declared(tiny, **changes))
    assert d.verdict == "fault" and sorted(d.names()) == sorted(kinds)
    assert d.findings[0].fix == tiny.draft.contract and d.numbers["after"].accuracy == 1
    for finding in d.findings:
        assert finding.p_value < 0.05 and finding.accuracy is not None
    assert d.numbers["before"].hits < d.numbers["after"].hits
    assert len(table(d)) == len(kinds) and "tokens a round" in d.because


def test_a_file_fault_seen_twice_is_one_finding(tiny):
    """d2t zeros: the probe suspects it, the search confirms the rebuilt map, the report has it once."""
    zeros = torch.zeros_like(tiny.draft.d2t)
    (finding,) = diagnose(replace(tiny, draft=replace(tiny.draft, d2t=zeros))).findings
    assert finding.kind == "d2t_zeros" and finding.by == "map and search"
    assert torch.equal(finding.fix.d2t, tiny.draft.d2t.long()) and "rebuilt from t2d" in finding.after


def test_few_conversations_cannot_tell(tiny):
    """Three texts: no accusation, no acquittal; an exact finding stands all the same."""
    few = replace(tiny, captures=tiny.captures[:3])
    d = diagnose(few)
    assert d.verdict == "cannot tell" and "3 conversations" in d.because
    ones = torch.ones_like(few.draft.norm)
    assert diagnose(replace(few, draft=replace(few.draft, norm=ones))).names() == ["norm_ones"]


def test_a_draft_that_predicts_nothing_is_not_called_healthy(tiny):
    """Texts of nobody: no contract explains them, and no health either."""
    rng = torch.Generator().manual_seed(1)
    texts = [
        replace(c, token_ids=torch.randint(0, 97, c.token_ids.shape, generator=rng)) for c in tiny.captures
    ]
    d = diagnose(replace(tiny, captures=tuple(texts)))
    assert d.verdict == "cannot tell" and "another model" in d.because


def test_states_that_cannot_be_read_are_the_finding(tiny):
    """Inf in every row of every file: named with the first file's own error; no search, no crash."""
    broken = tuple(c.with_state(Tap(4), lambda x: x + torch.inf) for c in tiny.captures)
    d = diagnose(replace(tiny, captures=broken))
    assert d.names() == ["fp16_overflow"] and "search" in d.not_run
    assert "NaN or Inf" in d.because


@pytest.mark.parametrize(
    "accepted, engine",
    [((0, 0, 0), "engine_all_or_nothing"), ((20, 5, 1), "engine_loses"), (None, "")],
)
def test_an_engine_that_accepts_less_than_the_draft_earns(real, accepted, engine):
    """Counters against rollouts: at the bound, below the interval, or as they should be."""
    from lib.acceptance import rollouts, walk
    from lib.diagnosis import engine_check

    if accepted is None:
        rounds = walk(rollouts(DraftForward(real.draft), real.captures[:8], depth=3), real.captures[:8])
        served = Served(len(rounds), rounds.accepted_at)
    else:
        served = Served(100, accepted)
    case = replace(real, served=served)
    found, line, finding = engine_check(case, _Peel(case, View(case), [], 0.05, 0))
    assert found == engine and "offline at depth 3" in line
    assert (finding.kind if finding else "") == engine


def test_an_engine_is_blamed_for_what_nothing_else_explains(tiny):
    """Alone it is the verdict; beside a fault, one more finding; what the fault explains is a remark."""
    from lib.acceptance import rollouts, walk

    served = replace(tiny, served=Served(100, (0, 0, 0)))
    d = diagnose(served)
    assert d.verdict == "look at the engine" and d.numbers["engine"] == "engine_all_or_nothing"
    assert not d.findings and d.because.startswith("Look at the engine")
    wrong = declared(served, use_fc=False)
    d = diagnose(wrong)
    assert d.verdict == "fault" and d.names() == ["fc_bypassed", "engine_all_or_nothing"]
    assert "offline at depth 3" in d.because
    rounds = walk(rollouts(DraftForward(wrong.draft), wrong.captures, depth=3), wrong.captures)
    d = diagnose(replace(wrong, served=Served(len(rounds), rounds.accepted_at)))
    assert d.names() == ["fc_bypassed"] and any("engine" in r for r in d.remarks)


@pytest.mark.parametrize("before, after, kept", [(0.01, 0.3, False), (0.01, 0.6, True), (0.1, 0.3, True)])
def test_beside_a_draft_in_ruins_nothing_else_is_accused(tiny, monkeypatch, before, after, kept):
    """An exact finding, a draft dead as declared and not alive after: what is less bad is a remark."""
    exact = Finding("hidden_norm_lost", "weights", "hidden_norm", "none", "its weight", ("it is missing",))
    less_bad = Finding("taps", "search", "taps", "(a)", "(b)", ("e",), 0.01, fix=tiny.draft.contract)
    peel = _Peel(tiny, View(tiny), [exact], 0.05, 0)
    peel.numbers["before"], peel.now = Worth(before, 100, 1.0, 8), Worth(after, 100, 1.2, 8)
    monkeypatch.setattr(peel, "_measured", lambda: [less_bad])
    found, remarks = peel.findings()
    assert [f.kind for f in found] == (["hidden_norm_lost", "taps"] if kept else ["hidden_norm_lost"])
    assert any("mend that first" in r for r in remarks) != kept


def test_names_of_unnamed_states():
    """The incident's own files: the first state is the embedding, the rest the declared taps in order."""
    head = samples.target_head()
    case = Case(samples.draft("a", head), tuple(samples.incident_captures(2)), head)
    named, (why,) = settle_names(case)
    assert named.captures[0].taps == samples.STORED_TAPS and "embedding" in why
    blind, (why,) = settle_names(replace(case, head=None))
    assert [str(t) for t in blind.draft.contract.taps] == ["stored1", "stored2", "stored3"]
    assert "nobody named" in why and settle_names(named) == (named, [])


@pytest.mark.parametrize(
    "before, after, kind",
    [
        ((3, 16, 28), (0, 3, 16), "incident_slice"),
        ((4, 17, 29), (3, 16, 28), "taps_plus_one"),
        ((2, 15, 27), (3, 16, 28), "taps_minus_one"),
        ((2, 15, 27), (0, 3, 16), "default_triple"),
        ((0, 1, 2), (3, 16, 28), "first_states"),
        ((16, 3, 28), (3, 16, 28), "slot_order"),
        ((3, 3, 28), (3, 16, 28), "slot_duplicated"),
        ((3, 20, 28), (3, 16, 28), "taps"),
    ],
)
def test_kinds_of_wrong_taps(real, before, after, kind):
    """By the shape of the change, the target's depth given."""
    was = real.draft.contract.change(taps=before)
    assert kind_of(Candidate("taps", "", "", was.change(taps=after)), was, real) == kind


@pytest.mark.slow
def test_the_incident_on_eight_conversations():
    """From the incident's own files, no final state, no live target: the slice, and what it costs."""
    head = samples.target_head()
    case = Case(samples.draft("a", head), tuple(samples.incident_captures(8)), head)
    d = diagnose(case)
    (finding,) = d.findings
    assert finding.kind == "incident_slice" and (finding.before, finding.after) == (
        "(layer3, layer16, layer28)", "(embed, layer3, layer16)",
    )  # fmt: skip
    assert (
        finding.accuracy[0] < 0.4 < 0.65 < finding.accuracy[1] and finding.tokens[1] > finding.tokens[0] + 0.8
    )
    assert {"final", "text", "names", "targets"} <= d.not_run.keys()
    assert "trained on (embed, layer3, layer16)" in d.because


@pytest.mark.slow
def test_the_incident_without_head_or_names():
    """States nobody named, no target at all: the same slice, in positions of the file."""
    head = samples.target_head()
    d = diagnose(Case(samples.draft("a", head), tuple(samples.incident_captures(8))))
    assert d.names() == ["incident_slice"] and d.findings[0].after == "(stored0, stored1, stored2)"


@pytest.mark.slow
def test_draft_c_learned_an_inner_state(real):
    """Its own taps: nothing but the targets. As shipped: the targets first, then the taps."""
    d = diagnose(plant(real, "inner_targets"))
    assert d.names() == ["inner_targets"] and "layer28" in d.because
    shipped = replace(real, draft=samples.draft("c", real.head))
    assert diagnose(shipped).names() == ["inner_targets", "incident_slice"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "keys",
    [
        ("slot_order", "rope_interleaved"),
        ("incident_slice", "d2t_permuted"),
        ("embed_random", "norm_before_residual"),
    ],
    ids="+".join,
)
def test_pairs_on_the_real_draft(real, keys):
    """Two faults of different kinds: both are named, nothing else."""
    assert sorted(diagnose(plant(real, *keys)).names()) == sorted(keys)


@pytest.mark.slow
@pytest.mark.parametrize("key", [k for k, f in FAULTS.items() if f.healthy and k != "control_few"])
def test_healthy_controls_are_healthy(real, key):
    """What looks odd and is right is not accused; fewer texts where the vocabulary is the whole one."""
    case = replace(real, captures=real.captures[:MIN_TEXTS]) if key == "control_zero_map" else real
    d = diagnose(plant(case, key))
    assert d.verdict == "healthy", d.because
