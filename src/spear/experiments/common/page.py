"""Writes drawings to disk: an experiment's files, and one page of all. Nothing is computed again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from spear.errors import DataError
from spear.experiments.common import catalogue
from spear.experiments.common.drawing import Picture, Plot, Section, latex, markdown
from spear.experiments.common.experiment import Experiment
from spear.experiments.common.reproduce import rows_for
from spear.files import make_private, write_private
from spear.report import plots
from spear.trials import Row, RowFile

_INTRO = """# Results

The paper's tables and figures, its numbers beside ours. Drawn by `spear reproduce all --only-draw` from
rows that were run before: one line of JSON a batch, with its seed, settings, verdict, metrics, seconds,
versions and commit. Failed and timed-out batches are rows and count. Accuracy is the share of batches
in which every sample is right to 60 dB or better, with its 95 % Clopper-Pearson interval; ± is the 95 %
interval of a mean over batches. PSNR, SSIM, MSE, MAE and LPIPS of a batch are means over the samples
that came back. The paper's times are minutes on a GPU; ours are the attack's alone, with one thread of
a CPU."""


def write(name: str, results: Path, out: Path) -> str:
    """An experiment's tables as Markdown and LaTeX, its plots and pictures, into a folder."""
    section, text = _section(name, results)
    _save_images(name, section, results, out)
    write_private(out / f"{name}.md", f"{text}\n".encode())
    if section.tables:
        write_private(out / f"{name}.tex", "\n".join(map(latex, section.tables)).encode())
    return text


def page(names: Sequence[str], results: Path, path: Path) -> None:
    """One Markdown page of many experiments, with its images in a folder `images` beside it."""
    images = Path("images") / path.stem
    for name in names:
        section, _ = _section(name, results)
        _save_images(name, section, results, path.parent / images)
    write_private(path, page_text(names, results, images).encode())


def page_text(names: Sequence[str], results: Path, images: Path) -> str:
    """The page itself; its images are in the folder `images`."""
    texts = [_section(name, results)[1] for name in names]
    linked = [text.replace("](", f"]({images.as_posix()}/") for text in texts]
    return "\n\n".join([_INTRO, *linked]) + "\n"


def _section(name: str, results: Path) -> tuple[Section, str]:
    """An experiment's section, and all of it as Markdown."""
    experiment, rows = catalogue.load(name), rows_for(name, results)
    section = experiment.draw(rows)
    shown: list[Plot | Picture] = [*section.plots, *section.pictures]
    parts = [
        f"## {experiment.place}: {experiment.title}",
        *map(markdown, section.tables),
        *(f"![{experiment.place}]({name}-{one.name}.png)\n\n*{one.caption}*" for one in shown),
        *section.notes,
        _origin(name, experiment, [row for part in rows.values() for row in part]),
    ]
    return section, "\n\n".join(parts)


def _save_images(name: str, section: Section, results: Path, out: Path) -> None:
    make_private(out)
    for plot in section.plots:
        with plots.style():
            plots.save(plot.figure(), out / f"{name}-{plot.name}")
    for picture in section.pictures:
        stored = RowFile(results, name).picture(picture.file)
        if not stored.is_file():
            raise DataError(f"{stored} is missing: expected the picture of a row of {name}")
        write_private(out / f"{name}-{picture.name}.png", stored.read_bytes())


def _origin(name: str, experiment: Experiment, rows: Sequence[Row]) -> str:
    """Which rows this is drawn from, and the command that makes such rows."""
    if not rows and not (experiment.cells or experiment.plan):
        return f"`spear reproduce {name}`"
    bad = [row for row in rows if row.cut_short]
    commits = sorted({row.commit or "no checkout" for row in rows})
    told = f"{len(rows):,} rows" + (f", {len(bad)} of them failed or timed out" if bad else "")
    seeds = f", seeds {min(r.seed for r in rows)}–{max(r.seed for r in rows)}" if rows else ""
    of = f", commits {', '.join(commits)}" if commits else ""
    lines = [f"`spear reproduce {name}`: {told}{seeds}{of}."]
    errors = Counter(row.error or "its max_seconds were over" for row in bad)
    if errors:
        lines += ["", *(f"- {count} ×: {error}" for error, count in errors.most_common(3))]
    return "\n".join(lines)
