"""Whose draft a folder holds, and why: from `config.json`, tensor names and shapes; no weight is read.

Section A.2 of the formats reference. The flat families share names on purpose, so several answers are
possible: the reader then uses what they share and notes where they differ.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from lib.formats import Match
from lib.weights import TensorFile, read_json

DRAFT_FORMATS = ("speculators", "eagle", "specforge", "modelopt", "torchspec", "automodel")
# SGLang's and vLLM's class names for EAGLE-3 drafts; EAGLE's own configs say LlamaForCausalLM.
EAGLE3_CLASSES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3DeepseekV2ForCausalLM")
MODELOPT_KEYS = ("use_input_layernorm_in_first_layer", "use_last_layernorm", "use_mtp_layernorm")
META_FILES = ("eagle_meta.pt", "eagle3_meta.pt")  # Automodel `serve_sglang.py:_find_eagle_meta`
INNER = ("model", "consolidated")  # Automodel's folders inside a checkpoint


def draft_folder(path: Path) -> Path:
    """The folder with `config.json`: `path`, its parent for a file, or Automodel's inner folder."""
    if path.is_file():
        return path.parent
    inner = (path, path / "model", path / "model" / "consolidated", path / "consolidated")
    return next((p for p in inner if (p / "config.json").is_file()), path)


def meta_file(folder: Path) -> Path | None:
    """Automodel's `eagle_meta.pt` in the draft's folder or the checkpoint's around it."""
    while True:
        found = next((folder / name for name in META_FILES if (folder / name).is_file()), None)
        if found or folder.name not in INNER:
            return found
        folder = folder.parent


def plain(name: str) -> str:
    """A stored name without `model.`, the one prefix that some exports put before everything else."""
    return name.removeprefix("model.")


def recognise(path: str | Path) -> list[Match]:
    """The formats a draft's folder (or weights file) could be; none if it is no EAGLE-3 draft.

    Raises CheckpointError for a `config.json` or weights that cannot be read.
    """
    path = Path(path)
    folder = draft_folder(path)
    if not (folder / "config.json").is_file() or (path.is_dir() and not _has_weights(folder)):
        return []
    config = read_json(folder / "config.json")
    tensors = TensorFile(path if path.is_file() else folder)
    return matches(folder, config, tensors)


def _has_weights(folder: Path) -> bool:
    """Whether there is anything `weight_files` would look at; what is wrong with it is said by that."""
    stems = ("model", "pytorch_model")
    return any(p.name.startswith(stems) and p.suffix in (".safetensors", ".bin") for p in folder.iterdir())


def matches(folder: Path, config: Mapping[str, Any], tensors: TensorFile) -> list[Match]:
    """`recognise` for what is already open."""
    names = {plain(name): name for name in tensors}
    prefix = next((p for p in ("midlayer", "layers.0") if any(n.startswith(p + ".") for n in names)), None)
    if "transformer_layer_config" in config or "speculators_model_type" in config:
        key = "speculators_model_type" if "speculators_model_type" in config else "transformer_layer_config"
        return [Match("speculators", (f"config.json has {key}",))] if prefix else []
    if prefix is None or not ({"fc.weight", f"{prefix}.hidden_norm.weight"} & names.keys() or _wide(
        config, tensors, names, prefix
    )):  # fmt: skip
        return []
    if prefix == "midlayer":
        return _midlayer(config, tensors, names)
    return _numbered(folder, config, names)


def _wide(config: Mapping, tensors: TensorFile, names: Mapping[str, str], prefix: str) -> bool:
    """Does the first attention take twice the hidden size? Nothing but EAGLE-3 does."""
    for part in ("q_proj", "q_a_proj"):
        if stored := names.get(f"{prefix}.self_attn.{part}.weight"):
            shape = tensors.shape(stored)
            hidden = config.get("hidden_size")
            return len(shape) == 2 and isinstance(hidden, int | float) and shape[1] == 2 * hidden
    return False


def _class(config: Mapping[str, Any]) -> str | None:
    """The first of `architectures`; None if there is none."""
    listed = config.get("architectures")
    return str(listed[0]) if isinstance(listed, list) and listed else None


def _midlayer(config: Mapping, tensors: TensorFile, names: Mapping[str, str]) -> list[Match]:
    """EAGLE, SpecForge (with SGLang and AngelSlim) and TorchSpec write one set of names."""
    said, maps = _class(config), [n for n in ("d2t", "t2d") if n in names]
    own_class = said is None or said in EAGLE3_CLASSES
    embed, head = "embed_tokens.weight" in names, names.get("lm_head.weight")
    pickled = any(tensors.origin[n].suffix == ".bin" for n in names.values())
    newer = [k for k in ("eagle_config", "fc_norm", "norm_output", "target_model_type") if k in config]
    latent = any(".kv_a_proj_with_mqa." in n for n in names)
    full = head is not None and tensors.shape(head)[:1] == (config.get("vocab_size"),)
    common = ("tensors midlayer.*", f"architectures: {said}")
    mapped = f"{len(maps)} of the two vocabulary maps"
    found = []
    if not newer and not latent and (said not in EAGLE3_CLASSES or pickled):
        extra = ("pytorch_model.bin",) if pickled else ("no key that EAGLE's config lacks",)
        found.append(Match("eagle", common + extra))
    if own_class and not latent and not (embed and full and not maps):
        found.append(Match("specforge", (*common, mapped, *(f"config key {k}" for k in newer))))
    if own_class and embed and len(maps) in (0, 2):
        found.append(Match("torchspec", (*common, "embed_tokens is kept", mapped)))
    return found


def _numbered(folder: Path, config: Mapping, names: Mapping[str, str]) -> list[Match]:
    """Model-Optimizer and Automodel number their layers; only one has `model.` before them."""
    said, eagle, meta = _class(config), config.get("eagle_config"), meta_file(folder)
    prefixed = any(stored != name for name, stored in names.items())
    keys = [k for k in MODELOPT_KEYS if isinstance(eagle, dict) and k in eagle]
    found = []
    if not prefixed and meta is None and (keys or _exported_alone(names)):
        why = [f"eagle_config: {k}" for k in keys] or ["neither embedding nor target-to-draft map"]
        found.append(Match("modelopt", ("tensors layers.0.*", *why)))
    if not keys and (prefixed or meta or str(said).endswith("DraftModel")):
        why = [meta.name] if meta else []
        why += ["tensors model.layers.0.*"] if prefixed else []
        found.append(Match("automodel", (*why, f"architectures: {said}")))
    return found


def _exported_alone(names: Collection[str]) -> bool:
    """Model-Optimizer exports neither the embedding nor t2d (`hf_spec_export.py`)."""
    return "embed_tokens.weight" not in names and "t2d" not in names
