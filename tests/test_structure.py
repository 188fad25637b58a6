"""The import rule of the house: the core imports leftward only, and nothing from outside it."""

import ast
from pathlib import Path

SOURCE = Path(__file__).parent.parent / "src" / "spear"
CORE = [
    "errors",
    "tolerances",
    "spread",
    "theory",
    "tracing",
    "layers",
    "snapshots",
    "update/protocol",
    "update/plain_mlp",
    "update/layer_update",
    "update/readings",
    "update/observing",
    "update/__init__",
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
    "judge/causes",
    "judge/selection",
    "judge/layer",
    "judge/precautions",
    "judge/relu_boundary",
    "judge/relu_sides",
    "judge/replay",
    "judge/rivals",
    "judge/training",
    "judge/rescaling",
    "judge/partial",
    "judge/certificate",
    "judge/__init__",
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
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "spear":
            for alias in node.names:
                within = f"{node.module}.{alias.name}".split(".")[1:]
                names.add(module_of(within))
        elif isinstance(node, ast.Import):
            names |= {module_of(a.name.split(".")[1:]) for a in node.names if "spear." in a.name}
    return names


def module_of(parts):
    """The module that a dotted name is, or is in: `judge.rivals.scale` is in judge/rivals."""
    for count in range(len(parts), 0, -1):
        path = SOURCE.joinpath(*parts[:count])
        if path.with_suffix(".py").exists():
            return "/".join(parts[:count])
        if (path / "__init__.py").exists():
            return "/".join([*parts[:count], "__init__"])
    return parts[0]


def test_the_core_imports_leftward_only():
    for position, name in enumerate(CORE):
        allowed = set(CORE[:position])
        assert imported(SOURCE / f"{name}.py") <= allowed, name


def test_attacks_never_see_the_truth():
    for name in CORE:
        text = (SOURCE / f"{name}.py").read_text(encoding="utf-8")
        assert not any(n.startswith("metrics") for n in imported(SOURCE / f"{name}.py"))
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
