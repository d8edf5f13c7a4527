"""Multi-head latent attention (DeepSeek, Kimi): its weights in a draft, as the checkpoint stores them.

Axes: h heads, dn head size without rotary, dr rotary head size, dv value head size, rq and rkv ranks of
the query's and the key-value's latent, `width` the layer's input (2H in the first layer).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

NO_RANK = 1  # stands for "no q_lora_rank in the config": no model has a latent of one number


@dataclass(frozen=True)
class Latent:
    """Weights of one layer's latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1).

    The same names and shapes in transformers (`modeling_deepseek_v3.py`), vLLM (`deepseek_eagle3.py`)
    and TorchSpec (`deepseek_eagle.py`); only the width of the first layer's input is EAGLE-3's own.

    Attributes:
        q: (h (dn + dr), width), for models without a query latent; else None.
        q_a, q_a_norm, q_b: (rq, width), (rq,), (h (dn + dr), rq); None without a query latent.
        kv_a: (rkv + dr, width): the latent and the rotary key that all heads share.
        kv_a_norm: (rkv,). kv_b: (h (dn + dv), rkv).
        nope, rotary, value: dn, dr, dv.
        q_a_bias, kv_a_bias: (rq,), (rkv + dr,), with transformers' `attention_bias`; else None.
    """

    q: Tensor | None
    q_a: Tensor | None
    q_a_norm: Tensor | None
    q_b: Tensor | None
    kv_a: Tensor
    kv_a_norm: Tensor
    kv_b: Tensor
    nope: int
    rotary: int
    value: int
    q_a_bias: Tensor | None = None
    kv_a_bias: Tensor | None = None


def read_latent(take: Callable, number: Callable, heads: int, width: int) -> Latent:
    """The weights of one layer; whatever is missing or of another shape raises `take`'s error.

    A bias on `q_proj`, `q_b_proj` or `kv_b_proj` is not taken here, so it stays an unknown tensor to the
    loader: no framework makes one.

    Args:
        take: take(name, *shape, required=True) -> tensor; names relative to the layer, as
            "self_attn.kv_a_proj_with_mqa.weight"; None in a shape fits any size.
        number: number(key, default=None) -> a positive number of the layer's config.
        heads: h.
        width: of the layer's input.
    """
    nope, rotary, value, kv_rank = (
        number(key) for key in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "kv_lora_rank")
    )
    q_rows = heads * (nope + rotary)
    q = q_a = q_a_norm = q_b = q_a_bias = None
    found = take("self_attn.q_a_proj.weight", None, width, required=False)
    rank = number("q_lora_rank", NO_RANK if found is None else found.shape[0])
    if found is None and rank == NO_RANK:
        q = take("self_attn.q_proj.weight", q_rows, width)
    else:
        q_a = take("self_attn.q_a_proj.weight", rank, width)
        q_a_norm = take("self_attn.q_a_layernorm.weight", rank)
        q_b = take("self_attn.q_b_proj.weight", q_rows, rank)
        q_a_bias = take("self_attn.q_a_proj.bias", rank, required=False)
    return Latent(
        q=q,
        q_a=q_a,
        q_a_norm=q_a_norm,
        q_b=q_b,
        kv_a=take("self_attn.kv_a_proj_with_mqa.weight", kv_rank + rotary, width),
        kv_a_norm=take("self_attn.kv_a_layernorm.weight", kv_rank),
        kv_b=take("self_attn.kv_b_proj.weight", heads * (nope + value), kv_rank),
        nope=nope,
        rotary=rotary,
        value=value,
        q_a_bias=q_a_bias,
        kv_a_bias=take("self_attn.kv_a_proj_with_mqa.bias", kv_rank + rotary, required=False),
    )
