"""What one defect makes unusable is replaced, where that is little, so that it hides no other fault.

A NaN in one weight, a token id beyond the vocabulary, or an Inf in one state is a finding by itself, and it
stops every evaluation. The search behind it needs no exact numbers: it compares contracts on one and the
same input. So a few such numbers are replaced, and the diagnosis says which and with what: what it measures
behind that is of the mended input.

Axes: L positions, H hidden, V vocabulary, n rows.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lib.captures import FINAL, Capture
from lib.checkpoints import Draft
from lib.errors import WorkbookError

LITTLE = 0.05  # share of a weight's numbers, of a text's ids or rows, that may be replaced
ANY_ID = 0  # in place of an id that does not exist; nothing that predicts it at depth 0 is scored
LEFT_OUT = "left out"


# ---- weights --------------------------------------------------------------------------------------


def with_tensors(owner: Any, change: Callable[[str, Tensor], Tensor], prefix: str = "") -> Any:
    """A draft, or a part of one, with every tensor of floats passed through `change(name, x)`.

    Names are those of the fields: "fc", "layers.0.down", "layers.0.latent.kv_a".
    """
    if isinstance(owner, Tensor):
        return change(prefix, owner) if owner.is_floating_point() else owner
    if isinstance(owner, tuple):
        made = tuple(with_tensors(x, change, f"{prefix}.{i}") for i, x in enumerate(owner))
        return owner if all(a is b for a, b in zip(made, owner, strict=True)) else made
    if not is_dataclass(owner):
        return owner
    parts = {f.name: getattr(owner, f.name) for f in fields(owner)}
    made = {k: with_tensors(x, change, f"{prefix}.{k}" if prefix else k) for k, x in parts.items()}
    changed = {k: x for k, x in made.items() if x is not parts[k]}
    return replace(owner, **changed) if changed else owner


def nonfinite(draft: Draft) -> dict[str, tuple[int, int]]:
    """Weight -> (numbers of it that are NaN or Inf, all its numbers), for those that have any."""
    found = {}

    def look(name: str, x: Tensor) -> Tensor:
        # One such number makes the sum one too, as may an overflow; only then is every number worth a look.
        if not torch.isfinite(x.sum(dtype=torch.promote_types(x.dtype, torch.float32))):
            bad = int((~torch.isfinite(x)).sum())
            found.update({name: (bad, x.numel())} if bad else {})
        return x

    with_tensors(draft, look)
    return found


def with_zeros(draft: Draft, names: Collection[str]) -> Draft:
    """The draft with NaN and Inf of these weights set to 0."""
    return with_tensors(draft, lambda k, x: x.masked_fill(~torch.isfinite(x), 0) if k in names else x)


# ---- captures -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mended:
    """A capture without what cannot be used.

    Attributes:
        rows: (L,) bool, positions at which an id or the states were replaced.
        unscored: (L,) bool, positions that its loss mask therefore leaves out.
        ids: whether an id was; what a live target makes of such a text is of another text.
        what: part -> what was done to it.
    """

    capture: Capture
    rows: Tensor
    unscored: Tensor
    ids: bool
    what: dict[str, str]


def mended_capture(capture: Capture, vocab: int, needed: Collection) -> Mended | None:
    """What is usable of a capture; None if that is too little.

    A row that is bad in one state is set to 0 in all of them: else a neighbouring tap would look better.

    Args:
        vocab: number V of token ids there are.
        needed: taps without which a capture is of no use; another state is left out if much of it is bad.
    """
    what: dict[str, str] = {}
    beyond = capture.token_ids >= vocab
    if int(beyond.sum()) > LITTLE * len(beyond):
        return None
    if bool(beyond.any()):
        capture = replace(capture, token_ids=capture.token_ids.masked_fill(beyond, ANY_ID))
        what["ids"] = f"{int(beyond.sum())} of {len(beyond)} taken as {ANY_ID}, and not scored"
    rows = torch.zeros_like(beyond)
    for name in tuple(capture.readers):
        try:
            bad = ~torch.isfinite(capture.unchecked(name)).all(-1)  # (L, H) -> (L,)
        except WorkbookError:
            bad = torch.ones_like(beyond)
        if int(bad.sum()) <= LITTLE * len(bad):
            rows = rows | bad
        elif name in needed:
            return None
        else:
            capture, what[str(name)] = _without(capture, name), LEFT_OUT
    if bool(rows.any()):
        capture = capture.with_states(lambda x: x.masked_fill(rows[:, None], 0))
        what["states"] = f"{int(rows.sum())} of {len(rows)} rows taken as 0, and not scored"
    # Position t + 1 is scored on the pair (state t, id t + 1) and predicts id t + 2.
    unscored = beyond | _earlier(beyond) | _later(rows)
    capture = replace(capture, loss_mask=capture.loss_mask & ~unscored)
    return Mended(capture, rows | beyond, unscored, bool(beyond.any()), what)


def _earlier(at: Tensor) -> Tensor:
    return torch.cat((at[1:], at.new_zeros(1)))


def _later(at: Tensor) -> Tensor:
    return torch.cat((at.new_zeros(1), at[:-1]))


def _without(capture: Capture, name) -> Capture:
    readers = {k: read for k, read in capture.readers.items() if k != name}
    kind = None if name == FINAL else capture.final_kind
    taps = tuple(t for t in capture.taps if t != name)
    return replace(capture, readers=readers, taps=taps, final_kind=kind)


def rotation(states: Tensor, reference: Tensor) -> Tensor | None:
    """(H, H) orthogonal Q with states = reference @ Q, in the least-squares sense (Schönemann, 1966).

    Args:
        states, reference: (n, H) rows that should differ by a rotation alone.

    Returns None if the rows do not span all H directions: Q would be anything in the others.
    """
    x, ref = states.double(), reference.double()
    if len(ref) < ref.shape[1] or int(torch.linalg.matrix_rank(ref.T @ ref, rtol=1e-10)) < ref.shape[1]:
        return None
    u, _, v = torch.linalg.svd(ref.T @ x)
    return (u @ v).float()
