"""Compare an inversion with the truth, and check what it must leave alone."""

from __future__ import annotations

import random

import numpy as np
import torch
from torch import Tensor, nn

import spear
from spear import Outcome


def bits(result: spear.Inversion) -> tuple[object, ...]:
    """All that an inversion says, except times."""
    labels = None if result.labels is None else result.labels.tolist()
    return (
        result.outcome,
        result.proof,
        result.reason,
        result.batch_size,
        result.match,
        labels,
        result.certified.tolist(),
        result.approximate.tolist(),
        result.inputs.numpy().tobytes(),
    )


def random_states() -> tuple[object, ...]:
    """The random states that a process has."""
    numbers = np.random.get_state()
    return torch.get_rng_state().tolist(), random.getstate(), (numbers[1].tolist(), numbers[2:])


def judged(model: nn.Module, gradients: dict[str, Tensor], **told) -> spear.Inversion:
    """The verdict on an update that was told of truthfully; `loss=` goes to the judge."""
    loss = told.pop("loss", None)
    view = spear.observe(model, gradients, **told)
    return spear.invert(view, loss=loss, max_seconds=20)


def assert_certified_are_right(
    result: spear.Inversion, truth: Tensor, tolerance: float = 1e-3
) -> None:
    """To 60 dB: root mean square errors of a thousandth of the data's range."""
    wanted = truth.detach().double()
    off = torch.cdist(result.inputs.to(wanted), wanted) / wanted.shape[1] ** 0.5
    limit = tolerance * float(wanted.max() - wanted.min())
    assert bool((off[result.certified].amin(1) <= limit).all())
    if result.outcome is Outcome.EXACT:
        assert bool((off.amin(1) <= limit).all())
        assert bool((off.amin(0) <= limit).all())
