"""A report as JUnit XML: one test case for each verdict. It holds nothing that was recovered.

It keeps to what the schemas of Ant and of Jenkins' xUnit plugin have in common: either can read it.
"""

from __future__ import annotations

from collections.abc import Sequence
from xml.etree import ElementTree as ET

from spear.inversion import Outcome
from spear.report.cases import Entry, at_least, entries, printable
from spear.report.report import Report


def junit(report: Report, fail_on: Outcome | None = None) -> str:
    """The report as the text of a JUnit file.

    A test case fails if its outcome is at least as bad for the client as `fail_on`, by default if
    anything was recovered. "Cannot tell" is never a success: it is an error, or skipped if `fail_on`
    tolerates it.
    """
    limit = Outcome.INCONCLUSIVE if fail_on is None else fail_on
    found = list(entries(report))
    root = ET.Element("testsuites")
    suite = ET.SubElement(root, "testsuite", _attributes(report, found))
    properties = ET.SubElement(suite, "properties")
    for name, value in _properties(report, limit).items():
        ET.SubElement(properties, "property", name=name, value=printable(value))
    tags = []
    for entry in found:
        case = ET.SubElement(
            suite,
            "testcase",
            name=entry.name,
            classname=f"spear.{printable(report.kind)}",
            time=f"{entry.seconds:.3f}",
        )
        tag = _tag(entry.outcome, limit)
        tags.append(tag)
        if tag is not None:
            told = {"message": entry.headline, "type": entry.outcome.value}
            ET.SubElement(case, tag, told).text = entry.words
    for name, tag in (("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
        suite.set(name, str(tags.count(tag)))
    said = (f"{entry.name}: {entry.outcome.name}: {entry.words}" for entry in found)
    ET.SubElement(suite, "system-out").text = "\n".join([printable(report.headline), *said])
    ET.SubElement(suite, "system-err").text = ""
    ET.indent(root)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ET.tostring(root, encoding="unicode") + "\n"


def _tag(outcome: Outcome, limit: Outcome) -> str | None:
    """What a test case holds; None for one that passes."""
    if not at_least(outcome, limit):
        return "skipped" if outcome is Outcome.INCONCLUSIVE else None
    return "error" if outcome is Outcome.INCONCLUSIVE else "failure"


def _attributes(report: Report, found: Sequence[Entry]) -> dict[str, str]:
    seconds = sum(entry.seconds for entry in found) if report.seconds is None else report.seconds
    return {
        "name": f"spear {printable(report.kind)}",
        "package": "spear",
        "id": "0",
        "hostname": "localhost",  # a machine's name is nobody's business
        "timestamp": report.created[:19],  # Ant's schema has no time zone: UTC
        "tests": str(len(found)),
        "time": f"{seconds:.3f}",
    }


def _properties(report: Report, limit: Outcome) -> dict[str, str]:
    threats = {finding.threat.owasp for finding in report.findings}
    told = {"outcome": report.worst.value} if report.worst else {}
    versions = {f"made-by.{name}": value for name, value in report.versions.items()}
    owasp = {"owasp": ", ".join(sorted(threats))} if threats else {}
    return {**told, "fail-on": limit.value, **owasp, **versions}
