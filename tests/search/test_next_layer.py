"""Samples by what the next layer's gradient says of their activations."""

import dataclasses
import math

import pytest
import torch

import spear
from spear import Outcome
from spear.factors import factorise
from spear.search.cascade import _MessageRounds
from spear.search.deadline import NEVER
from spear.search.dual import balance, deflate, read_samples
from spear.search.kernels import unit
from spear.search.next_layer import (
    Messages,
    NextLayer,
    directions_off,
    log_mills,
    outside,
    rows_given,
    search_by_messages,
    spans,
)
from spear.search.watch import Watch
from support.planted import plant, seeded, truth, with_noise, worst_error

B, M = 30, 80  # more than a third: rows alone find few of them


@pytest.fixture(scope="module")
def planted():
    return plant(B, m=M, n=120, depth=4, seed=1)


@pytest.fixture(scope="module")
def known(planted):
    return truth(planted)


@pytest.fixture(scope="module")
def following(known):
    return NextLayer.of(known.factors)


def test_activations_of_samples_lie_in_the_span_and_others_do_not(known, following):
    assert float(outside(following, known.Z).max()) < 1e-5
    assert float(outside(following, known.Z + known.Z.roll(1, 1)).min()) > 1e-2


def test_messages_settle_on_samples_and_on_nothing_else(known, following):
    z = search_by_messages(balance(known.whole), following, 128, 80, seeded(0), Watch())
    cosine = unit(z, 0).T @ unit(known.Z, 0)  # (k, B)
    assert float((1 - cosine.amax(1)).max()) < 1e-4
    assert len(set(cosine.argmax(1).tolist())) >= B / 3
    q = directions_off(known.factors.outputs, z, NEVER)
    error = 1 - (unit(q) @ known.q.T).abs().amax(1)  # a row near zero may be on the wrong side
    assert int((error < 1e-9).sum()) >= 0.9 * z.shape[1]


def test_the_same_seed_gives_the_same_bits(known, following):
    first, again = (
        search_by_messages(balance(known.whole), following, 32, 40, seeded(3), Watch())
        for _ in range(2)
    )
    assert torch.equal(first, again)


def test_samples_that_were_found_leave_the_span(known, following):
    d = known.factors.outputs.white @ known.q.T  # (rows, B)
    rest = following.without(3.0 * d[:, :10], NEVER)
    assert rest.missing.shape[1] == B - 10
    axes = spans(balance(known.whole), rest)[1].axes
    y = unit(known.Z.clamp_min(0), 0)
    left = (y - axes @ (axes.T @ y)).norm(dim=0)
    assert float(left[10:].max()) < 1e-4 < 0.1 < float(left[:10].min())


def test_a_mix_of_samples_takes_nothing_away(known, following):
    d = known.factors.outputs.white @ (known.q[:1] + known.q[1:2]).T
    assert following.without(d, NEVER).missing.shape[1] == B


def cosines(known, c):
    """Between c (B, b) and the true ones, as the search sees them."""
    turn = balance(known.whole).q_basis
    return (unit(c @ turn) * unit(known.C @ turn)).sum(1).abs()


def test_inputs_are_read_from_zeros_exactly_whatever_is_missing(known, following):
    c, fits = following.read(known.whole, known.off.T, NEVER)
    assert bool(fits.all())
    assert float(cosines(known, c).min()) > 1 - 1e-6
    by_signs, _ = read_samples(known.whole, known.q[:10], known.off.T[:10])
    assert float(cosines(known, torch.cat([by_signs, c[10:]]))[:10].median()) < 0.99


def test_common_zeros_of_samples_have_no_input(known, following):
    off = known.off.T
    assert not bool(following.read(known.whole, off & off.roll(1, 0), NEVER)[1].any())
    assert len(following.read(known.whole, off[:0], NEVER)[0]) == 0


def test_what_is_left_holds_the_missing_samples_exactly(known):
    found = _MessageRounds(known.factors, known.whole, 80)
    q, off = known.q[:10], known.off.T[:10]
    mix, common = unit(q[:1] + q[1:2]), off[:1] & off[1:2]
    for k in (4, 10):  # the next ones beside those that were read
        rest = deflate(known.whole, *found.samples(q[:k], off[:k], Watch()))
        axes = torch.linalg.qr(rest.q_basis).Q
        assert float((known.q[10:] @ axes).norm(dim=1).min()) > 1 - 1e-9
    kept, _ = found.samples(torch.cat([q, mix]), torch.cat([off, common]), Watch())
    assert torch.equal(kept, q)


def test_rows_come_first_and_the_next_layer_where_it_finds_more(known):
    rounds = _MessageRounds(known.factors, known.whole, 80)
    assert not rounds.wanted(B)
    assert not rounds.compared(0.5)
    assert not rounds.wanted(B // 2)
    assert not rounds.compared(0.05)
    assert rounds.wanted(B // 2)
    assert rounds.compared(0.1)
    assert rounds.wanted(B // 2)  # 0.1 is little, but more than 0.05
    assert rounds.compared(0.01)
    assert not rounds.wanted(B // 2)


def test_without_the_model_the_span_stays(known, following):
    d = known.factors.outputs.white @ known.q.T
    blind = dataclasses.replace(following, back=None)
    assert blind.without(d, NEVER) is blind


@pytest.mark.parametrize("deviation", [0.05, 0.3, 1.0])
def test_a_row_is_what_integration_says(deviation):
    z, y = torch.randn(2, 40, 1, generator=seeded(1), dtype=torch.float64)
    variance = torch.tensor([[deviation**2]], dtype=torch.float64)
    seen_z, seen_y = rows_given(Messages(z, variance), Messages(y, 2 * variance))
    grid = torch.linspace(-12, 12, 24_001, dtype=torch.float64)  # of z, (1, points)
    relu = grid.clamp_min(0)
    log = -((z - grid).square() / 2 + (y - relu).square() / 4) / deviation**2
    weight = torch.softmax(log, 1)
    mean, active = (weight * grid).sum(1), (weight * relu).sum(1)
    torch.testing.assert_close(seen_z.values[:, 0], mean, atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(seen_y.values[:, 0], active, atol=1e-3, rtol=1e-3)
    spread = ((weight * grid.square()).sum(1) - mean.square()).mean()
    torch.testing.assert_close(seen_z.variance[0, 0], spread, atol=1e-3, rtol=1e-2)
    spread = ((weight * relu.square()).sum(1) - active.square()).mean()
    torch.testing.assert_close(seen_y.variance[0, 0], spread, atol=1e-3, rtol=1e-2)


def test_the_tail_of_a_normal_is_right_far_from_zero():
    a = torch.tensor([-60.0, -12, -3, 0, 3, 12, 60])
    expected = torch.special.log_ndtr(a.double()) + a.double().square() / 2 + math.log(2)
    torch.testing.assert_close(log_mills(a).double(), expected, atol=1e-2, rtol=1e-4)


def test_a_batch_of_more_than_a_third_of_the_neurons_comes_back(planted):
    result = spear.invert(planted.view, generator=seeded(0))
    assert result.outcome is Outcome.EXACT
    assert worst_error(result.inputs, planted.inputs) < 1e-3


def test_a_gradient_of_another_batch_only_costs_time():
    small = plant(12, m=80, n=60, depth=4, seed=1)
    other = plant(12, m=80, n=60, depth=4, seed=2)
    view = spear.observe(small.model, {**small.gradients, "2.weight": other.gradients["2.weight"]})
    assert NextLayer.of(factorise(view)) is not None
    result = spear.invert(view, generator=seeded(0))
    assert worst_error(result.inputs, small.inputs) < 1e-3
    assert result.outcome is not Outcome.EXACT  # the update contradicts itself


def test_a_noisy_or_masked_gradient_is_not_used(planted):
    noisy = spear.observe(planted.model, with_noise(planted.gradients, 1e-3))
    factors = factorise(noisy)
    assert factors.batch_size is None or NextLayer.of(factors) is None
    rest = {**planted.gradients, "2.weight": torch.zeros_like(planted.gradients["2.weight"])}
    assert NextLayer.of(factorise(spear.observe(planted.model, rest))) is None
