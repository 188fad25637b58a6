"""The command line on bad input: one sentence, exit code 2, nothing half-written, nothing obeyed."""

import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("typer", reason="needs the cli extra")
pytest.importorskip("safetensors", reason="needs the cli extra")

import spear
from support.command_line import in_a_process, in_this_process
from support.planted import plant

CODES = (0, 2, 10, 20, 30)
ESCAPE = "\x1b]0;owned\x07\x1b[31m"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """An update of an MLP: w.pt and g.pt."""
    base = tmp_path_factory.mktemp("update")
    planted = plant(3, m=30, n=12, seed=1)
    torch.save(planted.model.state_dict(), base / "w.pt")
    torch.save(planted.gradients, base / "g.pt")
    return base


def told(done, *words):
    """It ended in one sentence and with code 2."""
    assert done.returncode == 2, (done.stdout, done.stderr)
    assert "Traceback" not in done.stderr
    assert "\x1b" not in done.stdout + done.stderr
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert done.stderr.startswith("spear: ")
    for word in words:
        assert word in done.stderr, done.stderr


def invert(folder, *more):
    files = ("--weights", folder / "w.pt", "--update", folder / "g.pt", "--max-seconds", "2")
    return in_this_process("invert", *files, "-q", *more)


def check(folder):
    options = ("-b", "3", "--data", "numbers", "--max-seconds", "1")
    return in_this_process("check", "--weights", folder / "w.pt", *options)


@pytest.mark.parametrize(
    "arguments",
    [
        "theory -m 99999999999999999999999",
        "theory -m 1000000000",
        "theory --p nan",
        "check --weights w.pt --shape 99999999999999999999999",
        "check --weights w.pt --shape 0x1",
        "check --weights w.pt -b 4 --clip 1 --dataset-size 9 --noise-multiplier 1e300",
        "check --weights w.pt -b 4 --clip 1 --dataset-size 9 --noise-multiplier 1e-300",
        "check --weights w.pt -b 4 --clip 1e-300 --noise-multiplier 1",
        "check --weights w.pt -b 0",
        "check --weights w.pt --delta nan",
        "invert --weights w.pt --update g.pt --max-seconds nan",
        "invert --weights w.pt --update g.pt --shape 1x99999999999x99999999999",
        "invert --weights w.pt --update g.pt --shape 1x3x4 --mean nan",
        "invert --weights w.pt --update g.pt --shape 1x3x4 --std 0",
        "invert --weights w.pt --update g.pt --layer ü",
        "invert --weights w.pt --after g.pt --lr -1",
        "invert --weights w.pt --after g.pt --lr nan",
        "demo --width 0",
        "demo --width 99999999999999999999999",
        "demo --depth 99999999999999999999999",
        "demo --max-seconds -1",
        "demo --rounds -1",
        "demo --rounds 99999999999999999999999",
        "bench svhn:1x1",
        "reproduce nothing",
        "data --data nowhere",
    ],
)
def test_wrong_options_are_told(folder, arguments):
    told(in_this_process(*arguments.split(), cwd=folder), "e")


@pytest.mark.parametrize(
    "arguments",
    [
        "invert --weights w.pt --update g.pt --seed 99999999999999999999999",
        "bench --workers 99999999999999999999999",
        "audit --workers 99999999999999999999999",
        "audit --repeats 99999999999999999999999",
        "audit --width 99999999999999999999999",
        "reproduce main --batches 99999999999999999999999",
        "check --clients many",
        "theory --nothing",
        "nothing",
    ],
)
def test_wrong_usage_is_told(folder, arguments):
    done = in_this_process(*arguments.split(), cwd=folder)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr


def test_options_are_called_as_the_user_knows_them(folder):
    done = invert(folder, "--local-batch-size", "4", "--weight-decay", "0.1")
    told(done, "--local-batch-size, --weight-decay belong to local training")
    told(invert(folder, "--max-seconds", "-1"), "--max-seconds")
    told(in_this_process("check", "--weights", folder / "w.pt", "-b", "0"), "--samples")


NAMES = [
    ESCAPE,
    "../../up",
    "a\nb",
    "²",
    "9" * 5000,
    "forward",
    "order",
    "",
    "a..b",
    "ü\u202e",
    "[red]",
]


@pytest.mark.parametrize("name", NAMES)
def test_names_of_tensors_are_shown_and_not_obeyed(tmp_path, name):
    sizes = ((30, 12), (30,), (3, 30), (3,))
    names = (f"{name}.weight", f"{name}.bias", f"{name}x.weight", f"{name}x.bias")
    tensors = dict(zip(names, map(torch.randn, sizes), strict=True))
    torch.save(tensors, tmp_path / "w.pt")
    torch.save({n: torch.zeros(9) for n in names}, tmp_path / "g.pt")
    for command in ("check", "invert"):
        done = in_this_process(
            *(command, "--weights", tmp_path / "w.pt", "--update", tmp_path / "g.pt"),
            *(["--out", tmp_path / "out"] if command == "invert" else []),
        )
        told(done, "g.pt")
    done = check(tmp_path)
    assert done.returncode in CODES, done.stderr
    assert "\x1b" not in done.stdout + done.stderr
    assert "\x07" not in done.stdout + done.stderr
    assert sorted(os.listdir(tmp_path)) == ["g.pt", "w.pt"]


def test_names_of_files_are_shown_and_not_obeyed(folder, tmp_path):
    path = tmp_path / f"{ESCAPE}\n.pt"
    told(in_this_process("check", "--weights", path), r"\x1b]0;owned\x07")
    shutil.copy(folder / "g.pt", path)
    done = in_this_process(
        *("invert", "--weights", folder / "w.pt", "--update", path),
        *("--json", tmp_path / "r.json", "--report", tmp_path / "r.html"),
    )
    assert done.returncode == 20, done.stderr
    assert "\x1b" not in done.stdout + done.stderr + (tmp_path / "r.json").read_text()
    (tmp_path / "adult").mkdir()
    (tmp_path / "adult" / ESCAPE).touch()
    assert "\x1b" not in in_this_process("data", "--data", tmp_path).stdout


KINDS = [torch.int64, torch.bool, torch.float8_e4m3fn, torch.float64, torch.bfloat16, torch.uint16]


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_of_any_kind_are_judged_or_refused(folder, tmp_path, kind):
    for name, other in (("w.pt", "g.pt"), ("g.pt", "w.pt")):
        content = torch.load(folder / name, weights_only=True)
        torch.save({n: t.to(kind) for n, t in content.items()}, tmp_path / name)
        shutil.copy(folder / other, tmp_path / other)
        for done in (invert(tmp_path), check(tmp_path)):
            assert done.returncode in CODES, done.stderr


@pytest.mark.parametrize("spoil", ["nan", "inf", "scalar", "empty", "huge", "tiny", "5-d"])
def test_values_and_shapes_of_any_kind_are_judged_or_refused(folder, tmp_path, spoil):
    unscaled = {
        "nan": lambda t: t * float("nan"),
        "inf": lambda t: t / 0,
        "scalar": lambda t: t.sum(),
        "empty": lambda t: t[:0],
        "huge": lambda t: t.sign() * 1e38,
        "tiny": lambda t: t * 1e-38,
        "5-d": lambda t: t[None, None, None],
    }[spoil]
    for name, other in (("w.pt", "g.pt"), ("g.pt", "w.pt")):
        content = torch.load(folder / name, weights_only=True)
        torch.save({n: unscaled(t) for n, t in content.items()}, tmp_path / name)
        shutil.copy(folder / other, tmp_path / other)
        for done in (invert(tmp_path), check(tmp_path)):
            assert done.returncode in CODES, done.stderr


def test_nothing_is_written_over_what_is_read_or_no_file(folder, tmp_path):
    before = (folder / "w.pt").read_bytes()
    told(invert(folder, "--json", folder / "w.pt"), "which is read")
    (tmp_path / "link.json").symlink_to(folder / "w.pt")
    told(invert(folder, "--json", tmp_path / "link.json"), "which is read")
    told(invert(folder, "--json", tmp_path / "r", "--report", tmp_path / "r"), "twice")
    os.mkfifo(tmp_path / "pipe")
    for place in (tmp_path / "pipe", "/dev/null", "/dev/full"):
        told(invert(folder, "--json", place), "the device or pipe")
        told(in_this_process("check", "--weights", folder / "w.pt", "--report", place), "device")
        with pytest.raises(spear.InvalidOption):
            spear.Report("check", "a", "b").save(place)
    told(invert(folder, "--report", folder), "got the folder")
    told(invert(folder, "--json", folder / "w.pt" / "r.json"), "is no folder")
    told(invert(folder, "--out", folder / "w.pt"), "is no folder")
    assert (folder / "w.pt").read_bytes() == before
    assert Path("/dev/null").is_char_device()
    assert sorted(os.listdir(folder)) == ["g.pt", "w.pt"]
    (tmp_path / "old.json").write_text("mine")
    (tmp_path / "new.json").symlink_to(tmp_path / "old.json")
    assert invert(folder, "--json", tmp_path / "new.json").returncode == 20
    assert (tmp_path / "old.json").read_text() == "mine"  # the link was replaced, not its target


def test_folders_that_may_not_be_written_to(folder):
    """The super-user may write anywhere: so as somebody else."""
    if not hasattr(os, "geteuid") or os.geteuid() != 0:
        pytest.skip("needs to be able to become somebody else")
    with tempfile.TemporaryDirectory() as name:
        closed = Path(name)
        for file in ("w.pt", "g.pt"):
            shutil.copy(folder / file, closed / file)
            (closed / file).chmod(0o644)
        closed.chmod(0o755)
        secret = closed / "secret.pt"
        shutil.copy(folder / "g.pt", secret)
        secret.chmod(0o600)
        os.seteuid(65534)
        try:
            told(invert(closed, "--json", closed / "r.json"), "can be written to")
            told(invert(closed, "--out", closed / "out"), "can be written to")
            told(in_this_process("check", "--weights", secret), "may not be read")
        finally:
            os.seteuid(0)
        assert sorted(os.listdir(closed)) == ["g.pt", "secret.pt", "w.pt"]


def test_full_disks_leave_what_was_there(folder, tmp_path):
    """A process that may write half a kilobyte a file, and a terminal that takes nothing."""
    (tmp_path / "r.json").write_text("the one before")

    def small():
        resource.setrlimit(resource.RLIMIT_FSIZE, (512, 512))

    files = ("--weights", folder / "w.pt", "--update", folder / "g.pt")
    outputs = ("--out", tmp_path / "out", "--json", tmp_path / "r.json")
    done = in_a_process("invert", *files, "-q", *outputs, preexec_fn=small)
    told(done, "r.json: there is no room to write it")
    assert done.stdout.startswith("EXACT")
    assert (tmp_path / "r.json").read_text() == "the one before"
    assert os.listdir(tmp_path) == ["r.json"]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs Linux")
def test_a_full_terminal_is_told():
    command = [sys.executable, "-m", "spear", "theory"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            command, stdout=full, stderr=subprocess.PIPE, text=True, check=False, timeout=120
        )
    assert done.returncode == 2
    assert done.stderr == "spear: there is no room to write it: free some, or name another place\n"


def test_errors_that_nobody_foresaw_end_in_one_line(folder, tmp_path, monkeypatch):
    (tmp_path / "odd.py").write_text("def __getattr__(name):\n    raise ZeroDivisionError('odd')\n")
    arguments = ("check", "--model", f"{tmp_path / 'odd.py'}:net")
    done = in_this_process(*arguments)
    assert done.returncode == 70, done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert "ZeroDivisionError: odd" in done.stderr
    assert "Traceback" in in_this_process(*arguments, "--debug").stderr


def test_models_of_the_user_that_misbehave(tmp_path):
    (tmp_path / "nets.py").write_text(
        "import sys\nfrom torch import nn\n"
        "def leaves(): sys.exit(3)\n"
        "def huge(): return nn.Linear(10**9, 10**9)\n"
        "def endless(): return endless()\n"
        "class Net(nn.Module):\n    pass\n"
    )
    for name in ("leaves", "huge", "endless", "sys", "nn", ""):
        told(in_this_process("check", "--model", f"{tmp_path / 'nets.py'}:{name}"))
    done = in_this_process("check", "--model", f"{tmp_path / 'nets.py'}:Net")
    assert done.returncode in CODES


def test_audits_of_bad_data_are_told(tmp_path):
    good = {"inputs": np.ones((9, 4), np.float32), "labels": np.arange(9) % 3}
    for change in (
        {"inputs": np.full((9, 4), np.nan, np.float32)},
        {"labels": -np.arange(9)},
        {"labels": np.arange(8)},
        {"labels": np.full(9, 2**40)},
        {"inputs": np.ones(9, np.float32)},
        {"inputs": np.ones((0, 4), np.float32), "labels": np.arange(0)},
    ):
        np.savez(tmp_path / "d.npz", **{**good, **change})
        done = in_this_process(
            *(
                "audit",
                "--data",
                tmp_path / "d.npz",
                "--out",
                tmp_path / "out",
                "--training-rounds",
                "0",
            ),
            *("-b", "2", "--repeats", "1", "--workers", "1", "-q"),
        )
        told(done, "expected")
        assert not (tmp_path / "out").exists()


def test_results_of_others_are_told(tmp_path):
    for name, content in {
        "main.jsonl": b"[" * 10**5 + b"\n",
        "leakage.jsonl": b'{"key": 1}\n',
    }.items():
        (tmp_path / name).write_bytes(content)
    told(in_this_process("reproduce", "main", "--only-draw", "--results", tmp_path), "line 1")
    (tmp_path / "b.jsonl").write_text(json.dumps({"data": "mnist"}) + "\n")
    told(in_this_process("bench", "--only-draw", "--out", tmp_path / "b.jsonl"), "line 1")
    os.mkfifo(tmp_path / "pipe.jsonl")
    told(in_this_process("bench", "--only-draw", "--out", tmp_path / "pipe.jsonl"), "pipe")
