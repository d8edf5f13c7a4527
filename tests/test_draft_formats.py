"""Drafts of every framework: recognised with evidence, read without change, refused by name."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from lib.captures import open_capture
from lib.checkpoints import load_draft
from lib.draft import DraftForward
from lib.draft_formats import DRAFT_FORMATS, recognise
from lib.errors import CheckpointError, ContractError
from lib.taps import Normed, Tap
from lib.target_head import load_target_head
from tests.draft_writers import (
    IDS,
    assert_same_draft,
    drop,
    write_automodel,
    write_eagle,
    write_modelopt,
    write_sglang,
    write_specforge_hf,
    write_torchspec,
)
from tests.support import (
    DRAFT_VOCAB,
    HIDDEN,
    SLOTS,
    VOCAB,
    random_capture_tensors,
    read_checkpoint,
    speculators_draft,
    speculators_logits,
    tiny_llama,
    to_midlayer,
    write_checkpoint,
    write_legacy,
)

pytestmark = pytest.mark.speculators  # the native checkpoint is saved by the trainer's own class
TAPS = ("embed", "layer3", "layer4", "layer6")
KV_A = "midlayer.self_attn.kv_a_proj_with_mqa.weight"


def saved(root: Path, **options) -> tuple[dict, dict]:
    """Tensors and config of a draft as speculators saves it."""
    speculators_draft(**options).save_pretrained(root)
    return read_checkpoint(root)


@pytest.fixture(scope="module")
def native(tmp_path_factory):
    """A draft as speculators saves it, its target (same embeddings), and captures to predict on."""
    root = tmp_path_factory.mktemp("native")
    tensors, config = saved(root / "draft")
    tiny_llama(layers=6, embed=tensors["embed_tokens.weight"]).save_pretrained(root / "target")
    rng = torch.Generator().manual_seed(7)
    files = [write_legacy(root / f"data_{n}.pt", random_capture_tensors(n, rng)) for n in (7, 20)]
    full = tensors | {"lm_head.weight": torch.randn(VOCAB, HIDDEN, generator=rng)}
    return SimpleNamespace(
        root=root,
        draft=load_draft(root / "draft"),
        target=load_target_head(root / "target"),
        tensors=tensors,
        full=full,
        config=config,
        captures=[open_capture(f, taps=TAPS) for f in files],
    )


# ---- one draft in every format ----------------------------------------------------------------

WRITERS: dict[str, tuple[Callable, str]] = {
    "eagle": (write_eagle, "eagle"),
    "eagle, class renamed for SGLang": (
        lambda *a: write_eagle(*a, architectures=["LlamaForCausalLMEagle3"]),
        "eagle or specforge",
    ),
    "specforge --to sglang": (write_sglang, "specforge"),
    "specforge --to sglang, sharded": (lambda *a: write_sglang(*a, shards=3), "specforge"),
    "specforge --to hf": (write_specforge_hf, "specforge or torchspec"),
    "modelopt": (write_modelopt, "modelopt"),
    "automodel": (write_automodel, "automodel"),
    "automodel, maps in the weights": (lambda *a: write_automodel(*a, maps=True), "automodel"),
}


@pytest.mark.parametrize("name", WRITERS)
def test_every_format_is_the_same_draft(native, tmp_path, name):
    """Other names, nestings, containers and side files: the same bits and predictions."""
    write, formats = WRITERS[name]
    path = write(tmp_path / "d", native.tensors, native.config)
    assert " or ".join(m.format for m in recognise(path)) == formats
    draft = load_draft(path, target=native.target)
    assert draft.format == formats
    assert all(f"format {m}" in draft.notes for m in recognise(path))
    assert set(draft.keys.values()) == {"used"}
    # EAGLE's config has no ids: the default triple stands in, said with its source.
    states = native.draft.contract if name.startswith("eagle") else None
    assert_same_draft(native.draft, draft, native.captures, states)
    if states:
        assert draft.contract.taps == (Tap(2), Tap(3), Tap(3))
        assert draft.contract.source("taps").origin == "framework default"


def test_torchspec_keeps_everything_and_needs_no_map(native, tmp_path):
    """Full vocabulary, own embedding, no maps, no target: the identity."""
    whole = drop(native.full, "d2t", "t2d")
    nested = native.config | {"draft_vocab_size": VOCAB}
    one = load_draft(write_checkpoint(tmp_path / "speculators", whole, nested))
    two = load_draft(write_torchspec(tmp_path / "torchspec", native.full, native.config))
    assert (one.format, two.format) == ("speculators", "torchspec")
    assert one.contract.vocab_map == "identity"
    assert_same_draft(one, two, native.captures)


@pytest.mark.parametrize("prefix", ["", "model."])
def test_additional_layers_are_further_layers(native, tmp_path, prefix):
    """additional_layers.0 is the second layer, its hidden_norm an input_layernorm; the residual is noted."""
    tensors, config = saved(tmp_path / "two", layers=2)
    one = load_draft(tmp_path / "two")
    write_sglang(tmp_path / "d", tensors, config)
    named, flat = read_checkpoint(tmp_path / "d")
    named = {prefix + n if n.startswith("additional_layers") else n: t for n, t in named.items()}
    two = load_draft(write_checkpoint(tmp_path / "d", named, flat), target=native.target)
    assert f"{prefix}additional_layers.0.hidden_norm.weight" in two.keys
    assert_same_draft(one, two, native.captures)
    assert any("additional_layers" in n and "fresh one" in n for n in two.notes)


@pytest.mark.parametrize("name, kind", [("model.safetensors", "safetensors"), ("pytorch_model.bin", "bin")])
def test_a_weights_file_with_its_config_beside(native, tmp_path, name, kind):
    """The file stands for its folder."""
    named, flat = to_midlayer(native.tensors, native.config)
    folder = write_checkpoint(tmp_path / "d", named, flat, kind=kind)
    assert [str(m) for m in recognise(folder / name)] == [str(m) for m in recognise(folder)]
    assert_same_draft(native.draft, load_draft(folder / name, target=native.target), native.captures)


def test_shards_without_their_index(native, tmp_path):
    """A whole set needs no index; the names are in the shards."""
    folder = write_checkpoint(tmp_path, native.tensors, native.config, shards=3)
    (folder / "model.safetensors.index.json").unlink()
    assert_same_draft(native.draft, load_draft(folder), native.captures)


# ---- recognition ------------------------------------------------------------------------------


def test_recognition_reads_no_weights(native, tmp_path):
    """The header is enough: the data may be garbage; every answer is a known format with evidence."""
    for name, (write, formats) in WRITERS.items():
        path = write(tmp_path / name, native.tensors, native.config)
        file = next((p for p in path.rglob("model.safetensors")), None)
        if file is not None:
            content = bytearray(file.read_bytes())
            start = 8 + int.from_bytes(content[:8], "little")
            content[start:] = b"\xff" * (len(content) - start)
            file.write_bytes(bytes(content))
        found = recognise(path)
        assert " or ".join(m.format for m in found) == formats
        assert all(m.format in DRAFT_FORMATS and m.evidence for m in found)


def test_what_is_no_draft_is_not_recognised(native, tmp_path):
    """A target, a folder of captures, an empty folder and a missing one: no answer, no error."""
    (tmp_path / "empty").mkdir()
    for path in (native.root / "target", native.root, tmp_path / "empty", tmp_path / "missing"):
        assert recognise(path) == []


def test_the_speculators_format_is_certain(native):
    """One answer, and nothing to note."""
    assert [str(m) for m in recognise(native.root / "draft")] == [
        "speculators: config.json has speculators_model_type"
    ]
    assert (native.draft.format, native.draft.notes) == ("speculators", ())


def test_an_unknown_layout_is_read_and_said_to_be_unknown(native, tmp_path):
    """layers.0.* with a flat config, an embedding and no framework's mark."""
    _, flat = to_midlayer(native.tensors, native.config)
    folder = write_checkpoint(tmp_path, native.tensors, flat)
    assert recognise(folder) == []
    draft = load_draft(folder)
    assert draft.format == "unrecognised"
    assert "format not recognised: read by tensor names" in draft.notes
    assert_same_draft(native.draft, draft, native.captures)


# ---- what a file leaves open ------------------------------------------------------------------


@pytest.mark.parametrize(
    "write, value, head_norm, feedback, noted",
    [
        (write_sglang, True, True, "pre_norm", True),  # SpecForge's default: plain EAGLE-3
        (write_sglang, False, False, "pre_norm", True),  # SpecForge's: lm_head sees h itself
        (write_specforge_hf, True, True, "post_norm", True),  # TorchSpec's too: the engines' reading
        (write_specforge_hf, False, True, "pre_norm", True),
        (write_automodel, True, True, "post_norm", False),
        (write_modelopt, True, True, "post_norm", False),
    ],
)
def test_norm_output_means_what_its_format_means(native, tmp_path, write, value, head_norm, feedback, noted):
    """Fault 17: one key, two meanings; where the file could be either's, both are in the notes."""
    folder = write(tmp_path, native.tensors, native.config, norm_output=value)
    draft = load_draft(folder, target=native.target)
    assert (draft.contract.head_norm, draft.contract.feedback) == (head_norm, feedback)
    said = [n for n in draft.notes if n.startswith(f"norm_output={value} is read as")]
    assert len(said) == noted
    assert not noted or ("SpecForge up to 0.2.0: lm_head sees" in said[0] and "vLLM, SGLang" in said[0])


def test_other_readings_of_the_ids_are_noted(native, tmp_path):
    """The flat file does not say whose ids they are; speculators' does."""
    readings = (("vllm", (0, 3, 4), "layer1, layer4, layer5"), ("sglang", (1, 4, 5), "embed, layer3"))
    for convention, taps, other in readings:
        folder = write_sglang(tmp_path / convention, native.tensors, native.config)
        draft = load_draft(folder, target=native.target, convention=convention)
        assert draft.contract.taps == tuple(map(Tap, taps))
        assert any(f"{IDS} [0, 3, 4] could also mean {other}" in n for n in draft.notes)


def test_ids_at_both_places_that_disagree_are_noted(native, tmp_path):
    """vLLM reads the top level, SpecForge eagle_config."""
    folder = write_sglang(tmp_path, native.tensors, native.config, **{IDS: [1, 2, 3]})
    draft = load_draft(folder, target=native.target)
    assert draft.contract.taps == (Tap(1), Tap(2), Tap(3))
    assert f"{IDS} [1, 2, 3] at the top and [0, 3, 4] under eagle_config: the former is used" in draft.notes


@pytest.mark.parametrize(
    "changes, note",
    [
        ({"bias": True}, "bias is true and the file has no fc.bias"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings is true, and lm_head is in the file"),
        ({"num_hidden_layers": 32}, "num_hidden_layers 32 in config.json, 1 layers in the file"),
        ({"eagle_config": {IDS: []}}, f"{IDS} is empty: the default triple"),
        ({"layer_types": ["sliding_attention"]}, "computed as full attention"),
    ],
)
def test_config_keys_that_engines_read_otherwise_are_noted(native, tmp_path, changes, note):
    """Nothing about the numbers changes; somebody else's numbers may."""
    folder = write_sglang(tmp_path, native.tensors, native.config, **changes)
    draft = load_draft(folder, target=native.target)
    assert any(note in n for n in draft.notes), draft.notes
    assert_same_draft(native.draft, draft, native.captures, native.draft.contract)


def test_a_bias_of_fc_is_used(native, tmp_path):
    """SGLang and vLLM: config `bias`."""
    tensors = native.tensors | {"fc.bias": torch.ones(HIDDEN)}
    draft = load_draft(write_sglang(tmp_path, tensors, native.config, bias=True), target=native.target)
    assert torch.equal(draft.fc_bias, torch.ones(HIDDEN))
    assert not any("bias" in n for n in draft.notes)


def test_a_zero_map_of_a_smaller_vocabulary_is_noted(native, tmp_path):
    """SpecForge's class default until a mapping is loaded (fault 21)."""
    tensors = native.tensors | {"d2t": torch.zeros(DRAFT_VOCAB, dtype=torch.int64)}
    draft = load_draft(write_modelopt(tmp_path, tensors, native.config), target=native.target)
    assert f"d2t is all zeros: draft ids are target ids 0..{DRAFT_VOCAB - 1} (fault 21)" in draft.notes


# ---- Model-Optimizer --------------------------------------------------------------------------


@pytest.mark.parametrize("norm", ["hidden_norm kept", "hidden_norm absent"])
def test_a_draft_on_the_final_state_alone(native, tmp_path, norm):
    """No fc; its one input is a state that no capture has under a block's name."""
    gone = ["fc.weight", *(["layers.0.hidden_norm.weight"] if norm.endswith("absent") else [])]
    folder = write_modelopt(
        tmp_path, drop(native.tensors, *gone), native.config, eagle={"use_aux_hidden_state": False, IDS: []}
    )
    assert [m.format for m in recognise(folder)] == ["modelopt"]
    draft = load_draft(folder, target=native.target)
    assert draft.fc is None and draft.contract.use_fc is False
    assert draft.contract.taps == (Normed(),) and draft.n_slots == 1
    assert (draft.layers[0].hidden_norm is None) == norm.endswith("absent")
    assert any('tap "normed"' in n for n in draft.notes)


def test_the_final_state_is_fed_under_its_own_name(native, tmp_path):
    """The same numbers as an `fc` that is the identity on that one state."""
    eye = native.tensors | {"fc.weight": torch.eye(HIDDEN)}
    with_fc = write_modelopt(tmp_path / "fc", eye, native.config, eagle={IDS: [3]})
    without = write_modelopt(
        tmp_path / "none", drop(eye, "fc.weight"), native.config, eagle={"use_aux_hidden_state": False}
    )
    captures = [c.named(("embed", "layer3", "layer4", "normed")) for c in native.captures]
    one, two = (load_draft(path, target=native.target) for path in (with_fc, without))
    contract = one.contract.change(taps=("normed",))
    a = DraftForward(one).predict(captures, contract, depths=3, keep_logits=True)
    b = DraftForward(two).predict(captures, depths=3, keep_logits=True)
    assert torch.equal(a.logits, b.logits)
    with pytest.raises(ContractError, match="tap normed"):
        DraftForward(two).predict(native.captures)


def test_fc_in_the_file_of_a_draft_that_does_not_use_it(native, tmp_path):
    """vLLM skips it; so do we, with a line in the account."""
    folder = write_modelopt(tmp_path, native.tensors, native.config, eagle={"use_aux_hidden_state": False})
    draft = load_draft(folder, target=native.target)
    assert draft.fc is None
    assert draft.keys["fc.weight"] == "ignored: use_aux_hidden_state is false, engines skip it"


def test_a_draft_without_a_last_norm(native, tmp_path):
    """`use_last_layernorm: false`: lm_head sees h, so the norm's place-holder must not matter."""
    tensors = drop(native.tensors, "norm.weight")
    folder = write_modelopt(tmp_path, tensors, native.config, eagle={"use_last_layernorm": False})
    draft = load_draft(folder, target=native.target)
    assert draft.contract.head_norm is False
    contract = native.draft.contract.change(head_norm=False)
    a, b = (
        DraftForward(d).predict(native.captures, contract, depths=2, keep_logits=True)
        for d in (native.draft, draft)
    )
    assert torch.equal(a.logits, b.logits)


# ---- latent attention, dtypes -----------------------------------------------------------------


def latent_tensors(native, nope=4, rotary=4, value=6, rank=5, heads=4) -> tuple[dict, dict]:
    """The native draft with DeepSeek's attention in place of its own, and the config keys for it."""
    rng = torch.Generator().manual_seed(3)
    shapes = {
        "kv_a_proj_with_mqa": (rank + rotary, 2 * HIDDEN),
        "kv_a_layernorm": (rank,),
        "kv_b_proj": (heads * (nope + value), rank),
        "q_proj": (heads * (nope + rotary), 2 * HIDDEN),
        "o_proj": (HIDDEN, heads * value),
    }
    kept = {n: t for n, t in native.full.items() if ".self_attn." not in n}
    new = {f"layers.0.self_attn.{n}.weight": torch.randn(s, generator=rng) for n, s in shapes.items()}
    keys = {"qk_nope_head_dim": nope, "qk_rope_head_dim": rotary, "v_head_dim": value, "kv_lora_rank": rank}
    return kept | new, keys | {"q_lora_rank": None, "architectures": ["Eagle3DeepseekV2ForCausalLM"]}


def test_latent_attention_is_read(native, tmp_path):
    """`lightseekorg/kimi-*-eagle3-mla`: q, k and v make place for `Layer.latent`; rotary pairs interleave."""
    tensors, keys = latent_tensors(native)
    draft = load_draft(write_torchspec(tmp_path, tensors, native.config, **keys))
    layer = draft.layers[0]
    assert (layer.q, layer.k, layer.v) == (None, None, None)
    assert torch.equal(layer.latent.kv_b, tensors["layers.0.self_attn.kv_b_proj.weight"])
    assert draft.format == "torchspec" and draft.contract.rope.interleaved
    assert any("rope_interleave not in config.json" in n for n in draft.notes)
    assert set(draft.keys.values()) == {"used"}


def mapped_file(tensor: Tensor) -> str | None:
    """The file that the kernel maps at a tensor's address; None for ordinary memory."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, *_, last = line.split()
        low, high = (int(x, 16) for x in span.split("-"))
        if low <= tensor.data_ptr() < high:
            return last if last.startswith("/") else None
    return None


def test_the_stored_dtype_is_kept_without_a_copy(native, tmp_path):
    """bf16 stays bf16 and on disk: a Kimi-sized draft opens in the time its checks take."""
    half = {n: t.bfloat16() if t.is_floating_point() else t for n, t in native.tensors.items()}
    folder = write_checkpoint(tmp_path / "d", half, native.config)
    draft = load_draft(folder, dtype=None)
    parts = (draft.fc, draft.norm, draft.lm_head, draft.embed, draft.layers[0].q)
    assert {t.dtype for t in parts} == {torch.bfloat16}
    assert torch.equal(draft.fc, half["fc.weight"])
    assert {mapped_file(t) for t in parts} == {str(folder / "model.safetensors")}
    assert mapped_file(load_draft(folder).fc) is None, "the default dtype is a copy, so the check can fail"
    assert not any("converted" in n for n in draft.notes)


def test_a_stored_dtype_that_is_not_one_is_made_one_and_said(native, tmp_path):
    """Norms in fp32, the rest in bf16: the forward needs one dtype."""
    mixed = native.tensors | {"fc.weight": native.tensors["fc.weight"].bfloat16()}
    draft = load_draft(write_checkpoint(tmp_path, mixed, native.config), dtype=None)
    assert draft.fc.dtype == draft.norm.dtype == torch.float32
    assert "stored in another dtype than torch.float32, converted: ['fc']" in draft.notes


# ---- the frameworks' own code -----------------------------------------------------------------


def random_weights(model: torch.nn.Module, seed: int = 0) -> None:
    """Norms near one, the rest wide enough that every path changes the argmax."""
    rng = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=rng)
            parameter.copy_(1 + 0.3 * noise if parameter.ndim == 1 else 0.25 * noise)


def flat_config(**changes) -> dict:
    """A small flat config as SpecForge's configs/*.json and Automodel's recipe have them."""
    return {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_act": "silu",
        "hidden_size": HIDDEN, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2,
        "num_hidden_layers": 1, "rms_norm_eps": 1e-5, "vocab_size": VOCAB, "draft_vocab_size": DRAFT_VOCAB,
        "max_position_embeddings": 512, "tie_word_embeddings": False, "pad_token_id": 0,
    } | changes  # fmt: skip


def vocab_mapping() -> tuple[Tensor, Tensor]:
    """d2t as offsets and t2d."""
    kept = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(1))[:DRAFT_VOCAB].sort().values
    return kept - torch.arange(DRAFT_VOCAB), torch.zeros(VOCAB, dtype=torch.bool).index_fill_(0, kept, True)


def assert_their_logits(theirs: Tensor, folder: Path, target, depths: int, captures, **changes) -> None:
    """Our forward under the contract that the file declares gives the framework's logits (L - 1, D, Vd)."""
    draft = load_draft(folder, target=target)
    contract = draft.contract.change(taps=TAPS[:3], **changes)
    ours = DraftForward(draft).predict(captures, contract, depths=depths, positions="all", keep_logits=True)
    assert ours.logits.shape == theirs.shape
    assert (ours.logits - theirs).abs().max() < 1e-4 * theirs.abs().max()


def pairs(tensors: dict) -> tuple[Tensor, Tensor]:
    """States (1, L - 1, 3 Ht) and the next tokens (1, L - 1): the pairing all trainers agree on."""
    states = torch.cat(tensors["hidden_states"][:SLOTS], -1)[None, :-1]
    return states, tensors["input_ids"][None, 1:]


@pytest.mark.parametrize("flags", [{}, {"fc_norm": True}, {"norm_output": True}, {"norm_output": False}])
@pytest.mark.parametrize("to", ["sglang", "hf"])
def test_logits_equal_specforge(native, tmp_path, flags, to):
    """SpecForge 0.2.0's draft class, exported by its own exporters, three depths of its own recurrence."""
    pytest.importorskip("specforge.modeling.draft.llama3_eagle")
    from specforge.export import export_to_hf, export_to_sglang
    from specforge.modeling.draft.llama3_eagle import LlamaForCausalLMEagle3
    from transformers import LlamaConfig

    depths, file = 3, tmp_path / "draft.json"
    file.write_text(json.dumps(flat_config(**flags)))
    model = LlamaForCausalLMEagle3(LlamaConfig(**drop(flat_config(**flags), "model_type")))
    random_weights(model)
    model.d2t, model.t2d = vocab_mapping()
    with torch.no_grad():
        for parameter in model.parameters():  # its exporter writes bf16; its rotary tables stay fp32
            parameter.copy_(parameter.bfloat16())
    state = {n: t for n, t in model.state_dict().items() if to == "hf" or "embed" not in n}
    torch.save({"draft_state_dict": state, "strategy": "eagle3"}, tmp_path / "training_state.pt")
    export = {"sglang": export_to_sglang, "hf": export_to_hf}[to]
    export(str(tmp_path / "training_state.pt"), str(file), str(tmp_path / "out"))
    rng = torch.Generator().manual_seed(5)
    tensors = random_capture_tensors(20, rng)
    capture = open_capture(write_legacy(tmp_path / "data_0.pt", tensors), taps=TAPS)
    states, ids = pairs(tensors)
    n, logits, cache = ids.shape[1], [], [[], []]
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        hidden = model.project_hidden_states(states)
        mask = model.prepare_decoder_attention_mask(torch.ones(1, n, dtype=torch.bool), hidden, 1, n, 0)
        for _ in range(depths):
            hidden = model.backbone(model.embed_input_ids(ids), hidden, cache, mask, torch.arange(n)[None])
            logits.append(model.compute_logits(hidden)[0])
            ids = torch.nn.functional.pad(ids[:, 1:], (0, 1))
    theirs = torch.stack(logits, 1)
    table = model.embed_tokens.weight.detach()
    target = replace(native.target, embed=table)
    changes = {}
    if flags.get("norm_output") is not None and to == "hf":
        # With the embedding kept TorchSpec could have written it: SpecForge's reading is in the note alone.
        draft = load_draft(tmp_path / "out", target=target)
        assert any("SpecForge up to 0.2.0" in note for note in draft.notes)
        changes = {"head_norm": flags["norm_output"], "feedback": "pre_norm"}
    assert_their_logits(theirs, tmp_path / "out", target, depths, [capture], **changes)


@pytest.mark.parametrize("flags", [{}, {"fc_norm": True, "norm_output": True}, {"attention_bias": True}])
def test_logits_equal_automodel(native, tmp_path, flags):
    """NeMo Automodel's draft class, saved by itself, three depths of its own recurrence."""
    module = pytest.importorskip("nemo_automodel.components.speculative.eagle.draft_llama")
    from transformers import LlamaConfig

    depths = 3
    keys = {"target_hidden_size": HIDDEN, "num_aux_hidden_states": SLOTS, **flags}
    config = LlamaConfig(**drop(flat_config(**keys), "model_type"))
    model = module.LlamaEagle3DraftModel(config)
    random_weights(model)
    d2t, _ = vocab_mapping()
    model.set_vocab_mapping(d2t + torch.arange(DRAFT_VOCAB))
    model.save_pretrained(tmp_path / "out" / "model")
    torch.save({"selected_token_ids": d2t + torch.arange(DRAFT_VOCAB)}, tmp_path / "out" / "eagle_meta.pt")
    tensors = random_capture_tensors(20, torch.Generator().manual_seed(5))
    capture = open_capture(write_legacy(tmp_path / "data_0.pt", tensors), taps=TAPS)
    states, ids = pairs(tensors)
    logits, cache = [], [[], []]
    with torch.no_grad():
        hidden = model.project_hidden_states(states)
        for _ in range(depths):
            hidden = model(ids, hidden, torch.ones_like(ids), cache_hidden=cache)
            logits.append(model.compute_logits(hidden)[0])
            ids = torch.nn.functional.pad(ids[:, 1:], (0, 1))
    theirs = torch.stack(logits, 1)
    assert [m.format for m in recognise(tmp_path / "out")] == ["automodel"]
    assert_their_logits(theirs, tmp_path / "out", native.target, depths, [capture])


@pytest.mark.parametrize("flags", [{"norm_before_fc": True}, {"fc_norm": True}, {"norm_output": True}])
@pytest.mark.parametrize("arch", ["llama", "qwen3"])
def test_two_layers_with_each_norm_equal_speculators(tmp_path, rng, arch, flags):
    """What tests/test_parity.py has for one layer."""
    model = speculators_draft(arch=arch, layers=2, **flags)
    model.save_pretrained(tmp_path / "draft")
    tensors = random_capture_tensors(20, rng)
    capture = open_capture(write_legacy(tmp_path / "data_0.pt", tensors), taps=TAPS)
    theirs = speculators_logits(model, tensors, [0, 1, 2], 3)
    assert_their_logits(theirs, tmp_path / "draft", None, 3, [capture])


# ---- refusals ---------------------------------------------------------------------------------


@dataclass
class Case:
    """What is written, and what the error must say: regular expressions for its five parts."""

    name: str
    write: Callable  # (native, folder) -> path
    where: str
    field: str
    expected: str
    found: str
    remedy: str


def eagle_flag(**flags):
    return lambda n, f: write_modelopt(f, n.tensors, n.config, eagle=flags)


def config_key(**keys):
    return lambda n, f: write_sglang(f, n.tensors, n.config, **keys)


def extra(**tensors):
    named = {k.replace("__", "."): v for k, v in tensors.items()}
    return lambda n, f: write_modelopt(f, n.tensors | named, n.config)


def meta(change: Callable[[dict], object], **options):
    def write(native, folder):
        write_automodel(folder, native.tensors, native.config, **options)
        data = torch.load(folder / "eagle_meta.pt")
        torch.save(change(data), folder / "eagle_meta.pt")
        return folder

    return write


def meta_ids(change: Callable[[Tensor], Tensor], **options):
    key = "selected_token_ids"
    return meta(lambda data: data | {key: change(data[key])}, **options)


def latent(**changes):
    def write(native, folder):
        tensors, keys = latent_tensors(native)
        tensors = {k: v for k, v in (tensors | changes.get("tensors", {})).items() if v is not None}
        return write_torchspec(folder, tensors, native.config, **(keys | changes.get("config", {})))

    return write


def narrow(native, folder):
    changes = {f"layers.0.self_attn.{p}_proj.weight": native.tensors[f"layers.0.self_attn.{p}_proj.weight"]
               [:, :HIDDEN].contiguous() for p in "qkv"}  # fmt: skip
    tensors = drop(native.tensors, "fc.weight") | changes
    return write_modelopt(folder, tensors, native.config, eagle={"use_aux_hidden_state": False})


def gap(native, folder):
    named, flat = to_midlayer(native.tensors, native.config)
    return write_checkpoint(
        folder, named | {"additional_layers.1.hidden_norm.weight": torch.ones(HIDDEN)}, flat
    )


def lost_shard(native, folder):
    write_checkpoint(folder, native.tensors, native.config, shards=3)
    (folder / "model.safetensors.index.json").unlink()
    (folder / "model-00002-of-00003.safetensors").unlink()
    return folder


def doubled_shard(native, folder):
    write_checkpoint(folder, native.tensors, native.config, shards=2)
    (folder / "model.safetensors.index.json").unlink()
    shard = folder / "model-00002-of-00002.safetensors"
    shard.write_bytes((folder / "model-00001-of-00002.safetensors").read_bytes())
    return folder


CONFIG = r"config\.json"
CASES = [
    Case("MTP norms declared", eagle_flag(use_mtp_layernorm=True),
         CONFIG, "use_mtp_layernorm", "False", "True: norms of both inputs", "trained it"),
    Case("every layer takes the token", eagle_flag(next_layer_regular=False),
         CONFIG, "next_layer_regular", "True", "False: token embeddings", "trained it"),
    Case("latent attention without rotary", latent(config={"mla_use_nope": True}),
         CONFIG, "mla_use_nope", "False", "True: latent attention without rotary", "trained it"),
    Case("Medusa heads declared", eagle_flag(parallel_draft_step=4),
         CONFIG, "parallel_draft_step", "1", "4: Medusa", "trained it"),
    Case("last norm in the file, config says none", eagle_flag(use_last_layernorm=False),
         "d", "use_last_layernorm", "no norm.weight", "norm.weight", "engines would apply it"),
    Case("flag in quotes", eagle_flag(use_aux_hidden_state="false"),
         CONFIG, "use_aux_hidden_state", "true or false", "'false'", "without quotes"),
    Case("no fc, narrow attention", narrow,
         "d", "use_aux_hidden_state", "64 inputs", "false, and 32 inputs", "EAGLE-1"),
    Case("no fc, other target width", lambda n, f: write_modelopt(
            f, n.tensors, n.config, eagle={"use_aux_hidden_state": False}, target_hidden_size=48),
         "d", "use_aux_hidden_state", "equal to hidden_size", "48 and 32", "to true"),
    Case("hidden_norm lost", lambda n, f: write_modelopt(
            f, drop(n.tensors, "layers.0.hidden_norm.weight"), n.config),
         "d", r"layers\.0\.hidden_norm", "this tensor", "no such name", "prefix"),
    Case("P-EAGLE declared", config_key(parallel_drafting=True),
         CONFIG, "parallel_drafting", "False", "True: P-EAGLE", "trained it"),
    Case("P-EAGLE in speculators' format", lambda n, f: write_checkpoint(
            f, n.tensors, n.config | {"speculators_model_type": "peagle"}),
         CONFIG, "speculators_model_type", "'eagle3'", "'peagle'", "trained it"),
    Case("another activation", config_key(hidden_act="gelu"),
         CONFIG, "hidden_act", "'silu'", "'gelu'", "trained it"),
    Case("slots and num_aux_hidden_states differ", config_key(num_aux_hidden_states=4),
         CONFIG, "num_aux_hidden_states", "3, the slots", "4", "different drafts"),
    Case("rotary settings per kind of layer", config_key(
            rope_parameters={"full_attention": {"rope_theta": 1e4}}),
         CONFIG, "rope_parameters", "one set", "full_attention", "draft's own"),
    Case("ids are booleans", config_key(eagle_config={IDS: [True, 3, 4]}),
         CONFIG, IDS, "whole numbers", "True", "fix the config"),
    Case("norm_output is a word", config_key(norm_output="yes"),
         CONFIG, "norm_output", "true or false", "'yes'", "without quotes"),
    Case("a placeholder state", extra(mask_hidden=torch.ones(1, 96)),
         "model.safetensors", "mask_hidden", "can compute", "P-EAGLE", "trained it"),
    Case("MTP norms in the file", extra(enorm__weight=torch.ones(HIDDEN)),
         "model.safetensors", "enorm", "can compute", "MTP", "trained it"),
    Case("Medusa heads in the file", extra(
            parallel_draft_heads__0__medusa_layers__0__linear__weight=torch.ones(2)),
         "model.safetensors", "medusa", "can compute", "Medusa", "trained it"),
    Case("biases in the MLP", extra(layers__0__mlp__up_proj__bias=torch.ones(48)),
         "model.safetensors", "up_proj.bias", "can compute", "mlp_bias", "trained it"),
    Case("experts", extra(layers__0__mlp__experts__0__up_proj__weight=torch.ones(2)),
         "model.safetensors", "experts", "can compute", "mixture", "trained it"),
    Case("attention sinks", extra(layers__0__self_attn__sinks=torch.ones(4)),
         "model.safetensors", "sinks", "can compute", "gpt-oss", "trained it"),
    Case("side file of another run", meta_ids(lambda ids: ids[:-1]),
         "eagle_meta.pt", "selected_token_ids", "40 ids", "39 ids", "another run"),
    Case("side file beyond the vocabulary", meta_ids(lambda ids: ids + 90),
         "eagle_meta.pt", "selected_token_ids", "below 97", "40 ids up to", "another run"),
    Case("side file without ids", meta(lambda d: drop(d, "selected_token_ids")),
         "eagle_meta.pt", "selected_token_ids", "an integer tensor", "None", "same checkpoint"),
    Case("side file is no dict", meta(lambda d: d["selected_token_ids"]),
         "eagle_meta.pt", "selected_token_ids", "in a dict", "Tensor", "same checkpoint"),
    Case("side file and weights disagree", meta_ids(lambda ids: ids.flip(0), maps=True),
         "eagle_meta.pt", "selected_token_ids", "d2t of the weights", "of 40 that differ", "fault 22"),
    Case("latent rank of another model", latent(config={"kv_lora_rank": 7}),
         "model.safetensors", "kv_a_proj_with_mqa", r"\(11, 64\)", r"\(9, 64\)", "check"),
    Case("latent sizes not in the config", latent(config={"v_head_dim": None}),
         CONFIG, "v_head_dim", "a positive number", "None", "trained with"),
    Case("latent o_proj of another head size", latent(
            tensors={"layers.0.self_attn.o_proj.weight": torch.ones(HIDDEN, 20)}),
         "model.safetensors", "o_proj", r"\(32, 24\)", r"\(32, 20\)", "check"),
    Case("NaN in latent attention", latent(
            tensors={"layers.0.self_attn.kv_a_layernorm.weight": torch.full((5,), torch.nan)}),
         "d", r"latent\.kv_a_norm", "finite", "NaN or Inf", "diverged"),
    Case("a shard lost with the index", lost_shard,
         "d", "index.json", r"shards 1\.\.3", r"\[1, 3\]", "missing"),
    Case("one tensor in two shards", doubled_shard,
         "model-00002", ".+", "each tensor in one file", "model-00001", "different saves"),
    Case("a layer missing between", gap,
         "d", "layers", r"midlayer\.\*", r"layers \[0, 2\]", "not an EAGLE-3 draft"),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_what_cannot_be_read_is_one_typed_error(native, tmp_path, case):
    """Five parts, each naming the fault."""
    path = case.write(native, tmp_path / "d")
    with pytest.raises(CheckpointError) as caught:
        load_draft(path, target=native.target)
    for part in ("where", "field", "expected", "found", "remedy"):
        assert re.search(getattr(case, part), getattr(caught.value, part)), (part, str(caught.value))
