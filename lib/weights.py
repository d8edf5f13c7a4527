"""Files of weights: tensors by name from safetensors or pickles, whole or sharded, never running code."""

from __future__ import annotations

import difflib
import json
import re
import zipfile
from collections.abc import Callable, Iterator
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
        return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except Exception as err:  # torch raises a dozen types for damaged files; all become one
        reason = " ".join(str(err).split())[:200] or type(err).__name__
        raise error(
            path, "pickle", expected="tensors and plain containers, saved whole by torch.save",
            found=reason,
            remedy="do not load it another way: a file that needs weights_only=False can run code",
        ) from err  # fmt: skip


class TensorFile:
    """Tensors of a checkpoint by name, read only when asked for; one file or an indexed set.

    Safetensors are memory-mapped: taking rows of a table touches only those rows. Pickled files
    are opened with `weights_only=True` and mapped too.
    """

    def __init__(self, path: str | Path) -> None:
        """Find the weights at `path` (a folder or a file) and list their names."""
        self.path = Path(path)
        self._get: dict[str, Callable[[], Tensor]] = {}
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
        else:
            data = load_pickle(file, CheckpointError)
            if not isinstance(data, dict) or not all(
                isinstance(n, str) and isinstance(t, Tensor) for n, t in data.items()
            ):
                raise CheckpointError(
                    file, "file", expected="a state dict (name -> tensor)",
                    found=type(data).__name__, remedy="save model.state_dict(), not the model",
                )  # fmt: skip
            found = {name: (lambda t=tensor: t) for name, tensor in data.items()}
        absent = sorted((wanted or set()) - set(found))
        if absent:
            raise CheckpointError(
                file, "index", expected=f"tensors {absent}", found="not in this shard",
                remedy="the index and the shards are of different saves; download both again",
            )  # fmt: skip
        for name in found if wanted is None else sorted(wanted):
            self._get[name], self.origin[name] = found[name], file

    def __contains__(self, name: str) -> bool:
        return name in self._get

    def __iter__(self) -> Iterator[str]:
        return iter(self._get)

    def __getitem__(self, name: str) -> Tensor:
        """The tensor; CheckpointError naming close matches if there is none of that name."""
        if name not in self._get:
            near = difflib.get_close_matches(name, self._get, 3)
            raise CheckpointError(
                self.path, name, expected="this tensor", found=f"no such name; close: {near}",
                remedy="check the framework's key prefix (midlayer. or layers.0.)",
            )  # fmt: skip
        return self._get[name]()


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
            for name, shard in weight_map.items():
                if re.fullmatch(rule, name):
                    shards.setdefault(str(shard), set()).add(name)
            for shard in shards:
                if Path(shard).name != shard or not (path / shard).is_file():
                    raise CheckpointError(
                        index, shard, expected="a shard beside the index", found="no such file",
                        remedy="download the missing shard",
                    )  # fmt: skip
            return [(path / shard, names) for shard, names in sorted(shards.items())]
        if (path / stem).is_file():
            return [(path / stem, None)]
    raise CheckpointError(
        path, "weights", expected="model.safetensors or pytorch_model.bin, or their index",
        found="neither" if path.is_dir() else "no such folder",
        remedy="point at the folder that holds config.json and the weights",
    )  # fmt: skip


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from disk, or CheckpointError."""
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError) as err:
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
