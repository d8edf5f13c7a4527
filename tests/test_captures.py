"""Captures of speculators and of our own: nothing lost on the way, nothing read before it is asked for."""

from __future__ import annotations

import os

import pytest
import torch
from safetensors.torch import save_file

from lib.captures import BLOCK, Capture, open_capture, open_folder, save_capture
from lib.checkpoints import load_draft
from lib.draft import DraftForward
from lib.errors import CaptureError
from lib.taps import Stored, Tap
from tests.support import HIDDEN, random_capture_tensors, speculators_draft, write_legacy, write_stack

NAMES = ("embed", "layer3", "layer4", "layer6")
TAPS = (Tap(0), Tap(3), Tap(4), Tap(6))


def write_ours(path, tensors, **kwargs):
    save_capture(
        path,
        token_ids=tensors["input_ids"],
        loss_mask=tensors["loss_mask"],
        states=dict(zip(TAPS, tensors["hidden_states"], strict=True)),
        **kwargs,
    )
    return path


def write_masks(folder, masks, shards=1, ids=None):
    """A preprocessed dataset, as the library that speculators uses writes it."""
    from datasets import Dataset

    columns = {} if ids is None else {"input_ids": [i.tolist() for i in ids]}
    rows = columns | {"loss_mask": masks}
    Dataset.from_dict(rows).with_format("torch").save_to_disk(folder, num_shards=shards)
    return folder


# ---- round trips ------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("layout", ["speculators-legacy", "speculators", "workbook"])
def test_round_trip(tmp_path, rng, layout, dtype):
    """Ids, mask and every state come back bit for bit, in the dtype they were stored in."""
    tensors = random_capture_tensors(9, rng)
    tensors["hidden_states"] = [s.to(dtype) for s in tensors["hidden_states"]]
    mask = tensors["loss_mask"]
    capture = {
        "speculators-legacy": lambda: open_capture(write_legacy(tmp_path / "data_0.pt", tensors), taps=NAMES),
        "speculators": lambda: open_capture(
            write_stack(tmp_path / "hs_0.safetensors", tensors), taps=NAMES, loss_mask=mask
        ),
        "workbook": lambda: open_capture(write_ours(tmp_path / "c.safetensors", tensors)),
    }[layout]()
    assert (capture.layout, len(capture), capture.hidden_size, capture.taps) == (layout, 9, HIDDEN, TAPS)
    assert torch.equal(capture.token_ids, tensors["input_ids"])
    assert torch.equal(capture.loss_mask, mask.bool())
    for i, (tap, state) in enumerate(zip(TAPS, tensors["hidden_states"], strict=True)):
        assert capture.state(tap).dtype == dtype
        assert torch.equal(capture.state(tap), state)
        assert torch.equal(capture.stored(i), state)
    assert torch.equal(capture.stored(-1), tensors["hidden_states"][-1])


@pytest.mark.parametrize("shards", [1, 2])
def test_arrow_masks_of_the_datasets_library(tmp_path, rng, shards):
    """speculators keeps the loss mask in an arrow dataset: row N belongs to hs_N, in any number of files."""
    made = {n: random_capture_tensors(n, rng) for n in (5, 8, 12)}
    for i, tensors in enumerate(made.values()):
        write_stack(tmp_path / f"hs_{i}.safetensors", tensors)
    masks = [t["loss_mask"].long().tolist() for t in made.values()]
    ids = [t["input_ids"] for t in made.values()]
    arrow = write_masks(tmp_path.parent / f"arrow{shards}", masks, shards, ids)
    folder = open_folder(tmp_path, loss_masks=arrow)
    assert [c.loss_mask.long().tolist() for c in folder.captures] == masks


def test_arrow_masks_of_another_text_are_refused(tmp_path, rng):
    """Rows of equal length in another order: only the tokens tell whose mask it is."""
    made = [random_capture_tensors(8, rng) for _ in range(2)]
    for i, tensors in enumerate(made):
        write_stack(tmp_path / f"hs_{i}.safetensors", tensors)
    ids = [t["input_ids"] for t in made]
    ids[1] = torch.cat([ids[1][:3], (ids[1][3:] + 1) % 90])
    arrow = write_masks(tmp_path.parent / "shuffled", [[0, 1] * 4, [1, 0] * 4], ids=ids)
    with pytest.raises(
        CaptureError, match=r"token ids: expected the tokens of row 1 .* at position 3"
    ) as caught:
        open_folder(tmp_path, loss_masks=arrow)
    assert caught.value.where.endswith("hs_1.safetensors")


def test_arrow_masks_without_the_datasets_library(tmp_path, rng):
    """A bare arrow stream with that column is enough, and a cache file beside it is not a row."""
    import pyarrow as pa

    tensors = random_capture_tensors(6, rng)
    write_stack(tmp_path / "hs_0.safetensors", tensors)
    made = tmp_path.parent / "arrow"
    made.mkdir()
    mask = tensors["loss_mask"].long().tolist()
    for name, rows in (("data-00000-of-00001", [mask]), ("cache-0f", [[1] * 6])):
        table = pa.table({"loss_mask": rows})
        with pa.OSFile(str(made / f"{name}.arrow"), "wb") as f, pa.ipc.new_stream(f, table.schema) as out:
            out.write_table(table)
    folder = open_folder(tmp_path, loss_masks=made)
    assert folder.captures[0].loss_mask.long().tolist() == mask


def test_without_a_mask_every_position_counts_and_the_notes_say_so(tmp_path, rng):
    """A default that changes every number of the report must not be silent."""
    capture = open_capture(write_stack(tmp_path / "hs_0.safetensors", random_capture_tensors(5, rng)))
    assert capture.loss_mask.all()
    assert "no loss mask given: every position counts, the prompt too" in capture.notes


# ---- names ------------------------------------------------------------------------------------


def test_names_never_replace_recorded_taps(tmp_path, rng):
    """A file that says which taps it holds is believed: renaming its states would be the incident itself."""
    tensors = random_capture_tensors(9, rng)
    capture = open_capture(write_ours(tmp_path / "c.safetensors", tensors))
    recorded = [str(t) for t in capture.taps]
    other = [*recorded[1:], "layer59"]
    with pytest.raises(
        CaptureError, match=r"taps: expected .*the taps that the file records, found .*layer59"
    ):
        open_capture(capture.path, taps=other)
    assert open_capture(capture.path, taps=recorded).taps == capture.taps
    assert open_capture(capture.path, taps={len(recorded) + 1: [*other, "layer60"]}).notes == capture.notes
    kept = open_capture(capture.path, taps={len(recorded): other})
    assert kept.taps == capture.taps
    assert any("records its taps itself" in note for note in kept.notes)
    assert torch.equal(kept.stored(1), capture.stored(1))


@pytest.mark.parametrize("change", ["removed", "other shape", "garbage"])
def test_a_file_that_changed_after_it_was_opened(tmp_path, rng, change):
    """States are read late: what happened meanwhile is a typed error too."""
    path = write_stack(tmp_path / "hs_0.safetensors", random_capture_tensors(9, rng))
    capture = open_capture(path)
    path.unlink()
    if change == "other shape":
        write_stack(path, random_capture_tensors(9, rng, states=2))
    elif change == "garbage":
        path.write_bytes(b"no tensors")
    with pytest.raises(CaptureError, match="hidden_states: expected the file as it was when it was opened"):
        capture.stored(0)


def test_every_length_of_a_safetensors_header_is_read(tmp_path):
    """Its first byte is the low byte of a length: 0x80 of one in 32, which also begins a pickle."""
    from lib.detect import detect

    ids, seen = torch.arange(4), set()
    for n in range(0, 264, 8):
        path = tmp_path / f"hs_{n}.safetensors"
        tensors = {"token_ids": ids, "hidden_states": torch.ones(4, 3, 8)}
        save_file(tensors, path, metadata={"x": "y" * n})
        seen.add(path.read_bytes()[0])
        assert torch.equal(open_capture(path).token_ids, ids)
        assert detect(path).kind == "capture"
    assert 0x80 in seen


def test_states_nobody_named_say_so(tmp_path, rng):
    """`stored1` is a place in the file; calling it layer3 is somebody's claim."""
    capture = open_capture(write_legacy(tmp_path / "data_0.pt", random_capture_tensors(5, rng)))
    assert [str(t) for t in capture.taps] == ["stored0", "stored1", "stored2", "stored3"]
    assert capture.notes == ("taps not recorded in the file",)
    named = capture.named(NAMES)
    assert torch.equal(named.state("layer3"), capture.state(Stored(1)))
    assert capture.taps[1] == Stored(1), "the unnamed capture is unchanged"


def test_names_can_be_replaced_by_better_ones(tmp_path, rng):
    """The incident's shift by one block is one renaming, no new files."""
    wrong = open_capture(
        write_legacy(tmp_path / "data_0.pt", random_capture_tensors(5, rng)), taps=(2, 30, 58, 60)
    )
    right = wrong.named((3, 31, 59, 61))
    assert torch.equal(right.state("layer59"), wrong.state("layer58"))


@pytest.mark.parametrize("names", [NAMES[:3], (*NAMES, 7), ("embed", "embed", "layer4", "layer6")])
def test_names_must_fit_the_states(tmp_path, rng, names):
    """One different name per stored state."""
    path = write_legacy(tmp_path / "data_0.pt", random_capture_tensors(5, rng))
    with pytest.raises(CaptureError, match=r"data_0\.pt: taps: expected 4 different names"):
        open_capture(path, taps=names)


# ---- final state ------------------------------------------------------------------------------


def test_final_state_can_come_from_another_file_of_the_same_tokens(tmp_path, rng):
    """The incident's captures have no final state; ours of the same conversation has."""
    tensors = random_capture_tensors(7, rng)
    final = torch.randn(7, HIDDEN, generator=rng)
    incident = open_capture(write_legacy(tmp_path / "data_0.pt", tensors), taps=NAMES)
    path = write_ours(tmp_path / "c.safetensors", tensors, final=final, final_kind="pre_norm")
    both = incident.with_final(open_capture(path))
    assert (both.taps, both.final_kind, both.layout) == (TAPS, "pre_norm", "speculators-legacy")
    assert torch.equal(both.final(), final)
    assert torch.equal(both.named((0, 2, 3, 5)).final(), final), "renaming keeps it"
    with pytest.raises(CaptureError, match=r"data_0\.pt: final: .* no such state"):
        incident.final()
    with pytest.raises(CaptureError, match=r"data_0\.pt: final: expected a final state to join, found none"):
        both.with_final(incident)


def test_final_state_of_other_tokens_is_refused(tmp_path, rng):
    """Pairing file 3 with file 4 would be a quiet disaster."""
    one, two = random_capture_tensors(7, rng), random_capture_tensors(7, rng)
    first = open_capture(write_legacy(tmp_path / "data_0.pt", one))
    last = two["hidden_states"][3] * 2
    path = write_ours(tmp_path / "c.safetensors", two, final=last, final_kind="post_norm")
    with pytest.raises(CaptureError, match=r"c\.safetensors: token_ids: expected the tokens of .*data_0"):
        first.with_final(open_capture(path))


# ---- laziness ---------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["speculators", "workbook"])
def test_one_state_is_read_without_the_others(tmp_path, rng, layout):
    """A NaN at layer4 is layer4's problem: the file opens, layer3 is fine, layer4 is refused."""
    tensors = random_capture_tensors(9, rng)
    tensors["hidden_states"][2][5, 7] = float("nan")
    write = {"speculators": write_stack, "workbook": write_ours}[layout]
    capture = open_capture(write(tmp_path / "c.safetensors", tensors))
    if layout == "speculators":
        capture = capture.named(NAMES)
    assert torch.equal(capture.state("layer3"), tensors["hidden_states"][1])
    with pytest.raises(CaptureError, match=r"layer4: .* 1 NaN or Inf values, the first in position 5"):
        capture.state("layer4")


def test_one_inf_in_the_last_block_of_a_long_state_is_found(tmp_path, rng):
    """The check goes block by block: none is left out, and a state without Inf passes."""
    long = torch.randn(2 * BLOCK // 64 + 5, 64, generator=rng)
    tensors = {"token_ids": torch.zeros(len(long), dtype=torch.long), "hidden_states": long[:, None].clone()}
    save_file(tensors, path := tmp_path / "c.safetensors")
    capture = open_capture(path, taps=("layer3",), loss_mask=torch.ones(len(long)))
    assert torch.equal(capture.state("layer3"), long)
    tensors["hidden_states"][-1, 0, 7] = torch.inf
    save_file(tensors, path)
    with pytest.raises(CaptureError, match=rf"1 NaN or Inf values, the first in position {len(long) - 1}"):
        capture.state("layer3")


@pytest.mark.parametrize("layout", ["speculators", "workbook"])
def test_states_stay_on_disk_until_asked_for(tmp_path, rng, layout):
    """After opening, another file is put in its place: the states are the new file's."""
    write = {"speculators": write_stack, "workbook": write_ours}[layout]
    capture = open_capture(write(tmp_path / "c.safetensors", random_capture_tensors(9, rng)))
    later = random_capture_tensors(9, rng)
    os.replace(write(tmp_path / "later", later), tmp_path / "c.safetensors")
    assert torch.equal(capture.stored(1), later["hidden_states"][1])


# ---- scored positions -------------------------------------------------------------------------


def test_scored_positions_of_a_readable_conversation():
    """State t and token t+1 predict token t+2; scored when token t+1 is the assistant's.

        t          0     1     2     3     4     5     6
        token   <user>  hi  <asst>  good  day   !   <user>
        mask       0     0     0     1     1     1     0

    t=2 pairs the state at `<asst>` with `good` and predicts `day`; t=4 pairs `day` with `!` and
    predicts `<user>`. t=5 has `<user>` as its token: the engine is not drafting there.
    """
    mask = torch.tensor([0, 0, 0, 1, 1, 1, 0]).bool()
    toy = Capture("toy", None, "toy", torch.arange(7), mask, (), 0, {})
    assert toy.scored.tolist() == [2, 3, 4]


@pytest.mark.parametrize(
    "mask, scored",
    [
        ([1, 1, 1, 1], [0, 1]),  # the pair at t=2 has no token t+2 to predict
        ([1, 0, 0, 0], []),  # token 0 is never a t+1
        ([0, 0, 0, 1], []),  # the last token is nobody's t+1 with a successor
        ([0, 1, 0, 1, 1, 0], [0, 2, 3]),  # two turns
        ([1], []),
        ([1, 1], []),
    ],
)
def test_scored_positions_at_the_edges(mask, scored):
    """t + 2 must exist, and t + 1 must be scored: nothing else matters."""
    ids = torch.arange(len(mask))
    toy = Capture("toy", None, "toy", ids, torch.tensor(mask).bool(), (), 0, {})
    assert toy.scored.tolist() == scored


@pytest.mark.speculators
def test_scored_is_speculators_own_shifted_mask(rng):
    """The trainer's `shift_batch` drops mask[0]; we drop its last pair too, which predicts nothing."""
    from speculators.models.eagle3.data import shift_batch

    tensors = random_capture_tensors(12, rng)
    mask = torch.randint(0, 2, (12,), generator=rng)
    shifted = shift_batch(
        {
            "input_ids": tensors["input_ids"],
            "hidden_states": tensors["hidden_states"][0],
            "verifier_last_hidden_states": tensors["hidden_states"][-1],
            "loss_mask": mask,
            "lengths": torch.tensor([12]),
            "position_ids": torch.arange(12),
        }
    )["loss_mask"]
    toy = Capture("toy", None, "toy", tensors["input_ids"], mask.bool(), (), 0, {})
    assert toy.scored.tolist() == shifted[:-1].nonzero().flatten().tolist()


# ---- vocabulary -------------------------------------------------------------------------------


def test_token_ids_must_exist_in_the_vocabulary(tmp_path, rng):
    """The largest id decides; the vocabulary's owner is named."""
    tensors = random_capture_tensors(5, rng)
    tensors["input_ids"][2] = 96
    capture = open_capture(write_legacy(tmp_path / "data_0.pt", tensors))
    capture.check_vocab(97, "draft X")
    with pytest.raises(CaptureError, match=r"ids below 96, the vocabulary of draft X, found id 96"):
        capture.check_vocab(96, "draft X")


# ---- folders ----------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path, rng):
    """Captures 0, 2, 10 of lengths 5, 6, 7, and what speculators leaves beside them."""
    for i, n in ((10, 7), (2, 6), (0, 5)):
        write_legacy(tmp_path / f"data_{i}.pt", random_capture_tensors(n, rng))
    (tmp_path / "sample_lengths.json").write_text("{}")
    torch.save({}, tmp_path / "token_freq.pt")
    (tmp_path / "data_0.pt.lock").touch()
    return tmp_path


def test_folder_is_in_numeric_order(folder):
    """data_2 before data_10: row N of a mask dataset depends on it."""
    assert [c.name for c in open_folder(folder).captures] == ["data_0", "data_2", "data_10"]


def test_folder_says_what_it_ignored_and_why(folder):
    """Accounted for, not skipped."""
    ignored = open_folder(folder).ignored
    assert set(ignored) == {"sample_lengths.json", "token_freq.pt", "data_0.pt.lock"}
    assert ignored["data_0.pt.lock"] == "lock file of a writer"


def test_folder_counts_the_defaults_taken(folder):
    """One line per default, with the number of files."""
    assert open_folder(folder).notes == ["taps not recorded in the file (3 of 3 files)"]


def test_folder_limit_takes_the_first_in_numeric_order(folder):
    """What is beyond the limit is not even opened."""
    (folder / "data_10.pt").write_bytes(b"broken")
    opened = open_folder(folder, limit=2, taps=NAMES).captures
    assert [len(c) for c in opened] == [5, 6]
    assert opened[0].taps == TAPS


def test_mask_row_must_exist(tmp_path, rng):
    """Validation captures are numbered from an offset: their rows are in another dataset."""
    write_stack(tmp_path / "hs_7.safetensors", random_capture_tensors(5, rng))
    masks = write_masks(tmp_path.parent / "few_masks", [[1] * 5])
    with pytest.raises(CaptureError, match=r"hs_7\.safetensors: row: expected a number below 1.* found 7"):
        open_folder(tmp_path, loss_masks=masks)


def test_vllm_file_names_need_no_numbers_without_masks(tmp_path, rng):
    """The connector names files by request; a single file has no row."""
    tensors = random_capture_tensors(5, rng)
    tensors |= {"hidden_states": tensors["hidden_states"][:2]}
    path = write_stack(tmp_path / "cmpl-ab.safetensors", tensors)
    assert len(open_capture(path).taps) == 2


def test_our_own_layout_stores_taps_by_number(tmp_path, rng):
    """Written out of order, read in order: tap.3 before tap.28 before the final state."""
    state = {k: torch.randn(4, 8, generator=rng) for k in (28, 3, 0)}
    path = tmp_path / "c.safetensors"
    tensors = {f"tap.{k}": s for k, s in state.items()}
    tensors |= {"token_ids": torch.arange(4), "loss_mask": torch.ones(4), "final": state[28] * 2}
    save_file(tensors, path, metadata={"format": "eagle3-workbook-capture", "final_kind": "post_norm"})
    capture = open_capture(path)
    assert [str(t) for t in capture.taps] == ["embed", "layer3", "layer28"]
    assert torch.equal(capture.state(28), state[28])
    assert torch.equal(capture.final(), state[28] * 2)
    assert capture.final_kind == "post_norm"


def test_with_states_changes_every_state_and_nothing_else(tmp_path, rng):
    """A control's capture: each state through the same function when read, tokens and masks untouched."""
    capture = open_capture(write_legacy(tmp_path / "data_0.pt", random_capture_tensors(9, rng)))
    flipped = capture.with_states(lambda s: s.flip(0))
    for tap in capture.taps:
        assert torch.equal(flipped.state(tap), capture.state(tap).flip(0))
    assert torch.equal(flipped.token_ids, capture.token_ids)


# ---- cut -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 5, 9, 10, 1000])
def test_first_cuts_everything_alike(tmp_path, rng, length):
    """Ids, mask, every state and the final one end at the same token; beyond the end nothing is lost."""
    tensors = random_capture_tensors(9, rng)
    final = torch.randn(9, HIDDEN, generator=rng)
    whole = open_capture(write_ours(tmp_path / "c.safetensors", tensors, final=final, final_kind="post_norm"))
    cut = whole.first(length)
    assert len(cut) == min(length, 9) and cut.taps == whole.taps and cut.final_kind == "post_norm"
    assert torch.equal(cut.token_ids, tensors["input_ids"][:length])
    assert torch.equal(cut.loss_mask, tensors["loss_mask"][:length].bool())
    for tap, state in zip(TAPS, tensors["hidden_states"], strict=True):
        assert torch.equal(cut.state(tap), state[:length]), tap
    assert torch.equal(cut.final(), final[:length])
    assert len(whole) == len(whole.state("layer3")) == 9, "the whole one is as it was"


def test_first_twice_is_the_shorter_one(tmp_path, rng):
    """Cutting composes, and keeps the names given to the states."""
    whole = open_capture(write_legacy(tmp_path / "data_0.pt", random_capture_tensors(9, rng)), taps=NAMES)
    for cut in (whole.first(7).first(4), whole.first(4).first(7)):
        assert len(cut) == 4 and torch.equal(cut.state("layer4"), whole.state("layer4")[:4])


def test_cutting_changes_no_earlier_prediction(tmp_path, rng):
    """A draft looks back only: pairs of the cut text are predicted as in the whole one, three deep."""
    speculators_draft().save_pretrained(tmp_path / "draft")
    draft = load_draft(tmp_path / "draft")
    contract = draft.contract.change(taps=NAMES[:3])
    whole = open_capture(write_legacy(tmp_path / "data_0.pt", random_capture_tensors(40, rng)), taps=NAMES)
    before, after = (
        DraftForward(draft).predict([c], contract, depths=3, feed="own", keep_logits=True)
        for c in (whole, whole.first(25))
    )
    kept = len(after.position)
    assert 5 < kept < len(before.position)
    assert torch.equal(after.position, before.position[:kept])
    torch.testing.assert_close(after.logits, before.logits[:kept])
    # what the last pairs should predict is cut off; every other truth is the same
    there = after.position[:, None] + 2 + torch.arange(3) < 25
    assert torch.equal(after.truth, torch.where(there, before.truth[:kept], -1)) and not there.all()
