"""From files to a report: what `spear invert` does, for those who would rather call it."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from spear.audit.loading import build_model, load_object
from spear.audit.naming import in_order, like, matched, named, not_gradients
from spear.audit.tensors import positional, read_tensors
from spear.audit.truth import compare, read_batch
from spear.errors import InvalidFile, InvalidOption, NothingToAttack
from spear.inversion import invert
from spear.judge import Proof
from spear.metrics import EXACT_DB
from spear.report import Finding, Look, Report
from spear.update import LayerUpdate, Protocol, observe
from spear.update.plain_mlp import plain_mlp
from spear.update.protocol import UNTOLD, Sends

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
        update: FedSGD: its gradients; or
        after: FedAvg: the weights it sent back; or
        difference: these minus those it was sent.
        protocol: how the update came to be, as far as it is known; what is sent follows from the file.
        model: "package.module:factory"; without it a plain MLP is recognised from its weights.
        layer: the layer to attack; chosen unless given.
        loss: "cross-entropy", "bce", "mse", or "package.module:function".
    """

    weights: Path | None = None
    update: Path | None = None
    after: Path | None = None
    difference: Path | None = None
    protocol: Protocol = UNTOLD
    model: str | None = None
    layer: str | None = None
    loss: str | None = None

    def __post_init__(self) -> None:
        forms = ("update", "after", "difference")
        given = [f"{{{form}}}" for form in forms if getattr(self, form) is not None]
        if len(given) != 1:
            raise InvalidOption(
                "expected either gradients ({update}), the weights after local training ({after}) or "
                f"their difference ({{difference}}), got {' and '.join(given) or 'neither'}",
                arguments=forms,
            )
        if self.weights is None and self.model is None:
            raise InvalidOption(
                "expected the weights the client was sent ({weights}), or a model that has them "
                "({model}), got neither",
                arguments=("weights", "model"),
            )

    @property
    def sends(self) -> Sends:
        sent: Sends = "weights" if self.after is not None else "difference"
        return "gradient" if self.update is not None else sent

    @property
    def path(self) -> Path:
        """Of what was sent."""
        path = self.update or self.after or self.difference
        assert path is not None
        return path


def observe_files(files: UpdateFiles) -> LayerUpdate:
    """Read the files and pick the layer."""
    told = dataclasses.replace(files.protocol, sends=files.sends)
    weights = read_tensors(files.weights) if files.weights else None
    sent = read_tensors(files.path)
    model: nn.Module | Mapping[str, Tensor]
    notes: tuple[str, ...] = ()
    if files.model is not None:
        model = build_model(files.model)
        notes = _filled(model, weights, files)
        parameters, state = dict(model.named_parameters()), model.state_dict()
    else:
        assert weights is not None
        model, sent = named(weights, sent)
        recognised = plain_mlp(model)
        state = dict(model)
        parameters = state if isinstance(recognised, str) else dict(recognised.named_parameters())
    # A list of gradients has one for each parameter; weights, and their differences, may have buffers.
    first, second = list(parameters), list(state)
    if files.update is None:
        first, second = second, first
    ordered = in_order(sent, first, second, files.path)
    sent = like(matched(ordered, state, files.path), state, files.path)
    if files.after is None:
        sent = {name: tensor for name, tensor in sent.items() if name in parameters}
    forms = {"gradient": "gradients", "weights": "after", "difference": "difference"}
    form: dict[str, Any] = {forms[files.sends]: sent}
    view = observe(model, **form, protocol=told, layer=files.layer)
    return dataclasses.replace(view, notes=(*notes, *view.notes))


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
    name = files.path.name
    try:
        view = observe_files(files)
    except NothingToAttack as error:
        finding = Finding.not_attacked(name, str(error))
        return _report(finding, settings, began)
    if look is not None:
        look.pictures(torch.zeros(0, view.inputs))  # a shape that does not fit is told at once
    batch = None if truth is None else read_batch(truth)
    if batch is not None and batch[0].shape[1] != view.inputs:
        raise InvalidFile(
            f"{truth}: expected samples of {view.inputs} values, the layer's inputs, got "
            f"{batch[0].shape[1]}"
        )
    result = invert(view, loss=loss, **options)
    if files.weights is not None and not bool(result.certified.any()):
        not_gradients(read_tensors(files.weights), files.weights)
    known = None if batch is None else compare(result.inputs, *batch, look=look)
    notes = view.notes
    if files.model is None and view.model is not None:
        notes = (*notes, _GUESS[result.proof])
    if known is not None and any(
        sure and not decibel >= EXACT_DB
        for sure, decibel in zip(result.certified.tolist(), known.psnr, strict=True)
    ):
        notes = (*notes, _OTHER_BATCH)
    finding = Finding.of(result, name, view, look=look, truth=known, notes=notes)
    return _report(finding, settings, began)


def _report(finding: Finding, settings: Mapping[str, Any] | None, began: float) -> Report:
    return Report.new(
        "inversion",
        f"What {finding.name} gives away",
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
