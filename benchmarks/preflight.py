"""How well a preflight foresees what noise leaves: its predictions beside real inversions.

    SPEAR_DATA=... python benchmarks/preflight.py --seeds 2 --rows benchmarks/rows/preflight.jsonl
    python benchmarks/preflight.py --table --rows benchmarks/rows/preflight.jsonl

Every row is one batch of 20 real images, six layers of width 200, one thread.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
from pathlib import Path

import torch

import spear
from spear import data
from spear.check import preflight
from spear.check.noise_forecast import Expectation, NoiseForecast
from spear.federated import defences, fedavg, fedsgd, mlp
from spear.integrations.opacus import dpsgd

B, M = 20, 200
DATA = [("cifar10", True), ("mnist", True), ("cifar10", False)]
SETTINGS = {
    "none": {},
    **{f"sigma {s:g}": {"sigma": s} for s in (1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2)},
    **{f"DP-SGD {z:g}": {"noise_multiplier": z, "clip": 1.0} for z in (2e-4, 2e-3, 1.0)},
    "float16": {"precision": "float16"},
    "bfloat16": {"precision": "bfloat16"},
    "8-bit": {"precision": "8-bit"},
    **{f"prune {100 * p:g} %": {"pruned": p} for p in (0.01, 0.1, 0.5)},
    **{f"lr {lr:g}, 5 epochs": {"lr": lr, "epochs": 5} for lr in (0.1, 0.01, 0.001)},
}


def observed(setting: dict, model, x, y, seed: int) -> spear.LayerUpdate:
    generator = torch.Generator().manual_seed(seed)
    if "lr" in setting:
        return spear.observe(model, after=fedavg(model, x, y, **setting), **setting)
    if "clip" in setting:
        multiplier, norm = setting["noise_multiplier"], setting["clip"]
        options = {"noise_multiplier": multiplier, "max_grad_norm": norm}
        return dpsgd(model, x, y, generator=generator, **options).view()
    update = fedsgd(model, x, y)
    if "sigma" in setting:
        update = defences.add_noise(update, setting["sigma"], generator)
    if setting.get("precision") == "8-bit":
        update = defences.quantise(update, 8)
    elif "precision" in setting:
        update = defences.half(update, getattr(torch, setting["precision"]))
    if "pruned" in setting:
        update = defences.prune(update, setting["pruned"])
    return spear.observe(model, update)


def trial(name: str, normalised: bool, label: str, seed: int) -> dict:
    images = getattr(data, name)(Path(os.environ["SPEAR_DATA"]))
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randperm(len(images), generator=generator)[:B].tolist()
    x, y = images.batch(chosen, normalise=normalised)
    model, setting = mlp(x.shape[1], 10, width=M, depth=6, seed=seed), SETTINGS[label]
    before = preflight(model, samples=B, **setting)
    view = observed(setting, model, x, y, seed)
    seen = preflight(model, update=view)
    result = spear.invert(view, model=model, max_seconds=20)
    row = {
        "data": name if normalised else f"{name} in [0, 1]",
        "setting": label,
        "seed": seed,
        **_said("estimate", before.predictions.outlook),
        **_said("read_off", seen.predictions.outlook),
        "verdict": before.verdict.name,
        "outcome": result.outcome.name,
        **_real(result.inputs.double(), x.double()),
    }
    return {key: round(v, 2) if isinstance(v, float) else v for key, v in row.items()}


def _said(name: str, outlook: NoiseForecast | None) -> dict:
    """A prediction, or that there was none."""
    if outlook is None:
        return {name: "NONE", f"{name}_db": None}
    return {name: outlook.expectation.name, f"{name}_db": outlook.decibels}


def _real(found: torch.Tensor, x: torch.Tensor) -> dict:
    """What came back, in the preflight's own words: the error in units of the inputs' size."""
    if not len(found):
        return {"real": Expectation.NOTHING.name, "real_db": None, "samples": 0}
    nearest = torch.cdist(found, x).min(1)
    error = float((nearest.values / x[nearest.indices].norm(dim=1)).square().mean().sqrt())
    samples = len(set(nearest.indices[nearest.values < x[nearest.indices].norm(dim=1)].tolist()))
    if error >= 1 or not samples:
        kind = Expectation.NOTHING
    elif samples < len(x):
        kind = Expectation.BORDERLINE
    else:
        limits = (1e-3, Expectation.EXACT), (0.1, Expectation.CLEAR), (1, Expectation.VAGUE)
        kind = next(kind for limit, kind in limits if error <= limit)
    return {"real": kind.name, "real_db": -20 * math.log10(error), "samples": samples}


def table(rows: list[dict]) -> str:
    """What was estimated, and what then came back of each batch, by setting and data."""
    kinds = list(dict.fromkeys(row["data"] for row in rows))
    lines = [f"| setting | {' | '.join(kinds)} |", "|---" * (1 + len(kinds)) + "|"]
    for setting in dict.fromkeys(row["setting"] for row in rows):
        cells = []
        for kind in kinds:
            own = [row for row in rows if (row["setting"], row["data"]) == (setting, kind)]
            real = "; ".join(f"{_words(row, 'real')}{_part(row)}" for row in own)
            cells.append(f"{_words(own[0], 'estimate')} → {real}")
        lines.append(f"| {setting} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n\n" + agreement(rows)


def agreement(rows: list[dict]) -> str:
    """How often the class was right, and how far off the decibels were."""
    lines = []
    for kind in dict.fromkeys(row["data"] for row in rows):
        own = [row for row in rows if row["data"] == kind and row["estimate"] != "NONE"]
        for name, words in (("estimate", "estimated"), ("read_off", "read off the update")):
            right = sum(row[name] == row["real"] for row in own)
            gaps = [
                row[f"{name}_db"] - row["real_db"]
                for row in own
                if row[f"{name}_db"] is not None and row["real_db"] is not None
            ]
            spread = f"{min(gaps):+.0f} to {max(gaps):+.0f}"
            near = f"{statistics.median(gaps):+.0f} dB in the median, {spread}"
            lines.append(f"- {kind}, {words}: class right in {right} of {len(own)}, off by {near}")
    return "\n".join(lines)


def _words(row: dict, name: str) -> str:
    value = row[f"{name}_db"]
    return row[name].lower() if value is None else f"{row[name].lower()} {value:.0f} dB"


def _part(row: dict) -> str:
    return f" ({row['samples']} of {B})" if 0 < row["samples"] < B else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--table", action="store_true", help="draw only")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if not options.table:
        with options.rows.open("w", encoding="utf-8") as file:
            for name, normalised in DATA:
                for label in SETTINGS:
                    for seed in range(options.seeds):
                        row = trial(name, normalised, label, seed)
                        file.write(json.dumps(row) + "\n")
                        file.flush()
    print(table([json.loads(line) for line in options.rows.read_text().splitlines()]))


if __name__ == "__main__":
    main()
