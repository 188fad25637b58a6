"""A dress rehearsal: made-up clients send what the protocol says, the server inverts it, and what came
back is compared with the made-up truth. No client's data is needed.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum

import torch
from torch import Tensor, nn

from spear.check.made_up import Kind, kinds_for, loss_of, predictions, targets_for
from spear.check.model_structure import LayerView
from spear.errors import Declined, InvalidOption, SpearError
from spear.factors import combine
from spear.federated import Batch, Sent, send, split
from spear.inversion import invert
from spear.judge import Cause
from spear.metrics import assign
from spear.update import LayerUpdate, Protocol, input_shapes, layer_inputs, reading

# Errors are in units of the samples' distance from their mean: guessing the mean has an error of 1.
_EXACT = 1e-3
_CLEAR = 0.1  # of normalised pictures that is a PSNR of 32 dB: anyone would recognise them
_RECOVERED = 0.5  # a sample that is off by more did not come back
_MOST_ENTRIES = 5 * 10**7  # of the attacked layer: more take minutes
_MOST_ROWS = 400  # samples that the layer sees, of all clients
_MOST_SECONDS = 30.0  # of the clients' own computing
_RATE = 0.01  # of local training, where none is given
SERVER_LR = 0.05  # at which gradients move the model from round to round, as in a sweep


class Recovery(Enum):
    """What came back of a batch."""

    EXACT = "exact"  # every sample, to a thousandth
    CLEAR = "clear"  # every sample, to a tenth: anyone would recognise it
    VAGUE = "vague"  # every sample, worse than that
    SOME = "some"  # some samples
    NOTHING = "nothing"


@dataclass(frozen=True)
class Score:
    """What came back of a batch, against the truth."""

    recovery: Recovery
    recovered: int
    """Samples that came back."""
    samples: int
    error: float | None
    """Of those samples: root mean square, in units of the samples' distance from their mean."""

    @property
    def words(self) -> str:
        """What happened, as a sentence without its full stop."""
        if self.error is None:
            return f"none of {self.samples} made-up samples came back"
        whole = self.recovered == self.samples
        some = f"all {self.samples}" if whole else f"{self.recovered} of {self.samples}"
        some = "the one made-up sample" if self.samples == 1 else f"{some} made-up samples"
        how = "exactly" if self.error <= _EXACT else f"with an error of {100 * self.error:.2g} %"
        return f"{some} came back {how}"

    @property
    def short(self) -> str:
        """The same in a word or two."""
        some = self.recovery in (Recovery.SOME, Recovery.NOTHING)
        return f"{self.recovered} of {self.samples}" if some else self.recovery.value


def compare(found: Tensor, truth: Tensor) -> Score:
    """How much of the true samples (b, n) is among those found (k, n); twins count as one.

    >>> x = torch.eye(4)
    >>> compare(x[[2, 1, 0]], x).words
    '3 of 4 made-up samples came back exactly'
    """
    found, truth = found.double(), torch.unique(truth.double(), dim=0)
    centre = truth.mean(0) if len(truth) > 1 else torch.zeros_like(truth[0])
    unit = float((truth - centre).square().sum(1).mean().sqrt()) or 1.0
    pairs = assign(found, truth)
    errors = (found[pairs.found] - truth[pairs.truth]).norm(dim=1) / unit  # (p,)
    errors = errors[errors <= _RECOVERED]
    if not len(errors):
        return Score(Recovery.NOTHING, 0, len(truth), None)
    error = float(errors.square().mean().sqrt())
    if len(errors) < len(truth):
        recovery = Recovery.SOME
    else:
        levels = ((_EXACT, Recovery.EXACT), (_CLEAR, Recovery.CLEAR), (1, Recovery.VAGUE))
        recovery = next(level for limit, level in levels if error <= limit)
    return Score(recovery, len(errors), len(truth), error)


@dataclass(frozen=True)
class Rehearsal:
    """One kind of made-up data, and what came back of it."""

    kind: Kind
    score: Score
    certified: int
    cause: Cause
    up_to_scale: bool = False
    """Did samples come back up to a factor each?"""
    rounds: int = 1
    """Of those that were played, the ones that could be used together."""


@dataclass(frozen=True, eq=False)
class Stage:
    """A model, one of its layers and what clients do: all that a rehearsal needs except the data."""

    model: nn.Module
    layer: LayerView
    protocol: Protocol
    shape: tuple[int, ...]
    outputs: Tensor
    """The model's outputs for one client's made-up batch, which fix the shape of the labels."""
    rows: int
    """Rows that the layer sees: more than there are samples if it reads tokens."""
    rounds: int = 1
    server_lr: float = SERVER_LR

    def alone(self) -> Stage:
        """The same stage with one client, whose update is seen by itself."""
        return replace(self, protocol=replace(self.protocol, clients=1))

    def rehearse(self, kind: Kind, *, max_seconds: float, seed: int = 0) -> Rehearsal | Declined:
        """Let the clients send, invert what they sent, and compare; or say why that cannot be done."""
        protocol, generator = self.protocol, torch.Generator().manual_seed(seed)
        samples = (protocol.samples or 1) * protocol.clients
        inputs = _fitting(kind.make(samples, self.shape, generator), self.model)
        outputs = self.outputs.repeat(protocol.clients, *[1] * (self.outputs.ndim - 1))
        batches = split(inputs, targets_for(outputs, generator).to(inputs.device), protocol)
        read = _Read(inputs)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)  # for dropout
            try:
                views = self._views(batches, read, generator)
                view = next(views) if self.rounds == 1 else combine(views)
            except (SpearError, ValueError, RuntimeError) as error:  # batch norm of one sample, say
                return Declined(_complaint(error))
            result = invert(view, max_seconds=max_seconds)
        found = result.inputs.double()
        truth = read.nearest(found)
        score, certified = compare(found, truth), int(result.certified.sum())
        rehearsal = Rehearsal(kind, score, certified, result.cause, rounds=result.rounds)
        if score.recovery is Recovery.EXACT or (view.has_bias and protocol.clips != "per-layer"):
            return rehearsal
        scaled = compare(_scaled(found, truth), truth)
        return replace(rehearsal, score=scaled, up_to_scale=True)

    def _views(
        self, batches: Sequence[Batch], read: _Read, generator: torch.Generator
    ) -> Iterator[LayerUpdate]:
        """What the server sees in each round; what it gets moves the model on to the next."""
        model = copy.deepcopy(self.model)
        for _ in range(self.rounds):
            with reading(model, self.layer.name, read.see):
                sent = send(model, batches, self.protocol, loss=loss_of, generator=generator)
            yield self._view(sent, model)
            sent.apply(model, self.server_lr)

    def _view(self, sent: Sent, model: nn.Module) -> LayerUpdate:
        """The layer as the server sees it, which is told the whole protocol, as an attack is. A layer
        that could not be traced is taken to have a ReLU behind it, and updates of other optimisers are
        tried as if they came from SGD."""
        as_sgd = replace(sent.protocol, optimizer="sgd", sigma=None)
        sent = replace(sent, protocol=as_sgd if not sent.protocol.is_sgd else sent.protocol)
        if self.layer.attackable:
            view = sent.view(model, self.layer.name)
            return view.told(samples=sent.protocol.samples)
        own, prefix = model.get_submodule(self.layer.name), f"{self.layer.name}."
        assert isinstance(own, nn.Linear)
        rate = 1.0 if sent.protocol.sends == "gradient" else -sent.protocol.rate
        return LayerUpdate(
            weight=own.weight.detach().clone(),
            bias=own.bias.detach().clone(),
            weight_grad=sent.update[f"{prefix}weight"] / rate,
            bias_grad=sent.update[f"{prefix}bias"] / rate,
        )


class _Read:
    """What the layer read of every sample, in all steps: dropout, and training of the layers before it,
    give other inputs in each."""

    def __init__(self, inputs: Tensor) -> None:
        self._samples = inputs.flatten(1)  # (b, ...)
        self._versions: dict[tuple[int, int], list[Tensor]] = {}  # of a sample and a row of it
        self._kept = 0

    def see(self, batch: Tensor, rows: Tensor) -> None:
        """Keep what is new of the layer's inputs, while there is room."""
        samples = [int((self._samples == x).all(1).nonzero()[0]) for x in batch.flatten(1)]
        rows = rows.flatten(0, -2)  # (rows, n), as many of every sample
        each = max(1, len(rows) // len(samples))
        for i, row in enumerate(rows):
            versions = self._versions.setdefault((samples[i // each % len(samples)], i % each), [])
            known = bool(versions) and torch.equal(versions[-1], row)
            if not versions or (not known and self._kept < _MOST_ENTRIES):
                versions.append(row)
                self._kept += row.numel()

    def nearest(self, found: Tensor) -> Tensor:
        """Of every row (rows, n) the version that is nearest to a sample that was found (k, n)."""
        chosen = []
        for kept in self._versions.values():
            versions = torch.stack(kept).to(found)  # (versions, n)
            best = torch.cdist(versions, found).amin(1).argmin() if len(found) else 0
            chosen.append(versions[best])
        return torch.stack(chosen)


class TooLarge(Declined):
    """Too large to rehearse within seconds."""


class _NotRun(Exception):
    """The forward pass does not call the layer."""


def prepare(
    model: nn.Module,
    layer: LayerView,
    protocol: Protocol,
    shape: tuple[int, ...] | None = None,
    *,
    rounds: int = 1,
    server_lr: float = SERVER_LR,
) -> Stage | Declined:
    """The stage for a rehearsal, with the input shape found and sizes checked; or why there is none.

    Args:
        model: as the client trains it, in its own mode; it stays as it is.
        layer: the one to attack.
        protocol: what clients do, with its noise as sigma and the `samples` of one client.
        shape: of one input; the usual ones are tried unless given.
        rounds: of the same data that clients send and the server sees.
        server_lr: learning rate at which gradients move the model from round to round.
    """
    if layer.inputs * layer.outputs > _MOST_ENTRIES:
        return TooLarge(f"too large ({layer.inputs:,} x {layer.outputs:,} weights)")
    if protocol.sends != "gradient" and protocol.lr is None:
        protocol = replace(protocol, lr=_RATE)
    samples = protocol.samples or 1
    if samples * protocol.clients > _MOST_ROWS:
        return TooLarge(f"too large ({samples * protocol.clients:,} samples)")
    complaint = "no shape to try"
    for candidate in [shape] if shape is not None else input_shapes(model, layer.name):
        began = time.monotonic()
        try:
            made = kinds_for(model, candidate)[0].make(samples, candidate, torch.Generator())
            with torch.random.fork_rng(devices=[]):
                rows, outputs = _watched(copy.deepcopy(model), layer.name, _fitting(made, model))
        except _NotRun as error:
            return Declined(str(error))
        except Exception as error:  # the user's forward may raise anything
            complaint = _complaint(error)
            continue
        steps = rounds * (protocol.steps or 1) * protocol.clients
        seconds = 3 * (time.monotonic() - began) * steps
        if seconds > _MOST_SECONDS or len(rows) * protocol.clients > _MOST_ROWS:
            return TooLarge(
                f"too large ({len(rows) * protocol.clients:,} rows, about {seconds:.0f} s of training)"
            )
        seen = len(rows) * protocol.clients
        return Stage(model, layer, protocol, candidate, outputs, seen, rounds, server_lr)
    if shape is not None:
        raise InvalidOption(
            f"the model cannot be run on inputs of shape {' x '.join(map(str, shape))} "
            f"({complaint}): give the shape of one input, without the batch"
        )
    return Declined(f"the model cannot be run on made-up inputs ({complaint})")


def _watched(model: nn.Module, layer: str, inputs: Tensor) -> tuple[Tensor, Tensor]:
    """What the layer reads (rows, n), and what the model puts out."""
    with torch.no_grad():
        seen, raw = layer_inputs(model, layer, inputs)
    outputs = predictions(raw, len(inputs))
    if seen is None:
        raise _NotRun(f"layer {layer!r} is not run")
    if not bool(outputs.isfinite().all()):
        raise ValueError("its outputs are not finite")
    return seen.flatten(0, -2), outputs


def _fitting(inputs: Tensor, model: nn.Module) -> Tensor:
    """On the model's device and in its precision; words stay whole numbers."""
    parameter = next(model.parameters())
    dtype = parameter.dtype if inputs.is_floating_point() else inputs.dtype
    return inputs.to(parameter.device, dtype).contiguous()  # or dropout draws in another order


def _scaled(found: Tensor, truth: Tensor) -> Tensor:
    """Samples (k, n) times the factor that brings each nearest to its true one."""
    pairs = assign(nn.functional.normalize(found), nn.functional.normalize(truth))
    best, own = found[pairs.found], truth[pairs.truth]
    return best * ((best * own).sum(1) / best.square().sum(1).clamp_min(1e-300))[:, None]


def _complaint(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error)[:160]}"
