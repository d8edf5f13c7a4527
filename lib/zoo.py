"""The fault zoo, measured: what each planted fault does to a draft's accuracy, acceptance and metrics.

    base = zoo.sample_case("a", limit=8)
    found = zoo.effects(base, FAULTS.values())
    zoo.table(found)
    zoo.judge(FAULTS["feedback"], found["none"], found["feedback"])
    zoo.recorded()                                     # all of it measured once, offline and in vLLM

Every number is of the case as it stands, under its declared contract, on its own captures: what its owner
would measure. A case that cannot be evaluated has the typed error as its effect.

Axes: S scored pairs, D depths.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from lib import errors
from lib.acceptance import rollouts, walk
from lib.case import Case
from lib.contract import Source
from lib.draft import DraftForward
from lib.engine_draft import write_draft
from lib.errors import EngineError, MetricError, WorkbookError
from lib.faults import FAULTS, Bound, Fault
from lib.metric_table import DEFINITIONS, TargetSide, evidence, target_side
from lib.metrics import all_token_accuracy, coverage, in_vocab_accuracy
from lib.sweep import sweep

CHAINS = (5, 15)  # draft tokens per round: a usual setting, and the incident's
# Framework, metric, step: those by which a run would be judged.
METRICS = (
    ("speculators", "full_acc_{i}", 0),
    ("speculators", "cond_acc_{i}", 1),
    ("SpecForge", "acc_{i}", 0),
    ("SpecForge", "acceptance_rate_{i}", 0),
    ("EAGLE", "acc_{i}", 0),
    ("Automodel", "accuracy", 0),
    ("Automodel", "tau_sim", 0),
    ("vLLM", "mean acceptance length", 0),
)
SEED = 17
RECORD = Path(__file__).resolve().parents[1] / "bench" / "results" / "zoo.json"  # by bench/zoo.py


@dataclass(frozen=True)
class Effect:
    """What was measured of one case.

    Attributes:
        error: the typed error, if it could not be evaluated; everything else is empty then.
        conversations, pairs: how many were scored at depth 0.
        accuracy: (D,) in-vocab accuracy per depth, the text's tokens fed; the vocabulary is the declared one.
        all_token: hits at depth 0 over all scored pairs: comparable whatever the vocabulary is.
        coverage: share of the text's tokens that the declared vocabulary has.
        nats: mean log-probability of the text's in-vocab tokens at depth 0.
        tokens: draft tokens per round -> tokens per round, bonus included, by greedy replay.
        metrics: framework and metric -> value; empty if not asked for or not possible.
        served: tokens per round by the engine's counters, if the case has some.
        why_not: why there are no metrics.
    """

    error: WorkbookError | None = None
    conversations: int = 0
    pairs: int = 0
    accuracy: tuple[float, ...] = ()
    all_token: float = float("nan")
    coverage: float = float("nan")
    nats: float = float("nan")
    tokens: dict[int, float] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    served: float | None = None
    why_not: str = ""


def sample_case(letter: str = "a", limit: int | None = 8, *, live: bool = False, wide: bool = True) -> Case:
    """A healthy case of the samples: the draft declared as it was trained, captures at many taps.

    Args:
        letter: sample draft.
        limit: conversations.
        live: bring the live target.
        wide: captures from `samples.wide_captures`; else the shipped ones (four taps, bf16).
    """
    from lib import samples

    head = samples.target_head()
    draft = samples.draft(letter, head)
    trained = samples.TRAINED_TAPS[letter]
    config = {**draft.config, "eagle_aux_hidden_state_layer_ids": [t.after_block for t in trained]}
    contract = draft.contract.change(Source("checkpoint", "config.json"), taps=trained)
    captures = samples.wide_captures(limit=limit) if wide else samples.captures(limit)
    target = None
    if live:
        from lib.decoding import LiveTarget
        from lib.target import ensure_target, load_target

        target = LiveTarget(load_target(ensure_target()))
    return Case(replace(draft, contract=contract, config=config), tuple(captures), head, target)


def plant(case: Case, fault: Fault, seed: int = SEED) -> Case:
    """The case with this fault in it, its severity drawn from the seed."""
    return fault.plant(case, torch.Generator().manual_seed(seed))


def cases(base: Case, keys: Iterable[str], seed: int = SEED) -> dict[str, Case]:
    """The healthy case under "none", then one case per key, each with one fault."""
    return {"none": base, **{key: plant(base, FAULTS[key], seed) for key in keys}}


def measure(
    case: Case,
    depths: int = 8,
    metrics: bool = False,
    *,
    chains: tuple[int, ...] = CHAINS,
    target: TargetSide | None = None,
) -> Effect:
    """Accuracy, acceptance and metrics of a case under its declared contract.

    Args:
        depths: D, for the accuracies.
        metrics: also those of `METRICS`; they need the target's head and final states.
        chains: draft tokens per round.
        target: `target_side` of the same captures, head and draft vocabulary, to share between cases.
    """
    try:
        return _measure(case, depths, metrics, chains, target)
    except WorkbookError as err:
        return Effect(err)


def _measure(
    case: Case, depths: int, metrics: bool, chains: tuple[int, ...], target: TargetSide | None
) -> Effect:
    contract, captures = case.draft.contract, case.captures
    forward = DraftForward(case.draft)
    p = forward.predict(captures, contract, depths=depths)
    covered, nats = coverage(p), float("nan")
    accuracy = [float("nan")] * depths
    if covered.numerator:
        nats = float(sweep(forward, captures, (contract,)).log_likelihood[0])
        known = [d for d in range(depths) if p.in_vocab[:, d].any()]
        for d in known:
            accuracy[d] = in_vocab_accuracy(p, d).value
    rolled = rollouts(forward, captures, contract, max(chains))
    found, why_not = _metrics(case, target) if metrics else ({}, "not asked for")
    return Effect(
        None, covered.conversations, covered.denominator, tuple(accuracy), all_token_accuracy(p).value,
        covered.value, nats, {k: walk(rolled, captures, k).tokens_per_round for k in chains},
        found, case.served.tokens_per_round if case.served else None, why_not,
    )  # fmt: skip


def _metrics(case: Case, target: TargetSide | None) -> tuple[dict[str, float], str]:
    """Values of `METRICS`; none, and why, where the case does not allow them."""
    if case.head is None:
        return {}, "no head of the target"
    try:
        e = evidence(case.captures, case.draft, case.head, case.draft.contract, target=target)
    except WorkbookError as err:
        return {}, str(err)
    wanted = {(d.framework, d.name): d for d in DEFINITIONS}
    found = {}
    for framework, name, step in METRICS:
        try:
            value = wanted[framework, name].compute(e, step).value
        except MetricError as err:
            if err.field != "denominator":
                raise
            value = float("nan")  # nothing counts for this one, as no chain survives step 0
        found[f"{framework} {name.format(i=step)}"] = value
    return found, ""


def effects(
    case: Case,
    faults: Iterable[Fault],
    *,
    depths: int = 8,
    metrics: bool = False,
    chains: tuple[int, ...] = CHAINS,
    seed: int = SEED,
    progress: Callable[[Iterable], Iterable] = iter,
) -> dict[str, Effect]:
    """Key -> effect, the untouched case first under "none"; faults that the case does not fit are left out.

    What the target says is computed once for all faults that leave captures, head and d2t alone.
    """
    target = None
    if metrics and case.head is not None:
        try:
            target = target_side(case.captures, case.draft, case.head)
        except WorkbookError:
            target = None  # the same error is met, and told, in each effect
    found = {"none": measure(case, depths, metrics, chains=chains, target=target)}
    for fault in progress([f for f in faults if not f.lacking(case)]):
        planted = plant(case, fault, seed)
        shared = target if _same_target(case, planted) else None
        found[fault.key] = measure(planted, depths, metrics, chains=chains, target=shared)
    return found


def _same_target(a: Case, b: Case) -> bool:
    """Whether `target_side` is the same of both: it looks at final states, head and the draft's ids."""
    maps = a.draft.contract.vocab_map == b.draft.contract.vocab_map and a.draft.d2t is b.draft.d2t
    return a.captures is b.captures and a.head is b.head and maps


def table(found: dict[str, Effect]) -> pd.DataFrame:
    """One row per effect: accuracies and ratios in %, the others in tokens per round."""
    return pd.DataFrame([{"fault": key, **_row(e)} for key, e in found.items()]).set_index("fault")


def _row(e: Effect) -> dict:
    if e.error is not None:
        return {"error": f"{type(e.error).__name__}: {e.error.field}"}
    shown = sorted({0, 1, 3, len(e.accuracy) - 1} & set(range(len(e.accuracy))))
    row = {f"acc {d}": round(100 * e.accuracy[d], 1) for d in shown}
    row |= {"all tokens": round(100 * e.all_token, 1), "coverage": round(100 * e.coverage, 1)}
    row |= {"nats": round(e.nats, 3)} | {f"tokens at {k}": round(v, 2) for k, v in e.tokens.items()}
    ratios = {f"{d.framework} {d.name.format(i=i)}" for d in DEFINITIONS if d.unit == "ratio" for i in (0, 1)}
    row |= {k: round(100 * v, 1) if k in ratios else round(v, 2) for k, v in e.metrics.items()}
    return row if e.served is None else row | {"served": round(e.served, 2)}


def expressible(fault: Fault, case: Case, folder: Path, seed: int = SEED) -> Path:
    """Write the planted draft as vLLM reads it (`lib.engine_draft.write_draft`); return the folder.

    Raises EngineError for a fault of captures, masks, text or counters, or that vLLM cannot express.
    """
    if not fault.served:
        raise EngineError(
            f"fault {fault.key}", "served", expected="a fault of the draft's config or weights",
            found=f"one of the {fault.part}", remedy="measure it offline: measure(fault.plant(case, rng))",
        )  # fmt: skip
    planted = plant(case, fault, seed)
    return write_draft(planted.draft, planted.draft.contract, Path(folder))


# ---- predicted and measured -------------------------------------------------------------------


@dataclass(frozen=True)
class Check:
    """One bound against what was measured: the value held against it, and whether it lies inside."""

    bound: Bound
    value: float
    holds: bool | None

    def __str__(self) -> str:
        """Number, what was expected, what was found."""
        if self.bound.error:
            return f"{self.bound.error} expected: {'raised' if self.holds else 'not raised'}"
        how = {"value": "", "ratio": " / healthy", "change": " - healthy"}[self.bound.against]
        found = "not measured" if self.holds is None else f"{self.value:.3f}"
        low, high = self.bound.low, self.bound.high
        if low == -math.inf:
            wanted = f"at most {high:g}"
        else:
            wanted = f"at least {low:g}" if high == math.inf else f"{low:g} to {high:g}"
        return f"{self.bound.number}{how}: {found}, predicted {wanted}"


@dataclass(frozen=True)
class Judgement:
    """A prediction judged: "confirmed", "refuted" or "not measured", and every bound with its number."""

    verdict: str
    checks: tuple[Check, ...] = ()

    def __str__(self) -> str:
        """The verdict, and the numbers it rests on."""
        return self.verdict + (f" ({'; '.join(map(str, self.checks))})" if self.checks else "")


def judge(fault: Fault, base: Effect, effect: Effect) -> Judgement:
    """Hold what the reference predicts of a fault against what was measured.

    One bound that fails refutes; a prediction is confirmed when all its bounds were measured and hold.
    A fault of which the reference predicts no number is "not measured".
    """
    checks = tuple(_check(bound, base, effect) for bound in fault.predicted)
    if any(c.holds is False for c in checks):
        return Judgement("refuted", checks)
    fine = checks and all(c.holds for c in checks)
    return Judgement("confirmed" if fine else "not measured", checks)


def _check(bound: Bound, base: Effect, effect: Effect) -> Check:
    if bound.error:
        raised = type(effect.error).__name__ == bound.error
        return Check(bound, float(raised), raised)
    value = number(effect, bound.number)
    if bound.against != "value":
        healthy = number(base, bound.number)
        value = value - healthy if bound.against == "change" else value / healthy if healthy else math.nan
    holds = None if math.isnan(value) else bound.low - EDGE <= value <= bound.high + EDGE
    return Check(bound, value, holds)


EDGE = 1e-9  # differences of shares: 0.70 - 0.65 is a little more than 0.05


def number(effect: Effect, name: str) -> float:
    """A number of an effect by the name that `faults.Bound` uses; NaN if it was not measured.

    Raises MetricError for a name that no effect has.
    """
    what, _, at = name.rpartition(" ")
    if what == "accuracy" and at.isdecimal():
        return effect.accuracy[int(at)] if int(at) < len(effect.accuracy) else math.nan
    if what == "tokens" and at.isdecimal():
        return effect.tokens.get(int(at), math.nan)
    single = {"all tokens": effect.all_token, "coverage": effect.coverage, "nats": effect.nats}
    if name in single:
        return single[name]
    known = [f"{framework} {metric.format(i=step)}" for framework, metric, step in METRICS]
    if name not in known:
        raise MetricError(
            "bound", "number", expected="accuracy i, tokens k, " + ", ".join((*single, *known)), found=name,
            remedy="name a number that zoo.Effect has",
        )  # fmt: skip
    return effect.metrics.get(name, math.nan)


# ---- the record -------------------------------------------------------------------------------


def as_record(effect: Effect) -> dict[str, Any]:
    """An effect as JSON has it: NaN is null, an error its class and its parts."""
    record = {f.name: _plain(getattr(effect, f.name)) for f in fields(Effect)}
    if effect.error is not None:
        parts = ("where", "field", "expected", "found", "remedy")
        record["error"] = {"class": type(effect.error).__name__}
        record["error"] |= {name: getattr(effect.error, name) for name in parts}
    return record


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, tuple):
        return [_plain(v) for v in value]
    return None if isinstance(value, float) and math.isnan(value) else value


def from_record(record: dict[str, Any]) -> Effect:
    """The effect that `as_record` wrote."""
    told = {f.name: record[f.name] for f in fields(Effect)}
    nan = float("nan")
    for name in ("all_token", "coverage", "nats"):
        told[name] = nan if told[name] is None else told[name]
    told["accuracy"] = tuple(nan if x is None else x for x in told["accuracy"])
    told["tokens"] = {int(k): v for k, v in told["tokens"].items()}
    told["metrics"] = {k: nan if v is None else v for k, v in told["metrics"].items()}
    if (error := told["error"]) is not None:
        kind = getattr(errors, error["class"])
        told["error"] = kind(**{k: v for k, v in error.items() if k != "class"})
    return Effect(**told)


def record(path: Path = RECORD) -> dict[str, Any]:
    """The committed record of bench/zoo.py: its parts "offline" and "engine", each with machine and date."""
    return json.loads(path.read_text())


def recorded_effects(told: dict[str, Any] | None = None) -> dict[str, Effect]:
    """Key -> effect as recorded, the healthy case under "none"."""
    told = record() if told is None else told
    return {key: from_record(e) for key, e in told["offline"]["effects"].items()}


def recorded(told: dict[str, Any] | None = None) -> pd.DataFrame:
    """One row per fault: predicted, measured offline, judged, and what vLLM counted and said.

    Accuracies and metrics in %. "silent" is measured: a served fault of which vLLM's log has no warning that
    the healthy draft's log has not. A fault that does not fit the samples says what they lack.
    """
    told = record() if told is None else told
    found, lacking = recorded_effects(told), told["offline"]["lacking"]
    rows = {"none": {"title": "healthy draft", **_measured(found["none"]), **_said(told, "none")}}
    for key, fault in FAULTS.items():
        row = {"title": fault.title, "predicted": fault.signature}
        if key in found:
            row |= _measured(found[key])
            row["judged"] = judge(fault, found["none"], found[key]).verdict
        else:
            row |= {"judged": "not measured", "why not": f"needs {lacking[key]}" if key in lacking else "new"}
        rows[key] = row | _said(told, key)
    return pd.DataFrame(rows.values(), index=pd.Index(rows, name="fault"))


FRAMEWORKS = ("speculators full_acc_0", "SpecForge acc_0", "EAGLE acc_0", "Automodel accuracy")


def _measured(e: Effect) -> dict[str, Any]:
    if e.error is not None:
        return {"why not": f"{type(e.error).__name__}: {e.error.field}"}
    row = {f"acc {d}": round(100 * e.accuracy[d], 1) for d in (0, 1)} | {"tokens at 5": round(e.tokens[5], 2)}
    return row | {k: round(100 * e.metrics[k], 1) for k in FRAMEWORKS if k in e.metrics}


def _said(told: dict[str, Any], key: str) -> dict[str, Any]:
    """vLLM's count and its complaints; nothing for a fault that was not served.

    "its file" is the healthy draft's file damaged as in the field, where the written draft, which is whole
    again, cannot show what an engine says to that: it decides on "silent".
    """
    row: dict[str, Any] = {}
    for part, name in (("engine", "vLLM said"), ("files", "its file")):
        served = told.get(part, {}).get("faults", {}).get(key)
        if served is None:
            continue
        refused = served.get("refused", "").split(", found ")[-1][:160]  # the record has all of it
        lines = [] if key == "none" else served["said"]
        heard = f"refused: {refused}" if refused else " | ".join(lines) or "nothing"
        counted = None if refused else round(served["tokens_per_round"], 2)
        row |= {name: heard, "silent": not refused and not lines}
        if part == "engine":
            row["vLLM tokens"] = counted
            row["from captures"] = None if refused else round(served["from captures"]["tokens_per_round"], 2)
        elif not refused:
            row[name] = f"{counted} tokens a round; said {heard}"
    return row


def served_table(told: dict[str, Any] | None = None) -> pd.DataFrame:
    """vLLM's counts beside what captures alone predict, one row per fault that was served.

    "inside": vLLM's tokens per round lie in the 95 % interval over conversations of the captures' own.
    "texts that differ" are those that part from plain decoding's.
    """
    told = record() if told is None else told
    rows = {}
    for key, s in told["engine"]["faults"].items():
        if "refused" in s:
            rows[key] = {"refused": s["refused"]}
            continue
        low, high = s["from captures"]["interval"]
        rows[key] = {
            "vLLM": round(s["tokens_per_round"], 3),
            "from captures": round(s["from captures"]["tokens_per_round"], 3),
            "95 % interval": f"{low:.2f} .. {high:.2f}",
            "inside": low <= s["tokens_per_round"] <= high,
            "from its texts": round(s["from the engine's texts"]["tokens_per_round"], 3),
            "rounds": s["rounds"], "replayed rounds": s["from the engine's texts"]["rounds"],
            "texts that differ": len(s["texts that differ from plain"]),
            "said": len(s["said"]),
        }  # fmt: skip
    return pd.DataFrame(rows.values(), index=pd.Index(rows, name="fault"))
