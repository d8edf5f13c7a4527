"""The fault zoo measured once: every fault offline, and the served ones in a real engine (vLLM on the CPU).

    make engine && .venv/bin/python bench/zoo.py            # about 10 + 20 minutes on 2 cores

Three parts, `--parts` chooses; what is done is kept in .work/zoo and not done again (`--fresh` forgets it):
- offline: every fault planted on draft (a) and 8 held-out conversations, as `lib.zoo.measure` sees it;
- engine: the healthy draft and the faults of `SERVED`, written by `lib.engine_draft` and served, one
  server each: vLLM's counters beside what the captures alone predict for the same prompts and beside a
  replay of the texts it wrote, the texts beside plain decoding's, and the warnings of its log;
- files: the healthy draft's file damaged as it was in the field (`DAMAGES`), which no `Draft` can say: a
  tensor under another name, or none. Only counted and listened to.

Writes bench/results/zoo.json, which notebook 06 reads (`lib.zoo.recorded`).
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import re
import shutil
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from importlib.metadata import version
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from bench.engine import differences, engine_version, offline
from lib import samples, zoo
from lib.case import Case
from lib.contract import diff
from lib.decoding import Generation, as_capture
from lib.draft import DraftForward
from lib.engine import Deployment, Server, _running, serve
from lib.engine_draft import write_draft
from lib.errors import EngineError
from lib.faults import FAULTS
from lib.target import ensure_target, load_target

ROOT = Path(__file__).resolve().parents[1]
WORK = samples.WORK / "zoo"
LETTER, LIMIT, DEPTHS = "a", 8, 4
DEPTH = 5  # draft tokens a round, in the engine
PLAIN, HEALTHY = "plain", "none"
PARTS = ("offline", "engine", "files")
# Served, in this order. control_target_theta leaves the draft alone: its folder is the healthy one again,
# so its run says how far two runs of the same thing differ, in counts and in the log.
SERVED = (
    "control_target_theta", "incident_slice", "default_triple", "slot_order", "slot_duplicated",
    "fc_bypassed", "norm_before_residual", "feedback", "head_unnormed",
    "rope_theta", "rope_interleaved", "map_identity",
    "d2t_arange", "d2t_permuted", "embed_random", "lm_head_overwritten", "layer_unloaded",
    "control_embed_scale", "inner_targets", "d2t_zeros", "rope_theta_default",
)  # fmt: skip


def machine() -> str:
    """CPU, threads and precision, in words."""
    cpu = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
    cores = len(os.sched_getaffinity(0))
    return f"{cpu[1] if cpu else platform.machine()}, {cores} cores, fp32"


def stamp(**more: str) -> dict[str, str]:
    """Machine, versions and day of a part of the record."""
    packages = {name: version(name) for name in ("torch", "transformers")}
    return {"machine": machine(), "date": datetime.date.today().isoformat(), **packages, **more}


def kept(part: str, key: str, make: Callable[[], dict]) -> dict:
    """The finished record of one fault; made and written under its final name if there is none."""
    path = WORK / part / f"{key}.json"
    if path.is_file():
        return json.loads(path.read_text())
    began = time.perf_counter()
    record = make()
    path.parent.mkdir(parents=True, exist_ok=True)
    half = path.with_suffix(".part")
    half.write_text(json.dumps(record, indent=1) + "\n")
    half.rename(path)
    print(f"{part} {key}: {time.perf_counter() - began:.0f} s", flush=True)
    return record


def planted(base: Case, key: str) -> Case:
    """The case with the fault in it, by the zoo's seed; the base itself for "none"."""
    return base if key == HEALTHY else zoo.plant(base, FAULTS[key])


# ---- offline ----------------------------------------------------------------------------------


def measure_offline(base: Case) -> dict:
    """Effect of every fault, and what its seed drew; for those that do not fit, what the case lacks."""

    def effect(key: str) -> dict:
        case = planted(base, key)
        words = diff(base.draft.contract, case.draft.contract)
        return {"planted": words, **zoo.as_record(zoo.measure(case, DEPTHS, metrics=True))}

    found, lacking = {HEALTHY: kept("offline", HEALTHY, lambda: effect(HEALTHY))}, {}
    for key, fault in FAULTS.items():
        if missing := fault.lacking(base):
            lacking[key] = "; ".join(missing)
        else:
            found[key] = kept("offline", key, lambda key=key: effect(key))
    return {
        "draft": base.draft.name, "taps": [str(t) for t in base.draft.contract.taps], "limit": LIMIT,
        "depths": DEPTHS, "chains": list(zoo.CHAINS), "seed": zoo.SEED, **stamp(),
        "effects": found, "lacking": lacking,
    }  # fmt: skip


# ---- damaged files ----------------------------------------------------------------------------


def _renamed(tensors: dict[str, torch.Tensor]) -> None:
    for name in [n for n in tensors if n.startswith("layers.0.")]:
        tensors["decoder." + name] = tensors.pop(name)


def _without_map(tensors: dict[str, torch.Tensor]) -> None:
    del tensors["d2t"], tensors["t2d"]


def _target_ids(tensors: dict[str, torch.Tensor]) -> None:
    tensors["d2t"] = tensors["d2t"] + torch.arange(len(tensors["d2t"]))


def _without_hidden_norm(tensors: dict[str, torch.Tensor]) -> None:
    del tensors["layers.0.hidden_norm.weight"]


def _nan(tensors: dict[str, torch.Tensor]) -> None:
    tensors["layers.0.mlp.down_proj.weight"][0] = float("nan")


DAMAGES: dict[str, Callable[[dict[str, torch.Tensor]], None]] = {
    "layer_unloaded": _renamed, "map_identity": _without_map, "d2t_absolute": _target_ids,
    "hidden_norm_lost": _without_hidden_norm, "weights_nonfinite": _nan,
}  # fmt: skip


def measure_files(base: Case, tokens: int) -> dict:
    """Counts and complaints for every damaged file; complaints are those beyond the healthy draft's."""
    target = ensure_target()
    prompts = [c.token_ids[~c.loss_mask] for c in base.captures]

    def run(key: str) -> dict:
        with tempfile.TemporaryDirectory(prefix="eagle3-engine-") as scratch:
            folder = write_draft(base.draft, base.draft.contract, Path(scratch) / "draft")
            tensors = load_file(folder / "model.safetensors")
            DAMAGES[key](tensors)
            save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
            method = {"method": "eagle3", "model": str(folder), "num_speculative_tokens": DEPTH}
            flags = ["--speculative-config", json.dumps(method)]
            deployment = Deployment(target, base.draft, base.draft.contract, DEPTH)
            return answered(
                _running(deployment, flags, Path(scratch), None, _log(f"file_{key}"), 300), prompts, tokens
            )

    healthy = set(complaints(_log(HEALTHY)))
    rows = {}
    for key in DAMAGES:
        record = kept(f"files_{tokens}", key, lambda key=key: run(key))
        rows[key] = heard(record, _log(f"file_{key}"), healthy)
    return {"depth": DEPTH, **stamp(engine=engine_version()), "faults": rows}


# ---- engine -----------------------------------------------------------------------------------


def _log(key: str) -> Path:
    log = WORK / "logs" / f"{key}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    return log


def served(target: Path, case: Case | None, key: str, prompts: list, tokens: int) -> dict:
    """One server of a case, or of the target alone; its log is kept."""
    draft = () if case is None else (case.draft, case.draft.contract, DEPTH)
    try:
        deployment = Deployment(target, *draft)
    except EngineError as err:
        return {"refused": str(err)}
    return answered(serve(deployment, log=_log(key)), prompts, tokens)


def answered(serving: AbstractContextManager[Server], prompts: list, tokens: int) -> dict:
    """Answers and counts of a server, or the message with which it refused the draft."""
    try:
        with serving as server:
            answers = server.generate(prompts, tokens)
            counts = server.counters() if server.deployment.draft else None
    except EngineError as err:
        return {"refused": str(err)}
    record: dict = {"answers": [list(a.token_ids) for a in answers]}
    if counts is not None:
        record |= {
            "rounds": counts.drafts, "accepted_at": list(counts.per_position),
            "tokens_per_round": counts.tokens_per_round,
        }  # fmt: skip
    return record


def heard(record: dict, log: Path, healthy: set[str]) -> dict:
    """The record without its answers and with what is new in the log; a refusal has its own message."""
    new = [] if "refused" in record else [x for x in complaints(log) if x not in healthy]
    return {k: v for k, v in record.items() if k != "answers"} | {"said": new}


class Predicted:
    """What captures predict of a served draft; replays of the same answers are made once."""

    def __init__(self, model, base: Case, prompts: list, tokens: int) -> None:
        """Captures cut to what the requests ask for."""
        self.model, self.prompts = model, prompts
        pairs = zip(base.captures, prompts, strict=True)
        self.cut = [c.first(len(p) + tokens) for c, p in pairs]
        self._replays: dict[str, list] = {}

    def replay(self, answers: list[list[int]]) -> list:
        """The texts that vLLM wrote, as captures of our own passes over them."""
        name = json.dumps(answers)
        if name not in self._replays:
            self._replays[name] = [
                as_capture(self.model, Generation(p, torch.tensor(a), (), (), 0.0, 0.0, 0), samples.WIDE_TAPS)
                for p, a in zip(self.prompts, answers, strict=True)
            ]
        return self._replays[name]

    def of(self, case: Case, answers: list[list[int]]) -> dict:
        """Rounds by the captures alone, and by a replay of the engine's texts."""
        forward, contract = DraftForward(case.draft), case.draft.contract
        return {
            "from captures": offline(forward, self.cut, contract, DEPTH),
            "from the engine's texts": offline(forward, self.replay(answers), contract, DEPTH),
        }


def measure_engine(base: Case, keys: tuple[str, ...], tokens: int) -> dict:
    """Every chosen fault served; differences are to the healthy draft (log) and to no draft (texts)."""
    target, model = ensure_target(), load_target(ensure_target())
    prompts = [c.token_ids[~c.loss_mask] for c in base.captures]
    predicted = Predicted(model, base, prompts, tokens)
    part = f"engine_{tokens}"
    plain = kept(part, PLAIN, lambda: served(target, None, PLAIN, prompts, tokens))

    class Plain:  # what `differences` reads
        answers = plain["answers"]

    def run(key: str) -> dict:
        case = planted(base, key)
        record = served(target, case, key, prompts, tokens)
        if "refused" in record:
            return record

        class Mine:
            answers = record["answers"]

        parted = differences(model, prompts, Plain, Mine)
        return record | predicted.of(case, record["answers"]) | {"texts that differ from plain": parted}

    found = {key: kept(part, key, lambda key=key: run(key)) for key in (HEALTHY, *keys)}
    healthy = set(complaints(_log(HEALTHY)))
    rows = {}
    for key, record in found.items():
        rows[key] = heard(record, _log(key), healthy if key != HEALTHY else set())
    return {
        "requests": f"{len(prompts)} held-out prompts x {tokens} greedy tokens, {DEPTH} draft tokens a round",
        "depth": DEPTH, **stamp(engine=engine_version()), "faults": rows,
    }  # fmt: skip


LOUD = re.compile(r"\b(WARNING|ERROR|CRITICAL)\b|\w+(Warning|Error|Exception)\b")
ENDS = "[shutdown]"  # how loudly it ends depends on what it was doing when it was stopped
VARIES = (  # what differs between two runs of the same thing
    (r"^\([^)]*\)\s*", ""), (r"\b\d\d-\d\d \d\d:\d\d:\d\d\b\s*", ""), (r"/tmp/\S+?(?=[\s'\",)]|$)", "<path>"),
    (r"eagle3-[0-9a-f]{8}", "<name>"), (r"\b0x[0-9a-f]+\b", "<address>"), (r"127\.0\.0\.1:\d+", "<port>"),
    (r"\bpid[= ]\d+", "pid"), (r"\d+(\.\d+)?\s?(s|seconds|ms|GiB|GB|MiB)\b", "<n>"),
)  # fmt: skip


def complaints(log: Path) -> list[str]:
    """Distinct warnings and errors of a server's log up to its end, without what differs from run to run."""
    lines = []
    for line in log.read_text(errors="replace").splitlines():
        if ENDS in line:
            break
        if LOUD.search(line):
            for pattern, word in VARIES:
                line = re.sub(pattern, word, line)
            lines.append(line.strip()[:400])
    return list(dict.fromkeys(lines))


def measured(part: str, args: argparse.Namespace) -> dict:
    """One part of the record."""
    base = zoo.sample_case(LETTER, LIMIT, live=part == "offline")
    if part == "offline":
        return measure_offline(base)
    if part == "engine":
        return measure_engine(base, tuple(args.faults), args.tokens)
    return measure_files(base, args.tokens)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", nargs="+", default=PARTS, choices=PARTS)
    parser.add_argument(
        "--faults", nargs="+", default=SERVED, choices=list(FAULTS), help="engine: which ones"
    )
    parser.add_argument("--tokens", type=int, default=64, help="new tokens a prompt, in the engine")
    parser.add_argument("--fresh", action="store_true", help="forget what is done")
    parser.add_argument("--out", type=Path, default=zoo.RECORD)
    args = parser.parse_args()

    for part in args.parts:
        for folder in WORK.glob(f"{part}*/") if args.fresh else ():
            shutil.rmtree(folder)
        found = measured(part, args)
        record = json.loads(args.out.read_text()) if args.out.is_file() else {}
        text = json.dumps(record | {part: found}, indent=1).replace(f"{ROOT}/", "")
        args.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
