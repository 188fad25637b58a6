"""Whatever a model ends in and whichever loss it is trained with: the batch, its labels, and no other."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import spear
from spear.federated import fedavg, fedsgd
from support.planted import gaussian, labels, module, seeded, worst_error

N, M = 40, 60


def layers(outputs, **more):
    torch.manual_seed(0)
    return {"fc": nn.Linear(N, M), "mid": nn.Linear(M, 30), "head": nn.Linear(30, outputs), **more}


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
