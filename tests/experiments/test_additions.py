"""Finders, attacks and experiments of users: as files and as an installed package, in every command."""

import contextlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest

pytest.importorskip("typer", reason="needs the cli extra")
pytest.importorskip("rich", reason="needs the cli extra")
from safetensors.torch import save_file

import spear
from spear import plugins
from spear.errors import InvalidExtension
from spear.experiments.common import catalogue
from spear.experiments.common import page as pages
from spear.experiments.common import reproduce as flow
from spear.experiments.common.additions import Addition
from spear.federated import fedsgd, mlp
from spear.trials import InlineEngine, RowFile
from support.command_line import in_a_process, in_this_process
from support.planted import plant
from support.user_files import write_files, write_package

COMMITTED = Path(__file__).parents[2] / "results"


@pytest.fixture
def folder(tmp_path):
    return write_files(tmp_path)


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A folder into which pip has installed a package with entry points."""
    target = tmp_path_factory.mktemp("installed")
    source = write_package(tmp_path_factory.mktemp("source") / "peeling-finder")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation"]
    options = ["--no-index", "--disable-pip-version-check", "--target", target, source]
    done = subprocess.run([*pip, *options], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return target


@pytest.fixture
def package(installed, monkeypatch):
    monkeypatch.syspath_prepend(str(installed))
    yield installed
    for name in [name for name in sys.modules if name.split(".")[0] == "peeling"]:
        del sys.modules[name]


def run(*arguments, cwd):
    """The command without SPEAR_DATA."""
    with mock.patch.dict(os.environ):
        os.environ.pop("SPEAR_DATA", None)
        return in_this_process(*arguments, cwd=cwd)


def rows(folder, name="my_table"):
    return list(RowFile(folder, name).rows().values())


def inline(folder, *, finder=None, table="my_table.py"):
    """`spear reproduce my_table.py --batches 1` in this process: how many trials ran, and the page."""
    with contextlib.chdir(folder), mock.patch.object(sys, "path", [*sys.path]):
        chosen = None if finder is None else Addition.finder(finder)
        (name,) = catalogue.resolve([table])
        part = flow.plan(name, flow.Options(folder, batches=1, finder=chosen))
        work = flow.work(None, [chosen] if chosen else [])
        ran = list(part.run(work, InlineEngine(), lambda step: None))
        return len(ran), pages.write(name, folder, folder / "drawn", chosen).markdown()


# A table of one's own


def test_a_table_of_ones_own_is_run_resumed_and_drawn(folder):
    command = ["reproduce", "my_table.py", "--workers", "2"]
    first = run(*command, "--batches", "1", cwd=folder)
    assert first.returncode == 0, first.stderr
    assert "2 trials to run, 0 done before" in first.stderr
    again = run(*command, cwd=folder)
    assert "2 trials to run, 2 done before" in again.stderr
    assert ["3", "1", "EXACT"] in map(str.split, again.stdout.splitlines())
    found = rows(folder / "spear-results")
    assert [row.outcome for row in found] == ["EXACT"] * 4
    assert {row.engine for row in found} == {"local"}
    assert (folder / "spear-results" / "drawn" / "my_table.md").is_file()
    (code,) = {row.settings["experiment_code"] for row in found}
    assert len(code) == 16


def test_only_some_cells_are_run_and_all_rows_drawn(folder):
    command = ["reproduce", "my_table.py", "--workers", "1", "--batches", "1"]
    assert run(*command, cwd=folder).returncode == 0
    done = run(*command, "--only", "b=2", "--finder", "my_finder.py:Mine", cwd=folder)
    assert done.returncode == 0, done.stderr
    found = rows(folder / "spear-results")
    assert [row.settings["b"] for row in found if "finder" in row.settings] == [2]
    done = run(*command, "--only", "b=3", "--batches", "2", cwd=folder)
    assert len(rows(folder / "spear-results")) == len(found) + 1
    lines = map(str.split, done.stdout.splitlines())
    drawn = [words for words in lines if words[2:] == ["EXACT"]]
    assert drawn == [["2", "0", "EXACT"], ["3", "0", "EXACT"], ["3", "1", "EXACT"]]


def test_what_measure_rests_on_starts_new_rows_and_a_drawing_does_not(folder):
    table = folder / "my_table.py"
    assert inline(folder)[0] == 2
    text = table.read_text()
    table.write_text(text.replace('"b, seed, outcome"', '"size, seed, ending"') + "\n# later\n")
    ran, page = inline(folder)
    assert ran == 0
    assert "| size | seed | ending |" in page
    assert page.count("| EXACT |") == 2
    table.write_text(text.replace("CLASSES = 5", "CLASSES = 4"))  # measure uses it
    ran, page = inline(folder)
    assert ran == 2
    assert len(rows(folder)) == 4
    assert page.count("| EXACT |") == 2  # the old rows are kept, and not drawn


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("EXPERIMENT = Experiment(", "TABLE = Experiment("), "my_table.py has no 'EXPERIMENT'"),
        (("EXPERIMENT = Experiment(", "EXPERIMENT = dict("), "my_table to be an Experiment"),
        (('"m": 60', '"m": torch.tensor(60)'), "the cells of my_table as JSON has them"),
        (("import torch", "import torched"), "No module named 'torched'"),
        (("return Section(", "return list("), "draw of my_table returned a list"),
        (("sorted(lines)", "lines[99]"), "draw of my_table failed (IndexError"),
    ],
)
def test_a_table_that_is_none_is_said_in_one_sentence(folder, change, words):
    table = folder / "my_table.py"
    table.write_text(table.read_text().replace(*change))
    done = run("reproduce", "my_table.py", "--only-draw", cwd=folder)
    assert done.returncode == 2, done.stdout
    assert words in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr


def test_a_run_without_a_success_says_so_and_ends_with_one(folder, data_root):
    command = ["reproduce", "my_table.py", "--batches", "1", "--workers", "1"]
    done = run(*command, "--finder", "my_finder.py:Broken", cwd=folder)
    assert done.returncode == 1
    (told,) = [line for line in done.stderr.splitlines() if "succeeded" in line]
    assert told.startswith(
        "spear: no trial of 2 succeeded; 1 × InvalidExtension: the finder Broken"
    )
    again = run(*command, "--finder", "my_finder.py:Broken", "--quiet", cwd=folder)
    assert (again.returncode, again.stdout, again.stderr) == (1, "", f"{told}\n")
    assert run(*command, "--only-draw", cwd=folder).returncode == 0  # it ran nothing
    late = ["bench", "mnist:20x60", "--batches", "1", "--workers", "1", "--data", data_root]
    done = in_this_process(*late, "--max-seconds", "0.001", cwd=folder)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "spear: no trial of 1 succeeded; 1 × out of time"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("int(found.result.certified.sum())", "found.result.certified"), "call .item()"),
        (("return found.measured(", "return dict("), "returned a dict, expected Measured"),
    ],
)
def test_a_measure_that_returns_what_no_row_can_hold_fails_by_trial(folder, change, words):
    table = folder / "my_table.py"
    table.write_text(table.read_text().replace(*change))
    inline(folder)
    found = rows(folder)
    assert [row.status.value for row in found] == ["failed"] * 2
    assert all(words in row.error for row in found)


def test_a_file_may_not_be_named_like_one_of_ours_or_another(folder):
    (folder / "main.py").write_text((folder / "my_table.py").read_text())
    (folder / "other").mkdir()
    (folder / "other" / "my_table.py").write_text((folder / "my_table.py").read_text())
    ended = run("reproduce", "main.py", cwd=folder)
    assert (ended.returncode, "an experiment 'main' already" in ended.stderr) == (2, True)
    ended = run("reproduce", "my_table.py", "other/my_table.py", cwd=folder)
    assert (ended.returncode, "would have the same rows" in ended.stderr) == (2, True)


# A finder of one's own


def test_reproduce_puts_a_finder_in_the_place_of_ours(folder):
    inline(folder)
    ran, page = inline(folder, finder="my_finder.py:Mine")
    assert ran == 2
    assert "With the finder my_finder.py:Mine" in page
    theirs = [row for row in rows(folder) if "finder" in row.settings]
    assert [row.metrics["mine"] for row in theirs] == [1, 1]  # it was this finder that searched
    assert {row.settings["finder"] for row in theirs} == {"my_finder.py:Mine"}
    assert (folder / "drawn" / "my_table.md").read_text().count("EXACT") == 2
    assert (folder / "drawn" / "my_finder.py-Mine" / "my_table.md").read_text().count("EXACT") == 2


def test_a_table_names_the_finder_in_the_place_of_ours(folder):
    with contextlib.chdir(folder), mock.patch.object(sys, "path", [*sys.path]):
        theirs = Addition.finder("my_finder.py:Mine")
    (folder / "main.jsonl").write_text((COMMITTED / "main.jsonl").read_text())
    page = pages.write("main", folder, folder / "drawn", theirs).markdown()
    assert page.startswith("## Table 3: Main results")
    assert page.splitlines()[0].endswith(", with the finder my_finder.py:Mine")
    named = [line.split("|")[2].strip() for line in page.splitlines() if line.startswith("| ")][2:]
    assert named == ["my_finder.py:Mine"] * 5 + ["sampling"] * 3
    ours = pages.write("main", folder, folder / "drawn").markdown()
    assert ours.count("| cascade |") == 5
    people = pages.write("tabular", folder, folder / "drawn", theirs).markdown()
    assert "SPEAR, ours" not in people
    assert people.count("| my_finder.py:Mine |") == 3


def test_changed_code_starts_new_rows_wherever_it_is(folder):
    assert inline(folder, finder="my_finder.py:Mine")[0] == 2
    assert inline(folder, finder="my_finder.py:Mine")[0] == 0
    (folder / "my_levels.py").write_text("LEVEL = 0.5\n")  # which my_finder.py imports
    assert inline(folder, finder="my_finder.py:Mine")[0] == 2
    assert len({row.settings["finder_code"] for row in rows(folder)}) == 2


def test_a_finder_that_fails_makes_failed_rows_and_spoils_no_others(folder, data_root):
    command = ["bench", "mnist:3x60", "--batches", "2", "--workers", "2", "--data", data_root]
    command += ["--finder", "my_finder.py:Broken", "--finder", "my_finder.py:READY"]
    done = in_this_process(*command, "--attack", "my_attack.py:Mine", cwd=folder)
    assert done.returncode == 0, done.stderr
    table = [line for line in done.stdout.splitlines() if line.startswith("MNIST 3/60 ")]
    exact = {line.split()[2]: re.findall(r"\d of \d", line) for line in table[-4:]}
    assert next(iter(exact)) == "cascade"
    assert exact["cascade"] == exact["my_finder.py:READY"] == ["2 of 2"]
    assert exact["my_finder.py:Broken"] == exact["my_attack.py:Mine"] == ["0 of 2"]
    assert "the finder Broken: pool 1 is a tensor" in done.stdout
    seeds = {}
    for row in rows(folder, "frontier"):
        seeds.setdefault(row.settings.get("finder", "attack"), set()).add(row.seed)
    assert set(map(frozenset, seeds.values())) == {frozenset({0, 1})}  # the same batches
    assert "frontier: " in done.stderr
    assert "frontier: " not in in_this_process(*command, cwd=folder).stderr  # nothing is left to do


def test_a_worker_runs_the_code_that_the_run_began_with(folder):
    code = spear.files.UserCode.of(str(folder / "my_finder.py:Mine"), plugins.FINDERS)
    (folder / "my_finder.py").write_text("class Mine:\n    'something else'\n")
    assert hasattr(code.load(), "search")
    (folder / "my_levels.py").write_text("LEVEL = 0.1\n")  # beside it, and not shipped
    with pytest.raises(spear.InvalidOption, match="not what it was when the run began"):
        code.load()


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("my_finder.py", "it has Mine, Broken"),
        ("my_finder.py:Nope", "my_finder.py has no 'Nope'; it has"),
        ("my_finder.py:Picky", "calling my_finder.py:Picky for a finder failed"),
        ("my_finder.py:LEVEL", "this float has no search and no satisfied"),
        ("none.py:Mine", "there is no file none.py"),
        ("luck", "expected finder to be one of cascade, sampling, got 'luck'"),
    ],
)
@pytest.mark.parametrize("command", ["bench", "reproduce", "invert"])
def test_what_is_no_finder_is_said_before_anything_runs(folder, command, spec, words):
    start = {
        "bench": ["bench", "mnist:3x60"],
        "reproduce": ["reproduce", "my_table.py"],
        "invert": ["invert", "--weights", "my_table.py", "--update", "my_levels.py"],
    }
    done = run(*start[command], "--finder", spec, cwd=folder)
    assert done.returncode == 2, done.stdout
    assert words in " ".join(done.stderr.split())
    assert not list(folder.rglob("*.jsonl"))


@pytest.mark.parametrize(
    ("name", "words"),
    [("Boaster", "an attack proves nothing"), ("Empty", "expected a spear.Inversion")],
)
def test_an_attack_cannot_claim_a_proof(folder, data_root, name, words):
    command = ["bench", "mnist:3x60", "--batches", "1", "--workers", "1", "--data", data_root]
    done = in_this_process(*command, "--attack", f"my_attack.py:{name}", cwd=folder)
    assert words in " ".join(done.stdout.split())
    assert [row.outcome for row in rows(folder, "frontier")] in (["EXACT", None], [None, "EXACT"])


def test_an_experiment_that_uses_no_finder_of_ours_says_so(folder):
    table = folder / "my_table.py"
    table.write_text(
        table.read_text().replace("attack(case, ", "attack_sampling(case, ")
        + (
            "\n\ndef attack_sampling(case, view, net):\n"
            "    return attack(case, view, net, 'sampling')\n"
        )
    )
    with pytest.raises(spear.InvalidOption, match="my_table does not use our finder"):
        inline(folder, finder="my_finder.py:Mine")
    done = run("reproduce", "failure_validation", "--finder", "sampling", "--data", ".", cwd=folder)
    assert "--finder has no place in it" in " ".join(done.stderr.split())


@pytest.fixture
def update(tmp_path):
    net = mlp(40, 5, width=60, depth=3, seed=0)
    planted = plant(3, m=60)
    sent = fedsgd(net, planted.inputs[:, :40], planted.labels % 5)
    save_file(net.state_dict(), tmp_path / "w.safetensors")
    save_file({name: t.clone() for name, t in sent.items()}, tmp_path / "g.safetensors")
    return ["--weights", "w.safetensors", "--update", "g.safetensors"]


def test_invert_takes_a_finder_from_a_file(folder, update):
    done = in_a_process(
        "invert", *update, "--finder", "my_finder.py:Mine", "--json", "r.json", cwd=folder
    )
    assert done.returncode == 20, done.stderr
    report = json.loads((folder / "r.json").read_text())
    assert report["findings"][0]["stats"]["mine"] == 1
    assert report["settings"]["finder"] == "my_finder.py:Mine"
    assert len(report["settings"]["finder_code"]) == 16
    broken = in_a_process("invert", *update, "--finder", "my_finder.py:Broken", cwd=folder)
    assert broken.returncode == 2
    assert "the finder Broken: pool 1 is a tensor" in " ".join(broken.stderr.split())
    assert "Traceback" not in broken.stderr


# An installed package


def test_an_installed_package_adds_names(package, update, tmp_path):
    planted = plant(3, m=60)
    result = spear.invert(planted.view, model=planted.model, finder="peeling")
    assert (result.outcome.name, result.stats["mine"]) == ("EXACT", 1)
    done = in_this_process("invert", *update, "--finder", "peeling", cwd=tmp_path)
    assert done.returncode == 20, done.stderr


def test_an_installed_package_runs_in_workers(package, data_root, tmp_path):
    command = ["bench", "mnist:3x60", "--batches", "1", "--workers", "2", "--data", data_root]
    command += ["--finder", "peeling", "--attack", "peeling_attack"]
    done = in_this_process(*command, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = {
        r.settings.get("finder") or r.settings["attack"]: r for r in rows(tmp_path, "frontier")
    }
    assert found["peeling"].metrics["mine"] == 1
    assert found["peeling_attack"].outcome == "APPROXIMATE"
    assert len(found["peeling"].settings["finder_code"]) == 16
    ran, page = inline(tmp_path, table="peeling_table")
    assert (ran, page.count("| EXACT |")) == (2, 2)


def test_a_broken_package_is_named_and_harms_no_other(package, tmp_path):
    with pytest.raises(InvalidExtension, match=r"'gone' of peeling-finder 1.2 cannot be loaded"):
        spear.invert(plant(3, m=60).view, finder="gone")
    with pytest.raises(spear.InvalidOption, match="one of cascade, gone, peeling, sampling, got"):
        spear.invert(plant(3, m=60).view, finder="nope")
    shown = run("reproduce", "--list", cwd=tmp_path)
    assert shown.returncode == 0, shown.stderr
    words = " ".join(shown.stdout.split())
    assert "peeling_table" in words
    assert "Random rows" in words
    assert "peeling_gone to be an" in words
    assert all(name in words for name in catalogue.names())


def test_two_packages_with_one_name_are_both_named(package, tmp_path, monkeypatch):
    other = tmp_path / "other-1.0.dist-info"
    other.mkdir()
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 1.0\n")
    (other / "entry_points.txt").write_text("[spear.finders]\npeeling = other:Finder\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(InvalidExtension, match=r"both offer 'peeling' in spear\.finders"):
        plugins.load(plugins.FINDERS, "peeling")
