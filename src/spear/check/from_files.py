"""A preflight from files: a model by name, weights and an update; or weights alone."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from spear.check.checks import preflight
from spear.check.conclusion import Exposure, Preflight
from spear.check.reasons import Action, Advice, Reason, Subject
from spear.errors import Declined, InvalidFile, InvalidOption
from spear.files import (
    UpdateFiles,
    build_model,
    like,
    matched,
    named,
    observe_files,
    positional,
    read_tensors,
)
from spear.report import Level, Table
from spear.update import Protocol, Sends, linear_layers, no_such_layer, plain_mlp


@dataclass(frozen=True)
class CheckFiles:
    """The files to judge.

    Args:
        model: "package.module:factory" or "file.py:factory".
        weights: the weights that clients are sent.
        update: gradients that a client sent; or
        after: the weights that it sent back; or
        difference: the weights it sent back minus those it was sent.
        mode: "train" or "eval" puts the model into that mode; None leaves it as the factory made it.
    """

    model: str | None = None
    weights: Path | None = None
    update: Path | None = None
    after: Path | None = None
    difference: Path | None = None
    mode: str | None = None

    def __post_init__(self) -> None:
        if self.model is None and self.weights is None:
            raise InvalidOption(
                "expected a model ({model} package.module:factory, or file.py:factory), or weights to "
                "recognise one by ({weights}), got neither",
                arguments=("model", "weights"),
            )
        if self.mode not in (None, "train", "eval"):
            raise InvalidOption(f"expected the mode train or eval, got {self.mode!r}")

    @property
    def sends(self) -> Sends | None:
        """What the client sent, if there is a file of it."""
        files: dict[Sends, Path | None] = {
            "gradient": self.update,
            "weights": self.after,
            "difference": self.difference,
        }
        return next((sends for sends, path in files.items() if path is not None), None)


def check_files(
    files: CheckFiles, *, protocol: Protocol | None = None, **options: Any
) -> Preflight:
    """The preflight of files on disk.

    Args:
        files: where it is.
        protocol: what clients do, as far as it is known. What they send follows from the file.
        options: passed on to `preflight`.
    """
    protocol = protocol or Protocol()
    if files.sends is not None:
        return _with_update(files, protocol, **options)
    if files.model is not None:
        return preflight(_in_mode(_built(files), files.mode), protocol=protocol, **options)
    assert files.weights is not None
    weights, _ = named(read_tensors(files.weights), {})
    like(weights, weights, files.weights)  # raises on NaN
    recognised = plain_mlp(weights)
    if isinstance(recognised, Declined):
        return _by_shapes(weights, recognised.reason, options.get("layer"))
    return _assuming(preflight(recognised, protocol=protocol, **options), _MLP)


_MLP = Reason(
    Level.NOTE,
    Subject.ASSUMED,
    "No model was given: the weights were taken for a plain MLP with a ReLU behind every layer but "
    "the last, and without dropout.",
    "With other activations this verdict does not hold: give the model.",
)


def _with_update(
    files: CheckFiles, protocol: Protocol, layer: str | None = None, **options: Any
) -> Preflight:
    view = observe_files(
        UpdateFiles(
            weights=files.weights,
            update=files.update,
            after=files.after,
            difference=files.difference,
            protocol=protocol,
            model=files.model,
            layer=layer,
        )
    )
    model = None if view.model is None else _in_mode(view.model, files.mode)
    found = preflight(model, protocol=view.protocol, update=view, layer=layer, **options)
    return _assuming(found, *(Reason(Level.NOTE, Subject.ASSUMED, note) for note in view.notes))


def _built(files: CheckFiles) -> nn.Module:
    """The model, with the weights of the file if there is one."""
    assert files.model is not None
    model = build_model(files.model)
    if files.weights is None:
        return model
    weights, own = read_tensors(files.weights), model.state_dict()
    if positional(weights):
        if len(weights) != len(own):
            raise InvalidFile(
                f"{files.weights}: expected {len(own)} tensors, one for each entry of the model's "
                f"state_dict, got {len(weights)}"
            )
        weights = dict(zip(own, weights.values(), strict=True))
    weights = like(matched(weights, own, files.weights, "in the model"), own, files.weights)
    buffers = {name: own[name] for name, _ in model.named_buffers() if name in own}
    try:
        model.load_state_dict({**buffers, **weights})
    except RuntimeError as error:
        problem = str(error).splitlines()[-1].strip()
        raise InvalidFile(f"{files.weights} does not fit {files.model}: {problem}") from error
    return model


def _in_mode(model: nn.Module, mode: str | None) -> nn.Module:
    return model if mode is None else model.train(mode == "train")


def _assuming(found: Preflight, *assumptions: Reason) -> Preflight:
    return replace(found, rests_on=(*found.rests_on, *assumptions))


def _by_shapes(weights: dict[str, Tensor], why: str, layer: str | None) -> Preflight:
    """Weights that are not a plain MLP: there is no verdict without the model."""
    there = [one.name for one in linear_layers(weights)]
    if layer is not None and layer not in there:
        raise no_such_layer(layer, there)
    rows = tuple(
        (layer.name, f"{layer.inputs} → {layer.outputs}", "yes" if layer.bias else "no")
        for layer in linear_layers(weights)
    )
    table = Table("Linear layers", ("layer", "inputs → outputs", "bias"), rows)
    reason = Reason(
        Level.NOTE,
        Subject.NO_MODEL,
        "Names and shapes of weights do not say which activations stand between the layers.",
        f"They are not those of a plain MLP ({why}).",
    )
    advice = Advice(Action.GIVE_MODEL, "Give the model.", {"model": "package.module:factory"})
    headline = "Unknown: weights alone do not say where the ReLUs are. Give the model."
    return Preflight(Exposure.UNKNOWN, headline, (reason,), (advice,), table)
