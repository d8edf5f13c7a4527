"""Views of the fault zoo for notebook 06: one fault beside the healthy draft, and a game of ten blind cases.

Recorded numbers come from `bench/results/zoo.json` (bench/zoo.py); the game plants and measures live.
"""

from __future__ import annotations

import html
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import ipywidgets as widgets
import matplotlib.pyplot as plt
import torch
from IPython.display import HTML, display
from matplotlib.figure import Figure

from lib.case import Case, Diagnosis
from lib.faults import FAULTS
from lib.plots import COLOURS, new_figure
from lib.widgets import shell
from lib.zoo import FRAMEWORKS, Effect, judge, measure, plant

CLUE_DEPTHS, CLUE_CHAINS = 4, (5,)
HEALTHY = "healthy"  # a guess: nothing is wrong


def numbers(effect: Effect) -> dict[str, float]:
    """What a view compares, in %: accuracy by depth, then the frameworks' metrics that are there."""
    rows = {f"accuracy, depth {d}": 100 * a for d, a in enumerate(effect.accuracy)}
    return rows | {name: 100 * effect.metrics[name] for name in FRAMEWORKS if name in effect.metrics}


def effect_figure(base: Effect, effect: Effect, title: str) -> Figure:
    """Healthy and suspect as two dots per number, joined by a line as long as the damage."""
    before, after = numbers(base), numbers(effect)
    names = [n for n in before if n in after]
    figure, axes = new_figure(9.0, 0.9 + 0.33 * max(1, len(names)))
    heights = list(range(len(names)))[::-1]
    for y, name in zip(heights, names, strict=True):
        axes.hlines(y, before[name], after[name], color=COLOURS["other"], lw=1.5)
    axes.plot([before[n] for n in names], heights, "o", color=COLOURS["trained"], label="healthy")
    axes.plot([after[n] for n in names], heights, "D", color=COLOURS["served"], label="this case")
    axes.set_yticks(heights, names, fontsize=8.5)
    axes.set_xlim(0, 100)
    axes.set_xlabel("%")
    axes.set_title(title, loc="left")
    axes.legend(frameon=False, fontsize=9, loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def cost_figure(effects: Mapping[str, Effect]) -> Figure:
    """Every recorded fault by what it leaves of the tokens a round, the worst on top; healthy is a line."""
    base = effects["none"]
    drafted = min(base.tokens)
    left = {k: e.tokens[drafted] for k, e in effects.items() if k != "none" and e.error is None}
    keys = sorted(left, key=left.get, reverse=True)
    figure, axes = new_figure(9.0, 0.9 + 0.2 * len(keys))
    colours = {"incident_slice": COLOURS["served"]}
    axes.barh(
        range(len(keys)), [left[k] for k in keys],
        color=[COLOURS["trained"] if FAULTS[k].healthy else colours.get(k, COLOURS["other"]) for k in keys],
    )  # fmt: skip
    axes.axvline(base.tokens[drafted], color=COLOURS["trained"], lw=1.5)
    axes.axvline(1, color="black", lw=0.8)
    axes.set_yticks(range(len(keys)), keys, fontsize=7)
    axes.set_ylim(-0.6, len(keys) - 0.4)
    axes.set_xlabel(f"tokens a round of {drafted} drafted, bonus included (1: nothing is accepted)")
    axes.set_title("What each fault leaves (incident red, healthy controls blue)", loc="left")
    return figure


def tokens_text(base: Effect, effect: Effect) -> str:
    """`2.59 -> 1.47 tokens a round at 5 draft tokens`; the typed error where there is one."""
    if effect.error is not None:
        return f"{type(effect.error).__name__}: {effect.error}"
    drafted = min(effect.tokens)
    return (
        f"{base.tokens[drafted]:.2f} -> {effect.tokens[drafted]:.2f} tokens a round of {drafted} drafted "
        f"(bonus included), {base.nats:.2f} -> {effect.nats:.2f} nats a token"
    )


def fault_view(key: str, effects: Mapping[str, Effect]) -> tuple[Figure | None, str]:
    """One recorded fault: its figure (None where it could not be evaluated), and its texts as HTML."""
    fault, base, effect = FAULTS[key], effects["none"], effects.get(key)
    rows = {"what": fault.title, "predicted": fault.signature, "symptom": fault.symptom}
    if effect is None:
        rows["measured"] = "not on the samples"
    else:
        verdict = judge(fault, base, effect)
        rows |= {"measured": tokens_text(base, effect), "the prediction is": verdict.verdict}
    rows["shown by"] = ", ".join(fault.shown_by) or "nothing"
    rows["looks fine in"] = ", ".join(fault.hidden_by) or "nothing"
    cells = "".join(
        f"<tr><th style='text-align: left'>{html.escape(k)}</th><td style='text-align: left'>"
        f"{html.escape(v)}</td></tr>"
        for k, v in rows.items()
    )
    link = f'<a href="{html.escape(fault.sighting)}">seen here</a>'
    figure = None
    if effect is not None and effect.error is None:
        figure = effect_figure(base, effect, fault.title)
    return figure, f"<table>{cells}</table>{link}"


@dataclass
class Game:
    """Ten blind cases: look at the clues, commit to a guess, then ask the diagnosis.

    Attributes:
        base: the healthy case that faults are planted in.
        keys: the truth, one fault or healthy control per case.
        diagnose: case -> Diagnosis.
        seed: of the planting.
        guesses: case number -> key guessed, `HEALTHY` for "nothing is wrong"; a guess is final.
    """

    base: Case
    keys: Sequence[str]
    diagnose: Callable[[Case], Diagnosis]
    seed: int = 1
    guesses: dict[int, str] = field(default_factory=dict)
    _healthy: Effect | None = field(default=None, repr=False)

    @classmethod
    def draw(cls, base: Case, among: Sequence[str], diagnose, n: int = 10, seed: int = 1) -> Game:
        """n different cases drawn from `among`, those that fit the base."""
        fitting = [k for k in among if not FAULTS[k].lacking(base)]
        order = torch.randperm(len(fitting), generator=torch.Generator().manual_seed(seed))[:n].tolist()
        return cls(base, [fitting[i] for i in order], diagnose, seed)

    def case(self, number: int) -> Case:
        """The planted case."""
        return plant(self.base, FAULTS[self.keys[number]], self.seed)

    def clues(self, number: int) -> tuple[Effect, Effect]:
        """Healthy and planted, measured now."""
        if self._healthy is None:
            self._healthy = measure(self.base, CLUE_DEPTHS, chains=CLUE_CHAINS)
        return self._healthy, measure(self.case(number), CLUE_DEPTHS, chains=CLUE_CHAINS)

    def answer(self, number: int) -> str:
        """What a right guess says."""
        return HEALTHY if FAULTS[self.keys[number]].healthy else self.keys[number]

    def guess(self, number: int, key: str) -> None:
        """Commit; the first guess stands."""
        self.guesses.setdefault(number, key)

    @property
    def score(self) -> tuple[int, int]:
        """Right guesses, and guesses made."""
        return sum(self.answer(i) == key for i, key in self.guesses.items()), len(self.guesses)


# ---- shells: they connect controls to the functions above -------------------------------------------


def fault_explorer(effects: Mapping[str, Effect]) -> widgets.VBox:
    """Choose a fault; see what it is, what was predicted, and what was measured."""
    options = [(f"{FAULTS[k].part}: {FAULTS[k].title}", k) for k in FAULTS if k in effects]
    wide = widgets.Layout(width="44em")
    control = widgets.Dropdown(options=options, value=options[0][1], description="fault", layout=wide)

    def draw(key: str) -> None:
        figure, texts = fault_view(key, effects)
        display(HTML(texts))
        if figure is not None:
            display(figure)
            plt.close(figure)

    return shell({"key": control}, draw)


def game_board(game: Game, guesses: Sequence[str]) -> widgets.VBox:
    """The game: choose a case, look, commit to a guess, then ask the diagnosis.

    Args:
        guesses: keys of faults that can be guessed; `HEALTHY` comes first.
    """
    case = widgets.Dropdown(options=[(f"case {i + 1}", i) for i in range(len(game.keys))], description="case")
    titles = [("nothing is wrong", HEALTHY), *sorted((FAULTS[k].title, k) for k in guesses)]
    guess = widgets.Dropdown(options=titles, description="my guess", layout=widgets.Layout(width="44em"))
    commit = widgets.Button(description="Commit, then ask the diagnosis", layout=widgets.Layout(width="18em"))
    answer = widgets.Output()

    def look(number: int) -> None:
        base, effect = game.clues(number)
        print(tokens_text(base, effect))
        if effect.error is None:
            figure = effect_figure(base, effect, f"Case {number + 1}: what is wrong here?")
            display(figure)
            plt.close(figure)

    def reveal(_button: widgets.Button) -> None:
        commit.disabled = True
        answer.clear_output()
        with answer:
            try:
                print(verdict(game, case.value, guess.value))
            finally:
                commit.disabled = False

    commit.on_click(reveal)
    box = widgets.VBox([shell({"number": case}, look), widgets.HBox([guess, commit]), answer])
    box.add_class("fault-game")
    return box


def verdict(game: Game, number: int, key: str) -> str:
    """Commit to a guess; the diagnosis, the truth and the score so far."""
    game.guess(number, key)
    found = game.diagnose(game.case(number))
    truth, mine = game.answer(number), game.guesses[number]
    named = HEALTHY if truth == HEALTHY else FAULTS[truth].title
    right, made = game.score
    return "\n".join(
        [
            f"diagnosis: {found.because}",
            f"truth: {named}" + (f" ({FAULTS[game.keys[number]].title})" if truth == HEALTHY else ""),
            f"your guess was {'right' if mine == truth else 'another one'}: {right} of {made} so far",
        ]
    )
