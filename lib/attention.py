"""Attention of a draft's layers, in one place: grouped-query (Llama, Qwen3) and latent (DeepSeek, Kimi).

An `Attention` turns the layer's normed input into heads: products first, which are sums over the halves
of the first layer's wide input, then whatever is not linear. A `Layout` lets the heads of many captures
attend at once. Key and value heads can be of different size.

Axes: n rows, N pairs, S scored pairs, B captures, h query heads, g key/value heads, d size of a query's
or key's head, dv of a value's; those of latents are in lib/mla.py.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from lib.checkpoints import Draft, Layer
from lib.contract import Rope
from lib.errors import CheckpointError
from lib.products import product
from lib.rope import latent_factor, rotate
from lib.transfer import send

# Weights are put side by side, or made contiguous, up to this size only: one product of small weights
# saves time, two of large ones cost the same, and a copy of a Kimi-sized draft would cost gigabytes.
COPY_BYTES = 16 << 20
CPU = torch.device("cpu")


@torch.no_grad()
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm as in transformers' LlamaRMSNorm: statistics in fp32 (fp64 if x is), result in x's dtype."""
    wide = x if x.dtype == torch.float64 else x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


class Stack:
    """Weights of one input, their outputs one after another: a copy where small, views where large."""

    def __init__(self, parts: Sequence[Tensor], columns: slice = slice(None)) -> None:
        """Take the parts (o_i, i), or only these columns of each."""
        views = [part[:, columns] for part in parts]
        whole = len(views) == 1 and views[0].is_contiguous()
        small = sum(v.numel() * v.element_size() for v in views) <= COPY_BYTES
        self.weights = [torch.cat(views)] if small and not whole else views

    def __call__(self, x: Tensor) -> Tensor:
        """(n, i) -> (n, sum of o_i)."""
        out = [product(x, weight) for weight in self.weights]
        return out[0] if len(out) == 1 else torch.cat(out, -1)


class Attention(ABC):
    """Attention of one layer: products for queries and for keys and values, and heads from them.

    Attributes:
        heads, groups: h and g; key, value: d and dv; rotary: how many of d the rotary tables are for.
        q_hidden, kv_hidden: `Stack` over the layer's input, in the first layer over the states' half.
        q_embed, kv_embed: over the embeddings' half; in the first layer only.
    """

    heads: int
    groups: int
    key: int
    value: int
    rotary: int

    def __init__(self, draft: Draft, layer: Layer, q: Sequence[Tensor], kv: Sequence[Tensor]) -> None:
        """Keep the layer and its input products; in the first layer each in two halves."""
        self.layer, self.eps, width = layer, draft.eps, draft.hidden_size
        states = slice(None)
        if q[0].shape[1] == 2 * width:  # embeddings first, then states
            states = slice(width, None)
            self.q_embed, self.kv_embed = Stack(q, slice(width)), Stack(kv, slice(width))
        self.q_hidden, self.kv_hidden = Stack(q, states), Stack(kv, states)

    def __call__(self, q, kv, cos_sin, rows, interleaved: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Products to heads: q (n, h, d), k (N, g, d), v (N, g, dv).

        Args:
            q, kv: what `q_*` and `kv_*` gave; q for `rows` of the N pairs, or for all if None.
            cos_sin: rotary tables of all N.
            interleaved: see `Rope`.
        """
        cos, sin = cos_sin
        q_cos, q_sin = (cos, sin) if rows is None else (cos[rows], sin[rows])
        return self.queries(q, q_cos, q_sin, interleaved), *self.keys_values(kv, cos, sin, interleaved)

    @abstractmethod
    def queries(self, q: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
        """(n, h, d)."""

    @abstractmethod
    def keys_values(self, kv: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
        """(N, g, d) and (N, g, dv)."""

    @abstractmethod
    def scale(self, rope: Rope) -> float:
        """Factor on the scores before the softmax."""


class Grouped(Attention):
    """Grouped-query attention with optional biases and q/k norms (Llama, Qwen3)."""

    def __init__(self, draft: Draft, layer: Layer) -> None:
        """Sizes from the draft, weights from the layer."""
        self.heads, self.groups = draft.heads, draft.kv_heads
        self.key = self.value = self.rotary = draft.head_dim
        super().__init__(draft, layer, [layer.q], [layer.k, layer.v])

    def queries(self, q: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
        """(n, h d) -> (n, h, d): bias, norm, rotary."""
        q = q if self.layer.q_bias is None else q + self.layer.q_bias
        q = q.unflatten(-1, (self.heads, self.key))
        if self.layer.q_norm is not None:
            q = rms_norm(q, self.layer.q_norm, self.eps)
        return rotate(q, cos, sin, interleaved)

    def keys_values(self, kv: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
        """(N, 2 g d) -> (N, g, d) twice: biases; norm and rotary for keys."""
        k, v = kv.chunk(2, -1)
        k = k if self.layer.k_bias is None else k + self.layer.k_bias
        v = v if self.layer.v_bias is None else v + self.layer.v_bias
        k, v = (x.unflatten(-1, (self.groups, self.key)) for x in (k, v))
        if self.layer.k_norm is not None:
            k = rms_norm(k, self.layer.k_norm, self.eps)
        return rotate(k, cos, sin, interleaved), v

    def scale(self, rope: Rope) -> float:
        """1 / sqrt(d), whatever the rotary kind."""
        return self.key**-0.5


class LatentHeads(Attention):
    """Multi-head latent attention (`lib.mla`): the products end in low-rank latents, normed before the heads.

    The halves of the first layer's input add up before that norm, so they stay separate products. Every
    head has its own keys and values here (g = h); the rotary part of the key is one for all heads, and
    comes last in a head (transformers `modeling_deepseek_v3.py`, TorchSpec `deepseek_eagle.py`).
    """

    def __init__(self, draft: Draft, layer: Layer) -> None:
        """Sizes and weights from the layer's `Latent`."""
        m = self.latent = layer.latent
        self.heads = self.groups = draft.heads
        self.key, self.value, self.rotary = m.nope + m.rotary, m.value, m.rotary
        super().__init__(draft, layer, [m.q if m.q_a is None else m.q_a], [m.kv_a])

    def queries(self, q: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
        """(n, rq) or (n, h d) -> (n, h, d), of which the last dr are rotated."""
        m = self.latent
        if m.q_a is not None:
            q = q if m.q_a_bias is None else q + m.q_a_bias
            q = product(rms_norm(q, m.q_a_norm, self.eps), m.q_b)
        plain, turned = q.unflatten(-1, (self.heads, self.key)).split((m.nope, m.rotary), -1)
        return torch.cat((plain, rotate(turned, cos, sin, interleaved)), -1)

    def keys_values(self, kv: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
        """(N, rkv + dr) -> (N, h, dn + dr), (N, h, dv)."""
        m = self.latent
        kv = kv if m.kv_a_bias is None else kv + m.kv_a_bias
        latent, shared = kv.split((kv.shape[-1] - m.rotary, m.rotary), -1)
        both = product(rms_norm(latent, m.kv_a_norm, self.eps), m.kv_b)
        plain, v = both.unflatten(-1, (self.heads, m.nope + m.value)).split((m.nope, m.value), -1)
        turned = rotate(shared[:, None], cos, sin, interleaved)  # (N, 1, dr)
        return torch.cat((plain, turned.expand(-1, self.heads, -1)), -1), v

    def scale(self, rope: Rope) -> float:
        """1 / sqrt(dn + dr), times yarn's factor."""
        return self.key**-0.5 * latent_factor(rope)


def attentions(draft: Draft) -> list[Attention]:
    """One per layer. CheckpointError if they are of both kinds: one contract has one rotary setting."""
    kinds = {layer.latent is None for layer in draft.layers}
    if len(kinds) > 1:
        raise CheckpointError(
            draft.path, "self_attn", expected="one kind of attention in all layers",
            found=str(["latent" if layer.latent else "grouped" for layer in draft.layers]),
            remedy="layers of different drafts were put together",
        )  # fmt: skip
    return [(Grouped if layer.latent is None else LatentHeads)(draft, layer) for layer in draft.layers]


def mix(q: Tensor, k: Tensor, v: Tensor, scale: float, **mask) -> Tensor:
    """softmax(q k^T scale) v: (B, h, Tq, d), (B, g, Tk, d), (B, g, Tk, dv) -> (B, h, Tq, dv)."""
    size = v.shape[-1]
    if size != k.shape[-1]:
        # torch's CPU kernel takes heads of one size; without it all scores would be in memory at once.
        wide = max(size, k.shape[-1])
        q, k, v = (F.pad(x, (0, wide - x.shape[-1])) for x in (q, k, v))
    if q.device.type != "cpu" and mask.get("attn_mask") is not None:
        # With a mask, CUDA's memory-efficient kernel takes as many key heads as query heads or none.
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    return F.scaled_dot_product_attention(q, k, v, scale=scale, enable_gqa=True, **mask)[..., :size]


class Layout:
    """Pairs of B captures, one after another, as padded rectangles: who sees whom.

    Attributes:
        counts, scored_counts: (B,) pairs, and scored pairs, of each capture.
        visible: (B, Tq, Tk) bool, causal: scored pair q of a capture sees its pair k.
    """

    def __init__(
        self,
        counts: Tensor,
        scored_counts: Tensor,
        time: Tensor,
        scored: Tensor,
        device: torch.device = CPU,
    ) -> None:
        """From (B,), (B,), (N,) time t of each pair, (S,) indices of scored pairs into N, all on the CPU."""
        self.counts, self.scored_counts = counts, scored_counts
        self.scored_ends = [0, *scored_counts.cumsum(0).tolist()]
        # (B, longest) index into N / S, and the reverse; padding points at row 0 and is masked.
        pad_all, all_at = _padding(counts)
        pad_scored, scored_at = _padding(scored_counts)
        time_q = send(time[scored][pad_scored], device)  # (B, Tq)
        self.pad_all, self.pad_scored = send(pad_all, device), send(pad_scored, device)
        self.all_at, self.scored_at = (tuple(send(x, device) for x in at) for at in (all_at, scored_at))
        keys = torch.arange(int(counts.max()), device=device)
        self.visible = keys[None, None, :] <= time_q[:, :, None]

    def causal(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """Attention inside each capture: q (S, h, d), or (N, h, d) -> (n, h dv)."""
        every = len(q) == len(k)  # all pairs ask; where all are scored, both ways are the same
        pad_q, (row, column) = (self.pad_all, self.all_at) if every else (self.pad_scored, self.scored_at)
        k, v = (x[self.pad_all].transpose(1, 2) for x in (k, v))  # (B, g, Tk, d or dv)
        q = q[pad_q].transpose(1, 2)  # (B, h, Tq, d)
        mask = {"is_causal": True} if every else {"attn_mask": self.visible[:, None]}
        return mix(q, k, v, scale, **mask).transpose(1, 2)[row, column].flatten(1)

    def chains(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        chain: Sequence[tuple[Tensor, Tensor]],
        scale: float,
        limit: int,
    ) -> Tensor:
        """Attention of chain queries (S, h, d) over true pairs 0..t and their own chain: (S, h dv).

        One softmax over both sets of scores.

        Args:
            k, v: (N, g, d), (N, g, dv) of the true pairs.
            chain: keys and values, (S, g, d) and (S, g, dv), of each step so far.
            limit: bytes that the scores may take at once.
        """
        groups = k.shape[1]
        q = q.unflatten(1, (groups, -1))  # (S, h, d) -> (S, g, r, d), r = h / g
        own_k = torch.stack([k for k, _ in chain], 1)  # (S, s, g, d)
        own_v = torch.stack([v for _, v in chain], 1)
        own = torch.einsum("ngrd,nsgd->ngrs", q, own_k) * scale  # (S, g, r, s)
        out = q.new_empty(*q.shape[:-1], v.shape[-1])
        longest = int(self.counts.max())
        # Captures per block, so that the scores stay small whatever the batch.
        width = int(self.scored_counts.max()) * q.shape[1] * q.shape[2] * longest * q.element_size()
        step = max(1, limit // max(1, width))
        row, column = self.scored_at
        wide = torch.float64 if q.dtype == torch.float64 else torch.float32
        for start in range(0, len(self.counts), step):
            block = slice(start, start + step)
            # Scored pairs come capture by capture: those of the block are a slice.
            mine = slice(self.scored_ends[start], self.scored_ends[min(start + step, len(self.counts))])
            keys = k[self.pad_all[block]].permute(0, 2, 3, 1)  # (b, g, d, Tk)
            values = v[self.pad_all[block]].transpose(1, 2)  # (b, g, Tk, dv)
            queries = q[self.pad_scored[block]].permute(0, 2, 3, 1, 4)  # (b, g, r, Tq, d)
            b, g, r, tq, _ = queries.shape
            scores = (queries.reshape(b, g, r * tq, -1) @ keys * scale).view(b, g, r, tq, longest)
            scores.masked_fill_(~self.visible[block][:, None, None], float("-inf"))
            own_padded = own[self.pad_scored[block]].permute(0, 2, 3, 1, 4)  # (b, g, r, Tq, s)
            weights = torch.softmax(torch.cat((scores, own_padded), -1), -1, dtype=wide).to(q.dtype)
            near = (weights[..., :longest].reshape(b, g, r * tq, longest) @ values).view(b, g, r, tq, -1)
            at = (row[mine] - start, column[mine])
            near = near.permute(0, 3, 1, 2, 4)[at]  # (n, g, r, dv)
            far = weights[..., longest:].permute(0, 3, 1, 2, 4)[at]  # (n, g, r, s)
            out[mine] = near + torch.einsum("ngrs,nsgd->ngrd", far, own_v[mine])
        return out.flatten(1)


def _padding(counts: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Index tables between a flat list and (B, longest): gather index, and (row, column) of each item."""
    longest = int(counts.max())
    starts = counts.cumsum(0) - counts
    column = torch.arange(longest)[None]
    gather = torch.where(column < counts[:, None], starts[:, None] + column, 0)
    row = torch.repeat_interleave(torch.arange(len(counts)), counts)
    column_of = torch.arange(int(counts.sum())) - starts[row]
    return gather, (row, column_of)
