"""`spear docs`: the pages of the documentation, which come with the package."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Annotated

import typer

from spear.cli.console import PlainConsole
from spear.errors import MissingData

console = PlainConsole()
_INSTALLED, _CLONED = (Path(__file__).parents[up] / "docs" for up in (1, 3))


def pages() -> dict[str, Path]:
    """Each page by its name."""
    folder = _INSTALLED if _INSTALLED.is_dir() else _CLONED
    return {path.stem: path for path in sorted(folder.glob("*.md"))}


def _completed(incomplete: str) -> list[str]:
    return [name for name in pages() if name.startswith(incomplete)]


def docs(
    page: Annotated[
        str | None, typer.Argument(help="Name of a page.", autocompletion=_completed)
    ] = None,
) -> None:
    """Show a page of the documentation; without a name, which pages there are."""
    found = pages()
    if page is None:
        widest = max(map(len, found))
        for name, path in found.items():
            console.print(f"{name:{widest}}  {_title(path)}", markup=False, soft_wrap=True)
        console.print("\nBegin with: spear docs start")
        return
    name = Path(page).stem  # links between pages have `audit.md#an-example`
    if name not in found:
        near = difflib.get_close_matches(name.lower(), found, n=1)
        meant = f". Did you mean {near[0]}?" if near else f": expected one of {', '.join(found)}"
        raise MissingData(f"there is no page {name!r}{meant}")
    typer.echo_via_pager(found[name].read_text(encoding="utf-8"))


def _title(path: Path) -> str:
    return path.read_text(encoding="utf-8").partition("\n")[0].lstrip("# ").replace("`", "")
