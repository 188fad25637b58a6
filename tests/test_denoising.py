"""Noise that an update left in images, taken out: real pictures, real inversions."""

import pytest
import torch

import spear
from spear.data import photo_crops, tiny_imagenet
from spear.errors import InvalidOption
from spear.federated import fedsgd, least_squares, mlp, output_gradient
from spear.federated.defences import add_noise
from spear.metrics import psnr
from support.planted import plant, seeded


@pytest.fixture(scope="module")
def photos():
    """(8, 3, 64, 64) in [0, 1]."""
    return photo_crops(8, 64)[0].double()


def noisy(images, noise, seed=0):
    noise = torch.as_tensor(noise, dtype=images.dtype).view(-1, 1, 1, 1)
    return images + noise * torch.randn(images.shape, generator=seeded(seed), dtype=images.dtype)


@pytest.mark.parametrize(("noise", "gain"), [(0.005, 1), (0.02, 3), (0.1, 6)])
def test_photos_come_out_better(photos, noise, gain):
    before = noisy(photos, noise)
    gained = psnr(spear.denoise(before, noise), photos) - psnr(before, photos)
    assert gained.mean() > gain
    assert gained.min() > 0


def test_grey_images_and_each_with_its_own_noise(photos):
    grey, noise = photos.mean(1, keepdim=True), torch.linspace(0.01, 0.2, 8).double()
    before = noisy(grey, noise)
    by_each = psnr(spear.denoise(before, noise), grey)
    assert bool((by_each > psnr(before, grey)).all())
    assert bool((by_each[[0, -1]] > psnr(spear.denoise(before, 0.1), grey)[[0, -1]]).all())


def test_without_noise_nothing_changes(photos):
    assert torch.equal(spear.denoise(photos, 0), photos)
    level = torch.tensor([0.0, 0.1]).repeat(4)
    mixed = spear.denoise(photos, level)
    assert torch.equal(mixed[::2], photos[::2])
    assert not torch.equal(mixed[1::2], photos[1::2])
    assert (spear.denoise(photos, 1e-9) - photos).abs().max() < 1e-8


@pytest.mark.parametrize("size", [(1, 1), (5, 28), (8, 8), (17, 64)])
@pytest.mark.parametrize("channels", [1, 3])
def test_any_size_and_any_unit(size, channels):
    images = torch.rand(2, channels, *size, generator=seeded(1), dtype=torch.float64)
    out = spear.denoise(images, 0.1)
    assert out.shape == images.shape
    other_unit = (spear.denoise(7 * images - 3, 0.7) + 3) / 7
    assert (other_unit - out).abs().max() < 1e-12
    flat = spear.denoise(torch.full_like(images, 0.3), 5.0)
    assert (flat - 0.3).abs().max() < 1e-12
    assert (spear.denoise(images.flip(-1), 0.1).flip(-1) - out).abs().max() < 1e-12


def test_the_dtype_stays_and_the_argument_too(photos):
    before = photos.float().requires_grad_()
    kept = before.detach().clone()
    out = spear.denoise(before, 0.1)
    assert (out.dtype, out.requires_grad) == (torch.float32, False)
    assert torch.equal(before, kept)
    assert spear.denoise(photos[:0], torch.zeros(0)).shape == (0, 3, 64, 64)


@pytest.mark.parametrize(
    ("images", "noise", "words"),
    [
        (torch.rand(4, 192), 0.1, r"images \(k, C, H, W\) .* got \(4, 192\): .*unflatten"),
        (torch.rand(4, 8, 8), 0.1, r"got \(4, 8, 8\)"),
        (torch.rand(4, 512, 7, 7), 0.1, r"1 or 3 channels, got \(4, 512, 7, 7\)"),
        (torch.zeros(4, 3, 8, 8, dtype=torch.uint8), 0.1, "floating-point images"),
        ([[0.1]], 0.1, "got list"),
        (torch.rand(4, 3, 8, 8), None, "expected noise, got None"),
        (torch.rand(4, 3, 8, 8), torch.ones(3), "one number or 4, .* got 3"),
        (torch.rand(4, 3, 8, 8), -1.0, "finite noise >= 0"),
        (torch.rand(4, 3, 8, 8), float("nan"), "finite noise >= 0"),
    ],
)
def test_what_is_no_image_and_no_noise_is_refused(images, noise, words):
    with pytest.raises(InvalidOption, match=words):
        spear.denoise(images, noise)


def test_the_noise_of_a_result_is_that_of_the_update():
    """The row of the pseudo-inverse: what the noise leaves even if dL/dZ were known."""
    planted = plant(6, m=120, n=2000)
    update = add_noise(planted.gradients, 1e-4, seeded(3))
    view = spear.observe(planted.model, update)
    result = spear.invert(view)
    D = output_gradient(planted.model, planted.inputs, planted.labels, layer=view.layer)
    best = least_squares(view, D)
    actual = (best - planted.inputs).square().mean(1).sqrt()
    nearest = torch.cdist(result.inputs.double(), best).argmin(1)
    assert sorted(nearest.tolist()) == list(range(6))
    assert result.noise.tolist() == pytest.approx(actual[nearest].tolist(), rel=0.1)
    assert bool((result.noise <= result.predicted_error).all())


def test_real_images_under_noise_come_out_better(data_root):
    """TinyImageNet in the paper's network, from hardly any noise to as much as the gradient."""
    source = tiny_imagenet(data_root)
    x, y = source.batch(list(range(0, 8000, 1000)))
    model = mlp(x.shape[1], source.classes, width=200, seed=0)
    gains = []
    for sigma in (1e-5, 3e-5, 1e-4):
        update = add_noise(fedsgd(model, x, y), sigma, seeded(5))
        result = spear.invert(spear.observe(model, update))
        nearest = torch.cdist(result.inputs.double(), x.double()).argmin(1)
        truth, before = x[nearest], result.inputs
        after = spear.denoise(before.unflatten(1, source.shape), result.noise).flatten(1)
        gained = psnr(source.to_pixels(after), source.to_pixels(truth))
        gained -= psnr(source.to_pixels(before), source.to_pixels(truth))
        assert len(result.inputs) == len(x)
        gains.append(float(gained.mean()))
    assert gains[0] > 0.5
    assert gains[-1] > 3
    assert gains == sorted(gains), gains
