"""What to do now, on the terminal: as the page and the JSON have it, in fewer lines."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.markup import escape

from spear.cli.console import PlainConsole

if TYPE_CHECKING:
    from spear.report import Report

_MITIGATIONS = 3  # the best; the page has all


def show_advice(console: PlainConsole, made: Report) -> None:
    """The next commands, and mitigations with what they cost."""
    from spear.report import ADVICE

    told = made.advice
    console.print(f"\n[b]{ADVICE}[/b]")
    for step in told.steps:
        console.say(escape(step.words), lead="  ")
        if step.command:
            console.print(f"    [b]{escape(step.command)}[/b]", soft_wrap=True)
    if any(case.measured for case in made.cases):  # the table has the mitigations
        return
    console.say("Mitigations, measured on another model (spear docs audit):", lead="  ")
    for case in told.mitigations[:_MITIGATIONS]:
        if case.measured:
            words = (
                f"{case.name}: {case.measured.leaked} of {case.measured.batches} batches leaked, "
                f"cost {case.measured.price}"
            )
            console.say(escape(words), lead="    ")
