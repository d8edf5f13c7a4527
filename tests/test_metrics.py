"""Metrics: toy cases by hand, intervals that know conversations, and speculators' own numbers."""

from __future__ import annotations

import pytest
import torch

from lib.captures import open_capture
from lib.contract import Contract
from lib.draft import DraftForward, Predictions
from lib.errors import MetricError
from lib.metrics import (
    all_token_accuracy,
    coverage,
    difference,
    in_vocab_accuracy,
    ratio,
    speculators_accuracy,
    trainer_targets,
)
from tests.support import (
    DRAFT_VOCAB,
    draft_and_head,
    random_capture_tensors,
    write_legacy,
)

TAPS = ("embed", "layer3", "layer4", "layer6")


def toy(rows, vocabulary=(1, 2, 3)) -> Predictions:
    """Predictions from (conversation, predicted, true) rows; only `vocabulary` can be produced."""
    capture, guess, truth = (torch.tensor(c) for c in zip(*rows, strict=True))
    guess, truth = guess[:, None], truth[:, None]
    known = torch.isin(truth, torch.tensor(vocabulary))
    position = torch.arange(len(rows))
    return Predictions(capture, position, guess, guess, truth, known, Contract(taps=("embed",)))


# Token 9 is outside the draft's vocabulary. Hits: rows 0, 1 and 4.
ROWS = [(0, 1, 1), (0, 2, 2), (0, 3, 1), (0, 1, 9), (1, 2, 2), (1, 1, 9)]


def test_accuracies_by_hand():
    """Six positions, three hits, two truths out of reach: 3/4 in-vocab, 3/6 of all, 4/6 covered."""
    p = toy(ROWS)
    counts = {
        metric(p).name: (metric(p).numerator, metric(p).denominator)
        for metric in (in_vocab_accuracy, all_token_accuracy, coverage)
    }
    assert counts == {"in-vocab accuracy": (3, 4), "all-token accuracy": (3, 6), "coverage": (4, 6)}
    # The identity that ties them: all-token accuracy is in-vocab accuracy times coverage.
    assert in_vocab_accuracy(p).value * coverage(p).value == all_token_accuracy(p).value == 0.5
    assert str(in_vocab_accuracy(p)).endswith("(3 / 4 positions, 2 conversations)")


def test_past_the_end_counts_nowhere():
    """A truth of -1 is no position: not a miss, not a token to cover."""
    p = toy([*ROWS, (1, -1, -1), (1, 2, -1)])
    assert in_vocab_accuracy(p).denominator == 4
    assert all_token_accuracy(p).denominator == coverage(p).denominator == 6


def test_difference_is_paired():
    """The second draft loses rows 0 and 4 and wins row 2: (3 - 2) / 4 positions."""
    other = toy([(0, 3, 1), (0, 2, 2), (0, 1, 1), (0, 1, 9), (1, 1, 2), (1, 1, 9)])
    value, low, high = difference(toy(ROWS), other)
    assert value == 0.25
    # Conversation 0 alone gives 0 of 3, conversation 1 alone 1 of 1: the resamples' extremes.
    assert (low, high) == (0, 1)
    with pytest.raises(MetricError, match="same positions"):
        difference(toy(ROWS), toy(ROWS[:3]))


def test_pairing_removes_what_conversations_share(rng):
    """Hard and easy conversations widen each accuracy, not the difference of two near-twins."""
    conversation = torch.arange(40).repeat_interleave(50)
    easy = torch.rand(40, generator=rng)[conversation]
    hits = torch.rand(2000, generator=rng) < easy
    worse = hits & (torch.rand(2000, generator=rng) < 0.9)
    a, b = (
        toy(list(zip(conversation.tolist(), h.long().tolist(), [1] * 2000, strict=True)))
        for h in (hits, worse)
    )
    one, (value, low, high) = in_vocab_accuracy(a), difference(a, b)
    assert low < value < high and high - low < (one.high - one.low) / 3 and low > 0


def test_difference_leaves_out_empty_conversations():
    """A conversation without one in-vocab position must not make 0/0 of a resample."""
    rows = [(0, 1, 1), (0, 2, 1), (1, 1, 9)]
    assert difference(toy(rows), toy(rows)) == (0, 0, 0)


def test_nothing_that_counts_is_a_named_error():
    """All truths out of vocabulary: no 0/0, a message."""
    with pytest.raises(MetricError, match="at least one position that counts"):
        in_vocab_accuracy(toy([(0, 1, 9), (1, 1, 9)]))


# ---- intervals ------------------------------------------------------------------------------------


def test_conversations_are_what_is_resampled():
    """1,000 positions in two conversations, one all right, one all wrong, say next to nothing."""
    two = ratio("x", torch.tensor([500, 0]), torch.tensor([500, 500]))
    assert (two.value, two.low, two.high) == (0.5, 0, 1)
    many = ratio("x", torch.full((100,), 5), torch.full((100,), 10))
    assert (many.value, many.low, many.high) == (0.5, 0.5, 0.5)


def test_intervals_are_deterministic(rng):
    """The same counts give the same interval, whatever the global generator did in between."""
    hits = torch.randint(0, 10, (30,), generator=rng)
    first = ratio("x", hits, torch.full((30,), 10))
    torch.rand(7)
    assert ratio("x", hits, torch.full((30,), 10)) == first


def test_interval_covers_the_truth(rng):
    """Clustered data, 300 times over: the 95 % interval holds the true rate about that often.

    A binomial interval over the same positions would hold it in less than half of the cases.
    """
    held = naive = 0
    for _ in range(300):
        # 32 conversations of 20..200 positions, each with its own rate around 0.6.
        counts = torch.randint(20, 201, (32,), generator=rng)
        rates = (0.6 + 0.15 * torch.randn(32, generator=rng)).clamp(0.05, 0.95).double()
        hits = torch.binomial(counts.double(), rates, generator=rng).long()
        r = ratio("x", hits, counts)
        held += r.low <= 0.6 <= r.high
        naive += abs(r.value - 0.6) <= 1.96 * (0.24 / r.denominator) ** 0.5
    assert 0.88 <= held / 300 <= 0.99, f"held in {held} of 300"
    assert naive / 300 < 0.6, "the data are not clustered: this test would see nothing"


# ---- the trainer's own metric ---------------------------------------------------------------------


@pytest.fixture(scope="module")
def trainer(tmp_path_factory):
    """A draft, its captures, and a target head that agrees with some of the draft's chains.

    The final states are rows of the target's head, chosen so that every fourth chain is right for
    four steps, some break earlier, and the rest is chance.
    """
    folder, rng = tmp_path_factory.mktemp("trainer"), torch.Generator().manual_seed(4)
    model, draft, head = draft_and_head(folder, rng)
    rows = draft.to_target(torch.arange(DRAFT_VOCAB))
    contract = draft.contract.change(taps=TAPS[:3])
    tensors = [random_capture_tensors(n, rng) for n in (6, 7, 30, 41, 90)]

    def opened():
        files = [write_legacy(folder / f"data_{i}.pt", t) for i, t in enumerate(tensors)]
        return [open_capture(f, taps=TAPS) for f in files]

    p = DraftForward(draft).predict(opened(), contract, depths=4, positions="all")
    for i, t in enumerate(tensors):
        ids = p.draft_ids[p.capture == i]
        wanted = torch.randint(0, DRAFT_VOCAB, (len(ids),), generator=rng)
        for start in range(0, len(ids) - 3, 4):
            length = int(torch.randint(2, 5, (1,), generator=rng))
            wanted[start : start + length] = ids[start, torch.arange(length)]
        t["hidden_states"][3][1:] = 40 * head.lm_head[rows[wanted]] / head.norm
    return model, draft, head, opened(), tensors, p


@pytest.mark.speculators
@pytest.mark.parametrize("step", range(4))
@pytest.mark.parametrize("kind", ["full", "cond"])
def test_accuracy_equals_speculators_own(trainer, kind, step):
    """Numerator and denominator are those of the trainer's forward, as integers."""
    from speculators.losses.eager import kl_div_loss
    from speculators.models.eagle3.data import shift_batch

    model, draft, head, captures, tensors, p = trainer
    targets = trainer_targets(captures, draft, head, source="layer6")
    ours = speculators_accuracy(p, captures, targets, step, kind)
    hits = total = 0
    for t in tensors:
        length = len(t["input_ids"])
        batch = shift_batch(
            {
                "input_ids": t["input_ids"],
                "hidden_states": torch.cat(t["hidden_states"][:3], -1),
                "verifier_last_hidden_states": t["hidden_states"][3],
                "loss_mask": t["loss_mask"].bool(),
                "lengths": torch.tensor([length]),
                "position_ids": torch.arange(length),
            }
        )
        names = ("hidden_states", "input_ids", "loss_mask", "position_ids", "verifier_last_hidden_states")
        with torch.no_grad():
            _, _, metrics = model(
                **{name: batch[name][None] for name in names},
                document_ids=torch.zeros(1, length - 1, dtype=torch.long),
                ttt_steps=4,
                loss_config={"kl_div": (kl_div_loss, 1.0)},  # the default needs Triton
            )
        hits += int(metrics[f"{kind}_acc_{step}_sum"])
        total += int(metrics[f"{kind}_acc_{step}_total"])
    assert (ours.numerator, ours.denominator) == (hits, total)
    assert 0 < hits < total, "the toy target makes this test vacuous"


def test_speculators_accuracy_refuses_scored_positions(trainer):
    """Chains start everywhere in the trainer; predictions at scored pairs alone cannot answer."""
    _, draft, head, captures, _, p = trainer
    targets = trainer_targets(captures, draft, head, source="layer6")
    some = DraftForward(draft).predict(captures, p.contract)
    with pytest.raises(MetricError, match="positions='all'"):
        speculators_accuracy(some, captures, targets, 0)
    with pytest.raises(MetricError, match="'full' or 'cond'"):
        speculators_accuracy(p, captures, targets, 0, "mean")
