"""Where a hidden state comes from: `Tap(k)`, and every framework's way of writing it down.

"Layer 3" names four different tensors in this field. Inside the workbook there is one name:
`Tap(k)` is the residual stream after k blocks, so `Tap(0)` is the embedding output and `Tap(n)`
the last block's output *before* the final norm. Conventions are converted here, at the edge.

The incident in one line: the config said [2, 30, 58]; the states were after 3, 31 and 59 blocks;
and the trainer had put the embedding output in front of them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from lib.errors import ContractError


@dataclass(frozen=True, order=True)
class Tap:
    """A point in the residual stream: 0 is the embedding output, k the output of the k-th block."""

    after_block: int

    def __post_init__(self) -> None:
        """Refuse negative numbers: a -1 here would silently mean "the last layer" elsewhere."""
        if not isinstance(self.after_block, int) or self.after_block < 0:
            raise ContractError(
                "Tap", "after_block", expected="a whole number from 0", found=repr(self.after_block),
                remedy="write Tap(0) for the embedding output, Tap(n) for the last block's output",
            )  # fmt: skip

    def __str__(self) -> str:
        """`embed` or `layer3`, as in the incident's own account."""
        return "embed" if self.after_block == 0 else f"layer{self.after_block}"

    @property
    def hf_index(self) -> int:
        """Index into transformers' `hidden_states`; not valid for Tap(n), which is post-norm there."""
        return self.after_block


@dataclass(frozen=True, order=True)
class Stored:
    """The i-th state of a capture whose tap nobody wrote down. Usable as a slot, honest as a name."""

    index: int

    def __str__(self) -> str:
        """`stored0`: a position in the file, not in the model."""
        return f"stored{self.index}"


@dataclass(frozen=True, order=True)
class Normed:
    """The target's last state after its final norm, what its lm_head sees; no `Tap` means that one.

    The one input of drafts with `use_aux_hidden_state: false` (Model-Optimizer `hf_eagle.py`; sglang
    PR #32334). A capture can feed it by naming a stored state "normed".
    """

    def __str__(self) -> str:
        """`normed`."""
        return "normed"


def parse_tap(text: str | int | Tap | Stored | Normed) -> Tap | Stored | Normed:
    """`"embed"`, `"layer3"`, `"stored1"`, `"normed"`, a boundary number or a ready value -> its type."""
    if isinstance(text, Tap | Stored | Normed):
        return text
    if isinstance(text, int):
        return Tap(text)
    if text == "embed":
        return Tap(0)
    if text == "normed":
        return Normed()
    if isinstance(text, str) and (match := re.fullmatch(r"(layer|stored)(\d+)", text)):
        return (Tap if match[1] == "layer" else Stored)(int(match[2]))
    raise ContractError(
        "tap", str(text), expected="'embed', 'layerK', 'storedI' or 'normed'", found=repr(text),
        remedy="count blocks from 1: the state after the third block is 'layer3'",
    )  # fmt: skip


def default_triple(n_layers: int) -> tuple[Tap, Tap, Tap]:
    """Taps used when nobody names any: EAGLE's own (2, n//2, n-3), `modeling_llama_kv.py`."""
    return Tap(2), Tap(n_layers // 2), Tap(n_layers - 3)


@dataclass(frozen=True)
class Convention:
    """How one framework writes taps down.

    Attributes:
        name: key in `CONVENTIONS`.
        offset: number added to a written id to reach the tap; None when it depends on the ids.
        default: what the framework uses when no ids are written, as *written ids*, from n layers.
        source: where this was read.
    """

    name: str
    offset: int | None
    default: tuple[str, ...] | None
    source: str


_BOUNDARY = ("2", "n//2", "n-3")
_OUTPUTS = ("1", "n//2-1", "n-4")

# Section A.0 of the formats reference. "Boundary" frameworks write k for Tap(k); "layer output"
# frameworks write the 0-based layer, so Tap(id + 1).
CONVENTIONS: dict[str, Convention] = {
    c.name: c
    for c in (
        Convention("eagle", 0, _BOUNDARY, "EAGLE eagle/model/modeling_llama_kv.py: before layer idx"),
        Convention("vllm", 0, _BOUNDARY, "vllm interfaces.py: ids used as they are, 0 = embedding"),
        Convention("speculators", 0, _BOUNDARY, "speculators models/utils.py:resolve_target_layer_ids"),
        Convention(
            "speculators-legacy", 1, ("2", "n//2", "n-3", "n-1"),
            "speculators 751f3a04 data_generation/custom_worker.py: captured after the layer",
        ),
        Convention("sglang", 1, _OUTPUTS, "sglang set_eagle3_layers_to_capture: v + 1"),
        Convention("sglang-25454", None, None, "sglang PR #25454: + 1 only when the first id is 1"),
        Convention("sglang-gpt-oss", 0, None, "sglang PR #32334: boundaries, n reachable"),
        Convention("sglang-deepseek-v4", 1, None, "sglang deepseek_v4: ids are layer outputs"),
        Convention("specforge", 1, _OUTPUTS, "SpecForge model_providers.py, through SGLang's + 1"),
        Convention("modelopt", 1, _OUTPUTS, "Model-Optimizer hf_eagle.py:default_eagle_aux_layer_ids"),
        Convention("modelopt-hf-dump-old", 0, _BOUNDARY, "Model-Optimizer compute_hidden_states_hf.py"),
        Convention("modelopt-hf-dump", 1, _OUTPUTS, "Model-Optimizer collect_hidden_states/aux_layers.py"),
        Convention("modelopt-vllm-dump", 0, _OUTPUTS, "Model-Optimizer compute_hidden_states_vllm.py"),
        Convention("torchspec", 1, None, "TorchSpec#89: captured after layer N"),
        Convention("dflash", 1, None, "vllm configs/speculators/algos.py:update_dflash"),
    )
}  # fmt: skip


def _eval_default(rule: str, n: int) -> int:
    half = re.fullmatch(r"n//2(-\d+)?", rule)
    if half:
        return n // 2 + int(half[1] or 0)
    if rule.startswith("n-"):
        return n - int(rule[2:])
    return int(rule)


def default_ids(framework: str, n_layers: int) -> list[int] | None:
    """The ids a framework assumes when none are written; None when it demands them."""
    rules = CONVENTIONS[framework].default
    if rules is None:
        return None
    ids = [_eval_default(rule, n_layers) for rule in rules]
    if framework.startswith("modelopt"):
        ids = sorted({max(0, i) for i in ids})  # a set: tiny models lose a slot (hf_eagle.py)
    return ids


def taps_from_ids(ids: Sequence[int], framework: str, n_layers: int) -> tuple[Tap, ...]:
    """Written ids -> taps, in the order written, under one framework's convention.

    Raises ContractError for an unknown framework or an id outside 0..n_layers.
    """
    if framework not in CONVENTIONS:
        raise ContractError(
            "convention", "framework", expected=f"one of {sorted(CONVENTIONS)}",
            found=repr(framework), remedy="use hypotheses() when the origin is unknown",
        )  # fmt: skip
    offset = CONVENTIONS[framework].offset
    if offset is None:
        offset = 1 if ids and ids[0] == 1 else 0
    taps = []
    for i in ids:
        if not isinstance(i, int) or not 0 <= i + offset <= n_layers or i < 0:
            raise ContractError(
                "config", "eagle_aux_hidden_state_layer_ids",
                expected=f"ids that land on taps 0..{n_layers} ({framework}: id + {offset})",
                found=repr(i), remedy="check the number of target layers and the convention",
            )  # fmt: skip
        taps.append(Tap(i + offset))
    return tuple(taps)


def hypotheses(ids: Sequence[int] | None, n_layers: int) -> dict[str, tuple[Tap, ...]]:
    """Every reading of ids whose origin is unknown: never one guess.

    Returns:
        {why: taps}, without repeated tap tuples; readings that leave the model are left out.
    """
    found: dict[str, tuple[Tap, ...]] = {}
    if ids:
        for why, framework in (
            ("as is (vLLM, EAGLE, speculators)", "vllm"),
            ("+ 1 (SGLang, SpecForge, Model-Optimizer, TorchSpec)", "sglang"),
            ("+ 1 only if the first id is 1 (SGLang since PR #25454)", "sglang-25454"),
        ):
            try:
                found[why] = taps_from_ids(ids, framework, n_layers)
            except ContractError:
                continue
    found["ids ignored, default triple"] = default_triple(n_layers)
    unique: dict[tuple[Tap, ...], str] = {}
    for why, taps in found.items():
        unique.setdefault(taps, why)
    return {why: taps for taps, why in unique.items()}
