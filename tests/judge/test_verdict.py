"""From evidence to a verdict, with evidence on either side of each decision."""

import dataclasses

import pytest
import torch

from spear import Cause, Outcome
from spear.factors import factorise
from spear.judge import verdict
from spear.judge.certificate import certify
from spear.judge.selection import select
from spear.search.watch import Watch
from support.planted import gaussian, plant, pool_of, true_directions


def concluded(**changes):
    """What is concluded from a certificate in which everything is proved, with other factors."""
    planted = plant(4, m=90)
    factors = dataclasses.replace(factorise(planted.view), **changes)
    pool = pool_of(factors, *true_directions(planted, factors))
    selection = select(factors, pool, Watch())
    certificate = certify(factors, selection)
    ended = verdict.SearchSummary(verdict.SearchEnd.MATCHED)
    reached = verdict.of_samples(factors, selection, certificate, planted.inputs, ended)
    return reached, certificate, verdict.remarks_on(factors, certificate)


def test_samples_beyond_the_noise_forbid_exact():
    assert concluded()[0].outcome is Outcome.EXACT
    part, certificate, _ = concluded(has_unresolved_samples=True)
    assert (part.outcome, part.returned) == (Outcome.PARTIAL, True)
    assert bool(certificate.certified.all())
    assert "the batch holds samples whose gradient has all but vanished" in part.reason


def test_samples_too_faint_to_find_are_not_called_noise_alone():
    alone, _, _ = concluded(noise=1e-4)
    beside, _, _ = concluded(noise=1e-4, has_unresolved_samples=True)
    assert alone.cause is beside.cause is Cause.IMPRECISE
    assert "carries noise of" in alone.reason
    assert "carries noise, or samples as faint as noise, of" in beside.reason


@pytest.mark.parametrize("end", ["TIME", "INTERRUPTED"])
@pytest.mark.parametrize(
    ("match", "noise", "outcome", "returned"),
    [
        (1.0, 0.0, Outcome.APPROXIMATE, True),
        (0.5, 0.0, Outcome.INCONCLUSIVE, False),
        (0.5, 1e-4, Outcome.INCONCLUSIVE, True),
    ],
)
def test_a_judge_that_was_stopped_claims_nothing(end, match, noise, outcome, returned):
    planted = plant(4, m=90)
    factors = factorise(planted.view)
    factors = dataclasses.replace(factors, noise=noise or factors.noise)
    selection = select(factors, pool_of(factors, *true_directions(planted, factors)), Watch())
    selection = dataclasses.replace(selection, match=match, only_extra_zeros=False)
    ended = verdict.SearchSummary(verdict.SearchEnd.MATCHED)
    reached = verdict.of_unjudged_samples(factors, selection, ended, verdict.SearchEnd[end])
    assert (reached.outcome, reached.returned) == (outcome, returned)
    assert reached.cause is Cause[end]
    assert f"lambda {match:.3f}" in reached.reason
    assert "the search ended: every pattern matched" in reached.details


def test_samples_that_drown_are_not_given_back():
    rough, _, _ = concluded(noise=1e-4)
    assert (rough.outcome, rough.returned) == (Outcome.APPROXIMATE, True)
    drowned, _, _ = concluded(noise=1.0)
    assert (drowned.outcome, drowned.returned) == (Outcome.FAILED, False)
    assert drowned.cause is Cause.NOISE
    assert "in which the 4 samples drown" in drowned.reason


@pytest.mark.parametrize(("noise", "outcome"), [(0.1, "APPROXIMATE"), (2.0, "FAILED")])
def test_inputs_read_from_patterns_may_be_noise(noise, outcome):
    planted = plant(4, m=90)
    factors = dataclasses.replace(factorise(planted.view), noise=1e-3)
    inputs = planted.inputs + noise * gaussian(4, 50, 1)
    ended = verdict.SearchSummary(verdict.SearchEnd.GAVE_UP)
    reached = verdict.of_some_samples(factors, inputs[:2], torch.full((2,), noise), ended)
    assert reached.outcome is Outcome[outcome]
    assert reached.returned is (outcome == "APPROXIMATE")
