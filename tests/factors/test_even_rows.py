"""Rows of one size: in rows where loud samples are off, faint ones stand alone, to all their digits."""

import dataclasses

import pytest
import torch

import spear
from spear import Outcome
from spear.factors import factorise
from spear.factors.factorisation import even_rows
from spear.federated import fedsgd
from spear.inversion import _worse
from spear.judge.fit import in_known_rows, relative_distance, weight_along
from spear.search.kernels import certain_zeros, unit
from support.planted import plant, seeded, true_directions, weighed

FAINT = torch.tensor([1.0, 1e-2, 1e-3, 1e-5, 1e-6, 1e-7])


def of_many_sizes(weights=FAINT, m=160):
    """A batch as trained networks have it, float32: the last sample drowns in the first one's rows."""
    return plant(len(weights), m=m, n=80, loss=weighed(weights, total=True))


def test_samples_below_the_rounding_of_the_loudest_are_counted():
    view = of_many_sizes().view
    factors = factorise(view)
    assert factors.batch_size == 6
    assert factors.row_factors is not None
    assert not factors.has_unresolved_samples
    # As sent, the last one is not a hundred roundings away.
    as_sent = factors.with_other_rows
    assert as_sent.batch_size != 6 or as_sent.has_weak_sample


def test_factors_are_powers_of_two_so_that_nothing_is_rounded():
    view = of_many_sizes().view
    factors = even_rows(view)
    assert bool((factors >= 1).all())
    assert torch.equal(factors, torch.exp2(factors.log2().round()))
    scaled = view.weight_grad * factors.to(view.weight_grad)[:, None]
    assert torch.equal(scaled.double(), view.weight_grad.double() * factors[:, None])


def test_gradients_come_back_as_the_client_has_them():
    factors = factorise(of_many_sizes().view)
    one = torch.eye(factors.b, dtype=torch.float64)
    R = factors.combine(torch.diag(1 / factors.singular_values))
    G = factors.view.weight_grad.double()
    rest = (factors.output_gradients(one) @ R - G).norm(dim=1)
    # A share of each row, however faint it is.
    assert float((rest / G.norm(dim=1).clamp_min(1e-300)).max()) < 1e-5
    assert factors.client_noise < factors.noise


def test_samples_of_one_size_are_left_as_they_are():
    factors = factorise(plant(6, m=160, n=80).view)
    assert factors.row_factors is None
    assert factors.with_other_rows is None


def test_rows_of_many_sizes_that_hold_no_faint_sample_are_left_as_they_are():
    planted = plant(6, m=160, n=80)
    model = planted.model
    with torch.no_grad():
        model[0].weight[:20] *= 1e-3  # what these neurons send is as loud, what they get is not
        model[2].weight[:, 20:30] *= 1e-3  # these send less
    sent = fedsgd(model, planted.inputs, planted.labels)
    factors = factorise(spear.observe(model, sent))
    assert factors.row_factors is None
    assert factors.with_other_rows.row_factors is not None
    assert factors.with_other_rows.batch_size == factors.batch_size == 6
    assert spear.invert(spear.observe(model, sent)).outcome is Outcome.EXACT


def test_noise_that_is_no_rounding_is_not_made_louder():
    planted = of_many_sizes()
    G = planted.view.weight_grad
    noisy = G + 1e-6 * G.abs().max() * torch.randn(G.shape, generator=seeded(0))
    view = spear.LayerUpdate(planted.view.weight, planted.view.bias, noisy, planted.view.bias_grad)
    assert factorise(view).row_factors is None


def test_noise_in_rows_that_no_sample_switches_on_is_no_sample():
    planted = of_many_sizes(FAINT[:3])
    G = planted.view.weight_grad.clone()
    G[:2] = 1e-9 * torch.randn(2, 80, generator=seeded(0))  # each alone, so it may be anything
    view = spear.LayerUpdate(planted.view.weight, planted.view.bias, G, planted.view.bias_grad)
    assert factorise(view).batch_size == 3


def test_a_zero_says_nothing_where_louder_samples_drown_it():
    planted = of_many_sizes()
    factors = factorise(planted.view)
    side = factors.outputs
    Q, off = true_directions(planted, factors)
    vectors = unit(Q, 0)
    zeros = (side.basis @ vectors).abs() <= side.zero  # (rows, b)
    hidden = side.hidden(vectors, zeros)
    assert not bool(hidden[:, 0].any())  # the loudest shows everywhere
    assert int((zeros & ~off)[:, -1].sum()) > 10  # the faintest is on there, and reads as zero
    assert int((zeros & ~off & ~hidden)[:, -1].sum()) < 3
    sure = certain_zeros(side, zeros.T, unit((vectors * side.scales[:, None]).T))
    assert torch.equal(sure == 0.5, hidden.T)


def test_faint_samples_come_back_exactly_and_no_wrong_one_is_certified():
    planted = of_many_sizes()
    result = spear.invert(planted.view)
    assert result.batch_size == 6
    off = torch.cdist(result.inputs.double(), planted.inputs.double())  # (6, 6)
    nearest = off.min(1)
    assert sorted(nearest.indices.tolist()) == list(range(6))
    assert float(nearest.values.max()) < 1e-3 * 80**0.5
    assert bool(result.certified.any())


@pytest.mark.parametrize("other", list(Outcome))
@pytest.mark.parametrize("one", list(Outcome))
def test_of_two_readings_the_worse_for_the_client_counts(one, other):
    def reading(outcome):
        inputs = torch.zeros(0 if outcome in (Outcome.FAILED, Outcome.INCONCLUSIVE) else 2, 3)
        proved = torch.full((len(inputs),), outcome in (Outcome.EXACT, Outcome.PARTIAL))
        return dataclasses.replace(empty, outcome=outcome, inputs=inputs, certified=proved)

    empty = spear.invert(plant(2).view)
    order = [
        Outcome.FAILED,
        Outcome.INCONCLUSIVE,
        Outcome.APPROXIMATE,
        Outcome.PARTIAL,
        Outcome.EXACT,
    ]
    assert _worse(reading(one), reading(other)).outcome is max(one, other, key=order.index)


def test_entries_that_are_not_known_are_not_compared():
    s = torch.randn(2, 9, generator=seeded(0), dtype=torch.float64)
    D = 3 * s
    D[0, 4:] = torch.nan
    assert torch.allclose(weight_along(s, D), torch.full((2,), 3.0, dtype=D.dtype))
    assert float(relative_distance(s, D).max()) < 1e-12
    D[0, 1] += 1
    assert float(relative_distance(s, D)[0]) > 0.1
    same, also = in_known_rows(s[1:], D[1:])
    assert torch.equal(same, s[1:])
    assert torch.equal(also, D[1:])
