"""How an update came about, as far as it is known: one vocabulary for library, commands and Flower."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self, get_args

import torch
from torch import Tensor, nn

from spear.errors import InvalidOption

Sends = Literal["gradient", "weights", "difference"]
Clipping = Literal["per-sample", "per-layer", "global"]
Reduction = Literal["mean", "sum"]

NOISE_UNITS = ("sigma", "noise_multiplier", "epsilon")
_COUNTS = ("samples", "local_steps", "epochs", "local_batch_size", "clients")
LOCAL_TRAINING = (  # what only local training has
    *("local_steps", "epochs", "local_batch_size", "lr"),
    *("momentum", "nesterov", "weight_decay", "decays_biases", "proximal"),
)
_SMALLEST_PLAUSIBLE = 1e-12  # noise and norms below it, or above its inverse, are slips
_FLOATS = ("float64", "float32", "float16", "bfloat16")
# Optimisers that divide every entry by a scale of its own, or keep only its sign.
ENTRYWISE = {
    *("adam", "adamw", "adamax", "nadam", "radam", "amsgrad", "sparseadam", "rmsprop", "rprop"),
    *("adagrad", "adadelta", "adafactor", "lamb", "lion", "yogi", "signsgd"),
}


@dataclass(frozen=True)
class Protocol:
    """What a client does between the weights it receives and the update it sends. None: not known.

    Args:
        sends: "gradient"; "weights", those after local training; or "difference", these minus those
            received.
        samples: how many the update was computed from: its batch, or all data in local training.
        local_steps: steps of local training; or
        epochs: passes over the samples.
        local_batch_size: samples in one local step; all of them unless given.
        lr: learning rate of the local steps: a number, or one for each step or epoch.
        momentum: of SGD, as in torch.optim.SGD.
        nesterov: likewise.
        weight_decay: likewise.
        decays_biases: does it hold for biases, too? If told wrongly, the update shows it.
        proximal: mu of FedProx.
        optimizer: "sgd" is attacked; others are known by name.
        clip: the norm C that is clipped to.
        clipping: of each sample's gradient ("per-sample", the default for gradients), of each
            parameter's part of it ("per-layer"), or of the whole update ("global").
        sigma: standard deviation of the noise on every entry sent; or
        noise_multiplier: z, where sigma = z C / samples for gradients, and z C for weights and where
            the whole update is clipped; or
        epsilon: the z that has this epsilon.
        precision: of what is sent: float64, float32, float16, bfloat16, or 2-bit to 16-bit.
        pruned: share of the smallest entries that is not sent.
        clients: whose updates the server sees only as a sum (secure aggregation).
        reduction: of the loss over a batch, "mean" or "sum".
        class_weights: of the loss, one per class.
        sample_weights: of the loss, one per sample.

    >>> Protocol(samples=8, clip=1.0, noise_multiplier=0.1).words()
    'b = 8, C = 1, z = 0.1'
    >>> Protocol(sends="weights", lr=0.05, epochs=5).training
    'FedAvg, 5 epochs, lr 0.05'
    """

    sends: Sends = "gradient"
    samples: int | None = None
    local_steps: int | None = None
    epochs: int | None = None
    local_batch_size: int | None = None
    lr: float | tuple[float, ...] | None = None
    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0
    decays_biases: bool = True
    proximal: float = 0.0
    optimizer: str = "sgd"
    clip: float | None = None
    clipping: Clipping | None = None
    sigma: float | None = None
    noise_multiplier: float | None = None
    epsilon: float | None = None
    precision: str = "float32"
    pruned: float = 0.0
    clients: int = 1
    reduction: Reduction = "mean"
    class_weights: tuple[float, ...] | None = None
    sample_weights: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        for name in ("lr", "class_weights", "sample_weights"):
            value = getattr(self, name)
            if isinstance(value, torch.Tensor):
                value = value.tolist()
            if isinstance(value, Sequence) and not isinstance(value, str):
                object.__setattr__(self, name, tuple(value))
        problems = [*self._choices(), *self._ranges()]
        problems = problems or [*self._training_problems(), *self._noise_problems()]
        if problems:
            raise InvalidOption("; ".join(problems), arguments=_NAMES)

    def _choices(self) -> list[str]:
        choices: dict[str, tuple[Any, ...]] = {
            "sends": get_args(Sends),
            "clipping": (None, *get_args(Clipping)),
            "reduction": get_args(Reduction),
        }
        wrong = [
            f"expected {{{name}}} to be one of {', '.join(str(v) for v in values if v)}, got "
            f"{getattr(self, name)!r}"
            for name, values in choices.items()
            if getattr(self, name) not in values
        ]
        if not isinstance(self.optimizer, str) or not self.optimizer:
            wrong.append(f"expected {{optimizer}} to be a name such as sgd, got {self.optimizer!r}")
        if not isinstance(self.precision, str) or (
            self.precision not in _FLOATS and self.bits is None
        ):
            wrong.append(
                f"expected {{precision}} to be {', '.join(_FLOATS)} or 2-bit to 16-bit, got "
                f"{self.precision!r}"
            )
        return wrong

    def _ranges(self) -> list[str]:
        rules: tuple[tuple[tuple[str, ...], str, Callable[[Any], bool]], ...] = (
            (_COUNTS, "{} to be a whole number >= 1", _is_count),
            (("lr", "class_weights", "sample_weights"), "{} > 0", _are_positive),
            (("clip", *NOISE_UNITS), "{} > 0", _is_plausible),
            (("momentum", "pruned"), "0 <= {} < 1", lambda v: _number(v) and 0 <= v < 1),
            (("weight_decay", "proximal"), "{} >= 0", lambda v: _number(v) and v >= 0),
        )
        return [
            f"expected {words.format(f'{{{name}}}')}, got {value!r}"
            for names, words, holds in rules
            for name in names
            if (value := getattr(self, name)) is not _DEFAULTS[name] and not holds(value)
        ]

    def _training_problems(self) -> list[str]:
        found = []
        given = self.given(*LOCAL_TRAINING)
        if self.sends == "gradient" and given:
            named = ", ".join(f"{{{name}}}" for name in given)
            found.append(
                f"{named} belong{'s' * (len(given) == 1)} to local training, whose clients send "
                "weights or a difference; a gradient needs none"
            )
        if self.local_steps is not None and self.epochs is not None:
            found.append("expected {local_steps} or {epochs}, which say the same, not both")
        if self.nesterov and not self.momentum:
            found.append("{nesterov} needs {momentum} > 0")
        if not self.decays_biases and not self.weight_decay:
            found.append("{decays_biases} says which parameters decay: give {weight_decay} > 0")
        rates = len(self.lr) if isinstance(self.lr, tuple) else None
        counts = {self.local_steps or self.epochs, self.steps}
        if rates is not None and (counts == {None} or rates not in counts):
            found.append(
                f"expected one {{lr}} for each step or epoch, got {rates} for "
                f"{self.local_steps or self.epochs or 'an unknown number'}"
            )
        return found

    def _noise_problems(self) -> list[str]:
        found = []
        units = self.given(*NOISE_UNITS)
        if len(units) > 1:
            named = " and ".join(f"{{{unit}}}" for unit in units)
            found.append(f"expected noise in one unit, got {named}")
        counted = units in (["noise_multiplier"], ["epsilon"])
        if self.clip is None and counted:
            found.append(
                f"{{{units[0]}}} scales with a clipping norm, and none was given: "
                "give {clip} (C), or the noise as {sigma}"
            )
        per_sample = self.sends == "gradient" and self.clips != "global"
        if counted and per_sample and self.samples is None:
            found.append(
                f"{{{units[0]}}} is noise in units of C / {{samples}}: give both, or the noise as "
                "{sigma}"
            )
        return found

    @classmethod
    def of(cls, **values: Any) -> Self:
        """The same from loose values: noise of 0 and infinite epsilon are none; local training sends
        weights unless told otherwise, and so do clients that have an optimiser of their own.

        >>> Protocol.of(lr=0.1, sigma=0.0) == Protocol(sends="weights", lr=0.1)
        True
        """
        for name, none in (("sigma", 0), ("noise_multiplier", 0), ("epsilon", math.inf)):
            if values.get(name) == none:
                values[name] = None
        trained = (*LOCAL_TRAINING, "optimizer")
        trains = any(values.get(name) not in (None, _DEFAULTS[name]) for name in trained)
        values.setdefault("sends", "weights" if trains else "gradient")
        return cls(**values)

    def given(self, *names: str) -> list[str]:
        """Those of these fields that differ from their default.

        >>> Protocol(sends="weights", lr=0.1).given("lr", "momentum")
        ['lr']
        """
        return [name for name in names if getattr(self, name) != _DEFAULTS[name]]

    @property
    def is_sgd(self) -> bool:
        return self.optimizer.lower() == "sgd"

    @property
    def mini_batches(self) -> bool:
        """Does a local step take fewer samples than the update? Assumed if nobody knows."""
        return self.local_batch_size is not None and (
            self.samples is None or self.local_batch_size < self.samples
        )

    @property
    def steps(self) -> int | None:
        """Local steps behind one update, as far as known; 1 for a gradient.

        >>> Protocol(sends="weights", lr=0.1, epochs=3, samples=10, local_batch_size=4).steps
        9
        """
        if self.sends == "gradient" or self.local_steps is not None:
            return self.local_steps or 1
        if self.epochs is None:
            return None
        if not self.mini_batches:
            return self.epochs
        if self.samples is None:
            return None
        assert self.local_batch_size is not None
        return self.epochs * math.ceil(self.samples / self.local_batch_size)

    @property
    def one_step(self) -> bool:
        return self.steps == 1

    @property
    def rate(self) -> float:
        """What a difference is divided by: the (mean) learning rate, or 1 if it is unknown."""
        if isinstance(self.lr, tuple):
            return sum(self.lr) / len(self.lr)
        return 1.0 if self.lr is None else self.lr

    def rates(self, steps: int) -> list[float]:
        """The learning rate of each of this many steps.

        >>> Protocol(sends="weights", lr=(0.1, 0.01), epochs=2).rates(4)
        [0.1, 0.1, 0.01, 0.01]
        """
        if not isinstance(self.lr, tuple):
            return [self.rate] * steps
        last = len(self.lr) - 1
        return [self.lr[min(last, i * len(self.lr) // steps)] for i in range(steps)]

    def decays(self, parameter: Tensor) -> bool:
        """Does weight decay hold for this parameter, a matrix or a bias?"""
        return bool(self.weight_decay) and (self.decays_biases or parameter.ndim > 1)

    def weight_decay_factor(self, steps: int, parameter: Tensor) -> float:
        """The share of a parameter that weight decay leaves after this many steps."""
        weight, velocity = 1.0, 0.0
        for rate in self.rates(steps) if self.decays(parameter) else ():
            gradient = self.weight_decay * weight
            velocity = self.momentum * velocity + gradient
            step = gradient + self.momentum * velocity if self.nesterov else velocity
            weight -= rate * step
        return weight

    def optimiser(
        self, parameters: list[nn.Parameter], decaying: list[bool] | None = None
    ) -> torch.optim.SGD:
        """The client's SGD; `decaying` says which parameters decay, unless their shapes do."""
        decaying = [self.decays(p) for p in parameters] if decaying is None else decaying
        groups = [
            {"params": [p], "weight_decay": self.weight_decay * decays}
            for p, decays in zip(parameters, decaying, strict=True)
        ]
        return torch.optim.SGD(groups, lr=self.rate, momentum=self.momentum, nesterov=self.nesterov)

    def local_step(
        self,
        parameters: Mapping[str, nn.Parameter],
        optimiser: torch.optim.Optimizer,
        start: Mapping[str, Tensor],
        rate: float,
    ) -> None:
        """One local step along the parameters' gradients, with FedProx' pull to the start."""
        for group in optimiser.param_groups:
            group["lr"] = rate
        for name, p in parameters.items():
            if self.proximal and p.grad is not None:
                p.grad += self.proximal * (p.detach() - start[name])
        optimiser.step()

    @property
    def bits(self) -> int | None:
        """Of a uniform grid, where the precision is one."""
        named = re.fullmatch(r"(\d{1,2})-bit", self.precision)
        count = int(named[1]) if named else 0
        return count if 2 <= count <= 16 else None

    @property
    def coarse(self) -> bool:
        """Is what is sent pruned, or rounded to less than float32?"""
        return self.precision not in ("float32", "float64") or self.pruned > 0

    @property
    def clips(self) -> Clipping | None:
        """What is clipped: as told, or as usual for what is sent."""
        if self.clip is None or self.clipping is not None:
            return self.clipping
        return "per-sample" if self.sends == "gradient" else "global"

    @property
    def total(self) -> int | None:
        """Samples behind what the server sees: those of all clients it cannot tell apart."""
        return None if self.samples is None else self.samples * self.clients

    @property
    def undefended(self) -> Self:
        """The same with nothing done to the update."""
        names = ("clip", "clipping", *NOISE_UNITS, "precision", "pruned")
        return dataclasses.replace(self, **{name: _DEFAULTS[name] for name in names})

    @property
    def defended(self) -> bool:
        """Is anything done to the update, or is it hidden among others?"""
        return self != self.undefended or self.clients > 1

    @property
    def training(self) -> str:
        """Local training in words."""
        if self.sends == "gradient":
            return "FedSGD"
        parts = ["FedAvg"]
        for count, word in ((self.epochs, "epoch"), (self.local_steps, "step")):
            if count is not None:
                parts.append(f"{count} {word}{'s' * (count > 1)}")
        if self.lr is not None:
            several = isinstance(self.lr, tuple)
            parts.append(f"lr {self.rate:g}{' on average' * several}")
        if self.local_batch_size is not None:
            parts.append(f"steps of {self.local_batch_size}")
        return ", ".join(parts)

    def words(self, base: Protocol | None = None) -> str:
        """What it is, or how it differs from `base`."""
        return ", ".join(self._parts(base)) or "base"

    def _parts(self, base: Protocol | None) -> list[str]:
        """The same, piece by piece."""
        values = _DEFAULTS if base is None else {n: getattr(base, n) for n in _NAMES}
        shown = {name for name in _NAMES if getattr(self, name) != values[name]}
        parts = [f"b = {self.samples}"] if "samples" in shown else []
        if shown & {"sends", "epochs", "local_steps", "lr", "local_batch_size"}:
            parts.append(self.training)
        for name in ("momentum", "weight_decay", "proximal"):
            if name in shown:
                parts.append(f"{name.replace('_', ' ')} {getattr(self, name):g}")
        if "clip" in shown:
            parts.append("not clipped" if self.clip is None else f"C = {self.clip:g}")
        if shown & set(NOISE_UNITS):
            letters = dict(zip(NOISE_UNITS, "σzε", strict=True))
            told = [
                f"{a} = {v:g}" for n, a in letters.items() if (v := getattr(self, n)) is not None
            ]
            parts.append(", ".join(told) or "no noise")
        parts += [self.precision] if "precision" in shown else []
        if "pruned" in shown:
            parts.append(f"{self.pruned:.0%} pruned" if self.pruned else "not pruned")
        parts += [f"{self.clients} clients aggregated"] if "clients" in shown else []
        return parts


_DEFAULTS: Mapping[str, Any] = {f.name: f.default for f in dataclasses.fields(Protocol)}
_NAMES = tuple(_DEFAULTS)


def _number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _is_plausible(value: Any) -> bool:
    return _number(value) and _SMALLEST_PLAUSIBLE <= value <= 1 / _SMALLEST_PLAUSIBLE


def _are_positive(value: Any) -> bool:
    return all(_number(v) and v > 0 for v in (value if isinstance(value, tuple) else (value,)))


UNKNOWN_PROTOCOL = Protocol()
"""A gradient of which nothing else is known."""
