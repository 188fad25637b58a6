"""A preflight from files: a model by name, weights, an update; or weights alone, by their shapes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor, nn

from spear.check.checks import NEURONS_PER_SAMPLE, Playing, check_protocol
from spear.check.conclusion import Exposure, Preflight
from spear.errors import Declined, InvalidFile, InvalidOption
from spear.federated import Privacy
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
from spear.report import Level, Remark, Table
from spear.update import Protocol, Sends, linear_layers, plain_mlp


@dataclass(frozen=True)
class CheckFiles:
    """What is there to judge.

    Args:
        model: "package.module:factory" or "file.py:factory".
        weights: those that clients are sent.
        update: gradients that one of them sent, or
        after: the weights that it sent back, or
        difference: these minus those that it was sent.
        mode: "train" or "eval", which the model is put into; None leaves it as the factory gave it.
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
                "expected a model (package.module:factory), or weights to recognise one by, got "
                "neither"
            )
        if self.mode not in (None, "train", "eval"):
            raise InvalidOption(f"expected the mode train or eval, got {self.mode!r}")

    @property
    def sends(self) -> Sends | None:
        """What the client sent, if there is a file with it."""
        files: dict[Sends, Path | None] = {
            "gradient": self.update,
            "weights": self.after,
            "difference": self.difference,
        }
        return next((sends for sends, path in files.items() if path is not None), None)


def check_files(
    files: CheckFiles,
    *,
    layer: str | None = None,
    protocol: Protocol | None = None,
    privacy: Privacy | None = None,
    playing: Playing | None = None,
) -> Preflight:
    """The preflight of what lies on disk.

    Args:
        files: where it is.
        layer: the layer to judge.
        protocol: what clients do, as far as it is known. What they send is told by the file.
        privacy: what epsilon is counted for.
        playing: how to rehearse.
    """
    protocol, privacy = protocol or Protocol(), privacy or Privacy()
    playing = playing or Playing()
    if files.sends is not None:
        return _with_update(files, layer, protocol, privacy, playing)
    if files.model is not None:
        model = _in_mode(_built(files), files.mode)
        return check_protocol(model, protocol, privacy, layer=layer, playing=playing)
    assert files.weights is not None
    weights, _ = named(read_tensors(files.weights), {})
    like(weights, weights, files.weights)  # NaN is told
    recognised = plain_mlp(weights)
    if isinstance(recognised, Declined):
        return _by_shapes(weights, recognised.reason)
    found = check_protocol(recognised, protocol, privacy, layer=layer, playing=playing)
    return _assuming(found, _MLP)


_MLP = (
    "No model was given: the weights were taken for a plain MLP with a ReLU behind every layer "
    "but the last, and without dropout. With other activations this verdict does not hold: give "
    "the model."
)


def _with_update(
    files: CheckFiles, layer: str | None, protocol: Protocol, privacy: Privacy, playing: Playing
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
    found = check_protocol(model, view.protocol, privacy, update=view, layer=layer, playing=playing)
    return _assuming(found, *view.notes)


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
    weights = like(matched(weights, own, files.weights), own, files.weights)
    wrong = [name for name in weights if weights[name].shape != own[name].shape]
    missing = [name for name, _ in model.named_parameters() if name not in weights]
    if wrong or missing:
        problem = (
            f"{wrong[0]!r} has shape {tuple(weights[wrong[0]].shape)}, expected "
            f"{tuple(own[wrong[0]].shape)}"
            if wrong
            else f"{missing[0]!r} is missing"
        )
        raise InvalidFile(f"{files.weights} does not fit {files.model}: {problem}")
    model.load_state_dict(weights, strict=False)
    return model


def _in_mode(model: nn.Module, mode: str | None) -> nn.Module:
    return model if mode is None else model.train(mode == "train")


def _assuming(found: Preflight, *assumptions: str) -> Preflight:
    notes = tuple(Remark(Level.NOTE, "assumed", words) for words in assumptions)
    return replace(found, remarks=(*found.remarks, *notes))


def _by_shapes(weights: dict[str, Tensor], why: str) -> Preflight:
    """Weights that are no plain MLP: what their linear layers would give away behind a ReLU."""
    layers = [layer for layer in linear_layers(weights) if layer.bias]
    convolutions = any(weight.ndim in (3, 4, 5) for weight in weights.values())
    rows = tuple(
        (
            layer.name,
            f"{layer.inputs} → {layer.outputs}",
            "if a ReLU follows" if layer.bias else "no",
            f"then batches of up to about {max(1, layer.outputs // NEURONS_PER_SAMPLE)}"
            if layer.bias
            else "it has no bias, and the bias gradient gives each input its scale",
            "activations behind convolutions" if convolutions else "not known",
        )
        for layer in linear_layers(weights)
    )
    columns = ("layer", "inputs → outputs", "attackable", "why", "reads")
    table = Table("Linear layers", columns, rows, "Read from names and shapes alone.")
    words = (
        f"The weights are no plain MLP ({why}), and names and shapes do not say which activations "
        "stand between the layers. Give the model (package.module:factory) for a verdict."
    )
    remark = Remark(Level.NOTE, "no model", words)
    if not layers:
        words = "No tensor is the weight of a linear layer with a bias: SPEAR attacks nothing else."
        remark = Remark(Level.PROTECTED, "no linear layer", words)
        headline = "Not exposed to this attack: there is no linear layer with a bias."
        return Preflight(Exposure.NOT_EXPOSED, headline, (remark,), table)
    headline = "Unknown: weights alone do not say where the ReLUs are. Give the model."
    return Preflight(Exposure.UNKNOWN, headline, (remark,), table)
