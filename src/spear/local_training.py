"""A FedAvg client's local training, as far as the server knows it, and what its weights say of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from spear.errors import InvalidOption, InvalidUpdate


@dataclass(frozen=True)
class LocalTraining:
    """How a FedAvg client got from the weights it was sent to those it sent back."""

    lr: float
    epochs: int | None = None
    batch_size: int | None = None
    momentum: float = 0.0
    weight_decay: float = 0.0
    proximal: float = 0.0  # FedProx: its mu

    def __post_init__(self) -> None:
        if not isinstance(self.lr, (int, float)) or not 0 < self.lr < float("inf"):
            raise InvalidOption(
                f"after= and difference= need the client's learning rate lr > 0, got {self.lr!r}"
            )
        for name in ("epochs", "batch_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InvalidOption(f"expected {name} >= 1, got {value}")
        if not 0 <= self.momentum < 1:
            raise InvalidOption(f"expected 0 <= momentum < 1, got {self.momentum}")
        for name in ("weight_decay", "proximal"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise InvalidOption(f"expected {name} >= 0, got {getattr(self, name)}")
        if self.weight_decay and (self.epochs is None or self.batch_size is not None):
            raise InvalidOption(
                "weight_decay shrinks the weights at every step: to take that off again the number of "
                "steps must be known, so give epochs= of full-batch steps"
            )

    @property
    def one_step(self) -> bool:
        return self.epochs == 1 and self.batch_size is None

    def kept(self, steps: int) -> float:
        """The share of the first weights that weight decay leaves after so many steps."""
        weight, velocity = 1.0, 0.0
        for _ in range(steps if self.weight_decay else 0):
            velocity = self.momentum * velocity + self.weight_decay * weight
            weight -= self.lr * velocity
        return weight

    def optimiser(self, parameters: list[nn.Parameter]) -> torch.optim.SGD:
        return torch.optim.SGD(
            parameters, lr=self.lr, momentum=self.momentum, weight_decay=self.weight_decay
        )


def only_sgd(optimizer: str) -> None:
    """Refuse every optimiser but SGD, by name."""
    if optimizer.lower() != "sgd":
        raise InvalidOption(
            f"expected optimizer='sgd', got {optimizer!r}: optimisers that scale every entry on its "
            "own (Adam, RMSprop, Adagrad, ...) leave no low-rank update to invert"
        )


def descent(
    model: nn.Module, after: Mapping[str, Tensor], training: LocalTraining
) -> dict[str, Tensor]:
    """The sum of the client's local gradients: (W before - W after) / lr, without weight decay."""
    problems, named = [], {}
    kept = training.kept(training.epochs or 1)
    for name, before in model.named_parameters():
        if not isinstance(after.get(name), Tensor):
            problems.append(f"after= has no tensor {name!r}: expected the state dict sent back")
        elif after[name].shape != before.shape:
            problems.append(
                f"after[{name!r}] has shape {tuple(after[name].shape)}, "
                f"the model's has {tuple(before.shape)}"
            )
        else:
            sent_back = after[name].detach().to_dense().to(before.device, before.dtype)
            named[name] = (kept * before.detach() - sent_back) / training.lr
    known = set(model.state_dict())
    problems += [
        f"after= has {name!r}, which the model has not" for name in after if name not in known
    ]
    if not problems and not any(bool(moved.any()) for moved in named.values()):
        problems.append(
            "after= equals the model: the client did not train, or the state dict is the model's own "
            "(state_dict() returns references: copy it before training)"
        )
    if problems:
        raise InvalidUpdate(problems)
    return named


def descent_by(
    model: nn.Module, difference: Mapping[str, Tensor], training: LocalTraining
) -> dict[str, Tensor]:
    """The same from the weights' difference, after minus before, of all parameters or some."""
    if not any(bool(moved.any()) for moved in difference.values()):
        raise InvalidUpdate(
            [
                "difference= is zero: the client did not train, or a state dict was taken from itself "
                "(state_dict() returns references: copy it before training)"
            ]
        )
    lost = 1 - training.kept(training.epochs or 1)
    before = {name: p.detach() for name, p in model.named_parameters()}
    return {
        name: -(lost * before[name] + moved.to(before[name].device)) / training.lr
        for name, moved in difference.items()
    }
