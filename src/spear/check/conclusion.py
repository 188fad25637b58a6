"""What a check came to: the verdict, its sentence, and what it rests on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from spear.report import Level, Remark, Report, Table


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
    """The most that this look leaves possible: a layer behind convolutions gives no data away."""
    because: str = ""
    """The limit's reason, as the end of a sentence."""

    @staticmethod
    def of(
        level: Level,
        subject: str,
        words: str,
        limit: Exposure = Exposure.EXPOSED,
        because: str = "",
    ) -> Check:
        """A check with one remark."""
        return Check((Remark(level, subject, words),), limit, because)


@dataclass(frozen=True)
class Preflight:
    """The verdict, and everything it rests on."""

    verdict: Exposure
    headline: str
    remarks: tuple[Remark, ...]
    layers: Table
    layer: str | None = None
    """The layer that an attack would start with."""
    batch_size: int | None = None
    """Samples behind what the server sees, as far as known."""

    def report(
        self, title: str, *, settings: Mapping[str, Any] | None = None, seconds: float | None = None
    ) -> Report:
        """The same as a report to save and to show."""
        given = {"verdict": self.verdict.value, "layer": self.layer, "batch_size": self.batch_size}
        return Report.new(
            "check",
            title,
            self.headline,
            remarks=self.remarks,
            tables=(self.layers,),
            settings={**given, **(settings or {})},
            seconds=seconds,
        )


_WORDS = {
    Exposure.EXPOSED: "Exposed: {}.",
    Exposure.PARTLY: "Partly exposed: {}.",
    Exposure.UNKNOWN: "Unknown: {}.",
    Exposure.NOT_EXPOSED: "Not exposed to this attack: {}. That is no guarantee against others.",
}


def concluded(
    reached: Exposure,
    happened: str,
    checks: Sequence[Check],
    layers: Table,
    layer: str | None = None,
) -> Preflight:
    """The verdict of what happened, a sentence without its end, within the limits of the checks."""
    limits = [check for check in checks if check.limit is Exposure.PARTLY]
    if reached in (Exposure.EXPOSED, Exposure.PARTLY) and limits:
        reached = Exposure.PARTLY
        happened += f", but {limits[0].because}"
    remarks = [remark for check in checks for remark in check.remarks]
    levels = (Level.EXPOSED, Level.PROTECTED, Level.NOTE)
    ordered = tuple(sorted(remarks, key=lambda remark: levels.index(remark.level)))
    return Preflight(reached, _WORDS[reached].format(happened), ordered, layers, layer)
