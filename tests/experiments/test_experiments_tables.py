"""The paper's tables: what is run for them, how they are drawn, and whether its figures are its own."""

import json
import re
import sys
from dataclasses import replace

import pytest
import torch

from spear.experiments import dpsgd, features
from spear.experiments.common import catalogue
from spear.experiments.common.batches import images, private_batch
from spear.experiments.common.drawing import latex, markdown
from spear.federated import clipping_factors
from spear.trials import Status, Trial
from support.experiment_rows import case, row, trials

LABELS = {  # in the paper's source, with the number of lines below the heading
    "prior_work": ("tab:comparison", 4),
    "tabular": ("tab:tabular", 2),
    "main": ("tab:main_results", 5),
    "layers": ("tab:layers", 5),
    "prior": ("table:comb", 4),
    "features": ("table:cocktail", 3),
    "error_bars": ("tab:main_results_error", 5),
    "one_label": ("tab:same_label", 1),
    "dpsgd": ("tab:dp", 26),
    "fedavg_epochs": ("tab:fedavg_epoch", 6),
    "fedavg_rates": ("tab:fedavg_lr", 3),
}
TABLES = list(LABELS)
SLOW = {"main": (300, 60), "prior_work": (40, 42), "dpsgd": (2500, 10)}
METRICS = {
    "exact": True,
    "false_exact": False,
    "certified_wrong": 0,
    "recovered": 20,
    "missing": 0,
    "proved": True,
    "within_3": True,
    "within_6": True,
    "lpips": 3e-14,
    "first_lpips": 0.6,
    "first_psnr": 14.0,
    "worst_lpips": 0.7,
    "worst_psnr": 12.0,
    "ssim": 1.0,
    "mse": 2e-16,
    "mae": 1e-8,
    "discrete": 1.0,
    "continuous": 7e-4,
    "below": 0.3,
    "cosine": 0.9999,
    "submatrices": 13_800,
}


def sources(name):
    """The trials of an experiment and of those it draws from."""
    return {source: trials(source) for source in catalogue.with_sources((name,))}


def recorded(trial, status=Status.DONE):
    quality = 100.0 + 10 * trial.seed
    metrics = {**METRICS, "psnr": quality, "guess_psnr": quality}
    stages = {"guess": 1.0} if status is Status.DONE else {}
    return row(trial, metrics, status, stages=stages)


def drawn(name, change=lambda rows: rows):
    """The drawing of two recorded batches a cell."""
    rows = {source: [recorded(t) for t in wanted] for source, wanted in sources(name).items()}
    return catalogue.load(name).draw({source: change(part) for source, part in rows.items()})


def text(drawing):
    return "\n".join([*map(markdown, drawing.tables), *drawing.notes])


@pytest.mark.parametrize("name", TABLES)
def test_its_file_says_which_table_it_is(name):
    place = catalogue.load(name).place
    assert sys.modules[f"spear.experiments.{name}"].__doc__.startswith(f"{place}: ")


@pytest.mark.parametrize("name", catalogue.names())
def test_trials_are_distinct_and_survive_json(name):
    wanted = trials(name, main=[], full_batch=[], fedavg_epochs=[])
    assert len({trial.key for trial in wanted}) == len(wanted)
    for trial in wanted:
        assert json.loads(json.dumps(trial.settings)) == trial.settings
        assert trial.experiment == name
        bounded = {"max_seconds", "iterations", "matching", "matrices"} & set(trial.settings)
        assert bounded, "nothing bounds the time of this trial"


@pytest.mark.parametrize("name", SLOW)
def test_slow_cells_get_fewer_batches(name):
    few, slow = SLOW[name]
    assert len(trials(name, catalogue.load(name).batches)) == few + slow
    assert {trial.seed for trial in trials(name, 1, 7)} == {7}


@pytest.mark.parametrize("name", TABLES)
def test_nothing_run_is_said_and_not_shown_as_numbers(name):
    drawing = catalogue.load(name).draw({source: [] for source in sources(name)})
    assert "not run" in text(drawing)
    for table in drawing.tables:
        columns = [i for i, column in enumerate(table.columns) if re.search("ours|CPU", column)]
        lines = [line for line in table.rows if "paper" not in line[0]]
        shown = {line[i].removesuffix(" (CPU)") for line in lines for i in columns}
        assert shown <= {"not run", "–"}


@pytest.mark.parametrize("name", TABLES)
def test_failed_trials_count_against_us(name):
    def failed(rows, seeds):
        wanted = (Trial(r.experiment, r.settings, r.seed) for r in rows)
        return [recorded(t, Status.FAILED if t.seed in seeds else Status.DONE) for t in wanted]

    once, twice = (text(drawn(name, lambda rows, of=of: failed(rows, of))) for of in ({1}, {0, 1}))
    assert "(1 of 2 without)" in once
    assert "without)" not in twice  # no means at all
    if name != "features":  # it shows no rates
        assert "50 % (1.3–98.7) of 2" in once
        assert "0 % (0.0–84.2) of 2" in twice


@pytest.mark.parametrize("name", TABLES)
def test_recorded_rows_become_means_with_intervals(name):
    content = text(drawn(name))
    wanted = {"tabular": "100.00 ± 0", "layers": "1.0 × 10⁻⁸ ± 0", "features": "0.9999 ± 0"}
    assert wanted.get(name, "105.0 ± 63.5") in content
    assert "2.00 s" in content
    if name == "error_bars":
        assert "105.0 ± 13.9" in content  # 1.96 standard deviations


@pytest.mark.parametrize("name", sorted(set(TABLES) - {"error_bars"}))
def test_a_false_verdict_would_show(name):
    clean = text(drawn(name))
    assert "0 false EXACT, 0 certified wrong" in clean

    def lie(rows):
        first = rows[0]
        return [replace(first, metrics={**first.metrics, "false_exact": True}), *rows[1:]]

    assert "0 false EXACT" not in text(drawn(name, lie))


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("batches", [0, 2])
def test_tables_are_well_formed(name, batches):
    drawing = drawn(name, lambda rows: rows if batches else [])
    assert drawing.tables
    for table in drawing.tables:
        lines = [line for line in markdown(table).splitlines() if line.startswith("|")]
        assert len(lines) == len(table.rows) + 2
        assert {line.count("|") for line in lines} == {len(table.columns) + 1}
        check_latex(table)


def check_latex(table):
    written = latex(table)
    assert written.isascii(), sorted({c for c in written if not c.isascii()})
    assert not re.search(r"(?<!\\)[%#]", written)
    assert not re.search(r"(?<!\\)_", written)
    assert written.count("{") == written.count("}")
    assert len(re.findall(r"(?<!\\)\$", written)) % 2 == 0
    body = [line for line in written.splitlines() if line.endswith(r" \\")]
    assert len(body) == len(table.rows) + 1
    assert {len(re.findall(r"(?<!\\)&", line)) for line in body} == {len(table.columns) - 1}
    assert f"@{{}}l{'r' * (len(table.columns) - 1)}@{{}}" in written


@pytest.fixture(scope="module")
def paper(data_root):
    source = data_root.parent / "paper" / "spear.tex"
    if not source.is_file():
        pytest.skip(f"the paper's source is not beside the data: {source}")
    return source.read_text(encoding="utf-8")


def published(source, label):
    """The lines of a table of the paper, as text."""
    after = source.split(rf"\label{{{label}}}", 1)[1].split(r"\end{tabular}", 1)[0]
    lines = after.split(r"\midrule", 1)[1].split(r"\\")
    return [[plain(part) for part in line.split("&")] for line in lines if "&" in line]


def plain(tex):
    tex = re.sub(r"\\[!;,]|\$|~|\\midrule|\\citep?\{[^}]*\}", "", tex)
    tex = re.sub(r"\\(?:mathbf|textbf)\{((?:[^{}]|\{[^{}]*\})*)\}", r"\1", tex)
    powers = str.maketrans("0123456789-", "⁰¹²³⁴⁵⁶⁷⁸⁹⁻")
    tex = re.sub(
        r"\s*\\times\s*10\^\{(-?\d+)\}", lambda found: " × 10" + found[1].translate(powers), tex
    )
    return re.sub(r"\s*\\pm\s*", " ± ", tex).strip()


@pytest.mark.parametrize("name", TABLES)
def test_the_papers_figures_are_the_papers(name, paper):
    label, count = LABELS[name]
    lines = published(paper, label)
    assert len(lines) == count
    table = catalogue.load(name).draw({source: [] for source in sources(name)}).tables[0]
    ours = [{cell.removesuffix(" %") for cell in line} for line in table.rows]
    for line in lines:
        figures = {cell for cell in line[1:] if cell != "-"}
        if name in ("layers", "fedavg_epochs", "fedavg_rates"):
            figures.add(line[0])
        if line[0].startswith("Geiping et. al"):
            figures.remove("0.00")  # no clipping
        assert any(figures <= shown for shown in ours), line


def test_the_trained_layers_figures_are_the_papers(paper):
    assert r"after $5000$ gradient steps the time per batch reduces to $< 1$ min" in paper
    assert r"at an accuracy of $>95\%$ for layer $l=5$" in paper
    content = text(drawn("layers"))
    assert "| 5, after 5,000 steps | – |" in content
    assert "| > 95 % |" in content


TINY = {"data": "tiny_imagenet", "b": 4, "m": 60}
# Settings that make a trial of each experiment small, and what its table draws of it.
SMALL = {
    "prior_work": [
        (TINY | {"attack": "spear"}, {"psnr", "exact", "certified_wrong"}),
        (TINY | {"attack": "geiping", "iterations": 3}, {"psnr", "loss"}),
        (TINY | {"attack": "cocktail", "iterations": 3}, {"psnr", "loss"}),
    ],
    "tabular": [({}, {"discrete", "continuous", "exact", "certified_wrong"})],
    "layers": [({"layer": 5}, {"mae", "exact"}), ({"layer": 1}, {"mae", "exact"})],
    "prior": [({"method": "prior", "b": 6, "m": 80, "iterations": 20}, {"guess_psnr", "psnr"})],
    "features": [
        (
            {"attack": attack, "data": "tiny_imagenet", "b": 2, "width": 64, "photos": 4},
            {"cosine", "lost", "first_lpips", "first_psnr", "worst_lpips", "worst_psnr"},
        )
        for attack in ("spear", "cocktail")
    ],
    "one_label": [({}, {"psnr", "ssim", "mse", "lpips", "exact"})],
    "dpsgd": [
        (
            {"attack": "spear", "sigma": 1e-5, "clip": 1.5},
            {"within_3", "below", "psnr", "psnr_prior"},
        )
    ],
    "fedavg_epochs": [({"epochs": 5}, {"proved", "psnr", "exact"})],
}
STEPS = {"inversion": 2}


@pytest.mark.parametrize("name", SMALL)
def test_a_small_trial_measures_what_is_drawn(name, data_root):
    cells = [trial.settings for trial in trials(name, 1)]
    for change, wanted in SMALL[name]:
        kind = {key: change[key] for key in ("attack", "part", "method") if key in change}
        like = next(c for c in cells if all(c[key] == value for key, value in kind.items()))
        steps = {key: value for key, value in STEPS.items() if key in like}
        settings = {**like, **steps, **change}
        measured = catalogue.load(name).measure(case(settings, 3, data_root))
        metrics = json.loads(json.dumps(dict(measured.metrics)))
        assert wanted <= set(metrics)
        assert all(metrics[key] is not None for key in wanted)
        assert measured.seconds > 0
        assert not metrics.get("certified_wrong")
        if "exact" in wanted:
            assert metrics["exact"]


@pytest.mark.parametrize(
    ("metrics", "share"),
    [
        ({"psnr": 20.0, "missing": 0}, "100 % (15.8–100.0) of 2"),
        ({"psnr": 19.9, "missing": 0}, "0 % (0.0–84.2) of 2"),
        ({"psnr": 40.0, "missing": 1}, "0 % (0.0–84.2) of 2"),
        ({"psnr": None, "missing": 20}, "0 % (0.0–84.2) of 2"),
    ],
)
def test_a_noisy_batch_is_recognised_if_all_of_it_came_back(metrics, share):
    def noisy(rows):
        return [replace(row, metrics={**row.metrics, **metrics}) for row in rows]

    (table,) = drawn("dpsgd", noisy).tables
    column = table.columns.index("Acc ours, recognisable")
    assert {line[column] for line in table.rows} == {share}


def test_a_prior_is_shown_where_there_is_noise():
    def with_prior(rows):
        return [replace(row, metrics={**row.metrics, "psnr_prior": 44.5}) for row in rows]

    (table,) = drawn("dpsgd", with_prior).tables
    column = table.columns.index("PSNR ours with the prior")
    assert [line[column] for line in table.rows] == ["–"] * 6 + ["44.5 ± 0"] * 20


def test_noise_and_clipping_are_of_the_sizes_that_the_paper_gives(data_root):
    """What a note of Table 9 says of the gradient's median entry and of the clipped samples."""
    found = {}
    for clip in (1.0, 2.0):
        medians, clipped = [], []
        for seed in range(5):
            batch_case = case(dpsgd.cell("spear", clip, 0.0, max_seconds=60), seed, data_root)
            batch = private_batch(batch_case)
            view, _ = dpsgd.noisy(batch_case, batch)
            factors = clipping_factors(batch.model, batch.inputs, batch.labels, clip)
            medians.append(1e4 * float(view.weight_grad.abs().median()))
            clipped.append(int((factors < 1).sum()))
        found[clip] = [f"{min(medians):.1f} {max(medians):.1f}", min(clipped), max(clipped)]
    assert found == {1.0: ["0.7 0.7", 20, 20], 2.0: ["1.2 1.4", 6, 13]}


def test_the_first_guess_of_an_image_is_learnt_on_other_photos(data_root):
    """Nearer to the photos than grey is, and not from the batch's own."""
    settings = {"data": "tiny_imagenet", "b": 16, "photos": 150}
    pool, seen, _ = features.others(data_root, "tiny_imagenet", 150)
    photos, _ = images(data_root, "tiny_imagenet").batch(pool[:16].tolist())  # as seed 0 draws them

    def error(seed):
        guesses = [
            features.first_guess(case(settings, seed, data_root), f[None]) for f in seen[:16]
        ]
        return float((torch.cat(guesses).flatten(1) - photos).square().mean())

    grey = float(photos.square().mean())
    assert error(1) < error(0) < 0.95 * grey  # seed 1 draws others, and so learns on these
