"""Which layers of an ordinary `nn.Module` SPEAR can attack, and the networks before and behind one.

The model's forward is traced with torch.fx, so functional ReLUs, nested modules and skip
connections are seen as they are. A model that cannot be traced is watched while it runs on a made-up
input (`spear.update.watching`); one that does not run either is read in registration order.
"""

from __future__ import annotations

import copy
import dataclasses
import linecache
import operator
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, is_dataclass
from types import SimpleNamespace
from typing import Any, Literal, TypeVar

import torch
from torch import fx, nn
from torch.fx import graph_module
from torch.nn.utils import parametrize

from spear.errors import Declined
from spear.update.watching import DROPOUT_CALLS, Behind, Watched, watch

Relu = Literal["after", "before", "both"]
Module = TypeVar("Module", bound=nn.Module)

_RELU_CALLS = {"relu", "relu_", torch.relu, torch.relu_, nn.functional.relu, nn.functional.relu_}
_RESHAPE_CALLS = {
    *("view", "reshape", "flatten", "squeeze", "unsqueeze", "contiguous", "clone"),
    *("to", "float", "double", "cuda", "cpu"),
    *(torch.flatten, torch.reshape, torch.squeeze, torch.unsqueeze, torch.clone),
}
# Activations whose derivative is zero nowhere, or only in points.
_NO_ZEROS = {
    *("LeakyReLU", "PReLU", "RReLU", "ELU", "CELU", "SELU", "GELU", "SiLU", "Mish", "Softplus"),
    *(
        "Tanh",
        "Sigmoid",
        "LogSigmoid",
        "Softsign",
        "Hardswish",
        "leaky_relu",
        "elu",
        "celu",
        "selu",
    ),
    *("gelu", "silu", "mish", "softplus", "tanh", "sigmoid"),
}
_DROPOUT = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout)
# Pooling after a ReLU keeps inputs non-negative, and zero where a whole window is off.
_POOLING = (nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d)


@dataclass(frozen=True)
class Caveat:
    """A module before a layer that changes the data in train mode."""

    module: str  # its name
    words: str


@dataclass(frozen=True)
class LayerReport:
    """What SPEAR thinks of one linear layer: where its ReLUs are, or why it cannot be attacked."""

    name: str
    relu: Relu | None
    why: str
    reads_data: bool = False  # its inputs are the model's own, reshaped at most
    caveat: Caveat | None = None  # what, besides layers, stands between its inputs and the data
    reads: str | None = None  # the linear layer whose output it reads, through a ReLU only
    dropout: float = 0.0  # rate of the dropout between it and its ReLU, or right behind that
    own_weight: bool = True  # is the gradient that is sent that of its own weight, and of no other?
    features: int | None = None  # numbers that its inputs are linear functions of; None: not known

    @property
    def attackable(self) -> bool:
        return self.relu is not None


def inspect_layers(
    model: nn.Module, traced: Structure | Declined | None = None
) -> tuple[LayerReport, ...]:
    """A report on every linear layer of the model, in the order of the forward pass.

    Args:
        model: as the client was sent it.
        traced: `trace(model)`, if it was traced before.

    >>> net = nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 2))
    >>> [(r.name, r.relu) for r in inspect_layers(net)]
    [('0', 'after'), ('2', 'before')]
    """
    traced = trace(model) if traced is None else traced
    if isinstance(traced, Declined):
        return _inspect_registered(model, traced.reason)
    modules = dict(traced.named_modules())
    nodes: dict[str, list[fx.Node]] = {}
    for node in traced.graph.nodes:
        if node.op == "call_module" and isinstance(modules[str(node.target)], nn.Linear):
            nodes.setdefault(str(node.target), []).append(node)
    reports = [
        dataclasses.replace(_report(name, uses, modules), features=_features(uses[0], modules))
        for name, uses in nodes.items()
    ]
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name not in nodes:
            reports.append(LayerReport(name, None, "it is not used in the forward pass"))
    tied = _tied(model)
    return tuple(
        _with_its_own_weight(report, model.get_submodule(report.name), tied) for report in reports
    )


def _tied(model: nn.Module) -> set[str]:
    """Names of the modules that share a parameter with another."""
    owners = Counter(
        id(parameter)
        for module in model.modules()
        for parameter in module.parameters(recurse=False)
    )
    return {
        name
        for name, module in model.named_modules()
        for parameter in module.parameters(recurse=False)
        if owners[id(parameter)] > 1
    }


def _with_its_own_weight(report: LayerReport, layer: nn.Module, tied: set[str]) -> LayerReport:
    """The report, corrected where the gradient that is sent is not that of the layer's own weight."""
    if report.name in tied:
        why = "it shares its weights with another layer, so its gradient is a sum"
    elif parametrize.is_parametrized(layer):
        why = "its weight is computed from other parameters (parametrised), whose gradient is sent"
    else:
        return report
    return dataclasses.replace(report, relu=None, why=why, own_weight=False)


def network_after(model: nn.Module | Watched, layer: str) -> nn.Module | Declined:
    """The model from the output of `layer` on, as a module of its own; or why there is none.

    It leaves its input as it is, and every ReLU in it is an `nn.ReLU` that does, whatever the model
    calls. A dropout next to the layer's ReLU only multiplies what it keeps: whoever runs the network
    says which neurons it dropped, as neurons that are off.
    """
    traced = trace(model) if isinstance(model, nn.Module) else model
    if isinstance(traced, Declined):
        return traced
    modules = dict(traced.named_modules())
    nodes = [n for n in traced.graph.nodes if n.op == "call_module" and n.target == layer]
    beside = _dropouts_beside(nodes[0], modules) if len(nodes) == 1 else []
    random = [n for n in traced.graph.nodes if n not in beside and _dropout_rate(n, modules)]
    if any(_ancestors(node).keys() & set(nodes) for node in random):
        return Declined("dropout is active farther behind the layer, so its gradients are random")
    if isinstance(traced, Watched):
        return Behind.of(traced, layer, [_dropout_rate(node, modules) for node in beside])
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in traced.graph.nodes:
        if node.op == "call_module" and node.target == layer:
            copies[node] = graph.call_method("clone", (graph.placeholder("z"),))
        elif node in beside:
            kept = 1 / (1 - _dropout_rate(node, modules))
            copies[node] = graph.call_function(
                operator.mul, (copies[node.all_input_nodes[0]], kept)
            )
        elif node.op == "output":
            lost = [n for n in node.all_input_nodes if n not in copies]
            if lost or not node.all_input_nodes:
                return Declined(f"the model's output also depends on what bypasses layer {layer!r}")
            graph.node_copy(node, lambda n: copies[n])
        elif node.op != "placeholder" and all(n in copies for n in node.all_input_nodes):
            copies[node] = graph.node_copy(node, lambda n: copies[n])
    behind = Traced(traced, graph)
    behind.graph.eliminate_dead_code()
    if not any(n.op == "placeholder" and n.users for n in behind.graph.nodes):
        return Declined(f"layer {layer!r} does not reach the model's output")
    _replace_relus(behind, nn.ReLU)
    return behind


def network_before(model: nn.Module, layer: str) -> nn.Module | Declined:
    """The model up to the input of `layer`, as a module of its own; or why there is none.

    >>> net = nn.Sequential(nn.Flatten(), nn.ReLU(), nn.Linear(4, 2))
    >>> network_before(net, "2")(torch.tensor([[[1.0, -1.0], [0.0, 2.0]]]))
    tensor([[1., 0., 0., 2.]])
    """
    traced = trace(model)
    if isinstance(traced, Watched):
        return Declined(traced.why)
    if isinstance(traced, Declined):
        return traced
    nodes = list(traced.graph.nodes)
    uses = [node for node in nodes if node.op == "call_module" and node.target == layer]
    if len(uses) != 1:
        words = f"layer {layer!r} is used {len(uses)} times in one forward pass, expected once"
        return Declined(words)
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in nodes[: nodes.index(uses[0])]:
        copies[node] = graph.node_copy(node, lambda n: copies[n])
    graph.output(copies[uses[0].all_input_nodes[0]])
    before = Traced(traced, graph)
    before.graph.eliminate_dead_code()
    before.delete_all_unused_submodules()
    before.recompile()
    return before


class SoftRelu(nn.Module):
    """A ReLU whose step is as wide as its input is uncertain, so that gradients vary smoothly."""

    def __init__(self) -> None:
        super().__init__()
        self.width: torch.Tensor | None = None  # broadcasts with the input; None: a hard ReLU
        self.seen = torch.zeros(0)  # the last input of a hard one

    def forward(self, z: torch.Tensor) -> torch.Tensor:
        if self.width is None:
            self.seen = z.detach()
            return torch.relu(z)
        # The logistic function with this slope is the normal distribution function, to 0.01.
        width = self.width / 1.7
        return nn.functional.softplus(z / width) * width


def soften(network: nn.Module) -> tuple[nn.Module, list[SoftRelu]]:
    """A copy of a network from `network_after` with soft ReLUs, and these ReLUs in order."""
    assert isinstance(network, fx.GraphModule)
    soft = copy.deepcopy(network)
    return soft, _replace_relus(soft, SoftRelu)


def _replace_relus(network: fx.GraphModule, make: Callable[[], Module]) -> list[Module]:
    """Put a module of its own in the place of every ReLU, and return these in order."""
    modules = dict(network.named_modules())
    made: list[Module] = []
    for node in list(network.graph.nodes):
        if not _is_relu(node, modules):
            continue
        made.append(make())
        name = f"{type(made[-1]).__name__}_{len(made) - 1}"
        network.add_submodule(name, made[-1])
        with network.graph.inserting_after(node):
            stand_in = network.graph.call_module(name, (node.all_input_nodes[0],))
        node.replace_all_uses_with(stand_in)
        network.graph.erase_node(node)
    network.recompile()
    return made


Squash = Callable[[torch.Tensor], torch.Tensor]
_SQUASHES: dict[str, Squash] = {
    "sigmoid": torch.sigmoid,
    "softmax": lambda rows: rows.softmax(1),
    "logsoftmax": lambda rows: rows.log_softmax(1),
}


def without_squash(network: nn.Module) -> tuple[nn.Module, Squash] | None:
    """A network from `network_after` without its last sigmoid or softmax, and what that does to rows.

    Whether it is the network's last step at all, and over classes, is for the caller to see: then
    it does to rows (k, outputs) what the network did. The weights are shared.
    """
    if not isinstance(network, fx.GraphModule):
        return None
    graph, modules = fx.Graph(), dict(network.named_modules())
    copies: dict[fx.Node, fx.Node] = {}
    graph.output(graph.graph_copy(network.graph, copies))
    for node in reversed(network.graph.nodes):
        name = _describe(node, modules).lower().replace("_", "")
        if name in _SQUASHES and node.op != "output":
            copies[node].replace_all_uses_with(copies[node.all_input_nodes[0]])
            graph.erase_node(copies[node])
            return Traced(network, graph), _SQUASHES[name]
    return None


def trace(model: nn.Module, input_shape: tuple[int, ...] | None = None) -> Structure | Declined:
    """The traced model, or the watched one, or why there is neither.

    A model that was traced before comes back as it is.

    Args:
        model: any.
        input_shape: of one input, for a model that has to be watched; guessed unless given.
    """
    if isinstance(model, Traced):
        return model
    training = model.training
    try:
        graph = graph_of(model)
    except Exception as error:  # a user's forward may raise anything when fed with proxies
        words = f"the model's forward cannot be traced ({type(error).__name__}: {str(error)[:80]})"
        return watch(model, words, input_shape)
    graph.training = training
    used = {str(node.target) for node in graph.graph.nodes if node.op == "call_module"}
    hidden = [n for n, m in model.named_modules() if isinstance(m, nn.Linear) and n not in used]
    if hidden:  # perhaps inside a module of torch's own, which is not looked into
        watched = watch(model, f"layer {hidden[0]!r} does not show in its trace", input_shape)
        if isinstance(watched, Watched) and watched.rows.keys() & set(hidden):
            return watched
    return graph


def _report(name: str, uses: list[fx.Node], modules: dict[str, nn.Module]) -> LayerReport:
    if len(uses) > 1:
        why = f"it is used {len(uses)} times in one forward pass, so its gradient is a sum"
        return LayerReport(name, None, why)
    after, why_not_after = _relu_after(uses[0], modules)
    before = _relu_before(uses[0], modules)
    before &= after or getattr(modules[name], "bias", None) is not None
    data, caveat = _reads_data(uses[0], modules), _caveat(uses[0], modules)
    reads = _layer_before(uses[0], modules) if before else None
    kept = 1.0
    for node in _dropouts_beside(uses[0], modules) if after else ():
        kept *= 1 - _dropout_rate(node, modules)
    if after:
        why = "a ReLU follows it: its output gradient is sparse"
        if before:
            why = "a ReLU stands before and after it"
        if kept < 1:
            why += ", and dropout beside it only adds zeros"
        relu: Relu = "both" if before else "after"
        return LayerReport(name, relu, why, data, caveat, reads, 1 - kept)
    if before:
        why = "a ReLU stands before it: its inputs are sparse"
        return LayerReport(name, "before", why, data, caveat, reads)
    return LayerReport(name, None, f"no ReLU stands before it, and {why_not_after}", data)


def _relu_after(node: fx.Node, modules: dict[str, nn.Module]) -> tuple[bool, str]:
    users = list(node.users)
    if len(users) != 1:
        return False, f"its output goes to {len(users)} places, not to one ReLU"
    user = users[0]
    if _is_relu(user, modules):
        return True, ""
    if _is_transparent(user, modules) or _dropout_rate(user, modules):
        return _relu_after(user, modules)
    described = _describe(user, modules)
    zeros = " (which leaves no zeros in the gradient)" if described in _NO_ZEROS else ""
    return False, f"it is followed by {described}{zeros}, not by a ReLU"


def _relu_before(node: fx.Node, modules: dict[str, nn.Module]) -> bool:
    if not node.all_input_nodes:
        return False
    source = node.all_input_nodes[0]
    if _is_relu(source, modules):
        return True
    pooled = source.op == "call_module" and isinstance(modules[str(source.target)], _POOLING)
    if pooled or _is_transparent(source, modules) or _dropout_rate(source, modules):
        return _relu_before(source, modules)
    return False


def _dropouts_beside(node: fx.Node, modules: dict[str, nn.Module]) -> list[fx.Node]:
    """Active dropouts between a layer and its ReLU, and right behind that ReLU."""
    found, met = [], False
    while len(node.users) == 1:
        node = next(iter(node.users))
        if _dropout_rate(node, modules):
            found.append(node)
        elif _is_relu(node, modules) and not met:
            met = True
        elif not _is_transparent(node, modules):
            break
    return found if met else []


def _dropout_rate(node: fx.Node, modules: dict[str, nn.Module]) -> float:
    """The share of values that the node sets to zero at random; 0 if it is no active dropout.

    Alpha dropout sets them to another value, and others drop whole samples. Behind a linear layer,
    `Dropout2d` is dropout: its channels are the neurons.
    """
    if node.op == "call_module":
        module = modules[str(node.target)]
        if not isinstance(module, nn.Dropout | nn.Dropout2d):
            return 0.0
        return module.p if module.training else 0.0
    if node.op not in ("call_function", "call_method") or node.target not in DROPOUT_CALLS:
        return 0.0
    given = dict(zip(("input", "p", "training"), node.args, strict=False)) | node.kwargs
    active = given.get("training", given.get("train", True))
    rate = given.get("p", 0.5)
    return float(rate) if active and isinstance(rate, (int, float)) else 0.0


def _layer_before(node: fx.Node, modules: dict[str, nn.Module]) -> str | None:
    """The linear layer whose output, through a ReLU, is all that the node reads."""
    source = node.all_input_nodes[0]
    while (
        _is_relu(source, modules)
        or _is_transparent(source, modules)
        or _dropout_rate(source, modules)
    ):
        source = source.all_input_nodes[0]
    linear = source.op == "call_module" and isinstance(modules[str(source.target)], nn.Linear)
    return str(source.target) if linear else None


def _features(node: fx.Node, modules: dict[str, nn.Module]) -> int:
    """The fewest numbers that a linear layer's inputs are linear functions of, besides a constant."""
    own = modules[str(node.target)]
    assert isinstance(own, nn.Linear)
    fewest = own.in_features
    while node.all_input_nodes:
        node = node.all_input_nodes[0]
        module = modules[str(node.target)] if node.op == "call_module" else None
        if isinstance(module, nn.Linear):
            fewest = min(fewest, module.in_features)
        elif not _is_transparent(node, modules):
            break
    return fewest


def _reads_data(node: fx.Node, modules: dict[str, nn.Module]) -> bool:
    sources = node.all_input_nodes[:1]  # x.view(x.size(0), -1) has x and its size
    if not sources:
        return False
    if sources[0].op == "placeholder":
        return True
    return _is_transparent(sources[0], modules) and _reads_data(sources[0], modules)


def _caveat(node: fx.Node, modules: dict[str, nn.Module]) -> Caveat | None:
    """A random or batch-wide step in train mode anywhere before a node."""
    for source in _ancestors(node):
        module = modules.get(str(source.target)) if source.op == "call_module" else None
        name = str(source.target) if source.op == "call_module" else "F.dropout"
        dropped = isinstance(module, _DROPOUT) and module.training and module.p > 0
        if dropped or _dropout_rate(source, modules):
            words = (
                f"dropout ({name!r}, in train mode) is active before it: what comes back is what the "
                "layer reads, with random entries dropped"
            )
            return Caveat(name, words)
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.training:
            words = (
                f"batch norm ({name!r}, in train mode) stands before it: what comes back is "
                "normalised over the client's batch"
            )
            return Caveat(name, words)
    return None


def _ancestors(node: fx.Node) -> dict[fx.Node, None]:
    """All that a node depends on, the nearest first."""
    seen: dict[fx.Node, None] = {}
    open_ = [node]
    while open_:
        for source in open_.pop(0).all_input_nodes:
            if source not in seen:
                seen[source] = None
                open_.append(source)
    return seen


def _is_relu(node: fx.Node, modules: dict[str, nn.Module]) -> bool:
    if node.op == "call_module":
        return isinstance(modules[str(node.target)], nn.ReLU)
    return node.op in ("call_function", "call_method") and node.target in _RELU_CALLS


def _is_transparent(node: fx.Node, modules: dict[str, nn.Module]) -> bool:
    """Does the node pass every value on unchanged?"""
    if node.op == "call_module":
        module = modules[str(node.target)]
        if isinstance(module, _DROPOUT):
            return not module.training or module.p == 0
        return isinstance(module, (nn.Identity, nn.Flatten, nn.Unflatten))
    if node.op not in ("call_function", "call_method"):
        return False
    idle = node.target in DROPOUT_CALLS and not _dropout_rate(node, modules)
    return idle or node.target in _RESHAPE_CALLS


def _describe(node: fx.Node, modules: dict[str, nn.Module]) -> str:
    if node.op == "output":
        return "the model's output"
    if node.op == "call_module":
        return type(modules[str(node.target)]).__name__
    return str(getattr(node.target, "__name__", node.target))


def _inspect_registered(model: nn.Module, untraced: str) -> tuple[LayerReport, ...]:
    """Without a graph: neighbours in registration order, as in a Sequential."""
    leaves = [
        (name, module)
        for name, module in model.named_modules()
        if not any(True for _ in module.children()) and not isinstance(module, nn.Identity)
    ]
    reports = []
    for i, (name, module) in enumerate(leaves):
        if not isinstance(module, nn.Linear):
            continue
        after = i + 1 < len(leaves) and isinstance(leaves[i + 1][1], nn.ReLU)
        before = i > 0 and isinstance(leaves[i - 1][1], nn.ReLU)
        relu: Relu | None = (
            "both" if after and before else "after" if after else "before" if before else None
        )
        where = f"{untraced}; going by the order in which modules are registered, "
        seen = f"ReLU {relu}" if relu else "no ReLU module is its neighbour"
        first = not any(isinstance(m, nn.Module) and list(m.parameters()) for _, m in leaves[:i])
        reports.append(LayerReport(name, relu, where + seen, first))
    return tuple(reports)


# Torch's tracer patches every module of the process while it runs.
_one_at_a_time = threading.Lock()


class Traced(fx.GraphModule):
    """A module made of a graph that frees all its memory with it.

    For tracebacks, torch keeps the source of every such module as long as the process lives, which adds
    up over thousands of models.
    """

    def recompile(self) -> Any:
        code = super().recompile()
        source = type(self).forward.__code__.co_filename
        linecache.cache.pop(source, None)
        loader = getattr(graph_module, "_loader", None)
        getattr(loader, "eval_cache", {}).pop(source, None)
        return code


Structure = Traced | Watched


def graph_of(model: nn.Module) -> Traced:
    """The model's graph; raises whatever its forward raises when fed with proxies."""
    with _one_at_a_time:
        tracer = _Tracer()
        graph = tracer.trace(model)
    _use_what_changed(graph, dict(tracer.root.named_modules()))
    return Traced(tracer.root, graph, type(model).__name__)


def _use_what_changed(graph: fx.Graph, modules: dict[str, nn.Module]) -> None:
    """Let whatever reads a tensor after an operation in place read that operation's result.

    The values are the same, and the graph then shows where they come from.
    """
    changed: dict[fx.Node, fx.Node] = {}

    def now(node: fx.Node) -> fx.Node:
        return now(changed[node]) if node in changed else node

    for node in graph.nodes:
        node.args, node.kwargs = fx.map_arg(node.args, now), fx.map_arg(node.kwargs, now)
        if node.all_input_nodes and _is_in_place(node, modules):
            changed[node.all_input_nodes[0]] = node


def _is_in_place(node: fx.Node, modules: dict[str, nn.Module]) -> bool:
    if node.op == "call_module":
        return bool(getattr(modules[str(node.target)], "inplace", False))
    if node.op not in ("call_function", "call_method"):
        return False
    name = str(getattr(node.target, "__name__", node.target))
    return bool(node.kwargs.get("inplace")) or (name.endswith("_") and not name.endswith("__"))


class _Tracer(fx.Tracer):
    """Records what its own thread does.

    While it runs, `nn.Module.__call__` and `__getattr__` of all threads come here: others, which replay
    or train a model, are let through.
    """

    def __init__(self) -> None:
        super().__init__()
        self._thread = threading.get_ident()

    def call_module(
        self, m: nn.Module, forward: Callable[..., Any], args: Any, kwargs: dict[str, Any]
    ) -> Any:
        if threading.get_ident() != self._thread:
            return forward(*args, **kwargs)
        return super().call_module(m, forward, args, kwargs)

    def create_arg(self, a: Any) -> Any:
        """Objects with `logits` and such, which torch does not know or would turn into a dict."""
        known = isinstance(a, SimpleNamespace) or (is_dataclass(a) and isinstance(a, dict))
        if not known:
            return super().create_arg(a)
        held = {name: self.create_arg(value) for name, value in vars(a).items()}
        return self.create_node("call_function", type(a), (), held)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        if threading.get_ident() != self._thread:
            return attr_val
        return super().getattr(attr, attr_val, parameter_proxy_cache)
