"""The README's figures are those of the committed rows."""

from pathlib import Path

from spear.experiments.bench.tables import load, table

ROOT = Path(__file__).parents[2]


def test_the_table_is_drawn_from_the_rows():
    rows = load(ROOT / "benchmarks" / "rows" / "frontier.jsonl")
    assert table(rows) in (ROOT / "README.md").read_text(encoding="utf-8")


def test_no_row_holds_a_false_verdict():
    rows = load(ROOT / "benchmarks" / "rows" / "frontier.jsonl")
    assert not any(row["false_exact"] or row["certified_wrong"] for row in rows)
