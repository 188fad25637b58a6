"""Table 6: features of VGG16 from its update, and images from the features."""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from spear.baselines import CocktailPartyAttack, FeatureInversion, invert_features
from spear.experiments.common import Case, Experiment, Section, table
from spear.experiments.common.baselines import known, started
from spear.experiments.common.batches import (
    attack,
    compare_activations,
    images,
    lpips,
    private_batch,
)
from spear.experiments.common.drawing import Picture
from spear.experiments.common.experiment import Rows, Settings
from spear.experiments.common.figures import NONE, NOT_RUN, mean, metric, seconds, verdicts, where
from spear.experiments.common.galleries import Strip, gallery, plain
from spear.federated import Vgg16, fedsgd
from spear.metrics import FeatureScore, score_features
from spear.trials import Attacked, Batch, Compared, Measured, Row, compare, quality
from spear.update import LayerUpdate, network_before, observe

LAYER = "classifier.0"
LOST = (
    0.9  # cosine of a sample's features to the truth, below which they are another's or a mixture
)
CELL = 32  # pixels across that VGG16 pools into one
RIDGE = 0.3  # of a channel's mean square: of 0.03 to 3, the best PSNR on six photos
# By attack: feature similarity and LPIPS, from the paper, which gives no times.
PAPER = {"geiping": ("–", "0.562"), "cocktail": ("0.939", "0.388"), "spear": ("0.984", "0.362")}
NAMES = {"geiping": "Geiping et al.", "cocktail": "Cocktail party + FI", "spear": "SPEAR + FI"}
COMMON: Settings = {
    "data": "imagenet224",
    "b": 16,
    "width": 4096,
    "photos": 200,
    "inversion": 150,
    "lr": 0.01,
    "total_variation": 1.0,
    "iterations": 1000,
    "independence": 0.3,
}
CELLS: dict[str, Settings] = {
    "cocktail": {**COMMON, "attack": "cocktail"},
    "spear": {**COMMON, "attack": "spear", "max_seconds": 900},
}
NOTES = (
    "The layer 25088 → 4096, photos of 224 pixels, b = 16. Convolutions trained on ImageNet, linear "
    "layers at initialisation (the paper's are trained). Similarity is the mean cosine over all 16; "
    f"lost are features below {LOST}. The cocktail party attack reads the span of the features, which "
    "the linear layers do not change, but depends on its start: on a batch not shown here it mixed two "
    "samples in 8 of 14 runs (mean cosine 0.94, as in the paper), and lost none in the others.",
    "Images: two of each batch, the first photo and the one whose features the cocktail party attack "
    f"recovered worst, by {COMMON['inversion']} steps of feature inversion (FI) in bfloat16. Both "
    "attacks start at a blurred guess from their features, which ridge regression learns on "
    f"{COMMON['photos']} other photos. The paper then matches gradients, which takes minutes a step "
    "here and is left out: our LPIPS (AlexNet) is to be read line against line, not against the "
    "paper's.",
    "Weights: total variation 1 for both attacks; on a photo outside the first ten batches 0.2 gave "
    "the same LPIPS. The cocktail party attack's weight of independence, 0.3, was chosen on a batch "
    "against the truth.",
)


def measure(case: Case) -> Measured:
    """The features of a whole batch, and two images from them."""
    source = images(case.data, case["data"])
    sizes = {"width": case["width"], "pixels": source.shape[-1], "seed": case.seed}
    model = Vgg16(source.classes, **sizes).load_features(case.data)
    batch = private_batch(case, model=model)
    photos = batch.inputs.view(-1, *source.shape)
    view = observe(model, fedsgd(model, photos, batch.labels), layer=LAYER)
    with torch.no_grad():  # one by one: the convolutions of sixteen photos at once take gigabytes
        truth = torch.cat([model.features(photo[None]) for photo in photos])  # (b, n)
    guess = mixed(case, view)
    found = attack(case, view, model) if case["attack"] == "spear" else guess
    similar = score_features(found.result.inputs, truth)
    metrics = {**judged(case, batch, found, truth), **alike(similar)}
    stages = {"features": found.seconds, "inversion": 0.0}
    pictures = {}
    for name, k in {"first": 0, "worst": worst(guess, truth)}.items():
        features = found.result.inputs[
            similar.truth == k
        ]  # (1, n), or none if it did not come back
        if len(features):
            shown = inverted(case, batch, view, features, k)
            score = quality(shown.score)
            metrics |= {f"{name}_lpips": score["lpips"], f"{name}_psnr": score["psnr"]}
            metrics[f"{name}_distance"] = shown.attacked.result.stats["loss"]
            stages["inversion"] += shown.attacked.seconds
            pictures[name] = beside(shown)
    outcome = found.result.outcome.name
    return Measured(outcome, metrics, sum(stages.values()), stages, pictures)


def worst(guess: Attacked, truth: Tensor) -> int:
    """The photo whose features the cocktail party attack recovered worst."""
    similar = score_features(guess.result.inputs, truth)
    cosine = torch.full((len(truth),), -1.0, dtype=similar.cosine.dtype)
    cosine[similar.truth] = similar.cosine
    return int(cosine.argmin())


def mixed(case: Case, view: LayerUpdate) -> Attacked:
    options = {name: case[name] for name in ("iterations", "independence")}
    began = time.monotonic()
    result = CocktailPartyAttack(**options).invert(view, **started(case))
    return Attacked(view, result, time.monotonic() - began)


def judged(case: Case, batch: Batch, found: Attacked, truth: Tensor) -> dict[str, Any]:
    compared = compare_activations(batch, found, truth)
    if case["attack"] == "spear":
        return dict(compared.metrics)
    return {**quality(compared.score), **found.counts}  # it proves nothing


def alike(similar: FeatureScore) -> dict[str, Any]:
    """How close the features came, and how many samples' are lost."""
    cosine = similar.cosine
    return {
        "cosine": similar.average.value,
        "worst_cosine": float(cosine.min()) if len(cosine) else None,
        "lost": similar.missing + int((~(cosine >= LOST)).sum()),
    }


def inverted(case: Case, batch: Batch, view: LayerUpdate, features: Tensor, k: int) -> Compared:
    """An image with these features (1, n), beside the batch's photo k."""
    before = network_before(batch.model, LAYER)
    assert isinstance(before, nn.Module), before
    options = FeatureInversion(
        case["inversion"], lr=case["lr"], total_variation=case["total_variation"]
    )
    told = {name: known(batch)[name] for name in ("shape", "bounds")}
    began = time.monotonic()
    initial = first_guess(case, features)
    result = invert_features(
        InHalf(before), features, initial=initial, options=options, **told, **started(case)
    )
    found = Attacked(view, result, time.monotonic() - began)
    return compare(batch, found, batch.inputs[k : k + 1].flatten(1), lpips=lpips(case.data))


class InHalf(nn.Module):
    """Convolutions in bfloat16, which takes half the time and leads to like images."""

    def __init__(self, convolutions: nn.Module) -> None:
        super().__init__()
        self.convolutions = convolutions

    def forward(self, photos: Tensor) -> Tensor:
        with torch.autocast(photos.device.type, torch.bfloat16):
            features: Tensor = self.convolutions(photos)
        return features.float()


def first_guess(case: Case, features: Tensor) -> Tensor:
    """Blurred images with these features (1, n), by ridge regression on other photos.

    The colour of each of the last pooling's cells, from its 512 channels.
    """
    source = images(case.data, case["data"])
    pool, seen, colours = others(case.data, case["data"], case["photos"])
    drawn = torch.randperm(len(source), generator=case.generator())[: case["b"]]
    apart = ~torch.isin(pool, drawn)
    A, B = channels(seen[apart]), colours[apart].flatten(2).mT.flatten(0, 1)  # (cells, 3)
    gram = A.T @ A
    ridge = RIDGE * gram.diagonal().mean() * torch.eye(len(gram))
    coarse = channels(features.float()) @ torch.linalg.solve(gram + ridge, A.T @ B)
    small = coarse.T.view(1, 3, *colours.shape[2:])
    return nn.functional.interpolate(small, size=source.shape[1:], mode="bicubic")


@cache
def others(root: Path, name: str, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Photos by number (count,), their features (count, n) and colours (count, 3, h, w) by cell."""
    source = images(root, name)
    pool = torch.randperm(len(source), generator=torch.Generator().manual_seed(0))[:count]
    model = Vgg16(1, width=1, pixels=source.shape[-1], seed=0).load_features(root)
    network = InHalf(model.features)
    seen: list[Tensor] = []
    colours: list[Tensor] = []
    with torch.no_grad():
        for k in pool.tolist():
            photo = source.batch([k])[0].view(1, *source.shape)
            seen.append(network(photo))
            colours.append(nn.functional.avg_pool2d(photo, CELL))
    return pool, torch.cat(seen), torch.cat(colours)


def channels(features: Tensor) -> Tensor:
    """Features (k, n) cell by cell, and a one: (cells, 513)."""
    X = features.view(len(features), 512, -1).mT.flatten(0, 1)
    return torch.cat([X, X.new_ones(len(X), 1)], 1)


def beside(shown: Compared) -> bytes:
    """A PNG of an image and the original."""
    pair = [shown.batch.pixels(x)[0] for x in (shown.attacked.result.inputs, shown.truth)]
    return gallery([Strip("", plain(pair))], side=pair[0].shape[-1])


def draw(rows: Mapping[str, Rows]) -> Section:
    lines = []
    for name, (similarity, distance) in PAPER.items():
        own = where(rows["features"], attack=name)
        line = [NAMES[name], similarity, mean(metric(own, "cosine"), len(own), 4), lost(own)]
        line += [seconds(own, "features"), distance]
        for photo in ("first", "worst"):
            line.append(mean(metric(own, f"{photo}_lpips"), len(own), 3))
            line.append(mean(metric(own, f"{photo}_psnr"), len(own), 1))
        lines.append([*line, seconds(own)])
    columns = (
        "Method, Feature sim paper, Feature sim ours, Lost ours, Features time (CPU), "
        "LPIPS paper (matched), LPIPS ours (first), PSNR ours (first), LPIPS ours (worst), "
        "PSNR ours (worst), Time (CPU)"
    )
    return Section(
        [table(columns.split(", "), lines)],
        pictures=[picture(row, name) for row in samples(rows["features"]) for name in row.pictures],
        notes=[*NOTES, verdicts(rows["features"])],
    )


def lost(rows: Rows) -> str:
    """How many samples' features did not come back."""
    counts = metric(rows, "lost")
    if not counts:
        return NONE if rows else NOT_RUN
    return f"{sum(counts):.0f} of {COMMON['b'] * len(counts)}"


def samples(rows: Rows) -> list[Row]:
    """The rows of the first batch that both attacks made images of."""
    drawn = [row for row in rows if row.pictures]
    seeds = [{row.seed for row in where(drawn, attack=name)} for name in CELLS]
    both = set.intersection(*seeds)
    return [row for row in drawn if both and row.seed == min(both)]


def picture(row: Row, name: str) -> Picture:
    attack = row.settings["attack"]
    caption = (
        f"{NAMES[attack]} (left), the original (right), {name} photo of seed {row.seed}: LPIPS "
        f"{row.metrics[f'{name}_lpips']:.3f}, PSNR {row.metrics[f'{name}_psnr']:.1f} dB."
    )
    return Picture(f"{attack}_{name}", row.pictures[name], caption)


EXPERIMENT = Experiment(
    place="Table 6",
    title="Features of VGG16, and images from them",
    batches=10,
    cells=tuple(CELLS.values()),
    measure=measure,
    draw=draw,
    needs=("ImageNet", "VGG16 features"),
)
