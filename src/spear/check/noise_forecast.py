"""What noise leaves of the samples: an update's spectrum, seen or rehearsed, against its noise."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

import torch

from spear.check.rehearsal import Rehearsal
from spear.factors import Factors
from spear.update import Protocol

# Real batches spread wider than made-up ones: on CIFAR-10 and MNIST their loudest direction was up to
# 1.8 times as loud and the faintest up to 2.3 times as faint. Recoveries began where the made-up
# faintest stood 1.8 times above the noise (docs/check.md); between these bounds nothing is said.
_LARGEST_FACTOR, _SMALLEST_FACTOR = 2.0, 1.75
_EXACT = 1e-3  # of an input's size: 60 dB
_CLEAR = 0.1  # of an input's size: 20 dB; for pictures normalised by a quarter that is 32 dB PSNR
_LR = 0.01  # of local training, where it is not known
_FLOAT32 = 2.0**-24  # one rounding


class Expectation(Enum):
    """What comes back of the samples, going by the noise alone."""

    EXACT = "exact"  # to a thousandth of its size, and better
    CLEAR = "clear"  # to a tenth: anyone would recognise it
    VAGUE = "vague"  # something of it
    BORDERLINE = "drowning"  # some samples, or none: the faintest are as faint as the noise
    NOTHING = "nothing"  # even the loudest sample is fainter than the noise


@dataclass(frozen=True)
class NoiseForecast:
    """Noise against the spectrum of an update."""

    expectation: Expectation
    sigma: float
    """Standard deviation of all noise on an entry of the layer's gradient, rounding included."""
    relative: float
    """The same in units of a typical entry."""
    error: float | None
    """Expected error of an input, in units of its own size; None where nothing comes back."""
    loudest: float
    """The largest singular value over the largest that noise of this size would have."""
    faintest: float
    """The same for the smallest singular value that belongs to a sample."""
    estimated: bool
    """From made-up inputs rather than from an update?"""

    @property
    def decibels(self) -> float | None:
        """Signal to noise of the recovered inputs."""
        return None if not self.error else -20 * math.log10(self.error)

    @property
    def words(self) -> str:
        """What to expect, as a sentence without its subject."""
        if self.expectation is Expectation.NOTHING:
            return "are expected to drown: even the loudest is fainter than the noise"
        if self.expectation is Expectation.BORDERLINE:
            return "drown in part or altogether: the faintest are as faint as the noise"
        assert self.error is not None
        if self.expectation is Expectation.EXACT:
            return f"are expected to come back to {self.error:.0e} of their size"
        return (
            f"are expected to come back with an error of {100 * self.error:.2g} % of their size "
            f"({self.decibels:.0f} dB)"
        )


def rehearsed(seen: Rehearsal, protocol: Protocol, weights: torch.Tensor) -> NoiseForecast:
    """What to expect of an update like the rehearsal's, with all the noise that the protocol adds.

    Args:
        seen: the made-up batch, of the samples of all clients that are aggregated.
        protocol: what the clients do, their noise as sigma.
        weights: of the layer (m, n): sent weights are rounded, which costs digits of their difference.
    """
    parts = [seen.entry * _FLOAT32, private_noise(protocol), seen.rounding(protocol)]
    if protocol.sends != "gradient":
        parts.append(weight_rounding(weights, protocol))
    sigma = math.hypot(*parts)
    m, n = weights.shape
    spectrum = seen.spectrum[: max(seen.rank, 1)]
    return _judge(spectrum, sigma, sigma / seen.entry, seen.error(sigma), (m, n), estimated=True)


def observed(factors: Factors) -> NoiseForecast:
    """What an update itself says: its spectrum and its noise are read off it."""
    m, n = factors.m, factors.n
    if not factors.batch_size:  # no gap shows: nothing is told from noise, or none of it is noise
        kind = Expectation.NOTHING if factors.batch_size == 0 else Expectation.BORDERLINE
        return NoiseForecast(kind, factors.noise, 1.0, None, 1.0, 1.0, estimated=False)
    s = factors.singular_values
    # Inputs of one size, at right angles to each other, would have the singular values of D times
    # their length; then |D^+| is that length over s.
    error = factors.noise * math.sqrt(n * float(s.square().reciprocal().mean()))
    return _judge(s, factors.noise, factors.relative_noise, error, (m, n), estimated=False)


def private_noise(protocol: Protocol) -> float:
    """The clients' own noise on an entry of the aggregated mean gradient of one step."""
    return (protocol.sigma or 0.0) / update_per_gradient(protocol) / math.sqrt(protocol.clients)


def update_per_gradient(protocol: Protocol) -> float:
    """What is sent, in units of a step's mean gradient: 1, or the sum of the learning rates."""
    if protocol.sends == "gradient":
        return 1.0
    return (_LR if protocol.lr is None else protocol.rate) * (protocol.steps or 1)


def weight_rounding(weights: torch.Tensor, protocol: Protocol) -> float:
    """What rounding to the weights' precision leaves on their difference, per step's gradient.

    A weight w is stored to a spacing of eps 2^floor(log2 |w|); an error spread evenly over it has its
    length over the root of 12. Every local step rounds once, and adds lr times a gradient.
    """
    eps = {"float16": 2.0**-10, "bfloat16": 2.0**-7, "float64": 2.0**-52}
    sent = protocol.precision if protocol.sends == "weights" else "float32"
    spacing, steps = eps.get(sent, 2.0**-23), protocol.steps or 1
    floor = torch.exp2(torch.floor(torch.log2(weights.detach().double().abs().clamp_min(1e-30))))
    entry = spacing * float(floor.square().mean().sqrt()) / math.sqrt(12)
    return entry * math.sqrt(steps) / update_per_gradient(protocol) / math.sqrt(protocol.clients)


def _judge(
    spectrum: torch.Tensor,
    sigma: float,
    relative: float,
    error: float,
    size: tuple[int, int],
    *,
    estimated: bool,
) -> NoiseForecast:
    m, n = size
    edge = sigma * (math.sqrt(m) + math.sqrt(n))  # the largest singular value of such noise
    loudest = float(spectrum[0]) / edge if edge else math.inf
    faintest = float(spectrum[-1]) / edge if edge else math.inf
    louder, fainter = (_LARGEST_FACTOR, _SMALLEST_FACTOR) if estimated else (1.0, 1.0)
    if loudest * louder < 1:
        expectation = Expectation.NOTHING
    elif faintest < fainter:
        expectation = Expectation.BORDERLINE
    elif error <= _EXACT:
        expectation = Expectation.EXACT
    else:
        expectation = Expectation.CLEAR if error <= _CLEAR else Expectation.VAGUE
    known = None if expectation in (Expectation.NOTHING, Expectation.BORDERLINE) else error
    return NoiseForecast(expectation, sigma, relative, known, loudest, faintest, estimated)
