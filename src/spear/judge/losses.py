"""A loss as a function of a matrix of outputs and of labels, whatever the model returns.

Models return a tensor, several in a tuple, a dict, or an object with `logits`; some drop the last
dimension. Losses take class indices, numbers or one-hot rows. The judge works with outputs (k, columns)
and labels (k,), a row for each sample: only this file knows what the client's loss was given.
"""

from __future__ import annotations

import copy
import functools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from spear.tolerances import REPLAY_LIMIT
from spear.update import Squash, without_squash

Loss = Callable[[Any, Tensor], Tensor]
Cast = Callable[[Tensor, Tensor], Tensor]

_ON_NUMBERS = (nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss)
_ON_NUMBERS_CALLED = (
    functional.mse_loss,
    functional.l1_loss,
    functional.smooth_l1_loss,
    functional.huber_loss,
)
_BINARY = (nn.BCEWithLogitsLoss, nn.BCELoss)
_BINARY_CALLED = (
    functional.binary_cross_entropy_with_logits,
    functional.binary_cross_entropy,
)
_MAIN = ("logits", "out", "output", "pred")  # what a dict calls its most important entry


def compares_numbers(loss: Loss | None) -> bool:
    """Is it a loss whose targets are arbitrary numbers, like the outputs?"""
    return _is_one_of(loss, _ON_NUMBERS, _ON_NUMBERS_CALLED)


def is_binary(loss: Loss | None) -> bool:
    """Is it a loss that takes a label, zero or one, for every output?"""
    return _is_one_of(loss, _BINARY, _BINARY_CALLED)


def is_squared_error(loss: Loss | None) -> bool:
    """Is it the mean or sum of squared differences?"""
    return _is_one_of(loss, (nn.MSELoss,), (functional.mse_loss,))


def _is_one_of(loss: Loss | None, kinds: tuple[type, ...], called: tuple[Loss, ...]) -> bool:
    while isinstance(loss, functools.partial):
        loss = loss.func
    return isinstance(loss, kinds) or loss in called


def in_double(loss: Loss, device: torch.device) -> Loss:
    """A copy of the loss for outputs in float64."""
    if isinstance(loss, nn.Module):
        return copy.deepcopy(loss).to(device).to(torch.float64)
    if isinstance(loss, functools.partial):
        told = {
            name: value.to(device).to(torch.float64) if isinstance(value, Tensor) else value
            for name, value in loss.keywords.items()
        }
        return functools.partial(in_double(loss.func, device), *loss.args, **told)
    return loss


def usual_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy on logits: binary for one output, otherwise over classes."""
    if outputs.shape[1:].numel() == 1:
        return functional.binary_cross_entropy_with_logits(outputs, targets)
    return functional.cross_entropy(outputs, targets)


def negative_probability(outputs: Tensor, targets: Tensor) -> Tensor:
    """What `NLLLoss` computes of outputs without a logarithm."""
    return functional.nll_loss(outputs, targets)


def main_tensor(outputs: object) -> Tensor:
    """The tensor that holds what a model predicts: its output, `logits`, or the first of several.

    >>> main_tensor({"features": torch.zeros(2, 3), "out": torch.ones(2)})
    tensor([1., 1.])
    """
    named = getattr(outputs, "logits", None)
    if isinstance(outputs, Mapping):
        named = next((outputs[key] for key in _MAIN if key in outputs), named)
    if isinstance(named, Tensor):
        return named
    first = next((t for t in _tensors(outputs) if t.is_floating_point()), None)
    if first is None:
        raise TypeError(f"the model returns a {type(outputs).__name__} without a tensor of numbers")
    return first


def _tensors(value: object) -> Iterator[Tensor]:
    """All tensors in a structure, in order."""
    if isinstance(value, Tensor):
        yield value
        return
    parts: Any = ()
    if isinstance(value, Mapping):
        parts = value.values()
    elif isinstance(value, (tuple, list)):
        parts = value
    elif hasattr(value, "__dict__"):
        parts = vars(value).values()
    for part in parts:
        yield from _tensors(part)


class Outputs:
    """Outputs of any structure as a matrix (k, columns), and back.

    Args:
        two: what the model returns for two samples. From one sample alone, `squeeze()` removes the
            batch's dimension too.
        whole: all tensors with a row for each sample, or only the main one?

    >>> outputs = Outputs((torch.zeros(2), torch.ones(2, 3)), whole=True)
    >>> outputs.matrix((torch.zeros(()), torch.ones(3)), 1)
    tensor([[0., 1., 1., 1.]])
    >>> outputs.structure(torch.zeros(1, 4))
    (tensor([0.]), tensor([[0., 0., 0.]]))
    """

    def __init__(self, two: object, *, whole: bool) -> None:
        tensors, main = list(_tensors(two)), main_tensor(two)
        own = next(i for i, t in enumerate(tensors) if t is main)
        rows = [
            i
            for i, t in enumerate(tensors)
            if i == own or (whole and t.is_floating_point() and t.shape[:1] == (2,))
        ]
        self._example = two if whole else main
        self._kept = [tensors[i] for i in rows]
        self._rows, self._own = rows, rows.index(own)
        # Tokens may come back in one long row.
        self._shapes = [t.shape[1:] if t.shape[:1] == (2,) else (-1,) for t in self._kept]
        self._sizes = [t.numel() // 2 for t in self._kept]

    @property
    def main_size(self) -> int:
        """Numbers of the main tensor for each sample."""
        return self._sizes[self._own]

    def with_each_as_main(self) -> Iterator[Outputs]:
        """The same, then with each other tensor as the main one."""
        for own in sorted(range(len(self._sizes)), key=lambda i: i != self._own):
            other = copy.copy(self)
            other._own = own
            yield other

    @property
    def a_few(self) -> int:
        """A number of samples that cannot be taken for a number of classes."""
        return 5 if self.main_size == 4 else 4

    def matrix(self, outputs: object, k: int) -> Tensor:
        """The outputs of k samples, (k, columns)."""
        tensors = list(_tensors(outputs))
        return torch.cat([tensors[i].reshape(k, -1) for i in self._rows], 1)

    def structure(self, matrix: Tensor) -> Any:
        """Outputs as the model returns them, from (k, columns)."""
        parts = self._parts(matrix)
        if self.plain:
            return parts[self._own]
        stand_ins: dict[int, Any] = {
            id(old): new for old, new in zip(self._kept, parts, strict=True)
        }
        return copy.deepcopy(self._example, stand_ins)

    @property
    def plain(self) -> bool:
        """Is the main tensor all that a loss is given?"""
        return isinstance(self._example, Tensor)

    def main(self, matrix: Tensor) -> Tensor:
        """The main tensor of these outputs (k, ...)."""
        return self._parts(matrix)[self._own]

    def _parts(self, matrix: Tensor) -> list[Tensor]:
        k, columns = matrix.shape
        split = (matrix,) if self._sizes == [columns] else torch.split(matrix, self._sizes, 1)
        return [part.reshape(k, *shape) for part, shape in zip(split, self._shapes, strict=True)]


def logits_of(
    network: nn.Module, rows: Callable[[nn.Module], Tensor]
) -> tuple[nn.Module, Squash | None]:
    """The network without the sigmoid or softmax it ends in, and that; or as it is, and None.

    Args:
        network: traced.
        rows: a network's outputs (k, columns) for some samples.
    """
    stripped = without_squash(network)
    if stripped is None:
        return network, None
    before, squash = stripped
    with torch.no_grad():
        same = torch.allclose(squash(rows(before)), rows(network), rtol=1e-4, atol=1e-6)
    return (before, squash) if same else (network, None)


class Criterion:
    """A loss on rows of outputs and labels, with the targets it takes.

    Which ones these are is tried in a fixed order. A target of another shape than the loss expects
    may silently be broadcast and let every sample act on every other; so a kind of target counts if
    each sample's gradient is what the sample has alone, up to a factor that labels may have.

    Args:
        loss: takes what the model returns, and targets.
        outputs: their structure.
        squash: of the rows, what the model does last; None if nothing.
        rows: outputs of `outputs.a_few` different samples (k, columns).
    """

    def __init__(self, loss: Loss, outputs: Outputs, squash: Squash | None, rows: Tensor) -> None:
        self.loss, self.outputs, self.squash = loss, outputs, squash
        self._cast = self._first_that_runs(rows)

    def __call__(self, rows: Tensor, labels: Tensor) -> Tensor:
        """The loss of rows (k, columns) with labels (k,), or numbers; a sum or mean over rows."""
        return self._with(self._cast, rows, labels)

    def each(self, rows: Tensor, labels: Tensor) -> Tensor:
        """The loss (k,) of every row by itself."""
        plain = self.squash is None and self.outputs.plain and self._cast is _indices
        if self.loss is usual_loss and plain and self.outputs.main_size > 1:
            return functional.cross_entropy(rows, labels, reduction="none")
        return torch.stack([self(rows[i : i + 1], labels[i : i + 1]) for i in range(len(rows))])

    def takes_every_label(self, rows: Tensor) -> bool:
        """Does the loss take as many labels as its main tensor has numbers?"""
        last = torch.full((len(rows),), max(1, self.outputs.main_size - 1), device=rows.device)
        try:
            self(rows, last)
        except UserCodeFailed:  # it has no such label
            return False
        return True

    def _with(self, cast: Cast, rows: Tensor, labels: Tensor) -> Tensor:
        rows = rows if self.squash is None else self.squash(rows)
        main = self.outputs.main(rows)
        numbers = labels.is_floating_point() and labels.numel() == main.numel()
        targets = labels.to(main).reshape(main.shape) if numbers else cast(labels, main)
        whole = main if self.outputs.plain else self.outputs.structure(rows)
        with users_code():
            return self.loss(whole, targets).sum()

    def _first_that_runs(self, rows: Tensor) -> Cast:
        casts: tuple[Cast, ...] = (_indices, _one_hot)
        if self.outputs.main_size == 1:
            casts = (_like_outputs, _indices, _numbers)
        problems, ran = [], []
        for cast in casts:
            try:
                if self._keeps_rows_apart(cast, rows):
                    return cast
                ran.append(cast)
            except UserCodeFailed as error:
                problems.append(error)
        if ran:
            return ran[0]
        raise problems[0]

    def _keeps_rows_apart(self, cast: Cast, rows: Tensor) -> bool:
        labels = torch.arange(len(rows), device=rows.device) % 2
        with torch.enable_grad():
            leaf = rows.detach().requires_grad_()
            (together,) = gradients_of(self._with(cast, leaf, labels), leaf)
            each = [self._with(cast, leaf[i : i + 1], labels[i : i + 1]) for i in range(len(rows))]
            (alone,) = gradients_of(each, leaf)
        factor = (together * alone).sum(1) / alone.square().sum(1)  # nan where there is no slope
        off = (together - factor[:, None] * alone).norm(dim=1) / together.norm(dim=1)
        apart = bool((off.nan_to_num(0.0) <= REPLAY_LIMIT).all())
        for label in (0, 1):
            same = factor[labels == label]
            same = same[same.isfinite()]
            apart &= bool((same - same[:1]).abs().le(REPLAY_LIMIT * same[:1].abs()).all())
        return apart


def _indices(labels: Tensor, outputs: Tensor) -> Tensor:
    return labels


def _one_hot(labels: Tensor, outputs: Tensor) -> Tensor:
    hot = functional.one_hot(labels, outputs[0].numel())
    return hot.to(outputs).reshape(outputs.shape)


def _like_outputs(labels: Tensor, outputs: Tensor) -> Tensor:
    return labels.to(outputs).reshape(outputs.shape)


def _numbers(labels: Tensor, outputs: Tensor) -> Tensor:
    return labels.to(outputs)


_COMPARING = {
    functional.mse_loss,
    functional.l1_loss,
    functional.smooth_l1_loss,
    functional.huber_loss,
    functional.kl_div,
    functional.poisson_nll_loss,
}
# Parts of the names of functions that draw random numbers; one name too many does no harm.
_RANDOM = (
    *("rand", "dropout", "bernoulli", "multinomial", "normal", "poisson", "binomial", "rrelu"),
    *("uniform", "exponential", "geometric", "cauchy", "gumbel", "fractional", "sample"),
)


@functools.cache
def _draws(name: str) -> bool:
    return any(part in name for part in _RANDOM)


class _Guards(threading.local):
    """Those that a thread is inside of, the outermost first."""

    def __init__(self) -> None:
        self.open: list[TorchGuard] = []


_guards = _Guards()


class TorchGuard(TorchFunctionMode):
    """Refuses targets of another shape than the outputs, and leaves the global random state alone.

    Torch only warns of a target's shape and then computes another loss; here it raises. The random
    state is restored only if numbers were drawn: other threads may be drawing from it. Of several, one
    within another, only the outermost is asked about every function: that costs as much as a small one.

    >>> with TorchGuard():
    ...     functional.mse_loss(torch.zeros(2, 1), torch.zeros(2))
    Traceback (most recent call last):
    ValueError: expected a target of the output's shape (2, 1), got (2,)
    >>> before = torch.get_rng_state()
    >>> with TorchGuard():
    ...     noise = torch.randn(3)
    >>> torch.equal(before, torch.get_rng_state())
    True
    """

    def __init__(self) -> None:
        super().__init__()
        self._state: Tensor | None = None

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        options, name = kwargs or {}, getattr(func, "__name__", "")
        if func in _COMPARING:
            given = [*args, *(options[key] for key in ("input", "target") if key in options)]
            outputs, targets = given[0].shape, given[1].shape
            if outputs != targets:
                raise ValueError(
                    f"expected a target of the output's shape {tuple(outputs)}, got {tuple(targets)}"
                )
        if _draws(name) and options.get("generator") is None:
            undrawn = [guard for guard in _guards.open if guard._state is None]
            state = torch.get_rng_state() if undrawn else None
            for guard in undrawn:
                guard._state = state
        return func(*args, **options)

    def __enter__(self) -> TorchGuard:
        if not _guards.open:
            super().__enter__()  # type: ignore[no-untyped-call]
        _guards.open.append(self)
        return self

    def __exit__(self, *error: Any) -> None:
        _guards.open.remove(self)
        if not _guards.open:
            super().__exit__(*error)  # type: ignore[no-untyped-call]
        if self._state is not None:
            torch.set_rng_state(self._state)


class UserCodeFailed(Exception):
    """The user's model or loss raised something, which is the cause of this."""

    def __str__(self) -> str:
        lines = str(self.__cause__).strip().splitlines() or [""]
        return f"{type(self.__cause__).__name__}: {lines[0][:120]}"


@contextmanager
def users_code() -> Iterator[None]:
    """Around every call of the user's model and loss, which may raise anything and draw numbers.

    What is raised elsewhere is a fault of ours, and nothing may hide it.
    """
    try:
        with TorchGuard():
            yield
    except UserCodeFailed:  # within another
        raise
    except Exception as error:
        raise UserCodeFailed from error


def gradients_of(
    outputs: Tensor | Sequence[Tensor], at: Tensor | Sequence[Tensor], **options: Any
) -> tuple[Tensor, ...]:
    """`torch.autograd.grad` through the user's model or loss."""
    with users_code():
        gradients: tuple[Tensor, ...] = torch.autograd.grad(outputs, at, **options)
        return gradients
