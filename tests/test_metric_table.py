"""The table of definitions: a toy by hand, identities, and the frameworks' own functions."""

from __future__ import annotations
import __future__

import ast
import importlib.util
import json
import math
import re
import subprocess
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lib import samples
from lib.acceptance import Rounds, rollouts, walk
from lib.captures import Capture, open_capture, save_capture
from lib.contract import Contract
from lib.draft import DraftForward, Predictions
from lib.errors import MetricError
from lib.metric_table import (
    DEFINITIONS,
    Evidence,
    TargetSide,
    definitions,
    evidence,
    table,
    target_side,
)
from lib.taps import Tap
from tests.support import (
    DRAFT_VOCAB,
    HIDDEN,
    VOCAB,
    draft_and_head,
    random_capture_tensors,
)

ROOT = Path(__file__).resolve().parents[1]
ENGINE_PYTHON = ROOT / ".venv-engine" / "bin" / "python"

# ---- a toy small enough to read -----------------------------------------------------------------

# Seven tokens, the last four the assistant's; the draft can say 5, 6 and 7 (its ids 0, 1, 2), not 8.
#   position u      0  1  2  3  4  5  6
TOKENS = torch.tensor([0, 1, 2, 5, 6, 8, 7])
MASK = torch.tensor([0, 0, 0, 1, 1, 1, 1]).bool()
# What the target says at u = 1..6: y_u over everything, z_u (draft id) within the draft's vocabulary.
FULL = torch.tensor([2, 5, 6, 8, 7, 5])
BEST = torch.tensor([0, 0, 1, 2, 2, 0])
# Draft ids predicted at steps 0, 1, 2 of the chains t = 0..5; step i is judged at u = t + 1 + i.
#   against z:   + + +      + + -      + + -      + + +      - +        +
CHAINS = torch.tensor([[0, 0, 1], [0, 1, 0], [1, 2, 0], [2, 2, 0], [1, 0, 0], [0, 0, 0]])


def toy_capture(mask=MASK) -> Capture:
    return Capture("toy", Path("toy"), "workbook", TOKENS, mask, (), 4, {})


def toy(rounds=((0, 2, 1, 2), (0, 4, 0, 1)), chains=CHAINS, mask=MASK, capture=0) -> Evidence:
    """The toy as evidence; overlap of step i of chain t is t / 10 + i / 100."""
    vocabulary = torch.tensor([5, 6, 7])
    steps = torch.arange(3)
    at = torch.arange(6)[:, None] + 2 + steps  # (6, 3) positions of the text's tokens
    truth = torch.where(at < 7, TOKENS[at.clamp(max=6)], -1)
    known = torch.isin(truth, vocabulary)
    p = Predictions(
        torch.full((6,), capture), torch.arange(6), chains, vocabulary[chains], truth, known,
        Contract(taps=("embed",)),
    )  # fmt: skip
    overlap = torch.arange(6)[:, None] / 10 + steps / 100
    in_vocab = torch.zeros(9, dtype=torch.bool).index_fill_(0, vocabulary, True)
    target = TargetSide((FULL,), (torch.zeros(6),), (BEST,))
    return Evidence(
        (toy_capture(mask),), in_vocab, p, target, overlap, Rounds(*torch.tensor(rounds).T, depth=3)
    )


def numbers(e: Evidence) -> dict:
    """(framework, metric) -> list over its steps of (numerator, denominator), or of the value."""
    out: dict = {}
    for row in table(e).itertuples():
        name = re.sub(rf"(?<=[_\[]){row.step}", "i", row.metric)
        value = row.value if math.isnan(row.numerator) else (row.numerator, row.denominator)
        out.setdefault((row.framework, name), []).append(value)
    return out


def test_toy_by_hand():
    """Every definition on one conversation, each count found by pointing at the table above.

    The next mask (m_u) lets u = 3, 4, 5, 6 count; the unshifted one (m_{u-1}) u = 4, 5, 6.
    y_4 = 8 is out of vocabulary: k can hit there (re-labelled), h cannot.
    """
    found = numbers(toy())
    # Chains by step 0 (u = t + 1): t=2 +, t=3 + (u=4, re-labelled), t=4 -, t=5 +. Alive afterwards: 2, 3
    # (5 has no step 1). Step 1 counts u = 3..6, so t = 1..4; alive 2 and 3 of them both hit. Step 2
    # counts t = 0..3; 2 breaks, 3 goes on. Chain 1 starts on a prompt token: in the denominator only.
    assert found["speculators", "full_acc_i"] == [(3, 4), (2, 4), (1, 4)]
    assert found["speculators", "cond_acc_i"] == [(3, 4), (2, 2), (1, 2)]
    # The same cells whatever came before: steps 0, 1, 2 over u = 3..6.
    assert found["Model-Optimizer", "train_acc[i]"] == [(3, 4), (4, 4), (2, 4)]
    # One position later (u = 4, 5, 6) and y_4 a miss: step 0 t = 3 - 4 - 5 +, step 1 t = 2 - 3 + 4 +, ...
    assert found["SpecForge", "acc_i"] == [(1, 3), (2, 3), (1, 3)]
    assert found["SpecForge", "acc_i (bcb2ec2a)"] == [(1, 2), (2, 2), (1, 2)]
    # EAGLE keeps the last position (m_6 = 1), which has no label, in the denominator.
    assert found["EAGLE", "acc_i"] == [(1, 4), (2, 4), (1, 4)]
    assert found["EAGLE", "epochacc_i"] == [
        (pytest.approx(n / (4 + 1e-6)), 1) for n in (1, 2, 1)
    ]  # one conversation: the mean over one batch
    # Overlaps of u = 5, 6: step 0 t = 4, 5; step 1 t = 3, 4; step 2 t = 2, 3.
    assert found["SpecForge", "acceptance_rate_i"] == [
        (pytest.approx(0.4 + 0.5), 2), (pytest.approx(0.31 + 0.41), 2), (pytest.approx(0.22 + 0.32), 2),
    ]  # fmt: skip
    assert found["SpecForge", "eval/simulated_acc_len"] == [pytest.approx(1 / 3 + 2 / 9 + 2 / 27)]
    # u = 3, 5, 6 (4 is out of vocabulary): step 0 t = 2 + 4 - 5 +, step 1 1 + 3 + 4 +, step 2 0 + 2 - 3 +.
    assert found["Automodel", "accuracy"] == [(2 + 3 + 2, 3 + 3 + 3)]
    assert found["Automodel", "train_acc"] == [(pytest.approx(7 / 9), 1)]
    # Chains masked throughout: 2 3 4 5, then 2 3 4, then 2 3. Right: 2 and 5, then none (u = 4 breaks 2).
    assert found["Automodel", "tau_sim"] == [1 + 2 / 4 + 0 / 3 + 0 / 2]
    said = replace(toy(), target=TargetSide((torch.where(FULL == 8, 7, FULL),), (torch.zeros(6),), (BEST,)))
    assert numbers(said)["Automodel", "tau_sim"] == [1 + 3 / 4 + 2 / 3 + 1 / 2]  # could the draft say y_4
    # Scored chains t = 2, 3, 4; the text says 6, 8, 7 at step 0, 8, 7 at step 1, 7 at step 2.
    assert found["ours", "in-vocab accuracy"] == [(1, 2), (1, 1), (0, 1)]
    assert found["ours", "all-token accuracy"] == [(1, 3), (1, 2), (0, 1)]
    # The run: token 5 comes from prefill; a round accepts 6 and adds 8; a round misses 7, the target adds it.
    assert found["vLLM", "draft acceptance rate"] == found["SGLang", "spec_accept_rate"] == [(1, 6)]
    assert found["vLLM", "mean acceptance length"] == found["SGLang", "spec_accept_length"] == [(3, 2)]
    assert found["vLLM", "per-position acceptance rate"] == [(1, 2), (0, 2), (0, 2)]
    assert found["SGLang", "spec_accept_rate (older gauge)"] == [(3, 8)]
    assert found["SpecForge", "accept_length"] == [(4, 2)]  # four tokens, two verify rounds
    assert found["Model-Optimizer", "AR"] == [(pytest.approx(4 / 3), 1)]  # the round without a draft
    assert {(d.framework, d.name.format(i="i")) for d in DEFINITIONS} == set(found), "a row without a case"


def test_the_end_of_the_text_by_hand():
    """A last round accepts the text's last token: no bonus enters, the engines' lengths count one still."""
    found = numbers(toy(((0, 2, 1, 2), (0, 4, 1, 1))))
    assert found["vLLM", "mean acceptance length"] == found["SGLang", "spec_accept_length"] == [(4, 2)]
    assert found["SpecForge", "accept_length"] == [(4, 2)]  # 2 + 1 tokens of rounds, and prefill's
    assert found["Model-Optimizer", "AR"] == [(pytest.approx(4 / 3), 1)]


def test_toy_rounds_are_the_walk_of_its_chains():
    """Teacher-fed hits up to the first miss are what a run accepts: the hand-made rounds, replayed."""
    found = walk(toy().scored, [toy_capture()])
    assert [x.tolist() for x in (found.start, found.accepted, found.gained)] == [[2, 4], [1, 0], [2, 1]]


def test_no_definition_ignores_its_input():
    """A draft that always says 5 changes every row but the pure counts of the target's."""
    before, after = numbers(toy()), numbers(toy(((0, 2, 0, 1), (0, 3, 0, 1), (0, 4, 0, 1)), CHAINS * 0))
    overlaps = {("SpecForge", "acceptance_rate_i")}  # given, not computed, in the toy
    assert {k for k in before if before[k] == after[k]} == overlaps


def test_definitions_are_complete():
    """No empty text; the kinds are the four; names are unique within a framework."""
    texts = definitions()
    assert len(texts) == len(DEFINITIONS) and not (texts == "").any(axis=None)
    assert set(texts["kind"]) == {"marginal", "joint", "conditional", "served"}
    assert set(texts["bonus"]) == {"counted", "not counted", "n/a"}
    assert not texts.duplicated(["framework", "name"]).any()


def test_nothing_counts_is_nan_with_a_note():
    """No chain survives a draft that never hits: `cond_acc_1` is undefined, not zero and not an error."""
    wrong = torch.stack([(BEST.repeat(2)[t + torch.arange(3)] + 1) % 3 for t in range(6)])
    found = table(toy(((0, 2, 0, 1),), wrong)).set_index(["framework", "metric"])
    row = found.loc[("speculators", "cond_acc_1")]
    assert row["value"] != row["value"] and row["denominator"] == 0 and "nothing counts" in row["note"]
    assert found.loc[("speculators", "full_acc_1"), "value"] == 0
    assert (found["note"] == "").sum() == len(found) - 2  # cond_acc_1 and cond_acc_2


def test_other_errors_are_not_swallowed(monkeypatch):
    """Only an empty denominator becomes a NaN row; any other complaint comes through."""

    def complain(e, i):
        raise MetricError("toy", "kind", expected="sense", found="none", remedy="none")

    monkeypatch.setattr("lib.metric_table.DEFINITIONS", (replace(DEFINITIONS[0], compute=complain),))
    with pytest.raises(MetricError, match="expected sense"):
        table(toy())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda e: {"predictions": e.scored}, "positions='all': pairs 0..L-2"),
        (lambda e: {"captures": (*e.captures, *e.captures)}, "positions='all'"),
        (lambda e: {"overlap": e.overlap[:, :2]}, r"one value per pair and depth \(6, 3\)"),
        (lambda e: {"target": replace(e.target, full=(FULL[1:],))}, r"target.full: expected L - 1 values"),
        (lambda e: {"target": replace(e.target, draft=())}, r"target.draft: expected L - 1 values"),
        (lambda e: {"rounds": replace(e.rounds, capture=e.rounds.capture + 1)}, "rounds in 1 captures"),
    ],
)
def test_parts_that_do_not_fit_are_refused(change, message):
    e = toy()
    with pytest.raises(MetricError, match=message):
        replace(e, **change(e))


def test_a_mask_that_scores_nothing_is_a_named_error():
    """The last token alone is masked: no scored pair, and our own metrics say so."""
    e = toy(mask=torch.arange(7) == 6)
    with pytest.raises(MetricError, match="at least one scored pair"):
        DEFINITIONS[0].compute(e, 0)
    assert table(e)["note"].str.contains("nothing counts").any()


# ---- identities ---------------------------------------------------------------------------------

ROUNDS = st.integers(1, 5).flatmap(
    lambda depth: st.tuples(st.just(depth), st.lists(st.integers(0, depth), min_size=1, max_size=40))
)


@settings(deadline=None, max_examples=60)
@given(ROUNDS)
def test_served_identities(run):
    """AL = 1 + sum p_i = 1 + K rate = (K + 1) older gauge, in 1..K+1; p_i is the conditionals' product."""
    depth, accepted = run
    accepted = torch.tensor(accepted)
    zeros = torch.zeros_like(accepted)
    e = replace(toy(), rounds=Rounds(zeros, zeros + 2, accepted, accepted + 1, depth))
    found = table(e)
    (length,), p, (rate,), (older,) = (
        found[(found["framework"] == framework) & (found["metric"] == metric)]["value"].tolist()
        for framework, metric in (
            ("vLLM", "mean acceptance length"),
            ("vLLM", "per-position acceptance rate"),
            ("vLLM", "draft acceptance rate"),
            ("SGLang", "spec_accept_rate (older gauge)"),
        )
    )
    assert length == pytest.approx(1 + sum(p)) == pytest.approx(1 + depth * rate)
    assert length == pytest.approx((depth + 1) * older) and 1 <= length <= depth + 1
    assert len(p) == depth and p == sorted(p, reverse=True)
    survivors, product = len(accepted), 1.0
    for i in range(depth):
        alive = int((accepted > i).sum())
        product *= alive / survivors if survivors else 0
        survivors = alive
        assert product == pytest.approx(p[i])


def planted(hits, known, masks) -> Evidence:
    """Evidence of chains that hit where `hits` (6, 3) says, the other side of the toy kept."""
    labels = torch.cat((BEST, torch.zeros(2, dtype=torch.int64))).unfold(0, 3, 1)
    full = torch.where(known, torch.tensor([5, 6, 7])[BEST], 8)
    e = toy(chains=torch.where(hits, labels, (labels + 1) % 3), mask=masks)
    return replace(e, target=TargetSide((full,), (torch.zeros(6),), (BEST,)))


BITS = st.lists(st.booleans(), min_size=18, max_size=18).map(lambda b: torch.tensor(b).view(6, 3))


@settings(deadline=None, max_examples=100)
@given(BITS, st.lists(st.booleans(), min_size=6, max_size=6), st.integers(1, 5))
def test_training_identities(hits, known, start):
    """Ratios in [0, 1]; lengths within their bounds; joint below marginal; what must be equal is.

    One answer from `start` to the end, as in serving.
    """
    e = planted(hits, torch.tensor(known), torch.arange(7) >= start)
    found = table(e)
    defined = found[found["note"] == ""]
    ratios, lengths = (defined[defined["unit"] == u]["value"] for u in ("ratio", "tokens/round"))
    assert ratios.between(0, 1).all() and lengths.between(0, e.rounds.depth + 1).all()
    counts = numbers(e)
    full, marginal = counts["speculators", "full_acc_i"], counts["Model-Optimizer", "train_acc[i]"]
    assert [d for _, d in full] == [d for _, d in marginal]  # the same mask, the same labels
    assert all(j <= m for (j, _), (m, _) in zip(full, marginal, strict=True))
    assert full[0] == marginal[0]
    # OOV as a miss or left out: the same hits, denominators apart by the OOV positions. EAGLE counts the
    # hits of the draft-vocabulary argmax where the full one is in vocabulary: SpecForge's, by another road.
    acc, left_out, eagle = (
        [pair[0] for pair in counts[key]]
        for key in (("SpecForge", "acc_i"), ("SpecForge", "acc_i (bcb2ec2a)"), ("EAGLE", "acc_i"))
    )
    assert acc == left_out == eagle
    assert [d + 1 for _, d in counts["SpecForge", "acc_i"]] == [d for _, d in counts["EAGLE", "acc_i"]]
    if all(known):
        assert counts["SpecForge", "acc_i"] == counts["SpecForge", "acc_i (bcb2ec2a)"]


# ---- the frameworks' own functions --------------------------------------------------------------

TAPS = (Tap(0), Tap(3), Tap(4))


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A random draft and captures whose texts it partly predicts.

    Each text is written as the draft reads it: up to four tokens of its chain, then any token, in
    vocabulary or not. The target's final states say exactly this text, so the text is its greedy
    choice and `walk` is a run of it.

    Returns: speculators model, draft, target head, captures, contract.
    """
    folder, rng = tmp_path_factory.mktemp("written"), torch.Generator().manual_seed(11)
    model, draft, head = draft_and_head(folder, rng)
    forward, contract, captures = DraftForward(draft), draft.contract.change(taps=TAPS), []
    for n, length in enumerate((5, 8, 20, 33)):
        tensors = random_capture_tensors(length, rng, states=3)
        ids, states = tensors["input_ids"], tensors["hidden_states"]

        def save(final, n=n, ids=ids, states=states, mask=tensors["loss_mask"]):
            path = folder / f"{n}.safetensors"
            named = dict(zip(TAPS, states, strict=True))
            save_capture(
                path, token_ids=ids, loss_mask=mask, states=named, final=final, final_kind="pre_norm"
            )
            return open_capture(path)

        t = 0
        while t + 2 < length:  # a chain as long as chance has it, then a token left as it was
            n_hits = min(int(torch.randint(0, 5, (1,), generator=rng)), length - 2 - t)
            p = forward.predict([save(states[0].clone())], contract, depths=4, feed="own", positions="all")
            ids[t + 2 : t + 2 + n_hits] = p.target_ids[t, :n_hits]
            t += n_hits + 1
        following = torch.cat((ids[1:], torch.randint(0, VOCAB, (1,), generator=rng)))
        noise = torch.randn(length, HIDDEN, generator=rng)
        captures.append(save(20 * head.lm_head[following] / head.norm + 20 * noise))
    return model, draft, head, captures, contract


@pytest.fixture(scope="module")
def built(written):
    """Evidence at three depths, with a run of four drafted tokens."""
    _, draft, head, captures, contract = written
    return evidence(captures, draft, head, contract, depths=3, chain=4)


def test_the_written_texts_say_something(built):
    """Hits, misses, out-of-vocabulary targets and accepted tokens all occur: the oracles see something."""
    found = table(built)
    ratios = found[found["unit"] == "ratio"]
    assert (ratios["value"] > 0).all() and (ratios["value"] < 1).all(), ratios[["metric", "value"]]
    assert not built.known[built.own_mask].all() and built.rounds.depth == 4
    assert set(found["note"]) == {""}


def counts(e: Evidence, framework: str, metric: str) -> tuple[float, float]:
    row = table(e).set_index(["framework", "metric"]).loc[(framework, metric)]
    return row["numerator"], row["denominator"]


@pytest.mark.speculators
def test_speculators_own_metrics(written, built):
    """`full_acc` and `cond_acc` are the integers that the trainer's forward counts on these captures."""
    from speculators.losses.eager import kl_div_loss
    from speculators.models.eagle3.data import shift_batch

    model, _, _, captures, _ = written
    sums: dict[str, int] = {}
    for c in captures:
        batch = shift_batch(
            {
                "input_ids": c.token_ids,
                "hidden_states": torch.cat([c.state(t) for t in TAPS], -1),
                "verifier_last_hidden_states": c.final(),
                "loss_mask": c.loss_mask,
                "lengths": torch.tensor([len(c)]),
                "position_ids": torch.arange(len(c)),
            }
        )
        names = ("hidden_states", "input_ids", "loss_mask", "position_ids", "verifier_last_hidden_states")
        with torch.no_grad():
            _, _, metrics = model(
                **{name: batch[name][None] for name in names},
                document_ids=torch.zeros(1, len(c) - 1, dtype=torch.long),
                ttt_steps=3,
                loss_config={"kl_div": (kl_div_loss, 1.0)},  # the default needs Triton
            )
        for name, value in metrics.items():
            sums[name] = sums.get(name, 0) + int(value)
    for kind in ("full", "cond"):
        for i in range(3):
            theirs = (sums[f"{kind}_acc_{i}_sum"], sums[f"{kind}_acc_{i}_total"])
            assert counts(built, "speculators", f"{kind}_acc_{i}") == theirs


def own_function(module: str, name: str, namespace: dict):
    """A function of an installed module that cannot be imported whole, from its own source.

    `specforge.algorithms.eagle3.model` imports Triton, which has no CPU build; the functions taken
    from it here are plain torch. Decorators (torch.compile) are left off, nothing else is changed.
    """
    parts = module.split(".")
    root = Path(importlib.util.find_spec(parts[0]).origin).parent
    file = root.joinpath(*parts[1:]).with_suffix(".py")
    tree = ast.parse(file.read_text())
    (node,) = (n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name == name)
    node.decorator_list = []
    flags = __future__.annotations.compiler_flag  # its annotations name types that are not there
    exec(compile(ast.Module([node], []), str(file), "exec", flags=flags), namespace)
    return namespace[name]


@pytest.fixture(scope="module")
def specforge(written):
    """SpecForge's own `_acc_and_loss` over these captures: per capture and step its numbers.

    The driver is the loop of its `forward`: target and mask one position further at each step.
    """
    from specforge.core.compact_teacher import compute_target_p_padded_from_hidden
    from specforge.core.lk_loss import compute_acceptance_rate, compute_lk_loss

    _, draft, head, captures, contract = written
    namespace = {"torch": torch, "compute_acceptance_rate": compute_acceptance_rate}
    namespace |= {"compute_lk_loss": compute_lk_loss}
    # The loss kernel is Triton's; no metric depends on it.
    namespace["LogSoftmaxLoss"] = SimpleNamespace(apply=lambda logits, target_p, mask: logits.sum() * 0)
    own_function("specforge.algorithms.eagle3.model", "_compute_loss_and_acceptance_rate", namespace)
    acc_and_loss = own_function("specforge.algorithms.eagle3.model", "_acc_and_loss", namespace)
    padding = own_function("specforge.utils", "padding", {"torch": torch})
    normalize = own_function("specforge.algorithms.eagle3.data", "normalize_offline_sample", {})
    trainer = SimpleNamespace(
        draft_model=SimpleNamespace(d2t=draft.d2t), lk_loss_type=None, kl_scale=1.0, kl_decay=1.0
    )
    adapter = SimpleNamespace(
        reduce_metrics=lambda local_correct, local_denom: (local_correct, local_denom),
        reduce_loss=lambda loss: loss,
    )
    forward, results = DraftForward(draft), []
    for c in captures:
        p = forward.predict([c], contract, depths=3, positions="all", keep_logits=True)
        logits = torch.cat((p.logits, torch.zeros(1, 3, DRAFT_VOCAB)))  # pair L - 1: its mask is zero
        final = c.final()
        post = final * torch.rsqrt(final.pow(2).mean(-1, keepdim=True) + head.eps) * head.norm
        sample = normalize(
            {
                "aux_hidden_state": torch.zeros(1, len(c), 3),
                "hidden_state": post[None],
                "input_ids": c.token_ids,
                "loss_mask": c.loss_mask.long(),
            },
            max_len=4096,
        )
        mask = sample["loss_mask"][..., None]
        _, on_draft, ids, position_mask = compute_target_p_padded_from_hidden(
            padding(sample["target"], left=False), head.lm_head, draft.t2d, mask, length=3, chunk_size=40
        )
        steps = []
        for i in range(3):
            out = acc_and_loss(
                trainer,
                logits=logits[None, :, i],
                target_p=None,
                target_p_on_draft=on_draft[:, i : i + len(c)],
                target_token_ids=ids[:, i : i + len(c)],
                position_mask=position_mask,
                loss_mask=mask,
                adapter=adapter,
            )
            steps.append(
                {"rate": float(out[1]), "correct": out[3], "denom": out[4], "valid": int(position_mask.sum())}
            )
            position_mask, mask = padding(position_mask, left=False), padding(mask, left=False)
        results.append(steps)
    return results


@pytest.mark.parametrize("i", range(3))
def test_specforge_own_accuracy(specforge, built, i):
    """`acc_i` counts what `_acc_and_loss` counts, as integers; `acceptance_rate_i` to rounding."""
    correct, denom = (sum(int(steps[i][k]) for steps in specforge) for k in ("correct", "denom"))
    assert counts(built, "SpecForge", f"acc_{i}") == (correct, denom)
    overlap, valid = counts(built, "SpecForge", f"acceptance_rate_{i}")
    assert valid == sum(steps[i]["valid"] for steps in specforge)
    # A capture too short to reach step i gives 0 / eps in their mean, nothing in ours.
    assert overlap == pytest.approx(
        sum(steps[i]["rate"] * steps[i]["valid"] for steps in specforge), abs=1e-4
    )


def test_specforge_own_evaluator(specforge, built):
    """Its `Evaluator.run` over the captures as batches: accuracies and simulated length of the whole set."""
    from specforge.eval.evaluator import Evaluator
    from specforge.training.strategies.base import StepOutput

    def forward(steps):
        metrics = {"acc_corrects": [s["correct"] for s in steps], "acc_denoms": [s["denom"] for s in steps]}
        return StepOutput(torch.tensor(0.0), metrics)

    def batch(steps):
        return SimpleNamespace(tensors={}, steps=steps)

    theirs = Evaluator().run(lambda b: forward(b.steps), [batch(s) for s in specforge])
    found = table(built).set_index(["framework", "metric"])["value"]
    ours = [found[("SpecForge", f"acc_{i}")] for i in range(3)]
    assert theirs["eval/per_position_acc"] == pytest.approx(ours)
    assert theirs["eval/simulated_acc_len"] == pytest.approx(found[("SpecForge", "eval/simulated_acc_len")])
    assert Evaluator._simulated_acc_len([0.5, 0.5]) == 0.75  # no + 1


def test_automodel_own_trainer(written, built):
    """Automodel's `Eagle3TrainerModule` over these captures, a draft of given logits in its place.

    Its target wrapper shifts logits, tokens and the loss mask by one before the trainer sees them.
    """
    from nemo_automodel.components.speculative.eagle.core import Eagle3TrainerModule, simulated_accept_length
    from nemo_automodel.components.speculative.eagle.target import _shift_left_with_zero

    _, draft, head, captures, contract = written
    forward, accuracies = DraftForward(draft), []
    correct, valid, prefix_hits, prefix_valid = 0, 0, torch.zeros(3), torch.zeros(3)
    for c in captures:
        p = forward.predict([c], contract, depths=3, positions="all", keep_logits=True)
        logits = torch.cat((p.logits, torch.zeros(1, 3, DRAFT_VOCAB)))  # pair L - 1: its mask is zero
        trainer = Eagle3TrainerModule(
            GivenLogits(logits),
            selected_token_ids=draft.to_target(torch.arange(DRAFT_VOCAB)),
            selected_token_mask=draft.t2d,
            ttt_steps=3,
        )
        metrics = trainer(
            _shift_left_with_zero(c.token_ids[None]),
            torch.ones(1, len(c)),
            _shift_left_with_zero(c.loss_mask[None].long()),
            torch.zeros(1, len(c), HIDDEN),
            _shift_left_with_zero(head.logits(c.final(), final_kind="pre_norm")[None]),
        )
        accuracies.append(float(metrics.accuracy))
        valid += int(metrics.valid_tokens)
        correct += round(float(metrics.accuracy * metrics.valid_tokens))
        prefix_hits += metrics.step_prefix_hits
        prefix_valid += metrics.step_valid
    assert counts(built, "Automodel", "accuracy") == (correct, valid)
    found = table(built).set_index(["framework", "metric"])["value"]
    assert found[("Automodel", "train_acc")] == pytest.approx(sum(accuracies) / len(captures))
    theirs = float(simulated_accept_length(prefix_hits, prefix_valid))
    assert found[("Automodel", "tau_sim")] == pytest.approx(theirs)


class GivenLogits:
    """What `Eagle3TrainerModule` asks of a draft model, the answers known beforehand."""

    def __init__(self, logits: torch.Tensor) -> None:
        self.logits, self.step = logits, -1

    def project_hidden_states(self, states):
        return states

    def __call__(self, projected_hidden_states, **_):
        self.step += 1
        return projected_hidden_states

    def compute_logits(self, _):
        return self.logits[None, :, self.step]


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.skipif(not ENGINE_PYTHON.exists(), reason="no .venv-engine: `make engine` builds it")
def test_vllm_own_metrics(built):
    """vLLM's counters and its log line, fed with the rounds of the run."""
    accepted = built.rounds.accepted.tolist()
    script = """
import json, sys
from vllm.v1.spec_decode.metrics import SpecDecodingLogging, SpecDecodingStats
depth, accepted = json.loads(sys.argv[1])
log, lines = SpecDecodingLogging(), []
for start in range(0, len(accepted), 3):  # several scheduler steps, as a server has them
    stats = SpecDecodingStats.new(depth)
    for n in accepted[start : start + 3]:
        stats.observe_draft(depth, n)
    log.observe(stats)
log.log(lambda text, *values: lines.append([str(v) for v in values]))
print(json.dumps(lines[0]))
"""
    run = subprocess.run(
        [ENGINE_PYTHON, "-c", script, json.dumps([built.rounds.depth, accepted])],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    length, _, _, n_accepted, n_drafted, per_position, rate = json.loads(run.stdout.splitlines()[-1])
    found = table(built).set_index(["framework", "metric"])["value"]
    assert found[("vLLM", "mean acceptance length")] == pytest.approx(float(length))
    assert found[("vLLM", "draft acceptance rate")] == pytest.approx(float(rate) / 100)
    assert (int(n_accepted), int(n_drafted)) == counts(built, "vLLM", "draft acceptance rate")
    ours = found[("vLLM", "per-position acceptance rate")].tolist()
    assert [round(p, 3) for p in ours] == [float(p) for p in per_position.split(", ")]


# ---- building the evidence ----------------------------------------------------------------------


def test_target_side_is_one_product(written):
    """Argmax, log-sum-exp and the draft's best, computed the plain way; also where an answer ends early."""
    _, draft, head, captures, _ = written
    short = replace(captures[3], loss_mask=captures[3].loss_mask & (torch.arange(33) < 25))
    captures = [*captures, short]
    side = target_side(captures, draft, head)
    rows = draft.to_target(torch.arange(DRAFT_VOCAB))
    for c, full, log_z, best in zip(captures, side.full, side.log_z, side.draft, strict=True):
        logits = head.logits(c.final()[1:], final_kind="pre_norm")
        reached = c.loss_mask[1:] | c.loss_mask[:-1]
        assert torch.equal(full[reached], logits.argmax(-1)[reached]) and (full[~reached] == -1).all()
        torch.testing.assert_close(log_z[reached], logits.logsumexp(-1)[reached])
        assert log_z[~reached].isnan().all() and torch.equal(best, logits[:, rows].argmax(-1))


def test_chunks_change_nothing(written, monkeypatch):
    """A vocabulary of 97 in chunks of 40, positions in chunks of 7."""
    _, draft, head, captures, _ = written
    whole = target_side(captures, draft, head)
    monkeypatch.setattr("lib.metric_table.VOCAB_CHUNK", 40)
    monkeypatch.setattr("lib.metric_table.ROW_CHUNK", 7)
    parts = target_side(captures, draft, head)
    for a, b in zip(whole.full, parts.full, strict=True):
        assert torch.equal(a, b)
    for a, b in zip(whole.log_z, parts.log_z, strict=True):
        torch.testing.assert_close(a, b, equal_nan=True)


def test_teacher_fed_hits_give_the_same_run(written, built):
    """While it hits, a chain is fed the same tokens either way: the run is in the predictions already."""
    replayed = walk(built.scored, built.captures)
    live = walk(rollouts(DraftForward(written[1]), built.captures, written[4], depth=3), built.captures)
    assert torch.equal(replayed.start, live.start) and torch.equal(replayed.accepted, live.accepted)


def test_a_shared_target_side_changes_nothing(written, built):
    _, draft, head, captures, contract = written
    shared = target_side(captures, draft, head)
    again = evidence(captures, draft, head, contract, depths=3, chain=4, target=shared)
    assert table(again).equals(table(built))


def test_inputs_that_cannot_answer_are_refused(written, tmp_path):
    """No final state; another target's width; a map that leaves the vocabulary; final states of two kinds."""
    _, draft, head, captures, contract = written
    c = captures[2]
    bare = replace(c, readers={k: v for k, v in c.readers.items() if k != "final"})
    with pytest.raises(MetricError, match="final state in every capture"):
        evidence([bare], draft, head, contract)
    with pytest.raises(MetricError, match="states of width 32"):
        target_side([replace(c, hidden_size=16)], draft, head)
    outside = replace(draft, d2t=draft.d2t + VOCAB)
    with pytest.raises(MetricError, match="inside the target's 97 rows"):
        target_side(captures, outside, head)
    with pytest.raises(MetricError, match="final states of one kind"):
        target_side([c, replace(c, final_kind="post_norm")], draft, head)


@pytest.mark.slow
def test_samples_right_and_wrong_wiring():
    """Draft (a) on eight held-out conversations: the wrong states lower every accuracy and length."""
    captures, head = samples.captures(limit=8), samples.target_head()
    draft = samples.draft("a", head)
    shared = target_side(captures, draft, head)
    right, wrong = (
        table(evidence(captures, draft, head, draft.contract.change(taps=taps), target=shared))
        for taps in (samples.TRAINED_TAPS["a"], samples.SERVED_TAPS)
    )
    assert (right["metric"] == wrong["metric"]).all() and (right["note"] == "").all()
    assert (right["value"] > wrong["value"]).all(), right[right["value"] <= wrong["value"]]
    # Positions are the same in both; rounds are not, a worse draft needs more of them.
    fixed = right["kind"].isin(["marginal", "joint"]) & (right["framework"] != "vLLM")
    same = right["denominator"].eq(wrong["denominator"]) | right["denominator"].isna()
    assert same[fixed].all()
