"""Repeats a client's local training from the recovered samples: the proof for FedAvg.

The weights a client sends back hold the sum of its gradients over many steps. A neuron may have
been on in some steps and off in others, so signs and zeros no longer match one to one. But with
inputs and labels the training itself can be repeated, and must lead to the weights that came back.

Samples are x = C R, so W acts on them only through W R^T (m, b), and a step changes that by lr dL/dZ C:
b numbers per neuron are enough.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import NamedTuple

import scipy
import torch
from torch import Tensor, nn
from torch.func import functional_call

from spear.errors import Declined
from spear.factors import Factors
from spear.judge.layer import Recovered
from spear.judge.losses import (
    Loss,
    compares_numbers,
    negative_probability,
    users_code,
    usual_loss,
)
from spear.judge.order import OrderSearch
from spear.judge.replay import Replay
from spear.judge.selection import Selection
from spear.judge.side_by_side import Parameters, SideBySide
from spear.tolerances import (
    TRAINING_AGREES,
    TRAINING_CLOSELY,
    TRAINING_FOLLOWS,
    TRAINING_LATER,
    TRAINING_OTHER_RATE,
    TRAINING_RECOGNISED,
    TRAINING_SIMULATED,
)

_EPOCHS = 200  # tried where the number is not known
_RELABELLINGS = 4  # the first mends most, and right labels show the others
_ENTRIES = 1 << 24  # of the gradients of all labels: 128 MB in float64
_ORDERS = 6  # of mini-batches that are simulated
_ORDER_MARGIN = 3.0  # errors of the columns that a preactivation's movement may be off by
_DEVIATIONS_PER_MEDIAN = 1.48  # standard deviations of Gaussian numbers in a median deviation
_SCALE_STEP = 0.1  # of inputs, for differences of a training whose order is not known
# Scales that are tried where the order is known, in units of what is claimed: if the right one were
# off by more than claimed, it would be nearer to one of these. Of far ones the weights of samples tell.
_SCALES_TRIED = (2, 3, 4, 6, 8, 20, 40)
_LEAST_SHARE = 1e-3  # of a slope, below which it is all noise
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
    if not knows_order(found):
        return Declined(
            "the client's training cannot be repeated: the order of the client's mini-batches is not "
            "known"
        )
    why = why_not(found, loss)
    return _repeated(found, loss) if why is None else why


def retrain_in_order_found(found: Recovered, loss: Loss | None) -> Retrained | Declined:
    """The same after epochs of mini-batches, whose order is looked for (order.py)."""
    protocol = found.view.protocol
    if protocol.epochs is None or (protocol.local_batch_size or found.b) >= found.b:
        return Declined("epochs of several mini-batches are not known of")
    why = why_not(found, loss)
    if why is not None:
        return why

    def run(replay: Replay) -> Retrained | Declined:
        return LocalTraining(found.factors, found.selection, replay).run_in_any_order()

    error = relative_error(found.factors, found.selection)
    return Replay.attempt(found, loss, relative_error=error, use=run)


def knows_order(found: Recovered) -> bool:
    """Is it known, or can it be found, which samples each local step took?"""
    protocol = found.view.protocol
    size = protocol.local_batch_size
    return size is None or size >= found.b or protocol.epochs == 1


def why_not(found: Recovered, loss: Loss | None) -> Declined | None:
    """Why the local training cannot be repeated, if so."""
    view = found.view
    if view.model is None:
        return Declined("no model was given")
    unknown = {
        "the learning rate is not known (give lr=)": view.protocol.lr is None,
        "dropout drew another mask in every step": view.dropout > 0,
        "targets that are numbers are not known": compares_numbers(loss),
        "its inputs changed while the layers before it were trained": not view.reads_data,
    }
    why = next((words for words, applies in unknown.items() if applies), None)
    return None if why is None else Declined(f"the client's training cannot be repeated: {why}")


def _repeated(found: Recovered, loss: Loss | None) -> Retrained | Declined:
    """With the loss that was told; otherwise with the first that explains all samples, or most."""
    factors, selection = found.factors, found.selection
    tried: list[Retrained] = []
    for known in _FOUND_OUT if loss is None else (loss,):

        def repeat(replay: Replay, first: bool = not tried) -> Retrained | None:
            same = not first and replay.squash is None  # as on logits
            return None if same else LocalTraining(factors, selection, replay).run()

        error = relative_error(factors, selection)
        retrained = Replay.attempt(found, known, relative_error=error, use=repeat)
        if isinstance(retrained, Declined) and not tried:
            return retrained
        if retrained is None or isinstance(retrained, Declined):
            break
        tried.append(retrained)
        if bool(retrained.matched.all()) and not retrained.objections:
            return retrained
    return max(tried, key=lambda each: int(each.matched.sum()))


def relative_error(factors: Factors, selection: Selection) -> Tensor:
    """Relative error of the recovered inputs (b,), from the update's noise."""
    noise = factors.noise * (selection.C / factors.singular_values).norm(dim=1)
    error: Tensor = noise * factors.n**0.5 / selection.C.norm(dim=1)
    return error


class LocalModel(nn.Module):
    """The client's model on samples in coordinates of C: W R^T, then the network behind."""

    def __init__(self, factors: Factors, selection: Selection, replay: Replay) -> None:
        super().__init__()
        self.C = selection.C
        self.offset = replay.Z - (self.C @ factors.preactivation.T + replay.bias)
        self.weight = nn.Parameter(factors.preactivation.clone())  # (m, b)
        self.bias = nn.Parameter(replay.bias.clone())
        self.structure = replay.structure
        self.behind = copy.deepcopy(replay.network)

    @property
    def Z(self) -> Tensor:
        """Preactivations (b, m)."""
        Z: Tensor = self.C @ self.weight.T + self.bias + self.offset
        return Z

    def forward(self) -> Tensor:
        with users_code():
            return self.structure.matrix(self.behind(self.Z), len(self.C))

    def outputs(self, parameters: Parameters, samples: Tensor) -> Tensor:
        """Of some samples (k,), with other parameters than its own."""
        Z = self.C[samples] @ parameters["weight"].T + parameters["bias"] + self.offset[samples]
        behind = {name: parameters[f"behind.{name}"] for name, _ in self.behind.named_parameters()}
        with users_code():
            return self.structure.matrix(functional_call(self.behind, behind, (Z,)), len(samples))


@dataclass(frozen=True, eq=False)
class _Repeated:
    off: Tensor  # (b,): relative error of each column
    noise: Tensor  # (b,): the part of it that noise alone explains
    epochs: int
    objections: tuple[str, ...]
    length: float  # of what the client changed, relative to this

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


def column_errors(ours: Tensor, sent: Tensor) -> Tensor:
    """Of each column (b,) of what was sent (m, b)."""
    error: Tensor = (ours - sent).norm(dim=0) / sent.norm(dim=0)
    return error


class Run(NamedTuple):
    """The training in one order."""

    columns: Tensor  # (m, b): summed gradients
    highest: Tensor  # (b, m): the largest preactivation in steps with the sample
    range: Tensor  # (b, m): of preactivations in all steps
    behind: dict[str, Tensor]  # summed gradients of later layers, by name


class LocalTraining:
    """The client's training, repeated from the samples of a selection."""

    def __init__(self, factors: Factors, selection: Selection, replay: Replay) -> None:
        self.protocol = factors.protocol
        self.factors, self.selection, self.replay = factors, selection, replay

    @property
    def sent(self) -> Tensor:
        """Summed gradients of every sample (m, b)."""
        sent: Tensor = self.factors.L @ self.selection.Q
        return sent

    def run(self) -> Retrained:
        dimensions = self.replay.label_dimensions
        size = self.protocol.local_batch_size
        if size is not None and size < self.selection.b:
            labels, _, once = self.in_order_found(size)
            return once.judged(labels, dimensions)
        labels, _ = self.replay.nearest_labels(self.replay.Z)
        first = self._repeated(labels)
        if not bool(first.recognised.all()) and self.protocol.steps is not None:
            steps = [torch.arange(self.selection.b, device=labels.device)] * first.epochs
            labels, _ = self.relabelled(labels, steps)
            first = self._repeated(labels)
        if bool(first.matched.all()):
            return first.judged(labels, dimensions)
        scaled = self._repeated(labels, epochs=first.epochs, pace=first.length)
        if float(scaled.off.median()) <= TRAINING_OTHER_RATE * float(first.off.median()):
            return first.judged(labels, dimensions, first.length)
        return first.judged(labels, dimensions)

    def run_in_any_order(self) -> Retrained | Declined:
        """The training in the order of mini-batches that comes nearest to what was sent."""
        labels, _ = self.replay.nearest_labels(self.replay.Z)
        labels, _ = self.relabelled(labels, [step[0] for step in self.drawn_steps(1)])
        local, start, optimiser = self.prepared()

        def loss(parameters: Parameters, samples: Tensor) -> Tensor:
            return self.replay.criterion(local.outputs(parameters, samples), labels[samples])

        training = SideBySide(loss, start, self.protocol, self.factors.check_time)
        batches = OrderSearch(training, self.sent, self.selection.Q).run()
        if batches is None:
            return Declined("no order of the mini-batches was found that leads to what was sent")
        for rate, batch in zip(self.protocol.rates(len(batches)), batches, strict=True):
            self._step(local, optimiser, start, rate, labels, batch)
        once = self._compared(local, start, len(batches))
        return once.judged(labels, self.replay.label_dimensions)

    def in_order_found(self, size: int) -> tuple[Tensor, list[Tensor], _Repeated]:
        """One pass over mini-batches, whose order the recovered columns show: labels, batches, result.

        A column is the gradient at the weights that its batch saw. So those samples come first whose
        gradient at the first weights it is; the weights after them tell who comes next.
        """
        local, start, optimiser = self.prepared()
        here, b = copy.copy(self.replay), self.selection.b
        here.network = local.behind
        labels = torch.full((b,), -1, device=self.replay.Z.device)
        batches = []
        for rate in self.protocol.rates(math.ceil(b / size)):
            self.factors.check_time()
            open_ = (labels < 0).nonzero().flatten()
            tried, off = here.nearest_labels(local.Z.detach()[open_], self.replay.D[open_])
            first = off.argsort()[:size]
            labels[open_[first]] = tried[first]
            batches.append(open_[first])
            self._step(local, optimiser, start, rate, labels, batches[-1])
        return labels, batches, self._compared(local, start, len(batches))

    def order(self) -> tuple[Tensor, list[Tensor]]:
        """The likeliest labels, and the samples of every step where these are known or can be found."""
        b, size = self.selection.b, self.protocol.local_batch_size
        if size is not None and size < b:
            labels, batches, _ = self.in_order_found(size)
            return labels, batches
        labels, _ = self.replay.nearest_labels(self.replay.Z)
        return labels, [step[0] for step in self.drawn_steps(1)]

    def drawn_steps(self, orders: int) -> list[Tensor]:
        """The samples (orders, size) of every step, in so many orders at random, the same each time."""
        b, protocol = self.selection.b, self.protocol
        size = min(b, protocol.local_batch_size or b)
        epochs = protocol.epochs or math.ceil((protocol.local_steps or 1) * size / b)
        generator, steps = torch.Generator().manual_seed(0), list[Tensor]()
        for _ in range(epochs):
            drawn = [torch.randperm(b, generator=generator) for _ in range(orders)]
            steps += torch.split(torch.stack(drawn).to(self.replay.Z.device), size, 1)
        return steps[: protocol.local_steps]

    def relabelled(self, labels: Tensor, batches: list[Tensor]) -> tuple[Tensor, Run]:
        """Labels (b,) that fit all steps instead of the first, and the training with them.

        Gradients of many steps point elsewhere than the first. Where the sum of them all is far from
        what was sent, other labels are tried, with the weights on the way as they are; right ones bring
        these nearer, too.
        """
        run = self.in_order(labels, batches)
        for _ in range(_RELABELLINGS):
            off = column_errors(run.columns, self.sent)
            if float(off.max()) <= TRAINING_SIMULATED:
                break
            some, others = self._misplaced(run, labels, off)
            tried = self._moved_to(others, labels, batches, some)
            again = self.in_order(tried, batches)
            if (
                torch.equal(tried, labels)
                or column_errors(again.columns, self.sent).sum() > off.sum()
            ):
                break
            labels, run = tried, again
        return labels, run

    def _misplaced(self, run: Run, labels: Tensor, off: Tensor) -> tuple[Tensor, Tensor]:
        """Samples (k,) that may have another label than these, and what labels (l,) there are for them.

        Every sample takes one part off the gradient of the output's bias for its label, and of no
        other. So that bias counts the samples of every label: those with too many give some to those
        with too few, the samples that fit worst. Without it, all that are far off, and all labels.
        """
        every = torch.arange(self.replay.classes, device=labels.device)
        others = self.factors.view.others
        biases = [
            ours - others[name].to(ours)
            for name, ours in run.behind.items()
            if name in others and ours.shape == every.shape
        ]
        if not biases or float(biases[-1].min()) >= 0:
            most = max(1, _ENTRIES // (len(every) * len(run.columns)))
            far = off.argsort(descending=True)[: int((off > TRAINING_SIMULATED).sum())]
            return far[:most], every
        count = (biases[-1] / -biases[-1].min()).round().long()  # one sample too many: -1
        worst = off.argsort(descending=True)
        some = [worst[labels[worst] == label][: -count[label]] for label in every[count < 0]]
        return torch.cat(some), every.repeat_interleave(count.clamp_min(0))

    def _moved_to(
        self, others: Tensor, labels: Tensor, batches: list[Tensor], some: Tensor
    ) -> Tensor:
        """The labels (b,), of some samples (k,) those others (l,) whose gradients, summed over all
        steps, are nearest to what was sent; each once, if there are as few as samples."""
        local, start, optimiser = self.prepared()
        here, sent = copy.copy(self.replay), self.replay.D[some]  # (k, m)
        tried = torch.unique(others)
        total = sent.new_zeros(len(some), len(tried), sent.shape[1])
        for rate, batch in zip(self.protocol.rates(len(batches)), batches, strict=True):
            self.factors.check_time()
            here.network = local.behind
            part = torch.isin(some, batch).nonzero().flatten()
            if len(part) and len(tried):
                Z = local.Z.detach()[some[part]].repeat_interleave(len(tried), 0)
                slopes = here.gradient(Z, tried.repeat(len(part)))
                total[part] += slopes.view(len(part), *total.shape[1:])
            self._step(local, optimiser, start, rate, labels, batch)
        along = nn.functional.cosine_similarity(total, sent[:, None], dim=2)  # (k, tried)
        along = along[:, torch.searchsorted(tried, others)]
        rows, chosen = (
            torch.as_tensor(index, device=labels.device)
            for index in scipy.optimize.linear_sum_assignment(-along.cpu())
        )
        return labels.index_copy(0, some[rows], others[chosen])

    def in_order(self, labels: Tensor, batches: list[Tensor], scale: float = 1.0) -> Run:
        """The training with these samples in every step, and inputs this much larger."""
        local, start, optimiser = self.prepared()
        local.C = scale * local.C
        lowest = highest = local.Z.detach()
        seen = torch.full_like(highest, -torch.inf)
        for rate, batch in zip(self.protocol.rates(len(batches)), batches, strict=True):
            self.factors.check_time()
            Z = local.Z.detach()
            lowest, highest = torch.minimum(lowest, Z), torch.maximum(highest, Z)
            seen[batch] = torch.maximum(seen[batch], Z[batch])
            self._step(local, optimiser, start, rate, labels, batch)
        moved = self.moved(local, start, len(batches))
        behind = {name.removeprefix("behind."): change for name, change in moved.items()}
        return Run(moved["weight"] @ self.selection.Q / scale, seen, highest - lowest, behind)

    def prepared(self) -> tuple[LocalModel, dict[str, Tensor], torch.optim.Optimizer]:
        """A local model at the start, its weights, and the client's optimiser."""
        local = LocalModel(self.factors, self.selection, self.replay)
        start = {name: p.detach().clone() for name, p in local.named_parameters()}
        return local, start, self.protocol.optimiser(list(local.parameters()))

    def _step(  # noqa: PLR0917
        self,
        local: LocalModel,
        optimiser: torch.optim.Optimizer,
        start: dict[str, Tensor],
        rate: float,
        labels: Tensor,
        batch: Tensor,
    ) -> None:
        optimiser.zero_grad()
        loss = self.replay.criterion(local()[batch], labels[batch])
        with users_code():
            loss.backward()  # type: ignore[no-untyped-call]
        self.protocol.local_step(dict(local.named_parameters()), optimiser, start, rate)

    def _compared(self, local: LocalModel, start: dict[str, Tensor], steps: int) -> _Repeated:
        """How near these weights come to those sent."""
        moved = self.moved(local, start, steps)
        off = self._columns(moved["weight"])
        length = float(self.factors.L.norm() / moved["weight"].norm())
        objections = self._objections(moved, start, off)
        return _Repeated(off, self._noise, steps, objections, length)

    def _repeated(self, labels: Tensor, epochs: int | None = None, pace: float = 1.0) -> _Repeated:
        """The local training with these labels; of unknown epochs, the number that fits best.

        `pace` multiplies the learning rate that was told.
        """
        best: _Repeated | None = None
        beyond = 0
        epochs = epochs or self.protocol.epochs or self.protocol.local_steps
        local, start, optimiser = self.prepared()
        for epoch in range(1, (epochs or _EPOCHS) + 1):
            self.factors.check_time()
            rate = pace * self.protocol.rates(epochs or epoch)[epoch - 1]
            outputs = local()
            optimiser.zero_grad()
            loss = self.replay.criterion(outputs, labels)
            with users_code():
                loss.backward()  # type: ignore[no-untyped-call]
            self.protocol.local_step(dict(local.named_parameters()), optimiser, start, rate)
            if epochs not in (None, epoch):
                continue
            moved = self.moved(local, start, epoch)
            off = self._columns(moved["weight"])
            if best is None or float(off.median()) < float(best.off.median()):
                best = self._compared(local, start, epoch)
            beyond += bool(moved["weight"].norm() > 1.2 * self.factors.L.norm())
            if beyond > _PATIENCE:
                break
        assert best is not None
        return best

    def moved(self, local: LocalModel, start: dict[str, Tensor], epoch: int) -> dict[str, Tensor]:
        """The sum of gradients that `observe` would read off these weights, by name."""
        kept = self.protocol.weight_decay_factor
        return {
            name: (kept(epoch, p) * start[name] - p.detach()) / self.protocol.rate
            for name, p in local.named_parameters()
        }

    def _columns(self, replayed: Tensor) -> Tensor:
        """Relative error (b,) of each column of the summed dL/dZ."""
        Q, L = self.selection.Q, self.factors.L
        return column_errors(replayed @ Q, L @ Q)

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
