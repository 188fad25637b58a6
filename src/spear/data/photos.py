"""Real photos that come with scikit-image's wheel: disjoint crops of them, for the demo."""

from __future__ import annotations

import random

import torch
from torch import Tensor

from spear.errors import InvalidOption, MissingExtra

# The photos with something to see in every crop, colour first.
PHOTOS = (
    "astronaut",
    "chelsea",
    "coffee",
    "rocket",
    "retina",
    "hubble_deep_field",
    "immunohistochemistry",
    "stereo_motorcycle",
    "camera",
    "coins",
    "clock",
    "gravel",
    "brick",
    "grass",
)


def photo_crops(count: int, size: int = 64, seed: int = 0) -> tuple[Tensor, list[str]]:
    """`count` disjoint square crops, (count, 3, size, size) in [0, 1], and the photo of each."""
    try:
        from PIL import Image
        from skimage import data
    except ImportError as error:
        raise MissingExtra("scikit-image", "cli") from error
    if count < 1 or size < 8:
        raise InvalidOption(f"expected count >= 1 and size >= 8, got {count} and {size}")
    splits = 1
    while True:  # the coarsest grid with enough squares
        crops = []
        for name in PHOTOS:
            photo = getattr(data, name)()
            image = Image.fromarray(photo[0] if name == "stereo_motorcycle" else photo).convert("RGB")
            edge = min(image.size) // splits
            for top in range(0, image.height - edge + 1, edge):
                for left in range(0, image.width - edge + 1, edge):
                    crops.append((name, image, (left, top, left + edge, top + edge)))
        if len(crops) >= count:
            break
        splits += 1
        if min(min(image.size) // splits for _, image, _ in crops) < size:
            raise InvalidOption(f"the photos give {len(crops)} crops of {size} pixels, not {count}")
    # One crop of each photo, then a second of each, ...: as varied as can be.
    shuffled = random.Random(seed).sample(crops, len(crops))
    seen: dict[str, int] = {}
    rounds = []
    for crop in shuffled:
        seen[crop[0]] = seen.get(crop[0], 0) + 1
        rounds.append((seen[crop[0]], crop))
    chosen = [crop for _, crop in sorted(rounds, key=lambda pair: pair[0])[:count]]
    tiles = [
        torch.frombuffer(bytearray(image.crop(box).resize((size, size)).tobytes()), dtype=torch.uint8)
        for _, image, box in chosen
    ]
    pixels = torch.stack(tiles).view(count, size, size, 3).permute(0, 3, 1, 2).float() / 255
    return pixels.contiguous(), [name for name, _, _ in chosen]
