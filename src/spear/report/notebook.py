"""A report as shown in a notebook: an HTML fragment that keeps the notebook's colours."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from html import escape

from spear.errors import MissingExtra
from spear.report import evidence, words
from spear.report.advice import TITLE, how_to_redact
from spear.report.finding import Finding
from spear.report.report import SEVERITY, Report

_MOST_FINDINGS, _MOST_PICTURES = 3, 16
_EDGES = {  # visible on light and on dark backgrounds
    "exact": "#d9443c",
    "partial": "#d9822b",
    "approximate": "#b8961f",
    "inconclusive": "#8e6cc9",
    "failed": "#1f9e8c",
    "neutral": "#8089a0",
}


def fragment(report: Report) -> str:
    """The verdict, its reason and what it rests on, and pictures; of many updates, the worst."""
    verdict = words.verdict(report)
    worst = sorted(report.findings, key=lambda finding: -SEVERITY.index(finding.outcome))
    shown = worst[:_MOST_FINDINGS]
    parts = [f"<b>{escape(verdict.name)}</b>", _paragraph(report.headline)]
    for finding in shown:
        parts += _finding(finding, named=len(report.findings) > 1)
    if len(worst) > len(shown):
        left = words.count(len(worst) - len(shown), "more update")
        parts.append(_paragraph(f'{left}: report.save_page("report.html") shows all.'))
    parts += _advice(report)
    edge = f"border-left:4px solid {_EDGES[verdict.tone]}"
    return f'<div style="{edge};padding:.2em 1em;max-width:60em">{"".join(parts)}</div>'


def _finding(finding: Finding, named: bool) -> Iterator[str]:
    if named:
        yield f"<p><b>{escape(finding.name)}</b>: {escape(words.outcome_of(finding))}</p>"
    yield _paragraph(finding.reason[:1].upper() + finding.reason[1:])
    if finding.assumptions:
        yield _paragraph(words.ASSUMPTIONS) + _list(finding.assumptions)
    try:
        samples = evidence.samples(finding)[:_MOST_PICTURES]
        yield _gallery(evidence.cards(finding, samples, evidence.PictureBudget()))
    except MissingExtra as error:  # Pillow is not in the core
        yield _paragraph(f"No pictures: {error}")


def _advice(report: Report) -> Iterator[str]:
    told = report.advice
    yield f'<p style="margin:.8em 0 .2em"><b>{TITLE}</b></p>'
    steps = (
        escape(step.words)
        + (
            f'<pre style="white-space:pre-wrap">{escape(step.command)}</pre>'
            if step.command
            else ""
        )
        for step in told.steps
    )
    yield f"<ol>{''.join(f'<li>{step}</li>' for step in steps)}</ol>"
    yield _paragraph("Settings found safe:") + _paragraph(told.found)
    measured = [
        f"{case.name}: {case.measured.leaked} of {case.measured.batches} batches leaked, cost "
        f"{case.measured.price}"
        for case in told.mitigations
        if case.measured
    ]
    yield _paragraph("Mitigations:") + _list(measured) + _paragraph(told.source)
    if any(finding.holds_data for finding in report.findings):
        yield _paragraph(how_to_redact(report))


def _gallery(cards: Sequence[evidence.Card]) -> str:
    figures = []
    for card in cards:
        images = "".join(
            f'<img src="{uri}" alt="{what}: {escape(card.sample.title)}" title="{what}" '
            'style="width:72px;image-rendering:pixelated;margin:0 2px 0 0">'
            for what, uri in (("original", card.original), ("recovered", card.recovered))
            if uri is not None
        )
        caption = f"{escape(card.sample.title)}<br>{card.sample.words}"
        figures.append(f'<figure style="margin:0;font-size:.8em">{images}<br>{caption}</figure>')
    row = "display:flex;flex-wrap:wrap;gap:.8em;margin:.5em 0"
    return f'<div style="{row}">{"".join(figures)}</div>' if figures else ""


def _paragraph(text: str) -> str:
    return f'<p style="margin:.3em 0">{escape(text)}</p>'


def _list(lines: Iterable[str]) -> str:
    return f"<ul>{''.join(f'<li>{escape(line)}</li>' for line in lines)}</ul>"
