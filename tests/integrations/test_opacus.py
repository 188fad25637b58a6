"""DP-SGD by Opacus: single steps, real training runs, and what the attack makes of them."""

import copy
import importlib
import math
import sys
import warnings

import pytest
import torch
from torch import nn

pytest.importorskip("opacus", reason="Opacus is not installed: pip install 'spear-fl[opacus]'")

from opacus import PrivacyEngine
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch.utils.data import DataLoader, TensorDataset

import spear
from spear import Cause, InvalidOption, Outcome, Proof
from spear.federated import fedsgd, mlp
from spear.integrations.opacus import capture, dpsgd, epsilon
from spear.metrics import score
from support.planted import bare, plant, real_batch, seeded, worst_error

pytestmark = [
    pytest.mark.filterwarnings("ignore:Secure RNG turned off"),
    pytest.mark.filterwarnings("ignore:Full backward hook is firing"),
]


@pytest.mark.parametrize("bound", [None, 1e6])
def test_without_noise_or_clipping_it_is_fedsgd(bound):
    planted = plant(5, m=90)
    update = dpsgd(planted.model, planted.inputs, planted.labels, max_grad_norm=bound)
    assert update.gradients.keys() == planted.gradients.keys()
    for name, gradient in planted.gradients.items():
        assert torch.allclose(update.gradients[name], gradient, atol=1e-7), name
    assert update.sigma == 0
    assert update.epsilon() == math.inf
    assert update.remark == ""


@pytest.mark.parametrize("training", [True, False])
def test_the_callers_model_stays_as_it_is(training):
    planted = plant(5, m=90)
    model = planted.model.train(training)
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    update = dpsgd(model, planted.inputs, planted.labels, max_grad_norm=1.0, sigma=1e-3)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(state, torch.get_rng_state())
    assert all(p.grad is None and not hasattr(p, "grad_sample") for p in model.parameters())
    assert all(m.training == training for m in model.modules())
    for hooked in (*model.modules(), *update.model().modules()):
        assert not hooked._forward_hooks
        assert not hooked._backward_hooks


def test_each_sample_is_clipped_to_the_bound():
    planted = plant(6, m=90)
    norms, total = [], {}
    for x, y in zip(planted.inputs, planted.labels, strict=True):
        own = fedsgd(planted.model, x[None], y[None])
        norms.append(float(torch.cat([g.flatten() for g in own.values()]).norm()))
        factor = min(1.0, 2.5 / norms[-1])
        total = {name: total.get(name, 0) + factor * g / 6 for name, g in own.items()}
    assert min(norms) < 2.5 < max(norms)
    update = dpsgd(planted.model, planted.inputs, planted.labels, max_grad_norm=2.5)
    for name, gradient in total.items():
        assert torch.allclose(update.gradients[name], gradient, atol=1e-6), name


@pytest.mark.parametrize("bound", [1.0, 2.0, None])
def test_the_noise_has_the_stated_sigma(bound):
    planted = plant(4, m=200, n=300)
    batch = (planted.model, planted.inputs, planted.labels)
    clean = dpsgd(*batch, max_grad_norm=bound)
    noisy = dpsgd(*batch, max_grad_norm=bound, sigma=1e-2)
    noise = noisy.gradients["0.weight"] - clean.gradients["0.weight"]
    assert float(noise.std()) == pytest.approx(1e-2, rel=0.02)
    if bound is not None:
        assert noisy.noise_multiplier == pytest.approx(1e-2 * 4 / bound)
        same = dpsgd(*batch, max_grad_norm=bound, noise_multiplier=noisy.noise_multiplier)
        assert torch.allclose(same.gradients["0.bias"], noisy.gradients["0.bias"])
        assert same.sigma == pytest.approx(1e-2)
    else:
        assert noisy.noise_multiplier is None
        assert noisy.epsilon() == math.inf
        assert "no differential privacy" in noisy.summary()
    other = dpsgd(*batch, max_grad_norm=bound, sigma=1e-2, generator=seeded(1))
    assert not torch.equal(other.gradients["0.bias"], noisy.gradients["0.bias"])


def test_the_papers_noise_in_opacus_units():
    planted = plant(20, m=90)
    update = dpsgd(planted.model, planted.inputs, planted.labels, max_grad_norm=1.0, sigma=1e-4)
    assert update.noise_multiplier == pytest.approx(0.002)
    # Gaussian mechanism: 1 / (2 z^2) = 125,000 and a little for the conversion to epsilon.
    assert 125_000 < update.epsilon(1e-5) < 128_000
    assert update.epsilon(1e-5, steps=10) > 5 * update.epsilon(1e-5)
    assert "noise multiplier 0.002" in update.summary()


def test_epsilon_of_usual_noise_is_opacus_own():
    from opacus.accountants import RDPAccountant

    accountant = RDPAccountant()
    accountant.history = [(1.1, 0.01, 500)]
    assert epsilon([(1.1, 0.01, 500)], 1e-5) == accountant.get_epsilon(1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_grad_norm": 0.0}, "max_grad_norm > 0"),
        ({"max_grad_norm": 1.0, "sigma": 1.0, "noise_multiplier": 1.0}, "got both"),
        ({"max_grad_norm": 1.0, "sigma": -1.0}, "sigma >= 0"),
        ({"max_grad_norm": None, "noise_multiplier": 1.0}, "give the noise as sigma"),
        ({"max_grad_norm": [1.0, 1.0]}, "one max_grad_norm for flat"),
        ({"max_grad_norm": [1.0], "clipping": "per_layer"}, "each of 6 parameters, got 1"),
        ({"max_grad_norm": None, "clipping": "per_layer"}, "needs max_grad_norm"),
        ({"max_grad_norm": 1.0, "clipping": "ghost"}, "expected clipping"),
    ],
)
def test_options_are_checked(options, message):
    planted = plant(3)
    with pytest.raises(InvalidOption, match=message):
        dpsgd(planted.model, planted.inputs, planted.labels, **options)


@pytest.mark.parametrize(("name", "bound"), [("cifar10", 2.0), ("tiny_imagenet", 1.0)])
def test_clipping_alone_protects_nobody(name, bound, data_root):
    images, model, x, y = real_batch(data_root, name, seed=1)
    update = dpsgd(model, x, y, max_grad_norm=bound)
    result = spear.invert(update.view(), model=model)
    found = score(images.to_pixels(result.inputs), images.to_pixels(x))
    assert (result.outcome, result.proof) == (Outcome.EXACT, Proof.REPLAY)
    assert bool(result.certified.all())
    assert found.exact
    assert found.worst > 100
    assert torch.equal(result.labels, y[found.truth])


def test_per_layer_clipping_is_never_called_exact(data_root):
    _, model, x, y = real_batch(data_root, "cifar10", b=10, m=120, seed=1)
    update = dpsgd(model, x, y, max_grad_norm=2.0, clipping="per_layer")
    assert "clipped on its own" in update.remark
    view = update.view()
    assert view.clipped_apart
    for given in (view, bare(view).told(clipping="per-layer")):
        result = spear.invert(given)
        assert result.outcome is Outcome.APPROXIMATE
        assert not bool(result.certified.any())
        assert "clipped apart" in result.explanation
    # The directions are right all the same: each sample comes out but for one factor.
    near = nn.functional.normalize(result.inputs, dim=1) @ nn.functional.normalize(x, dim=1).T
    assert float(near.amax(1).min()) > 0.9999


def test_per_layer_clipping_shows_without_being_told(data_root):
    """Sign patterns give away a scale that is far off, if W x and bias are of comparable size."""
    _, model, x, y = real_batch(data_root, "cifar10", b=10, m=120)
    update = dpsgd(model, x, y, max_grad_norm=1.0, clipping="per_layer")
    view = spear.observe(model, update.gradients)
    for given in (view, bare(view)):
        result = spear.invert(given)
        assert result.outcome is Outcome.APPROXIMATE
        assert not bool(result.certified.any())
        assert "clipped apart" in result.explanation


def train(sampling=True, clipping="flat", bound=1.0, multiplier=0.0, physical=None, lr=0.1, **more):
    """A real run: 60 samples, logical batches of 6. Returns the capture and what is left behind."""
    generator = seeded(0)
    x = torch.randn(60, 50, generator=generator)
    y = torch.randint(10, (60,), generator=generator)
    loader = DataLoader(TensorDataset(x, y), batch_size=6)
    net = mlp(50, 10, width=90, depth=3, seed=0)
    engine = PrivacyEngine(accountant="rdp")
    made = engine.make_private(
        module=net,
        optimizer=torch.optim.SGD(net.parameters(), lr=lr),
        data_loader=loader,
        noise_multiplier=multiplier,
        max_grad_norm=bound,
        clipping=clipping,
        poisson_sampling=sampling,
        **more,
    )
    model, optimizer, batches = made[0], made[1], made[-1]
    criterion = made[2] if len(made) == 4 else nn.CrossEntropyLoss()  # ghost clipping has its own
    accountants_hook, seen_batches = optimizer.step_hook, []

    def run(batches):
        for inputs, targets in batches:
            optimizer.zero_grad()
            criterion(model(inputs), targets).backward()
            optimizer.step()
            seen_batches.append(inputs)

    with capture(optimizer, model, accountant=engine.accountant) as seen:
        if physical is None:
            run(batches)
        else:
            with BatchMemoryManager(
                data_loader=batches, max_physical_batch_size=physical, optimizer=optimizer
            ) as smaller:
                run(smaller)
    assert optimizer.step_hook is accountants_hook
    return seen, seen_batches, engine, net


def test_a_training_run_is_read_step_by_step():
    seen, batches, engine, net = train()
    assert len(seen.steps) == len(batches) == sum(n for *_, n in engine.accountant.history)
    assert [step.samples for step in seen.steps] == [len(batch) for batch in batches]
    assert len({step.samples for step in seen.steps}) > 1  # Poisson sampling
    for step, batch in zip(seen.steps, batches, strict=True):
        result = spear.invert(step.view(), model=step.model())
        assert (result.outcome, result.batch_size) == (Outcome.EXACT, len(batch))
        assert worst_error(result.inputs, batch) < 1e-3
    assert not torch.equal(seen.steps[0].weights["0.weight"], net[0].weight)
    assert not seen.steps[0].model()[0]._forward_hooks


def test_noise_and_epsilon_of_a_run():
    seen, _, engine, _ = train(multiplier=0.5, bound=2.0)
    first, last = seen.steps[0], seen.steps[-1]
    assert first.sigma == pytest.approx(0.5 * 2.0 / 6)
    assert (first.noise_multiplier, first.max_grad_norm) == (0.5, 2.0)
    assert first.expected_batch_size == 6
    assert first.spent(1e-5) < last.spent(1e-5)
    assert last.spent(1e-5) == pytest.approx(engine.get_epsilon(1e-5))
    assert "noise of standard deviation 1.7e-01" in last.remark


def test_virtual_batches_come_as_one_step():
    seen, batches, _, _ = train(sampling=False, physical=2)
    assert len(batches) == 30
    assert len(seen.steps) == 10
    assert all(step.samples is None for step in seen.steps)
    result = spear.invert(seen.steps[0].view(), model=seen.steps[0].model())
    assert (result.outcome, result.batch_size) == (Outcome.EXACT, 6)
    assert worst_error(result.inputs, torch.cat(batches[:3])) < 1e-3


def test_a_run_with_per_layer_clipping_says_so():
    seen, _, _, _ = train(clipping="per_layer", bound=[0.3] * 6)
    step = seen.steps[0]
    assert step.max_grad_norm == (0.3,) * 6
    assert "per-layer clipping" in step.remark
    view = step.view()
    for given in (view, bare(view).told(clipping="per-layer")):
        result = spear.invert(given)
        # So far off are the scales that signs contradict zeros.
        assert (result.outcome, result.cause) == (Outcome.INCONCLUSIVE, Cause.UNFIT)
        assert len(result.inputs) == 0
        assert "clipped apart" in result.explanation


def test_ghost_clipping_is_flat_clipping():
    seen, batches, _, _ = train(grad_sample_mode="ghost", criterion=nn.CrossEntropyLoss())
    for step, batch in list(zip(seen.steps, batches, strict=True))[:3]:
        result = spear.invert(step.view(), model=step.model())
        assert result.outcome is Outcome.EXACT
        assert worst_error(result.inputs, batch) < 1e-3


def test_captures_nest_and_close_in_order():
    net = mlp(20, 4, width=30, depth=2, seed=0)
    engine = PrivacyEngine(accountant="rdp")
    model, optimizer, _ = engine.make_private(
        module=net,
        optimizer=torch.optim.SGD(net.parameters(), lr=0.1),
        data_loader=DataLoader(TensorDataset(torch.randn(6, 20)), batch_size=3),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
    )
    accountants = optimizer.step_hook
    with capture(optimizer, model) as outer, capture(optimizer, net) as inner:
        nn.functional.cross_entropy(model(torch.randn(3, 20)), torch.tensor([0, 1, 2])).backward()
        optimizer.step()
    assert len(outer.steps) == len(inner.steps) == len(engine.accountant) == 1
    assert inner.steps[0].spent() is None  # nobody said where the accountant is
    inner.close()  # a second time changes nothing
    assert optimizer.step_hook is accountants


def test_only_private_optimisers_of_this_model_are_captured():
    net = mlp(5, 2, width=4, depth=2)
    with pytest.raises(InvalidOption, match="make_private"):
        capture(torch.optim.SGD(net.parameters(), lr=0.1), net)
    from opacus.optimizers import DPOptimizer

    private = DPOptimizer(
        torch.optim.SGD(net.parameters(), lr=0.1),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        expected_batch_size=2,
    )
    with pytest.raises(InvalidOption, match="does not have"):
        capture(private, mlp(5, 2, width=4, depth=2))


def test_nothing_warns_when_a_step_is_taken():
    planted = plant(4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        update = dpsgd(planted.model, planted.inputs, planted.labels, max_grad_norm=1.0, sigma=1e-6)
        assert update.epsilon() > 1e6


def test_without_opacus_the_error_names_the_extra(monkeypatch):
    for name in [
        name
        for name in sys.modules
        if name.startswith(("spear.integrations.opacus", "spear.federated.dpsgd"))
    ]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "opacus", None)
    with pytest.raises(spear.MissingExtra, match=r"spear-fl\[opacus\]"):
        importlib.import_module("spear.integrations.opacus")
