"""Figure 1: four images of the batch of Figure 9. Drawn from its rows."""

from __future__ import annotations

from collections.abc import Mapping

from spear.experiments.common import Experiment, Section
from spear.experiments.common.drawing import Picture
from spear.experiments.common.experiment import Rows
from spear.experiments.common.figures import NOT_RUN


def draw(rows: Mapping[str, Rows]) -> Section:
    drawn = [row for row in rows["full_batch"] if "four" in row.pictures]
    if not drawn:
        return Section(notes=[NOT_RUN])
    row = drawn[-1]
    caption = (
        f"Four images of a batch of {row.settings['b']}, recovered by SPEAR (top) and by Geiping et "
        "al. (middle), and as they are (bottom). From left to right: the image that Geiping et al. "
        "recover best, two from the middle (a third and two thirds down their ranking), and their "
        f"worst. All {row.settings['b']} are in Figure 9."
    )
    return Section(pictures=[Picture("four", row.pictures["four"], caption)])


EXPERIMENT = Experiment(
    place="Figure 1",
    title="Four images of a batch of 20",
    batches=1,
    draw=draw,
    after=("full_batch",),
)
