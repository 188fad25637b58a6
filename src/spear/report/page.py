"""A report as one HTML page that needs no other file and no network."""

from __future__ import annotations

import html

from spear.report.report import Report


def render(report: Report) -> str:
    """The page, with everything a user named escaped."""
    return (
        f"<!doctype html><title>{html.escape(report.title)}</title>{html.escape(report.headline)}"
    )
