"""Writes the hash-checked locks in `requirements/` from pyproject.toml and constraints.txt.

    python tools/lock.py          # run.lock (what `make demo` installs) and dev.lock (`make test`)
    python tools/lock.py --cuda   # cuda.lock too: pip may fetch 2 GB of wheels to read their metadata

Run it on Linux x86_64 with Python 3.11: the locks hold the wheels that pip could install there, from every
index and folder pip is configured with, so that a CPU build of PyTorch beside the public one counts too.
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
)  # what builds the project: installed with the rest, not by pip on the side
LOCKS = {"run": ".[cli,plots]", "dev": ".[dev]"}
_LINK = re.compile(r"Found link \S*/([^/#\s]+\.whl)#sha256=([0-9a-f]{64})")
_HEAD = """\
# Written by `python tools/lock.py`; not to be edited by hand. Wheels for Linux x86_64 and Python 3.11.
# Where this does not fit: pip install -c constraints.txt -e '.[{extras}]', the same versions without hashes.
--only-binary :all:
"""


def pip(*arguments: str) -> str:
    """What pip says; its refusal ends this."""
    command = [sys.executable, "-m", "pip", *arguments]
    done = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr)
    return done.stdout


def resolved(*what: str, alone: bool = False) -> dict[str, tuple[str, str]]:
    """The version and the sha256 that pip would install of every package needed, by name.

    Args:
        what: Requirements.
        alone: Ask the public index only, whatever pip is configured with.
    """
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        options = ["--dry-run", "--ignore-installed", "--report", str(report)]
        indexes = ["--isolated"] if alone else []
        pip(*indexes, "install", *options, "-c", "constraints.txt", *what)
        chosen = json.loads(report.read_text(encoding="utf-8"))["install"]
    return {
        canonicalize_name(one["metadata"]["name"]): (
            Version(one["metadata"]["version"]).public,  # 2.13.0+cpu is a build of 2.13.0
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
    for file, sha256 in _LINK.findall(said.replace("%2B", "+")):
        name, version, *_ = parse_wheel_filename(file)
        if name in pins and version.public == pins[name]:
            hashes[name].add(sha256)
    return hashes


def write(path: Path, extras: str, packages: dict[str, tuple[str, set[str]]]) -> None:
    """One lock: a pin and its hashes for each package."""
    lines = [_HEAD.format(extras=extras)]
    for name, (version, hashes) in sorted(packages.items()):
        given = " \\\n".join(f"    --hash=sha256:{sha256}" for sha256 in sorted(hashes))
        lines.append(f"{name}=={version} \\\n{given}\n")
    path.write_text("".join(lines), encoding="utf-8")
    print(f"{path.relative_to(ROOT)}: {len(packages)} packages")


def constrained() -> dict[str, str]:
    """The versions that constraints.txt asks for."""
    text = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    pins = re.findall(r"^([\w.-]+)==(\S+)$", text, re.MULTILINE)
    return {canonicalize_name(name): version for name, version in pins}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cuda", action="store_true", help="lock what the public torch asks for")
    cuda = parser.parse_args().cuda

    found = {name: resolved(*BACKEND, project) for name, project in LOCKS.items()}
    together = {name: version for one in found.values() for name, (version, _) in one.items()}
    public: dict[str, tuple[str, str]] = {}
    if cuda:
        public = resolved(f"torch=={together['torch']}", alone=True)
        public = {name: public[name] for name in public if name not in found["run"]}
    missing = {**together, **{n: v for n, (v, _) in public.items()}}.items() - constrained().items()
    if missing:
        pins = "\n".join(f"{name}=={version}" for name, version in sorted(missing))
        sys.exit(f"put these into constraints.txt first (and take out older ones):\n{pins}")

    hashes = listed(together)
    for name, extras in (("run", "cli,plots"), ("dev", "dev")):
        packages = {n: (v, hashes[n] | {sha256}) for n, (v, sha256) in found[name].items()}
        write(ROOT / "requirements" / f"{name}.lock", extras, packages)
    if public:
        packages = {n: (v, {sha256}) for n, (v, sha256) in public.items()}
        write(ROOT / "requirements" / "cuda.lock", "cli,plots", packages)


if __name__ == "__main__":
    main()
