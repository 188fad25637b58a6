"""Before any attack: what a model and a protocol expose, and why."""

from spear.check.checks import preflight
from spear.check.conclusion import Preflight
from spear.check.exposure import Exposure
from spear.check.from_files import CheckFiles, check_files

__all__ = [
    "CheckFiles",
    "Exposure",
    "Preflight",
    "check_files",
    "preflight",
]
