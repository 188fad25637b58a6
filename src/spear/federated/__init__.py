"""The client's side: models and what clients send. The only place that holds private data."""

from spear.federated import defences
from spear.federated.client import fedavg, fedsgd, train
from spear.federated.models import Vgg16, mlp
from spear.federated.reference import clipping_factors, least_squares, output_gradient

__all__ = [
    "Vgg16",
    "clipping_factors",
    "defences",
    "fedavg",
    "fedsgd",
    "least_squares",
    "mlp",
    "output_gradient",
    "train",
]
