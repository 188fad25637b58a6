"""How clients train and what they send, as far as it is known: the options of a preflight, checked."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from enum import Enum
from typing import Literal, get_args

from spear.errors import InvalidOption
from spear.report import Remark

Clipping = Literal["flat", "per_layer"]

# Optimisers that divide every entry by a scale of its own, or keep its sign alone.
ENTRYWISE = {"adam", "adamw", "adamax", "nadam", "radam", "amsgrad", "rmsprop", "adagrad"}
ENTRYWISE |= {"adadelta", "lamb", "lion", "yogi", "signsgd", "adafactor"}
_TINY = 1e-12  # noise and norms below it, or above its inverse, are slips
_FLOATS = {"float64", "float32", "float16", "bfloat16"}


class Verdict(Enum):
    """Does this attack get through? Never a guarantee against others."""

    EXPOSED = "exposed"
    PARTLY = "partly exposed"
    NOT_EXPOSED = "not exposed"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Check:
    """What one look at the model or the protocol came to."""

    remarks: tuple[Remark, ...] = ()
    limit: Verdict = Verdict.EXPOSED
    """The most that this look leaves possible."""
    because: str = ""
    """The limit's reason as the end of a sentence, for the headline."""


def worst_of(checks: list[Check]) -> tuple[Verdict, str]:
    """The verdict of all checks, and its reason: what stops an attack counts before the unknown."""
    for limit in (Verdict.NOT_EXPOSED, Verdict.UNKNOWN, Verdict.PARTLY):
        for check in checks:
            if check.limit is limit:
                return limit, check.because
    return Verdict.EXPOSED, ""


@dataclass(frozen=True)
class Protocol:
    """A client's training and what it does to its update before sending it.

    Args:
        batch_size: samples of one client's update: its batch (FedSGD) or all it trains on (FedAvg).
        lr: the client's learning rate, if it sends weights after local training.
        epochs: of local training.
        local_batch_size: samples of one local step.
        optimizer: the client's.
        noise_multiplier: of DP-SGD, in Opacus' units: sigma = noise_multiplier * max_grad_norm /
            batch_size on every entry of the mean gradient.
        max_grad_norm: the bound that a sample's gradient is clipped to.
        sigma: the noise on an entry instead.
        clipping: "flat", or "per_layer" with a factor for each parameter.
        precision: of what is sent: "float16", "bfloat16", "8-bit", ...
        pruned: share of the smallest entries that is not sent.
        clients: under secure aggregation, how many updates the server sees as one.
        dataset_size: of the client, to state epsilon.
        rounds: steps that epsilon is stated for.
        delta: of epsilon.

    >>> Protocol(batch_size=20, noise_multiplier=0.002, max_grad_norm=1.0).noise
    0.0001
    """

    batch_size: int | None = None
    lr: float | None = None
    epochs: int | None = None
    local_batch_size: int | None = None
    optimizer: str = "sgd"
    noise_multiplier: float | None = None
    max_grad_norm: float | None = None
    sigma: float | None = None
    clipping: Clipping = "flat"
    precision: str | None = None
    pruned: float = 0.0
    clients: int = 1
    dataset_size: int | None = None
    rounds: int = 1
    delta: float = 1e-5

    def __post_init__(self) -> None:
        problems = [*self._size_problems(), *self._noise_problems()]
        if self.clipping not in get_args(Clipping):
            problems.append(f"expected clipping 'flat' or 'per_layer', got {self.clipping!r}")
        if self.precision is not None and self.precision not in _FLOATS and self.bits is None:
            problems.append(
                "expected precision float64, float32, float16, bfloat16 or 2-bit to 16-bit, got "
                f"{self.precision!r}"
            )
        if not 0 <= self.pruned < 1:
            problems.append(f"expected a pruned share 0 <= pruned < 1, got {self.pruned}")
        if not 0 < self.delta < 1:
            problems.append(f"expected 0 < delta < 1, got {self.delta}")
        if problems:
            raise InvalidOption("; ".join(problems))

    def _size_problems(self) -> list[str]:
        counts = ("batch_size", "epochs", "local_batch_size", "clients", "dataset_size", "rounds")
        problems = [
            f"expected {name} to be a whole number >= 1, got {value!r}"
            for name in counts
            if (value := getattr(self, name)) is not None
            and (not isinstance(value, int) or value < 1)
        ]
        if self.lr is not None and not 0 < self.lr < math.inf:
            problems.append(f"expected lr > 0, got {self.lr}")
        if not problems and self.dataset_size and self.dataset_size < (self.batch_size or 1):
            problems.append(
                f"expected a dataset_size of at least the batch, got {self.dataset_size}"
            )
        return problems

    def _noise_problems(self) -> list[str]:
        problems = []
        for name in ("sigma", "noise_multiplier"):
            value = getattr(self, name)
            if value is not None and value != 0 and not _TINY <= value <= 1 / _TINY:
                problems.append(f"expected {name} >= 0, up to {1 / _TINY:g}, got {value}")
        if self.max_grad_norm is not None and not _TINY <= self.max_grad_norm <= 1 / _TINY:
            problems.append(
                f"expected max_grad_norm > 0, up to {1 / _TINY:g}, got {self.max_grad_norm}"
            )
        if self.sigma is not None and self.noise_multiplier is not None:
            problems.append("expected sigma or noise_multiplier, which is sigma * b / C, not both")
        if self.noise_multiplier is not None and not (self.max_grad_norm and self.batch_size):
            problems.append(
                "noise_multiplier is in units of max_grad_norm / batch_size: give both, or the "
                "noise on an entry as sigma"
            )
        return problems

    @property
    def total(self) -> int | None:
        """Samples behind what the server sees: those of all clients that it cannot tell apart."""
        return None if self.batch_size is None else self.batch_size * self.clients

    @property
    def sends_weights(self) -> bool:
        """Does the client train on its own and send weights?"""
        return any(part is not None for part in (self.lr, self.epochs, self.local_batch_size))

    @property
    def steps(self) -> int:
        """Local steps behind one update."""
        size, local = self.batch_size, self.local_batch_size
        per_epoch = math.ceil(size / local) if size and local else 1
        return per_epoch * (self.epochs or 1)

    @property
    def mini_batches(self) -> bool:
        return self.local_batch_size is not None and (
            self.batch_size is None or self.local_batch_size < self.batch_size
        )

    @property
    def bits(self) -> int | None:
        """Of a uniform grid, where the precision is one."""
        named = re.fullmatch(r"(\d+)[- ]?bits?|int(\d+)", self.precision or "")
        count = int(named[1] or named[2]) if named else 0
        return count if 2 <= count <= 16 else None

    @property
    def uneven(self) -> bool:
        """Does what is left out fall on some entries and not on others, so that it is no noise?"""
        return self.pruned >= 0.02 or (self.bits is not None and self.bits <= 8)

    @property
    def noise(self) -> float:
        """Standard deviation that one client adds to an entry of its mean gradient."""
        if self.sigma is not None:
            return self.sigma
        if self.noise_multiplier is None:
            return 0.0
        assert self.max_grad_norm is not None
        assert self.batch_size is not None
        return self.noise_multiplier * self.max_grad_norm / self.batch_size
