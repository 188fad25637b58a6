"""What weights alone say about their model: its linear layers, and for a plain MLP all of it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn

from spear.errors import Declined


@dataclass(frozen=True)
class Linear:
    """One linear layer of a state dict."""

    name: str
    inputs: int
    outputs: int
    bias: bool


class PlainMlp(nn.Module):
    """Linear layers under the names of their state dict, with ReLUs between them.

    >>> state = {"fc1.weight": torch.ones(3, 4), "fc1.bias": torch.zeros(3),
    ...          "fc2.weight": torch.ones(2, 3), "fc2.bias": torch.zeros(2)}
    >>> net = PlainMlp(linear_layers(state), state)
    >>> net(torch.ones(1, 4))
    tensor([[12., 12.]], grad_fn=<AddmmBackward0>)
    """

    def __init__(self, layers: Sequence[Linear], state: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.order = [layer.name for layer in layers]
        for layer in layers:
            dtype = state[f"{layer.name}.weight"].dtype
            module = nn.Linear(layer.inputs, layer.outputs, bias=layer.bias, dtype=dtype)
            *path, last = layer.name.split(".")
            parent: nn.Module = self
            for part in path:
                if part not in dict(parent.named_children()):
                    parent.add_module(part, nn.Module())
                parent = parent.get_submodule(part)
            parent.add_module(last, module)
        self.load_state_dict(dict(state))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.flatten(x, 1)
        for name in self.order[:-1]:
            x = torch.relu(self.get_submodule(name)(x))
        last: Tensor = self.get_submodule(self.order[-1])(x)
        return last


def linear_layers(state: Mapping[str, Tensor]) -> list[Linear]:
    """The linear layers of a state dict, in the order in which they are most likely used.

    By name, with numbers counted (safetensors sorts fc10 before fc2), if the sizes fit in that order;
    else in the file's order; else in the only order that fits.
    """
    found = [
        Linear(
            name.removesuffix(".weight"),
            weight.shape[1],
            weight.shape[0],
            f"{name.removesuffix('.weight')}.bias" in state,
        )
        for name, weight in state.items()
        if name.endswith(".weight") and weight.ndim == 2 and weight.numel()
    ]
    natural = sorted(found, key=lambda layer: natural_order(layer.name))
    for order in (natural, found):
        if _chained(order):
            return order
    return _chain(found) or natural


def plain_mlp(state: Mapping[str, Tensor]) -> PlainMlp | Declined:
    """The MLP with ReLUs that a state dict belongs to, if it can be one; else why it cannot."""
    layers = linear_layers(state)
    names = {f"{layer.name}.{part}" for layer in layers for part in ("weight", "bias")}
    others = [name for name in state if name not in names]
    if others:
        return Declined(f"{others[0]!r} belongs to no linear layer")
    if len(layers) < 2:
        return Declined("fewer than two linear layers")
    if not _chained(layers):
        sizes = ", ".join(f"{layer.name}: {layer.inputs} -> {layer.outputs}" for layer in layers)
        return Declined(f"the layers' sizes do not fit together ({sizes})")
    wrong = [
        layer.name
        for layer in layers
        if layer.bias and state[f"{layer.name}.bias"].shape != (layer.outputs,)
    ]
    if wrong:
        return Declined(f"the bias of {wrong[0]!r} does not fit its weight")
    try:
        return PlainMlp(layers, state)
    except (KeyError, TypeError, RuntimeError, AttributeError) as error:
        return Declined(f"no module can have such names ({str(error)[:80]})")


def describe_plain_mlp(state: Mapping[str, Tensor]) -> str:
    """The guess, in words."""
    layers = linear_layers(state)
    sizes = " -> ".join(str(n) for n in (layers[0].inputs, *(layer.outputs for layer in layers)))
    return (
        f"No model was given: the weights were taken for a plain MLP, {sizes}, with ReLUs between its "
        "layers."
    )


def _chained(layers: Sequence[Linear]) -> bool:
    return all(one.outputs == other.inputs for one, other in pairwise(layers))


def _chain(layers: Sequence[Linear]) -> list[Linear] | None:
    """The only order in which the sizes fit; None if there is none, or several."""
    if len(layers) > 8:
        return None
    chains = [[layer] for layer in layers]
    for _ in range(len(layers) - 1):
        chains = [
            [*chain, layer]
            for chain in chains
            for layer in layers
            if layer not in chain and chain[-1].outputs == layer.inputs
        ]
    return chains[0] if len(chains) == 1 else None


def natural_order(name: str) -> list[tuple[bool, int, str]]:
    """A key to sort names by, with numbers in them as numbers.

    >>> sorted(["round10", "round2", "round1"], key=natural_order)
    ['round1', 'round2', 'round10']
    """
    parts = re.split(r"([0-9]{1,18})", name)  # ² counts as a digit too; longer runs are no numbers
    numbers = [int(p) if p.isascii() and p.isdigit() else None for p in parts]
    return [(n is None, n or 0, p) for n, p in zip(numbers, parts, strict=True) if p]
