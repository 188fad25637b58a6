"""Is what is installed what was locked, untouched, and free of known vulnerabilities?

    python tools/audit_dependencies.py                          # offline: versions, files, pip check
    python tools/audit_dependencies.py --database FOLDER        # and advisories: OSV's JSON files
    python tools/audit_dependencies.py --licences               # and every package's licence

OSV exports all advisories for Python as one zip of JSON files: fetched once on a machine with a network
and unpacked, it serves machines without. Where pip-audit is installed, it is asked, too: it needs one.
Exit code 1 if anything was found; what could not be looked at is said, and is no finding.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import Distribution, distributions
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

LOCKS = Path(__file__).resolve().parent.parent / "requirements"
OWN = {"spear-fl", "pip"}  # the project itself, and what came with Python
PINNED = re.compile(r"^([a-z0-9-]+)==(\S+) \\$", re.MULTILINE)


def locked(folder: Path = LOCKS) -> dict[str, set[str]]:
    """The versions that the locks allow, by name; PyTorch has a CPU and a CUDA build."""
    pins: dict[str, set[str]] = {}
    for lock in sorted(folder.glob("*.lock")):
        for name, version in PINNED.findall(lock.read_text(encoding="utf-8")):
            pins.setdefault(name, set()).add(version)
    return pins


def installed(paths: list[str] | None = None) -> dict[str, Distribution]:
    """By name; the first on the path counts, as it does for imports."""
    found: dict[str, Distribution] = {}
    for one in distributions(path=paths) if paths else distributions():
        found.setdefault(canonicalize_name(one.metadata["Name"]), one)
    return found


def unlocked(there: dict[str, Distribution], pins: dict[str, set[str]]) -> Iterator[str]:
    """Packages that no lock names, or in another version."""
    for name, one in sorted(there.items()):
        if name in OWN:
            continue
        if name not in pins:
            yield f"{name} {one.version} is in no lock"
        elif one.version not in pins[name]:
            yield f"{name}: {' or '.join(sorted(pins[name]))} is locked, {one.version} is installed"


def tampered(there: dict[str, Distribution]) -> Iterator[str]:
    """Files that are not what their package's RECORD says: changed, or gone."""
    for name, one in sorted(there.items()):
        for file in one.files or []:
            if file.hash is None or file.suffix == ".pyc":
                continue  # RECORD cannot name its own hash
            path = Path(str(one.locate_file(file)))
            if not path.is_file():
                yield f"{name}: {file} is missing"
            elif _digest(path, file.hash.mode) != file.hash.value:
                yield f"{name}: {file} has been changed since it was installed"


def strays(there: dict[str, Distribution]) -> Iterator[str]:
    """What lies beside the packages and belongs to none: a .pth there runs whenever Python starts."""
    folders = {Path(str(one.locate_file(""))) for one in there.values() if one.files}
    owned = {file.parts[0] for one in there.values() for file in one.files or []}
    for folder in sorted(folders):
        for path in sorted(folder.iterdir()):
            if path.name not in owned and path.name != "__pycache__":
                yield f"{path.name} belongs to no package"


def _digest(path: Path, kind: str) -> str:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, kind).digest()
    return base64.urlsafe_b64encode(digest).rstrip(b"=").decode()


def vulnerable(there: dict[str, str], folder: Path) -> Iterator[str]:
    """Advisories in OSV's format that name an installed version.

    Args:
        there: versions by name.
        folder: with a JSON file for each advisory; withdrawn ones do not count.
    """
    for path in sorted(folder.rglob("*.json")):
        advisory = json.loads(path.read_bytes())
        if "withdrawn" in advisory:
            continue
        for affected in advisory.get("affected", []):
            package = affected.get("package", {})
            name = canonicalize_name(package.get("name", ""))
            if package.get("ecosystem") == "PyPI" and name in there and _hit(there[name], affected):
                summary = advisory.get("summary") or advisory.get("details", "")[:100]
                yield f"{name} {there[name]}: {advisory['id']} {summary}".rstrip()
                break


def _hit(version: str, affected: dict[str, Any]) -> bool:
    """Is a version among those listed, or within a range of events?"""
    public = Version(version).public  # a build of it is as vulnerable
    if public in affected.get("versions", ()):
        return True
    ranges = [one for one in affected.get("ranges", ()) if one.get("type") == "ECOSYSTEM"]
    return any(_within(Version(public), one["events"]) for one in ranges)


def _within(version: Version, events: list[dict[str, str]]) -> bool:
    """OSV's own rule: walk the events in the order of their versions, the last before ours decides."""
    inside = False
    for kind, at in sorted(
        ((kind, _version(at)) for event in events for kind, at in event.items()),
        key=lambda event: (event[1], event[0] != "introduced"),
    ):
        if kind == "introduced" and version >= at:
            inside = True
        elif (kind == "fixed" and version >= at) or (kind == "last_affected" and version > at):
            inside = False
    return inside


def _version(text: str) -> Version:
    try:
        return Version(text)
    except InvalidVersion:
        return Version("0")  # nothing older is on record: it counts as affected


def licence(one: Distribution) -> str:
    """What a package says of its licence."""
    said = one.metadata.get("License-Expression")
    classified = [
        c.split(" :: ")[-1] for c in one.metadata.get_all("Classifier", []) if "License" in c
    ]
    first = (one.metadata.get("License") or "").strip().splitlines()
    return said or "; ".join(classified) or (first[0][:60] if first else "not said")


def asked_pip(*command: str) -> list[str]:
    """What a module of pip's complains about; nothing where it is content."""
    done = subprocess.run(
        [sys.executable, "-m", *command], capture_output=True, text=True, check=False
    )
    said = (done.stdout + done.stderr).strip().splitlines()
    return said or [f"exit code {done.returncode}"] if done.returncode else []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--database", type=Path, help="folder of advisories in OSV's JSON")
    parser.add_argument("--licences", action="store_true", help="list every package's licence")
    options = parser.parse_args()
    there = installed()
    versions = {name: one.version for name, one in there.items()}
    found = {
        "installed and locked versions": list(unlocked(there, locked())),
        "files against their RECORD": list(tampered(there)),
        "files of no package": list(strays(there)),
        "pip check": asked_pip("pip", "check"),
    }
    skipped = []
    if options.database is not None:
        if not any(options.database.rglob("*.json")):
            sys.exit(f"expected advisories in OSV's JSON in {options.database}, got none")
        found["advisories"] = list(vulnerable(versions, options.database))
    else:
        skipped.append("advisories: give --database, a folder of OSV's JSON files")
    if find_spec("pip_audit"):
        found["pip-audit (a failure may be the network's)"] = asked_pip(
            "pip_audit", "--skip-editable"
        )
    else:
        skipped.append("pip-audit: not installed, and it needs a network")
    for what, problems in found.items():
        print(f"{what}: {f'{len(problems)} found' if problems else 'nothing found'}")
        print(*(f"  {problem}" for problem in problems), sep="\n", end="\n" if problems else "")
    for what in skipped:
        print(f"not looked at: {what}")
    if options.licences:
        print(
            *(f"{name} {versions[name]}: {licence(there[name])}" for name in sorted(there)),
            sep="\n",
        )
    print(f"{len(there)} packages")
    sys.exit(bool(any(found.values())))


if __name__ == "__main__":
    main()
