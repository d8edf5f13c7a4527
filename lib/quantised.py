"""Quantised weights of a draft: what is stored -> floating point, or a refusal that names the method.

Read here: fp8 e4m3 with one scale per tensor, per output channel or per block (DeepSeek and
transformers `finegrained_fp8.py`: `weight_scale_inv` is *multiplied*, its name notwithstanding;
Model-Optimizer and compressed-tensors: `weight_scale`), and compressed-tensors' symmetric integers,
plain int8 or packed into int32 (`pack_quantized/helpers.py`: value + 2^(bits-1), the lowest bits
first). Everything else is refused: a wrong number is worse than none.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lib.errors import CheckpointError
from lib.weights import read_json

BLOCK = (128, 128)  # DeepSeek-V3's, when the config names none
SCALES = ("weight_scale", "weight_scale_inv")
# Beside a quantised weight, of no use to floating-point arithmetic.
UNUSED = r".*\.(input|output|activation|k|v|q)_scale(_inv)?|.*\.(input|output)_zero_point"
MODELOPT_READ = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "FP8_PB_REAL")
PACKED_READ = ("float-quantized", "naive-quantized", "int-quantized", "pack-quantized", "dense")
FOREIGN = (  # tensor names that only one method writes
    (r".*\.(qweight|qzeros)", "AWQ or GPTQ"),
    (r".*\.weight_scale_2", "NVFP4"),
    (r".*\.weight_global_scale", "NVFP4"),
    (r".*_blocks", "MXFP4"),
    (r".*\.weight\.(absmax|quant_map|quant_state\..*)", "bitsandbytes"),
    (r".*\.(SCB|weight_format)", "bitsandbytes"),
    (r".*\.weight_g_idx", "GPTQ activation order (compressed-tensors `actorder`)"),
    (r".*\.weight_zero_point", "asymmetric integers (compressed-tensors)"),
)
REMEDY = "dequantise it with the framework that wrote it, or use the draft before quantisation"


@dataclass(frozen=True)
class Scheme:
    """What the config says about quantisation.

    Attributes:
        method: for notes and errors, e.g. "compressed-tensors pack-quantized".
        block: (rows, columns) that share a scale, if the config says so.
        bits: of an integer, None for fp8.
        source: file and key.
    """

    method: str
    source: str
    block: tuple[int, int] | None = None
    bits: int | None = None


def declared(folder: Path, config: Mapping[str, Any]) -> Scheme | None:
    """The scheme that `config.json` or `hf_quant_config.json` declares; None for none.

    Raises CheckpointError naming the method if it is not one that is read here.
    """
    values, source = config.get("quantization_config"), "config.json: quantization_config"
    side = folder / "hf_quant_config.json"
    if values is None and side.is_file():
        values, source = read_json(side), "hf_quant_config.json"
    if values is None:
        return None
    if not isinstance(values, dict):
        raise CheckpointError(
            folder / "config.json", "quantization_config", expected="an object", found=repr(values),
            remedy="copy this part of config.json from the original export",
        )  # fmt: skip
    method = values.get("quant_method")
    nested = values.get("quantization")
    if isinstance(nested, dict) or "quant_algo" in values:  # Model-Optimizer, old and new form
        inner = nested if isinstance(nested, dict) else values
        algo = inner.get("quant_algo")
        if algo is None:
            return None
        if algo not in MODELOPT_READ:
            raise _refusal(folder, f"Model-Optimizer {algo}", source)
        return Scheme(f"Model-Optimizer {algo}", source)
    if method == "fp8":
        block = values.get("weight_block_size")
        if block is None:
            return Scheme("fp8", source)
        if not isinstance(block, list | tuple) or len(block) != 2 or not all(_positive(b) for b in block):
            raise CheckpointError(
                folder / "config.json", "weight_block_size", expected="two positive whole numbers",
                found=repr(block), remedy="copy it from the original export",
            )  # fmt: skip
        return Scheme("fp8", source, block=(block[0], block[1]))
    if method == "compressed-tensors":
        return _compressed(folder, values, source)
    raise _refusal(folder, str(method), source)


def _positive(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _compressed(folder: Path, values: Mapping[str, Any], source: str) -> Scheme:
    """compressed-tensors' config: one format, one kind of weights over all its groups."""
    form = values.get("format")
    if form not in PACKED_READ:
        raise _refusal(folder, f"compressed-tensors {form}", source)
    groups = values.get("config_groups") or {}
    kinds = set()
    for group in groups.values() if isinstance(groups, dict) else ():
        weights = group.get("weights") if isinstance(group, dict) else None
        if isinstance(weights, dict):
            kind = (weights.get("type"), weights.get("num_bits"), weights.get("symmetric", True))
            if any(isinstance(value, list | dict) for value in kind):
                raise _refusal(folder, f"compressed-tensors with weights of the kind {kind}", source)
            kinds.add(kind)
            block = weights.get("block_structure")
            if weights.get("actorder"):
                raise _refusal(folder, f"compressed-tensors with actorder={weights['actorder']!r}", source)
            if block is not None and (not isinstance(block, list) or tuple(block) != BLOCK):
                raise _refusal(folder, f"compressed-tensors with blocks of {block}", source)
    if len(kinds) != 1:
        raise _refusal(folder, f"compressed-tensors with weights of {len(kinds)} kinds", source)
    ((kind, bits, symmetric),) = kinds
    method = f"compressed-tensors {form} {kind}{bits}"
    if (kind, bits) not in (("float", 8), ("int", 8), ("int", 4)) or not symmetric:
        raise _refusal(folder, method if symmetric else f"{method} asymmetric", source)
    return Scheme(method, source, bits=None if kind == "float" else bits)


def _refusal(folder: Path, method: str, source: str) -> CheckpointError:
    return CheckpointError(
        folder, "quantisation", expected="fp8 e4m3, or compressed-tensors' symmetric int4 / int8",
        found=f"{method} ({source})", remedy=REMEDY,
    )  # fmt: skip


def refuse_foreign(folder: Path, names: Iterable[str]) -> None:
    """CheckpointError if a tensor name belongs to a method that is not read here."""
    for name in names:
        for rule, method in FOREIGN:
            if re.fullmatch(rule, name):
                raise _refusal(folder, method, f"tensor {name}")


def dequantise(
    where: Path, name: str, stored: Tensor, parts: Mapping[str, Tensor], scheme: Scheme | None,
    dtype: torch.dtype,
) -> tuple[Tensor, str]:  # fmt: skip
    """One weight as floating point, and how: (out, in) of `dtype`, "fp8 per block 128x128".

    Args:
        where, name: for messages.
        stored: (out, in) fp8 or int8, or (out, in * bits / 32) int32.
        parts: the tensors beside it: one of `SCALES`, and `weight_shape` of a packed one.
        scheme: what the config declares; fp8 is read without, integers are not.
        dtype: float64 is computed in float64, everything else in float32 and rounded once.
    """
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    scale_names = [n for n in SCALES if n in parts]
    if len(scale_names) != 1:
        raise CheckpointError(
            where, name, expected=f"one scale beside it, {' or '.join(SCALES)}",
            found=f"{scale_names or 'none'}",
            remedy="the scale was lost in conversion: without it the weight means nothing",
        )  # fmt: skip
    scale = parts[scale_names[0]]
    if not scale.dtype.is_floating_point:
        raise CheckpointError(
            where, f"{name}: {scale_names[0]}", expected="floating-point scales", found=str(scale.dtype),
            remedy="bytes here are exponents (MX formats), which are not read: " + REMEDY,
        )  # fmt: skip
    scale = scale.to(wide)
    if not torch.isfinite(scale).all():
        raise CheckpointError(
            where, f"{name}: {scale_names[0]}", expected="finite scales", found="NaN or Inf",
            remedy="quantise the draft again: a range was empty or overflowed",
        )  # fmt: skip
    if stored.dtype == torch.float8_e4m3fn:
        values, kind = stored.to(wide), "fp8"
    elif scheme is None or scheme.bits is None:
        raise CheckpointError(
            where, name, expected="a floating-point weight, or integers whose scheme config.json declares",
            found=str(stored.dtype), remedy="this looks quantised: dequantise it first",
        )  # fmt: skip
    else:
        values = _integers(where, name, stored, parts, scheme.bits).to(wide)
        kind = f"int{scheme.bits}"
    spread, per = _spread(where, name, scale, values.shape, scheme)
    return (values * spread).to(dtype), f"{kind} {per}"


def _integers(where: Path, name: str, stored: Tensor, parts: Mapping[str, Tensor], bits: int) -> Tensor:
    """(out, in) signed integers from int8, or from int32 words that hold several."""
    if stored.dtype == torch.int8:
        return stored
    shape = parts.get("weight_shape")
    sized = shape is not None and shape.numel() == 2 and not (shape.is_floating_point() or shape.is_complex())
    if stored.dtype != torch.int32 or stored.ndim != 2 or not sized:
        raise CheckpointError(
            where, name, expected="int8, or int32 (out, words) with a weight_shape of two whole numbers",
            found=f"{stored.dtype} {tuple(stored.shape)}"
            + ("" if shape is None else f" and weight_shape {tuple(shape.shape)} {shape.dtype}"),
            remedy="this is another packing: " + REMEDY,
        )  # fmt: skip
    rows, columns = (int(n) for n in shape.tolist())
    each = 32 // bits  # values per word, the first in the lowest bits
    wanted = (rows, -(-columns // each))
    if stored.shape != wanted:
        raise CheckpointError(
            where, name, expected=f"{wanted} words for weight_shape ({rows}, {columns})",
            found=str(tuple(stored.shape)), remedy="weights and shapes are of different saves",
        )  # fmt: skip
    shifts = torch.arange(each, dtype=torch.int32) * bits
    fields = (stored[..., None] >> shifts) & ((1 << bits) - 1)  # (rows, words, each) unsigned
    return fields.flatten(1)[:, :columns] - (1 << (bits - 1))


def _spread(
    where: Path, name: str, scale: Tensor, shape: torch.Size, scheme: Scheme | None
) -> tuple[Tensor, str]:
    """Scales as a tensor that broadcasts with the weight, and what they are per."""
    if scale.numel() == 1:
        return scale.reshape(()), "per tensor"
    if len(shape) != 2:
        raise CheckpointError(
            where, name, expected="a matrix for its scales", found=str(tuple(shape)),
            remedy="this is another packing: " + REMEDY,
        )  # fmt: skip
    rows, columns = shape
    if scale.numel() == rows and scale.shape[0] == rows:
        return scale.reshape(rows, 1), "per channel"
    grid = scale.squeeze() if scale.ndim > 2 else scale  # Model-Optimizer: (blocks, 1, blocks, 1)
    block = (scheme.block if scheme else None) or BLOCK
    if grid.ndim == 2 and grid.numel():
        if grid.shape == tuple(-(-n // b) for n, b in zip(shape, block, strict=True)):
            per = grid.repeat_interleave(block[0], 0)[:rows].repeat_interleave(block[1], 1)[:, :columns]
            return per, f"per block {block[0]}x{block[1]}"
        if scheme and scheme.bits and grid.shape[0] == rows and columns % grid.shape[1] == 0:
            group = columns // grid.shape[1]
            return grid.repeat_interleave(group, 1), f"per group of {group}"
    raise CheckpointError(
        where, f"{name}: scale", expected=f"one scale, {rows} per channel, or one per block {block} of "
        f"{tuple(shape)}", found=str(tuple(scale.shape)),
        remedy="write weight_block_size into config.json if the blocks are of another size",
    )  # fmt: skip
