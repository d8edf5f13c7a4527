"""What the benches share: variants timed in turn, and ratios taken run by run."""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import torch


def measure(variants: Mapping[str, Callable], repeats: int, *, warm: bool = True) -> dict[str, list[float]]:
    """Seconds per variant, run in turn (A B C A B C ...), so that a drifting machine touches all alike.

    `warm` runs each once before; without it the caller has done so.
    """
    for call in variants.values() if warm else ():
        call()
    seconds = {name: [] for name in variants}
    for _ in range(repeats):
        for name, call in variants.items():
            began = time.perf_counter()
            call()
            seconds[name].append(time.perf_counter() - began)
    return seconds


def ratio(a: Sequence[float], b: Sequence[float]) -> dict[str, float]:
    """Median and range of a / b, run by run."""
    r = [x / y for x, y in zip(a, b, strict=True)]
    found = {"median": statistics.median(r), "low": min(r), "high": max(r)}
    return {name: float(f"{value:.6g}") for name, value in found.items()} | {"runs": len(r)}


def ratios(a: Sequence[float], b: Sequence[float]) -> str:
    """The same in words."""
    r = sorted(x / y for x, y in zip(a, b, strict=True))
    return f"{statistics.median(r):.2f}x ({r[0]:.2f} to {r[-1]:.2f})"


def medians(seconds: Mapping[str, list[float]]) -> dict[str, float]:
    """Median seconds per variant."""
    return {name: round(statistics.median(s), 4) for name, s in seconds.items()}


def machine(dtype: str) -> str:
    """What all numbers of a record were measured on."""
    name = platform.processor() or platform.machine()
    return f"{name}, {torch.get_num_threads()} threads, torch {torch.__version__}, {dtype}"
