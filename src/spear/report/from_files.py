"""From files to a report: `spear invert` as a function."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from spear.data import Column
from spear.errors import InvalidFile, InvalidOption, NothingToAttack
from spear.files import UpdateFiles, loss_of, not_gradients, observe_rounds, read_tensors
from spear.inversion import invert
from spear.judge import Cause, Proof
from spear.metrics import EXACT_DB
from spear.report.columns import check_columns
from spear.report.finding import Finding, ImageFormat
from spear.report.report import Report
from spear.report.truth import compare, read_batch
from spear.search import Progress
from spear.update import LayerUpdate

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
_UNREPEATED = (
    "The update was not computed again from it, since the order of the client's mini-batches is not "
    "known: only the layer was judged."
)
_OTHER_BATCH = (
    "Proved samples differ from every sample of the truth that was given. Is that really the batch "
    "behind this update? If so, please report a wrong verdict."
)

_SHOWN = 12  # rounds that are named


def invert_files(
    files: UpdateFiles | Sequence[UpdateFiles],
    *,
    image_format: ImageFormat | None = None,
    truth: Path | None = None,
    columns: Sequence[Column] = (),
    settings: Mapping[str, Any] | None = None,
    **options: Any,
) -> Report:
    """Attack an update on disk, or several rounds of the same data, and report on it.

    Args:
        files: where it is; or one for each round, which differ in nothing but their files.
        image_format: how to show inputs as pictures.
        truth: a file with the client's `inputs` (and `labels`), to compare with; the attack never
            sees it.
        columns: what the inputs are called, if they are rows of a table: see `columns_of`.
        settings: stored in the report, to repeat it.
        options: passed on to `spear.invert`: finder, generator, max_seconds, on_progress, executor.
    """
    began = time.monotonic()
    rounds = (files,) if isinstance(files, UpdateFiles) else tuple(files)
    if not rounds:
        raise InvalidOption("expected at least one round, got none")
    name, title, settings = _named(rounds, settings)
    loss = None if rounds[0].loss is None else loss_of(rounds[0].loss)
    tell = options.get("on_progress")
    try:
        view = observe_rounds(rounds, lambda words: tell(Progress(words)) if tell else None)
    except NothingToAttack as error:
        found = Finding.not_attacked(name, str(error))
        return Report.new("inversion", title, found.headline, [found], settings=settings)
    if image_format is not None:
        image_format.fits(torch.empty(0, view.inputs))  # raises before the attack
    if columns:
        check_columns(columns, torch.empty(0, view.inputs))
    batch = None if truth is None else read_batch(truth)
    if batch is not None and batch[0].shape[1] != view.inputs:
        raise InvalidFile(
            f"{truth}: expected samples of {view.inputs} values, the layer's inputs, got "
            f"{batch[0].shape[1]}"
        )
    result = invert(view, loss=loss, **options)
    for path in (each.weights for each in rounds if not bool(result.certified.any())):
        if path is not None:
            not_gradients(read_tensors(path), path)
    known = None if batch is None else compare(result.inputs, *batch, image_format=image_format)
    notes = _notes(rounds, view)
    stopped = result.cause is Cause.INTERRUPTED  # which says nothing about the model
    if rounds[0].model is None and view.model is not None and not stopped:
        steps = isinstance(view, LayerUpdate) and view.trained and not view.protocol.one_step
        unrepeated = steps and result.proof is Proof.PATTERN
        notes = (*notes, _UNREPEATED if unrepeated else _GUESS[result.proof])
    if known is not None and any(
        sure and not decibel >= EXACT_DB
        for sure, decibel in zip(result.certified.tolist(), known.psnr, strict=True)
    ):
        notes = (*notes, _OTHER_BATCH)
    return Report.of(
        result,
        name,
        title=title,
        image_format=image_format,
        truth=known,
        notes=notes,
        columns=columns,
        settings=settings,
        seconds=time.monotonic() - began,
    )


def _named(
    rounds: Sequence[UpdateFiles], settings: Mapping[str, Any] | None
) -> tuple[str, str, dict[str, Any]]:
    """What was attacked, the title of its report, and the settings with the files of all rounds."""
    if len(rounds) == 1:
        name = rounds[0].path.name
        return name, f"What {name} gives away", dict(settings or {})
    name = f"{len(rounds)} rounds"
    files = [f"{each.weights} {each.path}" for each in rounds]
    return name, f"What {name} give away", {**(settings or {}), "rounds": files}


def _notes(rounds: Sequence[UpdateFiles], view: LayerUpdate) -> tuple[str, ...]:
    """The view's notes, and which round is which; the verdict's details name those left out."""
    if len(rounds) == 1:
        return view.notes
    own = [each.path.parent.name for each in rounds]
    if len(set(own)) < len(own):
        own = [each.path.name for each in rounds]
    if len(own) > _SHOWN:
        own = [*own[: _SHOWN - 1], "...", own[-1]]
    order = f"The rounds, in their order: {', '.join(own)}."
    known = () if view.rounds is None else view.rounds.left_out
    return (order, *(note for note in view.notes if note not in known))
