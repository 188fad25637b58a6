"""One update of a Flower client, attacked: the part that the strategy and the mod share."""

from __future__ import annotations

import copy
import dataclasses
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypedDict

from torch import Tensor, nn

from spear.audit.naming import named
from spear.errors import InvalidOption, SpearError
from spear.integrations.flower.arrays import Arrays, Layout, tensors
from spear.integrations.flower.examined import Examined
from spear.integrations.flower.hints import guessed_look, what_to_tell
from spear.integrations.flower.training import assumed, of_client
from spear.integrations.flower.truth import Private, compared
from spear.inversion import Inversion, invert
from spear.judge import Loss
from spear.layers import inspect_layers
from spear.report import Finding, Look
from spear.update import LayerUpdate, Protocol, observe
from spear.update.plain_mlp import in_words, plain_mlp
from spear.update.protocol import Clipping, Sends

log = logging.getLogger("flwr.spear")  # below Flower's own logger: its format, its handlers

Model = nn.Module | Callable[[], nn.Module]


class Options(TypedDict, total=False):
    """What is known of the clients, and how much the attack may spend on each."""

    lr: float | None
    """Of the clients' SGD. Unless given: key "lr" of a reply's metrics, or of the train config. This
    and the following are `spear.Protocol`'s; see there."""
    epochs: int | None
    """Likewise "local-epochs" or "epochs"."""
    local_steps: int | None
    local_batch_size: int | None
    """Likewise "batch-size"."""
    batch_size: int | None
    """Another name of it."""
    momentum: float
    nesterov: bool
    weight_decay: float
    proximal: float
    """FedProx' mu; the strategy puts it in the train config."""
    optimizer: str
    """"sgd"; with any other nothing is attacked, and the report says why."""
    clip: float | None
    clipping: Clipping | None
    sigma: float | None
    """Noise that clients add to every entry of what they send; or"""
    noise_multiplier: float | None
    precision: str
    pruned: float
    class_weights: Sequence[float] | None
    sends: Sends
    """"weights" (a state dict), "difference" (weights minus those received) or "gradient"."""
    layer: str | None
    """The layer to attack; chosen unless given."""
    loss: Loss | None
    """The clients' loss; cross-entropy unless given."""
    look: Look | None
    """How inputs are shown as pictures; guessed for usual sizes unless given."""
    max_seconds: float
    """For one reply; 30 unless given."""


@dataclass(eq=False)
class Examiner:
    """Attacks updates of one model, one after the other."""

    model: nn.Module | None
    protocol: Protocol
    layer: str | None = None
    loss: Loss | None = None
    look: Look | None = None
    max_seconds: float = 30.0
    assumed: list[str] = field(default_factory=list)  # about the model, in sentences

    @staticmethod
    def new(
        model: Model | None, options: Mapping[str, Any], beside: Sequence[str] = ()
    ) -> Examiner:
        """With every option checked before the first round; `beside` are the caller's own."""
        unknown = sorted(set(options) - set(Options.__annotations__))
        if unknown:
            known = ", ".join(["model", *beside, *Options.__annotations__])
            raise InvalidOption(f"unknown option {unknown[0]!r}; expected one of {known}")
        own = {f.name for f in dataclasses.fields(Examiner)}
        told = {k: v for k, v in options.items() if k not in own and v is not None}
        if "batch_size" in told:
            told.setdefault("local_batch_size", told.pop("batch_size"))
        protocol = Protocol(**{"sends": "weights", **told})
        examiner = Examiner(_built(model), protocol, **{k: options[k] for k in options if k in own})
        seconds = examiner.max_seconds
        if not isinstance(seconds, (int, float)) or not 0 < seconds < float("inf"):
            raise InvalidOption(f"expected max_seconds > 0 for one reply, got {seconds!r}")
        if examiner.model is not None:
            examiner._check_layer()
        return examiner

    @property
    def layout(self) -> Layout | None:
        return None if self.model is None else Layout.of(self.model)

    def meet(self, before: Arrays) -> None:
        """Make sure that the model is the one these arrays are of; or recognise it from them."""
        if self.model is not None:
            Layout.of(self.model).named(before)
            return
        state, _ = named(tensors(before), {})
        recognised = plain_mlp(state)
        if isinstance(recognised, str):
            raise InvalidOption(
                f"expected the weights of a plain MLP, which need no model, but {recognised}: give the "
                "clients' model, Audited(strategy, model=Net())"
            )
        self.model = recognised
        self.assumed.append(in_words(state))
        self._check_layer()

    def examine(
        self,
        name: str,
        before: Arrays,
        sent: Mapping[str, Tensor],
        protocol: Protocol,
        *,
        notes: Sequence[str] = (),
        private: Private | None = None,
        examples: float | None = None,
    ) -> Examined:
        """Attack one update. A bad one is a finding that says so, never an error."""
        began = time.monotonic()
        notes = [*notes, *self.assumed, *assumed(protocol)]
        try:
            view = self._seen(before, sent, of_client(protocol, examples))
            result = invert(view, loss=self.loss, max_seconds=self.max_seconds)
            notes += what_to_tell(result, view, examples)
            finding = self._finding(name, result, view, notes, private)
        except Exception as error:  # whatever it is, the federation goes on
            return self.unaudited(name, error, notes, seconds=time.monotonic() - began)
        return Examined(
            finding,
            protocol,
            time.monotonic() - began,
            interrupted=bool(result.stats.get("interrupted")),
            features=None if view.reads_data else view.layer,
            mistake=result.mistake,
        )

    def _finding(
        self,
        name: str,
        result: Inversion,
        view: LayerUpdate,
        notes: Sequence[str],
        private: Private | None,
    ) -> Finding:
        look = self.look if self.look and self.look.inputs == view.inputs else None
        shown, words = (look, []) if self.look else guessed_look(view, result.inputs)
        if self.look and look is None:
            shape = " x ".join(map(str, self.look.shape))
            words.append(f"the layer's {view.inputs} inputs are no pictures of {shape}")
        truth, uncompared = compared(result.inputs, private, look)
        words += uncompared
        return Finding.of(result, name, view, look=shown, truth=truth, notes=[*notes, *words])

    def unaudited(
        self, name: str, error: Exception, notes: Sequence[str] = (), seconds: float = 0.0
    ) -> Examined:
        """A reply that could not be attacked, and why."""
        if isinstance(error, SpearError):
            why = str(error)
        else:
            log.warning("SPEAR: %s could not be attacked", name, exc_info=error)
            why = f"{type(error).__name__}: {error}"
        finding = Finding.not_attacked(name, why, notes)
        return Examined(finding, self.protocol, seconds)

    def _holding(self, before: Arrays) -> nn.Module:
        """The model with the weights that were sent to the client, in their precision."""
        assert self.model is not None
        state = Layout.of(self.model).named(before)
        kinds = {value.dtype for value in state.values() if value.is_floating_point()}
        if len(kinds) == 1:
            self.model.to(kinds.pop())
        self.model.load_state_dict(state, strict=False)  # what was not sent stays as it was
        return self.model

    def _seen(self, before: Arrays, sent: Mapping[str, Tensor], protocol: Protocol) -> LayerUpdate:
        """The layer as it shows in what was sent."""
        model = self._holding(before)
        own = dict(model.named_parameters())
        parts = {name: value for name, value in sent.items() if name in own}
        if protocol.sends == "gradient":
            return observe(model, parts, protocol=protocol, layer=self.layer)
        if protocol.sends == "weights" and set(own) <= set(sent):
            return observe(model, after=sent, protocol=protocol, layer=self.layer)
        if protocol.sends == "weights":  # of some layers only
            parts = {
                name: value.to(own[name]) - own[name].detach() for name, value in parts.items()
            }
        return observe(model, difference=parts, protocol=protocol, layer=self.layer)

    def _check_layer(self) -> None:
        assert self.model is not None
        names = [report.name for report in inspect_layers(self.model)]
        if self.layer is not None and self.layer not in names:
            listed = ", ".join(map(repr, names)) or "none"
            raise InvalidOption(
                f"the model has no linear layer {self.layer!r}; its linear layers: {listed}"
            )


def _built(model: Model | None) -> nn.Module | None:
    """A model of our own, on the CPU."""
    if model is None:
        return None
    built = copy.deepcopy(model) if isinstance(model, nn.Module) else None
    if built is None and callable(model):
        built = model()
    if not isinstance(built, nn.Module):
        raise InvalidOption(
            f"expected model= to be a module such as Net(), or a function that makes one, got {model!r}"
        )
    return built.cpu()
