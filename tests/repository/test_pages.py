"""Pages of the documentation: their examples run, their tables are drawn from the rows."""

import doctest
import json
import runpy
import statistics
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = ["settings.md", "baselines.md", "features.md", "start.md", "report.md", "extending.md"]


@pytest.mark.parametrize("page", PAGES)
def test_examples_run(page):
    failed, _ = doctest.testfile(str(ROOT / "docs" / page), module_relative=False)
    assert failed == 0


def test_the_settings_tables_are_drawn_from_the_rows():
    text = (ROOT / "benchmarks" / "rows" / "settings.jsonl").read_text(encoding="utf-8")
    rows = [json.loads(line) for line in text.splitlines()]
    drawn = runpy.run_path(str(ROOT / "benchmarks" / "settings.py"))["tables"](rows)
    assert drawn in (ROOT / "docs" / "settings.md").read_text(encoding="utf-8")


def test_the_speed_up_of_two_processes_is_what_the_rows_say():
    text = (ROOT / "benchmarks" / "rows" / "spread.jsonl").read_text(encoding="utf-8")
    rows = [json.loads(line) for line in text.splitlines()]
    page = (ROOT / "docs" / "engine.md").read_text(encoding="utf-8")
    assert all(row["same_bits"] and row["others"] <= 0.01 for row in rows)
    for case in {row["case"] for row in rows}:
        one, two = (
            [row["seconds"] for row in rows if (row["case"], row["arm"]) == (case, arm)]
            for arm in ("one process", "two processes")
        )
        faster = statistics.median(a / b for a, b in zip(one, two, strict=True))
        line = next(line for line in page.splitlines() if line.startswith(f"| {case}"))
        medians = f"| {statistics.median(one):.1f} s | {statistics.median(two):.1f} s "
        assert f"{medians}| {faster:.2f}x |" in line
