"""Datasets in the layouts people have: found, missing, damaged and hostile ones told apart."""

import gzip
import hashlib
import os
import pickle
import resource
import shutil
import struct

import numpy as np
import pytest
import torch

pytest.importorskip("PIL", reason="needs the cli extra")
from PIL import Image

from spear import data
from spear.errors import DamagedData, DataError, InvalidOption, MissingData, NoDataFolder

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
    path.parent.mkdir(parents=True, exist_ok=True)
    generator = np.random.default_rng(seed)
    coarse = generator.integers(0, 256, (4, 4, 3), dtype=np.uint8)
    Image.fromarray(coarse).resize(size).save(path, "JPEG", quality=95)


@pytest.fixture(scope="module")
def tiny_source(tmp_path_factory):
    """One small TinyImageNet: a picture of each of 200 classes, to be copied."""
    folder = tmp_path_factory.mktemp("source") / "tiny-imagenet-200"
    for i in range(200):
        jpeg(folder / "val" / "images" / f"val_{i}.JPEG", seed=i)
    rows = [f"val_{i}.JPEG\t{WNIDS[i * 3 % 200]}\t0\t0\t9\t9" for i in range(200)]
    (folder / "val" / "val_annotations.txt").write_text("\n".join(rows) + "\n")
    (folder / "wnids.txt").write_text("\n".join(WNIDS) + "\n")
    return folder


@pytest.fixture
def tiny(tiny_source, tmp_path):
    shutil.copytree(tiny_source, tmp_path / "tiny-imagenet-200")
    return tmp_path / "tiny-imagenet-200"


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


def same(images, raw):
    """Whether these are the images, bit by bit."""
    got = (images.read(range(len(images))) * 255).round().byte().flatten(1)
    return torch.equal(got, torch.from_numpy(raw).flatten(1))


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


# Layouts


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
    damaged(lambda: data.tiny_imagenet(tiny, split="train"), "2 of most and 1 of", wnid)


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


# Missing


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
        with pytest.raises(NoDataFolder, match="is no folder"):
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


# Damaged


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


class Call:
    def __init__(self, function, *arguments):
        self.parts = function, arguments

    def __reduce__(self):
        return self.parts


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
        "many lists": b"\x80\x02" + b"]" * 3_000_000 + b".",
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
    says("labels of 0 to 9, got 10")
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
    damaged(lambda: data.tiny_imagenet(tiny), "0 of", WNIDS[5])
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
    says("expected folders of classes, got cats")
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
