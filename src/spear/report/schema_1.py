"""Reports of schema 1: there was no "cannot tell", no cause and no list of assumptions.

There, an update that could not be judged had the flag `judged` set to false, beside its outcome. If
samples came back but nothing was proved, the outcome was FAILED, although the samples may have been
right. Both are INCONCLUSIVE today.
"""

from __future__ import annotations

from typing import Any

from spear.inversion import Outcome
from spear.judge import Cause
from spear.report.report import SEVERITY

SCHEMA = "spear.report/1"
_SEVERITY = tuple(outcome for outcome in SEVERITY if outcome is not Outcome.INCONCLUSIVE)


def converted(content: dict[str, Any]) -> dict[str, Any]:
    """The report in schema 2; raises if its stated outcome contradicts its findings."""
    old = content["findings"]
    if not isinstance(old, list):
        raise TypeError(f"expected a list of findings, got {old!r:.40}")
    overall, stated = content["overall"], content["outcome"]
    worst = max((Outcome(one["outcome"]) for one in old), key=_SEVERITY.index, default=None)
    if overall is None and stated != (worst and worst.value):
        raise ValueError(f"it says the outcome was {stated!r:.40}, its findings say {worst}")
    findings = [_finding(one) for one in old]
    if overall is None and findings:
        outcomes = [Outcome(one["outcome"]) for one in findings]
        stated = max(outcomes, key=SEVERITY.index).value
    return {**content, "findings": findings, "outcome": stated}


def _finding(content: dict[str, Any]) -> dict[str, Any]:
    judged, outcome = content["judged"], content["outcome"]
    if not isinstance(judged, bool):
        raise TypeError(f"expected judged to be true or false, got {judged!r:.40}")
    newer = sorted({"cause", "assumptions"} & set(content))
    if newer:
        raise ValueError(f"unknown fields {', '.join(map(repr, newer))}")
    cause = None
    if not judged:
        outcome = Outcome.INCONCLUSIVE.value
        cause = (Cause.UNFIT if content["stats"] else Cause.NOT_ATTACKED).value
    elif outcome == Outcome.FAILED.value and content["certified"]:
        outcome = Outcome.INCONCLUSIVE.value
    kept = {name: value for name, value in content.items() if name != "judged"}
    return {**kept, "outcome": outcome, "cause": cause, "assumptions": []}
