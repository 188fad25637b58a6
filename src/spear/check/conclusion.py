"""What a check came to: the verdict, its sentence, and what it rests on."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from spear.check.model_structure import LayerView, ModelStructure
from spear.check.reasons import Action, Advice, Reason, Subject
from spear.inversion import Outcome
from spear.report import Case, Level, Remark, Report, Step, Table, command_with
from spear.update import Protocol


class Exposure(Enum):
    """Does this attack succeed? Says nothing about other attacks."""

    EXPOSED = "exposed"
    PARTLY = "partly exposed"
    NOT_EXPOSED = "not exposed"
    UNKNOWN = "unknown"


# How bad each is for the client, in the words of an attacked update.
_OUTCOMES = {
    Exposure.EXPOSED: Outcome.EXACT,
    Exposure.PARTLY: Outcome.PARTIAL,
    Exposure.UNKNOWN: Outcome.INCONCLUSIVE,
    Exposure.NOT_EXPOSED: Outcome.FAILED,
}


@dataclass(frozen=True)
class Preflight:
    """The verdict, and everything it rests on."""

    verdict: Exposure
    headline: str
    rests_on: tuple[Reason, ...]
    """All that is known; what exposes comes first."""
    what_to_do: tuple[Advice, ...]
    """The most urgent first."""
    layers: Table
    layer: str | None = None
    """The layer an attack would start with."""
    batch_size: int | None = None
    """Samples behind what the server sees; None if unknown."""

    @property
    def remarks(self) -> tuple[Remark, ...]:
        """All that is known, in full."""
        return tuple(reason.remark for reason in self.rests_on)

    @property
    def reasons(self) -> tuple[Reason, ...]:
        """The three that say most."""
        order = list(Subject)
        return tuple(sorted(self.rests_on, key=lambda one: order.index(one.subject))[:_REASONS])

    def report(
        self, title: str, *, settings: Mapping[str, Any] | None = None, seconds: float | None = None
    ) -> Report:
        """The verdict as a report that can be saved and shown."""
        given = {"verdict": self.verdict.value, "layer": self.layer, "batch_size": self.batch_size}
        return Report.new(
            "check",
            title,
            self.headline,
            remarks=self.remarks,
            tables=(self._why(), self.layers),
            steps=self._steps((settings or {}).get("command")),
            settings={**given, **(settings or {})},
            seconds=seconds,
            cases=[Case(title, _OUTCOMES[self.verdict], self.headline)],
        )

    def _why(self) -> Table:
        rows = tuple((r.subject.value, r.level.value, r.words) for r in self.reasons)
        return Table("Why", ("about", "level", "reason"), rows)

    def _steps(self, command: object) -> tuple[Step, ...]:
        """What to do, with the command to check again; measuring is what a report ends with anyway."""
        again = [a for a in self.what_to_do if a.action is not Action.MEASURE]
        return tuple(
            Step(a.words, command_with(command, a.options) if a.options else "") for a in again
        )


_REASONS, _ADVICE = 3, 3  # as many as fit on one screen
_WORDS = {
    Exposure.EXPOSED: "Exposed: {}.",
    Exposure.PARTLY: "Partly exposed: {}.",
    Exposure.UNKNOWN: "Unknown: {}.",
    Exposure.NOT_EXPOSED: "Not exposed to this attack: {}. That is no guarantee against others.",
}


def concluded(
    reached: Exposure,
    happened: str,
    reasons: Sequence[Reason | None],
    structure: ModelStructure,
    layer: LayerView | None = None,
    *,
    protocol: Protocol,
    advice: Sequence[Advice] = (),
) -> Preflight:
    """The verdict in full. `happened` is a sentence without its full stop; a layer's limit weakens
    "exposed" to "partly exposed", and words that an embedding tells without noise strengthen anything
    less to it. `advice` comes before what follows from the verdict."""
    if reached in (Exposure.EXPOSED, Exposure.PARTLY) and layer is not None and layer.limit:
        reached = Exposure.PARTLY
        happened += f", but {layer.limit}"
    named = any(reason and reason.subject is Subject.EMBEDDING for reason in reasons)
    if named and not protocol.sigma and reached in (Exposure.NOT_EXPOSED, Exposure.UNKNOWN):
        reached = Exposure.PARTLY
        happened += ", but an embedding's gradient shows which words a client used"
    levels = (Level.EXPOSED, Level.PROTECTED, Level.NOTE)
    made = sorted(filter(None, reasons), key=lambda reason: levels.index(reason.level))
    subjects = {reason.subject for reason in made}
    return Preflight(
        reached,
        _WORDS[reached].format(happened),
        tuple(made),
        (*advice, *_following(reached, subjects, protocol))[:_ADVICE],
        structure.table(),
        None if layer is None else layer.name,
    )


def _following(
    reached: Exposure, subjects: Collection[Subject], protocol: Protocol
) -> Iterator[Advice]:
    """What to do about a verdict, the most urgent first."""
    if Subject.EMBEDDING in subjects:
        words = "Freeze the embedding, or do not send its gradient."
        yield Advice(Action.FREEZE, words)
    if Subject.EVAL_MODE in subjects:
        words = "Check the mode that clients train in."
        yield Advice(Action.TRAIN_MODE, words, {"mode": "train"})
    if protocol.samples is None and Subject.UPDATE not in subjects:
        words = "Say how many samples are behind an update."
        yield Advice(Action.GIVE_SAMPLES, words, {"samples": 32})
    if reached is Exposure.NOT_EXPOSED:
        yield from _of_what_protects(subjects)
    elif reached is Exposure.UNKNOWN:
        words = "Nothing is decided yet: measure on data like yours."
        yield Advice(Action.MEASURE, words)
    else:
        rehearsed = Subject.UPDATE not in subjects
        if rehearsed and protocol.clients == 1:
            words = "See whether secure aggregation would stop it, of 10 clients for example."
            yield Advice(Action.AGGREGATE, words, {"clients": 10})
        if rehearsed and not protocol.sigma:
            words = "See whether clipping and noise (DP) would."
            yield Advice(Action.ADD_NOISE, words, {"clip": 1, "noise_multiplier": 1})
        words = "Measure on data like yours what stops it, and what that costs."
        yield Advice(Action.MEASURE, words)
    if protocol.clients > 1:
        words = "Make sure that nobody sees the update of a single client."
        yield Advice(Action.HIDE_SINGLE, words)


def _of_what_protects(subjects: Collection[Subject]) -> Iterator[Advice]:
    if Subject.NOISE in subjects:
        words = (
            "Keep clipping and noise as they are: the verdict holds for these, whatever the data."
        )
        yield Advice(Action.KEEP_NOISE, words)
    else:
        words = (
            "Do not take this for privacy: other attacks are not ruled out. Where a guarantee is "
            "needed, clip, add noise and state its epsilon."
        )
        yield Advice(Action.GUARANTEE, words, {"clip": 1, "noise_multiplier": 1})
    words = "Measure on data like yours what a defence costs in accuracy."
    yield Advice(Action.MEASURE, words)
