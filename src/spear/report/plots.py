"""One style for all plots: small, serif, plain, legible in print."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spear.errors import MissingExtra
from spear.files import write_all_private

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BLUE, GREEN, ORANGE, GREY, RED = "#1f5fa8", "#2a7f4f", "#c2571a", "#777777", "#b3261e"
_STYLE: Any = {  # matplotlib types its names one by one
    "font.family": "serif",
    "font.serif": ["DejaVu Serif"],
    "mathtext.fontset": "dejavuserif",
    "font.size": 8.5,
    "axes.titlesize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "grid.linewidth": 0.6,
    "lines.linewidth": 1.4,
    "lines.markersize": 4,
    "legend.frameon": False,
    "legend.fontsize": 7.5,
    "svg.hashsalt": "spear",  # the same rows give the same file
    "svg.fonttype": "path",
}
_PAGE: Any = {  # shown 95 pixels an inch: no letter below 11 pixels
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "mathtext.fontset": "dejavusans",
    "font.size": 8.5,
    "legend.fontsize": 8.5,
}
PAGE_WIDTH = 3.1  # inches: what a phone shows, and a third of a wide page
PAGE_GREY = "#5c5c5c"  # of words: 4.5 to 1 on white
_INK, _PAPER = "#e8eaef", "#181c23"  # in the dark; as in page.css
_DARK = {
    "#000000": _INK,
    BLUE: "#82b4f6",
    GREEN: "#6cc495",
    ORANGE: "#f29b64",
    GREY: "#a3abb9",
    PAGE_GREY: "#a3abb9",
}
_PNG: Any = {"dpi": 200, "metadata": {"Software": None}}
_SVG: Any = {"metadata": {"Date": None, "Creator": None}}


@contextmanager
def style(*, page: bool = False) -> Iterator[None]:
    """Within this context, all figures share one style: of print, or of a report's page."""
    try:
        import matplotlib as mpl
    except ImportError as error:
        raise MissingExtra("matplotlib", "plots") from error
    with mpl.rc_context(_STYLE | (_PAGE if page else {})):
        yield


def figure(width: float = 3.4, height: float = 2.4) -> Figure:
    """An empty figure, sizes in inches; a paper's column is 3.4 wide."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def save(drawn: Figure, path: Path) -> list[Path]:
    """Save the figure as PNG and as SVG."""
    files = [path.with_suffix(".png"), path.with_suffix(".svg")]
    contents = {}
    for file, options in zip(files, (_PNG, _SVG), strict=True):
        content = io.BytesIO()
        drawn.savefig(content, format=file.suffix[1:], **options)
        contents[file] = content.getvalue()
    write_all_private(contents)
    return files


def for_page(drawn: Figure, title: str) -> str:
    """The figure as an SVG element: black on white, or light on the dark page of who reads so."""
    import matplotlib as mpl

    for panel in drawn.axes:
        panel.patch.set_visible(False)
    text = io.StringIO()
    with mpl.rc_context({"svg.hashsalt": title}):  # ids of its own: several share a page
        drawn.savefig(text, format="svg", metadata=_SVG["metadata"])
    element = re.sub(r"^.*?(?=<svg)", "", text.getvalue(), flags=re.DOTALL)
    return re.sub(r"(?<=>)", f"<style>{_in_the_dark()}</style>", element, count=1)


def _in_the_dark() -> str:
    """Matplotlib writes colours into each element, where only `!important` overrules them."""
    rules = [f"svg{{fill:{_INK}}}#patch_1 path{{fill:{_PAPER}!important}}"]
    rules += [
        f'[style*="{what}: {light}"]{{{what}:{dark}!important}}'
        for light, dark in _DARK.items()
        for what in ("fill", "stroke")
    ]
    return f"@media (prefers-color-scheme:dark){{{''.join(rules)}}}"


def shades(count: int) -> list[Any]:
    """Colours from dark to light for curves that are in order, all legible on white."""
    import matplotlib as mpl

    return [mpl.colormaps["viridis"](0.88 * i / max(1, count - 1)) for i in range(count)]
