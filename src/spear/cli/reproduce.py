"""`spear reproduce`: the paper's tables and figures, run and drawn."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from spear.cli import completion
from spear.cli.console import LARGEST_SEED, MOST_TRIALS, MOST_WORKERS, PlainConsole, complain
from spear.cli.progress import Activity, duration, watched
from spear.cli.tables import show_drawn
from spear.errors import InvalidOption, SpearError
from spear.experiments import installed, known, names
from spear.plugins import is_code

if TYPE_CHECKING:
    from spear.trials import Engine, Part, Work

console = PlainConsole()
_TITLE = 12  # columns at least of what an experiment shows
# Options that `spear bench` has as well.
Seed = Annotated[int, typer.Option(min=0, max=LARGEST_SEED, help="Seed of the first batch.")]
Data = Annotated[Path | None, typer.Option(envvar="SPEAR_DATA", help="Folder with the datasets.")]
Workers = Annotated[
    int | None,
    typer.Option(min=1, max=MOST_WORKERS, help="Processes, one thread each; one per core."),
]
Again = Annotated[bool, typer.Option("--again", help="Run failed and timed-out trials once more.")]
OnlyDraw = Annotated[
    bool, typer.Option("--only-draw", help="Draw the rows there are; run nothing.")
]


def reproduce(
    experiments: Annotated[
        list[str] | None, typer.Argument(autocompletion=completion.experiments)
    ] = None,
    show_list: Annotated[
        bool, typer.Option("--list", help="Show what there is, and how long it takes.")
    ] = False,
    batches: Annotated[
        int | None,
        typer.Option(
            min=1, max=MOST_TRIALS, help="Batches per cell; the paper's number unless given."
        ),
    ] = None,
    seed: Seed = 0,
    data: Data = None,
    results: Annotated[Path, typer.Option(help="Folder of the rows and drawings.")] = Path(
        "spear-results"
    ),
    workers: Workers = None,
    max_seconds: Annotated[
        float | None, typer.Option(help="Stop a trial after this long; it counts as timed out.")
    ] = None,
    again: Again = False,
    engine: Annotated[
        str,
        typer.Option(
            help="local, or ray for a cluster.",
            autocompletion=completion.one_of(("local", "ray")),
        ),
    ] = "local",
    address: Annotated[
        str | None,
        typer.Option(help="Address of the Ray cluster; one is started here unless given."),
    ] = None,
    only_draw: OnlyDraw = False,
    page: Annotated[Path | None, typer.Option(help="Draw everything on one Markdown page.")] = None,
    finder: Annotated[
        str | None,
        typer.Option(
            help="A finder in place of ours: a name, or my_finder.py:MyFinder.",
            autocompletion=completion.finders,
        ),
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SETTINGS",
            help="Run only cells with these settings: b=20,finder=cascade; may be given again.",
        ),
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Errors only.")] = False,
) -> None:
    """Run the paper's tables and figures, and draw them with the paper's figures beside ours.

    Experiments have the names that --list shows, or their numbers in the paper ("Table 3"); "all"
    stands for all of the paper's and ours.

    An experiment of your own is a file with an EXPERIMENT: my_table.py.
    """
    for name in experiments or ():  # a wrong name is told before torch is imported
        name == "all" or is_code(name) or known(name)
    activity = Activity.begin(quiet=quiet)
    from spear.experiments.common import additions, catalogue
    from spear.experiments.common import page as pages
    from spear.experiments.common import reproduce as flow
    from spear.experiments.common.only import Only

    if show_list or not experiments:
        _show_list(results, activity)
        return
    given = [name for each in experiments for name in (names() if each == "all" else (each,))]
    wanted = catalogue.resolve(given)
    order = catalogue.with_sources(wanted)
    if page is not None and finder is not None:
        raise InvalidOption("--page draws our finder's rows: leave out --finder or --page")
    if only and only_draw:
        raise InvalidOption("--only chooses what is run, not what is drawn: leave out --only-draw")
    chosen_finder = None if finder in (None, additions.OURS) else additions.Addition.finder(finder)
    own = () if chosen_finder is None else (chosen_finder,)
    options = flow.Options(results, data, batches, seed, again, chosen_finder, Only.of(only or ()))
    parts: list[Part] = []
    if not only_draw:
        flow.check_only(order, options)
        chosen = _engine(engine, address, workers, max_seconds)
        with stoppable(results):
            for name in order:  # one after the other: some are planned by the rows of others
                activity.tell(f"planning {name}, looking at its data")
                parts.append(flow.plan(name, options))
                run_part(parts[-1], flow.work(data, own), chosen, activity)
    if page is not None:
        activity.tell("drawing the page")
        pages.page(wanted, results, page)
        activity.pause()
        end(parts)
        return
    folder = pages.folder_of(results / "drawn", chosen_finder)
    for name in wanted:
        activity.tell(f"drawing {name}")
        drawn = pages.write(name, results, results / "drawn", chosen_finder)
        if not quiet:
            activity.pause()
            show_drawn(console, drawn, folder)
    if not quiet:
        console.print(escape(f"\nrows: {results}\ntables, plots and pictures: {folder}"))
    activity.pause()
    end(parts)


def _engine(
    name: str, address: str | None, workers: int | None, max_seconds: float | None
) -> Engine:
    if name == "local":
        if address is not None:
            raise InvalidOption("expected --engine ray beside --address")
        from spear.trials import LocalEngine

        return LocalEngine(workers, max_seconds)
    if name == "ray":
        from spear.integrations.ray import RayEngine

        return RayEngine(address=address, workers=workers, max_seconds=max_seconds)
    raise InvalidOption(f"expected --engine local or ray, got {name!r}")


def _show_list(results: Path, activity: Activity) -> None:
    from spear.experiments.common import catalogue, times
    from spear.experiments.common import reproduce as flow

    lines = [("name", "in the paper", "1 batch", "all", "rows here", "what it shows")]
    for name in (*names(), *installed()):
        try:
            e = catalogue.load(name)
        except SpearError as error:  # of an installed package, which spoils no others
            lines.append((name, "", "", "", "", str(error)))
            continue
        place = "" if e.place == "Beyond the paper" else e.place
        here = len(flow.rows_of(name, results))
        lines.append((name, place, *_expected(name), str(here or ""), e.title))
    activity.pause()
    for line in _aligned(lines, left=2, room=console.unfolded().width):
        console.print(escape(line), soft_wrap=True)
    console.say(
        "\n1 batch: one batch of every cell (--batches 1); all: as many as the paper has. Each with "
        "the experiments that it is drawn from. Times are sums of what the rows in results/ of the "
        f"repository took, one process on two shared cores ({times.where()}); divide by --workers. "
        "> means that some cells were not measured."
    )
    console.say("\nspear reproduce NAME runs and draws one, spear reproduce all everything.")


def _aligned(lines: Sequence[Sequence[str]], *, left: int, room: int) -> Iterator[str]:
    """Lines of cells in columns, without empty ones. The first `left` and the last are aligned to the
    left, and the last is cut off, or left out, where there is no room for it."""
    *columns, last = [i for i in range(len(lines[0])) if any(line[i] for line in lines[1:])]
    wide = {i: max(len(line[i]) for line in lines) for i in columns}
    room -= sum(wide.values()) + 2 * len(wide)
    for line in lines:
        cells = [line[i].ljust(wide[i]) if i < left else line[i].rjust(wide[i]) for i in columns]
        if room >= _TITLE:
            end = line[last]
            cells.append(end if len(end) <= room else f"{end[: room - 1]}…")
        yield "  ".join(cells)


def _expected(name: str) -> tuple[str, str]:
    """How long one batch of everything takes, and all of them."""
    from spear.experiments.common import catalogue, times

    parts = [source for source in catalogue.with_sources((name,)) if catalogue.load(source).measure]
    taken = [times.kept()[part] for part in parts if part in times.kept()]
    if len(taken) < len(parts):
        return "", "not measured"
    least = "> " if any(one.unmeasured for one in taken) else ""
    one, every = sum(one.one for one in taken), sum(one.all for one in taken)
    return f"{least}{duration(one)}", f"{least}{duration(every)}"


@contextmanager
def stoppable(where: Path) -> Iterator[None]:
    """A Ctrl-C within ends the command, and says how to go on."""
    try:
        yield
    except KeyboardInterrupt:
        words = f"stopped; what was done is in {where}: the same command goes on from there"
        console.say(escape(words))
        raise typer.Exit(130) from None


def end(parts: Sequence[Part]) -> None:
    """Exit with 1 if every trial failed or ran out of time."""
    rows = [row for part in parts for row in part.rows]
    if rows and all(row.cut_short for row in rows):
        error, count = Counter(row.error or "out of time" for row in rows).most_common(1)[0]
        complain(SpearError(f"no trial of {len(rows):,} succeeded; {count:,} × {error}"))
        raise typer.Exit(1)


def run_part(part: Part, work: Work, engine: Engine, activity: Activity) -> None:
    """Run what is missing of a part, and show how far it is."""
    from spear.trials import Remaining

    if part.left_out and not activity.quiet:
        words = f"{part.name}: without {', '.join(part.left_out)}, not there (see spear data)"
        activity.pause()
        console.say(escape(words))
    if not part.open:
        return
    remaining = Remaining(part.open, part.file.rows().values())
    with watched(part, remaining, activity) as watch:
        for row in part.run(work, engine, watch.step):
            remaining.done(row)
            watch.row(row)
