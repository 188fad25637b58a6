"""One protocol to audit, for a model of some width."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Self

from spear.errors import InvalidOption
from spear.update import Protocol

DEFAULT_LR = 0.05  # of local training, where epochs are given without a rate
_WIDEST, _MOST_ROUNDS = 100_000, 1_000  # typing errors beyond these would fill the memory
# Options of `Protocol` that a sweep does not support.
_NOT_VARIED = (
    *("local_steps", "momentum", "nesterov", "weight_decay", "proximal", "optimizer"),
    *("clipping", "reduction", "class_weights", "sample_weights"),
)


@dataclass(frozen=True)
class Setting(Protocol):
    """One protocol to audit, for a model of some width.

    Args:
        samples: per client.
        width: passed to the model's factory; None uses the factory's own.
        rounds: of the same samples that the server sees, and attacks together.

    >>> Setting(samples=8, width=100, clip=1.0, noise_multiplier=0.1).words()
    'b = 8, width 100, C = 1, z = 0.1'
    >>> Setting(samples=60, rounds=10).words()
    'b = 60, 10 rounds'
    """

    samples: int = 8
    width: int | None = None
    rounds: int = 1

    def __post_init__(self) -> None:
        problems = [*self._wrong_counts(), *self._unsupported()]
        try:
            super().__post_init__()
        except InvalidOption as error:
            problems.insert(0, error.words)
        if problems:
            raise InvalidOption("; ".join(problems), arguments=FIELDS)

    @classmethod
    def of(cls, **values: Any) -> Self:
        """A setting from loose values: zero noise, 0 epochs and a rate without epochs are accepted.

        >>> Setting.of(epochs=0, sigma=0.0) == Setting()
        True
        """
        if values.get("epochs") == 0:
            values["epochs"] = None
        elif values.get("lr") is not None and values.get("epochs") is None:
            values["epochs"] = 1
        if values.get("epochs") is None:  # the base of a sweep may have these; FedSGD does not
            values |= {"lr": None, "local_batch_size": None}
        elif values.get("lr") is None:
            values["lr"] = DEFAULT_LR
        return super().of(**values)

    def _wrong_counts(self) -> list[str]:
        found = []
        for name, most in (("width", _WIDEST), ("rounds", _MOST_ROUNDS)):
            value = getattr(self, name)
            if name == "width" and value is None:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                found.append(f"expected {{{name}}} to be a whole number >= 1, got {value!r}")
            elif value > most:
                found.append(f"expected {{{name}}} <= {most:,}, got {value:,}")
        return found

    def _unsupported(self) -> list[str]:
        """What a protocol may have but a sweep does not support."""
        others = self.given(*_NOT_VARIED)
        found = [f"a sweep does not support {{{name}}}" for name in others]
        if self.samples is None:
            found.append("expected {samples} to be a whole number >= 1, got None")
        if self.sends != "gradient" and (
            self.epochs is None or not isinstance(self.lr, float | int)
        ):
            found.append("expected {epochs} and one {lr} together (FedAvg), or neither (FedSGD)")
        return found

    @property
    def total(self) -> int:
        """Samples of all clients together."""
        return self.samples * self.clients

    def _parts(self, base: Protocol | None) -> list[str]:
        parts = super()._parts(base)
        if self.rounds != (base.rounds if isinstance(base, Setting) else 1):
            parts.append(f"{self.rounds} round{'s' * (self.rounds > 1)}")
        if self.width == (base.width if isinstance(base, Setting) else None):
            return parts
        samples = self.samples != (None if base is None else base.samples)
        first = 1 if samples and parts else 0  # after the number of samples
        return [*parts[:first], f"width {self.width}", *parts[first:]]


FIELDS = {field.name: field.default for field in dataclasses.fields(Setting)}
