import pytest
import torch

import spear
from planted import plant, worst_error
from spear import InvalidOption, SamplingFinder
from spear.directions import Watch
from spear.factors import factorise
from spear.sampling import kernels_by_gram, kernels_by_inverse


@pytest.mark.parametrize("b", [2, 3, 7, 12])
def test_one_inverse_gives_the_kernels_of_b_submatrices(b):
    """Every candidate vanishes on b-1 sampled rows: it is the kernel an SVD would give."""
    planted = plant(b, m=90)
    side = factorise(planted.view).outputs
    candidates, count = kernels_by_inverse(
        side.white, torch.Generator().manual_seed(0), inverses=64
    )
    assert count >= 64 * b
    assert len(candidates) > 0
    q = torch.nn.functional.normalize(candidates, dim=1)
    zeros = ((q @ side.white.T).abs() < 1e-9).sum(1)
    assert int(zeros.min()) >= b - 1


def test_most_candidates_are_refused_early_and_no_true_one_is_lost():
    planted = plant(10, m=200, n=60)
    factors = factorise(planted.view)
    generator = torch.Generator().manual_seed(1)
    candidates, count = kernels_by_inverse(factors.outputs.white, generator)
    assert len(candidates) < 0.1 * count
    R = factors.combine(torch.diag(1 / factors.singular_values))
    Q = torch.linalg.inv(planted.inputs.double() @ R.T) * factors.singular_values[:, None]
    cosine = torch.nn.functional.normalize(candidates, dim=1) @ torch.nn.functional.normalize(
        Q, dim=0
    )
    assert bool((cosine.abs().amax(0) > 1 - 1e-6).all())  # all ten directions, from one step


def test_weights_steer_the_draws():
    white = torch.linalg.qr(torch.randn(60, 4, dtype=torch.float64)).Q
    weights = torch.where(torch.arange(60) < 20, 1e6, 1.0)
    white[20:] = torch.nan  # a heavy row comes first, so no light row is used in the first blocks
    white[:20, 0] = 0  # what is drawn has a kernel along the first axis
    candidates, _ = kernels_by_inverse(white[:20], torch.Generator().manual_seed(0), None, 8)
    assert candidates.shape[1] == 4
    heavy = weights.float()
    keys = torch.rand(50, 60, generator=torch.Generator().manual_seed(0))
    order = (-keys.log() / heavy).argsort(1)
    assert bool((order[:, :20] < 20).all())


def test_larger_submatrices_hold_noise_down():
    planted = plant(5, m=120, n=400, dtype=torch.float64)
    G = planted.gradients["0.weight"]
    sigma = 1e-3 * float(G.square().mean().sqrt())
    noisy = G + sigma * torch.randn(G.shape, generator=torch.Generator().manual_seed(0)).double()
    view = spear.observe(planted.model, {**planted.gradients, "0.weight": noisy})
    factors = factorise(view)
    assert factors.noisy
    candidates, count = kernels_by_gram(factors.outputs, 6, torch.Generator().manual_seed(0))
    assert count >= 4096
    R = factors.combine(torch.diag(1 / factors.singular_values))
    Q = torch.linalg.inv(planted.inputs @ R.T) * factors.singular_values[:, None]
    cosine = torch.nn.functional.normalize(candidates, dim=1) @ torch.nn.functional.normalize(
        Q, dim=0
    )
    assert bool((cosine.abs().amax(0) > 0.999).all())


@pytest.mark.parametrize("adaptive", [True, False])
@pytest.mark.parametrize("seed", range(3))
def test_uncentred_inputs(seed, adaptive):
    """Where inputs share a mean, neurons are on or off for all samples, and mixes look sparse."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(6, 80, generator=generator)
    planted = plant(6, m=120, inputs=x, seed=seed)
    finder = SamplingFinder(adaptive=adaptive)
    result = spear.invert(planted.view, model=planted.model, finder=finder)
    assert result.outcome is spear.Outcome.EXACT
    assert worst_error(result.inputs, x) < 1e-5


def test_the_budget_is_kept():
    planted = plant(10, m=60)
    result = spear.invert(planted.view, finder=SamplingFinder(max_samples=100))
    assert result.stats["submatrices"] <= 160  # whole shuffles of 60 rows
    assert result.outcome in (spear.Outcome.FAILED, spear.Outcome.PARTIAL)
    assert "budget" in result.reason
    assert "max_samples" in result.reason or result.outcome is spear.Outcome.PARTIAL


def test_an_explicit_threshold_is_used():
    planted = plant(4, m=60)
    result = spear.invert(planted.view, finder=SamplingFinder(threshold=0.95, max_samples=10_000))
    assert result.outcome is spear.Outcome.FAILED


def test_progress_comes_with_the_expected_total():
    steps = []
    planted = plant(4, m=60)
    spear.invert(planted.view, on_progress=steps.append)
    search = [s for s in steps if s.stage == "search"]
    assert steps[0].stage == "factorise"
    assert steps[-1].stage == "judge"
    assert all(s.expected > 1 and s.batch_size == 4 for s in search)


@pytest.mark.parametrize(
    "options",
    [
        {"max_samples": 0},
        {"false_rejection": 0.0},
        {"threshold": 1.0},
        {"stop_match": 1.5},
        {"rows": 0},
    ],
)
def test_options_are_checked(options):
    with pytest.raises(InvalidOption, match="expected"):
        SamplingFinder(**options)


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


def test_an_expired_watch_ends_the_search():
    factors = factorise(plant(4).view)
    watch = Watch(max_seconds=0.0)
    assert list(SamplingFinder().search(factors, generator=torch.Generator(), watch=watch)) == []
