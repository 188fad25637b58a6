"""How the update came about: defences, local training, aggregation; or no gradient of this model."""

from __future__ import annotations

import copy
import itertools
import math
from dataclasses import replace
from random import Random
from typing import Any

import torch
from torch import Tensor, nn

import spear
from spear.federated import defences, fedavg, mlp
from verdict_cases.base import (
    Case,
    Client,
    Sent,
    Settings,
    Update,
    backward,
    cross_entropy,
    drawn,
    excess,
    generator,
    names_of,
    overall,
    party,
    rounded,
    small,
    summed,
)

# What clients do to their update.


def noisy(rng: Random) -> Case:
    one = small(rng)
    sigma = 10 ** rng.uniform(-10, -2)
    where = rng.choice(["all", "all", "all", "weights", "biases", "laplace"])
    clean = one.gradients()
    update, g = dict(clean), generator(rng)
    for name, tensor in update.items():
        if where == "weights" and name.endswith("bias"):
            continue
        if where == "biases" and name.endswith("weight"):
            continue
        drawn_noise = torch.randn(tensor.shape, generator=g, dtype=tensor.dtype)
        if where == "laplace":
            uniform = torch.rand(tensor.shape, generator=g, dtype=tensor.dtype) - 0.5
            drawn_noise = -uniform.sign() * torch.log1p(-2 * uniform.abs().clamp_max(0.4999))
        update[name] = tensor + sigma * drawn_noise
    case = one.case(update, sigma=rounded(sigma), where=where)
    label = f"{where} 1e{math.floor(math.log10(sigma))}"
    return replace(case, noise=excess(update["0.weight"], clean["0.weight"]), noise_label=label)


def pruned(rng: Random) -> Case:
    one = small(rng)
    share = rng.choice([0.001, 0.01, 0.03, 0.1, 0.3, 0.5, 0.9, 0.99])
    how = rng.choice(["smallest", "smallest", "random", "rows"])
    update = one.gradients()
    if how == "smallest":
        case = one.case(defences.prune(update, share), share=share, how=how)
        return replace(case, noise_label="pruned")
    g = generator(rng)
    for name, tensor in update.items():
        shape = tensor.shape[:1] if how == "rows" else tensor.shape
        keep = (torch.rand(shape, generator=g) >= share).to(tensor)
        update[name] = tensor * (keep if keep.ndim == tensor.ndim else keep[:, None])
    return replace(one.case(update, share=share, how=how), noise_label="pruned")


def quantised(rng: Random) -> Case:
    one = small(rng)
    how = rng.choice(["float16", "bfloat16", "4", "6", "8", "10", "12", "14", "16", "sign"])
    update = clean = one.gradients()
    if how in ("float16", "bfloat16"):
        update = defences.half(update, getattr(torch, how))
    elif how == "sign":
        update = {name: tensor.sign() * tensor.abs().mean() for name, tensor in update.items()}
    else:
        update = defences.quantise(update, int(how))
    noise = excess(update["0.weight"], clean["0.weight"])
    return replace(one.case(update, how=how), noise=noise, noise_label=f"quantised {how}")


def local_training(rng: Random) -> Case:
    """FedAvg, told rightly, wrongly, or not at all."""
    one = small(rng, dtype=torch.float32)
    lr, epochs = rng.choice([0.1, 0.03, 0.01, 0.001]), rng.choice([1, 1, 2, 3, 5, 10])
    batch = rng.choice([None, None, None, max(1, len(one.x) // 2)])
    momentum = rng.choice([0.0, 0.0, 0.9])
    after = fedavg(
        one.model,
        one.x,
        one.y,
        lr=lr,
        epochs=epochs,
        batch_size=batch,
        momentum=momentum,
        generator=generator(rng),
    )
    told: Settings = {"lr": lr, "epochs": epochs, "batch_size": batch, "momentum": momentum}
    lie = rng.choice(["", "", "", "", "lr", "epochs", "momentum", "unknown"])
    if lie == "unknown":
        told = {"lr": lr}
    elif lie == "lr":
        told["lr"] = lr * rng.choice([0.5, 1.1, 2.0])
    elif lie == "epochs":
        told["epochs"] = epochs + 1
    elif lie == "momentum":
        told["momentum"] = 0.9 - momentum
    view = spear.observe(one.model, after=after, **told)
    settings = {
        **one.settings,
        "lr": lr,
        "epochs": epochs,
        "minibatch": batch,
        "momentum": momentum,
    }
    settings["lie"] = lie
    known = {"pixels": one.pixels, "span": one.span, "columns": one.sent().columns}
    label = "FedAvg, told wrongly" if lie else ""
    return Case(view, one.model, one.x, settings, noise_label=label, **known)


def clipped(rng: Random) -> Case:
    """DP-SGD's clipping, sample by sample: over all parameters, or each tensor on its own."""
    one = small(rng)
    apart = rng.random() < 0.5
    parts = [backward(one.model, one.x[i : i + 1], one.y[i : i + 1]) for i in range(len(one.x))]
    norms = [overall(part) for part in parts]
    limit = sorted(norms)[len(norms) // 2] * rng.choice([0.5, 1.0, 1.001])
    if not apart:
        total = summed(p.times(min(1.0, limit / n)) for p, n in zip(parts, norms, strict=True))
        return one.case(total, apart=apart, limit=limit)
    factors = [
        {name: min(1.0, limit / max(2 * float(t.norm()), 1e-12)) for name, t in part.update.items()}
        for part in parts
    ]
    total = summed(
        Sent({name: t * f[name] for name, t in part.update.items()}, part.columns * f["0.bias"])
        for part, f in zip(parts, factors, strict=True)
    )
    ratios = one.x.new_tensor([f["0.weight"] / f["0.bias"] for f in factors])
    return replace(one.case(total, apart=apart, limit=limit), seen=one.x * ratios[:, None])


# How the update came about: local training, aggregation, precision, weights that are stale.


def returned(one: Client, after: Update, told: dict[str, Any], **more: Any) -> Case:
    """The case of weights that a client sends back."""
    case = one.case(one.sent(), **more)
    view = spear.observe(one.model, after=after, **told)
    return replace(case, view=view)


def wrong_rate(rng: Random) -> Case:
    """Several epochs, and a learning rate told that is slightly another; or the right one."""
    one = party(rng, dtype=torch.float32)
    lr, epochs = rng.choice([0.1, 0.03, 0.01]), rng.choice([2, 3, 5, 10])
    momentum = rng.choice([0.0, 0.0, 0.9])
    lie = rng.choice([1.0, 1.001, 1.003, 1.01, 1.03, 1.1, 0.99])
    options = {"lr": lr, "epochs": epochs, "momentum": momentum}
    after = fedavg(one.model, one.x, one.y, **options)
    case = returned(one, after, {**options, "lr": lr * lie}, **options, lie=lie)
    return case if lie == 1 else replace(case, noise_label="FedAvg, told wrongly")


def trained_apart(rng: Random) -> Case:
    """Several epochs, in mini-batches or not; biases or the first weights at a rate of their own."""
    one = party(rng, dtype=torch.float32)
    size = rng.choice([None, max(1, len(one.x) // 2), max(1, len(one.x) // 3)])
    options = {"lr": rng.choice([0.1, 0.03, 0.01]), "epochs": rng.choice([1, 2, 5, 20])}
    options |= {"batch_size": size} if size else {}
    after = fedavg(one.model, one.x, one.y, generator=generator(rng), **options)
    factor = rng.choice([1.0, 0.5, 0.9, 1.1, 2.0])
    before, (weight, bias) = one.model.state_dict(), names_of(one.model)
    part = rng.choice([weight, bias])
    if factor != 1 and part == bias:
        apart = {k: v for k, v in after.items() if k.endswith("bias")}
        after |= {k: before[k] + factor * (v - before[k]) for k, v in apart.items()}
    elif factor != 1:
        after[part] = before[part] + factor * (after[part] - before[part])
    case = returned(one, after, options, **options, part=part, factor=factor)
    if factor == 1:
        return case
    seen = one.x / factor if part == bias else one.x * factor
    return replace(case, seen=seen, noise_label="FedAvg, trained apart")


def autocast(rng: Random) -> Case:
    """A client in torch.autocast: sums in float32 of products in bfloat16."""
    one = party(rng, dtype=torch.float32, b=rng.choice([1, 2, 3, 4, 6]))
    clean = one.gradients()

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(outputs.float(), targets)

    with torch.autocast("cpu", dtype=torch.bfloat16):
        sent = one.sent(loss)
    weight, _ = names_of(one.model)
    noise = excess(sent.update[weight], clean[weight])
    columns = sent.columns.float()
    case = one.case(replace(sent, columns=columns))
    return replace(case, noise=noise, noise_label="autocast bfloat16")


def aggregates(rng: Random) -> Case:
    """Micro-batches accumulated, clients averaged, or the whole times a factor."""
    kind = rng.choice(["micro-batches", "weighted", "unweighted", "factor", "factor"])
    one = party(rng, b=rng.choice([3, 5, 6, 8, 10]))
    if kind == "factor":
        factor = rng.choice([0.5, 3.7, 1e-3, 1 / 3, 1000.0, -1.0])
        return one.case(one.sent().times(factor), kind=kind, factor=rounded(factor))
    b = len(one.x)
    cut = rng.randrange(1, b)
    ends = [0, cut, b]
    if kind == "micro-batches":
        size = rng.choice([2, 3, 4])
        ends = [*range(0, b, size), b]
    pieces = list(itertools.pairwise(ends))
    parts = [backward(one.model, one.x[i:j], one.y[i:j]) for i, j in pieces]
    shares = [1 / len(parts)] * len(parts)
    if kind == "weighted":
        shares = [(j - i) / b for i, j in pieces]
    total = summed(part.times(share) for part, share in zip(parts, shares, strict=True))
    return one.case(total, kind=kind, sizes=[j - i for i, j in pieces])


def stale(rng: Random) -> Case:
    """The client's weights are not quite those that the server believes."""
    one = party(rng)
    change = 10 ** rng.uniform(-6, -2)
    client_model = copy.deepcopy(one.model)
    g = generator(rng)
    with torch.no_grad():
        for p in client_model.parameters():
            step = torch.randn(p.shape, generator=g).to(p)
            p.add_(change * (p.abs().mean() + 1e-12) * step)
    case = one.case(backward(client_model, one.x, one.y), change=rounded(change))
    return replace(case, noise_label="other weights")


def odd_optimisers(rng: Random) -> Case:
    """One step, or the gradient, after what optimisers and servers do, told or not."""
    kind = rng.choice(
        ["global clip", "weight decay", "momentum", "adam", "server rate", "two steps", "proximal"]
    )
    one = party(rng, dtype=torch.float32)
    if kind == "global clip":
        sent = one.sent()
        limit = overall(sent) * rng.choice([0.1, 0.7])
        return one.case(sent.times(limit / overall(sent)), kind=kind)
    lr = rng.choice([0.1, 0.01])
    local = copy.deepcopy(one.model)
    told: dict[str, Any] = {"lr": lr, "epochs": 1}
    if kind == "adam":
        optimiser: Any = torch.optim.Adam(local.parameters(), lr=lr)
    elif kind == "weight decay":
        optimiser = torch.optim.SGD(local.parameters(), lr=lr, weight_decay=0.01)
    elif kind == "momentum":
        optimiser = torch.optim.SGD(local.parameters(), lr=lr, momentum=0.9)
    else:
        optimiser = torch.optim.SGD(local.parameters(), lr=lr)

    def step(x: Tensor, y: Tensor) -> None:
        optimiser.zero_grad()
        cross_entropy(local(x), y).backward()
        optimiser.step()

    if kind == "momentum":  # carried over from a round before: the buffer holds other data
        other = one.x.roll(1, 1) * 0.5
        step(other, one.y)
        local.load_state_dict(one.model.state_dict())
    step(one.x, one.y)
    if kind == "two steps":
        step(one.x, one.y)
    if kind == "proximal":
        optimiser.zero_grad()
        pull = sum(
            (p - q.detach()).square().sum()
            for p, q in zip(local.parameters(), one.model.parameters(), strict=True)
        )
        (cross_entropy(local(one.x), one.y) + 0.5 * pull).backward()
        optimiser.step()
        told["epochs"] = 2
    after = {name: t.detach().clone() for name, t in local.state_dict().items()}
    if kind == "server rate":
        before = one.model.state_dict()
        after = {name: before[name] + 0.5 * (t - before[name]) for name, t in after.items()}
    case = returned(one, after, told, kind=kind, lr=lr)
    case = replace(case, noise_label="FedAvg, told wrongly")
    if kind == "momentum":  # the other round's samples are in it, too
        rest = 0.9 * backward(one.model, other, one.y).columns
        both = {"truth": torch.cat([one.x, other]), "columns": torch.cat([case.columns, rest])}
        case = replace(case, **both)
    return case


def mixed_precisions(rng: Random) -> Case:
    """Some tensors of the update in float16 or bfloat16, the others in float32."""
    one = party(rng, dtype=torch.float32, b=rng.choice([2, 3, 4, 6]))
    sent = one.sent()
    weight, bias = names_of(one.model)
    kind = rng.choice(["weight", "weights", "all but the layer", "biases"])
    dtype = rng.choice([torch.float16, torch.float16, torch.bfloat16])
    chosen = {
        "weight": [weight],
        "weights": [name for name in sent.update if name.endswith("weight")],
        "all but the layer": [name for name in sent.update if name not in (weight, bias)],
        "biases": [name for name in sent.update if name.endswith("bias")],
    }[kind]
    update = {name: t.to(dtype) if name in chosen else t for name, t in sent.update.items()}
    noise = excess(update[weight].float(), sent.update[weight])
    label = f"{kind} {str(dtype)[6:]}"
    case = one.case(replace(sent, update=update), kind=kind, precision=str(dtype)[6:])
    return replace(case, noise=noise, noise_label=label)


# Updates that are no gradient of this model at its weights.


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
