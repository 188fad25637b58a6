"""How long the remaining trials will take, estimated from those that are done."""

from __future__ import annotations

import json
import statistics
import time
from collections import Counter
from collections.abc import Iterable, Sequence

from spear.trials.trial import Row, Trial


class Remaining:
    """An estimate that improves as trials finish. Each cell of a grid has its own mean, because cells
    can differ a hundredfold.

    Args:
        trials: the trials to run.
        before: rows of earlier runs.
    """

    def __init__(self, trials: Sequence[Trial], before: Iterable[Row] = ()) -> None:
        self._open = {trial.key: _cell(trial.settings) for trial in trials}
        self._left = Counter(self._open.values())
        self._total: dict[str, float] = {}  # seconds, and of how many trials, by cell
        self._count: Counter[str] = Counter()
        for row in before:
            self._add(row)
        self._began, self._work = time.monotonic(), 0.0

    def _add(self, row: Row) -> None:
        cell = _cell(row.settings)
        self._total[cell] = self._total.get(cell, 0.0) + row.took
        self._count[cell] += 1

    def done(self, row: Row) -> None:
        cell = self._open.pop(row.key, None)
        if cell is not None:
            self._left[cell] -= 1
        self._add(row)
        self._work += row.took

    def seconds(self) -> float | None:
        """Seconds until the last trial is done; None while nothing is known."""
        means = {cell: total / self._count[cell] for cell, total in self._total.items()}
        if not self._open or not means:
            return 0.0 if not self._open else None
        usual = statistics.fmean(means.values())
        work = sum(left * means.get(cell, usual) for cell, left in self._left.items())
        elapsed = max(1e-9, time.monotonic() - self._began)
        return work / max(1.0, self._work / elapsed)  # how many run side by side


def _cell(settings: object) -> str:
    return json.dumps(settings, sort_keys=True)
