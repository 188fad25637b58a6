"""Small datasets written to disk in the layouts people have, for tests that read or damage them."""

import gzip
import pickle
import resource

import numpy as np
import pytest

from spear.errors import DamagedData

RANDOM = np.random.default_rng(0)
WNIDS = [f"n{(i * 7919) % 100_000_000:08d}" for i in range(1, 201)][::-1]  # not in their order


def pixels(count, *shape):
    return RANDOM.integers(0, 256, (count, *shape), dtype=np.uint8)


def write_cifar(folder, name="test_batch", count=4, protocol=2):
    folder.mkdir(parents=True, exist_ok=True)
    content = {b"data": pixels(count, 3072), b"labels": [i % 10 for i in range(count)]}
    (folder / name).write_bytes(pickle.dumps(content, protocol=protocol))
    return content[b"data"]


def idx(array):
    shape = b"".join(n.to_bytes(4, "big") for n in array.shape)
    return bytes([0, 0, 8, array.ndim]) + shape + array.tobytes()


def write_mnist(folder, prefix="t10k", count=3, dotted=False, zipped=False, labels=None):
    folder.mkdir(parents=True, exist_ok=True)
    images, dot = pixels(count, 28, 28), "." if dotted else "-"
    labels = np.arange(count, dtype=np.uint8) % 10 if labels is None else labels
    for kind, array in ((f"images{dot}idx3", images), (f"labels{dot}idx1", labels)):
        raw = gzip.compress(idx(array)) if zipped else idx(array)
        (folder / f"{prefix}-{kind}-ubyte{'.gz' if zipped else ''}").write_bytes(raw)
    return images


def jpeg(path, size=(64, 64), seed=0):
    from PIL import Image

    path.parent.mkdir(parents=True, exist_ok=True)
    generator = np.random.default_rng(seed)
    coarse = generator.integers(0, 256, (4, 4, 3), dtype=np.uint8)
    Image.fromarray(coarse).resize(size).save(path, "JPEG", quality=95)


def sort_by_class(folder, inner="images"):
    """What the scripts that go round do with the validation set."""
    val = folder / "val"
    for line in (val / "val_annotations.txt").read_text().splitlines():
        name, wnid = line.split("\t")[:2]
        (val / wnid / inner).mkdir(parents=True, exist_ok=True)
        (val / "images" / name).rename(val / wnid / inner / name)
    (val / "images").rmdir()


def write_imagenet(val, names=("000", "007", "999"), size=(60, 50), each=2):
    for i, name in enumerate(names):
        for j in range(each):
            jpeg(val / name / f"ILSVRC2012_val_{j:08d}.JPEG", size, seed=i)


def write_tiny_imagenet(folder):
    """A picture of each of the 200 classes."""
    for i in range(200):
        jpeg(folder / "val" / "images" / f"val_{i}.JPEG", seed=i)
    rows = [f"val_{i}.JPEG\t{WNIDS[i * 3 % 200]}\t0\t0\t9\t9" for i in range(200)]
    (folder / "val" / "val_annotations.txt").write_text("\n".join(rows) + "\n")
    (folder / "wnids.txt").write_text("\n".join(WNIDS) + "\n")


def damaged(read, *said):
    """The message of the `DamagedData` that reading ends in; memory stays bounded."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(DamagedData) as error:
        read()
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 400_000, f"{grown} kB"
    for words in said:
        assert words in str(error.value)
    return str(error.value)
