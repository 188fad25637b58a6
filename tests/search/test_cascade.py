"""The default finder: each stage with planted answers, and the whole of it."""

import math

import pytest
import torch

import spear
from spear import CascadeFinder, Cause, Outcome
from spear.factors import factorise
from spear.search import starts
from spear.search.candidates import CandidatePool
from spear.search.cascade import accepted, cluster, directions_from_signs, equally_weighted
from spear.search.directions import Directions
from spear.search.dual import balance, deflate
from spear.search.kernels import unit
from spear.search.starts import distinct, guess_from_rows, refine_to_kernel, search_from_starts
from spear.search.watch import Watch
from support.planted import bare, gaussian, plant, seeded, truth, weighed, worst_error


@pytest.fixture(scope="module")
def known():
    return truth(plant(16, m=200, n=120))


def nearest(answer, found):
    """For white directions (k, b): which planted one is nearest, and 1 - |cos|."""
    cosine = (unit(found) @ answer.q.T).abs().max(1)
    return cosine.indices, 1 - cosine.values


def near_duplicates(shift=0.03, **options):
    x = gaussian(10, 80, 3)
    x[1] = x[0] + shift * gaussian(1, 80, 4)[0]
    y = torch.arange(10)
    y[1] = y[0]
    return plant(10, m=150, inputs=x, labels=y, **options)


def test_the_search_comes_near_most_samples(known):
    even = balance(known.whole)
    q, score = search_from_starts(even, 256, 80, seeded(0))
    which, distance = nearest(known, (even.q_basis @ q).T)
    assert len(set(which[distance < 0.05].tolist())) >= 12
    assert score.shape == (200, q.shape[1])
    best = score[:, 0].argsort()[:20]  # the rows it is surest of are off
    assert bool(known.off[best, which[0]].all())


def test_the_last_sample_is_read_off_exactly(known):
    left = balance(deflate(known.whole, known.q[:15], known.C[:15]))
    _, z = guess_from_rows(left)
    assert torch.equal((z <= 0)[:, 0], known.off[:, 15])


def test_distinct_keeps_the_best_of_each():
    q = torch.eye(3)[:, [0, 0, 1, 2]].clone()
    q[:, 3] = torch.nan
    kept = distinct(q, torch.tensor([1.0, 5.0, 3.0, 9.0]), 10)
    assert kept.tolist() == [1, 2]
    assert distinct(q, torch.tensor([1.0, 5.0, 3.0, 9.0]), 1).tolist() == [1]
    assert distinct(q[:, :0], torch.zeros(0), 4).tolist() == []


@pytest.mark.parametrize("noise", [0.05, 0.2])
def test_refinement_makes_near_guesses_exact(known, noise):
    even, side = balance(known.whole), known.factors.outputs
    generator = seeded(1)
    q = unit(torch.linalg.solve(even.q_basis, known.Q), 0)
    q = unit(q + noise * torch.randn(q.shape, generator=generator, dtype=q.dtype) / 4, 0)
    Z = known.Z / known.Z.square().mean(0).sqrt()
    exact = refine_to_kernel(side, even, q, (even.U @ q).abs() + Z)
    which, distance = nearest(known, exact)
    assert set(which.tolist()) == set(range(16))
    assert float(distance.max()) < 1e-9


def test_of_ranked_guesses_the_rest_is_left_out_after_a_piece_without_any(known, monkeypatch):
    monkeypatch.setattr(starts, "_AT_ONCE", 4 * known.factors.outputs.white.numel())  # four a piece
    monkeypatch.setattr(starts, "_PASSES", 1)  # or it would find samples from noise
    side, even = known.factors.outputs, balance(known.whole)
    true = unit(torch.linalg.solve(even.q_basis, known.Q), 0)[:, :4]
    noise = torch.randn(len(true), 4, generator=seeded(0), dtype=torch.float64)
    Z = known.Z[:, :4]
    score = torch.randn(Z.shape, generator=seeded(1), dtype=torch.float64)
    q, scores = torch.cat([noise, true], 1), torch.cat([score, Z], 1)
    assert len(refine_to_kernel(side, even, q, scores)) == 4
    assert len(refine_to_kernel(side, even, q, scores, ranked=True)) == 0
    assert len(refine_to_kernel(side, even, q.flip(1), scores.flip(1), ranked=True)) == 4


def test_refinement_makes_nothing_of_noise(known):
    even, side = balance(known.whole), known.factors.outputs
    generator = seeded(2)
    q = unit(torch.randn(16, 40, generator=generator, dtype=torch.float64), 0)
    score = torch.randn(200, 40, generator=generator, dtype=torch.float64)
    found = refine_to_kernel(side, even, q, score)
    _, distance = nearest(known, found) if len(found) else (None, torch.zeros(1))
    assert float(distance.max()) < 1e-9  # whatever it settles on is a sample
    assert len(refine_to_kernel(side, even, q[:, :0], score[:, :0])) == 0


def test_only_samples_are_vouched_for(known):
    side = known.factors.outputs
    pool = CandidatePool(side, threshold=16 / 200)
    found = pool.rounded(torch.cat([known.q[:4], unit(known.q[4:8] + known.q[8:12])]))
    firm = accepted(balance(known.whole), found, doubtful=True)
    which, distance = nearest(known, (found.vectors * side.scales[:, None]).T)
    assert set(which[firm].tolist()) == {0, 1, 2, 3}
    assert float(distance[firm].max()) < 1e-9


def test_a_cluster_is_known_by_its_span():
    answer = truth(near_duplicates())
    others = answer.q[2:]
    left = balance(deflate(answer.whole, others, answer.C[2:]))
    span = cluster(answer.factors.outputs, left)
    assert span.shape == (2, 10)
    inside = span.T @ (span @ answer.q[:2].T)
    assert torch.allclose(inside, answer.q[:2].T, atol=1e-4)
    even = equally_weighted(others, span, answer.whole.h)
    assert torch.allclose(even.T @ even, span.T @ span, atol=1e-9)  # the same span
    weight = torch.linalg.inv(torch.cat([others, even]).T)[8:] @ answer.whole.h
    assert torch.allclose(weight[0], weight[1])


def test_samples_with_their_own_patterns_are_no_cluster(known):
    left = balance(deflate(known.whole, known.q[2:], known.C[2:]))
    assert len(cluster(known.factors.outputs, left)) == 0


@pytest.mark.parametrize(
    ("b", "m", "dtype"),
    [(16, 120, torch.float64), (40, 200, torch.float32), (60, 300, torch.float32)],
)
def test_large_batches_come_back(b, m, dtype):
    planted = plant(b, m=m, n=2 * b, dtype=dtype)
    result = spear.invert(planted.view, model=planted.model)
    assert result.outcome is Outcome.EXACT
    assert not bool(result.approximate.any())
    assert worst_error(result.inputs, planted.inputs) < (1e-3 if dtype == torch.float32 else 1e-8)
    assert result.stats.get("submatrices", 0) == 0  # the cascade alone


def test_when_stuck_it_ends_and_says_so():
    planted = plant(30, m=66, n=120)
    finder = CascadeFinder(patience=2, max_samples=5_000)
    result = spear.invert(planted.view, model=planted.model, finder=finder)
    assert result.outcome is not Outcome.EXACT
    assert "got stuck on the last" in result.explanation
    assert result.stats["rounds"] >= 2
    wrong = torch.cdist(result.inputs[result.certified], planted.inputs).amin(1) > 1e-2
    assert not bool(wrong.any())


class SomeOf:
    """A finder that knows the truth, and gives away only a part of it."""

    def __init__(self, answer, count):
        self.answer, self.count = answer, count

    def search(self, factors, *, generator, watch):
        pool = CandidatePool(factors.outputs, threshold=0.1, watch=watch)
        pool.add(self.answer.q[: self.count])
        yield pool.snapshot()

    def satisfied(self, factors, match):
        return match >= 1


@pytest.mark.parametrize("count", [4, 12])
def test_part_of_a_batch_comes_back_as_pictures(known, count):
    planted = plant(16, m=200, n=120)
    result = spear.invert(planted.view, finder=SomeOf(known, count))
    assert result.outcome is Outcome.APPROXIMATE
    assert result.inputs.shape == (count, 120)
    assert bool(result.approximate.all())
    assert not bool(result.certified.any())
    assert f"{count} of 16 samples were found" in result.reason
    cosine = (unit(result.inputs) @ unit(planted.inputs).T).amax(1)
    assert float(cosine.min()) > 0.85


def test_a_part_too_small_to_mean_anything_is_left_out():
    planted = plant(6, m=13, n=60)
    answer = truth(planted)
    result = spear.invert(planted.view, finder=SomeOf(answer, 2))
    assert len(result.inputs) == 0
    assert (result.outcome, result.cause) == (Outcome.INCONCLUSIVE, Cause.NARROW)


@pytest.mark.parametrize("shift", [1e-4, 0.01, 0.03])
def test_near_duplicates_leave_the_others_exact(shift):
    """So near that their difference drowns: what comes back is their mean, never called exact."""
    planted = near_duplicates(shift)
    for view in (planted.view, bare(planted.view)) if shift == 0.03 else (planted.view,):
        result = spear.invert(view)
        assert result.outcome is Outcome.PARTIAL
        assert worst_error(result.inputs[result.certified], planted.inputs[2:]) < 1e-3
        pair = result.inputs[~result.certified]
        assert float((pair - planted.inputs[0]).abs().max()) < 0.05
        assert "near-duplicates" in result.explanation or shift < 0.03


def test_a_sample_a_thousand_times_weaker_comes_back():
    """In single precision only the other samples can be proved."""
    weights = torch.ones(12)
    weights[3] = 1e-3
    planted = plant(12, m=150, n=100, loss=weighed(weights))
    result = spear.invert(planted.view, model=planted.model)
    assert result.outcome is Outcome.PARTIAL
    assert result.cause in (Cause.SCALE, Cause.MERGED)
    assert worst_error(result.inputs, planted.inputs) < 5e-3
    faint = result.inputs[~result.certified]
    assert torch.allclose(faint, planted.inputs[3:4], atol=5e-3)
    assert not bool(result.approximate.any())
    precise = plant(12, m=150, n=100, loss=weighed(weights), dtype=torch.float64)
    result = spear.invert(precise.view)
    assert result.outcome is Outcome.EXACT
    assert worst_error(result.inputs, precise.inputs) < 1e-9


def test_more_starts_where_rounds_find_nothing():
    planted = plant(13, m=26, n=60)
    few = spear.invert(planted.view, finder=CascadeFinder(patience=2, max_samples=0))
    many = spear.invert(planted.view, finder=CascadeFinder(patience=8, max_samples=0))
    assert few.stats["starts"] < many.stats["starts"]
    per_round = many.stats["starts"] / math.ceil(many.stats["rounds"] / 2)
    assert per_round > 128  # later rounds take more


def test_an_output_layer_falls_back_to_sampling():
    """Linear programmes find none of the eighteen samples, so sampling takes over."""
    planted = plant(18, m=60, depth=3, classes=60)
    factors, watch = factorise(planted.layer("4")), Watch()
    finder = CascadeFinder(patience=1, max_samples=2000)
    pools = list(finder.search(factors, generator=seeded(0), watch=watch))
    assert pools == []
    assert watch.stats["programmes"] == 18
    assert watch.stats["submatrices"] >= 2000


def test_directions_that_do_not_span_the_batch_are_not_solved_anew(known):
    side = known.factors.outputs
    vectors = unit(known.q[:4].T / side.scales[:, None], 0)
    pool = Directions(side, vectors, known.off[:, :4], torch.full((4,), 2))
    assert directions_from_signs(known.factors, pool).shape == (0, 16)
