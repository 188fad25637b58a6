"""Factorising a large gradient: time and peak extra memory beside the gradient's own size.

    python benchmarks/memory.py --m 200 --n 1555200 --b 20

The gradient is planted (b samples, float32). Peak memory is the kernel's high-water mark of this
process, so it needs Linux.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch

import spear
from spear.factors import factorise


def high_water_mark() -> int:
    """Peak resident memory in bytes since it was last reset."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("no VmHWM in /proc/self/status")


def measure(m: int, n: int, b: int) -> dict[str, float]:
    generator = torch.Generator().manual_seed(0)
    D = torch.randn(m, b, generator=generator) * (torch.rand(m, b, generator=generator) < 0.5)
    X = torch.randn(b, n, generator=generator)
    G = D @ X
    # One row of weights, seen as all m of them: the factorisation itself does not read the weights.
    W = torch.zeros(1, n).expand(m, n)
    view = spear.LayerUpdate(weight=W, bias=torch.zeros(m), weight_grad=G, bias_grad=D.sum(1))
    torch.linalg.qr(torch.rand(64, 64).double())  # load what LAPACK loads
    Path("/proc/self/clear_refs").write_text("5")  # reset the high-water mark
    before = high_water_mark()
    began = time.monotonic()
    factors = factorise(view)
    seconds = time.monotonic() - began
    extra = high_water_mark() - before
    size = G.numel() * G.element_size()
    return {
        "batch_size": factors.batch_size or 0,
        "gradient_bytes": size,
        "extra_bytes": extra,
        "ratio": round(extra / size, 4),
        "seconds": round(seconds, 2),
        "threads": torch.get_num_threads(),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--m", type=int, default=200)
    parser.add_argument("--n", type=int, default=3 * 720 * 720)
    parser.add_argument("--b", type=int, default=20)
    arguments = parser.parse_args()
    print(json.dumps(measure(arguments.m, arguments.n, arguments.b)))
