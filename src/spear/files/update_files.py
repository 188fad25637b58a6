"""An update on disk: read the weights, what was sent and the model, and pick the layer."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from spear.errors import Declined, InvalidFile, InvalidOption
from spear.files.naming import in_order, like, matched, named
from spear.files.tensors import positional, read_tensors
from spear.files.user_code import build_model, load_object
from spear.update import UNKNOWN_PROTOCOL, LayerUpdate, Protocol, Sends, observe, plain_mlp

LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cross-entropy": nn.CrossEntropyLoss(),
    "bce": nn.BCEWithLogitsLoss(),
    "mse": nn.MSELoss(),
}


@dataclass(frozen=True)
class UpdateFiles:
    """An update on disk, and what is known about how it was made.

    Args:
        weights: the weights the client was sent.
        update: its gradients (FedSGD); or
        after: the weights it sent back (FedAvg); or
        difference: the weights it sent back minus those it was sent.
        protocol: how the update was made, as far as known; what was sent follows from the file.
        model: "package.module:factory"; without it a plain MLP is recognised from its weights.
        layer: the layer to attack; chosen automatically unless given.
        loss: "cross-entropy", "bce", "mse", or "package.module:function".
    """

    weights: Path | None = None
    update: Path | None = None
    after: Path | None = None
    difference: Path | None = None
    protocol: Protocol = UNKNOWN_PROTOCOL
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
        """The file of what was sent."""
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
        parameters = (
            state if isinstance(recognised, Declined) else dict(recognised.named_parameters())
        )
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


def loss_of(name: str) -> Any:
    """The loss by its name: one of `LOSSES`, or package.module:function."""
    if name in LOSSES:
        return LOSSES[name]
    if ":" not in name:
        raise InvalidOption(
            f"expected one of the losses {', '.join(LOSSES)}, or package.module:function, got {name!r}"
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
    """Load the checked weights into the model, or keep its own if there is no file. Returns notes."""
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
        weights = matched(weights, own, files.weights, "in the model")
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
    left = f"The file has no {', '.join(missing[:4])}: the model's own are kept."
    return (left,) if missing else ()
