"""Rotary position embedding: tables and rotation, every variant that EAGLE-3 drafts use."""

from __future__ import annotations

import torch
from torch import Tensor

from lib.contract import Rope


def rope_table(rope: Rope, head_dim: int, positions: Tensor, dtype: torch.dtype):
    """cos and sin, (n, rotated / 2) each, for integer positions (n,).

    Frequencies and the attention factor come from transformers' `modeling_rope_utils`.
    """
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rotated = int(head_dim * rope.partial)
    if rope.kind == "default":
        steps = torch.arange(0, rotated, 2, dtype=torch.int64).float()
        inv, factor = 1.0 / (rope.theta ** (steps / rotated)), 1.0
    else:
        config = LlamaConfig(
            head_dim=rotated,
            rope_parameters={"rope_theta": rope.theta, "rope_type": rope.kind, **dict(rope.params)},
        )
        inv, factor = ROPE_INIT_FUNCTIONS[rope.kind](config, device="cpu")
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    angles = positions.to(wide)[:, None] * inv.to(positions.device, wide)
    return (angles.cos() * factor).to(dtype), (angles.sin() * factor).to(dtype)


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
