"""What one look at a model or a protocol leaves possible, and what all of them come to."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from spear.report import Remark


class Verdict(Enum):
    """Does this attack get through? Never a guarantee against others."""

    EXPOSED = "exposed"
    PARTLY = "partly exposed"
    NOT_EXPOSED = "not exposed"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Check:
    """What one look at the model or the protocol came to."""

    remarks: tuple[Remark, ...] = ()
    limit: Verdict = Verdict.EXPOSED
    """The most that this look leaves possible."""
    because: str = ""
    """The limit's reason as the end of a sentence, for the headline."""


def worst_of(checks: list[Check]) -> tuple[Verdict, str]:
    """The verdict of all checks, and its reason: what stops an attack counts before the unknown."""
    for limit in (Verdict.NOT_EXPOSED, Verdict.UNKNOWN, Verdict.PARTLY):
        for check in checks:
            if check.limit is limit:
                return limit, check.because
    return Verdict.EXPOSED, ""
