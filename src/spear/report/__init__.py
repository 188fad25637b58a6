"""The result of an audit in one object: saved as JSON, loaded back, rendered as one HTML page."""

from spear.report import pictures, plots
from spear.report.advice import TITLE as ADVICE
from spear.report.advice import Advice, Door, command_with, how_to_redact, safe_settings
from spear.report.cases import at_least
from spear.report.columns import check_columns, columns_of, read_columns
from spear.report.document import SCHEMA, load
from spear.report.evidence import counts, stages
from spear.report.finding import Finding, ImageFormat, Truth
from spear.report.from_files import invert_files
from spear.report.report import (
    SEVERITY,
    Case,
    Cell,
    Drawing,
    Level,
    Measured,
    Remark,
    Report,
    Step,
    Table,
)
from spear.report.saving import save_inputs
from spear.report.threat import OWASP, ThreatModel
from spear.report.truth import compare, read_batch
from spear.report.words import ASSUMPTIONS, count, seconds

__all__ = [
    "ADVICE",
    "ASSUMPTIONS",
    "OWASP",
    "SCHEMA",
    "SEVERITY",
    "Advice",
    "Case",
    "Cell",
    "Door",
    "Drawing",
    "Finding",
    "ImageFormat",
    "Level",
    "Measured",
    "Remark",
    "Report",
    "Step",
    "Table",
    "ThreatModel",
    "Truth",
    "at_least",
    "check_columns",
    "columns_of",
    "command_with",
    "compare",
    "count",
    "counts",
    "how_to_redact",
    "invert_files",
    "load",
    "pictures",
    "plots",
    "read_batch",
    "read_columns",
    "safe_settings",
    "save_inputs",
    "seconds",
    "stages",
]
