"""From a case to a verdict: probes, then search, peeling one cause after another off.

Exact findings of probes stand by themselves. A suspicion with a fix becomes a candidate of the search, and
is accused only if its measured gain is significant against everything tried in its round. The best change
is applied and the search repeated around it, so that a fault hidden by a larger one is found next.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import pandas as pd
import torch

from lib.acceptance import rollouts, walk
from lib.candidates import Candidate, edits, neighbours, stored_taps
from lib.captures import Capture
from lib.case import Case, Diagnosis, Finding
from lib.checkpoints import Draft
from lib.contract import Contract, Source
from lib.draft import DraftForward
from lib.errors import WorkbookError
from lib.faults import FAULTS
from lib.gains import LOUD, SCALES, Gain
from lib.probes import PROBES, View, run_probes
from lib.probing import FEW
from lib.search import Bench
from lib.taps import Stored, Tap, default_triple
from lib.worth import Worth, matters, worth

ROUNDS = 5
LAST = ("targets",)  # probes that look at the draft as the search leaves it
MIN_TEXTS = 4  # fewer conversations have no spread worth testing
NEARLY = 0.9  # share of the best gain with which a named fault is preferred to unnamed taps
RUINED = 0.4  # accuracy below which little is known by what a search prefers
ALIVE = 0.05  # accuracy below which a draft predicts nothing, and no verdict of health is possible
WORTH_TEXTS = 16  # conversations rolled out to compare with an engine
SHORTFALL = 0.95  # served tokens a round below this share of the offline ones, and below their interval
EDITED = {"d2t": "d2t", "embed_tokens": "embed", "lm_head": "lm_head"}  # candidate's field -> Draft's
# Exact defects that leave nothing behind once they are mended: what is left is not theirs to explain.
MENDED = ("weights_nonfinite", "ids_beyond", "fp16_overflow", "mask_empty", "states_rotated")
TAPS = ("incident_slice", "taps_plus_one", "taps_minus_one", "default_triple", "first_states", "slot_order",
        "slot_duplicated", "taps")  # fmt: skip


def diagnose(case: Case, level: float = 0.05, seed: int = 0) -> Diagnosis:
    """Name the faults of a draft with its captures, with evidence; or say that it is healthy.

    Args:
        case: at least a draft and captures; head, live target and counters allow more probes.
        level: chance of accusing a healthy draft, over all candidates of a round.
        seed: order of the conversations in the race.

    Never raises for what is wrong with the case: that is a finding, or "cannot tell" with the reason.
    """
    case, remarks = settle_names(case)
    view = View(case)
    suspects, seen, not_run = run_probes(view, [name for name in PROBES if name not in LAST])
    case = view.case  # with what stops a search mended, where that was little
    peel = _Peel(case, view, suspects, level, seed)
    if view.stop:
        not_run["search"] = view.stop
    else:
        try:
            peel.run()
        except WorkbookError as err:
            not_run["search"] = str(err)
        if peel.why_not:
            not_run["search"] = peel.why_not
    # What the draft learned shows best under its own contract.
    view.case = replace(case, draft=replace(peel.draft, contract=peel.contract))
    learned, seen_last, not_run_last = run_probes(view, LAST)
    peel.suspects = suspects + learned
    not_run |= not_run_last
    findings, unconfirmed = peel.findings()
    remarks += [*seen, *seen_last, *unconfirmed, *view.told()]
    numbers = dict(peel.numbers)
    if findings:
        verdict, because = "fault", "; ".join(sentence(f) for f in findings)
    elif "search" in not_run:
        verdict, because = "cannot tell", f"Cannot tell, because {not_run['search']}"
    elif peel.now.accuracy < ALIVE:
        verdict = "cannot tell"
        because = (
            f"Cannot tell: the draft predicts {100 * peel.now.accuracy:.1f} % (n = {peel.now.n}) under every "
            "contract tried, so its weights, its states or its text are of another model"
        )
    else:
        verdict = "healthy"
        because = (
            f"Nothing among {numbers['tried']} changes beats the declared contract: {_worth(peel.now)}, "
            f"{numbers['conversations']} conversations"
        )
        if not_run:  # a fault that only they see is not ruled out
            because += f"; not asked, for want of what they need: {', '.join(not_run)}"
    if case.served is not None and view.changes:
        remarks.append("the engine's counters are not compared with mended files")
    elif case.served is not None and "search" not in not_run:
        engine, line, finding = engine_check(case, peel)
        numbers["engine"] = engine
        if engine and verdict == "healthy":
            verdict, because = "look at the engine", line
        elif engine and verdict == "fault":  # it loses more than the faults of draft and wiring explain
            findings.append(finding)
            because += f"; {sentence(finding)}"
        else:
            remarks.append(line)
    return Diagnosis(verdict, tuple(findings), tuple(dict.fromkeys(remarks)), not_run, because + ".", numbers)


# ---- names of states nobody named ---------------------------------------------------------------


def settle_names(case: Case) -> tuple[Case, list[str]]:
    """Give unnamed states the names that the declared taps allow; the case as it is if they have names.

    Engines store states in ascending order. As many states as taps: those; one more, and the first is the
    embedding of the tokens: it, and those. Else the last ones are taken as the declared slots, unnamed.
    """
    captures, contract = case.captures, case.draft.contract
    if not captures or not all(isinstance(t, Stored) for c in captures for t in c.taps):
        return case, []
    stored = stored_taps(captures)
    ordered = sorted(t for t in contract.taps if isinstance(t, Tap))
    k = len(contract.taps)
    if len(ordered) == k and len(set(ordered)) == k and Tap(0) not in ordered:
        names = None
        if len(stored) == k:
            names, why = ordered, "as many states as declared taps"
        elif (
            len(stored) == k + 1
            and case.head is not None
            and any(_is_embedding(c, case) for c in captures[:FEW])
        ):
            names, why = [Tap(0), *ordered], "the first state is the embedding of the tokens"
        if names and all(len(c.taps) == len(names) for c in captures):
            text = f"stored states are taken as {', '.join(map(str, names))}: {why}"
            return replace(case, captures=tuple(c.named(names) for c in captures)), [text]
    if len(stored) < k or any(t in contract.taps for t in stored):
        return case, []
    source = Source("inferred", "the last stored states, [1:] as engines store them")
    draft = replace(case.draft, contract=contract.change(source, taps=tuple(stored[-k:])))
    text = f"nobody named the {len(stored)} stored states: the last {k} are taken as the declared taps"
    return replace(case, draft=draft), [text]


def _is_embedding(capture: Capture, case: Case) -> bool:
    try:
        x = capture.stored(0).float()
    except WorkbookError:
        return False
    known = capture.token_ids < len(case.head.embed)
    if capture.hidden_size != case.head.hidden_size or not bool(known.any()):
        return False
    ref = case.head.embed[capture.token_ids[known]].float()
    return float((x[known] - ref).norm()) < 0.05 * float(ref.norm())


# ---- peeling ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Step:
    """A change that was applied: its gain, and what the draft achieved before and after."""

    gain: Gain
    kind: str
    before: Worth
    after: Worth


class _Peel:
    """The search, round by round, and what it was decided on."""

    def __init__(self, case: Case, view: View, suspects: list[Finding], level: float, seed: int) -> None:
        self.case, self.view, self.suspects, self.level, self.seed = case, view, suspects, level, seed
        self.draft, self.contract = case.draft, case.draft.contract
        self.steps: list[_Step] = []
        self.remarks: list[str] = []
        self.numbers: dict = {"tried": 0, "rounds": 0, "conversations": 0}
        self.now: Worth | None = None
        self.why_not = ""
        self.searched = False  # to the end
        self.made: dict[tuple, list[Candidate]] = {}

    @property
    def captures(self) -> list[Capture]:
        """Those the search may trust; all that can be read if too few are left."""
        scored = self.view.judged
        trusted = [c for c in scored if c.name not in self.view.off]
        return trusted if len(trusted) >= MIN_TEXTS else scored

    def run(self) -> None:
        """Search, apply the best change, search again."""
        captures = self.captures
        self.numbers["conversations"] = len(captures)
        if len(captures) < MIN_TEXTS:
            self.why_not = (
                f"{len(captures)} conversations with scored positions are too few to test anything "
                f"(at least {MIN_TEXTS})"
            )
            return
        DraftForward(self.draft).check(captures, self.contract)
        bench = Bench(self.draft, captures, self.seed)
        self.now = worth(self.draft, self.contract, captures)
        self.numbers["before"] = self.now
        for _ in range(ROUNDS):
            self.numbers["rounds"] += 1
            step = self._round(bench, captures)
            if step is None:
                break
            self.steps.append(step)
            c = step.gain.candidate
            self.draft, self.contract, self.now = c.on(self.draft), c.contract, step.after
        self.numbers["after"] = self.now
        self.searched = True

    def _round(self, bench: Bench, captures: Sequence[Capture]) -> _Step | None:
        every = neighbours(self.draft, self.contract, captures, self.case.head) + self._edits()
        every = [c if c.draft is not None else replace(c, draft=self.draft) for c in every]
        every = [c for c in every if c.field not in self.view.settled]
        self.numbers["tried"] += len(every)
        # The size of logits can outweigh what they say, so what only scales them comes after the rest; and
        # the deeper look only where depth 0 has nothing to say.
        groups = (
            [c for c in every if not c.deep and c.field not in SCALES],
            [c for c in every if c.field in SCALES],
            [c for c in every if c.deep],
        )
        for runners in filter(None, groups):  # a group may be settled
            base = Candidate("", "", "", self.contract, self.draft, runners[0].deep)
            raced = bench.race(base, runners, every)
            wins = raced.significant(self.level)
            self.remarks += [
                f"{g.candidate.field}: {g.candidate.after} makes the text {g.nats[0]:.2f} nats a token "
                "likelier without better first choices: it matters for sampling, not for greedy decoding"
                for g in raced.gains
                if g.candidate.field in SCALES and g.nats[1] > 0 and g not in wins
            ]
            # A named file fault explains more than a contract field that happens to undo it.
            wins.sort(key=lambda g: (-round(g.nats[0], 6), not g.candidate.kind))
            for gain in self._named_first(wins)[:3]:
                c = gain.candidate
                after = worth(c.on(self.draft), c.contract, captures)
                # A large gain that moves no token yet may be hidden by another fault: looked behind, and
                # dropped at the end if nothing came of it. Smaller logits always suit a draft that is
                # mostly wrong.
                known = c.field not in SCALES or self.now.accuracy >= RUINED
                if matters(self.now, after) or (known and gain.nats[0] >= LOUD):
                    return _Step(gain, self._kind(c), self.now, after)
                self.remarks.append(
                    f"{c.field}: {c.after} is better than {c.before} by {gain.nats[0]:.4f} nats a token "
                    f"(p = {gain.p_value:.2g}), and changes next to nothing: "
                    f"{_worth(self.now)} -> {_worth(after)}"
                )
        return None

    def _named_first(self, wins: list[Gain]) -> list[Gain]:
        """Taps that no known fault produces give way to a named fault that explains nearly as much."""
        if not wins or self._kind(wins[0].candidate) != "taps":
            return wins
        enough = NEARLY * wins[0].nats[0]
        named = [g for g in wins if g.candidate.field == "taps" and self._kind(g.candidate) != "taps"]
        front = [g for g in named if g.nats[0] >= enough]
        return [*front, *(g for g in wins if g not in front)]

    def _kind(self, candidate: Candidate) -> str:
        return candidate.kind or kind_of(candidate, self.contract, self.case)

    def _edits(self) -> list[Candidate]:
        """Draft edits around the current draft: what a probe suspects, and what `search.edits` knows."""
        key = (id(self.draft), self.contract.vocab_map)
        if key not in self.made:
            found = []
            for s in self.suspects:
                if not isinstance(s.fix, Draft):
                    continue
                name = EDITED[s.field]
                tensor = getattr(s.fix, name)
                if torch.equal(tensor, getattr(self.draft, name)):
                    continue
                found.append(Candidate(s.field, s.before, s.after, self.contract,
                                       replace(self.draft, **{name: tensor}), kind=s.kind,
                                       suspected=True))  # fmt: skip
            for c in edits(self.draft, self.contract, self.case.head):
                name = EDITED[c.field]
                if name in self.view.bad_weights:
                    continue  # whatever has numbers there beats zeros
                if not any(f.field == c.field and torch.equal(getattr(f.draft, name), getattr(c.draft, name))
                           for f in found):  # fmt: skip
                    found.append(c)
            self.made[key] = found
        return [
            replace(
                c, contract=self.contract.change(vocab_map="offset") if c.field == "d2t" else self.contract
            )
            for c in self.made[key]
        ]

    def findings(self) -> tuple[list[Finding], list[str]]:
        """One finding per cause, unmeasured ones first, then by worth; and suspicions not confirmed."""
        # Where nothing could be tried, what is sure of itself needs no trial.
        standing = [f for f in self.suspects if f.fix is None or (f.sure and not self.searched)]
        merged = _by_kind(standing)
        confirmed = set(merged)
        measured = self._measured()
        ruined = self.now is not None and self.numbers["before"].accuracy < ALIVE
        ruined = ruined and self.now.accuracy < RUINED
        exact = [f.kind for f in self.suspects if f.fix is None and f.p_value == 0 and f.kind not in MENDED]
        if ruined and exact:
            self.remarks += [
                f"{f.field}: {f.after} is better than {f.before}, but {exact[0]} leaves "
                f"{100 * self.now.accuracy:.1f} %: mend that first" for f in measured
            ]  # fmt: skip
            measured = []
        for finding in measured:
            confirmed.add(finding.kind)
            twins = [
                s for s in self.suspects
                if s.kind == finding.kind or (s.fix is not None and s.field == finding.field)
            ]  # fmt: skip
            confirmed |= {s.kind for s in twins}
            evidence = (*finding.evidence, *(e for s in twins for e in s.evidence))
            by = " and ".join(dict.fromkeys([*(s.by for s in twins), finding.by]))
            for twin in twins:
                merged.pop(twin.kind, None)
            merged[finding.kind] = replace(finding, evidence=tuple(dict.fromkeys(evidence)), by=by)
        tried = "but the fix gains nothing that is significant" if self.searched else "not tested"
        remarks = [
            f"suspected: {s.kind} ({'; '.join(s.evidence)}), {tried}"
            for s in self.suspects if s.fix is not None and s.kind not in confirmed
        ]  # fmt: skip
        ordered = sorted(
            merged.values(), key=lambda f: -1e9 if f.tokens is None else f.tokens[0] - f.tokens[1]
        )
        return ordered, remarks + self.remarks

    def _measured(self) -> list[Finding]:
        by_field: dict[str, list[_Step]] = {}
        for step in self.steps:
            by_field.setdefault(step.gain.candidate.field, []).append(step)
        out = []
        if self.steps and not matters(self.numbers["before"], self.now):
            by_field = {name: steps for name, steps in by_field.items() if name in SCALES}
        for name, steps in by_field.items():
            first, last = steps[0].gain.candidate, steps[-1].gain.candidate
            if name not in EDITED and getattr(self.contract, name) == getattr(self.case.draft.contract, name):
                continue  # a later round took it back
            kind = steps[-1].kind
            if len(steps) > 1:  # a slot at a time: the whole way is what has to be named
                kind = kind_of(replace(last, before=first.before), self.case.draft.contract, self.case)
            fix = self.draft if name in EDITED else self.contract
            lines = tuple(
                f"{s.gain.candidate.before} -> {s.gain.candidate.after} gains {s.gain.nats[0]:.3f} "
                f"[{s.gain.nats[1]:.3f}, {s.gain.nats[2]:.3f}] nats a token (p = {s.gain.p_value:.2g} after "
                f"correction, n = {s.gain.positions} in {s.gain.conversations} conversations)" for s in steps
            )  # fmt: skip
            before, after = steps[0].before, steps[-1].after
            lines = (*lines, (
                f"{100 * before.accuracy:.1f} % -> {100 * after.accuracy:.1f} % in-vocab accuracy "
                f"(n = {after.n}), {before.tokens:.2f} -> {after.tokens:.2f} tokens a round"
            ))  # fmt: skip
            out.append(Finding(
                kind, "search", name, first.before, last.after, lines, max(s.gain.p_value for s in steps),
                steps[0].gain.nats if len(steps) == 1 else None, (before.accuracy, after.accuracy),
                (before.tokens, after.tokens), fix,
            ))  # fmt: skip
        return out


def _by_kind(findings: Sequence[Finding]) -> dict[str, Finding]:
    """One finding a kind: the first, with the evidence of all."""
    merged: dict[str, Finding] = {}
    for f in findings:
        if f.kind in merged:
            first = merged[f.kind]
            by = " and ".join(dict.fromkeys((*first.by.split(" and "), f.by)))
            f = replace(first, by=by, evidence=(*first.evidence, *f.evidence))
        merged[f.kind] = f
    return merged


# ---- names of faults ----------------------------------------------------------------------------


def kind_of(candidate: Candidate, before: Contract, case: Case) -> str:
    """The fault that a winning change undoes; `before` is the contract it was found around."""
    name, after = candidate.field, candidate.contract
    if name == "taps":
        return _kind_of_taps(before.taps, after.taps, case)
    if name == "rope":
        return _kind_of_rope(before.rope, after.rope)
    if name == "token_shift":
        return "token_shift_0" if before.token_shift < after.token_shift else "token_shift_2"
    if name == "position_step":
        return "position_step_0" if before.position_step < after.position_step else "position_step_2"
    if name == "vocab_map":
        return {"identity": "map_identity", "absolute": "map_absolute"}.get(before.vocab_map, "d2t_absolute")
    return {
        "use_fc": "fc_bypassed", "head_norm": "head_unnormed", "fc_input_norm": "fc_norm_ignored",
        "d2t": "d2t_stale", "embed_tokens": "embed_random", "lm_head": "lm_head_replaced",
    }.get(name, name)  # fmt: skip


def _kind_of_taps(before: tuple, after: tuple, case: Case) -> str:
    if len(set(before)) < len(before):
        return "slot_duplicated"
    if set(before) == set(after):
        return "slot_order"
    if before == tuple(Tap(i) for i in range(len(before))):
        return "first_states"
    if before[:-1] == after[1:]:
        return "incident_slice"
    if all(isinstance(t, Tap) for t in (*before, *after)):
        pairs = zip(before, after, strict=True)
        # The embedding stays where it is when ids are one too low: there is nothing below it.
        steps = {b.after_block - a.after_block for b, a in pairs if not b == a == Tap(0)}
        if steps in ({1}, {-1}):
            return "taps_plus_one" if steps == {1} else "taps_minus_one"
    n = case.head.n_layers if case.head else 0
    return "default_triple" if n and before == default_triple(n) else "taps"


def _kind_of_rope(before, after) -> str:
    if before.interleaved != after.interleaved:
        return "rope_interleaved"
    if (before.kind, before.params) != (after.kind, after.params):
        return "rope_scaling_dropped" if before.kind == "default" else f"rope_{before.kind}"
    return "rope_theta_default" if before.theta == 10000 else "rope_theta"


def sentence(finding: Finding) -> str:
    """The finding as it could stand in a ticket."""
    if finding.kind in TAPS and finding.accuracy is not None:
        text = (
            f"The draft was trained on {finding.after} and is declared with {finding.before}: change "
            "eagle_aux_hidden_state_layer_ids, or the slice that feeds it"
        )
    elif finding.kind in FAULTS:
        text = FAULTS[finding.kind].change.format(before=finding.before, after=finding.after).rstrip(".")
    else:
        text = f"Change {finding.field} from {finding.before} to {finding.after}"
    if finding.accuracy is None:
        return f"{text} ({finding.evidence[0]})"
    worth_line = next(line for line in finding.evidence if "tokens a round" in line)
    return f"{text}; worth {worth_line}"


def _worth(w: Worth) -> str:
    return f"{100 * w.accuracy:.1f} % in-vocab accuracy (n = {w.n}), {w.tokens:.2f} tokens a round"


def engine_check(case: Case, peel: _Peel) -> tuple[str, str, Finding | None]:
    """An engine's counters against rollouts of the declared contract: fault key or "", sentence, finding.

    Whatever is wrong with draft or wiring is in both numbers.
    """
    whole = [c for c in peel.captures if c.name not in peel.view.touched]
    served, captures = case.served, whole[:WORTH_TEXTS]
    if not captures:
        return "", "the engine's counters are not compared: every text was mended", None
    depth = len(served.accepted_at)
    try:
        chains = rollouts(DraftForward(case.draft), captures, case.draft.contract, depth)
        rounds = walk(chains, captures)
    except WorkbookError as err:
        return "", f"the engine's counters cannot be compared: {err}", None
    low, high = rounds.interval()
    value = rounds.tokens_per_round
    text = (
        f"Look at the engine: it counted {served.tokens_per_round:.2f} tokens a round ({served.rounds} "
        f"rounds), the same draft makes {value:.2f} [{low:.2f}, {high:.2f}] offline at depth {depth} "
        f"({len(rounds)} rounds, {len(captures)} conversations)"
    )
    kind = ""
    if served.tokens_per_round in (1, depth + 1) and not low <= served.tokens_per_round <= high:
        kind, text = "engine_all_or_nothing", text + ": exactly at the bound, as with NaN logits"
    elif served.tokens_per_round < min(low, SHORTFALL * value):
        kind = "engine_loses"
    if not kind:
        return "", text.replace("Look at the engine: it counted", "The engine counted"), None
    pair = f"{served.tokens_per_round:.2f}", f"{value:.2f}"
    # 0.05: what the interval that the counters miss stands for.
    return kind, text, Finding(kind, "counters", "engine", *pair, (text,), p_value=0.05)


def table(diagnosis: Diagnosis) -> pd.DataFrame:
    """One row per finding: fault, change, gains, evidence."""
    names = [f.name for f in fields(Finding) if f.name in ("kind", "by", "field", "before", "after")]
    rows = []
    for f in diagnosis.findings:
        row = {name: getattr(f, name) for name in names}
        pair = "{:.1f} -> {:.1f}".format
        row["accuracy %"] = pair(*(100 * a for a in f.accuracy)) if f.accuracy else "not measured"
        row["tokens a round"] = "{:.2f} -> {:.2f}".format(*f.tokens) if f.tokens else "not measured"
        row["p"] = "exact" if f.p_value == 0 else f"{f.p_value:.1g}"
        rows.append({**row, "evidence": "; ".join(f.evidence)})
    return pd.DataFrame(rows, index=range(1, len(rows) + 1))
