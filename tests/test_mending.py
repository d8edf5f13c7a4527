"""Mending replaces little, says so, and leaves alone what it cannot judge."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from lib import zoo
from lib.captures import FINAL, Capture
from lib.case import Case, Served
from lib.diagnosis import diagnose, settle_names
from lib.errors import CaptureError
from lib.faults import FAULTS
from lib.mending import (
    ANY_ID,
    LEFT_OUT,
    mended_capture,
    nonfinite,
    rotation,
    with_tensors,
    with_zeros,
)  # fmt: skip
from lib.mla import Latent
from lib.probes import View, run_probes
from lib.taps import Stored, Tap
from tests.support import self_written

TAPS = (Tap(0), Tap(3), Tap(4), Tap(6))
TRUE = {"taps": (Tap(4), Tap(0), Tap(6)), "norm_before_residual": True, "head_norm": False}
VOCAB = 97


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Case:
    """A tiny draft and texts that it wrote itself."""
    draft, captures = self_written(tmp_path_factory.mktemp("tiny"), TAPS, TRUE, length=40, texts=12)
    return Case(draft, tuple(captures))


@pytest.fixture(scope="module")
def healthy() -> Case:
    """Sample draft (a) as it was trained, on twenty of the shipped conversations."""
    return zoo.sample_case("a", limit=20, wide=False)


def first(case: Case, n: int) -> Case:
    """The case with its first conversations only."""
    return replace(case, captures=case.captures[:n])


def plant(case: Case, *keys: str) -> Case:
    """The case with these faults of the zoo in it."""
    for key in keys:
        case = FAULTS[key].plant(case, torch.Generator().manual_seed(3))
    return case


def with_rows(capture: Capture, tap: Tap, rows: slice, value: float) -> Capture:
    """The capture with one number of these rows replaced."""

    def change(x: torch.Tensor) -> torch.Tensor:
        x = x.clone()
        x[rows, 2] = value
        return x

    return capture.with_state(tap, change)


def test_a_finite_draft_stays_as_it_is(tiny):
    """Nothing to mend: the very same object; every float tensor was looked at, no other."""
    seen = []
    assert with_tensors(tiny.draft, lambda name, x: seen.append(name) or x) is tiny.draft
    assert nonfinite(tiny.draft) == {} and {"fc", "embed", "lm_head", "layers.0.down"} <= set(seen)
    assert not {"d2t", "t2d"} & set(seen)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("name", ["layers.0.down", "fc", "lm_head", "embed", "norm"])
def test_weights_are_zero_where_they_were_no_numbers(tiny, name, value):
    """One number: 0 there, the others as they were; the original is not touched."""

    def broken(k: str, x: torch.Tensor) -> torch.Tensor:
        return x.flatten().index_fill(0, torch.tensor([3]), value).view_as(x) if k == name else x

    found: dict[str, torch.Tensor] = {}
    draft = with_tensors(tiny.draft, broken)
    ((where, (bad, whole)),) = nonfinite(draft).items()
    with_tensors(with_zeros(draft, [name]), lambda k, x: found.setdefault(k, x))
    before: dict[str, torch.Tensor] = {}
    with_tensors(tiny.draft, lambda k, x: before.setdefault(k, x))
    assert (where, bad, whole) == (name, 1, before[name].numel())
    assert found[name].flatten()[3] == 0 and int((found[name] != before[name]).sum()) == 1
    assert all(torch.equal(found[k], before[k]) for k in before if k != name)
    assert list(nonfinite(draft)) == [name]


def test_latent_attention_and_biases_are_looked_at(tiny):
    """Weights that only some drafts have."""
    latent = Latent(None, None, None, None, *(torch.ones(2, 2) for _ in range(3)), 1, 1, 1)
    layer = replace(tiny.draft.layers[0], q=None, latent=replace(latent, kv_b=torch.full((2, 2), torch.nan)))
    draft = replace(tiny.draft, layers=(layer,), fc_bias=torch.full((32,), torch.inf))
    assert nonfinite(draft) == {"layers.0.latent.kv_b": (4, 4), "fc_bias": (32, 32)}


def test_a_weight_that_is_mostly_nan_is_not_mended(tiny):
    """A third of a matrix as zeros would be another draft; the search stops and says why."""
    fc = tiny.draft.fc.clone()
    fc[: len(fc) // 3] = torch.nan
    d = diagnose(replace(tiny, draft=replace(tiny.draft, fc=fc)))
    assert d.names() == ["weights_nonfinite"] and d.not_run["search"] == "more than 5 % of fc is NaN or Inf"
    assert not any(r.startswith("mended") for r in d.remarks)


def test_other_faults_of_the_weights_are_seen_beside_a_nan(tiny):
    """A slot without weight, and a NaN in another one; a norm of ones with a NaN in it."""
    fc = tiny.draft.fc.clone()
    fc[:, 32:64] = 0
    fc[0, 0] = torch.nan
    norm = torch.ones_like(tiny.draft.norm)
    d = diagnose(replace(tiny, draft=replace(tiny.draft, fc=fc, norm=norm)))
    assert {"weights_nonfinite", "slot_zero", "norm_ones"} <= set(d.names())
    norm[3] = torch.inf
    d = diagnose(replace(tiny, draft=replace(tiny.draft, norm=norm)))
    assert d.names() == ["weights_nonfinite"]  # a norm with a 0 in it is not all ones


def test_zeros_in_lm_head_accuse_nobody(healthy):
    """Any rows beat zeros: the target's are not offered in their place, and the finding stays."""
    lm_head = healthy.draft.lm_head.clone()
    lm_head[:20] = torch.nan
    d = diagnose(replace(first(healthy, 6), draft=replace(healthy.draft, lm_head=lm_head)))
    assert d.names() == ["weights_nonfinite"] and d.findings[0].field == "lm_head"


def test_ids_that_do_not_exist_are_not_scored(tiny):
    """Any id in their place; neither they nor what would predict them is scored, the rest as before."""
    capture = tiny.captures[0]
    at = int(capture.loss_mask.nonzero()[3])
    ids = capture.token_ids.clone()
    ids[at] = VOCAB + 5
    mended = mended_capture(replace(capture, token_ids=ids), VOCAB, capture.taps)
    capture.check_vocab(VOCAB, "here")
    assert mended.ids and mended.rows.nonzero().tolist() == [[at]]
    assert mended.what == {"ids": "1 of 40 taken as 0, and not scored"}
    found = mended.capture
    found.check_vocab(VOCAB, "here")
    kept = torch.arange(len(capture)) != at
    assert torch.equal(found.token_ids[kept], capture.token_ids[kept]) and found.token_ids[at] == ANY_ID
    left = set(capture.scored.tolist()) - set(found.scored.tolist())
    assert left == {at - 2, at - 1}  # pairs whose token, or whose truth, was replaced


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_a_bad_row_is_equally_bad_in_every_state(tiny, value):
    """0 in all of them, so that no tap looks better for it; what is predicted from it is not scored."""
    capture = tiny.captures[0]
    at = int(capture.loss_mask.nonzero()[4])
    mended = mended_capture(with_rows(capture, Tap(3), slice(at, at + 2), value), VOCAB, capture.taps)
    kept = torch.ones(len(capture), dtype=torch.bool)
    kept[at : at + 2] = False
    for tap in capture.taps:
        x = mended.capture.state(tap)
        assert not x[~kept].any() and torch.equal(x[kept], capture.state(tap)[kept])
    assert mended.what == {"states": "2 of 40 rows taken as 0, and not scored"}
    assert not mended.ids and torch.equal(mended.rows, ~kept)
    assert set(capture.scored.tolist()) - set(mended.capture.scored.tolist()) == {at, at + 1}


def test_much_is_not_mended(tiny):
    """More than a twentieth of the ids or of the rows of a state that the draft takes."""
    capture = tiny.captures[0]
    assert mended_capture(with_rows(capture, Tap(4), slice(0, 3), torch.inf), VOCAB, TRUE["taps"]) is None
    assert mended_capture(replace(capture, token_ids=capture.token_ids + VOCAB), VOCAB, ()) is None


def test_a_state_that_nobody_takes_is_left_out(tiny):
    """A spare tap that is all Inf, or that cannot be read: the capture is as good without it."""
    capture = tiny.captures[0]

    def unreadable() -> torch.Tensor:
        raise CaptureError("here", "layer3", expected="rows", found="none", remedy="look")

    for broken in (
        capture.with_state(Tap(3), lambda x: x + torch.inf),
        replace(capture, readers={**capture.readers, Tap(3): unreadable}),
    ):
        mended = mended_capture(broken, VOCAB, TRUE["taps"])
        assert mended.what == {"layer3": LEFT_OUT} and Tap(3) not in mended.capture.readers
        assert mended.capture.taps == tuple(t for t in capture.taps if t != Tap(3))
        assert mended_capture(broken, VOCAB, [Tap(3)]) is None
    final = replace(capture, readers={**capture.readers, FINAL: unreadable}, final_kind="pre_norm")
    assert mended_capture(final, VOCAB, TRUE["taps"]).capture.final_kind is None


def test_a_rotation_is_found_where_the_rows_determine_it():
    """Exact rows give it back; fewer rows than directions, or rows in a plane, give none."""
    rng = torch.Generator().manual_seed(5)
    ref = torch.randn(60, 16, generator=rng)
    q = torch.linalg.qr(torch.randn(16, 16, generator=rng, dtype=torch.float64)).Q.float()
    torch.testing.assert_close(rotation(ref @ q, ref), q, atol=1e-5, rtol=0)
    assert rotation((ref @ q)[:15], ref[:15]) is None
    flat = ref.clone()
    flat[:, 3] = flat[:, 4]
    assert rotation(flat @ q, flat) is None


SAID = {
    "ids_beyond": "ids of 12 captures (data_0: 1 of 40 taken as 0, and not scored)",
    "fp16_overflow": "states of 8 captures (data_0: 1 of 40 rows taken as 0, and not scored)",
    "mask_empty": "every position scored, as no mask scores any",
    "weights_nonfinite": "numbers of layers.0.down taken as 0",
}


@pytest.mark.parametrize("key", SAID)
def test_what_stops_an_evaluation_hides_no_other_fault(tiny, key):
    """Alone: nothing else is named. With a second fault: both are. What was mended is said."""
    for keys in ([key], [key, "token_shift_0"]):
        d = diagnose(plant(tiny, *keys))
        assert sorted(d.names()) == sorted(keys) and "search" not in d.not_run
        (said,) = [r for r in d.remarks if r.startswith("mended for the search: ")]
        assert SAID[key] in said


@pytest.mark.slow
@pytest.mark.parametrize("key", ["states_rotated", "hidden_norm_lost", "slot_zero"])
def test_a_wrong_order_is_named_behind_states_that_are_useless(healthy, key):
    """The rotation is undone, the norm taken as 1; a zero state has no better one offered in its place."""
    second = "token_shift_2" if key == "slot_zero" else "slot_order"
    assert diagnose(plant(healthy, key)).names() == [key]
    assert sorted(diagnose(plant(healthy, key, second)).names()) == sorted([key, second])


def test_a_rotation_that_few_rows_do_not_determine_stops_the_search(healthy):
    """Four texts have fewer different tokens than there are directions."""
    d = diagnose(plant(first(healthy, 4), "states_rotated"))
    assert d.names() == ["states_rotated"] and "4 files do not determine" in d.not_run["search"]


def test_ids_and_states_of_one_file_are_both_named(tiny):
    """Two reasons to refuse the same files; beside files that are sound, both are counted."""
    d = diagnose(plant(tiny, "ids_beyond", "fp16_overflow"))
    assert sorted(d.names()) == ["fp16_overflow", "ids_beyond"] and "search" not in d.not_run
    assert all("12 of 12 captures" in f.evidence[0] for f in d.findings)
    few = plant(first(tiny, 2), "ids_beyond").captures
    lost = replace(tiny.captures[2], token_ids=tiny.captures[2].token_ids + VOCAB)
    d = diagnose(replace(tiny, captures=(*few, lost, *tiny.captures[3:])))
    assert d.names() == ["ids_beyond"] and "3 of 12 captures" in d.findings[0].evidence[0]
    assert any(r.startswith("1 of 12 captures left out") for r in d.remarks)
    assert any("ids of 2 captures" in r for r in d.remarks)


def test_a_hole_in_a_mask_hides_no_full_mask(tiny):
    """Masks are judged as the files have them."""
    ones = replace(tiny, captures=tuple(
        replace(c, loss_mask=torch.ones_like(c.loss_mask)) for c in tiny.captures))  # fmt: skip
    assert diagnose(ones).names() == ["mask_ones"]
    assert sorted(diagnose(plant(ones, "ids_beyond")).names()) == ["ids_beyond", "mask_ones"]


def test_replaced_rows_are_no_rows_of_another_text(healthy):
    """One id in twenty tokens, in one file of eight: not swapped, and the engine is still compared."""
    text = healthy.captures[0].first(20)
    ids = text.token_ids.clone()
    ids[12] = healthy.draft.target_vocab
    short = replace(text, token_ids=ids, loss_mask=torch.ones_like(text.loss_mask))
    served = Served(100, (0, 0, 0))
    d = diagnose(replace(healthy, captures=(short, *healthy.captures[1:8]), served=served))
    assert sorted(d.names()) == ["engine_all_or_nothing", "ids_beyond"]


def test_a_whole_group_of_candidates_may_be_settled(tiny):
    """Without hidden_norm the head's norm is not searched, and nothing else only scales: that is said."""
    layer = replace(tiny.draft.layers[0], hidden_norm=None)
    d = diagnose(replace(tiny, draft=replace(tiny.draft, layers=(layer, *tiny.draft.layers[1:]))))
    assert "hidden_norm_lost" in d.names() and "head_unnormed" not in d.names()
    assert "not searched, because of what was found: head_norm" in d.remarks


def test_a_sure_suspicion_stands_where_no_search_can_try_it(tiny):
    """Three texts: d2t of zeros is no map; one that merely does not ascend stays a remark."""
    few = first(tiny, 3)
    zeros = replace(few.draft, d2t=torch.zeros_like(few.draft.d2t))
    d = diagnose(replace(few, draft=zeros))
    assert d.names() == ["d2t_zeros"] and d.verdict == "fault"
    assert not any("suspected" in r for r in d.remarks)
    d = diagnose(plant(few, "d2t_permuted"))
    assert d.names() == [] and d.verdict == "cannot tell"
    assert any(r.startswith("suspected: d2t_permuted") and r.endswith("not tested") for r in d.remarks)


def test_all_evidence_of_a_sure_suspicion_is_kept(healthy):
    """Two probes that say the same are one finding with both sentences."""
    d = diagnose(plant(first(healthy, 3), "d2t_zeros"))
    assert d.names() == ["d2t_zeros"] and d.findings[0].by == "map and map rows"
    assert "zero everywhere" in d.findings[0].evidence[0] and "resemble" in d.findings[0].evidence[1]


def test_an_engine_is_not_compared_with_a_mended_draft(tiny):
    """It served the NaN: one finding, and why the counters are left alone."""
    case = replace(plant(tiny, "weights_nonfinite"), served=Served(100, (0, 0, 0)))
    d = diagnose(case)
    assert d.names() == ["weights_nonfinite"] and any("counters are not compared" in r for r in d.remarks)


def test_unnamed_states_keep_their_names_beside_a_bad_id(healthy):
    """The embedding is recognised by the ids that exist."""
    bare = [c.named([Stored(i) for i in range(len(c.taps))]) for c in healthy.captures[:6]]
    kept = [replace(c, taps=c.taps[:4], readers={t: c.readers[t] for t in c.taps[:4]}) for c in bare]
    draft = replace(healthy.draft, contract=healthy.draft.contract.change(taps=healthy.captures[0].taps[1:4]))
    case = replace(healthy, draft=draft, captures=tuple(kept))
    _, (told,) = settle_names(case)
    _, (same,) = settle_names(plant(case, "ids_beyond"))
    assert told == same and "the first state is the embedding" in told


def test_a_spare_state_that_few_files_lack_is_kept(tiny):
    """Trained on a state that is Inf in one file of twelve: that file is left out, the state is tried."""
    declared = tiny.draft.contract.change(taps=(Tap(4), Tap(3), Tap(6)))
    case = replace(tiny, draft=replace(tiny.draft, contract=declared))
    bad = tiny.captures[0].with_state(Tap(0), lambda x: x + torch.inf)
    d = diagnose(replace(case, captures=(bad, *tiny.captures[1:])))
    assert sorted(d.names()) == ["fp16_overflow", "taps"]
    assert any(r.startswith("1 of 12 captures left out") for r in d.remarks)
    everywhere = tuple(c.with_state(Tap(0), lambda x: x + torch.inf) for c in tiny.captures)
    d = diagnose(replace(case, captures=everywhere))
    assert any("embed of 12 captures (data_0: left out)" in r for r in d.remarks)


def test_a_neighbouring_tap_is_no_better_for_rows_that_are_bad(tiny):
    """Inf in two rows of a slot, and a tap beside it that is nearly the same: only the overflow is named."""

    def twin(c: Capture) -> Capture:
        rng = torch.Generator().manual_seed(len(c.name))
        near = c.state(Tap(4)) * (1 + 0.03 * torch.randn(c.state(Tap(4)).shape, generator=rng))
        c = replace(c, taps=(*c.taps, Tap(5)), readers={**c.readers, Tap(5): lambda: near})
        return with_rows(c, Tap(4), slice(20, 22), torch.inf)

    d = diagnose(replace(tiny, captures=tuple(twin(c) for c in tiny.captures)))
    assert d.names() == ["fp16_overflow"]


def test_replaced_ids_stay_unscored_where_masks_are_empty(tiny):
    """Every position is scored then, but for those."""
    view = View(plant(tiny, "mask_empty", "ids_beyond"))
    for capture in view.judged:
        bad = view.touched[capture.name].rows
        assert not capture.loss_mask[bad].any() and int((~capture.loss_mask).sum()) in (1, 2)


def test_a_mended_defect_explains_nothing_that_is_left(tiny):
    """A weak draft with one NaN, and fc bypassed: "mend that first" would send its reader nowhere."""
    rng = torch.Generator().manual_seed(3)
    texts = []
    for c in tiny.captures:  # two tokens of three are noise
        noise = torch.rand(len(c), generator=rng) < 0.65
        ids = torch.where(noise, torch.randint(0, VOCAB, (len(c),), generator=rng), c.token_ids)
        texts.append(replace(c, token_ids=ids))
    draft = replace(tiny.draft, contract=tiny.draft.contract.change(vocab_map="identity"))
    case = replace(tiny, draft=draft, captures=tuple(texts))
    alone = diagnose(case)
    assert alone.names() == ["map_identity"] and alone.numbers["after"].accuracy < 0.4
    d = diagnose(plant(case, "weights_nonfinite"))
    assert sorted(d.names()) == ["map_identity", "weights_nonfinite"]


def test_an_engine_is_not_compared_where_every_text_was_mended(tiny):
    """Whatever served: there is no whole text to compare it on, and no exception."""
    d = diagnose(replace(plant(tiny, "fp16_overflow"), served=Served(100, (30, 10, 5))))
    assert d.names() == ["fp16_overflow"] and any("every text was mended" in r for r in d.remarks)


def test_a_head_of_another_target_is_no_crash(healthy):
    """Another width, or too few rows: the probes that would use it say so."""
    few = first(healthy, 4)
    head = few.head
    for other in (
        replace(head, embed=head.embed[:, :64], lm_head=head.lm_head[:, :64], norm=head.norm[:64]),
        replace(head, embed=head.embed[:100], lm_head=head.lm_head[:100]),
    ):
        d = diagnose(replace(few, head=other))
        assert "as wide as the states and with all ids" in d.not_run["final"] and "targets" in d.not_run


def test_states_of_another_width_are_said_by_every_probe(tiny):
    """The draft cannot take them: no probe raises, and the verdict names the sizes."""
    narrow = tuple(replace(c.with_states(lambda x: x[:, :16]), hidden_size=16) for c in tiny.captures)
    d = diagnose(replace(tiny, captures=narrow))
    assert d.verdict == "cannot tell" and "16" in d.because and "16" in d.not_run["files"]


def test_a_rotation_of_some_files_only_stops_the_search(healthy):
    """There is no one basis to turn back to; how many files are turned is said."""
    turned = plant(healthy, "states_rotated").captures
    d = diagnose(replace(healthy, captures=(*turned[:5], *healthy.captures[5:8])))
    assert d.names() == ["states_rotated"] and d.not_run["search"] == "the states of 5 of 8 files are rotated"


def test_a_final_state_that_was_not_rotated_stays_as_it_is(healthy):
    """Taps turned, final state joined from elsewhere; and a row of zeros in each file takes no part."""

    def taps_only(c: Capture, turned: Capture) -> Capture:
        c = replace(turned, readers={**turned.readers, FINAL: c.readers[FINAL]})
        return with_rows(c, Tap(16), slice(0, 1), torch.inf)

    turned = plant(healthy, "states_rotated").captures
    mixed = tuple(taps_only(c, t) for c, t in zip(healthy.captures, turned, strict=True))
    view = View(replace(healthy, captures=mixed))
    findings, _, _ = run_probes(view, ["rows", "final"])
    assert [f.kind for f in findings] == ["states_rotated"] and not view.stop
    assert torch.equal(view.sound[0].final()[1:], healthy.captures[0].final()[1:])
    near = (view.sound[0].state(Tap(16)) - healthy.captures[0].state(Tap(16)).float())[1:]
    assert float(near.norm()) < 0.05 * float(healthy.captures[0].state(Tap(16))[1:].float().norm())
