import copy
import gc
import threading
import warnings
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

import spear
from spear import InvalidOption, InvalidUpdate, LayerUpdate, NoAttackableLayer, SpearError, observe
from spear.federated import fedsgd, mlp
from support.judgements import bits
from support.planted import bare, plant, worst_error


def parts(m=6, n=8, **changes):
    tensors = {
        "weight": torch.randn(m, n),
        "bias": torch.randn(m),
        "weight_grad": torch.randn(m, n),
        "bias_grad": torch.randn(m),
    }
    return {**tensors, **changes}


def quantised(tensor):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch is giving them up
        return torch.quantize_per_tensor(tensor, 0.1, 0, torch.qint8)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weight_grad": torch.randn(6, 7)}, r"weight_grad has shape \(6, 7\), expected \(6, 8\)"),
        ({"bias_grad": torch.randn(5)}, r"bias_grad has shape \(5,\), expected \(6,\)"),
        ({"weight": torch.randn(8)}, r"expected \(outputs, inputs\)"),
        ({"bias": None}, "leave out both for a layer without"),
        ({"bias_grad": None}, "gives each recovered input its scale"),
        ({"weight_grad": torch.randn(6, 8) + 0j}, r"weight_grad is complex \(torch.complex64\)"),
        ({"others": {"2.weight": torch.randn(6, 8) + 0j}}, "2.weight is complex"),
        ({"others": {"2.weight": torch.randn(6, 8).to_sparse()}}, "2.weight: expected dense"),
        ({"others": {"2.weight": torch.ones(6, 8).bool()}}, "2.weight is torch.bool"),
        ({"weight": quantised(torch.randn(6, 8))}, "dequant"),
        ({k: v.to("meta") for k, v in parts().items()}, "bias_grad is on the meta device"),
        ({"weight_grad": torch.full((6, 8), float("nan"))}, "weight_grad has NaN"),
        ({"bias_grad": torch.full((6,), float("inf"))}, "bias_grad has NaN or infinite"),
        ({"others": {"2.weight": torch.full((6, 8), float("nan"))}}, "2.weight has NaN"),
        ({"relu": "sometimes"}, "expected 'after', 'before' or 'both'"),
        ({"weight_grad": torch.randn(6, 8).to_sparse()}, "expected dense"),
        ({"weight": torch.randn(6, 8, device="meta")}, "one device"),
        ({k: v.long() for k, v in parts().items()}, "expected float64, float32"),
        ({"weight": torch.randn(0, 8), "weight_grad": torch.randn(0, 8)}, "not empty"),
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


def test_gradients_come_as_a_dict_or_a_list_whole_or_in_part():
    planted = plant(3)
    names = list(planted.gradients)
    listed = observe(planted.model, list(planted.gradients.values()))
    assert listed.layer == planted.view.layer == "0"
    assert torch.equal(listed.weight_grad, planted.view.weight_grad)
    assert set(listed.others) == {*names} - {"0.weight", "0.bias"}
    without = observe(
        planted.model, [planted.gradients[n] if n != "4.bias" else None for n in names]
    )
    assert torch.equal(without.weight_grad, planted.view.weight_grad)
    assert set(listed.others) - set(without.others) == {"4.bias"}
    second = observe(planted.model, {n: planted.gradients[n] for n in ("2.weight", "2.bias")})
    assert second.layer == "2"
    assert "no gradient" not in second.choice.splitlines()[0]


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
        (nn.Sequential(nn.ReLU(), nn.Linear(4, 3, bias=False)), "no ReLU stands before it"),
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
    with pytest.raises(InvalidUpdate, match="got one tensor"):
        observe(planted.model, grads[0])
    with pytest.raises(InvalidUpdate, match="expected 6 gradients"):
        observe(planted.model, grads[:-1])
    with pytest.raises(InvalidUpdate, match="no parameter 'nope'"):
        observe(planted.model, {"nope": grads[0]})
    with pytest.raises(InvalidUpdate, match=r"the gradient of '0\.weight' has shape"):
        observe(planted.model, [grads[0].T, *grads[1:]])
    with pytest.raises(InvalidUpdate, match="is an empty dict, expected a tensor"):
        observe(planted.model, [{}, *grads[1:]])
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
    assert (view.protocol.lr, view.protocol.epochs) == (0.1, 1)


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({}, InvalidOption, "neither"),
        ({"gradients": {}, "after": {}, "lr": 0.1}, InvalidOption, "both"),
        ({"gradients": {}, "lr": 0.1}, InvalidOption, "lr belongs to local training"),
        ({"after": {}, "lr": 0.1, "epochs": 0}, InvalidOption, "epochs to be a whole number >= 1"),
        ({"after": {}, "difference": {}, "lr": 0.1}, InvalidOption, "both after= and difference="),
        ({"difference": {"nope": 1.0}, "lr": 0.1}, InvalidUpdate, "no parameter 'nope'"),
    ],
)
def test_what_contradicts_itself_is_told(given, error, message):
    planted = plant(3)
    state = planted.model.state_dict()

    def filled(value):  # an empty dict stands for a whole one, and 1.0 for a tensor
        if not isinstance(value, dict):
            return value
        return {name: state.get(name, torch.ones(2)) for name in value} or planted.gradients

    with pytest.raises(error, match=message):
        observe(planted.model, **{name: filled(value) for name, value in given.items()})


def test_differences_that_cannot_be_are_told():
    planted = plant(3)
    zero = {n: torch.zeros_like(g) for n, g in planted.gradients.items()}
    with pytest.raises(InvalidUpdate, match="the difference sent is zero"):
        observe(planted.model, difference=zero, lr=0.1)
    with pytest.raises(InvalidUpdate, match=r"the difference of '0\.weight' has shape"):
        observe(planted.model, difference={"0.weight": torch.ones(2)}, lr=0.1)


def test_the_public_names():
    assert all(hasattr(spear, name) for name in spear.__all__)
    for name in ("InvalidOption", "InvalidUpdate", "MissingExtra", "NoAttackableLayer", "NotExact"):
        assert issubclass(getattr(spear, name), SpearError)


def test_a_layer_given_directly_says_so():
    assert bare(plant(3).view).choice == "one layer, 50 -> 60, given directly"


def test_training_goes_on_and_the_view_does_not():
    planted = plant(3)
    before = bits(spear.invert(planted.view, model=copy.deepcopy(planted.model)))
    parameters = list(planted.model.parameters())
    for p, g in zip(parameters, planted.gradients.values(), strict=True):
        p.grad = g.clone()
    view = observe(planted.model, [p.grad for p in parameters])
    optimiser = torch.optim.SGD(parameters, lr=0.5)
    optimiser.step()
    optimiser.zero_grad(set_to_none=False)
    planted.model.eval()
    assert bits(spear.invert(view, model=view.model)) == before
    assert view.model.training
    assert all(p.grad is None for p in view.model.parameters())


def changed_weight(model):
    model[0].weight.data.mul_(1.5)  # which moves no version counter


@pytest.mark.parametrize(
    "change",
    [
        changed_weight,
        lambda model: model[4].running_mean.add_(1),
        lambda model: model[2].eval(),
        lambda model: setattr(model[2], "p", 0.25),
        lambda model: model[3].bias.requires_grad_(False),
        lambda model: model[0].register_forward_hook(lambda *_: None),
    ],
)
def test_views_of_one_state_share_a_copy(change):
    model = nn.Sequential(
        nn.Linear(8, 6), nn.ReLU(), nn.Dropout(0.5), nn.Linear(6, 2), nn.BatchNorm1d(2)
    )
    gradients = {n: torch.randn_like(p) for n, p in model.named_parameters()}
    first = [observe(model, gradients) for _ in range(3)]
    assert len({id(view.model) for view in first}) == 1
    assert first[0].model is not model
    change(model)
    second = observe(model, gradients)
    assert second.model is not first[0].model
    assert torch.equal(second.weight, model[0].weight)
    assert second.weight.data_ptr() == second.model[0].weight.data_ptr()
    assert second.model[2].training == model[2].training


def test_copies_go_with_the_model():
    def seen(model):
        view = observe(model, {n: torch.randn_like(p) for n, p in model.named_parameters()})
        return weakref.ref(view.model)

    plain, hooked = (nn.Sequential(nn.Linear(8, 6), nn.ReLU()) for _ in range(2))
    hooked[0].register_forward_hook(lambda *_, owner=hooked: owner)
    owners = [weakref.ref(plain), weakref.ref(hooked)]
    copies = [seen(plain), seen(hooked)]
    assert copies[0]() is seen(plain)()  # kept for the next view
    del plain, hooked
    gc.collect()
    assert [ref() for ref in owners + copies] == [None] * 4


def test_threads_share_one_copy():
    planted = plant(3)
    with ThreadPoolExecutor(8) as pool:
        views = list(pool.map(lambda _: planted.view, range(40)))
    assert len({id(view.model) for view in views}) == 1


def test_hooks_do_not_take_their_owner_along():
    class Trainer:
        def __deepcopy__(self, memo):
            raise AssertionError("the trainer was copied")

        def watch(self, *_):
            pass

    planted = plant(3)
    planted.model[0].register_forward_hook(Trainer().watch)
    assert planted.view.notes == ()
    assert len(planted.view.model[0]._forward_hooks) == 1


def test_weights_that_a_hook_computes():
    planted = plant(3)
    prune.l1_unstructured(planted.model[2], "weight", amount=0.3)
    planted.model(planted.inputs)  # the pruned weight is now the result of a forward pass
    gradients = {n: g for n, g in planted.gradients.items() if n.startswith("0.")}
    view = observe(planted.model, gradients)
    assert view.notes == ()
    assert torch.equal(view.model(planted.inputs), planted.model(planted.inputs))


@pytest.mark.parametrize("kind", ["forbids", "returns itself", "holds a lock"])
def test_a_model_that_cannot_be_copied_is_kept_and_told(kind):
    class Stubborn(nn.Sequential):
        def __deepcopy__(self, memo):
            if kind == "forbids":
                raise TypeError("no copies")
            return self

    planted = plant(3)
    model = planted.model
    if kind == "holds a lock":
        model.lock = threading.Lock()
    else:
        model = Stubborn(*planted.model)
    view = observe(model, planted.gradients)
    assert view.model is model
    assert "the model cannot be copied (TypeError" in view.choice
    result = bits(spear.invert(view))
    changed_weight(model)
    assert torch.equal(view.weight * 1.5, model[0].weight)
    changed_weight(planted.model)
    assert result == bits(spear.invert(plant(3).view))


def embedded():
    """An embedding with sparse gradients before the layer that is attacked, and its batch."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Embedding(50, 8, sparse=True), nn.Flatten(), nn.Linear(32, 60), nn.ReLU()
    ).append(nn.Linear(60, 5))
    words, y = torch.randint(50, (3, 4)), torch.tensor([0, 4, 2])
    nn.functional.cross_entropy(model(words), y).backward()
    return model, model[0](words).flatten(1)


def test_sparse_gradients_are_made_dense():
    model, x = embedded()
    sparse = model[0].weight.grad
    assert sparse.is_sparse
    view = observe(model, [p.grad for p in model.parameters()])
    assert view.layer == "2"
    assert torch.equal(view.others["0.weight"], sparse.to_dense())
    result = spear.invert(view)
    assert result.outcome is spear.Outcome.EXACT
    assert worst_error(result.inputs, x) < 1e-4


def test_lazy_modules_and_models_without_numbers_are_told():
    lazy = nn.Sequential(nn.LazyLinear(6), nn.ReLU(), nn.Linear(6, 2))
    with pytest.raises(InvalidUpdate, match=r"'0\.weight' has no shape yet .* one forward pass"):
        observe(lazy, [None] * 4)
    with pytest.raises(InvalidUpdate, match=r"'0\.weight' has no shape yet"):
        observe(lazy, after={}, lr=0.1)
    with torch.device("meta"):
        empty = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 2))
    with pytest.raises(InvalidUpdate, match=r"the model's '0\.weight' is on the meta device"):
        observe(empty, [torch.zeros_like(p, device="cpu") for p in empty.parameters()])


@pytest.mark.parametrize(
    ("convert", "message"),
    [
        (lambda g: g.long(), "the gradient of '2.weight' is torch.int64"),
        (lambda g: g > 0, "the gradient of '2.weight' is torch.bool"),
        (lambda g: g.to("meta"), "the gradient of '2.weight' is on the meta device"),
        (quantised, "quantised .*dequantize"),
    ],
)
def test_gradients_of_the_wrong_kind_are_told_by_name(convert, message):
    planted = plant(3)
    bad = {**planted.gradients, "2.weight": convert(planted.gradients["2.weight"])}
    with pytest.raises(InvalidUpdate, match=message):
        observe(planted.model, bad)


def test_complex_parameters_elsewhere_are_left_out():
    planted = plant(3)
    planted.model.register_parameter("phase", nn.Parameter(torch.ones(2, dtype=torch.complex64)))
    view = observe(planted.model, {**planted.gradients, "phase": torch.ones(2) + 0j})
    assert "phase" not in view.others
    assert "the gradient of 'phase' is complex: it is not compared" in view.choice


@pytest.mark.parametrize("coarse", [["0.bias"], ["0.weight", "0.bias", "2.weight"]])
def test_half_precision_beside_single(coarse):
    planted = plant(3, m=100, n=40, seed=1)
    sent = {n: g.half() if n in coarse else g for n, g in planted.gradients.items()}
    view = observe(planted.model, sent)
    assert view.weight.dtype == torch.float32
    assert view.precision == torch.float16
    assert observe(planted.model, planted.gradients).precision == torch.float32
    result = spear.invert(view)
    assert result.inputs.dtype == torch.float32
    assert worst_error(result.inputs, planted.inputs) < 5e-3


def test_weights_in_half_precision_and_gradients_in_double():
    planted = plant(3, m=100, n=40, seed=1)
    for p in planted.model.parameters():
        p.data = p.data.half().float()
    exact = plant(3, m=100, n=40, seed=1, dtype=torch.float64)
    exact.model.load_state_dict({n: v.double() for n, v in planted.model.state_dict().items()})
    sent = torch.autograd.grad(
        nn.functional.cross_entropy(exact.model(exact.inputs), exact.labels),
        list(exact.model.parameters()),
    )
    result = spear.invert(observe(planted.model.half(), sent))
    assert worst_error(result.inputs, exact.inputs) < 1e-9


def test_a_difference_is_what_after_is():
    planted = plant(3, dtype=torch.float64)
    before = {n: p.detach().clone() for n, p in planted.model.named_parameters()}
    after = {n: (1 - 0.1 * 0.01) * before[n] - 0.1 * planted.gradients[n] for n in before}
    how = {"lr": 0.1, "epochs": 1, "weight_decay": 0.01}
    by_weights = observe(planted.model, after=after, **how)
    moved = {n: after[n] - before[n] for n in before}
    one_layer = {"0.weight": moved["0.weight"], "0.bias": moved["0.bias"]}
    for given in (moved, list(moved.values()), one_layer):
        view = observe(planted.model, difference=given, **how)
        assert torch.allclose(view.weight_grad, by_weights.weight_grad, atol=1e-13)
        assert torch.allclose(view.bias_grad, planted.gradients["0.bias"], atol=1e-13)
        assert view.protocol.epochs == by_weights.protocol.epochs
    assert view.others == {}


def test_a_difference_of_state_dicts_has_buffers_too():
    model = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.BatchNorm1d(6), nn.Linear(6, 2))
    before = copy.deepcopy(model.state_dict())
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.randn(4, 8)).square().mean().backward()
    gradient = model[0].weight.grad.clone()
    optimiser.step()
    d = {n: value - before[n] for n, value in model.state_dict().items()}
    model.load_state_dict(before)
    view = observe(model, difference=d, lr=0.1, epochs=1)
    assert torch.allclose(view.weight_grad, gradient, atol=1e-6)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (nn.Linear(3, 4), r"of this Linear are itself \(4 x 3\)"),
        (mlp(6, 3, width=9, depth=2, seed=0), r"are 0 \(9 x 6\), 2 \(3 x 9\)"),
        (nn.ReLU(), "of this ReLU are none"),
    ],
)
def test_another_model_has_to_have_the_layer(model, words):
    net = mlp(6, 3, width=20, depth=2, seed=0)
    x = torch.randn(2, 6, generator=torch.Generator().manual_seed(0))
    view = observe(net, fedsgd(net, x, torch.tensor([0, 1])))
    with pytest.raises(InvalidOption, match=f"the layer '0' of 20 x 6 .*{words}"):
        view.with_model(model)
    other = mlp(6, 3, width=20, depth=3, seed=1)
    assert view.with_model(other).model is other
