"""How well `spear check` foresees: rehearsals on made-up data beside inversions of real data.

    SPEAR_DATA=... python benchmarks/preflight.py benchmarks/rows/preflight.jsonl [seeds [first]]

Every row is one batch of 20, six layers of width 200, one thread, 20 seconds a search. Rows that are
there already are not measured again; the table is drawn from all of them.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch

from spear import data, invert
from spear.check import compare
from spear.check.made_up import KINDS
from spear.check.model_structure import examine
from spear.check.rehearsal import prepare
from spear.federated import Privacy, mlp, noise_of, resolved, send
from spear.update import Protocol

B, M = 20, 200
DATA = {"cifar10": "photos", "mnist": "drawings", "cifar10 in [0, 1]": "pixels", "adult": "table"}
SETTINGS = {
    "none": {},
    **{f"sigma {s:g}": {"sigma": s} for s in (1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2)},
    **{f"DP-SGD {z:g}": {"noise_multiplier": z, "clip": 1.0} for z in (2e-4, 2e-3, 1.0)},
    **{precision: {"precision": precision} for precision in ("float16", "bfloat16", "8-bit")},
    **{f"prune {100 * p:g} %": {"pruned": p} for p in (0.01, 0.1, 0.5)},
    **{f"lr {lr:g}, 5 epochs": {"lr": lr, "epochs": 5} for lr in (0.1, 0.01, 0.001)},
}


def trial(name: str, setting: str, seed: int) -> dict:
    """One batch of real data, and the rehearsal of it."""
    loaded = getattr(data, name.split(maxsplit=1)[0])(Path(os.environ["SPEAR_DATA"]))
    drawn = torch.randperm(len(loaded), generator=torch.Generator().manual_seed(seed))[:B].tolist()
    x, y = loaded.batch(drawn, **({"normalise": False} if "[0, 1]" in name else {}))
    x, model = x.float(), mlp(x.shape[1], 2 if name == "adult" else 10, width=M, seed=seed)
    protocol = Protocol.of(samples=B, **SETTINGS[setting])
    protocol = resolved(protocol, noise_of(protocol, Privacy()).sigma)
    stage = prepare(model, examine(model).chosen, protocol)
    foreseen = stage.rehearse(KINDS[DATA[name]], max_seconds=20, seed=seed).score
    options = {"loss": torch.nn.functional.cross_entropy}
    sent = send(model, [(x, y)], protocol, generator=torch.Generator().manual_seed(seed), **options)
    real = compare(invert(sent.view(model), max_seconds=20).inputs, x)
    told = {"data": name, "setting": setting, "seed": seed}
    scores = {"foreseen": foreseen, "real": real}
    told |= {name: [score.recovery.value, score.recovered] for name, score in scores.items()}
    return {**told, "error": real.error}


def table(rows: list[dict]) -> str:
    """What was foreseen and what came back of each batch, and how often both were of one class."""
    cells: dict[str, dict[str, list[str]]] = {}
    right: dict[str, list[bool]] = {}
    for row in rows:
        said = [
            f"{n} of {B}" if kind == "some" else kind for kind, n in (row["foreseen"], row["real"])
        ]
        cells.setdefault(row["setting"], {}).setdefault(row["data"], []).append(" → ".join(said))
        right.setdefault(row["data"], []).append(row["foreseen"][0] == row["real"][0])
    lines = [f"| setting | {' | '.join(right)} |", "|---" * (1 + len(right)) + "|"]
    for setting, own in cells.items():
        lines.append(
            f"| {setting} | {' | '.join('; '.join(own.get(name, [])) for name in right)} |"
        )
    counts = ", ".join(f"{name} {sum(same)} of {len(same)}" for name, same in right.items())
    return "\n".join(lines) + f"\n\nClass right: {counts}."


if __name__ == "__main__":
    torch.set_num_threads(1)
    path, (seeds, first) = Path(sys.argv[1]), [*map(int, sys.argv[2:]), 0, 0][:2]
    path.touch()
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    done = {(row["data"], row["setting"], row["seed"]) for row in rows}
    wanted = [
        (name, s, seed) for seed in range(first, first + seeds) for s in SETTINGS for name in DATA
    ]
    for case in wanted:
        if case not in done:
            rows.append(trial(*case))
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(rows[-1]) + "\n")
    print(table(rows))
