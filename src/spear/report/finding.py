"""One update that was attacked: where it came from, what came back, and how far to trust it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from spear.certificate import Proof
from spear.errors import InvalidOption
from spear.inversion import Inversion, Outcome
from spear.update import LayerUpdate


@dataclass(frozen=True)
class Look:
    """How inputs are shown as pictures: their shape, and the normalisation the client used.

    >>> Look((3, 32, 32), mean=(0.5,), std=(0.25,)).inputs
    3072
    """

    shape: tuple[int, int, int]  # channels, height, width
    mean: tuple[float, ...] = (0.0,)  # per channel, or one for all
    std: tuple[float, ...] = (1.0,)

    def __post_init__(self) -> None:
        if len(self.shape) != 3 or min(self.shape) < 1 or self.shape[0] not in (1, 3):
            raise InvalidOption(
                f"expected a picture's shape as 1 or 3 channels, height, width, got {self.shape}"
            )
        for name, values in (("mean", self.mean), ("std", self.std)):
            if len(values) not in (1, self.shape[0]):
                raise InvalidOption(
                    f"expected one {name}, or {self.shape[0]} (one per channel), got {len(values)}"
                )
        if not all(value > 0 for value in self.std):
            raise InvalidOption(f"expected std > 0, got {self.std}")

    @property
    def inputs(self) -> int:
        channels, height, width = self.shape
        return channels * height * width

    def pictures(self, inputs: Tensor) -> Tensor:
        """(k, n) inputs as (k, C, H, W) in [0, 1], float64, not clipped."""
        if inputs.shape[1] != self.inputs:
            raise InvalidOption(
                f"expected pictures of {' x '.join(map(str, self.shape))} = {self.inputs} values, "
                f"but the layer has {inputs.shape[1]} inputs: give its own shape, or none"
            )
        images = inputs.double().view(-1, *self.shape)
        std, mean = images.new_tensor(self.std), images.new_tensor(self.mean)
        return images * std.view(-1, 1, 1) + mean.view(-1, 1, 1)


@dataclass(frozen=True, eq=False)
class Truth:
    """What the client really held, where an audit knows it."""

    names: tuple[str, ...]  # (b,)
    inputs: Tensor | None  # (b, n); None in a redacted report
    labels: Tensor | None  # (b,) int64
    index: tuple[int, ...]  # (k,) which of them each recovered sample is; -1 for none
    psnr: tuple[float, ...]  # (k,) dB; NaN for none


@dataclass(frozen=True, eq=False)
class Finding:
    """What one update gave away. Its fields are those of `Inversion`; see there."""

    name: str
    """Of the update: a file, a client, a round."""
    layer: str
    """Which layer was attacked, and why."""
    outcome: Outcome
    proof: Proof
    reason: str
    batch_size: int | None
    match: float | None
    certified: tuple[bool, ...]
    """(k,): k samples were recovered."""
    approximate: tuple[bool, ...]
    inputs: Tensor | None = field(repr=False)
    """(k, n); None where the report was redacted."""
    labels: Tensor | None = field(repr=False)
    predicted_error: tuple[float, ...] | None = field(repr=False)
    stats: Mapping[str, float] = field(repr=False)
    look: Look | None = None
    truth: Truth | None = field(default=None, repr=False)
    notes: tuple[str, ...] = ()
    """What was assumed, or seen beside the attack, in sentences."""

    @staticmethod
    def of(
        result: Inversion,
        name: str,
        view: LayerUpdate,
        *,
        look: Look | None = None,
        truth: Truth | None = None,
        notes: Sequence[str] = (),
    ) -> Finding:
        """The finding of an inversion."""
        errors = result.predicted_error
        return Finding(
            name,
            view.choice,
            result.outcome,
            result.proof,
            result.reason,
            result.batch_size,
            result.match,
            tuple(result.certified.tolist()),
            tuple(result.approximate.tolist()),
            result.inputs.detach().cpu(),
            None if result.labels is None else result.labels.cpu(),
            None if errors is None else tuple(errors.tolist()),
            dict(result.stats),
            look,
            truth,
            tuple(notes),
        )

    @property
    def recovered(self) -> int:
        """Samples that came back, certified or not."""
        return len(self.certified)

    @property
    def headline(self) -> str:
        """What it gave away, in one sentence without a verdict's name."""
        size = "an unknown number of" if self.batch_size is None else str(self.batch_size)
        if self.outcome is Outcome.EXACT:
            return f"All {size} samples were recovered exactly, and proved by {self.proof.value}."
        if self.outcome is Outcome.PARTIAL:
            return f"{sum(self.certified)} of {size} samples were recovered exactly and proved."
        if self.outcome is Outcome.APPROXIMATE:
            return (
                f"{self.recovered} of {size} samples were recovered approximately; none is proved."
            )
        return "Nothing was recovered that can be vouched for."

    def redacted(self) -> Finding:
        """The same without anything that was recovered, and without the truth's data."""
        truth = self.truth and dataclasses.replace(
            self.truth,
            names=tuple(f"sample {i}" for i, _ in enumerate(self.truth.names, 1)),
            inputs=None,
            labels=None,
        )
        return dataclasses.replace(self, inputs=None, labels=None, truth=truth)
