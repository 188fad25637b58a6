"""What an audit has found so far, as a report that is on disk while the federation still runs."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from spear.errors import InvalidOption, SpearError
from spear.integrations.flower.examiner import Examined
from spear.inversion import Outcome
from spear.report import Finding, Remark, Report, Table

log = logging.getLogger("flwr.spear")

_SHARE = 0.1  # of the time, at most, goes into writing the report again and again
_COLUMNS = (
    "round",
    "client",
    "outcome",
    "certified",
    "samples seen",
    "samples reported",
    "learning rate",
    "seconds",
)


@dataclass(frozen=True)
class Entry:
    """One reply, or one round's aggregate."""

    server_round: int | None
    client: str
    examined: Examined
    examples: float | None = None

    def row(self) -> tuple[str | int | float | None, ...]:
        finding, training = self.examined.finding, self.examined.training
        return (
            self.server_round,
            self.client,
            finding.outcome.value if self.examined.attacked else "not attacked",
            sum(finding.certified),
            finding.batch_size,
            None if self.examples is None else round(self.examples),
            None if training.sends == "gradient" else training.lr,
            round(self.examined.seconds, 2),
        )


@dataclass
class Journal:
    """Findings as they come, their report, and its files.

    Args:
        title: of the report.
        settings: to repeat the audit.
        page: where the HTML goes, if anywhere.
        json: where the JSON goes, if anywhere.
        redact: keep nothing of what was recovered.
        keep: how many findings keep what was recovered; later ones keep their verdict only.
        unit: what is audited one by one.
    """

    title: str
    settings: Mapping[str, Any]
    page: Path | None = None
    json: Path | None = None
    redact: bool = False
    keep: int = 50
    unit: str = "reply"
    entries: list[Entry] = field(default_factory=list)
    remarks: list[Remark] = field(default_factory=list)
    _began: float = field(default_factory=time.monotonic)
    _written: float = 0.0  # when, last
    _cost: float = 0.0  # seconds of the last writing

    def __post_init__(self) -> None:
        if self.keep < 0:
            raise InvalidOption(f"expected keep >= 0 findings, got {self.keep}")

    def add(self, entry: Entry) -> None:
        """Take a finding in, without its data if there is enough of that."""
        finding = entry.examined.finding
        full = sum(e.examined.finding.inputs is not None for e in self.entries) >= self.keep
        if finding.inputs is not None and (self.redact or full):
            finding = _slim(finding, None if self.redact else self.keep)
            examined = dataclasses.replace(entry.examined, finding=finding)
            entry = dataclasses.replace(entry, examined=examined)
        self.entries.append(entry)

    def remark(self, said: Remark) -> None:
        """Say something once."""
        if said not in self.remarks:
            self.remarks.append(said)

    @property
    def report(self) -> Report:
        report = Report.new(
            "flower",
            self.title,
            headline([entry.examined for entry in self.entries], self.unit),
            [entry.examined.finding for entry in self.entries],
            remarks=self.remarks,
            tables=[
                Table(
                    "Every reply" if self.unit == "reply" else "Every round",
                    _COLUMNS,
                    tuple(entry.row() for entry in self.entries),
                    "Samples seen are read off the update; samples reported are what clients say.",
                )
            ]
            if self.entries
            else [],
            settings={**self.settings, "flwr": version("flwr")},
            seconds=time.monotonic() - self._began,
        )
        return report.redacted() if self.redact else report

    def write(self, *, force: bool = False) -> None:
        """Write the files, unless that was done just now and takes long. Trouble is only told."""
        now = time.monotonic()
        if not (self.page or self.json):
            return
        if not force and now - self._written < self._cost / _SHARE:
            return
        try:
            self.write_now()
        except (OSError, SpearError) as error:  # a full disk must not end a federation
            log.warning("SPEAR: the report could not be written: %s", error)

    def write_now(self) -> None:
        began = time.monotonic()
        report = self.report
        if self.json:
            report.save(self.json)
        if self.page:
            report.save_page(self.page)
        self._written = time.monotonic()
        self._cost = self._written - began


def headline(examined: list[Examined], unit: str) -> str:
    """The verdict on a federation, in one sentence or two."""
    if not examined:
        return "Nothing has been audited yet."
    total = len(examined)
    missed = sum(not one.attacked for one in examined)
    count = {
        outcome: sum(one.attacked and one.finding.outcome is outcome for one in examined)
        for outcome in Outcome
    }
    plural = {"reply": "replies"}.get(unit, f"{unit}s")
    said = [
        f"{number} {words}"
        for number, words in (
            (count[Outcome.EXACT], "gave away every sample, exactly and proved"),
            (count[Outcome.PARTIAL], "gave away some samples exactly"),
            (count[Outcome.APPROXIMATE], "gave away approximate samples"),
            (count[Outcome.FAILED], "gave away nothing that this attack can vouch for"),
            (missed, "could not be attacked"),
        )
        if number
    ]
    return f"Of {total} audited {plural if total > 1 else unit}, {'; '.join(said)}."


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
