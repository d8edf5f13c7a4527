"""lib/evaluate.py: parts are what the library says of their files, whatever interrupts or damages them."""

from __future__ import annotations

import pickle
import shutil
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from bench import kimi
from lib import metric_table, metrics, sweep
from lib.acceptance import rollouts, walk
from lib.captures import open_capture, open_folder, save_capture
from lib.draft import DraftForward
from lib.errors import CheckpointError, MetricError
from lib.evaluate import (
    MANY_ANSWERS,
    NO_FINAL,
    NO_TARGET,
    Part,
    Plan,
    Tools,
    evaluate_all,
    evaluate_file,
    merge,
)
from lib.norms import PARTS, norm_statistics
from lib.sweep import ordered_choices
from lib.taps import Tap
from tests.support import HIDDEN, random_capture_tensors, speculators_draft, tiny_llama, write_legacy

NAMES = ("embed", "layer3", "layer4", "layer6")  # layer6 is the tiny target's last: its final state
DECLARED = NAMES[:3]
LENGTHS = (23, 31, 17, 28)
DEPTH = 4


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> dict[str, Path]:
    """A tiny draft, its tiny target, and four legacy captures."""
    folder = tmp_path_factory.mktemp("evaluate")
    rng = torch.Generator().manual_seed(2025)
    speculators_draft().save_pretrained(folder / "draft")
    tiny_llama().save_pretrained(folder / "target")
    (folder / "captures").mkdir()
    for i, length in enumerate(LENGTHS):
        write_legacy(folder / "captures" / f"data_{i}.pt", random_capture_tensors(length, rng))
    return {name: folder / name for name in ("draft", "target", "captures")}


def plan_of(files: dict[str, Path], **changes) -> Plan:
    values = {
        "draft": str(files["draft"]),
        "target": str(files["target"]),
        "names": (NAMES,),
        "wirings": (DECLARED, NAMES[1:]),
        "candidates": tuple(ordered_choices(NAMES, 3)),
        "depth": DEPTH,
    }
    return Plan(**(values | changes))


def pairs_of(folder: Path) -> list[tuple[Path, None]]:
    return [(p, None) for p in sorted(folder.iterdir())]


@pytest.fixture(scope="module")
def tools(files) -> Tools:
    return Tools(plan_of(files))


@pytest.fixture(scope="module")
def parts(files, tools, tmp_path_factory) -> list[Part]:
    """All four measured, written and read again."""
    work = tmp_path_factory.mktemp("work")
    evaluate_all(pairs_of(files["captures"]), tools, work)
    return evaluate_all(pairs_of(files["captures"]), tools, work)


@pytest.fixture(scope="module")
def captures(files):
    """The same through the library."""
    opened = open_folder(files["captures"], taps=NAMES).captures
    last = {"final_kind": "pre_norm"}
    return [replace(c, readers={**c.readers, "final": c.readers[Tap(6)]}, **last) for c in opened]


def test_norms_of_stored_parts_are_the_librarys(parts, captures):
    merged, direct = merge(parts).norms, norm_statistics(captures)
    assert list(merged) == [str(t) for t in direct]
    for tap, norms in direct.items():
        for part in PARTS:
            got, want = merged[str(tap)].parts[part], norms.parts[part]
            assert got.count == want.count
            if want.count:
                assert (got.mean, got.std) == pytest.approx((want.mean, want.std))
                assert (got.low, got.high) == (want.low, want.high)
                assert got.quantile(0.5) == pytest.approx(want.quantile(0.5), rel=0.02)


def test_digest_survives_storage(files, tools):
    path = files["captures"] / "data_0.pt"
    part = evaluate_file(path, tools.plan, tools=tools)
    again = Part.from_bytes(part.to_bytes())
    for tap, norms in part.norms.items():
        for q in (0.0, 0.01, 0.5, 0.9, 1.0):
            assert again.norms[tap].parts["all"].quantile(q) == norms.parts["all"].quantile(q)
    assert again.to_bytes() == part.to_bytes()


def test_sweep_of_merged_parts_is_the_sweep_of_all(parts, captures, tools):
    contracts = [tools.contract(c) for c in tools.plan.candidates]
    merged, direct = merge(parts).sweep(contracts), sweep.sweep(tools.forward, captures, contracts)
    assert torch.equal(merged.hits, direct.hits) and torch.equal(merged.counts, direct.counts)
    torch.testing.assert_close(merged.scores, direct.scores, atol=1e-4, rtol=1e-5)
    assert merged.winner == direct.winner
    assert merged.gap() == pytest.approx(direct.gap(), abs=1e-5)


@pytest.mark.parametrize("wiring", [0, 1])
def test_predictions_and_rounds_are_the_librarys(parts, captures, tools, wiring):
    contract = tools.contract(tools.plan.wirings[wiring])
    p = rollouts(tools.forward, captures, contract, DEPTH)
    totals = merge(parts)
    got = totals.predictions(wiring, contract)
    for name in ("capture", "position", "draft_ids", "target_ids", "truth", "in_vocab"):
        assert torch.equal(getattr(got, name), getattr(p, name)), name
    for depth in range(DEPTH):
        for ours, theirs in (
            (("in_vocab_hits", "in_vocab"), metrics.in_vocab_accuracy(p, depth)),
            (("hits", "counted"), metrics.all_token_accuracy(p, depth)),
            (("in_vocab", "counted"), metrics.coverage(p, depth)),
        ):
            hits, counts = (totals.sums(wiring, n)[:, depth] for n in ours)
            assert metrics.ratio(theirs.name, hits, counts) == theirs
        rounds = walk(p, captures, depth + 1)
        sums = {n: int(totals.sums(wiring, n)[:, depth].sum()) for n in ("rounds", "accepted", "gained")}
        want = (len(rounds), int(rounds.accepted.sum()), int(rounds.gained.sum()))
        assert tuple(sums.values()) == want
    joint = p.hit.int().cumprod(1).sum(0)
    assert torch.equal(totals.sums(wiring, "joint_hits").sum(0), joint)


def test_metric_table_of_merged_parts_is_the_librarys(parts, captures, tools):
    contract = tools.contract(DECLARED)
    got = metric_table.table(merge(parts).evidence(0, contract, tools.forward.in_vocab))
    want = metric_table.table(metric_table.evidence(captures, tools.forward.draft, tools.head, contract))
    numbers = ["value", "numerator", "denominator", "low", "high"]
    torch.testing.assert_close(
        torch.tensor(got[numbers].astype(float).values), torch.tensor(want[numbers].astype(float).values),
        equal_nan=True, atol=1e-5, rtol=1e-5,
    )  # fmt: skip
    assert (got["metric"] == want["metric"]).all()


def write_turns(folder: Path, mask: list[int], rng: torch.Generator) -> Path:
    """A text with this loss mask, in our own layout."""
    states = {Tap(k): torch.randn(len(mask), HIDDEN, generator=rng) for k in (0, 3, 4)}
    ids = torch.randint(0, 90, (len(mask),), generator=rng)
    path = folder / "turns.safetensors"
    save_capture(path, token_ids=ids, loss_mask=torch.tensor(mask), states=states)
    return path


@pytest.mark.parametrize(
    "mask, ends",
    [
        ([0] * 4 + [1] * 7 + [0] * 5 + [1] * 6, (11, 22)),  # two answers, the last to the end
        ([0] * 2 + [1] * 5 + [0] * 3 + [1] * 4 + [0] * 6, (7, 14)),  # user's turn last
        ([0] * 3 + [1] + [0] * 3 + [1] * 9, (4, 16)),  # an answer of one token: no round
    ],
)
def test_every_answer_is_walked_on_its_own(files, tools, tmp_path, rng, mask, ends):
    path = write_turns(tmp_path, mask, rng)
    plan = plan_of(files, wirings=(DECLARED,), candidates=(), names=())
    part = evaluate_file(path, plan, tools=tools.with_plan(plan))
    assert part.rollouts[0].answers == len(ends) and part.error == ""
    want, start = torch.zeros(3, dtype=torch.int64), 0
    whole = open_capture(path)
    for end in ends:
        alone = whole.loss_mask.clone()
        alone[:start] = False
        answer = replace(whole, loss_mask=alone).first(end)
        start = end
        if int(answer.loss_mask.sum()) < 2:
            continue
        r = walk(rollouts(tools.forward, [answer], tools.contract(DECLARED), DEPTH), [answer])
        want += torch.tensor([len(r), int(r.accepted.sum()), int(r.gained.sum())])
    assert torch.equal(part.rollouts[0].sums[5:, -1], want)


def test_why_there_is_no_evidence(files, tools, tmp_path, rng):
    path = write_turns(tmp_path, [0] * 4 + [1] * 7 + [0] * 5 + [1] * 6, rng)
    plan = plan_of(files, names=(), wirings=(DECLARED,), candidates=())
    assert evaluate_file(path, plan, tools=tools.with_plan(plan)).no_evidence == NO_FINAL
    data = load_file(path)
    data["tap.6"] = data["tap.4"].clone()  # the target's last block: the final state
    save_file(data, path, metadata={"format": "eagle3-workbook-capture"})
    assert evaluate_file(path, plan, tools=tools.with_plan(plan)).no_evidence == MANY_ANSWERS
    plan = replace(plan, target="")
    part = evaluate_file(files["captures"] / "data_0.pt", replace(plan, names=(NAMES,)))
    assert part.no_evidence == NO_TARGET and part.error == "" and not part.evidence


def stored(work: Path) -> dict[str, int]:
    """Finished parts and when they were written."""
    return {p.name: p.stat().st_mtime_ns for p in work.glob("*/*.safetensors")}


def test_interrupt_loses_the_file_in_flight_only(files, tools, tmp_path):
    def interrupt(items):
        for i, item in enumerate(items):
            if i == 2:  # a keyboard interrupt while the third is being measured
                signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGINT))
                # Again, because Python drops one that lands in a destructor, as in anybody's program.
                signal.setitimer(signal.ITIMER_REAL, 0.004, 0.02)
            yield item

    try:
        with pytest.raises(KeyboardInterrupt):
            evaluate_all(pairs_of(files["captures"]), tools, tmp_path, interrupt)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    before = stored(tmp_path)
    assert [name[:6] for name in sorted(before)] == ["data_0", "data_1"]
    resumed = evaluate_all(pairs_of(files["captures"]), tools, tmp_path)
    after = stored(tmp_path)
    assert len(after) == len(LENGTHS) and {k: after[k] for k in before} == before
    assert not list(tmp_path.glob("*/.*")), "temporary files are left"
    direct = [evaluate_file(p, tools.plan, tools=tools) for p, _ in pairs_of(files["captures"])]
    assert [p.to_bytes() for p in resumed] == [p.to_bytes() for p in direct]


@pytest.mark.parametrize("damage", ["half", "empty", "other plan", "no part"])
def test_a_damaged_part_is_measured_again(files, tools, tmp_path, damage):
    pair = pairs_of(files["captures"])[:1]
    [want] = evaluate_all(pair, tools, tmp_path)
    [path] = tmp_path.glob("*/*.safetensors")
    blob = path.read_bytes()
    if damage == "other plan":
        replace(want, plan="0" * 64, count=10**6).save(path)
    elif damage == "no part":
        save_file({"hits": torch.zeros(2)}, path)
    else:
        path.write_bytes(blob[: len(blob) // 2] if damage == "half" else b"")
    [got] = evaluate_all(pair, tools, tmp_path)
    assert got.to_bytes() == want.to_bytes() and path.read_bytes() == blob


def test_a_half_written_file_is_never_read(files, tools, tmp_path):
    pair = pairs_of(files["captures"])[:1]
    [want] = evaluate_all(pair, tools, tmp_path)
    [path] = tmp_path.glob("*/*.safetensors")
    path.rename(path.with_name(f".{path.name}.123"))  # as a killed writer leaves it
    [got] = evaluate_all(pair, tools, tmp_path)
    assert path.exists() and got.to_bytes() == want.to_bytes()


def test_a_changed_capture_is_measured_again(files, tools, tmp_path, rng):
    folder = tmp_path / "captures"
    shutil.copytree(files["captures"], folder)
    before = evaluate_all(pairs_of(folder), tools, tmp_path / "work")
    write_legacy(folder / "data_1.pt", random_capture_tensors(LENGTHS[1], rng))
    after = evaluate_all(pairs_of(folder), tools, tmp_path / "work")
    same = [a.tokens == b.tokens for a, b in zip(before, after, strict=True)]
    assert same == [True, False, True, True]


def test_fingerprint_changes_with_the_draft_and_the_plan(files, tmp_path):
    draft = tmp_path / "draft"
    shutil.copytree(files["draft"], draft)
    plan = plan_of(files, draft=str(draft), target="")
    prints = {plan.fingerprint(), plan.fingerprint(), replace(plan, depth=7).fingerprint()}
    assert len(prints) == 2
    weights = draft / "model.safetensors"
    tensors = load_file(weights)
    time.sleep(0.02)  # the file's time must be able to differ
    save_file({k: v + 1 if k == "fc.weight" else v for k, v in tensors.items()}, weights)
    assert plan.fingerprint() not in prints, "retrained in place: same names, shapes and sizes"


@pytest.mark.parametrize("layout", ["file", "inner", "consolidated", "meta"])
def test_fingerprint_sees_every_file_that_is_read(files, tmp_path, layout):
    """A config beside a weights file, Automodel's inner folders, and the map around them."""
    inside = {"file": ".", "inner": "model", "consolidated": "model/consolidated", "meta": "model"}[layout]
    draft, folder = tmp_path / "draft", tmp_path / "draft" / inside
    shutil.copytree(files["draft"], folder)
    if layout == "meta":
        torch.save({"maps": torch.arange(3)}, draft / "eagle_meta.pt")
    plan = plan_of(files, draft=str(folder / "model.safetensors" if layout == "file" else draft), target="")
    before = plan.fingerprint()
    changed = draft / "eagle_meta.pt" if layout == "meta" else folder / "config.json"
    changed.write_bytes(changed.read_bytes() + b" ")
    assert plan.fingerprint() != before


def test_an_overwritten_draft_does_not_lend_its_name(files, tmp_path, rng):
    """Tools hold the weights that they loaded; their parts must be named after these, for every plan."""
    draft = tmp_path / "draft"
    shutil.copytree(files["draft"], draft)
    plan = plan_of(files, draft=str(draft), target="", candidates=())
    tools, before = Tools(plan), plan.fingerprint()
    weights = draft / "model.safetensors"
    tensors = load_file(weights)
    time.sleep(0.02)  # the file's time must be able to differ
    save_file({k: v + 1 for k, v in tensors.items()}, tmp_path / "new")
    (tmp_path / "new").replace(weights)
    assert tools.with_plan(plan).fingerprint == before != plan.fingerprint()
    other = replace(plan, depth=2)
    assert tools.with_plan(other).fingerprint not in (before, other.fingerprint())


@pytest.mark.parametrize("dtype, fault", [("float16", 60000.0), ("float32", 3e38)])
@pytest.mark.parametrize("swept", [True, False])
def test_outputs_that_are_no_numbers_are_no_misses(files, tmp_path, dtype, fault, swept):
    """fp16 overflows at 65504, fp32 at 3.4e38: a failed part that says so, not an accuracy of zero."""
    draft = tmp_path / "draft"
    shutil.copytree(files["draft"], draft)
    tensors = load_file(draft / "model.safetensors")
    tensors["lm_head.weight"][:] = fault
    save_file(tensors, draft / "model.safetensors")
    plan = plan_of(files, draft=str(draft), target="", dtype=dtype, **({} if swept else {"candidates": ()}))
    part = evaluate_file(files["captures"] / "data_0.pt", plan)
    assert part.error_kind == "MetricError" and "scores: expected finite" in part.error
    assert f"dtype {dtype}" in part.error and str(draft) in part.error
    with pytest.raises(MetricError, match=r"none of 1; the first: .*NaN or Inf"):
        merge([part])


@pytest.mark.parametrize(
    "error, failed",
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB"), True),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), True),
        (MemoryError("no room"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
    ],
)
def test_a_text_too_large_for_memory_is_a_failed_file(files, tools, error, failed, monkeypatch):
    """Only that: any other fault of the program stops it."""

    def refuse(*_args, **_kwargs):
        raise error

    monkeypatch.setattr(tools.forward, "predict", refuse)
    path = files["captures"] / "data_0.pt"
    if not failed:
        with pytest.raises(RuntimeError, match="mat1"):
            evaluate_file(path, tools.plan, tools=tools)
        return
    part = evaluate_file(path, tools.plan, tools=tools)
    assert part.error_kind == "MetricError" and "memory: expected room" in part.error
    assert str(error)[:20] in part.error and "shorter" in part.error and "device=cpu" in part.error


def test_the_benchmarks_capture_is_of_its_sizes(tmp_path):
    """A file of another run's sizes in the same folder is not taken for this one's."""
    for tokens in (9, 12):
        path = kimi.write_capture(tmp_path, kimi.Sizes(hidden=4, vocab=50, tokens=tokens))
        assert load_file(path)["hidden_states"].shape == (tokens, len(kimi.TAPS), 4)


def test_failed_files_are_named_and_tried_again(files, tools, tmp_path, rng):
    folder = tmp_path / "captures"
    shutil.copytree(files["captures"], folder)
    good = (folder / "data_2.pt").read_bytes()
    (folder / "data_2.pt").write_bytes(good[:100])
    tensors = random_capture_tensors(LENGTHS[3], rng)
    tensors["hidden_states"][1][5, 3] = float("nan")
    write_legacy(folder / "data_3.pt", tensors)
    totals = merge(evaluate_all(pairs_of(folder), tools, tmp_path / "work"))
    assert [Path(p.file).name for p in totals.failed] == ["data_2.pt", "data_3.pt"]
    assert all(p.error_kind == "CaptureError" and p.file in p.error for p in totals.failed)
    assert "layer3" in totals.failed[1].error and "position 5" in totals.failed[1].error
    assert len(totals.parts) == 2
    stamp = (folder / "data_2.pt").stat()
    (folder / "data_2.pt").write_bytes(good)
    assert len(merge(evaluate_all(pairs_of(folder), tools, tmp_path / "work")).parts) == 3
    assert stamp.st_size != len(good)


def test_worker_processes_can_be_handed_everything(files, tools):
    path = files["captures"] / "data_0.pt"
    plan, other = pickle.loads(pickle.dumps((tools.plan, tools)))
    part = pickle.loads(pickle.dumps(evaluate_file(path, plan, tools=other)))
    assert len(pickle.dumps(tools)) < 10_000, "weights travel with the tools"
    assert part.to_bytes() == evaluate_file(str(path), tools.plan).to_bytes()
    assert isinstance(other.forward, DraftForward)


def test_parts_of_two_plans_are_not_merged(files, tools, parts):
    plan = replace(tools.plan, depth=2)
    other = evaluate_file(files["captures"] / "data_0.pt", plan, tools=tools.with_plan(plan))
    with pytest.raises(MetricError, match=r"one plan.*2 plans"):
        merge([*parts, other])
    with pytest.raises(MetricError, match=r"none of 1; the first: .*gone.pt"):
        merge([evaluate_file(files["captures"] / "gone.pt", plan, tools=tools)])


def test_a_draft_at_fault_is_no_failed_file(files, tmp_path):
    with pytest.raises(CheckpointError, match="nowhere"):
        evaluate_file(files["captures"] / "data_0.pt", plan_of(files, draft=str(tmp_path / "nowhere")))


def test_norms_alone_need_no_draft(files, parts, tmp_path):
    """A plan without a draft: the same norms, nothing else; asked for more, it says what is lacking."""
    plan = Plan("", names=(NAMES,), metrics=False)
    (path, _), *_ = pairs_of(files["captures"])
    part = evaluate_file(path, plan)
    assert not part.error and not part.rollouts and not len(part.hits)
    for tap, norms in part.norms.items():
        assert norms.parts["all"].mean == parts[0].norms[tap].parts["all"].mean
    again = Part.from_bytes(part.to_bytes())
    assert again.norms.keys() == part.norms.keys() == set(NAMES)
    with pytest.raises(MetricError, match="name a draft"):
        Tools(replace(plan, wirings=(DECLARED,))).contract(DECLARED)
