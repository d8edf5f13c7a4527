"""Capture files of every framework: what a file could be, and one reader per layout.

| layout | writer's file | values |
|---|---|---|
| `speculators-legacy` | `data_N.pt` | `input_ids`, `loss_mask`, `hidden_states`: list of [L, H] |
| `speculators` / vLLM | `hs_N.safetensors` | `token_ids`, `hidden_states` [L, k, H]; no mask |
| `workbook` | `*.safetensors` with our metadata | `token_ids`, `loss_mask`, `tap.K` [L, H], `final` [L, H] |
| `specforge` | `data_N.ckpt`, `.ckpt.gz` | `aux_hidden_state` [1, L, kH], `hidden_state` [1, L, H] the last |
| `modelopt` | `<conversation>.pt` | `aux_hidden_states` [L, kH], `hidden_states` [L, H] the last |
| `angelslim` | `data_N.ckpt` | `hidden_states` [1, L, kH] aux, `target_hiddens` [1, L, H] the last |
| `baldeagle` | `data_N.ckpt` | `hidden_state` [1, L, kH] aux, `target_hidden_states` [1, L, H] the last |

The same word means opposite things (`hidden_state`, `hidden_states`), so keys, shapes and dtypes decide,
never the suffix. Sources: formats_and_faults A.1; SpecForge `specforge/algorithms/eagle3/data.py`,
Model-Optimizer `collect_hidden_states/*.py`, AngelSlim `tools/generate_hidden_for_draft_model.py`, BaldEagle
`generate_data.py`.

Axes: L positions, H target hidden size, k stored states.
"""

from __future__ import annotations

import gzip
import re
import tempfile
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Literal

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from lib.errors import CaptureError
from lib.formats import Match, only
from lib.taps import Stored, Tap
from lib.weights import load_pickle

FORMAT = "eagle3-workbook-capture"
FINAL = "final"
UNNAMED = "taps not recorded in the file"
# NeMo Automodel components/speculative/precompute_eagle3.py: whole, or compressed to the top k.
SUPERVISION = ("target_probs", "target_probs_values", "target_probs_indices", "position_mask")
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTEGERS = {
    *(
        torch.uint8,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.uint16,
        torch.uint32,
        torch.uint64,
    ),
    *("U8", "I8", "I16", "I32", "I64", "U16", "U32", "U64"),
}
BOOLEANS = {torch.bool, "BOOL"}
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# A gzip file may unpack to this many times its size, and always to this many bytes.
GZIP_RATIO, GZIP_FLOOR = 20, 64 << 20


@dataclass(frozen=True)
class Content:
    """What one file holds, before it becomes a `Capture`.

    Attributes:
        layout: one of CAPTURE_FORMATS.
        token_ids: (L,) integers.
        loss_mask: (L,) or None where the file has none.
        names: of the stored states, in stored order.
        readers: name (or FINAL) -> function that reads the state, (L, H).
        hidden_size: H.
        final_kind: only where the format (or the file) fixes it.
        notes: every default that was taken.
    """

    layout: str
    token_ids: Tensor
    loss_mask: Tensor | None
    names: tuple[Tap | Stored, ...]
    readers: Mapping[Tap | Stored | str, Callable[[], Tensor]] = field(repr=False)
    hidden_size: int
    final_kind: Literal["pre_norm", "post_norm"] | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Layout:
    """One layout: the keys it needs and may have, how its shapes look, and its reader.

    Attributes:
        needs: keys that every file of it has.
        may: further keys -> what is done with them ("" if they are read).
        fits: (source) -> evidence from shapes and types, or None if they speak against it.
        read: (source, surplus notes) -> Content.
    """

    needs: frozenset[str]
    may: Mapping[str, str]
    fits: Callable[[Source], tuple[str, ...] | None]
    read: Callable[[Source], Content]


@dataclass(frozen=True)
class Pair:
    """A layout of two float states: aux [.., L, k*H] and last [.., L, H]."""

    name: str
    aux: str
    last: str
    final_kind: Literal["post_norm"] | None
    about_final: str
    notes: tuple[str, ...] = ()


_UNSAID = "the format does not say whether its last state is before or after the final norm"
PAIRS = (
    Pair(
        "specforge", "aux_hidden_state", "hidden_state", "post_norm",
        "last state taken as post-norm: SpecForge feeds it straight to lm_head (target_head.py)",
        # No pair ends at the last token, so zeroing its mask changes no scored position here.
        ("loss mask as stored; SpecForge zeroes its last element at load (algorithms/eagle3/data.py), and "
         "scores the pair at t by mask[t], not mask[t + 1]",),
    ),
    Pair(
        "modelopt", "aux_hidden_states", "hidden_states", None,
        f"{_UNSAID} (Model-Optimizer: Hugging Face dumps post-norm, vLLM dumps pre-norm)",
    ),
    Pair(
        "angelslim", "hidden_states", "target_hiddens", None,
        f"{_UNSAID} (AngelSlim: outputs.hidden_states[-1])",
    ),
    Pair(
        "baldeagle", "hidden_state", "target_hidden_states", "post_norm",
        "last state taken as post-norm: BaldEagle stores transformers' hidden_states[-1] (generate_data.py)",
    ),
)  # fmt: skip
_PAIR_OF = {p.name: p for p in PAIRS}


# ---- containers: safetensors, torch.save, gzip around it --------------------------------------


@dataclass(frozen=True)
class Value:
    """One named value of a file, not read yet.

    Attributes:
        shape: of a tensor; None if it is none.
        dtype: torch's, or the file's own name for one that is no float.
        read: (index) -> the tensor, or that part of it; None reads all.
        kind: the type's name, for messages.
        parts: the members of a list, each a Value; None if it is no list.
    """

    shape: tuple[int, ...] | None
    dtype: torch.dtype | str | None
    read: Callable[..., Tensor] = field(repr=False)
    kind: str = "Tensor"
    parts: tuple[Value, ...] | None = None


@dataclass(frozen=True)
class Source:
    """An open file: its values by name, and its metadata (safetensors only)."""

    path: Path
    values: Mapping[str, Value]
    metadata: Mapping[str, str] = field(default_factory=dict)


def open_source(path: Path) -> Source:
    """Open a file by its first bytes; the suffix only words the error where they say nothing.

    Raises CaptureError for what is no container of tensors, is truncated, or holds code.
    """
    try:
        with open(path, "rb") as f:
            head = f.read(9)
    except OSError as err:
        raise CaptureError(
            path, "file", expected="a readable file", found=str(err),
            remedy="check the path and its permissions",
        ) from err  # fmt: skip
    if head[:2] == b"\x1f\x8b":
        return _open_gzip(path)
    pickled = head[:4] == b"PK\x03\x04" or head[:1] == b"\x80"
    if not pickled and (head[8:9] == b"{" or path.suffix == ".safetensors"):
        return _open_safetensors(path)
    if pickled or path.name.endswith((".pt", ".ckpt", ".ckpt.gz")):
        return Source(path, _values(path, _load_pickle(path)))
    raise CaptureError(
        path, "suffix", expected=".pt or .safetensors, .ckpt or .ckpt.gz", found=repr(path.suffix),
        remedy="convert the capture, or rename it if the suffix is wrong",
    )  # fmt: skip


def _open_safetensors(path: Path) -> Source:
    def reader(name: str) -> Callable[..., Tensor]:
        def read(index=None) -> Tensor:
            with safe_open(path, "pt") as f:
                return f.get_tensor(name) if index is None else f.get_slice(name)[index]

        return read

    values = {}
    try:
        with safe_open(path, "pt") as f:
            metadata = f.metadata() or {}
            for name in sorted(f.keys()):
                part = f.get_slice(name)
                dtype = part.get_dtype()
                values[name] = Value(tuple(part.get_shape()), _DTYPES.get(dtype, dtype), reader(name))
    except (SafetensorError, OSError) as err:
        raise CaptureError(
            path, "header", expected="a complete safetensors file", found=str(err),
            remedy="copy or write the file again; it is truncated, empty or another format",
        ) from err  # fmt: skip
    return Source(path, values, metadata)


def _load_pickle(path: Path, stored_as: Path | None = None):
    """The object in a torch.save file; errors name `path` though the bytes may be stored elsewhere."""
    with tempfile.TemporaryDirectory() as folder:
        if stored_as is None and path.suffix == ".safetensors":
            # torch.load believes this suffix, whatever the content is.
            stored_as = Path(folder) / "content.pt"
            stored_as.symlink_to(path.resolve())
        try:
            return load_pickle(stored_as or path, CaptureError)
        except CaptureError as err:
            raise CaptureError(
                path, err.field, expected=err.expected, found=err.found, remedy=err.remedy
            ) from err  # fmt: skip


def _values(path: Path, data) -> dict[str, Value]:
    if not isinstance(data, dict):
        raise CaptureError(
            path, "file", expected="a dict", found=type(data).__name__,
            remedy="this is not a speculators data_N.pt, nor any other framework's capture",
        )  # fmt: skip
    return {str(name): _value(value) for name, value in data.items()}


def _value(value, *, deep: bool = True) -> Value:
    if isinstance(value, Tensor) and value.layout == torch.strided and value.device.type == "cpu":
        value, shape = value.detach(), tuple(value.shape)
        return Value(shape, value.dtype, lambda index=None: value if index is None else value[index])
    # One level only: a list in a pickle may hold itself.
    parts = tuple(_value(v, deep=False) for v in value) if deep and isinstance(value, list) else None
    kind = f"{value.layout} {value.device} tensor" if isinstance(value, Tensor) else type(value).__name__
    return Value(None, None, lambda index=None: value, kind, parts)


def _open_gzip(path: Path) -> Source:
    """`torch.save` inside gzip (SpecForge). Unpacked to look at it, and again when a state is read."""
    stamp = (path, path.stat().st_mtime_ns, path.stat().st_size)
    data = _unpacked(*stamp)

    def lazy(name: str, value: Value) -> Value:
        # Only the shapes stay in memory: a folder of such files would not fit there.
        read = lambda index=None: _unpacked(*stamp)[name].read(index).clone()  # noqa: E731
        return replace(value, read=read) if value.shape is not None else value

    return Source(path, {name: lazy(name, value) for name, value in data.items()})


@lru_cache(maxsize=1)
def _unpacked(path: Path, _mtime: int, size: int) -> dict[str, Value]:
    limit = max(GZIP_FLOOR, GZIP_RATIO * size)
    with tempfile.NamedTemporaryFile(suffix=".ckpt") as out:
        try:
            with gzip.open(path, "rb") as f:
                while block := f.read(1 << 20):
                    out.write(block)
                    if out.tell() > limit:
                        break
        except (OSError, EOFError, zlib.error) as err:
            raise CaptureError(
                path, "gzip", expected="a complete gzip file", found=str(err) or type(err).__name__,
                remedy="copy or write the file again; it is truncated or damaged",
            ) from err  # fmt: skip
        if out.tell() > limit:
            raise CaptureError(
                path, "gzip", expected=f"at most {limit >> 20} MiB ({GZIP_RATIO} times the file, but never "
                f"below {GZIP_FLOOR >> 20} MiB): states are numbers that hardly compress",
                found="more when unpacked", remedy="do not unpack it: it is no capture; a real one fits",
            )  # fmt: skip
        out.flush()
        # The mapping outlives the name, so the unpacked bytes need no room in memory.
        data = _load_pickle(path, Path(out.name))
    return _values(path, data)


# ---- recognising ------------------------------------------------------------------------------


def recognise(path: str | Path) -> list[Match]:
    """Every layout that the file could be, by keys, shapes and dtypes; empty if none.

    Raises CaptureError for a file that cannot be opened, or that holds something refused by name
    (fp8 states, a cache of target probabilities, EAGLE-1 data).
    """
    source = open_source(Path(path))
    _refuse_by_name(source)
    return _matches(source)


def read_capture(path: Path, layout: str | None = None) -> Content:
    """Read one file, of the layout that its content says (or that the caller insists on).

    Raises CaptureError: unreadable, of no known layout, of several, or malformed within its layout.
    """
    if layout is not None and layout not in LAYOUTS:
        raise CaptureError(
            path, "layout", expected=f"one of {list(CAPTURE_FORMATS)}", found=repr(layout),
            remedy="leave it out: the content decides unless two layouts fit",
        )  # fmt: skip
    source = open_source(path)
    _refuse_by_name(source)
    matches = _matches(source)
    if not matches:
        # Nothing fits whole: the layout with the nearest keys says what is wrong with the file.
        near = _nearest(source, layout)
        if near:
            matches = [Match(near, ("the nearest by its keys",))]
    match = only(
        path,
        matches,
        CaptureError,
        wanted=layout,
        known=CAPTURE_FORMATS,
        seen=f"keys {sorted(source.values)}",
    )
    chosen = LAYOUTS[match.format]
    # The keys of our own files depend on their taps: that reader accounts for them itself.
    notes = _explain(source, chosen, layout) if match.format != "workbook" else []
    content = chosen.read(source)
    return Content(**{**vars(content), "notes": (*content.notes, *notes)})


def _matches(source: Source) -> list[Match]:
    if source.metadata.get("format") == FORMAT:
        return [Match("workbook", (f"metadata format {FORMAT}",))]
    found = []
    for name, layout in LAYOUTS.items():
        if name != "workbook" and layout.needs <= set(source.values):
            shapes = layout.fits(source)
            if shapes is not None:
                found.append(Match(name, (f"keys {', '.join(sorted(layout.needs))}", *shapes)))
    return found


def _nearest(source: Source, layout: str | None) -> str | None:
    """The layout whose keys are nearest, if any key is shared; ties go to the earlier one."""
    keys = set(source.values)
    candidates = [n for n in LAYOUTS if n != "workbook" and layout in (None, n) and LAYOUTS[n].needs & keys]

    def distance(name: str) -> int:
        layout = LAYOUTS[name]
        shaped = layout.needs <= keys and layout.fits(source) is not None
        surplus = keys - layout.needs - set(layout.may)
        return len(layout.needs - keys) + len(surplus) + (layout.needs <= keys and not shaped)

    return min(candidates, key=distance, default=None)


def _refuse_by_name(source: Source) -> None:
    found = [key for key in SUPERVISION if key in source.values]
    if found:
        raise CaptureError(
            source.path, found[0], expected="hidden states, the target's last one among them",
            found="NeMo Automodel's precomputed cache: target probabilities over the draft vocabulary",
            remedy="capture states instead: the target's own state cannot be had from this cache",
        )  # fmt: skip
    for name, value in source.values.items():
        parts = value.parts if value.parts is not None else (value,)
        for i, part in enumerate(parts):
            if "float8" in str(part.dtype) or str(part.dtype).startswith("F8_"):
                where = name if value.parts is None else f"{name}[{i}]"
                raise CaptureError(
                    source.path, where, expected="fp16, bf16, fp32 or fp64",
                    found=f"fp8 data ({part.dtype})",
                    remedy="dequantise first: scales of speculators' unmerged fp8 branch are not read here",
                )  # fmt: skip
    state = source.values.get("hidden_state")
    if set(source.values) == {"input_ids", "loss_mask", "hidden_state"} and state.shape is not None:
        raise CaptureError(
            source.path, "hidden_state", expected="a state for the draft's slots besides the last one",
            found="EAGLE-1 data (EAGLE, BaldEagle): the last state alone",
            remedy="capture with the aux states of EAGLE-3",
        )  # fmt: skip


def _explain(source: Source, layout: Layout, asked: str | None) -> list[str]:
    """Account for every key; notes on those that are known and not read."""
    keys = set(source.values)
    extra = keys - layout.needs - set(layout.may)
    notes = [f"{key}: {why}" for key, why in sorted(layout.may.items()) if why and key in keys]
    if asked:
        # The caller chose between two layouts: keys of the other one are surplus, not a surprise.
        others = extra & set().union(*(other.needs for other in LAYOUTS.values()))
        notes += [f"{key}: not read, it belongs to another layout than {asked}" for key in sorted(others)]
        extra -= others
    if layout.needs - keys or extra:
        raise CaptureError(
            source.path, "keys", expected=str(sorted(layout.needs)),
            found=f"missing {sorted(layout.needs - keys)}, unexpected {sorted(extra)}",
            remedy="this file belongs to another framework, or its writer was interrupted",
        )  # fmt: skip
    return notes


# ---- checks that layouts share ----------------------------------------------------------------


def _tensor(source: Source, key: str) -> Value:
    value = source.values[key]
    if value.shape is None:
        raise CaptureError(
            source.path, key, expected="a tensor", found=value.kind,
            remedy="save it with torch.save as a tensor",
        )  # fmt: skip
    return value


def _ids(source: Source, key: str, *, batch: bool = False) -> Tensor:
    """(L,) token ids as int64; with `batch`, a leading axis of one is taken off."""
    value = _tensor(source, key)
    shape = _rows(source, key, 1)[1] if batch else value.shape
    if len(shape) != 1 or value.dtype not in INTEGERS or shape[0] == 0:
        raise CaptureError(
            source.path, "token ids", expected="a non-empty 1-D integer tensor",
            found=f"{value.shape} {value.dtype}", remedy="recapture; this is not a list of tokens",
        )  # fmt: skip
    return value.read().reshape(shape).long()


def _mask(source: Source, *, batch: bool = False) -> Tensor:
    """The loss mask as it is stored; `captures` checks its length and values."""
    value = _tensor(source, "loss_mask")
    shape = _rows(source, "loss_mask", 1)[1] if batch else value.shape
    if value.dtype not in {*INTEGERS, *BOOLEANS, *FLOATS}:
        raise CaptureError(
            source.path, "loss_mask", expected="zeros and ones", found=str(value.dtype),
            remedy="store the mask as 0/1",
        )  # fmt: skip
    return value.read().reshape(shape)


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
    if 0 in shape:
        raise CaptureError(
            path, name, expected="no empty axis", found=str(shape),
            remedy="recapture; the state is empty",
        )  # fmt: skip


# ---- speculators and vLLM ---------------------------------------------------------------------


def _read_stack(source: Source) -> Content:
    path, stack = source.path, _tensor(source, "hidden_states")
    ids = _ids(source, "token_ids")
    if len(stack.shape) != 3:
        raise CaptureError(
            path, "hidden_states", expected="[positions, states, hidden size]", found=str(stack.shape),
            remedy="this is not a speculators / vLLM capture; see formats A.1 for look-alikes",
        )  # fmt: skip
    _check_states(path, "hidden_states", stack.shape, stack.dtype, len(ids))
    names = tuple(Stored(i) for i in range(stack.shape[1]))
    readers = {name: (lambda i=name.index: stack.read((slice(None), i))) for name in names}
    return Content("speculators", ids, None, names, readers, stack.shape[2], notes=(UNNAMED,))


def _read_legacy(source: Source) -> Content:
    path, value = source.path, source.values["hidden_states"]
    _tensor(source, "input_ids"), _tensor(source, "loss_mask")
    states = value.parts
    if not states or any(s.shape is None for s in states):
        raise CaptureError(
            path, "hidden_states", expected="a list of [positions, hidden size] tensors",
            found=value.kind, remedy="this is not the legacy list format; see formats A.1",
        )  # fmt: skip
    ids, mask = _ids(source, "input_ids"), _mask(source)
    for i, state in enumerate(states):
        name = f"hidden_states[{i}]"
        if len(state.shape) != 2 or state.shape[1] != states[0].shape[1]:
            width = (states[0].shape or ("hidden size",))[-1]
            raise CaptureError(
                path, name, expected=f"[positions, {width}] like hidden_states[0]",
                found=str(state.shape), remedy="the list is ragged: recapture this sample",
            )  # fmt: skip
        _check_states(path, name, state.shape, state.dtype, len(ids))
    names = tuple(Stored(i) for i in range(len(states)))
    readers = {name: states[name.index].read for name in names}
    return Content("speculators-legacy", ids, mask, names, readers, states[0].shape[1], notes=(UNNAMED,))


# ---- the workbook's own -----------------------------------------------------------------------


def _read_workbook(source: Source) -> Content:
    path, values = source.path, source.values
    taps = tuple(sorted(Tap(int(m[1])) for k in values if (m := re.fullmatch(r"tap\.(\d+)", k))))
    states = {tap: f"tap.{tap.after_block}" for tap in taps}
    states |= {FINAL: FINAL} if FINAL in values else {}
    exact = Layout(frozenset({"token_ids", "loss_mask", *states.values()}), {}, _no_shapes, _read_workbook)
    _explain(source, exact, None)
    kind = source.metadata.get("final_kind") or None
    if FINAL in values and kind not in ("pre_norm", "post_norm"):
        raise CaptureError(
            path, "metadata final_kind", expected="pre_norm or post_norm", found=repr(kind),
            remedy="write the file with save_capture(final_kind=...)",
        )  # fmt: skip
    ids, mask = _ids(source, "token_ids"), _mask(source)
    for key in states.values():
        value = _tensor(source, key)
        if len(value.shape) != 2:
            raise CaptureError(
                path, key, expected="[positions, hidden size]", found=str(value.shape),
                remedy="write the file with save_capture()",
            )  # fmt: skip
        _check_states(path, key, value.shape, value.dtype, len(ids))
    widths = {values[key].shape[1] for key in states.values()}
    if len(widths) != 1:
        raise CaptureError(
            path, "states", expected="at least one state, all of one hidden size",
            found=f"widths {sorted(widths)}", remedy="write the file with save_capture()",
        )  # fmt: skip
    readers = {tap: values[key].read for tap, key in states.items()}
    return Content("workbook", ids, mask, taps, readers, widths.pop(), kind if FINAL in values else None)


# ---- aux and last: SpecForge, Model-Optimizer, AngelSlim, BaldEagle ---------------------------


def _rows(source: Source, key: str, axes: int) -> tuple[Value, tuple[int, ...]]:
    """A value and its shape without a leading batch axis of one; CaptureError for a larger batch."""
    value = _tensor(source, key)
    shape = value.shape
    if len(shape) == axes + 1 and shape[0] == 1:
        return value, shape[1:]
    if len(shape) == axes + 1:
        raise CaptureError(
            source.path, key, expected="one conversation, a batch axis of 1",
            found=f"{shape}: a batch of {shape[0]}",
            remedy="write one conversation per file: padding cannot be told from text here",
        )  # fmt: skip
    if len(shape) != axes:
        raise CaptureError(
            source.path, key, expected=f"{axes} axes, or one more in front of length 1", found=str(shape),
            remedy="recapture with the framework's own script",
        )  # fmt: skip
    return value, shape


def _ratio(source: Source, pair: Pair) -> float | None:
    """Width of aux over width of last; None where one is no tensor or has no axis."""
    aux, last = source.values[pair.aux], source.values[pair.last]
    if not aux.shape or not last.shape or not last.shape[-1]:
        return None
    return aux.shape[-1] / last.shape[-1]


def _fits_pair(pair: Pair) -> Callable[[Source], tuple[str, ...] | None]:
    def fits(source: Source) -> tuple[str, ...] | None:
        ratio = _ratio(source, pair)
        if ratio is None:
            return None
        aux, last = (f"{k} {list(source.values[k].shape)}" for k in (pair.aux, pair.last))
        if ratio == 1:
            return (f"{aux} is as wide as {last}: the names decide",)
        if ratio < 1 and ratio:
            return (f"the names say so, but {last} is {1 / ratio:g} times as wide as {aux}",)
        return (f"{aux} is {ratio:g} times as wide as {last}",)

    return fits


def _read_pair(pair: Pair) -> Callable[[Source], Content]:
    def read(source: Source) -> Content:
        path = source.path
        ids = _ids(source, "input_ids", batch=True)
        mask = _mask(source, batch=True) if "loss_mask" in source.values else None
        last, last_shape = _rows(source, pair.last, 2)
        _check_states(path, pair.last, last_shape, last.dtype, len(ids))
        width, notes = last_shape[1], [UNNAMED, pair.about_final, *pair.notes]
        if _tensor(source, pair.aux).shape == (0,):
            # Model-Optimizer's vLLM dump of a single layer: an empty tensor in place of the aux states.
            names, readers = (), {}
            notes[0] = f"{pair.aux} is empty: only the last state was captured"
        else:
            aux, shape = _rows(source, pair.aux, 2)
            _check_states(path, pair.aux, shape, aux.dtype, len(ids))
            _check_widths(source, pair, shape[1], width)
            k = shape[1] // width
            if k == 1:
                notes.append(
                    f"{pair.aux} and {pair.last} are equally wide: their names alone say which is the last"
                )
            names = tuple(Stored(i) for i in range(k))
            readers = {n: _block(aux, n.index * width, width) for n in names}
        readers[FINAL] = _block(last, 0, width)
        return Content(pair.name, ids, mask, names, readers, width, pair.final_kind, tuple(notes))

    return read


def _check_widths(source: Source, pair: Pair, aux: int, last: int) -> None:
    if last > aux:
        likely = [p.name for p in PAIRS if p.aux == pair.last]
        raise CaptureError(
            source.path, f"{pair.last}, {pair.aux}",
            expected=f"{pair.aux} the wider one, as {pair.name} names them",
            found=f"{pair.last} of width {last} and {pair.aux} of width {aux}: the names are swapped",
            remedy=f"rename the two: {' or '.join(likely) or 'no framework'} calls aux states {pair.last}",
        )  # fmt: skip
    if aux % last:
        raise CaptureError(
            source.path, pair.aux, expected=f"a whole multiple of {last}, the width of {pair.last}",
            found=f"width {aux}",
            remedy="the two states are of different targets, or the file was cut: recapture",
        )  # fmt: skip


def _block(value: Value, start: int, width: int) -> Callable[[], Tensor]:
    """Reads columns start .. start + width of [L, W] or [1, L, W], as (L, width)."""
    columns = slice(start, start + width)
    index = (slice(None), columns) if len(value.shape) == 2 else (0, slice(None), columns)
    return lambda: value.read(index)


# ---- the table --------------------------------------------------------------------------------


def _no_shapes(_source: Source) -> tuple[str, ...]:
    return ()


def _fits_stack(source: Source) -> tuple[str, ...] | None:
    shape = source.values["hidden_states"].shape
    return (f"hidden_states {list(shape)}: positions, states, width",) if shape and len(shape) == 3 else None


def _fits_legacy(source: Source) -> tuple[str, ...] | None:
    parts = source.values["hidden_states"].parts
    return (f"hidden_states is a list of {len(parts)}",) if parts is not None else None


_PAIR_MAY = {
    "specforge": {},
    "modelopt": {"loss_mask": "", "conversation_id": ""},
    "angelslim": {
        "attention_mask": "not read: a conversation of its own has no padding",
        "position_ids": "not read: positions are counted from 0 (the writer stores them for images)",
        "inputs_embeds": "not read: where an image stood, the draft's embedding of its token is another one",
    },
    "baldeagle": {},
}
LAYOUTS: dict[str, Layout] = {
    "speculators-legacy": Layout(
        frozenset({"input_ids", "loss_mask", "hidden_states"}), {}, _fits_legacy, _read_legacy
    ),
    "speculators": Layout(frozenset({"hidden_states", "token_ids"}), {}, _fits_stack, _read_stack),
    "workbook": Layout(frozenset(), {}, _no_shapes, _read_workbook),
} | {
    p.name: Layout(
        frozenset({"input_ids", p.aux, p.last} | ({"loss_mask"} - set(_PAIR_MAY[p.name]))),
        _PAIR_MAY[p.name], _fits_pair(p), _read_pair(p),
    )
    for p in PAIRS
}  # fmt: skip
CAPTURE_FORMATS = tuple(LAYOUTS)
