"""What a DP-SGD training step gives away, against its epsilon: a real Opacus run, audited step by step.

    python examples/opacus_audit.py            # writes opacus-audit.html and opacus-audit.json

A client trains an MLP on crops of photos with Opacus, at several noise multipliers. Each private
gradient is attacked as it is, and what comes back is compared with what the client held.
"""

from __future__ import annotations

import argparse
import io
import shlex
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass

import matplotlib
import torch
from matplotlib import pyplot
from opacus import PrivacyEngine
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import spear
from spear.data import photo_crops
from spear.federated import mlp
from spear.integrations.opacus import capture
from spear.metrics import Rate
from spear.report import Drawing, Finding, ImageFormat, Level, Remark, Report, Table, compare

PIXELS, WIDTH, BATCH, SAMPLES = 32, 400, 16, 160
DELTA, CLIP = 1e-5, 1.0
MULTIPLIERS = (0.0, 1e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 0.1, 1.0)
RECOGNISABLE = 20.0  # dB: people tell what a picture shows
LOOK = ImageFormat((3, PIXELS, PIXELS), mean=(0.5,), std=(0.25,))


@dataclass(frozen=True, eq=False)
class Step:
    """One private step, attacked."""

    multiplier: float
    sigma: float
    epsilon: float
    spent: float | None
    samples: int
    finding: Finding

    @property
    def best(self) -> float | None:
        return max(self.finding.truth.psnr, default=None)

    @property
    def leaks(self) -> bool:
        return any(self.finding.certified) or (self.best or 0) >= RECOGNISABLE


def private_steps(multiplier: float, steps: int) -> list:
    """So many steps of a private training run, each with the batch it was computed on."""
    images, names = photo_crops(SAMPLES, PIXELS, seed=0)
    photos = [name.rsplit(" ", 1)[0] for name in names]  # "coffee 3" is a crop of coffee
    kinds = sorted(set(photos))
    labels = torch.tensor([kinds.index(photo) for photo in photos])
    data = TensorDataset(((images - 0.5) / 0.25).flatten(1), labels)
    engine = PrivacyEngine(accountant="rdp")
    network = mlp(3 * PIXELS**2, len(kinds), width=WIDTH, depth=3, seed=0)
    model, optimizer, loader = engine.make_private(
        module=network,
        optimizer=torch.optim.SGD(network.parameters(), lr=0.05),
        data_loader=DataLoader(data, batch_size=BATCH),
        noise_multiplier=multiplier,
        max_grad_norm=CLIP,
        noise_generator=torch.Generator().manual_seed(1),
    )
    batches = []
    with capture(optimizer, model, accountant=engine.accountant) as seen:
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            batches.append((x, y))
            if len(batches) == steps:
                break
    return list(zip(seen.steps, batches, strict=True))


def audit(multiplier: float, steps: int) -> Iterator[Step]:
    """Attack each private gradient as it is; only afterwards compare with what the client held."""
    for number, (step, (x, y)) in enumerate(private_steps(multiplier, steps), 1):
        view = step.view()
        result = spear.invert(view, model=step.model(), max_seconds=60)
        truth = compare(result.inputs, x, y, image_format=LOOK)
        name = f"multiplier {multiplier:g}, step {number}"
        notes = [step.summary(DELTA)]
        finding = Finding.of(result, name, image_format=LOOK, truth=truth, notes=notes)
        yield Step(multiplier, step.sigma, step.epsilon(DELTA), step.spent(DELTA), len(x), finding)


def leakage(steps: list[Step]) -> Table:
    """One row for each noise multiplier."""
    rows = []
    for multiplier in sorted({step.multiplier for step in steps}):
        own = [step for step in steps if step.multiplier == multiplier]
        rate = Rate(sum(step.leaks for step in own), len(own))
        low, high = rate.interval()
        best = max((step.best for step in own if step.best is not None), default=None)
        rows.append(
            (
                *(multiplier, own[0].sigma, own[0].epsilon, own[-1].spent),
                *(f"{rate.count} of {rate.trials}", f"{low:.0%} to {high:.0%}", best),
            )
        )
    columns = ("noise multiplier", "sigma", "epsilon of a step", "epsilon of the run")
    shown = ("steps that leaked", "95 % interval", "best PSNR (dB)")
    caption = (
        f"A step leaked if a sample was certified or came back with {RECOGNISABLE:g} dB or more. "
        f"C = {CLIP:g}, expected batch {BATCH} of {SAMPLES}, Poisson sampling, delta = {DELTA:g}, RDP; "
        "the epsilon of a step is without, that of the run with amplification by sampling."
    )
    return Table("Leakage against epsilon", columns + shown, tuple(rows), caption)


def draw(steps: list[Step]) -> str:
    """Best PSNR of each step against its epsilon, as SVG."""
    matplotlib.use("svg")
    figure, axes = pyplot.subplots(figsize=(7, 3.6), layout="constrained")
    noisy = [step for step in steps if step.multiplier > 0]
    found = [step for step in noisy if step.best is not None]
    lost = [step for step in noisy if step.best is None]
    axes.semilogx(
        [s.epsilon for s in found],
        [s.best for s in found],
        "o",
        color="#0072B2",
        label="best sample",
    )
    axes.semilogx(
        [s.epsilon for s in lost],
        [0 for _ in lost],
        "x",
        color="#595959",
        label="nothing came back",
    )
    axes.axhline(
        RECOGNISABLE, color="#D55E00", linestyle="--", linewidth=1, label="recognisable, about"
    )
    axes.set(xlabel=f"epsilon of a step (delta = {DELTA:g})", ylabel="PSNR (dB)")
    axes.legend(frameon=False)
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg")
    pyplot.close(figure)
    return buffer.getvalue()


def verdict(steps: list[Step]) -> str:
    """Where leakage ends, in one sentence."""
    leaking = {step.multiplier for step in steps if step.leaks}
    silent = sorted({step.multiplier for step in steps} - leaking)
    above = [m for m in silent if not leaking or m > max(leaking)]
    if not above:
        return "Steps at every noise multiplier gave samples away."
    epsilon = next(step.epsilon for step in steps if step.multiplier == above[0])
    number = sum(step.multiplier >= above[0] for step in steps)
    return (
        f"From noise multiplier {above[0]:g} on (epsilon {epsilon:.3g} a step) nothing recognisable "
        f"came back in {number} steps; below it, samples did."
    )


def main() -> None:
    """Run, print and write the report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--steps", type=int, default=3, help="private steps at each noise multiplier"
    )
    parser.add_argument("--multipliers", type=float, nargs="+", default=MULTIPLIERS)
    parser.add_argument(
        "--out", default="opacus-audit", help="name of the report, without its suffix"
    )
    parser.add_argument(
        "--redact", action="store_true", help="leave the recovered photos out of it"
    )
    options = parser.parse_args()
    warnings.filterwarnings("ignore", "Secure RNG turned off")  # an experiment, not a deployment
    warnings.filterwarnings("ignore", "Full backward hook is firing")  # the data has no gradient
    torch.manual_seed(0)  # of Opacus' Poisson sampling
    steps = []
    for multiplier in options.multipliers:
        for step in audit(multiplier, options.steps):
            steps.append(step)
            best = "nothing came back" if step.best is None else f"best sample {step.best:.1f} dB"
            print(
                f"{step.finding.name}: epsilon {step.epsilon:.3g}, {step.finding.outcome.name}, {best}"
            )
    words = (
        "Where nothing came back, another attack may do better: what is proved is epsilon alone. "
        "Noise is added by the client here, before the gradient leaves it."
    )
    report = Report.new(
        "audit",
        "DP-SGD: leakage against epsilon",
        verdict(steps),
        [step.finding for step in steps],
        remarks=[Remark(Level.NOTE, "not a guarantee", words)],
        tables=[leakage(steps)],
        drawings=[Drawing("Best sample against epsilon", draw(steps))],
        settings={"command": shlex.join(["python", *sys.argv])},
    )
    report = report.redacted() if options.redact else report
    report.save(f"{options.out}.json")
    report.save_page(f"{options.out}.html")
    print(report.headline)
    print(f"wrote {options.out}.json and {options.out}.html")


if __name__ == "__main__":
    main()
