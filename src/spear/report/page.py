"""A report as one HTML page that needs no other file and no network."""

from __future__ import annotations

import base64
import hashlib
from collections import Counter
from collections.abc import Sequence
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING

from spear.errors import MissingExtra
from spear.report import evidence, words
from spear.report.advice import TITLE, how_to_redact
from spear.report.finding import Finding
from spear.report.report import SEVERITY, Case, Cell, Drawing, Report, Table

if TYPE_CHECKING:
    from jinja2 import Environment

_LONG = 30  # letters of a cell that takes a line of its own where rows are cards
_OPEN = 3  # findings shown open; if there are more, all start closed


def render(report: Report) -> str:
    """The page, with all user-given text escaped."""
    style, script = _asset("page.css"), _asset("page.js")
    budget = evidence.PictureBudget()
    chosen = dict.fromkeys(_worst(report.findings))
    shown = [Shown(i + 1, report.findings[i], budget) for i in chosen]
    text = (
        _environment()
        .get_template("page.html.j2")
        .render(
            report=report,
            kind=words.KINDS.get(report.kind, report.kind),
            verdict=words.verdict(report),
            tally=_tally(report.findings) if report.overall is None else [],
            figures=_figures(report),
            findings=shown,
            heading=_heading(report),
            overview=_overview(report.findings) if len(shown) > 1 else None,
            outcomes=[
                (f.outcome.value, SEVERITY.index(f.outcome), i in chosen)
                for i, f in enumerate(report.findings)
            ],
            left_out=len(report.findings) - len(shown),
            holds_data=any(
                finding.inputs is not None and finding.recovered for finding in report.findings
            ),
            is_open=len(shown) <= _OPEN,
            is_sweep=any(case.measured for case in report.cases),
            redaction=how_to_redact(report),
            style=style,
            script=script,
            policy=_policy(style, script),
        )
    )
    # Paths that are not UTF-8 contain lone surrogates, which cannot be written to a file.
    return text.encode("utf-8", "backslashreplace").decode()


class Shown:
    """A finding, with everything that its section of the page shows."""

    def __init__(self, number: int, finding: Finding, budget: evidence.PictureBudget) -> None:
        samples = evidence.samples(finding)
        width = 0 if finding.inputs is None else finding.inputs.shape[1]
        self.number, self.finding = number, finding
        self.name = words.outcome_of(finding)
        layer, *self.other_layers = finding.layer.splitlines() or [words.NONE]
        self.layer = layer.removeprefix("attacking ")
        said = finding.headline.replace(" recovered exactly,", " recovered,")
        self.repeats_headline = said.removesuffix(".").casefold() == finding.reason.casefold()
        self.samples = len(samples)
        self.cards = evidence.cards(finding, samples, budget)
        self.values = evidence.values(finding, samples)
        self.people = evidence.people(finding, samples)
        named = len(self.people.rows) if self.people else 0
        self.drawn = len(self.cards) + len(self.values) + named  # samples with a picture or values
        self.columns = min(width, evidence.MOST_COLUMNS)
        self.hidden_columns = width - self.columns
        self.certificates = evidence.certificates(finding, samples)
        self.stages, self.counts = evidence.stages(finding), evidence.counts(finding)
        self.longest = max((value for _, value in self.stages), default=0.0) or 1.0


def _worst(findings: Sequence[Finding]) -> list[int]:
    """Which findings are shown one by one, in order: all, or the worst if there are too many."""
    order = sorted(range(len(findings)), key=lambda i: -SEVERITY.index(findings[i].outcome))
    return sorted(order[: evidence.MOST_FINDINGS])


def _heading(report: Report) -> str:
    if report.overall is not None:
        return "Examples"
    return "Updates" if len(report.findings) > 1 else "Evidence"


def _tally(findings: Sequence[Finding]) -> list[tuple[str, str, int]]:
    """The number of updates with each outcome, the worst first."""
    counts = Counter((words.outcome_of(finding), finding.outcome) for finding in findings)
    worst_first = sorted(counts, key=lambda pair: -SEVERITY.index(pair[1]))
    return [(outcome.value, name.lower(), counts[name, outcome]) for name, outcome in worst_first]


def _figures(report: Report) -> list[tuple[str, str]]:
    """The numbers beside the verdict."""
    figures, findings = [], report.findings
    if findings and report.overall is None:
        sizes = [finding.batch_size for finding in findings]
        total = None if None in sizes else sum(size or 0 for size in sizes)
        of = "" if total is None else f" of {total:,}"
        attacked = sum(finding.is_attacked for finding in findings)
        what, count = "update attacked" if attacked == 1 else "updates attacked", attacked
        if len(findings) == 1 and findings[0].rounds > 1:
            what, count = "rounds attacked together", findings[0].rounds
        figures.append((what, f"{count:,}"))
        figures.append(("samples certified", f"{sum(sum(f.certified) for f in findings):,}{of}"))
        figures += _worst_psnr(findings)
    if report.seconds is not None:
        figures.append(("time taken", words.seconds(report.seconds)))
    return figures


def _worst_psnr(findings: Sequence[Finding]) -> list[tuple[str, str]]:
    psnr = [value for f in findings if f.truth for value in f.truth.psnr if words.is_number(value)]
    if not psnr:
        return []
    worst = words.decibel(min(psnr))
    return [("worst PSNR", worst if worst[0].isalpha() else f"{worst} dB")]


def _overview(findings: Sequence[Finding]) -> Table:
    """One row per finding; the page links the first cell to its section."""
    columns = ("update", "outcome", "certified", "recovered", "batch size", "proof", "λ", "seconds")
    return Table("All updates", columns, tuple(_overview_row(finding) for finding in findings))


def _overview_row(finding: Finding) -> tuple[Cell, ...]:
    times = [value for _, value in evidence.stages(finding)]
    return (
        finding.name,
        words.outcome_of(finding),
        sum(finding.certified),
        finding.recovered,
        finding.batch_size,
        finding.proof.value,
        finding.match,
        round(sum(times), 3) if times else None,
    )


def _cases_table(title: str, cases: Sequence[Case]) -> Table:
    """How often each setting leaked, and what it costs."""
    rows = tuple(
        (
            case.name,
            f"{case.measured.leaked} of {case.measured.batches} batches",
            f"{100 * case.measured.at_most:.0f} %",
            case.measured.price,
        )
        for case in cases
        if case.measured
    )
    return Table(title, ("setting", "leaked", "at most (95 % bound)", "cost in training"), rows)


def _svg_uri(drawing: Drawing) -> str:
    """The drawing as a data URI: within an image, no script runs and nothing is fetched."""
    raw = drawing.svg.encode("utf-8", "replace")
    return "data:image/svg+xml;base64," + base64.b64encode(raw).decode("ascii")


def _policy(style: str, script: str) -> str:
    """Content security: the browser may show this file's pictures and run its one script."""
    hashes = (hashlib.sha256(part.encode()).digest() for part in (style, script))
    css, js = (base64.b64encode(digest).decode("ascii") for digest in hashes)
    return (
        f"default-src 'none'; img-src data:; style-src 'sha256-{css}'; "
        f"script-src 'sha256-{js}'; base-uri 'none'; form-action 'none'"
    )


def _asset(name: str) -> str:
    return (resources.files("spear.report") / "templates" / name).read_text("utf-8")


@cache
def _environment() -> Environment:
    try:
        import jinja2
    except ImportError as error:
        raise MissingExtra("jinja2", "cli") from error
    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(_asset),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "cell": words.cell,
        "count": words.count,
        "decibel": words.decibel,
        "seconds": words.seconds,
        "setting": words.setting,
        "svg_uri": _svg_uri,
    }
    environment.tests |= {"orderable": words.is_number, "endless": words.is_endless}
    environment.globals |= {
        "LONG": _LONG,
        "MOST_LINES": evidence.MOST_LINES,
        "MOST_SAMPLES": evidence.MOST_SAMPLES,
        "ADVICE": TITLE,
        "ASSUMPTIONS": words.ASSUMPTIONS,
        "cases_table": _cases_table,
        "PROOFS": words.PROOFS,
        "numeric_columns": words.numeric_columns,
    }
    return environment
