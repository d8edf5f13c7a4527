"""lib/report.py and what it is made of: a report says what the library says, for every mixture of files."""

from __future__ import annotations

import json
import math
import os
import pty
import re
import shutil
import subprocess
import sys
import termios
from dataclasses import asdict, replace
from pathlib import Path

import nbformat
import pytest
import torch
from safetensors.torch import save_file

from lib import metrics, samples, sweep
from lib.acceptance import rollouts, walk
from lib.captures import capture_files, open_folder, save_capture
from lib.checkpoints import load_draft
from lib.compare import SCHEMA, check_report
from lib.draft import DraftForward
from lib.errors import CaptureError, ContractError, MetricError, ReportError
from lib.inputs import pair_up
from lib.metric_table import evidence, table
from lib.norms import norm_statistics, norm_table
from lib.report import FEW_FILES, JUDGED, MOST_ORDERED, Report, Request, build, main, make
from lib.taps import Tap
from lib.target_head import load_target_head
from tests.capture_writers import WRITERS, native
from tests.support import (
    HIDDEN,
    random_capture_tensors,
    speculators_draft,
    tiny_llama,
    write_legacy,
    write_stack,
)

NAMES = "embed,layer3,layer4,layer5"
DEPTH = 4


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    """A folder with a tiny draft and its tiny target."""
    folder = tmp_path_factory.mktemp("models")
    speculators_draft().save_pretrained(folder / "draft")
    tiny_llama().save_pretrained(folder / "target")
    return folder


def legacy_folder(folder: Path, rng: torch.Generator, n: int = 4, states: int = 4) -> Path:
    folder.mkdir()
    for i in range(n):
        write_legacy(folder / f"data_{i}.pt", random_capture_tensors(20 + 3 * i, rng, states))
    return folder


def request(models: Path, captures: Path, **changes) -> Request:
    values = {
        "draft": str(models / "draft"), "captures": str(captures), "taps": NAMES, "depth": DEPTH,
        "out": str(captures.parent / "out"),
    }  # fmt: skip
    return Request(**(values | changes))


@pytest.fixture(scope="module")
def simple(models, tmp_path_factory) -> tuple[Request, Report]:
    """Four named captures, and their report."""
    folder = tmp_path_factory.mktemp("simple")
    rng = torch.Generator().manual_seed(7)
    asked = request(models, legacy_folder(folder / "captures", rng), verify_cost=1.2, draft_cost=0.05)
    return asked, build(asked)


def agrees_with_library(report: Report, which: str, p, captures, table_of=None) -> None:
    """Accuracy at every depth and tokens per round at every depth, as the library computes them."""
    for depth in range(p.hit.shape[1]):
        for name, of in (
            ("in_vocab", metrics.in_vocab_accuracy),
            ("all_token", metrics.all_token_accuracy),
            ("coverage", metrics.coverage),
        ):
            want = of(p, depth) if p.in_vocab[:, depth].any() or name != "in_vocab" else None
            assert report.ratio(name, depth, which) == want
        rounds = walk(p, captures, depth + 1)
        got = report.tokens_per_round(depth + 1, which)
        assert (got.value, got.denominator) == (rounds.tokens_per_round, len(rounds))
    if table_of is not None:
        got = report.metrics_table(which)
        assert list(got["metric"]) == list(table_of["metric"])
        for column in ("value", "low", "high"):
            want = [None if math.isnan(x) else x for x in table_of[column].astype(float)]
            assert got[column].astype(object).where(got[column].notna(), None).tolist() == pytest.approx(want)


def test_numbers_are_the_librarys(simple):
    asked, report = simple
    captures = open_folder(asked.captures, taps=NAMES.split(",")).captures
    forward = DraftForward(load_draft(asked.draft))
    swept = sweep.sweep(
        forward, captures,
        [forward.draft.contract.change(taps=t) for t in sweep.ordered_choices(captures[0].taps, 3)],
    )  # fmt: skip
    found = report.data["sweep"]
    assert found["tried"] == 24 and found["winner"] == [str(t) for t in swept.winner.taps]
    assert tuple(found["gap"].values()) == pytest.approx(swept.gap(), abs=1e-5)
    assert tuple(found["accuracy_gap"].values()) == pytest.approx(swept.accuracy_gap(), abs=1e-9)
    assert report.which == ["declared", "best"], "random weights: another wiring than the declared one wins"
    for which, contract in (("declared", forward.draft.contract), ("best", swept.winner)):
        agrees_with_library(report, which, rollouts(forward, captures, contract, DEPTH), captures)
        i = [c.taps for c in swept.contracts].index(contract.taps)
        got = report.data["results"][which]["log_likelihood"]["value"]
        assert got == pytest.approx(float(swept.log_likelihood[i]), abs=1e-5)
    got, want = report.norms_table(), norm_table(norm_statistics(captures))
    assert got["mean (all)"].tolist() == pytest.approx(want["mean (all)"].tolist())
    joint = [report.ratio("joint", d).numerator for d in range(DEPTH)]
    assert joint == rollouts(forward, captures, depth=DEPTH).hit.int().cumprod(1).sum(0).tolist()


def test_speed_up_is_the_formula(simple):
    asked, report = simple
    for row in report.data["results"]["declared"]["acceptance"]:
        cost = asked.verify_cost + row["depth"] * asked.draft_cost
        assert row["break_even"] == pytest.approx(cost)
        assert row["speed_up"] == pytest.approx(row["tokens_per_round"]["value"] / cost)
    rows = report.acceptance_table()
    assert report.best_depth()["depth"] == rows["speed-up"].astype(float).idxmax()


def test_report_survives_its_file(simple, tmp_path):
    _, report = simple
    path = report.save(tmp_path / "made")
    text = path.read_text()
    assert "NaN" not in text and "Infinity" not in text
    again = Report.load(path)
    assert again.data == json.loads(json.dumps(report.data))
    for name in (
        "summary",
        "detected_table",
        "contract_table",
        "files_table",
        "skipped_table",
        "norms_table",
    ):
        assert getattr(again, name)().equals(getattr(report, name)()), name
    assert again.accuracy_table("best").equals(report.accuracy_table("best"))
    assert len(again.sweep_table()) == 12 and again.metrics_table() is None
    assert [p.name for p in path.parent.iterdir()] == ["report.json"]


def test_every_field_of_the_schema_is_described():
    described = 0

    def walk_through(node, where):
        nonlocal described
        if isinstance(node, dict):
            for name, value in (node.get("properties") or {}).items():
                assert value.get("description"), f"{where}.{name}"
                described += 1
            if "properties" in node:
                assert node["additionalProperties"] is False and set(node["required"]) == set(
                    node["properties"]
                )
            for name, value in node.items():
                walk_through(value, f"{where}.{name}")

    walk_through(json.loads(SCHEMA.read_text()), "")
    assert described > 80


@pytest.mark.parametrize(
    "path, value",
    [
        (("version",), 2),
        (("results", "declared", "accuracy", "in_vocab", 0, "value"), "0.3"),
        (("files", "read", 0, "tokens"), None),
        (("surplus",), 1),
        (("request", "depth"), -1),
    ],
)
def test_a_report_of_another_shape_is_refused(simple, path, value):
    data = json.loads(json.dumps(simple[1].data))
    inner = data
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    with pytest.raises(ReportError, match=r"report\.schema\.json describes"):
        check_report(data, "report.json")


def test_metric_table_where_finals_are_given(models, tmp_path, rng):
    folder = legacy_folder(tmp_path / "captures", rng)
    finals = tmp_path / "finals"
    finals.mkdir()
    opened = open_folder(folder, taps=NAMES.split(",")).captures
    joined = []
    for i, c in enumerate(opened):
        final = 3 * torch.randn(len(c), HIDDEN, generator=rng)
        path = finals / f"final_{i}.safetensors"
        save_capture(
            path, token_ids=c.token_ids, loss_mask=c.loss_mask, states={}, final=final, final_kind="pre_norm"
        )
        readers = {**c.readers, "final": lambda final=final: final}
        joined.append(replace(c, readers=readers, final_kind="pre_norm"))
    asked = request(models, folder, target=str(models / "target"), finals=str(finals))
    report = build(asked)
    head = load_target_head(models / "target")
    draft = load_draft(models / "draft", target=head)
    assert report.data["metric_table"] == {"available": True, "why_not": "", "files": 4}
    agrees_with_library(
        report, "declared", rollouts(DraftForward(draft), joined, depth=DEPTH), joined,
        table(evidence(joined, draft, head)),
    )  # fmt: skip
    assert report.metrics_table("best") is not None and "final" in report.norms_table().index
    (finals / "final_3.safetensors").unlink()
    with pytest.raises(ReportError, match=r"finals: expected 4 files.*found '3 files, none for data_3.pt"):
        build(asked)


def test_finals_of_another_layout_need_no_names(models, tmp_path, rng):
    """Captures of three unnamed states supply the final state of captures whose four states are named."""
    for i in range(2):
        text = native(rng)
        WRITERS["speculators-legacy"].write(tmp_path / "captures", text, i)
        WRITERS["specforge"].write(tmp_path / "finals", text, i)
    asked = request(
        models, tmp_path / "captures", target=str(models / "target"), finals=str(tmp_path / "finals")
    )
    report = build(asked)
    assert report.data["metric_table"]["files"] == 2 and report.data["files"]["skipped"] == []


def test_finals_of_other_texts_are_skipped_with_a_reason(models, tmp_path, rng):
    folder = legacy_folder(tmp_path / "captures", rng)
    finals = tmp_path / "finals"
    shutil.copytree(folder, finals)
    write_legacy(finals / "data_2.pt", random_capture_tensors(26, rng))
    names = "embed,layer3,layer4,layer6"  # the target's last block: the final state is among the stored ones
    report = build(request(models, folder, target=str(models / "target"), finals=str(finals), taps=names))
    [skipped] = report.data["files"]["skipped"]
    assert skipped["file"].endswith("data_2.pt") and "other tokens" in skipped["error"]
    assert report.data["metric_table"]["files"] == 3


def broken_files(folder: Path, rng: torch.Generator) -> list[str]:
    """Five files that claim to be captures and are not."""
    (folder / "data_90.pt").write_bytes(b"")
    whole = write_legacy(folder / "data_91.pt", random_capture_tensors(20, rng)).read_bytes()
    (folder / "data_91.pt").write_bytes(whole[: len(whole) // 2])
    torch.save(
        {"input_ids": torch.arange(9), "hidden_states": [torch.zeros(9, HIDDEN)]}, folder / "data_92.pt"
    )
    tensors = random_capture_tensors(20, rng)
    tensors["hidden_states"][0][3] = float("inf")
    write_legacy(folder / "data_93.pt", tensors)
    save_file({"something": torch.zeros(3)}, folder / "hs_94.safetensors")
    return [f"data_{i}.pt" for i in (90, 91, 92, 93)] + ["hs_94.safetensors"]


def test_mixed_folder_with_broken_files(models, tmp_path, rng):
    """Three layouts, two numbers of stored states, five broken files, a lock file."""
    folder = legacy_folder(tmp_path / "captures", rng, n=3)
    for i in (3, 4):
        write_stack(folder / f"hs_{i}.safetensors", random_capture_tensors(25, rng, 5))
    WRITERS["workbook"].write(folder, native(rng), 5)  # embed, layer3, layer4, recorded in the file
    (folder / "hs_3.safetensors.lock").touch()
    broken = broken_files(folder, rng)
    report = build(request(models, folder, taps=f"{NAMES}; {NAMES},layer6"))
    files = report.data["files"]
    assert sorted(Path(f["file"]).name for f in files["skipped"]) == sorted(broken)
    assert all(f["kind"] == "CaptureError" and f["file"] in f["error"] for f in files["skipped"])
    assert [f["file"] for f in files["ignored"]] == ["hs_3.safetensors.lock"]
    assert sorted(f["file"] for f in files["read"]) == [
        "c_5.safetensors", "data_0.pt", "data_1.pt", "data_2.pt", "hs_3.safetensors", "hs_4.safetensors",
    ]  # fmt: skip
    layouts = {d["format"]: d["files"] for d in report.data["detected"]["captures"]}
    # hs_94 and the files that are read but hold an Inf are counted where they could be opened.
    assert layouts == {"speculators-legacy": 4, "speculators": 2, "workbook": 1}
    assert any("5 of 11 files not read" in w for w in report.data["warnings"])
    assert report.data["sweep"]["tried"] == 6, "the taps that every file holds: embed, layer3, layer4"
    check_report(report.data, "mixed")


def test_unnamed_files_beside_named_ones_are_skipped(models, tmp_path, rng):
    folder = legacy_folder(tmp_path / "captures", rng, n=2)
    WRITERS["workbook"].write(folder, native(rng), 5)
    report = build(request(models, folder, taps=""))
    assert [f["file"] for f in report.data["files"]["read"]] == ["c_5.safetensors"]
    assert all("stored states" in f["error"] for f in report.data["files"]["skipped"])
    assert any(w.startswith("2 files skipped") for w in report.data["warnings"])


@pytest.mark.parametrize("numbers", [(3, 4), (4, 4, 3), (5, 3, 27)])
def test_unnamed_files_of_different_numbers_of_states_are_not_compared(models, tmp_path, rng, numbers):
    """By position, `stored2` of one file would be another layer than `stored2` of the next."""
    folder = tmp_path / "captures"
    folder.mkdir()
    for i, states in enumerate(numbers):
        tensors = random_capture_tensors(20, rng, 3)
        tensors["hidden_states"] = (9 * list(tensors["hidden_states"]))[:states]
        write_legacy(folder / f"data_{i}.pt", tensors)
    with pytest.raises(ReportError, match="one number of stored states") as error:
        build(request(models, folder, taps=""))
    assert (error.value.where, error.value.field) == (str(folder), "taps")
    for states in set(numbers):
        said = f"{states} in {numbers.count(states)} files ({folder / f'data_{numbers.index(states)}.pt'})"
        assert said in error.value.found
    lists = re.search(r'taps="(.*?)"', error.value.remedy)[1].split(";")
    letters = {3: "a,b,c", 4: "a,b,c,d", 5: "a,b,c,d,e", 27: "a,b,...(27 names)"}
    assert lists == [letters[n] for n in sorted(set(numbers), reverse=True)]


def test_files_of_different_numbers_of_states_are_compared_by_name(models, tmp_path, rng):
    """What the error above asks for; and it is not raised for files that are not asked for or broken."""
    folder = legacy_folder(tmp_path / "captures", rng, 2, 4)
    write_legacy(folder / "data_2.pt", random_capture_tensors(20, rng, 3))
    report = build(request(models, folder, taps=f"{NAMES};embed,layer3,layer4"))
    assert len(report.data["files"]["read"]) == 3 and report.data["files"]["skipped"] == []
    assert report.data["results"]["declared"]["taps"] == ["embed", "layer3", "layer4"]
    assert len(build(request(models, folder, taps="", limit=2)).data["files"]["read"]) == 2
    (folder / "data_2.pt").write_bytes(b"")
    assert len(build(request(models, folder, taps="")).data["files"]["skipped"]) == 1


def test_the_sample_target_by_name(models, tmp_path, rng, monkeypatch):
    """ "sample" is what `ensure_target` gives, though a folder of that name lies in the working directory."""
    target = tmp_path / "cache" / "SmolLM2-135M-Instruct-fp32"
    shutil.copytree(models / "target", target)
    monkeypatch.setenv("EAGLE3_WORKBOOK_CACHE", str(target.parent))
    (tmp_path / "sample").mkdir()
    monkeypatch.chdir(tmp_path)
    report = build(request(models, legacy_folder(tmp_path / "captures", rng, 2), target="sample"))
    assert report.data["detected"]["target"]["path"] == str(target)
    assert report.data["request"]["target"] == "sample"


BAR = """import sys, time
from lib.report import progress
for _ in progress("opening")(range(int(sys.argv[1]))):
    time.sleep(0.15)"""


@pytest.mark.parametrize("terminal, items", [(True, 12), (True, 7), (False, 12)])
def test_bars_are_for_terminals_and_leave_nothing(root, terminal, items):
    reader, writer = pty.openpty() if terminal else os.pipe()
    if terminal:
        termios.tcsetwinsize(reader, (24, 80))  # tqdm prints nothing where there is no room
    subprocess.run([sys.executable, "-c", BAR, str(items)], stderr=writer, check=True, cwd=root)
    os.write(writer, b"$")  # the next prompt; and there is something to read
    said = ""
    while not said.endswith("$"):  # a terminal hands out what was written piece by piece
        said += os.read(reader, 1 << 16).decode()
    os.close(reader), os.close(writer)
    if terminal and items >= FEW_FILES:
        *states, cleared, prompt = said.split("\r")
        assert any("opening" in s for s in states) and cleared.strip() == "" and prompt == "$"
    else:
        assert said == "$"


@pytest.mark.parametrize("layout", ["specforge", "specforge-gz", "baldeagle", "speculators"])
def test_layouts_of_other_frameworks(models, tmp_path, rng, layout):
    folder = tmp_path / "captures"
    for i in range(3):
        WRITERS[layout].write(folder, native(rng), i)
    report = build(request(models, folder, taps="", target=str(models / "target")))
    [found] = report.data["detected"]["captures"]
    assert (found["format"], found["files"]) == (WRITERS[layout].layout, 3) and found["evidence"]
    assert report.data["metric_table"]["available"] == (WRITERS[layout].last == "final")


@pytest.mark.parametrize(
    "states, taps, rule",
    [
        (3, ["stored0", "stored1", "stored2"], "in stored order"),
        (4, ["stored0", "stored1", "stored2"], "[:-1], as speculators' trainer cuts"),
    ],
)
def test_taps_that_nobody_recorded(models, tmp_path, rng, states, taps, rule):
    report = build(request(models, legacy_folder(tmp_path / "captures", rng, 2, states), taps=""))
    assert report.data["results"]["declared"]["taps"] == taps
    assert any(rule in w and "taps=" in w for w in report.data["warnings"])
    row = next(r for r in report.data["contract"]["declared"] if r["field"] == "taps")
    assert row["from"].startswith("inferred (") and rule in row["from"]


def test_taps_that_cannot_be_inferred(models, tmp_path, rng):
    folder = legacy_folder(tmp_path / "captures", rng, 2, 5)
    with pytest.raises(ContractError, match=r"3 or 4 states.*name the stored states with taps="):
        build(request(models, folder, taps=""))


def test_captures_that_lack_a_declared_tap(models, tmp_path, rng):
    folder = legacy_folder(tmp_path / "captures", rng, 2, 3)
    report = build(request(models, folder, taps="layer1,layer2,layer3"))
    assert any("lack embed layer4, which the draft declares" in w for w in report.data["warnings"])
    assert report.data["results"]["declared"]["taps"] == ["layer1", "layer2", "layer3"]


def test_too_many_orders_become_ascending_ones(models, tmp_path, rng):
    folder = tmp_path / "captures"
    folder.mkdir()
    for i in range(2):
        n = random_capture_tensors(20, rng)
        states = {Tap(k): torch.randn(20, HIDDEN, generator=rng) for k in (0, 1, 2, 3, 4, 5)}
        ids, mask = n["input_ids"], n["loss_mask"]
        save_capture(folder / f"c_{i}.safetensors", token_ids=ids, loss_mask=mask, states=states)
    report = build(request(models, folder, taps=""))
    assert math.perm(6, 3) > MOST_ORDERED and report.data["sweep"]["tried"] == math.comb(6, 3)
    assert any("120 ordered choices" in w for w in report.data["warnings"])


def test_limit_and_resuming(models, tmp_path, rng):
    folder = legacy_folder(tmp_path / "captures", rng)
    first = build(request(models, folder, limit=2))
    assert [f["name"] for f in first.data["files"]["read"]] == ["data_0", "data_1"]
    parts = {p: p.stat().st_mtime_ns for p in (tmp_path / "out" / "parts").rglob("*.safetensors")}
    second = build(request(models, folder))
    assert len(second.data["files"]["read"]) == 4
    assert all(p.stat().st_mtime_ns == when for p, when in parts.items()), (
        "finished parts were measured again"
    )


def test_no_file_can_be_read(models, tmp_path, rng):
    folder = tmp_path / "captures"
    folder.mkdir()
    broken_files(folder, rng)
    with pytest.raises(MetricError, match=r"none of 5; the first: .*data_90.pt"):
        build(request(models, folder))
    with pytest.raises(CaptureError, match="found none"):
        (tmp_path / "empty").mkdir()
        build(request(models, tmp_path / "empty"))


@pytest.mark.parametrize(
    "changes, field",
    [
        ({"draft": ""}, "draft"),
        ({"captures": ""}, "captures"),
        ({"draft": 3}, "draft"),
        ({"convention": "vlm"}, "convention"),
        ({"dtype": "int8"}, "dtype"),
        ({"device": "cuda:99"}, "device"),
        ({"device": "gpu"}, "device"),
        ({"limit": -1}, "limit"),
        ({"limit": 2.5}, "limit"),
        ({"limit": True}, "limit"),
        ({"depth": 0}, "depth"),
        ({"verify_cost": 0.0}, "verify_cost"),
        ({"verify_cost": math.nan}, "verify_cost"),
        ({"draft_cost": -0.1}, "draft_cost"),
        ({"draft_cost": math.inf}, "draft_cost"),
        ({"taps": "embed,embed"}, "taps"),
        ({"taps": "embed,layer1;layer2,layer3"}, "taps"),
    ],
)
def test_a_request_is_refused_before_anything_is_read(changes, field):
    with pytest.raises(ReportError, match=rf"^request: {field}: expected .*What to do: "):
        Request(**({"draft": "nowhere", "captures": "nowhere"} | changes))


def test_taps_of_a_request():
    asked = Request("d", "c", taps=" embed, layer3 ;layer1,layer2,layer3;")
    assert asked.names == (("embed", "layer3"), ("layer1", "layer2", "layer3"))
    with pytest.raises(ContractError, match="layer-1"):
        Request("d", "c", taps="embed,layer-1")
    assert Request("a/d@main", "x/c").folder.name == "d-c" and Request("d", "c", out="o").folder == Path("o")


def test_the_default_folder_is_named_by_real_names(tmp_path, monkeypatch):
    """ "." has no name of its own; an existing folder may have an @ in its name."""
    (tmp_path / "step@9").mkdir()
    monkeypatch.chdir(tmp_path / "step@9")
    assert Request(".", "../step@9/").folder.name == "step@9-step@9"
    assert Request("d" * 5000, "c\0").folder.name.startswith("ddd")


@pytest.mark.parametrize(
    "changes, refused",
    [
        ({}, ""),
        ({"depth": 2, "limit": 3, "draft_cost": 0.3}, ""),
        ({"draft": "other"}, "draft"),
        ({"convention": "sglang"}, "convention"),
        ({"taps": "embed,layer3,layer4,layer6"}, "taps"),
        ({"dtype": "float64"}, "dtype"),
    ],
)
def test_another_requests_report_is_not_overwritten(models, simple, tmp_path, changes, refused):
    """Refused before measuring and when saving; the same request, and a deeper one, may be repeated."""
    asked, report = simple
    report.save(tmp_path / "out")
    if "draft" in changes:
        shutil.copytree(models / "draft", tmp_path / "draft")
        changes = {"draft": str(tmp_path / "draft")}
    again = replace(asked, out=str(tmp_path / "out"), **changes)
    if not refused:
        build(again, tmp_path / "parts").save()
        return
    before = (tmp_path / "out" / "report.json").read_bytes()
    with pytest.raises(ReportError, match=rf"request: expected no report there.*{refused}: .*OUT="):
        build(again, tmp_path / "parts")
    assert not (tmp_path / "parts").exists(), "measured before it was refused"
    data = json.loads(json.dumps(report.data)) | {"request": asdict(again)}
    with pytest.raises(ReportError, match=rf"{refused}: .*OUT="):
        Report(data).save()
    assert (tmp_path / "out" / "report.json").read_bytes() == before


@pytest.mark.parametrize("content", ["", "[]", '{"request": {}}', '{"request": 3}'])
def test_a_file_that_is_no_report_is_not_overwritten(simple, tmp_path, content):
    (tmp_path / "report.json").write_text(content)
    with pytest.raises(ReportError, match=r"another file of this name"):
        simple[1].save(tmp_path)
    assert (tmp_path / "report.json").read_text() == content


def test_places_that_cannot_be_written(simple, tmp_path, capsys):
    """OUT or the work folder is a file, a comparison goes into no folder: typed, and one line."""
    asked, report = simple
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(ReportError, match="out: expected a folder for the report"):
        build(replace(asked, out=str(file)))
    for call in (
        lambda: build(replace(asked, out=str(tmp_path / "new")), file),
        lambda: report.save(file / "below"),
    ):
        with pytest.raises(ReportError, match="file: expected a place that can be written"):
            call()
    path = str(report.save(tmp_path / "saved"))
    with pytest.raises(SystemExit):
        main(["compare", path, path, "--out", str(tmp_path / "none" / "c.json")])
    printed = capsys.readouterr().err
    assert printed.count("\n") == 1 and printed.startswith("error: ") and "None" not in printed


@pytest.mark.parametrize("first", ["absolute", "relative", "linked"])
def test_parts_of_the_same_files_under_another_path(models, tmp_path, rng, monkeypatch, first):
    """A resumed part stands for the path asked for now: absolute, relative, or links to the same blobs."""
    blobs = legacy_folder(tmp_path / "blobs", rng, 2)
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        for file in blobs.iterdir():
            (tmp_path / name / file.name).symlink_to(file)
    monkeypatch.chdir(tmp_path)
    spelled = {"absolute": (str(blobs), "blobs"), "relative": ("blobs", str(blobs)), "linked": ("one", "two")}
    for captures in spelled[first]:
        report = build(request(models, Path(captures), out=captures + "-out"), tmp_path / "parts")
        assert report.which == ["declared", "best"], "stage two reads the files by their paths"
        assert {p.file for p in report.totals["best"].parts} == {
            str(Path(captures) / f.name) for f in blobs.iterdir()
        }
    assert len(list((tmp_path / "parts").rglob("*.safetensors"))) == 4, "finished parts were measured again"


@pytest.mark.parametrize("n, said", [(1, True), (4, True), (5, False)])
def test_few_conversations_establish_nothing(models, tmp_path, rng, n, said):
    """Resampling one conversation gives no width at all: that is ignorance, not certainty."""
    report = build(request(models, legacy_folder(tmp_path / "captures", rng, n)))
    found = report.data["sweep"]
    assert any("too few for intervals" in w for w in report.data["warnings"]) == said
    assert not said or not found["decided"]
    assert n > 1 or (found["gap"]["low"] == found["gap"]["high"] > 0 and not found["decided"])


def test_no_position_in_the_vocabulary(models, tmp_path, rng):
    """Nothing can be compared: the declared wiring stays, and a warning says why."""
    draft = load_draft(models / "draft")
    outside = (~DraftForward(draft).in_vocab).nonzero().flatten()
    folder = tmp_path / "captures"
    folder.mkdir()
    for i in range(2):
        tensors = random_capture_tensors(20, rng)
        tensors["input_ids"] = outside[torch.randint(0, len(outside), (20,), generator=rng)]
        write_legacy(folder / f"data_{i}.pt", tensors)
    report = build(request(models, folder))
    found = report.data["sweep"]
    assert report.which == ["declared"] and found["winner"] == list(map(str, draft.contract.taps))
    assert (found["gap"], found["decided"], found["rows"][0]["nats_a_token"]) == (None, False, None)
    assert any("no scored position has a true token" in w for w in report.data["warnings"])
    path = report.save(tmp_path / "out")
    assert report.ratio("in_vocab") is None and len(Report.load(path).sweep_table()) == 12


def test_one_capture_is_called_by_its_name(models, tmp_path, rng):
    folder = legacy_folder(tmp_path / "captures", rng, 2)
    report = build(request(models, folder / "data_1.pt"))
    assert [(f["name"], f["file"]) for f in report.data["files"]["read"]] == [("data_1", "data_1.pt")]


@pytest.mark.parametrize(
    "captures, finals, limit, wanted",
    [
        (
            ["a_2.pt", "a_10.pt"],
            ["a_10.pt", "a_2.pt", "a_3.pt"],
            0,
            ["a_2.pt", "a_10.pt"],
        ),  # stems; one too many
        (["a_1.pt", "a_2.pt"], ["f_1.ckpt", "f_2.ckpt"], 0, ["f_1.ckpt", "f_2.ckpt"]),  # numbers
        (["r/a_1.pt", "s/a_1.pt"], ["r/a_1.ckpt.gz", "s/a_1.ckpt.gz"], 0, ["r/a_1.ckpt.gz", "s/a_1.ckpt.gz"]),
        (["a.pt", "b.pt"], ["x.pt", "y.pt"], 0, ["x.pt", "y.pt"]),  # nothing matches: their order
        (["a_1.pt", "a_2.pt"], ["f_7.pt", "f_8.pt"], 1, ["f_7.pt"]),
        (["a_1.pt", "a_2.pt"], ["f_1.pt"], 1, ["f_1.pt"]),  # a text that is not asked for needs none
        (["a_1.pt", "a_2.pt", "a_3.pt"], ["f_1.pt", "f_3.pt", "f_4.pt"], 0, "none for a_2.pt"),
        (["a_1.pt", "a_2.pt"], ["f_1.pt"], 0, "none for a_2.pt"),
        (["a.pt", "b.pt"], ["x.pt", "y.pt", "z.pt"], 0, "3 files"),
        (["a.pt", "b.pt"], ["x.pt", "y.pt", "z.pt"], 1, "3 files"),
        (["r/a_1.pt", "s/a_1.pt"], ["r/a_1.pt", "t/a_1.pt"], 0, "none for a_1.pt"),
    ],
)
def test_final_states_are_paired_by_name(tmp_path, captures, finals, limit, wanted):
    for folder, names in (("c", captures), ("f", finals)):
        for name in names:
            (tmp_path / folder / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / folder / name).touch()
    place, warnings = tmp_path / "c", []
    listings = [(p, capture_files(p).files) for p in (place, tmp_path / "f")]
    if isinstance(wanted, str):
        with pytest.raises(ReportError, match=rf"^request: finals: .*{wanted}"):
            pair_up(*listings, warnings, limit)
        return
    pairs = pair_up(*listings, warnings, limit)
    assert [f.relative_to(tmp_path / "f").as_posix() for _, f in pairs] == wanted
    assert [f.relative_to(place).as_posix() for f, _ in pairs] == captures[: limit or None]
    assert warnings == (["1 of 3 final states belong to no capture: not used"] if len(finals) == 3 else [])


def test_final_states_are_judged_group_by_group(models, tmp_path, rng):
    """A second layout after many files of the first, and a NaN in one final state: both kinds are settled."""
    norm = load_target_head(models / "target").norm
    folder = tmp_path / "captures"

    def write(name: str, place: str, i: int, broken: bool = False) -> None:
        text = native(rng)
        post = text.pre * torch.rsqrt(text.pre.pow(2).mean(-1, keepdim=True) + 1e-5) * norm
        if broken:
            post[3, 3] = float("nan")
        WRITERS[name].write(folder / place, replace(text, post=post), i)

    for i in range(JUDGED + 2):
        write("modelopt-hf", "a", i, broken=i == 1)
    for i in range(2):
        write("angelslim", "b", i)
    report = build(request(models, folder, taps="", target=str(models / "target"), depth=1))
    said = [w for w in report.data["warnings"] if "judged by evidence: post_norm" in w]
    assert {w.partition(":")[0] for w in said} == {"modelopt", "angelslim"}
    assert report.data["metric_table"]["files"] == JUDGED + 3
    [skipped] = report.data["files"]["skipped"]
    assert "conversation-0001" in skipped["file"] and "NaN" in skipped["error"]


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["make", "--draft", "nowhere", "--captures", "nowhere"], "nowhere"),
        (["make", "--draft", "d", "--captures", "c", "--depth", "0"], "depth: expected at least 1"),
        (["compare", "nowhere.json", "nowhere.json"], "nowhere.json"),
    ],
)
def test_a_users_error_is_one_line_and_status_2(capsys, tmp_path, monkeypatch, arguments, said):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    printed = capsys.readouterr()
    assert stopped.value.code == 2 and printed.out == ""
    assert printed.err.count("\n") == 1 and printed.err.startswith("error: ") and said in printed.err


NOTEBOOK = """import sys
sys.path.insert(0, {root!r})
from pathlib import Path
from lib.report import Request, build
request = Request(draft, captures, target, finals, taps, convention, layout, loss_masks, device, dtype,
                  limit, depth, verify_cost, draft_cost, out)
report = build(request)
report.save()
report.summary()"""


@pytest.mark.slow
def test_command_line_makes_three_files(models, tmp_path, rng, root, monkeypatch, capsys):
    """A small stand-in for notebook 07: the same parameters, one cell."""
    folder = legacy_folder(tmp_path / "captures", rng, n=FEW_FILES)
    defaults = "\n".join(f"{k} = {v!r}" for k, v in asdict(Request("d", "c")).items())
    cells = [
        nbformat.v4.new_markdown_cell("# A report\n[02](02_is_the_draft_bad_or_fed_badly.ipynb), [b](#b)"),
        nbformat.v4.new_markdown_cell("of the samples", metadata={"tags": ["samples-only"]}),
        nbformat.v4.new_code_cell("print('a form')", metadata={"tags": ["form"]}),
        nbformat.v4.new_code_cell(defaults, metadata={"tags": ["parameters"]}),
        nbformat.v4.new_code_cell(NOTEBOOK.format(root=str(root))),
    ]
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    path = tmp_path / "notebook" / "07_test.ipynb"
    path.parent.mkdir()
    nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata=kernel), path)
    monkeypatch.chdir(tmp_path)  # relative paths are the reader's, not the notebook's
    asked = request(models, Path("captures"), taps=NAMES, out="made")
    made = make(asked, path)
    assert made == tmp_path / "made"
    assert {p.name for p in made.iterdir()} == {"report.ipynb", "report.html", "report.json", "parts"}
    report = Report.load(made / "report.json")
    assert report.data["request"]["captures"] == str(folder)
    page = (made / "report.html").read_text()
    assert "opening" not in page and "measuring" not in page, "bars fill no page"
    assert "in-vocab accuracy" in page and not re.search(r"<(script|link)[^>]*(src|href)=.http", page)
    assert "a form" not in page and "of the samples" not in page and "ipynb" not in page
    assert "02" in page and 'href="#b"' in page and "02_is" not in page
    said = nbformat.read(made / "report.ipynb", as_version=4).cells
    assert not any({"form", "samples-only"} & set(c.metadata.get("tags", ())) for c in said)
    for code, wanted in (
        ("raise ValueError('on purpose')", "ValueError: on purpose"),
        ("import os; os._exit(1)", "kernel: .*its kernel died"),
    ):
        failing = [*cells[:-1], nbformat.v4.new_code_cell(f"{cells[-1].source}\n{code}")]
        nbformat.write(nbformat.v4.new_notebook(cells=failing, metadata=kernel), path)
        with pytest.raises(ReportError, match=wanted):
            make(asked, path)


@pytest.mark.slow
def test_samples_as_the_notebooks_have_them(tmp_path):
    """Draft (a) on five of the incident's captures: the notebooks' own calls give the same numbers."""
    n, root = 5, samples.SAMPLES
    head = samples.target_head()
    report = build(
        Request(
            str(root / "drafts" / "a_incident"), str(root / "captures" / "incident"), str(head.path),
            str(root / "captures" / "final"), "embed,layer3,layer16,layer28", "sglang", limit=n,
            depth=15, out=str(tmp_path),
        )
    )  # fmt: skip
    draft, captures = samples.draft("a", head), samples.captures(n)
    forward = DraftForward(draft)
    served = draft.contract
    trained = served.change(taps=samples.TRAINED_TAPS["a"])
    for which, contract in (("declared", served), ("best", trained)):
        assert report.data["results"][which]["taps"] == [str(t) for t in contract.taps]
        p = rollouts(forward, captures, contract)
        got, want = report.ratio("in_vocab", which=which), metrics.in_vocab_accuracy(p)
        assert got.denominator == want.denominator and abs(got.numerator - want.numerator) <= 2  # near-ties
        rounds = walk(p, captures)
        assert report.tokens_per_round(which=which).value == pytest.approx(rounds.tokens_per_round, abs=0.02)
    got = report.metrics_table("best").query("metric == 'full_acc_0'").iloc[0]
    rows = table(evidence(captures, draft, head, trained)).query("metric == 'full_acc_0'").iloc[0]
    assert got["denominator"] == rows["denominator"] and got["value"] == pytest.approx(
        rows["value"], abs=0.002
    )
    norms = norm_table(norm_statistics(captures))["mean (no sinks)"]
    assert report.norms_table()["mean (no sinks)"].tolist() == pytest.approx(norms.tolist(), rel=1e-4)
    assert report.data["sweep"]["tried"] == 24 and report.data["sweep"]["decided"]
    assert report.data["contract"]["difference"] == [
        "slot 0: layer3 -> embed", "slot 1: layer16 -> layer3", "slot 2: layer28 -> layer16",
    ]  # fmt: skip


def test_build_does_not_import_the_notebook_stack():
    """Workers and a terminal need no Jupyter: papermill comes in with `make` only."""
    code = "import lib.report, sys; print([m for m in ('papermill', 'nbconvert') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_skipped_table_keeps_the_whole_message():
    """File names without their folders, and what to do at the end of each message."""
    error = "/long/way/data_9.pt: pickle: expected tensors, found nothing. What to do: save it again"
    report = Report(
        {"files": {"skipped": [{"file": "/long/way/data_9.pt", "kind": "CaptureError", "error": error}]}}
    )
    (row,) = report.skipped_table().itertuples()
    assert row.Index == "data_9.pt" and row.error == error.removeprefix("/long/way/data_9.pt: ")
