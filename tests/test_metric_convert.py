"""The converter: published numbers worked by hand, what must be refused, and round trips."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lib.errors import MetricError
from lib.metric_convert import IDENTITIES, QUANTITIES, conversions, convert, from_counts

EAGLE_191 = [0.7011, 0.3695, 0.2059, 0.1255, 0.0812]


def test_eagle_issue_191():
    """Five rates that fall by half are joint rates of a healthy head: 0.3695 / 0.7011 = 0.527, ...

    0.2059 / 0.3695 = 0.557, 0.1255 / 0.2059 = 0.610, 0.0812 / 0.1255 = 0.647; they sum to 1.4832.
    """
    conditional = convert(EAGLE_191, "joint", "conditional")
    assert conditional.value == pytest.approx((0.7011, 0.5270, 0.5572, 0.6095, 0.6470), abs=5e-5)
    assert conditional.assumption == "exact"
    length = convert(EAGLE_191, "joint", "acceptance_length")
    assert str(length) == "2.483 (exact)" and length.value == pytest.approx(2.4832)
    assert convert(EAGLE_191, "joint", "acceptance_rate").value == pytest.approx(1.4832 / 5)
    # Read as conditional rates, the same numbers would promise 0.7011 + 0.2591 + 0.0533 + ... = 1.021.
    misread = convert(EAGLE_191, "conditional", "acceptance_length").value
    assert misread == pytest.approx(1 + 0.7011 + 0.25906 + 0.05334 + 0.00669 + 0.00054, abs=1e-4)


def test_vllm_issue_28549():
    """105426 drafts of 3 tokens, 136330 accepted: 43.1 %, 1 + 136330 / 105426 = 2.293; .65 + .40 + .24."""
    served = from_counts(105426, 316278, 136330)
    assert (served.depth, round(100 * served.rate, 1), round(served.length, 3)) == (3, 43.1, 2.293)
    assert convert(served.rate, "acceptance_rate", "acceptance_length", depth=3).value == pytest.approx(
        served.length
    )
    by_position = convert([0.65, 0.40, 0.24], "joint", "acceptance_length").value
    assert by_position == pytest.approx(2.29) and abs(by_position - served.length) < 0.015  # two decimals


def test_vllm_ascend_pull_7038():
    """The rotated target before and after: 1 + 13 / 186 = 1.07, 1 + 136 / 65 = 3.09; both K = 4."""
    broken, mended = from_counts(186, 744, 13), from_counts(65, 260, 136)
    assert broken.depth == mended.depth == 4
    assert (round(broken.length, 2), round(mended.length, 2)) == (1.07, 3.09)


def test_sglang_gauges_by_hand():
    """K = 3, AL 2.2: strict rate 1.2 / 3 = 0.4; the older gauge 2.2 / 4 = 0.55 of the same run."""
    assert convert(2.2, "acceptance_length", "acceptance_rate", depth=3).value == pytest.approx(0.4)
    assert convert(2.2, "acceptance_length", "rate_with_bonus", depth=3).value == pytest.approx(0.55)
    both = convert(0.55, "rate_with_bonus", "acceptance_rate", depth=3)
    assert both.value == pytest.approx(0.4) and both.assumption == "exact"
    assert both.formulas == ("(K + 1) * rate", "(AL - 1) / K")


def test_model_optimizer_by_hand():
    """Ten tokens in 1 + 3 rounds: AR 2.5; the three rounds with a draft gained 9, AL 3."""
    found = convert(2.5, "model_optimizer_ar", "acceptance_length", response_tokens=10)
    assert found.value == pytest.approx(3) and "all responses have n tokens" in found.assumption


def test_specforge_by_hand():
    """Marginals .6, .5: .6 + .3 = .9 exactly; read as a length, 1.9 is a guess and says so."""
    assert convert([0.6, 0.5], "marginal", "simulated").value == pytest.approx(0.9)
    assert convert([0.6, 0.5], "marginal", "simulated").assumption == "exact"
    guess = convert(0.9, "simulated", "acceptance_length")
    assert guess.value == pytest.approx(1.9)
    assert guess.assumption.startswith("approximate: marginal accuracies are read as conditional ones")
    assert convert([0.6, 0.5], "marginal", "acceptance_length").value == pytest.approx(1.9)


def test_coverage_by_hand():
    """In-vocab .8 at coverage .9 is .72 of all tokens, and back; a re-labelled .8 is at least that."""
    there = convert([0.8], "in_vocab_marginal", "marginal", coverage=0.9)
    assert there.value == pytest.approx((0.72,)) and there.assumption == "exact"
    assert convert([0.72], "marginal", "in_vocab_marginal", coverage=0.9).value == pytest.approx((0.8,))
    relabelled = convert([0.8, 0.5], "full_acc", "joint", coverage=0.9)
    assert relabelled.value == pytest.approx((0.72, 0.405)) and "hit less" in relabelled.assumption


@pytest.mark.parametrize(
    ("value", "source", "to", "known", "message"),
    [
        (0.4, "acceptance_rate", "acceptance_length", {}, "expected K, the drafted tokens.*pass depth="),
        ([0.8], "in_vocab_marginal", "marginal", {}, "share of counted positions.*pass coverage="),
        (
            2.5,
            "model_optimizer_ar",
            "acceptance_rate",
            {},
            "tokens of a response and K.*pass response_tokens=, depth=",
        ),
        (2.2, "acceptance_length", "joint", {"depth": 3}, "cannot be split into one per step"),
        ([0.6, 0.3], "joint", "marginal", {}, "not followed after its first miss"),
        ([0.6, 0.3], "overlap", "joint", {}, "neither the argmax nor the overlap"),
        (2.2, "acceptance_length", "simulated", {}, "product of marginal accuracies"),
        ([0.6, 0.3], "joint", "full_acc", {}, "out of its vocabulary; this number"),
        (2.2, "acceptance_length", "tau_sim", {}, "starts a chain at every masked position"),
        (43.1, "acceptance_rate", "acceptance_length", {"depth": 3}, r"values in 0..1 .*ratios as fractions"),
        (0.9, "acceptance_length", "acceptance_rate", {"depth": 3}, r"values in 1..4"),
        (4.5, "acceptance_length", "acceptance_rate", {"depth": 3}, r"values in 1..4"),
        ([0.3, 0.6], "joint", "conditional", {}, "rates that do not rise.*conditional or marginal"),
        ([0.6, 0.3], "joint", "acceptance_length", {"depth": 3}, "3 values, one per drafted token"),
        ([0.6, 0.3], "acceptance_length", "acceptance_rate", {"depth": 3}, "expected one number, found 2"),
        ([], "joint", "conditional", {}, "one number per step, found 0"),
        ([0.5, 0.0, 0.0], "joint", "conditional", {}, "rates above 0 before the last step"),
        ([0.9], "marginal", "in_vocab_marginal", {"coverage": 0.5}, r"values in 0..1.*\[1.8\]"),
        ([0.9], "marginal", "in_vocab_marginal", {"coverage": 0}, "coverage: expected a number in 0..1"),
        (math.nan, "acceptance_rate", "acceptance_length", {"depth": 3}, r"values in 0..1"),
        (2.2, "tau", "acceptance_rate", {}, "expected one of .'acceptance_length'"),
    ],
)
def test_what_cannot_be_turned_says_why(value, source, to, known, message):
    with pytest.raises(MetricError, match=message):
        convert(value, source, to, **known)


@pytest.mark.parametrize("counts", [(0, 0, 0), (10, 5, 1), (10, 30, 31), (10, 30, -1)])
def test_counters_that_no_run_has(counts):
    with pytest.raises(MetricError, match="0 < drafts <= drafted"):
        from_counts(*counts)


def test_a_depth_that_varies():
    """vLLM trims drafts near the end of a request: with the mean K the identity stays exact."""
    served = from_counts(10, 29, 12)
    assert served.depth == 2.9
    found = convert(served.rate, "acceptance_rate", "acceptance_length", depth=served.depth)
    assert found.value == pytest.approx(2.2) == pytest.approx(served.length)


# ---- properties ---------------------------------------------------------------------------------

CONDITIONALS = st.lists(st.floats(0.01, 1), min_size=1, max_size=8)


@settings(deadline=None)  # a busy machine is not a failure
@given(CONDITIONALS)
def test_round_trips(conditional):
    """Conditional -> joint -> conditional; lengths within 1..K + 1, the same by every road."""
    joint = convert(conditional, "conditional", "joint").value
    assert list(joint) == sorted(joint, reverse=True) and math.isclose(joint[-1], math.prod(conditional))
    assert convert(joint, "joint", "conditional").value == pytest.approx(tuple(conditional))
    length = convert(joint, "joint", "acceptance_length").value
    depth = len(conditional)
    assert 1 <= length <= depth + 1
    rate = convert(length, "acceptance_length", "acceptance_rate", depth=depth).value
    assert rate == pytest.approx(convert(conditional, "conditional", "acceptance_rate").value)
    assert convert(rate, "acceptance_rate", "acceptance_length", depth=depth).value == pytest.approx(length)


@settings(deadline=None)
@given(st.integers(1, 200), st.integers(0, 15), st.data())
def test_counts_and_rates_agree(drafts, depth, data):
    """From counters or from the rate and K: one length, between 1 and K + 1."""
    depth = depth + 1
    accepted = data.draw(st.integers(0, drafts * depth))
    served = from_counts(drafts, drafts * depth, accepted)
    assert 0 <= served.rate <= 1 and 1 <= served.length <= depth + 1
    again = convert(served.rate, "acceptance_rate", "acceptance_length", depth=depth).value
    assert again == pytest.approx(served.length)


VALUES = {"ratio": 0.5, "tokens/round": 1.6, "accepted/round": 0.9}
KNOWN = {"depth": 3, "coverage": 0.9, "response_tokens": 64}


@pytest.mark.parametrize("source", QUANTITIES)
def test_the_matrix_is_what_convert_does(source):
    """Every cell: "exact" and "approximate" convert with what they say they need, the others raise."""
    matrix, reasons = conversions(), conversions(reasons=True)
    value = VALUES[QUANTITIES[source].unit]
    value = [value, value, value] if QUANTITIES[source].per_step else value
    for to in QUANTITIES:
        cell = matrix.loc[source, to]
        assert reasons.loc[source, to].startswith(cell)
        if cell in ("impossible", "needs per-position"):
            with pytest.raises(MetricError, match="quantities that an identity connects"):
                convert(value, source, to, **KNOWN)
            continue
        needed = {name for name in KNOWN if {"depth": "K"}.get(name, name) in cell.split()}
        found = convert(value, source, to, **{name: KNOWN[name] for name in needed})
        assert found.assumption.split(":")[0] == ("exact" if cell == "same" else cell.split(",")[0])
        assert isinstance(found.value, tuple) == QUANTITIES[to].per_step
        for name in needed:
            with pytest.raises(MetricError, match=f"pass .*{name}="):
                convert(value, source, to, **{n: KNOWN[n] for n in needed - {name}})


def test_identities_name_quantities():
    """No identity leads out of the list, and nothing is turned into itself."""
    assert all({i.source, i.to} <= set(QUANTITIES) and i.source != i.to for i in IDENTITIES)
    assert len({(i.source, i.to) for i in IDENTITIES}) == len(IDENTITIES)
