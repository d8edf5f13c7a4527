"""Captures: what was recorded of the target, read lazily and accounted for completely.

Three layouts are read here (formats_and_faults A.1):

| layout | file | states |
|---|---|---|
| `speculators-legacy` | `data_N.pt` | list of [L, H]; the last one is the trainer's "verifier last" |
| `speculators` / vLLM | `hs_N.safetensors` | one tensor [L, k, H]; loss mask in an arrow dataset |
| `workbook` | `*.safetensors` with our metadata | `tap.K` [L, H] each, and `final` [L, H] |

The first two do not say which taps they hold. Say it with `taps=`; otherwise the states are called
`stored0`, `stored1`, ... and every report shows that nobody named them.

Axes: L positions, H target hidden size, k stored states.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from lib.errors import CaptureError
from lib.taps import Stored, Tap, parse_tap
from lib.weights import load_pickle

FORMAT = "eagle3-workbook-capture"
FINAL = "final"
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
# Files that frameworks leave beside captures, and why they are not captures.
IGNORED = {
    r".*\.lock": "lock file of a writer",
    r"sample_lengths\.json": "speculators: lengths, recomputed here",
    r"token_freq\.pt": "speculators: token counts for the draft vocabulary",
    r"README.*|LICENSE.*|manifest\.json": "documentation",
}


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
        final_kind: "pre_norm" or "post_norm" for the state returned by `final()`; None if absent.
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
        tap = tap if tap == FINAL else parse_tap(tap)
        if tap not in self.readers:
            raise CaptureError(
                self.path, str(tap), expected=f"one of the stored {[str(t) for t in self.readers]}",
                found="no such state", remedy="choose a stored tap, or recapture with this one",
            )  # fmt: skip
        states = self.readers[tap]()
        # One NaN or Inf makes the sum one too; only then is it worth looking at every value.
        if torch.isfinite(states.sum(dtype=torch.float64)):
            return states
        bad = ~torch.isfinite(states)
        if bad.any():
            row = int(bad.any(-1).nonzero()[0, 0])
            raise CaptureError(
                self.path, str(tap), expected="finite numbers",
                found=f"{int(bad.sum())} NaN or Inf values, the first in position {row}",
                remedy="recapture in bf16 or fp32 (fp16 overflows at 65504), or drop this file",
            )  # fmt: skip
        return states

    def stored(self, index: int) -> Tensor:
        """The index-th stored state (negative counts from the end), whatever its name."""
        return self.state(self.taps[index])

    def final(self) -> Tensor:
        """The target's last state, (L, H); `final_kind` says whether the final norm is in it."""
        return self.state(FINAL)

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

    def with_final(self, other: Capture) -> Capture:
        """Add the final state of another capture of the same tokens (the incident stored none)."""
        if not torch.equal(self.token_ids, other.token_ids):
            raise CaptureError(
                other.path, "token_ids", expected=f"the tokens of {self.path}",
                found=f"other tokens ({len(other)} against {len(self)})",
                remedy="pair files of the same conversation",
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
    taps: Sequence[Tap | Stored | str | int] | None = None,
    loss_mask: Tensor | None = None,
) -> Capture:
    """Open one capture file of any supported layout.

    Args:
        path: `data_N.pt`, `hs_N.safetensors`, or our own `*.safetensors`.
        taps: names of the stored states in stored order, where the layout does not record them.
        loss_mask: (L,) for layouts without one.

    Raises CaptureError for anything that is not a complete, well-formed capture.
    """
    path = Path(path)
    if not path.is_file():
        raise CaptureError(
            path, "file", expected="a file", found="a folder" if path.is_dir() else "nothing there",
            remedy="check the path; open_folder() reads folders",
        )  # fmt: skip
    if path.suffix == ".safetensors":
        capture = _open_safetensors(path, loss_mask)
    elif path.suffix == ".pt":
        capture = _open_legacy(path)
    else:
        raise CaptureError(
            path, "suffix", expected=".pt or .safetensors", found=repr(path.suffix),
            remedy="convert the capture, or rename it if the suffix is wrong",
        )  # fmt: skip
    return capture.named(taps) if taps is not None else capture


@dataclass(frozen=True)
class CaptureFolder:
    """Everything in a folder: captures in numeric order, and the files that are not, with reasons."""

    path: Path
    captures: tuple[Capture, ...]
    ignored: Mapping[str, str]

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
    taps: Sequence[Tap | Stored | str | int] | None = None,
    loss_masks: str | Path | None = None,
    limit: int | None = None,
) -> CaptureFolder:
    """Open every capture of a folder; an unexplained file is an error, not a skip.

    Args:
        path: the folder.
        taps: as in `open_capture`, for all files.
        loss_masks: folder of a speculators arrow dataset whose row N belongs to `hs_N.safetensors`.
        limit: read at most this many, in numeric order.
    """
    path = Path(path)
    if not path.is_dir():
        raise CaptureError(
            path, "folder", expected="a folder of captures", found="no such folder",
            remedy="check the path; open_capture() reads single files",
        )  # fmt: skip
    ignored, files = {}, []
    for file in sorted(path.iterdir(), key=_numeric):
        why = next((why for rule, why in IGNORED.items() if re.fullmatch(rule, file.name)), None)
        if why:
            ignored[file.name] = why
        else:
            files.append(file)
    if not files:
        raise CaptureError(
            path, "folder", expected="capture files", found="none",
            remedy="point at the folder that holds data_N.pt or hs_N.safetensors",
        )  # fmt: skip
    masks = _ArrowMasks(Path(loss_masks)) if loss_masks else None
    captures = [
        open_capture(file, taps=taps, loss_mask=masks.of(file) if masks else None) for file in files[:limit]
    ]
    return CaptureFolder(path, tuple(captures), ignored)


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


def _numeric(path: Path) -> tuple[int, str]:
    number = re.search(r"(\d+)(?!.*\d)", path.stem)
    return (int(number[1]) if number else -1, path.name)


def _build(path, layout, ids, mask, names, readers, hidden_size, final_kind=None, notes=()):
    """Checks that every layout shares; the only place a Capture is made."""
    if int(ids.min()) < 0:
        raise CaptureError(
            path, "token ids", expected="ids from 0", found=f"id {int(ids.min())}",
            remedy="remove the padding or ignore-index ids before capturing",
        )  # fmt: skip
    if mask.shape != ids.shape:
        raise CaptureError(
            path, "loss_mask", expected=f"one value per token ({len(ids)})",
            found=str(tuple(mask.shape)), remedy="pair the file with the mask of its own row",
        )  # fmt: skip
    if not ((mask == 0) | (mask == 1)).all():
        raise CaptureError(
            path, "loss_mask", expected="zeros and ones", found=f"values up to {mask.max()}",
            remedy="store the mask as 0/1",
        )  # fmt: skip
    if not mask.any():
        raise CaptureError(
            path, "loss_mask", expected="at least one scored token", found="all zeros",
            remedy="check the chat template used to find the assistant's turns (fault 33)",
        )  # fmt: skip
    return Capture(
        path.stem, path, layout, ids.long(), mask.bool(), tuple(names), hidden_size,
        dict(readers), final_kind, tuple(notes),
    )  # fmt: skip


def _check_ids(path: Path, ids: Tensor) -> None:
    if ids.ndim != 1 or ids.dtype.is_floating_point or ids.dtype == torch.bool or len(ids) == 0:
        raise CaptureError(
            path, "token ids", expected="a non-empty 1-D integer tensor",
            found=f"{tuple(ids.shape)} {ids.dtype}", remedy="recapture; this is not a list of tokens",
        )  # fmt: skip


def _check_states(path: Path, name: str, shape: tuple[int, ...], dtype, length: int) -> None:
    if dtype not in FLOATS:
        raise CaptureError(
            path, name, expected="a floating-point state", found=str(dtype),
            remedy="recapture without quantising, or dequantise first",
        )  # fmt: skip
    if shape[0] != length:
        raise CaptureError(
            path, name, expected=f"{length} rows, one per token", found=f"{shape[0]} rows",
            remedy="chunked prefill or prefix caching dropped rows (fault 29): recapture without",
        )  # fmt: skip


def _open_safetensors(path: Path, loss_mask: Tensor | None) -> Capture:
    try:
        with safe_open(path, "pt") as f:
            metadata = f.metadata() or {}
            keys = sorted(f.keys())
            shapes = {k: tuple(f.get_slice(k).get_shape()) for k in keys}
    except (SafetensorError, OSError) as err:
        raise CaptureError(
            path, "header", expected="a complete safetensors file", found=str(err),
            remedy="copy or write the file again; it is truncated, empty or another format",
        ) from err  # fmt: skip
    if metadata.get("format") == FORMAT:
        return _open_workbook(path, metadata, keys, shapes)
    expected = {"hidden_states", "token_ids"}
    _explain_keys(path, set(keys), expected)
    with safe_open(path, "pt") as f:
        ids, dtype = f.get_tensor("token_ids"), f.get_slice("hidden_states").get_dtype()
    _check_ids(path, ids)
    shape = shapes["hidden_states"]
    if len(shape) != 3:
        raise CaptureError(
            path, "hidden_states", expected="[positions, states, hidden size]", found=str(shape),
            remedy="this is not a speculators / vLLM capture; see formats A.1 for look-alikes",
        )  # fmt: skip
    _check_states(path, "hidden_states", shape, _TORCH_DTYPES.get(dtype, dtype), len(ids))
    notes = ["taps not recorded in the file"]
    if loss_mask is None:
        loss_mask = torch.ones(len(ids))
        notes.append("no loss mask given: every position counts, the prompt too")

    def reader(i: int) -> Callable[[], Tensor]:
        def read() -> Tensor:
            with safe_open(path, "pt") as f:
                return f.get_slice("hidden_states")[:, i]

        return read

    names = [Stored(i) for i in range(shape[1])]
    readers = {name: reader(name.index) for name in names}
    return _build(path, "speculators", ids, loss_mask, names, readers, shape[2], notes=notes)


_TORCH_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}


def _open_workbook(path: Path, metadata: dict, keys: list[str], shapes: dict) -> Capture:
    taps = sorted(Tap(int(m[1])) for k in keys if (m := re.fullmatch(r"tap\.(\d+)", k)))
    states = {tap: f"tap.{tap.after_block}" for tap in taps}
    states |= {FINAL: FINAL} if FINAL in keys else {}
    _explain_keys(path, set(keys), {"token_ids", "loss_mask", *states.values()})
    kind = metadata.get("final_kind") or None
    if FINAL in keys and kind not in ("pre_norm", "post_norm"):
        raise CaptureError(
            path, "metadata final_kind", expected="pre_norm or post_norm", found=repr(kind),
            remedy="write the file with save_capture(final_kind=...)",
        )  # fmt: skip

    def reader(key: str) -> Callable[[], Tensor]:
        def read() -> Tensor:
            with safe_open(path, "pt") as f:
                return f.get_tensor(key)

        return read

    with safe_open(path, "pt") as f:
        ids, mask = f.get_tensor("token_ids"), f.get_tensor("loss_mask")
        _check_ids(path, ids)
        for key in states.values():
            if len(shapes[key]) != 2:
                raise CaptureError(
                    path, key, expected="[positions, hidden size]", found=str(shapes[key]),
                    remedy="write the file with save_capture()",
                )  # fmt: skip
            dtype = f.get_slice(key).get_dtype()
            dtype = _TORCH_DTYPES.get(dtype, dtype)  # the file's own name if it is no float
            _check_states(path, key, shapes[key], dtype, len(ids))
    widths = {shapes[key][1] for key in states.values()}
    if len(widths) != 1:
        raise CaptureError(
            path, "states", expected="at least one state, all of one hidden size",
            found=f"widths {sorted(widths)}", remedy="write the file with save_capture()",
        )  # fmt: skip
    readers = {tap: reader(key) for tap, key in states.items()}
    return _build(path, "workbook", ids, mask, taps, readers, widths.pop(), kind)


def _open_legacy(path: Path) -> Capture:
    data = load_pickle(path, CaptureError)
    if not isinstance(data, dict):
        raise CaptureError(
            path, "file", expected="a dict", found=type(data).__name__,
            remedy="this is not a speculators data_N.pt",
        )  # fmt: skip
    _explain_keys(path, set(map(str, data)), {"input_ids", "loss_mask", "hidden_states"})
    for key in ("input_ids", "loss_mask"):
        if not isinstance(data[key], Tensor):
            raise CaptureError(
                path, key, expected="a tensor", found=type(data[key]).__name__,
                remedy="save it with torch.save as a tensor",
            )  # fmt: skip
    states = data["hidden_states"]
    if not isinstance(states, list) or not states or not all(isinstance(s, Tensor) for s in states):
        raise CaptureError(
            path, "hidden_states", expected="a list of [positions, hidden size] tensors",
            found=type(states).__name__, remedy="this is not the legacy list format; see formats A.1",
        )  # fmt: skip
    ids = data["input_ids"]
    _check_ids(path, ids)
    for i, state in enumerate(states):
        name = f"hidden_states[{i}]"
        if state.ndim != 2 or state.shape[1] != states[0].shape[1]:
            raise CaptureError(
                path, name, expected=f"[positions, {states[0].shape[-1]}] like hidden_states[0]",
                found=str(tuple(state.shape)), remedy="the list is ragged: recapture this sample",
            )  # fmt: skip
        _check_states(path, name, tuple(state.shape), state.dtype, len(ids))
    names = [Stored(i) for i in range(len(states))]
    readers = {name: (lambda s=states[name.index]: s) for name in names}
    notes = ["taps not recorded in the file"]
    width = states[0].shape[1]
    return _build(path, "speculators-legacy", ids, data["loss_mask"], names, readers, width, notes=notes)


def _explain_keys(path: Path, found: set[str], expected: set[str]) -> None:
    missing, unexpected = sorted(expected - found), sorted(found - expected)
    if missing or unexpected:
        raise CaptureError(
            path, "keys", expected=str(sorted(expected)),
            found=f"missing {missing}, unexpected {unexpected}",
            remedy="this file belongs to another framework, or its writer was interrupted",
        )  # fmt: skip


class _ArrowMasks:
    """Loss masks of a preprocessed speculators dataset (arrow files), row N for `hs_N`."""

    def __init__(self, folder: Path) -> None:
        import pyarrow as pa

        # `datasets` leaves cache-*.arrow files of later `map` calls beside the data-*.arrow ones.
        files = [f for f in sorted(folder.glob("*.arrow")) if not f.name.startswith("cache-")]
        if not files:
            raise CaptureError(
                folder, "loss_masks", expected="a dataset folder with *.arrow files", found="none",
                remedy="pass the folder that speculators' data preparation wrote",
            )  # fmt: skip
        tables = []
        for file in files:
            try:
                tables.append(pa.ipc.open_stream(pa.memory_map(str(file))).read_all())
            except (pa.ArrowInvalid, OSError) as err:
                raise CaptureError(
                    file, "arrow stream", expected="an arrow stream as `datasets` writes it",
                    found=str(err), remedy="write the dataset again with save_to_disk",
                ) from err  # fmt: skip
        self.table, self.folder = pa.concat_tables(tables), folder
        if "loss_mask" not in self.table.column_names:
            raise CaptureError(
                folder, "loss_mask", expected="a column of that name",
                found=str(self.table.column_names), remedy="preprocess the dataset with a loss mask",
            )  # fmt: skip

    def of(self, file: Path) -> Tensor:
        row = _numeric(file)[0]
        if not 0 <= row < len(self.table):
            raise CaptureError(
                file, "row", expected=f"a number below {len(self.table)}, rows of {self.folder}",
                found=str(row), remedy="validation files start at an offset: pass their own dataset",
            )  # fmt: skip
        return torch.tensor(self.table.column("loss_mask")[row].as_py())
