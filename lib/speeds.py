"""Speed of several deployments on this machine: the workbook's loop, and the serving engine.

A speed is a median over repeats with its spread, and a ratio to the baseline of the same repeat:
absolute times are not facts on a noisy machine.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from torch import Tensor
from tqdm import tqdm

from lib.decoding import Generation
from lib.engine import Counters, Deployment, serve

ROOT = Path(__file__).resolve().parents[1]
RECORD = ROOT / "bench" / "results" / "engine.json"  # written by bench/engine.py


@dataclass(frozen=True)
class Speed:
    """One deployment's speed.

    Attributes:
        rates: tokens a second, one value per repeat.
        ratios: to the baseline of the same repeat.
        tokens_per_round: bonus included; 1 without speculation.
    """

    rates: tuple[float, ...]
    ratios: tuple[float, ...]
    tokens_per_round: float

    @property
    def rate(self) -> float:
        """Median tokens a second."""
        return statistics.median(self.rates)

    @property
    def ratio(self) -> float:
        """Median ratio to the baseline."""
        return statistics.median(self.ratios)

    def row(self) -> dict[str, Any]:
        """For tables."""
        return {
            "tok/s": round(self.rate, 1),
            "spread": f"{min(self.rates):.1f} .. {max(self.rates):.1f}",
            "ratio": round(self.ratio, 2),
            "ratio spread": f"{min(self.ratios):.2f} .. {max(self.ratios):.2f}",
            "tokens per round": round(self.tokens_per_round, 2),
        }


def speed_rows(speeds: Mapping[str, Speed]) -> pd.DataFrame:
    """One row per deployment."""
    return pd.DataFrame({name: speed.row() for name, speed in speeds.items()}).T.rename_axis("deployment")


def in_turns(
    variants: Mapping[str, Callable[[Tensor], Generation]], prompts: Sequence[Tensor], repeats: int = 5
) -> tuple[dict[str, Speed], dict[str, list[Generation]]]:
    """Measure variants of the workbook's loop; the first one is the baseline.

    Variants take turns inside each repeat, so that a slow moment of the machine hits all of them.
    One pass of each over the first prompt warms up. Rates leave out the prompt's pass.

    Returns: speed per variant, and the generations of the last repeat, one per prompt.
    """
    baseline = next(iter(variants))
    rates: dict[str, list[float]] = {name: [] for name in variants}
    runs: dict[str, list[Generation]] = {}
    for run in variants.values():
        run(prompts[0])
    for _ in tqdm(range(repeats), desc="repeats", mininterval=5, disable=None):
        for name, run in variants.items():
            runs[name] = [run(prompt) for prompt in prompts]
            rates[name].append(overall_rate(runs[name]))
    speeds = {}
    for name, done in runs.items():
        rounds = sum(len(g.gained) for g in done)
        gained = sum(sum(g.gained) for g in done)
        ratios = tuple(a / b for a, b in zip(rates[name], rates[baseline], strict=True))
        speeds[name] = Speed(tuple(rates[name]), ratios, gained / rounds if rounds else 1.0)
    return speeds, runs


def overall_rate(runs: Sequence[Generation]) -> float:
    """Tokens a second over several answers, their prompts' passes left out."""
    return sum(len(g.tokens) - 1 for g in runs) / sum(g.seconds for g in runs)


@dataclass(frozen=True)
class Served:
    """What one served deployment did: tok/s per repeat, the last repeat's answers, counts of speculation."""

    rates: tuple[float, ...]
    answers: tuple[tuple[int, ...], ...]
    counters: Counters | None


def serve_each(
    deployments: Mapping[str, Deployment], prompts: Sequence[Tensor], max_tokens: int, repeats: int = 5
) -> dict[str, Served]:
    """Serve one deployment after the other and time the same greedy requests of each.

    Rates are those of a client: the whole request, prompt included. A first request of 16 tokens
    warms up; counters cover the last repeat only.
    """
    out = {}
    for name, deployment in tqdm(deployments.items(), desc="servers", mininterval=5, disable=None):
        with serve(deployment) as server:
            server.generate(prompts[:1], min(16, max_tokens))
            rates = []
            for _ in range(repeats):
                before = server.counters() if deployment.draft else None
                answers = server.generate(prompts, max_tokens)
                tokens = sum(len(a.token_ids) for a in answers)
                rates.append(tokens / sum(a.seconds for a in answers))
            counters = server.counters() - before if before else None
        out[name] = Served(tuple(rates), tuple(a.token_ids for a in answers), counters)
    return out


def served_speeds(served: Mapping[str, Served]) -> dict[str, Speed]:
    """Speeds of `serve_each`; the first deployment is the baseline, its median the yardstick of all."""
    plain = statistics.median(next(iter(served.values())).rates)
    return {
        name: Speed(
            s.rates,
            tuple(rate / plain for rate in s.rates),
            s.counters.tokens_per_round if s.counters else 1.0,
        )
        for name, s in served.items()
    }


def recorded() -> dict[str, Any]:
    """The committed record of the serving engine (bench/engine.py): machine, settings, deployments."""
    return json.loads(RECORD.read_text())


def recorded_speeds() -> dict[str, Speed]:
    """Speeds in the record."""
    return {
        name: Speed(tuple(d["rates"]), tuple(d["ratios"]), d["tokens_per_round"])
        for name, d in recorded()["deployments"].items()
    }


def agreement(record: Mapping[str, Any]) -> pd.DataFrame:
    """vLLM's counters beside what captures alone predict, one row per deployment in the record."""
    rows = {}
    for name, c in record["counts"].items():
        engine, offline = c["engine"], c["from captures"]
        low, high = offline["interval"]
        rows[name] = {
            "vLLM": engine["tokens_per_round"],
            "from captures": offline["tokens_per_round"],
            "95 % interval": f"{low:.2f} .. {high:.2f}",
            "inside": low <= engine["tokens_per_round"] <= high,
            "from its texts": c["from the engine's texts"]["tokens_per_round"],
            "accepted at 0..3": _joint(engine),
            "from captures 0..3": _joint(offline),
        }
    return pd.DataFrame(rows).T.rename_axis("tokens per round")


def _joint(counts: Mapping[str, Any]) -> str:
    return " ".join(f"{n / counts['rounds']:.2f}" for n in counts["accepted_at"][:4])
