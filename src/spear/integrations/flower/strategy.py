"""Audited: any Flower strategy, with every client's reply audited on the way."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any, Unpack

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from spear.errors import InvalidOption, InvalidUpdate
from spear.integrations import remarks
from spear.integrations.examiner import Examiner, Model, Options
from spear.integrations.flower.remarks import AGGREGATED, FLOWER, SEEN, inside, of_strategy, wrapped
from spear.integrations.flower.replies import Held, Reader, Sent
from spear.integrations.running_report import Entry, RunningReport, plain
from spear.integrations.several_rounds import SeveralRounds
from spear.report import Level, Remark, Report

_OWN = (
    *("report", "json", "redact", "aggregate", "every", "rounds", "truth", "keep"),
    *("history", "history_megabytes"),
)
_HOOKS = ("configure_train", "aggregate_train")


class Audited(Strategy):
    """Wraps a strategy: looks at what comes back from the clients, and changes nothing.

    Args:
        strategy: any `flwr.serverapp.strategy.Strategy`; wrap outside of the DP wrappers.
        model: the clients' model, or a function that makes one. A plain MLP needs none: it is
            recognised from its weights.
        report: where the HTML report goes, rewritten as replies come; None for nowhere.
        json: the same as JSON, which `spear.load` reads.
        redact: leave what was recovered out of the report: it is the clients' data.
        aggregate: audit the weighted mean of a round's replies as one batch, which is what secure
            aggregation leaves visible, instead of each reply.
        every: audit one round in this many.
        rounds: audit these rounds only.
        truth: what clients really held, if you may know it, `truth(server_round, reply)`: inputs
            (b, ...), or (inputs, labels), or (inputs, labels, names), or None.
        keep: how many findings keep what was recovered, so that long runs stay small.
        history: how many rounds of each client are kept, and audited together; 1 keeps nothing. They
            are kept compressed, in memory only, and deleted at the end of the run.
        history_megabytes: how much memory that may take, for all clients together.
        options: what is known of the clients, and limits; see `Options`.

    `strategy.report` is the `spear.Report` so far. Everything else is the wrapped strategy's.
    """

    def __init__(
        self,
        strategy: Strategy,
        model: Model | None = None,
        *,
        report: str | Path | None = "spear-report.html",
        json: str | Path | None = None,
        redact: bool = False,
        aggregate: bool = False,
        every: int = 1,
        rounds: Collection[int] | None = None,
        truth: Held | None = None,
        keep: int = 50,
        history: int = 20,
        history_megabytes: float = 1024.0,
        **options: Unpack[Options],
    ) -> None:
        if not isinstance(strategy, Strategy):
            raise InvalidOption(
                "expected a strategy of flwr.serverapp.strategy, such as FedAvg(), got "
                f"{type(strategy).__module__}.{type(strategy).__name__}"
            )
        if every < 1:
            raise InvalidOption(f"expected every >= 1 rounds, got {every}")
        self._strategy = strategy
        self._examiner = Examiner.new(FLOWER, model, options, _OWN)
        several = SeveralRounds(history, history_megabytes, self._examiner.max_seconds)
        self._examiner.several = several if history > 1 else None
        self._aggregate, self._every, self._truth = aggregate, every, truth
        self._redact = redact
        self._rounds = None if rounds is None else frozenset(rounds)
        self._inner = {name: getattr(strategy, name) for name in _HOOKS}
        self._sent: Sent | None = None
        self._met = False
        names = [type(one).__name__ for one in wrapped(strategy)]
        settings: dict[str, Any] = {
            "strategy": " of ".join(names),
            "model": "recognised from its weights"
            if self._examiner.model is None
            else type(self._examiner.model).__name__,
            "aggregate": aggregate,
            "every": every,
            "history": history,
            **{name: plain(value) for name, value in options.items()},
        }
        self._journal = RunningReport(
            FLOWER,
            f"Flower: {' of '.join(names)}",
            settings,
            _path("report", report),
            _path("json", json),
            redact,
            keep,
            "aggregate" if aggregate else "reply",
        )
        self._journal.remarks += of_strategy(strategy)
        self._journal.remarks += remarks.of_training(self._examiner.protocol, SEEN)
        if aggregate:
            self._journal.remark(AGGREGATED)
        self._journal.remark(remarks.kept(history, history_megabytes))

    @property
    def strategy(self) -> Strategy:
        """The wrapped one, under the name that Flower's own wrappers use."""
        return self._strategy

    @property
    def report(self) -> Report:
        """What was found so far."""
        return self._journal.report

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # not set yet, as while being unpickled
            raise AttributeError(name)
        return getattr(self._strategy, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            object.__setattr__(self, name, value)
        else:
            setattr(self._strategy, name, value)

    def start(self, grid: Grid, initial_arrays: ArrayRecord, *args: Any, **kwargs: Any) -> Result:
        """Run the strategy's own loop, with our two hooks in place of its own."""
        self._meet(initial_arrays)
        FLOWER.log.info("SPEAR audits this run, the report goes to %s", self._journal.place)
        own = vars(self._strategy)
        before = {name: own[name] for name in _HOOKS if name in own}
        own.update({name: getattr(self, name) for name in _HOOKS})
        try:
            result = self._strategy.start(grid, initial_arrays, *args, **kwargs)
            self._audit_together()
            return result
        finally:
            if self._examiner.several is not None:
                self._examiner.several.clear()
            for name in _HOOKS:
                del own[name]
            own.update(before)
            if self._journal.begun:
                self._journal.write(force=True)
                FLOWER.log.info("SPEAR: %s Report: %s", self._journal.headline, self._journal.place)

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """The strategy's messages; we keep what each client was sent."""
        self._meet(arrays)
        current = dict(arrays)  # references: strategies may take the record apart
        messages: Iterable[Message] = self._inner["configure_train"](
            server_round, arrays, config, grid
        )
        if self._audits(server_round):
            messages = list(messages)
            self._sent = Sent.of(messages, current, config, self._examiner.layout)
            if not self._journal.begun:
                self._journal.write(force=True)  # from the first round on there is a report
        return messages

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Audit the replies as they arrived, then hand them on."""
        replies = list(replies)
        if self._audits(server_round):
            self._notice_wrapping()
            try:
                for entry in self._audit(server_round, replies):
                    self._take(entry)
            finally:
                self._sent = None  # weights of one round at a time
                self._journal.write(force=True)
        aggregated: tuple[ArrayRecord | None, MetricRecord | None] = self._inner["aggregate_train"](
            server_round, replies
        )
        return aggregated

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        return self._strategy.configure_evaluate(server_round, arrays, config, grid)

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        return self._strategy.aggregate_evaluate(server_round, replies)

    def summary(self) -> None:
        self._strategy.summary()

    def _audits(self, server_round: int) -> bool:
        chosen = self._rounds is None or server_round in self._rounds
        return chosen and (server_round - 1) % self._every == 0

    def _meet(self, arrays: ArrayRecord) -> None:
        """Raise before the first round, while nothing is lost, if the model is not the federation's."""
        if self._met:
            return
        try:
            self._examiner.match_model(dict(arrays))
        except InvalidUpdate as error:
            raise InvalidOption(f"model= does not fit the federation's arrays: {error}") from error
        self._met = True

    def _notice_wrapping(self) -> None:
        """Say so if another strategy calls us: we would see replies as it changed them."""
        caller = sys._getframe(2).f_locals.get("self")
        if isinstance(caller, Strategy) and caller not in (self, *wrapped(self._strategy)):
            said = inside(caller)
            if said not in self._journal.remarks:
                FLOWER.log.warning("SPEAR: %s. %s", said.subject, said.words)
                others = [one for one in self._journal.remarks if one != SEEN]
                self._journal.remarks[:] = [said, *others]

    def _audit(self, server_round: int, replies: list[Message]) -> Iterator[Entry]:
        """One entry a reply, or one for all of them."""
        if self._sent is None:
            words = "aggregate_train was called without configure_train: nothing to compare with"
            self._journal.remark(Remark(Level.NOTE, f"Round {server_round}", words))
            FLOWER.log.warning("SPEAR: round %s: %s", server_round, words)
            return
        reader = Reader(
            self._examiner, self._sent, self._strategy, self._truth, server_round, self._redact
        )
        if self._aggregate:
            yield reader.together(replies)
            return
        for reply in replies:
            yield reader.alone(reply)

    def _audit_together(self) -> None:
        """At the end: all kept rounds of clients of which that may show more."""
        for found in self._examiner.last_audit():
            self._journal.add_together(found)
            FLOWER.log.info("SPEAR: %s: %s", found.examined.finding.name, found.examined.line)
            if found.examined.interrupted:
                return  # the run itself is over: its result counts

    def _take(self, entry: Entry) -> None:
        self._journal.add(entry)
        self._notice_history()
        if entry.examined.mistake:
            self._journal.remark(remarks.mistaken(entry.examined.mistake))
        self._journal.write()
        entry.tell(FLOWER.log)
        together = entry.examined.together
        if entry.examined.masked:
            self._journal.remark(remarks.MASKED)
        if entry.examined.interrupted or (together and together.examined.interrupted):
            raise KeyboardInterrupt  # the attack stopped at it; so should the run

    def _notice_history(self) -> None:
        """Say so, once, if rounds were not kept."""
        for said in remarks.of_history(self._examiner.several):
            if said.subject not in [one.subject for one in self._journal.remarks]:
                self._journal.remark(said)


def _path(option: str, given: str | Path | None) -> Path | None:
    """A file as it was named; the journal checks whether it can be written."""
    if given is not None and not isinstance(given, (str, os.PathLike)):
        raise InvalidOption(f"expected {option}= to be the path of a file or None, got {given!r}")
    return None if given is None else Path(given)
