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
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from uuid import uuid4

import pandas as pd
import torch
from distributed import CancelledError, Client, Future, KilledWorker, LocalCluster, get_worker, wait
from distributed.comm import CommClosedError
from tqdm import tqdm

from lib.errors import ClusterError
from lib.evaluate import DEADLY, Plan, Tools, Totals, evaluate_file, finished, merge, part_file
from lib.norms import TapNorms, merge_norms
from lib.partitions import Source, Store, bucket, to_row
from lib.parts import Part, file_key
from lib.places import UnreadFile, is_remote, local_copy, local_path
from lib.sampling import Enough, Estimate, drawing_order

RETRIES = 2  # more tries of a file that cannot be read: it may be on its way, or the network was
PAUSE = 1.0  # seconds before the first of them; twice as long before each next one
AHEAD = 3  # tasks that a worker's thread has at hand, so that it never waits and a scheduler never drowns
PATIENCE = 300.0  # seconds that a scheduler, or every worker, may be away
VAIN = 5  # times that a scheduler may be lost without one file in between
POLL = 10.0  # seconds after which a silent cluster is looked at
LOCAL = "local"  # scheduler="local:4": four processes on this machine
Bar = Callable[..., tqdm]


# ---- one task ---------------------------------------------------------------------------------------


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
    began, scratch = time.perf_counter(), _scratch()
    with local_copy(source.file, scratch) as path, local_copy(source.final, scratch) as final:
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


def _scratch() -> str | None:
    """The worker's own folder, which Dask removes after a crash too; None for the system's."""
    try:
        return get_worker().local_directory
    except ValueError:
        return None


# ---- the driver -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Measured:
    """What there is of some files after a run.

    Attributes:
        sources: all files asked for, in the order in which they were drawn.
        finished: keys with a row; resumed: how many of them were there before this run.
        failed: the files set aside, with their errors (see `Store.failed`). Of a run that a rule stopped,
            `finished` and `failed` are of the files that the rule looked at.
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

    def parts(self, of: Sequence[Source] | None = None) -> list[Part]:
        """Parts of the sources, or of some, in their order, failed ones too; all of them in memory."""
        why = self.failed.set_index("key")
        found = []
        for s in self.sources if of is None else of:
            if s.key in self.finished:
                # An earlier run may have named the file by another path.
                found += [replace(p, file=s.file) for p in self.store.parts([s.key])]
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
    places = {n: local_path(p) for n in ("draft", "target", "loss_masks") if (p := getattr(plan, n))}
    plan = replace(plan, **places)
    fingerprint = _checked(plan)
    store = Store(str(out) if is_remote(out) else local_path(str(out)), fingerprint, whole)
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
                given = isinstance(scheduler, str) and _workers(scheduler) is None
                if not given or in_vain == VAIN:
                    raise ClusterError(
                        "scheduler", "connection", expected="a scheduler that answers", found=str(err),
                        remedy="connect again and call measure() again: finished files are kept",
                    ) from err  # fmt: skip
    keys = {s.key for s in drawn[: run.end]}
    return Measured(
        store, drawn, frozenset(run.done & keys), run.resumed, store.failed(keys - run.done),
        tuple(run.looks), time.perf_counter() - began,
    )  # fmt: skip


_sound: set[str] = set()


def _checked(plan: Plan) -> str:
    """The plan's fingerprint. What is wrong with its draft is said here, once, and not by every worker."""
    if (found := plan.fingerprint()) not in _sound:
        # This machine may lack the workers' device.
        found = Tools(replace(plan, device="cpu")).with_plan(plan).fingerprint
        _sound.add(found)
    return found


def fill(
    pairs: Sequence[tuple[Path, Path | None]], tools: Tools, work: Path, scheduler: Client | str
) -> None:
    """Measure on a cluster what `lib.evaluate.evaluate_all` would, so that it finds every part finished."""
    todo = []
    for path, final in pairs:
        part = Part.load(part_file(path, final, tools, work))
        if not finished(part, tools.fingerprint, deadly=False):
            files = [local_path(str(p)) if p else "" for p in (path, final)]
            todo.append(Source(*files, file_key(path, final)))
    if not todo:
        return
    found = measure(todo, tools.plan, (work / "cluster").resolve(), scheduler, whole=True)
    of = {s.file: s.final for s in todo}
    for part in found.parts():
        final = of[part.file]
        part = replace(part, plan=tools.fingerprint)  # that of the same plan with absolute paths
        part.save(part_file(Path(part.file), Path(final) if final else None, tools, work))


def _rows(
    store: Store, keys: Collection[str], sources: Sequence[Source], columns: list[str] | None = None
) -> pd.DataFrame:
    """Rows of these keys, with today's strata and paths: an earlier run may have had others."""
    rows = store.rows(keys, columns)
    if "key" in rows:
        for name in {"file", "stratum"} & set(rows):
            rows[name] = rows["key"].map({s.key: getattr(s, name) for s in sources})
    return rows


class Lost(Exception):
    """The scheduler does not answer, or forgot what it was asked."""


@contextmanager
def _asking() -> Iterator[None]:
    """What Dask raises when the scheduler is gone, as Lost."""
    try:
        yield
    except (CommClosedError, CancelledError, OSError, TimeoutError) as err:
        raise Lost(f"{type(err).__name__}: {err}") from err


@dataclass
class _Run:
    """One call of `measure`: what is done, set aside and still to send.

    Attributes:
        later: files to try again, each with the time from which on.
        suspects: files in whose reader's hands, or queue, workers died: each is tried with nothing beside it.
        end: files of the order that count; fewer than all once a rule has stopped the run.
    """

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
    tries: Counter[str] = field(default_factory=Counter)
    later: list[tuple[float, Source]] = field(default_factory=list)
    suspects: deque[Source] = field(default_factory=deque)
    alone: set[str] = field(default_factory=set)
    stopped: bool = False
    broken: BaseException | None = None

    def __post_init__(self) -> None:
        self.done = self.store.finished() & {s.key for s in self.drawn}
        self.resumed = len(self.done)
        self.end = len(self.drawn)
        self.due = deque(self.enough.looks(self.end) if self.enough else ())
        self.idle_since = 0.0  # when a worker was last seen working, or the run began
        self.seen = 0  # how far the order is finished without a gap
        self.look()

    def complete(self) -> bool:
        """Whether nothing is left to do."""
        return self.stopped or len(self.done | self.aside) == len(self.drawn)

    def look(self) -> None:
        """Ask the rule, if it is due.

        Only of the beginning of the order in which nothing is in flight: short texts are finished first,
        so all that is finished is no random sample.
        """
        while self.due and not self.stopped:
            while self.seen < self.due[0] and self._settled(self.drawn[self.seen]):
                self.seen += 1
            if self.seen < self.due[0]:
                return
            n = self.due.popleft()
            gone = {s.key for s in self.drawn[:n]} & self.aside
            rows = _rows(self.store, {s.key for s in self.drawn[:n]} - gone, self.drawn)
            estimate = self.enough.estimate(rows, Counter(s.stratum for s in self.drawn if s.key not in gone))
            self.looks.append((len(rows), estimate))
            if self.enough.satisfied(estimate):
                # What else is finished by now depends on the workers; the answer must not.
                self.stopped, self.end = True, n

    def _settled(self, source: Source) -> bool:
        return source.key in self.done or source.key in self.aside

    def drive(self, client: Client) -> None:
        """Send files and take in what was done. Raises Lost when the scheduler is."""
        self.done |= self.store.finished() & {s.key for s in self.drawn}  # by workers that we lost sight of
        self.aside -= self.done
        waiting = deque(s for s in self.drawn if not self._settled(s))
        self.later, self.suspects, self.idle_since = [], deque(), time.monotonic()
        flying: dict[Future, Source] = {}
        with closing(self.bar(total=len(self.drawn), initial=len(self.done | self.aside), desc="measuring",
                              unit="file")) as progress:  # fmt: skip
            try:
                while (waiting or flying or self.later or self.suspects) and not self.stopped:
                    with _asking():
                        self._fill(client, waiting, flying)
                        ready = self._ready(client, flying)
                    for future in ready:
                        self._take(future, flying.pop(future), progress)
                    self.look()
                    if self.broken is not None:
                        raise self.broken
            finally:
                if flying and client.status == "running":
                    client.cancel(list(flying))

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
        now = time.monotonic()
        waiting.extend(s for when, s in self.later if when <= now)
        self.later = [(when, s) for when, s in self.later if when > now]
        wanted = max(1, AHEAD * sum(client.nthreads().values()))
        while waiting and len(flying) < wanted:
            source = waiting.popleft()
            flying[self._send(client, source)] = source
        if self.suspects and not (waiting or flying or self.later):
            source = self.suspects.popleft()
            self.alone.add(source.key)
            flying[self._send(client, source)] = source

    def _send(self, client: Client, source: Source) -> Future:
        # A key of its own for every try: Dask would answer an old one with what it remembers, an error too.
        key = f"measure-{source.key}-{uuid4().hex[:8]}"
        return client.submit(measure_one, source, self.plan, self.store, pure=False, key=key)

    def _ready(self, client: Client, flying: dict[Future, Source]) -> list[Future]:
        """Futures that have ended; none if nothing did for a while."""
        pause = min(POLL, self.patience)
        if self.later:
            pause = min(pause, max(0.0, min(when for when, _ in self.later) - time.monotonic()) + 0.01)
        if not flying:
            time.sleep(pause)
            return []
        try:
            ended = list(wait(list(flying), timeout=pause, return_when="FIRST_COMPLETED").done)
        except TimeoutError:
            self._check(client)
            return []
        self.idle_since = time.monotonic()
        return ended

    def _take(self, future: Future, source: Source, progress: tqdm) -> None:
        with _asking():
            status, error = future.status, future.exception() if future.status == "error" else None
        if status == "finished":
            self.done.add(source.key)
            progress.update()
        elif status != "error":
            raise Lost(f"a task is {status}")
        elif isinstance(error, UnreadFile):
            self.tries[source.key] += 1
            if (n := self.tries[source.key]) <= self.retries:
                self.later.append((time.monotonic() + PAUSE * 2 ** min(n - 1, 5), source))
            else:
                self._set_aside(source, error.error, error.kind, progress)
        elif isinstance(error, KilledWorker) and source.key not in self.alone:
            self.suspects.append(source)  # the file, or one that the dead workers had beside it
        elif isinstance(error, KilledWorker):
            said = f"{source.file}: every worker that read it died, with nothing beside it ({error})"
            self._set_aside(source, said, DEADLY, progress)
        else:  # the disk, the draft, or a bug: not this file's own fault
            self.broken = error

    def _set_aside(self, source: Source, error: str, kind: str, progress: tqdm) -> None:
        self.store.set_aside(source, error, kind)
        self.aside.add(source.key)
        progress.set_postfix_str(f"{len(self.aside)} set aside")
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
    if (workers := _workers(scheduler)) is not None:
        with local_cluster(workers) as client:
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


def _workers(scheduler: str) -> int | None:
    """Processes that "local" or "local:N" asks for; None for an address."""
    if scheduler.split(":")[0] != LOCAL:
        return None
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
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
    before = {name: os.environ.get(name) for name in names}
    os.environ |= dict.fromkeys(names, threads)  # a nanny starts workers with this process's environment
    settings = {
        "dashboard_address": "127.0.0.1:0", "memory_limit": memory,
        "silence_logs": logging.CRITICAL,  # what fails is in the result; the rest is no news to a reader
        **options,
    }  # fmt: skip
    try:
        with (
            LocalCluster(n_workers=workers, threads_per_worker=1, processes=True, **settings) as cluster,
            Client(cluster) as client,
        ):
            yield client
    finally:
        os.environ |= {name: value for name, value in before.items() if value is not None}
        for name in (n for n, value in before.items() if value is None):
            os.environ.pop(name, None)
