"""What a file or folder is, and why: a draft, a target, captures, a dataset, a vocabulary mapping.

Every recogniser is asked, and all that answer are reported: nothing is guessed, and no weight is read
(safetensors headers, indexes, and pickles mapped with `weights_only=True`).

`python -m lib.detect PATH...` prints it.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from lib import capture_formats, draft_formats
from lib.arrow_masks import arrow_files
from lib.captures import capture_files
from lib.errors import CaptureError, CheckpointError, WorkbookError
from lib.formats import Match
from lib.hub import STEMS
from lib.weights import TensorFile, load_pickle, read_json

KINDS = ("draft", "target", "GGUF target", "capture", "captures", "speculators dataset", "vocab mapping")


@dataclass(frozen=True)
class Detected:
    """What was found at a path.

    Attributes:
        path: the file or folder, as it was given.
        kind: one of KINDS; several joined by " or " where the content does not decide.
        format: whose ("specforge"); several joined by " or " where the content does not decide, and by ", "
            where a folder holds files of each.
        evidence: what in the files says so.
        others: every possibility, where there is more than one.
        counts: of a folder of captures, format -> number of files.
        unreadable: of a folder of captures, file -> what is wrong with it.
        ignored: of a folder of captures, file -> why it is no capture.
    """

    path: Path
    kind: str
    format: str
    evidence: tuple[str, ...]
    others: tuple[Match, ...] = ()
    counts: Mapping[str, int] = field(default_factory=dict)
    unreadable: Mapping[str, str] = field(default_factory=dict)
    ignored: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        """One line per finding, for a terminal."""
        lines = [f"{self.path}: {self.kind}, {self.format}"]
        lines += [f"  {said}" for said in self.evidence]
        lines += [f"  possible: {match}" for match in self.others]
        lines += [f"  {number} files of {name}" for name, number in self.counts.items()]
        lines += [f"  not readable: {name}: {why}" for name, why in self.unreadable.items()]
        lines += [f"  ignored: {name}: {why}" for name, why in self.ignored.items()]
        return "\n".join(lines)


def detect(path: str | Path) -> Detected:
    """What the file or folder is.

    Raises WorkbookError if nothing known fits (saying what was tried and what was seen), or if a
    recogniser knows the thing and finds it broken.
    """
    path = Path(path)
    if not os.path.exists(path):  # not path.exists(): a zero byte in the name is no file either
        raise WorkbookError(
            path, "path", expected="a file or folder", found="nothing there",
            remedy="check the path (relative ones start at the working directory)",
        )  # fmt: skip
    return _folder(path) if path.is_dir() else _file(path)


def table(*found: Detected):
    """A DataFrame with one row per finding: path, kind, format, number of files, evidence."""
    import pandas as pd

    rows = []
    for one in found:
        path, why = str(one.path), "; ".join(one.evidence)
        if one.counts:
            rows += [(path, one.kind, name, number, why) for name, number in one.counts.items()]
        elif one.others:
            rows += [(path, one.kind, m.format, 1, "; ".join(m.evidence)) for m in one.others]
        else:
            rows.append((path, one.kind, one.format, 1, why))
        rows += [(str(one.path / name), "not readable", "", 1, said) for name, said in one.unreadable.items()]
        rows += [(str(one.path / name), "ignored", "", 1, said) for name, said in one.ignored.items()]
    return pd.DataFrame(rows, columns=["path", "kind", "format", "files", "evidence"])


# ---- files ------------------------------------------------------------------------------------


def _file(path: Path) -> Detected:
    try:
        with open(path, "rb") as f:
            head = f.read(9)
    except OSError as err:
        raise WorkbookError(
            path, "file", expected="a readable file", found=str(err), remedy="check its permissions"
        ) from err
    if head[:4] == b"GGUF":
        return _gguf(path)
    if path.suffix == ".npy":
        return _npy(path)
    if path.suffix == ".json":
        raise _unknown(path, "a JSON file", "give the folder it is in")
    refused: list[WorkbookError] = []
    found: list[tuple[str, Match]] = []
    for kind, ask in (
        ("vocab mapping", _vocab_mapping),
        ("capture", capture_formats.recognise),
        ("draft", draft_formats.recognise),
    ):
        try:
            found += [(kind, match) for match in ask(path)]
        except WorkbookError as err:
            refused.append(err)
    if found:
        return _answer(path, found)
    if _is_weights(path):
        raise _unknown(path, "weights of a model", "give the folder with config.json and all of its weights")
    if refused:
        raise refused[0]  # it knows more about the file than "nothing fits"
    raise _unknown(path, _first_keys(path), "convert it, or see formats_and_faults A.1 for what is read")


def _answer(path: Path, found: list[tuple[str, Match]]) -> Detected:
    """One finding, or all of them side by side."""
    kinds = list(dict.fromkeys(kind for kind, _ in found))
    matches = [match for _, match in found]
    names = list(dict.fromkeys(match.format for match in matches))
    if len(found) == 1:
        return Detected(path, kinds[0], names[0], matches[0].evidence)
    shared = [said for said in matches[0].evidence if all(said in m.evidence for m in matches)]
    shared.append("the content does not decide between them")
    return Detected(path, " or ".join(kinds), " or ".join(names), tuple(shared), tuple(matches))


def _vocab_mapping(path: Path) -> list[Match]:
    """SpecForge's `vocab_mapping.pt` {d2t, t2d}, and Automodel's `eagle_meta.pt` {selected_token_ids}."""
    data = _pickled(path)
    if not isinstance(data, dict):
        return []
    keys = set(map(str, data))
    if "selected_token_ids" in keys:
        return [Match("automodel", ("key selected_token_ids", f"keys {', '.join(sorted(keys))}"))]
    if not keys or not keys <= {"d2t", "t2d"}:
        return []
    said = [f"keys {', '.join(sorted(keys))}"]
    said += [f"{k} {list(v.shape)} {v.dtype}" for k, v in sorted(data.items()) if isinstance(v, Tensor)]
    return [Match("specforge", tuple(said))]


def _pickled(path: Path) -> Any:
    """What torch.save wrote, mapped; None if the file is something else."""
    with open(path, "rb") as f:
        head = f.read(9)
    # Before a safetensors header stands its length, whose low byte may be a pickle's first one.
    if head[8:9] == b"{" or (head[:4] != b"PK\x03\x04" and head[:1] != b"\x80"):
        return None
    return load_pickle(path, CheckpointError)


def _npy(path: Path) -> Detected:
    """speculators' `d2t.npy` and `t2d.npy` (`scripts/train.py --d2t-path --t2d-path`)."""
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError, SyntaxError, MemoryError, TypeError, OverflowError) as err:
        raise WorkbookError(
            path, "npy", expected="a NumPy array without objects", found=" ".join(str(err).split())[:200],
            remedy="copy or write the file again",
        ) from err  # fmt: skip
    seen = f"an array {list(array.shape)} {array.dtype}"
    if array.ndim == 1 and array.dtype.kind in "iub" and path.stem in ("d2t", "t2d"):
        return Detected(path, "vocab mapping", "speculators", (f"named {path.name}", seen))
    raise _unknown(path, seen, "of .npy files only d2t.npy and t2d.npy are known")


def _gguf(path: Path) -> Detected:
    from gguf import GGUFReader

    try:
        reader = GGUFReader(path)
        names = {tensor.name for tensor in reader.tensors}
        arch = str(reader.fields["general.architecture"].contents())
        blocks = int(reader.fields[f"{arch}.block_count"].contents())
    except Exception as err:  # its reader indexes into whatever the header claims
        raise CheckpointError(
            path, "gguf", expected="a complete GGUF model with an architecture and a number of blocks",
            found=" ".join(f"{type(err).__name__}: {err}".split())[:200], remedy="download or copy it again",
        ) from err  # fmt: skip
    absent = sorted({"token_embd.weight", "output_norm.weight"} - names)
    if absent:
        raise _unknown(path, f"a GGUF file without {absent}", "give the GGUF file of a whole language model")
    return Detected(
        path, "GGUF target", "gguf",
        ("begins with GGUF", f"architecture {arch}, {blocks} blocks", f"{len(names)} tensors with embedding"),
    )  # fmt: skip


def _is_weights(path: Path) -> bool:
    """Whether the tensors in a file are named like a model's."""
    try:
        names = list(TensorFile(path)) if _pickled(path) is not None or path.suffix == ".safetensors" else []
    except WorkbookError:
        return False
    return any(name.endswith((".weight", ".weight_packed", ".weight_scale")) for name in names)


def _first_keys(path: Path) -> str:
    """What a file of tensors holds, for the message; its size if it is none."""
    try:
        return f"keys {sorted(capture_formats.open_source(path).values)[:12]}"
    except WorkbookError:
        return f"{path.stat().st_size} bytes of something else"


# ---- folders ----------------------------------------------------------------------------------


def _folder(path: Path) -> Detected:
    try:
        found = [("draft", match) for match in draft_formats.recognise(path)]
    except WorkbookError as err:  # of a target, shards that nobody needs may be absent
        if not (path / "config.json").is_file():
            raise
        try:
            return _target(path)
        except WorkbookError:
            raise err from None
    if not found and (path / "config.json").is_file():
        return _target(path)
    if found:
        return _answer(path, found)
    inside = sorted(path.iterdir())
    mappings = [f for f in inside if f.suffix in (".pt", ".npy") and f.is_file()]
    if mappings and len(mappings) == sum(f.is_file() for f in inside):
        each = [f for f in map(_mapping_only, mappings) if f]
        if len(each) == len(mappings):
            evidence = tuple(f"{one.path.name}: {'; '.join(one.evidence)}" for one in each)
            formats = sorted({one.format for one in each})
            return Detected(path, "vocab mapping", ", ".join(formats), evidence)
    dataset = _dataset(path)
    captures, errors = _captures(path, dataset)
    if captures:
        return captures
    if dataset:
        reasons = _reasons(errors)
        return Detected(path, "speculators dataset", "speculators", dataset, unreadable=reasons)
    below = [f.name for f in inside if f.suffix == ".gguf" or (f / "config.json").is_file()]
    if len(errors) == 1 and not below:
        raise next(iter(errors.values()))
    seen = f"{len(inside)} entries: {[f.name for f in inside[:8]]}" if inside else "an empty folder"
    if errors and not below:
        name, first = next(iter(errors.items()))
        seen += f"; {len(errors)} files that are no captures, the first {name}: {_short(first)}"
    raise _unknown(path, seen, f"did you mean {below[:4]} in it?" if below else "check the path")


def _mapping_only(path: Path) -> Detected | None:
    try:
        found = _file(path)
    except WorkbookError:
        return None
    return found if found.kind == "vocab mapping" else None


def _target(path: Path) -> Detected:
    """A transformers model that is no draft: told by its config and by the names of its tensors."""
    config = read_json(path / "config.json")
    text = config.get("text_config", config)
    layers = text.get("num_hidden_layers") if isinstance(text, dict) else None
    listed = config.get("architectures")
    names = _names(path)
    embed = [n for n in names if n.endswith("embed_tokens.weight")]
    missing = [
        what
        for what, there in (
            ("architectures", isinstance(listed, list) and listed),
            ("num_hidden_layers", isinstance(layers, int) and not isinstance(layers, bool)),
            ("embed_tokens.weight", embed),
        )
        if not there
    ]
    drafts = [n for n in names if re.search(r"(^|\.)(fc\.|midlayer\.)|\.hidden_norm\.", n)]
    if missing or drafts:
        if missing:
            seen, remedy = f"a config.json and {len(names)} tensors, without {missing}", "check the folder"
        else:
            seen = f"{drafts[0]} under a config of no known draft format"
            remedy = "take config.json from the export that the weights are of"
        raise _unknown(path, seen, remedy)
    return Detected(
        path, "target", "transformers",
        (
            f"architectures: {', '.join(map(str, listed))}", f"num_hidden_layers: {layers}",
            f"{embed[0]}, no fc.weight",
        ),
    )  # fmt: skip


def _names(folder: Path) -> list[str]:
    """Tensor names of a folder: from the index if there is one, as not all shards need to be there."""
    for stem in STEMS:
        index = folder / f"{stem}.index.json"
        if index.is_file():
            listed = read_json(index).get("weight_map")
            if isinstance(listed, dict):
                return list(listed)
    return list(TensorFile(folder))


def _dataset(path: Path) -> tuple[str, ...]:
    """Evidence for an arrow dataset of speculators' data preparation; empty if it is none."""
    import pyarrow as pa

    files = arrow_files(path)
    if not files:
        return ()
    try:
        with pa.memory_map(str(files[0])) as mapped:
            columns = pa.ipc.open_stream(mapped).schema.names
    except (pa.ArrowInvalid, OSError) as err:
        raise WorkbookError(
            files[0], "arrow stream", expected="an arrow stream as `datasets` writes it",
            found=str(err)[:200], remedy="write the dataset again with save_to_disk",
        ) from err  # fmt: skip
    if not {"input_ids", "loss_mask"} <= set(columns):
        raise _unknown(path, f"arrow files with columns {columns}", "preprocess the dataset with speculators")
    return (f"{len(files)} arrow files", f"columns {', '.join(columns)}")


def _captures(path: Path, dataset: tuple[str, ...]) -> tuple[Detected | None, dict[str, WorkbookError]]:
    """A folder of captures, every file looked at, or None; and the files that are none, with their errors."""
    try:
        listed = capture_files(path)
    except CaptureError:  # nothing in it that could be one
        return None, {}
    counts: dict[str, int] = {}
    evidence: dict[str, str] = {}
    others: dict[str, Match] = {}
    errors: dict[str, WorkbookError] = {}
    for file in listed.files:
        name = file.relative_to(path).as_posix()
        try:
            matches = capture_formats.recognise(file)
            if not matches:
                raise _unknown(file, _first_keys(file), "remove it, or convert it")
        except WorkbookError as err:
            errors[name] = err
            continue
        label = " or ".join(match.format for match in matches)
        counts[label] = counts.get(label, 0) + 1
        evidence.setdefault(label, f"{name}: {matches[0]}")
        if len(matches) > 1:
            others |= {match.format: match for match in matches}
    if not counts:
        return None, errors
    said = tuple(evidence.values())
    if dataset:
        said += (f"loss masks beside them: {'; '.join(dataset)}",)
    found = Detected(
        path, "captures", ", ".join(sorted(counts)), said, tuple(others.values()),
        dict(sorted(counts.items())),
        _reasons(errors), dict(listed.ignored),
    )  # fmt: skip
    return found, errors


def _reasons(errors: Mapping[str, WorkbookError]) -> dict[str, str]:
    return {name: _short(err) for name, err in errors.items()}


def _short(err: WorkbookError) -> str:
    """What is wrong with a file of many; "kind" would list all that is known once more."""
    return err.found if err.field == "kind" else f"{err.field}: expected {err.expected}, found {err.found}"


def _unknown(path: Path, seen: str, remedy: str) -> WorkbookError:
    return WorkbookError(
        path, "kind", found=seen, remedy=remedy,
        expected=f"one of {', '.join(KINDS)} (drafts of {', '.join(draft_formats.DRAFT_FORMATS)}; "
        f"captures of {', '.join(capture_formats.CAPTURE_FORMATS)})",
    )  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    """Print what each path is; 2 if one of them is nothing known."""
    parser = argparse.ArgumentParser(prog="python -m lib.detect", description=__doc__.split("\n")[0])
    parser.add_argument("paths", nargs="+", metavar="PATH")
    status = 0
    for path in parser.parse_args(arguments).paths:
        try:
            print(detect(path))
        except WorkbookError as err:
            print(err, file=sys.stderr)
            status = 2
    return status


if __name__ == "__main__":
    sys.exit(main())
