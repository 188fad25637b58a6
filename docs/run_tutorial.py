"""Runs a notebook from top to bottom, with the interpreter and the SPEAR of this process.

    python docs/run_tutorial.py [NOTEBOOK [RESULT]]

Without arguments docs/tutorial.ipynb gets its new outputs; docs/research.ipynb is the other one. A cell
that fails ends it with an error.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import nbformat
from jupyter_client.kernelspec import KernelSpec
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient

import spear

NOTEBOOK = Path(__file__).parent / "tutorial.ipynb"


class ThisPython(AsyncKernelManager):
    """A kernel in this very interpreter, whatever Jupyter has been told of others."""

    @property
    def kernel_spec(self) -> KernelSpec:
        start = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        return KernelSpec(argv=start, display_name="Python 3", language="python")


def run(notebook: Path, result: Path) -> None:
    """Run a notebook, and write it with its outputs."""
    cells = nbformat.read(str(notebook), as_version=4)
    source = str(Path(spear.__file__).resolve().parents[1])
    paths = [source, *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    with tempfile.TemporaryDirectory() as folder:
        client = NotebookClient(
            cells,
            km=ThisPython(),
            timeout=300,
            record_timing=False,
            resources={"metadata": {"path": folder}},
        )
        client.execute(env=environment)
    nbformat.write(cells, str(result))


if __name__ == "__main__":
    named = [Path(argument) for argument in sys.argv[1:]] or [NOTEBOOK]
    run(named[0], named[-1])
