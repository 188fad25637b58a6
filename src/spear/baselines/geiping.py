"""Inverting Gradients (Geiping et al., NeurIPS 2020): guess a batch, and move it until its gradient
points along the client's.

Cosine distance over all parameters plus total variation, by Adam on the gradient's sign, with the
step divided by ten after 3/8, 5/8 and 7/8 of the iterations, and pixels held in their range. Labels
are given, as in the paper's comparison. Departures from Geiping et al.: of several restarts we keep
the one with the lowest objective, total variation included, and 2,000 iterations are the default
for fully connected networks (theirs: 4,800 and more, for convolutions).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor, nn
from torch.func import functional_call

from spear.baselines.attack import (
    Bounds,
    Clock,
    approximate,
    bound_problems,
    check_view,
    decayed,
    shape_problems,
    started_from,
    total_variation,
)
from spear.errors import Declined, InvalidOption
from spear.factors import Factors, factorise
from spear.inversion import Inversion
from spear.judge import Loss
from spear.search import Progress
from spear.update import LayerUpdate, network_after

Init = Literal["randn", "rand", "zeros"]


@dataclass(frozen=True)
class GeipingAttack:
    """Options of the optimisation attack.

    Args:
        iterations: steps of each restart.
        lr: Adam's step, in units of normalised inputs; divided by ten three times on the way.
        total_variation: weight of the prior that images are smooth; 0 for none.
        restarts: starts from fresh noise; the lowest objective wins.
        signed: step along the sign of the gradient.
        boxed: hold inputs within `bounds`.
        init: where to start: "randn", "rand" (uniform in [-1, 1]) or "zeros".

    >>> from spear import observe
    >>> net = nn.Sequential(nn.Linear(30, 40), nn.ReLU(), nn.Linear(40, 5))
    >>> x, y = torch.rand(2, 30), torch.tensor([0, 4])
    >>> loss = nn.functional.cross_entropy(net(x), y)
    >>> view = observe(net, torch.autograd.grad(loss, list(net.parameters())))
    >>> attack = GeipingAttack(iterations=300, total_variation=0)
    >>> result = attack.invert(view, model=net, labels=y, bounds=(0.0, 1.0))
    >>> result.outcome.name, result.proof.name, bool((result.inputs - x).abs().mean() < 0.05)
    ('APPROXIMATE', 'NONE', True)
    """

    iterations: int = 2000
    lr: float = 0.1
    total_variation: float = 1e-3
    restarts: int = 1
    signed: bool = True
    boxed: bool = True
    init: Init = "randn"

    def __post_init__(self) -> None:
        for name in ("iterations", "restarts"):
            if getattr(self, name) < 1:
                raise InvalidOption(f"expected {name} >= 1, got {getattr(self, name)}")
        if not 0 < self.lr < math.inf:
            raise InvalidOption(f"expected lr > 0, got {self.lr}")
        if not 0 <= self.total_variation < math.inf:
            raise InvalidOption(f"expected total_variation >= 0, got {self.total_variation}")
        if self.init not in get_args(Init):
            raise InvalidOption(f"expected init to be one of {get_args(Init)}, got {self.init!r}")

    def invert(
        self,
        view: LayerUpdate,
        *,
        model: nn.Module | None = None,
        labels: Tensor | Sequence[int] | None = None,
        shape: Sequence[int] | None = None,
        bounds: Bounds | None = None,
        loss: Loss | None = None,
        initial: Tensor | None = None,
        generator: torch.Generator | None = None,
        max_seconds: float | None = None,
        on_progress: Callable[[Progress], None] | None = None,
    ) -> Inversion:
        """Approximate the model's inputs (b, n) from the whole update; arguments as in `Attack`.

        The labels are given, and gradients of other layers are matched too. `bounds` are needed if
        boxed. `initial` are inputs (b, n) to start from, in the labels' order; later restarts begin at
        `init`. A small distance between gradients proves nothing.
        """
        check_view(view)
        clock = Clock(on_progress, max_seconds)
        with clock.watch.stage("factorise"):
            factors = factorise(view)
        if labels is not None:
            labels = torch.as_tensor(labels, device=view.weight.device)
        self._check(factors, model, labels, shape, bounds)
        assert model is not None
        assert labels is not None
        sizes = tuple(shape) if shape is not None else (view.inputs,)
        generator = generator or torch.Generator().manual_seed(0)
        with torch.inference_mode(False), torch.enable_grad(), clock.watch.stage("optimise"):
            start = self._start(len(labels), sizes, view, generator)
            best = trial = _Trial(start if initial is None else started_from(initial, start))
            loss = loss or nn.functional.cross_entropy
            distance = gradient_distance(factors, model, labels, loss)
            objective = self._objective(distance, flat=_takes_flat(view))
            _try(objective, trial.X.requires_grad_())
            try:
                for restart in range(self.restarts):
                    if restart:
                        trial = _Trial(self._start(len(labels), sizes, view, generator))
                    self._descend(trial, objective, bounds, clock)
                    best = min(best, trial, key=lambda t: t.loss)
            except KeyboardInterrupt:
                clock.watch.count("interrupted")
                best = min(best, trial, key=lambda t: t.loss)
        return self._conclude(best, factors, labels, clock)

    def _descend(
        self, trial: _Trial, objective: Distance, bounds: Bounds | None, clock: Clock
    ) -> None:
        """One run of signed Adam from the trial's inputs, which move in place."""
        X = trial.X.requires_grad_()  # (b, *shape)
        low, high = (torch.as_tensor(b).to(X) for b in bounds) if bounds else (None, None)
        adam = torch.optim.Adam([X], lr=self.lr)
        for step in range(self.iterations):
            if not clock.tick(expected=self.iterations * self.restarts, batch_size=len(X)):
                return
            adam.param_groups[0]["lr"] = decayed(self.lr, step, self.iterations)
            value = objective(X)
            (slope,) = torch.autograd.grad(value, X)
            X.grad = slope.sign() if self.signed else slope
            adam.step()
            if self.boxed and low is not None:
                with torch.no_grad():
                    X.clamp_(low, high)
            loss = value.item()
            if not math.isfinite(loss):
                trial.loss = math.inf
                return
            trial.loss = loss

    def _objective(self, distance: Distance, *, flat: bool) -> Distance:
        def objective(X: Tensor) -> Tensor:
            value = distance(X.flatten(1) if flat else X)
            if self.total_variation > 0:
                value = value + self.total_variation * total_variation(X)
            return value

        return objective

    def _start(
        self, b: int, shape: tuple[int, ...], view: LayerUpdate, generator: torch.Generator
    ) -> Tensor:
        size, device = (b, *shape), generator.device
        if self.init == "randn":
            X = torch.randn(size, generator=generator, device=device)
        elif self.init == "rand":
            X = 2 * torch.rand(size, generator=generator, device=device) - 1
        else:
            X = torch.zeros(size)
        return X.to(view.weight)

    def _check(
        self,
        factors: Factors,
        model: nn.Module | None,
        labels: Tensor | None,
        shape: Sequence[int] | None,
        bounds: Bounds | None,
    ) -> None:
        """Raise everything that is wrong with the call, together."""
        view = factors.view
        problems = _model_problems(view, model) + _label_problems(factors, labels)
        wrong_shape = shape_problems(view, shape, self.total_variation)
        problems += wrong_shape
        if self.boxed and bounds is None:
            problems.append(
                "expected bounds=(low, high), say spear.baselines.pixel_bounds(mean, std), to hold "
                "inputs in their range (or boxed=False)"
            )
        elif bounds is not None and not wrong_shape:
            problems += bound_problems(bounds, shape if shape is not None else (view.inputs,))
        if problems:
            raise InvalidOption("; ".join(problems))

    def _conclude(self, best: _Trial, factors: Factors, labels: Tensor, clock: Clock) -> Inversion:
        stats = clock.watch.stats
        stats["loss"] = best.loss
        b, done = len(labels), int(stats.get("iterations", 0))
        if not math.isfinite(best.loss):
            reason = f"no guess with a finite gradient after {done} iterations{clock.ending()}"
            return approximate(best.X[:0], batch_size=b, labels=None, stats=stats, reason=reason)
        reason = (
            f"{b} guessed inputs whose gradient is {best.loss:.1e} from the client's (1 - cosine, "
            f"plus the prior) after {done} iterations{clock.ending()}: an optimisation attack proves "
            "nothing; spear.invert does"
        )
        if factors.batch_size is not None and b > factors.batch_size:
            reason += f"; {b} labels were given, the update shows {factors.batch_size} samples"
        if not factors.protocol.one_step:
            reason += "; the update may sum several local steps, and was matched as one"
        return approximate(best.X, batch_size=b, labels=labels, stats=stats, reason=reason)


@dataclass(eq=False)
class _Trial:
    """One restart: the inputs as they stand, and their objective."""

    X: Tensor  # (b, *shape), moved in place
    loss: float = math.inf


def _takes_flat(view: LayerUpdate) -> bool:
    """Does the model read samples as vectors? It does if some linear layer reads the data itself."""
    return any(report.reads_data for report in view.considered)


def _try(objective: Distance, X: Tensor) -> None:
    """The first run of the user's model and loss, which may raise anything."""
    try:
        objective(X)
    except Exception as error:
        raise InvalidOption(
            f"the model and loss do not run on inputs {tuple(X.shape)} with these labels "
            f"({type(error).__name__}: {str(error)[:120]}); check shape=, labels= and loss="
        ) from error


def _model_problems(view: LayerUpdate, model: nn.Module | None) -> list[str]:
    if model is None:
        return ["expected model=, the model the client was sent: its gradient is matched"]
    if view.layer is None:
        return ["the update does not name its layer: use spear.observe(model, gradients)"]
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    prefix = f"{view.layer}." if view.layer else ""
    parts = {f"{prefix}weight": view.weight, **view.others}
    wrong = [name for name, part in parts.items() if shapes.get(name) != tuple(part.shape)]
    if wrong:
        return [f"the update is not this model's: it has no {wrong[0]!r} of that shape"]
    return []


def _label_problems(factors: Factors, labels: Tensor | None) -> list[str]:
    if labels is None:
        return ["expected labels=, one class index a sample: this attack is given them"]
    if labels.ndim != 1 or not len(labels) or labels.dtype != torch.int64:
        return [f"expected labels (b,) of int64, got {tuple(labels.shape)} of {labels.dtype}"]
    if int(labels.min()) < 0:
        return [f"expected labels >= 0, got {int(labels.min())}"]
    least = factors.batch_size
    if least is not None and not factors.noisy and len(labels) < least:
        return [f"the update shows {least} samples, but {len(labels)} labels came"]
    return []


Distance = Callable[[Tensor], Tensor]
"""1 - cosine of the gradients, for inputs (b, ...)."""


def gradients_by_name(view: LayerUpdate) -> dict[str, Tensor]:
    """The whole update, with the attacked layer's part under its parameters' names."""
    prefix = f"{view.layer}." if view.layer else ""
    own = {f"{prefix}weight": view.weight_grad, f"{prefix}bias": view.bias_grad}
    return {**own, **view.others}


def gradient_distance(factors: Factors, model: nn.Module, labels: Tensor, loss: Loss) -> Distance:
    """The distance to the update, by the faster way if the model allows it."""
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
    """With the layer that reads the data taken apart; `behind` is the network after it."""
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
    one = torch.eye(factors.b, dtype=factors.left.dtype, device=factors.left.device)
    left = factors.output_gradients(one).T.to(G)  # (b, m)
    return lambda X: X @ right @ left


def _behind(view: LayerUpdate, model: nn.Module) -> nn.Module | None:
    """The network behind the attacked layer, if that layer alone reads the data."""
    if view.layer is None or not view.considered or not view.reads_data:
        return None
    behind = network_after(model, view.layer)
    if isinstance(behind, Declined):
        return None
    names = {name for name, _ in behind.named_parameters()}
    return behind if set(view.others) <= names else None


def _leaves(
    model: nn.Module, target: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The parameters to differentiate by, and the rest of the model's state, as copies: neither the
    caller's gradients nor running statistics change."""
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
