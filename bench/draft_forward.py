"""The draft forward beside speculators' model, SpecForge's and the bare matrix products.

    make bench        or        .venv/bin/python bench/draft_forward.py [--shapes sample kimi] [--parts ...]

- sample: the shipped draft (a) on the held-out captures, fp32.
- kimi: random weights of Kimi-K2.5's size (bench/kimi.py) on one capture of 512 tokens, bf16, in a process
  of its own. No contract is better than another there, so a race has nothing to drop and is not run.

Each part times its variants in one process on the same inputs, in turn (A B C A B C ...); what a ratio
compares always comes from the same part. Ratios are what counts; seconds are this machine's.

- step 0: floor (`floor_products`), ours on scored pairs, ours on all pairs, and the two models, which
  know no other than all pairs (speculators with sdpa attention, the faster of its two on a CPU).
- depths: 8 predictions a pair, depth 0 to 7, the text's tokens fed: `ttt_steps=8` and `depths=8`.
- rollouts: chains of 8 own tokens from every scored pair, beside one single pass: depth 0 on scored pairs.
- sweeps: 24 ordered triples, exact and raced, and a race of 200 contracts; how often a race would have
  found the exact winner, over conversations drawn again with replacement.

Nothing is timed before it was found to compute what the peer does: equal predictions in fp32, logits within
`CLOSE` on the first capture, further off with two taps swapped. Peers and floor get their inputs read, joined
and cast beforehand; ours reads, checks and casts the captures inside the timed region.

A shape or part that was not asked for keeps what `--out` already holds.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from bench import _peers as peers
from bench import kimi
from bench._timing import machine, measure, medians, ratio
from lib import samples, sweep
from lib.acceptance import rollouts
from lib.captures import Capture
from lib.contract import Contract
from lib.draft import BATCH_PAIRS, DraftForward
from lib.taps import Tap

ROOT = Path(__file__).resolve().parents[1]
DEPTHS = 8
# Largest relative difference of logits, by dtype: bf16 keeps 8 bits, and a chain adds up its roundings.
CLOSE = {torch.float32: 1e-4, torch.bfloat16: 0.1}


@dataclass(frozen=True)
class Setup:
    """What is measured: a prepared draft, captures, the contract to run and the taps to choose from."""

    forward: DraftForward
    captures: Sequence[Capture]
    contract: Contract
    taps: Sequence[Tap]
    repeats: int
    many: int = 200
    resamples: int = 200

    def single(self):
        return self.forward.predict(self.captures, self.contract)


def sample_setup(args) -> Setup:
    draft = samples.draft("a", samples.target_head())
    contract = draft.contract.change(taps=samples.TRAINED_TAPS["a"])
    captures = samples.captures(args.captures)
    return Setup(
        DraftForward(draft), captures, contract, samples.STORED_TAPS, args.repeats,
        many=args.contracts, resamples=args.resamples,
    )  # fmt: skip


def kimi_setup(args) -> Setup:
    from lib.captures import open_capture
    from lib.checkpoints import load_draft

    sizes = replace(kimi.Sizes(), tokens=args.tokens)
    path = kimi.write_capture(args.folder / f"tokens_{args.tokens}", sizes)
    draft = load_draft(kimi.write(args.folder / "grouped", "grouped", sizes), dtype=None)
    taps = tuple(map(Tap, kimi.TAPS))
    mask = torch.arange(args.tokens) >= args.tokens // 4
    capture = open_capture(path, taps=kimi.TAPS, loss_mask=mask)
    return Setup(
        DraftForward(draft), [capture], draft.contract.change(taps=taps[:3]), taps, args.kimi_repeats
    )


SETUPS = {"sample": sample_setup, "kimi": kimi_setup}


# ---- step 0 and depths ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Peer:
    """A model, how to run it, and the contract it computes."""

    model: torch.nn.Module
    run: Callable[..., Tensor]
    contract: Contract


@torch.no_grad()
def logits_of(model, run) -> Tensor:
    """Every logit a peer computes in `run`, (N, depths, Vd): it returns ids alone."""
    seen: list[Tensor] = []
    handle = model.lm_head.register_forward_hook(lambda _module, _inputs, out: seen.append(out[0]))
    try:
        run()
    finally:
        handle.remove()
    return torch.stack(seen, 1)


def same(at: Setup, peer: Peer, batches, depths: int) -> dict:
    """How far a peer's computation is from ours: predictions everywhere, logits on the first capture.

    AssertionError if they are not the same up to rounding, or if another order of taps would pass too.
    """
    own = at.forward.predict(at.captures, peer.contract, depths=depths, positions="all").draft_ids
    agree = float((own == peer.run(peer.model, batches, depths)).float().mean())
    theirs = logits_of(peer.model, lambda: peer.run(peer.model, batches[:1], depths)).float()

    def off(under: Contract) -> float:
        """Largest difference at any depth, relative to the size of that depth's logits."""
        p = at.forward.predict(at.captures[:1], under, depths=depths, positions="all", keep_logits=True)
        gap = (p.logits - theirs).norm(dim=(0, 2)) / theirs.norm(dim=(0, 2))  # (depths,)
        return float(gap.max())

    dtype = at.forward.dtype
    found = {"predictions agree": agree, "logits differ by": float(f"{off(peer.contract):.2g}")}
    found["with two taps swapped by"] = float(f"{off(swapped(peer.contract)):.2g}")
    assert found["logits differ by"] < CLOSE[dtype] < found["with two taps swapped by"], found
    # Equal rows of a made-up lm_head tie, and bf16 rounds near ties apart: ids decide in fp32 only.
    assert dtype == torch.bfloat16 or agree > 0.999, found
    return found


def swapped(contract: Contract) -> Contract:
    first, second, *rest = contract.taps
    return contract.change(taps=(second, first, *rest))


def models(at: Setup) -> tuple[dict[str, Peer], dict[str, str]]:
    """The peers that can be built here, and why the others cannot."""
    found = {
        "speculators": Peer(peers.speculators_model(at.forward.draft), peers.speculators_pass, at.contract)
    }
    try:
        from tests.specforge_model import specforge_model

        # It has one place for the residual only; the work is the same in both.
        contract = at.contract.change(norm_before_residual=False)
        found["SpecForge"] = Peer(specforge_model(at.forward.draft), peers.specforge_pass, contract)
    except ImportError as err:
        return found, {"SpecForge": repr(err)}
    return found, {}


def beside_peers(at: Setup, depths: int) -> dict:
    """Ours, the floor and the peers at this many depths, teacher-fed."""
    forward, captures = at.forward, at.captures
    batches = peers.speculators_batches(captures, at.contract.taps, forward.dtype)
    work = peers.floor_products(forward, forward.batches(captures), depths)
    variants = {
        "floor": lambda: peers.multiply(work),
        "ours": lambda: forward.predict(captures, at.contract, depths=depths),
        "ours, all positions": lambda: forward.predict(captures, at.contract, depths=depths, positions="all"),
    }
    built, missing = models(at)
    agreement = {}
    for name, peer in built.items():
        try:
            peer.run(peer.model, batches[:1], depths)
        except RuntimeError as err:  # a peer that compiles needs a compiler
            missing[name] = repr(err)[:300]
            continue
        agreement[name] = same(at, peer, batches, depths)
        variants[name] = lambda peer=peer: peer.run(peer.model, batches, depths)
        if depths > 1:
            variants[f"{name}, one step"] = lambda peer=peer: peer.run(peer.model, batches)
    if depths > 1:
        variants["ours, one step"] = at.single
    with torch.inference_mode():
        at.single()
        seconds = measure(variants, at.repeats)
    found = {"predictions a pair": depths, "same computation": agreement, "not run": missing}
    found["ours / floor"] = ratio(seconds["ours"], seconds["floor"])
    for name in agreement:
        found[f"{name} / ours"] = ratio(seconds[name], seconds["ours"])
        found[f"{name} / ours, all positions"] = ratio(seconds[name], seconds["ours, all positions"])
        found[f"{name} / floor"] = ratio(seconds[name], seconds["floor"])
    for name in (*agreement, "ours") if depths > 1 else ():
        found[f"{name} / {name}, one step"] = ratio(seconds[name], seconds[f"{name}, one step"])
    return found | {"median seconds": medians(seconds)}


# ---- rollouts and sweeps --------------------------------------------------------------------------


def rolled_out(at: Setup) -> dict:
    single = at.single()
    own = rollouts(at.forward, at.captures, at.contract, DEPTHS)
    taught = at.forward.predict(at.captures, at.contract, depths=DEPTHS)
    assert torch.equal(own.draft_ids[:, :1], single.draft_ids), "depth 0 is not the single pass"
    # Up to its first miss, a chain is fed what the text has: there both kinds of chain are one.
    right = torch.cat((torch.ones(len(own.hit), 1), own.hit[:, :-1]), 1).cumprod(1).bool()
    agree = float((own.draft_ids == taught.draft_ids)[right].float().mean())
    assert agree > 0.999, f"{agree:.4f}: chains that were fed the same differ"
    variants = {
        "single pass": at.single,
        "rollouts": lambda: rollouts(at.forward, at.captures, at.contract, DEPTHS),
    }
    seconds = measure(variants, at.repeats)
    return {
        "chain tokens": DEPTHS, "fed alike, agree": agree,
        "rollouts / single pass": ratio(seconds["rollouts"], seconds["single pass"]),
        "median seconds": medians(seconds),
    }  # fmt: skip


def triples(at: Setup) -> list[Contract]:
    return [at.contract.change(taps=taps) for taps in sweep.ordered_choices(at.taps, 3)]


def many(at: Setup) -> list[Contract]:
    """Of the 288 wirings of token shift, residual and head norm over the 24 triples; the true one first."""
    space = [
        contract.change(token_shift=shift, norm_before_residual=residual, head_norm=norm)
        for contract in triples(at)
        for shift, residual, norm in itertools.product((0, 1, 2), (True, False), (True, False))
    ]
    others = [contract for contract in space if contract != at.contract]
    assert len(others) == len(space) - 1
    return [at.contract, *random.Random(0).sample(others, at.many - 1)]


def resampled(exact: sweep.Sweep, times: int) -> dict:
    """The race replayed on redrawn lists of conversations, each with an order of its own."""
    found, passes, n = 0, [], len(exact.counts)
    rng = torch.Generator().manual_seed(0)
    for seed in range(times):
        redrawn = exact.on(torch.randint(n, (n,), generator=rng))
        raced = sweep.replay(redrawn, seed=seed)
        found += raced.winner == redrawn.winner
        passes.append(raced.passes)
    return {
        "resamples": times, "share with the exact winner": found / times,
        "passes": [round(min(passes), 1), round(max(passes), 1)],
    }  # fmt: skip


def swept(at: Setup) -> dict:
    forward, captures, few = at.forward, at.captures, triples(at)
    variants = {"single pass": at.single, "24 exact": lambda: sweep.sweep(forward, captures, few)}
    found = {}
    if len(captures) < sweep.FEWEST:
        found["not raced"] = f"{len(captures)} conversation, and no contract better than another"
    else:
        lots = many(at)
        variants["24 raced"] = lambda: sweep.race(forward, captures, few)
        variants[f"{at.many} raced"] = lambda: sweep.race(forward, captures, lots)
        for name, contracts in (("24", few), (str(at.many), lots)):
            exact, raced = sweep.sweep(forward, captures, contracts), sweep.race(forward, captures, contracts)
            assert raced.winner == exact.winner, f"{name}: the race has another winner"
            assert torch.equal(sweep.replay(exact).seen, raced.seen), f"{name}: not the race that is replayed"
            found |= {
                f"{name}: winner is the trained wiring": exact.winner == at.contract,
                f"{name}: passes raced": round(raced.passes, 2),
                f"{name}: resampled": resampled(exact, at.resamples),
            }
    seconds = measure(variants, at.repeats)
    for name in list(variants)[1:]:
        found[f"{name} / single pass"] = ratio(seconds[name], seconds["single pass"])
    return found | {"median seconds": medians(seconds)}


PARTS = {
    "step 0": lambda at: beside_peers(at, 1),
    "depths": lambda at: beside_peers(at, DEPTHS),
    "rollouts": lambda at: rolled_out(replace(at, repeats=fewer(at))),
    "sweeps": lambda at: swept(replace(at, repeats=fewer(at))),
}


def fewer(at: Setup) -> int:
    """Repeats of a part that takes long; never fewer than asked for at most three."""
    return max(min(3, at.repeats), at.repeats // 3)


def run(shape: str, parts: Sequence[str], args) -> None:
    """One shape's parts in this process; each is written as soon as it is there."""
    at = SETUPS[shape](args)
    for part in parts:
        found = PARTS[part](at)
        print(shape, part, json.dumps(found, indent=1), flush=True)
        record = json.loads(args.out.read_text()) if args.out.exists() else {}
        pairs, scored = (sum(map(f, at.captures)) for f in (lambda c: len(c) - 1, lambda c: len(c.scored)))
        about = {
            "machine": machine(str(at.forward.dtype).removeprefix("torch.")), "captures": len(at.captures),
            "pairs": pairs, "scored": scored, "batch_pairs": BATCH_PAIRS,
        }  # fmt: skip
        record[shape] = record.get(shape, {}) | {part: about | found}
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps({s: record[s] for s in SETUPS if s in record}, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", nargs="+", choices=SETUPS, default=list(SETUPS))
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--captures", type=int, default=samples.HELDOUT, help="of the samples")
    parser.add_argument("--repeats", type=int, default=9, help="on the samples")
    parser.add_argument("--contracts", type=int, default=200, help="of the larger race, at most 288")
    parser.add_argument("--resamples", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=512, help="of the Kimi-sized capture")
    parser.add_argument("--kimi-repeats", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=ROOT / ".work" / "kimi")
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results" / "draft_forward.json")
    args = parser.parse_args()
    if len(args.shapes) == 1:
        run(args.shapes[0], args.parts, args)
        return
    for shape in args.shapes:  # a process each: one shape's memory is not the other's
        call = [sys.executable, "-m", "bench.draft_forward", *sys.argv[1:], "--shapes", shape]
        subprocess.run(call, cwd=ROOT, check=True)


if __name__ == "__main__":
    main()
