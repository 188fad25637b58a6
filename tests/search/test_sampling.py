import pytest
import torch

import spear
from spear import InvalidOption, SamplingFinder
from spear.factors import factorise
from spear.search.kernels import unit
from spear.search.sampling import Draw, kernels, kernels_by_inverse
from support.planted import plant, seeded, with_noise, worst_error


@pytest.mark.parametrize("b", [2, 3, 7, 12])
def test_one_inverse_gives_the_kernels_of_b_submatrices(b):
    """Every candidate vanishes on b-1 sampled rows: it is the kernel an SVD would give."""
    planted = plant(b, m=90)
    side = factorise(planted.view).outputs
    generator = seeded(0)
    candidates, count = kernels(side, b - 1, generator, Draw(64))
    assert count >= 64 * b
    assert len(candidates) > 0
    q = unit(candidates)
    zeros = ((q @ side.white.T).abs() < 1e-9).sum(1)
    assert int(zeros.min()) >= b - 1


def test_most_candidates_are_refused_early_and_no_true_one_is_lost():
    planted = plant(10, m=200, n=60)
    factors = factorise(planted.view)
    generator = seeded(1)
    candidates, count = kernels_by_inverse(factors.outputs.white, generator, Draw())
    assert len(candidates) < 0.1 * count
    R = factors.combine(torch.diag(1 / factors.singular_values))
    Q = torch.linalg.inv(planted.inputs.double() @ R.T) * factors.singular_values[:, None]
    cosine = unit(candidates) @ unit(Q, 0)
    assert bool((cosine.abs().amax(0) > 1 - 1e-6).all())  # all ten directions, from one step


def test_weights_and_groups_steer_the_draws():
    generator = seeded(0)
    weights = torch.where(torch.arange(60) < 20, 1e6, 1.0)
    draw = Draw(50, weights=weights)
    order = draw.order(60, 10, generator, torch.device("cpu"))
    assert bool((order[:, :20] < 20).all())  # heavy rows come first
    assert draw.per_order(60, 10) == 3  # and the second half is left alone
    uniform = Draw(5000).order(60, 10, generator, torch.device("cpu"))[:, 0]
    share = torch.bincount(uniform, minlength=60) / len(uniform)
    assert float((share - 1 / 60).abs().max()) < 0.02

    planted = plant(4, m=80)
    side = factorise(planted.view).outputs
    among = torch.arange(12)
    candidates, _ = kernels(side, 3, generator, Draw(64, among=among))
    q = unit(candidates)
    assert int(((q @ side.white[among].T).abs() < 1e-9).sum(1).min()) >= 3


def test_a_prior_finds_batches_that_sampling_alone_cannot():
    """The paper's combination: rough inputs tell which rows are zeros of one sample."""
    planted = plant(32, m=320, n=100)
    noise = torch.randn(planted.inputs.shape, generator=seeded(1))
    finder = SamplingFinder(prior=planted.inputs + 0.5 * noise, max_samples=1_500_000)
    result = spear.invert(planted.view, model=planted.model, finder=finder)
    assert result.outcome is spear.Outcome.EXACT
    assert worst_error(result.inputs, planted.inputs) < 1e-4
    alone = spear.invert(planted.view, finder=SamplingFinder(max_samples=1_500_000))
    assert alone.outcome is spear.Outcome.INCONCLUSIVE
    assert len(alone.inputs) == 0


def test_a_prior_of_the_wrong_shape_is_refused():
    with pytest.raises(InvalidOption, match=r"prior to be approximate inputs \(k, 50\)"):
        spear.invert(plant(3).view, finder=SamplingFinder(prior=torch.randn(3, 7)))


def test_larger_submatrices_hold_noise_down():
    planted = plant(5, m=120, n=400, dtype=torch.float64)
    factors = factorise(spear.observe(planted.model, with_noise(planted.gradients, 1e-3)))
    assert factors.noisy
    generator = seeded(0)
    candidates, count = kernels(factors.outputs, 6, generator, Draw())
    assert count >= 4096
    R = factors.combine(torch.diag(1 / factors.singular_values))
    Q = torch.linalg.inv(planted.inputs @ R.T) * factors.singular_values[:, None]
    cosine = unit(candidates) @ unit(Q, 0)
    assert bool((cosine.abs().amax(0) > 0.999).all())


@pytest.mark.parametrize("finder", [SamplingFinder(), SamplingFinder(adaptive=False), "cascade"])
def test_uncentred_inputs(finder):
    """Where inputs share a mean, neurons are on or off for all samples, and mixes look sparse."""
    x = torch.rand(6, 80, generator=seeded(0))
    planted = plant(6, m=120, inputs=x)
    result = spear.invert(planted.view, model=planted.model, finder=finder)
    assert result.outcome is spear.Outcome.EXACT
    assert worst_error(result.inputs, x) < 1e-5


def test_an_explicit_threshold_is_used():
    planted = plant(4, m=60)
    result = spear.invert(planted.view, finder=SamplingFinder(threshold=0.95, max_samples=10_000))
    assert result.outcome is spear.Outcome.INCONCLUSIVE
    assert len(result.inputs) == 0


def test_progress_comes_with_the_expected_total():
    steps = []
    planted = plant(4, m=60)
    spear.invert(planted.view, finder="sampling", on_progress=steps.append)
    search = [s for s in steps if s.stage == "search"]
    assert steps[0].stage == "factorise"
    assert steps[-1].stage == "judge"
    assert all(s.expected > 1 and s.batch_size == 4 for s in search)


def test_rows_below_the_batch_size_are_refused():
    planted = plant(6, m=60)
    with pytest.raises(InvalidOption, match="rows >= b - 1 = 5"):
        spear.invert(planted.view, finder=SamplingFinder(rows=2))


def test_larger_submatrices_also_solve_clean_updates():
    planted = plant(4, m=80)
    result = spear.invert(planted.view, finder=SamplingFinder(rows=5), model=planted.model)
    assert result.outcome is spear.Outcome.EXACT


def test_a_finder_is_satisfied_below_one_only_on_noisy_updates():
    factors = factorise(plant(4).view)
    assert SamplingFinder().satisfied(factors, 1.0)
    assert not SamplingFinder().satisfied(factors, 0.999)
    assert SamplingFinder(stop_match=0.9).satisfied(factors, 0.95)


def test_independent_submatrices_are_one_of_each_block():
    planted = plant(5, m=90)
    side = factorise(planted.view).outputs
    generator = seeded(0)
    alone, tried = kernels(side, 4, generator, Draw(300, independent=True))
    assert tried == Draw(300, independent=True).submatrices(side, 4) == 300
    _, of_all = kernels(side, 4, generator, Draw(300))
    assert of_all == 5 * 300
    finder = SamplingFinder(independent=True, max_samples=20_000)
    result = spear.invert(planted.view, model=planted.model, finder=finder)
    assert result.outcome is spear.Outcome.EXACT
    assert len(alone)


def test_no_submatrix_where_rows_are_too_few():
    side = factorise(plant(5, m=90).view).outputs
    draw = Draw(8, among=torch.arange(4))
    q, tried = kernels(side, 4, torch.Generator(), draw)
    assert q.shape == (0, 5)
    assert tried == draw.submatrices(side, 4) == 1
