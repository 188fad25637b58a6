"""Features of VGG16 from its update, and images from the features.

    SPEAR_DATA=... python benchmarks/features.py features --seeds 1 2 3
    SPEAR_DATA=... python benchmarks/features.py images --out docs/images/features.png

`features`: 16 ImageNet photos at 224 pixels; SPEAR and the cocktail party attack on the gradient of the
first linear layer (25088 -> 4096). `images`: 4 photos of 64 pixels (TinyImageNet) and a narrower layer:
feature inversion, Geiping et al. started from its images, and Geiping et al. on their own. Convolutions
trained on ImageNet, linear layers at initialisation. One JSON line a measurement.
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

import torch
from torch import Tensor, nn

import spear
from spear import data
from spear.audit.pictures import png
from spear.baselines import (
    CocktailPartyAttack,
    FeatureInversion,
    GeipingAttack,
    invert_features,
    pixel_bounds,
)
from spear.data.images import ImageData
from spear.federated import fedsgd
from spear.federated.models import Vgg16
from spear.layers import network_before
from spear.metrics import Lpips, score_features, score_images

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


def images(b: int, seed: int, iterations: int, matching: int, out: Path | None) -> Iterator[Row]:
    root = Path(os.environ["SPEAR_DATA"])
    known = case(data.tiny_imagenet(root), b, seed, 1024)
    shape, bounds = known.images.shape, pixel_bounds(known.images.mean, known.images.std)
    lpips = Lpips.find(root / "weights")

    def row(name: str, inputs: Tensor, truth: Tensor, seconds: float, steps: int) -> Row:
        x, y = (known.images.to_pixels(z).view(-1, *shape) for z in (inputs, truth))
        score = score_images(x, y, lpips=lpips)
        return {
            "attack": name,
            "b": b,
            "iterations": steps,
            "lpips": None if score.lpips is None else round(float(score.lpips.mean()), 3),
            "psnr": round(float(score.psnr.mean()), 2),
            "seconds": round(seconds, 1),
            "peak_gb": peak(),
        }

    began = time.monotonic()
    result = spear.invert(known.view, model=known.model)
    yield of_features("SPEAR, with the model", known, result, began)
    assert result.labels is not None
    truth = known.inputs[score_features(result.inputs, known.features).truth]
    before = network_before(known.model, LAYER)
    assert isinstance(before, nn.Module)
    began = time.monotonic()
    inverted = invert_features(
        before,
        result.inputs,
        shape=shape,
        bounds=bounds,
        options=FeatureInversion(iterations=iterations),
    )
    spent = time.monotonic() - began
    yield row("SPEAR + FI", inverted.inputs, truth, spent, iterations)

    common = {"model": known.model, "labels": result.labels, "shape": shape, "bounds": bounds}
    gentle = GeipingAttack(iterations=matching, lr=0.03, total_variation=0.01)
    began = time.monotonic()
    both = gentle.invert(known.view, initial=inverted.inputs, **common)
    spent += time.monotonic() - began
    yield row("SPEAR + FI + Geiping", both.inputs, truth, spent, iterations + matching)

    began = time.monotonic()
    plain = GeipingAttack(iterations=matching, lr=0.1, total_variation=0.01)
    alone = plain.invert(known.view, **common)
    yield row("Geiping", alone.inputs, truth, time.monotonic() - began, matching)
    if out:
        rows = (truth, inverted.inputs, both.inputs, alone.inputs)
        out.write_bytes(png(sheet([known.images.to_pixels(z).view(-1, *shape) for z in rows])))


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
    parser.add_argument("--matching", type=int, default=150, help="iterations of Geiping et al.")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, help="the picture, of the last seed")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    for seed in args.seeds:
        rows = (
            features(args.b or 16, seed)
            if args.part == "features"
            else images(args.b or 4, seed, args.iterations, args.matching, args.out)
        )
        for row in rows:
            print(json.dumps({"seed": seed, **row, "threads": args.threads}), flush=True)


if __name__ == "__main__":
    main()
