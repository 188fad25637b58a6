"""Private copies of models, one for each state of a model, so that training may go on in place."""

from __future__ import annotations

import copy
import threading
import types
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from spear.update.forms import unwrapped

_PLAIN = (bool, int, float, str, type(None))


@dataclass(frozen=True, eq=False)
class Snapshot:
    """A model as it was, or the model itself where it cannot be copied."""

    model: nn.Module
    uncopied: str = ""  # why it is the model itself; empty for a copy


def snapshot(model: nn.Module) -> Snapshot:
    """A private copy of a model: parameters, buffers, train or eval mode, without gradients.

    As long as the model does not change, everybody gets the same copy. Whether it changed is found
    by comparing all its numbers with the copy's, which costs less than the check for NaN that every
    gradient goes through. (Version counters would be cheaper, but `p.data -= lr * g` does not move
    them.)

    Some models cannot be copied, such as those that hold locks or open files. They are returned as they
    are, with the reason; nobody may train them before the view has been inverted.

    >>> net = nn.Linear(3, 2)
    >>> first = snapshot(net).model
    >>> snapshot(net).model is first, first is net
    (True, False)
    >>> _ = net.weight.data.zero_()
    >>> snapshot(net).model is first, bool(first.weight.any())
    (False, True)
    """
    with _lock:
        kept = _copies.get(id(model))
        taken = kept.copy() if kept is not None and kept.owner() is model else None
        if kept is not None and taken is not None and _unchanged(model, taken, kept.settings):
            return Snapshot(taken)
        try:
            taken = _copied(model)
        except Exception as error:  # whatever the user's __deepcopy__ or attributes raise
            lines = str(error).strip().splitlines() or [""]
            return Snapshot(model, f"{type(error).__name__}: {lines[0][:120]}")
        _copies[id(model)] = _Kept(
            weakref.ref(model, _forget(id(model))),
            weakref.ref(taken) if _may_refer_back(model) else (lambda held=taken: held),
            _settings(model),
        )
        return Snapshot(taken)


def is_snapshot(taken: nn.Module | None, model: nn.Module) -> bool:
    """Is this the copy that `snapshot` would give of the model as it is now?

    >>> net = nn.Linear(3, 2)
    >>> taken = snapshot(net).model
    >>> is_snapshot(taken, net), is_snapshot(net, net)
    (True, False)
    >>> _ = net.weight.data.zero_()
    >>> is_snapshot(taken, net)
    False
    """
    with _lock:
        kept = _copies.get(id(model))
        if kept is None or taken is None or kept.owner() is not model or kept.copy() is not taken:
            return False
        return _unchanged(model, taken, kept.settings)


@dataclass(frozen=True, eq=False)
class _Kept:
    """The last copy of one model; it goes when the model goes."""

    owner: Any  # a weak reference to the model
    copy: Any  # gives the copy, or None if only views held it and all are gone
    settings: list[tuple[object, ...]]


_copies: dict[int, _Kept] = {}  # by the id of the model: models need not be hashable
_lock = threading.RLock()


def _forget(key: int) -> Any:
    def forget(owner: object) -> None:  # no lock: the garbage collector may call it at any point
        kept = _copies.get(key)
        if kept is not None and kept.owner is owner:
            _copies.pop(key, None)

    return forget


def _copied(model: nn.Module) -> nn.Module:
    # Hooks stay as they are, unless they are methods of the model: a bound method takes its owner
    # along, which may be a whole trainer with its data.
    own = {id(module) for module in model.modules()}
    memo: dict[int, Any] = {}
    for module in model.modules():
        for hooks in _hooks(module):
            foreign = [h for h in hooks.values() if id(getattr(h, "__self__", h)) not in own]
            memo.update({id(hook): hook for hook in foreign})
        # Results of a forward pass (weight norm and pruning keep some) are no leaves, which a plain
        # deepcopy refuses.
        for value in vars(module).values():
            if isinstance(value, Tensor) and not value.is_leaf:
                memo[id(value)] = value.detach().clone()
    with torch.inference_mode(False):
        taken = copy.deepcopy(model, memo)
    if not isinstance(taken, nn.Module) or taken is model:
        raise TypeError("its __deepcopy__ returns no copy")
    numbers = dict(_tensors(taken))
    if any(numbers.get(name) is tensor for name, tensor in _tensors(model)):
        raise TypeError("its __deepcopy__ shares parameters with it")
    for parameter in taken.parameters():
        parameter.grad = None
    for module in taken.modules():
        for hooks in _hooks(module):
            for key in [key for key, hook in hooks.items() if _of_wrapper(hook)]:
                del hooks[key]
    return taken


def _unchanged(model: nn.Module, taken: nn.Module, settings: list[tuple[object, ...]]) -> bool:
    if _settings(model) != settings:
        return False
    theirs, ours = dict(_tensors(model)), dict(_tensors(taken))
    return theirs.keys() == ours.keys() and all(
        _same(tensor, ours[name]) for name, tensor in theirs.items()
    )


def _same(a: Tensor, b: Tensor) -> bool:
    alike = (a.shape, a.dtype, a.device, a.layout) == (b.shape, b.dtype, b.device, b.layout)
    return alike and a.layout == torch.strided and torch.equal(a.detach(), b.detach())


def _settings(model: nn.Module) -> list[tuple[object, ...]]:
    """Train or eval mode, dropout rates and so on: every plain attribute of every module."""
    seen: list[tuple[object, ...]] = []
    for name, module in model.named_modules():
        plain = [(key, value) for key, value in vars(module).items() if type(value) in _PLAIN]
        hooks = [id(hook) for found in _hooks(module) for hook in found.values()]
        trained = [p is not None and p.requires_grad for p in module._parameters.values()]
        seen.append((name, type(module), *plain, *hooks, *trained))
    return seen


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, module in model.named_modules():
        for held in (module._parameters, module._buffers, vars(module)):
            for key, value in held.items():
                if isinstance(value, Tensor):
                    yield f"{name}.{key}", value


def _hooks(module: nn.Module) -> list[dict[int, Any]]:
    return [
        value
        for key, value in vars(module).items()
        if key.endswith("_hooks") and isinstance(value, dict)
    ]


def _of_wrapper(hook: Any) -> bool:
    """Is it one of Opacus, which takes the gradient of every sample that goes through the model?"""
    owner = getattr(getattr(hook, "func", hook), "__self__", None)
    return isinstance(owner, nn.Module) and unwrapped(owner) is not owner


def _may_refer_back(model: nn.Module) -> bool:
    """May the copy hold the model, which would then never go? Hooks and closures are not copied."""
    return any(
        any(_hooks(module))
        or any(isinstance(value, types.FunctionType) for value in vars(module).values())
        for module in model.modules()
    )
