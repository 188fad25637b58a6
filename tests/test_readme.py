"""The README's figures are those of the committed rows."""

import runpy
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_the_table_is_drawn_from_the_rows():
    draw = runpy.run_path(str(ROOT / "benchmarks" / "exact_rate.py"))["table"]
    table = draw(ROOT / "benchmarks" / "rows" / "exact_rate.jsonl")
    assert table in (ROOT / "README.md").read_text(encoding="utf-8")
