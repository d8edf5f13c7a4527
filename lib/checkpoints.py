"""Draft checkpoints of every origin: weights plus the contract that their files declare.

Every key of a file is used, ignored by a named rule, or an error. What is not in the file and has
to come from elsewhere (embeddings, lm_head, a default) is said in `Draft.notes`.

Axes: H draft hidden, Ht target hidden, k slots, V target vocabulary, Vd draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lib.contract import Contract
from lib.draft_config import DraftConfig
from lib.draft_formats import draft_folder, matches, meta_file
from lib.draft_layers import read_layers
from lib.draft_tensors import DraftTensors, finite
from lib.errors import CheckpointError
from lib.formats import Match
from lib.mla import Latent
from lib.target_head import TargetHead
from lib.vocab_maps import read_maps
from lib.weights import TensorFile


@dataclass(frozen=True)
class Layer:
    """Weights of one decoder layer. The first takes 2H wide input and has `hidden_norm`.

    Either q, k and v are there, or `latent` (DeepSeek-style attention, `lib.mla`) stands for them.
    """

    q: Tensor | None
    k: Tensor | None
    v: Tensor | None
    o: Tensor
    gate: Tensor
    up: Tensor
    down: Tensor
    input_layernorm: Tensor
    post_attention_layernorm: Tensor
    hidden_norm: Tensor | None = None
    latent: Latent | None = None
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
        format: what the files could be (`draft_formats`), e.g. "specforge or eagle".
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
    format: str = ""

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

    def draft_ids(self, vocab_map: str | None = None) -> Tensor:
        """(V,) the draft id that means each target id under a map; -1 where there is none.

        Under a wrong map several may mean the same: the last one is taken.
        """
        ids = torch.arange(self.draft_vocab)
        produced = self.to_target(ids, vocab_map)
        inside = (produced >= 0) & (produced < self.target_vocab)
        return torch.full((self.target_vocab,), -1).scatter_reduce(0, produced[inside], ids[inside], "amax")

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
    dtype: torch.dtype | None = torch.float32,
) -> Draft:
    """Load a draft of any framework in `draft_formats.DRAFT_FORMATS`.

    Args:
        path: folder with `config.json` and the weights, a weights file beside its `config.json`, or an
            Automodel checkpoint around them.
        target: supplies embeddings (and lm_head) that the draft does not own, and the number of
            target layers when the config names no taps.
        convention: whose reading of the tap ids to declare, a key of `taps.CONVENTIONS`. The file
            does not say; engines differ by one block, and the notes list the other readings.
        device, dtype: for the weights; None keeps the stored dtype, safetensors then stay mapped. The
            embedding table stays where it is mapped.

    Raises CheckpointError; never returns a half-loaded draft.
    """
    path = Path(path)
    folder = draft_folder(path)
    config = DraftConfig(folder, target.n_layers if target else None, convention)
    file = TensorFile(path if path.is_file() else folder)
    tensors = DraftTensors(path, folder, file, config.values)
    found = matches(folder, config.values, file)
    config.formats = tuple(match.format for match in found)
    return _Loader(path, config, tensors, target, found).draft(torch.device(device), dtype)


class _Loader:
    """One loading: which parts there must be, and where those that the file lacks come from."""

    def __init__(
        self, path: Path, config: DraftConfig, tensors: DraftTensors, target: TargetHead | None,
        found: Sequence[Match],
    ) -> None:  # fmt: skip
        self.path, self.config, self.tensors, self.target = path, config, tensors, target
        self.format = " or ".join(config.formats) or "unrecognised"
        self.notes = [f"format {match}" for match in found] if config.formats != ("speculators",) else []
        if not found:
            self.notes.append("format not recognised: read by tensor names")

    def draft(self, device: torch.device, dtype: torch.dtype | None) -> Draft:
        config, tensors = self.config, self.tensors
        tensors.dtype = dtype or tensors.dtype
        take = tensors.take
        hidden = config.whole(config.layer, "hidden_size")
        heads, kv_heads, head_dim = config.heads(hidden)
        vocab = config.whole(config.layer, "vocab_size")
        target_hidden = config.whole(config.values, "target_hidden_size", hidden)

        fc, slots = self._fc(hidden, target_hidden)
        embed = take("embed_tokens.weight", vocab, hidden, required=False)
        if embed is None:
            embed = self._borrow("embed", "embed_tokens.weight", hidden, vocab)
        elif not torch.isfinite(embed[:16]).all():
            raise CheckpointError(
                self.path, "embed_tokens.weight", expected="finite values", found="NaN or Inf",
                remedy="the table was never loaded before saving: drop it and pass target=",
            )  # fmt: skip
        lm_head = self._lm_head(hidden, vocab, embed)
        rows = lm_head.shape[0]
        declared = config.values.get("draft_vocab_size")
        if declared is not None and declared != rows:
            raise CheckpointError(
                self.path, "lm_head.weight", expected=f"draft_vocab_size {declared} rows",
                found=f"{rows} rows", remedy="weights and config are of different exports",
            )  # fmt: skip
        d2t, t2d, doubts = read_maps(self.path, tensors, rows, vocab, meta_file(config.path))
        self.notes += doubts
        fc_norm = [
            take(f"fc_norm.{i}.weight", target_hidden)
            for i in range(slots)
            if any(name.startswith("fc_norm.") for name in tensors)
        ]
        parts = {
            "fc": fc,
            "fc_bias": take("fc.bias", hidden, required=False) if config.use_fc else None,
            "norm": self._norm(hidden, lm_head.dtype),
            "lm_head": lm_head,
            "input_norm": take("input_norm.weight", slots * target_hidden, required=False),
        }
        self._note_bias(parts["fc_bias"])
        layers = read_layers(self.path, tensors, config, hidden)
        contract = config.contract(
            slots,
            has_fc_norm=bool(fc_norm),
            has_input_norm=parts["input_norm"] is not None,
            has_map=d2t is not None,
            latent=layers[0]["latent"] is not None,
        )
        self.notes += tensors.explain()
        place = _Placer(self.path, device, tensors.dtype)
        draft = Draft(
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
            eps=config.eps(),
            target_vocab=vocab,
            fc_norm=tuple(place(t, "fc_norm") for t in fc_norm),
            keys=tensors.keys,
            config=config.values,
            format=self.format,
            **{name: place(tensor, name) for name, tensor in parts.items()},
        )
        if dtype is None and place.changed:
            self.notes.append(f"stored in another dtype than {tensors.dtype}, converted: {place.changed}")
        return replace(draft, notes=(*config.notes, *self.notes))

    def _fc(self, hidden: int, target_hidden: int) -> tuple[Tensor | None, int]:
        """`fc.weight` and its number of slots; None and one for drafts on the final state alone."""
        if not self.config.use_fc:
            for name in ("fc.weight", "fc.bias"):
                if name in self.tensors:
                    self.tensors.ignore(name, "use_aux_hidden_state is false, engines skip it")
                    self.notes.append(f"{name} is in the file and ignored: use_aux_hidden_state is false")
            if target_hidden != hidden:
                raise CheckpointError(
                    self.path, "use_aux_hidden_state", expected="target_hidden_size equal to hidden_size",
                    found=f"{target_hidden} and {hidden}, and no fc in use to come between",
                    remedy="set use_aux_hidden_state to true if the draft was trained with fc",
                )  # fmt: skip
            return None, 1
        fc = self.tensors.take("fc.weight", hidden, None)
        if fc.shape[1] % target_hidden:
            raise CheckpointError(
                self.path, "fc.weight", expected=f"(hidden {hidden}, slots x {target_hidden})",
                found=str(tuple(fc.shape)), remedy="set target_hidden_size in config.json, or "
                "transpose the tensor if its sides are swapped",
            )  # fmt: skip
        return fc, fc.shape[1] // target_hidden

    def _norm(self, hidden: int, dtype: torch.dtype) -> Tensor:
        """The final norm; ones, unused, for drafts without (Model-Optimizer `use_last_layernorm`)."""
        if self.config.last_norm:
            return self.tensors.take("norm.weight", hidden)
        if "norm.weight" in self.tensors:
            raise CheckpointError(
                self.path, "use_last_layernorm", expected="no norm.weight, for the config says false",
                found="norm.weight", remedy="engines would apply it: set use_last_layernorm to true "
                "if the draft was trained with it, else remove the tensor",
            )  # fmt: skip
        self.notes.append("use_last_layernorm is false: lm_head sees the last layer's output as it is")
        return torch.ones(hidden, dtype=dtype)

    def _lm_head(self, hidden: int, vocab: int, embed: Tensor) -> Tensor:
        tied = self.config.flag("tie_word_embeddings", False)
        lm_head = self.tensors.take("lm_head.weight", None, hidden, required=False)
        if lm_head is None and tied and "embed_tokens.weight" in self.tensors:
            self.notes.append("lm_head.weight not in the checkpoint: embed_tokens (tie_word_embeddings)")
            return embed
        if lm_head is None:
            return self._borrow("lm_head", "lm_head.weight", hidden, vocab)
        if tied:
            self.notes.append(
                "tie_word_embeddings is true, and lm_head is in the file and used; SGLang would take the "
                "embedding in its place"
            )
        return lm_head

    def _note_bias(self, fc_bias: Tensor | None) -> None:
        declared = bool(self.config.values.get("bias"))
        if declared and fc_bias is None and self.config.use_fc:
            self.notes.append(
                "bias is true and the file has no fc.bias: none is used, as in EAGLE's cnets.py; SGLang "
                "would add one that is never loaded"
            )
        if fc_bias is not None and not declared:
            self.notes.append("fc.bias is in the file and used; SGLang drops it unless config has bias: true")

    def _borrow(self, part: str, name: str, hidden: int, vocab: int) -> Tensor:
        """The target's tensor: of the draft's width, with a row for every id of its vocabulary."""
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
        rows = tensor.shape[0]
        if rows < vocab:
            raise CheckpointError(
                self.path, name, expected=f"a target with the {vocab} rows of vocab_size",
                found=f"{rows} in {self.target.path}",
                remedy="this draft belongs to another target, or vocab_size is not the target's",
            )  # fmt: skip
        more = "" if rows == vocab else f", whose {rows} rows are more than vocab_size {vocab}"
        self.notes.append(f"{name} not in the checkpoint: the target's is used{more}")
        return tensor


class _Placer:
    """Puts checked tensors where they are wanted, without a copy where nothing changes."""

    def __init__(self, path: Path, device: torch.device, dtype: torch.dtype) -> None:
        self.path, self.device, self.dtype = path, device, dtype
        self.changed: list[str] = []

    def __call__(self, value: Any, name: str) -> Any:
        """A tensor, the tensors of a `Latent`, or None as it is."""
        if isinstance(value, Latent):
            return replace(
                value,
                **{k: self(t, f"{name}.{k}") for k, t in vars(value).items() if isinstance(t, Tensor)},
            )
        if value is None:
            return None
        if value.dtype != self.dtype:
            self.changed.append(name)
        return finite(self.path, name, value).to(device=self.device, dtype=self.dtype)
