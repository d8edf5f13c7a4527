"""One draft in every wrapping it comes in, and the three tensors of a target, from every file it ships as."""

from __future__ import annotations

import shutil
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from lib.captures import open_capture
from lib.checkpoints import Layer, load_draft
from lib.contract import Rope
from lib.draft import DraftForward
from lib.errors import CheckpointError, ContractError
from lib.taps import Tap
from lib.target import record_states
from lib.target_head import load_target_head
from tests.draft_writers import assert_same_draft, weights
from tests.support import (
    DRAFT_VOCAB,
    HIDDEN,
    VOCAB,
    random_capture_tensors,
    read_checkpoint,
    speculators_draft,
    tiny_llama,
    to_midlayer,
    write_checkpoint,
    write_legacy,
)

pytestmark = pytest.mark.speculators  # the native checkpoints are saved by the trainer's own class
TARGET_BLOCKS = 6


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def native(request, tmp_path_factory):
    """A draft as speculators saves it, its target (same embeddings), and captures to predict on."""
    root = tmp_path_factory.mktemp(request.param)
    speculators_draft(arch=request.param, norm_before_residual=True).save_pretrained(root / "draft")
    tensors, config = read_checkpoint(root / "draft")
    tiny_llama(layers=TARGET_BLOCKS, embed=tensors["embed_tokens.weight"]).save_pretrained(root / "target")
    rng = torch.Generator().manual_seed(7)
    files = [write_legacy(root / f"data_{n}.pt", random_capture_tensors(n, rng)) for n in (7, 20)]
    return SimpleNamespace(
        draft=load_draft(root / "draft"),
        target=load_target_head(root / "target"),
        tensors=tensors,
        config=config,
        captures=[open_capture(f, taps=("embed", "layer3", "layer4", "layer6")) for f in files],
    )


def midlayer(native, folder, *, tensors: dict | None = None, config: dict | None = None, **layout):
    """The native draft as the `midlayer.*` family would ship it; None removes a tensor or key."""
    named, flat = to_midlayer(native.tensors, native.config)
    flat["norm_before_residual"] = True
    named, flat = named | (tensors or {}), flat | (config or {})
    named = {k: t for k, t in named.items() if t is not None}
    return write_checkpoint(folder, named, {k: v for k, v in flat.items() if v is not None}, **layout)


# ---- one draft, many wrappings ----------------------------------------------------------------


def test_speculators_format_arrives_unchanged(native):
    """Every stored tensor is used, none is altered, and the flags come from the config."""
    draft, stored = native.draft, native.tensors
    assert torch.equal(draft.fc, stored["fc.weight"])
    assert torch.equal(draft.embed, stored["embed_tokens.weight"])
    assert torch.equal(draft.layers[0].q, stored["layers.0.self_attn.q_proj.weight"])
    assert set(draft.keys) == set(stored)
    assert set(draft.keys.values()) == {"used"}
    assert len(weights(draft)) == len(stored), "as many tensors in the draft as in the file"
    assert (draft.n_slots, draft.draft_vocab, draft.target_vocab) == (3, DRAFT_VOCAB, VOCAB)
    assert draft.contract.norm_before_residual is True
    assert str(draft.contract.source("norm_before_residual")) == (
        "checkpoint (config.json: norm_before_residual)"
    )
    assert draft.notes == ()


WRAPPINGS = {
    "midlayer": {},
    "midlayer, sharded": {"shards": 3},
    "pytorch_model.bin": {"kind": "bin"},
    "pytorch_model.bin, sharded": {"kind": "bin", "shards": 3},
}


@pytest.mark.parametrize("layout", WRAPPINGS)
def test_midlayer_family_is_the_same_draft(native, tmp_path, layout):
    """Other names, other nesting, other container, no embeddings: the same bits and predictions."""
    folder = midlayer(native, tmp_path / "d", **WRAPPINGS[layout])
    draft = load_draft(folder, target=native.target)
    assert_same_draft(native.draft, draft, native.captures)
    named, _ = to_midlayer(native.tensors, native.config)
    assert draft.keys == dict.fromkeys(named, "used")


@pytest.mark.parametrize("kind", ["safetensors", "bin"])
def test_speculators_format_sharded(native, tmp_path, kind):
    """The native names, split over three files and an index."""
    folder = write_checkpoint(tmp_path, native.tensors, native.config, kind=kind, shards=3)
    assert_same_draft(native.draft, load_draft(folder), native.captures)


def test_the_model_prefix_of_some_exports_is_understood(native, tmp_path):
    """`model.layers.0.*` is `layers.0.*`; the maps and lm_head never carry it."""
    bare = ("d2t", "t2d", "lm_head.weight")
    named = {n if n in bare else f"model.{n}": t for n, t in native.tensors.items()}
    folder = write_checkpoint(tmp_path, named, native.config)
    assert_same_draft(native.draft, load_draft(folder), native.captures)


def test_harmless_tensors_are_ignored_by_a_named_rule(native, tmp_path):
    """Ignored is a word in the account, with the reason, and never a blank."""
    extra = {
        "rotary_emb.inv_freq": torch.ones(4),
        "verifier_norm.weight": torch.ones(HIDDEN),
        "verifier_lm_head.weight": torch.ones(DRAFT_VOCAB, HIDDEN),
    }
    draft = load_draft(midlayer(native, tmp_path, tensors=extra), target=native.target)
    ignored = {k: why for k, why in draft.keys.items() if why != "used"}
    assert ignored == {
        "rotary_emb.inv_freq": "ignored: computed from the config",
        "verifier_norm.weight": "ignored: the trainer's copy of target weights",
        "verifier_lm_head.weight": "ignored: the trainer's copy of target weights",
    }


def test_two_layers_in_shards(native, tmp_path):
    """The second layer is plain: no hidden_norm, H wide input."""
    model = speculators_draft(layers=2)
    model.save_pretrained(tmp_path / "saved")
    tensors, config = read_checkpoint(tmp_path / "saved")
    one, two = (
        load_draft(f)
        for f in (tmp_path / "saved", write_checkpoint(tmp_path / "s", tensors, config, shards=4))
    )
    assert [layer.q.shape[1] for layer in two.layers] == [2 * HIDDEN, HIDDEN]
    assert isinstance(two.layers[1], Layer)
    assert two.layers[1].hidden_norm is None
    assert_same_draft(one, two, native.captures)


# ---- what the notes must say ------------------------------------------------------------------


def test_notes_say_that_embeddings_came_from_the_target(native, tmp_path):
    """A rotated or stale embedding is a fault of its own (24, 25); the report must show whose it is."""
    draft = load_draft(midlayer(native, tmp_path), target=native.target)
    assert "embed_tokens.weight not in the checkpoint: the target's is used" in draft.notes
    assert draft.embed.data_ptr() == native.target.embed.data_ptr(), "mapped, not copied"


def test_notes_say_that_lm_head_came_from_the_target(native, tmp_path):
    """Full vocabulary, nothing of its own: SGLang's `draft_vocab_size is None` case."""
    gone = dict.fromkeys(("lm_head.weight", "d2t", "t2d"))
    draft = load_draft(
        midlayer(native, tmp_path, tensors=gone, config={"draft_vocab_size": None}), target=native.target
    )
    assert "lm_head.weight not in the checkpoint: the target's is used" in draft.notes
    assert torch.equal(draft.lm_head, native.target.lm_head)
    assert draft.contract.vocab_map == "identity"
    assert draft.in_vocab().all()


def test_every_missing_default_is_noted(native, tmp_path):
    """A flat config says little; each silence is filled in the open, with whose default it is."""
    gone = {"norm_before_residual": None, "rope_theta": None, "eagle_config": {}}
    draft = load_draft(midlayer(native, tmp_path, config=gone), target=native.target)
    notes = "\n".join(draft.notes)
    for expected in (
        "norm_before_residual not in config.json: False (EAGLE, SGLang, vLLM for raw configs)",
        "norm_output not in config.json: False (EAGLE-3 as published)",
        "eagle_aux_hidden_state_layer_ids not in config.json: None ((2, n//2, n-3)",
        "rope_theta not in config.json: 10000",
    ):
        assert expected in notes
    assert draft.contract.taps == (Tap(2), Tap(3), Tap(3))  # n = 6: the default triple collides
    for name in ("taps", "rope", "norm_before_residual", "feedback"):
        assert draft.contract.source(name).origin == "framework default", name


def test_map_out_of_the_vocabulary_loads_with_a_note(native, tmp_path):
    """Fault 20: absolute ids stored as offsets. It must load to be diagnosed, but not in silence."""
    absolute = native.tensors["d2t"] + torch.arange(DRAFT_VOCAB)
    draft = load_draft(midlayer(native, tmp_path, tensors={"d2t": absolute}), target=native.target)
    doubled = absolute + torch.arange(DRAFT_VOCAB)
    outside = int((doubled >= VOCAB).sum())
    assert outside, "the case must be one"
    assert f"d2t sends {outside} of {DRAFT_VOCAB} draft ids outside 0..{VOCAB - 1} (fault 20)" in draft.notes
    right = draft.contract.change(vocab_map="absolute")
    fixed = DraftForward(draft).predict(native.captures, right, depths=2)
    healthy = DraftForward(native.draft).predict(native.captures, depths=2)
    assert torch.equal(fixed.target_ids, healthy.target_ids)


def test_maps_that_disagree_are_noted(native, tmp_path):
    """Two tokens of t2d swapped against d2t: a stale map of another data set (fault 22)."""
    t2d = native.tensors["t2d"].clone()
    t2d[[int(t2d.nonzero()[0]), int((~t2d).nonzero()[0])]] ^= True
    draft = load_draft(midlayer(native, tmp_path, tensors={"t2d": t2d}), target=native.target)
    assert "d2t and t2d disagree on 2 target ids (fault 22)" in draft.notes


def test_zero_map_of_a_full_vocabulary_is_healthy(native, tmp_path):
    """EAGLE#222: d2t of zeros with as many draft as target ids is the identity, not a fault."""
    maps = {
        "lm_head.weight": native.target.lm_head,
        "d2t": torch.zeros(VOCAB, dtype=torch.int64),
        "t2d": torch.ones(VOCAB, dtype=torch.bool),
    }
    folder = midlayer(native, tmp_path, tensors=maps, config={"draft_vocab_size": VOCAB})
    draft = load_draft(folder, target=native.target)
    assert not any("d2t" in note for note in draft.notes)
    assert draft.to_target(torch.arange(VOCAB)).tolist() == list(range(VOCAB))


# ---- config readings --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "config, theta, kind, note",
    [
        ({"rope_theta": 5e5}, 5e5, "default", None),
        ({"rope_theta": None, "rope_parameters": {"rope_theta": 5e5}}, 5e5, "default", None),
        (
            {"rope_theta": 1e4, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
            1e6,
            "default",
            "rope_theta 10000 and rope_parameters.rope_theta 1e+06 disagree",  # "100x off"
        ),
        ({"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}}, 5e5, "linear", None),
        ({"rope_theta": None}, 1e4, "default", "rope_theta not in config.json"),
    ],
)
def test_rope_theta_under_its_old_and_new_key(native, tmp_path, config, theta, kind, note):
    """transformers moved it; when both are there and disagree, the draft says which one it took."""
    draft = load_draft(midlayer(native, tmp_path, config=config), target=native.target)
    assert (draft.contract.rope.theta, draft.contract.rope.kind) == (theta, kind)
    said = [n for n in draft.notes if "rope_theta" in n]
    assert len(said) == (note is not None)
    assert note is None or said[0].startswith(note)


@pytest.mark.parametrize("convention, taps", [("vllm", (0, 3, 4)), ("sglang", (1, 4, 5))])
def test_the_same_ids_read_by_two_engines(native, tmp_path, convention, taps):
    """The file does not say whose ids they are: the caller does, and the source records it."""
    folder = midlayer(native, tmp_path)
    draft = load_draft(folder, target=native.target, convention=convention)
    assert draft.contract.taps == tuple(map(Tap, taps))
    assert str(draft.contract.source("taps")) == (
        f"checkpoint (config.json: eagle_config: eagle_aux_hidden_state_layer_ids, read as {convention} does)"
    )


def test_unknown_convention_is_the_callers_error(native):
    """Not blamed on the file."""
    with pytest.raises(ContractError, match=r"convention: framework: .* found 'sgl'"):
        load_draft(native.draft.path, convention="sgl")


def test_draft_ids_map_to_target_ids(native):
    """d2t is an offset; under it the reachable ids are exactly those that t2d marks."""
    draft = native.draft
    ids = draft.to_target(torch.arange(DRAFT_VOCAB))
    assert ids.tolist() == draft.t2d.nonzero().flatten().tolist()
    assert torch.equal(draft.in_vocab(), draft.t2d)
    assert draft.to_target(torch.tensor([5]), "identity").tolist() == [5]
    assert draft.to_target(torch.tensor([5]), "absolute").tolist() == [int(draft.d2t[5])]


# ---- the target's three tensors ---------------------------------------------------------------


@pytest.fixture(scope="module", params=["untied", "tied"])
def target(request, tmp_path_factory):
    """A tiny target in one file and in shards, some tokens, its last state and its logits."""
    folder = tmp_path_factory.mktemp("target")
    model = tiny_llama(layers=TARGET_BLOCKS, tied=request.param == "tied")
    model.save_pretrained(folder / "whole")
    model.save_pretrained(folder / "shards", max_shard_size="20KB")
    ids = torch.randint(0, VOCAB, (1, 9), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        logits = model(ids).logits[0]
    last = record_states(model, ids, [Tap(TARGET_BLOCKS)])[Tap(TARGET_BLOCKS)][0]
    return SimpleNamespace(folder=folder, model=model, last=last, logits=logits, tied=request.param == "tied")


def assert_is_head_of(head, target) -> None:
    model = target.model
    assert torch.equal(head.embed, model.model.embed_tokens.weight)
    assert torch.equal(head.norm, model.model.norm.weight)
    assert torch.equal(head.lm_head, model.lm_head.weight)
    assert (head.n_layers, head.hidden_size) == (TARGET_BLOCKS, HIDDEN)
    assert head.eps == pytest.approx(1e-5)
    logits = head.logits(target.last, final_kind="pre_norm")
    assert torch.allclose(logits, target.logits, rtol=1e-5, atol=1e-5)


def test_target_head_gives_the_targets_logits(target):
    """Three tensors and an epsilon are enough to turn a captured last state into its logits."""
    head = load_target_head(target.folder / "whole")
    assert_is_head_of(head, target)
    assert (head.lm_head.data_ptr() == head.embed.data_ptr()) == target.tied
    rows = torch.tensor([3, 50])
    some = head.logits(target.last, final_kind="pre_norm", rows=rows)
    assert torch.allclose(some, target.logits[:, rows], rtol=1e-5, atol=1e-5)


def test_normed_state_is_not_normed_again(target):
    """pre_norm and post_norm differ by one RMSNorm, and swapping them changes the logits."""
    head = load_target_head(target.folder / "whole")
    with torch.no_grad():
        normed = target.model.model.norm(target.last)
    right = head.logits(normed, final_kind="post_norm")
    assert torch.allclose(right, target.logits, rtol=1e-5, atol=1e-5)
    assert (head.logits(normed, final_kind="pre_norm") - right).abs().max() > 0.1


@pytest.mark.parametrize("name", ["model.layers.6.embed_tokens.weight", "talker.lm_head.weight"])
def test_other_tensors_of_the_same_last_name_are_not_taken(target, tmp_path, name):
    """DeepSeek's MTP layer keeps an embedding of its own, a talker its head."""
    shutil.copytree(target.folder / "whole", tmp_path / "t")
    file = tmp_path / "t" / "model.safetensors"
    save_file(load_file(file) | {name: torch.full((VOCAB, HIDDEN), 7.0)}, file)
    assert_is_head_of(load_target_head(tmp_path / "t"), target)


@pytest.mark.parametrize("fate", ["deleted", "garbage"])
def test_other_shards_are_never_opened(target, tmp_path, fate):
    """A 600 GB target needs its first and last shard on disk, no more."""
    folder = tmp_path / "target"
    shutil.copytree(target.folder / "shards", folder)
    index = (folder / "model.safetensors.index.json").read_text()
    head_of = ("embed_tokens", "model.norm", "lm_head")
    needed = {line.split('"')[3] for line in index.splitlines() if any(n in line for n in head_of)}
    others = [f for f in folder.glob("*.safetensors") if f.name not in needed]
    assert needed and others
    for file in others:
        file.unlink() if fate == "deleted" else file.write_bytes(b"not a tensor in sight")
    assert_is_head_of(load_target_head(folder), target)


def test_target_head_from_gguf(target, tmp_path):
    """The same three tensors under GGUF's names; no output.weight means tied."""
    head = load_target_head(write_gguf(tmp_path / "t.gguf", target))
    assert_is_head_of(head, target)


def test_quantised_gguf_is_dequantised(target, tmp_path):
    """Q8_0: what comes back is the table to within half a step (and the rounding of the fp16 scale)."""
    from gguf import GGMLQuantizationType

    head = load_target_head(write_gguf(tmp_path / "t.gguf", target, GGMLQuantizationType.Q8_0))
    table = target.model.model.embed_tokens.weight.detach()
    step = table.abs().amax(1, keepdim=True) / 127  # H = 32 is one block
    assert ((head.embed - table).abs() <= 0.6 * step).all()
    assert not torch.equal(head.embed, table)


def write_gguf(path, target, embed_type=None):
    """llama.cpp's layout of a Llama, by the library that defines it."""
    from gguf import GGUFWriter, quantize

    def array(parameter) -> np.ndarray:
        return parameter.detach().numpy()

    writer = GGUFWriter(path, "llama")
    writer.add_block_count(TARGET_BLOCKS)
    writer.add_layer_norm_rms_eps(1e-5)
    table = array(target.model.model.embed_tokens.weight)
    table = table if embed_type is None else quantize(table, embed_type)
    writer.add_tensor("token_embd.weight", table, raw_dtype=embed_type)
    writer.add_tensor("output_norm.weight", array(target.model.model.norm.weight))
    if not target.tied:
        writer.add_tensor("output.weight", array(target.model.lm_head.weight))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_draft_borrows_only_from_a_target_of_its_width(native, tmp_path):
    """The message names both files."""
    wide = replace(native.target, embed=torch.zeros(VOCAB, 2 * HIDDEN))
    with pytest.raises(CheckpointError, match=rf"a target of hidden size {HIDDEN}, found {2 * HIDDEN} in "):
        load_draft(midlayer(native, tmp_path / "d"), target=wide)


def test_a_borrowed_table_has_a_row_for_every_id(native, tmp_path):
    """Fewer rows are refused with the right remedy; more, as of a padded table, are noted."""
    folder = midlayer(native, tmp_path / "d")
    small = replace(native.target, embed=native.target.embed[:-5])
    with pytest.raises(CheckpointError, match=rf"with the {VOCAB} rows of vocab_size, found {VOCAB - 5} in "):
        load_draft(folder, target=small)
    more = replace(native.target, embed=torch.cat([native.target.embed, torch.zeros(7, HIDDEN)]))
    draft = load_draft(folder, target=more)
    note = f"embed_tokens.weight not in the checkpoint: the target's is used, whose {VOCAB + 7} rows are more"
    assert any(n.startswith(note) for n in draft.notes)
    assert_same_draft(
        load_draft(folder, target=native.target), replace(draft, embed=native.target.embed), native.captures
    )


def test_gguf_with_scaled_logits_is_refused(target, tmp_path):
    """Gemma 2 caps its logits: what is computed here would not be them."""
    from gguf import GGUFWriter

    def capped(self, eps):
        self.add_float32("llama.final_logit_softcapping", 30.0)
        add(self, eps)

    add = GGUFWriter.add_layer_norm_rms_eps
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GGUFWriter, "add_layer_norm_rms_eps", capped)
        path = write_gguf(tmp_path / "t.gguf", target)
    with pytest.raises(CheckpointError, match=r"final_logit_softcapping: expected .*lm_head\(norm\(x\)\)"):
        load_target_head(path)


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "yarn", "factor": 4.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192},
        {"type": "yarn", "factor": 8.0, "original_max_position_embeddings": 4096, "truncate": False},
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1, "high_freq_factor": 4,
         "original_max_position_embeddings": 8192},
    ],
    ids=str,
)  # fmt: skip
def test_frequencies_equal_transformers_own(native, tmp_path, scaling):
    """From the same config.json: without a length of its own, yarn takes the config's."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    from lib.rope import rope_table

    config = {"rope_scaling": scaling, "max_position_embeddings": 32768}
    draft = load_draft(midlayer(native, tmp_path, config=config), target=native.target)
    values = {k: v for k, v in scaling.items() if k != "type"} | {"rope_theta": 1e4}
    values.setdefault("rope_type", scaling.get("type"))
    theirs = LlamaConfig(head_dim=128, max_position_embeddings=32768, rope_parameters=values)
    inv, factor = ROPE_INIT_FUNCTIONS[values["rope_type"]](theirs, device="cpu")
    cos, sin = rope_table(draft.contract.rope, 128, torch.tensor([1]), torch.float64)
    assert torch.allclose(torch.atan2(sin[0], cos[0]), inv.double(), rtol=1e-9)
    assert torch.allclose(torch.hypot(sin[0], cos[0]), torch.tensor(factor, dtype=torch.float64))
    noted = any("original_max_position_embeddings not in" in n and "32768" in n for n in draft.notes)
    assert noted == ("original_max_position_embeddings" not in scaling)


def test_a_rope_that_cannot_be_computed_is_the_contracts_error(native):
    """Also where nobody read a config: by hand, or in a search."""
    for rope in (Rope(kind="linear"), Rope(kind="yarn", params=(("factor", 4.0),)),
                 Rope(kind="linear", params=(("factor", 0.0),))):  # fmt: skip
        contract = native.draft.contract.change(rope=rope)
        with pytest.raises(ContractError, match="rope: expected the parameters of"):
            DraftForward(native.draft).predict(native.captures, contract)


@pytest.mark.parametrize("name", ["rms_norm_eps", "num_key_value_heads", "head_dim"])
def test_sizes_that_the_config_leaves_out_are_noted(native, tmp_path, name):
    """transformers' defaults are taken, and said."""
    tensors, _ = to_midlayer(native.tensors, native.config)
    changes = {}
    if name == "num_key_value_heads":  # as many as there are heads
        for part in "kv":
            weight = tensors[f"midlayer.self_attn.{part}_proj.weight"]
            changes[f"midlayer.self_attn.{part}_proj.weight"] = torch.cat([weight, weight])
    folder = midlayer(native, tmp_path, tensors=changes, config={name: None})
    notes = load_draft(folder, target=native.target).notes
    assert sum(n.startswith(f"{name} not in config.json: ") for n in notes) == 1


def test_draft_ids_that_share_a_target_id_are_noted(native, tmp_path):
    """It loads: a wrong map is to be diagnosed."""
    d2t = native.tensors["d2t"].clone()
    d2t[4] = d2t[5] + 1
    notes = load_draft(midlayer(native, tmp_path, tensors={"d2t": d2t}), target=native.target).notes
    assert f"d2t sends 1 of {DRAFT_VOCAB} draft ids to a target id that another one has too" in notes


def test_a_norm_flag_under_eagle_config_counts(native, tmp_path):
    """As for every other key of EAGLE-3's own."""
    norms = {f"fc_norm.{i}.weight": torch.ones(HIDDEN) for i in range(3)}
    eagle = to_midlayer(native.tensors, native.config)[1]["eagle_config"] | {"fc_norm": True}
    folder = midlayer(native, tmp_path, tensors=norms, config={"eagle_config": eagle})
    assert load_draft(folder, target=native.target).contract.fc_input_norm == "fc_norm"
