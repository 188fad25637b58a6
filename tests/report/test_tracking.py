"""Verdicts in trackers: flat numbers and words, in MLflow's own file store, and nothing recovered."""

import dataclasses
import json
import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

pytest.importorskip("matplotlib", reason="needs the plots extra")

from spear.inversion import Outcome
from spear.report import Case, Report
from support import reports

KINDS = reports.every()
SCRIPT = """
import json
import mlflow
import torch
import spear
from spear.federated import fedsgd, mlp

mlflow.set_tracking_uri("file:./runs")
net, x = mlp(48, 4, width=60, depth=3, seed=0), torch.randn(4, 48)
result = spear.invert(spear.observe(net, fedsgd(net, x, torch.arange(4))))
nothing = spear.invert(spear.observe(net, fedsgd(net, 0 * x[:1], torch.zeros(1).long())))
with mlflow.start_run() as run:
    result.log(mlflow.log_metrics, log_tags=mlflow.set_tags, step=1)
    nothing.log(mlflow.log_metrics, step=2)
kept = mlflow.get_run(run.info.run_id).data
history = mlflow.MlflowClient().get_metric_history(run.info.run_id, "spear/samples_certified")
steps = [(one.step, one.value) for one in history]
print(json.dumps([kept.tags, steps]))
"""


def logged(report, **options):
    told = []
    report.log(lambda values, **more: told.append((values, more)), **options)
    return told


@pytest.mark.skipif(find_spec("mlflow") is None, reason="needs the mlflow extra")
def test_mlflow_keeps_them(tmp_path):
    environment = os.environ | {
        "MLFLOW_ALLOW_FILE_STORE": "true",
        "MLFLOW_DISABLE_TELEMETRY": "true",
    }
    command = [sys.executable, "-c", SCRIPT]
    told = subprocess.check_output(command, text=True, cwd=tmp_path, env=environment, timeout=300)
    tags, steps = json.loads(told.splitlines()[-1])
    assert tags["spear/outcome"] == "exact"
    assert tags["spear/owasp"] == "ML03:2023"
    assert steps == [[1, 4.0], [2, 0.0]]


def test_any_function_gets_numbers_and_the_step():
    ((values, more),) = logged(KINDS["flower"], step=3)
    assert more == {"step": 3}
    assert values["spear/severity"] == 4
    assert values["spear/verdicts"] == 10
    assert all(values[f"spear/verdicts_{outcome.value}"] == 2 for outcome in Outcome)
    assert values["spear/samples_certified"] == 2 * 4 + 2 * 2
    assert all(type(value) is float for value in values.values())
    assert logged(KINDS["flower"])[0][1] == {}


@pytest.mark.parametrize("kind", KINDS)
def test_only_numbers_and_words_that_hold_no_data(kind):
    told = {}
    KINDS[kind].log(told.update, log_tags=told.update)
    assert all(isinstance(value, float | str) for value in told.values())
    assert told["spear/headline"] == KINDS[kind].headline
    assert "photo" not in json.dumps(told)


def test_what_is_unknown_is_left_out():
    ((values, _),) = logged(KINDS["failure"])
    assert "spear/samples" not in values
    assert "spear/match" not in values


def test_of_a_sweep_the_settings_count():
    cases = (Case("b = 8", Outcome.EXACT, "All."), Case("b = 80", Outcome.FAILED, "None."))
    swept = dataclasses.replace(KINDS["exact"], cases=cases, overall=Outcome.EXACT)
    ((values, _),) = logged(swept)
    assert (values["spear/verdicts"], values["spear/verdicts_failed"]) == (2, 1)
    assert "spear/samples" not in values  # the findings are examples
    assert "spear/severity" not in logged(Report("check", "", ""))[0][0]
