"""Model, data and training, as any PyTorch project has them."""

import torch
from torch import Tensor, nn

from spear.data import photo_crops

CLIENTS, PICTURES, PIXELS = 2, 12, 32
MEAN, STD = 0.5, 0.25


class Net(nn.Module):
    """A fully connected network; the class of a crop is the photo it was cut from."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(3 * PIXELS * PIXELS, 256)
        self.fc2 = nn.Linear(256, 128)
        self.fc3 = nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.fc1(x.flatten(1)))
        return self.fc3(torch.relu(self.fc2(x)))


def load_data(site: str) -> tuple[Tensor, Tensor]:
    """The pictures (12, 3, 32, 32) of site-1 or site-2, normalised, and their labels."""
    crops, names = photo_crops(CLIENTS * PICTURES, PIXELS)
    kinds = sorted({name.split()[0] for name in names})
    labels = torch.tensor([kinds.index(name.split()[0]) for name in names])
    own = slice(int(site.rsplit("-", 1)[1]) - 1, None, CLIENTS)
    return (crops[own] - MEAN) / STD, labels[own]


def train(net: nn.Module, images: Tensor, labels: Tensor, lr: float) -> None:
    """One local epoch; so few pictures are one batch."""
    optimizer = torch.optim.SGD(net.parameters(), lr=lr)
    optimizer.zero_grad()
    nn.functional.cross_entropy(net(images), labels).backward()
    optimizer.step()
