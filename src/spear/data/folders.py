"""Readers for TinyImageNet and ImageNet, stored on disk as folders of pictures."""

from __future__ import annotations

import os
import re
import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from spear.data.images import ImageData, check_split
from spear.data.known import IMAGENET, TINY_IMAGENET
from spear.data.places import AGAIN, entries, text_of
from spear.errors import DamagedData, InvalidOption, MissingExtra

if TYPE_CHECKING:
    from PIL.Image import Image as Picture

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_LARGEST_TEXT = 2**24  # bytes; TinyImageNet's longest list has 350 kB
_MOST_PIXELS = 80_000_000  # of a photo: 240 MB; ImageNet's largest has 61 million
_SUFFIXES = (".jpeg", ".jpg", ".png")
_WORDNET = re.compile(r"n\d{8}")


def tiny_imagenet(root: Path, split: str = "val") -> ImageData:
    """TinyImageNet's validation ("val") or training ("train") pictures, in `tiny-imagenet-200`.

    The validation set may be in its original layout, `val/images` with annotations, or sorted into one
    folder per class; the order of the pictures is the same. Classes are numbered as in `wnids.txt`, or
    by name where a sorted copy lacks that file.
    """
    check_split(split, ("train", "val"))
    folder = TINY_IMAGENET.find(root)
    (base,) = TINY_IMAGENET.split(root, folder, [split], split)
    if split == "val" and (_names(base / "images") or not _class_folders(base)):
        found = _annotated(folder, base)
    else:
        found = _sorted_by_class(folder, base)
    return ImageData(
        "TinyImageNet",
        (3, 64, 64),
        200,
        torch.tensor([label for _, label in found]),
        MEAN,
        STD,
        _reader([path for path, _ in found], _tiny),
    )


def imagenet(root: Path, pixels: int = 720, rescaled: bool = False) -> ImageData:
    """ImageNet validation photos, one folder per class as in `imagenet/val`, centre-cropped.

    Class folders are named by index, `000` to `999`, or by WordNet id, numbered in sorted order.
    Photos whose shorter side is below `pixels` are left out. The others keep their scale, unless
    `rescaled`: then the shorter side is scaled down to `pixels` first.
    """
    if pixels < 1:
        raise InvalidOption(f"expected pixels >= 1, got {pixels}")
    sizes = photo_sizes(root)
    photos = [(path, label) for path, label, shorter in sizes if shorter >= pixels]
    if not photos:
        largest = max(shorter for *_, shorter in sizes)
        raise InvalidOption(
            f"expected pixels <= {largest}, the shorter side of the largest of {len(sizes):,} photos, "
            f"got {pixels}"
        )

    def middle(photo: Picture) -> NDArray[np.uint8]:
        picture = photo.convert("RGB")
        if rescaled:
            shorter = min(picture.size)
            width, height = (side * pixels // shorter for side in picture.size)
            picture = picture.resize((width, height), _pillow().Resampling.BICUBIC)
        left, top = (picture.width - pixels) // 2, (picture.height - pixels) // 2
        return np.array(picture.crop((left, top, left + pixels, top + pixels)))

    return ImageData(
        "ImageNet",
        (3, pixels, pixels),
        1000,
        torch.tensor([label for _, label in photos]),
        MEAN,
        STD,
        _reader([path for path, _ in photos], middle),
    )


def photo_sizes(root: Path) -> list[tuple[Path, int, int]]:
    """Every ImageNet photo: its path, label and shorter side. Reads only the headers."""
    base = IMAGENET.find(root) / "val"
    names = _class_folders(base, r"\d{1,4}")
    if not names:
        loose = len(_names(base))
        cure = f"sort them, as torchvision does: {IMAGENET.source.line(Path(root))}"
        raise DamagedData(
            f"{base}: expected a folder for each class, got {loose:,} photos outside of any: "
            f"{cure if loose else AGAIN}"
        )
    by_index = all(name.isdigit() for name in names)
    if not by_index and any(name.isdigit() for name in names):
        raise DamagedData(
            f"{base}: expected class folders named by index or by WordNet id, got both"
        )
    labels = [int(name) if by_index else i for i, name in enumerate(names)]
    if max(labels) > 999:
        raise DamagedData(f"{base}: expected classes 0 to 999, got {max(labels):,}: {AGAIN}")
    photos = []
    for name, label in zip(names, labels, strict=True):
        found = _names(base / name)
        if not found:
            raise DamagedData(f"{base / name}: expected photos, got none; half-copied, {AGAIN}")
        photos += [(base / name / file, label) for file in found]
    return [(path, label, _shorter_side(path)) for path, label in photos]


def _annotated(folder: Path, base: Path) -> list[tuple[Path, int]]:
    """The validation set in its original layout: paths and labels in the order of its annotations."""
    index = {wnid: i for i, wnid in enumerate(_wnids(folder))}
    path = base / "val_annotations.txt"
    rows = [line.split("\t") for line in text_of(path, _LARGEST_TEXT).splitlines()]
    for number, row in enumerate(rows, 1):
        if len(row) < 2 or row[1] not in index:
            raise DamagedData(
                f"{path}: line {number}: expected a picture and one of the 200 classes of wnids.txt, "
                f"got {' '.join(row)[:60]!r}: {AGAIN}"
            )
    images = base / "images"
    there, named = set(_names(images)), {row[0] for row in rows}
    if there != named or len(named) != len(rows) or not rows:
        example = min((there ^ named), default="none")
        raise DamagedData(
            f"{images}: expected the {len(named):,} pictures that val_annotations.txt names, "
            f"got {len(there & named):,} of them and {len(there - named):,} others (such as "
            f"{example}); half-copied, {AGAIN}"
        )
    return [(images / row[0], index[row[1]]) for row in rows]


def _sorted_by_class(folder: Path, base: Path) -> list[tuple[Path, int]]:
    """Pictures in `<class>` or `<class>/images`, ordered by number (val) or by class (train)."""
    names = _class_folders(base)
    wnids = _wnids(folder) if os.path.lexists(folder / "wnids.txt") else names
    if set(names) != set(wnids) or len(wnids) != 200:
        absent = len(set(wnids) - set(names))
        raise DamagedData(
            f"{base}: expected a folder for each of 200 classes, got {len(names)} ({absent} of "
            f"wnids.txt are missing); half-copied, {AGAIN}"
        )
    found = []
    for label, wnid in enumerate(wnids):
        inner = base / wnid / "images" if (base / wnid / "images").is_dir() else base / wnid
        found.append([(inner / name, label) for name in _names(inner)])
    counts = {len(pictures) for pictures in found}
    if len(counts) > 1 or not counts.pop():  # a complete set has equally many in each class
        fewest = min(found, key=len)
        raise DamagedData(
            f"{base}: expected as many pictures in each class, got {len(max(found, key=len))} in the "
            f"largest and {len(fewest)} in {wnids[found.index(fewest)]}; half-copied, {AGAIN}"
        )
    pictures = [picture for of_class in found for picture in of_class]
    if all(path.name.startswith("val_") for path, _ in pictures):
        return sorted(pictures, key=lambda picture: _by_number(picture[0].name))
    return pictures


def _wnids(folder: Path) -> list[str]:
    path = folder / "wnids.txt"
    wnids = text_of(path, _LARGEST_TEXT).split()
    if len(set(wnids)) != 200 or len(wnids) != 200:
        raise DamagedData(f"{path}: expected 200 classes, got {len(set(wnids))}: {AGAIN}")
    return wnids


def _class_folders(base: Path, other: str = "") -> list[str]:
    """Names of the class folders: WordNet ids, or names that `other` matches. Others raise an error."""
    folders = [
        entry.name
        for entry in entries(base)
        if os.path.isdir(entry.path) or not os.path.exists(entry.path)  # a link to nowhere
    ]
    pattern = re.compile(rf"{_WORDNET.pattern}|{other}") if other else _WORDNET
    strange = [name for name in folders if not pattern.fullmatch(name) and name != "images"]
    if strange:
        raise DamagedData(
            f"{base}: expected one folder per class, got {', '.join(strange[:3])}: {AGAIN}"
        )
    return [name for name in folders if name != "images"]


def _names(folder: Path) -> list[str]:
    """Names of the pictures in a folder, sorted; none if it does not exist."""
    if not os.path.lexists(folder):
        return []
    found = [entry for entry in entries(folder) if entry.name.lower().endswith(_SUFFIXES)]
    for entry in found:
        try:
            size = entry.stat().st_size
        except OSError as error:
            raise _damaged(Path(entry.path), error) from error
        if not size:
            raise DamagedData(f"{entry.path} is empty: {AGAIN}")
    return [entry.name for entry in found]


def _by_number(name: str) -> tuple[int, str]:
    """val_2.JPEG before val_10.JPEG."""
    digits = re.search(r"\d+(?=\.\w+$)", name)
    return int(digits[0][:18]) if digits else -1, name


def _reader(
    paths: Sequence[Path], prepared: Callable[[Picture], NDArray[np.uint8]]
) -> Callable[[Sequence[int]], Tensor]:
    def read(indices: Sequence[int]) -> Tensor:
        arrays = []
        for i in indices:
            with _opened(paths[i]) as picture:
                arrays.append(prepared(picture))
        return torch.from_numpy(np.stack(arrays)).permute(0, 3, 1, 2).float() / 255

    return read


def _tiny(picture: Picture) -> NDArray[np.uint8]:
    if picture.size != (64, 64):
        raise ValueError(f"expected 64 x 64 pixels, got {picture.width} x {picture.height}")
    return np.array(picture.convert("RGB"))


def _shorter_side(path: Path) -> int:
    with _opened(path) as photo:
        return min(photo.size)


@contextmanager
def _opened(path: Path) -> Iterator[Picture]:
    """A picture whose pixels are not read yet. A damaged file raises DamagedData, then or later."""
    image = _pillow()
    try:
        with image.open(path, formats=("JPEG", "PNG")) as picture:
            if picture.width * picture.height > _MOST_PIXELS:
                raise ValueError(f"{picture.width} x {picture.height} pixels are too many")
            yield picture
    except (
        OSError,  # not a picture, or a truncated one
        SyntaxError,  # a broken PNG
        ValueError,
        EOFError,
        struct.error,
        zlib.error,
        image.DecompressionBombError,
        image.DecompressionBombWarning,  # where warnings are errors
    ) as error:
        raise _damaged(path, error) from error


def _damaged(path: Path, error: BaseException) -> DamagedData:
    return DamagedData(f"{path}: expected a complete picture ({error}): {AGAIN}")


def _pillow() -> Any:
    try:
        from PIL import Image
    except ImportError as error:
        raise MissingExtra("Pillow", "cli") from error
    return Image
