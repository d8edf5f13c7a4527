"""What a request means: captures, each with the file of its final state, the target's folder, and a plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath

from lib.arrow_masks import numeric
from lib.captures import CaptureFiles, capture_files
from lib.evaluate import Plan
from lib.hub import resolve
from lib.request import SAMPLE, Request, refused

Pairs = Sequence[tuple[Path, Path | None]]  # captures, each with the file of its final state
Listing = tuple[PurePath, Sequence[PurePath]]  # a folder, and files in it


@dataclass(frozen=True)
class Inputs:
    """The files of a request, before any is opened.

    Attributes:
        folder: of the captures. listed: what it holds. pairs: the captures asked for.
        plan: what the request says of measuring them; wirings and candidates are for others to choose.
        warnings: what was left out.
    """

    folder: Path
    listed: CaptureFiles
    pairs: Pairs
    plan: Plan
    warnings: list[str]


def inputs_of(request: Request) -> Inputs:
    """Find what a request names, on this machine or in a hub.

    Raises a WorkbookError that says which of its fields is at fault.
    """
    draft, target = str(resolve(request.draft, "draft")), target_path(request.target)
    folder, warnings = resolve(request.captures, "captures"), []
    listed = listed_files(folder)
    place = resolve(request.finals, "captures") if request.finals else None
    finals = (place, listed_files(place).files) if place else None
    pairs = pair_up((folder, listed.files), finals, warnings, request.limit)
    masks = request.loss_masks or str(listed.masks or "")
    plan = Plan(
        draft, target, request.convention, request.names, bool(request.names), masks, request.layout,
        depth=request.depth, device=request.device, dtype=request.dtype,
    )  # fmt: skip
    return Inputs(folder, listed, pairs, plan, warnings)


def listed_files(path: Path) -> CaptureFiles:
    """The files of a folder, or the file itself."""
    return CaptureFiles((path,), {}) if path.is_file() else capture_files(path)


def target_path(asked: str) -> str:
    """The target's path: a local one, a hub's snapshot, or the sample's; "" if there is none.

    Raises TargetError.
    """
    if asked == SAMPLE:
        from lib.target import ensure_target  # no other target needs what fetches and converts this one

        return str(ensure_target())
    return str(resolve(asked, "target")) if asked else ""


def pair_up(captures: Listing, finals: Listing | None, warnings: list[str], limit: int = 0) -> list[tuple]:
    """The first `limit` captures (0: all), each with the file of its final state, or None without `finals`.

    Paired by name where names match (`rows/data_7`), else by number (`data_7`, `final_7`), else, if no number
    is in both, in their order. Final states that no capture has are a warning. Paths of any kind, unopened.

    Raises ReportError if a capture has no partner.
    """
    folder, files = captures
    asked = files[: limit or None]
    if finals is None:
        return [(f, None) for f in asked]
    place, states = finals
    said = ""
    for key in (_stem, _number):
        names, partners = [key(f, folder) for f in files], {key(f, place): f for f in states}
        shared = set(names) & set(partners) - {""}
        if not shared or len(set(names)) < len(names) or len(partners) < len(states):
            continue  # these names tell nothing apart
        if lacking := [f.name for f, n in zip(asked, names, strict=False) if n not in partners]:
            said = f"{len(states)} files, none for {', '.join(lacking[:3])}"
            continue
        if surplus := len(partners) - len(shared):
            warnings.append(f"{surplus} of {len(states)} final states belong to no capture: not used")
        return [(f, partners[n]) for f, n in zip(asked, names, strict=False)]
    if said or len(states) != len(files):
        raise refused(
            "finals", f"{len(files)} files, one per capture", said or f"{len(states)} files",
            "name final states like their captures, data_7 and final_7",
        )  # fmt: skip
    return list(zip(asked, states, strict=False))


def _stem(path: PurePath, root: PurePath) -> str:
    """Path below the folder (the name of a file alone) without suffixes."""
    inside = path.relative_to(root) if path != root else PurePath(path.name)
    return str(inside.parent / PurePath(inside.name.removesuffix(".gz")).stem)


def _number(path: PurePath, _root: PurePath) -> str:
    """The last number in a file's name; "" if there is none."""
    found = numeric(path)[0]
    return str(found) if found >= 0 else ""
