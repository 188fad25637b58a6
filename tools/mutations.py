"""Small faults put into a module's source, one at a time: what tests ought to notice.

Left out on purpose: words (messages), types, decorators, and a matrix product's order, which the
shapes give away.
"""

from __future__ import annotations

import ast
import copy
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

_BOUNDARY = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt}
_NEGATED = {
    ast.Lt: ast.GtE,
    ast.LtE: ast.Gt,
    ast.Gt: ast.LtE,
    ast.GtE: ast.Lt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
}
_ARITHMETIC = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Pow: ast.Mult,
}
_OPPOSITES = [
    ("min", "max"),
    ("minimum", "maximum"),
    ("any", "all"),
    ("amin", "amax"),
    ("argmin", "argmax"),
    ("zeros_like", "ones_like"),
    ("new_zeros", "new_ones"),
    ("sum", "mean"),
]
_OTHER_NAME = {**dict(_OPPOSITES), **{b: a for a, b in _OPPOSITES}}
_DROPPED = {"abs", "clamp_min", "sqrt", "square", "flip", "clone", "sort", "cumsum"}  # x.f() -> x
_COMMUTES = {"min", "max", "minimum", "maximum"}


@dataclass(frozen=True)
class Mutant:
    """One fault: where, what stood there, what stands there now, and the module with it."""

    file: str
    function: str  # qualified name, or "<module>"
    line: int
    change: str  # "before -> after"
    occurrence: int  # of the same change in the same function
    module: ast.Module = field(repr=False)
    node: ast.AST = field(repr=False)
    after: ast.AST | None = field(repr=False)

    @property
    def key(self) -> str:
        number = f" ({self.occurrence})" if self.occurrence > 1 else ""
        return f"{self.file}:{self.function}: {self.change}{number}"

    @property
    def tree(self) -> ast.Module:
        """The module with the fault."""
        return _with(self.module, self.node, self.after)


def mutants(file: str, source: str) -> Iterator[Mutant]:
    """All faults of a module, each once, in the order of its lines."""
    tree = ast.parse(source)
    seen: Counter[tuple[str, str]] = Counter()
    places = sorted(_places(tree), key=lambda place: place[1].lineno)
    for function, node in places:
        for after in _changed(node):
            change = f"{_words(node)} -> {_words(after)}"
            seen[function, change] += 1
            occurrence = seen[function, change]
            yield Mutant(file, function, node.lineno, change, occurrence, tree, node, after)


def _words(node: ast.AST | None) -> str:
    if node is None:
        return "nothing"
    if isinstance(node, ast.If):
        return f"if {ast.unparse(node.test)}"
    return " ".join(ast.unparse(node).split())


def _with(tree: ast.Module, node: ast.AST, after: ast.AST | None) -> ast.Module:
    """A copy of the tree with another node in this one's place; `pass` for nothing."""

    class Put(ast.NodeTransformer):
        def visit(self, here: ast.AST) -> ast.AST:
            if here is node:
                return ast.copy_location(after if after is not None else ast.Pass(), node)
            return self.generic_visit(here)

    # Only the nodes on the way down to the place change, so sharing the others would do; the
    # transformer writes in place, though, so it gets a copy in which the place is still known.
    memo = {id(node): node}
    changed = Put().visit(copy.deepcopy(tree, memo))
    return ast.fix_missing_locations(changed)


def _places(tree: ast.Module) -> Iterator[tuple[str, ast.expr | ast.stmt]]:
    """Nodes that may change, with the function they stand in."""

    def walk(node: ast.AST, names: tuple[str, ...]) -> Iterator[tuple[str, ast.expr | ast.stmt]]:
        for name, value in ast.iter_fields(node):
            if name in ("annotation", "returns", "decorator_list", "format_spec"):
                continue
            for child in value if isinstance(value, list) else [value]:
                if not isinstance(child, ast.AST):
                    continue
                inner = names
                if isinstance(child, ast.ClassDef | ast.FunctionDef):
                    inner = (*names, child.name)
                elif isinstance(child, ast.expr | ast.stmt):
                    yield ".".join(names) or "<module>", child
                yield from walk(child, inner)

    yield from walk(tree, ())


def _changed(node: ast.expr | ast.stmt) -> Iterator[ast.AST | None]:
    """What may stand in a node's place; None removes a statement."""
    for make in (_statements, _conditions, _operators, _calls, _constants):
        yield from make(node)


def _edited(node: ast.AST, **fields: object) -> ast.AST:
    other = copy.copy(node)
    for name, value in fields.items():
        setattr(other, name, value)
    return other


def _statements(node: ast.AST) -> Iterator[ast.AST | None]:
    spoken = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant | ast.Yield)
    if isinstance(node, ast.Break | ast.AugAssign | ast.Expr) and not spoken:
        yield None
    elif isinstance(node, ast.Return) and ast.unparse(node) not in ("return", "return None"):
        yield _edited(node, value=ast.Constant(None))


def _conditions(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.If | ast.IfExp):
        yield _edited(node, test=ast.Constant(True))
        yield _edited(node, test=ast.Constant(False))
    elif isinstance(node, ast.ListComp | ast.GeneratorExp | ast.SetComp):
        for loop in node.generators:
            if loop.ifs:
                others = [_edited(g, ifs=[]) if g is loop else g for g in node.generators]
                yield _edited(node, generators=others)
    elif isinstance(node, ast.BoolOp):
        for gone in node.values:
            rest = [value for value in node.values if value is not gone]
            yield rest[0] if len(rest) == 1 else _edited(node, values=rest)
    elif isinstance(node, ast.Compare):
        for table in (_BOUNDARY, _NEGATED):
            for place, op in enumerate(node.ops):
                if type(op) in table:
                    ops = [*node.ops[:place], table[type(op)](), *node.ops[place + 1 :]]
                    yield _edited(node, ops=ops)


def _operators(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.BinOp | ast.AugAssign) and type(node.op) in _ARITHMETIC:
        yield _edited(node, op=_ARITHMETIC[type(node.op)]())
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitAnd | ast.BitOr):
        yield node.left
        yield node.right
    elif isinstance(node, ast.UnaryOp):
        yield node.operand


def _calls(node: ast.AST) -> Iterator[ast.AST]:
    if not isinstance(node, ast.Call):
        return
    name = node.func
    if isinstance(name, ast.Name) and name.id in _OTHER_NAME:
        yield _edited(node, func=ast.Name(_OTHER_NAME[name.id], ast.Load()))
    if isinstance(name, ast.Attribute):
        if name.attr in _OTHER_NAME:
            yield _edited(node, func=_edited(name, attr=_OTHER_NAME[name.attr]))
        of_a_module = isinstance(name.value, ast.Name) and name.value.id in ("torch", "math")
        if name.attr in _DROPPED and not of_a_module:
            yield name.value
    either_way = ast.unparse(name).split(".")[-1] in _COMMUTES
    if (
        len(node.args) >= 2
        and not either_way
        and not any(isinstance(a, ast.Starred) for a in node.args)
    ):
        yield _edited(node, args=[node.args[1], node.args[0], *node.args[2:]])


def _constants(node: ast.AST) -> Iterator[ast.AST]:
    if not isinstance(node, ast.Constant):
        return
    value = node.value
    if isinstance(value, bool):
        yield ast.Constant(not value)
    elif isinstance(value, int) and value < 10:
        yield ast.Constant(value + 1)
    elif isinstance(value, int | float):  # a level or a tolerance
        yield ast.Constant(type(value)(value * 10 if value else 1))
        if value:
            yield ast.Constant(type(value)(value / 10))
