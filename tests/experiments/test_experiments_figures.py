"""The statistical figures: their grids and drawings, and the claims that their captions make."""

import json
import math
import statistics
from pathlib import Path

import pytest
import torch

from spear import theory
from spear.errors import InvalidOption
from spear.experiments.common import catalogue
from spear.experiments.common.figures import counts, per_point, quantile
from spear.experiments.common.searching import (
    LIMIT_SINGULAR,
    PlainFinder,
    Zeros,
    finder_of,
    searched,
)
from spear.experiments.failure_validation import (
    missed_by_looking,
    missed_by_rank,
    paper_fails,
    points,
)
from spear.factors import factorise
from spear.judge.selection import select
from spear.metrics import Rate
from spear.report import plots
from spear.search.directions import Directions
from spear.search.sampling import SamplingFinder
from spear.search.watch import Watch
from spear.trials import Status
from support.experiment_rows import case, row, trials
from support.planted import plant

pytest.importorskip("matplotlib", reason="needs the plots extra")

ROOT = Path(__file__).parents[2]
FIGURES = (
    *("failure", "failure_validation", "batch_size", "architecture", "two_stages", "training"),
    *("rounds", "rounds_rate", "rounds_aggregation", "rounds_fedavg", "rounds_noise"),
    "rounds_sampling",
)


def measured(trial):
    """Metrics as any of the figures has them."""
    b = trial.settings["b"]
    arms = {"exact": True, "match": 1.0, "recovered": b, "submatrices": 10**b}
    return {
        "exact": True,
        "matched": trial.seed == 0,
        "submatrices": 10 ** (b // 4),
        "zeros": [trial.settings["m"] // 2] * b,
        "silent": 0,
        "sparsity": 0.4,
        "expected": 10.0 ** (b // 4),
        "matrices": 200,
        "failures": 20,
        "looked_at": 10,
        "failures_looked_at": 1,
        "disagreements": 0,
        "recovered": b,
        "movement": 0.1,
        "epsilon": 8.0,
        "median_psnr": 25.0,
        "up_to_scale": 29.0,
        "reference": 30.0,
        **{f"{key}_{arm}": value for key, value in arms.items() for arm in ("both", "first")},
    }


def drawn(name, rows):
    """The drawing, with all its figures really drawn."""
    drawing = catalogue.load(name).draw({name: rows})
    with plots.style():
        for plot in drawing.plots:
            plot.figure().canvas.draw()
    return drawing


@pytest.mark.parametrize("name", FIGURES)
def test_figures_are_drawn_without_rows_and_from_failed_ones(name):
    assert drawn(name, []).plots
    assert drawn(name, [row(t, {}, Status.FAILED) for t in trials(name)]).plots


@pytest.mark.parametrize("name", FIGURES[1:])
def test_captions_say_how_many_batches_a_point_stands_for(name):
    drawing = drawn(name, [row(trial, measured(trial)) for trial in trials(name)])
    words = "400 matrices" if name == "failure_validation" else "2 batches a point"
    assert words in drawing.plots[0].caption


def test_searches_that_did_not_end_count_as_infinite():
    grid = trials("batch_size")[:2]
    rows = [row(grid[0], {"matched": True, "submatrices": 7}), row(grid[1], {}, Status.TIMED_OUT)]
    assert counts(rows) == [7.0, math.inf]
    assert quantile(counts(rows), 0.5) == 7.0
    assert per_point(rows * 2) == "2 batches a point"


def lemma_matrices(count, b, m, seed=0):
    generator = torch.Generator().manual_seed(seed)
    on = torch.rand(count, m, b, generator=generator) < 0.5
    return on * torch.randn(count, m, b, generator=generator, dtype=torch.float64).abs()


@pytest.mark.parametrize(("b", "m"), [(2, 3), (2, 9), (3, 8), (4, 9), (5, 12)])
def test_ranks_tell_what_looking_at_every_submatrix_tells(b, m):
    D = lemma_matrices(30, b, m, seed=b * m)
    D[0, :, 0] = 0  # a sample without a gradient
    D[1, D[1, :, 0] == 0, 1] = 0  # a column that is zero wherever another one is
    by_rank = missed_by_rank(D, 1e-9).tolist()
    generator = torch.Generator().manual_seed(0)
    assert by_rank == [missed_by_looking(d, 1e-9, generator) for d in D]
    assert by_rank[:2] == [True, True]


def test_failures_keep_to_the_bound_by_columns_and_not_to_the_papers():
    b, m = 4, 26
    D = lemma_matrices(6000, b, m)
    low, high = Rate(int(missed_by_rank(D, 1e-9).sum()), len(D)).interval(0.999)
    assert low > 2 * theory.failure_bound(b, m)
    assert low < theory.failure_bound_by_columns(b, m) < 2 * high


def test_what_fails_at_least_is_counted_too():
    b, m = 4, 16
    D = lemma_matrices(6000, b, m, seed=1)
    _, high = Rate(int(missed_by_rank(D, 1e-9).sum()), len(D)).interval(0.999)
    assert high / 2 < theory.failure_at_least(b, m) < high


def test_the_papers_bound_is_proved_wrong_in_its_own_figure():
    over = paper_fails()
    assert min(over) == (4, 20)
    assert over[4, 40] > 100
    assert all(theory.failure_bound(2, m) > theory.failure_at_least(2, m) for m in range(2, 41))
    assert len(over) < points()
    page = " ".join((ROOT / "docs" / "algorithm.md").read_text(encoding="utf-8").split())
    words = (
        f"at {len(over)} of the {points()} sizes of Figure 8, up to {max(over.values()):.0f} times"
    )
    assert words in page


def test_a_block_of_matrices_is_counted_both_ways():
    settings = {"source": "lemma", "b": 3, "m": 8, "matrices": 40, "look_at": 300}
    metrics = catalogue.load("failure_validation").measure(case(settings)).metrics
    assert metrics["matrices"] == 40
    assert metrics["looked_at"] == 300 // math.comb(8, 2)
    assert 0 < metrics["failures"] < 40
    assert metrics["disagreements"] == 0


def zeros_of(planted):
    with torch.no_grad():
        off = planted.model[0](planted.inputs) <= 0
    return Zeros(off.sum(1).tolist(), int(off.all(0).sum()), off.shape[1])


def ratios(name, seeds):
    """Counts over what is expected of independent and of overlapping submatrices."""
    independent, overlapping = [], []
    for seed in seeds:
        planted = plant(8, m=300, seed=seed)
        zeros = zeros_of(planted)
        finder = finder_of(name, zeros)
        _, (ended,) = searched(case({"max_seconds": None}, seed), planted.view, finder)
        assert ended.matched
        count = ended.counts["submatrices"]
        independent.append(count / zeros.expected(singular=LIMIT_SINGULAR))
        overlapping.append(count / zeros.expected(singular=LIMIT_SINGULAR, overlapping=True))
    return independent, overlapping


@pytest.mark.parametrize("name", ["independent", "overlapping"])
def test_counts_fall_on_the_expectation_that_is_theirs(name):
    """The mean of 20 counts lies within three standard errors, some 30 %; the other is off by more."""
    both = ratios(name, range(20))
    own, other = both if name == "independent" else both[::-1]
    error, error_of_other = (statistics.stdev(x) / math.sqrt(len(x)) for x in (own, other))
    assert error < 0.12
    assert abs(statistics.fmean(own) - 1) < 3 * error
    assert abs(statistics.fmean(other) - 1) > 3 * error_of_other


def test_steps_are_as_fine_as_asked_for():
    factors = factorise(plant(6, m=200).view)
    watch = Watch()
    finder = SamplingFinder(max_samples=7, adaptive=False, independent=True, at_once=3)
    list(finder.search(factors, generator=torch.Generator().manual_seed(0), watch=watch))
    assert watch.stats["submatrices"] == 7
    with pytest.raises(InvalidOption, match="at_once"):
        SamplingFinder(at_once=0)


def test_only_the_second_stage_throws_out_a_mix_that_looks_sparse():
    planted = plant(4, m=80)
    factors = factorise(planted.view)
    Q = torch.linalg.inv(
        planted.inputs.double() @ factors.combine(torch.diag(1 / factors.singular_values)).T
    )
    zeros = (planted.model[0](planted.inputs) <= 0).T[factors.live_rows]
    mix, everywhere = Q[:, :1] + Q[:, 1:2], torch.ones_like(zeros[:, :1])
    vectors = torch.cat([mix, Q], 1)
    pool = Directions(
        factors.outputs,
        vectors / vectors.norm(dim=0),
        torch.cat([everywhere, zeros], 1),
        torch.full((5,), 2),
    )
    assert select(factors, pool, Watch(), second_stage=False).match < 1
    assert select(factors, pool, Watch()).match == 1


def test_the_papers_filter_keeps_mixes_that_ours_sets_aside():
    generator = torch.Generator().manual_seed(0)
    alike = torch.randn(1, 50, generator=generator) + torch.randn(8, 50, generator=generator)
    planted = plant(8, m=120, inputs=alike)  # inputs that are not centred share their zeros
    sizes = {}
    for finder in (SamplingFinder, PlainFinder):
        search = finder(max_samples=4 * 10**4, adaptive=False, at_once=500)
        factors = factorise(planted.view)
        watch, own = Watch(), torch.Generator().manual_seed(1)
        pools = list(search.search(factors, generator=own, watch=watch))
        sizes[finder] = len(pools[-1])
    assert sizes[PlainFinder] > 2 * sizes[SamplingFinder]


@pytest.mark.parametrize("name", ["batch_size", "architecture", "two_stages", "training"])
def test_the_cheapest_trial_of_a_figure_runs_on_real_images(name, data_root):
    experiment = catalogue.load(name)
    cheap = {"b": 4, "max_samples": 10**5, "max_seconds": 60, "steps": 0}
    grid = [dict(trial.settings) for trial in trials(name)]
    settings = next(c for c in grid if c.get("finder", "overlapping") == "overlapping")
    settings = {key: cheap.get(key, value) for key, value in settings.items()}
    metrics = experiment.measure(case(settings, data=data_root)).metrics
    assert json.loads(json.dumps(metrics)) == metrics
    assert metrics.get("exact", metrics.get("exact_both")) is True
