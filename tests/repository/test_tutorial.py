"""Notebooks run from top to bottom, and what they say in their stored outputs is what comes out."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("nbclient", reason="needs the docs extra")
pytest.importorskip("ipykernel", reason="needs the docs extra")
pytest.importorskip("matplotlib", reason="needs the plots extra")
pytest.importorskip("skimage", reason="needs the cli extra")

import nbformat

import spear

DOCS = Path(__file__).parents[2] / "docs"
VERDICTS = re.compile(r"\b(EXACT|PARTIAL|APPROXIMATE|FAILED|INCONCLUSIVE|REPLAY|PATTERN|NONE)\b")


def run(notebook, result, temporary):
    """In a process of its own: Jupyter leaves sockets to the collector, which warns of them."""
    environment = {**os.environ, "TMPDIR": str(temporary), "IPYTHONDIR": str(temporary / "i")}
    environment["PYTHONPATH"] = str(Path(spear.__file__).parent.parent)
    return subprocess.run(
        [sys.executable, str(DOCS / "run_tutorial.py"), str(notebook), str(result)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )


def read(path):
    return nbformat.read(str(path), as_version=4)


def printed(cell):
    """All that a cell's outputs say."""
    streams = [o.text for o in cell.outputs if o.output_type == "stream" and o.name == "stdout"]
    values = [o.data.get("text/plain", "") for o in cell.outputs if "data" in o]
    return "".join(streams + values)


def comparable(text):
    """Without what rounding decides, which differs from processor to processor."""
    return re.sub(
        r"of column \d+ where (.*) is [\d.e+]+ times", r"of a column where \1 is too large", text
    )


def pictures(cell):
    return sum("image/png" in output.get("data", {}) for output in cell.outputs)


def test_it_runs_and_says_the_same(tmp_path):
    ended = run(DOCS / "tutorial.ipynb", tmp_path / "fresh.ipynb", tmp_path)
    assert ended.returncode == 0, ended.stderr
    stored, fresh = read(DOCS / "tutorial.ipynb"), read(tmp_path / "fresh.ipynb")
    verdicts = 0
    for before, after in zip(stored.cells, fresh.cells, strict=True):
        if before.cell_type == "code":
            said = VERDICTS.findall(printed(before))
            assert VERDICTS.findall(printed(after)) == said, before.source
            assert pictures(after) == pictures(before)
            verdicts += len(said)
    assert verdicts >= 20
    (report,) = tmp_path.rglob("report.json")
    assert len(spear.load(report).findings) == 8


def test_the_one_for_researchers_runs_and_says_the_same(tmp_path):
    ended = run(DOCS / "research.ipynb", tmp_path / "fresh.ipynb", tmp_path)
    assert ended.returncode == 0, ended.stderr
    stored, fresh = read(DOCS / "research.ipynb"), read(tmp_path / "fresh.ipynb")
    for before, after in zip(stored.cells, fresh.cells, strict=True):
        if before.cell_type == "code":
            assert comparable(printed(after)) == comparable(printed(before)), before.source
            assert pictures(after) == pictures(before)
    text = "".join(map(printed, (cell for cell in fresh.cells if cell.cell_type == "code")))
    for words in ("cascade (ours)", "sampling (the paper's)", "walking (this notebook)"):
        (line,) = (line for line in text.splitlines() if line.startswith(words))
        assert line.count("2 of 2 exact") >= 2  # of three sizes
    for words in ("Geiping et al.", "cocktail party"):
        (line,) = (line for line in text.splitlines() if line.startswith(words))
        assert line.count("0 of 2 exact") == 3
    assert "EXACT and not exact: 0" in text


def test_a_cell_that_fails_is_noticed_and_is_run_by_the_spear_that_is_tested(tmp_path):
    words = "import spear, sys; raise LookupError(f'by {spear.__file__} in {sys.executable}')"
    cells = [nbformat.v4.new_code_cell(words)]
    broken = tmp_path / "broken.ipynb"
    nbformat.write(nbformat.v4.new_notebook(cells=cells), str(broken))
    ended = run(broken, tmp_path / "result.ipynb", tmp_path)
    assert ended.returncode != 0
    assert "LookupError" in ended.stderr
    assert f"by {spear.__file__} in {sys.executable}" in ended.stderr
    assert not (tmp_path / "result.ipynb").exists()


@pytest.mark.parametrize("name", ["tutorial", "research"])
def test_the_stored_outputs_are_those_of_a_whole_run(name):
    stored = read(DOCS / f"{name}.ipynb")
    code = [cell for cell in stored.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert not any(o.output_type == "error" for cell in code for o in cell.outputs)
    assert not any("/tmp" in printed(cell) or "/home" in printed(cell) for cell in code)
