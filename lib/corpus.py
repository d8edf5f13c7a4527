"""Write the training corpus: the target model interviews itself, served by vLLM.

Runs in the *engine* environment (`make engine`), because vLLM answers about four times as many
tokens a second as transformers on the same two cores. Nothing else in `lib` imports this module.

    .venv-engine/bin/python -m lib.corpus --target DIR --out .work/corpus.jsonl [--part 0/2]

Two processes of one core each (`--part 0/2`, `--part 1/2`) write more than one process of two
cores, whose threads wait for each other at every layer. Parts are files of their own.

Two steps. First the target writes user turns: the chat header plus one of `OPENERS`, continued at
temperature 1, top-k 30. Then it answers each distinct turn greedily. One JSON line per
conversation: {"prompt": [ids], "response": [ids], "user": text}.

Resumable: both steps append whole lines to their file and skip what is there. Deterministic up to
near-ties: each chunk of user turns has its own seed; greedy bf16 answers can differ by a token where two
logits are equal within bf16 rounding and the batch is composed differently.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

# One kind of traffic, as a real deployment has: a kitchen help desk. A draft for one kind of
# traffic is realistic and is what makes a good draft possible at this size (see notebook 09).
OPENERS = (
    "Give me a recipe for",
    "How do I cook",
    "What is the best way to cook",
    "How long should I bake",
    "What can I cook with",
    "How do I make a sauce",
    "How do I bake",
    "What should I serve with",
    "Can you suggest a simple dinner",
    "How do I season",
)
USER_TOKENS = 40  # a user turn that has not ended by then is dropped, not cut
ANSWER_TOKENS = 224
TOP_K = 30  # in place of top-p 0.9: vLLM's CPU sampler sorts all 49,152 logits for top-p, 10x slower
TURNS = 8_000  # user turns that the corpus may use; later ones are for held-out conversations
SPARE_TURNS = 200
CHUNK = 512  # conversations between two writes


def chat_header(tokenizer) -> str:
    """Text up to and including the start of the user turn, as the chat template writes it."""
    marker = "USER TURN"
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": marker}], tokenize=False, add_generation_prompt=True
    )
    return text[: text.index(marker)]


def read_lines(path: Path) -> list[dict]:
    """Complete lines of a JSON-lines file; a last line cut off by a kill is removed from the file."""
    if not path.exists():
        return []
    raw = path.read_bytes()
    whole = raw[: raw.rfind(b"\n") + 1]
    if len(whole) != len(raw):
        path.write_bytes(whole)
    return [json.loads(line) for line in whole.decode().splitlines()]


def corpus_files(folder: Path) -> list[Path]:
    """The parts of the corpus, in order."""
    return sorted(folder.glob("corpus.*of*.jsonl"))


def append_lines(path: Path, rows: list[dict]) -> None:
    """Append rows and make them durable."""
    with path.open("a") as f:
        f.writelines(json.dumps(row, separators=(",", ":")) + "\n" for row in rows)
        f.flush()
        os.fsync(f.fileno())


def write_user_turns(llm, tokenizer, path: Path, wanted: int, seed: int) -> list[dict]:
    """Sample user turns until `wanted` distinct ones are on disk; return them in file order."""
    import torch
    from vllm import SamplingParams

    params = SamplingParams(temperature=1.0, top_k=TOP_K, max_tokens=USER_TOKENS)
    header = chat_header(tokenizer)
    rows = read_lines(path)
    tried = max((row["draw"] for row in rows), default=-1) + 1
    seen = {row["user"].casefold() for row in rows}
    while len(seen) < wanted:
        draws = range(tried, tried + CHUNK)
        # One seed per chunk, not per request: vLLM draws seeded requests one by one, 5x slower here.
        torch.manual_seed(seed * 1_000_000 + tried)
        openers = [OPENERS[d % len(OPENERS)] for d in draws]
        outputs = llm.generate([header + o for o in openers], params, use_tqdm=False)
        fresh = []
        for draw, opener, output in zip(draws, openers, outputs, strict=True):
            completion = output.outputs[0]
            user = " ".join((opener + completion.text).split())
            if completion.finish_reason == "stop" and user.casefold() not in seen:
                seen.add(user.casefold())
                fresh.append({"draw": draw, "user": user})
        append_lines(path, fresh)
        rows += fresh
        tried += CHUNK
        print(f"user turns: {len(seen)} distinct of {tried} drawn", flush=True)
    return rows[:wanted]


def write_answers(llm, tokenizer, turns: list[dict], path: Path, tokens: int) -> None:
    """Answer the turns greedily, in order, until `tokens` response tokens are on disk."""
    from vllm import SamplingParams, TokensPrompt

    rows = read_lines(path)
    total = sum(len(row["response"]) for row in rows)
    params = SamplingParams(temperature=0.0, max_tokens=ANSWER_TOKENS)
    for start in range(len(rows), len(turns), CHUNK):
        if total >= tokens:
            break
        began, before = time.monotonic(), total
        prompts = []
        for turn in turns[start : start + CHUNK]:
            text = tokenizer.apply_chat_template(
                [{"role": "user", "content": turn["user"]}],
                tokenize=False,
                add_generation_prompt=True,
            )
            prompts.append(tokenizer(text, add_special_tokens=False)["input_ids"])
        outputs = llm.generate([TokensPrompt(prompt_token_ids=p) for p in prompts], params, use_tqdm=False)
        fresh = [
            {"prompt": p, "response": list(o.outputs[0].token_ids), "user": t["user"]}
            for p, o, t in zip(prompts, outputs, turns[start : start + CHUNK], strict=True)
        ]
        append_lines(path, fresh)
        total += sum(len(row["response"]) for row in fresh)
        rate = (total - before) / (time.monotonic() - began)
        print(f"answers: {total:,} of {tokens:,} response tokens, {rate:,.0f}/s", flush=True)
    if total < tokens:
        raise SystemExit(f"only {total:,} response tokens from {len(turns)} turns: raise TURNS")


def main() -> None:
    """Command line; see the module docstring."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", type=Path, required=True, help="plain Hugging Face folder")
    parser.add_argument("--out", type=Path, required=True, help="corpus.jsonl to write or resume")
    parser.add_argument("--tokens", type=int, default=1_260_000, help="response tokens wanted")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--part", default="0/1", help="i/n: answer every n-th turn, on core i")
    args = parser.parse_args()
    part, parts = map(int, args.part.split("/"))

    if parts > 1:
        # vLLM binds to the core but leaves the thread count: two threads on one core wait for each other.
        os.environ.update(VLLM_CPU_OMP_THREADS_BIND=str(part), OMP_NUM_THREADS="1")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "3")
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.update(HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1", DO_NOT_TRACK="1")
    from vllm import LLM

    llm = LLM(
        str(args.target),
        dtype="bfloat16",
        max_model_len=512,
        max_num_seqs=256,
        enforce_eager=True,
        seed=args.seed,
    )
    tokenizer = llm.get_tokenizer()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    turns_file = args.out.with_name("user_turns.jsonl")
    turns = write_user_turns(llm, tokenizer, turns_file, TURNS + SPARE_TURNS, args.seed)[:TURNS]
    out = args.out.with_name(f"{args.out.stem}.{part}of{parts}.jsonl")
    write_answers(llm, tokenizer, turns[part::parts], out, args.tokens // parts)


if __name__ == "__main__":
    main()
