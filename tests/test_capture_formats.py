"""Every framework's capture files: read bit for bit, recognised by content, refused with one clear error."""

from __future__ import annotations

import gzip
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from io import BytesIO
from pathlib import Path

import pytest
import torch

from lib import containers
from lib.capture_formats import CAPTURE_FORMATS, recognise
from lib.captures import NO_MASK, Capture, capture_files, open_capture, open_folder
from lib.checkpoints import load_draft
from lib.draft import DraftForward
from lib.errors import CaptureError
from lib.taps import Stored
from tests.capture_writers import LAST, TAPS, WRITERS, Native, Writer, native
from tests.support import HIDDEN, speculators_draft

L = 23
EVERY = pytest.mark.parametrize("name", WRITERS)
PAIRED = [n for n, w in WRITERS.items() if w.layout in ("specforge", "modelopt", "angelslim", "baldeagle")]


@pytest.fixture
def made(rng) -> Native:
    """The native conversation of this module."""
    return native(rng, L)


def opened(writer: Writer, path: Path, made: Native) -> Capture:
    """The file with its states named, its last state as the final one, and the native mask."""
    names = (*TAPS, LAST) if writer.last == "stored" else TAPS
    capture = open_capture(path, taps=names, loss_mask=None if writer.has_mask else made.mask)
    return capture.split_last(writer.kind) if writer.last == "stored" else capture


# ---- every format -----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@EVERY
def test_states_come_back_bit_for_bit(tmp_path, rng, name, dtype):
    """Ids, mask, aux states and the last one, in the dtype they were written in."""
    made, writer = native(rng, L, dtype), WRITERS[name]
    capture = opened(writer, writer.write(tmp_path, made), made)
    assert (capture.layout, capture.taps, capture.hidden_size) == (writer.layout, TAPS, HIDDEN)
    assert torch.equal(capture.token_ids, made.ids)
    assert torch.equal(capture.loss_mask, made.mask.bool())
    for tap, state in made.states.items():
        assert capture.state(tap).dtype == dtype and capture.state(tap).shape == (L, HIDDEN)
        assert torch.equal(capture.state(tap), state), tap
    if writer.last:
        assert torch.equal(capture.final(), made.post if writer.kind == "post_norm" else made.pre)
        assert capture.final().dtype == dtype
        assert capture.final_kind == (writer.kind if writer.says_kind or writer.last == "stored" else None)


@EVERY
def test_the_draft_says_the_same_on_every_format(tmp_path, made, name):
    """Three depths fed by the draft itself: the same ids and the same logits as from our own layout."""
    speculators_draft().save_pretrained(tmp_path / "draft")
    forward = DraftForward(load_draft(tmp_path / "draft"))
    contract = forward.draft.contract.change(taps=TAPS)
    writer = WRITERS[name]
    ours, theirs = (
        forward.predict(
            [opened(w, w.write(tmp_path / w.layout, made), made)], contract, depths=3, keep_logits=True
        )
        for w in (WRITERS["workbook"], writer)
    )
    assert len(ours.position) > 5
    assert torch.equal(ours.position, theirs.position) and torch.equal(ours.draft_ids, theirs.draft_ids)
    assert torch.equal(ours.logits, theirs.logits)


@EVERY
def test_recognised_with_evidence(tmp_path, made, name):
    """One match, which says what was seen in the file."""
    writer = WRITERS[name]
    (match,) = recognise(writer.write(tmp_path, made))
    assert match.format == writer.layout in CAPTURE_FORMATS
    assert match.evidence and all(match.evidence)
    if name in PAIRED:
        assert f"{L}, {3 * HIDDEN}] is 3 times as wide as " in str(match)


@EVERY
def test_the_suffix_decides_nothing(tmp_path, made, name):
    """The same bytes under another framework's suffix are still what they are."""
    writer = WRITERS[name]
    path = writer.write(tmp_path, made)
    for suffix in (".pt", ".ckpt", ".safetensors", ".bin"):
        other = tmp_path / f"x{suffix}"
        shutil.copy(path, other)
        assert [m.format for m in recognise(other)] == [writer.layout]
        assert torch.equal(open_capture(other).token_ids, made.ids)


@EVERY
def test_every_default_is_in_the_notes(tmp_path, made, name):
    """Unnamed taps, a mask of ones, a post-norm taken from the format: none is silent."""
    writer = WRITERS[name]
    capture = open_capture(writer.write(tmp_path, made))
    assert ("taps not recorded in the file" in capture.notes) == (name != "workbook")
    assert (NO_MASK in capture.notes) == (not writer.has_mask)
    about_final = [n for n in capture.notes if "post-norm" in n or "final norm" in n]
    assert len(about_final) == (name in PAIRED), capture.notes


def test_a_mask_beside_a_file_with_its_own_is_noted(tmp_path, made):
    """The file's own mask wins, and a note says that another one was given."""
    path = WRITERS["specforge"].write(tmp_path, made)
    capture = open_capture(path, loss_mask=torch.ones(L))
    assert torch.equal(capture.loss_mask, made.mask.bool())
    assert any("not used" in note for note in capture.notes)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.uint16, torch.uint32, torch.uint64])
def test_token_ids_of_any_integer_type(tmp_path, made, dtype):
    """Writers choose small types; unsigned ones have no min() in torch."""
    path = WRITERS["specforge"].write(tmp_path, made)
    torch.save(torch.load(path, weights_only=True) | {"input_ids": made.ids.to(dtype)}, path)
    assert torch.equal(open_capture(path).token_ids, made.ids)


# ---- collisions of names ----------------------------------------------------------------------


def test_equal_widths_are_decided_by_names_and_noted(tmp_path, made):
    """With one aux state nothing but the key says which state is the last one."""
    one = replace(made, states={TAPS[1]: made.states[TAPS[1]]})
    for name in PAIRED:
        writer = WRITERS[name]
        capture = open_capture(writer.write(tmp_path / name, one))
        assert capture.taps == (Stored(0),)
        assert torch.equal(capture.stored(0), one.states[TAPS[1]])
        assert any("equally wide" in note for note in capture.notes), name


def both_names(path: Path, made: Native) -> Path:
    """A file that Model-Optimizer and AngelSlim could both have written."""
    data = {"input_ids": made.ids, "loss_mask": made.mask, "hidden_states": made.post}
    torch.save(data | {"aux_hidden_states": made.aux, "target_hiddens": made.pre}, path)
    return path


def test_two_layouts_that_fit_are_reported_and_the_caller_chooses(tmp_path, made):
    """Never a guess: both are named, and the choice accounts for the keys of the other one."""
    path = both_names(tmp_path / "x.pt", made)
    assert {m.format for m in recognise(path)} == {"modelopt", "angelslim"}
    with pytest.raises(CaptureError, match=r"x\.pt: format: .*modelopt.* or angelslim.*name one of"):
        open_capture(path)
    chosen = open_capture(path, layout="modelopt")
    assert torch.equal(chosen.final(), made.post) and len(chosen.taps) == 3
    assert any("target_hiddens: not read" in note for note in chosen.notes)
    other = open_capture(path, layout="angelslim")
    assert torch.equal(other.final(), made.pre) and torch.equal(other.stored(0), made.post)


def test_aux_states_are_read_one_by_one(tmp_path, made):
    """A NaN in the second aux state is no business of the first."""
    broken = dict(made.states)
    broken[TAPS[1]] = broken[TAPS[1]].clone()
    broken[TAPS[1]][5, 7] = float("nan")
    for name in PAIRED:
        capture = open_capture(WRITERS[name].write(tmp_path / name, replace(made, states=broken)), taps=TAPS)
        assert torch.equal(capture.state(TAPS[0]), made.states[TAPS[0]])
        with pytest.raises(CaptureError, match=r"layer3: .* 1 NaN or Inf values, the first in position 5"):
            capture.state(TAPS[1])


def test_model_optimizer_without_aux_states(tmp_path, made):
    """Its vLLM dump of one layer holds an empty tensor there: a capture with nothing but the last state."""
    path = WRITERS["modelopt-vllm"].write(tmp_path, made)
    data = torch.load(path, weights_only=True)
    torch.save(data | {"aux_hidden_states": torch.empty(0)}, path)
    capture = open_capture(path)
    assert capture.taps == () and torch.equal(capture.final(), made.pre)
    assert any("aux_hidden_states is empty" in note for note in capture.notes)


def test_keys_of_images_are_accounted_for(tmp_path, made):
    """AngelSlim's vision captures carry positions and embeddings: named in the notes, not dropped."""
    path = WRITERS["angelslim"].write(tmp_path, made)
    data = torch.load(path, weights_only=True)
    torch.save(data | {"position_ids": None, "inputs_embeds": made.pre[None]}, path)
    notes = " ".join(open_capture(path).notes)
    assert "position_ids: not read" in notes and "inputs_embeds: not read" in notes


# ---- gzip -------------------------------------------------------------------------------------


def test_gzipped_states_stay_on_disk_until_asked_for(tmp_path, rng):
    """Reading another file in between, and another file put in its place: the states are those on disk."""
    first, second = native(rng, L), native(rng, L)
    write = WRITERS["specforge-gz"].write
    one, two = write(tmp_path, first, 1), write(tmp_path, second, 2)
    a, b = open_capture(one, taps=TAPS), open_capture(two, taps=TAPS)
    for capture, made in ((a, first), (b, second), (a, first)):
        assert torch.equal(capture.state(TAPS[2]), made.states[TAPS[2]])


def test_a_gzip_file_that_changed_after_it_was_opened(tmp_path, made):
    """It is unpacked again when a state is read: another text's states are not taken for this one's."""
    path = WRITERS["specforge-gz"].write(tmp_path, made)
    capture = open_capture(path)
    data = torch.load(BytesIO(gzip.decompress(path.read_bytes())), weights_only=True)
    buffer = BytesIO()
    torch.save({k: v[:, :-1] if k.endswith("hidden_state") else v for k, v in data.items()}, buffer)
    path.write_bytes(gzip.compress(buffer.getvalue()))
    containers._unpacked.cache_clear()
    with pytest.raises(CaptureError, match="hidden_state: expected the file as it was when it was opened"):
        capture.stored(0)


def test_a_gzip_bomb_is_not_unpacked(tmp_path):
    """80 MiB of zeros in 80 kB: stopped at the bound."""
    path = tmp_path / "data_0.ckpt.gz"
    with gzip.open(path, "wb") as f:
        for _ in range(80):
            f.write(bytes(1 << 20))
    with pytest.raises(CaptureError, match=r"data_0\.ckpt\.gz: gzip: expected at most 64 MiB"):
        open_capture(path)


# ---- bad files --------------------------------------------------------------------------------


def without(key):
    return lambda data, made: {k: v for k, v in data.items() if k != key}


def with_(**change):
    return lambda data, made: data | {k: f(data[k]) if callable(f) else f for k, f in change.items()}


def swapped(a, b):
    return lambda data, made: data | {a: data[b], b: data[a]}


def holds_itself():
    endless = []
    endless.append(endless)
    return endless


def wrapped(tensor, times):
    return tensor if times == 0 else [wrapped(tensor, times - 1)]


F8 = torch.float8_e4m3fn
SPARSE, VIEW = torch.eye(3).to_sparse(), torch.ones(1, 1).expand(1 << 20, 1 << 20)
BAD = [
    ("specforge", "meta last", with_(hidden_state=lambda t: t.to("meta")),
     "hidden_state", "plain dense.*meta"),
    ("specforge", "nested mask", with_(loss_mask=torch.nested.nested_tensor([torch.ones(3)])),
     "loss_mask", "plain dense.*nested"),
    ("modelopt-hf", "a view of 4 TiB", with_(aux_hidden_states=VIEW),
     "aux_hidden_states", "a view of 4 bytes"),
    ("speculators-legacy", "sparse in a list", with_(hidden_states=lambda s: [*s, SPARSE]),
     r"hidden_states\[4\]", "plain dense.*sparse"),
    ("speculators-legacy", "sparse deep inside", with_(hidden_states=lambda s: wrapped(SPARSE, 90)),
     r"hidden_states(\[0\])+.*", "plain dense.*sparse"),
    ("speculators-legacy", "a list that holds itself", with_(hidden_states=holds_itself()),
     "hidden_states", r"a list of \[positions"),
    ("specforge", "loss mask missing", without("loss_mask"), "keys", r"missing \['loss_mask'\]"),
    ("specforge", "aux missing", without("aux_hidden_state"), "hidden_state", "EAGLE-1"),
    ("specforge", "surplus key", with_(notes=torch.ones(1)), "keys", r"unexpected \['notes'\]"),
    ("specforge", "names swapped", swapped("hidden_state", "aux_hidden_state"),
     "hidden_state, aux_hidden_state", "swapped.*baldeagle"),
    ("specforge", "aux no multiple", with_(aux_hidden_state=lambda t: t[..., :-1]),
     "aux_hidden_state", "whole multiple of 32.*width 95"),
    ("specforge", "aux cut short", with_(aux_hidden_state=lambda t: t[:, :-4]),
     "aux_hidden_state", "23 rows, one per token.*19 rows"),
    ("specforge", "last cut short", with_(hidden_state=lambda t: t[:, 4:]), "hidden_state", "19 rows"),
    ("specforge", "batch of two", with_(aux_hidden_state=lambda t: torch.cat([t, t])),
     "aux_hidden_state", "batch of 2"),
    ("specforge", "last without width", with_(hidden_state=lambda t: t[0, :, 0]), "hidden_state", "2 axes"),
    ("specforge", "ids as a list", with_(input_ids=lambda t: t.tolist()), "input_ids", "a tensor.*list"),
    ("specforge", "float ids", with_(input_ids=lambda t: t.float()), "token ids", "1-D integer"),
    ("specforge", "negative id", with_(input_ids=lambda t: t - 100), "token ids", "ids from 0"),
    ("specforge", "mask of another length", with_(loss_mask=lambda t: t[:-1]),
     "loss_mask", "one value per token"),
    ("specforge", "mask all zero", with_(loss_mask=lambda t: t * 0), "loss_mask", "at least one scored"),
    ("specforge", "mask not binary", with_(loss_mask=lambda t: t * 2), "loss_mask", "zeros and ones"),
    ("specforge", "uint16 mask not binary", with_(loss_mask=lambda t: (t * 2).to(torch.uint16)),
     "loss_mask", "zeros and ones.*up to 2"),
    ("specforge", "complex mask", with_(loss_mask=lambda t: t * 1j), "loss_mask", "complex64"),
    ("specforge", "sparse last", with_(hidden_state=lambda t: t.to_sparse()), "hidden_state", "sparse_coo"),
    ("specforge", "fp8 aux", with_(aux_hidden_state=lambda t: t.to(F8)), "aux_hidden_state", "fp8"),
    ("specforge", "int8 last", with_(hidden_state=lambda t: t.to(torch.int8)),
     "hidden_state", "floating-point"),
    ("modelopt-hf", "no ids", without("input_ids"), "keys", r"missing \['input_ids'\]"),
    ("modelopt-hf", "names swapped", swapped("hidden_states", "aux_hidden_states"),
     "hidden_states, aux_hidden_states", "swapped.*angelslim"),
    ("modelopt-hf", "aux missing", without("aux_hidden_states"), "keys", r"missing \['aux_hidden_states'\]"),
    ("modelopt-hf", "aux is None", with_(aux_hidden_states=None), "aux_hidden_states", "a tensor.*NoneType"),
    ("modelopt-hf", "mask with batch of two", with_(loss_mask=lambda t: torch.stack([t, t])),
     "loss_mask", "batch of 2"),
    ("angelslim", "batch of two", lambda d, m: {k: torch.cat([v, v]) for k, v in d.items()},
     "input_ids", "batch of 2.*padding cannot be told"),
    ("angelslim", "no last state", without("target_hiddens"), "hidden_states", "a list.*Tensor"),
    ("angelslim", "names swapped", swapped("hidden_states", "target_hiddens"),
     "target_hiddens, hidden_states", "swapped"),
    ("baldeagle", "last missing", without("target_hidden_states"), "hidden_state", "EAGLE-1"),
    ("baldeagle", "names swapped", swapped("hidden_state", "target_hidden_states"),
     "target_hidden_states, hidden_state", "swapped"),
    ("baldeagle", "Automodel's cache", with_(target_probs=torch.ones(3)), "target_probs", "Automodel"),
    ("specforge", "Automodel's compressed cache", with_(target_probs_values=torch.ones(3)),
     "target_probs_values", "Automodel"),
    ("speculators-legacy", "fp8 list", with_(hidden_states=lambda s: [t.to(F8) for t in s]),
     r"hidden_states\[0\]", "fp8"),
    ("specforge", "an empty dict", lambda d, m: {}, "format", "keys"),
    ("specforge", "a draft's weights", lambda d, m: {"fc.weight": torch.ones(2, 2)}, "format", r"fc\.weight"),
]  # fmt: skip


@pytest.mark.parametrize("name, case, change, field, says", BAD, ids=[f"{n}: {c}" for n, c, *_ in BAD])
def test_bad_file_is_one_clear_error(tmp_path, made, name, case, change, field, says):
    """A CaptureError with file and field, whatever is wrong; the remedy is never empty."""
    path = WRITERS[name].write(tmp_path, made)
    torch.save(change(torch.load(path, weights_only=True), made), path)
    with pytest.raises(CaptureError) as caught:
        open_capture(path)
    error = caught.value
    assert error.where == str(path) and error.remedy
    assert re.fullmatch(field, error.field), error
    assert re.search(says, str(error)), error


@pytest.mark.parametrize("room", [0, 1 << 12])
def test_a_full_temporary_disk_is_not_the_files_fault(tmp_path, made, room):
    """The process may write so many bytes per file, as a full disk would have it; the capture is sound."""
    path = WRITERS["specforge-gz"].write(tmp_path, made)
    code = (
        "import resource, sys; from lib.captures import open_capture; from lib.errors import CaptureError\n"
        f"resource.setrlimit(resource.RLIMIT_FSIZE, ({room}, resource.RLIM_INFINITY))\n"
        "try:\n    open_capture(sys.argv[1])\n"
        "except CaptureError as err:\n    print(err.where, err.field, err.remedy, sep='|')"
    )
    ran = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True)
    where, field, remedy = ran.stdout.strip().split("|")
    assert (where, field) == (str(path), "temporary file")
    assert "free space in $TMPDIR" in remedy


class RunsCode:
    """Unpickling this creates a file."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self):
        return open, (str(self.marker), "w")


@pytest.mark.parametrize("case", ["truncated", "damaged", "text inside", "code inside", "empty inside"])
def test_bad_gzip_is_one_clear_error(tmp_path, made, case):
    """The error names the gzip file, not what it was unpacked to; no code in it runs."""
    path = WRITERS["specforge-gz"].write(tmp_path, made)
    packed, marker = path.read_bytes(), tmp_path / "ran"
    if case == "truncated":
        path.write_bytes(packed[: len(packed) // 2])
    elif case == "damaged":
        path.write_bytes(packed[:200] + bytes(50) + packed[250:])
    elif case == "code inside":
        torch.save({"input_ids": RunsCode(marker)}, tmp_path / "code")
        path.write_bytes(gzip.compress((tmp_path / "code").read_bytes()))
    else:
        path.write_bytes(gzip.compress(b"" if case == "empty inside" else b"some text"))
    with pytest.raises(CaptureError) as caught:
        open_capture(path)
    assert caught.value.where == str(path)
    assert caught.value.field == ("gzip" if case in ("truncated", "damaged") else "pickle")
    assert not marker.exists()


def test_layout_must_exist_and_fit(tmp_path, made):
    """A name that nobody knows, and one that the content contradicts."""
    path = WRITERS["modelopt-hf"].write(tmp_path, made)
    with pytest.raises(CaptureError, match=r"layout: expected one of .*'specforge'.* found 'eagle'"):
        open_capture(path, layout="eagle")
    with pytest.raises(CaptureError, match=r"format: expected angelslim, found modelopt: keys"):
        open_capture(path, layout="angelslim")


# ---- names, last states -----------------------------------------------------------------------


def test_names_by_number_of_stored_states(tmp_path, made):
    """Files of three and of four stored states in one folder, each with its own list."""
    WRITERS["speculators"].write(tmp_path, made, 0)
    WRITERS["speculators-without-last"].write(tmp_path, made, 1)
    WRITERS["workbook"].write(tmp_path, made, 2)
    taps = {3: TAPS, 4: (*TAPS, LAST)}
    assert [c.taps for c in open_folder(tmp_path, taps=taps).captures] == [(*TAPS, LAST), TAPS, TAPS]
    with pytest.raises(
        CaptureError, match=r"hs_1.*taps: expected names for a file of 3 .* found names for \[4\]"
    ):
        open_folder(tmp_path, taps={4: taps[4]})


def test_split_last(tmp_path, made):
    """The last slot becomes the final state, of the kind the caller says; the others keep their names."""
    whole = open_capture(WRITERS["speculators"].write(tmp_path, made), taps=(*TAPS, LAST))
    split = whole.split_last("pre_norm")
    assert split.taps == TAPS and split.final_kind == "pre_norm"
    assert torch.equal(split.final(), made.pre) and torch.equal(split.stored(-1), made.states[TAPS[-1]])
    assert whole.taps == (*TAPS, LAST) and whole.final_kind is None
    with pytest.raises(CaptureError, match=r"final: expected a last stored state.* a final state of its own"):
        split.split_last("pre_norm")
    with pytest.raises(CaptureError, match="final_kind: expected pre_norm or post_norm, found 'prenorm'"):
        whole.split_last("prenorm")


# ---- folders ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["specforge", "specforge-gz", "baldeagle", "angelslim"])
def test_folders_of_rows_in_numeric_order(tmp_path, rng, name):
    """rows_0-2000 before rows_2000-4000, data_2 before data_10; the vocabulary map is explained."""
    texts = {i: native(rng, 6 + k) for k, i in enumerate((2, 10, 7001, 12005))}
    for i, made in texts.items():
        WRITERS[name].write(tmp_path, made, i)
    (tmp_path / "vocab_mapping").mkdir()
    torch.save({"d2t": torch.zeros(2), "t2d": torch.ones(2)}, tmp_path / "vocab_mapping" / "vocab_mapping.pt")
    folder = open_folder(tmp_path, taps=TAPS)
    assert [len(c) for c in folder.captures] == [6, 7, 8, 9]
    assert [c.name.split("/")[-1] for c in folder.captures] == [
        "data_2",
        "data_10",
        "data_7001",
        "data_12005",
    ]
    assert folder.ignored == {"vocab_mapping": "SpecForge: vocabulary map of a draft"}
    assert len({c.name for c in folder.captures}) == 4


def test_speculators_data_folder_brings_its_masks(tmp_path, rng):
    """Arrow files at the root, hidden_states/ below: row N is the mask of hs_N."""
    from datasets import Dataset

    texts = {i: native(rng, 7 + i) for i in range(3)}
    rows = [t.mask.long().tolist() for t in texts.values()]
    Dataset.from_dict({"loss_mask": rows}).save_to_disk(tmp_path)
    for i, made in texts.items():
        WRITERS["speculators"].write(tmp_path / "hidden_states", made, i)
    (tmp_path / "hidden_states" / "hs_0.safetensors.lock").touch()
    listed = capture_files(tmp_path)
    assert listed.masks == tmp_path and [f.name for f in listed.files] == [
        f"hs_{i}.safetensors" for i in range(3)
    ]
    folder = open_folder(tmp_path)
    assert [c.loss_mask.long().tolist() for c in folder.captures] == rows
    assert folder.ignored["hidden_states/hs_0.safetensors.lock"] == "lock file of a writer"
    assert {"dataset_info.json", "state.json"} <= set(folder.ignored)
    assert not any(NO_MASK in note for note in folder.notes)


def test_files_of_one_name_keep_theirs_apart(tmp_path, rng):
    """data_0.ckpt and data_0.ckpt.gz side by side are two captures with two names."""
    WRITERS["specforge-gz"].write(tmp_path, native(rng, L))
    WRITERS["specforge"].write(tmp_path, native(rng, L))
    names = [c.name for c in open_folder(tmp_path).captures]
    assert names == ["rows_0-2000/data_0.ckpt", "rows_0-2000/data_0.ckpt.gz"]


def test_skip_collects_errors_and_goes_on(tmp_path, rng):
    """Default: the first bad file stops. On request: named with its error, and the limit counts good ones."""
    for i in range(4):
        WRITERS["specforge"].write(tmp_path, native(rng, 6 + i), i)
    bad = tmp_path / "rows_0-2000" / "data_1.ckpt"
    bad.write_bytes(b"broken")
    with pytest.raises(CaptureError, match="data_1"):
        open_folder(tmp_path)
    folder = open_folder(tmp_path, on_error="skip", limit=3)
    assert [len(c) for c in folder.captures] == [6, 8, 9]
    assert list(folder.skipped) == ["rows_0-2000/data_1.ckpt"]
    assert folder.skipped["rows_0-2000/data_1.ckpt"].where == str(bad)
    for i in (0, 2, 3):
        (tmp_path / "rows_0-2000" / f"data_{i}.ckpt").write_bytes(b"broken")
    with pytest.raises(CaptureError, match=r"folder: .* 4 refused, the first: .*data_0"):
        open_folder(tmp_path, on_error="skip")
    with pytest.raises(CaptureError, match="on_error: expected 'raise' or 'skip', found 'ignore'"):
        open_folder(tmp_path, on_error="ignore")


def test_mixed_folder(tmp_path, rng):
    """Every format side by side in one folder: each file is read as what it is."""
    for i, writer in enumerate(WRITERS.values()):
        writer.write(tmp_path / f"part_{i}", native(rng, L), i)
    layouts = [c.layout for c in open_folder(tmp_path).captures]
    assert layouts == [w.layout for w in WRITERS.values()]


def test_a_link_back_up_is_explained(tmp_path, rng):
    """Folders may be links (data of several machines); one that leads back is named, not followed."""
    write = WRITERS["specforge"].write
    write(tmp_path / "elsewhere", native(rng, 6), 0)
    write(tmp_path / "all", native(rng, 7), 2001)
    (tmp_path / "all" / "rows_0-2000").symlink_to(tmp_path / "elsewhere" / "rows_0-2000")
    (tmp_path / "all" / "again").symlink_to(tmp_path / "all")
    folder = open_folder(tmp_path / "all")
    assert [len(c) for c in folder.captures] == [6, 7]
    assert folder.ignored == {"again": "link to a folder that is listed already"}


# ---- the frameworks' own readers --------------------------------------------------------------


@pytest.mark.parametrize("name", ["specforge", "specforge-gz"])
def test_specforge_reads_our_writers_files(tmp_path, made, name):
    """SpecForge 0.2.0's offline reader and normaliser give what our reader gives, from the same file."""
    reader = pytest.importorskip("specforge.runtime.data_plane.offline_reader")
    from specforge.algorithms.eagle3.data import normalize_offline_sample
    from specforge.runtime.data_plane.feature_store import load_feature_file

    path = WRITERS[name].write(tmp_path, made)
    assert reader.list_feature_files(str(tmp_path)) == [str(path)]
    raw = load_feature_file(str(path))
    assert set(reader._OFFLINE_EAGLE3_KEYS) == set(raw)
    theirs = normalize_offline_sample(raw, max_len=2048)
    ours = open_capture(path, taps=TAPS)
    assert torch.equal(theirs["input_ids"][0], ours.token_ids)
    assert torch.equal(theirs["hidden_state"][0], torch.cat([ours.state(t) for t in TAPS], -1))
    assert torch.equal(theirs["target"][0], ours.final())
    # It zeroes the last element, which no pair of ours reads; everything before is the same.
    assert theirs["loss_mask"][0, -1] == 0 and ours.loss_mask[-1]
    assert torch.equal(theirs["loss_mask"][0, :-1].bool(), ours.loss_mask[:-1])
    zeroed = replace(ours, loss_mask=theirs["loss_mask"][0].bool())
    assert torch.equal(zeroed.scored, ours.scored) and len(ours.scored)


def test_our_reader_reads_what_specforge_saves(tmp_path, made):
    """SpecForge's own feature store dumps the same four tensors; its file is a SpecForge capture here."""
    store = pytest.importorskip("specforge.runtime.data_plane.feature_store")
    tensors = torch.load(WRITERS["specforge"].write(tmp_path / "ours", made), weights_only=True)
    kept = store.LocalFeatureStore("s", dump_dir=str(tmp_path / "theirs"))
    kept.put(tensors, sample_id="a", metadata={"run_id": "r", "strategy": "eagle3"})
    (file,) = capture_files(tmp_path / "theirs").files
    capture = open_capture(file, taps=TAPS)
    assert capture.layout == "specforge" and torch.equal(capture.final(), made.post)
    assert torch.equal(capture.state(TAPS[1]), made.states[TAPS[1]])


@pytest.mark.speculators
def test_speculators_reads_our_writers_files(tmp_path, made):
    """Its ArrowDataset finds hs_0 below the dataset, and splits the slots as `split_last` does."""
    from datasets import Dataset
    from speculators.train.data import ArrowDataset

    rows = {"input_ids": [made.ids.tolist()], "loss_mask": [made.mask.long().tolist()], "seq_len": [L]}
    Dataset.from_dict(rows).with_format("torch").save_to_disk(tmp_path)
    WRITERS["speculators"].write(tmp_path / "hidden_states", made)
    theirs = ArrowDataset(L, tmp_path, on_missing="raise", hidden_states_dtype=torch.float32)._get_raw_data(0)
    (ours,) = open_folder(tmp_path, taps=(*TAPS, LAST)).captures
    ours = ours.split_last("pre_norm")
    assert torch.equal(theirs["hidden_states"], torch.cat([ours.state(t) for t in TAPS], -1))
    assert torch.equal(theirs["verifier_last_hidden_states"], ours.final())
    assert torch.equal(theirs["input_ids"], ours.token_ids)
    assert torch.equal(theirs["loss_mask"].bool(), ours.loss_mask)
