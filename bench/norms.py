"""Norm statistics over a folder of captures, beside reading its files once and the usual one-liners.

    make bench        or        .venv/bin/python bench/norms.py [--captures 4] [--repeats 9]

Two folders: the incident's sample captures, and made-up ones of the incident's own size (hidden 7168, bf16,
1,918 tokens, 4 states, 110 MB each; written once to `.work/kimi/norms`). In one process, in turn, for each:

- read: every byte of the files, one after another, into one reused buffer of 1 MB that stays in the cache;
  the files are in the page cache. A plain read on one thread; ours has mapped pages and torch's threads.
- ours: `norm_statistics` of captures that `open_folder` opened; once with the opening.
- torch, numpy: `x.float().norm(dim=-1)` and `np.linalg.norm` over the same states, from the same readers:
  norms alone, no check for NaN, no sinks, no quantiles.

Ratios are what counts; seconds are this machine's.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from bench import kimi
from bench._timing import machine, measure, medians, ratio
from lib import samples
from lib.captures import Capture, capture_files, open_folder
from lib.norms import norm_statistics, position_norms

ROOT = Path(__file__).resolve().parents[1]
BUFFER = 1 << 20  # bytes


def wide_folder(folder: Path, captures: int, tokens: int) -> Path:
    """Copies of one made-up capture; written anew if their number or length is another."""
    folder = folder / f"{captures}_of_{tokens}"
    if len(list(folder.glob("hs_*"))) != captures:
        first = kimi.write_capture(folder, replace(kimi.Sizes(), tokens=tokens))
        for i in range(1, captures):
            shutil.copy(first, folder / f"hs_{i}.safetensors")
    return folder


def read(files: list[Path], buffer: memoryview) -> int:
    """Bytes of all files, each read to its end."""
    total = 0
    for path in files:
        with open(path, "rb", buffering=0) as file:
            while n := file.readinto(buffer):
                total += n
    return total


def states(captures: tuple[Capture, ...]) -> Iterator[Tensor]:
    """Every stored state, as the file has it."""
    for capture in captures:
        for reader in capture.readers.values():
            yield reader()


def measured(folder: Path, repeats: int) -> dict:
    files, captures = list(capture_files(folder).files), open_folder(folder).captures
    buffer = memoryview(bytearray(BUFFER))
    for x in states(captures):
        ours, theirs = position_norms(x), x.float().norm(dim=-1)
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=0)
        np.testing.assert_allclose(np.linalg.norm(x.float().numpy(), axis=-1), theirs.numpy(), rtol=1e-5)
    for tap, norms in norm_statistics(captures).items():
        every = torch.cat([position_norms(c.state(tap)) for c in captures])
        assert norms.parts["all"].count == len(every), tap
        torch.testing.assert_close(norms.parts["all"].mean, float(every.double().mean()), rtol=1e-6, atol=0)
    seconds = measure(
        {
            "read": lambda: read(files, buffer),
            "ours": lambda: norm_statistics(captures),
            "ours, opening included": lambda: norm_statistics(open_folder(folder).captures),
            "torch": lambda: [x.float().norm(dim=-1) for x in states(captures)],
            "numpy": lambda: [np.linalg.norm(x.float().numpy(), axis=-1) for x in states(captures)],
        },
        repeats,
    )
    of_states = sum(x.numel() * x.element_size() for x in states(captures))
    return {
        "captures": len(captures), "positions": sum(map(len, captures)), "hidden": captures[0].hidden_size,
        "MB read": round(read(files, buffer) / 1e6, 1), "MB of states": round(of_states / 1e6, 1),
        "ours / read": ratio(seconds["ours"], seconds["read"]),
        "ours, opening included / read": ratio(seconds["ours, opening included"], seconds["read"]),
        "torch / ours": ratio(seconds["torch"], seconds["ours"]),
        "numpy / ours": ratio(seconds["numpy"], seconds["ours"]),
        "median seconds": medians(seconds),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--captures", type=int, default=4, help="of Kimi's width")
    parser.add_argument("--tokens", type=int, default=1918, help="of each")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--folder", type=Path, default=ROOT / ".work" / "kimi" / "norms")
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results" / "norms.json")
    args = parser.parse_args()
    result = {"machine": machine("bf16")}
    folders = {
        "sample": samples.SAMPLES / "captures" / "incident",
        "kimi": wide_folder(args.folder, args.captures, args.tokens),
    }
    for name, folder in folders.items():
        result[name] = measured(folder, args.repeats)
        print(name, json.dumps(result[name], indent=1))
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
