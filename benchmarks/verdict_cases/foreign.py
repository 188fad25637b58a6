"""Updates that are no gradient of this model at its weights."""

from __future__ import annotations

import copy
from dataclasses import replace
from random import Random

import torch
from torch import nn

from spear.federated import mlp
from verdict_cases.base import Case, Sent, Settings, cross_entropy, drawn, generator, small


def random_matrix(rng: Random) -> Case:
    one = small(rng)
    g = generator(rng)
    how = rng.choice(
        ["gauss", "low rank", "low rank positive", "sparse", "integers", "ones", "zeros"]
    )
    update = {}
    rank = rng.choice([1, 2, 5, 10])
    for name, tensor in one.gradients().items():
        fresh = torch.randn(tensor.shape, generator=g, dtype=tensor.dtype)
        if how.startswith("low rank") and tensor.ndim == 2:
            D = torch.randn(len(tensor), rank, generator=g, dtype=tensor.dtype)
            X = torch.randn(rank, tensor.shape[1], generator=g, dtype=tensor.dtype)
            if how.endswith("positive"):
                D, X = D.clamp_min(0), X.abs()
            fresh = D @ X
            update[name.replace("weight", "bias")] = D.sum(1)
        elif how == "sparse":
            fresh = fresh * (fresh > 2)
        elif how == "integers":
            fresh = fresh.round()
        elif how in ("ones", "zeros"):
            fresh = torch.full_like(fresh, float(how == "ones"))
        update.setdefault(name, fresh)
    return replace(one.case(update, how=how, rank=rank), truth=None, honest=False)


def other_model(rng: Random) -> Case:
    """Gradients taken at other weights than the server believes, far or near, or another network."""
    one = small(rng)
    how = rng.choice(["seed", "step", "step", "later layers", "gelu", "leaky", "tanh", "dropout"])
    client_model = copy.deepcopy(one.model)
    settings: Settings = {"how": how}
    if how in ("seed", "later layers"):
        n, m, depth = one.x.shape[1], one.settings["m"], one.settings["depth"]
        other = mlp(n, 10, width=m, depth=depth, seed=rng.randrange(1 << 20)).to(one.x.dtype)
        if how == "later layers":
            other[0].load_state_dict(one.model[0].state_dict())
        client_model = other
    elif how == "step":
        settings["change"] = 10 ** rng.uniform(-7, -1)
        g = generator(rng)
        with torch.no_grad():
            for p in client_model.parameters():
                step = torch.randn(p.shape, generator=g, dtype=p.dtype)
                p.add_(settings["change"] * p.abs().mean() * step)
    else:
        kinds = {"gelu": nn.GELU(), "leaky": nn.LeakyReLU(0.1), "tanh": nn.Tanh()}
        for i, module in enumerate(client_model):
            if isinstance(module, nn.ReLU):
                after = kinds.get(how) or nn.Sequential(nn.ReLU(), nn.Dropout(0.3))
                client_model[i] = after
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(rng.randrange(1 << 31))
        parameters = list(client_model.parameters())
        gradients = torch.autograd.grad(cross_entropy(client_model(one.x), one.y), parameters)
    names = [name for name, _ in one.model.named_parameters()]
    case = one.case(dict(zip(names, gradients, strict=True)), **settings)
    return replace(case, noise_label="other weights")


def stitched(rng: Random) -> Case:
    """Pieces of the updates of two clients."""
    one = small(rng)
    two = one.with_batch(*drawn(one.source, len(one.x), rng)[:2])
    two = replace(two, x=two.x.to(one.x.dtype))
    a, b = one.gradients(), two.gradients()
    how = rng.choice(["layers", "bias", "rows", "columns", "sum", "weighted", "one entry"])
    mixed = dict(a)
    g = generator(rng)
    for name in a:
        if how == "sum":
            mixed[name] = a[name] + b[name]
        elif how == "weighted":
            mixed[name] = a[name] + 0.3 * b[name]
        elif (how == "layers" and not name.startswith("0.")) or (
            how == "bias" and name == "0.bias"
        ):
            mixed[name] = b[name]
        elif how in ("rows", "columns") and a[name].ndim == 2:
            dim = 0 if how == "rows" else 1
            taken = torch.rand(a[name].shape[dim], generator=g) < 0.5
            taken = taken[:, None] if dim == 0 else taken[None]
            mixed[name] = torch.where(taken, a[name], b[name])
        elif how == "one entry" and name == "0.weight":
            mixed[name] = a[name].clone()
            mixed[name][0] = b[name][0]
    unchanged = all(torch.equal(mixed[name], a[name]) for name in a)  # both neurons were off
    if how == "layers" or unchanged:
        return one.case(mixed, how=how)  # all that the layer shows is the first client's
    truth = torch.cat([one.x, two.x])
    return replace(one.case(mixed, how=how), truth=truth, columns=None, noise_label="two clients")


def adversarial(rng: Random) -> Case:
    """lambda = 1 by construction, and no gradient of the model: must never pass the replay.

    Inputs are made up, and every column of dL/dZ is zero where they switch a neuron off. What is
    not zero is anything but a gradient the network gives.
    """
    one = small(rng, dtype=torch.float64)
    how = rng.choice(["random", "positive", "constant", "swapped labels", "soft labels", "scaled"])
    update = one.gradients()
    layer = one.model[0]
    fake = one.x[torch.randperm(len(one.x), generator=generator(rng))].roll(7, 1)
    with torch.no_grad():
        on = (layer(fake) > 0).to(one.x)  # (b, m)
    g = generator(rng)
    D = torch.randn(on.shape, generator=g, dtype=on.dtype) * on
    if how == "positive":
        D = D.abs()
    elif how == "constant":
        D = on * torch.rand(len(on), 1, generator=g, dtype=on.dtype)
    faked = one.with_batch(fake, one.y)
    if how in ("random", "positive", "constant"):
        own = faked.gradients() if rng.random() < 0.5 else update
        layers = {"0.weight": D.T @ fake, "0.bias": D.sum(0)}
        return replace(faked.case(Sent({**own, **layers}, D), how=how), honest=False)
    if how == "swapped labels":  # the first layer of one set of labels, the rest of another
        wrong = faked.sent(y=(one.y + 1) % 10)
        behind = {k: v for k, v in faked.gradients().items() if not k.startswith("0.")}
        return replace(faked.case(wrong.changed(behind), how=how), honest=False)
    if how == "soft labels":  # honest after all, if targets are free
        soft = torch.rand(len(fake), 10, generator=g, dtype=on.dtype).softmax(1)
        return faked.case(faked.sent(y=soft), how=how)
    # no bias, so that any scale fits the signs; the bias gradient tells another one
    with torch.no_grad():
        layer.bias.zero_()
    factor = rng.choice([0.5, 0.99, 1.003, 2.0])
    sent = faked.sent()
    sent = Sent({**sent.update, "0.bias": sent.update["0.bias"] * factor}, sent.columns * factor)
    case = faked.case(sent, how=how, factor=factor)
    return replace(case, seen=fake / factor, honest=False)
