"""What the usual defences leave of an attack, on real images."""

import pytest
import torch

import spear
from spear import Cause, InvalidOption, InvalidUpdate, Outcome, Proof, data
from spear.federated import defences, fedsgd, mlp
from spear.metrics import score
from support.planted import plant, worst_error


def real_update(root, name="cifar10", b=20, seed=0):
    images = getattr(data, name)(root)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
    x, y = images.batch(order[:b].tolist())
    model = mlp(x.shape[1], images.classes, width=200, depth=6, seed=seed)
    return images, model, x, y, fedsgd(model, x, y)


def attacked(images, model, x, update, max_seconds=3.0):
    """The result and its score; whatever happens, nothing wrong is certified."""
    result = spear.invert(spear.observe(model, update), model=model, max_seconds=max_seconds)
    found = None
    if len(result.inputs):
        found = score(images.to_pixels(result.inputs), images.to_pixels(x))
        assert bool((found.psnr[result.certified] >= 60).all())
    assert result.outcome is not Outcome.EXACT or (found is not None and found.exact)
    return result, found


@pytest.mark.parametrize(("name", "norm"), [("cifar10", 1e-2), ("tiny_imagenet", 1.0)])
def test_clipping_a_whole_update_protects_nobody(name, norm, data_root):
    images, model, x, _, update = real_update(data_root, name)
    clipped = defences.clip(update, norm)
    result, found = attacked(images, model, x, clipped)
    assert (result.outcome, result.proof) == (Outcome.EXACT, Proof.REPLAY)
    assert found.worst > 100


@pytest.mark.parametrize(("clients", "each", "reduction"), [(4, 5, "mean"), (2, 10, "sum")])
def test_secure_aggregation_is_one_larger_batch(clients, each, reduction, data_root):
    images, model, x, y, _ = real_update(data_root, "tiny_imagenet")
    parts = zip(x.split(each), y.split(each), strict=True)
    updates = [fedsgd(model, some, labels) for some, labels in parts]
    assert len(updates) == clients
    result, found = attacked(
        images, model, x, defences.secure_aggregation(updates, reduction=reduction)
    )
    assert (result.outcome, result.batch_size) == (Outcome.EXACT, 20)
    assert found.worst > 100


def test_half_precision_keeps_a_small_batch_exact(data_root):
    images, model, x, _, update = real_update(data_root, "tiny_imagenet", b=8)
    result, found = attacked(images, model, x, defences.half(update))
    assert result.outcome is Outcome.EXACT
    assert found.worst > 85


def test_bfloat16_and_eight_bits_leave_pictures(data_root):
    images, model, x, _, update = real_update(data_root, "tiny_imagenet", b=8)
    for weaker, least in (
        (defences.half(update, torch.bfloat16), 65),
        (defences.quantise(update, 8), 50),
    ):
        result, found = attacked(images, model, x, weaker, max_seconds=60)
        assert result.outcome is Outcome.APPROXIMATE
        assert found.worst > least
        assert "noise" in result.explanation


def test_sixteen_bits_protect_nobody(data_root):
    images, model, x, _, update = real_update(data_root)
    result, found = attacked(images, model, x, defences.quantise(update, 16))
    assert result.outcome is Outcome.EXACT
    assert found.worst > 90


def test_pruning_a_tenth_does_not_hide_the_batch(data_root):
    images, model, x, _, update = real_update(data_root)
    result, found = attacked(images, model, x, defences.prune(update, 0.1))
    assert result.outcome is Outcome.APPROXIMATE
    assert found.worst > 30


@pytest.mark.parametrize("share", [0.5, 0.9])
def test_pruning_is_named_as_a_cause(share, data_root):
    images, model, x, _, update = real_update(data_root)
    result, _ = attacked(images, model, x, defences.prune(update, share))
    assert (result.outcome, result.cause) == (Outcome.INCONCLUSIVE, Cause.NO_GAP)
    assert result.batch_size is None
    assert len(result.inputs) == 0
    assert "pruning" in result.reason


@pytest.mark.parametrize(
    "defend",
    [
        lambda u: defences.prune(u, 0.01),
        defences.half,
        lambda u: defences.half(u, torch.bfloat16),
        lambda u: defences.quantise(u, 8),
        lambda u: defences.quantise(u, 4),
        lambda u: defences.add_noise(u, 1e-6),
        lambda u: defences.add_noise(u, 1e-4),
    ],
)
def test_no_defence_brings_about_a_wrong_verdict(defend, data_root):
    images, model, x, _, update = real_update(data_root, b=12, seed=1)
    attacked(images, model, x, defend(update), max_seconds=2)


def test_weight_differences_of_fedavg_are_updates_too():
    planted = plant(5, m=90, dtype=torch.float64)
    before = planted.model.state_dict()
    step = {name: -0.1 * g for name, g in planted.gradients.items()}
    sent = {name: before[name] + change for name, change in defences.clip(step, 1e-3).items()}
    view = spear.observe(planted.model, after=sent, lr=0.1, epochs=1)
    result = spear.invert(view, model=planted.model)
    assert result.outcome is Outcome.EXACT
    assert worst_error(result.inputs, planted.inputs) < 1e-6


def test_the_given_update_stays_as_it_is():
    update = plant(4).gradients
    before = {name: g.clone() for name, g in update.items()}
    defences.prune(update, 0.5)
    defences.quantise(update, 8)
    defences.half(update)
    defences.add_noise(update, 1.0)
    defences.clip(update, 0.1)
    defences.secure_aggregation([update, update])
    assert all(torch.equal(update[name], g) for name, g in before.items())


def test_shares_bits_and_norms_are_what_they_say():
    update = {"w": torch.randn(50, 40), "zero": torch.zeros(3), "b": torch.randn(())}
    pruned = defences.prune(update, 0.3)["w"]
    assert int((pruned == 0).sum()) == 600
    assert float(update["w"][pruned == 0].abs().max()) <= float(pruned[pruned != 0].abs().min())
    for bits in (2, 4, 8):
        levels = defences.quantise(update, bits)
        assert len(levels["w"].unique()) <= 2**bits - 1
        step = float(update["w"].abs().max()) / (2 ** (bits - 1) - 1)
        assert float((levels["w"] - update["w"]).abs().max()) <= step / 2 * 1.0001
        assert torch.equal(levels["zero"], update["zero"])
    short = defences.clip(update, 0.5)
    assert float(torch.cat([g.flatten() for g in short.values()]).norm()) == pytest.approx(0.5)
    assert torch.equal(defences.clip(short, 1.0)["w"], short["w"])
    noise = defences.add_noise(update, 0.1)["w"] - update["w"]
    assert float(noise.std()) == pytest.approx(0.1, rel=0.1)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda u: defences.prune(u, 1.0), "0 <= share < 1"),
        (lambda u: defences.quantise(u, 1), "2 to 16 bits"),
        (lambda u: defences.quantise(u, 8.0), "2 to 16 bits"),
        (lambda u: defences.half(u, torch.float32), "float16 or torch.bfloat16"),
        (lambda u: defences.add_noise(u, -1.0), "sigma >= 0"),
        (lambda u: defences.clip(u, 0.0), "max_norm > 0"),
        (lambda u: defences.secure_aggregation([u], reduction="median"), "'mean' or 'sum'"),
    ],
)
def test_options_are_checked(call, message):
    with pytest.raises(InvalidOption, match=message):
        call({"w": torch.ones(3)})


def test_clients_of_different_models_are_not_added_up():
    with pytest.raises(InvalidUpdate, match="clients 1 have"):
        defences.secure_aggregation([{"w": torch.ones(3)}, {"w": torch.ones(4)}])
    with pytest.raises(InvalidUpdate, match="got none"):
        defences.secure_aggregation([])


def test_an_overflow_in_half_precision_is_named():
    planted = plant(4)
    huge = defences.half({name: 1e9 * g for name, g in planted.gradients.items()})
    with pytest.raises(InvalidUpdate, match="half precision overflowed"):
        spear.observe(planted.model, huge)


def test_noise_that_overflows_is_named():
    planted = plant(4)
    with pytest.raises(InvalidUpdate, match=r"weight_grad has NaN or infinite.*noise"):
        spear.observe(planted.model, defences.add_noise(planted.gradients, 1e39))
