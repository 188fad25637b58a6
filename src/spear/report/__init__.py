"""The result of an audit in one object: saved as JSON, loaded back, rendered as one HTML page."""

from spear.report import pictures, plots
from spear.report.cases import at_least
from spear.report.document import SCHEMA, load
from spear.report.finding import Finding, ImageFormat, Truth
from spear.report.from_files import invert_files
from spear.report.report import SEVERITY, Case, Cell, Drawing, Level, Remark, Report, Table
from spear.report.saving import save_inputs
from spear.report.threat import OWASP, ThreatModel
from spear.report.truth import compare, read_batch
from spear.report.words import ASSUMPTIONS

__all__ = [
    "ASSUMPTIONS",
    "OWASP",
    "SCHEMA",
    "SEVERITY",
    "Case",
    "Cell",
    "Drawing",
    "Finding",
    "ImageFormat",
    "Level",
    "Remark",
    "Report",
    "Table",
    "ThreatModel",
    "Truth",
    "at_least",
    "compare",
    "invert_files",
    "load",
    "pictures",
    "plots",
    "read_batch",
    "save_inputs",
]
