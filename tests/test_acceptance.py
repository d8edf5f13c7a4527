"""Rounds replayed by hand, and the arithmetic from tokens per round to tokens per second."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lib.acceptance import (
    Costs,
    Flags,
    Rounds,
    best_depth,
    break_even,
    independent_chain,
    overlap,
    speed_table,
    tokens_per_second,
    walk,
)
from lib.captures import Capture
from lib.contract import Contract
from lib.draft import Predictions
from lib.errors import MetricError

CONTRACT = Contract(taps=("embed", "layer3", "layer4"))


def a_text(ids, mask):
    """A capture without states: walking needs the text alone."""
    ids, mask = torch.tensor(ids), torch.tensor(mask, dtype=torch.bool)
    return Capture("toy", Path("toy"), "toy", ids, mask, (), 1, {})


def predicted(captures, tables, depth):
    """Predictions from one table per capture: position -> the `depth` tokens drafted there."""
    rows = [(i, t, table[t]) for i, table in enumerate(tables) for t in sorted(table)]
    drafted = torch.tensor([ids for *_, ids in rows])
    truth = torch.full(drafted.shape, -1)
    for row, (i, t, _) in enumerate(rows):
        left = captures[i].token_ids[t + 2 : t + 2 + depth]
        truth[row, : len(left)] = left
    capture, position = (torch.tensor([row[column] for row in rows]) for column in (0, 1))
    return Predictions(capture, position, drafted, drafted, truth, truth >= 0, CONTRACT)


# A prompt of three tokens (0 1 2) and an answer of five. The prompt's pass yields token 10.
TEXT = a_text([0, 1, 2, 10, 11, 12, 13, 14], [0, 0, 0, 1, 1, 1, 1, 1])
DRAFTED = {
    2: [11, 12, 99],  # after 10: two right, then a miss
    3: [12, 13, 14],
    4: [99, 14, 99],  # a miss; what is right behind it does not count
    5: [14, 88, 77],  # right, and then past the end of the text
}


def test_a_walk_by_hand():
    """Position 2: 11 and 12 accepted, 13 is the bonus. Position 5: 14 accepted, and the text is over."""
    rounds = walk(predicted([TEXT], [DRAFTED], 3), [TEXT])
    assert rounds.start.tolist() == [2, 5]
    assert rounds.accepted.tolist() == [2, 1]
    assert rounds.gained.tolist() == [3, 1], "no bonus after the last token of the text"
    assert (rounds.depth, len(rounds), rounds.of(0)) == (3, 2, [2, 1])
    assert rounds.tokens_per_round == 2.0, "four tokens in two rounds; the first one came with the prompt"
    assert rounds.accepted_at == (2, 1, 0)


def test_one_draft_token_a_round_by_hand():
    """The same drafts cut to depth 1: 11 accepted and 12 the bonus; 99 refused for 13; 14 accepted."""
    rounds = walk(predicted([TEXT], [DRAFTED], 3), [TEXT], depth=1)
    assert rounds.start.tolist() == [2, 4, 5]
    assert rounds.accepted.tolist() == [1, 0, 1]
    assert rounds.gained.tolist() == [2, 1, 1]
    assert rounds.accepted_at == (2,)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_smaller_depth_is_a_shorter_rollout(depth):
    """Walking deep rollouts at a smaller depth is walking rollouts of that depth."""
    deep = walk(predicted([TEXT], [DRAFTED], 3), [TEXT], depth)
    cut = {t: ids[:depth] for t, ids in DRAFTED.items()}
    short = walk(predicted([TEXT], [cut], depth), [TEXT])
    assert deep.accepted.tolist() == short.accepted.tolist()
    assert deep.gained.tolist() == short.gained.tolist() and deep.depth == short.depth == depth


@pytest.mark.parametrize(
    "drafted, accepted, gained",
    [
        ([11, 12, 13, 14], [4], [4]),  # all four are the rest of the text: no room for a bonus
        ([11, 12, 13, 99], [3], [4]),  # the bonus is the last token
        ([11, 12, 99, 99], [2, 1], [3, 1]),
    ],
)
def test_rounds_end_with_the_text(drafted, accepted, gained):
    """Accepted and gained are cut at the end of the text, as a live run stops at its end token."""
    table = {t: [99] * 4 for t in (3, 4)} | {2: drafted, 5: [14, 99, 99, 99]}
    rounds = walk(predicted([TEXT], [table], 4), [TEXT])
    assert rounds.accepted.tolist() == accepted and rounds.gained.tolist() == gained
    assert int(rounds.gained.sum()) == 4, "the rounds add up to the answer after its first token"


def test_captures_are_walked_one_by_one():
    """Rounds of several conversations, in order; one with no second answer token has none."""
    short = a_text([0, 1, 5], [0, 0, 1])
    other = a_text([0, 7, 8, 9], [0, 1, 1, 1])
    texts = [TEXT, short, other]
    rounds = walk(predicted(texts, [DRAFTED, {}, {0: [8, 99, 99], 1: [9, 99, 99]}], 3), texts)
    assert [rounds.of(i) for i in range(3)] == [[2, 1], [], [1]]
    assert rounds.capture.tolist() == [0, 0, 2]


def test_what_cannot_be_walked_is_said():
    """Depths that nobody predicted, texts of several answers, and no round at all."""
    p = predicted([TEXT], [DRAFTED], 3)
    for depth in (0, -1, 4):
        with pytest.raises(MetricError, match=rf"depth: expected 1 to 3.*found {depth}\..*roll out deeper"):
            walk(p, [TEXT], depth)
    turns = a_text([0, 10, 11, 0, 0, 12, 13, 14], [0, 1, 1, 0, 0, 1, 1, 1])
    missed = {0: [99, 99, 99], 1: [99, 99, 99], 4: [13, 99, 99], 5: [14, 99, 99]}
    with pytest.raises(MetricError, match=r"one answer.*position 2 is not scored.*each turn"):
        walk(predicted([turns], [missed], 3), [turns])
    leap = missed | {0: [11, 0, 0]}  # lands on position 4, beyond the user's turn
    with pytest.raises(MetricError, match=r"one answer.*position 2 is not scored"):
        walk(predicted([turns], [leap], 3), [turns])
    with pytest.raises(MetricError, match="two tokens or more, found none"):
        walk(p, [])


def test_overlap_needs_a_temperature():
    """At temperature 0 there is no distribution to overlap with."""
    with pytest.raises(MetricError, match=r"temperature: expected above 0.*walk\(\)"):
        overlap(None, [TEXT], None, CONTRACT, temperature=0)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(data=st.data(), depth=st.integers(1, 6), prompt=st.integers(1, 4), answer=st.integers(2, 30))
def test_any_rounds(data, depth, prompt, answer):
    """1 to depth + 1 tokens a round; rounds tile the answer; joint rates add up to mean accepted."""
    text = a_text(list(range(prompt + answer)), [0] * prompt + [1] * answer)
    table = {}
    for t in range(prompt - 1, prompt + answer - 2):
        right = data.draw(st.integers(0, depth))
        table[t] = [t + 2 + i if i < right else -7 for i in range(depth)]
    rounds = walk(predicted([text], [table], depth), [text])
    assert 1 <= rounds.tokens_per_round <= depth + 1
    assert int(rounds.gained.sum()) == answer - 1
    assert rounds.start.tolist() == [prompt - 1 + int(rounds.gained[:i].sum()) for i in range(len(rounds))]
    rates = [count / len(rounds) for count in rounds.accepted_at]
    assert 1 + sum(rates) == pytest.approx(float((rounds.accepted + 1).double().mean()))
    assert rates == sorted(rates, reverse=True), "the i-th token is accepted only with all before it"
    whole = rounds.gained[:-1], rounds.accepted[:-1]
    assert torch.equal(whole[0], whole[1] + 1), "every round but the last has its bonus"


# ---- tokens per second ----------------------------------------------------------------------------


def test_the_incidents_arithmetic():
    """From the case file's numbers alone: this deployment could not win, and what it was worth at most."""
    plain = 1 / 90  # 90 tok/s without speculation
    round_seconds = 1.6 / 56.8  # 1.6 tokens a round at 56.8 tok/s
    assert round_seconds == pytest.approx(28.2e-3, abs=0.05e-3)
    assert break_even(round_seconds, plain) == pytest.approx(2.5, abs=0.05)
    assert tokens_per_second(1.6, round_seconds) == pytest.approx(56.8)
    at_most = independent_chain(0.769, 15)
    assert at_most == pytest.approx(4.3, abs=0.05)
    assert tokens_per_second(at_most, round_seconds) == pytest.approx(150, rel=0.02)


def test_independent_chain_by_hand():
    """Nothing right leaves the bonus, everything right the whole chain; one half in between."""
    assert independent_chain(0.0, 5) == 1
    assert independent_chain(1.0, 5) == 6
    assert independent_chain(0.5, 2) == 1 + 0.5 + 0.25


COSTS = Costs(
    plain=0.010,
    verify={1: 0.010, 2: 0.011, 3: 0.012, 4: 0.013},
    draft={1: 0.002, 2: 0.003, 3: 0.012},
)


def test_speed_table_by_hand():
    """Three depths of the toy walk: tokens per round, break-even, tok/s and the ratio to plain decoding."""
    table = speed_table(predicted([TEXT], [DRAFTED], 3), [TEXT], COSTS)
    assert table.index.tolist() == [1, 2, 3] and table.index.name == "depth"
    assert table["tokens per round"].tolist() == [4 / 3, 2, 2]
    assert table["break-even"].tolist() == pytest.approx([1.3, 1.5, 2.5])
    assert table["tok/s"].tolist() == pytest.approx([4 / 3 / 0.013, 2 / 0.015, 2 / 0.025])
    assert table["ratio"].tolist() == pytest.approx([4 / 3.9, 4 / 3, 0.8])
    assert best_depth(table) == 2, "depth 3 finds no more tokens and costs more"
    wins = table["tokens per round"] > table["break-even"]
    assert wins.tolist() == (table["ratio"] > 1).tolist() == [True, True, False]


def test_speed_table_leaves_out_what_was_not_measured():
    """A depth needs both a rollout and a cost."""
    costs = Costs(0.01, {1: 0.01, 3: 0.012, 9: 0.02}, {2: 0.003, 8: 0.01})
    assert speed_table(predicted([TEXT], [DRAFTED], 3), [TEXT], costs).index.tolist() == [2]


def test_rounds_of_depth_count_every_round():
    """accepted_at by hand: 3, 1, 0 and 1 accepted of three."""
    rounds = Rounds(*(torch.tensor(x) for x in ([0] * 4, [2, 6, 8, 9], [3, 1, 0, 1], [4, 2, 1, 2])), 3)
    assert rounds.accepted_at == (3, 1, 1)
    assert rounds.tokens_per_round == 9 / 4


# ---- flags ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "steps, topk, typed, effective",
    [
        (1, 1, 16, 2),  # the trap: one step, and 16 typed tokens become 2
        (15, 1, 16, 16),  # a chain of 15 and the bonus: what was typed
        (3, 1, 4, 4),
        (3, 1, 2, 4),  # raised as silently as lowered
        (5, 8, 16, 16),  # branches: the typed number stands
        (1, 2, 16, 16),
        (5, 4, 64, 64),
    ],
)
def test_sglangs_flag_rule(steps, topk, typed, effective):
    """With top-k 1 the number of draft tokens is steps + 1, whatever was typed."""
    flags = Flags(steps, topk, typed)
    assert flags.effective == effective
    assert flags.chain_depth == effective - 1
    assert flags.overridden is (typed != effective)


@pytest.mark.parametrize("name", ["steps", "topk", "draft_tokens"])
def test_flags_no_engine_takes(name):
    """Zero and less are named."""
    with pytest.raises(MetricError, match=f"flags: {name}: expected 1 or more, found 0"):
        Flags(**({"steps": 3, "topk": 1, "draft_tokens": 4} | {name: 0}))
