"""Live decoding on the real target: the baseline, losslessness, replayed rounds, predicted speeds.

    make bench        or        .venv/bin/python bench/decoding.py [--parts baseline lossless speed]

- baseline: decoding here, plain and with the draft, beside transformers' own `generate`, plain and assisted,
  on two copies of the target (decoding switches thin products on in its model). A slow baseline would
  flatter speculation. transformers cannot run an EAGLE-3 draft; its assistance here is prompt lookup.
- lossless: every prompt under right and wrong taps at every depth: token for token the target's own text?
  And do rounds replayed from captures equal the live ones? Each difference is listed with the gap between
  the two best logits, the target's or the draft's, where it begins.
- speed: tok/s predicted from measured costs and replayed rounds, beside live runs.

What is compared takes turns inside each repeat, so that a drifting machine touches all alike. A part that
was not asked for keeps what `--out` already holds.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
from pathlib import Path

import torch
from tqdm import tqdm

from bench._timing import measure, ratios
from lib import samples
from lib.acceptance import rollouts, speed_table, walk
from lib.decoding import Generation, as_capture, decode, measure_costs, speculate
from lib.draft import DraftForward
from lib.speeds import overall_rate
from lib.target import continue_greedily, ensure_target, load_target

ROOT = Path(__file__).resolve().parents[1]
DEPTH = 15  # the deepest chain
LOOKED_UP = 10  # candidates of prompt lookup, as transformers' documentation has it
PROMPTS = (
    "Give me a recipe for pancakes.",
    "How do I cook rice without a rice cooker?",
    "List the ingredients of a Greek salad.",
    "Write a Python function that reverses a string.",
    "Write a SQL query that counts the orders of each customer.",
    "What does this do? for (int i = 0; i < 10; i++) sum += i * i;",
    "Write an HTML page with a heading and a list of three fruits.",
    "What is 17 + 25?",
    "A train travels 60 miles in 1.5 hours. What is its speed? Show your steps.",
    "Count from 1 to 30.",
    "List the first ten prime numbers.",
    "Write a short poem about the sea.",
    "Write a haiku about autumn leaves.",
    "Write two lines that rhyme about a cat.",
    "¿Cuál es la capital de España?",
    "Écris une phrase sur Paris.",
    "Schreibe einen kurzen Satz über den Winter.",
    "Translate 'good morning' into Italian, Portuguese and Japanese.",
    "Why is the sky blue?",
    "Who wrote Romeo and Juliet, and when?",
    "What is the difference between a virus and a bacterium?",
    "Can you explain gravity to a child?",
    "Return a JSON object with the keys name, age and city for a made-up person.",
    'Fix this JSON: {"a": 1, "b": [2, 3}',
    "Give me a YAML file that lists three servers with their ports.",
    "Write a polite email that declines an invitation.",
    "Give me five names for a coffee shop.",
    "Tell me a story about a dragon who is afraid of fire.",
    "Summarise the plot of Cinderella in two sentences.",
    "Repeat the word 'echo' twelve times.",
    "asdf qwer zxcv",
    "ok",
)


def chat(tokenizer, text: str) -> torch.Tensor:
    """(P,) ids of one user turn in the target's own template."""
    encoded = tokenizer.apply_chat_template(
        [{"role": "user", "content": text}], add_generation_prompt=True, return_tensors="pt"
    )
    return encoded["input_ids"][0]


def spread(values: list[float]) -> str:
    """Median and range."""
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


@torch.inference_mode()
def look_up(model, prompt: torch.Tensor, tokens: int) -> torch.Tensor:
    """Greedy assisted generation of transformers, its candidates looked up in the text so far."""
    ids = model.generate(
        prompt[None], attention_mask=torch.ones_like(prompt)[None], max_new_tokens=tokens, do_sample=False,
        prompt_lookup_num_tokens=LOOKED_UP,
    )  # fmt: skip
    return ids[0, len(prompt) :]


def baseline(model, forward, contract, prompts, tokens: int, depth: int, repeats: int) -> dict:
    untouched = load_target(ensure_target())
    writers = {
        "generate": lambda p: continue_greedily(untouched, p, tokens),
        "assisted": lambda p: look_up(untouched, p, tokens),
        "decode": lambda p: decode(model, p, tokens).tokens,
        "speculate": lambda p: speculate(model, forward, p, tokens, depth=depth, contract=contract).tokens,
    }
    texts = {name: [write(p) for p in prompts] for name, write in writers.items()}
    same = {
        name: sum(torch.equal(a, b) for a, b in zip(found, texts["generate"], strict=True))
        for name, found in texts.items()
    }
    assert min(same.values()) == len(prompts), (
        f"of {len(prompts)} texts {same} agree: not the same computation"
    )
    # They have warmed up by writing these texts.
    seconds = measure(
        {name: lambda write=write: [write(p) for p in prompts] for name, write in writers.items()},
        repeats,
        warm=False,
    )
    written = sum(map(len, texts["generate"]))
    pairs = [("generate", "decode"), ("generate", "speculate"), ("assisted", "speculate")]
    return {
        "prompts": len(prompts), "tokens": written, "repeats": repeats, "draft tokens a round": depth,
        "same texts": f"{min(same.values())} of {len(prompts)}",
    } | {
        f"{theirs} / {ours}, seconds": ratios(seconds[theirs], seconds[ours]) for theirs, ours in pairs
    } | {
        f"{name}, tok/s": spread([written / s for s in seconds[name]]) for name in writers
    }  # fmt: skip


@torch.inference_mode()
def target_gap(model, plain: Generation, live: Generation) -> tuple[int, float]:
    """Where two texts part, and how much the target prefers its first choice there."""
    pairs = zip(plain.tokens.tolist(), live.tokens.tolist(), strict=False)
    at = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(plain.tokens), len(live.tokens)))
    text = torch.cat((plain.prompt, plain.tokens[:at]))
    first, second = model(text[None]).logits[0, -1].topk(2).values
    return at, float(first - second)


def draft_gap(forward, capture, contract, depth: int, start: int) -> float:
    """The smallest gap between the two best draft logits along the chain from position `start`."""
    p = forward.predict([capture], contract, depths=depth, feed="own", keep_logits=True)
    best = p.logits[p.position == start][0].topk(2).values  # (D, 2)
    return float((best[:, 0] - best[:, 1]).min())


def lossless(model, forward, contracts, prompts, tokens: int, depths) -> dict:
    compared, rounds, texts = 0, 0, 0
    parted, unequal, gain = [], [], {}
    taps = tuple(dict.fromkeys(t for c in contracts.values() for t in c.taps))
    for index, prompt in enumerate(tqdm(prompts, desc="lossless")):
        plain = decode(model, prompt, tokens)
        for name, contract in contracts.items():
            rolled = {}  # text -> its capture and rollouts: one for all depths, if all texts are alike
            for depth in depths:
                live = speculate(model, forward, prompt, tokens, depth=depth, contract=contract)
                where = {"prompt": index, "taps": name, "depth": depth}
                compared += len(live.tokens)
                texts += 1
                if not torch.equal(live.tokens, plain.tokens):
                    at, gap = target_gap(model, plain, live)
                    parted.append(where | {"token": at, "target's top-2 gap": gap})
                if not live.accepted:
                    continue
                key = tuple(live.tokens.tolist())
                if key not in rolled:
                    capture = as_capture(model, live, taps)
                    rolled[key] = capture, rollouts(forward, [capture], contract, max(depths))
                capture, p = rolled[key]
                replayed = walk(p, [capture], depth)
                rounds += len(live.accepted)
                gain.setdefault((name, depth), []).extend(live.gained)
                if replayed.of(0) != list(live.accepted):
                    both = zip(replayed.of(0), live.accepted, strict=False)
                    at = next(i for i, (a, b) in enumerate(both) if a != b)
                    start = int(replayed.start[at])
                    gap = draft_gap(forward, capture, contract, depth, start)
                    unequal.append(where | {"round": at, "draft's smallest top-2 gap": gap})
    return {
        "prompts": len(prompts), "texts": texts, "depths": list(depths),
        "tokens compared": compared, "texts that part": len(parted), "parted": parted,
        "rounds compared": rounds, "texts with unequal rounds": len(unequal), "unequal": unequal,
        "tokens per round": {
            f"{name}, depth {depth}": round(sum(g) / len(g), 3) for (name, depth), g in gain.items()
        },
    }  # fmt: skip


def speed(model, forward, contracts, prompts, tokens: int, depths, repeats: int) -> dict:
    plains = [decode(model, p, tokens) for p in prompts]
    taps = tuple(dict.fromkeys(t for c in contracts.values() for t in c.taps))
    captures = [as_capture(model, g, taps) for g in plains]
    rolled = {name: rollouts(forward, captures, c, max(depths)) for name, c in contracts.items()}
    middle = torch.cat((plains[0].prompt, plains[0].tokens[: tokens // 2]))  # a cache half-way through
    predicted, live, plain = {}, {}, []

    def run(call) -> float:
        return overall_rate([call(p) for p in prompts])

    for _ in tqdm(range(repeats), desc="speed"):
        plain.append(run(lambda p: decode(model, p, tokens)))
        for name, contract in contracts.items():
            costs = measure_costs(model, forward, middle, depths, contract=contract, repeats=3)
            table = speed_table(rolled[name], captures, costs)
            for depth in depths:
                key = f"{name}, depth {depth}"
                predicted.setdefault(key, []).append(float(table["tok/s"][depth]))
                live.setdefault(key, []).append(
                    run(
                        lambda p, depth=depth, contract=contract: speculate(
                            model, forward, p, tokens, depth=depth, contract=contract
                        )
                    )
                )
    rows = {
        key: {
            "tokens per round": round(float(walk(rolled[name], captures, depth).tokens_per_round), 3),
            "predicted, tok/s": spread(predicted[key]),
            "live, tok/s": spread(live[key]),
            "predicted / live": ratios(predicted[key], live[key]),
            "live / plain": ratios(live[key], plain),
        }
        for name in contracts
        for depth in depths
        for key in [f"{name}, depth {depth}"]
    }
    return {
        "prompts": len(prompts), "tokens": sum(len(g.tokens) for g in plains), "repeats": repeats,
        "plain, tok/s": spread(plain), "by taps and depth": rows,
    }  # fmt: skip


def show(name: str, value, indent: int = 0) -> None:
    if isinstance(value, dict):
        print(f"{'':{indent}}{name}")
        for key, inner in value.items():
            show(key, inner, indent + 2)
    else:
        print(f"{'':{indent}}{name:{40 - indent}} {value}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--prompts", type=int, default=len(PROMPTS), help="for lossless")
    parser.add_argument("--tokens", type=int, default=48, help="new tokens a text")
    parser.add_argument("--timed-prompts", type=int, default=3, help="for baseline and speed")
    parser.add_argument("--depths", type=int, nargs="+", default=[1, 2, 4, 8, DEPTH], help="for lossless")
    parser.add_argument("--timed-depths", type=int, nargs="+", default=[1, 2, 3, 4, 6, 8, 11, DEPTH])
    parser.add_argument("--baseline-depth", type=int, default=3, help="draft tokens a round, for baseline")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results" / "decoding.json")
    args = parser.parse_args()

    from transformers import AutoTokenizer

    folder = ensure_target()
    model, tokenizer = load_target(folder), AutoTokenizer.from_pretrained(folder)
    prompts = [chat(tokenizer, text) for text in PROMPTS[: args.prompts]]
    # Spread over the kinds: every n-th prompt.
    timed = [chat(tokenizer, text) for text in PROMPTS[:: -(-len(PROMPTS) // args.timed_prompts)]]
    forward = DraftForward(samples.draft("a", samples.target_head()))
    right = forward.draft.contract.change(taps=samples.TRAINED_TAPS["a"])
    contracts = {"right": right, "wrong": right.change(taps=samples.SERVED_TAPS)}

    calls = {
        "baseline": lambda: baseline(
            model, forward, right, timed, args.tokens, args.baseline_depth, args.repeats
        ),
        "lossless": lambda: lossless(model, forward, contracts, prompts, args.tokens, args.depths),
        "speed": lambda: speed(
            model, forward, contracts, timed, args.tokens, args.timed_depths, args.repeats
        ),
    }
    machine = (
        f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads, "
        f"torch {torch.__version__}, fp32"
    )
    result = json.loads(args.out.read_text()) if args.out.exists() else {}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    for part in args.parts:
        result[part] = {"machine": machine} | calls[part]()
        show(part, result[part])
        args.out.write_text(json.dumps({p: result[p] for p in PARTS if p in result}, indent=1) + "\n")


PARTS = ("baseline", "lossless", "speed")

if __name__ == "__main__":
    main()
