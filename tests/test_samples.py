"""The shipped samples: complete, small, honest about what they are, and telling the incident's story."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch

from lib import arc, metrics, samples, sweep
from lib.captures import FINAL, open_folder
from lib.draft import DraftForward
from lib.errors import CaptureError
from lib.notebook import ROOT


@pytest.fixture(scope="module")
def head():
    return samples.target_head()


@pytest.fixture(scope="module")
def captures():
    return samples.captures()


def test_every_file_is_listed_with_its_hash(tmp_path):
    """The manifest and the folder agree; one flipped byte or one stray file is an error."""
    assert samples.verify() > 60
    small = tmp_path / "data_samples"
    small.mkdir()
    entry = {"file": "a.bin", "sha256": "0" * 64, "bytes": 1}
    (small / "manifest.json").write_text(json.dumps({"files": [entry]}))
    with pytest.raises(CaptureError, match=r"missing \['a.bin'\]"):
        samples.verify(small)
    (small / "a.bin").write_bytes(b"x")
    with pytest.raises(CaptureError, match="sha256"):
        samples.verify(small)


def test_size_and_amount(captures):
    """Under 100 MB; at least 32 held-out captures with at least 5,000 response positions."""
    total = sum(p.stat().st_size for p in samples.SAMPLES.rglob("*") if p.is_file())
    assert total < 100_000_000, f"{total:,} bytes"
    assert len(captures) >= 32
    assert sum(int(c.loss_mask.sum()) for c in captures) >= 5_000
    corpus = json.loads((samples.SAMPLES / "corpus.json").read_text())
    assert corpus["heldout_turns_also_in_training"] == 0
    assert corpus["distinct_user_turns"] == corpus["conversations"]


def test_formats_hold_the_same_states(captures):
    """Incident `.pt`, speculators' `hs_N` and our own layout: the same conversation, bit for bit."""
    folder = samples.SAMPLES / "captures"
    today = open_folder(
        folder / "speculators" / "hidden_states",
        taps=samples.STORED_TAPS,
        loss_masks=folder / "speculators",
    ).captures
    ours = open_folder(folder / "workbook").captures
    assert len(today) == len(ours) == samples.OTHER_FORMATS
    for legacy, hs, own in zip(captures, today, ours, strict=False):
        assert torch.equal(legacy.loss_mask, hs.loss_mask) and torch.equal(hs.loss_mask, own.loss_mask)
        for tap in samples.STORED_TAPS:
            assert torch.equal(legacy.state(tap), hs.state(tap))
            assert torch.equal(legacy.state(tap), own.state(tap))
        assert torch.equal(legacy.final(), own.final())


@pytest.mark.speculators
def test_trainers_reader_takes_all_but_the_last(captures):
    """speculators' own `ArrowDataset`, on our file: fc input is cat(states[:-1]), targets states[-1]."""
    from speculators.train.data import ArrowDataset

    stored = samples.SAMPLES / "captures" / "speculators"
    dataset = ArrowDataset(max_len=4096, datapath=stored, on_missing="raise")
    for i in range(samples.OTHER_FORMATS):
        wanted = torch.cat([captures[i].state(t) for t in samples.STORED_TAPS[:-1]], -1)
        assert torch.equal(dataset[i]["hidden_states"], wanted)
        assert torch.equal(dataset[i]["verifier_last_hidden_states"], captures[i].state("layer28"))


@pytest.mark.parametrize("letter", samples.DRAFTS)
def test_drafts_say_what_the_tools_write(letter, head):
    """The misleading ids are there; the draft borrows embeddings, owns a map, and declares [3, 16, 28]."""
    draft = samples.draft(letter, head)
    assert draft.config["eagle_aux_hidden_state_layer_ids"] == [2, 15, 27]
    assert draft.contract.taps == samples.SERVED_TAPS
    assert any("embed_tokens" in note for note in draft.notes)
    assert all(p.dtype == torch.float32 for p in (draft.fc, draft.lm_head))
    covered = float(
        draft.in_vocab()[torch.cat([c.token_ids[c.loss_mask] for c in samples.captures()])].float().mean()
    )
    assert 0.90 <= covered <= 0.97


@pytest.mark.slow
@pytest.mark.parametrize("letter", samples.DRAFTS)
def test_trained_order_wins_exactly_and_raced(letter, head, captures):
    """All 24 orders: the trained one first, its gap to the second above its interval; the race agrees."""
    draft = samples.draft(letter, head)
    forward = DraftForward(draft)
    orders = sweep.ordered_choices(samples.STORED_TAPS, 3)
    contracts = [draft.contract.change(taps=t) for t in orders]
    exact = sweep.sweep(forward, captures, contracts)
    raced = sweep.race(forward, captures, contracts)
    assert exact.winner.taps == raced.winner.taps == samples.TRAINED_TAPS[letter]
    value, low, high = exact.gap()
    assert 0 < low <= value <= high
    assert raced.passes < 8


@pytest.mark.slow
def test_fed_as_trained_the_draft_is_what_its_log_said(head, captures):
    """Within 3 points of the log in the log's own metric; the incident's wiring at least 15 below."""
    draft = samples.draft("a", head)
    forward = DraftForward(draft)
    trained = draft.contract.change(taps=samples.TRAINED_TAPS["a"])
    targets = metrics.trainer_targets(captures, draft, head)
    p = forward.predict(captures, trained, depths=3, positions="all")
    log = samples.training_log("a").query("split == 'heldout'").iloc[-1]
    for step in range(3):
        ours = metrics.speculators_accuracy(p, captures, targets, step).value
        assert abs(ours - log[f"full_acc_{step}"]) < 0.03, step
    right = forward.predict(captures, trained)
    wrong = forward.predict(captures, draft.contract)
    gain, low, _ = metrics.difference(right, wrong)
    assert low > 0.15 and gain > 0.15
    assert metrics.in_vocab_accuracy(right).value >= 0.58


@pytest.mark.slow
def test_lens_draft_was_trained_on_other_targets(head, captures):
    """Draft (c) agrees with the lens of layer 28 more than with the model itself; (a) does not."""
    score = {}
    for letter in "ac":
        draft = samples.draft(letter, head)
        contract = draft.contract.change(taps=samples.TRAINED_TAPS[letter])
        p = DraftForward(draft).predict(captures, contract, positions="all")
        for source in (FINAL, "layer28"):
            targets = metrics.trainer_targets(captures, draft, head, source)
            score[letter, source] = metrics.speculators_accuracy(p, captures, targets, 0).value
    assert score["c", "layer28"] > score["c", FINAL]
    assert score["a", FINAL] > score["a", "layer28"]


def test_readme_numbers_are_the_facts():
    """The README's table is the one that the committed facts give."""
    assert arc.readme_block() in (ROOT / "README.md").read_text(), "run `make notebooks`"


def test_importing_lib_does_nothing():
    """No file written, no device chosen, no heavy framework pulled in by the small modules."""
    code = (
        "import sys, lib.taps, lib.contract, lib.captures, lib.checkpoints;"
        "assert 'transformers' not in sys.modules and 'matplotlib' not in sys.modules"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", code], check=True, env=env, cwd=ROOT)
