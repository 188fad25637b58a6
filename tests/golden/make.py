"""Makes the golden updates: `python tests/golden/make.py NAME ...` writes those, `all` every one.

Each is planted: inputs, labels and weights are drawn from a seed, and the update is what a client would
send. What is expected of it is stated here by hand, then measured; a case that comes out otherwise is
not written. Files that are there are the record of a release: make a new case rather than an old one
anew.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

HERE = Path(__file__).resolve().parent


@dataclass(frozen=True, eq=False)
class Planted:
    """A private batch, the model, and what the client sent: gradients, or weights after training."""

    model: nn.Sequential
    inputs: Tensor
    labels: Tensor
    sent: dict[str, Tensor]
    outcome: str
    proof: str
    error: float | None = None  # of an input at most; None where none are to be compared
    how: dict[str, Any] = field(default_factory=dict)  # for `observe`


def network(sizes: list[int], generator: torch.Generator, dtype: torch.dtype) -> nn.Sequential:
    """Linear layers with a ReLU between any two, uniform as torch draws them."""
    parts: list[nn.Module] = []
    for n, m in pairwise(sizes):
        layer = nn.Linear(n, m).to(dtype)
        with torch.no_grad():
            for p in layer.parameters():
                p.copy_((2 * torch.rand(p.shape, generator=generator, dtype=dtype) - 1) / n**0.5)
        parts += [layer, nn.ReLU()]
    return nn.Sequential(*parts[:-1])


def drawn(
    seed: int, b: int, sizes: tuple[int, ...], dtype: torch.dtype = torch.float32
) -> tuple[nn.Sequential, Tensor, Tensor, torch.Generator]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(b, sizes[0], generator=generator, dtype=dtype)
    y = torch.randint(sizes[-1], (b,), generator=generator)
    return network(list(sizes), generator, dtype), x, y, generator


def gradients(model: nn.Module, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    loss = nn.functional.cross_entropy(model(x), y)
    names = [name for name, _ in model.named_parameters()]
    return dict(zip(names, torch.autograd.grad(loss, list(model.parameters())), strict=True))


def honest(
    seed: int,
    b: int,
    sizes: tuple[int, ...],
    dtype: torch.dtype = torch.float32,
    error: float = 1e-4,
) -> Planted:
    model, x, y, _ = drawn(seed, b, sizes, dtype)
    return Planted(model, x, y, gradients(model, x, y), "EXACT", "REPLAY", error)


def tabular() -> Planted:
    """Four numbers and three one-hot columns; two classes."""
    model, x, y, generator = drawn(5, 5, (4 + 3 + 4 + 5, 60, 2))
    parts = [x[:, :4]]
    for size in (3, 4, 5):
        chosen = torch.randint(size, (len(x),), generator=generator)
        parts.append(nn.functional.one_hot(chosen, size).float())
    x = torch.cat(parts, 1)
    return Planted(model, x, y, gradients(model, x, y), "EXACT", "REPLAY", 1e-4)


def second_layer(seed: int, sizes: tuple[int, ...], proof: str) -> Planted:
    """The second layer alone: its inputs are what the first layer's ReLUs let through."""
    model, x, y, _ = drawn(seed, 4, sizes)
    seen = torch.relu(model[0](x)).detach()
    return Planted(model, seen, y, gradients(model, x, y), "EXACT", proof, 1e-4, {"layer": "2"})


def fedavg(seed: int, lr: float, epochs: int, error: float) -> Planted:
    model, x, y, _ = drawn(seed, 4, (30, 60, 5))
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    for _ in range(epochs):
        for name, gradient in gradients(model, x, y).items():
            parameter = model.get_parameter(name)
            parameter.data = parameter.data - lr * gradient
    after = {name: p.detach().clone() for name, p in model.named_parameters()}
    model.load_state_dict(start)
    return Planted(model, x, y, after, "EXACT", "REPLAY", error, {"lr": lr, "epochs": epochs})


def noisy() -> Planted:
    """Gaussian noise of 1e-4 on every entry: recognisable, and not exact."""
    model, x, y, generator = drawn(10, 4, (30, 80, 5))
    sent = {
        name: g + 1e-4 * torch.randn(g.shape, generator=generator)
        for name, g in gradients(model, x, y).items()
    }
    return Planted(model, x, y, sent, "APPROXIMATE", "NONE", 0.5)


def half_precision() -> Planted:
    """The gradient after a trip through float16: just precise enough to be exact, if that is proved."""
    model, x, y, _ = drawn(11, 4, (30, 80, 5))
    sent = {name: g.half().float() for name, g in gradients(model, x, y).items()}
    return Planted(model, x, y, sent, "APPROXIMATE or EXACT", "NONE or REPLAY", 5e-3)


def no_gradient() -> Planted:
    """Random numbers in the place of a gradient: nothing may be found in them."""
    model, x, y, generator = drawn(12, 4, (30, 40, 5))
    sent = {name: torch.randn(p.shape, generator=generator) for name, p in model.named_parameters()}
    return Planted(model, x, y, sent, "FAILED", "NONE")


def near_duplicates() -> Planted:
    """Two of four samples are the same to one part in a million: they show as one, never exact."""
    model, x, y, generator = drawn(13, 4, (30, 60, 5))
    x[1] = x[0] + 1e-6 * torch.randn(30, generator=generator)
    y[1] = y[0]
    return Planted(model, x, y, gradients(model, x, y), "PARTIAL", "REPLAY")


CASES: dict[str, Callable[[], Planted]] = {
    "fedsgd_float32": lambda: honest(1, 6, (30, 60, 40, 5)),
    "fedsgd_float64": lambda: honest(2, 6, (24, 48, 5), torch.float64, 1e-10),
    "single_sample": lambda: honest(3, 1, (30, 40, 5)),
    "wide_batch": lambda: honest(4, 16, (32, 140, 10)),
    "tabular": tabular,
    "inner_layer": lambda: second_layer(6, (20, 30, 60, 5), "REPLAY"),
    "relu_before": lambda: second_layer(7, (20, 60, 30), "PATTERN"),  # no ReLU follows it
    "fedavg_one_epoch": lambda: fedavg(8, 0.1, 1, 1e-3),
    "fedavg_five_epochs": lambda: fedavg(9, 0.01, 5, 1e-2),
    "noisy": noisy,
    "half_precision": half_precision,
    "no_gradient": no_gradient,
    "near_duplicates": near_duplicates,
}


def write(name: str, case: Planted) -> None:
    arrays = {f"weights/{key}": p.detach().numpy() for key, p in case.model.named_parameters()}
    arrays |= {f"sent/{key}": value.detach().numpy() for key, value in case.sent.items()}
    arrays |= {"inputs": case.inputs.numpy(), "labels": case.labels.numpy()}
    np.savez(HERE / f"{name}.npz", **arrays)
    known = HERE / "expected.json"
    expected = json.loads(known.read_text()) if known.exists() else {}
    expected[name] = {key: getattr(case, key) for key in ("outcome", "proof", "error", "how")}
    known.write_text(json.dumps(dict(sorted(expected.items())), indent=1) + "\n")


def main(names: list[str]) -> None:
    sys.path.insert(0, str(HERE.parent))
    from support.golden_cases import Golden

    torch.set_num_threads(1)
    for name, make in CASES.items():
        if names == ["all"] or name in names:
            write(name, make())
            problems = Golden.read(name).problems()
            sys.stdout.write(f"{name}: {'; '.join(problems) or 'as stated'}\n")
            if problems:
                (HERE / f"{name}.npz").unlink()


if __name__ == "__main__":
    main(sys.argv[1:])
