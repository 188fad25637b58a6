"""How far the gradient of guessed inputs is from the one a client sent.

One cosine over all parameters, in two ways with one value. `whole_distance` runs the model as it is.
`layered_distance` never forms the gradient D^T X of the layer that reads the data, most of the
parameters of a fully connected network: with the client's gradient G it needs the inner product
<D^T X, G> = sum D * (X G^T) and the length |D^T X|^2 = sum (D D^T) * (X X^T). And a clean G has rank
b, so that X G^T costs next to nothing. Two to four times faster.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor, nn
from torch.func import functional_call

from spear.factors import Factors
from spear.judge import Loss
from spear.layers import network_after
from spear.update import LayerUpdate

Distance = Callable[[Tensor], Tensor]
"""1 - cosine of the gradients, for inputs (b, ...)."""


def gradients_by_name(view: LayerUpdate) -> dict[str, Tensor]:
    """The whole update, the attacked layer's part under its parameters' names."""
    prefix = f"{view.layer}." if view.layer else ""
    own = {f"{prefix}weight": view.weight_grad, f"{prefix}bias": view.bias_grad}
    return {**own, **view.others}


def gradient_distance(factors: Factors, model: nn.Module, labels: Tensor, loss: Loss) -> Distance:
    """The distance to the update, by the faster way where the model allows it."""
    behind = _behind(factors.view, model)
    if behind is None:
        return whole_distance(factors.view, model, labels, loss)
    return layered_distance(factors, behind, labels, loss)


def whole_distance(view: LayerUpdate, model: nn.Module, labels: Tensor, loss: Loss) -> Distance:
    """By double backpropagation through the whole model, whatever it is made of."""
    target = gradients_by_name(view)
    leaves, state = _leaves(model, target)
    sent = [target[name].to(leaf) for name, leaf in leaves.items()]
    length = _length(sent)

    def distance(X: Tensor) -> Tensor:
        value = loss(functional_call(model, {**state, **leaves}, (X,)), labels)
        guessed = _slopes(value, list(leaves.values()))
        return 1 - _inner(guessed, sent) / (_squares(guessed).sqrt() * length)

    return distance


def layered_distance(
    factors: Factors, behind: nn.Module, labels: Tensor, loss: Loss, *, low_rank: bool = True
) -> Distance:
    """With the layer that reads the data taken apart; `behind` is the network from its output on."""
    view = factors.view
    weight, bias = view.weight.detach(), view.bias.detach()
    leaves, state = _leaves(behind, view.others)
    sent = [view.bias_grad, *(view.others[name].to(leaf) for name, leaf in leaves.items())]
    length = _length([view.weight_grad, *sent])
    times_G = _product(factors, low_rank)

    def distance(X: Tensor) -> Tensor:
        X = X.flatten(1)  # (b, n)
        Z = X @ weight.T + bias  # (b, m)
        value = loss(functional_call(behind, {**state, **leaves}, (Z,)), labels)
        D, *rest = _slopes(value, [Z, *leaves.values()])  # D: (b, m)
        guessed = [D.sum(0), *rest]
        inner = (times_G(X) * D).sum() + _inner(guessed, sent)
        squares = ((D @ D.T) * (X @ X.T)).sum() + _squares(guessed)
        return 1 - inner / (squares.sqrt() * length)

    return distance


def _product(factors: Factors, low_rank: bool) -> Callable[[Tensor], Tensor]:
    """X -> X G^T (b, m); a clean gradient is as good as its b singular vectors."""
    G = factors.view.weight_grad
    if not low_rank or not factors.batch_size or factors.noisy:
        return lambda X: X @ G.T
    right = factors.combine(torch.diag(1 / factors.singular_values)).T.to(G)  # (n, b)
    left = factors.L.T.to(G)  # (b, m)
    return lambda X: X @ right @ left


def _behind(view: LayerUpdate, model: nn.Module) -> nn.Module | None:
    """The network behind the attacked layer, if that layer reads the data and nothing else does."""
    if view.layer is None or not view.considered or not view.reads_data:
        return None
    behind = network_after(model, view.layer)
    if isinstance(behind, str):
        return None
    names = {name for name, _ in behind.named_parameters()}
    return behind if set(view.others) <= names else None


def _leaves(
    model: nn.Module, target: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The parameters to differentiate by, and the rest of the model's state: copies, so that neither
    the caller's gradients nor running statistics change."""
    leaves = {
        name: p.detach().requires_grad_() for name, p in model.named_parameters() if name in target
    }
    fixed = {name: p.detach() for name, p in model.named_parameters() if name not in target}
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    return leaves, {**fixed, **buffers}


def _slopes(value: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    slopes = torch.autograd.grad(value, leaves, create_graph=True, materialize_grads=True)
    return list(slopes)


def _inner(one: Iterable[Tensor], other: Iterable[Tensor]) -> Tensor:
    return torch.stack([(a * b).sum() for a, b in zip(one, other, strict=True)]).sum()


def _squares(tensors: Iterable[Tensor]) -> Tensor:
    return torch.stack([t.square().sum() for t in tensors]).sum()


def _length(tensors: Iterable[Tensor]) -> Tensor:
    return _squares(tensors).sqrt()
