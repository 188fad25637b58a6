"""Private data is where the user asked for it, nowhere else, and readable by its owner only."""

import base64
import json
import os
import re
import stat

import numpy as np
import pytest
import torch

import spear
from spear.files.private import make_private, write_private
from spear.report import Finding, Report
from spear.report.finding import Truth
from spear.report.redaction import without_folders
from spear.sweep.private_data import PrivateData
from spear.trials.demo import DemoSettings, run_demo
from spear.trials.rows import append_line
from support.planted import plant
from support.tour import canary

POSIX = pytest.mark.skipif(os.name == "nt", reason="Windows has no modes")
ASKED = {  # of a tour: the files that its commands were told to write, or say they write
    "told.json",
    "a.json",
    "r.json",
    "r.html",
    "c.html",
    "s.json",
    *(f"{name}.{kind}" for name in "as" for kind in ("xml", "sarif")),
    "new/a.html",
    "spear-demo/recovered.png",
    "spear-demo/report.html",
    "samples/recovered.safetensors",
    *(f"samples/sample-0{i}.png" for i in range(1, 5)),
    *(f"{folder}/{name}" for folder in ("full", "slim") for name in ("leakage.jsonl", "leakage.lock")),
    *("full/report.html", "slim/report.html"),
    "drawn/drawn/failure.md",
    *(f"drawn/drawn/failure-probability.{kind}" for kind in ("png", "svg")),
}  # fmt: skip
HOLDS = {"a.json", "samples/recovered.safetensors"}  # new/a.html and the PNGs hold it as pixels


def holds_canary(content: bytes) -> bool:
    """Are values of the canary in there: as floats at any place, in base64, or as digits?"""
    texts = re.findall(rb"[A-Za-z0-9+/]{64,}={0,2}", content)
    inside = [base64.b64decode(text[: len(text) // 4 * 4]) for text in texts]
    return any(_as_floats(part) for part in (content, *inside)) or _as_digits(content)


def _as_floats(content: bytes) -> bool:
    wanted = canary(24).flatten().numpy()
    for kind in (np.float32, np.float64):
        for start in range(np.dtype(kind).itemsize):
            usable = (len(content) - start) // np.dtype(kind).itemsize
            if usable < 3:
                continue
            with np.errstate(all="ignore"):
                found = np.frombuffer(content, kind, usable, start).astype(np.float64)
                near = _near(found, wanted)
            if (near[:-2] & near[1:-1] & near[2:]).any():  # three on end are no chance
                return True
    return False


def _near(found, wanted):
    ordered = np.sort(wanted)
    place = np.searchsorted(ordered, found).clip(1, len(ordered) - 1)
    gap = np.minimum(np.abs(found - ordered[place - 1]), np.abs(found - ordered[place]))
    return gap < 1e-6


def _as_digits(content: bytes) -> bool:
    digits = {f"{abs(value):.7f}"[:7].encode() for value in canary(24).flatten().tolist()}
    numbers = set(re.findall(rb"\d\.\d{5}", content))
    return len(numbers & digits) >= 6  # a number of five digits may be any other


@pytest.mark.parametrize(
    "hidden",
    [
        lambda x: b"xyz" + x.numpy().tobytes(),
        lambda x: b"a" + x.float().numpy().tobytes(),
        lambda x: json.dumps({"base64": base64.b64encode(x.numpy().tobytes()).decode()}).encode(),
        lambda x: str(x.tolist()).encode(),
        lambda x: (x + 1e-9 * torch.randn_like(x)).numpy().tobytes(),
    ],
)
def test_the_search_finds_a_canary_wherever_it_hides(hidden):
    assert holds_canary(hidden(canary(1)))
    assert not holds_canary(hidden(torch.rand(4, 48, dtype=torch.float64)))


def test_only_what_was_asked_for_is_written(tour):
    made = {
        path.relative_to(tour.folder / "work").as_posix()
        for path in (tour.folder / "work").rglob("*")
        if path.is_file() and "ward-7" not in path.parts
    }
    assert made ^ ASKED == set()
    assert list((tour.folder / "tmp").iterdir()) == []
    home = [p for p in (tour.folder / "home").rglob("*") if p.is_file()]
    assert all("matplotlib" in path.parts or "fontconfig" in path.parts for path in home), home


@POSIX
def test_all_of_it_is_its_owners(tour):
    for part in ("work", "home"):
        for path in (tour.folder / part).rglob("*"):
            if "ward-7" not in path.parts and path.name != "told.json":
                assert not stat.S_IMODE(path.stat().st_mode) & 0o077, path


def test_the_private_batch_is_where_it_was_asked_for_and_nowhere_else(tour):
    work = tour.folder / "work"
    found = {
        path.relative_to(tour.folder).as_posix()
        for part in ("work", "home", "tmp")
        for path in (tour.folder / part).rglob("*")
        if path.is_file() and "ward-7" not in path.parts and holds_canary(path.read_bytes())
    }
    assert found == {f"work/{name}" for name in HOLDS}
    told = json.loads((work / "told.json").read_text())
    assert not any(holds_canary(words.encode()) for words in told["told"].values())
    assert "Traceback" in told["told"]["debug"]
    assert told["kept"] == ["full/examples.json"]  # and the run with --redact removed it
    assert "are removed" in told["told"]["audit, then redacted"]


def test_redacted_files_name_no_folder(tour):
    work = tour.folder / "work"
    for name in ("r.json", "r.html", "s.json", "slim/report.html", "full/report.html"):
        text = (work / name).read_text(encoding="utf-8")
        assert "ward-7" not in text, name
        assert str(work) not in text, name
        assert "data:image/png" not in text
    assert "--update grads.safetensors" in spear.load(work / "r.json").settings["command"]
    assert "ward-7" in spear.load(work / "a.json").settings["command"]  # it is there to be repeated


@pytest.mark.parametrize(
    ("words", "left"),
    [
        ("spear invert --update=/data/ann/g.pt", "spear invert --update=g.pt"),
        ("weights of C:\\Users\\ann\\net.py:Net", "weights of net.py:Net"),
        ("~/ann/x.npz and ../ann/y.npz, or a/b/c.pt", "x.npz and y.npz, or c.pt"),
        ("and/or, 3/4 of 10 m/s, 1e-3", "and/or, 3/4 of 10 m/s, 1e-3"),
        ("/home/ann/", "ann"),
    ],
)
def test_paths_are_cut_down_to_a_name(words, left):
    assert without_folders(words) == left
    nested = without_folders({"list": [words, 3], "command": None})
    assert nested == {"list": [left, 3], "command": None}


def test_a_note_of_a_redacted_finding_names_no_folder():
    planted = plant(3, m=40, n=20)
    result = spear.invert(planted.view)
    note = "The weights are those that /srv/ann/nets.py:Net gave."
    finding = Finding.of(result, "g.pt", notes=(note,))
    report = Report.new("inversion", "t", "h", [finding], settings={"model": "/srv/ann/nets.py"})
    assert "ann" in report.json()
    redacted = report.redacted()
    assert redacted.findings[0].notes == ("The weights are those that nets.py:Net gave.",)
    assert redacted.settings == {"model": "nets.py"}


def test_reprs_show_no_private_value():
    inputs, labels = canary(3), torch.tensor([0, 1, 2])
    planted = plant(3, m=60, n=48, seed=2)
    result = spear.invert(planted.view, model=planted.model)
    truth = Truth(("ann", "bob", "eve"), inputs, labels, (0, 1, 2), (60.0, 60.0, 60.0))
    finding = Finding.of(result, "update")
    held = PrivateData("data", inputs, labels, names=("ann", "bob", "eve"))
    run = run_demo(DemoSettings(3, 60, 3, 8))
    for thing in (
        result,
        planted.view,
        truth,
        finding,
        held,
        run,
        Report.new("a", "b", "c", [finding]),
    ):
        assert "tensor([[" not in repr(thing), type(thing)
        assert "ann" not in repr(thing)
        assert "labels=tensor" not in repr(thing)
    error = spear.NotExact(result)
    assert "tensor(" not in repr(error) + str(error)


@POSIX
def test_files_and_folders_are_their_owners_whatever_the_umask(tmp_path):
    before = os.umask(0)
    try:
        (tmp_path / "there").mkdir(mode=0o755)
        old = tmp_path / "there" / "rows.jsonl"
        old.write_text("{}\n")
        report = tmp_path / "there" / "report.html"
        report.write_text("old")
        assert stat.S_IMODE(old.stat().st_mode) == 0o666
        append_line(old, "{}")
        write_private(report, b"new")
        write_private(tmp_path / "a" / "b" / "c.png", b"x")
        make_private(tmp_path / "d" / "e")
        modes = {
            path.relative_to(tmp_path).as_posix(): stat.S_IMODE(path.stat().st_mode)
            for path in tmp_path.rglob("*")
        }
    finally:
        os.umask(before)
    assert modes.pop("there") == 0o755  # the user's own
    assert all(mode == (0o600 if "." in name else 0o700) for name, mode in modes.items()), modes


@POSIX
def test_the_command_line_leaves_no_image_of_its_memory():
    pytest.importorskip("typer", reason="needs the cli extra")
    import resource

    from spear.cli.app import keep_private

    limit, mask = resource.getrlimit(resource.RLIMIT_CORE), os.umask(0)
    try:
        keep_private()
        assert resource.getrlimit(resource.RLIMIT_CORE)[0] == 0
        assert os.umask(0) == 0o077
    finally:
        resource.setrlimit(resource.RLIMIT_CORE, limit)
        os.umask(mask)
