"""A draft's tensors by their meaning: one name each, shapes checked, quantised ones made plain.

Every tensor of the file ends up used, ignored by a named rule, or in an error.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lib.errors import CheckpointError
from lib.quantised import SCALES, UNUSED, Scheme, declared, dequantise, refuse_foreign
from lib.weights import TensorFile

CHUNK = 1 << 22  # values per finite check: its temporaries stay small whatever the tensor
STORED_AS = (  # stored name -> canonical name, in this order
    (r"^model\.", ""),
    (r"^midlayer\.", "layers.0."),
    (r"\.weight_packed$", ".weight"),
)
IGNORED = (
    (r"(.*\.)?rotary_emb\..*", "computed from the config"),
    (r"verifier_(norm|lm_head)\.weight", "the trainer's copy of target weights"),
    (UNUSED, "scale of activations, for quantised arithmetic only"),
)
# What the forward has no place for: refused by name, for an engine would not compute this draft either.
REFUSED = (
    (r"mask_hidden", "P-EAGLE's placeholder state (parallel drafting)"),
    (r"parallel_draft_heads\..*", "Medusa heads on an EAGLE draft (Model-Optimizer)"),
    (r"(enorm|hnorm)\.weight", "the norms of an MTP or EAGLE-1 module (use_mtp_layernorm)"),
    (r"layers\.\d+\.mlp\.(gate|up|down)_proj\.bias", "biases in the MLP (mlp_bias)"),
    (r"layers\.\d+\.mlp\.(experts|gate|router|shared_experts?)\..*", "a mixture of experts"),
    (r"layers\.\d+\.self_attn\.sinks", "attention sinks (gpt-oss)"),
    (r"layers\.\d+\.self_attn\.(g_proj|gate_proj)\..*", "gated attention"),
    (r".*\.(lora_[AB])\..*", "LoRA adapters: merge them first"),
)


class DraftTensors:
    """The file's tensors under canonical names, with an account of what became of each.

    Attributes:
        path: the draft, for messages.
        names: canonical name -> stored name.
        keys: stored name -> what became of it.
        dtype: what quantised tensors become, and what `load_draft(dtype=None)` keeps.
    """

    def __init__(self, path: Path, folder: Path, tensors: TensorFile, config: dict[str, Any]) -> None:
        self.path, self.tensors = path, tensors
        self.keys: dict[str, str] = {}
        self.names: dict[str, str] = {}
        self.methods: dict[str, int] = {}
        for stored in tensors:
            name = canonical(stored)
            if name in self.names:
                raise CheckpointError(
                    path, stored, expected="one tensor per meaning",
                    found=f"{self.names[name]} has the same one", remedy="remove one of the two",
                )  # fmt: skip
            self.names[name] = stored
        for name, stored in self.names.items():
            for rule, what in REFUSED:
                if re.fullmatch(rule, name):
                    raise CheckpointError(
                        tensors.origin[stored], stored, expected="a draft this forward can compute",
                        found=what, remedy="evaluate it in the framework that trained it",
                    )  # fmt: skip
        refuse_foreign(path, self.names)
        self.scheme: Scheme | None = declared(folder, config)
        self.dtype = self._dtype()

    def _dtype(self) -> torch.dtype:
        """What the weights are stored in: the first of three weights that is not quantised; else float32."""
        for name in ("norm.weight", "fc.weight", "layers.0.post_attention_layernorm.weight"):
            if name in self.names:
                dtype = self.tensors[self.names[name]].dtype
                if dtype.is_floating_point and dtype.itemsize >= 2:
                    return dtype
        return torch.float32

    def __contains__(self, name: str) -> bool:
        return name in self.names

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Stored shape, from the header; None if there is no such tensor."""
        return self.tensors.shape(self.names[name]) if name in self.names else None

    def take(self, name: str, *shape: int | None, required: bool = True, dtype: torch.dtype | None = None):
        """One tensor, shape-checked (None fits any size), dequantised; None if absent and not required.

        Args:
            dtype: of a tensor that has to be dequantised; `self.dtype` if None.
        """
        if name not in self.names:
            if not required:
                return None
            return self.tensors[name]  # raises with close matches
        stored = self.names[name]
        tensor = self.tensors[stored]
        where = self.tensors.origin[stored]
        self.keys[stored] = "used"
        quantised = not tensor.dtype.is_floating_point or tensor.dtype.itemsize < 2
        if quantised and (parts := self._parts(name)):
            tensor, how = dequantise(where, stored, tensor, parts, self.scheme, dtype or self.dtype)
            self.methods[how] = self.methods.get(how, 0) + 1

        def fits(found: tuple[int, ...]) -> bool:
            return len(found) == len(shape) and all(
                s is None or s == t for s, t in zip(shape, found, strict=True)
            )

        if not fits(tensor.shape):
            hint = "check hidden_size and the number of slots in config.json"
            if fits(tensor.shape[::-1]):
                hint = "it is stored transposed: save weight.T"
            wanted = tuple("any" if s is None else s for s in shape)
            raise CheckpointError(
                where, stored, expected=str(wanted), found=str(tuple(tensor.shape)), remedy=hint
            )
        if name not in ("d2t", "t2d") and (not tensor.dtype.is_floating_point or tensor.dtype.itemsize < 2):
            raise CheckpointError(
                where, stored, expected="a floating-point weight, or a scale beside it",
                found=str(tensor.dtype), remedy="this looks quantised: dequantise it first",
            )  # fmt: skip
        return tensor

    def _parts(self, name: str) -> dict[str, Tensor]:
        """Scales and shape beside a quantised weight, taken; empty for a plain one."""
        if not name.endswith(".weight"):
            return {}
        found = {}
        for part in (*SCALES, "weight_shape"):
            stored = self.names.get(f"{name.removesuffix('weight')}{part}")
            if stored is not None:
                found[part] = self.tensors[stored]
                self.keys[stored] = f"used: scale of {name}"
        return found

    def ignore(self, name: str, why: str) -> None:
        """Leave one tensor out of the draft, by a rule of the caller's."""
        self.keys[self.names[name]] = f"ignored: {why}"

    def explain(self) -> list[str]:
        """Account for what was not taken, or raise; returns notes on what was dequantised."""
        for name, stored in self.names.items():
            if stored in self.keys:
                continue
            why = next((w for rule, w in IGNORED if re.fullmatch(rule, name)), None)
            if why is None:
                raise CheckpointError(
                    self.tensors.origin[stored], stored, expected="a tensor this reader knows",
                    found="an unknown name", remedy="an engine may skip it silently (faults 16, "
                    "28); if it is harmless, remove it from the file",
                )  # fmt: skip
            self.keys[stored] = f"ignored: {why}"
        scheme = self.scheme
        said = f"{scheme.method} ({scheme.source})" if scheme else "config.json names no method"
        return [f"{n} tensors dequantised from {how}: {said}" for how, n in self.methods.items()]


def canonical(stored: str) -> str:
    """`model.midlayer.x` -> `layers.0.x`; SGLang's `additional_layers.0.x` -> `layers.1.x`.

    SGLang's extra layers norm their input with `hidden_norm` and have no `input_layernorm`
    (`llama_eagle3.py:BasicDecoderLayer`); everyone else calls that norm `input_layernorm`.
    """
    name = stored
    for rule, prefix in STORED_AS:
        name = re.sub(rule, prefix, name)
    if match := re.fullmatch(r"additional_layers\.(\d{1,3})\.(.+)", name):
        rest = re.sub(r"^hidden_norm\.", "input_layernorm.", match[2])
        return f"layers.{int(match[1]) + 1}.{rest}"
    return name


def finite(path: Path, name: str, tensor: Tensor) -> Tensor:
    """The tensor itself, or CheckpointError if it holds NaN or Inf; looks at it block by block."""
    rows = max(1, CHUNK // max(1, tensor[:1].numel()))
    wide = torch.float64 if tensor.dtype == torch.float64 else torch.float32
    for block in tensor.split(rows):
        # One NaN or Inf makes the sum one too, ten times faster; a sum that merely overflows is looked at.
        if not torch.isfinite(block.sum(dtype=wide)) and not torch.isfinite(block).all():
            raise CheckpointError(
                path, name, expected="finite values", found="NaN or Inf",
                remedy="the training run diverged or the tensor was never initialised",
            )  # fmt: skip
    return tensor
