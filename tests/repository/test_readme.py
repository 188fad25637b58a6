"""The README's figures are those of the committed rows."""

from pathlib import Path

from spear.experiments.common.drawing import markdown
from spear.experiments.common.reproduce import rows_of
from spear.experiments.frontier import frontier_table

ROOT = Path(__file__).parents[2]


def test_the_table_is_drawn_from_the_rows():
    lines = markdown(frontier_table(rows_of("frontier", ROOT / "results"))).splitlines()
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert lines[0] in readme
    assert "\n".join(lines[2:]) in readme


def test_no_row_holds_a_false_verdict():
    rows = rows_of("frontier", ROOT / "results")
    assert not any(row.metrics["false_exact"] or row.metrics["certified_wrong"] for row in rows)
