"""A draft under a contract, written as vLLM reads it: what its config can say, and what its weights must.

What vLLM 0.32 makes of each field of a contract, and how `write_draft` gets it there:

| field | vLLM | here |
|---|---|---|
| taps | ids as boundaries, sorted, repeats dropped | columns of `fc` permuted; repeats summed |
| norm_before_residual, feedback | flag of the config | written |
| fc_input_norm | flags `norm_before_fc`, `fc_norm` | written, tensors kept or dropped |
| use_fc=False | would feed the state *after* the final norm | `fc` = identity on the last slot's tap |
| head_norm=False | always norms | norm weight 1: same choice, logits scaled per position |
| rope | `rope_parameters`; halves only | written; interleaved: rows of q and k permuted |
| latent attention | `deepseek_eagle3.py`, a config and rotary rules of its own | EngineError: not written |
| vocab_map | offsets, scattered into the target's logits | `d2t` rewritten |
| embed_scale | none | the embedding table is written scaled |
| position_offset | 0 | any constant: rotary attention sees differences only |
| token_shift, position_step, max_position | 1, 1, none | anything else is an EngineError |

Axes: H draft hidden, Ht target hidden, V target vocabulary, Vd draft vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from lib.checkpoints import Draft, Layer, load_draft
from lib.contract import Contract, diff
from lib.errors import EngineError
from lib.taps import Tap
from lib.target_head import TargetHead

# Layer field -> its name in a checkpoint.
LAYER_NAMES = {
    "q": "self_attn.q_proj.weight",
    "k": "self_attn.k_proj.weight",
    "v": "self_attn.v_proj.weight",
    "o": "self_attn.o_proj.weight",
    "q_bias": "self_attn.q_proj.bias",
    "k_bias": "self_attn.k_proj.bias",
    "v_bias": "self_attn.v_proj.bias",
    "o_bias": "self_attn.o_proj.bias",
    "q_norm": "self_attn.q_norm.weight",
    "k_norm": "self_attn.k_norm.weight",
    "gate": "mlp.gate_proj.weight",
    "up": "mlp.up_proj.weight",
    "down": "mlp.down_proj.weight",
    "input_layernorm": "input_layernorm.weight",
    "post_attention_layernorm": "post_attention_layernorm.weight",
    "hidden_norm": "hidden_norm.weight",
}
BIASES = ("q_bias", "k_bias", "v_bias", "o_bias")


def write_draft(draft: Draft, contract: Contract, folder: Path) -> Path:
    """Write the draft folder with which vLLM does what `contract` says; return the folder.

    vLLM takes `eagle_aux_hidden_state_layer_ids` as boundaries (Tap(k) is k) but sorts them and drops
    repeats: the *order* of taps cannot be configured. A contract in another order is realised by
    permuting the column blocks of `fc`, and a repeated tap by adding up its blocks, which is the same
    sum. The table in the module's docstring has the other fields.

    With `vocab_map="absolute"` several draft ids can mean one target id; vLLM then keeps the logit of
    one of them, where an engine that maps after choosing keeps the largest.

    The folder is read back and compared. Raises EngineError for a field vLLM cannot express.
    """
    refuse(draft, contract)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.contiguous() for name, tensor in _tensors(draft, contract).items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(_config(draft, contract, tensors), indent=2) + "\n")
    _read_back(draft, as_served(draft, contract), folder)
    return folder


def as_served(draft: Draft, contract: Contract) -> Contract:
    """The contract that `write_draft` declares: same predictions, in terms that vLLM has."""
    mapped = draft.d2t is not None and draft.draft_vocab < draft.target_vocab
    return replace(
        contract,
        taps=tuple(sorted(set(contract.taps))) if contract.use_fc else contract.taps[-1:],
        fc_input_norm=contract.fc_input_norm if contract.use_fc else "none",
        use_fc=True,
        head_norm=True,
        rope=replace(contract.rope, interleaved=False),
        position_offset=Contract.position_offset,
        vocab_map="offset" if mapped else "identity",
        embed_scale=1.0,
    )


def refuse(draft: Draft, contract: Contract) -> None:
    """Raise EngineError for the first field that neither a config nor a weight can express."""
    repeats = contract.use_fc and len(set(contract.taps)) < len(contract.taps)
    norms = {"none": True, "input_norm": draft.input_norm is not None, "fc_norm": bool(draft.fc_norm)}
    needed = {
        "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
        "yarn": ("factor", "original_max_position_embeddings"),
        "linear": ("factor",),
    }.get(contract.rope.kind, ())
    lacking = sorted(set(needed) - {name for name, _ in contract.rope.params})
    layers = draft.layers
    if any(layer.latent is not None for layer in layers):
        # vLLM 0.32 has a class for it (deepseek_eagle3.py): always interleaved rotary, and every scaled
        # kind read as DeepSeek's yarn. Nobody has served a folder of ours with it, so none is written.
        raise EngineError(
            draft.path, "self_attn", expected="q, k and v projections (a Llama or Qwen3 draft)",
            found="multi-head latent attention (MLA, kv_a_proj_with_mqa)",
            remedy="evaluate this draft offline (lib.draft), or give vLLM the checkpoint as published",
        )  # fmt: skip
    qk_norms = [n for layer in layers for n in (layer.q_norm, layer.k_norm)]
    rules = (
        ("hidden_norm", layers[0].hidden_norm is not None, "a norm on the states", "none"),
        ("taps", all(isinstance(t, Tap) for t in contract.taps), "taps with names", contract.taps),
        ("taps", not repeats or contract.fc_input_norm == "none", "each tap once if normed", contract.taps),
        ("token_shift", contract.token_shift == 1, "1", contract.token_shift),
        ("position_step", contract.position_step == 1, "1", contract.position_step),
        ("max_position", contract.max_position is None, "none", contract.max_position),
        (
            "head_norm", contract.head_norm or contract.feedback == "pre_norm",
            "True where the normed state is fed back", contract.head_norm,
        ),
        ("fc_input_norm", norms[contract.fc_input_norm], "norm weights in the draft", contract.fc_input_norm),
        ("rope", not lacking, f"{contract.rope.kind} with {list(needed)}", f"no {lacking}"),
        ("use_fc", draft.fc is not None or not contract.use_fc, "a draft with fc", "none"),
        ("fc.bias", draft.fc_bias is None or not contract.use_fc, "no bias on fc", "one"),
        (
            "q_norm, k_norm", all(n is None for n in qk_norms) or all(n is not None for n in qk_norms),
            "both in every layer, or neither", "some of them",
        ),
        (
            "o_proj.bias", qk_norms[0] is None or all(layer.o_bias is None for layer in layers),
            "none beside q_norm and k_norm (Qwen3)", "one",
        ),
    )  # fmt: skip
    for field, fine, expected, found in rules:
        if not fine:
            raise EngineError(
                draft.path, field, expected=f"{expected}: all that vLLM can be told", found=str(found),
                remedy="evaluate this contract offline (lib.draft), or serve another one",
            )  # fmt: skip
    _target_ids(draft, contract)


def _target_ids(draft: Draft, contract: Contract) -> Tensor:
    """(Vd,) target id of each draft id under the contract, all of them inside the vocabulary."""
    ids = draft.to_target(torch.arange(draft.draft_vocab), contract.vocab_map)
    outside = int(((ids < 0) | (ids >= draft.target_vocab)).sum())
    same_size = draft.draft_vocab == draft.target_vocab
    if (contract.vocab_map != "identity" and draft.d2t is None and not same_size) or outside:
        raise EngineError(
            draft.path, "vocab_map", expected=f"target ids from 0 to {draft.target_vocab - 1}",
            found=f"{outside} outside under {contract.vocab_map!r}" if outside else "no d2t",
            remedy="vLLM would index outside its logits; choose another map (fault 20)",
        )  # fmt: skip
    if same_size and not torch.equal(ids, torch.arange(len(ids))):
        raise EngineError(
            draft.path, "vocab_map", expected="identity for a draft with the full vocabulary",
            found=repr(contract.vocab_map), remedy="vLLM ignores d2t there; evaluate it offline",
        )  # fmt: skip
    return ids


def _tensors(draft: Draft, contract: Contract) -> dict[str, Tensor]:
    """Every tensor of the written draft by its checkpoint name."""
    tensors = _fc(draft, contract)
    for i, layer in enumerate(_layers(draft, contract)):
        parts = {name: getattr(layer, field) for field, name in LAYER_NAMES.items()}
        tensors |= {f"layers.{i}.{name}": part for name, part in parts.items() if part is not None}
    # lm_head(h / rms) chooses what lm_head(h) chooses: one positive factor per position.
    tensors["norm.weight"] = draft.norm if contract.head_norm else torch.ones_like(draft.norm)
    if _owns(draft, "lm_head.weight"):
        tensors["lm_head.weight"] = draft.lm_head
    if _owns(draft, "embed_tokens.weight") or contract.embed_scale != 1:
        tensors["embed_tokens.weight"] = draft.embed.to(draft.norm.dtype) * contract.embed_scale
    if draft.draft_vocab < draft.target_vocab:
        ids = _target_ids(draft, contract)
        tensors["d2t"] = ids - torch.arange(draft.draft_vocab)
        tensors["t2d"] = torch.zeros(draft.target_vocab, dtype=torch.bool).index_fill_(0, ids, True)
    return tensors


def _owns(draft: Draft, name: str) -> bool:
    """Was the tensor in the draft's own files? If not, vLLM too takes the target's."""
    return any(stored.endswith(name) and fate == "used" for stored, fate in draft.keys.items())


def _fc(draft: Draft, contract: Contract) -> dict[str, Tensor]:
    """`fc` and the norms before it, slots in ascending order of their taps, one slot per tap."""
    if not contract.use_fc:
        return {"fc.weight": torch.eye(draft.hidden_size, dtype=draft.norm.dtype)}
    taps = contract.taps
    width = draft.fc.shape[1] // len(taps)
    blocks = draft.fc.split(width, dim=1)  # (H, Ht) per slot
    slots = {tap: [i for i, t in enumerate(taps) if t == tap] for tap in sorted(set(taps))}
    tensors = {"fc.weight": torch.cat([sum(blocks[i] for i in same) for same in slots.values()], 1)}
    order = [same[0] for same in slots.values()]  # norms go with distinct taps only, see refuse
    if contract.fc_input_norm == "input_norm":
        parts = draft.input_norm.split(width)
        tensors["input_norm.weight"] = torch.cat([parts[i] for i in order])
    elif contract.fc_input_norm == "fc_norm":
        tensors |= {f"fc_norm.{new}.weight": draft.fc_norm[old] for new, old in enumerate(order)}
    return tensors


def _layers(draft: Draft, contract: Contract) -> Iterator[Layer]:
    """The draft's layers with all biases or none, and rotary pairs as halves."""
    biased = any(getattr(layer, name) is not None for layer in draft.layers for name in BIASES)
    qwen = draft.layers[0].q_norm is not None
    for layer in draft.layers:
        changes: dict[str, Tensor] = {}
        for name in BIASES if biased else ():
            missing = getattr(layer, name) is None and not (qwen and name == "o_bias")
            if missing:  # vLLM makes them all, and leaves those that the file lacks uninitialised
                changes[name] = torch.zeros_like(getattr(layer, name[0])[:, 0])
        layer = replace(layer, **changes)
        if contract.rope.interleaved:
            order = _halves(draft.head_dim, contract.rope.partial)
            names = ("q", "k", "q_bias", "k_bias", "q_norm", "k_norm")
            found = {name: getattr(layer, name) for name in names}
            moved = {
                name: part.unflatten(0, (-1, draft.head_dim))[:, order].flatten(0, 1)
                for name, part in found.items()
                if part is not None
            }
            layer = replace(layer, **moved)
        yield layer


def _halves(head_dim: int, partial: float) -> Tensor:
    """Order that turns rotary pairs (0,1),(2,3).. into halves; attention sees products, not order."""
    turned = int(head_dim * partial)
    pairs = torch.arange(turned)
    return torch.cat((pairs[0::2], pairs[1::2], torch.arange(turned, head_dim)))


def _config(draft: Draft, contract: Contract, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """`config.json` in speculators' form; the layer's part is what vLLM's own config is made of."""
    served, rope, layer = as_served(draft, contract), contract.rope, draft.layers[0]
    slots, qwen = len(served.taps), layer.q_norm is not None
    numbers = {k: int(v) if v == int(v) else v for k, v in rope.params}
    part = {"partial_rotary_factor": rope.partial} if rope.partial != 1 else {}
    return {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 1}],
            "verifier": {"architectures": ["LlamaForCausalLM"], "name_or_path": ""},
        },
        "draft_vocab_size": draft.draft_vocab,
        "target_hidden_size": tensors["fc.weight"].shape[1] // slots,
        "eagle_aux_hidden_state_layer_ids": [t.after_block for t in served.taps],
        "norm_before_residual": served.norm_before_residual,
        "norm_before_fc": served.fc_input_norm == "input_norm",
        "fc_norm": served.fc_input_norm == "fc_norm",
        "norm_output": served.feedback == "post_norm",
        "tie_word_embeddings": False,
        "transformer_layer_config": {
            "model_type": "qwen3" if qwen else "llama",
            "num_aux_hidden_states": slots,  # vLLM assumes 3 for drafts in this form
            "vocab_size": draft.target_vocab,
            "hidden_size": draft.hidden_size,
            "intermediate_size": layer.gate.shape[0],
            "num_hidden_layers": len(draft.layers),
            "num_attention_heads": draft.heads,
            "num_key_value_heads": draft.kv_heads,
            "head_dim": draft.head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": draft.eps,
            "attention_bias": any(name.endswith("_proj.bias") for name in tensors),
            "mlp_bias": False,
            "max_position_embeddings": positions(draft),
            "rope_parameters": {"rope_type": rope.kind, "rope_theta": rope.theta, **numbers, **part},
            "tie_word_embeddings": False,
        },
    }


def positions(draft: Draft) -> int:
    """Positions that the draft's config allows; transformers' own default if it does not say."""
    layer = draft.config.get("transformer_layer_config") or draft.config
    return layer.get("max_position_embeddings") or 2048


def _read_back(draft: Draft, wanted: Contract, folder: Path) -> None:
    """Read the written folder as vLLM's conventions have it; raise unless it says what was meant."""
    highest = max(t.after_block for t in wanted.taps)
    head = TargetHead(draft.path, draft.embed, draft.norm, draft.lm_head, draft.eps, highest)
    found = load_draft(folder, target=head, convention="vllm", dtype=draft.norm.dtype).contract
    if found != wanted:
        raise EngineError(
            folder, "config.json", expected="the contract that was written",
            found="; ".join(diff(wanted, found)),
            remedy="this is a fault of lib.engine_draft.write_draft: report it with the contract",
        )  # fmt: skip
