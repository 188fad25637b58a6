"""What a preflight came to: the verdict, its sentence, and the predictions it rests on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from spear.check import protocol_checks
from spear.check.exposure import Check, Exposure
from spear.check.measured import PastMeasurement
from spear.check.model_structure import LayerView
from spear.check.noise_forecast import NoiseForecast
from spear.check.protocol_checks import Theory
from spear.report import Level, Remark, Report, Table
from spear.tolerances import NOISY


@dataclass(frozen=True)
class Predictions:
    """What theory, earlier measurements and the spectrum say will happen."""

    theory: Theory | None = None
    measured: tuple[PastMeasurement, ...] = ()
    """Rows that are no easier, nearest data first; empty where nothing near was measured."""
    forecast: NoiseForecast | None = None

    def table(self) -> Table:
        rows: list[tuple[str, str, str]] = []
        for row in self.measured:
            seconds = f"{row.median:.2g} s, 9 of 10 within {row.p90:.2g} s"
            rows.append((f"{row.rate} exact", seconds, f"measured: {row.words}, {row.machine}"))
        if self.theory is not None:
            said = f"at most {self.theory.failure:.1g} fail even if exhaustive"
            work = f"{self.theory.submatrices:.1g} submatrices by sampling"
            rows.append((said, work, f"theory: b = {self.theory.b}, m = {self.theory.m}"))
        if self.forecast is not None:
            source = (
                "estimate on made-up inputs" if self.forecast.estimated else "read off the update"
            )
            rows.append((f"samples {self.forecast.words}", "", source))
        return Table("Predictions", ("success", "time or work", "from"), tuple(rows))


@dataclass(frozen=True)
class Preflight:
    """The verdict before any attack, and everything it rests on."""

    verdict: Exposure
    headline: str
    remarks: tuple[Remark, ...]
    layers: Table
    layer: str | None = None
    """The layer that an attack would start with."""
    batch_size: int | None = None
    """Samples behind what the server sees, as far as known."""
    predictions: Predictions = field(default_factory=Predictions)

    def report(
        self, title: str, *, settings: Mapping[str, Any] | None = None, seconds: float | None = None
    ) -> Report:
        """The same as a report to save and to show."""
        predicted = self.predictions.table()
        tables = (predicted, self.layers) if predicted.rows else (self.layers,)
        given = {"verdict": self.verdict.value, "layer": self.layer, "batch_size": self.batch_size}
        return Report.new(
            "check",
            title,
            self.headline,
            remarks=self.remarks,
            tables=tables,
            settings={**given, **(settings or {})},
            seconds=seconds,
        )


def headline(
    verdict: Exposure,
    because: str,
    chosen: LayerView | None,
    rows: int | None,
    predictions: Predictions,
) -> str:
    """The verdict in one sentence."""
    where = ""
    if chosen is not None:
        where = f" from layer {chosen.name!r} ({chosen.inputs} → {chosen.outputs})"
    batch = "the batch" if rows is None else f"a batch of {rows}"
    if rows is None and chosen is not None:
        batch = (
            f"a batch of up to about {max(1, chosen.outputs // protocol_checks.NEURONS_PER_SAMPLE)}"
        )
    if verdict is Exposure.EXPOSED:
        forecast = predictions.forecast
        error = None if forecast is None else forecast.error
        sharp = forecast is None or error is None or forecast.relative < NOISY
        how = "exactly" if sharp else f"to {100 * (error or 0):.1g} % of its size"
        return f"Exposed: {batch} is expected to come back {how}{where}."
    if verdict is Exposure.PARTLY and chosen is None:
        return f"Partly exposed: {because}."
    if verdict is Exposure.PARTLY:
        return f"Partly exposed: {batch} comes back{where}, but {because}."
    if verdict is Exposure.NOT_EXPOSED:
        return f"Not exposed to this attack: {because}. That is no guarantee against others."
    return f"Unknown: {because or 'there is too little to go by'}. Try it with spear audit."


def ordered(checks: list[Check]) -> tuple[Remark, ...]:
    """All remarks: what exposes first, then what is in the way, then what is good to know."""
    remarks = [remark for check in checks for remark in check.remarks]
    levels = (Level.EXPOSED, Level.PROTECTED, Level.NOTE)
    return tuple(sorted(remarks, key=lambda remark: levels.index(remark.level)))
