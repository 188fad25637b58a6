"""The locks are whole, agree with pyproject.toml and constraints.txt; the audit sees what is wrong."""

import base64
import hashlib
import json
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

packaging = pytest.importorskip("packaging", reason="needs the dev extra")
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[2]
import audit_dependencies as audit
import install

ENTRY = re.compile(r"([a-z0-9-]+)==(\S+)((?: \\\n    --hash=sha256:[0-9a-f]{64})+)\n")
LOCKS = ("run", "dev", "torch-cpu", "torch-cuda")


def entries(lock):
    """Version by name; the whole file must be entries with hashes, but for its first lines."""
    head, _, body = (
        (ROOT / f"requirements/{lock}.lock").read_text().partition("--only-binary :all:\n")
    )
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


@pytest.mark.parametrize("lock", LOCKS)
def test_every_line_of_a_lock_is_a_pin_with_hashes_that_constraints_agree_with(lock):
    pins, known = entries(lock), constraints()
    assert pins
    assert list(pins) == sorted(pins)
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
    pins, there = entries("dev") | entries("torch-cpu"), audit.installed()
    for name in set(pins) & set(there):
        for line in there[name].requires or []:
            needed = Requirement(line)
            if needed.marker is None or needed.marker.evaluate({"extra": ""}):
                assert canonicalize_name(needed.name) in pins, f"{name} needs {needed}"


@pytest.mark.skipif(not install.fits(), reason="the locks are for another platform")
def test_this_environment_is_the_locks():
    assert list(audit.unlocked(audit.installed(), audit.locked())) == []


def test_no_file_of_the_set_up_names_a_registry():
    for name in (
        "Makefile",
        "constraints.txt",
        "pyproject.toml",
        "tools/lock.py",
        "tools/install.py",
    ):
        assert not re.search(r"index-url|https?://", (ROOT / name).read_text()), name
    for lock in LOCKS:
        assert "://" not in (ROOT / f"requirements/{lock}.lock").read_text()


def test_make_installs_from_the_lock():
    text = (ROOT / "Makefile").read_text()
    assert re.findall(r"tools/install.py (run|dev)$", text, re.MULTILINE) == ["run", "dev"]
    assert "pip install" not in text


def wheel(folder, version="1.0", body="VALUE = 1\n", name="canary_wheel"):
    """A real wheel, by hand."""
    files = {
        f"{name}.py": body,
        f"{name}-{version}.dist-info/METADATA": f"Metadata-Version: 2.1\nName: {name}\n"
        f"Version: {version}\n",
        f"{name}-{version}.dist-info/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\n"
        "Tag: py3-none-any\n",
    }
    record = "".join(
        f"{path},sha256="
        + base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
        + f",{len(text)}\n"
        for path, text in files.items()
    )
    files[f"{name}-{version}.dist-info/RECORD"] = record + f"{name}-{version}.dist-info/RECORD,,\n"
    path = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for inside, text in files.items():
            archive.writestr(inside, text)
    return path


def pip(folder, lock):
    options = ["--no-index", f"--find-links={folder}", "--require-hashes", "--no-deps"]
    options += ["-q", f"--target={folder / 'site'}", f"--requirement={lock}"]
    command = [sys.executable, "-m", "pip", "--isolated", "install", *options]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture
def site(tmp_path):
    """A package that pip installed from a lock in our own format."""
    made = wheel(tmp_path)
    lock = tmp_path / "x.lock"
    sha256 = hashlib.sha256(made.read_bytes()).hexdigest()
    lock.write_text(f"--only-binary :all:\ncanary-wheel==1.0 \\\n    --hash=sha256:{sha256}\n")
    done = pip(tmp_path, lock)
    assert done.returncode == 0, done.stderr
    return tmp_path / "site"


def test_a_wheel_that_was_swapped_is_not_installed(site):
    folder = site.parent
    wheel(folder, body="VALUE = 2  # somebody else's\n")
    (site / "canary_wheel.py").unlink()
    for path in site.glob("*.dist-info"):
        path.rename(site.parent / "away")
    refused = pip(folder, folder / "x.lock")
    assert refused.returncode == 1
    assert "DO NOT MATCH THE HASHES" in refused.stderr
    assert not (site / "canary_wheel.py").exists()


def test_the_audit_sees_files_that_were_changed_removed_or_added(site):
    there = audit.installed([str(site)])
    assert list(there) == ["canary-wheel"]
    assert list(audit.tampered(there)) == []
    assert list(audit.strays(there)) == []
    assert list(audit.unlocked(there, {})) == ["canary-wheel 1.0 is in no lock"]
    assert list(audit.unlocked(there, {"canary-wheel": {"1.1"}})) == [
        "canary-wheel: 1.1 is locked, 1.0 is installed"
    ]
    (site / "canary_wheel.py").write_text("VALUE = 3\n")
    (site / "evil.pth").write_text("import os\n")
    assert list(audit.tampered(there)) == [
        "canary-wheel: canary_wheel.py has been changed since it was installed"
    ]
    assert list(audit.strays(there)) == ["evil.pth belongs to no package"]
    (site / "canary_wheel.py").unlink()
    assert list(audit.tampered(there)) == ["canary-wheel: canary_wheel.py is missing"]


def advisory(folder, name="ring", ecosystem="PyPI", **fields):
    affected = {"package": {"ecosystem": ecosystem, "name": name}}
    extra = {key: fields.pop(key) for key in ("withdrawn",) if key in fields}
    affected |= fields
    content = {"id": "TEST-1", "summary": "it rings", "affected": [affected], **extra}
    (folder / "TEST-1.json").write_text(json.dumps(content))


def events(*pairs, kind="ECOSYSTEM"):
    return [{"type": kind, "events": [dict([pair]) for pair in pairs]}]


@pytest.mark.parametrize(
    ("version", "fields", "hit"),
    [
        ("1.5", {"versions": ["1.4", "1.5"]}, True),
        ("1.5", {"versions": ["1.4"]}, False),
        ("1.5", {"ranges": events(("introduced", "0"), ("fixed", "1.6"))}, True),
        ("1.6", {"ranges": events(("introduced", "0"), ("fixed", "1.6"))}, False),
        ("1.10", {"ranges": events(("introduced", "1.9"), ("fixed", "1.11"))}, True),
        ("2.0", {"ranges": events(("introduced", "1.0"), ("last_affected", "2.0"))}, True),
        ("2.0.1", {"ranges": events(("introduced", "1.0"), ("last_affected", "2.0"))}, False),
        (
            "3.1",
            {"ranges": events(("fixed", "1.2"), ("introduced", "0"), ("introduced", "3"))},
            True,
        ),
        (
            "2.0",
            {"ranges": events(("fixed", "1.2"), ("introduced", "0"), ("introduced", "3"))},
            False,
        ),
        ("1.5+cpu", {"ranges": events(("introduced", "0"), ("fixed", "1.6"))}, True),
        ("1.6rc1", {"ranges": events(("introduced", "0"), ("fixed", "1.6"))}, True),
        ("1.5", {"ranges": events(("introduced", "0"), kind="GIT")}, False),
        ("1.5", {"versions": ["1.5"], "withdrawn": "2026-01-01T00:00:00Z"}, False),
        ("1.5", {"versions": ["1.5"], "ecosystem": "npm"}, False),
        ("1.5", {"versions": ["1.5"], "name": "Ring"}, True),
        ("1.5", {"versions": ["1.5"], "name": "bell"}, False),
    ],
)
def test_advisories_are_matched_as_osv_says(tmp_path, version, fields, hit):
    advisory(tmp_path, **fields)
    expected = [f"ring {version}: TEST-1 it rings"] if hit else []
    assert list(audit.vulnerable({"ring": version}, tmp_path)) == expected
