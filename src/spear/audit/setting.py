"""What a client does before it sends: local training, clipping, noise, precision, aggregation."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from spear.errors import InvalidOption, MissingExtra

DEFAULT_LR = 0.05  # of local training, where epochs are given without a rate
_WIDEST = 100_000  # a slip beyond it would fill the memory
_HALVES = ("float16", "bfloat16")
_NOISE = ("sigma", "noise_multiplier", "epsilon")


@dataclass(frozen=True)
class Setting:
    """One protocol that is audited. Noise comes in one of three units, or not at all.

    Args:
        batch_size: samples of one client.
        width: given to the model's factory; None leaves it as it is.
        epochs: of local training (FedAvg); None is FedSGD, one gradient.
        local_batch_size: samples of a local step; all of them unless given.
        lr: of local training.
        clip: C. FedSGD clips each sample's gradient (DP-SGD), FedAvg the client's whole update.
        sigma: standard deviation of the noise on every entry of what is sent; or
        noise_multiplier: z, with sigma = z C / batch size (FedSGD) or z C (FedAvg); or
        epsilon: the z that has this epsilon (see `Privacy`).
        precision: float32, float16, bfloat16, quantise-BITS or prune-SHARE.
        clients: whose updates the server sees added up only (secure aggregation).

    >>> Setting(batch_size=8, clip=1.0, noise_multiplier=0.1).words()
    'b = 8, C = 1, z = 0.1'
    """

    batch_size: int = 8
    width: int | None = None
    epochs: int | None = None
    local_batch_size: int | None = None
    lr: float | None = None
    clip: float | None = None
    sigma: float | None = None
    noise_multiplier: float | None = None
    epsilon: float | None = None
    precision: str = "float32"
    clients: int = 1

    def __post_init__(self) -> None:
        problems = [*self._out_of_range(), *self._contradictions()]
        if problems:
            raise InvalidOption("; ".join(problems))

    @staticmethod
    def of(**values: Any) -> Setting:
        """The same from loose values: no noise, 0 epochs and a rate without epochs are understood.

        >>> Setting.of(epochs=0, sigma=0.0) == Setting()
        True
        """
        if values.get("epochs") == 0:
            values["epochs"] = None
        elif values.get("lr") is not None and values.get("epochs") is None:
            values["epochs"] = 1
        if values.get("epochs") is None:  # the base of a sweep may have them, its FedSGD not
            values |= {"lr": None, "local_batch_size": None}
        elif values.get("lr") is None:
            values["lr"] = DEFAULT_LR
        for name, none in (("sigma", 0), ("noise_multiplier", 0), ("epsilon", math.inf)):
            if values.get(name) == none:
                values[name] = None
        return Setting(**values)

    def _out_of_range(self) -> list[str]:
        wholes = ("batch_size", "width", "epochs", "local_batch_size", "clients")
        positive = ("lr", "clip", "sigma", "noise_multiplier", "epsilon")
        wrong = [
            f"expected {name} to be a whole number >= 1, got {value!r}"
            for name in wholes
            if (value := getattr(self, name)) is not None
            and (not isinstance(value, int) or isinstance(value, bool) or value < 1)
        ]
        if isinstance(self.width, int) and self.width > _WIDEST:
            wrong.append(f"expected width <= {_WIDEST:,}, got {self.width:,}")
        wrong += [
            f"expected {name} > 0, got {value!r}"
            for name in positive
            if (value := getattr(self, name)) is not None
            and (not isinstance(value, int | float) or not 0 < value < math.inf)
        ]
        try:
            precision(self.precision)
        except InvalidOption as error:
            wrong.append(str(error))
        return wrong

    def _contradictions(self) -> list[str]:
        found = []
        units = [name for name in _NOISE if getattr(self, name) is not None]
        if len(units) > 1:
            found.append(f"expected noise in one unit, got {' and '.join(units)}")
        if self.clip is None and units in (["noise_multiplier"], ["epsilon"]):
            found.append(
                f"{units[0]} says how much noise there is for a clipping norm, and there is none: "
                "give clip (C), or the noise as sigma"
            )
        if (self.epochs is None) != (self.lr is None):
            found.append("expected epochs and lr together (FedAvg), or neither (FedSGD)")
        if self.local_batch_size is not None and self.epochs is None:
            found.append("local_batch_size belongs to local training: give epochs as well")
        return found

    @property
    def samples(self) -> int:
        """Of all clients together."""
        return self.batch_size * self.clients

    @property
    def protocol(self) -> str:
        """
        >>> Setting(epochs=5, lr=0.05).protocol
        'FedAvg, 5 epochs, lr 0.05'
        """
        if self.epochs is None:
            return "FedSGD"
        steps = f", steps of {self.local_batch_size}" if self.local_batch_size else ""
        return f"FedAvg, {self.epochs} epoch{'s' * (self.epochs > 1)}, lr {self.lr:g}{steps}"

    @property
    def undefended(self) -> Setting:
        """The same protocol with nothing done to the update."""
        nothing = dict.fromkeys(("clip", *_NOISE))
        return dataclasses.replace(self, precision="float32", **nothing)  # type: ignore[arg-type]

    @property
    def defended(self) -> bool:
        """Is anything done to the update, or is it hidden among others?"""
        return self != self.undefended or self.clients > 1

    def words(self, base: Setting | None = None) -> str:
        """What it is, or what tells it from `base`."""
        shown = {
            f.name: getattr(self, f.name)
            for f in dataclasses.fields(self)
            if getattr(self, f.name) != (getattr(base, f.name) if base else f.default)
            or (base is None and f.name == "batch_size")
        }
        local = self.protocol if {"epochs", "lr", "local_batch_size"} & set(shown) else ""
        parts = [f"b = {self.batch_size}"] if "batch_size" in shown else []
        parts += [f"width {self.width}"] if "width" in shown else []
        parts += [local] if local else []
        parts += [self._clip_words] if "clip" in shown else []
        parts += [self._noise_words] if set(_NOISE) & set(shown) else []
        parts += [self.precision] if "precision" in shown else []
        parts += [f"{self.clients} clients aggregated"] if "clients" in shown else []
        return ", ".join(parts) or "base"

    @property
    def _clip_words(self) -> str:
        return "not clipped" if self.clip is None else f"C = {self.clip:g}"

    @property
    def _noise_words(self) -> str:
        letters = {"sigma": "σ", "noise_multiplier": "z", "epsilon": "ε"}
        told = [(letters[name], getattr(self, name)) for name in _NOISE]
        return ", ".join(f"{a} = {v:g}" for a, v in told if v is not None) or "no noise"


def precision(text: str) -> tuple[str, float]:
    """A precision's kind and its number, 0 where it has none.

    >>> precision("quantise-8"), precision("prune-0.5"), precision("float16")
    (('quantise', 8.0), ('prune', 0.5), ('float16', 0.0))
    """
    if text in ("float32", *_HALVES):
        return text, 0.0
    kind, _, number = text.replace("quantize", "quantise").partition("-")
    if kind == "quantise" and number.isdecimal() and 2 <= int(number) <= 16:
        return kind, float(number)
    try:
        share = float(number)
    except ValueError:
        share = -1.0
    if kind == "prune" and 0 < share < 1:
        return kind, share
    raise InvalidOption(
        "expected precision to be float32, float16, bfloat16, quantise-BITS (2 to 16) or prune-SHARE "
        f"(0 to 1), got {text!r}"
    )


@dataclass(frozen=True)
class Privacy:
    """What epsilon is counted for.

    Args:
        delta: of (epsilon, delta).
        dataset_size: of a client, from which it draws its batch (FedSGD); None: its data is the batch.
        steps: how many updates of one client the server sees.
    """

    delta: float = 1e-5
    dataset_size: int | None = None
    steps: int = 1

    def __post_init__(self) -> None:
        if not 0 < self.delta < 1:
            raise InvalidOption(f"expected 0 < delta < 1, got {self.delta}")
        if self.steps < 1 or (self.dataset_size is not None and self.dataset_size < 1):
            raise InvalidOption(
                f"expected steps and dataset_size >= 1, got {self.steps} and {self.dataset_size}"
            )

    def sample_rate(self, setting: Setting) -> float:
        """The share of a client's data in one update."""
        if self.dataset_size is None or setting.epochs is not None:
            return 1.0
        if self.dataset_size < setting.batch_size:
            raise InvalidOption(
                f"expected a client's data to hold its batch of {setting.batch_size}, got "
                f"dataset_size = {self.dataset_size}"
            )
        return setting.batch_size / self.dataset_size


@dataclass(frozen=True)
class Noise:
    """The noise on an update in all units; None where one cannot be told."""

    sigma: float
    multiplier: float | None
    epsilon: float | None  # None without clipping or noise, or where Opacus is not installed


def noise_of(setting: Setting, privacy: Privacy) -> Noise:
    """The noise of a setting in all units.

    >>> noise_of(Setting(batch_size=10, sigma=1e-4), Privacy())
    Noise(sigma=0.0001, multiplier=None, epsilon=None)
    >>> found = noise_of(Setting(batch_size=10, clip=1.0, epsilon=8.0), Privacy())
    >>> round(found.multiplier, 2), round(found.sigma, 3), round(found.epsilon, 3)
    (0.64, 0.064, 8.0)
    """
    if setting.clip is None:
        return Noise(setting.sigma or 0.0, None, None)
    unit = setting.clip / (1 if setting.epochs is not None else setting.batch_size)
    rate = privacy.sample_rate(setting)
    multiplier = setting.noise_multiplier or (setting.sigma or 0.0) / unit
    if setting.epsilon is not None:
        multiplier = _multiplier(setting.epsilon, rate, privacy)
    if multiplier == 0:
        return Noise(0.0, 0.0, None)
    try:
        counted: float | None = _epsilon(multiplier, rate, privacy)
    except MissingExtra:
        counted = None
    return Noise(multiplier * unit, multiplier, counted)


def _epsilon(multiplier: float, rate: float, privacy: Privacy) -> float:
    from spear.integrations.opacus import epsilon

    return epsilon([(multiplier, rate, privacy.steps)], privacy.delta)


def _multiplier(target: float, rate: float, privacy: Privacy) -> float:
    """The noise multiplier with this epsilon, by Opacus' RDP accountant.

    Opacus' own `get_noise_multiplier` does the same with fewer orders and stops 0.01 short, so that
    the epsilon shown beside it would be another than the one asked for.
    """
    from scipy.optimize import brentq

    def excess(logarithm: float) -> float:
        return math.log(_epsilon(math.exp(logarithm), rate, privacy) / target)

    low = high = 0.0  # of the multiplier's logarithm
    while excess(low) < 0:
        low -= 2
    while excess(high) > 0:
        high += 1
        if high > math.log(1e6):
            raise InvalidOption(
                f"no noise reaches epsilon = {target:g} at delta = {privacy.delta:g}: ask for more"
            )
    found = math.exp(brentq(excess, low, high, xtol=1e-8)) if low < high else 1.0
    return float(f"{found:.6g}")  # so that rows are found again, whatever the last bits are
