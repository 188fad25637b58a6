"""The threat model of a finding: who sees what, on which assumptions, and what it means for people.

It is worded here and nowhere else, from what the finding holds: a report of any age has one.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from spear.inversion import Outcome
from spear.judge import Proof
from spear.update import UNKNOWN_PROTOCOL, Protocol

if TYPE_CHECKING:
    from spear.report.finding import Finding

OWASP = "ML03:2023"
OWASP_NAME = "Model Inversion Attack"
_ATTACKER = (
    "An honest-but-curious server, or whoever reads what it receives: it keeps to the protocol and "
    "changes nothing. It has no data and no labels of the client."
)
_SENT = {
    "gradient": "the gradients",
    "weights": "the weights after local training",
    "difference": "the change of the weights in local training",
}
_SEEN = "The model it sends out, and the update that the client sends back."  # in earlier reports
_PERSONAL = (
    "Personal data if a sample relates to an identifiable person (GDPR Art. 4(1)), and of a special "
    "category if it is about health, biometrics or the like (Art. 9). SPEAR cannot tell which: the "
    "controller states it."
)
_LIKELIHOOD = {
    Outcome.EXACT: "Demonstrated: it succeeded on this update, and each sample is proved.",
    Outcome.PARTIAL: "Demonstrated: it succeeded for a part of this update, which is proved.",
    Outcome.APPROXIMATE: "Likely: samples came back from this update, without proof.",
    Outcome.INCONCLUSIVE: "Unknown: this update does not show whether it succeeds.",
    Outcome.FAILED: "Not demonstrated: this attack failed on this update, which is no guarantee.",
}
_SEVERITY = {
    Outcome.EXACT: "Every sample, exactly: to send the update is to disclose the data.",
    Outcome.PARTIAL: "Some samples, exactly: for these it is to disclose the data.",
    Outcome.APPROXIMATE: "Approximations from which samples may be recognised.",
    Outcome.INCONCLUSIVE: "Unknown: between nothing and every sample.",
    Outcome.FAILED: "None shown by this attack.",
}
_RECOVERED = (Outcome.EXACT, Outcome.PARTIAL, Outcome.APPROXIMATE)


@dataclass(frozen=True)
class ThreatModel:
    """Who can learn what from an update, in the words that a data-protection assessment asks for."""

    attacker: str
    sees: str
    assumes: tuple[str, ...]
    """What was told about the training, and what the verdict rests on and could not test."""
    owasp: str
    """Its place in the OWASP Machine Learning Security Top 10."""
    data: str
    """What is disclosed, and which category of data that may be."""
    data_subjects: str
    likelihood: str
    """As measured on this update."""
    severity: str
    """How much is disclosed; what that does to a person depends on the data."""


def threat_model(finding: Finding) -> ThreatModel:
    """The threat model of a finding."""
    what = "The client's training samples"
    if finding.labels is not None or finding.proof is Proof.REPLAY:  # redacted reports hold none
        what += " and their labels"
    severity = _SEVERITY[finding.outcome]
    if finding.activations:
        what = "Inputs of an inner layer, computed from the client's training samples"
        if finding.outcome in _RECOVERED:
            severity = "What the layers before it let through of the samples."
    elif finding.is_likely:
        severity = "Samples, most likely exact."
    told = finding.told and f"As told: {finding.told}"
    return ThreatModel(
        attacker=_ATTACKER,
        sees=finding.sees or _SEEN,
        assumes=(*((told,) if told else ()), *finding.assumptions),
        owasp=f"{OWASP} {OWASP_NAME}",
        data=f"{what}. {_PERSONAL}",
        data_subjects=f"The people in {_people(finding)}.",
        likelihood=_LIKELIHOOD[finding.outcome],
        severity=severity,
    )


def seen(protocol: Protocol, rounds: int = 1) -> str:
    """What the server sees of an update that came about so.

    >>> seen(Protocol(clients=5), rounds=2)
    'In each of 2 rounds: the model it sends out, and the gradients, summed over 5 clients.'
    """
    sent = _SENT[protocol.sends]
    if protocol.clients > 1:
        sent += f", summed over {protocol.clients} clients"
    else:
        sent += " that the client sends back"
    when = f"In each of {rounds} rounds: the" if rounds > 1 else "The"
    return f"{when} model it sends out, and {sent}."


def told(protocol: Protocol) -> str:
    """What was said about the client's training; empty if nothing was.

    >>> told(Protocol(samples=8, clip=1.0)), told(Protocol())
    ('b = 8, C = 1', '')
    """
    return "" if protocol == UNKNOWN_PROTOCOL else protocol.words()


def given(protocol: Protocol) -> dict[str, Any]:
    """The same as values by the names of its fields.

    >>> given(Protocol(samples=8, clip=1.0))
    {'samples': 8, 'clip': 1.0}
    """
    values = {field.name: getattr(protocol, field.name) for field in dataclasses.fields(Protocol)}
    return {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in values.items()
        if value != getattr(UNKNOWN_PROTOCOL, name)
    }


def _people(finding: Finding) -> str:
    told = finding.protocol.get("samples")
    size = len(finding.truth.names) if finding.truth else told or finding.batch_size
    if size is None:
        return "the client's batch"
    return f"the client's batch of {size} {'samples' if size != 1 else 'sample'}"
