"""One update of a client, attacked: what the audits of several frameworks share."""

from __future__ import annotations

import copy
import dataclasses
import logging
import re
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypedDict

import torch
from torch import Tensor, nn

from spear.errors import Declined, InvalidOption, SpearError
from spear.files import named
from spear.integrations.messages import (
    Arrays,
    Layout,
    Masked,
    Places,
    assumed,
    of_client,
    tensors,
    untold,
    with_messages,
)
from spear.integrations.several_rounds import SeveralRounds, listed, samples
from spear.inversion import Inversion, Outcome, invert
from spear.judge import Loss
from spear.report import Finding, ImageFormat, Truth, compare
from spear.update import (
    Clipping,
    LayerUpdate,
    Protocol,
    Sends,
    describe_plain_mlp,
    inspect_layers,
    no_such_layer,
    observe,
    plain_mlp,
)


@dataclass(frozen=True)
class Framework:
    """Whose training runs are audited."""

    kind: str  # of the report
    distribution: str  # whose version a report names
    log: logging.Logger
    epochs: str  # where its apps keep the number of local epochs, in a sentence


@dataclass(frozen=True, eq=False)
class Private:
    """A client's samples: inputs (b, ...), and labels (b,) and names (b,) if known."""

    inputs: Tensor
    labels: Tensor | None = None
    names: tuple[str, ...] | None = None

    @staticmethod
    def of(given: Any) -> Private | None:
        """From what a `truth=` function returned: inputs, or (inputs, labels), or with names."""
        if given is None or isinstance(given, Private):
            return given
        parts = given if isinstance(given, tuple) else (given,)
        if not 1 <= len(parts) <= 3 or not isinstance(parts[0], Tensor) or parts[0].ndim < 2:
            raise InvalidOption(
                "expected truth= to return inputs (b, ...), (inputs, labels) or (inputs, labels, "
                f"names), got {type(given).__name__}"
            )
        inputs, labels, names = (*parts, None, None)[:3]
        return Private(inputs, labels, None if names is None else tuple(map(str, names)))

    @staticmethod
    def together(clients: Sequence[Private]) -> Private | None:
        """Of several clients, as one batch."""
        if not clients:
            return None
        labels = [c.labels for c in clients if c.labels is not None]
        names = [c.names for c in clients if c.names is not None]
        return Private(
            torch.cat([client.inputs for client in clients]),
            torch.cat(labels) if len(labels) == len(clients) else None,
            tuple(name for own in names for name in own) if len(names) == len(clients) else None,
        )


def compared(
    recovered: Tensor, private: Private | None, image_format: ImageFormat | None
) -> tuple[Truth | None, list[str]]:
    """The truth beside what was recovered, and a remark if they cannot be compared."""
    if private is None:
        return None, []
    true, found = private.inputs.detach().cpu().flatten(1), recovered.detach().cpu()
    if true.shape[1] != found.shape[1]:
        return None, [
            f"samples have {true.shape[1]} values and the layer {found.shape[1]} inputs: these are "
            "features of the samples, and are not compared with the truth"
        ]
    return compare(found, true, private.labels, names=private.names, image_format=image_format), []


@dataclass(frozen=True, eq=False)
class Examined:
    """What an update gave away, and what it took."""

    finding: Finding
    protocol: Protocol
    seconds: float = 0.0
    interrupted: bool = False
    features: str | None = None  # the layer's name, if its inputs are not the data itself
    mistake: str = ""  # what the reply was said to be and is not
    masked: bool = False  # did secure aggregation leave nothing to attack?
    together: Together | None = None  # with the rounds before it, where these were attacked

    @property
    def attacked(self) -> bool:
        return self.finding.is_attacked

    @property
    def verdict(self) -> str:
        """Its outcome in a word or two, for a table."""
        if not self.attacked:
            return "not attacked"
        found = self.finding.outcome.value
        return f"{found} (features)" if self.features and self.finding.recovered else found

    @property
    def line(self) -> str:
        """What it came to, for a log."""
        reason = self.finding.reason
        if not self.attacked:
            return reason
        if self.features and self.finding.recovered:
            reason = f"features (activations of {self.features!r}), not the data: {reason}"
        return f"{self.finding.outcome.name}, {reason}"


@dataclass(frozen=True, eq=False)
class Whose:
    """Whose update it is, and of which round."""

    client: Hashable
    label: str
    server_round: int


@dataclass(frozen=True, eq=False)
class Together:
    """What several rounds of one client, or one cohort, gave away together."""

    client: Hashable
    label: str
    rounds: int
    examined: Examined
    best_alone: tuple[int, int]  # samples proved, and recovered, of the best single round

    @property
    def gains(self) -> bool:
        """Did they give away more than any of them alone?"""
        return samples(self.examined.finding) > self.best_alone

    @property
    def words(self) -> str:
        """How much that is, beside the best single round."""
        finding = self.examined.finding
        seen = "an unknown number" if finding.batch_size is None else finding.batch_size
        proved, recovered = samples(finding)
        return (
            f"{self.rounds} rounds together: {_amount(proved, recovered)} of {seen}; best "
            f"single round: {_amount(*self.best_alone)} of {seen}"
        )


def _amount(proved: int, recovered: int) -> str:
    return str(recovered) if proved == recovered else f"{recovered} ({proved or 'none'} proved)"


@dataclass(frozen=True, eq=False)
class _Told:
    """What is known of an update besides itself."""

    protocol: Protocol
    notes: tuple[str, ...]
    private: Private | None
    examples: float | None
    whose: Whose | None


@dataclass(frozen=True, eq=False)
class Update:
    """One readable reply of a client."""

    before: Arrays
    values: Mapping[str, Tensor]
    protocol: Protocol
    examples: float | None
    notes: tuple[str, ...]


Model = nn.Module | Callable[[], nn.Module]


class Options(TypedDict, total=False):
    """What is known of the clients, and how much the attack may spend on each.

    Up to `sends` these are fields of `spear.Protocol`; see there. If lr, epochs, the batch size or
    momentum is not given, it is read from a reply's metrics or from the train config.
    """

    lr: float | None
    epochs: int | None
    local_steps: int | None
    local_batch_size: int | None
    batch_size: int | None  # another name of it
    momentum: float
    nesterov: bool
    weight_decay: float
    proximal: float
    optimizer: str  # with any other than "sgd" nothing is attacked, and the report says why
    clip: float | None
    clipping: Clipping | None
    sigma: float | None
    noise_multiplier: float | None
    precision: str
    pruned: float
    class_weights: Sequence[float] | None
    sends: Sends  # "weights" (a state dict) unless given, "difference" or "gradient"
    layer: str | None  # the layer to attack; chosen unless given
    loss: Loss | None  # the clients' loss; cross-entropy unless given
    image_format: ImageFormat | None  # how to show inputs; guessed for usual sizes unless given
    max_seconds: float  # for one reply; 30 unless given


@dataclass(eq=False)
class Examiner:
    """Attacks updates of one model, one after the other."""

    framework: Framework
    model: nn.Module | None
    protocol: Protocol
    layer: str | None = None
    loss: Loss | None = None
    image_format: ImageFormat | None = None
    max_seconds: float = 30.0
    assumed: list[str] = field(default_factory=list)  # about the model, in sentences
    several: SeveralRounds | None = None  # what is kept of earlier rounds, if anything

    @staticmethod
    def new(
        framework: Framework,
        model: Model | None,
        options: Mapping[str, Any],
        beside: Sequence[str] = (),
    ) -> Examiner:
        """Checks every option before the first round; `beside` are the caller's own."""
        unknown = sorted(set(options) - set(Options.__annotations__))
        if unknown:
            known = ", ".join(["model", *beside, *Options.__annotations__])
            raise InvalidOption(f"unknown option {unknown[0]!r}; expected one of {known}")
        own = {f.name for f in dataclasses.fields(Examiner)}
        told = {k: v for k, v in options.items() if k not in own and v is not None}
        if "batch_size" in told:
            told.setdefault("local_batch_size", told.pop("batch_size"))
        protocol = Protocol(**{"sends": "weights", **told})
        limits = {k: options[k] for k in options if k in own}
        examiner = Examiner(framework, _built(model), protocol, **limits)
        seconds = examiner.max_seconds
        if not isinstance(seconds, (int, float)) or not 0 < seconds < float("inf"):
            raise InvalidOption(f"expected max_seconds > 0 for one reply, got {seconds!r}")
        if examiner.model is not None:
            examiner._check_layer()
        return examiner

    @property
    def _log(self) -> logging.Logger:
        return self.framework.log

    @property
    def layout(self) -> Layout | None:
        return None if self.model is None else Layout.of(self.model)

    def match_model(self, before: Arrays) -> None:
        """Make sure that these arrays belong to the model, or recognise it from them."""
        if self.model is not None:
            Layout.of(self.model).named(before)
            return
        state, _ = named(tensors(before), {})
        recognised = plain_mlp(state)
        if isinstance(recognised, Declined):
            raise InvalidOption(
                "expected the weights of a plain MLP, which need no model, but "
                f"{recognised.reason}: give the clients' model, model=Net()"
            )
        self.model = recognised
        self.assumed.append(describe_plain_mlp(state))
        self._check_layer()

    def read(
        self,
        before: Arrays,
        sent: Arrays,
        places: Places,
        examples: object = None,
    ) -> Update:
        """A reply, beside what the client was sent; raises if it cannot be read."""
        assert self.layout is not None  # `match_model` came first
        protocol, notes = with_messages(self.protocol, places)
        known = isinstance(examples, (int, float)) and 0 < examples < float("inf")
        count = float(examples) if known else None  # type: ignore[arg-type]
        values = self.layout.finite(sent)
        return Update(before, values, of_client(protocol, count), count, tuple(notes))

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
        whose: Whose | None = None,
    ) -> Examined:
        """Attack one update, alone and with earlier ones of the same client.

        A bad one becomes a finding that says so, never an error. Both attacks share `max_seconds`.
        """
        began = time.monotonic()
        notes = [*notes, *self.assumed, *assumed(protocol)]
        told = _Told(protocol, tuple(notes), private, examples, whose)
        due = whose is not None and self.several is not None and self.several.due(whose.client)
        try:
            view = self._seen(before, sent, of_client(protocol, examples))
            alone = self._attacked(name, view, self.max_seconds / (2 if due else 1), told)
        except Exception as error:  # whatever happens, the federation goes on
            return self.unaudited(name, error, notes, seconds=time.monotonic() - began)
        if whose is None or self.several is None or alone.interrupted:
            return alone
        try:
            number, client = whose.server_round, whose.client
            rounds = self.several.take(
                client, number, view, alone.finding, reported=examples, beside=told
            )
        except Exception as error:  # as above
            self._log.warning("SPEAR: %s cannot be kept for later rounds", name, exc_info=error)
            return alone
        left = self.max_seconds - (time.monotonic() - began)
        together = None if rounds is None else self._together(rounds, left, told)
        return dataclasses.replace(alone, together=together)

    def last_audit(self) -> Iterator[Together]:
        """Attack all kept rounds once more, of clients of which that may show more."""
        deadline = time.monotonic() + _LAST_AUDIT * self.max_seconds
        for client in self.several.unfinished() if self.several is not None else ():
            if time.monotonic() > deadline:
                self._log.warning("SPEAR: no time is left for the rounds of other clients together")
                return
            assert self.several is not None
            rounds, told = self.several.last(client)
            if rounds.rounds is not None:
                yield self._together(rounds, self.max_seconds, told)

    def _together(self, view: LayerUpdate, max_seconds: float, told: _Told) -> Together:
        """Attack several rounds of one client."""
        whose, rounds = told.whose, view.rounds
        assert self.several is not None
        assert whose is not None
        assert rounds is not None
        name = f"{whose.label}, {listed([each.number for each in rounds.each])} together"
        max_seconds = max(max_seconds, 0.1 * self.max_seconds)
        try:
            examined = self._attacked(name, view, max_seconds, told)
        except Exception as error:  # whatever happens, the federation goes on
            examined = self.unaudited(name, error, told.notes)
        self.several.learn(whose.client, examined.finding, examined.seconds / max_seconds)
        return self._beside_alone(whose, len(rounds), examined)

    def _beside_alone(self, whose: Whose, rounds: int, examined: Examined) -> Together:
        """What several rounds gave away, with a note that compares it with the best of them."""
        assert self.several is not None
        best = self.several.best_alone(whose.client)
        made = Together(whose.client, whose.label, rounds, examined, best)
        finding = examined.finding
        finding = dataclasses.replace(finding, notes=(made.words, *finding.notes))
        return dataclasses.replace(made, examined=dataclasses.replace(examined, finding=finding))

    def _attacked(self, name: str, view: LayerUpdate, max_seconds: float, told: _Told) -> Examined:
        began = time.monotonic()
        result = invert(view, loss=self.loss, max_seconds=max_seconds)
        notes = [*told.notes, *what_to_tell(result, view, told.examples, self.framework.epochs)]
        return Examined(
            self._finding(name, result, view, notes, told.private),
            told.protocol,
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
        given = self.image_format
        image_format = given if given and given.inputs == view.inputs else None
        shown, words = (image_format, []) if given else guessed_format(view, result.inputs)
        if given and image_format is None:
            shape = " x ".join(map(str, given.shape))
            words.append(f"the layer's {view.inputs} inputs are no pictures of {shape}")
        truth, uncompared = compared(result.inputs, private, image_format)
        words += uncompared
        return Finding.of(result, name, image_format=shown, truth=truth, notes=[*notes, *words])

    def unaudited(
        self, name: str, error: Exception, notes: Sequence[str] = (), seconds: float = 0.0
    ) -> Examined:
        """A reply that could not be attacked, and why."""
        if isinstance(error, SpearError):
            why = str(error)
        else:
            self._log.warning("SPEAR: %s could not be attacked", name, exc_info=error)
            why = f"{type(error).__name__}: {error}"
        finding = Finding.not_attacked(name, why, notes)
        return Examined(finding, self.protocol, seconds, masked=isinstance(error, Masked))

    def _holding(self, before: Arrays) -> nn.Module:
        """The model with the weights that the client was sent, in their precision."""
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
            raise no_such_layer(self.layer, names)


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


# Layer widths of the pictures people train on: MNIST, CIFAR, Tiny ImageNet, ImageNet.
_PICTURES = {784: (1, 28, 28), 3072: (3, 32, 32), 12288: (3, 64, 64), 150528: (3, 224, 224)}
_LAST_AUDIT = 10  # times max_seconds, at most, for all clients together
_UNIT = (-0.1, 1.1)  # values of pictures that nobody normalised, with some error
_LONGEST = 200  # characters of a client's own words
_ANSI = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")


def guessed_format(view: LayerUpdate, inputs: Tensor) -> tuple[ImageFormat | None, list[str]]:
    """How recovered inputs may look, if nobody said, and a note that admits the guess."""
    shape = _PICTURES.get(view.inputs)
    if shape is None or not view.reads_data or not len(inputs):
        return None, []
    low, high = _UNIT
    unit = float(((inputs >= low) & (inputs <= high)).double().mean()) >= 0.99
    image_format = ImageFormat(shape) if unit else ImageFormat(shape, mean=(0.5,), std=(0.25,))
    scale = "values as they are" if unit else "normalisation unknown, mean 0.5 and std 0.25 assumed"
    size = " x ".join(map(str, shape))
    note = f"shown as {size} pictures, {scale}: a guess, which image_format= replaces"
    return image_format, [note]


def what_to_tell(
    result: Inversion, view: LayerUpdate, examples: float | None, epochs: str
) -> list[str]:
    """Options that would explain an update about which nothing was proved."""
    if result.outcome is Outcome.EXACT or not view.trained:
        return []
    said = []
    names = [f"{name}=" for name in untold(view.protocol)]
    if names:
        said.append(f"{', '.join(names)} if clients use them: untold, they look like noise")
    if view.protocol.steps is None:
        said.append(epochs)
    width = min(view.outputs, view.inputs)
    seen = width if result.batch_size is None else result.batch_size
    if examples is not None and examples < seen:  # epochs add none as long as inputs stay the same
        moved = "augmented anew each time" if view.reads_data else "moved between local steps"
        shows = f"{width} or more" if seen == width else str(seen)
        said.append(
            f"the client reports {'1 sample' if examples == 1 else f'{examples:g} samples'}, but the "
            f"update looks like one of {shows}. Likely causes: noise, weight decay (weight_decay=), an "
            f"optimiser such as Adam (optimizer=), or inputs of the layer that were {moved}"
        )
    return said


def first_line(words: str) -> str:
    """Somebody else's error in one short line, without terminal colours."""
    lines = [line.strip() for line in _ANSI.sub("", words).splitlines()]
    line = next((line for line in lines if line), "it gave no reason")
    return line if len(line) <= _LONGEST else line[: _LONGEST - 3].rstrip() + "..."
