"""Quantised drafts: the same numbers as the writer's own arithmetic, or a refusal that names the method."""

from __future__ import annotations

import re
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from lib.checkpoints import load_draft
from lib.draft import DraftForward
from lib.errors import CheckpointError
from lib.quantised import Scheme, declared, dequantise
from tests.draft_writers import drop, write_modelopt, write_sglang
from tests.support import read_checkpoint, speculators_draft, write_checkpoint

pytestmark = pytest.mark.speculators
FP8 = torch.float8_e4m3fn
HIGHEST = torch.finfo(FP8).max
BLOCK = (16, 16)  # of the test's layers; the default is 128 x 128
PROJECTIONS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj")


@pytest.fixture(scope="module")
def native(tmp_path_factory):
    """The tensors and config of a draft as speculators saves it."""
    root = tmp_path_factory.mktemp("native")
    speculators_draft().save_pretrained(root / "draft")
    tensors, config = read_checkpoint(root / "draft")
    return SimpleNamespace(tensors=tensors, config=config)


# ---- writers: plain arithmetic, one value at a time where packing is concerned ------------------


def fp8(weight: Tensor, per: str, block=BLOCK) -> tuple[Tensor, Tensor]:
    """An fp8 weight and the scale that its values are multiplied by."""
    if per == "tensor":
        scale = weight.abs().max() / HIGHEST
        return (weight / scale).to(FP8), scale
    if per == "channel":
        scale = weight.abs().amax(1, keepdim=True) / HIGHEST
        return (weight / scale).to(FP8), scale
    rows, columns = weight.shape
    scale = torch.empty(-(-rows // block[0]), -(-columns // block[1]))
    stored = torch.empty(rows, columns, dtype=FP8)
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            part = (
                slice(i * block[0], (i + 1) * block[0]),
                slice(j * block[1], (j + 1) * block[1]),
            )
            scale[i, j] = weight[part].abs().max() / HIGHEST
            stored[part] = (weight[part] / scale[i, j]).to(FP8)
    return stored, scale


def integers(weight: Tensor, bits: int, group: int | None) -> tuple[Tensor, Tensor]:
    """Signed integers and their scales, one per group of columns (per row if None)."""
    parts = weight.split(group or weight.shape[1], dim=1)
    scales = [p.abs().amax(1, keepdim=True) / (2 ** (bits - 1) - 1) for p in parts]
    values = torch.cat([(p / s).round() for p, s in zip(parts, scales, strict=True)], 1)
    return values.to(torch.int8), torch.cat(scales, 1)


def packed(values: Tensor, bits: int) -> Tensor:
    """compressed-tensors' int32 words: value + 2^(bits - 1), the first in the lowest bits."""
    each, words = 32 // bits, []
    for row in values.tolist():
        out = []
        for start in range(0, len(row), each):
            word = 0
            for place, value in enumerate(row[start : start + each]):
                word |= (value + 2 ** (bits - 1)) << (bits * place)
            out.append(word - 2**32 if word >= 2**31 else word)
        words.append(out)
    return torch.tensor(words, dtype=torch.int32)


def compressed(form: str, kind: str, bits: int, **weights) -> dict:
    """compressed-tensors' `quantization_config`."""
    group = {"targets": ["Linear"], "weights": {"type": kind, "num_bits": bits, "symmetric": True, **weights}}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}}


@dataclass
class Method:
    """One way of quantising a weight: its tensors, and the config that says so."""

    parts: object  # weight -> {suffix: tensor}
    config: dict | None
    note: str
    extra: tuple[str, ...] = ()


def fp8_parts(per: str, name: str, block=BLOCK):
    return lambda w: dict(zip(("weight", name), fp8(w, per, block), strict=True))


def int_parts(bits: int, group: int | None, pack: bool):
    def parts(weight):
        values, scale = integers(weight, bits, group)
        if not pack:
            return {"weight": values, "weight_scale": scale}
        shape = torch.tensor(weight.shape)
        return {"weight_packed": packed(values, bits), "weight_scale": scale, "weight_shape": shape}

    return parts


def modelopt(algo: str) -> dict:
    return {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": algo, "exclude_modules": ["fc"]}}


METHODS = {
    "fp8 per tensor (Model-Optimizer)": Method(
        fp8_parts("tensor", "weight_scale"), modelopt("FP8"),
        "fp8 per tensor: Model-Optimizer FP8", ("input_scale",),
    ),
    "fp8 per tensor, newer config": Method(
        fp8_parts("tensor", "weight_scale"), {"quant_method": "modelopt", "quant_algo": "FP8"},
        "fp8 per tensor: Model-Optimizer FP8", ("k_scale", "v_scale"),
    ),
    "fp8 per channel (compressed-tensors)": Method(
        fp8_parts("channel", "weight_scale"), compressed("float-quantized", "float", 8),
        "fp8 per channel: compressed-tensors float-quantized float8",
    ),
    "fp8 per block (DeepSeek)": Method(
        fp8_parts("block", "weight_scale_inv"), {"quant_method": "fp8", "weight_block_size": [16, 16]},
        "fp8 per block 16x16: fp8",
    ),
    "fp8 per block, size not said": Method(
        fp8_parts("block", "weight_scale_inv", (128, 128)), {"quant_method": "fp8"},
        "fp8 per tensor: fp8",  # a layer this small is one block
    ),
    "fp8 without any config": Method(
        fp8_parts("channel", "weight_scale"), None, "fp8 per channel: config.json names no method"
    ),
    "int8 (compressed-tensors)": Method(
        int_parts(8, None, False), compressed("int-quantized", "int", 8),
        "int8 per channel: compressed-tensors int-quantized int8",
    ),
    "int4 packed in groups": Method(
        int_parts(4, 16, True), compressed("pack-quantized", "int", 4, group_size=16),
        "int4 per group of 16: compressed-tensors pack-quantized int4",
    ),
    "int8 packed": Method(
        int_parts(8, None, True), compressed("pack-quantized", "int", 8),
        "int8 per channel: compressed-tensors pack-quantized int8",
    ),
}  # fmt: skip


def quantise(native, method: Method) -> tuple[dict, dict[str, Tensor]]:
    """The draft's tensors with some layers quantised, and those layers' exact values in float64."""
    tensors, exact = dict(native.tensors), {}
    for part in PROJECTIONS:
        name = f"layers.0.{part}"
        parts = method.parts(tensors.pop(f"{name}.weight"))
        stored = parts["weight"] if "weight" in parts else None
        scale = next(parts[k] for k in ("weight_scale", "weight_scale_inv") if k in parts).double()
        if stored is None:
            bits = method.config["config_groups"]["group_0"]["weights"]["num_bits"]
            group = method.config["config_groups"]["group_0"]["weights"].get("group_size")
            stored, _ = integers(native.tensors[f"{name}.weight"], bits, group)
        rows, columns = stored.shape
        grid = scale if scale.ndim == 2 else scale.reshape(1, 1)
        i = (torch.arange(rows) * grid.shape[0]).div(rows, rounding_mode="floor")
        j = (torch.arange(columns) * grid.shape[1]).div(columns, rounding_mode="floor")
        exact[part] = stored.double() * grid[i][:, j]
        tensors |= {f"{name}.{suffix}": tensor for suffix, tensor in parts.items()}
        tensors |= {f"{name}.{suffix}": torch.tensor(0.5) for suffix in method.extra}
    return tensors, exact


FIELDS = dict(zip(PROJECTIONS, ("q", "k", "o", "up", "down"), strict=True))


@pytest.mark.parametrize("name", METHODS)
def test_a_quantised_draft_is_what_its_arithmetic_says(native, tmp_path, name):
    """fp32 within one rounding of float64, float64 exact; every scale is accounted for; the note names it."""
    method = METHODS[name]
    tensors, exact = quantise(native, method)
    quant = {} if method.config is None else {"quantization_config": method.config}
    folder = write_checkpoint(tmp_path, tensors, native.config | quant)
    for dtype, rounding in ((torch.float32, 2**-23), (torch.float64, 2**-51), (torch.bfloat16, 2**-8)):
        draft = load_draft(folder, dtype=dtype)
        for part, values in exact.items():
            found = getattr(draft.layers[0], FIELDS[part])
            assert found.dtype == dtype
            assert ((found.double() - values).abs() <= rounding * values.abs()).all(), part
    assert set(draft.keys) == set(tensors)
    used = {k: v for k, v in draft.keys.items() if v.startswith("used: scale of")}
    assert len(used) == sum(k.endswith(("scale", "scale_inv", "shape")) for k in tensors) - len(
        [k for k in tensors if k.endswith(method.extra)] if method.extra else []
    )
    assert any(f"5 tensors dequantised from {method.note}" in note for note in draft.notes), draft.notes


def test_the_dtype_of_the_rest_is_taken_for_what_was_quantised(native, tmp_path):
    """dtype=None: a bf16 draft with fp8 layers is bf16 everywhere, and predicts."""
    half = {n: t.bfloat16() if t.is_floating_point() else t for n, t in native.tensors.items()}
    method = METHODS["fp8 per channel (compressed-tensors)"]
    tensors, _ = quantise(SimpleNamespace(tensors=native.tensors), method)
    kept = {n: half[n] if n in half and not n.startswith(("layers.0.mlp", "layers.0.self")) else t
            for n, t in tensors.items()}  # fmt: skip
    folder = write_checkpoint(tmp_path, kept, native.config | {"quantization_config": method.config})
    draft = load_draft(folder, dtype=None)
    assert {draft.layers[0].q.dtype, draft.fc.dtype, draft.layers[0].v.dtype} == {torch.bfloat16}
    assert "layers.0.v" in next(n for n in draft.notes if "converted" in n), "v was left in fp32"
    assert DraftForward(draft).dtype == torch.bfloat16


def test_fp8_blocks_equal_transformers(native):
    """transformers' own dequantisation of DeepSeek's blocks, `finegrained_fp8.py`, bit for bit."""
    module = pytest.importorskip("transformers.integrations.finegrained_fp8")
    weight = torch.randn(256, 384, generator=torch.Generator().manual_seed(1))
    stored, scale = fp8(weight, "block", (128, 128))
    theirs = module.Fp8Dequantize(None)._dequantize_one(stored, scale, output_dtype=torch.float32)
    ours, how = dequantise("file", "w", stored, {"weight_scale_inv": scale}, None, torch.float32)
    assert how == "fp8 per block 128x128"
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("shape", [(20, 40), (16, 33), (17, 16)])
def test_the_last_blocks_may_be_smaller(shape):
    """DeepSeek rounds the grid up; transformers refuses such shapes, so the check is by hand."""
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(2))
    stored, scale = fp8(weight, "block")
    parts, scheme = {"weight_scale_inv": scale}, Scheme("fp8", "test", block=BLOCK)
    ours, how = dequantise("file", "w", stored, parts, scheme, torch.float64)
    assert how == "fp8 per block 16x16"
    for i in range(shape[0]):
        for j in range(shape[1]):
            assert ours[i, j] == stored[i, j].double() * scale[i // 16, j // 16].double()


def test_a_modelopt_side_file_declares_it_too(native, tmp_path):
    """`hf_quant_config.json`, where config.json says nothing; the kv cache's scales are ignored by name."""
    method = METHODS["fp8 per tensor (Model-Optimizer)"]
    tensors, _ = quantise(native, method)
    embed = native.tensors["embed_tokens.weight"]
    target = SimpleNamespace(embed=embed, n_layers=6, path=tmp_path)
    folder = write_modelopt(tmp_path, tensors, native.config, quant=method.config)
    draft = load_draft(folder, target=target)
    assert any("Model-Optimizer FP8 (hf_quant_config.json)" in n for n in draft.notes)
    assert draft.keys["layers.0.mlp.up_proj.input_scale"].startswith("ignored: scale of activations")


REFUSED = {
    "AWQ": ({"quant_method": "awq"}, "awq"),
    "GPTQ": ({"quant_method": "gptq"}, "gptq"),
    "bitsandbytes": ({"quant_method": "bitsandbytes"}, "bitsandbytes"),
    "MXFP4": ({"quant_method": "mxfp4"}, "mxfp4"),
    "Quark": ({"quant_method": "quark"}, "quark"),
    "NVFP4": (modelopt("NVFP4"), "Model-Optimizer NVFP4"),
    "W4A8": ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "Model-Optimizer W4A8_AWQ"),
    "sparse": (compressed("marlin-24", "int", 4), "compressed-tensors marlin-24"),
    "NVFP4, compressed": (compressed("nvfp4-pack-quantized", "float", 4), "nvfp4-pack-quantized"),
    "three bits": (compressed("pack-quantized", "int", 3), "pack-quantized int3"),
    "asymmetric": (compressed("pack-quantized", "int", 4, symmetric=False), "asymmetric"),
    "activation order": (compressed("pack-quantized", "int", 4, actorder="group"), "actorder='group'"),
    "a type that is a list": (compressed("pack-quantized", ["int"], 4), r"of the kind (['int'], 4, True)"),
    "blocks of one number": (compressed("int-quantized", "int", 8, block_structure=5), "with blocks of 5"),
    "no groups": ({"quant_method": "compressed-tensors", "format": "int-quantized"}, "weights of 0 kinds"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_method_that_is_not_read_is_refused_by_its_name(native, tmp_path, name):
    """From the config alone: whatever the tensors are, the numbers would be wrong."""
    config, method = REFUSED[name]
    folder = write_checkpoint(tmp_path, native.tensors, native.config | {"quantization_config": config})
    with pytest.raises(CheckpointError, match=rf"quantisation: expected fp8 .* found .*{re.escape(method)}"):
        load_draft(folder)


@pytest.mark.parametrize(
    "tensor, method",
    [
        ("qweight", "AWQ or GPTQ"),
        ("weight_scale_2", "NVFP4"),
        ("weight_g_idx", "GPTQ activation order"),
        ("weight_zero_point", "asymmetric"),
        ("SCB", "bitsandbytes"),
    ],
)
def test_a_method_is_known_by_its_tensors_too(native, tmp_path, tensor, method):
    """No config says so; the name of one tensor does."""
    tensors = native.tensors | {f"layers.0.mlp.up_proj.{tensor}": torch.ones(2)}
    with pytest.raises(CheckpointError, match=rf"quantisation: .*found {method}.*tensor layers\.0"):
        load_draft(write_checkpoint(tmp_path, tensors, native.config))


UP = "layers.0.mlp.up_proj."
F8 = torch.float8_e4m3fn
BROKEN = {
    "scale lost": ({"weight_scale": None}, r"floating-point weight, or a scale", "float8"),
    "two scales": ({"weight_scale_inv": torch.ones(48, 1)}, "one scale beside it", r"weight_scale_inv"),
    "scale of bytes": ({"weight_scale": torch.ones(48, 1).byte()}, "floating-point scales", "uint8"),
    "scale not finite": ({"weight_scale": torch.full((48, 1), torch.nan)}, "finite scales", "NaN"),
    "scale of another layer": ({"weight_scale": torch.ones(47, 1)}, "48 per channel", r"\(47, 1\)"),
    "no axes": ({"weight": torch.zeros(()).to(F8), "weight_scale": torch.ones(2)}, "a matrix", r"\(\)"),
    "three axes": (
        {"weight": torch.zeros(4, 5, 6).to(F8), "weight_scale": torch.ones(4)},
        "a matrix",
        r"\(4, 5, 6\)",
    ),
    "scales without columns": ({"weight_scale": torch.ones(48, 0)}, "48 per channel", r"\(48, 0\)"),
    "other fp8": ({"weight": torch.ones(48, 32).to(torch.float8_e5m2)}, "whose scheme", "e5m2"),
    "int8, nothing declared": ({"weight": torch.ones(48, 32).to(torch.int8)}, "whose scheme", "int8"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_quantised_tensor_is_one_typed_error(native, tmp_path, name):
    """Missing, doubled, misshapen or meaningless scales."""
    changes, expected, found = BROKEN[name]
    tensors, _ = quantise(native, METHODS["fp8 without any config"])
    tensors |= {UP + k: v for k, v in changes.items()}
    folder = write_checkpoint(tmp_path, {k: v for k, v in tensors.items() if v is not None}, native.config)
    with pytest.raises(CheckpointError, match=rf"up_proj\.weight.*expected .*{expected}.* found .*{found}"):
        load_draft(folder)


@pytest.mark.parametrize(
    "changes, expected",
    [
        ({"weight_shape": torch.tensor([48, 40])}, r"\(48, 5\) words"),
        ({"weight_shape": None}, "weight_shape of two whole numbers"),
        ({"weight_shape": torch.tensor([torch.nan, 32])}, "weight_shape of two whole numbers"),
        ({"weight_packed": torch.ones(48, 4, dtype=torch.int16)}, "int32"),
    ],
)
def test_a_broken_packed_tensor_is_one_typed_error(native, tmp_path, changes, expected):
    """Words and shape must agree."""
    method = METHODS["int4 packed in groups"]
    tensors, _ = quantise(native, method)
    tensors = {k: v for k, v in (tensors | {UP + k: v for k, v in changes.items()}).items() if v is not None}
    folder = write_checkpoint(tmp_path, tensors, native.config | {"quantization_config": method.config})
    with pytest.raises(CheckpointError, match=rf"up_proj\.weight_packed: expected .*{expected}"):
        load_draft(folder)


@pytest.mark.parametrize("block", [[16], [0, 16], "16x16", [16, True]])
def test_a_block_size_that_is_none(tmp_path, block):
    """Two positive whole numbers, or nothing."""
    with pytest.raises(CheckpointError, match="weight_block_size: expected two positive"):
        declared(tmp_path, {"quantization_config": {"quant_method": "fp8", "weight_block_size": block}})


def test_the_flat_family_is_read_quantised_too(native, tmp_path):
    """midlayer.* names with fp8 blocks, as DeepSeek-style exports have them."""
    method = METHODS["fp8 per block (DeepSeek)"]
    tensors, exact = quantise(native, method)
    target = SimpleNamespace(embed=native.tensors["embed_tokens.weight"], n_layers=6, path=tmp_path)
    folder = write_sglang(tmp_path, drop(tensors), native.config, quantization_config=method.config)
    draft = load_draft(folder, target=target, dtype=torch.float64)
    assert ((draft.layers[0].q - exact["self_attn.q_proj"]).abs().max()) < 1e-12
