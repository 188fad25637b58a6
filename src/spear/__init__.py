"""SPEAR: shows, exactly and provably, what a federated-learning update gives away."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from spear.denoising import denoise
    from spear.errors import (
        InvalidFile,
        InvalidOption,
        InvalidReport,
        InvalidUpdate,
        MissingExtra,
        NoAttackableLayer,
        NotExact,
        SpearError,
    )
    from spear.factors import combine
    from spear.inversion import Inversion, Outcome, invert
    from spear.judge import Cause, Proof
    from spear.report import Report, load
    from spear.search import CascadeFinder, Progress, SamplingFinder, workers
    from spear.update import LayerUpdate, Protocol, observe

__version__ = "0.1.0"

__all__ = [
    "CascadeFinder",
    "Cause",
    "InvalidFile",
    "InvalidOption",
    "InvalidReport",
    "InvalidUpdate",
    "Inversion",
    "LayerUpdate",
    "MissingExtra",
    "NoAttackableLayer",
    "NotExact",
    "Outcome",
    "Progress",
    "Proof",
    "Protocol",
    "Report",
    "SamplingFinder",
    "SpearError",
    "combine",
    "denoise",
    "invert",
    "load",
    "observe",
    "workers",
]

# Where these names are. They are imported when first used: torch takes seconds to import, which
# `spear --help` need not wait for.
_HOMES = {
    **dict.fromkeys(("Inversion", "Outcome", "invert"), "inversion"),
    **dict.fromkeys(("LayerUpdate", "Protocol", "observe"), "update"),
    **dict.fromkeys(("CascadeFinder", "Progress", "SamplingFinder", "workers"), "search"),
    "combine": "factors",
    "denoise": "denoising",
    **dict.fromkeys(("Cause", "Proof"), "judge"),
    **dict.fromkeys(("Report", "load"), "report"),
}


def __getattr__(name: str) -> Any:
    if name in __all__:
        value = getattr(import_module(f"spear.{_HOMES.get(name, 'errors')}"), name)
        globals()[name] = value
        return value
    if not name.startswith("_"):
        try:
            return import_module(f"spear.{name}")
        except ModuleNotFoundError as error:
            if error.name != f"spear.{name}":
                raise
    raise AttributeError(f"module 'spear' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
