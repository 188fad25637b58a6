"""Local training that cannot be repeated to the bit: simulated, in the order found or in many."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from spear.errors import Declined
from spear.judge.ensemble import Part, compare
from spear.judge.layer import Recovered
from spear.judge.losses import Loss
from spear.judge.replay import Replay
from spear.judge.side_by_side import AS_TOLD, Parameters, SideBySide
from spear.judge.training import (
    LocalModel,
    LocalTraining,
    Run,
    column_errors,
    knows_order,
    relative_error,
    why_not,
)
from spear.tolerances import (
    DEVIATIONS_TO_SPARE,
    EXACT_ERROR,
    TRAINING_AGREES,
    TRAINING_DISTANCE,
    TRAINING_OTHER_SCALE,
    TRAINING_SIMULATED,
)

_CLIENTS = (32, 128)  # simulated at least, and at most: more lower errors hardly any further
_MOST_ENTRIES = 3 << 29  # that all steps of all clients change: ten seconds
_LARGEST_PART = 1 << 18  # entries of a parameter that is compared: 64 MB for all clients
_FASTER = 0.02  # than told, if a rival is true
_ORDER_MARGIN = 3.0  # errors of the columns that a preactivation's movement may be off by
_DEVIATIONS_PER_MEDIAN = 1.48  # standard deviations of Gaussian numbers in a median deviation
# Scales that are tried where the order is known, in units of what is claimed: if the right one were
# off by more than claimed, it would be nearer to one of these. Of far ones the weights of samples tell.
_SCALES_TRIED = (2, 3, 4, 6, 8, 20, 40)
_UNSPOILED = 0.1  # of all entries: those that no neuron on its other side has reached
_SMALL_ENTRY = 1e-3  # of a column's largest: below it, an entry says little, or is zero


@dataclass(frozen=True, eq=False)
class Simulated:
    """The local training in the order found, or in many orders: how near it comes to the update."""

    labels: Tensor  # (b,) int64
    off: Tensor  # (b,): relative error of the summed gradients
    weights: Tensor  # (b,): of the columns sent, in units of those simulated
    weight_errors: Tensor  # (b,): standard deviations
    highest: Tensor  # (b, m): the largest preactivation in steps with the sample
    slack: Tensor  # (b, m): how far that may be off
    dimensions: int  # of the gradients that samples with one ReLU pattern can have
    scale: float  # of all inputs, at which the training fits best
    scale_error: float  # how far that may be off; infinite if others fit nearly as well
    distance: float  # from clients in other orders, in standard deviations of theirs
    ordered: bool  # is it known which samples each step took?

    @property
    def usual_weight(self) -> float:
        """The median: a few samples may have the wrong label, or be several."""
        return float(self.weights.median())

    @property
    def order_may_explain(self) -> bool:
        """May the order be all that is wrong? Not in chaos, nor if no simulated client is like it."""
        return self.distance <= TRAINING_DISTANCE and 2 * int(self.recognised.sum()) > len(self.off)

    @property
    def recognised(self) -> Tensor:
        """Samples (b,) with the right label, whose trace is that of one sample.

        A trace of several is heavier than others: of two, twice as heavy.
        """
        error = DEVIATIONS_TO_SPARE * self.weight_errors
        heavy = self.weights - self.usual_weight > error + TRAINING_AGREES
        one = (self.weights > 1 / math.sqrt(2)) & (self.weights < math.sqrt(2)) & ~heavy
        if not self.ordered:
            one = one & (self.weights < 2 * (1 - error))
        return one & (self.off <= TRAINING_SIMULATED)


def simulate(found: Recovered, loss: Loss | None) -> Simulated | Declined:
    """Train as the client did, with mini-batches in orders of our own; or say why that fails."""
    protocol = found.view.protocol
    if protocol.epochs is None and protocol.local_steps is None:
        return Declined("the number of local steps is not known")
    why = why_not(found, loss)
    if why is not None:
        return why

    def run(replay: Replay) -> Simulated:
        training = LocalTraining(found.factors, found.selection, replay)
        if knows_order(found):
            return _in_one_order(training, scale_claimed(found))
        return _Clients(training).compared_with_sent()

    error = relative_error(found.factors, found.selection)
    return Replay.attempt(found, loss, relative_error=error, use=run)


def scale_claimed(found: Recovered) -> float:
    """How far the scale of all inputs may be off if they are exact."""
    return EXACT_ERROR * found.value_range / float(found.sizes.max())


def _in_one_order(training: LocalTraining, claimed: float) -> Simulated:
    """The training in the order found; `claimed` is how far the scale of all inputs may be off."""
    labels, batches = training.order()
    labels, run = training.relabelled(labels, batches)
    off = column_errors(run.columns, training.sent)
    weights = (training.sent * run.columns).sum(0) / run.columns.square().sum(0)
    return Simulated(
        labels,
        off,
        weights,
        _deviation(weights) + off / (2 * DEVIATIONS_TO_SPARE),  # most of it along the column
        run.highest,
        _ORDER_MARGIN * float(off.square().mean().sqrt()) * run.range,
        training.replay.label_dimensions,
        *_best_scale(training, claimed, labels, batches),
        distance=0.0,
        ordered=True,
    )


def _best_scale(
    training: LocalTraining, claimed: float, labels: Tensor, batches: list[Tensor]
) -> tuple[float, float]:
    """The first scale of inputs that is off by more than claimed and fits nearly as well, or 1.

    A neuron that rounding put on its other side is followed by others after many steps, and columns
    differ by a few per cent. Some entries stay as they are. A wrong scale changes every entry, and far
    more neurons change sides: the dip at the right one is narrow and deep in the entries that fit best.
    """
    limit = TRAINING_OTHER_SCALE * _unspoiled_error(
        training.in_order(labels, batches), training.sent
    )
    for far in _SCALES_TRIED:
        for scale in (1 + far * claimed, 1 / (1 + far * claimed)):
            there = training.in_order(labels, batches, scale)
            if not _unspoiled_error(there, training.sent) > limit:
                return scale, math.inf
    return 1.0, claimed


def _unspoiled_error(run: Run, sent: Tensor) -> float:
    """Relative error up to which the best tenth of all entries fits."""
    on = sent.abs() > _SMALL_ENTRY * sent.abs().amax(0)
    errors = ((run.columns - sent).abs() / sent.abs())[on]
    return float(errors.kthvalue(1 + int(_UNSPOILED * (len(errors) - 1))).values)


def _deviation(values: Tensor) -> float:
    """Standard deviation of all but a few outliers, from the median deviation."""
    return _DEVIATIONS_PER_MEDIAN * float((values - values.median()).abs().median())


@dataclass(frozen=True, eq=False)
class _Updates:
    """What clients send, and where they were on."""

    columns: Tensor  # (k, m, b): summed gradients of every sample
    behind: list[Tensor]  # (k, ...): those of later layers
    highest: Tensor  # (k, b, m): the largest preactivation in steps with the sample

    @property
    def parts(self) -> list[Tensor]:
        """The column of every sample, and every parameter of later layers, (k, entries) each."""
        return [*self.columns.unbind(2), *(change.flatten(1) for change in self.behind)]

    @staticmethod
    def joined(each: Sequence[_Updates]) -> _Updates:
        return _Updates(
            torch.cat([one.columns for one in each]),
            [torch.cat(parts) for parts in zip(*(one.behind for one in each), strict=True)],
            torch.cat([one.highest for one in each]),
        )


class _Clients:
    """Clients that train on the recovered samples in orders of their own, in single precision."""

    def __init__(self, training: LocalTraining) -> None:
        self.training, self.others = training, training.factors.view.others
        labels, _ = training.replay.nearest_labels(training.replay.Z)
        first = [step[0] for step in training.drawn_steps(1)]
        self.labels, _ = training.relabelled(labels, first)
        behind = [name for name, _ in training.replay.network.named_parameters()]
        compared = [name for name in behind if name in self.others]
        self.behind = [name for name in compared if self.others[name].numel() <= _LARGEST_PART]

    def compared_with_sent(self) -> Simulated:
        """The client among them: what its order cannot explain (ensemble.py)."""
        training, b = self.training, self.training.selection.b
        steps = training.drawn_steps(self._affordable(training.drawn_steps(1)))
        clients = self._trained(steps)
        parts = self._parts(clients, steps)
        later = list(zip(parts[b:], self.behind, strict=True))
        matrices = [part for part, name in later if self.others[name].ndim > 1]
        biases = [part for part, name in later if self.others[name].ndim == 1]
        compared = compare([group for group in (parts[:b], matrices, biases) if group])
        scale, scale_error = compared.worst
        weights = torch.stack([part.weights() for part in parts[:b]])  # (b, k / 2 + 1)
        others = weights[:, :-1]

        # How much farther than they from their mean: if it took its samples otherwise, it is.
        mean = clients.columns.mean(0).to(training.sent)
        spread = (clients.columns - mean).square().sum(1).mean(0).sqrt()  # (b,)
        far = max(1.0, float(((training.sent - mean).norm(dim=0) / spread).median()))
        highest = clients.highest.to(mean)
        return Simulated(
            self.labels,
            column_errors(mean, training.sent),
            1 + weights[:, -1] - others.mean(1),
            far * others.std(1),
            highest.mean(0),
            far * DEVIATIONS_TO_SPARE * highest.std(0),
            training.replay.label_dimensions,
            1 + _FASTER * scale,
            far * _FASTER * scale_error,
            compared.distance / far,
            ordered=False,
        )

    def _parts(self, clients: _Updates, steps: list[Tensor]) -> list[Part]:
        """The column of every sample, and every parameter of later layers."""
        sent = [*self.training.sent.T, *(self.others[name].flatten() for name in self.behind)]
        some = [step[-(len(step) // 8) :] for step in steps]  # the last clients
        rivals = [self._rival(some, faster).parts for faster in self._rivals()]
        theirs = [torch.stack(each) for each in zip(*rivals, strict=True)]
        return [Part(*each) for each in zip(clients.parts, sent, theirs, strict=True)]

    def _rivals(self) -> list[list[str]]:
        """Parameters that may have moved faster than others, so that inputs have another scale."""
        shapes = {name: p.ndim for name, p in self._model().named_parameters()}
        biases = [name for name, dimensions in shapes.items() if dimensions == 1]
        return [["weight"], ["bias"], biases, [name for name in shapes if name not in biases]]

    def _rival(self, steps: list[Tensor], faster: list[str]) -> _Updates:
        """What clients send some of whose parameters moved faster than was told.

        The bias gradient gives inputs their scale: if biases moved faster, inputs were larger than they
        seem, and if weights did, smaller.
        """
        rate = 1 + _FASTER
        scale = rate ** (("bias" in faster) - ("weight" in faster))
        return self._trained(steps, scale, dict.fromkeys(faster, rate))

    def _affordable(self, steps: list[Tensor]) -> int:
        """How many clients can be simulated that take so many steps."""
        entries = sum(p.numel() for p in self._model().parameters())
        least, most = _CLIENTS
        return max(least, min(most, _MOST_ENTRIES // (entries * len(steps))))

    def _trained(
        self, steps: list[Tensor], scale: float = 1.0, rates: Mapping[str, float] = AS_TOLD
    ) -> _Updates:
        """What clients send that take these samples (k, size), with inputs this much larger."""
        local, training = self._model(scale), self.training
        criterion = training.replay.criterion

        def loss(parameters: Parameters, samples: Tensor) -> Tensor:
            return criterion(local.outputs(parameters, samples).double(), self.labels[samples])

        start = {name: p.detach() for name, p in local.named_parameters()}
        clients = SideBySide(loss, start, training.protocol, training.factors.check_time)
        generator = torch.Generator().manual_seed(0)
        return _Updates.joined(
            [
                self._sent(clients, local, [step[some] for step in steps], rates, generator)
                for some in clients.split(torch.arange(len(steps[0]), device=local.C.device))
            ]
        )

    def _sent(
        self,
        clients: SideBySide,
        local: LocalModel,
        steps: list[Tensor],
        rates: Mapping[str, float],
        generator: torch.Generator,
    ) -> _Updates:
        """What clients send, with the noise and the rounding of what was sent."""
        highest = torch.full((len(steps[0]), *local.offset.shape), -torch.inf).to(local.C)

        def watch(parameters: Parameters, batch: Tensor) -> None:
            Z = local.C[batch] @ parameters["weight"].mT + parameters["bias"][:, None]
            Z = Z + local.offset[batch]  # (k, size, m)
            highest.scatter_reduce_(1, batch[:, :, None].expand_as(Z), Z, "amax")

        moved = clients.run(steps, watch, rates)
        factors, Q = self.training.factors, self.training.selection.Q.to(local.C)
        columns = moved["weight"] @ Q
        columns += factors.noise * Q.norm(dim=0) * _normal_like(columns, generator)
        rounding = factors.eps / clients.protocol.rate
        behind = []
        for name in self.behind:
            change, weight = moved[f"behind.{name}"], clients.start[f"behind.{name}"]
            behind.append(change + rounding * weight.abs() * _normal_like(change, generator))
        return _Updates(columns, behind, highest)

    def _model(self, scale: float = 1.0) -> LocalModel:
        """The client's, with inputs this much larger."""
        local = LocalModel(self.training.factors, self.training.selection, self.training.replay)
        local = local.float()
        local.C, local.offset = scale * local.C.float(), local.offset.float()
        return local


def _normal_like(values: Tensor, generator: torch.Generator) -> Tensor:
    return torch.randn(values.shape, generator=generator).to(values)
