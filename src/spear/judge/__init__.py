"""What is proved about recovered samples, and on which assumptions.

`select` chooses b directions. `certify` tries every rival explanation of the update and returns a
`Certificate`: its `Proof`, its `Cause`, its assumptions. `verdict` puts into words what that allows us
to claim.
"""

from spear.judge import verdict
from spear.judge.causes import Cause, Proof
from spear.judge.certificate import Certificate, certify, certify_either_sign
from spear.judge.layer import mark_unscaled
from spear.judge.losses import (
    Criterion,
    Loss,
    Outputs,
    compares_numbers,
    logits_of,
    main_tensor,
)
from spear.judge.rescaling import rescale, scale_from_model
from spear.judge.selection import (
    Selection,
    approximate_inputs,
    contradicted_rounds,
    select,
    select_part,
)
from spear.judge.verdict import Outcome, SearchEnd, SearchSummary, Verdict

__all__ = [
    "Cause",
    "Certificate",
    "Criterion",
    "Loss",
    "Outcome",
    "Outputs",
    "Proof",
    "SearchEnd",
    "SearchSummary",
    "Selection",
    "Verdict",
    "approximate_inputs",
    "certify",
    "certify_either_sign",
    "compares_numbers",
    "contradicted_rounds",
    "logits_of",
    "main_tensor",
    "mark_unscaled",
    "rescale",
    "scale_from_model",
    "select",
    "select_part",
    "verdict",
]
