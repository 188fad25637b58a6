"""Why an inversion ended as it did, as values for programs; `Inversion.reason` has the words."""

from __future__ import annotations

from enum import Enum


class Proof(Enum):
    """What `certified` rests on."""

    REPLAY = "replay"  # with the model: recomputed and matched, and no rival explanation fits
    PATTERN = "pattern"  # with the layer only: every necessary condition holds
    NONE = "none"


class Cause(Enum):
    """The main reason for an outcome."""

    PROVED = "proved"  # every visible sample is certified
    MIXED = "mixed"  # a direction may hold parts of several samples, or signs contradict its zeros
    SCALE = "scale"  # the inputs at another scale explain the update as well
    MERGED = "merged"  # a trace may be several samples in one
    MISSING = "missing"  # more samples were told than are visible
    CONTRADICTED = "contradicted"  # the replay that fits the others contradicts a sample
    IMPRECISE = "imprecise"  # recovered, but too noisy to be called exact
    TRAINING = "training"  # local training that cannot be repeated closely enough
    SCHEDULE = (
        "schedule"  # the client's learning rate was not what was told, at least not in every step
    )
    AUGMENTED = "augmented"  # more samples than were told: other versions of them in every epoch
    DROPOUT = "dropout"  # which samples it dropped is not known, or it leaves too few rows
    MOVED = "moved"  # local steps moved the weights so far that signs and zeros say little
    NARROW = "narrow"  # too few neurons for the batch
    UNFIT = "unfit"  # not what it was said to be
    OPTIMISER = "optimiser"  # not SGD: nothing of low rank to attack
    NO_GAP = "no gap"  # the spectrum does not show how many samples there are
    NO_GRADIENT = "no gradient"  # zero: no sample left a trace
    NOISE = "noise"  # the samples drown in the update's noise
    TIME = "time"  # max_seconds passed
    INTERRUPTED = "interrupted"
    FINDER = "finder"  # a user's finder, which found no candidate
    OTHER_ATTACK = "other attack"  # a baseline, which proves nothing
    NOT_ATTACKED = "not attacked"  # outside what can be attacked
