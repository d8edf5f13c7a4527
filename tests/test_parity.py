"""Our forward against speculators' own `Eagle3DraftModel`, every norm variant, depth and layer type."""

from __future__ import annotations

import itertools

import pytest
import torch

from lib.captures import open_capture
from lib.checkpoints import load_draft
from lib.draft import DraftForward
from tests.support import (
    random_capture_tensors,
    speculators_draft,
    speculators_logits,
    write_legacy,
)

TAPS = ("embed", "layer3", "layer4", "layer6")
LENGTHS = (5, 6, 7, 19, 40, 41, 64, 90)  # speculators itself needs one more pair than depths
NORMS = ({}, {"norm_before_fc": True}, {"fc_norm": True})
DEPTHS = 4


def captures_on_disk(folder, rng):
    """The same conversations as files and as tensors."""
    tensors = [random_capture_tensors(n, rng) for n in LENGTHS]
    files = [write_legacy(folder / f"data_{i}.pt", t) for i, t in enumerate(tensors)]
    return [open_capture(f, taps=TAPS) for f in files], tensors


@pytest.mark.speculators
@pytest.mark.parametrize("arch", ["llama", "qwen3"])
@pytest.mark.parametrize("norms", NORMS, ids=["none", "norm_before_fc", "fc_norm"])
@pytest.mark.parametrize("before, output", [*itertools.product([False, True], repeat=2)])
def test_logits_equal_speculators(tmp_path, rng, arch, norms, before, output):
    """fp32 logits within 1e-4 relative at every position; float64 shows the rest is rounding."""
    flags = {"norm_before_residual": before, "norm_output": output, **norms}
    model = speculators_draft(arch=arch, **flags)
    model.save_pretrained(tmp_path / "draft")
    captures, tensors = captures_on_disk(tmp_path, rng)
    theirs = torch.cat([speculators_logits(model, t, [0, 1, 2], DEPTHS) for t in tensors])
    ours = {}
    for dtype in (torch.float32, torch.float64):
        draft = load_draft(tmp_path / "draft", dtype=dtype)
        assert draft.contract.norm_before_residual is before
        assert draft.contract.feedback == ("post_norm" if output else "pre_norm")
        ours[dtype] = DraftForward(draft).predict(
            captures,
            draft.contract.change(taps=TAPS[:3]),
            depths=DEPTHS,
            positions="all",
            keep_logits=True,
        )
    # Chains near the end run past the text: speculators feeds id 0 there, and so do we.
    exact, single = ours[torch.float64].logits, ours[torch.float32].logits
    assert single.shape == theirs.shape
    size = exact.abs().max()

    def gap(a, b):
        return ((a - b).abs().max() / size).item()

    assert gap(single, theirs) < 1e-4, f"ours against speculators, fp32: {gap(single, theirs):.1e}"
    # Both fp32 results lie within rounding of ours in float64, and ours no further than theirs.
    assert gap(single, exact) < 3e-5
    assert gap(theirs, exact) < 3e-5, "what float64 does not remove would be a wiring difference"
    assert torch.equal(ours[torch.float64].draft_ids, exact.argmax(-1))
    decided = theirs.topk(2).values.diff().abs().squeeze(-1) > 1e-5 * size
    assert torch.equal(ours[torch.float32].draft_ids[decided], theirs.argmax(-1)[decided])
    assert decided.float().mean() > 0.99


@pytest.mark.speculators
@pytest.mark.parametrize("arch", ["llama", "qwen3"])
def test_two_layers_equal_speculators(tmp_path, rng, arch):
    """A second decoder layer needs every position of the first; same logits again."""
    model = speculators_draft(arch=arch, layers=2, norm_before_residual=True)
    model.save_pretrained(tmp_path / "draft")
    captures, tensors = captures_on_disk(tmp_path, rng)
    draft = load_draft(tmp_path / "draft")
    ours = DraftForward(draft).predict(
        captures, draft.contract.change(taps=TAPS[:3]), depths=3, positions="all", keep_logits=True
    )
    theirs = torch.cat([speculators_logits(model, t, [0, 1, 2], 3) for t in tensors])
    assert (ours.logits - theirs).abs().max() < 1e-4 * theirs.abs().max()


ROPES = {
    "linear": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 4.0},
    "llama3": {
        "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
    },
    "yarn": {
        "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}  # fmt: skip


@pytest.mark.speculators
@pytest.mark.parametrize("kind", ROPES)
def test_rope_variants_equal_speculators(tmp_path, rng, kind):
    """Rotary variants, with the parameters read back from the saved config."""
    model = speculators_draft(rope=ROPES[kind])
    model.save_pretrained(tmp_path / "draft")
    captures, tensors = captures_on_disk(tmp_path, rng)
    draft = load_draft(tmp_path / "draft")
    assert draft.contract.rope.kind == kind
    contract = draft.contract.change(taps=TAPS[:3])
    ours = DraftForward(draft).predict(captures, contract, depths=2, positions="all", keep_logits=True)
    theirs = torch.cat([speculators_logits(model, t, [0, 1, 2], 2) for t in tensors])
    assert (ours.logits - theirs).abs().max() < 1e-4 * theirs.abs().max()
    plain = contract.change(rope=type(contract.rope)(theta=contract.rope.theta))
    other = DraftForward(draft).predict(captures, plain, positions="all", keep_logits=True)
    assert (other.logits[:, 0] - theirs[:, 0]).abs().max() > 1e-3, "the variant changed nothing"
