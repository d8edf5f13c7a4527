"""Captures: what was recorded of the target, read lazily and accounted for completely.

The layouts of every framework are read in `lib.capture_formats`; here they become one `Capture`, and folders
of them a `CaptureFolder`. A layout that does not say which taps it holds leaves its states called `stored0`,
`stored1`, ... until `taps=` names them, and every report shows that nobody did.

Axes: L positions, H target hidden size, k stored states.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import torch
from safetensors.torch import save_file
from torch import Tensor

from lib.arrow_masks import ArrowMasks, arrow_files, numeric
from lib.capture_formats import FINAL, FORMAT, Content, read_capture
from lib.errors import CaptureError, WorkbookError
from lib.taps import Stored, Tap, parse_tap

NO_MASK = "no loss mask given: every position counts, the prompt too"
KINDS = ("pre_norm", "post_norm")
Names = Sequence[Tap | Stored | str | int]
MaskOf = Callable[[Path, Tensor], Tensor]  # file and its token ids (L,) -> its loss mask (L,)
BLOCK = 1 << 19  # numbers widened at once: 2 MB of fp32
# Files that frameworks leave beside captures, and why they are not captures.
IGNORED = {
    r".*\.lock": "lock file of a writer",
    r"sample_lengths\.json": "speculators: lengths, recomputed here",
    r"token_freq\.pt": "speculators: token counts for the draft vocabulary",
    r"(d2t|t2d)\.(npy|pt)|vocab_mapping\.pt": "vocabulary map of a draft",
    r"cache-.*\.arrow": "datasets: cache of a later step",
    r".*\.arrow": "speculators: preprocessed dataset, the loss masks",
    r"dataset_info\.json|state\.json": "datasets: description of the arrow files",
    r"README.*|LICENSE.*|manifest\.json": "documentation",
}
IGNORED_FOLDERS = {
    r"vocab_mapping": "SpecForge: vocabulary map of a draft",
    r"\..*|__pycache__": "hidden folder or cache of a program",
}


def row_blocks(states: Tensor) -> tuple[Tensor, ...]:
    """States (L, H) in blocks of rows small enough to be widened to fp32 in the processor's cache.

    torch widens bf16 by a copy of the whole; of more than 32 MB the C library asks the system for fresh pages
    every time, which takes five times as long as the rest.
    """
    rows = max(1, BLOCK // max(1, states.shape[-1]))
    return (states,) if len(states) <= rows else states.split(rows)


@dataclass(frozen=True)
class Capture:
    """One recorded conversation.

    Attributes:
        name, path: where it came from.
        layout: which reader opened it.
        token_ids: (L,) int64.
        loss_mask: (L,) bool; True on tokens the trainer scored (the assistant's).
        taps: names of the stored states, in stored order.
        hidden_size: H.
        final_kind: "pre_norm" or "post_norm" for the state returned by `final()`; None: there is none, or
            nobody said yet (`lib.final_state.settle_final` finds out).
        notes: every default that was taken while reading.
    """

    name: str
    path: Path
    layout: str
    token_ids: Tensor
    loss_mask: Tensor
    taps: tuple[Tap | Stored, ...]
    hidden_size: int
    readers: Mapping[Tap | Stored | str, Callable[[], Tensor]] = field(repr=False)
    final_kind: Literal["pre_norm", "post_norm"] | None = None
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        """Number of positions L."""
        return len(self.token_ids)

    def state(self, tap: Tap | Stored | str) -> Tensor:
        """States at one tap, (L, H), in the stored dtype. Reads only that state.

        Raises CaptureError if the tap is not stored or holds NaN or Inf.
        """
        states = self.unchecked(tap)
        # One NaN or Inf makes the sum one too, as may an overflow; only then is every value worth a look.
        wide = torch.promote_types(states.dtype, torch.float32)
        if not all(bool(torch.isfinite(part.sum(dtype=wide))) for part in row_blocks(states)):
            self._check_finite(tap, states)
        return states

    def unchecked(self, tap: Tap | Stored | str) -> Tensor:
        """The same, for who notices NaN and Inf anyway and asks `state` then."""
        tap = tap if tap == FINAL else parse_tap(tap)
        if tap not in self.readers:
            raise CaptureError(
                self.path, str(tap), expected=f"one of the stored {[str(t) for t in self.readers]}",
                found="no such state", remedy="choose a stored tap, or recapture with this one",
            )  # fmt: skip
        return self.readers[tap]()

    def _check_finite(self, tap: Tap | Stored | str, states: Tensor) -> None:
        bad = ~torch.isfinite(states)
        if bad.any():
            row = int(bad.any(-1).nonzero()[0, 0])
            raise CaptureError(
                self.path, str(tap), expected="finite numbers",
                found=f"{int(bad.sum())} NaN or Inf values, the first in position {row}",
                remedy="recapture in bf16 or fp32 (fp16 overflows at 65504), or drop this file",
            )  # fmt: skip

    def stored(self, index: int) -> Tensor:
        """The index-th stored state (negative counts from the end), whatever its name."""
        return self.state(self.taps[index])

    def final(self) -> Tensor:
        """The target's last state, (L, H); `final_kind` says whether the final norm is in it."""
        return self.state(FINAL)

    def known_final_kind(self) -> str:
        """`final_kind`; CaptureError while nobody has said which it is."""
        if self.final_kind not in KINDS:
            raise CaptureError(
                self.path, "final_kind", expected=f"{' or '.join(KINDS)}", found=repr(self.final_kind),
                remedy="lib.final_state.settle_final(captures, head) decides by evidence; or say it yourself",
            )  # fmt: skip
        return self.final_kind

    @property
    def scored(self) -> Tensor:
        """Positions t whose pair (state t, token t+1) the trainer scores and a next token exists.

        The pair predicts token t+2. It is scored when token t+1 belongs to the assistant: that is
        speculators' shifted mask, and it is also exactly when an engine would ask the draft.

        Returns: (n,) int64 indices t, with t + 2 < L.
        """
        return self.loss_mask[1:-1].nonzero().flatten()

    def named(self, taps: Sequence[Tap | Stored | str | int]) -> Capture:
        """The same capture with its stored states given these tap names, in stored order."""
        names = tuple(parse_tap(t) for t in taps)
        if len(names) != len(self.taps) or len(set(names)) != len(names):
            raise CaptureError(
                self.path, "taps", expected=f"{len(self.taps)} different names, one per stored state",
                found=str([str(t) for t in names]), remedy="name every stored state once, in order",
            )  # fmt: skip
        readers = {new: self.readers[old] for new, old in zip(names, self.taps, strict=True)}
        readers |= {FINAL: self.readers[FINAL]} if FINAL in self.readers else {}
        return replace(self, taps=names, readers=readers)

    def split_last(self, kind: Literal["pre_norm", "post_norm"]) -> Capture:
        """The last stored state as the final one; the other stored states keep their names.

        For speculators, vLLM and legacy files whose last slot is the target's last state.
        """
        if kind not in KINDS:
            raise CaptureError(
                self.path, "final_kind", expected=f"{' or '.join(KINDS)}", found=repr(kind),
                remedy="vLLM and speculators store the last state pre-norm, transformers post-norm",
            )  # fmt: skip
        if FINAL in self.readers or not self.taps:
            raise CaptureError(
                self.path, FINAL, expected="a last stored state, and no final one yet",
                found="no stored state" if not self.taps else "a final state of its own",
                remedy="use the final state that the file has; nothing has to be split off",
            )  # fmt: skip
        readers = {tap: self.readers[tap] for tap in self.taps[:-1]}
        readers[FINAL] = self.readers[self.taps[-1]]
        return replace(self, taps=self.taps[:-1], readers=readers, final_kind=kind)

    def first(self, length: int) -> Capture:
        """The same conversation cut after `length` tokens, at least one."""
        if length < 1:
            raise CaptureError(
                self.path, "length", expected="1 or more tokens", found=str(length),
                remedy="a capture without tokens has nothing to predict",
            )  # fmt: skip
        readers = {tap: (lambda read=read: read()[:length]) for tap, read in self.readers.items()}
        ids, mask = self.token_ids[:length], self.loss_mask[:length]
        return replace(self, token_ids=ids, loss_mask=mask, readers=readers)

    def with_states(self, change: Callable[[Tensor], Tensor]) -> Capture:
        """The same conversation with every state passed through `change` when read; for controls."""
        readers = {tap: (lambda read=read: change(read())) for tap, read in self.readers.items()}
        return replace(self, readers=readers)

    def with_state(self, tap: Tap | Stored | str, change: Callable[[Tensor], Tensor]) -> Capture:
        """The same conversation with one state passed through `change` when read."""
        read = self.readers[tap]
        return replace(self, readers={**self.readers, tap: lambda: change(read())})

    def with_final(self, other: Capture) -> Capture:
        """Add the final state of another capture of the same tokens (the incident stored none)."""
        if not torch.equal(self.token_ids, other.token_ids):
            raise CaptureError(
                other.path, "token_ids", expected=f"the tokens of {self.path}",
                found=f"other tokens ({len(other)} against {len(self)})",
                remedy="pair files of the same conversation",
            )  # fmt: skip
        if FINAL not in other.readers:
            raise CaptureError(
                other.path, FINAL, expected="a final state to join", found="none",
                remedy="Capture.split_last() makes the last stored state the final one",
            )  # fmt: skip
        readers = {**self.readers, FINAL: other.readers[FINAL]}
        return replace(self, readers=readers, final_kind=other.final_kind)

    def check_vocab(self, size: int, owner: str) -> None:
        """Raise CaptureError if a token id does not exist in a vocabulary of this size."""
        worst = int(self.token_ids.max())
        if worst >= size:
            raise CaptureError(
                self.path, "token_ids", expected=f"ids below {size}, the vocabulary of {owner}",
                found=f"id {worst}", remedy="use the tokenizer and target of this draft",
            )  # fmt: skip


def open_capture(
    path: str | Path,
    *,
    taps: Names | Mapping[int, Names] | None = None,
    loss_mask: Tensor | None = None,
    layout: str | None = None,
) -> Capture:
    """Open one capture file of any layout in `lib.capture_formats.CAPTURE_FORMATS`.

    Args:
        path: the file; its content decides what it is.
        taps: names of the stored states in stored order, where the layout does not record them; or
            {number of stored states: names} for files of several kinds. Names never replace recorded taps:
            one list that differs from them is an error, an entry of a mapping is noted and not used.
        loss_mask: (L,) for files without one.
        layout: only needed where the content fits two.

    Raises CaptureError for anything that is not a complete, well-formed capture.
    """
    return _open(Path(path), taps, None if loss_mask is None else lambda _file, _ids: loss_mask, layout)


def _open(path: Path, taps, mask_of: MaskOf | None, layout: str | None) -> Capture:
    if not path.is_file():
        raise CaptureError(
            path, "file", expected="a file", found="a folder" if path.is_dir() else "nothing there",
            remedy="check the path; open_folder() reads folders",
        )  # fmt: skip
    capture = _build(path, read_capture(path, layout), mask_of)
    return capture if taps is None else name_taps(capture, taps)


def name_taps(capture: Capture, taps: Names | Mapping[int, Names]) -> Capture:
    """Names for what the file leaves unnamed; what it records stays, for no argument knows better.

    One list that contradicts recorded taps is an error; of a mapping, meant for several kinds of files,
    the entry is left out with a note.
    """
    n, recorded = len(capture.taps), not any(isinstance(t, Stored) for t in capture.taps)
    names = taps.get(n) if isinstance(taps, Mapping) else taps
    if names is None and recorded:
        return capture
    if names is None:
        raise CaptureError(
            capture.path, "taps", expected=f"names for a file of {n} stored states",
            found=f"names for {sorted(taps)}", remedy="add a list of that length",
        )  # fmt: skip
    if not recorded:
        return capture.named(names)
    given = tuple(parse_tap(t) for t in names)
    if given == capture.taps:
        return capture
    if isinstance(taps, Mapping):
        note = f"the file records its taps itself; the {n} names given are not used for it"
        return replace(capture, notes=(*capture.notes, note))
    raise CaptureError(
        capture.path, "taps", expected=f"{list(map(str, capture.taps))}, the taps that the file records",
        found=f"{list(map(str, given))} given",
        remedy="leave taps= out: names are for files that record none",
    )  # fmt: skip


@dataclass(frozen=True)
class CaptureFiles:
    """What a folder holds, before anything is opened.

    Attributes:
        files: the capture files in numeric order, and whatever nothing explains.
        ignored: path below the folder -> why it is no capture.
        masks: folder with the arrow files of a speculators dataset, if the folder is one.
    """

    files: tuple[Path, ...]
    ignored: Mapping[str, str]
    masks: Path | None = None


def capture_files(path: str | Path) -> CaptureFiles:
    """List a folder of captures with its subfolders (`rows_*/` of SpecForge, `rank_*/rows_*/` of AngelSlim).

    A speculators data folder (arrow files, and `hidden_states/` below) brings its loss masks along. Nothing
    is left out without a reason: a file that no rule explains is listed, and opening it is the error.

    Raises CaptureError if there is no such folder, or nothing in it to open.
    """
    path = Path(path)
    if not path.is_dir():
        raise CaptureError(
            path, "folder", expected="a folder of captures", found="no such folder",
            remedy="check the path; open_capture() reads single files",
        )  # fmt: skip
    files: list[Path] = []
    ignored: dict[str, str] = {}
    try:
        _walk(path, path, files, ignored, {path.resolve()})
    except OSError as err:
        raise CaptureError(
            path, "folder", expected="folders that can be listed", found=str(err),
            remedy="check the permissions",
        ) from err  # fmt: skip
    if not files:
        raise CaptureError(
            path, "folder", expected="capture files", found="none",
            remedy="point at the folder that holds data_N.pt or hs_N.safetensors",
        )  # fmt: skip
    return CaptureFiles(tuple(files), ignored, path if arrow_files(path) else None)


def why_ignored(name: str, *, folder: bool) -> str:
    """Why a file or folder of this name holds no captures; "" if it may."""
    rules = IGNORED_FOLDERS if folder else IGNORED
    return next((why for rule, why in rules.items() if re.fullmatch(rule, name)), "")


def _walk(root: Path, folder: Path, files: list[Path], ignored: dict[str, str], seen: set[Path]) -> None:
    children = sorted(folder.iterdir(), key=numeric)
    if not children and folder != root:
        files.append(folder)  # nothing explains it
    for child in children:
        if why := why_ignored(child.name, folder=child.is_dir()):
            ignored[child.relative_to(root).as_posix()] = why
        elif child.is_dir() and child.resolve() in seen:
            ignored[child.relative_to(root).as_posix()] = "link to a folder that is listed already"
        elif child.is_dir():
            seen.add(child.resolve())
            _walk(root, child, files, ignored, seen)
        else:
            files.append(child)


@dataclass(frozen=True)
class CaptureFolder:
    """Everything in a folder.

    Attributes:
        captures: in numeric order.
        ignored: files and folders that are no captures, with reasons.
        skipped: files that should be captures and could not be read, with their errors.
    """

    path: Path
    captures: tuple[Capture, ...]
    ignored: Mapping[str, str]
    skipped: Mapping[str, WorkbookError] = field(default_factory=dict)

    @property
    def notes(self) -> list[str]:
        """Defaults taken, each with the number of files it was taken for."""
        counts: dict[str, int] = {}
        for capture in self.captures:
            for note in capture.notes:
                counts[note] = counts.get(note, 0) + 1
        return [f"{note} ({n} of {len(self.captures)} files)" for note, n in counts.items()]


def open_folder(
    path: str | Path,
    *,
    taps: Names | Mapping[int, Names] | None = None,
    loss_masks: str | Path | None = None,
    limit: int | None = None,
    layout: str | None = None,
    on_error: Literal["raise", "skip"] = "raise",
) -> CaptureFolder:
    """Open every capture of a folder and its subfolders; an unexplained file is an error, not a skip.

    Args:
        path: the folder.
        taps, layout: as in `open_capture`, for all files.
        loss_masks: folder of a speculators arrow dataset whose row N belongs to `hs_N.safetensors`; a
            speculators data folder brings its own.
        limit: open at most this many, in numeric order.
        on_error: "skip" collects the errors of single files in `skipped` and goes on.
    """
    if on_error not in ("raise", "skip"):
        raise CaptureError(
            path, "on_error", expected="'raise' or 'skip'", found=repr(on_error), remedy="see the docstring",
        )  # fmt: skip
    path = Path(path)
    listed = capture_files(path)
    masks = Path(loss_masks) if loss_masks else listed.masks
    mask_of = ArrowMasks(masks).of if masks else None
    names = _file_names(path, listed.files)
    captures: list[Capture] = []
    skipped: dict[str, WorkbookError] = {}
    for file in listed.files:
        if limit is not None and len(captures) >= limit:
            break
        try:
            captures.append(replace(_open(file, taps, mask_of, layout), name=names[file]))
        except WorkbookError as err:
            if on_error == "raise":
                raise
            skipped[file.relative_to(path).as_posix()] = err
    if skipped and not captures:
        raise CaptureError(
            path, "folder", expected="at least one capture that can be read",
            found=f"{len(skipped)} refused, the first: {next(iter(skipped.values()))}",
            remedy="open one of them alone with open_capture()",
        )  # fmt: skip
    return CaptureFolder(path, tuple(captures), listed.ignored, skipped)


def _file_names(root: Path, files: Sequence[Path]) -> dict[Path, str]:
    """A name for each file: without its suffix, with its folder, unique."""
    short = {f: f.relative_to(root).parent.joinpath(_stem(f)).as_posix() for f in files}
    count = Counter(short.values())
    return {f: name if count[name] == 1 else f.relative_to(root).as_posix() for f, name in short.items()}


def _stem(path: Path) -> str:
    """`data_3` of `data_3.ckpt.gz`."""
    return path.name.removesuffix(".gz").removesuffix(".ckpt") if path.suffix == ".gz" else path.stem


def save_capture(
    path: Path,
    *,
    token_ids: Tensor,
    loss_mask: Tensor,
    states: Mapping[Tap, Tensor],
    final: Tensor | None = None,
    final_kind: str | None = None,
) -> None:
    """Write our own layout: `token_ids`, `loss_mask`, `tap.K` per tap, `final`; metadata says the rest."""
    tensors = {"token_ids": token_ids.to(torch.int32), "loss_mask": loss_mask.to(torch.uint8)}
    tensors |= {f"tap.{tap.after_block}": states[tap].contiguous() for tap in states}
    if final is not None:
        tensors[FINAL] = final.contiguous()
    metadata = {"format": FORMAT, "version": "1", "final_kind": final_kind or ""}
    save_file(tensors, path, metadata=metadata)


def _build(path: Path, content: Content, mask_of: MaskOf | None) -> Capture:
    """Checks that every layout shares; the only place a Capture is made."""
    ids, mask, notes = content.token_ids, content.loss_mask, list(content.notes)
    if int(ids.min()) < 0:
        raise CaptureError(
            path, "token ids", expected="ids from 0", found=f"id {int(ids.min())}",
            remedy="remove the padding or ignore-index ids before capturing",
        )  # fmt: skip
    if mask is None and mask_of is not None:
        mask = mask_of(path, ids)
    elif mask is None:
        mask = torch.ones(len(ids))
        notes.append(NO_MASK)
    elif mask_of is not None:
        notes.append("loss mask of the file itself; the one given beside it is not used")
    if mask.shape != ids.shape:
        raise CaptureError(
            path, "loss_mask", expected=f"one value per token ({len(ids)})",
            found=str(tuple(mask.shape)), remedy="pair the file with the mask of its own row",
        )  # fmt: skip
    if not ((mask == 0) | (mask == 1)).all():
        raise CaptureError(
            path, "loss_mask", expected="zeros and ones", found=f"values up to {mask.double().max():g}",
            remedy="store the mask as 0/1",
        )  # fmt: skip
    if not mask.any():
        raise CaptureError(
            path, "loss_mask", expected="at least one scored token", found="all zeros",
            remedy="check the chat template used to find the assistant's turns (fault 33)",
        )  # fmt: skip
    return Capture(
        _stem(path), path, content.layout, ids.long(), mask.bool(), tuple(content.names), content.hidden_size,
        dict(content.readers), content.final_kind, tuple(notes),
    )  # fmt: skip
