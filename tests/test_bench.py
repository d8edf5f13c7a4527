"""The README's table of benchmarks says what the records say, and decides by itself what is met."""

from __future__ import annotations

import re

import pytest
import torch

from bench import table
from bench._peers import speculators_batches, speculators_model, speculators_pass
from bench._timing import measure, ratio
from lib.captures import open_capture
from lib.checkpoints import load_draft
from lib.draft import DraftForward
from tests.support import random_capture_tensors, speculators_draft, write_legacy

TAPS = (0, 3, 4, 6)


@pytest.mark.parametrize(
    "aim, value, text",
    [
        (table.at_most(1.3), {"median": 1.3, "low": 1.1, "high": 1.4}, "1.3 (1.1 to 1.4), met"),
        (table.at_most(1.3), {"median": 1.31, "low": 1.1, "high": 1.4}, "1.31 (1.1 to 1.4), **missed**"),
        (table.at_least(0.99), 0.985, "0.985, **missed**"),
        (table.at_least(0.99), 1.0, "1, met"),
        (None, "1.70x (1.32 to 1.75)", "1.7 (1.32 to 1.75)"),
        (table.at_most(1), None, "-"),
    ],
)
def test_met_is_computed(aim, value, text):
    """From the median, on the right side of the bound; nothing measured is neither met nor missed."""
    assert table.cell(value, aim) == text


def test_the_readme_has_what_the_records_say():
    text = (table.ROOT / "README.md").read_text()
    assert text.count(table.BEGIN) == 1
    assert table.readme_block(table.recorded) in text, "run bench/table.py"


def test_a_row_reads_the_shape_it_names():
    """Two shapes, two columns; a record that is not there leaves the column open."""
    record = {"sample": {"step 0": {"ours / floor": {"median": 1.2, "low": 1.1, "high": 1.3}}}}
    block = table.readme_block({"draft_forward": record}.get)
    assert re.search(r"products alone \| at most 1\.3 \| 1\.2 \(1\.1 to 1\.3\), met \| - \|", block)
    assert "missed" not in block


def test_variants_run_in_turn():
    """A B A B, after one warm-up each; ratios are taken run by run."""
    calls = []
    seconds = measure({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, 2)
    assert calls == list("ababab") and [len(s) for s in seconds.values()] == [2, 2]
    assert ratio([2.0, 9.0, 4.0], [1.0, 3.0, 1.0]) == {"median": 3.0, "low": 2.0, "high": 4.0, "runs": 3}


@pytest.mark.speculators
@pytest.mark.parametrize("peer", ["speculators", "specforge"])
def test_a_peer_has_the_drafts_weights(tmp_path, rng, peer):
    """Built around our tensors, a framework's own class predicts what we do, at every depth."""
    speculators_draft().save_pretrained(tmp_path / "draft")
    draft = load_draft(tmp_path / "draft")
    files = [write_legacy(tmp_path / f"data_{n}.pt", random_capture_tensors(n, rng)) for n in (9, 24)]
    captures = [open_capture(file, taps=TAPS) for file in files]
    contract = draft.contract.change(taps=TAPS[1:])
    batches = speculators_batches(captures, contract.taps, torch.float32)
    if peer == "speculators":
        theirs = speculators_pass(speculators_model(draft), batches, 3)
    else:
        pytest.importorskip("specforge", reason="the oracle is installed in the test set-up only")
        from bench._peers import specforge_pass
        from tests.specforge_model import specforge_model

        contract = contract.change(norm_before_residual=False)
        theirs = specforge_pass(specforge_model(draft), batches, 3)
    ours = DraftForward(draft).predict(captures, contract, depths=3, positions="all").draft_ids
    assert torch.equal(ours, theirs)
