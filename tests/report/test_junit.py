"""Reports as JUnit XML, read by junitparser: one test case a verdict, and nothing recovered in it."""

import dataclasses
import re
from xml.etree import ElementTree

import pytest

junitparser = pytest.importorskip("junitparser", reason="needs the dev extra")
pytest.importorskip("matplotlib", reason="needs the plots extra")

from spear.inversion import Outcome
from spear.report import Case, Report, pictures
from spear.report.junit import junit
from support import reports

KINDS = reports.every()
# What a test case holds, by --fail-on; the columns are the outcomes from mild to bad.
COLUMNS = ("FAILED", "INCONCLUSIVE", "APPROXIMATE", "PARTIAL", "EXACT")
TAGS = {
    None: (None, "Error", "Failure", "Failure", "Failure"),
    "INCONCLUSIVE": (None, "Error", "Failure", "Failure", "Failure"),
    "APPROXIMATE": (None, "Skipped", "Failure", "Failure", "Failure"),
    "PARTIAL": (None, "Skipped", None, "Failure", "Failure"),
    "EXACT": (None, "Skipped", None, None, "Failure"),
}


def read(report, fail_on=None):
    """The one suite of the file, and its cases."""
    (suite,) = junitparser.JUnitXml.fromstring(junit(report, fail_on).encode())
    return suite, list(suite)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_read_and_counts_right(kind):
    report = KINDS[kind]
    suite, cases = read(report)
    assert suite.tests == len(cases) == len(report.findings)
    assert [case.name for case in cases] == [found.name for found in report.findings]
    held = [type(result).__name__ for case in cases for result in case.result]
    assert (suite.failures, suite.errors, suite.skipped) == tuple(
        held.count(name) for name in ("Failure", "Error", "Skipped")
    )
    assert "Failure" in held or not {Outcome.EXACT, Outcome.PARTIAL} & {report.outcome}


@pytest.mark.parametrize("fail_on", TAGS)
def test_what_fails_depends_on_the_limit_and_cannot_tell_never_passes(fail_on):
    for name, tag in zip(COLUMNS, TAGS[fail_on], strict=True):
        found = reports.finding(outcome=Outcome[name])
        limit = None if fail_on is None else Outcome[fail_on]
        _, (case,) = read(Report("inversion", "", "", (found,)), limit)
        assert [type(result).__name__ for result in case.result] == [tag] * (tag is not None)
        for result in case.result:
            assert (result.message, result.type) == (found.headline, found.outcome.value)
            assert found.reason in result.text


def test_settings_of_a_sweep_are_cases():
    cases = (Case("base: b = 8", Outcome.EXACT, "All."), Case("C = 1", Outcome.FAILED, "None."))
    report = dataclasses.replace(KINDS["audit"], cases=cases, overall=Outcome.EXACT)
    suite, (bad, good) = read(report)
    assert (suite.tests, suite.failures, suite.errors) == (2, 1, 0)
    assert (bad.name, good.name) == ("base: b = 8", "C = 1")
    assert bad.result
    assert good.is_passed
    assert report.worst is Outcome.EXACT


def test_nothing_that_was_recovered_is_in_it():
    found = reports.finding(3, 4, name="/srv/ward 7/ann.pt")
    found = dataclasses.replace(
        found,
        labels=found.labels + 98765,
        reason="see /srv/ward/ann.pt",
        truth=dataclasses.replace(found.truth, names=("SECRET",) * 4),
    )
    text = junit(Report("inversion", "t", "h", (found,), settings={"command": "SECRET"}))
    uris = [pictures.data_uri(image) for image in found.image_format.pictures(found.inputs)]
    values = [f"{value:.4g}" for value in found.inputs[:, 0].tolist()]
    for word in (*uris, *values, "98765", "9876", "SECRET", "/srv", "base64"):
        assert word not in text


def test_characters_that_xml_forbids_are_spelled_out():
    found = reports.finding(name="a\x1b[31m\x00]]>&<b>\u202e caf\udce9\ufffe", true=False)
    _, (case,) = read(Report("inversion", "", "", (found,)))
    assert case.name == r"a\x1b[31m\x00]]>&<b>\u202e caf\udce9\ufffe"


def test_the_file_is_its_owners(tmp_path):
    KINDS["exact"].save_junit(tmp_path / "new" / "spear.xml")
    assert (tmp_path / "new" / "spear.xml").stat().st_mode & 0o777 == 0o600


def test_it_has_what_the_schemas_of_ant_and_jenkins_ask_for():
    """Validated against both by hand; here their required parts, in Ant's order."""
    (suite,) = ElementTree.fromstring(junit(KINDS["flower"]))
    required = {"name", "package", "id", "hostname", "timestamp", "tests", "failures", "errors"}
    assert set(suite.attrib) == required | {"time", "skipped"}
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d", suite.get("timestamp"))
    parts = [part.tag for part in suite]
    assert parts == ["properties", *["testcase"] * 10, "system-out", "system-err"]
    assert all(set(case.attrib) == {"name", "classname", "time"} for case in suite[1:-2])
    assert all(len(case) <= 1 for case in suite[1:-2])
