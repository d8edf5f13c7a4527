"""The same measurements over more captures than one machine holds, on a Dask cluster.

`measure` sends one task per capture file to the workers of any Dask scheduler. A task reads its file (a
path, or a URL of fsspec), measures it as `lib.evaluate` does, and writes one row of Parquet
(`lib.partitions`) before it ends; what comes back is small. So

- a run that was killed goes on where it was: files with a row are not sent again, and a row is counted
  once, whoever wrote it;
- a lost worker costs the file in its hands, which Dask gives to another;
- a file that cannot be read, or kills whoever reads it, is tried again and then set aside with its error;
- a full disk stops the run with an error and leaves whole rows only;
- a restarted scheduler is waited for, if its address was given (`connect` says which ways there are).

Workers need this repository, its requirements, and the draft, target and loss masks under the same paths
with the same times (a shared file system, or `rsync -t`); a worker that sees other files refuses.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import tempfile
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePath, PurePosixPath
from urllib.parse import urlsplit

import dask
import fsspec
import pandas as pd
import torch
from distributed import CancelledError, Client, Future, KilledWorker, LocalCluster, get_worker, wait
from distributed.comm import CommClosedError
from fsspec.implementations.local import LocalFileSystem
from tqdm import tqdm

from lib.arrow_masks import numeric
from lib.captures import IGNORED
from lib.errors import CaptureError, ClusterError
from lib.evaluate import DEADLY, Plan, Tools, Totals, evaluate_file, merge, part_file
from lib.inputs import listed_files, pair_up
from lib.norms import TapNorms
from lib.partitions import Source, Store, bucket, merge_norms, to_row
from lib.parts import Part, digest, file_key
from lib.sampling import Enough, Estimate, drawing_order

RETRIES = 2  # more tries of a file that cannot be read: it may be on its way, or the network was
AHEAD = 3  # tasks that a worker's thread has at hand, so that it never waits and a scheduler never drowns
PATIENCE = 300.0  # seconds that a scheduler, or every worker, may be away
VAIN = 5  # times that a scheduler may be lost without one file in between
POLL = 10.0  # seconds after which a silent cluster is looked at
LOCAL = "local"  # scheduler="local:4": four processes on this machine
Bar = Callable[..., tqdm]


# ---- which files ----------------------------------------------------------------------------------


def sources(captures: str, finals: str = "", stratum: Callable[[str], str] | None = None) -> list[Source]:
    """The capture files of a folder or URL, each with the file of its final state if `finals` names a place.

    Args:
        finals: folder or URL of captures of the same texts that hold their final states; paired as
            `lib.inputs.pair_up` does.
        stratum: file -> name of its group for sampling; its folder if None.

    Raises CaptureError if there are none, ReportError if one has no final state.
    """
    of, unused = stratum or os.path.dirname, []
    listings = [_listed(place) if place else None for place in (captures, finals)]
    pairs = pair_up(listings[0], listings[1], unused)
    names = [(_name(f, captures), _name(final, finals) if final else "") for f, final in pairs]
    return [Source(f, final, key_of(f, final), of(f)) for f, final in names]


def key_of(file: str, final: str = "") -> str:
    """`lib.parts.file_key`; for URLs, over what the store says of them."""
    if not is_remote(file):
        return file_key(Path(file), Path(final) if final else None)
    return digest([_remote_stamp(f) for f in (file, final) if f])[:16]


def _remote_stamp(url: str) -> list:
    fs, path = fsspec.core.url_to_fs(url)
    info = fs.info(path)
    # What stores call the version of an object: whichever they tell.
    told = (info.get(k) for k in ("ETag", "etag", "mtime", "LastModified", "updated", "last_modified"))
    return [url, info.get("size"), next((str(v) for v in told if v is not None), "")]


def is_remote(place: str) -> bool:
    """Whether it is a URL of something else than this machine's files."""
    return len(urlsplit(str(place)).scheme) > 1 and not isinstance(
        fsspec.core.url_to_fs(str(place))[0], LocalFileSystem
    )


def _listed(place: str) -> tuple[PurePath, list[PurePath]]:
    """A folder or URL, and its capture files, as paths within their file system."""
    if not is_remote(place):
        folder = Path(place.removeprefix("file://"))
        return folder, list(listed_files(folder).files)
    fs, root = fsspec.core.url_to_fs(place)
    found = map(PurePosixPath, sorted(fs.find(root)))
    files = [p for p in found if not any(re.fullmatch(rule, p.name) for rule in IGNORED)]
    if not files:
        raise CaptureError(place, "folder", expected="capture files", found="none", remedy="check the URL")
    return PurePosixPath(root), sorted(files, key=numeric)


def _name(file: PurePath, place: str) -> str:
    """The file as fsspec takes it: a path, or a URL."""
    if not is_remote(place):
        return str(file)
    fs, root = fsspec.core.url_to_fs(place)
    inside = file.relative_to(PurePosixPath(root)).as_posix()
    return fs.unstrip_protocol(f"{root.rstrip('/')}/{inside}")


# ---- one task ---------------------------------------------------------------------------------------


class UnreadFile(Exception):
    """A file that could not be measured; Dask tries the task again. Holds the error and its kind."""

    def __init__(self, error: str, kind: str) -> None:
        self.error, self.kind = error, kind
        super().__init__(error, kind)


_loading, _loaded = threading.Lock(), {}


def tools_of(plan: Plan, fingerprint: str) -> Tools:
    """The plan's tools, loaded once a process. Raises ClusterError if they are not what the driver saw."""
    with _loading:
        if fingerprint not in _loaded:
            _loaded.clear()  # one plan at a time: two drafts need twice the memory
            tools = Tools(plan)
            if tools.fingerprint != fingerprint:
                raise ClusterError(
                    plan.draft, "worker", expected="the files that the driver sees, times and sizes too",
                    found=f"others on {_worker_name()} (plan {tools.fingerprint[:8]}, not {fingerprint[:8]})",
                    remedy="put draft, target and masks on a shared file system, or copy them with rsync -t",
                )  # fmt: skip
            _loaded[fingerprint] = tools
        return _loaded[fingerprint]


def measure_one(source: Source, plan: Plan, store: Store) -> str:
    """Measure a file and write its row; the task that workers run. Returns the key.

    Raises UnreadFile, ClusterError, or ReportError when the row cannot be written.
    """
    if store.has(source.key):  # a worker that died after writing it
        return source.key
    tools = tools_of(plan, store.plan)
    began = time.perf_counter()
    with local_copy(source.file) as path, local_copy(source.final) as final:
        part = evaluate_file(path, plan, final=final or "", tools=tools)
        size = sum(p.stat().st_size for p in (path, final) if p is not None and p.exists())
    if part.error:
        raise UnreadFile(part.error, part.error_kind)
    part = replace(part, file=source.file)
    seconds = time.perf_counter() - began
    store.add(to_row(part, source, size=size, seconds=seconds, worker=_worker_name(), whole=store.whole))
    return source.key


def _worker_name() -> str:
    try:
        return str(get_worker().name)
    except ValueError:  # not on a worker
        return "here"


@contextmanager
def local_copy(file: str) -> Iterator[Path | None]:
    """A path of the file on this machine: itself, or a copy that is gone afterwards. None for ""."""
    if not file or not is_remote(file):
        yield Path(file.removeprefix("file://")) if file else None
        return
    folder = Path(tempfile.mkdtemp(prefix="capture-"))
    try:
        fs, path = fsspec.core.url_to_fs(file)
        local = folder / PurePosixPath(path).name  # loss masks go by the name
        try:
            fs.get_file(path, str(local))
        except Exception as err:  # every store has errors of its own
            raise UnreadFile(f"{file}: {err}", type(err).__name__) from err
        yield local
    finally:
        shutil.rmtree(folder, ignore_errors=True)


# ---- the driver -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Measured:
    """What there is of some files after a run.

    Attributes:
        sources: all files asked for, in the order in which they were drawn.
        finished: keys with a row; resumed: how many of them were there before this run.
        failed: the files set aside, with their errors (see `Store.failed`).
        looks: numbers of finished files and estimates at which the rule to stop was asked.
        seconds: of this run.
    """

    store: Store
    sources: tuple[Source, ...]
    finished: frozenset[str]
    resumed: int
    failed: pd.DataFrame
    looks: tuple[tuple[int, Estimate], ...] = ()
    seconds: float = 0.0

    def rows(self, columns: list[str] | None = None) -> pd.DataFrame:
        """One row per finished file (`lib.partitions.SCHEMA`), without blobs unless asked for."""
        return _rows(self.store, self.finished, self.sources, columns)

    def sizes(self) -> dict[str, int]:
        """Stratum -> files of the population, without those set aside: nothing is known of them."""
        gone = set(self.failed["key"])
        return dict(Counter(s.stratum for s in self.sources if s.key not in gone))

    def estimate(self, quantity: str, level: float = 0.95) -> Estimate:
        """A quantity of `Enough` over the population, with its interval."""
        return Enough(quantity, 0.0, level=level).estimate(self.rows(), self.sizes())

    def norms(self, client: Client | None = None) -> dict[str, TapNorms]:
        """Statistics per tap over all finished files, merged partition by partition, on workers if given.

        The order of merging is that of the keys, so neither the number of workers nor chance moves a digit.
        """
        groups: dict[str, list[str]] = {}
        for key in sorted(self.finished):
            groups.setdefault(bucket(key), []).append(key)
        keys = list(groups.values())
        parts = client.gather(client.map(self.store.norms, keys)) if client else map(self.store.norms, keys)
        merged: dict[str, TapNorms] = {}
        for part in parts:
            merged = merge_norms(merged, part.norms)
        return merged

    def parts(self) -> list[Part]:
        """All parts in the order of the sources, failed ones too; in memory, so for a report's files."""
        why = self.failed.set_index("key")
        found = []
        for s in self.sources:
            if s.key in self.finished:
                found += self.store.parts([s.key])
            elif s.key in why.index:
                e = why.loc[s.key]
                found.append(Part(self.store.plan, s.file, Path(s.file).stem, e["error"], e["error_kind"]))
        return found

    def totals(self) -> Totals:
        """`lib.evaluate.merge` of all parts."""
        return merge(self.parts())


def measure(
    files: Sequence[Source],
    plan: Plan,
    out: str | Path,
    scheduler: Client | str,
    *,
    whole: bool = False,
    enough: Enough | None = None,
    seed: int = 0,
    retries: int = RETRIES,
    patience: float = PATIENCE,
    bar: Bar = tqdm,
) -> Measured:
    """Measure files on a cluster, going on where an earlier run was stopped.

    Args:
        files: from `sources`.
        plan: what to measure in each; its paths must be good on every worker.
        out: folder or URL for the rows, good on every worker.
        scheduler: a client, or what `connect` takes. An address is waited for if its scheduler restarts.
        whole: keep what a report needs, not sums and norms alone.
        enough: rule to stop; without it every file is measured.
        seed: of the order in which files are drawn when there is a rule.
        retries: more tries of a file that cannot be read.
        patience: seconds to wait for a scheduler that is away.
        bar: makes the progress bar, as `tqdm` does.

    Raises ClusterError, ReportError (a full disk), or whatever is wrong with draft, target or plan.
    """
    began = time.perf_counter()
    tools = Tools(plan)  # what is wrong with the draft is said here, not by every worker
    store = Store(str(out), tools.fingerprint, whole)
    del tools
    store.describe(plan)
    drawn = tuple(drawing_order(files, seed) if enough else files)
    if len({s.key for s in drawn}) < len(drawn):
        raise ClusterError(
            out, "files", expected="each file once", found=f"{len(drawn)} sources, "
            f"{len({s.key for s in drawn})} different ones", remedy="list every capture once",
        )  # fmt: skip
    run = _Run(drawn, plan, store, enough, retries, patience, bar)
    in_vain = 0
    while not run.complete():
        before = len(run.done | run.aside)
        with connect(scheduler, patience) as client:
            try:
                run.drive(client)
            except Lost as err:
                in_vain = 0 if len(run.done | run.aside) > before else in_vain + 1
                given = isinstance(scheduler, str) and not scheduler.startswith(LOCAL)
                if not given or in_vain == VAIN:
                    raise ClusterError(
                        "scheduler", "connection", expected="a scheduler that answers", found=str(err),
                        remedy="connect again and call measure() again: finished files are kept",
                    ) from err  # fmt: skip
    keys = {s.key for s in drawn}
    return Measured(
        store, drawn, frozenset(run.done), run.resumed, store.failed(keys - run.done), tuple(run.looks),
        time.perf_counter() - began,
    )  # fmt: skip


def fill(
    pairs: Sequence[tuple[Path, Path | None]], tools: Tools, work: Path, scheduler: Client | str
) -> None:
    """Measure on a cluster what `lib.evaluate.evaluate_all` would, so that it finds every part finished."""
    todo = []
    for path, final in pairs:
        part = Part.load(part_file(path, final, tools, work))
        if part is None or part.error or part.plan != tools.fingerprint:
            todo.append(Source(str(path), str(final or ""), file_key(path, final)))
    if not todo:
        return
    found = measure(todo, tools.plan, (work / "cluster").resolve(), scheduler, whole=True)
    of = {s.file: s.final for s in todo}
    for part in found.parts():
        final = of[part.file]
        part.save(part_file(Path(part.file), Path(final) if final else None, tools, work))


def _rows(
    store: Store, keys: Collection[str], sources: Sequence[Source], columns: list[str] | None = None
) -> pd.DataFrame:
    """Rows of these keys, in today's strata: an earlier run may have had others."""
    rows = store.rows(keys, columns)
    if {"stratum", "key"} <= set(rows):
        rows["stratum"] = rows["key"].map({s.key: s.stratum for s in sources})
    return rows


class Lost(Exception):
    """The scheduler does not answer, or forgot what it was asked."""


@dataclass
class _Run:
    """One call of `measure`: what is done, set aside and still to send."""

    drawn: tuple[Source, ...]
    plan: Plan
    store: Store
    enough: Enough | None
    retries: int
    patience: float
    bar: Bar
    done: set[str] = field(default_factory=set)
    aside: set[str] = field(default_factory=set)
    looks: list[tuple[int, Estimate]] = field(default_factory=list)
    stopped: bool = False
    broken: BaseException | None = None

    def __post_init__(self) -> None:
        self.done = self.store.finished() & {s.key for s in self.drawn}
        self.resumed = len(self.done)
        self.due = deque(self.enough.looks(len(self.drawn)) if self.enough else ())
        self.idle_since = 0.0  # when a worker was last seen working, or the run began
        self.seen = 0  # how far the order is finished without a gap
        self.look()

    def complete(self) -> bool:
        """Whether nothing is left to do."""
        return self.stopped or len(self.done) + len(self.aside) == len(self.drawn)

    def look(self) -> None:
        """Ask the rule, if it is due.

        Only of the beginning of the order in which nothing is in flight: short texts are finished first,
        so all that is finished is no random sample.
        """
        while self.seen < len(self.drawn) and self.drawn[self.seen].key in self.done | self.aside:
            self.seen += 1
        while self.due and self.seen >= self.due[0] and not self.stopped:
            n = self.due.popleft()
            keys = {s.key for s in self.drawn[:n]} - self.aside
            rows = _rows(self.store, keys, self.drawn)
            sizes = Counter(s.stratum for s in self.drawn if s.key not in self.aside)
            estimate = self.enough.estimate(rows, sizes)
            self.looks.append((len(rows), estimate))
            if self.enough.satisfied(estimate):
                # What else is finished by now depends on the workers; the answer must not.
                self.stopped, self.done = True, {s.key for s in self.drawn[:n]} & self.done

    def drive(self, client: Client) -> None:
        """Send files and take in what was done. Raises Lost when the scheduler is."""
        self.done |= self.store.finished() & {s.key for s in self.drawn}  # by workers that we lost sight of
        waiting = deque(s for s in self.drawn if s.key not in self.done | self.aside)
        flying: dict[Future, Source] = {}
        with closing(self.bar(total=len(self.drawn), initial=len(self.done | self.aside), desc="measuring",
                              unit="file")) as progress:  # fmt: skip
            try:
                self.idle_since = time.monotonic()
                while (waiting or flying) and not self.stopped and self.broken is None:
                    self._fill(client, waiting, flying)
                    for future in self._ready(client, flying):
                        self._take(future, flying.pop(future), progress)
                    self.look()
            except (CommClosedError, CancelledError, OSError, TimeoutError) as err:
                raise Lost(f"{type(err).__name__}: {err}") from err
            finally:
                if flying and client.status == "running":
                    client.cancel(list(flying), force=True)
        if self.broken is not None:
            raise self.broken

    def _check(self, client: Client) -> None:
        """Break off when nobody has been able to work for `patience` seconds."""
        states = [w["status"] for w in client.scheduler_info(n_workers=-1)["workers"].values()]
        if "running" in states:
            self.idle_since = time.monotonic()
        elif time.monotonic() - self.idle_since > self.patience:
            self.broken = ClusterError(
                client.scheduler.address, "workers", expected="one at least that works",
                found=f"{len(states)}, all {' and '.join(sorted(set(states)))}" if states else "none",
                remedy=f"waited {self.patience:.0f} s. Start some (dask worker SCHEDULER:8786); paused ones "
                "have no memory left for a task: raise --memory-limit, or use fewer of them",
            )  # fmt: skip

    def _fill(self, client: Client, waiting: deque[Source], flying: dict[Future, Source]) -> None:
        wanted = max(1, AHEAD * sum(client.nthreads().values()))
        while waiting and len(flying) < wanted:
            source = waiting.popleft()
            future = client.submit(
                measure_one, source, self.plan, self.store, pure=False,
                key=f"measure-{source.key}-{self.store.plan[:8]}", retries=self.retries,
            )  # fmt: skip
            flying[future] = source

    def _ready(self, client: Client, flying: dict[Future, Source]) -> list[Future]:
        """Futures that have ended; none if nothing did for a while."""
        try:
            pause = min(POLL, self.patience)
            return list(wait(list(flying), timeout=pause, return_when="FIRST_COMPLETED").done)
        except TimeoutError:
            self._check(client)
            return []

    def _take(self, future: Future, source: Source, progress: tqdm) -> None:
        if future.status == "finished":
            self.done.add(source.key)
        elif future.status == "error":
            error = future.exception()
            told = (error.error, error.kind) if isinstance(error, UnreadFile) else None
            if isinstance(error, KilledWorker):
                told = (f"{source.file}: every worker that read it died ({error})", DEADLY)
            if told is None:  # the disk, the draft, or a bug: not this file's own fault
                self.broken = error
                return
            self.store.set_aside(source, *told)
            self.aside.add(source.key)
            progress.set_postfix_str(f"{len(self.aside)} set aside")
        else:
            raise Lost(f"a task is {future.status}")
        progress.update()


# ---- where ------------------------------------------------------------------------------------------


@contextmanager
def connect(scheduler: Client | str, patience: float = PATIENCE) -> Iterator[Client]:
    """A client of a scheduler.

    | scheduler | means |
    |---|---|
    | a client | as it is; stays open |
    | "local", "local:4" | processes on this machine, one per core or so many; gone afterwards |
    | "tcp://host:8786" | a scheduler that runs; its workers stay |

    Raises ClusterError if nobody answers within `patience` seconds, or the number is none.
    """
    if isinstance(scheduler, Client):
        yield scheduler
        return
    if scheduler.startswith(LOCAL):
        with local_cluster(_workers(scheduler)) as client:
            yield client
        return
    try:
        client = Client(scheduler, timeout=patience)
    except (OSError, TimeoutError) as err:
        raise ClusterError(
            scheduler, "scheduler", expected=f"an answer within {patience:.0f} s", found=str(err),
            remedy="start `dask scheduler` and its workers, or say scheduler='local:2'",
        ) from err  # fmt: skip
    try:
        yield client
    finally:
        client.close()


def _workers(scheduler: str) -> int:
    number = scheduler.removeprefix(LOCAL).removeprefix(":") or str(os.cpu_count() or 1)
    if not number.isdecimal() or int(number) < 1:
        raise ClusterError(
            scheduler, "workers", expected="local or local:N, N at least 1", found=repr(number),
            remedy="say how many processes: local:2",
        )  # fmt: skip
    return int(number)


@contextmanager
def local_cluster(workers: int, memory: str | float = "auto", **options) -> Iterator[Client]:
    """A client of worker processes on this machine, each with its share of the cores.

    Args:
        memory: that a worker may hold before Dask restarts it, as `LocalCluster` takes it.
        options: more of `LocalCluster`'s.
    """
    threads = str(max(1, torch.get_num_threads() // workers))
    env = {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
    settings = {
        "dashboard_address": "127.0.0.1:0", "memory_limit": memory,
        "silence_logs": logging.CRITICAL,  # what fails is in the result; the rest is no news to a reader
        **options,
    }  # fmt: skip
    with (
        dask.config.set({"distributed.nanny.pre-spawn-environ": env}),
        LocalCluster(n_workers=workers, threads_per_worker=1, processes=True, **settings) as cluster,
        Client(cluster) as client,
    ):
        yield client
