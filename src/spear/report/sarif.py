"""A report as SARIF 2.1.0, for code scanning: a result for each update that leaks or may, without data.

"Cannot tell" is a result of kind open, all others are of kind fail. Verdicts of "nothing recovered" are
named in the run's properties: GitHub shows a result of kind pass as an alert.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any
from urllib.parse import quote

from spear.inversion import Outcome
from spear.report.cases import Entry, entries, printable
from spear.report.report import Report
from spear.report.threat import OWASP, OWASP_NAME

_SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
_TAXONOMY = "OWASP Machine Learning Security Top 10"
# By outcome: what the rule is called, its level, and the score out of 10 by which code scanning sorts
# (from 9.0 critical, 7.0 high, 4.0 medium): disclosed exactly, in part, recognisably, unknown.
_RULES = {
    Outcome.EXACT: ("UpdateDisclosesAllSamples", "error", "9.0"),
    Outcome.PARTIAL: ("UpdateDisclosesSomeSamples", "error", "8.0"),
    Outcome.APPROXIMATE: ("UpdateDisclosesApproximations", "warning", "6.0"),
    Outcome.INCONCLUSIVE: ("DisclosureUnknown", "warning", "4.0"),
}
_DESCRIPTIONS = {
    Outcome.EXACT: "Every sample visible in the update was recovered exactly.",
    Outcome.PARTIAL: "Some of the samples behind the update were recovered exactly.",
    Outcome.APPROXIMATE: "Samples behind the update were recovered, approximately or without proof.",
    Outcome.INCONCLUSIVE: "It cannot be told what the update gives away.",
}
_AGAIN = "Do what the reason says, and audit the update again."
_MITIGATE = (
    "Whoever receives the update can read the client's data. Larger batches, secure aggregation or "
    "noise on the client's side reduce it: spear audit measures which suffices, and what it costs."
)


def sarif(report: Report) -> str:
    """The report as the text of a SARIF file."""
    found = list(entries(report))
    run = {
        "tool": {"driver": _driver(report)},
        "taxonomies": [_taxonomy()],
        "automationDetails": {"id": f"spear/{quote(printable(report.kind), safe='')}/"},
        "invocations": [{"executionSuccessful": True, **_ended(report)}],
        "results": [_result(report, entry) for entry in found if entry.outcome in _RULES],
        "columnKind": "unicodeCodePoints",
        "properties": {
            "outcome": report.worst and report.worst.value,
            "nothingRecovered": [entry.name for entry in found if entry.outcome not in _RULES],
        },
    }
    return json.dumps({"$schema": _SCHEMA, "version": "2.1.0", "runs": [run]}, indent=1) + "\n"


def rule_id(outcome: Outcome) -> str:
    """The rule that stands for an outcome.

    >>> rule_id(Outcome.EXACT)
    'spear/exact'
    """
    return f"spear/{outcome.value}"


def _driver(report: Report) -> dict[str, Any]:
    version = printable(report.versions.get("spear", ""))
    return {
        "name": "SPEAR",
        "fullName": "SPEAR: what a federated-learning update gives away",
        **({"version": version} if version else {}),
        "supportedTaxonomies": [{"name": _TAXONOMY, "index": 0}],
        "rules": [_rule(outcome) for outcome in _RULES],
    }


def _rule(outcome: Outcome) -> dict[str, Any]:
    name, level, score = _RULES[outcome]
    taxon = {"id": OWASP, "index": 0, "toolComponent": {"name": _TAXONOMY, "index": 0}}
    return {
        "id": rule_id(outcome),
        "name": name,
        "shortDescription": {"text": _DESCRIPTIONS[outcome]},
        "fullDescription": {"text": _DESCRIPTIONS[outcome]},
        "help": {"text": _AGAIN if outcome is Outcome.INCONCLUSIVE else _MITIGATE},
        "defaultConfiguration": {"level": level},
        "relationships": [{"target": taxon, "kinds": ["relevant"]}],
        "properties": {
            "tags": ["security", "privacy", f"OWASP {OWASP}"],
            "security-severity": score,
            "precision": "very-high",
        },
    }


def _taxonomy() -> dict[str, Any]:
    return {
        "name": _TAXONOMY,
        "version": OWASP.partition(":")[2],
        "organization": "OWASP",
        "shortDescription": {"text": "Security risks of machine learning."},
        "taxa": [{"id": OWASP, "name": OWASP_NAME}],
    }


def _ended(report: Report) -> dict[str, str]:
    return {"endTimeUtc": f"{report.created[:19]}Z"} if report.created else {}


def _result(report: Report, entry: Entry) -> dict[str, Any]:
    kind = "open" if entry.outcome is Outcome.INCONCLUSIVE else "fail"
    uri = quote(entry.name, safe="")
    same = hashlib.sha256(f"{report.kind}\0{entry.name}".encode()).hexdigest()
    return {
        "ruleId": rule_id(entry.outcome),
        "ruleIndex": list(_RULES).index(entry.outcome),
        "kind": kind,
        "level": _RULES[entry.outcome][1] if kind == "fail" else "none",
        "message": {"text": entry.words.replace("\n", " ")},
        "locations": [
            {
                "physicalLocation": {
                    "artifactLocation": {"uri": uri},
                    "region": {"startLine": 1},
                },
                "logicalLocations": [{"name": entry.name, "kind": "resource"}],
            }
        ],
        "taxa": [{"id": OWASP, "index": 0, "toolComponent": {"name": _TAXONOMY, "index": 0}}],
        "partialFingerprints": {"spearVerdict/v1": same},
        "properties": _properties(entry),
    }


def _properties(entry: Entry) -> dict[str, Any]:
    """What was counted, and the threat model."""
    found = entry.finding
    if found is None:
        return {"outcome": entry.outcome.value}
    threat = found.threat
    words = {
        name: list(map(printable, value)) if isinstance(value, tuple) else printable(value)
        for name, value in vars(threat).items()
    }
    return {
        "outcome": found.outcome.value,
        "proof": found.proof.value,
        "cause": None if found.cause is None else found.cause.value,
        "batchSize": found.batch_size,
        "recovered": found.recovered,
        "certified": sum(found.certified),
        "rounds": found.rounds,
        "activations": found.activations,
        "threat": words,
    }
