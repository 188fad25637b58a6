"""Golden updates as files hold them, inverted and held against what is stated of them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import spear

_EXACT = 5e-3  # how far an input of a certified sample may be off at most: 60 dB of what was drawn
HERE = Path(__file__).resolve().parents[1] / "golden"
NAMES = sorted(json.loads((HERE / "expected.json").read_text(encoding="utf-8")))


@dataclass(frozen=True, eq=False)
class Golden:
    name: str
    weights: dict[str, Tensor]
    sent: dict[str, Tensor]
    inputs: Tensor
    labels: Tensor
    expected: dict[str, Any]

    @staticmethod
    def read(name: str) -> Golden:
        with np.load(HERE / f"{name}.npz", allow_pickle=False) as arrays:
            tensors = {key: torch.from_numpy(arrays[key]) for key in arrays.files}
        parts: dict[str, dict[str, Tensor]] = {"weights": {}, "sent": {}}
        for key, tensor in tensors.items():
            part, _, own = key.partition("/")
            if own:
                parts[part][own] = tensor
        expected = json.loads((HERE / "expected.json").read_text(encoding="utf-8"))[name]
        inputs, labels = tensors["inputs"], tensors["labels"]
        return Golden(name, parts["weights"], parts["sent"], inputs, labels, expected)

    @property
    def model(self) -> nn.Sequential:
        """Linear layers of the weights' shapes, with a ReLU between any two."""
        parts: list[nn.Module] = []
        for key, weight in self.weights.items():
            if key.endswith("weight"):
                m, n = weight.shape
                parts += [nn.Linear(n, m).to(weight.dtype), nn.ReLU()]
        model = nn.Sequential(*parts[:-1])
        model.load_state_dict(self.weights)
        return model

    def invert(self) -> spear.Inversion:
        model, how = self.model, dict(self.expected["how"])
        if "lr" in how:
            view = spear.observe(model, after=self.sent, **how)
        else:
            view = spear.observe(model, self.sent, **how)
        return spear.invert(view, model=model)

    def wrongly_certified(self, result: spear.Inversion) -> int:
        sure = result.inputs[result.certified].double()
        distance = torch.cdist(sure, self.inputs.double(), p=float("inf"))
        far = min(self.expected["error"] or _EXACT, _EXACT)
        return int((distance.min(1).values > far).sum()) if len(sure) else 0

    def problems(self) -> list[str]:
        """What is not as stated."""
        result, found = self.invert(), []
        for name in ("outcome", "proof"):
            came = getattr(result, name).name
            if came not in self.expected[name].split(" or "):
                found.append(f"expected {self.expected[name]}, got {came}: {result.reason}")
        wrong = self.wrongly_certified(result)
        if wrong:
            found.append(f"{wrong} certified samples are none of the client's")
        if self.expected["error"] is None:
            return found
        if result.batch_size != len(self.inputs) or len(result.inputs) != len(self.inputs):
            return [*found, f"{len(result.inputs)} of {len(self.inputs)} samples came back"]
        distance = torch.cdist(result.inputs.double(), self.inputs.double(), p=float("inf"))
        nearest = distance.argmin(1)
        if len(set(nearest.tolist())) < len(self.inputs):
            found.append("two samples came back as one")
        worst = float(distance.min(1).values.max())
        if not worst <= self.expected["error"]:
            found.append(f"an input is off by {worst:.1e}, expected {self.expected['error']:.0e}")
        exact = self.expected["outcome"] == "EXACT" and result.labels is not None
        if exact and not torch.equal(result.labels, self.labels[nearest]):
            found.append(f"labels {result.labels.tolist()}, expected {self.labels[nearest]}")
        return found
