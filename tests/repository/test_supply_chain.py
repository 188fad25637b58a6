"""The locks are whole, agree with pyproject.toml and constraints.txt, and are what is installed."""

import hashlib
import re
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import distributions
from pathlib import Path

import pytest

packaging = pytest.importorskip("packaging", reason="needs the dev extra")
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

import install

ROOT = Path(__file__).parents[2]
ENTRY = re.compile(r"([a-z0-9-]+)==(\S+)((?: \\\n    --hash=sha256:[0-9a-f]{64})+)\n")
LOCKS = ("run", "dev", "torch-cpu", "torch-cuda")
OWN = {"spear-fl", "pip"}  # the project itself, and what came with Python


def entries(lock):
    """Version by name; the whole file must be entries with hashes, but for its first lines."""
    text = (ROOT / f"requirements/{lock}.lock").read_text()
    head, _, body = text.partition("--only-binary :all:\n\n")
    assert all(line.startswith("#") for line in head.splitlines())
    found = ENTRY.findall(body)
    assert "".join(f"{name}=={version}{hashes}\n" for name, version, hashes in found) == body
    return {name: version for name, version, _ in found}


def constraints():
    text = (ROOT / "constraints.txt").read_text()
    pins = dict(line.split("==") for line in text.splitlines() if not line.startswith("#"))
    return {canonicalize_name(name): version for name, version in pins.items()}


def wanted(extra=None):
    """The requirements of pyproject.toml with an extra, extras of our own followed."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = project["optional-dependencies"][extra] if extra else project["dependencies"]
    for line in lines:
        needed = Requirement(line)
        if needed.name == project["name"]:
            for part in needed.extras:
                yield from wanted(part)
        else:
            yield needed


def installed():
    """By name; the first on the path counts, as it does for imports."""
    return {canonicalize_name(one.metadata["Name"]): one for one in [*distributions()][::-1]}


@pytest.mark.parametrize("lock", LOCKS)
def test_every_line_of_a_lock_is_a_pin_with_hashes_that_constraints_agree_with(lock):
    pins, known = entries(lock), constraints()
    assert pins
    for name, version in pins.items():
        assert known[name] == Version(version).public, name


@pytest.mark.parametrize(
    ("lock", "extras"), [("run", (None, "cli", "plots")), ("dev", (None, "dev"))]
)
def test_pyproject_admits_what_is_locked_and_finds_all_of_it(lock, extras):
    pins = entries(lock) | entries("torch-cpu")
    backend = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    asked = [need for extra in extras for need in wanted(extra)]
    for needed in [*asked, *map(Requirement, backend), Requirement("editables")]:
        if needed.marker is None or needed.marker.evaluate():
            version = pins[canonicalize_name(needed.name)]
            assert needed.specifier.contains(version, prereleases=True), needed


def test_what_is_installed_asks_for_nothing_beyond_the_lock():
    pins, there = entries("dev") | entries("torch-cpu"), installed()
    for name in set(pins) & set(there):
        for line in there[name].requires or []:
            needed = Requirement(line)
            if needed.marker is None or needed.marker.evaluate({"extra": ""}):
                assert canonicalize_name(needed.name) in pins, f"{name} needs {needed}"


@pytest.mark.skipif(not install.fits(), reason="the locks are for another platform")
def test_this_environment_is_the_locks():
    pins = {(name, version) for lock in LOCKS for name, version in entries(lock).items()}
    there = {(name, one.version) for name, one in installed().items() if name not in OWN}
    assert there - pins == set()


PAPER = 'Paper = "https://arxiv.org/abs/2403.03945"'  # of [project.urls]: nothing is fetched


def test_no_file_of_the_set_up_names_a_registry():
    files = ["Makefile", "constraints.txt", "pyproject.toml", "tools/lock.sh", "tools/install.py"]
    for name in (*files, *(f"requirements/{lock}.lock" for lock in LOCKS)):
        text = (ROOT / name).read_text().replace(PAPER, "")
        assert not re.search(r"index-url|find-links|://", text), name


def test_make_installs_from_the_lock():
    text = (ROOT / "Makefile").read_text()
    assert re.findall(r"tools/install.py (run|dev)$", text, re.MULTILINE) == ["run", "dev"]


def test_a_wheel_that_was_swapped_is_not_installed(tmp_path):
    """Real wheels and pip's own check, with a lock in the format of ours."""
    path = tmp_path / "canary_wheel-1.0-py3-none-any.whl"
    inside = "canary_wheel-1.0.dist-info"

    def write(body):
        with zipfile.ZipFile(path, "w") as wheel:
            wheel.writestr("canary_wheel.py", body)
            wheel.writestr(
                f"{inside}/METADATA", "Metadata-Version: 2.1\nName: canary_wheel\nVersion: 1.0\n"
            )
            wheel.writestr(
                f"{inside}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
            )
            wheel.writestr(f"{inside}/RECORD", "")

    def install_into(name):
        options = ["--no-index", f"--find-links={tmp_path}", "--require-hashes", "--no-deps", "-q"]
        options += [f"--target={tmp_path / name}", f"--requirement={tmp_path / 'x.lock'}"]
        command = [sys.executable, "-m", "pip", "--isolated", "install", *options]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    write("VALUE = 1\n")
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    text = f"--only-binary :all:\n\ncanary-wheel==1.0 \\\n    --hash=sha256:{sha256}\n"
    (tmp_path / "x.lock").write_text(text)
    assert install_into("good").returncode == 0
    assert (tmp_path / "good" / "canary_wheel.py").exists()
    write("VALUE = 2  # somebody else's\n")
    refused = install_into("bad")
    assert refused.returncode == 1
    assert "DO NOT MATCH THE HASHES" in refused.stderr
    assert not (tmp_path / "bad").exists()
