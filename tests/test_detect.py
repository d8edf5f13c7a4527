"""What a path is: every format by name, ambiguity side by side, nothing known as one clear error."""

from __future__ import annotations

import gzip
import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from lib import capture_formats
from lib.detect import detect, main, table
from lib.errors import CaptureError, CheckpointError, WorkbookError
from tests import draft_writers
from tests.capture_writers import WRITERS, native
from tests.conftest import ROOT
from tests.support import (
    HIDDEN,
    VOCAB,
    random_capture_tensors,
    read_checkpoint,
    speculators_draft,
    tiny_llama,
    write_checkpoint,
    write_legacy,
)

UNPRUNED = torch.ones(VOCAB, HIDDEN)


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> tuple[dict, dict]:
    """Tensors and config of a speculators draft."""
    folder = tmp_path_factory.mktemp("saved")
    speculators_draft().save_pretrained(folder)
    return read_checkpoint(folder)


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    tiny_llama().save_pretrained(folder, max_shard_size="20KB")
    return folder


# ---- captures ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", WRITERS)
def test_every_capture_format_by_file_and_by_folder(name, tmp_path, rng):
    writer, made = WRITERS[name], native(rng)
    files = [writer.write(tmp_path / "captures", made, i) for i in range(2)]
    one = detect(files[0])
    assert (one.kind, one.format, one.others) == ("capture", writer.layout, ())
    assert one.evidence
    # The suffix says nothing: the same content under another name is the same thing.
    other = files[0].with_name("renamed.bin" if files[0].suffix != ".safetensors" else "renamed")
    shutil.copy(files[0], other)
    assert detect(other).format == writer.layout
    other.unlink()
    folder = detect(tmp_path / "captures")
    assert (folder.kind, folder.format) == ("captures", writer.layout)
    assert folder.counts == {writer.layout: 2} and not folder.unreadable and not folder.ignored
    assert any(files[0].name in said for said in folder.evidence)


def test_a_mixed_folder_is_counted_and_the_rest_is_named(tmp_path, rng):
    made = native(rng)
    for name, number in (("specforge", 3), ("specforge-gz", 1), ("modelopt-hf", 2)):
        for i in range(number):
            WRITERS[name].write(tmp_path / name, made, i)
    (tmp_path / "data_9.pt").write_bytes(b"PK\x03\x04 cut short")
    torch.save({"weights": torch.ones(3)}, tmp_path / "data_8.pt")
    (tmp_path / "data_7.ckpt.gz").write_bytes(gzip.compress(b"x" * 100))
    (tmp_path / "README.md").write_text("made by hand")
    found = detect(tmp_path)
    assert (found.kind, found.format) == ("captures", "modelopt, specforge")
    assert found.counts == {"modelopt": 2, "specforge": 4}
    assert set(found.unreadable) == {"data_7.ckpt.gz", "data_8.pt", "data_9.pt"}
    assert found.unreadable["data_8.pt"] == "keys ['weights']"
    assert found.ignored == {"README.md": "documentation"}
    rows = table(found)
    assert list(rows.columns) == ["path", "kind", "format", "files", "evidence"]
    assert list(rows.kind) == ["captures"] * 2 + ["not readable"] * 3 + ["ignored"]
    assert list(rows.files[:2]) == [2, 4]
    text = str(found)
    for part in ("4 files of specforge", "not readable: data_9.pt", "ignored: README.md: documentation"):
        assert part in text


def test_two_layouts_that_fit_are_reported_side_by_side(tmp_path, rng):
    """A file with the keys of two frameworks whose shapes fit both."""
    made = native(rng)
    data = torch.load(WRITERS["specforge"].write(tmp_path / "a", made), weights_only=True)
    more = torch.load(WRITERS["modelopt-hf"].write(tmp_path / "b", made), weights_only=True)
    path = tmp_path / "both.pt"
    torch.save(data | more, path)
    assert len(capture_formats.recognise(path)) == 2
    found = detect(path)
    assert (found.kind, found.format) == ("capture", "specforge or modelopt")
    assert [match.format for match in found.others] == ["specforge", "modelopt"]
    assert "the content does not decide between them" in found.evidence
    assert list(table(found).format) == ["specforge", "modelopt"]
    (tmp_path / "c").mkdir()
    path.rename(tmp_path / "c" / "data_0.pt")
    folder = detect(tmp_path / "c")
    assert folder.counts == {"specforge or modelopt": 1} and len(folder.others) == 2


def test_a_speculators_data_folder(root, tmp_path):
    sample = root / "data_samples" / "captures" / "speculators"
    found = detect(sample)
    assert (found.kind, found.counts) == ("captures", {"speculators": 2})
    assert any("loss masks beside them" in said for said in found.evidence)
    shutil.copytree(sample, tmp_path / "data", ignore=shutil.ignore_patterns("hidden_states"))
    alone = detect(tmp_path / "data")
    assert (alone.kind, alone.format) == ("speculators dataset", "speculators")
    assert any("input_ids" in said and "loss_mask" in said for said in alone.evidence)
    (tmp_path / "data" / "notes.txt").write_text("mine")
    assert set(detect(tmp_path / "data").unreadable) == {"notes.txt"}


# ---- drafts and targets ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("write", "expected"),
    [
        (write_checkpoint, "speculators"),
        (draft_writers.write_eagle, "eagle"),
        (draft_writers.write_sglang, "specforge"),
        (draft_writers.write_specforge_hf, "specforge or torchspec"),
        (draft_writers.write_torchspec, "torchspec"),
        (draft_writers.write_modelopt, "modelopt"),
        (draft_writers.write_automodel, "automodel"),
    ],
)
def test_every_draft_format(write, expected, saved, tmp_path):
    tensors, config = saved
    if write is draft_writers.write_torchspec:
        tensors = tensors | {"lm_head.weight": UNPRUNED}
    found = detect(write(tmp_path / "draft", tensors, config))
    assert (found.kind, found.format) == ("draft", expected)
    assert [m.format for m in found.others] == (expected.split(" or ") if " or " in expected else [])
    assert found.evidence


def test_a_weights_file_with_its_config_is_a_draft_too(saved, tmp_path):
    folder = write_checkpoint(tmp_path / "draft", *saved)
    assert detect(folder / "model.safetensors").kind == "draft"
    (folder / "config.json").unlink()
    with pytest.raises(WorkbookError, match=r"found weights of a model.*give the folder with config.json"):
        detect(folder / "model.safetensors")


def test_a_target_is_told_from_a_draft(target, saved, tmp_path):
    found = detect(target)
    assert (found.kind, found.format) == ("target", "transformers")
    assert found.evidence[:2] == ("architectures: LlamaForCausalLM", "num_hidden_layers: 6")
    # Only the shards that the head needs are there after a download: the index is enough.
    shutil.copytree(target, tmp_path / "some")
    next((tmp_path / "some").glob("model-00003*")).unlink()
    assert detect(tmp_path / "some").kind == "target"
    # A draft with a shard missing is no target: its own error stays.
    draft = write_checkpoint(tmp_path / "cut", *saved, shards=2)
    (draft / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match="expected a shard beside the index"):
        detect(draft)
    # With the same config, but a draft's tensors, it is neither.
    config = json.loads((target / "config.json").read_text())
    with pytest.raises(WorkbookError, match=r"found fc\.\w+ under a config of no known draft format"):
        detect(write_checkpoint(tmp_path / "draft", saved[0], config))


def test_no_weight_is_read(target, tmp_path, monkeypatch):
    """Headers only: files whose payload is a hole of a gigabyte, and no tensor is ever taken."""
    monkeypatch.setattr("lib.weights.TensorFile.__getitem__", None)
    shape = (2**18, 1024)
    header = {"model.embed_tokens.weight": {"dtype": "F32", "shape": shape, "data_offsets": [0, 2**30]}}
    folder = tmp_path / "large"
    folder.mkdir()
    shutil.copy(target / "config.json", folder)
    with open(folder / "model.safetensors", "wb") as f:
        text = json.dumps(header).encode()
        f.write(len(text).to_bytes(8, "little") + text)
        f.truncate(8 + len(text) + 2**30)
    resident = int(Path("/proc/self/statm").read_text().split()[1])
    assert detect(folder).kind == "target"
    assert int(Path("/proc/self/statm").read_text().split()[1]) - resident < 2**16  # pages: 256 MiB


def test_gguf(tmp_path, rng):
    import gguf

    def write(name: str, tensors: list[str], **numbers) -> Path:
        writer = gguf.GGUFWriter(str(tmp_path / name), "llama")
        writer.add_block_count(2)
        for tensor in tensors:
            writer.add_tensor(f"{tensor}.weight", np.ones((4, 8), np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return tmp_path / name

    path = write("whole", ["token_embd", "output_norm"])  # no suffix: the first bytes say it
    found = detect(path)
    assert (found.kind, found.format) == ("GGUF target", "gguf")
    assert "architecture llama, 2 blocks" in found.evidence
    with pytest.raises(WorkbookError, match=r"a GGUF file without \['output_norm.weight'\]"):
        detect(write("part", ["token_embd"]))
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(CheckpointError, match="expected a complete GGUF model"):
        detect(path)


# ---- the rest ----------------------------------------------------------------------------------


def test_vocab_mappings(tmp_path, saved):
    maps = {name: saved[0][name] for name in ("d2t", "t2d")}
    (tmp_path / "vocab_mapping").mkdir()
    path = tmp_path / "vocab_mapping" / "vocab_mapping.pt"
    torch.save(maps, path)
    for where in (path, path.parent):
        found = detect(where)
        assert (found.kind, found.format) == ("vocab mapping", "specforge")
        assert "t2d [97] torch.bool" in str(found.evidence)
    torch.save({"selected_token_ids": torch.arange(3), "epoch": 1}, tmp_path / "eagle_meta.pt")
    assert (detect(tmp_path / "eagle_meta.pt").format) == "automodel"
    (tmp_path / "npy").mkdir()
    for name, tensor in maps.items():
        np.save(tmp_path / "npy" / f"{name}.npy", tensor.numpy())
    found = detect(tmp_path / "npy")
    assert (found.kind, found.format, len(found.evidence)) == ("vocab mapping", "speculators", 2)


def bad_npy(folder: Path) -> Path:
    np.save(folder / "d2t.npy", np.array([{}], dtype=object))
    return folder / "d2t.npy"


def other_npy(folder: Path) -> Path:
    np.save(folder / "losses.npy", np.ones(3))
    return folder / "losses.npy"


def text_file(folder: Path) -> Path:
    (folder / "notes.txt").write_text("hello")
    return folder / "notes.txt"


def tensor_file(folder: Path) -> Path:
    save_file({"x": torch.ones(2)}, folder / "x.safetensors")
    return folder / "x.safetensors"


def pickle_file(folder: Path) -> Path:
    torch.save([1, 2], folder / "list.pt")
    return folder / "list.pt"


def bare_config(folder: Path) -> Path:
    (folder / "config.json").write_text('{"architectures": ["X"]}')
    save_file({"x": torch.ones(2)}, folder / "model.safetensors")
    return folder


def broken_config(folder: Path) -> Path:
    (folder / "config.json").write_text("{")
    save_file({"x": torch.ones(2)}, folder / "model.safetensors")
    return folder


def parent_of_drafts(folder: Path) -> Path:
    for name in ("one", "two"):
        (folder / name).mkdir()
        (folder / name / "config.json").write_text("{}")
    return folder


def broken_captures(folder: Path) -> Path:
    for i in range(3):
        (folder / f"data_{i}.pt").write_bytes(b"PK\x03\x04")
    return folder


def arrow_without_mask(folder: Path) -> Path:
    import pyarrow as pa

    batch = pa.table({"text": ["a"]})
    with pa.ipc.new_stream(folder / "data.arrow", batch.schema) as stream:
        stream.write_table(batch)
    return folder


def broken_arrow(folder: Path) -> Path:
    (folder / "data.arrow").write_bytes(b"ARROW?")
    return folder


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda f: f / "none", r"path: expected a file or folder, found nothing there"),
        (lambda f: Path("a\0b"), r"path: expected a file or folder, found nothing there"),
        (lambda f: f, r"found an empty folder"),
        (text_file, r"notes.txt: suffix: expected \.pt or \.safetensors"),
        (tensor_file, r"x.safetensors: kind: expected one of draft, target.*found keys \['x'\]"),
        (pickle_file, r"list.pt: file: expected a dict, found list"),
        (bad_npy, r"d2t.npy: npy: expected a NumPy array without objects"),
        (other_npy, r"losses.npy: kind: .*found an array \[3\] float64.*only d2t.npy and t2d.npy"),
        (bare_config, r"without \['num_hidden_layers', 'embed_tokens.weight'\]"),
        (broken_config, r"config.json: json: expected a readable JSON file"),
        (
            lambda f: bare_config(f) / "config.json",
            r"config.json: kind: .*found a JSON file.*give the folder",
        ),
        (parent_of_drafts, r"did you mean \['one', 'two'\] in it"),
        (broken_captures, r"3 files that are no captures, the first data_0.pt: pickle"),
        (arrow_without_mask, r"arrow files with columns \['text'\]"),
        (broken_arrow, r"data.arrow: arrow stream: expected an arrow stream"),
    ],
)
def test_nothing_known_is_one_error_that_says_what_was_seen(make, message, tmp_path):
    with pytest.raises(WorkbookError, match=message):
        detect(make(tmp_path))


def test_a_broken_capture_alone_keeps_its_own_error(tmp_path, rng):
    path = write_legacy(tmp_path / "data_0.pt", random_capture_tensors(9, rng))
    path.write_bytes(path.read_bytes()[:2000])
    for where in (path, tmp_path):
        with pytest.raises((CaptureError, CheckpointError), match=r"data_0.pt: pickle"):
            detect(where)


def test_command_line(tmp_path, rng, capsys):
    path = write_legacy(tmp_path / "data_0.pt", random_capture_tensors(9, rng))
    assert main([str(path)]) == 0
    assert "capture, speculators-legacy" in capsys.readouterr().out
    assert main([str(path), str(tmp_path / "none")]) == 2
    said = capsys.readouterr()
    assert "capture, speculators-legacy" in said.out  # one bad path does not hide the others
    assert "found nothing there" in said.err and "Traceback" not in said.err
    done = subprocess.run(
        [sys.executable, "-m", "lib.detect", str(path)], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0 and "capture, speculators-legacy" in done.stdout
