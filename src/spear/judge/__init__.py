"""What is proved about recovered samples, and what was assumed: every rival explanation tried.

`select` chooses b directions, `certify` tries what else could explain the update, and says what is
left: a `Certificate` with its `Proof`, its `Cause` and its assumptions.
"""

from spear.judge.causes import Cause, Proof
from spear.judge.certificate import Certificate, certify
from spear.judge.layer import has_content, without_spoilt
from spear.judge.partial import approximate_inputs, explained
from spear.judge.replay import Loss
from spear.judge.rescaling import rescale
from spear.judge.selection import Selection, select

__all__ = [
    "Cause",
    "Certificate",
    "Loss",
    "Proof",
    "Selection",
    "approximate_inputs",
    "certify",
    "explained",
    "has_content",
    "rescale",
    "select",
    "without_spoilt",
]
