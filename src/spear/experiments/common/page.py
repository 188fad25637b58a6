"""Writes drawings to disk: an experiment's files, and one page of all. Nothing is computed again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from spear.errors import DataError, InvalidExtension
from spear.experiments.common import catalogue
from spear.experiments.common.additions import OURS, Addition
from spear.experiments.common.drawing import Picture, Plot, Section, latex, markdown
from spear.experiments.common.experiment import Experiment
from spear.experiments.common.reproduce import rows_for
from spear.files import make_private, write_private
from spear.report import Table, plots
from spear.trials import Row, RowFile

_INTRO = """# Results

What the paper claims, and what came of it here; then its tables and figures, our numbers beside its
own; then what goes beyond it. The page is drawn from rows that were run before, and nothing is computed
again: `spear reproduce all --only-draw --results results --page docs/results.md`."""
_READING = """## How to read the numbers

A row is one batch: one line of JSON with its seed, settings, verdict, metrics, seconds, versions and
commit. Failed and timed-out batches are rows and count. Accuracy is the share of batches in which every
sample is right to 60 dB or better, with its 95 % Clopper-Pearson interval; ± is the 95 % interval of a
mean over batches. PSNR, SSIM, MSE, MAE and LPIPS of a batch are means over the samples that came back.
The paper's times are minutes on a GPU; ours are the attack's alone, with one thread of a CPU."""
_PARTS = ("Tables", "Figures", "Beyond the paper")


@dataclass(frozen=True)
class Drawn:
    """An experiment's section with its heading, and where its rows come from."""

    name: str
    place: str
    title: str
    section: Section
    origin: str

    @property
    def heading(self) -> str:
        return f"{self.place}: {self.title}"

    @property
    def part(self) -> str | None:
        """Of the page; None is its summary."""
        if self.place == "Summary":
            return None
        return next((p for p in _PARTS if self.place.startswith(p.removesuffix("s"))), _PARTS[-1])

    @property
    def images(self) -> list[tuple[str, str]]:
        """Names of files, and captions."""
        shown: list[Plot | Picture] = [*self.section.plots, *self.section.pictures]
        return [(f"{self.name}-{one.name}.png", one.caption) for one in shown]

    def markdown(self, heading: str | None = None) -> str:
        """All of it."""
        parts = [
            heading or f"## {self.heading}",
            *map(markdown, self.section.tables),
            *(f"![{self.place}]({file})\n\n*{caption}*" for file, caption in self.images),
            *self.section.notes,
            self.origin,
        ]
        return "\n\n".join(parts)


def write(name: str, results: Path, out: Path, finder: Addition | None = None) -> Drawn:
    """An experiment's tables as Markdown and LaTeX, its plots and pictures, into a folder.

    Those of a finder in place of ours go into a folder of its name.
    """
    out = folder_of(out, finder)
    drawn = _drawn(name, results, finder)
    _save_images(name, drawn.section, results, out)
    write_private(out / f"{name}.md", f"{drawn.markdown()}\n".encode())
    if drawn.section.tables:
        write_private(out / f"{name}.tex", "\n".join(map(latex, drawn.section.tables)).encode())
    return drawn


def folder_of(out: Path, finder: Addition | None) -> Path:
    """Where what is drawn goes: in `out`, or in a folder there of a finder in place of ours."""
    return out if finder is None else out / finder.name.replace(":", "-")


def page(names: Sequence[str], results: Path, path: Path) -> None:
    """One Markdown page of many experiments, with its images in a folder `images` beside it."""
    images = Path("images") / path.stem
    for name in names:
        _save_images(name, _drawn(name, results).section, results, path.parent / images)
    write_private(path, page_text(names, results, images).encode())


def page_text(names: Sequence[str], results: Path, images: Path) -> str:
    """The page itself; its images are in the folder `images`."""
    drawn = [_drawn(name, results) for name in names]
    texts = [
        _INTRO,
        *(one.markdown(f"## {one.title}") for one in drawn if one.part is None),
        _READING,
    ]
    for part in _PARTS:
        own = [one for one in drawn if one.part == part]
        beyond = part == _PARTS[-1]
        texts += [f"## {part}"] * bool(own)
        texts += [one.markdown(f"### {one.title if beyond else one.heading}") for one in own]
    return "\n\n".join(texts).replace("](", f"]({images.as_posix()}/") + "\n"


def _drawn(name: str, results: Path, finder: Addition | None = None) -> Drawn:
    experiment, rows = catalogue.load(name), rows_for(name, results, finder)
    origin = _origin(name, experiment, [row for part in rows.values() for row in part])
    section, title = _section(name, experiment, rows), experiment.title
    if finder is not None:
        origin = f"With the finder {' '.join(finder.settings.values())}.\n\n{origin}"
        title = f"{title}, with the finder {finder.name}"
        section = replace(section, tables=[_named(one, finder.name) for one in section.tables])
    return Drawn(name, experiment.place, title, section, origin)


def _named(table: Table, finder: str) -> Table:
    """A table of a finder in place of ours, with its name."""
    ours = (OURS, "SPEAR, ours")
    rows = tuple(tuple(finder if cell in ours else cell for cell in row) for row in table.rows)
    return replace(table, columns=tuple(c.replace(OURS, finder) for c in table.columns), rows=rows)


def _section(name: str, experiment: Experiment, rows: Mapping[str, Sequence[Row]]) -> Section:
    if name in catalogue.names():
        return experiment.draw(rows)
    try:
        section: Any = experiment.draw(rows)
    except Exception as error:  # the user's code may raise anything
        raise InvalidExtension(
            f"draw of {name} failed ({type(error).__name__}: {error}); the rows are kept: mend it, and "
            "draw them with --only-draw"
        ) from error
    if not isinstance(section, Section):
        raise InvalidExtension(
            f"draw of {name} returned a {type(section).__name__}, expected Section([table(...)])"
        )
    return section


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
