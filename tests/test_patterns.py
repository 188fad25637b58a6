"""The sign half, on planted batches whose answer is known in both halves."""

import pytest
import torch

from planted import plant, truth
from spear.directions import unit
from spear.patterns import (
    AGREES,
    Signs,
    agreement,
    balance,
    chance_off,
    read_samples,
    trusted,
    without,
)


@pytest.fixture(scope="module", params=[torch.float32, torch.float64])
def known(request):
    return truth(plant(16, m=200, n=120, dtype=request.param))


def uncentred(b=16, m=200, n=120, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(b, n, generator=generator) * 0.5 + torch.rand(n, generator=generator) * 0.5
    return plant(b, m=m, inputs=x, seed=seed)


def test_the_two_halves_tie_up(known):
    whole = known.whole
    eps = torch.finfo(known.factors.view.weight.dtype).eps
    Z = whole.H @ known.C.T
    assert torch.allclose(Z, known.Z, atol=1e4 * eps)
    assert torch.allclose(known.C @ whole.h, torch.ones(16, dtype=Z.dtype), atol=1e4 * eps)
    D = whole.U @ known.Q
    assert float(D[known.off].abs().max()) < 1e3 * eps * float(D.abs().max())


def test_rows_that_are_mostly_off_are_known_beforehand():
    answer = truth(uncentred())
    chance, share = chance_off(answer.whole), answer.off.double().mean(1)
    assert float(torch.corrcoef(torch.stack([chance, share]))[0, 1]) > 0.85


def test_centred_rows_are_all_worth_the_same(known):
    chance = chance_off(known.whole)
    assert float((chance - 0.5).abs().max()) < 0.25


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


def test_balancing_brings_the_halves_together():
    answer = truth(uncentred())
    even = balance(answer.whole)

    def cosines(Q):
        return 1 / (Q.norm(dim=0) * torch.linalg.inv(Q).norm(dim=1))

    before, after = cosines(answer.Q), cosines(torch.linalg.solve(even.q_basis, answer.Q))
    assert float(after.median()) > float(before.median())
    assert float(after.median()) > 0.8


def test_signs_follow_from_a_direction(known):
    even = balance(known.whole)
    q = torch.linalg.solve(even.q_basis, known.Q)
    z = Signs(even, torch.float64).read(unit(q, 0), (~known.off).double())
    right = ((z <= 0) == known.off).double().mean(0)
    assert float(right.min()) > 0.85
    assert torch.allclose(z.square().mean(0), torch.ones(16, dtype=z.dtype))


@pytest.mark.parametrize("found", [1, 6, 12, 15])
def test_samples_are_read_from_their_pattern_alone(known, found):
    c, share = read_samples(known.whole, known.q[:found], known.off[:, :found].T)
    cosine = (unit(c) * unit(known.C[:found])).sum(1)
    assert float(cosine.abs().min()) > 0.9
    assert float(share.min()) > AGREES
    assert torch.allclose((c * known.q[:found]).sum(1), torch.ones(found, dtype=c.dtype))


def test_with_all_samples_the_reading_is_exact(known):
    c, share = read_samples(known.whole, known.q, known.off.T)
    exact = unit(known.C) * torch.sign((c * known.C).sum(1, keepdim=True))
    assert torch.allclose(unit(c), exact, atol=1e-4)
    assert float(share.min()) > 0.99


def test_nothing_is_read_from_nothing(known):
    c, share = read_samples(known.whole, known.q[:0], known.off[:, :0].T)
    assert c.shape == (0, 16)
    assert share.shape == (0,)


def test_mixes_of_samples_have_no_signs_that_fit(known):
    q, off = known.q, known.off.T
    mixes = unit(q[:8] + q[8:])
    common = off[:8] & off[8:]
    assert float(agreement(known.whole, q, off).min()) > AGREES
    assert float(agreement(known.whole, mixes, common).max()) < AGREES


def test_a_mix_is_not_trusted(known):
    q, off = known.q[:9].clone(), known.off[:, :9].T.clone()
    q[8], off[8] = unit(known.q[14] + known.q[15]), known.off[:, 14] & known.off[:, 15]
    kept, c = trusted(known.whole, q, off)
    assert torch.equal(kept, q[:8])
    assert c.shape == (8, 16)


@pytest.mark.parametrize("found", [1, 8, 15])
def test_what_is_left_holds_the_missing_samples(known, found):
    left = without(known.whole, known.q[:found], known.C[:found])  # with exact halves
    assert left.missing == 16 - found
    one = torch.eye(16 - found, dtype=left.U.dtype)
    assert torch.allclose(left.c_basis.T @ left.q_basis, one, atol=1e-9)
    q = left.c_basis.T @ known.Q[:, found:]
    assert torch.allclose(left.U @ q, known.whole.U @ known.Q[:, found:], atol=1e-9)
    c = left.q_basis.T @ known.C[found:].T
    assert torch.allclose(left.H @ c, known.whole.H @ known.C[found:].T, atol=1e-7)
