"""What a model and a protocol expose, found out before any attack by a rehearsal on made-up data."""

from spear.check.checks import preflight
from spear.check.conclusion import Exposure, Preflight
from spear.check.from_files import CheckFiles, check_files
from spear.check.reasons import Action, Advice, Reason, Subject
from spear.check.rehearsal import Recovery, compare

__all__ = [
    "Action",
    "Advice",
    "CheckFiles",
    "Exposure",
    "Preflight",
    "Reason",
    "Recovery",
    "Subject",
    "check_files",
    "compare",
    "preflight",
]
