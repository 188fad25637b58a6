"""What to tell a user whose options do not fit what clients send, or who gave none."""

from __future__ import annotations

import re

from torch import Tensor

from spear.integrations.flower.training import untold
from spear.inversion import Inversion, Outcome
from spear.report import ImageFormat
from spear.update import LayerUpdate

# Layers that are as wide as the pictures people train on: MNIST, CIFAR, Tiny ImageNet, ImageNet.
_PICTURES = {
    784: (1, 28, 28),
    3072: (3, 32, 32),
    12288: (3, 64, 64),
    150528: (3, 224, 224),
}
_UNIT = (-0.1, 1.1)  # values of pictures that nobody normalised, with some error
_LONGEST = 200  # characters of a client's own words
_ANSI = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")


def guessed_format(view: LayerUpdate, inputs: Tensor) -> tuple[ImageFormat | None, list[str]]:
    """How recovered inputs may look, where nobody said it, and the words that admit it."""
    shape = _PICTURES.get(view.inputs)
    if shape is None or not view.reads_data or not len(inputs):
        return None, []
    low, high = _UNIT
    unit = float(((inputs >= low) & (inputs <= high)).double().mean()) >= 0.99
    image_format = ImageFormat(shape) if unit else ImageFormat(shape, mean=(0.5,), std=(0.25,))
    scale = "values as they are" if unit else "normalisation unknown, mean 0.5 and std 0.25 assumed"
    size = " x ".join(map(str, shape))
    return image_format, [
        f"shown as {size} pictures, {scale}: a guess, which image_format= replaces"
    ]


def what_to_tell(result: Inversion, view: LayerUpdate, examples: float | None) -> list[str]:
    """Options that would explain an update which nothing was proved of."""
    if result.outcome is Outcome.EXACT or not view.trained:
        return []
    said = []
    names = [f"{name}=" for name in untold(view.protocol)]
    if names:
        said.append(f"{', '.join(names)} if clients use them: untold, they look like noise")
    if view.protocol.steps is None:
        said.append(
            "Flower apps keep local epochs in the run config, which messages do not carry: "
            'Audited(..., epochs=context.run_config["local-epochs"])'
        )
    width = min(view.outputs, view.inputs)
    seen = width if result.batch_size is None else result.batch_size
    if examples is not None and examples < seen:  # epochs add none while inputs stay the same
        moved = "augmented anew each time" if view.reads_data else "moved between local steps"
        shows = f"{width} or more" if seen == width else str(seen)
        said.append(
            f"the client reports {_samples(examples)}, but the update looks like one of {shows}: it "
            "carries noise, or weight decay (weight_decay=), or comes from an optimiser such as Adam "
            f"(say optimizer=), or the layer's inputs were {moved}"
        )
    return said


def first_line(words: str) -> str:
    """Somebody's error in one short line, without the colours of a terminal."""
    lines = [line.strip() for line in _ANSI.sub("", words).splitlines()]
    line = next((line for line in lines if line), "it gave no reason")
    return line if len(line) <= _LONGEST else line[: _LONGEST - 3].rstrip() + "..."


def _samples(count: float) -> str:
    return "1 sample" if count == 1 else f"{count:g} samples"
