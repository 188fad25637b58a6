"""The user's own code by name: "package.module:factory" or "path/to/file.py:factory"."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from spear.errors import InvalidOption


def load_object(spec: str) -> Any:
    """The object behind a name such as "package.module:factory" or "file.py:factory".

    Modules are found as by `python -m`: in the current folder too.

    >>> load_object("collections:OrderedDict")
    <class 'collections.OrderedDict'>
    """
    source, colon, name = spec.rpartition(":")
    if not colon or not source or not name:
        raise InvalidOption(f"expected package.module:name or path/to/file.py:name, got {spec!r}")
    found: Any = _module(source)
    for part in name.split("."):
        if not hasattr(found, part):
            raise InvalidOption(
                f"{source} has no {name!r}; it has {_offers(_module(source), name)}"
            )
        found = getattr(found, part)
    return found


def _offers(module: ModuleType, name: str) -> str:
    """The names that a module has, those most like the one asked for first."""
    own = [
        n for n, value in vars(module).items() if n[0] != "_" and not isinstance(value, ModuleType)
    ]
    likely = difflib.get_close_matches(name, own)
    return ", ".join([*likely, *(n for n in own if n not in likely)])[:300] or "nothing"


def build_model(spec: str, **options: Any) -> nn.Module:
    """The model that a factory returns: a function or class to call, or a model itself.

    Args:
        spec: where it is, see `load_object`.
        options: keyword arguments for the factory, such as `width=`.
    """
    factory = load_object(spec)
    if isinstance(factory, nn.Module):
        if options:
            raise InvalidOption(
                f"{spec} is a model, not a factory: it takes no {', '.join(options)}"
            )
        return factory
    if not callable(factory):
        raise InvalidOption(
            f"{spec} is a {type(factory).__name__}, expected a function or class that returns a model"
        )
    _fits(spec, factory, options)
    try:
        model = factory(**options)
    except (Exception, SystemExit) as error:  # the user's code may raise anything
        raise InvalidOption(
            f"calling {spec} for the model failed: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(model, nn.Module):
        raise InvalidOption(f"{spec} returned a {type(model).__name__}, expected a torch.nn.Module")
    return model


def accepts(factory: Any, option: str) -> bool:
    """May the factory be called with this keyword argument?"""
    try:
        parameters = inspect.signature(factory).parameters.values()
    except (TypeError, ValueError):  # some built-ins have no signature
        return True
    keywords = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return any(
        p.kind is inspect.Parameter.VAR_KEYWORD or (p.name == option and p.kind in keywords)
        for p in parameters
    )


def _fits(spec: str, factory: Any, options: dict[str, Any]) -> None:
    refused = [name for name in options if not accepts(factory, name)]
    if refused:
        raise InvalidOption(
            f"{spec} takes no argument {', '.join(map(repr, refused))}: add it to the factory"
        )
    try:
        signature = inspect.signature(factory)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(**options)
    except TypeError as error:
        raise InvalidOption(
            f"{spec} cannot be called without arguments ({error}): name a function that returns "
            "the model as the client had it, with its sizes filled in"
        ) from error


def _module(source: str) -> ModuleType:
    if source.endswith(".py"):
        return _from_file(Path(source))
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        return importlib.import_module(source)
    except ModuleNotFoundError as error:
        if error.name and (source == error.name or source.startswith(f"{error.name}.")):
            raise InvalidOption(
                f"there is no module {source!r} here: expected an installed package, a module in the "
                "current folder, or path/to/file.py"
            ) from error
        raise InvalidOption(f"importing {source} failed: {error}") from error
    except (Exception, SystemExit) as error:  # the user's module may raise anything
        raise InvalidOption(
            f"importing {source} failed: {type(error).__name__}: {error}"
        ) from error


def _from_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise InvalidOption(f"there is no file {path}: expected the module with your model")
    path = path.resolve()
    name = f"spear_user_{path.stem}"
    known = sys.modules.get(name)
    if known is not None and getattr(known, "__file__", None) == str(path):
        return known
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))  # it may import its neighbours
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # the user's file may raise anything
        del sys.modules[name]
        raise InvalidOption(f"running {path} failed: {type(error).__name__}: {error}") from error
    return module
