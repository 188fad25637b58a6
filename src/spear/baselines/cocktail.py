"""The cocktail party attack (Kariyappa et al., ICML 2023): a layer's gradient mixes its inputs, and
independent component analysis unmixes them.

The rows of dL/dW span the b inputs. Centred and whitened they are X~ (b, n); a unit row v of the
unmixing matrix V gives an estimated source v X~. Gradient descent on V seeks sources far from
Gaussian (negentropy by log cosh), unlike each other (angles between rows of V) and, for images,
smooth. Inputs that come out of a ReLU are non-negative and sparse, and sources are pulled that way
instead.

Departures from Kariyappa et al.: b is read off the spectrum, and a source's sign and scale, which ICA
cannot know, come from the bias gradient as in SPEAR: x = c R with c . (Q 1) = 1. That is exact for a
perfect source; for a poor one c . (Q 1) may be near zero, so where `bounds` are known the scale is
limited to what keeps most of the input within them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from spear.baselines.attack import (
    Bounds,
    Clock,
    approximate,
    bound_problems,
    check_view,
    shape_problems,
    total_variation,
)
from spear.errors import InvalidOption
from spear.factors import Factors, factorise
from spear.inversion import Inversion
from spear.judge import Loss
from spear.search import Progress, unit
from spear.update import LayerUpdate

_WITHIN = 0.99  # share of an input's entries that its scale must keep within the bounds


@dataclass(frozen=True)
class CocktailPartyAttack:
    """Options of the cocktail party attack.

    Args:
        iterations: steps of Adam on the unmixing matrix.
        lr: Adam's step.
        sharpness: a of the contrast (log cosh a s) / a^2.
        non_gaussian: weight of the negentropy, a small number (1e-4 to 1e-2 for images).
        independence: weight of the term that keeps rows of the unmixing matrix apart.
        temperature: T of that term, exp(T |cosine|): how hard near-parallel rows are pushed.
        total_variation: weight of smoothness, for layers that read images (needs `shape`).
        non_negative: weight of negative parts, for layers whose inputs come from a ReLU.
        sparse: weight of the mean size of an input's entries, for the same.

    >>> from spear import observe
    >>> net = nn.Sequential(nn.Linear(400, 60), nn.ReLU(), nn.Linear(60, 5))
    >>> x, y = torch.randn(3, 400) ** 3, torch.tensor([0, 4, 2])  # far from Gaussian
    >>> loss = nn.functional.cross_entropy(net(x), y)
    >>> view = observe(net, torch.autograd.grad(loss, list(net.parameters())))
    >>> result = CocktailPartyAttack(iterations=500, total_variation=0).invert(view)
    >>> nearest = torch.cdist(result.inputs, x).amin(0) / x.norm(dim=1)
    >>> result.outcome.name, result.batch_size, bool((nearest < 0.3).all())
    ('APPROXIMATE', 3, True)
    """

    iterations: int = 3000
    lr: float = 0.02
    sharpness: float = 1.0
    non_gaussian: float = 30.0
    independence: float = 0.05
    temperature: float = 5.0
    total_variation: float = 1.0
    non_negative: float = 3.0
    sparse: float = 0.5

    def __post_init__(self) -> None:
        if self.iterations < 1:
            raise InvalidOption(f"expected iterations >= 1, got {self.iterations}")
        for name in ("lr", "sharpness", "temperature"):
            if not 0 < getattr(self, name) < math.inf:
                raise InvalidOption(f"expected {name} > 0, got {getattr(self, name)}")
        for name in ("non_gaussian", "independence", "total_variation", "non_negative", "sparse"):
            if not 0 <= getattr(self, name) < math.inf:
                raise InvalidOption(f"expected {name} >= 0, got {getattr(self, name)}")

    def invert(
        self,
        view: LayerUpdate,
        *,
        model: nn.Module | None = None,
        labels: Tensor | Sequence[int] | None = None,
        shape: Sequence[int] | None = None,
        bounds: Bounds | None = None,
        loss: Loss | None = None,
        generator: torch.Generator | None = None,
        max_seconds: float | None = None,
        on_progress: Callable[[Progress], None] | None = None,
    ) -> Inversion:
        """Approximate the inputs (b, n) of a layer from its gradient alone; arguments as in `Attack`.

        `model`, `labels` and `loss` are not needed. `bounds`, if known, limit a source's scale.
        """
        check_view(view)
        self._check(view, shape, bounds)
        clock = Clock(on_progress, max_seconds)
        with clock.watch.stage("factorise"):
            factors = factorise(view)
        b = factors.batch_size
        if not b:
            reason = "the spectrum shows no gap: the number of sources is not known"
            nothing = view.weight_grad.new_zeros(0, view.inputs)
            return approximate(
                nothing, batch_size=b, labels=None, stats=clock.watch.stats, reason=reason
            )
        generator = generator or torch.Generator().manual_seed(0)
        with torch.inference_mode(False), torch.enable_grad(), clock.watch.stage("optimise"):
            R = factors.combine(torch.diag(1 / factors.singular_values))  # (b, n)
            P = whitening(R)  # (b, b)
            start = torch.randn(b, b, generator=generator, device=generator.device)
            V = start.to(R).float().requires_grad_()
            try:
                self._unmix(V, P @ R, view, shape, clock)
            except KeyboardInterrupt:
                clock.watch.count("interrupted")
        C = scaled(unit(V.detach().to(R)) @ P, R, factors, bounds, shape)
        return self._conclude(factors, factors.reconstruct(C), clock)

    def _unmix(
        self,
        V: Tensor,
        white: Tensor,
        view: LayerUpdate,
        shape: Sequence[int] | None,
        clock: Clock,
    ) -> None:
        """Adam on the unmixing matrix V (b, b), in place; white (b, n) is not centred."""
        mean = white.mean(1, keepdim=True).float()  # (b, 1)
        white = white.float() - mean
        from_relu = _from_relu(view)
        images = tuple(shape) if shape is not None and self.total_variation > 0 else None
        adam = torch.optim.Adam([V], lr=self.lr)
        for step in range(self.iterations):
            if not clock.tick(expected=self.iterations, batch_size=len(V)):
                return
            # Half a cosine down to zero, so that sources settle.
            cosine = math.cos(math.pi * step / self.iterations)
            adam.param_groups[0]["lr"] = self.lr * (1 + cosine) / 2
            U = unit(V)
            S = U @ white  # (b, n) of unit variance
            value = -self.non_gaussian * negentropy(S, self.sharpness).mean()
            value = value + self.independence * likeness(U, self.temperature)
            if from_relu:
                Y = S + U @ mean  # the ReLU's output, up to sign and scale
                value = value + self.non_negative * negative_part(Y) + self.sparse * Y.abs().mean()
            elif images is not None:
                value = value + self.total_variation * total_variation(S.view(-1, *images))
            (V.grad,) = torch.autograd.grad(value, V)
            adam.step()
            clock.watch.stats["loss"] = value.item()

    def _check(self, view: LayerUpdate, shape: Sequence[int] | None, bounds: Bounds | None) -> None:
        problems = []
        if shape is not None or (view.reads_data and not _from_relu(view)):
            problems += shape_problems(view, shape, self.total_variation)
        if bounds is not None and not problems:
            problems += bound_problems(bounds, shape if shape is not None else (view.inputs,))
        if problems:
            raise InvalidOption("; ".join(problems))

    def _conclude(self, factors: Factors, inputs: Tensor, clock: Clock) -> Inversion:
        stats = clock.watch.stats
        reason = (
            f"{factors.b} sources unmixed in {int(stats.get('iterations', 0))} iterations"
            f"{clock.ending()}: independent component analysis proves nothing; spear.invert does"
        )
        if not factors.view.reads_data:
            reason += f"; these are inputs of layer {factors.view.layer!r}, computed from the data"
        return approximate(inputs, batch_size=factors.b, labels=None, stats=stats, reason=reason)


def _from_relu(view: LayerUpdate) -> bool:
    """Do the layer's inputs come out of a ReLU?"""
    return view.relu in ("before", "both")


def whitening(R: Tensor) -> Tensor:
    """P (b, b) such that P (R - mean) has uncorrelated rows of unit variance.

    >>> R = torch.randn(3, 500, dtype=torch.float64) + 2
    >>> torch.allclose(torch.cov(whitening(R) @ R, correction=0), torch.eye(3).double())
    True
    """
    values, vectors = torch.linalg.eigh(torch.cov(R, correction=0).view(len(R), len(R)))
    floor = torch.finfo(R.dtype).eps * values[-1]
    P: Tensor = vectors.T / values.clamp_min(floor).sqrt()[:, None]
    return P


def negentropy(S: Tensor, sharpness: float = 1.0) -> Tensor:
    """How far each row (b,) is from Gaussian: (E log cosh(a s) / a^2 - that of a Gaussian)^2.

    Subtracting the Gaussian's constant keeps sources on their own side, flatter or more peaked.
    """
    a = sharpness
    contrast = (log_cosh(a * S) / a**2).mean(1)  # (b,)
    return (contrast - gaussian_contrast(a)).square()


def log_cosh(x: Tensor) -> Tensor:
    """log cosh x without overflow."""
    size = x.abs()
    return size + torch.log1p((-2 * size).exp()) - math.log(2)


def gaussian_contrast(sharpness: float) -> float:
    """E log cosh(a z) / a^2 of a standard normal z.

    >>> round(gaussian_contrast(1.0), 4)
    0.3746
    """
    z = torch.linspace(-10, 10, 4001, dtype=torch.float64)
    weight = (-z.square() / 2).exp()
    return float((log_cosh(sharpness * z) * weight).sum() / weight.sum()) / sharpness**2


def likeness(U: Tensor, temperature: float) -> Tensor:
    """Mean over pairs of rows of exp(T |cosine|) - 1: zero where all are orthogonal."""
    cosines = (U @ U.T).abs()
    others = ~torch.eye(len(U), dtype=torch.bool, device=U.device)
    if len(U) == 1:
        return cosines.sum() * 0
    return torch.expm1(temperature * cosines[others]).mean()


def negative_part(Y: Tensor) -> Tensor:
    """Mean of the smaller of a source's two sides: a ReLU's output has one only, of either sign."""
    return torch.minimum(Y.relu().mean(1), (-Y).relu().mean(1)).mean()


def scaled(
    C: Tensor, R: Tensor, factors: Factors, bounds: Bounds | None, shape: Sequence[int] | None
) -> Tensor:
    """Sources (b, b) with sign and scale: c . (Q 1) = 1, unless that leaves the inputs' range."""
    s = C @ factors.bias_coordinates  # (b,)
    s = torch.where(s == 0, torch.finfo(s.dtype).tiny, s)
    if bounds is not None:
        sample = tuple(shape) if shape is not None else (R.shape[1],)
        low, high = (torch.as_tensor(bound).to(R).expand(sample).flatten() for bound in bounds)
        signed = (C @ R) * s.sign()[:, None]  # (b, n)
        # Each entry as a multiple of its bound, before scaling; a bound at zero limits nothing.
        above = torch.where(high > 0, signed / high, 0).relu()
        below = torch.where(low < 0, signed / low, 0).relu()
        s = s.sign() * s.abs().maximum((above + below).quantile(_WITHIN, 1))
    return C / s[:, None]
