"""What an audit has found so far, as a report on disk while the federation still runs."""

from __future__ import annotations

import dataclasses
import logging
import os
import time
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from spear.errors import InvalidOption, SpearError
from spear.integrations import remarks
from spear.integrations.examiner import Examined, Framework, Together
from spear.integrations.several_rounds import samples
from spear.inversion import Outcome
from spear.report import SEVERITY, Finding, Remark, Report, Table

_MAX_WRITING_SHARE = 0.1  # of the time, at most, goes into rewriting the report
_COLUMNS = (
    *("round", "client", "outcome", "certified", "samples seen", "samples reported"),
    *("learning rate", "seconds"),
)


@dataclass(frozen=True)
class Entry:
    """One reply, or one round's aggregate."""

    server_round: int | None
    client: str
    examined: Examined
    examples: float | None = None

    def row(self) -> tuple[str | int | float | None, ...]:
        finding, protocol = self.examined.finding, self.examined.protocol
        return (
            self.server_round,
            self.client,
            self.examined.verdict,
            sum(finding.certified) if self.examined.attacked else None,
            finding.batch_size,
            None if self.examples is None else round(self.examples),
            None if protocol.lr is None else protocol.rate,
            round(self.examined.seconds, 2),
        )

    def tell(self, log: logging.Logger, prefix: str = "") -> None:
        """The verdict, alone and with earlier rounds, in a line each."""
        level = logging.WARNING if self.examined.mistake else logging.INFO
        log.log(level, "SPEAR: %s%s: %s", prefix, self.examined.finding.name, self.examined.line)
        together = self.examined.together
        if together is not None:
            found = together.examined
            log.info("SPEAR: %s%s: %s", prefix, found.finding.name, found.line)


@dataclass
class RunningReport:
    """Findings as they come, their report, and its files.

    Args:
        framework: whose run is audited.
        title: of the report.
        settings: to repeat the audit.
        page: where the HTML goes, if anywhere.
        json: where the JSON goes, if anywhere.
        redact: keep nothing of what was recovered.
        keep: how many findings keep what was recovered; later ones keep only their verdict.
        unit: what is audited one by one.
        began: when the audit began, by the monotonic clock.
    """

    framework: Framework
    title: str
    settings: Mapping[str, Any]
    page: Path | None = None
    json: Path | None = None
    redact: bool = False
    keep: int = 50
    unit: str = "reply"
    began: float = field(default_factory=time.monotonic)
    entries: list[Entry] = field(default_factory=list)
    remarks: list[Remark] = field(default_factory=list)
    together: dict[Hashable, Together] = field(default_factory=dict)  # the last of each client
    _growth: dict[Hashable, dict[int, int]] = field(default_factory=dict)  # samples by rounds
    _begun: bool = False
    _kept: int = 0  # findings with what was recovered
    _written: float = 0.0  # when, last
    _cost: float = 0.0  # seconds of the last writing

    def __post_init__(self) -> None:
        if self.keep < 0:
            raise InvalidOption(f"expected keep >= 0 findings, got {self.keep}")
        for option, path in (("report", self.page), ("json", self.json)):
            if path is not None:
                _check_path(option, path)
        if self.page:
            self.report.page()  # report a missing package now, not after the first round

    @property
    def begun(self) -> bool:
        """Has anything been written yet, or should have been?"""
        return self._begun

    @property
    def place(self) -> str:
        """Where the report is found."""
        paths = [str(path.absolute()) for path in (self.page, self.json) if path]
        return " and ".join(paths) or "strategy.report"

    def add(self, entry: Entry) -> None:
        """Add a finding, without its data once enough findings hold theirs."""
        together = entry.examined.together
        if together is not None:
            self.add_together(together)
        examined = self._slimmed(entry.examined, self._kept)
        self._kept += examined.finding.inputs is not None
        examined = dataclasses.replace(examined, together=None)
        self.entries.append(dataclasses.replace(entry, examined=examined))

    def add_together(self, found: Together) -> None:
        """Add what several rounds of a client gave away, in place of others that gave no more."""
        finding = found.examined.finding
        self._growth.setdefault(found.client, {})[found.rounds] = finding.recovered
        before = self.together.get(found.client)
        if before is not None and samples(before.examined.finding) > samples(finding):
            return
        self.together.pop(found.client, None)
        held = sum(one.examined.finding.inputs is not None for one in self.together.values())
        examined = self._slimmed(found.examined, held)
        self.together[found.client] = dataclasses.replace(found, examined=examined)

    def _growth_table(self) -> Table:
        """How many samples came back of each client, by the number of rounds."""
        counts = sorted({count for growth in self._growth.values() for count in growth})
        columns = ("client", "outcome", "samples seen", "proved", "one round (the best)")
        rows = tuple(
            (
                one.label.removeprefix("client "),
                one.examined.verdict,
                one.examined.finding.batch_size,
                sum(one.examined.finding.certified),
                one.best_alone[1],
                *(self._growth[client].get(count) for count in counts),
            )
            for client, one in self.together.items()
        )
        named = tuple(f"{count} rounds" for count in counts)
        return Table(
            "Samples recovered from several rounds together", (*columns, *named), rows, _GROWTH
        )

    def _slimmed(self, examined: Examined, held: int) -> Examined:
        """The same, without its data if so many others hold theirs already."""
        finding = examined.finding
        if finding.inputs is None or not (self.redact or held >= self.keep):
            return examined
        slim = _slim(finding, None if self.redact else self.keep)
        return dataclasses.replace(examined, finding=slim)

    def remark(self, said: Remark) -> None:
        """Say something once."""
        if said not in self.remarks:
            self.remarks.append(said)

    @property
    def headline(self) -> str:
        """The verdict so far."""
        alone = headline([entry.examined for entry in self.entries], self.unit)
        return with_together(alone, list(self.together.values()), self.unit)

    @property
    def report(self) -> Report:
        title = "Every reply" if self.unit == "reply" else "Every round"
        rows = tuple(entry.row() for entry in self.entries)
        note = "Samples seen are read off the update; samples reported are what clients say."
        tables = [Table(title, _COLUMNS, rows, note)] if rows else []
        if self.together:
            tables.insert(0, self._growth_table())
        found: list[Together | Entry] = [*self.together.values(), *self.entries]
        name = self.framework.distribution
        report = Report.new(
            self.framework.kind,
            self.title,
            self.headline,
            [one.examined.finding for one in found],
            remarks=self.remarks,
            tables=tables,
            settings={**self.settings, name: version(name)},
            seconds=time.monotonic() - self.began,
        )
        return report.redacted() if self.redact else report

    def write(self, *, force: bool = False) -> None:
        """Write the files, unless that was just done and takes long. Failures are only logged."""
        now, self._begun = time.monotonic(), True
        if not (self.page or self.json):
            return
        if not force and now - self._written < self._cost / _MAX_WRITING_SHARE:
            return
        try:
            self.write_now()
        except (OSError, SpearError) as error:  # a full disk must not end a federation
            self.framework.log.warning("SPEAR: the report could not be written: %s", error)

    def write_now(self) -> None:
        began = time.monotonic()
        report = self.report
        if self.json:
            report.save(self.json)
        if self.page:
            report.save_page(self.page)
        self._written = time.monotonic()
        self._cost = self._written - began


def write_reply(
    framework: Framework,
    entry: Entry,
    folder: Path,
    options: Mapping[str, Any],
    seen: Remark,
    *,
    redact: bool,
    began: float,
    also: Sequence[Remark] = (),
) -> None:
    """The report of one reply, as JSON and HTML, in a folder."""
    file = folder / f"round-{entry.server_round}-client-{entry.client}"
    journal = RunningReport(
        framework,
        f"What leaves client {entry.client}",
        {name: plain(value) for name, value in options.items()},
        file.with_name(f"{file.name}.html"),
        file.with_name(f"{file.name}.json"),
        redact,
        began=began,
    )
    if entry.examined.mistake:
        journal.remark(remarks.mistaken(entry.examined.mistake))
    journal.remarks += remarks.of_training(entry.examined.protocol, seen)
    if entry.examined.masked:
        journal.remark(remarks.MASKED)
    journal.remarks += also
    journal.add(entry)
    journal.write(force=True)


def headline(examined: list[Examined], unit: str) -> str:
    """The verdict on a federation, in one sentence or two."""
    if not examined:
        return "Nothing has been audited yet."
    plural = _PLURALS[unit]
    attacked = [one for one in examined if one.attacked]
    missed = len(examined) - len(attacked)
    if not attacked:
        count = f"{missed} {unit if missed == 1 else plural}"
        return f"Nothing could be attacked: {count} held no update that this attack can read."
    words = _tally(attacked)
    if missed:
        words.append(f"{missed} more could not be attacked")
    total = len(attacked)
    return f"Of {total} audited {unit if total == 1 else plural}, {'; '.join(words)}."


def with_together(alone: str, together: Sequence[Together], unit: str) -> str:
    """The verdict on single updates, and on what several rounds add to it."""
    if not together:
        return alone
    gains = [one for one in together if one.gains]
    if not gains:
        most = max(one.rounds for one in together)
        return f"{alone} Up to {most} rounds together gave away no more."
    best = max(gains, key=lambda one: samples(one.examined.finding))
    whose = "client" if unit == "reply" else "cohort"
    count = f"{len(together)} {whose}{'s' * (len(together) > 1)}"
    said = "; ".join(_tally([one.examined for one in together]))
    return (
        f"Rounds together gave away more than single {_PLURALS[unit]}: of {count}, {said} "
        f"({best.words}). {alone}"
    )


def _tally(examined: Sequence[Examined]) -> list[str]:
    """How many gave away what, the worst first."""
    said = Counter((_rank(one), _gave(one)) for one in examined)
    return [f"{said[rank, gave]} {gave}" for rank, gave in sorted(said)]


_GROWTH = (
    "Under a number of rounds: how many samples came back from so many rounds of the client, attacked "
    "together; the difference to the left is what further rounds gave away. A dash means that so many "
    "were not attacked: they are too few for the layer, every sample was known, or an attack on "
    "fewer had taken long and failed."
)
_PLURALS = {"reply": "replies", "aggregate": "aggregates"}
_GAVE = {
    Outcome.EXACT: "gave away {} every sample, exactly and proved",
    Outcome.PARTIAL: "gave away {} some samples exactly",
    Outcome.APPROXIMATE: "gave away {} approximate samples",
    Outcome.INCONCLUSIVE: "gave no answer, one way or the other",
    Outcome.FAILED: "gave away nothing that this attack can find",
}


def _gave(one: Examined) -> str:
    """What one update gave away, as the end of a sentence."""
    what = f"features (activations of {one.features!r}) of" if one.features else ""
    return " ".join(_GAVE[one.finding.outcome].format(what).split())


def _rank(one: Examined) -> int:
    """The worst first."""
    return -SEVERITY.index(one.finding.outcome)


def _check_path(option: str, path: Path) -> None:
    """Raise if a file cannot be written there, without writing one."""
    folder = next(p for p in path.absolute().parents if p.exists())
    if path.is_dir():
        problem = "it is a folder"
    elif not folder.is_dir():
        problem = f"{folder} is no folder"
    elif not os.access(folder, os.W_OK | os.X_OK):
        problem = f"{folder} is not writable"
    else:
        return
    raise InvalidOption(
        f"expected {option}= to be a file that can be written, got {path}: {problem}"
    )


def _slim(finding: Finding, kept: int | None) -> Finding:
    """The verdict without the data."""
    slim = finding.redacted()
    if kept is None:
        return slim
    note = f"what was recovered is left out: the first {kept} findings hold it (keep=)"
    return dataclasses.replace(slim, notes=(*finding.notes, note))


def plain(value: object) -> str | int | float | None:
    """An option as JSON has it."""
    if value is None or isinstance(value, (str, int, float)):
        return value
    return getattr(value, "__name__", None) or repr(value)
