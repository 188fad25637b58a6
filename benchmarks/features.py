"""Features of VGG16 from its update, and images from the features.

    SPEAR_DATA=... python benchmarks/features.py features --seeds 1 2 3
    SPEAR_DATA=... python benchmarks/features.py images --out docs/images/features.png

`features`: 16 ImageNet photos at 224 pixels; SPEAR and the cocktail party attack on the gradient of the
first linear layer (25088 -> 4096). `images`: 4 photos of 64 pixels (TinyImageNet) and a narrower layer:
feature inversion, Geiping et al. started from its images (both from either attack's features), and
Geiping et al. on their own. Convolutions trained on ImageNet, linear layers at initialisation. One
JSON line a measurement.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import spear
from spear import data
from spear.baselines import (
    CocktailPartyAttack,
    FeatureInversion,
    GeipingAttack,
    invert_features,
    pixel_bounds,
)
from spear.data import ImageData
from spear.federated import Vgg16, fedsgd
from spear.metrics import Lpips, score_features, score_images
from spear.report.pictures import png
from spear.update import network_before

LAYER = "classifier.0"
Row = dict[str, object]

# The second was chosen on the batch of seed 0, against the truth: measure it on others.
PARTIES = {
    "cocktail party": CocktailPartyAttack(iterations=1000),
    "cocktail party, independence 0.3": CocktailPartyAttack(iterations=1000, independence=0.3),
}


@dataclass(frozen=True, eq=False)
class Case:
    """A batch, the model, and what the server sees of it."""

    images: ImageData
    model: Vgg16
    inputs: Tensor  # (b, n)
    labels: Tensor  # (b,)
    view: spear.LayerUpdate
    features: Tensor  # (b, 512 ...)
    seconds: float  # of the client's gradient


@dataclass(frozen=True)
class Steps:
    inversion: int  # of features
    matching: int  # of gradients


def case(images: ImageData, b: int, seed: int, width: int) -> Case:
    root = Path(os.environ["SPEAR_DATA"])
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
    x, y = images.batch(order[:b].tolist())
    pixels = images.shape[-1]
    model = Vgg16(images.classes, width=width, pixels=pixels, seed=seed).load_features(root)
    began = time.monotonic()
    view = spear.observe(model, fedsgd(model, x.view(-1, *images.shape), y), layer=LAYER)
    seconds = time.monotonic() - began
    with torch.no_grad():
        features = torch.cat([model.features(one[None]) for one in x.view(-1, *images.shape)])
    return Case(images, model, x, y, view, features, seconds)


def peak() -> float:
    """Gigabytes of memory at most so far, everything counted."""
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6, 2)


def of_features(name: str, known: Case, result: spear.Inversion, began: float) -> Row:
    seconds = time.monotonic() - began
    found = score_features(result.inputs, known.features)
    return {
        "attack": name,
        "b": len(known.labels),
        "batch_size": result.batch_size,
        "cosine": round(float(found.cosine.mean()), 6),
        "worst": round(float(found.cosine.min()), 6),
        "outcome": result.outcome.name,
        "proof": result.proof.name,
        "seconds": round(seconds, 1),
        "factorise": round(result.stats["factorise"], 1),
        "client_seconds": round(known.seconds, 1),
        "peak_gb": peak(),
    }


def features(b: int, seed: int) -> Iterator[Row]:
    known = case(data.imagenet(Path(os.environ["SPEAR_DATA"]), pixels=224), b, seed, 4096)
    began = time.monotonic()
    yield of_features("SPEAR", known, spear.invert(known.view), began)
    began = time.monotonic()
    result = spear.invert(known.view, model=known.model)
    yield of_features("SPEAR, with the model", known, result, began)
    for name, attack in PARTIES.items():
        began = time.monotonic()
        yield of_features(name, known, attack.invert(known.view), began)


def images(b: int, seed: int, steps: Steps, out: Path | None) -> Iterator[Row]:
    known = case(data.tiny_imagenet(Path(os.environ["SPEAR_DATA"])), b, seed, 1024)
    began = time.monotonic()
    result = spear.invert(known.view, model=known.model)
    yield of_features("SPEAR", known, result, began)
    order = score_features(result.inputs, known.features).truth
    shown = [known.inputs[order]]
    assert result.labels is not None
    for name, found in inverted("SPEAR", known, result.inputs, result.labels, steps):
        shown.append(found.inputs)
        yield of_images(name, known, found)

    began = time.monotonic()
    party = CocktailPartyAttack(iterations=1000, independence=0.3).invert(known.view)
    yield of_features("cocktail party", known, party, began)
    # This attack gives no labels: the true ones, as Geiping et al. are given them.
    labels = known.labels[score_features(party.inputs, known.features).truth]
    for name, found in inverted("cocktail party", known, party.inputs, labels, steps):
        yield of_images(name, known, found)

    plain = GeipingAttack(iterations=steps.matching, lr=0.1, total_variation=0.01)
    alone = plain.invert(known.view, labels=known.labels[order], **asked(known))
    yield of_images("Geiping", known, alone)
    if out:
        shape = known.images.shape
        rows = [known.images.to_pixels(z).view(-1, *shape) for z in (*shown, alone.inputs)]
        out.write_bytes(png(sheet(rows)))


def inverted(
    name: str, known: Case, found: Tensor, labels: Tensor, steps: Steps
) -> Iterator[tuple[str, spear.Inversion]]:
    """Images from features (b, n), and gradient matching started from these."""
    before = network_before(known.model, LAYER)
    assert isinstance(before, nn.Module)
    call = asked(known)
    start = invert_features(
        before,
        found,
        shape=call["shape"],
        bounds=call["bounds"],
        options=FeatureInversion(iterations=steps.inversion),
    )
    yield f"{name} + FI", start
    gentle = GeipingAttack(iterations=steps.matching, lr=0.03, total_variation=0.01)
    yield (
        f"{name} + FI + Geiping",
        gentle.invert(known.view, labels=labels, initial=start.inputs, **call),
    )


def asked(known: Case) -> dict[str, Any]:
    bounds = pixel_bounds(known.images.mean, known.images.std)
    return {"model": known.model, "shape": known.images.shape, "bounds": bounds}


def of_images(name: str, known: Case, found: spear.Inversion) -> Row:
    pixels = [
        known.images.to_pixels(z).view(-1, *known.images.shape)
        for z in (found.inputs, known.inputs)
    ]
    score = score_images(*pixels, lpips=Lpips.find(Path(os.environ["SPEAR_DATA"]) / "weights"))
    return {
        "attack": name,
        "b": len(known.labels),
        "iterations": int(found.stats["iterations"]),
        "lpips": None if score.lpips is None else round(float(score.lpips.mean()), 3),
        "psnr": round(float(score.psnr.mean()), 2),
        "loss": round(found.stats["loss"], 4),
        "seconds": round(found.stats["optimise"], 1),
        "peak_gb": peak(),
    }


def sheet(rows: list[Tensor], gap: int = 4) -> Tensor:
    """Rows of images (b, 3, H, W), one above the other on white."""
    padded = [nn.functional.pad(row, (gap, gap, gap, gap), value=1.0) for row in rows]
    return torch.cat([torch.cat(list(row), dim=2) for row in padded], dim=1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", choices=["features", "images"])
    parser.add_argument("--b", type=int, help="16 for features, 4 for images")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--iterations", type=int, default=500, help="of feature inversion")
    parser.add_argument("--matching", type=int, default=100, help="iterations of Geiping et al.")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, help="the picture, of the last seed")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    for seed in args.seeds:
        rows = (
            features(args.b or 16, seed)
            if args.part == "features"
            else images(args.b or 4, seed, Steps(args.iterations, args.matching), args.out)
        )
        for row in rows:
            print(json.dumps({"seed": seed, **row, "threads": args.threads}), flush=True)


if __name__ == "__main__":
    main()
