"""DP-SGD as Opacus does it: one step on a batch, and what the server sees of it.

Opacus clips each sample's gradient to norm C, sums, adds noise of standard deviation z C (z the noise
multiplier) and divides by the expected batch size B. So the noise on `p.grad` is sigma = z C / B.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from spear.errors import InvalidOption, MissingExtra
from spear.federated.privacy import epsilon
from spear.update import LayerUpdate, Protocol, observe

try:
    from opacus import GradSampleModule
    from opacus.optimizers import DPOptimizer, DPPerLayerOptimizer
except ImportError as error:
    raise MissingExtra("Opacus", "opacus") from error

Clipping = Literal["flat", "per_layer"]

# Opacus always clips, so this bound is one that no float32 gradient reaches, while quotients with it
# still fit float32.
_UNREACHED = 1e30
# Attributes, besides hooks, that Opacus leaves on modules.
_LEFT_BEHIND = (
    *("autograd_grad_sample_hooks", "activations", "max_batch_len", "ft_compute_sample_grad"),
)
_CLIPPED_APART = (
    "each parameter was clipped on its own (Opacus' per-layer clipping), so a sample's weight and bias "
    "gradients carry different factors, and the bias gradient does not give its scale"
)


@dataclass(frozen=True, eq=False)
class DPUpdate:
    """The private gradients of one DP-SGD step, as a server sees them, and the noise in them."""

    gradients: Mapping[str, Tensor] = field(repr=False)
    """By the model's own parameter names: clipped, summed, noised and divided."""
    sigma: float
    """Standard deviation of the noise on every entry."""
    noise_multiplier: float | None
    """sigma B / C, Opacus' unit of noise; None without clipping, where noise gives no privacy bound."""
    max_grad_norm: float | tuple[float, ...] | None
    """C; one per parameter if they were clipped separately, None without clipping."""
    expected_batch_size: int | None
    """B; None if the loss is a sum and nothing is divided."""
    weights: Mapping[str, Tensor] = field(repr=False)
    """The state dict before the step."""
    architecture: nn.Module = field(repr=False)
    """The model without Opacus' hooks; its weights may be from another step."""

    @property
    def clipped_apart(self) -> bool:
        """Was each parameter clipped on its own?"""
        return isinstance(self.max_grad_norm, tuple)

    @property
    def protocol(self) -> Protocol:
        """What was done to the gradients."""
        bounded = self.max_grad_norm is not None
        return Protocol(
            clip=sensitivity(self.max_grad_norm) if bounded else None,
            clipping=("per-layer" if self.clipped_apart else "per-sample") if bounded else None,
            sigma=self.sigma or None,
        )

    @property
    def remark(self) -> str:
        """What prevents an exact recovery, in words; empty if nothing does."""
        noisy = f"noise of standard deviation {self.sigma:.1e} was added to every entry"
        return "; ".join([noisy] * (self.sigma > 0) + [_CLIPPED_APART] * self.clipped_apart)

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
        """The noise in all units, in one line."""
        if self.noise_multiplier is None:
            return f"sigma = {self.sigma:.3g}, not clipped: no differential privacy"
        return (
            f"sigma = {self.sigma:.3g}, C = {sensitivity(self.max_grad_norm):.3g}: noise multiplier "
            f"{self.noise_multiplier:.3g}, epsilon = {self.epsilon(delta):.4g} for one step at "
            f"delta = {delta:g}"
        )


def dpsgd(
    model: nn.Module,
    inputs: Tensor,
    targets: Tensor,
    *,
    max_grad_norm: float | Sequence[float] | None,
    sigma: float | None = None,
    noise_multiplier: float | None = None,
    loss: Callable[[Tensor, Tensor], Tensor] = nn.functional.cross_entropy,
    clipping: Clipping = "flat",
    generator: torch.Generator | None = None,
) -> DPUpdate:
    """One DP-SGD step on a batch, computed by Opacus on a copy of the model.

    Args:
        model: what the client was sent; it is not changed.
        inputs: the batch, samples first.
        targets: its labels.
        max_grad_norm: C, or None for no clipping (noise is then given as `sigma`). With per-layer
            clipping, one per trainable parameter, or one number that is split evenly among them.
        sigma: the noise on the gradient's entries; or
        noise_multiplier: the same in Opacus' unit, sigma B / C. Without either there is no noise.
        loss: a mean over the batch.
        clipping: "flat" (one factor per sample, the usual DP-SGD) or "per_layer".
        generator: for the noise; one seeded with 0 unless given.

    >>> import spear
    >>> from spear.federated import mlp
    >>> net, x, y = mlp(30, 5, width=60, depth=3), torch.randn(4, 30), torch.tensor([0, 4, 2, 2])
    >>> update = dpsgd(net, x, y, max_grad_norm=1.0)
    >>> spear.invert(update.view(), model=net).outcome.name
    'EXACT'
    >>> print(dpsgd(net, x, y, max_grad_norm=1.0, sigma=1e-4).summary())
    sigma = 0.0001, C = 1: noise multiplier 0.0004, epsilon = 3.137e+06 for one step at delta = 1e-05
    """
    plain = without_hooks(model)
    working = copy.deepcopy(plain)
    for module in working.modules():
        if next(module.parameters(recurse=False), None) is not None:
            module.training = True  # Opacus skips layers in eval mode; dropout stays as it is
    named = {name: p for name, p in working.named_parameters() if p.requires_grad}
    bound = _bound(max_grad_norm, clipping, len(named))
    std = _noise(sigma, noise_multiplier, bound, len(inputs))
    total = sensitivity(bound) if bound is not None else _UNREACHED
    sampled = GradSampleModule(working)
    optimizer = (DPPerLayerOptimizer if isinstance(bound, tuple) else DPOptimizer)(
        torch.optim.SGD(list(named.values()), lr=0.0),
        noise_multiplier=std * len(inputs) / total,
        max_grad_norm=list(bound) if isinstance(bound, tuple) else total,
        expected_batch_size=len(inputs),
        generator=generator or torch.Generator(inputs.device).manual_seed(0),
    )
    with torch.enable_grad(), warnings.catch_warnings():
        # Opacus warns because the inputs have no gradient.
        warnings.filterwarnings("ignore", "Full backward hook is firing")
        loss(sampled(inputs), targets).backward()  # type: ignore[no-untyped-call]
    optimizer.pre_step()
    return DPUpdate(
        gradients={name: copied_gradient(p) for name, p in named.items()},
        sigma=std,
        noise_multiplier=None if bound is None else std * len(inputs) / total,
        max_grad_norm=bound,
        expected_batch_size=len(inputs),
        weights=copied_weights(plain),
        architecture=plain,
    )


def _bound(
    norm: float | Sequence[float] | None, clipping: str, parameters: int
) -> float | tuple[float, ...] | None:
    """The checked bound: C, one per parameter, or None for no clipping."""
    if clipping not in get_args(Clipping):
        raise InvalidOption(f"expected clipping 'flat' or 'per_layer', got {clipping!r}")
    if norm is None or norm == math.inf:
        if clipping == "per_layer":
            raise InvalidOption("per-layer clipping needs max_grad_norm; without it use 'flat'")
        return None
    single = isinstance(norm, (int, float))
    norms = (float(norm),) if isinstance(norm, (int, float)) else tuple(norm)
    if not all(0 < value < math.inf for value in norms):
        raise InvalidOption(f"expected max_grad_norm > 0, or None for no clipping, got {norm!r}")
    if clipping == "flat" and not single:
        raise InvalidOption(f"expected one max_grad_norm for flat clipping, got {norm!r}")
    if clipping == "flat":
        return norms[0]
    if single:
        return (norms[0] / parameters**0.5,) * parameters
    if len(norms) != parameters:
        raise InvalidOption(
            f"expected one max_grad_norm for each of {parameters} parameters, got {len(norms)}"
        )
    return norms


def _noise(
    sigma: float | None,
    multiplier: float | None,
    bound: float | tuple[float, ...] | None,
    batch: int,
) -> float:
    """Standard deviation of the noise on an entry, from whichever unit was given."""
    if batch < 1:
        raise InvalidOption("expected at least one sample, got an empty batch")
    if sigma is not None and multiplier is not None:
        raise InvalidOption("expected sigma or noise_multiplier, which mean the same, got both")
    for name, value in (("sigma", sigma), ("noise_multiplier", multiplier)):
        if value is not None and not 0 <= value < math.inf:
            raise InvalidOption(f"expected {name} >= 0, got {value!r}")
    if multiplier is None:
        return sigma or 0.0
    if bound is None:
        raise InvalidOption(
            "without clipping there is no noise multiplier: give the noise as sigma"
        )
    return multiplier * sensitivity(bound) / batch


def sensitivity(max_grad_norm: float | tuple[float, ...] | None) -> float:
    """The largest norm that one sample's clipped gradient can have."""
    if max_grad_norm is None:
        return math.inf
    return math.hypot(*max_grad_norm) if isinstance(max_grad_norm, tuple) else max_grad_norm


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside a `GradSampleModule`, with its original parameter names."""
    inner = getattr(model, "_module", None)
    return unwrapped(inner) if isinstance(inner, nn.Module) else model


def without_hooks(model: nn.Module) -> nn.Module:
    """A copy of the model as it was before Opacus prepared it, if it did."""
    plain = copy.deepcopy(unwrapped(model))
    for module in plain.modules():
        for hooks in (module._forward_hooks, module._backward_hooks):
            for key in [key for key, hook in hooks.items() if _is_opacus(hook)]:
                del hooks[key]
        if not module._backward_hooks:
            module._is_full_backward_hook = None
        for name in _LEFT_BEHIND:
            module.__dict__.pop(name, None)
    return plain


def _is_opacus(hook: object) -> bool:
    function = getattr(hook, "func", hook)  # hooks come as partials too
    return str(getattr(function, "__module__", "")).split(".")[0] == "opacus"


def copied_weights(model: nn.Module) -> dict[str, Tensor]:
    """A copy of the state dict."""
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def copied_gradient(parameter: nn.Parameter) -> Tensor:
    """A copy of the gradient."""
    assert parameter.grad is not None
    return parameter.grad.detach().clone()
