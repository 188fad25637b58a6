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

from spear.directions import Watch, sparsest_independent, unit
from spear.factors import Factors
from spear.separation import Ground, separate, solve_definite

# Ridge on c in balanced coordinates, per row: what a pattern says is weighed against c ~ q, which
# holds to a cosine of 0.8 to 0.95 on real batches. Anything from 1 to 3 serves (docs/algorithm.md).
_RIDGE = 1.5
_SWEEPS = 3  # of balancing; more change the weights by a few per cent
_FAINTEST = 1e-3  # a row keeps at least this weight: nothing is excluded on an estimate
# Share of rows whose sign agrees with the zeros: 0.97 and more for samples; for mixes of samples
# with spare zeros up to 0.93 was seen.
AGREES = 0.95
_AGREES_TRAINED = 0.88  # after many local steps, in which signs change
_SUSPECTS = 16  # directions with the fewest zeros, which a mix is among
_DROPPED = 4  # mixes that are looked for one by one


@dataclass(frozen=True, eq=False)
class Halves:
    """Both halves of the r samples still to be found, in dual coordinates."""

    U: Tensor  # (rows, r): d = U q
    H: Tensor  # (rows, r): z = H c
    h: Tensor  # (r,): c . h = 1
    agrees: float  # share of rows whose sign must agree with a sample's zeros
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
    ends, bias = factors.ends  # local training moves the signs: halfway is nearest to all its steps
    H = ends.mean(0) * factors.singular_values + torch.outer(bias.mean(0).squeeze(1), h)
    one = torch.eye(factors.b, dtype=h.dtype, device=h.device)
    agrees = AGREES if factors.view.protocol.one_step else _AGREES_TRAINED
    return Halves(factors.left[live], H[live], h, agrees, one, one)


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
    shrink = max(0.0, 1 - 2 / excess) if excess > 0 else 0.0
    chance: Tensor = torch.special.ndtr(-offset * shrink)
    return chance


def balance(halves: Halves) -> Balanced:
    """Coordinates for the search: rows of one size, weighed by the chance that they are off.

    A row in which every sample is active says nothing about zeros, yet carries most of the energy of
    uncentred batches. With the rows brought to one size, and whitened under these weights (Tyler's
    scatter), the columns of dL/dZ become nearly orthogonal, so that c ~ q.
    """
    r = halves.missing
    weights = chance_off(halves).clamp_min(_FAINTEST)
    U, change = halves.U, torch.eye(r, dtype=halves.U.dtype, device=halves.U.device)
    for _ in range(_SWEEPS):
        triangle = torch.linalg.qr(weights.sqrt()[:, None] * unit(U), mode="r").R
        change = triangle @ change
        U = torch.linalg.solve_triangular(change, halves.U, upper=True, left=False)
    H = halves.H @ change.T
    size = H.square().mean().sqrt()
    return Balanced(
        agrees=halves.agrees,
        U=unit(U) * r**0.5,
        H=H / size,
        h=change @ halves.h / size,
        q_basis=size
        * torch.linalg.solve_triangular(change, halves.q_basis, upper=True, left=False),
        c_basis=halves.c_basis @ change.T / size,
        weights=weights,
        change=change,
    )


class Signs:
    """Preactivations from a guess of the pattern: ridge regression on H, towards c ~ q."""

    def __init__(self, halves: Balanced, dtype: torch.dtype, ridge: float = _RIDGE) -> None:
        rows = len(halves.H)
        gram = halves.H.T @ halves.H
        gram.diagonal().add_(ridge * rows)
        self.H = halves.H.to(dtype)
        self.regress = solve_definite(gram, halves.H.T).to(dtype)  # (r, rows)

    def read(self, q: Tensor, activity: Tensor) -> Tensor:
        """z (rows, k) of root mean square 1, for q (r, k) and the activity of each row (rows, k).

        The activity is anything that is larger where a row is on.
        """
        tiny = torch.finfo(q.dtype).tiny
        pattern = activity - activity.mean(0)
        along = self.H @ q
        along *= (along * pattern).sum(0) / along.square().sum(0).clamp_min(tiny)
        z: Tensor = self.H @ (self.regress @ (pattern - along))
        z += along
        z /= (z.norm(dim=0) / len(z) ** 0.5).clamp_min(tiny)
        return z


def read_samples(
    halves: Halves, q: Tensor, off: Tensor, watch: Watch | None = None
) -> tuple[Tensor, Tensor]:
    """c of samples whose zeros are known, from their patterns alone; b - k others may be unknown.

    c is the direction that separates the rows that are on from those that are off: logistic
    regression on the rows of H, towards c ~ q, with c orthogonal to the q of all the others found.

    Args:
        halves: the whole problem.
        q: (k, b) exact directions.
        off: (k, rows) their zeros: bool, or how likely each is one.
        watch: with the workers, if there are any.

    Returns:
        c (k, b) with c_i . q_i = 1, and the share of rows (k,) whose sign agrees with the pattern.
    """
    k = len(q)
    if not k:
        return q, q.new_zeros(0)
    null = torch.linalg.svd(q, full_matrices=True).Vh[k:].T  # (b, b-k): orthogonal to every q
    dual = torch.linalg.pinv(q).T  # (k, b): q_i . dual_j = 1 if i = j, else 0
    ground = Ground(halves.H, balance(halves).change, null)
    return separate(ground, q, off, dual[:, :, None], watch)


def trusted(
    whole: Halves,
    q: Tensor,
    off: Tensor,
    agrees: float | None = None,
    watch: Watch | None = None,
) -> tuple[Tensor, Tensor]:
    """Both halves (k, b) of those directions whose pattern some input explains.

    A mix of samples has zeros as well, but no c whose signs agree with them.
    """
    b, agrees = whole.missing, agrees or whole.agrees
    if len(q) > b:
        chosen = sparsest_independent(q.T, off.sum(1).double())
        q, off = q[chosen], off[chosen]
    c, share = read_samples(whole, q, off, watch)
    for _ in range(_DROPPED):
        if bool((share >= agrees).all()):
            return q, c
        # One mix spoils the reading of all it holds. It is the one without which the others fit.
        suspects = off.sum(1).argsort()[:_SUSPECTS].tolist()
        others = [[j for j in range(len(q)) if j != i] for i in suspects]
        shares = [read_samples(whole, q[o], off[o], watch)[1] for o in others]
        fits = [int((share >= agrees).sum()) for share in shares]
        best = max(range(len(fits)), key=fits.__getitem__)
        if fits[best] <= int((share >= agrees).sum()):
            break
        q, off = q[others[best]], off[others[best]]
        c, share = read_samples(whole, q, off, watch)
    sound = share >= agrees
    if not bool(sound.all()):
        q = q[sound]
        c, _ = read_samples(whole, q, off[sound], watch)
    return q, c


def agreement(halves: Halves, q: Tensor, off: Tensor) -> Tensor:
    """The share of rows (k,) whose sign some c explains, each direction on its own.

    0.97 and more for samples. A mix of samples has zeros as well, but no c whose signs agree with
    them, as long as the rows are many more than twice the dimensions of c.

    Args:
        halves: what was missing when they were found.
        q: (k, r) directions in its coordinates.
        off: (k, rows) their zeros: bool, or how likely each is one.
    """
    r = halves.missing
    anywhere = torch.eye(r, dtype=q.dtype, device=q.device)
    ground = Ground(halves.H, balance(halves).change, anywhere)
    return separate(ground, q, off, q.new_zeros(len(q), r, 0))[1]


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
    U, H, h = halves.U @ q_basis, halves.H @ c_basis, c_basis.T @ halves.h
    return Halves(U, H, h, halves.agrees, q_basis, c_basis)
