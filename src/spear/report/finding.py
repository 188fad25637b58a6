"""The result of one attacked update: what came back, and how far to trust it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from spear.data import Column
from spear.errors import InvalidOption
from spear.inversion import Inversion, Outcome
from spear.judge import Cause, Proof
from spear.report import columns as names
from spear.report.threat import ThreatModel, given, seen, threat_model, told


@dataclass(frozen=True)
class ImageFormat:
    """How inputs are shown as pictures: their shape, and the normalisation the client used.

    >>> ImageFormat((3, 32, 32), mean=(0.5,), std=(0.25,)).inputs
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
        if not all(0 < value < math.inf for value in self.std):
            raise InvalidOption(f"expected std > 0, got {self.std}")
        if not all(map(math.isfinite, self.mean)):
            raise InvalidOption(f"expected a finite mean, got {self.mean}")

    @staticmethod
    def of(
        shape: Sequence[int],
        mean: float | Sequence[float] = 0.0,
        std: float | Sequence[float] = 1.0,
    ) -> ImageFormat:
        """An image format from numbers or sequences; a shape (H, W) means grey pictures.

        >>> ImageFormat.of([28, 28], 0.5, 0.25)
        ImageFormat(shape=(1, 28, 28), mean=(0.5,), std=(0.25,))
        """
        sizes = (1, *shape) if len(shape) == 2 else tuple(shape)
        means, stds = ((m,) if isinstance(m, int | float) else tuple(m) for m in (mean, std))
        return ImageFormat(sizes, means, stds)  # type: ignore[arg-type]  # it checks their number

    @property
    def inputs(self) -> int:
        channels, height, width = self.shape
        return channels * height * width

    def fits(self, inputs: Tensor) -> None:
        """Raise unless the inputs (k, n) have as many values as the pictures."""
        if inputs.ndim != 2 or inputs.shape[1] != self.inputs:
            raise InvalidOption(
                f"expected pictures of {' x '.join(map(str, self.shape))} = {self.inputs} values, "
                f"but the layer has {inputs.shape[-1]} inputs: give a shape that fits, or none"
            )

    def pictures(self, inputs: Tensor) -> Tensor:
        """(k, n) inputs as (k, C, H, W) in [0, 1], float64, not clipped."""
        self.fits(inputs)
        images = inputs.double().view(-1, *self.shape)
        std, mean = images.new_tensor(self.std), images.new_tensor(self.mean)
        return images * std.view(-1, 1, 1) + mean.view(-1, 1, 1)


@dataclass(frozen=True, eq=False)
class Truth:
    """The client's true samples, if the auditor has them."""

    names: tuple[str, ...] = field(repr=False)  # (b,)
    inputs: Tensor | None = field(repr=False)  # (b, n); None in a redacted report
    labels: Tensor | None = field(repr=False)  # (b,) int64
    index: tuple[int, ...]  # (k,) the true sample that each recovered one is, -1 for none
    psnr: tuple[float, ...]  # (k,) dB, NaN where there is no true sample

    def __post_init__(self) -> None:
        b = len(self.names)
        problems = [
            f"expected {b} {name}, one for each name, got {_shape(part)}"
            for name, part, axes in (("inputs", self.inputs, 2), ("labels", self.labels, 1))
            if part is not None and (part.ndim != axes or len(part) != b)
        ]
        if len(self.psnr) != len(self.index):
            problems.append(f"expected a PSNR for each index, got {len(self.psnr)}")
        if not all(-1 <= i < b for i in self.index):
            problems.append(f"expected an index of -1 to {b - 1}, got {self.index}")
        if problems:
            raise InvalidOption("; ".join(problems))


@dataclass(frozen=True, eq=False)
class Finding:
    """What one update gave away. Fields not described here are those of `Inversion`."""

    name: str
    """Name of the update: a file, a client, a round."""
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
    """(k, n); None if the report was redacted."""
    labels: Tensor | None = field(repr=False)
    predicted_error: tuple[float, ...] | None = field(repr=False)
    stats: Mapping[str, float] = field(repr=False)
    image_format: ImageFormat | None = field(default=None, metadata={"json": "look"})
    truth: Truth | None = field(default=None, repr=False)
    notes: tuple[str, ...] = ()
    """What was assumed or noticed, as full sentences."""
    activations: bool = False
    """Are these inputs of an inner layer, rather than the data?"""
    cause: Cause | None = None
    """The reason as a value; None in reports of schema 1, which had no causes."""
    assumptions: tuple[str, ...] = ()
    """What the verdict rests on but could not be tested, in plain words."""
    details: tuple[str, ...] = field(default=(), metadata={"added": "after the schema"})
    """What else was observed."""
    rounds: int = field(default=1, metadata={"added": "after the schema"})
    sees: str = field(default="", metadata={"added": "after the schema"})
    """What the server saw; empty in earlier reports."""
    told: str = field(default="", metadata={"added": "after the schema"})
    """How the client trains, as far as it was told."""
    protocol: Mapping[str, Any] = field(
        default_factory=dict, repr=False, metadata={"added": "after the schema"}
    )
    """The same for programs: what of `Protocol` is not as it is by default."""
    columns: tuple[Column, ...] = field(
        default=(), repr=False, metadata={"added": "after the schema"}
    )
    """What the inputs are called, if they are rows of a table."""

    def __post_init__(self) -> None:
        problems = [
            f"expected {name} of {self.recovered} recovered samples, got {_shape(part)}"
            for name, part, axes in self._parts()
            if part is not None
            and (len(part) != self.recovered or (isinstance(part, Tensor) and part.ndim != axes))
        ]
        if self.batch_size is not None and self.batch_size < 0:
            problems.append(f"expected a batch size of 0 or more, got {self.batch_size}")
        if problems:
            raise InvalidOption("; ".join(problems))
        true = self.truth.inputs if self.truth else None
        rows = [part for part in (self.inputs, true) if part is not None]
        for part in rows:
            if self.image_format is not None:
                self.image_format.fits(part)
            if self.columns:
                names.check_columns(self.columns, part)
        if len({part.shape[1] for part in rows}) > 1:
            raise InvalidOption(
                f"expected a truth of {_shape(rows[0][:1])} values per sample, got "
                f"{_shape(rows[1][:1])}"
            )

    def _parts(self) -> tuple[tuple[str, Sequence[object] | Tensor | None, int], ...]:
        """The fields with an entry per recovered sample: name, value, and dimensions of a tensor."""
        return (
            ("approximate", self.approximate, 1),
            ("inputs", self.inputs, 2),
            ("labels", self.labels, 1),
            ("predicted_error", self.predicted_error, 1),
            ("truth.index", self.truth.index if self.truth else None, 1),
        )

    @staticmethod
    def of(
        result: Inversion,
        name: str,
        *,
        image_format: ImageFormat | None = None,
        truth: Truth | None = None,
        notes: Sequence[str] = (),
        columns: Sequence[Column] = (),
    ) -> Finding:
        """The finding of an inversion."""
        errors = result.predicted_error
        return Finding(
            name=name,
            layer=result.layer,
            outcome=result.outcome,
            proof=result.proof,
            reason=result.reason,
            batch_size=result.batch_size,
            match=result.match,
            certified=tuple(result.certified.tolist()),
            approximate=tuple(result.approximate.tolist()),
            inputs=result.inputs.detach().cpu(),
            labels=None if result.labels is None else result.labels.cpu(),
            predicted_error=None if errors is None else tuple(errors.tolist()),
            stats=dict(result.stats),
            image_format=image_format,
            truth=truth,
            notes=tuple(notes),
            activations=not result.reads_data,
            cause=result.cause,
            assumptions=result.assumptions,
            details=result.details,
            rounds=result.rounds,
            sees=seen(result.protocol, result.rounds),
            told=told(result.protocol),
            protocol=given(result.protocol),
            columns=tuple(columns),
        )

    @staticmethod
    def not_attacked(name: str, why: str, notes: Sequence[str] = ()) -> Finding:
        """An update that could not be attacked, and why."""
        return Finding(
            name=name,
            layer="no layer was attacked",
            outcome=Outcome.INCONCLUSIVE,
            proof=Proof.NONE,
            reason=f"not attacked: {why}",
            batch_size=None,
            match=None,
            certified=(),
            approximate=(),
            inputs=None,
            labels=None,
            predicted_error=None,
            stats={},
            notes=tuple(notes),
            cause=Cause.NOT_ATTACKED,
        )

    @property
    def recovered(self) -> int:
        """Samples that came back, certified or not."""
        return len(self.certified)

    @property
    def is_attacked(self) -> bool:
        """Was the update attacked at all?"""
        return self.cause not in (Cause.NOT_ATTACKED, Cause.OPTIMISER)

    @property
    def is_likely(self) -> bool:
        """Do the samples fit the update, with only the proof missing?"""
        return self.outcome is Outcome.APPROXIMATE and not any(self.approximate)

    @property
    def headline(self) -> str:
        """What the update gave away, in one sentence."""
        inner = "inputs of an inner layer (activations, not the data)"
        what = inner if self.activations else "samples"
        size = "an unknown number of" if self.batch_size is None else str(self.batch_size)
        some = f"{self.recovered} of {size} {what}"
        if self.outcome is Outcome.EXACT:
            seen = f"visible in the update{'s' * (self.rounds > 1)}"
            alone = self.batch_size == 1 and not self.activations
            found = f"The only sample {seen} was" if alone else f"All {size} {what} {seen} were"
            return f"{found} recovered exactly, proved by {self.proof.value}."
        if self.outcome is Outcome.PARTIAL:
            return f"{sum(self.certified)} of {size} {what} were recovered exactly and proved."
        if self.is_likely:
            return f"{some} were recovered, likely exactly; nothing proves it."
        if self.outcome is Outcome.APPROXIMATE:
            return f"{some} were recovered approximately; none is proved."
        if self.outcome is Outcome.INCONCLUSIVE:
            seen = "these rounds give" if self.rounds > 1 else "this update gives"
            return f"What {seen} away cannot be told."
        return "Nothing was recovered."

    @property
    def threat(self) -> ThreatModel:
        """Who sees what, on which assumptions, and what it means for people."""
        return threat_model(self)

    @property
    def holds_data(self) -> bool:
        """Does the finding hold a client's data, recovered or true?"""
        parts = [self.inputs, self.labels]
        if self.truth is not None:
            parts += [self.truth.inputs, self.truth.labels]
        return any(part is not None and part.numel() for part in parts)

    def redacted(self) -> Finding:
        """The finding without recovered data, true data and the folders of files."""
        from spear.report.redaction import without_folders

        truth = self.truth and dataclasses.replace(
            self.truth,
            names=tuple(f"original {i}" for i, _ in enumerate(self.truth.names, 1)),
            inputs=None,
            labels=None,
        )
        parts = ("name", "layer", "reason", "notes", "details")
        words = {part: without_folders(getattr(self, part)) for part in parts}
        return dataclasses.replace(self, inputs=None, labels=None, truth=truth, **words)


def _shape(part: Sequence[object] | Tensor) -> str:
    """Its size as text."""
    return " x ".join(map(str, part.shape)) if isinstance(part, Tensor) else str(len(part))
