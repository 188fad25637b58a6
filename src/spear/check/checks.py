"""Preflight: are this model and protocol exposed to SPEAR? A rehearsal on made-up data says so."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from torch import nn

from spear.check import model_checks
from spear.check.conclusion import Exposure, Preflight, concluded
from spear.check.made_up import kinds_for
from spear.check.model_structure import LayerView, ModelStructure, examine, hand_made
from spear.check.reasons import Action, Advice, Reason, Subject
from spear.check.rehearsal import SERVER_LR, Recovery, Rehearsal, Stage, TooLarge, prepare
from spear.errors import Declined, InvalidOption
from spear.federated import Privacy, noise_of, resolved
from spear.inversion import Outcome, invert
from spear.judge import Cause
from spear.report import Finding, Level
from spear.update import LayerReport, LayerUpdate, Protocol, no_such_layer

_GUESSED_BATCH = 8  # where no batch size is given
NEURONS_PER_SAMPLE = 5  # the attack is reliable up to b = m / 5 (docs/settings.md)
_MOST_ROUNDS = 1_000  # more is a slip of the keyboard
_AUDIT = "real data may differ: measure with yours (spear audit)"
_HIDDEN = "clipping and noise hide any batch"
_ORDER = list(Recovery)
_WHY = {  # nothing came back, in a few words; others keep their name
    Cause.NARROW: "too many for the layer",
    Cause.NO_GAP: "nothing shows how many there are",
    Cause.NOISE: "hidden by noise",
    Cause.OPTIMISER: "not SGD",
    Cause.TIME: "out of time",
}
_VERDICTS = {
    Recovery.EXACT: Exposure.EXPOSED,
    Recovery.CLEAR: Exposure.EXPOSED,
    Recovery.VAGUE: Exposure.PARTLY,
    Recovery.SOME: Exposure.PARTLY,
    Recovery.NOTHING: Exposure.UNKNOWN,
}


def preflight(
    model: nn.Module | None,
    *,
    update: LayerUpdate | None = None,
    layer: str | None = None,
    input_shape: tuple[int, ...] | None = None,
    data: str | None = None,
    rounds: int = 1,
    server_lr: float = SERVER_LR,
    max_seconds: float = 30.0,
    tell: Callable[[str], None] = lambda words: None,
    protocol: Protocol | None = None,
    privacy: Privacy | None = None,
    **told: Any,
) -> Preflight:
    """Tell whether a model and a protocol are exposed, by a rehearsal on made-up data.

    Args:
        model: as clients train it, in their mode (train or eval). None if there is only an update.
        update: a real update, if you have one: it is inverted instead of rehearsing.
        layer: the layer to judge; by default the one an attack would choose.
        input_shape: shape of one input; guessed unless given.
        data: photos, pixels, drawings, table or numbers; by default every kind that fits the shape.
        rounds: of the same data that clients send and the server sees. Weights that come back move the
            model from one to the next; so do gradients, at the rate `server_lr`.
        server_lr: the server's learning rate.
        max_seconds: time limit of one search.
        tell: called with a few words on each step as it starts.
        protocol: what clients do.
        privacy: what epsilon covers.
        told: instead of these two, their fields one by one: `samples=20, lr=0.1, epochs=5`. Clients
            that train locally are taken to send weights.

    >>> from spear.federated import mlp
    >>> seen = preflight(mlp(60, 10, width=120, depth=3, seed=0), samples=8, data="table")
    >>> seen.verdict.name
    'EXPOSED'
    >>> print(seen.headline)
    Exposed: all 8 made-up samples came back exactly from layer '0' (60 → 120).
    """
    _check_rounds(rounds, server_lr, update)
    protocol, privacy = _understood(protocol, privacy, update, told)
    privacy = replace(privacy, steps=max(privacy.steps, rounds))
    noise = noise_of(protocol, privacy)
    protocol = resolved(protocol, noise.sigma)
    if update is not None:
        tell("inverting the update")
        return _of_update(model, update, protocol, max_seconds)
    if model is None:
        raise InvalidOption("expected a model or an update to judge, got neither")
    for name, value in model.state_dict().items():
        if not bool(value.isfinite().all()):
            raise InvalidOption(f"the model's {name!r} holds NaN or infinite numbers")
    structure, samples = examine(model), protocol.total
    judged = _candidates(structure, layer, samples or _GUESSED_BATCH, rounds)
    remarks = [
        model_checks.untraceable(structure),
        model_checks.modes(model),
        model_checks.embeddings(model),
        model_checks.optimiser(protocol),
        model_checks.epsilon(noise, privacy),
    ]
    if not judged:
        found = _unattackable(model, structure, layer, protocol, remarks)
        return replace(found, batch_size=samples)
    case = _Case(
        model, structure, protocol, privacy, input_shape, data, rounds, server_lr, max_seconds, tell
    )
    tried = [case.judge(one, remarks) for one in judged]
    order = (Exposure.EXPOSED, Exposure.PARTLY, Exposure.UNKNOWN, Exposure.NOT_EXPOSED)
    best = min(tried, key=lambda found: order.index(found.verdict))
    return replace(best, batch_size=samples)


def _check_rounds(rounds: int, server_lr: float, update: LayerUpdate | None) -> None:
    if not isinstance(rounds, int) or not 1 <= rounds <= _MOST_ROUNDS:
        raise InvalidOption(
            f"expected {{rounds}} to be a whole number from 1 to {_MOST_ROUNDS:,}, got {rounds!r}",
            arguments=("rounds",),
        )
    if not 0 < server_lr < math.inf:
        raise InvalidOption(
            f"expected {{server_lr}} > 0, got {server_lr}", arguments=("server_lr",)
        )
    if rounds > 1 and update is not None:
        raise InvalidOption(
            "{rounds} are rehearsed, but an update is inverted instead of a rehearsal: leave out one "
            "of the two, or invert several rounds (spear invert --rounds)",
            arguments=("rounds",),
        )


def _understood(
    protocol: Protocol | None,
    privacy: Privacy | None,
    update: LayerUpdate | None,
    told: dict[str, Any],
) -> tuple[Protocol, Privacy]:
    """Protocol and privacy, each given as one object or field by field, but not both. What is not given
    is taken from the update, if there is one."""
    if "precision" in told:
        told["precision"] = str(told["precision"]).removeprefix("torch.")
    counted = {f.name: told.pop(f.name) for f in fields(Privacy) if f.name in told}
    for name, whole, parts in (("protocol", protocol, told), ("privacy", privacy, counted)):
        if whole is not None and parts:
            one = next(iter(parts))
            raise InvalidOption(
                f"{{{one}}} is part of {{{name}}}: give one or the other", arguments=(one, name)
            )
    if unknown := told.keys() - {field.name for field in fields(Protocol)}:
        raise InvalidOption(f"expected the fields of Protocol and Privacy, got {min(unknown)!r}")
    if protocol is None:
        protocol = Protocol.of(**told) if update is None else replace(update.protocol, **told)
    return protocol, privacy or Privacy(**counted)


def _candidates(
    structure: ModelStructure, name: str | None, samples: int, rounds: int
) -> list[LayerView]:
    """The layers to rehearse: the one named, or the first that is wide enough for the batch; over
    rounds, the first that reads the data. If the forward pass cannot be traced, every layer that may be
    attackable."""
    if name is not None:
        named = structure.named(name)
        if named is None:
            raise no_such_layer(name, [layer.name for layer in structure.layers])
        return [named] if named.attackable or (named.unseen and named.has_bias) else []
    open_ = [layer for layer in structure.layers if layer.attackable]
    first = next((layer for layer in open_ if layer.report.reads_data), None)
    if rounds > 1 and first is not None:
        return [first]
    for factor in (NEURONS_PER_SAMPLE, 1):
        for layer in open_:
            if factor * samples <= layer.outputs and samples < min(layer.outputs, layer.inputs):
                return [layer]
    if open_:
        return open_[:1]
    return [layer for layer in structure.layers if layer.unseen and layer.has_bias]


def _unattackable(
    model: nn.Module,
    structure: ModelStructure,
    name: str | None,
    protocol: Protocol,
    remarks: list[Reason | None],
) -> Preflight:
    """The verdict if no layer stands next to a ReLU: does that protect, or can other attacks get in?"""
    layers = [layer for layer in structure.layers if name in (None, layer.name)]
    divides = next((layer for layer in layers if layer.divides), None)
    near = next((layer for layer in layers if layer.near), None)
    own = hand_made(model)
    reached, happened = Exposure.NOT_EXPOSED, "no linear layer with a bias stands next to a ReLU"
    lone = protocol.samples == 1 or (protocol.local_batch_size == 1 and protocol.one_step)
    if lone and divides is not None and protocol.clients == 1:
        reached = Exposure.EXPOSED if divides.report.reads_data else Exposure.PARTLY
        happened = (
            f"the only sample is the weight gradient of layer {divides.name!r} divided by its bias "
            "gradient, whatever the activation"
        )
    elif near is not None:
        remarks.append(model_checks.in_disguise(near))
        reached = Exposure.PARTLY
        happened = f"layer {near.name!r} is as sparse as behind a ReLU, though SPEAR refuses it"
    elif (lone or protocol.samples is None) and divides is not None:
        reached = Exposure.UNKNOWN
        happened += (
            ", but an update computed on a single sample gives that sample away all the same"
        )
    elif own:
        reached = Exposure.UNKNOWN
        happened += f", but {own[0]!r} may be a linear layer written by hand"
    else:
        remarks.append(model_checks.no_layer(structure))
        if name is not None:
            happened = f"layer {name!r} cannot be attacked ({layers[0].report.why})"
    return concluded(reached, happened, remarks, structure, protocol=protocol)


@dataclass(frozen=True, eq=False)
class _Case:
    """A model with layers that can be attacked, what its clients do, and how to rehearse."""

    model: nn.Module
    structure: ModelStructure
    protocol: Protocol
    privacy: Privacy
    shape: tuple[int, ...] | None
    data: str | None
    rounds: int
    server_lr: float
    max_seconds: float
    tell: Callable[[str], None]

    def judge(self, layer: LayerView, remarks: Sequence[Reason | None]) -> Preflight:
        """Rehearse with every kind of data that fits, and give the verdict."""
        remarks = [
            *remarks,
            model_checks.what_it_reads(layer),
            model_checks.before_the_layer(layer),
            *model_checks.skipped_layers(self.structure, layer),
        ]
        samples = self.protocol.samples or _GUESSED_BATCH
        protocol = replace(self.protocol, samples=samples)
        hidden = model_checks.drowned(self.structure, protocol, self.privacy.steps)
        stage = prepare(
            self.model,
            layer,
            protocol,
            self.shape,
            rounds=self.rounds,
            server_lr=self.server_lr,
        )
        rows = protocol.total if isinstance(stage, Declined) else stage.rows
        remarks.append(model_checks.over_rounds(layer, rows or 1, self.rounds))
        if isinstance(stage, Declined):
            return self._by_theory(layer, stage, hidden, remarks)
        too_many = model_checks.too_many_samples(layer, stage.rows, self.rounds)
        remarks += [self._assumed(stage), too_many]
        played = []
        kinds = kinds_for(self.model, stage.shape, self.data)
        for number, kind in enumerate(kinds, 1):
            count = f", {number} of {len(kinds)}" if len(kinds) > 1 else ""
            self.tell(f"rehearsing with made-up data{count}: {kind.words}")
            found = stage.rehearse(kind, max_seconds=self.max_seconds)
            if isinstance(found, Declined):
                return self._by_theory(layer, found, hidden, remarks)
            played.append(found)
        remarks.append(_reason(played))
        return self._concluded(stage, played, hidden, remarks)

    def _concluded(
        self,
        stage: Stage,
        played: list[Rehearsal],
        hidden: Reason | None,
        remarks: list[Reason | None],
    ) -> Preflight:
        """The verdict for the kind of data that was recovered best."""
        best = min(played, key=lambda one: _ORDER.index(one.score.recovery))
        score, late = best.score, any(one.cause is Cause.TIME for one in played)
        reached, layer, clients = _VERDICTS[score.recovery], stage.layer, self.protocol.clients
        if score.recovery is not Recovery.NOTHING:
            where = f"layer {layer.name!r} ({layer.inputs} → {layer.outputs})"
            where += f" over {best.rounds} rounds" if best.rounds > 1 else ""
            happened = f"{score.words} from {where}{_others(best, played)}"
            if best.up_to_scale:
                reached, happened = Exposure.PARTLY, f"{happened}, each up to a factor"
            if reached is Exposure.PARTLY and late:
                happened += ", and more may in more time"
            remarks += [model_checks.open_layer(layer), model_checks.defences(self.protocol)]
        elif hidden is not None:
            remarks.append(hidden)
            reached, happened = Exposure.NOT_EXPOSED, _HIDDEN
        elif late:
            happened = "the rehearsal found nothing in the time it had"
        else:
            happened = f"a rehearsal with made-up data recovered nothing; {_AUDIT}"
        if clients > 1:
            remarks.append(self._alone(stage, best, reached))
            happened = f"if the server only sees the sum of {clients} clients, {happened}"
        advice = [self._more_time()] if late and reached is not Exposure.EXPOSED else []
        if reached is Exposure.UNKNOWN:
            advice += self._enough_noise()
        return self._said(reached, happened, remarks, layer, advice)

    def _said(
        self,
        reached: Exposure,
        happened: str,
        reasons: list[Reason | None],
        layer: LayerView,
        advice: Sequence[Advice],
    ) -> Preflight:
        return concluded(
            reached,
            happened,
            reasons,
            self.structure,
            layer,
            protocol=self.protocol,
            advice=advice,
        )

    def _enough_noise(self) -> list[Advice]:
        """The noise multiplier from which the verdict is known, if there is clipping and some noise."""
        protocol = self.protocol
        sigma = model_checks.noise_that_hides(self.structure, protocol, self.privacy.steps)
        if sigma is None or not protocol.clip or not protocol.samples:
            return []
        shared = protocol.samples if protocol.sends == "gradient" else 1
        multiplier = math.ceil(100 * sigma * shared / protocol.clip) / 100
        words = f"From a noise multiplier of {multiplier:g} on, noise hides any batch: try that."
        return [Advice(Action.ADD_NOISE, words, {"noise_multiplier": multiplier})]

    def _more_time(self) -> Advice:
        words = "A search ran out of time: give it more."
        return Advice(Action.GIVE_TIME, words, {"max_seconds": 10 * self.max_seconds})

    def _alone(self, stage: Stage, best: Rehearsal, reached: Exposure) -> Reason | None:
        """What one client's update gives away if the server sees it before it is summed."""
        if reached is Exposure.EXPOSED:
            words = "The sum gives the samples away, but not which client each belongs to."
            return Reason(Level.EXPOSED, Subject.AGGREGATION, words)
        self.tell("rehearsing one client's update by itself")
        found = stage.alone().rehearse(best.kind, max_seconds=self.max_seconds)
        if isinstance(found, Declined):
            words = f"One client's update by itself was not rehearsed: {found.reason}."
            return Reason(Level.NOTE, Subject.AGGREGATION, words)
        words = f"From one client's update by itself, {found.score.words} ({best.kind.words})."
        more = "The sum protects only if nobody sees the single updates."
        level = Level.NOTE if found.score.recovery is Recovery.NOTHING else Level.EXPOSED
        return Reason(level, Subject.AGGREGATION, words, more)

    def _assumed(self, stage: Stage) -> Reason | None:
        """What the rehearsal assumed."""
        parts = []
        if self.protocol.samples is None:
            parts.append(f"the batch size was not given and taken to be {stage.protocol.samples}")
        if self.shape is None:
            shape = " x ".join(map(str, stage.shape))
            parts.append(f"one input was taken to be {shape}; give the shape if it differs")
        if self.protocol.sends != "gradient" and self.protocol.lr is None:
            parts.append(f"the learning rate was not given and taken to be {stage.protocol.rate:g}")
        if self.rounds > 1 and self.protocol.sends == "gradient":
            parts.append(
                f"between rounds the server moves the model by the gradients, at a learning rate of "
                f"{self.server_lr:g}"
            )
        if stage.rows != stage.protocol.total:
            parts.append(
                f"the layer sees {stage.rows} rows for {stage.protocol.total} samples (tokens or "
                "positions), and each row counts as a sample of its own"
            )
        if not parts:
            return None
        first, *others = [f"{part[0].upper()}{part[1:]}." for part in parts]
        return Reason(Level.NOTE, Subject.ASSUMED, first, " ".join(others))

    def _by_theory(
        self, layer: LayerView, why: Declined, hidden: Reason | None, remarks: list[Reason | None]
    ) -> Preflight:
        """The verdict without a rehearsal: a small batch under a plain protocol should come back."""
        samples = self.protocol.total or _GUESSED_BATCH
        plain = self.protocol.undefended == self.protocol and self.protocol.is_sgd
        fits = NEURONS_PER_SAMPLE * samples <= layer.outputs and samples < layer.inputs
        reached, happened = Exposure.UNKNOWN, f"not rehearsed: {why.reason}"
        if plain and fits and isinstance(why, TooLarge):
            reached = Exposure.EXPOSED
            happened += (
                f"; {samples} samples are expected to come back exactly from layer {layer.name!r}, as "
                "in our measurements up to a fifth of its outputs"
            )
        elif hidden is not None:
            remarks.append(hidden)
            reached, happened = Exposure.NOT_EXPOSED, _HIDDEN
        advice = []
        if self.shape is None and reached is Exposure.UNKNOWN and not isinstance(why, TooLarge):
            words = "Give the shape of one input, if the model cannot be run without."
            advice.append(Advice(Action.GIVE_SHAPE, words, {"shape": "3x32x32"}))
        return self._said(reached, happened, remarks, layer, advice)


def _reason(played: list[Rehearsal]) -> Reason:
    """What came back of each kind of data, the best first; the same answers share a part."""
    kinds: dict[str, list[str]] = {}
    for one in sorted(played, key=lambda one: _ORDER.index(one.score.recovery)):
        some = one.score.recovered
        why = _WHY.get(one.cause, one.cause.value)
        proof = f", {one.certified} of them proved" if some else f" ({why})"
        kinds.setdefault(f"{one.score.words}{proof}", []).append(one.kind.name)
    first, *others = [
        f"{found[0].upper()}{found[1:]}: {', '.join(names)}." for found, names in kinds.items()
    ]
    others += [f"{one.kind.name.capitalize()} are {one.kind.words}." for one in played]
    level = Level.EXPOSED if any(one.score.recovered for one in played) else Level.NOTE
    return Reason(level, Subject.REHEARSAL, first, " ".join(others))


def _others(best: Rehearsal, played: list[Rehearsal]) -> str:
    """What came back of each kind of data, if they disagree; else empty. Verdicts that differ say that
    real data decides."""
    if all(one.score.recovery is best.score.recovery for one in played):
        return ""
    less = [f"{one.kind.words}: {one.score.short}" for one in played if one is not best]
    depends = len({_VERDICTS[one.score.recovery] for one in played}) > 1
    told = f"{'; it depends on the data' * depends} ({best.kind.words}: {best.score.short}"
    return f"{told}; {'; '.join(less)})"


def _of_update(
    model: nn.Module | None, update: LayerUpdate, protocol: Protocol, max_seconds: float
) -> Preflight:
    """A real update needs no rehearsal: it is inverted, and only counts are kept."""
    structure = _given_layer(update) if model is None or update.layer is None else examine(model)
    layer = structure.named(update.layer or "layer") or structure.layers[0]
    result = invert(update, model=model, max_seconds=max_seconds)
    found = Finding.of(result, "the update")
    likely = result.outcome is Outcome.EXACT or found.is_likely
    reached = (
        Exposure.EXPOSED if likely else Exposure.PARTLY if found.recovered else Exposure.UNKNOWN
    )
    level = Level.EXPOSED if found.recovered else Level.NOTE
    proved = int(result.certified.sum())
    seen = result.batch_size
    of = f" of {seen}" if seen else ""
    short = f"{found.recovered}{of} samples came back, {proved} of them proved."
    remarks = [
        Reason(level, Subject.UPDATE, short, f"{result.reason[0].upper()}{result.reason[1:]}."),
        model_checks.what_it_reads(layer),
        model_checks.before_the_layer(layer),
    ]
    if model is not None:
        remarks += [model_checks.modes(model), model_checks.embeddings(model)]
    if seen and protocol.total not in (None, seen):
        words = f"The update shows {seen} samples, but {protocol.total} were stated."
        more = "Duplicates and samples with a vanishing gradient are not visible in it."
        remarks.append(Reason(Level.NOTE, Subject.BATCH_SIZE, words, more))
    happened = found.headline[0].lower() + found.headline[1:].removesuffix(".")
    advice = []
    if found.recovered:
        words = "See the samples, and what the verdict rests on: spear invert with the same files."
        advice.append(Advice(Action.SHOW, words))
    if result.cause is Cause.TIME:
        words = "The search ran out of time: give it more."
        advice.append(Advice(Action.GIVE_TIME, words, {"max_seconds": 10 * max_seconds}))
    judged = concluded(
        reached, happened, remarks, structure, layer, protocol=protocol, advice=advice
    )
    return replace(judged, batch_size=seen or protocol.total)


def _given_layer(update: LayerUpdate) -> ModelStructure:
    why = f"it is taken to have a ReLU {update.relu} it, as it was given directly"
    report = LayerReport(update.layer or "layer", update.relu, why, reads_data=True)
    return ModelStructure((LayerView(report, update.inputs, update.outputs, True),))
