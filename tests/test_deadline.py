"""`max_seconds` and Ctrl-C, wherever in an inversion they come: what was found by then is returned.

The clock stands still until it has been looked at a given number of times. Then it jumps beyond every
deadline, or a Ctrl-C comes. So no test here depends on how fast anything is.
"""

import math
import sys
from contextlib import suppress

import pytest
import torch

import spear
import spear.search.deadline
from spear import Cause, Outcome, Proof
from spear.federated import fedavg, fedsgd
from spear.search import CascadeFinder, SamplingFinder, TimeIsUp
from support.planted import plant, small_batch, with_noise


class Clock:
    """Stands still for so many looks, then does what it is told to."""

    def __init__(self, looks, then):
        self.left, self.then, self.looks, self.places = looks, then, 0, {}

    def __call__(self):
        self.places.setdefault(who_asks(), []).append(self.looks)
        self.looks += 1
        if self.looks <= self.left:
            return -math.inf
        return self.then(self.looks - self.left)


def who_asks():
    """The lines of all functions under way, from the one that looked at the clock upwards."""
    frame, lines = sys._getframe(2), []
    while frame:
        lines.append((frame.f_code, frame.f_lineno))
        frame = frame.f_back
    return tuple(lines)


def jump(_):
    return math.inf


def press_once(count):
    if count == 1:
        raise KeyboardInterrupt
    return -math.inf


def gradient():
    return plant(5, m=40, n=30, seed=1).view


def local_training():
    model, x, y = small_batch(3, m=40)
    after = fedavg(model, x, y, lr=0.05, epochs=4)
    return spear.observe(model, after=after, lr=0.05, epochs=4)


def noise():
    planted = plant(3, m=60, n=40, seed=1)
    return spear.observe(planted.model, with_noise(planted.gradients, 0.05))


def rounds():
    model, x, y = small_batch(3, m=14)
    return spear.combine(each_round(model, x, y, 3))


def each_round(model, x, y, count):
    for _ in range(count):
        sent = fedsgd(model, x, y)
        yield spear.observe(model, sent)
        with torch.no_grad():
            for name, weights in model.named_parameters():
                weights.sub_(0.2 * sent[name])


def output_layer():
    return plant(3, m=40, n=30, classes=12, seed=1).layer("4")


CASES = {
    "gradient": (gradient, CascadeFinder(steps=12)),
    "sampled": (gradient, SamplingFinder(at_once=64)),
    "local training": (local_training, CascadeFinder(steps=12)),
    "noise": (noise, CascadeFinder(steps=12)),
    "rounds": (rounds, CascadeFinder(steps=12)),
    "output layer": (output_layer, CascadeFinder()),
}


@pytest.fixture(params=CASES)
def case(request, monkeypatch):
    """Few steps of the search, each of which looks at the clock: these batches are small."""
    monkeypatch.setattr(spear.search.blocks, "_STEPS", 12)
    monkeypatch.setattr(spear.judge.rescaling, "_STEPS", 8)
    make, finder = CASES[request.param]
    return make(), finder


def inverted(view, finder, clock, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(spear.search.deadline, "monotonic", clock)
        return spear.invert(view, finder=finder, max_seconds=60)


def assert_valid(result):
    k = len(result.inputs)
    assert result.certified.shape == result.approximate.shape == (k,)
    assert result.reason
    assert result.stats["factorise"] >= 0
    if result.outcome in (Outcome.EXACT, Outcome.PARTIAL):
        assert result.proof is not Proof.NONE
    else:
        assert not bool(result.certified.any())
        assert result.proof is Proof.NONE


def stopped_everywhere(view, finder, then, monkeypatch):
    """The results if it happens wherever a whole inversion looks at the clock.

    A loop looks again and again from the same place: its first two looks and its last one count.
    """
    whole = Clock(math.inf, then)
    inverted(view, finder, whole, monkeypatch)
    places = whole.places.values()
    for looks in sorted({look for each in places for look in (*each[:2], each[-1])}):
        result = inverted(view, finder, Clock(looks, then), monkeypatch)
        assert_valid(result)
        yield result


def test_time_may_run_out_anywhere(case, monkeypatch):
    returned, (view, _) = set(), case
    samples = spear.invert(view).batch_size
    for result in stopped_everywhere(*case, jump, monkeypatch):
        assert result.outcome in (Outcome.INCONCLUSIVE, Outcome.APPROXIMATE)
        assert result.cause is Cause.TIME
        assert "give it more (max_seconds=)" in result.reason
        assert result.labels is None
        returned.add((len(result.inputs), result.batch_size))
    assert returned >= {(0, None), (0, samples), (samples, samples)}


def test_ctrl_c_may_come_anywhere(case, monkeypatch):
    causes = set()
    for result in stopped_everywhere(*case, press_once, monkeypatch):
        assert result.stats["interrupted"] == 1
        causes.add(result.cause)
        if not result.certified.any():
            assert result.cause is Cause.INTERRUPTED
    assert Cause.INTERRUPTED in causes


class TooLong(CascadeFinder):
    """Its next step, it says, takes longer than there is time."""

    def search(self, factors, *, generator, watch):
        with suppress(TimeIsUp):
            watch.check(needed=1e9)
        yield from ()


def test_a_search_that_stops_ahead_of_time_ran_out_of_it():
    result = spear.invert(gradient(), finder=TooLong(), max_seconds=60)
    assert (result.outcome, result.cause) == (Outcome.INCONCLUSIVE, Cause.TIME)
