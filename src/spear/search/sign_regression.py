"""c from a pattern: the direction that separates rows that are on from rows that are off."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from spear.search.kernels import unit
from spear.search.parallel import piece_length
from spear.search.watch import Watch

_PRIOR_WIDTH = 1.0  # how far c may be from q when read from a pattern, relative to |q|
# Softness of the signs, from coarse to fine, in units of a typical preactivation.
_SOFTNESS = (0.3, 0.1, 0.1, 0.05, 0.05, 0.02, 0.02, 0.02)
_HALVINGS = 6  # of a Newton step that overshoots
_AT_ONCE = 1 << 24  # entries of the largest tensor: 128 MB in float64


@dataclass(frozen=True, eq=False)
class SharedTerms:
    """What the samples to be separated share."""

    H: Tensor  # (rows, b): z = H c
    change: Tensor  # (b, b) to coordinates in which c ~ q
    span: Tensor  # (b, p): c lies in this span, plus what each sample adds


def fit_signs(
    shared: SharedTerms, q: Tensor, off: Tensor, own: Tensor, watch: Watch | None = None
) -> tuple[Tensor, Tensor]:
    """c (k, b) in the shared span plus `own` (k, b, o), and the share of signs that agree (k,).

    Args:
        shared: what all have in common.
        q: (k, b) their directions; c . q = 1.
        off: (k, rows) their zeros: bool, or how likely each is one.
        own: (k, b, o) what each adds to the span.
        watch: with the workers, if there are any.
    """
    rows, free = len(shared.H), shared.span.shape[1] + own.shape[2]
    work = len(q) * rows * free**2 * len(_SOFTNESS)
    step = max(1, min(_AT_ONCE // (rows * free), piece_length(len(q), work)))
    parts = zip(*(torch.split(t, step) for t in (q, off, own)), strict=True)
    pieces = [tuple(t.contiguous() for t in part) for part in parts] if len(q) else []
    results = (watch or Watch()).map(
        _fit_signs, (shared,), pieces, multiplications=work, complete=True
    )
    cs, shares = zip((q[:0], q.new_zeros(0)), *results, strict=True)
    return torch.cat(cs), torch.cat(shares)


def _fit_signs(shared: SharedTerms, q: Tensor, off: Tensor, own: Tensor) -> tuple[Tensor, Tensor]:
    """`fit_signs` for as many samples as fit at once."""
    basis = torch.cat([shared.span.expand(len(q), -1, -1), own], 2)  # (k, b, p + o)
    problem = _LogisticFits.of(shared, basis, q, off)
    x = problem.solve()
    c = (basis @ x).squeeze(2)
    certain = (1 - 2 * off.to(q)).abs()  # (k, rows)
    fits = (problem.features @ x > 0).squeeze(2).to(q)
    return c / (c * q).sum(1, keepdim=True), (certain * fits).sum(1) / certain.sum(1)


@dataclass(frozen=True, eq=False)
class _LogisticFits:
    """k logistic regressions at once: features @ x > 0 where the sign is right."""

    features: Tensor  # (k, rows, p)
    prior: Tensor  # (k, p, p): x^T prior x / 2 - pull^T x is how far c is from q
    pull: Tensor  # (k, p, 1)

    @staticmethod
    def of(shared: SharedTerms, basis: Tensor, q: Tensor, off: Tensor) -> _LogisticFits:
        """The regressions for c = basis @ x (k, b, p), pulled towards c ~ q in balanced coordinates."""
        H, change = shared.H, shared.change
        sign = 1 - 2 * off.to(H)  # (k, rows): -1 off, 1 on, in between where uncertain
        guess = unit(q @ change.T)  # (k, b): c ~ q, up to sign
        along = guess @ change @ H.T  # (k, rows)
        guess *= torch.sign((along * (sign - sign.mean(1, keepdim=True))).sum(1, keepdim=True))
        typical = along.square().mean(1, keepdim=True).sqrt()
        there = torch.linalg.inv(change).T @ basis
        strength = q.shape[1] / _PRIOR_WIDTH**2
        return _LogisticFits(
            H @ basis * (sign / typical)[:, :, None],
            there.mT @ there * strength,
            there.mT @ guess[:, :, None] * strength,
        )

    def solve(self) -> Tensor:
        """x (k, p, 1), by Newton's method from soft signs to sharp ones."""
        x = solve_definite(self.prior, self.pull)
        z = self.features @ x  # (k, rows, 1)
        for softness in _SOFTNESS:
            wrong = torch.sigmoid(-z / softness)
            slope = self.prior @ x - self.pull
            weight = wrong * (1 - wrong) / softness**2
            curvature = (self.features * weight).mT @ self.features + self.prior
            step = solve_definite(curvature, slope - self.features.mT @ wrong / softness)
            along = self.features @ step
            # The quadratic part along the step, so that trying a length costs no product.
            linear, square = (slope * step).sum((1, 2)), (step * (self.prior @ step)).sum((1, 2))
            length, before = torch.ones_like(linear), _softplus(z, softness)
            for _ in range(_HALVINGS):
                after = _softplus(z - length[:, None, None] * along, softness)
                worse = after - length * linear + length.square() / 2 * square > before
                if not bool(worse.any()):
                    break
                length = torch.where(worse, length / 2, length)
            x = x - length[:, None, None] * step
            z = z - length[:, None, None] * along
        return x


def _softplus(z: Tensor, softness: float) -> Tensor:
    loss: Tensor = torch.nn.functional.softplus(-z / softness).sum((1, 2))
    return loss


def solve_definite(definite: Tensor, right: Tensor) -> Tensor:
    """Positive definite systems, by Cholesky: batched LU hangs in some builds of MKL."""
    solution: Tensor = torch.cholesky_solve(right, torch.linalg.cholesky_ex(definite).L)
    return solution
