"""Every command in one process, with a canary for a private batch: tests look at what it leaves."""

import json
import os
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from spear.federated import fedsgd, mlp
from support.command_line import in_this_process

INPUTS = 48
NET = "from spear.federated import mlp\n\ndef net():\n    return mlp(48, 3, width=60, depth=3)\n"


def canary(count):
    """Samples that are nowhere else: (count, 48), count <= 24."""
    drawn = torch.randn(24, INPUTS, dtype=torch.float64, generator=torch.Generator().manual_seed(7))
    return drawn[:count]


def plant(folder):
    """What the user gives: an update, its truth, data for an audit, a model."""
    folder.mkdir()
    model = mlp(INPUTS, 3, width=60, depth=3, seed=5).double()
    inputs, labels = canary(4), torch.tensor([2, 0, 1, 1])
    gradients = fedsgd(model, inputs, labels)
    save_file(model.state_dict(), folder / "before.safetensors")
    save_file({name: t.clone() for name, t in gradients.items()}, folder / "grads.safetensors")
    save_file({"inputs": inputs, "labels": labels}, folder / "truth.safetensors")
    (folder / "damaged.safetensors").write_bytes((folder / "grads.safetensors").read_bytes()[:-9])
    data = canary(24).float().numpy()
    np.savez(folder / "data.npz", inputs=data, labels=np.arange(24) % 3)
    (folder / "mynet.py").write_text(NET)


def main():
    given = Path.cwd() / "ward-7"  # a folder whose name is nobody's business
    plant(given)
    update = ["--weights", given / "before.safetensors", "--update", given / "grads.safetensors"]
    truth = ["--truth", given / "truth.safetensors", "--shape", "3x4x4"]
    audit = ["audit", "--model", f"{given / 'mynet.py'}:net", "--data", given / "data.npz"]
    audit += [
        "-b",
        "4",
        "--repeats",
        "1",
        "--training-rounds",
        "0",
        "--workers",
        "1",
        "--sigma",
        "0,0.1",
    ]
    commands = {
        "demo": (0, ["demo", "-b", "4", "-m", "60", "--pixels", "16"]),
        "terminal": (20, ["invert", *update, *truth, "-v"]),
        "asked": (20, ["invert", *update, *truth, "--json", "a.json", "--report", "new/a.html",
                       "--out", "samples", "--junit", "a.xml", "--sarif", "a.sarif"]),
        "redacted": (20, ["invert", *update, *truth, "--json", "r.json", "--report", "r.html",
                          "--redact"]),
        "damaged": (2, ["invert", *update[:3], given / "damaged.safetensors"]),
        "debug": (1, ["invert", *update[:3], given / "damaged.safetensors", "--debug"]),
        "check": (None, ["check", "--model", f"{given / 'mynet.py'}:net", "--report", "c.html"]),
        "audit": (20, [*audit, "--out", "full"]),
        "audit, then redacted": (20, [*audit, "--out", "full", "--redact"]),
        "audit redacted": (1, [*audit, "--out", "slim", "--redact", "--json", "s.json",
                                "--junit", "s.xml", "--sarif", "s.sarif", "--fail-on", "exact"]),
        "theory": (0, ["theory"]),
        "drawn": (0, ["reproduce", "failure", "--results", "drawn"]),
    }  # fmt: skip
    told = {}
    for name, (code, words) in commands.items():
        os.umask(0)
        if name == "audit, then redacted":
            kept = [str(path) for path in Path("full").rglob("examples.json")]
        done = in_this_process(*words)
        assert code in (None, done.returncode), (name, done.returncode, done.stderr, done.stdout)
        told[name] = done.stdout + done.stderr
    Path("told.json").write_text(json.dumps({"told": told, "kept": kept}))


if __name__ == "__main__":
    main()
