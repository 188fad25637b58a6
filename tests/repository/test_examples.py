"""The examples run as they stand, and leave what they say."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("typer", reason="needs the cli extra")
pytest.importorskip("skimage", reason="needs the cli extra")

import spear
from spear.inversion import Outcome
from support.command_line import in_this_process

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"


def run(folder, *words):
    return subprocess.run(
        [sys.executable, *map(str, words)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def test_an_update_of_ones_own(tmp_path):
    made = run(tmp_path, EXAMPLES / "own_update.py")
    assert made.returncode == 0, made.stderr
    words = "invert --weights before.safetensors --update grads.safetensors --shape 3x32x32 "
    words += "--mean 0.5 --std 0.25 --truth batch.safetensors --report report.html --json r.json"
    done = in_this_process(*words.split(), cwd=tmp_path)
    assert done.returncode == 20, done.stderr
    finding = spear.load(tmp_path / "r.json").findings[0]
    assert len(finding.truth.psnr) == 16
    assert min(finding.truth.psnr) > 100
    shown = (ROOT / "README.md").read_text(encoding="utf-8")
    for line in (
        "attacking '1' (3072 -> 200, ReLU after)",
        "EXACT: all 16 samples visible in the update were recovered",
    ):
        assert line in done.stdout
        assert line in shown


def test_leakage_against_epsilon(tmp_path):
    pytest.importorskip("opacus", reason="needs the opacus extra")
    options = ["--steps", "1", "--multipliers", "0", "1e-3", "1"]
    done = run(tmp_path, EXAMPLES / "opacus_audit.py", *options)
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr
    report = spear.load(tmp_path / "opacus-audit.json")
    outcomes = [finding.outcome for finding in report.findings]
    assert outcomes == [Outcome.EXACT, Outcome.APPROXIMATE, Outcome.FAILED]
    assert [row[4] for row in report.tables[0].rows] == ["1 of 1", "1 of 1", "0 of 1"]
    assert "From noise multiplier 1 on" in report.headline
    assert (tmp_path / "opacus-audit.html").stat().st_size > 50_000
