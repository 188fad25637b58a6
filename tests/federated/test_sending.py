"""Clients do what their protocol says: clipping as Opacus has it, optimisers as torch has them."""

import copy

import pytest
import torch
from torch import nn

from spear.errors import InvalidOption
from spear.federated import fedsgd, play_rounds, send
from spear.update import Protocol
from support.planted import small_batch


def sent(protocol, model, x, y):
    options = {"loss": nn.functional.cross_entropy, "generator": torch.Generator().manual_seed(0)}
    return send(model, [(x, y)], protocol, **options)


@pytest.mark.parametrize(("clipping", "flat"), [("per-sample", "flat"), ("per-layer", "per_layer")])
def test_samples_are_clipped_as_opacus_does(clipping, flat):
    pytest.importorskip("opacus", reason="needs the opacus extra")
    from spear.federated.dpsgd import dpsgd

    model, x, y = small_batch()
    own = sent(Protocol(clip=0.1, clipping=clipping), model, x, y).update
    for name, g in dpsgd(model, x, y, max_grad_norm=0.1, clipping=flat).gradients.items():
        assert torch.allclose(own[name], g, atol=1e-7)


@pytest.mark.parametrize("sends", ["gradient", "difference"])
def test_the_whole_update_is_clipped(sends):
    model, x, y = small_batch()
    rate = {} if sends == "gradient" else {"lr": 1.0}
    update = sent(Protocol(sends=sends, clip=0.01, clipping="global", **rate), model, x, y).update
    norm = torch.stack([g.norm() for g in update.values()]).norm()
    assert float(norm) == pytest.approx(0.01, rel=1e-4)


@pytest.mark.parametrize(
    ("told", "optimiser"),
    [
        (
            {"optimizer": "Adam", "weight_decay": 0.1},
            lambda p: torch.optim.Adam(p, weight_decay=0.1),
        ),
        ({"optimizer": "rmsprop", "momentum": 0.5}, lambda p: torch.optim.RMSprop(p, momentum=0.5)),
        (
            {"momentum": 0.9, "nesterov": True},
            lambda p: torch.optim.SGD(p, momentum=0.9, nesterov=True),
        ),
    ],
)
def test_optimisers_and_schedules_are_torchs_own(told, optimiser):
    model, x, y = small_batch()
    rates, mu = (0.05, 0.02, 0.01), 0.5
    local = copy.deepcopy(model)
    steps = optimiser(local.parameters())
    for rate in rates:
        steps.param_groups[0]["lr"] = rate
        steps.zero_grad()
        near = sum(
            (p - s).square().sum()
            for p, s in zip(local.parameters(), model.parameters(), strict=True)
        )
        (nn.functional.cross_entropy(local(x), y) + mu / 2 * near).backward()  # FedProx
        steps.step()
    protocol = Protocol(sends="weights", lr=rates, epochs=3, proximal=mu, **told)
    after = sent(protocol, model, x, y).after(model)
    for name, value in local.state_dict().items():
        assert torch.allclose(after[name], value, atol=1e-6)


def test_what_is_rounded_is_what_is_sent():
    model, x, y = small_batch()
    weights = sent(Protocol(sends="weights", lr=0.1, precision="bfloat16"), model, x, y)
    for value in weights.after(model).values():
        assert torch.allclose(value, value.bfloat16().float(), atol=1e-7)
    for sends, rate in (("gradient", {}), ("difference", {"lr": 0.1})):
        update = sent(Protocol(sends=sends, precision="bfloat16", **rate), model, x, y).update
        assert all(torch.equal(g, g.bfloat16().float()) for g in update.values())


def test_a_model_stays_as_it_was_and_unused_parameters_are_left_out():
    model = nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 3))
    model.register_parameter("unused", nn.Parameter(torch.ones(2)))
    before, y = copy.deepcopy(model.state_dict()), torch.tensor([0, 1, 2])
    update = sent(Protocol(), model, torch.randn(3, 6), y).update
    assert sorted(update) == ["0.bias", "0.weight", "1.bias", "1.weight"]
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_unknown_optimisers_are_told():
    model, x, y = small_batch()
    with pytest.raises(InvalidOption, match=r"one of torch\.optim, got 'lion'"):
        sent(Protocol(sends="weights", lr=0.1, optimizer="lion"), model, x, y)


def test_rounds_go_on_from_the_mean_of_those_seen_and_those_apart():
    model, x, y = small_batch()
    before = copy.deepcopy(model.state_dict())
    halves = [(x[:3], y[:3]), (x[3:6], y[3:6])]
    third, options = (x[-2:], y[-2:]), {"loss": nn.functional.cross_entropy}
    generator = torch.Generator()
    played = play_rounds(
        *(model, [halves, halves[:1]], Protocol()),
        **{"server_lr": 0.5, "others": [third], "generator": generator},
    )
    _, first = next(played)
    moved, second = next(played)
    one, two, apart = (fedsgd(model, *batch) for batch in (*halves, third))
    for name, p in moved.named_parameters():
        mean = (one[name] + two[name] + apart[name]) / 3
        assert torch.allclose(first.update[name], (one[name] + two[name]) / 2, atol=1e-7)
        assert torch.allclose(p, before[name] - 0.5 * mean, atol=1e-6)
        assert torch.equal(model.get_parameter(name), before[name])
    alone = send(moved, halves[:1], Protocol(), generator=generator, **options)
    assert all(torch.equal(second.update[name], g) for name, g in alone.update.items())
