"""spear reproduce: the paper's tables and figures, from the command to the page."""

import dataclasses
import json
import math
import os
import re
from pathlib import Path
from unittest import mock

import pytest

pytest.importorskip("typer", reason="needs the cli extra")
pytest.importorskip("rich", reason="needs the cli extra")
from spear.errors import InvalidOption
from spear.experiments import FIGURES, TABLES
from spear.experiments.common import catalogue
from spear.experiments.common.drawing import latex, markdown, table
from spear.experiments.common.only import Only
from spear.experiments.common.page import page_text
from spear.experiments.common.reproduce import Options, plan
from spear.trials import Row, RowFile, Status, Trial
from spear.trials.remaining import Remaining
from support.command_line import in_this_process

ROOT = Path(__file__).parents[2]
COMMITTED = ROOT / "results"


def spear(*arguments):
    """Run the command, without SPEAR_DATA."""
    with mock.patch.dict(os.environ):
        os.environ.pop("SPEAR_DATA", None)
        return in_this_process(*arguments)


def rows(folder, name):
    return RowFile(folder, name).rows()


def test_the_list_names_every_table_and_figure_of_the_paper():
    there = [catalogue.load(name).place for name in catalogue.names()]
    there = [place for place in there if place not in ("Summary", "Beyond the paper")]
    numbers = {kind: set() for kind in ("Table", "Figure")}
    for place in there:
        kind, numbered = place.split(" ", 1)[0].removesuffix("s"), re.findall(r"\d+", place)
        first, last = int(numbered[0]), int(numbered[-1])
        numbers[kind] |= set(range(first, last + 1))
    assert numbers == {"Table": set(range(1, 12)), "Figure": set(range(1, 14))}
    shown = spear("reproduce", "--list")
    assert shown.returncode == 0
    assert all(name in shown.stdout for name in catalogue.names())


def test_numbers_of_the_paper_are_those_of_the_experiments():
    for kind, there in (("Table", TABLES), ("Figure", FIGURES)):
        for number, name in enumerate(there, 1):
            place = catalogue.load(name).place.split(" ", 1)
            assert place[0].removesuffix("s") == kind
            first, last = (int(re.findall(r"\d+", place[1])[end]) for end in (0, -1))
            assert first <= number <= last
            for words in (f"{kind} {number}", f"{kind.lower()}{number}", f"{kind[:3]}. {number}"):
                assert catalogue.resolve([words, name]) == (name,)


def test_a_table_is_drawn_by_its_number(tmp_path):
    ended = spear("reproduce", "Table 8", "--only-draw", "--results", tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert (tmp_path / "drawn" / "one_label.md").is_file()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["Table 12"], "the paper has no 'Table 12': its tables are 1 to 11, its figures 1 to 13"),
        (["fig 0"], "the paper has no 'fig 0'"),
        (
            ["no_such_thing"],
            "expected the name of an experiment, got 'no_such_thing'. There are claims",
        ),
        (["batch-size"], "got 'batch-size'. Did you mean batch_size?"),
        (["main", "batchsize"], "got 'batchsize'. Did you mean batch_size?"),
        (["main"], "expected --data or SPEAR_DATA"),
        (["main", "--data", "no/such/folder"], "no/such/folder"),
        (["main", "--engine", "cloud"], "expected --engine local or ray"),
        (["main", "--address", "here:1"], "expected --engine ray beside --address"),
        (["main", "--only", "b"], "expected --only to be settings such as b=20,finder=cascade"),
        (
            ["main", "--only", "b=20", "--only", "batch=20"],
            "no cell has a setting batch; there are data, b, m, finder, max_seconds",
        ),
        (["main", "layers", "--only", "data=mnst"], "cells have data=mnist, cifar10, tiny_"),
        (["fedavg_epochs", "--only", "epochs=2"], "no cell has epochs=2; cells have epochs=1, 5,"),
        (
            ["main", "--only", "data=imagenet224,finder=sampling"],
            "no cell has data=imagenet224, finder=sampling together",
        ),
        (["main", "--only", "b=20", "--only-draw"], "leave out --only-draw"),
    ],
)
def test_bad_input_is_one_sentence_and_writes_nothing(arguments, words, tmp_path):
    ended = spear("reproduce", *arguments, "--results", tmp_path / "r")
    assert ended.returncode == 2
    assert words in ended.stderr
    assert "Traceback" not in ended.stderr
    assert not list(tmp_path.glob("r/*.jsonl"))


def test_a_run_goes_on_where_it_stopped(data_root, tmp_path):
    command = ["reproduce", "one_label", "--results", tmp_path, "--data", data_root]
    first = spear(*command, "--batches", 1)
    assert first.returncode == 0, first.stderr
    assert "1 trials to run, 0 done before" in first.stderr
    before = (tmp_path / "one_label.jsonl").read_bytes()
    more = spear(*command, "--batches", 2)
    assert "1 trials to run, 1 done before" in more.stderr
    assert (tmp_path / "one_label.jsonl").read_bytes().startswith(before)
    assert len(rows(tmp_path, "one_label")) == 2
    line = json.loads(before.splitlines()[0])
    names = {"seed", "settings", "outcome", "metrics", "seconds", "stages", "versions"}
    assert names <= line.keys()
    assert (tmp_path / "drawn" / "one_label.tex").read_text().count("toprule") == 1
    assert "TinyImageNet" in (tmp_path / "drawn" / "one_label.md").read_text()


@pytest.mark.parametrize(
    ("name", "only", "expected"),
    [
        ("main", ["data=mnist"], {("mnist", "cascade"), ("mnist", "sampling")}),
        (
            "main",
            ["data=mnist,finder=sampling", "b=20, data=cifar10, max_seconds=120.0"],
            {("mnist", "sampling"), ("cifar10", "cascade")},
        ),
        ("fedavg_epochs", ["epochs=20,mini=5", "momentum=9e-1"], {(20, 5), (5, 20)}),
        ("failed_batch", ["data=mnist"], set()),  # of another experiment in the same run
    ],
)
def test_only_the_cells_asked_for_are_planned(name, only, expected, data_root, tmp_path):
    pair = ("epochs", "mini") if name == "fedavg_epochs" else ("data", "finder")
    part = plan(name, Options(tmp_path, data_root, batches=2, only=Only.of(only)))
    settings = [trial.settings for trial in part.open]
    assert {(cell[pair[0]], cell.get(pair[1])) for cell in settings} == expected
    every = plan(name, Options(tmp_path, data_root, batches=2)).open
    assert {trial.key for trial in part.open} < {trial.key for trial in every}


def test_a_dataset_that_is_not_there_is_left_out_and_said(data_root, tmp_path):
    (tmp_path / "MNIST").symlink_to(data_root.resolve() / "MNIST")
    part = plan("main", Options(tmp_path / "r", tmp_path, batches=1))
    assert {trial.settings["data"] for trial in part.open} == {"mnist"}
    assert "CIFAR-10" in part.left_out
    ended = spear("reproduce", "tabular", "--data", tmp_path, "--results", tmp_path / "r")
    assert "without ADULT" in ended.stdout


def test_rows_that_failed_count_and_are_run_again_only_when_asked(data_root, tmp_path):
    part = plan("one_label", Options(tmp_path, data_root, batches=1))
    trial = part.open[0]
    bad = Row(
        *(trial.key, "one_label", dict(trial.settings), trial.seed, Status.FAILED, None, {}),
        *(None, {}, 0.1),
        error="RuntimeError: no",
    )
    with RowFile(tmp_path, "one_label").writing() as file:
        file.append(bad, {})
    assert not plan("one_label", Options(tmp_path, data_root, batches=1)).open
    assert len(plan("one_label", Options(tmp_path, data_root, batches=1, again=True)).open) == 1
    shown = spear("reproduce", "one_label", "--only-draw", "--results", tmp_path).stdout
    assert "1 of them failed or timed out" in shown
    assert "1 ×: RuntimeError: no" in shown
    assert "0 % (0.0–97.5) of 1" in shown


def test_rows_of_settings_that_are_no_more_are_kept_but_not_drawn(data_root, tmp_path):
    trial = plan("one_label", Options(tmp_path, data_root, batches=1)).open[0]
    other = Trial("one_label", {**trial.settings, "max_seconds": 1}, trial.seed)
    with RowFile(tmp_path, "one_label").writing() as file:
        for t in (trial, other):
            row = Row(
                t.key, "one_label", dict(t.settings), t.seed, Status.DONE, "EXACT", {}, 1, {}, 1
            )
            file.append(dataclasses.replace(row, metrics={"exact": t is trial}), {})
    assert len(rows(tmp_path, "one_label")) == 2
    shown = spear("reproduce", "one_label", "--only-draw", "--results", tmp_path).stdout
    assert "100 % (2.5–100.0) of 1" in shown


def test_a_trial_whose_own_time_ran_out_counts_as_cut_short():
    row = Row("k", "x", {"max_seconds": 2}, 0, Status.DONE, "FAILED", {}, 2.1, {}, 3.0)
    assert row.cut_short
    assert not dataclasses.replace(row, seconds=1.9).cut_short
    assert not dataclasses.replace(row, stages={"guess": 1.0}).cut_short
    early = dataclasses.replace(row, seconds=1.4, metrics={"out_of_time": True})
    assert early.cut_short  # the search had a part of it
    assert not dataclasses.replace(early, metrics={"out_of_time": False}).cut_short
    assert dataclasses.replace(row, seconds=0.1, status=Status.TIMED_OUT).cut_short


def test_rows_are_strict_json():
    row = Row(
        "k", "x", {}, 0, Status.DONE, "EXACT", {"loss": math.nan, "by": [math.inf, 1]}, 1, {}, 1
    )
    assert json.loads(row.line())["metrics"] == {"loss": None, "by": [None, 1]}


def test_what_is_left_is_estimated_cell_by_cell():
    def row(b, seed, took):
        trial = Trial("x", {"b": b}, seed)
        return Row(trial.key, "x", {"b": b}, seed, Status.DONE, "EXACT", {}, took, {}, took)

    trials = [Trial("x", {"b": b}, seed) for b in (1, 2) for seed in range(3)]
    remaining = Remaining(trials)
    assert remaining.seconds() is None
    remaining.done(row(1, 0, 1.0))
    assert (
        remaining.seconds() <= 5.0
    )  # all cells alike as long as one is known, if not side by side
    remaining = Remaining(trials, before=[row(1, 9, 1.0), row(2, 9, 100.0)])
    assert remaining.seconds() == pytest.approx(3 * 1.0 + 3 * 100.0)
    for trial in trials:
        remaining.done(row(trial.settings["b"], trial.seed, 0.0))
    assert remaining.seconds() == 0.0


def test_tables_are_the_same_in_markdown_and_latex():
    made = table("a_b, c", [["1.5 × 10⁻³", "99 % (1–2)"], ["σ ≤ 3", "x & y"]], "50 % of #1")
    assert markdown(made).splitlines()[2] == "| 1.5 × 10⁻³ | 99 % (1–2) |"
    text = latex(made)
    assert r"$1.5 \times 10^{-3}$ & 99 \% (1--2) \\" in text
    assert r"a\_b & c \\" in text
    assert r"$\sigma$ $\le$ 3 & x \& y \\" in text
    assert r"\caption{50 \% of \#1}" in text


def test_options_are_checked():
    with pytest.raises(InvalidOption, match="batches >= 1"):
        Options(Path("r"), batches=0)


def test_the_results_page_is_drawn_from_the_committed_rows():
    drawn = page_text(catalogue.names(), COMMITTED, Path("images/results"))
    assert drawn == (ROOT / "docs" / "results.md").read_text()
    for image in re.findall(r"\]\((images/.*?)\.png\)", drawn):
        assert (ROOT / "docs" / f"{image}.png").is_file()


def test_a_page_of_committed_rows_has_its_images(tmp_path):
    pytest.importorskip("matplotlib", reason="needs the plots extra")
    page = tmp_path / "docs" / "page.md"
    ended = spear(
        *("reproduce", "architecture", "percentiles", "--only-draw", "--quiet"),
        *("--results", COMMITTED, "--page", page),
    )
    assert ended.returncode == 0, ended.stderr
    assert page.read_text().count("](images/page/") == 4
    images = tmp_path / "docs" / "images" / "page"
    assert b"<svg" in (images / "architecture-architecture.svg").read_bytes()
    committed = ROOT / "docs" / "images" / "results" / "percentiles-10th.png"
    assert (images / "percentiles-10th.png").read_bytes() == committed.read_bytes()
