"""Noisy updates: recovered as well as if every output gradient were known, and never called exact."""

import pytest
import torch
from torch import nn

import spear
from spear import Outcome, Proof
from spear.data.photos import photo_crops
from spear.factors import factorise
from spear.federated import clipping_factors, fedsgd, least_squares, mlp, output_gradient
from spear.federated.defences import add_noise
from spear.judge.rescaling import rescale
from spear.metrics import score
from spear.search.dual import balance, dual_problem
from spear.search.kernels import unit
from spear.search.noisy import NoiseUnits, refine_each, refine_jointly
from spear.search.starts import search_from_starts
from spear.update.layers import network_after, soften
from support.planted import bare, plant, real_batch, seeded, weighed, with_noise, worst_error


def noisy_update(root, sigma, clip, seed):
    """A view of noisy gradients, the model, the truth, and the true output gradient behind it."""
    images, model, x, y = real_batch(root, seed=seed)
    factors = torch.ones(len(x)) if clip is None else clipping_factors(model, x, y, clip)
    noisy = add_noise(fedsgd(model, x, y, weighed(factors)), sigma, seeded(seed + 1_000_000))
    D = output_gradient(model, x, y, layer="0").double() * factors
    return images, model, x, y, spear.observe(model, noisy), D


@pytest.mark.parametrize(
    ("sigma", "within", "clip"), [(1e-5, 1.5, 2.0), (5e-5, 1.5, None), (1e-4, 3.0, 2.0)]
)
def test_as_good_as_knowing_the_output_gradient(sigma, within, clip, data_root):
    images, model, x, y, view, D = noisy_update(data_root, sigma, clip, 40)
    result = spear.invert(view, model=model)
    pixels = images.to_pixels
    found = score(pixels(result.inputs), pixels(x))
    best = score(pixels(least_squares(view, D)), pixels(x))
    assert (result.outcome, result.proof) == (Outcome.APPROXIMATE, Proof.NONE)
    assert result.batch_size == len(result.inputs) == 20
    assert not result.certified.any()
    assert result.approximate.all()
    assert "noise" in result.reason
    if (sigma, clip) == (1e-5, 2.0):
        assert "clipping by their norm" in result.explanation
    assert best.mean - found.mean < within
    assert int((result.labels == y[found.truth]).sum()) >= 18


def test_without_the_model_the_scale_hangs_on_the_bias_gradient(data_root):
    """The scale is as noisy as a pixel, which costs three decibels that only the model wins back."""
    images, _, x, _, view, D = noisy_update(data_root, 1e-5, None, 42)
    result = spear.invert(bare(view))
    found = score(images.to_pixels(result.inputs), images.to_pixels(x))
    best = score(images.to_pixels(least_squares(view, D)), images.to_pixels(x))
    assert 1 < best.mean - found.mean < 6
    truth = x[found.truth].double()
    own = result.inputs.double()
    right = own * ((own * truth).sum(1) / own.square().sum(1))[:, None]
    assert best.mean - score(images.to_pixels(right), images.to_pixels(x)).mean < 0.3


def test_noise_is_one_in_quiet_coordinates(data_root):
    *_, view, D = noisy_update(data_root, 5e-5, None, 44)
    factors = factorise(view)
    units = NoiseUnits.of(factors)
    p = torch.linalg.lstsq(units.basis, D[factors.live_rows]).solution
    off = units.basis @ (p / p.norm(dim=0)) - D[factors.live_rows] / p.norm(dim=0)
    assert 0.7 < float(off.std()) < 1.3


def test_guesses_are_polished_to_the_noise(data_root):
    *_, view, D = noisy_update(data_root, 1e-4, None, 45)
    factors = factorise(view)
    units, residual = NoiseUnits.of(factors), balance(dual_problem(factors))
    guesses = search_from_starts(residual, 160, 80, seeded(0))
    p, off = refine_each(units, residual, *guesses, by_sign=False)
    true = torch.linalg.lstsq(units.basis, D[factors.live_rows]).solution
    cos = (p.T @ (true / true.norm(dim=0))).abs()
    assert int((cos.max(0).values > 0.99).sum()) >= 18  # of 20 samples
    zeros = (D[factors.live_rows] == 0)[:, cos.argmax(1)]
    assert float(((off > 0.5) == zeros).double().mean()) > 0.93


def test_soft_relus_become_hard_ones():
    network = network_after(nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)), "0")
    soft, relus = soften(network)
    z = torch.tensor([[0.5, -0.5, 2.0, -2.0]])
    assert len(relus) == 1
    assert torch.equal(soft(z), network(z))
    relus[0].width = torch.tensor(1e-4)
    assert torch.allclose(soft(z), network(z), atol=1e-4)
    relus[0].width = torch.tensor(1.0)
    assert not torch.allclose(soft(z), network(z), atol=1e-2)


def test_rescaling_says_why_it_cannot(data_root):
    _, _, _, _, view, _ = noisy_update(data_root, 1e-5, None, 46)
    factors = factorise(view)
    assert rescale(factors, None, nn.functional.mse_loss).reason == "the loss has no labels"


@pytest.mark.parametrize("sigma", [1e-10, 1e-8])
def test_neurons_that_no_sample_switched_on_are_known_for_that_under_noise(sigma):
    """Inputs in [0, 1] leave many neurons off; noise makes their rows look alive."""
    generator = seeded(0)
    planted = plant(8, m=100, depth=4, inputs=torch.rand(8, 300, generator=generator))
    noisy = add_noise(planted.gradients, sigma, generator)
    clean = factorise(planted.view)
    dead = int((~clean.live_rows).sum())
    factors = factorise(spear.observe(planted.model, noisy))
    assert dead >= 5
    assert torch.equal(factors.live_rows, clean.live_rows)
    result = spear.invert(spear.observe(planted.model, noisy), model=planted.model)
    assert result.outcome is Outcome.EXACT, result.reason
    assert worst_error(result.inputs, planted.inputs) < 1e-3


def test_noise_under_which_the_first_round_finds_nothing_is_no_error():
    pytest.importorskip("skimage", reason="needs the cli extra")
    images, _ = photo_crops(6, 32)
    inputs = ((images - 0.5) / 0.25).flatten(1)
    net = mlp(inputs.shape[1], 10, width=100, depth=3, seed=0)
    noisy = add_noise(fedsgd(net, inputs, torch.arange(6)), 1e-2)
    result = spear.invert(spear.observe(net, noisy), model=net, max_seconds=10)
    assert not result.certified.any()


def test_noisy_regressions_keep_the_scale_of_the_bias_gradient():
    """A loss without labels gives the model nothing to rescale by."""
    planted = plant(4, m=120, n=150)
    loss = nn.functional.mse_loss
    gradients = fedsgd(planted.model, planted.inputs, torch.randn(4, 10), loss)
    noisy = with_noise(gradients, 2e-2)
    view = spear.observe(planted.model, noisy)
    result = spear.invert(view, model=planted.model, loss=loss)
    assert result.outcome is Outcome.APPROXIMATE
    assert result.labels is None
    assert torch.equal(result.inputs, spear.invert(bare(view)).inputs)


def test_hidden_layers_are_rescaled_without_the_rule_of_clipping():
    """Clipping depends on the norm over all layers, and those before this one are unknown."""
    planted = plant(4, m=100, n=100, depth=4)
    noisy = with_noise(planted.gradients, 5e-3, like="2.weight")
    view = spear.observe(planted.model, noisy, layer="2")
    result = spear.invert(view, model=planted.model)
    hidden = planted.model[:2](planted.inputs).detach()
    near = torch.cdist(result.inputs, hidden).min(1)
    assert result.outcome is Outcome.APPROXIMATE
    assert float((near.values / hidden.norm(dim=1)[near.indices]).max()) < 0.1
    assert torch.equal(result.labels, planted.labels[near.indices])
    assert "clipping" not in result.explanation


def test_weights_that_follow_no_rule_are_told():
    weights = torch.tensor([1.0, 3.0, 0.5, 2.0, 0.7])
    planted = plant(5, m=150, n=300, loss=weighed(weights, total=True))
    noisy = with_noise(planted.gradients, 1e-2)
    result = spear.invert(spear.observe(planted.model, noisy), model=planted.model)
    assert "follow no rule that is known" in result.explanation
    near = torch.cdist(result.inputs, planted.inputs).min(1)
    assert sorted(near.indices.tolist()) == [0, 1, 2, 3, 4]


def test_no_guesses_are_polished_to_none(data_root):
    _, _, _, _, view, _ = noisy_update(data_root, 1e-4, None, 44)
    factors = factorise(view)
    whole, units = dual_problem(factors), NoiseUnits.of(factors)
    nothing = whole.U.new_zeros(20, 0), whole.U.new_zeros(len(whole.U), 0)
    p, off = refine_each(units, balance(whole), *nothing, by_sign=False)
    assert p.shape == (20, 0)
    assert off.shape == (len(whole.U), 0)


def test_estimates_that_run_together_stay_as_they_were():
    """Two guesses are the same sample: a sweep would make them equal and the inverse singular."""
    planted = plant(4, m=120, n=150)
    noisy = with_noise(planted.gradients, 1e-2)
    factors = factorise(spear.observe(planted.model, noisy))
    whole, units = dual_problem(factors), NoiseUnits.of(factors)
    R = factors.combine(torch.diag(1 / factors.singular_values))
    Q = torch.linalg.inv(planted.inputs.double() @ R.T) * factors.singular_values[:, None]
    p = units.vector(Q)
    apart, _ = refine_jointly(factors, whole, units, p)
    assert float((apart * p).sum(0).abs().min()) > 0.9
    p[:, 1] = unit(p[:, 0] + 0.05 * p[:, 1], 0)
    together, _ = refine_jointly(factors, whole, units, p)
    overlap = (together.T @ together).abs().fill_diagonal_(0)
    assert float(overlap.max()) <= float((p.T @ p).abs().fill_diagonal_(0).max()) + 1e-9
    assert float(torch.linalg.svdvals(together)[-1]) > 1e-3


@pytest.mark.parametrize("seed", [1, 2])
def test_errors_are_predicted_with_the_scale_of_the_model(seed, data_root):
    """With that of the bias gradient, samples that came back with 21 dB seemed to drown."""
    _, _, x, _, view, _ = noisy_update(data_root, 1e-4, 1.0, seed)
    result = spear.invert(view)
    assert (result.outcome, len(result.inputs)) == (Outcome.APPROXIMATE, len(x))
    distances = torch.cdist(result.inputs.double(), x.double()) / x.shape[1] ** 0.5
    share = result.predicted_error / distances.min(1).values
    assert 0.8 < share.median() < 1.2


@pytest.mark.parametrize("size", [1, 100])
@pytest.mark.parametrize("door", ["bare", "observed"])
def test_what_shows_but_for_its_scale_is_not_called_nothing(size, door):
    """Inputs of size 100, as raw pixels: the bias gradient, an input of one, drowns before they do."""
    x = size * torch.rand(4, 300, generator=seeded(0))
    planted = plant(4, m=150, depth=2, inputs=x)
    noisy = with_noise(planted.gradients, 0.05)
    view = spear.observe(planted.model, noisy)
    result = spear.invert(view if door == "observed" else bare(view))
    assert (result.outcome, len(result.inputs)) == (Outcome.APPROXIMATE, 4)
    assert ("but for a factor each" in result.reason) is (size == 100)
    unit_of = torch.nn.functional.normalize
    cos = unit_of(result.inputs.double()) @ unit_of(x.double()).T
    assert float(cos.max(1).values.min()) > 0.9  # the right way up, too
