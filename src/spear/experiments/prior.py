"""Table 5: an optimisation attack as a prior for the paper's sampling; and the cascade without one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from spear.baselines import prior_from
from spear.experiments.common import Case, Experiment, Section, table
from spear.experiments.common.baselines import guess, rated
from spear.experiments.common.batches import attack, inverted, private_batch
from spear.experiments.common.experiment import Rows, Settings
from spear.experiments.common.figures import mean, median, metric, rate, seconds, verdicts, where
from spear.search import SamplingFinder
from spear.trials import Measured, compare

# By batch size and width, from the paper: PSNR of Geiping et al.; accuracy and PSNR with that prior.
PAPER = {(50, 400): ("26.5", "100", "124.5"), (100, 2000): ("32.8", "60", "81.5")}
ITERATIONS = {(50, 400): 2000, (100, 2000): 300}
NOTES = (
    f"Geiping et al. ran for {ITERATIONS[50, 400]:,} iterations (b = 100: {ITERATIONS[100, 2000]}), "
    "sampling with the prior for at most 5 minutes after that. Its time includes the "
    "prior's, its groups are the paper's (the 3 b most negative neurons of each guess).",
    "The last line of each size is our default finder, which needs no prior, no labels and no range.",
)


def cell(b: int, m: int, method: str, **budget: float) -> Settings:
    return {"data": "tiny_imagenet", "b": b, "m": m, "method": method, **budget}


def with_prior(b: int, m: int) -> Settings:
    budget = {"iterations": ITERATIONS[b, m], "total_variation": 1e-3, "max_seconds": 300}
    return cell(b, m, "prior", **budget)


def cascade(b: int, m: int) -> Settings:
    return cell(b, m, "cascade", max_seconds=300)


def measure(case: Case) -> Measured:
    batch = private_batch(case)
    if case["method"] == "cascade":
        return inverted(case, batch).measured()
    first = guess(case, batch, "geiping")
    view = batch.view()
    finder = SamplingFinder(prior=prior_from(view, first.result.inputs, project=False))
    then = attack(case, view, batch.model, finder)
    metrics = compare(batch, then).metrics | {"guess_psnr": rated(batch, first)["psnr"]}
    stages = {"guess": first.seconds, **then.stages}
    both = first.seconds + then.seconds
    return Measured(then.result.outcome.name, metrics, both, stages)


def draw(rows: Mapping[str, Rows]) -> Section:
    lines = []
    for (b, m), (guess_psnr, accuracy, psnr) in PAPER.items():
        size, own = [str(b), str(m)], where(rows["prior"], **with_prior(b, m))
        guesses = mean(metric(own, "guess_psnr"), len(own))
        line = ["Geiping et al.", *size, "–", "–", guess_psnr, guesses, "–"]
        lines.append([*line, seconds(own, "guess"), "–"])
        lines.append(_line("SPEAR + Geiping et al.", size, accuracy, psnr, own))
        alone = where(rows["prior"], **cascade(b, m))
        lines.append(_line("SPEAR, `cascade`", size, "–", "–", alone))
    columns = "Method, b, m, Acc (%) paper, Acc ours, PSNR paper, PSNR ours, Samples right ours"
    more = ["Time ours (CPU)", "Submatrices, median"]
    return Section(
        [table([*columns.split(", "), *more], lines)], notes=[*NOTES, verdicts(rows["prior"])]
    )


def _line(name: str, size: Sequence[str], accuracy: str, psnr: str, own: Rows) -> list[str]:
    quality = [psnr, mean(metric(own, "psnr"), len(own)), mean(metric(own, "recovered"), len(own))]
    return [name, *size, accuracy, rate(own), *quality, seconds(own), median(own, "submatrices")]


EXPERIMENT = Experiment(
    place="Table 5",
    title="Larger batches: Geiping et al. as a prior, TinyImageNet",
    batches=10,
    cells=[settings(*size) for size in PAPER for settings in (with_prior, cascade)],
    measure=measure,
    draw=draw,
)
