"""From a model and what a client sent to a layer to attack. New kinds of update enter here."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

from torch import Tensor, nn

from spear.errors import Declined, InvalidOption, InvalidUpdate, NoAttackableLayer
from spear.update.forms import NO_NUMBERS, AnyForm, Entries, by_name, state_of, unwrapped
from spear.update.layer_update import LayerUpdate
from spear.update.layers import LayerReport, inspect_layers, trace
from spear.update.plain_mlp import describe_plain_mlp, linear_layers, plain_mlp
from spear.update.protocol import Clipping, Protocol, Sends
from spear.update.readings import Reading, read
from spear.update.snapshots import snapshot
from spear.update.watching import Watched


def observe(
    model: nn.Module | Mapping[str, Any],
    gradients: AnyForm | None = None,
    *,
    after: AnyForm | None = None,
    difference: AnyForm | None = None,
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
        model: the model with the weights the client was sent, also inside DataParallel, Opacus's
            GradSampleModule or torch.compile; or its state dict, if it is a plain MLP: linear layers
            with ReLUs between them.
        gradients: FedSGD: a dict by parameter name or (name, tensor) pairs, which may leave parameters
            out; a list in the order of `model.parameters()`, of the trainable ones or of the state
            dict; one flat vector in such an order; or a module that has them in `.grad`. Arrays and
            lists of numbers serve as tensors. Buffers are ignored; so are wrappers' prefixes, such as
            `module.`. Sparse gradients are made dense.
        after: FedAvg instead: the weights the client sent back, in any of these forms, such as a state
            dict, a checkpoint that holds one, or the model itself. Only frozen ones may be left out.
        difference: or the weights after minus those before, in any of these forms.
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
    whole = next(form for form in (gradients, after, difference) if form is not None)
    notes: list[str] = []
    if isinstance(model, nn.Module):
        model = unwrapped(model)
        _must_hold_numbers(model)
        own = Entries.of(model)
    else:
        state = state_of(model, notes)
        recognised = plain_mlp(state)
        if isinstance(recognised, Declined):
            sent = by_name(Entries.of_state(state), whole, sends, notes)
            return _first_layer(state, read(state, sent, told), layer, recognised.reason, notes)
        notes.append(describe_plain_mlp(state))
        model, own = recognised, Entries.of(recognised, state)
    sent = by_name(own, whole, sends, notes)
    shape = None if input_shape is None else tuple(input_shape)
    return _seen(model, read(own.parameters, sent, told), layer, shape, notes)


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
    weight = module.weight.detach()
    bias = None if module.bias is None else module.bias.detach()
    if taken.uncopied:
        weight, bias = weight.clone(), None if bias is None else bias.clone()
        notes.append(
            f"the model cannot be copied ({taken.uncopied}): leave it unchanged until this view has "
            "been inverted"
        )
    return LayerUpdate(
        weight=weight,
        bias=bias,
        weight_grad=named[f"{prefix}weight"],
        bias_grad=None if bias is None else named[f"{prefix}bias"],
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


def _first_layer(
    state: Mapping[str, Tensor], reading: Reading, layer: str | None, why: str, notes: list[str]
) -> LayerUpdate:
    """Without a model, and weights that are no plain MLP's: the first linear layer with a bias, assumed
    to be followed by a ReLU."""
    layers = [one for one in linear_layers(state) if layer in (None, one.name)]
    if layer is not None and not layers:
        raise no_such_layer(layer, [one.name for one in linear_layers(state)])
    for one in layers:
        weight, bias = f"{one.name}.weight", f"{one.name}.bias"
        if one.bias and weight in reading.gradients and bias in reading.gradients:
            break
    else:
        raise NoAttackableLayer(
            "expected the update of a linear layer's weight and bias, got that of "
            f"{', '.join(map(repr, list(reading.gradients)[:6]))}"
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
        raise no_such_layer(layer, [report.name for report in reports])
    if layer is not None:
        why = next(report.why for report in reports if report.name == layer)
        others = ", ".join(repr(report.name) for report in reports if report.attackable)
        raise NoAttackableLayer(
            f"layer {layer!r} cannot be attacked ({why}); others that can: {others or 'none'}"
        )
    reasons = "; ".join(f"{report.name!r}: {report.why}" for report in reports)
    raise NoAttackableLayer(
        "expected a linear layer next to a ReLU, whose gradients are in the update; "
        f"found none ({reasons or 'the model has no linear layer'})"
    )


def no_such_layer(name: str, there: Sequence[str]) -> InvalidOption:
    """The error that a layer is asked for that is not there."""
    names = ", ".join(map(repr, there)) or "none"
    return InvalidOption(f"the model has no linear layer {name!r}; its linear layers: {names}")


def _with_parts(
    model: nn.Module, report: LayerReport, gradients: Mapping[str, Tensor]
) -> LayerReport:
    """The report, corrected where the update lacks the layer's gradients."""
    prefix = f"{report.name}." if report.name else ""
    if not report.attackable:
        return report
    biased = getattr(model.get_submodule(report.name), "bias", None) is not None
    if f"{prefix}weight" not in gradients or (biased and f"{prefix}bias" not in gradients):
        why = f"the update has no gradient of its weight{' and bias' * biased}"
    else:
        return report
    return dataclasses.replace(report, relu=None, why=why)
