"""Are verdicts ever wrong? Inversions of every kind of update, honest or not, beside the truth.

    SPEAR_DATA=... python benchmarks/verdicts.py --seeds 70 --rows benchmarks/rows/verdicts.jsonl
    python benchmarks/verdicts.py --table --rows benchmarks/rows/verdicts.jsonl

Every case is inverted twice, as it was observed and from the layer alone; each inversion is a row,
and rows that are there are not run again. One thread a worker. `--seeds 5 --from 1000` draws others.
"""

from __future__ import annotations

import argparse
import math
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import spear
from spear.trials import LocalEngine, Measured, Row, RowFile, Status, Trial
from verdict_cases import FAMILIES, Case, Rival, case, rivals

LIMIT = 1e-3  # 60 dB: the error of a right sample, of the data's range
CLOSE = 1e-4  # 80 dB: right beyond doubt
MAX_SECONDS = 6.0
DOORS = ("observed", "bare")
OUTCOMES = ("EXACT", "PARTIAL", "APPROXIMATE", "FAILED", "INCONCLUSIVE")


def inverted(drawn: Case, door: str, **options: Any) -> spear.Inversion:
    """The case through one of the doors; the network is the view's own."""
    view = drawn.view if door == "observed" else drawn.bare
    return spear.invert(view, loss=drawn.loss if door == "observed" else None, **options)


def work(trial: Trial, report) -> Measured:
    """One inversion, and what of it is true."""
    drawn = case(trial.settings["family"], trial.seed)
    door = trial.settings["door"]
    result = inverted(drawn, door, max_seconds=MAX_SECONDS)
    found = {"settings": drawn.settings, **judged(result, drawn, door)}
    if found["wrong_exact"] or found["certified_wrong"] or found["right_80"]:
        found["reason"] = result.reason if found["outcome"] != "EXACT" else ""
    return Measured(result.outcome.name, found, result.stats.get("search", 0.0))


def judged(result: spear.Inversion, drawn: Case, door: str) -> dict[str, Any]:
    """Whether the verdict is wrong: against the truth, where there is one."""
    exact = result.outcome is spear.Outcome.EXACT
    certified = result.certified.cpu()
    found: dict[str, Any] = {
        "outcome": result.outcome.name,
        "cause": result.cause.value,
        "proof": result.proof.name,
        "assumptions": len(result.assumptions),
        "batch_size": result.batch_size,
        "returned": len(result.inputs),
        "certified": int(certified.sum()),
        "lambda": result.match,
        "wrong_exact": exact,
        "certified_wrong": int(certified.sum()),
        "invisible_exact": False,
        "invisible_certified": 0,
        "right_80": False,
        "unproved": False,
        "worst": None,
        "worst_certified": None,
        "noise": drawn.error_label,
        "calibration": None,
    }
    if drawn.truth is None or not len(result.inputs):
        return found
    visible = drawn.expected_visible
    inputs = result.inputs.detach().cpu()
    off = errors(drawn.pixels(inputs), drawn.pixels(drawn.truth)) / drawn.span
    known = (off <= LIMIT).any(0)  # (b,): which of the true are returned
    right = (off <= LIMIT).any(1) & ~merged(drawn, inputs, off, known)  # (k,): who is true
    wrong = certified & ~right
    if not drawn.honest and result.proof is spear.Proof.REPLAY:
        wrong = certified  # nothing that the model gives: no replay may confirm it
    missing = visible & ~known
    bad = bool(missing.any()) or not bool(right.all())
    wrong_exact = exact and (bad or drawn.never_exact or bool(wrong.any()))
    hidden, rows_below_noise = torch.zeros_like(right), False
    if door == "bare" and (wrong_exact or bool(wrong.any())):
        others = rivals(drawn)
        hidden = invisible(drawn, inputs, others)
        explained = {i for rival in others for i in rival.samples}
        rows_below_noise = bool((right | hidden).all()) and not drawn.never_exact
        rows_below_noise = rows_below_noise and all(
            i in explained for i in missing.nonzero().flatten().tolist()
        )
    close = (off <= CLOSE).any(0)[visible].all() and bool((off <= LIMIT).any(1).all())
    right_80 = bool(close) and bool(visible.any()) and not missing.any()
    nearest = off.min(1).values
    found.update(
        wrong_exact=wrong_exact and not rows_below_noise,
        certified_wrong=int((wrong & ~hidden).sum()),
        invisible_exact=wrong_exact and rows_below_noise,
        invisible_certified=int((wrong & hidden).sum()),
        right_80=bool(right_80),
        unproved=bool(right_80) and not exact and not drawn.never_exact,
        worst=_decibel(float(nearest.max())),
        worst_certified=_decibel(float(nearest[certified].max())) if certified.any() else None,
        calibration=calibration(result, drawn),
    )
    return found


def errors(found: Tensor, truth: Tensor) -> Tensor:
    """Root mean square of every difference (k, b), an entry."""
    rows = [(truth.detach() - row).square().mean(1).sqrt() for row in found.detach().cpu()]
    return torch.stack(rows) if rows else truth.new_zeros(0, len(truth))


def merged(drawn: Case, inputs: Tensor, off: Tensor, known: Tensor) -> Tensor:
    """(k,): which of the returned lie between their sample and another that nothing returned is."""
    assert drawn.truth is not None
    truth, found = drawn.truth.double(), inputs.double()
    between = torch.zeros(len(found), dtype=torch.bool)
    for j in range(len(found)):
        own = int(off[j].argmin())
        lost = (drawn.expected_visible & ~known).nonzero().flatten()
        if off[j, own] > LIMIT or not len(lost):
            continue
        ways = truth[lost] - truth[own]  # (l, n)
        along = (ways * (found[j] - truth[own])).sum(1) / ways.square().sum(1).clamp_min(1e-300)
        between[j] = bool((along > 0.05).any())
    return between


def invisible(drawn: Case, inputs: Tensor, others: list[Rival]) -> Tensor:
    """(k,): which of the returned the layer cannot tell from the truth."""
    if not others:
        return torch.zeros(len(inputs), dtype=torch.bool)
    rows = drawn.pixels(torch.stack([rival.x for rival in others]).to(inputs.dtype))
    return (errors(drawn.pixels(inputs), rows) / drawn.span <= LIMIT).any(1)


def calibration(result: spear.Inversion, drawn: Case) -> dict[str, float] | None:
    """Errors over predicted ones, of the samples that are clearly one of the true."""
    assert drawn.truth is not None
    alone = len(result.inputs) >= int(drawn.expected_visible.sum())  # none is two in one
    if result.predicted_error is None or not alone:
        return None
    inputs, truth = result.inputs.detach().cpu().double(), drawn.truth.double()
    off, apart = errors(inputs, truth), errors(truth, truth)
    apart.fill_diagonal_(math.inf)
    ratios, over, entries = [], [0, 0], 0
    for j, predicted in enumerate(result.predicted_error.cpu().double().tolist()):
        own = int(off[j].argmin())
        clear = off[j, own] < 0.25 * apart[own].min() and off[j, own] < 0.3 * truth[own].std()
        if not clear or not 0 < predicted < math.inf:
            continue
        share = (inputs[j] - truth[own]).abs() / predicted
        ratios.append(float(off[j, own]) / predicted)
        over = [over[0] + int((share > 2).sum()), over[1] + int((share > 3).sum())]
        entries += len(share)
    if not ratios:
        return None
    return {
        "samples": len(ratios),
        "median": float(f"{torch.tensor(ratios).median():.3g}"),
        "over_2": float(f"{over[0] / entries:.2e}"),
        "over_3": float(f"{over[1] / entries:.2e}"),
    }


def _decibel(error: float) -> float | None:
    """Peak signal-to-noise ratio of an error relative to the data's range."""
    if not math.isfinite(error):
        return None
    return round(min(300.0, -20 * math.log10(max(error, 1e-15))), 1)


def trials(families: Iterable[str], seeds: range) -> list[Trial]:
    return [
        Trial("verdicts", {"family": family, "door": door, "max_seconds": MAX_SECONDS}, seed)
        for seed in seeds
        for family in families
        for door in DOORS
    ]


def run(file: RowFile, wanted: list[Trial], workers: int) -> None:
    """What is missing of the trials, each row written as it comes; wrong verdicts are told at once."""
    with file.writing():
        there = file.rows()
        missing = [trial for trial in wanted if trial.key not in there]
        for row, _ in LocalEngine(workers).run(missing, work, lambda step: None):
            file.append(row, {})
            if row.status is not Status.DONE:
                print("no result:", row.settings, row.seed, row.error, flush=True)
            elif row.metrics["wrong_exact"] or row.metrics["certified_wrong"]:
                print("WRONG:", row.outcome, row.settings, row.seed, row.metrics, flush=True)


HEAD = (
    "family",
    "inversions",
    *OUTCOMES,
    "wrong EXACT",
    "certified",
    "of them wrong",
    "right to 80 dB",
    "of these FAILED",
    "of these not EXACT",
    "why, mostly",
)


def table(rows: list[Row]) -> str:
    """Markdown: a line a family."""
    lines = [f"| {' | '.join(HEAD)} |", "|---|" + "---:|" * (len(HEAD) - 2) + "---|"]
    groups = {name: [r for r in rows if r.settings["family"] == name] for name in FAMILIES}
    doors = {door: [r for r in rows if r.settings["door"] == door] for door in DOORS}
    for name, group in [*groups.items(), *doors.items(), ("all", rows)]:
        if not group:
            continue
        counts = Counter(r.outcome for r in group)
        found = [r.metrics for r in group]
        right = [one for one in found if one["right_80"]]
        unproved = [one for one in found if one["unproved"]]
        causes = Counter(one["cause"] for one in unproved).most_common(2)
        cells = [
            len(group),
            *(counts[outcome] for outcome in OUTCOMES),
            sum(one["wrong_exact"] for one in found),
            sum(one["certified"] for one in found),
            sum(one["certified_wrong"] for one in found),
            len(right),
            sum(one["outcome"] == "FAILED" for one in right),
            len(unproved),
        ]
        why = ", ".join(f"{cause} {count}" for cause, count in causes)
        lines.append(f"| {name} | " + " | ".join(f"{c:,}" for c in cells) + f" | {why} |")
    return "\n".join(lines)


def unseen(rows: list[Row]) -> str:
    """In words: how often a layer alone was deceived by what no layer alone can see."""
    bare = [r for r in rows if r.settings["door"] == "bare"]
    hit = [r for r in bare if r.metrics["invisible_exact"] or r.metrics["invisible_certified"]]
    families = Counter(r.settings["family"] for r in hit).most_common()
    told = ", ".join(f"{name} {count}" for name, count in families)
    named = f" ({len(hit)} inversions with one or the other: {told})" if families else ""
    return (
        f"Besides, of {len(bare):,} bare layers, {sum(r.metrics['invisible_exact'] for r in bare)} are "
        f"called EXACT wrongly and {sum(r.metrics['invisible_certified'] for r in bare)} samples are "
        f"certified wrongly where the layer's gradients are, to rounding, those of other inputs{named}."
    )


def calibrations(rows: list[Row]) -> str:
    """Markdown: errors over predicted ones, a line a kind of noise."""
    lines = [
        "| noise | inversions | samples | median of error / predicted | 10 to 90 % of inversions "
        "| entries beyond 2 | beyond 3 |",
        "|---|" + "---:|" * 6,
    ]
    groups: dict[str, list[dict[str, float]]] = {}
    for row in rows:
        if row.metrics["calibration"]:
            groups.setdefault(row.metrics["noise"], []).append(row.metrics["calibration"])
    for name in sorted(groups):
        group = groups[name]
        medians = sorted(one["median"] for one in group)
        samples = sum(one["samples"] for one in group)
        over = [
            sum(one[k] * one["samples"] for one in group) / samples for k in ("over_2", "over_3")
        ]
        low, mid, high = (medians[int(q * (len(medians) - 1))] for q in (0.1, 0.5, 0.9))
        lines.append(
            f"| {name} | {len(group):,} | {samples:,.0f} | {mid:.2f} | {low:.2f} to {high:.2f} "
            f"| {over[0]:.1%} | {over[1]:.2%} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--families", nargs="*", choices=list(FAMILIES), default=list(FAMILIES))
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--from", type=int, default=0, dest="first")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--rows", type=Path, default=Path("verdicts.jsonl"))
    parser.add_argument("--table", action="store_true", help="draw the table from the rows alone")
    options = parser.parse_args()
    file = RowFile(options.rows.parent, options.rows.stem)
    if not options.table:
        seeds = range(options.first, options.first + options.seeds)
        run(file, trials(options.families, seeds), options.workers)
    kept = list(file.rows().values())
    broken = [row for row in kept if row.status is not Status.DONE]
    for row in broken:
        print("no result:", row.settings, row.seed, row.error)
    done = [row for row in kept if row.status is Status.DONE]
    print(table(done), unseen(done), calibrations(done), sep="\n\n")
    if broken:
        print(f"\n{len(broken)} without a result.")


if __name__ == "__main__":
    main()
