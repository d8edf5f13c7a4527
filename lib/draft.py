"""The draft forward: predictions of an EAGLE-3 draft on captures, under a contract.

One pair per position t: the target's state g_t with token x_{t+1} predicts x_{t+2}. Depth 0 is that
prediction; depth s continues the chain that started at t with token x_{t+1+s} ("teacher") or with
the draft's own previous prediction ("own"), its attention seeing the true pairs 0..t and its own
chain only. That is speculators' training-time test (`models/eagle3/core.py`) and what an engine
does while drafting.

Where the speed comes from: every position needs keys and values, but only scored positions need
queries, the MLP and logits; `fc` is a sum over slots, so each (slot, tap) product is computed once
for any number of contracts; logits come in chunks and leave as argmax. On a GPU the host works out all
indices, states are sent ahead (lib/transfer.py), and `predict` fetches results once, a sweep once a batch.

Axes: N pairs of a batch of captures (one after another, no padding), S scored pairs, B captures,
H hidden, k slots, Vd draft vocabulary, D depths; those of attention are in lib/attention.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from lib.attention import Layout, Stack, attentions, rms_norm
from lib.captures import Capture
from lib.checkpoints import Draft
from lib.contract import Contract
from lib.errors import CheckpointError, ContractError
from lib.mla import Latent
from lib.products import product
from lib.rope import rope_table
from lib.taps import Stored, Tap
from lib.transfer import BATCH_PAIRS, batches_for, free_bytes, send

LOGIT_BYTES = 32 << 20  # largest logits chunk; keeps peak memory independent of Vd
LOG_FLOOR = -30.0  # nats, for a true token that a wrong vocabulary map cannot produce
PADDING = 2  # most positions of a padded batch, over the pairs that it may have
SCORE_BYTES = 64 << 20  # largest attention score block of chain depths


@dataclass(frozen=True)
class Predictions:
    """What a draft predicted, one row per scored pair.

    Attributes:
        capture: (S,) index into the captures given.
        position: (S,) t, index of the state.
        draft_ids, target_ids: (S, D) predicted ids in the draft's and the target's vocabulary.
        truth: (S, D) the text's token x_{t+2+s}; -1 past the end.
        in_vocab: (S, D) whether the draft can produce `truth` at all; False past the end.
        logits: (S, D, Vd) only when asked for.
    """

    capture: Tensor
    position: Tensor
    draft_ids: Tensor
    target_ids: Tensor
    truth: Tensor
    in_vocab: Tensor
    contract: Contract
    logits: Tensor | None = None

    @property
    def hit(self) -> Tensor:
        """(S, D) bool: prediction equals the text's token."""
        return (self.target_ids == self.truth) & (self.truth >= 0)


class Batch:
    """Some captures laid out as N pairs, with everything that contracts can share.

    Cached: the states read so far, each (slot, tap) product of `fc`, and the embeddings' share of
    the first layer's projections. Evaluating another contract reuses all of them. Tokens and indices
    live on the CPU, so that no table made of them waits for a GPU; what the forward needs is sent.
    """

    def __init__(
        self, forward: DraftForward, captures: Sequence[Capture], indices: Sequence[int], every: bool
    ) -> None:
        self.forward, self.captures, self.indices = forward, captures, indices
        self.products: dict[tuple, Tensor] = {}
        self.states: dict[Tap | Stored, Tensor] = {}
        self.embeds: dict[tuple, Tensor] = {}
        counts = [len(captures[i]) - 1 for i in indices]  # pair t needs token t + 1
        starts = torch.tensor([0, *counts]).cumsum(0)[:-1]
        self.time = torch.cat([torch.arange(n) for n in counts])  # (N,) t
        self.tokens = [captures[i].token_ids for i in indices]
        picked = [
            torch.arange(n) if every else captures[i].scored for i, n in zip(indices, counts, strict=True)
        ]
        self.counts = torch.tensor(counts)
        self.scored_counts = torch.tensor([len(p) for p in picked])
        # (S,) indices into N, and the same on the device
        self.scored = torch.cat([p + s for p, s in zip(picked, starts, strict=True)])
        self.rows = send(self.scored, forward.device)
        self.owner = torch.repeat_interleave(torch.arange(len(indices)), self.scored_counts)
        self.layout = Layout(self.counts, self.scored_counts, self.time, self.scored, forward.device)

    def token_at(self, ahead: int, scored: bool) -> Tensor:
        """Token x_{t + ahead} for every (or every scored) pair, on the CPU; 0 past either end of the text."""
        out = []
        for tokens, n in zip(self.tokens, self.counts.tolist(), strict=True):
            at = torch.arange(n) + ahead
            ok = (at >= 0) & (at < len(tokens))
            out.append(torch.where(ok, tokens[at.clamp(0, len(tokens) - 1)], 0))
        flat = torch.cat(out)
        return flat[self.scored] if scored else flat

    def truth(self, depth: int) -> Tensor:
        """(S,) token x_{t + 2 + depth}, on the CPU; -1 past the end."""
        out = []
        for tokens, n in zip(self.tokens, self.counts.tolist(), strict=True):
            at = torch.arange(n) + 2 + depth
            out.append(torch.where(at < len(tokens), tokens[at.clamp(max=len(tokens) - 1)], -1))
        return torch.cat(out)[self.scored]

    def state(self, tap: Tap | Stored) -> Tensor:
        """(N, Ht) states of all pairs at one tap, on the device, in the working dtype."""
        if tap not in self.states:
            parts = [self.captures[i].state(tap)[:-1] for i in self.indices]
            self.states[tap] = torch.cat(parts).to(self.forward.device, self.forward.dtype)
        return self.states[tap]

    def slot_product(self, slot: int, tap: Tap | Stored, kind: str) -> Tensor:
        """(N, H): this slot's share of `fc`, its norm weight included, for one tap."""
        key = (slot, tap, kind)
        if key not in self.products:
            self.products[key] = self.forward.slot_product(slot, self.state(tap), kind)
        return self.products[key]

    def fused(self, contract: Contract) -> Tensor:
        """(N, H): what `fc` makes of the taps, or the last slot alone when `fc` is bypassed."""
        return self.forward.fuse(contract, self.state, self.slot_product)

    def embed_share(self, contract: Contract) -> tuple[Tensor, Tensor]:
        """The embeddings' share of the first layer's products: (N, .) for keys and values, (n, .) for q.

        n is S, or N when there are more layers: their keys need the first one's output everywhere.
        """
        key = (contract.token_shift, contract.embed_scale)
        if key not in self.embeds:
            f = self.forward
            normed = f.embed(self.token_at(contract.token_shift, scored=False), contract)  # (N, H)
            queries = normed[self.rows] if len(f.draft.layers) == 1 else normed
            self.embeds[key] = (f.attention[0].kv_embed(normed), f.attention[0].q_embed(queries))
        return self.embeds[key]


class DraftForward:
    """A draft prepared for evaluation: projections fused once, then any number of contracts.

    >>> forward = DraftForward(draft)                      # doctest: +SKIP
    >>> forward.predict(captures, draft.contract).hit      # doctest: +SKIP
    """

    def __init__(self, draft: Draft) -> None:
        """Put small weights side by side; large ones stay where they are, mapped or not."""
        self.draft = draft
        self.device, self.dtype = draft.norm.device, draft.norm.dtype
        self.wide = torch.float64 if self.dtype == torch.float64 else torch.float32
        self.fc = draft.fc
        self.attention = attentions(draft)
        self.gate_up = [Stack((layer.gate, layer.up)) for layer in draft.layers]  # (2I, H)
        self.in_vocab = draft.in_vocab()  # (V,) bool, once: every contract of a sweep asks for it
        # The same draft for ids that are on the device.
        self.placed = draft if draft.d2t is None else replace(draft, d2t=draft.d2t.to(self.device))

    # ---- public -------------------------------------------------------------------------------

    @torch.inference_mode()
    def predict(
        self,
        captures: Sequence[Capture],
        contract: Contract | None = None,
        *,
        depths: int = 1,
        feed: Literal["teacher", "own"] = "teacher",
        positions: Literal["scored", "all"] = "scored",
        keep_logits: bool = False,
        batch_pairs: int | None = None,
    ) -> Predictions:
        """Predictions of the draft on captures under a contract.

        Args:
            captures: any lengths; they are batched here.
            contract: the draft's declared one if None.
            depths: D >= 1, chain depths to follow from every position.
            feed: what depths >= 1 are fed: the text's tokens, or the draft's own.
            positions: "scored" pairs (see `Capture.scored`), or "all" pairs t = 0..L-2.
            keep_logits: also return (S, D, Vd) logits; for tests and small inputs.
            batch_pairs: pairs of a batch; by default what suits the device.

        Raises ContractError / CaptureError when contract, draft and captures do not fit.
        """
        contract = contract or self.draft.contract
        self.check(captures, contract, depths)
        every = positions == "all"
        if feed == "own" and self.device.type == "cuda":
            _ = self.table  # first, so that batches are sized to what it leaves
        batches = batches_for(self, captures, [contract], depths, every=every, batch_pairs=batch_pairs)
        with closing(batches):  # its thread and memory end with an error too
            parts = [self.run(batch, contract, depths, feed, keep_logits) for batch in batches]
        if not parts:
            raise ContractError(
                "predict", "positions", expected="at least one pair to predict",
                found=f"none {positions} in {len(captures)} captures",
                remedy="use longer texts; positions='all' needs two tokens, scored ones three",
            )  # fmt: skip
        return self.collect(parts, contract)

    def collect(self, parts: Sequence[tuple], contract: Contract) -> Predictions:
        """What `run` gave for all batches, in the captures' order, on the CPU: the one wait for a GPU."""
        columns = [None if c[0] is None else torch.cat(c).cpu() for c in zip(*parts, strict=True)]
        order = torch.argsort(columns[0], stable=True)
        capture, position, ids, truth, known, logits = (None if c is None else c[order] for c in columns)
        target_ids = self.draft.to_target(ids, contract.vocab_map)
        return Predictions(capture, position, ids, target_ids, truth, known, contract, logits)

    def batches(
        self, captures: Sequence[Capture], every: bool = False, batch_pairs: int = BATCH_PAIRS
    ) -> Iterator[Batch]:
        """Captures grouped by similar length, at most about `batch_pairs` pairs a batch.

        Attention pads a batch to its longest text, so a long one ends a group of short ones too.
        """
        usable = [
            i for i, c in enumerate(captures) if len(c) >= 2 and (every or len(c.scored))
        ]  # a text of one token has no pair
        group: list[int] = []
        size = 0
        for i in sorted(usable, key=lambda i: len(captures[i])):
            padded = (len(group) + 1) * len(captures[i])
            if group and (size + len(captures[i]) > batch_pairs or padded > PADDING * batch_pairs):
                yield Batch(self, captures, group, every)
                group, size = [], 0
            group.append(i)
            size += len(captures[i])
        if group:
            yield Batch(self, captures, group, every)

    def check(self, captures: Sequence[Capture], contract: Contract, depths: int = 1) -> None:
        """Everything that can be wrong between draft, contract and captures, before any work."""
        d = self.draft
        if depths < 1:
            raise ContractError(
                "predict", "depths", expected="1 or more", found=str(depths),
                remedy="depth 0 is the first draft token: depths=1 asks for it",
            )  # fmt: skip
        if not captures:
            raise ContractError(
                "predict", "captures", expected="at least one", found="none",
                remedy="open a folder with captures",
            )  # fmt: skip
        slots = 0 if self.fc is None else self.fc.shape[1]
        for capture in captures:
            width = capture.hidden_size
            if contract.use_fc and len(contract.taps) * width != slots:
                raise ContractError(
                    d.path, "fc.weight",
                    expected=f"{len(contract.taps)} slots x hidden {width} of {capture.path} = "
                    f"{len(contract.taps) * width} inputs", found=f"{slots} inputs",
                    remedy="name as many taps as the draft has slots, and use captures of its target",
                )  # fmt: skip
            if not contract.use_fc and width != d.hidden_size:
                raise ContractError(
                    d.path, "use_fc=False", expected=f"states of width {d.hidden_size}",
                    found=str(width), remedy="a bypassed fc needs target and draft of one width",
                )  # fmt: skip
            for tap in contract.taps:
                if tap not in capture.readers:
                    raise ContractError(
                        capture.path, f"tap {tap}",
                        expected=f"one of the stored {[str(t) for t in capture.taps]}",
                        found="a tap this capture lacks",
                        remedy="name the stored states with taps=, or recapture with this tap",
                    )  # fmt: skip
            capture.check_vocab(d.embed.shape[0], str(d.path))
        for kind, tensor in (("input_norm", d.input_norm), ("fc_norm", d.fc_norm or None)):
            if contract.fc_input_norm == kind and tensor is None:
                raise ContractError(
                    d.path, kind, expected=f"{kind} weights", found="none in the checkpoint",
                    remedy="set fc_input_norm to what the draft was trained with",
                )  # fmt: skip
        if contract.vocab_map != "identity" and d.d2t is None:
            raise ContractError(
                d.path, "vocab_map", expected="a d2t tensor", found="none",
                remedy="use vocab_map='identity' for a draft with the full vocabulary",
            )  # fmt: skip

    # ---- one batch ----------------------------------------------------------------------------

    def run(self, batch: Batch, contract: Contract, depths: int, feed: str, keep_logits: bool) -> tuple:
        """Columns of `Predictions` for one batch: capture, position, draft ids, truth, in_vocab, logits.

        Ids and logits are left on the device, where they may not be computed yet.
        """
        ids, kept = [], []
        chains: list[list[tuple[Tensor, Tensor]]] = [[] for _ in self.draft.layers]
        hidden, keys = self.first_step(batch, contract)
        for depth in range(depths):
            if depth:
                token = (
                    batch.token_at(contract.token_shift + depth, scored=True)
                    if feed == "teacher"
                    else self.placed.to_target(ids[-1], contract.vocab_map)
                )
                hidden = self.chain_step(batch, contract, depth, token, hidden, keys, chains)
            normed = rms_norm(hidden, self.draft.norm, self.draft.eps)
            best, logits = self.head(normed if contract.head_norm else hidden, keep_logits)
            ids.append(best)
            kept.append(logits)
            if contract.feedback == "post_norm":
                hidden = normed
        truth = torch.stack([batch.truth(d) for d in range(depths)], 1)  # (S, D)
        known = self.in_vocab[truth.clamp(min=0)] & (truth >= 0)
        capture = torch.tensor(batch.indices)[batch.owner]
        return (
            capture,
            batch.time[batch.scored],
            torch.stack(ids, 1),
            truth,
            known,
            torch.stack(kept, 1).cpu() if keep_logits else None,  # too large to be left there
        )

    def score(self, batch: Batch, contract: Contract) -> tuple[Tensor, Tensor, Tensor]:
        """`scores` under one contract."""
        return self.scores(batch, [contract])[0]

    @torch.inference_mode()
    def scores(self, batch: Batch, contracts: Sequence[Contract]) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Depth 0 of one batch against the text: for sweeps, where only sums are wanted.

        Returns, for each contract and on the CPU: (S,) bool, true token in the declared vocabulary; (S,)
        bool, hit; (S,) log-probability (nats) of the true token, 0 where it is not in the vocabulary and
        `LOG_FLOOR` where this contract's vocabulary map cannot produce it.
        """
        truth = batch.truth(0)
        known = self.in_vocab[truth.clamp(min=0)] & (truth >= 0)
        found = [self.best_and_log_p(batch, c, torch.where(known, truth, -1)) for c in contracts]
        best, log_p = (torch.stack(x).cpu() for x in zip(*found, strict=True))  # (C, S): one wait for a GPU
        predicted = [self.draft.to_target(ids, c.vocab_map) for ids, c in zip(best, contracts, strict=True)]
        return [
            (known, (ids == truth) & known, torch.where(known, nats, 0))
            for ids, nats in zip(predicted, log_p, strict=True)
        ]

    def best_and_log_p(self, batch: Batch, contract: Contract, truth: Tensor) -> tuple[Tensor, Tensor]:
        """(S,) draft ids and (S,) log-probabilities (nats) of `truth` (S,), `LOG_FLOOR` where it is -1."""
        hidden, _ = self.first_step(batch, contract)
        normed = rms_norm(hidden, self.draft.norm, self.draft.eps) if contract.head_norm else hidden
        draft_ids = self.draft.draft_ids(contract.vocab_map)
        wanted = send(torch.where(truth >= 0, draft_ids[truth.clamp(min=0)], -1), self.device)
        best, log_p = [], []
        for part, ids in zip(self.in_chunks(normed), self.in_chunks(wanted), strict=True):
            logits = (part @ self.draft.lm_head.T).to(self.wide)  # (rows, Vd)
            top = logits.gather(1, ids.clamp(min=0)[:, None])[:, 0]
            best.append(logits.argmax(-1))
            log_p.append((top - logits.logsumexp(-1)).masked_fill(ids < 0, LOG_FLOOR))
        return torch.cat(best), torch.cat(log_p)

    def slot_product(self, slot: int, x: Tensor, kind: str) -> Tensor:
        """(n, Ht) -> (n, H): one slot's share of `fc`, its norm weight included."""
        width = x.shape[1]
        columns = slice(slot * width, (slot + 1) * width)
        if kind == "input_norm":
            x = x * self.draft.input_norm[columns]
        elif kind == "fc_norm":
            x = rms_norm(x, self.draft.fc_norm[slot], self.draft.eps)
        return product(x, self.fc[:, columns])

    def fuse(
        self,
        contract: Contract,
        state: Callable[[Tap | Stored], Tensor],
        share: Callable[[int, Tap | Stored, str], Tensor],
    ) -> Tensor:
        """(n, H): what `fc` makes of the taps, or the last slot alone when `fc` is bypassed.

        Args:
            state: tap -> (n, Ht).
            share: slot, tap, kind of norm -> (n, H), as `slot_product` computes it.
        """
        if not contract.use_fc:
            return state(contract.taps[-1])
        kind = contract.fc_input_norm
        total = share(0, contract.taps[0], kind)
        for slot, tap in enumerate(contract.taps[1:], start=1):
            total = total + share(slot, tap, kind)
        if kind == "input_norm":
            # One RMSNorm over all slots: its scale is one number per pair, so it can come last.
            wide = [state(t).to(self.wide) for t in contract.taps]
            mean = sum(x.pow(2).sum(-1, keepdim=True) for x in wide) / sum(x.shape[1] for x in wide)
            total = (total * torch.rsqrt(mean + self.draft.eps)).to(self.dtype)
        return total if self.draft.fc_bias is None else total + self.draft.fc_bias

    def in_chunks(self, rows: Tensor) -> tuple[Tensor, ...]:
        """Rows in pieces whose logits stay within `LOGIT_BYTES`."""
        weight = self.draft.lm_head
        return rows.split(max(1, LOGIT_BYTES // (weight.shape[0] * weight.element_size())))

    @cached_property
    def table(self) -> Tensor | None:
        """(V, H) embeddings on the device, for a draft that feeds a GPU its own tokens.

        None where they do not fit or are not all finite: then such ids go through the CPU, one wait a depth.
        """
        embed, size = self.draft.embed, self.draft.embed.numel() * self.dtype.itemsize
        if size > free_bytes(self.device) // 2:
            return None
        embed = embed.to(self.device, self.dtype)
        return embed if torch.isfinite(embed.sum(dtype=self.wide)) else None

    def embed(self, tokens: Tensor, contract: Contract) -> Tensor:
        """Normalised token embeddings (n, H); of ids on the CPU only the rows in use leave the disk."""
        first, ceiling = self.draft.layers[0], self.draft.embed.shape[0] - 1
        if tokens.device.type != "cpu" and self.table is not None:
            rows = self.table[tokens.clamp(0, ceiling)] * contract.embed_scale
            return rms_norm(rows, first.input_layernorm, self.draft.eps)
        unique, back = tokens.cpu().unique(return_inverse=True)
        # A wrong vocab map can point outside the table.
        rows = self.draft.embed[unique.clamp(0, ceiling)].to(self.dtype)
        # The table stays on disk, so only rows in use are looked at: once as a sum, row by row if it is odd.
        if not torch.isfinite(rows.sum(dtype=self.wide)) and not torch.isfinite(rows).all():
            bad = (~torch.isfinite(rows)).any(-1).nonzero().flatten()
            raise CheckpointError(
                self.draft.path, "embed_tokens.weight", expected="finite values",
                found=f"NaN or Inf in the rows of {len(bad)} tokens in use, such as id {int(unique[bad[0]])}",
                remedy="the table was never loaded before saving: drop it and pass target=",
            )  # fmt: skip
        rows = send(rows, self.device) * contract.embed_scale
        return rms_norm(rows, first.input_layernorm, self.draft.eps)[send(back, self.device)]

    def hidden_norm(self, hidden: Tensor) -> Tensor:
        """The first layer's norm on states (n, H); drafts without `fc` may have none."""
        weight = self.draft.layers[0].hidden_norm
        return hidden if weight is None else rms_norm(hidden, weight, self.draft.eps)

    def first_step(self, batch: Batch, contract: Contract) -> tuple[Tensor, list]:
        """Depth 0: (S, H) output of the last layer, and per layer the keys and values of all pairs."""
        fused = batch.fused(contract)  # (N, H)
        normed = self.hidden_norm(fused)
        x = normed if contract.norm_before_residual else fused
        cos_sin = self.rope(batch.time, 0, contract)
        last, cache = len(self.draft.layers) - 1, []
        for i, (layer, attention) in enumerate(zip(self.draft.layers, self.attention, strict=True)):
            if i:
                normed = rms_norm(x, layer.input_layernorm, self.draft.eps)
            # Past the last layer only scored pairs go on; before it, deeper keys need every pair.
            rows = batch.rows if i == last else None
            if rows is not None:
                x = x[rows]
            kv = attention.kv_hidden(normed)
            q = attention.q_hidden(normed if rows is None else normed[rows])
            if not i:
                kv_share, q_share = batch.embed_share(contract)
                kv, q = kv_share + kv, q_share + q
            q, k, v = attention(q, kv, cos_sin, rows, contract.rope.interleaved)
            cache.append((k, v))
            x = self.finish(i, x, batch.layout.causal(q, k, v, attention.scale(contract.rope)))
        return x, cache

    def chain_step(self, batch, contract, depth, token, hidden, keys, chains) -> Tensor:
        """One more depth for every chain at once: (S, H) -> (S, H).

        A chain's query sees the true pairs up to its start and its own later steps, nothing of
        other chains.
        """
        normed = self.hidden_norm(hidden)
        x = normed if contract.norm_before_residual else hidden
        q, kv = self.first_projections(self.embed(token, contract), normed)
        cos_sin = self.rope(batch.time[batch.scored], depth, contract)
        for i, (layer, attention) in enumerate(zip(self.draft.layers, self.attention, strict=True)):
            if i:
                normed = rms_norm(x, layer.input_layernorm, self.draft.eps)
                q, kv = attention.q_hidden(normed), attention.kv_hidden(normed)
            q, k, v = attention(q, kv, cos_sin, None, contract.rope.interleaved)
            chains[i].append((k, v))
            scale = attention.scale(contract.rope)
            x = self.finish(i, x, batch.layout.chains(q, *keys[i], chains[i], scale, SCORE_BYTES))
        return x

    def first_projections(self, embeds: Tensor, normed: Tensor) -> tuple[Tensor, Tensor]:
        """First layer's products for q, and for keys and values, from both halves of its wide input."""
        first = self.attention[0]
        q = first.q_embed(embeds) + first.q_hidden(normed)
        return q, first.kv_embed(embeds) + first.kv_hidden(normed)

    def rope(self, time: Tensor, depth: int, contract: Contract) -> tuple[Tensor, Tensor]:
        """cos and sin on the device for the pairs at `time`, `depth` steps into their chains."""
        positions = time + contract.position_offset + depth * contract.position_step
        if contract.max_position is not None:
            positions = positions.clamp(max=contract.max_position - 1)
        # Positions repeat in every capture: compute each once.
        unique, back = positions.unique(return_inverse=True)
        table = rope_table(contract.rope, self.attention[0].rotary, unique, self.dtype)
        cos, sin, back = (send(x, self.device) for x in (*table, back))
        return cos[back], sin[back]

    def finish(self, index: int, residual: Tensor, attended: Tensor) -> Tensor:
        """Output projection, MLP and both residual additions of one layer: (n, H)."""
        layer = self.draft.layers[index]
        projected = product(attended, layer.o)
        x = residual + (projected if layer.o_bias is None else projected + layer.o_bias)
        normed = rms_norm(x, layer.post_attention_layernorm, self.draft.eps)
        gate, up = self.gate_up[index](normed).chunk(2, -1)  # (n, I) each
        return x + product(F.silu(gate) * up, layer.down)

    def head(self, normed: Tensor, keep: bool) -> tuple[Tensor, Tensor | None]:
        """Greedy draft ids (n,) from (n, H), in chunks; the logits too if `keep`."""
        best, kept = [], []
        for part in self.in_chunks(normed):
            logits = product(part, self.draft.lm_head)  # (rows, Vd)
            best.append(logits.argmax(-1))
            if keep:
                kept.append(logits)
        return torch.cat(best), torch.cat(kept) if keep else None


def to_device(draft: Draft, device: torch.device | str, dtype: torch.dtype | None = None) -> Draft:
    """The same draft with its weights elsewhere or in another dtype; the embedding stays mapped."""

    def move(value):
        if isinstance(value, Latent):
            return replace(value, **{f.name: move(getattr(value, f.name)) for f in fields(value)})
        if isinstance(value, Tensor) and value.dtype.is_floating_point:
            return value.to(device=device, dtype=dtype or value.dtype)
        return value

    names = ("fc", "fc_bias", "norm", "lm_head", "input_norm")
    return replace(
        draft,
        **{name: move(getattr(draft, name)) for name in names},
        fc_norm=tuple(move(t) for t in draft.fc_norm),
        layers=tuple(replace(x, **{k: move(v) for k, v in vars(x).items()}) for x in draft.layers),
    )
