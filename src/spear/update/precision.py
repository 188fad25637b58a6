"""Where an update is worked on in float64: on its own device, or on the CPU if that has none.

`LayerUpdate` and `observe` bring their tensors there, so that nothing behind them has to ask; what is
recovered goes back to where the update came from.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor


@cache
def working_device(device: torch.device) -> torch.device:
    """The device itself, or the CPU if it has no float64.

    Found out by trying: Apple's MPS raises a TypeError, Intel's smaller GPUs a RuntimeError.

    >>> working_device(torch.device("cpu"))
    device(type='cpu')
    """
    try:
        torch.zeros(1, dtype=torch.float64, device=device).add_(1)
    except (TypeError, RuntimeError):
        return torch.device("cpu")
    return device


def at_work(tensor: Tensor) -> Tensor:
    """The tensor where float64 is to be had; itself if that is where it is."""
    device = working_device(tensor.device)
    return tensor if device == tensor.device else tensor.detach().to(device)


def sent_back(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on a device; in float32 if that has no float64."""
    double = tensor.dtype == torch.float64
    lacking = double and working_device(device) != device
    return (tensor.float() if lacking else tensor).to(device)


def double(tensor: Tensor) -> Tensor:
    """The tensor in float64, detached, where that is to be had."""
    return at_work(tensor).detach().to(torch.float64)
