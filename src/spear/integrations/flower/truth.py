"""What a client really held, where an audit is allowed to know it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from spear.audit.truth import compare
from spear.errors import InvalidOption
from spear.report import Look, Truth


@dataclass(frozen=True, eq=False)
class Private:
    """A client's samples: inputs (b, ...), labels (b,) and names (b,) if they are known."""

    inputs: Tensor
    labels: Tensor | None = None
    names: tuple[str, ...] | None = None

    @staticmethod
    def of(given: Any) -> Private | None:
        """From what a `truth=` function returned: inputs, or (inputs, labels), or with names."""
        if given is None or isinstance(given, Private):
            return given
        parts = given if isinstance(given, tuple) else (given,)
        if not 1 <= len(parts) <= 3 or not isinstance(parts[0], Tensor) or parts[0].ndim < 2:
            raise InvalidOption(
                "expected truth= to return inputs (b, ...), (inputs, labels) or (inputs, labels, "
                f"names), got {type(given).__name__}"
            )
        inputs, labels, names = (*parts, None, None)[:3]
        return Private(inputs, labels, None if names is None else tuple(map(str, names)))

    @staticmethod
    def together(clients: Sequence[Private]) -> Private | None:
        """Of several clients, as one batch."""
        if not clients:
            return None
        labels = [c.labels for c in clients if c.labels is not None]
        names = [c.names for c in clients if c.names is not None]
        return Private(
            torch.cat([client.inputs for client in clients]),
            torch.cat(labels) if len(labels) == len(clients) else None,
            tuple(name for own in names for name in own) if len(names) == len(clients) else None,
        )


def compared(
    recovered: Tensor, private: Private | None, look: Look | None
) -> tuple[Truth | None, list[str]]:
    """The truth beside what was recovered, and remarks if they cannot be compared."""
    if private is None:
        return None, []
    true, found = private.inputs.detach().cpu().flatten(1), recovered.detach().cpu()
    if true.shape[1] != found.shape[1]:
        return None, [
            f"samples have {true.shape[1]} values and the layer {found.shape[1]} inputs: what came "
            "back are features of them, and is not compared with the truth"
        ]
    return compare(found, true, private.labels, names=private.names, look=look), []
