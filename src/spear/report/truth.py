"""Ground truth to compare a recovery with, if the auditor has it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from spear.errors import InvalidFile, InvalidOption
from spear.files import read_tensors
from spear.metrics import assign, psnr
from spear.report.finding import ImageFormat, Truth

_INPUTS, _LABELS = ("inputs", "x", "X", "data", "images"), ("labels", "y", "Y", "targets")


def read_batch(path: Path) -> tuple[Tensor, Tensor | None]:
    """The samples in a file, one per row, and their labels if it has any."""
    tensors = read_tensors(path)
    inputs = next((tensors[name] for name in _INPUTS if name in tensors), None)
    labels = next((tensors[name] for name in _LABELS if name in tensors), None)
    if inputs is None and len(tensors) <= 2 and "0" in tensors:  # a list: inputs, labels
        inputs, labels = tensors["0"], tensors.get("1")
    if inputs is None or inputs.ndim < 2 or not len(inputs):
        raise InvalidFile(
            f"{path}: expected an array 'inputs' (samples, ...), and 'labels' if known, got "
            f"{', '.join(f'{name!r} {tuple(t.shape)}' for name, t in list(tensors.items())[:6])}"
        )
    if labels is not None and (not labels.ndim or labels.numel() != len(inputs)):
        raise InvalidFile(
            f"{path}: expected a label for each of {len(inputs)} inputs, got {tuple(labels.shape)}"
        )
    if not bool(inputs.isfinite().all()):
        raise InvalidFile(f"{path}: expected the client's samples, got NaN or infinite values")
    return inputs.flatten(1), labels


def compare(
    recovered: Tensor,
    inputs: Tensor,
    labels: Tensor | None = None,
    *,
    names: Sequence[str] | None = None,
    image_format: ImageFormat | None = None,
) -> Truth:
    """Which true sample each recovered one matches, and how closely.

    With an `image_format`, PSNR is of pictures in [0, 1]; otherwise it is relative to the range of the
    true inputs.

    Args:
        recovered: (k, n).
        inputs: (b, n), the truth.
        labels: (b,).
        names: (b,) names of the samples; numbered unless given.
        image_format: how inputs become pictures.
    """
    if inputs.shape[1] != recovered.shape[1]:
        raise InvalidOption(
            f"expected true samples of {recovered.shape[1]} values, one per input of the layer, got "
            f"{inputs.shape[1]}"
        )
    if image_format is not None:
        found, true = (image_format.pictures(rows).flatten(1) for rows in (recovered, inputs))
    else:
        true = inputs.double()
        span = float(true.max() - true.min()) or 1.0
        found, true = recovered.double() / span, true / span
    pairs = assign(found, true)
    index, decibels = [-1] * len(found), [float("nan")] * len(found)  # surplus samples match none
    scores = psnr(found[pairs.found], true[pairs.truth]).tolist()
    for i, j, decibel in zip(pairs.found.tolist(), pairs.truth.tolist(), scores, strict=True):
        index[i], decibels[i] = j, decibel
    return Truth(
        tuple(names or (f"original {i}" for i in range(1, len(inputs) + 1))),
        inputs.cpu(),
        None if labels is None else labels.flatten().long().cpu(),
        tuple(index),
        tuple(decibels),
    )
