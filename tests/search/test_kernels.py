import dataclasses
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from spear.factors import Side, factorise
from spear.search import TimeIsUp
from spear.search.candidates import CandidatePool
from spear.search.kernels import (
    _below_gap,
    redundancy,
    redundant,
    round_to_kernel,
    smallest_singular,
    unit,
)
from spear.search.watch import Watch
from support.planted import plant, seeded, true_directions


def unit_directions(planted, factors):
    """True directions (b, b) as unit columns, and true zeros (live rows, b)."""
    Q, zeros = true_directions(planted, factors)
    return unit(Q, 0), zeros


@settings(deadline=None, max_examples=15)
@given(b=st.integers(1, 8), seed=st.integers(0, 1000), push=st.floats(0, 1e-8))
def test_rounding_finds_the_exact_direction_from_near_by(b, seed, push):
    planted = plant(b, m=80, n=60, seed=seed)
    factors = factorise(planted.view)
    Q, zeros = unit_directions(planted, factors)
    noise = torch.randn(Q.shape, generator=torch.Generator().manual_seed(seed), dtype=Q.dtype)
    for i in range(b):
        found = round_to_kernel(factors.outputs, Q[:, i] + push * noise[:, i])
        assert found is not None
        q, pattern = found
        assert 1 - float((q @ Q[:, i]).abs()) < 1e-10
        assert torch.equal(pattern, zeros[:, i])


def test_a_dense_direction_has_no_kernel():
    planted = plant(6, m=80)
    side = factorise(planted.view).outputs
    assert round_to_kernel(side, torch.randn(6, dtype=torch.float64)) is None


def test_samples_are_firm_and_mixes_are_not():
    planted = plant(6, m=80)
    factors = factorise(planted.view)
    side = factors.outputs
    Q, zeros = unit_directions(planted, factors)
    white = torch.nn.functional.normalize(Q * side.scales[:, None], dim=0)
    for i in range(6):
        assert redundancy(side, white[:, i], zeros[:, i]) == 2
    assert bool(redundant(side, white.T, zeros.T).all())
    # A mix of two samples that is made to vanish in one more row.
    i, j = 0, 1
    both_on = (~zeros[:, i] & ~zeros[:, j]).nonzero()[0, 0]
    D = side.basis @ Q
    mix = Q[:, i] * D[both_on, j] - Q[:, j] * D[both_on, i]
    pattern = zeros[:, i] & zeros[:, j]
    pattern[both_on] = True
    mixed = torch.nn.functional.normalize(mix * side.scales, dim=0)
    assert redundancy(side, mixed, pattern) == 0
    assert not bool(redundant(side, mixed[None], pattern[None]).any())


def test_a_pool_drops_duplicates_signs_and_mixes():
    planted = plant(5, m=80)
    factors = factorise(planted.view)
    Q, _ = unit_directions(planted, factors)
    white = (Q * factors.outputs.scales[:, None]).T
    pool = CandidatePool(factors.outputs, threshold=0.2)
    assert pool.add(torch.cat([white, -3 * white, white[:2] + white[2:4]]))
    assert len(pool) == 5
    assert pool.complete
    assert pool.sufficient
    assert not pool.add(white)
    assert pool.snapshot().vectors.shape == (5, 5)


def test_the_sparsity_filter_refuses_dense_directions():
    planted = plant(5, m=80)
    factors = factorise(planted.view)
    Q, zeros = unit_directions(planted, factors)
    threshold = float((zeros[:, 0].sum() + factors.outputs.empty_rows + 0.5) / factors.outputs.size)
    pool = CandidatePool(factors.outputs, threshold)
    pool.add((Q * factors.outputs.scales[:, None]).T[:1])
    assert len(pool) == 0


def test_a_share_of_the_time_is_kept_for_later():
    watch = Watch(max_seconds=100.0, started=time.monotonic() - 80)
    with watch.keeping(0.3):
        assert watch.expired
        assert watch.seconds_left < 0
        with pytest.raises(TimeIsUp):
            watch.check()
    assert not watch.expired
    watch.check()
    with watch.keeping(0.1):
        watch.check(needed=5)
        with pytest.raises(TimeIsUp):
            watch.check(needed=15)
        assert watch.expired
    assert not watch.expired


def test_the_watch_keeps_time_and_counts():
    steps = []
    watch = Watch(on_progress=steps.append, max_seconds=0.0)
    assert watch.expired
    assert watch.count("submatrices", 5) == 5
    assert watch.count("submatrices", 2) == 7
    watch.report("search", done=7, found=1, batch_size=4)
    assert (steps[0].stage, steps[0].done, steps[0].batch_size) == ("search", 7, 4)
    assert not Watch().expired
    with watch.stage("outer"), watch.stage("inner"):
        time.sleep(0.02)
    assert watch.stats["inner"] >= 0.02 > watch.stats["outer"] >= 0


@pytest.mark.parametrize("b", [2, 6])
def test_directions_count_silent_rows_as_zeros(b):
    planted = plant(b, m=40)
    factors = factorise(planted.view)
    Q, zeros = unit_directions(planted, factors)
    pool = CandidatePool(factors.outputs, threshold=0.1)
    pool.add((Q * factors.outputs.scales[:, None]).T)
    expected = ((zeros.sum(0) + factors.outputs.empty_rows) / 40).sort().values
    assert torch.allclose(pool.snapshot().sparsity.sort().values, expected)


@pytest.mark.parametrize("size", [15.0, 28.0, 200.0])
@pytest.mark.parametrize("seed", range(3))
def test_a_row_that_is_nearly_zero_but_not_quite_is_left_out(size, seed):
    """An entry a little above the noise must not turn the kernel: it would cost 10 dB."""
    planted = plant(8, m=100, n=60, seed=seed)
    factors = factorise(planted.view)
    Q, off = unit_directions(planted, factors)
    side, q = factors.outputs, Q[:, 0]
    row = int((~off[:, 0]).nonzero()[0])
    basis = side.basis.clone()
    basis[row] -= (basis[row] @ q - size * side.zero) * q
    side = dataclasses.replace(side, basis=basis, white=basis / side.scales)
    found, zeros = round_to_kernel(side, q)
    assert not bool(zeros[row])
    assert torch.equal(zeros, off[:, 0])
    exact = torch.linalg.svd(side.basis[off[:, 0]]).Vh[-1]
    assert float(1 - (found @ exact).abs()) < 1e-14


def test_where_nothing_lies_above_the_zeros_their_level_stays():
    values = torch.tensor([0.1, 0.2, 0.3])
    assert _below_gap(values, 0.5) == 0.5
    assert _below_gap(torch.tensor([0.1, 0.6, 0.7, 9.0, 10.0]), 0.5) == pytest.approx(0.7)


def over_rounds(rows: Tensor, noise: float) -> Side:
    """A side of several rounds with these rows (rows, b), before noise of this deviation."""
    noisy = rows + noise * torch.randn(rows.shape, generator=seeded(7), dtype=torch.float64)
    s = torch.ones(rows.shape[1], dtype=torch.float64)
    round_of_row = torch.arange(len(rows)) % 4
    return Side("outputs", noisy, noisy, s, len(rows), 5 * noise, False, round_of_row)


def test_over_rounds_a_row_is_spare_if_the_others_hold_its_direction_above_the_noise():
    """Rows of a neuron that hardly moves: what a row leaves to the others is a small share of it."""
    b, noise = 8, 1e-9
    rows = torch.randn(60, b, generator=seeded(3), dtype=torch.float64)
    rows[:, 0] = 0  # the direction
    rows[:, 1] = 0  # held by one large row, and by small ones
    rows[0, 1] = 1.0
    zeros = torch.ones(60, dtype=torch.bool)
    direction = torch.eye(b, dtype=torch.float64)[0]
    assert redundancy(over_rounds(rows, noise), direction, zeros) == 0
    rows[1, 1] = 1e-5
    assert redundancy(over_rounds(rows, noise), direction, zeros) == 1  # without both it is free
    rows[2, 1] = 1e-5
    assert redundancy(over_rounds(rows, noise), direction, zeros) == 2
    rows[1:3, 1] = 1e-9  # noise
    assert redundancy(over_rounds(rows, noise), direction, zeros) == 0


def test_what_noise_holds_in_hundreds_of_rows_is_not_held():
    """Two like samples share most zeros: a mix of them that vanishes in two rows more is no sample."""
    b, noise = 8, 1e-8
    rows = torch.randn(400, b, generator=seeded(3), dtype=torch.float64) / 20
    rows[:, :2] = noise * torch.randn(400, 2, generator=seeded(4), dtype=torch.float64)
    direction, zeros = torch.eye(b, dtype=torch.float64)[0], torch.ones(400, dtype=torch.bool)
    for holding, spare in ((2, 1), (8, 2)):
        rows[:holding, 1] = 1e-5
        s = torch.ones(b, dtype=torch.float64)
        assert (
            redundancy(Side("outputs", rows, rows, s, 400, 5 * noise, False), direction, zeros)
            == spare
        )


def test_over_rounds_rounding_takes_in_what_noise_explains_and_drops_what_it_does_not():
    """A direction that rows fix roughly: a row that is no zero turns it, and hides 19 that are."""
    b, noise = 8, 1e-9
    rows = torch.randn(80, b, generator=seeded(3), dtype=torch.float64)
    rows[:, 0] = 0
    rows[:60, 1] *= 1e-5  # sixty zeros hardly see this way to turn
    rows[60, 0], rows[60, 1] = 2e-6, 0.005  # no zero, but a small turn makes it one
    rows[61:, 0] = 0  # zeros as well, that see the turn
    side = over_rounds(rows, noise)
    start = torch.zeros(80, dtype=torch.bool)
    start[:61] = True
    turned, _ = smallest_singular(side.basis[start])
    assert bool(((side.basis @ turned).abs()[61:] > 30 * side.zero).any())
    found = round_to_kernel(side, turned)
    assert found is not None
    q, zeros = found
    assert zeros.tolist() == [True] * 60 + [False] + [True] * 19
    assert float(q[0].abs()) > 1 - 1e-12
