"""Probes: checks of one part of a case each, with numbers; most are exact, the rest carry a p-value.

A probe is a generator registered with `@probe`: it takes a `View` of the case and yields `Finding`s, or
sentences that are worth knowing (remarks). What it needs and lacks is said, never skipped in silence. A
finding with a `fix` is only a suspicion until `lib.search` has measured its gain. P1, P2, ... are the probes
of the formats reference, section B.0.

Axes: L positions, H hidden, V target vocabulary, Vd draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from scipy.stats import binom
from scipy.stats import t as student
from torch import Tensor
from torch.nn.functional import normalize

from lib.captures import FINAL, Capture
from lib.case import Case, Finding
from lib.draft import DraftForward
from lib.errors import WorkbookError
from lib.final_state import judge_final
from lib.search import rope_of
from lib.taps import Stored, Tap

Seen = Iterator["Finding | str"]
ROWS = 512  # rows of a table compared with the target's
CLOSE = 0.1  # relative error up to which a state is "the same": bf16 against fp32 is below 0.03
SOUND = 0.95  # share of a file's rows that must agree
HARDER = 0.7  # a text may be harder than the others down to this share of their accuracy
PAGE = 64  # largest row shift looked for
FEW = 8  # captures whose last states are judged
TARGET_TEXTS = 10  # captures on which the draft is compared with inner states
LIVE_FILES = 32  # files recomputed by the live target
OWN_TEXT = 0.7  # the target's first choice must be the next token at least so often
OPENING = 8  # tokens of an answer
MIN_OPENINGS = 4  # answers that show a spread
SURPRISED = 0.5  # nats a token by which they surprise more than the rest; about 0 in text of its own
SHUFFLED = 0.35  # below that the text is no text
MARGIN = 0.02  # agreement with an inner state must beat the text's by that


@dataclass(frozen=True)
class Probe:
    """One registered check: name, what it needs of a `View`, and the function."""

    name: str
    needs: tuple[str, ...]
    run: Callable[[View], Seen]


PROBES: dict[str, Probe] = {}
NEEDS: dict[str, tuple[str, Callable[[View], bool]]] = {
    "head": ("the target's head", lambda v: v.case.head is not None),
    "width": (
        "the target's head, as wide as the draft",
        lambda v: v.case.head is not None and v.case.head.hidden_size == v.case.draft.hidden_size,
    ),
    "live": ("the live target", lambda v: v.case.live is not None),
    "captures": ("a capture that can be read", lambda v: bool(v.sound)),
    "final": ("final states", lambda v: any(FINAL in c.readers for c in v.sound)),
    "reference": (
        "states to compare with: the live target, or its head and a stored embedding",
        lambda v: v.reference_tap is not None,
    ),
}


def probe(name: str, *needs: str) -> Callable:
    """Register a check under a name; `needs` are keys of `NEEDS`."""

    def register(run: Callable[[View], Seen]) -> Callable[[View], Seen]:
        PROBES[name] = Probe(name, needs, run)
        return run

    return register


class View:
    """A case with what several probes compute, computed once."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.broken: dict[str, WorkbookError] = {}  # capture -> why it cannot be used
        self.off: dict[str, str] = {}  # capture -> what is wrong with its rows
        self.stop = ""  # why a search would mislead

    @cached_property
    def sound(self) -> list[Capture]:
        """Captures whose ids and states can all be read; errors of the others go into `broken`."""
        kept = []
        for capture in self.case.captures:
            try:
                capture.check_vocab(self.case.draft.embed.shape[0], str(self.case.draft.path))
                for name in capture.readers:
                    capture.state(name)
            except WorkbookError as err:
                self.broken[capture.name] = err
            else:
                kept.append(capture)
        return kept

    @cached_property
    def reference_tap(self) -> Tap | None:
        """A stored tap whose true value is known: the embedding, or any if the target is live."""
        taps = [t for t in self.sound[0].taps if isinstance(t, Tap)] if self.sound else []
        if Tap(0) in taps and self.case.head is not None:
            return Tap(0)
        return taps[0] if taps and self.case.live is not None else None

    def reference(self, capture: Capture) -> Tensor:
        """(L, H) what the state at `reference_tap` has to be."""
        if self.reference_tap == Tap(0) and self.case.head is not None:
            return self.case.head.embed[capture.token_ids].float()
        return self.recomputed(capture, (self.reference_tap,))[self.reference_tap]

    def recomputed(self, capture: Capture, taps: Sequence[Tap]) -> dict[Tap, Tensor]:
        """States (L, H) of the live target on the capture's tokens."""
        from lib.target import record_states

        found = record_states(self.case.live.model, capture.token_ids[None], tuple(taps))
        return {tap: x[0].float() for tap, x in found.items()}

    @cached_property
    def next_tokens(self) -> tuple[list[Tensor], list[Tensor]]:
        """Per capture with a final state: rows (n,) where the assistant speaks next, and those tokens."""
        rows = [c.loss_mask[1:].nonzero().flatten() for c in self.finals]
        return rows, [c.token_ids[r + 1] for c, r in zip(self.finals, rows, strict=True)]

    @cached_property
    def finals(self) -> list[Capture]:
        """A few sound captures with a final state."""
        usable = [c for c in self.sound if FINAL in c.readers and c.name not in self.off]
        return [c for c in usable if c.loss_mask[1:].any()][:FEW]


def run_probes(view: View, names: Iterable[str] = ()) -> tuple[list[Finding], list[str], dict[str, str]]:
    """Every probe that can run, or those named: findings, remarks, and why the others did not run."""
    findings: list[Finding] = []
    remarks: list[str] = []
    not_run: dict[str, str] = {}
    for check in [PROBES[n] for n in names] or PROBES.values():
        lacking = [NEEDS[n][0] for n in check.needs if not NEEDS[n][1](view)]
        if lacking:
            not_run[check.name] = "it needs " + " and ".join(dict.fromkeys(lacking))
            continue
        for found in check.run(view):
            (findings if isinstance(found, Finding) else remarks).append(found)
    return findings, remarks, not_run


def _share(part: int | float, whole: int) -> str:
    return f"{100 * part / max(1, whole):.1f} %"


# ---- captures: readable, whole, of these tokens -------------------------------------------------


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
                (f"{len(errors)} of {n} captures: {first}",),
            )  # fmt: skip
    for name, error in view.broken.items():
        if name not in ids and name not in others:
            yield f"{name} could not be used: {error}"
    for error in view.case.unread:
        yield f"not read: {error}"


@probe("mask", "captures")
def mask(view: View) -> Seen:
    """Loss masks that are full, empty, or start a token early or late (P10)."""
    captures = view.sound
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
        view.stop = "no position is scored"
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
    capture = view.sound[0]
    taps = [t for t in view.case.draft.contract.taps if t in capture.readers] or list(capture.taps)
    some = view.sound[:4]
    for tap in dict.fromkeys(taps):
        if all(not bool(c.state(tap).any()) for c in some):
            view.stop = f"the state at {tap} is zero"
            yield Finding(
                "slot_zero", "slots", f"state {tap}", "zero", "the target's state",
                (f"every number is 0 in {len(some)} of {len(some)} captures looked at",),
            )  # fmt: skip
    for i, a in enumerate(capture.taps):
        for b in capture.taps[i + 1 :]:
            if all(torch.equal(c.state(a), c.state(b)) and bool(c.state(a).any()) for c in some):
                yield Finding(
                    "slot_duplicated", "slots", "captures", f"{a} equal to {b}", "two different states",
                    (f"equal bit by bit in {len(some)} of {len(some)} captures looked at",),
                )  # fmt: skip


@probe("rows", "captures", "reference")
def rows(view: View) -> Seen:
    """Rows of another text, shifted, or rotated: each against what it must be (P3, P5)."""
    tap, files = view.reference_tap, view.sound
    if view.case.head is None or tap != Tap(0):
        files = files[:LIVE_FILES]
    turned, shifted, foreign = [], {}, {}
    for capture in files:
        x, ref = capture.state(tap).float(), view.reference(capture)
        good = _near(x, ref)
        if float(good.float().mean()) >= SOUND:
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
        view.stop = "the states are rotated"
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
             f"{_share(sum(foreign.values()), len(foreign))} of their rows, the others in more than 95 %",),
        )  # fmt: skip
    elif foreign:
        yield (
            f"the states called {tap} are not that in any of {n} files: the names of the taps are wrong, or "
            "the target is another one"
        )


def _near(x: Tensor, ref: Tensor) -> Tensor:
    """(L,) rows whose relative error is at most CLOSE."""
    return (x - ref).norm(dim=-1) <= CLOSE * ref.norm(dim=-1)


def _shift(x: Tensor, ref: Tensor, good: Tensor) -> tuple[int, int] | None:
    """(first wrong row, shift) if the head of the file agrees and its tail is that of later tokens."""
    start = int((~good).nonzero()[0])
    for by in range(1, min(PAGE, len(x) - start - 1) + 1):
        if float(_near(x[start : len(x) - by], ref[start + by :]).float().mean()) >= SOUND and start:
            return start, by
    return None


@probe("files", "captures")
def files(view: View) -> Seen:
    """Without states to compare with: files in which the draft is far worse than in the others (P8)."""
    contract, captures = view.case.draft.contract, [c for c in view.sound if len(c.scored)]
    usable = all(t in c.readers for c in captures for t in contract.taps)
    if view.reference_tap is not None or len(captures) < 4 or not usable or view.stop:
        return
    p = DraftForward(view.case.draft).predict(captures, contract)
    n = torch.bincount(p.capture, minlength=len(captures))
    hits = torch.bincount(p.capture, weights=p.hit[:, 0].double(), minlength=len(captures))
    rate = (hits / n.clamp(min=1)).median()
    p_values = binom.cdf(hits.numpy(), n.numpy(), HARDER * float(rate)) * len(captures)
    low = [i for i, x in enumerate(p_values) if x < 1e-4]
    if low and 2 * len(low) < len(captures):
        total = int(n[low].sum())
        view.off |= {captures[i].name: "far worse than the others" for i in low}
        yield Finding(
            "files_swapped", "files", "states", ", ".join(captures[i].name for i in low[:4]),
            "of their own tokens",
            (f"accuracy {_share(float(hits[low].sum()), total)} (n = {total}) in {len(low)} of "
             f"{len(captures)} files, median of all {100 * float(rate):.1f} %",),
            p_value=float(max(p_values[low])),
        )  # fmt: skip


@probe("names", "captures", "live")
def names(view: View) -> Seen:
    """Which block each stored state really comes from: recomputed (P3), by relative error, scale included."""
    capture = view.sound[0]
    last = view.case.live.model.config.num_hidden_layers
    if view.stop or capture.name in view.off:
        return
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


# ---- weights ------------------------------------------------------------------------------------


@probe("weights")
def weights(view: View) -> Seen:
    """Weights that are not finite, zero, freshly initialised, or never loaded (P1)."""
    draft = view.case.draft
    tensors = {"norm": draft.norm, "lm_head": draft.lm_head, "fc": draft.fc, "input_norm": draft.input_norm}
    tensors |= {f"fc_norm.{i}": x for i, x in enumerate(draft.fc_norm)}
    for i, layer in enumerate(draft.layers):
        tensors |= {f"layers.{i}.{k}": v for k, v in vars(layer).items()}
    tensors = {k: v for k, v in tensors.items() if isinstance(v, Tensor)}
    for name, x in tensors.items():
        if not bool(torch.isfinite(x.sum(dtype=torch.float64))):
            view.stop = f"{name} is not finite"
            yield Finding("weights_nonfinite", "weights", name, "NaN or Inf", "finite numbers",
                          (f"{int((~torch.isfinite(x)).sum())} of {x.numel()} numbers",))  # fmt: skip
        elif not bool(x.any()) and not name.endswith("bias"):
            yield Finding("layer_unloaded", "weights", name, "zero", "trained weights",
                          (f"all {x.numel()} numbers are 0",))  # fmt: skip
    if draft.fc is not None:
        blocks = [float(b.float().norm()) for b in draft.fc.chunk(draft.n_slots, 1)]
        for i, size in enumerate(blocks):
            if size < 1e-3 * max(blocks):
                yield Finding("slot_zero", "weights", f"fc slot {i}", "no weight", "trained weights",
                              (f"norms of the slots' columns: {[round(b, 3) for b in blocks]}",))  # fmt: skip
    yield from _layers(view)
    ones = [k for k, v in tensors.items() if v.ndim == 1 and "bias" not in k and bool((v == 1).all())]
    first = draft.layers[0]
    fresh = {
        k: float(v.float().std()) for k, v in vars(first).items() if isinstance(v, Tensor) and v.ndim == 2
    }
    own = [k for k in ones if k.startswith("layers.0.")]
    if own and len(own) == sum(k.startswith("layers.0.") and v.ndim == 1 and "bias" not in k
                               for k, v in tensors.items()):  # fmt: skip
        spread = ", ".join(f"{k} {v:.4f}" for k, v in fresh.items())
        yield Finding(
            "layer_unloaded", "weights", "layers.0", "freshly initialised", "trained weights",
            (f"all {len(own)} norm weights of the layer are exactly 1", f"spread of its matrices: {spread}"),
        )  # fmt: skip
        ones = [k for k in ones if k not in own]
    if ones:
        yield Finding(
            "norm_ones", "weights", ", ".join(ones), "exactly 1", "a trained weight",
            tuple(f"all {tensors[k].numel()} numbers of {k} are exactly 1" for k in ones),
        )  # fmt: skip


def _layers(view: View) -> Seen:
    draft = view.case.draft
    if draft.fc is not None and draft.layers[0].hidden_norm is None:
        yield Finding("hidden_norm_lost", "weights", "layers.0.hidden_norm", "no such weight",
                      "hidden_norm.weight", ("the draft has fc and no hidden_norm",))  # fmt: skip
    stated = draft.config.get("transformer_layer_config", draft.config).get("num_hidden_layers")
    if isinstance(stated, int) and stated != len(draft.layers):
        yield Finding("layer_lost", "weights", "layers", str(len(draft.layers)), str(stated),
                      (f"config.json says {stated} layers, the file has {len(draft.layers)}",))  # fmt: skip


@probe("embedding", "head")
def embedding(view: View) -> Seen:
    """The draft's token embeddings against the target's, row by row (P1)."""
    draft, table = view.case.draft, view.case.head.embed
    if draft.embed is table or draft.embed.shape != table.shape:
        return
    at = torch.linspace(0, len(table) - 1, min(ROWS, len(table))).long()
    own, theirs = draft.embed[at].float(), table[at].float()
    cosine = float((normalize(own, dim=-1) * normalize(theirs, dim=-1)).sum(-1).mean())
    if abs(cosine) < 0.1:
        yield Finding(
            "embed_random", "embedding", "embed_tokens", "the draft's own", "the target's",
            (f"mean cosine with the target's rows {cosine:.3f} (n = {len(at)}), "
             f"spread {float(own.std()):.4f}",),
            fix=replace(draft, embed=table),
        )  # fmt: skip
    elif cosine < 0.999:
        yield f"the draft has an embedding of its own: mean cosine with the target's rows {cosine:.3f}"


@probe("lm_head", "width")
def lm_head(view: View) -> Seen:
    """Rows of lm_head that are the target's bit by bit: overwritten, or never trained (P1)."""
    draft, table = view.case.draft, view.case.head.lm_head
    ids = draft.to_target(torch.arange(draft.draft_vocab), "offset")
    if draft.draft_vocab == draft.target_vocab or int(ids.min()) < 0 or int(ids.max()) >= len(table):
        return
    same = int((table[ids].to(draft.lm_head.dtype) == draft.lm_head).all(-1).sum())
    if same > 0.99 * len(ids):
        yield Finding(
            "lm_head_overwritten", "lm_head", "lm_head", "the target's rows", "the draft's own",
            (f"{same} of {len(ids)} rows equal the target's bit by bit: training would have moved them",),
        )  # fmt: skip


# ---- vocabulary maps ----------------------------------------------------------------------------


@probe("map")
def vocabulary_map(view: View) -> Seen:
    """d2t by itself and against t2d: order, range, known defaults (P2)."""
    draft = view.case.draft
    if draft.d2t is None:
        if draft.draft_vocab < draft.target_vocab:
            yield Finding("map_identity", "map", "d2t", "none", "the map of the training run",
                          (f"{draft.draft_vocab} of {draft.target_vocab} ids, and no d2t",))  # fmt: skip
        return
    kind, why = map_doubt(view)
    if kind:
        fix = _map_fix(view)
        after = (
            "rebuilt from t2d" if fix is not None and _whole_t2d(draft) else "rebuilt from rows of lm_head"
        )
        yield Finding(kind, "map", "d2t", "as stored",
                      after if fix else "the map of the training run", (why,), fix=fix)  # fmt: skip


def map_doubt(view: View) -> tuple[str, str]:
    """(fault key or "", sentence): which known wrong map the stored d2t is."""
    draft = view.case.draft
    n, rows = draft.draft_vocab, torch.arange(draft.draft_vocab)
    d2t = draft.d2t.long()
    ids = rows + d2t
    if n == draft.target_vocab and not bool(d2t.any()):
        return "", ""
    rising = bool((ids[1:] > ids[:-1]).all())
    outside = int(((ids < 0) | (ids >= draft.target_vocab)).sum())
    t2d = draft.t2d.nonzero().flatten() if _whole_t2d(draft) else None
    if torch.equal(d2t, rows) and n > 1:
        return "d2t_arange", f"d2t equals 0 .. {n - 1}: draft id i would mean 2i (n = {n})"
    if t2d is not None and torch.equal(d2t, t2d):
        return "d2t_absolute", f"d2t holds the {n} target ids of t2d themselves, not offsets"
    if outside:
        kind = "d2t_absolute" if bool((d2t[1:] > d2t[:-1]).all()) else "d2t_stale"
        return kind, f"{outside} of {n} draft ids would mean ids outside 0 .. {draft.target_vocab - 1}"
    if not bool(d2t.any()) and (t2d is None or not torch.equal(t2d, rows)):
        return "d2t_zeros", f"d2t is zero everywhere, with {n} of {draft.target_vocab} ids"
    if t2d is not None and not torch.equal(t2d, ids.sort().values):
        differ = n - int(torch.isin(ids, t2d).sum())
        return "d2t_stale", f"d2t and t2d disagree on {differ} of {n} ids"
    if not rising:
        back = int((ids[1:] <= ids[:-1]).sum())
        return "d2t_permuted", f"{back} of {n} mapped ids do not ascend"
    return "", ""


def _whole_t2d(draft) -> bool:
    return draft.t2d is not None and int(draft.t2d.sum()) == draft.draft_vocab


def _map_fix(view: View):
    draft, rows = view.case.draft, torch.arange(view.case.draft.draft_vocab)
    if _whole_t2d(draft):
        d2t = draft.t2d.nonzero().flatten() - rows
        return None if torch.equal(d2t, draft.d2t.long()) else replace(draft, d2t=d2t)
    if NEEDS["width"][1](view) and (ids := _resembled(view, rows)) is not None:
        return replace(draft, d2t=ids - rows)
    return None


def _resembled(view: View, rows: Tensor) -> Tensor | None:
    """Target row that each of these rows of lm_head resembles most; None if they resemble none."""
    table = normalize(view.case.head.lm_head.float(), dim=-1)  # (V, H)
    found = [
        (normalize(x.float(), dim=-1) @ table.T).max(-1) for x in view.case.draft.lm_head[rows].split(256)
    ]
    best, ids = (torch.cat([f[k] for f in found]) for k in (0, 1))
    return ids if float(best.median()) > 0.5 and len(ids.unique()) > 0.9 * len(ids) else None


@probe("map rows", "width")
def map_rows(view: View) -> Seen:
    """Rows of lm_head start as the target's: do they resemble the rows that d2t names? (P2, fault 22)."""
    draft = view.case.draft
    if draft.d2t is None or draft.draft_vocab == draft.target_vocab:
        return
    at = torch.linspace(0, draft.draft_vocab - 1, min(ROWS, draft.draft_vocab)).long()
    like, named = _resembled(view, at), draft.to_target(at, "offset")
    if like is None:
        yield "rows of lm_head resemble no rows of the target's: a stale map cannot be seen in them"
        return
    agree = int((like == named).sum())
    if agree >= 0.9 * len(at):
        return
    rows = torch.arange(draft.draft_vocab)
    ids = _resembled(view, rows)
    doubt, _ = map_doubt(view)
    same_set = ids is not None and torch.equal(ids.sort().values, (rows + draft.d2t.long()).sort().values)
    yield Finding(
        doubt or ("d2t_permuted" if same_set else "d2t_stale"), "map rows", "d2t", "as stored",
        "rebuilt from rows of lm_head",
        (f"{agree} of {len(at)} rows of lm_head resemble the target row that d2t names most",),
        fix=None if ids is None else replace(draft, d2t=ids - rows),
    )  # fmt: skip


# ---- last states, text, targets -----------------------------------------------------------------


def _agreement(view: View, states: Sequence[Tensor], kind: str) -> tuple[int, int]:
    """(hits, n): how often the head's first choice on these states is the next token of the answer."""
    at, truth = view.next_tokens
    hits = 0
    for x, r, ids in zip(states, at, truth, strict=True):
        hits += int((view.case.head.logits(x[r], final_kind=kind).argmax(-1) == ids).sum())
    return hits, sum(map(len, truth))


@probe("final", "captures", "head", "final")
def final(view: View) -> Seen:
    """Final states: pre- or post-norm, of the last block, and does the text follow them? (P8)."""
    captures, head = view.finals, view.case.head
    if not captures or view.stop:
        return
    claim = captures[0].final_kind
    verdict = judge_final(captures, head)
    if verdict.kind != "undecided" and claim is not None and verdict.kind != claim:
        kind = "final_unnormed" if claim == "post_norm" else "final_normed_twice"
        yield Finding(kind, "final", "final_kind", claim, verdict.kind, verdict.reasons)
    kind = verdict.kind if verdict.kind != "undecided" else claim
    if kind is None:
        yield f"the final state's kind is undecided: {'; '.join(verdict.reasons)}"
        return
    hits, n = _agreement(view, [c.final() for c in captures], kind)
    same = [t for t in captures[0].taps if all(torch.equal(c.state(t), c.final()) for c in captures)]
    text = f"the head's first choice on the final state is the next token in {_share(hits, n)} (n = {n})"
    true = None
    if view.case.live is not None:
        last = Tap(view.case.live.model.config.num_hidden_layers)
        true = _agreement(view, [view.recomputed(c, (last,))[last] for c in captures], "pre_norm")[0]
        text += f", on the live target's in {_share(true, n)}"
    last_layer = Tap(head.n_layers)
    if same and same[0] != last_layer:
        inner = same[0]
        yield Finding(
            "final_early" if inner == Tap(head.n_layers - 1) else "final_is_slot", "final", "final state",
            str(inner), str(last_layer), (f"it equals the stored state {inner} bit by bit", text),
        )  # fmt: skip
    elif true is not None and hits < true - 0.02 * n:
        near = _nearest(view, captures[0])
        kind = "final_early" if near == Tap(head.n_layers - 1) else "final_is_slot"
        yield Finding(kind, "final", "final state", str(near), str(last_layer), (text,))
    elif true is None and hits < OWN_TEXT * n:
        yield text + ": either the text is not the target's own, or this is not its last state"


def _nearest(view: View, capture: Capture) -> Tap:
    last = view.case.live.model.config.num_hidden_layers
    states, x = view.recomputed(capture, [Tap(i) for i in range(last + 1)]), capture.final().float()
    return min(states, key=lambda t: float((x - states[t]).norm() / states[t].norm()))


@probe("text", "captures", "live")
def text(view: View) -> Seen:
    """Is the text the target's own? Its first choice against the next token, recomputed (P8, fault 34)."""
    hits = n = 0
    surplus = []
    model = view.case.live.model
    for capture in [c for c in view.sound if c.loss_mask[1:].any()][:LIVE_FILES]:
        at = capture.loss_mask[1:].nonzero().flatten()
        with torch.inference_mode():
            x = model.model(input_ids=capture.token_ids[None], use_cache=False).last_hidden_state[0, at]
            log_p = model.lm_head(x).float().log_softmax(-1)  # (n, V)
        hits += int((log_p.argmax(-1) == capture.token_ids[at + 1]).sum())
        n += len(at)
        # Text drawn from a model is on average as surprising as its entropy, first choices are less so, both
        # alike at the beginning and later on. A foreign answer surprises at its beginning only: what
        # follows is predicted well from that.
        surprise = -log_p.gather(1, capture.token_ids[at + 1, None])[:, 0] + (log_p.exp() * log_p).sum(-1)
        if len(at) >= 2 * OPENING:
            surplus.append(float(surprise[:OPENING].mean() - surprise[OPENING:].mean()))
    if n and hits < OWN_TEXT * n:
        yield Finding(
            "text_shuffled" if hits < SHUFFLED * n else "text_of_others", "text", "answers",
            "not the target's own", "written by the target",
            (f"the target's first choice is the next token in {_share(hits, n)} (n = {n}); "
             f"in text of its own that is {100 * OWN_TEXT:.0f} % or more",),
        )  # fmt: skip
    elif len(surplus) >= MIN_OPENINGS:
        gain = torch.tensor(surplus, dtype=torch.float64)
        value, spread = float(gain.mean()), max(float(gain.std()), 0.1)
        p_value = float(student.sf(value / (spread / len(gain) ** 0.5), len(gain) - 1))
        if value > SURPRISED and p_value < 0.01:
            yield Finding(
                "text_of_others", "text", "answers", "not the target's own", "written by the target",
                (f"the first {OPENING} tokens of {len(gain)} answers surprise the target by {value:.2f} nats "
                 f"a token more than what follows them, its own entropy subtracted (p = {p_value:.2g}); "
                 f"its first choice is the next token in {_share(hits, n)} (n = {n})",),
                p_value=p_value,
            )  # fmt: skip


@probe("targets", "captures", "head", "final")
def targets(view: View) -> Seen:
    """Does the draft say what the head makes of an inner state, not what the text says? (P8, fault 6)."""
    draft, head = view.case.draft, view.case.head
    captures = [c for c in view.sound if FINAL in c.readers and c.name not in view.off and len(c.scored)]
    contract = draft.contract
    inner = (
        [t for t in captures[0].taps if isinstance(t, Tap) and 0 < t.after_block < head.n_layers]
        if captures
        else []
    )
    if (
        not inner
        or view.stop
        or len(captures) < 4
        or any(t not in c.readers for c in captures for t in contract.taps)
    ):
        return
    captures = captures[:TARGET_TEXTS]
    rows = draft.to_target(torch.arange(draft.draft_vocab), contract.vocab_map).clamp(
        0, len(head.lm_head) - 1
    )
    p = DraftForward(draft).predict(captures, contract)
    counts = torch.zeros(len(captures), len(inner) + 2, dtype=torch.float64)
    total = 0
    for i, capture in enumerate(captures):
        mine = (p.capture == i) & p.in_vocab[:, 0]
        at, said = p.position[mine] + 1, p.draft_ids[mine, 0]
        total += len(at)
        counts[i, 0] = p.hit[mine, 0].sum()
        final_kind = capture.final_kind or "pre_norm"
        for k, x in enumerate(
            [(capture.final(), final_kind), *((capture.state(t), "pre_norm") for t in inner)]
        ):
            counts[i, 1 + k] = (head.logits(x[0][at], final_kind=x[1], rows=rows).argmax(-1) == said).sum()
    best = int(counts[:, 2:].sum(0).argmax())
    # Sampled text disagrees with its writer's first choice too: the inner state must beat that as well.
    gain = counts[:, 2 + best] - counts[:, :2].max(1).values
    t = float(gain.sum()) / (max(float(gain.std()), 0.5) * len(gain) ** 0.5)
    p_value = min(1.0, len(inner) * float(student.sf(t, len(gain) - 1)))
    value = [float(c) / max(1, total) for c in counts.sum(0)]
    if p_value < 0.01 and value[2 + best] > max(value[:2]) + MARGIN:
        yield Finding(
            "inner_targets", "targets", "training targets", str(inner[best]), f"layer{head.n_layers}",
            (f"the draft agrees with the head on {inner[best]} in {100 * value[2 + best]:.1f} %, with its "
             f"first choice on the final state in {100 * value[1]:.1f} %, with the text in "
             f"{100 * value[0]:.1f} % "
             f"(n = {total} in-vocab positions, {len(captures)} conversations)",),
            p_value=p_value,
        )  # fmt: skip


# ---- config -------------------------------------------------------------------------------------


@probe("config")
def config(view: View) -> Seen:
    """What config.json says twice, or says and nothing uses (P1, P7)."""
    draft = view.case.draft
    layer = draft.config.get("transformer_layer_config", draft.config)
    flat, nested = layer.get("rope_theta"), (layer.get("rope_parameters") or {}).get("rope_theta")
    if flat and nested and flat != nested:
        yield f"config.json gives two thetas, rope_theta {flat:g} and rope_parameters {nested:g} (fault 11)"
    if (stated := rope_of(draft.config.get("transformer_layer_config", draft.config))) is not None:
        rope = draft.contract.rope
        if (stated.theta, stated.kind) != (rope.theta, rope.kind):
            yield f"config.json says {stated}, the declared contract has {rope}"
    head = view.case.head
    if (
        head is not None
        and (theirs := rope_of(head.config)) is not None
        and theirs.theta != draft.contract.rope.theta
    ):
        yield (
            f"theta {draft.contract.rope.theta:g} is not the target's {theirs.theta:g}: no fault by itself "
            "(fault 13), unless an engine shares one table"
        )
    window = layer.get("max_position_embeddings")
    longest = max((len(c) for c in view.sound), default=0)
    if window and longest > window:
        yield f"max_position_embeddings {window} is below the longest text, {longest} tokens (fault 15)"
    if unused := [k for k, use in draft.keys.items() if not use.startswith(("used", "ignored"))]:
        yield f"tensors that nothing uses: {', '.join(unused[:5])}"
    if draft.t2d is not None and len(draft.t2d) != draft.target_vocab:
        yield f"t2d has {len(draft.t2d)} entries, the target's vocabulary {draft.target_vocab} (fault 40)"
