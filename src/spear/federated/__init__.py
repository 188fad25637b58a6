"""The client's side: models and what clients send. The only place that holds private data."""

from spear.federated import defences
from spear.federated.client import fedsgd
from spear.federated.models import mlp

__all__ = ["defences", "fedsgd", "mlp"]
