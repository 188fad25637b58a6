"""Files as researchers write them: a finder, an attack, an experiment; and a package of them."""

from pathlib import Path

FINDER = '''
"""A finder, with what it depends on in a file beside it."""

from dataclasses import dataclass

from spear.search import CascadeFinder

from my_levels import LEVEL


@dataclass(frozen=True)
class Mine:
    level: float = LEVEL

    def satisfied(self, factors, match):
        return match >= self.level

    def search(self, factors, *, generator, watch):
        watch.count("mine")
        yield from CascadeFinder().search(factors, generator=generator, watch=watch)


class Broken(Mine):
    def search(self, factors, *, generator, watch):
        yield factors.outputs.white


class Picky:
    def __init__(self, steps):
        raise AssertionError


READY = Mine(level=0.99)
'''

ATTACK = """
import torch

from spear.baselines import CocktailPartyAttack


class Mine:
    def invert(self, view, **options):
        return CocktailPartyAttack(iterations=3, total_variation=0).invert(view, **options)


class Boaster(Mine):
    def invert(self, view, **options):
        from dataclasses import replace

        from spear import Outcome

        return replace(super().invert(view, **options), outcome=Outcome.EXACT)


class Empty:
    def invert(self, view, **options):
        return torch.zeros(1)
"""

TABLE = '''
"""Random rows: needs no dataset."""

import torch

import spear
from spear.experiments.common import Experiment, Section, table
from spear.experiments.common.batches import attack
from spear.federated import fedsgd, mlp
from spear.trials import Measured

CLASSES = 5


def measure(case):
    net = mlp(40, CLASSES, width=case["m"], depth=3, seed=case.seed)
    x = torch.randn(case["b"], 40, generator=case.generator())
    found = attack(case, spear.observe(net, fedsgd(net, x, torch.arange(case["b"]) % CLASSES)), net)
    return found.measured({"certified": int(found.result.certified.sum()), **found.counts})


def draw(rows):
    lines = [[str(r.settings["b"]), str(r.seed), r.outcome or "failed"] for r in rows["NAME"]]
    return Section([table("b, seed, outcome", sorted(lines))])


EXPERIMENT = Experiment(
    place="Mine",
    title="Random rows",
    batches=2,
    cells=[{"b": b, "m": 60, "max_seconds": 60} for b in (2, 3)],
    measure=measure,
    draw=draw,
)
'''

PROJECT = """
[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"

[project]
name = "peeling-finder"
version = "1.2"

[project.entry-points."spear.finders"]
peeling = "peeling.finder:Mine"
gone = "peeling.missing:Finder"

[project.entry-points."spear.attacks"]
peeling_attack = "peeling.attack:Mine"

[project.entry-points."spear.experiments"]
peeling_table = "peeling.table:EXPERIMENT"
peeling_gone = "peeling.finder:Mine"
"""


def write_files(folder: Path) -> Path:
    """my_finder.py with my_levels.py, my_attack.py and my_table.py."""
    (folder / "my_finder.py").write_text(FINDER)
    (folder / "my_levels.py").write_text("LEVEL = 1.0\n")
    (folder / "my_attack.py").write_text(ATTACK)
    (folder / "my_table.py").write_text(TABLE.replace("NAME", "my_table"))
    return folder


def write_package(folder: Path) -> Path:
    """The same as a package that can be installed."""
    package = folder / "peeling"
    package.mkdir(parents=True)
    (folder / "pyproject.toml").write_text(PROJECT)
    (package / "__init__.py").write_text("")
    (package / "finder.py").write_text(FINDER.replace("my_levels", "peeling.levels"))
    (package / "levels.py").write_text("LEVEL = 1.0\n")
    (package / "attack.py").write_text(ATTACK)
    (package / "table.py").write_text(TABLE.replace("NAME", "peeling_table"))
    return folder
