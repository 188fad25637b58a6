"""Table 6: features of VGG16 from its update, and images from the features."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from spear.baselines import CocktailPartyAttack, FeatureInversion, GeipingAttack, invert_features
from spear.experiments.common import Case, Experiment, Plan, Section, table
from spear.experiments.common.baselines import known, started
from spear.experiments.common.batches import (
    attack,
    compare_activations,
    images,
    lpips,
    private_batch,
)
from spear.experiments.common.experiment import Rows, Settings
from spear.experiments.common.figures import mean, metric, seconds, verdicts, where
from spear.federated import Vgg16, fedsgd
from spear.inversion import Outcome
from spear.metrics import score_features
from spear.trials import Attacked, Batch, Measured, Trial, compare, quality
from spear.update import LayerUpdate, network_before, observe

LAYER = "classifier.0"
# By attack: feature similarity and LPIPS, from the paper, which gives no times.
PAPER = {"geiping": ("–", "0.562"), "cocktail": ("0.939", "0.388"), "spear": ("0.984", "0.362")}
NAMES = {
    "geiping": "Geiping et al.",
    "cocktail": "Cocktail party + FI + Geiping et al.",
    "spear": "SPEAR + FI + Geiping et al.",
}
BUDGETS: dict[str, Settings] = {
    "spear": {"max_seconds": 300},
    "cocktail": {"iterations": 1000, "independence": 0.3},
    "geiping": {},
}
AT_MOST = 3  # batches of images, which take minutes each
NOTES = (
    "Features: the layer 25088 → 4096, photos of 224 pixels, b = 16. Convolutions trained on ImageNet, "
    "linear layers at initialisation (the paper's are trained). Similarity is the mean cosine.",
    "Images: gradient matching through VGG16 takes a second a step on one thread even for small "
    f"images, so these are at most {AT_MOST} batches of b = 4 at 64 pixels (TinyImageNet, the layer "
    "2048 → 1024) with 500 steps of feature inversion (FI) and 100 of gradient matching. Our LPIPS "
    "(AlexNet) is not to be read against the paper's, only line against line.",
    "The cocktail party attack's weight of independence, 0.3, was chosen on a batch against the truth; "
    "it and Geiping et al. are given the labels, SPEAR's come from its replay.",
)


def cell(part: str, name: str) -> Settings:
    large = {"data": "imagenet224", "b": 16, "width": 4096}
    small = {"data": "tiny_imagenet", "b": 4, "width": 1024, "inversion": 500, "matching": 100}
    size = large if part == "features" else small
    return {"part": part, "attack": name, **size, **BUDGETS[name]}


FEATURES = {name: cell("features", name) for name in ("cocktail", "spear")}
IMAGES = {name: cell("images", name) for name in PAPER}


def plan(wanted: Plan) -> Iterator[Trial]:
    yield from wanted.each(FEATURES.values(), "features")
    yield from wanted.each(IMAGES.values(), "features", at_most=AT_MOST)


def measure(case: Case) -> Measured:
    source = images(case.data, case["data"])
    sizes = {"width": case["width"], "pixels": source.shape[-1], "seed": case.seed}
    model = Vgg16(source.classes, **sizes).load_features(case.data)
    batch = private_batch(case, model=model)
    photos = batch.inputs.view(-1, *source.shape)
    view = observe(model, fedsgd(model, photos, batch.labels), layer=LAYER)
    if case["attack"] == "geiping":
        return matched(case, batch, view, batch.labels)
    with torch.no_grad():  # one by one: the convolutions of sixteen photos at once take gigabytes
        truth = torch.cat([model.features(photo[None]) for photo in photos])  # (b, n)
    return recovered(case, batch, view, truth)


def recovered(case: Case, batch: Batch, view: LayerUpdate, truth: Tensor) -> Measured:
    """Features, and the images made from them if the part is `images`."""
    found = attack(case, view, batch.model) if case["attack"] == "spear" else mixed(case, view)
    compared = compare_activations(batch, found, truth)
    metrics = dict(compared.metrics)
    if case["attack"] != "spear":
        metrics = {**quality(compared.score), **found.counts}  # it proves nothing
    similar = score_features(found.result.inputs, truth)
    metrics |= {"cosine": similar.average.value, "worst_cosine": _least(similar.cosine)}
    outcome, stages = found.result.outcome.name, {"features": found.seconds}
    whole = found.result.outcome is Outcome.EXACT or case["attack"] != "spear"
    if case["part"] == "features" or not whole:
        return Measured(outcome, metrics, found.seconds, stages)
    labels = found.result.labels if case["attack"] == "spear" else batch.labels[similar.truth]
    shape_and_bounds = {name: known(batch)[name] for name in ("shape", "bounds")}
    began = time.monotonic()
    options = FeatureInversion(iterations=case["inversion"])
    before = network_before(batch.model, LAYER)
    assert isinstance(before, nn.Module), before
    start = invert_features(
        before, found.result.inputs, options=options, **shape_and_bounds, **started(case)
    )
    inverted = Attacked(view, start, time.monotonic() - began)
    stages["inversion"] = inverted.seconds
    metrics["lpips_inverted"] = looks(case, batch, inverted)["lpips"]
    final = matched(case, batch, view, labels, initial=start.inputs)
    total = sum(stages.values()) + final.seconds
    return Measured(outcome, {**metrics, **final.metrics}, total, {**stages, **final.stages})


def mixed(case: Case, view: LayerUpdate) -> Attacked:
    options = {name: case[name] for name in ("iterations", "independence")}
    began = time.monotonic()
    result = CocktailPartyAttack(**options).invert(view, **started(case))
    return Attacked(view, result, time.monotonic() - began)


def matched(
    case: Case,
    batch: Batch,
    view: LayerUpdate,
    labels: Tensor | None,
    initial: Tensor | None = None,
) -> Measured:
    """Gradient matching, with smaller steps if it starts from images."""
    lr = 0.1 if initial is None else 0.03
    rival = GeipingAttack(iterations=case["matching"], lr=lr, total_variation=0.01)
    began = time.monotonic()
    result = rival.invert(view, labels=labels, initial=initial, **known(batch), **started(case))
    found = Attacked(view, result, time.monotonic() - began)
    shown = looks(case, batch, found)
    kept = {"lpips": shown["lpips"], "psnr": shown["psnr"], "loss": result.stats["loss"]}
    return Measured(result.outcome.name, kept, found.seconds, {"matching": found.seconds})


def looks(case: Case, batch: Batch, found: Attacked) -> dict[str, Any]:
    return quality(compare(batch, found, lpips=lpips(case.data)).score)


def _least(values: Tensor) -> float | None:
    return float(values.min()) if len(values) else None


def draw(rows: Mapping[str, Rows]) -> Section:
    lines = []
    for name, (similarity, distance) in PAPER.items():
        large = where(rows["features"], **FEATURES[name]) if name in FEATURES else []
        small = where(rows["features"], **IMAGES[name])
        ours = [mean(metric(large, "cosine"), len(large), 4), seconds(large)]
        inverted = mean(metric(small, "lpips_inverted"), len(small), 3)
        if name not in FEATURES:
            ours, inverted = ["–", "–"], "–"
        final = mean(metric(small, "lpips"), len(small), 3)
        lines.append([NAMES[name], similarity, *ours, distance, inverted, final, seconds(small)])
    columns = "Method, Feature sim paper, Feature sim ours, Features time (CPU), LPIPS paper"
    smaller = ["LPIPS after FI, 64 pixels", "LPIPS ours, 64 pixels", "Images time (CPU)"]
    return Section(
        [table([*columns.split(", "), *smaller], lines)],
        notes=[*NOTES, verdicts(rows["features"])],
    )


EXPERIMENT = Experiment(
    place="Table 6",
    title="Features of VGG16, and images from them",
    batches=10,
    plan=plan,
    measure=measure,
    draw=draw,
    needs=("ImageNet", "TinyImageNet", "VGG16 features"),
)
