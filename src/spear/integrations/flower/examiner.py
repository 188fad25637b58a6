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

from spear.audit.from_weights import plain_mlp
from spear.audit.naming import named
from spear.errors import InvalidOption, InvalidUpdate, SpearError
from spear.integrations.flower.arrays import Arrays, Layout, tensors
from spear.integrations.flower.examined import Examined
from spear.integrations.flower.hints import guessed_look, unlike, what_to_tell
from spear.integrations.flower.training import Sends, Training
from spear.integrations.flower.truth import Private, compared
from spear.inversion import Inversion, Outcome, invert
from spear.judge import Cause, Loss, Proof
from spear.layers import inspect_layers
from spear.local_training import LocalTraining
from spear.report import Finding, Look
from spear.report.report import SEVERITY
from spear.update import LayerUpdate, observe

log = logging.getLogger("flwr.spear")  # below Flower's own logger: its format, its handlers

Model = nn.Module | Callable[[], nn.Module]


class Options(TypedDict, total=False):
    """What is known of the clients, and how much the attack may spend on each."""

    lr: float | None
    """Of the clients' SGD. Unless given: key "lr" of a reply's metrics, or of the train config."""
    epochs: int | None
    """Local epochs, likewise "local-epochs" or "epochs"."""
    batch_size: int | None
    """Of a local step, likewise "batch-size"."""
    momentum: float | None
    weight_decay: float | None
    proximal: float | None
    """FedProx' mu; the strategy puts it in the train config."""
    optimizer: str
    """"sgd"; with any other of torch.optim nothing is attacked, and the report says why."""
    sends: Sends
    """"weights" (a state dict), "delta" (weights minus those received) or "gradient"."""
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
    training: Training
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
        training = Training(**{k: v for k, v in options.items() if k not in own})
        examiner = Examiner(_built(model), training, **{k: options[k] for k in options if k in own})
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
        self.assumed.append(
            "no model was given: the weights are those of linear layers that fit on to each other, "
            "and ReLUs between them were assumed"
        )
        self._check_layer()

    def examine(
        self,
        name: str,
        before: Arrays,
        sent: Mapping[str, Tensor],
        training: Training,
        *,
        notes: Sequence[str] = (),
        private: Private | None = None,
        examples: float | None = None,
    ) -> Examined:
        """Attack one update. A bad one is a finding that says so, never an error."""
        began = time.monotonic()
        notes = [*notes, *self.assumed, *training.words()]
        try:
            result, view = self._attacked(before, sent, training, examples)
            unlike = self._unlike(before, sent, training, result)
            if unlike:
                result, notes = _unfit(result, unlike, training.sends), [*notes, unlike]
            else:
                notes += what_to_tell(result, view, training, examples)
            finding = self._finding(name, result, view, notes, private)
        except Exception as error:  # whatever it is, the federation goes on
            return self.unaudited(name, error, notes, seconds=time.monotonic() - began)
        return Examined(
            finding,
            training,
            time.monotonic() - began,
            interrupted=bool(result.stats.get("interrupted")),
            features=None if view.reads_data else view.layer,
            unlike=unlike,
        )

    def _unlike(
        self, before: Arrays, sent: Mapping[str, Tensor], training: Training, result: Inversion
    ) -> str | None:
        """Why the reply is not what sends= says; a proof says that it is."""
        if result.certified.any():
            return None
        layout = self.layout
        assert layout is not None
        own = {n: value for n, value in layout.named(before).items() if n in layout.parameters}
        return unlike(training.sends, own, sent)

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
        finding = Finding(
            name=name,
            layer="no layer was attacked",
            outcome=Outcome.INCONCLUSIVE,
            proof=Proof.NONE,
            reason=f"not attacked: {why}",
            batch_size=None,
            match=None,
            certified=(),
            approximate=(),
            inputs=None,
            labels=None,
            predicted_error=None,
            stats={},
            notes=tuple(notes),
            cause=Cause.NOT_ATTACKED,
        )
        return Examined(finding, self.training, seconds)

    def _attacked(
        self,
        before: Arrays,
        sent: Mapping[str, Tensor],
        training: Training,
        examples: float | None,
    ) -> tuple[Inversion, LayerUpdate]:
        if not training.is_sgd and training.sends != "gradient":
            raise InvalidUpdate(
                [
                    f"clients train with {training.optimizer}, which scales every entry on its own: "
                    "this attack reads SGD's updates only (which does not make others safe)"
                ]
            )
        model = self._holding(before)
        began = time.monotonic()
        best: tuple[Inversion, LayerUpdate] | None = None
        for local in training.readings():
            left = self.max_seconds - (time.monotonic() - began)
            if best is not None and (left <= 0 or _settled(best[0])):
                break
            view = self._seen(model, sent, training.sends, local)
            view = dataclasses.replace(view, samples=_samples(training, local, examples))
            result = invert(view, model=model, loss=self.loss, max_seconds=left)
            if best is None or _worth(result) > _worth(best[0]):
                best = result, view
        assert best is not None
        return best

    def _holding(self, before: Arrays) -> nn.Module:
        """The model with the weights that were sent to the client, in their precision."""
        assert self.model is not None
        state = Layout.of(self.model).named(before)
        kinds = {value.dtype for value in state.values() if value.is_floating_point()}
        if len(kinds) == 1:
            self.model.to(kinds.pop())
        self.model.load_state_dict(state, strict=False)  # what was not sent stays as it was
        return self.model

    def _seen(
        self, model: nn.Module, sent: Mapping[str, Tensor], sends: Sends, local: LocalTraining
    ) -> LayerUpdate:
        """The layer as it shows in what was sent."""
        own = dict(model.named_parameters())
        if sends == "weights" and set(own) <= set(sent):
            return observe(model, after=sent, layer=self.layer, **dataclasses.asdict(local))
        gradients = {name: value.to(own[name]) for name, value in sent.items() if name in own}
        if sends == "weights":  # of some layers only
            gradients = {n: (own[n].detach() - value) / local.lr for n, value in gradients.items()}
        elif sends == "delta":
            gradients = {name: -value / local.lr for name, value in gradients.items()}
        view = observe(model, gradients, layer=self.layer)
        exact = sends == "gradient" or local.one_step
        return view if exact else dataclasses.replace(view, training=local)

    def _check_layer(self) -> None:
        assert self.model is not None
        names = [report.name for report in inspect_layers(self.model)]
        if self.layer is not None and self.layer not in names:
            listed = ", ".join(map(repr, names)) or "none"
            raise InvalidOption(
                f"the model has no linear layer {self.layer!r}; its linear layers: {listed}"
            )


def _settled(result: Inversion) -> bool:
    """Is there nothing that reading the update differently could add?"""
    return result.outcome is Outcome.EXACT or not result.batch_size or "interrupted" in result.stats


def _worth(result: Inversion) -> tuple[int, int]:
    """Which of two readings of an update to report: the one that is worse for the client."""
    return SEVERITY.index(result.outcome), int(result.certified.sum())


def _samples(training: Training, local: LocalTraining, examples: float | None) -> int | None:
    """How many samples the update was computed from: as many as the client reports, if it is known
    to have taken one step on all of them. A gradient may be that of a part, and so may a step of
    which nobody said that it was a whole epoch."""
    whole = training.sends != "gradient" and training.epochs == 1 and local.one_step
    if not whole or examples is None or examples != int(examples):
        return None
    return int(examples)


def _unfit(result: Inversion, why: str, sends: Sends) -> Inversion:
    """The same without what came back, which was read from something else than it was said to be."""
    none = result.certified[:0]
    return dataclasses.replace(
        result,
        inputs=result.inputs[:0],
        certified=none,
        approximate=none,
        labels=None,
        predicted_error=None,
        outcome=Outcome.INCONCLUSIVE,
        cause=Cause.UNFIT,
        reason=f"{why}; taken as sends={sends!r}: {result.reason}",
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
