"""Disjoint crops of the photos that come with scikit-image, for the demo."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor

from spear.errors import InvalidOption, MissingExtra

# Photos with something to see in every crop, by what they show, and scikit-image's names for them;
# colour photos first.
_NAMES = {
    "astronaut": "astronaut",
    "cat": "chelsea",
    "coffee": "coffee",
    "rocket": "rocket",
    "retina": "retina",
    "galaxies": "hubble_deep_field",
    "tissue": "immunohistochemistry",
    "motorcycle": "stereo_motorcycle",
    "photographer": "camera",
    "coins": "coins",
}
PHOTOS = tuple(_NAMES)


Crop = tuple[str, Any, tuple[int, int, int, int]]  # photo, image, box


def photo_crops(
    count: int, size: int = 64, seed: int = 0, *, most_alike: float | None = None
) -> tuple[Tensor, list[str]]:
    """`count` disjoint square crops, (count, 3, size, size) in [0, 1], and a name for each.

    Args:
        count: how many.
        size: pixels of an edge.
        seed: which ones; 0 has those with most to see.
        most_alike: leaves out a crop whose cosine with one chosen before is larger (pixels about mid
            grey), such as one more piece of night sky.
    """
    try:
        from PIL import Image
        from skimage import data
    except ImportError as error:
        raise MissingExtra("scikit-image", "cli") from error
    if count < 1 or size < 8:
        raise InvalidOption(f"expected count >= 1 and size >= 8, got {count} and {size}")
    photos = {name: getattr(data, theirs)() for name, theirs in _NAMES.items()}
    photos["motorcycle"] = photos["motorcycle"][0]  # the left eye's
    images = {name: Image.fromarray(photo).convert("RGB") for name, photo in photos.items()}
    splits = 1
    while True:  # the coarsest grid with enough squares
        crops: list[Crop] = []
        for name, image in images.items():
            edge = min(image.size) // splits
            if edge < size:
                continue
            for top in range(0, image.height - edge + 1, edge):
                for left in range(0, image.width - edge + 1, edge):
                    crops.append((name, image, (left, top, left + edge, top + edge)))
        if len(crops) >= count:
            chosen = _one_of_each_first(crops, seed)
            if most_alike is not None:
                chosen = _unlike(chosen, most_alike, count)
            if len(chosen) >= count:
                break
        if not crops:
            unlike = "" if most_alike is None else " that are not nearly alike"
            raise InvalidOption(
                f"the photos are too small for {count} crops of {size} x {size} pixels{unlike}: ask "
                "for fewer or smaller ones"
            )
        splits += 1
    chosen = chosen[:count]
    tiles = [
        torch.frombuffer(
            bytearray(image.crop(box).resize((size, size)).tobytes()), dtype=torch.uint8
        )
        for _, image, box in chosen
    ]
    pixels = torch.stack(tiles).view(count, size, size, 3).permute(0, 3, 1, 2).float() / 255
    names = [name for name, _, _ in chosen]
    numbered = [f"{name} {names[: i + 1].count(name)}" for i, name in enumerate(names)]
    return pixels.contiguous(), numbered


def _one_of_each_first(crops: list[Crop], seed: int) -> list[Crop]:
    """One crop of each photo, then a second of each, ...: those with most to see first.

    Seeds other than 0 draw the crops of each photo at random instead.
    """
    draw = random.Random(seed)  # noqa: S311 (a choice of pictures, no secret)
    if seed:
        rank = {id(crop): draw.random() for crop in crops}
    else:
        rank = {id(crop): -_contrast(crop) for crop in crops}
    rounds: list[tuple[int, int, Crop]] = []
    for order, name in enumerate(PHOTOS):
        own = sorted((c for c in crops if c[0] == name), key=lambda c: rank[id(c)])
        rounds += [(turn, order, crop) for turn, crop in enumerate(own)]
    return [crop for _, _, crop in sorted(rounds, key=lambda entry: entry[:2])]


def _unlike(crops: list[Crop], most_alike: float, count: int) -> list[Crop]:
    """The first `count` crops, without those that are nearly like an earlier one."""
    chosen: list[Crop] = []
    directions = torch.zeros(0, 768, dtype=torch.float64)  # (k, 768), of unit length
    for crop in crops:
        about_grey = _thumbnail(crop).flatten() - 127.5
        direction = about_grey / about_grey.norm()
        if bool((directions @ direction <= most_alike).all()):
            chosen.append(crop)
            directions = torch.cat([directions, direction[None]])
        if len(chosen) == count:
            break
    return chosen


def _contrast(crop: Crop) -> float:
    return float(_thumbnail(crop).std(0).sum())


def _thumbnail(crop: Crop) -> Tensor:
    """(256, 3), from 0 to 255."""
    _, image, box = crop
    thumbnail = image.crop(box).resize((16, 16))
    pixels = torch.frombuffer(bytearray(thumbnail.tobytes()), dtype=torch.uint8)
    return pixels.view(256, 3).double()
