"""The pytest plugin: a fixture that fails a test when an update gives away more than is allowed.

pytest loads it by itself wherever SPEAR is installed, so nothing here imports torch until it is used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from torch import Tensor, nn

    from spear.inversion import Outcome
    from spear.report import Finding
    from spear.update import LayerUpdate

_OF_INVERT = ("loss", "finder", "generator", "max_seconds", "on_progress", "executor")


@pytest.fixture
def spear_audit(request: pytest.FixtureRequest) -> SpearAudit:
    """Attack an update, and fail the test if it gives away more than `allow`: see `SpearAudit`."""
    return SpearAudit(request.node)


class SpearAudit:
    """What the fixture `spear_audit` gives: called with an update, it fails if that leaks."""

    def __init__(self, test: pytest.Item) -> None:
        self._test = test

    def __call__(
        self,
        update: LayerUpdate | nn.Module,
        gradients: Mapping[str, Tensor] | Sequence[Tensor] | None = None,
        *,
        allow: str | Outcome = "failed",
        name: str = "the update",
        **options: Any,
    ) -> Finding:
        """Invert the update; an AssertionError says what it gave away, and why that is too much.

        Args:
            update: a view from `spear.observe` or `spear.combine`; or the model, with what the client
                sent: `gradients`, or `after=` or `difference=` with `lr=`, as `spear.observe` has them.
            gradients: what the client sent, beside a model.
            allow: the worst outcome that is tolerated. From mild to bad: "failed" (nothing recovered),
                "inconclusive" (cannot tell), "approximate", "partial", "exact".
            name: how to call the update in messages and in the properties of the test.
            options: further arguments of `spear.observe` and `spear.invert`.
        """
        __tracebackhide__ = True
        from spear.report import at_least

        limit = _outcome(allow)
        found = _attacked(update, gradients, name, options)
        self._test.user_properties += [
            (f"spear outcome of {name}", found.outcome.value),
            (f"spear certified of {name}", sum(found.certified)),
        ]
        if found.outcome is not limit and at_least(found.outcome, limit):
            raise AssertionError(_complaint(found, limit))
        return found


def _outcome(allow: str | Outcome) -> Outcome:
    from spear.errors import InvalidOption
    from spear.inversion import Outcome
    from spear.report import SEVERITY

    try:
        return Outcome(allow)
    except ValueError as error:
        names = ", ".join(outcome.value for outcome in SEVERITY)
        raise InvalidOption(f"expected allow to be one of {names}, got {allow!r}") from error


def _attacked(
    update: LayerUpdate | nn.Module,
    gradients: Mapping[str, Tensor] | Sequence[Tensor] | None,
    name: str,
    options: Mapping[str, Any],
) -> Finding:
    """The finding; an update that cannot be attacked is one that cannot be told."""
    from spear.errors import InvalidOption, NothingToAttack
    from spear.inversion import invert
    from spear.report import Finding
    from spear.update import LayerUpdate, observe

    search = {key: value for key, value in options.items() if key in _OF_INVERT}
    told = {key: value for key, value in options.items() if key not in _OF_INVERT}
    if isinstance(update, LayerUpdate):
        surplus = [*(["gradients"] if gradients is not None else []), *told]
        if surplus:
            raise InvalidOption(
                f"{', '.join(surplus)} cannot be given beside a view: observe has them"
            )
        return Finding.of(invert(update, **search), name)
    try:
        view = observe(update, gradients, **told)
    except NothingToAttack as error:
        return Finding.not_attacked(name, str(error))
    return Finding.of(invert(view, **search), name)


def _adds(found: Finding) -> bool:
    """Does the reason say more than the headline? Where all is proved, it is the same sentence."""
    from spear.judge import Cause

    return found.cause is not Cause.PROVED


def _complaint(found: Finding, limit: Outcome) -> str:
    lines = [
        f"{found.name} gives away more than allowed: {found.outcome.name}, allowed {limit.name}",
        found.headline,
        *([f"{found.reason[:1].upper()}{found.reason[1:]}."] if _adds(found) else []),
        f"Likelihood: {found.threat.likelihood}",
        f"Severity: {found.threat.severity}",
        *(f"Assumed: {words}" for words in found.assumptions),
    ]
    return "\n  ".join(lines)
