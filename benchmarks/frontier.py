"""The frontier of the default engine: exact rate, time, memory and PSNR, row by row.

    SPEAR_DATA=... python benchmarks/frontier.py --batches 20 --compare 3

The same as `spear bench`; see its --help. Every row says how many threads it had (--threads).
"""

from __future__ import annotations

import sys

from spear.cli.app import app

if __name__ == "__main__":
    app(["bench", *sys.argv[1:]])
