"""Damaged, half-copied and hostile datasets: told at once, by file, with nothing run or allocated."""

import gzip
import os
import pickle
import shutil
import struct

import numpy as np
import pytest

pytest.importorskip("PIL", reason="needs the cli extra")

from spear import data
from spear.errors import DamagedData, DataError, MissingData
from support.datasets_on_disk import (
    WNIDS,
    damaged,
    idx,
    jpeg,
    pixels,
    sort_by_class,
    write_cifar,
    write_imagenet,
    write_mnist,
)
from support.hostile_files import Call


@pytest.mark.parametrize(
    ("reader", "folder"),
    [
        (data.cifar10, "cifar-10-batches-py"),
        (data.mnist, "MNIST/raw"),
        (data.tiny_imagenet, "tiny-imagenet-200"),
        (data.imagenet, "imagenet"),
        (data.imagenet, "imagenet/val"),
        (data.adult, "adult"),
    ],
)
def test_empty_wrong_and_looping_folders_are_damaged(tmp_path, reader, folder):
    path = tmp_path / folder
    path.mkdir(parents=True)
    damaged(lambda: reader(tmp_path), str(path.parent if path.name == "raw" else path), "again")
    for i in range(5):
        (path / f"holiday{i}.txt").touch()
    said = damaged(lambda: reader(tmp_path))
    assert "holiday0.txt, holiday1.txt, holiday2.txt and 2 more" in said or path.name == "val"
    shutil.rmtree(path)
    path.symlink_to(path)
    damaged(lambda: reader(tmp_path), "again")
    path.unlink()
    path.touch()
    damaged(lambda: reader(tmp_path), "again")


def test_a_name_that_is_no_file_is_damaged(tmp_path):
    path = tmp_path / "test_batch"
    for make in (path.mkdir, lambda: path.symlink_to(path), lambda: os.mkfifo(path)):
        make()
        damaged(lambda: data.cifar10(tmp_path), str(path), "again")
        path.rmdir() if path.is_dir() else path.unlink()
    path.symlink_to("/dev/zero")
    damaged(lambda: data.cifar10(tmp_path), "expected a file")


def test_damaged_cifar(tmp_path):
    def says(*words):
        damaged(lambda: data.cifar10(tmp_path), str(path), "again", *words)

    write_cifar(tmp_path)
    path = tmp_path / "test_batch"
    whole = path.read_bytes()
    for cut in (0, 1, 5, 60, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:cut])
        says("incomplete")
    path.write_bytes(b"\n<!DOCTYPE html><html>Not found</html>")
    says("it is a web page")
    for labels in ([0, 1, 2], [0, 1, 2, 10], [0, 1, 2, -1], [0, 1, 2, "3"], "0123", None):
        path.write_bytes(pickle.dumps({b"data": pixels(4, 3072), b"labels": labels}, protocol=2))
        says("labels")
    for raw in (pixels(4, 3071), pixels(4, 32, 96), pixels(4, 3072).astype(np.int64), [1, 2]):
        path.write_bytes(pickle.dumps({b"data": raw, b"labels": [0, 1, 2, 3]}, protocol=2))
        says("N x 3072 pixels")
    path.write_bytes(pickle.dumps({b"data": pixels(4, 3072), b"fine_labels": [1] * 4}, protocol=2))
    says("CIFAR-100")
    path.write_bytes(pickle.dumps([1, 2, 3], protocol=2))
    says("expected a pickled dict")
    path.write_bytes(pickle.dumps({b"data": pixels(1, 3072) * 0.5, b"labels": [0]}, protocol=2))
    says("expected nothing but arrays")
    with path.open("wb") as file:
        file.truncate(10**12)  # takes no room on disk
    says("expected at most")


def test_half_copied_training_batches_are_named(tmp_path):
    for i in (1, 2, 5):
        write_cifar(tmp_path, f"data_batch_{i}")
    damaged(
        lambda: data.cifar10(tmp_path, split="train"), "data_batch_3, data_batch_4", "half-copied"
    )


def hostile(marker):
    """Pickles that run code, or that make Python's own unpickler take gigabytes or crash."""
    values = {
        "os.system": Call(os.system, f"touch {marker}"),
        "eval": Call(eval, f"open({str(marker)!r}, 'w')"),
        "open": Call(open, str(marker), "w"),
        "getattr": Call(getattr, "x", "join"),
        "object dtype": np.array([Call(os.system, f"touch {marker}")], dtype=object),
        "huge array": Call(np.zeros(0).__reduce__()[0], np.ndarray, (2**40,), b"d"),
        "fromfile": Call(np.fromfile, "/etc/passwd"),
        "class": DataError("x"),
    }
    pickles = {
        f"{name} {protocol}": pickle.dumps({b"data": value, b"labels": []}, protocol=protocol)
        for name, value in values.items()
        for protocol in (0, 2, 4)
    }
    encode = b"c_codecs\nencode\n"
    text = b"X" + struct.pack("<I", 2**20) + b"a" * 2**20 + b"q\x01"
    reconstruct = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R"
    return pickles | {
        "memo index": b"\x80\x02}Nr\xff\xff\xff\x7f0.",
        "memo index kept": b"\x80\x02}r\xff\xff\xff\x7f.",
        "deep key": b"\x80\x02})" + b"\x85" * 300_000 + b"Ns.",
        "wide key": b"\x80\x02})" + b"q\x01h\x01\x86" * 60 + b"Ns.",
        "huge bytes": b"\x80\x04}\x8e" + struct.pack("<Q", 2**62) + b"abc.",
        "huge text": b"\x80\x04}X" + struct.pack("<I", 2**32 - 1) + b"abc.",
        "text many times": b"\x80\x02]"
        + text
        + (encode + b"h\x01X\x06\x00\x00\x00latin1\x86R") * 9999
        + b".",
        "many lists": b"\x80\x02" + b"]" * 1_000_100 + b".",
        "huge shape": b"\x80\x02"
        + reconstruct
        + b"(K\x01("
        + b"\x8a\xfe"
        + b"\x7f" * 254
        + b"tNNNtb.",
        "inst": b"(S'touch " + str(marker).encode() + b"'\nios\nsystem\n.",
        "newobj": b"\x80\x02cbuiltins\nobject\n)\x81.",
        "persistent": b"\x80\x02K\x01Q.",
        "extension": b"\x80\x02\x82\x01.",
        "state of a list": b"\x80\x02]}b.",
        "empty stack": b"\x80\x02R.",
        "no memo": b"\x80\x02h\x07.",
        "items of nothing": b"\x80\x02K\x01K\x02u.",
        "number": b"I" + b"9" * 10_000 + b"\n.",
    }


NAMES = sorted(hostile("x"))


@pytest.mark.parametrize("name", NAMES)
def test_hostile_pickles_run_nothing_and_stay_small(tmp_path, name):
    marker = tmp_path / "marker"
    (tmp_path / "test_batch").write_bytes(hostile(marker)[name])
    damaged(lambda: data.cifar10(tmp_path), str(tmp_path / "test_batch"))
    assert not marker.exists()


def test_the_hostile_pickles_are_hostile(tmp_path):
    marker = tmp_path / "marker"
    pickle.loads(hostile(marker)["os.system 2"])
    assert marker.exists()


def test_damaged_mnist(tmp_path):
    def says(*words):
        damaged(lambda: data.mnist(tmp_path), "again", *words)

    write_mnist(tmp_path)
    images, labels = tmp_path / "t10k-images-idx3-ubyte", tmp_path / "t10k-labels-idx1-ubyte"
    whole = images.read_bytes()
    for cut in (4, 10, 16, 17, len(whole) - 1):
        images.write_bytes(whole[:cut])
        says(images.name)
    images.write_bytes(whole + b"x")
    says("too many")
    images.write_bytes(b"\x00\x00\x08\x03" + b"\xff" * 12 + b"x" * 50)
    says("another file")
    images.write_bytes(b"\x00\x00\x08\x03\x00\x00\xff\xff" + whole[8:])  # 65,535 images
    says("another file")
    images.write_bytes(b"\x00\x00\x08\xff" + whole[4:])
    says("another file")
    images.write_bytes(idx(pixels(3, 32, 32)))
    says("1 to 10,000 x 28 x 28", "3 x 32 x 32")
    images.write_bytes(whole)
    labels.write_bytes(idx(np.zeros(4, np.uint8)))
    says("3 images", "4 labels")
    labels.write_bytes(idx(np.array([1, 2, 10], np.uint8)))
    says("labels from 0 to 9, got 10")
    labels.unlink()
    says("expected t10k-labels-idx1-ubyte as well", "half-copied")


def test_damaged_gzip_files(tmp_path):
    def says(*words):
        damaged(lambda: data.mnist(tmp_path), str(path), "again", *words)

    write_mnist(tmp_path, zipped=True)
    path = tmp_path / "t10k-images-idx3-ubyte.gz"
    whole = path.read_bytes()
    for cut in (5, 11, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:cut])
        says("incomplete")
    middle = len(whole) // 2
    path.write_bytes(whole[:middle] + bytes([whole[middle] ^ 255]) + whole[middle + 1 :])
    says("cannot be unpacked")
    path.write_bytes(b"<html><body>404</body></html>")
    says("not an idx file", "web page")
    path.write_bytes(gzip.compress(bytes(2**24)) * 128)  # 2 GB of zeros in 2 MB
    says("unpacks to more than")


def test_another_dataset_in_mnists_files(data_root, tmp_path):
    real = data.mnist(data_root)
    labels = real.labels.byte().numpy()
    write_mnist(tmp_path, count=10_000, labels=labels)
    assert len(data.mnist(tmp_path)) == 10_000
    write_mnist(tmp_path, count=10_000, labels=labels[::-1].copy())
    damaged(lambda: data.mnist(tmp_path), "those of another dataset")


def test_half_copied_tiny_imagenet_is_told_when_opened(tiny):
    val = tiny / "val"
    for i in range(190, 200):
        (val / "images" / f"val_{i}.JPEG").unlink()
    damaged(
        lambda: data.tiny_imagenet(tiny),
        "the 200 pictures",
        "got 190 of them",
        "half-copied",
        "again",
    )
    for i in range(190, 200):
        jpeg(val / "images" / f"val_{i}.JPEG")
    assert len(data.tiny_imagenet(tiny)) == 200
    (val / "images" / "val_7.JPEG").write_bytes(b"")
    damaged(lambda: data.tiny_imagenet(tiny), "val_7.JPEG is empty")
    shutil.rmtree(val / "images")
    damaged(lambda: data.tiny_imagenet(tiny), "got 0 of them")


def test_damaged_lists_of_tiny_imagenet(tiny):
    def says(*words):
        damaged(lambda: data.tiny_imagenet(tiny), "again", *words)

    lists = {name: tiny / name for name in ("wnids.txt", "val/val_annotations.txt")}
    for name, path in lists.items():
        whole = path.read_text()
        path.write_text(whole[: len(whole) // 2])
        says(str(tiny))
        path.write_bytes(b"\xff\xfe")
        says("expected text", name)
        path.unlink()
        says(name)
        path.write_text(whole)
    lines = whole.splitlines()
    path.write_text("\n".join(lines[:150]))
    says("got 150 of them and 50 others")
    path.write_text("\n".join([*lines[:-1], "val_199.JPEG\tn99999999"]))
    says("line 200", "n99999999")
    path.write_text("\n".join(["../../secret.JPEG\t" + WNIDS[0], *lines[1:]]))
    says("199 of them")


def test_half_sorted_tiny_imagenet(tiny):
    sort_by_class(tiny)
    victim = tiny / "val" / WNIDS[5]
    (victim / "images").rename(tiny / "kept")
    (victim / "images").mkdir()
    damaged(lambda: data.tiny_imagenet(tiny), "0 in", WNIDS[5])
    (victim / "images").rmdir()
    victim.rmdir()
    damaged(lambda: data.tiny_imagenet(tiny), "got 199", "half-copied")


def test_truncated_pictures_are_named_when_read(tiny, tmp_path):
    pictures = tiny / "val" / "images"
    for i, content in enumerate(
        [
            (pictures / "val_0.JPEG").read_bytes()[:400],
            b"<html>404</html>",
            (pictures / "val_2.JPEG").read_bytes()[:5],
        ]
    ):
        (pictures / f"val_{i}.JPEG").write_bytes(content)
    jpeg(pictures / "val_3.JPEG", (64, 63))
    images = data.tiny_imagenet(tiny)
    images.read(range(4, 200))
    for i in range(4):
        damaged(lambda i=i: images.read([i]), f"val_{i}.JPEG", "again")


def test_damaged_imagenet(tmp_path):
    def says(*words, root=tmp_path):
        damaged(lambda: data.imagenet(root, 40), "again", *words)

    val = tmp_path / "imagenet" / "val"
    write_imagenet(val)
    photo = val / "007" / "ILSVRC2012_val_00000001.JPEG"
    whole = photo.read_bytes()
    photo.write_bytes(b"<html>404</html>")
    says(str(photo))
    photo.write_bytes(b"")
    says(f"{photo} is empty")
    photo.write_bytes(whole[: len(whole) // 2])
    images = data.imagenet(tmp_path, 40)
    damaged(lambda: images.read([3]), str(photo), "again")
    png = b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR" + struct.pack(">II", 12_000, 12_000)
    photo.write_bytes(png + b"\x08\x02\x00\x00\x00" + b"\x00" * 50)  # 432 MB if it were decoded
    says(str(photo))
    photo.unlink()
    photo.symlink_to(photo)
    says(str(photo))
    photo.unlink()
    (val / "007" / "ILSVRC2012_val_00000000.JPEG").unlink()
    says("007: expected photos, got none", "half-copied")
    (val / "007").rmdir()
    (val / "1000").mkdir()
    says("expected classes 0 to 999, got 1,000")
    (val / "1000").rename(val / "cats")
    says("expected one folder per class, got cats")
    (val / "cats").rename(val / "n01440764")
    with pytest.raises(DamagedData, match="by index or by WordNet id, got both"):
        data.imagenet(tmp_path, 40)
    shutil.rmtree(val)
    jpeg(val / "ILSVRC2012_val_00000001.JPEG")
    with pytest.raises(
        DamagedData, match=r"1 photos outside of any: sort them, as torchvision does"
    ):
        data.imagenet(tmp_path, 40)


def test_damaged_adult(tmp_path):
    (tmp_path / "adult.test").write_text("|1x3 Cross validator\n")
    damaged(lambda: data.adult(tmp_path, "test"), "expected adult.data as well", "half-copied")
    with pytest.raises(MissingData, match=r"train set is not in.*adult/adult\.data"):
        data.adult(tmp_path)
    with (tmp_path / "adult.data").open("wb") as file:
        file.truncate(10**12)
    damaged(lambda: data.adult(tmp_path), "expected at most")
    (tmp_path / "adult.data").unlink()
    (tmp_path / "adult.data").symlink_to("adult.data")
    damaged(lambda: data.adult(tmp_path), "cannot be read")
