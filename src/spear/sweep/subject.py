"""What a sweep audits: a model's factory, its loss and the data. It is sent to worker processes."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor, nn

from spear.data import Column
from spear.errors import InvalidOption
from spear.federated import fitting_loss, mlp, train
from spear.files import accepts, build_model, load_object, loss_of
from spear.judge import Loss, Outputs, compares_numbers, logits_of
from spear.report import ImageFormat
from spear.sweep.private_data import PrivateData, load_data
from spear.update import trace

_WIDTH, _DEPTH = 200, 3  # of the built-in network; three layers learn within a few hundred steps
Factory = Callable[..., nn.Module]


@dataclass(frozen=True)
class Subject:
    """A model and its data, by name or as objects that can be pickled.

    Args:
        model: "package.module:factory", a function that returns the model, or None for an MLP.
        data: a file, a dataset's name, "package.module:function", or None for photos; or
            `PrivateData` itself.
        loss: "cross-entropy", "bce", "mse" or "package.module:function"; by default it depends on the
            labels.
        image_format: how samples are shown as pictures.
        root: folder of the known datasets.
        trained_steps: training steps before the model is attacked.
        server_lr: learning rate of that training, of the server when utility is measured, and between
            rounds of gradients.
        columns: what the inputs are called, if they are rows of a table; `PrivateData` has its own.
    """

    model: str | Factory | None = None
    data: str | PrivateData | None = None
    loss: str | None = None
    image_format: ImageFormat | None = None
    root: Path | None = None
    trained_steps: int = 0
    server_lr: float = 0.05
    columns: tuple[Column, ...] = ()

    def __post_init__(self) -> None:
        if self.trained_steps < 0 or not self.server_lr > 0:
            raise InvalidOption(
                "expected {trained_steps} >= 0 and {server_lr} > 0, got "
                f"{self.trained_steps} and {self.server_lr}",
                arguments=("trained_steps", "server_lr"),
            )

    def samples(self) -> PrivateData:
        """The data, loaded once per process."""
        if isinstance(self.data, PrivateData):
            return self.data
        return _loaded(self.data, self.image_format, self.root, self.columns)

    def build(self, width: int | None, seed: int) -> nn.Module:
        """The untrained model, with weights that depend on the seed alone."""
        if self.model is None:
            data = self.samples()
            outputs = data.classes or data.labels.shape[1]
            return mlp(
                data.inputs[0].numel(), outputs, width=width or _WIDTH, depth=_DEPTH, seed=seed
            )
        options = {} if width is None else {"width": width}
        self.takes_width(width)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            if isinstance(self.model, str):
                return copy.deepcopy(build_model(self.model, **options))
            model = self.model(**options)
        if not isinstance(model, nn.Module):
            raise InvalidOption(
                f"expected the factory to return a torch.nn.Module, got a {type(model).__name__}"
            )
        return model

    def takes_width(self, width: int | None) -> None:
        """Raise if a width is asked for that the factory does not take."""
        if width is None or self.model is None:
            return
        factory = load_object(self.model) if isinstance(self.model, str) else self.model
        if isinstance(factory, nn.Module) or not accepts(factory, "width"):
            name = self.model if isinstance(self.model, str) else "the factory"
            raise InvalidOption(
                f"width can only be varied if the factory takes it, and {name} has no argument "
                "`width`: add one, or leave out the widths"
            )

    def attacked_model(self, width: int | None, seed: int) -> nn.Module:
        """The model as the clients get it."""
        model = self.build(width, seed)
        if not self.trained_steps:
            return model
        fitted = self.fitted(model)
        return train(
            model,
            fitted.inputs,
            fitted.targets,
            steps=self.trained_steps,
            lr=self.server_lr,
            loss=fitted.loss,
            generator=torch.Generator().manual_seed(seed),
        )

    def fitted(self, model: nn.Module) -> Fitted:
        """The data in the shape that the model takes, and the loss for its outputs."""
        data = self.samples()
        inputs, outputs = _accepted(model, data)
        count = outputs.main_size
        name = self.loss or _usual_loss(data, outputs, model, inputs)
        by_class = count > 1 or name == "cross-entropy"
        if by_class and data.classes is not None and data.classes > count:
            raise InvalidOption(
                f"expected an output of the model for each class, got {count} outputs and "
                f"labels up to {data.classes - 1}"
            )
        told = loss_of(name)
        return Fitted(data, inputs, data.labels, outputs, told, fitting_loss(model, inputs, told))

    def digest(self, width: int | None) -> str:
        """Identifies the model: other code or weights give another digest."""
        model = self.build(width, seed=0)
        found = hashlib.sha256(repr(model).encode())
        for name, tensor in model.state_dict().items():
            found.update(f"{name} {tuple(tensor.shape)}".encode())
            found.update(str(float(tensor.double().sum())).encode())
        return found.hexdigest()[:12]

    @property
    def model_words(self) -> str:
        if self.model is None:
            return f"built-in MLP, {_DEPTH} linear layers, width {_WIDTH} unless varied"
        if isinstance(self.model, str):
            return self.model
        return getattr(self.model, "__qualname__", type(self.model).__name__)


@dataclass(frozen=True, eq=False)
class Fitted:
    """Data as a model takes it."""

    data: PrivateData
    inputs: Tensor  # (N, ...)
    targets: Tensor  # (N,) classes, or (N, ...) numbers
    outputs: Outputs  # what the model returns
    told: Loss  # as the client's code has it
    loss: Loss  # the same with targets as they are here

    def predicted(self, outputs: object, count: int) -> Tensor:
        """The likeliest classes (count,), from what the model returns."""
        main = self.outputs.main(self.outputs.matrix(outputs, count)).reshape(count, -1)
        if main.shape[1] > 1:
            return main.argmax(1)
        between = isinstance(self.told, nn.BCELoss) or compares_numbers(self.told)
        return (main[:, 0] > (0.5 if between else 0.0)).long()

    def draw(self, count: int, seed: int) -> Tensor:
        """The indices (count,) of a private batch."""
        if count > len(self.data):
            raise InvalidOption(
                f"expected data with at least {count} samples, for all clients of a setting together, "
                f"got {len(self.data)}"
            )
        order = torch.randperm(len(self.data), generator=torch.Generator().manual_seed(seed))
        return order[:count]


@cache
def _loaded(
    spec: str | None,
    image_format: ImageFormat | None,
    root: Path | None,
    columns: tuple[Column, ...],
) -> PrivateData:
    return load_data(spec, image_format, root, columns)


def _accepted(model: nn.Module, data: PrivateData) -> tuple[Tensor, Outputs]:
    """Inputs in the first shape that the model runs on: as given, flat, or as pictures."""
    shapes = [data.inputs.shape[1:], torch.Size([data.inputs[0].numel()])]
    if data.image_format is not None:
        shapes.append(torch.Size(data.image_format.shape))
    problems = []
    for shape in dict.fromkeys(shapes):
        inputs = data.inputs.reshape(-1, *shape)
        probe = copy.deepcopy(model)
        try:
            with torch.no_grad():
                two = probe(inputs[:2])
            outputs = Outputs(two, whole=True)
            outputs.matrix(two, 2)  # raises unless there is a row for each sample
            return inputs, outputs
        except Exception as error:  # the user's model may raise anything
            problems.append(f"{tuple(shape)}: {str(error).splitlines()[0][:120]}")
    raise InvalidOption(
        f"the model does not take the data ({data.name}), neither as it is nor reshaped: "
        f"{'; '.join(problems)}. Give data that it takes ({{data}})",
        arguments=("data",),
    )


def _usual_loss(data: PrivateData, outputs: Outputs, model: nn.Module, inputs: Tensor) -> str:
    """Squared error for numbers, cross-entropy for classes: with one output, of logits or not."""
    if data.classes is None:
        return "mse"
    if outputs.main_size > 1 or data.classes > 2:
        return "cross-entropy"
    traced = trace(copy.deepcopy(model).eval())
    if not isinstance(traced, nn.Module):
        return "bce"
    count = min(2, len(inputs))
    _, squash = logits_of(traced, lambda net: outputs.matrix(net(inputs[:count]), count))
    return "bce" if squash is None else "torch.nn:BCELoss"
