"""The commit that made a row, read without a trace."""

import os
import subprocess
from pathlib import Path

import pytest

from spear.files import provenance

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="this is not a checkout")
def test_asking_for_the_commit_leaves_the_index_alone():
    """Git refreshes a stale index, and a process killed meanwhile leaves its lock behind."""

    def git(*words):
        told = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True)
        return told.stdout.strip()

    index = ROOT / git("rev-parse", "--git-path", "index")
    os.utime(ROOT / "README.md")
    before = index.stat().st_mtime_ns
    assert provenance.commit.__wrapped__().rstrip("+") == git("rev-parse", "--short=7", "HEAD")
    assert index.stat().st_mtime_ns == before
