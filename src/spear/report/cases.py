"""The verdicts of a report one by one, for the formats of pipelines: nothing recovered is in them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from spear.inversion import Outcome
from spear.report.evidence import stages
from spear.report.finding import Finding
from spear.report.report import SEVERITY, Report

# Not allowed in XML, obeyed by terminals, or changing the direction of writing.
_UNPRINTABLE = re.compile(
    "[^\t\n\x20-\x7e\xa0-\u200d\u2010-\u2027\u202f-\u2065\u206a-\ud7ff\ue000-\ufffd"
    "\U00010000-\U0010ffff]"
)


@dataclass(frozen=True)
class Entry:
    """One verdict, without data and without folders."""

    name: str
    outcome: Outcome
    headline: str
    reason: str
    finding: Finding | None
    """Redacted; None for a setting of a sweep, and for a check."""

    @property
    def seconds(self) -> float:
        return sum(value for _, value in stages(self.finding)) if self.finding else 0.0

    @property
    def words(self) -> str:
        """The verdict and its reason."""
        return f"{self.headline}\n{self.reason}" if self.reason else self.headline


def entries(report: Report) -> Iterator[Entry]:
    """The verdicts: one for each setting of a sweep, else one for each finding."""
    redacted = report.redacted()
    for case in redacted.cases:
        yield Entry(printable(case.name), case.outcome, printable(case.words), "", None)
    for found in () if redacted.cases else redacted.findings:
        name, headline, reason = map(printable, (found.name, found.headline, found.reason))
        yield Entry(name, found.outcome, headline, reason, found)


def at_least(outcome: Outcome, limit: Outcome) -> bool:
    """Is it as bad for the client as the limit, or worse?

    >>> at_least(Outcome.PARTIAL, Outcome.INCONCLUSIVE), at_least(Outcome.PARTIAL, Outcome.EXACT)
    (True, False)
    """
    return SEVERITY.index(outcome) >= SEVERITY.index(limit)


def printable(text: str) -> str:
    r"""The text with characters spelled out that XML forbids or terminals obey.

    >>> printable("a\x1b[31m caf\udce9")
    'a\\x1b[31m caf\\udce9'
    """
    return _UNPRINTABLE.sub(lambda found: ascii(found[0])[1:-1], text)
