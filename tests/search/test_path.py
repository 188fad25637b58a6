"""One pass over mini-batches: the signs of each batch are those of the weights it saw."""

import copy

import pytest
import torch

import spear
from spear.factors import factorise
from spear.federated import fedavg
from spear.search.path import OnePass
from support.planted import plant

HOW = {"lr": 0.5, "epochs": 1, "batch_size": 4}


def client():
    """Twelve samples in three batches, one after the other: the models before and after each step."""
    planted = plant(12, m=150, n=80, depth=2, dtype=torch.float64)
    models = [planted.model]
    for batch in torch.arange(12).split(4):
        after = fedavg(models[-1], planted.inputs[batch], planted.labels[batch], lr=0.5, epochs=1)
        models.append(copy.deepcopy(planted.model))
        models[-1].load_state_dict(after)
    return planted, models


def test_what_is_found_of_a_batch_gives_the_weights_of_the_next():
    planted, models = client()
    view = spear.observe(planted.model, after=models[-1].state_dict(), **HOW)
    factors = factorise(view)
    path = OnePass.of(factors)
    live = factors.live_rows
    # x = c U^T dL/dW, and the inverse of all c holds the q.
    coordinates = factors.combine(torch.eye(12, dtype=torch.float64))
    c = planted.inputs @ torch.linalg.pinv(coordinates)
    q = torch.linalg.inv(c).T
    second = path._after(path.whole, q[:4], c[:4])
    third = path._after(second, q[4:8], c[4:8])
    for at, model in zip((path.whole, second, third), models, strict=False):
        Z = model[0](planted.inputs).detach().T[live]
        assert torch.allclose(at.H[0] @ c.T, Z, atol=1e-8)


@pytest.mark.parametrize(
    "how",
    [
        {"lr": 0.5, "epochs": 1},
        {"lr": 0.5, "epochs": 2, "batch_size": 4},
        {"lr": 0.5, "epochs": 1, "batch_size": 12},
        {"lr": 0.5, "epochs": 1, "batch_size": 4, "momentum": 0.9},
    ],
)
def test_only_one_pass_in_several_steps_has_a_path(how):
    planted, models = client()
    view = spear.observe(planted.model, after=models[-1].state_dict(), **how)
    assert OnePass.of(factorise(view)) is None
