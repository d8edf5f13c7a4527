"""What every notebook shares: facts, predictions as data, and the one writer of their outputs.

    python -m lib.notebook write [NN ...]     # execute and store outputs (make notebooks)
    python -m lib.notebook html               # one self-contained file per notebook (make html)

A *fact* is a number that a notebook claims, with its n, tolerance and the reason for the tolerance.
Tests run the notebooks again and compare facts; prose and README read the same file.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import io
import json
import math
import os
import platform
import re
import sys
from dataclasses import asdict, dataclass, field
from html import escape
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pandas as pd
import torch

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = ROOT / "notebooks"
COMMITTED_FACTS = NOTEBOOKS / "facts"
PAGE = ROOT / "lib" / "page.html.j2"
MATHTEXT_NAMES = {"lVert": r"\Vert", "rVert": r"\Vert", "le": r"\leq", "ge": r"\geq"}
FACTS_VARIABLE = "EAGLE3_FACTS_DIR"
TIE = "two of the target's logits can tie within fp32 rounding"
SPEED = "speed depends on the machine: its memory, its matrix library, its load"
NEAR_TIE = "sums in another order (another CPU, thread count) can flip a near-tie"


@dataclass(frozen=True)
class Fact:
    """One claimed number: value, number of observations, tolerance, and why that tolerance."""

    name: str
    value: float | int | str | bool
    n: int | None
    atol: float
    why: str


@dataclass(frozen=True)
class Prediction:
    """What was expected before measuring; `low <= fact <= high` holds it."""

    label: str
    fact: str
    low: float
    high: float
    otherwise: str

    @property
    def band(self) -> str:
        """Readable bounds."""
        if math.isinf(self.low):
            return f"at most {self.high:g}"
        return f"at least {self.low:g}" if math.isinf(self.high) else f"{self.low:g} to {self.high:g}"


@dataclass
class Run:
    """One execution of a notebook: its predictions and the facts it measured."""

    number: str
    folder: Path
    facts: dict[str, Fact] = field(default_factory=dict)
    predictions: list[Prediction] = field(default_factory=list)

    def predict(
        self, label: str, fact: str, *, at_least: float | None = None,
        at_most: float | None = None, otherwise: str = "",
    ) -> None:  # fmt: skip
        """Register an expectation about a fact that is not measured yet."""
        assert fact not in self.facts, f"{fact} is already measured: that is no prediction"
        low = -math.inf if at_least is None else at_least
        high = math.inf if at_most is None else at_most
        self.predictions.append(Prediction(label, fact, low, high, otherwise))

    def expectations(self) -> pd.DataFrame:
        """The registered predictions, before measuring."""
        rows = [
            {"prediction": p.label, "fact": p.fact, "expected": p.band, "if not": p.otherwise}
            for p in self.predictions
        ]
        return pd.DataFrame(rows).set_index("prediction")

    def fact(self, name: str, value: Any, *, n: int | None = None, atol: float = 0.0, why: str = ""):
        """Record a fact and return its value.

        Args:
            name: dotted, unique in the notebook.
            value: number, text or bool.
            n: observations behind it.
            atol: how far a rerun may be off, with `why`; 0 means exactly equal.
        """
        if hasattr(value, "item"):
            value = value.item()
        assert atol == 0 or why, f"{name}: a tolerance needs its reason"
        assert name not in self.facts, f"{name} is recorded twice"
        self.facts[name] = Fact(name, value, n, atol, why)
        return value

    def ratio(self, name: str, ratio: Any) -> float:
        """Record a `metrics.Ratio`: its value, its denominator as n, half a point of tolerance."""
        return self.fact(name, ratio.value, n=ratio.denominator, atol=0.005, why=NEAR_TIE)

    def share(self, name: str, flags: Any) -> float:
        """Record how many of some equalities held; one in ten may fall to a tie."""
        return self.fact(name, sum(flags) / len(flags), n=len(flags), atol=0.1, why=TIE)

    def speed(self, name: str, value: float, *, n: int, atol: float) -> float:
        """Record a speed or a ratio of speeds, measured in n repeats."""
        return self.fact(name, value, n=n, atol=atol, why=SPEED)

    def verdict(self) -> pd.DataFrame:
        """Each prediction scored against its fact: held, refuted or not measured."""
        rows = []
        for p in self.predictions:
            fact = self.facts.get(p.fact)
            held = fact is not None and p.low <= fact.value <= p.high
            outcome = "not measured" if fact is None else "held" if held else "refuted"
            measured = "" if fact is None else f"{fact.value:.4g}"
            rows.append({"prediction": p.label, "expected": p.band, "measured": measured, "verdict": outcome})
        return pd.DataFrame(rows).set_index("prediction")

    def save(self) -> Path:
        """Write `NN.json` into the facts folder."""
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"{self.number}.json"
        rows = [asdict(f) for f in self.facts.values()]
        path.write_text(json.dumps({"notebook": self.number, "facts": rows}, indent=1) + "\n")
        return path.relative_to(ROOT) if path.is_relative_to(ROOT) else path


def start_notebook(number: str, facts_dir: str = "") -> Run:
    """Begin a notebook: quiet libraries, readable tables, one line about the environment.

    Args:
        number: "01" and so on.
        facts_dir: where facts go; "" means `$EAGLE3_FACTS_DIR`, else `.work/facts` (so that
            running a notebook by hand never edits the committed facts).
    """
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # `HF_HUB_OFFLINE=0 make lab` lets a reader name a hub id
    os.environ["DO_NOT_TRACK"] = "1"
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    pd.set_option("display.precision", 3)
    pd.set_option("display.max_colwidth", 90)
    folder = Path(facts_dir or os.environ.get(FACTS_VARIABLE) or ROOT / ".work" / "facts")
    packages = " ".join(f"{p} {version(p)}" for p in ("torch", "transformers"))
    print(f"notebook {number} | Python {platform.python_version()} {packages} | "
          f"{torch.get_num_threads()} threads, {'cuda' if torch.cuda.is_available() else 'cpu'}")  # fmt: skip
    return Run(number, folder)


def read_facts(number: str, facts_dir: str | Path = "") -> dict[str, Any]:
    """Facts of another notebook as {name: value}: this run's if there, else the committed ones."""
    for folder in (facts_dir, os.environ.get(FACTS_VARIABLE), COMMITTED_FACTS):
        path = Path(folder or "/nonexistent") / f"{number}.json"
        if path.is_file():
            return {f["name"]: f["value"] for f in json.loads(path.read_text())["facts"]}
    raise FileNotFoundError(f"facts of notebook {number}: run it first")


def source_digest(notebook) -> str:
    """sha256 over cell types and sources: "edited but not run again" is then a failing test."""
    digest = hashlib.sha256()
    for cell in notebook.cells:
        digest.update(f"{cell.cell_type}\0{cell.source}\0".encode())
    return digest.hexdigest()


def notebook_files() -> list[Path]:
    """All notebooks in reading order."""
    return sorted(NOTEBOOKS.glob("[0-9][0-9]_*.ipynb"))


def clean(notebook) -> None:
    """Remove what changes from run to run: timings, widget state and views, library versions."""
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
        "workbook": {"source_sha256": source_digest(notebook)},
    }
    for cell in notebook.cells:
        tags = cell.metadata.get("tags")
        cell.metadata = {"tags": tags} if tags else {}
        if cell.cell_type == "code":
            cell.outputs = _without_progress(
                [
                    o for o in cell.outputs
                    if "application/vnd.jupyter.widget-view+json" not in o.get("data", {})
                ]
            )  # fmt: skip


def _without_progress(outputs: list) -> list:
    """Printed text as it stands at the end: pieces joined, what a progress bar overwrote left out."""
    kept: list = []
    for output in outputs:
        if output.output_type == "stream" and kept and kept[-1].get("name") == output.name:
            kept[-1].text += output.text
        else:
            kept.append(output)
    for output in kept:
        if output.output_type == "stream":
            output.text = re.sub(r"[^\n]*\r(?!\n)", "", output.text)
    return [o for o in kept if o.output_type != "stream" or o.text.strip()]


def write(paths: list[Path]) -> None:
    """Execute notebooks in a clean kernel and store their outputs; stops at the first error."""
    import nbformat
    from nbclient import NotebookClient

    os.environ[FACTS_VARIABLE] = str(COMMITTED_FACTS)
    for path in paths:
        notebook = nbformat.read(path, as_version=4)
        client = NotebookClient(
            notebook, timeout=900, kernel_name="python3", record_timing=False,
            resources={"metadata": {"path": str(path.parent)}},
        )  # fmt: skip
        client.execute()
        clean(notebook)
        nbformat.write(notebook, path)
        print(f"wrote {path.name}", flush=True)


def formula(tex: str) -> str:
    """LaTeX as an image that needs no MathJax: drawn by matplotlib, with its source as alternative text.

    What matplotlib's mathtext cannot draw stays readable, as code.
    """
    from matplotlib import mathtext, rc_context
    from matplotlib.font_manager import FontProperties

    known = re.sub(r"\\([lr]Vert|[lg]e)(?![a-zA-Z])", lambda m: MATHTEXT_NAMES[m[1]], " ".join(tex.split()))
    svg, font = io.BytesIO(), FontProperties(size=11, math_fontfamily="dejavuserif")  # pt, as the text
    try:
        with rc_context({"savefig.transparent": True}):
            depth = mathtext.math_to_image(f"${known}$", svg, font, format="svg")
    except ValueError:
        return f"<code>{escape(tex)}</code>"
    data = base64.b64encode(svg.getvalue()).decode()
    return (
        f'<img class="formula" style="vertical-align: -{depth}pt" alt="{escape(tex.strip())}" '
        f'src="data:image/svg+xml;base64,{data}"/>'
    )


def markdown_to_html(source: str) -> str:
    """A Markdown cell as nbconvert renders it, formulas as images."""
    from nbconvert.filters.markdown_mistune import IPythonRenderer, MarkdownWithMath

    class Renderer(IPythonRenderer):
        def inline_math(self, body: str) -> str:
            return formula(body)

        def block_math(self, body: str) -> str:
            return f'<span class="wide">{formula(body)}</span>'

    # embed_images stays off: it completes each piece of HTML, and so closes <details> before its text
    return MarkdownWithMath(renderer=Renderer(escape=False)).render(source)


def make_reachable(page: Any) -> None:
    """Finish a parsed page: figures named, boxes that scroll reachable by key, links to exported pages."""
    for image in page.select(".jp-RenderedImage img"):
        cell, section = image.find_parent(class_="jp-Cell"), image.find_previous(["h1", "h2"])
        prompt = cell.select_one(".jp-InputPrompt").get_text(strip=True).rstrip(":")
        image["alt"] = f"Figure drawn by {prompt}, in section: {section.get_text().rstrip('¶')}"
    for table in page.select(".jp-RenderedMarkdown table"):
        table.wrap(page.new_tag("div", attrs={"class": "wide"}))
    for stop in page.select("[tabindex]"):
        del stop["tabindex"]
    for box in page.select(".jp-OutputArea-output, .highlight pre, .wide"):
        box["tabindex"] = "0"
    names = {p.name for p in notebook_files()}
    for link in page.select("a[href]"):
        if link["href"] in names:
            link["href"] = link["href"].replace(".ipynb", ".html")


def html(paths: list[Path], out: Path) -> None:
    """Each notebook as one HTML file that asks the network for nothing."""
    import nbformat
    from bs4 import BeautifulSoup
    from nbconvert import HTMLExporter

    out.mkdir(exist_ok=True)
    exporter = HTMLExporter(template_file=str(PAGE), filters={"markdown2html": markdown_to_html})
    for path in paths:
        notebook = nbformat.read(path, as_version=4)
        notebook.metadata["title"] = notebook.cells[0].source.split("\n")[0].removeprefix("# ")
        body, _ = exporter.from_notebook_node(notebook)
        page = BeautifulSoup(body, "html.parser")
        make_reachable(page)
        (out / f"{path.stem}.html").write_text(str(page), encoding="utf-8")


def main() -> None:
    """Command line; see the module docstring."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("command", choices=["write", "html"])
    parser.add_argument("numbers", nargs="*", help="01 03 ...; all if none")
    args = parser.parse_args()
    paths = [p for p in notebook_files() if not args.numbers or p.name[:2] in args.numbers]
    if not paths:
        sys.exit(f"no notebook of {args.numbers} in {NOTEBOOKS}")
    if args.command == "write":
        write(paths)
    else:
        html(paths, ROOT / "html")


if __name__ == "__main__":
    main()
