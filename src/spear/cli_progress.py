"""An inversion's progress on the terminal: the stage it is in, and how far."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from spear.directions import Progress as Step


@contextmanager
def progress(console: Console, quiet: bool) -> Iterator[Callable[[Step], None]]:
    """A bar that `invert(on_progress=...)` moves; on terminals only, and gone when it is done."""
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[detail]}"),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=quiet or not console.is_terminal,
    ) as bars:
        task = bars.add_task("factorise", total=1, detail="")

        def show(step: Step) -> None:
            done, detail = 0.0, ""
            if step.expected:
                done = -math.expm1(-step.done / step.expected)
                detail = f"{step.done:,} submatrices, {step.found} directions"
            elif step.batch_size and step.found:
                done = step.found / step.batch_size
                detail = f"{step.found} of {step.batch_size} samples"
            bars.update(task, description=step.stage, completed=done, detail=detail)

        yield show
