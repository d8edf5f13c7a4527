"""Notebooks as data: stored as `make notebooks` writes them, in one shape; and run again, facts compared."""

from __future__ import annotations

import ast
import json
import math
import re

import nbformat
import pytest

from lib.notebook import COMMITTED_FACTS, NOTEBOOKS, notebook_files, source_digest

FILES = notebook_files()
LINES = 15  # of code in a cell: what a reader takes in at once

each = pytest.mark.parametrize("path", FILES, ids=lambda p: p.name[:2])


def read(path):
    return nbformat.read(path, as_version=4)


def code(path):
    return [c for c in read(path).cells if c.cell_type == "code"]


def facts(path) -> dict[str, dict]:
    return {f["name"]: f for f in json.loads(path.read_text())["facts"]}


def test_the_notebooks_of_the_arc_exist():
    """Numbers are the reading order, each used once."""
    numbers = [p.name[:2] for p in FILES]
    expected = {"00", "01", "02", "03", "04", "05", "06", "07", "08", "09"}
    assert expected <= set(numbers) and len(set(numbers)) == len(numbers)


# ---- as stored ------------------------------------------------------------------------------------


@each
def test_stored_by_one_run_in_order(path):
    """Cells are counted 1..N: outputs of one clean run from top to bottom."""
    counts = [c.execution_count for c in code(path)]
    assert counts == list(range(1, len(counts) + 1)), f"{path.name}: run `make notebooks`"


@each
def test_sources_are_those_that_ran(path):
    """The digest stored with the outputs is the sources' own."""
    stored = read(path).metadata.get("workbook", {}).get("source_sha256")
    assert stored == source_digest(read(path)), f"{path.name}: edited but not run: make notebooks"


@each
def test_no_error_and_no_stderr(path):
    """A reader meets results: no traceback, no warning."""
    for number, cell in enumerate(code(path), 1):
        for output in cell.outputs:
            assert output.output_type != "error", f"{path.name} [{number}]: {output.evalue}"
            assert output.get("name") != "stderr", f"{path.name} [{number}]: {output.text}"


@each
def test_no_widget_state(path):
    """Stored widget state breaks rendering elsewhere; explorers have a static twin."""
    notebook = read(path)
    assert "widgets" not in notebook.metadata
    views = [o for c in code(path) for o in c.outputs if "widget-view" in str(dict(o.get("data", {})).keys())]
    assert not views


# ---- as written -----------------------------------------------------------------------------------


@each
def test_title_is_a_question_and_header_a_budget(path):
    """`# NN · Question?`, then what it needs, what it costs, and whether it uses a network."""
    first = read(path).cells[0].source
    title, header = first.split("\n", 1)
    assert re.fullmatch(rf"# {path.name[:2]} · .+\?", title), title
    for word in ("**Asks**", "**Needs**", "**Network**", "**Budget**"):
        assert word in header, f"{path.name}: no {word} in the header"


@each
def test_one_parameters_cell_of_literals(path):
    """papermill's interface: assignments of literals, nothing computed."""
    tagged = [c for c in code(path) if "parameters" in c.metadata.get("tags", [])]
    assert len(tagged) == 1
    names = set()
    for node in ast.parse(tagged[0].source).body:
        assert isinstance(node, ast.Assign | ast.AnnAssign), ast.unparse(node)
        ast.literal_eval(node.value)  # ValueError for anything computed
        names |= {t.id for t in (node.targets if isinstance(node, ast.Assign) else [node.target])}
    assert "facts_dir" in names


@each
def test_cells_are_short(path):
    """At most 15 lines of code a cell; more moves to lib/."""
    for number, cell in enumerate(code(path), 1):
        if "parameters" in cell.metadata.get("tags", []):
            continue  # a line each, however many a reader may set
        lines = [line for line in cell.source.splitlines() if line.strip()]
        assert len(lines) <= LINES, f"{path.name} [{number}]: {len(lines)} lines of code"


@each
def test_ends_with_what_we_know(path):
    """Three lists to take along: ruled out, established, open."""
    sections = [c.source for c in read(path).cells if c.source.startswith("## What we know now")]
    assert len(sections) == 1
    assert all(f"**{word}**" in sections[0] for word in ("Ruled out", "Established", "Open"))


@each
def test_facts_are_committed_with_reasons(path):
    """Every notebook leaves facts; a tolerance says why it is needed."""
    file = COMMITTED_FACTS / f"{path.name[:2]}.json"
    assert file.is_file(), f"{path.name}: run `make notebooks`"
    assert facts(file)
    for name, fact in facts(file).items():
        assert fact["atol"] >= 0 and (fact["atol"] == 0 or fact["why"].strip()), name


# ---- run again ------------------------------------------------------------------------------------


def differs(new, old) -> bool:
    """Whether a fact moved further than its tolerance allows."""
    a, b = new["value"], old["value"]
    if isinstance(a, bool) or isinstance(b, bool) or not isinstance(a, int | float):
        return type(a) is not type(b) or a != b
    if not isinstance(b, int | float):
        return True
    return not (abs(a - b) <= old["atol"] or (math.isnan(a) and math.isnan(b)))


def test_differs_by_eye():
    """Numbers within their tolerance agree; texts, flags and kinds must be equal."""
    rows = [
        (1.0, 1.2, 0.2001, False), (1.0, 1.3, 0.2, True), (3, 3, 0, False), ("a", "b", 9, True),
        (True, False, 1, True), (1, True, 1, True), ("1", 1, 1, True), (math.nan, math.nan, 0, False),
        (math.nan, 1.0, 1, True),
    ]  # fmt: skip
    for a, b, atol, expected in rows:
        assert differs({"value": a}, {"value": b, "atol": atol}) is expected, (a, b, atol)


@pytest.mark.notebooks
@pytest.mark.slow
@each
def test_runs_again_to_the_same_facts(path, tmp_path):
    """From its own folder, in a clean kernel: the same facts within their tolerances."""
    import papermill

    parameters = {"facts_dir": str(tmp_path)}
    if "engine" in papermill.inspect_notebook(path):
        parameters["engine"] = "recorded"  # tests/test_engine.py is where the engine itself is tested
    papermill.execute_notebook(
        path, tmp_path / path.name, parameters=parameters, cwd=NOTEBOOKS,
        kernel_name="python3", progress_bar=False, execution_timeout=900,
    )  # fmt: skip
    name = f"{path.name[:2]}.json"
    new, old = facts(tmp_path / name), facts(COMMITTED_FACTS / name)
    assert sorted(new) == sorted(old), "a fact appeared or vanished: run `make notebooks`"
    moved = [
        f"{k}: {old[k]['value']} committed, {new[k]['value']} now (atol {old[k]['atol']})"
        for k in old
        if differs(new[k], old[k]) or new[k]["n"] != old[k]["n"]
    ]
    assert not moved, "\n".join(moved)


def test_progress_is_not_stored():
    """What a bar overwrote is gone; what was printed stays, in its order and on its stream."""
    from nbformat.v4 import new_output

    from lib.notebook import _without_progress

    parts = ["\rreading: 10%|#  |", "\rreading: 90%|###|", "\r      ", "\r", "read 3 files\n", "done\n"]
    stored = [new_output("stream", name="stdout", text=t) for t in parts]
    shown = new_output("display_data", data={"text/plain": "a\rb"})
    kept = _without_progress([*stored, shown, new_output("stream", name="stderr", text="\r \r")])
    assert [o.output_type for o in kept] == ["stream", "display_data"]
    assert kept[0].text == "read 3 files\ndone\n" and kept[1] is shown
    assert _without_progress([new_output("stream", name="stdout", text="a\r\nb\n")])[0].text == "a\r\nb\n"
