"""Datasets in the layouts people have: found, missing, damaged and hostile ones told apart."""

import hashlib
import shutil
import struct

import numpy as np
import pytest
import torch

pytest.importorskip("PIL", reason="needs the cli extra")
from PIL import Image

from spear import data
from spear.errors import InvalidOption, MissingData, NoDataFolder
from support.datasets_on_disk import (
    WNIDS,
    damaged,
    pixels,
    sort_by_class,
    write_cifar,
    write_imagenet,
    write_mnist,
)


def same(images, raw):
    """Whether these are the images, bit by bit."""
    got = (images.read(range(len(images))) * 255).round().byte().flatten(1)
    return torch.equal(got, torch.from_numpy(raw).flatten(1))


@pytest.mark.parametrize(
    "place",
    [
        "cifar-10-batches-py",
        "cifar10/cifar-10-batches-py",
        "CIFAR10/cifar-10-batches-py",
        "cifar10",
        ".",
    ],
)
def test_cifar_is_found(tmp_path, place):
    raw = write_cifar(tmp_path / place)
    assert same(data.cifar10(tmp_path), raw)
    assert same(data.cifar10(tmp_path / place), raw)


@pytest.mark.parametrize("protocol", range(6))
def test_cifar_in_every_pickle_protocol(tmp_path, protocol):
    raw = write_cifar(tmp_path, protocol=protocol)
    assert same(data.cifar10(tmp_path), raw)


def test_cifar_as_python_2_wrote_it(tmp_path):
    raw = pixels(2, 3072)
    written = (
        b"\x80\x02}q\x01(U\x0bbatch_labelq\x02U\x04testq\x03U\x04dataq\x04"
        b"cnumpy.core.multiarray\n_reconstruct\nq\x05cnumpy\nndarray\nq\x06K\x00\x85U\x01b\x87Rq\x07"
        b"(K\x01K\x02M\x00\x0c\x86cnumpy\ndtype\nq\x08U\x02u1K\x00K\x01\x87Rq\x09"
        b"(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89"
        b"T"
        + struct.pack("<i", raw.size)
        + raw.tobytes()
        + b"tbU\x06labelsq\x0a]q\x0b(K\x03K\x09eu."
    )
    (tmp_path / "test_batch").write_bytes(written)
    assert same(data.cifar10(tmp_path), raw)
    assert data.cifar10(tmp_path).labels.tolist() == [3, 9]


def test_training_sets_are_read(tmp_path):
    parts = [write_cifar(tmp_path, f"data_batch_{i}") for i in range(1, 6)]
    assert same(data.cifar10(tmp_path, split="train"), np.concatenate(parts))
    raw = write_mnist(tmp_path / "MNIST" / "raw", "train", 5)
    assert same(data.mnist(tmp_path, split="train"), raw)
    for name, read in {"CIFAR-10": data.cifar10, "MNIST": data.mnist}.items():
        with pytest.raises(MissingData, match=f"{name}'s test set is not in"):
            read(tmp_path)
        with pytest.raises(InvalidOption, match="split to be one of"):
            read(tmp_path, split="validation")


@pytest.mark.parametrize("dotted", [True, False])
@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("place", ["MNIST/raw", "mnist", "MNIST", "."])
def test_mnist_is_found(tmp_path, place, zipped, dotted):
    raw = write_mnist(tmp_path / place, zipped=zipped, dotted=dotted)
    assert same(data.mnist(tmp_path), raw)
    assert same(data.mnist(tmp_path / place), raw)
    if place == "MNIST/raw":
        assert same(data.mnist(tmp_path / "MNIST"), raw)


def test_mnist_unpacked_under_its_zipped_name_and_beside_folders(tmp_path):
    raw = write_mnist(tmp_path)
    path = tmp_path / "t10k-images-idx3-ubyte"
    path.rename(tmp_path / "t10k-images.idx3-ubyte.gz")
    path.mkdir()  # as in Kaggle's copy
    assert same(data.mnist(tmp_path), raw)


@pytest.mark.parametrize("inner", ["images", "."])
def test_tiny_imagenet_sorted_by_class_is_the_same(tiny, inner):
    before = data.tiny_imagenet(tiny.parent)
    raw = before.read(range(200))
    sort_by_class(tiny, inner)
    after = data.tiny_imagenet(tiny)
    assert torch.equal(after.labels, before.labels)
    assert torch.equal(after.read(range(200)), raw)
    (tiny / "wnids.txt").unlink()
    (tiny / "val" / "val_annotations.txt").unlink()
    order = {wnid: i for i, wnid in enumerate(sorted(WNIDS))}
    by_name = data.tiny_imagenet(tiny)
    assert by_name.labels.tolist() == [order[WNIDS[label]] for label in before.labels.tolist()]


def test_tiny_imagenet_training_set(tiny):
    with pytest.raises(MissingData, match="train set is not in"):
        data.tiny_imagenet(tiny, split="train")
    for wnid in WNIDS:
        folder = tiny / "train" / wnid / "images"
        folder.mkdir(parents=True)
        for j in range(2):
            shutil.copy(tiny / "val" / "images" / "val_0.JPEG", folder / f"{wnid}_{j}.JPEG")
    images = data.tiny_imagenet(tiny, split="train")
    assert images.labels.tolist() == [i // 2 for i in range(400)]
    (folder / f"{wnid}_1.JPEG").unlink()
    damaged(lambda: data.tiny_imagenet(tiny, split="train"), "2 in the largest and 1 in", wnid)


@pytest.mark.parametrize("place", ["imagenet", "ImageNet", "imagenet-1k", "."])
@pytest.mark.parametrize("names", [("000", "007", "999"), ("n01440764", "n01443537", "n15075141")])
def test_imagenet_is_found(tmp_path, place, names):
    write_imagenet(tmp_path / place / "val", names)
    (tmp_path / place / "val" / names[0] / ".DS_Store").write_text("")
    for root in (tmp_path, tmp_path / place):
        images = data.imagenet(root, pixels=40)
        labels = [0, 0, 7, 7, 999, 999] if names[0] == "000" else [0, 0, 1, 1, 2, 2]
        assert images.labels.tolist() == labels
        assert images.read([0, 5]).shape == (2, 3, 40, 40)


def test_imagenet_is_scaled_down_when_asked_for(tmp_path):
    folder = tmp_path / "imagenet" / "val" / "000"
    folder.mkdir(parents=True)
    ramp = np.linspace(0, 255, 400, dtype=np.uint8)[:, None, None]  # dark above, bright below
    Image.fromarray(ramp.repeat(500, 1).repeat(3, 2)).save(folder / "ramp.png")
    Image.new("RGB", (99, 300)).save(folder / "narrow.png")
    cut = data.imagenet(tmp_path, pixels=100).read([0])[0, 0, :, 50]
    scaled = data.imagenet(tmp_path, pixels=100, rescaled=True)
    assert len(scaled) == 1
    whole = scaled.read([0])[0, 0, :, 50]
    assert cut.min() > 0.35
    assert cut.max() < 0.65
    assert whole.min() < 0.01
    assert whole.max() > 0.99
    assert torch.allclose(whole, torch.linspace(0, 1, 100), atol=0.01)
    original = data.imagenet(tmp_path, pixels=400)
    assert torch.equal(original.read([0]), data.imagenet(tmp_path, 400, True).read([0]))
    with pytest.raises(InvalidOption, match="pixels <= 400"):
        data.imagenet(tmp_path, pixels=401, rescaled=True)
    with pytest.raises(InvalidOption, match="pixels >= 1"):
        data.imagenet(tmp_path, pixels=0)


def test_real_data_is_read_as_ever(data_root):
    """Measured rows name images by index: neither images nor order may change."""
    known = {
        "cifar10": ("cbb7365de8ed11f0", "3a8176e5db1267e4"),
        "mnist": ("2fd8de6bdb8d1178", "b30cb457d183c513"),
        "tiny_imagenet": ("81bc49d04695b4b3", "ddefbb0c68db6266"),
        "imagenet": ("5f3a36d79d06cb2b", "b433995aa608c7eb"),
    }
    for name, digests in known.items():
        images = getattr(data, name)(data_root)
        some = images.read(range(0, len(images), len(images) // 10))
        both = [hashlib.sha256(part.numpy().tobytes()) for part in (images.labels, some)]
        assert tuple(digest.hexdigest()[:16] for digest in both) == digests, name


def test_real_layouts_give_the_same_images(data_root, tmp_path):
    tiny = tmp_path / "tiny-imagenet-200"
    (tiny / "val").mkdir(parents=True)
    source = data_root.resolve() / "tiny-imagenet-200"
    shutil.copy(source / "wnids.txt", tiny)
    rows = (source / "val" / "val_annotations.txt").read_text().splitlines()
    for name, wnid in (row.split("\t")[:2] for row in rows):
        (tiny / "val" / wnid).mkdir(exist_ok=True)
        (tiny / "val" / wnid / name).symlink_to(source / "val" / "images" / name)
    before, after = data.tiny_imagenet(data_root), data.tiny_imagenet(tmp_path)
    assert torch.equal(before.labels, after.labels)
    assert torch.equal(before.read([0, 77, 9999]), after.read([0, 77, 9999]))
    val = tmp_path / "imagenet-1k" / "val"
    val.mkdir(parents=True)
    for folder in (data_root.resolve() / "imagenet" / "val").iterdir():
        (val / f"n{folder.name:0>8}").symlink_to(folder)
    before, after = data.imagenet(data_root, 256), data.imagenet(tmp_path, 256)
    assert torch.equal(before.read([0, 200, 399]), after.read([0, 200, 399]))
    assert len(data.adult(data_root / "adult")) == 32_561


def test_missing_datasets_say_where_to_get_them(tmp_path):
    readers = {
        data.cifar10: ("cifar-10-batches-py/test_batch", "cs.toronto.edu", "tar -xz"),
        data.mnist: ("MNIST/raw/t10k-images-idx3-ubyte", "ossci-datasets", "curl"),
        data.tiny_imagenet: ("tiny-imagenet-200/val", "cs231n.stanford.edu", "unzip"),
        data.imagenet: ("imagenet/val", "image-net.org", "torchvision"),
        data.adult: ("adult/adult.data", "archive.ics.uci.edu", "unzip"),
    }
    for read, said in readers.items():
        with pytest.raises(MissingData) as error:
            read(tmp_path)
        for words in ("is not in", str(tmp_path), *said):
            assert words in str(error.value)
        with pytest.raises(NoDataFolder, match="does not exist"):
            read(tmp_path / "nowhere")
        (tmp_path / "file").touch()
        with pytest.raises(NoDataFolder, match="is not a folder"):
            read(tmp_path / "file")
    (tmp_path / "cifar-10-python.tar.gz").touch()
    with pytest.raises(
        MissingData, match=r"found cifar-10-python\.tar\.gz, which must be unpacked"
    ):
        data.cifar10(tmp_path)


def test_datasets_are_not_taken_for_one_another(tiny, tmp_path):
    write_mnist(tmp_path / "FashionMNIST" / "raw")
    with pytest.raises(MissingData):
        data.mnist(tmp_path)
    sort_by_class(tiny)
    with pytest.raises(MissingData):
        data.imagenet(tiny, pixels=32)
    write_imagenet(tmp_path / "val", ("n01440764",))
    with pytest.raises(MissingData):
        data.tiny_imagenet(tmp_path / "val")
