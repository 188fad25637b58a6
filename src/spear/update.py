"""What a server sees: one layer's weights and gradients, checked. New kinds of update come in here."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import get_args

import torch
from torch import Tensor, nn

from spear.errors import InvalidOption, InvalidUpdate, NoAttackableLayer
from spear.layers import LayerReport, Relu, inspect_layers
from spear.local_training import LocalTraining, descent, descent_by, only_sgd
from spear.snapshots import snapshot

_BLOCK = 1 << 22  # entries looked at together: 4 M, so that a check never copies a large gradient
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_NO_NUMBERS = "its tensors have shapes but no numbers; load them first"


@dataclass(frozen=True, eq=False)
class LayerUpdate:
    """One fully connected layer z = W x + b as the server sees it.

    Args:
        weight: W, (m, n).
        bias: b, (m,).
        weight_grad: dL/dW, (m, n), summed or averaged over the batch.
        bias_grad: dL/db, (m,), likewise.
        relu: where the ReLU is: "after" the layer, "before" it, or "both".

    The tensors may differ in dtype (weights in float32 and a gradient sent in float16, say). They are
    not copied; `observe` does that.

    >>> view = LayerUpdate(
    ...     weight=torch.randn(6, 8), bias=torch.zeros(6),
    ...     weight_grad=torch.randn(6, 8), bias_grad=torch.randn(6),
    ... )
    >>> view.outputs, view.inputs
    (6, 8)
    """

    weight: Tensor = field(repr=False)
    bias: Tensor = field(repr=False)
    weight_grad: Tensor = field(repr=False)  # what is private is in no log
    bias_grad: Tensor = field(repr=False)
    relu: Relu = "after"
    layer: str | None = None
    """The layer's name in the model, when `observe` chose it."""
    others: Mapping[str, Tensor] = field(default_factory=dict, repr=False)
    """The rest of the update by parameter name; the replay compares it too."""
    considered: tuple[LayerReport, ...] = field(default=(), repr=False)
    """Every linear layer `observe` looked at, and why it was or was not taken."""
    training: LocalTraining | None = None
    model: nn.Module | None = field(default=None, repr=False)
    """A copy of the model that `observe` was given, as it was then."""
    samples: int | None = None
    """How many samples the update was computed from, if that was told."""
    clipped_apart: bool = False
    """Were weight and bias gradient of a sample clipped by factors of their own? Then the bias gradient
    does not give its scale (Opacus' per-layer clipping)."""
    notes: tuple[str, ...] = field(default=(), repr=False)
    """What `observe` had to do to read the model and the update, and what follows from it."""

    def __post_init__(self) -> None:
        problems = _problems(self)
        if problems:
            raise InvalidUpdate(problems)

    @property
    def outputs(self) -> int:
        return self.weight.shape[0]

    @property
    def inputs(self) -> int:
        return self.weight.shape[1]

    @property
    def precision(self) -> torch.dtype:
        """The coarser dtype of weight and bias gradient: what their rounding is judged by."""
        return max(self.weight_grad.dtype, self.bias_grad.dtype, key=lambda d: torch.finfo(d).eps)

    @property
    def choice(self) -> str:
        """In words: which layer was chosen, and why the others were not."""
        if self.layer is None:
            return f"one layer, {self.inputs} -> {self.outputs}, given directly"
        lines = [f"attacking {self.layer!r} ({self.inputs} -> {self.outputs}, ReLU {self.relu})"]
        lines += [r.caveat for r in self.considered if r.name == self.layer and r.caveat]
        names = [report.name for report in self.considered]
        for i, report in enumerate(self.considered):
            if report.name != self.layer:
                where = "farther from" if i > names.index(self.layer) else "closer to"
                too = f"attackable too ({report.why}), but {where} the data"
                lines.append(f"not {report.name!r}: {too if report.attackable else report.why}")
        return "\n".join([*lines, *self.notes])

    @property
    def next_gradient(self) -> Tensor | None:
        """The weight gradient of the linear layer that follows, one ReLU away, if it is known."""
        following = [
            r.name for r in self.considered if self.layer is not None and r.reads == self.layer
        ]
        gradient = self.others.get(f"{following[0]}.weight") if len(following) == 1 else None
        return None if gradient is None or gradient.shape[1] != self.outputs else gradient

    @property
    def meaning(self) -> str:
        """What the layer's inputs are to the data, in words; empty where they are the data."""
        own = next((r for r in self.considered if r.name == self.layer), None)
        if own is None or own.reads_data:
            return ""
        words = (
            f"these are inputs of layer {self.layer!r}, activations computed from the data by what "
            "stands before it: the data follows as far as that can be inverted"
        )
        return f"{words}; {own.caveat}" if own.caveat else words

    @property
    def reads_data(self) -> bool:
        """Are the layer's inputs the model's own? True for a layer given directly: nobody knows."""
        return all(r.reads_data for r in self.considered if r.name == self.layer)


def observe(
    model: nn.Module,
    gradients: Sequence[Tensor | None] | Mapping[str, Tensor | None] | None = None,
    *,
    after: Mapping[str, Tensor] | None = None,
    difference: Sequence[Tensor | None] | Mapping[str, Tensor | None] | None = None,
    lr: float | None = None,
    epochs: int | None = None,
    batch_size: int | None = None,
    momentum: float = 0.0,
    weight_decay: float = 0.0,
    proximal: float = 0.0,
    optimizer: str = "sgd",
    samples: int | None = None,
    layer: str | None = None,
) -> LayerUpdate:
    """The attackable layer of a model, as it shows in an update.

    A view is a snapshot: weights and gradients are copied, so training may go on in place. Views of
    one state of a model share one copy of it. A model that Python cannot copy is kept as it is, and
    `view.choice` says so: leave it unchanged until the view has been inverted.

    Args:
        model: the model with the weights the client was sent.
        gradients: FedSGD: one tensor per parameter, in the order of `model.parameters()`, or a dict
            by parameter name (which may leave parameters out). Sparse ones are made dense.
        after: FedAvg instead: the state dict the client sent back, with its learning rate `lr`, and
            `epochs` and `batch_size` if known; `momentum` and `weight_decay` of its SGD, `proximal`
            (mu) of FedProx, if any. Other optimisers than SGD are refused: Adam and its like scale
            every entry on its own, and what they send has no low rank.
        difference: the weights after minus those before instead, as a list or dict like `gradients`,
            with the same options as `after`.
        samples: how many samples the update was computed from, if that was told: evidence against
            samples that merged or vanished.
        layer: the layer to attack; without it, the attackable one closest to the data.

    >>> net = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 2))
    >>> loss = net(torch.randn(3, 8)).sum()
    >>> view = observe(net, torch.autograd.grad(loss, list(net.parameters())))
    >>> print(view.choice)
    attacking '0' (8 -> 6, ReLU after)
    not '2': attackable too (a ReLU stands before it: its inputs are sparse), but farther from the data
    """
    forms = {"gradients": gradients, "after=": after, "difference=": difference}
    told = [form for form, value in forms.items() if value is not None]
    if len(told) != 1:
        got = ("both " if len(told) == 2 else "") + " and ".join(told)
        raise InvalidOption(
            "expected either gradients (FedSGD) or after= or difference=, and lr= (FedAvg), got "
            f"{got or 'neither'}"
        )
    options = {
        "epochs": epochs,
        "batch_size": batch_size,
        "momentum": momentum,
        "weight_decay": weight_decay,
        "proximal": proximal,
    }
    _must_hold_numbers(model)
    training = None
    notes: list[str] = []
    if gradients is None:
        only_sgd(optimizer)
        training = LocalTraining(lr, **options)  # type: ignore[arg-type]
    else:
        given = [name for name, value in {"lr": lr, **options}.items() if value]
        if given:
            raise InvalidOption(
                f"{', '.join(given)} belong to after= and difference= (FedAvg); gradients need none"
            )
    if gradients is not None:
        named = _by_name(model, gradients, "gradient", notes)
    elif after is not None:
        assert training is not None
        named = descent(model, after, training)
    else:
        assert difference is not None
        assert training is not None
        moved = _by_name(model, _without_buffers(model, difference), "difference", notes)
        named = descent_by(model, moved, training)
    chosen, reports = _choose(model, inspect_layers(model), named, layer)
    assert chosen.relu is not None
    taken = snapshot(model)
    module = taken.model.get_submodule(chosen.name)
    prefix = f"{chosen.name}." if chosen.name else ""
    attacked = {f"{prefix}weight", f"{prefix}bias"}
    assert isinstance(module, nn.Linear)
    weight, bias = module.weight.detach(), module.bias.detach()
    if taken.uncopied:
        weight, bias = weight.clone(), bias.clone()
        notes.append(
            f"the model cannot be copied ({taken.uncopied}): leave it unchanged until this view has "
            "been inverted"
        )
    return LayerUpdate(
        weight=weight,
        bias=bias,
        weight_grad=named[f"{prefix}weight"],
        bias_grad=named[f"{prefix}bias"],
        relu=chosen.relu,
        layer=chosen.name,
        others={name: grad for name, grad in named.items() if name not in attacked},
        considered=reports,
        training=training,
        model=taken.model,
        samples=samples,
        notes=tuple(notes),
    )


def _must_hold_numbers(model: nn.Module) -> None:
    """Refuse models whose weights are not there yet."""
    problems = []
    for name, p in chain(model.named_parameters(), model.named_buffers()):
        if nn.parameter.is_lazy(p):
            problems.append(
                f"the model's {name!r} has no shape yet (a lazy module): run one forward pass first, "
                "then load the weights the client was sent"
            )
        elif p.device.type == "meta":
            problems.append(f"the model's {name!r} is on the meta device: {_NO_NUMBERS}")
    if problems:
        raise InvalidUpdate(problems)


def _without_buffers(
    model: nn.Module, named: Sequence[Tensor | None] | Mapping[str, Tensor | None]
) -> Sequence[Tensor | None] | Mapping[str, Tensor | None]:
    """The difference of two state dicts has the buffers as well."""
    if not isinstance(named, Mapping):
        return named
    buffers = {name for name, _ in model.named_buffers(remove_duplicate=False)}
    return {name: value for name, value in named.items() if name not in buffers}


def _by_name(
    model: nn.Module,
    gradients: Sequence[Tensor | None] | Mapping[str, Tensor | None],
    what: str,
    notes: list[str],
) -> dict[str, Tensor]:
    """Copies of the gradients (or differences: `what` they are called) by parameter name."""
    parameters = dict(model.named_parameters())
    if isinstance(gradients, Tensor):
        raise InvalidUpdate(
            [f"expected a list or dict of {what}s, one per parameter, got one tensor"]
        )
    if isinstance(gradients, Mapping):
        named = dict(gradients)
        unknown = [name for name in named if name not in parameters]
        if unknown:
            some = ", ".join(repr(name) for name in list(parameters)[:6])
            more = ", ..." if len(parameters) > 6 else ""
            raise InvalidUpdate(
                [f"the model has no parameter {unknown[0]!r} (it has {some}{more})"]
            )
    else:
        names = list(parameters)
        trainable = [name for name, p in parameters.items() if p.requires_grad]
        grads = list(gradients)
        if len(grads) not in (len(names), len(trainable)):
            raise InvalidUpdate(
                [f"expected {len(names)} {what}s, one per parameter of the model, got {len(grads)}"]
            )
        named = dict(zip(names if len(grads) == len(names) else trainable, grads, strict=True))
    problems, present = [], {}
    for name, grad in named.items():
        if grad is None:
            continue
        problem = _tensor_problem(f"the {what} of {name!r}", grad, parameters[name].shape)
        if problem:
            problems.append(problem)
        elif grad.is_complex():
            notes.append(f"the {what} of {name!r} is complex: it is not compared")
        else:
            # A copy, since p.grad is zeroed in place; as dense as the parameter itself is.
            present[name] = grad.detach().clone().to_dense()
    if problems:
        raise InvalidUpdate(problems)
    return present


def _tensor_problem(name: str, tensor: object, shape: torch.Size | None = None) -> str:
    """Why a tensor cannot be part of an update, or nothing."""
    if not isinstance(tensor, Tensor):
        return f"{name} is a {type(tensor).__name__}, expected a tensor"
    if tensor.is_quantized:
        return f"{name} is quantised ({tensor.dtype}): call .dequantize() first"
    if tensor.dtype not in _DTYPES and not tensor.is_complex():
        kinds = "expected float64, float32, bfloat16 or float16"
        return f"{name} is {tensor.dtype}, {kinds}: call .float() first"
    if tensor.device.type == "meta":
        return f"{name} is on the meta device: {_NO_NUMBERS}"
    if shape is not None and tensor.shape != shape:
        return f"{name} has shape {tuple(tensor.shape)}, expected {tuple(shape)}"
    return ""


def _choose(
    model: nn.Module,
    inspected: tuple[LayerReport, ...],
    gradients: Mapping[str, Tensor],
    layer: str | None,
) -> tuple[LayerReport, tuple[LayerReport, ...]]:
    """The first attackable layer whose gradients are there, or the one asked for; and all reports."""
    reports = tuple(_with_parts(model, report, gradients) for report in inspected)
    for report in reports:
        if report.attackable and layer in (None, report.name):
            return report, reports
    if layer is not None and layer not in {report.name for report in reports}:
        names = ", ".join(repr(r.name) for r in reports) or "none"
        raise InvalidOption(f"the model has no linear layer {layer!r}; its linear layers: {names}")
    reasons = "; ".join(f"{r.name!r}: {r.why}" for r in reports if layer in (None, r.name))
    raise NoAttackableLayer(
        "expected a linear layer with a bias, next to a ReLU, whose gradients are in the update; "
        f"found none ({reasons or 'the model has no linear layer'})"
    )


def _with_parts(
    model: nn.Module, report: LayerReport, gradients: Mapping[str, Tensor]
) -> LayerReport:
    """The report, corrected where the layer lacks a bias or its gradients."""
    prefix = f"{report.name}." if report.name else ""
    if not report.attackable:
        return report
    if getattr(model.get_submodule(report.name), "bias", None) is None:
        why = "it has no bias, and the bias gradient gives each input its scale"
    elif f"{prefix}weight" not in gradients or f"{prefix}bias" not in gradients:
        why = "the update has no gradient of its weight and bias"
    else:
        return report
    return dataclasses.replace(report, relu=None, why=why)


def _problems(view: LayerUpdate) -> list[str]:
    """Everything that is wrong with an update, in words."""
    parts = {
        "weight": view.weight,
        "bias": view.bias,
        "weight_grad": view.weight_grad,
        "bias_grad": view.bias_grad,
    }
    needed = {
        "bias": "the layer's bias tells which neurons are off; SPEAR cannot attack a layer without",
        "bias_grad": "the bias gradient gives each recovered input its scale",
    }
    problems = [
        f"{name} is a {type(part).__name__}, expected a tensor"
        + (f" ({needed[name]})" if name in needed else "")
        for name, part in parts.items()
        if not isinstance(part, Tensor)
    ]
    if view.samples is not None and not (isinstance(view.samples, int) and view.samples > 0):
        problems.append(f"samples is {view.samples!r}, expected a whole number above zero, or None")
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
    problems = [_tensor_problem(name, part) for name, part in {**parts, **others}.items()]
    problems = [problem for problem in problems if problem]
    problems += [
        f"{name} is complex ({part.dtype}): SPEAR attacks real layers only"
        for name, part in {**parts, **others}.items()
        if part.is_complex()
    ]
    devices = {str(part.device) for part in parts.values()}
    if len(devices) > 1:
        problems.append(f"expected all tensors on one device, got {', '.join(sorted(devices))}")
    layouts = [n for n, part in {**parts, **others}.items() if part.layout != torch.strided]
    if layouts:
        problems.append(f"{', '.join(layouts)}: expected dense tensors; call .to_dense()")
    return problems


def _finite(tensor: Tensor) -> bool:
    rows = tensor.reshape(tensor.shape[0] if tensor.ndim else 1, -1)
    step = max(1, _BLOCK // rows.shape[1])
    return all(bool(torch.isfinite(rows[i : i + step]).all()) for i in range(0, len(rows), step))
