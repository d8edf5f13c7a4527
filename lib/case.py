"""A case, and what was found in it: the words that the diagnosis and the fault zoo share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from lib.captures import Capture
from lib.checkpoints import Draft
from lib.contract import Contract
from lib.errors import WorkbookError
from lib.target_head import TargetHead

if TYPE_CHECKING:
    from lib.decoding import LiveTarget


@dataclass(frozen=True)
class Served:
    """What an engine counted while serving this draft on such text (greedy, one chain).

    Attributes:
        rounds: verification passes.
        accepted_at: (D,) rounds in which the i-th draft token was accepted.
    """

    rounds: int
    accepted_at: tuple[int, ...]

    @property
    def tokens_per_round(self) -> float:
        """1 + accepted / rounds: the bonus is counted."""
        return 1 + sum(self.accepted_at) / self.rounds


@dataclass(frozen=True)
class Case:
    """Everything a diagnosis may look at. Less is possible: it then says which probes it could not run.

    Attributes:
        draft: its `contract` is the declared one, under suspicion like everything else.
        captures: with named taps where somebody named them.
        head: embedding, final norm and lm_head of the target.
        live: the target itself, to recompute states.
        unread: errors of files that could not be opened.
        served: an engine's counters.
    """

    draft: Draft
    captures: tuple[Capture, ...]
    head: TargetHead | None = None
    live: LiveTarget | None = None
    unread: tuple[WorkbookError, ...] = ()
    served: Served | None = None


@dataclass(frozen=True)
class Finding:
    """One fault named, with its evidence.

    Attributes:
        kind: key of `faults.FAULTS`.
        by: probe or search that found it.
        field, before, after: what to change, from what to what, in words of the contract or the file.
        evidence: sentences with their numbers and n.
        p_value: after correction for the candidates tried; 0.0 for an exact check.
        nats: (value, low, high) gain in log-likelihood a token, paired by conversation; None if not measured.
        accuracy: (before, after) in-vocab accuracy at depth 0; None if the fix cannot be tried here.
        tokens: (before, after) tokens per round, bonus included; None likewise.
        fix: the contract or draft after the fix, for peeling; None if it cannot be tried here.
        sure: of a suspicion, one with a `fix`: it stands by itself where no search can try the fix.
    """

    kind: str
    by: str
    field: str
    before: str
    after: str
    evidence: tuple[str, ...]
    p_value: float = 0.0
    nats: tuple[float, float, float] | None = None
    accuracy: tuple[float, float] | None = None
    tokens: tuple[float, float] | None = None
    fix: Contract | Draft | None = field(default=None, repr=False, compare=False)
    sure: bool = False


@dataclass(frozen=True)
class Diagnosis:
    """The verdict.

    Attributes:
        verdict: "fault", "healthy", "look at the engine" or "cannot tell".
        findings: most valuable first; empty unless the verdict is "fault".
        remarks: what is worth knowing and is no fault (a weak draft, a negligible gain, a shared theta).
        not_run: probe -> why it could not run.
        because: one sentence that could stand in a ticket.
    """

    verdict: str
    findings: tuple[Finding, ...]
    remarks: tuple[str, ...]
    not_run: dict[str, str]
    because: str
    numbers: dict[str, Any] = field(default_factory=dict)

    def names(self) -> Sequence[str]:
        """Kinds found, in order."""
        return [f.kind for f in self.findings]
