"""Pages of the documentation: their examples run, their tables are drawn from the rows."""

import doctest
import json
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("page", ["settings.md", "baselines.md", "features.md"])
def test_examples_run(page):
    failed, _ = doctest.testfile(str(ROOT / "docs" / page), module_relative=False)
    assert failed == 0


def test_the_settings_tables_are_drawn_from_the_rows():
    text = (ROOT / "benchmarks" / "rows" / "settings.jsonl").read_text(encoding="utf-8")
    rows = [json.loads(line) for line in text.splitlines()]
    drawn = runpy.run_path(str(ROOT / "benchmarks" / "settings.py"))["tables"](rows)
    assert drawn in (ROOT / "docs" / "settings.md").read_text(encoding="utf-8")
