import math

import pytest
import torch
from torch import nn

import spear
from spear import InvalidOption, InvalidUpdate, Outcome, Proof, SamplingFinder
from spear.baselines import (
    CocktailPartyAttack,
    FeatureInversion,
    GeipingAttack,
    pixel_bounds,
    prior_from,
)
from spear.baselines import cocktail as party
from spear.baselines.geiping import (
    gradient_distance,
    gradients_by_name,
    layered_distance,
    whole_distance,
)
from spear.factors import factorise
from spear.federated import fedsgd
from spear.metrics import score
from spear.update.layers import network_after
from support.planted import bare, plant, real_batch, seeded

CROSS_ENTROPY = nn.functional.cross_entropy


def cifar_batch(root, b, seed, width=200):
    images, model, x, y = real_batch(root, "cifar10", b, width, seed)
    known = {"shape": images.shape, "bounds": pixel_bounds(images.mean, images.std)}
    return images, model, x, y, known


def noise_like(x):
    """Of its own seed: plant() and the attacks' starts draw from seed 0."""
    return torch.randn(x.shape, generator=seeded(99), dtype=x.dtype)


def geiping(planted, generator=None, max_seconds=None, on_progress=None, **options):
    attack = GeipingAttack(total_variation=0, boxed=False, **options)
    known = {"model": planted.model, "labels": planted.labels, "generator": generator}
    known |= {"max_seconds": max_seconds, "on_progress": on_progress}
    return attack.invert(planted.view, **known)


# The distance between gradients


@pytest.mark.parametrize("low_rank", [True, False])
def test_both_ways_give_one_distance_and_one_slope(low_rank):
    planted = plant(6, m=60, n=90, dtype=torch.float64)
    view, labels = planted.view, planted.labels
    whole = whole_distance(view, planted.model, labels, CROSS_ENTROPY)
    behind = network_after(planted.model, "0")
    layered = layered_distance(factorise(view), behind, labels, CROSS_ENTROPY, low_rank=low_rank)
    X = noise_like(planted.inputs).requires_grad_()
    one, other = whole(X), layered(X)
    assert float(one.detach()) > 0.01
    assert torch.allclose(one, other, rtol=1e-10)
    slope, same = (torch.autograd.grad(value, X)[0] for value in (one, other))
    assert torch.allclose(slope, same, rtol=1e-7, atol=1e-12)


def test_the_distance_is_zero_at_the_truth_and_one_cosine_over_all_parameters():
    planted = plant(4, m=40, n=30, dtype=torch.float64)
    view = planted.view
    distance = gradient_distance(factorise(view), planted.model, planted.labels, CROSS_ENTROPY)
    assert abs(float(distance(planted.inputs.clone().requires_grad_()).detach())) < 1e-12
    guess = noise_like(planted.inputs)
    sent = gradients_by_name(view)
    mine = fedsgd(planted.model, guess, planted.labels)
    a, b = (torch.cat([g[name].flatten() for name in sorted(sent)]) for g in (sent, mine))
    expected = 1 - float(nn.functional.cosine_similarity(a, b, 0))
    assert float(distance(guess.requires_grad_()).detach()) == pytest.approx(expected, rel=1e-9)


def test_noise_is_not_projected_away():
    """The gradient of a noisy update is matched as it came, not its b singular vectors."""
    planted = plant(5, m=80, n=200, dtype=torch.float64)
    G = planted.gradients["0.weight"]
    noisy = G + 0.01 * G.std() * noise_like(G)
    view = spear.observe(planted.model, {**planted.gradients, "0.weight": noisy})
    factors = factorise(view)
    assert factors.noisy
    X = noise_like(planted.inputs).requires_grad_()
    values = [
        distance(X).detach()
        for distance in (
            whole_distance(view, planted.model, planted.labels, CROSS_ENTROPY),
            gradient_distance(factors, planted.model, planted.labels, CROSS_ENTROPY),
        )
    ]
    assert torch.allclose(values[0], values[1], rtol=1e-10)


# Geiping et al.


def test_geiping_comes_near_real_images(data_root):
    images, model, x, y, known = cifar_batch(data_root, 2, 0)
    view = spear.observe(model, fedsgd(model, x, y))
    result = GeipingAttack(iterations=300).invert(view, model=model, labels=y, **known)
    found = score(images.to_pixels(result.inputs), images.to_pixels(x))
    assert found.mean > 22  # random noise: 7 dB; a grey image: 12 dB
    assert found.missing == 0
    assert result.outcome is Outcome.APPROXIMATE
    assert result.proof is Proof.NONE
    assert result.match is None
    assert not bool(result.certified.any())
    assert bool(result.approximate.all())
    assert result.batch_size == 2
    assert torch.equal(result.labels, y)
    assert result.stats["iterations"] == 300
    assert 0 <= result.stats["loss"] < 0.2
    assert result.stats["optimise"] > 0
    assert "proves nothing" in result.reason
    pixels = images.to_pixels(result.inputs)
    assert -1e-6 <= float(pixels.min())
    assert float(pixels.max()) <= 1 + 1e-6


def test_geiping_same_seed_same_bits_and_other_seed_other_bits():
    planted = plant(3, seed=1)

    def run(seed):
        return geiping(planted, seeded(seed), iterations=20).inputs

    assert torch.equal(run(0), run(0))
    assert not torch.equal(run(0), run(1))


def test_the_callers_modes_are_no_obstacle():
    planted = plant(3, seed=1)
    free = geiping(planted, iterations=5).inputs
    with torch.no_grad():
        assert torch.equal(geiping(planted, iterations=5).inputs, free)
    view = planted.view
    attack = GeipingAttack(iterations=5, total_variation=0, boxed=False)
    with torch.inference_mode():
        again = attack.invert(view, model=planted.model, labels=planted.labels).inputs
    assert torch.equal(again, free)


def test_of_several_restarts_the_lowest_objective_wins():
    planted = plant(4, seed=1)
    generator = seeded(0)
    single = [geiping(planted, generator, iterations=40) for _ in range(3)]
    result = geiping(planted, iterations=40, restarts=3)
    best = min(single, key=lambda r: r.stats["loss"])
    assert result.stats["loss"] == best.stats["loss"]
    assert torch.equal(result.inputs, best.inputs)
    assert result.stats["iterations"] == 120


@pytest.mark.parametrize(("init", "signed"), [("randn", True), ("rand", False), ("zeros", True)])
def test_every_start_descends(init, signed):
    planted = plant(3, m=80, seed=1)
    start = geiping(planted, iterations=1, init=init, signed=signed).stats["loss"]
    assert geiping(planted, iterations=200, init=init, signed=signed).stats["loss"] < start / 2


def test_geiping_attacks_convolutions_and_leaves_the_model_alone():
    features = nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten())
    model = nn.Sequential(features, nn.Linear(6 * 36, 40), nn.ReLU(), nn.Linear(40, 10))
    x, y = torch.rand(3, 3, 8, 8), torch.tensor([1, 5, 9])
    view = spear.observe(model, fedsgd(model, x, y))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    known = {"model": model, "labels": y, "bounds": (0.0, 1.0)}
    with pytest.raises(InvalidOption, match="'1' does not read the data"):
        GeipingAttack(total_variation=0).invert(view, **known)
    few, many = (
        GeipingAttack(iterations=n).invert(view, shape=(3, 8, 8), **known) for n in (1, 150)
    )
    assert many.inputs.shape == (3, 3 * 8 * 8)
    assert many.stats["loss"] < few.stats["loss"] / 2
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


def test_geiping_stops_in_time():
    planted = plant(3, seed=1)
    result = geiping(planted, max_seconds=0.3, iterations=10**6)
    assert result.inputs.shape == planted.inputs.shape
    assert 0 < result.stats["iterations"] < 10**5
    assert "max_seconds = 0.3 had passed" in result.reason


@pytest.mark.parametrize("attack", [GeipingAttack(boxed=False), CocktailPartyAttack()])
def test_ctrl_c_returns_what_there_is(attack):
    planted = plant(3, n=48, seed=1)

    def interrupt(progress):
        if progress.done > 3:
            raise KeyboardInterrupt

    result = attack.invert(
        planted.view,
        model=planted.model,
        labels=planted.labels,
        shape=(3, 4, 4),
        on_progress=interrupt,
    )
    assert result.stats["interrupted"] == 1
    assert result.stats["iterations"] < attack.iterations
    assert result.inputs.shape == planted.inputs.shape
    assert result.inputs.isfinite().all()
    assert result.outcome is Outcome.APPROXIMATE
    assert "interrupted" in result.reason


def test_progress_says_how_far():
    steps = []
    geiping(plant(3, seed=1), on_progress=steps.append, iterations=30, restarts=2)
    assert steps
    assert all(s.stage == "optimise" and s.expected == 60 and s.batch_size == 3 for s in steps)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"labels": None}, "expected labels="),
        ({"labels": torch.tensor([1, 2])}, "shows 3 samples, but 2 labels"),
        ({"labels": torch.tensor([1, 2, 10])}, "do not run on inputs"),
        ({"labels": torch.tensor([1, 2, -1])}, "labels >= 0"),
        ({"labels": torch.tensor([0.5, 1.0, 2.0])}, "of int64"),
        ({"model": None}, "expected model="),
        ({"model": nn.Linear(48, 10)}, "not this model's"),
        ({"shape": (3, 4, 5)}, "holds 60 values, the layer reads 48"),
        ({"shape": (48,)}, r"\(..., height, width\)"),
        ({"shape": (3, 0, 4)}, "sizes >= 1"),
        ({"shape": None}, "expected shape="),
        ({"bounds": None}, "expected bounds="),
        ({"bounds": (1.0, 0.0)}, "low < high"),
        ({"bounds": (torch.zeros(4, 1, 1), 1.0)}, "do not fit a sample"),
        ({"bounds": 1.0}, r"expected bounds = \(low, high\)"),
        ({"max_seconds": 0}, "max_seconds > 0"),
    ],
)
def test_bad_calls_say_what_is_wrong(change, message):
    planted = plant(3, n=48)
    call = {
        "model": planted.model,
        "labels": planted.labels,
        "shape": (3, 4, 4),
        "bounds": (-9.0, 9.0),
    }
    with pytest.raises(InvalidOption, match=message):
        GeipingAttack(iterations=1).invert(planted.view, **{**call, **change})


def test_all_problems_are_told_at_once():
    with pytest.raises(InvalidOption, match=r"model=.*labels=.*shape=.*bounds="):
        GeipingAttack().invert(plant(3).view)


def test_an_update_that_names_no_layer_is_refused():
    planted = plant(3)
    attack = GeipingAttack(total_variation=0, boxed=False)
    with pytest.raises(InvalidOption, match="does not name its layer"):
        attack.invert(bare(planted.view), model=planted.model, labels=planted.labels)


@pytest.mark.parametrize("attack", [GeipingAttack(), CocktailPartyAttack()])
def test_what_is_no_update_is_refused(attack):
    with pytest.raises(InvalidUpdate, match=r"call spear\.observe"):
        attack.invert([torch.zeros(3, 3)])


@pytest.mark.parametrize(
    ("attack", "options"),
    [
        (GeipingAttack, {"iterations": 0}),
        (GeipingAttack, {"restarts": 0}),
        (GeipingAttack, {"lr": 0.0}),
        (GeipingAttack, {"lr": math.nan}),
        (GeipingAttack, {"total_variation": -1.0}),
        (GeipingAttack, {"init": "ones"}),
        (CocktailPartyAttack, {"iterations": 0}),
        (CocktailPartyAttack, {"lr": -1.0}),
        (CocktailPartyAttack, {"temperature": 0.0}),
        (CocktailPartyAttack, {"independence": -1.0}),
        (CocktailPartyAttack, {"total_variation": math.inf}),
        (CocktailPartyAttack, {"sparse": math.nan}),
        (FeatureInversion, {"iterations": 0}),
        (FeatureInversion, {"lr": 0.0}),
        (FeatureInversion, {"total_variation": -1.0}),
        (FeatureInversion, {"decay": math.nan}),
    ],
)
def test_options_are_checked(attack, options):
    with pytest.raises(InvalidOption, match="expected"):
        attack(**options)


# The cocktail party


def test_the_cocktail_party_comes_near_real_images(data_root):
    images, model, x, y, known = cifar_batch(data_root, 4, 0)
    view = spear.observe(model, fedsgd(model, x, y))
    result = CocktailPartyAttack(iterations=1000).invert(view, **known)
    found = score(images.to_pixels(result.inputs), images.to_pixels(x))
    assert found.mean > 20  # grey images: 12 dB
    assert found.missing == 0
    assert result.batch_size == 4
    assert result.outcome is Outcome.APPROXIMATE
    assert result.proof is Proof.NONE
    assert result.labels is None
    assert not bool(result.certified.any())
    few, again = (CocktailPartyAttack(iterations=20).invert(view, **known) for _ in range(2))
    assert torch.equal(few.inputs, again.inputs)


def test_sparse_activations_are_unmixed_by_their_sides():
    """A layer behind a ReLU, as after a stack of convolutions: the attack's feature inversion."""
    planted = plant(8, m=200, n=100, depth=3, seed=1)
    view = planted.layer("2")
    truth = torch.relu(planted.inputs @ planted.model[0].weight.T + planted.model[0].bias).detach()
    result = CocktailPartyAttack(iterations=500).invert(view)
    assert result.inputs.shape == truth.shape
    cosine = nn.functional.normalize(result.inputs, dim=1) @ nn.functional.normalize(truth, dim=1).T
    assert float(cosine.amax(0).min()) > 0.98
    assert "computed from the data" in result.reason


def test_a_perfect_source_gets_its_exact_scale():
    planted = plant(5, m=80, n=200, dtype=torch.float64)
    factors = factorise(planted.view)
    R = factors.combine(torch.diag(1 / factors.singular_values))
    C = planted.inputs @ R.T  # the true coordinates
    wrong = C * torch.tensor([-3.0, 0.1, 7.0, -0.5, 2.0], dtype=C.dtype)[:, None]
    for bounds in (None, (-6.0, 6.0)):
        assert torch.allclose(party.scaled(wrong, R, factors, bounds, None), C, rtol=1e-6)


def test_negentropy_is_zero_for_gaussians_only():
    generator = seeded(0)
    z = torch.randn(1, 200_000, generator=generator, dtype=torch.float64)
    coin = z.sign()
    peaked = z**3 / (z**3).std()
    for sharpness in (1.0, 2.0):
        gaussian = float(party.negentropy(z, sharpness))
        assert gaussian < 1e-5
        assert float(party.negentropy(coin, sharpness)) > 30 * gaussian
        assert float(party.negentropy(peaked, sharpness)) > 30 * gaussian


def test_a_layer_too_narrow_has_no_sources():
    planted = plant(30, m=20, n=50)
    result = CocktailPartyAttack(total_variation=0).invert(planted.view)
    assert result.outcome is Outcome.FAILED
    assert len(result.inputs) == 0
    assert "no gap" in result.reason


def test_one_sample_is_its_own_source():
    planted = plant(1, m=20, n=50)
    result = CocktailPartyAttack(iterations=3, total_variation=0).invert(planted.view)
    assert torch.allclose(result.inputs, planted.inputs, atol=1e-4)


# The prior


def test_projection_never_adds_to_an_error():
    planted = plant(6, m=60, n=90)
    rough = planted.inputs + 0.7 * noise_like(planted.inputs)
    better = prior_from(planted.view, rough)
    before, after = ((guess - planted.inputs).norm(dim=1) for guess in (rough, better))
    assert bool((after < before / 2).all())
    assert torch.equal(prior_from(planted.view, rough, project=False), rough)
    assert torch.allclose(prior_from(planted.view, planted.inputs), planted.inputs, atol=1e-3)


def test_guesses_that_are_not_finite_are_left_out():
    planted = plant(3)
    broken = planted.inputs.clone()
    broken[1, 5] = math.nan
    for project in (True, False):
        assert len(prior_from(planted.view, broken, project=project)) == 2


def test_bad_priors_are_refused():
    view = plant(3).view
    with pytest.raises(InvalidOption, match=r"expected approximate inputs \(k, 50\)"):
        prior_from(view, torch.randn(3, 7))


def test_an_optimisation_attack_leads_the_sampling_to_an_exact_batch(data_root):
    """The paper's combination at b = 20, m = 200: alone it takes tens of millions of submatrices."""
    images, model, x, y, known = cifar_batch(data_root, 20, 0)
    view = spear.observe(model, fedsgd(model, x, y))
    guess = GeipingAttack(iterations=150).invert(view, model=model, labels=y, **known)
    prior = prior_from(view, guess.inputs)
    finder = SamplingFinder(prior=prior, max_samples=500_000)
    result = spear.invert(view, model=model, finder=finder)
    assert result.outcome is Outcome.EXACT
    assert score(images.to_pixels(result.inputs), images.to_pixels(x)).exact
    alone = spear.invert(view, finder=SamplingFinder(max_samples=500_000))
    assert len(alone.inputs) < 20
    assert alone.outcome is not Outcome.EXACT
