"""DP-SGD as Opacus does it: one step on a batch, and the steps of a real training run.

Opacus clips each sample's gradient to norm C, sums, adds noise of standard deviation z C (z the noise
multiplier) and divides by the expected batch size B. So the noise on `p.grad` is sigma = z C / B.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import TracebackType
from typing import Any

from torch import Tensor, nn

from spear.errors import InvalidOption, MissingExtra
from spear.federated import epsilon
from spear.federated.dpsgd import (
    DPUpdate,
    copied_gradient,
    copied_weights,
    dpsgd,
    unwrapped,
    without_hooks,
)

try:
    from opacus.accountants.accountant import IAccountant
    from opacus.optimizers import AdaClipDPOptimizer, DistributedDPOptimizer, DPOptimizer
except ImportError as error:
    raise MissingExtra("Opacus", "opacus") from error

__all__ = ["Capture", "CapturedStep", "DPUpdate", "capture", "dpsgd", "epsilon"]

# (noise multiplier, sample rate, steps), as in Opacus.
History = tuple[tuple[float, float, int], ...]


@dataclass(frozen=True, eq=False)
class CapturedStep(DPUpdate):
    """One step of a real training run."""

    samples: int | None
    """Samples in the batch, random under Poisson sampling. None where Opacus does not say: virtual
    batches (`BatchMemoryManager`) and ghost clipping."""
    history: History | None
    """What the accountant had counted, this step included; None if `capture` was not given one."""

    def spent(self, delta: float = 1e-5) -> float | None:
        """The epsilon of the run so far; None if `capture` was not given the accountant."""
        return None if self.history is None else epsilon(self.history, delta)


class Capture:
    """Listens to an optimiser until closed; `steps` holds what it saw."""

    def __init__(
        self, optimizer: DPOptimizer, model: nn.Module, accountant: IAccountant | None
    ) -> None:
        self.steps: list[CapturedStep] = []
        self._optimizer, self._model, self._accountant = optimizer, unwrapped(model), accountant
        self._architecture = without_hooks(model)
        self._before = optimizer.step_hook
        self._hook = self._take  # one object, so that close() can recognise it
        optimizer.attach_step_hook(self._hook)

    def _take(self, optimizer: DPOptimizer) -> None:
        """At this point `p.grad` is already private, and the weights are those before the step."""
        if self._before is not None:
            self._before(optimizer)
        bound = getattr(optimizer, "max_grad_norms", None)
        history = None if self._accountant is None else tuple(self._accountant.history)
        self.steps.append(
            CapturedStep(
                gradients={
                    name: copied_gradient(p)
                    for name, p in self._model.named_parameters()
                    if p.grad is not None
                },
                sigma=_sigma(optimizer),
                noise_multiplier=float(optimizer.noise_multiplier),
                max_grad_norm=float(optimizer.max_grad_norm) if bound is None else tuple(bound),
                expected_batch_size=_divisor(optimizer),
                weights=copied_weights(self._model),
                architecture=self._architecture,
                samples=_samples(optimizer),
                history=history,
            )
        )

    def close(self) -> None:
        """Stop listening and restore the hook that was there before."""
        if self._optimizer.step_hook is self._hook:
            self._optimizer.attach_step_hook(self._before)

    def __enter__(self) -> Capture:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def capture(
    optimizer: DPOptimizer, model: nn.Module, *, accountant: IAccountant | None = None
) -> Capture:
    """Keep every private gradient that an Opacus optimiser applies, and the weights before it.

    Args:
        optimizer: from `PrivacyEngine.make_private`. Its hook, which counts epsilon, still runs.
        model: the one it trains, as given to `make_private` or as it came back.
        accountant: `engine.accountant`, so that each step knows the epsilon spent so far.

    Steps that Opacus skips, inside a virtual batch of `BatchMemoryManager`, send nothing and are not
    captured: the batch comes as one step.

    >>> import torch
    >>> from opacus import GradSampleModule
    >>> net = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 2))
    >>> sgd = torch.optim.SGD(net.parameters(), lr=0.1)
    >>> private = DPOptimizer(
    ...     sgd, noise_multiplier=0.1, max_grad_norm=1.0, expected_batch_size=5
    ... )
    >>> wrapped = GradSampleModule(net)
    >>> with capture(private, wrapped) as seen:
    ...     wrapped(torch.randn(5, 8, requires_grad=True)).square().mean().backward()
    ...     private.step()
    >>> [step] = seen.steps
    >>> step.samples, step.sigma, list(step.gradients)
    (5, 0.02, ['0.weight', '0.bias', '2.weight', '2.bias'])
    """
    if not isinstance(optimizer, DPOptimizer):
        kind = type(optimizer).__name__
        raise InvalidOption(f"expected the optimiser that make_private gave back, got a {kind}")
    if isinstance(optimizer, DistributedDPOptimizer):
        raise InvalidOption(
            "expected an optimiser of one process: in a distributed run the hook sees gradients "
            "before they are added up"
        )
    trained = {id(p) for p in optimizer.params}
    known = {id(p) for p in unwrapped(model).parameters()}
    if not trained <= known:
        raise InvalidOption(
            "the optimiser trains parameters that the model does not have: pass the model that was "
            "given to make_private"
        )
    return Capture(optimizer, model, accountant)


def _divisor(optimizer: DPOptimizer) -> int | None:
    """What Opacus divides the sum by: the expected batch size, once for each accumulated batch."""
    if optimizer.loss_reduction != "mean":
        return None
    return int(optimizer.expected_batch_size * optimizer.accumulated_iterations)


def _sigma(optimizer: DPOptimizer) -> float:
    """Standard deviation of the noise on an entry of `p.grad`."""
    multiplier = float(optimizer.noise_multiplier)
    if isinstance(optimizer, AdaClipDPOptimizer) and multiplier > 0:
        # Part of the budget goes into counting unclipped samples, so the gradients get more noise.
        multiplier = (multiplier**-2 - (2 * optimizer.unclipped_num_std) ** -2) ** -0.5
    return multiplier * float(optimizer.max_grad_norm) / (_divisor(optimizer) or 1)


def _samples(optimizer: DPOptimizer) -> int | None:
    """Samples of the step; unknown if earlier parts of a virtual batch are gone."""
    if optimizer._is_last_step_skipped:
        return None
    given: Any = getattr(optimizer.params[0], "grad_sample", None)
    parts: list[Tensor] = given if isinstance(given, list) else [given] if given is not None else []
    return sum(len(part) for part in parts) if parts else None
