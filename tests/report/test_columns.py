"""Names of a table's inputs: recovered rows read as the people they are about."""

import dataclasses

import pytest
import torch

pytest.importorskip("matplotlib", reason="needs the plots extra")

from spear.errors import InvalidFile, InvalidOption
from spear.report import Report, columns_of, evidence, read_columns
from spear.report.columns import rows_of
from support import reports

NAMES = ["age,40,10", "sex=Female", "sex=Male", "score"]


def people():
    """Two samples of 20 inputs, as columns of 1 + 2 + 17."""
    names = [*NAMES[:3], *(f"f{i}" for i in range(17))]
    return reports.finding(2, 3, image_format=None, columns=columns_of(names))


def test_neighbours_are_one_feature_and_numbers_are_scaled_back():
    columns = columns_of(NAMES)
    assert [(c.name, c.width) for c in columns] == [("age", 1), ("sex", 2), ("score", 1)]
    rows = rows_of(columns, torch.tensor([[-1.0, 0.1, 0.9, 3.25], [0.5, 1.0, 0.0, -2.0]]))
    assert rows == [["30", "Male", "3.25"], ["45", "Female", "-2"]]


def test_names_come_from_a_list_or_a_file(tmp_path):
    assert [c.name for c in read_columns("age, income")] == ["age", "income"]
    (tmp_path / "lines.txt").write_text("\n".join(NAMES) + "\n", encoding="utf-8")
    assert read_columns(str(tmp_path / "lines.txt")) == columns_of(NAMES)
    (tmp_path / "header.csv").write_text("age,income\n", encoding="utf-8")
    assert [c.name for c in read_columns(str(tmp_path / "header.csv"))] == ["age", "income"]


@pytest.mark.parametrize("given", ["nowhere.txt", "folder/names"])
def test_a_file_that_is_not_there_is_told(given):
    with pytest.raises(InvalidFile, match="does not exist"):
        read_columns(given)


@pytest.mark.parametrize("names", ["age,,income", "", "age,"])
def test_empty_names_are_told(names):
    with pytest.raises(InvalidOption, match="empty"):
        read_columns(names)


def test_a_file_that_is_no_text_is_told(tmp_path):
    (tmp_path / "names.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InvalidFile, match="text file"):
        read_columns(str(tmp_path / "names.txt"))


def test_a_spread_of_zero_is_told():
    with pytest.raises(InvalidOption, match="std > 0"):
        columns_of(["age,40,0"])


def test_names_must_fit_the_layer():
    with pytest.raises(InvalidOption, match="each of the layer's 20 inputs in columns, got 4"):
        reports.finding(2, 2, image_format=None, columns=columns_of(NAMES))


def test_people_are_rows_with_what_differs():
    found = people()
    table = evidence.people(found, evidence.samples(found))
    assert table.columns[:3] == ("sample", "age", "sex")
    assert [row[0] for row in table.rows[:2]] == ["1", "2"]
    assert len(table.rows) == 3  # two came back, one did not
    missing = next(i for i in range(3) if i not in found.truth.index)
    true = rows_of(found.columns, found.truth.inputs)
    assert table.columns[-1] == "label"
    assert table.rows[2][1:] == (*(f"({entry})" for entry in true[missing]), f"({missing})")
    assert [row[-1] for row in table.rows[:2]] == [str(i) for i in found.truth.index]
    assert evidence.values(found, evidence.samples(found)) == []
    unlike = people()
    unlike.truth.inputs[unlike.truth.index[0], 0] += 1.0  # ten years
    row = evidence.people(unlike, evidence.samples(unlike)).rows[0]
    assert row[1].endswith(")")


def test_a_page_shows_them_and_a_redacted_one_does_not():
    pytest.importorskip("PIL", reason="needs the cli extra")
    report = Report.new("inversion", "t", "h", [people()])
    entry = rows_of(report.findings[0].columns, report.findings[0].inputs)[0][0]
    assert f"<bdi>{entry}</bdi>" in report.page()
    assert "The rows that came back" in report.page()
    redacted = report.redacted().page()
    assert "The rows that came back" not in redacted
    assert entry not in redacted


def test_a_label_stands_in_the_row_of_its_person_and_beside_the_true_one_if_they_differ():
    found = people()
    wrong = dataclasses.replace(found, labels=torch.tensor([7, -1]))
    first, second, _ = evidence.people(wrong, evidence.samples(wrong)).rows
    true = found.truth.index
    assert (first[-1], second[-1]) == (f"7 ({true[0]})", f"none matched ({true[1]})")
    unknown = dataclasses.replace(found, labels=None)
    assert evidence.people(unknown, evidence.samples(unknown)).columns[-1] == "f16"
