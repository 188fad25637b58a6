"""Replay for losses on numbers: mean squared error and its like, whose targets are no class indices.

The gradient at a sample's outputs can then be anything, but dL/dz is still J^T of it, J the Jacobian of
the network behind the layer at the recovered z. With far fewer outputs than neurons that is as good as
a label; and the gradients at the outputs so found must reproduce the gradients of all later layers.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from spear.judge.replay import Loss, Replay, Replayed

_BINARY = nn.functional.binary_cross_entropy_with_logits
_ON_NUMBERS = (nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss, nn.BCEWithLogitsLoss)
_ON_NUMBERS_CALLED = (
    _BINARY,
    nn.functional.mse_loss,
    nn.functional.l1_loss,
    nn.functional.smooth_l1_loss,
    nn.functional.huber_loss,
)


def compares_numbers(loss: Loss | None) -> bool:
    """Is it a loss whose targets are numbers like the outputs?"""
    return isinstance(loss, _ON_NUMBERS) or loss in _ON_NUMBERS_CALLED


def replay_numbers(replay: Replay) -> Replayed | str:
    """Which samples' gradients the network can produce, and whether later layers agree."""
    rows = [_at_outputs(replay, i) for i in range(len(replay.Z))]
    if any(slope is None for slope, _ in rows):
        return "the network has too many outputs for their gradients to be solved for"
    off = torch.stack([distance for _, distance in rows])
    matched = off <= replay.limit
    slopes = torch.stack([slope for slope, _ in rows if slope is not None])  # (b, outputs)
    total = (replay.network(replay.Z).reshape(len(replay.Z), -1) * slopes).sum()
    objections = replay.disagreements(total, replay.limit) if bool(matched.all()) else ()
    none = torch.zeros_like(matched)
    labels = None
    if slopes.shape[1] == 1 and (
        replay.loss is _BINARY or isinstance(replay.loss, nn.BCEWithLogitsLoss)
    ):
        labels = (slopes[:, 0] < 0).long()  # sigma(o) - y: below zero for the positive class alone
    return Replayed(
        labels, matched, objections, replay.compared, merged=none, vanished=0, free_targets=True
    )


def _at_outputs(replay: Replay, i: int) -> tuple[Tensor | None, Tensor]:
    """The gradient at the outputs of sample i, and how far J^T of it is from dL/dz, relatively."""
    d = replay.D[i]
    J = replay.jacobian(replay.Z[i])  # (outputs, m)
    if 4 * len(J) > len(d):
        return None, d.new_tensor(torch.inf)
    slope = torch.linalg.lstsq(J.T, d[:, None]).solution[:, 0]
    return slope, (J.T @ slope - d).norm() / d.norm()
