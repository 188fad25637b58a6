"""Penalties in the client's loss, read off the update: weight decay (L2) and L1.

A loss with + (mu / 2) |W|^2 or + nu |W|_1 has the gradient G = D X + mu W + nu sign(W), of full
rank: the b samples in D X no longer end in a gap. W is known, so only the numbers mu and nu are
missing.

Statement. Let P and V hold the k >= b leading left and right singular vectors of A = G - mu W - nu
sign(W). At the true mu and nu, A = D X has nothing outside them. A small error e in mu leaves e W
and turns P and V by e |W| / s_b each, so that D X shows outside both only by e^2. The part of A
outside both is therefore e times that of W, up to e^2: projecting it onto W's gives e, and
repeating this converges quadratically. (k > b does no harm: the extra vectors take equal shares of
A and W.)

All of it is algebra of the Gram matrices G G^T, G W^T, W W^T, ... (m x m), which take one pass: left
vectors are eigenvectors of A A^T; P_out A V_out = P_out A, as P and V are A's own; and V = A^T P / s.

One number explains 99 % of what lies outside the samples, thousands of entries, only if there
really is a penalty. So noise, pruning and batches as large as the layer are left alone, bit for
bit.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from spear.factors import Factors, factorise
from spear.factors.streaming import CheckTime, column_blocks
from spear.tolerances import (
    FACTOR_OF_WEIGHTS_TOLERANCE,
    PENALTY_HINT,
    PENALTY_LEFT,
    PENALTY_ROUNDINGS,
)
from spear.update import LayerUpdate, double

_STEPS = 30  # 3 to 8 are usual

_TEMPLATES: dict[str, Callable[[Tensor], Tensor]] = {"l2": lambda w: w, "l1": torch.sign}


@dataclass(frozen=True)
class Penalty:
    """What a penalty in the client's loss added to the update: l2 W + l1 sign(W)."""

    l2: float = 0.0
    l1: float = 0.0
    biases: bool = True  # were biases penalised as well?

    @property
    def words(self) -> str:
        """What was found, as a detail of a verdict."""
        if not self.l1 and abs(self.l2 - 1) < FACTOR_OF_WEIGHTS_TOLERANCE:
            return "the update holds the weights themselves, as if weights were sent: taken off"
        kinds = {"L2 penalty (weight decay)": self.l2, "L1 penalty": self.l1}
        found = " and ".join(f"an {kind} of {size:.1e}" for kind, size in kinds.items() if size)
        where = "" if self.biases else " on weights, not biases"
        return f"the update holds {found}{where}, taken off"

    def of(self, parameter: Tensor) -> Tensor:
        """What it added to the gradient of a parameter, in float64."""
        value = double(parameter.detach())
        return self.l2 * value + self.l1 * value.sign()


def without_penalty(factors: Factors) -> tuple[Factors, Penalty | None]:
    """The factors of an update without its penalty; the same object if there is none.

    >>> from torch import nn
    >>> from spear import observe
    >>> net = nn.Sequential(nn.Linear(30, 40), nn.ReLU(), nn.Linear(40, 5)).double()
    >>> loss = nn.functional.cross_entropy(net(torch.randn(3, 30).double()), torch.tensor([0, 4, 2]))
    >>> loss = loss + 0.05 * sum(p.square().sum() for p in net.parameters())
    >>> view = observe(net, torch.autograd.grad(loss, list(net.parameters())))
    >>> factors, penalty = without_penalty(factorise(view))
    >>> factors.b, penalty.words
    (3, 'the update holds an L2 penalty (weight decay) of 1.0e-01, taken off')
    """
    factors, on_weights = _biases_as_they_were(factors)
    view = factors.view
    if on_weights or view.rounds is not None or not _unexplained(factors):
        return factors, on_weights
    rows = min(int(factors.live_rows.sum()), int(factors.live_columns.sum()))
    grams = _Grams(view, factors.check_time)
    for k in (rows // 2, 3 * rows // 4):
        penalty = grams.fit(k) if (factors.batch_size or 0) < k < rows else None
        if penalty is None:
            continue
        clean = _taken_off(view.weight_grad, view.weight, penalty)
        cleaned = factorise(dataclasses.replace(view, weight_grad=clean), factors.check_time)
        if cleaned.batch_size and cleaned.b <= k:
            return _corrected(cleaned, penalty)
    return factors, None


def _biases_as_they_were(factors: Factors) -> tuple[Factors, Penalty | None]:
    """Without the decay that was told, if only weights decayed: then biases lie in the span of L."""
    view, told = factors.view, factors.protocol
    if not (view.trained and told.steps and told.decays(view.bias)):
        return factors, None
    taken_off = (1 - told.weight_decay_factor(told.steps, view.bias)) / told.rate
    off, g = Penalty(-taken_off), double(view.bias_grad)
    as_told, undecayed = (
        float((v - factors.left @ (factors.left.T @ v)).square().sum())
        for v in (g, g - off.of(view.bias))
    )
    if not undecayed < PENALTY_LEFT * as_told:
        return factors, None
    parameters = {} if view.model is None else dict(view.model.named_parameters())
    others = dict(view.others)
    for name in parameters.keys() & others.keys():
        if others[name].ndim == 1:
            others[name] = others[name] - off.of(parameters[name]).to(others[name])
    bias_grad = (g - off.of(view.bias)).to(view.bias_grad)
    view = dataclasses.replace(view, bias_grad=bias_grad, others=others)
    found = dataclasses.replace(factors, view=view.told(decays_biases=False))
    return found, Penalty(told.weight_decay, biases=False)


def _unexplained(factors: Factors) -> bool:
    """Is there more than rounding outside the samples, and does it resemble the weights?"""
    view = factors.view
    if factors.batch_size is None or not bool(factors.live_rows.any()):
        return factors.batch_size is None and bool(view.weight.any())
    eps = torch.finfo(view.weight_grad.dtype).eps
    own = float(factors.spectrum.norm()) * torch.finfo(torch.float64).eps / math.sqrt(view.outputs)
    quiet = factors.relative_noise <= PENALTY_ROUNDINGS * eps
    if quiet or factors.noise <= PENALTY_ROUNDINGS * own:
        return False
    inner, energy, size = 0.0, 0.0, 0.0
    weights = column_blocks(view.weight)
    gradients = column_blocks(view.weight_grad, check_time=factors.check_time)
    for (_, G), (_, W) in zip(gradients, weights, strict=True):
        outside = G - factors.left @ (factors.left.T @ G)
        inner += float((outside * W).sum())
        energy += float(outside.square().sum())
        size += float(W.square().sum())
    return bool(inner) and abs(inner) > PENALTY_HINT * math.sqrt(energy * size)


class _Grams:
    """A_i A_j^T of the gradient and the templates, on the smaller side; and the fit."""

    def __init__(self, view: LayerUpdate, check_time: CheckTime) -> None:
        self.check_time = check_time
        G, W = view.weight_grad, view.weight
        if view.outputs > view.inputs:
            G, W = G.T, W.T
        names = ["G", *_TEMPLATES]
        zero = torch.zeros(len(G), len(G), dtype=torch.float64, device=double(G[:1, :1]).device)
        self.of = {(a, b): zero.clone() for i, a in enumerate(names) for b in names[i:]}
        gradients = column_blocks(G, check_time=check_time)
        for (_, g), (_, w) in zip(gradients, column_blocks(W), strict=True):
            parts = {"G": g, **{name: make(w) for name, make in _TEMPLATES.items()}}
            for (a, b), gram in self.of.items():
                gram.addmm_(parts[a], parts[b].T)
        self.of |= {(b, a): gram.T for (a, b), gram in self.of.items()}
        # The energy that rounding leaves, from the update's entries and from a Gram matrix in float64.
        eps = torch.finfo(view.weight_grad.dtype).eps
        least = len(G) * torch.finfo(torch.float64).eps
        self.rounding = max(eps**2, least) * float(self.of["G", "G"].trace())

    def fit(self, k: int) -> Penalty | None:
        """The penalty that leaves at most rank k, of one kind if that is enough; None if none does."""
        best: tuple[float, Penalty] | None = None
        for kinds in (("l2",), ("l1",), ("l2", "l1")):
            found = self._fit(kinds, k)
            if found is None:
                continue
            left, penalty = found
            # A second number takes off a little by chance: it counts only if it takes off most.
            if best is None or left < best[0] / (4 if len(kinds) > 1 else 1):
                best = left, penalty
            if left <= self.rounding:
                break
        return None if best is None else best[1]

    def _fit(self, kinds: tuple[str, ...], k: int) -> tuple[float, Penalty] | None:
        """The energy left outside k vectors, and the penalty; None if more than 1 % is left."""
        sizes = self.of["G", "G"].new_zeros(len(kinds))
        before, last = 0.0, math.inf
        for _ in range(_STEPS):
            self.check_time()
            across, gram = self._at(kinds, sizes)
            values, vectors = torch.linalg.eigh(gram)
            left = float(values[:-k].clamp_min(0).sum())
            before = left if last == math.inf else before
            inner, step = self._step(kinds, across, values[-k:], vectors[:, -k:])
            if last == math.inf and not float(inner @ step) > PENALTY_HINT**2 * left:
                return None
            sizes = sizes + step
            shift = math.sqrt(float(step @ self._size(kinds) @ step))
            if shift <= 1e-2 * math.sqrt(self.rounding) or not shift < 0.9 * last:
                break
            last = shift
        _, gram = self._at(kinds, sizes)
        left = float(torch.linalg.eigvalsh(gram)[:-k].clamp_min(0).sum())
        if not left <= PENALTY_LEFT * before:
            return None
        found = dict(zip(kinds, sizes.tolist(), strict=True))
        return left, Penalty(found.get("l2", 0.0), found.get("l1", 0.0))

    def _size(self, kinds: tuple[str, ...]) -> Tensor:
        """<T_i, T_j> of the templates."""
        return torch.stack([torch.stack([self.of[a, b].trace() for b in kinds]) for a in kinds])

    def _at(self, kinds: tuple[str, ...], sizes: Tensor) -> tuple[list[Tensor], Tensor]:
        """A T_i^T for every template, and A A^T, for A = G - sum of sizes * templates."""
        of = self.of
        weighed = list(zip(sizes.tolist(), kinds, strict=True))
        across = [of["G", b] - sum(size * of[a, b] for size, a in weighed) for b in kinds]
        gram = of["G", "G"] - sum(size * of[a, "G"] for size, a in weighed)
        gram = gram - sum(size * a for (size, _), a in zip(weighed, across, strict=True))
        return across, (gram + gram.T) / 2

    def _step(
        self, kinds: tuple[str, ...], across: list[Tensor], values: Tensor, P: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Least squares of A on the templates, outside A's own k leading vectors on both sides.

        Returns the right-hand side and the solution; their product is the energy explained.
        """
        loud = values > 1e-14 * values[-1]  # the squares of what rounding of the Gram leaves
        s = values[loud].sqrt()
        beside = []  # (templates) of (m, loud): P_out T_i V
        for gram in across:
            TV = gram.T @ P[:, loud] / s
            beside.append(TV - P @ (P.T @ TV))
        inner = torch.stack([self._outside(gram, P) for gram in across])
        rows = []
        for i, a in enumerate(kinds):
            inside = [(beside[i] * other).sum() for other in beside]
            outside = [self._outside(self.of[a, b], P) for b in kinds]
            rows.append(torch.stack(outside) - torch.stack(inside))
        normal = torch.stack(rows)
        return inner, torch.linalg.lstsq(normal, inner[:, None]).solution[:, 0]

    @staticmethod
    def _outside(gram: Tensor, P: Tensor) -> Tensor:
        """The trace of P_out gram."""
        return gram.trace() - (P * (gram @ P)).sum()


def _taken_off(gradient: Tensor, parameter: Tensor, penalty: Penalty) -> Tensor:
    """A copy of the gradient (m, n) without the penalty."""
    clean = gradient.clone()
    weights = column_blocks(parameter)
    for (columns, G), (_, W) in zip(column_blocks(gradient), weights, strict=True):
        clean[:, columns] = (G - penalty.of(W)).to(clean.dtype)
    return clean


def _corrected(factors: Factors, penalty: Penalty) -> tuple[Factors, Penalty]:
    """The rest of the update without the penalty, decided parameter by parameter.

    The bias gradient is a combination of the samples', so it lies in the span of L; and the gradient of
    a later linear layer has at most rank b. Parameters that say nothing follow those weights that do,
    and biases also follow this layer's.
    """
    view = factors.view
    g = double(view.bias_grad)
    shifted = g - penalty.of(view.bias)
    outside = [float((v - factors.left @ (factors.left.T @ v)).norm()) for v in (g, shifted)]
    penalty = dataclasses.replace(penalty, biases=outside[1] <= outside[0])
    parameters = {} if view.model is None else dict(view.model.named_parameters())
    told = {}
    for name, gradient in view.others.items():
        if name in parameters:
            factors.check_time()
            told[name] = _lower_rank(gradient, parameters[name], penalty, factors.b)
    votes = [answer for answer in told.values() if answer is not None]
    weights = sum(votes) * 2 >= len(votes)
    others = dict(view.others)
    for name, answer in told.items():
        default = weights and (penalty.biases or parameters[name].ndim > 1)
        if default if answer is None else answer:
            without = double(others[name]) - penalty.of(parameters[name])
            others[name] = without.to(others[name])
    bias_grad = shifted.to(view.bias_grad) if penalty.biases else view.bias_grad
    view = dataclasses.replace(view, bias_grad=bias_grad, others=others)
    return dataclasses.replace(factors, view=view), penalty


def _lower_rank(gradient: Tensor, parameter: Tensor, penalty: Penalty, b: int) -> bool | None:
    """Does a linear layer's gradient come down to rank b without the penalty? None: cannot tell."""
    if gradient.ndim != 2 or min(gradient.shape) < b + 2:
        return None
    G = double(gradient)
    tails = [torch.linalg.svdvals(A)[b:].norm() for A in (G, G - penalty.of(parameter))]
    return bool(tails[1] < tails[0])
