"""Latent attention (DeepSeek, Kimi) in a draft: against transformers' own module, at every depth."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from math import prod
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import (
    DeepseekV3Attention,
    DeepseekV3RotaryEmbedding,
)

from bench import kimi
from lib.attention import Layout, attentions
from lib.checkpoints import Draft, load_draft
from lib.contract import Rope
from lib.draft import DraftForward, rms_norm, to_device
from lib.engine_draft import write_draft
from lib.errors import CheckpointError, EngineError
from lib.mla import read_latent
from lib.rope import latent_factor, rope_table
from tests.support import HIDDEN, speculators_draft
from tests.test_draft import TAPS, make_captures, same

HEADS, NOPE, ROTARY, VALUE, KV_RANK, RANK = 4, 8, 6, 10, 12, 20
YARN = {"factor": 4.0, "original_max_position_embeddings": 16.0, "beta_fast": 4.0, "beta_slow": 1.0}
ROPES = {
    "default": Rope(theta=50.0, interleaved=True),
    "halves": Rope(theta=50.0),
    "yarn": Rope(50.0, "yarn", tuple(sorted(YARN.items())), interleaved=True),
    "yarn, mscale": Rope(
        50.0, "yarn", tuple(sorted({**YARN, "mscale": 1.0, "mscale_all_dim": 0.5}.items())), interleaved=True
    ),
}


def their_module(width: int, rope: Rope, rng, *, rank: int | None = RANK, bias: bool = False, value=VALUE):
    """transformers' attention with random weights; an input of another width as EAGLE-3's first layer has."""
    config = DeepseekV3Config(
        hidden_size=HIDDEN, num_attention_heads=HEADS, num_key_value_heads=HEADS, q_lora_rank=rank,
        kv_lora_rank=KV_RANK, qk_nope_head_dim=NOPE, qk_rope_head_dim=ROTARY, v_head_dim=value,
        attention_bias=bias, rope_interleave=rope.interleaved, max_position_embeddings=64,
        rope_parameters={"rope_type": rope.kind, "rope_theta": rope.theta, **dict(rope.params)},
    )  # fmt: skip
    config._attn_implementation = "sdpa"  # "eager" has its softmax in fp32
    module = DeepseekV3Attention(config, 0)
    for name in ("q_a_proj" if rank else "q_proj", "kv_a_proj_with_mqa"):
        old = getattr(module, name)
        setattr(module, name, nn.Linear(width, old.out_features, bias=old.bias is not None))
    # Theirs have statistics in fp32 and eps 1e-6 whatever the config says; TorchSpec's and vLLM's do not.
    module.kv_a_layernorm = nn.RMSNorm(KV_RANK, eps=1e-5)
    module.q_a_layernorm = nn.RMSNorm(rank, eps=1e-5) if rank else None
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            noise = torch.randn(parameter.shape, generator=rng)
            parameter.copy_(1 + 0.3 * noise if "layernorm" in name else 0.25 * noise)
    return module.double(), DeepseekV3RotaryEmbedding(config)


def cos_sin(rotary, n: int, dtype=torch.float64):
    """(1, n, dr) each for positions 1..n, in this precision from the module's own frequencies and factor."""
    angles = (torch.arange(n, dtype=torch.float64) + 1)[:, None] * rotary.inv_freq.double()
    both = torch.cat((angles, angles), -1)[None]
    return [(f(both) * rotary.attention_scaling).to(dtype) for f in (torch.cos, torch.sin)]


def latent_layer(layer, module, width: int):
    """A draft's layer with the module's weights in place of q, k, v and o, read by name and shape."""
    stored = {f"self_attn.{name}": p.detach() for name, p in module.named_parameters()}
    sizes = {
        "q_lora_rank": module.q_lora_rank, "kv_lora_rank": KV_RANK, "qk_nope_head_dim": NOPE,
        "qk_rope_head_dim": ROTARY, "v_head_dim": module.v_head_dim,
    }  # fmt: skip

    def take(name, *shape, required=True):
        if name not in stored and not required:
            return None
        assert all(s in (None, t) for s, t in zip(shape, stored[name].shape, strict=True)), name
        return stored[name]

    latent = read_latent(take, lambda key, default=None: sizes[key] or default, HEADS, width)
    return replace(
        layer, q=None, k=None, v=None, q_norm=None, k_norm=None, latent=latent,
        o=stored["self_attn.o_proj.weight"], o_bias=stored.get("self_attn.o_proj.bias"),
    )  # fmt: skip


def latent_draft(rope: Rope = ROPES["default"], layers: int = 1, seed: int = 0, **module):
    """A random draft with latent attention in float64, and per layer their module and its rotary."""
    rng = torch.Generator().manual_seed(seed)
    with tempfile.TemporaryDirectory() as folder:
        speculators_draft(layers=layers).save_pretrained(folder)
        base = load_draft(folder, dtype=torch.float64)
    widths = [2 * HIDDEN] + [HIDDEN] * (layers - 1)
    theirs = [their_module(width, rope, rng, **module) for width in widths]
    changed = [latent_layer(old, m, w) for old, (m, _), w in zip(base.layers, theirs, widths, strict=True)]
    return replace(base, layers=tuple(changed), contract=base.contract.change(rope=rope)), theirs


# ---- one attention --------------------------------------------------------------------------------


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("rank, bias, value", [(RANK, False, VALUE), (None, False, 6), (RANK, True, 20)])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.float64, 1e-9)])
def test_attention_is_transformers(rng, rope, rank, bias, value, dtype, tolerance):
    """The halves' products added up, heads and softmax: the numbers of DeepseekV3Attention over cat(e, h).

    With value heads smaller and larger than key heads, with and without a query latent.
    """
    draft, [(module, rotary)] = latent_draft(ROPES[rope], rank=rank, bias=bias, value=value)
    embeds, hidden = (torch.randn(30, HIDDEN, generator=rng, dtype=torch.float64) for _ in range(2))
    mask = torch.full((30, 30), float("-inf"), dtype=torch.float64).triu(1)[None, None]
    with torch.no_grad():
        expected = module(torch.cat((embeds, hidden), -1)[None], cos_sin(rotary, 30), mask)[0][0]

    draft, embeds, hidden = to_device(draft, "cpu", dtype), embeds.to(dtype), hidden.to(dtype)
    [ours] = attentions(draft)
    table = rope_table(ROPES[rope], ours.rotary, torch.arange(1, 31), dtype)
    q = ours.q_embed(embeds) + ours.q_hidden(hidden)
    q, k, v = ours(q, ours.kv_embed(embeds) + ours.kv_hidden(hidden), table, None, ROPES[rope].interleaved)
    every = Layout(torch.tensor([30]), torch.tensor([30]), torch.arange(30), torch.arange(30))
    mixed = every.causal(q, k, v, ours.scale(ROPES[rope])) @ draft.layers[0].o.T
    found = mixed if draft.layers[0].o_bias is None else mixed + draft.layers[0].o_bias
    assert same(found.double(), expected, tolerance)
    assert q.shape == (30, HEADS, NOPE + ROTARY) and v.shape == (30, HEADS, value)


# ---- the whole draft, one chain at a time ---------------------------------------------------------


def one_chain(draft: Draft, theirs, contract, capture, start: int, depths: int, feed: str):
    """(depths, Vd) logits of one chain: everything from the first pair anew for every token, as text."""
    weights, eps = draft.layers, draft.eps
    fused = torch.cat([capture.state(t) for t in contract.taps], -1).double() @ draft.fc.T
    tokens, hidden, logits = capture.token_ids[1 : start + 2].tolist(), fused[: start + 1], []
    for depth in range(depths):
        n = len(tokens)
        mask = torch.full((n, n), float("-inf"), dtype=torch.float64).triu(1)[None, None]
        embeds = rms_norm(draft.embed[torch.tensor(tokens)].double(), weights[0].input_layernorm, eps)
        normed = rms_norm(hidden, weights[0].hidden_norm, eps)
        x, wide = normed if contract.norm_before_residual else hidden, torch.cat((embeds, normed), -1)
        for i, (layer, (module, rotary)) in enumerate(zip(weights, theirs, strict=True)):
            if i:
                wide = rms_norm(x, layer.input_layernorm, eps)
            x = x + module(wide[None], cos_sin(rotary, n), mask)[0][0]
            m = rms_norm(x, layer.post_attention_layernorm, eps)
            x = x + (F.silu(m @ layer.gate.T) * (m @ layer.up.T)) @ layer.down.T
        normed = rms_norm(x[-1:], draft.norm, eps)
        logits.append((normed @ draft.lm_head.T)[0])
        best = logits[-1].argmax()
        following = start + 2 + depth
        own = feed == "own" or following >= len(capture)
        tokens.append(int(best + draft.d2t[best]) if own else int(capture.token_ids[following]))
        hidden = torch.cat((hidden, normed if contract.feedback == "post_norm" else x[-1:]))
    return torch.stack(logits)


@torch.no_grad()
@pytest.mark.parametrize("feed", ["own", "teacher"])
@pytest.mark.parametrize(
    "rope, layers, change",
    [
        ("default", 1, {}),
        ("yarn, mscale", 1, {"norm_before_residual": True}),
        ("yarn", 2, {"feedback": "post_norm"}),
    ],
)
def test_chains_are_transformers_one_at_a_time(feed, rope, layers, change):
    """Depths 0 to 3 of every chain, all at once here; there one text per chain through their modules."""
    draft, theirs = latent_draft(ROPES[rope], layers)
    capture, contract = make_captures([11], seed=3)[0], draft.contract.change(taps=TAPS[:3], **change)
    p = DraftForward(draft).predict(
        [capture], contract, depths=4, feed=feed, positions="all", keep_logits=True
    )
    for t in range(10):
        known = 4 if feed == "own" else min(4, 10 - t)  # past the end of the text a teacher says nothing
        expected = one_chain(draft, theirs, contract, capture, t, known, feed)
        assert same(p.logits[t, :known], expected), f"chain from position {t}"


def test_batches_rows_and_chunks_change_nothing(monkeypatch):
    """Neighbours, scored rows alone, one row of scores or logits at a time: the same predictions."""
    draft, _ = latent_draft(layers=2)
    forward = DraftForward(replace(draft, contract=draft.contract.change(taps=TAPS[:3])))
    captures = make_captures([5, 30, 17])
    every = forward.predict(captures, depths=3, positions="all", keep_logits=True)
    some = forward.predict(captures, depths=3, keep_logits=True)
    pairs = list(zip(every.capture.tolist(), every.position.tolist(), strict=True))
    at = [pairs.index(pair) for pair in zip(some.capture.tolist(), some.position.tolist(), strict=True)]
    assert 0 < len(at) < len(pairs) and same(some.logits, every.logits[at])
    for i, capture in enumerate(captures):
        alone = forward.predict([capture], depths=3, positions="all", keep_logits=True)
        assert same(alone.logits, every.logits[every.capture == i])
    for limit in ("LOGIT_BYTES", "SCORE_BYTES"):
        monkeypatch.setattr(f"lib.draft.{limit}", 1)
    monkeypatch.setattr("lib.attention.COPY_BYTES", 0)  # no weight is copied: views throughout
    apart = DraftForward(forward.draft).predict(captures, depths=3, positions="all", keep_logits=True)
    assert same(apart.logits, every.logits)


@pytest.mark.parametrize(
    "wrong",
    [{"interleaved": False}, {"params": ROPES["yarn"].params}, {"theta": 60.0}],
    ids=["halves", "no mscale", "theta"],
)
def test_rotary_settings_matter(wrong):
    """The tests above are earned: each setting of the rotary part changes the logits."""
    rope = ROPES["yarn, mscale"]
    draft, _ = latent_draft(rope)
    forward, captures = DraftForward(draft), make_captures([30])
    right, other = (
        forward.predict(
            captures, draft.contract.change(taps=TAPS[:3], rope=r), positions="all", keep_logits=True
        ).logits
        for r in (rope, replace(rope, **wrong))
    )
    assert not same(other[1:], right[1:], 1e-4)
    assert same(other[:1], right[:1]), "the first pair sees itself alone, whatever the angle and scale"


def test_bf16_agrees_on_most_positions():
    """The same code in bf16; a random draft's near-ties flip, the rest stays."""
    draft, _ = latent_draft(layers=2)
    captures, out = make_captures([64, 64]), {}
    for dtype in (torch.float64, torch.bfloat16):
        moved = to_device(draft, "cpu", dtype)
        assert moved.layers[1].latent.kv_b.dtype == moved.layers[0].latent.q_a_norm.dtype == dtype
        contract = draft.contract.change(taps=TAPS[:3])
        out[dtype] = DraftForward(moved).predict(captures, contract, depths=3, positions="all")
    agree = (out[torch.bfloat16].draft_ids == out[torch.float64].draft_ids).double().mean()
    assert agree > 0.8, f"{agree:.2f}"


# ---- as bench/kimi.py measures it -----------------------------------------------------------------


@pytest.mark.parametrize("kind", kimi.KINDS)
def test_the_kimi_benchmark_at_a_small_size(tmp_path, kind):
    """Its writer, our reader in the stored bf16, its evaluation: the same code at hidden size 64."""
    sizes = kimi.Sizes(
        hidden=64, vocab=300, draft_vocab=90, heads=4, head=16, rotary=8, rank=24, kv_rank=12,
        inner=(96, 128), tokens=40,
    )  # fmt: skip
    folder, path = kimi.write(tmp_path / kind, kind, sizes), kimi.write_capture(tmp_path, sizes)
    written = (folder / "model.safetensors.index.json").stat().st_mtime_ns
    found = kimi.measure(folder, path, 5)
    shapes = {n: s for shard in sizes.shapes(kind).values() for n, s in shard.items()}
    table = shapes.pop("embed_tokens.weight")
    maps = 8 * 90 + 300  # d2t in int64, t2d in bytes
    assert found["used"] == sum(2 * prod(shape) for shape in shapes.values()) + maps
    assert found["table"] == 2 * prod(table) and 0 < found["table rows asked for"] < found["table"]
    assert found["table held"] > 0 and found["predictions"] == 29 * 5
    draft = load_draft(folder, dtype=None)
    assert draft.layers[0].gate.dtype == torch.bfloat16
    if kind == "latent":
        latent, rope = draft.layers[0].latent, draft.contract.rope
        assert (latent.nope, latent.rotary, latent.value) == (16, 8, 16) and draft.layers[0].q is None
        assert (
            rope.interleaved
            and rope.kind == "yarn"
            and latent_factor(rope) == pytest.approx(2.0047, abs=1e-4)
        )
    kimi.write(tmp_path / kind, kind, sizes)
    assert (folder / "model.safetensors.index.json").stat().st_mtime_ns == written, "written twice"


# ---- what does not fit ----------------------------------------------------------------------------


def test_layers_of_both_kinds_are_refused():
    """One contract has one rotary setting: a grouped and a latent layer are of different drafts."""
    latent, _ = latent_draft(layers=2)
    with tempfile.TemporaryDirectory() as folder:
        speculators_draft(layers=2).save_pretrained(folder)
        grouped = load_draft(folder, dtype=torch.float64)
    mixed = replace(latent, layers=(latent.layers[0], grouped.layers[1]))
    with pytest.raises(CheckpointError, match=r"self_attn: expected one kind.*'latent', 'grouped'"):
        DraftForward(mixed)


def test_no_folder_is_written_for_the_engine(tmp_path):
    """vLLM has a class for latent attention, but nothing here writes for it: said by name, no folder."""
    draft, _ = latent_draft()
    with pytest.raises(EngineError, match=r"self_attn: expected q, k and v.*multi-head latent attention"):
        write_draft(draft, draft.contract.change(taps=TAPS[:3]), Path(tmp_path) / "served")
    assert not (tmp_path / "served").exists()
