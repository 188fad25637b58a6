"""The client's side: what FedSGD and FedAvg clients compute, the models, the yardstick."""

import copy

import pytest
import torch
from torch import nn

from spear.errors import DataError
from spear.federated import (
    Vgg16,
    clipping_factors,
    fedavg,
    fedsgd,
    least_squares,
    mlp,
    output_gradient,
    train,
)
from support.planted import small_batch


def test_one_step_is_one_gradient():
    model, x, y = small_batch()
    after = fedavg(model, x, y, lr=0.1)
    for name, g in fedsgd(model, x, y).items():
        assert torch.allclose(model.get_parameter(name) - 0.1 * g, after[name], atol=1e-7)


@pytest.mark.parametrize(("momentum", "decay"), [(0.0, 0.0), (0.9, 0.0), (0.5, 0.01)])
def test_local_training_is_torchs_own(momentum, decay):
    model, x, y = small_batch()
    own = copy.deepcopy(model)
    optimiser = torch.optim.SGD(own.parameters(), lr=0.05, momentum=momentum, weight_decay=decay)
    for _ in range(3):
        optimiser.zero_grad()
        nn.functional.cross_entropy(own(x), y).backward()
        optimiser.step()
    before = copy.deepcopy(model.state_dict())
    after = fedavg(model, x, y, lr=0.05, epochs=3, momentum=momentum, weight_decay=decay)
    assert all(torch.equal(after[name], value) for name, value in own.state_dict().items())
    assert all(torch.equal(before[name], v) for name, v in model.state_dict().items())  # untouched


def test_an_epoch_sees_every_sample_once():
    model, x, y = small_batch(b=7)
    seen = []

    def loss(outputs, targets):
        seen.append(len(targets))
        return nn.functional.cross_entropy(outputs, targets, reduction="sum")

    fedavg(model, x, y, lr=0.01, epochs=2, batch_size=3, loss=loss)
    assert seen == [3, 3, 1] * 2
    seen.clear()
    train(model, x, y, steps=4, batch_size=3, loss=loss)
    assert seen == [3, 3, 1, 3]


def test_shuffling_follows_the_generator():
    model, x, y = small_batch(b=8)
    runs = [
        fedavg(model, x, y, lr=0.1, batch_size=3, generator=torch.Generator().manual_seed(seed))
        for seed in (0, 0, 1)
    ]
    assert torch.equal(runs[0]["0.weight"], runs[1]["0.weight"])
    assert not torch.equal(runs[0]["0.weight"], runs[2]["0.weight"])


@pytest.mark.parametrize(
    "bad", [{"lr": 0.0}, {"lr": 0.1, "epochs": 0}, {"lr": 0.1, "batch_size": 0}]
)
def test_bad_training_is_refused(bad):
    model, x, y = small_batch()
    with pytest.raises(ValueError, match="expected"):
        fedavg(model, x, y, **bad)


def test_least_squares_with_the_true_gradient_is_exact_without_noise():
    model, x, y = small_batch(b=5, m=40)
    import spear

    view = spear.observe(model, fedsgd(model, x, y))
    D = output_gradient(model, x, y, layer="0")
    assert D.shape == (40, 5)
    assert torch.allclose(least_squares(view, D).float(), x, atol=1e-4)


def test_clipping_factors_are_those_of_the_norms():
    model, x, y = small_batch()
    norms = [
        sum(float(g.square().sum()) for g in fedsgd(model, x[i : i + 1], y[i : i + 1]).values())
        ** 0.5
        for i in range(len(x))
    ]
    limit = sorted(norms)[len(norms) // 2]
    expected = torch.tensor([min(1.0, limit / n) for n in norms])
    assert torch.allclose(clipping_factors(model, x, y, limit), expected, atol=1e-5)


def test_vgg16_has_its_usual_shape():
    net = Vgg16(seed=0)
    assert [m.out_features for m in net.modules() if isinstance(m, nn.Linear)] == [4096, 4096, 1000]
    assert sum(p.numel() for p in net.parameters()) == 138_357_544
    with pytest.raises(ValueError, match="multiple of 32"):
        Vgg16(pixels=100)


def test_vgg16_takes_the_trained_convolutions(data_root, tmp_path):
    net = Vgg16(10, width=8, pixels=32, seed=0)
    before = net.features[0].weight.clone()
    net.load_features(data_root)
    stored = torch.load(data_root / "weights" / "vgg16_features.pth", weights_only=True)
    assert torch.equal(net.features[0].weight, stored["features.0.weight"])
    assert not torch.equal(before, net.features[0].weight)
    with pytest.raises(DataError, match="vgg16_features"):
        net.load_features(tmp_path)


def test_seeds_fix_weights_and_leave_the_global_state():
    state = torch.random.get_rng_state()
    assert torch.equal(mlp(5, 2, seed=3)[0].weight, mlp(5, 2, seed=3)[0].weight)
    assert torch.equal(state, torch.random.get_rng_state())
