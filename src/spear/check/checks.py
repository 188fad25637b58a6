"""Preflight: are this model and protocol exposed to SPEAR, and why or why not? No attack is run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import nn

from spear.check import model_checks, noise_checks, protocol_checks
from spear.check.conclusion import Predictions, Preflight, headline, ordered
from spear.check.exposure import Check, Exposure, worst_of
from spear.check.model_structure import LayerView, ModelStructure, examine
from spear.check.noise_forecast import NoiseForecast, observed, rehearsed, update_per_gradient
from spear.check.rehearsal import Rehearsal, rehearse
from spear.errors import Declined, InvalidOption
from spear.factors import factorise
from spear.federated import Privacy, noise_of, resolved
from spear.report import Level, Remark
from spear.update import Clipping, LayerReport, LayerUpdate, Protocol

__all__ = ["Exposure", "Predictions", "Preflight", "check_protocol", "preflight"]

_T = TypeVar("_T", Protocol, Privacy)
_GUESSED_BATCH = 4  # of a rehearsal, where no batch size is known


def preflight(
    model: nn.Module | None,
    *,
    update: LayerUpdate | None = None,
    layer: str | None = None,
    input_shape: tuple[int, ...] | None = None,
    samples: int | None = None,
    lr: float | None = None,
    epochs: int | None = None,
    local_steps: int | None = None,
    local_batch_size: int | None = None,
    momentum: float = 0.0,
    nesterov: bool = False,
    weight_decay: float = 0.0,
    proximal: float = 0.0,
    optimizer: str = "sgd",
    clip: float | None = None,
    clipping: Clipping | None = None,
    sigma: float | None = None,
    noise_multiplier: float | None = None,
    epsilon: float | None = None,
    precision: str | torch.dtype = "float32",
    pruned: float = 0.0,
    clients: int = 1,
    delta: float = Privacy.delta,
    dataset_size: int | None = None,
    steps: int = Privacy.steps,
    protocol: Protocol | None = None,
    privacy: Privacy | None = None,
) -> Preflight:
    """Say whether a model and a protocol are exposed, before any attack.

    Args:
        model: as clients train it, in the mode they train it in. None if only an update is known.
        update: one update, if there is one: batch size, spectrum and noise are then read off it.
        layer: judge this layer; without it, the one an attack would choose.
        input_shape: of one input, for the rehearsal on made-up inputs; guessed unless given.
        samples: and the following say what clients do; see `Protocol`. Whoever trains locally is taken
            to send weights.
        delta: and dataset_size and steps say what epsilon is counted for; see `Privacy`.
        protocol: what clients do in one object instead, and
        privacy: what epsilon is counted for.

    >>> from spear.federated import mlp
    >>> seen = preflight(mlp(3072, 10, width=200, seed=0), samples=20)
    >>> seen.verdict.name
    'EXPOSED'
    >>> print(seen.headline)
    Exposed: a batch of 20 is expected to come back exactly from layer '0' (3072 → 200).
    """
    words = {
        "samples": samples,
        "lr": lr,
        "epochs": epochs,
        "local_steps": local_steps,
        "local_batch_size": local_batch_size,
        "momentum": momentum,
        "nesterov": nesterov,
        "weight_decay": weight_decay,
        "proximal": proximal,
        "optimizer": optimizer,
        "clip": clip,
        "clipping": clipping,
        "sigma": sigma,
        "noise_multiplier": noise_multiplier,
        "epsilon": epsilon,
        "precision": str(precision).removeprefix("torch."),
        "pruned": pruned,
        "clients": clients,
    }
    counted = {"delta": delta, "dataset_size": dataset_size, "steps": steps}
    return check_protocol(
        model,
        _told(words, protocol, update),
        Privacy(**counted) if privacy is None else _alone("privacy", privacy, counted),  # type: ignore[arg-type]
        update=update,
        layer=layer,
        input_shape=input_shape,
    )


def _told(
    words: Mapping[str, Any], protocol: Protocol | None, update: LayerUpdate | None
) -> Protocol:
    """What is known of the clients: the words before what the update says of itself."""
    if protocol is not None:
        return _alone("protocol", protocol, words)
    if update is None:
        return Protocol.of(**words)
    said = {name: value for name, value in words.items() if value != getattr(Protocol, name)}
    return replace(update.protocol, **said)


def _alone(name: str, told: _T, words: Mapping[str, Any]) -> _T:
    """What was told in one object; raises if some of it was told beside it."""
    said = [word for word, value in words.items() if value != getattr(type(told), word)]
    if said:
        raise InvalidOption(
            f"{{{said[0]}}} is part of {{{name}}}: give one of them", arguments=(said[0], name)
        )
    return told


def check_protocol(
    model: nn.Module | None,
    protocol: Protocol,
    privacy: Privacy,
    *,
    update: LayerUpdate | None = None,
    layer: str | None = None,
    input_shape: tuple[int, ...] | None = None,
) -> Preflight:
    """The preflight of a protocol that was told in one object."""
    if model is None and update is None:
        raise InvalidOption("expected a model or an update to judge, got neither")
    noise = noise_of(protocol, privacy)
    protocol = resolved(protocol, noise.sigma)
    structure = (
        _given_layer(update) if model is None or _is_unnamed_layer(update) else examine(model)
    )
    samples, checks = _samples(protocol, update)
    if model is not None and structure.untraced and structure.chosen is None:
        structure = _discovered(model, structure, input_shape)
    chosen = _choose(structure, layer or (update.layer if update else None), samples)
    checks += [model_checks.untraceable(structure), *_protocol_checks(protocol, update)]
    checks.append(noise_checks.epsilon(noise, privacy))
    if model is not None:
        checks += [model_checks.modes(model), model_checks.embeddings(model)]
    predictions, rows = Predictions(), samples
    if chosen is None:
        named = None if layer is None else structure.named(layer)
        judged = structure if named is None else ModelStructure((named,), structure.untraced)
        checks.append(model_checks.nothing_to_attack(judged, samples))
    else:
        case = _Case(model, structure, chosen, samples, protocol, update, input_shape)
        found, predictions, rows = _attackable(case)
        checks += found
    verdict, because = worst_of(checks)
    return Preflight(
        verdict,
        headline(verdict, because, chosen, rows, predictions),
        ordered(checks),
        structure.table(),
        None if chosen is None else chosen.name,
        samples,
        predictions,
    )


def _protocol_checks(protocol: Protocol, update: LayerUpdate | None) -> list[Check]:
    return [
        protocol_checks.optimiser(protocol),
        protocol_checks.clipping(protocol),
        Check() if update is not None else noise_checks.coarse(protocol),
        protocol_checks.local_training(protocol),
        protocol_checks.aggregation(protocol),
    ]


def _is_unnamed_layer(update: LayerUpdate | None) -> bool:
    """Was a layer given directly, without the model's name for it?"""
    return update is not None and update.layer is None


def _given_layer(update: LayerUpdate | None) -> ModelStructure:
    assert update is not None
    why = f"it is taken to have a ReLU {update.relu} it, as it was given directly"
    report = LayerReport(update.layer or "layer", update.relu, why, reads_data=True)
    return ModelStructure((LayerView(report, update.inputs, update.outputs, True),))


def _discovered(
    model: nn.Module, structure: ModelStructure, shape: tuple[int, ...] | None
) -> ModelStructure:
    """Layers of a model that cannot be traced, judged by running it instead."""
    views = []
    for view in structure.layers:
        seen = rehearse(model, view.name, _GUESSED_BATCH, shape=shape) if view.has_bias else ""
        if isinstance(seen, Rehearsal) and seen.off == 1.0:
            why = (
                "a run showed that its output gradient is zero wherever it is off, as behind a ReLU"
            )
            report = LayerReport(view.name, "after", why, seen.reads_data)
            view = replace(view, report=report, unseen=False)  # noqa: PLW2901
        views.append(view)
    return replace(structure, layers=tuple(views))


def _samples(protocol: Protocol, update: LayerUpdate | None) -> tuple[int | None, list[Check]]:
    """How many samples the server sees at once; what an update says counts before what was given."""
    if update is None:
        return protocol.total, []
    seen = factorise(update).batch_size
    if not seen:
        return protocol.total, []
    if protocol.total is not None and protocol.total != seen:
        words = (
            f"The update shows {seen} samples, {protocol.total} were named: duplicates and samples "
            "whose gradient vanished do not show. The update's count is used."
        )
        return seen, [Check((Remark(Level.NOTE, "batch size", words),))]
    return seen, []


def _choose(structure: ModelStructure, name: str | None, samples: int | None) -> LayerView | None:
    """The layer to judge: the one named, else the first that is wide enough for the batch."""
    if name is not None:
        named = structure.named(name) or (structure.layers[0] if name == "layer" else None)
        if named is None:
            names = ", ".join(repr(layer.name) for layer in structure.layers) or "none"
            raise InvalidOption(
                f"the model has no linear layer {name!r}; its linear layers: {names}"
            )
        return named if named.attackable else None
    open_ = [layer for layer in structure.layers if layer.attackable]
    b = samples or 1
    for factor in (protocol_checks.NEURONS_PER_SAMPLE, 1):
        for layer in open_:
            if factor * b <= layer.outputs and b < min(layer.outputs, layer.inputs):
                return layer
    return open_[0] if open_ else None


@dataclass(frozen=True, eq=False)
class _Case:
    """A layer that can be attacked, and all that is known around it."""

    model: nn.Module | None
    structure: ModelStructure
    layer: LayerView
    samples: int | None
    protocol: Protocol
    update: LayerUpdate | None
    shape: tuple[int, ...] | None

    @property
    def too_many(self) -> bool:
        fewest = min(self.layer.inputs, self.layer.outputs)
        return self.samples is not None and self.samples >= fewest

    def rehearse(self) -> Rehearsal | Declined:
        if self.model is None or _is_unnamed_layer(self.update):
            return Declined("no model was given")
        if self.too_many:
            return Declined("the batch is too large for the layer")
        clip = self.protocol.clip if self.update is None else None
        whole = self.protocol.clips == "global"
        if clip is not None and whole:
            clip /= update_per_gradient(self.protocol)
        batch = self.samples or _GUESSED_BATCH
        return rehearse(
            self.model, self.layer.name, batch, shape=self.shape, clip=clip, whole=whole
        )

    def forecast(self, seen: Rehearsal | Declined) -> NoiseForecast | None:
        if self.update is not None:
            return observed(factorise(self.update))
        if isinstance(seen, Declined) or self.samples is None or self.model is None:
            return None
        if noise_checks.is_uneven(self.protocol):
            return None
        weight = self.model.get_submodule(self.layer.name).weight
        assert isinstance(weight, torch.Tensor)
        return rehearsed(seen, self.protocol, weight)


def _attackable(case: _Case) -> tuple[list[Check], Predictions, int | None]:
    """Everything there is to say about a layer that can be attacked; and the rows it sees."""
    layer, protocol, rows = case.layer, case.protocol, case.samples
    checks = [
        model_checks.what_it_reads(layer),
        model_checks.skipped_layers(case.structure, layer),
        model_checks.before_the_layer(layer),
    ]
    seen = case.rehearse()
    if isinstance(seen, Rehearsal) and case.model is not None:
        if rows is not None and case.update is None:
            rows = seen.rows
        batch = case.samples or _GUESSED_BATCH
        checks += model_checks.rehearsed_gradient(case.model, layer, seen, batch)
        checks.append(_assumed(seen))
    elif isinstance(seen, Declined) and case.update is None and not case.too_many:
        words = f"There is no estimate of the spectrum: {seen.reason}. Give the shape of one input."
        blind = Remark(Level.NOTE, "no rehearsal", words)
        checks.append(
            Check(
                (blind,),
                _limit_without_spectrum(protocol),
                "noise cannot be judged without a spectrum",
            )
        )
    if case.model is not None:
        behind = None if isinstance(seen, Declined) else seen
        checks.append(model_checks.behind_the_layer(case.model, layer, behind))
    checks.append(protocol_checks.size(layer, rows, protocol))
    if not protocol.is_sgd:  # nothing below holds for what it sends
        return checks, Predictions(), rows
    forecast = case.forecast(seen)
    if forecast is not None:
        checks.append(noise_checks.noise(forecast, protocol))
    predicted = None if rows is None else protocol_checks.predict(layer, rows)
    if predicted is None or rows is None:
        return checks, Predictions(forecast=forecast), rows
    lemmas, measured = predicted
    checks.append(protocol_checks.success(layer, rows, lemmas, measured, forecast))
    return checks, Predictions(lemmas, measured, forecast), rows


def _assumed(seen: Rehearsal) -> Check:
    if seen.given:
        return Check()
    shape = " x ".join(map(str, seen.shape))
    words = f"For the rehearsal one input was taken to be {shape}; name another shape if it is not."
    return Check((Remark(Level.NOTE, "input shape", words),))


def _limit_without_spectrum(protocol: Protocol) -> Exposure:
    """Without a spectrum nothing can be said of noise."""
    return Exposure.UNKNOWN if protocol.sigma or protocol.coarse else Exposure.EXPOSED
