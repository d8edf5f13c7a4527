"""Is a captured last state before or after the target's final norm? Decided by evidence, not by name.

Frameworks disagree (formats_and_faults A.1): transformers' `hidden_states[-1]` is post-norm, vLLM's last
boundary pre-norm, and Model-Optimizer writes either one under the same key. Fault 7 is what a wrong guess
costs. Evidence (probe P8):

- with the target's head: RMS of x / norm.weight in each row, which the norm itself makes 1; and how often
  lm_head(x) against lm_head(norm(x)) says the next token;
- without: how much the RMS varies over positions. A norm makes it nearly constant; without it, it varies, and
  the first tokens stand out many times over. This is the weaker one.

Axes: L positions, H target hidden size, n rows looked at.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

from lib.captures import FINAL, Capture
from lib.errors import CaptureError
from lib.target_head import TargetHead

LIMIT = 8  # captures looked at
MIN_ROWS = 16  # fewer say nothing
ROWS = 512  # rows taken of each capture, spread over its positions, the first among them
HEAD_ROWS = 256  # rows taken to lm_head, spread over the captures
VOCAB_CHUNK = 8192
# RMS of x / weight: bf16 rounding moves a normed row by far less (samples: 0.999 .. 1.002).
BAND, IN_BAND, OUT_OF_BAND = 0.03, 0.95, 0.5
# RMS over positions. Samples: p95/p5 1.30 and max/median 1.3 post-norm, 1.68 and 8.0 pre-norm.
STEADY, STEADY_MAX, SINK, SPREAD = 1.5, 2.0, 3.0, 3.0
SIGMAS = 3.0  # of discordant rows, a sign test

Kind = Literal["pre_norm", "post_norm"]


@dataclass(frozen=True)
class FinalVerdict:
    """What the evidence says of a last state.

    Attributes:
        kind: "undecided" when rows are few, nothing speaks clearly, or two kinds of evidence disagree.
        reasons: one sentence per kind of evidence, with its numbers and n.
        numbers: the same numbers by name.
    """

    kind: Literal["pre_norm", "post_norm", "undecided"]
    reasons: tuple[str, ...]
    numbers: dict[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        """`post_norm (RMS of x / norm.weight ... )`."""
        return f"{self.kind} ({'; '.join(self.reasons)})"


@torch.inference_mode()
def judge_final(
    captures: Sequence[Capture], head: TargetHead | None = None, limit: int = LIMIT
) -> FinalVerdict:
    """Pre- or post-norm, from the final states of at most `limit` captures, spread over all.

    "undecided" when the captures looked at disagree among themselves: a folder may mix both kinds.

    Args:
        captures: with a final state, whatever their `final_kind` claims.
        head: the target's; without it only the spread over positions is evidence.

    Raises CaptureError if a capture has no final state, or one of another width than the head.
    """
    captures = _evenly(captures, limit)
    for capture in captures:
        if FINAL not in capture.readers:
            raise CaptureError(
                capture.path, FINAL, expected="a final state to judge", found="none",
                remedy="join one with Capture.with_final() or Capture.split_last()",
            )  # fmt: skip
        if head is not None and capture.hidden_size != head.hidden_size:
            raise CaptureError(
                capture.path, FINAL, expected=f"states of width {head.hidden_size}, the head's",
                found=str(capture.hidden_size), remedy="load the head of the captures' target",
            )  # fmt: skip
    at = [torch.linspace(0, len(c) - 1, min(len(c), ROWS)).long() for c in captures]
    states = [c.final()[rows].float() for c, rows in zip(captures, at, strict=True)]
    n = sum(map(len, states))
    if n < MIN_ROWS:
        return FinalVerdict("undecided", (f"{n} rows are too few to say (at least {MIN_ROWS})",), {"rows": n})
    numbers: dict[str, float] = {"rows": n, "captures": len(captures)}
    if head is None:
        evidence = [_spread(torch.cat(states), numbers)]
    else:
        evidence = [
            _unit_rms(torch.cat(states), head, numbers),
            _next_tokens(captures, at, states, head, numbers),
        ]
    votes = {kind for kind, _ in evidence if kind}
    reasons = tuple(reason for _, reason in evidence)
    if mixed := _disagreement(captures, states, head):
        return FinalVerdict("undecided", (*reasons, mixed), numbers)
    if len(votes) > 1:
        return FinalVerdict("undecided", (*reasons, "the two contradict each other"), numbers)
    return FinalVerdict(votes.pop() if votes else "undecided", reasons, numbers)


def _evenly(captures: Sequence[Capture], limit: int) -> list[Capture]:
    """At most `limit` of them, the first and the last among them."""
    if len(captures) <= limit:
        return list(captures)
    return [captures[i] for i in torch.linspace(0, len(captures) - 1, limit).long().tolist()]


def _disagreement(
    captures: Sequence[Capture], states: Sequence[Tensor], head: TargetHead | None
) -> str | None:
    """What to say if single captures speak clearly for different kinds."""
    kinds: dict[Kind, list[str]] = {}
    for capture, x in zip(captures, states, strict=True):
        if len(x) >= MIN_ROWS:
            kind, _ = _spread(x, {}) if head is None else _unit_rms(x, head, {})
            if kind:
                kinds.setdefault(kind, []).append(capture.name)
    if len(kinds) < 2:
        return None
    said = ", ".join(f"{kind} in {len(names)} (such as {names[0]})" for kind, names in sorted(kinds.items()))
    return f"the captures disagree, one by one: {said}; separate them by kind"


def settle_final(
    captures: Sequence[Capture], head: TargetHead | None = None
) -> tuple[list[Capture], FinalVerdict | None]:
    """Fill `final_kind` where nobody said it, and check it where a format did.

    A claim of the file is kept even when the evidence speaks against it; a note says so then.

    Returns: the captures in their order, and the verdict on those that claimed nothing (on the others, if
        all claim something; None if no capture has a final state). Layouts are judged separately; when
        they differ, the verdict is "undecided" and its reasons name each.
    """
    groups: dict[tuple[str, str | None], list[int]] = {}
    for i, capture in enumerate(captures):
        if FINAL in capture.readers:
            groups.setdefault((capture.layout, capture.final_kind), []).append(i)
    settled, verdicts = list(captures), {}
    for (layout, claim), members in groups.items():
        verdict = verdicts[layout, claim] = judge_final([captures[i] for i in members], head)
        if claim is None:
            note = f"final state judged by evidence: {verdict}"
        elif verdict.kind in ("undecided", claim):
            continue
        else:
            note = f"final state is {claim} by the file or its format, but the evidence says {verdict}"
        kind = claim or (verdict.kind if verdict.kind != "undecided" else None)
        for i in members:
            settled[i] = replace(captures[i], final_kind=kind, notes=(*captures[i].notes, note))
    return settled, _common(verdicts)


def _common(verdicts: dict[tuple[str, str | None], FinalVerdict]) -> FinalVerdict | None:
    """One verdict of several groups: of those without a claim if there are any."""
    chosen = {k: v for k, v in verdicts.items() if k[1] is None} or verdicts
    if len(chosen) < 2:
        return next(iter(chosen.values()), None)
    kinds = {v.kind for v in chosen.values()}
    reasons = tuple(f"{layout}: {v}" for (layout, _), v in chosen.items())
    numbers = {f"{layout}.{name}": x for (layout, _), v in chosen.items() for name, x in v.numbers.items()}
    return FinalVerdict(kinds.pop() if len(kinds) == 1 else "undecided", reasons, numbers)


# ---- evidence: (kind or None, a sentence) -----------------------------------------------------


def _unit_rms(x: Tensor, head: TargetHead, numbers: dict) -> tuple[Kind | None, str]:
    """RMS of x / weight per row: sqrt(m / (m + eps)), about 1, if the norm was applied."""
    weight = head.norm.float()
    # A weight near zero would turn rounding into a large number.
    sound = weight.abs() > 1e-2 * weight.abs().median()
    if not sound.any():
        return None, "norm.weight is zero: RMS of x / norm.weight says nothing"
    rms = (x[:, sound] / weight[sound]).pow(2).mean(-1).sqrt()
    share = float(((rms - 1).abs() <= BAND).float().mean())
    low, mid, high = torch.quantile(rms, torch.tensor([0.05, 0.5, 0.95])).tolist()
    numbers |= {"unit_rms_p5": low, "unit_rms_median": mid, "unit_rms_p95": high, "unit_rms_share": share}
    kind = "post_norm" if share >= IN_BAND else "pre_norm" if share < OUT_OF_BAND else None
    return kind, (
        f"RMS of x / norm.weight is {mid:.3g} (5..95 %: {low:.3g} .. {high:.3g}), within {BAND:g} of 1 in "
        f"{100 * share:.0f} % of {len(x)} rows: {kind or 'neither clearly'}"
    )


def _next_tokens(
    captures: Sequence[Capture],
    positions: Sequence[Tensor],
    states: Sequence[Tensor],
    head: TargetHead,
    numbers: dict,
) -> tuple[Kind | None, str]:
    """Which of lm_head(x) and lm_head(norm(x)) says the next token more often, where the assistant speaks."""
    rows, truth = [], []
    for capture, at, state in zip(captures, positions, states, strict=True):
        state, at = state[at + 1 < len(capture)], at[at + 1 < len(capture)]
        spoken = capture.loss_mask[at + 1]  # the state at t predicts token t + 1
        rows.append(state[spoken])
        truth.append(capture.token_ids[at[spoken] + 1])
    x, truth = torch.cat(rows), torch.cat(truth)
    if len(x) < MIN_ROWS:
        return None, f"next tokens: {len(x)} rows are too few to say"
    taken = torch.linspace(0, len(x) - 1, min(HEAD_ROWS, len(x))).long()
    x, truth = x[taken], truth[taken]
    right = {kind: _argmax(x, head, kind) == truth for kind in ("post_norm", "pre_norm")}
    plain, normed = right["post_norm"], right["pre_norm"]
    n, only_plain, only_normed = len(x), int((plain & ~normed).sum()), int((normed & ~plain).sum())
    numbers |= {
        "next_rows": n,
        "next_lm_head": int(plain.sum()) / n,
        "next_norm_lm_head": int(normed.sum()) / n,
    }
    clear = abs(only_plain - only_normed) > SIGMAS * math.sqrt(only_plain + only_normed)
    kind = ("post_norm" if only_plain > only_normed else "pre_norm") if clear else None
    return kind, (
        f"lm_head(x) says the next token in {100 * int(plain.sum()) / n:.0f} %, lm_head(norm(x)) in "
        f"{100 * int(normed.sum()) / n:.0f} % of {n} rows: {kind or 'neither clearly'}"
    )


def _argmax(x: Tensor, head: TargetHead, kind: Kind) -> Tensor:
    """(n,) best token of each row, lm_head in chunks of the vocabulary; the lowest id of equal ones."""
    best, best_id = torch.full((len(x),), -math.inf), torch.zeros(len(x), dtype=torch.int64)
    vocab = head.lm_head.shape[0]
    for start in range(0, vocab, VOCAB_CHUNK):
        rows = torch.arange(start, min(start + VOCAB_CHUNK, vocab))
        top, at = head.logits(x, final_kind=kind, rows=rows).max(-1)
        best_id = torch.where(top > best, at + start, best_id)
        best = torch.maximum(top, best)
    return best_id


def _spread(x: Tensor, numbers: dict) -> tuple[Kind | None, str]:
    """Spread of the RMS over positions."""
    rms = x.pow(2).mean(-1).sqrt()
    low, mid, high = torch.quantile(rms, torch.tensor([0.05, 0.5, 0.95])).tolist()
    numbers |= {"rms_p5": low, "rms_median": mid, "rms_p95": high, "rms_max": float(rms.max())}
    spread, peak = high / max(low, 1e-30), float(rms.max()) / max(mid, 1e-30)
    kind = None
    if peak > SINK or spread > SPREAD:
        kind = "pre_norm"
    elif peak < STEADY_MAX and spread < STEADY:
        kind = "post_norm"
    return kind, (
        f"RMS over positions: 95 % over 5 % is {spread:.3g}, largest over median {peak:.3g} in {len(x)} rows "
        f"(no head given): {kind or 'neither clearly'}"
    )
