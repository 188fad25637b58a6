"""Planted updates through the whole pipeline: the answer must come back, or a defined outcome."""

import signal

import pytest
import torch
from torch import nn

import spear
from spear import Cause, NotExact, Outcome, Proof, SamplingFinder
from spear.federated import fedsgd, mlp
from spear.judge import rivals
from support.planted import bare, gaussian, plant, worst_error

TOLERANCE = {torch.float32: 2e-5, torch.float64: 1e-9}


@pytest.mark.parametrize(("b", "said"), [(1, "the only sample"), (4, "all 4 samples")])
def test_exact_says_of_which_samples_it_speaks(b, said):
    """Samples that left no trace are not part of it, and the words for the others are explained."""
    result = spear.invert(plant(b, m=90).view)
    assert result.outcome is Outcome.EXACT
    verb = "was" if b == 1 else "were"
    assert result.reason == f"{said} visible in the update {verb} recovered, proved by replay"
    assert "visible if its share of the update is above the update's noise" in result.explanation


def test_the_layer_alone_is_enough():
    planted = plant(6, m=90)
    result = spear.invert(bare(planted.view))
    assert (result.outcome, result.proof) == (Outcome.EXACT, Proof.PATTERN)
    assert result.labels is None
    assert rivals.NO_MERGE in result.assumptions
    assert rivals.SCALED_ALIKE in result.assumptions
    assert worst_error(result.inputs, planted.inputs) < TOLERANCE[torch.float32]


def test_an_output_layer_alone_is_enough():
    planted = plant(4, m=90, depth=3, classes=20)
    view = planted.layer("4")
    assert view.relu == "before"
    result = spear.invert(bare(view))
    assert (result.outcome, result.proof) == (Outcome.EXACT, Proof.PATTERN)
    hidden = planted.model[:4](planted.inputs)
    assert worst_error(result.inputs, hidden) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("same_label", [True, False])
def test_a_sample_that_is_there_twice_counts_once(same_label):
    x = gaussian(5, 60)
    labels = torch.tensor([0, 1, 2, 3, 4, 0 if same_label else 5])
    planted = plant(6, m=120, inputs=torch.cat([x, x[:1]]), labels=labels)
    view = planted.view
    alone = spear.invert(bare(view))
    assert (alone.batch_size, alone.outcome) == (5, Outcome.EXACT)
    assert worst_error(alone.inputs, x) < TOLERANCE[torch.float32]
    for observed in (spear.invert(view), spear.invert(view, model=planted.model)):
        assert observed.outcome is Outcome.PARTIAL  # the model that was observed knows weights
        sure = observed.inputs[observed.certified]
        assert len(sure) == 4  # it may be the mean of two; and no label explains the sum of two
        assert float(torch.cdist(sure, x).amin(1).max()) < 1e-3
        assert observed.cause is (Cause.MERGED if same_label else Cause.CONTRADICTED)
        assert ("1 of 5 samples weigh as much as several" in observed.explanation) is same_label
    told = spear.invert(spear.observe(planted.model, planted.gradients, samples=6))
    assert told.outcome is Outcome.PARTIAL
    assert "computed from 6 samples, as was told, and 5 are visible" in told.explanation


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_read_as_far_as_its_digits_go(dtype):
    """Both give 60 dB at b = 3, but with eight bits no replay can prove it."""
    planted = plant(3, m=120, n=200)
    half = {name: g.to(dtype) for name, g in planted.gradients.items()}
    view = spear.observe(planted.model.to(dtype), half)
    result = spear.invert(view, finder=SamplingFinder(max_samples=200_000))
    assert result.batch_size == 3
    if dtype is torch.float16:
        assert result.outcome is Outcome.EXACT
        assert bool(result.certified.all())
    else:
        assert (result.outcome, result.cause) == (Outcome.APPROXIMATE, Cause.IMPRECISE)
        assert "likely exact" in result.reason
        assert not bool(result.certified.any())
    assert result.inputs.dtype == torch.float32
    error = torch.cdist(result.inputs, planted.inputs).min(1).values / 200**0.5
    assert float(error.max()) < (2e-4 if dtype is torch.float16 else 2e-3)  # of a range of six
    assert bool((error < 5 * result.predicted_error).all())


def test_nothing_in_the_update():
    planted = plant(3)
    zero = {name: torch.zeros_like(g) for name, g in planted.gradients.items()}
    result = spear.invert(spear.observe(planted.model, zero))
    assert (result.outcome, result.batch_size, len(result.inputs)) == (Outcome.FAILED, 0, 0)
    assert result.cause is Cause.NO_GRADIENT
    assert "gradient is zero" in result.reason
    assert result.match is None


def test_a_batch_as_large_as_the_layer():
    result = spear.invert(plant(40, m=40, n=100).view, max_seconds=5)
    assert (result.outcome, result.cause) == (Outcome.INCONCLUSIVE, Cause.NO_GAP)
    assert result.batch_size is None
    assert len(result.inputs) == 0
    assert "no gap" in result.reason


def test_a_layer_without_relu_certifies_nothing():
    """A Tanh network whose gradient is passed off as a ReLU layer's: nothing is sparse."""
    model = nn.Sequential(nn.Linear(50, 80), nn.Tanh(), nn.Linear(80, 5))
    grads = fedsgd(model, torch.randn(4, 50), torch.tensor([0, 1, 2, 3]))
    view = spear.LayerUpdate(
        weight=model[0].weight.detach(),
        bias=model[0].bias.detach(),
        weight_grad=grads["0.weight"],
        bias_grad=grads["0.bias"],
    )
    result = spear.invert(view, finder=SamplingFinder(max_samples=100_000))
    assert (result.outcome, result.cause) == (Outcome.INCONCLUSIVE, Cause.UNFIT)
    assert not bool(result.certified.any())


def test_a_batch_too_large_for_the_budget_returns_what_is_certain():
    """Few submatrices for b = 14: whatever is certified must be right."""
    planted, seen = plant(14, m=100, n=60, seed=2), set()
    for budget in (30_000, 100_000, 300_000):
        result = spear.invert(planted.view, finder=SamplingFinder(max_samples=budget))
        seen.add(result.outcome)
        distance = torch.cdist(result.inputs[result.certified], planted.inputs).min(1).values
        assert bool((distance < 1e-3).all())
    assert seen == {Outcome.INCONCLUSIVE, Outcome.APPROXIMATE, Outcome.EXACT}


def test_ctrl_c_returns_what_was_found():
    planted = plant(30, m=200, n=100)
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)  # it may come ignored

    def press(progress):
        if progress.stage == "search":
            signal.raise_signal(signal.SIGINT)

    try:
        result = spear.invert(planted.view, finder="sampling", max_seconds=60, on_progress=press)
    finally:
        signal.signal(signal.SIGINT, previous)
    assert (result.outcome, result.cause) == (Outcome.INCONCLUSIVE, Cause.INTERRUPTED)
    assert "interrupted" in result.reason
    assert result.stats["interrupted"] == 1
    assert result.stats["submatrices"] > 0


def test_throw_raises_with_the_result():
    planted = plant(60, m=200, n=100)
    with pytest.raises(NotExact, match="INCONCLUSIVE") as caught:
        spear.invert(planted.view, finder="sampling", max_seconds=1, throw=True)
    assert caught.value.result.batch_size == 60
    assert caught.value.result.cause is Cause.TIME
    assert spear.invert(plant(3).view, throw=True).outcome is Outcome.EXACT


def test_permuting_neurons_permutes_nothing_in_the_result():
    planted = plant(5, m=90)
    order = torch.randperm(90, generator=torch.Generator().manual_seed(0))
    view = spear.LayerUpdate(
        weight=planted.view.weight[order],
        bias=planted.view.bias[order],
        weight_grad=planted.view.weight_grad[order] * 7,
        bias_grad=planted.view.bias_grad[order] * 7,
    )
    result = spear.invert(view)
    assert result.outcome is Outcome.EXACT
    assert worst_error(result.inputs, planted.inputs) < TOLERANCE[torch.float32]


def test_gradients_with_a_graph_are_taken():
    model = mlp(30, 4, width=60, depth=2, seed=0)
    loss = nn.functional.cross_entropy(model(torch.randn(3, 30)), torch.tensor([0, 1, 2]))
    grads = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    assert spear.invert(spear.observe(model, grads), model=model).outcome is Outcome.EXACT


def test_a_result_shown_as_text_is_its_verdict():
    result = spear.invert(plant(3).view)
    assert repr(result) == f"<Inversion EXACT: {result.reason}>"
    assert len(repr(result.report(title="Mine"))) < 80


def test_a_seed_is_no_generator():
    with pytest.raises(spear.InvalidOption, match=r"torch.Generator, got 3"):
        spear.invert(plant(3).view, generator=3)
