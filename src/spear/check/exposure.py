"""What one look at a model or a protocol leaves possible, and what all of them come to."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from spear.report import Remark


class Exposure(Enum):
    """Does this attack get through? Never a guarantee against others."""

    EXPOSED = "exposed"
    PARTLY = "partly exposed"
    NOT_EXPOSED = "not exposed"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Check:
    """What one look at the model or the protocol came to."""

    remarks: tuple[Remark, ...] = ()
    limit: Exposure = Exposure.EXPOSED
    """The most that this look leaves possible."""
    because: str = ""
    """The limit's reason as the end of a sentence, for the headline."""


def worst_of(checks: list[Check]) -> tuple[Exposure, str]:
    """The verdict of all checks, and its reason: what stops an attack counts before the unknown."""
    for limit in (Exposure.NOT_EXPOSED, Exposure.UNKNOWN, Exposure.PARTLY):
        for check in checks:
            if check.limit is limit:
                return limit, check.because
    return Exposure.EXPOSED, ""
