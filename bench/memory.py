"""Peak memory of a prediction: does it grow with the draft's vocabulary, or with the number of captures?

    make bench        or        .venv/bin/python bench/memory.py [--hidden 1024]

Random bf16 drafts (hidden 1024, target vocabulary 163,840) with draft vocabularies of 8k, 32k and 128k, and
8, 32 or 64 captures of 512 tokens. 8 of them fill one batch; with more, the next batch may be made before
the last is let go. Every measurement has a process of its own (`bench.kimi.Memory`):

- beside weights: the peak (VmHWM) over opening the captures and predicting, less what the process held
  after its imports, less the bytes of the weights in use (all but the embedding table).
- private: the peak of what is not a page of a file. Files are mapped, so the system can drop the rest.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import torch

from bench import kimi
from bench._timing import machine

ROOT = Path(__file__).resolve().parents[1]
VOCABULARIES = (8192, 32768, 131_072)
CAPTURES = (8, 32, 64)


def measured(draft_folder: Path, captures_folder: Path, number: int, depths: int) -> dict:
    """Open a draft and captures and predict, in this process: peaks."""
    from lib.captures import open_folder
    from lib.checkpoints import load_draft
    from lib.contract import Rope
    from lib.draft import DraftForward
    from lib.rope import rope_table

    rope_table(Rope(), 8, torch.arange(1), torch.float32)  # transformers is imported here, not below
    with kimi.Memory() as memory:
        draft = load_draft(draft_folder, dtype=None)
        captures = open_folder(captures_folder, taps=kimi.TAPS, limit=number).captures
        p = DraftForward(draft).predict(captures, depths=depths)
    grown, weights = memory.grown(), kimi.used(draft)
    return {
        "captures": len(captures), "draft vocabulary": draft.draft_vocab, "predictions": p.draft_ids.numel(),
    } | {
        name: round(value / 1e6, 1)
        for name, value in (
            ("weights, MB", weights),
            ("beside weights, MB", grown["peak"] - weights),
            ("private, MB", grown["private"]),
        )
    }  # fmt: skip


def in_own_process(*arguments) -> dict:
    call = [sys.executable, "-m", "bench.memory", "--measure", *map(str, arguments)]
    out = subprocess.run(call, cwd=ROOT, capture_output=True, text=True)
    if out.returncode:
        raise SystemExit(out.stderr)
    return json.loads(out.stdout.splitlines()[-1])


def write_captures(folder: Path, sizes: kimi.Sizes) -> Path:
    """As many copies of one made-up conversation as the largest measurement takes."""
    if len(list(folder.glob("hs_*"))) != max(CAPTURES):
        first = kimi.write_capture(folder, sizes)
        for i in range(1, max(CAPTURES)):
            shutil.copy(first, folder / f"hs_{i}.safetensors")
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--depths", type=int, default=1)
    parser.add_argument("--folder", type=Path, default=ROOT / ".work" / "memory")
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results" / "memory.json")
    parser.add_argument(
        "--measure", nargs=4, metavar=("DRAFT", "CAPTURES", "NUMBER", "DEPTHS"), help="by itself"
    )
    args = parser.parse_args()
    if args.measure:
        draft, captures, number, depths = args.measure
        print(json.dumps(measured(Path(draft), Path(captures), int(number), int(depths))))
        return

    sizes = replace(
        kimi.Sizes(), hidden=args.hidden, vocab=max(VOCABULARIES) * 5 // 4, heads=8,
        inner=(2 * args.hidden, 2 * args.hidden), tokens=args.tokens,
    )  # fmt: skip
    root = args.folder / f"{args.hidden}_{args.tokens}"
    captures, found = write_captures(root / "captures", sizes), []
    for vocabulary in VOCABULARIES:
        folder = kimi.write(root / str(vocabulary), "grouped", replace(sizes, draft_vocab=vocabulary))
        # The number of captures is varied with the smallest vocabulary, whose own share is the smallest.
        for number in CAPTURES if vocabulary == min(VOCABULARIES) else CAPTURES[:1]:
            found.append(in_own_process(folder, captures, number, args.depths))
            print(json.dumps(found[-1]), flush=True)

    def grown(field: str, low: int, high: int) -> dict[str, float]:
        """Peaks over peaks of two runs that differ in `field` alone."""
        other = {"captures": "draft vocabulary", "draft vocabulary": "captures"}[field]
        runs = {run[field]: run for run in found if run[other] == min(run[other] for run in found)}
        return {
            key: round(runs[high][f"{key}, MB"] / runs[low][f"{key}, MB"], 6)
            for key in ("beside weights", "private")
        }

    result = {
        "machine": machine("bf16"),
        "sizes": {k: v for k, v in vars(sizes).items() if k != "draft_vocab"},
        "runs": found,
    }
    result["draft vocabulary 128k / 8k"] = grown("draft vocabulary", 8192, 131_072)
    result |= {f"captures {high} / {low}": grown("captures", low, high) for low, high in ((8, 32), (32, 64))}
    print(json.dumps(result, indent=1))
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
