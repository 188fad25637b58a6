"""What a setting costs in training: the same model, trained a little under the same protocol.

A small proxy: few rounds, little data, one learning rate. It shows which
defences ruin training, but not what a tuned run would reach.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from spear.errors import InvalidOption
from spear.federated import send, split
from spear.sweep.setting import Setting
from spear.sweep.subject import Fitted, Subject
from spear.trials import Measured

HELD_OUT = 0.25  # share of the data
_LEAST = 40  # held-out samples: with fewer, a single one changes accuracy by more than 2.5 points
_CHECKS, _LAST = 8, 1 / 3  # accuracy is the mean of 8 evaluations in the last third of training


@dataclass(frozen=True)
class Training:
    """How utility is measured.

    Args:
        rounds: rounds of federated training; 0 skips the measurement.
        seeds: number of runs, each with its own weights, batches and held-out samples.
        max_seconds: time limit of one run; a run that takes longer is not measured.
    """

    rounds: int = 150
    seeds: int = 3
    max_seconds: float = 300.0

    def __post_init__(self) -> None:
        if self.rounds < 0 or self.seeds < 1 or not self.max_seconds > 0:
            raise InvalidOption(
                "expected rounds >= 0, seeds >= 1 and max_seconds > 0, got "
                f"{self.rounds}, {self.seeds} and {self.max_seconds}"
            )


def too_small(count: int, setting: Setting) -> str:
    """Why utility cannot be measured with this many samples; empty if it can."""
    held = int(HELD_OUT * count)
    if held < _LEAST:
        return (
            f"the data has {count} samples, of which {held} could be held out: at least {_LEAST} are "
            "needed to tell accuracies apart"
        )
    if setting.total > count - held:
        return (
            f"{setting.total} samples per round are more than the {count - held} left to train on"
        )
    return ""


def trained(subject: Subject, setting: Setting, seed: int, training: Training) -> Measured:
    """Held-out accuracy (loss if labels are numbers) after training under the setting."""
    began = time.monotonic()
    model = subject.build(setting.width, seed)
    fitted = subject.fitted(model)
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(fitted.data), generator=generator)
    held = int(HELD_OUT * len(order))
    test, rest = order[:held], order[held:]
    looks = _looks(training.rounds)
    found = []
    for number in range(1, training.rounds + 1):
        chosen = rest[torch.randperm(len(rest), generator=generator)[: setting.total]]
        x, y = fitted.inputs[chosen], fitted.targets[chosen]
        noise = torch.Generator().manual_seed(
            seed * 1_000_003 + number
        )  # independent of the batches
        sent = send(model, split(x, y, setting), setting, loss=fitted.loss, generator=noise)
        sent.apply(model, subject.server_lr)
        if number in looks:
            found.append(_quality(model, fitted, test))
        if time.monotonic() - began > training.max_seconds:
            return Measured(
                "TOO SLOW", {"quality": None, "rounds": number}, time.monotonic() - began
            )
    known = [value for value in found if value is not None]
    quality = statistics.fmean(known) if len(known) == len(found) else None
    metrics = {"quality": quality, "rounds": training.rounds}
    return Measured("DIVERGED" if quality is None else "TRAINED", metrics, time.monotonic() - began)


def _looks(rounds: int) -> set[int]:
    first = max(1, round(rounds * (1 - _LAST)))
    return {round(first + (rounds - first) * i / (_CHECKS - 1)) for i in range(_CHECKS)}


def _quality(model: nn.Module, fitted: Fitted, test: Tensor) -> float | None:
    """Accuracy for classes, loss for numbers; None if the loss is not finite."""
    judged = copy.deepcopy(model).eval()
    with torch.no_grad():
        outputs = judged(fitted.inputs[test])
        if fitted.data.classes is None:
            loss = float(fitted.loss(outputs, fitted.targets[test]))
            return loss if loss < float("inf") else None
    guess = fitted.predicted(outputs, len(test))
    return float((guess == fitted.data.labels[test]).double().mean())


@dataclass(frozen=True)
class Utility:
    """Accuracy (or loss) of a setting, and how much worse that is than without defence."""

    quality: float
    spread: float | None  # standard deviation over seeds; None for a single seed
    cost: float | None  # mean over seeds of undefended minus defended; None without a defence
    cost_spread: float | None
    seeds: int


def utility(
    own: Mapping[int, float], plain: Mapping[int, float] | None, *, lower_is_better: bool
) -> Utility | None:
    """Utility from the quality by seed, and that of the same setting without defence, if there is one.

    >>> found = utility({0: 0.5, 1: 0.6}, {0: 0.6, 1: 0.8}, lower_is_better=False)
    >>> round(found.cost, 3), round(found.cost_spread, 3)
    (0.15, 0.071)
    """
    if not own:
        return None
    values = list(own.values())
    sign = -1 if lower_is_better else 1
    paired = [sign * (plain[s] - own[s]) for s in own if s in plain] if plain else []
    return Utility(
        statistics.fmean(values),
        _deviation(values),
        statistics.fmean(paired) if paired else None,
        _deviation(paired),
        len(values),
    )


def _deviation(values: Sequence[float]) -> float | None:
    return statistics.stdev(values) if len(values) > 1 else None
