"""Figures of speeds and definitions: title, marks and labels are those of the numbers given."""

from __future__ import annotations

import matplotlib.pyplot as plt
import pandas as pd
import pytest
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from lib.plots import COLOURS, plot_definitions, plot_speed_by_depth, plot_speeds
from lib.speeds import Speed

OURS = {
    "no speculation": Speed((90.0, 92.0, 88.0), (1.0, 1.0, 1.0), 1.0),
    "as deployed": Speed((56.0, 55.0, 60.0), (0.62, 0.6, 0.68), 1.6),
    "flag fixed": Speed((130.0, 120.0, 150.0), (1.44, 1.3, 1.7), 2.5),
}
VLLM = {
    "baseline": Speed((40.0, 44.0), (0.95, 1.05), 1.0),
    "deployed, 15": Speed((20.0, 24.0), (0.5, 0.6), 1.6),
}
MEANING = {"no speculation": "control", "baseline": "control", "flag fixed": "trained"}
MEANING |= {"as deployed": "served", "deployed, 15": "served"}


@pytest.fixture(autouse=True)
def one_figure():
    """A plot function leaves the one figure that pyplot shows; it is closed here."""
    before = plt.get_fignums()
    yield
    assert len(plt.get_fignums()) == len(before) + 1
    plt.close(plt.get_fignums()[-1])


def labels(axes) -> list[tuple[float, str]]:
    """(place, text) of the y axis."""
    return [(y, t.get_text()) for y, t in zip(axes.get_yticks(), axes.get_yticklabels(), strict=True)]


@pytest.mark.parametrize("panels", [{"here": OURS}, {"here": OURS, "vLLM": VLLM}], ids=["one", "two"])
def test_speeds_are_bars_with_whiskers_and_words(panels):
    """One panel per place; per deployment a bar as long as its ratio, its spread, both numbers as text."""
    figure = plot_speeds(panels, MEANING, "Slower")
    assert isinstance(figure, Figure) and figure.get_suptitle() == "Slower"
    assert len(figure.axes) == len(panels)
    for axes, (place, rows) in zip(figure.axes, panels.items(), strict=True):
        assert axes.get_xlabel().startswith(f"{place}: ")
        assert len(axes.patches) == len(axes.texts) == len(rows)
        height = {text: y for y, text in labels(axes)}
        assert list(height) == list(rows) and sorted(height.values(), reverse=True) == list(height.values())
        errors, _bars = axes.containers
        (whiskers,) = errors.lines[2]
        for bar, text, line, (name, speed) in zip(
            axes.patches, axes.texts, whiskers.get_segments(), rows.items(), strict=True
        ):
            assert bar.get_width() == pytest.approx(speed.ratio)
            assert bar.get_y() + bar.get_height() / 2 == pytest.approx(height[name]) == text.get_position()[1]
            assert to_hex(bar.get_facecolor()).upper() == COLOURS[MEANING[name]]
            assert line[:, 0].tolist() == pytest.approx([min(speed.ratios), max(speed.ratios)])
            assert text.get_text() == f"{speed.ratio:.2f}x  {speed.rate:.0f} tok/s"
            assert text.get_position()[0] > max(speed.ratios), "the words start behind the whisker"


def test_speeds_words_stay_in_their_panel():
    """Whatever the ratios, no text runs over the panel's right edge into the next one."""
    fast = {"no speculation": OURS["no speculation"], "flag fixed": Speed((1234.0,) * 2, (2.9, 3.6), 4.0)}
    figure = plot_speeds({"one": OURS, "two": VLLM, "three": fast}, MEANING, "Slower")
    figure.canvas.draw()
    for axes in figure.axes:
        edge = axes.get_window_extent().x1
        for text in axes.texts:
            assert text.get_window_extent().x1 <= edge, (axes.get_xlabel(), text.get_text())


def predictions(*depths: int) -> pd.DataFrame:
    """Ratio of each depth, as `acceptance.speed_table` calls it."""
    return pd.DataFrame({"ratio": {d: 1 + 1 / d for d in depths}})


@pytest.mark.parametrize("marked", [None, 4])
def test_speed_by_depth_is_lines_and_dots(marked):
    """A line per wiring, a dot with whiskers per measured depth, the break-even and the marked depth."""
    predicted = {"trained": predictions(1, 2, 4, 8), "served": predictions(1, 15)}
    measured = {"trained": {2: OURS["flag fixed"], 4: VLLM["deployed, 15"]}}  # none for "served"
    figure = plot_speed_by_depth(predicted, measured, "Depth matters", marked)
    (axes,) = figure.axes
    assert isinstance(figure, Figure) and axes.get_title(loc="left") == "Depth matters"
    assert axes.get_ylim()[0] == 0
    lines = {line.get_label(): line for line in axes.lines if not line.get_label().startswith("_")}
    assert list(lines) == ["trained, predicted", "served, predicted"]
    for name, table in predicted.items():
        line = lines[f"{name}, predicted"]
        assert line.get_xydata().tolist() == [[d, r] for d, r in table["ratio"].items()]
        assert line.get_color() == COLOURS[name]
    dots = [bar.lines[0] for bar in axes.containers]
    assert [dot.get_xydata().tolist() for dot in dots] == [[[2, 1.44]], [[4, 0.55]]]
    assert {dot.get_color() for dot in dots} == {COLOURS["trained"]}
    whiskers = [bar.lines[2][0].get_segments()[0][:, 1].tolist() for bar in axes.containers]
    assert whiskers == [pytest.approx([1.3, 1.7]), pytest.approx([0.5, 0.6])]
    across = [line for line in axes.lines if set(line.get_ydata()) == {1} and len(line.get_ydata()) == 2]
    assert len(across) == 1, "break-even at 1"
    upright = [set(line.get_xdata()) for line in axes.lines if line.get_color() == COLOURS["control"]]
    assert upright == ([] if marked is None else [{marked}])
    assert [t.get_text() for t in axes.get_legend().get_texts()] == list(lines)


def test_definitions_are_a_line_and_a_dot_per_wiring():
    """Per definition: its name, the gap between the wirings as a line, a dot for each, in percent."""
    rows = pd.DataFrame(
        {"trained": [0.75, 0.6, 0.5], "served": [0.34, 0.3, 0.55]}, index=["accuracy", "full_acc_0", "rate"]
    )
    figure = plot_definitions(rows, "Nine definitions")
    (axes,) = figure.axes
    assert isinstance(figure, Figure) and axes.get_title(loc="left") == "Nine definitions"
    assert [text for _, text in labels(axes)] == list(rows.index)
    height = [y for y, _ in labels(axes)]
    assert height == sorted(height, reverse=True), "first definition on top"
    assert [line.get_label() for line in axes.lines] == list(rows.columns)
    for line in axes.lines:
        assert line.get_color() == COLOURS[line.get_label()] and line.get_linestyle() == "None"
        assert line.get_xdata().tolist() == pytest.approx((100 * rows[line.get_label()]).tolist())
        assert line.get_ydata().tolist() == height
    gaps = [segment[:, 0].tolist() for segment in axes.collections[0].get_segments()]
    assert gaps == [pytest.approx(gap) for gap in ([34, 75], [30, 60], [50, 55])]
    assert axes.get_xlim()[0] == 0
    assert [t.get_text() for t in axes.get_legend().get_texts()] == ["trained", "served"]


def test_definitions_legend_covers_no_dot():
    """Best first, as notebook 04 orders them: the legend has a place of its own."""
    trained = [0.8 - 0.02 * i for i in range(9)]
    rows = pd.DataFrame({"trained": trained, "served": [x / 2 for x in trained]}, index=list("abcdefghi"))
    figure = plot_definitions(rows, "Nine definitions")
    figure.canvas.draw()
    (axes,) = figure.axes
    legend = axes.get_legend().get_window_extent()
    for line in axes.lines:
        for x, y in axes.transData.transform(line.get_xydata()):
            assert not legend.contains(x, y), f"{line.get_label()} at {x:.0f}, {y:.0f}"
