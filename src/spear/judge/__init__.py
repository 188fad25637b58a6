"""What is proved about recovered samples, and what was assumed: every rival explanation tried.

`select` chooses b directions, `certify` tries what else could explain the update and says what is
left: a `Certificate` with its `Proof`, its `Cause` and its assumptions. `verdict` says what that
entitles to, in words.
"""

from spear.judge import verdict
from spear.judge.causes import Cause, Proof
from spear.judge.certificate import Certificate, certify, certify_either_sign
from spear.judge.layer import mark_unscaled
from spear.judge.partial import approximate_inputs, select_part
from spear.judge.replay import Loss
from spear.judge.rescaling import rescale
from spear.judge.selection import Selection, select
from spear.judge.verdict import Outcome, SearchEnd, SearchSummary, Verdict

__all__ = [
    "Cause",
    "Certificate",
    "Loss",
    "Outcome",
    "Proof",
    "SearchEnd",
    "SearchSummary",
    "Selection",
    "Verdict",
    "approximate_inputs",
    "certify",
    "certify_either_sign",
    "mark_unscaled",
    "rescale",
    "select",
    "select_part",
    "verdict",
]
