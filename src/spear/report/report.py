"""A report on one update, a sweep or a federation: the verdict first, then the evidence."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spear.data import Column
from spear.errors import InvalidOption
from spear.inversion import Inversion, Outcome
from spear.metrics import Rate
from spear.report.finding import Finding, ImageFormat, Truth

if TYPE_CHECKING:
    from spear.report.advice import Advice

# From mild to bad for the client: "cannot tell" may turn out worse than "nothing recovered".
SEVERITY = (
    Outcome.FAILED,
    Outcome.INCONCLUSIVE,
    Outcome.APPROXIMATE,
    Outcome.PARTIAL,
    Outcome.EXACT,
)

Cell = str | int | float | bool | None


class Level(Enum):
    """What a remark means for the clients."""

    EXPOSED = "exposed"  # an attack succeeds here
    PROTECTED = "protected"  # something stands in its way
    NOTE = "note"  # neither


@dataclass(frozen=True)
class Remark:
    """One thing worth knowing about a model, a protocol or a run, in plain words."""

    level: Level
    subject: str
    words: str


@dataclass(frozen=True)
class Table:
    """Figures in rows; the page lets readers sort them."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    caption: str = ""

    def __post_init__(self) -> None:
        ragged = [row for row in self.rows if len(row) != len(self.columns)]
        if ragged:
            raise InvalidOption(
                f"table {self.title!r}: expected {len(self.columns)} cells in each row, one per "
                f"column, got {len(ragged[0])}"
            )


@dataclass(frozen=True)
class Drawing:
    """A plot, as SVG."""

    title: str
    svg: str
    caption: str = ""


@dataclass(frozen=True)
class Measured:
    """How often a setting leaked, and what it costs in training.

    >>> Measured(0, 5, cost=8.9, spread=1.1).price
    '8.9 ± 1.1 points of accuracy'
    >>> Measured(0, 5, cost=-2.8e-15, spread=1.2).price
    '0 ± 1.2 points of accuracy'
    """

    leaked: int
    batches: int
    """Of which so many leaked."""
    out_of_time: int = 0
    """Batches whose attack ended before it found everything, because its time was over."""
    cost: float | None = None
    """Against the same training without defences; None if that was not measured, or has none."""
    spread: float | None = None
    """Standard deviation of the cost over runs."""
    unit: str = "points of accuracy"

    def __post_init__(self) -> None:
        if not (self.batches >= 1 and 0 <= self.leaked <= self.batches and self.out_of_time >= 0):
            raise InvalidOption(
                f"expected 0 to {self.batches} of {self.batches} batches to leak, got {self.leaked}, "
                f"and {self.out_of_time} out of time"
            )

    @property
    def is_safe(self) -> bool:
        """Did nothing come back, although the attacks had the time they wanted?"""
        return not self.leaked and not self.out_of_time

    @property
    def at_most(self) -> float:
        """The share of batches that may leak, at 95 % confidence."""
        return Rate(self.leaked, self.batches).interval()[1]

    @property
    def price(self) -> str:
        """The cost in words."""
        if self.cost is None:
            return "–"
        spread = f" ± {self.spread:.2g}" if self.spread else ""
        cost = round(self.cost, 9) + 0.0  # a mean that is off by rounding is nothing
        within = " (within the spread over runs)" if abs(cost) <= (self.spread or 0.0) else ""
        return f"{cost:.2g}{spread} {self.unit}{within if cost else ''}"


@dataclass(frozen=True)
class Case:
    """A verdict without a finding: of one setting of a sweep, or of a check."""

    name: str
    outcome: Outcome
    words: str
    measured: Measured | None = field(default=None, metadata={"added": "after the schema"})

    @property
    def is_safe(self) -> bool:
        """Was it measured, and did nothing come back, not even blurred?"""
        return (
            self.outcome is Outcome.FAILED and self.measured is not None and self.measured.is_safe
        )


@dataclass(frozen=True)
class Step:
    """One thing to do: what it is for, and a command that runs as it stands, if there is one."""

    words: str
    command: str = ""


@dataclass(frozen=True, eq=False)
class Report:
    """The results of an audit, to show to others and to load back.

    `save` writes JSON for `spear.load`, `save_page` one HTML file. `redacted` leaves out everything
    that was recovered: a report with clients' data is itself a leak.
    """

    kind: str
    """What made it: "inversion", "audit", "flower", "nvflare" or "demo"."""
    title: str
    headline: str
    """The verdict in one sentence."""
    findings: tuple[Finding, ...] = ()
    remarks: tuple[Remark, ...] = ()
    tables: tuple[Table, ...] = ()
    drawings: tuple[Drawing, ...] = field(default=(), repr=False)
    settings: Mapping[str, Any] = field(default_factory=dict)
    """How to repeat it, as JSON values; "command" is the command line."""
    versions: Mapping[str, str] = field(default_factory=dict)
    created: str = ""
    """Time of creation, ISO 8601 in UTC."""
    seconds: float | None = None
    """Duration of the whole run."""
    is_redacted: bool = False
    overall: Outcome | None = None
    """The overall outcome, where the findings are only examples."""
    cases: tuple[Case, ...] = field(default=(), metadata={"added": "after the schema"})
    """The verdicts, where the findings are not all there is: of a sweep's settings, or of a check."""
    steps: tuple[Step, ...] = field(default=(), metadata={"added": "after the schema"})
    """What to do next, where the maker knows better than the findings tell."""

    @staticmethod
    def new(
        kind: str,
        title: str,
        headline: str,
        findings: Sequence[Finding] = (),
        *,
        remarks: Sequence[Remark] = (),
        tables: Sequence[Table] = (),
        drawings: Sequence[Drawing] = (),
        settings: Mapping[str, Any] | None = None,
        seconds: float | None = None,
        overall: Outcome | None = None,
        cases: Sequence[Case] = (),
        steps: Sequence[Step] = (),
    ) -> Report:
        """A report with the current time and the software versions."""
        import torch

        from spear.files import commit, versions

        made_by = {name: str(version) for name, version in versions().items()}
        made_by["threads"] = str(torch.get_num_threads())
        if commit():
            made_by["commit"] = str(commit())
        return Report(
            kind,
            title,
            headline,
            tuple(findings),
            tuple(remarks),
            tuple(tables),
            tuple(drawings),
            dict(settings or {}),
            made_by,
            datetime.now(UTC).isoformat(timespec="seconds"),
            seconds,
            overall=overall,
            cases=tuple(cases),
            steps=tuple(steps),
        )

    @staticmethod
    def of(
        result: Inversion,
        name: str = "the update",
        *,
        title: str | None = None,
        image_format: ImageFormat | None = None,
        truth: Truth | None = None,
        notes: Sequence[str] = (),
        columns: Sequence[Column] = (),
        settings: Mapping[str, Any] | None = None,
        seconds: float | None = None,
    ) -> Report:
        """A report of one inversion."""
        found = Finding.of(
            result, name, image_format=image_format, truth=truth, notes=notes, columns=columns
        )
        title = title or f"What {name} gives away"
        return Report.new(
            "inversion", title, found.headline, [found], settings=settings, seconds=seconds
        )

    @property
    def outcome(self) -> Outcome | None:
        """The worst outcome for any client; None if nothing was attacked."""
        if self.overall is not None:
            return self.overall
        outcomes = [finding.outcome for finding in self.findings]
        return max(outcomes, key=SEVERITY.index) if outcomes else None

    @property
    def worst(self) -> Outcome | None:
        """The worst verdict, that of a check and of a setting that was not measured included."""
        outcomes = [case.outcome for case in self.cases]
        return max(outcomes, key=SEVERITY.index) if outcomes else self.outcome

    @property
    def advice(self) -> Advice:
        """What to do now: settings found safe, the next command, and what mitigations cost."""
        from spear.report.advice import advice

        return advice(self)

    def redacted(self) -> Report:
        """The report without recovered data, originals, labels and the folders of files."""
        from spear.report.redaction import command_without_folders, without_folders

        return dataclasses.replace(
            self,
            findings=tuple(finding.redacted() for finding in self.findings),
            title=without_folders(self.title),
            settings=without_folders(self.settings),
            cases=tuple(
                dataclasses.replace(
                    case, name=without_folders(case.name), words=without_folders(case.words)
                )
                for case in self.cases
            ),
            steps=tuple(
                Step(without_folders(step.words), command_without_folders(step.command))
                for step in self.steps
            ),
            is_redacted=True,
        )

    def save(self, path: str | Path) -> None:
        """Write it as JSON, readable only by its owner: it holds what was recovered."""
        from spear.files import write_private

        write_private(Path(path), self.json().encode())

    def json(self) -> str:
        """The report as JSON text."""
        from spear.report.document import dump

        return dump(self)

    def save_page(self, path: str | Path) -> None:
        """Write it as one HTML file that needs nothing else, readable only by its owner."""
        from spear.files import write_private

        write_private(Path(path), self.page().encode())

    def save_junit(self, path: str | Path, fail_on: Outcome | None = None) -> None:
        """Write the verdicts as JUnit XML, one test case each; nothing recovered is in it.

        Args:
            path: where.
            fail_on: the mildest outcome that fails a test case; by default all but FAILED do.
        """
        from spear.files import write_private
        from spear.report.junit import junit

        write_private(Path(path), junit(self, fail_on).encode())

    def save_sarif(self, path: str | Path) -> None:
        """Write what leaks, or may, as SARIF 2.1.0, one result each; nothing recovered is in it."""
        from spear.files import write_private
        from spear.report.sarif import sarif

        write_private(Path(path), sarif(self).encode())

    def log(
        self,
        log_metrics: Callable[..., object],
        *,
        log_tags: Callable[[dict[str, str]], object] | None = None,
        step: int | None = None,
    ) -> None:
        """Hand the verdict to a tracker; nothing recovered is in it.

        Args:
            log_metrics: called with numbers by name, and with `step=` if it is given:
                `mlflow.log_metrics`, `wandb.log`, or any function of yours.
            log_tags: called with words by name: `mlflow.set_tags`.
            step: the round of training.

        >>> kept = {}
        >>> Report("check", "Is net exposed?", "Not attacked.").log(kept.update)
        >>> kept["spear/verdicts"]
        0.0
        """
        from spear.report.tracking import metrics, tags

        log_metrics(metrics(self), **({} if step is None else {"step": step}))
        if log_tags is not None:
            log_tags(dict(tags(self)))

    def page(self) -> str:
        """One self-contained HTML page."""
        from spear.report.page import render

        return render(self)

    def __repr__(self) -> str:
        return f"<Report {self.kind!r}: {self.title}>"

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        from spear.report.notebook import fragment

        return fragment(self)
