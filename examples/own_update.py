"""Makes an update as a client would send it: before.safetensors and grads.safetensors.

    python examples/own_update.py
    spear invert --weights before.safetensors --update grads.safetensors --shape 3x32x32 \
        --mean 0.5 --std 0.25 --truth batch.safetensors --report report.html

Replace the model and the batch by your own; the last lines stay the same.
"""

from __future__ import annotations

import torch
from safetensors.torch import save_file
from torch import nn

from spear.data import photo_crops

torch.manual_seed(0)
images, _ = photo_crops(16, 32)  # (16, 3, 32, 32) in [0, 1]
inputs, labels = (images - 0.5) / 0.25, torch.randint(10, (16,))
model = nn.Sequential(
    nn.Flatten(),
    nn.Linear(3072, 200),
    nn.ReLU(),
    nn.Linear(200, 100),
    nn.ReLU(),
    nn.Linear(100, 10),
)

save_file(model.state_dict(), "before.safetensors")  # what the server sent
nn.functional.cross_entropy(model(inputs), labels).backward()
gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
save_file(gradients, "grads.safetensors")  # what the client sends back
save_file(
    {"inputs": inputs, "labels": labels}, "batch.safetensors"
)  # what it keeps: to compare with
