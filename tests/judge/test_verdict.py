"""From evidence to a verdict, with evidence on either side of each decision."""

import dataclasses

from spear import Cause, Outcome
from spear.factors import factorise
from spear.judge import verdict
from spear.judge.certificate import certify
from spear.judge.selection import select
from spear.search.watch import Watch
from support.planted import plant, pool_of, true_directions


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


def test_samples_that_drown_are_not_given_back():
    rough, _, _ = concluded(noise=1e-4)
    assert (rough.outcome, rough.returned) == (Outcome.APPROXIMATE, True)
    drowned, _, _ = concluded(noise=1.0)
    assert (drowned.outcome, drowned.returned) == (Outcome.FAILED, False)
    assert drowned.cause is Cause.NOISE
    assert "in which the 4 samples drown" in drowned.reason
