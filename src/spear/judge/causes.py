"""Why an inversion ended as it did, as values for programs; `Inversion.reason` says it in words."""

from __future__ import annotations

from enum import Enum


class Proof(Enum):
    """What stands behind `certified`."""

    REPLAY = "replay"  # model given: recomputed and matched, and no rival explanation does
    PATTERN = "pattern"  # layer only: every necessary condition holds
    NONE = "none"  # nothing is proved


class Cause(Enum):
    """The main reason for an outcome."""

    PROVED = "proved"  # every sample that shows is certified
    MIXED = "mixed"  # a direction may hold parts of several samples, or signs contradict its zeros
    SCALE = "scale"  # another scale of the inputs explains the update as well
    MERGED = "merged"  # a trace may be several samples in one
    MISSING = "missing"  # more samples were told than show
    CONTRADICTED = "contradicted"  # a replay that fits others contradicts a sample
    IMPRECISE = "imprecise"  # recovered, but the update's noise leaves too large an error
    TRAINING = "training"  # local training that cannot be repeated closely enough
    NARROW = "narrow"  # too few neurons for the batch
    UNFIT = "unfit"  # does not look like what it was said to be
    OPTIMISER = "optimiser"  # not SGD: nothing of low rank to attack
    NO_GAP = "no gap"  # the spectrum does not show how many samples there are
    NO_GRADIENT = "no gradient"  # zero: no sample left a trace
    NOISE = "noise"  # samples drown in the update's noise
    TIME = "time"  # max_seconds passed
    INTERRUPTED = "interrupted"
    OTHER_ATTACK = "other attack"  # a baseline, which proves nothing
    NOT_ATTACKED = "not attacked"  # outside what can be attacked
