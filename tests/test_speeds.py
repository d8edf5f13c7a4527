"""Speeds by hand, in turns on a tiny real target, and the committed record of the serving engine."""

from __future__ import annotations

import contextlib
import json
from dataclasses import replace

import pytest
import torch

from lib import speeds
from lib.checkpoints import load_draft
from lib.decoding import Generation, decode, speculate
from lib.draft import DraftForward
from lib.engine import Completion, Counters, Deployment
from lib.speeds import Served, Speed, in_turns, serve_each, served_speeds, speed_rows
from tests.support import speculators_draft, tiny_llama

PROMPTS = [torch.tensor(ids) for ids in ([3, 1, 4, 1, 5], [9, 2, 6, 5])]
FREQUENT = 29  # the tiny target's favourite token, after these prompts


def test_speed_by_hand():
    """Medians, not means: one slow repeat moves nothing but the spread."""
    speed = Speed(rates=(10.0, 90.0, 20.0), ratios=(0.5, 1.5, 1.25), tokens_per_round=2.345)
    assert (speed.rate, speed.ratio) == (20.0, 1.25)
    assert Speed((10.0, 20.0), (1.0, 2.0), 1.0).rate == 15.0
    assert speed.row() == {
        "tok/s": 20.0, "spread": "10.0 .. 90.0", "ratio": 1.25, "ratio spread": "0.50 .. 1.50",
        "tokens per round": 2.35,
    }  # fmt: skip


def test_speed_rows_keep_the_order():
    """One row per deployment, as given."""
    table = speed_rows({"b": Speed((2.0,), (1.0,), 1.0), "a": Speed((3.0,), (1.5,), 2.0)})
    assert list(table.index) == ["b", "a"] and table.index.name == "deployment"
    assert list(table["tok/s"]) == [2.0, 3.0] and table.loc["a", "tokens per round"] == 2.0


# ---- the workbook's loop -------------------------------------------------------------------------


def test_in_turns_by_hand():
    """Two prompts, three repeats, the machine half as fast in the second: the ratios do not notice.

    Plain: 2 x 4 tokens after the prompt's, in 2 x 1 s. Drafted: the same in 2 x 0.5 s, 3 rounds each.
    """
    calls = []

    def variant(name: str, seconds: float, gained: tuple[int, ...]):
        def run(prompt):
            calls.append((name, int(prompt[0])))
            slow = 2 if 6 < len(calls) <= 10 else 1  # two warm-ups and four runs, then a slow repeat
            return Generation(prompt, torch.arange(5), gained, gained, slow * seconds, 9.0, 3)

        return run

    variants = {"plain": variant("plain", 1.0, ()), "drafted": variant("drafted", 0.5, (1, 2, 1))}
    measured, runs = in_turns(variants, PROMPTS, repeats=3)
    warm = [("plain", 3), ("drafted", 3)]
    assert calls == warm + 3 * [("plain", 3), ("plain", 9), ("drafted", 3), ("drafted", 9)]
    assert measured["plain"] == Speed((4.0, 2.0, 4.0), (1.0, 1.0, 1.0), 1.0)
    assert measured["drafted"] == Speed((8.0, 4.0, 8.0), (2.0, 2.0, 2.0), 4 / 3)
    assert [g.seconds for g in runs["drafted"]] == [0.5, 0.5], "the last repeat's"


@pytest.fixture(scope="module")
def live(tmp_path_factory):
    """A tiny target, and a draft that always says the target's favourite token: a hit now and then."""
    folder = tmp_path_factory.mktemp("live")
    speculators_draft().save_pretrained(folder)
    draft = load_draft(folder)
    always = torch.full_like(draft.d2t, FREQUENT) - torch.arange(len(draft.d2t))
    return tiny_llama(), DraftForward(replace(draft, d2t=always))


def test_in_turns_on_a_real_target(live):
    """Plain and drafted: the same text, the baseline its own yardstick, rounds counted over all prompts."""
    target, forward = live
    variants = {
        "plain": lambda p: decode(target, p, 24),
        "one": lambda p: speculate(target, forward, p, 24, depth=1),
        "four": lambda p: speculate(target, forward, p, 24, depth=4),
    }
    measured, runs = in_turns(variants, PROMPTS, repeats=3)
    assert list(measured) == list(runs) == list(variants)
    assert measured["plain"].ratios == (1.0, 1.0, 1.0) and measured["plain"].tokens_per_round == 1.0
    for name, speed in measured.items():
        assert len(speed.rates) == len(speed.ratios) == 3 and min(speed.rates) > 0
        of_plain = [a / b for a, b in zip(speed.rates, measured["plain"].rates, strict=True)]
        assert speed.ratios == pytest.approx(of_plain)
        assert [g.prompt.tolist() for g in runs[name]] == [p.tolist() for p in PROMPTS]
        for drafted, plain in zip(runs[name], runs["plain"], strict=True):
            assert torch.equal(drafted.tokens, plain.tokens), f"{name}: speculation changed the text"
    for name in ("one", "four"):
        gained = [n for g in runs[name] for n in g.gained]
        assert sum(gained) == sum(len(g.tokens) - 1 for g in runs[name])
        assert measured[name].tokens_per_round == sum(gained) / len(gained) > 1
    assert measured["four"].tokens_per_round > measured["one"].tokens_per_round


# ---- served --------------------------------------------------------------------------------------


def test_served_speeds_by_hand():
    """The first deployment's median is everyone's yardstick; without counters a round gains one token."""
    served = {
        "baseline": Served((10.0, 20.0, 40.0), ((1, 2),), None),
        "drafted": Served((30.0, 5.0, 20.0), ((1, 2),), Counters(10, 30, 12, (8, 3, 1))),
    }
    assert served_speeds(served) == {
        "baseline": Speed((10.0, 20.0, 40.0), (0.5, 1.0, 2.0), 1.0),
        "drafted": Speed((30.0, 5.0, 20.0), (1.5, 0.25, 1.0), 2.2),
    }


class FakeServer:
    """Answers two tokens a second, one round each; every request is remembered."""

    def __init__(self, deployment: Deployment) -> None:
        self.deployment, self.requests, self.rounds = deployment, [], 0

    def generate(self, prompts, max_tokens: int) -> list[Completion]:
        self.requests.append((len(prompts), max_tokens))
        self.rounds += len(prompts)
        return [Completion((len(self.requests), int(p[0])), 1.0, "length") for p in prompts]

    def counters(self) -> Counters:
        assert self.deployment.draft, "a server without a draft has no counters"
        return Counters(self.rounds, 3 * self.rounds, self.rounds, (self.rounds, 0, 0))


def test_serve_each_counts_the_last_repeat_only(monkeypatch):
    """A short warm-up, then the repeats; answers and counts are the last one's, servers come one by one."""
    servers, running = [], []

    @contextlib.contextmanager
    def serve(deployment):
        assert not running, "two servers at once"
        servers.append(FakeServer(deployment))
        running.append(servers[-1])
        yield servers[-1]
        running.pop()

    class Plan:  # what serve_each reads of a deployment
        def __init__(self, draft) -> None:
            self.draft = draft

    monkeypatch.setattr(speeds, "serve", serve)
    served = serve_each({"baseline": Plan(None), "drafted": Plan("a")}, PROMPTS, 32, repeats=3)
    assert [s.requests for s in servers] == 2 * [[(1, 16), (2, 32), (2, 32), (2, 32)]]
    assert served["baseline"].counters is None
    assert served["drafted"].counters == Counters(2, 6, 2, (2, 0, 0))
    for s in served.values():
        assert s.rates == (2.0, 2.0, 2.0) and s.answers == ((4, 3), (4, 9))


def test_recorded_speeds_are_those_of_the_file(tmp_path, monkeypatch):
    """Lists of the file come back as speeds."""
    made = {"rates": [1.0, 3.0, 2.0], "ratios": [0.5, 1.5, 1.0], "tokens_per_round": 1.25}
    monkeypatch.setattr(speeds, "RECORD", tmp_path / "engine.json")
    speeds.RECORD.write_text(json.dumps({"engine": "x", "deployments": {"deployed, 2": made}}))
    assert speeds.recorded()["engine"] == "x"
    assert speeds.recorded_speeds() == {"deployed, 2": Speed((1.0, 3.0, 2.0), (0.5, 1.5, 1.0), 1.25)}


# ---- the committed record ------------------------------------------------------------------------

needs_record = pytest.mark.skipif(
    not speeds.RECORD.is_file(), reason="no bench/results/engine.json yet: python bench/engine.py writes it"
)


@needs_record
def test_record_names_its_machine_and_repeats():
    """Engine, machine and requests are said; at least five rates each; the baseline is the yardstick."""
    record, recorded = speeds.recorded(), speeds.recorded_speeds()
    assert all(record[key] for key in ("engine", "machine", "date", "requests", "counted requests"))
    assert next(iter(recorded)) == "baseline" and recorded["baseline"].ratio == pytest.approx(1)
    for name, speed in recorded.items():
        assert len(speed.rates) == len(speed.ratios) >= 5, name
        of_baseline = [rate / recorded["baseline"].rate for rate in speed.rates]
        assert speed.ratios == pytest.approx(of_baseline), name
        assert (speed.tokens_per_round == 1) == name.startswith("baseline"), name


@needs_record
def test_record_tells_the_incident_and_the_fix():
    """Deployed at 15 is slower than no draft; the right wiring is faster at every depth both have."""
    recorded = speeds.recorded_speeds()
    assert recorded["deployed, 15"].ratio < 1
    depths = [name.split(", ")[1] for name in recorded if name.startswith("deployed, ")]
    assert sorted(depths) == ["15", "2"]
    for depth in depths:
        deployed, fixed = recorded[f"deployed, {depth}"], recorded[f"fixed, {depth}"]
        assert fixed.ratio > deployed.ratio and fixed.tokens_per_round > deployed.tokens_per_round, depth


@needs_record
def test_record_counts_add_up():
    """Every count of rounds: chains only break, and tokens per round follow from them."""
    for name, counts in speeds.recorded()["counts"].items():
        for place in ("engine", "from captures", "from the engine's texts"):
            c, where = counts[place], f"{name}, {place}"
            at = c["accepted_at"]
            assert len(at) == counts["depth"] == int(name.split(", ")[1]), where
            assert at == sorted(at, reverse=True) and 0 <= at[-1] and at[0] <= c["rounds"], where
            assert c["tokens_per_round"] == pytest.approx(1 + sum(at) / c["rounds"]), where


@needs_record
def test_record_texts_part_only_at_a_tie():
    """Greedy speculation is lossless: another text needs two logits equal within fp32 rounding."""
    for name, counts in speeds.recorded()["counts"].items():
        parted = counts["texts that differ from the baseline's"]
        assert len(parted) < counts["texts"] / 4, name
        assert all(0 <= p["gap"] < 1e-3 for p in parted), f"{name}: {parted}"


@needs_record
def test_record_states_are_the_tap_that_was_asked_for():
    """The engine's captures: rounding away from ours at each tap, far from its neighbours."""
    for tap, away in speeds.recorded()["captures"].items():
        assert away["same tap"] < 1e-4 < 1e-2 < away["nearest neighbour"], tap


@needs_record
def test_record_agrees_with_the_captures():
    """What captures alone predict is what the engine did: inside the interval, or at most 0.1 away."""
    for name, counts in speeds.recorded()["counts"].items():
        offline, engine = counts["from captures"], counts["engine"]["tokens_per_round"]
        low, high = offline["interval"]
        assert low <= offline["tokens_per_round"] <= high, name
        away = abs(engine - offline["tokens_per_round"])
        assert low <= engine <= high or away <= 0.1, f"{name}: {engine:.2f}, {low:.2f} .. {high:.2f} offline"
