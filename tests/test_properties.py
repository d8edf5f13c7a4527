"""Every fast path against a slow one, at random shapes: a loop in numpy's float64, and speculators' model.

A `Case` is one draw: 1 to 9 texts of 1 to 512 tokens, depths 0 to 8, 1 to 4 key heads with 1, 2, 4 or 8 query
heads each, 1 to 5 slots, 1 or 2 layers, any loss mask; and how the fast path cuts its work.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st

from lib.acceptance import rollouts, walk
from lib.captures import Capture
from lib.checkpoints import Draft, Layer, load_draft
from lib.contract import Contract, Rope
from lib.draft import LOG_FLOOR, DraftForward
from lib.errors import ContractError
from lib.mla import Latent
from lib.norms import SINK_FACTOR, NormStats, TapNorms, norm_statistics
from lib.products import product
from lib.sweep import race, sweep
from lib.taps import Tap
from tests.support import DRAFT_VOCAB, VOCAB, speculators_draft, speculators_logits

HIDDEN, INNER = 16, 24
TAPS = (Tap(0), Tap(3), Tap(4), Tap(6), Tap(9))
SCALES = (1.0, 30.0, 60.0, 200.0, 250.0)  # of the states, as uneven as real ones
F64, F32 = torch.float64, torch.float32
TOLERANCE = {F64: 1e-10, F32: 1e-3}  # of the largest logit; 1e-14 and 4e-5 are what rounding makes of it


def run(examples: int):
    """The same draws everywhere, and a busy machine is not a failure. A `Case` needs no explanation."""
    phases = (Phase.explicit, Phase.generate, Phase.shrink)
    return settings(max_examples=examples, deadline=None, derandomize=True, phases=phases)


# ---- what is drawn --------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Case:
    """A draft's shape, texts, and the fast path's options.

    Attributes:
        scored: share of the tokens in the loss mask; which ones is up to `seed`.
        ratio: query heads per key head.
        kind: of attention: "llama", "qwen3" (norms on q and k), "biased" or "latent" (DeepSeek's).
        value: size of a value head of latent attention, whose key heads have 10.
        width: of the target's states; the draft's hidden size is `HIDDEN`.
        limit: bytes of a chunk of logits or scores, or None for the library's own.
    """

    lengths: tuple[int, ...] = (9, 4)
    scored: float = 0.5
    depth: int = 2
    kv_heads: int = 2
    ratio: int = 2
    head_dim: int = 8
    slots: int = 3
    layers: int = 1
    kind: str = "llama"
    value: int = 6
    width: int = HIDDEN
    dtype: torch.dtype = F64
    feed: str = "teacher"
    positions: str = "all"
    batch_pairs: int = 4096
    limit: int | None = None
    seed: int = 0


LENGTHS = st.lists(st.integers(1, 9) | st.integers(1, 70) | st.integers(1, 512), min_size=1, max_size=9)
SHAPE = {
    "lengths": LENGTHS.map(tuple),
    "scored": st.sampled_from([0.5, 0.0, 0.1, 1.0]),
    "depth": st.integers(0, 8),
    "kv_heads": st.sampled_from([1, 2, 3]),
    "ratio": st.sampled_from([1, 2, 4, 8]),
    "head_dim": st.sampled_from([4, 8, 12]),
    "slots": st.integers(1, 5),
    "layers": st.integers(1, 2),
    "seed": st.integers(0, 99),
}
CASES = st.builds(
    Case,
    **SHAPE,
    kind=st.sampled_from(["llama", "qwen3", "biased", "latent"]),
    value=st.sampled_from([6, 10, 14]),
    width=st.sampled_from([HIDDEN, 20]),
    dtype=st.sampled_from([F64, F64, F32]),
    feed=st.sampled_from(["teacher", "own"]),
    positions=st.sampled_from(["all", "scored"]),
    batch_pairs=st.integers(1, 40) | st.integers(1, 4096),
    limit=st.sampled_from([None, 1, 5000]),
)
ROPES = st.builds(
    Rope,
    theta=st.sampled_from([1e4, 50.0]),
    interleaved=st.booleans(),
    partial=st.sampled_from([1.0, 0.5]),
)
CHANGES = st.fixed_dictionaries(
    {},
    optional={
        "norm_before_residual": st.just(True),
        "feedback": st.just("post_norm"),
        "head_norm": st.just(False),
        "fc_input_norm": st.sampled_from(["input_norm", "fc_norm"]),
        "token_shift": st.sampled_from([0, 2]),
        "position_step": st.sampled_from([0, 2]),
        "max_position": st.integers(1, 600),
        "vocab_map": st.sampled_from(["absolute", "identity"]),
        "embed_scale": st.just(4.0),
        "rope": ROPES,
    },
)


def random_draft(case: Case) -> Draft:
    """A draft of this shape, every weight non-trivial; with the weights of both norms before `fc`."""
    rng = torch.Generator().manual_seed(case.seed)
    heads, groups, d = case.kv_heads * case.ratio, case.kv_heads, case.head_dim

    def weight(*shape, size=0.25):
        return (size * torch.randn(shape, generator=rng)).to(case.dtype)

    def near_one(n):
        return 1 + weight(n, size=0.3)

    def attention(width):
        if case.kind == "latent":
            nope, rotary, rank, kv_rank = 6, 4, 12, 7
            direct = case.seed % 2 == 0  # no latent of the query
            m = Latent(
                q=weight(heads * (nope + rotary), width) if direct else None,
                q_a=None if direct else weight(rank, width),
                q_a_norm=None if direct else near_one(rank),
                q_b=None if direct else weight(heads * (nope + rotary), rank),
                kv_a=weight(kv_rank + rotary, width),
                kv_a_norm=near_one(kv_rank),
                kv_b=weight(heads * (nope + case.value), kv_rank),
                nope=nope, rotary=rotary, value=case.value,
            )  # fmt: skip
            return {"q": None, "k": None, "v": None, "latent": m, "o": weight(HIDDEN, heads * case.value)}
        parts = {
            "q": weight(heads * d, width), "k": weight(groups * d, width), "v": weight(groups * d, width),
            "o": weight(HIDDEN, heads * d),
        }  # fmt: skip
        if case.kind == "qwen3":
            parts |= {"q_norm": near_one(d), "k_norm": near_one(d)}
        if case.kind == "biased":
            parts |= {"q_bias": weight(heads * d), "k_bias": weight(groups * d)}
            parts |= {"v_bias": weight(groups * d), "o_bias": weight(HIDDEN)}
        return parts

    layers = tuple(
        Layer(
            **attention(HIDDEN if i else 2 * HIDDEN),
            gate=weight(INNER, HIDDEN), up=weight(INNER, HIDDEN), down=weight(HIDDEN, INNER),
            input_layernorm=near_one(HIDDEN), post_attention_layernorm=near_one(HIDDEN),
            hidden_norm=None if i else near_one(HIDDEN),
        )
        for i in range(case.layers)
    )  # fmt: skip
    kept = torch.randperm(VOCAB, generator=rng)[:DRAFT_VOCAB].sort().values
    inputs = case.slots * case.width
    return Draft(
        name="toy", path=Path("toy"), contract=Contract(taps=TAPS[: case.slots]), layers=layers,
        fc=weight(HIDDEN, inputs), input_norm=near_one(inputs),
        fc_norm=tuple(near_one(case.width) for _ in range(case.slots)),
        fc_bias=weight(HIDDEN) if case.kind == "biased" else None,
        norm=near_one(HIDDEN), lm_head=weight(DRAFT_VOCAB, HIDDEN), embed=weight(VOCAB, HIDDEN),
        d2t=kept - torch.arange(DRAFT_VOCAB), t2d=None, heads=heads, kv_heads=groups, head_dim=d,
        eps=1e-5, target_vocab=VOCAB,
    )  # fmt: skip


def texts(case: Case) -> list[Capture]:
    """Made-up conversations of this case's lengths, with all of `TAPS` and any loss mask."""
    rng = torch.Generator().manual_seed(1000 + case.seed)
    out = []
    for i, length in enumerate(case.lengths):
        states = {
            tap: scale * torch.randn(length, case.width, generator=rng)
            for tap, scale in zip(TAPS, SCALES, strict=True)
        }
        readers = {tap: (lambda x=x: x) for tap, x in states.items()}
        ids = torch.randint(0, VOCAB, (length,), generator=rng)
        mask = torch.rand(length, generator=rng) < case.scored
        out.append(Capture(f"text{i}", Path("toy"), "toy", ids, mask, TAPS, case.width, readers))
    return out


def some_taps(case: Case) -> tuple[Tap, ...]:
    """One tap per slot, in an order of its own."""
    order = np.random.default_rng(case.seed).permutation(len(TAPS))
    return tuple(TAPS[i] for i in order[: case.slots])


def forward_of(draft: Draft, limit: int | None, patch: pytest.MonkeyPatch) -> DraftForward:
    """A forward that works in chunks of `limit` bytes and then copies no weight either."""
    if limit is not None:
        patch.setattr("lib.draft.LOGIT_BYTES", limit)
        patch.setattr("lib.draft.SCORE_BYTES", limit)
        patch.setattr("lib.attention.COPY_BYTES", 0)
    return DraftForward(draft)


def pairs_of(captures, positions: str) -> list[tuple[int, int]]:
    """(text, t) of every pair to predict: all, or those before a token in the loss mask and one more."""
    return [
        (i, t)
        for i, capture in enumerate(captures)
        for t in range(len(capture) - 1)
        if positions == "all" or (t + 2 < len(capture) and bool(capture.loss_mask[t + 1]))
    ]


# ---- the slow way ---------------------------------------------------------------------------------


def in_float64(weights) -> SimpleNamespace:
    """A dataclass of tensors as numpy arrays; what is no tensor stays as it is."""
    values = vars(weights).items()
    return SimpleNamespace(**{k: v.double().numpy() if torch.is_tensor(v) else v for k, v in values})


class Slow:
    """One text: one pair after another, one chain at a time, every key in a list, one head at a time.

    Args:
        draft: only its weights and sizes are used.
        contract: any but `use_fc=False`.
        tokens: ids; they may be written while the text goes on.
    """

    def __init__(self, draft: Draft, contract: Contract, tokens: list[int], capture: Capture) -> None:
        from transformers import LlamaConfig
        from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

        self.draft, self.contract, self.tokens = in_float64(draft), contract, tokens
        self.layers = [in_float64(layer) for layer in draft.layers]
        self.latent = [None if m.latent is None else in_float64(m.latent) for m in draft.layers]
        self.d2t = draft.d2t.tolist()
        self.fc_norm = [w.double().numpy() for w in draft.fc_norm]
        self.slots = [capture.state(tap).double().numpy() for tap in contract.taps]
        self.caches = [([], []) for _ in draft.layers]  # keys and values of the true pairs so far
        self.outputs: list[np.ndarray] = []  # (H,) of the last layer, of the same
        rotary = draft.head_dim if draft.layers[0].latent is None else draft.layers[0].latent.rotary
        config = LlamaConfig(
            head_dim=int(rotary * contract.rope.partial),
            rope_parameters={"rope_type": "default", "rope_theta": contract.rope.theta},
        )
        self.frequencies = LlamaRotaryEmbedding(config).inv_freq.double().numpy()  # rounded to fp32 by all

    def norm(self, x, weight):
        return weight * x / np.sqrt((x * x).mean(-1, keepdims=True) + self.draft.eps)

    def turn(self, x, position):
        """(heads, d): the first `2 * half` numbers of every head, in pairs."""
        half, out = len(self.frequencies), x.copy()
        first, second = np.arange(half), np.arange(half) + half
        if self.contract.rope.interleaved:
            first, second = 2 * np.arange(half), 2 * np.arange(half) + 1
        cos, sin = np.cos(position * self.frequencies), np.sin(position * self.frequencies)
        out[:, first] = x[:, first] * cos - x[:, second] * sin
        out[:, second] = x[:, second] * cos + x[:, first] * sin
        return out

    def heads(self, i, x, position):
        """Layer i's query (h, d), key (g, d) and value (g, dv) heads of one input."""
        w, m, h = self.layers[i], self.latent[i], self.draft.heads
        if m is not None:
            q = m.q @ x if m.q is not None else m.q_b @ self.norm(m.q_a @ x, m.q_a_norm)
            q, kv = q.reshape(h, -1), m.kv_a @ x
            up = (m.kv_b @ self.norm(kv[: -m.rotary], m.kv_a_norm)).reshape(h, -1)
            shared = self.turn(kv[None, -m.rotary :], position).repeat(h, 0)
            q = np.concatenate((q[:, : m.nope], self.turn(q[:, m.nope :], position)), 1)
            return q, np.concatenate((up[:, : m.nope], shared), 1), up[:, m.nope :]
        q, k, v = w.q @ x, w.k @ x, w.v @ x
        if w.q_bias is not None:
            q, k, v = q + w.q_bias, k + w.k_bias, v + w.v_bias
        q, k, v = (a.reshape(-1, self.draft.head_dim) for a in (q, k, v))
        if w.q_norm is not None:
            q, k = self.norm(q, w.q_norm), self.norm(k, w.k_norm)
        return self.turn(q, position), self.turn(k, position), v

    def step(self, hidden, token, position, caches):
        """(H,) state and a token -> (H,) output; its keys and values join `caches`."""
        c, first = self.contract, self.layers[0]
        if c.max_position is not None:
            position = min(position, c.max_position - 1)
        row = c.embed_scale * self.draft.embed[token]
        normed = self.norm(hidden, first.hidden_norm)
        x = normed if c.norm_before_residual else hidden
        inputs = np.concatenate((self.norm(row, first.input_layernorm), normed))
        for i, (layer, (keys, values)) in enumerate(zip(self.layers, caches, strict=True)):
            if i:
                inputs = self.norm(x, layer.input_layernorm)
            q, k, v = self.heads(i, inputs, position)
            keys.append(k)
            values.append(v)
            seen_k, seen_v = np.array(keys), np.array(values)  # (pairs, g, d), (pairs, g, dv)
            mixed = []
            for head, query in enumerate(q):
                group = head // (len(q) // len(k))
                scores = seen_k[:, group] @ query / len(query) ** 0.5
                share = np.exp(scores - scores.max())
                mixed.append(share @ seen_v[:, group] / share.sum())
            x = x + layer.o @ np.concatenate(mixed)
            x = x if layer.o_bias is None else x + layer.o_bias
            m = self.norm(x, layer.post_attention_layernorm)
            gate = layer.gate @ m
            x = x + layer.down @ (gate / (1 + np.exp(-gate)) * (layer.up @ m))
        return x

    def fused(self, t):
        """(H,): what `fc` makes of the states at position t."""
        states, kind = [slot[t] for slot in self.slots], self.contract.fc_input_norm
        if kind == "fc_norm":
            states = [self.norm(x, w) for x, w in zip(states, self.fc_norm, strict=True)]
        x = np.concatenate(states)
        if kind == "input_norm":
            x = self.norm(x, self.draft.input_norm)
        x = self.draft.fc @ x
        return x if self.draft.fc_bias is None else x + self.draft.fc_bias

    def token(self, at):
        """The text's token, 0 outside the text."""
        return self.tokens[at] if 0 <= at < len(self.tokens) else 0

    def output(self, t):
        """(H,) after the true pairs 0..t."""
        while len(self.outputs) <= t:
            n = len(self.outputs)
            token = self.token(n + self.contract.token_shift)
            self.outputs.append(self.step(self.fused(n), token, n + 1, self.caches))
        return self.outputs[t]

    def chain(self, t: int, depths: int, fed: Callable[[int, np.ndarray], int]) -> np.ndarray:
        """(depths, Vd) logits of the chain from pair t; `fed` says each token, given the logits before."""
        hidden, logits = self.output(t), []
        caches = [(keys[: t + 1], values[: t + 1]) for keys, values in self.caches]
        for depth in range(depths):
            if depth:
                position = t + 1 + depth * self.contract.position_step
                hidden = self.step(hidden, fed(depth, logits[-1]), position, caches)
            normed = self.norm(hidden, self.draft.norm)
            logits.append(self.draft.lm_head @ (normed if self.contract.head_norm else hidden))
            hidden = normed if self.contract.feedback == "post_norm" else hidden
        return np.array(logits)

    def to_target(self, draft_id: int) -> int:
        """Target id of a draft id."""
        if self.contract.vocab_map == "identity":
            return draft_id
        return self.d2t[draft_id] + (draft_id if self.contract.vocab_map == "offset" else 0)

    def teacher(self, t: int):
        """What `chain` is fed from the text."""
        return lambda depth, _logits: self.token(t + self.contract.token_shift + depth)

    def greedy(self, t: int, depths: int) -> list[int]:
        """Target ids that the draft proposes after pair t, each fed back to it."""
        logits = self.chain(t, depths, lambda _depth, before: self.to_target(int(before.argmax())))
        return [self.to_target(int(i)) for i in logits.argmax(1)]


# ---- predictions ----------------------------------------------------------------------------------


EDGES = (
    Case(lengths=(1,), depth=0),
    Case(lengths=(2,), depth=8, feed="own", kv_heads=1, ratio=8),
    Case(lengths=(2,), positions="scored", scored=1.0),
    Case(lengths=(3,), positions="scored", scored=1.0, depth=8, slots=5, ratio=1, kv_heads=4),
    Case(lengths=(30, 40), positions="scored", scored=0.0),
    Case(lengths=(1, 512, 2), depth=8, slots=1, feed="own", limit=1),
    Case(lengths=(512, 1), depth=8, positions="scored", scored=0.1, layers=2, kind="latent", dtype=F32),
    Case(lengths=(5, 6, 7) * 3, depth=8, batch_pairs=1, ratio=1, kv_heads=4, layers=2, kind="qwen3"),
    Case(lengths=(60, 1, 9), depth=3, kind="biased", kv_heads=1, ratio=8, feed="own", batch_pairs=60),
    Case(lengths=(40, 41), depth=3, kind="latent", value=14, limit=1, width=20, positions="scored"),
)


def edges(test):
    """`EDGES` as examples, under the declared contract."""
    for case in EDGES:
        test = example(case=case, changes={})(test)
    return test


@run(40)
@given(case=CASES, changes=CHANGES)
@edges
def test_predict_is_one_chain_at_a_time(case, changes):
    """Rows, text, ids and logits of every depth, however texts are batched and products cut."""
    check_predict(case, changes)


@pytest.mark.slow
@run(400)
@given(case=CASES, changes=CHANGES)
def test_predict_is_one_chain_at_a_time_400_times(case, changes):
    """The same at more shapes."""
    check_predict(case, changes)


def check_predict(case: Case, changes: dict):
    """`predict` against `Slow`."""
    draft, captures = random_draft(case), texts(case)
    contract = draft.contract.change(taps=some_taps(case), **changes)
    rows, depths = pairs_of(captures, case.positions), case.depth + 1
    options = {"depths": depths, "feed": case.feed, "positions": case.positions, "keep_logits": True}
    with pytest.MonkeyPatch.context() as patch:
        forward = forward_of(draft, case.limit, patch)
        if not rows:
            with pytest.raises(ContractError, match="at least one pair to predict"):
                forward.predict(captures, contract, **options)
            return
        p = forward.predict(captures, contract, batch_pairs=case.batch_pairs, **options)
    assert list(zip(p.capture.tolist(), p.position.tolist(), strict=True)) == rows
    slow = [Slow(draft, contract, c.token_ids.tolist(), c) for c in captures]
    kept = {i + offset for i, offset in enumerate(draft.d2t.tolist())}
    tails = [(slow[i].tokens[t + 2 :] + [-1] * depths)[:depths] for i, t in rows]
    assert p.truth.tolist() == tails
    assert p.in_vocab.tolist() == [[token in kept for token in tail] for tail in tails]
    assert p.target_ids.tolist() == [[slow[0].to_target(i) for i in ids] for ids in p.draft_ids.tolist()]
    assert torch.equal(p.draft_ids, p.logits.argmax(-1))

    # Depth 0 of every row; whole chains from the first and last of a text and from some between.
    rng, chains = np.random.default_rng(case.seed), set()
    for i in sorted({owner for owner, _ in rows}):
        mine = [row for row, (owner, _) in enumerate(rows) if owner == i]
        chains |= {*mine[:2], *mine[-2:], *rng.choice(mine, min(len(mine), 4), replace=False)}
    gap = size = 0.0
    for row, (i, t) in enumerate(rows):
        fed = slow[i].teacher(t)
        if case.feed == "own":
            # Near a tie float32 may choose otherwise: then both go on from what it chose.
            fed = lambda depth, _logits, row=row: int(p.target_ids[row, depth - 1])  # noqa: E731
        expected = slow[i].chain(t, depths if row in chains else 1, fed)
        gap = max(gap, np.abs(p.logits[row, : len(expected)].double().numpy() - expected).max())
        size = max(size, np.abs(expected).max())
        if case.dtype == F64:
            assert p.draft_ids[row, : len(expected)].tolist() == expected.argmax(1).tolist()
    assert gap <= TOLERANCE[case.dtype] * size, f"{gap / size:.1e} of the largest logit"


@run(12)
@given(lengths=LENGTHS, batch_pairs=st.integers(1, 900), limit=st.sampled_from([None, 1, 5000]), shape=CASES)
@example(lengths=[512, 1, 2, 1], batch_pairs=1, limit=1, shape=EDGES[1])
@example(lengths=[1, 512, 500], batch_pairs=900, limit=None, shape=EDGES[3])
def test_neighbours_and_chunks_leave_no_trace(lengths, batch_pairs, limit, shape):
    """All chains of a batch, in chunks: each text's are those it has alone, to float64's rounding."""
    case = replace(shape, lengths=(*lengths, 7), dtype=F64, scored=1.0)  # seven tokens always have a pair
    draft, captures = random_draft(case), texts(case)
    options = {"depths": 1 + case.depth, "feed": case.feed, "positions": case.positions, "keep_logits": True}
    with pytest.MonkeyPatch.context() as patch:
        forward = forward_of(draft, limit, patch)
        together = forward.predict(captures, batch_pairs=batch_pairs, **options)
        bare = forward.predict(captures, batch_pairs=batch_pairs, **{**options, "keep_logits": False})
    assert bare.logits is None and torch.equal(bare.draft_ids, together.draft_ids)
    for i, capture in enumerate(captures):
        mine = together.capture == i
        if not pairs_of([capture], case.positions):
            assert not mine.any()
            continue
        alone = DraftForward(draft).predict([capture], **options)
        for name in ("position", "draft_ids", "target_ids", "truth", "in_vocab", "hit"):
            assert torch.equal(getattr(together, name)[mine], getattr(alone, name)), name
        gap = (together.logits[mine] - alone.logits).abs().max()
        assert gap <= 1e-9 * alone.logits.abs().max()


FLAGS = st.fixed_dictionaries(
    {},
    optional={
        "norm_before_residual": st.just(True),
        "norm_output": st.just(True),
        "norm": st.sampled_from(["norm_before_fc", "fc_norm"]),
    },
)


@pytest.mark.speculators
@run(14)
@given(
    case=st.builds(Case, **SHAPE, kind=st.sampled_from(["llama", "qwen3"]), width=st.just(48)), flags=FLAGS
)
@example(case=Case(lengths=(1, 512), depth=1, slots=5, kv_heads=1, ratio=4, width=48), flags={})
@example(case=Case(lengths=(2,), depth=8, slots=1, kv_heads=4, ratio=1, width=48), flags={"norm": "fc_norm"})
def test_predict_equals_speculators(case, flags):
    """Logits of every pair and depth within 1e-4 of the trainer's own model, which runs in float32."""
    # The width is one that every drawn number of heads divides: transformers' config insists on that.
    flags = dict(flags)
    if norm := flags.pop("norm", None):
        flags[norm] = True
    model = speculators_draft(
        arch=case.kind, layers=case.layers, seed=case.seed, slots=case.slots, hidden=case.width,
        heads=case.kv_heads * case.ratio, kv_heads=case.kv_heads, head_dim=case.head_dim, **flags,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        draft = load_draft(folder, dtype=F64)
    captures, depths = texts(replace(case, lengths=(*case.lengths, 5))), case.depth + 1
    contract = draft.contract.change(taps=some_taps(case))
    ours = (
        DraftForward(draft)
        .predict(captures, contract, depths=depths, positions="all", keep_logits=True)
        .logits
    )
    theirs = []
    for capture in captures:
        # Their model needs more pairs than depths; what follows a text is token 0 for both.
        tensors = {
            "input_ids": torch.cat((capture.token_ids, torch.zeros(depths, dtype=torch.int64))),
            "hidden_states": [
                torch.cat((capture.state(t), torch.ones(depths, case.width))) for t in contract.taps
            ],
            "loss_mask": torch.ones(len(capture) + depths),
        }
        logits = speculators_logits(model, tensors, list(range(case.slots)), depths)
        theirs.append(logits[: len(capture) - 1])
    theirs = torch.cat(theirs)  # (N, depths, Vd)
    assert ours.shape == theirs.shape
    gap, size = (ours - theirs).abs().max(), ours.abs().max()
    assert gap <= 1e-4 * size, f"{gap / size:.1e} of the largest logit"


# ---- sweeps ---------------------------------------------------------------------------------------


@run(15)
@given(
    case=st.builds(Case, **SHAPE, limit=st.sampled_from([None, 1, 5000])),
    changes=st.lists(CHANGES, min_size=1, max_size=3),
    batch_pairs=st.integers(1, 4096),
)
@example(case=Case(lengths=(1, 2, 3), slots=1), changes=[{"vocab_map": "identity"}], batch_pairs=1)
@example(case=Case(lengths=(30, 1), scored=0.0, slots=5), changes=[{}], batch_pairs=10)
@example(case=Case(lengths=(1, 512), slots=5, limit=1), changes=[{"token_shift": 0}, {}], batch_pairs=4096)
def test_a_sweep_is_one_candidate_at_a_time(case, changes, batch_pairs):
    """Hits, scores and counts of every candidate and text are what its own `predict` and a log-softmax give.

    Taps may repeat within a candidate. A race gives the same for what it did not drop.
    """
    draft, captures = random_draft(case), texts(case)
    draws = np.random.default_rng(case.seed).integers(len(TAPS), size=(5, case.slots))
    contracts = [
        draft.contract.change(taps=tuple(TAPS[i] for i in draw), **changes[n % len(changes)])
        for n, draw in enumerate(draws)
    ]
    with pytest.MonkeyPatch.context() as patch:
        forward = forward_of(draft, case.limit, patch)
        found, raced = sweep(forward, captures, contracts), race(forward, captures, contracts)
        for batch in forward.batches(captures, batch_pairs=batch_pairs):
            check_shared(forward, batch, contracts)
    rows = pairs_of(captures, "scored")
    assert found.seen[:, [i for i, _ in rows]].all()
    kept = {i + offset: i for i, offset in enumerate(draft.d2t.tolist())}
    for n, contract in enumerate(contracts):
        hits, counts = torch.zeros_like(found.hits[n]), torch.zeros_like(found.counts)
        scores = torch.zeros_like(found.scores[n])
        if rows:
            # A forward of its own: nothing shared with another candidate.
            p = DraftForward(draft).predict(captures, contract, keep_logits=True)
            says = p.logits[:, 0].log_softmax(-1)
            reach = draft.to_target(torch.arange(DRAFT_VOCAB), contract.vocab_map).tolist()
        for row, (i, t) in enumerate(rows):
            truth = int(captures[i].token_ids[t + 2])
            if truth in kept:
                counts[i] += 1
                hits[i] += reach[int(says[row].argmax())] == truth
                # Where a wrong map sends several draft ids to one token, the last of them is scored.
                producers = [j for j, token in enumerate(reach) if token == truth]
                scores[i] += says[row, producers[-1]] if producers else LOG_FLOOR
        assert torch.equal(found.hits[n], hits) and torch.equal(found.counts, counts)
        torch.testing.assert_close(found.scores[n], scores, rtol=1e-9, atol=1e-9)
    assert torch.equal(raced.hits, found.hits * raced.seen)
    torch.testing.assert_close(raced.scores, found.scores * raced.seen, rtol=1e-9, atol=1e-9)


def check_shared(forward: DraftForward, batch, contracts):
    """Products are shared by slot, tap and norm, and none is another's."""
    for contract in contracts:
        shared = forward.score(batch, contract)
        alone = forward.score(type(batch)(forward, batch.captures, batch.indices, False), contract)
        assert all(torch.equal(a, b) for a, b in zip(shared, alone, strict=True))
    wanted = {
        (slot, tap, contract.fc_input_norm)
        for contract in contracts
        for slot, tap in enumerate(contract.taps)
    }
    assert batch.products.keys() == wanted


# ---- rounds ---------------------------------------------------------------------------------------


def replay(slow: Slow, start: int, depth: int) -> list[tuple[int, int, int]]:
    """(start, accepted, gained) of every round of a greedy run over the text: draft, check, add one token."""
    rounds, t = [], start
    while t + 2 < len(slow.tokens):
        drafted, rest = slow.greedy(t, depth), slow.tokens[t + 2 :]
        accepted = 0
        while accepted < min(depth, len(rest)) and drafted[accepted] == rest[accepted]:
            accepted += 1
        gained = min(accepted + 1, len(rest))  # the target's own token follows, if the text goes on
        rounds.append((t, accepted, gained))
        t += gained
    return rounds


def write_answer(slow: Slow, prompt: int, depth: int, rng) -> list[tuple[int, int, int]]:
    """Write a text in which the draft is right as often as drawn, round by round; returns the rounds."""
    rounds, t = [], prompt - 1  # the first answer token is there: it came with the prompt's pass
    while t + 2 < len(slow.tokens):
        drafted, left = slow.greedy(t, depth), len(slow.tokens) - (t + 2)
        right = int(rng.integers(depth + 1))
        bonus = [i for i in range(VOCAB) if drafted[right : right + 1] != [i]]
        written = [*drafted[:right], int(rng.choice(bonus))][:left]
        slow.tokens[t + 2 : t + 2 + len(written)] = written
        rounds.append((t, min(right, left), len(written)))
        t += len(written)
    return rounds


@run(12)
@given(
    case=st.builds(Case, **{**SHAPE, "depth": st.integers(1, 8)}, batch_pairs=st.integers(1, 600)),
    shallow=st.integers(1, 8),
    changes=st.fixed_dictionaries(
        {}, optional={"norm_before_residual": st.just(True), "feedback": st.just("post_norm")}
    ),
)
@example(case=Case(lengths=(1, 2, 3, 4), depth=8, slots=5, kv_heads=1), shallow=8, changes={})
@example(case=Case(lengths=(512, 1), depth=1, slots=1, kv_heads=4, ratio=1), shallow=1, changes={})
def test_a_walk_is_a_greedy_run(case, shallow, changes):
    """All chains at once, walked: the rounds written into the text, and those of a run at a smaller depth."""
    case = replace(case, lengths=(*case.lengths, 12))  # twelve tokens always have a round
    draft, captures = random_draft(case), texts(case)
    contract = draft.contract.change(taps=some_taps(case), **changes)
    rng, runs, texts_written, planned = np.random.default_rng(case.seed), [], [], []
    for capture in captures:
        slow = Slow(draft, contract, capture.token_ids.tolist(), capture)
        prompt = int(rng.integers(1, max(1, min(6, len(capture) - 1)) + 1))
        planned.append(write_answer(slow, prompt, case.depth, rng))
        runs.append((slow, prompt))
        mask = torch.arange(len(capture)) >= prompt
        texts_written.append(replace(capture, token_ids=torch.tensor(slow.tokens), loss_mask=mask))
    p = rollouts(DraftForward(draft), texts_written, contract, depth=case.depth)
    for depth in {case.depth, min(shallow, case.depth)}:
        rounds = walk(p, texts_written, depth)
        columns = (rounds.capture, rounds.start, rounds.accepted, rounds.gained)
        found = list(zip(*(column.tolist() for column in columns), strict=True))
        run_by_run = [replay(slow, prompt - 1, depth) for slow, prompt in runs]
        assert found == [(i, *row) for i, rows in enumerate(run_by_run) for row in rows]
        if depth == case.depth:
            assert run_by_run == planned


# ---- norms and products ---------------------------------------------------------------------------


def assert_same_moments(a: NormStats, b: NormStats):
    assert a.count == b.count
    if a.count:
        assert (a.low, a.high) == (b.low, b.high)
        assert a.mean == pytest.approx(b.mean, rel=1e-9)
        assert a.std == pytest.approx(b.std, rel=1e-9, abs=1e-9 * b.mean)


@run(60)
@given(
    sizes=st.lists(st.integers(0, 300), min_size=1, max_size=9),
    spread=st.sampled_from([0.0, 0.1, 3.0]),
    order=st.randoms(use_true_random=False),
)
@example(sizes=[0], spread=1.0, order=None)
@example(sizes=[1, 0, 0, 1], spread=1.0, order=None)
def test_norms_merge_in_any_split_and_order(sizes, spread, order):
    """Parts of any size, empty ones too, merged from the left or as a tree: the moments of all at once."""
    rng = torch.Generator().manual_seed(sum(sizes))
    norms = torch.exp(5 + spread * torch.randn(sum(sizes), generator=rng))
    whole, parts = NormStats.of(norms), [NormStats.of(part) for part in norms.split(sizes)]
    if len(norms):
        wide = norms.double().numpy()
        found = (whole.count, whole.mean, whole.std, whole.low, whole.high)
        expected = (len(wide), wide.mean(), wide.std(), wide.min(), wide.max())
        assert found == pytest.approx(expected, rel=1e-9, abs=1e-9 * wide.mean())
    if order is not None:
        order.shuffle(parts)
    assert_same_moments(functools.reduce(NormStats.merge, parts), whole)
    while len(parts) > 1:  # neighbours in twos, as machines would
        parts = [functools.reduce(NormStats.merge, parts[i : i + 2]) for i in range(0, len(parts), 2)]
    assert_same_moments(parts[0], whole)
    for q in (0.05, 0.5, 0.95) if len(norms) else ():
        below = (norms < parts[0].quantile(q)).double().mean().item()
        upto = (norms <= parts[0].quantile(q)).double().mean().item()
        room = 0.02 + 1 / len(norms)  # the sketch's rank error, and the grain of a small sample
        assert below - room <= q <= upto + room


@run(15)
@given(case=st.builds(Case, lengths=SHAPE["lengths"], seed=SHAPE["seed"]), cut=st.integers(0, 9))
@example(case=Case(lengths=(1, 512)), cut=1)
def test_norms_of_captures_are_their_positions(case, cut):
    """Statistics of two folders, merged: those of all positions by numpy, with sinks and without."""
    # Every eleventh position from the first on is a sink, as the first token of a text is in a real model.
    captures = [
        c.with_states(lambda x: x * torch.where(torch.arange(len(x)) % 11 > 0, 1.0, 100.0)[:, None])
        for c in texts(case)
    ]
    groups = [g for g in (captures[:cut], captures[cut:]) if g]
    merged = [norm_statistics(g) for g in groups]
    for tap in TAPS:
        of_text = [np.linalg.norm(c.state(tap).double().numpy(), axis=1) for c in captures]
        sinks = [x > SINK_FACTOR * np.sort(x)[(len(x) - 1) // 2] for x in of_text]
        norms, sink = np.concatenate(of_text), np.concatenate(sinks)
        expected = {
            "all": norms, "sinks": norms[sink], "without sinks": norms[~sink],
            "first position": np.array([x[0] for x in of_text]),
        }  # fmt: skip
        found = functools.reduce(TapNorms.merge, (m[tap] for m in merged)).parts
        for name, values in expected.items():
            assert found[name].count == len(values), f"{tap} {name}"
            if len(values):
                spread = (values.mean(), values.std(), values.min(), values.max())
                stats = (found[name].mean, found[name].std, found[name].low, found[name].high)
                assert stats == pytest.approx(spread, rel=1e-4, abs=1e-6 * values.mean()), f"{tap} {name}"


@run(80)
@given(
    rows=st.integers(1, 40),
    inputs=st.integers(1, 90),
    outputs=st.integers(1, 90),
    view=st.sampled_from(["whole", "columns", "turned"]),
)
@example(rows=1, inputs=1, outputs=1, view="turned")
@example(rows=16, inputs=64, outputs=33, view="columns")
@example(rows=17, inputs=64, outputs=33, view="columns")
def test_product_is_the_float64_product(rows, inputs, outputs, view):
    """1 to 40 rows, contiguous or not, a weight or some of its columns: float64's product up to rounding."""
    rng = torch.Generator().manual_seed(rows * 8100 + inputs * 90 + outputs)
    x, weight = torch.randn(rows, inputs, generator=rng), torch.randn(outputs, inputs + 5, generator=rng)
    x = x.T.contiguous().T if view == "turned" else x
    weight = weight[:, 3:-2] if view == "columns" else weight[:, 5:].contiguous()
    found, exact = product(x, weight), x.double() @ weight.double().T
    assert found.shape == (rows, outputs) and found.dtype == F32
    bound = torch.finfo(F32).eps * inputs * (x.abs().double() @ weight.abs().double().T)
    assert ((found - exact).abs() <= bound).all()
