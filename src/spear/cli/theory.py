"""`spear theory`: what the paper's lemmas say of a batch size and a width."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.table import Table

from spear.cli.console import PlainConsole
from spear.errors import InvalidOption

console = PlainConsole()
_WIDEST = 10**6  # the sums over all neurons take a second


def theory(
    batch_size: Annotated[int, typer.Option("--batch-size", "-b", help="Samples, b.")] = 20,
    width: Annotated[int, typer.Option("--width", "-m", help="Neurons of the layer, m.")] = 200,
    p: Annotated[float, typer.Option(help="Failure probability allowed.")] = 1e-8,
    p_fr: Annotated[
        float, typer.Option(help="Chance that the sparsity filter rejects a right direction.")
    ] = 1e-10,
) -> None:
    """What the paper's lemmas say about a batch size and a width."""
    from spear import theory as lemmas

    b, m = batch_size, width
    if m > _WIDEST:
        raise InvalidOption(f"expected a width of at most {_WIDEST:,}, got {m:,}")
    if b >= m:
        raise InvalidOption(f"expected a batch smaller than the layer, got b = {b} and m = {m}")
    table = Table("quantity", "value", title=f"b = {b}, m = {m}")
    tau = lemmas.sparsity_threshold(m, p_fr)
    rows = {
        "q: a submatrix gives a direction": f"{lemmas.success_probability(b):.3g}",
        "expected submatrices, m >> b": f"{lemmas.expected_samples(b):.3g}",
        f"expected submatrices at m = {m}": f"{lemmas.expected_samples_narrow(b, m):.3g}",
        f"submatrices with probability 1 - {p:g}, m >> b": (
            f"{lemmas.samples_with_high_probability(b, p, p_fr):.3g}"
        ),
        f"tau for p_fr = {p_fr:g}": f"{tau:g}",
        "failure even if exhaustive, bound": f"{lemmas.failure_bound(b, m, p_fr):.3g}",
        "failure even if exhaustive, approximation": (
            f"{lemmas.failure_approximation(b, m, p_fr):.3g}"
        ),
    }
    for name, value in rows.items():
        table.add_row(name, value)
    console.print(table)
