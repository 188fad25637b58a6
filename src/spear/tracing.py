"""Models as graphs, from any thread: torch's own tracer changes every module of the process."""

from __future__ import annotations

import linecache
import threading
from collections.abc import Callable
from typing import Any

from torch import fx, nn
from torch.fx import graph_module

_one_at_a_time = threading.Lock()


class Traced(fx.GraphModule):
    """A module made of a graph, which takes all its memory with it.

    Torch keeps the source of every such module, for tracebacks, as long as the process lives: that
    adds up where thousands of models are traced.
    """

    def recompile(self) -> Any:
        code = super().recompile()
        source = type(self).forward.__code__.co_filename
        linecache.cache.pop(source, None)
        loader = getattr(graph_module, "_loader", None)
        getattr(loader, "eval_cache", {}).pop(source, None)
        return code


def traced(model: nn.Module) -> Traced:
    """The model's graph; raises whatever its forward raises when it is fed with proxies."""
    with _one_at_a_time:
        tracer = _Tracer()
        graph = tracer.trace(model)
    return Traced(tracer.root, graph, type(model).__name__)


class _Tracer(fx.Tracer):
    """Takes down what its own thread does.

    While it runs, `nn.Module.__call__` and `__getattr__` come here, also those of other threads that
    replay or train a model: they are let through.
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

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        if threading.get_ident() != self._thread:
            return attr_val
        return super().getattr(attr, attr_val, parameter_proxy_cache)
