import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import spear
import spear.factors
from planted import plant, worst_error
from spear.factors import batch_size_from, factorise, working_device
from spear.federated import fedsgd


def low_rank(m, n, b, seed=0, decay=0.0, dtype=torch.float64):
    g = torch.Generator().manual_seed(seed)
    D = torch.randn(m, b, generator=g, dtype=torch.float64)
    D *= torch.rand(m, b, generator=g) < 0.5
    D *= torch.logspace(0, -decay, b, dtype=torch.float64)
    X = torch.randn(b, n, generator=g, dtype=torch.float64)
    return D.to(dtype), X.to(dtype)


def view_of(G, g):
    m, n = G.shape
    return spear.LayerUpdate(
        weight=torch.zeros(m, n, dtype=G.dtype),
        bias=torch.zeros(m, dtype=G.dtype),
        weight_grad=G,
        bias_grad=g,
    )


@settings(deadline=None, max_examples=40)
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
        assert torch.allclose(factors.L @ R, D @ X, atol=1e-12)
        assert torch.allclose(R @ R.T, torch.eye(len(R), dtype=R.dtype), atol=1e-9)


@settings(deadline=None, max_examples=20)
@given(seed=st.integers(0, 1000), scale=st.floats(1e-20, 1e20))
def test_scaling_and_permuting_the_gradient_change_nothing(seed, scale):
    D, X = low_rank(40, 30, 5, seed)
    G = D @ X
    order = torch.randperm(40, generator=torch.Generator().manual_seed(seed))
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
    outside = D - factors.left @ (factors.left.T @ D)
    assert float((outside.norm(dim=0) / D.norm(dim=0)).max()) < 1e-4
    assert torch.allclose(
        factors.left.T @ factors.left, torch.eye(8, dtype=torch.float64), atol=1e-12
    )


@pytest.mark.parametrize("m", [20, 300])
def test_streaming_agrees_with_one_svd(m, monkeypatch):
    monkeypatch.setattr(spear.streaming, "_BLOCK", 64)
    D, X = low_rank(m, 90, 6)
    G = D @ X + 1e-6 * torch.randn(m, 90, dtype=torch.float64)
    factors = factorise(view_of(G, D.sum(1)))
    exact = torch.linalg.svdvals(G)
    assert torch.allclose(factors.spectrum, exact, rtol=1e-9, atol=1e-15)


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
    noisy = G + sigma * torch.randn(G.shape, generator=torch.Generator().manual_seed(1)).double()
    factors = factorise(view_of(noisy, planted.gradients["0.bias"]))
    assert factors.batch_size == 6
    assert factors.noisy
    assert factors.noise == pytest.approx(sigma, rel=0.05)


def test_a_sample_a_thousand_times_weaker_still_counts():
    D, X = low_rank(120, 300, 8)
    D[:, 3] *= 1e-3
    factors = factorise(view_of((D @ X).float(), D.sum(1).float()))
    assert factors.batch_size == 8


@pytest.mark.parametrize("b", [1, 5, 50, 90])
def test_every_batch_size_below_the_width_is_read_off(b):
    planted = plant(b, m=100, n=150)
    assert factorise(planted.view).batch_size == b


@pytest.mark.parametrize("b", [30, 31, 60])
def test_no_gap_no_batch_size(b):
    planted = plant(b, m=30, n=80)
    assert factorise(planted.view).batch_size is None


def test_dead_neurons_and_constant_inputs_are_set_aside():
    D, X = low_rank(40, 50, 4)
    D[[3, 17, 39]] = 0
    X[:, [0, 8]] = 0
    factors = factorise(view_of(D @ X, D.sum(1)))
    assert factors.batch_size == 4
    assert factors.outputs.silent == 40 - int(factors.live_rows.sum()) >= 3
    assert factors.inputs.silent == 2
    assert float(factors.left[[3, 17, 39]].abs().max()) == 0


def test_pure_noise_and_nothing():
    noise = torch.randn(60, 200, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert batch_size_from(torch.linalg.svdvals(noise), 60, 200, 2e-16) == 0
    assert factorise(view_of(torch.zeros(5, 6), torch.zeros(5))).batch_size == 0


def test_inputs_keep_the_clients_dtype():
    planted = plant(3)
    factors = factorise(planted.view)
    X = factors.reconstruct(torch.eye(3, dtype=torch.float64))
    assert X.dtype == torch.float32
    half = factorise(plant(3, dtype=torch.float64).view)
    assert half.reconstruct(torch.eye(3, dtype=torch.float64)).dtype == torch.float64


# The sketch of wide layers


def both_ways(view, monkeypatch):
    """Factors as a wide layer's, by the whole spectrum, and whether the first needed that too."""
    whole, taken = spear.factors.left_factor, []
    monkeypatch.setattr(spear.factors, "left_factor", lambda *args: taken.append(1) or whole(*args))
    monkeypatch.setattr(spear.factors, "_WIDE", 150)
    sketched = factorise(view)
    fell_back = bool(taken)
    monkeypatch.setattr(spear.factors, "_WIDE", 10**9)
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


@pytest.mark.parametrize(("m", "n"), [(400, 900), (900, 400), (500, 500)])
@pytest.mark.parametrize(("b", "decay"), [(1, 0), (8, 0), (20, 3), (20, 6), (32, 0), (64, 1)])
def test_a_sketch_sees_what_the_whole_spectrum_shows(m, n, b, decay, monkeypatch):
    for seed in range(3):
        D, X = low_rank(m, n, b, seed, decay)
        D[::7] = 0  # dead neurons
        view = view_of((D @ X).float(), D.sum(1).float())
        sketched, whole, fell_back = both_ways(view, monkeypatch)
        # At 1e-6 the last sample ends a hundred times above rounding; 64 of 340 rows are many.
        if decay < 6 and b < 64 and (b > 1 or m > 400):
            assert not fell_back
        assert_same(sketched, whole)
        assert float(sketched.left[::7].abs().max()) == 0


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("faint", [1e-2, 1e-3, 1e-5, 1e-6, 1e-7])
@pytest.mark.parametrize("more", [3, 30, 60, 100])
def test_faint_samples_do_not_hide_behind_loud_ones(faint, more, seed, monkeypatch):
    D, X = low_rank(400, 900, 16 + more, seed)
    D[:, 16:] *= faint
    sketched, whole, _ = both_ways(view_of((D @ X).float(), D.sum(1).float()), monkeypatch)
    assert_same(sketched, whole)


@pytest.mark.parametrize("sigma", [1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0])
def test_a_sketch_of_a_noisy_update_measures_the_noise(sigma, monkeypatch):
    D, X = low_rank(400, 900, 16)
    G = D @ X
    G = G + sigma * G.std() * torch.randn(G.shape, generator=torch.Generator().manual_seed(1))
    sketched, whole, fell_back = both_ways(view_of(G.float(), D.sum(1).float()), monkeypatch)
    assert_same(sketched, whole)
    assert fell_back == (sigma > 1e-3)  # no gap to be sure of


@pytest.mark.parametrize("b", [100, 390, 400, 500])
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
        outside = D - sketched.left @ (sketched.left.T @ D)
        assert float((outside.norm(dim=0) / D.norm(dim=0)).max()) < 1e-4


def test_the_same_update_is_sketched_alike_twice():
    planted = plant(8, m=1000, n=1100)
    one, other = factorise(planted.view), factorise(planted.view)
    assert torch.equal(one.left, other.left)
    assert one.zero == other.zero


def test_devices_without_float64_work_on_the_cpu():
    assert working_device(torch.device("mps")) == torch.device("cpu")
    assert working_device(torch.device("cuda:1")) == torch.device("cuda:1")


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc")
def test_a_large_gradient_needs_little_extra_memory():
    script = Path(__file__).parent.parent / "benchmarks" / "memory.py"
    command = [sys.executable, str(script), "--n", str(3 * 720 * 720)]
    measured = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    assert measured["batch_size"] == 20
    assert measured["gradient_bytes"] > 1.2e9
    assert measured["ratio"] < 0.5


@pytest.mark.parametrize("shape", [(200, 784), (400, 3072), (300, 300)])
@pytest.mark.parametrize("stands_out", [1.1, 1.3, 3.0])
def test_samples_that_hardly_stand_out_of_gaussian_noise_are_counted(shape, stands_out):
    """Of 12 samples the three faintest lie this far above the noise's edge; no gap shows."""
    m, n = shape
    generator = torch.Generator().manual_seed(m)
    options = {"generator": generator, "dtype": torch.float64}
    edge = m**0.5 + n**0.5
    levels = torch.tensor([*([20.0 * edge] * 9), *([stands_out * edge] * 3)], dtype=torch.float64)
    left = torch.linalg.qr(torch.randn(m, 12, **options)).Q
    right = torch.linalg.qr(torch.randn(n, 12, **options)).Q
    noisy = left * levels @ right.T + torch.randn(m, n, **options)
    assert batch_size_from(torch.linalg.svdvals(noisy), m, n, 1e-7) == 12


@pytest.mark.parametrize("b", [100, 150, 300])
@pytest.mark.parametrize("layer", ["0", "2"])
def test_a_batch_as_large_as_the_layer_is_not_taken_for_noise(b, layer):
    planted = plant(b, m=100, n=100, depth=4, seed=b)
    assert factorise(planted.layer(layer)).batch_size is None


@pytest.mark.parametrize("zeros", [1, 3])
@pytest.mark.parametrize("seed", range(4))
def test_inputs_of_zero_do_not_spoil_the_scale_of_the_others(zeros, seed):
    x = torch.randn(8, 80, generator=torch.Generator().manual_seed(seed))
    x[:zeros] = 0
    planted = plant(8, m=120, inputs=x, seed=seed)
    factors = factorise(planted.view)
    assert factors.batch_size == 8 - zeros
    assert factors.zero_input
    assert bool((planted.view.bias[factors.bias_rows] < 0).all())
    assert float(factors.bias_outside.norm()) < 1e-6 * float(planted.view.bias_grad.norm())
    result = spear.invert(planted.view)
    assert worst_error(result.inputs, x[zeros:]) < 1e-5


def test_the_bias_gradient_of_ordinary_batches_is_read_from_all_rows():
    for seed in range(5):
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
    x = torch.randn(8, 80, generator=torch.Generator().manual_seed(0))
    x[0] = x[1] + x[2]
    factors = factorise(plant(8, m=120, inputs=x).view)
    assert factors.batch_size == 7
    assert not factors.zero_input


def test_too_few_negative_biases_say_nothing():
    x = torch.randn(8, 80, generator=torch.Generator().manual_seed(0))
    x[0] = 0
    planted = plant(8, m=120, inputs=x)
    planted.model[0].bias.data.abs_()
    planted.model[0].bias.data[:16].neg_()  # 7 samples and 10 to spare would do
    gradients = fedsgd(planted.model, planted.inputs, planted.labels)
    assert not factorise(spear.observe(planted.model, gradients)).zero_input
