"""Mending replaces little, says so, and leaves alone what it cannot judge."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from lib.captures import FINAL, Capture
from lib.case import Case, Served
from lib.diagnosis import diagnose
from lib.faults import FAULTS
from lib.mending import ANY_ID, FP16_MAX, mended_capture, mended_draft
from lib.probes import View
from lib.taps import Tap
from tests.support import self_written

TAPS = (Tap(0), Tap(3), Tap(4), Tap(6))
TRUE = {"taps": (Tap(4), Tap(0), Tap(6)), "norm_before_residual": True, "head_norm": False}
VOCAB = 97


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Case:
    """A tiny draft and texts that it wrote itself."""
    draft, captures = self_written(tmp_path_factory.mktemp("tiny"), TAPS, TRUE, length=40, texts=12)
    return Case(draft, tuple(captures))


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
    """Nothing to mend, nothing said, the same tensors."""
    mended, what = mended_draft(tiny.draft)
    assert what == "" and mended.layers == tiny.draft.layers and mended.fc is tiny.draft.fc


@pytest.mark.parametrize("name", ["down", "fc", "lm_head", "norm"])
def test_weights_are_zero_where_they_were_no_numbers(tiny, name):
    """One row, one number: 0 there, the same elsewhere; the original is not touched."""
    owner = tiny.draft.layers[0] if hasattr(tiny.draft.layers[0], name) else tiny.draft
    broken = getattr(owner, name).clone()
    broken[1] = torch.inf
    broken[1, ...] = torch.nan
    owner = replace(owner, **{name: broken})
    draft = replace(tiny.draft, layers=(owner, *tiny.draft.layers[1:])) if name == "down" else owner
    mended, what = mended_draft(draft)
    found = getattr(mended.layers[0] if name == "down" else mended, name)
    assert f"of {broken.numel()} numbers of" in what and name in what
    assert not found[1].any() and torch.equal(found[2:], broken[2:]) and broken[1].isnan().all()


def test_a_weight_that_is_mostly_nan_is_not_mended(tiny):
    """A third of a matrix as zeros would be another draft; the search stops and says why."""
    fc = tiny.draft.fc.clone()
    fc[: len(fc) // 3] = torch.nan
    draft = replace(tiny.draft, fc=fc)
    same, what = mended_draft(draft)
    assert what == "" and same is draft
    d = diagnose(replace(tiny, draft=draft))
    assert d.names() == ["weights_nonfinite"] and d.not_run["search"] == "fc is not finite"


def test_ids_that_do_not_exist_are_not_scored(tiny):
    """Any id in their place, their position off the mask, the others as before."""
    capture = tiny.captures[0]
    at = int(capture.loss_mask.nonzero()[3])
    ids = capture.token_ids.clone()
    ids[at] = VOCAB + 5
    mended, what = mended_capture(replace(capture, token_ids=ids), VOCAB)
    mended.check_vocab(VOCAB, "here")
    kept = torch.arange(len(capture)) != at
    assert mended.token_ids[at] == ANY_ID and not mended.loss_mask[at]
    assert torch.equal(mended.token_ids[kept], capture.token_ids[kept])
    assert torch.equal(mended.loss_mask[kept], capture.loss_mask[kept]) and what.startswith("1 of 40 ids")


@pytest.mark.parametrize("value, shown", [(torch.inf, FP16_MAX), (-torch.inf, -FP16_MAX), (torch.nan, 0.0)])
def test_states_are_saturated(tiny, value, shown):
    """Inf is what fp16 made of something larger; other rows and taps are untouched."""
    capture = tiny.captures[0]
    mended, what = mended_capture(with_rows(capture, Tap(3), slice(0, 1), value), VOCAB)
    assert mended.state(Tap(3))[0, 2] == shown and "1 of 40 rows of layer3" in what
    assert torch.equal(mended.state(Tap(3))[1:], capture.state(Tap(3))[1:])
    assert torch.equal(mended.state(Tap(4)), capture.state(Tap(4)))


def test_much_is_not_mended(tiny):
    """More than a tenth of the ids or the rows; or a state that cannot be read at all."""
    capture = tiny.captures[0]
    assert mended_capture(with_rows(capture, Tap(3), slice(0, 5), torch.inf), VOCAB) is None
    assert mended_capture(replace(capture, token_ids=capture.token_ids + VOCAB), VOCAB) is None

    def unreadable() -> torch.Tensor:
        return replace(capture, readers={}).state(Tap(3))

    readers = {**capture.readers, Tap(3): unreadable}
    assert mended_capture(replace(capture, readers=readers), VOCAB) is None


@pytest.mark.parametrize(
    "first, kind",
    [("ids_beyond", "ids_beyond"), ("fp16_overflow", "fp16_overflow"), ("mask_empty", "mask_empty"),
     ("weights_nonfinite", "weights_nonfinite")],
)  # fmt: skip
def test_what_stops_an_evaluation_hides_no_other_fault(tiny, first, kind):
    """Alone: nothing else is named. With a second fault: both are, and what was mended is said."""
    alone = diagnose(plant(tiny, first))
    assert alone.names() == [kind] and any(r.startswith("mended for the search") for r in alone.remarks)
    both = diagnose(plant(tiny, first, "token_shift_0"))
    assert sorted(both.names()) == sorted([kind, "token_shift_0"])


def test_ids_and_states_of_one_file_are_both_named(tiny):
    """Two reasons to refuse the same files."""
    d = diagnose(plant(tiny, "ids_beyond", "fp16_overflow"))
    assert sorted(d.names()) == ["fp16_overflow", "ids_beyond"] and "search" not in d.not_run
    assert all(f"of {len(tiny.captures)} captures" in f.evidence[0] for f in d.findings)


def test_a_sure_suspicion_stands_where_no_search_can_try_it(tiny):
    """Three texts: d2t of zeros contradicts t2d; a map that merely does not ascend stays a remark."""
    few = replace(tiny, captures=tiny.captures[:3])
    zeros = replace(few.draft, d2t=torch.zeros_like(few.draft.d2t))
    d = diagnose(replace(few, draft=zeros))
    assert d.names() == ["d2t_zeros"] and d.verdict == "fault"
    assert not any("suspected" in r for r in d.remarks)
    d = diagnose(plant(few, "d2t_permuted"))
    assert d.names() == [] and d.verdict == "cannot tell"
    assert any(r.startswith("suspected: d2t_permuted") and r.endswith("not tested") for r in d.remarks)


def test_an_engine_is_not_compared_with_a_mended_draft(tiny):
    """It served the NaN: one finding, and why the counters are left alone."""
    case = replace(plant(tiny, "weights_nonfinite"), served=Served(100, (0, 0, 0)))
    d = diagnose(case)
    assert d.names() == ["weights_nonfinite"] and any("counters are not compared" in r for r in d.remarks)


def test_empty_masks_leave_captures_as_they_are(tiny):
    """Only who judges a draft sees every position scored; probes of text keep the files' own masks."""
    view = View(plant(tiny, "mask_empty"))
    assert not any(c.loss_mask.any() for c in view.sound) and all(c.loss_mask.all() for c in view.judged)
    whole = View(tiny)
    assert [c.name for c in whole.judged] == [c.name for c in whole.sound if len(c.scored)]
    assert FINAL not in tiny.captures[0].readers
