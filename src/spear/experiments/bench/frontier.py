"""The frontier: how large a batch comes back exactly, from how wide a layer, in what time.

Every trial is one line of JSON: a fresh batch of real images, its gradient inverted, judged against
the truth. `tables` draws tables and plots from such lines and computes nothing again.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import spear
from spear import data
from spear.data import ImageData
from spear.errors import InvalidOption
from spear.factors import factorise
from spear.federated import fedsgd, mlp
from spear.inversion import Inversion, invert
from spear.metrics import EXACT_DB, score
from spear.trials import reraise_interrupts
from spear.update import LayerUpdate, observe

NAMES = {
    "cifar10": "CIFAR-10",
    "mnist": "MNIST",
    "tiny_imagenet": "TinyImageNet",
    "imagenet": "ImageNet 720",
}
_DEPTH = 6
Row = dict[str, Any]  # one line of JSON


@dataclass(frozen=True)
class Setting:
    """One row of the frontier."""

    data: str
    b: int
    m: int
    raw: bool = False  # pixels in [0, 1] instead of the usual normalisation

    def __post_init__(self) -> None:
        if self.data not in NAMES:
            raise InvalidOption(f"expected data to be one of {sorted(NAMES)}, got {self.data!r}")
        if self.b < 1 or self.m < 1:
            raise InvalidOption(f"expected b >= 1 and m >= 1, got {self.b} and {self.m}")

    @staticmethod
    def parse(text: str) -> Setting:
        """From `cifar10:20x200` or `cifar10:20x200:raw`.

        >>> Setting.parse("mnist:20x200:raw")
        Setting(data='mnist', b=20, m=200, raw=True)
        """
        name, *rest = text.split(":")
        sizes = rest[0].split("x") if rest else []
        known = len(rest) == 1 or (len(rest) == 2 and rest[1] == "raw")
        if not known or len(sizes) != 2 or not all(size.isdigit() for size in sizes):
            raise InvalidOption(f"expected data:BxM or data:BxM:raw, got {text!r}")
        return Setting(name, int(sizes[0]), int(sizes[1]), len(rest) == 2)


# What the default engine is measured by.
DEFAULT_SETTINGS = [
    Setting("cifar10", 20, 200),
    Setting("tiny_imagenet", 20, 200),
    Setting("mnist", 20, 200),
    Setting("cifar10", 20, 200, raw=True),
    Setting("mnist", 20, 200, raw=True),
    Setting("cifar10", 24, 200),
    Setting("cifar10", 32, 200),
    Setting("cifar10", 40, 200),
    Setting("cifar10", 50, 400),
    Setting("tiny_imagenet", 50, 400),
    Setting("cifar10", 64, 400, raw=True),
    Setting("tiny_imagenet", 100, 1000),
    Setting("tiny_imagenet", 128, 1000, raw=True),
    Setting("tiny_imagenet", 150, 1000),
    Setting("tiny_imagenet", 200, 1000),
    Setting("tiny_imagenet", 256, 2000),
]


@dataclass(frozen=True, eq=False)
class Batch:
    """A private batch and what the server sees of it."""

    setting: Setting
    seed: int
    images: ImageData
    inputs: Tensor = field(repr=False)
    labels: Tensor = field(repr=False)
    model: nn.Module
    view: LayerUpdate

    @staticmethod
    def draw(setting: Setting, seed: int, images: ImageData) -> Batch:
        generator = torch.Generator().manual_seed(seed)
        indices = torch.randperm(len(images), generator=generator)[: setting.b].tolist()
        x, y = images.batch(indices, normalise=not setting.raw)
        model = mlp(x.shape[1], images.classes, width=setting.m, depth=_DEPTH, seed=seed)
        return Batch(setting, seed, images, x, y, model, observe(model, fedsgd(model, x, y)))

    def pixels(self, inputs: Tensor) -> Tensor:
        return self.images.to_pixels(inputs, normalised=not self.setting.raw)

    def oracle(self) -> float | None:
        """Mean PSNR of one who knows every pattern: kernels of all true zeros, in float64."""
        factors = factorise(self.view)
        if factors.batch_size != self.setting.b:
            return None
        weight, bias = self.view.weight.double(), self.view.bias.double()
        off = (self.inputs.double() @ weight.T + bias <= 0)[:, factors.live_rows]  # (b, rows)
        kernels = [torch.linalg.svd(factors.outputs.basis[zero]).Vh[-1] for zero in off]
        C = torch.linalg.inv(torch.stack(kernels, 1))
        C = C / (C @ factors.bias_coordinates)[:, None]
        return score(self.pixels(factors.reconstruct(C)), self.pixels(self.inputs)).mean


def trial(batch: Batch, finder: str, max_seconds: float) -> Row:
    """Invert one batch and judge it against the truth."""
    reset = _reset_peak()
    began = time.monotonic()
    result = invert(
        batch.view,
        model=batch.model,
        finder=finder,
        generator=torch.Generator().manual_seed(batch.seed),
        max_seconds=max_seconds,
    )
    seconds = time.monotonic() - began
    extra = None if reset is None else max(0, _peak() - reset)
    return {**_judged(batch, result), "seconds": round(seconds, 4), "extra_bytes": extra}


def _judged(batch: Batch, result: Inversion) -> Row:
    found = score(batch.pixels(result.inputs), batch.pixels(batch.inputs))
    right = found.psnr >= EXACT_DB
    return {
        "outcome": result.outcome.name,
        "proof": result.proof.name,
        "exact": found.exact,
        "false_exact": result.outcome is spear.Outcome.EXACT and not found.exact,
        "certified": int(result.certified.sum()),
        "certified_wrong": int((result.certified & ~right).sum()),
        "refused": int((~result.certified & right).sum()),
        "psnr": found.mean,
        "worst": found.worst,
        "reason": result.reason,
        "stats": {name: round(value, 4) for name, value in result.stats.items()},
    }


def run(
    settings: Iterable[Setting],
    root: Path,
    *,
    batches: int,
    seed: int,
    compare: int = 0,
    max_seconds: float = 600,
    there: Iterable[Row] = (),
) -> Iterator[Row]:
    """Rows, one per batch and finder, but for those that this very code has put `there` before.

    The first `compare` batches go to the sampling finder as well.
    """
    common = {
        "max_seconds": max_seconds,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "spear": spear.__version__,
        "commit": _commit(),
    }
    done = {_begun(row) for row in there if "max_seconds" in row}
    for setting in settings:
        planned = [
            {**asdict(setting), "seed": s, "finder": finder, **common}
            for s in range(seed, seed + batches)
            for finder in (["cascade", "sampling"] if s - seed < compare else ["cascade"])
        ]
        left = [row for row in planned if _begun(row) not in done]
        if not left:
            continue
        images = getattr(data, setting.data)(root)
        for row in left:
            batch = Batch.draw(setting, row["seed"], images)
            with reraise_interrupts():  # a batch that was cut short is no row
                row.update(trial(batch, row["finder"], max_seconds))
            if row["finder"] == "cascade":
                row["oracle"] = batch.oracle() if row["seed"] - seed < max(compare, 10) else None
            yield row


def _begun(row: Row) -> tuple[object, ...]:
    """What a row says before anything is measured: the batch, the finder, and the code."""
    names = ("data", "b", "m", "raw", "seed", "finder", "max_seconds", "threads", "torch")
    return tuple(row.get(name) for name in (*names, "python", "spear", "commit"))


def _commit() -> str | None:
    """The commit of the checkout this runs from, if it is one."""
    for folder in Path(__file__).resolve().parents:
        head = folder / ".git" / "HEAD"
        if head.is_file():
            reference = head.read_text(encoding="utf-8").strip().removeprefix("ref: ")
            target = folder / ".git" / reference
            commit = target.read_text(encoding="utf-8") if target.is_file() else reference
            return commit.strip()[:7]
    return None


def _reset_peak() -> int | None:
    """Reset the process's peak memory (Linux), and what it is now in bytes; None elsewhere."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
        return _peak()
    except OSError:
        return None


def _peak() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))
