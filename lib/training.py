"""Train the sample drafts with speculators' own model, loss, optimizer and metrics, on the CPU.

The workbook never needs this module: it is how `data_samples/drafts` came to be (notebook 09).
Two stages, both resumable: `capture_corpus` records the target's states for the whole corpus in
shards; `train` runs one draft from them and checkpoints every few minutes.

Only three things differ from speculators' command line: the states come from our shards, the loss
is its eager one (its default is a Triton kernel), and `lm_head` is trained as well (it is frozen by
default, which costs accuracy at this size).
"""

from __future__ import annotations

import csv
import json
import math
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from tqdm import tqdm

from lib.taps import Tap
from lib.target import load_target, record_states

SHARD = 512  # conversations per capture shard
TRAIN_TAPS = (Tap(3), Tap(16), Tap(28), Tap(30))  # Tap(0) is the embedding table, looked up


@dataclass(frozen=True)
class Recipe:
    """Everything that decides a draft besides its data.

    `taps` feed `fc`, in this order. `target_tap` is the state that training targets come from:
    Tap(30), the target's last block, or Tap(28) for the lens draft (c).
    """

    name: str
    taps: tuple[int, int, int]
    target_tap: int
    written_ids: tuple[int, int, int]  # what the config says, as the real tools write it
    draft_vocab: int = 2048
    intermediate: int = 1536
    batch: int = 2  # conversations per step, one forward each: a pack would only attend to zeros
    steps: int = 3000  # one epoch of the corpus
    ttt_steps: int = 3
    lr: float = 1e-3
    warmup: int = 50
    seed: int = 11


def capture_corpus(
    corpus: Sequence[Path],
    target: Path,
    out: Path,
    *,
    dtype: torch.dtype = torch.bfloat16,
    tokens_per_batch: int = 8192,
    part: tuple[int, int] = (0, 1),
) -> None:
    """Record `TRAIN_TAPS` for every conversation, stored in bf16, one file per `SHARD` of them.

    A shard holds `states` [N, 4, H], `token_ids` [N], `lengths` [n] and `prompt_lengths` [n], the
    conversations one after another. Finished shards are skipped, so a killed run resumes; `part`
    (i, n) does every n-th shard, for n processes side by side.
    """
    rows = [json.loads(line) for path in corpus for line in path.open()]
    out.mkdir(parents=True, exist_ok=True)
    model = None
    starts = range(part[0] * SHARD, len(rows), part[1] * SHARD)
    for start in tqdm(starts, desc="capture shards", mininterval=20):
        path = out / f"shard_{start // SHARD:03d}.safetensors"
        if path.exists():
            continue
        model = model or load_target(target, dtype)
        shard = rows[start : start + SHARD]
        texts = [torch.tensor(r["prompt"] + r["response"]) for r in shard]
        states: list[Tensor | None] = [None] * len(texts)
        order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
        while order:
            width = len(texts[order[-1]])
            batch = [order.pop() for _ in range(min(len(order), max(1, tokens_per_batch // width)))]
            ids = torch.nn.utils.rnn.pad_sequence([texts[i] for i in batch], batch_first=True)
            found = record_states(model, ids, TRAIN_TAPS)
            stacked = torch.stack([found[t] for t in TRAIN_TAPS], dim=2)  # (B, L, 4, H)
            for row, i in enumerate(batch):
                states[i] = stacked[row, : len(texts[i])].to(torch.bfloat16)
        tensors = {
            "states": torch.cat(states),
            "token_ids": torch.cat(texts).to(torch.int32),
            "lengths": torch.tensor([len(t) for t in texts], dtype=torch.int32),
            "prompt_lengths": torch.tensor([len(r["prompt"]) for r in shard], dtype=torch.int32),
        }
        save_file(tensors, path.with_suffix(".tmp"))
        path.with_suffix(".tmp").rename(path)


class Shards:
    """Random access to conversations over the capture shards; memory-mapped, nothing is copied."""

    def __init__(self, folder: Path) -> None:
        self.files = [safe_open(p, "pt") for p in sorted(folder.glob("shard_*.safetensors"))]
        self.index: list[tuple[int, int, int, int]] = []  # file, first row, length, prompt length
        for number, file in enumerate(self.files):
            row = 0
            lengths = file.get_tensor("lengths").tolist()
            prompts = file.get_tensor("prompt_lengths").tolist()
            for length, prompt in zip(lengths, prompts, strict=True):
                self.index.append((number, row, length, prompt))
                row += length
        self.states = [f.get_slice("states") for f in self.files]
        self.tokens = [f.get_tensor("token_ids") for f in self.files]

    def __len__(self) -> int:
        return len(self.index)

    def read(self, i: int) -> tuple[Tensor, Tensor, Tensor]:
        """Conversation i: token ids (L,), loss mask (L,), states (L, 4, H) at `TRAIN_TAPS`."""
        number, row, length, prompt = self.index[i]
        ids = self.tokens[number][row : row + length].long()
        mask = torch.zeros(length)
        mask[prompt:] = 1
        return ids, mask, self.states[number][row : row + length]


def as_trainer_batch(ids: Tensor, mask: Tensor, states: Tensor, embed: Tensor, recipe: Recipe):
    """One conversation in the trainer's shape, shifted by speculators' own `shift_batch`."""
    from speculators.models.eagle3.data import shift_batch

    by_tap = {tap.after_block: states[:, i] for i, tap in enumerate(TRAIN_TAPS)}
    if 0 in (*recipe.taps, recipe.target_tap):
        by_tap[0] = embed[ids]
    return shift_batch(
        {
            "input_ids": ids,
            "hidden_states": torch.cat([by_tap[t] for t in recipe.taps], dim=-1),
            "verifier_last_hidden_states": by_tap[recipe.target_tap],
            "loss_mask": mask,
            "lengths": torch.tensor([len(ids)]),
            "position_ids": torch.arange(len(ids)),
        }
    )


def model_inputs(batch: dict) -> dict:
    """One shifted conversation as keyword arguments of speculators' forward, fp32, batch axis first."""
    inputs = {key: value[None] for key, value in batch.items() if key != "lengths"}
    inputs["loss_mask"] = inputs["loss_mask"].bool()
    inputs["document_ids"] = torch.zeros_like(inputs["input_ids"])
    for key in ("hidden_states", "verifier_last_hidden_states"):
        inputs[key] = inputs[key].float()
    return inputs


def conversations(shards: Shards, seed: int) -> Iterator[int]:
    """Conversation numbers without end, each epoch in a new seeded order."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield from torch.randperm(len(shards), generator=generator).tolist()


def draft_vocabulary(corpus_ids: Tensor, size: int, vocab: int) -> tuple[Tensor, Tensor]:
    """The `size` most frequent ids -> (t2d bool (vocab,), d2t offsets (size,)), speculators' form."""
    counts = torch.bincount(corpus_ids, minlength=vocab)
    kept = torch.argsort(counts, descending=True, stable=True)[:size].sort().values
    t2d = torch.zeros(vocab, dtype=torch.bool)
    t2d[kept] = True
    return t2d, kept - torch.arange(size)


def build_model(recipe: Recipe, target: Path, t2d: Tensor, d2t: Tensor):
    """Speculators' `Eagle3DraftModel` for this recipe, verifier weights loaded, lm_head trainable."""
    from speculators.config import SpeculatorsConfig, VerifierConfig
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig
    from transformers import AutoConfig, LlamaConfig

    base = AutoConfig.from_pretrained(target)
    layer = LlamaConfig(
        vocab_size=base.vocab_size,
        hidden_size=base.hidden_size,
        intermediate_size=recipe.intermediate,
        num_hidden_layers=1,
        num_attention_heads=base.num_attention_heads,
        num_key_value_heads=base.num_key_value_heads,
        head_dim=base.head_dim,
        rms_norm_eps=base.rms_norm_eps,
        max_position_embeddings=base.max_position_embeddings,
        rope_parameters=dict(base.rope_parameters),
        tie_word_embeddings=False,
        pad_token_id=None,
        bos_token_id=base.bos_token_id,
        eos_token_id=base.eos_token_id,
    )
    layer._attn_implementation = "eager"  # before building: flex attention needs a compiler
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=layer,
        draft_vocab_size=recipe.draft_vocab,
        norm_before_residual=True,  # the trainer's command-line default
        eagle_aux_hidden_state_layer_ids=list(recipe.written_ids),
        speculators_config=SpeculatorsConfig(
            algorithm="eagle3",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=recipe.ttt_steps)],
            default_proposal_method="greedy",
            verifier=VerifierConfig.from_pretrained(str(target)),
        ),
    )
    torch.manual_seed(recipe.seed)
    model = Eagle3DraftModel(config)
    model.load_vocab_mappings(t2d, d2t)
    model.load_verifier_weights()
    model.lm_head.weight.requires_grad_(True)
    return model


def _loss_config():
    from speculators.losses.eager import kl_div_loss

    return {"kl_div": (kl_div_loss, 1.0)}


@torch.no_grad()
def evaluate(model, batches: Sequence[dict], recipe: Recipe) -> dict[str, float]:
    """Speculators' own metrics over `batches`: full_acc_i, cond_acc_i, loss."""
    sums: dict[str, float] = {}
    for batch in batches:
        _, _, metrics = model(**batch, ttt_steps=recipe.ttt_steps, loss_config=_loss_config())
        for key, value in metrics.items():
            sums[key] = sums.get(key, 0.0) + float(value)
    return ratios(sums)


def ratios(sums: dict[str, float]) -> dict[str, float]:
    """speculators' summed `NAME_sum` and `NAME_total` -> {NAME: sum / total}."""
    names = {k.rsplit("_", 1)[0] for k in sums}
    return {n: sums[f"{n}_sum"] / sums[f"{n}_total"] for n in sorted(names)}


def heldout_batches(model, heldout: Path, recipe: Recipe) -> list[dict]:
    """The held-out conversations as inputs of speculators' forward."""
    embed, held = model.embed_tokens.weight.to(torch.bfloat16), Shards(heldout)
    return [model_inputs(as_trainer_batch(*held.read(i), embed, recipe)) for i in range(len(held))]


@torch.no_grad()
def restore(model, state_file: Path) -> dict:
    """Put a run's saved weights into the model; returns the whole saved state."""
    state = torch.load(state_file, weights_only=True)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            parameter.copy_(state["weights"][name])
    return state


def train(
    recipe: Recipe,
    *,
    shards: Path,
    heldout: Path,
    target: Path,
    vocabulary: Path,
    out: Path,
    evaluate_every: int = 500,
    checkpoint_every: float = 150.0,
) -> Path:
    """Train one draft; resume from `out/state.pt` if it is there. Returns `out/model`.

    `out/log.csv` gets speculators' metrics on the training and the held-out conversations.
    """
    from speculators.train.optimizers import build_optimizers

    out.mkdir(parents=True, exist_ok=True)
    maps = load_file(vocabulary)
    model = build_model(recipe, target, maps["t2d"].bool(), maps["d2t"])
    embed = model.embed_tokens.weight.to(torch.bfloat16)
    options = SimpleNamespace(optimizer="adamw", lr=recipe.lr, weight_decay=0.0)
    optimizers = build_optimizers(model, options)
    bases = [group["lr"] for o in optimizers for group in o.param_groups]
    data, held_batches = Shards(shards), heldout_batches(model, heldout, recipe)

    step, state_file, log = 0, out / "state.pt", out / "log.csv"
    trainable = {n: p for n, p in model.named_parameters() if p.requires_grad}
    if state_file.exists():
        state = restore(model, state_file)
        step = state["step"]
        for o, s in zip(optimizers, state["optimizers"], strict=True):
            o.load_state_dict(s)
    if not log.exists():
        log.write_text(",".join(LOG_COLUMNS) + "\n")

    def save() -> None:
        state = {
            "step": step,
            "weights": {n: p.detach() for n, p in trainable.items()},
            "optimizers": [o.state_dict() for o in optimizers],
        }
        torch.save(state, out / "state.tmp")
        os.replace(out / "state.tmp", state_file)

    def note(split: str, metrics: dict[str, float]) -> None:
        with log.open("a", newline="") as f:
            row = {"step": step, "split": split, **metrics}
            csv.DictWriter(f, LOG_COLUMNS, extrasaction="ignore").writerow(row)

    # The order of a run is fixed by its seed, so a resumed run skips to its own place in it.
    order = islice(conversations(data, recipe.seed), step * recipe.batch, None)
    saved, began, window = time.monotonic(), time.monotonic(), []
    while step < recipe.steps:
        scale = min(1.0, (step + 1) / recipe.warmup)
        scale *= 0.5 * (1 + math.cos(math.pi * step / recipe.steps))
        for group, base in zip((g for o in optimizers for g in o.param_groups), bases, strict=True):
            group["lr"] = base * scale
        for o in optimizers:
            o.zero_grad(set_to_none=True)
        for i in islice(order, recipe.batch):
            inputs = model_inputs(as_trainer_batch(*data.read(i), embed, recipe))
            # bf16 products halve a step's time here; weights, optimizer, held-out metrics are fp32.
            with torch.autocast("cpu", torch.bfloat16):
                _, loss, metrics = model(**inputs, ttt_steps=recipe.ttt_steps, loss_config=_loss_config())
            (loss / recipe.batch).backward()
            window.append({k: float(v) for k, v in metrics.items()})
        torch.nn.utils.clip_grad_norm_(list(trainable.values()), 1.0)
        for o in optimizers:
            o.step()
        step += 1
        if step % 100 == 0:
            metrics = ratios({k: sum(w[k] for w in window) for k in window[0]})
            note("train", metrics)
            pace = (time.monotonic() - began) / 100
            print(f"{recipe.name} {step}/{recipe.steps} {pace:.3f} s/step "
                  f"full_acc_0 {metrics['full_acc_0']:.3f}", flush=True)  # fmt: skip
            window, began = [], time.monotonic()
        if step % evaluate_every == 0 or step == recipe.steps:
            metrics = evaluate(model, held_batches, recipe)
            note("heldout", metrics)
            print(f"{recipe.name} {step} held-out {metrics}", flush=True)
            began = time.monotonic()
        if time.monotonic() - saved > checkpoint_every:
            save()
            saved = time.monotonic()
    save()
    (out / "recipe.json").write_text(json.dumps(asdict(recipe), indent=1))
    model.to(torch.bfloat16).save_pretrained(out / "model")
    return out / "model"


def score_heldout(recipe: Recipe, *, heldout: Path, target: Path, vocabulary: Path, out: Path) -> dict:
    """speculators' metrics of a finished run (`out/state.pt`) on held-out conversations, fp32.

    Replaces the log's held-out rows by this one: for when the held-out set was made again.
    """
    maps = load_file(vocabulary)
    model = build_model(recipe, target, maps["t2d"].bool(), maps["d2t"])
    state = restore(model, out / "state.pt")
    metrics = evaluate(model, heldout_batches(model, heldout, recipe), recipe)
    with (out / "log.csv").open(newline="") as f:
        rows = [row for row in csv.DictReader(f) if row["split"] != "heldout"]
    rows.append({"step": state["step"], "split": "heldout", **metrics})
    with (out / "log.csv").open("w", newline="") as f:
        writer = csv.DictWriter(f, LOG_COLUMNS, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)
    return metrics


LOG_COLUMNS = (
    "step", "split", "loss", "full_acc_0", "full_acc_1", "full_acc_2",
    "cond_acc_0", "cond_acc_1", "cond_acc_2",
)  # fmt: skip
