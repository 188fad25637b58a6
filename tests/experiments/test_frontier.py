"""The experiment behind the table and plot of sizes, and its door `spear bench`."""

import json
from dataclasses import replace

import pytest

from spear.errors import InvalidOption
from spear.experiments import frontier
from spear.experiments.common.drawing import markdown
from spear.experiments.common.experiment import Case, Plan
from spear.report import plots
from spear.trials import Status, Trial, measure
from support.command_line import in_this_process
from support.experiment_rows import row as experiment_row


def row(setting, seed, root, finder="cascade"):
    trial = Trial("frontier", frontier.cell(setting, finder, 60), seed)
    case = Case(trial.settings, seed, root, lambda words, share: None)
    return measure(trial, lambda trial, report: frontier.measure(case), print, "local")[0]


@pytest.fixture(scope="module")
def rows(data_root):
    return [
        row("mnist:6x200", 3, data_root),
        row("mnist:6x200", 3, data_root, "sampling"),
        row("mnist:5x200:raw", 3, data_root),
    ]


def test_a_row_says_all_there_is_to_say(rows):
    first = rows[0]
    assert (first.outcome, first.settings["data"], first.seed) == ("EXACT", "mnist", 3)
    assert first.metrics["certified"] == 6
    assert first.metrics["refused"] == first.metrics["certified_wrong"] == 0
    assert first.seconds > 0
    assert first.stages["factorise"] > 0
    assert json.loads(first.line())["metrics"] == first.metrics
    assert rows[1].metrics["submatrices"] > 0
    for each in (first, rows[2]):  # nobody beats the oracle by much, or misses it by much
        assert abs(each.metrics["oracle"] - each.metrics["psnr"]) < 3


def test_failures_and_unfinished_comparisons_count(rows):
    failed = {**rows[0].metrics, "exact": False, "psnr": None, "worst": None}
    slow = {**rows[1].metrics, "exact": False}
    worse = [
        *(rows[0], rows[2], replace(rows[0], seed=4, metrics=failed)),
        replace(rows[1], metrics=slow, seconds=100 * rows[0].seconds),
    ]
    table = markdown(frontier.frontier_table(worse))
    assert "| 1 of 2 | 1.3-98.7 % |" in table
    assert table.splitlines()[2].endswith("| > 100 |")
    assert "| MNIST | [0, 1] | 5 | 200 | 1 of 1 |" in table
    assert markdown(frontier.stages_table(worse)).count("\n") >= 3


@pytest.mark.parametrize(
    ("status", "time"), [(Status.FAILED, ["", ""]), (Status.TIMED_OUT, ["3.00 s", "30"])]
)
def test_an_exception_has_no_time_beside_ours_and_a_limit_has(status, time):
    ours = Trial("frontier", frontier.cell("mnist:6x200", "cascade", 60), 3)
    theirs = Trial("frontier", frontier.cell("mnist:6x200", "sampling", 60), 3)
    made = {"exact": True, "certified": 6}
    done = experiment_row(ours, made, seconds=0.1)
    cut = experiment_row(theirs, {}, status, error="KeyError: 'nope'")
    (_, line) = frontier.comparison_table([done, cut]).rows
    assert line[1] == "sampling"
    assert [*line[-3:-1]] == time
    assert line[-1] == "1"


def test_the_plot_is_drawn(rows):
    pytest.importorskip("matplotlib", reason="needs the plots extra")
    with plots.style():
        frontier.figure(rows).canvas.draw()
        frontier.figure([]).canvas.draw()


def test_without_settings_it_takes_about_a_minute_and_says_so(data_root, tmp_path):
    pytest.importorskip("typer", reason="needs the cli extra")
    cells = [frontier.cell(setting) for setting in frontier.SMALL]
    twenty = list(Plan(20, 0, {}).each(cells, "frontier"))
    assert 30 < frontier.expected(twenty) < 120
    assert frontier.expected([replace(twenty[0], settings={**cells[0], "finder": "mine"})]) == 0
    command = ["bench", "--workers", "1", "--data", data_root, "--out", tmp_path / "rows.jsonl"]
    done = in_this_process(*command, "--batches", "1")
    assert done.returncode == 0, done.stderr
    told = done.stderr.index("four small settings: about 5 s for our finder (--workers 1)")
    assert told < done.stderr.index("rows: 4 trials to run")
    assert done.stdout.count("1 of 1") == 4
    assert done.stdout.endswith(f"\nrows: {tmp_path / 'rows.jsonl'}\n")
    assert "four small" not in in_this_process(*command, "--batches", "1").stderr  # all is done


@pytest.mark.parametrize(
    "text",
    ["cifar10", "cifar10:20", "cifar10:20x", "svhn:20x200", "mnist:20x200:cooked", "mnist:0x9"],
)
def test_settings_are_checked(text):
    with pytest.raises(InvalidOption, match="expected"):
        frontier.cell(text)
