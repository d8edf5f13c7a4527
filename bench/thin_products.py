"""Products of few rows: `lib.products.product` beside torch's own F.linear and the memory's bandwidth.

    make bench        or        .venv/bin/python bench/thin_products.py [--repeats 9] [--megabytes 384]

A decoding step multiplies 1 to 16 rows with every weight of the model, each read from memory once. So
the weights here are as many copies as fill `--megabytes`, far more than a cache holds, multiplied one
after the other; the floor is reading the same bytes once (a dot product with itself). The variants take
turns (A B C A B C ...), so that a drifting machine touches all alike. Ratios are what counts.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
from pathlib import Path

import torch
import torch.nn.functional as F

from bench._timing import measure, ratios
from lib.products import THIN, product

ROOT = Path(__file__).resolve().parents[1]
# (outputs, inputs) of the sample target's weights; lm_head is the embedding.
SHAPES = {
    "q, o": (576, 576),
    "k, v": (192, 576),
    "gate, up": (1536, 576),
    "down": (576, 1536),
    "lm_head": (49152, 576),
}
READ = 4 << 20  # numbers a dot product of the floor takes at once


def copies(shape: tuple[int, int], megabytes: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """One flat buffer of about `megabytes` (two weights at least), and the weights that lie in it."""
    size = shape[0] * shape[1]
    n = max(2, (megabytes << 20) // (4 * size))
    flat = torch.randn(n * size)
    return flat, list(flat.view(n, *shape))


def multiply(call, x, weights) -> None:
    for weight in weights:
        call(x, weight)


def read(flat) -> None:
    for part in flat.split(READ):
        part.dot(part)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--megabytes", type=int, default=384)
    parser.add_argument("--rows", type=int, nargs="+", default=range(1, THIN + 1))
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results" / "thin_products.json")
    args = parser.parse_args()

    table, bandwidth, worst = {}, [], 0.0
    for name, shape in SHAPES.items():
        flat, weights = copies(shape, args.megabytes)
        for rows in args.rows:
            x = torch.randn(rows, shape[1])
            ours, theirs = product(x, weights[0]), F.linear(x, weights[0])
            worst = max(worst, float((ours - theirs).abs().max() / theirs.abs().max()))
            with torch.inference_mode():
                seconds = measure(
                    {
                        "product": lambda: multiply(product, x, weights),  # noqa: B023 (called here)
                        "linear": lambda: multiply(F.linear, x, weights),  # noqa: B023
                        "floor": lambda: read(flat),  # noqa: B023
                    },
                    args.repeats,
                )
            bandwidth += [flat.numel() * 4 / s / 1e9 for s in seconds["floor"]]
            row = {
                "linear / product": ratios(seconds["linear"], seconds["product"]),
                "product / floor": ratios(seconds["product"], seconds["floor"]),
                "linear / floor": ratios(seconds["linear"], seconds["floor"]),
                "product, microseconds": round(statistics.median(seconds["product"]) / len(weights) * 1e6, 1),
            }
            table.setdefault(f"{name} {shape[0]}x{shape[1]}", {})[str(rows)] = row
            print(f"{name:10} {rows:3} rows   " + "   ".join(f"{k} {v}" for k, v in row.items()))
    assert worst < 1e-4, f"the products differ by {worst:.1e} of the largest value: not the same computation"

    result = {
        "machine": f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads, "
        f"torch {torch.__version__}, fp32",
        "megabytes of weights": args.megabytes,
        "repeats": args.repeats,
        "read bandwidth, GB/s": f"{statistics.median(bandwidth):.1f} "
        f"({min(bandwidth):.1f} to {max(bandwidth):.1f})",
        "largest difference, relative": float(f"{worst:.1e}"),
        "by shape and rows": table,
    }
    print(f"read bandwidth {result['read bandwidth, GB/s']} GB/s, largest difference {worst:.1e}")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
