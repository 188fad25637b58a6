"""Reports of every kind, small and seeded, for the tests of the page and of the JSON."""

from __future__ import annotations

import dataclasses
import functools

import torch
from torch import nn

import spear
from spear.inversion import Outcome
from spear.judge import Cause, Proof
from spear.report import (
    Drawing,
    Finding,
    ImageFormat,
    Level,
    Remark,
    Report,
    Table,
    compare,
    plots,
)

IMAGE_FORMAT = ImageFormat((3, 8, 8), (0.5,), (0.25,))
CAUSES = {
    Outcome.EXACT: Cause.PROVED,
    Outcome.PARTIAL: Cause.MIXED,
    Outcome.APPROXIMATE: Cause.IMPRECISE,
    Outcome.INCONCLUSIVE: Cause.NO_GAP,
    Outcome.FAILED: Cause.NOISE,
}


def finding(
    k=4,
    b=4,
    *,
    outcome=Outcome.EXACT,
    image_format=IMAGE_FORMAT,
    true=True,
    name="update.safetensors",
    **more,
):
    """k of b samples, the last two of a partial outcome not certified."""
    generator = torch.Generator().manual_seed(k + 100 * b)
    n = image_format.inputs if image_format else 20
    inputs = torch.randn(b, n, generator=generator)
    order = torch.randperm(b, generator=generator)[:k]
    found = inputs[order] + 1e-6 * torch.randn(k, n, generator=generator)
    labels = torch.arange(b) % 10
    names = [f"photo {i}" for i in range(b)]
    truth = compare(found, inputs, labels, names=names, image_format=image_format) if true else None
    sure = {Outcome.EXACT: k, Outcome.PARTIAL: max(1, k - 2)}.get(outcome, 0)
    content = {
        "name": name,
        "layer": "attacking '0' (192 -> 40, ReLU after)\nit is the first of 3 linear layers",
        "outcome": outcome,
        "proof": Proof.REPLAY if sure else Proof.NONE,
        "reason": f"{sure} of {b} samples certified",
        "batch_size": b,
        "match": 1.0 if sure else None,
        "certified": tuple(i < sure for i in range(k)),
        "approximate": tuple(outcome is Outcome.APPROXIMATE for _ in range(k)),
        "inputs": found,
        "labels": labels[order] if sure else None,
        "predicted_error": tuple(1e-8 * (i + 1) for i in range(k)),
        "stats": {"factorise": 0.02, "search": 0.1, "rounds": 2, "starts": 160, "certify": 0.4},
        "image_format": image_format,
        "truth": truth,
        "notes": ("The update was taken for one step of plain SGD.",),
        "cause": CAUSES[outcome],
        "assumptions": ("no samples merged into one",) if sure else (),
    }
    return Finding(**{**content, **more})


def exact():
    made_with = {
        "command": "spear invert --weights before.safetensors --update grads.npz",
        "seed": 7,
    }
    return Report.new(
        "inversion",
        "What update.safetensors gives away",
        "All 4 samples visible in the update were recovered exactly, proved by replay.",
        [finding()],
        settings=made_with | {"lr": 0.01, "layers": ["0", "2"], "nested": {"a": None}},
        seconds=1.5,
    )


def partial():
    """Originals that nobody recovered, and recoveries that are not certified."""
    return Report.new(
        "inversion", "Partly", "2 of 6 came back.", [finding(4, 6, outcome=Outcome.PARTIAL)]
    )


def tabular():
    """A real inversion of rows of numbers, beside the truth."""
    generator = torch.Generator().manual_seed(3)
    net = nn.Sequential(nn.Linear(105, 100), nn.ReLU(), nn.Linear(100, 2)).double()
    for parameter in net.parameters():
        nn.init.normal_(parameter, std=0.2, generator=generator)
    rows = torch.randn(6, 105, generator=generator, dtype=torch.float64)
    labels = torch.tensor([0, 1, 1, 0, 1, 0])
    loss = nn.functional.cross_entropy(net(rows), labels)
    view = spear.observe(net, torch.autograd.grad(loss, list(net.parameters())))
    return spear.invert(view).report(truth=(rows, labels))


def flower():
    """Several findings over rounds and clients, two of each outcome."""
    findings = []
    for i in range(10):
        outcome = (*CAUSES,)[i % 5]
        known = outcome is not Outcome.INCONCLUSIVE
        k = 4 if known and outcome is not Outcome.FAILED else 0
        more = {"name": f"round {i // 8 + 1}, client {i % 8}", "true": known}
        findings.append(finding(k, 4 + i % 3 if known else 0, outcome=outcome, **more))
    remarks = [
        Remark(
            Level.EXPOSED, "FedAvg with one local step", "Each reply is one gradient, to scale."
        ),
        Remark(Level.PROTECTED, "Client-side noise", "Clients 3 and 7 add noise before they send."),
        Remark(Level.NOTE, "Server-side DP", "Noise added by the server protects nobody from it."),
    ]
    return Report.new(
        "flower",
        "Flower run of 2 rounds with 8 clients",
        "2 of 10 replies gave away every sample in them.",
        findings,
        remarks=remarks,
        settings={"command": "flwr run .", "rounds": 2, "clients": 8},
        seconds=312.4,
    )


def audit():
    """A sweep: tables with gaps, and a drawing by Matplotlib."""
    sizes = (4, 8, 16, 32, 64)
    rows = tuple(
        (b, noise, None if b == 64 else 1 - b / 64, f"{90 - b / 8:.1f} %", b > 32)
        for b in sizes
        for noise in (0.0, 1e-4, 1e-3)
    )
    columns = ("batch size", "noise σ", "exact share", "accuracy", "slow")
    title = "Where leakage starts and stops"
    with plots.style(page=True):
        figure = plots.figure(plots.PAGE_WIDTH)
        figure.subplots().plot(sizes, [1 - b / 64 for b in sizes], "o-", color=plots.BLUE)
        svg = plots.for_page(figure, "frontier")
    drawing = Drawing("The leakage frontier", svg, "Batches that came back whole.")
    return Report.new(
        "audit",
        title,
        "From noise 1e-3 on, this attack recovered nothing.",
        tables=[Table(title, columns, rows, "95 % Clopper-Pearson intervals.")],
        drawings=[drawing, dataclasses.replace(drawing, title="The same again")],
        remarks=[
            Remark(Level.NOTE, "No guarantee", "Fifteen settings were tried, 20 batches each.")
        ],
        settings={"command": "spear audit --samples 4,8,16,32,64"},
        seconds=75.0,
    )


def failure(outcome=Outcome.FAILED):
    """Nothing came back."""
    nothing = finding(0, 0, outcome=outcome, true=False, stats={"factorise": 0.01}, notes=())
    nothing = dataclasses.replace(nothing, batch_size=None, reason="the gradient is noise")
    return Report.new(
        "inversion", "What big.pt gives away", nothing.headline, [nothing], seconds=0.1
    )


@functools.cache  # the tests of the page and of the JSON share them
def every():
    """One of each kind by name."""
    return {
        "exact": exact(),
        "partial": partial(),
        "tabular": tabular(),
        "flower": flower(),
        "audit": audit(),
        "redacted": exact().redacted(),
        "failure": failure(),
        "inconclusive": failure(Outcome.INCONCLUSIVE),
        "bare": Report("check", "Nothing yet", "Nothing was attacked."),
    }
