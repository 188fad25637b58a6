"""Which layers of a model can be attacked, what comes before them, and what only seems to protect."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from torch import fx, nn

from spear.errors import Declined
from spear.report import Table
from spear.update import LayerReport, Watched, inspect_layers, trace

_BATCH_NORMS = (nn.modules.batchnorm._BatchNorm,)
_DROPOUTS = (nn.modules.dropout._DropoutNd,)


@dataclass(frozen=True)
class LayerView:
    """One linear layer: its size, whether it can be attacked, why, and what it reads."""

    report: LayerReport
    inputs: int
    outputs: int
    has_bias: bool
    fronts: tuple[str, ...] = ()
    """The kinds of layers before it, in words."""
    near: str = ""
    """Why its gradient is sparse although SPEAR refuses the layer; empty if it is not."""
    unseen: bool = False
    """True if the layer could not be judged."""
    divides: bool = False
    """Are its weight and bias gradients sent as is? A lone sample's input is then their quotient."""

    @property
    def name(self) -> str:
        return self.report.name

    @property
    def attackable(self) -> bool:
        return self.report.attackable

    @property
    def reads(self) -> str:
        if self.report.reads_data:
            return "the data"
        if self.unseen:
            return "not known"
        return f"activations behind {', '.join(self.fronts)}" if self.fronts else "transformed data"

    @property
    def limit(self) -> str:
        """Why what comes back is not the data itself, to end a sentence with; empty if it is."""
        if self.report.caveat is not None:
            return "dropout or batch norm changed the data before the layer"
        known = self.report.reads_data or self.unseen
        return "" if known else f"these are {self.reads}, not the data"


@dataclass(frozen=True)
class ModelStructure:
    """A model as an attacker reads it."""

    layers: tuple[LayerView, ...]
    untraced: str = ""
    """Why the forward pass could not be traced or watched; empty if it was."""
    watched: str = ""
    """Why it was watched on a made-up input; empty if it was traced."""

    @property
    def chosen(self) -> LayerView | None:
        """The layer an attack starts with: the attackable one closest to the data."""
        return next((layer for layer in self.layers if layer.attackable), None)

    def named(self, name: str) -> LayerView | None:
        return next((layer for layer in self.layers if layer.name == name), None)

    def table(self) -> Table:
        rows = tuple(
            (
                layer.name or "(the model itself)",
                f"{layer.inputs} → {layer.outputs}",
                "yes" if layer.attackable else "not by SPEAR" if layer.near else "no",
                layer.report.why,
                layer.reads,
            )
            for layer in self.layers
        )
        columns = ("layer", "inputs → outputs", "attackable", "why", "reads")
        return Table("Linear layers", columns, rows, "In the order of the forward pass.")


def examine(model: nn.Module) -> ModelStructure:
    """Every linear layer of a model, judged.

    >>> net = nn.Sequential(nn.Linear(8, 4), nn.GELU(), nn.Linear(4, 2))
    >>> [(layer.name, layer.attackable, layer.reads) for layer in examine(net).layers]
    [('0', False, 'the data'), ('2', False, 'activations behind Linear')]
    """
    traced = trace(model)
    untraced = traced.reason if isinstance(traced, Declined) else ""
    modules = dict(model.named_modules())
    views = []
    for report in inspect_layers(model, traced):
        layer = modules[report.name]
        assert isinstance(layer, nn.Linear)
        node = None if isinstance(traced, Declined) else _node(traced, report.name)
        inside = _closed_parent(model, report.name) if node is None and not untraced else ""
        view = LayerView(
            _corrected(report, layer, inside),
            layer.in_features,
            layer.out_features,
            layer.bias is not None,
            fronts=_fronts(node, modules) if node is not None else (),
            unseen=bool(untraced and not report.attackable) or bool(inside),
            divides=node is not None
            and layer.bias is not None
            and layer.weight.requires_grad
            and report.own_weight,
        )
        if node is not None and not view.attackable and view.has_bias:
            view = replace(view, near=_near(node, modules))
        views.append(view)
    watched = traced.why if isinstance(traced, Watched) else ""
    return ModelStructure(tuple(views), untraced, watched)


def with_modes(model: nn.Module, *, at_work: bool) -> list[str]:
    """Names of its dropouts and batch norms in train mode (`at_work`), or of those in eval mode."""
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, (*_DROPOUTS, *_BATCH_NORMS))
        and module.training is at_work
        and getattr(module, "p", 1) > 0
    ]


def hand_made(model: nn.Module) -> list[str]:
    """Names of trained matrices outside torch's own modules: hand-written linear layers, perhaps."""
    return [
        f"{name}.{own}".removeprefix(".")
        for name, module in model.named_modules()
        for own, p in module.named_parameters(recurse=False)
        if p.ndim == 2 and p.requires_grad and not type(module).__module__.startswith("torch.nn")
    ]


def _corrected(report: LayerReport, layer: nn.Linear, inside: str) -> LayerReport:
    """The report, corrected for what the forward pass does not show."""
    if inside:
        why = f"it is part of a {inside}, whose forward is not looked into: not judged"
    elif not report.own_weight:
        return report
    elif not layer.weight.requires_grad:
        why = "its weight is not trained, so no gradient of it is sent"
    else:
        return report
    return replace(report, relu=None, why=why)


def _node(traced: fx.GraphModule | Watched, name: str) -> fx.Node | None:
    uses = [n for n in traced.graph.nodes if n.op == "call_module" and n.target == name]
    return uses[0] if len(uses) == 1 else None


def _closed_parent(model: nn.Module, name: str) -> str:
    """The torch module that hides the layer from tracing, if one does."""
    parts = name.split(".")
    for end in range(1, len(parts)):
        parent = model.get_submodule(".".join(parts[:end]))
        kind = type(parent)
        if kind.__module__.startswith("torch.nn") and not isinstance(
            parent, (nn.Sequential, nn.ModuleList, nn.ModuleDict)
        ):
            return kind.__name__
    return ""


def _ancestors(node: fx.Node) -> Iterator[fx.Node]:
    seen, open_ = {node}, [node]
    while open_:
        for source in open_.pop().all_input_nodes:
            if source not in seen:
                seen.add(source)
                open_.append(source)
                yield source


def _fronts(node: fx.Node, modules: dict[str, nn.Module]) -> tuple[str, ...]:
    """The kinds of layers before it."""
    before = [modules.get(str(n.target)) for n in _ancestors(node) if n.op == "call_module"]
    kinds = [
        type(m).__name__ for m in before if m is not None and any(True for _ in m.parameters())
    ]
    return tuple(dict.fromkeys(reversed(kinds)))


def _near(node: fx.Node, modules: dict[str, nn.Module]) -> str:
    """What makes the layer's output gradient sparse though no plain ReLU follows it."""
    met = ""
    while len(node.users) == 1:
        node = next(iter(node.users))
        module = modules.get(str(node.target)) if node.op == "call_module" else None
        name = str(getattr(node.target, "__name__", node.target))
        if isinstance(module, nn.ReLU) or name in ("relu", "relu_"):
            return met
        if isinstance(module, nn.ReLU6) or name == "relu6":
            return "ReLU6 has the zeros of a ReLU, and few more"
        if isinstance(module, _BATCH_NORMS) and not module.training:
            met = "batch norm in eval mode is a fixed factor and shift, which folds into the layer"
        elif not isinstance(module, (nn.Identity, nn.Flatten, *_DROPOUTS)):
            return ""
    return ""
