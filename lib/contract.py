"""The contract: everything trainer and engine must agree on, as one frozen value.

An EAGLE-3 draft is right or wrong only *under a contract*. The incident is one field of it:
taps (embed, layer3, layer31) in training, (layer3, layer31, layer59) in serving. Every field says
where its value came from, because a default that nobody chose is where silent failures live.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType
from typing import Any, Literal

from lib.errors import ContractError
from lib.taps import Stored, Tap, parse_tap

Origin = Literal["checkpoint", "framework default", "user", "inferred"]


@dataclass(frozen=True)
class Source:
    """Who decided a field.

    `detail` names the file and key, the framework, or the evidence.
    """

    origin: Origin
    detail: str = ""

    def __str__(self) -> str:
        """`checkpoint (config.json: norm_before_residual)`."""
        return f"{self.origin} ({self.detail})" if self.detail else self.origin


@dataclass(frozen=True)
class Rope:
    """Rotary settings of the draft's own attention.

    Attributes:
        theta: base of the frequencies.
        kind: "default", "linear", "llama3" or "yarn"; formulas as in transformers'
            `modeling_rope_utils.py`, which computes them here too.
        params: the remaining `rope_parameters` keys (factor, low_freq_factor, ...), sorted pairs.
        interleaved: pairs (0,1),(2,3).. (GPT-J) in place of halves (NeoX).
        partial: share of the head dimension that is rotated.
    """

    theta: float = 10000.0
    kind: str = "default"
    params: tuple[tuple[str, float], ...] = ()
    interleaved: bool = False
    partial: float = 1.0

    def __str__(self) -> str:
        """Short form for tables and diffs."""
        extra = "".join(f" {k}={v:g}" for k, v in self.params)
        layout = " interleaved" if self.interleaved else ""
        part = f" partial={self.partial:g}" if self.partial != 1 else ""
        return f"{self.kind} theta={self.theta:g}{extra}{layout}{part}"


@dataclass(frozen=True, kw_only=True)
class Contract:
    """The interface between captured states, a draft, and the engine that feeds it.

    Attributes:
        taps: which state fills each slot of `fc`, in slot order.
        token_shift: the state at position t is paired with token t + token_shift (1 in EAGLE-3).
        fc_input_norm: norms before `fc`: "none", "input_norm" (one RMSNorm over all slots,
            speculators `norm_before_fc`) or "fc_norm" (one RMSNorm per slot).
        use_fc: False bypasses `fc`: the last slot alone is the draft's hidden state.
        norm_before_residual: the residual is hidden_norm(h) (True) or h (False).
        head_norm: lm_head sees norm(h) (True, plain EAGLE-3) or h (False).
        feedback: the state passed to the next depth: "pre_norm" or "post_norm" (EAGLE 3.1,
            speculators `norm_output`).
        rope: rotary settings.
        position_offset: position of the first pair; a constant offset is invisible to rotary.
        position_step: how far the position advances per depth (1; 0 is fault 9, 2 is fault 8).
        max_position: positions are clamped to max_position - 1; None for no clamp.
        vocab_map: draft id i means target id i + d2t[i] ("offset"), d2t[i] ("absolute") or i
            ("identity").
        embed_scale: factor on the token embeddings (Gemma: sqrt(hidden size)).
        sources: field name -> Source. Fields without an entry came from this class's defaults.
    """

    taps: tuple[Tap | Stored, ...]
    token_shift: int = 1
    fc_input_norm: Literal["none", "input_norm", "fc_norm"] = "none"
    use_fc: bool = True
    norm_before_residual: bool = False
    head_norm: bool = True
    feedback: Literal["pre_norm", "post_norm"] = "pre_norm"
    rope: Rope = Rope()
    position_offset: int = 1
    position_step: int = 1
    max_position: int | None = None
    vocab_map: Literal["offset", "absolute", "identity"] = "offset"
    embed_scale: float = 1.0
    sources: Mapping[str, Source] = field(default_factory=dict, compare=False, hash=False)

    def __post_init__(self) -> None:
        """Check the fields that can be checked without a draft."""
        taps = tuple(parse_tap(t) for t in self.taps)
        object.__setattr__(self, "taps", taps)
        object.__setattr__(self, "sources", MappingProxyType(dict(self.sources)))
        for name, allowed in (
            ("fc_input_norm", ("none", "input_norm", "fc_norm")),
            ("feedback", ("pre_norm", "post_norm")),
            ("vocab_map", ("offset", "absolute", "identity")),
        ):
            if getattr(self, name) not in allowed:
                raise ContractError(
                    "contract", name, expected=f"one of {allowed}",
                    found=repr(getattr(self, name)), remedy="see lib/contract.py for the meanings",
                )  # fmt: skip
        if not taps:
            raise ContractError(
                "contract", "taps", expected="at least one tap", found="none",
                remedy="name one tap per slot of fc, in slot order",
            )  # fmt: skip
        unknown = set(self.sources) - {f.name for f in fields(self)}
        if unknown:
            raise ContractError(
                "contract", "sources", expected="names of contract fields",
                found=str(sorted(unknown)), remedy="fix the spelling",
            )  # fmt: skip

    def change(self, why: str | Source = "", **changes: Any) -> Contract:
        """A copy with fields changed, each recorded as the user's (or as `why`, if it is a Source)."""
        source = why if isinstance(why, Source) else Source("user", why)
        return replace(self, **changes, sources={**self.sources, **dict.fromkeys(changes, source)})

    def source(self, name: str) -> Source:
        """Who decided field `name`."""
        return self.sources.get(name, Source("framework default", "EAGLE-3 as published"))

    def rows(self) -> list[dict[str, str]]:
        """One row per field: field, value, from. For tables."""
        return [
            {"field": name, "value": text, "from": str(self.source(name))}
            for name, text in self._texts().items()
        ]

    def _texts(self) -> dict[str, str]:
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "sources"}
        values["taps"] = f"({', '.join(map(str, self.taps))})"
        return {name: str(value) for name, value in values.items()}


def diff(before: Contract, after: Contract) -> list[str]:
    """What changes from one contract to another, one readable line per difference.

    >>> diff(Contract(taps=("embed", "layer3")), Contract(taps=("layer3", "layer3")))
    ['slot 0: embed -> layer3']
    """
    lines = []
    if len(before.taps) != len(after.taps):
        lines.append(f"slots: {len(before.taps)} -> {len(after.taps)}")
    lines += [
        f"slot {i}: {old} -> {new}"
        for i, (old, new) in enumerate(zip(before.taps, after.taps, strict=False))
        if old != new
    ]
    old_texts, new_texts = before._texts(), after._texts()
    lines += [
        f"{name}: {old_texts[name]} -> {new_texts[name]}"
        for name in old_texts
        if name != "taps" and old_texts[name] != new_texts[name]
    ]
    return lines
