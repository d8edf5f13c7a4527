"""Ten thousand damaged files: each ends in a value or a WorkbookError, never in anything else.

The cases run in a worker process, so that a crash, a hang or a runaway allocation is seen and attributed.
A case is its number: `python -m tests.test_mutations 1234` repeats one, with its traceback.
"""

from __future__ import annotations

import gzip
import io
import json
import math
import os
import pickle
import queue
import random
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import zipfile
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from lib.report import Request, build
from tests import capture_writers, draft_writers
from tests.conftest import ROOT
from tests.support import (
    HIDDEN,
    VOCAB,
    random_capture_tensors,
    read_checkpoint,
    speculators_draft,
    tiny_llama,
    write_checkpoint,
    write_legacy,
)

SECONDS = 40  # a case that takes longer hangs; most take milliseconds, and the machine may be busy
MEMORY = 2 << 30  # bytes that a worker may map beyond what its imports need
GROWTH = 600 << 20  # bytes of real memory that one case may add
FAST = range(0, 500)
ALL = range(0, 10_000)
TAPS = "embed,layer3,layer4,layer5"
CANARY = "code_ran"
ACTS = "MUTATION_ACTS"  # environment: what the worker does instead, to see that it would be noticed


DRAFTS = {
    "speculators": write_checkpoint,
    "eagle": draft_writers.write_eagle,
    "sglang": draft_writers.write_sglang,
    "specforge-hf": draft_writers.write_specforge_hf,
    "torchspec": draft_writers.write_torchspec,
    "modelopt": draft_writers.write_modelopt,
    "automodel": draft_writers.write_automodel,
}


# ---- sound files, one folder per subject: templates/<kind>/<name>/ -----------------------------


def write_templates(folder: Path) -> Path:
    """Tiny sound files of every format that is read, and what is needed to use them (`fixed`)."""
    rng = torch.Generator().manual_seed(7)
    fixed = folder / "fixed"
    speculators_draft().save_pretrained(fixed / "draft")
    tiny_llama().save_pretrained(fixed / "head")
    write_legacy(fixed / "data_0.pt", random_capture_tensors(12, rng, states=5))
    made = capture_writers.native(rng, 12)
    for name, writer in capture_writers.WRITERS.items():
        file = writer.write(folder / "written", made)
        (folder / "capture" / name).mkdir(parents=True)
        file.rename(folder / "capture" / name / file.name)
    shutil.rmtree(folder / "written")
    tensors, config = read_checkpoint(fixed / "draft")
    drafts = folder / "draft"
    whole = {**tensors, "lm_head.weight": torch.randn(VOCAB, HIDDEN, generator=rng)}
    for name, write in DRAFTS.items():
        write(drafts / name, whole if name == "torchspec" else tensors, config)
    write_checkpoint(drafts / "speculators-sharded", tensors, config, shards=2)
    options = {"arch": "qwen3", "layers": 2, "norm_before_fc": True, "norm_before_residual": True}
    speculators_draft(**options).save_pretrained(drafts / "speculators-qwen3")
    two = read_checkpoint(drafts / "speculators-qwen3")
    draft_writers.write_sglang(drafts / "sglang-two-layers", *two, norm_before_fc=True)
    shutil.copytree(fixed / "head", folder / "head" / "one-file")
    tiny_llama(layers=2, tied=True).save_pretrained(folder / "head" / "sharded", max_shard_size="20KB")
    (folder / "head" / "gguf").mkdir()
    _write_gguf(folder / "head" / "gguf" / "target.gguf", rng)
    for extra in folder.rglob("generation_config.json"):
        extra.unlink()  # nothing reads it
    (folder / "asked").mkdir()
    write_legacy(folder / "asked" / "data_0.pt", random_capture_tensors(12, rng))
    asked = Request(draft=str(fixed / "draft"), captures=str(folder / "asked"), taps=TAPS, depth=2)
    report = build(asked, folder / "work").save(fixed)
    (folder / "report" / "compare").mkdir(parents=True)
    shutil.copy(report, folder / "report" / "compare")
    shutil.rmtree(folder / "asked")
    shutil.rmtree(folder / "work")
    return folder


def _write_gguf(path: Path, rng: torch.Generator) -> None:
    """A GGUF target with the tensors and fields that the head's reader needs."""
    import gguf

    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_block_count(2)
    writer.add_layer_norm_rms_eps(1e-5)
    for name, shape in (
        ("token_embd", (VOCAB, HIDDEN)),
        ("output_norm", (HIDDEN,)),
        ("output", (VOCAB, HIDDEN)),
    ):
        writer.add_tensor(f"{name}.weight", torch.randn(shape, generator=rng).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def subjects(templates: Path) -> list[Path]:
    """All subjects, in a fixed order."""
    return sorted(p for kind in templates.iterdir() if kind.name != "fixed" for p in kind.iterdir())


# ---- using a file, all of it -------------------------------------------------------------------


class Fixed:
    """A sound draft, capture and head: partners of whatever was damaged."""

    def __init__(self, templates: Path) -> None:
        from lib.captures import open_capture
        from lib.checkpoints import load_draft
        from lib.target_head import load_target_head

        fixed = templates / "fixed"
        self.head = load_target_head(fixed / "head")
        self.draft = load_draft(fixed / "draft")
        self.capture = open_capture(fixed / "data_0.pt")
        self.report = fixed / "report.json"


def use(kind: str, folder: Path, fixed: Fixed) -> None:
    """Everything that a reader of the workbook does with such a file."""
    from lib.captures import FINAL, open_capture
    from lib.checkpoints import load_draft
    from lib.detect import detect, table
    from lib.draft import DraftForward
    from lib.errors import WorkbookError
    from lib.taps import Stored
    from lib.target_head import load_target_head

    files = sorted(folder.iterdir())
    if kind == "capture":
        try:
            table(detect(files[0]))
        except WorkbookError:
            pass  # the reader must refuse it or read it on its own
        capture = open_capture(files[0])
        for tap in capture.taps:
            capture.state(tap)
        if FINAL in capture.readers:
            capture.final()
            fixed.head.logits(capture.final()[:4], final_kind=capture.final_kind or "pre_norm")
        contract = replace(fixed.draft.contract, taps=capture.taps[: fixed.draft.n_slots])
        DraftForward(fixed.draft).predict([capture], contract, depths=2, feed="own")
    elif kind == "draft":
        try:
            table(detect(folder))
        except WorkbookError:
            pass
        draft = load_draft(folder, target=fixed.head)
        taps = tuple(Stored(i) for i in range(draft.n_slots))
        contract = replace(draft.contract, taps=taps) if draft.fc is not None else draft.contract
        DraftForward(draft).predict([fixed.capture], contract, depths=2, feed="own")
    elif kind == "head":
        path = files[0] if files[0].suffix == ".gguf" else folder
        head = load_target_head(path)
        head.logits(torch.ones(2, head.hidden_size), final_kind="pre_norm")
        detect(path)
    elif kind == "report":
        from lib.compare import compare

        compare(fixed.report, files[0])


# ---- damage ------------------------------------------------------------------------------------


def damage(folder: Path, rng: random.Random, marker: Path) -> str:
    """Change one file of a folder in one way; says which and how."""
    file = rng.choice(sorted(p for p in folder.rglob("*") if p.is_file()))
    ways = [damage_bytes]
    if file.suffix == ".json":
        ways += [damage_json] * 3
    elif file.suffix == ".safetensors":
        ways += [damage_tensors, damage_tensors, damage_header]
    elif file.suffix in (".pt", ".bin", ".ckpt", ".gz"):
        ways += [damage_tensors, damage_tensors, damage_zip]
        ways += [damage_pickle] if rng.random() < 0.3 else []
    if file.suffix == ".gz":
        ways.append(damage_gzip)
    way = rng.choice(ways)
    return f"{file.name}: {way.__name__}: {way(file, rng, marker)}"


def unpack(file: Path) -> bytes:
    raw = file.read_bytes()
    return gzip.decompress(raw) if file.suffix == ".gz" else raw


def pack(file: Path, content: bytes) -> None:
    file.write_bytes(gzip.compress(content, 1, mtime=0) if file.suffix == ".gz" else content)


def spoil(raw: bytes, rng: random.Random) -> tuple[bytes, str]:
    """Flip, set, cut, insert, zero, swap or repeat bytes; often where the headers are."""
    data = bytearray(raw)
    size = max(len(data), 1)

    def place() -> int:
        where = rng.random()
        if where < 0.35:
            return rng.randrange(min(size, 512))
        return size - 1 - rng.randrange(min(size, 512)) if where < 0.6 else rng.randrange(size)

    at, length = place(), min(int(2 ** rng.uniform(0, 12)), size)
    how = rng.choice(("flip", "set", "cut", "insert", "zero", "swap", "repeat", "empty", "ff"))
    if how == "flip":
        for _ in range(rng.choice((1, 1, 2, 8))):
            where = place()
            data[where : where + 1] = bytes(b ^ (1 << rng.randrange(8)) for b in data[where : where + 1])
    elif how == "set":
        data[at : at + length] = rng.randbytes(len(data[at : at + length]))
    elif how == "cut":
        del data[at:]
    elif how == "insert":
        data[at:at] = rng.randbytes(length)
    elif how in ("zero", "ff"):
        data[at : at + length] = (b"\0" if how == "zero" else b"\xff") * len(data[at : at + length])
    elif how == "swap":
        other = place()
        one, two = sorted((at, other))
        length = min(length, two - one)
        data[one : one + length], data[two : two + length] = (
            data[two : two + length],
            data[one : one + length],
        )
    elif how == "repeat":
        data[at:at] = data[at : at + length]
    else:
        data = data[: rng.choice((0, 1, 8, 9))]
    return bytes(data), f"{how} {length} bytes at {at} of {len(raw)}"


def damage_bytes(file: Path, rng: random.Random, marker: Path) -> str:
    data, how = spoil(file.read_bytes(), rng)
    file.write_bytes(data)
    return how


def damage_gzip(file: Path, rng: random.Random, marker: Path) -> str:
    content = unpack(file)
    how = rng.choice(
        ("spoilt inside", "twice", "not packed", "two members", "garbage after", "empty", "a bomb")
    )
    if how == "a bomb" and rng.random() < 0.8:  # costs a second
        how = "spoilt inside"
    raw = {
        "spoilt inside": lambda: gzip.compress(spoil(content, rng)[0], 1, mtime=0),
        "twice": lambda: gzip.compress(file.read_bytes()),
        "not packed": lambda: content,
        "two members": lambda: file.read_bytes() * 2,
        "garbage after": lambda: file.read_bytes() + rng.randbytes(40),
        "empty": lambda: gzip.compress(b""),
        "a bomb": lambda: gzip.compress(bytes(100 << 20), 1),
    }[how]()
    file.write_bytes(raw)
    return how


ODD = (
    *(None, True, False, 0, 1, -1, 2, 7, 3.5, -0.5, 2**31, 2**60, 10**400, 1e308),
    *(math.nan, math.inf, -math.inf, "", "x", "auto", "3", "ünï\u2028côdé \U0001f600", "\0", "x" * 5000),
    *([], {}, [None], [1, "a"], {"a": {}}, [[[]]], [-1, 0, 1], [2.5, 3, 4], [0, 3, 4, 5], [3, 0, 4]),
    *([10**30, 1, 2], list(range(300))),
)  # fmt: skip


def spoil_json(value: Any, rng: random.Random) -> str:
    """Change one field, at any depth, in place."""
    places: list[tuple[Any, Any]] = []

    def walk(node) -> None:
        for key in list(node) if isinstance(node, dict) else range(len(node)):
            places.append((node, key))
            if isinstance(node[key], dict | list):
                walk(node[key])

    walk(value)
    if not places:
        return "nothing to change"
    node, key = rng.choice(places)
    how = rng.choice(("set", "set", "set", "delete", "rename", "nest", "copy", "number"))
    said = f"{how} {key!r}"
    if how == "set":
        node[key] = rng.choice(ODD)
        said += f" to {str(node[key])[:40]!r}"
    elif how == "delete":
        del node[key]
    elif how == "rename" and isinstance(node, dict):
        node[rng.choice((f"{key}_", str(key).upper(), "ünï", ""))] = node.pop(key)
    elif how == "nest":
        node[key] = rng.choice(([node[key]], {"value": node[key]}, str(node[key])))
    elif how == "copy":
        other, name = rng.choice(places)
        node[key] = json.loads(json.dumps(other.get(name) if isinstance(other, dict) else other[name:][:1]))
    elif isinstance(node[key], int | float):
        node[key] = rng.choice((-node[key], node[key] + 1, node[key] * 1000, node[key] / 2, str(node[key])))
    return said


def damage_json(file: Path, rng: random.Random, marker: Path) -> str:
    value = json.loads(file.read_text())
    said = [spoil_json(value, rng) for _ in range(rng.choice((1, 1, 1, 2, 4)))]
    file.write_text(json.dumps(value))
    return "; ".join(said)


def damage_header(file: Path, rng: random.Random, marker: Path) -> str:
    """The JSON header of safetensors: names, dtypes, shapes, offsets, and its own length."""
    raw = file.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + size])
    how = rng.random()
    if how < 0.1:
        length = rng.choice((0, 1, size - 1, size + 1, 2**31, 2**60, 2**64 - 1))
        file.write_bytes(length.to_bytes(8, "little") + raw[8:])
        return f"header length {length}"
    said = spoil_json(header, rng)
    if how < 0.4:
        name = rng.choice([n for n in header if n != "__metadata__"] or [""])
        entry = header.get(name)
        if isinstance(entry, dict):
            entry["shape"] = rng.choice(([2**60, 32], [2**60], [0], [], [2**32, 2**32], [-1, 4], [3, 2**62]))
            said += f"; shape of {name} {entry['shape']}"
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + size :])
    return said


DTYPES = (
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int8, torch.uint8, torch.int16),
    *(torch.int32, torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2),
)


def spoil_tensor(t: Tensor, rng: random.Random, pickled: bool) -> tuple[Any, str]:
    """Another tensor (or, in a pickle, another thing) in its place."""
    if rng.random() < 0.2:
        dtype = rng.choice(DTYPES)
        return t.to(dtype), f"as {dtype}"
    flat = t.clone().flatten()
    ways = {
        "transposed": lambda: t.mT if t.ndim > 1 else t[:, None],
        "flat": lambda: t.flatten(),
        "one more axis": lambda: t[None],
        "last axis more": lambda: t[..., None],
        "squeezed": lambda: t.squeeze(),
        "one row less": lambda: t[:-1],
        "one column less": lambda: t[..., :-1],
        "one row": lambda: t[:1],
        "empty": lambda: t[:0],
        "no columns": lambda: t[..., :0],
        "a scalar": lambda: flat[0].clone(),
        "twice": lambda: torch.cat([t, t]),
        "twice as wide": lambda: torch.cat([t, t], -1),
        "zeros": lambda: torch.zeros_like(t),
        "ones": lambda: torch.ones_like(t),
        "negative": lambda: -t if t.dtype != torch.bool else ~t,
        "large": lambda: torch.full_like(t, torch.finfo(t.dtype).max if t.is_floating_point() else 2**30),
        "one odd value": lambda: flat.index_fill_(
            0,
            torch.tensor([rng.randrange(len(flat))]),
            rng.choice(
                (math.nan, math.inf, -math.inf, 1e30) if t.is_floating_point() else (-1, 96, 97, 2**30)
            ),
        ).view_as(t),
    }
    if t.dtype == torch.bool:
        ways.pop("large")
        ways.pop("one odd value")
    if t.dtype == torch.uint8 or t.dtype == torch.int8:
        ways.pop("large")
        ways.pop("one odd value")
    if pickled:
        ways |= {
            "sparse": lambda: t.to_sparse(),
            "meta": lambda: t.to("meta"),
            "a huge view": lambda: t.flatten()[:1].expand(2 ** rng.choice((33, 40))),
            "a huge matrix view": lambda: t.flatten()[:1].expand(2**20, 2**20),
            "a parameter": lambda: torch.nn.Parameter(t.float()),
            "needs grad": lambda: t.float().requires_grad_(),
            "strided": lambda: t.flatten()[::2],
            "quantised": lambda: torch.quantize_per_tensor(t.float(), 0.1, 0, torch.qint8),
            "None": lambda: None,
            "text": lambda: "tensor",
            "a number": lambda: 7,
            "a list": lambda: t.flatten()[:5].tolist(),
            "a tuple": lambda: (t,),
            "a dict": lambda: {"value": t},
            "nested": lambda: torch.nested.nested_tensor([t.float(), t.float()]),
        }
    how = rng.choice(sorted(ways))
    return ways[how](), how


def spoil_dict(data: dict, rng: random.Random, pickled: bool) -> str:
    """Rename, remove, add, swap, or change one of the values."""
    key = rng.choice(sorted(data, key=str))
    how = rng.choice(("value",) * 6 + ("delete", "rename", "extra", "swap", "copy"))
    if how == "value":
        value = data[key]
        if isinstance(value, list) and value:
            at = rng.randrange(len(value))
            value = list(value)
            value[at], said = spoil_tensor(value[at], rng, pickled)
            more = rng.choice((value, value, value[:-1], value * 2, [], tuple(value), value[::-1]))
            data[key] = more
            return f"{key}[{at}] {said}, {len(more)} of them"
        if isinstance(value, Tensor) and value.numel():
            data[key], said = spoil_tensor(value, rng, pickled)
            return f"{key} {said}"
        data[key] = rng.choice(ODD[:8]) if pickled else torch.zeros(1)
        return f"{key} another thing"
    if how == "delete":
        del data[key]
    elif how == "rename":
        names = [f"{key}_", key.upper(), "", f"model.{key}", "ünï", key.replace("layers.0", "midlayer")]
        names += [0, None, ("a", 1), b"x"] if pickled else []
        data[rng.choice(names)] = data.pop(key)
    elif how == "extra":
        name = rng.choice(
            ("extra", "layers.7.mlp.up_proj.weight", "fc.bias", "tap.9", "hidden_states", "loss_mask")
        )
        data[name] = torch.ones(rng.choice(((3,), (32,), (9, 32), (0,), (1, 1, 1))))
        how += f" {name}"
    else:
        other = rng.choice(sorted(data, key=str))
        data[key], data[other] = data[other], data[key] if how == "swap" else data[other]
        how += f" with {other}"
    return f"{how} {key}"


def damage_tensors(file: Path, rng: random.Random, marker: Path) -> str:
    pickled = file.suffix != ".safetensors"
    said = []
    for _ in range(20):  # some changes cannot be written: then another one is made
        if pickled:
            data, metadata = torch.load(io.BytesIO(unpack(file)), weights_only=True), None
        else:
            with safe_open(file, "pt") as f:
                data, metadata = {n: f.get_tensor(n) for n in f.keys()}, f.metadata()
        if not isinstance(data, dict) or not data:
            return "no tensors to change"
        try:
            said = [spoil_dict(data, rng, pickled) for _ in range(rng.choice((1, 1, 1, 2)))]
            if pickled:
                out = io.BytesIO()
                torch.save(data, out, _use_new_zipfile_serialization=rng.random() < 0.9)
                pack(file, out.getvalue())
            else:
                save_file({n: t.contiguous().clone() for n, t in data.items()}, file, metadata=metadata)
            return "; ".join(said)
        except Exception:
            continue
    return f"not written: {said}"


def damage_zip(file: Path, rng: random.Random, marker: Path) -> str:
    """Entries of torch.save's zip, with valid checksums: deeper than flipped bytes get."""
    content = unpack(file)
    if content[:4] != b"PK\x03\x04":
        return damage_bytes(file, rng, marker)
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    pickled = next(name for name in entries if name.endswith("data.pkl"))
    how = rng.choice(
        ("spoil pickle",) * 4 + ("spoil", "drop", "rename", "deflate", "no pickle", "big endian", "order")
    )
    name = pickled if how == "spoil pickle" else rng.choice(sorted(entries))
    said = ""
    if how in ("spoil", "spoil pickle"):
        entries[name], said = spoil(entries[name], rng)
    elif how == "drop":
        del entries[name]
    elif how == "rename":
        entries["x/" + name] = entries.pop(name)
    elif how == "no pickle":
        del entries[pickled]
    elif how == "big endian":
        entries[pickled.replace("data.pkl", "byteorder")] = rng.choice((b"big", b"middle", b""))
    elif how == "order":
        entries = dict(sorted(entries.items(), reverse=True))
    out = io.BytesIO()
    with zipfile.ZipFile(
        out, "w", zipfile.ZIP_DEFLATED if how == "deflate" else zipfile.ZIP_STORED
    ) as archive:
        for entry, data in entries.items():
            archive.writestr(entry, data)
    pack(file, out.getvalue())
    return f"{how} {name} {said}"


class RunsCode:
    """Unpickling this leaves the canary. No reader may ever unpickle it."""

    def __init__(self, marker: Path, how: str) -> None:
        self.marker, self.how = str(marker), how

    def __reduce__(self):
        import builtins
        import subprocess

        return {
            "os.system": (os.system, (f"touch {self.marker}",)),
            "open": (builtins.open, (self.marker, "w")),
            "exec": (builtins.exec, (f"open({self.marker!r}, 'w')",)),
            "subprocess": (subprocess.run, (["touch", self.marker],)),
        }[self.how]


def damage_pickle(file: Path, rng: random.Random, marker: Path) -> str:
    """A pickle that runs code: alone, beside sound values, in torch's zip, its old form, or bare."""
    how = rng.choice(("os.system", "open", "exec", "subprocess"))
    bad = RunsCode(marker, how)
    sound = torch.load(io.BytesIO(unpack(file)), weights_only=True)
    data = rng.choice((bad, {**sound, "extra": bad}, {**sound, rng.choice(sorted(sound)): bad}, [bad]))
    form = rng.choice(("zip", "old", "bare", "numpy object"))
    out = io.BytesIO()
    if form == "bare":
        pickle.dump(data, out, protocol=rng.choice((0, 2, 4)))
    else:
        torch.save(data, out, _use_new_zipfile_serialization=form != "old")
    pack(file, out.getvalue())
    return f"{how}, {form}"


# ---- the worker --------------------------------------------------------------------------------


def status(name: str) -> int:
    """A size of this process in bytes. Not getrusage: its peak is the parent's until it is passed."""
    return int(Path("/proc/self/status").read_text().partition(f"{name}:")[2].split()[0]) << 10


def run_case(case: int, templates: Path, scratch: Path, fixed: Fixed, *, trace: bool = False) -> dict:
    """One case: how it was damaged and how it ended. `ended` is "value", "error" or "failure"."""
    from lib.errors import WorkbookError

    listed = subjects(templates)
    subject = listed[case % len(listed)]
    folder, marker = scratch / str(case), scratch / CANARY
    shutil.copytree(subject, folder)
    said = {"case": case, "format": f"{subject.parent.name}/{subject.name}", "how": "", "ended": "value"}
    said["how"] = damage(folder, random.Random(case), marker)
    before = status("VmHWM")
    start = time.monotonic()
    try:
        if ACTS in os.environ:
            exec(json.loads(os.environ[ACTS])[case], {"os": os, "time": time, "marker": marker})
        else:
            use(subject.parent.name, folder, fixed)
    except WorkbookError as err:
        said |= {"ended": "error", "what": f"{type(err).__name__}: {err.field}"}
        if not all((err.where, err.expected, err.found, err.remedy)):
            said |= {"ended": "failure", "what": f"an incomplete message: {err}"}
    except BaseException as err:
        last = traceback.extract_tb(err.__traceback__)
        ours = [f for f in last if "/lib/" in f.filename and "site-packages" not in f.filename] or last
        said |= {
            "ended": "failure",
            "what": f"{type(err).__name__}: {' '.join(str(err).split())[:200]}",
            "at": f"{Path(ours[-1].filename).name}:{ours[-1].lineno} {ours[-1].name}",
        }
        if trace:
            traceback.print_exc()
    said["seconds"] = round(time.monotonic() - start, 3)
    grown = status("VmHWM") - before
    if grown > GROWTH:
        said |= {"ended": "failure", "what": f"{grown >> 20} MiB of memory"}
    if marker.exists():
        marker.unlink()
        said |= {"ended": "failure", "what": "code in the file was run"}
    shutil.rmtree(folder)
    return said


def worker(templates: Path, scratch: Path, start: int, stop: int) -> None:
    """Cases start..stop-1, one JSON line before and one after each."""
    torch.set_num_threads(1)
    fixed = Fixed(templates)
    resource.setrlimit(resource.RLIMIT_AS, (status("VmSize") + MEMORY,) * 2)
    for case in range(start, stop):
        print(json.dumps({"begin": case}), flush=True)
        print(json.dumps(run_case(case, templates, scratch, fixed)), flush=True)


def run_cases(cases: range, templates: Path, scratch: Path) -> list[dict]:
    """All cases in a worker; a new one takes over after a crash or a hang."""
    results, start = [], cases.start
    while start < cases.stop:
        command = [sys.executable, "-m", "tests.test_mutations", str(templates), str(scratch)]
        process = subprocess.Popen(
            [*command, str(start), str(cases.stop)],
            cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"},
        )  # fmt: skip
        lines: queue.Queue[str | None] = queue.Queue()
        errors: list[str] = []
        for stream, put in ((process.stdout, lines.put), (process.stderr, errors.append)):
            threading.Thread(target=_read, args=(stream, put), daemon=True).start()
        running = None
        while True:
            try:
                line = lines.get(timeout=SECONDS if running is not None else 120)
            except queue.Empty:
                process.kill()
                results.append({"case": running, "ended": "failure", "what": f"hangs: {SECONDS} s and more"})
                break
            if line is None:
                break
            try:
                said = json.loads(line)
            except ValueError:
                continue  # something printed by a library
            running = said.get("begin")
            if running is None:
                results.append(said)
        code = process.wait()
        if running is None:
            assert code == 0, f"the worker ended with {code}: {''.join(filter(None, errors))[-2000:]}"
            break
        if results[-1:] == [] or results[-1]["case"] != running:
            what = f"the process ended with {code}: {''.join(filter(None, errors))[:600]}"
            results.append({"case": running, "ended": "failure", "what": what})
        start = running + 1
    return results


def _read(stream, put) -> None:
    for line in stream:
        put(line)
    put(None)


# ---- tests -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def templates(tmp_path_factory) -> Path:
    return write_templates(tmp_path_factory.mktemp("templates"))


def test_the_undamaged_files_are_all_used_to_the_end(templates):
    fixed = Fixed(templates)
    kinds = Counter()
    for subject in subjects(templates):
        use(subject.parent.name, subject, fixed)
        kinds[subject.parent.name] += 1
    assert kinds == {
        "capture": len(capture_writers.WRITERS),
        "draft": len(DRAFTS) + 3,
        "head": 3,
        "report": 1,
    }


def check(results: list[dict], cases: range) -> None:
    """No failures; and the damage is such that both values and errors come out, of every format."""
    failures = [r for r in results if r["ended"] == "failure"]
    listed = "\n".join(map(str, failures[:30]))
    assert not failures, f"{len(failures)} of {len(cases)} (python -m tests.test_mutations CASE):\n{listed}"
    assert [r["case"] for r in results] == list(cases)
    ends = Counter((r["format"], r["ended"]) for r in results)
    for name in {r["format"] for r in results}:
        assert ends[name, "error"] > 0.05 * (ends[name, "error"] + ends[name, "value"]), (name, ends)


def test_500_damaged_files_end_in_a_value_or_one_typed_error(templates, tmp_path):
    check(run_cases(FAST, templates, tmp_path), FAST)


@pytest.mark.slow
def test_10000_damaged_files_end_in_a_value_or_one_typed_error(templates, tmp_path):
    results = run_cases(ALL, templates, tmp_path)
    check(results, ALL)
    assert {r["ended"] for r in results} == {"value", "error"}
    kinds = {(r["format"], r["what"]) for r in results if r["ended"] == "error"}
    assert len(kinds) > 200, len(kinds)  # many different errors, not one that hides the rest


def test_the_harness_sees_crashes_hangs_memory_and_code(templates, tmp_path, monkeypatch):
    """Each kind of failure, made on purpose, is reported as the failure of its own case."""
    acts = ["os.kill(os.getpid(), 11)", "time.sleep(999)", "bytearray(3 << 30)", "[][0]"]
    acts += ["b'x' * (700 << 20)", "open(marker, 'w')", "None"]
    monkeypatch.setenv(ACTS, json.dumps(acts))
    monkeypatch.setattr(sys.modules[__name__], "SECONDS", 5)
    results = run_cases(range(len(acts)), templates, tmp_path)
    assert [r["case"] for r in results] == list(range(len(acts)))
    expected = [
        "ended with -11: Fatal Python error: Segmentation fault",
        "hangs",
        "MemoryError",
        "IndexError",
        "MiB of memory",
        "code in the file",
    ]
    for result, what in zip(results, expected, strict=False):
        assert result["ended"] == "failure" and what in result["what"], result
    assert results[-1]["ended"] == "value"


if __name__ == "__main__":
    arguments = sys.argv[1:]
    if len(arguments) == 4:
        worker(Path(arguments[0]), Path(arguments[1]), int(arguments[2]), int(arguments[3]))
    else:
        with tempfile.TemporaryDirectory() as made:
            where = write_templates(Path(made) / "templates")
            for number in map(int, arguments):
                print(run_case(number, where, Path(made), Fixed(where), trace=True))
