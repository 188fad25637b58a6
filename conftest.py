"""Doctests are collected from src: what needs an extra that is not installed is left out there."""

from importlib.util import find_spec

collect_ignore = []
if find_spec("typer") is None or find_spec("rich") is None:
    collect_ignore.append("src/spear/cli.py")
