"""What notebook 08 shows: how an interval closes, and what a job of any size needs."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path

import ipywidgets as widgets
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from distributed import Client
from IPython.display import display
from matplotlib.figure import Figure
from tqdm import tqdm

from lib.plots import COLOURS, new_figure
from lib.sampling import Estimate
from lib.widgets import shell

WORKERS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class Eventful(tqdm):
    """A progress bar that does something once, when so many files are through: to see what a run survives."""

    def __init__(self, *args, at: int, do: Callable[[], None], **kwargs) -> None:
        self.left, self.do = at, do
        super().__init__(*args, **kwargs)

    def update(self, n: int = 1):
        """Count `n` more."""
        shown = super().update(n)
        if 0 < self.left <= n:
            self.do()
        self.left -= n
        return shown


class Accident:
    """Kill one worker process of this machine, and keep what lay on disk at that moment.

    Attributes:
        rows: row -> time at which it was written, before the shot.
        pid: of the process that was shot; 0 before.
    """

    def __init__(self, client: Client, folder: str | Path) -> None:
        self.client, self.folder = client, Path(folder)
        self.rows: dict[str, int] = {}
        self.pid = 0

    def __call__(self) -> None:
        """Shoot the first worker (SIGKILL, as the system's out-of-memory killer does)."""
        self.rows = self.written()
        self.pid = next(iter(self.client.run(os.getpid).values()))
        os.kill(self.pid, signal.SIGKILL)

    def written(self) -> dict[str, int]:
        """Row -> the time (ns) at which it was written."""
        return {p.stem: p.stat().st_mtime_ns for p in self.folder.rglob("b*/*.parquet")}

    def written_again(self) -> int:
        """Rows that lay there before the shot and are younger now, or gone."""
        now = self.written()
        return sum(now.get(key) != when for key, when in self.rows.items())


def stopping_figure(
    looks: Sequence[tuple[int, Estimate]], half_width: float, truth: float, title: str
) -> Figure:
    """The interval at each look of a stopping rule, the band it must fit in, and the value of all files."""
    figure, axes = new_figure()
    n = [n for n, _ in looks]
    value = np.array([e.value for _, e in looks])
    low, high = (np.array([getattr(e, side) for _, e in looks]) for side in ("low", "high"))
    axes.axhline(truth, color="black", lw=1, ls="--", label="all files")
    axes.errorbar(n, value, [value - low, high - value], fmt="o", capsize=4, color=COLOURS["trained"],
                  label="estimate and 95 % interval")  # fmt: skip
    band = (value[-1] - half_width, value[-1] + half_width)
    axes.axhspan(*band, color=COLOURS["other"], alpha=0.5, lw=0, label=f"wanted: within {half_width:g}")
    axes.set_xlabel("files measured")
    axes.set_ylabel("in the whole population")
    axes.set_title(title, loc="left")
    axes.legend(fontsize=8, frameon=False)
    return figure


def plan_table(
    files: int,
    file_bytes: float,
    file_seconds: float,
    bandwidth: float = np.inf,
    workers: Sequence[int] = WORKERS,
) -> pd.DataFrame:
    """Hours, and the rate of reading, of a job over files of one size, by number of workers.

    A job cannot go faster than its storage: hours are the larger of computing and reading.

    Args:
        files: to measure. file_bytes: of each.
        file_seconds: that one worker spends on one file, reading it included.
        bandwidth: bytes a second that the storage gives all workers together.
    """
    n = np.array(workers)
    compute = files * file_seconds / n
    read = files * file_bytes / bandwidth
    hours = np.maximum(compute, read) / 3600
    table = pd.DataFrame(
        {
            "hours": hours,
            "GB/s read": files * file_bytes / (hours * 3600) / 1e9,
            "limited by": np.where(compute >= read, "workers", "storage"),
        },
        index=pd.Index(n, name="workers"),
    )
    table.attrs["terabytes"] = files * file_bytes / 1e12
    return table


def plan_figure(plans: dict[str, pd.DataFrame], title: str) -> Figure:
    """Hours by number of workers, one line per plan; hollow where the storage is the limit."""
    figure, axes = new_figure()
    colours = (COLOURS["trained"], COLOURS["served"], COLOURS["final"], COLOURS["layer3"])
    for (name, table), colour in zip(plans.items(), colours, strict=False):
        axes.plot(table.index, table["hours"], "-", color=colour, label=name)
        for limit, face in (("workers", colour), ("storage", "white")):
            part = table[table["limited by"] == limit]
            axes.plot(part.index, part["hours"], "o", color=colour, markerfacecolor=face)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(list(next(iter(plans.values())).index), list(next(iter(plans.values())).index))
    axes.axhline(1, color=COLOURS["control"], lw=0.8, ls=":")
    axes.set_xlabel("workers (hollow: the storage is the limit)")
    axes.set_ylabel("hours (log scale)")
    axes.set_title(title, loc="left")
    axes.legend(fontsize=8, frameon=False)
    return figure


def plan_explorer(costs: dict[str, tuple[float, float]]) -> widgets.VBox:
    """Move the number of files, the share that is drawn and the storage; see hours by workers.

    Args:
        costs: kind of work -> bytes and seconds of one file.
    """

    def draw(files: int, share: float, gigabytes: float) -> None:
        drawn = max(1, round(files * share))
        plans = {
            name: plan_table(drawn, size, seconds, gigabytes * 1e9) for name, (size, seconds) in costs.items()
        }
        moved = max(t.attrs["terabytes"] for t in plans.values())
        figure = plan_figure(plans, f"{drawn:,} of {files:,} files, {moved:.3g} TB read")
        display(figure)
        plt.close(figure)

    slider = {"continuous_update": False, "style": {"description_width": "9em"}}
    controls = {
        "files": widgets.SelectionSlider(
            options=[(f"{n:,}", n) for n in (1_000, 10_000, 100_000, 1_000_000)], value=100_000,
            description="files", **slider,
        ),
        "share": widgets.SelectionSlider(
            options=[(f"{100 * s:g} %", s) for s in (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0)], value=1.0,
            description="share drawn", **slider,
        ),
        "gigabytes": widgets.SelectionSlider(
            options=[(f"{g:g} GB/s", g) for g in (0.1, 0.5, 1, 2, 5, 10, 50)], value=2,
            description="storage", **slider,
        ),
    }  # fmt: skip
    return shell(controls, draw)
