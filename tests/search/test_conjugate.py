import subprocess
import sys
from pathlib import Path

import pytest
import torch

from spear.factors import Side, factorise
from spear.search import CascadeFinder, TimeIsUp
from spear.search.conjugate import Rows, kernels_of, least_squares
from spear.search.deadline import NEVER
from spear.search.dual import balance, dual_problem
from spear.search.kernels import (
    _have_spare_zeros,
    redundancy,
    round_all,
    round_to_kernel,
    smallest_singular,
    unit,
)
from spear.search.starts import kernels_near, search_from_starts
from spear.search.watch import Watch
from support.planted import plant, seeded, true_directions


def random(*shape, seed=0):
    return torch.randn(*shape, generator=seeded(seed), dtype=torch.float64)


@pytest.fixture(scope="module")
def wide():
    """Factors of 24 samples in 240 neurons, true white directions (24, 24) and their zeros."""
    planted = plant(24, m=240, n=80)
    factors = factorise(planted.view)
    Q, zeros = true_directions(planted, factors)
    return factors, unit(Q * factors.singular_values[:, None], 0), zeros


def test_kernels_are_those_of_a_factorisation(wide):
    factors, white, zeros = wide
    side = factors.outputs
    guess = unit(white + 0.3 * unit(random(*white.shape), 0), 0)
    found, settled = kernels_of(Rows.of(side.white), zeros, guess)
    assert bool(settled.all())
    for j in range(24):
        exact = unit(smallest_singular(side.basis[zeros[:, j]])[0] * side.scales)
        assert 1 - float((found[:, j] @ exact).abs()) < 1e-14


def test_of_several_kernels_the_nearest():
    rows = random(60, 10)
    rows = rows - (rows @ (plane := torch.linalg.qr(random(10, 2, seed=1)).Q)) @ plane.T
    guess = unit(random(10, 5, seed=2), 0)
    found, _ = kernels_of(Rows.of(rows), torch.ones(60, 5, dtype=torch.bool), guess)
    nearest = unit(plane @ (plane.T @ guess), 0)
    assert torch.allclose((found * nearest).sum(0).abs(), torch.ones(5, dtype=torch.float64))


def test_what_does_not_settle_is_said():
    rows = random(80, 40) * torch.logspace(0, -6, 40, dtype=torch.float64)
    rows[:, -1] = 0  # a kernel, beside directions that hardly differ from one
    guess = unit(random(40, 3, seed=1), 0)
    _, settled = kernels_of(Rows.of(rows), torch.ones(80, 3, dtype=torch.bool), guess)
    assert not bool(settled.any())


def test_nothing_left_is_nothing_to_do():
    rows = random(30, 6).float()
    fixed = unit(random(6, 2, seed=1), 0).float()
    solved = least_squares(rows, torch.ones(30, 2), torch.zeros(30, 2), fixed, 1e-6)
    assert not bool(solved.change.any())


def test_a_deadline_stops_it(wide):
    factors, white, zeros = wide
    watch = Watch(max_seconds=0.0)
    with pytest.raises(TimeIsUp):
        kernels_of(Rows.of(factors.outputs.white), zeros, white, watch.deadline)


def test_rounding_all_at_once_is_rounding_one_by_one(wide):
    factors, white, _ = wide
    side = factors.outputs
    dense = unit(random(24, 3, seed=3), 0)
    candidates = torch.cat([white + 1e-9 * random(*white.shape), dense], 1).T
    together = round_all(side, candidates)
    for candidate, rounded in zip(candidates, together, strict=True):
        alone = round_to_kernel(side, candidate / side.scales)
        assert (alone is None) == (rounded is None)
        if alone is not None and rounded is not None:
            q, zeros = alone
            assert torch.equal(rounded.zeros, zeros)
            assert 1 - float((rounded.q @ q).abs()) < 1e-14
            assert rounded.redundancy == redundancy(side, unit(q * side.scales), zeros)
    assert [each is None for each in together] == [False] * 24 + [True] * 3


def test_mixes_have_nothing_to_spare_at_once_either(wide):
    factors, white, zeros = wide
    side = factors.outputs
    D = side.white @ white
    mixes = []
    for i, j in ((0, 1), (2, 3), (4, 5)):  # made to vanish in one more row
        row = (~zeros[:, i] & ~zeros[:, j]).nonzero()[0, 0]
        mixes.append(white[:, i] * D[row, j] - white[:, j] * D[row, i])
    for rounded in round_all(side, unit(torch.stack(mixes))):
        assert rounded is None or rounded.redundancy < 2


@pytest.mark.parametrize("rows", [15, 60])  # fewer than are looked at, and more
@pytest.mark.parametrize(("holding", "spare"), [(1, False), (2, False), (None, True)])
def test_two_rows_that_hold_a_direction_together_are_seen_in_every_draw(rows, holding, spare):
    """Without them the second axis is free: a mix of two samples that vanishes in two rows more."""
    b, k = 8, 40
    U = random(rows, b, seed=rows)
    U[:, 0] = 0  # the direction
    U[holding or rows :, 1] = 0
    U = U[torch.randperm(rows, generator=seeded(1))] / torch.linalg.matrix_norm(U, 2)
    side = Side("outputs", U, U, torch.ones(b, dtype=U.dtype), rows, 1e-12, False)
    direction = torch.eye(b, dtype=U.dtype)[:, :1].expand(-1, k)
    zeros = torch.rand(rows, k, generator=seeded(2)) < 0.9
    zeros |= (U[:, 1] != 0)[:, None] & (holding is not None)
    answers = _have_spare_zeros(side, direction, zeros, NEVER)
    exact = [redundancy(side, direction[:, j], zeros[:, j]) == 2 for j in range(k)]
    assert answers.tolist() == exact == [spare] * k


def test_near_guesses_become_kernels(wide):
    factors, white, _ = wide
    even = balance(dual_problem(factors))
    guesses = search_from_starts(even, 128, 80, seeded(0))
    found = kernels_near(factors.outputs, even, *guesses)
    cosine = (unit(found) @ white).abs().amax(1)
    assert len(found) >= 12
    assert int((cosine > 1 - 1e-12).sum()) >= 12


def test_starts_follow_the_hits():
    finder = CascadeFinder(starts=2)
    assert finder._more_starts(100, 50, 1.0) == 1.0  # 200 starts, 4 each
    assert finder._more_starts(100, 10, 1.0) == 5.0
    assert finder._more_starts(100, 0, 1.0) == 8.0  # and never more


def test_the_first_inversion_imports_no_symbolic_algebra():
    """torch imports sympy, half a second, for gradients of anything but a number."""
    code = (
        "import sys, torch, spear\n"
        "net = torch.nn.Sequential(torch.nn.Linear(30, 60), torch.nn.ReLU(), torch.nn.Linear(60, 5))\n"
        "loss = torch.nn.functional.cross_entropy(net(torch.randn(3, 30)), torch.tensor([0, 1, 2]))\n"
        "view = spear.observe(net, torch.autograd.grad(loss, list(net.parameters())))\n"
        "before = 'sympy' in sys.modules\n"
        "assert spear.invert(view).outcome.name == 'EXACT'\n"
        "print(before, 'sympy' in sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parent,
    )
    before, after = done.stdout.split()
    assert after == before
