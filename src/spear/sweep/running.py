"""The sweep: where does leakage start and stop, and what does each defence cost?"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from spear.errors import InvalidOption
from spear.federated import Privacy, resolved
from spear.report import Report
from spear.search import Progress
from spear.sweep import trial as attack_trial
from spear.sweep import utility
from spear.sweep.grid import Grid, default_lists
from spear.sweep.leakage import Leakage
from spear.sweep.plan import UTILITY, Sweep
from spear.sweep.private_data import PrivateData
from spear.sweep.setting import FIELDS, Setting
from spear.sweep.subject import Factory, Subject
from spear.sweep.utility import Training
from spear.trials import (
    Engine,
    InlineEngine,
    LocalEngine,
    Measured,
    OnStep,
    Row,
    RowFile,
    Step,
    Trial,
    reraise_interrupts,
)

_BETWEEN = 0.2  # seconds between two words on how far a trial is


def run_trials(
    sweep: Sweep,
    trials: Sequence[Trial],
    out: Path,
    engine: Engine,
    on_step: OnStep,
    *,
    again: bool = False,
) -> Iterator[Row]:
    """Run trials of one kind; each row is on disk before it is told of."""
    if not trials:
        return
    work = partial(measured, subject=sweep.subject, training=sweep.training)
    with RowFile(out, trials[0].experiment).writing() as file:
        left = pending_trials(
            trials, out, again=again
        )  # another run may have had the lock before us
        for row, pictures in engine.run(left, work, on_step):
            file.append(row, pictures)
            yield row


def pending_trials(trials: Sequence[Trial], out: Path, *, again: bool = False) -> list[Trial]:
    """Those without a row, and those that failed or ran out of time if wanted `again`."""
    if not trials:
        return []
    rows = RowFile(out, trials[0].experiment).rows()
    done = {key for key, row in rows.items() if not (again and row.cut_short)}
    return [trial for trial in trials if trial.key not in done]


def measured(trial: Trial, report: OnStep, subject: Subject, training: Training) -> Measured:
    """One trial, wherever we are."""
    setting = Setting(**{name: v for name, v in trial.settings.items() if name in FIELDS})
    if trial.experiment == UTILITY:
        report(Step(trial.key, "training"))
        return utility.trained(subject, setting, trial.seed, training)
    tell = _thinned(lambda words, share: report(Step(trial.key, words, share)))
    limit = trial.settings["max_seconds"]
    attacked = attack_trial.attack(
        subject, setting, trial.seed, max_seconds=limit, on_progress=tell
    )
    return attack_trial.measured(attacked, setting)


def _thinned(tell: Callable[[str, float | None], None]) -> Callable[[Progress], None]:
    last = -1.0

    def thinned(step: Progress) -> None:
        nonlocal last
        if time.monotonic() - last > _BETWEEN:
            last = time.monotonic()
            known = step.batch_size and step.found
            share = step.found / step.batch_size if known and step.batch_size else None
            tell(f"{step.stage}: {step.found} of {step.batch_size}" if known else step.stage, share)

    return thinned


def attacked_again(sweep: Sweep, leakage: Leakage, seed: int) -> attack_trial.Attacked:
    """One of its trials once more, with what came back: rows keep no samples."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in a trial, for the same bits
    try:
        with reraise_interrupts():
            return attack_trial.attack(
                sweep.subject,
                resolved(leakage.setting, leakage.noise.sigma),
                seed,
                max_seconds=sweep.max_seconds,
            )
    finally:
        torch.set_num_threads(threads)


def sweep(
    model: str | Factory | None = None,
    data: str | PrivateData | tuple[Any, Any] | None = None,
    *,
    out: str | Path,
    lists: Mapping[str, Sequence[Any]] | None = None,
    cross: bool = False,
    repeats: int = 5,
    seed: int = 0,
    max_seconds: float = 60.0,
    privacy: Privacy | None = None,
    training: Training | None = None,
    workers: int | None = None,
    on_step: OnStep | None = None,
    **subject: Any,
) -> Report:
    """Audit a model and its data under many settings, and report where leakage starts and stops.

    Args:
        model: "package.module:factory" or a function that gives the model; an MLP unless given.
        data: a file, a dataset's name, "package.module:function", or (inputs, labels); photos unless
            given.
        out: folder of the rows: the same call goes on where it was stopped.
        lists: values by the names of `Setting`, say {"samples": [8, 32], "clip": [None, 1.0]}.
        cross: all combinations of them, instead of one thing at a time around the first values.
        repeats: private batches at each setting.
        seed: of the first.
        max_seconds: of one attack.
        privacy: what epsilon is counted for.
        training: how utility is measured; `Training(rounds=0)` leaves it out.
        workers: processes; one per core unless given. 0 runs everything here, as in a notebook.
        on_step: called with a `Step` as trials go on.
        subject: of `Subject`: loss, image_format, root, trained_steps, server_lr.
    """
    from spear.sweep.examples import pick_examples
    from spear.sweep.report import sweep_report

    began = time.monotonic()
    if isinstance(data, tuple):
        data = PrivateData.of("the data given", *data, image_format=subject.get("image_format"))
    audited = Subject(model, data, **subject)
    chosen = default_lists(len(audited.samples())) if lists is None else lists
    planned = Sweep(
        audited,
        Grid(chosen, cross),
        repeats,
        seed,
        max_seconds,
        privacy or Privacy(),
        training or Training(),
    )
    planned.check()
    engine: Engine = InlineEngine() if workers == 0 else local_engine(workers, audited)
    for trials in (planned.trials(), planned.trainings()):
        left = pending_trials(trials, Path(out))
        for _ in run_trials(planned, left, Path(out), engine, on_step or (lambda _: None)):
            pass
    shown = pick_examples(planned, planned.summary(Path(out)))
    took = time.monotonic() - began
    return sweep_report(planned, Path(out), examples=shown, seconds=took)


def local_engine(workers: int | None, subject: Subject) -> LocalEngine:
    """Worker processes; raises if they could not be given the model."""
    try:
        pickle.dumps(subject)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise InvalidOption(
            f"worker processes cannot be given the model ({error}): name it as package.module:factory, "
            "or run everything here with workers=0"
        ) from error
    return LocalEngine(**({"workers": workers} if workers else {}))
