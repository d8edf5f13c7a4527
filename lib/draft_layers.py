"""The decoder layers of a draft, as fields of `checkpoints.Layer`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from lib.draft_config import DraftConfig
from lib.draft_formats import plain
from lib.draft_tensors import DraftTensors
from lib.errors import CheckpointError
from lib.mla import read_latent


def read_layers(path: Path, tensors: DraftTensors, config: DraftConfig, hidden: int) -> list[dict[str, Any]]:
    """Fields of every layer, in order; the first takes 2H wide input, the others H.

    Layers with `kv_a_proj_with_mqa` have latent attention (`lib.mla`), the others q, k and v.
    """
    # No draft has a thousand layers; a longer number is a name like any other, and explained as unknown.
    present = {int(m[1]) for n in tensors if (m := re.match(r"layers\.(\d{1,3})\.", n))}
    declared = config.whole(config.layer, "num_hidden_layers", 1)
    if config.nested and present != set(range(declared)):
        raise CheckpointError(
            path, "layers", expected=f"layers 0..{declared - 1} (num_hidden_layers)",
            found=f"layers {sorted(present)}",
            remedy="layers were lost in conversion (fault 27), or the config is another model's",
        )  # fmt: skip
    if not present or present != set(range(len(present))):
        raise CheckpointError(
            path, "layers", expected="midlayer.* or layers.0.* tensors",
            found=f"layers {sorted(present)}", remedy="this is not an EAGLE-3 draft",
        )  # fmt: skip
    if len(present) != declared:
        config.notes.append(
            f"num_hidden_layers {declared} in config.json, {len(present)} layers in the file: the file's "
            "are used (fault 27)"
        )
    if any(plain(name).startswith("additional_layers.") for name in tensors.tensors):
        config.notes.append(
            "additional_layers: the residual is carried from layer to layer, as in vLLM; SGLang's "
            "llama_eagle3.py starts each with a fresh one (fault 27)"
        )
    return [_layer(path, tensors, config, hidden, i) for i in sorted(present)]


def _layer(path: Path, tensors: DraftTensors, config: DraftConfig, hidden: int, i: int) -> dict[str, Any]:
    """Fields of layer i."""
    heads = config.heads(hidden)[0]
    width = 2 * hidden if i == 0 else hidden

    def take(name: str, *shape: int | None, required: bool = True):
        return tensors.take(f"layers.{i}.{name}", *shape, required=required)

    latent, attention = None, dict.fromkeys("qkv")
    if f"layers.{i}.self_attn.kv_a_proj_with_mqa.weight" in tensors:

        def number(key: str, default: int | float | None = None):
            return config.whole(config.layer, key, default)

        latent = read_latent(take, number, heads, width)
        q_width = heads * latent.value
    else:
        if i == 0:
            _refuse_narrow(path, tensors, config, hidden)
        heads, kv_heads, head_dim = config.grouped_heads(hidden)
        q_width, kv_width = heads * head_dim, kv_heads * head_dim
        attention = {
            "q": take("self_attn.q_proj.weight", q_width, width),
            "k": take("self_attn.k_proj.weight", kv_width, width),
            "v": take("self_attn.v_proj.weight", kv_width, width),
            "q_norm": take("self_attn.q_norm.weight", head_dim, required=False),
            "k_norm": take("self_attn.k_norm.weight", head_dim, required=False),
            "q_bias": take("self_attn.q_proj.bias", q_width, required=False),
            "k_bias": take("self_attn.k_proj.bias", kv_width, required=False),
            "v_bias": take("self_attn.v_proj.bias", kv_width, required=False),
        }
    gate = take("mlp.gate_proj.weight", None, hidden)
    inner = gate.shape[0]
    return {
        **attention,
        "latent": latent,
        "o": take("self_attn.o_proj.weight", hidden, q_width),
        "o_bias": take("self_attn.o_proj.bias", hidden, required=False),
        "gate": gate,
        "up": take("mlp.up_proj.weight", inner, hidden),
        "down": take("mlp.down_proj.weight", hidden, inner),
        "input_layernorm": take("input_layernorm.weight", hidden),
        "post_attention_layernorm": take("post_attention_layernorm.weight", hidden),
        # Without fc, Model-Optimizer exports none. Later layers never use one: `explain` refuses it.
        "hidden_norm": None if i else take("hidden_norm.weight", hidden, required=config.use_fc),
    }


def _refuse_narrow(path: Path, tensors: DraftTensors, config: DraftConfig, hidden: int) -> None:
    """A first layer that never sees the token is no EAGLE-3 layer, whatever its names."""
    shape = tensors.shape("layers.0.self_attn.q_proj.weight")
    if not config.use_fc and shape is not None and len(shape) == 2 and shape[1] == hidden:
        raise CheckpointError(
            path, "use_aux_hidden_state", expected=f"a first layer of {2 * hidden} inputs: token and state",
            found=f"false, and {hidden} inputs: Model-Optimizer's module without the token embedding "
            "(modeling_eagle.py)",
            remedy="this is an EAGLE-1 style module, which no EAGLE-3 loader serves",
        )  # fmt: skip
