"""Every rival explanation, tried where it is true and where it is not."""

import dataclasses
import itertools
import math

import pytest
import torch
from torch import nn

import spear
from spear import Outcome
from spear.factors import factorise
from spear.federated import fedsgd
from spear.judge import rivals
from spear.judge.causes import Cause
from spear.judge.layer import Recovered, bias_in_span
from spear.judge.selection import select
from spear.search.cascade import CascadeFinder
from spear.search.watch import Watch
from support.planted import (
    Planted,
    bare,
    clipped_sum,
    fit_of,
    gaussian,
    labels,
    net,
    plant,
    recovered,
    seeded,
    weighed,
)


def planted_net(x, y, outputs=10, *, loss=nn.functional.cross_entropy, **options):
    model = net(x.shape[1], outputs, **options)
    return Planted(model, x, y, fedsgd(model, x, y, loss))


def searched(view):
    """What the finder recovers, where samples and directions do not match one to one."""
    factors = factorise(view)
    chosen = None
    for pool in CascadeFinder().search(factors, generator=seeded(0), watch=Watch(max_seconds=10)):
        chosen = select(factors, pool, Watch())
        if chosen is not None and chosen.match == 1:
            break
    assert chosen is not None
    return Recovered(factors, chosen)


def scaled_biases(planted, factor):
    """An update whose biases have their own learning rate."""
    gradients = {
        name: g * factor if name.endswith("bias") else g for name, g in planted.gradients.items()
    }
    return spear.observe(planted.model, gradients)


# Mix.


@pytest.mark.parametrize("share", [0.0, 1.0, 0.01, 0.001])
@pytest.mark.parametrize("with_model", [True, False])
def test_a_sample_with_a_share_of_another_may_be_mixed(share, with_model):
    """q_0 + share q_1 in place of q_0: sample 1 then holds a share of sample 0."""
    planted = plant(6, m=120)
    mixing = torch.eye(6, dtype=torch.float64)
    mixing[1, 0] = share
    found = recovered(planted, mixing)
    ruling = rivals.mix(found, fit_of(found) if with_model else None)
    assert ruling.cause is Cause.MIXED
    right = (found.X - planted.inputs).abs().amax(1) < 1e-4
    assert bool(right[1]) is bool(ruling.excluded[1]) is (share == 0)
    assert bool(ruling.excluded.all()) is (share == 0)
    assert bool(right[ruling.excluded].all())


def test_a_mix_by_cancellation_is_not_taken_for_zeros():
    """With one output d_0 / s_0 - d_1 / s_1 vanishes where both are on: zeros all the same."""
    x, y = gaussian(4, 60), torch.ones(4, 1)
    planted = planted_net(x, y, 1, loss=nn.BCEWithLogitsLoss())
    true = recovered(planted)
    D = true.factors.L @ true.selection.Q  # (m, b)
    both = (D[:, 0].abs() > 1e-3 * D.abs().max()) & (D[:, 1].abs() > 1e-3 * D.abs().max())
    mixing = torch.eye(4, dtype=torch.float64)
    mixing[1, 0] = -float((D[both, 0] / D[both, 1]).median())
    found = recovered(planted, mixing)
    assert int(found.selection.directions.zeros[:, 0].sum()) >= int(both.sum())
    for fit in (None, fit_of(found)):
        excluded = rivals.mix(found, fit).excluded
        assert not bool(excluded[:2].any())
    assert rivals.mix(true, None).excluded.tolist() == [True] * 4


def test_directions_that_nothing_holds_are_not_believed():
    """Any mix has as many zeros as were solved for. More zeros, or a replay, settle it."""
    narrow = plant(6, m=14, n=60, dtype=torch.float64)
    wide = plant(6, m=120, n=60, dtype=torch.float64)
    for planted, believed in ((narrow, False), (wide, True)):
        found = recovered(planted)
        directions = dataclasses.replace(
            found.selection.directions, redundancy=torch.zeros(6, dtype=torch.int64)
        )
        loose = Recovered(
            found.factors, dataclasses.replace(found.selection, directions=directions)
        )
        assert bool(rivals.mix(loose, None).excluded.all()) is believed
        assert not bool(rivals.mix(loose, None).excluded.any()) or believed


def test_only_samples_that_provably_are_not_in_a_wrong_direction_stay():
    planted = plant(5, m=200)
    mixing = torch.eye(5, dtype=torch.float64)
    mixing[1, 0] = 1.5
    found = recovered(planted, mixing)
    sound = torch.tensor([False, True, True, True, True])
    assert rivals.unmixed(found, sound)[1:].tolist() == [False, True, True, True]


# Other losses: what explains the others and not this one.


def test_two_samples_in_one_with_two_labels_contradict_the_loss_of_the_others():
    x, y = gaussian(5, 60), labels(5)
    twice, other = torch.cat([x, x[:1]]), torch.cat([y, (y[:1] + 1) % 10])
    found = searched(planted_net(twice, other).view)
    own = torch.cdist(found.X.float(), x).argmin(1)
    ruling = rivals.contradicted(fit_of(found))
    assert ruling.cause is Cause.CONTRADICTED
    assert (~ruling.excluded).tolist() == (own == 0).tolist()


def test_a_loss_that_explains_all_contradicts_none():
    fit = fit_of(recovered(plant(5, m=120)))
    assert rivals.contradicted(fit).excluded.tolist() == [True] * 5
    assert fit.loss.value in rivals.contradicted(fit).words


# Scale.


@pytest.mark.parametrize("outputs", [3, 10])
@pytest.mark.parametrize("zero", [True, False])
def test_a_labelled_gradient_fixes_the_scale(outputs, zero):
    """The softmax of outputs that are twice as large points elsewhere."""
    planted = planted_net(gaussian(5, 60), labels(5, outputs), outputs, zero=zero)
    found = recovered(planted)
    ruling = rivals.scale(found, fit_of(found))
    assert ruling.excluded.tolist() == [True] * 5
    assert ruling.assumptions == ()


@pytest.mark.parametrize("factor", [1.0, 2.0, 1.1, 1.002])
def test_free_targets_and_no_biases_leave_any_scale(factor):
    """Half the input, twice the gradient: a homogeneous network does the same in every layer."""
    targets = gaussian(5, 10, 100)
    planted = planted_net(gaussian(5, 60), targets, loss=nn.MSELoss(), zero=True)
    found = recovered(planted, view=scaled_biases(planted, factor))
    assert torch.allclose(found.X * factor, planted.inputs.double(), atol=1e-4)
    for loss in (None, nn.MSELoss()):
        ruling = rivals.scale(found, fit_of(found, loss))
        assert ruling.cause is Cause.SCALE
        assert not bool(ruling.excluded.any())


def test_biases_fix_the_scale_of_free_targets():
    targets = gaussian(5, 10, 100)
    planted = planted_net(gaussian(5, 60), targets, loss=nn.MSELoss())
    found = recovered(planted)
    ruling = rivals.scale(found, fit_of(found, nn.MSELoss()))
    assert ruling.excluded.tolist() == [True] * 5


@pytest.mark.parametrize("factor", [2.0, 1.1, 1.002])
@pytest.mark.parametrize("zero", [True, False])
def test_no_sample_at_a_wrong_scale_passes(factor, zero):
    """Biases with their own learning rate, whichever loss seems to explain the update."""
    planted = planted_net(gaussian(5, 60), labels(5), zero=zero)
    found = recovered(planted, view=scaled_biases(planted, factor))
    fit = fit_of(found)
    passed = rivals.scale(found, fit).excluded & rivals.contradicted(fit).excluded
    assert not bool((passed & fit.usable).any())


def test_a_layer_alone_assumes_the_scale():
    ruling = rivals.scale(recovered(plant(4, m=90)), None)
    assert bool(ruling.excluded.all())
    assert ruling.assumptions == (rivals.SCALED_ALIKE,)


# Merge.


@pytest.mark.parametrize("factor", [0.6, 0.9])
@pytest.mark.parametrize("pairs", [1, 4])
def test_one_output_and_a_darker_copy_merge_at_any_distance(factor, pairs):
    """If every sample has a copy, all weigh alike again: that assumption is listed."""
    x, y = gaussian(4, 60), labels(4, 2)
    x, y = torch.cat([x, factor * x[:pairs]]), torch.cat([y, y[:pairs]])
    loss = nn.BCEWithLogitsLoss()
    planted = planted_net(x, y[:, None].float(), 1, loss=loss, zero=True)
    found = searched(planted.view)
    assert found.b == 4
    merged = torch.cdist(found.X, x.double()).min(1).values > 1e-3
    assert int(merged.sum()) == pairs
    ruling = rivals.merge(found, fit_of(found, loss))
    assert ruling.cause is Cause.MERGED
    if pairs == 4 and bool(ruling.excluded.any()):
        assert rivals.NOT_ALL_MERGED in ruling.assumptions
    else:
        assert not bool((ruling.excluded & merged).any())


@pytest.mark.parametrize("outputs", [1, 2])
def test_one_sample_of_one_output_may_be_several_unless_told(outputs):
    x, y = gaussian(1, 60), torch.ones(1, dtype=torch.int64)
    loss = nn.BCEWithLogitsLoss() if outputs == 1 else nn.CrossEntropyLoss()
    targets = y[:, None].float() if outputs == 1 else y
    planted = planted_net(x, targets, outputs, loss=loss)
    for samples, single in ((None, False), (1, True), (2, False)):
        view = spear.observe(planted.model, planted.gradients, samples=samples)
        found = recovered(planted, view=view)
        ruling = rivals.merge(found, fit_of(found))
        assert ruling.excluded.tolist() == [single]
        assert not ruling.assumptions or not single


def test_many_samples_of_one_output_do_not_merge_by_equal_weights():
    """Equal weights of ten traces: twenty samples in pairs would be a coincidence, which is listed."""
    x, y = gaussian(10, 60), labels(10, 2)[:, None].float()
    loss = nn.BCEWithLogitsLoss()
    found = recovered(planted_net(x, y, 1, loss=loss, width=400))
    ruling = rivals.merge(found, fit_of(found, loss))
    assert ruling.excluded.tolist() == [True] * 10
    assert ruling.assumptions == (rivals.NOT_ALL_MERGED,)


@pytest.mark.parametrize("share", [0.0, 0.003])
def test_a_trace_that_weighs_two_is_told(share):
    x, y = gaussian(5, 60), labels(5)
    x, y = torch.cat([x, (1 - share) * x[:1]]), torch.cat([y, y[:1]])
    found = searched(planted_net(x, y).view)
    assert found.b == 5
    fit = fit_of(found)
    ruling = rivals.merge(found, fit)
    assert ruling.missing.startswith("1 of 5 samples weigh as much as several others")
    assert float(fit.weights.max() / fit.weights.min()) == pytest.approx(2, rel=1e-2)


def test_single_samples_are_not_called_several():
    found = recovered(plant(6, m=120))
    ruling = rivals.merge(found, fit_of(found))
    assert ruling.excluded.tolist() == [True] * 6
    assert ruling.missing == ""


def test_clipped_samples_are_not_called_several():
    """Weights differ, but just as clipping by norm makes them differ."""
    x, y = gaussian(6, 60), labels(6)
    model = net(60, 10)
    planted = Planted(model, x, y, clipped_sum(model, x, y, 0.1))
    found = recovered(planted)
    fit = fit_of(found)
    assert float(fit.weights.std() / fit.weights.mean()) > 1e-2
    product = fit.weights * rivals.gradient_norms(found, fit)
    assert float(product.std() / product.mean()) < 1e-4
    assert rivals.merge(found, fit).excluded.tolist() == [True] * 6


@pytest.mark.parametrize(("factor", "single"), [(1.0, True), (1.1, False)])
def test_a_sample_that_alone_was_not_clipped_weighs_as_one_of_all(factor, single, monkeypatch):
    """If the client divides by another number, its weight may be that of several."""
    monkeypatch.setattr(rivals, "merge_radius", lambda found, fit: 1e-2 * found.X.abs().amax(1))
    x, y = gaussian(6, 60), labels(6)
    model = net(60, 10)
    alone = [clipped_sum(model, x[[i]], y[[i]], 1e9).values() for i in range(6)]
    norms = torch.tensor([sum(float(g.square().sum()) for g in sent) ** 0.5 for sent in alone])
    share = float(norms.sort().values[:2].mean() / norms.median())
    sent = {name: factor * g for name, g in clipped_sum(model, x, y, share).items()}
    found = recovered(Planted(model, x, y, sent))
    ruling = rivals.merge(found, fit_of(found))
    assert ruling.excluded.sum() == (6 if single else 5)
    assert (rivals.DIVIDED_BY_ALL in ruling.assumptions) is single


def test_uneven_weights_with_room_for_a_merge_exclude_nothing():
    """Tiny features: all samples of a label are near-duplicates, and weights say nothing."""
    x, y = 1e-5 * gaussian(4, 60), torch.full((4,), 3)
    loss = weighed(torch.tensor([1.0, 1.7, 0.6, 2.3]))
    found = searched(planted_net(x, y, loss=loss).view)
    fit = fit_of(found)
    excluded = rivals.merge(found, fit).excluded
    wrong = (
        torch.cdist(found.X, x.double(), p=float("inf")).min(1).values > 1e-3 * found.value_range
    )
    assert not bool((excluded & wrong).any())


def test_a_layer_alone_assumes_that_nothing_merged_unless_told_of_more():
    planted = plant(4, m=90)
    for samples, single in ((None, True), (4, True), (5, False)):
        view = spear.observe(planted.model, planted.gradients, samples=samples)
        ruling = rivals.merge(recovered(planted, view=view), None)
        assert ruling.excluded.tolist() == [single] * 4
        assert ruling.assumptions == (() if samples == 4 else (rivals.NO_MERGE,))


@pytest.mark.parametrize(("share", "told", "single"), [(1, 4, True), (1, 8, False), (0.5, 8, True)])
def test_more_told_than_show_merge_unless_each_weighs_as_one_of_them(
    share, told, single, monkeypatch
):
    """One of eight samples weighs half as much as one of four; a pair weighs as much."""
    monkeypatch.setattr(rivals, "merge_radius", lambda found, fit: 1e-2 * found.X.abs().amax(1))
    planted = plant(4, m=90, n=60, depth=2)
    sent = {name: share * gradient for name, gradient in planted.gradients.items()}
    found = searched(spear.observe(planted.model, sent, samples=told))
    assert rivals.merge(found, fit_of(found)).excluded.tolist() == [single] * 4


def test_after_local_training_merges_are_a_coincidence_or_not_excluded():
    one, many = recovered(plant(2, m=90)), recovered(plant(12, m=200))
    assert rivals.merge_in_training(one, 9).assumptions == (rivals.NOT_ALL_PAIRED,)
    assert bool(rivals.merge_in_training(one, 9).excluded.all())
    assert not bool(rivals.merge_in_training(one, 1).excluded.any())
    ruling = rivals.merge_in_training(many, 1)
    assert bool(ruling.excluded.all())
    assert ruling.assumptions == (rivals.NOT_ALL_MERGED,)
    view = one.factors.view.told(samples=2)
    told = Recovered(dataclasses.replace(one.factors, view=view), one.selection)
    assert rivals.merge_in_training(told, 1).excluded.tolist() == [True, True]
    assert rivals.merge_in_training(told, 1).assumptions == ()
    view = one.factors.view.told(samples=4)
    more = Recovered(dataclasses.replace(one.factors, view=view), one.selection)
    assert not bool(rivals.merge_in_training(more, 9).excluded.any())


# How far apart samples may be that merge.


def pair(apart, *, darker, dtype=torch.float32):
    """Five samples, the first of them two: this far apart, per input."""
    x, y = gaussian(5, 60).to(dtype), labels(5)
    way = x[:1] if darker else gaussian(1, 60, 100).to(dtype)
    way = way / way.square().mean().sqrt()
    x = torch.cat([x[:1] + apart / 2 * way, x[1:], x[:1] - apart / 2 * way])
    model = net(60, 10).to(dtype)
    return Planted(model, x, torch.cat([y, y[:1]]), fedsgd(model, x, torch.cat([y, y[:1]])))


@pytest.mark.parametrize("darker", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_merges_is_within_the_merge_radius(darker, dtype):
    """The trace lies at the mean of the two, so it is off by half their distance."""
    unit = 1e-3 if dtype == torch.float32 else 2e-7
    merged = 0
    for apart in (unit * 10 ** (k / 3) for k in range(6)):
        planted = pair(apart, darker=darker, dtype=dtype)
        factors = factorise(planted.view)
        if factors.batch_size != 5 or not bias_in_span(factors):
            continue
        merged += 1
        mean = planted.inputs[:5].clone()
        mean[0] = (mean[0] + planted.inputs[5]) / 2
        found = recovered(dataclasses.replace(planted, inputs=mean), view=planted.view)
        radius = float(rivals.merge_radius(found, fit_of(found))[0])
        assert radius >= apart / 2
    assert 2 <= merged < 6  # farther ones are seen


def test_the_merge_radius_of_single_samples_is_small():
    """Well below the claimed error in float64, near it in float32: nothing is refused needlessly."""
    for dtype, most in ((torch.float32, 1e-2), (torch.float64, 1e-6)):
        found = recovered(plant(5, m=120, n=60, dtype=dtype))
        assert float(rivals.merge_radius(found, fit_of(found)).max()) < most


def test_the_merge_radius_grows_with_the_root_of_the_noise():
    found = recovered(plant(5, m=120, seed=1))
    fit = fit_of(found)
    factors = found.factors
    louder = dataclasses.replace(
        factors, noise=100 * factors.noise, zero=100 * factors.zero, spectrum=factors.spectrum
    )
    wider = rivals.merge_radius(Recovered(louder, found.selection), fit)
    ratio = wider / rivals.merge_radius(found, fit)
    assert bool((ratio > 2).all())
    assert bool((ratio < 10.5).all())


# Missing.


@pytest.mark.parametrize(("samples", "words"), [(None, ""), (4, ""), (3, ""), (6, "6 samples")])
def test_samples_are_missing_if_more_were_told(samples, words):
    planted = plant(4, m=90)
    said = rivals.missing(
        factorise(spear.observe(planted.model, planted.gradients, samples=samples))
    )
    assert bool(said) is bool(words)
    assert words in said


def test_an_input_that_is_zero_is_missing():
    x = gaussian(5, 60)
    x[0] = 0
    factors = factorise(planted_net(x, labels(5)).view)
    assert factors.b == 4
    assert "inputs are all zero" in rivals.missing(factors)


# Weights.


@pytest.mark.parametrize(
    ("weights", "sizes", "multiples"),
    [
        ([1, 1, 1, 2], [3, 3, 3, 1], [0, 0, 0, 1]),
        ([1, 1, 3, 2], [2, 2, 1, 1], [0, 0, 1, 1]),
        ([2, 2, 2, 1], [3, 3, 3, 1], [1, 1, 1, 0]),
        ([1, 1, 1, 1], [4, 4, 4, 4], [0, 0, 0, 0]),
        ([1, 1.37, 2.61, 0.73], [1, 1, 1, 1], [0, 0, 0, 0]),
        ([1, 1, 1, 2.015], [3, 3, 3, 1], [0, 0, 0, 1]),  # a pair that is a little apart
        ([1, 1, 1, 2.05], [3, 3, 3, 1], [0, 0, 0, 0]),
        ([1, 1, 1, 64], [3, 3, 3, 1], [0, 0, 0, 1]),
        ([1, 1, 1, 65], [3, 3, 3, 1], [0, 0, 0, 0]),
        ([1, 1 + 1e-7, 1, 1 + 1e-5], [3, 3, 3, 1], [0, 0, 0, 0]),
    ],
)
def test_weights_are_grouped_and_multiples_known(weights, sizes, multiples):
    values = torch.tensor(weights, dtype=torch.float64) / 7
    size, multiple = rivals._grouped(values, torch.full((4,), 1e-6, dtype=torch.float64))
    assert size.tolist() == sizes
    assert multiple.int().tolist() == multiples


@pytest.mark.parametrize("k", [1, 2, 3])
def test_the_chance_of_pairs_is_that_of_counting(k):
    cells = list(itertools.product(range(k), repeat=2 * k))
    paired = sum(all(cell.count(i) == 2 for i in range(k)) for cell in cells)
    assert rivals._chance_of_pairs(k) == pytest.approx(paired / len(cells))


def test_ten_pairs_are_a_coincidence_of_less_than_a_thousandth():
    assert rivals._chance_of_pairs(10) < 1e-3 < rivals._chance_of_pairs(4)


def test_a_curved_loss_shows_pairs_a_straight_one_does_not():
    """Binary cross-entropy: outputs far apart do not weigh as two of their mean."""
    x, y = gaussian(6, 60), labels(6, 2)[:, None].float()
    loss = nn.BCEWithLogitsLoss()
    model = net(60, 1)
    with torch.no_grad():
        model[2].weight *= 20  # outputs from -3 to 3
    planted = Planted(model, x, y, fedsgd(model, x, y, loss))
    fit = fit_of(recovered(planted), loss)
    share = rivals._unseen_share(fit, torch.full((6,), 1e-6, dtype=torch.float64))
    assert bool((share < 0.5).all())
    assert bool((share > 0).all())
    loose = rivals._unseen_share(fit, torch.full((6,), 1e6, dtype=torch.float64))
    assert loose.tolist() == [1] * 6


def test_one_sample_has_no_spread_of_outputs():
    planted = planted_net(gaussian(1, 60), torch.ones(1, 1), 1, loss=nn.BCEWithLogitsLoss())
    fit = fit_of(recovered(planted))
    assert rivals._unseen_share(fit, torch.zeros(1, dtype=torch.float64)).tolist() == [1]


@pytest.mark.parametrize("depth", [2, 3])
def test_gradient_norms_are_those_that_clipping_takes(depth):
    """Over all parameters, each sample on its own, as Opacus has them."""
    x, y = gaussian(5, 60), labels(5)
    planted = planted_net(x, y, depth=depth)
    found = recovered(planted)
    norms = rivals.gradient_norms(found, fit_of(found))
    alone = [fedsgd(planted.model, x[i : i + 1], y[i : i + 1]).values() for i in range(5)]
    wanted = torch.tensor([math.sqrt(sum(float(g.square().sum()) for g in part)) for part in alone])
    ratio = norms / wanted
    assert torch.allclose(ratio / ratio.mean(), torch.ones(5, dtype=torch.float64), atol=1e-4)


def test_the_spread_is_between_samples_or_within_one():
    X = torch.tensor([[0.0, 0.0], [3.0, 4.0]])
    assert rivals._spread(X) == pytest.approx(5 / math.sqrt(2))
    assert rivals._spread(torch.tensor([[1.0, 3.0]])) == pytest.approx(math.sqrt(2))
    assert rivals._spread(torch.ones(1, 1)) == 0


def test_more_samples_than_columns_that_are_used():
    """Of one-hot columns many are empty: there may be fewer left than samples were read."""
    factors = factorise(plant(6, m=60, n=40).view)
    used = torch.arange(40) < 5
    assert rivals.missing(dataclasses.replace(factors, live_columns=used)) == ""


def test_twins_in_one_trace_are_no_sample():
    """One output: a sample and its twin leave their mean and, from a row that only one switches on, a
    rest a hundred times fainter, which the search leaves out as it would a faint sample."""
    x = gaussian(1, 80, 1)
    x = torch.cat([x, x + 0.003 * gaussian(1, 80, 101)])
    loss = nn.BCEWithLogitsLoss()
    planted = planted_net(x, torch.ones(2, 1), 1, loss=loss, width=300, seed=1)
    result = spear.invert(bare(planted.view))
    assert (result.outcome, result.cause) == (Outcome.APPROXIMATE, Cause.MERGED)


@pytest.mark.parametrize("seed", [13, 14])
def test_mixes_of_twins_are_no_samples(seed):
    """A sample and its twin on the same neurons: their difference shows a little, and two mixes of them
    have zeros to spare in rows where it drowns. Both inputs were all but their mean."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(4, 200, generator=generator)
    x = torch.cat([x, x[:1] + 0.02 * torch.randn(1, 200, generator=generator)])
    y = torch.randint(5, (4,), generator=generator)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(200, 300), nn.ReLU(), nn.Linear(300, 5))
    targets = nn.functional.one_hot(torch.cat([y, y[:1]]), 5).float()
    result = spear.invert(bare(spear.observe(model, fedsgd(model, x, targets, nn.MSELoss()))))
    error = torch.cdist(result.inputs.double(), x.double()).min(1).values / 200**0.5
    assert float(error.max()) > 5e-3
    assert (result.outcome, int(result.certified.sum())) == (Outcome.PARTIAL, 3)
    assert float(error[result.certified].max()) < 1e-4
