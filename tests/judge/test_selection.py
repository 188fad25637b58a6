"""The choice of directions: scale, lambda, swaps and what is excused, against their definitions."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import spear
import spear.judge.selection
from spear import Outcome, Protocol
from spear.factors import Side, factorise
from spear.federated import fedavg, mlp, play_rounds
from spear.judge.selection import _Matching, _white, rows_below_noise, select
from spear.search.directions import Directions
from spear.search.kernels import scale, sparsest_independent, unit
from spear.search.watch import Watch
from spear.tolerances import UNDECIDED
from support.planted import gaussian, inputs_problem, plant, pool_of, seeded, true_directions

# The scale


@settings(deadline=None, max_examples=10)
@given(b=st.integers(1, 8), seed=st.integers(0, 1000))
def test_the_bias_gradient_gives_the_scale_of_any_unscaled_directions(b, seed):
    planted = plant(b, m=80, n=40, seed=seed, dtype=torch.float64)
    factors = factorise(planted.view)
    Q, _ = true_directions(planted, factors)
    factor = gaussian(1, b, seed)[0].double()
    C = scale(torch.linalg.inv(Q * factor), factors.bias_coordinates)
    assert torch.allclose(C, torch.linalg.inv(Q), rtol=1e-5, atol=1e-7)


def test_a_direction_without_scale_is_marked():
    C = scale(torch.eye(2, dtype=torch.float64), torch.tensor([1.0, 0.0], dtype=torch.float64))
    assert C.isnan().any(1).tolist() == [False, True]


# Stage one: the sparsest directions that are independent


@given(st.permutations(range(6)))
def test_the_sparsest_independent_set_goes_from_sparse_to_dense(order):
    vectors = torch.eye(3, dtype=torch.float64)[:, [0, 0, 1, 1, 2, 2]]
    sparsity = torch.tensor([0.9, 0.8, 0.7, 0.6, 0.5, 0.4])
    chosen = sparsest_independent(vectors[:, list(order)], sparsity[list(order)])
    assert [order[j] for j in chosen] == [0, 2, 4]


@pytest.mark.parametrize(("apart", "independent"), [(3e-6, True), (3e-7, False)])
def test_a_millionth_of_a_vector_adds_rank_and_less_does_not(apart, independent):
    vectors = torch.tensor([[1.0, 1.0, 0.0], [0.0, apart, 1.0]], dtype=torch.float64)
    chosen = sparsest_independent(vectors, torch.tensor([3.0, 2.0, 1.0]))
    assert chosen == ([0, 1] if independent else [0, 2])


def test_independence_is_judged_in_white_coordinates():
    """Two directions that differ by one part in 1e8, because one sample is that faint."""
    scales = torch.tensor([1.0, 1e-8], dtype=torch.float64)
    white = gaussian(9, 2).double()
    side = Side("outputs", white * scales, white, scales, 9, 1e-12, False)
    vectors = unit(torch.tensor([[1.0, 1e-8], [1.0, 1.0]], dtype=torch.float64), 0)
    pool = Directions(side, vectors, torch.zeros(9, 2, dtype=torch.bool), torch.tensor([2, 2]))
    expected = unit(vectors * scales[:, None], 0)
    assert torch.equal(_white(pool), expected)
    assert len(sparsest_independent(_white(pool), torch.ones(2))) == 2


def test_too_few_independent_directions_are_no_choice():
    planted = plant(5, m=60)
    factors = factorise(planted.view)
    Q, zeros = true_directions(planted, factors)
    twice = [0, 1, 2, 3, 0, 1, 2, 3]
    assert select(factors, pool_of(factors, Q[:, twice], zeros[:, twice]), Watch()) is None


# Lambda


@settings(deadline=None, max_examples=10)
@given(seed=st.integers(0, 1000))
def test_lambda_is_one_for_the_truth_in_any_order_and_sign(seed):
    planted = plant(5, m=60, seed=seed)
    factors = factorise(planted.view)
    Q, zeros = true_directions(planted, factors)
    generator = seeded(seed)
    order = torch.randperm(5, generator=generator)
    signs = torch.where(torch.rand(5, generator=generator) < 0.5, -1.0, 1.0)
    chosen = select(factors, pool_of(factors, (Q * signs)[:, order], zeros[:, order]), Watch())
    assert chosen.match == 1.0
    assert int(chosen.contradictions.sum()) == 0
    assert torch.allclose(chosen.C @ chosen.Q, torch.eye(5, dtype=torch.float64), atol=1e-9)


def pool_with_mixes(planted, factors, mixes):
    """True directions and, in front of them, mixes of two, with the zeros that these share."""
    Q, zeros = true_directions(planted, factors)
    extra = [Q[:, i] + share * Q[:, j] for i, j, share in mixes]
    common = [zeros[:, i] & zeros[:, j] for i, j, _ in mixes]
    return pool_of(factors, torch.stack([*extra, *Q.T], 1), torch.stack([*common, *zeros.T], 1))


MIXES = [(0, 1, 0.5), (2, 3, -0.7), (1, 4, 0.2)]


def one_step():
    """Pixels in [0, 1], so that some neurons are off for every sample."""
    generator = seeded(3)
    planted = plant(5, m=60, inputs=torch.rand(5, 50, generator=generator), dtype=torch.float32)
    factors = factorise(planted.view)
    assert int((~factors.live_rows).sum()) > 3
    return factors, pool_with_mixes(planted, factors, MIXES)


def local_training():
    planted = plant(5, m=60)
    after = fedavg(planted.model, planted.inputs, planted.labels, lr=1.0, epochs=3)
    factors = factorise(spear.observe(planted.model, after=after, lr=1.0, epochs=3))
    assert len(factors.before_and_after[0]) == 2
    return factors, pool_with_mixes(planted, factors, MIXES)


def uneven_rounding():
    """Zeros that lie above the update's own level: a direction's zeros say what a zero may be."""
    factors, pool = one_step()
    side = dataclasses.replace(pool.side, zero=1e-6 * pool.side.zero)
    assert float((side.basis @ pool.vectors).abs()[pool.zeros].max()) > 100 * side.zero
    return factors, dataclasses.replace(pool, side=side)


def open_signs(times=1e6):
    """Noise that leaves many signs open."""
    factors, pool = one_step()
    return dataclasses.replace(factors, noise=times * factors.noise), pool


def more_open_signs():
    return open_signs(4e6)


def coarse_zeros():
    """Zeros so coarse that some entries are expected to drown."""
    factors, pool = one_step()
    usual = float((pool.side.basis @ pool.vectors).abs().median())
    return factors, dataclasses.replace(pool, side=dataclasses.replace(pool.side, zero=usual / 30))


SCENES = [one_step, local_training, uneven_rounding, open_signs, more_open_signs, coarse_zeros]


@pytest.fixture(scope="module", params=SCENES)
def problem(request):
    return _Matching(*request.param())


def contradictions_of(factors, pool, chosen):
    """Contradictions of each chosen direction, from inputs and both ends' weights, one by one."""
    view = factors.view
    C = torch.linalg.inv(pool.vectors[:, chosen])
    C = C / (C @ factors.bias_coordinates)[:, None]
    X = C @ factors.combine(torch.diag(1 / factors.singular_values))  # (b, n)
    weights, biases = [view.weight.double()], [view.bias.double()]
    if view.trained:
        weights.append(weights[0] - view.protocol.rate * view.weight_grad.double())
        biases.append(biases[0] - view.protocol.rate * view.bias_grad.double())
    Z = torch.stack([X @ W.T + bias for W, bias in zip(weights, biases, strict=True)])
    slack = view.weight.double().norm(dim=1) * factors.preactivation_error(C)[:, None]  # (b, m)
    live = factors.live_rows.nonzero().flatten().tolist()
    found = []
    for i, j in enumerate(chosen):
        size = (pool.side.basis @ pool.vectors[:, j]).abs()
        level = max(pool.side.zero, float(size[pool.zeros[:, j]].max()))
        wrong = 0
        for k in range(view.outputs):
            row = live.index(k) if k in live else None
            off = row is None or bool(pool.zeros[row, j])
            on = row is not None and float(size[row]) > UNDECIDED * level
            wrong += off and float(Z[:, i, k].min()) > float(slack[i, k])
            wrong += on and float(Z[:, i, k].max()) <= -float(slack[i, k])
        found.append(wrong)
    return found


@pytest.mark.parametrize("chosen", [[3, 4, 5, 6, 7], [0, 4, 1, 6, 7], [0, 1, 2, 3, 5]])
def test_contradictions_are_counted_as_defined(problem, chosen):
    wrong = problem.wrong(chosen).tolist()
    assert wrong == contradictions_of(problem.factors, problem.pool, chosen)
    if 0 in chosen:
        assert sum(wrong) > 3


def zeros_that_signs_say_are_on(problem, chosen):
    """Per direction: rows that are zero though all signs say on."""
    state = problem.state(chosen)
    found = []
    for i, j in enumerate(chosen):
        Z = state.F[:, :, i] / state.t[i] + problem.bias[:, :, 0]  # (ends, m)
        rows = zip(problem.off[:, j].tolist(), Z.T.tolist(), strict=True)
        found.append(sum(off and all(z > 0 for z in ends) for off, ends in rows))
    return torch.tensor(found)


@pytest.mark.parametrize("chosen", [[0, 4, 1, 6, 7], [3, 4, 5, 6, 7], [2, 3, 4, 5, 6]])
def test_lambda_is_a_share_of_all_entries_but_those_that_drowned(problem, chosen):
    selection = problem.selection(chosen)
    wrong = problem.wrong(chosen)
    silent = torch.minimum(zeros_that_signs_say_are_on(problem, chosen), wrong)
    expected = wrong - rows_below_noise(problem.pool.pick(chosen), silent)
    assert selection.contradictions.tolist() == expected.tolist()
    entries = problem.factors.view.outputs * 5
    assert selection.match == 1 - int(selection.contradictions.sum()) / entries
    one = torch.eye(5, dtype=torch.float64)
    assert torch.allclose(selection.C @ selection.Q, one, atol=1e-8)
    bias = selection.C @ problem.factors.bias_coordinates
    assert torch.allclose(bias, torch.ones(5, dtype=torch.float64))


# Stage two: swaps


@pytest.fixture
def deceived():
    """Factors, and a pool in which mixes look sparsest: they claim to be zero everywhere."""
    planted = plant(6, m=90)
    factors = factorise(planted.view)
    Q, zeros = true_directions(planted, factors)
    mixes = torch.stack([Q[:, 0] + Q[:, 1], Q[:, 2] - 0.5 * Q[:, 3]], 1)
    fake = torch.ones(len(zeros), 2, dtype=torch.bool)
    pool = pool_of(factors, torch.cat([mixes, Q], 1), torch.cat([fake, zeros], 1))
    assert {0, 1} <= set(sparsest_independent(pool.vectors, pool.sparsity))
    return factors, pool


def test_swaps_replace_wrong_directions(deceived):
    assert select(*deceived, Watch()).match == 1
    assert select(*deceived, Watch(), second_stage=False).match < 1
    assert select(*deceived, Watch(max_seconds=0.0)).match < 1  # no time to swap


def test_firm_directions_come_before_sparse_ones(deceived):
    factors, pool = deceived
    pool = dataclasses.replace(pool, redundancy=torch.tensor([0, 0, 2, 2, 2, 2, 2, 2]))
    assert select(factors, pool, Watch(), second_stage=False).match == 1


@pytest.mark.parametrize("at_once", [1 << 24, 400])
def test_swaps_are_scored_as_if_made(problem, at_once, monkeypatch):
    """Rank-one updates of the inverse against the inverse itself, for every place and candidate."""
    monkeypatch.setattr(spear.judge.selection, "_AT_ONCE", at_once)
    chosen = [0, 4, 1, 6, 7]
    state = problem.state(chosen)
    for j in (2, 3, 5):
        places = problem._places(state)
        totals = torch.cat([problem._swap(state, chosen, j, i) for i in places])
        for i in range(5):
            swapped = [*chosen[:i], j, *chosen[i + 1 :]]
            if float(torch.linalg.det(problem.pool.vectors[:, swapped]).abs()) > 1e-9:
                assert int(totals[i]) == int(problem.wrong(swapped).sum())
            else:
                assert int(totals[i]) == torch.iinfo(totals.dtype).max


def test_swaps_end_where_none_helps(problem):
    start = [0, 1, 2, 4, 5]
    ended = problem.improve(start, Watch())
    assert len(set(ended)) == 5
    reached = int(problem.wrong(ended).sum())
    assert reached < int(problem.wrong(start).sum())
    for j in set(range(8)) - set(ended):
        state = problem.state(ended)
        totals = [problem._swap(state, ended, j, i).min() for i in problem._places(state)]
        assert int(min(totals)) >= reached


# Entries that drowned


def directions_of(sizes, zeros, level=1e-6):
    """Directions whose entries have these sizes (rows, b), one basis vector each."""
    basis = torch.tensor(sizes, dtype=torch.float64)
    b = basis.shape[1]
    ones = torch.ones(b, dtype=torch.float64)
    side = Side("outputs", basis, basis, ones, len(basis), level, False)
    firm = torch.full((b,), 2)
    return Directions(side, torch.eye(b, dtype=torch.float64), torch.tensor(zeros), firm)


def one_direction(on, drowned):
    """Sizes from `drowned` zeros of size 0.01, and `on` entries of 1, the lowest tenth at 0.5."""
    sizes = [[0.01]] * drowned + [[0.5]] * (on // 10) + [[-1.0]] * (on - on // 10)
    return directions_of(sizes, [[True]] * drowned + [[False]] * on)


@pytest.mark.parametrize(
    ("on", "drowned", "most"),
    [
        (50, 9, 4),  # five entries below 0.5 make 0.1 below 0.01: five happen once in 1e7 batches
        (500, 9, 9),  # one is expected below 0.01
        (5, 2, 2),  # fewer than ten: the smallest one tells
        (0, 6, 0),  # without entries nothing drowns
    ],
)
def test_as_many_drowned_entries_as_poisson_allows_are_excused(on, drowned, most):
    directions = one_direction(on, drowned)
    for silent in range(most + 1):
        assert rows_below_noise(directions, torch.tensor([silent])).tolist() == [silent]
    assert rows_below_noise(directions, torch.tensor([most + 1])).tolist() == [0]


def test_the_level_of_zeros_is_the_noise_where_they_are_below_it():
    sizes, zeros = [[0.0]] * 4 + [[0.5]] * 5 + [[1.0]] * 45, [[True]] * 4 + [[False]] * 50
    quiet, loud = (directions_of(sizes, zeros, level) for level in (1e-9, 0.01))
    assert rows_below_noise(quiet, torch.tensor([1])).tolist() == [0]
    assert rows_below_noise(loud, torch.tensor([4])).tolist() == [4]


def test_too_many_in_all_are_no_accident_though_each_may_be():
    sizes = [[0.01] * 4] * 9 + [[0.5] * 4] * 5 + [[1.0] * 4] * 45
    directions = directions_of(sizes, [[True] * 4] * 9 + [[False] * 4] * 50)
    directions = dataclasses.replace(directions, vectors=torch.eye(4, dtype=torch.float64))
    assert rows_below_noise(directions, torch.tensor([4, 1, 0, 1])).tolist() == [4, 1, 0, 1]
    assert rows_below_noise(directions, torch.tensor([4, 4, 4, 4])).tolist() == [0, 0, 0, 0]
    assert rows_below_noise(directions, torch.tensor([5, 0, 0, 0])).tolist() == [0, 0, 0, 0]


# The inputs' side


def test_inputs_are_chosen_with_their_scale_and_without_their_negatives():
    factors, hidden, vectors, zeros = inputs_problem()
    mix = (vectors[:, 0] - vectors[:, 1])[:, None]  # negative in many entries
    claims = torch.ones(len(zeros), 1, dtype=torch.bool)  # and said to be zero in all
    pool = pool_of(
        factors, torch.cat([mix, -vectors], 1), torch.cat([claims, zeros], 1), factors.inputs
    )
    chosen = select(factors, pool, Watch())
    assert chosen.match == 1
    assert chosen.contradictions.tolist() == [0, 0, 0, 0]
    inputs = factors.reconstruct(chosen.C).double()
    assert float(torch.cdist(inputs, hidden).min(1).values.max()) < 1e-4
    assert torch.allclose(chosen.Q @ chosen.C, torch.eye(4, dtype=torch.float64), atol=1e-9)


def test_negative_inputs_are_contradictions():
    factors, _, vectors, zeros = inputs_problem()
    mixed = vectors.clone()
    mixed[:, 0] = vectors[:, 0] - 0.5 * vectors[:, 1]
    chosen = select(factors, pool_of(factors, mixed, zeros, factors.inputs), Watch())
    inputs = factors.reconstruct(chosen.C)
    negative = (inputs < -1e-4).sum(1)
    assert int(negative.sum()) > 5
    assert chosen.contradictions.tolist() == negative.tolist()
    assert chosen.match == 1 - int(negative.sum()) / (60 * 4)


@pytest.mark.parametrize(("levels", "negative"), [(5, 0), (50, 1)])
def test_up_to_ten_levels_an_entry_is_undecided(levels, negative):
    """The lowest input of a mix, so many levels of noise below zero: a contradiction or not?"""
    factors, _, vectors, zeros = inputs_problem()
    vectors[:, 0] = vectors[:, 0] - 0.5 * vectors[:, 1]
    pool = pool_of(factors, vectors, zeros, factors.inputs)
    C = select(factors, pool, Watch()).C
    lowest = float(
        (factors.reconstruct(C).amin(1) / (C / factors.singular_values).norm(dim=1)).min()
    )
    side = dataclasses.replace(pool.side, zero=-lowest / levels)
    chosen = select(factors, dataclasses.replace(pool, side=side), Watch())
    assert (int(chosen.contradictions.sum()) > 0) is bool(negative)


def test_firm_inputs_come_before_sparse_ones():
    factors, _, vectors, zeros = inputs_problem()
    both = torch.cat([(vectors[:, 0] + vectors[:, 1])[:, None], vectors], 1)
    claims = torch.cat([torch.ones(len(zeros), 1, dtype=torch.bool), zeros], 1)
    pool = dataclasses.replace(
        pool_of(factors, both, claims, factors.inputs), redundancy=torch.tensor([0, 2, 2, 2, 2])
    )
    chosen = select(factors, pool, Watch())
    overlap = (chosen.directions.vectors.T @ unit(vectors, 0)).abs()
    assert float(overlap.amax(1).min()) > 1 - 1e-9


def test_inputs_that_are_too_few_or_without_a_scale_are_no_choice():
    factors, _, vectors, zeros = inputs_problem()
    short = pool_of(factors, vectors[:, [0, 1, 2, 2]], zeros[:, [0, 1, 2, 2]], factors.inputs)
    assert select(factors, short, Watch()) is None
    # A bias gradient of zero gives no sample its length, and one without length is enough.
    view = dataclasses.replace(factors.view, bias_grad=torch.zeros_like(factors.view.bias_grad))
    without = dataclasses.replace(factors, view=view)
    assert select(without, pool_of(without, vectors, zeros, without.inputs), Watch()) is None
    axis = vectors.clone()
    axis[:, 0] = torch.tensor([1.0, 0.0, 0.0, 0.0], dtype=torch.float64)
    without = dataclasses.replace(factors)
    without.__dict__["bias_coordinates"] = torch.tensor([0.0, 1.0, 1.0, 1.0], dtype=torch.float64)
    assert select(without, pool_of(without, axis, zeros, without.inputs), Watch()) is None


def test_rounds_in_which_a_sample_was_absent_say_nothing_for_it():
    """New data in every round: mixes of a round's own samples vanish in all other rounds."""
    generator = torch.Generator().manual_seed(0)
    model = mlp(60, 5, width=10, depth=2, seed=0)
    cohorts = [[(torch.randn(5, 60, generator=generator), torch.arange(5))] for _ in range(3)]
    played = play_rounds(model, cohorts, Protocol(), server_lr=0.1, generator=generator)
    result = spear.invert(spear.combine([sent.view(weights) for weights, sent in played]))
    assert result.outcome is Outcome.INCONCLUSIVE
    assert not len(result.inputs)
