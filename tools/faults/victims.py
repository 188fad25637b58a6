"""Runs that are there to be killed: real inversions, rows and pictures on a real disk.

`python tools/faults/victims.py local FOLDER` runs the trials on two worker processes, `ray` on a Ray
cluster of its own, `inline` here. The same command goes on where it was stopped.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable
from pathlib import Path

import torch

import spear
from spear.federated import fedsgd, mlp
from spear.report import Report, Table
from spear.trials import Engine, LocalEngine, Measured, RowFile, Step, Trial
from spear.trials.inline import InlineEngine

EXPERIMENT = "fault"
TRIALS = 4


def trials(experiment: str = EXPERIMENT, count: int = TRIALS) -> list[Trial]:
    return [Trial(experiment, {"b": 2 + seed % 2, "m": 24}, seed) for seed in range(count)]


def work(trial: Trial, report: Callable[[Step], None]) -> Measured:
    """A real inversion, known down to its last bit, with its bits as a picture."""
    report(Step(trial.key, "attacking"))
    generator = torch.Generator().manual_seed(trial.seed)
    b, m = trial.settings["b"], trial.settings["m"]
    model = mlp(12, 4, width=m, depth=2, seed=trial.seed)
    x, y = torch.randn(b, 12, generator=generator), torch.randint(4, (b,), generator=generator)
    result = spear.invert(spear.observe(model, fedsgd(model, x, y)), model=model)
    bits = result.inputs.numpy().tobytes()
    metrics = {"bits": hashlib.sha256(bits).hexdigest(), "match": result.match}
    return Measured(result.outcome.name, metrics, 0.0, {}, {"inputs": bits})


def run(
    folder: Path,
    engine: Engine | None = None,
    done: Callable[[str], None] = lambda key: None,
    experiment: str = EXPERIMENT,
) -> None:
    """What `spear reproduce` and `spear audit` do: trials without a row, each row on disk at once."""
    file = RowFile(folder, experiment)
    with file.writing():
        there = file.rows()
        left = [trial for trial in trials(experiment) if trial.key not in there]
        for row, pictures in (engine or InlineEngine()).run(left, work, lambda step: None):
            file.append(row, pictures)
            done(row.key)


def save(folder: Path, done: Callable[[str], None] = lambda name: None) -> None:
    """A report, again and again, as an audit of a federation writes it."""
    for version in range(4):
        rows = tuple((i, "x" * 200) for i in range(200))
        made = Report.new(
            "audit", f"version {version}", "So far.", tables=[Table("t", ("a", "b"), rows)]
        )
        made.save(folder / "report.json")
        made.save_page(folder / "report.html")
        done(str(version))


def _engine(name: str) -> Engine:
    if name == "ray":
        from spear.integrations.ray import RayEngine

        return RayEngine(workers=2)
    return LocalEngine(2) if name == "local" else InlineEngine()


if __name__ == "__main__":
    torch.set_num_threads(1)
    run(Path(sys.argv[2]), _engine(sys.argv[1]), lambda key: print(key, flush=True))
