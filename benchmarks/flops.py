"""What an inversion would take on a GPU, computed: operations, bytes, kernels and transfers.

    python benchmarks/flops.py cifar10:20x200 tiny_imagenet:256x2000 --rows benchmarks/rows/flops.jsonl
    python benchmarks/flops.py --rows benchmarks/rows/flops.jsonl --page docs/devices.md

The first counts: each case is inverted on the pretend device of tests/support, and its line replaced in
the rows. The second writes the tables of the page from the rows. Nothing is measured on a GPU.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import os
import sys
from collections import Counter
from pathlib import Path

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import flop_registry

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import spear
from spear.experiments.common.batches import private_batch
from spear.experiments.common.experiment import Case
from spear.experiments.frontier import cell
from support.pretend_device import PretendTensor, counting, pretend_device

# Peak TFLOPS in float32 and float64 (without tensor cores) and GB/s, from the vendor's data sheets:
# A100 40 GB; Ada GPU architecture paper (float64 is a 64th of float32); T4 (float64 is a 32nd).
GPUS = {"A100": (19.5, 9.7, 1555), "RTX 4090": (82.6, 1.29, 1008), "T4": (8.1, 0.25, 320)}
# Assumed, the usual order of magnitude: what it takes the host to launch a kernel from PyTorch, and to
# copy a number from the device and wait for it.
LAUNCH, TRANSFER = 5e-6, 10e-6


def qr(A: Tensor, mode: str = "reduced") -> float:
    long, short = max(A.shape[-2:]), min(A.shape[-2:])
    return (1 if mode == "r" else 2) * 2 * short**2 * (long - short / 3)


def svd(A: Tensor, full: bool = False, vectors: bool = True, **_: object) -> float:
    long, short = max(A.shape[-2:]), min(A.shape[-2:])
    return 14 * long * short**2 + 8 * short**3 if vectors else 4 * short**2 * (long - short / 3)


# Operations of one matrix of a batch, from Golub and Van Loan, Matrix Computations.
LINEAR_ALGEBRA = {
    "linalg_cholesky_ex": lambda A, *_, **__: A.shape[-1] ** 3 / 3,
    "linalg_qr": qr,
    "_linalg_svd": svd,
    "_linalg_eigh": lambda A, uplo="L", vectors=True: (9 if vectors else 4 / 3) * A.shape[-1] ** 3,
    "linalg_solve_triangular": lambda A, B, **_: A.shape[-1] ** 2 * B.shape[-1],
    "triangular_solve": lambda B, A, *_: A.shape[-1] ** 2 * B.shape[-1],
    "cholesky_solve": lambda B, L, *_: 2 * L.shape[-1] ** 2 * B.shape[-1],
    "cholesky_inverse": lambda L, *_: 2 * L.shape[-1] ** 3 / 3,
    "linalg_inv_ex": lambda A, *_, **__: 2 * A.shape[-1] ** 3,
    "linalg_lu_factor_ex": lambda A, *_, **__: 2 * A.shape[-1] ** 3 / 3,
    "_linalg_solve_ex": lambda A, B, **_: (
        2 * A.shape[-1] ** 3 / 3 + 2 * A.shape[-1] ** 2 * B.shape[-1]
    ),
    "linalg_lu_solve": lambda LU, pivots, B, **_: 2 * LU.shape[-1] ** 2 * B.shape[-1],
    "mv": lambda A, x: 2 * A.numel(),
}


class Counted(TorchDispatchMode):
    """Counts what runs on the device: one kernel an operation, all it reads and writes."""

    def __init__(self) -> None:
        super().__init__()
        self.flops: Counter[torch.dtype] = Counter()
        self.bytes = self.kernels = 0
        self.seconds = dict.fromkeys(GPUS, 0.0)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        made = [t for t in tree_iter(result) if isinstance(t, PretendTensor)]
        read = [t for t in tree_iter((args, kwargs)) if isinstance(t, PretendTensor)]
        name = func._schema.name.removeprefix("aten::")
        if not (made or read) or func.is_view or name.startswith(("empty", "new_empty", "detach")):
            return result
        moved = sum(t.numel() * t.element_size() for t in made)
        if name in ("index", "gather", "index_select"):  # not all is read of the first
            moved *= 2
            read = read[1:]
        moved += sum(t.numel() * t.element_size() for t in {id(t): t for t in read}.values())
        self.add(self.operations(func, name, args, kwargs or {}, result), [*made, *read], moved)
        return result

    @staticmethod
    def operations(func, name: str, args: tuple, kwargs: dict, result) -> float:
        if func._overloadpacket in flop_registry:
            return float(flop_registry[func._overloadpacket](*args, **kwargs, out_val=result))
        if name in LINEAR_ALGEBRA:
            return math.prod(args[0].shape[:-2]) * LINEAR_ALGEBRA[name](*args, **kwargs)
        return max(
            (t.numel() for t in tree_iter((args, result)) if isinstance(t, Tensor)), default=0
        )

    def add(self, flops: float, tensors: list[Tensor], moved: int) -> None:
        dtypes = {t.dtype for t in tensors}
        double = torch.float64 in dtypes
        if not any(dtype.is_floating_point for dtype in dtypes):
            flops = 0  # masks and indices: bytes alone
        self.flops[torch.float64 if double else torch.float32] += flops
        self.bytes += moved
        self.kernels += 1
        for gpu, (single, fine, bandwidth) in GPUS.items():
            peak = (fine if double else single) * 1e12
            self.seconds[gpu] += max(flops / peak, moved / (bandwidth * 1e9))


def count(setting: str, options: argparse.Namespace) -> dict[str, object]:
    """One inversion, counted."""
    device = pretend_device()  # before the first backward pass
    case = Case({**cell(setting), "depth": options.depth}, 0, Path(options.data), lambda *_: None)
    batch = private_batch(case)
    seen = batch.view()
    own = {f"{seen.layer}.weight": seen.weight_grad, f"{seen.layer}.bias": seen.bias_grad}
    sent = {name: gradient.to(device) for name, gradient in {**seen.others, **own}.items()}
    model = copy.deepcopy(batch.model).to(device)
    counted = Counted()
    with counting() as transfers, counted:
        result = spear.invert(spear.observe(model, sent))
    return {
        "case": setting,
        "outcome": result.outcome.name,
        "proof": result.proof.name,
        "rounds": result.stats["rounds"],
        "float32": counted.flops[torch.float32],
        "float64": counted.flops[torch.float64],
        "bytes": counted.bytes,
        "kernels": counted.kernels,
        "transfers": transfers.sites.total(),
        "seconds": counted.seconds,
    }


def tables(rows: list[dict]) -> str:
    """Both tables of the page."""
    lines = ["| | float32 | float64 | moved | kernels | transfers |", "|---|---|---|---|---|---|"]
    for row in rows:
        flops = [f"{figure(row[dtype] / 1e9)} GFLOP" for dtype in ("float32", "float64")]
        sizes = [f"{figure(row['bytes'] / 1e9)} GB", f"{row['kernels']:,}", f"{row['transfers']:,}"]
        lines.append(f"| {' | '.join([named(row), *flops, *sizes])} |")
    lines += [
        "",
        f"| | {' | '.join(GPUS)} | launches | transfers |",
        "|---|" + "---|" * (len(GPUS) + 2),
    ]
    for row in rows:
        times = [*(row["seconds"][gpu] for gpu in GPUS)]
        times += [row["kernels"] * LAUNCH, row["transfers"] * TRANSFER]
        lines.append(f"| {named(row)} | {' | '.join(f'{figure(t)} s' for t in times)} |")
    return "\n".join(lines)


def figure(value: float) -> str:
    """Two digits, or all before the point."""
    digits = max(0, 1 - math.floor(math.log10(value)))
    return f"{value:,.{digits}f}"


def named(row: dict) -> str:
    data, sizes = row["case"].split(":")[:2]
    return f"{sizes.replace('x', ' of ')}, {data}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cases", nargs="*", help="data:BxM")
    parser.add_argument("--data", type=Path, default=os.environ.get("SPEAR_DATA", "."))
    parser.add_argument("--depth", type=int, default=6)
    parser.add_argument("--rows", type=Path, required=True)
    parser.add_argument("--page", type=Path, help="replace the tables between its markers")
    options = parser.parse_args()
    torch.set_num_threads(1)
    lines = options.rows.read_text(encoding="utf-8").splitlines() if options.rows.exists() else []
    rows = {row["case"]: row for row in map(json.loads, lines)}
    for case in options.cases:
        rows[case] = count(case, options)
        print(json.dumps(rows[case]), flush=True)
        options.rows.write_text("".join(f"{json.dumps(row)}\n" for row in rows.values()))
    if options.page:
        before, _, rest = options.page.read_text(encoding="utf-8").partition("<!-- computed -->\n")
        after = rest.partition("<!-- /computed -->")[2]
        made = f"<!-- computed -->\n{tables(list(rows.values()))}\n<!-- /computed -->"
        options.page.write_text(before + made + after, encoding="utf-8")


if __name__ == "__main__":
    main()
