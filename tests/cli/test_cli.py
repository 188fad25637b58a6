import html
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("typer", reason="needs the cli extra")
pytest.importorskip("skimage", reason="needs the cli extra")

from spear.errors import InvalidOption
from spear.inversion import FINDERS, Outcome
from spear.report.pictures import png, side_by_side
from spear.trials.demo import DemoSettings, run_demo
from support.command_line import in_this_process as spear
from support.command_line import without_torch

COMMANDS = (
    "demo",
    "docs",
    "check",
    "invert",
    "audit",
    "reproduce",
    "data",
    "bench",
    "rows",
    "theory",
)
ROOT = Path(__file__).parents[2]
SMALL = ["--samples", "6", "--width", "120", "--depth", "3", "--pixels", "16"]


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """A demo of six photos, and where it wrote."""
    folder = tmp_path_factory.mktemp("demo")
    done = spear("demo", *SMALL, "--out", str(folder / "result"), cwd=folder)
    assert done.returncode == 0, done.stderr
    return done, folder


def test_the_demo_recovers_photos_and_writes_a_picture_and_a_page(demo):
    done, folder = demo
    out = folder / "result"
    assert (
        "EXACT: all 6 samples visible in the update were recovered, proved by replay" in done.stdout
    )
    assert done.stdout.count(" yes ") == 6
    assert sorted(p.name for p in folder.iterdir()) == ["result"]
    assert (out / "recovered.png").read_bytes().startswith(b"\x89PNG")
    page = (out / "report.html").read_text(encoding="utf-8")
    assert page.count("data:image/png;base64,") == 12
    took = re.search(r"\(([^,]+), \d+ search passes\)", " ".join(done.stdout.split()))[1]
    assert f"6 of 6 photos were recovered and certified in {took}." in page
    assert not re.search(r"(src|href)=\"(?!data:|#)", page)
    assert "://" not in page


def test_the_demo_of_one_round_says_nothing_of_rounds(demo):
    done, folder = demo
    assert "A client computes one gradient on 6 private photos (16 x 16, 3-layer" in done.stdout
    assert "The server sees the model and the gradient, nothing else." in done.stdout
    page = (folder / "result" / "report.html").read_text(encoding="utf-8")
    assert "What one gradient gave away" in page
    assert "The attack saw the model and one FedSGD gradient, nothing else" in page


def test_the_demo_of_several_rounds_recovers_more_photos_than_neurons(tmp_path):
    several = ["demo", "--rounds", "12", "-b", "44", "-m", "40", "--pixels", "16"]
    done = spear(*several, "--out", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    told = " ".join(done.stdout.split())
    assert "one gradient per round on 44 private photos for 12 rounds (16 x 16, 6-layer" in told
    assert "The server sees the model and the gradient of each round, nothing else." in told
    assert "EXACT: all 44 samples visible in the updates were recovered, proved by replay" in told
    assert "search passes" in told
    shown = cells(done)  # too many photos for a line each
    assert {name: value for name, value in shown.items() if "PSNR" not in name} == {
        "recovered": "44 of 44",
        "certified": "44 of 44",
        "labels right": "44 of 44",
    }
    assert float(shown["median PSNR (dB)"]) >= float(shown["worst PSNR (dB)"]) > 80
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "What 12 rounds gave away" in page
    assert page.count("data:image/png;base64,") == 88
    assert "--rounds 12" in re.sub(r"</?span[^>]*>", "", page)


def test_the_demo_says_when_it_fails(tmp_path):
    done = spear(
        "demo",
        "-b",
        "30",
        "-m",
        "100",
        "--pixels",
        "16",
        "--max-seconds",
        "1",
        "--finder",
        "sampling",
        "-q",
        "--out",
        str(tmp_path),
    )
    assert done.returncode == 1
    assert "INCONCLUSIVE" in done.stdout  # with more time it may find them
    # Idle, it draws enough submatrices for candidates; busy, it does not get that far.
    assert "ran out of time" in done.stdout or "before the time was over" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["demo", "-b", "0"], "expected --samples >= 1"),
        (["demo", *SMALL, "--finder", "luck"], "expected --finder to be one of"),
        (["demo", "--rounds", "0"], "expected --rounds >= 1, got 0"),
        (["demo", "--rounds", "1001"], "expected --rounds <= 1,000, got 1,001"),
        (
            ["demo", "--rounds", "300"],
            "expected --rounds times --width <= 100,000, got 300 times 400",
        ),
        (["theory", "-b", "10", "--p", "1e-12"], "use --p-fr below"),
        (["theory", "-b", "200", "-m", "100"], "b = 200 and m = 100; larger ones need --rounds"),
        (["theory", "--rounds", "1"], "expected --rounds from 2 to 1,000,000, got 1"),
        (["theory", "--off", "0.3"], "--off needs --rounds"),
        (["theory", "--rounds", "4", "--off", "1.5"], "expected 0 < --off < 1, got 1.5"),
        (["theory", "--rounds", "4", "--movement", "-1"], "expected --movement >= 0, got -1"),
        (["theory", "--rounds", "4", "--inputs", "0"], "expected --inputs >= 1, got 0"),
    ],
)
def test_errors_are_one_sentence_with_exit_code_two(arguments, message, tmp_path):
    done = spear(*arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    debug = spear("--debug", *arguments, cwd=tmp_path)
    assert "Traceback" in debug.stderr
    assert list(tmp_path.iterdir()) == []


def cells(done):
    """Quantities and values of a table that a command printed."""
    assert done.returncode == 0, done.stderr
    rows = [line.split("│")[1:3] for line in done.stdout.splitlines() if line.count("│") == 3]
    return {name.strip(): value.strip() for name, value in rows}


def test_theory_does_not_leave_a_bound_that_fails_alone():
    told = cells(spear("theory", "-b", "4", "-m", "40"))
    paper, least, holds = (
        float(told[name])
        for name in (
            "chance that no number is enough, the paper's bound",
            "the same, at least",
            "the same, a bound that holds",
        )
    )
    assert 100 * paper < least <= holds
    wide = cells(spear("theory", "-b", "4", "-m", "1000000"))
    assert "the same, a bound that holds" not in wide


def test_theory_of_several_rounds():
    told = cells(spear("theory", "-b", "200", "-m", "100", "--rounds", "5"))
    assert told == {
        "rows": "500",
        "neurons that stay off for a sample": "48",
        "independent zeros of the sample with the fewest": "185 of 199",
        "rounds needed": "6",
        "largest batch": "186",
    }
    enough = cells(spear("theory", "-b", "200", "-m", "100", "--rounds", "6"))
    assert enough["independent zeros of the sample with the fewest"] == "199 of 199"


def test_theory_of_rounds_that_cannot_be_enough():
    run = ["theory", "-b", "900", "-m", "100", "--rounds", "40"]
    assert cells(spear(*run))["rounds needed"] != "no number is enough"
    for limit in (["--inputs", "784"], ["--movement", "0"]):
        assert cells(spear(*run, *limit))["rounds needed"] == "no number is enough"
    assert cells(spear(*run, "--inputs", "784"))["largest batch"] == "784"
    assert int(cells(spear(*run, "--off", "0.2", "--noise", "1e-3"))["largest batch"]) < 784


def test_theory_of_one_round_says_nothing_of_rounds():
    done = spear("theory", "-b", "20", "-m", "200")
    told = cells(done)
    assert len(told) == 9
    assert told["the same for 200 neurons"] == "5.38e+07"
    words = " ".join(done.stdout.split())
    for told in ("q, the least", "tau, the share", "A submatrix is b - 1 rows", "1e-10 (--p-fr)"):
        assert told in words


def test_names_are_escaped_in_the_page():
    run = run_demo(DemoSettings(samples=2, width=60, depth=2, pixels=8))
    assert run.result.outcome is Outcome.EXACT
    run.names[0] = "<script>alert(1)</script>"
    page = run.page()
    assert run.names[0] not in page
    assert html.escape(run.names[0]) in page


def test_uncertified_samples_are_left_grey():
    run = run_demo(DemoSettings(samples=2, width=60, depth=2, pixels=8))
    run.result.certified[0] = False
    assert run.picture() != run_demo(DemoSettings(samples=2, width=60, depth=2, pixels=8)).picture()


def test_a_picture_of_many_photos_is_no_strip():
    few, many = torch.zeros(12, 3, 32, 32), torch.zeros(200, 3, 32, 32)
    assert size_of(side_by_side(few, few, "x")) == (10 * 70 + 22, 2 * 206)
    assert size_of(side_by_side(many, many, "x", 25)) == (25 * 70 + 22, 8 * 206)
    large = torch.zeros(50, 3, 64, 64)
    assert size_of(side_by_side(large, large, "x", 25))[0] == 25 * 70 + 22  # not enlarged


def size_of(png):
    return tuple(int.from_bytes(png[at : at + 4], "big") for at in (16, 20))


def test_pictures_take_any_values():
    wild = torch.tensor([[[-1.0, 2.0], [float("nan"), 0.5]]])
    assert png(wild, scale=3).startswith(b"\x89PNG")
    assert side_by_side(torch.rand(3, 3, 100, 100), torch.rand(3, 3, 100, 100), "x").startswith(
        b"\x89"
    )


def test_demo_settings_are_checked():
    with pytest.raises(InvalidOption, match="depth >= 2"):
        DemoSettings(depth=1)
    with pytest.raises(InvalidOption, match="rounds >= 1, got -3"):
        DemoSettings(rounds=-3)


def test_bench_measures_and_draws(tmp_path, data_root):
    out, plot = tmp_path / "rows.jsonl", tmp_path / "plot.png"
    run = ["bench", "mnist:5x100", "--batches", "2", "--workers", "1", "--data", str(data_root)]
    done = spear(*run, "--out", str(out), "--plot", str(plot))
    assert done.returncode == 0, done.stderr
    assert "2 of 2" in done.stdout
    assert plot.exists()
    again = spear("bench", "--only-draw", "--out", str(out))
    assert "2 of 2" in again.stdout
    assert len(out.read_text().splitlines()) == 2


def test_bench_says_what_it_needs(tmp_path):
    done = spear("bench", "svhn:20x200", "--data", str(tmp_path))
    assert done.returncode == 2
    assert "one of" in done.stderr


def test_help_and_version_need_no_torch():
    helps = [["--version"], [], ["--help"], *([name, "--help"] for name in COMMANDS)]
    version, bare, top, *pages = without_torch(*helps, env={**os.environ, "COLUMNS": "80"})
    assert re.fullmatch(r"spear \d+\.\d+\.\d+\n", version[1])
    assert (version[0], top[0], bare[1].strip()) == (0, 0, top[1].strip())
    assert all(f" {name} " in top[1] for name in COMMANDS)
    for name, (code, page, complaints) in zip(COMMANDS, pages, strict=True):
        assert (code, complaints) == (0, ""), page
        assert f"Usage: spear {name} " in page
        assert max(map(len, page.splitlines())) <= 80
    assert all(name in pages[COMMANDS.index("invert")][1] for name in FINDERS)


def test_the_pages_come_with_the_command():
    docs = ROOT / "docs"
    listed, page, linked, near, wrong = without_torch(
        ["docs"],
        ["docs", "limits"],
        ["docs", "audit.md#an-example"],
        ["docs", "../limits2"],
        ["docs", "nothing"],
    )
    names, _, begin = listed[1].partition("\n\n")
    assert [line.split()[0] for line in names.splitlines()] == sorted(
        path.stem for path in docs.glob("*.md")
    )
    assert begin.strip() == "Begin with: spear docs start"
    assert "start         Am I exposed? Five minutes" in listed[1]
    assert (page[0], page[2]) == (0, "")
    assert page[1].strip() == (docs / "limits.md").read_text(encoding="utf-8").strip()
    assert linked[1].startswith("# Auditing")
    assert near[0] == wrong[0] == 2
    assert "there is no page 'limits2'. Did you mean limits?" in near[2]
    assert "there is no page 'nothing': expected one of algorithm, architecture" in wrong[2]


def test_a_wrong_file_name_is_told_before_torch_is_imported(tmp_path):
    (tmp_path / "w.pt").touch()
    (tmp_path / "link.npz").symlink_to(tmp_path / "nowhere.npz")
    (tmp_path / "taken").touch()
    invert = ["invert", "--weights", "w.pt", "--update"]
    cases = {
        ("invert", "--weights", "nosuch.pt", "--update", "w.pt"): "nosuch.pt does not exist: check",
        (*invert, "link.npz"): "link.npz does not exist, it is a link to nowhere",
        (*invert, "."): ". is a folder: expected a file named .safetensors, .npz, .pt",
        (*invert, "w.pt", "--truth", "t.npz"): "t.npz does not exist",
        ("invert", "--round", "w.pt", "u.pt"): "u.pt does not exist",
        ("invert", "--rounds", "watched"): "watched does not exist: expected a folder with one",
        (*invert, "w.pt", "--round", "w.pt", "w.pt"): "got --round and --weights and --update",
        (*invert, "w.pt", "--model", "no/net.py:Net"): "no/net.py does not exist",
        (*invert, "w.pt", "--json", "w.pt"): "expected another file to write than w.pt",
        (*invert, "w.pt", "--json", "."): "expected the name of a file to write, got the folder",
        (*invert, "w.pt", "--report", "taken/r.html"): "taken is no folder that can be written to",
        ("check", "--model", "net.py:Net"): "net.py does not exist",
        ("audit", "--data", "train.npz"): "train.npz does not exist",
    }
    for (code, out, complaint), words in zip(
        without_torch(*cases, cwd=tmp_path), cases.values(), strict=True
    ):
        assert (code, out) == (2, "")
        assert words in complaint
        assert complaint.startswith("spear: ")
        assert len(complaint.splitlines()) == 1


@pytest.mark.skipif(os.name == "nt", reason="needs signals")
@pytest.mark.parametrize(
    ("module", "words"), [("rich.console", []), ("torch.torch_version", ["spear: interrupted"])]
)
def test_ctrl_c_while_modules_are_imported(module, words, tmp_path):
    """Torch would turn a KeyboardInterrupt into errors of its own: it is not told."""
    command = [sys.executable, "-X", "importtime", "-m", "spear", "demo", "--out", str(tmp_path)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        next(line for line in process.stderr if line.rstrip().endswith(f" {module}"))
        process.send_signal(signal.SIGINT)
        told = process.stderr.read().splitlines()
    assert process.returncode == 130, told
    progress = ("import time:", "spear: loading PyTorch")  # the latter where that takes seconds
    assert [line for line in told if not line.startswith(progress)] == words
    assert not any(tmp_path.iterdir())
