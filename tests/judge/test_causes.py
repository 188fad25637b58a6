"""Each cause on a client that has it, and on one that has not."""

from __future__ import annotations

import copy
from itertools import pairwise

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
    found = cause(*trained(b=5, jitter=0.3), **{**TOLD, "samples": 5})
    assert (found.cause, found.batch_size) == (Cause.AUGMENTED, 3 * 5)
    assert "augmentation" in found.reason
    many = cause(*trained(b=50, n=200, jitter=0.3), **{**TOLD, "samples": 50})
    assert (many.cause, many.batch_size) == (Cause.AUGMENTED, None)
    assert cause(*trained(b=10), **{**TOLD, "samples": 10}).cause is Cause.PROVED


def test_steps_that_go_too_far_are_named():
    far = cause(*trained(30, 1.0, 6, 8), lr=1.0, epochs=6, batch_size=8, samples=30)
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


def sends(model, x, y, steps=1, lr=0.1, penalty=None, added=None):
    """What comes back after some steps of a loss with a penalty, with something added to each step."""
    local, start = copy.deepcopy(model), dict(model.named_parameters())
    optimiser = torch.optim.SGD(local.parameters(), lr=lr)
    for _ in range(steps):
        optimiser.zero_grad()
        loss = F.cross_entropy(local(x), y)
        if penalty is not None:
            loss = loss + sum(penalty(p - start[n].detach()) for n, p in local.named_parameters())
        loss.backward()
        for name, p in local.named_parameters():
            p.grad += 0 if added is None else added(name, p)
        optimiser.step()
    return local.state_dict()


def three_layers(*sizes, seed=0):
    torch.manual_seed(seed)
    a, b, c = (nn.Linear(*pair) for pair in pairwise(sizes))
    return nn.Sequential(a, nn.ReLU(), b, nn.ReLU(), c)


def test_control_variates_are_not_called_noise():
    """SCAFFOLD: every step is corrected by c - c_i, which is of another size in every layer."""
    sizes = (N, M, 80, 10)
    model, x, y = three_layers(*sizes), gaussian(B, N), labels(B)
    variates = dict(three_layers(*sizes, seed=1).named_parameters())
    told = {"lr": 0.1, "epochs": 1}
    sent = sends(model, x, y, added=lambda name, p: variates[name].detach())
    found = cause(model, sent, **told)
    assert found.cause is Cause.UNFIT
    assert "SCAFFOLD" in found.reason
    noisy = cause(model, sends(model, x, y, added=lambda name, p: torch.randn_like(p)), **told)
    assert noisy.cause is Cause.NOISE
    assert "sigma=" in noisy.reason
    assert cause(model, sends(model, x, y), **told).cause is Cause.PROVED


def test_fewer_features_than_samples_are_named():
    """Two linear layers with nothing between them: the second reads as many features as the first."""
    features = 12
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Linear(features, 64), nn.Linear(64, M), nn.ReLU(), nn.Linear(M, 10)),
    )
    for b, expected in ((features + 2, Cause.NARROW), (B, Cause.PROVED)):
        after = sends(model, gaussian(b, features), labels(b))
        found = cause(model, after, lr=0.1, epochs=1, samples=b)
        assert found.cause is expected
        told = f"linear functions of {features} numbers" in found.reason
        assert told is (expected is Cause.NARROW)


def test_layers_before_that_were_trained_as_well_are_named():
    """Inputs that change a little from step to step look like noise."""
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 6, 3), nn.ReLU(), nn.Flatten()),
        *(nn.Linear(216, M), nn.ReLU(), nn.Linear(M, 10)),
    )
    x, y = gaussian(5, 64), labels(5)
    moved = cause(model, sends(model, x, y, steps=10, lr=0.02), lr=0.02, epochs=10, samples=5)
    assert moved.cause is Cause.TRAINING
    assert cause(model, sends(model, x, y), lr=0.1, epochs=1, samples=5).cause is Cause.PROVED


def test_a_proximal_term_of_another_kind_is_named():
    """FedProx with the length of the change in place of its square."""
    model, x, y = three_layers(N, M, 80, 10), gaussian(B, N), labels(B)
    told = {"lr": 0.1, "epochs": 5, "samples": B}
    sent = sends(model, x, y, steps=5, penalty=lambda change: 0.02 * change.norm())
    for proximal, words in ((0.02, "squared change"), (0.0, "give proximal=")):
        found = cause(model, sent, proximal=proximal, **told)
        assert found.cause is Cause.SCHEDULE
        assert words in found.reason
    squared = sends(model, x, y, steps=5, penalty=lambda change: 0.02 / 2 * change.square().sum())
    assert cause(model, squared, proximal=0.02, **told).cause is Cause.PROVED


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
