"""Kill runs that write results, again and again, and count what was lost.

    python tools/faults --kills 200              # forked runs: seconds
    python tools/faults --kills 20 --kinds local ray audit disk together

Each run is killed, or its disk filled, until it has come to its end; then all rows and pictures are
compared, in everything but times and origin, with those of a run that nobody disturbed.

- points: SIGKILL before and after every system call that writes, in the middle of every write
- full:   the disk is full at every such write, and has room again afterwards
- inline, report: SIGKILL, SIGINT or SIGTERM after a random delay
- local, ray, audit: processes with workers, killed after a random delay by SIGKILL, SIGTERM, SIGHUP,
  Ctrl-C, or an impatient Ctrl-C (twice, to all of them)
- disk:   a real file system of 256 kB that is full (Linux, as root)
- together: two runs start on the same folder, and two experiments share its pictures

Prints one line a kind, exit code 1 if anything was lost, differs, or was left behind.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from random import Random

import forked
import processes
from count import Count

KINDS: dict[str, Callable[[Path, int, Random], Count]] = {
    "points": forked.points,
    "full": forked.full,
    "inline": forked.inline,
    "report": forked.report,
    "local": processes.local,
    "ray": processes.ray,
    "audit": processes.audit,
    "disk": processes.disk,
    "together": processes.together,
}
FORKED = ("points", "full", "inline", "report")


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--kills", type=int, default=40, help="of each kind, about")
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--kinds", nargs="+", choices=KINDS, default=FORKED)
    given = options.parse_args()
    titles = [field.name.replace("_", " ") for field in dataclasses.fields(Count)]
    print("| " + " | ".join(["kind", *titles]) + " |")
    print("|---" * (len(titles) + 1) + "|", flush=True)
    bad = False
    for kind in given.kinds:
        with tempfile.TemporaryDirectory() as folder:
            count = KINDS[kind](Path(folder), given.kills, Random(f"{given.seed} {kind}"))
        print("| " + " | ".join([kind, *map(str, dataclasses.astuple(count))]) + " |", flush=True)
        bad = bad or count.bad
    return int(bad)


if __name__ == "__main__":
    sys.exit(main())
