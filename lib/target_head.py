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

from lib.errors import CheckpointError, MetricError
from lib.formats import BIAS, HEAD, PARTS
from lib.weights import TensorFile, read_json, weight_files

# Whose final norm multiplies by 1 + weight (transformers' modeling files), or is no RMSNorm (nemotron).
OTHER_NORM = (
    r"(recurrent_|t5|vault|pali|shield)?gemma.*|qwen3_next.*|qwen3_5.*|qwen4_exp.*|nemotron|minimax_m3.*"
    r"|step3p7.*|muse_glimmer.*"
)
# Config key -> the value that changes nothing; logits here are lm_head(norm(x)) and no more.
PLAIN = {"final_logit_softcapping": None, "logit_scale": 1, "logits_scaling": 1}


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

    def logits(self, final: Tensor, *, final_kind: str | None, rows: Tensor | None = None) -> Tensor:
        """Target logits (..., V or len(rows)) in fp32 from its last state.

        Args:
            final: (..., H); normalised here if `final_kind` is "pre_norm", as it is if "post_norm".
            rows: vocabulary rows wanted; all if None.

        Raises MetricError while nobody has said which of the two it is.
        """
        if final_kind not in ("pre_norm", "post_norm"):
            raise MetricError(
                self.path, "final_kind", expected="pre_norm or post_norm", found=repr(final_kind),
                remedy="lib.final_state.settle_final(captures, head) decides by evidence",
            )  # fmt: skip
        if final.shape[-1] != self.hidden_size:
            raise MetricError(
                self.path, "final state", expected=f"states of width {self.hidden_size}",
                found=str(tuple(final.shape)), remedy="captures and target are of different models",
            )  # fmt: skip
        x = final.float()
        if final_kind == "pre_norm":
            x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.norm.float()
        weight = self.lm_head if rows is None else self.lm_head[rows]
        return x @ weight.float().T


def load_target_head(path: str | Path) -> TargetHead:
    """Embedding, final norm and lm_head of a target: a Hugging Face folder or a `.gguf` file.

    Shards that hold none of the three are not opened. CheckpointError for a target whose logits are more
    than lm_head(RMSNorm(x)): scaled, capped, biased, or normed by 1 + weight.
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
    _refuse_other_logits(path, config, text)
    found = _parts(path)
    if "lm_head" not in found and text.get("tie_word_embeddings", True) and "embed" in found:
        found["lm_head"] = found["embed"]
    for part, rule in PARTS.items():
        if part not in found:
            raise CheckpointError(
                path, part, expected=f"a tensor matching {rule}", found="none",
                remedy="give a target in transformers' format (Llama-style names)",
            )  # fmt: skip
    eps = text.get("rms_norm_eps", 1e-6)
    if not isinstance(eps, int | float) or isinstance(eps, bool) or not 0 <= eps < 1:
        raise CheckpointError(
            path / "config.json", "rms_norm_eps", expected="a small number", found=repr(eps),
            remedy="give the target's own config.json",
        )  # fmt: skip
    _check_shapes(path, **found)
    layers = text["num_hidden_layers"]
    return TargetHead(path, found["embed"], found["norm"], found["lm_head"], float(eps), layers, config)


def _parts(path: Path) -> dict[str, Tensor]:
    """The tensors that match `PARTS`; CheckpointError if two match one part, or one is a bias."""
    found: dict[str, Tensor] = {}
    names: dict[str, str] = {}
    for file, wanted in weight_files(path, HEAD):
        shard = TensorFile(file)
        for name in sorted(wanted if wanted is not None else shard):
            if re.fullmatch(BIAS, name):
                raise CheckpointError(
                    file, name, expected="logits that are lm_head(norm(x)), without a bias", found="a bias",
                    remedy="this target's logits are not computed here; leave the target out",
                )  # fmt: skip
            part = next((p for p, rule in PARTS.items() if re.fullmatch(rule, name)), None)
            if part in names:
                raise CheckpointError(
                    file, part, expected="one tensor", found=f"{names[part]} and {name}",
                    remedy="give the folder of the text model alone",
                )  # fmt: skip
            if part:
                names[part], found[part] = name, shard[name]
    return found


def _refuse_other_logits(path: Path, config: dict[str, Any], text: dict[str, Any]) -> None:
    """CheckpointError for a target whose config asks for more than lm_head(norm(x))."""
    for values in (config, text):
        kind = values.get("model_type")
        if isinstance(kind, str) and re.fullmatch(OTHER_NORM, kind):
            raise CheckpointError(
                path / "config.json", "model_type", expected="a target whose final norm is a plain RMSNorm",
                found=f"{kind}, whose norm is another (1 + weight, or a LayerNorm)",
                remedy="its logits are not computed here; leave the target out",
            )  # fmt: skip
        for key, plain in PLAIN.items():
            if values.get(key) is not None and values[key] != plain:
                raise _scaled(path / "config.json", key, values[key])


def _scaled(where: Path, key: str, value: Any) -> CheckpointError:
    return CheckpointError(
        where, key, expected="logits that are lm_head(norm(x)) as they are", found=repr(value)[:80],
        remedy="this target's logits are not computed here; leave the target out",
    )  # fmt: skip


def _check_shapes(path: Path, embed: Tensor, norm: Tensor, lm_head: Tensor) -> None:
    """(V, H), (H,) and (rows, H), all numbers with a fraction."""
    hidden = norm.shape[-1] if norm.ndim else 0
    for name, tensor, dims in (("embed", embed, 2), ("norm", norm, 1), ("lm_head", lm_head, 2)):
        fits = tensor.ndim == dims and tensor.shape[-1] == hidden > 0 and tensor.shape[0] > 0
        if not fits or not tensor.dtype.is_floating_point:
            raise CheckpointError(
                path, name, expected=f"a floating-point tensor of {dims} dimensions, the last one {hidden}",
                found=f"{tuple(tensor.shape)} {tensor.dtype}",
                remedy="give the target's own weights; a quantised head must be dequantised first",
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
        kind = tensors[name].tensor_type
        try:
            return torch.from_numpy(np.require(dequantize(tensors[name].data, kind), None, "W"))
        except (NotImplementedError, KeyError, ValueError, TypeError) as err:
            raise CheckpointError(
                path, name, expected="a type that the gguf package can dequantise",
                found=f"{getattr(kind, 'name', kind)}: {' '.join(str(err).split())[:120]}",
                remedy="give the target unquantised, or as Q8_0",
            ) from err  # fmt: skip

    for key, plain in (("final_logit_softcapping", None), ("logit_scale", 1.0)):
        stated = reader.fields.get(f"{arch}.{key}")
        if stated is not None and stated.contents() != plain:
            raise _scaled(path, f"{arch}.{key}", stated.contents())
    for name in ("output.bias", "output_norm.bias"):
        if name in tensors:
            raise _scaled(path, name, "a bias")

    embed = read("token_embd.weight")
    head = read("output.weight") if "output.weight" in tensors else embed
    return TargetHead(path, embed, read("output_norm.weight"), head, eps, layers)
