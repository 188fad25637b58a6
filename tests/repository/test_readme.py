"""The README's figures are those of the committed rows."""

from pathlib import Path

import pytest

from spear.experiments.common.catalogue import names
from spear.experiments.common.drawing import markdown
from spear.experiments.common.reproduce import rows_of
from spear.experiments.frontier import frontier_table
from spear.trials import Status

ROOT = Path(__file__).parents[2]


def test_the_table_is_drawn_from_the_rows():
    lines = markdown(frontier_table(rows_of("frontier", ROOT / "results"))).splitlines()
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert lines[0] in readme
    assert "\n".join(lines[2:]) in readme


@pytest.mark.parametrize("name", ["frontier", *(n for n in names() if n.startswith("rounds"))])
def test_no_row_holds_a_false_verdict(name):
    rows = [row for row in rows_of(name, ROOT / "results") if row.status is Status.DONE]
    assert rows
    assert not any(row.metrics["false_exact"] or row.metrics["certified_wrong"] for row in rows)
