"""What the shell completes: names of experiments, of finders and of layers, and choices."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path

import typer

from spear import plugins
from spear.experiments import installed, names

FINDERS = ("cascade", "sampling")
_AT_ONCE = """
[[ $zsh_eval_context[-1] == loadautofunc ]] && _spear_completion "$@"
"""
_HOLDERS = ("weights", "update", "after", "difference")  # options whose file has a layer's tensors


def as_typed(line: str, word: int) -> tuple[str, int]:
    """A line as bash hands it over, and the number of the word that is completed, with the words joined
    that bash has split at : and =.

    >>> as_typed("spear check --model net.py : Net --layer f", 7)
    ('spear check --model net.py:Net --layer f', 5)
    """
    joined, count = re.subn(r"\s([:=])\s", r"\1", line)
    return joined, word - 2 * count


def complete_at_first_tab(script: Path) -> None:
    """zsh runs the script that Typer installs at the first Tab, and it only says who completes: let it
    complete as well."""
    if script.is_file() and _AT_ONCE not in script.read_text(encoding="utf-8"):
        with script.open("a", encoding="utf-8") as file:
            file.write(_AT_ONCE)


def one_of(values: Iterable[str]) -> Callable[[str], list[str]]:
    """Completes one of these."""
    known = list(values)
    return lambda incomplete: [value for value in known if value.startswith(incomplete)]


def finders(incomplete: str) -> list[str]:
    """Names of finders, also those of installed packages."""
    return one_of(dict.fromkeys((*FINDERS, *plugins.offered(plugins.FINDERS))))(incomplete)


def experiments(ctx: typer.Context, incomplete: str) -> list[str]:
    """Names that are not on the line yet."""
    given = ctx.params.get("experiments") or ()
    there = (*names(), *installed(), "all")
    return [name for name in there if name.startswith(incomplete) and name not in given]


def experiments_with_rows(ctx: typer.Context, incomplete: str) -> list[str]:
    """Names of the files of rows in --results that are not on the line yet."""
    given = ctx.params.get("names") or ()
    there = sorted(file.stem for file in Path(ctx.params["results"]).glob("*.jsonl"))
    return [name for name in there if name.startswith(incomplete) and name not in given]


def layers(ctx: typer.Context, incomplete: str) -> list[str]:
    """Linear layers of the model on the line, or of the weights. As the command will, this imports and
    calls the user's factory; what it prints is dropped, and where it fails nothing is completed."""
    with (
        Path(os.devnull).open("w", encoding="utf-8") as nowhere,
        contextlib.redirect_stdout(nowhere),
        contextlib.redirect_stderr(nowhere),
        contextlib.suppress(Exception),
    ):
        return [name for name in _layers(ctx) if name.startswith(incomplete)]
    return []


def _layers(ctx: typer.Context) -> list[str]:
    from torch import nn

    from spear.files import build_model, named, read_tensors
    from spear.update import linear_layers

    if model := ctx.params.get("model"):
        modules = build_model(model).named_modules()
        return [name for name, module in modules if isinstance(module, nn.Linear)]
    file = next(Path(path) for name in _HOLDERS if (path := ctx.params.get(name)))
    return [layer.name for layer in linear_layers(named(read_tensors(file), {})[0])]
