"""What a probe is: a check of one part of a case, registered by name, with numbers as evidence.

A probe is a generator registered with `@probe`: it takes a `View` of the case and yields `Finding`s, or
sentences that are worth knowing (remarks). What it needs and lacks is said, never skipped in silence. Most
are exact, the rest carry a p-value. A finding with a `fix` is only a suspicion until `lib.search` has
measured its gain. `lib.probes` lists them all.

Axes: L positions, H hidden, V target vocabulary.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

import torch
from torch import Tensor

from lib.candidates import stored_taps
from lib.captures import FINAL, Capture
from lib.case import Case, Finding
from lib.errors import WorkbookError
from lib.mending import LEFT_OUT, LITTLE, Mended, mended_capture, nonfinite, with_zeros
from lib.taps import Stored, Tap

Seen = Iterator["Finding | str"]
FEW = 8  # captures whose last states are judged


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
    "fits": ("the target's head, as wide as the states and with all ids", lambda v: v.head_fits),
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
    """A case with what several probes compute, computed once; what stops a search is mended (`lib.mending`).

    Attributes:
        case: as given, but for weights of the draft that are mended.
        bad_weights: weight -> (numbers that are NaN or Inf, all), of the draft as given.
        broken: (capture, field) -> why it cannot be used as it is.
        touched: capture -> what was mended in it.
        changes: what else a search does not see as it is on disk.
        off: capture -> what is wrong with its rows.
        settled: contract fields that need no search, because their fault is known.
        stop: why a search would mislead.
    """

    def __init__(self, case: Case) -> None:
        self.broken: dict[tuple[str, str], WorkbookError] = {}
        self.touched: dict[str, Mended] = {}
        self.changes: list[str] = []
        self.off: dict[str, str] = {}
        self.settled: set[str] = set()
        self.shared: dict[str, object] = {}  # what two probes compute, by a name of theirs
        self.stop = ""
        self.bad_weights = nonfinite(case.draft)
        much = [name for name, (bad, whole) in self.bad_weights.items() if bad > LITTLE * whole]
        if much:
            self.stop = f"more than {100 * LITTLE:.0f} % of {' and '.join(much)} is NaN or Inf"
        elif self.bad_weights:
            case = replace(case, draft=with_zeros(case.draft, self.bad_weights))
            self.changes += [
                f"{bad} of {n} numbers of {k} taken as 0" for k, (bad, n) in self.bad_weights.items()
            ]
        self.case = case

    @cached_property
    def sound(self) -> list[Capture]:
        """Captures whose ids and states can all be used, if need be mended; errors go into `broken`."""
        kept, vocab = [], self.case.draft.embed.shape[0]
        for capture in self.case.captures:
            checks = [partial(capture.check_vocab, vocab, str(self.case.draft.path))]
            checks += [partial(capture.state, name) for name in capture.readers]
            errors = [e for check in checks if (e := _refusal(check)) is not None]
            self.broken |= {(capture.name, e.field): e for e in errors}
            if not errors:
                kept.append(capture)
            elif (mended := mended_capture(capture, vocab, self.case.draft.contract.taps)) is not None:
                kept.append(mended.capture)
                self.touched[capture.name] = mended
        # A spare state that few files lack is worth more than those files: it may be the one to try.
        spare = Counter(part for m in self.touched.values() for part, w in m.what.items() if w == LEFT_OUT)
        rare = {part for part, n in spare.items() if part != FINAL and 2 * n <= len(kept)}
        poor = {name for name, m in self.touched.items() if rare & m.what.keys()}
        self.touched = {name: m for name, m in self.touched.items() if name not in poor}
        return [c for c in kept if c.name not in poor]

    @property
    def stored(self) -> list[Capture]:
        """The sound captures as their files have them: for who looks at ids and masks alone."""
        names = {c.name for c in self.sound}
        return [c for c in self.case.captures if c.name in names]

    @property
    def judged(self) -> list[Capture]:
        """Sound captures with scored positions; if every mask is empty, all, with every position scored."""
        if self.sound and not any(bool(c.loss_mask.any()) for c in self.stored):
            return [replace(c, loss_mask=self._all_scored(c)) for c in self.sound]
        return [c for c in self.sound if len(c.scored)]

    def _all_scored(self, capture: Capture) -> Tensor:
        touched = self.touched.get(capture.name)
        return torch.ones_like(capture.loss_mask) if touched is None else ~touched.unscored

    def replaced(self, capture: Capture) -> Tensor:
        """(L,) bool, positions at which an id or the states were replaced."""
        touched = self.touched.get(capture.name)
        return torch.zeros_like(capture.loss_mask) if touched is None else touched.rows

    @property
    def own_ids(self) -> list[Capture]:
        """Sound captures without a replaced id: after one, a live target continues another text."""
        return [c for c in self.sound if not (c.name in self.touched and self.touched[c.name].ids)]

    def agreed(self, states: Tensor, at: Tensor, ids: Tensor, kind: str) -> int:
        """In how many rows `at` (n,) of states (L, H) the head's first choice is the token of ids (n,)."""
        return int((self.case.head.logits(states[at], final_kind=kind).argmax(-1) == ids).sum())

    @property
    def taps(self) -> list[Tap | Stored]:
        """States that every sound capture holds."""
        return stored_taps(self.sound) if self.sound else []

    def told(self) -> list[str]:
        """What was mended, left out, or not searched: at most one remark each."""
        parts: dict[str, list[str]] = {}
        for name, mended in self.touched.items():
            for part, what in mended.what.items():
                parts.setdefault(part, []).append(f"{name}: {what}")
        lines = self.changes + [f"{part} of {len(w)} captures ({w[0]})" for part, w in parts.items()]
        remarks = [f"mended for the search: {'; '.join(lines)}"] if lines else []
        if lost := len({name for name, _ in self.broken} - {c.name for c in self.sound}):
            remarks.append(
                f"{lost} of {len(self.case.captures)} captures left out: over {100 * LITTLE:.0f} % of their "
                "ids, or of the rows of a state, cannot be used"
            )
        if self.settled:
            remarks.append(f"not searched, because of what was found: {', '.join(sorted(self.settled))}")
        return remarks

    @cached_property
    def head_fits(self) -> bool:
        """Whether the head is of the target that was captured, by its sizes."""
        head, files = self.case.head, self.sound
        if head is None:
            return False
        return all(
            c.hidden_size == head.hidden_size and int(c.token_ids.max()) < len(head.embed) for c in files
        )

    @cached_property
    def reference_tap(self) -> Tap | None:
        """A stored tap whose true value is known: the embedding, or any if the target is live."""
        taps = [t for t in self.taps if isinstance(t, Tap)]
        if Tap(0) in taps and self.head_fits:
            return Tap(0)
        return taps[0] if taps and self.case.live is not None else None

    def reference(self, capture: Capture) -> Tensor:
        """(L, H) what the state at `reference_tap` has to be."""
        if self.reference_tap == Tap(0) and self.head_fits:
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


def _refusal(check: Callable[[], object]) -> WorkbookError | None:
    """The error that a check raises, if it does."""
    try:
        check()
    except WorkbookError as err:
        return err
    return None


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
        try:
            for found in check.run(view):
                (findings if isinstance(found, Finding) else remarks).append(found)
        except WorkbookError as err:
            not_run[check.name] = str(err)
    return findings, remarks, not_run


def share(part: int | float, whole: int) -> str:
    """A share in per cent, for sentences."""
    return f"{100 * part / max(1, whole):.1f} %"
