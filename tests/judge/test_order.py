"""The order of mini-batches, from the weights that training in it leads to."""

import pytest
import torch
from torch.nn import functional as F

from spear import Protocol
from spear.judge.order import OrderSearch
from spear.judge.side_by_side import SideBySide
from spear.search import Deadline, TimeIsUp

B, N, M = 7, 12, 20


def search(told, check_time=lambda: None, noise=0.0):
    """A search for the order of a client, and that order: the samples of every step."""
    torch.manual_seed(0)
    x, y = torch.randn(B, N).double(), torch.arange(B) % 3
    start = {
        "weight": torch.randn(M, N).double() / N**0.5,
        "bias": torch.randn(M).double(),
        "behind": torch.randn(3, M).double() / M**0.5,
    }

    def loss(parameters, samples):
        hidden = F.linear(x[samples], parameters["weight"], parameters["bias"]).relu()
        return F.cross_entropy(hidden @ parameters["behind"].T, y[samples])

    many = {name: torch.nn.Parameter(p.clone()) for name, p in start.items()}
    optimiser = told.optimiser(list(many.values()))
    order = [torch.randperm(B) for _ in range(told.epochs)]
    steps = [some for each in order for some in each.split(told.local_batch_size)]
    for rate, some in zip(told.rates(len(steps)), steps, strict=True):
        optimiser.zero_grad()
        loss(many, some).backward()
        told.local_step(many, optimiser, start, rate)
    kept = told.weight_decay_factor(len(steps), start["weight"])
    moved = (kept * start["weight"] - many["weight"].detach()) / told.rate  # (M, N): D x
    Q = torch.linalg.pinv(x)  # (N, B)
    sent = moved @ Q
    sent = sent + noise * sent.norm() * torch.randn_like(sent) / sent.numel() ** 0.5
    training = SideBySide(loss, start, told, check_time)
    return OrderSearch(training, sent, Q), steps


def told(**more):
    return Protocol(sends="weights", lr=0.05, epochs=2, local_batch_size=2, samples=B, **more)


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"momentum": 0.9, "nesterov": True},
        {"weight_decay": 0.05, "decays_biases": False, "proximal": 0.1},
    ],
)
def test_swaps_lead_to_the_client_s_order(more):
    looking, truth = search(told(**more))
    found = looking.run()
    assert [set(step.tolist()) for step in found] == [set(step.tolist()) for step in truth]


def test_where_no_order_leads_there_none_is_found():
    looking, _ = search(told(), noise=0.05)
    assert looking.run() is None


def test_too_many_orders_are_not_tried():
    many = Protocol(sends="weights", lr=0.05, epochs=200, local_batch_size=1, samples=B)
    looking, _ = search(many)
    assert looking.run() is None


def test_it_watches_the_clock():
    looking, _ = search(told(), check_time=Deadline.after(0).check)
    with pytest.raises(TimeIsUp):
        looking.run()
