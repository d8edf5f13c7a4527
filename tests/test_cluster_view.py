"""lib/cluster_view.py: the plan's arithmetic by hand, the figures, the explorer over all its choices."""

from __future__ import annotations

import io
import itertools

import matplotlib.pyplot as plt
import pytest

from lib.cluster_view import Eventful, plan_explorer, plan_figure, plan_table, stopping_figure
from lib.sampling import Estimate
from tests.test_widgets import shown


def test_hours_by_hand():
    """7200 files of 1 GB and 4 s: 8 h on one worker; storage of 1 GB/s needs 2 h, which 4 workers reach."""
    table = plan_table(7200, 1e9, 4.0, bandwidth=1e9, workers=(1, 2, 4, 8))
    assert table["hours"].tolist() == [8.0, 4.0, 2.0, 2.0]
    assert table["limited by"].tolist() == ["workers", "workers", "workers", "storage"]
    assert table["GB/s read"].tolist() == [0.25, 0.5, 1.0, 1.0]
    assert table.attrs["terabytes"] == 7.2
    free = plan_table(7200, 1e9, 4.0, workers=(1, 8))
    assert free["hours"].tolist() == [8.0, 1.0], "without a limit of the storage"


def test_the_plan_as_a_figure():
    plans = {"slow": plan_table(1000, 1e8, 30.0), "fast": plan_table(1000, 1e8, 0.1, 1e9)}
    figure = plan_figure(plans, "t")
    labels = [t.get_text() for t in figure.axes[0].get_legend().get_texts()]
    assert labels == ["slow", "fast"]
    plt.close(figure)


def test_the_stop_as_a_figure():
    looks = [(8, Estimate(0.7, 0.6, 0.8, 8, 32, 2)), (12, Estimate(0.69, 0.66, 0.72, 12, 32, 2))]
    figure = stopping_figure(looks, 0.03, 0.68, "t")
    assert figure.axes[0].get_title(loc="left") == "t"
    plt.close(figure)


def test_the_explorer_draws_every_choice(shell):
    box = plan_explorer({"norms": (1.1e8, 0.1), "accuracy": (1.1e8, 40.0)})
    assert "explorer" in box._dom_classes
    controls = [c for c in box.children[0].children if hasattr(c, "options")]
    assert len(controls) == 3
    for choice in itertools.product(*([0, len(c.options) - 1] for c in controls)):
        for control, index in zip(controls, choice, strict=True):
            control.index = index
        assert shown(box)


@pytest.mark.parametrize("steps", [[1] * 6, [2, 2, 2], [5, 1]])
def test_the_event_comes_once(steps):
    happened = []
    with Eventful(total=6, at=3, do=lambda: happened.append(1), file=io.StringIO()) as bar:
        for n in steps:
            bar.update(n)
    assert happened == [1]
    with Eventful(total=6, at=0, do=lambda: happened.append(2), file=io.StringIO()) as bar:
        bar.update(6)
    assert happened == [1], "at=0 means never"
