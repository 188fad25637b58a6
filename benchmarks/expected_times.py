"""Writes the times that `spear reproduce --list` shows: python benchmarks/expected_times.py results"""

import sys
from pathlib import Path

from spear.experiments.common import times

if __name__ == "__main__":
    times.FILE.write_text(times.text(times.measured(Path(sys.argv[1]))), encoding="utf-8")
