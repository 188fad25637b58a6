"""The sign half: a sample's ReLU pattern is a linear function of its input.

In the whitened coordinates of dL/dW = U S V^T a sample is a pair (q, c): its column of dL/dZ is
d = U q, its input x = c U^T dL/dW, and c_i . q_j = 1 if i = j, else 0. Two facts tie the halves
together. The bias gradient fixes every scale: c . h = 1 with h = U^T dL/db. And the preactivation
is linear in c: z = W x + bias = H c with H = W (U^T dL/dW)^T + bias h^T, so that

    d is zero where z is negative:   supp(U q) = {H c > 0}.

The paper looks for q by its sparsity alone and uses the signs at the end, to choose. Here each half
helps to find the other: q shows which rows are off, the rows that are off give c, and c says of every
row how far it is from the threshold.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from spear.factors import Factors

# Ridge on c in balanced coordinates, per row: what a pattern says is weighed against c ~ q, which
# holds to a cosine of 0.8 to 0.95 on real batches. Anything from 1 to 3 serves (docs/algorithm.md).
_RIDGE = 1.5
_SWEEPS = 3  # of balancing; more change the weights by a few per cent
_FAINTEST = 1e-3  # a row keeps at least this weight: nothing is excluded on an estimate
# How far c may be from q when a sample is read from its pattern, relative to |q|.
_REACH = 1.0
# Softness of the signs, from coarse to fine, in units of a typical preactivation.
_SOFTNESS = (0.3, 0.1, 0.1, 0.05, 0.05, 0.02, 0.02, 0.02)
_AT_ONCE = 1 << 24  # entries of the largest tensor: 128 MB in float64


@dataclass(frozen=True, eq=False)
class Halves:
    """Both halves of the r samples still to be found, in dual coordinates."""

    U: Tensor  # (rows, r): d = U q
    H: Tensor  # (rows, r): z = H c
    h: Tensor  # (r,): c . h = 1
    q_basis: Tensor  # (b, r): q of the whole problem = q_basis @ q
    c_basis: Tensor  # (b, r): c of the whole problem = c_basis @ c; c_basis^T q_basis = 1

    @property
    def missing(self) -> int:
        return self.U.shape[1]


@dataclass(frozen=True, eq=False)
class Balanced(Halves):
    """Halves in coordinates in which q ~ c, rows of U of one size, and what each row is worth."""

    weights: Tensor  # (rows,): the chance that a row is off for a sample
    change: Tensor  # (r, r): q here = change @ q before, up to scale


def both_halves(factors: Factors) -> Halves:
    """The whole problem, in the live rows."""
    live = factors.live_rows
    h = factors.bias_coordinates * factors.singular_values
    H = factors.preactivation * factors.singular_values + torch.outer(
        factors.view.bias.detach().to(h), h
    )
    one = torch.eye(factors.b, dtype=h.dtype, device=h.device)
    return Halves(factors.left[live], H[live], h, one, one)


def chance_off(halves: Halves) -> Tensor:
    """How likely each row is off for a sample (rows,), before any sample is known.

    c = h / |h|^2 is the batch's mean sample (its preactivations correlate with the true mean to 0.98
    and more on uncentred images); what is orthogonal to h spreads the samples around it. An offset
    no larger than the mean of r centred samples would show is shrunk to nothing (James and Stein).
    """
    length = halves.h.norm()
    mean = halves.H @ (halves.h / length.square())
    spread = (halves.H - torch.outer(mean, halves.h)).norm(dim=1) / length
    offset = mean / spread.clamp_min(1e-9 * float(mean.abs().max()))
    excess = halves.missing * float(offset.var()) if len(offset) > 1 else 0.0
    return torch.special.ndtr(-offset * max(0.0, 1 - 2 / excess if excess > 0 else 0.0))


def balance(halves: Halves) -> Balanced:
    """Coordinates for the search: rows of one size, weighed by the chance that they are off.

    A row in which every sample is active says nothing about zeros, yet carries most of the energy of
    uncentred batches. With the rows brought to one size, and whitened under these weights (Tyler's
    scatter), the columns of dL/dZ become nearly orthogonal, so that c ~ q.
    """
    rows, r = halves.U.shape
    weights = chance_off(halves).clamp_min(_FAINTEST)
    U, change = halves.U, torch.eye(r, dtype=halves.U.dtype, device=halves.U.device)
    for _ in range(_SWEEPS):
        triangle = torch.linalg.qr(weights.sqrt()[:, None] * _same_size(U), mode="r").R
        change = triangle @ change
        U = torch.linalg.solve_triangular(change, halves.U, upper=True, left=False)
    H = halves.H @ change.T
    size = H.square().mean().sqrt()
    return Balanced(
        U=_same_size(U) * r**0.5,
        H=H / size,
        h=change @ halves.h / size,
        q_basis=size
        * torch.linalg.solve_triangular(change, halves.q_basis, upper=True, left=False),
        c_basis=halves.c_basis @ change.T / size,
        weights=weights,
        change=change,
    )


def _same_size(rows: Tensor) -> Tensor:
    return rows / rows.norm(dim=1, keepdim=True).clamp_min(torch.finfo(rows.dtype).tiny)


class Signs:
    """Preactivations from a guess of the pattern: ridge regression on H, towards c ~ q."""

    def __init__(self, halves: Balanced, dtype: torch.dtype, ridge: float = _RIDGE) -> None:
        rows, r = halves.H.shape
        gram = halves.H.T @ halves.H
        gram.diagonal().add_(ridge * rows)
        self.H = halves.H.to(dtype)
        self.regress = torch.linalg.solve(gram, halves.H.T).to(dtype)  # (r, rows)

    def read(self, q: Tensor, activity: Tensor) -> Tensor:
        """z (rows, k) of root mean square 1, for q (r, k) and the activity of each row (rows, k).

        The activity is anything that is larger where a row is on.
        """
        tiny = torch.finfo(q.dtype).tiny
        pattern = activity - activity.mean(0)
        along = self.H @ q
        along *= (along * pattern).sum(0) / along.square().sum(0).clamp_min(tiny)
        z = self.H @ (self.regress @ (pattern - along))
        z += along
        z /= (z.norm(dim=0) / len(z) ** 0.5).clamp_min(tiny)
        return z


def read_samples(halves: Halves, q: Tensor, off: Tensor) -> tuple[Tensor, Tensor]:
    """c of samples whose zeros are known, from their patterns alone; b - k others may be unknown.

    c is the direction that separates the rows that are on from those that are off: logistic
    regression on the rows of H, towards c ~ q, with c orthogonal to the q of all the others found.

    Args:
        halves: the whole problem.
        q: (k, b) exact directions.
        off: (k, rows) bool, their zeros.

    Returns:
        c (k, b) with c_i . q_i = 1, and the share of rows (k,) whose sign agrees with the pattern. A
        mix of samples has no such direction, as long as rows are many more than 2 b.
    """
    k, b = q.shape
    if not k:
        return q, q.new_zeros(0)
    balanced = balance(halves)
    null = torch.linalg.svd(q, full_matrices=True).Vh[k:].T  # (b, b-k): orthogonal to every q
    dual = torch.linalg.pinv(q)  # (b, k): q_i . dual_j = 1 if i = j, else 0
    inverse = torch.linalg.inv(balanced.change).T  # c in balanced coordinates = inverse @ c
    step = max(1, _AT_ONCE // (halves.H.shape[0] * (b - k + 1)))
    parts = [
        _separate(halves.H, balanced.change, inverse, null, dual[:, i : i + step].T, q_i, off_i)
        for i, q_i, off_i in zip(
            range(0, k, step), torch.split(q, step), torch.split(off, step), strict=True
        )
    ]
    return torch.cat([c for c, _ in parts]), torch.cat([agree for _, agree in parts])


def _separate(
    H: Tensor, change: Tensor, inverse: Tensor, null: Tensor, dual: Tensor, q: Tensor, off: Tensor
) -> tuple[Tensor, Tensor]:
    """Newton's method for k logistic regressions at once, each over [null, dual_i]."""
    k, b = q.shape
    sign = torch.where(off, -1.0, 1.0).to(H)  # (k, rows)
    guess = q @ change.T
    guess = guess / guess.norm(dim=1, keepdim=True)  # (k, b): c ~ q, up to sign
    along = guess @ change @ H.T  # (k, rows)
    guess *= torch.sign((along * (sign - sign.mean(1, keepdim=True))).sum(1, keepdim=True))
    typical = along.square().mean(1, keepdim=True).sqrt()
    features = torch.cat([(H @ null).expand(k, -1, -1), (dual @ H.T)[:, :, None]], 2)
    features = features * (sign / typical)[:, :, None]  # (k, rows, r + 1): positive = right sign
    basis = torch.cat([(inverse @ null).expand(k, -1, -1), (dual @ inverse.T)[:, :, None]], 2)
    prior = basis.mT @ basis * (b / _REACH**2)
    pull = basis.mT @ guess[:, :, None] * (b / _REACH**2)
    x = torch.linalg.solve(prior, pull)  # (k, r + 1, 1)
    for softness in _SOFTNESS:
        wrong = torch.sigmoid(-features @ x / softness)  # (k, rows, 1)
        gradient = prior @ x - pull - features.mT @ wrong / softness
        curvature = (features * (wrong * (1 - wrong) / softness**2)).mT @ features + prior
        x = _descend(features, prior, pull, softness, x, torch.linalg.solve(curvature, gradient))
    c = x[:, :-1, 0] @ null.T + x[:, -1] * dual
    agree = (features @ x > 0).squeeze(2).to(H).mean(1)
    return c / (c * q).sum(1, keepdim=True), agree


def _descend(
    features: Tensor, prior: Tensor, pull: Tensor, softness: float, x: Tensor, step: Tensor
) -> Tensor:
    """x - step, halved for those whose loss would grow."""

    def loss(x: Tensor) -> Tensor:
        fit = torch.nn.functional.softplus(-features @ x / softness).sum((1, 2))
        return fit + (0.5 * x * (prior @ x) - pull * x).sum((1, 2))

    before = loss(x)
    for _ in range(6):
        worse = loss(x - step) > before
        if not bool(worse.any()):
            break
        step = torch.where(worse[:, None, None], step / 2, step)
    return x - step


def without(halves: Halves, q: Tensor, c: Tensor) -> Halves:
    """What is left to find once k samples are known: b - k dimensions, both halves.

    Every missing q_j lies in {q : c_i . q = 0}, every missing c_j in {c : q_i . c = 0}. The q_i are
    exact, so the second is exact; the c_i are read from patterns, so the first is nearly so.

    Args:
        halves: the whole problem.
        q: (k, b) exact directions of the samples found.
        c: (k, b) their other halves.
    """
    k = len(q)
    if k == 0:
        return halves
    c_basis = torch.linalg.svd(q, full_matrices=True).Vh[k:].T  # (b, b-k)
    q_basis = torch.linalg.svd(c, full_matrices=True).Vh[k:].T
    q_basis = q_basis @ torch.linalg.inv(c_basis.T @ q_basis)  # dual to c_basis
    return Halves(
        halves.U @ q_basis, halves.H @ c_basis, c_basis.T @ halves.h, q_basis, c_basis
    )
