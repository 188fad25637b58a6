"""What a private step gives to the server, and what it costs in sigma, multiplier and epsilon."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from opacus.accountants import RDPAccountant
from torch import Tensor, nn

from spear.errors import InvalidOption
from spear.update import LayerUpdate, Protocol, observe

History = tuple[
    tuple[float, float, int], ...
]  # (noise multiplier, sample rate, steps), as in Opacus

# Orders of Renyi divergence. Opacus starts at 1.1; the best one for little noise lies nearer to 1.
_ORDERS = [1 + 10 ** (-k / 4) for k in range(5, 33)]

_APART = (
    "each parameter was clipped on its own (Opacus' per-layer clipping), so a sample's weight and "
    "bias gradients carry different factors, and the bias gradient does not give its scale"
)


@dataclass(frozen=True, eq=False)
class DPUpdate:
    """The private gradients of one DP-SGD step, as a server sees them, and the noise in them."""

    gradients: Mapping[str, Tensor] = field(repr=False)
    """By the model's own parameter names: clipped, summed, noised and divided."""
    sigma: float
    """Standard deviation of the noise on every entry."""
    noise_multiplier: float | None
    """sigma B / C, Opacus' unit of noise; None without clipping, where noise bounds nothing."""
    max_grad_norm: float | tuple[float, ...] | None
    """C; one for each parameter if they were clipped apart, None without clipping."""
    expected_batch_size: int | None
    """B; None where the loss is a sum and nothing is divided."""
    weights: Mapping[str, Tensor] = field(repr=False)
    """The state dict before the step."""
    architecture: nn.Module = field(repr=False)
    """The model without Opacus' hooks; its weights may be of another step."""

    @property
    def clipped_apart(self) -> bool:
        """Was each parameter clipped on its own?"""
        return isinstance(self.max_grad_norm, tuple)

    @property
    def protocol(self) -> Protocol:
        """What was done to the gradients, in the words of all doors."""
        bounded = self.max_grad_norm is not None
        return Protocol(
            clip=sensitivity(self.max_grad_norm) if bounded else None,
            clipping=("per-layer" if self.clipped_apart else "per-sample") if bounded else None,
            sigma=self.sigma or None,
        )

    @property
    def remark(self) -> str:
        """What stands in the way of an exact recovery, in words; empty if nothing does."""
        noisy = f"noise of standard deviation {self.sigma:.1e} was added to every entry"
        return "; ".join([noisy] * (self.sigma > 0) + [_APART] * self.clipped_apart)

    def model(self) -> nn.Module:
        """A copy of the model with the weights before the step, without Opacus' hooks."""
        model = copy.deepcopy(self.architecture)
        model.load_state_dict(self.weights)
        return model

    def view(self, layer: str | None = None) -> LayerUpdate:
        """The attackable layer as it shows in this update, for `spear.invert`."""
        return observe(self.model(), self.gradients, layer=layer, protocol=self.protocol)

    def epsilon(self, delta: float = 1e-5, *, steps: int = 1, sample_rate: float = 1.0) -> float:
        """The epsilon that Opacus' RDP accountant gives for `steps` such steps; may be infinite."""
        if steps < 1 or not 0 < sample_rate <= 1:
            raise InvalidOption(
                f"expected steps >= 1 and 0 < sample_rate <= 1, got {steps} and {sample_rate}"
            )
        return epsilon(((self.noise_multiplier or 0.0, sample_rate, steps),), delta)

    def summary(self, delta: float = 1e-5) -> str:
        """The noise in all its units, in one line."""
        if self.noise_multiplier is None:
            return f"sigma = {self.sigma:.3g}, not clipped: no differential privacy"
        return (
            f"sigma = {self.sigma:.3g}, C = {sensitivity(self.max_grad_norm):.3g}: noise multiplier "
            f"{self.noise_multiplier:.3g}, epsilon = {self.epsilon(delta):.4g} for one step at "
            f"delta = {delta:g}"
        )


@dataclass(frozen=True, eq=False)
class CapturedStep(DPUpdate):
    """One step of a real training run."""

    samples: int | None
    """Samples in the batch, random under Poisson sampling. None where Opacus does not tell: virtual
    batches (`BatchMemoryManager`) and ghost clipping."""
    history: History | None
    """What the accountant had counted, this step included; None if `capture` was not given it."""

    def spent(self, delta: float = 1e-5) -> float | None:
        """The epsilon of the run so far; None if `capture` was not given the accountant."""
        return None if self.history is None else epsilon(self.history, delta)


def sensitivity(max_grad_norm: float | tuple[float, ...] | None) -> float:
    """The norm that one sample's clipped gradient can have at most."""
    if max_grad_norm is None:
        return math.inf
    return math.hypot(*max_grad_norm) if isinstance(max_grad_norm, tuple) else max_grad_norm


def epsilon(history: Sequence[tuple[float, float, int]], delta: float) -> float:
    """The epsilon of steps (noise multiplier, sample rate, count), by Opacus' RDP accountant.

    Not by the PRV accountant, Opacus' default, whose grid takes hundreds of gigabytes at multipliers
    such as 0.002.

    >>> round(epsilon([(1.0, 0.01, 1000)], delta=1e-5), 2)
    2.1
    >>> epsilon([(0.0, 1.0, 1)], delta=1e-5)
    inf
    """
    if not 0 < delta < 1:
        raise InvalidOption(f"expected 0 < delta < 1, got {delta}")
    if any(multiplier == 0 for multiplier, _, _ in history):
        return math.inf
    accountant = RDPAccountant()
    accountant.history = list(history)
    with warnings.catch_warnings():
        # Wider orders are asked for where the best is an outermost one; ours go to 1 + 1e-8.
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
