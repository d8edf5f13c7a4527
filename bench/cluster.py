"""Beyond one machine: what a file costs, and what a second process brings.

    make bench        or        .venv/bin/python bench/cluster.py [--copies 3] [--repeats 3] [--skip-kimi]

- scaling: the sample captures (links to them, `--copies` of each), norms, rollouts and metrics of every
  file, in this process alone (one thread), on a cluster of one process and on one of two (one thread each);
  in turn, the clusters stay up, so starting them is not in the ratio. Every run writes into a new folder.
- the incident's size: files of 110 MB (four states of width 7168 in bf16, 1,918 tokens), as 100,000 of them
  are 11 TB. Seconds of one process for norms alone and for depth 0 with a draft of Kimi's size
  (`bench/kimi.py`), both through `lib.evaluate.evaluate_file`; bytes of the row that is kept.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path

import torch
from tqdm import tqdm

from bench import kimi
from bench._timing import machine, ratio
from lib import cluster, places, samples
from lib.evaluate import Plan, Tools, evaluate_all, evaluate_file
from lib.partitions import Source, Store, to_row
from lib.target import ensure_target

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "bench" / "results" / "cluster.json"
TOKENS = 1918  # so that a file is 110 MB: 11 TB over 100,000 files
quiet = partial(tqdm, disable=True)


def plan() -> Plan:
    """What the scaling runs measure in every file."""
    taps = tuple(map(str, samples.TRAINED_TAPS["a"]))
    return Plan(
        str(samples.SAMPLES / "drafts" / samples.DRAFTS["a"]), str(ensure_target()),
        names=(tuple(map(str, samples.STORED_TAPS)),), wirings=(taps,), depth=5,
    )  # fmt: skip


def linked(folder: Path, copies: int) -> list[Path]:
    """The sample captures under as many names as `copies` says."""
    originals = sorted((samples.SAMPLES / "captures" / "incident").glob("data_*.pt"))
    found = []
    for i in range(copies):
        for original in originals:
            link = folder / f"copy{i}_{original.name}"  # a key goes by the name of a link
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(original)
            found.append(link)
    return found


def scaling(copies: int, repeats: int) -> dict:
    """Seconds over the same files in one process, on one worker and on two."""
    place = Path(tempfile.mkdtemp(prefix="scaling-"))
    threads = torch.get_num_threads()
    try:
        paths = linked(place / "in", copies)
        files = [Source(str(p), key=places.key_of(str(p))) for p in paths]
        tools = Tools(plan())
        torch.set_num_threads(1)
        # Clusters take their threads from this process's.
        with cluster.local_cluster(1) as one, cluster.local_cluster(2) as two:
            seconds: dict[str, list[float]] = {"alone": [], "1 worker": [], "2 workers": []}
            for turn in range(repeats + 1):
                for name in seconds:
                    out = place / f"{turn} {name}"
                    began = time.perf_counter()
                    if name == "alone":
                        evaluate_all([(p, None) for p in paths], tools, out)
                    else:
                        client = one if name == "1 worker" else two
                        found = cluster.measure(files, plan(), out, client, bar=quiet)
                        assert len(found.finished) == len(files), found.failed
                    if turn:  # the first is for warming up: workers load the draft in it
                        seconds[name].append(time.perf_counter() - began)
        size = sum(p.stat().st_size for p in paths) / len(paths)
        rows = [p.stat().st_size for p in Path(found.store.folder).rglob("*.parquet")]
        return {
            "files": len(files), "bytes a file": round(size), "bytes a row": round(statistics.mean(rows)),
            "files a second": {n: round(len(files) / statistics.median(s), 2) for n, s in seconds.items()},
            "2 workers / 1 worker, speed": ratio(seconds["1 worker"], seconds["2 workers"]),
            "1 worker / alone, time": ratio(seconds["1 worker"], seconds["alone"]),
        }  # fmt: skip
    finally:
        torch.set_num_threads(threads)
        shutil.rmtree(place)


def incident_size(folder: Path, repeats: int) -> dict:
    """Seconds that one file of the incident's size costs one process of all threads here, by kind of work."""
    sizes = kimi.Sizes(tokens=TOKENS)
    path = kimi.write_capture(folder / "long", sizes)
    draft = kimi.write(folder / "grouped", "grouped", sizes)
    names = tuple(f"layer{t}" for t in kimi.TAPS)
    kinds = {
        "norms": Plan("", names=(names,), metrics=False),
        "accuracy, depth 0": Plan(
            str(draft), names=(names,), wirings=(names[:3],), depth=1, norms=False, metrics=False,
            dtype="bfloat16",
        ),
    }  # fmt: skip
    found = {"bytes a file": path.stat().st_size, "tokens": TOKENS}
    for name, asked in kinds.items():
        tools, seconds = Tools(asked), []
        for _ in range(repeats):
            began = time.perf_counter()
            part = evaluate_file(path, asked, tools=tools)
            seconds.append(time.perf_counter() - began)
            assert not part.error, part.error
        with tempfile.TemporaryDirectory() as out:
            store, source = Store(out, part.plan), Source(str(path), key="0" * 16)
            store.add(to_row(part, source, size=0, seconds=0.0, worker="", whole=False))
            (row,) = Path(store.folder).rglob("*.parquet")
            found[name] = {
                "seconds": round(statistics.median(seconds), 2),
                "range": [round(min(seconds), 2), round(max(seconds), 2)], "bytes a row": row.stat().st_size,
            }  # fmt: skip
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--copies", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--skip-kimi", action="store_true", help="keep the record of the incident's size")
    parser.add_argument("--folder", type=Path, default=ROOT / ".work" / "kimi")
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    old = json.loads(args.out.read_text()) if args.out.is_file() else {}
    result = {"machine": machine("fp32; bf16 at the incident's size"), "cores": os.cpu_count()}
    result["scaling"] = scaling(args.copies, args.repeats)
    result["incident's size"] = (
        old.get("incident's size") if args.skip_kimi else incident_size(args.folder, args.repeats)
    )
    print(json.dumps(result, indent=1))
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
