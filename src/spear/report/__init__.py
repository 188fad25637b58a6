"""What an audit came to, in one object: saved as JSON, loaded back, rendered as one HTML page."""

from spear.report.document import SCHEMA, load
from spear.report.finding import Finding, Look, Truth
from spear.report.report import Drawing, Level, Remark, Report, Table

__all__ = [
    "SCHEMA",
    "Drawing",
    "Finding",
    "Level",
    "Look",
    "Remark",
    "Report",
    "Table",
    "Truth",
    "load",
]
