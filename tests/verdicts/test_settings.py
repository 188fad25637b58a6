"""What clients really send: any layer, trained networks, one class, any shape."""

import pytest
import torch
from torch import nn

import spear
from spear import Cause, NoAttackableLayer, Outcome, Proof
from spear.factors import factorise
from spear.federated import fedavg, fedsgd, output_gradient, train
from spear.judge.rivals import NO_MERGE, UNSEEN
from spear.metrics import score
from spear.search.output_layer import farthest
from support.planted import bare, gaussian, module, real_batch, small_batch, weighed


def relative_error(found, truth):
    return float((torch.cdist(found, truth).min(1).values / truth.norm(dim=1).mean()).max())


@pytest.mark.parametrize("layer", range(1, 6))
def test_inputs_of_every_hidden_layer_come_back(layer, data_root):
    _, model, x, y = real_batch(data_root, b=12, m=200, seed=20)
    view = spear.observe(model, fedsgd(model, x, y), layer=str(2 * (layer - 1)))
    result = spear.invert(view, model=model)
    with torch.no_grad():
        truth = model[: 2 * (layer - 1)](x)
    assert result.outcome is Outcome.EXACT
    assert result.proof is Proof.REPLAY
    assert relative_error(result.inputs, truth) < 1e-5
    assert ("activations computed from the data" in result.explanation) is (layer > 1)


@pytest.mark.parametrize(("depth", "b"), [(2, 12), (6, 8)])
def test_inputs_of_the_output_layer_come_back(depth, b, data_root):
    _, model, x, y = real_batch(data_root, b=b, m=300, depth=depth, seed=2)
    last = str(2 * (depth - 1))
    result = spear.invert(spear.observe(model, fedsgd(model, x, y), layer=last), model=model)
    with torch.no_grad():
        truth = model[:-1](x)
    assert result.outcome is Outcome.EXACT
    assert relative_error(result.inputs, truth) < 1e-4


def test_the_farthest_point_is_never_negative():
    model, x, y = small_batch(b=4, m=80, classes=20)
    factors = factorise(spear.observe(model, fedsgd(model, x, y), layer="4"))
    white, h = factors.inputs.white, factors.bias_coordinates
    point = farthest(white, h, torch.ones(4, dtype=torch.float64))
    assert point is not None
    assert float((white @ point).min()) > -1e-6
    assert float(point @ h) == pytest.approx(1)


@pytest.mark.parametrize("seed", range(2))
def test_one_class_comes_back(seed, data_root):
    def one(images):
        return (images.labels == 7 * seed).nonzero().flatten()

    images, model, x, y = real_batch(data_root, seed=seed, among=one)
    result = spear.invert(spear.observe(model, fedsgd(model, x, y)), model=model)
    assert result.outcome is Outcome.EXACT
    assert score(images.to_pixels(result.inputs), images.to_pixels(x)).exact
    assert len(set(result.labels.tolist())) == 1


@pytest.fixture(scope="module")
def trained_on_mnist(data_root):
    images, model, _, _ = real_batch(data_root, name="mnist", b=1)
    x, y = images.batch(range(5000))
    generator = torch.Generator().manual_seed(0)
    early = train(model, x, y, steps=300, lr=0.05, generator=generator)
    late = train(early, x, y, steps=1700, lr=0.05, generator=generator)
    return images, early, late


@pytest.mark.parametrize("first", [0, 5000])  # seen in training, or not
def test_early_in_training_everything_comes_back(first, trained_on_mnist):
    images, early, _ = trained_on_mnist
    x, y = images.batch(range(first + 100, first + 120))
    result = spear.invert(spear.observe(early, fedsgd(early, x, y)), model=early)
    assert result.outcome is Outcome.EXACT
    assert score(images.to_pixels(result.inputs), images.to_pixels(x)).exact


@pytest.mark.parametrize("first", [0, 5000])
@pytest.mark.parametrize("seed", range(2))
def test_late_in_training_nothing_wrong_is_certified(seed, first, trained_on_mnist):
    images, _, late = trained_on_mnist
    start = first + 10 * seed
    x, y = images.batch(range(start, start + 10))
    result = spear.invert(spear.observe(late, fedsgd(late, x, y)), model=late, max_seconds=20)
    found = score(images.to_pixels(result.inputs), images.to_pixels(x))
    certified = result.certified[: len(found.psnr)]
    assert bool((found.psnr[certified] > 60).all())
    if (
        result.outcome is Outcome.EXACT
    ):  # of those that are visible: others drown in the loudest's rounding
        length = output_gradient(late, x, y, layer="0").norm(dim=0) * x.norm(dim=1)
        drowned = length < torch.finfo(x.dtype).eps * length.max()
        assert set(range(10)) - set(found.truth.tolist()) <= set(
            drowned.nonzero().flatten().tolist()
        )
        assert bool((found.psnr > 60).all())
        assert found.exact or UNSEEN in result.assumptions


def test_vanished_samples_are_reported():
    """The network is so sure of three of eight samples that they leave no gradient."""
    model, x, y = small_batch(b=8, n=60, m=150)
    gradients = fedsgd(model, x, y, weighed((torch.arange(8) < 5).float()))
    result = spear.invert(spear.observe(model, gradients))
    assert result.batch_size == 5
    assert result.certified.all()
    assert result.outcome is Outcome.EXACT
    assert relative_error(result.inputs, x[:5]) < 1e-5
    assert "all 5 samples visible in the update" in result.reason
    assert any("gradient vanished" in words for words in result.assumptions)
    told = spear.invert(spear.observe(model, gradients, samples=8))
    assert (told.outcome, told.cause) == (Outcome.PARTIAL, Cause.MISSING)
    assert told.certified.all()
    assert "computed from 8 samples, as was told, and 5 are visible" in told.explanation


@pytest.mark.parametrize("pooled", [True, False])
def test_tokens_count_as_samples(pooled):
    def forward(self, x):
        out = self.last(torch.relu(self.first(x)))  # (batch, tokens, classes)
        return out.mean(1) if pooled else out.flatten(0, 1)

    model = module(forward, first=nn.Linear(30, 120), last=nn.Linear(120, 5))
    x = torch.randn(3, 4, 30)
    y = torch.randint(5, (3 if pooled else 12,))
    result = spear.invert(spear.observe(model, fedsgd(model, x, y)), model=model)
    assert result.batch_size == 12
    assert relative_error(result.inputs, x.flatten(0, 1)) < 1e-4
    if pooled:  # the output is of all tokens of a sample: no single one can be replayed
        assert (result.outcome, result.cause) == (Outcome.APPROXIMATE, Cause.UNFIT)
        assert "likely exact" in result.reason
    else:
        assert result.outcome is Outcome.EXACT


def test_features_of_a_convolution_come_back():
    features = (nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Flatten())
    model = nn.Sequential(*features, nn.Linear(288, 150), nn.ReLU(), nn.Linear(150, 10))
    x = torch.randn(5, 1, 8, 8)
    result = spear.invert(spear.observe(model, fedsgd(model, x, torch.arange(5))), model=model)
    assert result.outcome is Outcome.EXACT
    assert relative_error(result.inputs, model[:3](x).detach()) < 1e-4
    assert "activations" in result.explanation


@pytest.mark.parametrize(("outputs", "reduction"), [(1, "mean"), (7, "mean"), (7, "sum")])
def test_regressions_are_replayed(outputs, reduction):
    """Free targets give no weights: all samples of a cell would merge unless the loss is told."""
    model, x, _ = small_batch(b=5, n=40, m=120, classes=outputs)
    loss = nn.MSELoss(reduction=reduction)
    gradients = fedsgd(model, x, gaussian(5, outputs, 5), loss)
    view = spear.observe(model, gradients)
    for told in (None, loss) if outputs == 1 else (None,):  # one output: even if it is told
        result = spear.invert(view, loss=told)
        assert (result.outcome, result.cause) == (Outcome.APPROXIMATE, Cause.MERGED)
        assert "likely exact" in result.reason
        assert relative_error(result.inputs, x) < 1e-4
    result = spear.invert(view.told(samples=5) if outputs == 1 else view, loss=loss)
    assert (result.outcome, result.proof) == (Outcome.EXACT, Proof.REPLAY)
    assert result.labels is None
    assert relative_error(result.inputs, x) < 1e-4


def test_a_regression_replay_refuses_another_model():
    model, x, _ = small_batch(b=5, n=40, m=120, classes=3)
    targets = gaussian(5, 3, 5)
    view = spear.observe(model, fedsgd(model, x, targets, nn.functional.mse_loss))
    other, _, _ = small_batch(b=5, n=40, m=120, classes=3, seed=8)
    result = spear.invert(view, model=other, loss=nn.functional.mse_loss)
    assert not result.certified.any()


@pytest.mark.parametrize(
    ("loss", "targets"),
    [
        (nn.BCEWithLogitsLoss(), [0.0, 1.0, 1.0, 0.0, 1.0, 0.0]),
        (nn.functional.mse_loss, [0.0, 1.0, 1.0, 0.0, 1.0, 0.0]),
        (nn.functional.mse_loss, [0.2, 0.7, 1.3, -0.2, 1.0, 0.5]),
    ],
)
def test_one_output_gives_labels_if_targets_are_labels(loss, targets):
    model, x, _ = small_batch(b=6, n=40, m=120, classes=1)
    targets = torch.tensor(targets)[:, None]
    gradients = fedsgd(model, x, targets, loss)
    result = spear.invert(spear.observe(model, gradients, samples=6), loss=loss)
    assert result.proof is Proof.REPLAY
    assert relative_error(result.inputs, x) < 1e-4
    untold = spear.invert(spear.observe(model, gradients), loss=loss)
    if bool((targets * (1 - targets)).any()):  # numbers
        assert result.labels is None
        assert result.outcome is Outcome.EXACT
        assert untold.outcome is Outcome.APPROXIMATE
        assert "may be several samples merged into one" in untold.explanation
    else:
        assert result.outcome is untold.outcome is Outcome.EXACT
        assert any("merge" in words for words in untold.assumptions)
        order = torch.cdist(result.inputs, x).argmin(1)
        assert torch.equal(result.labels, targets[order, 0].long())


def test_more_outputs_than_a_gradient_can_be_solved_for():
    """With half as many outputs as neurons some gradient fits almost anything, which proves nothing."""
    model, x, _ = small_batch(b=4, n=40, m=90, classes=45)
    targets = gaussian(4, 45, 5)
    loss = nn.MSELoss()
    view = spear.observe(model, fedsgd(model, x, targets, loss))
    result = spear.invert(view, model=model, loss=loss)
    assert (result.outcome, result.cause) == (Outcome.APPROXIMATE, Cause.UNFIT)
    assert result.proof is Proof.NONE
    assert "likely exact" in result.reason
    assert relative_error(result.inputs, x) < 1e-4
    alone = spear.invert(bare(view))
    assert (alone.outcome, alone.proof) == (Outcome.EXACT, Proof.PATTERN)


@pytest.mark.parametrize("activation", [nn.LeakyReLU(), nn.GELU(), nn.SiLU(), nn.ELU()])
def test_activations_without_zeros_are_refused_with_the_reason(activation):
    model = nn.Sequential(nn.Linear(20, 50), activation, nn.Linear(50, 4))
    x = gaussian(4, 20)
    with pytest.raises(NoAttackableLayer, match=f"{type(activation).__name__}.*no zeros"):
        spear.observe(model, fedsgd(model, x, torch.arange(4)))


@pytest.mark.parametrize(
    ("before", "words"), [(nn.Dropout(0.5), "dropout"), (nn.BatchNorm1d(20), "batch norm")]
)
def test_train_mode_before_the_layer_is_named(before, words):
    model = nn.Sequential(before, nn.Linear(20, 90), nn.ReLU(), nn.Linear(90, 4)).train()
    gradients = fedsgd(model, torch.randn(4, 20), torch.arange(4))
    view = spear.observe(model, gradients)
    assert words in view.choice
    assert words in spear.invert(view, model=model).explanation
    assert words not in spear.observe(model.eval(), gradients).choice


def test_a_regression_without_later_gradients_is_no_replay():
    model, x, _ = small_batch(b=4, n=40, m=120, classes=3)
    targets = gaussian(4, 3, 5)
    gradients = fedsgd(model, x, targets, nn.functional.mse_loss)
    alone = {name: g for name, g in gradients.items() if name.startswith("0.")}
    result = spear.invert(spear.observe(model, alone), model=model, loss=nn.functional.mse_loss)
    assert (result.outcome, result.proof) == (Outcome.EXACT, Proof.PATTERN)
    assert "no gradient of a later layer to compare" in result.explanation
    assert NO_MERGE in result.assumptions


@pytest.mark.parametrize("told", [0.1, 0.005, 0.01])
@pytest.mark.parametrize("epochs", [1, 5])
def test_a_wrong_learning_rate_is_told_and_one_step_is_proved_all_the_same(told, epochs):
    model, x, y = small_batch(6, m=60)
    after = fedavg(model, x, y, lr=0.01, epochs=epochs)
    how = {"lr": told, "epochs": epochs}
    result = spear.invert(spear.observe(model, after=after, **how))
    words = "; ".join((result.reason, *result.details))
    right = told == 0.01
    assert (result.outcome is Outcome.EXACT) is (right or epochs == 1)
    assert ("either its rate was 0.01 and not" in words) is (epochs == 1 and not right)
    assert ("another learning rate" in words) is (epochs == 5 and not right)
