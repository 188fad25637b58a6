"""Replies of a round's clients, read beside what each client was sent."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from flwr.app import Message, RecordDict
from flwr.serverapp.strategy import Strategy
from torch import Tensor

from spear.errors import InvalidUpdate, SpearError
from spear.integrations.examiner import Examiner, Private, Update, Whose, first_line
from spear.integrations.flower.remarks import FLOWER, wrapped
from spear.integrations.messages import Arrays, Layout, Masked, some
from spear.integrations.running_report import Entry

_MASKED_RECORD = "secaggplus_configs"  # where Flower's SecAgg+ puts its masked vectors

Held = Callable[[int, Message], Any]
Values = Mapping[str, Any]


@dataclass(frozen=True, eq=False)
class Sent:
    """What went out to the clients in one round: references to Flower's arrays, no copies."""

    arrays: Arrays
    config: Values
    to: Mapping[int, tuple[Arrays, Values]]  # by node id

    @staticmethod
    def of(
        messages: Iterable[Message], arrays: Arrays, config: Values, layout: Layout | None
    ) -> Sent:
        to = {}
        for message in messages:
            try:
                own = sent_arrays(message.content, layout)
            except SpearError:  # a strategy with content of its own: use the round's arrays
                own = arrays
            to[message.metadata.dst_node_id] = (own, flat(message.content.config_records.values()))
        return Sent(arrays, dict(config), to)

    def to_node(self, node: int) -> tuple[Arrays, Values]:
        return self.to.get(node, (self.arrays, self.config))


@dataclass(eq=False)
class _Sum:
    """The weighted mean of updates, added one by one, so that memory holds one at a time."""

    total: dict[str, Tensor] = field(default_factory=dict)
    weight: float = 0.0

    def add(self, values: Mapping[str, Tensor], weight: float) -> None:
        if self.total and set(self.total) != set(values):
            raise InvalidUpdate(["it holds other arrays than those before it"])
        for name, value in values.items():
            part = weight * value.double()
            self.total[name] = self.total[name] + part if name in self.total else part
        self.weight += weight

    def mean(self, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: (t / self.weight).to(like[name].dtype) for name, t in self.total.items()}


@dataclass(frozen=True, eq=False)
class Reader:
    """Audits the replies of one round."""

    examiner: Examiner
    sent: Sent
    strategy: Strategy | None
    truth: Held | None
    server_round: int
    redact: bool = False

    def alone(self, reply: Message) -> Entry:
        """What one reply gives away."""
        client = str(reply.metadata.src_node_id)
        name = f"round {self.server_round}, client {client}"
        try:
            update = self._read(reply)
        except Exception as error:  # whatever a client sends, the federation goes on
            return Entry(self.server_round, client, self.examiner.unaudited(name, error))
        private, words = self._private(reply)
        examined = self.examiner.examine(
            name,
            update.before,
            update.values,
            update.protocol,
            notes=[*update.notes, *words],
            private=private,
            examples=update.examples,
            whose=Whose(client, f"client {client}", self.server_round),
        )
        return Entry(self.server_round, client, examined, update.examples)

    def together(self, replies: list[Message]) -> Entry:
        """What their weighted mean gives away: one update of a batch that holds all of theirs."""
        total, notes = _Sum(), list[str]()
        first: Update | None = None
        private: list[Private] = []
        rates, counts, members = set(), list[float | None](), set[int]()
        for reply in replies:
            try:
                update = self._read(reply)
                if first is not None and update.before != first.before:
                    raise InvalidUpdate(["this client was sent other weights than those before it"])
                total.add(update.values, update.examples or 1.0)
            except Exception as error:  # as in `alone`
                notes.append(f"client {reply.metadata.src_node_id} is left out: {error}")
                continue
            first = first or update
            rates.add(update.protocol.lr)
            counts.append(update.examples)
            members.add(reply.metadata.src_node_id)
            held, words = self._private(reply)
            private += [held] if held is not None else []
            notes += [note for note in (*update.notes, *words) if note not in notes]
        clients = f"all {len(counts)} together"
        told = [one for one in counts if one is not None]
        examples = sum(told) if told and len(told) == len(counts) else None
        name = f"round {self.server_round}, {clients}"
        if first is None:
            why = "; ".join(notes) or "no client replied"
            examined = self.examiner.unaudited(name, InvalidUpdate([why]))
            return Entry(self.server_round, clients, examined)
        protocol = first.protocol
        if len(rates) > 1:
            notes.append(f"learning rates differ: {', '.join(map(str, sorted(map(str, rates))))}")
            protocol = dataclasses.replace(protocol, lr=None)
        examined = self.examiner.examine(
            name,
            first.before,
            total.mean(first.values),
            protocol,
            notes=notes,
            private=Private.together(private) if len(private) == len(counts) else None,
            examples=examples,
            whose=self._cohort(members),
        )
        return Entry(self.server_round, clients, examined, examples)

    def _cohort(self, members: set[int]) -> Whose | None:
        """The clients whose sum it is: the same ones, round after round, are one batch."""
        several = self.examiner.several
        if several is None:
            return None
        return Whose(*several.cohort(frozenset(members)), self.server_round)

    def _read(self, reply: Message) -> Update:
        if reply.has_error():
            said = "" if self.redact else f": {first_line(reply.error.reason or '')}"
            raise InvalidUpdate([f"the client answered with an error{said}"])
        before, config = self.sent.to_node(reply.metadata.src_node_id)
        metrics = flat(reply.content.metric_records.values())
        *_, innermost = (None, *wrapped(self.strategy))
        examples = metrics.get(getattr(innermost, "weighted_by_key", "num-examples"))
        arrays = sent_arrays(reply.content, self.examiner.layout)
        places = (
            ("the reply's metrics", metrics),
            ("the train config", config),
            ("the strategy", {"lr": getattr(innermost, "client_learning_rate", None)}),
        )
        return self.examiner.read(before, arrays, places, examples)

    def _private(self, reply: Message) -> tuple[Private | None, list[str]]:
        if self.truth is None:
            return None, []
        try:
            return Private.of(self.truth(self.server_round, reply)), []
        except Exception as error:  # the user's function; the attack does not need it
            FLOWER.log.warning("SPEAR: truth= failed", exc_info=True)
            return None, [f"truth= failed ({type(error).__name__}: {error})"]


def sent_arrays(content: RecordDict, layout: Layout | None) -> Arrays:
    """The model's arrays in a message: references copied, data not.

    Clients and strategies may take a record apart to save memory.
    """
    records = [dict(record) for record in content.array_records.values()]
    if not any(records):
        if _MASKED_RECORD in content.config_records:
            raise Masked(["the reply is masked by SecAgg+, it holds no readable arrays"])
        raise InvalidUpdate([f"the message carries no arrays, only {some(content) or 'nothing'}"])
    fitting = [record for record in records if layout is not None and layout.fits(record)]
    return (fitting or [record for record in records if record])[0]


def flat(records: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The entries of all records of one kind; the first of each name counts."""
    together: dict[str, Any] = {}
    for record in records:
        for name, value in record.items():
            together.setdefault(name, value)
    return together
