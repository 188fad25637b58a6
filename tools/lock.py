"""Writes the hash-checked locks in `requirements/` from pyproject.toml and constraints.txt.

    python tools/lock.py          # run.lock (for `make demo`), dev.lock (`make test`), torch-cpu.lock
    python tools/lock.py --cuda   # torch-cuda.lock too: pip may fetch 2 GB of wheels for their metadata

Run it on Linux x86_64 with Python 3.11, where pip finds a CPU build of PyTorch. The locks hold the
wheels that pip could install there, from every index and folder that it is configured with.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from packaging.utils import canonicalize_name, parse_wheel_filename
from packaging.version import Version

ROOT = Path(__file__).resolve().parent.parent
BACKEND = (
    "hatchling",
    "editables",
)  # builds the project: locked too, else pip fetches it on the side
LOCKS = {"run": ".[cli,plots]", "dev": ".[dev]"}
_LINK = re.compile(r"Found link \S*/([^/#\s]+\.whl)#sha256=([0-9a-f]{64})")
_HEAD = """\
# Written by `python tools/lock.py`, for Linux x86_64 and Python 3.11. Elsewhere: constraints.txt.
--only-binary :all:
"""


def pip(*arguments: str) -> str:
    """What pip says; its refusal ends this."""
    command = [sys.executable, "-m", "pip", *arguments]
    done = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr)
    return done.stdout


def resolved(*what: str, public: bool = False) -> dict[str, tuple[str, str]]:
    """The version and the sha256 that pip would install of every package needed, by name.

    Args:
        what: Requirements.
        public: Ask the public index only, whatever pip is configured with.
    """
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        options = ["--dry-run", "--ignore-installed", "--report", str(report)]
        indexes = ["--isolated"] if public else []
        pip(*indexes, "install", *options, "-c", "constraints.txt", *what)
        chosen = json.loads(report.read_text(encoding="utf-8"))["install"]
    return {
        canonicalize_name(one["metadata"]["name"]): (
            one["metadata"]["version"],
            one["download_info"]["archive_info"]["hashes"]["sha256"],
        )
        for one in chosen
        if "archive_info" in one["download_info"]  # the project itself is a folder
    }


def listed(pins: dict[str, str]) -> dict[str, set[str]]:
    """The sha256 of every wheel of these versions that pip finds and could install here, by name."""
    with tempfile.TemporaryDirectory() as folder:
        wanted = Path(folder, "pins.txt")
        wanted.write_text("".join(f"{name}=={pins[name]}\n" for name in pins), encoding="utf-8")
        options = ["--dry-run", "--ignore-installed", "--no-deps", "-vv", "-r", str(wanted)]
        said = pip("install", *options)
    hashes: dict[str, set[str]] = {name: set() for name in pins}
    for file, sha256 in _LINK.findall(said):
        name, version, *_ = parse_wheel_filename(file.replace("%2B", "+"))
        if pins.get(name) == str(version):
            hashes[name].add(sha256)
    return hashes


def constrained() -> dict[str, str]:
    """The versions that constraints.txt asks for."""
    text = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    pins = re.findall(r"^([\w.-]+)==(\S+)$", text, re.MULTILINE)
    return {canonicalize_name(name): version for name, version in pins}


def demand_constraints(versions: dict[str, str]) -> None:
    """End here if constraints.txt does not name all of these: the two must agree."""
    # 2.13.0+cpu is a build of 2.13.0
    public = {name: Version(version).public for name, version in versions.items()}
    missing = public.items() - constrained().items()
    if missing:
        pins = "\n".join(f"{name}=={version}" for name, version in sorted(missing))
        sys.exit(f"put these into constraints.txt first (and take out older ones):\n{pins}")


def write(lock: str, packages: dict[str, tuple[str, set[str]]]) -> None:
    """One lock: a pin and its hashes for each package."""
    lines = [_HEAD]
    for name, (version, hashes) in sorted(packages.items()):
        given = " \\\n".join(f"    --hash=sha256:{sha256}" for sha256 in sorted(hashes))
        lines.append(f"{name}=={version} \\\n{given}\n")
    (ROOT / "requirements" / f"{lock}.lock").write_text("".join(lines), encoding="utf-8")
    print(f"requirements/{lock}.lock: {len(packages)} packages")


def lock_everything() -> dict[str, tuple[str, str]]:
    """Write all but the CUDA lock; give what `make demo` installs."""
    found = {lock: resolved(*BACKEND, project) for lock, project in LOCKS.items()}
    versions = {name: version for one in found.values() for name, (version, _) in one.items()}
    demand_constraints(versions)
    if not versions["torch"].endswith("+cpu"):
        sys.exit(f"expected a CPU build of PyTorch among pip's indexes, got {versions['torch']}")
    hashes = listed(versions)
    for lock, one in found.items():
        packages = {name: (v, hashes[name] | {sha256}) for name, (v, sha256) in one.items()}
        torch = packages.pop("torch")  # beside the others: there are two builds of it
        write(lock, packages)
    write("torch-cpu", {"torch": torch})
    return found["run"]


def lock_cuda(run: dict[str, tuple[str, str]]) -> None:
    """The public build of PyTorch and what it asks for beyond the rest."""
    found = resolved(f"torch=={constrained()['torch']}", public=True)
    demand_constraints({name: version for name, (version, _) in found.items()})
    beyond = {name: found[name] for name in found if name == "torch" or name not in run}
    write("torch-cuda", {name: (version, {sha256}) for name, (version, sha256) in beyond.items()})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cuda", action="store_true", help="lock the public build of PyTorch too")
    cuda = parser.parse_args().cuda
    run = lock_everything()
    if cuda:
        lock_cuda(run)


if __name__ == "__main__":
    main()
