"""Samples by the two levels of their gradients, where only outputs follow."""

import pytest
import torch
from torch import nn

import spear
from spear import Outcome
from spear.factors import factorise
from spear.federated import fedsgd, mlp
from spear.search.directions import Directions
from spear.search.dual import balance, dual_problem
from spear.search.kernels import redundancy, unit
from spear.search.next_layer import Messages
from spear.search.starts import kernels_near
from spear.search.two_levels import TwoLevels, rows_given, search_two_levels
from spear.search.watch import Watch
from support.planted import gaussian, plant, seeded, truth, worst_error

B, M = 50, 160  # about a third: rows alone find few of them


@pytest.fixture(scope="module")
def planted():
    return plant(B, m=M, n=120, depth=2, seed=1)


@pytest.fixture(scope="module")
def known(planted):
    return truth(planted)


@pytest.fixture(scope="module")
def levels(known):
    return TwoLevels.of(known.factors, known.whole)


def search(known, levels, seed):
    return search_two_levels(balance(known.whole), levels, 128, 80, seeded(seed), Watch())


def test_starts_end_near_samples_and_their_kernels_are_exact(known, levels):
    problem, side = balance(known.whole), known.factors.outputs
    q, score = search(known, levels, 0)
    exact = unit(kernels_near(side, problem, q, score))
    cosine = (exact @ known.q.T).abs()
    found = cosine.amax(1) > 1 - 1e-9
    assert len(set(cosine.argmax(1)[found].tolist())) >= B / 3


def test_the_same_seed_gives_the_same_bits(known, levels):
    first, again = search(known, levels, 3), search(known, levels, 3)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_samples_have_a_gradient_at_the_outputs_and_mixes_have_none(known, levels):
    side = known.factors.outputs
    mixed = unit(known.q + 0.5 * known.q.roll(1, 0))
    for white, expected in ((known.q, True), (mixed, False)):
        vectors = unit(white.T / side.scales[:, None], 0)
        zeros = (side.basis @ vectors).abs() <= 30 * side.zero
        spare = torch.zeros(B, dtype=torch.int64)
        assert (levels.fits(Directions(side, vectors, zeros, spare)) == expected).all()


def test_a_row_is_on_if_either_message_says_so():
    e, one = torch.full((1, 3), 2.0), torch.ones(1, 1)
    z = Messages(torch.tensor([[5.0, 0.0, -5.0]]), 0.1 * one)
    undecided = Messages(e / 2, one)  # as far from 0 as from e
    _, d, on = rows_given(z, undecided, e, 1e-6)
    assert on[0].tolist() == pytest.approx([1, 0.5, 0], abs=1e-4)
    assert d.values[0].tolist() == pytest.approx([2, 1, 0], abs=1e-3)
    nothing = Messages(torch.zeros(1, 3), one)
    z_said, _, on = rows_given(
        nothing, Messages(torch.tensor([[2.0, 1.0, 0.0]]), 0.01 * one), e, 0.01
    )
    assert on[0].round().tolist()[::2] == [1, 0]
    half_normal = (2 / torch.pi) ** 0.5
    assert z_said.values[0, ::2].tolist() == pytest.approx([half_normal, -half_normal], abs=1e-3)


def test_only_a_last_layer_with_few_outputs_has_levels(planted, known):
    assert TwoLevels.of(known.factors, known.whole) is not None
    for other in (plant(8, m=40, depth=3), plant(8, m=40, depth=2, classes=10)):
        told = truth(other)
        assert TwoLevels.of(told.factors, told.whole) is None


def test_common_zeros_of_two_samples_are_no_sample(known):
    side = known.factors.outputs
    both = known.q[0] + known.q[1]
    white = unit(both)
    zeros = (
        side.basis @ unit(torch.stack([known.q[0], known.q[1]], 1) / side.scales[:, None], 0)
    ).abs()
    assert redundancy(side, white, (zeros <= side.zero).all(1)) == 0


def test_a_batch_of_a_third_of_the_neurons_comes_back(planted):
    result = spear.invert(planted.view, model=planted.model, max_seconds=20)
    assert result.outcome is Outcome.EXACT, result.reason
    assert worst_error(result.inputs, planted.inputs) < 1e-3


def between(module):
    return nn.Sequential(nn.Linear(60, 150), nn.ReLU(), module, nn.Linear(150, 10)).eval()


@pytest.mark.parametrize(
    ("model", "direct"),
    [
        (between(nn.Dropout(0.3)), True),
        (nn.Sequential(nn.Linear(60, 150), nn.ReLU(), nn.Linear(150, 10), nn.Softmax(1)), True),
        (between(nn.BatchNorm1d(150)), False),
        (between(nn.LayerNorm(150)), False),
        (between(nn.Tanh()), False),
        (mlp(60, 10, width=150, depth=3), False),
    ],
    ids=["dropout", "softmax", "batch norm", "layer norm", "tanh", "three layers"],
)
def test_levels_are_known_only_where_outputs_follow_directly(model, direct):
    """What stands between scales each row, and true samples would have no gradient at the outputs."""
    x, y = gaussian(8, 60), torch.arange(8)
    factors = factorise(spear.observe(model, fedsgd(model, x, y)))
    assert (TwoLevels.of(factors, dual_problem(factors)) is not None) == direct
