"""Options that say how an update came to be: one name and one meaning in all commands.

They have the names of the fields of `spear.update.Protocol` and `spear.federated.Privacy`.
`Samples` takes one value, `ManySamples` a list of values (for `spear audit`).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import click
import typer

from spear.cli.console import MOST_TRIALS, as_option
from spear.errors import InvalidOption

WRITE = "What to write"
HOW, DEFENCES = "How clients train", "What clients do to an update before they send it"
VARIED, COUNTED = "What is varied (lists: 8,16,32)", "How epsilon is computed"

_HELP = {
    "samples": "Samples in the update: the batch, or all that the client trained on.",
    "epochs": "Local epochs; or give --local-steps.",
    "local_steps": "Local steps; or give --epochs.",
    "local_batch_size": "Samples in one local step.",
    "lr": "Local learning rate; 0.1,0.01 gives one for each step or epoch.",
    "momentum": "Momentum of SGD.",
    "nesterov": "SGD uses Nesterov momentum.",
    "weight_decay": "Weight decay of SGD.",
    "proximal": "The mu of FedProx.",
    "optimizer": "Local optimiser.",
    "clients": "Clients whose updates are summed before the server sees them.",
    "clip": "Clipping norm C: per sample (gradients), or of the whole update (weights).",
    "clipping": "Clip otherwise: per-sample, per-layer or global.",
    "sigma": "Standard deviation of the noise on each entry sent.",
    "noise_multiplier": "Or z, with sigma = z C / samples (gradients) or z C (weights).",
    "epsilon": "Or the epsilon to reach.",
    "precision": "How entries are sent: float32, float16, bfloat16, 8-bit, ...",
    "pruned": "Share of the smallest entries that is left out.",
    "delta": "The delta of (epsilon, delta).",
    "dataset_size": "Samples that a client holds; by default only its batch.",
    "steps": "Updates of one client that the server sees.",
}
_OF_PRIVACY = ("delta", "dataset_size", "steps")
_LISTED = {
    "samples": "Samples of a client.",
    "epochs": "Local epochs (FedAvg); 0 is FedSGD.",
    "lr": "Local learning rate; 0.05 unless given.",
    "clip": "Clipping norm C, or none: per sample (FedSGD), of the whole update (FedAvg).",
    "epsilon": "Or the epsilon to reach; inf means no noise.",
}


def option(panel: str, words: str, *names: str, **limits: Any) -> Any:
    """An option with its help, in one panel of the page that --help shows."""
    return typer.Option(*names, help=words, rich_help_panel=panel, **limits)


def _one(name: str, *short: str, panel: str = HOW, **limits: Any) -> Any:
    return option(panel, _HELP[name], as_option(name), *short, **limits)


def _many(name: str, *short: str) -> Any:
    return option(VARIED, _LISTED.get(name, _HELP[name]), as_option(name), *short)


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


FAIL_ON = ("exact", "partial", "approximate", "inconclusive")  # the worst first
Junit = Annotated[Path | None, option(WRITE, "The verdicts as JUnit XML, without data.")]
Sarif = Annotated[Path | None, option(WRITE, "What leaks, or may, as SARIF 2.1.0, without data.")]
FailOn = Annotated[
    str | None,
    option(
        WRITE,
        f"Exit with 1 if a verdict is this bad or worse, else with 0: {', '.join(FAIL_ON)}.",
        "--fail-on",
        click_type=click.Choice(FAIL_ON),
        metavar="LEVEL",
    ),
]


def of_protocol(options: Mapping[str, Any]) -> dict[str, Any]:
    """Of a command's options, by their names, those that are fields of `Protocol`."""
    names = [name for name in _HELP if name in options and name not in _OF_PRIVACY]
    return {**{name: options[name] for name in names}, "lr": rates(options["lr"])}


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
