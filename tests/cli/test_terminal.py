"""What a user sees: one screen, the width of the terminal, progress, and what Tab completes."""

import contextlib
import os
import pty
import re
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

pytest.importorskip("typer", reason="needs the cli extra")

import spear
from spear.check import Action, Exposure, Subject, preflight
from spear.cli import progress
from spear.cli.console import PlainConsole
from spear.cli.tables import show_drawn
from spear.experiments import names
from spear.experiments.common import catalogue, times
from spear.experiments.common.page import write
from spear.federated import mlp
from support.command_line import in_a_process, in_this_process

ROOT = Path(__file__).parents[2]
COMMITTED = ROOT / "results"
NET = """
from torch import nn

def net():
    return nn.Sequential(nn.Linear(60, 120), nn.ReLU(), nn.Linear(120, 10))

def inner():
    return nn.Sequential(
        nn.Unflatten(1, (1, 6, 10)), nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.Dropout2d(0.1),
        nn.Flatten(), nn.Linear(256, 120), nn.ReLU(), nn.Dropout(0.2), nn.Linear(120, 10))

def smooth():
    return nn.Sequential(nn.Linear(60, 120), nn.GELU(), nn.Linear(120, 10))
"""
SCREEN = 24 - 2  # lines, without those of the command and of the next prompt


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "net.py").write_text(NET)
    return tmp_path


def at(columns, *arguments, **options):
    """A command in a pipe, where COLUMNS says how wide."""
    return in_a_process(*arguments, env={**os.environ, "COLUMNS": str(columns)}, **options)


@pytest.mark.parametrize(
    "asked",
    [
        ("net.py:net", "-b", 8),
        ("net.py:net", "-b", 8, "--clients", 3, "--clip", 1, "--noise-multiplier", 1e-6),
        ("net.py:net", "-b", 59, "--max-seconds", 0.5, "--clients", 3, "--mode", "eval"),
        ("net.py:inner", "-b", 8, "--lr", 0.1, "--epochs", 2, "--rounds", 2, "--shape", 60),
        ("net.py:smooth", "-b", 8, "--optimizer", "adam", "--lr", 0.1, "--epochs", 2),
        ("net.py:net",),
    ],
)
def test_a_check_is_one_screen(asked, folder, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    done = in_this_process("check", "--model", *asked, cwd=folder)
    assert done.returncode in (0, 10, 20), done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) <= SCREEN
    assert max(map(len, lines)) <= 80
    assert lines.index("Why") < lines.index("What to do")
    assert 1 <= sum(line.startswith("  - ") for line in lines) <= 3
    assert lines[-1] == "Details: the same command with -v"


def test_a_check_says_all_it_knows_if_asked(folder):
    asked = ("check", "--model", "net.py:inner", "-b", 8, "--shape", 60, "--json", "c.json")
    done = in_this_process(*asked, "-v", cwd=folder)
    report = spear.load(folder / "c.json")
    assert len(report.remarks) > 3
    assert all(f"- {remark.subject}: {remark.words}" in done.stdout for remark in report.remarks)
    assert "Linear layers" in done.stdout


def test_reasons_and_what_to_do_are_values_and_in_the_json():
    model = mlp(60, 10, width=120, depth=3, seed=0)
    found = preflight(model, samples=8, data="numbers")
    subjects = [reason.subject for reason in found.reasons]
    assert subjects == [Subject.REHEARSAL, Subject.LAYER, Subject.DEFENCES]
    assert [advice.action for advice in found.what_to_do] == [
        *(Action.AGGREGATE, Action.ADD_NOISE, Action.MEASURE)
    ]
    assert found.what_to_do[0].options == {"clients": 10}
    report = found.report("Is it exposed?", settings={"command": "spear check --clip 2"})
    tables = {table.title: table for table in report.tables}
    assert [row[0] for row in tables["Why"].rows] == [subject.value for subject in subjects]
    assert [step.command for step in report.steps] == [
        *("spear check --clip 2 --clients 10", "spear check --clip 1 --noise-multiplier 1")
    ]


def test_the_noise_that_would_decide_it_is_named_and_does():
    model = mlp(60, 10, width=120, depth=3, seed=0)

    def check(z):
        return preflight(model, samples=8, data="numbers", clip=1.0, noise_multiplier=z)

    undecided = check(1.0)
    advice = next(one for one in undecided.what_to_do if one.action is Action.ADD_NOISE)
    needed = advice.options["noise_multiplier"]
    assert undecided.verdict is Exposure.UNKNOWN
    assert check(needed).verdict is Exposure.NOT_EXPOSED
    assert check(0.95 * needed).verdict is not Exposure.NOT_EXPOSED


def test_what_to_do_follows_from_what_happened():
    model = mlp(60, 10, width=120, depth=3, seed=0)

    def first(**told):
        found = preflight(model, data="numbers", **told)
        return found.verdict, found.what_to_do[0].action

    hidden = {"noise_multiplier": 4.0, "clip": 0.1, "samples": 8}
    assert first(**hidden) == (Exposure.NOT_EXPOSED, Action.KEEP_NOISE)
    assert first() == (Exposure.EXPOSED, Action.GIVE_SAMPLES)
    late = preflight(model, samples=59, data="numbers", max_seconds=0.3)
    assert late.verdict is not Exposure.EXPOSED
    assert (late.what_to_do[0].action, late.what_to_do[0].options) == (
        *(Action.GIVE_TIME, {"max_seconds": 3.0}),
    )
    together = preflight(model, samples=4, data="numbers", clients=3)
    assert Action.AGGREGATE not in {advice.action for advice in together.what_to_do}
    assert Action.HIDE_SINGLE in {advice.action for advice in together.what_to_do}


@pytest.mark.parametrize("columns", [60, 100])
def test_what_is_piped_is_as_wide_as_columns_say(columns, folder):
    told = at(columns, "reproduce", "nothing_like_it", "--results", folder)
    listed = at(columns, "reproduce", "--list", "--results", folder)
    theory = at(columns, "theory", "-b", 20)
    assert told.returncode == 2
    widths = [
        max(map(len, text.splitlines())) for text in (told.stderr, listed.stdout, theory.stdout)
    ]
    assert max(widths) <= columns
    assert min(widths[:2]) > columns - 14
    assert "frontier" in listed.stdout


@pytest.mark.parametrize("columns", [0, 1, "many"])
def test_a_width_that_makes_no_sense_stops_nothing(columns, folder):
    told = at(columns, "reproduce", "batchsize", "--results", folder)
    assert "".join(told.stderr.split()).endswith("Didyoumeanbatch_size?")


def test_a_pipe_without_a_width_is_not_folded(folder):
    told = in_a_process("reproduce", "nothing_like_it", "--results", folder)
    assert len(told.stderr.splitlines()) == 1
    assert len(told.stderr) > 200


@pytest.mark.parametrize("columns", [60, 80, 120])
@pytest.mark.parametrize("name", ["main", "dpsgd", "frontier"])
def test_experiments_are_tables_as_wide_as_the_terminal(name, columns, tmp_path, capsys):
    pytest.importorskip("matplotlib", reason="needs the plots extra")
    drawn = write(name, COMMITTED, tmp_path)
    show_drawn(PlainConsole(width=columns, force_terminal=True, no_color=True), drawn, Path("d"))
    shown = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)
    assert max(len(line.rstrip()) for line in shown.splitlines()) <= columns
    assert not re.search(r"\*\*|\| --- \||^#|`", shown, re.MULTILINE)
    together = " ".join(shown.split())
    cells = [cell for table in drawn.section.tables for row in table.rows for cell in row]
    assert len(cells) > 20
    if columns >= 80:
        plain = [re.sub(r"`|\*\*", "", str(cell)) for cell in cells]
        assert not [cell for cell in plain if cell not in together]


def test_expected_times_are_those_of_the_rows():
    """`python benchmarks/expected_times.py results` writes the file anew."""
    assert times.FILE.read_text() == times.text(times.measured(COMMITTED))
    assert times.kept()["main"].all > times.kept()["main"].one > 60
    planned = {name for name in names() if catalogue.load(name).measure}
    assert planned == times.kept().keys()


def test_the_list_says_how_long(tmp_path):
    shown = in_this_process("reproduce", "--list", "--results", tmp_path).stdout
    lines = {line.split()[0]: line for line in shown.splitlines() if line}
    assert re.search(r"Table 3 +\d+ min +[\d.]+ (h|min) ", lines["main"])
    assert re.search(r"Figure 3 +0 s +0 s ", lines["failure"])
    # It is drawn from the rows of main, which are run first.
    assert lines["error_bars"].split()[3:7] == lines["main"].split()[3:7]
    assert "Linux x86_64" in shown
    assert "1 thread" in shown


def test_times_that_nobody_measured_are_not_made_up(monkeypatch, tmp_path):
    known = {name: taken for name, taken in times.kept().items() if name != "tabular"}
    monkeypatch.setattr(times, "kept", lambda: known)
    shown = in_this_process("reproduce", "--list", "--results", tmp_path).stdout
    assert re.search(r"^tabular +Table 2 +not measured ", shown, re.MULTILINE)


def test_an_experiment_is_never_taken_for_an_option(tmp_path):
    pytest.importorskip("matplotlib", reason="needs the plots extra")
    shown = in_this_process("reproduce", "batch_size", "--only-draw", "--results", tmp_path)
    assert shown.returncode == 0
    assert "spear reproduce batch_size: 0 rows" in shown.stdout
    wrong = in_this_process("reproduce", "batch_sizes", "--results", tmp_path)
    assert wrong.stderr.endswith("got 'batch_sizes'. Did you mean batch_size?\n")


def in_a_terminal(*arguments, **options):
    """What a terminal of 80 x 24 gets to see, with all control characters."""
    here, there = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "80", "LINES": "24"}
    command = [sys.executable, "-m", "spear", *map(str, arguments)]
    with subprocess.Popen(
        command, stdin=there, stdout=there, stderr=there, env=environment, **options
    ) as process:
        os.close(there)
        seen = b""
        while True:
            try:
                more = os.read(here, 1 << 16)
            except OSError:  # Linux, once the other end is closed
                break
            if not more:
                break
            seen += more
    os.close(here)
    return process.returncode, seen.decode()


def test_a_terminal_sees_what_is_done_before_torch_is_there(folder):
    code, seen = in_a_terminal("check", "--model", "net.py:net", "-b", 8, cwd=folder)
    assert code == 20
    first = seen.index("loading PyTorch")
    assert first < seen.index("rehearsing with made-up data, 1 of 2") < seen.index("Exposed")
    assert not seen[:first].strip("\x1b[?25l\r\n -\\|/")  # nothing came before it
    assert "\x1b[?25h" in seen[first:]  # the cursor is back
    code, quiet = in_a_terminal("check", "--model", "net.py:net", "-b", 8, "-q", cwd=folder)
    assert code == 20
    assert "loading" not in quiet
    assert len(quiet.splitlines()) == 1


def test_a_log_gets_a_line_where_it_takes_long(monkeypatch, folder):
    monkeypatch.setattr(progress, "_SOON", 0.0)
    asked = ("check", "--model", "net.py:net", "-b", 8)
    done = in_this_process(*asked, cwd=folder)
    assert re.fullmatch(r"spear: .+ \(\d+ s\) \.\.\.\n", done.stderr)
    assert "spear: " not in done.stdout
    assert in_this_process(*asked, "-q", cwd=folder).stderr == ""


def test_the_judge_says_what_it_is_at():
    model = mlp(40, 10, width=100, depth=3, seed=0)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(6, 40, generator=generator)
    y = torch.randint(10, (6,), generator=generator)
    seen = []
    view = spear.observe(model, spear.federated.fedsgd(model, x, y))
    spear.invert(view, on_progress=seen.append)
    assert [step.detail for step in seen if step.stage == "judge"] == [
        *("", "replaying the samples, and rival explanations")
    ]


@contextlib.contextmanager
def shell(command, folder):
    """A real shell with `spear` on a pseudo-terminal: types, and reads until it has seen a word."""
    program = folder / "bin" / "spear"
    program.parent.mkdir(exist_ok=True)
    program.write_text(f"#!{sys.executable}\nfrom spear.__main__ import main\nmain()\n")
    program.chmod(0o755)
    environment = {
        **os.environ,
        "PATH": f"{program.parent}{os.pathsep}{os.environ['PATH']}",
        "HOME": str(folder),
        "PS1": "$ ",
        "TERM": "dumb",
        "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
    }
    here, there = pty.openpty()
    with subprocess.Popen(
        command,
        **{"stdin": there, "stdout": there, "stderr": there},
        **{"env": environment, "cwd": folder, "start_new_session": True},
    ) as process:
        os.close(there)

        def typed(keys, until):
            os.write(here, keys.encode())
            seen, over = "", time.monotonic() + 120
            while until not in seen:
                assert time.monotonic() < over, f"waited for {until!r}, got {seen!r}"
                if select.select([here], [], [], 0.1)[0]:
                    seen += os.read(here, 4096).decode()
            return seen

        yield typed
        process.kill()
    os.close(here)


@pytest.fixture
def bash(folder):
    """A bash with completion on."""
    with shell(["bash", "--norc", "--noprofile", "-i"], folder) as typed:
        typed('eval "$(_SPEAR_COMPLETE=source_bash spear)"; echo re""ady\n', "ready")
        yield typed


@pytest.mark.skipif(shutil.which("zsh") is None, reason="needs zsh")
def test_the_first_tab_completes_in_zsh(folder):
    with shell(["zsh", "-i", "-f"], folder) as typed:
        typed('spear --install-completion; spear --install-completion; echo do""ne\n', "done")
    assert (folder / ".zfunc" / "_spear").read_text().count("loadautofunc") == 1
    with shell(["zsh", "-i"], folder) as typed:
        typed('echo re""ady\n', "ready")
        typed("spear reproduce bat\t", "ch_size")
        typed("\x15spear demo --finder c\t", "ascade")


@pytest.mark.skipif(not Path("/bin/bash").exists(), reason="needs bash")
def test_tab_completes_in_bash(bash, folder):
    model = mlp(20, 4, width=30, depth=3, seed=0)
    torch.save(model.state_dict(), folder / "w.pt")
    assert "batch_size " in bash("spear reproduce ba\t", "batch_size ")
    (folder / "kept").mkdir()
    (folder / "kept" / "my_table.jsonl").touch()
    assert "my_table " in bash("\x15spear rows --results kept my\t", "my_table ")
    assert "cascade " in bash("\x15spear demo --finder c\t", "cascade ")
    assert "sampling " in bash("\x15spear invert --finder=s\t", "sampling ")
    bash("\x15spear invert --weights w.pt --layer 4\t", "--layer 4 ")
    assert "0  2  4" in bash("\x15spear invert --weights w.pt --layer \t\t", "4")
    listed = bash("\x15spear check --model net.py:inner --layer \t\t", "8")
    assert re.search(r"5\s+8", listed)
