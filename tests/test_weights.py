"""What weights give away: samples that merged or vanished, and what few samples cannot tell."""

import pytest
import torch

import spear
from planted import plant, worst_error
from spear import Outcome, Proof
from spear.federated import defences, fedavg, fedsgd, mlp
from spear.judge.relu_sides import Sides, Turn, with_sides
from spear.judge.weights import merged, odd, usual, vanished

ALL = torch.ones(4, dtype=torch.bool)


def seeded(seed):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize(
    ("times", "expected"),
    [
        ([1, 1, 1, 2], [0, 0, 0, 1]),
        ([2, 2, 1, 2], [1, 1, 0, 1]),  # most have merged: the lightest is the unit
        ([1, 1, 3, 2], [0, 0, 1, 1]),
        ([1, 1, 1, 1], [0, 0, 0, 0]),
        ([1, 1, 0.37, 2], [0, 0, 0, 1]),  # most are alike
        ([1, 1.37, 2.61, 0.73], [0, 0, 0, 0]),  # clipped one by one
        ([0.0025, 0.0025, 1, 1.0013], [0, 0, 0, 0]),  # hundreds of times: a weight, no duplicates
    ],
)
def test_merged_samples_weigh_whole_numbers(times, expected):
    assert merged(torch.tensor(times) / 7, ALL).int().tolist() == expected


@pytest.mark.parametrize(
    ("weight", "suspect"),
    [(1 / 4, False), (1 / 5, False), (1 / 2, True), (1.0, False), (0.3, True)],
)
def test_a_sample_alone_is_judged_by_its_divisor(weight, suspect):
    """Of four samples one matched: 1/2 would be two of four, a mean over two there is not."""
    factor = torch.tensor([weight, 0.9, 3.0, 0.1])
    matched = torch.tensor([True, False, False, False])
    assert merged(factor, matched).tolist() == [suspect, False, False, False]


def test_nothing_matched_nothing_merged():
    assert not merged(torch.ones(4), ~ALL).any()
    assert vanished(torch.ones(4), ~ALL) == 0


@pytest.mark.parametrize("with_model", [True, False], ids=["model", "layer"])
@pytest.mark.parametrize("pairs", [1, 3])
@pytest.mark.parametrize("seed", range(2))
def test_means_of_near_duplicates_are_not_certified(pairs, with_model, seed):
    """So near that they leave one trace, at their mean."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(4, 400, generator=generator)
    x = torch.cat([x, x[:pairs] * 1.003])
    y = torch.tensor([3, 1, 4, 1])
    planted = plant(4, m=120, seed=seed, inputs=x, labels=torch.cat([y, y[:pairs]]))
    result = spear.invert(planted.view, model=planted.model if with_model else None)
    assert result.batch_size == 4
    assert result.outcome in (Outcome.PARTIAL, Outcome.FAILED)
    assert "may be the mean of samples" in result.reason
    certified = result.inputs[result.certified]
    assert len(certified) in (0, 4 - pairs)
    if pairs == 1:
        assert float(torch.cdist(certified, x, p=float("inf")).min(1).values.max()) < 1e-4


def test_a_sample_that_vanished_is_missed_without_the_model_in_invert():
    planted = plant(4, m=120, seed=3)
    shown = fedsgd(planted.model, planted.inputs[:3], planted.labels[:3])
    view = spear.observe(planted.model, {name: g * 3 / 4 for name, g in shown.items()})
    result = spear.invert(view)
    assert (result.outcome, result.proof) == (Outcome.PARTIAL, Proof.PATTERN)
    assert bool(result.certified.all())
    assert "divided by 4, so 1 more samples than the 3 that show" in result.reason


def test_another_loss_than_cross_entropy_is_no_reason_to_doubt_a_pattern():
    targets = torch.randn(4, 10, generator=torch.Generator().manual_seed(0))
    planted = plant(4, m=120, labels=targets, loss=torch.nn.functional.mse_loss)
    assert spear.invert(planted.view).outcome is Outcome.EXACT


def test_errors_are_measured_against_the_data_s_amplitude():
    """Noise that leaves more than 70 dB: 2e-4 of a sample's size, less than that of its amplitude."""
    planted = plant(4, m=200, n=400, seed=1)
    noisy = defences.add_noise(planted.gradients, 8e-6)
    result = spear.invert(spear.observe(planted.model, noisy), model=planted.model)
    size = planted.inputs.square().mean().sqrt()
    assert 2e-4 * size < float(result.predicted_error.max()) < 8e-4 * size
    assert result.outcome is Outcome.EXACT
    assert worst_error(result.inputs, planted.inputs) < 5e-3  # of a range of eight


def test_turning_a_neuron_changes_the_gradient_of_its_sample_in_its_step_only():
    torch.manual_seed(0)
    net, z = mlp(5, 3, width=6, depth=3, seed=0), torch.randn(2, 5)

    def gradient(step, turns=frozenset()):
        sides = Sides(turns=turns)
        sided = with_sides(mlp(5, 3, width=6, depth=3, seed=0), sides)
        sides.begin(step)
        leaf = z.clone().requires_grad_()
        return torch.autograd.grad(sided(leaf).square().sum(), leaf)[0]

    leaf = z.clone().requires_grad_()
    (plain,) = torch.autograd.grad(net(leaf).square().sum(), leaf)
    turn = frozenset([Turn(step=2, relu=1, sample=1, neuron=int(net[:3](z)[1].argmin()))])
    assert torch.equal(gradient(2), plain)
    assert torch.equal(gradient(1, turn), plain)
    turned = gradient(2, turn)
    assert torch.equal(turned[0], plain[0])
    assert not torch.allclose(turned[1], plain[1])


def test_neurons_near_their_threshold_are_noted():
    sides = Sides(reach=torch.tensor([0.1, 0.1]))
    sides.begin(4)
    sides.on(torch.tensor([[1.0, -1.0], [0.05, 1.0]]))
    ((away, turn),) = sides.near
    assert turn == Turn(4, 0, 1, 0)
    assert 0 < away < 1


def test_a_neuron_that_the_client_rounded_to_the_other_side_costs_no_proof():
    """Neuron 7 of the second layer is put on its threshold for one sample; the client is in float32."""
    proved = 0
    for seed in range(6):
        planted = plant(4, m=120, depth=4, seed=seed)
        with torch.no_grad():
            z = planted.model[:3](planted.inputs)
            planted.model[2].bias[7] -= z[1, 7]
        training = {"lr": 0.01, "epochs": 2}
        after = fedavg(planted.model, planted.inputs, planted.labels, **training)
        view = spear.observe(planted.model, after=after, **training)
        result = spear.invert(view, model=planted.model)
        assert worst_error(result.inputs, planted.inputs) < 1e-3
        proved += result.outcome is Outcome.EXACT
    assert proved == 6


def test_where_no_weight_is_usual_none_is_odd():
    clipped = torch.tensor([0.1, 0.2, 0.35, 0.5])
    assert usual(clipped, ALL) is None
    assert not odd(clipped, ALL).any()
    assert vanished(clipped, ALL) == 0
    nobody = ~ALL
    assert usual(clipped, nobody) is None
    assert not odd(clipped, nobody).any()
    assert not merged(clipped, nobody).any()


def test_a_weight_that_is_off_by_more_than_rounding_is_odd():
    factor = torch.tensor([0.25, 0.25, 0.25, 0.25 * 1.002, 0.25 * 1.0005])
    assert odd(factor, torch.ones(5, dtype=torch.bool)).tolist() == [
        False,
        False,
        False,
        True,
        False,
    ]


def test_a_sample_without_zeros_to_spare_is_proved_by_the_model_that_was_observed():
    """Pixels in [0, 1] leave few neurons off; cross-entropy's gradients take the place of zeros."""
    planted = plant(8, m=60, depth=2, seed=10, inputs=torch.rand(8, 100, generator=seeded(10)))
    view = planted.view
    bare = spear.LayerUpdate(view.weight, view.bias, view.weight_grad, view.bias_grad)
    assert spear.invert(bare).outcome is Outcome.FAILED
    known = spear.invert(view)
    assert (known.outcome, known.proof, known.labels) == (Outcome.EXACT, Proof.PATTERN, None)
    assert worst_error(known.inputs, planted.inputs) < 1e-6


@pytest.mark.parametrize("seed", range(3))
def test_noise_on_the_bias_gradient_alone_is_predicted(seed):
    """A few roundings of it, but every sample's scale hangs on it."""
    planted = plant(5, m=150, n=300, seed=seed)
    bias = planted.gradients["0.bias"]
    noise = 5e-7 * bias.square().mean().sqrt() * torch.randn(bias.shape, generator=seeded(seed))
    view = spear.observe(planted.model, {**planted.gradients, "0.bias": bias + noise})
    result = spear.invert(view)
    error = torch.cdist(result.inputs, planted.inputs).min(1).values / 300**0.5
    assert bool((error < 3 * result.predicted_error).all())


def test_a_next_layer_that_is_noisy_itself_is_no_witness():
    """Its span turns by its own noise, here by more than a thousandth."""
    planted = plant(5, m=150, n=300, seed=2)
    gradient = planted.gradients["2.weight"]
    noise = torch.randn(gradient.shape, generator=seeded(0))
    noise *= torch.linalg.svdvals(gradient)[4] / 150 / torch.linalg.matrix_norm(noise, 2)
    view = spear.observe(planted.model, {**planted.gradients, "2.weight": gradient + noise})
    assert spear.invert(view).outcome is Outcome.EXACT
