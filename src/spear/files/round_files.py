"""Several rounds on disk: the folder they are in, and the one view that they make together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from spear.errors import Declined, InvalidFile, InvalidOption, InvalidUpdate, NoUpdate
from spear.factors import combine
from spear.files.tensors import KINDS, KINDS_WORDS
from spear.files.update_files import UpdateFiles, observe_files
from spear.update import LayerUpdate, Sends, natural_order

_NAMES = {  # what each field of UpdateFiles may be called in a round's folder
    "weights": ("before", "weights"),
    "update": ("update", "gradients"),
    "after": ("after",),
    "difference": ("difference",),
}
_FORMS: dict[Sends, str] = {"gradient": "update", "weights": "after", "difference": "difference"}
_FILES = (
    "before.* (the weights sent out) and one of update.* (gradients), after.* (the weights sent back) "
    "or difference.*"
)
_SHOWN = 6  # names in a message


def rounds_of(
    pairs: Sequence[tuple[Path, Path]], *, sends: Sends = "gradient", **shared: Any
) -> list[UpdateFiles]:
    """The rounds of these files, each a pair: the weights sent out, and what was sent back.

    Args:
        pairs: in the order of the rounds.
        sends: what was sent back, in every round.
        shared: what else holds of every round, by the names of `UpdateFiles`.
    """
    if sends not in _FORMS:
        raise InvalidOption(
            f"expected {{sends}} to be one of {', '.join(_FORMS)}, got {sends!r}",
            arguments=("sends",),
        )
    form = _FORMS[sends]
    return [UpdateFiles(weights=before, **{form: sent, **shared}) for before, sent in pairs]


def rounds_in(folder: Path, **shared: Any) -> list[UpdateFiles]:
    """The rounds in a folder: one folder for each, in the order of the numbers in their names.

    Args:
        folder: of the rounds. A round's own folder has `before.*` (or `weights.*`) and one of
            `update.*` (or `gradients.*`), `after.*` and `difference.*`.
        shared: what else holds of every round, by the names of `UpdateFiles`.
    """
    entries = [path for path in folder.iterdir() if not path.name.startswith(".")]
    rounds = [path for path in entries if path.is_dir()]
    if not rounds:
        raise InvalidFile(
            f"{folder}: expected a folder for each round, with {_FILES}; got {_listed(entries)}"
        )
    rounds.sort(key=lambda path: natural_order(path.name))
    found = [_files_of(path) for path in rounds]
    for path, files in zip(rounds, found, strict=True):
        if files.keys() != found[0].keys():
            raise InvalidFile(
                f"{path}: expected the same files as in {rounds[0].name} "
                f"({_listed(found[0].values())}), got {_listed(files.values())}"
            )
    return [UpdateFiles(**files, **shared) for files in found]


def _files_of(folder: Path) -> dict[str, Any]:
    """The files of one round, by the fields of `UpdateFiles`."""
    there = [path for path in folder.iterdir() if not path.name.startswith(".")]
    tensors = [path for path in there if path.suffix in KINDS]
    found = [(field, p) for field, names in _NAMES.items() for p in tensors if p.stem in names]
    fields = [field for field, _ in found]
    if len(found) != 2 or fields.count("weights") != 1:
        raise InvalidFile(f"{folder}: expected {_FILES}, each {KINDS_WORDS}; got {_listed(there)}")
    return dict(found)


def _listed(paths: Any) -> str:
    names = sorted((path.name for path in paths), key=natural_order)
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return (", ".join(names[:_SHOWN]) or "nothing") + more


def observe_rounds(
    rounds: Sequence[UpdateFiles], tell: Callable[[str], None] = lambda words: None
) -> LayerUpdate:
    """Read each round and combine them. No more than one is in memory.

    Args:
        rounds: in their order; a single one is observed as it is.
        tell: called with a few words as each is read.
    """
    if len(rounds) == 1:
        return observe_files(rounds[0])

    def views() -> Iterator[LayerUpdate | Declined]:
        for number, files in enumerate(rounds, 1):
            tell(f"round {number} of {len(rounds)}")
            yield _view(number, files)

    return combine(views())


def _view(number: int, files: UpdateFiles) -> LayerUpdate | Declined:
    """One round; or why it says nothing, if its client did not train."""
    try:
        return observe_files(files)
    except NoUpdate as error:
        return Declined(str(error))
    except InvalidUpdate as error:
        where = f"round {number} ({files.path})"
        raise InvalidUpdate([f"{where}: {problem}" for problem in error.problems]) from error
