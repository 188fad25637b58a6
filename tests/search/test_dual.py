"""The sign half of the search, on batches whose directions and samples are both known."""

import dataclasses
import math

import pytest
import torch
from scipy.stats import norm

import spear
from spear.factors import factorise
from spear.federated import fedavg
from spear.search.dual import (
    SIGN_AGREEMENT,
    DualProblem,
    SignRegression,
    agreement,
    balance,
    chance_off,
    consistent_samples,
    deflate,
    dual_problem,
    read_samples,
)
from spear.search.kernels import unit
from support.planted import gaussian, plant, seeded, truth, uncentred


@pytest.fixture(scope="module", params=[torch.float32, torch.float64])
def known(request):
    """Samples around zero, in either precision."""
    return truth(plant(16, m=200, n=120, dtype=request.param))


@pytest.fixture(scope="module")
def centred():
    """Samples around zero, in single precision."""
    return truth(plant(16, m=200, n=120))


@pytest.fixture(scope="module")
def off_centre():
    """Samples around a mean that is far from zero."""
    return truth(uncentred())


# Both halves


def test_the_two_halves_tie_up(known):
    whole = known.whole
    eps = torch.finfo(known.factors.view.weight.dtype).eps
    Z = whole.H @ known.C.T
    assert torch.allclose(Z, known.Z, atol=1e4 * eps)
    assert torch.allclose(known.C @ whole.h, torch.ones(16, dtype=Z.dtype), atol=1e4 * eps)
    D = whole.U @ known.Q
    assert float(D[known.off].abs().max()) < 1e3 * eps * float(D.abs().max())


def trained(lr, epochs):
    planted = plant(4, m=80, n=50, dtype=torch.float64)
    after = fedavg(planted.model, planted.inputs, planted.labels, lr=lr, epochs=epochs)
    view = spear.observe(planted.model, after=after, lr=lr, epochs=epochs)
    return planted, after, factorise(view)


def test_after_training_signs_are_known_at_both_ends_and_asked_to_agree_less():
    planted, after, factors = trained(0.2, 3)
    whole = dual_problem(factors)
    layer, live = planted.model[0], factors.live_rows
    # z of x = c U^T dL/dW, for c with c . h = 1
    c = torch.randn(7, 4, generator=seeded(0), dtype=torch.float64)
    c = c / (c @ whole.h)[:, None]
    x = factors.combine(c)
    before = x @ layer.weight.detach().T.double() + layer.bias.detach()
    later = x @ after["0.weight"].T.double() + after["0.bias"]
    assert torch.allclose(whole.H @ c.T, torch.stack([before, later]).mT[:, live], atol=1e-9)
    assert whole.least_agreement == 0.8
    assert dual_problem(trained(0.2, 1)[2]).least_agreement == SIGN_AGREEMENT == 0.95
    assert dual_problem(factorise(planted.view)).least_agreement == 0.95


# How likely a row is off


def flat(offsets, r=3):
    """Rows with these offsets: mean along h = (1, 0, ...), spread one along another axis."""
    H = torch.zeros(1, len(offsets), r, dtype=torch.float64)
    H[..., 0], H[..., 1] = torch.tensor(offsets), 1.0
    h = torch.zeros(r, dtype=torch.float64)
    h[0] = 1
    one = torch.eye(r, dtype=torch.float64)
    return DualProblem(H[0], H, h, SIGN_AGREEMENT, one, one)


def test_offsets_no_larger_than_chance_are_shrunk_to_nothing():
    assert chance_off(flat([0.5, -0.5, 0.4, -0.4])).tolist() == [0.5] * 4  # 3 var = 0.8 < 2
    larger = chance_off(flat([2.0, -2.0, 2.0, -2.0]))  # 3 var = 16: shrunk by an eighth
    assert larger.tolist() == pytest.approx([norm.cdf(-1.75), norm.cdf(1.75)] * 2)
    two = norm.cdf(-4 * (1 - 2 / 96))  # 3 var = 96
    assert chance_off(flat([4.0, -4.0])).tolist() == pytest.approx([two, 1 - two])
    assert chance_off(flat([3.0])).tolist() == [0.5]  # one row says nothing of the others
    assert chance_off(flat([2.0, 2.0])).tolist() == [0.5] * 2  # nor do rows that are the same


def test_a_row_without_spread_is_surely_on_or_off():
    whole = flat([2.0, -2.0, 2.0, -2.0])
    H = whole.H.clone()
    H[0, 0, 1] = 0.0
    chance = chance_off(dataclasses.replace(whole, H=H))
    assert float(chance[0]) == 0
    assert bool(chance.isfinite().all())
    H[0, 2, 0] = 0.0  # a row without a mean beside it, and means that are all negative
    for sign in (1.0, -1.0):
        chance = chance_off(dataclasses.replace(whole, H=sign * H.abs()))
        assert float(chance[0]) == (0 if sign > 0 else 1)
        assert float(chance[2]) == 0.5
        assert bool(chance.isfinite().all())


# Balance


def test_balancing_changes_coordinates_and_nothing_else(known):
    whole, even = known.whole, balance(known.whole)
    one = torch.eye(16, dtype=even.U.dtype)
    assert torch.allclose(even.c_basis.T @ even.q_basis, one, atol=1e-9)
    c = torch.linalg.solve(even.c_basis, known.C.T)  # columns
    assert torch.allclose(even.H @ c, whole.H @ known.C.T, atol=1e-9)
    assert torch.allclose(c.T @ even.h, known.C @ whole.h, atol=1e-9)
    q = torch.linalg.solve(even.q_basis, known.Q)
    U = even.U / even.U.norm(dim=1, keepdim=True)
    parallel = unit(whole.U @ even.q_basis)
    assert torch.allclose(U, parallel, atol=1e-9)
    D = (even.U @ q).abs()
    assert float(D[known.off].max()) < 1e-4 * float(D.max())


def test_balancing_brings_the_halves_together(off_centre):
    even = balance(off_centre.whole)

    def cosines(Q):
        return 1 / (Q.norm(dim=0) * torch.linalg.inv(Q).norm(dim=1))

    before, after = cosines(off_centre.Q), cosines(torch.linalg.solve(even.q_basis, off_centre.Q))
    assert float(after.median()) > float(before.median())
    assert float(after.median()) > 0.8


def test_balanced_rows_have_one_size_and_the_signs_too(off_centre):
    even = balance(off_centre.whole)
    assert torch.allclose(even.U.norm(dim=1), torch.full((len(even.U),), 4.0).double())  # sqrt 16
    assert float(even.H.square().mean()) == pytest.approx(1)
    assert even.least_agreement == off_centre.whole.least_agreement
    assert torch.equal(even.weights, chance_off(off_centre.whole).clamp_min(1e-3))
    assert float(even.weights.min()) == 1e-3
    # Tyler's scatter: rows of one size, weighed, are white; after three sweeps to a tenth or so.
    rows = unit(even.U)
    scatter = rows.T @ (even.weights[:, None] * rows)
    scatter = scatter / scatter.diagonal().mean()
    assert float((scatter - torch.eye(16).double()).abs().max()) < 0.16
    change = even.change
    assert torch.equal(change, change.triu())
    size = (off_centre.whole.H @ change.T).square().mean().sqrt()
    assert torch.allclose(even.c_basis, change.T / size)


# Signs from a direction, samples from their pattern


def test_signs_follow_from_a_direction(known):
    even = balance(known.whole)
    q = torch.linalg.solve(even.q_basis, known.Q)
    z = SignRegression(even, torch.float64).read(unit(q, 0), (~known.off).double())
    right = ((z <= 0) == known.off).double().mean(0)
    assert float(right.min()) > 0.85
    assert torch.allclose(z.square().mean(0), torch.ones(16, dtype=z.dtype))


def test_signs_are_a_ridge_regression_towards_the_direction(off_centre):
    even = balance(off_centre.whole)
    generator = seeded(0)
    q = unit(torch.randn(16, 3, generator=generator, dtype=torch.float64), 0)
    H = even.H[0]
    activity = torch.rand(len(H), 3, generator=generator, dtype=torch.float64)
    z = SignRegression(even, torch.float64, ridge=0.7).read(q, activity)
    for i in range(3):
        pattern = activity[:, i] - activity[:, i].mean()
        along = H @ q[:, i]
        along = along * (along @ pattern) / (along @ along)
        A = H.T @ H + 0.7 * len(H) * torch.eye(16).double()
        expected = along + H @ torch.linalg.solve(A, H.T @ (pattern - along))
        expected = expected / expected.square().mean().sqrt()
        assert torch.allclose(z[:, i], expected, atol=1e-9)
    one = SignRegression(even, torch.float64).read(q, activity)
    assert torch.allclose(one, SignRegression(even, torch.float64, ridge=1.5).read(q, activity))
    single = SignRegression(even, torch.float32).read(q.float(), activity.float())
    assert single.dtype == torch.float32
    nothing = SignRegression(even, torch.float64).read(0 * q, torch.ones_like(activity))
    assert bool(nothing.isfinite().all())


@pytest.mark.parametrize("found", [1, 6, 15, 16])
def test_samples_are_read_from_their_pattern_alone(known, found):
    c, share = read_samples(known.whole, known.q[:found], known.off[:, :found].T)
    cosine = (unit(c) * unit(known.C[:found])).sum(1)
    assert float(cosine.abs().min()) > (0.9 if found < 16 else 1 - 1e-6)
    assert float(share.min()) > (SIGN_AGREEMENT if found < 16 else 0.99)
    assert torch.allclose((c * known.q[:found]).sum(1), torch.ones(found, dtype=c.dtype))


def test_nothing_is_read_from_nothing(known):
    c, share = read_samples(known.whole, known.q[:0], known.off[:, :0].T)
    assert (c.shape, share.shape) == ((0, 16), (0,))


# Which directions are samples, and which are mixes of them


def with_mixes(answer, found, pairs):
    """Some samples, and mixes of two."""
    q, off = answer.q, answer.off.T
    mixes = [unit(q[i] + q[j]) for i, j in pairs]
    return torch.stack([*q[:found], *mixes]), torch.stack(
        [*off[:found], *(off[i] & off[j] for i, j in pairs)]
    )


def test_mixes_of_samples_have_no_signs_that_fit(known):
    q, off = known.q, known.off.T
    mixes = unit(q[:8] + q[8:])
    common = off[:8] & off[8:]
    assert float(agreement(known.whole, q, off).min()) > SIGN_AGREEMENT
    assert float(agreement(known.whole, mixes, common).max()) < SIGN_AGREEMENT


def test_every_direction_has_the_whole_space_to_agree_in(centred):
    """`agreement` leaves c free: b samples at once or one alone, the shares are the same."""
    q, off = centred.q, centred.off.T
    together = agreement(centred.whole, q, off)
    alone = torch.cat([agreement(centred.whole, q[i : i + 1], off[i : i + 1]) for i in range(3)])
    assert torch.allclose(together[:3], alone, atol=1e-6)
    assert math.isclose(float(together.max()), 1, abs_tol=0.02)


@pytest.mark.parametrize("pairs", [[(14, 15)], [(8, 9), (10, 11), (12, 13), (14, 15)]])
def test_several_mixes_are_dropped_and_no_sample_with_them(centred, pairs):
    q, off = with_mixes(centred, 7, pairs)
    kept, c = consistent_samples(centred.whole, q, off)
    assert torch.equal(kept, q[:7])
    assert torch.allclose((c * kept).sum(1), torch.ones(7).double())
    cosine = (unit(c) * unit(centred.C[:7])).sum(1)
    assert float(cosine.abs().min()) > 0.9


@pytest.mark.parametrize("count", [1, 2, 4])
def test_a_mix_does_not_take_the_samples_with_it_that_it_spoils(centred, count):
    """A mix of a known and an unknown sample: the unknown one spoils the reading of the known one."""
    q, off = with_mixes(centred, 8, [(i, 11 + i) for i in range(count)])
    _, share = read_samples(centred.whole, q, off)
    assert bool((share[:count] < SIGN_AGREEMENT).all())
    kept, _ = consistent_samples(centred.whole, q, off)
    assert torch.equal(kept, q[:8])


def test_after_four_mixes_what_does_not_agree_is_dropped(centred):
    q, off = with_mixes(centred, 8, [(i, 11 + i) for i in range(5)])
    kept, c = consistent_samples(centred.whole, q, off)
    assert torch.equal(kept, q[[0, 1, 3, 4, 5, 6, 7]])
    assert torch.allclose((c * kept).sum(1), torch.ones(7).double())


def test_more_directions_than_samples_are_cut_down_to_the_sparsest(centred):
    q, off = with_mixes(centred, 16, [(0, 1), (2, 3)])
    kept, c = consistent_samples(centred.whole, q, off)
    assert kept.shape == c.shape == (16, 16)
    assert sorted(map(tuple, kept.tolist())) == sorted(map(tuple, q[:16].tolist()))


def test_how_much_signs_must_agree_is_up_to_the_caller(centred):
    q, off = with_mixes(centred, 6, [(14, 15)])
    _, share = read_samples(centred.whole, q, off)
    assert float(share.min()) < SIGN_AGREEMENT
    kept, _ = consistent_samples(centred.whole, q, off, least_agreement=float(share.min()))
    assert torch.equal(kept, q)
    assert len(consistent_samples(centred.whole, q, off)[0]) == 6


def test_where_nothing_agrees_nothing_is_trusted(centred):
    generator = seeded(0)
    q = unit(gaussian(4, 16).double())
    off = torch.rand(4, centred.off.shape[0], generator=generator) < 0.5
    kept, c = consistent_samples(centred.whole, q, off)
    assert kept.shape == c.shape == (0, 16)


# What is left


@pytest.mark.parametrize("found", [1, 8, 15])
def test_what_is_left_holds_the_missing_samples(known, found):
    left = deflate(known.whole, known.q[:found], known.C[:found])  # with exact halves
    assert left.missing == 16 - found
    one = torch.eye(16 - found, dtype=left.U.dtype)
    assert torch.allclose(left.c_basis.T @ left.q_basis, one, atol=1e-9)
    q = left.c_basis.T @ known.Q[:, found:]
    assert torch.allclose(left.U @ q, known.whole.U @ known.Q[:, found:], atol=1e-9)
    c = left.q_basis.T @ known.C[found:].T
    assert torch.allclose(left.H @ c, known.whole.H @ known.C[found:].T, atol=1e-7)
