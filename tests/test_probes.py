"""Every probe speaks up on its fault, planted as the zoo plants it, and is silent on the healthy case."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lib import samples, zoo
from lib.captures import FINAL, Capture
from lib.case import Case, Finding
from lib.decoding import LiveTarget
from lib.faults import FAULTS
from lib.probes import PROBES, View, run_probes
from lib.taps import Stored, Tap
from lib.target import record_states
from lib.target_head import TargetHead
from tests.support import draft_and_head, tiny_llama

TEXTS = 6


@pytest.fixture(scope="module")
def healthy() -> Case:
    """Sample draft (a) under the contract it was trained with, on a few held-out conversations."""
    head = samples.target_head()
    draft = samples.draft("a", head)
    draft = replace(draft, contract=draft.contract.change(taps=samples.TRAINED_TAPS["a"]))
    return Case(draft, tuple(samples.captures(TEXTS)), head)


@pytest.fixture(scope="module")
def live(tmp_path_factory) -> Case:
    """A tiny Llama, its states at four taps on texts that it wrote greedily, and a random draft."""
    rng = torch.Generator().manual_seed(11)
    _, draft, _ = draft_and_head(tmp_path_factory.mktemp("live"), rng)
    model = tiny_llama()
    weights = [model.model.embed_tokens.weight, model.model.norm.weight, model.lm_head.weight]
    head = TargetHead(Path("tiny"), *(w.detach() for w in weights), model.config.rms_norm_eps, 6)
    captures = []
    for i in range(5):
        prompt = torch.randint(0, 97, (6,), generator=rng)
        ids = model.generate(prompt[None], attention_mask=torch.ones_like(prompt)[None],
                             max_new_tokens=40, min_new_tokens=40, do_sample=False)[0]  # fmt: skip
        captures.append(_capture(model, ids, torch.arange(len(ids)) >= 6, f"text{i}"))
    return Case(draft, tuple(captures), head, live=LiveTarget(model))


def _capture(model, ids, mask, name) -> Capture:
    taps = (Tap(0), Tap(3), Tap(4), Tap(5), Tap(6))
    states = {t: x[0].clone() for t, x in record_states(model, ids[None], taps).items()}
    readers = {t: (lambda x=states[t]: x) for t in taps[:-1]} | {FINAL: lambda: states[Tap(6)]}
    return Capture(name, Path(name), "test", ids, mask, taps[:-1], 32, readers, "pre_norm")


def run(name: str, case: Case) -> tuple[list[Finding], list[str], View]:
    """One probe alone: its findings, its remarks, and the view."""
    view = View(case)
    found = list(PROBES[name].run(view))
    return [f for f in found if isinstance(f, Finding)], [f for f in found if isinstance(f, str)], view


def plant(key: str, case: Case, seed: int = 3) -> Case:
    """The case with one fault of the zoo in it."""
    return FAULTS[key].plant(case, torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    "name, key",
    [
        ("readable", "fp16_overflow"), ("readable", "ids_beyond"),
        ("mask", "mask_ones"), ("mask", "mask_empty"), ("mask", "mask_shifted"),
        ("slots", "slot_zero"),
        ("rows", "states_rotated"), ("rows", "rows_shifted"), ("rows", "files_swapped"),
        ("weights", "norm_ones"), ("weights", "layer_unloaded"), ("weights", "hidden_norm_lost"),
        ("embedding", "embed_random"), ("lm_head", "lm_head_overwritten"),
        ("map", "d2t_absolute"), ("map", "d2t_arange"), ("map", "d2t_zeros"), ("map", "d2t_permuted"),
        ("map rows", "d2t_stale"), ("map rows", "d2t_permuted"),
        ("final", "final_is_slot"), ("final", "final_unnormed"), ("final", "final_normed_twice"),
        ("targets", "inner_targets"),
    ],
)  # fmt: skip
def test_probe_names_the_planted_fault(healthy, name, key):
    """Exactly the planted fault, once, with numbers in its evidence; and nothing before planting."""
    before, _, _ = run(name, healthy)
    findings, _, _ = run(name, plant(key, healthy))
    assert not before and [f.kind for f in findings] == [key]
    if key != "hidden_norm_lost":  # a weight that is not there has no numbers
        assert all(any(ch.isdigit() for ch in line) for line in findings[0].evidence)


@pytest.mark.parametrize("seed", [1, 2])
def test_mask_shift_is_seen_in_both_directions(healthy, seed):
    """The plant shifts by -1 or 1, as drawn: the sentence says which."""
    shifted = plant("mask_shifted", healthy, seed)
    early = shifted.captures[0].loss_mask.nonzero()[0] < healthy.captures[0].loss_mask.nonzero()[0]
    (finding,), _, _ = run("mask", shifted)
    assert finding.before == ("starts a token early" if early else "starts a token late")


def test_an_answer_that_always_starts_alike_is_no_shifted_mask(healthy):
    """ "<think>" as the first token of every answer is constant, and closes no header."""

    def think(c):
        ids, at = c.token_ids.clone(), int(c.loss_mask.nonzero()[0])
        ids[at] = 17
        return replace(c, token_ids=ids)

    findings, _, _ = run("mask", replace(healthy, captures=tuple(map(think, healthy.captures))))
    assert not findings


def test_equal_states_and_shift_are_told_by_number(healthy):
    """Evidence names the taps that are equal; the row shift of a page, and which files."""
    double = tuple(replace(c, readers={**c.readers, Tap(16): c.readers[Tap(3)]}) for c in healthy.captures)
    (finding,), _, _ = run("slots", replace(healthy, captures=double))
    assert (finding.kind, finding.before) == ("slot_duplicated", "layer3 equal to layer16")
    case = plant("rows_shifted", healthy)
    (finding,), _, view = run("rows", case)
    assert "16 tokens later" in finding.before
    moved = {c.name for c, o in zip(case.captures, healthy.captures, strict=True)
             if not torch.equal(c.state("layer3"), o.state("layer3"))}  # fmt: skip
    assert set(view.off) == moved and moved


def test_swapped_files_are_named(healthy):
    """With the embedding to compare with: just the files whose states changed."""
    case = plant("files_swapped", healthy)
    _, _, view = run("rows", case)
    moved = {c.name for c, o in zip(case.captures, healthy.captures, strict=True)
             if not torch.equal(c.state("embed"), o.state("embed"))}  # fmt: skip
    assert set(view.off) == moved and len(moved) == 2


def test_files_without_a_reference_are_judged_by_the_draft(healthy):
    """No head, no live target: of two swapped files the one that is far below the others is named."""
    blind = replace(healthy, head=None)
    assert not run("files", blind)[0]
    assert not run("files", plant("files_swapped", healthy))[0], "the better probe runs when it can"
    case = plant("files_swapped", healthy)
    swapped = run("rows", case)[2].off
    (finding,), _, view = run("files", replace(case, head=None))
    assert finding.kind == "files_swapped" and finding.p_value < 1e-3 and view.off.keys() <= swapped.keys()


@pytest.mark.parametrize("key", ["d2t_absolute", "d2t_arange", "d2t_zeros", "d2t_permuted", "d2t_stale"])
def test_the_fix_of_a_map_is_the_true_map(healthy, key):
    """From t2d where it is whole, else from the rows of lm_head: bit by bit what it was."""
    case = plant(key, healthy)
    fixes = [f.fix for name in ("map", "map rows") for f in run(name, case)[0] if f.fix is not None]
    assert fixes
    right = [torch.equal(fix.d2t, healthy.draft.d2t.long()) for fix in fixes]
    assert all(right)


def test_weights_that_are_not_numbers(healthy):
    """One NaN in a matrix, which the other probes see as 0, and a slot of fc without weight."""
    fc = healthy.draft.fc.clone()
    fc[0, 0] = float("nan")
    (finding,), _, view = run("weights", replace(healthy, draft=replace(healthy.draft, fc=fc)))
    assert finding.kind == "weights_nonfinite" and finding.field == "fc" and not view.stop
    assert view.bad_weights["fc"][0] == 1 and view.case.draft.fc[0, 0] == 0
    dead = healthy.draft.fc.clone()
    dead[:, 576:1152] = 0
    (finding,), _, _ = run("weights", replace(healthy, draft=replace(healthy.draft, fc=dead)))
    assert finding.kind == "slot_zero" and finding.field == "fc slot 1"


def test_layers_lost_and_config_that_disagrees(healthy):
    """config.json says two layers and another theta; the first is a fault, the second worth knowing."""
    layer = healthy.draft.config["transformer_layer_config"]
    changed = {**layer, "num_hidden_layers": 2, "max_position_embeddings": 64,
               "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}  # fmt: skip
    draft = replace(healthy.draft, config={**healthy.draft.config, "transformer_layer_config": changed})
    case = replace(healthy, draft=draft)
    assert [f.kind for f in run("weights", case)[0]] == ["layer_lost"]
    findings, remarks, _ = run("config", case)
    assert (
        not findings and any("theta=500000" in r for r in remarks) and any("fault 15" in r for r in remarks)
    )
    assert not run("config", healthy)[1]


@pytest.mark.parametrize(
    "key", ["control_zero_map", "control_target_theta", "control_bf16", "control_unused_taps"]
)
def test_controls_are_not_accused(healthy, key):
    """What looks odd and is right: no finding of any probe."""
    case = plant(key, healthy)
    assert not [f for name in PROBES for f in (run(name, case)[0] if name not in ("names", "text") else [])]


def test_live_probes_are_silent_on_sound_states(live):
    """Recomputed states fit their names, rows, final state and text."""
    for name in ("names", "rows", "final", "text"):
        assert not run(name, live)[0], name


def test_live_target_names_the_blocks(live):
    """States one block early are named so; unnamed ones get a name; another model's fit nothing."""
    early = [Tap(3), Tap(4), Tap(5)]

    def rename(c):
        readers = {t: c.readers[Tap(t.after_block - 1)] for t in early[1:]} | {FINAL: c.readers[FINAL]}
        return replace(c, taps=tuple(early[1:]), readers=readers)

    (finding,), _, _ = run("names", replace(live, captures=tuple(map(rename, live.captures))))
    assert finding.kind == "taps_minus_one" and (finding.before, finding.after) == (
        "layer4, layer5",
        "layer3, layer4",
    )
    unnamed = tuple(c.named([Stored(i) for i in range(4)]) for c in live.captures)
    findings, remarks, _ = run("names", replace(live, captures=unnamed))
    assert not findings and [r.split(" (")[0] for r in remarks] == [
        "stored0 is embed", "stored1 is layer3", "stored2 is layer4", "stored3 is layer5",
    ]  # fmt: skip
    other = replace(live, live=LiveTarget(tiny_llama(seed=2)))
    assert not run("names", other)[0] and len(run("names", other)[1]) == 4


def test_final_state_one_block_early_is_seen_by_equality(live):
    """Layer 5 of 6 as the final state: it equals the stored one bit by bit."""
    early = tuple(replace(c, readers={**c.readers, FINAL: c.readers[Tap(5)]}) for c in live.captures)
    kinds = {f.kind: f for f in run("final", replace(live, captures=early))[0]}
    assert kinds["final_early"].before == "layer5" and kinds["final_early"].after == "layer6"


def test_text_of_another_model_is_not_the_targets(live):
    """Random tokens, states recaptured: the target would have said something else."""
    rng = torch.Generator().manual_seed(5)

    def other(c):
        ids = torch.where(c.loss_mask, torch.randint(0, 97, (len(c),), generator=rng), c.token_ids)
        return _capture(live.live.model, ids, c.loss_mask, c.name)

    (finding,), _, _ = run("text", replace(live, captures=tuple(map(other, live.captures))))
    assert finding.kind == "text_shuffled" and "n = 200" in finding.evidence[0]


@pytest.mark.slow
def test_answers_to_other_prompts_show_in_their_openings():
    """Fluent, and predicted in 87 % from its own beginning on; the true answers surprise nobody."""
    case = zoo.sample_case("a", limit=8, live=True, wide=False)
    assert run("text", case)[0] == []
    (finding,), _, _ = run("text", FAULTS["text_of_others"].plant(case, torch.Generator().manual_seed(1)))
    assert finding.kind == "text_of_others" and "first 8 tokens of 8 answers" in finding.evidence[0]


def test_what_cannot_run_is_said(healthy):
    """Draft and captures alone: each probe left out names what it needs."""
    bare = replace(healthy, head=None, captures=tuple(samples.incident_captures(2)))
    findings, _, not_run = run_probes(View(bare))
    assert not findings
    assert set(not_run) == {"rows", "names", "embedding", "lm_head", "map rows", "final", "text", "targets"}
    assert "head" in not_run["lm_head"] and "live target" in not_run["text"]
    assert all(p.run.__doc__ for p in PROBES.values())
