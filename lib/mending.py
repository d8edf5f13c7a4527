"""What one defect makes unusable is replaced, where that is little, so that it hides no other fault.

A NaN in one weight, a token id beyond the vocabulary, or an Inf in one state is a finding by itself, and it
stops every evaluation. The search behind it needs no exact numbers: it compares contracts on one and the
same input. So a few such numbers are replaced, and the diagnosis says which and with what: what it measures
behind that is of the mended input.
"""

from __future__ import annotations

from dataclasses import fields, replace

import torch
from torch import Tensor

from lib.captures import FINAL, Capture
from lib.checkpoints import Draft
from lib.errors import WorkbookError

LITTLE = 0.1  # share of a weight's numbers, of a text's ids or rows, that may be replaced
FP16_MAX = 65504.0  # Inf in states is what fp16 made of something larger
ANY_ID = 0  # in place of an id that does not exist; its position is not scored


def mended_draft(draft: Draft) -> tuple[Draft, str]:
    """The draft with NaN and Inf set to 0, and what was done; "" if that would be much of a weight."""
    done: list[str] = []

    def finite(name: str, x: Tensor) -> Tensor:
        bad = ~torch.isfinite(x)
        if not bad.any():
            return x
        done.append(f"{int(bad.sum())} of {x.numel()} numbers of {name} taken as 0")
        worst.append(float(bad.float().mean()))
        return x.masked_fill(bad, 0)

    def all_finite(owner, prefix: str = ""):
        tensors = {f.name: getattr(owner, f.name) for f in fields(owner)}
        tensors = {k: v for k, v in tensors.items() if isinstance(v, Tensor) and v.is_floating_point()}
        mended = {k: finite(prefix + k, v) for k, v in tensors.items()}
        return replace(owner, **{k: v for k, v in mended.items() if v is not tensors[k]})

    worst = [0.0]
    layers = tuple(all_finite(layer, f"layers.{i}.") for i, layer in enumerate(draft.layers))
    norms = tuple(finite(f"fc_norm.{i}", x) for i, x in enumerate(draft.fc_norm))
    whole = replace(all_finite(draft), layers=layers, fc_norm=norms)
    return (whole, "; ".join(done)) if max(worst) <= LITTLE else (draft, "")


def mended_capture(capture: Capture, vocab: int) -> tuple[Capture, str] | None:
    """The capture without what cannot be used, and what was done; None if that is too much, or unreadable.

    Args:
        vocab: number of token ids there are.
    """
    done = []
    beyond = capture.token_ids >= vocab
    if bool(beyond.any()):
        if float(beyond.float().mean()) > LITTLE:
            return None
        ids, mask = capture.token_ids.masked_fill(beyond, ANY_ID), capture.loss_mask & ~beyond
        capture = replace(capture, token_ids=ids, loss_mask=mask)
        done.append(f"{int(beyond.sum())} of {len(beyond)} ids taken as {ANY_ID} and not scored")
    try:
        for name in (*capture.taps, *(FINAL,) * (FINAL in capture.readers)):
            states = capture.unchecked(name)
            bad = ~torch.isfinite(states).all(-1)  # (L,)
            if not bool(bad.any()):
                continue
            if float(bad.float().mean()) > LITTLE:
                return None
            capture = capture.with_state(name, saturated)
            rows = f"{int(bad.sum())} of {len(bad)} rows of {name}"
            done.append(f"Inf in {rows} taken as {FP16_MAX:.0f}, NaN as 0")
    except WorkbookError:
        return None
    return capture, "; ".join(done)


def saturated(states: Tensor) -> Tensor:
    """States with Inf as the largest number of fp16, and NaN as 0."""
    return torch.nan_to_num(states, nan=0.0, posinf=FP16_MAX, neginf=-FP16_MAX)
