"""The draft forward on a CUDA device. What of it can be known without one is in test_transfer.py."""

from __future__ import annotations

import warnings
from dataclasses import replace

import pytest
import torch

from lib.acceptance import rollouts, walk
from lib.checkpoints import load_draft
from lib.draft import DraftForward, to_device
from lib.evaluate import Plan, Tools, evaluate_file
from lib.sweep import ordered_choices, race, sweep
from lib.transfer import MOST_PAIRS, batch_pairs_for, batches_for, bytes_per_pair, staged
from tests.support import random_capture_tensors, speculators_draft, write_legacy
from tests.test_draft import TAPS, make_captures, same
from tests.test_mla import latent_draft

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(), reason="no CUDA device: `pytest -m gpu` where there is one"
    ),
]

DEPTHS = 5
LENGTHS = (2, 3, 9, 30, 31, 64, 120, 121, 300)
KINDS = ("grouped", "two layers", "latent")


@pytest.fixture(scope="module")
def drafts(tmp_path_factory):
    """In float64 on the CPU, by kind."""
    made = {"latent": latent_draft(layers=2)[0]}
    for kind, layers in (("grouped", 1), ("two layers", 2)):
        folder = tmp_path_factory.mktemp("draft")
        speculators_draft(layers=layers).save_pretrained(folder)
        made[kind] = load_draft(folder, dtype=torch.float64)
    return {k: replace(d, contract=d.contract.change(taps=TAPS[:3])) for k, d in made.items()}


@pytest.fixture(scope="module")
def captures():
    return make_captures(LENGTHS)


def on_gpu(draft, dtype=torch.float32) -> DraftForward:
    return DraftForward(to_device(draft, "cuda", dtype))


# ---- the same numbers ------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-9), (torch.float32, 1e-4)])
def test_every_depth_equals_the_cpu_in_float64(drafts, captures, kind, dtype, tolerance):
    """Teacher-fed logits at every depth within rounding: one that grew with depth would be a wiring fault."""
    options = {"depths": DEPTHS, "positions": "all", "keep_logits": True}
    exact = DraftForward(drafts[kind]).predict(captures, **options)
    found = on_gpu(drafts[kind], dtype).predict(captures, **options)
    for column in ("capture", "position", "truth", "in_vocab"):
        assert torch.equal(getattr(found, column), getattr(exact, column)), column
    for depth in range(DEPTHS):
        assert same(found.logits[:, depth].double(), exact.logits[:, depth], tolerance), f"depth {depth}"
    top = exact.logits.topk(2).values
    decided = (top[..., 0] - top[..., 1]) > 10 * tolerance * exact.logits.abs().max()
    assert torch.equal(found.draft_ids[decided], exact.draft_ids[decided]) and decided.double().mean() > 0.9


@pytest.mark.parametrize("kind", KINDS)
def test_bf16_is_no_further_away_than_on_the_cpu(drafts, captures, kind):
    """Both round to 8 bits; the GPU's gap to float64 is at most twice the CPU's, at every depth."""
    options = {"depths": DEPTHS, "positions": "all", "keep_logits": True}
    exact = DraftForward(drafts[kind]).predict(captures, **options).logits
    gaps = []
    for device in ("cpu", "cuda"):
        forward = DraftForward(to_device(drafts[kind], device, torch.bfloat16))
        found = forward.predict(captures, **options).logits
        assert found.dtype == torch.bfloat16
        gaps.append((found.double() - exact).abs().mean((0, 2)))  # (D,)
    assert (gaps[1] <= 2 * gaps[0]).all(), f"CPU {gaps[0].tolist()}, CUDA {gaps[1].tolist()}"
    assert (gaps[1] > 0).all()


@pytest.mark.parametrize("kind", KINDS)
def test_rollouts_and_rounds_equal_the_cpu(drafts, captures, kind):
    """Own tokens fed back, in float64: the same chains and the same rounds; without the table as with it."""
    texts = [c for c in captures if len(c) > 8]
    expected = rollouts(DraftForward(drafts[kind]), texts, depth=DEPTHS)
    forward = on_gpu(drafts[kind], torch.float64)
    found = rollouts(forward, texts, depth=DEPTHS)
    assert forward.table is not None and forward.table.is_cuda
    assert torch.equal(found.target_ids, expected.target_ids)
    assert walk(found, texts).accepted.tolist() == walk(expected, texts).accepted.tolist()
    forward.table = None
    assert torch.equal(rollouts(forward, texts, depth=DEPTHS).target_ids, expected.target_ids)


def test_sweep_and_race_equal_the_cpu(drafts, captures):
    texts = captures + make_captures([40] * 12, seed=1)
    contracts = [drafts["grouped"].contract.change(taps=taps) for taps in ordered_choices(TAPS, 3)]
    exact = sweep(DraftForward(drafts["grouped"]), texts, contracts)
    found = sweep(on_gpu(drafts["grouped"], torch.float64), texts, contracts)
    assert torch.equal(found.hits, exact.hits) and torch.equal(found.counts, exact.counts)
    assert same(found.scores, exact.scores)
    raced = race(on_gpu(drafts["grouped"], torch.float64), texts, contracts)
    expected = race(DraftForward(drafts["grouped"]), texts, contracts)
    assert torch.equal(raced.seen, expected.seen) and torch.equal(raced.hits, expected.hits)
    single = sweep(on_gpu(drafts["grouped"]), texts, contracts)
    assert single.winner == exact.winner and same(single.scores, exact.scores, 1e-4)


# ---- no waiting ------------------------------------------------------------------------------------


def waits(call) -> int:
    """How often the calling program waited for the device, as torch counts it."""
    torch.cuda.synchronize()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            call()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum("synchroniz" in str(w.message) for w in caught)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("feed", ["teacher", "own"])
def test_the_batch_path_never_waits(drafts, captures, kind, feed):
    """`run` of staged batches with every synchronising call an error; warmed up, so that tables are there."""
    forward = on_gpu(drafts[kind])
    contract = forward.draft.contract
    expected = forward.predict(captures, depths=DEPTHS, feed=feed, batch_pairs=200)

    def run():
        batches = batches_for(forward, captures, [contract], DEPTHS, batch_pairs=200)
        return [forward.run(b, contract, DEPTHS, feed, False) for b in batches]

    torch.cuda.set_sync_debug_mode("error")
    try:
        parts = run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(parts) > 2
    assert torch.equal(forward.collect(parts, contract).target_ids, expected.target_ids)


def test_waits_do_not_grow_with_the_captures(drafts):
    """One fetch a `predict`, one or two a batch of a sweep, however many captures and batches."""
    forward = on_gpu(drafts["grouped"])
    contract = forward.draft.contract
    few, many = make_captures([40] * 4), make_captures([40] * 64)
    forward.predict(many, depths=3, feed="own")
    counts = [
        waits(lambda c=c: forward.predict(c, depths=3, feed="own", batch_pairs=80)) for c in (few, many)
    ]
    assert counts[0] == counts[1] == 1, counts
    contracts = [contract.change(taps=taps) for taps in ordered_choices(TAPS, 3)]
    swept = [waits(lambda n=n: sweep(forward, many, contracts[:n])) for n in (2, 24)]
    assert swept[0] == swept[1] > 0, "candidates of a batch are fetched together"
    assert waits(lambda: torch.ones(1, device="cuda").item()) == 1, "the count sees no wait at all"


# ---- transfer --------------------------------------------------------------------------------------


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("working", [torch.float32, torch.bfloat16])
def test_staged_states_under_load(drafts, stored, working):
    """Growing and shrinking batches while the device is busy with the last: each state is its capture's."""
    captures = [c.with_states(lambda x: x.to(stored)) for c in make_captures([9, 300, 11, 250, 40, 280] * 6)]
    forward = on_gpu(drafts["grouped"], working)
    sizes = [5, 1, 9, 2, 8, 1, 10]
    groups, start = [], 0
    for size in sizes:
        groups.append(captures[start : start + size])
        start += size
    load, sums, expected = torch.randn(3000, 3000, device="cuda"), [], []
    batches = (b for group in groups for b in forward.batches(group, True, 10**6))
    for group, batch in zip(groups, staged(batches, TAPS, forward.device), strict=True):
        for _ in range(5):
            load = torch.tanh(load @ load)  # the copy of the next batch overtakes this
        order = batch.indices
        for tap in batch.states:
            assert batch.states[tap].is_cuda and batch.states[tap].dtype == working
            sums.append(batch.states[tap].clone())
            expected.append(torch.cat([group[i].state(tap)[:-1] for i in order]).to(working))
    for found, state in zip(sums, expected, strict=True):
        assert torch.equal(found.cpu(), state)


def test_staging_holds_two_batches(drafts):
    """Device memory does not grow with the number of batches, though the host never waits."""
    forward = on_gpu(drafts["grouped"])
    peaks = []
    for n in (6, 60):
        captures = make_captures([200] * n)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        forward.predict(captures, batch_pairs=400)
        peaks.append(torch.cuda.max_memory_allocated() - before)
    ids = 8 * 54 * 200 * 2  # what the longer run has to keep: its ids, twice while they are joined
    assert peaks[1] <= 1.1 * peaks[0] + ids + (1 << 20), peaks


def test_the_device_decides_the_batch(drafts):
    """Within what is free, never more than the limit; the peak keeps to the count."""
    forward = on_gpu(drafts["grouped"])
    work = {"longest": 301, "taps": 3, "products": 3, "depths": DEPTHS}
    pairs = batch_pairs_for(forward.device, forward.draft, 1 << 30, **work)
    assert 1 <= pairs <= MOST_PAIRS
    captures = make_captures([301] * 40)
    forward.predict(captures[:1], depths=DEPTHS, feed="own")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    forward.predict(captures, depths=DEPTHS, feed="own", positions="all", batch_pairs=40 * 301)
    used = torch.cuda.max_memory_allocated() - before
    blocks = 6 * (64 << 20)  # SCORE_BYTES and LOGIT_BYTES with their copies
    assert used <= 40 * 300 * bytes_per_pair(forward.draft, **work) + blocks


def test_out_of_memory_is_a_failed_file(tmp_path, rng):
    """The device's own refusal ends as the typed error of `evaluate_file`, and the next file goes well."""
    speculators_draft().save_pretrained(tmp_path / "draft")
    files = [
        write_legacy(tmp_path / f"data_{i}.pt", random_capture_tensors(n, rng))
        for i, n in enumerate((20_000, 40))
    ]
    plan = Plan(
        draft=str(tmp_path / "draft"), target="", names=(TAPS,), wirings=(TAPS[:3],), candidates=(),
        depth=3, device="cuda",
    )  # fmt: skip
    tools = Tools(plan)
    evaluate_file(files[1], plan, tools=tools)  # the libraries' own workspaces are taken
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    try:
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + (24 << 20)) / total)
        failed = evaluate_file(files[0], plan, tools=tools)
        well = evaluate_file(files[1], plan, tools=tools)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert failed.error_kind == "MetricError" and "memory: expected room" in failed.error
    assert not well.error
