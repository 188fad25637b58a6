"""What clients do to their update."""

from __future__ import annotations

import math
from dataclasses import replace
from random import Random

import torch

import spear
from spear.federated import defences, fedavg
from verdict_cases.base import (
    Case,
    Sent,
    Settings,
    backward,
    excess,
    generator,
    overall,
    rounded,
    small,
    summed,
)


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
