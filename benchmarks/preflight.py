"""How well `spear check` foresees: its rehearsals on made-up data beside inversions of real data.

    SPEAR_DATA=... python benchmarks/preflight.py --seeds 2 --rows benchmarks/rows/preflight.jsonl
    python benchmarks/preflight.py --table --rows benchmarks/rows/preflight.jsonl

Every row is one batch of 20, six layers of width 200, one thread, 20 seconds a search.
"""

from __future__ import annotations

import argparse
import json
import os
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
    raw = {"normalise": False} if "[0, 1]" in name else {}
    x, y = loaded.batch(drawn, **raw)
    x, model = x.float(), mlp(x.shape[1], 2 if name == "adult" else 10, width=M, seed=seed)
    protocol = Protocol.of(samples=B, **SETTINGS[setting])
    protocol = resolved(protocol, noise_of(protocol, Privacy()).sigma)
    stage = prepare(model, examine(model).chosen, protocol)
    foreseen = stage.rehearse(KINDS[DATA[name]], max_seconds=20, seed=seed).score
    options = {"loss": torch.nn.functional.cross_entropy}
    sent = send(model, [(x, y)], protocol, generator=torch.Generator().manual_seed(seed), **options)
    came = compare(invert(sent.view(model), max_seconds=20).inputs, x)
    return {"data": name, "setting": setting, "seed": seed} | {
        f"{kind}{key}": value
        for kind, score in (("foreseen", foreseen), ("real", came))
        for key, value in (("", score.recovery.value), ("_samples", score.recovered))
    }


def table(rows: list[dict]) -> str:
    """What was foreseen and what came back of each batch, and how often that was the same."""
    kinds = list(dict.fromkeys(row["data"] for row in rows))
    lines = [f"| setting | {' | '.join(kinds)} |", "|---" * (1 + len(kinds)) + "|"]
    for setting in dict.fromkeys(row["setting"] for row in rows):
        cells = []
        for kind in kinds:
            own = [row for row in rows if (row["setting"], row["data"]) == (setting, kind)]
            foreseen, real = ([_word(row, key) for row in own] for key in ("foreseen", "real"))
            cells.append(f"{', '.join(foreseen)} → {', '.join(real)}")
        lines.append(f"| {setting} | {' | '.join(cells)} |")
    right = [
        f"{kind}: {sum(row['foreseen'] == row['real'] for row in own)} of {len(own)}"
        for kind in kinds
        if (own := [row for row in rows if row["data"] == kind])
    ]
    return "\n".join(lines) + f"\n\nClass right: {'; '.join(right)}."


def _word(row: dict, key: str) -> str:
    return f"{row[f'{key}_samples']} of {B}" if row[key] == "some" else row[key]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--table", action="store_true", help="draw only")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if not options.table:
        with options.rows.open("w", encoding="utf-8") as file:
            for name in DATA:
                for setting in SETTINGS:
                    for seed in range(options.seeds):
                        file.write(json.dumps(trial(name, setting, seed)) + "\n")
                        file.flush()
    print(table([json.loads(line) for line in options.rows.read_text().splitlines()]))


if __name__ == "__main__":
    main()
