"""The scale of noisy samples, and their labels, from the network behind the layer.

Hundreds of rows fix a direction, even under noise. Its scale depends on the bias gradient alone, one
number with the noise of one pixel, and that doubles the error of every recovered input. With the model,
the length of a sample's gradient can be computed instead: |dL/dz| at the recovered z, times the weight
of a sample in the batch (1/b for a mean), times what clipping left of it.

dL/dz jumps wherever a hidden neuron changes sides, and z is uncertain. So z is first moved, within its
error, to where the network's gradient points along the recovered one, through ReLUs that are as soft as
their inputs are uncertain.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from spear.errors import Declined
from spear.factors import Factors
from spear.judge.layer import Recovered, predicted_error
from spear.judge.losses import Loss, UserCodeFailed, compares_numbers, gradients_of
from spear.judge.replay import Replay, declined, replaying
from spear.judge.selection import Selection, at_scales
from spear.tolerances import EXACT_ERROR, MARGIN, REPLAY_LIMIT
from spear.update import SoftRelu, soften

_SOFTNESS = (1.0, 0.3, 0.1)  # of the ReLUs, in units of their inputs' error, from coarse to fine
_STEPS = 20  # of Adam at each softness; twice as many gain little
_RATE = 0.1  # of Adam, in units of z's error
_PRIOR = 0.01  # weight of |step|^2 in units of z's error, against 1 - cos
_DRAWS = 8  # of noise, to see how uncertain every hidden neuron is
# |cos| between the network's gradient and the recovered one: 0.95 and more with the right label at the
# paper's noisiest setting, 0.83 and less with a wrong one.
_LEAST_COSINE = 0.9
_LENGTH_ERROR = 0.3  # error of a gradient's length, in units of how far its direction is off
_LENGTH_SPREAD = 0.3  # of the lengths of ordinary inputs, relative
_MEDIAN_ERROR = (math.pi / 2) ** 0.5  # of a median, in units of that of a mean
_LARGEST_DEVIATION = 2.5  # mean squared deviation up to which weights follow a rule
_EVIDENCE = 4.0  # squared deviations by which clipping must beat a mean: 2 standard errors
_SCALE_STEPS = 6  # of Newton's method for the scales of all rounds
_SCALE_STEP = 1e-3  # relative, for a difference
_LARGEST_STEP = 0.2  # relative: the bias gradient is not that far off
_FAR_OFF = 9.0  # in units of the median of squares, from where a number counts half
_NEAR_A_MEAN = 0.05  # how far the usual weight may be from 1/b or 1 to be taken for it
# Inputs whose scale is sought have a root mean square of one: so far up and down, in such steps.
_OCTAVES, _STEPS_PER_OCTAVE = 8, 4
_PROMISING = 3  # points of that grid that are looked at closer
_ZOOM_POINTS, _ZOOM, _ZOOMS = 9, 3.0, 25  # points at a time, how much closer each time, how often
_LEVELS = 512  # of clipping that are tried, between the smallest and the largest norm


@dataclass(frozen=True, eq=False)
class Rescaled:
    """A selection whose samples have the length the network gives them."""

    selection: Selection
    labels: Tensor  # (b,) int64, -1 where no label's gradient points along the recovered one
    remark: str
    predicted_error: Tensor | None = None  # (b,) with the error of these scales; None if unknown


def rescale(factors: Factors, selection: Selection, loss: Loss | None) -> Rescaled | Declined:
    """Replace the bias gradient's scale by the network's; or say why not."""
    if compares_numbers(loss):
        return Declined("the loss has no labels")
    if not factors.protocol.one_step:
        return Declined("the update sums several local steps")
    if factors.view.rounds is not None:
        try:
            return _over_rounds(Recovered(factors, selection), loss)
        except UserCodeFailed as failed:
            return declined(failed)
    return Replay.attempt(
        Recovered(factors, selection),
        loss,
        relative_error=torch.zeros_like(selection.C[:, 0]),
        use=lambda replay: _Rescaling(factors, selection, replay).run(),
    )


def scale_from_model(factors: Factors, selection: Selection, loss: Loss | None) -> Selection:
    """The samples of a layer without a bias, at the scale that the network behind it gives.

    The gradient of a label points elsewhere for an input t x, as soon as the network is not
    homogeneous: softmax is not. So t is where some label's gradient points along the recovered one.
    Where none does, the scale stays unknown.
    """
    if factors.view.has_bias or not factors.protocol.one_step or compares_numbers(loss):
        return selection
    found = Replay.attempt(
        Recovered(factors, selection),
        loss,
        relative_error=torch.zeros_like(selection.C[:, 0]),
        use=_scales_by_direction,
    )
    if isinstance(found, Declined):
        return selection
    scale, known = found
    own = (selection.Q * selection.directions.vectors).sum(0)  # of unit directions
    scaled = at_scales(factors, selection, own / torch.where(known, scale, 1.0))
    return dataclasses.replace(scaled, unscaled=None if bool(known.all()) else ~known)


def _scales_by_direction(replay: Replay) -> tuple[Tensor, Tensor]:
    """Scales (b,) at which the nearest label's gradient points along the recovered one; does it?

    The distance falls towards the right scale, but jumps wherever a hidden neuron changes sides: so the
    best few points and dips of a grid are each looked at closer and closer. If two fit, neither is
    known.
    """
    grid = torch.linspace(-_OCTAVES, _OCTAVES, 2 * _OCTAVES * _STEPS_PER_OCTAVE + 1).to(replay.Z)
    tried = [replay.nearest_labels(replay.Z * 2**step) for step in grid.tolist()]
    every, off = (torch.stack(part, 1) for part in zip(*tried, strict=True))  # (b, steps)
    around = torch.nn.functional.pad(off, (1, 1), value=torch.inf)
    dips = (off <= around[:, :-2]) & (off <= around[:, 2:])
    lowest = [
        some.topk(_PROMISING, dim=1, largest=False).indices
        for some in (off, off.masked_fill(~dips, torch.inf))
    ]
    promising = torch.cat(lowest, 1)  # (b, k)
    labels, octave = every.gather(1, promising), grid[promising]
    closer = torch.linspace(-1, 1, _ZOOM_POINTS).to(grid) / _STEPS_PER_OCTAVE
    for _ in range(_ZOOMS):
        near = octave[:, :, None] + closer  # (b, k, points)
        distances = _distances(replay, labels, near)
        octave = near.gather(2, distances.argmin(2, keepdim=True)).squeeze(2)
        closer = closer / _ZOOM
    distances = _distances(replay, labels, octave[:, :, None]).squeeze(2)  # (b, k)
    best = distances.min(1)
    found = octave.gather(1, best.indices[:, None])  # (b, 1)
    as_well = distances <= (MARGIN * best.values).clamp_min(replay.rounding)[:, None]
    other = ((octave - found).abs() > EXACT_ERROR) & as_well
    return torch.exp2(found[:, 0]), (best.values <= REPLAY_LIMIT) & ~other.any(1)


def _distances(replay: Replay, labels: Tensor, octaves: Tensor) -> Tensor:
    """How far gradients of labels (b, k) at scales (b, k, points) are from the recovered ones."""
    b, k, points = octaves.shape
    Z = replay.Z.repeat_interleave(k * points, 0) * torch.exp2(octaves).view(-1, 1)
    D = replay.D.repeat_interleave(k * points, 0)
    each = labels[:, :, None].expand(b, k, points).reshape(-1, 1)
    return replay.distance(Z, D, each).view(b, k, points)


def _over_rounds(found: Recovered, loss: Loss | None) -> Rescaled | Declined:
    """The scale and label with which a sample's gradients of all rounds are nearest the recovered ones.

    Inputs t x go with gradients d / t, so that w g(t x) = d / t has one unknown t for the R m numbers
    of a sample, and one weight w for all of them: 1/b for a mean, 1 for a sum. Numbers that a hidden
    neuron on its other side has changed are far off, and count less.
    """
    everyone, error = found.b, torch.zeros_like(found.selection.C[:, 0])
    replays: list[Replay] = []
    for part in found.parts:
        if len(part.samples) < everyone:
            continue  # the weight of a sample is another one there
        replay = Replay.attempt(found, loss, relative_error=error, use=lambda r: r, part=part)
        if isinstance(replay, Declined):
            return replay
        replays.append(replay)
    if not replays:
        return Declined("no round holds all samples")
    with replaying():
        labels, fits = _labels_of_all(replays)
        scale, weight = torch.ones_like(error), 0.0
        for _ in range(_SCALE_STEPS):
            found.factors.check_time()
            here = _gradients(replays, labels, scale)
            there = _gradients(replays, labels, scale * (1 + _SCALE_STEP))
            D = torch.cat([replay.D for replay in replays], 1)  # (b, R m)
            weight = _usual_weight((here * D / scale[:, None]).sum(1) / here.square().sum(1))
            off = weight * here - D / scale[:, None]
            moved = weight * there - D / (scale * (1 + _SCALE_STEP))[:, None]
            slope = (moved - off) / _SCALE_STEP
            usual = off.square().median(1, keepdim=True).values
            sure = usual / (usual + off.square() / _FAR_OFF)
            step = -(sure * off * slope).sum(1) / (sure * slope.square()).sum(1)
            scale = scale * (1 + step.clamp(-_LARGEST_STEP, _LARGEST_STEP))
    trusted = fits & (scale - 1).abs().lt(_LARGEST_STEP)
    scale = torch.where(trusted, scale, torch.ones_like(scale))
    selection = dataclasses.replace(
        found.selection, Q=found.selection.Q / scale, C=found.selection.C * scale[:, None]
    )
    words = f"scales and labels from the gradients of {len(replays)} rounds"
    return Rescaled(selection, torch.where(fits, labels, -1), words)


def _labels_of_all(replays: list[Replay]) -> tuple[Tensor, Tensor]:
    """The label (b,) whose gradient points along the recovered one in all rounds, and does it?"""
    total = torch.stack([_cosines(replay) for replay in replays]).mean(0)  # (b, classes)
    best = total.max(1)
    return best.indices, best.values >= _LEAST_COSINE


def _cosines(replay: Replay) -> Tensor:
    """Cosine (b, classes) between every label's gradient and the recovered one."""
    every = torch.arange(replay.classes, device=replay.Z.device).expand(len(replay.Z), -1)
    off = []
    for some in torch.split(every, 32, 1):
        replay.factors.check_time()
        off.append(replay.distance(replay.Z, replay.D, some))
    return (1 - torch.cat(off, 1).square()).clamp_min(0).sqrt()


def _gradients(replays: list[Replay], labels: Tensor, scale: Tensor) -> Tensor:
    """dL/dz (b, R m) of every sample in a batch of its own, with inputs this much larger."""
    each = [replay.single_gradients(replay.scaled(scale), labels) for replay in replays]
    return torch.cat(each, 1)


def _usual_weight(weights: Tensor) -> float:
    """The weight of a sample: that of a mean or a sum, if it is near either."""
    usual, b = float(weights.median()), len(weights)
    near = [w for w in (1 / b, 1.0) if abs(usual / w - 1) <= _NEAR_A_MEAN]
    return near[0] if near else usual


class _Rescaling:
    def __init__(self, factors: Factors, selection: Selection, replay: Replay) -> None:
        self.factors, self.replay = factors, replay
        self.off = torch.ones(replay.D.T.shape, dtype=torch.bool, device=replay.D.device)
        self.off[factors.live_rows] = selection.directions.zeros
        # The bias gradient may be so noisy that even its sign is wrong; the pattern knows the sign.
        Wx = replay.Z - replay.bias
        side = torch.where(self.off.T, -Wx, Wx).sum(1).sign()  # (b,)
        # Noise of one input, and so of the scale: the bias gradient acts as one more input, of value 1.
        noise = factors.noise * (selection.C / factors.singular_values).norm(dim=1)  # (b,)
        ordinary, self.shared_error = _ordinary(selection.C.square().sum(1), noise, factors.n)
        prior = ordinary * side
        self.selection = dataclasses.replace(
            selection, Q=selection.Q * prior, C=selection.C / prior[:, None]
        )
        self.Wx, self.D = Wx / prior[:, None], replay.D * prior[:, None]  # (b, m)
        self.error = noise / prior.abs()  # of an input, (b,)
        # Of the scale, relative (b,).
        self.scale_error = (noise.pow(-2) + _LENGTH_SPREAD**-2).rsqrt()

    def run(self) -> Rescaled:
        labels, _ = self.replay.nearest_labels(self._sided(self.Wx + self.replay.bias), self.D)
        z, scale, cos = self._moved(labels)
        found = cos.nan_to_num(0.0) >= _LEAST_COSINE  # a gradient that has vanished points nowhere
        length = self.replay.single_gradients(z, labels).norm(dim=1)
        length = torch.where(found, length, 1.0)
        # What each sample's gradient was multiplied by, with the error of its scale.
        ratio = scale * self.D.norm(dim=1) / length
        length_error = _LENGTH_ERROR * (2 - 2 * cos).clamp_min(0).sqrt()
        length_error = torch.where(found, length_error, torch.inf)
        weight, remark = self._weights(ratio, labels, length_error, scale, z)
        # By the rule or by the bias gradient, weighted by their errors.
        trust = self.scale_error.square() / (self.scale_error.square() + length_error.square())
        scale = torch.where(found, scale * (weight / ratio) ** trust, 1.0)
        rescaled = dataclasses.replace(
            self.selection, Q=self.selection.Q * scale, C=self.selection.C / scale[:, None]
        )
        if not bool(found.all()):
            rough = int((~found).sum())
            words = (
                f"{rough} of {len(found)} samples {'has' if rough == 1 else 'have'} no label, and a "
                "scale that is only rough"
            )
            remark = "; ".join(filter(None, [remark, words]))
        off = self._scale_error(length_error, by_rule=weight is not ratio)
        error = predicted_error(Recovered(self.factors, rescaled), off)
        return Rescaled(rescaled, torch.where(found, labels, -1), remark, error)

    def _scale_error(self, length_error: Tensor, *, by_rule: bool) -> Tensor:
        """Relative error of the scales that weights of a rule give (b,), or those of the bias gradient.

        The rule's number is a mean over samples, so it shares the error that all their scales share.
        """
        own, length = self.scale_error.square(), length_error.square()
        if by_rule:
            trust = own / (own + length)
            own = 1 / (1 / own + 1 / length) + trust.square() / (1 / (own + length)).sum()
        error: Tensor = (own + self.shared_error.square()).sqrt()
        return error

    def _sided(self, z: Tensor) -> Tensor:
        """Preactivations (b, m), on the side of zero that the pattern gives."""
        return torch.where(self.off.T, -z.abs(), z.abs())

    def _moved(self, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """z (b, m) and scale (b,), moved within their error, and the gradient's cos (b,).

        The scale matters: it moves z relative to the biases of all layers.
        """
        lengths = self.factors.view.weight_lengths.to(self.Wx)
        z_error, scale_error = self.error[:, None] * lengths, self.scale_error[:, None]
        network, relus = soften(self.replay.network)
        step = torch.zeros_like(self.Wx).requires_grad_()
        stretch = torch.zeros_like(scale_error).requires_grad_()

        def there() -> Tensor:
            inputs = self.Wx * (scale_error * stretch).exp() + z_error * step
            return self._sided(inputs + self.replay.bias)

        spread = (z_error.square() + (self.Wx * scale_error).square()).sqrt()
        widths = _widths(network, relus, there().detach(), spread)
        target = self.D / self.D.norm(dim=1, keepdim=True)
        optimiser = torch.optim.Adam([step, stretch], lr=_RATE)
        for softness in _SOFTNESS:
            for relu, width in zip(relus, widths, strict=True):
                relu.width = softness * width
            for _ in range(_STEPS):
                self.factors.check_time()
                z = there()
                value = self.replay.total(network, z, labels)
                (slope,) = gradients_of(value, z, create_graph=True)
                cos = (slope * target).sum(1) / slope.norm(dim=1)
                unlikely = (step.square().sum(1) + stretch.square().sum(1)) / step.shape[1]
                away = (1 - cos + _PRIOR * unlikely).sum()
                step.grad, stretch.grad = gradients_of(away, [step, stretch])
                optimiser.step()
        z, scale = there().detach(), (-scale_error * stretch).exp().detach().squeeze(1)
        slope = self.replay.gradient(z, labels)
        return z, scale, (slope * target).sum(1) / slope.norm(dim=1)

    def _weights(
        self, ratio: Tensor, labels: Tensor, length_error: Tensor, scale: Tensor, z: Tensor
    ) -> tuple[Tensor, str]:
        """What the samples' gradients were multiplied by (b,): one number, or clipped at a norm.

        The ratios show it with the error of the bias gradient's scale; a rule of one or two numbers
        that explains them all is far more precise.
        """
        if not bool(length_error.isfinite().any()):
            return ratio, "no label's gradient points along a recovered one"
        trust = 1 / (self.scale_error.square() + length_error.square())
        rules = [torch.zeros_like(ratio)]
        if self.factors.view.reads_data:  # otherwise earlier layers add to the norm
            rules += _clipping(self._norms(labels, scale, z))
        fits = [_common(ratio.log() - rule, trust) for rule in rules]
        best = min(range(len(rules)), key=lambda i: fits[i][0])
        if fits[0][0] <= fits[best][0] + _EVIDENCE:
            best = 0
        misfit, common = fits[best]
        if misfit > _LARGEST_DEVIATION * int(length_error.isfinite().sum()):
            return ratio, (
                "the weights of the samples follow no rule that is known (neither a mean nor "
                "clipping by norm), so their scales come from the bias gradient and are rough"
            )
        remark = "the samples were weighted as clipping by their norm does" if best else ""
        return (rules[best] + common).exp(), remark

    def _norms(self, labels: Tensor, scale: Tensor, z: Tensor) -> Tensor:
        """The norm (b,) of each sample's gradient over all parameters, as clipping takes it."""
        d = self.replay.single_gradients(z, labels).square().sum(1)
        noise = (self.error / scale).square() * self.factors.n
        x = ((self.selection.C / scale[:, None]).square().sum(1) - noise).clamp_min(0)
        parameters = list(self.replay.network.parameters())
        behind = []
        for z_i, label in zip(z, labels, strict=True):
            self.factors.check_time()
            value = self.replay.total(self.replay.network, z_i[None], label[None])
            slopes = gradients_of(value, parameters, materialize_grads=True)
            behind.append(sum(float(slope.square().sum()) for slope in slopes))
        norms: Tensor = (d * (x + 1) + torch.tensor(behind).to(d)).sqrt()
        return norms


def _widths(network: nn.Module, relus: list[SoftRelu], z: Tensor, error: Tensor) -> list[Tensor]:
    """How uncertain the inputs of each ReLU are, one number per sample (b, 1, ...)."""
    generator = torch.Generator().manual_seed(0)
    variances = [torch.zeros(()).to(z) for _ in relus]
    with torch.no_grad():
        network(z)
        there = [relu.seen for relu in relus]
        for _ in range(_DRAWS):
            network(z + error * torch.randn(z.shape, generator=generator).to(z))
            for i, relu in enumerate(relus):
                distance = (relu.seen - there[i]).square()
                mean = distance.mean(tuple(range(1, distance.ndim)), keepdim=True)
                variances[i] = variances[i] + mean / _DRAWS
    return [v.sqrt().clamp_min(torch.finfo(z.dtype).tiny) for v in variances]


def _ordinary(squares: Tensor, noise: Tensor, inputs: int) -> tuple[Tensor, Tensor]:
    """What to divide inputs of these squared lengths (b,) by, to pull the roughest to the usual.

    Where the bias gradient hardly gives a scale, the lengths of the other samples do. Also the error
    of these scales that all have alike (b,), relative: that of the usual length.
    """
    lengths = (squares - inputs * noise.square()).clamp_min(1e-3 * squares)
    sure = noise <= noise.median()
    doubt = noise.square() / (noise.square() + _LENGTH_SPREAD**2)
    scale: Tensor = (lengths / lengths[sure].median()) ** (doubt / 2)
    of_median = _MEDIAN_ERROR * noise[sure].square().mean().sqrt() / float(sure.sum()) ** 0.5
    return scale, doubt * of_median


def _common(logs: Tensor, trust: Tensor) -> tuple[float, Tensor]:
    """How badly one number explains the logs (b,), in squared deviations; and that number."""
    mean = (trust * logs).sum() / trust.sum()
    return float((trust * (logs - mean).square()).sum()), mean


def _clipping(norms: Tensor) -> list[Tensor]:
    """The logs of min(1, C / norm) for every C worth telling apart."""
    logs = norms.log()
    levels = torch.linspace(float(logs.min()), float(logs.max()), _LEVELS).to(logs)
    return [(level - logs).clamp_max(0.0) for level in levels]
