"""Draft checkpoints of every origin, and the three tensors of a target that a draft needs.

Every key of a file is used, ignored by a named rule, or an error. What is not in the file and has
to come from elsewhere (embeddings, lm_head, a default) is said in `Draft.notes`.

Axes: H draft hidden, Ht target hidden, k slots, V target vocabulary, Vd draft vocabulary.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from lib.captures import load_pickle
from lib.contract import Contract, Rope, Source
from lib.errors import CheckpointError, ContractError
from lib.taps import Tap, default_triple, taps_from_ids


class TensorFile:
    """Tensors of a checkpoint by name, read only when asked for; one file or an indexed set.

    Safetensors are memory-mapped: taking rows of a table touches only those rows. Pickled files
    are opened with `weights_only=True` and mapped too.
    """

    def __init__(self, path: str | Path) -> None:
        """Find the weights at `path` (a folder or a file) and list their names."""
        self.path = Path(path)
        self._get: dict[str, Callable[[], Tensor]] = {}
        self.origin: dict[str, Path] = {}
        for file, names in _weight_files(self.path):
            self._add(file, names)
        if not self._get:
            raise CheckpointError(
                self.path, "weights", expected="at least one tensor", found="none",
                remedy="the file was written empty; save the checkpoint again",
            )  # fmt: skip

    def _add(self, file: Path, wanted: set[str] | None) -> None:
        if file.suffix == ".safetensors":
            try:
                handle = safe_open(file, "pt")
            except (SafetensorError, OSError) as err:
                raise CheckpointError(
                    file, "header", expected="a complete safetensors file", found=str(err),
                    remedy="download or copy it again; it is truncated, empty or another format",
                ) from err  # fmt: skip
            found = {name: (lambda n=name, h=handle: h.get_tensor(n)) for name in handle.keys()}
        else:
            data = load_pickle(file, CheckpointError)
            if not isinstance(data, dict) or not all(
                isinstance(n, str) and isinstance(t, Tensor) for n, t in data.items()
            ):
                raise CheckpointError(
                    file, "file", expected="a state dict (name -> tensor)",
                    found=type(data).__name__, remedy="save model.state_dict(), not the model",
                )  # fmt: skip
            found = {name: (lambda t=tensor: t) for name, tensor in data.items()}
        absent = sorted((wanted or set()) - set(found))
        if absent:
            raise CheckpointError(
                file, "index", expected=f"tensors {absent}", found="not in this shard",
                remedy="the index and the shards are of different saves; download both again",
            )  # fmt: skip
        for name in found if wanted is None else sorted(wanted):
            self._get[name], self.origin[name] = found[name], file

    def __contains__(self, name: str) -> bool:
        return name in self._get

    def __iter__(self) -> Iterator[str]:
        return iter(self._get)

    def __getitem__(self, name: str) -> Tensor:
        """The tensor; CheckpointError naming close matches if there is none of that name."""
        if name not in self._get:
            near = difflib.get_close_matches(name, self._get, 3)
            raise CheckpointError(
                self.path, name, expected="this tensor", found=f"no such name; close: {near}",
                remedy="check the framework's key prefix (midlayer. or layers.0.)",
            )  # fmt: skip
        return self._get[name]()


def _weight_files(path: Path, rule: str = ".*") -> list[tuple[Path, set[str] | None]]:
    """Files with the names to take from each (None: all); of an index, only names matching `rule`."""
    if path.is_file():
        return [(path, None)]
    for stem in ("model.safetensors", "pytorch_model.bin"):
        index = path / f"{stem}.index.json"
        if index.is_file():
            weight_map = read_json(index).get("weight_map")
            if not isinstance(weight_map, dict):
                raise CheckpointError(
                    index, "weight_map", expected="a dict of tensor name -> shard",
                    found=type(weight_map).__name__, remedy="download the index again",
                )  # fmt: skip
            shards: dict[str, set[str]] = {}
            for name, shard in weight_map.items():
                if re.fullmatch(rule, name):
                    shards.setdefault(str(shard), set()).add(name)
            for shard in shards:
                if Path(shard).name != shard or not (path / shard).is_file():
                    raise CheckpointError(
                        index, shard, expected="a shard beside the index", found="no such file",
                        remedy="download the missing shard",
                    )  # fmt: skip
            return [(path / shard, names) for shard, names in sorted(shards.items())]
        if (path / stem).is_file():
            return [(path / stem, None)]
    raise CheckpointError(
        path, "weights", expected="model.safetensors or pytorch_model.bin, or their index",
        found="neither" if path.is_dir() else "no such folder",
        remedy="point at the folder that holds config.json and the weights",
    )  # fmt: skip


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from disk, or CheckpointError."""
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError) as err:
        raise CheckpointError(
            path, "json", expected="a readable JSON file", found=str(err)[:200],
            remedy="download or write it again",
        ) from err  # fmt: skip
    if not isinstance(value, dict):
        raise CheckpointError(
            path, "json", expected="an object", found=type(value).__name__,
            remedy="this is not a model config",
        )  # fmt: skip
    return value


@dataclass(frozen=True)
class TargetHead:
    """What a draft needs of its target: embedding rows, final norm, lm_head. Nothing else is read.

    Attributes:
        embed: (V, H) mapped from disk where the file allows it; index it, do not copy it.
        norm: (H,) weight of the final RMSNorm.
        lm_head: (V, H); the embedding itself when tied.
        eps: of the final norm.
        n_layers: decoder layers of the target.
    """

    path: Path
    embed: Tensor
    norm: Tensor
    lm_head: Tensor
    eps: float
    n_layers: int
    config: dict[str, Any] = field(repr=False, default_factory=dict)

    @property
    def hidden_size(self) -> int:
        """H of the target."""
        return self.embed.shape[1]

    def logits(self, final: Tensor, *, final_kind: str, rows: Tensor | None = None) -> Tensor:
        """Target logits (..., V or len(rows)) in fp32 from its last state.

        Args:
            final: (..., H); normalised here unless `final_kind` is "post_norm".
            rows: vocabulary rows wanted; all if None.
        """
        x = final.float()
        if final_kind == "pre_norm":
            x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.norm.float()
        weight = self.lm_head if rows is None else self.lm_head[rows]
        return x @ weight.float().T


def load_target_head(path: str | Path) -> TargetHead:
    """Embedding, final norm and lm_head of a target: a Hugging Face folder or a `.gguf` file.

    Shards that hold none of the three are not opened.
    """
    path = Path(path)
    if path.suffix == ".gguf":
        return _target_head_from_gguf(path)
    config = read_json(path / "config.json")
    text = config.get("text_config", config)
    if not isinstance(text, dict) or not isinstance(text.get("num_hidden_layers"), int):
        raise CheckpointError(
            path / "config.json", "num_hidden_layers", expected="the number of decoder layers",
            found="none", remedy="give the target's own config.json",
        )  # fmt: skip
    names = {}
    for part, candidates in (
        ("embed", r"(.*\.)?embed_tokens\.weight"),
        ("norm", r"((language_)?model\.)*norm\.weight"),
        ("lm_head", r"(.*\.)?lm_head\.weight"),
    ):
        names[part] = candidates
    files = _weight_files(path, "|".join(names.values()))
    found: dict[str, Tensor] = {}
    for file, wanted in files:
        parts = {
            part: name
            for name in (wanted if wanted is not None else TensorFile(file))
            for part, rule in names.items()
            if re.fullmatch(rule, name)
        }
        if parts:
            shard = TensorFile(file)
            found |= {part: shard[name] for part, name in parts.items()}
    if "lm_head" not in found and text.get("tie_word_embeddings", True) and "embed" in found:
        found["lm_head"] = found["embed"]
    for part in names:
        if part not in found:
            raise CheckpointError(
                path, part, expected=f"a tensor matching {names[part]}", found="none",
                remedy="give a target in transformers' format (Llama-style names)",
            )  # fmt: skip
    return TargetHead(
        path, found["embed"], found["norm"], found["lm_head"],
        float(text.get("rms_norm_eps", 1e-6)), text["num_hidden_layers"], config,
    )  # fmt: skip


def _target_head_from_gguf(path: Path) -> TargetHead:
    from gguf import GGUFReader, dequantize

    try:
        reader = GGUFReader(path)
        tensors = {t.name: t for t in reader.tensors}
        arch = reader.fields["general.architecture"].contents()
        layers = int(reader.fields[f"{arch}.block_count"].contents())
        eps = float(reader.fields[f"{arch}.attention.layer_norm_rms_epsilon"].contents())
    except (ValueError, KeyError, OSError, IndexError) as err:
        raise CheckpointError(
            path, "gguf", expected="a complete GGUF model", found=str(err)[:200],
            remedy="unpack it again (python -m lib.target)",
        ) from err  # fmt: skip

    def read(name: str) -> Tensor:
        if name not in tensors:
            raise CheckpointError(
                path, name, expected="this tensor", found="none of that name",
                remedy="give a GGUF of a Llama-style model",
            )  # fmt: skip
        return torch.from_numpy(dequantize(tensors[name].data, tensors[name].tensor_type))

    embed = read("token_embd.weight")
    head = read("output.weight") if "output.weight" in tensors else embed
    return TargetHead(path, embed, read("output_norm.weight"), head, eps, layers)


@dataclass(frozen=True)
class Layer:
    """Weights of one decoder layer. The first takes 2H wide input and has `hidden_norm`."""

    q: Tensor
    k: Tensor
    v: Tensor
    o: Tensor
    gate: Tensor
    up: Tensor
    down: Tensor
    input_layernorm: Tensor
    post_attention_layernorm: Tensor
    hidden_norm: Tensor | None = None
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    q_bias: Tensor | None = None
    k_bias: Tensor | None = None
    v_bias: Tensor | None = None
    o_bias: Tensor | None = None


@dataclass(frozen=True)
class Draft:
    """An EAGLE-3 draft: weights plus the contract its files declare.

    Attributes:
        fc: (H, k * Ht), or None for drafts without one.
        layers: first layer EAGLE-3 style, further ones plain.
        norm: (H,) final norm; lm_head: (Vd, H).
        embed: (V, H), often the target's.
        d2t: (Vd,) int64 as stored, or None.
        contract: what the files declare, with the source of each field.
        keys: tensor name -> what became of it.
        notes: every default and every borrowed tensor.
    """

    name: str
    path: Path
    contract: Contract
    fc: Tensor | None
    layers: tuple[Layer, ...]
    norm: Tensor
    lm_head: Tensor
    embed: Tensor
    d2t: Tensor | None
    t2d: Tensor | None
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    target_vocab: int
    input_norm: Tensor | None = None
    fc_norm: tuple[Tensor, ...] = ()
    fc_bias: Tensor | None = None
    keys: dict[str, str] = field(default_factory=dict, repr=False)
    notes: tuple[str, ...] = ()
    config: dict[str, Any] = field(default_factory=dict, repr=False)

    @property
    def hidden_size(self) -> int:
        """H."""
        return self.norm.shape[0]

    @property
    def draft_vocab(self) -> int:
        """Vd."""
        return self.lm_head.shape[0]

    @property
    def n_slots(self) -> int:
        """k, the number of states `fc` takes."""
        return len(self.contract.taps)

    def to_target(self, draft_ids: Tensor, vocab_map: str | None = None) -> Tensor:
        """Draft vocabulary ids -> target ids, under the contract's (or the given) map mode."""
        mode = vocab_map or self.contract.vocab_map
        if mode == "identity" or self.d2t is None:
            return draft_ids
        offsets = self.d2t.to(draft_ids.device)[draft_ids]
        return offsets + draft_ids if mode == "offset" else offsets

    def in_vocab(self) -> Tensor:
        """(V,) bool: target ids the draft can produce, from the map that it is used with."""
        table = torch.zeros(self.target_vocab, dtype=torch.bool)
        ids = self.to_target(torch.arange(self.draft_vocab))
        table[ids[(ids >= 0) & (ids < self.target_vocab)]] = True
        return table


def load_draft(
    path: str | Path,
    *,
    target: TargetHead | None = None,
    convention: str = "vllm",
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> Draft:
    """Load a draft in speculators' format or the `midlayer.*` family (SGLang, SpecForge, EAGLE).

    Args:
        path: folder with `config.json` and the weights.
        target: supplies embeddings (and lm_head) that the draft does not own, and the number of
            target layers when the config names no taps.
        convention: whose reading of the tap ids to declare, a key of `taps.CONVENTIONS`. The file
            does not say; engines differ by one block (`taps.hypotheses` lists the readings).
        device, dtype: for the weights. The embedding table stays where it is mapped.

    Raises CheckpointError; never returns a half-loaded draft.
    """
    path = Path(path)
    config = read_json(path / "config.json")
    tensors = TensorFile(path)
    return _Loader(path, config, tensors, target, convention).draft(torch.device(device), dtype)


class _Loader:
    """One loading; keeps account of keys and notes while it goes."""

    # Stored name -> canonical name. The two families differ only in the layer prefix.
    PREFIXES = ((r"^midlayer\.", "layers.0."), (r"^model\.", ""))

    def __init__(self, path, config, tensors, target, convention) -> None:
        self.convention = convention
        self.path, self.config, self.tensors, self.target = path, config, tensors, target
        self.keys: dict[str, str] = {}
        self.notes: list[str] = []
        self.names: dict[str, str] = {}
        for stored in tensors:
            name = stored
            for rule, prefix in self.PREFIXES:
                name = re.sub(rule, prefix, name)
            if name in self.names:
                raise CheckpointError(
                    path, stored, expected="one tensor per meaning",
                    found=f"{self.names[name]} has the same one", remedy="remove one of the two",
                )  # fmt: skip
            self.names[name] = stored
        # speculators nests the layer's config; the other family is flat.
        self.nested = "transformer_layer_config" in config
        self.layer = self.section(config, "transformer_layer_config") if self.nested else config

    def take(self, name: str, shape: tuple[int | None, ...], *, required: bool = True):
        """One tensor, shape-checked; None if absent and not required."""
        if name not in self.names:
            if not required:
                return None
            return self.tensors[name]  # raises with close matches
        stored = self.names[name]
        tensor = self.tensors[stored]
        where = self.tensors.origin[stored]
        wanted = tuple("any" if s is None else s for s in shape)

        def fits(found: tuple[int, ...]) -> bool:
            return len(found) == len(shape) and all(
                s is None or s == t for s, t in zip(shape, found, strict=True)
            )

        if not fits(tensor.shape):
            hint = "check hidden_size and the number of slots in config.json"
            if fits(tensor.shape[::-1]):
                hint = "it is stored transposed: save weight.T"
            raise CheckpointError(
                where, stored, expected=str(wanted), found=str(tuple(tensor.shape)), remedy=hint
            )
        if not tensor.dtype.is_floating_point and name not in ("d2t", "t2d"):
            raise CheckpointError(
                where, stored, expected="a floating-point weight", found=str(tensor.dtype),
                remedy="this looks quantised: dequantise it first",
            )  # fmt: skip
        self.keys[stored] = "used"
        return tensor

    def setting(self, name: str, default: Any, why: str) -> tuple[Any, Source]:
        """A config value with its source; absent or null means `default`, which is then noted."""
        eagle = self.section(self.config, "eagle_config")
        for place, values in (("config.json", self.config), ("config.json: eagle_config", eagle)):
            if values.get(name) is not None:
                return values[name], Source("checkpoint", f"{place}: {name}")
        self.notes.append(f"{name} not in config.json: {default!r} ({why})")
        return default, Source("framework default", why)

    def section(self, values: dict, name: str) -> dict:
        """A nested object of the config; absent or null means empty."""
        value = values.get(name) or {}
        if not isinstance(value, dict):
            raise CheckpointError(
                self.path / "config.json", name, expected="an object", found=repr(value),
                remedy="copy this part of config.json from the original export",
            )  # fmt: skip
        return value

    def number(self, values: dict, name: str, default: int | float | None = None):
        """A positive number of the config; absent or null means the default, if there is one."""
        value = default if values.get(name) is None else values[name]
        if not isinstance(value, int | float) or isinstance(value, bool) or value <= 0:
            raise CheckpointError(
                self.path / "config.json", name, expected="a positive number", found=repr(value),
                remedy="write the value the draft was trained with into config.json",
            )  # fmt: skip
        return value

    def draft(self, device: torch.device, dtype: torch.dtype) -> Draft:
        layer, take = self.layer, self.take
        hidden = int(self.number(layer, "hidden_size"))
        heads = int(self.number(layer, "num_attention_heads"))
        kv_heads = int(self.number(layer, "num_key_value_heads", heads))
        head_dim = int(self.number(layer, "head_dim", hidden // heads))
        vocab = int(self.number(layer, "vocab_size"))
        target_hidden = int(self.number(self.config, "target_hidden_size", hidden))

        fc = take("fc.weight", (hidden, None))
        if fc.shape[1] % target_hidden:
            raise CheckpointError(
                self.path, "fc.weight", expected=f"(hidden {hidden}, slots x {target_hidden})",
                found=str(tuple(fc.shape)), remedy="set target_hidden_size in config.json, or "
                "transpose the tensor if its sides are swapped",
            )  # fmt: skip
        slots = fc.shape[1] // target_hidden
        embed = take("embed_tokens.weight", (vocab, hidden), required=False)
        if embed is None:
            embed = self._borrow("embed", "embed_tokens.weight", hidden)
        elif not torch.isfinite(embed[:16]).all():
            raise CheckpointError(
                self.path, "embed_tokens.weight", expected="finite values", found="NaN or Inf",
                remedy="the table was never loaded before saving: drop it and pass target=",
            )  # fmt: skip
        lm_head = take("lm_head.weight", (None, hidden), required=False)
        if lm_head is None:
            lm_head = self._borrow("lm_head", "lm_head.weight", hidden)
        d2t, t2d = self._maps(lm_head.shape[0], vocab)
        fc_norm = [
            take(f"fc_norm.{i}.weight", (target_hidden,))
            for i in range(slots)
            if any(name.startswith("fc_norm.") for name in self.names)
        ]
        parts = {
            "fc": fc,
            "fc_bias": take("fc.bias", (hidden,), required=False),
            "norm": take("norm.weight", (hidden,)),
            "lm_head": lm_head,
            "input_norm": take("input_norm.weight", (slots * target_hidden,), required=False),
        }
        layers = self._layers(hidden, heads, kv_heads, head_dim)
        contract = self._contract(slots, bool(fc_norm), parts["input_norm"] is not None, d2t)
        self._explain()

        def place(tensor: Tensor | None, name: str = "") -> Tensor | None:
            if tensor is None:
                return None
            if not torch.isfinite(tensor).all():
                raise CheckpointError(
                    self.path, name, expected="finite values", found="NaN or Inf",
                    remedy="the training run diverged or the tensor was never initialised",
                )  # fmt: skip
            return tensor.to(device=device, dtype=dtype)

        return Draft(
            name=self.path.name,
            path=self.path,
            contract=contract,
            layers=tuple(
                Layer(**{k: place(t, f"layers.{i}.{k}") for k, t in weights.items()})
                for i, weights in enumerate(layers)
            ),
            embed=embed,
            d2t=d2t,
            t2d=t2d,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            eps=float(self.number(layer, "rms_norm_eps", 1e-6)),
            target_vocab=vocab,
            fc_norm=tuple(place(t, "fc_norm") for t in fc_norm),
            keys=self.keys,
            notes=tuple(self.notes),
            config=self.config,
            **{name: place(tensor, name) for name, tensor in parts.items()},
        )

    def _borrow(self, part: str, name: str, hidden: int) -> Tensor:
        if self.target is None:
            raise CheckpointError(
                self.path, name, expected="this tensor, or a target to take it from",
                found="neither", remedy="pass target=load_target_head(TARGET)",
            )  # fmt: skip
        tensor = getattr(self.target, part)
        if tensor.shape[1] != hidden:
            raise CheckpointError(
                self.path, name, expected=f"a target of hidden size {hidden}",
                found=f"{tensor.shape[1]} in {self.target.path}",
                remedy="this draft belongs to another target",
            )  # fmt: skip
        self.notes.append(f"{name} not in the checkpoint: the target's is used")
        return tensor

    def _maps(self, rows: int, vocab: int) -> tuple[Tensor | None, Tensor | None]:
        declared = self.config.get("draft_vocab_size")
        if declared is not None and declared != rows:
            raise CheckpointError(
                self.path, "lm_head.weight", expected=f"draft_vocab_size {declared} rows",
                found=f"{rows} rows", remedy="weights and config are of different exports",
            )  # fmt: skip
        d2t = self.take("d2t", (rows,), required=False)
        t2d = self.take("t2d", (vocab,), required=False)
        if d2t is None and rows < vocab:
            raise CheckpointError(
                self.path, "d2t", expected=f"a map from {rows} draft ids to {vocab} target ids",
                found="no d2t tensor", remedy="without it engines silently use ids 0.."
                f"{rows - 1} (fault 19); recover it from the training run's vocab mapping",
            )  # fmt: skip
        if d2t is not None and (d2t.dtype.is_floating_point or d2t.dtype == torch.bool):
            raise CheckpointError(
                self.path, "d2t", expected="integers", found=str(d2t.dtype),
                remedy="save the map as int64",
            )  # fmt: skip
        if d2t is not None:
            self._note_maps(torch.arange(rows) + d2t.long(), t2d, vocab)
        return (None if d2t is None else d2t.long()), (None if t2d is None else t2d.bool())

    def _note_maps(self, ids: Tensor, t2d: Tensor | None, vocab: int) -> None:
        """Doubts about a map that loads: a wrong one is to be diagnosed, not refused."""
        rows, inside = len(ids), ids[(ids >= 0) & (ids < vocab)]
        if outside := rows - len(inside):
            self.notes.append(f"d2t sends {outside} of {rows} draft ids outside 0..{vocab - 1} (fault 20)")
        if t2d is not None and t2d.any():  # some writers leave it all zero when nothing is pruned
            reached = torch.zeros(vocab, dtype=torch.bool).index_fill_(0, inside, True)
            if differ := int((reached ^ t2d.bool()).sum()):
                self.notes.append(f"d2t and t2d disagree on {differ} target ids (fault 22)")

    def _layers(self, hidden: int, heads: int, kv_heads: int, head_dim: int) -> list[dict]:
        present = {int(m[1]) for n in self.names if (m := re.match(r"layers\.(\d+)\.", n))}
        declared = int(self.number(self.layer, "num_hidden_layers", 1))
        if self.nested and present != set(range(declared)):
            raise CheckpointError(
                self.path, "layers", expected=f"layers 0..{declared - 1} (num_hidden_layers)",
                found=f"layers {sorted(present)}",
                remedy="layers were lost in conversion (fault 27), or the config is another model's",
            )  # fmt: skip
        if not present or present != set(range(len(present))):
            raise CheckpointError(
                self.path, "layers", expected="midlayer.* or layers.0.* tensors",
                found=f"layers {sorted(present)}", remedy="this is not an EAGLE-3 draft",
            )  # fmt: skip
        inner, q_width, kv_width = None, heads * head_dim, kv_heads * head_dim
        layers = []
        for i in sorted(present):
            p, width = f"layers.{i}.", 2 * hidden if i == 0 else hidden

            def take(name: str, *shape: int | None, required: bool = True, p: str = p):
                return self.take(p + name, shape, required=required)

            gate = take("mlp.gate_proj.weight", None, hidden)
            inner = gate.shape[0]
            layers.append(
                {
                    "q": take("self_attn.q_proj.weight", q_width, width),
                    "k": take("self_attn.k_proj.weight", kv_width, width),
                    "v": take("self_attn.v_proj.weight", kv_width, width),
                    "o": take("self_attn.o_proj.weight", hidden, q_width),
                    "gate": gate,
                    "up": take("mlp.up_proj.weight", inner, hidden),
                    "down": take("mlp.down_proj.weight", hidden, inner),
                    "input_layernorm": take("input_layernorm.weight", hidden),
                    "post_attention_layernorm": take("post_attention_layernorm.weight", hidden),
                    "hidden_norm": take("hidden_norm.weight", hidden, required=i == 0),
                    "q_norm": take("self_attn.q_norm.weight", head_dim, required=False),
                    "k_norm": take("self_attn.k_norm.weight", head_dim, required=False),
                    "q_bias": take("self_attn.q_proj.bias", q_width, required=False),
                    "k_bias": take("self_attn.k_proj.bias", kv_width, required=False),
                    "v_bias": take("self_attn.v_proj.bias", kv_width, required=False),
                    "o_bias": take("self_attn.o_proj.bias", hidden, required=False),
                }
            )
        return layers

    def _explain(self) -> None:
        ignored = {
            r"rotary_emb\..*": "computed from the config",
            r"verifier_(norm|lm_head)\.weight": "the trainer's copy of target weights",
        }
        for name, stored in self.names.items():
            if stored in self.keys:
                continue
            why = next((w for rule, w in ignored.items() if re.fullmatch(rule, name)), None)
            if why is None:
                raise CheckpointError(
                    self.tensors.origin[stored], stored, expected="a tensor this reader knows",
                    found="an unknown name", remedy="an engine may skip it silently (faults 16, "
                    "28); if it is harmless, remove it from the file",
                )  # fmt: skip
            self.keys[stored] = f"ignored: {why}"

    def _contract(self, slots: int, has_fc_norm: bool, has_input_norm: bool, d2t) -> Contract:
        sources: dict[str, Source] = {}
        residual, sources["norm_before_residual"] = self.setting(
            "norm_before_residual", False, "EAGLE, SGLang, vLLM for raw configs"
        )
        output, sources["feedback"] = self.setting("norm_output", False, "EAGLE-3 as published")
        if has_input_norm and has_fc_norm:
            raise CheckpointError(
                self.path, "fc_norm", expected="input_norm or fc_norm, not both", found="both",
                remedy="remove the one that the draft was trained without",
            )  # fmt: skip
        for name, value in (
            ("norm_before_residual", residual),
            ("norm_output", output),
            *((flag, self.config.get(flag) or False) for flag in ("norm_before_fc", "fc_norm")),
        ):
            if value not in (True, False):
                raise CheckpointError(
                    self.path / "config.json", name, expected="true or false", found=repr(value),
                    remedy="write it without quotes",
                )  # fmt: skip
        for flag, present in (("norm_before_fc", has_input_norm), ("fc_norm", has_fc_norm)):
            declared = bool(self.config.get(flag))
            if declared != present:
                raise CheckpointError(
                    self.path, flag, expected=f"tensors to match config.json ({flag}={declared})",
                    found="the tensors" if present else "no such tensors",
                    remedy="config and weights disagree; an engine would drop one silently (fault 16)",
                )  # fmt: skip
        kind = "input_norm" if has_input_norm else "fc_norm" if has_fc_norm else "none"
        sources["fc_input_norm"] = Source("checkpoint", "tensors present in the file")
        sources["vocab_map"] = Source("checkpoint", "d2t present" if d2t is not None else "no d2t")
        taps, sources["taps"] = self._taps(slots)
        rope, sources["rope"] = self._rope()
        return Contract(
            taps=taps, norm_before_residual=bool(residual), fc_input_norm=kind,
            feedback="post_norm" if output else "pre_norm", rope=rope,
            vocab_map="offset" if d2t is not None else "identity", sources=sources,
        )  # fmt: skip

    def _taps(self, slots: int):
        ids, source = self.setting(
            "eagle_aux_hidden_state_layer_ids", None, "(2, n//2, n-3), EAGLE modeling_llama_kv.py"
        )
        if ids is None:
            if self.target is None:
                raise CheckpointError(
                    self.path / "config.json", "eagle_aux_hidden_state_layer_ids",
                    expected="tap ids, or a target whose depth gives the default triple",
                    found="neither", remedy="pass target=, or write the ids into config.json",
                )  # fmt: skip
            taps: tuple[Tap, ...] = default_triple(self.target.n_layers)
        else:
            if not isinstance(ids, list) or not all(isinstance(i, int) for i in ids):
                raise CheckpointError(
                    self.path / "config.json", "eagle_aux_hidden_state_layer_ids",
                    expected="a list of whole numbers", found=repr(ids), remedy="fix the config",
                )  # fmt: skip
            n = self.target.n_layers if self.target else max(ids, default=0) + 1
            try:
                taps = taps_from_ids(ids, self.convention, n)
            except ContractError as err:
                if err.where == "convention":  # the caller's argument, not the file
                    raise
                raise CheckpointError(
                    self.path / "config.json", err.field, expected=err.expected, found=err.found,
                    remedy=err.remedy,
                ) from err  # fmt: skip
            source = Source("checkpoint", f"{source.detail}, read as {self.convention} does")
        if len(taps) != slots:
            raise CheckpointError(
                self.path / "config.json", "eagle_aux_hidden_state_layer_ids",
                expected=f"{slots} ids, one per slot of fc.weight", found=f"{len(taps)}: {taps}",
                remedy="weights and config are of different drafts",
            )  # fmt: skip
        return taps, source

    def _rope(self) -> tuple[Rope, Source]:
        new, old = (self.section(self.layer, name) for name in ("rope_parameters", "rope_scaling"))
        flat = self.layer.get("rope_theta")
        values = dict(new or old)
        theta = values.pop("rope_theta", flat)
        for stated in (flat, theta):
            self.number({"rope_theta": stated}, "rope_theta", 10000.0)
        kind = values.pop("rope_type", values.pop("type", "default"))
        partial = self.layer.get("partial_rotary_factor")
        part = {"partial_rotary_factor": values.pop("partial_rotary_factor", partial)}
        partial = float(self.number(part, "partial_rotary_factor", 1.0))
        if new and flat is not None and new.get("rope_theta", flat) != flat:
            self.notes.append(
                f"rope_theta {flat:g} and rope_parameters.rope_theta {new['rope_theta']:g} disagree: "
                "the latter is used (fault 11)"
            )
        if kind not in ("default", "linear", "llama3", "yarn"):
            raise CheckpointError(
                self.path / "config.json", "rope_type", expected="default, linear, llama3 or yarn",
                found=repr(kind), remedy="this rotary variant is not supported",
            )  # fmt: skip
        if theta is None:
            self.notes.append("rope_theta not in config.json: 10000 (transformers' class default)")
            theta, source = 10000.0, Source("framework default", "transformers, 10000")
        else:
            source = Source("checkpoint", "config.json: " + ("rope_parameters" if new else "rope_theta"))
        numbers = {
            k: float(v) for k, v in values.items() if isinstance(v, int | float) and not isinstance(v, bool)
        }
        return Rope(float(theta), kind, tuple(sorted(numbers.items())), partial=partial), source
