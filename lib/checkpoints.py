"""Draft checkpoints of every origin: weights plus the contract that their files declare.

Every key of a file is used, ignored by a named rule, or an error. What is not in the file and has
to come from elsewhere (embeddings, lm_head, a default) is said in `Draft.notes`.

Axes: H draft hidden, Ht target hidden, k slots, V target vocabulary, Vd draft vocabulary.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lib.contract import Contract
from lib.draft_config import DraftConfig
from lib.errors import CheckpointError
from lib.target_head import TargetHead
from lib.weights import TensorFile


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
        """(V,) bool: target ids the draft can produce under its declared map, whatever contract is tried."""
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
    return _Loader(path, TensorFile(path), target, convention).draft(torch.device(device), dtype)


class _Loader:
    """One loading; keeps account of keys and notes while it goes."""

    # Stored name -> canonical name. The two families differ only in the layer prefix.
    PREFIXES = ((r"^midlayer\.", "layers.0."), (r"^model\.", ""))

    def __init__(self, path: Path, tensors: TensorFile, target: TargetHead | None, convention: str) -> None:
        self.path, self.tensors, self.target = path, tensors, target
        self.config = DraftConfig(path, target.n_layers if target else None, convention)
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

    def draft(self, device: torch.device, dtype: torch.dtype) -> Draft:
        config, take = self.config, self.take
        layer, number = config.layer, config.number
        hidden = int(number(layer, "hidden_size"))
        heads = int(number(layer, "num_attention_heads"))
        kv_heads = int(number(layer, "num_key_value_heads", heads))
        head_dim = int(number(layer, "head_dim", hidden // heads))
        vocab = int(number(layer, "vocab_size"))
        target_hidden = int(number(config.values, "target_hidden_size", hidden))

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
        contract = config.contract(
            slots,
            has_fc_norm=bool(fc_norm),
            has_input_norm=parts["input_norm"] is not None,
            has_map=d2t is not None,
        )
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
            eps=float(number(layer, "rms_norm_eps", 1e-6)),
            target_vocab=vocab,
            fc_norm=tuple(place(t, "fc_norm") for t in fc_norm),
            keys=self.keys,
            notes=(*config.notes, *self.notes),
            config=config.values,
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
        declared = self.config.values.get("draft_vocab_size")
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
        declared = int(self.config.number(self.config.layer, "num_hidden_layers", 1))
        if self.config.nested and present != set(range(declared)):
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
