"""Whatever frameworks hand over is read alike, or refused in words."""

import copy
import io
import pathlib
from collections import OrderedDict
from types import MappingProxyType

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parameters_to_vector

import spear
from spear import InvalidUpdate, LayerUpdate, observe
from support.planted import plant

LR = 0.1


class Net(nn.Module):
    """A linear layer to attack, frozen layers, buffers that are saved and one that is not."""

    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(8, 12)
        self.fc2 = nn.Linear(12, 12)
        self.norm = nn.BatchNorm1d(12)
        self.fc3 = nn.Linear(12, 3)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.register_buffer("mask", torch.ones(3), persistent=False)
        self.fc2.requires_grad_(False)

    def forward(self, x):
        x = torch.relu(self.fc2(torch.relu(self.fc1(x))))
        return self.fc3(self.norm(x)) * self.scale * self.mask


class Round:
    """One step of a client: the model it was sent, its gradient, and what it sends back."""

    def __init__(self):
        torch.manual_seed(0)
        self.model = Net()
        self.client = copy.deepcopy(self.model)
        x, y = torch.randn(4, 8), torch.tensor([0, 1, 2, 0])
        nn.functional.cross_entropy(self.client(x), y).backward()
        names = [name for name, _ in self.model.named_parameters()]
        self.gradients = {
            name: torch.zeros_like(p) if p.grad is None else p.grad.clone()
            for name, p in self.client.named_parameters()
        }
        torch.optim.SGD(self.client.parameters(), lr=LR).step()
        before, after = self.model.state_dict(), self.client.state_dict()
        self.parts = {
            "gradients": self.gradients,
            "after": {name: after[name] for name in names},
            "difference": {name: after[name] - before[name] for name in names},
        }
        buffers = {name: after[name] for name in after if name not in names}
        self.states = {
            keyword: {name: {**parts, **buffers}[name] for name in after}
            for keyword, parts in self.parts.items()
        }

    def seen(self, keyword, given, model=None):
        how = {} if keyword == "gradients" else {"lr": LR, "epochs": 1}
        return observe(model or self.model, **{keyword: given}, **how)


def trainable(parts):
    return {name: part for name, part in parts.items() if not name.startswith("fc2.")}


def arrays(parts):
    return {name: part.numpy() for name, part in parts.items()}


def flat(parts):
    return torch.cat([part.flatten().double() for part in parts.values()]).float()


def prefixed(parts, prefix):
    return {prefix + name: part for name, part in parts.items()}


def read_only(parts):
    found = {name: array.copy() for name, array in arrays(parts).items()}
    for array in found.values():
        array.flags.writeable = False
    return found


def saved(parts):
    file = io.BytesIO()
    np.savez(file, *arrays(parts).values())
    file.seek(0)
    return np.load(file)


class Holder:
    def __init__(self, state):
        self.state = state

    def state_dict(self):
        return self.state


class Foreign:
    """An array of another framework."""

    def __init__(self, tensor):
        self.tensor = tensor

    def __array__(self, dtype=None, copy=None):
        return self.tensor.numpy()


class Wire:
    """An array as Flower's messages hold it."""

    def __init__(self, tensor):
        self.tensor = tensor

    def numpy(self):
        return self.tensor.numpy()


# Each takes the parameters' tensors and those of the whole state dict.
FORMS = {
    "dict": lambda parts, state: parts,
    "ordered dict": lambda parts, state: OrderedDict(parts),
    "other mapping": lambda parts, state: MappingProxyType(parts),
    "dict in another order": lambda parts, state: dict(reversed(parts.items())),
    "trainable ones by name": lambda parts, state: trainable(parts),
    "state dict": lambda parts, state: state,
    "arrays by name": lambda parts, state: arrays(parts),
    "read-only arrays": lambda parts, state: read_only(parts),
    "big-endian arrays": lambda parts, state: {
        n: a.astype(a.dtype.newbyteorder(">")) for n, a in arrays(parts).items()
    },
    "arrays turned round": lambda parts, state: {
        n: np.flip(np.flip(a).copy()) for n, a in arrays(parts).items()
    },
    "double arrays": lambda parts, state: {n: a.astype("f8") for n, a in arrays(parts).items()},
    "long doubles": lambda parts, state: {n: a.astype("g") for n, a in arrays(parts).items()},
    "arrays of others": lambda parts, state: {n: Foreign(p) for n, p in parts.items()},
    "arrays of messages": lambda parts, state: {n: Wire(p) for n, p in parts.items()},
    "parameters": lambda parts, state: {n: nn.Parameter(p) for n, p in parts.items()},
    "a NumPy scalar": lambda parts, state: {**parts, "scale": np.float32(parts["scale"])},
    "lists of numbers": lambda parts, state: {n: p.tolist() for n, p in parts.items()},
    "list": lambda parts, state: list(parts.values()),
    "tuple": lambda parts, state: tuple(parts.values()),
    "dict values": lambda parts, state: parts.values(),
    "generator": lambda parts, state: (p for p in parts.values()),
    "list of arrays": lambda parts, state: list(arrays(parts).values()),
    "list of trainable ones": lambda parts, state: list(trainable(parts).values()),
    "list of the state dict": lambda parts, state: list(state.values()),
    "as Flower lists it": lambda parts, state: [v.cpu().numpy() for _, v in state.items()],
    "object array": lambda parts, state: np.array([*arrays(parts).values()], dtype=object),
    "npz of a list": lambda parts, state: saved(parts),
    "nested lists": lambda parts, state: [p.tolist() for p in parts.values()],
    "pairs": lambda parts, state: list(parts.items()),
    "items": lambda parts, state: parts.items(),
    "zip": lambda parts, state: zip(parts, parts.values(), strict=True),
    "generator of pairs": lambda parts, state: ((n, p) for n, p in state.items()),
    "flat": lambda parts, state: flat(parts),
    "flat array": lambda parts, state: flat(parts).numpy(),
    "flat list": lambda parts, state: flat(parts).tolist(),
    "flat and sparse": lambda parts, state: flat(parts).to_sparse(),
    "flat trainable ones": lambda parts, state: flat(trainable(parts)),
    "flat state dict": lambda parts, state: flat(state),
    **{
        prefix: lambda parts, state, prefix=prefix: prefixed(state, prefix)
        for prefix in (
            "module.",
            "_module.",
            "_orig_mod.",
            "_orig_mod.module.",
            "model.",
            "net.",
            "client.net.",
        )
    },
    "wrapped inside": lambda parts, state: {
        n.replace(".", ".module."): p for n, p in state.items()
    },
    "suffixed": lambda parts, state: {f"{n}.grad": p for n, p in parts.items()},
    "state_dict()": lambda parts, state: Holder(state),
    "checkpoint": lambda parts, state: {"state_dict": state, "epoch": 3},
    "checkpoint with optimiser": lambda parts, state: {
        "model": prefixed(state, "module."),
        "optimizer": {"state": {}, "param_groups": [{"lr": 0.1}]},
        "loss": torch.tensor(0.3),
        "rng": torch.zeros(5, dtype=torch.uint8),
    },
}


@pytest.mark.parametrize("keyword", ["gradients", "after", "difference"])
@pytest.mark.parametrize("form", FORMS)
def test_every_form_is_read_alike(form, keyword):
    sent = Round()
    plain = sent.seen(keyword, sent.parts[keyword])
    view = sent.seen(keyword, FORMS[form](sent.parts[keyword], sent.states[keyword]))
    assert view.layer == plain.layer == "fc1"
    assert view.mistake == plain.mistake == ""
    assert view.others.keys() == plain.others.keys()
    assert view.others.keys() == trainable(sent.gradients).keys() - {"fc1.weight", "fc1.bias"}
    for name, part in {"weight": plain.weight_grad, "bias": plain.bias_grad}.items():
        assert torch.allclose(getattr(view, f"{name}_grad").float(), part, 1e-6, 0), name
        assert torch.allclose(part, sent.gradients[f"fc1.{name}"], atol=1e-6)
    for name, part in plain.others.items():
        assert torch.allclose(view.others[name].float(), part, 1e-6, 0), name


def test_the_view_is_of_its_own():
    sent = Round()
    given = arrays({name: part.clone() for name, part in sent.gradients.items()})
    view = sent.seen("gradients", given)
    given["fc1.weight"][:] = 0
    assert torch.equal(view.weight_grad, sent.gradients["fc1.weight"])


def test_precision_is_what_was_sent():
    sent = Round()
    halves = {name: array.astype("float16") for name, array in arrays(sent.gradients).items()}
    assert sent.seen("gradients", halves).precision == torch.float16
    doubles = {name: array.astype(">f8") for name, array in arrays(sent.gradients).items()}
    assert sent.seen("gradients", doubles).precision == torch.float64
    numbers = {name: part.tolist() for name, part in sent.gradients.items()}
    assert sent.seen("gradients", numbers).precision == torch.float32  # the model's


def test_a_module_is_its_state_dict_or_its_gradients():
    sent = Round()
    plain = sent.seen("after", sent.parts["after"])
    for client in (sent.client, nn.DataParallel(sent.client)):
        assert torch.equal(sent.seen("after", client).weight_grad, plain.weight_grad)
        gradient = sent.seen("gradients", client).weight_grad
        assert torch.equal(gradient, sent.gradients["fc1.weight"])
    named = sent.seen("after", sent.client.named_parameters())
    assert torch.equal(named.weight_grad, plain.weight_grad)
    vector = sent.seen("after", parameters_to_vector(sent.client.parameters()))
    assert torch.equal(vector.weight_grad, plain.weight_grad)
    with pytest.raises(
        InvalidUpdate, match=r"no gradient of any parameter: call loss\.backward\(\)"
    ):
        sent.seen("gradients", sent.model)
    with pytest.raises(
        InvalidUpdate, match=r"no gradient of any parameter: call loss\.backward\(\)"
    ):
        sent.seen("gradients", [p.grad for p in sent.model.parameters()])


def opacus(model):
    return pytest.importorskip("opacus").GradSampleModule(model)


def compiled(model):
    return torch.compile(model, backend="eager")


@pytest.mark.parametrize(
    "wrap", [nn.DataParallel, compiled, opacus, lambda model: compiled(nn.DataParallel(model))]
)
def test_wrapped_models_are_those_inside(wrap):
    planted = plant(3)
    wrapped = wrap(planted.model)
    own = prefixed(planted.gradients, next(iter(wrapped.state_dict())).removesuffix("0.weight"))
    for given in (own, planted.gradients, list(own.values())):
        view = observe(wrapped, given)
        assert view.layer == "0"
        assert view.notes == ()
        assert type(view.model) is type(planted.model)
        assert torch.equal(view.weight_grad, planted.view.weight_grad)
    result = spear.invert(view)
    assert (result.outcome, result.proof) == (spear.Outcome.EXACT, spear.Proof.REPLAY)
    view = LayerUpdate(**{part: getattr(view, part) for part in PARTS}, layer="0")
    assert spear.invert(view, model=wrapped).outcome is spear.Outcome.EXACT


def test_the_models_own_prefix_may_be_missing():
    planted = plant(3)
    model = nn.Sequential(OrderedDict(net=planted.model))
    view = observe(model, planted.gradients)
    assert view.layer == "net.0"
    assert "The update's '0.weight' was read as 'net.0.weight'" in view.choice
    with pytest.raises(InvalidUpdate, match=r"no parameter '0\.weight'"):  # of which of the two?
        observe(nn.ModuleDict({"a": planted.model, "b": plant(3).model}), planted.gradients)


def test_a_checkpoint_is_told():
    sent = Round()
    view = sent.seen("after", {"net": sent.parts["after"], "epoch": 3})
    assert view.notes == ("A checkpoint was given: its 'net' was read, and nothing else of it.",)
    both = {"net": sent.parts["after"], "average": sent.parts["after"]}
    with pytest.raises(InvalidUpdate, match=r"no parameter 'net' \(a dict\) and 1 more"):
        sent.seen("after", both)


@pytest.mark.parametrize("frozen", ["0", "2", "4"])
@pytest.mark.parametrize("form", [dict, lambda state: list(state.values())])
def test_frozen_layers_do_not_hide_the_others(frozen, form):
    planted = plant(3)
    client = copy.deepcopy(planted.model)
    for model in (planted.model, client):
        model.get_submodule(frozen).requires_grad_(False)
    nn.functional.cross_entropy(client(planted.inputs), planted.labels).backward()
    trained = [p for p in client.parameters() if p.requires_grad]
    torch.optim.SGD(trained, lr=LR).step()
    view = observe(planted.model, after=form(client.state_dict()), lr=LR, epochs=1)
    assert view.layer == ("2" if frozen == "0" else "0")
    assert spear.invert(view).outcome is spear.Outcome.EXACT


def test_the_model_itself_is_still_no_update_when_parts_are_frozen():
    sent = Round()
    with pytest.raises(spear.errors.NoUpdate, match="equals the model"):
        sent.seen("after", copy.deepcopy(sent.model.state_dict()))


@pytest.mark.parametrize(
    "form", ["dict", "arrays by name", "list of arrays", "pairs", "flat", "module.", "checkpoint"]
)
def test_state_dicts_stand_for_models(form):
    planted = plant(3)
    before = planted.model.state_dict()
    after = {n: before[n] - LR * planted.gradients[n] for n in before}
    how = {"lr": LR, "epochs": 1}
    plain = observe(planted.model, after=after, **how)
    for state in (
        before,
        arrays(before),
        prefixed(before, "module."),
        {"model": before, "step": 1},
    ):
        view = observe(state, after=FORMS[form](after, after), **how)
        assert view.layer in ("0", "module.0")
        assert torch.equal(view.weight_grad, plain.weight_grad)


@pytest.mark.parametrize(
    "form", ["dict", "arrays by name", "list", "module.", "state dict", "flat"]
)
def test_state_dicts_of_other_models(form):
    sent = Round()
    before = sent.model.state_dict()
    view = sent.seen("after", FORMS[form](sent.parts["after"], sent.states["after"]), before)
    assert "no plain MLP" in view.notes[-1]
    assert torch.allclose(view.weight_grad, sent.gradients["fc1.weight"], atol=1e-5)


def test_state_dicts_in_another_order():
    planted = plant(3)
    backwards = dict(reversed(planted.model.state_dict().items()))
    ordered = [planted.gradients[name] for name in backwards]
    for given in (ordered, planted.gradients, list(planted.gradients.values())):
        assert torch.equal(observe(backwards, given).weight_grad, planted.view.weight_grad)


EXPECTED = "expected gradients as a dict by parameter name, a list .* or one flat vector; got "
NUMBERS = "expected a tensor or an array of numbers"


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (lambda g: "gradients.pt", EXPECTED + "a str: read the file first"),
        (lambda g: pathlib.Path("g.pt"), EXPECTED + "a PosixPath: read the file first"),
        (lambda g: b"1234", EXPECTED + "a bytes"),
        (lambda g: 3, EXPECTED + "an int"),
        (lambda g: np.float32(3), EXPECTED + r"one tensor of shape \(\)"),
        (lambda g: g["fc1.weight"], EXPECTED + r"one tensor of shape \(12, 8\)"),
        (lambda g: flat(g)[None].numpy(), EXPECTED + r"one tensor of shape \(1, "),
        (lambda g: set(g.values()), EXPECTED + "a set"),
        (lambda g: Net, EXPECTED + "the class Net"),
        (lambda g: dict, EXPECTED + "the class dict"),
        (lambda g: np.array("text"), EXPECTED + "an array of dtype <U4"),
        (lambda g: np.empty((2, 2), dtype=object), EXPECTED + "an array of dtype object"),
        (lambda g: [], "expected 9 gradients for the parameters .* got 0"),
        (lambda g: {}, "no gradient of any parameter"),
        (dict.fromkeys, "no gradient of any parameter"),
        (
            lambda g: list(g.values())[:5],
            "expected 9 gradients for the parameters or 7 gradients for the trainable ones or "
            "12 gradients for the whole state dict, got 5: give a dict by parameter name",
        ),
        (
            lambda g: flat(g)[:-1],
            "a flat vector of 328 for the parameters or 172 for the trainable ones or 353 for the "
            "whole state dict, got 327 numbers",
        ),
        (lambda g: [1, 2.5, 3], "flat vector .* got 3 numbers"),
        (lambda g: [True] * 328, "expected 9 gradients .* got 328"),
        (lambda g: bytearray(3), EXPECTED + "a bytearray"),
        (lambda g: np.zeros(328, dtype=int), "'fc1.weight' is torch.int64, expected float64"),
        (lambda g: np.zeros(328, dtype=complex), r"'fc1.weight' is complex \(torch.complex128\)"),
        (lambda g: np.array(["a"] * 9), r"'fc1.weight' is a str_?, " + NUMBERS),
        (list, "'fc1.weight' is a str, " + NUMBERS),
        (lambda g: {**g, "fc1.bias": {}}, "'fc1.bias' is an empty dict, " + NUMBERS),
        (lambda g: {**g, "fc1.bias": [[1.0], [2.0, 3.0]]}, "'fc1.bias' is a list, " + NUMBERS),
        (lambda g: {**g, "fc1.bias": ["1"] * 12}, "'fc1.bias' is a list, " + NUMBERS),
        (lambda g: {**g, "fc1.bias": [nn.Parameter(torch.ones(1))]}, "'fc1.bias'"),
        (lambda g: {**g, "fc1.bias": np.array([None] * 12)}, "is an array of dtype object"),
        (lambda g: {**g, "fc1.bias": np.zeros(12, "M8[s]")}, "is an array of dtype datetime64"),
        (lambda g: {**g, "fc1.bias": np.zeros(12, bool)}, "'fc1.bias' is torch.bool"),
        (lambda g: {**g, "fc1.bias": 1.0}, r"'fc1.bias' has shape \(\), expected \(12,\)"),
        (lambda g: {**g, "fc1.bias": torch.ones(12) + 1j}, "complex .* the parameter is real"),
        (lambda g: {0: g["fc1.weight"], 1: g["fc1.bias"]}, "no parameter 0 and 1 more"),
        (lambda g: {"fc1": {"weight": g["fc1.weight"]}, "fc3": {"bias": g["fc3.bias"]}}, "'fc1' "),
        (lambda g: {"fc1": {"weight": g["fc1.weight"]}}, "no parameter 'weight'"),
        (lambda g: [*g.items(), ("fc1.bias", g["fc1.bias"])], "has 'fc1.bias' more than once"),
        (lambda g: {**g, "module.fc1.bias": g["fc1.bias"]}, "no parameter 'module.fc1.bias'"),
        (lambda g: [(g["fc1.weight"], g["fc1.bias"])] * 9, "'fc1.weight' is a tuple"),
        (lambda g: torch.optim.SGD(Net().parameters(), lr=1), r"'state' \(an empty dict\)"),
    ],
)
def test_anything_else_is_refused_in_words(bad, message):
    sent = Round()
    with pytest.raises(InvalidUpdate, match=message):
        sent.seen("gradients", bad(sent.gradients))
    with pytest.raises(InvalidUpdate):
        sent.seen("after", bad(sent.parts["after"]))
    with pytest.raises(InvalidUpdate):
        sent.seen("difference", bad(sent.parts["difference"]))


def test_all_problems_are_told_at_once():
    sent = Round()
    given = {**sent.parts["after"], "fc1.bias": torch.ones(3), "nope": torch.ones(3)}
    with pytest.raises(InvalidUpdate) as caught:
        sent.seen("after", given)
    assert caught.value.problems == (
        "the model has no parameter 'nope': expected its own names, 'scale', 'fc1.weight', "
        "'fc1.bias', 'fc2.weight', 'fc2.bias', 'norm.weight', ...",
        "the new value of 'fc1.bias' has shape (3,), expected (12,)",
    )


def test_what_a_generator_raises_goes_through():
    sent = Round()

    def broken():
        yield sent.gradients["scale"]
        raise ConnectionError("the client is gone")

    with pytest.raises(ConnectionError, match="the client is gone"):
        sent.seen("gradients", broken())


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ([1, 2], "expected a model .* or its state dict, got a list"),
        (Net, "or its state dict, got the class Net"),
        ({}, "or its state dict, got an empty dict"),
        ({"fc1.weight": "text"}, "expected a state dict of tensors or arrays by name, got 'fc1.we"),
        ({0: torch.ones(2, 2)}, "expected a state dict of tensors or arrays by name, got 0"),
    ],
)
def test_what_is_no_model_is_refused_in_words(model, message):
    with pytest.raises(InvalidUpdate, match=message):
        observe(model, Round().gradients)


PARTS = ("weight", "bias", "weight_grad", "bias_grad")


def test_a_layer_may_be_given_as_arrays():
    view = plant(3).view
    given = {part: getattr(view, part).detach().numpy() for part in PARTS}
    others = {name: part.numpy() for name, part in view.others.items()}
    same = LayerUpdate(**given, others=others)
    assert all(torch.equal(getattr(same, part), getattr(view, part)) for part in PARTS)
    assert all(torch.equal(same.others[name], part) for name, part in view.others.items())
    assert spear.invert(same).outcome is spear.Outcome.EXACT
    with pytest.raises(InvalidUpdate, match=r"weight is a list, expected .*; 2\.bias is a str"):
        LayerUpdate(**{**given, "weight": [[1.0]]}, others={"2.bias": "text"})


def test_messages_hold_more_than_the_update():
    planted = plant(3)
    flat = torch.cat([g.flatten() for g in planted.gradients.values()])
    whole = [g.numpy() for g in planted.gradients.values()]
    package = {"kept": {"bn.running_mean": np.zeros(3)}, "sent": planted.gradients, "samples": 12}
    with_loss = (planted.gradients, 12, torch.tensor(0.3))
    for sent in (
        *([flat], (12, flat), (12, planted.gradients), (whole, 12, {"loss": 0.3})),
        *(package, with_loss),
    ):
        view = observe(planted.model, sent)
        assert torch.equal(view.weight_grad, planted.view.weight_grad)
        assert set(view.others) == set(planted.view.others)


def test_parameters_whose_gradient_counts():
    planted = plant(3)
    for name, p in planted.model.named_parameters():
        p.grad = planted.gradients[name]
    sent = list(planted.model.named_parameters())
    assert torch.equal(observe(planted.model, sent).weight_grad, planted.view.weight_grad)


def test_layers_that_clients_keep_to_themselves_are_left_out():
    planted = plant(3)
    after = {
        name: p.detach() - 0.1 * planted.gradients[name]
        for name, p in planted.model.named_parameters()
        if not name.startswith("4.")
    }
    view = observe(planted.model, after=after, lr=0.1)
    assert view.layer == "0"
    assert not any(name.startswith("4.") for name in view.others)
    assert "'4.weight', '4.bias': taken as not sent" in view.choice
