"""What installed packages add, by entry points: finders, attacks and experiments, each by its name.

A package that cannot be loaded is an error for whoever names what it offers, and for nobody else.
"""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points
from typing import Any

from spear.errors import InvalidExtension

FINDERS, ATTACKS, EXPERIMENTS = "spear.finders", "spear.attacks", "spear.experiments"


def is_code(spec: str) -> bool:
    """Is this where code is, rather than a name?

    >>> [is_code(spec) for spec in ("my_finder.py:Mine", "my_table.py", "package.module:name", "main")]
    [True, True, True, False]
    """
    return ":" in spec or spec.endswith(".py")


def offered(group: str) -> dict[str, list[EntryPoint]]:
    """The entry points of a group by their names; more than one where packages differ.

    >>> offered("spear.nothing")
    {}
    """
    found: dict[str, dict[str, EntryPoint]] = {}
    for point in sorted(entry_points(group=group), key=lambda point: point.name):
        found.setdefault(point.name, {}).setdefault(point.value, point)
    return {name: list(points.values()) for name, points in found.items()}


def load(group: str, name: str) -> Any:
    """What a package offers under a name."""
    point, *others = offered(group)[name]
    if others:
        named = " and ".join(_package(each) for each in (point, *others))
        raise InvalidExtension(f"{named} both offer {name!r} in {group}: uninstall all but one")
    try:
        return point.load()
    except (Exception, SystemExit) as error:  # the package's code may raise anything
        raise InvalidExtension(
            f"{name!r} of {_package(point)} cannot be loaded from {point.value} "
            f"({type(error).__name__}: {error}): mend the package, or uninstall it"
        ) from error


def _package(point: EntryPoint) -> str:
    return "a package" if point.dist is None else f"{point.dist.name} {point.dist.version}"
