"""Figure 2: the method from left to right, drawn from one small batch that went through it."""

import math

import torch

from spear import theory
from spear.directions import Watch, looseness, unit
from spear.judge.selection import select
from spear.paper import Drawing, Experiment, Plot
from spear.paper.batches import Batch, attack, judge
from spear.paper.figures import NOT_RUN, decimal
from spear.paper.galleries import aligned
from spear.paper.overview import overview
from spear.pool import Pool
from spear.report.pictures import data_uri
from spear.trials import Measured, Trial

SETTINGS = {
    "data": "tiny_imagenet",
    "b": 5,
    "m": 100,
    "submatrices": 2000,
    "false_rejection": 1e-5,
    "max_seconds": 120,
}


class Traced:
    """Algorithm 1 with a fixed number of draws, as the paper has it; it remembers what it saw."""

    def __init__(self, submatrices, false_rejection):
        self.submatrices, self.false_rejection = submatrices, false_rejection

    def search(self, factors, *, generator, watch):
        self.factors, side = factors, factors.outputs
        self.tau = theory.sparsity_threshold(side.size, self.false_rejection)
        keys = torch.rand(self.submatrices, len(side.white), generator=generator)
        self.rows = keys.argsort(1)[:, : factors.b - 1]  # (N, b-1)
        kernels = torch.linalg.svd(side.white[self.rows], full_matrices=True).Vh[:, -1]  # (N, b)
        self.q = unit(kernels / side.scales)
        self.values = (self.q @ side.basis.T).abs()  # (N, rows)
        zero = looseness(side) * side.zero
        self.zeros = (self.values <= zero).sum(1) + side.silent  # (N,)
        watch.count("submatrices", self.submatrices)
        sparse = self.zeros >= self.tau * side.size
        self.pool = Pool(side, self.tau, watch).rounded(kernels[sparse])
        watch.count("sparse", int(sparse.sum()))
        watch.count("candidates", len(self.pool))
        yield self.pool

    def satisfied(self, factors, match):
        return True


def measure(case):
    batch = Batch.draw(case, case["data"], case["b"], width=case["m"])
    view = batch.view()
    traced = Traced(case["submatrices"], case["false_rejection"])
    attacked = attack(case, view, batch.model, traced)
    score, metrics = judge(case, batch, attacked)
    chosen = select(traced.factors, traced.pool, Watch())  # as the attack has done
    return Measured(
        attacked.result.outcome.name,
        metrics
        | proposals(traced, chosen)
        | candidates(traced, chosen)
        | tiles(batch, view, attacked, score, traced),
        attacked.seconds,
        attacked.stages,
    )


def proposals(traced, chosen):
    """The sparsity of every proposal, and |L q| of a right and of a wrong one."""
    side, live = traced.factors.outputs, traced.factors.live_rows.nonzero().flatten()
    right = ((traced.q @ chosen.directions.vectors).abs() > 1 - 1e-6).any(1)  # (N,)
    full = traced.values.new_zeros(len(traced.q), side.size)
    full[:, live] = traced.values
    good, bad = int(right.nonzero()[0]), int((~right).nonzero()[0])
    return {
        "tau": traced.tau,
        "right": int(right.sum()),
        "zeros_right": torch.bincount(traced.zeros[right], minlength=side.size + 1).tolist(),
        "zeros_wrong": torch.bincount(traced.zeros[~right], minlength=side.size + 1).tolist(),
        "examples": {
            name: {
                "values": _rounded(full[i]),
                "rows": live[traced.rows[i]].tolist(),
                "zeros": int(traced.zeros[i]),
            }
            for name, i in (("right", good), ("wrong", bad))
        },
    }


def candidates(traced, chosen):
    """L, where L q vanishes for each candidate, sparsest first, and dL/dZ of those chosen."""
    live, pool = traced.factors.live_rows, traced.pool
    nonzero = torch.zeros(len(live), len(pool))
    nonzero[live] = (~pool.zeros).float()  # (m, c)
    order = torch.argsort(pool.sparsity, descending=True, stable=True)
    match = (pool.vectors[:, order].T @ chosen.directions.vectors).abs() > 1 - 1e-6  # (c, b)
    gradient = traced.factors.L @ chosen.Q
    gradient[live] = gradient[live].masked_fill(chosen.directions.zeros, 0.0)
    parts = (chosen.C @ pool.vectors).abs()  # (b, c): how much of each sample is in a candidate
    return {
        "mixes": (parts > 1e-6 * parts.amax(0)).sum(0).tolist(),
        "L": [_rounded(row) for row in traced.factors.L],
        "patterns": data_uri(nonzero[:, order][None]),
        "chosen": match.any(1).nonzero().flatten().tolist(),
        "gradient_z": [_rounded(row) for row in gradient],
    }


def tiles(batch, view, attacked, score, traced):
    """Images as PNG: a part of the gradient, the rows of R, the originals, what was recovered."""
    gradient = view.weight_grad.double()
    R = torch.linalg.lstsq(traced.factors.L, gradient).solution  # (b, n)
    found = aligned(batch.pixels(attacked.result.inputs), score)
    mixes = R.view(-1, *batch.images.shape)[:, :, ::2, ::2]
    return {
        "gradient": data_uri(_grey(gradient[:, :: max(1, view.inputs // 128)])[None]),
        "R": [data_uri(_grey(mix)) for mix in mixes],
        "recovered": [None if image is None else data_uri(image) for image in found],
        "originals": [data_uri(image) for image in batch.pixels(batch.inputs)],
        "inputs": view.inputs,
    }


def _grey(values):
    """Around 0.5, so that the largest values nearly reach 0 and 1."""
    return 0.5 + 0.5 * values / (3 * values.std())


def _rounded(values):
    return [float(f"{value:.3g}") for value in values.tolist()]


def draw(rows):
    drawn = [row for row in rows["overview"] if "examples" in row.metrics]
    if not drawn:
        return Drawing(notes=[NOT_RUN])
    row = drawn[-1]
    b, m, metrics = row.settings["b"], row.settings["m"], row.metrics
    caption = (
        f"SPEAR on a real batch of {b} TinyImageNet images, a layer of {m} neurons. The gradient (i) "
        f"is the product of thin factors (ii). {metrics['submatrices']:,} samples of {b - 1} rows give "
        f"a proposal each; right ones (green) make L q sparse (iii). {metrics['sparse']:,} have "
        f"the {math.ceil(metrics['tau'] * m)} zeros that the threshold asks for. These are "
        f"{metrics['candidates']} candidates (iv): {metrics['mixes'].count(1)} samples, "
        f"{metrics['mixes'].count(2)} mixes of two, {sum(k > 2 for k in metrics['mixes'])} of more "
        f"(orange); the greedy choice keeps {b}. The bias gradient gives their scale, and with it the "
        f"inputs (v), at {decimal(metrics['psnr'])} dB."
    )
    return Drawing(plots=[Plot("method", lambda: overview(row), caption)])


EXPERIMENT = Experiment(
    place="Figure 2",
    title="Overview of the method, on a real batch",
    batches=1,
    plan=lambda plan: [Trial("overview", SETTINGS, plan.seed)],
    measure=measure,
    draw=draw,
)
