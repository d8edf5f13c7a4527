"""Rotary position embedding: tables and rotation, every variant that EAGLE-3 drafts use."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lib.contract import Rope
from lib.errors import ContractError


def rope_table(rope: Rope, head_dim: int, positions: Tensor, dtype: torch.dtype):
    """cos and sin, (n, rotated / 2) each, for integer positions (n,).

    Frequencies and the attention factor come from transformers' `modeling_rope_utils`.

    Raises ContractError for parameters that its formulas lack or cannot use.
    """
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rotated = int(head_dim * rope.partial)
    if rope.kind == "default":
        steps = torch.arange(0, rotated, 2, dtype=torch.int64).float()
        inv, factor = 1.0 / (rope.theta ** (steps / rotated)), 1.0
    else:
        params = dict(rope.params)
        if rope.kind in ("llama3", "yarn") and "original_max_position_embeddings" not in params:
            raise _unusable(rope, "no original_max_position_embeddings")  # transformers would guess
        try:
            scaled = params.get("factor", 1.0) * params.get("original_max_position_embeddings", 2048)
            config = LlamaConfig(
                head_dim=rotated,
                max_position_embeddings=int(scaled),  # no formula uses it; any other value draws a warning
                rope_parameters={"rope_theta": rope.theta, "rope_type": rope.kind, **params},
            )
            inv, factor = ROPE_INIT_FUNCTIONS[rope.kind](config, device="cpu")
        except (KeyError, TypeError, ValueError, ArithmeticError) as err:
            raise _unusable(rope, f"{type(err).__name__}: {err}"[:200]) from err
        if not torch.isfinite(inv).all() or not math.isfinite(factor):
            raise _unusable(rope, "frequencies that are NaN or Inf")
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    angles = positions.to(wide)[:, None] * inv.to(positions.device, wide)
    return (angles.cos() * factor).to(dtype), (angles.sin() * factor).to(dtype)


def _unusable(rope: Rope, found: str) -> ContractError:
    return ContractError(
        "contract", "rope", expected=f"the parameters of {rope.kind} rotary embedding",
        found=f"{rope}: {found}", remedy="copy them from the config that the draft was trained with",
    )  # fmt: skip


def latent_factor(rope: Rope) -> float:
    """What a scaled rotary kind adds to the softmax scale of latent attention: yarn's mscale, squared.

    Only with `mscale_all_dim` in the parameters; transformers `modeling_deepseek_v3.py`
    (`yarn_apply_mscale`), vLLM `deepseek_v2.py` and TorchSpec `deepseek_eagle.py` agree.
    """
    params = dict(rope.params)
    all_dim, factor = params.get("mscale_all_dim", 0.0), params.get("factor", 1.0)
    if rope.kind == "default" or not all_dim or factor <= 1:
        return 1.0
    return (0.1 * all_dim * math.log(factor) + 1.0) ** 2


def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Rotary embedding of x (n, heads, d) by per-row cos and sin (n, rotated / 2)."""
    half = cos.shape[-1]
    turned, rest = x[..., : 2 * half], x[..., 2 * half :]
    cos, sin = cos[:, None], sin[:, None]  # (n, 1, half): the same for every head
    if interleaved:
        a, b = turned[..., 0::2], turned[..., 1::2]
        out = torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)
    else:
        a, b = turned[..., :half], turned[..., half:]
        out = torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
    return torch.cat((out, rest), -1) if rest.shape[-1] else out
