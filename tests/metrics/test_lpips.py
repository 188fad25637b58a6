import pytest
import torch
from torch import nn

from spear import data
from spear.errors import DataError, InvalidOption
from spear.metrics import Lpips, NotMeasured, score_images
from spear.metrics.lpips import FEATURES, HEADS, LAYERS

STACK = nn.Sequential(
    nn.Conv2d(3, 64, 11, stride=4, padding=2),
    nn.ReLU(),
    nn.MaxPool2d(3, 2),
    nn.Conv2d(64, 192, 5, padding=2),
    nn.ReLU(),
    nn.MaxPool2d(3, 2),
    nn.Conv2d(192, 384, 3, padding=1),
    nn.ReLU(),
    nn.Conv2d(384, 256, 3, padding=1),
    nn.ReLU(),
    nn.Conv2d(256, 256, 3, padding=1),
    nn.ReLU(),
)


@pytest.fixture(scope="module")
def lpips(data_root):
    return Lpips.load(data_root / "weights")


@pytest.fixture(scope="module")
def photos(data_root):
    return data.cifar10(data_root).read(range(12))


def write(folder, change=None):
    """Weights of the right shapes and no meaning."""
    generator = torch.Generator().manual_seed(0)
    stack = {
        f"features.{name}": 0.1 * torch.randn(p.shape, generator=generator)
        for name, p in STACK.named_parameters()
    }
    heads = {
        f"lin{i}.model.1.weight": torch.rand(1, shape[0], 1, 1, generator=generator)
        for i, (_, shape, *_) in enumerate(LAYERS)
    }
    if change:
        change(stack, heads)
    torch.save(stack, folder / FEATURES)
    torch.save(heads, folder / HEADS)
    return stack, heads


def by_the_book(stack, heads, x, y):
    """LPIPS written out once more, from its definition, one image pair at a time."""
    STACK.load_state_dict({name.removeprefix("features."): p for name, p in stack.items()})
    total = 0.0
    with torch.no_grad():
        shift, scale = torch.tensor([-0.030, -0.088, -0.188]), torch.tensor([0.458, 0.448, 0.450])
        a, b = (((2 * image - 1).permute(1, 2, 0) - shift) / scale for image in (x, y))
        a, b = a.permute(2, 0, 1)[None], b.permute(2, 0, 1)[None]
        taps = iter(range(5))
        for layer in STACK:
            a, b = layer(a), layer(b)
            if isinstance(layer, nn.ReLU):
                head = heads[f"lin{next(taps)}.model.1.weight"].flatten()
                unit_a, unit_b = (t / (t.norm(dim=1, keepdim=True) + 1e-10) for t in (a, b))
                total += float(((unit_a - unit_b) ** 2 * head[:, None, None]).sum(1).mean())
    return total


@pytest.mark.parametrize("size", [(32, 32), (31, 31), (64, 47)])
def test_it_is_the_published_definition(tmp_path, size):
    stack, heads = write(tmp_path)
    x, y = torch.rand(2, 18, 3, *size, generator=torch.Generator().manual_seed(1))
    found = Lpips.load(tmp_path)(x, y)
    expected = [by_the_book(stack, heads, a, b) for a, b in zip(x, y, strict=True)]
    assert found.tolist() == pytest.approx(expected, rel=1e-4)


def test_equal_images_are_at_distance_zero(lpips, photos):
    assert lpips(photos, photos).tolist() == [0.0] * 12


def test_it_is_symmetric_and_in_its_range(lpips, photos):
    there, back = lpips(photos, photos.flip(0)), lpips(photos.flip(0), photos)
    assert there.tolist() == pytest.approx(back.tolist(), rel=1e-5)
    assert bool(((there > 0.05) & (there < 1.5)).all())


def test_it_grows_with_noise_and_with_blur(lpips, photos):
    noise = torch.randn(photos.shape, generator=torch.Generator().manual_seed(0))
    noisy = [float(lpips(photos + s * noise, photos).mean()) for s in (1e-4, 0.01, 0.05, 0.2)]
    blurred = [
        float(lpips(nn.functional.avg_pool2d(photos, w, 1, w // 2), photos).mean())
        for w in (1, 3, 5, 9)
    ]
    assert noisy == sorted(noisy)
    assert noisy[0] < 1e-4 < 0.1 < noisy[-1]
    assert blurred == sorted(blurred)


def test_it_prefers_a_shift_in_brightness_to_scrambled_pixels(lpips, photos):
    """What PSNR cannot see: the same squared error, once as a tint, once as noise."""
    noise = 0.1 * torch.randn(photos.shape, generator=torch.Generator().manual_seed(0)).sign()
    assert bool((lpips(photos + 0.1, photos) < lpips(photos + noise, photos)).all())


def test_grey_images_are_repeated_to_three_channels(lpips, photos):
    grey, other = photos.mean(1, keepdim=True), photos.flip(0).mean(1, keepdim=True)
    repeated = lpips(grey.expand(-1, 3, -1, -1), other.expand(-1, 3, -1, -1))
    assert torch.equal(lpips(grey, other), repeated)


def test_small_images_are_refused_not_measured_as_zero(tmp_path):
    write(tmp_path)
    lpips = Lpips.load(tmp_path)
    x = torch.rand(2, 1, 28, 28)
    with pytest.raises(InvalidOption, match="at least 31 x 31"):
        lpips(x, x)
    with pytest.raises(InvalidOption, match="at least 31 x 31"):
        lpips.features(torch.rand(2, 2, 64, 64))
    found = score_images(x, x, lpips=lpips)
    assert found.lpips is None
    assert "at least 31 x 31" in str(found.notes["lpips"])


def test_images_are_scored_with_it(lpips, photos):
    found = score_images(photos[[3, 1]], photos, lpips=lpips)
    assert found.lpips.tolist() == [0, 0]
    assert score_images(photos[:0], photos, lpips=lpips).lpips.tolist() == []


def test_absent_weights_are_said(tmp_path):
    found = Lpips.find(tmp_path)
    assert isinstance(found, NotMeasured)
    assert str(found).startswith(f"not computed: weights not found in {tmp_path}")
    x = torch.rand(2, 3, 32, 32)
    assert score_images(x, x, lpips=found).notes["lpips"] is found
    with pytest.raises(DataError, match=r"expected alexnet_features\.pth, lpips_alex_heads\.pth"):
        Lpips.load(tmp_path)


def test_broken_weights_are_said(tmp_path):
    write(tmp_path, lambda stack, _: stack.pop("features.6.bias"))
    with pytest.raises(DataError, match=r"features\.6\.bias .* got nothing of that name"):
        Lpips.load(tmp_path)
    write(tmp_path, lambda _, heads: heads.update({"lin2.model.1.weight": torch.ones(384)}))
    with pytest.raises(DataError, match=r"lin2.* got \(384,\)"):
        Lpips.load(tmp_path)
    whole = (tmp_path / HEADS).read_bytes()
    for part in (b"", b"<html>", whole[:-300]):
        (tmp_path / HEADS).write_bytes(part)
        with pytest.raises(DataError, match="copy it again"):
            Lpips.load(tmp_path)
    torch.save([1, 2], tmp_path / HEADS)
    with pytest.raises(DataError, match=r"expected tensors by name.* got a list"):
        Lpips.load(tmp_path)
