"""Files that hold captures, opened as named values: safetensors, `torch.save`, gzip around `torch.save`.

`open_source` opens a file by its first bytes and reads no tensor that nobody asks for; the functions after
it hand out values in the shapes that layouts share. Which layout a file has is told in
`lib.capture_formats`; what becomes of it, in `lib.captures`. Pickles are opened by `lib.weights.load_pickle`,
which refuses code and every tensor that is not plain.

Axes: L positions.
"""

from __future__ import annotations

import gzip
import tempfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from lib.errors import CaptureError
from lib.weights import load_pickle

# Types as torch calls them, and as a safetensors header does.
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTEGERS = {
    torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.int8, torch.int16, torch.int32, torch.int64,
    "U8", "U16", "U32", "U64", "I8", "I16", "I32", "I64",
}  # fmt: skip
BOOLEANS = {torch.bool, "BOOL"}
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# A gzip file may unpack to this many times its size, and always to this many bytes.
GZIP_RATIO, GZIP_FLOOR = 20, 64 << 20


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
    # First of all: the eight bytes before a safetensors header are its length, and may look like anything.
    if head[8:9] == b"{":
        return _open_safetensors(path)
    if head[:2] == b"\x1f\x8b":
        return _open_gzip(path)
    pickled = head[:4] == b"PK\x03\x04" or head[:1] == b"\x80"
    if not pickled and path.suffix == ".safetensors":
        return _open_safetensors(path)
    if pickled or path.name.endswith((".pt", ".ckpt", ".ckpt.gz")):
        return Source(path, _values(path, _load_pickle(path)))
    raise CaptureError(
        path, "suffix", expected=".pt or .safetensors, .ckpt or .ckpt.gz", found=repr(path.suffix),
        remedy="convert the capture, or rename it if the suffix is wrong",
    )  # fmt: skip


def _open_safetensors(path: Path) -> Source:
    def reader(name: str, shape: tuple[int, ...]) -> Callable[..., Tensor]:
        def read(index=None) -> Tensor:
            try:
                with safe_open(path, "pt") as f:
                    part = f.get_slice(name)
                    if tuple(part.get_shape()) == shape:
                        return f.get_tensor(name) if index is None else part[index]
                    found = f"{name} of shape {tuple(part.get_shape())}, which was {shape}"
            except (SafetensorError, OSError) as err:
                raise _changed(path, name, str(err)) from err
            raise _changed(path, name, found)

        return read

    values = {}
    try:
        with safe_open(path, "pt") as f:
            metadata = f.metadata() or {}
            for name in sorted(f.keys()):
                part = f.get_slice(name)
                dtype = part.get_dtype()
                shape = tuple(part.get_shape())
                values[name] = Value(shape, _DTYPES.get(dtype, dtype), reader(name, shape))
    except (SafetensorError, OSError) as err:
        raise CaptureError(
            path, "header", expected="a complete safetensors file", found=str(err),
            remedy="copy or write the file again; it is truncated, empty or another format",
        ) from err  # fmt: skip
    return Source(path, values, metadata)


def _changed(path: Path, name: str, found: str) -> CaptureError:
    return CaptureError(
        path, name, expected="the file as it was when it was opened", found=found,
        remedy="it was moved, removed or written again meanwhile: open it again",
    )  # fmt: skip


def _no_room(path: Path, err: OSError) -> CaptureError:
    return CaptureError(
        path, "temporary file", expected="room in the temporary folder, to unpack or link the file",
        found=str(err), remedy=f"free space in $TMPDIR ({tempfile.gettempdir()}), or set it to another disk; "
        "the capture itself is not at fault",
    )  # fmt: skip


def _load_pickle(path: Path, stored_as: Path | None = None):
    """The object in a torch.save file; errors name `path` though the bytes may be stored elsewhere."""
    if stored_as is None and path.suffix == ".safetensors":
        # torch.load believes this suffix, whatever the content is.
        try:
            with tempfile.TemporaryDirectory() as folder:
                link = Path(folder) / "content.pt"
                link.symlink_to(path.resolve())
                return _load_pickle(path, link)
        except OSError as err:
            raise _no_room(path, err) from err
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
        def read(index=None) -> Tensor:
            now = _unpacked(*stamp).get(name)
            if now is None or now.shape != value.shape:
                raise _changed(path, name, "another file of that name")
            return now.read(index).clone()

        return replace(value, read=read) if value.shape is not None else value

    return Source(path, {name: lazy(name, value) for name, value in data.items()})


@lru_cache(maxsize=1)
def _unpacked(path: Path, _mtime: int, size: int) -> dict[str, Value]:
    limit, unpacked = max(GZIP_FLOOR, GZIP_RATIO * size), 0
    try:
        with tempfile.NamedTemporaryFile(suffix=".ckpt") as out:
            for block in _gzip_blocks(path):
                out.write(block)
                unpacked += len(block)
                if unpacked > limit:
                    raise CaptureError(
                        path, "gzip", expected=f"at most {limit >> 20} MiB ({GZIP_RATIO} times the file, but "
                        f"never below {GZIP_FLOOR >> 20} MiB): states are numbers that hardly compress",
                        found="more when unpacked",
                        remedy="do not unpack it: it is no capture; a real one fits",
                    )  # fmt: skip
            out.flush()
            # The mapping outlives the name, so the unpacked bytes need no room in memory.
            data = _load_pickle(path, Path(out.name))
    except OSError as err:  # of the copy: what is wrong with the file itself is a CaptureError already
        raise _no_room(path, err) from err
    return _values(path, data)


def _gzip_blocks(path: Path) -> Iterator[bytes]:
    """What the file holds, a MiB at a time; CaptureError where it is damaged."""
    try:
        with gzip.open(path, "rb") as f:
            while block := f.read(1 << 20):
                yield block
    except (OSError, EOFError, zlib.error) as err:
        raise CaptureError(
            path, "gzip", expected="a complete gzip file", found=str(err) or type(err).__name__,
            remedy="copy or write the file again; it is truncated or damaged",
        ) from err  # fmt: skip


# ---- values as layouts want them ------------------------------------------------------------------


def tensor(source: Source, key: str) -> Value:
    """The value of this name; CaptureError if it is no tensor."""
    value = source.values[key]
    if value.shape is None:
        raise CaptureError(
            source.path, key, expected="a tensor", found=value.kind,
            remedy="save it with torch.save as a tensor",
        )  # fmt: skip
    return value


def token_ids(source: Source, key: str, *, batch: bool = False) -> Tensor:
    """(L,) token ids as int64; with `batch`, a leading axis of one is taken off."""
    value = tensor(source, key)
    shape = rows(source, key, 1)[1] if batch else value.shape
    if len(shape) != 1 or value.dtype not in INTEGERS or shape[0] == 0:
        raise CaptureError(
            source.path, "token ids", expected="a non-empty 1-D integer tensor",
            found=f"{value.shape} {value.dtype}", remedy="recapture; this is not a list of tokens",
        )  # fmt: skip
    return value.read().reshape(shape).long()


def loss_mask(source: Source, *, batch: bool = False) -> Tensor:
    """The loss mask as it is stored; `captures` checks its length and values."""
    value = tensor(source, "loss_mask")
    shape = rows(source, "loss_mask", 1)[1] if batch else value.shape
    if value.dtype not in {*INTEGERS, *BOOLEANS, *FLOATS}:
        raise CaptureError(
            source.path, "loss_mask", expected="zeros and ones", found=str(value.dtype),
            remedy="store the mask as 0/1",
        )  # fmt: skip
    return value.read().reshape(shape)


def check_states(path: Path, name: str, shape: tuple[int, ...], dtype, length: int) -> None:
    """CaptureError unless a state of this shape and type fits a text of `length` tokens."""
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


def rows(source: Source, key: str, axes: int) -> tuple[Value, tuple[int, ...]]:
    """A value and its shape without a leading batch axis of one; CaptureError for a larger batch."""
    value = tensor(source, key)
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
