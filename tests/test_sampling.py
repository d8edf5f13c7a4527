"""lib/sampling.py: the interval covers what it says, the order is fair, the rule stops and not too soon."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import numpy as np
import pandas as pd
import pytest

from lib.errors import MetricError
from lib.partitions import Source
from lib.sampling import FEWEST, Enough, Estimate, amounts, drawing_order, files_needed, stratified

SIZES = {"short": 300, "long": 120, "code": 80}
RATES = {"short": 0.45, "long": 0.7, "code": 0.9}


def population(seed: int = 1) -> pd.DataFrame:
    """Files of three strata: positions per file and hits, rates that differ by stratum and by file."""
    rng = np.random.default_rng(seed)
    rows = []
    for name, n in SIZES.items():
        positions = rng.integers(20, 200, n) * (3 if name == "long" else 1)
        rate = np.clip(rng.normal(RATES[name], 0.1, n), 0, 1)
        rows.append(pd.DataFrame({"stratum": name, "y": rng.binomial(positions, rate), "x": positions}))
    return pd.concat(rows, ignore_index=True)


def sampled(files: pd.DataFrame, n: int, seed: int) -> pd.DataFrame:
    sources = [Source(str(i), key=str(i), stratum=s) for i, s in enumerate(files["stratum"])]
    return files.iloc[[int(s.file) for s in drawing_order(sources, seed)[:n]]]


def test_all_files_leave_nothing_open():
    files = population()
    e = stratified(files["y"], files["x"], list(files["stratum"]), SIZES)
    assert e.value == files["y"].sum() / files["x"].sum()
    assert e.low == e.high == e.value and e.files == e.population == 500


@pytest.mark.parametrize("n", [30, 100, 300])
def test_the_interval_covers_the_truth_as_often_as_it_says(n):
    """1000 samples: 95 % within three standard errors of a share of 1000 (2.1 points), none much too wide."""
    files = population()
    truth = files["y"].sum() / files["x"].sum()
    inside, widths, values = 0, [], []
    for seed in range(1000):
        part = sampled(files, n, seed)
        e = stratified(part["y"], part["x"], list(part["stratum"]), SIZES)
        inside += e.low <= truth <= e.high
        widths.append(e.half_width)
        values.append(e.value)
    assert 0.929 <= inside / 1000 <= 0.985, inside
    assert np.mean(widths) < 2.6 * np.std(values), "far wider than the estimates scatter"
    assert abs(np.mean(values) - truth) < 0.2 * np.std(values)


def test_strata_make_the_interval_narrower_than_one_heap():
    """What they are for: rates differ between strata, hardly within."""
    files = population()
    part = sampled(files, 60, 3)
    with_strata = stratified(part["y"], part["x"], list(part["stratum"]), SIZES)
    heap = stratified(part["y"], part["x"], ["all"] * 60, {"all": 500})
    assert with_strata.half_width < 0.8 * heap.half_width


def test_a_ratio_worked_by_hand():
    """One stratum of four files, two measured: 3 of 4 and 1 of 4; Cochran 6.11 with N = 4, n = 2."""
    e = stratified([3, 1], [4, 4], ["a", "a"], {"a": 4}, level=0.5)
    assert e.value == 0.5
    # residuals +1 and -1: s^2 = 2; variance of the total 4^2 (1 - 1/2) 2 / 2 = 8; over X = 16; t(0.75, 1) = 1
    assert e.half_width == pytest.approx(8**0.5 / 16)


def test_strata_with_one_file_are_joined_and_strays_go_with_the_smallest():
    e = stratified([1, 2, 1], [2, 4, 3], ["a", "a", "b"], {"a": 10, "b": 5, "c": 5})
    assert e.strata == 1 and 0 < e.half_width < float("inf"), "one file for b and c says nothing of spread"
    y, x = [1, 2, 1, 2], [2, 4, 3, 3]
    stray = stratified(y, x, ["a", "a", "b", "b"], {"a": 10, "b": 50, "stray": 1})
    assert stray == stratified(y, x, ["a", "a", "b", "b"], {"a": 11, "b": 50}), (
        "an unseen stratum of one file"
    )
    assert stratified([1], [2], ["a"], {"a": 10, "b": 5}).half_width == float("inf"), "one file in all"
    e = stratified([1, 2, 1, 2], [2, 4, 3, 3], ["a", "a", "b", "c"], {"a": 10, "b": 5, "c": 5})
    assert e.strata == 2 and 0 < e.half_width < float("inf")
    whole = stratified([1, 2, 1], [2, 4, 3], ["a", "a", "b"], {"a": 2, "b": 1})
    assert whole.half_width == 0 and whole.value == 4 / 9, "a stratum of one file that is measured is known"


def test_nothing_measured_says_nothing():
    e = stratified([], [], [], {"a": 3})
    assert e.half_width == float("inf")
    assert stratified([0, 0], [0, 0], ["a", "a"], {"a": 9}).half_width == float("inf"), "no position at all"


def test_sizes_that_cannot_be():
    with pytest.raises(MetricError, match="count every file"):
        stratified([1], [2], ["a"], {"b": 3})
    with pytest.raises(MetricError, match="at least 2 files"):
        stratified([1, 1], [2, 2], ["a", "a"], {"a": 1})


def test_every_beginning_of_the_order_is_spread_over_the_strata():
    sources = [Source(f"{s}{i}", stratum=s) for s, n in SIZES.items() for i in range(n)]
    order = drawing_order(sources, 4)
    assert sorted(s.file for s in order) == sorted(s.file for s in sources)
    for n in (10, 50, 200):
        share = Counter(s.stratum for s in order[:n])
        for name, size in SIZES.items():
            assert abs(share[name] - n * size / 500) <= 1
    assert order == drawing_order(sources, 4) != drawing_order(sources, 5)
    first = [drawing_order(sources, seed)[0].file for seed in range(60)]
    assert len(set(first)) > 20, "the first file is drawn, not the first of the list"


def rows_of(n: int, rate: float = 0.6) -> pd.DataFrame:
    rng = np.random.default_rng(n)
    hits = rng.binomial(50, rate, n)
    return pd.DataFrame(
        {
            "stratum": ["a"] * n,
            "in_vocab_hits": [[[h, 0]] for h in hits],
            "in_vocab": [[[50, 50]]] * n,
            "gained": [[[20, 30]]] * n,
            "rounds": [[[10, 10]]] * n,
            "taps": [["embed", "layer3"]] * n,
            "norm_count": [[50, 50]] * n,
            "norm_mean": [[1.0, 30.0 + i % 2] for i in range(n)],
        }
    )


def test_quantities_of_rows():
    rows = rows_of(20)
    assert Enough("tokens per round", 0.1).estimate(rows, {"a": 100}).value == 3.0
    assert Enough("norm layer3", 0.1).estimate(rows, {"a": 100}).value == pytest.approx(30.5)
    y, x = amounts(rows, "accuracy")
    assert (x == 50).all() and y.sum() == sum(w[0][0] for w in rows["in_vocab_hits"])
    with pytest.raises(MetricError, match="a wiring in the plan"):
        amounts(rows.assign(in_vocab_hits=[[]] * 20), "accuracy")
    for wrong in ("speed", "norm layer9"):
        with pytest.raises(MetricError, match="'norm TAP' with a tap of"):
            amounts(rows, wrong)


def test_the_rule_stops_when_the_interval_is_narrow_and_looks_rarely():
    rule = Enough("accuracy", half_width=0.02, first=15)
    assert Enough("accuracy", 0.02, first=3).looks(100)[0] == FEWEST
    looks = rule.looks(1000)
    assert looks[0] == 15 and len(looks) < 20
    assert all(b >= 1.29 * a for a, b in pairwise(looks))
    found = {n: rule.satisfied(rule.estimate(rows_of(n), {"a": 1000})) for n in (10, 400)}
    assert found == {10: False, 400: True}
    assert not rule.satisfied(Estimate(0.5, -float("inf"), float("inf"), 3, 9, 1))


def test_stopping_at_looks_keeps_the_promise():
    """The rule is asked several times; what it stops with must still cover (300 runs, 90 % at the least)."""
    files, inside = population(), 0
    truth = files["y"].sum() / files["x"].sum()
    rule = Enough("accuracy", half_width=0.03, first=20)
    for seed in range(300):
        part = sampled(files, 500, seed)
        for n in [*rule.looks(500), 500]:
            now = part.iloc[:n]
            e = stratified(now["y"], now["x"], list(now["stratum"]), SIZES)
            if rule.satisfied(e):
                break
        inside += e.low <= truth <= e.high
    assert inside / 300 >= 0.9, inside


def test_files_needed_is_what_the_interval_then_takes():
    """Drawn so many, the interval is about as wide as was asked for, narrower asked means more files."""
    files = population()
    rows = pd.DataFrame(
        {"in_vocab_hits": [[[y]] for y in files["y"]], "in_vocab": [[[x]] for x in files["x"]]}
    )
    counts = [files_needed(rows, "accuracy", h, 500) for h in (0.05, 0.02, 0.01)]
    assert FEWEST <= counts[0] < counts[1] < counts[2] < 500
    widths = []
    for seed in range(50):
        part = sampled(files, counts[1], seed)
        widths.append(stratified(part["y"], part["x"], ["a"] * counts[1], {"a": 500}).half_width)
    assert np.mean(widths) == pytest.approx(0.02, rel=0.1)
    assert files_needed(rows[:1], "accuracy", 0.05, 500) == 500, "one file says nothing of spread"
