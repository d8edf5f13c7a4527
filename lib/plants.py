"""The edits of the fault zoo: each returns a case with one thing changed, as a reader would find it on disk.

Every edit takes the case and a generator that draws its severity, and leaves the original as it is. What each
one is, and what is known of it, stands in `lib.faults`, one entry each.

Axes: L positions, H hidden, V target vocabulary, Vd draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lib.captures import FINAL, Capture
from lib.case import Case, Served
from lib.checkpoints import Draft
from lib.contract import Rope, Source
from lib.taps import Tap, default_triple

Plant = Callable[[Case, torch.Generator], Case]
Choice = Callable[[tuple[Tap, ...], Case, torch.Generator], Sequence[Tap]]
DECLARED = Source("checkpoint", "config.json")  # a planted field looks like any other in the file
BLOCK = 16  # tokens in a page of an engine's cache (vLLM's default block size)
FP16_MAX = 65504.0
OUTLIER = 0.9  # share of the largest activation from which a number is an outlier like it
DEFAULT_THETA = 10000.0  # of a config class that finds no rope_theta


def _draw(rng: torch.Generator, n: int) -> int:
    return int(torch.randint(0, n, (), generator=rng))


def _uniform(rng: torch.Generator, low: float, high: float) -> float:
    return low + (high - low) * float(torch.rand((), generator=rng))


def _draft(case: Case, **changes: Any) -> Case:
    return replace(case, draft=replace(case.draft, **changes))


def _declare(case: Case, config: dict[str, Any] | None = None, **changes: Any) -> Case:
    """Another declared contract, and the keys of `config.json` that would have said it."""
    contract = case.draft.contract.change(DECLARED, **changes)
    values = dict(case.draft.config)
    for key, value in (config or {}).items():
        if key in values:
            values[key] = value
        elif key in values.get("transformer_layer_config", {}):
            values["transformer_layer_config"] = {**values["transformer_layer_config"], key: value}
    return _draft(case, contract=contract, config=values)


def declared(**changes: Any) -> Plant:
    """Fields of the contract at these values."""
    return lambda case, rng: _declare(case, **changes)


def wired(choose: Choice) -> Plant:
    """The taps that `choose` makes of the declared ones, in the contract and in the config."""

    def edit(case: Case, rng: torch.Generator) -> Case:
        taps = tuple(choose(case.draft.contract.taps, case, rng))
        ids = [t.after_block for t in taps if isinstance(t, Tap)]
        return _declare(case, {"eagle_aux_hidden_state_layer_ids": ids}, taps=taps)

    return edit


def next_slots(taps: tuple[Tap, ...], case: Case, _rng: torch.Generator) -> list[Tap]:
    """Each slot gets the state of the next one; the last one that of two blocks before the end."""
    return [*taps[1:], Tap(case.head.n_layers - 2)]


def moved(by: int) -> Choice:
    """Every tap `by` blocks later; none before the embedding."""
    return lambda taps, _case, _rng: [Tap(max(0, t.after_block + by)) for t in taps]


def default(_taps: tuple[Tap, ...], case: Case, _rng: torch.Generator) -> Sequence[Tap]:
    """The triple of a reader that finds no ids."""
    return default_triple(case.head.n_layers)


def first(taps: tuple[Tap, ...], _case: Case, _rng: torch.Generator) -> list[Tap]:
    """Embedding, layer1, layer2."""
    return [Tap(i) for i in range(3)][: len(taps)]


def permuted(taps: tuple[Tap, ...], _case: Case, rng: torch.Generator) -> list[Tap]:
    """Another order of the slots; a rotation if the draw is the order itself."""
    order = torch.randperm(len(taps), generator=rng).tolist()
    return [taps[i] for i in (order if order != sorted(order) else [*order[1:], order[0]])]


def duplicated(taps: tuple[Tap, ...], _case: Case, rng: torch.Generator) -> list[Tap]:
    """One slot with the tap of another one."""
    lost = _draw(rng, len(taps))
    other = (lost + 1 + _draw(rng, len(taps) - 1)) % len(taps)
    return [taps[other] if i == lost else t for i, t in enumerate(taps)]


def flip_residual(case: Case, _rng: torch.Generator) -> Case:
    """norm_before_residual of the other value."""
    value = not case.draft.contract.norm_before_residual
    return _declare(case, {"norm_before_residual": value}, norm_before_residual=value)


def flip_feedback(case: Case, _rng: torch.Generator) -> Case:
    """The other state fed back, and norm_output to match."""
    value = "pre_norm" if case.draft.contract.feedback == "post_norm" else "post_norm"
    return _declare(case, {"norm_output": value == "post_norm"}, feedback=value)


def _rope(case: Case, rope: Rope, *, in_config: bool) -> Case:
    values = {"rope_theta": rope.theta, "rope_type": rope.kind, **dict(rope.params)}
    return _declare(case, {"rope_parameters": values} if in_config else None, rope=rope)


def theta_default(case: Case, _rng: torch.Generator) -> Case:
    """Theta 10000 in the contract alone."""
    # The key has moved: the file is right, the reader did not find it.
    return _rope(case, replace(case.draft.contract.rope, theta=DEFAULT_THETA), in_config=False)


def theta_other(case: Case, rng: torch.Generator) -> Case:
    """A theta that the draft was not trained with."""
    rope = case.draft.contract.rope
    others = [t for t in (150000.0, 500000.0, 1e6, 1e7) if t != rope.theta]
    return _rope(case, replace(rope, theta=others[_draw(rng, len(others))]), in_config=True)


def scaling(kind: str) -> Plant:
    """A scaling of this kind, with a factor that is drawn."""

    def edit(case: Case, rng: torch.Generator) -> Case:
        factor = float((2, 4, 8)[_draw(rng, 3)])
        params: dict[str, float] = {"factor": factor}
        if kind != "linear":
            params["original_max_position_embeddings"] = 8192
        if kind == "llama3":
            params |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
        rope = replace(case.draft.contract.rope, kind=kind, params=tuple(sorted(params.items())))
        return _rope(case, rope, in_config=True)

    return edit


def scaling_dropped(case: Case, _rng: torch.Generator) -> Case:
    """A plain rotary in place of a scaled one."""
    return _rope(case, replace(case.draft.contract.rope, kind="default", params=()), in_config=True)


def interleaved(case: Case, _rng: torch.Generator) -> Case:
    """The other layout of rotary pairs."""
    rope = case.draft.contract.rope
    return _rope(case, replace(rope, interleaved=not rope.interleaved), in_config=False)


def positions_moved(case: Case, rng: torch.Generator) -> Case:
    """Every position moved by a constant that is drawn."""
    return _declare(case, position_offset=2 + _draw(rng, 1000))


def embed_scaled(case: Case, _rng: torch.Generator) -> Case:
    """Embeddings scaled by sqrt(H)."""
    return _declare(case, embed_scale=case.draft.hidden_size**0.5)


def clamp(case: Case, rng: torch.Generator) -> Case:
    """A longest position between a quarter and a half of the shortest text."""
    shortest = min(len(c) for c in case.captures)
    limit = max(2, shortest // 4 + _draw(rng, max(1, shortest // 4)))
    return _declare(case, {"max_position_embeddings": limit}, max_position=limit)


# ---- maps


def _target_ids(draft: Draft) -> Tensor:
    """(Vd,) the target id that each draft id is declared to mean."""
    return draft.to_target(torch.arange(draft.draft_vocab))


def _with_map(case: Case, d2t: Tensor, *, table: bool) -> Case:
    """Another d2t; t2d too, if the same cause would have written it."""
    draft = case.draft
    changes: dict[str, Tensor] = {"d2t": d2t}
    if table and draft.t2d is not None:
        ids = d2t + torch.arange(len(d2t))
        changes["t2d"] = torch.zeros_like(draft.t2d).index_fill_(0, ids, True)
    return _draft(case, **changes)


def map_target_ids(case: Case, _rng: torch.Generator) -> Case:
    """Target ids where offsets belong."""
    return _with_map(case, _target_ids(case.draft), table=False)


def map_arange(case: Case, _rng: torch.Generator) -> Case:
    """d2t as 0, 1, 2, ..."""
    return _with_map(case, torch.arange(case.draft.draft_vocab), table=False)


def map_zeros(case: Case, _rng: torch.Generator) -> Case:
    """d2t of zeros."""
    return _with_map(case, torch.zeros(case.draft.draft_vocab, dtype=torch.int64), table=False)


def map_other_corpus(case: Case, rng: torch.Generator) -> Case:
    """A map of the right size from other text: part of its ids are the right ones, at other places."""
    draft = case.draft
    ids = _target_ids(draft)
    kept = ids[torch.randperm(len(ids), generator=rng)[: int(_uniform(rng, 0.3, 0.7) * len(ids))]]
    others = torch.ones(draft.target_vocab, dtype=torch.bool).index_fill_(0, ids, False).nonzero().flatten()
    fresh = others[torch.randperm(len(others), generator=rng)[: len(ids) - len(kept)]]
    mixed = torch.cat((kept, fresh)).sort().values
    return _with_map(case, mixed - torch.arange(len(ids)), table=True)


def map_permuted(case: Case, rng: torch.Generator) -> Case:
    """The right ids in another order."""
    ids = _target_ids(case.draft)
    return _with_map(case, ids[torch.randperm(len(ids), generator=rng)] - torch.arange(len(ids)), table=False)


def full_vocabulary(case: Case, _rng: torch.Generator) -> Case:
    """The same draft with a row for every target id; d2t is all zeros, as it must be then.

    Rows of ids it cannot say are zero: their logit 0 never wins while the best one is positive.
    """
    draft = case.draft
    head = torch.zeros(draft.target_vocab, draft.hidden_size, dtype=draft.lm_head.dtype)
    head[_target_ids(draft)] = draft.lm_head
    return _draft(
        case, lm_head=head, d2t=torch.zeros(draft.target_vocab, dtype=torch.int64),
        t2d=torch.ones(draft.target_vocab, dtype=torch.bool),
        config={**draft.config, "draft_vocab_size": draft.target_vocab},
    )  # fmt: skip


# ---- weights


def embed_random(case: Case, rng: torch.Generator) -> Case:
    """An embedding of the draft's own, as initialised."""
    draft = case.draft
    table = 0.02 * torch.randn(draft.embed.shape, generator=rng)
    notes = tuple(n for n in draft.notes if not n.startswith("embed_tokens"))
    return _draft(case, embed=table, keys={**draft.keys, "embed_tokens.weight": "used"}, notes=notes)


def lm_head_overwritten(case: Case, _rng: torch.Generator) -> Case:
    """The target's rows in place of the draft's."""
    draft = case.draft
    return _draft(case, lm_head=case.head.lm_head[_target_ids(draft)].to(draft.lm_head.dtype))


def fresh_layer(case: Case, rng: torch.Generator) -> Case:
    """The first layer as a framework initialises it: N(0, 0.02) weights, norm weights one, biases zero."""

    def fresh(name: str, tensor: Tensor) -> Tensor:
        if name.endswith("norm"):
            return torch.ones_like(tensor)
        noise = torch.randn(tensor.shape, generator=rng).to(tensor.dtype)
        return 0.02 * noise if tensor.ndim == 2 else torch.zeros_like(tensor)

    first = case.draft.layers[0]
    tensors = {k: fresh(k, v) for k, v in vars(first).items() if isinstance(v, Tensor)}
    return _draft(case, layers=(replace(first, **tensors), *case.draft.layers[1:]))


def norm_of_ones(case: Case, rng: torch.Generator) -> Case:
    """One of the norm weights is one everywhere."""
    draft, first = case.draft, case.draft.layers[0]
    names = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
    names = [n for n in names if getattr(first, n) is not None]
    chosen = [*names, "norm"][_draw(rng, len(names) + 1)]
    if chosen == "norm":
        return _draft(case, norm=torch.ones_like(draft.norm))
    layer = replace(first, **{chosen: torch.ones_like(getattr(first, chosen))})
    return _draft(case, layers=(layer, *draft.layers[1:]))


def hidden_norm_lost(case: Case, _rng: torch.Generator) -> Case:
    """The first layer without its norm of the states."""
    layers = (replace(case.draft.layers[0], hidden_norm=None), *case.draft.layers[1:])
    return _draft(case, layers=layers)


def weight_nan(case: Case, rng: torch.Generator) -> Case:
    """NaN in one row of the MLP's last matrix; `load_draft` refuses such a file, another loader may not."""
    first = case.draft.layers[0]
    down = first.down.clone()
    down[_draw(rng, len(down))] = float("nan")
    return _draft(case, layers=(replace(first, down=down), *case.draft.layers[1:]))


def layer_lost(case: Case, _rng: torch.Generator) -> Case:
    """The first layer only."""
    return _draft(case, layers=case.draft.layers[:1])


def weak(case: Case, rng: torch.Generator) -> Case:
    """Noise on the MLP weights: less trained, wired right."""
    amount = _uniform(rng, 1.0, 2.0)

    def noisy(w: Tensor) -> Tensor:
        return w + amount * w.std() * torch.randn(w.shape, generator=rng).to(w.dtype)

    parts = ("gate", "up", "down")
    layers = tuple(replace(x, **{p: noisy(getattr(x, p)) for p in parts}) for x in case.draft.layers)
    return _draft(case, layers=layers)


def fp8(case: Case, _rng: torch.Generator) -> Case:
    """The layers' matrices rounded to fp8 (e4m3) with one scale per tensor; fc, head, embedding not."""

    def rounded(w: Tensor | None) -> Tensor | None:
        if not isinstance(w, Tensor) or w.ndim != 2:
            return w
        scale = w.abs().max() / torch.finfo(torch.float8_e4m3fn).max
        return (w / scale).to(torch.float8_e4m3fn).to(w.dtype) * scale

    layers = tuple(replace(x, **{k: rounded(v) for k, v in vars(x).items()}) for x in case.draft.layers)
    return _draft(case, layers=layers)


def sample_draft(letter: str) -> Plant:
    """Another sample draft, declared as it was trained."""

    def edit(case: Case, _rng: torch.Generator) -> Case:
        from lib import samples

        draft = samples.draft(letter, case.head)
        trained = draft.contract.change(DECLARED, taps=samples.TRAINED_TAPS[letter])
        ids = [t.after_block for t in trained.taps]
        config = {**draft.config, "eagle_aux_hidden_state_layer_ids": ids}
        return replace(case, draft=replace(draft, contract=trained, config=config))

    return edit


# ---- states


def _captures(case: Case, change: Callable[[Capture, int], Capture]) -> Case:
    return replace(case, captures=tuple(change(c, i) for i, c in enumerate(case.captures)))


def _rows(capture: Capture, index: Tensor) -> Capture:
    """The same tokens with rows `index` (L,) of every state in place of their own."""
    return capture.with_states(lambda x: x[index])


def slot_zero(case: Case, rng: torch.Generator) -> Case:
    """Zeros in one of the taps."""
    taps = case.draft.contract.taps
    lost = taps[_draw(rng, len(taps))]
    return _captures(case, lambda c, _: c.with_state(lost, torch.zeros_like))


def rotated(case: Case, rng: torch.Generator) -> Case:
    """Every state turned by one random rotation."""
    width = case.captures[0].hidden_size
    turn = torch.linalg.qr(torch.randn(width, width, generator=rng, dtype=torch.float64)).Q.float()  # (H, H)
    return _captures(case, lambda c, _: c.with_states(lambda x: (x.float() @ turn).to(x.dtype)))


def tail_shifted(case: Case, rng: torch.Generator) -> Case:
    """One block of rows was served from a cache and never written; the file was padded to its length."""
    part = [c for c in range(len(case.captures)) if _draw(rng, 4)] or [0]
    starts = [BLOCK * (1 + _draw(rng, max(1, len(c) // (2 * BLOCK)))) for c in case.captures]

    def shift(capture: Capture, i: int) -> Capture:
        if i not in part:
            return capture
        at = torch.arange(len(capture))
        moved = (at + BLOCK).clamp(max=len(capture) - 1)  # padded with the last row
        return _rows(capture, torch.where(at < starts[i], at, moved))

    return _captures(case, shift)


def files_swapped(case: Case, rng: torch.Generator) -> Case:
    """A share of the files (two or more) holds the states of another one of them."""
    n = len(case.captures)
    chosen = torch.randperm(n, generator=rng)[: max(2, n // 3)].tolist()
    source = dict(zip(chosen, [*chosen[1:], chosen[0]], strict=True))

    def swap(capture: Capture, i: int) -> Capture:
        if i not in source:
            return capture
        other = case.captures[source[i]]
        index = torch.arange(len(capture)) % len(other)  # as long as its tokens: nothing shows from outside
        shared = capture.readers.keys() & other.readers.keys()
        readers = {k: (lambda read=other.readers[k]: read()[index]) for k in capture.readers if k in shared}
        return replace(capture, readers={**capture.readers, **readers})

    return _captures(case, swap)


def overflow(case: Case, _rng: torch.Generator) -> Case:
    """The largest tap as an fp16 run leaves it whose outliers pass 65504: Inf there."""
    largest = {t: float(case.captures[0].state(t).float().abs().max()) for t in case.draft.contract.taps}
    tap = max(largest, key=largest.__getitem__)

    def half(x: Tensor) -> Tensor:
        size = x.float().abs()
        # A target that does overflow: its outliers pass the limit, the other numbers are what they are here.
        over = (size >= min(OUTLIER * float(size.max()), FP16_MAX)) & (size > 0)
        return torch.where(over, x.float().sign() * torch.inf, x.float()).half()

    return _captures(case, lambda c, _: c.with_state(tap, half))


def bf16(case: Case, _rng: torch.Generator) -> Case:
    """Every state rounded to bf16."""
    return _captures(case, lambda c, _: c.with_states(lambda x: x.to(torch.bfloat16)))


def final_early(case: Case, _rng: torch.Generator) -> Case:
    """The final state is that of one block before."""
    last = Tap(case.head.n_layers - 1)
    return _captures(case, lambda c, _: replace(c, readers={**c.readers, FINAL: c.readers[last]}))


def final_is_slot(case: Case, _rng: torch.Generator) -> Case:
    """The final state is the last slot's."""
    tap = case.draft.contract.taps[-1]
    return _captures(case, lambda c, _: replace(c, readers={**c.readers, FINAL: c.readers[tap]}))


def final_unnormed(case: Case, _rng: torch.Generator) -> Case:
    """A final state before the norm, said to be after it."""
    return _captures(case, lambda c, _: replace(c, final_kind="post_norm"))


def final_normed(case: Case, _rng: torch.Generator) -> Case:
    """The final norm applied to a final state that is said to be before it."""
    head = case.head

    def norm(x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + head.eps) * head.norm.float()
        return wide.to(x.dtype)

    return _captures(case, lambda c, _: c.with_state(FINAL, norm))


def few(case: Case, _rng: torch.Generator) -> Case:
    """The first three conversations."""
    return replace(case, captures=case.captures[:3])


def unused_taps(case: Case, rng: torch.Generator) -> Case:
    """The wanted taps and at most four others, stored in any order."""
    first = case.captures[0]
    others = [t for t in first.taps if t not in case.draft.contract.taps]
    extra = [others[i] for i in torch.randperm(len(others), generator=rng)[:4]]
    kept = [*dict.fromkeys(case.draft.contract.taps), *extra]
    order = [kept[i] for i in torch.randperm(len(kept), generator=rng)]

    def keep(capture: Capture, _i: int) -> Capture:
        readers = {t: capture.readers[t] for t in order}
        readers |= {FINAL: capture.readers[FINAL]} if FINAL in capture.readers else {}
        return replace(capture, taps=tuple(order), readers=readers)

    return _captures(case, keep)


# ---- masks and text


def mask_of(value: bool) -> Plant:
    """The same value everywhere."""
    return lambda case, _rng: _captures(
        case, lambda c, _i: replace(c, loss_mask=torch.full_like(c.loss_mask, value))
    )


def mask_shifted(case: Case, rng: torch.Generator) -> Case:
    """The mask a token early or late."""
    by = (-1, 1)[_draw(rng, 2)]

    def shift(c: Capture, _i: int) -> Capture:
        mask = c.loss_mask.roll(by)
        mask[0 if by > 0 else -1] = c.loss_mask[0 if by > 0 else -1]
        return replace(c, loss_mask=mask)

    return _captures(case, shift)


def _recaptured(capture: Capture, case: Case, ids: Tensor, mask: Tensor) -> Capture:
    """The live target's states on other tokens, at the same taps."""
    from lib.target import record_states

    model = case.live.model
    last = Tap(model.config.num_hidden_layers)
    wanted = tuple(t for t in capture.taps if isinstance(t, Tap))
    found = record_states(model, ids[None], tuple(dict.fromkeys((*wanted, last))))
    readers: dict[Tap | str, Callable[[], Tensor]] = {t: (lambda x=found[t][0]: x) for t in wanted}
    if FINAL in capture.readers:
        readers[FINAL] = lambda: found[last][0]
    return replace(
        capture, token_ids=ids, loss_mask=mask, taps=wanted, readers=readers,
        final_kind="pre_norm" if FINAL in capture.readers else None,
    )  # fmt: skip


def text_shuffled(case: Case, rng: torch.Generator) -> Case:
    """Every answer's tokens in another order: nothing the target would write."""

    def shuffle(c: Capture, _i: int) -> Capture:
        at = c.loss_mask.nonzero().flatten()
        ids = c.token_ids.clone()
        ids[at] = ids[at[torch.randperm(len(at), generator=rng)]]
        return _recaptured(c, case, ids, c.loss_mask)

    return _captures(case, shuffle)


def text_of_others(case: Case, rng: torch.Generator) -> Case:
    """Every prompt with the answer to another one: fluent, and not the target's answer to it."""
    order = torch.randperm(len(case.captures), generator=rng).tolist()
    after = dict(zip(order, [*order[1:], order[0]], strict=True))

    def answer(c: Capture, i: int) -> Capture:
        other = case.captures[after[i]]
        start = int(c.loss_mask.nonzero()[0, 0])
        ids = torch.cat((c.token_ids[:start], other.token_ids[other.loss_mask]))
        return _recaptured(c, case, ids, torch.arange(len(ids)) >= start)

    return _captures(case, answer)


def ids_beyond(case: Case, rng: torch.Generator) -> Case:
    """One token id a text that no vocabulary has."""
    vocab = case.draft.target_vocab

    def beyond(c: Capture, _i: int) -> Capture:
        ids = c.token_ids.clone()
        ids[_draw(rng, len(ids))] = vocab + _draw(rng, 64)
        return replace(c, token_ids=ids)

    return _captures(case, beyond)


# ---- engine counters


def counted(counts: Callable[[Any, torch.Generator], tuple[int, ...]]) -> Plant:
    """Counters of an engine, made of the rounds that are possible."""

    def edit(case: Case, rng: torch.Generator) -> Case:
        from lib.acceptance import rollouts, walk
        from lib.draft import DraftForward

        rounds = walk(rollouts(DraftForward(case.draft), case.captures, depth=5), case.captures)
        return replace(case, served=Served(len(rounds), counts(rounds, rng)))

    return edit


def fewer(rounds: Any, rng: torch.Generator) -> tuple[int, ...]:
    """A share of them, smaller with depth."""
    keep = _uniform(rng, 0.5, 0.8)
    return tuple(int(n * keep ** (i + 1)) for i, n in enumerate(rounds.accepted_at))


def all_or_nothing(rounds: Any, rng: torch.Generator) -> tuple[int, ...]:
    """None of them accepted, or all."""
    return (len(rounds) * _draw(rng, 2),) * rounds.depth


def target_theta(case: Case, rng: torch.Generator) -> Case:
    """Another theta in the target's own config: drafts may be trained with one of their own."""
    config = dict(case.head.config)
    theta = (500000.0, 1e6, 1e7)[_draw(rng, 3)]
    config["rope_parameters"] = {**(config.get("rope_parameters") or {}), "rope_theta": theta}
    if "rope_theta" in config:
        config["rope_theta"] = theta
    return replace(case, head=replace(case.head, config=config))
