"""The blind bench: which cases, how they are scored, and that finished ones are kept."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from bench import blind
from bench.blind import FULL, HEADLESS, Bases, Task, klass, score, singles, summary
from lib import samples, zoo
from lib.case import Case, Diagnosis, Finding
from lib.errors import MetricError
from lib.faults import FAULTS
from lib.taps import Tap

TAPS = samples.TRAINED_TAPS["a"]


@pytest.fixture(scope="module")
def healthy() -> Case:
    """Draft (a) as trained, six shipped conversations."""
    return zoo.sample_case("a", limit=6, wide=False)


def found(kind: str, fix=None, field: str = "taps") -> Finding:
    return Finding(kind, "search", field, "this", "that", ("n = 1",), fix=fix)


def record(healthy, keys, *kinds, draft="a", verdict=None, remarks=(), not_run=None, engine="", **more):
    """What `run` writes of a diagnosis with these findings; a kind may be a Finding."""
    findings = tuple(k if isinstance(k, Finding) else found(k) for k in kinds)
    verdict = verdict or ("fault" if findings else "healthy")
    d = Diagnosis(verdict, findings, tuple(remarks), not_run or {}, "Because.", {"engine": engine})
    keys = keys.split("+")
    base = {
        "keys": keys, "seeds": [0] * len(keys), "draft": draft, "variant": FULL, "version": "0",
        "healthy": all(FAULTS[k].healthy for k in keys), "class": "clear", "traces": [], "changed": [],
        "cost": {"accuracy 0": 0.1, "accuracy 1": None, "tokens": 0.2}, "error": None,
        "seconds": 1.0, "cpu": 0.5,
    }  # fmt: skip
    return base | blind.told(d, healthy) | more


@pytest.mark.parametrize(
    ("keys", "kinds", "draft", "hits", "extra"),
    [
        ("feedback", ["feedback"], "a", ["feedback"], []),
        ("feedback", ["feedback", "norm_ones"], "a", ["feedback"], ["norm_ones"]),
        ("feedback", ["norm_ones", "feedback"], "a", [], ["norm_ones"]),
        ("feedback", ["norm_before_residual"], "a", [], ["norm_before_residual"]),
        ("feedback", [], "a", [], []),
        # draft (c): its own fault may stand first, and is no hit by itself
        ("feedback", ["inner_targets", "feedback"], "c", ["feedback"], []),
        ("feedback", ["inner_targets"], "c", [], []),
        ("feedback", ["inner_targets", "feedback"], "a", [], ["inner_targets"]),
        ("inner_targets", ["inner_targets"], "a", ["inner_targets"], []),
        # synonyms: the same state of the files, on the draft where it is the same
        ("d2t_zeros", ["map_identity"], "a", ["d2t_zeros"], []),
        ("d2t_arange", ["map_identity"], "a", [], ["map_identity"]),
        ("default_triple", ["taps_minus_one"], "b", ["default_triple"], []),
        ("default_triple", ["taps_minus_one"], "a", [], ["taps_minus_one"]),
        # of a pair, both have to be named, in any order
        ("feedback+d2t_zeros", ["d2t_zeros", "feedback"], "a", ["feedback", "d2t_zeros"], []),
        ("feedback+d2t_zeros", ["map_identity"], "a", ["d2t_zeros"], []),
    ],
)
def test_hits(healthy, keys, kinds, draft, hits, extra):
    s = score(record(healthy, keys, *kinds, draft=draft))
    assert (s["hits"], s["extra"]) == (hits, extra)
    assert set(s["misses"]) == set(keys.split("+")) - set(hits)


def test_wrong_taps_without_a_name_count_only_if_undone(healthy):
    contract = healthy.draft.contract
    right, wrong = found("taps", contract), found("taps", contract.change(taps=(Tap(3), Tap(4), Tap(16))))
    assert score(record(healthy, "taps_minus_one", right))["hits"] == ["taps_minus_one"]
    assert score(record(healthy, "taps_minus_one", wrong))["hits"] == []
    assert score(record(healthy, "slot_zero", right))["hits"] == []


def test_whether_a_change_undoes_the_fault(healthy):
    draft = healthy.draft
    stale = replace(draft, d2t=torch.zeros_like(draft.d2t))
    assert blind.undone(found("d2t_stale", draft, "d2t"), healthy) is True
    assert blind.undone(found("d2t_stale", stale, "d2t"), healthy) is False
    assert blind.undone(found("norm_ones"), healthy) is None
    assert blind.undone(found("odd", draft.contract, "no such field"), healthy) is None


@pytest.mark.parametrize(
    ("verdict", "hits"), [("look at the engine", ["engine_loses"]), ("fault", []), ("cannot tell", [])]
)
def test_the_engine_is_named_by_the_verdict(healthy, verdict, hits):
    kinds = ["inner_targets"] if verdict == "fault" else []
    r = record(healthy, "engine_loses", *kinds, verdict=verdict, engine="engine_loses", draft="c")
    s = score(r)
    assert s["hits"] == hits
    assert hits or "in a remark only" in s["misses"]["engine_loses"]


@pytest.mark.parametrize(
    ("verdict", "accused"), [("fault", True), ("healthy", False), ("cannot tell", False)]
)
def test_controls(healthy, verdict, accused):
    kinds = ["rope_theta"] if accused else []
    s = score(record(healthy, "control_bf16", *kinds, verdict=verdict))
    assert s["accused"] is accused
    assert s["misses"] == {}, "a control has no fault to miss"
    assert score(record(healthy, "feedback", "rope_theta"))["accused"] is False


@pytest.mark.parametrize(
    ("told", "reason"),
    [
        ({"kinds": ["norm_ones", "feedback"]}, "named in place 2, behind norm_ones"),
        ({"kinds": ["norm_ones"]}, "named norm_ones instead; it costs 10.0 points at depth 0, ? at"),
        ({"kinds": []}, "called healthy; it costs 10.0 points"),
        (
            {"kinds": [], "remarks": ["suspected: feedback (odd), but no gain"]},
            "a remark only: suspected: feed",
        ),
        (
            {"kinds": [], "remarks": ["feedback: post_norm is better"], "changed": ["feedback: pre -> post"]},
            "a remark only: feedback: post_norm is better",
        ),
        (
            {"kinds": ["taps"], "changed": ["slot 1: layer3 -> layer2"]},
            "the right field (taps), another",
        ),
        ({"kinds": [], "verdict": "cannot tell"}, "Because."),
        (
            {"kinds": ["norm_ones"], "not_run": {"search": "no position"}},
            "the search did not run: no position",
        ),
        ({"kinds": [], "crash": "ValueError: oh"}, "crashed: ValueError: oh"),
    ],
)
def test_why_a_fault_was_missed(healthy, told, reason):
    kinds = told.pop("kinds")
    assert reason in score(record(healthy, "feedback", *kinds, **told))["misses"]["feedback"]


def test_a_miss_without_head_names_the_probes_that_did_not_run(healthy):
    told = record(healthy, "final_early", variant=HEADLESS, not_run={"final": "it needs the target's head"})
    assert "not run: final (it needs the target's head)" in score(told)["misses"]["final_early"]


@pytest.mark.parametrize(
    ("cost", "traces", "broken", "expected"),
    [
        ((0.03, 0.0, 0.0), [], False, "clear"),
        ((0.0, 0.03, 0.0), [], False, "clear"),
        ((-0.03, 0.0, 0.0), [], False, "subtle"),
        ((0.0, 0.0, 0.0), [], True, "clear"),
        ((0.001, -0.001, 0.01), [], False, "invisible"),
        ((0.001, float("nan"), 0.01), [], False, "invisible"),
        ((0.001, -0.001, 0.03), [], False, "subtle"),
        ((0.001, -0.001, 0.01), ["masks"], False, "subtle"),
    ],
)
def test_classes(cost, traces, broken, expected):
    assert (
        klass(dict(zip(("accuracy 0", "accuracy 1", "tokens"), cost, strict=True)), traces, broken)
        == expected
    )


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("rope_linear", []), ("d2t_zeros", ["maps"]), ("norm_ones", ["weights"]),
        ("mask_ones", ["masks"]), ("final_unnormed", ["finals"]), ("slot_zero", ["states"]),
        ("states_rotated", ["states", "finals"]), ("ids_beyond", ["ids"]), ("control_few", ["captures"]),
        ("control_target_theta", ["head"]),
    ],
)  # fmt: skip
def test_what_a_plant_leaves_traces_in(healthy, key, expected):
    assert blind.traces(healthy, zoo.plant(healthy, FAULTS[key])) == expected


def test_a_typed_error_is_a_clear_fault(healthy):
    two = replace(healthy, captures=healthy.captures[:2])
    got = blind.measured(two, zoo.plant(two, FAULTS["mask_empty"]), blind.cost_of(two))
    assert (got["class"], got["cost"], got["traces"]) == ("clear", {}, ["masks"])
    assert "positions" in got["error"]


# ---- which cases, and keeping them --------------------------------------------------------------


@pytest.fixture
def bases(healthy) -> Bases:
    """All drafts on six conversations."""
    made = Bases()
    made._made = {x: replace(zoo.sample_case(x, 1, wide=False), captures=healthy.captures) for x in "abc"}
    return made


def test_tasks_go_seed_by_seed_and_change_drafts(bases):
    keys = [
        "token_shift_0",
        "feedback",
        "control_bf16",
        "control_other_draft",
        "layer_lost",
        "incident_slice",
    ]
    tasks, left_out = singles(bases, keys, 3)
    assert left_out == {"layer_lost": "a draft of two layers"}
    full = [t for t in tasks if t.variant == FULL]
    assert [t.seeds[0] for t in full] == sorted(t.seeds[0] for t in full)
    assert tasks[len(full) :] == [replace(t, variant=HEADLESS) for t in full if t.seeds == (0,)]
    drafts = {k: [t.letter for t in full if t.keys == (k,)] for k in keys}
    assert sorted(drafts["token_shift_0"]) == sorted(drafts["feedback"]) == ["a", "b", "c"]
    assert set(drafts["control_bf16"]) == {"a", "b"}, "(c) is no healthy draft"
    assert len({t.name for t in tasks}) == len(tasks)


def test_a_case_is_drawn_by_its_name(bases, monkeypatch):
    monkeypatch.setattr(blind, "TEXTS", 3)
    task = Task(("feedback",), (0,), "a")
    first, again = bases.healthy(task), bases.healthy(replace(task, variant=HEADLESS))
    assert first.captures == again.captures and len(first.captures) == 3
    others = {tuple(c.name for c in bases.healthy(replace(task, seeds=(s,))).captures) for s in range(6)}
    assert len(others) > 1


def test_pairs_are_clear_alone_on_one_draft_and_of_two_parts(healthy):
    told = [record(healthy, k, draft=d) for k in ("feedback", "head_unnormed", "d2t_zeros") for d in "abc"]
    told += [record(healthy, "embed_random", draft=d, **{"class": "subtle"}) for d in "ab"]
    told += [record(healthy, "rope_theta", draft="c")]
    tasks = blind.pairs(told, 10)
    assert {t.keys for t in tasks} == {("d2t_zeros", "feedback"), ("d2t_zeros", "head_unnormed")}
    assert {t.letter for t in tasks} <= {"a", "b"}
    assert blind.pairs(told, 10) == tasks and len(blind.pairs(told, 1)) == 1


def test_a_finished_case_is_not_run_again(tmp_path, monkeypatch, healthy):
    made, task = [], Task(("feedback",), (0,), "a")

    def run(task, bases, known=None):
        made.append((task.variant, known))
        return record(healthy, "feedback", "feedback", variant=task.variant)

    monkeypatch.setattr(blind, "run", run)
    first = blind.kept(task, tmp_path, None)
    assert blind.kept(task, tmp_path, None) == first and made == [(FULL, None)]
    blind.kept(replace(task, variant=HEADLESS), tmp_path, None)
    assert made[1] == (HEADLESS, first), "the cost is taken from the full case"
    assert not list(tmp_path.glob("*.part"))
    assert len(blind.load(tmp_path, ["feedback"])) == 2 and blind.load(tmp_path, ["rope_theta"]) == []


def test_a_crash_is_a_recorded_failure(bases, monkeypatch):
    def broken(case, **options):
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(blind, "diagnose", broken)
    monkeypatch.setattr(blind, "measured", lambda a, b, before: {"class": "clear", "changed": [], "cost": {}})
    told = blind.run(Task(("feedback",), (0,), "a"), bases)
    assert told["crash"] == "ZeroDivisionError: a bug" and any("broken" in x for x in told["traceback"])
    assert score(told)["misses"] == {"feedback": "crashed: ZeroDivisionError: a bug"}
    found = summary([told], {})
    assert found[FULL]["clear"] == "0/1" and found["crashes"]


def test_a_fault_that_cannot_be_planted_is_told_and_not_scored(bases, monkeypatch):
    def refuse(*_):
        raise MetricError("x", "y", expected="a", found="b", remedy="c")

    monkeypatch.setattr(blind.zoo, "plant", refuse)
    told = blind.run(Task(("feedback",), (0,), "a"), bases)
    found = summary([told], {})
    assert found["cases"] == 0 and "expected a" in found["could not be planted"]["feedback (seed 0) on a"]


def test_summary(healthy):
    told = [
        record(healthy, "feedback", "feedback"),
        record(healthy, "feedback", "norm_ones", seeds=[1]),
        record(healthy, "rope_llama3", **{"class": "invisible", "changed": ["rope: a -> b"]}),
        record(healthy, "mask_shifted", "mask_shifted", **{"class": "subtle"}),
        record(healthy, "control_bf16"),
        record(healthy, "control_fp8", "rope_theta"),
        record(healthy, "feedback", variant=HEADLESS),
        record(healthy, "d2t_zeros+feedback", "d2t_zeros", "feedback"),
        record(healthy, "slot_zero+feedback", "slot_zero", not_run={"search": "zero"}),
    ]
    found = summary(json.loads(json.dumps(told)), {"layer_lost": "a second layer"})
    assert found[FULL] | {"clear": "1/2", "subtle": "1/1", "invisible": "0/1"} == found[FULL]
    assert found[FULL]["controls accused"] == "1/2" and found[HEADLESS]["clear"] == "0/1"
    assert found["pairs"]["both named"] == "1/2"
    assert found["seconds a diagnosis"]["cpu"] == {"median": 0.5, "longest": 0.5}
    assert found["pairs"]["with another finding"] == "0/2"
    assert found["confusion"]["feedback"] == {"feedback": 1, "norm_ones": 1}
    assert found["misses"]["feedback (seed 1) on a"]["feedback"].startswith("named norm_ones instead")
    assert "only rope: a -> b differs" in found["invisible here"]["rope_llama3 (seed 0) on a"]
    assert list(found["accused controls"]) == ["control_fp8 (seed 0) on a"]
    assert blind.table(told).loc["control_fp8", "seed 0"] == "a control: rope_theta"
    assert "\n".join(blind.lines(found)).count("named norm_ones instead") == 1


def test_started_again_it_sums_up_and_forgets_what_is_told(healthy, tmp_path, monkeypatch, capsys):
    work, out, ran = tmp_path / "work", tmp_path / "out.json", []
    work.mkdir()
    current = record(healthy, "feedback", "feedback", version=blind.version())
    old, crashed = {"version": "old"}, {"crash": "ValueError: oh"}
    for name, told in {"good": current, "old": current | old, "crashed": current | crashed}.items():
        (work / f"{name}.json").write_text(json.dumps(told))
    monkeypatch.setattr(blind, "workers", lambda args, phase: ran.append(phase))

    def main(*options: str) -> dict:
        argv = ["blind.py", "--work", str(work), "--out", str(out), "--only", "feedback,layer_lost", *options]
        monkeypatch.setattr("sys.argv", argv)
        blind.main()
        return json.loads(out.read_text())["summary"]

    found = main("--summary", "--renew", "--fresh")
    assert found["cases"] == 3 and not ran and len(list(work.iterdir())) == 3, "a summary changes nothing"
    assert found["fits no sample draft"] == {"layer_lost": "a draft of two layers"}
    assert "a clear: ." in capsys.readouterr().out
    assert main("--renew")["cases"] == 1 and ran == ["singles", "pairs", "headless"]
    assert main("--pairs", "0", "--fresh")["cases"] == 0 and ran[3:] == ["singles", "headless"]


def test_synonyms_are_of_known_faults_and_say_why():
    assert all(s.planted in FAULTS and s.named in (*FAULTS, "taps") and s.why for s in blind.SYNONYMS)
    assert all(s.undone for s in blind.SYNONYMS if s.named not in FAULTS)


@pytest.mark.slow
def test_one_real_case(bases):
    told = json.loads(json.dumps(blind.run(Task(("d2t_zeros",), (0,), "a"), bases), default=list))
    assert "crash" not in told, told.get("traceback")
    assert (told["class"], told["traces"]) == ("clear", ["maps"]) and told["cost"]["accuracy 0"] > 0.3
    assert score(told)["hits"] == ["d2t_zeros"] and told["findings"][0]["undone"]
