"""What the protocol says about an attack: sizes, local training, clipping, aggregation."""

from __future__ import annotations

from dataclasses import dataclass

from spear import theory
from spear.check.exposure import Check, Exposure
from spear.check.measured import PastMeasurement, nearest
from spear.check.model_structure import LayerView
from spear.check.noise_forecast import NoiseForecast
from spear.report import Level, Remark
from spear.tolerances import NOISY
from spear.update import ENTRYWISE, Protocol

# The engine is at home up to b = m / 5 (normalised inputs), m / 6 for pixels in [0, 1].
NEURONS_PER_SAMPLE, NEURONS_PER_SAMPLE_RAW = 5, 6
_LARGE_FAILURE = 0.01
_MEASURED_STEPS = 50


@dataclass(frozen=True)
class Theory:
    """What the paper's lemmas say about a batch size and a width."""

    b: int
    m: int
    submatrices: float
    """Expected number until the sampling finder has all directions."""
    failure: float
    """Bound on the chance that even exhaustive sampling misses one (the corrected bound)."""

    @staticmethod
    def of(b: int, m: int) -> Theory:
        return Theory(
            b, m, theory.expected_samples_narrow(b, m), theory.failure_bound_by_columns(b, m)
        )


def size(layer: LayerView, rows: int | None, protocol: Protocol) -> Check:
    """The batch against the layer's width and inputs."""
    m, n = layer.outputs, layer.inputs
    if rows is None:
        words = (
            "The batch size was not given. Up to about "
            f"{max(1, m // NEURONS_PER_SAMPLE)} samples come back from this layer "
            f"({max(1, m // NEURONS_PER_SAMPLE_RAW)} of pixels in [0, 1]); from {min(m, n)} on "
            "none can."
        )
        return Check((Remark(Level.NOTE, "batch size", words),))
    whose = _whose(rows, protocol)
    if rows >= min(m, n):
        side, what = ("outputs", m) if m <= n else ("inputs", n)
        words = (
            f"{whose} no fewer than the layer's {what} {side}: its gradient has full rank, and no "
            "single sample can be told from the others. A smaller batch or a wider layer changes "
            "that."
        )
        remark = Remark(Level.PROTECTED, "batch against layer", words)
        return Check((remark,), Exposure.NOT_EXPOSED, f"{rows} samples are too many for the layer")
    if layer.report.relu == "before":
        words = (
            f"{whose} fewer than the layer's {m} outputs. The layer has a ReLU before it only: its "
            "samples are looked for by linear programmes, for which no frontier was measured."
        )
        return Check((Remark(Level.NOTE, "batch against layer", words),))
    if NEURONS_PER_SAMPLE * rows > m:
        words = (
            f"{whose} more than a fifth of the layer's {m} outputs, beyond what was measured. In a "
            "few trials all of 16 batches still came back at a quarter, 2 of 4 at a third and "
            "none of 4 at 0.35."
        )
        remark = Remark(Level.NOTE, "batch against layer", words)
        return Check(
            (remark,), Exposure.UNKNOWN, f"{rows} samples of {m} outputs were not measured"
        )
    ease = (
        "well within reach"
        if NEURONS_PER_SAMPLE_RAW * rows <= m
        else "within reach if inputs are normalised"
    )
    words = f"{whose} {rows / m:.0%} of the layer's {m} outputs: {ease} of the default engine."
    return Check((Remark(Level.EXPOSED, "batch against layer", words),))


def _whose(rows: int, protocol: Protocol) -> str:
    if protocol.clients > 1:
        return f"{protocol.clients} clients count as one batch of {rows} samples, which is"
    return f"A batch of {rows} is"


def success(
    layer: LayerView,
    rows: int,
    lemmas: Theory,
    found: tuple[PastMeasurement, ...],
    forecast: NoiseForecast | None,
) -> Check:
    """What the theory and the rows that were measured say about success and time."""
    remarks = []
    noisy = forecast is not None and forecast.relative >= NOISY
    if found:
        best = found[0]
        words = (
            f"Measured{' without noise' if noisy else ''}: {best.rate} batches came back exactly, "
            f"in {best.median:.2g} s (median), at {best.words} ({best.machine}), which is "
            f"{_compared(best, rows, layer.outputs)}."
        )
        remarks.append(Remark(Level.NOTE if noisy else Level.EXPOSED, "measured", words))
    else:
        words = (
            f"Not measured: no row of benchmarks/rows is near {rows} samples and {layer.outputs} "
            "outputs. Try it on data of your own with spear audit."
        )
        remarks.append(Remark(Level.NOTE, "measured", words))
    words = (
        f"The paper's sampling would take {lemmas.submatrices:.1g} submatrices; the default engine "
        "does not sample."
    )
    if lemmas.failure > _LARGE_FAILURE:
        words += (
            " In a layer this narrow a batch may have too few zeros: the chance is at most "
            f"{100 * lemmas.failure:.2g} %."
        )
    remarks.append(Remark(Level.NOTE, "theory", words))
    return Check(tuple(remarks))


def _compared(row: PastMeasurement, b: int, m: int) -> str:
    if (row.b, row.m) == (b, m):
        return "this very size"
    return "the nearest size measured that is no easier"


def predict(layer: LayerView, rows: int) -> tuple[Theory, tuple[PastMeasurement, ...]] | None:
    """Theory and measurements for a batch, where there are any."""
    beyond = rows >= min(layer.outputs, layer.inputs) or NEURONS_PER_SAMPLE * rows > layer.outputs
    if beyond or layer.report.relu == "before":
        return None
    return Theory.of(rows, layer.outputs), nearest(rows, layer.outputs, layer.inputs)


def optimiser(protocol: Protocol) -> Check:
    """Only SGD leaves a low-rank update."""
    if protocol.is_sgd:
        return Check()
    if protocol.optimizer.lower() in ENTRYWISE:
        words = (
            f"Clients that send weights after steps of {protocol.optimizer} send an update in "
            "which every entry was scaled on its own: it has no low rank, and SPEAR has nothing "
            "to factorise. If the gradient itself is sent and only the server uses it, check with the "
            "optimiser sgd."
        )
        remark = Remark(Level.PROTECTED, "optimiser", words)
        return Check((remark,), Exposure.NOT_EXPOSED, f"{protocol.optimizer} leaves no low rank")
    words = (
        f"SPEAR does not know the optimiser {protocol.optimizer!r}: expected sgd (with momentum, "
        "weight decay or FedProx), or one that scales every entry, such as adam."
    )
    remark = Remark(Level.NOTE, "optimiser", words)
    return Check((remark,), Exposure.UNKNOWN, f"the optimiser {protocol.optimizer!r} is not known")


def local_training(protocol: Protocol) -> Check:
    """FedAvg: the difference of weights is a sum of gradients."""
    if protocol.sends == "gradient" or not protocol.is_sgd:
        return Check()
    steps = protocol.steps
    count = "steps" if steps is None else f"{steps} step{'s' * (steps > 1)}"
    words = (
        f"Training locally ({count} of SGD) hides nothing by itself: the change of "
        "the weights is the sum of the steps' gradients, with the same samples in it. Momentum, "
        "weight decay and FedProx change nothing either."
    )
    remarks = [Remark(Level.EXPOSED, "local training", words)]
    if protocol.mini_batches:
        words = (
            "Nobody knows in which order a client took its mini-batches, so the samples come back "
            "but are never certified."
        )
        remarks.append(Remark(Level.NOTE, "mini-batches", words))
    if steps is not None and steps > _MEASURED_STEPS:
        words = (
            f"More than {_MEASURED_STEPS} local steps were hardly measured: neurons change sides "
            "on the way, which blurs the zeros."
        )
        remarks.append(Remark(Level.NOTE, "many steps", words))
    if protocol.lr is None:
        words = "The learning rate was not given; 0.01 is assumed where digits are counted."
        remarks.append(Remark(Level.NOTE, "learning rate", words))
    return Check(tuple(remarks))


def clipping(protocol: Protocol) -> Check:
    """A factor for a sample is harmless; a factor for each of its parameters is not quite."""
    if protocol.clips == "per-layer":
        words = (
            "Per-layer clipping gives weight and bias factors of their own, so the bias gradient "
            "no longer tells a sample's scale: samples come back right but for one factor each, "
            "and uncertified. A picture at another brightness is still that picture."
        )
        remark = Remark(Level.PROTECTED, "per-layer clipping", words)
        return Check((remark,), Exposure.PARTLY, "samples come back but for a factor each")
    if protocol.clips is None:
        return Check()
    what = "the whole update" if protocol.clips == "global" else "all of a sample's gradients"
    words = (
        f"Clipping alone protects nobody: it multiplies {what} with one factor, which the attack does "
        "not notice."
    )
    return Check((Remark(Level.EXPOSED, "clipping", words),))


def aggregation(protocol: Protocol) -> Check:
    """Secure aggregation makes one batch of many."""
    if protocol.clients == 1:
        return Check()
    words = (
        f"Secure aggregation of {protocol.clients} clients makes one batch of all their samples: "
        "it protects by its size alone. Which sample is whose does not show."
    )
    return Check((Remark(Level.NOTE, "secure aggregation", words),))
