"""Writers, tiny models and a browser for tests. Formats follow their own documentation, not our readers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

VOCAB, DRAFT_VOCAB, HIDDEN, SLOTS = 97, 40, 32, 3

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
CHROMEDRIVER = shutil.which("chromedriver")
needs_chromium = pytest.mark.skipif(
    not (CHROMIUM and CHROMEDRIVER),
    reason="no Chromium: `apt-get install chromium chromium-driver`, then run again",
)


def speculators_draft(
    *,
    arch: str = "llama",
    layers: int = 1,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    rope: dict | None = None,
    hidden: int = HIDDEN,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 8,
    slots: int = SLOTS,
    **flags,
):
    """A random draft of speculators' real class, small enough to read; every weight non-trivial."""
    from speculators.config import SpeculatorsConfig, VerifierConfig
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig
    from transformers import LlamaConfig, Qwen3Config

    layer = {"llama": LlamaConfig, "qwen3": Qwen3Config}[arch](
        vocab_size=VOCAB,
        hidden_size=hidden,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=1e-5,
        rope_parameters=rope or {"rope_type": "default", "rope_theta": 10000.0},
        pad_token_id=None,
    )
    layer._attn_implementation = "eager"
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=layer,
        draft_vocab_size=DRAFT_VOCAB,
        eagle_aux_hidden_state_layer_ids=[0, 3, 4, 5, 7][:slots],
        speculators_config=SpeculatorsConfig(
            algorithm="eagle3",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=3)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=None, architectures=[]),
        ),
        **flags,
    )
    model = Eagle3DraftModel(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            # Norm weights near one, the rest wide enough that every path changes the argmax.
            parameter.copy_(1 + 0.3 * noise if parameter.ndim == 1 else 0.25 * noise)
    kept = torch.randperm(VOCAB, generator=generator)[:DRAFT_VOCAB].sort().values
    t2d = torch.zeros(VOCAB, dtype=torch.bool)
    t2d[kept] = True
    model.load_vocab_mappings(t2d, kept - torch.arange(DRAFT_VOCAB))
    return model.to(dtype).eval()


def draft_and_head(folder: Path, rng: torch.Generator):
    """speculators' model, the draft read from its files, and a random target head that the model shares."""
    from lib.checkpoints import load_draft
    from lib.target_head import TargetHead

    model = speculators_draft()
    model.save_pretrained(folder / "draft")
    draft = load_draft(folder / "draft")
    lm_head = torch.randn(VOCAB, HIDDEN, generator=rng)
    norm = 1 + 0.1 * torch.randn(HIDDEN, generator=rng)
    head = TargetHead(Path("toy"), lm_head, norm, lm_head, draft.eps, 6)
    with torch.no_grad():
        model.verifier_norm.weight.copy_(norm)
        model.verifier_lm_head.weight.copy_(lm_head[draft.to_target(torch.arange(DRAFT_VOCAB))])
    return model, draft, head


def random_capture_tensors(length: int, generator: torch.Generator, states: int = 4) -> dict:
    """Token ids, loss mask and states of one made-up conversation, scales as uneven as real ones."""
    scales = torch.tensor([1.0, 30.0, 60.0, 200.0, 250.0])[:states]
    hidden = torch.randn(states, length, HIDDEN, generator=generator) * scales[:, None, None]
    mask = torch.zeros(length)
    mask[length // 3 :] = 1
    return {
        "input_ids": torch.randint(0, VOCAB, (length,), generator=generator),
        "loss_mask": mask,
        "hidden_states": list(hidden),
    }


def write_legacy(path: Path, tensors: dict) -> Path:
    """speculators' legacy `data_N.pt`: a dict with a list of states."""
    torch.save(tensors, path)
    return path


def speculators_logits(model, tensors: dict, slots: list[int], depths: int) -> Tensor:
    """(L - 1, depths, Vd) logits of speculators' own forward on one conversation.

    Its `shift_batch` makes the pairs; a hook on lm_head sees the logits, which it does not return.
    """
    from speculators.models.eagle3.data import shift_batch

    dtype = model.fc.weight.dtype
    length = len(tensors["input_ids"])
    batch = shift_batch(
        {
            "input_ids": tensors["input_ids"],
            "hidden_states": torch.cat([tensors["hidden_states"][i] for i in slots], -1).to(dtype),
            "verifier_last_hidden_states": tensors["hidden_states"][-1].to(dtype),
            "loss_mask": tensors["loss_mask"],
            "lengths": torch.tensor([length]),
            "position_ids": torch.arange(length),
        }
    )
    seen: list[Tensor] = []
    handle = model.lm_head.register_forward_hook(lambda _m, _i, out: seen.append(out[0]))
    try:
        with torch.no_grad():
            model(
                hidden_states=batch["hidden_states"][None],
                input_ids=batch["input_ids"][None],
                document_ids=torch.zeros(1, length - 1, dtype=torch.long),
                position_ids=batch["position_ids"][None],
                ttt_steps=depths,
            )
    finally:
        handle.remove()
    return torch.stack(seen, 1)


def read_checkpoint(folder: Path) -> tuple[dict, dict]:
    """Tensors and config of a saved draft, as plain dicts to rename, break and write elsewhere."""
    return load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())


def to_midlayer(tensors: dict, config: dict) -> tuple[dict, dict]:
    """The SGLang / SpecForge / EAGLE form of a speculators draft (formats A.2).

    Prefix `midlayer.`, no embedding, a flat Llama config, tap ids nested in `eagle_config`.
    """
    named = {n.replace("layers.0.", "midlayer."): t for n, t in tensors.items() if "embed" not in n}
    layer = config["transformer_layer_config"]
    flat = {k: v for k, v in layer.items() if k != "rope_parameters"} | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": config["draft_vocab_size"],
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": config["eagle_aux_hidden_state_layer_ids"],
            "use_aux_hidden_state": True,
        },
        "rope_theta": layer["rope_parameters"]["rope_theta"],
    }
    return named, flat


def write_checkpoint(
    folder: Path, tensors: dict, config: dict | None, *, kind: str = "safetensors", shards: int = 1
) -> Path:
    """`config.json` and weights as Hugging Face lays them out: one file, or shards with an index."""
    folder.mkdir(parents=True, exist_ok=True)
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    stem = {"safetensors": "model", "bin": "pytorch_model"}[kind]
    write = {"safetensors": save_file, "bin": torch.save}[kind]
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    if shards == 1:
        write(tensors, folder / f"{stem}.{kind}")
        return folder
    weight_map = {}
    for i in range(shards):
        part = {name: tensors[name] for name in sorted(tensors)[i::shards]}
        shard = f"{stem}-{i + 1:05}-of-{shards:05}.{kind}"
        write(part, folder / shard)
        weight_map |= dict.fromkeys(part, shard)
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (folder / f"{stem}.{kind}.index.json").write_text(json.dumps(index))
    return folder


def tiny_llama(*, layers: int = 6, tied: bool = False, embed: Tensor | None = None, seed: int = 1):
    """A random transformers Llama as target, final norm far from one; `embed` sets its table."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        rms_norm_eps=1e-5,
        tie_word_embeddings=tied,
        pad_token_id=None,
    )
    model = LlamaForCausalLM(config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.3 * noise if parameter.ndim == 1 else 0.25 * noise)
        if embed is not None:
            model.model.embed_tokens.weight.copy_(embed)
    return model


def self_written(folder: Path, taps, contract: dict, *, length: int, texts: int):
    """A tiny draft, and captures whose text it wrote itself under a contract: there it is always right."""
    from dataclasses import replace

    from lib.captures import open_capture
    from lib.checkpoints import load_draft
    from lib.draft import DraftForward

    rng = torch.Generator().manual_seed(9)
    speculators_draft().save_pretrained(folder / "draft")
    draft = load_draft(folder / "draft")
    draft = replace(draft, contract=draft.contract.change(**contract))
    files = [write_legacy(folder / f"data_{i}.pt", random_capture_tensors(length, rng)) for i in range(texts)]
    captures = [open_capture(f, taps=taps) for f in files]
    forward = DraftForward(draft)
    for t in range(length - 2):  # pair t writes token t + 2
        p = forward.predict(captures, positions="all")
        for i, token in enumerate(p.target_ids[p.position == t, 0]):
            captures[i].token_ids[t + 2] = token
    return draft, captures


def write_stack(path: Path, tensors: dict) -> Path:
    """speculators' / vLLM's `hs_N.safetensors`: all states in one [L, k, H] tensor, no loss mask."""
    stack = torch.stack(tensors["hidden_states"], 1).contiguous()  # (L, k, H)
    save_file({"hidden_states": stack, "token_ids": tensors["input_ids"]}, path)
    return path


@contextmanager
def chromium(folder: Path, width: int, height: int, **capabilities) -> Iterator:
    """A headless Chromium that keeps its profile and log in `folder`, as a selenium driver."""
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in (
        *("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
        *("--disable-quic", "--no-first-run", "--disable-background-networking"),
        *("--disable-component-update", "--disable-sync", "--no-proxy-server"),
        *(f"--user-data-dir={folder / 'chromium'}", f"--window-size={width},{height}"),
    ):
        options.add_argument(flag)
    for name, value in capabilities.items():
        options.set_capability(f"goog:{name}", value)
    # The driver is named, so that selenium does not look for one to download.
    service = webdriver.ChromeService(CHROMEDRIVER, log_output=str(folder / "chromedriver.log"))
    driver = webdriver.Chrome(options=options, service=service)
    try:
        yield driver
    finally:
        driver.quit()
