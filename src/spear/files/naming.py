"""Match tensors to the model's own names, whatever wrappers or scripts added to them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from spear.errors import InvalidFile
from spear.factors import batch_size_from
from spear.files.tensors import positional
from spear.update import matched_names

_MIN_SIZE_FOR_RANK = 8  # a low rank of a smaller matrix may be an accident
_MIN_DROP = 1e-3  # from the last sample's singular value to the next


def matched(
    tensors: Mapping[str, Tensor],
    own: Mapping[str, Tensor],
    path: Path | None,
    whose: str = "among the weights",
) -> dict[str, Tensor]:
    """The tensors under the model's own names, without the prefixes and suffixes of wrappers.

    Args:
        tensors: of the file.
        own: of the model.
        path: the file.
        whose: where the own names are, for the message.
    """
    names = matched_names(tensors, own)
    unknown = [name for name in tensors if name not in names]
    if unknown:
        raise InvalidFile(
            f"{path}: there is no {unknown[0]!r} {whose}; expected names such as "
            f"{', '.join(repr(name) for name in list(own)[:4])}"
        )
    return {own_name: tensors[name] for name, own_name in names.items()}


def in_order(
    sent: Mapping[str, Tensor], names: list[str], others: list[str], path: Path
) -> Mapping[str, Tensor]:
    """A list of tensors, named in order; tensors with names are left as they are."""
    if not positional(sent):
        return sent
    for expected in (names, others):
        if len(sent) == len(expected):
            return dict(zip(expected, sent.values(), strict=True))
    raise InvalidFile(
        f"{path}: expected {len(names)} tensors, one for each of {', '.join(names[:6])}"
        f"{', ...' if len(names) > 6 else ''}; got {len(sent)}"
    )


def like(tensors: Mapping[str, Tensor], own: Mapping[str, Tensor], path: Path) -> dict[str, Tensor]:
    """The tensors, once they are known to have the model's shapes and finite entries."""
    wrong = [name for name, tensor in tensors.items() if tensor.shape != own[name].shape]
    if wrong:
        more = f" (and {len(wrong) - 1} more differ)" if len(wrong) > 1 else ""
        raise InvalidFile(
            f"{path} is of another model: {wrong[0]!r} has shape {tuple(tensors[wrong[0]].shape)}, "
            f"expected {tuple(own[wrong[0]].shape)}{more}"
        )
    broken = [name for name, tensor in tensors.items() if not bool(tensor.isfinite().all())]
    if broken:
        more = f" (so have {len(broken) - 1} more)" if len(broken) > 1 else ""
        raise InvalidFile(
            f"{path}: {broken[0]!r} has NaN or infinite entries{more}: the client's training diverged, "
            "half precision overflowed, or the file is damaged"
        )
    return dict(tensors)


def not_gradients(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Raise if the weights look like gradients, that is, have low rank."""
    for name, tensor in tensors.items():
        if (
            tensor.ndim != 2
            or min(tensor.shape) < _MIN_SIZE_FOR_RANK
            or not tensor.is_floating_point()
        ):
            continue
        m, n = tensor.shape
        s = torch.linalg.svdvals(tensor.double())
        rank = batch_size_from(s, m, n, torch.finfo(tensor.dtype).eps)
        if rank and 2 * rank < len(s) and float(s[rank]) < _MIN_DROP * float(s[rank - 1]):
            raise InvalidFile(
                f"{path}: expected weights, but {name!r} is a matrix of rank {rank}, as gradients of "
                f"{rank} samples are: were weights and update swapped?"
            )


def named(
    weights: dict[str, Tensor], sent: dict[str, Tensor]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Names for a list of weights and biases, and the same names for an update that is also a list."""
    if positional(weights):
        shapes = [tuple(tensor.shape) for tensor in weights.values()]
        names = []
        for i, shape in enumerate(shapes):
            bias = len(shape) == 1 and i > 0 and len(shapes[i - 1]) > 1
            names.append(f"{i - 1}.bias" if bias else f"{i}.weight")
        if positional(sent) and len(sent) == len(weights):
            sent = dict(zip(names, sent.values(), strict=True))
        weights = dict(zip(names, weights.values(), strict=True))
    elif set(weights) <= {"weight", "bias"}:  # one layer, as layer.state_dict() has it
        weights = {f"layer.{name}": tensor for name, tensor in weights.items()}
        sent = {
            f"layer.{name}" if name in ("weight", "bias") else name: t for name, t in sent.items()
        }
    return weights, sent
