"""A user's finder: mistakes are said, lies prove nothing, and what others would find is unharmed."""

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

import spear
from spear import CascadeFinder, Outcome, SamplingFinder
from spear.errors import InvalidExtension
from spear.factors import factorise
from spear.federated import defences, fedsgd
from spear.judge import Cause
from spear.search import Directions, Watch, made_finder, pools_of, sparsest_independent, unit
from support.planted import plant, seeded, worst_error


class Wrapped:
    """A user's finder that hands on what ours yields, changed by `change`."""

    def __init__(self, change=lambda pool, factors: pool, inner=None):
        self.change, self.inner = change, inner or CascadeFinder()

    def satisfied(self, factors, match):
        return match == 1.0

    def search(self, factors, *, generator, watch):
        for pool in self.inner.search(factors, generator=generator, watch=watch):
            yield self.change(pool, factors)


def changed(**parts):
    """A change of some parts of a pool."""

    def change(pool, factors):
        kept = {n: getattr(pool, n) for n in ("side", "vectors", "zeros", "redundancy")}
        return Directions(**{**kept, **{n: make(pool) for n, make in parts.items()}})

    return change


def with_nan(vectors):
    vectors = vectors.clone()
    vectors[0, 1] = torch.nan
    return vectors


MISTAKES = {
    "pool 1 is a tensor": lambda pool, factors: pool.vectors,
    "pool 1 is None": lambda pool, factors: None,
    "expected side to be factors.outputs": changed(side=lambda p: "outputs"),
    r"expected vectors as a tensor \(b, c\) = \(4, c\), got a list": changed(
        vectors=lambda p: p.vectors.tolist()
    ),
    r"expected vectors \(b, c\) = \(4, c\), got \(3, \d+\)": changed(
        vectors=lambda p: p.vectors[:3]
    ),
    r"expected zeros \(rows, c\) = \(\d+, \d+\), got": changed(zeros=lambda p: p.zeros.T),
    r"expected redundancy \(c,\)": changed(redundancy=lambda p: p.redundancy[:-1]),
    "expected vectors of torch.float64, got torch.float32": changed(
        vectors=lambda p: p.vectors.float()
    ),
    "expected zeros of torch.bool, got torch.float32": changed(zeros=lambda p: p.zeros.float()),
    "expected redundancy of torch.int64": changed(redundancy=lambda p: p.redundancy.double()),
    "expected finite vectors, got NaN": changed(vectors=lambda p: with_nan(p.vectors)),
    "expected vectors on cpu, got it on meta": changed(vectors=lambda p: p.vectors.to("meta")),
    "expected vectors of unit length, got 2 in column 0": changed(vectors=lambda p: 2 * p.vectors),
    "zeros marks a row of column": changed(zeros=lambda p: torch.ones_like(p.zeros)),
}


@pytest.mark.parametrize("words", MISTAKES)
def test_a_pool_that_is_none_is_an_error_of_ours(words):
    view = plant(4, m=60).view
    with pytest.raises(InvalidExtension, match=words) as caught:
        spear.invert(view, finder=Wrapped(MISTAKES[words]), max_seconds=20)
    assert "the finder Wrapped: pool 1" in str(caught.value)


def raising(pool, factors):
    raise LookupError("no such direction")


def overwriting(pool, factors):
    factors.view.weight_grad.mul_(2)
    return pool


class Shrinking(Wrapped):
    """Yields what is new instead of all that was found."""

    def search(self, factors, *, generator, watch):
        *_, pool = self.inner.search(factors, generator=generator, watch=watch)
        yield pool.pick([0, 1])
        yield pool.pick([2])


class Leaving(Wrapped):
    def search(self, factors, *, generator, watch):
        yield from super().search(factors, generator=generator, watch=watch)
        raise SystemExit(3)


class Listing(Wrapped):
    def search(self, factors, *, generator, watch):
        return list(super().search(factors, generator=generator, watch=watch))


class Forgetting(Wrapped):
    def search(self, factors, *, generator, watch):
        pass


class OldCall(Wrapped):
    def search(self, factors):
        yield


OLD_CALL = OldCall.search.__code__.co_firstlineno


class NeverSure(Wrapped):
    def satisfied(self, factors, match):
        return torch.tensor([match, match])


class Confused(Wrapped):
    def satisfied(self, factors, match):
        return 1 / (match - match) > 0


@pytest.mark.parametrize(
    ("finder", "words"),
    [
        (Wrapped(raising), r"search failed at test_checking.py, line \d+ \(LookupError: no such"),
        (Wrapped(overwriting), "search changed weight_grad in place: clone before changing"),
        (Shrinking(), "pool 2: it has 1 directions, the one before had 2: expected all"),
        (Forgetting(), "search returned None, expected an iterator"),
        (OldCall(), rf"search failed at test_checking.py, line {OLD_CALL} .*unexpected keyword"),
        (NeverSure(), r"satisfied returned a tensor \(2,\), expected True or False"),
        (Confused(), r"satisfied failed at test_checking.py, line \d+ \(ZeroDiv"),
    ],
)
def test_a_search_that_goes_wrong_is_said_with_its_place(finder, words):
    with pytest.raises(InvalidExtension, match=words):
        spear.invert(plant(4, m=60).view, finder=finder, max_seconds=20)


class Numbered(Wrapped):
    """Yields numpy's arrays, some of them or all."""

    def __init__(self, *names):
        super().__init__()
        self.names = names

    def search(self, factors, *, generator, watch):
        for pool in super().search(factors, generator=generator, watch=watch):
            arrays = {name: getattr(pool, name).numpy() for name in self.names}
            yield dataclasses.replace(pool, **arrays)


@pytest.mark.parametrize(
    ("names", "complaints"),
    [
        (
            ["vectors", "zeros", "redundancy"],
            [
                "expected vectors as a tensor (b, c) = (4, c), got a ndarray",
                "expected zeros as a tensor (rows, c) = (57, c), got a ndarray",
                "expected redundancy as a tensor (c,) = (c,), got a ndarray",
            ],
        ),
        (["vectors"], ["expected vectors as a tensor (b, c) = (4, c), got a ndarray"]),
        (["zeros"], ["expected zeros as a tensor (rows, c) = (57, 4), got a ndarray"]),
    ],
)
def test_an_array_of_numpy_is_all_that_is_complained_of(names, complaints):
    with pytest.raises(InvalidExtension) as error:
        spear.invert(plant(4, m=60).view, finder=Numbered(*names), max_seconds=20)
    assert str(error.value).partition("pool 1: ")[2].split("; ") == complaints


def test_an_object_that_lacks_a_method_is_told_which():
    class Typo:
        serch = satisfied = print

    with pytest.raises(InvalidExtension, match="this Typo has no search"):
        spear.invert(plant(4, m=60).view, finder=Typo())


class Silent(Wrapped):
    def search(self, factors, *, generator, watch):
        return iter(())


class Empty(Wrapped):
    def search(self, factors, *, generator, watch):
        side = factors.outputs
        none = side.basis.new_zeros(factors.b, 0)
        zeros = torch.zeros(len(side.basis), 0, dtype=torch.bool)
        yield Directions(side, none, zeros, torch.zeros(0, dtype=torch.int64))


@pytest.mark.parametrize("finder", [Silent(), Empty()])
@pytest.mark.parametrize("b", [1, 4])
def test_a_finder_without_a_candidate_is_named_and_nothing_else_blamed(finder, b):
    result = spear.invert(plant(b, m=60).view, finder=finder, max_seconds=20)
    assert (result.outcome, result.cause) == (Outcome.INCONCLUSIVE, Cause.FINDER)
    assert result.reason.startswith(
        f"finder {type(finder).__name__} found no candidate for {b} sam"
    )
    assert "ReLU" not in result.reason
    late = spear.invert(plant(b, m=60).view, finder=finder, max_seconds=1e-9)
    assert late.cause is Cause.TIME


def test_a_finder_that_leaves_does_not_end_the_process():
    finder = Leaving()
    finder.satisfied = lambda factors, match: False
    with pytest.raises(InvalidExtension, match="SystemExit"):
        spear.invert(plant(3, m=60).view, finder=finder, max_seconds=20)


@pytest.mark.parametrize("finder", [Wrapped(), Listing(), Wrapped(inner=SamplingFinder())])
def test_one_that_hands_on_what_ours_finds_finds_the_same(finder):
    planted = plant(5, m=80)
    result = spear.invert(planted.view, model=planted.model, finder=finder, max_seconds=30)
    assert result.outcome is Outcome.EXACT
    assert worst_error(result.inputs, planted.inputs) < 2e-5


def noisy(sigma, m=100, seed=0):
    planted = plant(4, m=m, seed=seed)
    sent = fedsgd(planted.model, planted.inputs, planted.labels)
    if sigma:
        sent = defences.add_noise(sent, sigma=sigma, generator=seeded(seed))
    return planted, spear.observe(planted.model, sent)


@pytest.mark.parametrize(("sigma", "layer"), [(0, None), (1e-5, None), (0, "2"), (0, "4")])
def test_pools_of_ours_pass(sigma, layer):
    """On both sides, and under noise: so whoever builds on ours gets no error."""
    view = noisy(sigma)[1]
    if layer is not None:
        view = plant(4, m=60, n=60, depth=3, classes=20).layer(layer)
    factors = factorise(view)
    options = {"generator": seeded(0), "watch": Watch(max_seconds=30)}
    passed = list(pools_of(Wrapped(), factors, **options))
    assert passed
    options = {"generator": seeded(0), "watch": Watch(max_seconds=30)}
    for ours, theirs in zip(pools_of(CascadeFinder(), factors, **options), passed, strict=True):
        assert torch.equal(theirs.zeros, ours.zeros)
        assert bool((theirs.redundancy <= ours.redundancy).all())
        cosines = (theirs.vectors * ours.vectors).sum(0)
        assert bool((cosines > 1 - 1e-9).all())


# Finders that lie


def chosen(factors, generator, watch):
    """The b true directions."""
    for pool in CascadeFinder().search(factors, generator=generator, watch=watch):
        white = unit(pool.vectors * factors.outputs.scales[:, None], 0)
        picked = sparsest_independent(white, pool.sparsity + pool.redundancy)
        if len(picked) == factors.b:
            return pool.pick(picked)
    raise AssertionError("ours found no b directions")


@dataclass
class Adversary:
    """Changes true directions, and calls zero whatever would hide it."""

    change: Any
    found: list = field(default_factory=list)

    def satisfied(self, factors, match):
        return True

    def search(self, factors, *, generator, watch):
        pool = chosen(factors, generator, watch)
        made = self.change(pool, factors, generator)
        self.found.append(made)
        yield made


def mixes(pool, factors, generator):
    mixed = pool.vectors.clone()
    mixed[:, 0] += 0.3 * mixed[:, 1]
    return honest_zeros(pool.side, unit(mixed, 0))


def random(pool, factors, generator):
    return honest_zeros(pool.side, unit(seeded_like(pool.vectors, generator), 0))


def duplicates(pool, factors, generator):
    return pool.pick([0] * len(pool))


def spoiled(pool, factors, generator):
    """Moved towards another sample as far as the zeros may be off."""
    moved = pool.vectors.clone()
    side, level = pool.side, 9.0 * pool.side.zero
    for j in range(len(pool)):
        low, high, other = 0.0, 1.0, pool.vectors[:, (j + 1) % len(pool)]
        for _ in range(40):
            middle = (low + high) / 2
            q = unit(pool.vectors[:, j] + middle * other)
            fits = float((side.basis @ q).abs()[pool.zeros[:, j]].max()) <= level
            low, high = (middle, high) if fits else (low, middle)
        moved[:, j] = unit(pool.vectors[:, j] + low * other)
    return Directions(side, moved, pool.zeros, torch.full_like(pool.redundancy, 2))


def seeded_like(tensor, generator):
    return torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype)


def honest_zeros(side, vectors):
    zeros = (side.basis @ vectors).abs() <= side.zero
    return Directions(side, vectors, zeros, torch.full((vectors.shape[1],), 2))


def signed_zeros(pool, factors, generator):
    """Mixes, whose zeros are where their signs want them: everything matches."""
    vectors = mixes(pool, factors, generator).vectors
    C = torch.linalg.inv(vectors)
    C = C / (C @ factors.bias_coordinates)[:, None]
    H, bias = factors.before_and_after
    zeros = (H @ C.T + bias)[0][factors.live_rows] <= 0
    return Directions(pool.side, vectors, zeros, torch.full((len(C),), 2))


@pytest.mark.parametrize("change", [mixes, random, duplicates])
@pytest.mark.parametrize("told", [True, False], ids=["with the model", "layer alone"])
@pytest.mark.parametrize("seed", range(3))
def test_what_is_no_sample_is_not_certified(change, told, seed):
    planted = plant(4, m=60, seed=seed)
    view = planted.view if told else truth_free(planted.view)
    result = spear.invert(view, finder=Adversary(change), max_seconds=60)
    assert result.outcome is not Outcome.EXACT
    kept = result.inputs[result.certified]
    if len(kept):
        nearest = torch.cdist(kept.double(), planted.inputs.double()).min(1).values
        assert float(nearest.max()) < 1e-3


def truth_free(view):
    """The same layer, without a model that could be replayed."""
    parts = {n: getattr(view, n) for n in ("weight", "bias", "weight_grad", "bias_grad")}
    return spear.LayerUpdate(**parts)


@pytest.mark.parametrize("seed", range(3))
def test_zeros_that_are_none_are_refused(seed):
    """Without this check the layer alone would call these mixes EXACT."""
    view = truth_free(plant(4, m=60, seed=seed).view)
    with pytest.raises(InvalidExtension, match="zeros marks a row"):
        spear.invert(view, finder=Adversary(signed_zeros), max_seconds=20)


@pytest.mark.parametrize("sigma", [0.0, 1e-6, 3e-6])
def test_directions_that_are_a_little_off_are_solved_anew(sigma):
    """Taken as they came they would be called EXACT at 48 dB under this noise."""
    planted, view = noisy(sigma)
    finder = Adversary(spoiled)
    result = spear.invert(truth_free(view), finder=finder, max_seconds=30)
    ours = spear.invert(truth_free(view), max_seconds=30)
    assert finder.found
    assert result.outcome is ours.outcome is Outcome.EXACT
    assert worst_error(result.inputs, planted.inputs) < 2 * worst_error(ours.inputs, planted.inputs)


def test_what_is_no_finder_is_refused_before_anything_runs():
    class Half:
        def search(self, factors, *, generator, watch):
            yield

    class Picky:
        def __init__(self, steps):
            pass

    with pytest.raises(InvalidExtension, match="this Half has no satisfied"):
        spear.invert(plant(2, m=30).view, finder=Half())
    with pytest.raises(InvalidExtension, match=r"calling mine for a finder failed.*TypeError"):
        made_finder(Picky, "mine")
    assert isinstance(made_finder(Wrapped, "mine"), Wrapped)
    assert isinstance(made_finder(lambda: Wrapped(raising), "mine"), Wrapped)
