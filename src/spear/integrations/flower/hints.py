"""What to tell a user whose options do not fit what clients send, or who gave none."""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import Tensor

from spear.integrations.flower.training import Sends, Training
from spear.inversion import Inversion, Outcome
from spear.report import Look
from spear.update import LayerUpdate

# Layers that are as wide as the pictures people train on: MNIST, CIFAR, Tiny ImageNet, ImageNet.
_PICTURES = {
    784: (1, 28, 28),
    3072: (3, 32, 32),
    12288: (3, 64, 64),
    150528: (3, 224, 224),
}
_UNIT = (-0.1, 1.1)  # values of pictures that nobody normalised, with some error
_NEAR = 0.9  # cosine: weights after training and before it; 0.99 and more is usual
_FAR = 0.5  # a step as long as the weights themselves leaves 0.7; gradients have about 0
_LONGEST = 200  # characters of a client's own words
_ANSI = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")


def unlike(sends: Sends, before: Mapping[str, Tensor], sent: Mapping[str, Tensor]) -> str | None:
    """Why what was sent cannot be what `sends=` says, if it looks like something else."""
    names = [name for name, value in before.items() if name in sent and value.is_floating_point()]
    if not names:
        return None
    old = torch.cat([before[name].flatten().double() for name in names])
    new = torch.cat([sent[name].flatten().double() for name in names])
    if not (old.any() and new.any()):
        return None
    cosine = float(torch.cosine_similarity(old, new, dim=0))
    kept = float(
        old @ new / (old @ old)
    )  # about 1 of weights, also under noise that turns them far
    if sends == "weights" and cosine < _FAR and kept < 0.5:
        return (
            "the reply is nowhere near the weights that the client was sent (cosine "
            f"{cosine:.2f}), so it looks like a delta or a gradient: say sends='delta' or "
            "sends='gradient'"
        )
    if sends != "weights" and cosine > _NEAR and 0.5 < kept < 2:
        return (
            f"the reply is nearly the weights that the client was sent (cosine {cosine:.2f}), so it "
            f"looks like weights, no {sends}: say sends='weights'"
        )
    return None


def guessed_look(view: LayerUpdate, inputs: Tensor) -> tuple[Look | None, list[str]]:
    """How recovered inputs may look, where nobody said it, and the words that admit it."""
    shape = _PICTURES.get(view.inputs)
    if shape is None or not view.reads_data or not len(inputs):
        return None, []
    low, high = _UNIT
    unit = float(((inputs >= low) & (inputs <= high)).double().mean()) >= 0.99
    look = Look(shape) if unit else Look(shape, mean=(0.5,), std=(0.25,))
    scale = "values as they are" if unit else "normalisation unknown, mean 0.5 and std 0.25 assumed"
    size = " x ".join(map(str, shape))
    return look, [f"shown as {size} pictures, {scale}: a guess, which look= replaces"]


def what_to_tell(
    result: Inversion, view: LayerUpdate, training: Training, examples: float | None
) -> list[str]:
    """Options that would explain an update which nothing was proved of."""
    if result.outcome is Outcome.EXACT or training.sends == "gradient":
        return []
    said = []
    untold = [f"{name}=" for name in training.untold]
    if untold:
        said.append(f"{', '.join(untold)} if clients use them: untold, they look like noise")
    if training.epochs is None:
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
