"""How long the trials that are left will take, from those that are done."""

from __future__ import annotations

import json
import statistics
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from spear.trials.trial import Row, Trial


class Remaining:
    """An estimate that learns: each cell of a grid has its own mean, for cells differ a hundredfold.

    Args:
        trials: that are to be run.
        before: rows of earlier runs.
    """

    def __init__(self, trials: Sequence[Trial], before: Iterable[Row] = ()) -> None:
        self._open = {trial.key: _cell(trial.settings) for trial in trials}
        self._left = Counter(self._open.values())
        self._times: dict[str, _Mean] = {}
        for row in before:
            self._times.setdefault(_cell(row.settings), _Mean()).add(row.took)
        self._began, self._work = time.monotonic(), 0.0

    def done(self, row: Row) -> None:
        cell = self._open.pop(row.key, None)
        if cell is not None:
            self._left[cell] -= 1
        self._times.setdefault(_cell(row.settings), _Mean()).add(row.took)
        self._work += row.took

    def seconds(self) -> float | None:
        """Until the last trial is done; None as long as nothing is known."""
        means = {cell: times.value for cell, times in self._times.items()}
        if not self._open or not means:
            return 0.0 if not self._open else None
        usual = statistics.fmean(means.values())
        work = sum(left * means.get(cell, usual) for cell, left in self._left.items())
        elapsed = max(1e-9, time.monotonic() - self._began)
        return work / max(1.0, self._work / elapsed)  # how many run side by side


@dataclass
class _Mean:
    """Of numbers as they come: thousands of trials ask for it thousands of times."""

    total: float = 0.0
    count: int = 0

    def add(self, value: float) -> None:
        self.total, self.count = self.total + value, self.count + 1

    @property
    def value(self) -> float:
        return self.total / self.count


def _cell(settings: object) -> str:
    return json.dumps(settings, sort_keys=True)
