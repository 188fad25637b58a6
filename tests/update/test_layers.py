import pytest
import torch
from torch import nn
from torch.nn import functional as F

from spear.update.layers import inspect_layers, network_after, network_before


class Functional(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 5), nn.Linear(5, 3)

    def forward(self, x):
        return self.second(F.relu(self.first(x.flatten(1))))


class Skip(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.head = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x):
        z = self.inner(x)
        return self.head(torch.relu(z) + z)


class Untraceable(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))

    def forward(self, x):
        return self.net(x) if x.sum() > 0 else -self.net(x)


class Shared(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        return torch.relu(self.layer(torch.relu(self.layer(x))))


def kinds(model):
    return {report.name: report.relu for report in inspect_layers(model)}


def test_nested_modules_and_pass_throughs():
    model = nn.Sequential(
        nn.Flatten(),
        nn.Sequential(nn.Linear(8, 6), nn.Identity(), nn.ReLU(inplace=True)),
        nn.Linear(6, 6),
        nn.Tanh(),
        nn.Linear(6, 2),
    )
    assert kinds(model) == {"1.0": "after", "2": "before", "4": None}


def test_where_the_relus_are():
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    assert kinds(model) == {"0": "after", "2": "both", "4": "before"}
    assert kinds(Functional()) == {"first": "after", "second": "before"}
    features = (nn.Conv2d(3, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten())
    assert kinds(nn.Sequential(*features, nn.Linear(16, 8), nn.ReLU())) == {"4": "both"}


def test_a_skip_connection_around_the_relu_is_no_relu():
    reports = {r.name: r for r in inspect_layers(Skip())}
    assert reports["inner"].relu is None
    assert "goes to 2 places" in reports["inner"].why


def test_batch_norm_dropout_and_other_activations_are_named():
    norm = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU())
    assert "BatchNorm1d" in inspect_layers(norm)[0].why
    leaky = nn.Sequential(nn.Linear(4, 4), nn.LeakyReLU())
    assert "LeakyReLU" in inspect_layers(leaky)[0].why
    dropout = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.ReLU())
    assert kinds(dropout) == {"0": None}
    assert kinds(dropout.eval()) == {"0": "after"}


def test_a_layer_used_twice_is_refused():
    assert "used 2 times" in inspect_layers(Shared())[0].why


def test_an_untraceable_model_is_read_in_order():
    reports = inspect_layers(Untraceable())
    assert [(r.name, r.relu) for r in reports] == [("net.0", "after"), ("net.2", "before")]
    assert "cannot be traced" in reports[0].why


def test_no_network_behind_a_bypassed_layer():
    class Bypass(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x):
            return torch.relu(self.layer(x)) + x

    assert "bypasses" in network_after(Bypass(), "layer").reason
    assert "cannot be traced" in network_after(Untraceable(), "net.0").reason


@pytest.mark.parametrize("layer", ["first", "second"])
def test_a_network_is_cut_before_and_behind_a_layer(layer):
    model = Functional()
    x = torch.randn(7, 2, 3)
    seen = []
    hook = model.get_submodule(layer).register_forward_hook(lambda _m, i, _out: seen.append(i[0]))
    expected = model(x)
    hook.remove()
    before, behind = network_before(model, layer), network_after(model, layer)
    assert torch.equal(before(x), seen[0])
    assert torch.equal(behind(model.get_submodule(layer)(before(x))), expected)
    names = [
        {name.split(".")[0] for name, _ in part.named_parameters()} for part in (before, behind)
    ]
    assert names == ([{"first"}, set()] if layer == "second" else [set(), {"second"}])


def test_the_network_before_one_of_two_branches():
    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            self.left, self.right, self.head = nn.Linear(4, 3), nn.Linear(4, 3), nn.Linear(3, 2)

        def forward(self, x):
            return self.head(torch.relu(self.left(x)) * torch.relu(self.right(x)))

    before = network_before(Branches(), "right")
    x = torch.randn(5, 4)
    assert torch.equal(before(x), x)
    assert not list(before.named_parameters())


def test_no_network_before_what_is_not_there():
    assert "used 0 times" in network_before(Functional(), "third").reason
    assert "used 2 times" in network_before(Shared(), "layer").reason
    assert "cannot be traced" in network_before(Untraceable(), "net.2").reason


def test_layers_without_a_use_or_an_input_of_their_own():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.spare, self.constant = nn.Linear(4, 4), nn.Linear(4, 4)
            self.pair, self.head = nn.Bilinear(4, 4, 4), nn.Linear(4, 2)
            self.lost = nn.Linear(4, 4)
            self.register_buffer("table", torch.randn(3, 4))

        def forward(self, x):
            self.lost(x)
            return self.head(self.pair(x, x) + torch.relu(self.constant(self.table))[:1])

    reports = {report.name: report for report in inspect_layers(Odd())}
    assert reports["spare"].relu is None
    assert "not used in the forward pass" in reports["spare"].why
    assert reports["constant"].relu == "after"
    assert not reports["constant"].reads_data  # it reads the model's own table
    assert not reports["head"].reads_data
    assert "its output goes to 0 places" in reports["lost"].why


def test_a_layer_that_two_inputs_meet_in_front_of_reads_no_data():
    class Sum(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.head = nn.Linear(4, 6), nn.Linear(6, 2)

        def forward(self, x, y):
            return self.head(torch.relu(self.layer(x + y)))

    assert not next(r for r in inspect_layers(Sum()) if r.name == "layer").reads_data


def test_no_network_behind_a_layer_whose_output_is_dropped():
    class Constant(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.head = nn.Linear(4, 4), nn.Linear(4, 2)
            self.register_buffer("table", torch.randn(3, 4))

        def forward(self, x):
            torch.relu(self.layer(x))
            return self.head(self.table)

    declined = network_after(Constant(), "layer")
    assert declined.reason == "layer 'layer' does not reach the model's output"


@pytest.mark.parametrize(
    "reshape",
    [
        lambda x: x.view(x.size(0), -1),
        lambda x: x.reshape(x.shape[0], -1),
        lambda x: torch.reshape(x, (x.shape[0], 12)),
        lambda x: x.flatten(1),
    ],
)
def test_a_layer_behind_a_reshape_by_the_batch_size_reads_the_data(reshape):
    class Flat(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.head = nn.Linear(12, 30), nn.Linear(30, 3)

        def forward(self, x):
            return self.head(torch.relu(self.layer(reshape(x))))

    first, second = inspect_layers(Flat())
    assert (first.name, first.relu, first.reads_data) == ("layer", "after", True)
    assert not second.reads_data
