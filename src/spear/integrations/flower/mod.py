"""what_leaves(): a client mod that shows, on the client, what its reply gives away."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Unpack

from flwr.app import Context, Message, MessageType, RecordDict

from spear.integrations.examiner import Examiner, Model, Options
from spear.integrations.flower.remarks import FLOWER
from spear.integrations.flower.replies import Reader, Sent, flat, sent_arrays
from spear.integrations.running_report import Entry, write_reply
from spear.report import Level, Remark

Next = Callable[[Message, Context], Message]
Mod = Callable[[Message, Context, Next], Message]
Own = Callable[[Message, Context], Any]

_SEEN = Remark(
    Level.NOTE,
    "What was seen",
    "The reply as the mods listed after this one left it, on the client itself. Only the first of "
    "the list sees what really leaves: listed after LocalDpMod or a clipping mod, it sees the "
    "update before these have changed it. A reply from which nothing was recovered is not proved "
    "safe.",
)


def what_leaves(
    folder: str | Path | None,
    model: Model | None = None,
    *,
    redact: bool = False,
    truth: Own | None = None,
    **options: Unpack[Options],
) -> Mod:
    """A mod that audits each training reply before it leaves the client; nothing is sent anywhere.

    Put it first, `ClientApp(mods=[what_leaves("audit", Net), ...])`: the first in the list is the
    outermost and sees what the others made of the reply.

    Args:
        folder: where reports go, on the client's machine, a JSON and HTML per reply; None only logs.
        model: as for `Audited`.
        redact: leave what was recovered out of the reports.
        truth: the client's own data to compare with, `truth(message, context)`: inputs (b, ...), or
            (inputs, labels), or (inputs, labels, names), or None.
        options: as for `Audited`.
    """
    beside = ("folder", "redact", "truth")
    Examiner.new(FLOWER, model, options, beside)  # report mistakes here, not on the client
    place = None if folder is None else Path(folder)
    return _WhatLeaves(place, model, redact, truth, dict(options))


@dataclass(frozen=True)
class _WhatLeaves:
    """The mod; simulations pickle it, so it holds no state of a run."""

    folder: Path | None
    model: Model | None
    redact: bool
    truth: Own | None
    options: dict[str, Any]

    def __call__(self, msg: Message, ctxt: Context, call_next: Next) -> Message:
        trains = msg.metadata.message_type.split(".")[0] == MessageType.TRAIN
        if not trains or not msg.has_content():
            return call_next(msg, ctxt)
        # References, taken before the app may take the records apart.
        received = RecordDict({name: record.copy() for name, record in msg.content.items()})
        reply = call_next(msg, ctxt)
        try:
            entry = self._audited(received, msg, ctxt, reply)
        except Exception:  # an audit never gets in a client's way
            FLOWER.log.warning("SPEAR: this reply could not be audited", exc_info=True)
            return reply
        if entry.examined.interrupted:
            raise KeyboardInterrupt
        return reply

    def _audited(self, received: RecordDict, msg: Message, ctxt: Context, reply: Message) -> Entry:
        began = time.monotonic()
        examiner = Examiner.new(FLOWER, self.model, self.options)
        config = flat(received.config_records.values())
        arrays = sent_arrays(received, examiner.layout)
        examiner.match_model(arrays)
        asked = config.get("server-round")
        server_round = asked if isinstance(asked, int) else 0
        held = self.truth

        def truth(_round: int, _reply: Message) -> Any:
            return None if held is None else held(msg, ctxt)

        sent = Sent(arrays, config, {})
        entry = Reader(examiner, sent, None, truth, server_round, self.redact).alone(reply)
        if self.folder is not None:  # one report per reply: simulations keep nothing between calls
            options, redact = self.options, self.redact
            write_reply(FLOWER, entry, self.folder, options, _SEEN, redact=redact, began=began)
        entry.tell(FLOWER.log, "leaving, ")
        return entry
