"""The search by blocks: a neuron's rows in all rounds together."""

import pytest
import torch
from torch import nn

import spear
from spear.factors import factorise
from spear.search.blocks import Blocks, refine_blocks, search_blocks
from spear.search.candidates import CandidatePool
from spear.search.cascade import _zeros_of_its_own, without_contradictions
from spear.search.directions import Directions
from spear.search.dual import chance_off, deflate, dual_problem, error_of_duals
from spear.search.kernels import Rounded, certain_zeros, unit
from spear.search.watch import Watch
from support.planted import gaussian, seeded

B, M, N, R = 30, 24, 90, 10
PIECES = 2  # blocks per neuron: of five rounds each


@pytest.fixture(scope="module")
def rounds():
    """Factors of ten rounds, and the true white directions (b, b)."""
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Linear(N, M), nn.ReLU(), nn.Linear(M, M), nn.ReLU(), nn.Linear(M, 5)
    ).double()
    x, y = gaussian(B, N).double(), torch.randint(5, (B,), generator=seeded(1))
    views, columns = [], []
    for _ in range(R):
        z = net[0](x)
        loss = nn.functional.cross_entropy(net[1:](z), y)
        D, *grads = torch.autograd.grad(loss, [z, *net.parameters()])
        views.append(spear.observe(net, grads))
        columns.append(D.T)
        with torch.no_grad():
            for p, g in zip(net.parameters(), grads, strict=True):
                p.sub_(1.0 * g)
    view = spear.combine(views)
    factors = factorise(view)
    assert view.rounds is not None
    scale = torch.tensor([each.factor for each in view.rounds.each]).double().repeat_interleave(M)
    D = torch.cat(columns) * scale[:, None]
    return factors, unit((factors.left.T @ D).T), D


def switched_on(D):
    """Is a sample on in some round of a block? (count, b)"""
    return (D != 0).view(PIECES, R // PIECES, M, B).any(1).flatten(0, 1)


def test_one_round_has_no_blocks(rounds):
    factors, _, _ = rounds
    net = nn.Sequential(nn.Linear(9, 8), nn.ReLU(), nn.Linear(8, 3))
    loss = nn.functional.cross_entropy(net(gaussian(2, 9)), torch.tensor([0, 1]))
    one = spear.observe(net, torch.autograd.grad(loss, list(net.parameters())))
    assert Blocks.of(factorise(one)) is None
    blocks = Blocks.of(factors)
    assert blocks is not None
    assert blocks.count == PIECES * M
    assert blocks.neurons == M


def test_blocks_are_orthonormal_and_sum_to_one(rounds):
    factors, _, _ = rounds
    blocks = Blocks.of(factors)
    for k in range(blocks.count):
        P = blocks.basis[blocks.block == k]
        torch.testing.assert_close(P @ P.T, torch.eye(len(P)).to(P))
    weighed = blocks.weights[blocks.block, None] * blocks.basis
    frame = torch.linalg.eigvalsh(blocks.basis.T @ weighed)
    assert float(frame.max() / frame.min()) < 1.5


def test_blocks_weigh_as_often_as_they_are_off(rounds):
    """In uncentred data some neurons are on for nearly everyone, and say nothing about zeros."""
    x = 0.5 + 0.3 * gaussian(B, N).double()
    net = nn.Sequential(nn.Linear(N, M), nn.ReLU(), nn.Linear(M, 5)).double()
    views, off = [], []
    for _ in range(4):
        z = net[0](x)
        loss = nn.functional.cross_entropy(net[1:](z), torch.arange(B) % 5)
        grads = torch.autograd.grad(loss, list(net.parameters()))
        views.append(spear.observe(net, grads))
        off.append((z < 0).double().mean(0))
        with torch.no_grad():
            net[0].weight.sub_(0.5 * grads[0])
    factors = factorise(spear.combine(views))
    blocks = Blocks.of(factors, halvings=9)  # a block is a row
    true = torch.cat(off)[factors.live_rows][blocks.of_row >= 0]
    row = torch.empty_like(blocks.of_row).scatter_(0, blocks.of_row, torch.arange(len(true)))
    both = torch.stack([blocks.weights, true[row]])
    assert float(torch.corrcoef(both)[0, 1]) > 0.8


def test_a_sample_has_no_size_in_blocks_that_it_never_switches_on(rounds):
    factors, true, D = rounds
    blocks = Blocks.of(factors)
    sizes = blocks.sizes(blocks.basis @ blocks.here(true))  # (count, b)
    assert float(sizes[~switched_on(D)].max()) < 1e-6
    assert float(sizes[switched_on(D)].median()) > 0.5


def test_halved_blocks_are_of_half_as_many_rounds(rounds):
    factors, true, D = rounds
    finest = Blocks.of(factors, halvings=9)
    assert finest.count == int((factors.live_rows).sum())  # no less than a row
    halved = Blocks.of(factors, halvings=1)
    assert halved.count == 2 * PIECES * M
    sizes = halved.sizes(halved.basis @ halved.here(true))
    assert float((sizes < 1e-6).double().mean()) > float((~switched_on(D)).double().mean())


def test_starts_end_in_samples_and_kernels_are_exact(rounds):
    factors, true, _ = rounds
    blocks, nothing = Blocks.of(factors), true[:0]
    everything = dual_problem(factors)
    guesses = search_blocks(
        blocks, nothing, everything, starts=200, generator=seeded(0), watch=Watch()
    )
    near = torch.cat([(blocks.here(true).T @ unit(g.lift @ g.q, 0)).abs().amax(0) for g in guesses])
    assert float((near > 0.9).double().mean()) > 0.5
    found = refine_blocks(blocks, nothing, guesses, Watch())
    exact = (found @ true.T).abs().amax(1) > 1 - 1e-9
    assert len(set((found @ true.T).abs().argmax(1)[exact].tolist())) > B // 3


def test_what_was_found_is_not_found_again(rounds):
    factors, true, _ = rounds
    blocks = Blocks.of(factors)
    known = true[: B // 2]
    c = torch.linalg.inv(true).T
    left = deflate(dual_problem(factors), known, c[: B // 2])
    guesses = search_blocks(blocks, known, left, starts=200, generator=seeded(0), watch=Watch())
    found = refine_blocks(blocks, known, guesses, Watch())
    nearest = (found @ true.T).abs().max(1)
    new = nearest.indices[nearest.values > 1 - 1e-9]
    assert len(new) > B // 6
    assert bool((new >= B // 2).all())


def test_frames_of_what_is_left_hold_the_missing_samples(rounds):
    """Off blocks stay small in coordinates that known samples leave, although their c are not exact."""
    factors, true, D = rounds
    blocks, k = Blocks.of(factors), B // 2
    known = blocks.here(true[:k])
    duals = torch.linalg.pinv(known)  # c ~ q: nearly
    free = torch.linalg.svd(duals, full_matrices=True).Vh[k:].T
    on = switched_on(D)[:, k:]
    frames = blocks.beside(known, free, chance_off(dual_problem(factors)))
    assert len(frames[-1][0].basis) >= 2 * (B - k)
    for frame, lift in frames:
        assert frame.count == blocks.count
        coordinates = torch.linalg.lstsq(lift, blocks.here(true[k:])).solution
        sizes = frame.sizes(frame.basis @ unit(coordinates, 0))
        assert float(sizes[~on].median()) < 0.5 < float(sizes[on].median())


def test_the_error_of_duals_is_that_of_samples_left_out(rounds):
    factors, true, _ = rounds
    q = Blocks.of(factors).here(true)[:, : B // 2]
    inner = []
    for j in range(q.shape[1]):
        others = [i for i in range(q.shape[1]) if i != j]
        inner.append(torch.linalg.pinv(q[:, others]) @ q[:, j])
    assert error_of_duals(q) == pytest.approx(float(torch.stack(inner).square().mean().sqrt()))
    assert error_of_duals(q[:, :1]) == pytest.approx(B**-0.5)


def test_mixes_are_forgotten_once_one_of_their_samples_is_known(rounds):
    factors, true, D = rounds
    side = factors.outputs
    pool = CandidatePool(side, threshold=0.0)
    mix = unit(true[:1] + true[1:2])
    zeros = (D == 0)[factors.live_rows]
    for white, off in ((true[:1], zeros[:, 0]), (mix, zeros[:, 0] & zeros[:, 1])):
        pool._overdetermined.add([Rounded(unit(white[0] / side.scales), off, white, 2)])
    pool.forget(pool.possible_mixes(_zeros_of_its_own(len(side.white))))
    assert len(pool) == 1
    torch.testing.assert_close(pool.overdetermined()[0], true[:1])


def test_more_rows_cancel_by_accident_in_larger_layers():
    counts = [_zeros_of_its_own(rows) for rows in (100, 1000, 10_000)]
    assert counts == sorted(counts)
    assert counts[0] < counts[-1]


def test_rounds_without_a_sample_say_nothing_about_its_signs(rounds):
    factors, _, D = rounds
    zeros = (D == 0)[factors.live_rows].T.clone()  # (b, rows)
    absent = factors.outputs.round_of_row == 3
    zeros[0, absent] = True
    white = unit(factors.left.T @ D).T  # (b, b)
    sure = certain_zeros(factors.outputs, zeros, white)
    assert bool((sure[0, absent] == 0.5).all())
    assert torch.equal(sure[1:], zeros[1:].double())


def all_true(factors, true, D):
    """The true samples as b directions."""
    side = factors.outputs
    vectors = unit(true / side.scales).T
    zeros = (D == 0)[factors.live_rows]
    return Directions(side, vectors, zeros, torch.full((B,), 2))


def test_a_direction_whose_zeros_contradict_its_signs_is_solved_anew(rounds):
    """A direction that was turned a little, and lost half of its zeros by it."""
    factors, true, D = rounds
    right = all_true(factors, true, D)
    assert without_contradictions(factors, right) is None
    turned = unit(right.vectors[:, 0] + 1e-4 * right.vectors[:, 1])
    fewer = right.zeros[:, 0] & right.zeros[:, 1]
    mended = without_contradictions(factors, right.replaced(0, turned, fewer))
    assert mended is not None
    cosine = (right.vectors[:, 0] @ mended.vectors).abs()  # the order may be another one
    assert float(cosine.max()) > 1 - 1e-12
    assert torch.equal(mended.zeros[:, int(cosine.argmax())], right.zeros[:, 0])
