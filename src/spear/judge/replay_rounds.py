"""The replay of several rounds: one set of inputs and labels must explain every round.

What one round cannot tell apart, two often can: the network behind the layer has moved, so that an
input at another scale, or two samples in one trace, would have to fit both.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from spear.errors import Declined
from spear.judge.fit import Fit
from spear.judge.fitting import fit_losses
from spear.judge.layer import Recovered
from spear.judge.losses import Loss


@dataclass(frozen=True, eq=False)
class RoundsFit(Fit):
    """How one loss explains the samples in every round that can be replayed.

    `replay` is that of the first of `fits`, which are sorted: first those with the most samples, then
    the most precise. A sample's weight is that in the first round it took part in, where all weights
    are relative to the usual one of that round.
    """

    fits: tuple[Fit, ...] = ()
    count: int = 0  # samples of all rounds together

    @property
    def whole(self) -> bool:
        """Did every sample take part in the round that `replay` is of?"""
        return len(self.replay.Z) == self.count

    @property
    def has_later(self) -> bool:
        return any(fit.has_later for fit in self.fits)

    @property
    def can_compare(self) -> bool:
        return any(fit.can_compare for fit in self.fits)

    @property
    def is_precise(self) -> bool:
        return any(fit.is_precise for fit in self.fits)

    @property
    def tolerance(self) -> Tensor:
        """The least of all rounds (b,)."""
        return self._least(lambda fit: fit.tolerance)

    @property
    def single_gradients(self) -> Tensor:
        return self.fits[0].single_gradients

    @property
    def weight_error(self) -> Tensor:
        error: Tensor = self._first(lambda fit: fit.weight_error)
        return error

    def turned(self, steps: Tensor) -> Tensor:
        """In all rounds that were replayed, at the stacked layer's factors: (b, R m)."""
        whole = torch.zeros_like(steps)
        for fit in self.fits:
            part = fit.replay.part
            some = part.samples
            turned = fit.turned(steps[some][:, part.rows])
            whole[some, part.rows] = part.factor * turned
        return whole

    def curvature(self, steps: Tensor) -> Tensor:
        turned, left = self.turned(steps), self.replay.factors.left
        replayed = torch.zeros(len(left), dtype=torch.bool, device=left.device)
        for fit in self.fits:
            replayed[fit.replay.part.rows] = True
        if not bool(replayed.all()):
            left = torch.linalg.qr(left * replayed[:, None]).Q
        rate: Tensor = (turned - (turned @ left) @ left.T).norm(dim=1)
        return rate

    # A sample at another scale must fit in every round.

    def off_at(self, scale: Tensor) -> Tensor:
        return self._most(scale, lambda fit, t: fit.off_at(t))

    def breaks_at(self, scale: Tensor) -> bool:
        return bool((self.off_at(scale) > 1)[self.matched].any())

    def alone_off_at(self, scale: Tensor, which: Tensor) -> Tensor:
        def off(fit: Fit, t: Tensor) -> Tensor:
            return fit.alone_off_at(t, which[fit.replay.part.samples])

        return self._most(scale, off)

    def update_off_at(self, scale: Tensor, *, biases: bool) -> float:
        each = (
            fit.update_off_at(scale[fit.replay.part.samples], biases=biases) for fit in self.fits
        )
        return max(each)

    def weights_at(self, scale: Tensor) -> Tensor | None:
        if self.weights is None or self.labels is None:
            return None
        return self._usual_first(lambda fit: fit.weights_at(scale[fit.replay.part.samples]))

    def _usual_first(self, ask: Callable[[Fit], Tensor | None]) -> Tensor:
        """Weights (b,), each in its first round, relative to that round's usual one here and now."""
        usual = _usual(self.fits[0])

        def relative(fit: Fit) -> Tensor:
            weights = ask(fit)
            assert weights is not None
            return weights / _usual(fit) * usual

        return self._first(relative)

    def _first(self, ask: Callable[[Fit], Tensor]) -> Tensor:
        first = torch.full(
            (self.count,), torch.nan, dtype=torch.float64, device=self.matched.device
        )
        for fit in self.fits:
            some = fit.replay.part.samples
            first[some] = torch.where(first[some].isnan(), ask(fit).to(first), first[some])
        return first

    def _most(self, scale: Tensor, ask: Callable[[Fit, Tensor], Tensor]) -> Tensor:
        most = torch.zeros_like(scale)
        for fit in self.fits:
            some = fit.replay.part.samples
            most[some] = torch.maximum(most[some], ask(fit, scale[some]).to(most))
        return most

    def _least(self, ask: Callable[[Fit], Tensor]) -> Tensor:
        least = torch.full(
            (self.count,), torch.inf, dtype=torch.float64, device=self.matched.device
        )
        for fit in self.fits:
            some = fit.replay.part.samples
            least[some] = torch.minimum(least[some], ask(fit).to(least))
        return least


def fit_rounds(
    found: Recovered, loss: Loss | None, *, generator: torch.Generator | None
) -> Fit | Declined:
    """The loss that explains every round with the same labels; or why none can be replayed."""
    if found.view.rounds is None:
        return fit_losses(found, loss, generator=generator)
    fits: list[Fit] = []
    declined: list[Declined] = []
    for part in found.parts:
        if not len(part.samples):
            continue
        fit = fit_losses(found, loss, generator=generator, part=part)
        (declined if isinstance(fit, Declined) else fits).append(fit)  # type: ignore[arg-type]
    if not fits:
        return declined[0]
    precise = [fit for fit in fits if fit.is_precise] or fits  # others show nothing either way
    return _joined(found, precise)


def _joined(found: Recovered, fits: list[Fit]) -> RoundsFit:
    """What all rounds say together."""
    b, device = found.b, found.selection.C.device
    labels = None
    matched = torch.zeros(b, dtype=torch.bool, device=device)
    contradicted = torch.zeros_like(matched)
    if all(fit.labels is not None for fit in fits):
        labels = torch.full((b,), -1, dtype=torch.int64, device=device)
    for fit in fits:
        some = fit.replay.part.samples
        matched[some] = True
        contradicted[some] |= ~fit.matched
        if labels is not None and fit.labels is not None:
            known = labels[some]
            contradicted[some] |= (known >= 0) & (known != fit.labels)
            labels[some] = torch.where(known >= 0, known, fit.labels)
    fits = sorted(fits, key=lambda f: (-len(f.replay.part.samples), float(f.tolerance.median())))
    main = fits[0]
    joined = RoundsFit(
        replay=main.replay,
        loss=main.loss,
        told=main.told,
        labels=labels,
        matched=matched & ~contradicted,
        disagreements=tuple(
            f"round {fit.replay.part.round.number}: {words}"
            for fit in fits
            if fit.replay.part.round is not None
            for words in fit.disagreements
        ),
        slopes=main.slopes,
        fits=tuple(fits),
        count=b,
    )
    if any(fit.weights is None for fit in fits):
        return joined
    return dataclasses.replace(joined, weights=joined._usual_first(lambda fit: fit.weights))


def _usual(fit: Fit) -> float:
    """The usual weight of a sample in a round."""
    assert fit.weights is not None
    known = fit.weights[fit.matched]
    return float((known if len(known) else fit.weights).median())
