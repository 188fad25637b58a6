"""One protocol that is audited, and its noise in all units: sigma, multiplier, epsilon."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, Self, TypeVar

from spear.errors import InvalidOption, MissingExtra
from spear.update import Protocol

DEFAULT_LR = 0.05  # of local training, where epochs are given without a rate
_WIDEST = 100_000  # a slip beyond it would fill the memory
# What clients of a sweep do not do.
_NOT_VARIED = (
    *("local_steps", "momentum", "nesterov", "weight_decay", "proximal", "optimizer"),
    *("clipping", "reduction", "class_weights", "sample_weights"),
)


@dataclass(frozen=True)
class Setting(Protocol):
    """One protocol that is audited, of a model of some width.

    Args:
        samples: of one client.
        width: given to the model's factory; None leaves it as it is.

    >>> Setting(samples=8, width=100, clip=1.0, noise_multiplier=0.1).words()
    'b = 8, width 100, C = 1, z = 0.1'
    """

    samples: int = 8
    width: int | None = None

    def __post_init__(self) -> None:
        problems = [*self._wrong_widths(), *self._not_played()]
        try:
            super().__post_init__()
        except InvalidOption as error:
            problems.insert(0, error.words)
        if problems:
            raise InvalidOption("; ".join(problems), arguments=FIELDS)

    @classmethod
    def of(cls, **values: Any) -> Self:
        """The same from loose values: no noise, 0 epochs and a rate without epochs are understood.

        >>> Setting.of(epochs=0, sigma=0.0) == Setting()
        True
        """
        if values.get("epochs") == 0:
            values["epochs"] = None
        elif values.get("lr") is not None and values.get("epochs") is None:
            values["epochs"] = 1
        if values.get("epochs") is None:  # the base of a sweep may have them, its FedSGD not
            values |= {"lr": None, "local_batch_size": None}
        elif values.get("lr") is None:
            values["lr"] = DEFAULT_LR
        return super().of(**values)

    def _wrong_widths(self) -> list[str]:
        if self.width is None:
            return []
        if not isinstance(self.width, int) or isinstance(self.width, bool) or self.width < 1:
            return [f"expected {{width}} to be a whole number >= 1, got {self.width!r}"]
        if self.width > _WIDEST:
            return [f"expected {{width}} <= {_WIDEST:,}, got {self.width:,}"]
        return []

    def _not_played(self) -> list[str]:
        """What can be said of a protocol, and a sweep does not play through."""
        others = self.given(*_NOT_VARIED)
        found = [f"a sweep has no clients with {{{name}}}" for name in others]
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

    def words(self, base: Protocol | None = None) -> str:
        """What it is, or what tells it from `base`."""
        words = super().words(base)
        if self.width == (base.width if isinstance(base, Setting) else None):
            return words
        width = f"width {self.width}"
        first, comma, rest = words.partition(", ")
        if words == "base":
            return width
        if first.startswith("b = "):
            return f"{first}, {width}{comma}{rest}"
        return f"{width}, {words}"


FIELDS = {field.name: field.default for field in dataclasses.fields(Setting)}


@dataclass(frozen=True)
class Privacy:
    """What epsilon is counted for.

    Args:
        delta: of (epsilon, delta).
        dataset_size: of a client, from which it draws its batch (FedSGD); None: its data is the batch.
        steps: how many updates of one client the server sees.
    """

    delta: float = 1e-5
    dataset_size: int | None = None
    steps: int = 1

    def __post_init__(self) -> None:
        problems = [
            f"expected {{{name}}} to be a whole number >= 1, got {value!r}"
            for name, value in (("dataset_size", self.dataset_size), ("steps", self.steps))
            if value is not None and (not isinstance(value, int) or value < 1)
        ]
        if not 0 < self.delta < 1:
            problems.append(f"expected 0 < {{delta}} < 1, got {self.delta}")
        if problems:
            raise InvalidOption("; ".join(problems), arguments=("delta", "dataset_size", "steps"))

    def sample_rate(self, protocol: Protocol) -> float:
        """The share of a client's data in one update."""
        if self.dataset_size is None or protocol.clips == "global" or protocol.samples is None:
            return 1.0
        if self.dataset_size < protocol.samples:
            raise InvalidOption(
                f"expected a client's data to hold its batch of {protocol.samples}, got "
                f"{{dataset_size}} = {self.dataset_size}",
                arguments=("dataset_size",),
            )
        return protocol.samples / self.dataset_size

    def words(self) -> str:
        """What it is counted for.

        >>> Privacy().words()
        "for one update of a client at delta = 1e-05, where the batch is all of a client's data"
        """
        several = f"{self.steps:,} updates" if self.steps > 1 else "one update"
        size = (
            "the batch is all of a client's data"
            if self.dataset_size is None
            else f"batches are drawn from {self.dataset_size:,} samples"
        )
        return f"for {several} of a client at delta = {self.delta:g}, where {size}"


@dataclass(frozen=True)
class Noise:
    """The noise on an update in all units; None where one cannot be told."""

    sigma: float
    multiplier: float | None  # None where it has no epsilon
    epsilon: float | None  # None without clipping or noise, or where Opacus is not installed


def noise_of(protocol: Protocol, privacy: Privacy) -> Noise:
    """The noise of a protocol in all units.

    >>> noise_of(Setting(samples=10, sigma=1e-4), Privacy())
    Noise(sigma=0.0001, multiplier=None, epsilon=None)
    >>> found = noise_of(Setting(samples=10, clip=1.0, epsilon=8.0), Privacy())
    >>> round(found.multiplier, 2), round(found.sigma, 3), round(found.epsilon, 3)
    (0.64, 0.064, 8.0)
    """
    whole = protocol.clips == "global"
    samples = 1 if whole or protocol.sends != "gradient" else protocol.samples
    if protocol.clip is None or samples is None:
        return Noise(protocol.sigma or 0.0, None, None)
    unit = protocol.clip / samples
    if not whole and (protocol.clips != "per-sample" or protocol.sends != "gradient"):
        return Noise(protocol.sigma or _unbounded(protocol) * unit, None, None)
    rate = privacy.sample_rate(protocol)
    multiplier = protocol.noise_multiplier or (protocol.sigma or 0.0) / unit
    if protocol.epsilon is not None:
        multiplier = _multiplier(protocol.epsilon, rate, privacy)
    if multiplier == 0:
        return Noise(0.0, 0.0, None)
    try:
        counted: float | None = _epsilon(multiplier, rate, privacy)
    except MissingExtra:
        counted = None
    return Noise(multiplier * unit, multiplier, counted)


def _unbounded(protocol: Protocol) -> float:
    """The multiplier where clipping does not bound what is sent, so that it has no epsilon."""
    if protocol.epsilon is not None:
        raise InvalidOption(
            "{epsilon} is counted where each sample's gradient is clipped, or the whole update: with "
            "this {clipping} give {noise_multiplier} or {sigma}",
            arguments=("epsilon", "clipping", "noise_multiplier", "sigma"),
        )
    return protocol.noise_multiplier or 0.0


_P = TypeVar("_P", bound=Protocol)


def resolved(protocol: _P, sigma: float) -> _P:
    """The same with its noise as sigma: what is computed depends on that alone."""
    return dataclasses.replace(protocol, sigma=sigma or None, noise_multiplier=None, epsilon=None)


def _epsilon(multiplier: float, rate: float, privacy: Privacy) -> float:
    from spear.integrations.opacus import epsilon

    return epsilon([(multiplier, rate, privacy.steps)], privacy.delta)


def _multiplier(target: float, rate: float, privacy: Privacy) -> float:
    """The noise multiplier with this epsilon, by Opacus' RDP accountant.

    Opacus' own `get_noise_multiplier` does the same with fewer orders and stops 0.01 short, so that
    the epsilon shown beside it would be another than the one asked for.
    """
    from scipy.optimize import brentq

    def excess(logarithm: float) -> float:
        return math.log(_epsilon(math.exp(logarithm), rate, privacy) / target)

    low = high = 0.0  # of the multiplier's logarithm
    while excess(low) < 0:
        low -= 2
    while excess(high) > 0:
        high += 1
        if high > math.log(1e6):
            raise InvalidOption(
                f"no noise reaches {{epsilon}} = {target:g} at {{delta}} = {privacy.delta:g}: ask for "
                "more",
                arguments=("epsilon", "delta"),
            )
    found = math.exp(brentq(excess, low, high, xtol=1e-8)) if low < high else 1.0
    return float(f"{found:.6g}")  # so that rows are found again, whatever the last bits are
