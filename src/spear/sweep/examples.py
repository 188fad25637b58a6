"""Examples from a sweep to look at: updates from both ends of it, attacked again."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from spear.report import Finding, Report, load
from spear.sweep.leakage import Leakage, LeakageLevel, percent
from spear.sweep.plan import Sweep
from spear.sweep.report import setting_name
from spear.sweep.running import attacked_again
from spear.trials import Row

_EXAMPLES = "examples.json"
_PATIENCE = 10.0  # seconds that an example's attack should take at most


def pick_examples(sweep: Sweep, found: Sequence[Leakage]) -> list[Finding]:
    """Updates attacked again to show: what leaks most, what barely leaks, and what does not."""
    base = sweep.grid.base
    return [
        attacked_again(sweep, leakage, row.seed).finding(
            f"{setting_name(leakage, base)} (seed {row.seed})",
            [f"{why}; at this setting {percent(leakage.leaked)} leaked."],
        )
        for why, leakage, row in _extremes(found)
    ]


def _extremes(found: Sequence[Leakage]) -> list[tuple[str, Leakage, Row]]:
    exact = [a for a in found if a.verdict is LeakageLevel.EXACT]
    chosen: list[tuple[str, Leakage, Row]] = []
    for defended, why in (
        (False, "Without a defence: the largest batch that came back whole"),
        (True, "With a defence, yet whole all the same"),
    ):
        own = [a for a in exact if a.setting.defended is defended]
        if own:
            most = max(own, key=lambda a: (a.setting.total, defended and (a.usual_best or 0)))
            chosen.append((why, most, next(row for row in most.done if row.metrics["exact"])))
    faint = _quick(found, LeakageLevel.RECOGNISABLE, LeakageLevel.SINGLE)
    if faint:
        least = min(faint, key=lambda a: a.usual_best or 0)
        leaking = [r for r in least.done if r.metrics["recognised"] or r.metrics["certified"]]
        wanted = min(leaking, key=lambda row: row.metrics["best"] or 0)
        chosen.append(("The faintest leak", least, wanted))
    blurred = [a for a in _quick(found, LeakageLevel.BLURRED) if a.best is not None]
    if blurred:
        nearest = max(blurred, key=lambda a: a.best or 0)
        wanted = max(nearest.done, key=lambda row: row.metrics["best"] or -1e9)
        chosen.append(("Blurred: short of what counts as recognisable", nearest, wanted))
    quiet = [
        a for a in _quick(found, LeakageLevel.UNDECIDED, LeakageLevel.NOTHING) if a.best is not None
    ]
    if quiet:
        nearest = max(quiet, key=lambda a: a.best or 0)
        wanted = max(nearest.done, key=lambda row: row.metrics["best"] or -1e9)
        chosen.append(("Nothing recognisable: the closest that the attack came", nearest, wanted))
    return chosen


def _quick(found: Sequence[Leakage], *levels: LeakageLevel) -> list[Leakage]:
    """Settings of these levels that can be attacked again quickly; all of them if none can."""
    candidates = [a for a in found if a.verdict in levels]
    return [a for a in candidates if (a.seconds or 0.0) < _PATIENCE] or candidates


def keep_examples(out: Path, findings: Sequence[Finding]) -> None:
    """Save the examples beside the rows, for `--only-draw`."""
    Report.new("audit", "examples", "", findings).save(out / _EXAMPLES)


def forget_examples(out: Path) -> bool:
    """Remove the examples of an earlier run, which are clients' data. True if there were any."""
    there = (out / _EXAMPLES).is_file()
    (out / _EXAMPLES).unlink(missing_ok=True)
    return there


def kept_examples(out: Path) -> tuple[Finding, ...]:
    """The examples that an earlier run kept, if any."""
    path = out / _EXAMPLES
    return load(path).findings if path.exists() else ()
