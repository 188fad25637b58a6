"""Puts the experiments into the wheel, beside the package; an editable install uses the checkout's."""

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class Experiments(BuildHookInterface):
    """`experiments/*.py` as `spear/experiments/`; the rows stay in the repository."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "editable":
            return
        for path in Path(self.root, "experiments").glob("*.py"):
            build_data["force_include"][str(path)] = f"spear/experiments/{path.name}"
