"""Factors against their definitions: bases, noise, levels, parts, and the edges of each decision."""

import dataclasses
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import spear
import spear.factors
from spear.factors import batch_size_from, factorise
from spear.factors.factorisation import _noise, _rows_with_signal, _sketch_is_conclusive
from spear.factors.streaming import Sketch
from spear.federated import fedsgd
from support.planted import gaussian, low_rank, plant, seeded, view_of, worst_error

# The factors and their two sides


@pytest.fixture(scope="module")
def partly_dead():
    """Factors of a batch that leaves some neurons off throughout and some inputs zero throughout."""
    inputs = torch.rand(6, 80, generator=seeded(1))
    inputs[:, [3, 40]] = 0
    found = factorise(plant(6, m=100, inputs=inputs).view)
    assert 0 < int((~found.live_rows).sum()) < 60
    assert int((~found.live_columns).sum()) == 2
    return found


def with_noise(factors, noise):
    return dataclasses.replace(factors, noise=noise)


def in_even_rows(factors, D):
    return D if factors.row_factors is None else D * factors.row_factors[:, None]


@settings(deadline=None, max_examples=20)
@given(
    m=st.integers(12, 80), n=st.integers(12, 80), b=st.integers(1, 8), seed=st.integers(0, 10_000)
)
def test_the_factors_multiply_back(m, n, b, seed):
    D, X = low_rank(m, n, b, seed)
    assume(int(D.any(1).sum()) > b)  # with as many live rows as samples there is no gap to see
    factors = factorise(view_of(D @ X, D.sum(1)))
    assert factors.batch_size == int(torch.linalg.matrix_rank(D))
    if factors.batch_size:
        R = factors.combine(torch.diag(1 / factors.singular_values))
        assert torch.allclose(factors.L @ R, in_even_rows(factors, D @ X), atol=1e-12)
        assert torch.allclose(R @ R.T, torch.eye(len(R), dtype=R.dtype), atol=1e-9)


@settings(deadline=None, max_examples=10)
@given(seed=st.integers(0, 1000), scale=st.floats(1e-20, 1e20))
def test_scaling_and_permuting_the_gradient_change_nothing(seed, scale):
    D, X = low_rank(40, 30, 5, seed)
    G = D @ X
    order = torch.randperm(40, generator=seeded(seed))
    plain = factorise(view_of(G, D.sum(1)))
    other = factorise(view_of(G[order] * scale, D[order].sum(1) * scale))
    assert other.batch_size == plain.batch_size
    assert torch.allclose(other.singular_values, plain.singular_values * scale, rtol=1e-9)
    assert other.zero == pytest.approx(plain.zero * scale, rel=10)


@pytest.mark.parametrize(("m", "n"), [(60, 500), (500, 60)])
def test_the_condition_number_is_not_squared(m, n):
    D, X = low_rank(m, n, 8, decay=11)  # squared, 1e-22 would be far below rounding
    factors = factorise(view_of(D @ X, D.sum(1)))
    assert factors.batch_size == 8
    D = in_even_rows(factors, D)
    outside = D - factors.left @ (factors.left.T @ D)
    assert float((outside.norm(dim=0) / D.norm(dim=0)).max()) < 1e-4
    assert torch.allclose(factors.left.T @ factors.left, torch.eye(8).double(), atol=1e-12)


@pytest.mark.parametrize("side", ["outputs", "inputs"])
def test_a_side_is_a_white_basis_with_its_scales(partly_dead, side):
    found = getattr(partly_dead, side)
    live = partly_dead.live_rows if side == "outputs" else partly_dead.live_columns
    assert found.name == side
    assert (found.size, found.empty_rows) == (len(live), int((~live).sum()))
    assert torch.allclose(found.white.T @ found.white, torch.eye(6).double(), atol=1e-6)
    assert torch.equal(found.basis, found.white * partly_dead.singular_values)
    assert (found.zero, found.noisy) == (partly_dead.zero, False)
    G = partly_dead.view.weight_grad.double()
    other = G[partly_dead.live_rows] if side == "outputs" else G[:, partly_dead.live_columns].T
    assert torch.allclose(found.basis @ found.basis.T, other @ other.T, atol=1e-6)


def test_preactivations_before_and_after_training():
    planted = plant(4, m=60, n=40, dtype=torch.float64)
    gradients, model = planted.gradients, planted.model
    after = {name: p.detach() - 0.3 * gradients[name] for name, p in model.named_parameters()}
    factors = factorise(spear.observe(model, after=after, lr=0.3, epochs=1))
    C = planted.inputs @ factors.combine(torch.diag(1 / factors.singular_values)).T
    H, bias = factors.before_and_after
    for end, W, b in ((0, model[0].weight, model[0].bias), (1, after["0.weight"], after["0.bias"])):
        expected = (planted.inputs @ W.T + b).T.detach()
        assert torch.allclose(H[end] @ C.T + bias[end], expected, atol=1e-9)
    assert torch.allclose(factors.bias_coordinates @ C.T, torch.ones(4).double(), atol=1e-9)


def test_the_error_of_a_preactivation_is_rounding_and_noise(partly_dead):
    C = torch.randn(3, 6, generator=seeded(0), dtype=torch.float64)
    quiet, loud = with_noise(partly_dead, 0.0), with_noise(partly_dead, 1e-3)
    eps = torch.finfo(torch.float32).eps
    assert torch.allclose(quiet.preactivation_error(C), eps * C.norm(dim=1), atol=0)
    by_noise = 5e-3 * (C / partly_dead.singular_values).norm(dim=1)
    assert torch.allclose(loud.preactivation_error(C), eps * C.norm(dim=1) + by_noise, atol=0)
    several = torch.stack([C, 2 * C])  # (2, 3, 6)
    assert torch.equal(
        loud.preactivation_error(several),
        torch.stack([loud.preactivation_error(C), loud.preactivation_error(2 * C)]),
    )
    lengths = partly_dead.view.weight.double().norm(dim=1)
    assert torch.allclose(partly_dead.weight_lengths, lengths[:, None], rtol=1e-6)


# Noise


@pytest.mark.parametrize(
    ("dtype", "least", "most"), [(torch.float32, 1e-9, 1e-6), (torch.float64, 0.0, 1e-13)]
)
def test_rounding_is_measured_as_noise(dtype, least, most):
    factors = factorise(plant(6, m=100, n=200, dtype=dtype).view)
    assert least < factors.relative_noise < most
    assert not factors.noisy


def test_gaussian_noise_is_measured_to_a_few_percent():
    planted = plant(6, m=100, n=400, dtype=torch.float64)
    G = planted.gradients["0.weight"]
    sigma = 0.01 * float(G.square().mean().sqrt())
    noisy = G + sigma * torch.randn(G.shape, generator=seeded(1)).double()
    factors = factorise(view_of(noisy, planted.gradients["0.bias"]))
    assert factors.batch_size == 6
    assert factors.noisy
    assert factors.noise == pytest.approx(sigma, rel=0.05)


def test_noise_is_relative_to_the_usual_entry_of_the_live_part(partly_dead):
    live = partly_dead.view.weight_grad.double()[partly_dead.live_rows][:, partly_dead.live_columns]
    usual = float(live.square().mean().sqrt())
    assert partly_dead.relative_noise == pytest.approx(partly_dead.noise / usual, rel=1e-6)
    assert with_noise(partly_dead, 1.1e-4 * usual).noisy
    assert not with_noise(partly_dead, 0.9e-4 * usual).noisy


def test_a_faint_sample_is_one_within_a_thousand_edges_of_noise(partly_dead):
    faintest = float(partly_dead.singular_values[-1])
    edge = math.sqrt(100) + math.sqrt(80)
    assert with_noise(partly_dead, faintest / (0.9e3 * edge)).has_weak_sample
    assert not with_noise(partly_dead, faintest / (1.1e3 * edge)).has_weak_sample


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


def test_rows_are_live_where_more_shows_than_noise():
    """Four samples: noise alone has the length sqrt(4) + 4 deviations at most."""
    values = torch.ones(4, dtype=torch.float64)
    lengths = torch.tensor([1.0, 1.0, 1.0, 1.0, 0.061, 0.059, 0.0, 1.0], dtype=torch.float64)
    left = torch.zeros(8, 4, dtype=torch.float64)
    left[:, 0] = lengths
    live = torch.tensor([True] * 7 + [False])
    found = _rows_with_signal(left, values, 0.01, live)
    assert found.tolist() == [True] * 5 + [False] * 3
    assert _rows_with_signal(left * 0.5, values * 2, 0.01, live).tolist() == found.tolist()
    # From 0.3 of a usual row on (here 0.05 x 6) a row of few samples looks like noise.
    assert _rows_with_signal(left, values, 0.049, live).tolist() == [True] * 4 + [False] * 4
    assert _rows_with_signal(left, values, 0.051, live).tolist() == live.tolist()
    nobody = torch.zeros(8, dtype=torch.bool)
    assert _rows_with_signal(left, values, 0.01, nobody).tolist() == nobody.tolist()


def test_a_neuron_that_shows_a_little_above_its_noise_is_live():
    """One row is ten deviations long, where noise gives sqrt(6) + 4 at most; another is empty."""
    D, X = low_rank(100, 150, 6)
    sigma = 1e-4
    D[7] *= 10 * sigma / float((D[7] @ X).norm())
    D[8] = 0
    noise = gaussian(100, 150, 9).double()
    factors = factorise(view_of(D @ X + sigma * noise, D.sum(1)))
    assert factors.batch_size == 6
    assert factors.noise == pytest.approx(sigma, rel=0.05)
    assert factors.live_rows.nonzero().flatten().tolist() == [i for i in range(100) if i != 8]
    assert float(factors.left[8].abs().max()) == 0


# The batch size


@pytest.mark.parametrize("b", [1, 5, 50, 90])
def test_every_batch_size_below_the_width_is_read_off(b):
    planted = plant(b, m=100, n=150)
    assert factorise(planted.view).batch_size == b


def test_pure_noise_and_nothing():
    noise = gaussian(60, 200).double()
    assert batch_size_from(torch.linalg.svdvals(noise), 60, 200, 2e-16) == 0
    assert factorise(view_of(torch.zeros(5, 6), torch.zeros(5))).batch_size == 0


@pytest.mark.parametrize("b", [100, 101, 300])
@pytest.mark.parametrize("layer", ["0", "2"])
def test_a_batch_as_large_as_the_layer_is_not_taken_for_noise(b, layer):
    planted = plant(b, m=100, n=100, depth=4, seed=b)
    assert factorise(planted.layer(layer)).batch_size is None


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
    assert factors.has_unresolved_samples
    assert factors.batch_size == expected
    assert 15 < expected < 30
    assert len(factors.spectrum) == expected + 1
    assert float(factors.spectrum[-1]) == pytest.approx(float(values[expected]), rel=1e-6)
    assert factors.zero == pytest.approx(5 * float(values[expected]) / 10, rel=1e-6)


# A part of the samples


def test_a_part_is_what_lies_along_some_directions_and_the_rest_its_noise(partly_dead):
    white = torch.randn(2, 6, generator=seeded(0), dtype=torch.float64)
    part = partly_dead.restricted_to(white)
    span = torch.linalg.qr(partly_dead.left @ white.T).Q  # (m, 2)
    G = partly_dead.L @ partly_dead.combine(torch.diag(1 / partly_dead.singular_values))
    inside = span @ (span.T @ G)
    values = torch.linalg.svdvals(inside)[:2]
    loudest = float(torch.linalg.matrix_norm(G - inside, 2))
    assert (part.batch_size, part.has_unresolved_samples) == (2, True)
    assert not partly_dead.has_unresolved_samples
    assert torch.allclose(part.singular_values, values)
    assert float(part.spectrum[-1]) == pytest.approx(loudest)
    assert torch.allclose(part.left @ (part.left.T @ G), inside, atol=1e-9)
    assert torch.allclose(part.left.T @ part.left, torch.eye(2, dtype=torch.float64), atol=1e-9)
    assert torch.allclose(part.L @ part.L.T, inside @ inside.T, atol=1e-9)
    rows, columns = part.live_shape
    assert rows < 100
    assert columns == 78
    assert part.noise == pytest.approx(loudest / math.sqrt(columns))
    assert part.zero == pytest.approx(5 * loudest / math.sqrt(rows))


def test_the_noise_of_a_part_is_no_less_than_that_of_the_whole(partly_dead):
    all_of_it = partly_dead.restricted_to(torch.eye(6, dtype=torch.float64))
    assert float(all_of_it.spectrum[-1]) == pytest.approx(partly_dead.noise * math.sqrt(78))
    assert torch.allclose(all_of_it.singular_values, partly_dead.singular_values)


# Large layers: in blocks of columns, and by a sketch


@pytest.mark.parametrize("m", [20, 300])
def test_streaming_agrees_with_one_svd(m, monkeypatch):
    monkeypatch.setattr(spear.factors.streaming, "_BLOCK", 64)
    D, X = low_rank(m, 90, 6)
    G = D @ X + 1e-6 * torch.randn(m, 90, dtype=torch.float64)
    factors = factorise(view_of(G, D.sum(1)))
    exact = torch.linalg.svdvals(G)
    assert torch.allclose(factors.spectrum, exact, rtol=1e-9, atol=1e-15)


def both_ways(view, monkeypatch):
    """Factors as a wide layer's, by the whole spectrum, and whether the first needed that too."""
    whole, taken = spear.factors.factorisation.left_factor, []
    monkeypatch.setattr(
        spear.factors.factorisation, "left_factor", lambda *args: taken.append(1) or whole(*args)
    )
    monkeypatch.setattr(spear.factors.factorisation, "_SKETCHED_FROM", 150)
    monkeypatch.setattr(spear.factors.factorisation, "even_rows", lambda *_: None)
    sketched = factorise(view)
    fell_back = bool(taken)
    monkeypatch.setattr(spear.factors.factorisation, "_SKETCHED_FROM", 10**9)
    return sketched, factorise(view), fell_back


def assert_same(one, other, rtol=1e-6):
    assert one.batch_size == other.batch_size
    assert one.noise == pytest.approx(other.noise, rel=rtol)
    assert one.zero == pytest.approx(other.zero, rel=rtol)
    assert one.relative_noise == pytest.approx(other.relative_noise, rel=rtol)
    if one.batch_size:
        assert torch.allclose(one.singular_values, other.singular_values, rtol=rtol)
        # The same span: L of the one by the left vectors of the other, far below what counts as zero.
        across = one.left @ (one.left.T @ other.L) - other.L
        assert float(across.abs().max()) < 1e-3 * other.zero


@pytest.mark.parametrize(("m", "n"), [(400, 600), (600, 400)])
@pytest.mark.parametrize(("b", "decay"), [(1, 0), (8, 0), (20, 3), (20, 6), (32, 0), (64, 1)])
def test_a_sketch_sees_what_the_whole_spectrum_shows(m, n, b, decay, monkeypatch):
    D, X = low_rank(m, n, b, decay=decay)
    D[::7] = 0  # dead neurons
    view = view_of((D @ X).float(), D.sum(1).float())
    sketched, whole, fell_back = both_ways(view, monkeypatch)
    # At 1e-6 the last sample ends a hundred times above rounding; 64 of 340 rows are many.
    if decay < 6 and b < 64 and (b > 1 or m > 400):
        assert not fell_back
    assert_same(sketched, whole)
    assert float(sketched.left[::7].abs().max()) == 0


@pytest.mark.parametrize("faint", [1e-2, 1e-3, 1e-5, 1e-6, 1e-7])
@pytest.mark.parametrize("more", [3, 60])
def test_faint_samples_do_not_hide_behind_loud_ones(faint, more, monkeypatch):
    D, X = low_rank(400, 600, 16 + more)
    D[:, 16:] *= faint
    sketched, whole, _ = both_ways(view_of((D @ X).float(), D.sum(1).float()), monkeypatch)
    assert_same(sketched, whole)


@pytest.mark.parametrize("sigma", [1e-7, 1e-5, 1e-3, 1e-2, 1.0])
def test_a_sketch_of_a_noisy_update_measures_the_noise(sigma, monkeypatch):
    D, X = low_rank(400, 900, 16)
    G = D @ X
    G = G + sigma * G.std() * torch.randn(G.shape, generator=seeded(1))
    sketched, whole, fell_back = both_ways(view_of(G.float(), D.sum(1).float()), monkeypatch)
    assert_same(sketched, whole)
    assert fell_back == (sigma > 1e-3)  # no gap to be sure of


@pytest.mark.parametrize("b", [100, 400])
def test_a_sketch_gives_way_where_samples_are_many(b, monkeypatch):
    D, X = low_rank(400, 900, b)
    sketched, whole, fell_back = both_ways(view_of((D @ X).float(), D.sum(1).float()), monkeypatch)
    assert fell_back
    assert_same(sketched, whole)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_sketch_in_half_precision(dtype, monkeypatch):
    D, X = low_rank(400, 900, 16)
    sketched, whole, _ = both_ways(view_of((D @ X).to(dtype), D.sum(1).to(dtype)), monkeypatch)
    assert sketched.batch_size == 16
    assert_same(sketched, whole)


def test_a_sketch_in_double_precision_does_not_square_the_condition(monkeypatch):
    for decay in (0, 8, 11):
        D, X = low_rank(900, 400, 12, decay=decay)
        sketched, whole, _ = both_ways(view_of(D @ X, D.sum(1)), monkeypatch)
        assert sketched.batch_size == whole.batch_size == 12
        assert torch.allclose(sketched.singular_values, whole.singular_values, rtol=1e-5)
        D = in_even_rows(sketched, D)
        outside = D - sketched.left @ (sketched.left.T @ D)
        assert float((outside.norm(dim=0) / D.norm(dim=0)).max()) < 1e-4


def test_the_same_update_is_sketched_alike_twice():
    planted = plant(8, m=1000, n=1100)
    one, other = factorise(planted.view), factorise(planted.view)
    assert torch.equal(one.left, other.left)
    assert one.zero == other.zero


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
    assert _sketch_is_conclusive(sketch_of(samples, 1.2e-7, 5e-9, 1.9 * rounding), *shape, eps)
    assert not _sketch_is_conclusive(sketch_of(samples, 1.2e-7, 5e-9, 2.1 * rounding), *shape, eps)
    # More than rounding: then the next value must keep to the edge of noise of that energy.
    for b in (3, 200):
        m, n = 400 - b, 900 - b
        edge = 1e-3 / math.sqrt(m * n) * (math.sqrt(m) + math.sqrt(n))
        assert _sketch_is_conclusive(
            sketch_of([1.0] * b, 1.05 * edge, 0.5 * edge, 1e-3), *shape, eps
        )
        assert not _sketch_is_conclusive(
            sketch_of([1.0] * b, 1.15 * edge, 0.5 * edge, 1e-3), *shape, eps
        )
    # And the batch size must be the one that the values themselves give.
    hidden = [1.0, 0.9, 1e-4]
    assert batch_size_from(sketch_of(hidden, 1e-9, 1e-9, rounding).values, *shape, eps) == 3
    assert _sketch_is_conclusive(sketch_of(hidden, 1e-9, 1e-9, rounding), *shape, eps)
    assert not _sketch_is_conclusive(sketch_of(hidden[:2], 1e-4, 1e-9, rounding), *shape, eps)


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc")
def test_a_large_gradient_needs_little_extra_memory():
    script = Path(__file__).parents[2] / "benchmarks" / "memory.py"
    command = [sys.executable, str(script), "--n", str(3 * 420 * 420)]
    measured = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    assert measured["batch_size"] == 20
    assert measured["gradient_bytes"] > 4e8
    assert measured["ratio"] < 0.5


# The bias gradient


@pytest.mark.parametrize("zeros", [1, 3])
def test_inputs_of_zero_do_not_spoil_the_scale_of_the_others(zeros):
    x = gaussian(8, 80)
    x[:zeros] = 0
    planted = plant(8, m=120, inputs=x)
    factors = factorise(planted.view)
    assert factors.batch_size == 8 - zeros
    assert factors.zero_input
    assert bool((planted.view.bias[factors.bias_rows] < 0).all())
    assert float(factors.bias_outside.norm()) < 1e-6 * float(planted.view.bias_grad.norm())
    result = spear.invert(planted.view)
    assert worst_error(result.inputs, x[zeros:]) < 1e-5


def test_the_bias_gradient_of_ordinary_batches_is_read_from_all_rows():
    for seed in range(2):
        factors = factorise(plant(8, m=60, n=50, seed=seed).view)
        g = factors.view.bias_grad.double()
        assert not factors.zero_input
        assert bool(factors.bias_rows.all())
        assert torch.equal(factors.bias_coordinates, (factors.left.T @ g) / factors.singular_values)
        assert torch.equal(factors.bias_outside, g - factors.left @ (factors.left.T @ g))


def test_a_bias_gradient_of_another_batch_is_no_zero_input():
    """Nor are dependent samples: they are on where the bias is negative, too."""
    planted = plant(8, m=120, n=80)
    other = plant(8, m=120, n=80, seed=1).gradients["0.bias"]
    view = dataclasses.replace(planted.view, bias_grad=other)
    assert not factorise(view).zero_input
    x = gaussian(8, 80)
    x[0] = x[1] + x[2]
    factors = factorise(plant(8, m=120, inputs=x).view)
    assert factors.batch_size == 7
    assert not factors.zero_input


def test_too_few_negative_biases_say_nothing():
    x = gaussian(8, 80)
    x[0] = 0
    planted = plant(8, m=120, inputs=x)
    planted.model[0].bias.data.abs_()
    planted.model[0].bias.data[:16].neg_()  # 7 samples and 10 to spare would do
    gradients = fedsgd(planted.model, planted.inputs, planted.labels)
    assert not factorise(spear.observe(planted.model, gradients)).zero_input
