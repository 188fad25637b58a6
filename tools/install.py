"""Installs the project into the environment that runs this: `python tools/install.py run`, or `dev`.

On Linux x86_64 with Python 3.11 every file is checked against the hashes in `requirements/`; one that
differs ends the install. The locks are for that platform: elsewhere constraints.txt pins the same
versions, without hashes, and this says so.
"""

from __future__ import annotations

import platform
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOCKS = ROOT / "requirements"
EXTRAS = {"run": "cli,plots", "dev": "dev"}
FITS = ("Linux", "x86_64", (3, 11), "CPython")


def pip(*arguments: list[str]) -> None:
    """Run pip quietly, once for each list of arguments, side by side; a refusal ends the install."""
    command = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    if not sys.dont_write_bytecode:
        command.append("--no-compile")  # a minute less: Python compiles what is imported, as it is
    running = [subprocess.Popen([*command, *each], cwd=ROOT) for each in arguments]
    code = max(process.wait() for process in running)
    if code:
        sys.exit(code)


def fits() -> bool:
    """Whether the locks are for this machine and this Python."""
    here = (platform.system(), platform.machine(), sys.version_info[:2])
    return (*here, platform.python_implementation()) == FITS


def torch_lock() -> str:
    """The lock of the build of PyTorch that is to be had: the small CPU build where pip finds it."""
    command = [sys.executable, "-m", "pip", "index", "versions", "torch"]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"pip does not find any PyTorch:\n{done.stderr}")
    pinned = re.search(
        r"^torch==(\S+)", (LOCKS / "torch-cpu.lock").read_text("utf-8"), re.MULTILINE
    )
    assert pinned is not None
    return "torch-cpu" if pinned[1] in re.split(r"[\s,]+", done.stdout) else "torch-cuda"


def locked(lock: str) -> None:
    """The dependencies, only those that the locks name and whose hash is right; then the project."""
    text = "".join((LOCKS / f"{name}.lock").read_text("utf-8") for name in (torch_lock(), lock))
    options, *packages = re.split(r"^(?=\w)", text, flags=re.MULTILINE)
    with tempfile.TemporaryDirectory() as folder:
        halves = [Path(folder, f"{half}.lock") for half in range(2)]
        for half, path in enumerate(halves):
            path.write_text(options + "".join(packages[half::2]), "utf-8")
        # A lock is complete, so nothing is looked up, and pip can do one half beside the other.
        pip(*(["--require-hashes", "--no-deps", f"--requirement={path}"] for path in halves))
    pip(["--no-index", "--no-deps", "--no-build-isolation", "-e", "."])


def main() -> None:
    if sys.argv[1:] not in [[lock] for lock in EXTRAS]:
        sys.exit("usage: python tools/install.py run|dev")
    if sys.prefix == sys.base_prefix:
        sys.exit("expected to run in a virtual environment: python -m venv .venv, then its python")
    lock = sys.argv[1]
    if fits():
        print(f"installing with the hashes of requirements/{lock}.lock", flush=True)
        locked(lock)
    else:
        here = f"Python {platform.python_version()} on {platform.system()} {platform.machine()}"
        print(f"no lock for {here}: versions as in constraints.txt, hashes not checked", flush=True)
        pip(["-c", "constraints.txt", "-e", f".[{EXTRAS[lock]}]"])


if __name__ == "__main__":
    main()
