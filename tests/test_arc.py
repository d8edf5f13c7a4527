"""The arc's table: its facts exist, the README shows it, and a notebook that fails is named."""

from __future__ import annotations

import json

import nbformat
import pytest

from lib import arc, speeds
from lib.notebook import COMMITTED_FACTS, Run


def write_facts(folder, skip: str = "") -> None:
    """Facts for every row of the table, as notebooks save them; all values 0.5."""
    for number in {row[2] for row in arc.ROWS}:
        run = Run(number, folder)
        for fact in dict.fromkeys(row[3] for row in arc.ROWS if row[2] == number and row[3] != skip):
            run.fact(fact, 0.5)
        run.save()


def write_notebook(path, *cells: str):
    """A notebook with a parameters cell and these."""
    first = nbformat.v4.new_code_cell('facts_dir: str = ""', metadata={"tags": ["parameters"]})
    notebook = nbformat.v4.new_notebook(cells=[first, *map(nbformat.v4.new_code_cell, cells)])
    notebook.metadata = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    nbformat.write(notebook, path)
    return path


def test_every_row_names_a_committed_fact():
    """A renamed fact would leave a hole in the table; where a notebook's facts exist, all its rows must."""
    missing = []
    for name, _, number, fact, _ in arc.ROWS:
        file = COMMITTED_FACTS / f"{number}.json"
        if file.is_file() and fact not in {f["name"] for f in json.loads(file.read_text())["facts"]}:
            missing.append(f"{name}: no {fact} in {file.name}")
    assert not missing, "\n".join(missing)


def test_rows_are_of_the_arc_and_named_once():
    """Two rows of one name, or one of a notebook that `make arc` does not run, would show old numbers."""
    names = [row[0] for row in arc.ROWS]
    assert len(set(names)) == len(names)
    assert {row[2] for row in arc.ROWS} <= set(arc.ARC)


def test_readme_shows_the_committed_facts(root):
    """`make notebooks` writes both; nobody edits the table by hand."""
    text = (root / "README.md").read_text()
    shown = text[text.index(arc.BEGIN) : text.index(arc.END) + len(arc.END)]
    assert shown == arc.readme_block(), "README.md is behind the facts: make notebooks"


def test_table_shows_each_fact_its_way(tmp_path):
    """The folder's facts, not the committed ones, in the row's own format."""
    write_facts(tmp_path)
    table = arc.table(tmp_path)
    assert [(name, row.incident, row.here) for name, row in table.iterrows()] == [
        (name, incident, show(0.5)) for name, incident, _, _, show in arc.ROWS
    ]
    assert arc.percent(0.5312) == "53.1 %"


def test_table_refuses_a_missing_fact(tmp_path):
    """No row is left out quietly: the error names the fact."""
    write_facts(tmp_path, skip=arc.ROWS[0][3])
    with pytest.raises(KeyError, match=arc.ROWS[0][3]):
        arc.table(tmp_path)


def test_write_readme_replaces_its_own_part(tmp_path, monkeypatch):
    """What stands before and after the markers stays, and writing twice changes nothing."""
    write_facts(tmp_path)
    monkeypatch.setattr(arc, "ROOT", tmp_path)
    monkeypatch.setattr(arc, "COMMITTED_FACTS", tmp_path)
    monkeypatch.setattr(arc, "readme_figure", lambda: None)
    readme = tmp_path / "README.md"
    readme.write_text(f"# Title\n\n{arc.BEGIN}\nold\n{arc.END}\n\nlast line\n")
    for _ in range(2):
        arc.write_readme()
        assert readme.read_text() == f"# Title\n\n{arc.readme_block()}\n\nlast line\n"
    assert "old" not in readme.read_text() and "| 0.50 |" in readme.read_text()


def test_readme_figure_shows_facts_and_record(tmp_path, monkeypatch):
    """Our loop from notebook 05's facts, vLLM from its record with the best of the fixed depths."""
    import matplotlib.pyplot as plt

    run = Run("05", tmp_path)
    facts = {"best_depth": 4, "speed.no_speculation": 20.0}
    facts |= {"ratio.deployed_15": 0.5, "ratio.fixed_15": 1.5, "ratio.fixed_best": 2.5}
    for name, value in facts.items():
        run.fact(name, value)
    run.save()
    rates = {"baseline": 10.0, "deployed, 15": 6.0, "fixed, 3": 25.0, "fixed, 5": 22.0, "fixed, 15": 9.0}
    made = {n: {"rates": [r], "ratios": [r / 10], "tokens_per_round": 1.0} for n, r in rates.items()}
    monkeypatch.setattr(arc, "COMMITTED_FACTS", tmp_path)
    monkeypatch.setattr(arc, "FIGURE", tmp_path / "speeds.png")
    monkeypatch.setattr(speeds, "RECORD", tmp_path / "engine.json")
    speeds.RECORD.write_text(json.dumps({"deployments": made}))
    arc.readme_figure()
    assert arc.FIGURE.read_bytes().startswith(b"\x89PNG")
    ours, engine = plt.gcf().axes
    assert ours.texts[1].get_text() == "0.50x  10 tok/s", "the ratio times the plain speed"
    shown = [[(t.get_text(), bar.get_width()) for t, bar in zip(a.get_yticklabels(), a.patches, strict=True)]
             for a in (ours, engine)]  # fmt: skip
    plt.close()
    assert shown == [
        [("no speculation", 1.0), ("as deployed, 15", 0.5), ("fixed, 15", 1.5), ("fixed, 4", 2.5)],
        [("no speculation", 1.0), ("as deployed, 15", 0.6), ("fixed, 15", 0.9), ("fixed, 3", 2.5)],
    ]


def test_run_notebook_leaves_facts_in_its_folder(tmp_path):
    """The notebook gets the folder as `facts_dir`, and its output is stored there too."""
    made = write_notebook(tmp_path / "01_a.ipynb", "from pathlib import Path", "Path(facts_dir, 'f').touch()")
    out = tmp_path / "out"
    out.mkdir()
    assert arc.run_notebook(made, out) > 0
    assert sorted(p.name for p in out.iterdir()) == ["01_a.ipynb", "f"]
    assert all(c.execution_count is None for c in nbformat.read(made, 4).cells), "the original is untouched"


def test_a_failing_notebook_is_named(tmp_path, monkeypatch, capsys):
    """Exit status 1, the notebook and its error on stderr, no table, and nothing after it runs."""
    failing = write_notebook(tmp_path / "02_fails.ipynb", "1 / 0")
    not_of_the_arc, later = tmp_path / "09_samples.ipynb", tmp_path / "03_later.ipynb"  # neither exists
    monkeypatch.setattr(arc, "notebook_files", lambda: [not_of_the_arc, failing, later])
    monkeypatch.setattr(arc, "OUT", tmp_path / "out")
    assert arc.main() == 1
    out, err = capsys.readouterr()
    assert "02_fails.ipynb failed: " in err and "ZeroDivisionError" in err
    assert "03_later" not in err and "incident" not in out
