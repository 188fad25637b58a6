"""Factors against their definitions: noise, levels, parts, and the edges of each decision.

Each test notices small faults in `factors.py` that no other test noticed (tools/mutate.py).
"""

import dataclasses
import math

import pytest
import torch

import spear
import spear.factors
from planted import plant
from spear.directions import Watch
from spear.factors import (
    _fading,
    _noise,
    _sounding,
    _tells_all,
    batch_size_from,
    factorise,
)
from spear.judge.selection import select
from spear.streaming import Sketch, sketch
from test_factors import low_rank, view_of
from test_mutants_selection import inputs_pool, inputs_problem


@pytest.fixture(scope="module")
def planted():
    """Some neurons are off for every sample, some inputs are zero in all of them."""
    inputs = torch.rand(6, 80, generator=torch.Generator().manual_seed(1))
    inputs[:, [3, 40]] = 0
    return plant(6, m=100, inputs=inputs)


@pytest.fixture(scope="module")
def factors(planted):
    found = factorise(planted.view)
    assert 0 < int((~found.live_rows).sum()) < 60
    assert int((~found.live_columns).sum()) == 2
    return found


def with_noise(factors, noise):
    return dataclasses.replace(factors, noise=noise)


def test_noise_is_relative_to_the_usual_entry_of_the_live_part(factors):
    live = factors.view.weight_grad.double()[factors.live_rows][:, factors.live_columns]
    usual = float(live.square().mean().sqrt())
    assert factors.relative_noise == pytest.approx(factors.noise / usual, rel=1e-6)
    assert with_noise(factors, 1.1e-4 * usual).noisy
    assert not with_noise(factors, 0.9e-4 * usual).noisy


def test_uneven_is_a_faintest_sample_within_a_thousand_edges_of_noise(factors):
    faintest = float(factors.singular_values[-1])
    edge = math.sqrt(100) + math.sqrt(80)
    assert with_noise(factors, faintest / (0.9e3 * edge)).uneven
    assert not with_noise(factors, faintest / (1.1e3 * edge)).uneven


def test_a_part_is_what_lies_along_some_directions_and_the_rest_its_noise(factors):
    white = torch.randn(2, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    part = factors.within(white)
    span = torch.linalg.qr(factors.left @ white.T).Q  # (m, 2)
    G = factors.L @ factors.combine(torch.diag(1 / factors.singular_values))
    inside = span @ (span.T @ G)
    values = torch.linalg.svdvals(inside)[:2]
    loudest = float(torch.linalg.matrix_norm(G - inside, 2))
    assert (part.batch_size, part.faded, factors.faded) == (2, True, False)
    assert torch.allclose(part.singular_values, values)
    assert float(part.spectrum[-1]) == pytest.approx(loudest)
    assert torch.allclose(part.left @ (part.left.T @ G), inside, atol=1e-9)
    assert torch.allclose(part.left.T @ part.left, torch.eye(2, dtype=torch.float64), atol=1e-9)
    assert torch.allclose(part.L @ part.L.T, inside @ inside.T, atol=1e-9)
    assert part.noise == pytest.approx(loudest / math.sqrt(80))
    assert part.zero == pytest.approx(5 * loudest / math.sqrt(100))


def test_the_noise_of_a_part_is_no_less_than_that_of_the_whole(factors):
    all_of_it = factors.within(torch.eye(6, dtype=torch.float64))
    assert float(all_of_it.spectrum[-1]) == pytest.approx(factors.noise * math.sqrt(80))
    assert torch.allclose(all_of_it.singular_values, factors.singular_values)


def test_the_reach_of_a_preactivation_is_rounding_and_noise(factors):
    C = torch.randn(3, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    quiet, loud = with_noise(factors, 0.0), with_noise(factors, 1e-3)
    eps = torch.finfo(torch.float32).eps
    assert torch.allclose(quiet.reach(C), eps * C.norm(dim=1), atol=0)
    by_noise = 5e-3 * (C / factors.singular_values).norm(dim=1)
    assert torch.allclose(loud.reach(C), eps * C.norm(dim=1) + by_noise, atol=0)
    several = torch.stack([C, 2 * C])  # (2, 3, 6)
    assert torch.equal(loud.reach(several), torch.stack([loud.reach(C), loud.reach(2 * C)]))
    lengths = factors.view.weight.double().norm(dim=1)
    assert torch.allclose(factors.weight_lengths, lengths[:, None], rtol=1e-6)


def test_preactivations_before_and_after_training():
    planted = plant(4, m=60, n=40, dtype=torch.float64)
    gradients, model = planted.gradients, planted.model
    after = {name: p.detach() - 0.3 * gradients[name] for name, p in model.named_parameters()}
    factors = factorise(spear.observe(model, after=after, lr=0.3, epochs=1))
    C = planted.inputs @ factors.combine(torch.diag(1 / factors.singular_values)).T
    H, bias = factors.ends
    for end, W, b in (
        (0, model[0].weight, model[0].bias),
        (1, after["0.weight"], after["0.bias"]),
    ):
        expected = (planted.inputs @ W.T + b).T.detach()
        assert torch.allclose(H[end] @ C.T + bias[end], expected, atol=1e-9)
    assert torch.allclose(factors.bias_coordinates @ C.T, torch.ones(4).double(), atol=1e-9)


@pytest.mark.parametrize("side", ["outputs", "inputs"])
def test_a_side_is_a_white_basis_with_its_scales(factors, side):
    found = getattr(factors, side)
    live = factors.live_rows if side == "outputs" else factors.live_columns
    assert found.name == side
    assert (found.size, found.silent) == (len(live), int((~live).sum()))
    assert torch.allclose(found.white.T @ found.white, torch.eye(6).double(), atol=1e-6)
    assert torch.equal(found.basis, found.white * factors.singular_values)
    assert (found.zero, found.noisy) == (factors.zero, False)
    G = factors.view.weight_grad.double()
    other = G[factors.live_rows] if side == "outputs" else G[:, factors.live_columns].T
    assert torch.allclose(found.basis @ found.basis.T, other @ other.T, atol=1e-6)


# Decisions


@pytest.mark.parametrize(("b", "seen"), [(8, 8), (9, None), (10, None)])
def test_an_output_layer_shows_one_sample_less_than_it_has_classes(b, seen):
    """Its gradients sum to zero over the classes: nine samples of ten classes may be any number."""
    planted = plant(b, m=60, depth=3, classes=10)
    assert factorise(planted.layer("4")).batch_size == seen
    inner = plant(b, m=10, n=60, depth=3)
    assert factorise(inner.layer("0")).batch_size == (None if b == 10 else b)


def test_a_batch_larger_than_a_layer_with_sparse_inputs_has_no_size():
    D, X = low_rank(30, 80, 30)
    view = dataclasses.replace(view_of((D @ X).float(), D.sum(1).float()), relu="before")
    assert factorise(view).batch_size is None


def fading_view():
    """Forty samples, each fainter by a half: they end in rounding without a gap."""
    D, X = low_rank(100, 150, 40, decay=12)
    return view_of((D @ X).float(), D.sum(1).float())


def test_a_spectrum_that_fades_shows_the_samples_above_rounding():
    factors = factorise(fading_view())
    eps = torch.finfo(torch.float32).eps
    values = torch.linalg.svdvals(factors.view.weight_grad.double())
    expected = int((values >= 3 * eps * values[0]).sum())
    assert factors.faded
    assert factors.batch_size == expected
    assert 15 < expected < 30
    assert len(factors.spectrum) == expected + 1
    assert float(factors.spectrum[-1]) == pytest.approx(float(values[expected]), rel=1e-6)
    assert factors.zero == pytest.approx(5 * float(values[expected]) / 10, rel=1e-6)


def test_fading_is_told_from_levelling_off():
    eps = 1e-6
    fades = torch.logspace(0, -12, 25, dtype=torch.float64)  # half a decade each
    assert _fading(fades, eps) == 12  # 10^-5.5 is 3.2 roundings, 10^-6 one
    assert _fading(fades[:3], eps) == 0
    levels = torch.logspace(0, -11.9, 25, dtype=torch.float64)  # the median stays above rounding
    assert _fading(levels, eps) == 0
    assert _fading(fades[[0, 4, 12, 20]], eps) == 2  # four are enough
    assert _fading(fades[[0, 4, 11, 20]], eps) == 0


def test_rows_are_live_where_more_shows_than_noise():
    """Four samples: noise alone has the length sqrt(4) + 4 deviations at most."""
    values = torch.ones(4, dtype=torch.float64)
    lengths = torch.tensor([1.0, 1.0, 1.0, 1.0, 0.061, 0.059, 0.0, 1.0], dtype=torch.float64)
    left = torch.zeros(8, 4, dtype=torch.float64)
    left[:, 0] = lengths
    live = torch.tensor([True] * 7 + [False])
    found = _sounding(left, values, 0.01, live)
    assert found.tolist() == [True] * 5 + [False] * 3
    assert _sounding(left * 0.5, values * 2, 0.01, live).tolist() == found.tolist()
    # From 0.3 of a usual row on (here 0.05 x 6) a row of few samples looks like noise.
    assert _sounding(left, values, 0.049, live).tolist() == [True] * 4 + [False] * 4
    assert _sounding(left, values, 0.051, live).tolist() == live.tolist()
    nobody = torch.zeros(8, dtype=torch.bool)
    assert _sounding(left, values, 0.01, nobody).tolist() == nobody.tolist()


def test_a_neuron_that_shows_a_little_above_its_noise_is_live():
    """Ten deviations long, where the noise of six samples is sqrt(6) + 4 at most; and one at none."""
    D, X = low_rank(100, 150, 6)
    sigma = 1e-4
    D[7] *= 10 * sigma / float((D[7] @ X).norm())
    D[8] = 0
    noise = torch.randn(100, 150, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    factors = factorise(view_of(D @ X + sigma * noise, D.sum(1)))
    assert factors.batch_size == 6
    assert factors.noise == pytest.approx(sigma, rel=0.05)
    assert factors.live_rows.nonzero().flatten().tolist() == [i for i in range(100) if i != 8]
    assert float(factors.left[8].abs().max()) == 0


def test_the_noise_of_an_entry_overall_and_in_the_loudest_row():
    s = torch.tensor([3.0, 4.0], dtype=torch.float64)
    outside = torch.tensor([1.0, 2.0, 2.0, 0.0], dtype=torch.float64)
    overall, loudest = _noise(s, outside, 1, 4, 10)
    assert overall == pytest.approx(3 / math.sqrt(3 * 9))
    assert loudest == pytest.approx(2 / math.sqrt(9))
    # In one row the error may be below the mean's; it counts as the mean then.
    even = torch.full((4,), 0.5, dtype=torch.float64)
    overall, loudest = _noise(s, even, 3, 4, 100)
    assert loudest == overall == pytest.approx(1 / math.sqrt(97))


def test_noise_is_never_below_the_rounding_of_the_factorisation():
    s = torch.tensor([3.0, 4.0], dtype=torch.float64)
    floor = 5 * torch.finfo(torch.float64).eps / math.sqrt(4)
    assert _noise(s, torch.zeros(4, dtype=torch.float64), 1, 4, 10) == pytest.approx((floor, floor))
    loud = torch.ones(4, dtype=torch.float64)
    assert _noise(s, loud, 4, 4, 10) == pytest.approx((floor, floor))  # no row is left to show it
    assert _noise(s, loud, 10, 40, 10) == pytest.approx((floor / math.sqrt(10),) * 2)
    assert _noise(s, loud[:1], 1, 1, 10) == pytest.approx((2 * floor,) * 2)
    assert _noise(s[:0], loud[:0], 0, 0, 10) == (0, 0)


def sketch_of(leading, following, rest, outside):
    """Of a 400 x 900 gradient: its samples, the next value, and 1/sqrt(n)-th of `outside` a row."""
    values = torch.tensor([*leading, following], dtype=torch.float64)
    values = torch.cat([values, torch.full((400 - len(values),), rest, dtype=torch.float64)])
    rows = torch.full((400,), outside / 20, dtype=torch.float64)
    return Sketch(torch.zeros(400, len(leading), dtype=torch.float64), values, rows)


def test_a_sketch_tells_all_if_what_is_left_cannot_hide_a_sample():
    shape, eps = (400, 900), 1e-7
    samples = [1.0, 0.9, 0.8]
    rounding = eps * math.sqrt(1 + 0.81 + 0.64)
    assert _tells_all(sketch_of(samples, 1.2e-7, 5e-9, 1.9 * rounding), *shape, eps)
    assert not _tells_all(sketch_of(samples, 1.2e-7, 5e-9, 2.1 * rounding), *shape, eps)
    # More than rounding: then the next value must keep to the edge of noise of that energy.
    for b in (3, 200):
        m, n = 400 - b, 900 - b
        edge = 1e-3 / math.sqrt(m * n) * (math.sqrt(m) + math.sqrt(n))
        assert _tells_all(sketch_of([1.0] * b, 1.05 * edge, 0.5 * edge, 1e-3), *shape, eps)
        assert not _tells_all(sketch_of([1.0] * b, 1.15 * edge, 0.5 * edge, 1e-3), *shape, eps)
    # And the batch size must be the one that the values themselves give.
    hidden = [1.0, 0.9, 1e-4]
    assert batch_size_from(sketch_of(hidden, 1e-9, 1e-9, rounding).values, *shape, eps) == 3
    assert _tells_all(sketch_of(hidden, 1e-9, 1e-9, rounding), *shape, eps)
    assert not _tells_all(sketch_of(hidden[:2], 1e-4, 1e-9, rounding), *shape, eps)


@pytest.mark.parametrize(("levels", "negative"), [(5, 0), (50, 1)])
def test_up_to_ten_levels_an_entry_is_undecided(levels, negative):
    """The lowest input of a mix, so many levels of noise below zero: a contradiction or not?"""
    factors, _, vectors, zeros = inputs_problem()
    vectors[:, 0] = vectors[:, 0] - 0.5 * vectors[:, 1]
    pool = inputs_pool(factors, vectors, zeros)
    C = select(factors, pool, Watch()).C
    lowest = float(
        (factors.reconstruct(C).amin(1) / (C / factors.singular_values).norm(dim=1)).min()
    )
    side = dataclasses.replace(pool.side, zero=-lowest / levels)
    chosen = select(factors, dataclasses.replace(pool, side=side), Watch())
    assert (int(chosen.contradictions.sum()) > 0) is bool(negative)


def test_a_sketch_that_sees_only_the_loud_samples_is_not_believed(monkeypatch):
    """Sixty more samples, a thousand times fainter, lie behind the gap that the sketch shows."""
    D, X = low_rank(400, 900, 76)
    D[:, 16:] *= 1e-3
    view = view_of((D @ X).float(), D.sum(1).float())
    assert sketch(view.weight_grad, 400, torch.finfo(torch.float32).eps).rank == 16
    monkeypatch.setattr(spear.factors, "_WIDE", 150)
    assert factorise(view).batch_size == 76
