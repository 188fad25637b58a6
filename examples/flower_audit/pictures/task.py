"""Model, data and training, as any Flower app has them."""

import torch
from torch import Tensor, nn

from spear.data import photo_crops

CLIENTS, PICTURES, PIXELS = 3, 12, 32
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


def load_data(partition: int) -> tuple[Tensor, Tensor, list[str]]:
    """A client's own pictures (12, 3, 32, 32), normalised, their labels and names."""
    crops, names = photo_crops(CLIENTS * PICTURES, PIXELS)
    kinds = sorted({name.split()[0] for name in names})
    labels = torch.tensor([kinds.index(name.split()[0]) for name in names])
    own = slice(partition, None, CLIENTS)
    return (crops[own] - MEAN) / STD, labels[own], names[own]


def train(net: nn.Module, images: Tensor, labels: Tensor, lr: float) -> float:
    """One local epoch; so few pictures are one batch."""
    optimizer = torch.optim.SGD(net.parameters(), lr=lr)
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(net(images), labels)
    loss.backward()
    optimizer.step()
    return loss.item()


@torch.no_grad()
def test(net: nn.Module, images: Tensor, labels: Tensor) -> tuple[float, float]:
    """Loss and accuracy."""
    scores = net(images)
    loss = nn.functional.cross_entropy(scores, labels).item()
    return loss, (scores.argmax(1) == labels).float().mean().item()
