import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from planted import plant
from spear.directions import Directions, Watch
from spear.factors import factorise
from spear.judge.selection import scale, select, sparsest_independent


def true_directions(planted, factors):
    R = factors.combine(torch.diag(1 / factors.singular_values))
    Q = torch.linalg.inv(planted.inputs.double() @ R.T)
    zeros = (planted.model[0](planted.inputs) <= 0).T[factors.live_rows]
    return Q, zeros


def pool_of(factors, vectors, zeros):
    unit = vectors / vectors.norm(dim=0)
    return Directions(factors.outputs, unit, zeros, torch.full((vectors.shape[1],), 2))


@settings(deadline=None, max_examples=20)
@given(b=st.integers(1, 8), seed=st.integers(0, 1000))
def test_the_bias_gradient_gives_the_scale_of_any_unscaled_directions(b, seed):
    planted = plant(b, m=80, n=40, seed=seed, dtype=torch.float64)
    factors = factorise(planted.view)
    Q, _ = true_directions(planted, factors)
    factor = torch.randn(b, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    C = scale(torch.linalg.inv(Q * factor), factors.bias_coordinates)
    assert torch.allclose(C, torch.linalg.inv(Q), rtol=1e-5, atol=1e-7)


def test_a_direction_without_scale_is_marked():
    C = scale(torch.eye(2, dtype=torch.float64), torch.tensor([1.0, 0.0], dtype=torch.float64))
    assert C.isnan().any(1).tolist() == [False, True]


@settings(deadline=None, max_examples=20)
@given(seed=st.integers(0, 1000))
def test_lambda_is_one_for_the_truth_in_any_order_and_sign(seed):
    planted = plant(5, m=60, seed=seed)
    factors = factorise(planted.view)
    Q, zeros = true_directions(planted, factors)
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(5, generator=generator)
    signs = torch.where(torch.rand(5, generator=generator) < 0.5, -1.0, 1.0)
    chosen = select(factors, pool_of(factors, (Q * signs)[:, order], zeros[:, order]), Watch())
    assert chosen.match == 1.0
    assert int(chosen.contradictions.sum()) == 0
    assert torch.allclose(chosen.C @ chosen.Q, torch.eye(5, dtype=torch.float64), atol=1e-9)


def test_lambda_counts_what_its_definition_counts():
    """The definition of the paper, entry by entry, for a wrong choice of directions."""
    planted = plant(4, m=50, dtype=torch.float64)
    factors = factorise(planted.view)
    Q, zeros = true_directions(planted, factors)
    wrong = Q.clone()
    wrong[:, 0] = Q[:, 0] + 0.5 * Q[:, 1]
    pattern = zeros.clone()
    pattern[:, 0] = zeros[:, 0] & zeros[:, 1]
    chosen = select(factors, pool_of(factors, wrong, pattern), Watch())
    D = factors.L @ chosen.Q
    X = factors.reconstruct(chosen.C)
    Z = planted.model[0].weight @ X.T + planted.model[0].bias[:, None]
    zero = D.abs() < 1e-9 * D.abs().max()
    expected = int(((Z <= 0) & zero).sum() + ((Z > 0) & ~zero).sum()) / D.numel()
    assert chosen.match < 1
    assert abs(chosen.match - expected) < 1e-12


def test_swaps_replace_wrong_directions():
    """Stage one takes the mixes, which are made to look sparser; stage two swaps them out."""
    planted = plant(6, m=90)
    factors = factorise(planted.view)
    Q, zeros = true_directions(planted, factors)
    mixes = torch.stack([Q[:, 0] + Q[:, 1], Q[:, 2] - 0.5 * Q[:, 3]], 1)
    fake = torch.ones(len(zeros), 2, dtype=torch.bool)  # claims to be zero everywhere
    pool = pool_of(factors, torch.cat([mixes, Q], 1), torch.cat([fake, zeros], 1))
    first = sparsest_independent(pool.vectors, pool.sparsity)
    assert {0, 1} <= set(first)
    chosen = select(factors, pool, Watch())
    assert chosen.match == 1.0


def test_an_expired_watch_stops_the_swaps():
    planted = plant(6, m=90)
    factors = factorise(planted.view)
    Q, zeros = true_directions(planted, factors)
    mix = (Q[:, 0] + Q[:, 1])[:, None]
    fake = torch.ones(len(zeros), 1, dtype=torch.bool)
    pool = pool_of(factors, torch.cat([mix, Q], 1), torch.cat([fake, zeros], 1))
    assert select(factors, pool, Watch(max_seconds=0.0)).match < 1


def test_too_few_independent_directions_are_no_choice():
    planted = plant(5, m=60)
    factors = factorise(planted.view)
    Q, zeros = true_directions(planted, factors)
    twice = torch.cat([Q[:, :4], Q[:, :4]], 1)
    assert (
        select(factors, pool_of(factors, twice, torch.cat([zeros[:, :4]] * 2, 1)), Watch()) is None
    )


@given(st.permutations(range(6)))
def test_the_sparsest_independent_set_goes_from_sparse_to_dense(order):
    vectors = torch.eye(3, dtype=torch.float64)[:, [0, 0, 1, 1, 2, 2]]
    sparsity = torch.tensor([0.9, 0.8, 0.7, 0.6, 0.5, 0.4])
    chosen = sparsest_independent(vectors[:, list(order)], sparsity[list(order)])
    assert [order[j] for j in chosen] == [0, 2, 4]
