"""lib/cluster.py against one process, with real processes that die, disks that fill and files that kill."""

from __future__ import annotations

import functools
import gzip
import http.server
import io
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from dataclasses import replace
from itertools import permutations
from pathlib import Path

import dask
import pytest
import torch
from safetensors.torch import save_file
from tqdm import tqdm

from lib import cluster, places
from lib.captures import capture_files
from lib.cluster_view import Accident, Eventful
from lib.errors import CaptureError, CheckpointError, ClusterError, ReportError
from lib.evaluate import DEADLY, Plan, Tools, Totals, evaluate_all, merge, part_file
from lib.norms import PARTS
from lib.parts import SUMS, Part
from lib.sampling import Enough
from tests.capture_writers import WRITERS, native
from tests.support import HIDDEN, VOCAB, random_capture_tensors, speculators_draft, tiny_llama, write_legacy

ROOT = Path(__file__).resolve().parents[1]
TAPS = ("embed", "layer3", "layer4")
FILES, SOME, POISONS = 500, 150, 10
quiet = functools.partial(tqdm, disable=True)
pytestmark = pytest.mark.slow


# ---- files ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A tiny draft and target, and 500 captures in every layout that we read, of 8 to 90 tokens."""
    place = tmp_path_factory.mktemp("cluster")
    rng = torch.Generator().manual_seed(11)
    speculators_draft().save_pretrained(place / "draft")
    tiny_llama().save_pretrained(place / "target")
    for i in range(FILES):
        writer = list(WRITERS.values())[i % len(WRITERS)]
        writer.write(place / "captures" / f"{i % 4}" / writer.write.__name__, native(rng, 8 + i * 7 % 83), i)
    return place


def plan_of(folder: Path, **changes) -> Plan:
    values = {
        "draft": str(folder / "draft"), "target": str(folder / "target"), "depth": 3,
        "names": (TAPS, (*TAPS, "layer6")), "wirings": (TAPS,), "candidates": tuple(permutations(TAPS)),
    }  # fmt: skip
    return Plan(**(values | changes))


@pytest.fixture(scope="module")
def sources(folder) -> list[cluster.Source]:
    found = places.sources(str(folder / "captures"))
    assert len(found) == FILES
    return found


@pytest.fixture(scope="module")
def alone(folder, sources, tmp_path_factory) -> Totals:
    """The same files in this one process."""
    work = tmp_path_factory.mktemp("alone")
    totals = merge(evaluate_all([(Path(s.file), None) for s in sources], Tools(plan_of(folder)), work))
    assert len({p.layout for p in totals.parts}) >= 5, "not mixed"
    return totals


@pytest.fixture(scope="module")
def some(sources) -> list[cluster.Source]:
    """The first of them, for runs that are broken off."""
    return sources[:SOME]


@pytest.fixture(scope="module")
def some_alone(alone) -> Totals:
    """What one process says of those."""
    return merge(alone.parts[:SOME])


def same(found: cluster.Measured, alone: Totals) -> None:
    """Counts equal; sums of floats within 1e-9; quantiles within the sketch's 1 % of rank."""
    assert len(found.finished) == len(alone.parts) and found.failed.empty
    totals = found.totals()
    assert [p.file for p in totals.parts] == [p.file for p in alone.parts]
    for a, b in zip(totals.parts, alone.parts, strict=True):
        assert (a.count, a.scored, a.tokens) == (b.count, b.scored, b.tokens)
        assert torch.equal(a.hits, b.hits) and torch.equal(a.rollouts[0].sums, b.rollouts[0].sums)
        assert torch.allclose(a.scores, b.scores, rtol=1e-5)  # a worker has another number of threads
    norms = found.norms()
    assert norms.keys() == alone.norms.keys()
    for tap, one in alone.norms.items():
        for name in PARTS:
            a, b = norms[tap].parts[name], one.parts[name]
            assert (a.count, a.low, a.high) == (b.count, b.low, b.high)
            if a.count:
                assert a.mean == pytest.approx(b.mean, rel=1e-9) and a.std == pytest.approx(b.std, rel=1e-6)
            for q in (0.1, 0.5, 0.9) if a.count > 1 else ():
                assert b.quantile(q - 0.02) <= a.quantile(q) <= b.quantile(q + 0.02)


def breaking(at: int, do) -> functools.partial:
    """A silent progress bar that does something when `at` files are through."""
    return functools.partial(Eventful, at=at, do=do, file=io.StringIO())


def rows_on_disk(store: cluster.Store) -> dict[str, int]:
    """Row -> the time at which it was written."""
    return {p.stem: p.stat().st_mtime_ns for p in Path(store.folder).rglob("*.parquet")}


# ---- the same answer --------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [2, 4])
def test_many_processes_equal_one(folder, sources, alone, tmp_path, workers):
    with cluster.local_cluster(workers) as client:
        assert client.dashboard_link.startswith("http://127.0.0.1:")
        found = cluster.measure(sources, plan_of(folder), tmp_path, client, bar=quiet)
        assert set(found.rows(["worker"])["worker"]) == {str(i) for i in range(workers)}
        merged = found.norms(client)
    same(found, alone)
    assert {t: n.parts["all"].mean for t, n in merged.items()} == {
        t: n.parts["all"].mean for t, n in found.norms().items()
    }, "merging on workers moved a digit"
    sums = found.rows([*SUMS])
    for name in SUMS:
        assert sum(w[0][0] for w in sums[name]) == int(alone.sums(0, name)[:, 0].sum())
    hits, known = (int(alone.sums(0, n)[:, 0].sum()) for n in ("in_vocab_hits", "in_vocab"))
    e = found.estimate("accuracy")
    assert e.value == pytest.approx(hits / known) and e.half_width == pytest.approx(0)
    before = rows_on_disk(found.store)
    again = cluster.measure(sources, plan_of(folder), tmp_path, "local:1", bar=quiet)
    assert again.resumed == FILES and rows_on_disk(again.store) == before


def test_a_report_by_a_cluster_is_the_report(folder, tmp_path):
    """`report.build` with a scheduler: every number is that of one process."""
    from lib.report import build
    from lib.request import Request

    rng = torch.Generator().manual_seed(5)
    (tmp_path / "captures").mkdir()
    for i in range(12):
        write_legacy(tmp_path / "captures" / f"data_{i}.pt", random_capture_tensors(20 + i, rng))
    asked = {"captures": str(tmp_path / "captures"), "taps": ",".join((*TAPS, "layer6")), "depth": 3}
    models = {n: str(folder / n) for n in ("draft", "target")}
    one, many = (
        build(Request(**models, **asked, out=str(tmp_path / name)), scheduler=scheduler).data
        for name, scheduler in (("one", ""), ("many", "local:2"))
    )
    for key in one.keys() - {"request", "seconds", "made", "created"}:
        if json.dumps(one[key]) != json.dumps(many[key]):
            assert approximately(one[key], many[key]), key


def approximately(a, b) -> bool:
    """Equal but for rounding in the last digits."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(approximately(a[k], b[k]) for k in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(approximately, a, b))
    return a == pytest.approx(b, rel=1e-5, nan_ok=True) if isinstance(a, float) else a == b


# ---- what dies --------------------------------------------------------------------------------------


def test_a_killed_worker_costs_its_file_in_flight(folder, some, some_alone, tmp_path):
    """SIGKILL in the middle: nothing is lost, and what had been written is not written again."""
    with cluster.local_cluster(2) as client:
        accident = Accident(client, tmp_path)
        found = cluster.measure(some, plan_of(folder), tmp_path, client, bar=breaking(50, accident))
        assert accident.pid and accident.pid not in client.run(os.getpid).values()
    same(found, some_alone)
    assert 50 <= len(accident.rows) < SOME
    assert accident.written_again() == 0


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class Cluster:
    """A scheduler and two workers, each a process of Dask's own command line."""

    def __init__(self, log: Path) -> None:
        self.port, self.log, self.running = free_port(), log, []

    @property
    def address(self) -> str:
        """Of the scheduler."""
        return f"tcp://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Scheduler first; workers wait for it."""
        self._run("scheduler", "--host", "127.0.0.1", "--port", str(self.port), "--no-dashboard")
        self._run("worker", self.address, "--nworkers", "2", "--nthreads", "1", "--no-dashboard",
                  "--death-timeout", "60", "--local-directory", str(self.log.parent / "scratch"))  # fmt: skip

    def _run(self, *arguments: str) -> None:
        env = os.environ | {"OMP_NUM_THREADS": "1"}
        with self.log.open("a") as out:
            self.running.append(
                subprocess.Popen(
                    [sys.executable, "-m", "dask", *arguments],
                    stdout=out, stderr=out, env=env, start_new_session=True,
                )
            )  # fmt: skip

    def kill(self) -> None:
        """Everything, as a machine that goes down."""
        for process in self.running:
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            process.wait()
        self.running = []


def test_a_scheduler_that_restarts_is_waited_for(folder, some, some_alone, tmp_path):
    """Scheduler and workers are killed in the middle and started again at the same address."""
    there, seen = Cluster(tmp_path / "log"), {}

    def restart() -> None:
        seen.update(rows_on_disk(store))
        there.kill()
        there.start()

    store = cluster.Store(str(tmp_path / "out"), Tools(plan_of(folder)).fingerprint)
    there.start()
    try:
        found = cluster.measure(
            some, plan_of(folder), tmp_path / "out", there.address, patience=60,
            bar=breaking(50, restart),
        )  # fmt: skip
    finally:
        there.kill()
    same(found, some_alone)
    after = rows_on_disk(store)
    assert 50 <= len(seen) < SOME and all(after[key] == when for key, when in seen.items())


def test_a_scheduler_that_stays_away_is_an_error_and_loses_nothing(folder, some, some_alone, tmp_path):
    there = Cluster(tmp_path / "log")
    there.start()
    try:
        with pytest.raises(ClusterError, match="scheduler"):
            cluster.measure(
                some, plan_of(folder), tmp_path / "out", there.address, patience=5,
                bar=breaking(60, there.kill),
            )  # fmt: skip
    finally:
        there.kill()
    found = cluster.measure(some, plan_of(folder), tmp_path / "out", "local:2", bar=quiet)
    assert 60 <= found.resumed < SOME
    same(found, some_alone)


def test_a_killed_driver_goes_on_where_it_was(folder, some, some_alone, tmp_path):
    """The process that drives is killed with everything it started; another run counts nothing twice."""
    out = tmp_path / "out"
    program = (
        "from pathlib import Path\nfrom lib import cluster, places\nfrom tests.test_cluster import plan_of\n"
        "if __name__ == '__main__':\n"
        f"    folder = Path({str(folder)!r})\n"
        f"    cluster.measure(places.sources(str(folder / 'captures'))[:{SOME}], plan_of(folder), "
        f"{str(out)!r}, 'local:2')\n"
    )
    (tmp_path / "driver.py").write_text(program)
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    with (tmp_path / "log").open("w") as log:
        driver = subprocess.Popen(
            [sys.executable, str(tmp_path / "driver.py")], env=env, stdout=log, stderr=log, cwd=ROOT,
            start_new_session=True,
        )  # fmt: skip
    store = cluster.Store(str(out), Tools(plan_of(folder)).fingerprint)
    wait_until(lambda: len(rows_on_disk(store)) > 60, driver)
    os.killpg(driver.pid, signal.SIGKILL)
    driver.wait()
    seen = rows_on_disk(store)
    found = cluster.measure(some, plan_of(folder), out, "local:2", bar=quiet)
    assert found.resumed >= len(seen)
    same(found, some_alone)
    after = rows_on_disk(store)
    assert all(after[key] == when for key, when in seen.items())


def wait_until(ready, process: subprocess.Popen, seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not ready():
        assert process.poll() is None, "it ended before it was killed"
        assert time.monotonic() < end, "too slow"
        time.sleep(0.05)


FULL_DISK = """
import functools, json, subprocess, sys
from pathlib import Path
from tqdm import tqdm
from lib import cluster, places
from lib.errors import ReportError
from tests.test_cluster import plan_of, rows_on_disk

if __name__ == "__main__":
    folder, disk = Path(sys.argv[1]), Path(sys.argv[2])
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)], check=True)
    sources, told = places.sources(str(folder / "captures")), {}
    quiet = functools.partial(tqdm, disable=True)
    try:
        cluster.measure(sources, plan_of(folder), disk / "out", "local:2", bar=quiet)
    except ReportError as err:
        told["error"] = str(err)
    (run,) = (disk / "out").iterdir()
    told["rows"] = len(list(run.rglob("b*/*.parquet")))
    told["failed"] = len(list(run.glob("failed/*")))
    subprocess.run(["mount", "-o", "remount,size=64m", str(disk)], check=True)
    found = cluster.measure(sources, plan_of(folder), disk / "out", "local:2", bar=quiet)
    told |= {"resumed": found.resumed, "finished": len(found.finished), "aside": len(found.failed)}
    told["accuracy"] = found.estimate("accuracy").value
    told["unfinished"] = len(list(Path(found.store.folder).rglob(".*")))
    print(json.dumps(told))
"""


def own_mounts() -> list[str] | None:
    """The command that gives a process mounts of its own; None where the system forbids it."""
    for command in (["unshare", "--mount"], ["unshare", "--mount", "--map-root-user"]):
        try:
            mount = [*command, "mount", "-t", "tmpfs", "tmpfs", "/mnt"]
            if subprocess.run(mount, capture_output=True).returncode == 0:
                return command
        except FileNotFoundError:
            return None
    return None


@pytest.mark.skipif(own_mounts() is None, reason="this system lets no process mount a small disk of its own")
def test_a_full_disk_stops_with_an_error_and_goes_on_when_there_is_room(folder, alone, tmp_path):
    """A disk of 1 MB: whole rows only, nobody blamed but the disk, and nothing lost."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "run.py").write_text(FULL_DISK)
    done = subprocess.run(
        [*own_mounts(), sys.executable, str(tmp_path / "run.py"), str(folder), str(tmp_path / "disk")],
        capture_output=True, text=True, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    told = json.loads(done.stdout.splitlines()[-1])
    assert "No space left" in told["error"] and "make room" in told["error"]
    assert 10 < told["rows"] < FILES and told["failed"] == 0
    assert told["resumed"] >= told["rows"]
    assert (told["finished"], told["aside"], told["unfinished"]) == (FILES, 0, 0)
    hits, known = (int(alone.sums(0, n)[:, 0].sum()) for n in ("in_vocab_hits", "in_vocab"))
    assert told["accuracy"] == pytest.approx(hits / known)


# ---- files that cannot be read ----------------------------------------------------------------------


def poisons(folder: Path, rng) -> dict[str, str]:
    """Ten files that no capture can be read from: name -> what the error must say."""
    folder.mkdir(parents=True)
    tensors = random_capture_tensors(30, rng)
    whole = write_legacy(folder / "whole.pt", tensors).read_bytes()
    (folder / "whole.pt").unlink()
    (folder / "data_1.pt").write_bytes(whole[: len(whole) // 2])
    (folder / "data_2.pt").write_bytes(b"")
    (folder / "data_3.pt").write_bytes(os.urandom(5000))
    write_legacy(folder / "data_4.pt", {**tensors, "input_ids": tensors["input_ids"] + 10 * VOCAB})
    states = [s.clone() for s in tensors["hidden_states"]]
    states[1][3] = float("nan")
    write_legacy(folder / "data_5.pt", {**tensors, "hidden_states": states})
    write_legacy(folder / "data_6.pt", {**tensors, "hidden_states": tensors["hidden_states"][:2]})
    write_legacy(folder / "data_7.pt", {**tensors, "surprise": torch.zeros(3)})
    save_file({"hidden_states": torch.zeros(4, 4, HIDDEN)}, folder / "hs_8.safetensors")
    (folder / "data_9.ckpt.gz").write_bytes(gzip.compress(b"not a checkpoint"))
    (folder / "data_10.pt").symlink_to(folder / "gone.pt")
    return {f.name: "" for f in folder.iterdir()}


def test_ten_poison_files_are_set_aside_with_their_errors(folder, some, some_alone, tmp_path, rng):
    bad = poisons(tmp_path / "bad", rng)
    assert len(bad) == POISONS
    files = [*some, *places.sources(str(tmp_path / "bad"))]
    assert len(files) == SOME + POISONS
    found = cluster.measure(files, plan_of(folder), tmp_path / "out", "local:2", bar=quiet)
    assert {Path(f).name for f in found.failed["file"]} == set(bad)
    assert all(len(e) > 30 for e in found.failed["error"])
    kinds = Counter(found.failed["error_kind"])
    assert kinds["CaptureError"] >= 7, kinds
    assert len(found.finished) == SOME
    assert sum(p.error != "" for p in found.parts()) == POISONS
    hits, known = (int(some_alone.sums(0, n)[:, 0].sum()) for n in ("in_vocab_hits", "in_vocab"))
    assert found.estimate("accuracy").value == pytest.approx(hits / known)
    # One is mended: the next run reads that one, and tells of the others again.
    write_legacy(tmp_path / "bad" / "gone.pt", random_capture_tensors(30, rng))
    files = [*some, *(s for s in places.sources(str(tmp_path / "bad")) if not s.file.endswith("gone.pt"))]
    again = cluster.measure(files, plan_of(folder), tmp_path / "out", "local:2", bar=quiet)
    assert (again.resumed, len(again.finished), len(again.failed)) == (SOME, SOME + 1, POISONS - 1)


def test_a_file_that_comes_later_is_read_by_a_retry(folder, tmp_path, rng):
    """A capture that is still being written: the first tries fail, a later one reads it."""
    tensors = random_capture_tensors(30, rng)
    whole = write_legacy(tmp_path / "whole.pt", tensors).read_bytes()
    (tmp_path / "in").mkdir()
    late = tmp_path / "in" / "data_0.pt"
    late.write_bytes(whole[:100])
    (source,) = places.sources(str(tmp_path / "in"))
    with cluster.local_cluster(1) as client:
        timer = threading.Timer(2.0, late.write_bytes, [whole])
        timer.start()
        found = cluster.measure([source], plan_of(folder), tmp_path / "out", client, retries=3, bar=quiet)
    assert len(found.finished) == 1 and found.failed.empty


def test_a_file_that_kills_its_reader_is_set_aside(folder, some, tmp_path):
    """A text of two million tokens, a gigabyte, on workers of 800 MB: the nanny kills two, and no more."""
    place = tmp_path / "huge"
    place.mkdir()
    tokens = 2_000_000
    states = torch.ones(tokens, 4, HIDDEN)
    ids = torch.zeros(tokens, dtype=torch.int64)
    save_file({"hidden_states": states, "token_ids": ids}, place / "hs_0.safetensors")
    del states
    files = [*places.sources(str(place)), *some[:40]]
    plan = Plan("", names=(TAPS, (*TAPS, "layer6")), metrics=False)
    with (
        dask.config.set({"distributed.scheduler.allowed-failures": 1}),
        cluster.local_cluster(2, memory="800MB") as client,
    ):
        found = cluster.measure(files, plan, tmp_path / "out", client, bar=quiet)
    assert len(found.finished) == 40
    assert found.failed["error_kind"].tolist() == [DEADLY], found.failed.to_string()
    assert "hs_0.safetensors" in found.failed["error"][0]


# ---- memory, memory of what was drawn, places --------------------------------------------------------


def high_water() -> int:
    """Bytes that this process held at most."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="VmHWM is Linux's")
def test_a_worker_holds_one_file_however_many_there_are(folder, tmp_path):
    """After 60 captures of 2 MB the peak grows by less than a third of the 280 MB that follow."""
    rng = torch.Generator().manual_seed(4)
    (tmp_path / "in").mkdir()
    for i in range(200):
        write_legacy(tmp_path / "in" / f"data_{i}.pt", random_capture_tensors(4000, rng, 4))
    files = places.sources(str(tmp_path / "in"))
    size = sum(Path(s.file).stat().st_size for s in files[60:])
    plan = plan_of(folder, candidates=(), metrics=False, depth=1)
    with cluster.local_cluster(1) as client:
        cluster.measure(files[:60], plan, tmp_path / "out", client, bar=quiet)
        (early,) = client.run(high_water).values()
        found = cluster.measure(files, plan, tmp_path / "out", client, bar=quiet)
        (late,) = client.run(high_water).values()
    assert len(found.finished) == 200 and found.resumed == 60
    assert size > 280e6
    assert late - early < size / 3, (early, late)


def test_the_sample_does_not_depend_on_the_workers(folder, sources, alone, tmp_path):
    """Stopped by the rule: the same files count with one worker and with three, and the truth is inside."""
    rule = Enough("norm layer3", half_width=1.0, first=20)
    runs = [
        cluster.measure(sources, plan_of(folder), tmp_path / f"{n}", f"local:{n}", enough=rule, bar=quiet)
        for n in (1, 3)
    ]
    assert runs[0].finished == runs[1].finished and runs[0].looks == runs[1].looks
    last = runs[0].looks[-1][1]
    assert len(runs[0].finished) < FILES / 2 and last.half_width <= 1.0
    assert len(runs[0].looks) > 1, "it stopped at the first look: no rule was tried"
    assert last.low <= alone.norms["layer3"].parts["all"].mean <= last.high
    everything = cluster.measure(sources, plan_of(folder), tmp_path / "1", "local:2", bar=quiet)
    assert everything.resumed >= len(runs[0].finished)
    same(everything, alone)


def test_captures_by_url(folder, tmp_path, rng):
    """Over HTTP, as from an object store: the same numbers as from the disk."""
    (tmp_path / "in").mkdir()
    for i in range(6):
        write_legacy(tmp_path / "in" / f"data_{i}.pt", random_capture_tensors(25 + i, rng))
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(tmp_path / "in"))
    handler.log_message = lambda *_: None
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/"
        far = places.sources(url)
        assert [s.file for s in far] == [f"{url}data_{i}.pt" for i in range(6)]
        found = cluster.measure(far, plan_of(folder), tmp_path / "far", "local:1", bar=quiet)
        gone = [*far, cluster.Source(f"{url}data_9.pt", key="0" * 16)]
        less = cluster.measure(gone, plan_of(folder), tmp_path / "far", "local:1", bar=quiet)
        server.shutdown()
    near = cluster.measure(
        places.sources(str(tmp_path / "in")), plan_of(folder), tmp_path / "near", "local:1", bar=quiet
    )
    for a, b in zip(found.parts(), near.parts(), strict=True):
        assert a.tokens == b.tokens and torch.equal(a.rollouts[0].sums, b.rollouts[0].sums)
    assert less.failed["file"].tolist() == [f"{url}data_9.pt"]


# ---- what is refused --------------------------------------------------------------------------------


def test_a_worker_with_other_files_refuses(folder, sources, tmp_path):
    """A draft that changed behind the driver's back, or lies differently there."""
    store = cluster.Store(str(tmp_path), "0" * 64)
    with pytest.raises(ClusterError, match="rsync -t"):
        cluster.measure_one(sources[0], plan_of(folder), store)
    assert not store.finished()


def test_a_broken_draft_is_said_by_the_driver(folder, sources, tmp_path):
    with pytest.raises(CheckpointError):
        cluster.measure(sources, plan_of(folder, draft=str(tmp_path)), tmp_path / "out", "local:1", bar=quiet)


def test_nobody_there_is_an_error(folder, sources, tmp_path):
    with pytest.raises(ClusterError, match="an answer within 2 s"):
        cluster.measure(
            sources, plan_of(folder), tmp_path, f"tcp://127.0.0.1:{free_port()}", patience=2, bar=quiet
        )
    with cluster.local_cluster(1) as client:
        client.cluster.scale(0)
        wait_for = time.monotonic() + 30
        while client.nthreads() and time.monotonic() < wait_for:
            time.sleep(0.1)
        with pytest.raises(ClusterError, match=r"found none.*waited 2 s"):
            cluster.measure(sources, plan_of(folder), tmp_path, client, patience=2, bar=quiet)


def test_workers_that_are_all_paused_are_an_error(folder, sources, tmp_path):
    """Too little memory for what they have loaded: Dask would let everybody wait for ever."""
    config = {"distributed.worker.memory.pause": 0.01, "distributed.worker.memory.terminate": False}
    with (
        dask.config.set(config),
        cluster.local_cluster(1, memory="2GB") as client,
        pytest.raises(ClusterError, match="1, all paused"),
    ):
        cluster.measure(sources, plan_of(folder), tmp_path, client, patience=3, bar=quiet)


@pytest.mark.parametrize("name", ["local:0", "local:x", "local:-1"])
def test_a_number_of_workers_that_is_none(name):
    with pytest.raises(ClusterError, match="local:N"), cluster.connect(name):
        pass


def test_sources(folder, tmp_path, rng):
    """Strata are folders; final states go by name; a file twice, or without its partner, is refused."""
    listed = capture_files(folder / "captures").files
    found = places.sources(str(folder / "captures"))
    assert [s.file for s in found] == list(map(str, listed))
    assert {Path(s.stratum).relative_to(folder / "captures").parts[0] for s in found} == set("0123")
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        write_legacy(tmp_path / name / "data_0.pt", random_capture_tensors(9, rng))
    (pair,) = places.sources(str(tmp_path / "a"), str(tmp_path / "b"), stratum=lambda f: "one")
    assert pair.final == str(tmp_path / "b" / "data_0.pt") and pair.stratum == "one"
    write_legacy(tmp_path / "a" / "data_1.pt", random_capture_tensors(9, rng))
    with pytest.raises(ReportError, match=r"none for data_1\.pt"):
        places.sources(str(tmp_path / "a"), str(tmp_path / "b"))
    with pytest.raises(ClusterError, match="each file once"):
        cluster.measure([pair, pair], plan_of(folder), tmp_path / "out", "local:1", bar=quiet)
    with pytest.raises(CaptureError):
        places.sources(str(tmp_path / "nowhere"))


def test_an_unwritable_place_is_an_error(folder, sources, tmp_path):
    (tmp_path / "out").write_text("a file")
    with pytest.raises(ReportError, match="a place that can be written"):
        cluster.measure(sources, plan_of(folder), tmp_path / "out", "local:1", bar=quiet)


def test_a_deadly_file_is_not_read_by_the_report(tmp_path, folder, sources):
    """What killed a worker must not kill the process that merges."""
    tools = Tools(plan_of(folder))
    path = Path(sources[0].file)
    place = part_file(path, None, tools, tmp_path)
    Part(tools.fingerprint, str(path), path.stem, "died", DEADLY).save(place)
    (part,) = evaluate_all([(path, None)], tools, tmp_path)
    assert part.error == "died"
    Part(tools.fingerprint, str(path), path.stem, "odd", "OSError").save(
        part_file(path, None, tools, tmp_path)
    )
    (part,) = evaluate_all([(path, None)], tools, tmp_path)
    assert not part.error


def test_strata_are_those_of_the_call(folder, some, tmp_path):
    """Rows of an earlier run with other strata: the estimate goes by the groups asked for now."""
    early = cluster.measure(some[:30], plan_of(folder), tmp_path, "local:1", bar=quiet)
    assert len(set(early.rows()["stratum"])) > 1
    one = [replace(s, stratum="one") for s in some[:30]]
    late = cluster.measure(one, plan_of(folder), tmp_path, "local:1", bar=quiet)
    assert late.resumed == 30 and set(late.rows()["stratum"]) == {"one"}
    assert late.estimate("accuracy").strata == 1
