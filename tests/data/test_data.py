import pytest
import torch

from spear import data
from spear.data.photos import photo_crops
from spear.errors import InvalidOption
from support.datasets_on_disk import write_cifar, write_mnist


@pytest.mark.parametrize(
    ("read", "write"), [(data.cifar10, write_cifar), (data.mnist, write_mnist)]
)
def test_normalised_batches_become_pixels_again(tmp_path, read, write):
    raw = torch.from_numpy(write(tmp_path)).flatten(1)  # (k, n)
    images = read(tmp_path)
    x, y = images.batch([2, 0])
    assert y.tolist() == [2, 0]
    assert torch.allclose(images.to_pixels(x) * 255, raw[[2, 0]].double(), atol=1e-4)
    plain, _ = images.batch([2, 0], normalise=False)
    assert torch.equal((plain * 255).round().byte(), raw[[2, 0]])


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


def test_photo_crops_may_leave_out_what_is_nearly_alike():
    pytest.importorskip("skimage", reason="needs the cli extra")
    cosines = []
    for most_alike in (None, 0.8):
        crops, names = photo_crops(60, 16, most_alike=most_alike)
        assert len(set(names)) == 60
        about_grey = torch.nn.functional.normalize(crops.flatten(1) - 0.5)
        cosines.append(float((about_grey @ about_grey.T - 2 * torch.eye(60)).max()))
    assert cosines[0] > 0.9
    assert cosines[1] <= 0.8 + 1e-6
    with pytest.raises(InvalidOption, match="pixels that are not nearly alike: ask for fewer"):
        photo_crops(200, 96, most_alike=0.8)


def test_photo_crops_have_limits():
    pytest.importorskip("skimage", reason="needs the cli extra")
    with pytest.raises(InvalidOption, match="count >= 1"):
        photo_crops(0)
    with pytest.raises(InvalidOption, match="too small for 5000 crops"):
        photo_crops(5000, 128)
    with pytest.raises(InvalidOption, match="too small for 2 crops"):
        photo_crops(2, 100_000)
