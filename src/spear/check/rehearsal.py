"""A dress rehearsal: the attacked layer's gradient on made-up inputs, to see its spectrum beforehand.

No client's data is needed. What noise will leave of a sample depends on the model, its weights and the
batch size more than on the data: see docs/check.md for how far that carries.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor, nn

from spear.errors import Declined, InvalidOption
from spear.federated import clipping_factors, defences
from spear.update import Protocol

_SIDES = (32, 28, 64, 224, 96)  # of pictures that a convolution is tried with
_TOKENS = 16  # a sentence's length, where a model reads words
_RANK_TOLERANCE = 1e-6  # of the largest singular value: anything below is rounding of float32


@dataclass(frozen=True, eq=False)
class Rehearsal:
    """A made-up batch at the layer: its inputs X and output gradients D, so dL/dW = D X."""

    shape: tuple[int, ...]
    """Of one input of the model."""
    given: bool
    """Did the user name that shape?"""
    inputs: Tensor  # X (rows, n), float64
    output_gradients: Tensor  # D (m, rows), float64
    preactivations: Tensor  # (m, rows)
    reads_data: bool
    """Were the layer's inputs the model's own?"""

    @property
    def rows(self) -> int:
        """What the layer takes for samples: more than the batch where it reads tokens."""
        return len(self.inputs)

    @cached_property
    def spectrum(self) -> Tensor:
        """Singular values of dL/dW (rows,), which is never formed."""
        left = torch.linalg.qr(self.output_gradients).R  # (r, rows)
        right = torch.linalg.qr(self.inputs.T).R  # (r, rows)
        values: Tensor = torch.linalg.svdvals(left @ right.T)
        return values

    @property
    def rank(self) -> int:
        """How many samples show in the gradient."""
        s = self.spectrum
        return int((s > _RANK_TOLERANCE * s[0]).sum()) if len(s) and float(s[0]) > 0 else 0

    @property
    def entry(self) -> float:
        """Root mean square entry of dL/dW."""
        m, n = len(self.output_gradients), self.inputs.shape[1]
        return float(self.spectrum.norm()) / math.sqrt(m * n)

    @property
    def off(self) -> float:
        """Of the entries of D whose neuron is off, the share that is zero: 1 behind a ReLU."""
        off = self.preactivations < 0
        return float((self.output_gradients[off] == 0).double().mean()) if bool(off.any()) else 0.0

    @property
    def on(self) -> float:
        """Of the entries of D whose neuron is on, the share that is not zero: 1 without dropout."""
        on = self.preactivations > 0
        return float((self.output_gradients[on] != 0).double().mean()) if bool(on.any()) else 0.0

    def error(self, sigma: float) -> float:
        """What noise of sigma on an entry of dL/dW leaves, in units of the inputs' own size.

        With the right D, least squares gives the inputs D^+ dL/dW, off by D^+ times the noise.
        """
        lengths = torch.linalg.pinv(self.output_gradients).square().sum(1)  # (rows,)
        size = float(self.inputs.square().mean())
        return sigma * math.sqrt(float(lengths.mean()) / size) if size else math.inf

    def rounding(self, protocol: Protocol) -> float:
        """Noise on an entry that half precision, a grid or pruning leave."""
        if not protocol.coarse:
            return 0.0
        exact = {"": (self.output_gradients @ self.inputs).float()}  # (m, n)
        sent = defences.prune(exact, protocol.pruned) if protocol.pruned else exact
        if protocol.bits is not None:
            sent = defences.quantise(sent, protocol.bits)
        elif protocol.precision in ("float16", "bfloat16"):
            sent = defences.half(sent, getattr(torch, protocol.precision))
        return float((sent[""] - exact[""]).double().square().mean().sqrt())


def rehearse(
    model: nn.Module,
    layer: str,
    samples: int,
    *,
    shape: tuple[int, ...] | None = None,
    clip: float | None = None,
    whole: bool = False,
    seed: int = 0,
) -> Rehearsal | Declined:
    """The layer's gradient for standard normal inputs and random labels; or why there is none.

    Args:
        model: as the client trains it, in train or eval mode; it stays as it is.
        layer: the name of a linear layer.
        samples: of the made-up batch.
        shape: of one input; without it the usual ones are tried.
        clip: clip every sample's gradient to this norm, as DP-SGD does; or
        whole: the gradient of all of them.
        seed: of inputs, labels and dropout.

    >>> net = nn.Sequential(nn.Linear(12, 20), nn.ReLU(), nn.Linear(20, 3))
    >>> seen = rehearse(net, "0", 4)
    >>> seen.rows, seen.rank, seen.off, seen.on
    (4, 4, 1.0, 1.0)
    """
    working = copy.deepcopy(model)
    if next(working.parameters()).dtype in (torch.float16, torch.bfloat16):
        working = working.float()
    complaint = ""
    for candidate in [shape] if shape is not None else _shapes(working, layer):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            inputs = _inputs(working, samples, candidate)
            try:
                seen = _run(working, layer, inputs, clip, whole)
                return replace(seen, given=shape is not None)
            except Exception as error:  # the user's forward may raise anything
                complaint = complaint or f"{type(error).__name__}: {str(error)[:120]}"
    if shape is not None:
        raise InvalidOption(
            f"the model cannot be run on inputs of shape {' x '.join(map(str, shape))} "
            f"({complaint}): give the shape of one input, without the batch"
        )
    return Declined(
        f"the model could not be run on made-up inputs ({complaint or 'no shape to try'})"
    )


def _run(
    model: nn.Module, layer: str, inputs: Tensor, clip: float | None, whole: bool
) -> Rehearsal:
    seen: list[tuple[Tensor, Tensor]] = []
    module = model.get_submodule(layer)
    handle = module.register_forward_hook(lambda _, args, out: seen.append((args[0], out)))
    try:
        outputs = _tensor(model(inputs))
    finally:
        handle.remove()
    targets = _targets(outputs)
    (x, z) = seen[0]
    trained = [p for p in model.parameters() if p.requires_grad] if clip and whole else []
    gradient, *others = torch.autograd.grad(
        _loss(outputs, targets), [z, *trained], allow_unused=True
    )
    D = gradient.detach().flatten(0, -2).T.double()  # (m, rows)
    if clip is not None and whole:
        norm = math.hypot(*(float(other.norm()) for other in others if other is not None))
        D = D * min(1.0, clip / norm) if norm else D
    elif clip is not None and D.shape[1] == len(inputs):
        D = D * clipping_factors(model, inputs, targets, clip, _loss).double()
    if not bool(D.isfinite().all() and x.isfinite().all()):
        raise ValueError("its gradient overflows, or its weights are no numbers")
    return Rehearsal(
        tuple(inputs.shape[1:]),
        False,
        x.detach().flatten(0, -2).double(),
        D,
        z.detach().flatten(0, -2).T.double(),
        x.numel() == inputs.numel() and torch.equal(x.flatten(), inputs.flatten().to(x)),
    )


def _shapes(model: nn.Module, layer: str) -> Iterator[tuple[int, ...]]:
    """Shapes of one input that a model with this layer may take."""
    first = next(
        (m for m in model.modules() if next(m.parameters(recurse=False), None) is not None), None
    )
    if isinstance(first, nn.modules.conv._ConvNd):
        dimensions = len(first.kernel_size)
        yield from ((first.in_channels, *[side] * dimensions) for side in _SIDES)
        return
    if isinstance(first, (nn.Embedding, nn.EmbeddingBag)):
        yield (_TOKENS,)
        return
    source = first if isinstance(first, nn.Linear) else model.get_submodule(layer)
    n = int(getattr(source, "in_features", 0))
    yield (n,)
    for channels in (3, 1):
        side = math.isqrt(n // channels)
        if channels * side * side == n:
            yield (channels, side, side)


def _inputs(model: nn.Module, samples: int, shape: tuple[int, ...]) -> Tensor:
    parameter = next(model.parameters())
    words = next(
        (m for m in model.modules() if isinstance(m, (nn.Embedding, nn.EmbeddingBag))), None
    )
    if words is not None:
        return torch.randint(words.num_embeddings, (samples, *shape)).to(parameter.device)
    return torch.randn(samples, *shape).to(parameter)


def _tensor(outputs: object) -> Tensor:
    """What a loss would be taken of: the outputs, their logits, or the first of several."""
    if isinstance(outputs, Tensor):
        return outputs
    if isinstance(getattr(outputs, "logits", None), Tensor):
        return outputs.logits  # type: ignore[attr-defined, no-any-return]
    if isinstance(outputs, (tuple, list)) and outputs and isinstance(outputs[0], Tensor):
        return outputs[0]
    raise TypeError(f"its output is a {type(outputs).__name__}, expected a tensor")


def _targets(outputs: Tensor) -> Tensor:
    """Random classes; random numbers where there is a single output."""
    if outputs.ndim == 2 and outputs.shape[1] > 1:
        return torch.randint(outputs.shape[1], (len(outputs),)).to(outputs.device)
    return torch.randn(outputs.shape).to(outputs)


def _loss(outputs: object, targets: Tensor) -> Tensor:
    predicted = _tensor(outputs)
    if targets.is_floating_point():
        return nn.functional.mse_loss(predicted, targets)
    return nn.functional.cross_entropy(predicted, targets)
