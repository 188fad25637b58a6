"""The batch size of updates whose rounding is known, and of inputs that are mostly zero."""

import pytest
import torch
from torch import nn

import spear
from spear.factors import factorise
from spear.factors.spectrum import Rounding, batch_size_from, rounding_of
from spear.factors.streaming import left_factor, live
from support.planted import gaussian, low_rank, seeded


def words(b, n, seed=0):
    """Counts of words (b, n): 20 to 60 different ones a text, common ones more often."""
    generator = seeded(seed)
    common = 1 / (torch.arange(n) + 10.0)
    counts = torch.zeros(b, n)
    for text in counts:
        different = int(torch.randint(20, 61, (1,), generator=generator))
        chosen = torch.multinomial(common, different, generator=generator)
        text[chosen] = torch.randint(1, 5, (different,), generator=generator).float()
    return counts


def trained_on(inputs, *, width, lr, seed=0):
    """A model, its weights after one step on the inputs, and the step's gradients."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(inputs.shape[1], width), nn.ReLU(), nn.Linear(width, 10))
    labels = torch.randint(10, (len(inputs),), generator=seeded(seed))
    loss = nn.functional.cross_entropy(model(inputs), labels)
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    named = zip(model.named_parameters(), gradients, strict=True)
    return model, {name: p.detach() - lr * g for (name, p), g in named}, gradients


@pytest.mark.parametrize("sends", ["weights", "difference"])
@pytest.mark.parametrize("lr", [0.1, 0.01, 1e-4])
def test_empty_columns_are_no_samples(sends, lr):
    """300 neurons, 2,000 words of which about 220 occur: what is behind them is no end of anything."""
    model, after, _ = trained_on(words(8, 2000), width=300, lr=lr)
    if sends == "weights":
        view = spear.observe(model, after=after, lr=lr)
    else:
        before = model.state_dict()
        moved = {name: new - before[name] for name, new in after.items()}
        view = spear.observe(model, difference=moved, lr=lr)
    factors = factorise(view)
    assert factors.batch_size == 8
    live_rows, live_columns = live(view.weight_grad)
    assert len(factors.spectrum) == min(int(live_rows.sum()), int(live_columns.sum()))


def test_a_bag_of_words_comes_back_from_the_weights():
    texts = words(8, 2000)
    model, after, _ = trained_on(texts, width=300, lr=0.01)
    result = spear.invert(spear.observe(model, after=after, lr=0.01))
    assert result.outcome is spear.Outcome.EXACT
    assert float((torch.cdist(result.inputs, texts).min(1).values).max()) < 0.05


@pytest.mark.parametrize(("m", "n"), [(30, 80), (80, 30)])
def test_the_left_factor_leaves_out_what_is_empty(m, n):
    D, X = low_rank(m, n, 5)
    G = D @ X + 1e-9 * gaussian(m, n, 1).double()
    G[::4], G[:, ::2] = 0, 0
    U, s = left_factor(G, *live(G))
    kept = G[G.any(1)][:, G.any(0)]
    assert U.shape == (len(kept), min(kept.shape))
    assert torch.allclose(s, torch.linalg.svdvals(kept), rtol=1e-6)
    assert torch.allclose((U * s) @ (U * s).T, kept @ kept.T, atol=1e-12)


@pytest.mark.parametrize("lr", [0.1, 1e-3])
@pytest.mark.parametrize("sparse", [True, False])
def test_the_rounding_of_subtracted_weights_is_computed(lr, sparse):
    inputs = words(8, 1500) if sparse else gaussian(8, 300)
    model, after, gradients = trained_on(inputs, width=200, lr=lr)
    view = spear.observe(model, after=after, lr=lr)
    rounding = rounding_of(view)
    error = view.weight_grad.double() - gradients[0].double()
    values = torch.linalg.svdvals(error)
    assert 0.6 < float(values[0]) / rounding.edge < 1.3
    assert 0.6 < float(values.square().sum()) / rounding.energy < 1.5


def test_values_that_stand_out_of_known_rounding_are_counted():
    """Six times its edge, where a gap is ten; half the edge and twice its energy are something else."""
    edge, rest = 1.0, torch.linspace(1.0, 0.2, 95, dtype=torch.float64)
    rounding = Rounding(edge, float(rest.square().sum()))

    def seen(*loud, times=1.0):
        s = torch.cat([torch.tensor(loud, dtype=torch.float64), times * rest])
        return rounding.rank(s, 100, 300)

    assert seen(50, 20, 9, 7, 6) == 5
    assert seen(50, 20, 9, 7, 2) is None  # it may be a sample or not
    assert seen(50, 20, 9, 7, 6, times=0.1) is None
    assert seen(50, 20, 9, 7, 6, times=3.0) is None


def test_a_drop_behind_rounding_is_not_the_end_of_the_samples():
    """Rounding in 40 directions, and 60 in which the numbers were exact."""
    parts = ((5, 1.0), (40, 1e-7), (55, 1e-17))
    s = torch.cat([torch.full((count,), value, dtype=torch.float64) for count, value in parts])
    assert batch_size_from(s, 100, 400, 1e-7) == 45
    assert batch_size_from(s, 100, 400, 1e-7, Rounding(1.5e-7, 40e-14)) == 5
    # Unless there is far less rounding than that: then the numbers had digits to spare.
    assert batch_size_from(s, 100, 400, 1e-7, Rounding(1.5e-6, 40e-10)) == 45
