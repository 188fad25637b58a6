"""Submatrices a second: ours beside one SVD per submatrix, on the same batch in the same run.

    python benchmarks/submatrices.py --b 20 --m 200 --threads 2

Both are timed on what they do for every submatrix: draw the rows, find the kernel, refuse what is
not sparse. The plain version is Algorithm 1 read literally: one SVD of (b-1) x b, one product with
all of L, one count of zeros.
"""

from __future__ import annotations

import argparse
import json
import time

import torch

import spear
from spear import theory
from spear.factors import Factors, factorise
from spear.federated import fedsgd, mlp
from spear.search import CandidatePool
from spear.search.sampling import Draw, kernels_by_inverse


def plain(factors: Factors, generator: torch.Generator, count: int) -> int:
    """One SVD per submatrix, batched: sparse candidates found among `count` submatrices."""
    side, b = factors.outputs, factors.b
    rows = torch.rand(count, len(side.basis), generator=generator).argsort(1)[:, : b - 1]
    q = torch.linalg.svd(side.basis[rows]).Vh[:, -1]  # (count, b)
    zeros = ((q @ side.basis.T).abs() <= 30 * side.zero).sum(1) + side.empty_rows
    return int((zeros >= theory.sparsity_threshold(side.size) * side.size).sum())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--b", type=int, default=20)
    parser.add_argument("--m", type=int, default=200)
    parser.add_argument("--n", type=int, default=3072)
    parser.add_argument("--seconds", type=float, default=5)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(args.b, args.n, generator=generator)
    y = torch.randint(10, (args.b,), generator=generator)
    model = mlp(args.n, 10, width=args.m, seed=0)
    factors = factorise(spear.observe(model, fedsgd(model, x, y)))
    pool = CandidatePool(factors.outputs, theory.sparsity_threshold(args.m))

    kernels_by_inverse(factors.outputs.white, generator, Draw())
    plain(factors, generator, 500)
    ours = svds = 0
    ours_seconds = plain_seconds = 0.0
    while ours_seconds + plain_seconds < 2 * args.seconds:  # in turns: a noisy machine hits both
        began = time.monotonic()
        for _ in range(20):
            candidates, count = kernels_by_inverse(factors.outputs.white, generator, Draw())
            pool.add(candidates)
            ours += count
        ours_seconds += time.monotonic() - began
        began = time.monotonic()
        plain(factors, generator, 5000)
        svds += 5000
        plain_seconds += time.monotonic() - began
    result = {
        "b": args.b,
        "m": args.m,
        "threads": args.threads,
        "ours_per_second": round(ours / ours_seconds),
        "plain_per_second": round(svds / plain_seconds),
        "ratio": round(ours / ours_seconds * plain_seconds / svds, 1),
        "plain_microseconds_each": round(1e6 * plain_seconds / svds, 1),
        "directions_found": len(pool),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
