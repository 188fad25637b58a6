"""What a check came to: the verdict, its sentence, and what it rests on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from spear.check.model_structure import LayerView, ModelStructure
from spear.inversion import Outcome
from spear.report import Case, Level, Remark, Report, Table


class Exposure(Enum):
    """Does this attack succeed? Says nothing about other attacks."""

    EXPOSED = "exposed"
    PARTLY = "partly exposed"
    NOT_EXPOSED = "not exposed"
    UNKNOWN = "unknown"


# How bad each is for the client, in the words of an attacked update.
_OUTCOMES = {
    Exposure.EXPOSED: Outcome.EXACT,
    Exposure.PARTLY: Outcome.PARTIAL,
    Exposure.UNKNOWN: Outcome.INCONCLUSIVE,
    Exposure.NOT_EXPOSED: Outcome.FAILED,
}


@dataclass(frozen=True)
class Preflight:
    """The verdict, and everything it rests on."""

    verdict: Exposure
    headline: str
    remarks: tuple[Remark, ...]
    layers: Table
    layer: str | None = None
    """The layer an attack would start with."""
    batch_size: int | None = None
    """Samples behind what the server sees; None if unknown."""

    def report(
        self, title: str, *, settings: Mapping[str, Any] | None = None, seconds: float | None = None
    ) -> Report:
        """The verdict as a report that can be saved and shown."""
        given = {"verdict": self.verdict.value, "layer": self.layer, "batch_size": self.batch_size}
        return Report.new(
            "check",
            title,
            self.headline,
            remarks=self.remarks,
            tables=(self.layers,),
            settings={**given, **(settings or {})},
            seconds=seconds,
            cases=[Case(title, _OUTCOMES[self.verdict], self.headline)],
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
    remarks: Sequence[Remark | None],
    structure: ModelStructure,
    layer: LayerView | None = None,
) -> Preflight:
    """The verdict in full. `happened` is a sentence without its full stop; a layer's limit
    weakens "exposed" to "partly exposed"."""
    if reached in (Exposure.EXPOSED, Exposure.PARTLY) and layer is not None and layer.limit:
        reached = Exposure.PARTLY
        happened += f", but {layer.limit}"
    levels = (Level.EXPOSED, Level.PROTECTED, Level.NOTE)
    made = sorted(filter(None, remarks), key=lambda remark: levels.index(remark.level))
    name = None if layer is None else layer.name
    return Preflight(
        reached, _WORDS[reached].format(happened), tuple(made), structure.table(), name
    )
