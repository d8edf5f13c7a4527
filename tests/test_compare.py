"""lib/compare.py: paired differences of two reports, against the library's own paired difference."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lib import metrics, report
from lib.acceptance import rollouts, walk
from lib.captures import open_folder
from lib.checkpoints import load_draft
from lib.compare import LIKELIHOOD, METRICS, compare, read_report
from lib.draft import DraftForward
from lib.errors import ReportError
from lib.metrics import bootstrap_interval, resample_weights
from tests.support import random_capture_tensors, speculators_draft, write_legacy

NAMES = "embed,layer3,layer4,layer5"
OTHER = "layer5,layer4,embed,layer3"  # the same files, their states called otherwise: another wiring
DEPTH = 3
LENGTHS = (30, 41, 25, 52, 37)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Two drafts that differ in their weights, and five captures."""
    folder = tmp_path_factory.mktemp("compare")
    rng = torch.Generator().manual_seed(11)
    for i, name in enumerate(("one", "two")):
        speculators_draft(seed=i).save_pretrained(folder / name)
    (folder / "captures").mkdir()
    for i, length in enumerate(LENGTHS):
        write_legacy(folder / "captures" / f"data_{i}.pt", random_capture_tensors(length, rng))
    return folder


def reported(folder: Path, out: str, draft: str = "one", captures: str = "captures", **more) -> Path:
    """A report of this folder, written; its path."""
    values = {"taps": NAMES, "depth": DEPTH, "out": str(folder / out)} | more
    asked = report.Request(str(folder / draft), str(folder / captures), **values)
    return report.build(asked, folder / "parts").save()


@pytest.fixture(scope="module")
def before(folder) -> Path:
    return reported(folder, "before")


@pytest.fixture(scope="module")
def after(folder) -> Path:
    return reported(folder, "after", taps=OTHER)


def test_a_report_equals_itself(before):
    found = compare(before, before)
    assert len(found.rows) == len(METRICS) * DEPTH + 1 and len(found.paired) == len(LENGTHS)
    for row in found.rows:
        assert (row.difference, row.low, row.high, row.clear) == (0, 0, 0, False), row
    assert found.only_before == found.only_after == found.notes == ()


def test_difference_is_the_librarys(folder, before, after):
    """The library pairs two predictions of the same positions; the report pairs stored sums."""
    forward = DraftForward(load_draft(folder / "one"))
    p, captures = {}, {}
    for name, taps in (("before", NAMES), ("after", OTHER)):
        captures[name] = open_folder(folder / "captures", taps=taps.split(",")).captures
        p[name] = rollouts(forward, captures[name], depth=DEPTH)
    table = compare(before, after).table()
    for depth in range(DEPTH):
        want = metrics.difference(p["after"], p["before"], depth)
        row = table.loc[("in-vocab accuracy", depth)]
        assert (row["difference"], row["low"], row["high"]) == pytest.approx(want, abs=1e-12)
        assert row["before"] == metrics.in_vocab_accuracy(p["before"], depth).value
        for name in ("before", "after"):
            rounds = walk(p[name], captures[name], depth + 1)
            assert table.loc[("tokens per round", depth + 1)][name] == pytest.approx(rounds.tokens_per_round)
    # Another ratio of sums, by hand: both sides of a conversation are drawn together.
    gained, rounds = (
        {n: torch.tensor([f(p[n], captures[n], i) for i in range(len(LENGTHS))]).double() for n in p}
        for f in (_gained, _rounds)
    )
    w = resample_weights(len(LENGTHS))
    values = (w @ gained["after"]) / (w @ rounds["after"]) - (w @ gained["before"]) / (w @ rounds["before"])
    row = table.loc[("tokens per round", DEPTH)]
    assert (row["low"], row["high"]) == pytest.approx(bootstrap_interval(values))


def _gained(p, captures, i: int) -> int:
    r = walk(p, captures)
    return int(r.gained[r.capture == i].sum())


def _rounds(p, captures, i: int) -> int:
    return int((walk(p, captures).capture == i).sum())


def test_log_likelihood_is_that_of_the_reports(before, after):
    row = compare(before, after).rows[-1]
    values = [read_report(p)["results"]["declared"]["log_likelihood"]["value"] for p in (before, after)]
    assert row.metric == LIKELIHOOD and (row.before, row.after) == pytest.approx(values)
    assert row.low <= row.difference <= row.high


def test_pairing_is_tighter_than_two_intervals(before, after):
    """What pairing is for: the interval of the difference is narrower than the two intervals together."""
    row = compare(before, after).rows[-1]
    alone = [read_report(p)["results"]["declared"]["log_likelihood"] for p in (before, after)]
    assert row.high - row.low < sum(x["high"] - x["low"] for x in alone)


def test_the_better_contract_is_compared_when_asked(folder, before, after):
    found = compare(before, after, "best")
    wanted = tuple(tuple(read_report(p)["results"]["best"]["taps"]) for p in (before, after))
    assert found.which == "best" and found.taps == wanted
    # The best wiring of the same draft on the same states is the same, whatever the states are called.
    assert all(row.difference == 0 for row in found.rows)
    assert any(row.difference != 0 for row in compare(before, after).rows)


def test_a_report_without_a_better_contract(folder, before, tmp_path):
    data = read_report(before)
    data["results"]["best"] = None
    for row in data["files"]["read"]:
        row["best"] = None
    path = tmp_path / "report.json"
    path.write_text(json.dumps(data))
    found = compare(path, before, "best")
    assert found.notes == ("before: the declared contract is the best one",)
    assert found.taps[0] == tuple(data["results"]["declared"]["taps"])


def test_another_draft_another_depth_and_fewer_files(folder, before):
    other = reported(folder, "other", draft="two", depth=2, limit=4)
    found = compare(before, other)
    assert found.only_before == ("data_4",) and found.only_after == () and len(found.paired) == 4
    assert {r.depth for r in found.rows if r.metric == "joint accuracy"} == {0, 1}
    assert any("vocabularies differ" in n for n in found.notes)
    back = compare(other, before)
    assert back.only_after == ("data_4",)
    for a, b in zip(found.rows, back.rows, strict=True):
        assert a.difference == pytest.approx(-b.difference) and a.low == pytest.approx(-b.high)


def test_another_text_under_the_same_name(folder, before, rng):
    (folder / "others").mkdir()
    for i, length in enumerate(LENGTHS):
        write_legacy(folder / "others" / f"data_{i}.pt", random_capture_tensors(length, rng))
    with pytest.raises(ReportError, match=r"files: data_0: expected the tokens that .* another text"):
        compare(before, reported(folder, "others-out", captures="others"))


def masked(folder: Path, name: str, mask_of) -> None:
    """The captures once more, with other loss masks."""
    (folder / name).mkdir()
    for file in (folder / "captures").iterdir():
        data = torch.load(file, weights_only=True)
        write_legacy(folder / name / file.name, data | {"loss_mask": mask_of(data["loss_mask"])})


@pytest.mark.parametrize(
    "name, mask_of",
    [
        ("longer", lambda m: torch.ones_like(m)),
        # As many scored positions, but elsewhere: fewer of them have text behind them for every depth.
        ("earlier", lambda m: m.roll(-2)),
    ],
)
def test_other_loss_masks_are_no_other_vocabulary(folder, before, name, mask_of):
    masked(folder, name, mask_of)
    with pytest.raises(
        ReportError, match=r"scored: expected what .* scores of this text.*loss_masks="
    ) as error:
        compare(before, reported(folder, f"{name}-out", captures=name))
    assert error.value.field.startswith("files: data_")


def test_few_conversations_are_never_clear(folder):
    """One conversation has an interval without width: it must not look like certainty."""
    one = [reported(folder, f"one-{i}", taps=t, limit=1) for i, t in enumerate((NAMES, OTHER))]
    found = compare(*one)
    assert any(r.difference and r.low == r.high for r in found.rows) and not any(r.clear for r in found.rows)
    assert found.notes == ("1 conversations are too few for intervals (at least 5): none is clear",)
    row = next(r for r in found.rows if r.difference)
    assert replace(row, conversations=5).clear and not replace(row, conversations=4).clear


def test_nothing_that_counts(before, tmp_path):
    data = read_report(before)
    for row in data["files"]["read"]:
        for side in (row["declared"], row["best"]):
            side |= {k: [0] * DEPTH for k in side if isinstance(side[k], list)} | {"tokens": 0}
    path = tmp_path / "report.json"
    path.write_text(json.dumps(data))
    with pytest.raises(ReportError, match="in which something is counted"):
        compare(path, path)


def test_no_conversation_in_both(folder, before, rng):
    (folder / "elsewhere").mkdir()
    write_legacy(folder / "elsewhere" / "data_77.pt", random_capture_tensors(30, rng))
    with pytest.raises(ReportError, match=r"conversations that .* found none of the same name"):
        compare(before, reported(folder, "elsewhere-out", captures="elsewhere"))


def change(data: dict, path: tuple, value) -> str:
    inner = data
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return json.dumps(data)


@pytest.mark.parametrize(
    "content, said",
    [
        ("", "json: expected a readable"),
        ("[1, 2", "json: expected a readable"),
        ("NaN", "json: expected a readable"),
        ("[]", "describes"),
        ('{"schema": "eagle3-workbook-report"}', "describes"),
        (("schema",), "describes"),
        (("files", "read", 0, "declared", "hits"), "describes"),
        (("files", "read", 0, "declared", "hits", 1), "describes"),
        (("results", "declared"), "describes"),
    ],
)
def test_what_is_no_report_is_refused(before, tmp_path, content, said):
    path = tmp_path / "report.json"
    path.write_text(content if isinstance(content, str) else change(read_report(before), content, "other"))
    with pytest.raises(ReportError, match=said) as error:
        compare(before, path)
    assert error.value.where == str(path)


@pytest.mark.parametrize(
    "path, value, said",
    [
        (("files", "read", 1, "declared", "log_likelihood"), "1e999", "finite number"),
        (("files", "read", 1, "declared", "gained", 0), 10**30, "finite number"),
        (("files", "read", 2, "declared", "in_vocab"), [1], "3 entries, one per depth"),
        (("files", "read", 0, "best", "rounds"), [1, 1, 1, 1], "3 entries, one per depth"),
        (("files", "read", 0, "declared", "hits"), [[1], [1], [1]], "describes"),
        (("files", "read", 0, "declared", "hits"), [1, [1], 1], "describes"),
        (("results", "declared", "acceptance"), [], "3 entries, one per depth"),
        (("request", "depth"), 5, "5 entries, one per depth"),
        (("files", "read", 1, "best"), None, "sums of every file"),
    ],
)
def test_numbers_and_lists_that_no_report_holds(before, tmp_path, path, value, said):
    file = tmp_path / "report.json"
    file.write_text(change(read_report(before), path, value).replace('"1e999"', "1e999"))
    with pytest.raises(ReportError, match=said):
        compare(before, file)


def test_two_files_of_one_name_are_refused(before, tmp_path):
    data = read_report(before)
    data["files"]["read"].append(data["files"]["read"][0])
    path = tmp_path / "report.json"
    path.write_text(json.dumps(data))
    with pytest.raises(ReportError, match="one row per name"):
        compare(path, before)
    with pytest.raises(ReportError, match="'declared' or 'best'"):
        compare(before, before, "worst")


def test_depth_alone_is_no_other_vocabulary(folder, before):
    found = compare(before, reported(folder, "shallow", depth=1))
    assert found.notes == () and {r.difference for r in found.rows} == {0.0}


def test_command_line(before, after, tmp_path, capsys):
    out = tmp_path / "comparison.json"
    report.main(["compare", str(before), str(after), "--out", str(out)])
    printed = capsys.readouterr().out
    assert "tokens per round" in printed and "5 conversations in both" in printed
    assert "nan" not in printed.lower() and "None" not in printed
    written = json.loads(out.read_text())
    assert written["schema"] == "eagle3-workbook-comparison"
    assert len(written["rows"]) == len(compare(before, after).rows)
