"""The house: rooms import leftward only, by each other's front doors, and the core needs little."""

import ast
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "spear"
# Every room, in the order of docs/architecture.md: each imports from those before it.
ORDER = [
    *(
        "errors",
        "plugins",
        "denoising",
        "theory",
        "tolerances",
        "update",
        "factors",
        "search",
        "judge",
        "inversion",
    ),
    *("files", "data", "federated", "metrics", "baselines", "report", "trials"),
    *("experiments", "check", "sweep", "integrations", "cli"),
]
CORE = ORDER[: ORDER.index("inversion") + 1]
PUBLIC = {"__init__", "__main__"}  # of the package itself
# What is reached by its own name: it needs an extra, or is one of many files with the same door.
BY_NAME = {"spear.federated.dpsgd", "spear.integrations.ray", "spear.cli.app"}
ANY_FILE = {"experiments"}
# The one lazy import backwards: the file, the method it is in, and what it imports.
BACKWARDS = ("inversion.py", "report", "spear.report")


def room_of(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def files(room: str) -> list[Path]:
    return (
        sorted((SOURCE / room).rglob("*.py"))
        if (SOURCE / room).is_dir()
        else [SOURCE / f"{room}.py"]
    )


def imports(path: Path) -> list[tuple[str, list[str]]]:
    """Modules of spear that a file imports at run time, wherever in it, and the names it takes."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found = []
    file, method, imported = BACKWARDS
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING":
            node.body = []
        elif isinstance(node, ast.FunctionDef) and (path, node.name) == (SOURCE / file, method):
            node.body = [one for one in node.body if getattr(one, "module", None) != imported]
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "spear":
            names = [alias.name for alias in node.names]
            if node.module == "spear":
                found += [(f"spear.{name}", [name]) for name in names if (SOURCE / name).is_dir()]
                found += [
                    (f"spear.{name}", []) for name in names if (SOURCE / f"{name}.py").exists()
                ]
            else:
                found.append((str(node.module), names))
        elif isinstance(node, ast.Import):
            found += [(alias.name, []) for alias in node.names if alias.name.startswith("spear.")]
    return found


def exports(room: str) -> set[str]:
    tree = ast.parse((SOURCE / room / "__init__.py").read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return set(ast.literal_eval(node.value))
    return set()


def test_every_room_has_its_place():
    assert {room_of(path) for path in SOURCE.rglob("*.py")} == {*ORDER, *PUBLIC}


@pytest.mark.parametrize("room", ORDER)
def test_a_room_imports_from_those_before_it(room):
    allowed = set(ORDER[: ORDER.index(room) + 1])
    for path in files(room):
        for module, _ in imports(path):
            assert module.split(".")[1] in allowed, f"{path.relative_to(SOURCE)} imports {module}"


@pytest.mark.parametrize("room", ORDER)
def test_a_room_takes_what_others_offer(room):
    for path in files(room):
        for module, names in imports(path):
            other = module.split(".")[1]
            if other == room or other in ANY_FILE or module in BY_NAME:
                continue
            where = f"{path.relative_to(SOURCE)}: from {module} import {', '.join(names)}"
            assert module.count(".") == 1, where
            assert not any(name.startswith("_") for name in names), where
            if (SOURCE / other).is_dir() and names != [other]:
                assert set(names) <= exports(other), where


@pytest.mark.parametrize("room", [room for room in ORDER if (SOURCE / room).is_dir()])
def test_a_room_says_what_it_is_for(room):
    text = (SOURCE / room / "__init__.py").read_text(encoding="utf-8")
    assert ast.get_docstring(ast.parse(text))
    page = (SOURCE.parents[1] / "docs" / "architecture.md").read_text(encoding="utf-8")
    assert f"`{room}/`" in page


def test_attacks_never_see_the_truth():
    held = {"federated", "data", "metrics"}  # where private data and the truth are
    for room in [*CORE, "baselines"]:
        for path in files(room):
            assert not {module.split(".")[1] for module, _ in imports(path)} & held, path


def test_the_core_needs_torch_numpy_and_scipy_only():
    known = {"spear", "torch", "numpy", "scipy", "__future__"} | sys.stdlib_module_names
    for room in CORE:
        for path in files(room):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                roots = []
                if isinstance(node, ast.Import):
                    roots = [alias.name.split(".")[0] for alias in node.names]
                elif isinstance(node, ast.ImportFrom):
                    roots = [(node.module or "").split(".")[0]]
                assert set(roots) <= known, path


def test_functions_fit_on_a_page():
    """Typer's signatures are options, one a line: commands are not counted."""
    for path in SOURCE.rglob("*.py"):
        if room_of(path) == "cli":
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                first = node.body[0]
                if ast.get_docstring(node) is not None:
                    first = node.body[min(1, len(node.body) - 1)]
                length = (node.end_lineno or 0) - first.lineno + 1
                assert length <= 50, f"{path.relative_to(SOURCE)}: {node.name} has {length} lines"
