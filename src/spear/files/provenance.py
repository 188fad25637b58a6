"""What a row records of the code that made it: versions, and the commit of the checkout."""

from __future__ import annotations

import platform
import subprocess
from functools import cache
from pathlib import Path

import numpy
import scipy
import torch

import spear


@cache
def versions() -> dict[str, str]:
    """Versions of everything that can change a result's bits."""
    return {
        "spear": spear.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "scipy": scipy.__version__,
        "machine": f"{platform.system()} {platform.machine()}",
    }


@cache
def commit() -> str | None:
    """The checkout's commit, with a + if files differ from it; None if this is not a checkout."""
    root = Path(__file__).resolve().parents[3]
    if not (root / ".git").exists():
        return None
    git = [
        "git",
        "--no-optional-locks",
        "-C",
        str(root),
    ]  # reads only; `describe --dirty` would lock
    try:
        head, changed = (
            subprocess.run([*git, *words], capture_output=True, text=True, check=True).stdout  # noqa: S603
            for words in (
                ["rev-parse", "--short=7", "HEAD"],
                ["status", "--porcelain", "--untracked-files=no"],
            )
        )
    except (OSError, subprocess.CalledProcessError):  # no git here, or not our checkout
        return None
    return head.strip() + "+" * bool(changed)
