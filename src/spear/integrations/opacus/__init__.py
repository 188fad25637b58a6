"""DP-SGD as Opacus does it: one step on a batch, and the steps of a real training run.

Opacus clips each sample's gradient to norm C, sums, adds noise of standard deviation z C (z the noise
multiplier) and divides by the expected batch size B. So the noise on `p.grad` is sigma = z C / B.
"""

from spear.errors import MissingExtra

try:
    import opacus  # noqa: F401
except ImportError as error:
    raise MissingExtra("Opacus", "opacus") from error

from spear.federated import epsilon
from spear.federated.dpsgd import DPUpdate, dpsgd
from spear.integrations.opacus.capture import Capture, CapturedStep, capture

__all__ = ["Capture", "CapturedStep", "DPUpdate", "capture", "dpsgd", "epsilon"]
