"""The noise on an update in all its units (sigma, multiplier, epsilon), and what epsilon covers."""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from spear.errors import InvalidOption, MissingExtra
from spear.update import Protocol

# Orders of Renyi divergence. Opacus starts at 1.1; for little noise the best one is closer to 1.
_ORDERS = [1 + 10 ** (-k / 4) for k in range(5, 33)]


@dataclass(frozen=True)
class Privacy:
    """What epsilon covers.

    Args:
        delta: the delta of (epsilon, delta).
        dataset_size: how much data a client draws its batch from (FedSGD); None if the batch is all
            its data.
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
        """What epsilon covers, in words.

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
    """The noise on an update in all units; None for a unit that is not defined."""

    sigma: float
    multiplier: float | None  # None if there is no epsilon
    epsilon: float | None  # None without clipping or noise, or if Opacus is not installed


def noise_of(protocol: Protocol, privacy: Privacy) -> Noise:
    """The noise of a protocol in all units.

    >>> noise_of(Protocol(samples=10, sigma=1e-4), Privacy())
    Noise(sigma=0.0001, multiplier=None, epsilon=None)
    >>> found = noise_of(Protocol(samples=10, clip=1.0, epsilon=8.0), Privacy())
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
    """The multiplier if clipping does not bound what is sent, so that epsilon is not defined."""
    if protocol.epsilon is not None:
        raise InvalidOption(
            "{epsilon} is defined only if each sample's gradient, or the whole update, is "
            "clipped: with this {clipping} give {noise_multiplier} or {sigma}",
            arguments=("epsilon", "clipping", "noise_multiplier", "sigma"),
        )
    return protocol.noise_multiplier or 0.0


_P = TypeVar("_P", bound=Protocol)


def resolved(protocol: _P, sigma: float) -> _P:
    """The protocol with its noise given as sigma, all that the computation depends on."""
    return dataclasses.replace(protocol, sigma=sigma or None, noise_multiplier=None, epsilon=None)


def _epsilon(multiplier: float, rate: float, privacy: Privacy) -> float:
    return epsilon([(multiplier, rate, privacy.steps)], privacy.delta)


def _multiplier(target: float, rate: float, privacy: Privacy) -> float:
    """The noise multiplier for this epsilon, by Opacus' RDP accountant.

    Opacus' own `get_noise_multiplier` uses fewer orders and a tolerance of 0.01, so that the epsilon
    reported would differ from the one asked for.
    """
    from scipy.optimize import brentq

    def excess(logarithm: float) -> float:
        return math.log(_epsilon(math.exp(logarithm), rate, privacy) / target)

    low = high = 0.0  # bounds on the multiplier's logarithm
    while excess(low) < 0:
        low -= 2
    while excess(high) > 0:
        high += 1
        if high > math.log(1e6):
            raise InvalidOption(
                f"no noise reaches {{epsilon}} = {target:g} at {{delta}} = {privacy.delta:g}: ask "
                "for a larger one",
                arguments=("epsilon", "delta"),
            )
    found = math.exp(brentq(excess, low, high, xtol=1e-8)) if low < high else 1.0
    return float(f"{found:.6g}")  # rounded, so that the last bits do not change a row's key


def epsilon(history: Sequence[tuple[float, float, int]], delta: float) -> float:
    """The epsilon of steps (noise multiplier, sample rate, count), by Opacus' RDP accountant.

    Opacus' default, the PRV accountant, is not used: its grid takes hundreds of gigabytes at
    multipliers such as 0.002.

    >>> round(epsilon([(1.0, 0.01, 1000)], delta=1e-5), 2)
    2.1
    >>> epsilon([(0.0, 1.0, 1)], delta=1e-5)
    inf
    """
    if not 0 < delta < 1:
        raise InvalidOption(f"expected 0 < delta < 1, got {delta}")
    if any(multiplier == 0 for multiplier, _, _ in history):
        return math.inf
    try:
        from opacus.accountants import RDPAccountant
    except ImportError as error:
        raise MissingExtra("Opacus", "opacus") from error
    accountant = RDPAccountant()
    accountant.history = list(history)
    with warnings.catch_warnings():
        # Opacus warns if the best order is an outermost one; ours already go down to 1 + 1e-8.
        warnings.filterwarnings("ignore", "Optimal order is the")
        orders = [*_ORDERS, *RDPAccountant.DEFAULT_ALPHAS]
        try:
            return float(accountant.get_epsilon(delta, alphas=orders))
        except (ArithmeticError, ValueError) as error:
            raise InvalidOption(
                f"expected noise that epsilon can be computed for, got noise multipliers of "
                f"{', '.join(f'{multiplier:g}' for multiplier, _, _ in history[:3])} at delta = "
                f"{delta:g} ({error})"
            ) from error
