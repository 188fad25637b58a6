"""The benchmark behind the README's table and plot."""

import json

import pytest

from spear.errors import DataError, InvalidOption
from spear.experiments.bench import frontier, tables
from spear.experiments.bench.frontier import Setting
from support.hostile_files import LINES


@pytest.fixture(scope="module")
def rows(data_root):
    settings = [Setting("mnist", 6, 200), Setting("mnist", 5, 200, raw=True)]
    return list(frontier.run(settings, data_root, batches=2, seed=3, compare=1, max_seconds=60))


def test_a_row_says_all_there_is_to_say(rows):
    assert [row["finder"] for row in rows] == ["cascade", "sampling", "cascade"] * 2
    first = rows[0]
    assert (first["data"], first["b"], first["m"], first["raw"], first["seed"]) == (
        "mnist",
        6,
        200,
        False,
        3,
    )
    assert first["exact"]
    assert first["outcome"] == "EXACT"
    assert not first["false_exact"]
    assert first["certified"] == 6
    assert first["refused"] == first["certified_wrong"] == 0
    assert first["seconds"] > 0
    assert first["stats"]["factorise"] > 0
    assert json.loads(json.dumps(first)) == first


def test_nobody_beats_the_oracle_by_much_or_misses_it_by_much(rows):
    for row in rows:
        if row["finder"] == "cascade":
            assert abs(row["oracle"] - row["psnr"]) < 3


def test_the_same_seed_gives_the_same_recovery(rows, data_root):
    again = next(frontier.run([Setting("mnist", 6, 200)], data_root, batches=1, seed=3))
    assert again["psnr"] == rows[0]["psnr"]


def test_summaries_count_failures_and_unfinished_comparisons(rows):
    worse = [dict(row) for row in rows]
    worse[2]["exact"] = False
    worse[2]["psnr"] = worse[2]["worst"] = None
    worse[1]["exact"] = False
    worse[1]["seconds"] = 100 * worse[0]["seconds"]
    summary = tables.summarise(worse)[0]
    assert (summary.exact, summary.batches) == (1, 2)
    assert summary.interval[0] < 0.5 < summary.interval[1]
    assert summary.faster == pytest.approx(100)
    assert summary.unfinished == 1
    assert "1 of 2" in tables.table(worse)
    assert "> 100" in tables.table(worse)


def test_tables_and_plot_are_drawn(rows, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    loaded = tables.load(path)
    assert loaded == rows
    table = tables.table(loaded)
    assert table.count("\n") == 3
    assert "MNIST" in table
    assert "false EXACT" in tables.stages(loaded)
    tables.plot(loaded, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_broken_rows_are_named(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(LINES["bench"] + b'\n{"da')
    assert len(tables.load(path)) == 1  # cut off by a kill: not a row
    path.write_bytes(LINES["bench"] + b'\n{"da\n')
    with pytest.raises(DataError, match="line 2"):
        tables.load(path)


@pytest.mark.parametrize(
    "text",
    ["cifar10", "cifar10:20", "cifar10:20x", "svhn:20x200", "mnist:20x200:cooked", "mnist:0x9"],
)
def test_rows_are_checked(text):
    with pytest.raises(InvalidOption, match="expected"):
        Setting.parse(text)
