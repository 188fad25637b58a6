"""How clients trained, as far as it is known: from options, train config, or their own metrics."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch

from spear.errors import InvalidOption
from spear.local_training import LocalTraining

Sends = Literal["weights", "delta", "gradient"]

# Where Flower apps put them: the official examples, FedProx, and what people write.
_KEYS = {
    "lr": ("lr", "learning-rate", "learning_rate"),
    "epochs": ("local-epochs", "local_epochs", "epochs"),
    "batch_size": ("batch-size", "batch_size", "local-batch-size"),
    "momentum": ("momentum",),
    "proximal": ("proximal-mu", "proximal_mu"),
}
_WHOLE = ("epochs", "batch_size")
_OPTIMISERS = {
    name.lower()
    for name, kind in vars(torch.optim).items()
    if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)
} - {"optimizer"}
_MAY_BE_ZERO = ("momentum", "proximal")


@dataclass(frozen=True)
class Training:
    """What clients do between the weights they get and what they send; None is unknown."""

    sends: Sends = "weights"
    lr: float | None = None
    epochs: int | None = None
    batch_size: int | None = None
    momentum: float | None = None
    weight_decay: float | None = None
    proximal: float | None = None
    optimizer: str = "sgd"

    def __post_init__(self) -> None:
        if self.sends not in get_args(Sends):
            raise InvalidOption(
                f"expected sends='weights' (a state dict), 'delta' (weights minus those received) or "
                f"'gradient', got {self.sends!r}"
            )
        if not isinstance(self.optimizer, str) or self.optimizer.lower() not in _OPTIMISERS:
            raise InvalidOption(
                "expected optimizer='sgd' (attacked) or one that is known not to be attackable "
                f"({', '.join(sorted(_OPTIMISERS - {'sgd'}))}), got {self.optimizer!r}"
            )
        self.local()  # checks the rest

    @property
    def is_sgd(self) -> bool:
        return self.optimizer.lower() == "sgd"

    @property
    def untold(self) -> list[str]:
        """Options that nothing was said about, and that would change how an update reads."""
        names = ("weight_decay", "momentum", "epochs", "batch_size", "lr")
        return [name for name in names if getattr(self, name) is None]

    def told(
        self, config: Mapping[str, Any], metrics: Mapping[str, Any], strategy: object = None
    ) -> tuple[Training, list[str]]:
        """With what the round's config and the client's metrics say; and where things came from."""
        found: dict[str, float] = {}
        notes = []
        places = (
            ("the reply's metrics", metrics),
            ("the train config", config),
            ("the strategy", {"lr": getattr(strategy, "client_learning_rate", None)}),
        )
        for name in _KEYS:
            for place, values in places:
                value = _read(name, values)
                if value is None:
                    continue
                given = getattr(self, name)
                if given is None:
                    found[name] = value
                    notes.append(f"{name} = {value:g}, read from {place}")
                elif given != value:
                    notes.append(
                        f"{place}: {name} = {value:g}; used was {name} = {given:g}, as given"
                    )
                break
        return dataclasses.replace(self, **found), notes  # type: ignore[arg-type]

    def of(self, examples: float | None) -> Training:
        """Of a client with so many examples: a batch that holds them all is no mini-batch."""
        if self.batch_size is None or examples is None or self.batch_size < examples:
            return self
        return dataclasses.replace(self, batch_size=None)

    @property
    def rate(self) -> float:
        """The learning rate; 1 where it is not known, which a single step does not need to know."""
        return 1.0 if self.lr is None else self.lr

    def local(self, epochs: int | None = None) -> LocalTraining:
        """As the attack takes it, with so many epochs where they are not known."""
        return LocalTraining(
            self.rate,
            self.epochs or epochs,
            self.batch_size,
            self.momentum or 0.0,
            self.weight_decay or 0.0,
            self.proximal or 0.0,
        )

    def readings(self) -> list[LocalTraining]:
        """What the local training may have been, likeliest first.

        Of unknown epochs, one step holds whatever the scale: of an unknown learning rate, or of an
        update that the client clipped. Several are repeated at the learning rate.
        """
        if self.epochs is not None or self.batch_size is not None or self.sends == "gradient":
            return [self.local()]
        several, one = self.local(), self.local(epochs=1)
        return [one, several] if self.lr is None else [several, one]

    def words(self) -> list[str]:
        """What was assumed, in sentences."""
        if self.sends == "gradient":
            return []
        if self.lr is None:
            return [
                "the learning rate is not known: inputs do not depend on it, but a proof of several "
                "local steps does (give lr=, or put it in the train config)"
            ]
        return []


def _read(name: str, values: Mapping[str, Any]) -> float | int | None:
    """A number under one of its names, if it is one that training can have."""
    for key in _KEYS[name]:
        value = values.get(key)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            continue
        if not math.isfinite(value) or value < 0 or (value == 0 and name not in _MAY_BE_ZERO):
            continue
        if name not in _WHOLE:
            return float(value)
        if value == int(value):
            return int(value)
    return None
