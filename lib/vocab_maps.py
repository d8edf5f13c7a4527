"""The map from draft to target vocabulary: `d2t` and `t2d` of the weights, or Automodel's side file."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from lib.draft_tensors import DraftTensors
from lib.errors import CheckpointError
from lib.weights import load_pickle


def read_maps(
    path: Path, tensors: DraftTensors, rows: int, vocab: int, meta: Path | None
) -> tuple[Tensor | None, Tensor | None, list[str]]:
    """d2t (rows,) int64 as offsets, t2d (vocab,) bool, each None if absent, and notes.

    Args:
        path: the draft, for messages.
        rows: of lm_head, Vd.
        vocab: of the target, V.
        meta: Automodel's `eagle_meta.pt` (`train_eagle3.py:_save_extra_state`), if there is one.

    Raises CheckpointError if Vd < V and nothing says which ids the draft's are.
    """
    notes: list[str] = []
    d2t = tensors.take("d2t", rows, required=False)
    t2d = tensors.take("t2d", vocab, required=False)
    if d2t is not None and (d2t.dtype.is_floating_point or d2t.dtype == torch.bool):
        raise CheckpointError(
            path, "d2t", expected="integers", found=str(d2t.dtype), remedy="save the map as int64"
        )
    if meta is not None:
        d2t = _from_meta(meta, d2t, rows, vocab, notes)
    if d2t is None and rows < vocab:
        raise CheckpointError(
            path, "d2t", expected=f"a map from {rows} draft ids to {vocab} target ids",
            found="no d2t tensor", remedy="without it engines silently use ids 0.."
            f"{rows - 1} (fault 19); recover it from the training run's vocab mapping",
        )  # fmt: skip
    if d2t is not None:
        notes += _doubts(torch.arange(rows) + d2t.long(), t2d, rows, vocab)
    return (None if d2t is None else d2t.long()), (None if t2d is None else t2d.bool()), notes


def _from_meta(meta: Path, d2t: Tensor | None, rows: int, vocab: int, notes: list[str]) -> Tensor | None:
    """Offsets from `selected_token_ids`: entry i is the target id of draft id i."""
    data = load_pickle(meta, CheckpointError)
    ids = data.get("selected_token_ids") if isinstance(data, dict) else None
    if not isinstance(ids, Tensor) or ids.dtype.is_floating_point or ids.dtype == torch.bool:
        raise CheckpointError(
            meta, "selected_token_ids", expected="an integer tensor in a dict",
            found=type(data).__name__ if not isinstance(data, dict) else str(getattr(ids, "dtype", ids)),
            remedy="take eagle_meta.pt of the same checkpoint, or remove it if the weights hold d2t",
        )  # fmt: skip
    ids = ids.reshape(-1).long()
    inside = len(ids) == 0 or (int(ids.min()) >= 0 and int(ids.max()) < vocab)
    if len(ids) != rows or not inside:
        raise CheckpointError(
            meta, "selected_token_ids", expected=f"{rows} ids, one per row of lm_head, below {vocab}",
            found=f"{len(ids)} ids up to {int(ids.max()) if len(ids) else 'none'}",
            remedy="the side file is another run's",
        )  # fmt: skip
    offsets = ids - torch.arange(rows)
    if d2t is None:
        if rows == vocab and not offsets.any():
            return None  # full vocabulary: Automodel stores no map, and needs none
        notes.append(f"d2t not in the weights: taken from {meta.name}: selected_token_ids (fault 19)")
        return offsets
    if not torch.equal(d2t.long(), offsets):
        differ = int((d2t.long() != offsets).sum())
        raise CheckpointError(
            meta, "selected_token_ids", expected="the ids that d2t of the weights gives",
            found=f"{differ} of {rows} that differ",
            remedy="one of the two is stale (fault 22): keep the one of the run that trained lm_head",
        )  # fmt: skip
    return d2t


def _doubts(ids: Tensor, t2d: Tensor | None, rows: int, vocab: int) -> list[str]:
    """Doubts about a map that loads: a wrong one is to be diagnosed, not refused."""
    notes, inside = [], ids[(ids >= 0) & (ids < vocab)]
    if outside := rows - len(inside):
        notes.append(f"d2t sends {outside} of {rows} draft ids outside 0..{vocab - 1} (fault 20)")
    if twice := len(inside) - len(inside.unique()):
        notes.append(f"d2t sends {twice} of {rows} draft ids to a target id that another one has too")
    if rows < vocab and torch.equal(ids, torch.arange(rows)):
        notes.append(f"d2t is all zeros: draft ids are target ids 0..{rows - 1} (fault 21)")
    if t2d is not None and t2d.any():  # some writers leave it all zero when nothing is pruned
        reached = torch.zeros(vocab, dtype=torch.bool).index_fill_(0, inside, True)
        if differ := int((reached ^ t2d.bool()).sum()):
            notes.append(f"d2t and t2d disagree on {differ} target ids (fault 22)")
    return notes
