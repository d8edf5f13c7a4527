"""The draft forward on tiny random drafts: batching, a naive reference, and every contract switch."""

from __future__ import annotations

import itertools
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

import lib.attention
import lib.draft
from lib.attention import Stack
from lib.captures import open_capture
from lib.checkpoints import load_draft
from lib.contract import Rope
from lib.draft import DraftForward, rms_norm, to_device
from lib.engine_draft import refuse
from lib.errors import ContractError, EngineError
from tests.support import random_capture_tensors, speculators_draft, write_legacy

TAPS = ("embed", "layer3", "layer4", "layer6")
LENGTHS = (2, 3, 9, 30, 31, 64)


def make_captures(lengths, seed=0):
    """Made-up conversations of these lengths, read from the trainer's own file format."""
    rng = torch.Generator().manual_seed(seed)
    with tempfile.TemporaryDirectory() as folder:
        files = [
            write_legacy(Path(folder) / f"data_{i}.pt", random_capture_tensors(n, rng))
            for i, n in enumerate(lengths)
        ]
        return [open_capture(f, taps=TAPS) for f in files]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("draft")
    speculators_draft().save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def draft(folder):
    """In float64: what differs then is wiring, not rounding."""
    loaded = load_draft(folder, dtype=torch.float64)
    return replace(loaded, contract=loaded.contract.change(taps=TAPS[:3]))


@pytest.fixture(scope="module")
def forward(draft):
    return DraftForward(draft)


@pytest.fixture(scope="module")
def captures():
    return make_captures(LENGTHS)


def logits(forward, captures, depths=1, draft=None, **changes):
    """(S, depths, Vd) at all positions, under the declared contract with some fields changed."""
    forward = DraftForward(draft) if draft is not None else forward
    contract = forward.draft.contract.change(**changes)
    return forward.predict(captures, contract, depths=depths, positions="all", keep_logits=True).logits


def same(a, b, tolerance=1e-9):
    return (a - b).abs().max().item() <= tolerance * b.abs().max().item()


# ---- batching -------------------------------------------------------------------------------------


@settings(max_examples=12, deadline=None, derandomize=True)
@given(
    lengths=st.lists(st.integers(2, 120), min_size=1, max_size=6),
    batch_pairs=st.integers(1, 400),
    positions=st.sampled_from(["all", "scored"]),
)
def test_batching_changes_nothing(forward, lengths, batch_pairs, positions):
    """Neighbours in a batch, their lengths and the batch size leave no trace in a prediction."""
    captures = make_captures([*lengths, 7], seed=sum(lengths))
    options = {"depths": 3, "positions": positions, "keep_logits": True}
    together = forward.predict(captures, batch_pairs=batch_pairs, **options)
    for i, capture in enumerate(captures):
        mine = together.capture == i
        if positions == "scored" and not len(capture.scored):
            assert not mine.any()
            continue
        alone = forward.predict([capture], **options)
        assert torch.equal(together.position[mine], alone.position)
        assert torch.equal(together.draft_ids[mine], alone.draft_ids)
        assert torch.equal(together.truth[mine], alone.truth)
        assert same(together.logits[mine], alone.logits)


def test_scored_positions_are_rows_of_all(forward, captures):
    """`scored` leaves rows out and changes none; the rows are those before an assistant token."""
    every = forward.predict(captures, depths=3, positions="all")
    some = forward.predict(captures, depths=3)
    row = {
        pair: i for i, pair in enumerate(zip(every.capture.tolist(), every.position.tolist(), strict=True))
    }
    at = [row[pair] for pair in zip(some.capture.tolist(), some.position.tolist(), strict=True)]
    assert 0 < len(at) < len(row) and len(row) == sum(n - 1 for n in LENGTHS)
    for column in ("draft_ids", "target_ids", "truth", "in_vocab"):
        assert torch.equal(getattr(some, column), getattr(every, column)[at]), column
    assert all(captures[c].loss_mask[t + 1] for c, t in zip(some.capture, some.position, strict=True))


def test_chunks_change_nothing(forward, captures, monkeypatch):
    """Logits one row at a time, and attention one capture at a time: the same ids."""
    options = {"depths": 3, "positions": "all"}
    whole = forward.predict(captures, **options).draft_ids
    monkeypatch.setattr(lib.draft, "LOGIT_BYTES", 1)
    monkeypatch.setattr(lib.draft, "SCORE_BYTES", 1)
    assert torch.equal(forward.predict(captures, **options).draft_ids, whole)


def test_texts_shorter_than_the_depth(forward):
    """Two tokens make one pair; its chain runs four deep past the end, where nothing can be right."""
    p = forward.predict(make_captures([2, 2]), depths=4, feed="own", positions="all")
    assert p.draft_ids.shape == (2, 4) and (p.truth == -1).all()
    assert not p.in_vocab.any() and not p.hit.any()


def test_nothing_scored_is_a_named_error(forward):
    """Two tokens leave no pair whose answer is known: said so, no crash in an empty `cat`."""
    with pytest.raises(ContractError, match=r"positions: expected at least one.*positions='all'"):
        forward.predict(make_captures([2]))


def test_24_orders_need_12_products(forward, captures):
    """`fc` is a sum over slots: 3 slots x 4 taps are all there is to multiply, in any order."""
    batch = next(forward.batches(captures))
    for taps in itertools.permutations(TAPS, 3):
        contract = forward.draft.contract.change(taps=taps)
        shared = forward.run(batch, contract, 2, "teacher", False)[2]
        fresh = forward.run(next(forward.batches(captures)), contract, 2, "teacher", False)[2]
        assert torch.equal(shared, fresh), f"{taps}: the cache holds another contract's product"
    assert len(batch.products) == 12 and len(batch.states) == 4


# ---- a naive reference ----------------------------------------------------------------------------


def naive_chain(draft, contract, capture, start, depths):
    """Drafted ids of one chain: one token, one head, one key at a time, as an engine would."""
    layer, heads, kv_heads, d = draft.layers[0], draft.heads, draft.kv_heads, draft.head_dim
    keys, values = [], []

    def norm(x, weight):
        return weight * x / (x.pow(2).mean() + draft.eps).sqrt()

    def turn(x, position):
        angle = position * contract.rope.theta ** (-torch.arange(0, d, 2).double() / d)
        a, b = x[: d // 2], x[d // 2 :]
        return torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()))

    def step(hidden, token, position):
        normed = norm(hidden, layer.hidden_norm)
        x = torch.cat((norm(draft.embed[token].double(), layer.input_layernorm), normed))
        keys.append([turn(k, position) for k in (layer.k @ x).view(kv_heads, d)])
        values.append((layer.v @ x).view(kv_heads, d))
        mixed = []
        for head, q in enumerate((layer.q @ x).view(heads, d)):
            group = head // (heads // kv_heads)
            scores = torch.stack([turn(q, position) @ k[group] for k in keys]) / d**0.5
            mixed.append(scores.softmax(0) @ torch.stack([v[group] for v in values]))
        residual = normed if contract.norm_before_residual else hidden
        x = residual + layer.o @ torch.cat(mixed)
        m = norm(x, layer.post_attention_layernorm)
        return x + layer.down @ (F.silu(layer.gate @ m) * (layer.up @ m))

    fused = [draft.fc @ g for g in torch.cat([capture.state(t) for t in contract.taps], -1).double()]
    for t in range(start + 1):
        hidden = step(fused[t], capture.token_ids[t + 1], 1 + t)
    ids = []
    for depth in range(depths):
        if depth:
            hidden = step(hidden, ids[-1] + draft.d2t[ids[-1]], 1 + start + depth)
        normed = norm(hidden, draft.norm)
        ids.append(int((draft.lm_head @ normed).argmax()))
        hidden = normed if contract.feedback == "post_norm" else hidden
    return ids


@pytest.mark.parametrize("before, feedback", [(False, "pre_norm"), (True, "post_norm")])
def test_own_rollouts_equal_one_chain_at_a_time(forward, before, feedback):
    """feed="own": all chains at once give what a drafting engine gives, one chain after another."""
    capture = make_captures([16], seed=3)[0]
    contract = forward.draft.contract.change(norm_before_residual=before, feedback=feedback)
    rolled = forward.predict([capture], contract, depths=4, feed="own", positions="all")
    naive = [naive_chain(forward.draft, contract, capture, t, 4) for t in range(15)]
    assert rolled.draft_ids.tolist() == naive
    taught = forward.predict([capture], contract, depths=4, positions="all")
    assert torch.equal(taught.draft_ids[:, 0], rolled.draft_ids[:, 0])
    assert not torch.equal(taught.draft_ids, rolled.draft_ids), "the feed made no difference"


# ---- every switch of the contract -----------------------------------------------------------------


def test_constant_position_offset_is_invisible(forward, captures):
    """Rotary attention sees differences of positions only: 0, 1 or 500 is all the same."""
    reference = logits(forward, captures, depths=3)
    for offset in (0, 500):
        assert same(logits(forward, captures, depths=3, position_offset=offset), reference)


@pytest.mark.parametrize("change", [{"position_step": 0}, {"position_step": 2}, {"feedback": "post_norm"}])
def test_faults_of_the_chain_spare_depth_0(forward, captures, change):
    """Position step and feedback act from the second draft token on: the first cannot reveal them."""
    right, wrong = logits(forward, captures, depths=2), logits(forward, captures, depths=2, **change)
    assert torch.equal(wrong[:, 0], right[:, 0])
    assert not same(wrong[:, 1], right[:, 1], 1e-3)


def test_head_norm_weighs_before_lm_head(draft, forward, captures):
    """Without weights the norm only rescales the logits of a position; its weights change the order."""
    plain = replace(draft, norm=torch.ones_like(draft.norm))
    normed, raw = (logits(None, captures, draft=plain, head_norm=on)[:, 0] for on in (True, False))
    scale = (normed * raw).sum(-1, keepdim=True) / raw.pow(2).sum(-1, keepdim=True)
    assert same(raw * scale, normed) and not same(raw, normed, 0.1)
    ids = [logits(forward, captures, head_norm=on).argmax(-1) for on in (True, False)]
    assert not torch.equal(*ids)


def test_norm_before_residual_is_what_the_residual_carries(draft, captures):
    """With attention and MLP silenced, the residual alone reaches lm_head: fused, or hidden_norm(fused)."""
    first = draft.layers[0]
    silent = replace(first, o=torch.zeros_like(first.o), down=torch.zeros_like(first.down))
    silenced = replace(draft, layers=(silent,))
    states = torch.cat([torch.cat([c.state(t)[:-1] for t in TAPS[:3]], -1) for c in captures])
    fused = states.double() @ draft.fc.T
    for before, residual in ((False, fused), (True, rms_norm(fused, first.hidden_norm, draft.eps))):
        by_hand = rms_norm(residual, draft.norm, draft.eps) @ draft.lm_head.T
        assert same(logits(None, captures, draft=silenced, norm_before_residual=before)[:, 0], by_hand)


def test_token_shift_0_is_shifting_the_tokens(forward, captures):
    """State t with token t, not t + 1: as if every token stood one place later."""
    late = [replace(c, token_ids=c.token_ids.roll(1)) for c in captures]
    assert same(logits(forward, captures, token_shift=0), logits(forward, late))
    assert not same(logits(forward, captures), logits(forward, late), 1e-3)


def test_bypassed_fc_takes_the_last_slot(draft, forward, captures):
    """use_fc=False is an `fc` that copies its last slot and drops the others."""
    eye = torch.eye(draft.hidden_size, dtype=torch.float64)
    copying = replace(draft, fc=torch.cat((0 * eye, 0 * eye, eye), 1))
    assert same(logits(forward, captures, use_fc=False), logits(None, captures, draft=copying))


def test_a_draft_without_fc_and_hidden_norm(draft, captures):
    """Such a draft takes the state itself: as if normed already, where its own norm would change nothing."""
    first = draft.layers[0]
    bare = replace(draft, fc=None, eps=0.0, contract=draft.contract.change(use_fc=False, taps=TAPS[2:3]))
    plain = replace(bare, layers=(replace(first, hidden_norm=None),))
    unit = replace(bare, layers=(replace(first, hidden_norm=torch.ones_like(first.hidden_norm)),))

    def by_hand(x):
        return x.double() / x.double().pow(2).mean(-1, keepdim=True).sqrt()

    normed = [c.with_states(by_hand) for c in captures]
    reference = logits(None, captures, depths=1, draft=unit, norm_before_residual=True)
    for before in (False, True):
        assert same(logits(None, normed, depths=1, draft=plain, norm_before_residual=before), reference)
    assert not same(logits(None, captures, depths=1, draft=plain), reference, 1e-3)
    deeper = logits(None, normed, depths=3, draft=plain)
    assert deeper.isfinite().all() and same(deeper[:, 0], reference[:, 0])
    with_fc = replace(bare, fc=draft.fc)  # the bypass of a draft that has one is the same forward
    assert torch.equal(logits(None, captures, draft=with_fc), logits(None, captures, draft=bare))
    with pytest.raises(ContractError, match=r"fc.weight: expected 1 slots.*found 0 inputs"):
        logits(None, captures, draft=bare, use_fc=True)
    with pytest.raises(EngineError, match=r"hidden_norm: expected a norm on the states.*found none"):
        refuse(plain, plain.contract)  # vLLM would leave the norm it makes uninitialised


def test_vocab_map_modes(forward, captures):
    """The same draft id i means i + d2t[i], d2t[i] or i; depth 0 draft ids do not depend on it."""
    contract, d2t = forward.draft.contract, forward.draft.d2t
    out = {
        mode: forward.predict(captures, contract.change(vocab_map=mode), positions="all")
        for mode in ("offset", "absolute", "identity")
    }
    ids = out["offset"].draft_ids
    assert all(torch.equal(p.draft_ids, ids) for p in out.values())
    assert torch.equal(out["offset"].target_ids, ids + d2t[ids])
    assert torch.equal(out["absolute"].target_ids, d2t[ids])
    assert torch.equal(out["identity"].target_ids, ids)


def test_embed_scale_hides_behind_input_layernorm(draft, forward, captures):
    """RMSNorm divides any factor out again, up to its eps: Gemma's lost sqrt(H) is invisible here."""
    reference = logits(forward, captures)
    gap = (logits(forward, captures, embed_scale=50.0) - reference).abs().max() / reference.abs().max()
    assert 0 < gap < 1e-3
    exact = replace(draft, eps=0.0)
    assert same(logits(None, captures, draft=exact, embed_scale=50.0), logits(None, captures, draft=exact))


def test_max_position_clamps_the_far_end(forward, captures):
    """Pairs stand at t + 1; from max_position - 1 on all stand at the same place."""
    reference, clamped = logits(forward, captures), logits(forward, captures, max_position=8)
    time = forward.predict(captures, positions="all").position
    assert same(clamped[time + 1 <= 7], reference[time + 1 <= 7])
    assert not same(clamped[time + 1 > 8], reference[time + 1 > 8], 1e-3)
    assert same(logits(forward, captures, max_position=999), reference)


def test_interleaved_rope_is_a_permutation_of_q_and_k(draft, forward, captures):
    """GPT-J pairs (0,1),(2,3).. are NeoX halves with the rows of q and k reordered in every head."""
    d, layer = draft.head_dim, draft.layers[0]
    perm = torch.arange(d).view(2, d // 2).T.flatten()  # 0, d/2, 1, d/2 + 1, ...

    def reorder(weight):
        return weight.unflatten(0, (-1, d))[:, perm].flatten(0, 1)

    twin = replace(draft, layers=(replace(layer, q=reorder(layer.q), k=reorder(layer.k)),))
    rope = replace(draft.contract.rope, interleaved=True)
    reference = logits(forward, captures, depths=2)
    assert same(logits(None, captures, depths=2, draft=twin, rope=rope), reference)
    assert not same(logits(forward, captures, depths=2, rope=rope), reference, 1e-3)


def test_rope_theta_shows_from_the_second_pair_on(forward, captures):
    """The first pair attends to itself alone, whatever the angle; all others feel theta."""
    reference, other = logits(forward, captures), logits(forward, captures, rope=Rope(theta=50.0))
    first = forward.predict(captures, positions="all").position == 0
    assert same(other[first], reference[first])
    assert not same(other[~first], reference[~first], 1e-3)


# ---- precision and devices ------------------------------------------------------------------------


def test_bf16_agrees_on_most_positions(folder, captures):
    """bf16 runs through the same code; a random draft's near-ties flip, the rest stays."""
    out = {}
    for dtype in (torch.float32, torch.bfloat16):
        forward = DraftForward(load_draft(folder, dtype=dtype))
        contract = forward.draft.contract.change(taps=TAPS[:3])
        out[dtype] = forward.predict(captures, contract, depths=3, positions="all", keep_logits=True)
    assert out[torch.bfloat16].logits.dtype == torch.bfloat16
    agree = (out[torch.bfloat16].draft_ids == out[torch.float32].draft_ids).double().mean()
    assert agree > 0.9, f"{agree:.2f}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layers", [1, 2])
def test_weights_stay_where_they_are(tmp_path, captures, monkeypatch, dtype, layers):
    """Past `COPY_BYTES` no weight is copied, so mapped weights stay mapped; the numbers are the same."""
    speculators_draft(layers=layers).save_pretrained(tmp_path)
    draft = load_draft(tmp_path, dtype=dtype)
    draft = replace(draft, contract=draft.contract.change(taps=TAPS[:3]))
    joined = DraftForward(draft)
    monkeypatch.setattr(lib.attention, "COPY_BYTES", 0)
    apart = DraftForward(draft)
    owned = {
        w.untyped_storage().data_ptr()
        for layer in draft.layers
        for w in vars(layer).values()
        if w is not None
    }
    stacks = [s for a in apart.attention for s in vars(a).values() if isinstance(s, Stack)] + apart.gate_up
    assert len(stacks) == 5 + 3 * (layers - 1)
    for stack in stacks:
        assert all(w.untyped_storage().data_ptr() in owned for w in stack.weights)
    assert any(len(s.weights) == 1 for s in joined.gate_up), "nothing is joined: the comparison is empty"
    predicted = [
        f.predict(captures, depths=3, positions="all", keep_logits=True).logits for f in (joined, apart)
    ]
    assert same(*predicted, {torch.float32: 1e-5, torch.bfloat16: 0.05}[dtype])


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available(), reason="no CUDA device: `pytest -m gpu` where there is one"
)
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-4), (torch.float64, 1e-9)])
def test_cuda_equals_cpu(draft, captures, dtype, tolerance):
    """The same code on the GPU, own and teacher feed, within rounding of the CPU."""
    for feed in ("teacher", "own"):
        p = {
            device: DraftForward(to_device(draft, device, dtype)).predict(
                captures, depths=3, feed=feed, positions="all", keep_logits=True
            )
            for device in ("cpu", "cuda")
        }
        assert same(p["cuda"].logits[:, 0].cpu(), p["cpu"].logits[:, 0], tolerance)
        assert (p["cuda"].draft_ids == p["cpu"].draft_ids).double().mean() > 0.99
