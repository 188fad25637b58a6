"""Branch coverage of the core, module by module; fails below 95 % of its branches.

    python tools/core_coverage.py             # runs the core's tests with coverage, two at a time
    python tools/core_coverage.py --report    # only tells of the last run, or of `pytest --cov`

Needs pytest-cov. Tests that start Flower, Ray, a browser or the command line are left out: they take
minutes, and reach nothing of the core that the others do not.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LEAST = 95.0  # per cent of the branches
CORE = (
    "errors.py",
    "theory.py",
    "tolerances.py",
    "update",
    "factors",
    "search",
    "judge",
    "inversion.py",
)
TESTS = (
    *(
        "test_errors.py",
        "test_theory.py",
        "test_inversion.py",
        "update",
        "factors",
        "search",
        "judge",
    ),
    *("federated", "verdicts"),
)
_SLOW = "not needs_little_extra_memory"  # a gigabyte, to measure memory


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--report", action="store_true", help="do not run the tests")
    if not parser.parse_args().report:
        run()
    sys.exit(0 if show() >= LEAST else 1)


def run() -> None:
    files = [f"tests/{name}" for name in TESTS]
    files += [f"src/spear/{name}" for name in CORE]  # their examples
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-n",
        "2",
        "--cov",
        "--cov-report=",
        "-k",
        _SLOW,
    ]
    subprocess.run([*command, *files], cwd=ROOT, check=True)


def show() -> float:
    """Print a row a module; the share of branches taken, in per cent."""
    command = [sys.executable, "-m", "coverage", "json", "-q", "-o", "-"]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    files = json.loads(done.stdout)["files"]
    print(f"{'module':28} {'lines':>7} {'branches':>9}  not taken")
    taken = total = 0
    for path in sorted(files):
        name, seen = str(Path(path).relative_to("src/spear")), files[path]
        figures = seen["summary"]
        taken += figures["covered_branches"]
        total += figures["num_branches"]
        missing = " ".join(f"{a}->{'exit' if b < 0 else b}" for a, b in seen["missing_branches"])
        lines = share(figures["covered_lines"], figures["num_statements"])
        branches = share(figures["covered_branches"], figures["num_branches"])
        print(f"{name:28} {lines:6.1f}% {branches:8.1f}%  {missing}")
    print(f"{'the core':28} {'':7} {share(taken, total):8.1f}%  {taken} of {total} branches")
    return share(taken, total)


def share(part: int, whole: int) -> float:
    return 100.0 * part / whole if whole else 100.0


if __name__ == "__main__":
    main()
