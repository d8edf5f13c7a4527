"""Step-0 evaluation and the sweep, beside speculators' model and the bare matrix products.

    make bench        or        .venv/bin/python bench/draft_forward.py [--captures 32] [--repeats 9]

Everything runs in this one process on the same captures, the variants in turn (A B C A B C ...), so
that a drifting machine touches all alike. Ratios are what counts; seconds are this machine's.

- floor: the same matrix products alone, at their own shapes, of the work that scoring needs: keys,
  values and `fc` for every pair; queries, output projection, MLP and lm_head for scored pairs only.
- ours: `DraftForward.predict` (reading states from the opened captures, attention, norms, argmax).
- speculators: `Eagle3DraftModel.forward`, one step, one capture a call (its eager attention builds a
  dense mask, so longer packs cost it more, not less).
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from pathlib import Path

import torch

from lib import samples, sweep
from lib.draft import BATCH_PAIRS, DraftForward

ROOT = Path(__file__).resolve().parents[1]


def speculators_model():
    """The shipped draft (a) in speculators' own class, embeddings from the target."""
    from safetensors.torch import load_file
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig

    folder = samples.SAMPLES / "drafts" / samples.DRAFTS["a"]
    config = Eagle3SpeculatorConfig.from_pretrained(folder)
    config.transformer_layer_config._attn_implementation = "eager"
    config.speculators_config.verifier.name_or_path = None
    model = Eagle3DraftModel(config)
    weights = load_file(folder / "model.safetensors")
    weights["embed_tokens.weight"] = samples.target_head().embed
    left = model.load_state_dict(weights, strict=False)
    assert not left.unexpected_keys and all("verifier" in k for k in left.missing_keys), left
    return model.float().eval()


def speculators_pass(model, batches) -> list[torch.Tensor]:
    with torch.no_grad():
        return [model(**batch, ttt_steps=1)[0] for batch in batches]


def speculators_batches(captures):
    from speculators.models.eagle3.data import shift_batch

    batches = []
    for capture in captures:
        n = len(capture)
        states = torch.cat([capture.state(t) for t in samples.TRAINED_TAPS["a"]], -1).float()
        batch = shift_batch(
            {
                "input_ids": capture.token_ids,
                "hidden_states": states,
                "verifier_last_hidden_states": states[:, :1],
                "loss_mask": capture.loss_mask,
                "lengths": torch.tensor([n]),
                "position_ids": torch.arange(n),
            }
        )
        batches.append(
            {
                "hidden_states": batch["hidden_states"][None],
                "input_ids": batch["input_ids"][None],
                "document_ids": torch.zeros(1, n - 1, dtype=torch.long),
                "position_ids": batch["position_ids"][None],
            }
        )
    return batches


def floor_products(forward: DraftForward, captures):
    """The matrix products of one scoring pass as (input, weight) pairs, shapes as in our batches."""
    draft, layer = forward.draft, forward.draft.layers[0]
    first, work = forward.attention[0], []
    for batch in forward.batches(captures):
        n, s = int(batch.counts.sum()), int(batch.scored_counts.sum())
        width = captures[0].hidden_size
        shapes = [(n, forward.fc[:, i * width : (i + 1) * width]) for i in range(3)]
        stacks = [(n, first.kv_embed), (n, first.kv_hidden), (s, first.q_embed), (s, first.q_hidden)]
        stacks += [(s, forward.gate_up[0])]
        shapes += [(rows, w) for rows, stack in stacks for w in stack.weights]
        shapes += [(s, layer.o), (s, layer.down), (s, draft.lm_head)]
        work += [(torch.randn(rows, w.shape[1]), w) for rows, w in shapes]
    return work


def multiply(work) -> None:
    for x, w in work:
        x @ w.T


def measure(variants: dict, repeats: int) -> dict[str, list[float]]:
    """Seconds per variant, run in turn after one warm-up each."""
    for call in variants.values():
        call()
    seconds = {name: [] for name in variants}
    for _ in range(repeats):
        for name, call in variants.items():
            began = time.perf_counter()
            call()
            seconds[name].append(time.perf_counter() - began)
    return seconds


def ratios(a: list[float], b: list[float]) -> str:
    """Median and spread of a / b, run by run."""
    r = sorted(x / y for x, y in zip(a, b, strict=True))
    return f"{statistics.median(r):.2f}x ({r[0]:.2f} to {r[-1]:.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--captures", type=int, default=samples.HELDOUT)
    parser.add_argument("--repeats", type=int, default=9)
    args = parser.parse_args()

    captures = samples.captures(args.captures)
    draft = samples.draft("a", samples.target_head())
    contract = draft.contract.change(taps=samples.TRAINED_TAPS["a"])
    forward = DraftForward(draft)
    model, batches = speculators_model(), speculators_batches(captures)
    work = floor_products(forward, captures)
    orders = sweep.ordered_choices(samples.STORED_TAPS, 3)
    candidates = [draft.contract.change(taps=t) for t in orders]

    ours = forward.predict(captures, contract, positions="all").draft_ids[:, 0]
    theirs = torch.cat([ids[0] for ids in speculators_pass(model, batches)])
    same = float((ours == theirs).float().mean())
    assert same > 0.999, f"only {same:.4f} of the predictions agree: not the same computation"

    with torch.inference_mode():
        step0 = measure(
            {
                "floor": lambda: multiply(work),
                "ours": lambda: forward.predict(captures, contract),
                "ours, all positions": lambda: forward.predict(captures, contract, positions="all"),
                "speculators": lambda: speculators_pass(model, batches),
            },
            args.repeats,
        )
        sweeps = measure(
            {
                "single pass": lambda: forward.predict(captures, contract),
                "sweep, exact": lambda: sweep.sweep(forward, captures, candidates),
                "sweep, race": lambda: sweep.race(forward, captures, candidates),
            },
            max(3, args.repeats // 3),
        )
    exact = sweep.sweep(forward, captures, candidates)
    raced = sweep.race(forward, captures, candidates)
    assert exact.winner == raced.winner

    pairs = sum(len(c) - 1 for c in captures)
    scored = sum(len(c.scored) for c in captures)
    result = {
        "machine": f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads, "
        f"torch {torch.__version__}, fp32",
        "captures": len(captures), "pairs": pairs, "scored": scored, "batch_pairs": BATCH_PAIRS,
        "same predictions as speculators": same,
        "ours / floor": ratios(step0["ours"], step0["floor"]),
        "speculators / floor": ratios(step0["speculators"], step0["floor"]),
        "speculators / ours": ratios(step0["speculators"], step0["ours"]),
        "speculators / ours, all positions": ratios(step0["speculators"], step0["ours, all positions"]),
        "24 triples exact / single pass": ratios(sweeps["sweep, exact"], sweeps["single pass"]),
        "24 triples raced / single pass": ratios(sweeps["sweep, race"], sweeps["single pass"]),
        "race, passes by count": round(raced.passes, 2),
        "race has the exact winner": exact.winner == raced.winner,
        "median seconds": {k: round(statistics.median(v), 4) for k, v in (step0 | sweeps).items()},
    }  # fmt: skip
    for name, value in result.items():
        print(f"{name:38} {value}")
    out = ROOT / "bench" / "results"
    out.mkdir(exist_ok=True)
    (out / "draft_forward.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
