"""From a model and what a client sent to a layer to attack. New kinds of update enter here."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from itertools import chain

from torch import Tensor, nn

from spear.errors import Declined, InvalidOption, InvalidUpdate, NoAttackableLayer
from spear.update.layer_update import NO_NUMBERS, LayerUpdate, tensor_problem
from spear.update.layers import LayerReport, inspect_layers, trace
from spear.update.plain_mlp import describe_plain_mlp, linear_layers, plain_mlp
from spear.update.protocol import Clipping, Protocol, Sends
from spear.update.readings import Reading, read
from spear.update.snapshots import snapshot
from spear.update.watching import Watched

Parts = Sequence[Tensor | None] | Mapping[str, Tensor | None]


def observe(
    model: nn.Module | Mapping[str, Tensor],
    gradients: Parts | None = None,
    *,
    after: Mapping[str, Tensor] | None = None,
    difference: Parts | None = None,
    samples: int | None = None,
    lr: float | Sequence[float] | None = None,
    epochs: int | None = None,
    local_steps: int | None = None,
    local_batch_size: int | None = None,
    batch_size: int | None = None,
    momentum: float = 0.0,
    nesterov: bool = False,
    weight_decay: float = 0.0,
    proximal: float = 0.0,
    optimizer: str = "sgd",
    clipping: Clipping | None = None,
    sigma: float | None = None,
    class_weights: Sequence[float] | None = None,
    protocol: Protocol | None = None,
    layer: str | None = None,
    input_shape: Sequence[int] | None = None,
) -> LayerUpdate:
    """The attackable layer of a model, as it shows in an update.

    A view is a snapshot: weights and gradients are copied, so training may go on in place. Views of one
    state of a model share one copy of it. A model that Python cannot copy is kept as it is, and
    `view.choice` says so: leave it unchanged until the view has been inverted.

    What was sent is compared with what it is said to be. Weights given as gradients, a difference given
    as weights and the like are read as what they are, and `view.mistake` says so.

    Args:
        model: the model with the weights the client was sent; or its state dict, if it is a plain
            MLP: linear layers with ReLUs between them.
        gradients: FedSGD: one tensor per parameter, in the order of `model.parameters()`, or a dict
            by parameter name (which may leave parameters out). Sparse ones are made dense.
        after: FedAvg instead: the state dict the client sent back.
        difference: or the weights after minus those before, as a list or dict like `gradients`.
        samples: this and the following say how the update came about, as far as it is known; see
            `Protocol`. `samples` excludes samples that merged or vanished; `lr`, `epochs` and
            `local_batch_size` are needed to prove anything about several local steps.
        batch_size: another name for `local_batch_size`.
        protocol: all of that in one object instead.
        layer: the layer to attack; otherwise the attackable one closest to the data.
        input_shape: of one input, for a model whose forward torch.fx cannot trace; it is run on a
            made-up input, whose shape is guessed unless given.

    >>> import torch
    >>> net = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 2))
    >>> loss = net(torch.randn(3, 8)).sum()
    >>> view = observe(net, torch.autograd.grad(loss, list(net.parameters())))
    >>> print(view.choice)
    attacking '0' (8 -> 6, ReLU after)
    not '2': attackable too (a ReLU stands before it: its inputs are sparse), but farther from the data
    """
    sends = _form(gradients, after, difference)
    if batch_size is not None and local_batch_size not in (None, batch_size):
        raise InvalidOption("batch_size is another name of local_batch_size: give one of them")
    words = {
        "samples": samples,
        "lr": lr,
        "epochs": epochs,
        "local_steps": local_steps,
        "local_batch_size": local_batch_size or batch_size,
        "momentum": momentum,
        "nesterov": nesterov,
        "weight_decay": weight_decay,
        "proximal": proximal,
        "optimizer": optimizer,
        "clipping": clipping,
        "sigma": sigma,
        "class_weights": class_weights,
    }
    told = Protocol(sends=sends, **words) if protocol is None else protocol  # type: ignore[arg-type]
    if protocol is not None:
        said = [name for name, value in words.items() if value not in (None, 0.0, "sgd")]
        if said:
            raise InvalidOption(f"{said[0]} is part of protocol=: give one of them")
        told = dataclasses.replace(protocol, sends=sends)
    notes: list[str] = []
    if not isinstance(model, nn.Module):
        recognised = plain_mlp(model)
        if isinstance(recognised, Declined):
            whole = next(form for form in (gradients, after, difference) if form is not None)
            return _first_layer(model, whole, told, layer, recognised.reason)
        notes.append(describe_plain_mlp(model))
        model = recognised
    _must_hold_numbers(model)
    if after is not None:
        sent = _state(model, after)
    else:
        parts = gradients if gradients is not None else difference
        assert parts is not None
        what = "difference" if gradients is None else "gradient"
        sent = _by_name(model, _without_buffers(model, parts), what, notes)
    reading = read(dict(model.named_parameters()), sent, told)
    shape = None if input_shape is None else tuple(input_shape)
    return _seen(model, reading, layer, shape, notes)


def _form(gradients: object, after: object, difference: object) -> Sends:
    """Which of the three was given; it must be exactly one."""
    forms = {"gradients": gradients, "after=": after, "difference=": difference}
    given = [form for form, value in forms.items() if value is not None]
    if len(given) != 1:
        got = ("both " if len(given) == 2 else "") + " and ".join(given)
        raise InvalidOption(
            "expected either gradients (FedSGD) or after= or difference= (FedAvg), got "
            f"{got or 'neither'}"
        )
    forms_sent: dict[str, Sends] = {"gradients": "gradient", "after=": "weights"}
    return forms_sent.get(given[0], "difference")


def _seen(
    model: nn.Module,
    reading: Reading,
    layer: str | None,
    input_shape: tuple[int, ...] | None,
    notes: list[str],
) -> LayerUpdate:
    """The layer to attack, with copies of its weights."""
    named = reading.gradients
    taken = snapshot(model)
    traced = trace(taken.model, input_shape)
    if isinstance(traced, Watched):
        size = " x ".join(map(str, traced.shape))
        notes.append(
            f"{traced.why}: it was watched on one made-up input instead, {size}, and may do "
            "something else on others"
        )
    chosen, reports = _choose(model, inspect_layers(taken.model, traced), named, layer)
    assert chosen.relu is not None
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
        protocol=reading.protocol,
        model=taken.model,
        traced=traced,
        mistake=reading.mistake,
        notes=tuple(notes),
        dropout=chosen.dropout,
    )


def _state(model: nn.Module, after: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The parameters of a state dict that was sent back, checked."""
    problems, named = [], {}
    for name, before in model.named_parameters():
        if not isinstance(after.get(name), Tensor):
            problems.append(f"after= has no tensor {name!r}: expected the state dict sent back")
        elif after[name].shape != before.shape:
            problems.append(
                f"after[{name!r}] has shape {tuple(after[name].shape)}, "
                f"the model's has {tuple(before.shape)}"
            )
        else:
            named[name] = after[name].detach().to_dense().to(before.device, before.dtype)
    known = set(model.state_dict())
    problems += [
        f"after= has {name!r}, which the model has not" for name in after if name not in known
    ]
    if problems:
        raise InvalidUpdate(problems)
    return named


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
            problems.append(f"the model's {name!r} is on the meta device: {NO_NUMBERS}")
    if problems:
        raise InvalidUpdate(problems)


def _without_buffers(model: nn.Module, named: Parts) -> Parts:
    """Without the buffers that a state dict, and the difference of two, also holds."""
    if not isinstance(named, Mapping):
        return named
    buffers = {name for name, _ in model.named_buffers(remove_duplicate=False)}
    return {name: value for name, value in named.items() if name not in buffers}


def _by_name(model: nn.Module, sent: Parts, what: str, notes: list[str]) -> dict[str, Tensor]:
    """Copies of the gradients (or differences, `what`) by parameter name."""
    parameters = dict(model.named_parameters())
    trainable = [name for name, p in parameters.items() if p.requires_grad]
    named = _parts(list(parameters), sent, what, trainable)
    unknown = [name for name in named if name not in parameters]
    if unknown:
        some = ", ".join(repr(name) for name in list(parameters)[:6])
        more = ", ..." if len(parameters) > 6 else ""
        raise InvalidUpdate([f"the model has no parameter {unknown[0]!r} (it has {some}{more})"])
    return _copies(parameters, named, what, notes)


def _parts(
    names: list[str], sent: Parts, what: str, trainable: Sequence[str] = ()
) -> dict[str, Tensor | None]:
    """Tensors by name; a list is in the order of all parameters, or of the trained ones."""
    if isinstance(sent, Tensor):
        raise InvalidUpdate(
            [f"expected a list or dict of {what}s, one per parameter, got one tensor"]
        )
    if isinstance(sent, Mapping):
        return dict(sent)
    listed = list(sent)
    if len(listed) not in (len(names), len(trainable)):
        raise InvalidUpdate(
            [f"expected {len(names)} {what}s, one per parameter of the model, got {len(listed)}"]
        )
    return dict(zip(names if len(listed) == len(names) else trainable, listed, strict=True))


def _copies(
    own: Mapping[str, Tensor], named: Mapping[str, Tensor | None], what: str, notes: list[str]
) -> dict[str, Tensor]:
    """Copies of what was sent, checked against the parameters."""
    problems, present = [], {}
    for name, part in named.items():
        if part is None:
            continue
        problem = tensor_problem(f"the {what} of {name!r}", part, own[name].shape)
        if problem:
            problems.append(problem)
        elif part.is_complex():
            notes.append(f"the {what} of {name!r} is complex: it is not compared")
        else:
            # A copy, because p.grad is zeroed in place; dense like the parameter itself.
            present[name] = part.detach().clone().to_dense()
    if problems:
        raise InvalidUpdate(problems)
    return present


def _first_layer(
    state: Mapping[str, Tensor], parts: Parts, told: Protocol, layer: str | None, why: str
) -> LayerUpdate:
    """Without a model, and weights that are no plain MLP's: the first linear layer with a bias, assumed
    to be followed by a ReLU."""
    notes: list[str] = []
    named = _parts(list(state), parts, told.sends)
    known = {name: part for name, part in named.items() if name in state}
    reading = read(state, _copies(state, known, told.sends, notes), told)
    layers = [one for one in linear_layers(state) if layer in (None, one.name)]
    if layer is not None and not layers:
        names = ", ".join(repr(one.name) for one in linear_layers(state)) or "none"
        raise InvalidOption(f"there is no linear layer {layer!r}; the linear layers: {names}")
    for one in layers:
        weight, bias = f"{one.name}.weight", f"{one.name}.bias"
        if one.bias and weight in reading.gradients and bias in reading.gradients:
            break
    else:
        raise NoAttackableLayer(
            "expected the update of a linear layer's weight and bias, got that of "
            f"{', '.join(map(repr, list(named)[:6]))}"
        )
    notes.append(
        f"No model was given, and the weights are no plain MLP ({why}): the layer {one.name!r} alone "
        "was judged, assuming that a ReLU follows it. Give the model for a proof by replay and for "
        "labels; if other layers stand before it, what comes back are their outputs, not the data."
    )
    return LayerUpdate(
        weight=state[weight].detach().clone(),
        bias=state[bias].detach().clone(),
        weight_grad=reading.gradients[weight],
        bias_grad=reading.gradients[bias],
        protocol=reading.protocol,
        mistake=reading.mistake,
        notes=tuple(notes),
    )


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
