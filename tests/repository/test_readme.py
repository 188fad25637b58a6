"""The README: short, names what it should, and its commands are those that there are."""

import re
from pathlib import Path

import pytest

from spear.experiments.common.catalogue import names
from spear.experiments.common.reproduce import rows_of
from spear.trials import Status

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_it_is_read_in_three_minutes():
    assert README.count("\n") <= 100
    assert "\n|" not in README  # tables are in the docs


@pytest.mark.parametrize("command", ["make demo", "make test", "make docs"])
def test_commands_of_make_are_there(command):
    target = command.split()[1]
    assert command in README
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)


def test_options_that_it_names_are_there():
    typer = pytest.importorskip("typer", reason="needs the cli extra")
    from spear.cli.app import app

    commands = typer.main.get_command(app).commands
    shown = re.findall(r"^(?:\$ )?spear (\w+) (.*)$|`spear (\w+) (--[^`]*)`", README, re.MULTILINE)
    assert len(shown) >= 5
    for name, words, inline, others in shown:
        known = {o for p in commands[name or inline].params for o in [*p.opts, *p.secondary_opts]}
        assert set(re.findall(r"(?<!\S)--?[a-z][\w-]*", words or others)) <= known


def test_what_it_links_to_is_there():
    for link in re.findall(r"\]\((?!https?:)([^)#]+)", README):
        assert (ROOT / link).is_file(), link


@pytest.mark.parametrize("name", ["frontier", *(n for n in names() if n.startswith("rounds"))])
def test_no_row_holds_a_false_verdict(name):
    rows = [row for row in rows_of(name, ROOT / "results") if row.status is Status.DONE]
    assert rows
    assert not any(row.metrics["false_exact"] or row.metrics["certified_wrong"] for row in rows)
