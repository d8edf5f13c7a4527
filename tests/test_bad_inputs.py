"""Every broken file is one typed error that names file, field, expected, found and what to do.

One table. Each row builds its broken input with the `Kit` below, opens it, and states the error.
"""

from __future__ import annotations

import json
import pickle
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from lib.captures import Capture, open_capture, open_folder
from lib.checkpoints import Draft, load_draft
from lib.draft import DraftForward
from lib.errors import CaptureError, CheckpointError, ContractError
from lib.target_head import load_target_head
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

L = 9  # positions of the sound capture that each case breaks
IDS = "eagle_aux_hidden_state_layer_ids"
NAMES = ("embed", "layer3", "layer4", "layer6")
PT, HS, OURS = "data_0.pt", "hs_0.safetensors", "c.safetensors"  # the kit's captures
CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "index.json"
Q = "layers.0.self_attn.q_proj.weight"


class RunsCode:
    """Unpickling this creates a file. No reader may ever unpickle it."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self):
        return open, (str(self.marker), "w")


class Kit:
    """Sound inputs, and ways to write them with one thing changed. None removes a key."""

    def __init__(self, folder: Path, saved: Path) -> None:
        self.folder, self.saved = folder, saved
        self.marker = folder / "code_ran"
        self.good = random_capture_tensors(L, torch.Generator().manual_seed(5))
        self.states: list[Tensor] = self.good["hidden_states"]
        self.weights, self.config = read_checkpoint(saved / "draft")

    def file(self, name: str, content: bytes | str | dict) -> Path:
        path = self.folder / name
        path.parent.mkdir(exist_ok=True)
        if isinstance(content, dict):
            torch.save(content, path)
        else:
            path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    def cut(self, path: Path, size: int) -> Path:
        path.write_bytes(path.read_bytes()[:size])
        return path

    # ---- captures

    def legacy(self, name: str = "data_0.pt", *, taps=None, **changes) -> Capture:
        tensors = {k: v for k, v in {**self.good, **changes}.items() if v is not None}
        return open_capture(write_legacy(self.folder / name, tensors), taps=taps)

    def stack_file(self, name: str = "hs_0.safetensors", **changes) -> Path:
        stack = torch.stack(self.states, 1).contiguous()
        tensors = {"hidden_states": stack, "token_ids": self.good["input_ids"], **changes}
        save_file({k: v for k, v in tensors.items() if v is not None}, self.folder / name)
        return self.folder / name

    def stack(self, *, loss_mask: Tensor | None = None, **changes) -> Capture:
        return open_capture(self.stack_file(**changes), loss_mask=loss_mask)

    def ours(self, *, kind: str = "pre_norm", **changes) -> Capture:
        tensors = {
            "token_ids": self.good["input_ids"],
            "loss_mask": self.good["loss_mask"],
            "tap.0": self.states[0],
            "final": self.states[3],
            **changes,
        }
        tensors = {k: v for k, v in tensors.items() if v is not None}
        path = self.folder / "c.safetensors"
        save_file(tensors, path, metadata={"format": "eagle3-workbook-capture", "final_kind": kind})
        return open_capture(path)

    # ---- checkpoints

    def draft_files(self, config: dict | None = None, layer: dict | None = None, **tensors) -> Path:
        """The saved draft with changed config entries and tensors."""
        weights = {**self.weights, **tensors}
        settings = {**self.config, **(config or {})}
        settings["transformer_layer_config"] = {
            **self.config["transformer_layer_config"],
            **(layer or {}),
        }
        return write_checkpoint(
            self.folder / "draft",
            {k: v for k, v in weights.items() if v is not None},
            {k: v for k, v in settings.items() if v is not None},
        )

    def reload(self) -> Draft:
        return load_draft(self.folder / "draft")

    def draft(self, config: dict | None = None, layer: dict | None = None, **tensors) -> Draft:
        return load_draft(self.draft_files(config, layer, **tensors))

    def two_layers(self, **tensors) -> Draft:
        """The draft with a second layer: the first's tensors, its attention on states alone."""
        second = {n.replace("layers.0", "layers.1"): t for n, t in self.weights.items() if "layers.0" in n}
        del second["layers.1.hidden_norm.weight"]
        second = {n: t[:, :HIDDEN] if re.search("[qkv]_proj", n) else t for n, t in second.items()}
        second = {n: t.clone() for n, t in second.items()}
        return self.draft(layer={"num_hidden_layers": 2}, **second | tensors)

    def weight(self, name: str, change: Callable[[Tensor], Tensor]) -> Draft:
        return self.draft(**{name: change(self.weights[name].clone())})

    def midlayer(self, **config) -> Draft:
        """The flat family, embeddings kept, with changed config entries."""
        tensors, flat = to_midlayer(self.weights, self.config)
        tensors["embed_tokens.weight"] = self.weights["embed_tokens.weight"]
        return load_draft(write_checkpoint(self.folder / "draft", tensors, flat | config))

    def midlayer_with(self, config: dict | None = None, **changes) -> Draft:
        """The flat family with changed tensors too."""
        tensors, flat = to_midlayer(self.weights, self.config)
        tensors |= {"embed_tokens.weight": self.weights["embed_tokens.weight"], **changes}
        tensors = {k: v for k, v in tensors.items() if v is not None}
        return load_draft(write_checkpoint(self.folder / "draft", tensors, flat | (config or {})))

    def raw_config(self, text: str) -> Draft:
        folder = self.draft_files()
        (folder / "config.json").write_text(text)
        return load_draft(folder)

    def indexed(self, change: Callable[[dict], object], shard_fate: Callable[[Path], object] = str) -> Draft:
        """The draft in three shards, its index's weight_map changed."""
        folder = write_checkpoint(self.folder / "draft", self.weights, self.config, shards=3)
        index = folder / "model.safetensors.index.json"
        content = json.loads(index.read_text())
        index.write_text(json.dumps(content | {"weight_map": change(content["weight_map"])}))
        shard_fate(folder / "model-00002-of-00003.safetensors")
        return load_draft(folder)

    def target(self, **changes):
        path = self.folder / "target"
        tensors, config = read_checkpoint(self.saved / "target")
        config = {k: v for k, v in {**config, **changes.pop("config", {})}.items() if v is not None}
        tensors = {k: v for k, v in {**tensors, **changes}.items() if v is not None}
        return load_target_head(write_checkpoint(path, tensors, config))

    # ---- both together

    def predict(self, *, taps=None, captures=None, depths=1, change=None, **capture_changes):
        draft = load_draft(self.saved / "draft")
        captures = [self.legacy(taps=NAMES, **capture_changes)] if captures is None else captures
        contract = draft.contract.change(**({"taps": taps} if taps else {}), **(change or {}))
        return DraftForward(draft).predict(captures, contract, depths=depths)


@dataclass
class Case:
    """What is done, and what the error must say: regular expressions for its five parts."""

    name: str
    act: Callable[[Kit], object]
    error: type
    where: str
    field: str
    expected: str
    found: str
    remedy: str


def with_value(tensor: Tensor, value: float, row: int = 0) -> Tensor:
    tensor = tensor.clone()
    tensor[row] = value
    return tensor


CAPTURES = [
    # Containers.
    Case("nothing there", lambda k: open_capture(k.folder / "data_0.pt"),
         CaptureError, PT, "file", "a file", "nothing there", "check the path"),
    Case("folder given for a file", lambda k: open_capture(k.folder),
         CaptureError, "", "file", "a file", "a folder", "open_folder"),
    Case("unknown suffix", lambda k: open_capture(k.file("data_0.bin", b"x")),
         CaptureError, "data_0.bin", "suffix", r"\.pt or \.safetensors", r"\.bin", "convert|rename"),
    Case("safetensors truncated", lambda k: open_capture(k.cut(k.stack_file(), 1500)),
         CaptureError, HS, "header", "complete safetensors", "(?i)incomplete", "truncated"),
    Case("safetensors truncated in its header", lambda k: open_capture(k.cut(k.stack_file(), 20)),
         CaptureError, HS, "header", "complete safetensors", "(?i)header", "truncated"),
    Case("safetensors empty", lambda k: open_capture(k.file("hs_0.safetensors", b"")),
         CaptureError, HS, "header", "complete safetensors", ".+", "empty"),
    Case("safetensors wrong magic", lambda k: open_capture(k.file("hs_0.safetensors", b"GGUF" * 99)),
         CaptureError, HS, "header", "complete safetensors", "(?i)header", "another format"),
    Case("pickle truncated", lambda k: (k.legacy(), open_capture(k.cut(k.folder / "data_0.pt", 900))),
         CaptureError, PT, "pickle", "saved whole by torch.save", ".+", "can run code"),
    Case("pickle empty", lambda k: open_capture(k.file("data_0.pt", b"")),
         CaptureError, PT, "pickle", "saved whole by torch.save", ".+", "can run code"),
    Case("pickle with code", lambda k: k.legacy(input_ids=RunsCode(k.marker)),
         CaptureError, PT, "pickle", "tensors and plain", "(?i)weights", "can run code"),
    Case("bare pickle with code", lambda k: open_capture(
            k.file("data_0.pt", pickle.dumps(RunsCode(k.marker)))),
         CaptureError, PT, "pickle", "tensors and plain", ".+", "can run code"),
    Case("not a dict", lambda k: open_capture(write_legacy(k.folder / "data_0.pt", [torch.ones(3)])),
         CaptureError, PT, "file", "a dict", "list", "not a speculators"),
    # Keys.
    Case("missing tensor, legacy", lambda k: k.legacy(loss_mask=None),
         CaptureError, PT, "keys", "loss_mask", r"missing \['loss_mask'\]", "framework"),
    Case("missing tensor, stacked", lambda k: k.stack(token_ids=None),
         CaptureError, HS, "keys", "token_ids", r"missing \['token_ids'\]", "framework"),
    Case("missing tensor, ours", lambda k: k.ours(loss_mask=None),
         CaptureError, OURS, "keys", "loss_mask", r"missing \['loss_mask'\]", "interrupted"),
    Case("unknown tensor", lambda k: k.stack(aux_hidden_state=torch.ones(2)),
         CaptureError, HS, "keys", "hidden_states", r"unexpected \['aux_", "framework"),
    # States.
    Case("ragged widths", lambda k: k.legacy(hidden_states=[*k.states[:3], torch.ones(L, HIDDEN + 1)]),
         CaptureError, PT, r"hidden_states\[3\]", r"\[positions, 32\]", r"\(9, 33\)", "ragged"),
    Case("ragged lengths", lambda k: k.legacy(hidden_states=[*k.states[:3], torch.ones(L - 4, HIDDEN)]),
         CaptureError, PT, r"hidden_states\[3\]", "9 rows, one per token", "5 rows", "fault 29"),
    Case("rows lost to a prefix cache", lambda k: k.stack(hidden_states=torch.ones(L - 4, 4, HIDDEN)),
         CaptureError, HS, "hidden_states", "9 rows", "5 rows", "prefix caching"),
    Case("stack without a state axis", lambda k: k.stack(hidden_states=torch.ones(L, HIDDEN)),
         CaptureError, HS, "hidden_states", "states, hidden size", r"\(9, 32\)", "A.1"),
    Case("one tensor in place of the list", lambda k: k.legacy(hidden_states=torch.ones(L, 4, HIDDEN)),
         CaptureError, PT, "hidden_states", "a list", "Tensor", "legacy list"),
    Case("int states, legacy", lambda k: k.legacy(hidden_states=[s.to(torch.int8) for s in k.states]),
         CaptureError, PT, r"hidden_states\[0\]", "floating-point", "torch.int8", "without quantising"),
    Case("int states, stacked", lambda k: k.stack(hidden_states=torch.ones(L, 4, HIDDEN, dtype=torch.int8)),
         CaptureError, HS, "hidden_states", "floating-point", "I8", "without quantising"),
    Case("NaN states", lambda k: k.legacy(hidden_states=[with_value(k.states[0], torch.nan, 4)]).stored(0),
         CaptureError, PT, "stored0", "finite", "32 NaN or Inf .* position 4", "65504"),
    Case("Inf states", lambda k: k.ours(final=with_value(k.states[3], torch.inf, 2)).final(),
         CaptureError, OURS, "final", "finite", "32 NaN or Inf .* position 2", "fp16 overflows"),
    Case("our states of two widths", lambda k: k.ours(final=torch.ones(L, 8)),
         CaptureError, OURS, "states", "all of one hidden size", r"\[8, 32\]", "save_capture"),
    Case("our capture without states", lambda k: k.ours(**{"tap.0": None, "final": None}),
         CaptureError, OURS, "states", "at least one state", r"\[\]", "save_capture"),
    Case("a tap number of 5000 digits", lambda k: k.ours(**{"tap." + "9" * 5000: k.states[1]}),
         CaptureError, OURS, "keys", "tap", "unexpected", "framework"),
    Case("final state of unknown kind", lambda k: k.ours(kind=""),
         CaptureError, OURS, "final_kind", "pre_norm or post_norm", "None", "final_kind="),
    # Token ids and masks.
    Case("negative id", lambda k: k.legacy(input_ids=with_value(k.good["input_ids"], -100)),
         CaptureError, PT, "token ids", "ids from 0", "id -100", "ignore-index"),
    Case("id beyond the vocabulary", lambda k: k.predict(input_ids=with_value(k.good["input_ids"], VOCAB)),
         CaptureError, PT, "token_ids", "ids below 97, .*draft", "id 97", "tokenizer"),
    Case("float ids", lambda k: k.legacy(input_ids=torch.ones(L)),
         CaptureError, PT, "token ids", "1-D integer", "torch.float32", "recapture"),
    Case("ids with a batch axis", lambda k: k.stack(token_ids=k.good["input_ids"][None]),
         CaptureError, HS, "token ids", "1-D integer", r"\(1, 9\)", "recapture"),
    Case("ids without an axis", lambda k: k.stack(token_ids=torch.tensor(3)),
         CaptureError, HS, "token ids", "1-D integer", r"\(\)", "recapture"),
    Case("no tokens", lambda k: k.legacy(
            input_ids=torch.ones(0, dtype=torch.int64), loss_mask=torch.ones(0),
            hidden_states=[torch.ones(0, 4)]),
         CaptureError, PT, "token ids", "non-empty", r"\(0,\)", "recapture"),
    Case("ids as a list", lambda k: k.legacy(input_ids=[1, 2, 3]),
         CaptureError, PT, "input_ids", "a tensor", "list", "torch.save"),
    Case("mask empty", lambda k: k.legacy(loss_mask=torch.ones(0)),
         CaptureError, PT, "loss_mask", r"one value per token \(9\)", r"\(0,\)", "own row"),
    Case("mask of another conversation", lambda k: k.stack(loss_mask=torch.ones(L + 2)),
         CaptureError, HS, "loss_mask", r"one value per token \(9\)", r"\(11,\)", "own row"),
    Case("mask all zero", lambda k: k.legacy(loss_mask=torch.zeros(L)),
         CaptureError, PT, "loss_mask", "at least one scored token", "all zeros", "chat template"),
    Case("mask not binary", lambda k: k.legacy(loss_mask=torch.arange(L)),
         CaptureError, PT, "loss_mask", "zeros and ones", "up to 8", "0/1"),
    Case("mask of NaN", lambda k: k.ours(loss_mask=torch.full((L,), torch.nan)),
         CaptureError, OURS, "loss_mask", "zeros and ones", "nan", "0/1"),
    # Folders.
    Case("no such folder", lambda k: open_folder(k.folder / "captures"),
         CaptureError, "captures", "folder", "a folder of captures", "no such folder", "single files"),
    Case("empty folder", lambda k: open_folder(k.folder),
         CaptureError, "", "folder", "capture files", "none", "data_N.pt or hs_N"),
    Case("folder of nothing but lock files", lambda k: (k.file("a.lock", b""), open_folder(k.folder)),
         CaptureError, "", "folder", "capture files", "none", "data_N.pt or hs_N"),
    Case("unexplained file", lambda k: (k.legacy(), k.file("notes.txt", b"hi"), open_folder(k.folder)),
         CaptureError, "notes.txt", "suffix", r"\.pt or \.safetensors", r"\.txt", "convert"),
    Case("folder in the folder", lambda k: (k.legacy(), (k.folder / "old").mkdir(), open_folder(k.folder)),
         CaptureError, "old", "file", "a file", "a folder", "check the path"),
    Case("one bad capture among good", lambda k: (
            k.legacy("data_0.pt"), k.file("data_1.pt", b"x"), open_folder(k.folder)),
         CaptureError, "data_1.pt", "pickle", "saved whole", ".+", "can run code"),
    Case("mask folder without arrow files", lambda k: open_folder(k.stack_file().parent, loss_masks=k.saved),
         CaptureError, "", "loss_masks", r"\*\.arrow", "none", "data preparation"),
    Case("mask file not arrow", lambda k: open_folder(
            k.stack_file().parent, loss_masks=k.file("masks/data-0.arrow", b"ARROW1..").parent),
         CaptureError, "data-0.arrow", "arrow stream", "`datasets` writes", ".+", "save_to_disk"),
]  # fmt: skip

CHECKPOINTS = [
    # Containers.
    Case("config missing", lambda k: ((k.draft_files() / "config.json").unlink(), k.reload()),
         CheckpointError, CONFIG, "json", "readable JSON", "No such file", "again"),
    Case("config not JSON", lambda k: k.raw_config("{'hidden_size': 32}"),
         CheckpointError, CONFIG, "json", "readable JSON", "line 1", "again"),
    Case("config not an object", lambda k: k.raw_config("[]"),
         CheckpointError, CONFIG, "json", "an object", "list", "not a model config"),
    Case("no weights", lambda k: ((k.draft_files() / "model.safetensors").unlink(), k.reload()),
         CheckpointError, "draft", "weights", "or pytorch_model.bin", "neither", "config.json"),
    Case("weights empty of tensors", lambda k: (
            save_file({}, k.draft_files() / "model.safetensors"), k.reload()),
         CheckpointError, "draft", "weights", "at least one tensor", "none", "again"),
    Case("safetensors truncated", lambda k: (
            k.cut(k.draft_files() / "model.safetensors", 9000), k.reload()),
         CheckpointError, WEIGHTS, "header", "complete safetensors", ".+", "truncated"),
    Case("safetensors empty", lambda k: (
            k.cut(k.draft_files() / "model.safetensors", 0), k.reload()),
         CheckpointError, WEIGHTS, "header", "complete safetensors", ".+", "empty"),
    Case("safetensors wrong magic", lambda k: (
            k.draft_files(), k.file("draft/model.safetensors", b"PK\3\4" * 99), k.reload()),
         CheckpointError, WEIGHTS, "header", "complete safetensors", "(?i)header", "another format"),
    Case("bin with code", lambda k: load_draft(
            write_checkpoint(k.folder / "draft", {}, k.config, kind="bin") and k.file(
                "draft/pytorch_model.bin", {"fc.weight": RunsCode(k.marker)}).parent),
         CheckpointError, "pytorch_model.bin", "pickle", "tensors and plain", "(?i)weights", "can run code"),
    Case("bin holds a whole trainer state", lambda k: load_draft(
            write_checkpoint(k.folder / "draft", {}, k.config, kind="bin") and k.file(
                "draft/pytorch_model.bin", {"model": {"fc.weight": torch.ones(2)}, "step": 3}).parent),
         CheckpointError, "pytorch_model.bin", "file", "a state dict", "'model' is of type dict", "alone"),
    Case("bin with a number for a name", lambda k: load_draft(
            write_checkpoint(k.folder / "draft", {}, k.config, kind="bin") and k.file(
                "draft/pytorch_model.bin", {7: torch.ones(2)}).parent),
         CheckpointError, "pytorch_model.bin", "file", "a state dict", "key of type int: 7", "alone"),
    # Index.
    Case("index names a missing shard", lambda k: k.indexed(dict, Path.unlink),
         CheckpointError, INDEX, "model-00002", "beside the index", "no such file", "missing shard"),
    Case("index climbs out of the folder", lambda k: (
            k.stack_file("outside.safetensors"),  # it exists, and is still not ours to open
            k.indexed(lambda m: m | {"fc.weight": "../outside.safetensors"})),
         CheckpointError, INDEX, r"\.\./outside", "beside the index", "no such file", "shard"),
    Case("index entry not a name", lambda k: k.indexed(lambda m: m | {"fc.weight": 7}),
         CheckpointError, INDEX, "7", "beside the index", "no such file", "shard"),
    Case("index without a map", lambda k: k.indexed(lambda m: sorted(m)),
         CheckpointError, INDEX, "weight_map", "a dict", "list", "index again"),
    Case("index and shards of different saves", lambda k: k.indexed(
            lambda m: m | {"fc.weight": m["d2t"]}),
         CheckpointError, "model-0000", "index", r"fc\.weight", "not in this shard", "different saves"),
    Case("index leaves tensors of its shards out", lambda k: k.indexed(
            lambda m: {n: s for n, s in m.items() if n != "fc.weight"}),
         CheckpointError, "model-0000", "index", "every tensor", r"1 that it leaves out: \['fc\.weight'\]",
         "different saves"),
    # Tensors.
    Case("missing tensor", lambda k: k.draft(**{Q: None}),
         CheckpointError, "draft", "q_proj", "this tensor", r"close: \['layers\.0\.self_attn", "prefix"),
    Case("unknown tensor", lambda k: k.draft(**{"layers.0.extra.weight": torch.ones(3)}),
         CheckpointError, WEIGHTS, r"layers\.0\.extra\.weight", "knows", "unknown", "silently"),
    Case("same tensor under two names", lambda k: k.draft(
            **{Q.replace("layers.0", "midlayer"): torch.ones(2)}),
         CheckpointError, "draft", "q_proj", "one tensor per meaning", "same one", "remove one"),
    Case("fc transposed", lambda k: k.weight("fc.weight", lambda w: w.T.contiguous()),
         CheckpointError, WEIGHTS, "fc.weight", r"\(32, 'any'\)", r"\(96, 32\)", "save weight.T"),
    Case("fc of two and a half slots", lambda k: k.draft(**{"fc.weight": torch.ones(HIDDEN, 80)}),
         CheckpointError, "draft", "fc.weight", r"slots x 32", r"\(32, 80\)", "target_hidden_size"),
    Case("q_proj transposed", lambda k: k.weight(Q, lambda w: w.T.contiguous()),
         CheckpointError, WEIGHTS, "q_proj", r"\(32, 64\)", r"\(64, 32\)", "save weight.T"),
    Case("int weight", lambda k: k.weight("lm_head.weight", lambda w: w.to(torch.int8)),
         CheckpointError, WEIGHTS, "lm_head.weight", "floating-point", "torch.int8", "dequantise"),
    Case("NaN weight", lambda k: k.weight("norm.weight", lambda w: with_value(w, torch.nan)),
         CheckpointError, "draft", "norm", "finite", "NaN or Inf", "diverged"),
    Case("Inf in a layer", lambda k: k.weight(Q, lambda w: with_value(w, torch.inf)),
         CheckpointError, "draft", r"layers\.0\.q", "finite", "NaN or Inf", "never initialised"),
    Case("embedding table never filled", lambda k: k.weight("embed_tokens.weight", lambda w: w * torch.nan),
         CheckpointError, "draft", "embed_tokens.weight", "finite", "NaN or Inf", "target="),
    Case("a layer number of 5000 digits", lambda k: k.draft(**{f"layers.{'9' * 5000}.x": torch.ones(1)}),
         CheckpointError, WEIGHTS, "layers", "knows", "unknown", "silently"),
    Case("lm_head of no axes", lambda k: k.midlayer_with(**{"lm_head.weight": torch.tensor(1.0)}),
         CheckpointError, WEIGHTS, "lm_head.weight", r"\('any', 32\)", r"\(\)", "check"),
    Case("a norm that no later layer has", lambda k: k.two_layers(**{
            "layers.1.hidden_norm.weight": torch.ones(HIDDEN)}),
         CheckpointError, WEIGHTS, r"layers\.1\.hidden_norm", "knows", "unknown", "silently"),
    Case("no embedding and no target", lambda k: k.draft(**{"embed_tokens.weight": None}),
         CheckpointError, "draft", "embed_tokens.weight", "target to take", "neither", "pass target="),
    Case("second layer lost", lambda k: k.draft(layer={"num_hidden_layers": 2}),
         CheckpointError, "draft", "layers", r"layers 0\.\.1", r"layers \[0\]", "fault 27"),
    Case("not a draft", lambda k: load_draft(write_checkpoint(
            k.folder / "draft", {n: t for n, t in k.weights.items() if "layers" not in n},
            to_midlayer(k.weights, k.config)[1])),
         CheckpointError, "draft", "layers", "midlayer", r"layers \[\]", "not an EAGLE-3 draft"),
    # Vocabulary maps.
    Case("d2t missing", lambda k: k.draft(d2t=None),
         CheckpointError, "draft", "d2t", "a map from 40 draft ids to 97 target ids", "no d2t", "fault 19"),
    Case("d2t of floats", lambda k: k.weight("d2t", lambda m: m.float()),
         CheckpointError, "draft", "d2t", "integers", "torch.float32", "int64"),
    Case("d2t of another draft", lambda k: k.weight("d2t", lambda m: m[:-1].clone()),
         CheckpointError, WEIGHTS, "d2t", r"\(40,\)", r"\(39,\)", "check"),
    Case("lm_head of another export", lambda k: k.weight("lm_head.weight", lambda w: w[:-1].clone()),
         CheckpointError, "draft", "lm_head.weight", "draft_vocab_size 40", "39 rows", "different exports"),
    # Config.
    Case("hidden_size missing", lambda k: k.midlayer(hidden_size=None),
         CheckpointError, CONFIG, "hidden_size", "a positive number", "None", "trained with"),
    Case("hidden_size in quotes", lambda k: k.midlayer(hidden_size="32"),
         CheckpointError, CONFIG, "hidden_size", "a positive number", "'32'", "trained with"),
    Case("no heads", lambda k: k.midlayer(num_attention_heads=0),
         CheckpointError, CONFIG, "num_attention_heads", "a positive number", "0", "trained with"),
    Case("rope_theta in quotes", lambda k: k.midlayer(rope_theta="1e4"),
         CheckpointError, CONFIG, "rope_theta", "a positive number", "'1e4'", "trained with"),
    Case("rope of an unknown kind", lambda k: k.midlayer(rope_scaling={"type": "longrope"}),
         CheckpointError, CONFIG, "rope_type", "llama3 or yarn", "longrope", "not supported"),
    Case("linear rope without its factor", lambda k: k.midlayer(rope_scaling={"type": "linear"}),
         CheckpointError, CONFIG, "factor", "a positive number", "None", "trained with"),
    Case("rope factor in quotes", lambda k: k.midlayer(rope_scaling={"type": "linear", "factor": "8"}),
         CheckpointError, CONFIG, "factor", "a positive number", "'8'", "trained with"),
    Case("rope factor of nought", lambda k: k.midlayer(rope_scaling={"type": "linear", "factor": 0}),
         CheckpointError, CONFIG, "factor", "a positive number", "0", "trained with"),
    Case("llama3 rope without its bands", lambda k: k.midlayer(
            rope_scaling={"rope_type": "llama3", "factor": 8.0}),
         CheckpointError, CONFIG, "low_freq_factor", "a positive number", "None", "trained with"),
    Case("llama3 rope with equal bands", lambda k: k.midlayer(rope_scaling={
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4, "high_freq_factor": 4}),
         CheckpointError, CONFIG, "high_freq_factor", "more than low_freq_factor 4", "4", "original"),
    Case("yarn factor of NaN", lambda k: k.midlayer(rope_scaling={"type": "yarn", "factor": float("nan")}),
         CheckpointError, CONFIG, "factor", "a positive number", "nan", "trained with"),
    Case("yarn mscale in quotes", lambda k: k.midlayer(
            rope_scaling={"type": "yarn", "factor": 4, "mscale": "1"}),
         CheckpointError, CONFIG, "mscale", "a number", "'1'", "without quotes"),
    Case("yarn mscale beyond a float", lambda k: k.midlayer(
            rope_scaling={"type": "yarn", "factor": 4, "mscale": 10**400}),
         CheckpointError, CONFIG, "mscale", "a finite number", "1000", "original export"),
    Case("yarn without any length", lambda k: k.midlayer(
            rope_scaling={"type": "yarn", "factor": 4}, max_position_embeddings=None),
         CheckpointError, CONFIG, "max_position_embeddings", "a positive number", "None", "trained with"),
    Case("rope_theta beyond a float", lambda k: k.midlayer(rope_theta=10**400),
         CheckpointError, CONFIG, "rope_theta", "a positive number", "1000", "trained with"),
    Case("rms_norm_eps beyond a float", lambda k: k.midlayer(rms_norm_eps=10**400),
         CheckpointError, CONFIG, "rms_norm_eps", "a positive number", "1000", "trained with"),
    Case("heads that do not divide", lambda k: k.midlayer(num_key_value_heads=3),
         CheckpointError, CONFIG, "num_key_value_heads", "a divisor of 4", "3", "original export"),
    Case("an odd head", lambda k: k.midlayer(head_dim=7),
         CheckpointError, CONFIG, "head_dim", "pairs of rotated", "7 rotated of 7", "original export"),
    Case("more rotary than head", lambda k: k.midlayer(partial_rotary_factor=2.0),
         CheckpointError, CONFIG, "partial_rotary_factor", "at most 1", "2.0", "original export"),
    Case("hidden_size an object", lambda k: k.midlayer_with(
            {"hidden_size": {"a": 1}}, **{"fc.weight": None, "midlayer.hidden_norm.weight": None}),
         CheckpointError, CONFIG, "hidden_size", "a positive number", "'a'", "trained with"),
    Case("nested config not an object", lambda k: k.draft(config={"eagle_config": [1]}),
         CheckpointError, CONFIG, "eagle_config", "an object", r"\[1\]", "original export"),
    Case("flag in quotes", lambda k: k.midlayer(norm_before_residual="false"),
         CheckpointError, CONFIG, "norm_before_residual", "true or false", "'false'", "without quotes"),
    Case("ids not integers", lambda k: k.draft(config={IDS: ["0", "3", "4"]}),
         CheckpointError, CONFIG, IDS, "whole numbers", r"\['0'", "fix the config"),
    Case("ids not a list", lambda k: k.draft(config={IDS: 3}),
         CheckpointError, CONFIG, IDS, "a list of whole numbers", "3", "fix the config"),
    Case("a negative id", lambda k: k.draft(config={IDS: [0, 3, -1]}),
         CheckpointError, CONFIG, IDS, "ids that land on taps", "-1", "convention"),
    Case("more ids than slots", lambda k: k.draft(config={IDS: [0, 3, 4, 6]}),
         CheckpointError, CONFIG, IDS, "3 ids, one per slot", "4", "different drafts"),
    Case("no ids and no target", lambda k: k.draft(config={IDS: None}),
         CheckpointError, CONFIG, IDS, "a target whose depth", "neither", "pass target="),
    # Norms.
    Case("norm flag without tensor", lambda k: k.draft(config={"norm_before_fc": True}),
         CheckpointError, "draft", "norm_before_fc", r"norm_before_fc=True", "no such tensors", "fault 16"),
    Case("norm flag under eagle_config without tensor", lambda k: k.midlayer(
            eagle_config={IDS: [0, 3, 4], "norm_before_fc": True}),
         CheckpointError, "draft", "norm_before_fc", r"norm_before_fc=True", "no such tensors", "fault 16"),
    Case("norm tensor without flag", lambda k: k.draft(**{"input_norm.weight": torch.ones(3 * HIDDEN)}),
         CheckpointError, "draft", "norm_before_fc", r"norm_before_fc=False", "the tensors", "fault 16"),
    Case("fc_norm flag without tensors", lambda k: k.draft(config={"fc_norm": True}),
         CheckpointError, "draft", "fc_norm", "fc_norm=True", "no such tensors", "fault 16"),
    Case("one fc_norm of three lost", lambda k: k.draft(
            config={"fc_norm": True}, **{f"fc_norm.{i}.weight": torch.ones(HIDDEN) for i in (0, 2)}),
         CheckpointError, "draft", r"fc_norm\.1\.weight", "this tensor", "close", "prefix"),
    Case("both norms before fc", lambda k: k.draft(
            config={"fc_norm": True, "norm_before_fc": True}, **{"input_norm.weight": torch.ones(3 * HIDDEN)},
            **{f"fc_norm.{i}.weight": torch.ones(HIDDEN) for i in range(3)}),
         CheckpointError, "draft", "fc_norm", "not both", "both", "remove the one"),
    # Targets.
    Case("target without a final norm", lambda k: k.target(**{"model.norm.weight": None}),
         CheckpointError, "target", "norm", "a tensor matching", "none", "Llama-style"),
    Case("target without its depth", lambda k: k.target(config={"num_hidden_layers": None}),
         CheckpointError, CONFIG, "num_hidden_layers", "decoder layers", "none", "own config.json"),
    Case("target whose norm adds one", lambda k: k.target(config={"model_type": "gemma3_text"}),
         CheckpointError, CONFIG, "model_type", "plain RMSNorm", "gemma3_text", "leave the target out"),
    *(Case(f"target with {key}", lambda k, key=key: k.target(config={key: 30.0}),
           CheckpointError, CONFIG, key, r"lm_head\(norm\(x\)\)", "30.0", "leave the target out")
      for key in ("final_logit_softcapping", "logit_scale", "logits_scaling")),
    Case("target with a bias in its norm", lambda k: k.target(**{"model.norm.bias": torch.ones(HIDDEN)}),
         CheckpointError, WEIGHTS, r"model\.norm\.bias", "without a bias", "a bias", "leave the target out"),
    Case("target with two embeddings", lambda k: k.target(
            **{"model.language_model.embed_tokens.weight": torch.ones(VOCAB, HIDDEN)}),
         CheckpointError, WEIGHTS, "embed", "one tensor", "model.embed_tokens.* and |language_model",
         "text model alone"),
    Case("target GGUF truncated", lambda k: load_target_head(k.file("t.gguf", b"GGUF\3\0\0\0")),
         CheckpointError, "t.gguf", "gguf", "a complete GGUF", ".+", "again"),
    Case("target GGUF missing", lambda k: load_target_head(k.folder / "t.gguf"),
         CheckpointError, "t.gguf", "gguf", "a complete GGUF", "No such file", "again"),
]  # fmt: skip

FIT = [
    Case("capture of another hidden size", lambda k: k.predict(
            hidden_states=[torch.ones(L, HIDDEN // 2) for _ in range(4)]),
         ContractError, "draft", "fc.weight", "3 slots x hidden 16 .* = 48", "96 inputs", "its target"),
    Case("four slots for a three-slot draft", lambda k: k.predict(taps=NAMES),
         ContractError, "draft", "fc.weight", "4 slots x hidden 32 .* = 128", "96 inputs", "as many taps"),
    Case("two slots for a three-slot draft", lambda k: k.predict(taps=("embed", "layer3")),
         ContractError, "draft", "fc.weight", "2 slots x hidden 32 .* = 64", "96 inputs", "as many taps"),
    Case("a tap that was not stored", lambda k: k.predict(taps=("embed", "layer3", "layer5")),
         ContractError, PT, "tap layer5", "'layer4', 'layer6'", "lacks", "taps="),
    Case("unnamed states under a named contract", lambda k: k.predict(captures=[k.legacy()]),
         ContractError, PT, "tap embed", "stored0", "lacks", "name the stored states"),
    Case("a norm the draft lacks", lambda k: k.predict(change={"fc_input_norm": "input_norm"}),
         ContractError, "draft", "input_norm", "input_norm weights", "none", "trained with"),
    Case("an embedding with NaN in rows in use", lambda k: DraftForward(k.weight(
            "embed_tokens.weight", lambda w: with_value(w, torch.nan, 50))).predict(
            [k.legacy(taps=NAMES, input_ids=torch.full((L,), 50))]),
         CheckpointError, "draft", "embed_tokens.weight", "finite", "of 1 tokens in use, such as id 50",
         "target="),
    Case("no depth", lambda k: k.predict(depths=0),
         ContractError, "predict", "depths", "1 or more", "0", "depths=1"),
    Case("no captures", lambda k: k.predict(captures=[]),
         ContractError, "predict", "captures", "at least one", "none", "open a folder"),
    Case("reading a state that is not there", lambda k: k.legacy().state("layer3"),
         CaptureError, PT, "layer3", "stored0", "no such state", "recapture"),
]  # fmt: skip


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """A sound draft of speculators' class and a sound target, saved once."""
    folder = tmp_path_factory.mktemp("saved")
    speculators_draft().save_pretrained(folder / "draft")
    tiny_llama(layers=6).save_pretrained(folder / "target")
    return folder


@pytest.fixture
def kit(tmp_path, saved) -> Kit:
    return Kit(tmp_path, saved)


@pytest.mark.speculators
@pytest.mark.parametrize("case", [pytest.param(c, id=c.name) for c in CAPTURES + CHECKPOINTS + FIT])
def test_broken_input_is_one_clear_error(kit, case):
    """The type, the five parts, all five in the message, and no code run on the way."""
    with pytest.raises(case.error) as caught:
        case.act(kit)
    error = caught.value
    assert type(error) is case.error
    for part in ("where", "field", "expected", "found", "remedy"):
        text, pattern = getattr(error, part), getattr(case, part)
        assert re.search(pattern, text), f"{part}: {text!r} does not match {pattern!r}"
        assert text and text in str(error), f"the message leaves out {part}"
    assert not kit.marker.exists(), "code in the file was run"


@pytest.mark.speculators
def test_the_kit_is_sound(kit):
    """Without a change nothing raises, so every error above is about its change."""
    assert len(kit.legacy()) == len(kit.stack()) == len(kit.ours()) == L
    assert kit.draft().draft_vocab == kit.midlayer().draft_vocab == DRAFT_VOCAB
    assert len(kit.two_layers().layers) == 2
    assert kit.indexed(dict).notes == ()
    assert kit.target().n_layers == 6
    assert kit.predict(depths=2).hit.shape[1] == 2


def test_the_trap_is_live(tmp_path):
    """The pickle of the table does run code when it is unpickled without protection."""
    marker = tmp_path / "code_ran"
    torch.save({"input_ids": RunsCode(marker)}, tmp_path / "data_0.pt")
    torch.load(tmp_path / "data_0.pt", weights_only=False)
    assert marker.exists()


def test_errors_survive_the_way_back_from_a_worker():
    """Pickled whole: type, parts and message."""
    error = CaptureError("data_0.pt", "keys", expected="a", found="b", remedy="c")
    back = pickle.loads(pickle.dumps(error))
    assert type(back) is CaptureError
    assert vars(back) == vars(error)
    assert str(back) == str(error) == "data_0.pt: keys: expected a, found b. What to do: c"


@pytest.mark.speculators
def test_map_beyond_the_vocabulary_is_allowed_and_noted(kit):
    """Fault 20 is for the diagnosis: the draft loads, says so, and its chains still run."""
    draft = kit.weight("d2t", lambda m: m + VOCAB)
    assert f"d2t sends {DRAFT_VOCAB} of {DRAFT_VOCAB} draft ids outside 0..96 (fault 20)" in draft.notes
    captures = [kit.legacy(taps=NAMES)]
    predictions = DraftForward(draft).predict(captures, depths=3, feed="own")
    assert not predictions.hit.any()
    assert not predictions.in_vocab.any()
