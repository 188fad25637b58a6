"""One DP-SGD step on a batch, computed by Opacus."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Literal, get_args

import torch
from opacus import GradSampleModule
from opacus.optimizers import DPOptimizer, DPPerLayerOptimizer
from torch import Tensor, nn

from spear.errors import InvalidOption
from spear.integrations.opacus.hooks import copied_gradient, copied_weights, without_hooks
from spear.integrations.opacus.privacy import DPUpdate, sensitivity

Clipping = Literal["flat", "per_layer"]

# Opacus always clips: a bound that no gradient of float32 reaches, and whose quotients it still holds.
_UNREACHED = 1e30


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
        model: what the client was sent; it stays as it is.
        inputs: the batch, samples first.
        targets: its labels.
        max_grad_norm: C. None: no clipping, noise then comes as `sigma`. With per-layer clipping one
            for each trainable parameter, or one number that is split evenly among them.
        sigma: the noise on the gradient's entries; or else
        noise_multiplier: the same in Opacus' unit, sigma B / C. Without either there is no noise.
        loss: a mean over the batch.
        clipping: "flat" (one factor for a sample, the usual DP-SGD) or "per_layer".
        generator: of the noise; seeded with 0 unless given.

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
            module.training = True  # Opacus skips layers in evaluation; dropout stays as it is
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
        warnings.filterwarnings(
            "ignore", "Full backward hook is firing"
        )  # the data has no gradient
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
    """C, or one for each parameter, or None for no clipping; checked."""
    if clipping not in get_args(Clipping):
        raise InvalidOption(f"expected clipping 'flat' or 'per_layer', got {clipping!r}")
    if norm is None or norm == math.inf:
        if clipping == "per_layer":
            raise InvalidOption(
                "per-layer clipping needs max_grad_norm; for no clipping use 'flat'"
            )
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
    """Standard deviation of the noise on an entry, from whichever unit it was given in."""
    if batch < 1:
        raise InvalidOption("expected at least one sample, got an empty batch")
    if sigma is not None and multiplier is not None:
        raise InvalidOption("expected sigma or noise_multiplier, which say the same, got both")
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
