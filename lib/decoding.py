"""Live decoding: plain, and speculative with an EAGLE-3 draft under any contract.

One round: the draft takes the target's true states for every token that entered the text since the
last round, proposes a chain, the target checks it in one pass, and both caches forget what was
refused. Greedy speculation is lossless: token for token the target's own greedy text, whatever the
contract, because only the target's choices enter it. A wrong contract costs speed, nothing else;
that is why nobody notices.

Positions: pair t is (state g_t, token x_{t+1}); it predicts x_{t+2} (see lib/draft.py).
Axes: n new tokens, V target vocabulary, Vd draft vocabulary, H hidden.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from lib.acceptance import Costs
from lib.attention import mix, rms_norm
from lib.captures import Capture
from lib.contract import Contract
from lib.draft import DraftForward
from lib.errors import ContractError, TargetError
from lib.products import product, thin
from lib.taps import Stored, Tap
from lib.target import record_states, watch


@dataclass(frozen=True)
class Generation:
    """One decoded answer.

    Attributes:
        prompt, tokens: (P,) and (n,) int64; an end token is part of `tokens`.
        accepted: draft tokens that entered the text, per round; empty for plain decoding.
        gained: tokens that entered the text, per round.
        seconds: time after the prompt's pass; prefill: time of that pass (it yields the first token).
        depth: draft tokens proposed per round; 0 for plain decoding.
    """

    prompt: Tensor
    tokens: Tensor
    accepted: tuple[int, ...]
    gained: tuple[int, ...]
    seconds: float
    prefill: float
    depth: int

    @property
    def speed(self) -> float:
        """Tokens a second after the prompt's pass."""
        return (len(self.tokens) - 1) / self.seconds

    @property
    def tokens_per_round(self) -> float:
        """Mean tokens a round added, bonus included; 1 for plain decoding."""
        return sum(self.gained) / len(self.gained) if self.gained else 1.0


class LiveTarget(AbstractContextManager):
    """A target with its key/value cache: append tokens, read logits and states, roll back.

    Thin products are switched on in the model, for plain and speculative decoding alike (`products.thin`).
    """

    def __init__(self, model, taps: Sequence[Tap] = ()) -> None:
        from transformers import DynamicCache

        self.model = thin(model)
        self.cache = DynamicCache(config=model.config)
        self.taps = tuple(taps)
        self.scope = ExitStack()

    def __enter__(self) -> LiveTarget:
        self.seen = self.scope.enter_context(watch(self.model, self.taps))
        return self

    def __exit__(self, *error) -> None:
        self.scope.close()

    @torch.inference_mode()
    def append(self, tokens: Tensor, last_only: bool = False) -> Tensor:
        """Logits (n, V) after each of `tokens` (n,), or (1, V) after the last; fills the cache."""
        out = self.model.model(input_ids=tokens[None], past_key_values=self.cache, use_cache=True)
        hidden = out.last_hidden_state[0]  # (n, H), after the final norm
        return self.model.lm_head(hidden[-1:] if last_only else hidden)

    def states(self, n: int) -> dict[Tap, Tensor]:
        """States (n, H) at each tap for the first n tokens of the last `append`."""
        return {tap: self.seen[tap][0, :n] for tap in self.taps}

    def rollback(self, n: int) -> None:
        """Forget the last n tokens."""
        if n:
            self.cache.crop(-n)  # a negative number is a number of tokens to remove (transformers 5)


class LiveDraft:
    """A draft with its key/value cache, extended with true states and drafting chains from them."""

    def __init__(self, forward: DraftForward, contract: Contract, capacity: int) -> None:
        self.forward, self.contract = forward, contract
        self.length = 0  # true pairs in the cache; a chain's entries lie behind them
        like = forward.draft.norm
        self.keys = [like.new_empty(capacity, a.groups, a.key) for a in forward.attention]
        self.values = [like.new_empty(capacity, a.groups, a.value) for a in forward.attention]

    @torch.inference_mode()
    def extend(self, tokens: Tensor, states: Mapping[Tap, Tensor]) -> Tensor:
        """Take n true pairs: token ids (n,), states (n, Ht) at each tap. Returns (1, H), the last one's."""
        f = self.forward
        inputs = {tap: x.to(f.device, f.dtype) for tap, x in states.items()}
        hidden = f.fuse(
            self.contract,
            inputs.__getitem__,
            lambda slot, tap, kind: f.slot_product(slot, inputs[tap], kind),
        )
        times = torch.arange(self.length, self.length + len(tokens), device=f.device)
        self.length += len(tokens)
        return self._layers(f.embed(tokens, self.contract), hidden, times, 0)

    @torch.inference_mode()
    def propose(
        self, hidden: Tensor, depth: int, temperature: float = 0.0, rng: torch.Generator | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """A chain of `depth` tokens from the last true pair.

        Returns: target ids (depth,), unclamped; and q (depth, Vd), the distributions they were drawn
        from, or None when greedy. The cache's true part is untouched.
        """
        f, c = self.forward, self.contract
        ids, drawn_from = [], []
        time_of_last = torch.tensor([self.length - 1], device=f.device)
        for step in range(depth):
            if step:
                embeds = f.embed(f.draft.to_target(ids[-1], c.vocab_map), c)
                hidden = self._layers(embeds, hidden, time_of_last, step)
            normed = rms_norm(hidden, f.draft.norm, f.draft.eps)
            logits = product(normed if c.head_norm else hidden, f.draft.lm_head)  # (1, Vd)
            if temperature:
                q = (logits.float() / temperature).softmax(-1)
                drawn_from.append(q)
                ids.append(torch.multinomial(q.cpu(), 1, generator=rng)[0].to(f.device))
            else:
                ids.append(logits.argmax(-1))
            hidden = normed if c.feedback == "post_norm" else hidden
        chain = f.draft.to_target(torch.cat(ids), c.vocab_map).cpu()
        return chain, torch.cat(drawn_from).cpu() if temperature else None

    def _layers(self, embeds: Tensor, hidden: Tensor, times: Tensor, step: int) -> Tensor:
        """All decoder layers over n new rows whose keys follow those in the cache: (1, H) of the last."""
        f, c, n = self.forward, self.contract, len(embeds)
        start = int(times[0]) + step
        normed = f.hidden_norm(hidden)
        x = normed if c.norm_before_residual else hidden
        q, kv = f.first_projections(embeds, normed)
        cos_sin = f.rope(times, step, c)
        for i, (layer, attention) in enumerate(zip(f.draft.layers, f.attention, strict=True)):
            if i:
                normed = rms_norm(x, layer.input_layernorm, f.draft.eps)
                q, kv = attention.q_hidden(normed), attention.kv_hidden(normed)
            q, k, v = attention(q, kv, cos_sin, None, c.rope.interleaved)
            self.keys[i][start : start + n], self.values[i][start : start + n] = k, v
            if i == len(f.draft.layers) - 1:  # only the last row goes on from here
                q, x = q[-1:], x[-1:]
            x = f.finish(i, x, self._attend(i, q, start + n))
        return x

    def _attend(self, layer: int, q: Tensor, end: int) -> Tensor:
        """Causal attention of the last rows (m, h, d) over the first `end` cache entries: (m, h dv)."""
        m = len(q)
        k, v = (x[layer][:end].transpose(0, 1)[None] for x in (self.keys, self.values))  # (1, g, end, .)
        mask = None
        if m > 1:
            rows = torch.arange(end - m, end, device=q.device)
            mask = torch.arange(end, device=q.device)[None] <= rows[:, None]  # (m, end)
        scale = self.forward.attention[layer].scale(self.contract.rope)
        out = mix(q.transpose(0, 1)[None], k, v, scale, attn_mask=mask)
        return out[0].transpose(0, 1).flatten(1)  # (1, h, m, dv) -> (m, h dv)


def end_tokens(model) -> frozenset[int]:
    """Ids that end an answer, from the model's own generation settings."""
    ids = model.generation_config.eos_token_id
    return frozenset([] if ids is None else ids if isinstance(ids, list) else [ids])


def decode(
    model,
    prompt: Tensor,
    max_tokens: int,
    *,
    temperature: float = 0.0,
    rng: torch.Generator | None = None,
) -> Generation:
    """Plain decoding: one target pass a token. The baseline that speculation has to beat.

    Raises TargetError for an empty prompt or one that leaves no room in the context.
    """
    _check_request(model, prompt, max_tokens, 0, temperature)
    ends, tokens = end_tokens(model), []
    with LiveTarget(model) as target:
        began = time.perf_counter()
        tokens.append(_choose(target.append(prompt, last_only=True)[-1], temperature, rng))
        first = time.perf_counter()
        while len(tokens) < max_tokens and tokens[-1] not in ends:
            tokens.append(_choose(target.append(torch.tensor(tokens[-1:]))[-1], temperature, rng))
        done = time.perf_counter()
    return Generation(prompt, torch.tensor(tokens), (), (), done - first, first - began, 0)


def speculate(
    model,
    forward: DraftForward,
    prompt: Tensor,
    max_tokens: int,
    *,
    depth: int,
    contract: Contract | None = None,
    temperature: float = 0.0,
    rng: torch.Generator | None = None,
) -> Generation:
    """Speculative decoding with a chain of `depth` draft tokens a round, under a contract.

    Greedy at temperature 0; otherwise the rejection rule of `accept`, whose text has the target's
    own distribution.

    Raises TargetError / ContractError for whatever does not fit, before any work is done.
    """
    contract = contract or forward.draft.contract
    _check_request(model, prompt, max_tokens, depth, temperature)
    check_pair(model, forward, contract, depth)
    ends, size = end_tokens(model), model.config.vocab_size
    text = prompt.tolist()
    accepted, gained = [], []
    taps = tuple(dict.fromkeys(contract.taps))
    with LiveTarget(model, taps) as target:
        draft = LiveDraft(forward, contract, len(text) + max_tokens + depth)
        began = time.perf_counter()
        text.append(_choose(target.append(prompt, last_only=True)[-1], temperature, rng))
        states = target.states(len(prompt))
        first = time.perf_counter()
        last = len(prompt) + max_tokens
        while len(text) < last and text[-1] not in ends:
            known = range(draft.length, len(text) - 1)  # pairs whose state and token are both true now
            at = [t + contract.token_shift for t in known]
            hidden = draft.extend(torch.tensor([text[i] if i >= 0 else 0 for i in at]), states)
            chain, q = draft.propose(hidden, depth, temperature, rng)
            legal = chain.clamp(0, size - 1)  # a wrong vocabulary map can point outside the model
            logits = target.append(torch.cat((torch.tensor(text[-1:]), legal)))  # (depth + 1, V)
            if temperature:
                p = (logits.float() / temperature).softmax(-1)
                hits, bonus = accept(p, to_target_rows(q, forward, contract, size), legal, rng)
            else:
                best = logits.argmax(-1).cpu()
                hits = int((chain == best[:-1]).int().cumprod(0).sum())
                bonus = int(best[hits])
            new = _until_end([*legal[:hits].tolist(), bonus], ends)[: last - len(text)]
            text += new
            accepted.append(min(hits, len(new)))
            gained.append(len(new))
            target.rollback(depth - hits)
            states = target.states(hits + 1)
        done = time.perf_counter()
    tokens = torch.tensor(text[len(prompt) :])
    return Generation(prompt, tokens, tuple(accepted), tuple(gained), done - first, first - began, depth)


def accept(p: Tensor, q: Tensor, drafted: Tensor, rng: torch.Generator | None = None) -> tuple[int, int]:
    """The rejection rule of speculative sampling (Leviathan et al. 2023, algorithm 1).

    Args:
        p: (k + 1, V) the target's distributions; q: (k, V) the draft's, in the target's vocabulary.
        drafted: (k,) ids drawn from q.

    Returns: how many draft tokens are accepted, and the token that follows them: drawn from
    p where all were, from max(p - q, 0) where one was refused.
    """
    for i, token in enumerate(drafted.tolist()):
        if torch.rand((), generator=rng) * q[i, token] >= p[i, token]:
            rest = (p[i] - q[i]).clamp(min=0)
            # p == q up to rounding: refusing had probability 0, so p itself is as good
            rest = rest if rest.sum() > 0 else p[i]
            return i, int(torch.multinomial(rest.cpu(), 1, generator=rng))
    return len(drafted), int(torch.multinomial(p[-1].cpu(), 1, generator=rng))


def to_target_rows(q: Tensor, forward: DraftForward, contract: Contract, size: int) -> Tensor:
    """(k, Vd) draft distributions -> (k, size) over the target's ids, as `propose`'s clamped ids see them."""
    ids = forward.draft.to_target(torch.arange(q.shape[1]), contract.vocab_map).clamp(0, size - 1)
    return torch.zeros(len(q), size).index_add_(1, ids, q)


def _choose(logits: Tensor, temperature: float, rng: torch.Generator | None) -> int:
    if not temperature:
        return int(logits.argmax())
    return int(torch.multinomial((logits.float() / temperature).softmax(-1).cpu(), 1, generator=rng))


def _until_end(tokens: list[int], ends: frozenset[int]) -> list[int]:
    stop = next((i for i, token in enumerate(tokens) if token in ends), len(tokens) - 1)
    return tokens[: stop + 1]


def _check_request(model, prompt: Tensor, max_tokens: int, depth: int, temperature: float) -> None:
    room = model.config.max_position_embeddings
    length = prompt.numel()
    for field, ok, expected, found, remedy in (
        ("prompt", prompt.ndim == 1 and length > 0, "at least one token id, shape (P,)",
         f"shape {tuple(prompt.shape)}", "apply the chat template first"),
        ("max_tokens", max_tokens >= 1, "1 or more", str(max_tokens), "ask for at least one token"),
        ("context", length + max_tokens + depth <= room, f"at most {room} positions",
         f"{length} + {max_tokens} + {depth}", "shorten the prompt or ask for fewer tokens"),
        ("temperature", temperature >= 0, "0 (greedy) or more", str(temperature), "use 0 for greedy"),
    ):  # fmt: skip
        if not ok:
            raise TargetError("decoding", field, expected=expected, found=found, remedy=remedy)
    foreign = prompt[(prompt < 0) | (prompt >= model.config.vocab_size)]
    if len(foreign):
        raise TargetError(
            "decoding", "prompt", expected=f"ids from 0 to {model.config.vocab_size - 1}",
            found=str(int(foreign[0])), remedy="use the tokenizer of this target",
        )  # fmt: skip


def check_pair(model, forward: DraftForward, contract: Contract, depth: int) -> None:
    """Whether draft, contract and target fit each other; raises ContractError naming what does not."""
    d, config = forward.draft, model.config
    widths = len(contract.taps) * config.hidden_size if contract.use_fc else config.hidden_size
    slots = 0 if forward.fc is None else forward.fc.shape[1]
    expected_width = slots if contract.use_fc else d.hidden_size
    available = ["none"] + ["input_norm"] * (d.input_norm is not None) + ["fc_norm"] * bool(d.fc_norm)
    unnamed = [str(t) for t in contract.taps if isinstance(t, Stored)]
    beyond = [
        str(t) for t in contract.taps if isinstance(t, Tap) and t.after_block > config.num_hidden_layers
    ]
    for field, ok, expected, found, remedy in (
        ("depth", depth >= 1, "1 or more draft tokens a round", str(depth),
         "use decode() for no speculation"),
        ("taps", not unnamed, "taps of the live target", str(unnamed),
         "name the states: contract.change(taps=['embed', 'layer3', ...])"),
        ("taps", not beyond, f"taps up to layer{config.num_hidden_layers}", str(beyond),
         "choose taps inside this target"),
        ("fc", widths == expected_width, f"{expected_width} inputs, as the draft has", f"{widths} here",
         "use the target that the draft was trained for, and one tap per slot"),
        ("fc_input_norm", contract.fc_input_norm in available, f"one of {available}",
         f"{contract.fc_input_norm}, whose weights the draft lacks",
         "set fc_input_norm to what the draft was trained with"),
        ("vocabulary", d.target_vocab == config.vocab_size, f"{config.vocab_size} ids, the target's",
         f"{d.target_vocab} in the draft", "use the target that the draft was trained for"),
        ("token_shift", contract.token_shift <= 1, "1 or less", str(contract.token_shift),
         "a live run does not know later tokens yet; such contracts exist offline only"),
    ):  # fmt: skip
        if not ok:
            raise ContractError("decoding", field, expected=expected, found=found, remedy=remedy)


def as_capture(model, generation: Generation, taps: Sequence[Tap], name: str = "live") -> Capture:
    """The live text as a capture in memory: states of one full pass at `taps` and the final state."""
    ids = torch.cat((generation.prompt, generation.tokens))
    final = Tap(model.config.num_hidden_layers)
    states = record_states(model, ids[None], [*dict.fromkeys([*taps, final])])
    readers = {tap: (lambda x=states[tap][0]: x) for tap in taps}
    readers["final"] = lambda: states[final][0]
    mask = torch.arange(len(ids)) >= len(generation.prompt)
    return Capture(
        name, Path(name), "live", ids, mask, tuple(taps), model.config.hidden_size, readers, "pre_norm"
    )


def measure_costs(
    model,
    forward: DraftForward,
    prompt: Tensor,
    depths: Sequence[int],
    *,
    contract: Contract | None = None,
    repeats: int = 5,
) -> Costs:
    """Median seconds of the parts of a round on this machine, with `prompt` in both caches.

    Parts of all kinds take turns inside each repeat, so that a slow moment hits all of them.
    """
    contract = contract or forward.draft.contract
    for field, ok, expected, found in (
        ("depths", len(depths) > 0, "at least one", "none"),
        ("repeats", repeats >= 1, "1 or more", str(repeats)),
        ("prompt", prompt.numel() >= 3, "3 tokens or more, for two pairs of a round", str(prompt.numel())),
    ):
        if not ok:
            raise TargetError("costs", field, expected=expected, found=found, remedy="give more to measure")
    _check_request(model, prompt, 2, max(depths), 0)
    for depth in depths:
        check_pair(model, forward, contract, depth)
    taps = tuple(dict.fromkeys(contract.taps))
    times: dict[tuple[str, int], list[float]] = {}
    filler = prompt[:1].repeat(max(depths) + 1)
    with LiveTarget(model, taps) as target:
        draft = LiveDraft(forward, contract, len(prompt) + max(depths) + 2)
        target.append(prompt, last_only=True)
        states = target.states(len(prompt) - 1)
        draft.extend(prompt[1:], states)
        pair = {tap: x[-2:] for tap, x in states.items()}
        for _ in range(repeats + 1):
            for width in sorted({1, *(d + 1 for d in depths)}):
                began = time.perf_counter()
                target.append(filler[:width]).argmax(-1)
                times.setdefault(("verify", width), []).append(time.perf_counter() - began)
                target.rollback(width)
            for depth in depths:
                began = time.perf_counter()
                draft.propose(draft.extend(prompt[:2], pair), depth)
                times.setdefault(("draft", depth), []).append(time.perf_counter() - began)
                draft.length -= 2
    middle = {key: statistics.median(values[1:]) for key, values in times.items()}  # first is warm-up
    verify = {n: s for (kind, n), s in middle.items() if kind == "verify"}
    return Costs(verify[1], verify, {n: s for (kind, n), s in middle.items() if kind == "draft"})
