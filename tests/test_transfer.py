"""States ahead of their use, and what the host asks of a device: on the CPU, without a GPU."""

from __future__ import annotations

import threading
import time
from dataclasses import replace

import pytest
import torch

import lib.draft
from bench import kimi
from lib.captures import open_capture
from lib.checkpoints import load_draft
from lib.draft import DraftForward, to_device
from lib.errors import CaptureError
from lib.sweep import ordered_choices
from lib.transfer import BATCH_PAIRS, batch_pairs_for, batches_for, bytes_per_pair, staged
from tests.shape_device import DEVICE, ShapeDevice
from tests.support import speculators_draft
from tests.test_draft import TAPS, make_captures
from tests.test_mla import latent_draft

CPU = torch.device("cpu")
LENGTHS = (2, 9, 30, 31, 64, 70, 5, 80, 12)


@pytest.fixture(scope="module")
def draft(tmp_path_factory):
    folder = tmp_path_factory.mktemp("draft")
    speculators_draft().save_pretrained(folder)
    loaded = load_draft(folder)
    return replace(loaded, contract=loaded.contract.change(taps=TAPS[:3]))


@pytest.fixture(scope="module")
def captures():
    return make_captures(LENGTHS)


def readers() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name.startswith("states")]


def ended() -> bool:
    """Whether no reading thread is left, or is left for long."""
    for thread in readers():
        thread.join(10)
    return not readers()


# ---- reading ahead ---------------------------------------------------------------------------------


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, "both"])
@pytest.mark.parametrize("working", [torch.float32, torch.float64, torch.bfloat16])
def test_staged_states_are_the_states(draft, captures, stored, working):
    """Same batches, order, dtype and bits as read on demand, growing batches and a small last one."""
    if stored == "both":
        captures = [
            c.with_states(lambda x, i=i: x.bfloat16() if i % 2 else x) for i, c in enumerate(captures)
        ]
    else:
        captures = [c.with_states(lambda x: x.to(stored)) for c in captures]
    forward = DraftForward(to_device(draft, "cpu", working))
    plain = list(forward.batches(captures, batch_pairs=60))
    shapes = []
    for fresh, batch in zip(
        plain, staged(forward.batches(captures, batch_pairs=60), TAPS, CPU, threaded=True), strict=True
    ):
        assert batch.indices == fresh.indices and set(map(str, batch.states)) == set(TAPS)
        for tap in batch.states:
            assert batch.states[tap].dtype == working
            assert torch.equal(batch.states[tap], fresh.state(tap)), tap
        shapes.append(len(fresh.state(tap)))
    assert len(shapes) > 4 and len(set(shapes)) > 3, "batches of one size show nothing about reuse"
    assert ended()


def test_unthreaded_is_no_detour(draft, captures):
    """On a CPU the batches go through as they are: nothing read, no thread."""
    forward = DraftForward(draft)
    for batch in batches_for(forward, captures, [draft.contract]):
        assert not batch.states and not readers()


def test_at_most_two_batches_and_one_ahead(draft, captures):
    """While a batch is in use the next is read, unasked; no third one, and what is over is emptied."""
    forward, made, most = DraftForward(draft), [], []

    def watched(states):
        most.append(sum(bool(b.states) for b in made))  # whole ones beside the one that is being read
        return states

    def source():
        for batch in forward.batches([c.with_states(watched) for c in captures], batch_pairs=60):
            made.append(batch)
            yield batch

    for i, batch in enumerate(staged(source(), draft.contract.taps, CPU, threaded=True)):
        assert batch is made[i] and len(made) <= i + 2
        deadline = time.monotonic() + 20
        while len(made) > i + 1 and not made[i + 1].states:
            assert time.monotonic() < deadline, "the next batch is not read while this one is in use"
            time.sleep(0.001)
        forward.run(batch, draft.contract, 1, "teacher", False)
        assert sum(bool(b.states) for b in made) <= 2 and batch.products
    assert len(made) > 4 and max(most) == 1
    assert not any(b.states or b.products or b.embeds for b in made)


def test_errors_of_the_reader_reach_the_caller(draft, captures):
    """In the turn of the batch that they belong to; the batches before it are delivered."""
    forward = DraftForward(draft)
    order = [i for b in forward.batches(captures, batch_pairs=60) for i in b.indices]
    broken = list(captures)
    broken[order[-1]] = captures[order[-1]].with_states(lambda x: x * float("nan"))
    seen = []
    with pytest.raises(CaptureError, match=r"expected finite numbers.*NaN"):
        for batch in staged(forward.batches(broken, batch_pairs=60), TAPS, CPU, threaded=True):
            seen += batch.indices
    assert seen and order[-1] not in seen and seen == order[: len(seen)]
    assert ended()


@pytest.mark.parametrize("how", ["close", "drop", "break", "raise"])
def test_an_abandoned_iterator_ends_its_thread(draft, captures, how):
    """Closed, forgotten, left by `break` or by an error: no thread stays behind."""
    forward = DraftForward(draft)
    batches = staged(forward.batches(captures, batch_pairs=60), TAPS, CPU, threaded=True)
    if how in ("close", "drop"):
        next(batches)
        assert readers()
        if how == "close":
            batches.close()
        else:
            del batches
    else:
        with pytest.raises(ValueError if how == "raise" else StopIteration):
            for _ in batches:
                assert readers()
                if how == "raise":
                    raise ValueError("of the caller")
                break
            batches.close()
            next(batches)
        batches.close()
    assert ended()


# ---- what the host asks of the device --------------------------------------------------------------


@pytest.mark.parametrize("kind", ["grouped", "two layers", "latent"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_wait_for_the_device(tmp_path, captures, kind, dtype):
    """No op of the batch path needs a value of the device, mixes devices, or is missing; one fetch a run."""
    if kind == "latent":
        base, _ = latent_draft(layers=2)
    else:
        speculators_draft(layers=2 if kind == "two layers" else 1).save_pretrained(tmp_path)
        base = load_draft(tmp_path)
    contract = base.contract.change(taps=TAPS[:3])
    contracts = [contract.change(taps=taps) for taps in ordered_choices(TAPS, 3)[:6]]
    with ShapeDevice() as device, torch.inference_mode():
        forward = DraftForward(to_device(base, DEVICE, dtype))
        forward.table = base.embed.to(DEVICE, dtype)  # asked for the room it has, a real device answers
        for feed in ("teacher", "own"):
            parts = [
                forward.run(b, contract, 4, feed, False) for b in forward.batches(captures, batch_pairs=60)
            ]
            assert len(parts) > 4 and not device.fetched and device.live > 0
            predicted = forward.collect(parts, contract)
            assert device.fetched == [tuple(predicted.draft_ids.shape)], "the ids, once"
            device.fetched.clear()
        batches = list(forward.batches(captures, batch_pairs=60))
        for batch in batches:
            forward.scores(batch, contracts)
        assert len(device.fetched) == 2 * len(batches), "ids and scores of all candidates, once a batch"


def test_predict_on_the_device_is_whole(draft, captures):
    """The public calls run through on the device, teacher-fed and as a sweep; own feed without the table.

    A table that is not there sends ids through the CPU: one wait a depth and batch, as documented.
    """
    with ShapeDevice() as device:
        forward = DraftForward(to_device(draft, DEVICE))
        p = forward.predict(captures, depths=3, positions="all")
        assert p.draft_ids.shape == (sum(n - 1 for n in LENGTHS), 3) and len(device.fetched) == 1
        device.fetched.clear()
        forward.table = None
        batches = len(list(forward.batches(captures, batch_pairs=60)))
        forward.predict(captures, depths=3, feed="own", batch_pairs=60)
        assert len(device.fetched) == 1 + 2 * batches


def test_the_shape_device_sees_waits_and_mixtures():
    """The checks above are earned: each of these would pass on a GPU with a wait, or fail there only."""
    with ShapeDevice() as device:
        x = torch.ones(3).to(DEVICE)
        for wait in (x.sum().item, x.nonzero, x.unique, lambda: bool(x.any()), lambda: x[x > 0]):
            with pytest.raises((RuntimeError, NotImplementedError)):
                wait()
        for mixed in (lambda: x + torch.ones(3), lambda: x[torch.tensor([0, 1])]):
            with pytest.raises(AssertionError, match="both devices"):
                mixed()
        assert device.sent == 1 and device.live == 12 and not device.fetched
        assert x.cpu().shape == (3,) and device.fetched == [(3,)]
        z = torch.ones(5).to(DEVICE)
        view = z[:2]
        del z
        assert device.live == 12 + 20, "a view keeps the memory"
        del view
        assert device.live == 12 and device.peak >= 32


# ---- memory ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", kimi.KINDS)
@pytest.mark.parametrize("dtype, depths", [(torch.float32, 1), (torch.float32, 5), (torch.bfloat16, 5)])
def test_bytes_per_pair_against_the_peak(tmp_path, monkeypatch, kind, dtype, depths):
    """Growth of the peak of `run` by pair, tensor by tensor, at a sixteenth of Kimi's sizes.

    Short texts: for the meta device torch writes the attention's scores out, which CUDA's kernels do not.
    """
    sizes = kimi.Sizes(
        hidden=448, vocab=3000, draft_vocab=500, heads=4, head=128, rotary=64, rank=96, kv_rank=32,
        inner=(768, 1152), tokens=17,
    )  # fmt: skip
    base = load_draft(kimi.write(tmp_path / kind, kind, sizes), dtype=torch.float32)
    capture = open_capture(kimi.write_capture(tmp_path, sizes), taps=kimi.TAPS)
    for limit in ("LOGIT_BYTES", "SCORE_BYTES"):  # blocks of constant size, the same in both
        monkeypatch.setattr(lib.draft, limit, 1 << 14)
    peaks, texts = [], (8, 24)
    with torch.inference_mode(), ShapeDevice() as device:
        forward = DraftForward(to_device(base, DEVICE, dtype))
        forward.table = base.embed.to(DEVICE, dtype)
        contract = forward.draft.contract
        for n in texts:
            (batch,) = forward.batches([capture] * n, True, 10**6)
            device.peak = before = device.live
            for tap in contract.taps:
                batch.state(tap)
            result = forward.run(batch, contract, depths, "own", False)
            peaks.append(device.peak - before)
            del batch, result
    grown = (peaks[1] - peaks[0]) / ((texts[1] - texts[0]) * (len(capture) - 1))
    counted = bytes_per_pair(forward.draft, longest=len(capture), taps=3, products=3, depths=depths)
    counted -= 3 * sizes.hidden * dtype.itemsize  # the states that are read ahead, which `run` does not hold
    assert 1 <= counted / grown < 1.5, f"counted {counted:.0f} bytes, found {grown:.0f}"


def test_a_cpu_takes_its_constant(draft):
    assert batch_pairs_for(CPU, draft, 9, longest=9, taps=3, products=3, depths=1) == BATCH_PAIRS
