"""Exact directions from guesses, where rows that are on pass for off."""

import pytest
import torch

from spear.search.dual import balance
from spear.search.kernels import unit
from spear.search.sharpening import _trim, sharpen
from spear.search.starts import refine_to_kernel
from spear.search.watch import Watch
from support.planted import plant, seeded, truth

B = 12


@pytest.fixture(scope="module")
def problem():
    """The factors of a batch, its balanced problem, and the true white directions (b, B)."""
    known = truth(plant(B, m=80, dtype=torch.float64))
    return known.factors, balance(known.whole), known.q.T


def guesses(factors, balanced, q, wrong, generator):
    """Turned directions, with scores that take so many rows that are on for the surest of all."""
    rows = factors.outputs.white
    off = (rows @ q).abs() < 1e-9  # (rows, B)
    score = torch.where(off, -0.5, 0.5) + 0.1 * torch.randn(off.shape, generator=generator).double()
    for j in range(q.shape[1]):
        on = (~off[:, j]).nonzero().flatten()
        score[on[torch.randperm(len(on), generator=generator)[:wrong]], j] = -2.0
    noise = unit(torch.randn(q.shape, generator=generator, dtype=q.dtype), 0)
    turned = unit(q + 0.3 * noise, 0)
    return balanced.c_basis.T @ turned, score


def reached(found, q):
    return int(((unit(found) @ q).abs() > 1 - 1e-9).any(0).sum()) if len(found) else 0


@pytest.mark.parametrize("seed", range(3))
def test_rows_that_only_seem_off_do_not_stop_it(problem, seed):
    factors, balanced, q = problem
    guess = guesses(factors, balanced, q, 4, seeded(seed))
    by_kernel = reached(refine_to_kernel(factors.outputs, balanced, *guess), q)
    sharpened = reached(sharpen(factors.outputs, balanced, *guess, seeded(0), Watch()), q)
    assert by_kernel < B / 2 < 2 * B / 3 <= sharpened


def test_the_same_seed_gives_the_same_bits(problem):
    factors, balanced, q = problem
    guess = guesses(factors, balanced, q, 4, seeded(0))
    first, again = (
        sharpen(factors.outputs, balanced, *guess, seeded(5), Watch()) for _ in range(2)
    )
    assert torch.equal(first, again)


def test_no_guess_gives_no_direction(problem):
    factors, balanced, _ = problem
    rows = len(factors.outputs.white)
    nothing = torch.zeros(B, 0).double(), torch.zeros(rows, 0).double()
    assert sharpen(factors.outputs, balanced, *nothing, seeded(0), Watch()).shape == (0, B)


def test_trimming_leaves_out_rows_that_are_on(problem):
    factors, _, q = problem
    side, deadline = factors.outputs, Watch().deadline
    U = unit(side.white) * B**0.5
    off = (side.white @ q).abs() < 1e-9
    spare = off.sum(0) - B
    kept = off.clone()
    for j in range(B):  # fewer rows that are on than zeros to spare
        on = (~off[:, j]).nonzero().flatten()
        smallest = (U @ q)[on, j].abs().argsort()
        kept[on[smallest[: int(spare[j]) // 3]], j] = True
    assert reached(_trim(side, U, q, kept, deadline), q) >= B - 2


def test_trimming_ends_at_samples_or_nowhere(problem):
    """Any b - 1 rows vanish somewhere: whoever may leave out most of them always finds some more."""
    factors, _, q = problem
    side, deadline = factors.outputs, Watch().deadline
    U = unit(side.white) * B**0.5
    guess = unit(torch.randn(B, 256, generator=seeded(1), dtype=U.dtype), 0)
    kept = torch.rand(len(U), 256, generator=seeded(2)) < 0.5
    found = _trim(side, U, guess, kept, deadline)
    assert bool(((found @ q).abs().amax(1) > 1 - 1e-9).all())
    assert len(found) < 256 / 4
    assert not len(_trim(side, U, guess, torch.zeros_like(kept), deadline))
