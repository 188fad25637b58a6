"""Rival attacks behind the call of `spear.invert`: optimisation (Geiping), cocktail party (ICA); and
the way from recovered features back to images."""

from spear.baselines.attack import Attack, Bounds, approximate, pixel_bounds
from spear.baselines.by_name import ATTACKS, load_attack, made_attack
from spear.baselines.cocktail import CocktailPartyAttack
from spear.baselines.features import FeatureInversion, invert_features
from spear.baselines.geiping import GeipingAttack
from spear.baselines.prior import prior_from

__all__ = [
    "ATTACKS",
    "Attack",
    "Bounds",
    "CocktailPartyAttack",
    "FeatureInversion",
    "GeipingAttack",
    "approximate",
    "invert_features",
    "load_attack",
    "made_attack",
    "pixel_bounds",
    "prior_from",
]
