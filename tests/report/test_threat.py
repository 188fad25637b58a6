"""The threat model of a finding: every one has it, and it says what was measured."""

import dataclasses
import json

import pytest
import torch

import spear
from spear.federated import fedsgd, mlp
from spear.inversion import Outcome
from spear.report import Finding
from support import reports

OUTCOMES = list(Outcome)


@pytest.mark.parametrize("outcome", OUTCOMES, ids=lambda outcome: outcome.name)
def test_every_finding_has_one_in_plain_words(outcome):
    threat = reports.finding(outcome=outcome).threat
    words = [getattr(threat, name) for name in threat.__dataclass_fields__ if name != "assumes"]
    assert all(words)
    assert threat.owasp == "ML03:2023 Model Inversion Attack"
    assert "batch of 4 samples" in threat.data_subjects


def test_likelihood_and_severity_differ_with_what_was_measured():
    threats = [reports.finding(outcome=outcome).threat for outcome in OUTCOMES]
    assert len({threat.likelihood for threat in threats}) == len(OUTCOMES)
    assert len({threat.severity for threat in threats}) == len(OUTCOMES)
    inner = reports.finding(activations=True).threat
    assert "inner layer" in inner.data
    assert "exactly" not in inner.severity
    likely = reports.finding(outcome=Outcome.APPROXIMATE, approximate=(False,) * 4).threat
    assert likely.severity == "Samples, most likely exact."


def test_a_batch_is_as_large_as_it_is_known_to_be_whatever_is_visible_of_it():
    """Of samples that vanished or drown in noise nothing shows; the people are in the batch anyway."""
    few = reports.finding(batch_size=3, protocol={"samples": 8}, true=False)
    assert few.threat.data_subjects == "The people in the client's batch of 8 samples."
    shown = reports.exact().findings[0]
    assert shown.truth is not None
    seen = dataclasses.replace(shown, batch_size=2)
    assert f"batch of {len(shown.truth.names)} samples" in seen.threat.data_subjects


def test_it_says_what_the_server_saw_and_what_was_told():
    net, x = mlp(48, 4, width=60, depth=3, seed=0), torch.randn(4, 48)
    gradients = fedsgd(net, x, torch.arange(4))
    after = {
        name: value - 0.1 * gradients[name].reshape(value.shape)
        for name, value in net.state_dict().items()
    }
    view = spear.observe(net, after=after, lr=0.1, local_steps=1)
    found = Finding.of(spear.invert(view), "client 7")
    threat = found.threat
    assert "the weights after local training that the client sends back" in threat.sees
    assert threat.assumes[0] == "As told: FedAvg, 1 step, lr 0.1"
    assert threat.assumes[1:] == found.assumptions
    assert "and their labels" in threat.data
    assert found.redacted().threat == threat


def test_it_is_in_the_json_and_in_the_page(tmp_path):
    pytest.importorskip("jinja2", reason="needs the cli extra")
    report = reports.exact()
    (found,) = report.findings
    stated = json.loads(report.json())["findings"][0]["threat"]
    assert stated["likelihood"] == found.threat.likelihood
    assert stated["assumes"] == list(found.threat.assumes)
    page = report.page()
    assert "ML03:2023 Model Inversion Attack" in page
    assert found.threat.severity in page


def test_a_report_without_one_loads_and_has_one(tmp_path):
    content = json.loads(reports.exact().json())
    for name in ("threat", "sees", "told"):
        content["findings"][0].pop(name)
    (tmp_path / "report.json").write_text(json.dumps(content), encoding="utf-8")
    threat = spear.load(tmp_path / "report.json").findings[0].threat
    assert threat.sees == "The model it sends out, and the update that the client sends back."
