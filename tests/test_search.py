"""The search finds one planted change at a time, and its statistics keep their promise."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from lib import samples
from lib.candidates import Candidate, edits, neighbours, rope_of, tap_choices
from lib.contract import Contract, Rope
from lib.draft import LOG_FLOOR, DraftForward
from lib.gains import corrections, gain_of, p_value, survivors
from lib.search import Bench, deep_scores
from lib.taps import Tap
from lib.worth import Worth, matters, worth
from tests.support import self_written

TAPS = (Tap(0), Tap(3), Tap(4), Tap(6))
TRUE = {"taps": (Tap(4), Tap(0), Tap(6)), "norm_before_residual": True, "rope": Rope(theta=1e4)}
LENGTH, TEXTS = 40, 12


@pytest.fixture(scope="module")
def planted(tmp_path_factory):
    """Texts that a tiny draft wrote itself under one contract: there it is always right."""
    return self_written(tmp_path_factory.mktemp("planted"), TAPS, TRUE, length=LENGTH, texts=TEXTS)


def best(draft, contract, captures, bench=None):
    """The round around a contract: depth-0 candidates only, with the file edits."""
    bench = bench or Bench(draft, captures)
    found = [*neighbours(draft, contract, captures), *edits(draft, contract, None)]
    # The draft's own text is certain: logits made larger by leaving out the norm explain it even better.
    found = [c for c in found if c.field != "head_norm"]
    return bench.race(Candidate("", "", "", contract), [c for c in found if not c.deep], found)


@pytest.mark.parametrize(
    "change",
    [
        {"taps": (Tap(0), Tap(4), Tap(6))},
        {"token_shift": 0},
        {"token_shift": 2},
        {"norm_before_residual": False},
        {"use_fc": False},
        {"rope": Rope(theta=1e4, interleaved=True)},
        {"vocab_map": "identity"},
        {"vocab_map": "absolute"},
        {"max_position": 9},
    ],
    ids=lambda c: next(iter(c)),
)
def test_one_wrong_field_is_found_and_corrected(planted, change):
    """Whatever single field is declared wrong, the best significant candidate restores the true one."""
    draft, captures = planted
    wrong = draft.contract.change(**change)
    wins = best(draft, wrong, captures).significant(0.05)
    assert wins and wins[0].candidate.contract == draft.contract
    assert wins[0].nats[1] > 0 and wins[0].points > 0 and wins[0].conversations == TEXTS


def test_nothing_beats_the_true_contract(planted):
    """The same candidates around the contract that wrote the texts: none is better, most drop early."""
    draft, captures = planted
    found = best(draft, draft.contract, captures)
    assert not found.significant(0.05) and found.dropped > found.tried // 2


def test_a_wrong_map_file_is_corrected_from_t2d(planted):
    """d2t all zeros, t2d whole: the map is rebuilt, and the scores are compared on the same positions."""
    draft, captures = planted
    broken = replace(draft, d2t=torch.zeros_like(draft.d2t))
    found = best(broken, broken.contract, captures)
    winner = found.significant(0.05)[0].candidate
    assert winner.field == "d2t" and torch.equal(winner.draft.d2t, draft.d2t.long())
    assert not [c for c in edits(draft, draft.contract, None) if c.field == "d2t"], "nothing to rebuild"


def test_two_wrong_fields_are_found_one_after_the_other(planted):
    """A wrong map hides the residual: greedy order peels the map first."""
    draft, captures = planted
    contract = draft.contract.change(vocab_map="identity", norm_before_residual=False)
    bench = Bench(draft, captures)
    fields = []
    for _ in range(3):
        wins = best(draft, contract, captures, bench).significant(0.05)
        if not wins:
            break
        contract = wins[0].candidate.contract
        fields.append(wins[0].candidate.field)
    assert fields == ["vocab_map", "norm_before_residual"] and contract == draft.contract


def test_nothing_is_evaluated_twice(planted, monkeypatch):
    """A second round around another base reuses what it shares with the first."""
    draft, captures = planted
    bench, calls = Bench(draft, captures), []
    score = DraftForward.score
    monkeypatch.setattr(DraftForward, "score", lambda *a: calls.append(a) or score(*a))
    first = best(draft, draft.contract, captures, bench)
    n = len(calls)
    assert n and best(draft, draft.contract, captures, bench).gains == first.gains and len(calls) == n


def test_deep_scores_are_the_log_softmax_of_kept_logits(planted):
    """Against `predict` with all logits: depths 1 to 3, text fed, floor where the map has no word."""
    draft, captures = planted
    forward = DraftForward(draft)
    (batch,) = forward.batches(captures[:1])
    hits, scores = deep_scores(forward, batch, draft.contract)
    p = forward.predict(captures[:1], draft.contract, depths=4, keep_logits=True)
    known = {int(t): i for i, t in enumerate(draft.to_target(torch.arange(draft.draft_vocab)))}
    for row in range(len(scores)):
        total = 0.0
        for depth in (1, 2, 3):
            truth = int(p.truth[row, depth])
            if truth >= 0:
                logits = p.logits[row, depth].log_softmax(-1)
                total += float(logits[known[truth]]) if truth in known else LOG_FLOOR
        assert float(scores[row]) == pytest.approx(total, abs=1e-3)
    assert torch.equal(hits.long(), p.hit[:, 1:4].sum(1))


def test_deep_fields_of_a_real_draft():
    """Feeding back the normed state costs the sample draft at depths 1 to 3, and the search says so."""
    head, captures = samples.target_head(), samples.captures(6)
    draft = samples.draft("a", head)
    wrong = draft.contract.change(taps=samples.TRAINED_TAPS["a"], feedback="post_norm", position_step=0)
    deep = [c for c in neighbours(draft, wrong, captures, head) if c.deep]
    assert {c.field for c in deep} == {"feedback", "position_step"}
    gains = Bench(draft, captures).race(Candidate("", "", "", wrong, deep=True), deep).gains
    assert gains[0].candidate.after in ("pre_norm", "1") and gains[0].nats[0] > 0


@pytest.mark.parametrize(
    "stored, count",
    [(4, 23), (5, 59)],
)
def test_few_taps_are_tried_in_every_order(planted, stored, count):
    """All ordered choices but the declared one, while they are few."""
    draft, captures = planted
    taps = tuple(Tap(i) for i in (4, 0, 6, 3, 5)[:stored])
    capture = replace(captures[0], taps=taps, readers=dict.fromkeys(taps, captures[0].readers[Tap(0)]))
    choices = tap_choices(draft, draft.contract, [capture])
    assert len(choices) == count == len(set(choices)) and draft.contract.taps not in choices


def test_many_taps_are_tried_where_faults_land(planted):
    """A block either way together and one by one, orders, the incident's cut, any one slot; not 2,184."""
    draft, captures = planted
    taps = tuple(Tap(i) for i in range(14))
    capture = replace(captures[0], taps=taps, readers=dict.fromkeys(taps, captures[0].readers[Tap(0)]))
    contract = draft.contract.change(taps=(3, 6, 9))
    choices = tap_choices(draft, contract, [capture])
    for wanted in ((2, 5, 8), (4, 7, 10), (3, 7, 9), (6, 3, 9), (0, 3, 6), (6, 9, 13), (3, 12, 9)):
        assert tuple(map(Tap, wanted)) in choices
    assert len(choices) < ALL_OF_THEM


ALL_OF_THEM = 60


@pytest.mark.parametrize(
    "config, theta, kind",
    [
        ({"rope_theta": 5e5}, 5e5, "default"),
        ({"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}}, 1e6, "default"),
        ({"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 4}}, 5e5, "linear"),
        ({"text_config": {"rope_theta": 7e4}}, 7e4, "default"),
    ],
)
def test_rotary_settings_of_a_config(config, theta, kind):
    """Both spellings, nested or not."""
    rope = rope_of(config)
    assert (rope.theta, rope.kind) == (theta, kind)
    assert rope_of({}) is None and rope_of({"rope_theta": 1.0, "rope_scaling": {"type": "longrope"}}) is None


# ---- statistics ---------------------------------------------------------------------------------


def test_p_value_by_hand():
    """Gains 1..8 nats: mean 4.5, t = 5.20 with 7 degrees; times the number tried, at most 1."""
    gain = torch.arange(1.0, 9.0)
    assert p_value(gain, 1) == pytest.approx(6.26e-4, rel=1e-2)
    assert p_value(gain, 40) == pytest.approx(40 * p_value(gain, 1)) and p_value(-gain, 40) == 1.0
    assert p_value(gain[:1], 1) == 1.0
    tiny = torch.full((8,), 0.01)
    assert p_value(tiny, 1) > 0.4, "equal differences by luck are no certainty"


def test_suspected_candidates_share_half_of_the_level():
    """3 suspected, 2 deep, 35 more: what all of them may spend of the level adds up to one level."""
    contract = Contract(taps=(1,))
    every = [Candidate("", "", "", contract, suspected=i < 3, deep=i in (3, 4)) for i in range(40)]
    assert corrections(every) == {"suspected": 12, "deep": 16, "rest": 56}
    assert 3 / 12 + 2 / 16 + 35 / 56 == 1 and corrections(every[5:]) == {"rest": 35}


def test_survivors_keep_base_leader_and_who_is_close():
    """The base stays however bad; a copy of it goes, unless it may differ later; the clearly behind go."""
    rng = torch.Generator().manual_seed(1)
    base = torch.randn(10, generator=rng) - 50
    rows = torch.stack([base, base, base + 40, base + 40 + 0.5 * torch.randn(10, generator=rng), base - 30])
    assert survivors(rows, [0, 1, 2, 3, 4]) == [0, 2, 3]
    assert survivors(rows[:2], [0, 1], {1}) == [0, 1]


def test_the_first_look_drops_only_what_is_far_behind_in_every_text():
    """Three texts of 100 positions: 16 nats behind in each is out; far behind in two of them stays."""
    leader, counts = torch.tensor([-90.0, -80.0, -85.0]), torch.full((3,), 100)
    rows = torch.stack([leader - 1, leader, leader - 16, leader - torch.tensor([50.0, 50.0, 14.0])])
    assert survivors(rows, [0, 1, 2, 3], counts=counts) == [0, 1, 3]


def test_a_deep_gain_shows_in_hits_where_nats_are_noise():
    """One token of 40 nats hides what steady hits show; against the nats' direction hits prove nothing."""
    candidate = Candidate("", "", "", Contract(taps=(1,)), deep=True)
    hits, counts = torch.full((12,), 6.0, dtype=torch.float64), torch.full((12,), 200)
    nats = torch.tensor([40.0, -38.0] * 6, dtype=torch.float64)
    assert gain_of(candidate, nats, hits, counts, 10).p_value < 0.01
    assert gain_of(replace(candidate, deep=False), nats, hits, counts, 10).p_value > 0.5
    assert gain_of(candidate, -nats, hits, counts, 10).p_value == 1


@pytest.mark.parametrize("tail", ["normal", "heavy"])
def test_false_alarms_stay_below_the_level(tail, rng):
    """40 candidates that gain nothing on 32 conversations, 400 times: at most 5 % of searches accuse."""
    alarms, n = 0, 400
    for _ in range(n):
        common = torch.randn(32, generator=rng)
        gains = torch.randn(40, 32, generator=rng)
        if tail == "heavy":  # a few conversations count many times as much
            gains = gains * (0.3 + 3 * torch.rand(32, generator=rng) ** 6)
        gains = 20 * (gains + 0.5 * common * torch.randn(40, 1, generator=rng))
        alarms += any(p_value(g, 40) < 0.05 for g in gains)
    assert alarms / n <= 0.05 + 2 * math.sqrt(0.05 * 0.95 / n), f"{alarms} of {n}"


@pytest.mark.slow
def test_healthy_sample_draft_is_rarely_accused(rng):
    """Sums of real near candidates over 200 resamples of conversations; and under a null: random signs.

    The null keeps how candidates go together in each conversation: one sign for all of them.
    """
    head, captures = samples.target_head(), samples.captures()
    draft = samples.draft("a", head)
    true = draft.contract.change(taps=samples.TRAINED_TAPS["a"])
    near = [c for c in neighbours(draft, true, captures, head) if c.field in ("rope", "token_shift")]
    near = [c for c in near if "interleaved" not in c.after][:10]
    bench = Bench(draft, captures)
    sums = torch.stack([
        torch.cat([bench.evaluate(c, s)[0] for s in range(len(bench.stages))])
        for c in (Candidate("", "", "", true), *near)
    ])  # fmt: skip
    gains = sums[1:] - sums[0]
    alarms = null = 0
    for _ in range(200):
        drawn = torch.randint(0, gains.shape[1], (gains.shape[1],), generator=rng)
        alarms += any(p_value(g[drawn], len(near)) < 0.05 for g in gains)
        signs = 2.0 * torch.randint(0, 2, (gains.shape[1],), generator=rng) - 1
        null += any(p_value((g - g.mean()) * signs, len(near)) < 0.05 for g in gains)
    allowed = 200 * 0.05 + 2 * math.sqrt(200 * 0.05 * 0.95)
    assert alarms <= allowed and null <= allowed, f"{alarms} and {null} of 200"


def test_worth_and_what_is_negligible(planted):
    """Right everywhere: accuracy 1. A gain below both limits is a remark, above either it counts."""
    draft, captures = planted
    value = worth(draft, draft.contract, captures)
    assert value.accuracy == 1 and value.texts == 8 and value.tokens > 1
    base = Worth(0.5, 100, 2.0, 8, 0.4)
    assert not matters(base, Worth(0.9, 100, 2.01, 8, 0.4005)), "another map, another denominator"
    assert matters(base, Worth(0.5, 100, 2.0, 8, 0.402)) and matters(base, Worth(0.5, 100, 2.03, 8, 0.4))


def test_a_contract_is_all_that_a_candidate_changes(planted):
    """Each candidate differs from the base in its own field and in nothing else."""
    draft, captures = planted
    for c in neighbours(draft, draft.contract, captures):
        changed = [f for f in Contract.__dataclass_fields__ if f != "sources"
                   and getattr(c.contract, f) != getattr(draft.contract, f)]  # fmt: skip
        assert changed == [c.field] and c.before != c.after
