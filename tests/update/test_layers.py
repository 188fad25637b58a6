"""Which layers of a model can be attacked, and the networks before and behind one."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from spear.update.layers import inspect_layers, network_after, network_before
from support.planted import gaussian, module


def functional():
    return module(
        lambda self, x: self.second(F.relu(self.first(x.flatten(1)))),
        first=nn.Linear(6, 5),
        second=nn.Linear(5, 3),
    )


def untraceable():
    net = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    return module(lambda self, x: self.net(x) if x.sum() > 0 else -self.net(x), net=net)


def shared():
    return module(
        lambda self, x: torch.relu(self.layer(torch.relu(self.layer(x)))), layer=nn.Linear(4, 4)
    )


def kinds(model):
    return {report.name: report.relu for report in inspect_layers(model)}


def test_nested_modules_and_pass_throughs():
    nested = nn.Sequential(nn.Linear(8, 6), nn.Identity(), nn.ReLU(inplace=True))
    model = nn.Sequential(nn.Flatten(), nested, nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2))
    assert kinds(model) == {"1.0": "after", "2": "before", "4": None}


def test_where_the_relus_are():
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    assert kinds(model) == {"0": "after", "2": "both", "4": "before"}
    assert kinds(functional()) == {"first": "after", "second": "before"}
    features = (nn.Conv2d(3, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten())
    assert kinds(nn.Sequential(*features, nn.Linear(16, 8), nn.ReLU())) == {"4": "both"}


def test_a_skip_connection_around_the_relu_is_no_relu():
    def forward(self, x):
        z = self.inner(x)
        return self.head(torch.relu(z) + z)

    model = module(forward, inner=nn.Linear(4, 4), head=nn.Linear(4, 2))
    inner = next(report for report in inspect_layers(model) if report.name == "inner")
    assert inner.relu is None
    assert "goes to 2 places" in inner.why


def test_batch_norm_dropout_and_other_activations_are_named():
    norm = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU())
    assert "BatchNorm1d" in inspect_layers(norm)[0].why
    leaky = nn.Sequential(nn.Linear(4, 4), nn.LeakyReLU())
    assert "LeakyReLU" in inspect_layers(leaky)[0].why
    dropout = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.ReLU())
    assert [(r.relu, r.dropout) for r in inspect_layers(dropout)] == [("after", 0.5)]
    assert [(r.relu, r.dropout) for r in inspect_layers(dropout.eval())] == [("after", 0.0)]
    alpha = nn.Sequential(nn.Linear(4, 4), nn.AlphaDropout(0.5), nn.ReLU())
    assert "AlphaDropout" in inspect_layers(alpha)[0].why


def test_a_layer_used_twice_is_refused():
    assert "used 2 times" in inspect_layers(shared())[0].why


def unrunnable():
    net = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    return module(lambda self, batch: self.net(batch["x"]) if batch["x"].sum() else 0, net=net)


@pytest.mark.parametrize("model", [untraceable, unrunnable])
def test_an_untraceable_model_is_watched_or_else_read_in_order(model):
    reports = inspect_layers(model())
    assert [(r.name, r.relu) for r in reports] == [("net.0", "after"), ("net.2", "before")]
    assert ("cannot be traced" in reports[0].why) == (model is unrunnable)


@pytest.mark.parametrize("layer", ["first", "second"])
def test_a_network_is_cut_before_and_behind_a_layer(layer):
    model, x, seen = functional(), torch.randn(7, 2, 3), []
    hook = model.get_submodule(layer).register_forward_hook(lambda _m, i, _out: seen.append(i[0]))
    expected = model(x)
    hook.remove()
    before, behind = network_before(model, layer), network_after(model, layer)
    assert torch.equal(before(x), seen[0])
    assert torch.equal(behind(model.get_submodule(layer)(before(x))), expected)
    parts = [
        {name.split(".")[0] for name, _ in part.named_parameters()} for part in (before, behind)
    ]
    assert parts == ([{"first"}, set()] if layer == "second" else [set(), {"second"}])


def test_the_network_before_one_of_two_branches():
    def forward(self, x):
        return self.head(torch.relu(self.left(x)) * torch.relu(self.right(x)))

    linear = {"left": nn.Linear(4, 3), "right": nn.Linear(4, 3), "head": nn.Linear(3, 2)}
    before, x = network_before(module(forward, **linear), "right"), torch.randn(5, 4)
    assert torch.equal(before(x), x)
    assert not list(before.named_parameters())


def bypassed():
    return module(lambda self, x: torch.relu(self.layer(x)) + x, layer=nn.Linear(4, 4))


def dropped():
    def forward(self, x):
        torch.relu(self.layer(x))
        return self.head(self.table)

    table = torch.randn(3, 4)
    return module(forward, layer=nn.Linear(4, 4), head=nn.Linear(4, 2), table=table)


@pytest.mark.parametrize(
    ("network", "model", "layer", "reason"),
    [
        (network_after, bypassed, "layer", "bypasses"),
        (network_after, unrunnable, "net.0", "cannot be traced"),
        (network_after, dropped, "layer", "layer 'layer' does not reach the model's output"),
        (network_before, functional, "third", "used 0 times"),
        (network_before, shared, "layer", "used 2 times"),
        (network_before, untraceable, "net.2", "cannot be traced"),
    ],
)
def test_why_there_is_no_network_is_told(network, model, layer, reason):
    assert reason in network(model(), layer).reason


def test_layers_without_a_use_or_an_input_of_their_own():
    def forward(self, x):
        self.lost(x)
        return self.head(self.pair(x, x) + torch.relu(self.constant(self.table))[:1])

    names = ("spare", "constant", "lost", "head")
    linear = {name: nn.Linear(4, 4) for name in names}
    model = module(forward, pair=nn.Bilinear(4, 4, 4), table=torch.randn(3, 4), **linear)
    reports = {report.name: report for report in inspect_layers(model)}
    assert reports["spare"].relu is None
    assert "not used in the forward pass" in reports["spare"].why
    assert reports["constant"].relu == "after"
    assert not reports["constant"].reads_data  # it reads the model's own table
    assert not reports["head"].reads_data
    assert "its output goes to 0 places" in reports["lost"].why


@pytest.mark.parametrize(
    ("before", "reads_data"),
    [
        (lambda x: x.view(x.size(0), -1), True),
        (lambda x: x.reshape(x.shape[0], -1), True),
        (lambda x: torch.reshape(x, (x.shape[0], 12)), True),
        (lambda x: x.flatten(1), True),
        (lambda x: x + x.roll(1, 0), False),
    ],
)
def test_a_layer_behind_a_reshape_by_the_batch_size_reads_the_data(before, reads_data):
    def forward(self, x):
        return self.head(torch.relu(self.layer(before(x))))

    first, second = inspect_layers(module(forward, layer=nn.Linear(12, 30), head=nn.Linear(30, 3)))
    assert (first.name, first.relu, first.reads_data) == ("layer", "after", reads_data)
    assert not second.reads_data


def test_a_layer_that_two_inputs_meet_in_front_of_reads_no_data():
    def forward(self, x, y):
        return self.head(torch.relu(self.layer(x + y)))

    model = module(forward, layer=nn.Linear(4, 6), head=nn.Linear(6, 2))
    assert not next(r for r in inspect_layers(model) if r.name == "layer").reads_data


def test_the_network_behind_a_layer_leaves_its_input_alone():
    model = nn.Sequential(nn.Linear(6, 5), nn.ReLU(inplace=True), nn.Linear(5, 3))
    behind = network_after(model, "0")
    z = gaussian(4, 5).requires_grad_()
    before = z.detach().clone()
    behind(z).sum().backward()
    assert torch.equal(z, before)
    assert torch.equal(behind(z), model[2](torch.relu(z)))


def test_functional_relus_behind_a_layer_are_modules():
    model = module(
        lambda self, x: self.second(F.relu_(F.relu(self.first(x)).neg())),
        first=nn.Linear(6, 5),
        second=nn.Linear(5, 3),
    )
    behind = network_after(model, "first")
    assert sum(isinstance(each, nn.ReLU) for each in behind.modules()) == 2


def test_what_reads_a_tensor_after_an_operation_in_place_reads_its_result():
    def forward(self, x):
        z = self.first(x)
        F.relu_(z)
        return self.second(z)

    model = module(forward, first=nn.Linear(6, 5), second=nn.Linear(5, 3))
    assert kinds(model) == {"first": "after", "second": "before"}
