"""The user's own code by name: "package.module:factory" or "path/to/file.py:factory"."""

from __future__ import annotations

import ast
import difflib
import hashlib
import importlib
import inspect
import io
import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass, replace
from modulefinder import ModuleFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from spear import plugins
from spear.errors import InvalidOption

_CONTENT = "__spear_content__"  # of a user's file: where its module keeps what it was made from
_PY_SOURCE = 1  # what `ModuleFinder` calls Python's own source files


def load_object(spec: str) -> Any:
    """The object behind a name such as "package.module:factory" or "file.py:factory".

    Modules are found as by `python -m`: in the current folder too.

    >>> load_object("collections:OrderedDict")
    <class 'collections.OrderedDict'>
    """
    source, colon, name = spec.rpartition(":")
    if not colon or not source or not name:
        words = f"expected package.module:name or path/to/file.py:name, got {spec!r}"
        if spec.endswith(".py"):
            words += f"; it has {_offers(_module(spec), '')}"
        raise InvalidOption(words)
    return _part(_module(source), source, name)


def _part(module: ModuleType, source: str, name: str) -> Any:
    found: Any = module
    for part in name.split("."):
        if not hasattr(found, part):
            raise InvalidOption(f"{source} has no {name!r}; it has {_offers(module, name)}")
        found = getattr(found, part)
    return found


def _offers(module: ModuleType, name: str) -> str:
    """The names that a module has, those most like the one asked for first."""
    public = {
        n: value
        for n, value in vars(module).items()
        if n[0] != "_" and not isinstance(value, ModuleType)
    }
    own = [n for n in public if getattr(public[n], "__module__", "") == module.__name__]
    likely = difflib.get_close_matches(name, public)
    return ", ".join(dict.fromkeys([*likely, *own, *public]))[:300] or "nothing"


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


def _from_file(path: Path, content: bytes | None = None) -> ModuleType:
    """The module of a file as it is now, or of the content that a run began with."""
    if content is None and not path.is_file():
        raise InvalidOption(f"there is no file {path}: expected a Python file with your code")
    path = path.resolve()
    content = path.read_bytes() if content is None else content
    name = f"spear_user_{path.stem}"
    known = sys.modules.get(name)
    if known is not None and vars(known).get(_CONTENT) == (str(path), content):
        return known
    module = ModuleType(name)
    module.__file__ = str(path)
    vars(module)[_CONTENT] = str(path), content
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))  # it may import its neighbours
    sys.modules[name] = module
    try:
        exec(compile(content, str(path), "exec"), vars(module))  # noqa: S102 what the user named
    except (Exception, SystemExit) as error:  # the user's file may raise anything
        del sys.modules[name]
        raise InvalidOption(f"running {path} failed: {type(error).__name__}: {error}") from error
    return module


@dataclass(frozen=True)
class UserCode:
    """A finder, an attack or an experiment by name: what rows say of it, and how workers get it.

    Args:
        group: the entry points among which its name is looked for.
        spec: where it is: path/to/file.py:name, package.module:name, or the name of an entry point.
        name: the same without folders, for rows and tables.
        digest: of its source: the file and those beside it that it imports, or the whole package.
        folder: where it was named; modules are looked for there too.
        content: of the file, so that a run ends with the code that it began with.
    """

    group: str
    spec: str
    name: str
    digest: str
    folder: str
    content: bytes | None = None

    @staticmethod
    def of(spec: str, group: str) -> UserCode:
        """Load it, here and now, and note what it is."""
        folder, content, name = os.getcwd(), None, spec
        source, colon, part = spec.rpartition(":")
        if colon:
            load_object(spec)  # raises what there is to say of it
        if colon and source.endswith(".py"):
            path = Path(source).resolve()
            content = path.read_bytes()
            spec, name = f"{path}:{part}", f"{path.name}:{part}"
        code = UserCode(group, spec, name, "", folder, content)
        return replace(code, digest=code._digest())

    def load(self) -> Any:
        """The object itself, in any process; raises if its source is no longer the same."""
        if self.folder not in sys.path:
            sys.path.insert(0, self.folder)
        found = self._object()
        if self._digest() != self.digest:
            raise InvalidOption(
                f"the code behind {self.name} is not what it was when the run began (changed, or not "
                "on this machine): give the command again"
            )
        return found

    def _object(self) -> Any:
        source, colon, name = self.spec.rpartition(":")
        if not colon:
            return plugins.load(self.group, name)
        if self.content is not None:
            return _part(_from_file(Path(source), self.content), Path(source).name, name)
        return load_object(self.spec)

    def _digest(self) -> str:
        """Of the source behind the object, whoever reads it and from where."""
        source, colon, _ = self.spec.rpartition(":")
        if self.content is not None:
            return _digest_of_file(Path(source), self.content)
        module = source if colon else plugins.offered(self.group)[self.spec][0].module
        found = sys.modules.get(module) or importlib.import_module(module)
        package = sys.modules[module.partition(".")[0]]
        if hasattr(package, "__path__"):
            files = sorted(path for root in package.__path__ for path in Path(root).rglob("*.py"))
            return _hash([path.read_bytes() for path in files])
        path = Path(str(found.__file__))
        return _digest_of_file(path, path.read_bytes())

    def digest_behind(self, name: str) -> str:
        """Of what a top-level name of its file rests on: the rest of the file may change."""
        if self.content is None:
            return self.digest
        path = Path(self.spec.rpartition(":")[0])
        return _digest_of_file(path, self.content, statements_behind(self.content, name))


def _digest_of_file(path: Path, content: bytes, part: bytes | None = None) -> str:
    """Of a Python file, or of a part of it, and of the files beside it that it imports."""
    imports: Any = ModuleFinder(path=[str(path.parent)])
    imports.load_module(path.stem, io.BytesIO(content), str(path), ("", "rb", _PY_SOURCE))
    files = {str(module.__file__) for module in imports.modules.values() if module.__file__}
    others = [Path(file).read_bytes() for file in sorted(files - {str(path)})]
    return _hash([content if part is None else part, *others])


def statements_behind(source: bytes, name: str) -> bytes | None:
    """The top-level statements that a name rests on, without comments; None if it is not among them.

    >>> statements_behind(b"a = 1  # one\\nb = a\\ndef f(): return b\\ndef g(): pass", "f").decode()
    'a = 1\\nb = a\\ndef f():\\n    return b'
    """
    statements = [s for s in ast.parse(source).body if not _is_text(s)]
    bound = [_names_bound(statement) for statement in statements]
    if not any(name in names for names in bound):
        return None
    taken = {i for i, names in enumerate(bound) if not names}  # such as torch.set_num_threads(1)
    wanted, open_ = {name}, True
    while open_:
        taken |= {i for i, names in enumerate(bound) if names & wanted}
        loads = {
            node.id
            for i in taken
            for node in ast.walk(statements[i])
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)
        }
        open_ = not loads <= wanted
        wanted |= loads
    return "\n".join(ast.unparse(statements[i]) for i in sorted(taken)).encode()


def _is_text(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def _names_bound(statement: ast.stmt) -> set[str]:
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {statement.name}
    names = set()
    for node in ast.walk(statement):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.alias):
            names.add((node.asname or node.name).partition(".")[0])
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
    return names


def _hash(contents: Iterable[bytes]) -> str:
    """A short name of files' contents, the same for all line ends."""
    made = hashlib.sha256()
    for content in contents:
        made.update(hashlib.sha256(content.replace(b"\r\n", b"\n")).digest())
    return made.hexdigest()[:16]
