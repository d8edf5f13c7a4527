"""The three tensors of a target that a draft needs: embedding, final norm, lm_head.

Read from safetensors (by index, without opening the other shards) or from a GGUF file.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lib.errors import CheckpointError
from lib.weights import TensorFile, read_json, weight_files


@dataclass(frozen=True)
class TargetHead:
    """What a draft needs of its target: embedding rows, final norm, lm_head. Nothing else is read.

    Attributes:
        embed: (V, H) mapped from disk where the file allows it; index it, do not copy it.
        norm: (H,) weight of the final RMSNorm.
        lm_head: (V, H); the embedding itself when tied.
        eps: of the final norm.
        n_layers: decoder layers of the target.
    """

    path: Path
    embed: Tensor
    norm: Tensor
    lm_head: Tensor
    eps: float
    n_layers: int
    config: dict[str, Any] = field(repr=False, default_factory=dict)

    @property
    def hidden_size(self) -> int:
        """H of the target."""
        return self.embed.shape[1]

    def logits(self, final: Tensor, *, final_kind: str, rows: Tensor | None = None) -> Tensor:
        """Target logits (..., V or len(rows)) in fp32 from its last state.

        Args:
            final: (..., H); normalised here unless `final_kind` is "post_norm".
            rows: vocabulary rows wanted; all if None.
        """
        x = final.float()
        if final_kind == "pre_norm":
            x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.norm.float()
        weight = self.lm_head if rows is None else self.lm_head[rows]
        return x @ weight.float().T


def load_target_head(path: str | Path) -> TargetHead:
    """Embedding, final norm and lm_head of a target: a Hugging Face folder or a `.gguf` file.

    Shards that hold none of the three are not opened.
    """
    path = Path(path)
    if path.suffix == ".gguf":
        return _target_head_from_gguf(path)
    config = read_json(path / "config.json")
    text = config.get("text_config", config)
    if not isinstance(text, dict) or not isinstance(text.get("num_hidden_layers"), int):
        raise CheckpointError(
            path / "config.json", "num_hidden_layers", expected="the number of decoder layers",
            found="none", remedy="give the target's own config.json",
        )  # fmt: skip
    names = {}
    for part, candidates in (
        ("embed", r"(.*\.)?embed_tokens\.weight"),
        ("norm", r"((language_)?model\.)*norm\.weight"),
        ("lm_head", r"(.*\.)?lm_head\.weight"),
    ):
        names[part] = candidates
    files = weight_files(path, "|".join(names.values()))
    found: dict[str, Tensor] = {}
    for file, wanted in files:
        parts = {
            part: name
            for name in (wanted if wanted is not None else TensorFile(file))
            for part, rule in names.items()
            if re.fullmatch(rule, name)
        }
        if parts:
            shard = TensorFile(file)
            found |= {part: shard[name] for part, name in parts.items()}
    if "lm_head" not in found and text.get("tie_word_embeddings", True) and "embed" in found:
        found["lm_head"] = found["embed"]
    for part in names:
        if part not in found:
            raise CheckpointError(
                path, part, expected=f"a tensor matching {names[part]}", found="none",
                remedy="give a target in transformers' format (Llama-style names)",
            )  # fmt: skip
    return TargetHead(
        path, found["embed"], found["norm"], found["lm_head"],
        float(text.get("rms_norm_eps", 1e-6)), text["num_hidden_layers"], config,
    )  # fmt: skip


def _target_head_from_gguf(path: Path) -> TargetHead:
    from gguf import GGUFReader, dequantize

    try:
        reader = GGUFReader(path)
        tensors = {t.name: t for t in reader.tensors}
        arch = reader.fields["general.architecture"].contents()
        layers = int(reader.fields[f"{arch}.block_count"].contents())
        eps = float(reader.fields[f"{arch}.attention.layer_norm_rms_epsilon"].contents())
    except (ValueError, KeyError, OSError, IndexError) as err:
        raise CheckpointError(
            path, "gguf", expected="a complete GGUF model", found=str(err)[:200],
            remedy="unpack it again (python -m lib.target)",
        ) from err  # fmt: skip

    def read(name: str) -> Tensor:
        if name not in tensors:
            raise CheckpointError(
                path, name, expected="this tensor", found="none of that name",
                remedy="give a GGUF of a Llama-style model",
            )  # fmt: skip
        # An F32 tensor comes back as a view of the read-only file: copied only then.
        return torch.from_numpy(
            np.require(dequantize(tensors[name].data, tensors[name].tensor_type), None, "W")
        )

    embed = read("token_embd.weight")
    head = read("output.weight") if "output.weight" in tensors else embed
    return TargetHead(path, embed, read("output_norm.weight"), head, eps, layers)
