"""Rival attacks on the same batches, given what their authors assume: labels, shape and range."""

from __future__ import annotations

import time
from typing import Any

import torch

from spear.baselines import (
    Attack,
    CocktailPartyAttack,
    GeipingAttack,
    load_attack,
    pixel_bounds,
)
from spear.errors import InvalidExtension
from spear.experiments.common.experiment import Case
from spear.inversion import Inversion, Outcome
from spear.search import Progress
from spear.trials import Attacked, Batch, Measured, compare, quality

_START = 10**6  # added to a batch's seed, so that the start does not share the weights' random bits

# By the names that settings use.
RIVALS: dict[str, type[GeipingAttack] | type[CocktailPartyAttack]] = {
    "geiping": GeipingAttack,
    "cocktail": CocktailPartyAttack,
}


def rival(case: Case, name: str) -> Attack:
    """The attack with the settings `iterations` and `total_variation`."""
    return RIVALS[name](iterations=case["iterations"], total_variation=case["total_variation"])


def known(batch: Batch) -> dict[str, Any]:
    """What a rival is told about the images."""
    shown = batch.image_format
    assert shown is not None
    bounds = pixel_bounds(shown.mean, shown.std)
    return {"model": batch.model, "shape": shown.shape, "bounds": bounds}


def started(case: Case) -> dict[str, Any]:
    """The generator for a rival's start, and the callback for its progress."""
    generator = torch.Generator().manual_seed(case.seed + _START)
    return {"generator": generator, "on_progress": lambda step: case.report(*_words(step))}


def _words(step: Progress) -> tuple[str, float | None]:
    if not step.expected or not step.done:
        return step.stage, None
    return f"{step.stage}: {step.done:,} of {step.expected:,}", step.done / step.expected


def guess(case: Case, batch: Batch, name: str) -> Attacked:
    """Run a rival on a FedSGD update for all its iterations, however long they take."""
    view = batch.view()
    began = time.monotonic()
    result = rival(case, name).invert(view, labels=batch.labels, **known(batch), **started(case))
    return Attacked(view, result, time.monotonic() - began)


def guessed(case: Case, batch: Batch, name: str) -> Measured:
    """A rival's trial. It proves nothing, so its row holds no verdicts."""
    found = guess(case, batch, name)
    return found.measured(rated(batch, found))


def attacked(case: Case, batch: Batch) -> Measured:
    """The attack that the setting `attack` names, with its own defaults, within `max_seconds`."""
    attack = case.attack or load_attack(case["attack"])
    view, limit = batch.view(), case["max_seconds"]
    began = time.monotonic()
    result = attack.invert(
        view, labels=batch.labels, max_seconds=limit, **known(batch), **started(case)
    )
    seconds = time.monotonic() - began
    wrong = _wrong(result, view.inputs)
    if wrong:
        raise InvalidExtension(f"the attack {case['attack']}: {wrong}")
    found = Attacked(view, result, seconds)
    return found.measured(rated(batch, found))


def _wrong(result: Any, inputs: int) -> str:
    """What is wrong with an attack's result, in words."""
    if not isinstance(result, Inversion):
        return f"invert returned a {type(result).__name__}, expected a spear.Inversion"
    if result.inputs.ndim != 2 or result.inputs.shape[1] != inputs:
        return f"expected inputs (k, {inputs}), got {tuple(result.inputs.shape)}"
    if not bool(result.inputs.isfinite().all()):
        return "expected finite inputs, got NaN or infinity"
    if bool(result.certified.any()) or result.outcome in {Outcome.EXACT, Outcome.PARTIAL}:
        return (
            "expected nothing certified and outcome APPROXIMATE or FAILED: an attack proves nothing"
        )
    return ""


def rated(batch: Batch, found: Attacked) -> dict[str, Any]:
    """A guess compared with the truth, as a row's metrics."""
    score = compare(batch, found).score
    loss = found.result.stats.get("loss")
    return {"exact": score.exact, **quality(score), **found.counts, "loss": loss}
