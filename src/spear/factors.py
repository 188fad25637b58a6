"""The low-rank factorisation dL/dW = L R, the batch size and the noise level read off it.

The paper takes L = U S^(1/2), R = S^(1/2) V. Here L = U S and R = V^T: the factors differ by an
invertible matrix, so every statement of the paper holds, and whatever noise the update carries
(rounding or differential privacy) is the same in every entry of L. A direction q of unit length
then has one error level for all entries of L q, from which every tolerance of SPEAR derives.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from spear.update import LayerUpdate

_BLOCK = 1 << 21  # entries of a column block: 16 MB in float64

# A zero entry is one below 5 standard deviations of its noise (6e-7 of Gaussian entries exceed it).
_DEVIATIONS = 5.0
# Between the zero level and ten times it an entry is undecided: it contradicts neither verdict.
UNDECIDED = 10.0
# Up to this noise, relative to the gradient's entries, (b-1)-row kernels stay sharp: they amplify
# noise by the condition of the submatrix, 1e2 to 1e3 on real batches.
_NOISY = 1e-4
_FAINT = 3.0  # roundings of the loudest sample that a sample must stand above
_UNEVEN = 1e3  # times the noise's edge; below it, whitened coordinates are too noisy for kernels


@dataclass(frozen=True, eq=False)
class Side:
    """One sparse side of the update: a basis whose span holds the sparse vectors looked for.

    For the outputs' side these are the columns of dL/dZ = L Q, for the inputs' side the rows of X.
    """

    name: str  # "outputs" or "inputs"
    basis: Tensor  # (rows, b), equal noise in every entry
    white: Tensor  # (rows, b), the same span with orthonormal columns
    scales: Tensor  # (b,), basis = white * scales
    size: int  # number of rows, those without any signal included
    zero: float  # |entry of basis @ unit vector| below this is zero
    noisy: bool  # is the noise above rounding?

    @property
    def silent(self) -> int:
        """Rows in which no sample shows: zeros of every direction."""
        return self.size - self.basis.shape[0]


@dataclass(frozen=True, eq=False)
class Factors:
    """dL/dW = L R with L = U S (m, b) and R = V^T (b, n), never formed unless asked for."""

    view: LayerUpdate
    spectrum: Tensor  # all singular values of the live part
    batch_size: int | None  # None where the spectrum shows no gap
    left: Tensor  # U (m, b), rows of dead neurons are zero
    noise: float  # standard deviation of the noise in one entry of dL/dW
    zero: float  # |entry of L q|, q of unit length, below this counts as zero
    live_rows: Tensor  # (m,) bool: some sample is active in the neuron
    live_columns: Tensor  # (n,) bool: some sample is nonzero in the input
    faded: bool = False  # are there further samples, too faint to be told from noise?

    @property
    def b(self) -> int:
        assert self.batch_size is not None
        return self.batch_size

    @property
    def singular_values(self) -> Tensor:
        return self.spectrum[: self.b]  # (b,)

    @property
    def relative_noise(self) -> float:
        """Noise of an entry of the gradient, in units of its root mean square entry."""
        entries = int(self.live_rows.sum()) * int(self.live_columns.sum())
        return self.noise * math.sqrt(entries) / float(self.spectrum.norm())

    @property
    def noisy(self) -> bool:
        return self.relative_noise > _NOISY

    @property
    def uneven(self) -> bool:
        """Is the faintest sample near the noise, though the others are not?"""
        edge = self.noise * (math.sqrt(self.view.outputs) + math.sqrt(self.view.inputs))
        return float(self.singular_values[-1]) < _UNEVEN * edge

    def within(self, white: Tensor) -> Factors:
        """The part of the update that lies along some directions (k, b), white; the rest is noise."""
        B = torch.linalg.qr(white.T).Q  # (b, k)
        A, s, _ = torch.linalg.svd(B.T * self.singular_values)
        outside = torch.diag(self.singular_values) - B @ (B.T * self.singular_values)  # (b, b)
        loudest = max(
            float(torch.linalg.matrix_norm(outside, 2)), self.noise * self.view.inputs**0.5
        )
        return self._part(self.left @ B @ A, torch.cat([s, s.new_tensor([loudest])]))

    def _part(self, left: Tensor, spectrum: Tensor) -> Factors:
        """Leading singular vectors (m, k) and values (k + 1,): what is left out counts as noise."""
        # It is no white noise but a few directions, so it may fall on few entries.
        loudest = float(spectrum[-1])
        return dataclasses.replace(
            self,
            batch_size=left.shape[1],
            left=left,
            spectrum=spectrum,
            noise=loudest / math.sqrt(self.view.inputs),
            zero=_DEVIATIONS * loudest / math.sqrt(self.view.outputs),
            faded=True,
        )

    @cached_property
    def L(self) -> Tensor:
        return self.left * self.singular_values  # (m, b)

    @cached_property
    def bias_coordinates(self) -> Tensor:
        """L^-L dL/db = Q 1: what fixes the scale of every direction (the paper's scaling theorem)."""
        g = _double(self.view.bias_grad)
        return (self.left.T @ g) / self.singular_values  # (b,)

    @cached_property
    def preactivation(self) -> Tensor:
        """W R^T (m, b): a sample x = R^T c has the preactivation W R^T c + bias."""
        weight = self.view.weight
        total = torch.zeros_like(self.left)
        for columns, gradient in _column_blocks(self.view.weight_grad):
            total += _double(weight[:, columns]) @ (gradient.T @ self.left)  # (m, b)
        return total / self.singular_values

    @cached_property
    def ends(self) -> tuple[Tensor, Tensor]:
        """W R^T (ends, m, b) and bias (ends, m, 1), before and after the client's local training.

        After FedSGD there is one end. W after = W - lr dL/dW, so W R^T falls by lr L.
        """
        H, bias = self.preactivation[None], _double(self.view.bias)[None, :, None]
        if self.view.training is None:
            return H, bias
        lr = self.view.training.lr
        moved = lr * _double(self.view.bias_grad)[None, :, None]
        return torch.cat([H, H - lr * self.L]), torch.cat([bias, bias - moved])

    @cached_property
    def weight_lengths(self) -> Tensor:
        """|W_k| (m, 1)."""
        weight = self.view.weight.detach()
        lengths: Tensor = torch.linalg.vector_norm(weight, dim=1).to(self.left)
        return lengths[:, None]

    def reach(self, C: Tensor) -> Tensor:
        """Times |W_k|, how far off the preactivation of x = C R (..., b) may be.

        By the client's own rounding, and by what the update's noise leaves in the input.
        """
        eps = torch.finfo(self.view.weight.dtype).eps
        noise = _DEVIATIONS * self.noise * (C / self.singular_values).norm(dim=-1)
        reach: Tensor = eps * C.norm(dim=-1) + noise
        return reach

    @cached_property
    def outputs(self) -> Side:
        live = self.live_rows
        return self._side("outputs", self.left[live], self.view.outputs)

    @cached_property
    def inputs(self) -> Side:
        """The side of X: V (n, b) is formed here, since the inputs of a hidden layer are few."""
        right = self.combine(torch.diag(1 / self.singular_values)).T  # (n, b)
        return self._side("inputs", right[self.live_columns], self.view.inputs)

    def _side(self, name: str, white: Tensor, size: int) -> Side:
        s = self.singular_values
        return Side(name, white * s, white, s, size, self.zero, self.noisy)

    def combine(self, coefficients: Tensor) -> Tensor:
        """coefficients @ U^T dL/dW (k, n), streamed: with C S^-1 these are the inputs C R."""
        weights = coefficients @ self.left.T  # (k, m)
        out = weights.new_empty(len(weights), self.view.inputs)
        for columns, gradient in _column_blocks(self.view.weight_grad):
            out[:, columns] = weights @ gradient
        return out

    def reconstruct(self, C: Tensor) -> Tensor:
        """X = C R (k, n), in the dtype of the update (float32 at least), the client's own."""
        weights = (C / self.singular_values) @ self.left.T  # (k, m)
        dtype = torch.promote_types(self.view.weight_grad.dtype, torch.float32)
        out = torch.empty(len(C), self.view.inputs, dtype=dtype, device=weights.device)
        for columns, gradient in _column_blocks(self.view.weight_grad):
            out[:, columns] = (weights @ gradient).to(dtype)
        return out.to(self.view.weight_grad.device)


def factorise(view: LayerUpdate) -> Factors:
    """Factorise an update: batch size from the spectrum's gap, noise from what lies beyond it."""
    G = view.weight_grad
    live_rows, live_columns = _live(G)
    U, s = _left_factor(G, live_rows)
    m, n = int(live_rows.sum()), int(live_columns.sum())
    b = batch_size_from(s, m, n, torch.finfo(G.dtype).eps)
    if view.relu == "before" and b is not None and b >= view.outputs - 1:
        b = None  # an output layer's gradients sum to zero over classes: any larger batch looks so
    rank = b if b is not None else _fading(s, torch.finfo(G.dtype).eps)
    left = U.new_zeros(view.outputs, rank)
    left[live_rows] = U[:, :rank]
    noise, loudest = _noise(U, s, rank, m, n)
    factors = Factors(view, s, b, left, noise, _DEVIATIONS * loudest, live_rows, live_columns)
    return factors if b is not None or not rank else factors._part(left, s[: rank + 1])


def _fading(s: Tensor, eps: float) -> int:
    """How many samples stand out where the spectrum fades into rounding without a gap; else 0."""
    if len(s) < 4 or float(s[len(s) // 2]) > eps * float(s[0]):
        return 0  # it does not reach rounding: a batch as large as the layer, or noise
    return int((s >= _FAINT * eps * s[0]).sum())


def batch_size_from(s: Tensor, m: int, n: int, eps: float) -> int | None:
    """The numerical rank of an m x n matrix with singular values s; None where no gap shows.

    A clean update falls by orders of magnitude behind its last sample. A noisy one ends in the bulk
    of a random matrix, whose largest singular value is sigma (sqrt m + sqrt n).
    """
    r = len(s)
    if r == 0 or float(s[0]) == 0:
        return 0
    positions = torch.arange(r, device=s.device)
    i = torch.arange(r, dtype=s.dtype, device=s.device)
    tail = s.square().flip(0).cumsum(0).flip(0)  # energy of s_i, s_i+1, ...
    # What noise of the tail's energy could reach at most, if the rank were i.
    edge = (tail / ((m - i) * (n - i))).sqrt() * ((m - i).sqrt() + (n - i).sqrt())
    # Rounding leaves about a tenth of eps; what falls a hundred times below is no further gap.
    floor = float(s.norm()) * max(torch.finfo(s.dtype).eps, 1e-3 * eps)
    drop = s[:-1] / s[1:].clamp_min(floor)  # (r-1,) s_i / s_i+1
    # Rounding is uneven from row to row: its largest value was seen up to 4 times above the edge and,
    # where one sample is far louder than the others, 40 times above the median. Samples that are
    # taken for noise stand out further.
    median = s[(positions + r) // 2]  # of s_i, s_i+1, ...: they are sorted
    quiet = (s[1:] <= 10 * edge[1:]) & (s[1:] <= 1000 * median[1:].clamp_min(floor))
    clean = torch.where(quiet & (s[:-1] > floor), drop, 0.0)
    gaps = torch.nonzero(clean >= 100).flatten()
    if len(gaps):
        return int(gaps[-1]) + 1
    # Gaussian noise keeps to the edge, and the samples stand out of it; a spectrum that merely
    # levels off is a batch as large as the layer. A fifth of the spectrum has to show the noise.
    shown = r - max(3, r // 5)
    if shown > 0 and float(clean[:shown].max()) >= 10:
        return int(clean[:shown].argmax()) + 1
    bulk = torch.nonzero((s <= 1.1 * edge)[:shown]).flatten()
    if not len(bulk):
        return None
    rank = int(bulk[0])
    # A sample or two may be as faint as the noise: then they count as noise.
    for faint in range(1 + max(1, rank // 10)):
        if rank == faint or float(drop[rank - faint - 1]) >= 1.2:
            return rank - faint
    return None


def working_device(device: torch.device) -> torch.device:
    """Where float64 work is done: on the tensor's own device, or on the CPU if it has no float64."""
    return torch.device("cpu") if device.type == "mps" else device


def _double(tensor: Tensor) -> Tensor:
    return tensor.detach().to(working_device(tensor.device), torch.float64)


def _column_blocks(G: Tensor, width: int | None = None) -> Iterator[tuple[slice, Tensor]]:
    """Blocks of columns in float64, a few megabytes each; every block reuses the same memory."""
    width = min(G.shape[1], width or max(1, _BLOCK // len(G)))
    device = working_device(G.device)
    buffer = torch.empty(len(G), width, dtype=torch.float64, device=device)
    for start in range(0, G.shape[1], width):
        columns = slice(start, min(start + width, G.shape[1]))
        yield columns, buffer[:, : columns.stop - start].copy_(G.detach()[:, columns])


def _live(G: Tensor) -> tuple[Tensor, Tensor]:
    """Rows and columns with any gradient at all."""
    device = working_device(G.device)
    rows = torch.stack([row.any() for row in G])
    columns = torch.empty(G.shape[1], dtype=torch.bool, device=G.device)
    width = max(1, _BLOCK // len(G))
    for start in range(0, G.shape[1], width):
        columns[start : start + width] = G[:, start : start + width].any(0)
    return rows.to(device), columns.to(device)


def _left_factor(G: Tensor, live_rows: Tensor) -> tuple[Tensor, Tensor]:
    """U and S of the live rows, by QR of blocks (TSQR): never squares the condition number.

    Only a triangle of the smaller dimension is kept from block to block.
    """
    if not bool(live_rows.any()):
        return torch.zeros(0, 0, dtype=torch.float64), torch.zeros(0, dtype=torch.float64)
    if int(live_rows.sum()) <= G.shape[1]:
        U, s, _ = torch.linalg.svd(_triangle(G, live_rows).T, full_matrices=False)
        return U, s
    everything = torch.ones(G.shape[1], dtype=torch.bool, device=live_rows.device)
    _, s, Vt = torch.linalg.svd(_triangle(G.T, everything), full_matrices=False)
    step = max(1, _BLOCK // G.shape[1])
    left = torch.cat([_double(rows) @ Vt.T for rows in torch.split(G, step)])[live_rows]
    return torch.linalg.qr(left).Q, s  # G V, sorted from loud to quiet: orthonormalised, it is U


def _triangle(G: Tensor, live_rows: Tensor) -> Tensor:
    """The triangle of the QR decomposition of G^T, taken block by block of G's columns."""
    m = int(live_rows.sum())
    width = min(G.shape[1], max(m, _BLOCK // m))
    stacked = torch.zeros(m, m + width, dtype=torch.float64, device=live_rows.device)
    for columns, block in _column_blocks(G, width):
        end = m + columns.stop - columns.start
        stacked[:, m:end] = block[live_rows]
        R = torch.linalg.qr(
            stacked[:, :end].T, mode="r"
        ).R  # a transposed view: LAPACK's own layout
        stacked[:, :m] = R.T
    return stacked[:, :m].T


def _noise(U: Tensor, s: Tensor, b: int, m: int, n: int) -> tuple[float, float]:
    """Standard deviation of the noise per entry: over all rows, and in the loudest row."""
    freedom = max(m - b, 1) * max(n - b, 1)
    # Backward error of the QR, at most eps of the gradient's norm, as it may fall on one row.
    floor = float(s.norm()) * torch.finfo(s.dtype).eps / math.sqrt(max(m, 1))
    if b >= min(m, n):
        return floor, floor
    overall = math.sqrt(float(s[b:].square().sum()) / freedom)
    rows = (U[:, b:] * s[b:]).norm(dim=1) / math.sqrt(max(n - b, 1))
    return max(overall, floor), max(float(rows.max()), overall, floor)
