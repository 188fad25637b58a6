import pytest
import torch
from torch import nn

import spear
from planted import plant
from spear import InvalidOption, InvalidUpdate, LayerUpdate, NoAttackableLayer, SpearError, observe


def parts(m=6, n=8, **changes):
    tensors = {
        "weight": torch.randn(m, n),
        "bias": torch.randn(m),
        "weight_grad": torch.randn(m, n),
        "bias_grad": torch.randn(m),
    }
    return {**tensors, **changes}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weight_grad": torch.randn(6, 7)}, r"weight_grad has shape \(6, 7\), expected \(6, 8\)"),
        ({"bias_grad": torch.randn(5)}, r"bias_grad has shape \(5,\), expected \(6,\)"),
        ({"weight": torch.randn(8)}, r"expected \(outputs, inputs\)"),
        ({"bias": None}, "cannot attack a layer without"),
        ({"bias_grad": None}, "gives each recovered input its scale"),
        ({"bias": torch.randn(6).double()}, "expected one dtype"),
        ({"weight_grad": torch.full((6, 8), float("nan"))}, "weight_grad has NaN"),
        ({"bias_grad": torch.full((6,), float("inf"))}, "bias_grad has NaN or infinite"),
        ({"relu": "sometimes"}, "expected 'after', 'before' or 'both'"),
        ({"weight_grad": torch.randn(6, 8).to_sparse()}, "expected dense"),
        ({"weight": torch.randn(6, 8, device="meta")}, "one device"),
        ({k: v.long() for k, v in parts().items()}, "expected float64, float32"),
        (
            {"weight": torch.randn(0, 8), "weight_grad": torch.randn(0, 8)},
            "not empty",
        ),
    ],
)
def test_bad_updates_are_refused_in_words(changes, message):
    with pytest.raises(InvalidUpdate, match=message) as caught:
        LayerUpdate(**parts(**changes))
    assert isinstance(caught.value, SpearError)
    assert isinstance(caught.value, ValueError)


def test_all_problems_are_reported_at_once():
    with pytest.raises(InvalidUpdate) as caught:
        LayerUpdate(**parts(weight_grad=torch.randn(2, 8), bias_grad=torch.randn(3)))
    assert len(caught.value.problems) == 2


def test_gradients_as_list_and_as_dict_are_the_same_view():
    planted = plant(3)
    by_name = planted.view
    listed = observe(planted.model, list(planted.gradients.values()))
    assert listed.layer == by_name.layer == "0"
    assert torch.equal(listed.weight_grad, by_name.weight_grad)
    assert set(listed.others) == set(planted.gradients) - {"0.weight", "0.bias"}


def test_a_dict_may_hold_one_layer_only():
    planted = plant(3)
    one = {name: g for name, g in planted.gradients.items() if name.startswith("2.")}
    view = observe(planted.model, one)
    assert view.layer == "2"
    assert "no gradient" not in view.choice.splitlines()[0]


def test_frozen_parameters_may_be_left_out_of_the_list():
    model = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 2))
    for p in model[0].parameters():
        p.requires_grad_(False)
    trainable = [p for p in model.parameters() if p.requires_grad]
    view = observe(model, torch.autograd.grad(model(torch.randn(2, 8)).sum(), trainable))
    assert (view.layer, view.relu) == ("2", "both")


def test_the_choice_says_why_others_were_not_taken():
    model = nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 2))
    grads = torch.autograd.grad(model(torch.randn(2, 8)).sum(), list(model.parameters()))
    view = observe(model, grads)
    assert view.choice.splitlines() == [
        "attacking '2' (6 -> 6, ReLU after)",
        "not '0': no ReLU stands before it, and it is followed by Tanh (which leaves no zeros in "
        "the gradient), not by a ReLU",
        "not '4': attackable too (a ReLU stands before it: its inputs are sparse), "
        "but farther from the data",
    ]


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (nn.Sequential(nn.Linear(4, 3), nn.Sigmoid(), nn.Linear(3, 2)), "followed by Sigmoid"),
        (nn.Sequential(nn.Linear(4, 3, bias=False), nn.ReLU()), "no bias"),
        (nn.Sequential(nn.Conv1d(1, 2, 3), nn.ReLU()), "the model has no linear layer"),
    ],
)
def test_models_without_an_attackable_layer(model, message):
    grads = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    with pytest.raises(NoAttackableLayer, match=message):
        observe(model, grads)


def test_wrong_gradients_are_refused():
    planted = plant(3)
    grads = list(planted.gradients.values())
    with pytest.raises(InvalidUpdate, match="expected 6 gradients"):
        observe(planted.model, grads[:-1])
    with pytest.raises(InvalidUpdate, match="no parameter 'nope'"):
        observe(planted.model, {"nope": grads[0]})
    with pytest.raises(InvalidUpdate, match=r"the gradient of '0\.weight' has shape"):
        observe(planted.model, [grads[0].T, *grads[1:]])
    with pytest.raises(InvalidUpdate, match="expected a tensor"):
        observe(planted.model, [[1.0], *grads[1:]])
    with pytest.raises(InvalidOption, match="no linear layer 'head'"):
        observe(planted.model, grads, layer="head")
    with pytest.raises(NoAttackableLayer, match="no gradient of its weight"):
        observe(planted.model, {"0.weight": grads[0]})


def test_fedavg_weights_become_a_gradient():
    planted = plant(3, dtype=torch.float64)
    after = {
        n: p.detach() - 0.1 * planted.gradients[n] for n, p in planted.model.named_parameters()
    }
    view = observe(planted.model, after=after, lr=0.1, epochs=1)
    assert torch.allclose(view.weight_grad, planted.view.weight_grad, atol=1e-14)
    assert (view.training.lr, view.training.epochs) == (0.1, 1)


def test_fedavg_needs_its_settings():
    planted = plant(3)
    state = planted.model.state_dict()
    with pytest.raises(InvalidOption, match="learning rate"):
        observe(planted.model, after=state)
    with pytest.raises(InvalidOption, match="neither"):
        observe(planted.model)
    with pytest.raises(InvalidOption, match="both"):
        observe(planted.model, planted.gradients, after=state, lr=0.1)
    with pytest.raises(InvalidOption, match="lr belong to after="):
        observe(planted.model, planted.gradients, lr=0.1)
    with pytest.raises(InvalidUpdate, match=r"has no tensor '0\.bias'"):
        observe(planted.model, after={"0.weight": state["0.weight"]}, lr=0.1)
    with pytest.raises(InvalidOption, match="epochs >= 1"):
        observe(planted.model, after=state, lr=0.1, epochs=0)


def test_the_public_names():
    assert all(hasattr(spear, name) for name in spear.__all__)
    assert all(
        issubclass(getattr(spear, name), SpearError)
        for name in (
            "InvalidOption",
            "InvalidUpdate",
            "MissingExtra",
            "NoAttackableLayer",
            "NotExact",
        )
    )


def test_a_layer_given_directly_says_so():
    planted = plant(3)
    view = spear.LayerUpdate(
        weight=planted.view.weight,
        bias=planted.view.bias,
        weight_grad=planted.view.weight_grad,
        bias_grad=planted.view.bias_grad,
    )
    assert view.choice == "one layer, 50 -> 60, given directly"


def test_one_tensor_is_no_list_of_gradients():
    planted = plant(3)
    with pytest.raises(InvalidUpdate, match="got one tensor"):
        spear.observe(planted.model, planted.gradients["0.weight"])


def test_parameters_without_a_gradient_may_be_none():
    planted = plant(3, depth=3)
    gradients = [None if n == "4.bias" else g for n, g in planted.gradients.items()]
    view = spear.observe(planted.model, gradients)
    assert torch.equal(view.weight_grad, planted.view.weight_grad)
    assert set(planted.view.others) - set(view.others) == {"4.bias"}
