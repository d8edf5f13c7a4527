"""The diagnosis of somebody's files, by the command line.

    python -m lib.diagnose --draft DIR --captures DIR [--target DIR] [--live] [--taps embed,layer3,...] ...

Prints the verdict, the sentence for a ticket, a table of the findings with their evidence, what was noticed,
and what could not be asked. `--out FILE` writes the same as JSON. Files are read as `make report` reads them.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, fields
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
from tqdm import tqdm

from lib.captures import FINAL, Capture
from lib.case import Case, Diagnosis
from lib.diagnosis import diagnose, table
from lib.errors import CaptureError, WorkbookError
from lib.evaluate import Tools, open_with_final
from lib.final_state import settle_final
from lib.inputs import inputs_of
from lib.request import Request
from lib.target_head import TargetHead

OPTIONS = ("draft", "captures", "target", "finals", "taps", "convention", "layout", "loss_masks", "limit")


def open_case(
    request: Request, *, live: bool = False, progress: Callable[[Sequence], Iterable] = iter
) -> tuple[Case, list[str]]:
    """The case that a request describes, and warnings. Files that cannot be read are in `Case.unread`.

    Args:
        request: draft, captures, target, finals, taps, convention, layout, loss_masks and limit are used.
        live: load the target itself as well, so that states and text can be recomputed.
        progress: wraps the list of files.

    Raises a WorkbookError when the draft, the target or the request is at fault, or no file is readable.
    """
    found = inputs_of(request)
    warnings, tools = found.warnings, Tools(found.plan)
    captures: list[Capture] = []
    unread: list[WorkbookError] = []
    for path, final in progress(found.pairs):
        try:
            captures.append(open_with_final(path, final, tools))
        except WorkbookError as err:
            unread.append(err)
    if not captures:
        raise CaptureError(
            found.folder, "captures", expected="at least one capture that can be read",
            found=f"{len(unread)} refused, the first: {unread[0] if unread else 'there is no file'}",
            remedy="`python -m lib.detect FILE` says what a file is and why",
        )  # fmt: skip
    if tools.head is not None:
        captures = _settled(captures, tools.head, warnings)
    running = None
    if live and found.plan.target:
        from lib.decoding import LiveTarget
        from lib.target import load_target

        running = LiveTarget(load_target(Path(found.plan.target)))
    return Case(tools.forward.draft, tuple(captures), tools.head, running, tuple(unread)), warnings


def _settled(captures: list[Capture], head: TargetHead, warnings: list[str]) -> list[Capture]:
    """Final states that no file calls pre- or post-norm are judged by evidence, or warned of."""
    at = [i for i, c in enumerate(captures) if FINAL in c.readers and c.final_kind is None]
    try:
        settled, _ = settle_final([captures[i] for i in at], head)
    except WorkbookError as err:  # NaN in a state, say: the probes will name it
        warnings.append(f"final states not judged: {err}")
        return captures
    for i, capture in zip(at, settled, strict=True):
        captures[i] = capture
    said = [n for c in settled if c.final_kind is None for n in c.notes[-1:]]
    warnings += dict.fromkeys(said)
    return captures


def as_json(found: Diagnosis) -> dict[str, Any]:
    """The verdict as JSON has it: findings without the tensors of their fixes."""
    findings = [{f.name: getattr(x, f.name) for f in fields(x) if f.name != "fix"} for x in found.findings]
    return {
        "verdict": found.verdict, "because": found.because, "findings": findings,
        "remarks": list(found.remarks), "not_run": found.not_run,
        "numbers": {k: asdict(v) if hasattr(v, "accuracy") else v for k, v in found.numbers.items()},
    }  # fmt: skip


def told(found: Diagnosis) -> str:
    """The verdict as a page of text."""
    blocks = [f"verdict: {found.verdict}", found.because]
    if found.findings:
        rows = table(found).drop(columns="evidence")
        with pd.option_context("display.width", 160, "display.max_columns", None, "display.max_colwidth", 60):
            blocks.append(rows.T.to_string())
    lines = [f"{i}. {line}" for i, f in enumerate(found.findings, 1) for line in f.evidence]
    lines += [f"noticed: {line}" for line in found.remarks]
    lines += [f"not run: {name}: {why}" for name, why in found.not_run.items()]
    return "\n\n".join([*blocks, "\n".join(lines)])


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line; see the module docstring."""
    parser = argparse.ArgumentParser(prog="python -m lib.diagnose", description=__doc__.splitlines()[0])
    for f in (f for f in fields(Request) if f.name in OPTIONS):
        required = f.name in ("draft", "captures")
        kind = {"str": str, "int": int}[f.type]
        parser.add_argument(
            "--" + f.name.replace("_", "-"), type=kind, required=required,
            default=None if required else f.default,
        )  # fmt: skip
    parser.add_argument("--live", action="store_true", help="load the target too, to recompute states")
    parser.add_argument("--out", type=Path, help="also write the verdict as JSON")
    args = vars(parser.parse_args(arguments))
    live, out = args.pop("live"), args.pop("out")
    try:
        bar = partial(tqdm, desc="opening", leave=False, disable=None)
        case, warnings = open_case(Request(**args), live=live, progress=bar)
        found = diagnose(case)
    except WorkbookError as err:
        print(" ".join(f"error: {err}".split()), file=sys.stderr)
        sys.exit(2)
    print(told(found))
    print(*(f"warning: {w}" for w in warnings), sep="\n", end="\n" if warnings else "")
    if out:
        out.write_text(json.dumps(as_json(found), indent=1, default=str) + "\n")


if __name__ == "__main__":
    main()
