"""The output layer: its inputs come out of a ReLU, its gradient is dense.

There are no signs to help. But inputs are never negative, and their scale is known: with x = V c and
c . h = 1, every sample is a point of

    { c : V c >= 0, c . h = 1 },

and a vertex if it has b - 1 independent zeros. It has many more zeros than that, and the more it
has, the wider the cone of directions in which it is the farthest point. A linear programme along a
random direction nearly always ends in a sample at b = 10, m = 400, and every fourth time at b = 20
in the last of six layers. The paper leaves this layer to the sampling of submatrices.
"""

from __future__ import annotations

from collections.abc import Iterator

import scipy
import torch
from torch import Tensor

from spear.factors import Factors
from spear.search.candidates import CandidatePool
from spear.search.directions import Directions
from spear.search.kernels import unit
from spear.search.watch import Watch


def vertices_by_linear_programme(
    factors: Factors,
    pool: CandidatePool,
    *,
    patience: int,
    generator: torch.Generator,
    watch: Watch,
) -> Iterator[Directions]:
    """Linear programmes along random directions, away from samples already found, until all are."""
    side, h, b = pool.side, factors.bias_coordinates, factors.b
    idle = 0
    # Mixes are vertices too, with fewer zeros: once there are b, a few more runs show if they last.
    while idle < b * (1 if pool.complete else patience) and not watch.expired:
        with watch.stage("seek"):
            found, _ = pool.overdetermined()
            level = found[: len(found) * (idle % 2 == 0)]  # every other direction is unrestricted
            along = away_from(level, side.white, generator)
            point = farthest(side.white, h, along, watch.seconds_left)
            watch.count("programmes")
        idle += 1
        if point is not None and pool.add(point[None]):
            idle = 0
        watch.report("search", done=watch.count("programmes", 0), found=len(pool), batch_size=b)
    if len(pool):
        yield pool.snapshot()


def away_from(found: Tensor, white: Tensor, generator: torch.Generator) -> Tensor:
    """A random direction (b,), spread like the rows of `white`, level along the samples found."""
    noise = torch.randn(len(white), generator=generator, device=generator.device).to(white)
    direction = white.T @ noise
    if len(found):
        span = torch.linalg.qr(found.T).Q
        direction = direction - span @ (span.T @ direction)
    return unit(direction)


def farthest(
    white: Tensor, h: Tensor, direction: Tensor, seconds: float | None = None
) -> Tensor | None:
    """The c (b,) farthest along a direction with white c >= 0 and c . h = 1; None if unbounded.

    Rounding leaves a sample's zeros slightly negative, which moves a vertex; taking the kernel of all
    its zeros moves it back. None, too, if that takes longer than these seconds.
    """
    solution = scipy.optimize.linprog(
        -direction.cpu().numpy(),
        A_ub=-white.cpu().numpy(),
        b_ub=torch.zeros(len(white)).numpy(),
        A_eq=h.cpu().numpy()[None],
        b_eq=[1.0],
        bounds=(None, None),
        method="highs",
        options={} if seconds is None else {"time_limit": max(seconds, 0.0)},
    )
    return torch.from_numpy(solution.x).to(white) if solution.status == 0 else None
