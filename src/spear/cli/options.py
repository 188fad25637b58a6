"""Options that say how an update came to be: one name and one meaning in all commands.

They are called as the fields of `spear.update.Protocol` and `spear.federated.Privacy` are.
`Samples` is one value, `ManySamples` a list of them, for `spear audit`.
"""

from __future__ import annotations

from typing import Annotated, Any

import typer

from spear.cli.console import MOST_TRIALS, as_option
from spear.errors import InvalidOption

HOW, DEFENCES = "How clients train", "What they do to updates"
VARIED, COUNTED = "What is varied (lists: 8,16,32)", "How epsilon is counted"

_HELP = {
    "samples": "Samples of one update: the batch, or with local training all of a client's.",
    "epochs": "Local epochs, or",
    "local_steps": "local steps.",
    "local_batch_size": "Samples a local step.",
    "lr": "Local learning rate; 0.1,0.01 is one for each step or epoch.",
    "momentum": "Of SGD.",
    "nesterov": "Nesterov's momentum.",
    "weight_decay": "Of SGD.",
    "proximal": "FedProx' mu.",
    "optimizer": "Local optimiser.",
    "clients": "Whose updates the server sees added up only.",
    "clip": "Norm C that is clipped to: per sample (gradients), of the whole update (weights).",
    "clipping": "per-sample, per-layer or global, if it is another.",
    "sigma": "Noise on an entry of what is sent, or",
    "noise_multiplier": "z, with sigma = z C / samples (gradients) or z C (weights), or",
    "epsilon": "the z that has this epsilon.",
    "precision": "float32, float16, bfloat16, 8-bit, ...",
    "pruned": "Share of the smallest entries that is not sent.",
    "delta": "Of (epsilon, delta).",
    "dataset_size": "Of a client; its batch is all it has unless given.",
    "steps": "Updates of a client that the server sees.",
}
_LISTED = {
    "samples": "Samples of a client.",
    "epochs": "Of local training (FedAvg); 0 is FedSGD.",
    "lr": "Of local training; 0.05.",
    "clip": "Norm C, or none: per sample (FedSGD), of the whole update (FedAvg).",
    "epsilon": "the z that has this epsilon; inf is none.",
}


def _one(name: str, *short: str, panel: str = HOW, **limits: Any) -> Any:
    return typer.Option(as_option(name), *short, help=_HELP[name], rich_help_panel=panel, **limits)


def _many(name: str, *short: str) -> Any:
    words = _LISTED.get(name, _HELP[name])
    return typer.Option(as_option(name), *short, help=words, rich_help_panel=VARIED)


Samples = Annotated[int | None, _one("samples", "-b")]
Lr = Annotated[str | None, _one("lr")]
Epochs = Annotated[int | None, _one("epochs")]
LocalSteps = Annotated[int | None, _one("local_steps")]
LocalBatchSize = Annotated[int | None, _one("local_batch_size")]
Momentum = Annotated[float, _one("momentum")]
Nesterov = Annotated[bool, _one("nesterov")]
WeightDecay = Annotated[float, _one("weight_decay")]
Proximal = Annotated[float, _one("proximal")]
Optimizer = Annotated[str, _one("optimizer")]
Clients = Annotated[int, _one("clients")]

Clip = Annotated[float | None, _one("clip", panel=DEFENCES)]
Clipping = Annotated[str | None, _one("clipping", panel=DEFENCES)]
Sigma = Annotated[float | None, _one("sigma", panel=DEFENCES)]
NoiseMultiplier = Annotated[float | None, _one("noise_multiplier", panel=DEFENCES)]
Epsilon = Annotated[float | None, _one("epsilon", panel=DEFENCES)]
Precision = Annotated[str, _one("precision", panel=DEFENCES)]
Pruned = Annotated[float, _one("pruned", panel=DEFENCES)]

Delta = Annotated[float, _one("delta", panel=COUNTED)]
DatasetSize = Annotated[int | None, _one("dataset_size", panel=COUNTED, min=1)]
Steps = Annotated[int, _one("steps", panel=COUNTED, min=1, max=MOST_TRIALS)]

ManySamples = Annotated[str | None, _many("samples", "-b")]
ManyEpochs = Annotated[str | None, _many("epochs")]
ManyLocalBatchSizes = Annotated[str | None, _many("local_batch_size")]
ManyLrs = Annotated[str | None, _many("lr")]
ManyClips = Annotated[str | None, _many("clip")]
ManySigmas = Annotated[str | None, _many("sigma")]
ManyNoiseMultipliers = Annotated[str | None, _many("noise_multiplier")]
ManyEpsilons = Annotated[str | None, _many("epsilon")]
ManyPrecisions = Annotated[str | None, _many("precision")]
ManyPruned = Annotated[str | None, _many("pruned")]
ManyClients = Annotated[str | None, _many("clients")]


def rates(text: str | None) -> float | tuple[float, ...] | None:
    """A learning rate, or several.

    >>> rates("0.1"), rates("0.1,0.01"), rates(None)
    (0.1, (0.1, 0.01), None)
    """
    if text is None:
        return None
    try:
        found = tuple(float(part) for part in text.split(","))
    except ValueError as error:
        raise InvalidOption(
            f"expected {{lr}} as a number, or several like 0.1,0.01, got {text!r}", arguments=["lr"]
        ) from error
    return found[0] if len(found) == 1 else found
