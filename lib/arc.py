"""The incident beside what was measured here: run the notebooks of the arc headless, print one table.

    python -m lib.arc            # make arc
    python -m lib.arc readme     # write the same table from the committed facts into the README

Facts go to `.work/arc`, so nothing in the checkout changes. Exit status 1 if a notebook fails.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

import pandas as pd

from lib.notebook import COMMITTED_FACTS, NOTEBOOKS, ROOT, notebook_files, read_facts

ARC = ("00", "01", "02", "03", "04", "05")
OUT = ROOT / ".work" / "arc"
FIGURE = COMMITTED_FACTS / "speeds.png"
BEGIN, END = "<!-- facts:begin (make notebooks writes this part) -->", "<!-- facts:end -->"


def percent(value: float) -> str:
    """`53.1 %`."""
    return f"{100 * value:.1f} %"


# What the incident's account says (shared case file), and the fact beside it.
ROWS: tuple[tuple[str, str, str, str, Callable], ...] = (
    ("deployed / no speculation, our loop", "0.61 to 0.63", "05", "ratio.deployed_15", "{:.2f}".format),
    ("deployed / no speculation, vLLM", "0.61 to 0.63", "05", "engine.ratio.deployed_15", "{:.2f}".format),
    ("tokens per round, 15 draft tokens", "1.6", "05", "offline.tokens_per_round.served", "{:.2f}".format),
    ("norms, state 2 / state 1", "35.7 = 37.17 / 1.04", "01", "norm_ratio.second_to_first", "{:.1f}".format),
    ("accuracy in the training log", "74.7 %", "03", "training_log.full_acc_0", percent),
    ("standalone, fed [1:], in-vocab", "34.1 %", "03", "accuracy.served", percent),
    ("standalone, fed [:-1], in-vocab", "about 76.9 %", "03", "accuracy.trained", percent),
    ("trainer's own metric, fed [:-1]", "-", "03", "full_acc_0.trained", percent),
    ("best of 24 orders", "embed layer3 layer31", "03", "sweep.a.winner", str),
    ("fc input width", "21504 = 3 x 7168", "03", "fc_input_width", "{} = 3 x 576".format),
    ("fixed, same 15 draft tokens, our loop", "still poor", "05", "ratio.fixed_15", "{:.2f}".format),
    ("fixed, best depth, our loop", "-", "05", "ratio.fixed_best", "{:.2f}".format),
    ("fixed, best depth measured, vLLM", "-", "05", "engine.ratio.fixed_best", "{:.2f}".format),
)  # fmt: skip


def run_notebook(path: Path, out: Path) -> float:
    """Execute one notebook into `out`, its facts beside it; seconds taken."""
    import papermill

    began = time.monotonic()
    papermill.execute_notebook(
        path, out / path.name, parameters={"facts_dir": str(out)}, cwd=str(NOTEBOOKS),
        progress_bar=False, log_output=False,
    )  # fmt: skip
    return time.monotonic() - began


def main() -> int:
    """Run what exists of the arc and print the table."""
    OUT.mkdir(parents=True, exist_ok=True)
    for old in OUT.glob("*.json"):
        old.unlink()  # facts of an earlier run must not stand in for this one's
    began = time.monotonic()
    for path in notebook_files():
        if path.name[:2] not in ARC:
            continue
        try:
            seconds = run_notebook(path, OUT)
        except Exception as err:  # papermill raises whatever the cell did; name the notebook and stop
            print(f"{path.name} failed: {err}", file=sys.stderr)
            return 1
        print(f"{path.name}: {seconds:.0f} s", flush=True)
    print(f"\nincident | here   ({time.monotonic() - began:.0f} s, notebooks in {OUT.relative_to(ROOT)})")
    print(table(OUT).to_string())
    return 0


def table(facts: Path) -> pd.DataFrame:
    """The arc's rows from a folder of facts."""
    here = {number: read_facts(number, facts) for number in {row[2] for row in ROWS}}
    rows = [[name, incident, show(here[number][fact])] for name, incident, number, fact, show in ROWS]
    return pd.DataFrame(rows, columns=["", "incident", "here"]).set_index("")


def readme_block() -> str:
    """The README's measured part, from the committed facts."""
    lines = ["| | incident | here |", "|---|---|---|"]
    lines += [f"| {name} | {row.incident} | {row.here} |" for name, row in table(COMMITTED_FACTS).iterrows()]
    return "\n".join([BEGIN, *lines, END])


def readme_figure() -> None:
    """The README's figure: speed as deployed and fixed, from notebook 05's facts and the engine's record."""
    from lib.plots import plot_speeds
    from lib.speeds import Speed, recorded_speeds

    facts = read_facts("05", COMMITTED_FACTS)
    served = recorded_speeds()
    best = max((name for name in served if name.startswith("fixed")), key=lambda name: served[name].ratio)
    best_depth = f"fixed, {facts['best_depth']}"
    ratios = {"no speculation": 1.0, "as deployed, 15": facts["ratio.deployed_15"],
              "fixed, 15": facts["ratio.fixed_15"], best_depth: facts["ratio.fixed_best"]}  # fmt: skip
    base = facts["speed.no_speculation"]
    ours = {name: Speed((ratio * base,), (ratio,), 1.0) for name, ratio in ratios.items()}
    engine = {"no speculation": served["baseline"], "as deployed, 15": served["deployed, 15"],
              "fixed, 15": served["fixed, 15"], best: served[best]}  # fmt: skip
    panels = {"this workbook's loop": ours, "vLLM": engine}
    colours = {n: "control" if "no" in n else "served" if "deployed" in n else "trained"
               for panel in panels.values() for n in panel}  # fmt: skip
    figure = plot_speeds(panels, colours, "Draft tokens per round, and what they are worth on 2 CPU cores")
    figure.savefig(FIGURE, metadata={"Software": None})


def write_readme() -> None:
    """Replace the README's measured part and its figure."""
    readme_figure()
    path = ROOT / "README.md"
    text = path.read_text()
    start, end = text.index(BEGIN), text.index(END) + len(END)
    path.write_text(text[:start] + readme_block() + text[end:])


if __name__ == "__main__":
    sys.exit(write_readme() if sys.argv[1:] == ["readme"] else main())
