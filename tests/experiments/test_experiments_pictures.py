"""The paper's picture figures: which batches they pick, what they show, and that nothing is made up."""

import io
import sys
from dataclasses import replace

import pytest
import torch

pytest.importorskip("PIL", reason="needs the cli extra")
pytest.importorskip("matplotlib", reason="needs the plots extra")

from PIL import Image

import spear
from spear.errors import InvalidOption
from spear.experiments.common import catalogue, page
from spear.experiments.common.figures import NOT_RUN
from spear.experiments.common.galleries import (
    CERTIFIED,
    UNCERTIFIED,
    Strip,
    Tile,
    gallery,
    judged,
    plain,
)
from spear.report import ImageFormat
from spear.trials import Attacked, Batch, RowFile, Status, Trial, compare
from spear.trials.trial import measure as measured
from support.experiment_rows import case, row, trials
from support.planted import plant

NAMES = ("full_batch", "teaser", "percentiles", "failed_batch", "overview")
CELL = {"data": "tiny_imagenet", "b": 20, "m": 200, "finder": "cascade", "max_seconds": 120}


def module(name):
    catalogue.load(name)
    return sys.modules[f"spear.experiments.{name}"]


def main_row(seed, psnr, exact=True, status=Status.DONE, **settings):
    return row(Trial("main", {**CELL, **settings}, seed), {"psnr": psnr, "exact": exact}, status)


def timed_out(seed):
    return main_row(seed, None, status=Status.TIMED_OUT)


def plan(name, rows):
    return trials(name, 100, main=rows)


def stored(name, settings, seed, root):
    """A row as the runner makes it, and its pictures."""
    work = catalogue.load(name).measure
    trial = Trial(name, settings, seed)
    return measured(trial, lambda t, report: work(case(t.settings, t.seed, root)), print, "local")


def pixels(png):
    return Image.open(io.BytesIO(png)).convert("RGB")


def count(image, colour):
    value = tuple(int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return sum(n for n, found in image.getcolors(1 << 24) if found == value)


@pytest.mark.parametrize("name", NAMES)
def test_without_rows_a_figure_says_that_it_was_not_run(name):
    experiment = catalogue.load(name)
    drawing = experiment.draw({source: [] for source in (name, *experiment.after)})
    assert NOT_RUN in drawing.notes
    assert not drawing.pictures
    assert not drawing.plots


# Percentiles: twenty batches with PSNRs 1 to 20, in another order than their seeds.
PSNRS = [float(1 + (7 * seed) % 20) for seed in range(20)]


def test_percentiles_are_nearest_ranks():
    rows = [main_row(seed, psnr) for seed, psnr in enumerate(PSNRS)]
    trials = plan("percentiles", rows)
    assert [t.settings["percentile"] for t in trials] == [10, 50, 90]
    assert [t.settings["main_psnr"] for t in trials] == [2.0, 10.0, 18.0]
    assert [PSNRS[t.seed] for t in trials] == [2.0, 10.0, 18.0]
    assert all(t.settings.items() >= CELL.items() for t in trials)


def test_batches_without_psnr_are_the_worst_and_ties_go_by_seed():
    rows = [main_row(seed, 150.0) for seed in (3, 1, 2, 0, 4, 5, 6, 7)] + [
        timed_out(9),
        timed_out(8),
    ]
    assert [t.seed for t in plan("percentiles", rows)] == [8, 2, 6]
    assert plan("percentiles", rows)[0].settings["main_psnr"] is None


def test_percentiles_look_at_tiny_imagenet_and_the_default_finder_only():
    others = [main_row(50, 1.0, data="mnist"), main_row(51, 2.0, finder="sampling")]
    trials = plan("percentiles", [*others, main_row(7, 99.0)])
    assert {t.seed for t in trials} == {7}
    assert plan("percentiles", others) == []


def test_percentiles_draw_the_batches_picked_now():
    rows = [main_row(seed, psnr) for seed, psnr in enumerate(PSNRS)]
    own = [
        row(
            t,
            {"psnr": t.settings["main_psnr"], "same_as_main": True},
            pictures={"batch": f"{t.seed}"},
        )
        for t in plan("percentiles", rows)
    ]
    draw = catalogue.load("percentiles").draw
    shown = draw({"main": rows, "percentiles": own}).pictures
    assert [p.file for p in shown] == [row.pictures["batch"] for row in own]
    grown = rows + [main_row(100 + seed, 0.5) for seed in range(4)]  # the 10th percentile moves
    moved = draw({"main": grown, "percentiles": own}).pictures
    assert "10th" not in [p.name for p in moved]


def test_a_percentile_repeats_its_batch_of_the_main_table(data_root):
    small = {**CELL, "b": 4, "m": 60}
    main = stored("main", small, 5, data_root)[0]
    assert main.status is Status.DONE, main.error
    (trial,) = {t.key: t for t in plan("percentiles", [main])[:1]}.values()
    row, pictures = stored("percentiles", trial.settings, trial.seed, data_root)
    assert row.metrics["psnr"] == main.metrics["psnr"]
    assert row.metrics["same_as_main"] is True
    again = stored("percentiles", trial.settings, trial.seed, data_root)
    assert again[1] == pictures
    assert again[0].result == row.result
    other = {**trial.settings, "main_psnr": main.metrics["psnr"] + 1e-9}
    assert stored("percentiles", other, 5, data_root)[0].metrics["same_as_main"] is False


# Failed batches.


def test_a_failed_batch_of_the_main_table_is_shown_first():
    rows = [main_row(0, 150.0), main_row(4, 91.0, exact=False, finder="sampling")]
    rows += [main_row(9, 80.0, exact=False), main_row(6, 70.0, exact=False), timed_out(2)]
    (trial,) = plan("failed_batch", rows)
    assert (trial.seed, trial.settings["finder"], trial.settings["kind"]) == (6, "cascade", "main")
    (trial,) = plan("failed_batch", rows[:2])
    assert (trial.seed, trial.settings["finder"]) == (4, "sampling")


def test_where_none_failed_failures_are_staged_and_said_to_be():
    staged = plan("failed_batch", [main_row(0, 150.0)])
    assert {t.settings["kind"] for t in staged} == set(module("failed_batch").STAGED)
    words = module("failed_batch").WORDS
    assert all(words[t.settings["kind"]].startswith("Staged") for t in staged)


def test_a_batch_without_a_result_is_not_passed_over():
    rows = [main_row(0, 150.0), timed_out(1)]
    metrics = {"psnr": None, "recovered": 0, "certified": 0, "returned": 0}
    own = [row(t, metrics, pictures={"batch": "a.png"}) for t in plan("failed_batch", rows)]
    notes = catalogue.load("failed_batch").draw({"main": rows, "failed_batch": own}).notes
    assert "but 1 ended without a result" in notes[-1]


def four_images(certified):
    """Three of four images came back, in another order: right, a little off, very wrong."""
    truth = torch.rand(4, 3 * 8 * 8, dtype=torch.float64)
    found = torch.stack([truth[2] + 1e-2, truth[0], truth[3] + 0.2])
    planted = plant(3, n=10, m=30)
    result = replace(spear.invert(planted.view), inputs=found, certified=torch.tensor(certified))
    batch = Batch(truth, torch.arange(4), planted.model, ImageFormat((3, 8, 8)))
    return compare(batch, Attacked(planted.view, result, 0.1))


def test_tiles_say_what_was_certified_and_what_is_missing():
    compared = four_images([False, True, False])
    tiles = judged(compared)
    assert [tile.frame for tile in tiles] == [CERTIFIED, None, UNCERTIFIED, UNCERTIFIED]
    assert [tile.image is None for tile in tiles] == [False, True, False, False]
    assert [tile.caption for tile in tiles] == ["400 dB", "missing", "40 dB", "14 dB"]
    assert torch.equal(tiles[2].image, compared.attacked.result.inputs[0].view(3, 8, 8))
    assert sorted(range(4), key=lambda i: tiles[i].rank) == [0, 2, 3, 1]


def test_frames_are_drawn_around_tiles_and_nothing_into_empty_ones():
    blank = torch.full((3, 8, 8), 0.5)
    png = gallery([Strip("", [Tile(blank, CERTIFIED), Tile(blank, UNCERTIFIED), Tile(None)])])
    image = pixels(png)
    frame = 4 * 3 * (128 + 3)  # three pixels wide, around 128
    assert count(image, CERTIFIED) == count(image, UNCERTIFIED) == frame
    assert count(image, "#808080") == 2 * 128 * 128  # whole images, nothing hidden by a frame
    left = 10 + 2 * (128 + 8)
    inside = image.crop((left + 2, 12, left + 126, 136))
    assert inside.getcolors() == [(124 * 124, (255, 255, 255))]


def test_a_batch_that_came_back_in_part_shows_no_more_than_that(data_root):
    few = {"b": 12, "m": 120, "finder": "sampling", "max_samples": 8000, "kind": "budget"}
    part, pictures = stored("failed_batch", {**CELL, **few}, 0, data_root)
    assert part.status is Status.DONE, part.error
    missing = part.metrics["missing"]
    assert 0 < missing
    assert part.metrics["returned"] + missing == 12
    image = pixels(pictures[part.pictures["batch"]])
    empty = 4 * 2 * (128 - 2)  # the outline of an empty frame, two pixels wide
    assert count(image, "#c4c7cc") >= missing * empty
    assert count(image, CERTIFIED) == 0
    assert "12" in module("failed_batch").caption(part)


# Galleries.


def test_a_gallery_is_the_same_file_each_time_and_wraps():
    strips = [Strip("SPEAR\n1 dB", plain(list(torch.rand(13, 3, 16, 16))))]
    first = gallery(strips)
    assert gallery(strips) == first
    assert pixels(first).height == 10 + 128 + 26 + 128 + 10
    assert pixels(first).width > 10 * 128


def test_a_gallery_shows_the_pixels_as_they_are():
    image = torch.randint(0, 64, (3, 64, 64)) * 4 / 255
    shown = pixels(gallery([Strip("", [Tile(image)])]))
    corner = torch.tensor([shown.getpixel((10 + 2 * x, 10 + 2 * x)) for x in range(64)])
    assert torch.equal(corner, (image * 255).round().long()[:, range(64), range(64)].T)


@pytest.mark.parametrize("lengths", [(2, 3), (0, 0)])
def test_strips_of_a_gallery_are_equally_long(lengths):
    strips = [Strip("", [Tile(None)] * length) for length in lengths]
    with pytest.raises(InvalidOption, match="equally many"):
        gallery(strips)


# Figures 1, 2 and 9.


def test_four_images_span_the_rivals_ranking():
    psnr = torch.tensor([14.0, 19.0, 12.0, 16.0, 13.0, 18.0, 17.0])
    assert module("full_batch").spread(psnr) == [1, 6, 0, 2]


def test_the_teaser_shows_the_picture_of_the_full_batch(data_root, tmp_path, monkeypatch):
    full = module("full_batch")
    settings = {**full.SETTINGS, "b": 5, "m": 60, "iterations": 20}
    monkeypatch.setattr(full, "SETTINGS", settings)  # rows of other settings are not drawn
    row, pictures = stored("full_batch", settings, 1, data_root)
    assert row.status is Status.DONE, row.error
    again, same = stored("full_batch", settings, 1, data_root)
    assert same == pictures
    assert again.result == row.result
    assert len(set(row.metrics["four"])) == 4
    assert row.metrics["geiping"] < 30 < row.metrics["psnr"]
    with RowFile(tmp_path, "full_batch").writing() as file:
        file.append(row, pictures)
    text = page.write("teaser", tmp_path, tmp_path / "drawn").markdown()
    assert NOT_RUN not in text
    drawn = (tmp_path / "drawn" / "teaser-four.png").read_bytes()
    assert drawn == pictures[row.pictures["four"]]
    page.write("full_batch", tmp_path, tmp_path / "drawn")
    assert (tmp_path / "drawn" / "full_batch-full.png").stat().st_size > 10_000


def test_the_overview_is_drawn_from_its_row_alone(data_root, tmp_path, monkeypatch):
    settings = {**module("overview").SETTINGS, "b": 4, "m": 60, "submatrices": 300}
    monkeypatch.setattr(module("overview"), "SETTINGS", settings)
    row, pictures = stored("overview", settings, 2, data_root)
    assert row.status is Status.DONE, row.error
    found = row.metrics
    assert row.outcome == "EXACT"
    assert sum(found["zeros_right"]) == found["right"] > 0
    assert sum(found["zeros_right"]) + sum(found["zeros_wrong"]) == 300
    assert len(found["mixes"]) == found["candidates"] >= found["mixes"].count(1) == 4
    right, wrong = found["examples"]["right"], found["examples"]["wrong"]
    assert right["zeros"] >= found["tau"] * 60 > wrong["zeros"]
    assert max(right["values"][i] for i in right["rows"]) < 1e-4 * max(right["values"])
    with RowFile(tmp_path, "overview").writing() as file:
        file.append(row, pictures)
    monkeypatch.setattr("spear.inversion.factorise", None)  # whoever computes again fails
    page.write("overview", tmp_path, tmp_path / "drawn")
    files = {name: (tmp_path / "drawn" / f"overview-method.{name}") for name in ("png", "svg")}
    first = {name: path.read_bytes() for name, path in files.items()}
    page.write("overview", tmp_path, tmp_path / "drawn")
    assert {name: path.read_bytes() for name, path in files.items()} == first
