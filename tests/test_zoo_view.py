"""Views of the fault zoo over every fault, and the game's rules; without a browser."""

from __future__ import annotations

from dataclasses import replace

import matplotlib.pyplot as plt
import pytest

from lib import zoo
from lib.case import Diagnosis
from lib.faults import FAULTS
from lib.zoo_view import (
    HEALTHY,
    Game,
    cost_figure,
    effect_figure,
    fault_explorer,
    fault_view,
    game_board,
    numbers,
    tokens_text,
    verdict,
)


@pytest.fixture(scope="module")
def effects():
    """What bench/zoo.py recorded."""
    return zoo.recorded_effects()


def said(case) -> Diagnosis:
    """A diagnosis for tests of the game itself: it says what it was given."""
    return Diagnosis("fault", (), (), {}, f"{len(case.captures)} conversations.")


def test_every_fault_has_a_view(effects):
    """Texts are escaped and complete; a figure wherever something was measured."""
    before = plt.get_fignums()
    for key, fault in FAULTS.items():
        figure, texts = fault_view(key, effects)
        assert fault.sighting in texts and "<script" not in texts and "measured" in texts
        evaluated = key in effects and effects[key].error is None
        assert (figure is not None) == evaluated, key
        if figure is not None:
            assert figure.axes[0].get_title(loc="left") == fault.title
            plt.close(figure)
    assert plt.get_fignums() == before


def test_the_slope_has_a_bar_for_whatever_was_measured(effects):
    """One bar per fault that could be evaluated, as long as its tokens a round; the worst on top."""
    measured = {k: e.tokens[5] for k, e in effects.items() if k != "none" and e.error is None}
    axes = cost_figure(effects).axes[0]
    names = [t.get_text() for t in axes.get_yticklabels()]
    assert {n: p.get_width() for n, p in zip(names, axes.patches, strict=True)} == measured
    assert measured[names[-1]] == min(measured.values())
    plt.close(axes.figure)


def test_the_figure_shows_both_numbers_of_each_row(effects):
    """Healthy and suspect stand on one line per number, at their values."""
    base, effect = effects["none"], effects["incident_slice"]
    figure = effect_figure(base, effect, "t")
    healthy, suspect = figure.axes[0].lines[-2:]
    names = [t.get_text() for t in figure.axes[0].get_yticklabels()]
    assert names == list(numbers(base))
    assert list(healthy.get_xdata()) == [numbers(base)[n] for n in names]
    assert list(suspect.get_xdata()) == [numbers(effect)[n] for n in names]
    plt.close(figure)


def test_an_error_is_said_in_place_of_tokens(effects):
    """A case that cannot be evaluated shows its typed error."""
    (key,) = [k for k in ("fp16_overflow",) if effects[k].error is not None]
    assert "CaptureError" in tokens_text(effects["none"], effects[key])
    assert "2.59 -> 1.47" in tokens_text(effects["none"], effects["incident_slice"])


def test_the_explorer_shows_every_measured_fault(effects, shell):
    """Each choice changes what is shown."""
    few = {k: effects[k] for k in ("none", "incident_slice", "slot_order", "fp16_overflow")}
    box = fault_explorer(few)
    (control,) = box.children[0].children
    assert {v for _, v in control.options} == set(few) - {"none"}
    seen = set()
    for _, key in control.options:
        control.value = key
        seen.add(box.children[1].outputs[0]["data"]["text/html"])
    assert len(seen) == 3 and control.layout.width == "44em"


def test_a_guess_is_final_and_controls_are_healthy():
    """The first guess counts; a healthy control is guessed right by "nothing is wrong"."""
    game = Game(None, ("slot_order", "control_bf16", "feedback"), said)
    game.guess(0, "slot_order")
    game.guess(0, "feedback")
    game.guess(1, HEALTHY)
    game.guess(2, HEALTHY)
    assert game.guesses == {0: "slot_order", 1: HEALTHY, 2: HEALTHY} and game.score == (2, 3)


@pytest.mark.slow
def test_the_game_on_the_samples(shell):
    """Ten cases that fit, the same for one seed; clues differ from the healthy case; the board answers."""
    base = zoo.sample_case("a", limit=2)
    keys = [k for k, f in FAULTS.items() if f.part in ("wiring", "norms", "maps")]
    game = Game.draw(base, keys, said, seed=3)
    assert len(set(game.keys)) == 10 and game.keys == Game.draw(base, keys, said, seed=3).keys
    assert game.keys != Game.draw(base, keys, said, seed=4).keys
    game = replace(game, keys=("incident_slice", "control_offset"))
    healthy, planted = game.clues(0)
    assert planted.accuracy[0] < healthy.accuracy[0] - 0.2 and game.clues(1)[1].accuracy == healthy.accuracy
    told = verdict(game, 0, "incident_slice")
    assert "2 conversations" in told and "right: 1 of 1" in told and FAULTS["incident_slice"].title in told
    assert "another one: 1 of 2" in verdict(game, 1, "slot_order")
    board = game_board(game, keys)
    assert any(o["output_type"] == "display_data" for o in board.children[0].children[1].outputs)
