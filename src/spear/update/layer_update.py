"""What a server sees: one layer's weights and gradients, checked."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, get_args

import torch
from torch import Tensor, nn

from spear.errors import Declined, InvalidOption, InvalidUpdate
from spear.update.forms import as_tensor, tensor_problem, unwrapped
from spear.update.layers import (
    LayerReport,
    Relu,
    Structure,
    inspect_layers,
    network_after,
    trace,
)
from spear.update.precision import at_work, sent_back
from spear.update.protocol import UNKNOWN_PROTOCOL, Protocol
from spear.update.rounds import Rounds
from spear.update.snapshots import is_snapshot

_PARTS = ("weight", "bias", "weight_grad", "bias_grad")
_BLOCK = 1 << 22  # entries checked at a time, so that a check never copies a large gradient
_SAMPLED_ENTRIES = 1 << 14  # of a gradient, to recognise its precision


@dataclass(frozen=True, eq=False)
class LayerUpdate:
    """One fully connected layer z = W x + b as the server sees it.

    Args:
        weight: W, (m, n).
        bias: b, (m,); None for a layer without one, whose inputs come back up to a factor each.
        weight_grad: dL/dW, (m, n), summed or averaged over the batch.
        bias_grad: dL/db, (m,), likewise.
        relu: where the ReLU is: "after" the layer, "before" it, or "both".

    The tensors may differ in dtype (weights in float32 and a gradient sent in float16, say). NumPy
    arrays are taken too. Neither are copied; `observe` copies them.

    >>> view = LayerUpdate(
    ...     weight=torch.randn(6, 8), bias=torch.zeros(6),
    ...     weight_grad=torch.randn(6, 8), bias_grad=torch.randn(6),
    ... )
    >>> view.outputs, view.inputs
    (6, 8)
    """

    weight: Tensor = field(repr=False)
    bias: Tensor = field(repr=False)
    weight_grad: Tensor = field(repr=False)  # private data stays out of logs
    bias_grad: Tensor = field(repr=False)
    relu: Relu = "after"
    layer: str | None = None
    """The layer's name in the model, when `observe` chose it."""
    others: Mapping[str, Tensor] = field(default_factory=dict, repr=False)
    """The rest of the update by parameter name; the replay compares it too."""
    considered: tuple[LayerReport, ...] = field(default=(), repr=False)
    """Every linear layer `observe` looked at, and why it was or was not taken."""
    protocol: Protocol = UNKNOWN_PROTOCOL
    """How the update came about, as far as it was told."""
    model: nn.Module | None = field(default=None, repr=False)
    """A copy of the model that `observe` was given, as it was then."""
    traced: Structure | Declined | None = field(default=None, repr=False)
    """The model's graph, from which `observe` chose the layer."""
    mistake: str = ""
    """What the update was said to be and is not, in words; it is read as what it is."""
    notes: tuple[str, ...] = field(default=(), repr=False)
    """What `observe` had to do to read the model and the update, and what follows from it."""
    rounds: Rounds | None = field(default=None, repr=False)
    """Set if `combine` made this of several rounds: rows are stacked, columns are coordinates."""
    dropout: float = 0.0
    """Rate of the dropout next to the ReLU after the layer: what it drops is zero in the gradient."""
    has_bias: bool = True
    """Set to False if neither `bias` nor `bias_grad` was given."""
    home: torch.device | None = field(default=None, repr=False)
    """Where the update came from and inputs are returned to. The tensors are there too, unless that
    device has no float64 (Apple's MPS): then they are on the CPU."""

    def __post_init__(self) -> None:
        for name in _PARTS:
            object.__setattr__(self, name, _from_array(getattr(self, name)))
        if self.bias is None and self.bias_grad is None and isinstance(self.weight, Tensor):
            for name in ("bias", "bias_grad"):
                object.__setattr__(self, name, self.weight.new_zeros(len(self.weight)))
            object.__setattr__(self, "has_bias", False)
        others = {name: _from_array(part) for name, part in self.others.items()}
        object.__setattr__(self, "others", others)
        self._go_to_work()
        problems = _problems(self)
        if problems:
            raise InvalidUpdate(problems)

    def _go_to_work(self) -> None:
        """Bring all tensors to where float64 is to be had."""
        if self.home is None and isinstance(self.weight, Tensor):
            object.__setattr__(self, "home", self.weight.device)
        for name in _PARTS:
            part = getattr(self, name)
            object.__setattr__(self, name, at_work(part) if isinstance(part, Tensor) else part)
        others = {n: at_work(t) if isinstance(t, Tensor) else t for n, t in self.others.items()}
        object.__setattr__(self, "others", others)

    def told(self, **facts: Any) -> LayerUpdate:
        """The same with more of its protocol known, such as `samples=8`."""
        return dataclasses.replace(self, protocol=dataclasses.replace(self.protocol, **facts))

    def with_model(self, model: nn.Module) -> LayerUpdate:
        """The same with another model to replay."""
        if self.rounds is not None:
            raise InvalidOption(
                "several rounds have a model each: give each to spear.observe, and leave out model="
            )
        model = unwrapped(model)
        if is_snapshot(self.model, model):
            return self
        self._check_layer_of(model)
        return dataclasses.replace(self, model=model, traced=trace(model))

    def _check_layer_of(self, model: nn.Module) -> None:
        """A model without the layer would be replayed as one that cannot be."""
        if self.layer is None or not isinstance(model, nn.Module):
            return
        sizes = {
            name: tuple(module.weight.shape)
            for name, module in model.named_modules()
            if isinstance(module, nn.Linear)
        }
        shape = tuple(self.weight.shape)
        if sizes.get(self.layer) == shape:
            return
        there = ", ".join(f"{name or 'itself'} ({m} x {n})" for name, (m, n) in sizes.items())
        raise InvalidOption(
            f"expected a model with the layer {self.layer!r} of {shape[0]} x {shape[1]} that the "
            f"update is of; the linear layers of this {type(model).__name__} are {there or 'none'}"
        )

    def with_dropout(self) -> LayerUpdate | None:
        """The same with its model's dropouts at work, if one stands next to the layer's ReLU."""
        if self.model is None or self.layer is None or self.rounds is not None or self.dropout:
            return None
        model = copy.deepcopy(self.model)
        for module in model.modules():
            module.training |= not isinstance(module, nn.modules.batchnorm._BatchNorm)
        traced = trace(model)
        reports = inspect_layers(model, traced)
        rate = next((r.dropout for r in reports if r.name == self.layer), 0.0)
        if not rate:
            return None
        words = (
            "the model was given with its dropout switched off (eval mode), but the update shows "
            "dropout: read as in train mode"
        )
        return dataclasses.replace(
            self, model=model, traced=traced, dropout=rate, mistake=self.mistake or words
        )

    def without_rounds(self, dropped: list[int], why: str) -> LayerUpdate:
        """A combined view without some of its rounds, by index."""
        assert self.rounds is not None
        rounds, rows = self.rounds.without(dropped, why)
        parts = {name: getattr(self, name)[rows] for name in _PARTS}
        said = rounds.left_out[len(self.rounds.left_out) :]
        return dataclasses.replace(self, rounds=rounds, notes=(*self.notes, *said), **parts)

    def network_behind(self) -> nn.Module | Declined:
        """The model from the layer's output on, to replay samples through; or why there is none."""
        if self.model is None:
            return Declined("no model was given")
        if self.layer is None:
            return Declined(
                "the update does not say which layer it is: use spear.observe(model, gradients)"
            )
        if isinstance(self.traced, Declined):
            return self.traced
        return network_after(self.model if self.traced is None else self.traced, self.layer)

    @property
    def idle_dropout(self) -> str:
        """The name of a dropout in the model that is switched off, as in eval mode; empty without."""
        dropouts = self._modules_of(nn.modules.dropout._DropoutNd, training=False)
        return next((name for name, module in dropouts if module.p), "")

    @property
    def batch_norm(self) -> str:
        """The name of a batch norm in the model that is in train mode; empty without."""
        norms = self._modules_of(nn.modules.batchnorm._BatchNorm, training=True)
        return next((name for name, _ in norms), "")

    def _modules_of(self, kind: type[nn.Module], *, training: bool) -> list[tuple[str, Any]]:
        modules = self.model.named_modules() if self.model is not None else ()
        return [(n, m) for n, m in modules if isinstance(m, kind) and m.training == training]

    @property
    def samples(self) -> int | None:
        """How many samples the update was computed from, if that was told."""
        return self.protocol.total

    @property
    def trained(self) -> bool:
        """Is it a difference of weights before and after local training?"""
        return self.protocol.sends != "gradient"

    @property
    def clipped_apart(self) -> bool:
        """Were a sample's weight and bias gradient clipped apart? Then the latter gives no scale."""
        return self.protocol.clipping == "per-layer"

    @property
    def outputs(self) -> int:
        return self.weight.shape[0]

    @property
    def inputs(self) -> int:
        return self.weight.shape[1] if self.rounds is None else self.rounds.basis.shape[1]

    @property
    def weight_lengths(self) -> Tensor:
        """|W_k| (m,)."""
        if self.rounds is not None:
            return self.rounds.weight_lengths
        lengths: Tensor = torch.linalg.vector_norm(self.weight.detach(), dim=1)
        return lengths

    @property
    def weight_precision(self) -> torch.dtype:
        return self.weight.dtype if self.rounds is None else self.rounds.weight_precision

    @property
    def bias_precision(self) -> torch.dtype:
        """Of the bias gradient."""
        return self.bias_grad.dtype if self.rounds is None else self.rounds.precision

    @property
    def input_precision(self) -> torch.dtype:
        """Of recovered inputs: the client's own, float32 at least."""
        own = self.weight_grad.dtype if self.rounds is None else self.rounds.precision
        return torch.promote_types(own, torch.float32)

    def sent_back(self, tensor: Tensor) -> Tensor:
        """What was recovered, where the update came from; in float32 if float64 is not to be had."""
        assert self.home is not None
        return sent_back(tensor, self.home)

    @property
    def precision(self) -> torch.dtype:
        """The coarser dtype of weight and bias gradient, which sets their rounding."""
        if self.rounds is not None:
            return self.rounds.precision
        return max(self.weight_grad.dtype, self.bias_grad.dtype, key=lambda d: torch.finfo(d).eps)

    @property
    def grid(self) -> torch.dtype | None:
        """The half precision that all entries of the gradient fit, if there is one."""
        if self.rounds is not None:
            return self.rounds.grid
        return half_precision(self.weight_grad)

    @property
    def choice(self) -> str:
        """In words: which layer was chosen, and why the others were not."""
        if self.layer is None:
            said = self.notes if self.rounds is not None else ()
            return "\n".join([f"one layer, {self._size}, given directly", *said])
        lines = [f"attacking {self.layer!r} ({self._size}, ReLU {self.relu})"]
        lines += [r.caveat.words for r in self.considered if r.name == self.layer and r.caveat]
        names = [report.name for report in self.considered]
        for i, report in enumerate(self.considered):
            if report.name != self.layer:
                where = "farther from" if i > names.index(self.layer) else "closer to"
                too = f"attackable too ({report.why}), but {where} the data"
                lines.append(f"not {report.name!r}: {too if report.attackable else report.why}")
        return "\n".join([*lines, *self.notes])

    @property
    def _size(self) -> str:
        if self.rounds is None:
            return f"{self.inputs} -> {self.outputs}"
        count = len(self.rounds)
        return f"{self.inputs} -> {self.outputs // count}, {count} rounds"

    @property
    def next_gradient(self) -> Tensor | None:
        """The weight gradient of the next linear layer, one ReLU away, if it is known."""
        gradient = self.others.get(self._next_weight)
        return None if gradient is None or gradient.shape[1] != self.outputs else gradient

    @property
    def next_weight(self) -> Tensor | None:
        """The weight of that layer, if its gradient and the model are known."""
        if self.model is None or self.next_gradient is None:
            return None
        weight = dict(self.model.named_parameters()).get(self._next_weight)
        return None if weight is None else weight.detach()

    @property
    def next_is_output(self) -> bool:
        """Is the next layer the model's last?"""
        return bool(self.considered) and self._next_weight == f"{self.considered[-1].name}.weight"

    @property
    def _next_weight(self) -> str:
        """The name of the next linear layer's weight; empty if there is none, or several."""
        following = [
            r.name for r in self.considered if self.layer is not None and r.reads == self.layer
        ]
        return f"{following[0]}.weight" if len(following) == 1 else ""

    @property
    def meaning(self) -> str:
        """What the layer's inputs are to the data, in words; empty where they are the data."""
        own = next((r for r in self.considered if r.name == self.layer), None)
        if own is None or own.reads_data:
            return ""
        words = (
            f"these are inputs of layer {self.layer!r}, activations computed from the data: the data "
            "follows as far as the layers before it can be inverted"
        )
        return f"{words}; {own.caveat.words}" if own.caveat else words

    @property
    def features(self) -> int:
        """Numbers that the layer's inputs are linear functions of: fewer than these, where linear
        layers stand before it without an activation between."""
        own = next((r.features for r in self.considered if r.name == self.layer), None)
        return self.inputs if own is None else min(own, self.inputs)

    @property
    def reads_data(self) -> bool:
        """Are the layer's inputs the model's own? True for a layer given directly: nobody knows."""
        return all(r.reads_data for r in self.considered if r.name == self.layer)


def half_precision(gradient: Tensor) -> torch.dtype | None:
    """The half precision that all entries of a gradient fit, if there is one."""
    some = gradient.detach().flatten()[:: max(1, gradient.numel() // _SAMPLED_ENTRIES)]
    halves = [
        dtype
        for dtype in (torch.bfloat16, torch.float16)
        if bool(some.any()) and torch.equal(some.to(dtype).to(some), some)
    ]
    return halves[0] if halves else None


def _from_array(part: Tensor) -> Tensor:
    """An array as a tensor; anything else as it is, to be told as a problem."""
    tensor = as_tensor(part)
    return part if tensor is None else tensor


def _problems(view: LayerUpdate) -> list[str]:
    """Everything that is wrong with an update, in words."""
    parts = {name: getattr(view, name) for name in _PARTS}
    needed = {
        "bias": "the bias tells which neurons are off; leave out both for a layer without one",
        "bias_grad": "the bias gradient gives each recovered input its scale; leave out both for a "
        "layer without a bias",
    }
    problems = [
        tensor_problem(name, part) + (f" ({needed[name]})" if name in needed else "")
        for name, part in {**parts, **view.others}.items()
        if not isinstance(part, Tensor)
    ]
    if not isinstance(view.protocol, Protocol):
        problems.append(f"protocol is a {type(view.protocol).__name__}, expected a Protocol")
    if view.relu not in get_args(Relu):
        problems.append(f"relu is {view.relu!r}, expected 'after', 'before' or 'both'")
    if problems:
        return problems
    named = {**parts, **view.others}
    return (
        _shape_problems(view)
        or _kind_problems(parts, view.others)
        or [
            f"{name} has NaN or infinite entries: the client's training diverged, its noise or half "
            "precision overflowed, or the file is damaged"
            for name, part in named.items()
            if not _finite(part)
        ]
    )


def _shape_problems(view: LayerUpdate) -> list[str]:
    if view.weight.ndim != 2 or view.weight.numel() == 0:
        return [
            f"weight has shape {tuple(view.weight.shape)}, expected (outputs, inputs), not empty"
        ]
    m, n = view.weight.shape
    expected = {"bias": (m,), "weight_grad": (m, n), "bias_grad": (m,)}
    return [
        f"{name} has shape {tuple(getattr(view, name).shape)}, expected {shape}"
        for name, shape in expected.items()
        if tuple(getattr(view, name).shape) != shape
    ]


def _kind_problems(parts: Mapping[str, Tensor], others: Mapping[str, Tensor]) -> list[str]:
    named = {**parts, **others}
    problems = [problem for n, part in named.items() if (problem := tensor_problem(n, part))]
    problems += [
        f"{name} is complex ({part.dtype}): SPEAR attacks real layers only"
        for name, part in named.items()
        if part.is_complex()
    ]
    devices = {str(part.device) for part in parts.values()}
    if len(devices) > 1:
        problems.append(f"expected all tensors on one device, got {', '.join(sorted(devices))}")
    layouts = [name for name, part in named.items() if part.layout != torch.strided]
    if layouts:
        problems.append(f"{', '.join(layouts)}: expected dense tensors; call .to_dense()")
    return problems


def _finite(tensor: Tensor) -> bool:
    rows = tensor.reshape(tensor.shape[0] if tensor.ndim else 1, -1)
    step = max(1, _BLOCK // rows.shape[1])
    return all(bool(torch.isfinite(rows[i : i + step]).all()) for i in range(0, len(rows), step))
