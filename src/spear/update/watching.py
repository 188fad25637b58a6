"""Models that torch.fx cannot trace, watched while they run on a made-up input.

A forward may ask for its input's values, call `layer.forward(x)`, or sit inside a module of torch's own
that is not looked into. It still runs. Hooks see the modules it calls and a function mode everything
else, which gives the same graph as a trace: of the path that this input takes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from spear.errors import Declined
from spear.update.shapes import embedding_of, input_shapes

_PLAIN = (bool, int, float, str, type(None))
_MOVED = 1e-2  # relative
_ROWS = 2  # of the made-up input: one row would hide the batch's dimension
DROPOUT_CALLS = {
    *(nn.functional.dropout, nn.functional.dropout2d, torch.dropout, torch.dropout_),
}


@dataclass(frozen=True, eq=False)
class Watched:
    """A model and the graph of one run of it."""

    model: nn.Module
    graph: fx.Graph
    shape: tuple[int, ...]  # of one made-up input
    rows: Mapping[str, tuple[int, ...]]  # shapes of the linear layers' outputs
    why: str  # it could not be traced

    def named_modules(self) -> list[tuple[str, nn.Module]]:
        return list(self.model.named_modules())


def watch(
    model: nn.Module, why: str, input_shape: tuple[int, ...] | None = None
) -> Watched | Declined:
    """The model's graph on a made-up input; or why it does not run.

    Args:
        model: any.
        why: it could not be traced.
        input_shape: of one input; guessed unless given.
    """
    problem = "nothing says what its inputs look like: give input_shape="
    for shape in [input_shape] if input_shape is not None else input_shapes(model):
        recorder = _Recorder(model)
        try:
            with _as_it_was(model), recorder.hooked(), torch.enable_grad():
                x = made_up(model, _ROWS, shape)
                recorder.begin(x)
                with recorder:
                    outputs = model(x)
                recorder.end(outputs)
        except Exception as error:  # a user's forward may raise anything
            lines = str(error).strip().splitlines() or [""]
            problem = (
                f"running it on a made-up input of shape {tuple(shape)} failed "
                f"({type(error).__name__}: {lines[0][:80]}); give input_shape= if it differs"
            )
            continue
        return Watched(model, recorder.graph, shape, recorder.rows, why)
    return Declined(f"{why}, and {problem}")


def made_up(model: nn.Module, rows: int, shape: tuple[int, ...], *, moved: bool = False) -> Tensor:
    """Inputs (rows, ...) for a model: numbers, or words if it reads words.

    The same every time, or a little moved: on the same way through the model, most likely.
    """
    parameter = next(model.parameters(), torch.zeros(0))
    generator = torch.Generator().manual_seed(0)
    table = embedding_of(model)
    if table is not None:
        words = torch.randint(table.num_embeddings, (rows, *shape), generator=generator)
        return ((words + moved) % table.num_embeddings).to(parameter.device)
    x = torch.rand(rows, *shape, generator=generator) * (1 + _MOVED * moved)
    return x.to(parameter.device, parameter.dtype)


@contextmanager
def _as_it_was(model: nn.Module) -> Iterator[None]:
    """Leave buffers (running means) and the random state as they were."""
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    state = torch.get_rng_state()
    try:
        yield
    finally:
        torch.set_rng_state(state)
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)


class _Recorder(TorchFunctionMode):
    """Writes down what becomes of the model's input, call by call."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.graph = fx.Graph()
        self.rows: dict[str, tuple[int, ...]] = {}
        self._nodes: dict[int, fx.Node] = {}  # by the id of a tensor
        self._kept: list[Tensor] = []  # so that ids stay theirs
        self._inside = 0  # modules of torch's own that are running
        self._modules = dict(model.named_modules())
        self._linear = {
            id(m.weight): name for name, m in self._modules.items() if isinstance(m, nn.Linear)
        }

    def begin(self, x: Tensor) -> None:
        self._note(self.graph.placeholder("x"), x)

    def end(self, outputs: Any) -> None:
        known = [self._nodes[id(t)] for t in _tensors(outputs) if id(t) in self._nodes]
        self.graph.output(tuple(known))
        for node in reversed(self.graph.nodes):  # a value that was only looked at
            if not node.users and node.op in ("call_function", "call_method"):
                self.graph.erase_node(node)

    @contextmanager
    def hooked(self) -> Iterator[None]:
        """With hooks on every module of torch's own that holds no others."""
        handles = []
        for name, module in self._modules.items():
            if type(module).__module__.startswith("torch.nn") and not any(module.children()):
                handles.append(module.register_forward_pre_hook(self._enter))
                handles.append(module.register_forward_hook(self._leave(name), with_kwargs=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _enter(self, module: nn.Module, args: Any) -> None:
        self._inside += 1

    def _leave(self, name: str) -> Callable[..., None]:
        def leave(module: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
            self._inside -= 1
            self._write("call_module", name, args, kwargs, result)

        return leave

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        options = kwargs or {}
        result = func(*args, **options)
        if self._inside:
            return result
        if func is nn.functional.linear and id(weight_of(args, options)) in self._linear:
            name = self._linear[id(weight_of(args, options))]
            self._write("call_module", name, args[:1] or (options["input"],), {}, result)
        elif getattr(torch.Tensor, getattr(func, "__name__", ""), None) is func:
            self._write("call_method", func.__name__, args, options, result)
        else:
            self._write("call_function", func, args, options, result)
        return result

    def _write(self, op: str, target: Any, args: Any, kwargs: Any, result: Any) -> None:
        made = _tensors(result)
        if not made or not any(id(t) in self._nodes for t in _tensors((args, kwargs))):
            return
        if op == "call_module" and isinstance(self._modules[target], nn.Linear):
            self.rows[target] = tuple(made[0].shape)
        named = pytree.tree_map(self._argument, (tuple(args), dict(kwargs)))
        node = self.graph.create_node(op, target, *named)
        for tensor in made:
            self._note(node, tensor)

    def _argument(self, value: Any) -> Any:
        """A node for a tensor that came from the input; None for what a graph cannot hold."""
        if isinstance(value, Tensor):
            return self._nodes.get(id(value))
        return value if type(value) in _PLAIN else None

    def _note(self, node: fx.Node, tensor: Tensor) -> None:
        self._nodes[id(tensor)] = node
        self._kept.append(tensor)


def weight_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """The weight in a call of `nn.functional.linear`."""
    return args[1] if len(args) > 1 else kwargs.get("weight")


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def layer_inputs(model: nn.Module, layer: str, x: Tensor) -> tuple[Tensor | None, Any]:
    """What a linear layer reads while the model runs on x, and what the model puts out.

    None if the layer did not run.
    """
    spy = _Substitute(model.get_submodule(layer), None)
    with spy:
        outputs = model(x)
    return spy.read, outputs


@contextmanager
def reading(model: nn.Module, layer: str, seen: Callable[[Tensor, Tensor], None]) -> Iterator[None]:
    """Watch a linear layer in every run of the model, or of copies that are made meanwhile.

    Args:
        model: is left as it is afterwards.
        layer: its name.
        seen: called with the model's input and the layer's, each time the layer runs.
    """
    reader = _Reader(layer, seen)

    def begin(module: nn.Module, args: tuple[Any, ...]) -> None:
        reader.begin(module, args[0])  # a function, which copies of the model share

    handle = model.register_forward_pre_hook(begin)
    try:
        with reader:
            yield
    finally:
        handle.remove()


class _Reader(TorchFunctionMode):
    """Passes on what a layer of the running model reads."""

    def __init__(self, layer: str, seen: Callable[[Tensor, Tensor], None]) -> None:
        super().__init__()
        self._layer, self._seen = layer, seen
        self._weight: object = None
        self._batch = torch.zeros(0)

    def begin(self, model: nn.Module, x: Tensor) -> None:
        self._weight, self._batch = model.get_submodule(self._layer).weight, x

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        options = kwargs or {}
        if func is nn.functional.linear and weight_of(args, options) is self._weight:
            rows = args[0] if args else options["input"]
            self._seen(self._batch.detach(), rows.detach().clone())
        return func(*args, **options)


class Behind(nn.Module):
    """A watched model from a layer's output on: it runs on a made-up input, the output replaced.

    It holds a copy of the model's modules under their own names. What does not act on the output that
    way is no parameter here.
    """

    whole: nn.Module

    def __init__(self, whole: nn.Module, layer: str, watched: Watched, kept: list[float]) -> None:
        super().__init__()
        object.__setattr__(self, "whole", whole)  # not as a submodule: names stay the model's
        self._modules, self._parameters = whole._modules, whole._parameters
        self._buffers = whole._buffers
        self.layer, self.shape, self.kept = layer, watched.shape, kept
        self.moved = False  # which of two made-up inputs

    @staticmethod
    def of(watched: Watched, layer: str, rates: list[float]) -> Behind | Declined:
        """The network behind a layer, with the rates of the dropouts beside its ReLU."""
        shape = watched.rows.get(layer, ())
        if len(shape) != 2 or shape[0] != _ROWS:
            return Declined(
                f"layer {layer!r} has {'several rows' if len(shape) > 1 else 'no row'} for an input "
                "(tokens or positions), and which belong together does not show"
            )
        try:
            whole = copy.deepcopy(watched.model)
        except Exception as error:  # whatever the user's __deepcopy__ raises
            return Declined(f"the model cannot be copied ({type(error).__name__})")
        behind = Behind(whole, layer, watched, [1 / (1 - rate) for rate in rates])
        parameter = next(whole.parameters())
        z = torch.rand(shape, generator=torch.Generator().manual_seed(1)).to(parameter)
        with _as_it_was(whole), torch.enable_grad():
            outputs = behind(z.requires_grad_())
            behind.moved = True
            others = _tensors(behind(z))
            pairs = list(zip(_tensors(outputs), others, strict=True))
            if not all(torch.equal(a, b) for a, b in pairs):
                return Declined(f"the model's output also depends on what bypasses layer {layer!r}")
            smooth = [t.sum() for t in _tensors(outputs) if t.requires_grad]
            if not smooth:
                return Declined(f"layer {layer!r} does not reach the model's output")
            parameters = [p for p in whole.parameters() if p.requires_grad]
            slopes = torch.autograd.grad(smooth, parameters, allow_unused=True)
        used = {id(p) for p, slope in zip(parameters, slopes, strict=True) if slope is not None}
        _demote(whole, used)
        return behind

    def forward(self, z: Tensor) -> Any:
        x = made_up(self.whole, len(z), self.shape, moved=self.moved)
        with _Substitute(self.whole.get_submodule(self.layer), z, self.kept):
            return self.whole(x if embedding_of(self.whole) is not None else x.to(z))


def _demote(model: nn.Module, used: set[int]) -> None:
    """Turn all parameters but the used ones into buffers."""
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None and id(parameter) not in used:
                del module._parameters[name]
                module.register_buffer(name, parameter.detach())


class _Substitute(TorchFunctionMode):
    """Puts z, if given, in place of a layer's output; dropouts beside it multiply what they keep."""

    def __init__(self, layer: nn.Module, z: Tensor | None, kept: Sequence[float] = ()) -> None:
        super().__init__()
        self._layer, self._z, self._kept = layer, z, list(kept)
        self.read: Tensor | None = None  # the layer's input

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        options = kwargs or {}
        if func is nn.functional.linear and weight_of(args, options) is self._layer.weight:
            self.read = args[0] if args else options["input"]
            return func(*args, **options) if self._z is None else self._z.clone()
        if self.read is not None and self._kept and func in DROPOUT_CALLS:
            return (args[0] if args else options["input"]) * self._kept.pop(0)
        return func(*args, **options)
