"""What the attack on one update came to, in the words of a table and of a log."""

from __future__ import annotations

from dataclasses import dataclass

from spear.inversion import Outcome
from spear.report import Finding
from spear.update import Protocol


@dataclass(frozen=True, eq=False)
class Examined:
    """What an update gave away, and what it took."""

    finding: Finding
    protocol: Protocol
    seconds: float = 0.0
    interrupted: bool = False
    features: str | None = None  # the layer's name, where its inputs are not the data itself
    mistake: str = ""  # what the reply was said to be and is not

    @property
    def attacked(self) -> bool:
        return self.finding.is_attacked

    @property
    def verdict(self) -> str:
        """Its outcome in a word or two, for a table."""
        if not self.attacked:
            return "not attacked"
        found = self.finding.outcome.value
        return f"{found} (features)" if self.features and self.finding.recovered else found

    @property
    def line(self) -> str:
        """What it came to, for a log."""
        reason = self.finding.reason
        if not self.attacked:
            return reason
        if self.finding.outcome is Outcome.EXACT:
            reason = reason.split("; ")[0]
        if self.features and self.finding.recovered:
            reason = f"features (activations of {self.features!r}), not the data: {reason}"
        return f"{self.finding.outcome.name}, {reason}"
