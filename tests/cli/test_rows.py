"""spear rows: nothing that a row holds is lost on the way to a table."""

import csv
import io
import json
import os
from pathlib import Path

import pytest

pytest.importorskip("typer", reason="needs the cli extra")
pytest.importorskip("rich", reason="needs the cli extra")
from spear.trials import Row, RowFile, Status
from support.command_line import in_a_process
from support.command_line import in_this_process as spear

COMMITTED = Path(__file__).parents[2] / "results"


@pytest.fixture
def folder(tmp_path):
    """Two experiments: one row with all that is awkward, one that failed, one of another kind."""
    told = {"versions": {"torch": "2.6"}, "commit": "abc", "engine": "local"}
    awkward = {"exact": True, "psnr": 1 / 3, "lpips": None, "zeros": [1, 2], "reason": 'a, "b"\nc'}
    rows = {
        "mine": [
            Row("k1", "mine", {"b": 3, "seed": "x"}, 0, Status.DONE, "EXACT", awkward, 1.5,
                {"search": 0.25}, 2.0, **told),
            Row("k2", "mine", {"b": 4, "seed": "x"}, 1, Status.FAILED, None, {}, None, {}, 0.1,
                error="ValueError: =no", **told),
        ],
        "other": [Row("k3", "other", {"c": -1}, 0, Status.DONE, "FAILED", {"worst": 9.0}, 1, {}, 1)],
    }  # fmt: skip
    for name, some in rows.items():
        with RowFile(tmp_path, name).writing() as file:
            for row in some:
                file.append(row, {})
    return tmp_path


def read(text):
    return list(csv.DictReader(io.StringIO(text)))


def test_every_setting_and_metric_is_a_column(folder):
    done = spear("rows", "mine", folder / "other.jsonl", "--results", folder, "--csv", "-")
    assert done.returncode == 0, done.stderr
    first, failed, other = read(done.stdout)
    assert first["experiment"] == "mine"
    assert (first["settings.b"], first["settings.seed"], first["seed"]) == ("3", "x", "0")
    assert float(first["metrics.psnr"]) == 1 / 3  # every digit
    assert first["metrics.exact"] == "True"
    assert json.loads(first["metrics.zeros"]) == [1, 2]
    assert first["metrics.reason"] == 'a, "b"\nc'
    assert (first["stages.search"], first["versions.torch"]) == ("0.25", "2.6")
    assert first["metrics.lpips"] == first["error"] == ""  # None is empty
    assert (failed["status"], failed["error"]) == ("failed", "ValueError: =no")
    assert failed["outcome"] == failed["seconds"] == failed["metrics.psnr"] == ""
    assert (other["settings.c"], other["settings.b"]) == ("-1", "")


def test_nothing_of_committed_rows_is_lost():
    for path in sorted(COMMITTED.glob("*.jsonl")):
        lines = read(spear("rows", path, "--csv", "-").stdout)
        kept = list(RowFile(path.parent, path.stem).rows().values())
        assert len(lines) == len(kept)
        for line, row in zip(lines, kept, strict=True):
            for part in ("settings", "metrics", "stages"):
                for name, value in getattr(row, part).items():
                    cell = line[f"{part}.{name}"]
                    if value is None or isinstance(value, str):
                        assert cell == (value or "")
                    elif isinstance(value, bool):
                        assert cell == str(value)
                    else:
                        assert json.loads(cell) == value


def test_a_file_opens_in_pandas_and_excel_and_is_its_owners(folder):
    out = folder / "rows.csv"
    done = spear("rows", "mine", "--results", folder, "--csv", out)
    assert "2 rows" in done.stdout
    assert out.read_bytes().startswith(b"\xef\xbb\xbfexperiment,seed,")
    assert out.stat().st_mode & 0o077 == 0
    with out.open(encoding="utf-8-sig", newline="") as file:
        assert len(list(csv.DictReader(file))) == 2


def test_the_table_on_the_terminal_shows_what_differs(folder):
    shown = spear("rows", "mine", "--results", folder).stdout
    lines = [line.split() for line in shown.splitlines()]
    assert lines[0] == ["experiment", "b", "seed", "outcome", "exact", "psnr", "took", "error"]
    assert lines[1][:6] == ["mine", "3", "0", "EXACT", "True", "0.33333"]
    assert lines[2][:4] == ["mine", "4", "1", "failed"]
    assert "2 rows, all with seed x; --csv FILE has every column" in shown


@pytest.mark.parametrize("width", [50, 120])
def test_no_column_of_a_narrow_terminal_is_cut(width):
    environment = {**os.environ, "COLUMNS": str(width)}
    done = in_a_process("rows", "main", "--results", COMMITTED, env=environment)
    lines = done.stdout.splitlines()
    assert "…" not in "".join(lines)
    assert max(map(len, lines)) <= width
    titles = lines[0].split()
    assert {"seed", "outcome"} <= set(titles)
    told = " ".join(lines[lines.index("") :])
    assert ("no room here for" in told) == ("took" not in titles)
    for title in ("data", "finder", "exact", "psnr", "took"):
        assert (title in titles) or title in told.rpartition("no room here for")[2]


def test_a_number_of_the_paper_names_its_rows():
    assert spear("rows", "Table 8", "--results", COMMITTED).stdout == (
        spear("rows", "one_label", "--results", COMMITTED).stdout
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["Table 12"], "the paper has no 'Table 12': its tables are 1 to 11, its figures 1 to 13"),
        (["nope"], "an experiment that has rows in"),
        (["none.jsonl"], "there is no file none.jsonl"),
        (["mine", "--csv", "."], "got the folder"),
        (["notes.jsonl"], "line 1: expected a row"),
    ],
)
def test_bad_input_is_one_sentence(folder, arguments, words):
    (folder / "notes.jsonl").write_text("hello\nthere\n")
    done = spear("rows", *arguments, "--results", folder, cwd=folder)
    assert done.returncode == 2
    assert words in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr
