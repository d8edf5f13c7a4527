"""The diagnosis tried blind: every fault planted, and does the top finding name it?

    .venv/bin/python bench/blind.py --workers 2            # hours on 2 cores; --summary shows what is there

Cases, each on 20 of the 32 held-out conversations, drawn anew for each draft and seed, with a severity drawn
and captures at 13 taps:
- every fault x seeds, on another sample draft (a, b, c) each seed where it fits. Draft (c) learned an inner
  state: its own fault may be named before the planted one, and is not counted as one too many;
- every healthy control x seeds, on (a) and (b): the verdict must not be "fault";
- seed 0 of all of them once more without the target's head, counted apart;
- pairs of faults of different parts, each clear alone on that draft: are both named?

The live target is there only for faults that need it to be planted. Cost is what the owner would measure,
planted against healthy, same conversations. Classes: *clear* costs more than 2 points at depth 0 (all
tokens) or 1 (in-vocab), or is an exact defect (typed error, NaN); *invisible* costs nothing (0.2 points,
0.02 tokens a round) and leaves no trace but a declared field; *subtle* is the rest.

Each case is one file in .work/blind and is not run again (`--fresh` forgets); scores are made of the files,
so `--summary` works at any time. Writes bench/results/blind.json.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import time
import traceback
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache, cached_property
from hashlib import sha256
from pathlib import Path

import pandas as pd
import torch

from bench.zoo import stamp
from lib import samples, zoo
from lib.captures import FINAL
from lib.case import Case, Diagnosis, Finding
from lib.contract import Contract, diff
from lib.diagnosis import EDITED, diagnose
from lib.errors import WorkbookError
from lib.faults import FAULTS, NEEDS

ROOT = Path(__file__).resolve().parents[1]
WORK, OUT = samples.WORK / "blind", ROOT / "bench" / "results" / "blind.json"
TEXTS, SEEDS, PAIRS = 20, 3, 40
CLEAR, NOTHING = 0.02, (0.002, 0.02)  # accuracy; accuracy and tokens a round
FULL, HEADLESS = "full", "no head"
DRAWN = 2026  # of the pairs
# In which order the faults of a pair are planted: what replaces texts and files before what edits them.
PARTS = ("training", "text", "states", "mask", "weights", "maps", "norms", "rotary", "wiring", "config")
REPLACES_DRAFT = ("inner_targets", "control_other_draft")  # planted on (a), which they replace


@dataclass(frozen=True)
class Synonym:
    """Another name that counts for a planted fault; on one draft only, or only if the change undoes it."""

    planted: str
    named: str
    why: str
    draft: str = ""
    undone: bool = False


SYNONYMS = (
    Synonym("d2t_zeros", "map_identity", "draft ids are target ids in both: the same predictions"),
    Synonym("map_identity", "d2t_zeros", "draft ids are target ids in both: the same predictions"),
    Synonym("default_triple", "taps_minus_one", "one block before (b)'s taps is the default triple", "b"),
    Synonym("taps_minus_one", "default_triple", "one block before (b)'s taps is the default triple", "b"),
    *(
        Synonym(key, "taps", "wrong taps without a name; the change restores the trained ones", undone=True)
        for key in ("taps_plus_one", "taps_minus_one", "default_triple", "first_states")
    ),
)


@dataclass(frozen=True)
class Task:
    """One case: one fault, or a pair, each with the seed of its severity."""

    keys: tuple[str, ...]
    seeds: tuple[int, ...]
    letter: str
    variant: str = FULL

    @property
    def case(self) -> str:
        """What is planted where, whatever the diagnosis may look at."""
        return "+".join(f"{k}.{s}" for k, s in zip(self.keys, self.seeds, strict=True)) + f".{self.letter}"

    @property
    def name(self) -> str:
        """Of its file."""
        return f"{self.case}.{self.variant.replace(' ', '_')}"


class Bases:
    """Healthy cases of the sample drafts, with all conversations."""

    def __init__(self) -> None:
        self._made: dict[str, Case] = {}
        self._effects: dict[tuple, zoo.Effect] = {}

    def __getitem__(self, letter: str) -> Case:
        if letter not in self._made:
            self._made[letter] = zoo.sample_case(letter, limit=None)
        return self._made[letter]

    @cached_property
    def live(self):
        """The target itself, loaded once."""
        return zoo.sample_case("a", limit=1, live=True).live

    def lacking(self, key: str, letter: str) -> list[str]:
        """Why this fault cannot be planted on this draft; the live target can be had."""
        fault, base = FAULTS[key], self[letter]
        found = [NEEDS[n][0] for n in fault.needs if n != "live" and not NEEDS[n][1](base)]
        if not found and fault.part == "wiring":
            planted = zoo.plant(base, fault)
            if not diff(base.draft.contract, planted.draft.contract):
                found = ["another contract than this, which the draft was trained with"]
        return found

    def healthy(self, task: Task) -> Case:
        """The case before anything is planted: the drawn conversations."""
        base = self[task.letter]
        which = f"{task.letter}.{'+'.join(map(str, task.seeds))}"
        drawn = torch.randperm(len(base.captures), generator=_rng(which))[:TEXTS].sort().values.tolist()
        needs_live = any("live" in FAULTS[k].needs for k in task.keys)
        chosen = tuple(base.captures[i] for i in drawn)
        return replace(base, captures=chosen, live=self.live if needs_live else None)

    def effect(self, healthy: Case) -> zoo.Effect:
        """What the healthy case achieves, measured once for all faults of a draft and seed."""
        key = (id(healthy.draft), *(c.name for c in healthy.captures))
        if key not in self._effects:
            self._effects[key] = cost_of(healthy)
        return self._effects[key]


def cost_of(case: Case) -> zoo.Effect:
    return zoo.measure(case, depths=2, chains=(5,))


def _rng(text: str) -> torch.Generator:
    return torch.Generator().manual_seed(zlib.crc32(text.encode()))


# ---- which cases ------------------------------------------------------------------------------


def singles(bases: Bases, keys: Sequence[str], seeds: int) -> tuple[list[Task], dict[str, str]]:
    """Tasks in order, seed by seed, those without head last; and faults that fit no sample draft."""
    tasks, left_out = [], {}
    order = list(FAULTS)
    fitting = {}
    for key in keys:
        letters = "a" if key in REPLACES_DRAFT else "ab" if FAULTS[key].healthy else "abc"
        fitting[key] = [x for x in letters if not bases.lacking(key, x)]
        if not fitting[key]:
            left_out[key] = "; ".join(bases.lacking(key, letters[0]))
    for seed in range(seeds):
        for key in keys:
            if letters := fitting[key]:
                tasks.append(Task((key,), (seed,), letters[(order.index(key) + seed) % len(letters)]))
    return tasks + [replace(t, variant=HEADLESS) for t in tasks if t.seeds == (0,)], left_out


def pairs(records: Sequence[dict], wanted: int) -> list[Task]:
    """Different parts, both clear alone on the same draft; (c) has a fault of its own and is left out."""
    clear: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for r in records:
        alone = r["variant"] == FULL and len(r["keys"]) == 1 and not r["healthy"]
        if alone and r["draft"] in "ab" and r.get("class") == "clear":
            clear[r["keys"][0]][r["draft"]].append(r["seeds"][0])
    chance, found, tried = random.Random(DRAWN), {}, 0
    keys = sorted(clear)
    while len(found) < wanted and tried < 100 * wanted and len(keys) > 1:
        tried += 1
        both = sorted(chance.sample(keys, 2), key=lambda k: (PARTS.index(FAULTS[k].part), k))
        letters = sorted(set(clear[both[0]]) & set(clear[both[1]]))
        if letters and FAULTS[both[0]].part != FAULTS[both[1]].part and tuple(both) not in found:
            letter = chance.choice(letters)
            drawn = tuple(chance.choice(sorted(clear[k][letter])) for k in both)
            found[tuple(both)] = Task(tuple(both), drawn, letter)
    return list(found.values())


# ---- one case ---------------------------------------------------------------------------------


def run(task: Task, bases: Bases, known: dict | None = None) -> dict:
    """Plant, measure, diagnose. A crash is the record of a failure.

    Args:
        known: the record of the same case with all there is, to take its cost from.
    """
    record = {"keys": task.keys, "seeds": task.seeds, "draft": task.letter, "variant": task.variant,
              "healthy": all(FAULTS[k].healthy for k in task.keys), "version": version()}  # fmt: skip
    try:
        healthy = bases.healthy(task)
        record["conversations"] = [c.name for c in healthy.captures]
        planted = healthy
        for key, seed in zip(task.keys, task.seeds, strict=True):
            try:
                planted = zoo.plant(planted, FAULTS[key], zlib.crc32(f"{key}/{seed}".encode()))
            except WorkbookError as err:
                return record | {"not planted": str(err)}
        record |= {k: known[k] for k in KNOWN} if known else measured(healthy, planted, bases.effect(healthy))
        if task.variant == HEADLESS:
            planted = replace(planted, head=None, live=None)
        began, used = time.perf_counter(), time.process_time()
        diagnosis = diagnose(planted, seed=0)
        record["seconds"] = round(time.perf_counter() - began, 1)
        record["cpu"] = round(time.process_time() - used, 1)  # what others on the machine do not change
        return record | told(diagnosis, healthy)
    except Exception as err:  # a bug of the diagnosis is a result of this bench
        where = traceback.format_exc().splitlines()[-12:]
        return record | {"crash": f"{type(err).__name__}: {err}", "traceback": where}


KNOWN = ("cost", "class", "traces", "changed", "error")


def measured(healthy: Case, planted: Case, before: zoo.Effect) -> dict:
    """What the fault costs, what it touched, and its class; the fields `KNOWN`.

    Args:
        before: `cost_of` the healthy case.
    """
    after = cost_of(planted)
    cost = {}
    if after.error is None:
        cost = {
            "accuracy 0": before.all_token - after.all_token,
            "accuracy 1": before.accuracy[1] - after.accuracy[1],
            "tokens": before.tokens[5] - after.tokens[5],
        }
    broken = after.error is not None or (after.coverage > 0 and math.isnan(after.nats))
    found = traces(healthy, planted)
    return {
        "cost": {k: None if math.isnan(v) else round(v, 4) for k, v in cost.items()},
        "class": klass(cost, found, broken), "traces": found,
        "changed": diff(healthy.draft.contract, planted.draft.contract),
        "error": None if after.error is None else str(after.error),
    }  # fmt: skip


def klass(cost: dict[str, float], found: Sequence[str], broken: bool) -> str:
    """ "clear", "subtle" or "invisible"; see the module."""
    points = [v for k, v in cost.items() if k != "tokens" and not math.isnan(v)]
    if broken or max(points, default=0.0) > CLEAR:
        return "clear"
    nothing = all(abs(v) < NOTHING[0] for v in points) and abs(cost["tokens"]) < NOTHING[1]
    return "invisible" if nothing and not found else "subtle"


def traces(a: Case, b: Case) -> list[str]:
    """What differs beside the declared contract and config.json: an edit shares what it leaves alone."""
    found = []
    maps = ("d2t", "t2d")
    weights = [
        f.name for f in fields(a.draft) if f.name not in (*maps, "contract", "config", "keys", "notes")
    ]
    for word, names in (("maps", maps), ("weights", weights)):
        if any(getattr(a.draft, n) is not getattr(b.draft, n) for n in names):
            found.append(word)
    if len(a.captures) != len(b.captures):
        found.append("captures")
    for x, y in zip(a.captures, b.captures, strict=False):
        names = (x.readers.keys() | y.readers.keys()) - {FINAL}
        found += ["masks"] * (x.loss_mask is not y.loss_mask) + ["ids"] * (x.token_ids is not y.token_ids)
        found += ["states"] * any(x.readers.get(n) is not y.readers.get(n) for n in names)
        final = x.readers.get(FINAL) is not y.readers.get(FINAL) or x.final_kind != y.final_kind
        found += ["finals"] * final
    found += ["counters"] * (a.served is not b.served) + ["head"] * (a.head is not b.head)
    return list(dict.fromkeys(found))


def told(d: Diagnosis, healthy: Case) -> dict:
    """A diagnosis as JSON has it."""
    return {
        "verdict": d.verdict, "because": d.because, "remarks": list(d.remarks), "not_run": dict(d.not_run),
        "engine": d.numbers.get("engine", ""),
        "findings": [
            {
                "kind": f.kind, "by": f.by, "field": f.field, "before": f.before, "after": f.after,
                "p": f.p_value, "accuracy": f.accuracy, "tokens": f.tokens, "undone": undone(f, healthy),
            }
            for f in d.findings
        ],
    }  # fmt: skip


def undone(finding: Finding, healthy: Case) -> bool | None:
    """Whether the change named brings back the healthy value; None if it has no value to try."""
    fix, name = finding.fix, EDITED.get(finding.field, finding.field)
    of = healthy.draft.contract if isinstance(fix, Contract) else healthy.draft
    if fix is None or not hasattr(of, name):
        return None
    found, right = getattr(fix, name), getattr(of, name)
    return torch.equal(found.float(), right.float()) if isinstance(right, torch.Tensor) else found == right


@cache
def version() -> str:
    """Digest of what makes the diagnosis: records of different ones are not of one experiment.

    Taken once, at the start: a worker goes on with the code that it has loaded.
    """
    files = sorted((ROOT / "lib").glob("prob*.py"))
    others = ("candidates", "diagnosis", "gains", "mending", "search", "worth")
    files += [ROOT / "lib" / f"{n}.py" for n in others]
    return sha256(b"".join(f.read_bytes() for f in files)).hexdigest()[:8]


# ---- scores -----------------------------------------------------------------------------------


def named(record: dict) -> list[str]:
    """Faults named, most valuable first; an engine's fault is a verdict, not a finding."""
    kinds = [f["kind"] for f in record.get("findings", ())]
    return kinds + ([record["engine"]] if record.get("verdict") == "look at the engine" else [])


def accepts(record: dict, key: str, at: int) -> bool:
    """Whether the name in place `at` counts for the planted fault `key`."""
    name = named(record)[at]
    undoes = at < len(record["findings"]) and record["findings"][at]["undone"] is True
    return name == key or any(
        (s.planted, s.named) == (key, name) and s.draft in ("", record["draft"]) and (undoes or not s.undone)
        for s in SYNONYMS
    )


def score(record: dict) -> dict:
    """Hit or miss of each planted fault, what stands first, what was named beyond, and why it was missed.

    A control has no fault to name: `accused` says whether its verdict is "fault".
    """
    names = named(record)
    mine = ["inner_targets"] if record["draft"] == "c" and "inner_targets" not in record["keys"] else []
    rest = [i for i, n in enumerate(names) if n not in mine]
    top = names[rest[0]] if rest else names[0] if names else record.get("verdict", "crash")
    faults = [k for k in record["keys"] if not FAULTS[k].healthy]
    places = {k: [p for p, i in enumerate(rest) if accepts(record, k, i)] for k in faults}
    hits = [k for k in faults if places[k] and (len(faults) > 1 or places[k][0] == 0)]
    return {
        "top": top, "hits": hits,
        "accused": record["healthy"] and record.get("verdict") == "fault",
        "own": (mine[0] in names) if mine else None,
        "extra": [names[i] for i in rest if not any(accepts(record, k, i) for k in faults)],
        "misses": {k: why(record, k, places[k], top) for k in faults if k not in hits},
    }  # fmt: skip


def why(record: dict, key: str, places: Sequence[int], top: str) -> str:
    """One sentence on a miss."""
    if "crash" in record:
        return f"crashed: {record['crash']}"
    if places:
        return f"named in place {places[0] + 1}, behind {top}"
    remarks, stopped = record["remarks"], record["not_run"].get("search", "")
    accepted = (key, *(s.named for s in SYNONYMS if s.planted == key))
    for remark in remarks:
        if any(remark.startswith(f"suspected: {k} ") for k in accepted):
            return f"a remark only: {remark}"
    if record["engine"] == key:
        return f"the engine is in a remark only, as the verdict is {record['verdict']!r}"
    changed = {"taps" if line.startswith("slot") else line.split(":")[0] for line in record["changed"]}
    for f in record["findings"]:
        if f["field"] in changed and not f["undone"]:
            return f"the right field ({f['kind']}), another change: {f['before']} -> {f['after']}"
    for remark in remarks:
        if remark.split(":")[0] in changed:
            return f"a remark only: {remark}"
    if record["verdict"] == "cannot tell":
        return record["because"]
    said = f"named {top} instead" if named(record) else f"called {record['verdict']}"
    if stopped:
        return f"{said}; the search did not run: {stopped}"
    said += f"; it costs {costs(record)}"
    lacking = [f"{k} ({v})" for k, v in record["not_run"].items() if "head" in v or "states" in v]
    if record["variant"] == HEADLESS and {"head", "final"} & set(FAULTS[key].needs) and lacking:
        return f"{said}; not run: {', '.join(lacking)}"
    return said


def costs(record: dict) -> str:
    """The measured cost in words."""
    if not record["cost"]:
        return f"everything: {record['error']}"
    shown = {k: "?" if v is None else v for k, v in record["cost"].items()}
    points = [f"{100 * shown[k]:.1f}" if shown[k] != "?" else "?" for k in ("accuracy 0", "accuracy 1")]
    return f"{points[0]} points at depth 0, {points[1]} at depth 1, {shown['tokens']:.2f} tokens a round"


def label(record: dict) -> str:
    """Of a case, in lists."""
    keys = " + ".join(f"{k} (seed {s})" for k, s in zip(record["keys"], record["seeds"], strict=True))
    return f"{keys} on {record['draft']}" + (f", {HEADLESS}" if record["variant"] == HEADLESS else "")


def summary(records: Sequence[dict], left_out: dict[str, str]) -> dict:
    """Totals, confusion, every miss with its reason, what is invisible here and why."""
    done = [r for r in records if "not planted" not in r]
    scored = [(r, score(r)) for r in done]
    alone = [(r, s) for r, s in scored if len(r["keys"]) == 1]
    # Of two faults: a control that is broken enough to be called clear has no name to be found.
    both = [
        (r, s) for r, s in scored if len(r["keys"]) == 2 and not any(FAULTS[k].healthy for k in r["keys"])
    ]
    times = {name: [r[name] for r in done if name in r] for name in ("seconds", "cpu")}
    confusion: dict[str, Counter] = defaultdict(Counter)
    for r, s in alone:
        if r["variant"] == FULL:
            confusion[r["keys"][0]][s["top"]] += 1
    return {
        "cases": len(done), "versions": dict(Counter(r["version"] for r in records)),
        "seconds a diagnosis": {
            name: {"median": statistics.median(t), "longest": max(t)} for name, t in times.items() if t
        },
        **{variant: totals([(r, s) for r, s in alone if r["variant"] == variant])
           for variant in (FULL, HEADLESS)},
        "pairs": {
            "both named": ratio(sum(len(s["hits"]) == 2 for _, s in both), len(both)),
            "one named": sum(len(s["hits"]) == 1 for _, s in both),
            "none named": sum(not s["hits"] for _, s in both),
            "with another finding": ratio(sum(bool(s["extra"]) for _, s in both), len(both)),
        },
        "confusion": {k: dict(v.most_common()) for k, v in confusion.items()},
        "misses": {label(r): {"class": r.get("class", "crash"), **s["misses"]}
                   for r, s in scored if s["misses"]},
        "accused controls": {label(r): r["because"] for r, s in alone if s["accused"]},
        "named beyond": {label(r): s["extra"] for r, s in scored if s["extra"] and not s["accused"]},
        "invisible here": {
            label(r): f"only {'; '.join(r['changed']) or 'nothing'} differs, and it costs {costs(r)}"
            for r, _ in alone if r.get("class") == "invisible" and not r["healthy"] and r["variant"] == FULL
        },
        "crashes": {label(r): r["crash"] for r in done if "crash" in r},
        "could not be planted": {label(r): r["not planted"] for r in records if "not planted" in r},
        "fits no sample draft": left_out,
        "synonyms": [{f.name: getattr(s, f.name) for f in fields(Synonym)} for s in SYNONYMS],
    }  # fmt: skip


def ratio(part: int, whole: int) -> str:
    return f"{part}/{whole}"


def totals(scored: Sequence[tuple[dict, dict]]) -> dict[str, str]:
    """Hits of each class, controls accused, and what else was named."""
    faults = [(r, s) for r, s in scored if not r["healthy"]]
    controls = [s for r, s in scored if r["healthy"]]
    found = {}
    for name in ("clear", "subtle", "invisible", "crash"):
        mine = [s for r, s in faults if r.get("class", "crash") == name]
        if mine or name != "crash":
            found[name] = ratio(sum(bool(s["hits"]) for s in mine), len(mine))
    hits = [(r, s) for r, s in faults if s["hits"] and r["findings"]]
    first = [next((f for f in r["findings"] if f["kind"] == s["top"]), None) for r, s in hits]
    tried = [f["undone"] for f in first if f is not None and f["undone"] is not None]
    own = [s["own"] for _, s in faults if s["own"] is not None]
    return found | {
        "controls accused": ratio(sum(s["accused"] for s in controls), len(controls)),
        "hits whose change brings the old value back": ratio(sum(tried), len(tried)),
        "own fault of (c) named too": ratio(sum(own), len(own)),
        "cases with another finding": ratio(sum(bool(s["extra"]) for _, s in faults), len(faults)),
    }


def table(records: Sequence[dict]) -> pd.DataFrame:
    """One row per fault: class and outcome of each seed, "." for a hit, else what stands first."""
    rows: dict[str, dict] = defaultdict(dict)
    for r in sorted((r for r in records if len(r["keys"]) == 1), key=lambda r: (r["variant"], r["seeds"])):
        s = score(r)
        good = not s["accused"] and "crash" not in r if r["healthy"] else bool(s["hits"])
        column = f"seed {r['seeds'][0]}" if r["variant"] == FULL else HEADLESS
        kind = "control" if r["healthy"] else r.get("class", "crash")
        rows[r["keys"][0]][column] = f"{r['draft']} {kind}: {'.' if good else s['top']}"
    found = pd.DataFrame.from_dict(rows, orient="index").fillna("")
    return found.reindex([k for k in FAULTS if k in rows])


# ---- running ----------------------------------------------------------------------------------


def load(work: Path, keys: Sequence[str]) -> list[dict]:
    """Finished records of these faults, in order of their names."""
    found = [json.loads(p.read_text()) for p in sorted(work.glob("*.json"))]
    return [r for r in found if set(r["keys"]) <= set(keys)]


def kept(task: Task, work: Path, bases: Bases) -> dict:
    """The finished record of a case; made and written under its final name if there is none."""
    path = work / f"{task.name}.json"
    if path.is_file():
        return json.loads(path.read_text())
    full = work / f"{replace(task, variant=FULL).name}.json"
    known = json.loads(full.read_text()) if task.variant == HEADLESS and full.is_file() else {}
    record = run(task, bases, known if known.keys() >= set(KNOWN) else None)
    half = path.with_suffix(".part")
    text = json.dumps(record, indent=1, default=list)
    half.write_text(text.replace(f"{ROOT}/", "") + "\n")  # wherever this checkout lies
    half.rename(path)
    return json.loads(path.read_text())


def planned(args: argparse.Namespace, phase: str, bases: Bases) -> list[Task]:
    """Tasks of a phase, the same in every process."""
    if phase == "pairs":
        return pairs(load(args.work, args.only), args.pairs)
    variant = FULL if phase == "singles" else HEADLESS
    return [t for t in singles(bases, args.only, args.seeds)[0] if t.variant == variant]


def work_off(args: argparse.Namespace) -> None:
    """One worker's share of a phase, in order; a line per case."""
    os.nice(10)
    torch.set_num_threads(1)
    version()
    phase, i, n = args.worker.split("/")
    bases = Bases()
    for task in list(planned(args, phase, bases))[int(i) :: int(n)]:
        began = time.perf_counter()
        r = kept(task, args.work, bases)
        if "not planted" not in r:
            s = score(r)
            outcome = ("accused" if s["accused"] else "quiet") if r["healthy"] else f"hits {s['hits']}"
            of = "control" if r["healthy"] else r.get("class", "-")
            outcome = f"{of}: {outcome}, says {named(r) or r.get('verdict', r.get('crash'))}"
        else:
            outcome = r["not planted"]
        seconds = f"{r.get('seconds', 0):.0f} s of {time.perf_counter() - began:.0f}"
        print(f"{task.name} ({seconds}) {outcome}", flush=True)


def workers(args: argparse.Namespace, phase: str) -> None:
    """Run a phase in single-threaded processes; none outlives this one."""
    command = [sys.executable, __file__, "--seeds", str(args.seeds), "--pairs", str(args.pairs),
               "--work", str(args.work), "--only", ",".join(args.only)]  # fmt: skip
    env = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    running = [
        subprocess.Popen([*command, "--worker", f"{phase}/{i}/{args.workers}"], env=env)
        for i in range(args.workers)
    ]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that `finally` runs
    try:
        ended = [p.wait() for p in running]
    finally:
        for p in running:
            p.kill()
    if any(ended):
        raise SystemExit(f"a worker ended with {ended}; start again to go on with what is left")


def lines(found: dict, indent: str = "") -> Iterator[str]:
    """A record as text."""
    for key, value in found.items():
        if isinstance(value, dict) and value:
            yield f"{indent}{key}:"
            yield from lines(value, indent + "  ")
        elif value:
            yield f"{indent}{key}: {value}"


def keys_of(text: str) -> list[str]:
    """Fault keys of a comma-separated list."""
    if unknown := set(found := text.split(",")) - set(FAULTS):
        raise argparse.ArgumentTypeError(f"no such faults: {', '.join(sorted(unknown))}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", type=keys_of, default=list(FAULTS), help="faults, comma-separated")
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--pairs", type=int, default=PAIRS)
    parser.add_argument("--workers", type=int, default=1, help="processes of one thread each")
    parser.add_argument("--summary", action="store_true", help="of what is finished; runs nothing")
    parser.add_argument("--fresh", action="store_true", help="forget what is done")
    parser.add_argument(
        "--renew", action="store_true", help="forget crashes, and cases that an older diagnosis was tried on"
    )
    parser.add_argument("--work", type=Path, default=WORK, help="where cases are kept")
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.fresh and not args.summary:
        shutil.rmtree(args.work, ignore_errors=True)
    args.work.mkdir(parents=True, exist_ok=True)
    if args.renew and not args.summary:
        for path in args.work.glob("*.json"):
            old = json.loads(path.read_text())
            if "crash" in old or old["version"] != version():
                path.unlink()
    if args.worker:
        work_off(args)
        return
    if not args.summary:
        workers(args, "singles")
        if args.pairs:
            workers(args, "pairs")
        workers(args, "headless")
    records = load(args.work, args.only)
    _, left_out = singles(Bases(), args.only, 0)
    found = summary(records, left_out)
    with pd.option_context("display.width", 200, "display.max_rows", None, "display.max_columns", None,
                           "display.max_colwidth", 40):  # fmt: skip
        print(table(records).to_string())
    print("\n".join(lines({k: v for k, v in found.items() if k not in ("confusion", "synonyms")})))
    args.out.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({**stamp(), "texts": TEXTS, "summary": found, "cases": records}, indent=1)
    args.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
