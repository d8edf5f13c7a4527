"""Where capture files are: folders or URLs (fsspec), which of their files are captures, and how one is read.

Everything that measures beyond one machine names a file by its absolute path or its URL (`Source`), and by a
key made of what the file system or the store says of it.
"""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePath, PurePosixPath
from urllib.parse import urlsplit

import fsspec
from fsspec.implementations.local import LocalFileSystem

from lib.arrow_masks import numeric
from lib.captures import why_ignored
from lib.errors import CaptureError
from lib.inputs import listed_files, pair_up
from lib.partitions import Source
from lib.parts import digest, file_key, writing


def sources(captures: str, finals: str = "", stratum: Callable[[str], str] | None = None) -> list[Source]:
    """The capture files of a folder or URL, each with the file of its final state if `finals` names a place.

    Loss masks that lie beside the captures are the plan's to name: see `masks_of`.

    Args:
        finals: folder or URL of captures of the same texts that hold their final states; paired as
            `lib.inputs.pair_up` does.
        stratum: file -> name of its group for sampling; its folder if None.

    Raises CaptureError if there are none, ReportError if one has no final state; final states that no
    capture has are a UserWarning.
    """
    of, said = stratum or os.path.dirname, []
    listings = [_listed(place) if place else None for place in (captures, finals)]
    pairs = pair_up(listings[0], listings[1], said)
    for line in said:
        warnings.warn(line, stacklevel=2)
    names = [(_name(f, captures), _name(final, finals) if final else "") for f, final in pairs]
    return [Source(f, final, key_of(f, final), of(f)) for f, final in names]


def masks_of(captures: str) -> str:
    """The folder of loss masks that a folder of captures brings along, for `Plan.loss_masks`; "" for none."""
    if is_remote(captures):
        return ""  # a data set's arrow files have to be on a disk: name their folder in the plan
    return str(listed_files(Path(local_path(captures))).masks or "")


def key_of(file: str, final: str = "") -> str:
    """`lib.parts.file_key`; for URLs, over what the store says of them."""
    if not is_remote(file):
        return file_key(Path(local_path(file)), Path(local_path(final)) if final else None)
    return digest([_remote_stamp(f) for f in (file, final) if f])[:16]


def size_of(file: str) -> int:
    """Bytes of a file or URL."""
    fs, path = fsspec.core.url_to_fs(file)
    return int(fs.size(path))


# What stores call the version of an object.
VERSIONS = ("ETag", "etag", "blob_id", "mtime", "modify", "LastModified", "Last-Modified", "last_modified",
            "updated", "created")  # fmt: skip


def _remote_stamp(url: str) -> list:
    fs, path = fsspec.core.url_to_fs(url)
    info = fs.info(path)
    return [url, info.get("size"), [str(info[k]) for k in VERSIONS if info.get(k) is not None]]


def is_remote(place: str) -> bool:
    """Whether it is a URL of something else than this machine's files."""
    return len(urlsplit(str(place)).scheme) > 1 and not isinstance(
        fsspec.core.url_to_fs(str(place))[0], LocalFileSystem
    )


def local_path(place: str) -> str:
    """The absolute path of a local place, for a worker may run elsewhere."""
    return os.path.abspath(place.removeprefix("file://"))


def _listed(place: str) -> tuple[PurePath, list[PurePath]]:
    """A folder or URL, and its capture files, as paths within their file system."""
    if not is_remote(place):
        folder = Path(local_path(place))
        return folder, list(listed_files(folder).files)
    fs, root = fsspec.core.url_to_fs(place)
    files = [PurePosixPath(p) for p in fs.find(root)]
    files = [p for p in files if not _ignored(p.relative_to(PurePosixPath(root)))]
    if not files:
        raise CaptureError(place, "folder", expected="capture files", found="none", remedy="check the URL")
    return PurePosixPath(root), sorted(files, key=numeric)


def _ignored(inside: PurePath) -> bool:
    """Whether a path below the root is no capture: its own name, or a folder's that it lies in."""
    *folders, name = inside.parts or ("",)
    return bool(why_ignored(name, folder=False)) or any(why_ignored(f, folder=True) for f in folders)


def _name(file: PurePath, place: str) -> str:
    """The file as fsspec takes it: an absolute path, or a URL."""
    if not is_remote(place):
        return str(file)
    fs, root = fsspec.core.url_to_fs(place)
    inside = file.relative_to(PurePosixPath(root)).as_posix()
    return fs.unstrip_protocol(root if inside == "." else f"{root.rstrip('/')}/{inside}")


class UnreadFile(Exception):
    """A file that could not be measured; the driver tries it again. Holds the error and its kind."""

    def __init__(self, error: str, kind: str) -> None:
        self.error, self.kind = error, kind
        super().__init__(error, kind)


@contextmanager
def local_copy(file: str, scratch: str | None = None) -> Iterator[Path | None]:
    """A path of the file on this machine: itself, or a copy that is gone afterwards. None for "".

    Args:
        scratch: folder for the copy; the system's if None.

    Raises UnreadFile if the store does not give it, ReportError if this machine's disk is full.
    """
    if not file or not is_remote(file):
        yield Path(local_path(file)) if file else None
        return
    folder = Path(tempfile.mkdtemp(prefix="capture-", dir=scratch))
    try:
        fs, path = fsspec.core.url_to_fs(file)
        local = folder / PurePosixPath(path).name  # loss masks go by the name
        try:
            fs.get_file(path, str(local))
        except Exception as err:  # every store has errors of its own
            if isinstance(err, OSError) and err.errno in (errno.ENOSPC, errno.EDQUOT):
                with writing(local):  # this worker's disk is full: not the file's fault
                    raise
            raise UnreadFile(f"{file}: {err}", type(err).__name__) from err
        yield local
    finally:
        shutil.rmtree(folder, ignore_errors=True)
