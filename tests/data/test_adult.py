"""Tables: UCI ADULT read, encoded, and recovered from gradients."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import spear
from spear import Outcome, data
from spear.data import Column, TabularData
from spear.data.adult import FILES
from spear.errors import DataError, InvalidOption
from spear.federated import fedsgd, mlp
from spear.metrics import Average, score_table

ROWS = [
    "39, State-gov, 77516, Bachelors, 13, Never-married, Adm-clerical, Not-in-family, White, Male, "
    "2174, 0, 40, United-States, <=50K",
    "50, ?, 83311, Bachelors, 13, Married-civ-spouse, ?, Husband, White, Male, 0, 0, 13, ?, >50K",
]


def write(root, rows=ROWS, test=ROWS):
    """Both files at their full length, these rows over and over."""
    (root / "adult").mkdir(exist_ok=True)
    train_rows, test_rows = FILES["train"][1], FILES["test"][1]
    lines = (rows * train_rows)[:train_rows]
    (root / "adult" / "adult.data").write_text("\n".join(lines) + "\n\n")
    lines = [f"{row}." for row in (test * test_rows)[:test_rows]]
    (root / "adult" / "adult.test").write_text("|1x3 Cross validator\n" + "\n".join(lines) + "\n\n")


@pytest.fixture(scope="session")
def adult(data_root):
    return data.adult(data_root)


def test_what_is_written_is_read(tmp_path):
    write(tmp_path)
    for split in ("train", "test"):
        people = data.adult(tmp_path, split)
        assert len(people) == FILES[split][1]
        assert (people.inputs, people.classes) == (108, 2)
        x, y = people.batch([1, 0])
        assert y.tolist() == [1, 0]
        decoded = people.decode(x)
        assert decoded["workclass"] == ["?", "State-gov"]
        assert decoded["native-country"] == ["?", "United-States"]
        assert decoded["age"] == pytest.approx([50, 39], abs=1e-4)
        assert decoded["fnlwgt"] == pytest.approx([83311, 77516], abs=0.01)


def test_the_training_file_sets_the_scale_of_both(tmp_path):
    write(tmp_path, test=[ROWS[0].replace("39,", "90,")])
    train, test = data.adult(tmp_path), data.adult(tmp_path, "test")
    assert train.columns == test.columns
    assert test.decode(test.batch([0])[0])["age"] == pytest.approx([90], abs=1e-4)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("39, ", "", "line 2: expected 15 fields, got 14"),
        ("39, ", "old, ", "line 2: expected a number for age, got 'old'"),
        ("39, ", "?, ", "line 2: expected a number for age, got '?'"),
        ("39, ", "nan, ", "line 2: expected a number for age, got 'nan'"),
        ("State-gov", "State-gvo", "line 2: 'State-gvo' is not a known workclass"),
        ("White", "?", "line 2: '?' is not a known race"),
        ("<=50K", "50K", "line 2: expected one of the labels <=50K, >50K, got '50K'"),
    ],
)
def test_malformed_lines_are_named(tmp_path, old, new, said):
    write(tmp_path)
    path = tmp_path / "adult" / "adult.data"
    lines = path.read_text().splitlines()
    lines[1] = ROWS[0].replace(old, new)
    path.write_text("\n".join(lines))
    with pytest.raises(DataError) as error:
        data.adult(tmp_path)
    assert said in str(error.value)


def test_missing_cut_and_foreign_files_are_named(tmp_path):
    with pytest.raises(DataError, match=r"expected adult/adult\.data"):
        data.adult(tmp_path)
    write(tmp_path)
    path = tmp_path / "adult" / "adult.data"
    whole = path.read_text()
    path.write_text(whole[: len(whole) // 2])
    with pytest.raises(DataError, match=r"line 16.*copy the file again|expected 32,561 rows"):
        data.adult(tmp_path)
    path.write_text("\n".join(whole.splitlines()[:100]))
    with pytest.raises(DataError, match="expected 32,561 rows, got 100; the last is line 100"):
        data.adult(tmp_path)
    path.write_text("<html>\n" * 10)
    with pytest.raises(DataError, match=r"line 1: expected 15 fields.*and 7 more lines"):
        data.adult(tmp_path)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DataError, match="expected text"):
        data.adult(tmp_path)
    path.write_text(whole)
    (tmp_path / "adult" / "adult.test").unlink()
    assert len(data.adult(tmp_path)) == 32_561
    with pytest.raises(DataError, match=r"expected adult/adult\.test"):
        data.adult(tmp_path, "test")
    with pytest.raises(InvalidOption, match="split"):
        data.adult(tmp_path, "validation")


numbers = st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=8)


@given(numbers, st.data())
def test_rows_become_inputs_and_rows_again(ages, draw):
    jobs = draw.draw(
        st.lists(st.sampled_from(["a", "b", "?"]), min_size=len(ages), max_size=len(ages))
    )
    people = TabularData.of("people", {"age": ages, "job": jobs}, ["yes"] * len(ages))
    x, _ = people.batch(range(len(people)), dtype=torch.float64)
    decoded = people.decode(x)
    assert decoded["job"] == jobs
    scale = 1e-9 * (1 + max(map(abs, ages)))
    assert decoded["age"] == pytest.approx(ages, abs=scale)
    assert x[:, 1:].sum(1).tolist() == [1.0] * len(ages)


def test_a_constant_column_divides_by_nothing():
    column = Column.of("height", [1.8, 1.8, 1.8])
    assert (column.constant, column.mean, column.std) == (True, 1.8, 1.0)
    people = TabularData.of("people", {"height": [1.8, 1.8], "job": ["a", "a"]}, ["no", "yes"])
    x, _ = people.batch([0, 1])
    assert x.tolist() == [[0, 1], [0, 1]]
    assert people.decode(x) == {"height": [1.8, 1.8], "job": ["a", "a"]}


def test_tables_that_make_no_sense_are_refused():
    with pytest.raises(InvalidOption, match="at least one entry"):
        Column.of("age", [])
    with pytest.raises(InvalidOption, match="1 strings among 2"):
        Column.of("age", [1.0, "old"])
    with pytest.raises(InvalidOption, match="finite"):
        Column.of("age", [1.0, torch.nan])
    with pytest.raises(InvalidOption, match=r"expected columns of 1 entries.*'age' 2"):
        TabularData.of("people", {"age": [1, 2]}, ["yes"])
    people = TabularData.of("people", {"age": [1, 2]}, ["yes", "no"])
    with pytest.raises(InvalidOption, match=r"expected inputs \(k, 1\) of people, got \(2, 3\)"):
        people.decode(torch.zeros(2, 3))


def test_the_table_shows_numbers_as_people_write_them(adult):
    x, y = adult.batch([0, 1])
    lines = adult.table(x + 1e-7, torch.tensor([int(y[0]), -1])).splitlines()
    assert lines[1].split() == [*ROWS[0].replace(",", "").split()]
    assert lines[2].split()[10:] == ["0", "0", "13", "United-States", "unknown"]
    broken = x.clone()
    broken[0] = torch.nan
    assert set(adult.table(broken).splitlines()[1].split()) == {"nan"}


def people():
    return TabularData.of(
        "people",
        {
            "age": [20, 40, 60, 80],
            "sex": ["f", "m", "f", "m"],
            "pay": [0, 1000, 2000, 3000],
            "job": ["a", "b", "c", "a"],
        },
        ["no", "yes", "no", "yes"],
    )


def test_planted_errors_are_counted():
    table = people()
    x, _ = table.batch(range(4), dtype=torch.float64)
    wrong = x.clone()
    wrong[1, 1:3] = torch.tensor([0.9, 0.1])  # f instead of m
    wrong[2, 0] += 10 / table.columns[0].std
    before = wrong.clone()
    found = score_table(wrong[[2, 0, 1, 3]], x, table)
    assert torch.equal(wrong, before)
    assert found.pairs.truth.tolist() == [2, 0, 1, 3]
    assert found.discrete_accuracy.value == pytest.approx(7 / 8)
    assert found.continuous_error.value == pytest.approx(10 / 8)
    assert found.accuracy.value == pytest.approx(14 / 16)  # 10 years are 0.45 deviations
    assert found.exact_rows.tolist() == [False, True, False, True]
    assert not found.exact
    assert score_table(x.flip(0), x, table).exact


def test_missing_and_broken_rows_are_stated():
    table = people()
    x, _ = table.batch(range(4))
    part = score_table(x[:3], x, table)
    assert part.discrete_accuracy == Average(1.0, samples=3, missing=1)
    assert not part.exact
    nothing = score_table(x[:0], x, table)
    for average in (nothing.discrete_accuracy, nothing.continuous_error, nothing.accuracy):
        assert average == Average(None, samples=0, missing=4)
    assert not nothing.exact
    broken = x.clone()
    broken[0] = torch.nan
    found = score_table(broken, x, table)
    assert found.continuous_error.missing == 1
    assert found.discrete_accuracy.value == pytest.approx(3 / 4)
    assert not found.exact


def test_a_table_of_numbers_alone_has_no_discrete_accuracy():
    table = TabularData.of("numbers", {"a": [1, 2], "b": [3, 5]}, ["no", "yes"])
    x, _ = table.batch([0, 1])
    assert score_table(x, x, table).discrete_accuracy.value is None
    assert score_table(x, x, table).exact


def test_the_real_files(data_root, adult):
    assert (len(adult), adult.inputs, adult.classes) == (32_561, 108, 2)
    assert len(data.adult(data_root, "test")) == 16_281
    assert adult.labels.double().mean().item() == pytest.approx(0.2408, abs=1e-4)
    x, _ = adult.batch(range(len(adult)), dtype=torch.float64)
    numbers = torch.stack([x[:, 0], x[:, 10]], 1)  # age and fnlwgt
    assert numbers.mean(0).tolist() == pytest.approx([0, 0], abs=1e-9)
    assert numbers.std(0, correction=0).tolist() == pytest.approx([1, 1])


@pytest.mark.parametrize("seed", range(20))
def test_whole_batches_come_back(seed, adult):
    """The paper's setting: b = 16, six layers of width 200. It reports 100 % and an MAE of 20.4."""
    order = torch.randperm(len(adult), generator=torch.Generator().manual_seed(seed))
    x, y = adult.batch(order[:16].tolist())
    net = mlp(adult.inputs, adult.classes, width=200, depth=6, seed=seed)
    result = spear.invert(spear.observe(net, fedsgd(net, x, y)), model=net)
    found = score_table(result.inputs, x, adult)
    assert result.outcome is Outcome.EXACT
    assert found.exact
    assert found.discrete_accuracy == Average(1.0, samples=16, missing=0)
    assert found.continuous_error.value < 0.1  # in dollars, years, hours and census weights
    assert torch.equal(result.labels, y[found.pairs.truth])


@pytest.mark.parametrize("seed", range(3))
def test_a_person_who_is_there_twice_is_not_certified(seed, adult):
    """ADULT holds 24 such rows. The other rows still come back, none is claimed to be proved."""
    _, inverse, counts = adult.values.unique(dim=0, return_inverse=True, return_counts=True)
    twins = (inverse == (counts > 1).nonzero()[seed]).nonzero().flatten()[:2].tolist()
    order = torch.randperm(len(adult), generator=torch.Generator().manual_seed(seed))
    x, y = adult.batch(twins + order[:14].tolist())
    net = mlp(adult.inputs, adult.classes, width=200, seed=seed)
    result = spear.invert(spear.observe(net, fedsgd(net, x, y)), model=net)
    found = score_table(result.inputs, x, adult)
    assert result.outcome is not Outcome.EXACT
    assert result.batch_size == 15
    assert bool(found.exact_rows[result.certified].all())
    assert found.discrete_accuracy == Average(1.0, samples=15, missing=1)


def test_dependent_rows_are_never_called_exact(adult):
    """The last row is a mixture of others, in numbers: 16 rows of rank 15 hide one."""
    x, y = adult.batch(range(16))
    x[15] = x[0] + x[1] - x[2]
    net = mlp(adult.inputs, adult.classes, width=200, seed=0)
    result = spear.invert(spear.observe(net, fedsgd(net, x, y)), model=net, max_seconds=20)
    found = score_table(result.inputs, x, adult)
    assert result.batch_size == 15
    assert result.outcome is not Outcome.EXACT
    assert bool(found.exact_rows[result.certified].all())
