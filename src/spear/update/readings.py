"""What was sent, read as gradients: as what it was said to be, unless it is plainly something else.

People give weights where gradients are asked for, and differences where weights are. Read as what
it was said to be, such an update shows nothing, and "nothing recovered" is the most dangerous wrong
answer. Size tells weights from the rest: weights after training lie near those before; gradients
and differences do not. Where size leaves a doubt the spectrum decides: the right reading has low
rank.

A gradient and a difference differ by sign and a factor, which do not change the inputs. Which of
the two it was shows when the model is replayed (`spear.inversion`). Penalties such as weight decay
show in the spectrum as well (`spear.factors.penalty`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from spear.errors import NoUpdate
from spear.tolerances import EVEN_ENTRIES, FAR_FROM_WEIGHTS, LOWER_RANK, NEAR_THE_WEIGHTS
from spear.update.layer_update import LayerUpdate
from spear.update.protocol import Protocol, Sends

_ENTRIES_COMPARED = 1 << 20  # of each tensor, to compare sizes
_MIN_SIZE_FOR_RANK = 8  # rows and columns from which a low rank is no accident

_NAMES: dict[Sends, str] = {
    "gradient": "a gradient",
    "weights": "weights",
    "difference": "a difference of weights",
}
_WHY: dict[Sends, str] = {
    "weights": "it is close to the weights",
    "difference": "it is far from the weights and of low rank",
}


@dataclass(frozen=True, eq=False)
class Reading:
    """An update as gradients, and how it had to be read for that."""

    gradients: dict[str, Tensor] = field(repr=False)  # their sum over the local steps
    protocol: Protocol
    mistake: str = ""  # if it was said to be something else


def read(before: Mapping[str, Tensor], sent: Mapping[str, Tensor], told: Protocol) -> Reading:
    """The gradients behind what was sent.

    Args:
        before: the parameters that the client was sent.
        sent: what came back, of all parameters or some.
        told: what it is said to be.

    >>> W = torch.randn(20, 30)
    >>> moved = torch.randn(20, 1) @ torch.randn(1, 30)
    >>> right = read({"w": W}, {"w": W - 0.1 * moved}, Protocol(sends="weights", lr=0.1))
    >>> torch.allclose(right.gradients["w"], moved, atol=1e-5), right.mistake
    (True, '')
    >>> wrong = read({"w": W}, {"w": W - 0.1 * moved}, Protocol())
    >>> wrong.protocol.sends, wrong.mistake
    ('weights', 'this was given as a gradient, but it is close to the weights: read as weights')
    """
    before = {name: before[name].detach() for name in sent}
    sends = _recognised(before, sent, told.sends)
    mistake = ""
    if sends != told.sends:
        mistake = (
            f"this was given as {_NAMES[told.sends]}, but {_WHY[sends]}: read as {_NAMES[sends]}"
        )
        told = dataclasses.replace(told, sends=sends)
    if sends == "gradient":
        # Copies, because p.grad is zeroed in place.
        return Reading({name: new.clone() for name, new in sent.items()}, told, mistake)
    # If the number of steps is unknown, the spectrum shows what weight decay took off.
    rate, steps = told.rate, told.steps
    gradients = {}
    for name, new in sent.items():
        old = before[name]
        kept = 1.0 if steps is None else told.weight_decay_factor(steps, old)
        if sends == "weights":
            gradients[name] = (kept * old - new.to(old)) / rate
        else:
            gradients[name] = -((1 - kept) * old + new.to(old.device)) / rate
    return Reading(gradients, told, mistake)


def _recognised(before: Mapping[str, Tensor], sent: Mapping[str, Tensor], said: Sends) -> Sends:
    """What was sent, by its size and spectrum."""
    if said != "gradient" and not any(bool(new.any()) for new in sent.values()):
        raise NoUpdate(
            [
                f"the {said} sent is zero: the client did not train, or a state dict was taken from "
                "itself (state_dict() returns references: copy it before training)"
            ]
        )
    if sent and all(torch.equal(new.to(before[name]), before[name]) for name, new in sent.items()):
        raise NoUpdate(
            [
                "what was sent equals the model: the client did not train, or the state dict is the "
                "model's own (state_dict() returns references: copy it before training)"
            ]
        )
    old_old = old_new = new_new = 0.0
    for old, new in _pairs(before, sent):
        old_old += float(old @ old)
        old_new += float(old @ new)
        new_new += float(new @ new)
    if not old_old or not new_new:
        return said
    cosine, kept = old_new / (old_old * new_new) ** 0.5, old_new / old_old
    if said != "weights":
        near = cosine > NEAR_THE_WEIGHTS and 0.5 < kept < 2
        return "weights" if near else said
    far = cosine < FAR_FROM_WEIGHTS and kept < 0.5
    return "difference" if far and _has_lower_rank(before, sent) else said


def _pairs(
    before: Mapping[str, Tensor], sent: Mapping[str, Tensor]
) -> Iterator[tuple[Tensor, Tensor]]:
    for name, new in sent.items():
        if new.is_floating_point():
            old = before[name].reshape(-1)[:_ENTRIES_COMPARED].double()
            yield old, new.reshape(-1)[:_ENTRIES_COMPARED].to(old)


def _has_lower_rank(before: Mapping[str, Tensor], sent: Mapping[str, Tensor]) -> bool:
    """Has what was sent far less outside its leading half of directions than its difference has?"""
    own = moved = 0.0
    for name, new in sent.items():
        if new.ndim == 2 and min(new.shape) >= _MIN_SIZE_FOR_RANK:
            own += _tail(new)
            moved += _tail(new.to(before[name]) - before[name])
    return own < LOWER_RANK * moved


def _tail(matrix: Tensor) -> float:
    """The share of a matrix outside its leading half of singular directions."""
    wide = matrix.double() if matrix.shape[0] <= matrix.shape[1] else matrix.double().T
    values = torch.linalg.eigvalsh(wide @ wide.T).clamp_min(0)
    total = float(values.sum())
    return (float(values[: len(values) // 2].sum()) / total) ** 0.5 if total else 0.0


def looks_like_adam(view: LayerUpdate) -> bool:
    """Does the difference look like Adam's, whose steps are about equally long in every entry?

    One step of Adam moves every entry by the learning rate, up to its sign; k steps move it by at
    most k times that. So the median entry is not far from the largest. Among N entries of Gaussian
    noise the median is 0.67 deviations and the largest sqrt(2 ln N); the entries of a gradient, a
    sum of products, spread further. Entries pruned or rounded to zero are scattered over rows and
    columns, and count.
    """
    rows = max(1, _ENTRIES_COMPARED // view.inputs)
    moved = view.weight_grad.detach()[:rows].double().abs()
    moved = moved[moved.any(1)][:, moved.any(0)]
    if moved.numel() < _MIN_SIZE_FOR_RANK**2:
        return False
    spread = 0.6745 / math.sqrt(2 * math.log(moved.numel()))
    return float(moved.median()) > EVEN_ENTRIES * spread * float(moved.max())
