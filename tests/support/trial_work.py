"""Trials for tests, in a module that worker processes can import."""

import hashlib
import os
import signal
import sys
import time
from functools import partial
from pathlib import Path

import torch

from spear import invert, observe
from spear.errors import DataError
from spear.federated import fedsgd
from spear.trials import LocalEngine, Measured, Part, RowFile, Step, Trial
from support.planted import small_batch


def trial(seed, how="attack", **settings):
    return Trial("tiny", {"b": 3 + seed % 3, "how": how, **settings}, seed)


def grid(n, **settings):
    return [trial(seed, **settings) for seed in range(n)]


def node():
    """The id of the Ray node we are on, or nothing."""
    ray = sys.modules.get("ray")
    return ray.get_runtime_context().get_node_id() if ray and ray.is_initialized() else ""


def attack(trial, report):
    """A real inversion of a small batch, known down to its last bit."""
    report(Step(trial.key, f"{os.getpid()} {node()}", 0.5))
    model, x, y = small_batch(b=trial.settings["b"], m=40, seed=trial.seed)
    generator = torch.Generator().manual_seed(trial.seed)
    result = invert(observe(model, fedsgd(model, x, y)), model=model, generator=generator)
    bits = result.inputs.numpy().tobytes()
    metrics = {
        "bits": hashlib.sha256(bits).hexdigest(),
        "match": result.match,
        "threads": torch.get_num_threads(),
    }
    return Measured(result.outcome.name, metrics, 0.1, {"all": 0.1}, {"inputs": bits})


def work(trial, report, folder=None, home=None):
    """An attack, after what `how` says; files in the folder tell the test what happened."""
    how = trial.settings["how"]
    if folder is not None:
        folder = Path(folder)
        (folder / f"pid-{os.getpid()}").touch()
    if how == "meets":  # somebody else is at work at the same time
        (folder / f"at-{node() or os.getpid()}").touch()
        wait_for(lambda: len(list(folder.glob("at-*"))) > 1)
    elif how == "killed once":
        if not (folder / "killed").exists():
            hang(trial, report)
    elif how == "away":  # elsewhere it hangs, at home it waits until elsewhere is gone
        if node() not in ("", home):
            hang(trial, report)
        wait_for((folder / "lost").exists)
    elif how == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    elif how == "raises":
        raise ValueError("no such thing")
    elif how == "no data":
        raise DataError("expected the moon, got nothing: fetch it")
    elif how == "hangs":
        hang(trial, report)
    time.sleep(trial.settings.get("seconds", 0))
    return attack(trial, report)


def hang(trial, report):
    report(Step(trial.key, f"{os.getpid()} {node()}"))
    time.sleep(300)


def wait_for(there, seconds=60):
    until = time.monotonic() + seconds
    while not there():
        assert time.monotonic() < until, "waited in vain"
        time.sleep(0.05)


def squared(x):
    if x < 0:
        raise ValueError(f"expected x >= 0, got {x}")
    return x * x, torch.get_num_threads()


def run(folder, n, workers, more=()):
    """What `spear reproduce` does: the trials that have no row yet, each row on disk at once."""
    part = Part(RowFile(Path(folder), "tiny"), [*more, *grid(n, seconds=0.1)])
    for _ in part.run(partial(work, folder=folder), LocalEngine(workers), lambda step: None):
        pass
