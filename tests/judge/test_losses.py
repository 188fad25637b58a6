"""Whatever a model ends in and whichever loss it is trained with: the batch, its labels, no others."""

import functools
from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import spear
from spear.federated import fedavg, fedsgd
from spear.judge import certify
from spear.judge.fit import LossKind
from spear.judge.losses import Criterion, Outputs, UserCodeFailed
from support.planted import Planted, fit_of, gaussian, labels, module, recovered, worst_error

N, M = 40, 60


def layers(outputs, **more):
    torch.manual_seed(0)
    return {"fc": nn.Linear(N, M), "mid": nn.Linear(M, 30), "head": nn.Linear(30, outputs), **more}


def ends_in(tail, outputs=10):
    """A network whose logits go through `tail`."""

    def forward(self, x):
        return tail(self.head(torch.relu(self.mid(torch.relu(self.fc(x))))))

    return module(forward, **layers(outputs))


def inverted(model, loss, targets, told=None, b=5):
    x, y = gaussian(b, N), labels(b, max(2, model.head.out_features))
    gradients = fedsgd(model, x, targets(y), loss)
    return spear.invert(spear.observe(model, gradients), loss=told), x, y


def assert_exact(result, x, y=None):
    assert result.outcome is spear.Outcome.EXACT, result.reason
    assert result.proof is spear.Proof.REPLAY
    assert worst_error(result.inputs, x) < 1e-3
    if y is not None:
        nearest = torch.cdist(result.inputs.double(), x.double()).argmin(1)
        assert torch.equal(result.labels, y[nearest])


IN_PLACE = {
    "module": lambda self, x: self.head(self.act(self.mid(self.act(self.fc(x))))),
    "function": lambda self, x: self.head(F.relu_(self.mid(F.relu_(self.fc(x))))),
    "option": lambda self, x: self.head(F.relu(self.mid(F.relu(self.fc(x), True)), inplace=True)),
    "torch": lambda self, x: self.head(torch.relu_(self.mid(torch.relu_(self.fc(x))))),
    "method": lambda self, x: self.head(self.mid(self.fc(x).relu_()).mul_(2).relu_()),
}


def discarded(self, x):
    z = self.fc(x)
    z.relu_()
    h = self.mid(z)
    h.add_(0.1)
    F.relu_(h)
    return self.head(h)


IN_PLACE["discarded"] = discarded


@pytest.mark.parametrize("forward", IN_PLACE.values(), ids=IN_PLACE)
def test_operations_in_place(forward):
    model = module(forward, **layers(10, act=nn.ReLU(inplace=True)))
    x, y = gaussian(5, N), labels(5)
    assert_exact(spear.invert(spear.observe(model, fedsgd(model, x, y))), x, y)
    trained = fedavg(model, x, y, epochs=3, lr=0.01)
    assert_exact(spear.invert(spear.observe(model, after=trained, lr=0.01, epochs=3)), x, y)


# What the model ends in, and what the loss takes.


def classes(y):
    return y


def numbers(y):
    return y.float()


def column(y):
    return y.float()[:, None]


def one_hot(y):
    return F.one_hot(y, 10).float()


def plain(o):
    return o


WEIGHTS = torch.linspace(0.5, 2, 10)
TOLD = {
    "cross-entropy": (10, plain, F.cross_entropy, classes),
    "class weights": (10, plain, nn.CrossEntropyLoss(weight=WEIGHTS), classes),
    "partial": (10, plain, functools.partial(F.cross_entropy, weight=WEIGHTS), classes),
    "smoothed": (10, plain, nn.CrossEntropyLoss(label_smoothing=0.1), classes),
    "softmax, cross-entropy": (10, lambda o: o.softmax(1), nn.CrossEntropyLoss(), classes),
    "softmax, NLL": (10, lambda o: F.softmax(o, dim=1), nn.NLLLoss(), classes),
    "log_softmax, NLL": (10, lambda o: F.log_softmax(o, 1), F.nll_loss, classes),
    "sigmoid, BCE": (10, lambda o: o.sigmoid(), nn.BCELoss(), one_hot),
    "sigmoid, F.BCE": (10, torch.sigmoid, F.binary_cross_entropy, one_hot),
    "BCE with logits": (10, plain, nn.BCEWithLogitsLoss(), one_hot),
    "MSE": (10, plain, nn.MSELoss(), one_hot),
    "MSE, summed": (10, plain, functools.partial(F.mse_loss, reduction="sum"), one_hot),
    "softmax, MSE": (10, lambda o: o.softmax(-1), F.mse_loss, one_hot),
    "MSE by name": (10, plain, lambda o, y: F.mse_loss(target=y, input=o), one_hot),
    "squares": (10, plain, lambda o, y: (o - y).square().mean(), one_hot),
    "one-hot inside": (
        10,
        plain,
        lambda o, y: F.mse_loss(o, F.one_hot(y, 10).to(o)),
        classes,
    ),
    "KL": (10, lambda o: o.log_softmax(1), nn.KLDivLoss(reduction="batchmean"), one_hot),
    "one, column": (1, plain, nn.BCEWithLogitsLoss(), column),
    "one, MSE": (1, plain, nn.MSELoss(), column),
    "one, sigmoid": (1, torch.sigmoid, nn.BCELoss(), column),
    "one, squeezed inside": (1, plain, lambda o, y: (o.squeeze(1) - y).square().mean(), numbers),
    "one, widened inside": (
        1,
        plain,
        lambda o, y: F.binary_cross_entropy_with_logits(o, y[:, None].to(o)),
        classes,
    ),
}
SQUEEZED = {
    "squeeze": lambda o: o.squeeze(),
    "squeeze(1)": lambda o: o.squeeze(1),
    "view": lambda o: o.view(-1),
    "index": lambda o: o[:, 0],
    "flatten": lambda o: o.flatten(),
    "sigmoid": lambda o: torch.sigmoid(o).squeeze(),
}
FOUND_OUT = ("softmax, cross-entropy", "softmax, NLL", "log_softmax, NLL", "one, sigmoid")


@pytest.mark.parametrize("case", TOLD.values(), ids=TOLD)
def test_losses_that_were_told(case):
    outputs, tail, loss, targets = case
    result, x, y = inverted(ends_in(tail, outputs), loss, targets, told=loss)
    assert_exact(result, x, y)


@pytest.mark.parametrize("name", FOUND_OUT)
def test_losses_on_probabilities_are_found_out(name):
    outputs, tail, loss, targets = TOLD[name]
    result, x, y = inverted(ends_in(tail, outputs), loss, targets)
    assert_exact(result, x, y)


def test_two_classes_and_the_negative_probability():
    result, x, y = inverted(ends_in(lambda o: o.softmax(1), 2), nn.NLLLoss(), classes)
    assert_exact(result, x, y)


def test_labels_of_squared_errors_beyond_both():
    model = ends_in(lambda o: o.view(-1) - 0.1, 1)  # below zero or nearly so
    result, x, y = inverted(model, nn.MSELoss(), numbers, told=nn.MSELoss(), b=6)
    assert_exact(result, x, y)


def test_several_labels_on_probabilities_are_found_out():
    several = (gaussian(5, 10, 3) > 0).float()
    result, x, _ = inverted(ends_in(torch.sigmoid), nn.BCELoss(), lambda y: several)
    assert_exact(result, x)
    assert result.labels is None


@pytest.mark.parametrize("told", [True, False])
@pytest.mark.parametrize("tail", SQUEEZED.values(), ids=SQUEEZED)
def test_squeezed_outputs(tail, told):
    model = ends_in(tail, 1)
    loss = nn.BCELoss() if tail is SQUEEZED["sigmoid"] else nn.BCEWithLogitsLoss()
    result, x, y = inverted(model, loss, numbers, told=loss if told else None)
    assert_exact(result, x, y)
    # Of one sample nothing is left of the batch's dimension; one output proves nothing of it.
    x = gaussian(1, N, 3)
    gradients = fedsgd(model, x, torch.ones(model(x).shape), loss)
    result = spear.invert(spear.observe(model, gradients), loss=loss if told else None)
    assert worst_error(result.inputs, x) < 1e-3
    assert "failed" not in result.reason
    assert result.labels.tolist() == [1]


# Several outputs.

Named = namedtuple("Named", "features prediction")


@dataclass
class Record:
    logits: torch.Tensor
    features: torch.Tensor | None = None


@dataclass
class ModelOutput(OrderedDict):
    """As transformers have it: a dict and an object at once."""

    loss: torch.Tensor | None = None
    logits: torch.Tensor | None = None

    def __post_init__(self):
        for name in ("loss", "logits"):
            if getattr(self, name) is not None:
                self[name] = getattr(self, name)


def entropy(choose):
    return lambda outputs, y: F.cross_entropy(choose(outputs), y)


STRUCTURES = {
    "tuple": (lambda o: (o, o.exp()), entropy(lambda r: r[0])),
    "scalar": (lambda o: (o, o.mean()), entropy(lambda r: r[0])),
    "whole numbers": (lambda o: [o, o.argmax(1)], entropy(lambda r: r[0])),
    "dict": (lambda o: {"features": 2 * o, "out": o}, entropy(lambda r: r["out"])),
    "probabilities": (
        lambda o: {"probs": o.softmax(1), "logits": o},
        entropy(lambda r: r["logits"]),
    ),
    "nested": (lambda o: {"pred": (o, None), "n": 3}, entropy(lambda r: r["pred"][0])),
    "dataclass": (Record, entropy(lambda r: r.logits)),
    "namespace": (lambda o: SimpleNamespace(aux=2 * o, logits=o), entropy(lambda r: r.logits)),
    "transformers": (lambda o: ModelOutput(logits=o), entropy(lambda r: r.logits)),
}


@pytest.mark.parametrize("told", [True, False])
@pytest.mark.parametrize("case", STRUCTURES.values(), ids=STRUCTURES)
def test_outputs_of_any_structure(case, told):
    tail, loss = case
    result, x, y = inverted(ends_in(tail), loss, classes, told=loss if told else None)
    assert_exact(result, x, y)


def test_a_loss_on_several_outputs_must_be_told():
    model = ends_in(lambda o: Named(o.exp(), o))

    def loss(outputs, y):
        return F.cross_entropy(outputs.prediction, y) + F.nll_loss(outputs.features, y)

    result, x, y = inverted(model, loss, classes, told=loss)
    assert_exact(result, x, y)
    result, *_ = inverted(model, loss, classes)
    assert result.outcome is not spear.Outcome.EXACT


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("softmax, NLL", True),
        ("softmax, NLL", False),
        ("one, column", True),
        ("one, column", False),
        ("sigmoid, BCE", True),
    ],
)
def test_local_training_is_repeated(name, told):
    outputs, tail, loss, targets = TOLD[name]
    model, y = ends_in(lambda o: {"out": tail(o)}, outputs), labels(6, max(2, outputs))
    x = gaussian(6, N)

    def on_dict(outputs, targets):
        return loss(outputs["out"], targets)

    trained = fedavg(model, x, targets(y), epochs=3, lr=0.01, loss=on_dict)
    view = spear.observe(model, after=trained, lr=0.01, epochs=3, samples=6)
    assert_exact(spear.invert(view, loss=on_dict if told else None), x, y)


# No other loss, and no other sample.


def planted_with(tail, loss, targets, outputs=10, x=None, b=5):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(N, M), nn.ReLU(), nn.Linear(M, outputs), *tail)
    x = gaussian(b, N) if x is None else x
    y = labels(len(x), max(2, outputs))
    return Planted(model, x, y, fedsgd(model, x, targets(y), loss))


@pytest.mark.parametrize(
    ("loss", "kind"),
    [
        (lambda p, y: F.nll_loss(p.log(), y), LossKind.CROSS_ENTROPY),
        (nn.CrossEntropyLoss(), LossKind.ON_PROBABILITIES),
        (nn.NLLLoss(), LossKind.NEGATIVE_PROBABILITY),
    ],
)
def test_losses_on_probabilities_are_told_apart(loss, kind):
    planted = planted_with([nn.Softmax(dim=1)], loss, classes)
    fit = fit_of(recovered(planted))
    assert (fit.loss, fit.agrees, fit.weighs_evenly, fit.dimensions) == (kind, True, True, 9)
    assert torch.equal(fit.labels, planted.labels)


def test_a_loss_that_is_none_of_these_is_not_taken_for_one():
    planted = planted_with([nn.Softmax(dim=1)], nn.MSELoss(), one_hot)
    fit = fit_of(recovered(planted))
    assert (fit.loss, fit.labels, fit.weights) == (LossKind.ANY, None, None)
    planted = planted_with([], nn.MSELoss(), lambda y: gaussian(5, 10, 9))
    fit = fit_of(recovered(planted), nn.MSELoss())
    assert (fit.loss, fit.told, fit.labels) == (LossKind.TOLD, True, None)


@pytest.mark.parametrize(
    ("tail", "loss", "targets", "outputs"),
    [
        ([nn.Softmax(dim=1)], nn.NLLLoss(), classes, 10),
        ([nn.Softmax(dim=1)], nn.NLLLoss(), classes, 2),
        ([nn.Sigmoid()], nn.BCELoss(), column, 1),
        ([nn.Sigmoid()], nn.BCELoss(), one_hot, 10),
        ([], nn.MSELoss(), one_hot, 10),
        ([], nn.MSELoss(), column, 1),
    ],
)
@pytest.mark.parametrize("told", [True, False])
def test_no_wrong_sample_is_certified(tail, loss, targets, outputs, told):
    known = loss if told else None
    planted = planted_with(tail, loss, targets, outputs)
    # A tenth of the second sample's direction in the first: the second is off, by a tenth of the first.
    mixing = torch.eye(5, dtype=torch.float64)
    mixing[1, 0] = 0.1
    found = recovered(planted, mixing)
    off = (found.X - planted.inputs).abs().amax(1) > 1e-3
    assert bool(off.any())
    certificate = certify(found.factors, found.selection, loss=known)
    assert not bool((certificate.certified & off).any())


def twins(distance, outputs, seed=0):
    """Five samples, the last a near-duplicate of the one before."""
    x = gaussian(5, N, seed)
    x[4] = x[3] + distance * gaussian(1, N, 50)[0]
    y = labels(5, max(2, outputs), seed)
    y[4] = y[3]
    return x, y


@pytest.mark.parametrize(
    ("tail", "loss", "targets", "outputs"),
    [
        ([nn.Softmax(dim=1)], nn.NLLLoss(), classes, 10),
        ([nn.Softmax(dim=1)], nn.NLLLoss(), classes, 2),
        ([nn.Sigmoid()], nn.BCELoss(), column, 1),
        ([nn.Sigmoid()], nn.BCELoss(), one_hot, 10),
        ([], nn.MSELoss(), column, 1),
    ],
)
@pytest.mark.parametrize(("told", "distance"), [(True, 3e-3), (False, 3e-3), (False, 1e-5)])
def test_merged_samples_are_not_called_exact(tail, loss, targets, outputs, told, distance):
    x, y = twins(distance, outputs)
    model = planted_with(tail, loss, targets, outputs).model
    gradients = fedsgd(model, x, targets(y), loss)
    result = spear.invert(spear.observe(model, gradients), loss=loss if told else None)
    certified = result.inputs[result.certified]
    nearest = torch.cdist(certified.double(), x.double(), p=torch.inf).amin(1)
    assert bool((nearest < 2e-3).all())
    if result.outcome is spear.Outcome.EXACT:
        assert worst_error(result.inputs, x) < 2e-3


# Targets.


def test_targets_that_would_be_broadcast_are_not_taken():
    outputs = Outputs(torch.zeros(2, 1), whole=True)
    rows = gaussian(4, 1).double()
    y = torch.tensor([1, 0, 1, 1])
    for loss, shape in (
        (lambda o, t: (o - t).square().mean(), (4, 1)),
        (lambda o, t: (o[:, 0] - t).square().mean(), (4,)),
        (nn.MSELoss(), (4, 1)),
    ):
        criterion = Criterion(loss, outputs, None, rows)
        expected = (rows - y[:, None]).square().mean()
        assert torch.allclose(criterion(rows, y), expected), shape


def test_why_a_loss_cannot_be_run_is_said():
    def broken(outputs, targets):
        raise KeyError("no such column")

    planted = planted_with([], F.cross_entropy, classes)
    view = spear.observe(planted.model, planted.gradients)
    with pytest.raises(UserCodeFailed, match="KeyError: 'no such column'"):
        Criterion(broken, Outputs(torch.zeros(2, 3), whole=True), None, gaussian(4, 3))
    assert spear.invert(view, loss=broken).outcome is spear.Outcome.EXACT  # found out all the same
