"""combine(): several rounds of the same data as one view.

Each round is compressed as it comes. Of its gradient, the coordinates in a growing orthonormal basis of
all rows seen are kept; of its weights, the first round's and how they moved since, in the same basis
(a model that moves by these updates moves inside it). Once the basis holds far more directions than
the spectrum has samples, it is cut to twice as many; what is cut off is noise, and its size is kept.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from spear.errors import Declined, InvalidUpdate
from spear.factors.spectrum import batch_size_from
from spear.factors.streaming import double, live, with_unseen
from spear.update import LayerUpdate, Protocol, Round, Rounds, looks_like_adam, network_before

_FIRST_LIMIT = 512  # directions of the basis before it is cut for the first time
_SPARE_DIRECTIONS = 16  # besides twice the samples that show
_NEW_DIRECTION = 1e-3  # roundings of a round's gradient: fainter directions are dropped at once
_UNEVEN_NOISE = 1.5  # ratio of two rounds' noise from which rows are weighed again
_WEIGHINGS = 4  # of the rounds by their noise, at most; two are usual
_MOVED_OUTSIDE = 4.0  # roundings of the weights: below, they moved inside the basis only
_SEEN_ONCE = 1e-6  # 1 - share of a direction that one round alone shows


def combine(views: Iterable[LayerUpdate]) -> LayerUpdate:
    """Several rounds of the same data as one view, for `invert`.

    A client, or a group of clients behind secure aggregation, that sends one update per round gives a
    server more than any single update: batches larger than the layer come back. Rounds may be
    averaged or summed, noisy, in half precision, with part of the samples, or with ever more of them.
    Rounds that do not fit are left out, and `view.choice` and `result.details` name them.

    Args:
        views: one per round, from `observe` at that round's weights (or bare `LayerUpdate`s). They are
            taken one at a time: a generator keeps no more than one in memory.

    >>> from torch import nn
    >>> from spear import invert, observe
    >>> net = nn.Sequential(nn.Linear(60, 20), nn.ReLU(), nn.Linear(20, 5)).double()
    >>> x, y = torch.randn(20, 60).double(), torch.randint(5, (20,))
    >>> def one_round():
    ...     grads = torch.autograd.grad(nn.functional.cross_entropy(net(x), y), list(net.parameters()))
    ...     view = observe(net, grads)
    ...     with torch.no_grad():
    ...         for p, g in zip(net.parameters(), grads):
    ...             p -= 0.5 * g
    ...     return view
    >>> view = combine(one_round() for _ in range(10))
    >>> print(view.choice.splitlines()[0])
    attacking '0' (60 -> 20, 10 rounds, ReLU after)
    """
    groups: dict[tuple[object, ...], _Accumulated] = {}
    left_out: dict[int, str] = {}
    for number, view in enumerate(views, 1):
        if not isinstance(view, LayerUpdate):
            words = f"round {number} is a {type(view).__name__}"
            raise InvalidUpdate([f"{words}, expected a LayerUpdate: call spear.observe first"])
        if view.rounds is not None:
            raise InvalidUpdate([f"round {number} is combined already: combine all views at once"])
        why = _unfit(view)
        if not why:
            kind = (view.layer, tuple(view.weight.shape))
            if kind not in groups:
                groups[kind] = _Accumulated(view)
            why = groups[kind].add(number, view)
        if why:
            left_out[number] = why
    if not groups:
        reasons = [f"round {number}: {why}" for number, why in left_out.items()]
        raise InvalidUpdate(reasons or ["expected at least one round, got none"])
    main = max(groups.values(), key=lambda group: len(group.kept))
    for group in groups.values():
        if group is not main:
            what = f"{group.described}, others {main.described}"
            left_out.update({kept.number: f"it is of {what}" for kept in group.kept})
    return main.view(left_out)


def _unfit(view: LayerUpdate) -> str:
    """Why a round cannot be combined with any other; empty if it can."""
    if view.relu != "after":
        return f"a ReLU {view.relu} the layer is not supported over rounds"
    if not view.protocol.is_sgd or looks_like_adam(view):
        return "it looks like an update of Adam, or of another optimiser than SGD"
    if view.trained and not view.protocol.one_step:
        return "it comes from several local steps: so far rounds of one step each are combined"
    if view.protocol.weight_decay or view.protocol.proximal:
        return "weight decay and proximal terms are not taken off over rounds"
    if not bool(view.weight_grad.any()):
        return "its gradient is zero"
    return ""


@dataclass(eq=False)
class _Kept:
    """One round, in coordinates of the basis as it is."""

    number: int
    gradient: Tensor  # (m, k)
    outside: Tensor  # (m,): squared length of each row of the gradient outside the basis
    bias_grad: Tensor  # (m,)
    moved: Tensor  # (m, k): weights minus the first round's
    moved_outside: Tensor | None  # (m, n): the same outside the basis, unless it is rounding
    bias: Tensor  # (m,)
    weight_lengths: Tensor  # (m,)
    noise: float  # of an entry of the gradient, as far as it is known
    round: Round

    def turned(self, change: Tensor) -> None:
        """To coordinates (k', k) in the old ones; what they leave out of the gradient is outside."""
        left = self.gradient @ change.T
        self.outside = self.outside + (
            self.gradient.square().sum(1) - left.square().sum(1)
        ).clamp_min(0)
        self.gradient, self.moved = left, self.moved @ change.T

    def padded(self, count: int) -> None:
        """The same with this many more directions, in which it has nothing."""
        more = self.gradient.new_zeros(len(self.gradient), count)
        self.gradient = torch.cat([self.gradient, more], 1)
        moved = torch.cat([self.moved, more], 1)
        self.moved = moved


class _Accumulated:
    """The rounds of one layer so far."""

    def __init__(self, first: LayerUpdate) -> None:
        self.first, self.before = first, _before(first)
        self.weight = double(first.weight)
        self.basis = self.weight[:0]
        self.kept: list[_Kept] = []
        self.limit = _FIRST_LIMIT
        self.live_columns = torch.zeros(first.inputs, dtype=torch.bool, device=self.weight.device)
        self.read_columns = torch.zeros_like(self.live_columns)  # with any weight in any round

    @property
    def described(self) -> str:
        """The layer, in words."""
        name = "a layer" if self.first.layer is None else f"layer {self.first.layer!r}"
        return f"{name} of {self.first.outputs} x {self.first.inputs}"

    def add(self, number: int, view: LayerUpdate) -> str:
        """Take a round in; or say why not."""
        changed = self._changed_before(view)
        if changed:
            return changed
        G, W = double(view.weight_grad), double(view.weight)
        gradient, rest = self._split(G)
        found, directions = _new_directions(rest, _NEW_DIRECTION * _eps(view) * float(G.norm()))
        for kept in self.kept:
            kept.padded(len(directions))
        self.basis = torch.cat([self.basis, directions])
        gradient = torch.cat([gradient, found], 1)
        moved, moved_outside = self._split(W - self.weight)
        lengths = torch.linalg.vector_norm(W, dim=1)
        rounding = _MOVED_OUTSIDE * torch.finfo(view.weight.dtype).eps * lengths
        inside = bool((moved_outside.norm(dim=1) <= rounding).all())
        kept = _Kept(
            number,
            gradient,
            (G.square().sum(1) - gradient.square().sum(1)).clamp_min(0),
            double(view.bias_grad),
            moved,
            None if inside else moved_outside.to(view.weight.dtype),
            double(view.bias),
            lengths,
            _own_noise(view, G),
            _round(number, view),
        )
        for other in self.kept:
            if _repeats(kept, other):
                return f"it repeats round {other.number}: the same update of the same weights"
        self.kept.append(kept)
        live_columns = G.any(0)
        self.live_columns |= live_columns
        self.read_columns |= W.any(0)
        if len(self.basis) > self.limit:
            self._cut()
        return ""

    def _changed_before(self, view: LayerUpdate) -> str:
        """Why its inputs are not those of the first round; empty if nothing says so."""
        if view.reads_data:
            return ""
        before = _before(view)
        if isinstance(before, Declined) or isinstance(self.before, Declined):
            return "layers stand before it that cannot be compared from round to round"
        same = before.keys() == self.before.keys() and all(
            torch.equal(tensor, self.before[name]) for name, tensor in before.items()
        )
        if same:
            return ""
        return "layers before it were trained meanwhile, so its inputs are not the same"

    def _split(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Coordinates (m, k) of rows (m, n) in the basis, and the rest (m, n)."""
        inside = rows @ self.basis.T
        rest = rows - inside @ self.basis
        again = rest @ self.basis.T  # twice is enough (Kahan)
        return inside + again, rest - again @ self.basis

    @property
    def _columns(self) -> int:
        return int(self.live_columns.sum())

    def _spectrum(self) -> tuple[Tensor, Tensor, int | None]:
        """All rounds at one noise level: singular values, right vectors (k, k), and the rank."""
        stacked = torch.cat([kept.gradient / kept.noise for kept in self.kept])
        outside = sum(float(kept.outside.sum()) / kept.noise**2 for kept in self.kept)
        live_rows = int(stacked.any(1).sum())
        triangle = torch.linalg.qr(stacked, mode="r").R
        _, s, Vt = torch.linalg.svd(triangle, full_matrices=False)
        values = with_unseen(s, outside, min(live_rows, self._columns))
        eps = min(_eps(self.first), *(torch.finfo(k.round.precision).eps for k in self.kept))
        return s, Vt, batch_size_from(values, live_rows, self._columns, eps)

    def _cut(self) -> None:
        """Drop directions that are noise, if the spectrum shows which."""
        _, Vt, rank = self._spectrum()
        if rank is not None and 2 * rank + _SPARE_DIRECTIONS < len(Vt):
            self._turn(Vt[: 2 * rank + _SPARE_DIRECTIONS])
        self.limit = max(self.limit, 2 * len(self.basis))

    def _turn(self, change: Tensor) -> None:
        self.basis = change @ self.basis
        for kept in self.kept:
            kept.turned(change)

    def weigh(self, left_out: dict[int, str]) -> None:
        """Find the noise of every round, and rounds that have nothing in common with the others."""
        for _ in range(_WEIGHINGS):
            s, Vt, rank = self._spectrum()
            if not rank or rank >= min(self._columns, len(Vt)):
                return
            scaled = [kept.gradient @ Vt[:rank].T / kept.noise for kept in self.kept]
            alien = [
                kept for kept, part in zip(self.kept, scaled, strict=True)
                if _seen_once(part / s[:rank], rank)
            ]
            if alien and len(alien) < len(self.kept):
                self.kept = [kept for kept in self.kept if kept not in alien]
                left_out.update({kept.number: _NOTHING_IN_COMMON for kept in alien})
                continue
            noise = []
            for kept, part in zip(self.kept, scaled, strict=True):
                inside = part.square().sum() * kept.noise**2
                rest = float(kept.gradient.square().sum() + kept.outside.sum() - inside)
                entries = int(kept.gradient.any(1).sum()) * (self._columns - rank)
                floor = torch.finfo(torch.float64).eps * float(kept.gradient.norm()) / entries**0.5
                noise.append(max((max(rest, 0.0) / max(entries, 1)) ** 0.5, floor))
            change = [new / kept.noise for new, kept in zip(noise, self.kept, strict=True)]
            for new, kept in zip(noise, self.kept, strict=True):
                kept.noise = new
            if max(change) <= _UNEVEN_NOISE * min(change):
                return

    def view(self, left_out: dict[int, str]) -> LayerUpdate:
        """All rounds as one view."""
        self.weigh(left_out)
        _, Vt, rank = self._spectrum()
        self._turn(Vt if rank is None else Vt[: 2 * rank + _SPARE_DIRECTIONS])
        quietest = min(kept.noise for kept in self.kept)
        rounds, start = [], 0
        for kept in self.kept:
            rows = slice(start, start + len(kept.bias))
            rounds.append(
                dataclasses.replace(kept.round, rows=rows, factor=quietest / kept.noise)
            )
            start = rows.stop
        first, factors = self.first, [each.factor for each in rounds]
        words = tuple(f"round {n} is left out: {why}" for n, why in sorted(left_out.items()))
        together = Rounds(
            tuple(rounds),
            self.basis,
            torch.cat([f * k.outside.sqrt() for f, k in zip(factors, self.kept, strict=True)]),
            torch.cat([kept.weight_lengths for kept in self.kept]),
            self.live_columns,
            bool((self.live_columns & ~self.read_columns).any()),
            min((r.precision for r in rounds), key=lambda dtype: torch.finfo(dtype).eps),
            first.weight.dtype,
            next((each.grid for each in rounds if each.grid is not None), None),
            words,
        )
        return LayerUpdate(
            weight=torch.cat([self._weight(kept) for kept in self.kept]),
            bias=torch.cat([kept.bias for kept in self.kept]),
            weight_grad=torch.cat([f * k.gradient for f, k in zip(factors, self.kept, strict=True)]),
            bias_grad=torch.cat([f * k.bias_grad for f, k in zip(factors, self.kept, strict=True)]),
            relu=first.relu,
            layer=first.layer,
            considered=first.considered,
            protocol=_shared_protocol(first.protocol, rounds),
            model=first.model,
            traced=first.traced,
            mistake=first.mistake,
            notes=(*first.notes, *words),
            rounds=together,
        )

    def _weight(self, kept: _Kept) -> Tensor:
        """The round's weights (m, k) in the basis."""
        weight = self.weight @ self.basis.T + kept.moved
        if kept.moved_outside is not None:
            weight = weight + double(kept.moved_outside) @ self.basis.T
        return weight


_NOTHING_IN_COMMON = (
    "its samples are in no other round (another client's, or other data): invert it on its own"
)


def _new_directions(rest: Tensor, level: float) -> tuple[Tensor, Tensor]:
    """Coordinates (m, k) and orthonormal directions (k, n) of rows (m, n), above a level."""
    Q, R = torch.linalg.qr(rest.T)  # an SVD of the triangle is far cheaper than one of the rows
    U, s, Vt = torch.linalg.svd(R.T, full_matrices=False)
    keep = s > level
    return U[:, keep] * s[keep], Vt[keep] @ Q.T


def _own_noise(view: LayerUpdate, G: Tensor) -> float:
    """Noise of an entry that one round shows by itself: rounding, and what lies beyond its samples."""
    rows, columns = (int(part.sum()) for part in live(G))
    size = float(G.norm())
    noise = _eps(view) * size / math.sqrt(rows * columns)
    if view.trained:  # weights were subtracted
        weight = double(view.weight)
        eps = torch.finfo(view.weight.dtype).eps
        noise += eps * float(weight.square().mean().sqrt()) / view.protocol.rate
    s = torch.linalg.svdvals(torch.linalg.qr(G.T, mode="r").R)
    rank = batch_size_from(s, rows, columns, _eps(view))
    if rank is None or rank >= min(rows, columns):
        return noise
    rest = float(s[rank:].norm()) / math.sqrt((rows - rank) * (columns - rank))
    return max(noise, rest)


def _seen_once(left: Tensor, rank: int) -> bool:
    """Does a round share no direction with the others? `left` (m, rank) are its left vectors.

    The left vectors of all rounds are orthonormal, so a direction has length one in a round that alone
    shows it.
    """
    own = torch.linalg.svdvals(left)
    alone = int((own >= 1 - _SEEN_ONCE).sum())
    shown = int((own > _SEEN_ONCE).sum())
    return 0 < shown < rank and alone == shown


def _repeats(one: _Kept, other: _Kept) -> bool:
    """Is it the same round again?"""
    return (
        torch.equal(one.bias, other.bias)
        and torch.equal(one.bias_grad, other.bias_grad)
        and torch.allclose(one.gradient, other.gradient, rtol=1e-12, atol=0.0)
        and torch.allclose(one.moved, other.moved, rtol=1e-12, atol=1e-12)
    )


def _round(number: int, view: LayerUpdate) -> Round:
    rounding = 0.0
    if view.trained:
        rounding = torch.finfo(view.weight.dtype).eps / view.protocol.rate
    return Round(
        number,
        slice(0),
        1.0,
        view.network_behind(),
        view.others,
        view.precision,
        view.samples,
        view.grid,
        rounding,
    )


def _shared_protocol(first: Protocol, rounds: Sequence[Round]) -> Protocol:
    """What holds of all rounds together: gradients, and the samples if every round told the same."""
    told = {each.samples for each in rounds}
    if len(told) > 1:  # data that grows, or a round with part of it: nobody told of all
        first = dataclasses.replace(first, samples=None)
    return dataclasses.replace(first, sends="gradient", lr=None, epochs=None, local_steps=None)


def _before(view: LayerUpdate) -> dict[str, Tensor] | Declined:
    """All tensors of what stands before the layer."""
    if view.model is None or view.layer is None:
        return Declined("no model was given")
    before = network_before(view.model, view.layer)
    if isinstance(before, Declined):
        return before
    return {name: tensor.detach().clone() for name, tensor in before.state_dict().items()}


def _eps(view: LayerUpdate) -> float:
    return torch.finfo(view.precision).eps
