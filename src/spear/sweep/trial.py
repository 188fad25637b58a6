"""One trial of a sweep: a fresh private batch, what is sent of it, the attack, and how well it did."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from spear.federated import send, split
from spear.inversion import Inversion, invert
from spear.metrics import EXACT_DB, Assignment, assign, psnr
from spear.report import Finding, Truth
from spear.search import Progress
from spear.sweep.private_data import PrivateData
from spear.sweep.setting import Setting
from spear.sweep.subject import Fitted, Subject
from spear.trials import Measured
from spear.update import LayerUpdate

# From here on a picture is recognised: its error is a tenth of the range from black to white, as at
# the noise sigma = 1e-4 of the paper, whose pictures show what they are of.
PICTURE_DB = 20.0
# A sky or a black corner is met to 20 dB by one flat colour. To count, a recovery must beat the best
# flat colour by this much, that is halve its error.
BEYOND_FLAT_DB = 6.0
# Other data is measured in standard deviations of each feature: 10 dB are within 0.32 of one, what
# TabLeak calls a right number; the mean of the data has 0 dB.
OTHER_DB = 10.0


@dataclass(frozen=True, eq=False)
class Attacked:
    """A private batch, what came back of it, and the comparison."""

    fitted: Fitted
    chosen: Tensor  # (b,) which samples of the data it was
    view: LayerUpdate
    result: Inversion
    truth: Tensor = field(repr=False)  # (b, n) the layer's true inputs
    pairs: Assignment  # p of them
    psnr: Tensor  # (p,) dB
    recognised: Tensor  # (p,) bool
    seconds: float

    @property
    def shows_data(self) -> bool:
        """Are the layer's inputs pictures that can be shown?"""
        return _is_picture(self.fitted.data, self.view)

    @property
    def exact(self) -> bool:
        """Did every sample come back, and nothing else?"""
        complete = self.pairs.missing == 0 and self.pairs.surplus == 0
        return complete and bool((self.psnr >= EXACT_DB).all())


def attack(
    subject: Subject,
    setting: Setting,
    seed: int,
    *,
    max_seconds: float | None,
    on_progress: Callable[[Progress], None] | None = None,
) -> Attacked:
    """Draw batch and weights by the seed, let the clients send, invert and compare."""
    model = subject.attacked_model(setting.width, seed)
    fitted = subject.fitted(model)
    chosen = fitted.draw(setting.total, seed)
    x, y = fitted.inputs[chosen], fitted.targets[chosen]
    generator = torch.Generator().manual_seed(seed)
    sent = send(model, split(x, y, setting), setting, loss=fitted.loss, generator=generator)
    view = sent.view(model)
    began = time.monotonic()
    result = invert(
        view,
        model=model,
        loss=fitted.loss,
        generator=generator,
        max_seconds=max_seconds,
        on_progress=on_progress,
    )
    seconds = time.monotonic() - began
    truth = _layer_inputs(model, view.layer, x)
    found, true = _comparable(fitted, model, view, result.inputs, truth)
    pairs = assign(found, true)
    own = true[pairs.truth]  # (p, n)
    decibel = psnr(found[pairs.found], own)
    recognised = _recognised(decibel, own, pictures=_is_picture(fitted.data, view))
    return Attacked(
        fitted,
        chosen,
        view,
        result,
        truth,
        pairs,
        decibel,
        recognised | (decibel >= EXACT_DB),
        seconds,
    )


def measured(attacked: Attacked, setting: Setting) -> Measured:
    """What a row keeps of it: no sample, only how well samples were met."""
    result, decibel = attacked.result, attacked.psnr
    right = torch.zeros(len(result.inputs), dtype=torch.bool)
    right[attacked.pairs.found] = decibel >= EXACT_DB
    metrics = {
        "samples": setting.total,
        "found": len(result.inputs),
        "exact": attacked.exact,
        "recovered": int(right.sum()),
        "recognised": int(attacked.recognised.sum()),
        "certified": int(result.certified.sum()),
        "certified_wrong": int((result.certified & ~right).sum()),
        "best": float(decibel.max()) if len(decibel) else None,
        "psnr": float(decibel.mean()) if len(decibel) else None,
        "worst": float(decibel.min()) if len(decibel) else None,
        "batch_size": result.batch_size,
        "proof": result.proof.name,
        "reason": result.reason,
    }
    stages = {name: v for name, v in result.stats.items() if isinstance(v, float)}
    return Measured(result.outcome.name, metrics, attacked.seconds, stages)


def finding(attacked: Attacked, name: str, notes: tuple[str, ...]) -> Finding:
    """The same as evidence, with originals beside recoveries."""
    data, pairs = attacked.fitted.data, attacked.pairs
    k = len(attacked.result.inputs)
    index, decibels = [-1] * k, [float("nan")] * k
    matched = zip(pairs.found.tolist(), pairs.truth.tolist(), attacked.psnr.tolist(), strict=True)
    for i, j, decibel in matched:
        index[i], decibels[i] = j, decibel
    labels = data.labels[attacked.chosen]
    truth = Truth(
        tuple(data.name_of(i) for i in attacked.chosen.tolist()),
        attacked.truth,
        labels if labels.ndim == 1 and not labels.is_floating_point() else None,
        tuple(index),
        tuple(decibels),
    )
    image_format = data.image_format if attacked.shows_data else None
    return Finding.of(attacked.result, name, image_format=image_format, truth=truth, notes=notes)


def _layer_inputs(model: nn.Module, layer: str | None, inputs: Tensor) -> Tensor:
    """What a layer is given (b, n) when the model runs on inputs."""
    seen: list[Tensor] = []
    module = model.get_submodule(layer or "")
    handle = module.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    try:
        with torch.no_grad():
            model(inputs)
    finally:
        handle.remove()
    return seen[0].detach().flatten(1)


def _is_picture(data: PrivateData, view: LayerUpdate) -> bool:
    return (
        data.image_format is not None
        and view.reads_data
        and data.image_format.inputs == view.inputs
    )


def _comparable(
    fitted: Fitted, model: nn.Module, view: LayerUpdate, found: Tensor, truth: Tensor
) -> tuple[Tensor, Tensor]:
    """Recoveries and truth in the unit they are judged in: pixels, or standard deviations."""
    image_format = fitted.data.image_format
    if image_format is not None and _is_picture(fitted.data, view):
        return image_format.pictures(found).flatten(1), image_format.pictures(truth).flatten(1)
    usual = _layer_inputs(model, view.layer, fitted.inputs[:512]).double()
    spread = usual.std(0)
    overall = float(spread.square().mean().sqrt()) or 1.0
    # A feature that hardly varies would count for any error in it.
    unit = torch.where(spread > 1e-3 * overall, spread, overall)
    return found.double() / unit, truth.double() / unit


def _recognised(decibel: Tensor, truth: Tensor, *, pictures: bool) -> Tensor:
    """(p,) bool: which pairs show what the sample was; `truth` (p, n) are their true samples."""
    if not pictures:
        return decibel >= OTHER_DB
    flat = truth.mean(1, keepdim=True).expand_as(truth)
    return (decibel >= PICTURE_DB) & (decibel >= psnr(flat, truth) + BEYOND_FLAT_DB)
