"""Reports as SARIF, against the schema of OASIS: one result a verdict, and nothing recovered in it."""

import dataclasses
import json
from pathlib import Path

import pytest

jsonschema = pytest.importorskip("jsonschema", reason="needs the dev extra")
pytest.importorskip("matplotlib", reason="needs the plots extra")

from spear.inversion import Outcome
from spear.report import Case, Report, pictures
from spear.report.sarif import sarif
from support import reports

SCHEMA = Path(__file__).parents[1] / "support" / "schemas" / "sarif-2.1.0.json"
KINDS = reports.every()


@pytest.fixture(scope="module")
def validator():
    return jsonschema.Draft4Validator(
        json.loads(SCHEMA.read_text("utf-8")), format_checker=jsonschema.FormatChecker()
    )


def run_of(report, validator):
    content = json.loads(sarif(report))
    validator.validate(content)
    (run,) = content["runs"]
    return run


def test_the_schema_refuses_what_is_not_sarif(validator):
    content = json.loads(sarif(KINDS["exact"]))
    content["runs"][0]["results"][0]["level"] = "fatal"
    assert not validator.is_valid(content)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_keeps_to_the_schema(kind, validator):
    run = run_of(KINDS[kind], validator)
    every = KINDS[kind].findings
    findings = [found for found in every if found.outcome is not Outcome.FAILED]
    clean = [found.name for found in every if found.outcome is Outcome.FAILED]
    assert run["properties"]["nothingRecovered"] == clean
    assert [one["ruleId"] for one in run["results"]] == [
        f"spear/{found.outcome.value}" for found in findings
    ]
    for result, found in zip(run["results"], findings, strict=True):
        rule = run["tool"]["driver"]["rules"][result["ruleIndex"]]
        assert rule["id"] == result["ruleId"]
        assert found.headline in result["message"]["text"]
        assert result["properties"]["threat"]["owasp"].startswith("ML03:2023")
        assert result["locations"][0]["physicalLocation"]["artifactLocation"]["uri"]
    taxon = run["taxonomies"][0]["taxa"][0]
    assert taxon["id"] == "ML03:2023"


def test_only_what_leaks_or_may_is_a_result(validator):
    expected = {
        "EXACT": ("fail", "error"),
        "PARTIAL": ("fail", "error"),
        "APPROXIMATE": ("fail", "warning"),
        "INCONCLUSIVE": ("open", "none"),
    }
    for outcome in Outcome:
        report = Report("inversion", "", "", (reports.finding(outcome=outcome),))
        results = run_of(report, validator)["results"]
        kinds = [(result["kind"], result["level"]) for result in results]
        assert kinds == ([expected[outcome.name]] if outcome.name in expected else [])


def test_a_verdict_keeps_its_fingerprint_when_its_outcome_changes(validator):
    prints = set()
    for outcome in (Outcome.EXACT, Outcome.INCONCLUSIVE):
        report = Report("inversion", "", "", (reports.finding(outcome=outcome),))
        prints.add(json.dumps(run_of(report, validator)["results"][0]["partialFingerprints"]))
    assert len(prints) == 1


def test_settings_of_a_sweep_are_results(validator):
    cases = (Case("base: b = 8", Outcome.EXACT, "All."), Case("σ = 1", Outcome.FAILED, "None."))
    report = dataclasses.replace(KINDS["audit"], cases=cases, overall=Outcome.EXACT)
    run = run_of(report, validator)
    (result,) = run["results"]
    assert result["locations"][0]["logicalLocations"][0]["name"] == "base: b = 8"
    assert run["properties"] == {"outcome": "exact", "nothingRecovered": ["σ = 1"]}


def test_nothing_that_was_recovered_is_in_it(validator):
    found = reports.finding(3, 4, name="/srv/ward 7/ann\udce9.pt")
    found = dataclasses.replace(
        found,
        labels=found.labels + 98765,
        reason="see /srv/ward/ann.pt",
        notes=("of /srv/ward",),
        truth=dataclasses.replace(found.truth, names=("SECRET",) * 4),
    )
    report = Report("inversion", "t", "h", (found,), settings={"command": "SECRET"})
    run_of(report, validator)
    text = sarif(report)
    uris = [pictures.data_uri(image) for image in found.image_format.pictures(found.inputs)]
    values = [f"{value:.4g}" for value in found.inputs[:, 0].tolist()]
    for word in (*uris, *values, "9876", "SECRET", "srv", "base64"):
        assert word not in text
