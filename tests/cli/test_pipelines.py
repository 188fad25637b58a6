"""For pipelines: JUnit and SARIF files of every command, and exit codes by --fail-on."""

import json
import os
from pathlib import Path

import jsonschema
import numpy as np
import pytest

pytest.importorskip("typer", reason="needs the cli extra")
junitparser = pytest.importorskip("junitparser", reason="needs the dev extra")
safetensors = pytest.importorskip("safetensors.torch", reason="needs the cli extra")

from support.command_line import in_this_process, without_torch
from support.planted import plant

SCHEMA = Path(__file__).parents[1] / "support" / "schemas" / "sarif-2.1.0.json"
LEVELS = ("exact", "partial", "approximate", "inconclusive")
NET = "from spear.federated import mlp\n\ndef net():\n    return mlp(48, 3, width=60, depth=3)\n"


def cases_of(path):
    (suite,) = junitparser.JUnitXml.fromfile(str(path))
    return list(suite)


def results_of(path):
    content = json.loads(path.read_text("utf-8"))
    jsonschema.Draft4Validator(json.loads(SCHEMA.read_text("utf-8"))).validate(content)
    (run,) = content["runs"]
    return run["results"]


@pytest.fixture(scope="module")
def update(tmp_path_factory):
    folder = tmp_path_factory.mktemp("update")
    planted = plant(4, m=60, n=48, depth=3, seed=3)
    states = {"before": planted.model.state_dict(), "grads": planted.gradients}
    states["noise"] = {name: 0 * t for name, t in planted.gradients.items()}
    for name, tensors in states.items():
        own = {key: t.detach().clone() for key, t in tensors.items()}
        safetensors.save_file(own, folder / f"{name}.safetensors")
    (folder / "mynet.py").write_text(NET)
    rng = np.random.default_rng(0)
    np.savez(folder / "data.npz", inputs=rng.normal(size=(24, 48)), labels=np.arange(24) % 3)
    return folder


def files(folder, sent="grads"):
    return ["--weights", folder / "before.safetensors", "--update", folder / f"{sent}.safetensors"]


def test_an_exact_update_fails_at_every_level(update, tmp_path):
    for level in LEVELS:
        out = ["--junit", tmp_path / "s.xml", "--sarif", tmp_path / "s.sarif", "--fail-on", level]
        done = in_this_process("invert", *files(update), *out)
        assert done.returncode == 1, done.stderr
        assert "EXACT" in done.stdout
        (case,) = cases_of(tmp_path / "s.xml")
        assert case.name == "grads.safetensors"
        assert type(case.result[0]) is junitparser.Failure
    (result,) = results_of(tmp_path / "s.sarif")
    assert (result["ruleId"], result["level"]) == ("spear/exact", "error")
    if os.name != "nt":
        assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o600}


def test_an_update_without_anything_in_it(update, tmp_path):
    """What it comes to without the option decides; a wrong limit is bad input."""
    usual = in_this_process("invert", *files(update, "noise"))
    assert usual.returncode in (0, 30)
    told = {
        level: in_this_process("invert", *files(update, "noise"), "--fail-on", level).returncode
        for level in LEVELS
    }
    assert told == {**dict.fromkeys(LEVELS, 0), "inconclusive": int(usual.returncode == 30)}


def test_bad_input_stays_bad_input(update, tmp_path):
    (tmp_path / "cut.safetensors").write_bytes(b"no tensors")
    damaged = ["--weights", update / "before.safetensors", "--update", tmp_path / "cut.safetensors"]
    assert in_this_process("invert", *damaged, "--fail-on", "exact").returncode == 2
    same = ["--junit", "a", "--sarif", "./a"]
    for words, message in (
        (["--fail-on", "failed"], "'failed' is not one of"),
        (same, "two files for --junit and --sarif"),
        (["--junit", "-"], "only --json can be -"),
        (["--sarif", update], "got the folder"),
    ):
        ((code, _, complaint),) = without_torch(["invert", *files(update), *words], cwd=tmp_path)
        assert code == 2
        assert message in " ".join(complaint.replace("│", " ").split())
    assert [path.name for path in tmp_path.iterdir()] == ["cut.safetensors"]


def test_a_check_is_one_case(update, tmp_path):
    model = ["--model", f"{update / 'mynet.py'}:net", "-b", 4, "--max-seconds", 20]
    out = ["--junit", tmp_path / "c.xml", "--sarif", tmp_path / "c.sarif", "--json", tmp_path / "c"]
    done = in_this_process("check", *model, *out, "--fail-on", "exact")
    verdict = json.loads((tmp_path / "c").read_text("utf-8"))["settings"]["verdict"]
    assert verdict == "exposed"
    assert done.returncode == 1
    (case,) = cases_of(tmp_path / "c.xml")
    assert case.name == "Is mynet.py:net exposed?"
    assert case.result
    (result,) = results_of(tmp_path / "c.sarif")
    assert result["message"]["text"].startswith("Exposed: ")


def test_an_audit_has_a_case_for_each_setting(update, tmp_path):
    model = ["--model", f"{update / 'mynet.py'}:net", "--data", update / "data.npz", "-b", 4]
    run = ["--repeats", 1, "--training-rounds", 0, "--workers", 1, "--sigma", "0,1000"]
    out = ["--junit", tmp_path / "s.xml", "--sarif", tmp_path / "s.sarif", "--out", tmp_path / "o"]
    done = in_this_process("audit", *model, *run, *out, "-q", "--fail-on", "exact")
    assert done.returncode == 1, done.stderr
    bad, good = cases_of(tmp_path / "s.xml")
    assert type(bad.result[0]) is junitparser.Failure
    assert good.is_passed
    assert good.name == "σ = 1000"
    (result,) = results_of(tmp_path / "s.sarif")
    assert result["ruleId"] == "spear/exact"
