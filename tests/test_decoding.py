"""Live decoding: lossless under any contract, replayed offline round for round, exact under sampling."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from scipy.stats import chisquare

from lib import samples
from lib.acceptance import overlap, rollouts, walk
from lib.captures import FINAL, Capture
from lib.checkpoints import load_draft
from lib.decoding import (
    Generation,
    LiveDraft,
    LiveTarget,
    accept,
    as_capture,
    decode,
    measure_costs,
    speculate,
    to_target_rows,
)
from lib.draft import DraftForward, to_device
from lib.errors import ContractError, TargetError
from lib.taps import Stored, Tap
from lib.target import continue_greedily, ensure_target, load_target, record_states
from lib.target_head import TargetHead
from tests.support import DRAFT_VOCAB, VOCAB, speculators_draft, tiny_llama
from tests.test_mla import latent_draft

END = 2  # the tiny targets' end token
DEPTHS = {1: 130, 2: 70, 3: 40, 5: 25, 15: 20}  # depth -> tokens wanted per contract
NEAR_TIE = 1e-4  # logits; another order of summation may swap two that are closer

# What a deployment can get wrong, as a change of the declared contract.
CHANGES = {
    "right": {},
    "permuted": {"taps": ("layer4", "embed", "layer3")},
    "wrong taps": {"taps": ("layer1", "layer2", "layer4")},
    "token_shift 0": {"token_shift": 0},
    "absolute map": {"vocab_map": "absolute"},
    "identity map": {"vocab_map": "identity"},
    "post_norm feedback": {"feedback": "post_norm"},
    "norm_before_residual": {"norm_before_residual": True},
    "head_norm off": {"head_norm": False},
}


def tiny_pair(arch: str, layers: int):
    """A tiny target and a random draft that is right now and then: both know three words.

    Two random models of 97 tokens never agree, and a test in which nothing is accepted tests little.
    So both speak three tokens of the draft's vocabulary loudly and all others softly; the target also
    has its end token. One draft token in four is accepted then, and now and then a whole chain.
    """
    if arch == "latent":
        draft = to_device(latent_draft(layers=layers, seed=4)[0], "cpu", torch.float32)
    else:
        with TemporaryDirectory() as folder:
            speculators_draft(arch=arch, layers=layers).save_pretrained(folder)
            draft = load_draft(folder)
    words = torch.arange(5, 8)
    model = tiny_llama(layers=4, seed=4)
    loudness = torch.full((VOCAB, 1), 0.1)
    loudness[draft.to_target(words)] = 1
    loudness[END] = 0.45
    with torch.no_grad():
        model.lm_head.weight.mul_(loudness)
    volume = torch.full((DRAFT_VOCAB, 1), 0.1)
    volume[words] = 1
    return model, DraftForward(replace(draft, lm_head=draft.lm_head * volume))


@pytest.fixture(scope="module")
def pair():
    return tiny_pair("llama", 1)


@pytest.fixture(scope="module")
def model(pair):
    return pair[0]


@pytest.fixture(scope="module")
def forward(pair):
    return pair[1]


def some_prompt(rng, shortest=1, longest=60):
    length = int(torch.randint(shortest, longest + 1, (), generator=rng))
    return torch.randint(3, VOCAB, (length,), generator=rng)


def hooks(model) -> int:
    """Forward hooks on all modules; transformers keeps some of its own."""
    return sum(len(m._forward_hooks) for m in model.modules())


def near_tie(model, plain: Generation, live: Generation) -> bool:
    """Whether the target itself hardly prefers one token where two texts part."""
    at = next(i for i, (a, b) in enumerate(zip(plain.tokens, live.tokens, strict=False)) if a != b)
    text = torch.cat((plain.prompt, plain.tokens[:at]))
    with torch.inference_mode():
        first, second = model(text[None]).logits[0, -1].topk(2).values
    return float(first - second) < NEAR_TIE


# ---- lossless, and replayed -----------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """One live text and what plain decoding makes of the same prompt."""

    change: str
    room: int
    plain: Generation
    live: Generation


@pytest.fixture(
    scope="module",
    params=[
        ("llama", 1),
        ("latent", 1),
        pytest.param(("llama", 2), marks=pytest.mark.slow),
        pytest.param(("latent", 2), marks=pytest.mark.slow),
        pytest.param(("qwen3", 1), marks=pytest.mark.slow),
        pytest.param(("qwen3", 2), marks=pytest.mark.slow),
    ],
    ids=lambda p: f"{p[0]}-{p[1]}",
)
def live_runs(request):
    """(model, forward, runs): every contract at every depth, over prompts of 1 to 60 tokens."""
    model, forward = tiny_pair(*request.param)
    rng = torch.Generator().manual_seed(0)
    plains = [decode(model, some_prompt(rng), 60) for _ in range(24)]
    runs, turn = [], 0
    for name, change in CHANGES.items():
        contract = forward.draft.contract.change(**change)
        for depth, wanted in DEPTHS.items():
            got = 0
            while got < wanted:
                plain = plains[turn % len(plains)]
                turn += 1
                room = min(60, wanted - got)
                live = speculate(model, forward, plain.prompt, room, depth=depth, contract=contract)
                runs.append(Run(name, room, plain, live))
                got += len(live.tokens)
    return model, forward, runs


def test_speculation_is_lossless_under_any_contract(live_runs):
    """2,500 tokens a pair of models, 15,000 over the six: each one the target's own choice."""
    model, _, runs = live_runs
    total = sum(len(run.live.tokens) for run in runs)
    assert total >= 2500, f"only {total} tokens compared"
    parted = [run for run in runs if not torch.equal(run.live.tokens, run.plain.tokens[: run.room])]
    for run in parted:
        where = f"{run.change}, depth {run.live.depth}, prompt {run.plain.prompt.tolist()}"
        assert near_tie(model, run.plain, run.live), f"not the target's own text: {where}"
    assert len(parted) <= 1, f"{len(parted)} texts part at a near-tie in {total} tokens: too many"


def test_chains_were_refused_and_accepted(live_runs):
    """The losslessness above is earned: chains were refused at once, in the middle, and accepted whole."""
    _, _, runs = live_runs
    for depth in (1, 2, 3):
        seen = Counter(a for run in runs if run.live.depth == depth for a in run.live.accepted)
        assert set(seen) == set(range(depth + 1)), f"depth {depth}: accepted {sorted(seen.items())}"
    texts = {tuple(run.plain.tokens.tolist()) for run in runs}
    ended = [run for run in runs if int(run.live.tokens[-1]) == END]
    assert len(texts) > 15, f"{len(texts)} different texts: the target says the same whatever it is asked"
    assert 0 < len(ended) < len(runs), "both ways to end must occur: the end token, and max_tokens"


def test_rounds_can_be_replayed_offline(live_runs):
    """Captured states, rollouts and walk give the live run's accepted counts, round for round."""
    model, forward, runs = live_runs
    rounds = 0
    for name, change in CHANGES.items():
        contract = forward.draft.contract.change(**change)
        mine = [run.live for run in runs if run.change == name and run.live.accepted]
        captures = [as_capture(model, live, contract.taps) for live in mine]
        rolled = rollouts(forward, captures, contract, depth=max(DEPTHS))
        for depth in DEPTHS:
            replayed = walk(rolled, captures, depth)
            for i, live in enumerate(mine):
                if live.depth == depth:
                    where = f"{name}, depth {depth}, prompt {live.prompt.tolist()}"
                    assert replayed.of(i) == list(live.accepted), where
                    assert replayed.gained[replayed.capture == i].tolist() == list(live.gained), where
                    rounds += len(live.accepted)
    assert rounds > 1500, f"only {rounds} rounds compared"


def test_contracts_matter(live_runs):
    """A control for both tests above: the nine contracts do draft differently."""
    model, forward, runs = live_runs
    texts = [run.plain for run in runs if run.change == "right"][:10]
    taps = tuple(Tap(k) for k in range(5))
    captures = [as_capture(model, text, taps) for text in texts]
    drafted = {
        name: rollouts(forward, captures, forward.draft.contract.change(**change), 3).target_ids
        for name, change in CHANGES.items()
    }
    for name in set(CHANGES) - {"right"}:
        assert not torch.equal(drafted[name], drafted["right"]), f"{name} changes nothing"


def test_a_map_that_points_outside_the_model(model, forward):
    """d2t far beyond the vocabulary, read as it stands: nothing crashes, nothing is accepted or lost."""
    beyond = replace(forward.draft, d2t=torch.arange(DRAFT_VOCAB) + 1000)
    negative = replace(forward.draft, d2t=-torch.arange(DRAFT_VOCAB) - 1)
    plain = decode(model, torch.arange(10, 20), 40)
    for draft in (beyond, negative):
        lost = DraftForward(draft)
        contract = draft.contract.change(vocab_map="absolute")
        live = speculate(model, lost, plain.prompt, 40, depth=3, contract=contract)
        assert torch.equal(live.tokens, plain.tokens)
        assert set(live.accepted) == {0}
        rng = torch.Generator().manual_seed(0)
        sampled = speculate(
            model, lost, plain.prompt, 40, depth=3, contract=contract, temperature=1.0, rng=rng
        )
        assert int(sampled.tokens.min()) >= 0 and int(sampled.tokens.max()) < VOCAB


def test_plain_decoding_is_generate(rng):
    """Token for token what transformers' own `generate` makes of a model that we have not touched."""
    model, _ = tiny_pair("llama", 1)
    untouched, _ = tiny_pair("llama", 1)
    for _ in range(12):
        prompt = some_prompt(rng)
        assert torch.equal(decode(model, prompt, 40).tokens, continue_greedily(untouched, prompt, 40))


def test_generation_adds_up(model, forward):
    """What a Generation says of itself: tokens per round, the prefill's token, the end of the text."""
    live = speculate(model, forward, torch.arange(10, 20), 40, depth=3)
    assert sum(live.gained) == len(live.tokens) - 1, "the first token comes from the prompt's pass"
    assert live.tokens_per_round == pytest.approx(sum(live.gained) / len(live.gained))
    assert all(a <= g <= a + 1 <= 4 for a, g in zip(live.accepted, live.gained, strict=True))
    assert live.speed == pytest.approx((len(live.tokens) - 1) / live.seconds)
    one = decode(model, torch.arange(10, 20), 1)
    assert len(one.tokens) == 1 and one.tokens_per_round == 1 and one.speed == 0


def test_the_context_can_be_filled_to_the_last_position(model, forward):
    """Prompt, answer and chain together may use every position, and not one more."""
    room = model.config.max_position_embeddings
    prompt = torch.full((room - 6,), 50)
    live = speculate(model, forward, prompt, 3, depth=3)
    assert torch.equal(live.tokens, decode(model, prompt, 3).tokens)
    with pytest.raises(TargetError, match=rf"context: expected at most {room} positions"):
        speculate(model, forward, prompt, 4, depth=3)


# ---- the caches -----------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["grouped", "latent"])
def exact(request):
    """A two-layer draft in float64 with states of 12 tokens: what differs then is wiring, not rounding."""
    if request.param == "latent":
        draft = latent_draft(layers=2)[0]
    else:
        with TemporaryDirectory() as folder:
            speculators_draft(layers=2).save_pretrained(folder)
            draft = load_draft(folder, dtype=torch.float64)
    forward = DraftForward(draft)
    text = torch.randint(3, VOCAB, (13,), generator=torch.Generator().manual_seed(5))
    taps = forward.draft.contract.taps
    states = record_states(tiny_llama(), text[None], taps)
    return forward, text[1:], {tap: states[tap][0, :-1] for tap in taps}  # pairs (g_t, x_{t+1})


def extend(draft, tokens, states, start, stop):
    return draft.extend(tokens[start:stop], {tap: x[start:stop] for tap, x in states.items()})


@pytest.mark.parametrize("pieces", [(1, 3, 2, 6), (12,), (1,) * 12, (11, 1), (4, 4, 4)])
def test_the_draft_is_extended_in_any_pieces(exact, pieces):
    """Round by round or all at once: the same last state, keys and values for every true pair."""
    forward, tokens, states = exact
    whole = LiveDraft(forward, forward.draft.contract, 20)
    expected = extend(whole, tokens, states, 0, 12)
    draft, start = LiveDraft(forward, forward.draft.contract, 20), 0
    for n in pieces:
        hidden = extend(draft, tokens, states, start, start + n)
        start += n
    assert draft.length == whole.length == 12
    torch.testing.assert_close(hidden, expected, rtol=1e-9, atol=1e-9)
    for layer in range(2):
        torch.testing.assert_close(draft.keys[layer][:12], whole.keys[layer][:12], rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(draft.values[layer][:12], whole.values[layer][:12], rtol=1e-9, atol=1e-9)


def test_a_chain_leaves_no_trace(exact):
    """After `propose` the true pairs are as before, and the next ones overwrite the chain's own."""
    forward, tokens, states = exact
    silent, talking = (LiveDraft(forward, forward.draft.contract, 30) for _ in range(2))
    for draft in (silent, talking):
        hidden = extend(draft, tokens, states, 0, 5)
    before = [k[:5].clone() for k in talking.keys]
    chain, q = talking.propose(hidden, 15)
    assert len(chain) == 15 and q is None and talking.length == 5
    wrote = talking.keys[0][5:19]
    assert not torch.equal(wrote, torch.zeros_like(wrote)), "the chain wrote nothing"
    assert all(torch.equal(k[:5], b) for k, b in zip(talking.keys, before, strict=True))
    for stop in (6, 9, 12):
        after = [extend(draft, tokens, states, silent.length, stop) for draft in (talking, silent)]
        assert torch.equal(*after), f"a chain changed what true pairs up to {stop} give"
        talking.propose(after[0], 7)
    assert torch.equal(talking.propose(after[0], 15)[0], silent.propose(after[1], 15)[0])


def test_live_hidden_is_the_offline_one(exact):
    """One pair after another in the cache, or all positions at once: the same logits for a chain's start."""
    forward, tokens, states = exact
    contract = forward.draft.contract
    ids = torch.cat((torch.tensor([7]), tokens))  # x_0 is in no pair
    readers = {tap: (lambda x=x: torch.cat((x, x[-1:]))) for tap, x in states.items()}
    mask = torch.ones(13, dtype=torch.bool)
    capture = Capture("toy", Path("toy"), "live", ids, mask, contract.taps, 32, readers)
    offline = forward.predict([capture], contract, depths=6, feed="own", positions="all")
    draft = LiveDraft(forward, contract, 20)
    for t in range(12):
        chain, _ = draft.propose(extend(draft, tokens, states, t, t + 1), 6)
        assert chain.tolist() == offline.target_ids[t].tolist(), f"chain from position {t}"


@pytest.mark.parametrize("kept", range(6))
def test_rollback_forgets_exactly_the_refused(kept):
    """Of five appended tokens `kept` stay: the next logits and states are those of a fresh cache."""
    model, rng = tiny_llama(), torch.Generator().manual_seed(kept)
    prompt, tried, after = (torch.randint(3, VOCAB, (n,), generator=rng) for n in (9, 5, 2))
    tap = Tap(3)
    with LiveTarget(model, [tap]) as target, LiveTarget(model, [tap]) as fresh:
        target.append(prompt)
        target.append(tried)
        target.rollback(5 - kept)
        assert target.cache.get_seq_length() == 9 + kept
        logits = target.append(after)
        states = target.states(2)[tap]
        fresh.append(torch.cat((prompt, tried[:kept])))
        torch.testing.assert_close(logits, fresh.append(after), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(states, fresh.states(2)[tap], rtol=1e-4, atol=1e-4)
    text = torch.cat((prompt, tried[:kept], after))
    torch.testing.assert_close(
        states, record_states(model, text[None], [tap])[tap][0, -2:], rtol=1e-4, atol=1e-4
    )


def test_capture_of_a_live_text(model, forward):
    """Its mask covers the answer alone, and its states are those of one full pass."""
    live = speculate(model, forward, torch.arange(10, 17), 20, depth=2)
    capture = as_capture(model, live, forward.draft.contract.taps, name="mine")
    assert capture.name == "mine" and len(capture) == 7 + len(live.tokens)
    assert capture.loss_mask.tolist() == [False] * 7 + [True] * len(live.tokens)
    assert torch.equal(capture.token_ids, torch.cat((live.prompt, live.tokens)))
    assert int(capture.scored[0]) == 6, "the first pair asked: the prompt's last state, the first new token"
    with torch.inference_mode():
        logits = model.lm_head(model.model.norm(capture.state(FINAL)))
    assert capture.final_kind == "pre_norm"
    assert torch.equal(logits[6:-1].argmax(-1), live.tokens), "the final state predicts the text itself"


# ---- sampling -------------------------------------------------------------------------------------

# Vocabulary of five. p has mass (0.1, token 3) where q has none, q (0.4, token 4) where p has none.
P = torch.tensor([0.4, 0.3, 0.2, 0.1, 0.0])
Q = torch.tensor([0.1, 0.2, 0.3, 0.0, 0.4])
BONUS = torch.tensor([0.1, 0.1, 0.1, 0.1, 0.6])
SIGNIFICANT = 0.001


def always(p, q, drafted, rng):
    """Wrong: takes whatever was drafted."""
    return 1, int(torch.multinomial(p[1], 1, generator=rng))


def careless(p, q, drafted, rng):
    """Wrong, and easily written: after a refusal it draws from p, not from what q left over."""
    token = int(drafted)
    if torch.rand((), generator=rng) * q[0, token] >= p[0, token]:
        return 0, int(torch.multinomial(p[0], 1, generator=rng))
    return 1, int(torch.multinomial(p[1], 1, generator=rng))


def first_tokens(rule, n=20_000):
    """First emitted token of n rounds of one draft token each, how many were accepted, and the bonuses."""
    rng = torch.Generator().manual_seed(11)
    p, q = torch.stack((P, BONUS)), Q[None]
    firsts, bonuses = torch.zeros(5), torch.zeros(5)
    for drafted in torch.multinomial(Q, n, replacement=True, generator=rng):
        hits, token = rule(p, q, drafted[None], rng)
        firsts[int(drafted) if hits else token] += 1
        if hits:
            bonuses[token] += 1
    return firsts, bonuses


def fits(counts, p) -> float:
    """p-value of counts under a distribution; 0 if something impossible happened."""
    if counts[p == 0].any():
        return 0.0
    counts, expected = counts[p > 0].double(), p[p > 0].double()
    return float(chisquare(counts, expected / expected.sum() * counts.sum()).pvalue)


def test_rejection_rule_keeps_the_targets_distribution():
    """Whatever q is: the first token is drawn from p, and the token after an accepted one from the next p."""
    firsts, bonuses = first_tokens(accept)
    assert fits(firsts, P) > SIGNIFICANT, f"{firsts.tolist()} of 20,000 for p = {P.tolist()}"
    assert fits(bonuses, BONUS) > SIGNIFICANT
    share, expected = float(bonuses.sum() / 20_000), float(torch.minimum(P, Q).sum())
    assert share == pytest.approx(expected, abs=4 * (expected * (1 - expected) / 20_000) ** 0.5)


@pytest.mark.parametrize("rule", [always, careless])
def test_the_chi_square_has_power(rule):
    """A control: two wrong rules fail the same test clearly."""
    assert fits(first_tokens(rule)[0], P) < 1e-6


def test_rejection_rule_by_hand():
    """p == q accepts all, disjoint p and q nothing; the first refusal ends a chain of three."""
    same = torch.stack((P, P, P, BONUS))
    for seed in range(50):
        rng = torch.Generator().manual_seed(seed)
        drafted = torch.multinomial(P, 3, replacement=True, generator=rng)
        assert accept(same, same[:3], drafted, rng)[0] == 3
    left, right = torch.tensor([0.5, 0.5, 0, 0, 0]), torch.tensor([0, 0, 0.5, 0.5, 0])
    p = torch.stack((left, left, left, BONUS))
    q = torch.stack((left, right, left))
    for seed in range(50):
        hits, token = accept(p, q, torch.tensor([0, 2, 1]), torch.Generator().manual_seed(seed))
        assert hits == 1 and token in (0, 1), "token 2 has no mass in p: refused, redrawn from p"


def test_draft_rows_over_the_targets_ids(forward):
    """Each draft id's probability lands on the id it stands for; ids that share one add up."""
    q = torch.rand(3, DRAFT_VOCAB, generator=torch.Generator().manual_seed(0)).softmax(-1)
    contract = forward.draft.contract
    rows = to_target_rows(q, forward, contract, VOCAB)
    ids = forward.draft.to_target(torch.arange(DRAFT_VOCAB))
    assert rows.shape == (3, VOCAB) and torch.equal(rows[:, ids], q)
    torch.testing.assert_close(rows.sum(-1), torch.ones(3))
    shared = to_target_rows(q, forward, contract.change(vocab_map="absolute"), VOCAB)
    torch.testing.assert_close(shared.sum(-1), torch.ones(3))
    first = int(forward.draft.d2t[0])
    torch.testing.assert_close(shared[:, first], q[:, forward.draft.d2t == first].sum(-1))


def small_pair():
    """A two-layer target and a draft on all its taps, logits quiet enough that many texts occur."""
    with TemporaryDirectory() as folder:
        speculators_draft().save_pretrained(folder)
        draft = load_draft(folder)
    model = tiny_llama(layers=2)
    contract = draft.contract.change(taps=("embed", "layer1", "layer2"))
    return model, DraftForward(replace(draft, contract=contract))


@torch.inference_mode()
def two_token_texts(model, prompt, temperature):
    """{text: probability} of all answers of two tokens, from the target's own softmax."""
    first = (model(prompt[None]).logits[0, -1].double() / temperature).softmax(-1)
    everything = torch.cat((prompt.expand(VOCAB, -1), torch.arange(VOCAB)[:, None]), 1)
    second = (model(everything).logits[:, -1].double() / temperature).softmax(-1)  # (V, V)
    texts = {(a, b): float(first[a] * second[a, b]) for a in range(VOCAB) for b in range(VOCAB) if a != END}
    return first, texts | {(END,): float(first[END])}


def pooled(counts, expected):
    """Counts and expectations with all cells that expect fewer than 5 in one."""
    large = [text for text, e in expected.items() if e >= 5]
    seen, wanted = [counts[t] for t in large], [expected[t] for t in large]
    total = sum(counts.values())
    return [*seen, total - sum(seen)], [*wanted, total - sum(wanted)]


@pytest.mark.slow
@pytest.mark.parametrize("taps", [("embed", "layer1", "layer2"), ("layer2", "embed", "layer1")])
def test_sampled_texts_have_the_targets_distribution(taps):
    """10,000 draws of two tokens against every text's exact probability; a wrong contract changes nothing.

    And the share of accepted drafts is sum(min(p, q)), as `overlap` predicts from captures.
    """
    model, forward = small_pair()
    contract, prompt, draws = forward.draft.contract.change(taps=taps), torch.tensor([5, 40, 11]), 10_000
    rng = torch.Generator().manual_seed(3)
    counts, accepted, rounds = Counter(), 0, 0
    for _ in range(draws):
        g = speculate(model, forward, prompt, 2, depth=1, contract=contract, temperature=0.7, rng=rng)
        counts[tuple(g.tokens.tolist())] += 1
        accepted += sum(g.accepted)
        rounds += len(g.accepted)
    first, exact = two_token_texts(model, prompt, 0.7)
    seen, wanted = pooled(counts, {text: p * draws for text, p in exact.items()})
    assert len(seen) > 100, "hardly any text is frequent enough to be counted"
    assert chisquare(seen, wanted).pvalue > SIGNIFICANT
    texts = [Generation(prompt, torch.tensor([a, 0]), (), (), 0, 0, 0) for a in range(VOCAB) if a != END]
    captures = [as_capture(model, text, contract.taps) for text in texts]
    shares = overlap(forward, captures, head_of(model), contract, temperature=0.7)[1][:, 0].double()
    weights = torch.cat((first[:END], first[END + 1 :]))
    expected = float((weights * shares).sum() / weights.sum())
    assert accepted / rounds == pytest.approx(expected, abs=4 * (expected * (1 - expected) / rounds) ** 0.5)


def test_the_same_seed_gives_the_same_text(model, forward):
    """A generator decides everything; another seed gives another text, and plain decoding has one too."""
    prompt = torch.arange(10, 20)

    def sample(seed):
        rng = torch.Generator().manual_seed(seed)
        return speculate(model, forward, prompt, 30, depth=3, temperature=1.0, rng=rng).tokens.tolist()

    assert sample(1) == sample(1) != sample(2)
    drawn = [
        decode(model, prompt, 20, temperature=1.0, rng=torch.Generator().manual_seed(s)).tokens.tolist()
        for s in (1, 1, 2)
    ]
    assert drawn[0] == drawn[1] != drawn[2]


# ---- overlap --------------------------------------------------------------------------------------


def head_of(model) -> TargetHead:
    parts = (model.model.embed_tokens.weight, model.model.norm.weight, model.lm_head.weight)
    return TargetHead(
        Path("tiny"), *(p.detach() for p in parts), model.config.rms_norm_eps, len(model.model.layers)
    )


@pytest.fixture(scope="module")
def live_captures(model, forward):
    taps = forward.draft.contract.taps
    texts = [decode(model, torch.arange(n, 2 * n), 12) for n in (5, 9)]
    return [as_capture(model, text, taps) for text in texts]


@pytest.mark.parametrize("vocab_map", ["offset", "absolute", "identity"])
def test_overlap_is_the_double_loop(model, forward, live_captures, vocab_map):
    """sum over target ids of min(p, q), written out; under "absolute" several draft ids share one."""
    contract = forward.draft.contract.change(vocab_map=vocab_map)
    rows, shares = overlap(forward, live_captures, head_of(model), contract, depths=2, temperature=0.8)
    assert len(rows.position) == len(shares) == sum(len(c.scored) for c in live_captures)
    produced = forward.draft.to_target(torch.arange(DRAFT_VOCAB), vocab_map).tolist()
    for capture_index, capture in enumerate(live_captures):
        with torch.inference_mode():
            p = (model(capture.token_ids[None]).logits[0] / 0.8).softmax(-1)  # (L, V)
        q = forward.predict([capture], contract, depths=2, keep_logits=True).logits
        q = (q / 0.8).softmax(-1)
        mine = (rows.capture == capture_index).nonzero().flatten()
        for row, at in enumerate(mine.tolist()):
            t = int(rows.position[at])
            for depth in range(2):
                if t + 2 + depth >= len(capture):
                    assert shares[at, depth].isnan(), "past the end of the text nothing can be accepted"
                    continue
                by_hand = 0.0
                for token in range(VOCAB):
                    said = sum(float(q[row, depth, i]) for i, v in enumerate(produced) if v == token)
                    by_hand += min(float(p[t + 1 + depth, token]), said)
                where = f"{vocab_map}, capture {capture_index}, position {t}, depth {depth}"
                assert float(shares[at, depth]) == pytest.approx(by_hand, abs=1e-5), where


def test_overlap_of_a_perfect_and_of_a_blind_draft(model, forward, live_captures):
    """1 where the draft's distribution is the target's own; Vd / V where both know nothing."""
    blind = overlap(forward, live_captures, head_of(model), temperature=1e7)[1][:, 0]
    torch.testing.assert_close(blind, torch.full_like(blind, DRAFT_VOCAB / VOCAB), atol=1e-4, rtol=0)
    # A target that knows what the draft knows: its last state is the draft's, one position later.
    draft = forward.draft
    seeing = DraftForward(replace(draft, lm_head=torch.eye(draft.hidden_size)))
    capture = live_captures[0]
    states = torch.zeros(len(capture), draft.hidden_size)
    contract = draft.contract.change(vocab_map="identity")
    known = seeing.predict([capture], contract, positions="all", keep_logits=True)
    states[known.position + 1] = known.logits[:, 0]
    twin = replace(capture, readers={**capture.readers, FINAL: lambda: states}, final_kind="post_norm")
    head = TargetHead(Path("twin"), draft.embed, torch.ones(32), draft.lm_head, 1e-5, 6)
    perfect = overlap(forward, [twin], head, contract, temperature=0.5)[1]
    torch.testing.assert_close(perfect, torch.ones_like(perfect), atol=1e-5, rtol=0)


# ---- bad input ------------------------------------------------------------------------------------

GOOD = {"prompt": torch.arange(10, 20), "max_tokens": 8, "depth": 2, "temperature": 0.0}
BAD = {
    "depth 0": ({"depth": 0}, {}, ContractError, r"depth: expected 1 or more.*use decode\(\)"),
    "negative depth": ({"depth": -3}, {}, ContractError, r"depth: expected 1 or more.*found -3"),
    "too long": ({"prompt": torch.arange(3000) % 90}, {}, TargetError, r"2048 positions, found 3000 \+ 8"),
    "too many tokens": ({"max_tokens": 2048}, {}, TargetError, "context.*ask for fewer tokens"),
    "empty prompt": ({"prompt": torch.tensor([], dtype=torch.long)}, {}, TargetError, "prompt.*at least one"),
    "batch of prompts": ({"prompt": torch.ones(2, 3, dtype=torch.long)}, {}, TargetError, r"shape \(2, 3\)"),
    "a single number": ({"prompt": torch.tensor(5)}, {}, TargetError, r"prompt.*shape \(\)"),
    "id too large": ({"prompt": torch.tensor([5, VOCAB])}, {}, TargetError, "from 0 to 96, found 97"),
    "negative id": ({"prompt": torch.tensor([5, -1])}, {}, TargetError, "from 0 to 96, found -1"),
    "no tokens": ({"max_tokens": 0}, {}, TargetError, "max_tokens: expected 1 or more"),
    "temperature": ({"temperature": -0.5}, {}, TargetError, r"temperature: expected 0 \(greedy\) or more"),
    "no number": ({"temperature": float("nan")}, {}, TargetError, "temperature.*found nan"),
    "tap beyond": ({}, {"taps": ("embed", "layer3", "layer5")}, ContractError, "up to layer4.*layer5"),
    "unnamed taps": ({}, {"taps": (Stored(0), "layer3", Stored(2))}, ContractError, "stored0.*stored2"),
    "two taps": ({}, {"taps": ("embed", "layer3")}, ContractError, "fc: expected 96 inputs.*64"),
    "token_shift 2": ({}, {"token_shift": 2}, ContractError, "token_shift.*does not know later tokens"),
    "norm it lacks": ({}, {"fc_input_norm": "input_norm"}, ContractError, "input_norm, whose weights"),
    "norms it lacks": ({}, {"fc_input_norm": "fc_norm"}, ContractError, "fc_norm, whose weights"),
}  # fmt: skip


@pytest.mark.parametrize("bad", BAD)
def test_bad_requests_are_refused_before_any_work(model, forward, bad):
    """One typed error that names the field, no forward pass, no hook left, and the pair works on."""
    options, change, error, message = BAD[bad]
    options = GOOD | options
    passes = []
    counter = model.model.register_forward_hook(lambda *_: passes.append(1))
    before = hooks(model)
    try:
        with pytest.raises(error, match=message):
            speculate(
                model, forward, options["prompt"], options["max_tokens"], depth=options["depth"],
                temperature=options["temperature"], contract=forward.draft.contract.change(**change),
            )  # fmt: skip
        if error is TargetError:
            with pytest.raises(error, match=message.replace("3000 \\+ 8", "3000")):
                decode(model, options["prompt"], options["max_tokens"], temperature=options["temperature"])
    finally:
        counter.remove()
    assert not passes, "the target ran before the request was refused"
    assert hooks(model) == before - 1


@pytest.mark.parametrize(
    "size, message",
    [
        ({"vocab_size": 64}, "vocabulary: expected 64 ids, the target's, found 97"),
        ({"hidden_size": 16}, "fc: expected 96 inputs, as the draft has, found 48"),
    ],
)
def test_a_draft_of_another_target_is_refused(forward, size, message):
    """Vocabulary and hidden size tell a foreign draft before it can fail somewhere inside."""
    from transformers import LlamaConfig, LlamaForCausalLM

    common = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4}
    config = LlamaConfig(**common | size, num_attention_heads=4, num_key_value_heads=2, pad_token_id=None)
    model = LlamaForCausalLM(config).eval()
    before = hooks(model)
    with pytest.raises(ContractError, match=message):
        speculate(model, forward, torch.arange(5), 8, depth=2)
    bypassed = forward.draft.contract.change(use_fc=False)
    with pytest.raises(ContractError, match=r"vocabulary|fc"):
        speculate(model, forward, torch.arange(5), 8, depth=2, contract=bypassed)
    assert hooks(model) == before


@pytest.mark.parametrize("nth", [1, 2, 7])
def test_interrupt_leaves_the_model_as_it_was(nth):
    """Ctrl-C inside the n-th forward: no hook of ours stays, and the next run gives the right text."""
    model, forward = tiny_pair("llama", 1)
    prompt = torch.arange(10, 20)
    expected, before = decode(model, prompt, 30).tokens, hooks(model)
    calls = []

    def ctrl_c(*_):
        calls.append(1)
        if len(calls) == nth:
            raise KeyboardInterrupt

    for run in (
        lambda: decode(model, prompt, 30),
        lambda: speculate(model, forward, prompt, 30, depth=3),
        lambda: speculate(model, forward, prompt, 30, depth=3, temperature=1.0),
    ):
        calls.clear()
        handle = model.model.layers[1].register_forward_hook(ctrl_c)
        with pytest.raises(KeyboardInterrupt):
            run()
        handle.remove()
        assert hooks(model) == before, "a hook of `watch` stayed behind"
        assert torch.equal(decode(model, prompt, 30).tokens, expected)
        assert torch.equal(speculate(model, forward, prompt, 30, depth=3).tokens, expected)


# ---- costs ----------------------------------------------------------------------------------------


def test_costs_cover_every_part_of_a_round(model, forward):
    """One verification time per width, one drafting time per depth, all positive; no hook stays."""
    before = hooks(model)
    costs = measure_costs(model, forward, torch.arange(10, 30), (1, 4), repeats=2)
    assert set(costs.verify) == {1, 2, 5} and set(costs.draft) == {1, 4}
    assert costs.plain == costs.verify[1]
    assert min(*costs.verify.values(), *costs.draft.values()) > 0
    assert costs.round(4) == costs.draft[4] + costs.verify[5]
    assert costs.draft[4] > costs.draft[1], "four draft steps cannot be cheaper than one"
    assert hooks(model) == before


@pytest.mark.parametrize(
    "length, depths, repeats, message",
    [
        (1, (1,), 1, "prompt: expected 3"),
        (2, (1,), 1, "prompt: expected 3"),
        (9, (), 1, "depths: expected at least one"),
        (9, (1,), 0, "repeats: expected 1"),
        (9, (0, 2), 1, "depth: expected 1"),
    ],
)
def test_costs_need_a_prompt_and_depths(model, forward, length, depths, repeats, message):
    """What cannot be measured is said, in the errors of the other entries."""
    with pytest.raises((TargetError, ContractError), match=message):
        measure_costs(model, forward, torch.arange(5, 5 + length), depths, repeats=repeats)


# ---- the real ones --------------------------------------------------------------------------------

QUESTIONS = (
    "How do I boil an egg?",
    "Write a Python function that adds two numbers.",
    "What is the capital of France, and why is it famous?",
)


@pytest.fixture(scope="module")
def real():
    """(target, prompts, draft (a) prepared, its trained contract)."""
    from transformers import AutoTokenizer

    folder = ensure_target()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": q}], add_generation_prompt=True, return_tensors="pt"
        )["input_ids"][0]
        for q in QUESTIONS
    ]
    draft = samples.draft("a", samples.target_head())
    right = draft.contract.change(taps=samples.TRAINED_TAPS["a"])
    return load_target(folder), prompts, DraftForward(draft), right


@pytest.mark.slow
def test_plain_decoding_is_generate_on_the_real_target(real):
    """SmolLM2 itself: three prompts, 48 tokens each, before and after thin products are switched on."""
    model, prompts, _, _ = real
    untouched = load_target(ensure_target())
    for prompt in prompts:
        assert torch.equal(decode(model, prompt, 48).tokens, continue_greedily(untouched, prompt, 48))


@pytest.mark.slow
def test_the_real_pair_is_lossless_and_replayed(real):
    """Draft (a) under right and wrong taps, depths 2 and 15: the target's text, round for round."""
    model, prompts, forward, right = real
    gain = {}
    for question, prompt in zip(QUESTIONS[:2], prompts, strict=False):
        plain = decode(model, prompt, 48)
        for name, contract in (("right", right), ("wrong", right.change(taps=samples.SERVED_TAPS))):
            for depth in (2, 15):
                where = f"{name} taps, depth {depth}, {question!r}"
                live = speculate(model, forward, prompt, 48, depth=depth, contract=contract)
                same = torch.equal(live.tokens, plain.tokens)
                assert same or near_tie(model, plain, live), f"not the target's own text: {where}"
                capture = as_capture(model, live, contract.taps)
                replayed = walk(rollouts(forward, [capture], contract, depth), [capture])
                assert replayed.of(0) == list(live.accepted), where
                gain.setdefault((name, depth), []).append(live.tokens_per_round)
    assert sum(gain["right", 15]) > 1.5 * sum(gain["wrong", 15]), f"tokens per round {gain}"
