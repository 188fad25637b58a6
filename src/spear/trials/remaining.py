"""How long the trials that are left will take, from those that are done."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Iterable, Sequence

from spear.trials.trial import Row, Trial


class Remaining:
    """An estimate that learns: each cell of a grid has its own mean, for cells differ a hundredfold.

    Args:
        trials: that are to be run.
        before: rows of earlier runs.
    """

    def __init__(self, trials: Sequence[Trial], before: Iterable[Row] = ()) -> None:
        self._open = {trial.key: _cell(trial.settings) for trial in trials}
        self._times: dict[str, list[float]] = {}
        for row in before:
            self._times.setdefault(_cell(row.settings), []).append(row.took)
        self._began, self._work = time.monotonic(), 0.0

    def done(self, row: Row) -> None:
        self._open.pop(row.key, None)
        self._times.setdefault(_cell(row.settings), []).append(row.took)
        self._work += row.took

    def seconds(self) -> float | None:
        """Until the last trial is done; None as long as nothing is known."""
        means = {cell: statistics.fmean(times) for cell, times in self._times.items()}
        if not self._open or not means:
            return 0.0 if not self._open else None
        usual = statistics.fmean(means.values())
        work = sum(means.get(cell, usual) for cell in self._open.values())
        elapsed = max(1e-9, time.monotonic() - self._began)
        return work / max(1.0, self._work / elapsed)  # how many run side by side


def _cell(settings: object) -> str:
    return json.dumps(settings, sort_keys=True)
