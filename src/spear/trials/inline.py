"""Trials in this very process: for notebooks, whose functions no worker could import, and for tests."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from spear.trials.interrupts import heard
from spear.trials.trial import Report, Row, Trial, Work, measure


class InlineEngine:
    """One trial after another, here, on one thread as a worker would."""

    def run(
        self, trials: Sequence[Trial], work: Work, on_step: Report
    ) -> Iterator[tuple[Row, Mapping[str, bytes]]]:
        """Rows with their pictures, in the order of the trials."""
        import torch

        threads = torch.get_num_threads()
        for trial in trials:
            torch.set_num_threads(1)
            try:
                with heard():
                    done = measure(trial, work, on_step, "inline")
            finally:
                torch.set_num_threads(threads)
            yield done
