"""The client's side: models, FedSGD, FedAvg, DP-SGD, defences. Only this package holds private data.

`spear.federated.dpsgd` needs Opacus, and is imported by its own name.
"""

from spear.federated import defences
from spear.federated.client import fedavg, fedsgd, fitting_loss, train
from spear.federated.models import Vgg16, mlp
from spear.federated.privacy import Noise, Privacy, epsilon, noise_of, resolved
from spear.federated.reference import clipping_factors, least_squares, output_gradient
from spear.federated.sending import Batch, Sent, play_rounds, send, split

__all__ = [
    "Batch",
    "Noise",
    "Privacy",
    "Sent",
    "Vgg16",
    "clipping_factors",
    "defences",
    "epsilon",
    "fedavg",
    "fedsgd",
    "fitting_loss",
    "least_squares",
    "mlp",
    "noise_of",
    "output_gradient",
    "play_rounds",
    "resolved",
    "send",
    "split",
    "train",
]
