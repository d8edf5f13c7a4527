"""Probes of captures: can they be read, are rows, slots and masks those of the tokens?

P1, P2, ... are the probes of the formats reference, section B.0. Axes: L positions, H hidden.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from scipy.stats import binom
from torch import Tensor
from torch.nn.functional import normalize

from lib.captures import FINAL, Capture
from lib.case import Finding
from lib.draft import DraftForward
from lib.mending import rotation
from lib.probing import Seen, View, probe, share
from lib.taps import Stored, Tap

CLOSE = 0.1  # relative error up to which a state is "the same": bf16 against fp32 is below 0.03
SOUND = 0.95  # share of a file's rows that must agree
HARDER = 0.7  # a text may be harder than the others down to this share of their accuracy
PAGE = 64  # largest row shift looked for
LIVE_FILES = 32  # files recomputed by the live target


@probe("readable")
def readable(view: View) -> Seen:
    """Files that are no captures of this target: NaN or Inf, ids beyond the vocabulary (P1, P10)."""
    _ = view.sound
    n = len(view.case.captures)
    ids = {k: e for k, e in view.broken.items() if e.field == "token_ids"}
    others = {k: e for k, e in view.broken.items() if "NaN or Inf" in e.found}
    for kind, errors, after in (
        ("ids_beyond", ids, f"below {view.case.draft.embed.shape[0]}"),
        ("fp16_overflow", others, "finite numbers"),
    ):
        if errors:
            first = next(iter(errors.values()))
            yield Finding(
                kind, "readable", first.field, first.found, after,
                (f"{len({name for name, _ in errors})} of {n} captures: {first}",),
            )  # fmt: skip
    used = {c.name for c in view.sound}
    for (name, part), error in view.broken.items():
        if name not in used and (name, part) not in ids and (name, part) not in others:
            yield f"{name} could not be used: {error}"
    for error in view.case.unread:
        yield f"not read: {error}"


@probe("mask", "captures")
def mask(view: View) -> Seen:
    """Loss masks that are full, empty, or start a token early or late (P10)."""
    captures = view.stored
    n = len(captures)
    if all(bool(c.loss_mask.all()) for c in captures):
        defaulted = any("no loss mask given" in note for c in captures for note in c.notes)
        why = "no mask was given" if defaulted else "no token of any prompt is masked out"
        yield Finding(
            "mask_ones", "mask", "loss_mask", "1 everywhere", "1 on the assistant's tokens",
            (f"all {n} masks are 1 at every position: {why}",),
        )  # fmt: skip
        return
    if not any(bool(c.loss_mask.any()) for c in captures):
        yield Finding(
            "mask_empty", "mask", "loss_mask", "0 everywhere", "1 on the assistant's tokens",
            (f"all {n} masks are 0 at every position",),
        )  # fmt: skip
        view.changes.append("every position scored, as no mask scores any")
        return
    starts = [
        (c.token_ids, int(c.loss_mask.nonzero()[0])) for c in captures
        if c.loss_mask.any() and int(c.loss_mask.nonzero()[0]) >= 2
    ]  # fmt: skip
    if len(starts) < 4:
        yield "too few answers that follow a prompt to see whether the mask starts where they do"
        return
    first, before, earlier = (
        [int(ids[s + shift]) for ids, s in starts] for shift in (0, -1, -2)
    )  # fmt: skip
    constant = len(set(first)) == 1 and len(set(before)) == 1
    # A first token like "<think>" is constant too; a header's token closes the prompt's headers as well.
    header = constant and all(_closes_a_header(ids, s) for ids, s in starts)
    late = len(set(earlier)) == 1 and len(set(before)) > max(2, len(starts) // 4)
    if header or late:
        where = "a token early" if header else "a token late"
        yield Finding(
            "mask_shifted", "mask", "loss_mask", f"starts {where}", "starts with the answer",
            (f"n = {len(starts)} answers: " + (
                f"the first scored token is always id {first[0]}, which closes every header"
                if header else
                f"{len(set(before))} different tokens stand before the mask, after one and the same token"
            ),),
        )  # fmt: skip


def _closes_a_header(ids: Tensor, at: int) -> bool:
    """Whether the token here also stands, earlier, a few places behind what opens the header before it."""
    openers = set(ids[max(0, at - 4) : at - 1].tolist())
    same = (ids[:at] == ids[at]).nonzero().flatten().tolist()
    return any(openers & set(ids[max(0, i - 4) : max(0, i - 1)].tolist()) for i in same)


@probe("slots", "captures")
def slots(view: View) -> Seen:
    """States that are zero, or equal to another one (P3)."""
    taps = [t for t in view.case.draft.contract.taps if t in view.taps] or view.taps
    some = view.sound[:4]
    for tap in dict.fromkeys(taps):
        if all(not bool(c.state(tap).any()) for c in some):
            view.settled.add("taps")  # any other state would be better than none
            yield Finding(
                "slot_zero", "slots", f"state {tap}", "zero", "the target's state",
                (f"every number of {tap} is 0 in {len(some)} of {len(some)} captures looked at",),
            )  # fmt: skip
    for i, a in enumerate(view.taps):
        for b in view.taps[i + 1 :]:
            if all(torch.equal(c.state(a), c.state(b)) and bool(c.state(a).any()) for c in some):
                yield Finding(
                    "slot_duplicated", "slots", "captures", f"{a} equal to {b}", "two different states",
                    (f"equal bit by bit in {len(some)} of {len(some)} captures looked at",),
                )  # fmt: skip


@probe("rows", "captures", "reference")
def rows(view: View) -> Seen:
    """Rows of another text, shifted, or rotated: each against what it must be (P3, P5)."""
    tap, files = view.reference_tap, view.sound
    if view.case.head is None or tap != Tap(0):  # recomputed
        files = view.own_ids[:LIVE_FILES]
    turned, shifted, foreign = [], {}, {}
    for capture in files:
        x, ref = capture.state(tap).float(), view.reference(capture)
        good = _near(x, ref) | view.replaced(capture)
        if float(good.double().mean()) >= SOUND:
            continue
        size, cosine = (
            x.norm(dim=-1) / ref.norm(dim=-1).clamp(min=1e-9),
            (normalize(x, dim=-1) * normalize(ref, dim=-1)).sum(-1),
        )
        if float((size - 1).abs().median()) < 0.02 and float(cosine.abs().median()) < 0.2:
            turned.append((capture, float(size.median()), float(cosine.mean())))
        elif found := _shift(x, ref, good):
            shifted[capture.name] = found
        else:
            foreign[capture.name] = float(good.float().mean())
    n = len(files)
    if turned:
        _turn_back(view, [t[0] for t in turned], n)
        size, cosine = (sum(t[k] for t in turned) / len(turned) for k in (1, 2))
        yield Finding(
            "states_rotated", "rows", f"state {tap}", "rotated", "in the target's own basis",
            (f"{len(turned)} of {n} files: norms {size:.3f} of what they must be, cosine {cosine:.3f}",),
        )  # fmt: skip
    if shifted:
        name, (start, by) = next(iter(shifted.items()))
        view.off |= dict.fromkeys(shifted, "rows shifted")
        yield Finding(
            "rows_shifted", "rows", "states", f"from row {start} on those of {by} tokens later",
            "those of their own tokens",
            (f"{len(shifted)} of {n} files, {name} for one: rows before {start} agree with {tap} of their "
             f"tokens, later ones with that of {by} tokens later",),
        )  # fmt: skip
    if foreign and len(foreign) < n:
        view.off |= dict.fromkeys(foreign, "states of another text")
        names = ", ".join(list(foreign)[:4])
        yield Finding(
            "files_swapped", "rows", "states", f"{names}: of another text", "of their own tokens",
            (f"{len(foreign)} of {n} files agree with {tap} of their tokens in "
             f"{share(sum(foreign.values()), len(foreign))} of their rows, the others in more than 95 %",),
        )  # fmt: skip
    elif foreign:
        yield (
            f"the states called {tap} are not that in any of {n} files: the names of the taps are wrong, or "
            "the target is another one"
        )


def _turn_back(view: View, turned: list[Capture], n: int) -> None:
    """Undo one rotation of all stored states where the rows determine it; else no search makes sense.

    Args:
        turned: the rotated ones of `n` files.
    """
    tap = view.reference_tap
    if len(turned) < n:
        view.stop = f"the states of {len(turned)} of {n} files are rotated"
        return
    pairs = []
    for c in turned:
        kept = ~view.replaced(c)
        pairs.append((c.state(tap).float()[kept], view.reference(c)[kept]))
    q = rotation(*(torch.cat(rows) for rows in zip(*pairs, strict=True)))
    if q is None:
        view.stop = f"the states are rotated, by what the rows of {n} files do not determine"
    elif not all(float(_near(x @ q.T, ref).double().mean()) >= SOUND for x, ref in pairs):
        view.stop = "the states are rotated, not all by one rotation"
    else:
        view.sound = [_turned(view, c, q) for c in view.sound]
        view.changes.append(f"every state turned back by the rotation between {tap} and what it must be")


def _turned(view: View, capture: Capture, q: Tensor) -> Capture:
    """The capture with its states turned back; the final one only if more next tokens follow from it then."""
    back = capture.with_states(lambda x: x.float() @ q.T)
    if FINAL not in capture.readers:
        return back
    if view.head_fits:
        at, kind = capture.loss_mask[1:].nonzero().flatten(), capture.final_kind or "pre_norm"
        ids = capture.token_ids[at + 1]
        if view.agreed(back.final(), at, ids, kind) > view.agreed(capture.final(), at, ids, kind):
            return back
    return replace(back, readers={**back.readers, FINAL: capture.readers[FINAL]})


def _near(x: Tensor, ref: Tensor) -> Tensor:
    """(L,) rows whose relative error is at most CLOSE."""
    return (x - ref).norm(dim=-1) <= CLOSE * ref.norm(dim=-1)


def _shift(x: Tensor, ref: Tensor, good: Tensor) -> tuple[int, int] | None:
    """(first wrong row, shift) if the head of the file agrees and its tail is that of later tokens."""
    start = int((~good).nonzero()[0])
    for by in range(1, min(PAGE, len(x) - start - 1) + 1):
        if float(_near(x[start : len(x) - by], ref[start + by :]).double().mean()) >= SOUND and start:
            return start, by
    return None


@probe("files", "captures")
def files(view: View) -> Seen:
    """Without states to compare with: files in which the draft is far worse than in the others (P8)."""
    contract, captures = view.case.draft.contract, view.judged
    usable = all(t in c.readers for c in captures for t in contract.taps)
    if view.reference_tap is not None or len(captures) < 4 or not usable or view.stop:
        return
    p = DraftForward(view.case.draft).predict(captures, contract)
    n = torch.bincount(p.capture, minlength=len(captures))
    hits = torch.bincount(p.capture, weights=p.hit[:, 0].double(), minlength=len(captures))
    rate = (hits / n.clamp(min=1)).median()
    p_values = binom.cdf(hits.numpy(), n.numpy(), HARDER * float(rate)) * len(captures)
    # A text that was mended is no evidence against its file.
    low = [i for i, x in enumerate(p_values) if x < 1e-4 and captures[i].name not in view.touched]
    if low and 2 * len(low) < len(captures):
        total = int(n[low].sum())
        view.off |= {captures[i].name: "far worse than the others" for i in low}
        yield Finding(
            "files_swapped", "files", "states", ", ".join(captures[i].name for i in low[:4]),
            "of their own tokens",
            (f"accuracy {share(float(hits[low].sum()), total)} (n = {total}) in {len(low)} of "
             f"{len(captures)} files, median of all {100 * float(rate):.1f} %",),
            p_value=float(max(p_values[low])),
        )  # fmt: skip


@probe("names", "captures", "live")
def names(view: View) -> Seen:
    """Which block each stored state really comes from: recomputed (P3), by relative error, scale included."""
    usable = [c for c in view.sound if c.name not in view.touched and c.name not in view.off]
    if not usable:
        yield "no capture is whole enough to recompute its states"
    if view.stop or not usable:
        return
    capture, last = usable[0], view.case.live.model.config.num_hidden_layers
    states = view.recomputed(capture, [Tap(i) for i in range(last + 1)])
    wrong = {}
    for tap in capture.taps:
        x = capture.state(tap).float()
        error = {t: float((x - s).norm() / s.norm()) for t, s in states.items()}
        best = min(error, key=error.get)
        if error[best] > CLOSE:
            yield (
                f"the state called {tap} fits no block of the live target "
                f"(nearest {best}, error {error[best]:.2f})"
            )
        elif isinstance(tap, Tap) and best != tap:
            wrong[tap] = best, error[best], error.get(tap, float("nan"))
        elif isinstance(tap, Stored):
            yield f"{tap} is {best} (relative error {error[best]:.3f}, n = {len(capture)} rows)"
    if wrong:
        steps = {best.after_block - tap.after_block for tap, (best, _, _) in wrong.items()}
        kind = {1: "taps_plus_one", -1: "taps_minus_one"}.get(next(iter(steps)) if len(steps) == 1 else 0)
        yield Finding(
            kind or "slot_order", "names", "names of the stored states",
            ", ".join(map(str, wrong)), ", ".join(str(best) for best, _, _ in wrong.values()),
            tuple(f"{t} is {best}: relative error {e:.3f}, against {own:.3f} (n = {len(capture)} rows)"
                  for t, (best, e, own) in wrong.items()),
        )  # fmt: skip
