"""Which trials can run with the datasets at hand: what is missing is left out and said."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path

from spear.data import State, survey
from spear.errors import DamagedData, MissingData
from spear.paper.batches import DATASETS, NAMES, images
from spear.trials import Trial


def runnable(
    trials: Sequence[Trial], needs: Sequence[str], root: Path
) -> tuple[list[Trial], list[str]]:
    """The trials whose data is there, and the names of what is not. Damaged data is an error."""
    absent = [name for name in needs if _lacks(root, name)]
    if absent:
        return [], absent
    wanted = [str(t.settings.get("data") or t.settings.get("source")) for t in trials]
    missing = [name for name in dict.fromkeys(wanted) if name in DATASETS and _unread(root, name)]
    kept = [trial for trial, name in zip(trials, wanted, strict=True) if name not in missing]
    return kept, [NAMES[name] for name in missing]


@cache
def _unread(root: Path, name: str) -> bool:
    try:
        images(root, name)
    except MissingData:
        return True
    return False


@cache
def _lacks(root: Path, name: str) -> bool:
    found = {item.name: item for item in survey(root)}[name]
    if found.state is State.DAMAGED:
        raise DamagedData(found.detail)
    return found.state is State.MISSING
