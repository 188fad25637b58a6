"""Rows of images under one another, labelled: the pictures that trials store."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from spear.errors import InvalidOption, MissingExtra
from spear.report import pictures, plots
from spear.trials import Compared

if TYPE_CHECKING:
    from PIL import ImageFont

# Pixels of a picture printed 7 inches wide at about 200 dots per inch.
_TEXT, _SMALL, _GAP, _BAND, _MARGIN, _FRAME, _LINE = 22, 17, 8, 26, 10, 3, 1.25
_INK, _PALE, _PAPER = "#202124", "#c4c7cc", "#ffffff"
CERTIFIED, UNCERTIFIED = plots.GREEN, plots.RED


@dataclass(frozen=True, eq=False)
class Tile:
    """One image, or the empty frame of one that is missing.

    Args:
        image: (C, H, W) in [0, 1], clipped for showing; None leaves the frame empty.
        frame: colour of a frame around it.
        caption: a few characters below it.
        psnr: in dB, if it was measured.
    """

    image: Tensor | None
    frame: str | None = None
    caption: str = ""
    psnr: float | None = None

    @property
    def rank(self) -> tuple[bool, bool, float]:
        """Sorts certified before uncertified before missing ones, and those by falling PSNR."""
        return self.image is None, self.frame != CERTIFIED, -(self.psnr or 0.0)


@dataclass(frozen=True, eq=False)
class Strip:
    """Images side by side, with a label to their left."""

    label: str  # lines, the first of them in bold
    tiles: Sequence[Tile]


def aligned(compared: Compared) -> list[Tensor | None]:
    """Recovered images (C, H, W) in the order of the originals; None where one is missing."""
    return [tile.image for tile in judged(compared)]


def plain(images: Sequence[Tensor | None]) -> list[Tile]:
    """Tiles without a mark."""
    return [Tile(image) for image in images]


def judged(compared: Compared) -> list[Tile]:
    """Recovered images in the originals' order: green frames are certified, red ones are not.

    Each carries its PSNR. What is missing is an empty frame: nothing is shown in its place.
    """
    result, score = compared.attacked.result, compared.score
    images = compared.batch.pixels(result.inputs)
    tiles = [Tile(None, None, "missing")] * (len(score.pairs) + score.pairs.missing)
    pairs = zip(
        score.pairs.found.tolist(), score.pairs.truth.tolist(), score.psnr.tolist(), strict=True
    )
    for found, truth, psnr in pairs:
        frame = CERTIFIED if bool(result.certified[found]) else UNCERTIFIED
        tiles[truth] = Tile(
            images[found], frame, f"{psnr:.0f} dB".replace("-", "\N{MINUS SIGN}"), psnr
        )
    return tiles


def recovered_above_originals(compared: Compared) -> bytes:
    """A PNG of a batch as it came back, in the originals' order, above the originals.

    Frames and decibels tell images apart where not all of them are certified.
    """
    score, batch = compared.score, compared.batch
    whole = score.pairs.missing == 0 and bool(compared.attacked.result.certified.all())
    tiles = plain(aligned(compared)) if whole else judged(compared)
    mean = f"{float(score.psnr.mean()):.1f} dB" if len(score.psnr) else "nothing"
    originals = plain(list(batch.pixels(batch.inputs)))
    return gallery([Strip(f"SPEAR\n{mean}", tiles), Strip("Ground truth", originals)])


def gallery(
    strips: Sequence[Strip], *, columns: int = 10, side: int = 128, shades: int = 64
) -> bytes:
    """A PNG of strips under one another; long ones continue in a further band below.

    Args:
        columns: images beside each other.
        side: pixels of a tile; images are enlarged by whole numbers, so each pixel stays a square.
        shades: of each colour that are shown, a power of two; the eye misses nothing at 64, and a file
            is a third smaller than with 256.
    """
    lengths = {len(strip.tiles) for strip in strips}
    if len(lengths) != 1 or 0 in lengths:
        raise InvalidOption(f"expected strips of equally many tiles, got {sorted(lengths)}")
    (count,) = lengths
    sheet = _Sheet(strips, min(columns, count), side, shades)
    for band in range(-(-count // columns)):
        for strip in strips:
            sheet.strip(strip, band * columns)
        sheet.top += _BAND - _GAP
    return sheet.png()


class _Sheet:
    """A page that is filled from the top."""

    def __init__(self, strips: Sequence[Strip], columns: int, side: int, shades: int) -> None:
        from PIL import Image, ImageDraw

        self.columns, self.side, self.top = columns, side, _MARGIN
        self.shade = 256 // shades
        lines = [line for strip in strips for line in strip.label.split("\n")]
        bold, text = _font(_TEXT, "-Bold"), _font(_TEXT)
        widest = max(max(bold.getlength(line), text.getlength(line)) for line in lines)
        self.left = _MARGIN + (int(widest) + 2 * _GAP if any(lines) else 0)
        bands = -(-len(strips[0].tiles) // columns)
        heights = [self._height(strip) for strip in strips]
        width = self.left + columns * (side + _GAP) - _GAP + _MARGIN
        height = 2 * _MARGIN + bands * (sum(heights) + _BAND - _GAP) - _BAND
        self.page = Image.new("RGB", (width, height), _PAPER)
        self.draw = ImageDraw.Draw(self.page)

    def strip(self, strip: Strip, first: int) -> None:
        """The strip's tiles from `first` on, one row of them."""
        self._label(strip.label)
        for column, tile in enumerate(strip.tiles[first : first + self.columns]):
            self._tile(tile, self.left + column * (self.side + _GAP))
        self.top += self._height(strip)

    def png(self) -> bytes:
        return pictures.encode(self.page)

    def _height(self, strip: Strip) -> int:
        captions = any(tile.caption for tile in strip.tiles)
        return self.side + _GAP + (int(_SMALL * _LINE) + _FRAME if captions else 0)

    def _label(self, label: str) -> None:
        lines = label.split("\n")
        step = int(_TEXT * _LINE)
        y = self.top + (self.side - step * len(lines)) // 2
        for number, line in enumerate(lines):
            font = _font(_TEXT, "" if number else "-Bold")
            place = (self.left - 2 * _GAP, y + number * step)
            self.draw.text(place, line, fill=_INK, font=font, anchor="ra")

    def _tile(self, tile: Tile, x: int) -> None:
        box = (x, self.top, x + self.side - 1, self.top + self.side - 1)
        if tile.image is None:
            self.draw.rectangle(box, outline=_PALE, width=2)
        else:
            self._paste(tile.image, x)
        if tile.frame is not None:
            around = (box[0] - _FRAME, box[1] - _FRAME, box[2] + _FRAME, box[3] + _FRAME)
            self.draw.rectangle(around, outline=tile.frame, width=_FRAME)
        if tile.caption:
            colour = plots.GREY if tile.frame is None else tile.frame
            place = (x + self.side / 2, self.top + self.side + _FRAME + 1)
            self.draw.text(place, tile.caption, fill=colour, font=_font(_SMALL), anchor="ma")

    def _paste(self, image: Tensor, x: int) -> None:
        whole = max(1, self.side // max(image.shape[-2:]))
        rounded = (image * (255 / self.shade)).round() * (self.shade / 255)  # to be clipped
        shown = pictures.picture(rounded, whole)
        offset = ((self.side - shown.width) // 2, (self.side - shown.height) // 2)
        self.page.paste(shown, (x + offset[0], self.top + offset[1]))


def _font(size: int, style: str = "") -> ImageFont.FreeTypeFont:
    """The serif of the plots, from matplotlib's own files: the same bits on every machine."""
    try:
        import matplotlib as mpl
        from PIL import ImageFont
    except ImportError as error:
        raise MissingExtra("matplotlib and Pillow", "plots") from error
    file = Path(mpl.get_data_path()) / "fonts" / "ttf" / f"DejaVuSerif{style}.ttf"
    # The basic layout uses FreeType alone; Raqm, where installed, would place letters differently.
    return ImageFont.truetype(str(file), size, layout_engine=ImageFont.Layout.BASIC)
