"""The zoo: measured effects have the right sign, and what vLLM can express is written as it was planted."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
import torch

from bench.zoo import DAMAGES, LETTER, LIMIT, SERVED, complaints
from lib import errors, samples, zoo
from lib.captures import FINAL
from lib.case import Case
from lib.checkpoints import load_draft
from lib.draft import DraftForward
from lib.errors import CaptureError, ContractError, EngineError, MetricError
from lib.faults import FAULTS, Bound
from lib.taps import Tap
from tests.test_faults import OTHERS, SAMPLES_ONLY, fitting, seeded, tiny_case

CLEAR = ("incident_slice", "fc_bypassed", "map_identity", "rope_interleaved", "position_step_0")


@pytest.fixture(scope="module")
def measured() -> dict[str, zoo.Effect]:
    """Five clear faults on four shipped conversations, draft (a)."""
    case = zoo.sample_case("a", 4, wide=False)
    found = {"none": zoo.measure(case, 3, chains=(3,))}
    for key in CLEAR:
        found[key] = zoo.measure(FAULTS[key].plant(case, seeded()), 3, chains=(3,))
    return found


def test_clear_faults_have_the_predicted_sign(measured) -> None:
    base = measured["none"]
    assert base.error is None and base.conversations == 4 and base.pairs > 800
    assert base.accuracy[0] > 0.6 and base.tokens[3] > 2
    for key in CLEAR[:-1]:
        assert measured[key].tokens[3] < base.tokens[3] - 0.3, f"{key} costs nothing"
    for key in ("incident_slice", "fc_bypassed", "rope_interleaved"):
        assert measured[key].accuracy[0] < base.accuracy[0] - 0.05, key
        assert measured[key].nats < base.nats - 0.1, key
    assert (
        measured["map_identity"].all_token < 0.02 and measured["map_identity"].coverage < base.coverage - 0.2
    )


def test_a_fault_of_the_chain_leaves_depth_0_alone(measured) -> None:
    base, step = measured["none"], measured["position_step_0"]
    assert step.accuracy[0] == base.accuracy[0] and step.nats == base.nats
    assert step.accuracy[1:] != base.accuracy[1:]


def test_table_has_a_row_per_effect(measured) -> None:
    table = zoo.table(measured)
    assert list(table.index) == list(measured)
    assert table.loc["none", "acc 0"] == round(100 * measured["none"].accuracy[0], 1)
    assert not {"error", "served"} & set(table.columns)


@pytest.fixture(scope="module")
def case() -> Case:
    return tiny_case()


@pytest.mark.parametrize(
    ("key", "kind"),
    [("fp16_overflow", CaptureError), ("ids_beyond", CaptureError), ("mask_empty", ContractError)],
)
def test_a_typed_error_is_the_effect(case: Case, key: str, kind: type) -> None:
    effect = zoo.measure(FAULTS[key].plant(case, seeded()), 2, chains=(2,))
    assert isinstance(effect.error, kind) and not effect.accuracy and math.isnan(effect.nats)
    assert zoo.table({key: effect}).loc[key, "error"].startswith(kind.__name__)


def test_metrics_need_head_and_final_states(case: Case) -> None:
    full = zoo.measure(case, 2, metrics=True, chains=(2,))
    assert len(full.metrics) == len(zoo.METRICS) and not full.why_not
    headless = zoo.measure(replace(case, head=None), 2, metrics=True, chains=(2,))
    assert not headless.metrics and "head" in headless.why_not
    cut = [replace(c, readers={k: v for k, v in c.readers.items() if k != FINAL}) for c in case.captures]
    assert "final" in zoo.measure(replace(case, captures=tuple(cut)), 2, metrics=True, chains=(2,)).why_not
    # a fault of the final state moves what the trainer reports, not what the draft does
    early = zoo.measure(FAULTS["final_is_slot"].plant(case, seeded()), 2, metrics=True, chains=(2,))
    assert early.accuracy == full.accuracy and early.tokens == full.tokens
    assert early.metrics["speculators full_acc_0"] != full.metrics["speculators full_acc_0"]


def test_sharing_the_target_side_changes_no_number(case: Case) -> None:
    keys = ("incident_slice", "map_identity", "final_is_slot", "mask_ones", "engine_loses")
    shared = zoo.effects(case, [FAULTS[k] for k in keys], depths=2, metrics=True)
    assert list(shared) == ["none", *keys]
    for key in keys:
        alone = zoo.measure(FAULTS[key].plant(case, seeded(zoo.SEED)), 2, metrics=True)
        assert repr(alone) == repr(shared[key]), key
    assert shared["engine_loses"].served < shared["none"].tokens[5]


def test_effects_leave_out_what_does_not_fit(case: Case) -> None:
    assert list(zoo.effects(case, [FAULTS["layer_lost"]], depths=1)) == ["none"]


@pytest.mark.parametrize("key", [k for k, f in FAULTS.items() if f.served and k not in SAMPLES_ONLY])
def test_served_form_says_what_was_planted(key: str, tmp_path) -> None:
    """The written folder, read as vLLM reads it, predicts what the planted case predicts."""
    case, fault = fitting(key), FAULTS[key]
    folder = zoo.expressible(fault, case, tmp_path / key)
    served = load_draft(folder, target=case.head)
    planted = fault.plant(case, seeded(zoo.SEED))
    a = DraftForward(planted.draft).predict(case.captures, depths=3)
    b = DraftForward(served).predict(case.captures, depths=3)
    agree = (a.target_ids == b.target_ids).float().mean()
    assert agree > 0.98, f"{key}: {agree:.3f}"  # sums in another order may swap near ties


def test_what_vllm_cannot_express_is_refused(case: Case, tmp_path) -> None:
    for key, fault in FAULTS.items():
        if not fault.served and key not in OTHERS:
            with pytest.raises(EngineError, match="What to do"):
                zoo.expressible(fault, case, tmp_path / key)


# ---- predicted and measured ----------------------------------------------------------------------

BASE = zoo.Effect(
    None, 8, 1000, (0.7, 0.65, 0.6), 0.66, 0.95, -1.2, {5: 2.6},
    {f"{framework} {name.format(i=step)}": 0.68 for framework, name, step in zoo.METRICS},
)  # fmt: skip


def with_number(effect: zoo.Effect, name: str, value: float) -> zoo.Effect:
    """The same effect with one number replaced, by the name that bounds use."""
    what, _, at = name.rpartition(" ")
    if what == "accuracy" and at.isdecimal():
        accuracy = list(effect.accuracy)
        accuracy[int(at)] = value
        return replace(effect, accuracy=tuple(accuracy))
    if what == "tokens":
        return replace(effect, tokens={**effect.tokens, int(at): value})
    fields = {"all tokens": "all_token", "coverage": "coverage", "nats": "nats"}
    if name in fields:
        return replace(effect, **{fields[name]: value})
    return replace(effect, metrics={**effect.metrics, name: value})


def at(bound: Bound, inside: bool) -> float:
    """A value of the number just inside or just outside the bound's upper end."""
    edge = bound.high + (-0.001 if inside and bound.low < bound.high else 0.0 if inside else 0.001)
    base = zoo.number(BASE, bound.number)
    return {"value": edge, "ratio": edge * base, "change": base + edge}[bound.against]


@pytest.mark.parametrize("key", [k for k, f in FAULTS.items() if f.predicted])
def test_each_prediction_can_be_confirmed_and_refuted(key: str) -> None:
    fault = FAULTS[key]
    if fault.predicted[0].error:
        kind = getattr(errors, fault.predicted[0].error)
        raised = zoo.Effect(kind("x", "y", expected="a", found="b", remedy="c"))
        other = zoo.Effect(MetricError("x", "y", expected="a", found="b", remedy="c"))
        assert zoo.judge(fault, BASE, raised).verdict == "confirmed"
        assert zoo.judge(fault, BASE, BASE).verdict == "refuted"
        assert zoo.judge(fault, BASE, other).verdict == "refuted"
        return
    fine = BASE
    for bound in fault.predicted:
        fine = with_number(fine, bound.number, at(bound, inside=True))
    told = zoo.judge(fault, BASE, fine)
    assert told.verdict == "confirmed", told
    for bound in fault.predicted:
        missed = with_number(fine, bound.number, at(bound, inside=False))
        told = zoo.judge(fault, BASE, missed)
        assert told.verdict == "refuted" and [c.holds for c in told.checks].count(False) == 1, told
        if bound.low > -math.inf and bound.low < bound.high:
            wide = {"value": 0.0, "ratio": 0.0, "change": -1.0}[bound.against]
            told = zoo.judge(fault, BASE, with_number(fine, bound.number, wide))
            assert told.verdict == "refuted", f"the lower end is not looked at: {told}"
        unknown = with_number(fine, bound.number, math.nan)
        assert zoo.judge(fault, BASE, unknown).verdict == "not measured"


@pytest.mark.parametrize(
    ("against", "value", "verdict"),
    [("value", 0.5, "confirmed"), ("value", 0.6, "refuted"), ("ratio", 0.35, "confirmed"),
     ("ratio", 0.36, "refuted"), ("change", 1.2, "confirmed"), ("change", 1.21, "refuted")],
)  # fmt: skip
def test_what_a_bound_is_against(against: str, value: float, verdict: str) -> None:
    """At most 0.5: itself, of the healthy 0.7, or above it."""
    fault = replace(FAULTS["feedback"], predicted=(Bound("accuracy 0", against, -math.inf, 0.5, "words"),))
    told = zoo.judge(fault, BASE, with_number(BASE, "accuracy 0", value))
    assert told.verdict == verdict
    assert "accuracy 0" in str(told) and "predicted at most 0.5" in str(told)


def test_nothing_predicted_is_nothing_judged() -> None:
    fault = replace(FAULTS["feedback"], predicted=())
    assert zoo.judge(fault, BASE, BASE) == zoo.Judgement("not measured")
    failed = zoo.Effect(ContractError("x", "y", expected="a", found="b", remedy="c"))
    assert zoo.judge(FAULTS["feedback"], BASE, failed).verdict == "not measured", "an error has no numbers"


def test_a_number_that_no_effect_has_is_refused() -> None:
    for name in ("accuracy", "accuracy x", "acc 0", "speculators full_acc_7"):
        with pytest.raises(MetricError, match="What to do"):
            zoo.number(BASE, name)


# ---- the record ----------------------------------------------------------------------------------


def test_effects_survive_the_record(case: Case) -> None:
    """NaN, errors, tokens by depth and metrics come back as they went in."""
    for key in ("map_identity", "fp16_overflow", "engine_loses"):
        effect = zoo.measure(zoo.plant(case, FAULTS[key]), 2, metrics=True, chains=(2,))
        again = zoo.from_record(json.loads(json.dumps(zoo.as_record(effect), allow_nan=False)))
        assert repr(again) == repr(effect), key
        assert type(again.error) is type(effect.error) and str(again.error) == str(effect.error)


def test_cases_are_planted_by_key_and_seed(case: Case) -> None:
    made = zoo.cases(case, ["feedback", "slot_order"], seed=3)
    assert list(made) == ["none", "feedback", "slot_order"] and made["none"] is case
    for key in ("feedback", "slot_order"):
        assert made[key].draft.contract == FAULTS[key].plant(case, seeded(3)).draft.contract


def test_recorded_has_a_row_for_every_fault() -> None:
    table = zoo.recorded()
    assert list(table.index) == ["none", *FAULTS]
    assert set(table["judged"].dropna()) <= {"confirmed", "refuted", "not measured"}
    told, effects = zoo.record(), zoo.recorded_effects()
    assert effects["none"].conversations == LIMIT and told["offline"]["date"] and told["engine"]["engine"]
    for key, fault in FAULTS.items():
        assert key in effects or key in told["offline"]["lacking"], f"{key}: run bench/zoo.py --parts offline"
        if key in effects:
            assert table.loc[key, "judged"] == zoo.judge(fault, effects["none"], effects[key]).verdict
    assert (table.loc[["fp16_overflow", "mask_empty", "ids_beyond"], "judged"] == "confirmed").all()
    assert table.loc["rope_scaling_dropped", "why not"].startswith(
        "needs a draft trained with a scaled rotary"
    )


def test_every_chosen_fault_was_served_and_counted() -> None:
    told = zoo.record()["engine"]
    table = zoo.served_table()
    for key in SERVED:
        assert FAULTS[key].served, f"{key} is not of the draft's files"
        assert key in told["faults"], f"{key}: run bench/zoo.py --parts engine"
        row = told["faults"][key]
        assert "refused" in row or (row["rounds"] > 0 and len(row["accepted_at"]) == told["depth"])
    assert list(table.index) == list(told["faults"]) and len(table) >= 15
    healthy = told["faults"]["none"]
    assert abs(table.loc["none", "vLLM"] - (1 + sum(healthy["accepted_at"]) / healthy["rounds"])) < 1e-3


def test_a_draft_that_vllm_refuses_is_recorded_with_its_message() -> None:
    told = zoo.record()
    told["engine"]["faults"]["d2t_zeros"] = {"refused": "serve: start: expected a server", "said": []}
    row = zoo.recorded(told).loc["d2t_zeros"]
    assert row["vLLM said"].startswith("refused: serve: start") and row["silent"] is False
    assert zoo.served_table(told).loc["d2t_zeros", "refused"].startswith("serve: start")


def test_a_damaged_file_decides_on_silence() -> None:
    told = zoo.record()
    told["engine"]["faults"]["feedback"]["said"] = []
    assert zoo.recorded(told).loc["feedback", "silent"] is True
    told["files"]["faults"]["feedback"] = {"tokens_per_round": 1.25, "said": ["WARNING no norm"]}
    row = zoo.recorded(told).loc["feedback"]
    assert row["silent"] is False and row["its file"] == "1.25 tokens a round; said WARNING no norm"
    told["files"]["faults"]["feedback"] = {"refused": "ValueError", "said": ["ERROR ValueError"]}
    assert zoo.recorded(told).loc["feedback", "its file"] == "refused: ValueError"


def test_every_damaged_file_is_in_the_record() -> None:
    files = zoo.record()["files"]["faults"]
    assert set(files) == set(DAMAGES) <= set(FAULTS)
    assert all("refused" in f or f["rounds"] > 0 for f in files.values())


def test_complaints_are_the_same_of_two_runs_of_the_same_thing(tmp_path) -> None:
    lines = (
        "(APIServer pid={p}) INFO 11-30 01:45:{p} [utils.py:299] nothing to see",
        "(EngineCore pid={p}) WARNING 11-30 01:45:{p} [llama.py:12] no d2t in /tmp/eagle3-engine-{p}/draft",
        "(EngineCore pid={p}) WARNING 11-30 01:46:{p} [llama.py:12] no d2t in /tmp/eagle3-engine-{p}/draft",
        "(EngineCore pid={p}) ValueError: shapes differ",
        "(APIServer pid={p}) INFO 11-30 01:47:{p} [core_client.py:770] [shutdown] MPClient: start",
        "(APIServer pid={p}) ERROR 11-30 01:47:{p} [async_llm.py:906] EngineDeadError",
    )
    one, two = tmp_path / "one.log", tmp_path / "two.log"
    one.write_text("\n".join(lines).replace("{p}", "11"))
    two.write_text("\n".join(lines).replace("{p}", "22"))
    assert complaints(one) == complaints(two)
    assert [x.split(" ")[0] for x in complaints(one)] == ["WARNING", "ValueError:"]


@pytest.mark.slow
def test_the_record_is_reproduced() -> None:
    """Three faults again: a map, a wiring and a state, to rounding of sums in another order."""
    told = zoo.recorded_effects()
    base = zoo.sample_case(LETTER, LIMIT)
    for key, case in zoo.cases(base, ["slot_order", "norm_before_residual", "d2t_zeros"]).items():
        again, wanted = zoo.measure(case, 2, chains=(5,)), told[key]
        assert again.pairs == wanted.pairs
        assert again.accuracy == pytest.approx(wanted.accuracy[:2], abs=0.003), key
        assert again.tokens[5] == pytest.approx(wanted.tokens[5], abs=0.03), key
        assert again.nats == pytest.approx(wanted.nats, abs=0.01), key


@pytest.mark.slow
def test_wide_captures_are_made_checked_and_kept(tmp_path) -> None:
    wanted = (Tap(2), Tap(28), Tap(29))
    one = samples.wide_captures(wanted, limit=1, work=tmp_path)[0]
    shipped = samples.captures(1)[0]
    assert one.taps == wanted and torch.equal(one.token_ids, shipped.token_ids)
    assert torch.equal(one.loss_mask, shipped.loss_mask) and one.final_kind == "pre_norm"
    rounded = one.state(Tap(28)).to(torch.bfloat16)
    assert one.state(Tap(28)).dtype == torch.float32
    assert (rounded == shipped.state(Tap(28))).float().mean() > 0.99, "only the last bit, and rarely"
    written = (tmp_path / "wide_0.safetensors").stat().st_mtime_ns
    every = samples.wide_captures(limit=1, work=tmp_path)[0]
    assert every.taps == samples.WIDE_TAPS and torch.equal(every.state(Tap(30)), every.final())
    assert (tmp_path / "wide_0.safetensors").stat().st_mtime_ns == written, "made once"


@pytest.mark.slow
def test_wide_captures_refuse_other_states(tmp_path, root) -> None:
    """Shipped states that the target does not make: the error names the file and the tap."""
    for folder in ("incident", "final"):
        (tmp_path / "captures" / folder).mkdir(parents=True)
    final = "captures/final/final_0.safetensors"
    (tmp_path / final).write_bytes((samples.SAMPLES / final).read_bytes())
    sample = torch.load(samples.SAMPLES / "captures/incident/data_0.pt", weights_only=True)
    sample["hidden_states"][1][40] *= 1.05
    torch.save(sample, tmp_path / "captures/incident/data_0.pt")
    with pytest.raises(CaptureError, match=r"data_0.pt: layer3: .*What to do"):
        samples.wide_captures(limit=1, root=tmp_path, work=tmp_path / "wide")
    assert not list((tmp_path / "wide").glob("*")), "nothing half made is left"
