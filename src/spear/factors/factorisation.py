"""The low-rank factorisation dL/dW = L R, and the batch size and noise level it shows.

The paper takes L = U S^(1/2), R = S^(1/2) V. Here L = U S and R = V^T: the factors differ by an
invertible matrix, so every statement of the paper holds, and the noise of the update (rounding or
differential privacy) is the same in every entry of L. So for a direction q of unit length all
entries of L q have one error level, from which every tolerance of SPEAR derives.

Rounding is not the same in every entry: it is a share of each. A trained network's samples differ by
many orders of magnitude, and so do the rows of dL/dW: where the loud ones are off, faint ones stand
alone, to all their digits. Rows multiplied by powers of two, so that they have about one size, hold
the same inputs and the same zeros, and there the noise is even (`even_rows`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from spear.factors.spectrum import (
    NO_ROUNDING,
    Rounding,
    batch_size_from,
    rank_without_gap,
    rounding_of,
)
from spear.factors.streaming import (
    CheckTime,
    Sketch,
    column_blocks,
    go_on,
    left_factor,
    live,
    sketch,
    with_unseen,
)
from spear.tolerances import (
    GAP,
    MARGIN,
    MIN_SPAN_OVERLAP,
    NOISY,
    PENALTY_ROUNDINGS,
    SPARE_BIAS_ROWS,
    UNDECIDED,
    WEAK_SAMPLE_FACTOR,
    ZERO_DEVIATIONS,
)
from spear.update import LayerUpdate, Protocol, Relu, double

_ROW_DEVIATIONS = 4.0  # standard deviations of a noisy row's length above its mean
# Of a usual row's length: below it, rows of noise alone can be told from others.
_LARGEST_ROW_NOISE = 0.3
# From this size on a sketch is tried first: a quarter of the time at 1000 rows, 3 % at 4096.
_SKETCHED_FROM = 800
_SPARE_COLUMNS = 16  # of a sketch beyond the rank: they show where the noise begins
_SKETCH_FRACTION = 2  # of the size: with more columns a sketch takes as long as an SVD


@dataclass(frozen=True, eq=False)
class Side:
    """One sparse side of the update: a basis whose span holds the sparse vectors we look for.

    On the outputs' side these are the columns of dL/dZ = L Q, on the inputs' side the rows of X.
    """

    name: str  # "outputs" or "inputs"
    basis: Tensor  # (rows, b), equal noise in every entry
    white: Tensor  # (rows, b), the same span with orthonormal columns
    scales: Tensor  # (b,), basis = white * scales
    size: int  # number of rows, including those without any signal
    zero: float  # |entry of basis @ unit vector| below this is zero
    noisy: bool  # is the noise above rounding?
    round_of_row: Tensor | None = None  # (rows,) where several rounds are stacked
    row_factors: Tensor | None = None  # (rows,) what rows were multiplied by

    @property
    def uneven(self) -> bool:
        """May a few rows hold nearly all that shows of a sample, and the others still hold enough?"""
        return self.round_of_row is not None or self.row_factors is not None

    @property
    def free(self) -> float:
        """Singular values of zero rows up to this leave a direction free.

        Over rounds, samples share hundreds of zero rows and a few in which both drown; in rows of one
        size a faint sample shows in a few rows and drowns in the others. Else a zero level is enough.
        """
        return self.noise_of_rows if self.uneven else self.zero

    @property
    def noise_of_rows(self) -> float:
        """Ten times the singular value of noise alone: its deviation times the root of the rows."""
        return MARGIN * self.zero / ZERO_DEVIATIONS * math.sqrt(len(self.basis))

    def hidden(self, vectors: Tensor, zeros: Tensor) -> Tensor | None:
        """Zeros (rows, c) where a sample would not show even if it were on; None if it always would.

        Rounding is a share of a row's loudest sample. Where that is so much louder than this one that
        an entry of its usual size (the median of those that show, as the client has them) would not
        stand out, a zero says nothing of the sign.

        Args:
            vectors: (b, c) of unit length.
            zeros: (rows, c) bool.
        """
        if self.row_factors is None:
            return None
        values, factors = (self.basis @ vectors).abs(), self.row_factors[:, None]
        usual = (values / factors).masked_fill(zeros, torch.nan).nanmedian(0).values
        level = torch.where(zeros, values, self.zero).amax(0)  # (c,), as its own zeros show it
        return zeros & ~(usual * factors > UNDECIDED * level)  # NaN where nothing shows

    @property
    def empty_rows(self) -> int:
        """Rows in which no sample shows, zeros of every direction."""
        return self.size - self.basis.shape[0]


@dataclass(frozen=True, eq=False)
class Factors:
    """dL/dW = L R with L = U S (m, b) and R = V^T (b, n), never formed unless asked for."""

    view: LayerUpdate
    spectrum: Tensor  # all singular values of the live part; of a sketch see `Sketch.values`
    batch_size: int | None  # None where the spectrum shows no gap
    left: Tensor  # U (m, b), rows of dead neurons are zero
    noise: float  # standard deviation of the noise in one entry of dL/dW
    zero: float  # |entry of L q|, q of unit length, below this counts as zero
    live_rows: Tensor  # (m,) bool: some sample is active in the neuron
    live_columns: Tensor  # (n,) bool: some sample is nonzero in the input
    row_noise: Tensor | None = None  # (m,) the same row by row: rounding is loud where entries are
    has_unresolved_samples: bool = False  # are there more samples, too faint to tell from noise?
    row_factors: Tensor | None = None
    """(m,): what rows of dL/dW and dL/db were multiplied by, and so those of L, and all noise."""
    evened: Factors | None = None  # with rows of one size, where these show no more samples
    whole: Factors | None = None  # what these are the loudest part of
    check_time: CheckTime = go_on  # called in long loops; raises once the time is up

    @property
    def b(self) -> int:
        assert self.batch_size is not None
        return self.batch_size

    @property
    def m(self) -> int:
        """Outputs of the layer."""
        return self.view.outputs

    @property
    def n(self) -> int:
        """Inputs of the layer."""
        return self.view.inputs

    @property
    def relu(self) -> Relu:
        return self.view.relu

    @property
    def protocol(self) -> Protocol:
        return self.view.protocol

    @property
    def trained(self) -> bool:
        return self.view.trained

    @property
    def eps(self) -> float:
        """Of the dtype in which the update was sent."""
        return torch.finfo(self.view.precision).eps

    @cached_property
    def bias(self) -> Tensor:
        """(m,), in float64."""
        return double(self.view.bias)

    @cached_property
    def bias_grad(self) -> Tensor:
        """dL/db (m,), in float64, with its rows multiplied as those of dL/dW."""
        g = double(self.view.bias_grad)
        return g if self.row_factors is None else g * self.row_factors

    def output_gradients(self, Q: Tensor) -> Tensor:
        """Columns of dL/dZ (m, k) = L Q, as the client has them."""
        D = self.L @ Q
        return D if self.row_factors is None else D / self.row_factors[:, None]

    @property
    def with_other_rows(self) -> Factors | None:
        """The factors with rows of one size, if these are not, or with rows as the client sent them.

        Samples that show only in rows of one size are noise in those. None if there is no difference.
        """
        if self.row_factors is None:
            return self.evened
        plain = _factorised(self.view, self.check_time)
        fewer = (plain.batch_size or 0) < self.b
        return dataclasses.replace(
            plain, has_unresolved_samples=plain.has_unresolved_samples or fewer
        )

    @cached_property
    def client_noise(self) -> float:
        """Noise of an entry as the client has it: root mean square over rows."""
        if self.row_factors is None:
            return self.noise
        return self.noise * float((1 / self.row_factors).square().mean().sqrt())

    @property
    def singular_values(self) -> Tensor:
        return self.spectrum[: self.b]  # (b,)

    @cached_property
    def live_shape(self) -> tuple[int, int]:
        """Rows and columns with any gradient: empty ones hold neither samples nor noise."""
        return int(self.live_rows.sum()), int(self.live_columns.sum())

    @cached_property
    def relative_noise(self) -> float:
        """Noise of an entry of the gradient, in units of its root mean square entry."""
        return self.noise * math.sqrt(math.prod(self.live_shape)) / float(self.spectrum.norm())

    @property
    def noisy(self) -> bool:
        return self.relative_noise > NOISY

    @property
    def low_rank(self) -> bool:
        """Is its rank, up to rounding, less than half of what it could be?"""
        if self.batch_size is None:
            return False
        return 2 * self.batch_size <= min(self.live_shape) and not (self.batch_size and self.noisy)

    @property
    def loudness_range(self) -> float:
        """Largest singular value of the samples to the smallest."""
        return float(self.singular_values[0] / self.singular_values[-1])

    @property
    def has_weak_sample(self) -> bool:
        """Is the faintest sample near the noise, though the others are not?"""
        rows, columns = self.live_shape
        edge = self.noise * (math.sqrt(rows) + math.sqrt(columns))
        return float(self.singular_values[-1]) < WEAK_SAMPLE_FACTOR * edge

    @property
    def negated(self) -> Factors:
        """Factors of the update with the other sign; the inputs are the same."""
        view = self.view
        turned = dataclasses.replace(
            view,
            weight_grad=-view.weight_grad,
            bias_grad=-view.bias_grad,
            others={name: -gradient for name, gradient in view.others.items()},
            rounds=None if view.rounds is None else view.rounds.negated,
        )
        return dataclasses.replace(self, view=turned, left=-self.left)

    def restricted_to(self, white: Tensor) -> Factors:
        """The part of the update along some white directions (k, b); the rest counts as noise."""
        B = torch.linalg.qr(white.T).Q  # (b, k)
        A, s, _ = torch.linalg.svd(B.T * self.singular_values)
        outside = torch.diag(self.singular_values) - B @ (B.T * self.singular_values)  # (b, b)
        loudest = max(
            float(torch.linalg.matrix_norm(outside, 2)), self.noise * self.live_shape[1] ** 0.5
        )
        return self._part(self.left @ B @ A, torch.cat([s, s.new_tensor([loudest])]))

    def loudest_part(self) -> Factors | None:
        """The samples before the largest drop, with the fainter ones as noise; None without a drop."""
        s = self.singular_values
        drops = s[:-1] / s[1:]
        if not len(drops) or float(drops.max()) < GAP:
            return None
        k = int(drops.argmax()) + 1
        return dataclasses.replace(self._part(self.left[:, :k], s[: k + 1]), whole=self)

    def _part(self, left: Tensor, spectrum: Tensor) -> Factors:
        """Leading singular vectors (m, k) and values (k + 1,): what is left out counts as noise."""
        # It is not white noise but a few directions, and may fall on few entries.
        loudest = float(spectrum[-1])
        rows, columns = self.live_shape
        return dataclasses.replace(
            self,
            batch_size=left.shape[1],
            left=left,
            spectrum=spectrum,
            noise=loudest / math.sqrt(columns),
            row_noise=None,
            zero=ZERO_DEVIATIONS * loudest / math.sqrt(rows),
            has_unresolved_samples=True,
        )

    @cached_property
    def L(self) -> Tensor:
        return self.left * self.singular_values  # (m, b)

    @cached_property
    def bias_coordinates(self) -> Tensor:
        """L^-L dL/db = Q 1, which fixes the scale of every direction (the paper's scaling theorem).

        An input that is zero everywhere adds nothing to dL/dW but its d_0 to dL/db, which is then
        no combination of L's columns. Its preactivation is the bias itself, so d_0 is zero wherever
        the bias is negative: if those rows alone fit, they are used.
        All zero for a layer without a bias, which says nothing of scales.
        """
        return self._bias_fit[0] / self.singular_values  # (b,)

    @property
    def bias_rows(self) -> Tensor:
        """(m,) bool: rows that the bias gradient was read from: all, unless inputs are zero or rows of
        dL/dW are masked."""
        return self._bias_fit[1]

    @cached_property
    def bias_outside(self) -> Tensor:
        """(m,): the part of dL/db that is no combination of L's columns; zero in unused rows."""
        coordinates, rows = self._bias_fit
        outside = self.bias_grad - self.left @ coordinates
        return outside if bool(rows.all()) else outside * rows

    @cached_property
    def zero_input(self) -> bool:
        """Does the bias gradient show one or more inputs that are zero everywhere?"""
        return not bool(self.bias_rows[self.live_rows].all())

    @cached_property
    def _bias_fit(self) -> tuple[Tensor, Tensor]:
        """Coordinates (b,) of dL/db in `left`, and the rows (m,) they were read from."""
        g = self.bias_grad
        coordinates = self.left.T @ g
        everywhere = torch.ones(len(g), dtype=torch.bool, device=g.device)
        outside = g - self.left @ coordinates
        if self._is_bias_noise(outside) or self.relu == "before":
            return coordinates, everywhere
        if self._is_bias_noise(outside[self.live_rows]):  # rows whose weights were masked
            return coordinates, self.live_rows
        bias = self.bias
        after = bias - self.protocol.rate * g if self.trained else bias
        off = (bias < 0) & (after < 0) & self.live_rows  # (m,)
        if int(off.sum()) < self.left.shape[1] + SPARE_BIAS_ROWS:
            return coordinates, everywhere
        part = self.left[off]
        U, s, Vt = torch.linalg.svd(part, full_matrices=False)
        if float(s[-1]) < MIN_SPAN_OVERLAP:
            return coordinates, everywhere
        solved = Vt.T @ ((U.T @ g[off]) / s)
        rest = g[off] - part @ solved
        return (solved, off) if self._is_bias_noise(rest) else (coordinates, everywhere)

    def _is_bias_noise(self, rest: Tensor) -> bool:
        """Is this part of dL/db (rows,) no more than the noise of its entries?"""
        eps = torch.finfo(self.view.bias_precision).eps
        rounding = MARGIN * eps * float(self.bias_grad.norm())
        return float(rest.norm()) <= rounding + self.zero * math.sqrt(len(rest))

    @cached_property
    def preactivation(self) -> Tensor:
        """W R^T (m, b): a sample x = R^T c has the preactivation W R^T c + bias."""
        weight = self.view.weight
        total = torch.zeros_like(self.left)
        for columns, gradient in self._column_blocks():
            total += double(weight[:, columns]) @ (gradient.T @ self.left)  # (m, b)
        return total / self.singular_values

    @cached_property
    def before_and_after(self) -> tuple[Tensor, Tensor]:
        """W R^T (ends, m, b) and bias (ends, m, 1), before and after the client's local training.

        FedSGD has one end. W after = W - lr dL/dW, so W R^T falls by lr L.
        """
        H, bias = self.preactivation[None], self.bias[None, :, None]
        rounds = self.view.rounds
        if rounds is not None and rounds.trained:
            rate = rounds.rates[:, None]  # (m, 1), of every round
        elif self.trained:
            rate = torch.full_like(self.left[:, :1], self.protocol.rate)
        else:
            return H, bias
        moved = rate * self.bias_grad[:, None]
        return torch.cat([H, H - rate * self.L]), torch.cat([bias, bias - moved])

    @cached_property
    def weight_lengths(self) -> Tensor:
        """|W_k| (m, 1)."""
        return self.view.weight_lengths.to(self.left)[:, None]

    def preactivation_error(self, C: Tensor) -> Tensor:
        """How far off the preactivation of x = C R (..., b) may be, in units of |W_k|.

        From the client's own rounding, and from what the update's noise leaves in the input.
        """
        eps = torch.finfo(self.view.weight_precision).eps
        noise = ZERO_DEVIATIONS * self.noise * (C / self.singular_values).norm(dim=-1)
        preactivation_error: Tensor = eps * C.norm(dim=-1) + noise
        return preactivation_error

    def input_noise(self, C: Tensor) -> Tensor:
        """What the noise of dL/dW leaves in each entry of x = C R: a standard deviation (k,)."""
        inverse = (C / self.singular_values) @ self.left.T  # D^+ (k, m)
        noise = self.noise if self.row_noise is None else self.row_noise
        left: Tensor = (inverse * noise).norm(dim=1)
        return left

    @cached_property
    def outputs(self) -> Side:
        live, rounds = self.live_rows, self.view.rounds
        side = self._side("outputs", self.left[live], self.m)
        if self.row_factors is not None:
            return dataclasses.replace(side, row_factors=self.row_factors[live])
        if rounds is None:
            return side
        width = self.m // len(rounds)
        stacked = torch.arange(self.m, device=live.device) // width
        return dataclasses.replace(side, round_of_row=stacked[live])

    @cached_property
    def inputs(self) -> Side:
        """The side of X. Forms V (n, b), since a hidden layer has few inputs."""
        right = self.combine(torch.diag(1 / self.singular_values)).T  # (n, b)
        return self._side("inputs", right[self.live_columns], self.n)

    def _side(self, name: str, white: Tensor, size: int) -> Side:
        s = self.singular_values
        return Side(name, white * s, white, s, size, self.zero, self.noisy)

    def combine(self, coefficients: Tensor) -> Tensor:
        """coefficients @ U^T dL/dW (k, n), streamed: with C S^-1 these are the inputs C R."""
        weights = coefficients @ self.left.T  # (k, m)
        out = weights.new_empty(len(weights), self.view.weight.shape[1])
        for columns, gradient in self._column_blocks():
            out[:, columns] = weights @ gradient
        return out if self.view.rounds is None else out @ self.view.rounds.basis

    def reconstruct(self, C: Tensor) -> Tensor:
        """X = C R (k, n), in the dtype of the update (float32 at least), the client's own."""
        dtype = self.view.input_precision
        if self.view.rounds is not None:
            inputs = self.combine(C / self.singular_values)
            return inputs.to(dtype)
        weights = (C / self.singular_values) @ self.left.T  # (k, m)
        out = torch.empty(len(C), self.n, dtype=dtype, device=weights.device)
        for columns, gradient in self._column_blocks():
            out[:, columns] = (weights @ gradient).to(dtype)
        return out

    def _column_blocks(self) -> Iterator[tuple[slice, Tensor]]:
        for columns, block in column_blocks(self.view.weight_grad, check_time=self.check_time):
            yield (
                columns,
                block if self.row_factors is None else block.mul_(self.row_factors[:, None]),
            )


def factorise(view: LayerUpdate, check_time: CheckTime = go_on) -> Factors:
    """Factorise an update: batch size from the spectrum's gap, noise from what lies beyond it.

    Args:
        view: the update.
        check_time: called in long loops, here and wherever the factors are used; raises to stop.
    """
    factors = _factorised(view, check_time)
    alike = bool(factors.batch_size) and factors.loudness_range < GAP
    large = min(view.weight_grad.shape) >= _SKETCHED_FROM  # a sketch may do, and costs far less
    clear = alike or bool(factors.batch_size and not factors.has_weak_sample)
    row_factors = None if large and clear else even_rows(view, check_time)
    if row_factors is None:
        return factors
    even = _factorised(view, check_time, row_factors)
    alone = _rows_alone(even) if _is_only_rounding(even) else None
    if alone is not None and bool(alone.any()):
        even = _factorised(view, check_time, row_factors.masked_fill(alone, 1.0))
        alone = _rows_alone(even) if _is_only_rounding(even) else None
    if alone is None or bool(alone.any()):
        return factors
    return dataclasses.replace(factors, evened=even) if clear and factors.b >= even.b else even


def even_rows(view: LayerUpdate, check_time: CheckTime = go_on) -> Tensor | None:
    """Powers of two (m,) that make all live rows of dL/dW about as long as the longest.

    None where rows differ too little to gain by it, or where noise is not a share of each entry: in
    weights that were subtracted it is one of the weights. An output layer's rows depend on each other.
    """
    if view.trained or view.rounds is not None or view.relu == "before":
        return None
    lengths = 0.0 * double(view.weight_grad[:, 0])  # (m,)
    for _, block in column_blocks(view.weight_grad, check_time=check_time):
        lengths = lengths.hypot(block.norm(dim=1))
    uneven = (lengths.max() / lengths).masked_fill(lengths == 0, 1.0)
    if not bool(uneven.isfinite().all()) or float(uneven.max()) < GAP:
        return None
    return torch.exp2(uneven.log2().floor())


def _is_only_rounding(even: Factors) -> bool:
    """Do rows of one size hold samples, and beside them nothing but a rounding of each entry?

    Other noise is the same in every row, whatever its size, and loud where rows were faint.
    """
    if not even.batch_size or even.noisy:
        return False
    own = float(even.spectrum.norm()) * torch.finfo(torch.float64).eps / math.sqrt(even.m)
    quiet = even.relative_noise <= PENALTY_ROUNDINGS * even.eps
    return quiet or even.noise <= PENALTY_ROUNDINGS * own


def _rows_alone(factors: Factors) -> Tensor:
    """Rows (m,) without which fewer samples would show: what is in one row alone may be noise.

    Without a row of leverage P, the direction x that it held has the size sqrt(P (1 - P)) / |x| in all
    others, as in `search.kernels.redundancy`.
    """
    P = factors.left.square().sum(1).clamp_max(1.0)  # (m,)
    held = (factors.left / factors.singular_values).norm(dim=1)  # |x|, in units of the noise
    rows, columns = factors.live_shape
    edge = factors.noise * (math.sqrt(rows) + math.sqrt(columns))
    alone: Tensor = (P > 0.5) & ((P * (1 - P)).sqrt() <= MARGIN * edge * held)
    return alone


def _factorised(
    view: LayerUpdate, check_time: CheckTime, row_factors: Tensor | None = None
) -> Factors:
    """The factors of an update, with its rows multiplied by these factors."""
    G = view.weight_grad
    live_rows, kept_columns = live(G)
    live_columns = kept_columns if view.rounds is None else view.rounds.live_columns
    m, n = int(live_rows.sum()), int(live_columns.sum())
    eps = torch.finfo(G.dtype if view.rounds is None else view.precision).eps
    large = min(m, n) >= _SKETCHED_FROM and view.rounds is None and row_factors is None
    rounding = rounding_of(view, row_factors)
    seen = sketch(G, m, n, eps, check_time) if large else None
    if seen is not None and _sketch_is_conclusive(seen, m, n, eps, rounding):
        b: int | None = seen.rank
        rank = seen.rank
        s, U, outside = seen.values, seen.left[live_rows], seen.outside
    else:
        U, s = left_factor(G, live_rows, kept_columns, check_time, row_factors)
        shown = len(s)
        beyond = _beyond_basis(view, live_rows)  # (m,)
        if view.rounds is None:
            b = batch_size_from(s, m, n, eps, rounding)
        else:
            b = view.rounds.batch_size
            s = with_unseen(s, float(beyond.square().sum()), min(m, n))
        if view.relu == "before" and b is not None and b >= view.outputs - 1:
            b = None  # an output layer's gradients sum to zero over classes, as for a larger batch
        if b is None and row_factors is None and _fills_the_inputs(view, U, live_rows, n):
            b = n
        rank = b if b is not None else rank_without_gap(s, eps)
        outside = (U[:, rank:] * s[rank:shown]).norm(dim=1).hypot(beyond)
    left = U.new_zeros(view.outputs, rank)
    left[live_rows] = U[:, :rank]
    noise, loudest = _noise(s, outside, rank, m, n)
    if rank and rank >= min(m, n):  # nothing is left over to show noise: take the client's rounding
        noise = loudest = max(noise, eps / 4 * float(s.norm()) / math.sqrt(m * n))
    live_rows = _rows_with_signal(left, s[:rank], noise, live_rows)
    left[~live_rows] = 0
    row_noise = _row_noise(view, outside, rank, n, noise)
    level = ZERO_DEVIATIONS * loudest
    factors = Factors(
        view,
        s,
        b,
        left,
        noise,
        level,
        live_rows,
        live_columns,
        row_noise,
        check_time=check_time,
        row_factors=row_factors,
    )
    return factors if b is not None or not rank else factors._part(left, s[: rank + 1])


def _beyond_basis(view: LayerUpdate, live_rows: Tensor) -> Tensor:
    """Length (rows,) of what each row has outside the columns that are kept of several rounds."""
    if view.rounds is None:
        return torch.zeros(int(live_rows.sum()), dtype=torch.float64, device=live_rows.device)
    return view.rounds.outside[live_rows]


def _row_noise(
    view: LayerUpdate, outside: Tensor, rank: int, n: int, noise: float
) -> Tensor | None:
    """Standard deviation of the noise in each row's entries (m,); None where it does not show."""
    if rank >= n or len(outside) != view.outputs or not bool(outside.any()):
        return None
    per_row = outside / math.sqrt(n - rank)
    return per_row.clamp_min(noise / len(outside))


def _fills_the_inputs(view: LayerUpdate, U: Tensor, live_rows: Tensor, n: int) -> bool:
    """Has the batch as many samples as there are inputs, though the spectrum has no room for a gap?

    With b = n the columns of dL/dZ span those of dL/dW, and their sum dL/db lies in that span: a
    test of m - n numbers. With more samples it does not.
    """
    if U.shape[0] < n + SPARE_BIAS_ROWS or view.relu != "after" or view.rounds is not None:
        return False
    g = double(view.bias_grad)
    inside = g[live_rows]
    rest = torch.cat([inside - U[:, :n] @ (U[:, :n].T @ inside), g[~live_rows]])
    eps = torch.finfo(view.precision).eps
    return bool(g.any()) and float(rest.norm()) <= MARGIN * eps * float(g.norm())


def _rows_with_signal(left: Tensor, values: Tensor, noise: float, live_rows: Tensor) -> Tensor:
    """The rows (m,) that show more than noise.

    A neuron that no sample switched on is noise alone, and a zero of every direction. Pixels in [0, 1]
    leave a fifth of the neurons so; unless they are set aside, any mix of samples has zeros to spare.
    """
    lengths = (left * values).norm(dim=1)
    noisy = noise * (math.sqrt(len(values)) + _ROW_DEVIATIONS)
    if not bool(live_rows.any()) or noisy > _LARGEST_ROW_NOISE * float(lengths[live_rows].median()):
        return live_rows  # under loud noise, a row with few samples looks the same
    with_signal: Tensor = live_rows & (lengths > noisy)
    return with_signal


def _sketch_is_conclusive(
    seen: Sketch, m: int, n: int, eps: float, rounding: Rounding = NO_ROUNDING
) -> bool:
    """Would the whole spectrum give the same batch size as the sketch?

    Samples fainter than the gap could hide behind it, if there are more than the sketch has columns
    to spare (at least as many as samples). What is left must be rounding, which cannot hide so
    many, or keep to the edge of Gaussian noise, which takes a third of the spectrum.
    """
    b = seen.rank
    rest = float(seen.outside.norm())
    only_rounding = rest <= 2 * eps * float(seen.values.norm())
    edge = rest / math.sqrt((m - b) * (n - b)) * (math.sqrt(m - b) + math.sqrt(n - b))
    quiet = only_rounding or float(seen.values[b]) <= 1.1 * edge
    return quiet and batch_size_from(seen.values, m, n, eps, rounding) == b


def _noise(s: Tensor, outside: Tensor, b: int, m: int, n: int) -> tuple[float, float]:
    """Standard deviation of the noise per entry: over all rows, and in the loudest row.

    `outside` (m,) is the length of each row outside the span of the first b left vectors.
    """
    # Backward error of the QR: at most eps of the gradient's norm, possibly all in one row.
    floor = float(s.norm()) * torch.finfo(s.dtype).eps / math.sqrt(max(m, 1))
    if b >= min(m, n):
        return floor, floor
    overall = float(outside.norm()) / math.sqrt((m - b) * (n - b))
    loudest = float(outside.max()) / math.sqrt(n - b)
    return max(overall, floor), max(loudest, overall, floor)


def leading_part(gradient: Tensor, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """U (m, k), S (k,) and V^T (k, n) of a gradient (m, n), as torch.linalg.svd has them.

    Where the rank is far below its size, only of a few more than that, by a sketch.
    """
    G, columns = double(gradient), rank + _SPARE_COLUMNS
    if _SKETCH_FRACTION * columns > min(G.shape):
        U, s, Vt = torch.linalg.svd(G, full_matrices=False)
        return U, s, Vt
    drawn = torch.randn(
        G.shape[1], columns, generator=torch.Generator().manual_seed(0), dtype=G.dtype
    )
    left = torch.linalg.qr(G @ drawn.to(G.device)).Q  # (m, k)
    V, R = torch.linalg.qr(G.T @ left)  # (n, k)
    turn, s, back = torch.linalg.svd(R)
    return left @ back.T, s, (V @ turn).T
