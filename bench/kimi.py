"""A draft of Kimi-K2.5's size on this machine: seconds and memory to open it and to evaluate one capture.

    make bench        or        .venv/bin/python bench/kimi.py [--folder .work/kimi] [--out FILE]

Writes random bf16 weights once (9 GB, reused), with grouped and with latent attention, and one capture of
512 tokens with 4 states. Every measurement has a process of its own, so that peaks are its own:

- used: bytes of all weights but the embedding table.
- peak: what the process held at most (VmHWM), less what it held after its imports.
- mapped, private: the same peaks for pages of files, which the system can drop, and for the rest.
- table held: how much of the embedding table is among the mapped pages at the end (smaps), beside the rows
  that were asked for. Linux 6.18 maps all of a large page-cache folio, up to 2 MB, for one row of 14 kB;
  so token ids are drawn log-uniformly, as frequent tokens have low ids in a BPE vocabulary, and the draft
  vocabulary is of low ids. 512 ids drawn evenly held 0.8 GB of the table, all of it droppable.

Sizes: "grouped" is TorchSpec's `configs/draft_models/kimi_k25_eagle3.json` (lightseekorg/kimi-k2.5-eagle3),
"latent" NVIDIA Model-Optimizer's `default_kimik2_eagle_config`, as lightseekorg/kimi-k2.5-eagle3-mla.
Assumed: a draft vocabulary of 32,000; TorchSpec's drafts have all 163,840 unless pruned.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

ROOT = Path(__file__).resolve().parents[1]
KINDS = ("grouped", "latent")
TAPS = (2, 30, 58, 61)  # of 61 layers: the default triple, and the last state
LIMIT = 1 << 30  # bytes that an evaluation may hold beside the weights it uses


@dataclass(frozen=True)
class Sizes:
    """Shapes of a draft and of its capture; inner is the MLP's size, by kind of attention."""

    hidden: int = 7168
    vocab: int = 163_840
    draft_vocab: int = 32_000
    heads: int = 64
    head: int = 128  # of grouped attention; without rotary, and of values, in latent attention
    rotary: int = 64
    rank: int = 1536
    kv_rank: int = 512
    inner: tuple[int, int] = (12_288, 18_432)
    tokens: int = 512

    def config(self, kind: str) -> dict:
        """`config.json` as TorchSpec writes it."""
        latent = kind == "latent"
        yarn = {"type": "yarn", "factor": 64.0, "original_max_position_embeddings": 4096, "beta_fast": 1.0,
                "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0}  # fmt: skip
        attention = {
            "q_lora_rank": self.rank, "kv_lora_rank": self.kv_rank, "qk_nope_head_dim": self.head,
            "qk_rope_head_dim": self.rotary, "v_head_dim": self.head, "rope_interleave": True,
        } if latent else {"head_dim": self.head}  # fmt: skip
        return {
            "architectures": ["Eagle3DeepseekV2ForCausalLM" if latent else "LlamaForCausalLMEagle3"],
            "model_type": "kimi_k2" if latent else "llama",
            "hidden_size": self.hidden, "intermediate_size": self.inner[latent], "num_hidden_layers": 1,
            "num_attention_heads": self.heads, "num_key_value_heads": self.heads, **attention,
            "vocab_size": self.vocab, "draft_vocab_size": self.draft_vocab, "hidden_act": "silu",
            "rms_norm_eps": 1e-5 if latent else 1e-6, "max_position_embeddings": 262_144,
            "rope_theta": 50_000.0 if latent else 1_000_000.0, "rope_scaling": yarn if latent else None,
            "tie_word_embeddings": False, "torch_dtype": "bfloat16",
            "eagle_config": {
                "eagle_aux_hidden_state_layer_ids": list(TAPS[:3]), "use_aux_hidden_state": True,
            },
        }  # fmt: skip

    def shapes(self, kind: str) -> dict[str, dict[str, tuple[int, ...]]]:
        """Tensors of the checkpoint by shard; names as TorchSpec's `convert_to_hf.py` leaves them."""
        h, width, latent = self.hidden, self.heads * self.head, kind == "latent"
        rows = self.heads * (self.head + self.rotary)
        attention = {
            "q_a_proj": (self.rank, 2 * h), "q_a_layernorm": (self.rank,), "q_b_proj": (rows, self.rank),
            "kv_a_proj_with_mqa": (self.kv_rank + self.rotary, 2 * h), "kv_a_layernorm": (self.kv_rank,),
            "kv_b_proj": (2 * width, self.kv_rank),
        } if latent else dict.fromkeys(("q_proj", "k_proj", "v_proj"), (width, 2 * h))  # fmt: skip
        inner = self.inner[latent]
        layer = {f"self_attn.{name}": shape for name, shape in attention.items()}
        layer |= {"self_attn.o_proj": (h, width), "mlp.gate_proj": (inner, h), "mlp.up_proj": (inner, h)}
        layer |= {"mlp.down_proj": (h, inner)}
        layer |= dict.fromkeys(("input_layernorm", "hidden_norm", "post_attention_layernorm"), (h,))
        shards = {
            "embed": {"embed_tokens": (self.vocab, h)},
            "head": {"lm_head": (self.draft_vocab, h), "norm": (h,)},
            "fc": {"fc": (h, 3 * h)},
            "layer": {f"midlayer.{name}": shape for name, shape in layer.items()},
        }
        return {s: {f"{n}.weight": shape for n, shape in names.items()} for s, names in shards.items()}


def write(folder: Path, kind: str, sizes: Sizes) -> Path:
    """The checkpoint of one kind, unless it is there; the index comes last and says that it is whole."""
    config, index = folder / "config.json", folder / "model.safetensors.index.json"
    text = json.dumps(sizes.config(kind), indent=1) + "\n"
    if index.is_file() and config.is_file() and config.read_text() == text:
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    index.unlink(missing_ok=True)
    config.write_text(text)
    rng = torch.Generator().manual_seed(0)
    noise = (0.02 * torch.randn(1 << 22, generator=rng)).bfloat16()  # repeated: random, finite and quick
    where = {}
    for shard, shapes in sizes.shapes(kind).items():
        tensors = {}
        for name, shape in shapes.items():
            n = prod(shape)
            values = noise.roll(len(where) * 1009).repeat(-(-n // len(noise)))[:n].view(shape)
            tensors[name] = 1 + values if len(shape) == 1 else values
            where[name] = f"{shard}.safetensors"
        if shard == "head":
            kept = torch.arange(sizes.draft_vocab) * 5 // 4
            tensors["d2t"] = kept - torch.arange(sizes.draft_vocab)
            tensors["t2d"] = torch.zeros(sizes.vocab, dtype=torch.bool).index_fill_(0, kept, True)
            where |= dict.fromkeys(("d2t", "t2d"), "head.safetensors")
        save_file({n: t.contiguous() for n, t in tensors.items()}, folder / f"{shard}.safetensors")
    index.write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return folder


def write_capture(folder: Path, sizes: Sizes) -> Path:
    """One conversation as speculators and vLLM store it, `hs_0.safetensors`; small, so written anew."""
    path = folder / "hs_0.safetensors"
    folder.mkdir(parents=True, exist_ok=True)
    rng = torch.Generator().manual_seed(1)
    states = torch.randn(sizes.tokens, len(TAPS), sizes.hidden, generator=rng).bfloat16()
    ids = (sizes.vocab ** torch.rand(sizes.tokens, generator=rng)).long() - 1
    save_file({"hidden_states": states, "token_ids": ids}, path)
    return path


FIELDS = {"peak": "VmHWM", "mapped": "RssFile", "private": "RssAnon"}  # of /proc/self/status


class Memory:
    """This process's peaks in bytes, by kind of page, sampled every 5 ms while open."""

    def __enter__(self) -> Memory:
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts anew from what is held now
        self.before, self.most, self.done = self.now(), {}, threading.Event()
        self.thread = threading.Thread(target=self._watch, daemon=True)
        self.thread.start()
        return self

    def __exit__(self, *error) -> None:
        self.done.set()
        self.thread.join()
        self._sample()

    @staticmethod
    def now() -> dict[str, int]:
        """What the process holds, in bytes."""
        lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        return {ours: int(lines[theirs].split()[0]) * 1024 for ours, theirs in FIELDS.items()}

    def _sample(self) -> None:
        self.most = {name: max(value, self.most.get(name, 0)) for name, value in self.now().items()}

    def _watch(self) -> None:
        while not self.done.wait(0.005):
            self._sample()

    def grown(self) -> dict[str, int]:
        """Peaks less what was held at the start."""
        return {name: value - self.before[name] for name, value in self.most.items()}


def held(name: str) -> int:
    """Bytes of files of this name that are mapped into this process and present."""
    total, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if not line.split(" ", 1)[0].endswith(":"):  # the head of a mapping: addresses .. path
            inside = line.endswith(f"/{name}")
        elif inside and line.startswith("Rss:"):
            total += int(line.split()[1]) * 1024
    return total


def used(draft) -> int:
    """Bytes of all weights that an evaluation reads whole."""
    parts = [*vars(draft).values()]
    for layer in draft.layers:
        parts += [*vars(layer).values(), *(vars(layer.latent).values() if layer.latent else ())]
    tensors = [t for t in parts if isinstance(t, torch.Tensor) and t is not draft.embed]
    return sum(t.numel() * t.element_size() for t in tensors)


def measure(folder: Path, path: Path, depths: int) -> dict:
    """Open one draft and evaluate one capture in this process: seconds and bytes."""
    from lib.captures import open_capture
    from lib.checkpoints import load_draft
    from lib.contract import Rope
    from lib.draft import DraftForward
    from lib.rope import rope_table

    rope_table(Rope(), 8, torch.arange(1), torch.float32)  # transformers is imported here, not below
    seconds = [time.perf_counter()]
    with Memory() as opening:
        draft = load_draft(folder, dtype=None)
        seconds.append(time.perf_counter())
    with safe_open(path, "pt") as file:
        n = file.get_slice("token_ids").get_shape()[0]
    capture = open_capture(path, taps=TAPS, loss_mask=torch.arange(n) >= n // 4)
    with Memory() as evaluating:
        evaluating.before = opening.before
        seconds.append(time.perf_counter())
        forward = DraftForward(draft)
        p = forward.predict([capture], depths=depths, feed="own")
        seconds.append(time.perf_counter())
    rows = torch.cat((capture.token_ids, p.target_ids[:, :-1].flatten())).unique()
    row = draft.embed.shape[1] * draft.embed.element_size()
    grown = evaluating.grown()
    return {
        "depths": depths, "predictions": p.draft_ids.numel(),
        "open, s": round(seconds[1] - seconds[0], 2), "evaluate, s": round(seconds[3] - seconds[2], 2),
        "used": used(draft), "table": len(draft.embed) * row, "table rows asked for": len(rows) * row,
        "table held": held("embed.safetensors"),
        "opened": opening.grown(), "evaluated": grown, "beside used": grown["peak"] - used(draft),
    }  # fmt: skip


def in_own_process(folder: Path, path: Path, depths: int) -> dict:
    """`measure` in a fresh interpreter."""
    call = [sys.executable, "-m", "bench.kimi", "--measure", str(folder), str(path), str(depths)]
    out = subprocess.run(call, cwd=ROOT, capture_output=True, text=True)
    if out.returncode:
        raise SystemExit(out.stderr)
    return json.loads(out.stdout.splitlines()[-1])


def readable(value):
    """Bytes as GB with three digits; the rest as it is."""
    if isinstance(value, dict):
        return {k: readable(v) for k, v in value.items()}
    return f"{value / 1e9:.3f} GB" if isinstance(value, int) and value > 1e4 else value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=ROOT / ".work" / "kimi")
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results" / "kimi.json")
    parser.add_argument("--measure", nargs=3, metavar=("DRAFT", "CAPTURE", "DEPTHS"), help="used by itself")
    args = parser.parse_args()
    if args.measure:
        folder, path, depths = args.measure
        print(json.dumps(measure(Path(folder), Path(path), int(depths))))
        return

    sizes, result = Sizes(), {}
    path = write_capture(args.folder, sizes)
    for kind in KINDS:
        folder = write(args.folder / kind, kind, sizes)
        for depths in (1, 5):
            found = in_own_process(folder, path, depths)
            assert found["beside used"] <= LIMIT, f"{kind}: {readable(found)}"
            assert found["table held"] < found["table"] // 2, f"{kind}: {readable(found)}"
            result[f"{kind}, depth {'0' if depths == 1 else '0 to 4'}"] = readable(found)
            print(kind, json.dumps(readable(found), indent=1))
    machine = f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"
    record = {"machine": f"{machine}, torch {torch.__version__}, bf16", "sizes": vars(sizes), **result}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
