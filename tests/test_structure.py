"""The import rule of the house: the core imports leftward only, and nothing from outside it."""

import ast
from pathlib import Path

SOURCE = Path(__file__).parent.parent / "src" / "spear"
CORE = [
    "errors",
    "spread",
    "theory",
    "tracing",
    "layers",
    "local_training",
    "snapshots",
    "update",
    "streaming",
    "factors",
    "penalty",
    "directions",
    "pool",
    "separation",
    "patterns",
    "sampling",
    "guesses",
    "settling",
    "vertices",
    "estimation",
    "cascade",
    "judge",
    "inversion",
]


def imported(path, type_checking=False):
    """Names of spear's own modules that a file imports at run time."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING":
            node.body = []
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "spear":
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("spear."):
            names.add(node.module.split(".")[1])
        elif isinstance(node, ast.Import):
            names |= {a.name.split(".")[1] for a in node.names if a.name.startswith("spear.")}
    return names


def test_the_core_imports_leftward_only():
    for position, name in enumerate(CORE):
        allowed = set(CORE[:position])
        assert imported(SOURCE / f"{name}.py") <= allowed, name


def test_attacks_never_see_the_truth():
    for name in CORE:
        text = (SOURCE / f"{name}.py").read_text(encoding="utf-8")
        assert "metrics" not in imported(SOURCE / f"{name}.py")
        assert "federated" not in text.split('"""', 2)[2], name


def test_the_core_needs_torch_numpy_and_scipy_only():
    for name in CORE:
        tree = ast.parse((SOURCE / f"{name}.py").read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            roots = []
            if isinstance(node, ast.Import):
                roots = [alias.name.split(".")[0] for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                roots = [(node.module or "").split(".")[0]]
            foreign = set(roots) - {"spear", "torch", "numpy", "scipy", "__future__"}
            assert all(root in __import__("sys").stdlib_module_names for root in foreign), name
