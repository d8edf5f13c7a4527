"""A path or a hub id -> a local path; of a hub repository only the files that are needed are fetched.

| kind | repository | files |
|---|---|---|
| draft | model | config.json, hf_quant_config.json, eagle_meta.pt, safetensors; pickles only without any |
| target | model | config.json, the index, and the shards with embedding, final norm and lm_head |
| captures | dataset | `.pt`, `.ckpt`, `.ckpt.gz`, `.safetensors`, `.arrow`, and the `.json` beside them |

Nothing else of a repository is asked for, and no code in it is ever fetched. `HF_HUB_OFFLINE` counts
as 1 where it is not set: without HF_HUB_OFFLINE=0 only the cache is looked at.
The protocol is huggingface_hub's (`_snapshot_download.py`, 2.4.0): its cache and tokens are used.
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from tqdm import tqdm

from lib.errors import CaptureError, CheckpointError, TargetError, WorkbookError
from lib.formats import HEAD

Kind = Literal["draft", "target", "captures"]
ERRORS: dict[str, type[WorkbookError]] = {
    "draft": CheckpointError,
    "target": TargetError,
    "captures": CaptureError,
}
# owner/name as the hub allows it, with an optional @revision (branch, tag, commit or refs/pr/N).
ID = re.compile(r"(?P<repo>\w[\w.-]*/\w[\w.-]*)(@(?P<revision>\w[\w./-]*))?", re.ASCII)
SMALL = ("config.json", "hf_quant_config.json", "eagle_meta.pt", "eagle3_meta.pt")
STEMS = ("model.safetensors", "pytorch_model.bin")  # in the order in which lib.weights looks for them
CAPTURES = r".*\.(pt|ckpt|ckpt\.gz|safetensors|arrow|json)"


def resolve(path_or_id: str | Path, kind: Kind) -> Path:
    """A local path as it is, or the cached snapshot folder of a hub id.

    Args:
        path_or_id: an existing file or folder (which always wins), or `owner/name[@revision]`.
        kind: what it is wanted as; decides which files are fetched.

    Raises CheckpointError (draft), TargetError (target) or CaptureError (captures) for what is neither,
    for an id that is not cached while offline, and for every failure of the hub or the network.
    """
    path = Path(path_or_id)
    error = ERRORS[kind]
    try:
        if str(path_or_id) and path.exists():  # Path("") would be the working directory
            return path
    except (OSError, ValueError):  # too long for a file name, or a zero byte in it
        pass
    found = ID.fullmatch(str(path_or_id))
    if not found:
        raise error(
            str(path_or_id), "path", expected="an existing path, or a hub id owner/name[@revision]",
            found="nothing there, and not the form of a hub id",
            remedy="check the path (relative ones start at the working directory)",
        )  # fmt: skip
    return _Repository(found["repo"], found["revision"] or "main", kind).fetch()


def offline() -> bool:
    """Whether the network is off limits: yes, unless HF_HUB_OFFLINE says 0."""
    return os.environ.get("HF_HUB_OFFLINE", "1").upper() in ("1", "ON", "YES", "TRUE")


class _Bar(tqdm):
    """A plain text bar, in terminals only."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **{"disable": None, **kwargs})


class _Repository:
    """One repository at one revision, fetched in two steps: small files, then the weights they name."""

    def __init__(self, repo: str, revision: str, kind: Kind) -> None:
        self.repo, self.revision, self.kind = repo, revision, kind
        self.type = "dataset" if kind == "captures" else "model"
        self.where = repo if revision == "main" else f"{repo}@{revision}"

    def fetch(self) -> Path:
        """The snapshot folder with everything that this kind needs."""
        # Set before the hub's library reads it, which it does once, when it is imported.
        os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
        if self.kind == "captures":
            folder = self._download(())
            wanted = [n for n in self._names(folder) if re.fullmatch(CAPTURES, n)]
        else:
            indexes = tuple(f"{stem}.index.json" for stem in STEMS)
            folder = self._download(SMALL[: 1 if self.kind == "target" else None] + indexes)
            names = self._names(folder)
            if "config.json" not in names:
                raise self._error("config.json", "this file in the repository", self._seen(names))
            wanted = self._weights(folder, names)
        if not wanted:
            what = "captures" if self.type == "dataset" else " or ".join(STEMS) + ", whole or by an index"
            raise self._error(self.kind, what, self._seen(self._names(folder)))
        # The commit, not the name of the branch: the second step must not see a newer revision.
        self._download(wanted, folder.name)
        absent = [name for name in wanted if not (folder / name).is_file()]
        if absent:  # caches of older libraries hold no listing to check against
            raise self._error(
                absent[0], "every needed file in the cache", f"{len(absent)} of {len(wanted)} missing",
                "set HF_HUB_OFFLINE=0 once to complete the download",
            )  # fmt: skip
        return folder

    def _weights(self, folder: Path, names: Sequence[str]) -> list[str]:
        """Names of the files of weights that are needed, smallest set first."""
        from lib.weights import read_json  # brings torch, which local paths and errors do not need

        for stem in STEMS:
            index = folder / f"{stem}.index.json"
            if index.is_file():
                weight_map = read_json(index).get("weight_map")
                if not isinstance(weight_map, dict):
                    raise self._error(index.name, "weight_map: a dict of tensor name -> shard", "none")
                rule = HEAD if self.kind == "target" else ".*"
                shards = {str(s) for n, s in weight_map.items() if re.fullmatch(rule, n)}
                if absent := sorted(shards - set(names)):
                    raise self._error(index.name, f"its shard {absent[0]} in the repository", "no such file")
                return sorted(shards)
            if stem in names:
                return [stem]
            if self.kind == "draft" and stem == STEMS[0]:
                other = [n for n in names if n.endswith(".safetensors") and "/" not in n]
                if other:
                    return other
        return []

    def _names(self, folder: Path) -> list[str]:
        """All files of the repository at this commit; those in the cache if no listing is there."""
        from huggingface_hub import get_cached_repo_tree
        from huggingface_hub.errors import CachedRepoTreeNotFoundError

        try:
            tree = get_cached_repo_tree(self.repo, repo_type=self.type, revision=folder.name)
            return sorted(file.path for file in tree)
        except CachedRepoTreeNotFoundError:
            return sorted(str(f.relative_to(folder)) for f in folder.rglob("*") if f.is_file())

    def _download(self, names: Sequence[str], revision: str = "") -> Path:
        """The snapshot folder once these files are in it. Names that do not exist are left out."""
        from huggingface_hub import snapshot_download

        try:
            folder = snapshot_download(
                self.repo,
                repo_type=self.type,
                revision=revision or self.revision,
                # Matched as patterns over whole paths: an escaped name matches itself only.
                allow_patterns=[glob.escape(name) for name in names],
                local_files_only=offline(),
                tqdm_class=_Bar,
            )
        except Exception as err:  # the hub's, httpx's and the disk's; all become one
            raise self._failure(err) from err
        return Path(folder)

    def _failure(self, err: Exception) -> WorkbookError:
        """What went wrong, in this workbook's terms."""
        from huggingface_hub import errors, is_offline_mode

        cause = err.__cause__ or err
        said = " ".join(str(cause).split())[:200] or type(cause).__name__
        if isinstance(err, errors.GatedRepoError):
            return self._error(
                "access", "a repository open to you", "gated",
                "accept its terms on its page, then `hf auth login`; or give a local copy",
            )  # fmt: skip
        if isinstance(err, errors.RepositoryNotFoundError):
            return self._error(
                "repository", f"a {self.type} of this name on the hub", "none, or a private one",
                "check the spelling; if it was meant as a path, it does not exist here",
            )  # fmt: skip
        if isinstance(err, errors.RevisionNotFoundError):
            return self._error(
                "revision", f"a branch, tag or commit {self.revision!r}", "none of that name",
                "leave out @revision for the newest",
            )  # fmt: skip
        if isinstance(err, errors.LocalEntryNotFoundError) and (offline() or is_offline_mode()):
            part = isinstance(err, errors.IncompleteSnapshotError)
            return self._error(
                "path", "an existing path, or a hub id in the cache",
                "only a part of it in the cache" if part else "neither, and the network is off",
                "set HF_HUB_OFFLINE=0 (before Python starts) to download it, or give a local path",
            )  # fmt: skip
        return self._error(
            "download", "an answer from the hub", f"{type(cause).__name__}: {said}",
            "check the network and the disk and run again: finished files are kept; or give a local path",
        )  # fmt: skip

    def _error(self, field: str, expected: str, found: str, remedy: str = "") -> WorkbookError:
        if not remedy and offline():
            remedy = "the cache may hold only a part of it: set HF_HUB_OFFLINE=0 once to complete it"
        remedy = remedy or f"this is not a repository of a {self.kind}: check the id, or give a local path"
        return ERRORS[self.kind](self.where, field, expected=expected, found=found, remedy=remedy)

    @staticmethod
    def _seen(names: Sequence[str]) -> str:
        return f"{len(names)} files: {list(names[:8])}"
