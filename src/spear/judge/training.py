"""Repeats a client's local training from the recovered samples: the proof for FedAvg.

The weights a client sends back hold the sum of its gradients over many steps. A neuron may have
been on in some steps and off in others, so signs and zeros no longer match one to one. But with
inputs and labels the training itself can be repeated, and must lead to the weights that came back.

Samples are x = C R, so W acts on them only through W R^T (m, b), and a step changes that by lr dL/dZ C:
b numbers per neuron are enough.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from itertools import zip_longest

from torch import Tensor, nn

from spear.errors import Declined
from spear.factors import Factors
from spear.judge.layer import Recovered
from spear.judge.losses import Loss, compares_numbers, negative_probability, usual_loss
from spear.judge.relu_boundary import Flip, ReluStates, with_relu_states
from spear.judge.replay import Replay
from spear.judge.selection import Selection
from spear.tolerances import (
    TRAINING_AGREES,
    TRAINING_CLOSELY,
    TRAINING_FOLLOWS,
    TRAINING_LATER,
    TRAINING_OTHER_RATE,
    TRAINING_RECOGNISED,
)

_LARGEST_ERROR = 0.5  # beyond this, neurons on the wrong side do not explain it
_MOST_FLIPS = 8  # neurons of a sample that may have been on another side than here
_CANDIDATES = 24  # neurons nearest to their threshold that are tried
_STEPS = 600  # of training, all tries together
_SMALLEST_MARGIN = 1e-4  # of a layer's preactivations: float32 rounds to 1e-6 of them
_MARGIN_ERRORS = 20.0  # errors of an input that a preactivation may be off by
_LARGEST_MARGIN = 1e-3  # beyond it, too many neurons are near to find the right ones
_EPOCHS = 200  # tried where the number is not known
_PATIENCE = 3  # epochs after the replayed weights have moved too far
_FOUND_OUT = (None, usual_loss, negative_probability)  # where no loss was told


@dataclass(frozen=True, eq=False)
class Retrained:
    """What repeating the local training showed."""

    labels: Tensor  # (b,) int64: the likeliest label
    matched: Tensor  # (b,) bool: do its summed gradients agree?
    recognised: Tensor  # (b,) bool: do they agree except for a neuron or two?
    closely: Tensor  # (b,) bool: do they agree so well that no mix of samples does?
    epochs: int
    objections: tuple[str, ...]  # parts of the update that disagree
    off: Tensor  # (b,): relative error of the sums
    dimensions: int  # of the gradients that samples with one ReLU pattern can have
    other_rate: float | None  # times the one told, if that explains far more of the update


def retrain(found: Recovered, loss: Loss | None) -> Retrained | Declined:
    """Repeat the client's local training; or say why that cannot be done."""
    view = found.view
    if view.model is None:
        return Declined("no model was given")
    size = view.protocol.local_batch_size
    unknown = {
        "the learning rate is not known (give lr=)": view.protocol.lr is None,
        "the order of the client's mini-batches is not known": size is not None and size < found.b,
        "dropout drew another mask in every step": view.dropout > 0,
        "targets that are numbers are not known": compares_numbers(loss),
        "its inputs changed while the layers before it were trained": not view.reads_data,
    }
    why = next((words for words, applies in unknown.items() if applies), None)
    if why is not None:
        return Declined(f"the client's training cannot be repeated: {why}")
    return _repeated(found, loss)


def _repeated(found: Recovered, loss: Loss | None) -> Retrained | Declined:
    """With the loss that was told; otherwise with the first that explains all samples, or most."""
    factors, selection = found.factors, found.selection
    tried: list[Retrained] = []
    for known in _FOUND_OUT if loss is None else (loss,):

        def repeat(replay: Replay, first: bool = not tried) -> Retrained | None:
            same = not first and replay.squash is None  # as on logits
            return None if same else _Retraining(factors, selection, replay).run()

        error = _relative_error(factors, selection)
        retrained = Replay.attempt(found, known, relative_error=error, use=repeat)
        if isinstance(retrained, Declined) and not tried:
            return retrained
        if retrained is None or isinstance(retrained, Declined):
            break
        tried.append(retrained)
        if bool(retrained.matched.all()) and not retrained.objections:
            return retrained
    return max(tried, key=lambda each: int(each.matched.sum()))


def _relative_error(factors: Factors, selection: Selection) -> Tensor:
    """Relative error of the recovered inputs (b,), from the update's noise."""
    noise = factors.noise * (selection.C / factors.singular_values).norm(dim=1)
    error: Tensor = noise * factors.n**0.5 / selection.C.norm(dim=1)
    return error


class _Local(nn.Module):
    """The client's model on samples in coordinates of C: W R^T, then the network behind."""

    def __init__(self, factors: Factors, selection: Selection, replay: Replay) -> None:
        super().__init__()
        self.C = selection.C
        self.offset = replay.Z - (self.C @ factors.preactivation.T + replay.bias)
        self.weight = nn.Parameter(factors.preactivation.clone())  # (m, b)
        self.bias = nn.Parameter(replay.bias.clone())
        self.structure = replay.structure
        self.states = ReluStates()
        self.behind = with_relu_states(copy.deepcopy(replay.network), self.states)

    def forward(self) -> Tensor:
        Z = self.C @ self.weight.T + self.bias + self.offset
        return self.structure.matrix(self.behind(Z), len(Z))


@dataclass(frozen=True, eq=False)
class _Repeated:
    off: Tensor  # (b,): relative error of each column
    noise: Tensor  # (b,): the part of it that noise alone explains
    epochs: int
    objections: tuple[str, ...]
    length: float  # of what the client changed, relative to this
    near: tuple[tuple[float, Flip], ...] = ()  # neurons near their threshold, and how near

    def judged(self, labels: Tensor, dimensions: int, other_rate: float | None = None) -> Retrained:
        closely = self.off <= TRAINING_CLOSELY
        closely &= closely.new_tensor(not self.objections and bool(self.matched.all()))
        return Retrained(
            labels,
            self.matched,
            self.recognised,
            closely,
            self.epochs,
            self.objections,
            self.off,
            dimensions,
            other_rate,
        )

    @property
    def matched(self) -> Tensor:
        return self.off <= TRAINING_AGREES + 2 * self.noise

    @property
    def recognised(self) -> Tensor:
        return self.off <= TRAINING_RECOGNISED


def _nearest(repeated: _Repeated, sample: int, turned: frozenset[Flip]) -> list[Flip]:
    """A sample's neurons that come nearest to their threshold, without those already flipped."""
    own = [(away, t) for away, t in repeated.near if t.sample == sample and t not in turned]
    return [flip for _, flip in sorted(own, key=lambda pair: pair[0])[:_CANDIDATES]]


class _Retraining:
    def __init__(self, factors: Factors, selection: Selection, replay: Replay) -> None:
        self.protocol = factors.protocol
        self.factors, self.selection, self.replay = factors, selection, replay

    def run(self) -> Retrained:
        labels, _ = self.replay.nearest_labels(self.replay.Z)
        dimensions = self.replay.label_dimensions
        first = self._repeated(labels)
        if bool(first.matched.all()):
            return first.judged(labels, dimensions)
        scaled = self._repeated(labels, epochs=first.epochs, pace=first.length)
        if float(scaled.off.median()) <= TRAINING_OTHER_RATE * float(first.off.median()):
            return first.judged(labels, dimensions, first.length)
        if float(first.off.max()) > _LARGEST_ERROR:
            return first.judged(labels, dimensions)
        return self._flipped(labels, first).judged(labels, dimensions)

    def _flipped(self, labels: Tensor, best: _Repeated) -> _Repeated:
        """The training with neurons near their threshold on the side that the client's were on.

        A flip changes its own sample's column and hardly any other. So one is tried for every sample
        that is off, all at a time, and each sample keeps the flip that brought it nearest.
        """
        flips: frozenset[Flip] = frozenset()
        steps = _STEPS
        for _ in range(_MOST_FLIPS):
            lost = (~best.matched).nonzero().flatten().tolist()
            tried = [_nearest(best, i, flips) for i in lost]
            nearest = {i: (float(best.off[i]), frozenset[Flip]()) for i in lost}
            for several in zip_longest(*tried):
                steps -= best.epochs
                if steps < 0:
                    return best
                some = frozenset(flip for flip in several if flip is not None)
                off = self._repeated(labels, flips | some, best.epochs).off
                for flip in some:
                    reached = (float(off[flip.sample]), frozenset([flip]))
                    nearest[flip.sample] = min(nearest[flip.sample], reached, key=lambda r: r[0])
            found = frozenset[Flip]().union(*(kept for _, kept in nearest.values()))
            if not found:
                return best
            flips |= found
            best = self._repeated(labels, flips, best.epochs)
        return best

    def _repeated(
        self,
        labels: Tensor,
        flips: frozenset[Flip] = frozenset(),
        epochs: int | None = None,
        pace: float = 1.0,
    ) -> _Repeated:
        """The local training with these labels; of unknown epochs, the number that fits best.

        `pace` multiplies the learning rate that was told.
        """
        best: _Repeated | None = None
        beyond = 0
        epochs = epochs or self.protocol.epochs or self.protocol.local_steps
        local = _Local(self.factors, self.selection, self.replay)
        local.states.flips = flips
        error = self.replay.relative_error
        local.states.reach = (_MARGIN_ERRORS * error).clamp(_SMALLEST_MARGIN, _LARGEST_MARGIN)
        start = {name: p.detach().clone() for name, p in local.named_parameters()}
        optimiser = self.protocol.optimiser(list(local.parameters()))
        for epoch in range(1, (epochs or _EPOCHS) + 1):
            self.factors.check_time()
            local.states.begin(epoch)
            rate = pace * self.protocol.rates(epochs or epoch)[epoch - 1]
            outputs = local()
            optimiser.zero_grad()
            loss = self.replay.criterion(outputs, labels)
            loss.backward()  # type: ignore[no-untyped-call]
            self.protocol.local_step(local, optimiser, start, rate)
            if epochs not in (None, epoch):
                continue
            moved = self._moved(local, start, epoch)
            off = self._columns(moved["weight"])
            if best is None or float(off.median()) < float(best.off.median()):
                near = tuple(local.states.near)
                objections = self._objections(moved, start, off)
                length = float(self.factors.L.norm() / moved["weight"].norm())
                best = _Repeated(off, self._noise, epoch, objections, length, near)
            beyond += bool(moved["weight"].norm() > 1.2 * self.factors.L.norm())
            if beyond > _PATIENCE:
                break
        assert best is not None
        return best

    def _moved(self, local: _Local, start: dict[str, Tensor], epoch: int) -> dict[str, Tensor]:
        """The sum of gradients that `observe` would read off these weights, by name."""
        kept = self.protocol.weight_decay_factor(epoch)
        return {
            name: (kept * start[name] - p.detach()) / self.protocol.rate
            for name, p in local.named_parameters()
        }

    def _columns(self, replayed: Tensor) -> Tensor:
        """Relative error (b,) of each column of the summed dL/dZ."""
        Q, L = self.selection.Q, self.factors.L
        off: Tensor = ((replayed - L) @ Q).norm(dim=0) / (L @ Q).norm(dim=0)
        return off

    @property
    def _noise(self) -> Tensor:
        """Relative error (b,) of each column from the update's noise."""
        Q, L = self.selection.Q, self.factors.L
        noise = self.factors.noise * len(L) ** 0.5
        share: Tensor = noise * Q.norm(dim=0) / (L @ Q).norm(dim=0)
        return share

    def _objections(
        self, moved: dict[str, Tensor], start: dict[str, Tensor], off: Tensor
    ) -> tuple[str, ...]:
        """Later layers that the repeated training changes differently, beyond the columns' error."""
        seen = {f"behind.{name}": grad for name, grad in self.factors.view.others.items()}
        share = TRAINING_LATER + TRAINING_FOLLOWS * float(off.square().mean().sqrt())
        eps = self.factors.eps
        objections = []
        for name in moved.keys() & seen.keys():
            off = (moved[name] - seen[name].to(moved[name])).norm()
            rounding = eps * start[name].norm() / self.protocol.rate  # of the weights subtracted
            if not off <= share * moved[name].norm() + rounding:
                own = name.removeprefix("behind.")
                objections.append(f"repeating the local training changes {own!r} in another way")
        return tuple(sorted(objections))
