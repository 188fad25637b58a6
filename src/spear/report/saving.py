"""Recovered samples as files: as tensors, and as pictures if they are pictures."""

from __future__ import annotations

from pathlib import Path

import torch

from spear.errors import MissingExtra
from spear.files import write_all_private
from spear.report import pictures
from spear.report.finding import Finding


def save_inputs(finding: Finding, folder: Path) -> list[Path]:
    """Write `recovered.safetensors`, and `sample-01.png` ... if the finding has an image format.

    The tensors are `inputs` (k, n), `certified` and `approximate` (k,) and, if known, `labels`
    (k,), -1 for unknown ones. If nothing was recovered, nothing is written.
    """
    try:
        from safetensors.torch import save
    except ImportError as error:
        raise MissingExtra("safetensors", "cli") from error
    if finding.inputs is None or not finding.recovered:
        return []
    tensors = {
        "inputs": finding.inputs.contiguous(),
        "certified": torch.tensor(finding.certified),
        "approximate": torch.tensor(finding.approximate),
    }
    if finding.labels is not None:
        tensors["labels"] = finding.labels
    contents = {"recovered.safetensors": save(tensors)}
    if finding.image_format is not None:
        digits = max(2, len(str(finding.recovered)))
        for i, image in enumerate(finding.image_format.pictures(finding.inputs), 1):
            contents[f"sample-{i:0{digits}}.png"] = pictures.png(image)
    written = [folder / name for name in contents]
    write_all_private(dict(zip(written, contents.values(), strict=True)))
    return written[:1] if len(written) == 1 else [written[0], folder / "sample-*.png"]
