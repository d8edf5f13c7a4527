"""One draft, written as each framework writes it; layouts follow section A.2, not our readers.

Every writer takes the tensors and the config of a speculators draft (`support.read_checkpoint`).
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from lib.checkpoints import Draft
from lib.contract import Contract
from lib.draft import DraftForward
from tests.support import to_midlayer, write_checkpoint

IDS = "eagle_aux_hidden_state_layer_ids"
NOT_EAGLES = ("eagle_config", "norm_before_residual", "norm_output", "fc_norm")
MODELOPT = {
    "use_aux_hidden_state": True,
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
    "next_layer_regular": True,
    "parallel_draft_step": 1,
    "parallel_draft_heads_num_layers": 1,
}


def drop(values: dict, *names: str) -> dict:
    """The same without some keys."""
    return {k: v for k, v in values.items() if k not in names}


def write_eagle(folder: Path, tensors: dict, config: dict, **changes) -> Path:
    """yuhuili/EAGLE3-*: `pytorch_model.bin`, EAGLE's flat config, no embedding, no tap ids."""
    named, flat = to_midlayer(tensors, config)
    flat = drop(flat, *NOT_EAGLES) | {"architectures": ["LlamaForCausalLM"]} | changes
    return write_checkpoint(folder, named, flat, kind="bin")


def write_sglang(folder: Path, tensors: dict, config: dict, *, shards: int = 1, **changes) -> Path:
    """SpecForge `--to sglang`, lmsys, AngelSlim: `midlayer.*`, both maps, nothing named embed."""
    named, flat = to_midlayer(tensors, config)
    extra = {}
    for name in list(named):  # SGLang's own names for further layers
        if name.startswith("layers."):
            number, part = name.removeprefix("layers.").split(".", 1)
            part = part.replace("input_layernorm", "hidden_norm")
            extra[f"additional_layers.{int(number) - 1}.{part}"] = named.pop(name)
    return write_checkpoint(folder, named | extra, flat | changes, shards=shards)


def write_specforge_hf(folder: Path, tensors: dict, config: dict, **changes) -> Path:
    """SpecForge `--to hf`: the same with the embedding."""
    named, flat = to_midlayer(tensors, config)
    named["embed_tokens.weight"] = tensors["embed_tokens.weight"]
    return write_checkpoint(folder, named, flat | changes)


def write_torchspec(folder: Path, tensors: dict, config: dict, **changes) -> Path:
    """TorchSpec `convert_to_hf.py` without pruning: full vocabulary, no maps, embedding kept."""
    named, flat = to_midlayer(drop(tensors, "d2t", "t2d"), config)
    named["embed_tokens.weight"] = tensors["embed_tokens.weight"]
    flat = drop(flat, "eagle_config") | {IDS: config[IDS], "draft_vocab_size": flat["vocab_size"]}
    return write_checkpoint(folder, named, flat | changes)


def write_modelopt(
    folder: Path, tensors: dict, config: dict, *, eagle: dict | None = None, quant: dict | None = None,
    **changes,
) -> Path:  # fmt: skip
    """Model-Optimizer `hf_spec_export.py`: `layers.0.*`, never an embedding, d2t alone, its own flags."""
    _, flat = to_midlayer(tensors, config)
    named = drop(tensors, "t2d", "embed_tokens.weight")
    flat |= {"eagle_config": {IDS: config[IDS], **MODELOPT, **(eagle or {})}} | changes
    if quant is not None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "hf_quant_config.json").write_text(json.dumps(quant))
    return write_checkpoint(folder, named, flat)


def write_automodel(
    folder: Path, tensors: dict, config: dict, *, ids: Tensor | None = None, maps: bool = False, **changes
) -> Path:
    """NeMo Automodel: `model/` with `model.layers.0.*`, and `eagle_meta.pt` beside it.

    Args:
        ids: `selected_token_ids`; the ones of d2t if None.
        maps: whether the weights hold d2t and t2d too, as since PR #2447.
    """
    bare = ("d2t", "t2d", "lm_head.weight")
    kept = tensors if maps else drop(tensors, "d2t", "t2d")
    named = {n if n in bare else f"model.{n}": t for n, t in kept.items()}
    _, flat = to_midlayer(tensors, config)
    flat = drop(flat, "eagle_config") | {"architectures": ["LlamaEagle3DraftModel"], IDS: config[IDS]}
    flat |= {"target_hidden_size": flat["hidden_size"], "num_aux_hidden_states": 3} | changes
    write_checkpoint(folder / "model", named, flat)
    if ids is None:
        ids = tensors["d2t"] + torch.arange(len(tensors["d2t"]))
    mask = torch.zeros(flat["vocab_size"], dtype=torch.bool).index_fill_(0, ids.clamp(0, 96).long(), True)
    meta = {"global_step": 7, "epoch": 1, "selected_token_ids": ids, "selected_token_mask": mask}
    torch.save(meta, folder / "eagle_meta.pt")
    return folder


def weights(draft: Draft) -> dict[str, Tensor]:
    """Every tensor of a loaded draft, by field name."""
    found = {k: v for k, v in vars(draft).items() if isinstance(v, Tensor)}
    for i, layer in enumerate(draft.layers):
        found |= {f"{i}.{k}": v for k, v in vars(layer).items() if isinstance(v, Tensor)}
    return found | {f"fc_norm.{i}": t for i, t in enumerate(draft.fc_norm)}


def assert_same_draft(one: Draft, two: Draft, captures, contract: Contract | None = None) -> None:
    """The same tensors, contract and predictions, bit for bit.

    Args:
        contract: predict under this one, where a format cannot state the first draft's.
    """
    assert weights(one).keys() - {"t2d"} == weights(two).keys() - {"t2d"}
    for name, tensor in weights(two).items():
        assert torch.equal(tensor, weights(one)[name]), name
    if contract is None:
        assert one.contract == two.contract
    drafts = (one, two) if contract is None else (replace(d, contract=contract) for d in (one, two))
    a, b = (DraftForward(d).predict(captures, depths=2, keep_logits=True) for d in drafts)
    assert torch.equal(a.logits, b.logits)
    assert torch.equal(a.target_ids, b.target_ids)
