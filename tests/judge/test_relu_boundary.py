"""Which side of its threshold a hidden neuron is on, in each step of a repeated training."""

import torch

import spear
from spear import Outcome
from spear.federated import fedavg, mlp
from spear.judge.relu_boundary import Flip, ReluStates, with_relu_states
from support.planted import plant, worst_error


def test_turning_a_neuron_changes_the_gradient_of_its_sample_in_its_step_only():
    torch.manual_seed(0)
    net, z = mlp(5, 3, width=6, depth=3, seed=0), torch.randn(2, 5)

    def gradient(step, flips=frozenset()):
        states = ReluStates(flips=flips)
        sided = with_relu_states(mlp(5, 3, width=6, depth=3, seed=0), states)
        states.begin(step)
        leaf = z.clone().requires_grad_()
        return torch.autograd.grad(sided(leaf).square().sum(), leaf)[0]

    leaf = z.clone().requires_grad_()
    (plain,) = torch.autograd.grad(net(leaf).square().sum(), leaf)
    flip = frozenset([Flip(step=2, relu=1, sample=1, neuron=int(net[:3](z)[1].argmin()))])
    assert torch.equal(gradient(2), plain)
    assert torch.equal(gradient(1, flip), plain)
    turned = gradient(2, flip)
    assert torch.equal(turned[0], plain[0])
    assert not torch.allclose(turned[1], plain[1])


def test_neurons_near_their_threshold_are_noted():
    states = ReluStates(reach=torch.tensor([0.1, 0.1]))
    states.begin(4)
    states.on(torch.tensor([[1.0, -1.0], [0.05, 1.0]]))
    ((away, flip),) = states.near
    assert flip == Flip(4, 0, 1, 0)
    assert 0 < away < 1


def test_a_neuron_that_the_client_rounded_to_the_other_side_costs_no_proof():
    """Neuron 7 of the second layer is put on its threshold for one sample; the client is in float32."""
    proved = 0
    for seed in range(6):
        planted = plant(4, m=120, depth=4, seed=seed)
        with torch.no_grad():
            z = planted.model[:3](planted.inputs)
            planted.model[2].bias[7] -= z[1, 7]
        training = {"lr": 0.01, "epochs": 2}
        after = fedavg(planted.model, planted.inputs, planted.labels, **training)
        view = spear.observe(planted.model, after=after, **training)
        result = spear.invert(view)
        assert worst_error(result.inputs, planted.inputs) < 1e-3
        proved += result.outcome is Outcome.EXACT
    assert proved == 6
