"""A neuron whose preactivation is zero to rounding."""

import torch

import spear
from spear import Outcome
from spear.federated import fedavg
from support.planted import plant, worst_error


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
