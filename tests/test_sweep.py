"""The sweep finds a planted wiring; the race finds the same one for less, and rarely drops it."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from lib.captures import open_capture
from lib.checkpoints import load_draft
from lib.contract import Contract
from lib.draft import DraftForward
from lib.errors import ContractError
from lib.metrics import in_vocab_accuracy
from lib.sweep import Sweep, ordered_choices, race, replay, sweep
from lib.taps import Tap
from tests.support import random_capture_tensors, speculators_draft, write_legacy

TAPS = (Tap(0), Tap(3), Tap(4), Tap(6))
PLANTED = (Tap(4), Tap(0), Tap(6))
LENGTH, TEXTS = 24, 40


@pytest.fixture(scope="module")
def planted(tmp_path_factory):
    """Texts that a draft wrote itself, wired as `PLANTED`: there and only there it is always right."""
    folder, rng = tmp_path_factory.mktemp("planted"), torch.Generator().manual_seed(9)
    speculators_draft().save_pretrained(folder / "draft")
    draft = load_draft(folder / "draft")
    forward = DraftForward(replace(draft, contract=draft.contract.change(taps=PLANTED)))
    files = [write_legacy(folder / f"data_{i}.pt", random_capture_tensors(LENGTH, rng)) for i in range(TEXTS)]
    captures = [open_capture(f, taps=TAPS) for f in files]
    for t in range(LENGTH - 2):  # pair t writes token t + 2
        p = forward.predict(captures, positions="all")
        for i, token in enumerate(p.target_ids[p.position == t, 0]):
            captures[i].token_ids[t + 2] = token
    contracts = [forward.draft.contract.change(taps=taps) for taps in ordered_choices(TAPS, 3)]
    return forward, captures, contracts


@pytest.fixture(scope="module")
def exact(planted):
    return sweep(*planted)


def test_exact_sweep_finds_the_planted_wiring(planted, exact):
    """One of 24 orders is right everywhere. Orders that share its largest state come next."""
    forward, captures, contracts = planted
    assert len(set(c.taps for c in contracts)) == 24
    assert exact.winner.taps == PLANTED and exact.seen.all() and exact.passes == 24
    accuracy = exact.accuracy[exact.order].tolist()
    assert accuracy[0] == 1 and accuracy[1] < 0.9 and accuracy[12] < 0.3
    assert exact.gap()[1] > 0 and exact.accuracy_gap()[1] > 0
    for i in (0, exact.order[0], 23):
        alone = in_vocab_accuracy(forward.predict(captures, contracts[i]))
        assert (int(exact.hits[i].sum()), int(exact.counts.sum())) == (alone.numerator, alone.denominator)


def test_race_finds_the_same_for_less(planted, exact):
    """Dropped candidates saw a part of the texts, the finalists all; what was seen is exact."""
    raced = race(*planted)
    assert raced.winner == exact.winner
    assert raced.passes < 8, f"{raced.passes:.1f} passes in place of 24"
    complete = raced.seen.all(1)
    assert complete[exact.order[0]] and 2 <= complete.sum() < 24
    assert torch.equal(raced.counts, exact.counts)
    assert torch.equal(raced.hits, exact.hits * raced.seen), "a hit counted where nothing was seen"
    assert torch.equal(raced.hits[complete], exact.hits[complete])
    # Rounds are nested: whoever saw more saw all that the others saw.
    by_seen = raced.seen[raced.seen.sum(1).argsort(descending=True)]
    assert all((later <= earlier).all() for earlier, later in pairwise(by_seen))
    table = raced.table(top=3)
    assert table.iloc[0].to_dict() == {
        "taps": "layer4 embed layer6", "in-vocab accuracy %": 100.0, "conversations": TEXTS,
        "nats a token": round(float(exact.log_likelihood.max()), 3),
    }  # fmt: skip


def test_gap_is_paired_by_conversation():
    """By hand: the leader wins 2 more of 10, 10 and 20: 6/40, between 2/20 and 2/10."""
    hits = torch.tensor([[3, 5, 9, 0], [5, 7, 11, 0], [0, 0, 0, 0]])
    contracts = tuple(Contract(taps=(i,)) for i in range(3))
    seen = torch.ones(3, 4, dtype=torch.bool)
    result = Sweep(contracts, hits, hits.double(), torch.tensor([10, 10, 20, 0]), seen)
    value, low, high = result.gap()
    assert result.order == [1, 0, 2] and value == pytest.approx(6 / 40)
    # The empty fourth conversation is left out; the third has twice the positions for its 2.
    assert 2 / 20 <= low < value < high <= 2 / 10
    even = hits * 0 + torch.tensor([[1], [4], [0]])
    ahead = Sweep(contracts, even, even.double(), torch.full((4,), 10), seen)
    assert ahead.gap() == pytest.approx((0.3, 0.3, 0.3))


@pytest.mark.parametrize("n, lead, decided", [(1, 3, False), (4, 3, False), (5, 3, True), (5, 0, False)])
def test_a_lead_over_few_conversations_decides_nothing(n, lead, decided):
    """Conversations without positions do not count; nor does a lead of nothing, over however many."""
    hits = torch.tensor([[1 + lead], [1]]).expand(2, n + 3).clone()
    hits[:, n:] = 0
    counts = torch.tensor([10] * n + [0] * 3)
    contracts = tuple(Contract(taps=(i,)) for i in range(2))
    assert Sweep(contracts, hits, hits.double(), counts, torch.ones_like(hits).bool()).decided == decided
    assert not Sweep(contracts[:1], hits[:1], hits[:1].double(), counts, torch.ones(1, n + 3).bool()).decided


def test_who_saw_more_comes_first():
    """A candidate dropped with a lucky 100 % of one text does not beat a finalist."""
    seen = torch.tensor([[True, False], [True, True]])
    result = Sweep(
        tuple(Contract(taps=(i,)) for i in range(2)),
        torch.tensor([[5, 0], [4, 3]]),
        torch.tensor([[5.0, 0.0], [4.0, 3.0]]),
        torch.tensor([5, 5]),
        seen,
    )
    assert result.order == [1, 0] and result.passes == 1.5


def test_no_candidates_is_a_named_error(planted):
    """An empty list of contracts has no winner: said before any work."""
    forward, captures, _ = planted
    with pytest.raises(ContractError, match=r"contracts: expected at least one.*ordered_choices"):
        sweep(forward, captures, [])


# ---- how often a race drops the right answer -------------------------------------------------------


def known(hits, counts) -> Sweep:
    """An exact sweep whose scores are its hits, so that a thousand races cost seconds."""
    contracts = tuple(Contract(taps=(i,)) for i in range(len(hits)))
    return Sweep(contracts, hits, hits.double(), counts, torch.ones_like(hits, dtype=torch.bool))


@pytest.mark.parametrize("seed", [5, 6])
def test_a_replay_decides_as_the_race_does(planted, exact, seed):
    """Looked up or evaluated, the same candidates drop out at the same time, with the same scores."""
    raced, again = race(*planted, seed=seed), replay(exact, seed=seed)
    assert torch.equal(again.seen, raced.seen) and not again.seen.all()
    assert torch.equal(again.hits, raced.hits) and torch.equal(again.counts, raced.counts)
    torch.testing.assert_close(again.scores, raced.scores)


def test_a_replay_needs_what_every_candidate_scored(planted):
    """Scores that a race never looked at are not zeros."""
    with pytest.raises(ContractError, match=r"replay: known: expected every candidate.*sweep\(\)"):
        replay(race(*planted))


def test_an_exact_sweep_on_some_conversations(planted, exact):
    """A resample counts a conversation as often as it was drawn; the others not at all."""
    forward, captures, contracts = planted
    drawn = torch.tensor([3, 0, 3])
    some = exact.on(drawn)
    again = sweep(forward, [captures[i] for i in drawn], contracts)
    assert torch.equal(some.hits, again.hits) and torch.equal(some.counts, again.counts)
    torch.testing.assert_close(some.scores, again.scores)
    assert some.seen.shape == (24, 3) and some.passes == 24


def resampled(rates, positions, rng):
    """Hits of candidates with these rates on 32 conversations, easy and hard ones for all alike."""
    counts = torch.randint(positions[0], positions[1], (32,), generator=rng)
    ease = 0.15 * torch.randn(32, generator=rng) + 0.03 * torch.randn(len(rates), 32, generator=rng)
    p = (rates[:, None] + ease).clamp(0.02, 0.98).double()
    return torch.binomial(counts.double().expand_as(p).contiguous(), p, generator=rng).long(), counts


CLEAR = torch.linspace(0.6, 0.2, 24)
CLOSE = torch.full((24,), 0.55).index_fill(0, torch.tensor([7]), 0.56)


@pytest.mark.parametrize(
    "rates, positions, first",
    [(CLEAR, (50, 300), 4), (CLOSE, (50, 300), 4), (CLEAR, (5, 20), 4), (CLEAR, (2, 6), 2)],
    ids=["clear", "close", "short texts", "tiny texts, pairs first"],
)
def test_race_keeps_the_true_winner(rates, positions, first, rng):
    """error=0.01 is a promise: in 300 redrawn tables the truly best is dropped at most 3 times."""
    true = int(rates.argmax())
    kept = sum(
        bool(replay(known(*resampled(rates, positions, rng)), first=first, seed=seed).seen[true].all())
        for seed in range(300)
    )
    assert kept >= 297, f"kept in {kept} of 300"


@pytest.mark.parametrize("first", [0, 1, 100])
def test_any_first_round_ends(first):
    """A first round of nothing, of one text (no spread to test), or of more than there are."""
    hits = torch.tensor([[1, 1, 1, 9], [2, 2, 2, 9], [3, 3, 3, 9], [0, 0, 0, 9]])
    raced = replay(known(hits, torch.full((4,), 10)), first=first, seed=0)
    assert raced.winner.taps == (Tap(2),) and raced.seen[2].all()


def test_score_is_the_log_probability_of_the_text(planted):
    """Against a plain log-softmax over kept logits; positions out of vocabulary count nothing."""
    forward, captures, contracts = planted
    p = forward.predict(captures, contracts[3], keep_logits=True)
    to_draft = {int(t): i for i, t in enumerate(forward.draft.to_target(torch.arange(p.logits.shape[-1])))}
    total = sum(
        float(p.logits[row, 0].log_softmax(-1)[to_draft[int(p.truth[row, 0])]])
        for row in p.in_vocab[:, 0].nonzero().flatten()
    )
    exact = sweep(forward, captures, contracts[3:4] * 2)
    assert float(exact.scores[0].sum()) == pytest.approx(total, rel=1e-5)
    assert int(exact.hits[0].sum()) == int((p.hit & p.in_vocab).sum())
    identity = sweep(forward, captures, [contracts[3].change(vocab_map="identity")] * 2)
    assert float(identity.log_likelihood[0]) < float(exact.log_likelihood[0]), "a wrong map scored as well"
