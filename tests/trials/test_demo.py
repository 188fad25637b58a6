"""The demo as a function: one round, and several."""

import pytest
import torch

pytest.importorskip("skimage", reason="needs the cli extra")

from spear.data import photo_crops
from spear.inversion import Outcome
from spear.trials import Batch, DemoSettings, run_demo
from support.planted import plant


def test_several_rounds_recover_what_one_does_not():
    settings = {"samples": 24, "width": 40, "pixels": 16}
    steps = []
    several = run_demo(DemoSettings(**settings, rounds=8), steps.append)
    assert several.result.outcome is Outcome.EXACT
    assert sorted(row["index"] for row in several.samples()) == list(range(24))
    assert [row["sample"] for row in several.samples()] == list(range(1, 25))
    assert all(row["psnr"] > 80 and row["certified"] for row in several.samples())
    assert all(row["label"] == row["found_label"] for row in several.samples())
    stages = [step.stage for step in steps]
    assert stages[:8] == [f"round {number} of 8" for number in range(1, 9)]
    assert "search" in stages[8:]
    assert several.report().title == "What 8 rounds gave away"
    one = run_demo(DemoSettings(**settings))
    assert one.result.outcome is not Outcome.EXACT


def test_rounds_leave_the_batch_as_it_is_and_move_the_weights():
    planted = plant(4, m=20, n=10, seed=0)
    batch = Batch(planted.inputs, planted.labels, planted.model)
    before = {name: p.clone() for name, p in batch.model.state_dict().items()}
    first, second = batch.views(2, lr=0.5)
    assert torch.equal(first.weight_grad, batch.view().weight_grad)
    moved = first.weight - 0.5 * first.weight_grad
    assert torch.allclose(second.weight, moved)
    assert not torch.equal(second.weight, first.weight)
    assert all(torch.equal(p, before[name]) for name, p in batch.model.state_dict().items())


def test_one_round_draws_the_photos_that_it_always_did():
    run = run_demo(DemoSettings(samples=2, width=60, depth=2, pixels=8))
    crops, names = photo_crops(2, 8)
    assert run.names == names
    assert torch.allclose(run.originals, crops.double(), atol=1e-6)
    assert run.report().title == "What one gradient gave away"
