"""The words of a page: verdicts, proofs, and numbers as people read them."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from spear.inversion import Outcome
from spear.judge import Cause, Proof
from spear.metrics import PERFECT_DB
from spear.report.finding import Finding
from spear.report.report import Cell, Level, Report

NONE = "–"
KINDS = {
    "inversion": "Inversion",
    "audit": "Audit",
    "check": "Check before any attack",
    "flower": "Audit of a Flower run",
    "nvflare": "Audit of an NVFlare job",
    "demo": "Demo",
}
PROOFS = {
    Proof.REPLAY: "by replay: the update was computed again from what was recovered, and matched",
    Proof.PATTERN: "by pattern: every condition that a true sample must meet holds in this layer",
    Proof.NONE: "none",
}
OUTCOMES = {
    Outcome.EXACT: "Recovered exactly",
    Outcome.PARTIAL: "Partly recovered",
    Outcome.APPROXIMATE: "Recovered approximately",
    Outcome.INCONCLUSIVE: "Cannot tell",
    Outcome.FAILED: "Nothing recovered",
}
STAGES = {  # which the code names in one word; others keep their name
    "factorise": "reading the batch size",
    "search": "rest of the search",
    "seek": "looking for samples",
    "settle": "refining candidates",
    "round": "rounding to zeros",
    "vouch": "checking candidates",
    "sample": "drawing submatrices",
    "read": "taking out samples found",
    "repair": "solving again by signs",
    "polish": "refining under noise",
    "refine": "refining all together",
    "select": "choosing the batch",
    "reconstruct": "computing the inputs",
    "certify": "proving the samples",
    "rescale": "finding the scale",
    "optimise": "optimising a guess",
}
COUNTS = {  # "rounds" are what a server sees
    "rounds": "search passes",
    "starts": "starting points",
    "submatrices": "submatrices drawn",
    "programmes": "linear programmes",
    "iterations": "iterations",
    "interrupted": "interruptions",
}
_RECOVERED = (Outcome.EXACT, Outcome.PARTIAL, Outcome.APPROXIMATE)
ASSUMPTIONS = "Assumed, because it cannot be tested:"
_LIKELY = "Recovered, not proved (likely exact)"
_NO_GUARANTEE = (
    "This is no guarantee: one attack failed with these settings. "
    "Another attack, more time or another round may succeed."
)
_MEANINGS = {  # {update} is the one that was attacked, or the worst of several
    Outcome.EXACT: (
        "Whoever receives {update} can read every sample. "
        "For the client, sending an update was sending the data."
    ),
    Outcome.PARTIAL: (
        "Whoever receives {update} can read some of the samples exactly. "
        "The others may fall to more time or a better attack."
    ),
    Outcome.APPROXIMATE: (
        "Whoever receives {update} gets an approximation of the client's samples. "
        "Nothing is proved, but recognisable data may have leaked."
    ),
    Outcome.INCONCLUSIVE: (
        "This says nothing, one way or the other: {update} may give away every sample, or none. "
        "The reason is given below."
    ),
    Outcome.FAILED: f"No client's sample is known to have leaked. {_NO_GUARANTEE}",
}
_ACTIVATIONS = (
    "What came back are inputs of an inner layer, which the layers before it computed from the "
    "client's data. The data can be recovered as far as those layers can be inverted."
)
_UNPROVED = (
    "Whoever receives {update} most likely gets the client's samples: what came back fits, and only "
    "the proof is missing."
)
_MEANINGS_OF_SWEEP = {
    Outcome.EXACT: "At some of these settings, to send an update is to send the data.",
    Outcome.PARTIAL: "At some of these settings single samples can be read exactly.",
    Outcome.APPROXIMATE: "At some of these settings samples come back, recognisable or blurred.",
    Outcome.INCONCLUSIVE: (
        "At none of these settings is a sample known to have leaked, but at some it cannot be told."
    ),
    Outcome.FAILED: f"At none of these settings is a sample known to have leaked. {_NO_GUARANTEE}",
}

_REHEARSED = {  # a check attacks made-up data, and says what clients have to expect
    Outcome.EXACT: ("Exposed", "Clients that train so send their data when they send an update."),
    Outcome.PARTIAL: ("Partly exposed", "Clients that train so give some of their data away."),
    Outcome.APPROXIMATE: ("Partly exposed", "Clients that train so give some of their data away."),
    Outcome.INCONCLUSIVE: ("Cannot tell", "This says nothing, one way or the other."),
    Outcome.FAILED: ("Not exposed to this attack", _NO_GUARANTEE),
}


@dataclass(frozen=True)
class Headline:
    """The first thing a reader sees."""

    tone: str  # a class of the style sheet, and an icon
    name: str
    meaning: str


def outcome_of(finding: Finding) -> str:
    """The outcome for one update, in words."""
    return _LIKELY if finding.is_likely else OUTCOMES[finding.outcome]


def verdict(report: Report) -> Headline:
    """The worst that happened, and what it means for the clients."""
    if report.overall is not None:
        return _of_sweep(report, report.overall)
    if report.outcome is not None:
        return _of_findings(report.outcome, report.findings)
    if report.kind == "check" and report.cases:
        outcome = report.cases[0].outcome
        return Headline(outcome.value, *_REHEARSED[outcome])
    levels = {remark.level for remark in report.remarks}
    if Level.EXPOSED in levels:
        return Headline("partial", "Exposed", "Clients are exposed where it says so below.")
    if Level.PROTECTED in levels:
        return Headline("failed", "No opening found", _NO_GUARANTEE)
    meaning = (
        "These results hold for these settings and this attack; they are no guarantee beyond them."
    )
    return Headline("neutral", "Results", meaning)


def _of_sweep(report: Report, overall: Outcome) -> Headline:
    """Which settings are safe comes first: a sweep is run to find them."""
    measured = [case for case in report.cases if case.measured]
    if not measured:
        return Headline(overall.value, OUTCOMES[overall], _MEANINGS_OF_SWEEP[overall])
    safe = [case.measured.batches for case in measured if case.measured and case.is_safe]
    tone = Outcome.PARTIAL if safe and overall is Outcome.EXACT else overall
    name = f"Safe at {len(safe) or 'none'} of {count(len(measured), 'setting')}"
    if safe:
        name += f", by {count(min(safe), 'batch', 'batches')} each"
    return Headline(tone.value, name, _MEANINGS_OF_SWEEP[overall])


def _of_findings(outcome: Outcome, findings: Sequence[Finding]) -> Headline:
    worst = [finding for finding in findings if finding.outcome is outcome]
    likely = all(finding.is_likely for finding in worst)
    if outcome is Outcome.INCONCLUSIVE and all(f.cause is Cause.INTERRUPTED for f in worst):
        return Headline(outcome.value, "Interrupted", "It was stopped before it could tell.")
    name = _LIKELY if likely else OUTCOMES[outcome]
    if outcome in _RECOVERED and all(finding.activations for finding in worst):
        return Headline(outcome.value, name, _ACTIVATIONS)
    update = "the worst of these updates" if len(findings) > 1 else "this update"
    if len(findings) == 1 and findings[0].rounds > 1:
        update = "the updates of these rounds"
    meaning = _UNPROVED if likely else _MEANINGS[outcome]
    return Headline(outcome.value, name, meaning.format(update=update))


def cell(value: Cell) -> str:
    """A table's cell as text: thousands separated, four digits, yes and no."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return NONE
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}" if abs(value) >= 10_000 else str(value)
    if isinstance(value, float):
        return number(value) if math.isfinite(value) else "∞" if value > 0 else "-∞"
    return value


def number(value: float) -> str:
    """Four digits, in the notation that is shorter.

    >>> number(0.25), number(1234567.0), number(1.72e-8)
    ('0.25', '1.235e+06', '1.72e-08')
    """
    if value and not 1e-4 <= abs(value) < 1e6:
        return f"{value:.4g}"
    whole = len(str(int(abs(value))))
    digits = f"{value:,.{max(0, 4 - whole)}f}" if abs(value) >= 1 else f"{value:.4g}"
    return digits.rstrip("0").rstrip(".") if "." in digits else digits


def is_number(value: object) -> bool:
    """Is it a number that can be sorted?"""
    real = isinstance(value, (int, float)) and not isinstance(value, bool)
    return real and math.isfinite(value)  # type: ignore[arg-type]


def is_endless(value: object) -> bool:
    """Is it infinite, such as ε without noise, or no number at all?"""
    return isinstance(value, float) and not math.isfinite(value)


def numeric_columns(rows: Sequence[Sequence[Cell]], columns: int) -> list[bool]:
    """Which columns hold only numbers, and are aligned to the right."""
    return [
        any(is_number(row[i]) for row in rows)
        and all(row[i] is None or is_number(row[i]) or is_endless(row[i]) for row in rows)
        for i in range(columns)
    ]


def decibel(value: float | None) -> str:
    """A PSNR as text; 400 dB stands for equal bits."""
    if value is None or not math.isfinite(value):
        return NONE
    if abs(value) >= PERFECT_DB:
        return "equal" if value > 0 else "not finite"
    return f"{value:.1f}"


def seconds(value: float) -> str:
    """A duration as text.

    >>> seconds(0.0123), seconds(0.92), seconds(75.2), seconds(7300)
    ('12 ms', '0.92 s', '1 min 15 s', '2 h 1 min')
    """
    if not math.isfinite(value):
        return NONE
    if value < 0.0995:
        return f"{1000 * value:.2g} ms"
    if value < 59.5:
        return f"{value:.2g} s" if value < 9.95 else f"{value:.0f} s"
    minutes, rest = divmod(round(value), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min"


def setting(value: Any) -> str:
    """A setting as it would be typed."""
    if isinstance(value, str):
        return value
    return NONE if value is None else json.dumps(value, ensure_ascii=False, default=str)


def count(amount: int, one: str, many: str | None = None) -> str:
    """An amount with its noun.

    >>> count(1, "sample"), count(20, "sample")
    ('1 sample', '20 samples')
    """
    return f"{amount:,} {one if amount == 1 else many or one + 's'}"
