"""The draft forward on a GPU: beside bare matrix products, its transfers, and what compiling would bring.

    make bench        or        .venv/bin/python bench/gpu.py [--repeats 9] [--folder .work/kimi]

Needs a CUDA device; without one it says so, writes nothing and ends well. Two sizes of drafts, in bf16 and
fp32: "smollm2" is sample draft (a) on its 32 captures, "kimi" the random grouped draft of bench/kimi.py on 32
captures of 512 tokens. Times are between events on the device, medians over runs that take turns.
(Not called cuda.py: a script's folder comes first on the path, and torch imports a package `cuda`.)

- floor: the matrix products of step 0 alone, at the shapes of our batches.
- step 0, depths 1 to 8 (text fed back), rollouts 8 (own tokens), sweep of 24 orders.
- transfer: bytes a second to the device from page-locked and from ordinary memory; states ahead or on demand.
- packing: step 0 by pairs in a batch.
- chain step: as it is, through torch.compile, and as a CUDA graph of these shapes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import time
from collections.abc import Callable
from datetime import date
from functools import partial
from pathlib import Path

import torch

from bench import kimi
from bench._peers import floor_products, multiply
from bench._timing import ratios
from lib import samples
from lib.captures import open_capture
from lib.checkpoints import load_draft
from lib.draft import DraftForward, to_device
from lib.sweep import ordered_choices, sweep
from lib.transfer import BATCH_PAIRS, batches_for

ROOT = Path(__file__).resolve().parents[1]
DTYPES = (torch.bfloat16, torch.float32)
DEPTHS = 8
COPY = 256 << 20  # bytes of a transfer


def milliseconds(device: torch.device, calls: dict[str, Callable], repeats: int) -> dict[str, list[float]]:
    """Times of each call, in turn, after two warm-ups each; on a GPU between events."""
    for call in calls.values():
        call()
        call()
    times = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            times[name].append(_timed(device, call))
    return times


def _timed(device: torch.device, call: Callable) -> float:
    if device.type != "cuda":
        began = time.perf_counter()
        call()
        return 1e3 * (time.perf_counter() - began)
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    first.record()
    call()
    last.record()
    torch.cuda.synchronize()
    return first.elapsed_time(last)


def spread(times: list[float]) -> dict[str, float]:
    """Median, least and most, in milliseconds."""
    return {
        "median": round(statistics.median(times), 3),
        "min": round(min(times), 3),
        "max": round(max(times), 3),
    }


class FixedTables(DraftForward):
    """Rotary tables kept by depth, so that a chain step on one batch is device work only."""

    def rope(self, time, depth, contract):
        kept = self.__dict__.setdefault("kept", {})
        if (depth, len(time)) not in kept:
            kept[depth, len(time)] = super().rope(time, depth, contract)
        return kept[depth, len(time)]


def chain_step(draft, captures, contract, repeats: int, compiling: bool = True) -> dict:
    """One step of all chains of one batch, their own tokens fed: eager, compiled, and as a CUDA graph."""
    forward = FixedTables(draft)
    batch = next(iter(forward.batches(captures)))
    hidden, keys = forward.first_step(batch, contract)
    token = forward.placed.to_target(forward.head(hidden, False)[0], contract.vocab_map)
    base: list[list] = [[] for _ in draft.layers]

    def eager(step=forward.chain_step):
        return step(batch, contract, 1, token, hidden, keys, [list(chain) for chain in base])

    calls, notes = {"eager": eager}, {}
    expected = eager()

    def gap(found) -> float:
        return float((found - expected).abs().max() / expected.abs().max())

    def compiled() -> None:
        step = torch.compile(forward.chain_step)
        began = time.perf_counter()
        notes["compiled, gap"] = gap(eager(step))
        notes["compile, s"] = round(time.perf_counter() - began, 1)
        calls["compiled"] = lambda: eager(step)

    def graph() -> None:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # a graph is captured after a warm-up on a stream of its own
            eager()
        torch.cuda.current_stream().wait_stream(side)
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            replayed = eager()
        captured.replay()
        notes["graph, gap"] = gap(replayed)
        calls["graph"] = captured.replay

    for name, attempt, wanted in (
        ("compiled", compiled, compiling), ("graph", graph, forward.device.type == "cuda"),
    ):  # fmt: skip
        try:
            _ = attempt() if wanted else None
        except Exception as err:  # no compiler, or an operation that no graph can hold: the rest goes on
            notes[f"{name}, not run"] = repr(err)[:300]
    times = milliseconds(forward.device, calls, repeats)
    shares = {f"{name} / eager": ratios(times[name], times["eager"]) for name in calls if name != "eager"}
    return {"rows": len(hidden), "ms": {n: spread(t) for n, t in times.items()}, **shares, **notes}


def bandwidth(device: torch.device, repeats: int, size: int = COPY) -> dict[str, float]:
    """GB/s to the device from page-locked and from ordinary memory."""
    there = torch.empty(size, dtype=torch.uint8, device=device)
    here = {"pageable": torch.ones(size, dtype=torch.uint8)}
    if device.type == "cuda":
        here["pinned"] = here["pageable"].pin_memory()
    copies = {name: (lambda x=x: there.copy_(x, non_blocking=True)) for name, x in here.items()}
    times = milliseconds(device, copies, repeats)
    return {name: round(size / 1e6 / statistics.median(t), 2) for name, t in times.items()}


def measure(draft, captures, taps, stored, repeats: int, compiling: bool = True) -> dict:
    """Everything about one draft on its device, in its dtype."""
    forward, contract = DraftForward(draft), draft.contract.change(taps=taps)
    candidates = [draft.contract.change(taps=t) for t in ordered_choices(stored, len(taps))]

    work = floor_products(forward, batches_for(forward, captures, [contract]))

    def on_demand() -> None:
        for batch in forward.batches(captures):
            forward.run(batch, contract, 1, "teacher", False)

    def ahead() -> None:
        for batch in batches_for(forward, captures, [contract], batch_pairs=BATCH_PAIRS):
            forward.run(batch, contract, 1, "teacher", False)

    calls = {
        "floor": partial(multiply, work),
        "step 0": lambda: forward.predict(captures, contract),
        f"depths 1 to {DEPTHS}": lambda: forward.predict(captures, contract, depths=1 + DEPTHS),
        f"rollouts {DEPTHS}": lambda: forward.predict(captures, contract, depths=DEPTHS, feed="own"),
        f"sweep of {len(candidates)}": lambda: sweep(forward, captures, candidates),
        "states on demand": on_demand,
        "states ahead": ahead,
    }
    for pairs in (1024, 4096, 16_384):
        calls[f"step 0, {pairs} pairs a batch"] = lambda n=pairs: forward.predict(
            captures, contract, batch_pairs=n
        )
    times = milliseconds(forward.device, calls, repeats)
    names = [n for n in calls if n.startswith(("step 0", "depths", "rollouts", "sweep"))]
    return {
        "pairs": sum(len(c) - 1 for c in captures), "scored": sum(len(c.scored) for c in captures),
        "ms": {n: spread(t) for n, t in times.items()},
        "to the floor": {n: ratios(times[n], times["floor"]) for n in names},
        "ahead / on demand": ratios(times["states ahead"], times["states on demand"]),
        "chain step": chain_step(draft, captures, contract, repeats, compiling),
    }  # fmt: skip


def kimi_captures(folder: Path, sizes: kimi.Sizes, count: int = 32):
    """The one random capture under many names, its first quarter the prompt."""
    path = kimi.write_capture(folder, sizes)
    capture = open_capture(path, taps=kimi.TAPS, loss_mask=torch.arange(sizes.tokens) >= sizes.tokens // 4)
    return [capture] * count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--folder", type=Path, default=ROOT / ".work" / "kimi")
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results" / "cuda.json")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print(f"no CUDA device (torch {torch.__version__}): nothing measured, nothing written")
        return
    device = torch.device("cuda", torch.cuda.current_device())
    asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", f"--id={device.index}"]
    result = {
        "device": torch.cuda.get_device_name(device),
        "driver": subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip(),
        "torch": f"{torch.__version__}, CUDA {torch.version.cuda}",
        "fp32 products in TF32": torch.backends.cuda.matmul.allow_tf32,
        "date": date.today().isoformat(), "GB/s": bandwidth(device, args.repeats),
    }  # fmt: skip
    sizes, stored = kimi.Sizes(), samples.STORED_TAPS
    heavy = load_draft(kimi.write(args.folder / "grouped", "grouped", sizes), dtype=None)
    light = samples.draft("a", samples.target_head())
    jobs = {
        "smollm2": (light, samples.captures(), samples.TRAINED_TAPS["a"], stored),
        "kimi": (heavy, kimi_captures(args.folder, sizes), heavy.contract.taps, None),
    }
    with torch.inference_mode():
        for name, (draft, captures, taps, known) in jobs.items():
            for dtype in DTYPES:
                placed = to_device(draft, device, dtype)
                found = measure(placed, captures, taps, known or captures[0].taps, args.repeats)
                result[f"{name}, {str(dtype).removeprefix('torch.')}"] = found
                print(name, dtype, json.dumps(found, indent=1))
                args.out.write_text(json.dumps(result, indent=1) + "\n")  # device time may end any moment
                del placed
                torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
