"""When rounds of a client are attacked together: only if that may show more than is known."""

import copy
import pickle

import pytest
import torch
from torch import nn

import spear
from spear.integrations.several_rounds import SeveralRounds, listed
from spear.inversion import Outcome
from spear.report import Finding
from support.planted import gaussian, seeded
from support.reports import finding

B = M = 12
NOTHING = Finding.not_attacked("a round", "it shows nothing alone")
FAILED = finding(0, B, outcome=Outcome.INCONCLUSIVE, true=False)
ALL = finding(B, B, true=False)


@pytest.fixture(scope="module")
def rounds():
    """What a server sees of one client, as many samples as neurons, in nine rounds."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(60, M), nn.ReLU(), nn.Linear(M, M), nn.ReLU(), nn.Linear(M, 5))
    x, y = gaussian(B, 60, 1), torch.randint(5, (B,), generator=seeded(1))
    seen = []
    for _ in range(9):
        loss = nn.functional.cross_entropy(net(x), y)
        gradients = torch.autograd.grad(loss, list(net.parameters()))
        seen.append(spear.observe(net, gradients))
        with torch.no_grad():
            for p, g in zip(net.parameters(), gradients, strict=True):
                p.sub_(0.5 * g)
    return seen


def attacked(rounds, *, share=0.0, found=FAILED, several=None):
    """After which rounds all were attacked together, if every attack ends like this."""
    several = several or SeveralRounds(20, 1024, 30.0)
    when = []
    for number, view in enumerate(rounds, 1):
        together = several.take("a client", number, view, NOTHING, beside=number)
        if together is not None:
            assert len(together.rounds) == number
            when.append(number)
            several.learn("a client", found, share)
    return when


def test_rounds_are_attacked_from_as_many_on_as_the_theory_asks_for(rounds):
    needed = spear.theory.rounds_needed(B, M, inputs=60)
    assert needed > 2
    assert attacked(rounds) == list(range(needed, 10))


def test_a_client_with_too_many_samples_for_its_rounds_is_left_for_the_end(rounds):
    several = SeveralRounds(20, 1024, 30.0)
    for number, view in enumerate(rounds, 1):
        assert several.take("a client", number, view, NOTHING, reported=5 * B) is None
    assert several.unfinished() == ["a client"]


def test_attacks_that_take_long_and_fail_become_rare(rounds):
    first = spear.theory.rounds_needed(B, M, inputs=60)
    assert attacked(rounds, share=0.9) == [first, first + 1, first + 3]


def test_once_every_sample_is_known_nothing_is_attacked_again(rounds):
    several = SeveralRounds(20, 1024, 30.0)
    assert len(attacked(rounds, found=ALL, several=several)) == 1
    assert several.unfinished() == []


def test_samples_that_are_new_are_attacked_again(rounds):
    several = SeveralRounds(20, 1024, 30.0)
    fewer = finding(B - 2, B - 2, true=False)  # all of what showed then
    assert len(attacked(rounds, found=fewer, several=several)) > 1


def test_rounds_that_gave_everything_away_alone_are_not_kept(rounds):
    several = SeveralRounds(20, 1024, 30.0)
    assert several.take("a client", 1, rounds[0], ALL) is None
    assert several.history.count("a client") == 0
    assert several.best_alone("a client") == (B, B)
    assert not several.due("a client")


def test_what_is_left_for_the_end(rounds):
    several = SeveralRounds(20, 1024, 30.0)
    attacked(rounds[:2], several=several)  # too few to attack
    assert several.unfinished() == ["a client"]
    view, beside = several.last("a client")
    assert (len(view.rounds), beside) == (2, 2)
    several.learn("a client", FAILED, share=0.1)  # more time would not help
    assert several.unfinished() == []
    several.learn("a client", FAILED, share=0.9)
    assert several.unfinished() == ["a client"]


def test_rounds_that_cannot_be_combined_say_why(rounds):
    several = SeveralRounds(20, 1024, 30.0)
    assert attacked([rounds[0], rounds[0]], several=several) == []
    assert several.refused == "it repeats round 1: the same update of the same weights"


def test_cohorts_are_known_again_also_if_a_client_is_missing(rounds):
    several = SeveralRounds(20, 1024, 30.0)
    everyone = frozenset({1, 2, 3})
    assert several.cohort(everyone) == (everyone, "all 3 clients")
    several.take(everyone, 1, rounds[0], NOTHING)
    assert several.cohort(frozenset({1, 3})) == (everyone, "all 3 clients")
    others = frozenset({1, 4})
    assert several.cohort(others) == (others, "all 2 clients of cohort 2")


def test_copies_and_pickles_hold_nothing(rounds):
    several = SeveralRounds(7, 64, 30.0)
    attacked(rounds[:2], several=several)
    for again in (copy.deepcopy(several), pickle.loads(pickle.dumps(several))):
        assert (again.history.rounds, again.history.megabytes) == (7, 64)
        assert again.unfinished() == []
    several.clear()
    assert several.history.used == 0


def test_rounds_in_words():
    assert listed([4, 5, 6, 7]) == "rounds 4 to 7"
    assert listed([1, 3, 4]) == "rounds 1, 3, 4"
