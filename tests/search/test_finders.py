"""What every finder must do: ours, the paper's and a user's own. Add a new one to FINDERS."""

import itertools
import random
from dataclasses import dataclass

import numpy as np
import pytest
import torch

import spear
from spear import CascadeFinder, InvalidOption, Outcome, Proof, SamplingFinder, theory
from spear.experiments.common.searching import PlainFinder
from spear.factors import factorise
from spear.inversion import FINDERS as BY_NAME
from spear.search import CandidatePool, Watch
from spear.tolerances import UNDECIDED
from support.judgements import bits, random_states
from support.planted import plant, seeded, truth, worst_error


@dataclass(frozen=True)
class OneByOne:
    """A user's finder, as in docs/extending.md: kernels of random submatrices, one by one."""

    max_samples: int = 5_000

    def satisfied(self, factors, match):
        return match == 1.0

    def search(self, factors, *, generator, watch):
        side, b = factors.outputs, factors.b
        pool = CandidatePool(side, theory.sparsity_threshold(side.size), watch)
        for _ in range(self.max_samples):
            if watch.expired:
                return
            rows = torch.randperm(len(side.white), generator=generator)[: b - 1]
            kernel = torch.linalg.svd(side.white[rows]).Vh[-1:]
            done = watch.count("submatrices")
            if pool.add(kernel) and pool.complete:
                yield pool.snapshot()
            watch.report("search", done=done, found=len(pool), batch_size=b)
        watch.remark(f"{self.max_samples} submatrices (max_samples=) were not enough")


FINDERS = {
    "cascade": "cascade",
    "sampling": "sampling",
    "SamplingFinder": SamplingFinder(adaptive=False, independent=True, at_once=500),
    "PlainFinder": PlainFinder(at_once=500),
    "OneByOne": OneByOne(),
}
NO_INPUTS = {"PlainFinder", "OneByOne"}  # solve no layer whose inputs alone are sparse
TOLERANCE = {torch.float32: 2e-5, torch.float64: 1e-9}


@pytest.fixture(params=FINDERS)
def name(request):
    return request.param


@pytest.fixture
def finder(name):
    return FINDERS[name]


def pools_of(finder, factors, *, seed=0, watch=None):
    """What a search yields, one pool after the other."""
    finder = BY_NAME[finder]() if isinstance(finder, str) else finder
    return finder.search(factors, generator=seeded(seed), watch=watch or Watch())


def pools_until_complete(finder, factors, seed=0):
    """What a search yields until it has every sample."""
    pools = []
    for pool in pools_of(finder, factors, seed=seed):
        pools.append(pool)
        if int(torch.linalg.matrix_rank(pool.vectors)) == factors.b:
            return pools
    raise AssertionError("the search ended without all samples")


# The batch comes back


@pytest.mark.parametrize(
    ("b", "m", "seed", "dtype"),
    [
        (1, 30, 0, torch.float32),
        (2, 40, 1, torch.float64),
        (3, 60, 2, torch.float32),
        (6, 90, 3, torch.float32),
    ],
)
def test_the_planted_batch_comes_back(finder, b, m, dtype, seed):
    planted = plant(b, m=m, dtype=dtype, seed=seed)
    result = spear.invert(planted.view, model=planted.model, finder=finder, max_seconds=20)
    assert (result.outcome, result.proof) == (Outcome.EXACT, Proof.REPLAY), result.reason
    assert (result.batch_size, result.match) == (b, 1.0)
    assert bool(result.certified.all())
    assert not bool(result.approximate.any())
    assert result.inputs.dtype == dtype
    assert worst_error(result.inputs, planted.inputs) < TOLERANCE[dtype]
    order = torch.cdist(result.inputs, planted.inputs).argmin(1)
    assert torch.equal(result.labels, planted.labels[order])


@pytest.mark.parametrize(("layer", "relu"), [("2", "both"), ("4", "before")])
def test_a_relu_before_the_layer_is_no_obstacle(name, finder, layer, relu):
    planted = plant(4, m=90, n=90, depth=3, classes=20)
    view = planted.layer(layer)
    assert view.relu == relu
    hidden = planted.model[: int(layer)](planted.inputs).detach()
    if relu == "before" and name in NO_INPUTS:
        result = spear.invert(view, finder=finder, max_seconds=0.2)
        assert result.outcome is not Outcome.EXACT
        assert not bool(result.certified.any())
        return
    result = spear.invert(view, finder=finder, max_seconds=20)
    assert result.outcome is Outcome.EXACT, result.reason
    assert worst_error(result.inputs, hidden) < TOLERANCE[torch.float32]


# The pools

SIDES = {"0": {"outputs"}, "2": {"outputs", "inputs"}, "4": {"inputs"}}


@pytest.mark.parametrize(
    ("name", "layer"),
    [(name, layer) for name in FINDERS for layer in SIDES if layer != "4" or name not in NO_INPUTS],
)
def test_directions_are_unit_kernels_of_their_zeros(name, layer):
    factors = factorise(plant(4, m=60, n=60, depth=3, classes=20).layer(layer))
    for pool in pools_until_complete(FINDERS[name], factors):
        rows, c = pool.side.basis.shape[0], len(pool)
        assert pool.side.name in SIDES[layer]
        assert pool.side is getattr(factors, pool.side.name)
        assert pool.vectors.shape == (4, c)
        assert pool.zeros.shape == (rows, c)
        assert pool.redundancy.shape == (c,)
        dtypes = (pool.vectors.dtype, pool.zeros.dtype, pool.redundancy.dtype)
        assert dtypes == (torch.float64, torch.bool, torch.int64)
        assert set(pool.redundancy.tolist()) <= {0, 1, 2}
        assert torch.allclose(pool.vectors.norm(dim=0), torch.ones(c, dtype=torch.float64))
        entries = (pool.side.basis @ pool.vectors).abs()
        assert float(entries[pool.zeros].max()) <= UNDECIDED * pool.side.zero
        assert float(entries[~pool.zeros].min()) >= 0.999 * pool.side.zero
        for zeros in pool.zeros.T:
            assert float(torch.linalg.svdvals(pool.side.basis[zeros])[-2]) > pool.side.zero


def lasting(pool):
    """Directions that later pools must keep: those with zeros to spare, or all if nobody looked."""
    looked = bool((pool.redundancy > 0).any())
    return pool.pick((pool.redundancy == 2).nonzero().flatten().tolist()) if looked else pool


# Batches that take several rounds, and looks so frequent that they show some samples before others.
# OneByOne has nothing to show until it has them all.
SLOWLY = {
    "cascade": ("cascade", 20, 70),
    "CascadeFinder": (CascadeFinder(starts=4, steps=60, patience=3), 20, 70),
    "SamplingFinder": (SamplingFinder(at_once=4, max_samples=3_000), 5, 50),
    "PlainFinder": (PlainFinder(at_once=4, max_samples=500), 5, 50),
}


@pytest.mark.parametrize("name", SLOWLY)
@pytest.mark.parametrize("layer", ["0", "2"])
def test_the_pools_of_a_side_only_grow(name, layer):
    finder, b, m = SLOWLY[name]
    factors = factorise(plant(b, m=m, n=120, depth=3).layer(layer))
    by_side = {}
    for pool in pools_of(finder, factors):
        by_side.setdefault(pool.side.name, []).append(pool)
    assert max(len(pools) for pools in by_side.values()) > 1
    for pools in by_side.values():
        for earlier, later in itertools.pairwise(pools):
            there = {tuple(vector) for vector in later.vectors.T.tolist()}
            assert {tuple(vector) for vector in lasting(earlier).vectors.T.tolist()} <= there


def test_all_samples_are_in_the_last_pool(finder):
    answer = truth(plant(5, m=90))
    last = pools_until_complete(finder, answer.factors)[-1]
    white = torch.nn.functional.normalize(last.vectors * last.side.scales[:, None], dim=0)
    cosine = (answer.q @ white).abs()
    assert float(cosine.amax(1).min()) > 1 - 1e-9
    assert torch.equal(last.zeros[:, cosine.argmax(1)], answer.off)


# Randomness, and what belongs to the caller


def test_the_same_seed_gives_the_same_bits(finder):
    planted = plant(5, m=90)  # of more than four samples the cascade draws starts
    runs = [spear.invert(planted.view, finder=finder, generator=seeded(5)) for _ in range(2)]
    assert bits(runs[0]) == bits(runs[1])
    factors = factorise(planted.view)
    first, second = (pools_until_complete(finder, factors, seed=5) for _ in range(2))
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one.vectors, other.vectors)
        assert torch.equal(one.zeros, other.zeros)


def test_randomness_comes_from_the_generator(finder):
    finder = BY_NAME[finder]() if isinstance(finder, str) else finder
    generator = seeded(5)
    before = generator.get_state()
    next(finder.search(factorise(plant(8, m=90).view), generator=generator, watch=Watch()))
    assert not torch.equal(generator.get_state(), before)


def test_the_global_random_state_is_neither_read_nor_changed(finder):
    planted, results = plant(4, m=60, n=40), []
    for seed in (1, 2):
        torch.manual_seed(seed)
        np.random.seed(seed)
        random.seed(seed)
        before = random_states()
        results.append(bits(spear.invert(planted.view, finder=finder)))
        assert random_states() == before
    assert results[0] == results[1]


def test_the_callers_tensors_stay_as_they_are(finder):
    planted = plant(4, n=60, depth=3)
    before = {name: g.clone() for name, g in planted.gradients.items()}
    weights = {name: p.detach().clone() for name, p in planted.model.named_parameters()}
    spear.invert(planted.view, model=planted.model, finder=finder)
    assert all(torch.equal(before[n], g) for n, g in planted.gradients.items())
    assert all(torch.equal(weights[n], p) for n, p in planted.model.named_parameters())
    assert all(p.grad is None for p in planted.model.parameters())


def test_the_factors_stay_as_they_are(finder):
    factors = factorise(plant(4, m=60, n=60, depth=3).layer("2"))

    def tensors():
        sides = [
            (side.basis, side.white, side.scales) for side in (factors.outputs, factors.inputs)
        ]
        own = (factors.left, factors.spectrum, factors.live_rows, factors.preactivation)
        return [*own, *itertools.chain(*sides), factors.bias_coordinates]

    before = [tensor.clone() for tensor in tensors()]
    pools = pools_until_complete(finder, factors)
    assert len(pools[-1])
    assert all(torch.equal(one, other) for one, other in zip(before, tensors(), strict=True))


# The end


def test_a_match_of_one_is_worth_stopping_at_and_less_is_not(finder):
    finder = BY_NAME[finder]() if isinstance(finder, str) else finder
    factors = factorise(plant(4).view)
    assert finder.satisfied(factors, 1.0)
    assert not finder.satisfied(factors, 0.999)


def test_nothing_is_begun_when_the_time_is_over(finder):
    watch = Watch(max_seconds=0.0)
    assert list(pools_of(finder, factorise(plant(4).view), watch=watch)) == []
    assert watch.count("submatrices", 0) <= 1
    assert watch.count("starts", 0) == 0


ENDLESS = {
    "CascadeFinder": CascadeFinder(patience=10**6),
    "SamplingFinder": SamplingFinder(max_samples=10**12),
    "PlainFinder": PlainFinder(max_samples=10**12),
    "OneByOne": OneByOne(max_samples=10**12),
}


@pytest.mark.parametrize("name", ENDLESS)
def test_a_search_ends_with_its_time(name):
    factors, watch = factorise(plant(40, m=90, n=100).view), Watch(max_seconds=0.2)
    for pool in pools_of(ENDLESS[name], factors, watch=watch):
        assert pool.vectors.shape[0] == 40
    assert 0.2 <= watch.seconds < 5


def test_invert_returns_in_time(finder):
    planted, watch = plant(40, m=90, n=100), Watch()
    result = spear.invert(planted.view, finder=finder, max_seconds=0.2)
    assert watch.seconds < 5
    assert result.outcome in (Outcome.INCONCLUSIVE, Outcome.APPROXIMATE)
    assert not bool(result.certified.any())
    assert result.batch_size == 40


SPENT = "its budget of 100 submatrices (max_samples=) was spent"
BUDGETS = {  # with how many submatrices each may go over, a step of its own at most, and its words
    "CascadeFinder": (
        CascadeFinder(patience=1, max_samples=100),
        512 * 20,
        "got stuck on the last",
    ),
    "SamplingFinder": (SamplingFinder(max_samples=100), 20, SPENT),
    "PlainFinder": (PlainFinder(max_samples=100), 20, SPENT),
    "OneByOne": (OneByOne(max_samples=100), 0, "100 submatrices (max_samples=) were not enough"),
}


@pytest.mark.parametrize("name", BUDGETS)
def test_a_search_ends_with_its_budget_and_says_so(name):
    finder, over, said = BUDGETS[name]
    planted, watch = plant(20, m=36, n=60), Watch()  # too few zeros for a sample
    for pool in pools_of(finder, factorise(planted.view), watch=watch):
        assert pool.vectors.shape[0] == 20
    assert 100 <= watch.stats["submatrices"] <= 100 + over
    assert said in "; ".join(watch.remarks)
    result = spear.invert(planted.view, finder=finder)
    assert result.outcome is not Outcome.EXACT
    assert said in result.explanation


# No samples


def without_samples(kind, seed=0):
    """A matrix of random numbers, of full rank or of the rank that six samples have."""
    D, X = (
        torch.randn(size, generator=seeded(seed + i)) for i, size in enumerate([(60, 6), (6, 80)])
    )
    G = D @ X if kind == "of low rank" else torch.randn(60, 80, generator=seeded(seed))
    W = torch.randn(60, 80, generator=seeded(seed + 9))
    return spear.LayerUpdate(weight=W, bias=W[:, 0], weight_grad=G, bias_grad=D.sum(1))


@pytest.mark.parametrize("kind", ["of low rank", "of full rank"])
def test_numbers_without_samples_behind_them_give_nothing(finder, kind):
    watch = Watch()
    result = spear.invert(without_samples(kind), finder=finder, max_seconds=0.3)
    assert watch.seconds < 5
    assert result.batch_size == (6 if kind == "of low rank" else 0)
    assert result.outcome in (Outcome.INCONCLUSIVE, Outcome.FAILED)
    assert len(result.inputs) == 0


@pytest.mark.parametrize("finder", list(BY_NAME))
def test_a_name_is_the_finder_with_its_usual_options(finder):
    planted = plant(5, m=60)
    by_name = spear.invert(planted.view, finder=finder)
    assert bits(by_name) == bits(spear.invert(planted.view, finder=BY_NAME[finder]()))


@pytest.mark.parametrize(
    ("finder", "options"),
    [
        (CascadeFinder, {"starts": 0}),
        (CascadeFinder, {"steps": 0}),
        (CascadeFinder, {"patience": 0}),
        (CascadeFinder, {"max_samples": -1}),
        (SamplingFinder, {"max_samples": 0}),
        (SamplingFinder, {"false_rejection": 0.0}),
        (SamplingFinder, {"threshold": 1.0}),
        (SamplingFinder, {"stop_match": 1.5}),
        (SamplingFinder, {"rows": 0}),
    ],
)
def test_options_are_checked(finder, options):
    with pytest.raises(InvalidOption, match="expected"):
        finder(**options)
