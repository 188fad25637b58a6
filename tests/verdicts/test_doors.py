"""Library, command line and Flower give the same verdict, on 16 updates."""

import random

import pytest
import torch
from torch import nn

import spear
from spear import Outcome, Protocol
from spear.federated import defences, fedavg, fedsgd
from spear.files.update_files import UpdateFiles
from spear.report.from_files import invert_files
from support.command_line import in_this_process
from support.planted import plant

pytest.importorskip("flwr", reason="needs the flower extra")

from spear.integrations.examiner import Examiner
from spear.integrations.flower.remarks import FLOWER
from support.flower_federation import ArrayRecord

FORMS = {"gradient": "gradients", "weights": "after", "difference": "difference"}
FILES = {"gradient": "update", "weights": "after", "difference": "difference"}


class Drawn:
    """A random update: any form, described truthfully or not, of any width and batch size."""

    def __init__(self, seed):
        rng = random.Random(seed)
        b, m = rng.choice([1, 3, 5, 8]), rng.choice([30, 60])
        planted = plant(b, m=m, n=rng.choice([20, 40]), depth=rng.choice([2, 3]), seed=seed)
        self.model = planted.model
        smooth = nn.CrossEntropyLoss(label_smoothing=rng.choice([0.0, 0.0, 0.1]))
        sent = rng.choice(["gradient", "gradient", "weights", "weights", "difference"])
        self.sends = rng.choice([sent] * 4 + ["gradient", "weights", "difference"])
        lr, epochs = rng.choice([0.01, 0.1]), rng.choice([1, 1, 3])
        before = {name: p.detach() for name, p in self.model.named_parameters()}
        if sent == "gradient":
            update = fedsgd(self.model, planted.inputs, planted.labels, smooth)
        else:
            args = (self.model, planted.inputs, planted.labels)
            after = fedavg(*args, lr=lr, epochs=epochs, loss=smooth)
            update = {name: after[name] for name in before}
            if sent == "difference":
                update = {name: update[name] - before[name] for name in before}
        noise = rng.choice([0.0, 0.0, 0.0, 1e-6, 1e-3])
        if noise:
            update = defences.add_noise(update, noise, torch.Generator().manual_seed(seed))
        if sent == "gradient" and rng.random() < 0.2:
            update = {name: value.half() for name, value in update.items()}
        self.update = update
        self.told = {"samples": rng.choice([None, b])}
        if self.sends != "gradient":
            self.told |= {"lr": rng.choice([None, lr, lr]), "epochs": rng.choice([None, epochs])}

    @property
    def protocol(self):
        return Protocol(sends=self.sends, **self.told)


def by_the_library(drawn, folder):
    form = {FORMS[drawn.sends]: drawn.update}
    return spear.invert(spear.observe(drawn.model, **form, **drawn.told), max_seconds=60)


def write(drawn, folder):
    torch.save(drawn.model.state_dict(), folder / "w.pt")
    torch.save(drawn.update, folder / "u.pt")


def by_files(drawn, folder):
    write(drawn, folder)
    files = UpdateFiles(
        folder / "w.pt", **{FILES[drawn.sends]: folder / "u.pt"}, protocol=drawn.protocol
    )
    return invert_files(files, max_seconds=60).findings[0]


def by_flower(drawn, folder):
    examiner = Examiner.new(FLOWER, drawn.model, {"sends": drawn.sends, "max_seconds": 60.0})
    before = ArrayRecord(drawn.model.state_dict())
    return examiner.examine("a client", before, drawn.update, drawn.protocol).finding


def verdict(found):
    error = found.predicted_error
    return (
        (found.outcome, found.cause, found.proof, found.reason, tuple(found.assumptions)),
        (found.batch_size, found.match, [bool(one) for one in found.certified]),
        None if found.labels is None else found.labels.tolist(),
        None if error is None else [float(one) for one in error],
    )


# Every form told as itself and as each other one, with and without noise, halves, epochs and rates.
SEEDS = (0, 1, 3, 4, 8, 9, 10, 11, 13, 15, 17, 18, 19, 21, 22, 23)


@pytest.mark.parametrize("seed", SEEDS)
def test_one_update_has_one_verdict(seed, tmp_path):
    drawn = Drawn(seed)
    library = by_the_library(drawn, tmp_path)
    for door in (by_files, by_flower):
        found = door(drawn, tmp_path)
        assert verdict(found) == verdict(library), door.__name__
        assert torch.equal(found.inputs, library.inputs)


@pytest.mark.parametrize("seed", [0, 10])
def test_the_command_says_what_the_library_says(seed, tmp_path):
    drawn = Drawn(seed)
    library = by_the_library(drawn, tmp_path)
    write(drawn, tmp_path)
    told = {name: value for name, value in drawn.told.items() if value is not None}
    options = [part for name, value in told.items() for part in (f"--{name}", str(value))]
    done = in_this_process(
        *("invert", "--weights", tmp_path / "w.pt", f"--{FILES[drawn.sends]}", tmp_path / "u.pt"),
        *(*options, "-q", "--json", tmp_path / "r.json", "--max-seconds", "60"),
    )
    codes = {Outcome.EXACT: 20, Outcome.FAILED: 0, Outcome.INCONCLUSIVE: 30}
    assert done.returncode == codes.get(library.outcome, 10)
    assert verdict(spear.load(tmp_path / "r.json").findings[0]) == verdict(library)
