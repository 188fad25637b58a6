"""The client's side: models and what clients send. The only place that holds private data."""

from spear.federated import defences
from spear.federated.client import fedavg, fedsgd, train
from spear.federated.models import Vgg16, mlp

__all__ = ["Vgg16", "defences", "fedavg", "fedsgd", "mlp", "train"]
