"""Attacks by name: ours, those of installed packages, and a user's own file."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from spear import plugins
from spear.baselines.attack import Attack
from spear.baselines.cocktail import CocktailPartyAttack
from spear.baselines.geiping import GeipingAttack
from spear.errors import InvalidOption
from spear.files import load_object
from spear.search import made

ATTACKS: dict[str, Callable[[], Attack]] = {
    "geiping": GeipingAttack,
    "cocktail": CocktailPartyAttack,
}


def load_attack(spec: str) -> Attack:
    """A rival attack by name: one of ours, one of an installed package, or my_attack.py:MyAttack.

    >>> load_attack("geiping").iterations
    2000
    """
    if spec in ATTACKS:
        return ATTACKS[spec]()
    if plugins.is_code(spec):
        return made_attack(load_object(spec), spec)
    offered = plugins.offered(plugins.ATTACKS)
    if spec in offered:
        return made_attack(plugins.load(plugins.ATTACKS, spec), spec)
    known = ", ".join(sorted({*ATTACKS, *offered}))
    raise InvalidOption(
        f"expected the attack to be one of {known}, or my_attack.py:MyAttack, got {spec!r}"
    )


def made_attack(found: Any, name: str) -> Attack:
    """An attack: what was found under a name, or what it returns if it is a class or a function."""
    attack: Attack = made(found, name, "an attack", ("invert",))
    return attack
