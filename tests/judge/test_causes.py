"""Each cause on a client that has it, and on one that has not."""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.nn import functional as F

import spear
from spear.judge import Cause
from support.planted import gaussian, labels

N, M, B = 60, 120, 8


def trained(b=B, lr=0.02, epochs=3, size=None, *, n=N, decay=1.0, jitter=0.0, optimiser="SGD"):
    """A model and what its client sent back."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(n, M), nn.ReLU(), nn.Linear(M, 10))
    x, y, local = gaussian(b, n), labels(b), copy.deepcopy(model)
    steps = getattr(torch.optim, optimiser)(local.parameters(), lr=lr)
    for _ in range(epochs):
        for some in torch.randperm(b).split(size or b):
            seen = x[some] + jitter * torch.randn(len(some), n)
            steps.zero_grad()
            F.cross_entropy(local(seen), y[some]).backward()
            steps.step()
        steps.param_groups[0]["lr"] *= decay
    return model, local.state_dict()


def cause(model, after, **told):
    return spear.invert(spear.observe(model, after=after, **told), max_seconds=20)


TOLD = {"lr": 0.02, "epochs": 3, "samples": B}


def test_nothing_is_wrong_with_a_plain_client():
    assert cause(*trained(), **TOLD).cause is Cause.PROVED


def test_a_schedule_is_named_unless_it_is_told():
    client = trained(decay=0.5)
    found = cause(*client, **TOLD)
    assert found.cause is Cause.SCHEDULE
    assert "lr=" in found.reason
    told = cause(*client, **{**TOLD, "lr": [0.02, 0.01, 0.005]})
    assert told.cause is Cause.PROVED


def test_augmentation_is_named():
    found = cause(*trained(jitter=0.3), **TOLD)
    assert (found.cause, found.batch_size) == (Cause.AUGMENTED, 3 * B)
    assert "augmentation" in found.reason
    many = cause(*trained(b=50, n=200, jitter=0.3), **{**TOLD, "samples": 50})
    assert (many.cause, many.batch_size) == (Cause.AUGMENTED, None)
    assert cause(*trained(b=10), **{**TOLD, "samples": 10}).cause is Cause.PROVED


def test_steps_that_go_too_far_are_named():
    far = cause(*trained(24, 1.0, 6, 8), lr=1.0, epochs=6, batch_size=8, samples=24)
    assert far.cause is Cause.MOVED
    assert "of their size" in far.reason
    near = cause(*trained(lr=0.02, epochs=2, size=4), lr=0.02, epochs=2, batch_size=4, samples=B)
    assert near.cause is not Cause.MOVED
    assert len(near.inputs) == B


def test_adam_is_named():
    assert cause(*trained(optimiser="Adam", lr=0.001), lr=0.001).cause is Cause.OPTIMISER


def test_a_batch_as_large_as_the_layer_is_named():
    large = cause(*trained(b=M, epochs=1), lr=0.02, epochs=1, samples=M)
    assert large.cause is Cause.NARROW
    assert f"{M} samples were told" in large.reason


def test_dropout_that_is_switched_off_in_the_model_is_named():
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Linear(N, M), nn.ReLU(), nn.Linear(M, M), nn.ReLU(), nn.Dropout(0.5)),
        nn.Linear(M, 10),
    ).train()
    x, y = gaussian(B, N), labels(B)
    gradients = torch.autograd.grad(F.cross_entropy(model(x), y), list(model.parameters()))
    found = spear.invert(spear.observe(model.eval(), gradients))
    assert found.cause is Cause.DROPOUT
    assert "train mode" in found.reason
    clean = torch.autograd.grad(F.cross_entropy(model(x), y), list(model.parameters()))
    assert spear.invert(spear.observe(model, clean)).cause is Cause.PROVED
