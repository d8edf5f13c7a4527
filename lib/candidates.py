"""What a search tries: every change of one thing near a contract that the draft and its captures allow."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from lib.captures import Capture
from lib.checkpoints import Draft
from lib.contract import Contract, Rope
from lib.taps import Tap, hypotheses
from lib.target_head import TargetHead

THETAS = (1e4, 1e5, 1.5e5, 5e5, 1e6, 1e7)
ALL_ORDERS = 60  # ordered choices of taps tried exhaustively; beyond, only neighbours


@dataclass(frozen=True)
class Candidate:
    """One change of the contract or of the draft's files.

    Attributes:
        field: contract field, or tensor; before, after: in words.
        contract: the contract after the change.
        draft: the draft after the change; None if only the contract changes.
        deep: whether depth 0 cannot see it.
        kind: fault key if the change alone says which fault it is.
        suspected: something besides the text speaks for it (a probe, config.json, a clamp inside the texts),
            so that it is tested against the few such ones, with half of the level (see `corrections`).
    """

    field: str
    before: str
    after: str
    contract: Contract
    draft: Draft | None = field(default=None, repr=False, compare=False)
    deep: bool = False
    kind: str = ""
    suspected: bool = False

    def on(self, draft: Draft) -> Draft:
        """The draft that this candidate evaluates."""
        return self.draft or draft


def neighbours(
    draft: Draft, contract: Contract, captures: Sequence[Capture], head: TargetHead | None = None
) -> list[Candidate]:
    """Every change of one thing around `contract` that the draft's weights and the captures allow."""
    out = [Candidate("taps", str(_names(contract.taps)), str(_names(t)), contract.change(taps=t))
           for t in tap_choices(draft, contract, captures, head)]  # fmt: skip
    stated = rope_of(draft.config.get("transformer_layer_config", draft.config))
    for name, values in _field_values(draft, contract, captures, head).items():
        now = getattr(contract, name)
        for value in dict.fromkeys(values):
            if value != now:
                deep = name in ("feedback", "position_step")
                prior = name == "max_position" or (name == "rope" and value == stated)
                out.append(
                    Candidate(
                        name,
                        str(now),
                        str(value),
                        contract.change(**{name: value}),
                        deep=deep,
                        suspected=prior,
                    )
                )
    return out


def _field_values(draft: Draft, contract: Contract, captures, head) -> dict[str, list]:
    longest = max(len(c) for c in captures)
    norms = ["none"] + ["input_norm"] * (draft.input_norm is not None) + ["fc_norm"] * bool(draft.fc_norm)
    bypass = [True] * (draft.fc is not None)
    if all(c.hidden_size == draft.hidden_size for c in captures):
        bypass.append(False)
    window = draft.config.get("transformer_layer_config", draft.config).get("max_position_embeddings")
    # A window that no text reaches is no clamp: None stands for it.
    clamps = [
        None,
        *(c for c in (contract.max_position, window) if c and c < longest + contract.position_offset),
    ]
    felt = len(clamps) > 1
    maps = ["identity", "offset", "absolute"] if draft.d2t is not None else ["identity"]
    return {
        "token_shift": [-1, 0, 1, 2, 3],
        "norm_before_residual": [True, False] if draft.layers[0].hidden_norm is not None else [],
        "fc_input_norm": norms if draft.fc is not None else [],
        "use_fc": bypass,
        "head_norm": [True, False],
        "feedback": ["pre_norm", "post_norm"],
        "rope": rope_grid(draft, contract.rope, head),
        "max_position": clamps if felt else [],
        "position_step": [0, 1, 2],
        "vocab_map": maps,
        "embed_scale": [1.0, draft.hidden_size**0.5],
    }


def rope_grid(draft: Draft, declared: Rope, head: TargetHead | None) -> list[Rope]:
    """Rotary settings one step from the declared ones: base, scaling, layout; and what configs say."""
    configs = [draft.config.get("transformer_layer_config", draft.config), head.config if head else {}]
    written = [r for r in (rope_of(c) for c in configs) if r is not None]
    grid = [replace(declared, theta=t) for t in (*THETAS, *(r.theta for r in written))]
    grid += [replace(r, interleaved=declared.interleaved) for r in written]
    grid += [replace(declared, kind="default", params=())]
    grid += [replace(declared, kind=r.kind, params=r.params) for r in written]
    grid += [replace(declared, interleaved=not declared.interleaved)]
    return grid


def rope_of(config: dict) -> Rope | None:
    """Rotary settings that a config states, under either of its two spellings; None if it states none."""
    config = config.get("text_config", config)
    values = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    theta = values.pop("rope_theta", config.get("rope_theta"))
    kind = values.pop("rope_type", values.pop("type", "default"))
    if theta is None or kind not in ("default", "linear", "llama3", "yarn"):
        return None
    partial = values.pop("partial_rotary_factor", config.get("partial_rotary_factor")) or 1.0
    numbers = {k: float(v) for k, v in values.items() if isinstance(v, int | float) and v is not True}
    return Rope(float(theta), kind, tuple(sorted(numbers.items())), partial=float(partial))


def stored_taps(captures: Sequence[Capture]) -> list:
    """States that every capture holds, in the first one's order."""
    return [t for t in captures[0].taps if all(t in c.readers for c in captures)]


def tap_choices(draft: Draft, contract: Contract, captures, head: TargetHead | None = None) -> list[tuple]:
    """Slot assignments worth trying: all ordered choices when few, else those that real faults produce."""
    stored, now = stored_taps(captures), contract.taps
    k = len(now)
    if math.perm(len(stored), k) <= ALL_ORDERS:
        choices = list(itertools.permutations(stored, k))
    else:
        choices = list(itertools.permutations(now)) if k <= 4 else []
        blocks = [t.after_block if isinstance(t, Tap) else None for t in now]
        if None not in blocks:
            for step in (-1, 1):
                moved = [Tap(max(0, b + step)) for b in blocks]
                # The embedding is named by itself in many configs, so that other ids can move without it.
                rest = [t if b else Tap(0) for b, t in zip(blocks, moved, strict=True)]
                choices += [tuple(moved), tuple(rest)]
                choices += [(*now[:i], moved[i], *now[i + 1 :]) for i in range(k)]
        # The incident's cut, both ways: the embedding pushed in front, or the last state pushed in behind.
        choices += [(stored[0], *now[:-1]), (*now[1:], stored[-1])]
        if None not in blocks and k > 1:  # and both at once: ids of another convention, then cut
            choices += [(stored[0], *(Tap(max(0, b + step)) for b in blocks[:-1])) for step in (-1, 1)]
        if head is not None and k == 3:
            ids = draft.config.get("eagle_aux_hidden_state_layer_ids")
            choices += list(hypotheses(ids, head.n_layers).values())
        # A slot at a time, any stored state: finds what no rule foresaw, one slot per round.
        choices += [(*now[:i], t, *now[i + 1 :]) for i in range(k) for t in stored if t not in now]
    allowed = set(stored)
    return [c for c in dict.fromkeys(choices) if c != now and len(c) == k and allowed.issuperset(c)]


def _names(taps: Sequence) -> str:
    return f"({', '.join(map(str, taps))})"


def edits(draft: Draft, contract: Contract, head: TargetHead | None) -> list[Candidate]:
    """Changes of the draft's files that can be made from what is at hand; none that changes nothing."""
    out = []
    rows = torch.arange(draft.draft_vocab)
    if draft.t2d is not None and int(draft.t2d.sum()) == draft.draft_vocab:
        d2t = draft.t2d.nonzero().flatten() - rows
        if draft.d2t is None or not torch.equal(d2t, draft.d2t.long()):
            made = replace(draft, d2t=d2t)
            out.append(
                Candidate("d2t", "as stored", "rebuilt from t2d", contract.change(vocab_map="offset"), made)
            )
    if head is None:
        return out
    if head.embed.shape == draft.embed.shape and not _same(head.embed, draft.embed):
        made = replace(draft, embed=head.embed)
        out.append(Candidate("embed_tokens", "the draft's own", "the target's", contract, made))
    produced = draft.to_target(rows, contract.vocab_map)
    if (
        head.hidden_size == draft.hidden_size
        and int(produced.min()) >= 0
        and int(produced.max()) < len(head.lm_head)
    ):
        weight = head.lm_head[produced].to(draft.lm_head.dtype)
        if not torch.equal(weight, draft.lm_head):
            made = replace(draft, lm_head=weight)
            out.append(
                Candidate("lm_head", "the draft's own", "the target's rows under the map", contract, made)
            )
    return out


def _same(a: Tensor, b: Tensor, rows: int = 512) -> bool:
    """Whether two tables agree on rows spread over them; enough to skip a candidate that changes nothing."""
    at = torch.linspace(0, len(a) - 1, min(rows, len(a))).long()
    return a is b or bool(torch.equal(a[at].float(), b[at].float()))
