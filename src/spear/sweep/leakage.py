"""Summary of one setting's rows: how much leaked, how sure that is, and what the setting costs."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from spear.federated import Noise
from spear.inversion import Outcome
from spear.metrics import Rate
from spear.sweep.grid import Axis
from spear.sweep.setting import Setting
from spear.sweep.utility import Utility
from spear.trials import Row, Status

_CAME_BACK = tuple(o.name for o in (Outcome.EXACT, Outcome.PARTIAL, Outcome.APPROXIMATE))


class LeakageLevel(Enum):
    """The worst that happened at a setting, in any of its batches.

    Where no batch leaks, it is what the attack says itself, without the truth: that samples came back
    (blurred, for none is recognisable), that it cannot tell, or that it got nothing.
    """

    EXACT = "whole batches exact"
    SINGLE = "single samples exact"
    RECOGNISABLE = "recognisable"
    BLURRED = "blurred"
    UNDECIDED = "cannot tell"
    NOTHING = "nothing recovered"
    UNMEASURED = "not measured"


@dataclass(frozen=True, eq=False)
class Leakage:
    """One setting, its trials and its training."""

    setting: Setting
    noise: Noise
    rows: tuple[Row, ...]  # one per batch
    utility: Utility | None

    @property
    def done(self) -> list[Row]:
        return [row for row in self.rows if row.status is Status.DONE]

    @property
    def failed(self) -> list[Row]:
        """Trials without a result: an error, or a worker that died."""
        return [row for row in self.rows if row.status is not Status.DONE]

    @property
    def out_of_time(self) -> int:
        """Batches that were not fully recovered when the attack's time ran out."""
        return sum(row.cut_short and not row.metrics["exact"] for row in self.done)

    @property
    def leaked(self) -> Rate:
        """Batches with at least one sample recognisable, exact or certified."""
        return self._rate(lambda m: m["recognised"] or m["recovered"] or m["certified"])

    @property
    def single(self) -> Rate:
        """Batches with at least one exact sample."""
        return self._rate(lambda m: m["recovered"])

    @property
    def exact(self) -> Rate:
        """Batches with every sample exact."""
        return self._rate(lambda m: m["exact"])

    @property
    def undecided(self) -> list[Row]:
        """Batches of which the attack cannot tell what they give away."""
        return [row for row in self.done if row.outcome == Outcome.INCONCLUSIVE.name]

    def share(self, metric: str) -> float | None:
        """The share of all samples that are `metric`: recovered, recognised or certified."""
        total = sum(row.metrics["samples"] for row in self.done)
        return sum(row.metrics[metric] for row in self.done) / total if total else None

    @property
    def certified_wrong(self) -> int:
        return sum(row.metrics["certified_wrong"] for row in self.done)

    @property
    def best(self) -> float | None:
        """PSNR of the best sample in any batch."""
        return max(self._best_of_each(), default=None)

    @property
    def usual_best(self) -> float | None:
        """PSNR of a batch's best sample, median over batches."""
        found = self._best_of_each()
        return statistics.median(found) if found else None

    @property
    def seconds(self) -> float | None:
        """Median duration of the attack."""
        times = [row.seconds for row in self.done if row.seconds is not None]
        return statistics.median(times) if times else None

    @property
    def verdict(self) -> LeakageLevel:
        if not self.done:
            return LeakageLevel.UNMEASURED
        if self.exact.count:
            return LeakageLevel.EXACT
        if self.single.count:
            return LeakageLevel.SINGLE
        if self.leaked.count:
            return LeakageLevel.RECOGNISABLE
        if any(row.outcome in _CAME_BACK for row in self.done):
            return LeakageLevel.BLURRED
        return LeakageLevel.UNDECIDED if self.undecided else LeakageLevel.NOTHING

    def _best_of_each(self) -> list[float]:
        best = [row.metrics["best"] for row in self.done]
        return [value for value in best if value is not None]

    def _rate(self, counts: Any) -> Rate:
        return Rate(sum(bool(counts(row.metrics)) for row in self.done), len(self.done))


def percent(rate: Rate) -> str:
    """
    >>> percent(Rate(0, 5))
    '0 of 5 batches (95 % interval 0-52 %)'
    """
    low, high = rate.interval()
    return (
        f"{rate.count} of {rate.trials} batches (95 % interval {100 * low:.0f}-{100 * high:.0f} %)"
    )


def along(axis: Axis, found: Iterable[Leakage]) -> list[tuple[Any, Leakage]]:
    """An axis' values with what was found there: numbers ascending, noise by its sigma."""
    by_setting = {leakage.setting: leakage for leakage in found}
    points = [(value, by_setting[s]) for value, s in axis.points if s in by_setting]
    if axis.name == "noise":
        return sorted(points, key=lambda point: point[1].noise.sigma)
    if axis.name == "precision":
        return points
    if axis.name == "clip":  # no clipping first, then tighter and tighter
        return sorted(points, key=lambda p: -(p[0] if p[0] is not None else float("inf")))
    return sorted(points, key=lambda point: point[0] or 0)


def named(axis: Axis, value: Any, leakage: Leakage) -> str:
    """A value of an axis in few words."""
    if axis.name == "noise":
        return _noise(leakage)
    if axis.name == "epochs" and not value:
        return "FedSGD"
    if axis.name == "pruned":
        return f"{value:.0%}" if value else "none"
    if value is None:
        return "none"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _noise(leakage: Leakage) -> str:
    """The noise in the unit that it was set in, or z if that is known."""
    noise, epsilon = leakage.noise, leakage.setting.epsilon
    if not noise.sigma:
        return "none"
    if epsilon is not None:
        return f"ε = {epsilon:g}"
    return f"z = {noise.multiplier:.3g}" if noise.multiplier else f"σ = {noise.sigma:.3g}"


def trend(axis: Axis, found: Sequence[Leakage]) -> str:
    """Where leakage starts and stops along an axis, in one sentence."""
    points = along(axis, found)
    runs: list[tuple[LeakageLevel, list[str]]] = []
    for value, leakage in points:
        name = named(axis, value, leakage)
        if runs and runs[-1][0] is leakage.verdict:
            runs[-1][1].append(name)
        else:
            runs.append((leakage.verdict, [name]))
    ordered = axis.name not in ("precision",)
    parts = []
    for i, (verdict, names) in enumerate(runs):
        if len(runs) == 1 and len(names) > 1:
            where = f"at all of {', '.join(names)}"
        elif ordered and i == 0 and len(names) > 1:
            where = f"up to {names[-1]}"
        elif ordered and i == len(runs) - 1 and len(names) > 1:
            where = f"from {names[0]} on"
        else:
            where = f"at {', '.join(names)}"
        parts.append(f"{verdict.value} {where}")
    return "; ".join(parts)
