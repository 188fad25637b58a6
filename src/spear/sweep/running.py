"""The sweep: where does leakage start and stop, and what does each defence cost?"""

from __future__ import annotations

import dataclasses
import pickle
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from spear.errors import InvalidOption
from spear.federated import Privacy, resolved
from spear.report import Report
from spear.sweep import utility
from spear.sweep.grid import Grid, default_lists
from spear.sweep.leakage import Leakage
from spear.sweep.plan import UTILITY, Sweep
from spear.sweep.private_data import PrivateData
from spear.sweep.setting import FIELDS, Setting
from spear.sweep.subject import Factory, Subject
from spear.sweep.trial import attacked, metrics
from spear.sweep.utility import Training
from spear.trials import (
    Compared,
    Engine,
    InlineEngine,
    LocalEngine,
    Measured,
    OnStep,
    Trial,
    Work,
    progress_words,
    reporter,
    reraise_interrupts,
)


def work(sweep: Sweep) -> Work:
    """A function that runs any trial of a sweep, in any process."""
    return partial(_measured, subject=sweep.subject, training=sweep.training)


def _measured(trial: Trial, on_step: OnStep, subject: Subject, training: Training) -> Measured:
    own = {name: v for name, v in trial.settings.items() if name in FIELDS}
    tell = reporter(trial, on_step)
    if trial.experiment == UTILITY:
        own.pop("rounds")  # of the training, which are no part of the setting
    setting = Setting(**own)
    if trial.experiment == UTILITY:
        tell("training", None)
        return utility.trained(subject, setting, trial.seed, training)
    found = attacked(
        subject,
        setting,
        trial.seed,
        max_seconds=trial.settings["max_seconds"],
        on_progress=lambda step: tell(*progress_words(step)),
    )
    return found.attacked.measured(metrics(found))


def attacked_again(sweep: Sweep, leakage: Leakage, seed: int) -> Compared:
    """Run one trial again to get the recovered samples, which rows do not keep."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in a trial, for the same bits
    try:
        with reraise_interrupts():
            setting = resolved(leakage.setting, leakage.noise.sigma)
            return attacked(sweep.subject, setting, seed, max_seconds=sweep.max_seconds)
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
        model: "package.module:factory" or a function that returns the model; an MLP unless given.
        data: a file, a dataset's name, "package.module:function", or (inputs, labels); photos unless
            given.
        out: folder for the rows; repeating the call resumes a run that was stopped.
        lists: values by the names of `Setting`, say {"samples": [8, 32], "clip": [None, 1.0]}.
        cross: try all combinations, instead of varying one thing at a time around the first values.
        repeats: private batches per setting.
        seed: seed of the first batch.
        max_seconds: time limit of one attack.
        privacy: what epsilon covers.
        training: how utility is measured; `Training(rounds=0)` leaves it out.
        workers: processes; one per core unless given. 0 runs everything in this process, for notebooks.
        on_step: called with a `Step` as trials make progress.
        subject: passed on to `Subject`: loss, image_format, columns, root, trained_steps, server_lr.
    """
    from spear.sweep.examples import pick_examples
    from spear.sweep.report import sweep_report

    began = time.monotonic()
    if isinstance(data, tuple):
        data = PrivateData.of("the data given", *data, image_format=subject.get("image_format"))
        data = dataclasses.replace(data, columns=tuple(subject.get("columns", ())))
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
    for part in planned.parts(Path(out)):
        for _ in part.run(work(planned), engine, on_step or (lambda _: None)):
            pass
    shown = pick_examples(planned, planned.summary(Path(out)))
    took = time.monotonic() - began
    return sweep_report(planned, Path(out), examples=shown, seconds=took)


def local_engine(workers: int | None, subject: Subject) -> LocalEngine:
    """Worker processes; raises if the model cannot be sent to them."""
    try:
        pickle.dumps(subject)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise InvalidOption(
            f"the model cannot be sent to worker processes ({error}): name it as "
            "package.module:factory, or run everything in this process with workers=0"
        ) from error
    return LocalEngine(workers)
