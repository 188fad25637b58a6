"""Are verdicts ever wrong? Inversions of every kind of update, honest or not, beside the truth.

    SPEAR_DATA=... python benchmarks/verdicts.py --seeds 70 --rows benchmarks/rows/verdicts.jsonl
    python benchmarks/verdicts.py --table --rows benchmarks/rows/verdicts.jsonl

Every case is inverted twice, with the model and from the layer alone; each inversion is a row, and
rows that are there are not run again. One thread a worker. `--seeds 5 --from 1000` draws other cases.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

import spear
from spear.trials import LocalEngine, Measured, Row, RowFile, Status, Trial
from verdict_cases import FAMILIES, Case, case

LIMIT = 1e-3  # 60 dB: the error of a right sample, of the data's range
MAX_SECONDS = 6.0
FORGED = ("adversarial", "layer")


def work(trial: Trial, report) -> Measured:
    """One inversion, and what of it is true."""
    drawn = case(trial.settings["family"], trial.seed)
    model = drawn.model if trial.settings["with"] == "model" else None
    result = spear.invert(drawn.view, model=model, loss=drawn.loss, max_seconds=MAX_SECONDS)
    found = {
        "settings": drawn.settings,
        "proof": result.proof.name,
        "batch_size": result.batch_size,
        "returned": len(result.inputs),
        "certified": int(result.certified.sum()),
        "lambda": result.match,
        **judged(result, drawn, model is not None),
    }
    if found["wrong_exact"] or found["certified_wrong"] or found["refused"]:
        found["reason"] = result.reason
    return Measured(result.outcome.name, found, result.stats.get("search", 0.0))


def judged(result: spear.Inversion, drawn: Case, with_model: bool) -> dict:
    """Whether the verdict is wrong: against the truth, where there is one."""
    exact = result.outcome is spear.Outcome.EXACT
    certified = result.certified.cpu()
    if drawn.truth is None:
        return {
            "wrong_exact": exact,
            "certified_wrong": int(certified.sum()),
            "right": 0,
            "recovered": False,
            "refused": False,
            "uncalled": False,
        }
    off = errors(drawn.pixels(result.inputs), drawn.pixels(drawn.truth)) / drawn.span
    right = (off <= LIMIT).any(1)  # (k,): which of the returned are true
    known = (off <= LIMIT).any(0)  # (b,): which of the true are returned
    proved = exact and not drawn.honest and result.proof is spear.Proof.REPLAY
    recovered = bool(known.all()) and bool(right.all())
    # Several local steps are proved by repeating them: without the model nobody can.
    several = drawn.view.training is not None and not drawn.view.training.one_step
    provable = drawn.provable and not (several and not with_model)
    wrong = int((certified & ~right).sum())
    if not drawn.honest and result.proof is spear.Proof.REPLAY:
        wrong = int(certified.sum())  # nothing that the model gives: no replay may confirm it
    nearest = off.min(1).values if off.numel() else torch.zeros(len(result.inputs))
    predicted = result.predicted_error
    return {
        "wrong_exact": (exact and not recovered) or proved,
        "certified_wrong": wrong,
        "right": int(right.sum()),
        "recovered": recovered and provable,
        "refused": recovered and provable and not exact,
        "uncalled": recovered and drawn.honest and not provable and not exact,
        "worst": _rounded(float(nearest.max())) if len(nearest) else None,
        "worst_certified": _rounded(float(nearest[certified].max())) if certified.any() else None,
        "predicted": None if predicted is None else _rounded(float(predicted.max())),
    }


def errors(found: Tensor, truth: Tensor) -> Tensor:
    """Root mean square of every difference (k, b), an entry."""
    rows = [(truth.detach() - row).square().mean(1).sqrt() for row in found.detach().cpu()]
    return torch.stack(rows) if rows else truth.new_zeros(0, len(truth))


def _rounded(value: float) -> float | None:
    return float(f"{value:.2e}") if math.isfinite(value) else None


def trials(families: Iterable[str], seeds: range) -> list[Trial]:
    return [
        Trial("verdicts", {"family": family, "with": with_, "max_seconds": MAX_SECONDS}, seed)
        for seed in seeds
        for family in families
        for with_ in ("model", "layer")
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


def table(rows: list[Row]) -> str:
    """Markdown: a line a family."""
    lines = [
        "| family | inversions | EXACT | PARTIAL | APPROXIMATE | FAILED | wrong EXACT | certified "
        "| of them wrong | clean recoveries | refused | right, not called exact |",
        "|---|" + "---:|" * 11,
    ]
    # Who forges an update so that every condition of the layer holds, deceives the layer: only a
    # replay is asked to notice. How often the layer alone did not is the last line.
    forged = [r for r in rows if (r.settings["family"], r.settings["with"]) == FORGED]
    asked = [r for r in rows if r not in forged]
    groups = {name: [r for r in asked if r.settings["family"] == name] for name in FAMILIES}
    last = ("adversarial, without the model", forged)
    for name, group in [*groups.items(), ("all", asked), last]:
        if not group:
            continue
        outcomes = [r.outcome for r in group]
        counts = [outcomes.count(o) for o in ("EXACT", "PARTIAL", "APPROXIMATE", "FAILED")]
        sums = [
            sum(int(r.metrics[k]) for r in group)
            for k in (
                "wrong_exact",
                "certified",
                "certified_wrong",
                "recovered",
                "refused",
                "uncalled",
            )
        ]
        cells = [len(group), *counts, *sums]
        lines.append(f"| {name} | " + " | ".join(f"{c:,}" for c in cells) + " |")
    return "\n".join(lines)


def refusals(rows: list[Row]) -> str:
    """In words: how many right recoveries of clean updates the certificate refuses."""
    clean = [r.metrics for r in rows if r.metrics["recovered"]]
    refused = [found for found in clean if found["refused"]]
    margin = [found for found in clean if found["worst"] <= LIMIT / 10**0.5]  # 70 dB
    lost = sum(found["returned"] - found["certified"] for found in refused)
    samples = sum(found["returned"] for found in clean)
    return (
        f"Of {len(clean):,} clean updates that came back to 60 dB, {len(refused)} are not called exact "
        f"({len(refused) / max(1, len(clean)):.2%}); of the {len(margin):,} that came back to 70 dB, "
        f"{sum(found['refused'] for found in margin)}. Of {samples:,} samples in them {lost} are not "
        f"certified ({lost / max(1, samples):.2%})."
    )


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
        wanted = trials(options.families, range(options.first, options.first + options.seeds))
        run(file, wanted, options.workers)
    kept = list(file.rows().values())
    broken = [row for row in kept if row.status is not Status.DONE]
    for row in broken:
        print("no result:", row.settings, row.seed, row.error)
    done = [row for row in kept if row.status is Status.DONE]
    print(table(done))
    print(f"\n{refusals(done)}")


if __name__ == "__main__":
    main()
