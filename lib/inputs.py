"""Which files a request means: captures, each with the file of its final state, and the target's folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lib.arrow_masks import numeric
from lib.captures import CaptureFiles, capture_files
from lib.hub import resolve
from lib.request import SAMPLE, Request, refused

Pairs = Sequence[tuple[Path, Path | None]]  # captures, each with the file of its final state


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


def pair_up(request: Request, folder: Path, listed: CaptureFiles, warnings: list[str]) -> Pairs:
    """The captures asked for, each with the file of its final state if `finals` names a folder.

    Paired by name where names match (`rows/data_7`), else by number (`data_7`, `final_7`), else, if no number
    is in both, in their order. Final states that no capture has are a warning.

    Raises ReportError if a capture has no partner.
    """
    asked = listed.files[: request.limit or None]
    if not request.finals:
        return [(f, None) for f in asked]
    place = resolve(request.finals, "captures")
    finals = listed_files(place).files
    said = ""
    for key in (_stem, _number):
        names, partners = [key(f, folder) for f in listed.files], {key(f, place): f for f in finals}
        shared = set(names) & set(partners) - {""}
        if not shared or len(set(names)) < len(names) or len(partners) < len(finals):
            continue  # these names tell nothing apart
        if lacking := [f.name for f, n in zip(asked, names, strict=False) if n not in partners]:
            said = f"{len(finals)} files, none for {', '.join(lacking[:3])}"
            continue
        if surplus := len(partners) - len(shared):
            warnings.append(f"{surplus} of {len(finals)} final states belong to no capture: not used")
        return [(f, partners[n]) for f, n in zip(asked, names, strict=False)]
    if said or len(finals) != len(listed.files):
        raise refused(
            "finals", f"{len(listed.files)} files, one per capture", said or f"{len(finals)} files",
            "name final states like their captures, data_7 and final_7",
        )  # fmt: skip
    return list(zip(asked, finals, strict=False))


def _stem(path: Path, root: Path) -> str:
    """Path below the folder (the name of a file alone) without suffixes."""
    inside = path.relative_to(root) if path != root else Path(path.name)
    return str(inside.parent / Path(inside.name.removesuffix(".gz")).stem)


def _number(path: Path, _root: Path) -> str:
    """The last number in a file's name; "" if there is none."""
    found = numeric(path)[0]
    return str(found) if found >= 0 else ""
