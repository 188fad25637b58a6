"""From files to a report: `spear invert` as a function."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from spear.errors import InvalidFile, NothingToAttack
from spear.files import UpdateFiles, loss_of, not_gradients, observe_files, read_tensors
from spear.inversion import invert
from spear.judge import Proof
from spear.metrics import EXACT_DB
from spear.report.finding import Finding, ImageFormat
from spear.report.report import Report
from spear.report.truth import compare, read_batch

# What the verdict says about a model that was guessed from its weights alone.
_GUESS = {
    Proof.REPLAY: "The replay confirms that it is one.",
    Proof.PATTERN: (
        "Such a model does not reproduce the update: the later layers or the loss differ. Only the "
        "layer was judged; give the model (and the loss) for a proof by replay and for labels."
    ),
    Proof.NONE: (
        "Nothing confirms that: if the model has dropout, normalisation or an activation other than "
        "ReLU, this verdict says little. Give the model."
    ),
}
_OTHER_BATCH = (
    "Proved samples differ from every sample of the truth that was given. Is that really the batch "
    "behind this update? If so, please report a wrong verdict."
)


def invert_files(
    files: UpdateFiles,
    *,
    image_format: ImageFormat | None = None,
    truth: Path | None = None,
    settings: Mapping[str, Any] | None = None,
    **options: Any,
) -> Report:
    """Attack an update on disk, and report on it.

    Args:
        files: where it is.
        image_format: how to show inputs as pictures.
        truth: a file with the client's `inputs` (and `labels`), to compare with; the attack never
            sees it.
        settings: stored in the report, to repeat it.
        options: passed on to `spear.invert`: finder, generator, max_seconds, on_progress, executor.
    """
    began = time.monotonic()
    loss = None if files.loss is None else loss_of(files.loss)
    name = files.path.name
    try:
        view = observe_files(files)
    except NothingToAttack as error:
        found = Finding.not_attacked(name, str(error))
        title = f"What {name} gives away"
        return Report.new("inversion", title, found.headline, [found], settings=settings)
    if image_format is not None:
        image_format.fits(torch.empty(0, view.inputs))  # raises before the attack
    batch = None if truth is None else read_batch(truth)
    if batch is not None and batch[0].shape[1] != view.inputs:
        raise InvalidFile(
            f"{truth}: expected samples of {view.inputs} values, the layer's inputs, got "
            f"{batch[0].shape[1]}"
        )
    result = invert(view, loss=loss, **options)
    if files.weights is not None and not bool(result.certified.any()):
        not_gradients(read_tensors(files.weights), files.weights)
    known = None if batch is None else compare(result.inputs, *batch, image_format=image_format)
    notes = view.notes
    if files.model is None and view.model is not None:
        notes = (*notes, _GUESS[result.proof])
    if known is not None and any(
        sure and not decibel >= EXACT_DB
        for sure, decibel in zip(result.certified.tolist(), known.psnr, strict=True)
    ):
        notes = (*notes, _OTHER_BATCH)
    return Report.of(
        result,
        name,
        image_format=image_format,
        truth=known,
        notes=notes,
        settings=settings,
        seconds=time.monotonic() - began,
    )
