"""Peers of the draft forward: speculators' model, SpecForge's, and the bare matrix products.

Both models are their frameworks' own classes around the very weight tensors of a loaded draft, so that
two of Kimi's size fit in memory. One capture a call: their eager attention builds a dense mask, so longer
packs cost them more, not less. What a peer predicts is checked against ours before anything is timed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from lib.captures import Capture
from lib.checkpoints import Draft
from lib.draft import Batch, DraftForward
from lib.taps import Tap

LAYER = {
    "self_attn.q_proj": "q", "self_attn.k_proj": "k", "self_attn.v_proj": "v", "self_attn.o_proj": "o",
    "mlp.gate_proj": "gate", "mlp.up_proj": "up", "mlp.down_proj": "down",
    "input_layernorm": "input_layernorm", "hidden_norm": "hidden_norm",
    "post_attention_layernorm": "post_attention_layernorm",
}  # fmt: skip


def llama_config(draft: Draft, **more):
    """transformers' config of the draft's one layer."""
    from transformers import LlamaConfig

    rope = draft.contract.rope
    assert rope.kind == "default" and len(draft.layers) == 1, "only what the benches have is translated"
    return LlamaConfig(
        vocab_size=draft.target_vocab,
        hidden_size=draft.hidden_size,
        intermediate_size=draft.layers[0].gate.shape[0],
        num_hidden_layers=1,
        num_attention_heads=draft.heads,
        num_key_value_heads=draft.kv_heads,
        head_dim=draft.head_dim,
        rms_norm_eps=draft.eps,
        rope_parameters={"rope_type": "default", "rope_theta": rope.theta},
        max_position_embeddings=4096,
        pad_token_id=None,
        **more,
    )


def fill(model, draft: Draft, layer: str):
    """Put the draft's tensors, not copies, into a model built on the meta device; `layer` is a prefix."""
    weights = {"embed_tokens": draft.embed, "fc": draft.fc, "norm": draft.norm, "lm_head": draft.lm_head}
    weights |= {f"{layer}.{name}": getattr(draft.layers[0], field) for name, field in LAYER.items()}
    tensors = {f"{name}.weight": tensor for name, tensor in weights.items()}
    left = model.load_state_dict(tensors | {"d2t": draft.d2t, "t2d": draft.t2d}, strict=False, assign=True)
    assert not left.unexpected_keys and all("verifier" in k for k in left.missing_keys), left
    return model.eval()


def speculators_model(draft: Draft):
    """The draft in speculators' `Eagle3DraftModel`, with sdpa attention: faster here than eager."""
    from speculators.config import SpeculatorsConfig, VerifierConfig
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig

    layer = llama_config(draft)
    layer._attn_implementation = "sdpa"
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=layer,
        draft_vocab_size=draft.draft_vocab,
        norm_before_residual=draft.contract.norm_before_residual,
        eagle_aux_hidden_state_layer_ids=[1, 2, 3],  # their number counts, not what they are
        speculators_config=SpeculatorsConfig(
            algorithm="eagle3",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=3)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=None, architectures=[]),
        ),
    )
    with torch.device("meta"):
        model = Eagle3DraftModel(config)
    model.rotary_emb = type(model.rotary_emb)(model.rotary_emb.config)  # its tables are no weights
    return fill(model, draft, "layers.0")


def speculators_batches(captures: Sequence[Capture], taps: Sequence[Tap], dtype: torch.dtype) -> list[dict]:
    """What its `forward` takes, one capture each, paired by its own `shift_batch`."""
    from speculators.models.eagle3.data import shift_batch

    batches = []
    for capture in captures:
        n = len(capture)
        states = torch.cat([capture.state(t) for t in taps], -1).to(dtype)
        batch = shift_batch(
            {
                "input_ids": capture.token_ids,
                "hidden_states": states,
                "verifier_last_hidden_states": states[:, :1],
                "loss_mask": capture.loss_mask,
                "lengths": torch.tensor([n]),
                "position_ids": torch.arange(n),
            }
        )
        batches.append(
            {
                "hidden_states": batch["hidden_states"][None],
                "input_ids": batch["input_ids"][None],
                "document_ids": torch.zeros(1, n - 1, dtype=torch.long),
                "position_ids": batch["position_ids"][None],
            }
        )
    return batches


@torch.no_grad()
def speculators_pass(model, batches: Sequence[dict], depths: int = 1) -> Tensor:
    """(N, depths) draft ids, the text's own tokens fed: its training-time test."""
    return torch.cat([torch.cat(model(**batch, ttt_steps=depths)).T for batch in batches])


@torch.no_grad()
def specforge_pass(model, batches: Sequence[dict], depths: int = 1) -> Tensor:
    """The same from SpecForge's model, the loop as its trainer has it (`core/eagle3.py`)."""
    found = []
    for batch in batches:
        ids, position_ids = batch["input_ids"], batch["position_ids"] - 1  # it counts from 0
        hidden = model.project_hidden_states(batch["hidden_states"])  # (1, n, H)
        # One step needs no cache, and then takes torch's causal attention in place of a dense mask.
        cache, mask, steps = None, None, []
        if depths > 1:
            ones = torch.ones_like(ids, dtype=torch.bool)
            cache, mask = [[], []], model.prepare_decoder_attention_mask(ones, hidden, 1, ids.shape[1], 0)
        for _ in range(depths):
            hidden = model.backbone(model.embed_input_ids(ids), hidden, cache, mask, position_ids)
            steps.append(model.compute_logits(hidden).argmax(-1)[0])
            ids = torch.nn.functional.pad(ids[:, 1:], (0, 1))
        found.append(torch.stack(steps, 1))
    return torch.cat(found)


def floor_products(forward: DraftForward, batches: Iterable[Batch], depths: int = 1) -> list[tuple]:
    """The matrix products of one scoring pass as (input, weight) pairs, shapes as in these batches.

    Of the work that scoring needs only: at depth 0 keys, values and `fc` for every pair; queries, output
    projection, MLP and lm_head for scored pairs. A deeper step has new keys and values for those alone.
    """
    draft, layer = forward.draft, forward.draft.layers[0]
    first, work = forward.attention[0], []
    slots = forward.fc.chunk(draft.n_slots, 1)
    for batch in batches:
        n, s = int(batch.counts.sum()), int(batch.scored_counts.sum())
        shapes = [(n, slot) for slot in slots]
        for depth in range(depths):
            stacks = [(s if depth else n, first.kv_embed), (s if depth else n, first.kv_hidden)]
            stacks += [(s, first.q_embed), (s, first.q_hidden), (s, forward.gate_up[0])]
            shapes += [(rows, w) for rows, stack in stacks for w in stack.weights]
            shapes += [(s, layer.o), (s, layer.down), (s, draft.lm_head)]
        work += [(torch.randn(rows, w.shape[1], device=w.device).to(w.dtype), w) for rows, w in shapes]
    return work


def multiply(work: Sequence[tuple]) -> None:
    """Do them, one after another."""
    for x, w in work:
        x @ w.T
