"""A report as flat numbers and words, for MLflow or any other tracker of experiments."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from spear.report.cases import entries
from spear.report.report import SEVERITY, Report
from spear.report.threat import OWASP

PREFIX = "spear/"


def metrics(report: Report) -> dict[str, float]:
    """What was counted and measured; what is unknown is left out. Nothing recovered is in it.

    `severity` grows with what the worst verdict means for the client: 0 nothing recovered, 1 cannot
    tell, 2 approximate, 3 partial, 4 exact.
    """
    found = list(entries(report))
    counts = Counter(entry.outcome for entry in found)
    told: dict[str, float | None] = {
        "severity": None if report.worst is None else SEVERITY.index(report.worst),
        "verdicts": len(found),
        **{f"verdicts_{outcome.value}": counts[outcome] for outcome in SEVERITY},
        "seconds": report.seconds,
    }
    findings = [entry.finding for entry in found if entry.finding is not None]
    if findings:
        sizes = [finding.batch_size for finding in findings]
        matches = [finding.match for finding in findings if finding.match is not None]
        told |= {
            "samples": None if None in sizes else sum(size or 0 for size in sizes),
            "samples_recovered": sum(finding.recovered for finding in findings),
            "samples_certified": sum(sum(finding.certified) for finding in findings),
            "attack_seconds": sum(entry.seconds for entry in found),
            "match": min(matches, default=None),
        }
    return {f"{PREFIX}{name}": float(value) for name, value in told.items() if value is not None}


def tags(report: Report) -> Mapping[str, str]:
    """The verdict in words; of several findings, the worst."""
    found = list(entries(report))
    worst = next((entry for entry in found if entry.outcome is report.worst), None)
    told = {"outcome": report.worst and report.worst.value, "headline": report.headline}
    if worst is not None and worst.finding is not None:
        told["reason"] = worst.reason
        told["proof"] = worst.finding.proof.value
        told["cause"] = worst.finding.cause and worst.finding.cause.value
        told["owasp"] = OWASP
        told["told"] = worst.finding.told
    return {f"{PREFIX}{name}": value for name, value in told.items() if value}
