"""The serving engine: what is written for it, what it counts, and that nothing of it is left behind."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import pytest
import torch

from lib import engine, engine_draft, samples
from lib.captures import open_capture, open_folder
from lib.checkpoints import load_draft
from lib.contract import Rope
from lib.draft import DraftForward
from lib.engine import (
    Completion,
    Counters,
    Deployment,
    Server,
    capture_with_engine,
    find_engine,
    serve,
    why_absent,
)
from lib.engine_draft import as_served, write_draft
from lib.errors import EngineError
from lib.taps import Stored, Tap
from lib.target import continue_greedily, ensure_target, load_target, record_states
from tests.support import (
    HIDDEN,
    VOCAB,
    random_capture_tensors,
    read_checkpoint,
    speculators_draft,
    tiny_llama,
    write_checkpoint,
    write_legacy,
)

needs_engine = pytest.mark.skipif(find_engine() is None, reason=why_absent())

# ---- written drafts ------------------------------------------------------------------------------

TAPS = (Tap(0), Tap(3), Tap(4), Tap(6))


@pytest.fixture(scope="module")
def captures(tmp_path_factory):
    """Made-up conversations with states at `TAPS`."""
    folder, rng = tmp_path_factory.mktemp("captures"), torch.Generator().manual_seed(0)
    files = [write_legacy(folder / f"data_{n}.pt", random_capture_tensors(n, rng)) for n in (9, 30, 31)]
    return [open_capture(file, taps=TAPS) for file in files]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """Random drafts of speculators' real class in float64, made once per kind: what differs is wiring."""
    made = {}

    def draft(**kind):
        key = tuple(sorted(kind.items()))
        if key not in made:
            folder = tmp_path_factory.mktemp("draft")
            speculators_draft(**kind).save_pretrained(folder)
            loaded = load_draft(folder, dtype=torch.float64)
            made[key] = replace(loaded, contract=loaded.contract.change(taps=TAPS[:3]))
        return made[key]

    return draft


@pytest.fixture(scope="module")
def biased(tiny, tmp_path_factory):
    """A draft with biases on q, k and v but not on o."""
    tensors, config = read_checkpoint(tiny().path)
    rng = torch.Generator().manual_seed(1)
    for name in ("q", "k", "v"):
        rows = tensors[f"layers.0.self_attn.{name}_proj.weight"].shape[0]
        tensors[f"layers.0.self_attn.{name}_proj.bias"] = torch.randn(rows, generator=rng)
    folder = write_checkpoint(tmp_path_factory.mktemp("biased"), tensors, config)
    return load_draft(folder, dtype=torch.float64)


LLAMA3 = (
    ("factor", 8.0),
    ("high_freq_factor", 4.0),
    ("low_freq_factor", 1.0),
    ("original_max_position_embeddings", 16.0),
)
WRITTEN = {
    "as declared": ({}, {}),
    "taps in another order": ({}, {"taps": (Tap(4), Tap(0), Tap(3))}),
    "a repeated tap": ({}, {"taps": (Tap(3), Tap(0), Tap(3))}),
    "fc bypassed": ({}, {"use_fc": False, "taps": (Tap(4), Tap(0), Tap(3))}),
    "head without norm": ({}, {"head_norm": False}),
    "residual normed": ({}, {"norm_before_residual": True}),
    "residual plain": ({}, {"norm_before_residual": False}),
    "normed feedback": ({}, {"feedback": "post_norm"}),
    "rope base": ({}, {"rope": Rope(500.0)}),
    "rope llama3": ({}, {"rope": Rope(1e4, "llama3", LLAMA3)}),
    "rope interleaved": ({}, {"rope": Rope(1e4, interleaved=True)}),
    "rope interleaved in part": ({"arch": "qwen3"}, {"rope": Rope(1e4, interleaved=True, partial=0.5)}),
    "ids read as absolute": ({}, {"vocab_map": "absolute"}),
    "ids taken as they are": ({}, {"vocab_map": "identity"}),
    "scaled embeddings": ({}, {"embed_scale": 0.01}),
    "positions from another start": ({}, {"position_offset": 7}),
    "norm over all slots, reordered": ({"norm_before_fc": True}, {"taps": (Tap(4), Tap(0), Tap(3))}),
    "norm per slot, reordered": ({"fc_norm": True}, {"taps": (Tap(4), Tap(0), Tap(3))}),
    "norm left out": ({"norm_before_fc": True}, {"fc_input_norm": "none"}),
    "two layers of qwen3": ({"arch": "qwen3", "layers": 2}, {"taps": (Tap(6), Tap(4), Tap(0))}),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_a_written_draft_predicts_what_the_contract_says(name, tiny, captures, tmp_path):
    """Same choices, three tokens deep, from the written folder under the contract that vLLM reads there."""
    kind, changes = WRITTEN[name]
    draft = tiny(**kind)
    contract = draft.contract.change(**changes)
    folder = write_draft(draft, contract, tmp_path / "draft")
    written = load_draft(folder, convention="vllm", dtype=torch.float64)
    assert written.contract == as_served(draft, contract)
    ids = [t.after_block for t in written.contract.taps]
    assert ids == sorted(set(ids)), "vLLM sorts the ids and drops repeats: they must need neither"
    wanted = DraftForward(draft).predict(captures, contract, depths=3, feed="own")
    found = DraftForward(written).predict(captures, written.contract, depths=3, feed="own")
    assert torch.equal(found.draft_ids, wanted.draft_ids)
    assert torch.equal(found.target_ids, wanted.target_ids)


def test_the_control_order_matters_to_this_draft(tiny, captures):
    """Were the order of taps lost on the way, the test above would see it."""
    draft = tiny()
    forward = DraftForward(draft)
    ids = [
        forward.predict(captures, draft.contract.change(taps=taps)).draft_ids
        for taps in itertools.permutations(TAPS[:3])
    ]
    assert all(not torch.equal(a, b) for a, b in itertools.combinations(ids, 2))


def test_missing_biases_are_written_as_zeros(biased, captures, tmp_path):
    """vLLM makes all biases or none, and leaves what the file lacks uninitialised."""
    folder = write_draft(biased, biased.contract, tmp_path / "draft")
    tensors, config = read_checkpoint(folder)
    assert config["transformer_layer_config"]["attention_bias"] is True
    assert not tensors["layers.0.self_attn.o_proj.bias"].any()
    written = load_draft(folder, convention="vllm", dtype=torch.float64)
    forwards = DraftForward(biased), DraftForward(written)
    wanted, found = (
        f.predict(captures, f.draft.contract.change(taps=TAPS[:3]), depths=2, feed="own").draft_ids
        for f in forwards
    )
    assert torch.equal(wanted, found)


@pytest.mark.parametrize(
    ("field", "kind", "changes"),
    [
        ("taps", {}, {"taps": (Stored(0), Tap(3), Tap(4))}),
        ("taps", {"fc_norm": True}, {"taps": (Tap(3), Tap(0), Tap(3))}),
        ("token_shift", {}, {"token_shift": 0}),
        ("position_step", {}, {"position_step": 0}),
        ("max_position", {}, {"max_position": 8}),
        ("head_norm", {}, {"head_norm": False, "feedback": "post_norm"}),
        ("fc_input_norm", {}, {"fc_input_norm": "fc_norm"}),
        ("rope", {}, {"rope": Rope(1e4, "yarn", (("factor", 4.0),))}),
    ],
)
def test_what_the_engine_cannot_express_is_named(field, kind, changes, tiny, tmp_path):
    """One typed error with the field; nothing is written."""
    draft = tiny(**kind)
    with pytest.raises(EngineError, match="evaluate this contract offline") as caught:
        write_draft(draft, draft.contract.change(**changes), tmp_path / "draft")
    assert caught.value.field == field and not (tmp_path / "draft").exists()


def test_a_map_out_of_the_vocabulary_is_refused(tiny, tmp_path):
    """vLLM would index outside its logits at the first request."""
    draft = tiny()
    with pytest.raises(EngineError, match=r"vocab_map: .*1 outside under 'offset'"):
        write_draft(replace(draft, d2t=draft.d2t + (torch.arange(40) == 39) * 500), draft.contract, tmp_path)


def test_a_draft_that_reads_back_differently_is_an_error(tiny, tmp_path, monkeypatch):
    """The folder is not trusted: here the ids are lost between writing and reading."""
    config = engine_draft._config
    monkeypatch.setattr(
        engine_draft, "_config", lambda *a: config(*a) | {"eagle_aux_hidden_state_layer_ids": [0, 2, 4]}
    )
    with pytest.raises(EngineError, match=r"the contract that was written, found slot 1: layer3 -> layer2"):
        write_draft(tiny(), tiny().contract, tmp_path)


# ---- deployments ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny_target(tmp_path_factory):
    """A target of the tiny drafts' sizes, with 6 blocks."""
    folder = tmp_path_factory.mktemp("target")
    tiny_llama().save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("field", "options"),
    [
        ("depth", {"depth": 2}),
        ("depth", {"draft": True}),
        ("contract", {"contract": True}),
        ("dtype", {"dtype": "int8"}),
        ("max_model_len", {"max_model_len": 1}),
        ("max_model_len", {"max_model_len": 1_000_000}),
        ("max_model_len", {"draft": True, "depth": 1, "max_model_len": 2048, "positions": 1024}),
        ("taps", {"draft": True, "depth": 1, "taps": (Tap(0), Tap(3), Tap(7))}),
        ("hidden_size", {"draft": True, "depth": 1, "taps": (Tap(0), Tap(3))}),
    ],
)
def test_deployments_that_cannot_be_are_refused(field, options, tiny, tiny_target):
    """Before any server is started, and by the name of the field."""
    draft = tiny() if options.pop("draft", False) else None
    contract = tiny().contract if options.pop("contract", False) else None
    if "positions" in options:
        draft = replace(draft, config={"max_position_embeddings": options.pop("positions")})
    if "taps" in options:
        contract = draft.contract.change(taps=options.pop("taps"))
    with pytest.raises(EngineError) as caught:
        Deployment(tiny_target, draft, contract, **options)
    assert caught.value.field == field


def test_draft_of_another_target(tiny, tiny_target, tmp_path):
    """Vocabulary and hidden size are compared with the target's own config."""
    for name, field in (("vocab_size", "vocab_size"), ("hidden_size", "hidden_size")):
        config = (tiny_target / "config.json").read_text()
        size = {"vocab_size": VOCAB, "hidden_size": HIDDEN}[name]
        (tmp_path / "config.json").write_text(config.replace(f'"{name}": {size}', f'"{name}": {size + 8}'))
        with pytest.raises(EngineError, match="the target it was trained for") as caught:
            Deployment(tmp_path, tiny(), depth=1)
        assert caught.value.field == field


def test_the_default_contract_is_the_drafts_own(tiny, tiny_target):
    """And the deployment says so."""
    assert Deployment(tiny_target, tiny(), depth=1).contract == tiny().contract
    assert Deployment(tiny_target, tiny(), depth=1).vocabulary == VOCAB


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "message"),
    [
        ([], 4, "prompt: expected at least one token"),
        ([1] * 61, 4, "prompt: expected at most 60 tokens before 4 new ones, found 61"),
        ([1, VOCAB], 4, f"prompt: expected ids from 0 to {VOCAB - 1}"),
        ([1], 0, "max_tokens: expected 1 or more"),
    ],
)
def test_requests_that_cannot_be_are_refused_before_any_is_sent(prompt, max_tokens, message, tiny_target):
    """The second of two prompts is at fault: nothing listens on this port, and nobody notices."""
    server = Server(Deployment(tiny_target, max_model_len=64), 1, "nobody", Path("none"))
    with contextlib.closing(server), pytest.raises(EngineError, match=message):
        server.generate([torch.tensor([1, 2]), prompt], max_tokens)


# ---- counters ------------------------------------------------------------------------------------

# Recorded from vLLM 0.32.0's /metrics, draft (a) at depth 2: the families of speculation.
METRICS = """\
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="eagle3-4d8e9c47"} 206.0
# TYPE vllm:spec_decode_num_drafts_created gauge
vllm:spec_decode_num_drafts_created{engine="0",model_name="eagle3-4d8e9c47"} 1.7959926090676534e+09
# TYPE vllm:spec_decode_num_draft_tokens_total counter
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="eagle3-4d8e9c47"} 412.0
# TYPE vllm:spec_decode_num_draft_tokens_created gauge
vllm:spec_decode_num_draft_tokens_created{engine="0",model_name="eagle3-4d8e9c47"} 1.7959926090676827e+09
# TYPE vllm:spec_decode_num_accepted_tokens_total counter
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="eagle3-4d8e9c47"} 192.0
# TYPE vllm:spec_decode_num_accepted_tokens_created gauge
vllm:spec_decode_num_accepted_tokens_created{engine="0",model_name="eagle3-4d8e9c47"} 1.7959926090676992e+09
# TYPE vllm:spec_decode_num_accepted_tokens_per_pos_total counter
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="eagle3-4d8e9c47",position="0"} 118.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="eagle3-4d8e9c47",position="1"} 74.0
# TYPE vllm:spec_decode_num_accepted_tokens_per_pos_created gauge
vllm:spec_decode_num_accepted_tokens_per_pos_created{engine="0",model_name="eagle3-4d8e9c47",position="0"} 1.795992609067729e+09
vllm:spec_decode_num_accepted_tokens_per_pos_created{engine="0",model_name="eagle3-4d8e9c47",position="1"} 1.7959926090677364e+09
"""  # noqa: E501


def test_counters_from_a_recorded_page():
    """Totals, one count per position, and no `_created` timestamp among them."""
    counters = Counters.parse(METRICS)
    assert counters == Counters(206, 412, 192, (118, 74))
    assert counters.tokens_per_round == pytest.approx(1 + counters.accepted / counters.drafts)
    assert counters.acceptance_rate == pytest.approx(counters.accepted / counters.draft_tokens)
    assert counters.rates == tuple(n / counters.drafts for n in counters.per_position)


def test_counters_subtract():
    """What lies between two readings; the wrong way round is an error."""
    early, late = Counters(3, 6, 2, (2, 0)), Counters(10, 20, 9, (6, 3))
    assert late - early == Counters(7, 14, 7, (4, 3))
    for bad in (late, Counters(0, 0, 0, (0,))):
        with pytest.raises(EngineError, match="an earlier reading of the same server"):
            early - bad


def test_no_speculation_is_not_zero_speculation():
    """A page without the counters, and a reading without a round, are errors, not zeros."""
    with pytest.raises(EngineError, match="without one there is nothing to count"):
        Counters.parse("# TYPE vllm:generation_tokens counter\nvllm:generation_tokens_total 5.0\n")
    with pytest.raises(EngineError, match="at least one round"):
        _ = Counters(0, 0, 0, (0, 0)).tokens_per_round


# ---- starting and stopping -----------------------------------------------------------------------


def fake_engine(folder: Path, script: str, monkeypatch) -> Path:
    """An environment whose `python` is this shell script: for the ways in which a start fails."""
    (folder / "bin").mkdir(parents=True)
    for name in ("python", "vllm"):
        (folder / "bin" / name).write_text(f"#!/bin/sh\n{script}\n")
        (folder / "bin" / name).chmod(0o755)
    monkeypatch.setenv("EAGLE3_ENGINE_VENV", str(folder))
    return folder


def test_an_absent_engine_says_what_to_run(tmp_path, monkeypatch, tiny_target):
    """Not installed, or half installed: the sentence names the command."""
    monkeypatch.setenv("EAGLE3_ENGINE_VENV", str(tmp_path))
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").write_text("")
    assert find_engine() is None and str(tmp_path) in why_absent() and "make engine" in why_absent()
    with pytest.raises(EngineError, match="make engine"), serve(Deployment(tiny_target)):
        pass


def test_a_named_port_that_is_taken(tmp_path, monkeypatch, tiny_target):
    """An error at once: the server is not started (this one would leave a file)."""
    fake_engine(tmp_path / "venv", f"touch {tmp_path}/started", monkeypatch)
    with socket.socket() as other:
        other.bind((engine.HOST, 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(EngineError, match=rf"port: expected a free port, found {port}: "):
            with serve(Deployment(tiny_target), port=port):
                pass
    assert not (tmp_path / "started").exists()


def test_a_server_that_dies_tells_why(tmp_path, monkeypatch, tiny_target):
    """The error holds the cause from the log and not vLLM's last line, which says 'see above'."""
    script = """cat <<'END'
(EngineCore pid=7) ERROR 11-29 21:00:00 [core.py:1] ValueError: no room for 1 GiB
(APIServer pid=6) RuntimeError: Engine core initialization failed. See root cause above.
END
exit 3"""
    fake_engine(tmp_path / "venv", script, monkeypatch)
    log = tmp_path / "server.log"
    with pytest.raises(EngineError, match=r"status 3: ValueError: no room for 1 GiB") as caught:
        with serve(Deployment(tiny_target), log=log):
            pass
    assert str(log) in caught.value.remedy and "no room" in log.read_text()


def test_another_port_is_tried_only_if_none_was_named(tmp_path, monkeypatch, tiny_target):
    """A free port can be taken by somebody else before the server gets to it."""
    script = f"echo try >> {tmp_path}/tries; echo 'OSError: [Errno 98] Address already in use'; exit 1"
    fake_engine(tmp_path / "venv", script, monkeypatch)
    free = engine._claim(None)
    for port, tries in ((None, engine.PORT_TRIES), (free, 1)):
        (tmp_path / "tries").write_text("")
        with pytest.raises(EngineError, match="Address already in use"):
            with serve(Deployment(tiny_target), port=port):
                pass
        assert len((tmp_path / "tries").read_text().split()) == tries


def test_a_server_that_never_answers_is_given_up(tmp_path, monkeypatch, tiny_target):
    """After the time limit, with no process left."""
    fake_engine(tmp_path / "venv", f"echo $$ > {tmp_path}/pid; echo loading; sleep 600", monkeypatch)
    with pytest.raises(EngineError, match=r"within 1 s, found no answer: loading"):
        with serve(Deployment(tiny_target), timeout=1):
            pass
    assert not alive(group_of(int((tmp_path / "pid").read_text())))


def group_of(leader: int) -> list[psutil.Process]:
    """Processes of a process group."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if os.getpgid(process.pid) == leader:
                found.append(process)
    return found


def alive(processes: list[psutil.Process]) -> list[psutil.Process]:
    """Those that run; a zombie runs no more, its parent only has not asked yet."""
    running = []
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                running.append(process)
    return running


# A leader and a child; the child will not go when asked.
STUBBORN = ["sh", "-c", "sh -c 'trap \"\" TERM; while :; do sleep 1; done' & sleep 600"]


@pytest.mark.parametrize("leave", [None, KeyboardInterrupt, ValueError])
def test_stubborn_processes_are_killed(leave, tmp_path, monkeypatch):
    """However the block is left, no process of the group outlives it."""
    monkeypatch.setattr(engine, "STOP_SECONDS", 1)
    with contextlib.suppress(KeyboardInterrupt, ValueError):
        with engine._process(STUBBORN, tmp_path, tmp_path / "log") as process:
            while len(started := group_of(process.pid)) < 3:
                time.sleep(0.02)
            if leave:
                raise leave
    assert not alive(started) and not alive(group_of(process.pid))


def test_processes_die_with_a_killed_parent(tmp_path):
    """Even SIGKILL, which no `finally` sees: processes and temporary folder go."""
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    code = (
        "import pathlib, time; from lib import engine\n"
        f"path = pathlib.Path({str(scratch)!r})\n"
        f"with engine._process({STUBBORN!r}, path, path / 'log') as process:\n"
        "    print(process.pid, flush=True); time.sleep(600)\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", code], cwd=samples.ROOT, stdout=subprocess.PIPE, text=True
    )
    leader = int(parent.stdout.readline())
    while len(started := group_of(leader)) < 3:
        time.sleep(0.02)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    deadline = time.monotonic() + 20
    while alive(started) or scratch.exists():
        assert time.monotonic() < deadline, (alive(started), scratch.exists())
        time.sleep(0.05)


# ---- the real engine -----------------------------------------------------------------------------

RIGHT, WRONG = samples.TRAINED_TAPS["a"], samples.SERVED_TAPS
PROMPTS, TOKENS, DEPTH = 4, 40, 2
CAPTURED = (Tap(0), Tap(3), Tap(16), Tap(28), Tap(30))


@dataclass
class Run:
    """What one served deployment did, and the processes it had."""

    completions: list[Completion]
    counters: Counters | None
    processes: list[psutil.Process]
    folders: list[Path]


@pytest.fixture(scope="module")
def target():
    return load_target(ensure_target())


@pytest.fixture(scope="module")
def prompts():
    """Held-out questions, up to where the answer begins."""
    held = samples.incident_captures(PROMPTS)
    return [c.token_ids[: int(c.loss_mask.nonzero()[0])] for c in held]


def run(prompts, taps=None, interrupt=False) -> Run:
    """Serve once; `interrupt` leaves the block as a kernel interrupt does."""
    options = {}
    if taps:
        draft = samples.draft("a", samples.target_head())
        options = {"draft": draft, "contract": draft.contract.change(taps=taps), "depth": DEPTH}
    with contextlib.suppress(KeyboardInterrupt), serve(Deployment(ensure_target(), **options)) as server:
        done = Run(server.generate(prompts, TOKENS), None, group_of(server.pid), [server.log.parent])
        if taps:
            done.counters = server.counters()
        else:
            with pytest.raises(EngineError, match="serve a draft"):
                server.counters()
        if interrupt:
            raise KeyboardInterrupt
    return done


@pytest.fixture(scope="module")
def plain(prompts) -> Run:
    return run(prompts)


@pytest.fixture(scope="module")
def right(prompts) -> Run:
    return run(prompts, RIGHT, interrupt=True)


@pytest.fixture(scope="module")
def wrong(prompts) -> Run:
    return run(prompts, WRONG)


def check_same_text(target, prompt, found, wanted) -> None:
    """Equal, or parted at a near-tie: the engine's other order of sums may then choose otherwise."""
    parted = next((i for i, (a, b) in enumerate(zip(found, wanted, strict=False)) if a != b), None)
    if parted is None:
        assert len(found) == len(wanted)
        return
    text = torch.cat((prompt, torch.tensor(wanted[:parted], dtype=torch.long)))
    with torch.inference_mode():
        best = target(text[None]).logits[0, -1].topk(2)
    gap = float(best.values[0] - best.values[1])
    assert gap < 1e-3, f"parted at token {parted}, where the target's choice is clear by {gap:.4f}"
    assert {found[parted], wanted[parted]} == set(best.indices.tolist())


@pytest.mark.engine
@pytest.mark.slow
@needs_engine
def test_the_engine_serves_this_target(plain, target, prompts):
    """Greedy text in fp32 is the text of transformers' own loop."""
    for prompt, completion in zip(prompts, plain.completions, strict=True):
        wanted = continue_greedily(target, prompt, TOKENS).tolist()
        check_same_text(target, prompt, list(completion.token_ids), wanted)
        assert completion.finish_reason == ("stop" if completion.token_ids[-1] == samples.END else "length")


@pytest.mark.engine
@pytest.mark.slow
@needs_engine
@pytest.mark.parametrize("name", ["plain", "right"])
def test_nothing_of_the_engine_is_left(name, request):
    """After a normal end (plain) and an interrupt inside the block (right)."""
    done = request.getfixturevalue(name)
    assert len(done.processes) > 1, "vLLM has an engine process besides the server's"
    assert not alive(done.processes)
    assert not any(folder.exists() for folder in done.folders)


@pytest.mark.engine
@pytest.mark.slow
@needs_engine
def test_right_taps_are_worth_more_tokens_per_round(right, wrong):
    """One edit of the config's ids, no weight touched."""
    assert right.counters.tokens_per_round > wrong.counters.tokens_per_round + 0.1
    for counters in (right.counters, wrong.counters):
        assert counters.draft_tokens == DEPTH * counters.drafts
        assert counters.accepted == sum(counters.per_position) and len(counters.per_position) == DEPTH


@pytest.mark.engine
@pytest.mark.slow
@needs_engine
@pytest.mark.parametrize("name", ["right", "wrong"])
def test_speculation_does_not_change_the_text(name, request, plain, target, prompts):
    """That is why nobody notices a wrong wiring."""
    done = request.getfixturevalue(name)
    for prompt, a, b in zip(prompts, done.completions, plain.completions, strict=True):
        check_same_text(target, prompt, list(a.token_ids), list(b.token_ids))


@pytest.mark.engine
@pytest.mark.slow
@needs_engine
@pytest.mark.parametrize("name", ["right", "wrong"])
def test_the_engine_counts_what_the_offline_walk_counts(name, request, target, prompts):
    """The same rounds, from lib.decoding's own loop: what is measured offline is what is deployed."""
    from lib.decoding import speculate

    done = request.getfixturevalue(name)
    draft = samples.draft("a", samples.target_head())
    forward, contract = (
        DraftForward(draft),
        draft.contract.change(taps={"right": RIGHT, "wrong": WRONG}[name]),
    )
    ours = [speculate(target, forward, p, TOKENS, depth=DEPTH, contract=contract) for p in prompts]
    rounds, accepted = (sum(map(f, ours)) for f in (lambda g: len(g.gained), lambda g: sum(g.accepted)))
    # An answer can end inside a round (the engine counts what it cut off), or part at a near-tie.
    assert abs(done.counters.drafts - rounds) <= 2
    assert abs(done.counters.accepted - accepted) <= DEPTH * PROMPTS


@pytest.fixture(scope="module")
def engine_captures(prompts, tmp_path_factory):
    folder = tmp_path_factory.mktemp("engine") / "captures"
    paths = capture_with_engine(ensure_target(), prompts[:2], CAPTURED, folder)
    assert sorted(folder.iterdir()) == paths, "only captures are left in the folder"
    return open_folder(folder, taps=CAPTURED).captures


@pytest.mark.engine
@pytest.mark.slow
@needs_engine
@pytest.mark.parametrize("tap", CAPTURED, ids=str)
def test_the_engines_ids_are_boundaries(tap, engine_captures, target, prompts):
    """vLLM's state k is the stream after k blocks: equal within fp32 rounding, one block on it is not.

    Tap(30) is before the final norm; there the negative is the state after it.
    """
    for capture, prompt in zip(engine_captures, prompts, strict=False):
        assert torch.equal(capture.token_ids, prompt)
        after = Tap(tap.after_block + 1) if tap.after_block < 30 else tap
        states = record_states(target, prompt[None], [tap, after])
        following = states[after][0] if after != tap else target.model.norm(states[tap][0])
        assert relative(capture.state(tap), states[tap][0]).max() < 2e-5
        # Without the first position: it is an attention sink, large and nearly the same in every block.
        assert relative(capture.state(tap), following)[1:].min() > 0.01


def relative(found: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """(L,) distance at each position over the wanted state's norm."""
    return (found - wanted).norm(dim=-1) / wanted.norm(dim=-1)


def test_captures_that_the_engine_cannot_write_are_refused(tmp_path, tiny_target):
    """Before a server is started."""
    ids = [torch.tensor([1, 2, 3])]
    for field, texts, taps in (
        ("token_ids", [], [Tap(0)]),
        ("taps", ids, [Tap(3), Tap(0)]),
        ("taps", ids, [Tap(3), Tap(3)]),
        ("taps", ids, [Tap(7)]),
    ):
        with pytest.raises(EngineError) as caught:
            capture_with_engine(tiny_target, texts, taps, tmp_path / "new")
        assert caught.value.field == field and not (tmp_path / "new").exists()
    (tmp_path / "hs_0.safetensors").write_text("")
    with pytest.raises(EngineError, match="a folder without captures"):
        capture_with_engine(tiny_target, ids, [Tap(0)], tmp_path)
