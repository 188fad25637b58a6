"""From files to a report: what `spear invert` does, for those who would rather call it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from spear.audit.from_weights import linear_layers, plain_mlp
from spear.audit.loading import build_model, load_object
from spear.audit.naming import SENT, SWAPPED, in_order, like, matched, named, not_gradients
from spear.audit.tensors import positional, read_tensors
from spear.audit.truth import compare, read_batch
from spear.errors import InvalidFile, InvalidOption
from spear.inversion import invert
from spear.judge import Proof
from spear.metrics import EXACT_DB
from spear.report import Finding, Look, Report
from spear.update import LayerUpdate, observe

LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cross-entropy": nn.CrossEntropyLoss(),
    "bce": nn.BCEWithLogitsLoss(),
    "mse": nn.MSELoss(),
}
# What became of a model that was only recognised from its weights.
_GUESS = {
    Proof.REPLAY: "The replay confirms that it is one.",
    Proof.PATTERN: (
        "Such a model does not reproduce the update: what follows the layer, or the loss, is another. "
        "The layer alone was judged; give the model (and the loss) for a proof by replay and for "
        "labels."
    ),
    Proof.NONE: (
        "Nothing confirms that: with another activation than ReLU, dropout or normalisation this says "
        "little. Give the model."
    ),
}
_OTHER_BATCH = (
    "Samples that are proved differ from every sample of the truth that was given: is it the batch of "
    "this very update? If it is, please report a wrong verdict."
)


@dataclass(frozen=True)
class UpdateFiles:
    """An update as it lies on disk, and what is known of how it came about.

    Args:
        weights: the weights the client was sent.
        update: FedSGD: its gradients.
        after: FedAvg instead: the weights it sent back; `training` holds `lr` and what else
            `spear.observe` takes: epochs, batch_size, momentum, weight_decay, proximal, optimizer.
        model: "package.module:factory"; without it a plain MLP is recognised from its weights.
        layer: the layer to attack; chosen unless given.
        loss: "cross-entropy", "bce", "mse", or "package.module:function".
        samples: how many samples the update was computed from, if that is known.
    """

    weights: Path | None = None
    update: Path | None = None
    after: Path | None = None
    training: Mapping[str, Any] = field(default_factory=dict)
    model: str | None = None
    layer: str | None = None
    loss: str | None = None
    samples: int | None = None

    def __post_init__(self) -> None:
        if (self.update is None) == (self.after is None):
            got = "both" if self.update else "neither"
            raise InvalidOption(
                "expected either gradients (--update) or the weights after local training (--after), "
                f"got {got}"
            )
        if self.weights is None and self.model is None:
            raise InvalidOption(
                "expected the weights the client was sent (--weights), or a model that has them "
                "(--model), got neither"
            )
        if self.after is not None and self.training.get("lr") is None:
            raise InvalidOption(
                "expected the clients' learning rate (--lr) with the weights they sent back (--after)"
            )


@dataclass(frozen=True, eq=False)
class Observed:
    """What the files show: the layer, the model if there is one, and what had to be assumed."""

    view: LayerUpdate
    model: nn.Module | None
    guessed: bool  # was the model recognised from its weights, not given?
    notes: tuple[str, ...]


def observe_files(files: UpdateFiles) -> Observed:
    """Read the files and pick the layer."""
    weights = read_tensors(files.weights) if files.weights else None
    path = files.update or files.after
    assert path is not None
    sent = read_tensors(path)
    if files.model is not None:
        model = build_model(files.model)
        notes = _filled(model, weights, files)
        return Observed(_view(files, model, sent, path), model, False, notes)
    assert weights is not None
    weights, sent = named(weights, sent)
    recognised = plain_mlp(weights)
    if isinstance(recognised, str):
        return _one_layer(files, weights, sent, path, recognised)
    sizes = " -> ".join(
        str(n)
        for n in (linear_layers(weights)[0].inputs, *(w.outputs for w in linear_layers(weights)))
    )
    note = (
        f"No model was given: the weights were taken for a plain MLP, {sizes}, with ReLUs between its "
        "layers."
    )
    return Observed(_view(files, recognised, sent, path), recognised, True, (note,))


def invert_files(
    files: UpdateFiles,
    *,
    look: Look | None = None,
    truth: Path | None = None,
    settings: Mapping[str, Any] | None = None,
    **options: Any,
) -> Report:
    """Attack an update on disk, and report.

    Args:
        files: where it is.
        look: how to show inputs as pictures.
        truth: a file with the client's `inputs` (and `labels`), to compare with; the attack never
            sees it.
        settings: put into the report, to repeat it.
        options: of `spear.invert`: finder, generator, max_seconds, on_progress, executor.
    """
    began = time.monotonic()
    loss = None if files.loss is None else loss_of(files.loss)
    seen = observe_files(files)
    if look is not None:
        look.pictures(torch.zeros(0, seen.view.inputs))  # a shape that does not fit is told at once
    batch = None if truth is None else read_batch(truth)
    if batch is not None and batch[0].shape[1] != seen.view.inputs:
        raise InvalidFile(
            f"{truth}: expected samples of {seen.view.inputs} values, the layer's inputs, got "
            f"{batch[0].shape[1]}"
        )
    result = invert(seen.view, loss=loss, **options)
    notes = (*seen.notes, _GUESS[result.proof]) if seen.guessed else seen.notes
    if not bool(result.certified.any()):
        for path, hint in ((files.weights, SWAPPED), (files.after, SENT)):
            if path is not None:
                not_gradients(read_tensors(path), path, hint)
    name = (files.update or files.after or Path()).name
    known = None if batch is None else compare(result.inputs, *batch, look=look)
    if known is not None and any(
        sure and not decibel >= EXACT_DB
        for sure, decibel in zip(result.certified.tolist(), known.psnr, strict=True)
    ):
        notes = (*notes, _OTHER_BATCH)
    finding = Finding.of(result, name, seen.view, look=look, truth=known, notes=notes)
    return Report.new(
        "inversion",
        f"What {name} gives away",
        finding.headline,
        [finding],
        settings=settings,
        seconds=time.monotonic() - began,
    )


def loss_of(name: str) -> Any:
    """The loss of a name: one of `LOSSES`, or package.module:function."""
    if name in LOSSES:
        return LOSSES[name]
    if ":" not in name:
        raise InvalidOption(
            f"expected a loss of {', '.join(LOSSES)} or package.module:function, got {name!r}"
        )
    loss = load_object(name)
    if isinstance(loss, type) and issubclass(loss, nn.Module):
        loss = loss()
    if not callable(loss):
        raise InvalidOption(f"{name} is a {type(loss).__name__}, expected loss(outputs, targets)")
    return loss


def _filled(
    model: nn.Module, weights: Mapping[str, Tensor] | None, files: UpdateFiles
) -> tuple[str, ...]:
    """The model with the weights of the file, checked; without one, with its own."""
    if weights is None:
        return (
            f"The weights are those that {files.model} gave: the client must have had the same.",
        )
    own = model.state_dict()
    parameters = dict(model.named_parameters())
    if positional(weights) and len(weights) not in (len(own), len(parameters)):
        raise InvalidFile(
            f"{files.weights}: expected {len(own)} tensors, one for each entry of the model's "
            f"state_dict, got {len(weights)}"
        )
    if positional(weights):
        names = list(own) if len(weights) == len(own) else list(parameters)
        weights = dict(zip(names, weights.values(), strict=True))
    else:
        weights = matched(weights, own, files.weights)
    problems = [
        f"{name} has shape {tuple(weights[name].shape)}, the model's {tuple(own[name].shape)}"
        for name in weights
        if weights[name].shape != own[name].shape
    ]
    problems += [f"{name} is missing" for name in parameters if name not in weights]
    if problems:
        raise InvalidFile(f"{files.weights} does not fit {files.model}: {'; '.join(problems[:6])}")
    model.load_state_dict(dict(weights), strict=False)
    missing = [name for name in own if name not in weights]
    left = f"The file has no {', '.join(missing[:4])}: the model's own stand."
    return (left,) if missing else ()


def _view(
    files: UpdateFiles, model: nn.Module, sent: Mapping[str, Tensor], path: Path
) -> LayerUpdate:
    parameters, state = dict(model.named_parameters()), model.state_dict()
    if files.after is not None:
        after = in_order(sent, list(state), list(parameters), path)
        after = matched(after, state, path)
        after = like(after, state, path)
        told = {"layer": files.layer, "samples": files.samples, **files.training}
        return observe(model, after=after, **told)
    gradients = in_order(sent, list(parameters), list(parameters), path)
    gradients = matched(gradients, parameters, path)
    gradients = like(gradients, parameters, path)
    return observe(model, gradients, layer=files.layer, samples=files.samples)


def _one_layer(
    files: UpdateFiles,
    weights: Mapping[str, Tensor],
    sent: Mapping[str, Tensor],
    path: Path,
    why: str,
) -> Observed:
    """Without a model: the first linear layer with a bias, taken to be followed by a ReLU."""
    if files.after is not None:
        raise InvalidOption(
            f"expected a model for weights after local training: these are no plain MLP ({why})"
        )
    order = list(weights)
    gradients = matched(in_order(sent, order, order, path), weights, path)
    gradients = like(gradients, weights, path)
    layers = [layer for layer in linear_layers(weights) if files.layer in (None, layer.name)]
    if files.layer is not None and not layers:
        names = ", ".join(repr(layer.name) for layer in linear_layers(weights)) or "none"
        raise InvalidOption(f"there is no linear layer {files.layer!r}; the linear layers: {names}")
    for layer in layers:
        parts = (f"{layer.name}.weight", f"{layer.name}.bias")
        if layer.bias and all(part in gradients for part in parts):
            break
    else:
        raise InvalidFile(
            f"{path}: expected the gradients of a linear layer's weight and bias, got those of "
            f"{', '.join(map(repr, list(gradients)[:6]))}"
        )
    note = (
        f"No model was given, and the weights are no plain MLP ({why}): the layer {layer.name!r} "
        "alone was judged, taken to be followed by a ReLU. Give the model for a proof by replay and "
        "for labels; if other layers stand before it, what comes back are their outputs, not the data."
    )
    view = LayerUpdate(
        weight=weights[parts[0]],
        bias=weights[parts[1]],
        weight_grad=gradients[parts[0]],
        bias_grad=gradients[parts[1]],
        samples=files.samples,
    )
    return Observed(view, None, False, (note,))
