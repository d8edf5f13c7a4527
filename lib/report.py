"""A report on somebody's draft and captures: the answers of notebooks 01 to 05, within minutes.

    python -m lib.report make --draft DIR --captures DIR [--target DIR] [--taps embed,layer3,...] ...
    python -m lib.report compare BEFORE/report.json AFTER/report.json [--which best] [--out FILE]

`make` measures (resuming where it was stopped), then runs notebook 07 on the finished parts and writes
report.ipynb, report.html and report.json. `build` is the same without a notebook.

Stage one measures every file under the contract that the files declare, and sweeps which stored state
fills which slot; stage two rolls chains out under the winner, if that is another contract.

| where | what |
|---|---|
| `lib.request`, `lib.inputs` | what can be asked for, which requests are refused; which files that means |
| here | what is there, which contract is declared and which wirings are tried; the command line |
| `lib.evaluate`, `lib.parts` | how a file is measured, and how its result is stored |
| `lib.report_data` | what report.json holds |
| `lib.report_tables` | the finished report and its tables |
| `lib.compare` | two reports side by side |
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from itertools import combinations
from pathlib import Path
from string import ascii_lowercase
from typing import Any
from urllib.parse import urlsplit

from tqdm import tqdm

from lib.captures import FINAL, Capture
from lib.compare import compare, save_comparison
from lib.contract import Contract, Source
from lib.errors import ContractError, ReportError, WorkbookError
from lib.evaluate import Plan, Tools, Totals, evaluate_all, merge, open_as_planned, open_with_final
from lib.final_state import settle_final
from lib.inputs import Pairs, inputs_of
from lib.parts import writing
from lib.report_data import Measured, Run, assemble, texts
from lib.report_tables import Report, check_place
from lib.request import SAMPLE, Request, refused
from lib.sweep import ordered_choices
from lib.taps import Stored, Tap

MOST_ORDERED = 60  # ordered choices that an exact sweep takes on; 3 of 5 are 60
FEW_FILES = 8  # below this a progress bar would be noise
SLOW = 5  # seconds between two states of a bar in a notebook
JUDGED = 8  # captures of a group from which the kind of an unlabelled final state is judged
NOT_EXPORTED = {"form", "samples-only"}  # tags of cells that say nothing about the reader's files
Bar = Callable[[Sequence], Iterable]


# ---- the report ---------------------------------------------------------------------------------


def build(request: Request, work: str | Path | None = None, scheduler: str = "") -> Report:
    """Measure what was asked for and put it together.

    Args:
        request: what is asked.
        work: folder of finished parts; `parts` in the report's own if None.
        scheduler: a Dask cluster that measures ("local:4", "tcp://host:8786": `lib.cluster.connect`); this
            process alone if "". The answer is the same.

    Raises a WorkbookError when the draft, the target or the request is at fault, or no file is readable.
    """
    started = time.perf_counter()
    check_place(asdict(request), request.folder)  # before hours of measuring, not after
    work = Path(work) if work else request.folder / "parts"
    inputs = inputs_of(request)
    folder, pairs, plan, warnings = inputs.folder, inputs.pairs, inputs.plan, inputs.warnings
    tools = Tools(plan)
    opened = _survey([f for f, _ in pairs], tools, progress("opening"))
    seen, plan = _comparable(opened, plan, folder, warnings)
    tools = tools.with_plan(plan)
    common = tuple(t for t in seen[0].taps if all(t in s.taps for s in seen)) if seen else ()
    declared = tools.forward.draft.contract
    base = _base(declared, common, warnings) if seen else declared
    kinds, said = _settled_kinds(pairs, opened, tools) if tools.head else ((), [])
    warnings += said
    plan = replace(
        plan, final_kinds=kinds, wirings=(texts(base.taps),),
        candidates=tuple(texts(c) for c in _candidates(base, common, warnings)),
    )  # fmt: skip
    totals = _measured(pairs, tools.with_plan(plan), work, "measuring", scheduler)
    contracts = [base if c == plan.wirings[0] else tools.contract(c) for c in plan.candidates]
    swept = totals.sweep(contracts)
    runs = {"declared": Run(base, totals, swept.contracts.index(base))}
    if swept.winner.taps != base.taps:
        second = replace(plan, wirings=(texts(swept.winner.taps),), candidates=(), norms=False)
        readable = {p.file for p in totals.parts}
        again = [(f, final) for f, final in pairs if str(f) in readable]
        best = _measured(again, tools.with_plan(second), work, "the winner", scheduler)
        if best.failed:
            raise ReportError(
                best.failed[0].file, "second reading", expected="a file that stays readable",
                found=best.failed[0].error, remedy="run again: finished files are kept",
            )  # fmt: skip
        winner = swept.winner.change(Source("inferred", "wins the sweep"), taps=swept.winner.taps)
        runs["best"] = Run(winner, best, swept.order[0])
    layouts: dict[str, list[Path]] = {}
    for s in seen:
        layouts.setdefault(s.layout, []).append(s.path)
    seconds = time.perf_counter() - started
    measured = Measured(tools, runs, swept, layouts, folder, inputs.listed.ignored, warnings, seconds)
    return Report(assemble(request, measured), {name: run.totals for name, run in runs.items()})


def _measured(pairs: Pairs, tools: Tools, work: Path, label: str, scheduler: str) -> Totals:
    """Parts of all files put together; on a cluster they are measured first, then found finished."""
    if scheduler:
        from lib.cluster import fill  # Dask takes a second to import

        fill(pairs, tools, work, scheduler)
    return merge(evaluate_all(pairs, tools, work, progress(label)))


def progress(label: str) -> Bar:
    """A loop with a bar that leaves nothing behind, for people only: none in a log or a pipe.

    A notebook keeps every state of a bar that was printed (papermill stores them all), so there it waits
    for `SLOW` seconds, comes back that rarely, and is not seen at all where parts are finished already.
    """
    notebook = type(sys.stderr).__module__.startswith("ipykernel")
    pace = {"delay": SLOW, "mininterval": SLOW, "maxinterval": 2 * SLOW} if notebook else {"mininterval": 1}

    def bar(items: Sequence) -> Iterable:
        shown = len(items) >= FEW_FILES and (notebook or sys.stderr.isatty())
        return tqdm(items, label, ascii=True, leave=False, disable=not shown, **pace)

    return bar


# ---- what is there ------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Seen:
    """A capture file that could be opened: what a plan must know of it."""

    path: Path
    layout: str
    taps: tuple[Tap | Stored, ...]
    final: bool = False
    final_kind: str | None = None


def _survey(files: Sequence[Path], tools: Tools, bar: Bar) -> list[_Seen]:
    """Open every file once; what cannot be opened is left to `evaluate_file` to record."""
    seen = []
    for path in bar(files):
        try:
            c = open_as_planned(path, tools)
        except (WorkbookError, OSError):
            continue
        seen.append(_Seen(path, c.layout, c.taps, FINAL in c.readers, c.final_kind))
    return seen


def _comparable(seen: list[_Seen], plan: Plan, folder: Path, warnings: list[str]) -> tuple[list[_Seen], Plan]:
    """The files whose states can be told which is which, and the plan that refuses the others.

    Files that name their states can be compared by name. Files that do not are compared by position, which
    means something only as long as they store the same number of states.

    Raises ReportError for unnamed files of different numbers of states.
    """
    named = [s for s in seen if not any(isinstance(t, Stored) for t in s.taps)]
    if named and len(named) < len(seen):
        warnings.append(
            f"{len(seen) - len(named)} files skipped: they do not say which taps they hold, others do; "
            "name them"
        )
        return named, replace(plan, named=True)
    numbers = Counter(len(s.taps) for s in seen)
    if not named and len(numbers) > 1:
        first = {len(s.taps): s.path for s in reversed(seen)}
        found = (f"{n} in {count} files ({first[n]})" for n, count in sorted(numbers.items()))
        example = ";".join(map(_letters, sorted(numbers, reverse=True)))
        raise ReportError(
            folder, "taps", expected="one number of stored states in all files that do not name them",
            found=", ".join(found), remedy="give one list of names per number of states, each in stored "
            f'order: taps="{example}" with embed, layerK in place of the letters (make report TAPS=...)',
        )  # fmt: skip
    return seen, plan


def _letters(n: int) -> str:
    """`a,b,c`: so many names, to show how they are written."""
    return ",".join(ascii_lowercase[:n]) if n <= len(ascii_lowercase) else f"a,b,...({n} names)"


def _settled_kinds(
    pairs: Pairs, seen: Sequence[_Seen], tools: Tools
) -> tuple[tuple[tuple[str, str], ...], list[str]]:
    """Kinds of final states that files do not say, by layout, judged from a few files; and warnings.

    Every group of files is judged on its own, from `JUDGED` with a sound final state, spread over the group.
    Kinds that files claim are checked too: evidence against one is a warning.
    """
    known, groups = {s.path: s for s in seen}, {}
    for path, final in pairs:
        if path in known and (final or known[path].final):
            # Final states of their own folder say their kind only when opened: their suffix stands for it.
            kind = final.suffix if final else known[path].final_kind
            groups.setdefault((known[path].layout, kind), []).append((path, final))
    chosen: dict[tuple[str, str | None], list[Capture]] = {}
    for members in groups.values():
        for c in _sound(members, tools):
            chosen.setdefault((c.layout, c.final_kind), []).append(c)
    kinds, said = {}, []
    for (layout, claim), captures in chosen.items():
        try:
            settled, _ = settle_final(captures, tools.head)
        except WorkbookError as err:
            said.append(f"{layout}: final states not judged: {err}")
            continue
        for old, new in zip(captures, settled, strict=True):
            said += [f"{layout}: {note}" for note in new.notes[len(old.notes) :]]
        if claim is None and settled[0].final_kind is not None:
            kinds[layout] = settled[0].final_kind
    return tuple(sorted(kinds.items())), list(dict.fromkeys(said))


def _sound(pairs: Pairs, tools: Tools) -> list[Capture]:
    """At most `JUDGED` captures whose final state can be read, spread over the files.

    One that holds NaN is passed over here; measuring it says what is wrong with it.
    """
    step = max(1, len(pairs) // JUDGED)
    found: list[Capture] = []
    for i in sorted(range(len(pairs)), key=lambda i: (i % step, i)):
        if len(found) == JUDGED:
            break
        try:
            c = open_with_final(*pairs[i], tools)
            c.final()
        except (WorkbookError, OSError):
            continue
        found.append(c)
    return found


def _base(contract: Contract, common: tuple, warnings: list[str]) -> Contract:
    """The declared contract; where the captures cannot serve it, the one that their states suggest."""
    slots = len(contract.taps)
    if set(contract.taps) <= set(common):
        return contract
    unnamed = all(isinstance(t, Stored) for t in common)
    there = " ".join(map(str, common)) or "none"
    if unnamed:
        problem = f"nobody says which taps the {len(common)} stored states are"
    else:
        lacking = [str(t) for t in contract.taps if t not in common]
        problem = f"the captures ({there}) lack {' '.join(lacking)}, which the draft declares"
    if len(common) not in (slots, slots + 1):
        raise ContractError(
            "captures", "taps", expected=f"{slots} or {slots + 1} states in every file, or the declared "
            f"{' '.join(map(str, contract.taps))} among them", found=f"in every file: {there}",
            remedy="name the stored states with taps=, or check the convention",
        )  # fmt: skip
    if len(common) == slots:
        taps, rule = common, "as many as the draft has slots: taken in stored order"
    else:
        taps, rule = common[:-1], "one more than the draft has slots: [:-1], as speculators' trainer cuts"
    warnings.append(f"{problem}; {rule}. Name them with taps= to check the declared contract")
    return contract.change(Source("inferred", rule), taps=taps)


def _candidates(base: Contract, common: tuple, warnings: list[str]) -> list[tuple]:
    """Wirings to compare: every ordered choice, or the ascending ones when those are too many."""
    slots = len(base.taps)
    found: list[tuple] = []
    if math.perm(len(common), slots) <= MOST_ORDERED:
        found += ordered_choices(common, slots)
    else:
        found += combinations(common, slots)
        warnings.append(
            f"{math.perm(len(common), slots)} ordered choices of {slots} from {len(common)} states are too "
            f"many: {len(found)} ascending ones and the declared one were compared"
        )
    return [base.taps, *(taps for taps in found if taps != base.taps)]  # first: ties are the declared one's


# ---- command line -------------------------------------------------------------------------------


def make(request: Request, notebook: Path | None = None, scheduler: str = "") -> Path:
    """Measure (on a cluster, if one is named), then run notebook 07 with this request; return its folder.

    The notebook finds every part finished, so its own run takes seconds.
    """
    import nbformat
    import papermill
    from nbclient.exceptions import DeadKernelError

    from lib.notebook import NOTEBOOKS, clean, html

    # The notebook runs in its own folder: local paths must not depend on where this one runs.
    places = ("draft", "captures", "target", "finals", "loss_masks")
    asked = {n: p for n in places if (p := getattr(request, n)) and (n, p) != ("target", SAMPLE)}
    local = {n: str(Path(p).resolve()) for n, p in asked.items() if Path(p).exists()}
    request = replace(request, **local, out=str(request.folder.resolve()))
    build(request, scheduler=scheduler)
    folder = request.folder
    notebook = notebook or next(iter(sorted(NOTEBOOKS.glob("07_*.ipynb"))), None)
    if notebook is None:
        raise refused("notebook", "notebooks/07_*.ipynb", "none", "check out the notebook")
    try:
        with writing(folder / "report.ipynb"):
            papermill.execute_notebook(
                notebook, folder / "report.ipynb", asdict(request), kernel_name="python3",
                progress_bar=False, cwd=str(notebook.parent),
            )  # fmt: skip
    except DeadKernelError as err:
        raise ReportError(
            folder / "report.ipynb", "kernel", expected="a notebook that runs through",
            found=f"its kernel died: {err}"[:300],
            remedy="look for the system's out-of-memory killer; finished parts are kept, so run again",
        ) from err  # fmt: skip
    except papermill.exceptions.PapermillExecutionError as err:
        raise ReportError(
            folder / "report.ipynb", f"cell {err.exec_count}", expected="a notebook that runs through",
            found=f"{err.ename}: {err.evalue}"[:300], remedy="open it: it stops at the cell at fault",
        ) from err  # fmt: skip
    with writing(folder):
        written = nbformat.read(folder / "report.ipynb", as_version=4)
        written.cells = [c for c in written.cells if not NOT_EXPORTED & set(c.metadata.get("tags", ()))]
        clean(written)  # a page without a kernel has no use for controls, nor a reader for passed progress
        nbformat.write(written, folder / "report.ipynb")
        html([folder / "report.ipynb"], folder)
        _without_dead_links(folder / "report.html")
    return folder


def _without_dead_links(page: Path) -> None:
    """Links to other notebooks become plain text: they do not lie beside a report."""
    from bs4 import BeautifulSoup

    parsed = BeautifulSoup(page.read_text(encoding="utf-8"), "html.parser")
    for link in parsed.select("a[href]"):
        target = urlsplit(link["href"])
        if not target.scheme and not target.netloc and target.path.endswith((".ipynb", ".html")):
            link.unwrap()
    page.write_text(str(parsed), encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line; see the module docstring."""
    parser = argparse.ArgumentParser(prog="python -m lib.report", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("make", help="measure, and write report.ipynb, report.html and report.json")
    for f in fields(Request):
        kind = {"str": str, "int": int, "float": float}[f.type]
        required = f.name in ("draft", "captures")
        one.add_argument(
            "--" + f.name.replace("_", "-"), type=kind, required=required,
            default=None if required else f.default,
        )  # fmt: skip
    one.add_argument("--scheduler", default="", help="of a Dask cluster: local:4, tcp://host:8786")
    two = commands.add_parser("compare", help="what changed between two reports")
    two.add_argument("before", type=Path)
    two.add_argument("after", type=Path)
    two.add_argument("--which", choices=["declared", "best"], default="declared")
    two.add_argument("--out", type=Path, help="also write the comparison as JSON")
    args = vars(parser.parse_args(arguments))
    run = partial(_compare, args) if args.pop("command") == "compare" else partial(_make, args)
    try:
        run()
    except WorkbookError as err:
        print(" ".join(f"error: {err}".split()), file=sys.stderr)
        sys.exit(2)


def _make(args: dict[str, Any]) -> None:
    scheduler = args.pop("scheduler")
    print(f"report: {make(Request(**args), scheduler=scheduler) / 'report.html'}")


def _compare(args: dict[str, Any]) -> None:
    found = compare(args["before"], args["after"], args["which"])
    print(found)
    if args["out"]:
        save_comparison(found, args["out"])


if __name__ == "__main__":
    main()
