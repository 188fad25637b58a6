"""The GitHub Action: its shell steps, run as GitHub runs them, and its inputs against the command's."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

yaml = pytest.importorskip("yaml", reason="needs the dev extra")
junitparser = pytest.importorskip("junitparser", reason="needs the dev extra")
safetensors = pytest.importorskip("safetensors.torch", reason="needs the cli extra")
pytest.importorskip("typer", reason="needs the cli extra")
pytestmark = pytest.mark.skipif(os.name == "nt", reason="Windows has no bash of its own")

from spear.cli.options import FAIL_ON
from support.command_line import in_this_process
from support.planted import plant

ROOT = Path(__file__).parents[2]
ACTION = yaml.safe_load((ROOT / "action.yml").read_text(encoding="utf-8"))
EXPRESSION = re.compile(r"\$\{\{ *([\w.-]+) *\}\}")


def run_action(folder, action_path=ROOT, steps=("install", "invert"), **inputs):
    """Exit code, outputs, and what was printed; inputs are written with _ for -."""
    known = {f"inputs.{name}": one.get("default", "") for name, one in ACTION["inputs"].items()}
    given = {f"inputs.{name.replace('_', '-')}": str(value) for name, value in inputs.items()}
    assert given.keys() <= known.keys()
    known.update(given)

    def filled(text):
        return EXPRESSION.sub(lambda found: known.get(found[1], ""), text)

    output, summary = folder / "github-output", folder / "github-summary"
    code, printed = 0, ""
    for step in (one for one in ACTION["runs"]["steps"] if one["id"] in steps):
        output.write_text("")
        own = {name: filled(value) for name, value in step["env"].items()}
        paths = {"GITHUB_OUTPUT": output, "GITHUB_STEP_SUMMARY": summary, "RUNNER_TEMP": folder}
        paths["GITHUB_ACTION_PATH"] = action_path
        (folder / "step.sh").write_text(step["run"])
        done = subprocess.run(
            ["bash", "--noprofile", "--norc", "-eo", "pipefail", folder / "step.sh"],
            env=os.environ | own | {name: str(path) for name, path in paths.items()},
            cwd=folder, capture_output=True, text=True, check=False, timeout=300,
        )  # fmt: skip
        code, printed = done.returncode, printed + done.stdout + done.stderr
        pairs = [line.split("=", 1) for line in output.read_text().splitlines()]
        known.update({f"steps.{step['id']}.outputs.{name}": value for name, value in pairs})
        if code:
            break
    outputs = {name: filled(one["value"]) for name, one in ACTION["outputs"].items()}
    return code, outputs, printed


@pytest.fixture(scope="module")
def update(tmp_path_factory):
    folder = tmp_path_factory.mktemp("an update")
    planted = plant(4, m=60, n=48, depth=3, seed=3)
    zeros = {name: 0 * t for name, t in planted.gradients.items()}
    states = {"w": planted.model.state_dict(), "g": planted.gradients, "zero": zeros}
    for name, tensors in states.items():
        own = {key: t.detach().clone() for key, t in tensors.items()}
        safetensors.save_file(own, folder / f"{name}.safetensors")
    return {"weights": folder / "w.safetensors", "update": folder / "g.safetensors"}


def test_an_update_that_leaks_fails_the_step_and_leaves_its_files(update, tmp_path):
    code, outputs, printed = run_action(
        tmp_path, **update, python=sys.executable, out="my results", arguments="--seed\n7\n-q\n"
    )
    assert code == 1, printed
    assert outputs == {
        "outcome": "exact",
        "sarif": "my results/spear.sarif",
        "junit": "my results/spear.xml",
    }
    (suite,) = junitparser.JUnitXml.fromfile(str(tmp_path / outputs["junit"]))
    assert suite.failures == 1
    found = json.loads((tmp_path / "my results" / "spear.json").read_text("utf-8"))
    assert found["is_redacted"]
    assert found["settings"]["seed"] == 7
    assert json.loads((tmp_path / outputs["sarif"]).read_text("utf-8"))["version"] == "2.1.0"
    summary = (tmp_path / "github-summary").read_text("utf-8")
    assert summary.startswith(
        "### SPEAR: EXACT\n\nAll 4 samples visible in the update were recovered exactly"
    )


def test_an_update_that_gives_nothing_away_passes(update, tmp_path):
    sent = update | {"update": update["update"].with_name("zero.safetensors")}
    code, outputs, printed = run_action(
        tmp_path, **sent, python=sys.executable, fail_on="approximate"
    )
    assert code == 0, printed
    assert outputs["outcome"] in ("failed", "inconclusive")


def test_bad_input_is_an_error_without_an_outcome(update, tmp_path):
    """Also where an earlier run left its files; inputs are words, never commands."""
    (tmp_path / "spear-results").mkdir()
    (tmp_path / "spear-results" / "spear.json").write_text('{"outcome": "failed"}')
    wrong = update | {"update": "$(touch pwned); `touch pwned`.pt"}
    code, outputs, printed = run_action(tmp_path, **wrong, python=sys.executable)
    assert code == 2
    assert outputs == {"outcome": "", "sarif": "", "junit": ""}
    assert "does not exist" in printed
    assert not (tmp_path / "pwned").exists()


def test_without_a_python_it_sets_one_up(tmp_path):
    """The installer itself is what `make` runs; here it says where it was called."""
    (tmp_path / "action" / "tools").mkdir(parents=True)
    tell = "import sys\nprint('installs', sys.argv[1], sys.prefix != sys.base_prefix, sys.prefix)\n"
    (tmp_path / "action" / "tools" / "install.py").write_text(tell)
    code, _, printed = run_action(tmp_path, tmp_path / "action", steps=("install",))
    assert code == 0, printed
    assert f"installs run True {tmp_path / 'spear-python'}" in printed
    told = (tmp_path / "github-output").read_text()
    assert told == f"python={tmp_path / 'spear-python' / 'bin' / 'python'}\n"
    assert (ROOT / "tools" / "install.py").exists()


def test_its_inputs_are_options_of_the_command():
    told = in_this_process("invert", "--help").stdout
    own = {"arguments", "out", "python"}
    assert all(f"--{name}" in told for name in ACTION["inputs"].keys() - own)
    assert set(re.findall(r"\w+", ACTION["inputs"]["fail-on"]["description"])) >= set(FAIL_ON)
    assert ACTION["inputs"]["fail-on"]["default"] in FAIL_ON


def test_no_input_reaches_the_shell_but_as_a_variable():
    for step in ACTION["runs"]["steps"]:
        assert "${{" not in step["run"]
        assert step["shell"] == "bash"
    linter = shutil.which("shellcheck")
    for step in ACTION["runs"]["steps"] if linter else []:
        subprocess.run([linter, "-s", "bash", "-"], input=step["run"], text=True, check=True)
