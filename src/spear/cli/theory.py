"""`spear theory`: what the paper's lemmas, and ours on several rounds, say of a batch and a width."""

from __future__ import annotations

import math
from typing import Annotated, Any

import typer
from rich.table import Table

from spear.cli.console import PlainConsole
from spear.cli.progress import Activity
from spear.errors import InvalidOption

console = PlainConsole()
_WIDEST = 10**6  # the sums over all neurons take a second
_SUMMED = 10**4  # up to here those of the bound that holds do, too


def theory(
    batch_size: Annotated[int, typer.Option("--batch-size", "-b", help="Samples, b.")] = 20,
    width: Annotated[int, typer.Option("--width", "-m", help="Neurons of the layer, m.")] = 200,
    p: Annotated[float, typer.Option(help="Failure probability allowed.")] = 1e-8,
    p_fr: Annotated[
        float, typer.Option(help="Chance that the sparsity filter rejects a right direction.")
    ] = 1e-10,
    rounds: Annotated[
        int | None,
        typer.Option(
            help="Updates seen of the same samples, 2 or more. The batch may then be larger than the "
            "layer, and the table is about what these rounds determine."
        ),
    ] = None,
    movement: Annotated[
        float | None,
        typer.Option(
            help="With --rounds: how far preactivations go in a round, of their size; 0.03 if not "
            "given. Measured: 0.001 to 0.01 at a learning rate of 0.001, 0.1 to 0.2 at 0.1."
        ),
    ] = None,
    off: Annotated[
        float | None,
        typer.Option(
            help="With --rounds: the share of neurons that a sample leaves off in one round, of those "
            "that some sample switches on; 0.5 if not given."
        ),
    ] = None,
    noise: Annotated[
        float | None,
        typer.Option(
            help="With --rounds: noise of an entry of the gradient, of a typical entry; that of "
            "float32 if not given."
        ),
    ] = None,
    inputs: Annotated[
        int | None,
        typer.Option(help="With --rounds: inputs of the layer, which no batch can exceed."),
    ] = None,
) -> None:
    """What the paper's lemmas say about a batch size and a width.

    With --rounds: whether several rounds determine the samples, and how many rounds would.
    """
    b, m = batch_size, width
    if m > _WIDEST:
        raise InvalidOption(f"expected a width of at most {_WIDEST:,}, got {m:,}")
    options = {"movement": movement, "off": off, "noise": noise, "inputs": inputs}
    given = {name: value for name, value in options.items() if value is not None}
    activity = Activity.begin("computing")
    from spear import theory as lemmas

    if rounds is not None:
        _of_rounds(b, m, rounds, given, activity)
        return
    if given:
        name = next(iter(given))
        raise InvalidOption(f"{{{name}}} needs {{rounds}}", arguments=(name, "rounds"))
    if b >= m:
        raise InvalidOption(
            f"expected a batch smaller than the layer, got b = {b} and m = {m}; larger ones need "
            "{rounds}",
            arguments=("rounds",),
        )
    table = Table("quantity", "value", title=f"b = {b}, m = {m}")
    tau = lemmas.sparsity_threshold(m, p_fr)
    rows = {
        "q, the least chance that a submatrix gives a direction": (
            f"{lemmas.success_probability(b):.3g}"
        ),
        "submatrices until every sample is found, wide layer": (
            f"{lemmas.expected_samples(b):.3g}"
        ),
        f"the same for {m} neurons": f"{lemmas.expected_samples_narrow(b, m):.3g}",
        f"enough with probability 1 - {p:g}, wide layer": (
            f"{lemmas.samples_with_high_probability(b, p, p_fr):.3g}"
        ),
        "tau, the share of zeros that makes a direction": f"{tau:g}",
        "chance that no number is enough, the paper's bound": (
            f"{lemmas.failure_bound(b, m, p_fr):.3g}"
        ),
        "the same, approximately": f"{lemmas.failure_approximation(b, m, p_fr):.3g}",
        "the same, at least": f"{lemmas.failure_at_least(b, m):.3g}",
    }
    if m <= _SUMMED:
        holds = lemmas.failure_bound_by_columns(b, m, p_fr)
        rows["the same, a bound that holds"] = f"{holds:.3g}"
    for name, value in rows.items():
        table.add_row(name, value)
    activity.pause()
    console.print(table)
    console.say(
        "A submatrix is b - 1 rows of the factor L, drawn at random; a wide layer has far more neurons "
        f"than samples. tau rejects a right direction with a chance of {p_fr:g} (--p-fr). For the "
        "paper's Algorithm 1 (--finder sampling), not for our search: spear docs algorithm."
    )


def _of_rounds(b: int, m: int, rounds: int, given: dict[str, Any], activity: Activity) -> None:
    """Print what several rounds say of a batch, under the options that were given."""
    from spear import theory as lemmas

    if not 2 <= rounds <= lemmas.MOST_ROUNDS:
        raise InvalidOption(
            f"expected {{rounds}} from 2 to {lemmas.MOST_ROUNDS:,}, got {rounds:,}",
            arguments=("rounds",),
        )
    needed = lemmas.rounds_needed(b, m, **given)
    stay_off = {name: given[name] for name in ("off", "movement") if name in given}
    of_zeros = {name: value for name, value in given.items() if name != "inputs"}
    zeros = lemmas.independent_zeros(b, m, rounds, **of_zeros)
    table = Table("quantity", "value", title=f"b = {b}, m = {m}, {rounds} rounds")
    for name, value in {
        "rows": f"{rounds * m:,}",
        "neurons that stay off for a sample": f"{m * lemmas.stay_off(rounds, **stay_off):.0f}",
        "independent zeros of the sample with the fewest": f"{math.floor(zeros):,} of {b - 1:,}",
        "rounds needed": f"{needed:,}" if needed else "no number is enough",
        "largest batch": f"{lemmas.largest_batch(m, rounds, **given):,}",
    }.items():
        table.add_row(name, value)
    activity.pause()
    console.print(table)
