"""The command `spear` as its user meets it: in this process, in one of its own, or without torch."""

from __future__ import annotations

import contextlib
import io
import json
import subprocess
import sys
import traceback
from pathlib import Path
from unittest import mock

import spear.__main__

HEAVY = {"torch", "numpy", "scipy", "matplotlib", "skimage"}  # what takes long to import


def in_a_process(*arguments, **options) -> subprocess.CompletedProcess[str]:
    """`spear ...` in a fresh process."""
    command = [sys.executable, "-m", "spear", *map(str, arguments)]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=300, check=False, **options
    )


def without_torch(*command_lines, **options) -> list[list]:
    """Exit code, output and complaints of each, in one process where importing torch is an error."""
    words = json.dumps([[str(word) for word in line] for line in command_lines])
    told = subprocess.check_output([sys.executable, __file__, words], text=True, **options)
    return json.loads(told)


def in_this_process(*arguments, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """The same from the same entry point: its exit code, what it prints, a traceback if it raises."""
    words = ["spear", *map(str, arguments)]
    out, complaints = io.StringIO(), io.StringIO()
    with (
        mock.patch.object(sys, "argv", words),
        mock.patch.object(sys, "path", [*sys.path]),  # commands put the user's folder in front
        contextlib.chdir(cwd or Path.cwd()),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(complaints),
    ):
        code = _exit_code()
    return subprocess.CompletedProcess(words, code, out.getvalue(), complaints.getvalue())


def _exit_code() -> int:
    """What the interpreter would make of how the command ends."""
    try:
        spear.__main__.main()
    except SystemExit as end:
        if isinstance(end.code, str):
            sys.stderr.write(f"{end.code}\n")
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except Exception:
        traceback.print_exc()
        return 1
    return 0


class _Refusal:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name in HEAVY:
            raise AssertionError(f"{name} was imported")


if __name__ == "__main__":
    sys.meta_path.insert(0, _Refusal)
    told = [in_this_process(*words) for words in json.loads(sys.argv[1])]
    assert not HEAVY & set(sys.modules)
    json.dump([(one.returncode, one.stdout, one.stderr) for one in told], sys.stdout)
