"""Files of weights: tensors by name from safetensors or pickles, whole or sharded, never running code."""

from __future__ import annotations

import difflib
import json
import re
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from lib.errors import CheckpointError, WorkbookError


def load_pickle(path: Path, error: type[WorkbookError]):
    """`torch.load` with `weights_only=True`: no code in the file is ever run.

    Raises `error` (CaptureError or CheckpointError) for unreadable files and files with code.
    """
    try:
        # Zip archives (torch.save's format since 1.6) are mapped: a tensor not used is not read.
        mapped = zipfile.is_zipfile(path)
        loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except Exception as err:  # torch raises a dozen types for damaged files; all become one
        reason = " ".join(str(err).split())[:200] or type(err).__name__
        raise error(
            path, "pickle", expected="tensors and plain containers, saved whole by torch.save",
            found=reason,
            remedy="do not load it another way: a file that needs weights_only=False can run code",
        ) from err  # fmt: skip
    _check_plain(path, loaded, error)
    return loaded


def _check_plain(path: Path, value, error: type[WorkbookError]) -> None:
    """Every tensor is dense and holds its own numbers: what weights and states are, and nothing stranger.

    A sparse, nested, quantised or empty-shelled ("meta") tensor passes `weights_only`, and so does a view
    that repeats few stored numbers a billion times; each fails later, far from its cause.
    """
    # A stack and not recursion, and every container once: a pickle's list may be deep, or hold itself.
    left, seen = [("file", value)], set()
    while left:
        where, item = left.pop()
        if isinstance(item, Tensor):
            _check_tensor(path, where, item, error)
        elif isinstance(item, Mapping | list | tuple) and id(item) not in seen:
            seen.add(id(item))
            keyed = isinstance(item, Mapping)
            inside = [
                ((str(k) if keyed else f"{where}[{k}]")[:200], v)
                for k, v in (item.items() if keyed else enumerate(item))
                if isinstance(v, Tensor | Mapping | list | tuple)
            ]
            left += reversed(inside)


def _check_tensor(path: Path, where: str, value: Tensor, error: type[WorkbookError]) -> None:
    plain = value.layout == torch.strided and not (value.is_quantized or value.is_nested)
    if not plain or value.device.type != "cpu" or type(value) not in (Tensor, torch.nn.Parameter):
        kind = "quantised" if value.is_quantized else "nested" if value.is_nested else value.layout
        raise error(
            path, where, expected="a plain dense tensor", found=f"{kind} on {value.device.type}",
            remedy="save it dense (tensor.to_dense(), dequantize()) from the framework that wrote it",
        )  # fmt: skip
    stored = value.untyped_storage().nbytes()
    if value.numel() * value.element_size() > stored:
        raise error(
            path, where, expected=f"{tuple(value.shape)} numbers of its own",
            found=f"a view of {stored} bytes", remedy="save tensor.contiguous()",
        )  # fmt: skip


class TensorFile:
    """Tensors of a checkpoint by name, read only when asked for; one file or an indexed set.

    Safetensors are memory-mapped: taking rows of a table touches only those rows. Pickled files
    are opened with `weights_only=True` and mapped too.
    """

    def __init__(self, path: str | Path) -> None:
        """Find the weights at `path` (a folder or a file) and list their names."""
        self.path = Path(path)
        self._get: dict[str, Callable[[], Tensor]] = {}
        self._shape: dict[str, Callable[[], tuple[int, ...]]] = {}
        self.origin: dict[str, Path] = {}
        for file, names in weight_files(self.path):
            self._add(file, names)
        if not self._get:
            raise CheckpointError(
                self.path, "weights", expected="at least one tensor", found="none",
                remedy="the file was written empty; save the checkpoint again",
            )  # fmt: skip

    def _add(self, file: Path, wanted: set[str] | None) -> None:
        if file.suffix == ".safetensors":
            try:
                handle = safe_open(file, "pt")
            except (SafetensorError, OSError) as err:
                raise CheckpointError(
                    file, "header", expected="a complete safetensors file", found=str(err),
                    remedy="download or copy it again; it is truncated, empty or another format",
                ) from err  # fmt: skip
            found = {name: (lambda n=name, h=handle: h.get_tensor(n)) for name in handle.keys()}
            shapes = {
                name: (lambda n=name, h=handle: tuple(h.get_slice(n).get_shape())) for name in handle.keys()
            }
        else:
            data = load_pickle(file, CheckpointError)
            if wrong := _not_a_state_dict(data):
                raise CheckpointError(
                    file, "file", expected="a state dict (name -> tensor)",
                    found=wrong, remedy="save model.state_dict() alone, not the model nor a dict around it",
                )  # fmt: skip
            found = {name: (lambda t=tensor: t) for name, tensor in data.items()}
            shapes = {name: (lambda t=tensor: tuple(t.shape)) for name, tensor in data.items()}
        absent = sorted((wanted or set()) - set(found))
        if absent:
            raise CheckpointError(
                file, "index", expected=f"tensors {absent}", found="not in this shard",
                remedy="the index and the shards are of different saves; download both again",
            )  # fmt: skip
        surplus = [] if wanted is None else sorted(set(found) - wanted)
        if surplus:
            # An engine that reads whole shards would use them, one that goes by the index would not.
            raise CheckpointError(
                file, "index", expected="every tensor of the shard named in the index",
                found=f"{len(surplus)} that it leaves out: {surplus[:4]}",
                remedy="the index and the shards are of different saves; download both again",
            )  # fmt: skip
        for name in found if wanted is None else sorted(wanted):
            if name in self._get:
                raise CheckpointError(
                    file, name, expected="each tensor in one file",
                    found=f"it is in {self.origin[name].name} too",
                    remedy="the shards are of different saves; download them again",
                )  # fmt: skip
            self._get[name], self.origin[name] = found[name], file
            self._shape[name] = shapes[name]

    def __contains__(self, name: str) -> bool:
        return name in self._get

    def __iter__(self) -> Iterator[str]:
        return iter(self._get)

    def shape(self, name: str) -> tuple[int, ...]:
        """Its shape, from the header: nothing of the tensor is read."""
        return self._shape[name]()

    def __getitem__(self, name: str) -> Tensor:
        """The tensor; CheckpointError naming close matches if there is none of that name."""
        if name not in self._get:
            near = difflib.get_close_matches(name, self._get, 3)
            raise CheckpointError(
                self.path, name, expected="this tensor", found=f"no such name; close: {near}",
                remedy="check the framework's key prefix (midlayer. or layers.0.)",
            )  # fmt: skip
        return self._get[name]()


def _not_a_state_dict(data: Any) -> str:
    """What is wrong with a pickle that should hold name -> tensor; "" if nothing is."""
    if not isinstance(data, dict):
        return type(data).__name__
    for name, value in data.items():
        if not isinstance(name, str):
            return f"a dict with a key of type {type(name).__name__}: {str(name)[:80]}"
        if not isinstance(value, Tensor):
            return f"a dict whose {name[:80]!r} is of type {type(value).__name__}"
    return ""


def weight_files(path: Path, rule: str = ".*") -> list[tuple[Path, set[str] | None]]:
    """Files with the names to take from each (None: all); of an index, only names matching `rule`."""
    if path.is_file():
        return [(path, None)]
    for stem in ("model.safetensors", "pytorch_model.bin"):
        index = path / f"{stem}.index.json"
        if index.is_file():
            weight_map = read_json(index).get("weight_map")
            if not isinstance(weight_map, dict):
                raise CheckpointError(
                    index, "weight_map", expected="a dict of tensor name -> shard",
                    found=type(weight_map).__name__, remedy="download the index again",
                )  # fmt: skip
            shards: dict[str, set[str]] = {}
            present = {file.name for file in path.iterdir()}
            for name, shard in weight_map.items():
                if not re.fullmatch(rule, name):
                    continue
                if not isinstance(shard, str) or shard not in present:
                    raise CheckpointError(
                        index, str(shard)[:80] or name, expected=f"a shard beside the index, for {name}",
                        found="no such file", remedy="download the missing shard, or the index again",
                    )  # fmt: skip
                shards.setdefault(shard, set()).add(name)
            return [(path / shard, names) for shard, names in sorted(shards.items())]
        if (path / stem).is_file():
            return [(path / stem, None)]
        if shards := _shards_without_index(path, *stem.split(".")):
            return [(shard, None) for shard in shards]
    raise CheckpointError(
        path, "weights", expected="model.safetensors or pytorch_model.bin, or their index",
        found="neither" if path.is_dir() else "no such folder",
        remedy="point at the folder that holds config.json and the weights",
    )  # fmt: skip


def _shards_without_index(path: Path, stem: str, suffix: str) -> list[Path]:
    """`model-00001-of-00003.safetensors` and so on, all of them; an error if the set is not whole."""
    found = {
        shard: re.fullmatch(rf"{stem}-(\d+)-of-(\d+)", shard.stem)
        for shard in sorted(path.glob(f"{stem}-*-of-*.{suffix}"))
    }
    numbers = sorted(int(m[1]) for m in found.values() if m)
    wanted = max((int(m[2]) for m in found.values() if m), default=0)
    if numbers != list(range(1, wanted + 1)):
        raise CheckpointError(
            path, f"{stem}.{suffix}.index.json", expected=f"an index, or shards 1..{wanted}",
            found=f"no index and shards {numbers}", remedy="download what is missing",
        )  # fmt: skip
    return [shard for shard, m in found.items() if m]


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from disk, or CheckpointError."""
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as err:
        raise CheckpointError(
            path, "json", expected="a readable JSON file", found=str(err)[:200],
            remedy="download or write it again",
        ) from err  # fmt: skip
    if not isinstance(value, dict):
        raise CheckpointError(
            path, "json", expected="an object", found=type(value).__name__,
            remedy="this is not a model config",
        )  # fmt: skip
    return value
