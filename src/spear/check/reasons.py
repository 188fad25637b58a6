"""What a verdict rests on, and what to do about it, as values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from spear.report import Level, Remark


class Subject(Enum):
    """What a reason is about; what says most about a verdict comes first."""

    NO_MODEL = "no model"
    UPDATE = "the update"
    NOISE = "noise"
    NO_LAYER = "no linear layer"
    NO_RELU = "no ReLU to attack"
    REHEARSAL = "rehearsal"
    DISGUISE = "a ReLU in disguise"
    EMBEDDING = "embedding"
    ACTIVATIONS = "reads activations"
    BEFORE = "train mode, before the layer"
    FULL_RANK = "batch against layer"
    OPTIMISER = "optimiser"
    AGGREGATION = "aggregation"
    LAYER = "layer"
    EPSILON = "epsilon"
    DEFENCES = "defences"
    UNTRACED = "not traceable"
    IN_FRONT = "a layer in front"
    TRAIN_MODE = "train mode"
    EVAL_MODE = "eval mode"
    BATCH_SIZE = "batch size"
    ASSUMED = "assumed"
    ROUNDS = "several rounds"


@dataclass(frozen=True)
class Reason:
    """One thing that a verdict rests on."""

    level: Level
    subject: Subject
    words: str
    """A sentence of its own, two lines of a terminal at most."""
    more: str = ""
    """What else there is to know: further sentences."""

    @property
    def remark(self) -> Remark:
        """All of it, for a report."""
        return Remark(self.level, self.subject.value, f"{self.words} {self.more}".rstrip())


class Action(Enum):
    """What to do next."""

    GIVE_MODEL = "give the model"
    GIVE_SHAPE = "give the shape"
    GIVE_SAMPLES = "give the batch size"
    GIVE_TIME = "give more time"
    TRAIN_MODE = "check train mode"
    FREEZE = "freeze the embedding"
    SHOW = "see the samples"
    AGGREGATE = "try aggregation"
    HIDE_SINGLE = "hide single updates"
    ADD_NOISE = "try noise"
    KEEP_NOISE = "keep the noise"
    GUARANTEE = "state an epsilon"
    MEASURE = "measure with your data (spear audit)"


@dataclass(frozen=True)
class Advice:
    """One thing to do."""

    action: Action
    words: str
    options: Mapping[str, str | float] = field(default_factory=dict)
    """Arguments with which to check again."""
