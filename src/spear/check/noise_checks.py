"""What noise of any kind says about an attack: privacy's, rounding's, pruning's; and epsilon."""

from __future__ import annotations

from spear.check.exposure import Check, Exposure
from spear.check.noise_forecast import Expectation, NoiseForecast
from spear.federated import Noise, Privacy
from spear.report import Level, Remark
from spear.tolerances import NOISY
from spear.update import Protocol


def noise(forecast: NoiseForecast, protocol: Protocol) -> Check:
    """Noise of any kind against the spectrum of the update."""
    source = "on made-up inputs, an estimate" if forecast.estimated else "read off the update"
    amount = (
        f"Noise of {forecast.sigma:.1e} on an entry, {forecast.relative:.1e} of a typical one "
        f"({source}): the samples {forecast.words}."
    )
    limits = {
        Expectation.NOTHING: (Exposure.NOT_EXPOSED, "the noise drowns every sample"),
        Expectation.BORDERLINE: (Exposure.UNKNOWN, "the noise is about as loud as the samples"),
        Expectation.VAGUE: (Exposure.PARTLY, "noise blurs what comes back"),
    }
    limit, because = limits.get(forecast.expectation, (Exposure.EXPOSED, ""))
    level = Level.PROTECTED if because else Level.EXPOSED
    if forecast.expectation is Expectation.EXACT and forecast.relative < NOISY:
        return Check((Remark(level, "rounding", amount),))
    words = amount
    if forecast.expectation in (Expectation.EXACT, Expectation.CLEAR):
        words += (
            " Proofs get rare at this noise, the samples do not; more noise is needed to hide them."
        )
    if forecast.estimated:
        words += (
            " This holds for normalised inputs: of pixels in [0, 1] fewer come back under noise, "
            "and blurred more."
        )
    return Check((Remark(level, _sources(protocol), words),), limit, because)


def is_uneven(protocol: Protocol) -> bool:
    """Does what is left out fall on some entries and not on others, so that it is no noise?"""
    return protocol.pruned >= 0.02 or (protocol.bits is not None and protocol.bits <= 8)


def coarse(protocol: Protocol) -> Check:
    """Pruning and coarse grids are no even noise: what they leave depends on the data."""
    if not is_uneven(protocol):
        return Check()
    if protocol.pruned >= 0.5:
        words = (
            "With half of the entries pruned or more, nothing came back in any of our trials "
            "(CIFAR-10 and MNIST, b = 20, m = 200): the batch size can no longer be read."
        )
        remark = Remark(Level.PROTECTED, "pruning", words)
        return Check((remark,), Exposure.NOT_EXPOSED, "so much pruning hides the samples")
    words = (
        "Pruning and coarse grids hit some entries and not others, so what they leave depends on "
        "the data: at 8 bits and at 10 % pruned, all of 20 CIFAR-10 images came back at 40 dB and "
        "more, and nothing of MNIST. Measure it on data like yours with spear audit."
    )
    remark = Remark(Level.NOTE, "pruning or coarse precision", words)
    return Check(
        (remark,), Exposure.UNKNOWN, "what pruning or coarse precision leaves depends on the data"
    )


def _sources(protocol: Protocol) -> str:
    """Where the noise comes from, as a remark's subject."""
    sources = []
    if protocol.sigma:
        sources.append("private noise")
    if protocol.precision not in ("float32", "float64"):
        sources.append(protocol.precision)
    if protocol.pruned:
        sources.append("pruning")
    if protocol.sends != "gradient":
        sources.append("digits lost in subtracting weights")
    return ", ".join(sources) or "noise"


def epsilon(noise: Noise, privacy: Privacy) -> Check:
    """The noise as epsilon, where Opacus is installed and the numbers are there."""
    if not noise.sigma:
        return Check()
    if noise.multiplier is None:
        words = (
            "No epsilon is stated: noise has one where the gradients of a known number of samples are "
            "clipped one by one, or the whole update is."
        )
    elif noise.epsilon is None:
        words = "Stating epsilon takes Opacus: pip install 'spear-fl[opacus]'."
    else:
        words = (
            f"A noise multiplier of {noise.multiplier:.4g} is epsilon = {noise.epsilon:,.4g} by "
            f"Opacus' RDP accountant, {privacy.words()}."
        )
    return Check((Remark(Level.NOTE, "epsilon", words),))
