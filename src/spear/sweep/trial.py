"""One trial of a sweep: a fresh private batch, the update, the attack, and how well it did."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from spear.factors import combine
from spear.federated import play_rounds, split
from spear.judge import Cause
from spear.metrics import EXACT_DB, psnr
from spear.search import Progress
from spear.sweep.setting import Setting
from spear.sweep.subject import Fitted, Subject
from spear.trials import Batch, Compared, attack, compare

# From here on a picture counts as recognisable: its error is a tenth of the range from black to white,
# as at the noise sigma = 1e-4 of the paper, whose pictures are still recognisable.
PICTURE_DB = 20.0
# One flat colour matches a sky or a black corner to 20 dB. To count, a recovery must beat the best
# flat colour by this much, that is, halve its error.
BEYOND_FLAT_DB = 6.0
# Other data is measured in standard deviations of each feature: 10 dB is an error of 0.32 deviations,
# which TabLeak counts as right; guessing the mean of the data gives 0 dB.
OTHER_DB = 10.0


def attacked(
    subject: Subject,
    setting: Setting,
    seed: int,
    *,
    max_seconds: float | None,
    on_progress: Callable[[Progress], None] | None = None,
) -> Compared:
    """Draw batch and weights by the seed, let the clients send, invert the update and compare.

    With several rounds the clients send as many updates of the same batch, which are inverted together.
    """
    model = subject.attacked_model(setting.width, seed)
    fitted = subject.fitted(model)
    data, chosen = fitted.data, fitted.draw(setting.total, seed)
    x, y = fitted.inputs[chosen], fitted.targets[chosen]
    generator = torch.Generator().manual_seed(seed)
    played = play_rounds(
        model,
        [split(x, y, setting)] * setting.rounds,
        setting,
        server_lr=subject.server_lr,
        loss=fitted.loss,
        generator=generator,
    )
    views = (sent.view(moved) for moved, sent in played)
    found = attack(
        next(views) if setting.rounds == 1 else combine(views),
        None,  # each view has the model of its round
        loss=fitted.told,
        generator=generator,
        max_seconds=max_seconds,
        on_progress=on_progress,
    )
    names = [data.name_of(i) for i in chosen.tolist()]
    batch = Batch(x, data.labels[chosen], model, data.image_format, names, data.columns)
    view, shown = found.view, data.image_format
    pictures = shown is not None and view.reads_data and shown.inputs == view.inputs
    truth = _layer_inputs(model, view.layer, x)
    return compare(
        batch, found, truth, unit=None if pictures else _usual_spread(fitted, model, view.layer)
    )


def metrics(compared: Compared) -> dict[str, Any]:
    """What a row of a sweep keeps."""
    found = compared.score.psnr
    return {
        **compared.metrics,
        "samples": len(compared.truth),
        "found": len(compared.attacked.result.inputs),
        "rounds_used": compared.attacked.result.rounds,
        "recognised": int(recognised(compared).sum()),
        "best": float(found.max()) if len(found) else None,
        "out_of_time": compared.attacked.result.cause is Cause.TIME,
    }


def recognised(compared: Compared) -> Tensor:
    """(p,) bool: for which pairs the sample can be recognised."""
    score = compared.score
    if not compared.pictures:
        return score.psnr >= OTHER_DB
    truth = compared.batch.pixels(compared.truth).flatten(1)[score.pairs.truth]  # (p, n)
    return is_clear(score.psnr, truth) | (score.psnr >= EXACT_DB)


def is_clear(decibel: Tensor, truth: Tensor) -> Tensor:
    """(p,) bool: which pictures (p, n) are recognisable, and clearly better than a flat colour."""
    flat = truth.mean(1, keepdim=True).expand_as(truth)
    return (decibel >= PICTURE_DB) & (decibel >= psnr(flat, truth) + BEYOND_FLAT_DB)


def _layer_inputs(model: nn.Module, layer: str | None, inputs: Tensor) -> Tensor:
    """A layer's inputs (b, n) when the model runs on these inputs."""
    seen: list[Tensor] = []
    module = model.get_submodule(layer or "")
    handle = module.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    try:
        with torch.no_grad():
            model(inputs)
    finally:
        handle.remove()
    return seen[0].detach().flatten(1)


def _usual_spread(fitted: Fitted, model: nn.Module, layer: str | None) -> Tensor:
    """(n,) standard deviations of a layer's inputs."""
    spread = _layer_inputs(model, layer, fitted.inputs[:512]).double().std(0)
    overall = float(spread.square().mean().sqrt()) or 1.0
    # A feature that hardly varies would turn any error in it into a large one.
    return torch.where(spread > 1e-3 * overall, spread, overall)
