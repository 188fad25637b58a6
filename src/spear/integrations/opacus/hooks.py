"""Models as they are without Opacus' hooks, and copies of what they hold."""

from __future__ import annotations

import copy

from torch import Tensor, nn

# What Opacus leaves on modules besides hooks.
_LEFT_BEHIND = (
    "autograd_grad_sample_hooks",
    "activations",
    "max_batch_len",
    "ft_compute_sample_grad",
)


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside a `GradSampleModule`, whose parameters have their own names."""
    inner = getattr(model, "_module", None)
    return unwrapped(inner) if isinstance(inner, nn.Module) else model


def without_hooks(model: nn.Module) -> nn.Module:
    """A copy of a model that Opacus may have prepared, as it was before."""
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
    """The state dict, as it is now."""
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def copied_gradient(parameter: nn.Parameter) -> Tensor:
    """The gradient, as it is now."""
    assert parameter.grad is not None
    return parameter.grad.detach().clone()
