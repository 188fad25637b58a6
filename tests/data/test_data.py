import gzip
import pickle

import numpy as np
import pytest
import torch

from spear import data
from spear.data.photos import photo_crops
from spear.errors import DataError, InvalidOption


def write_cifar(root, content):
    folder = root / "cifar-10-batches-py"
    folder.mkdir()
    (folder / "test_batch").write_bytes(pickle.dumps(content, protocol=2))


def test_cifar_round_trip(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (5, 3072), dtype=np.uint8)
    write_cifar(tmp_path, {b"data": pixels, b"labels": [0, 9, 3, 3, 1]})
    images = data.cifar10(tmp_path)
    x, y = images.batch([1, 4])
    assert y.tolist() == [9, 1]
    back = images.to_pixels(x) * 255
    assert torch.allclose(back, torch.from_numpy(pixels[[1, 4]]).double(), atol=1e-4)
    raw, _ = images.batch([1, 4], normalise=False)
    assert torch.equal((raw * 255).round().byte(), torch.from_numpy(pixels[[1, 4]]))


class Bomb:
    def __reduce__(self):
        return (print, ("code ran",))


def test_a_pickle_that_runs_code_is_refused(tmp_path, capsys):
    write_cifar(tmp_path, {b"data": Bomb(), b"labels": []})
    with pytest.raises(DataError, match="expected nothing but arrays"):
        data.cifar10(tmp_path)
    assert "code ran" not in capsys.readouterr().out


def test_wrong_shapes_and_missing_folders(tmp_path):
    with pytest.raises(DataError, match="is not in"):
        data.cifar10(tmp_path)
    with pytest.raises(DataError, match="is not in"):
        data.tiny_imagenet(tmp_path)
    write_cifar(tmp_path, {b"data": np.zeros((2, 10), np.uint8), b"labels": [0, 1]})
    with pytest.raises(DataError, match="3072"):
        data.cifar10(tmp_path)


def idx(array):
    header = bytes([0, 0, 8, array.ndim]) + b"".join(d.to_bytes(4, "big") for d in array.shape)
    return header + array.tobytes()


@pytest.mark.parametrize("zipped", [True, False])
def test_mnist_round_trip(tmp_path, zipped):
    folder = tmp_path / "MNIST" / "raw"
    folder.mkdir(parents=True)
    pixels = np.random.default_rng(0).integers(0, 256, (3, 28, 28), dtype=np.uint8)
    files = {
        "t10k-images-idx3-ubyte": idx(pixels),
        "t10k-labels-idx1-ubyte": idx(np.array([4, 5, 6], np.uint8)),
    }
    for name, content in files.items():
        path = folder / (f"{name}.gz" if zipped else name)
        path.write_bytes(gzip.compress(content) if zipped else content)
    images = data.mnist(tmp_path)
    x, y = images.batch([2, 0], normalise=False)
    assert y.tolist() == [6, 4]
    assert torch.equal((x * 255).round().byte(), torch.from_numpy(pixels[[2, 0]]).flatten(1))


def test_a_truncated_idx_file_is_noticed(tmp_path):
    folder = tmp_path / "MNIST" / "raw"
    folder.mkdir(parents=True)
    (folder / "t10k-labels-idx1-ubyte").write_bytes(idx(np.zeros(3, np.uint8)))
    (folder / "t10k-images-idx3-ubyte").write_bytes(idx(np.zeros((3, 28, 28), np.uint8))[:-5])
    with pytest.raises(DataError, match="incomplete"):
        data.mnist(tmp_path)
    (folder / "t10k-images-idx3-ubyte").write_bytes(b"not an idx file")
    with pytest.raises(DataError, match="not an idx file"):
        data.mnist(tmp_path)


def test_photo_crops_are_disjoint_and_repeatable():
    pytest.importorskip("skimage", reason="needs the cli extra")
    crops, names = photo_crops(20, 32)
    again, _ = photo_crops(20, 32)
    other, _ = photo_crops(20, 32, seed=1)
    assert crops.shape == (20, 3, 32, 32)
    assert torch.equal(crops, again)
    assert not torch.equal(crops, other)
    assert len(set(names)) == 20
    assert len({name.split()[0] for name in names}) == 10
    flat = crops.flatten(1)
    distance = torch.cdist(flat, flat) + 1e9 * torch.eye(20)
    assert float(distance.min()) > 0.5
    assert 0 <= float(crops.min()) < float(crops.max()) <= 1


def test_photo_crops_have_limits():
    pytest.importorskip("skimage", reason="needs the cli extra")
    with pytest.raises(InvalidOption, match="count >= 1"):
        photo_crops(0)
    with pytest.raises(InvalidOption, match="too small for 5000 crops"):
        photo_crops(5000, 128)
    with pytest.raises(InvalidOption, match="too small for 2 crops"):
        photo_crops(2, 100_000)
