"""Pictures from tensors: PNG bytes, data URIs, and originals beside recoveries."""

from __future__ import annotations

import base64
import io
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from spear.errors import MissingExtra

if TYPE_CHECKING:
    from PIL.Image import Image as Picture

_GAP, _MARGIN, _TEXT = 6, 14, 22
_WIDE = 1920  # pixels of a row of tiles: beyond, small ones are not enlarged
_INK, _PAPER = (32, 33, 36), (255, 255, 255)


def png(image: Tensor, scale: int = 1) -> bytes:
    """One image (C, H, W) in [0, 1], clipped for showing, as PNG."""
    return encode(picture(image, scale))


def data_uri(image: Tensor) -> str:
    """The image as a data URI, for a page that needs no other file."""
    return "data:image/png;base64," + base64.b64encode(png(image)).decode("ascii")


def side_by_side(originals: Tensor, recovered: Tensor, caption: str, columns: int = 10) -> bytes:
    """A PNG with rows of originals (b, C, H, W) above the recoveries of the same samples."""
    try:
        from PIL import Image, ImageDraw, ImageFont
    except ImportError as error:
        raise MissingExtra("Pillow", "cli") from error
    edge, columns = originals.shape[-1], min(columns, len(originals))
    tile = 2 * edge if edge < 96 and 2 * edge * columns < _WIDE else edge
    bands = -(-len(originals) // columns)
    band = 2 * (_TEXT + tile) + _GAP + 2 * _MARGIN
    width = 2 * _MARGIN + columns * (tile + _GAP) - _GAP
    sheet = Image.new("RGB", (width, bands * band), _PAPER)
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(15)
    for part in range(bands):
        top = part * band + _MARGIN
        rows = (("what the client kept private", originals), (caption, recovered))
        for row, (text, images) in enumerate(rows):
            y = top + row * (_TEXT + tile + _GAP)
            draw.text((_MARGIN, y), text, fill=_INK, font=font)
            for column in range(columns):
                i = part * columns + column
                if i < len(images):
                    tile_image = picture(images[i]).resize((tile, tile), Image.Resampling.NEAREST)
                    sheet.paste(tile_image, (_MARGIN + column * (tile + _GAP), y + _TEXT))
    return encode(sheet)


def picture(image: Tensor, scale: int = 1) -> Picture:
    """One image (C, H, W) in [0, 1] for Pillow, clipped, each pixel a square of `scale` pixels."""
    try:
        from PIL import Image
    except ImportError as error:
        raise MissingExtra("Pillow", "cli") from error
    pixels = (image.detach().double().nan_to_num(0.5).clamp(0, 1) * 255).round().to(torch.uint8)
    if pixels.shape[0] == 1:
        pixels = pixels.expand(3, -1, -1)
    shown = Image.fromarray(pixels.permute(1, 2, 0).cpu().contiguous().numpy())
    if scale == 1:
        return shown
    size = (shown.width * scale, shown.height * scale)
    return shown.resize(size, Image.Resampling.NEAREST)


def encode(shown: Picture) -> bytes:
    """A PNG, as small as zlib makes it."""
    buffer = io.BytesIO()
    shown.save(buffer, format="PNG", optimize=True)
    return buffer.getvalue()
