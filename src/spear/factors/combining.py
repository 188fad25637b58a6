"""combine(): several rounds of the same data as one view.

Each round is compressed as it comes. Of its gradient, the coordinates in a growing orthonormal basis of
all rows seen are kept; of its weights, the first round's and how they moved since, in the same basis
(a model that moves by these updates moves inside it; if others move it too, weights are kept whole).
Once the basis holds far more directions than the spectrum has samples, it is cut to twice as many; what
is cut off is noise, and its size is kept.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from spear.errors import Declined, InvalidUpdate
from spear.factors.spectrum import batch_size_from
from spear.factors.streaming import live, with_unseen
from spear.tolerances import MARGIN
from spear.update import (
    LOCAL_TRAINING,
    LayerUpdate,
    Protocol,
    Round,
    Rounds,
    double,
    looks_like_adam,
    network_before,
)

_SPARE_DIRECTIONS = 16  # besides twice the samples that show
_NEW_DIRECTION = 1e-3  # roundings of a round's gradient: fainter directions are dropped at once
_UNEVEN_NOISE = 1.5  # ratio of two rounds' noise from which rows are weighed again
_WEIGHINGS = 4  # of the rounds by their noise, at most; two are usual
_MOVED_OUTSIDE = 4.0  # roundings of the weights: below, they moved inside the basis only
_ABOVE_EDGE = 1.05  # times the largest singular value of noise, which varies by 1 % to 5 %
_SAME_ROWS = 1e-12  # relative: float64 leaves 1e-15
_LOUD = 100.0  # times the quietest round's noise
_FOREIGN = 0.05  # share of a round outside the others' span, from which it is no noise
_SEEN_ONCE = 1e-6  # 1 - share of a direction that one round alone shows


def combine(views: Iterable[LayerUpdate | Declined]) -> LayerUpdate:
    """Several rounds of the same data as one view, for `invert`.

    A client, or a group of clients behind secure aggregation, that sends one update per round gives a
    server more than any single update: batches larger than the layer come back. Rounds may be
    averaged or summed, noisy, in half precision, with part of the samples, or with ever more of them.
    Rounds that do not fit are left out, and `view.choice` and `result.details` name them.

    Args:
        views: one per round, from `observe` at that round's weights (or bare `LayerUpdate`s). They are
            taken one at a time: with a generator, two are in memory at most. A `Declined` stands for
            a round that cannot be used, and says why.

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
    together = Combination()
    for view in views:
        together.add(view)
    return together.view()


class Combination:
    """Rounds of the same data, compressed one by one as they come; `combine` fills one at once.

    What is kept are tensors in memory. Weights from `observe` are shared by all views of one state of
    the model, whatever combination they are in.
    """

    def __init__(self) -> None:
        self._groups: dict[tuple[object, ...], _Accumulated] = {}
        self._left_out: dict[int, str] = {}
        self._last = 0

    def __len__(self) -> int:
        """Rounds that are kept and belong together."""
        return len(self._main.kept) if self._groups else 0

    @property
    def _main(self) -> _Accumulated:
        return max(self._groups.values(), key=lambda group: len(group.kept))

    def add(self, view: LayerUpdate | Declined, number: int | None = None) -> str:
        """Take a round in, under its number (the next one unless given); or say why not."""
        self._last = number = self._last + 1 if number is None else number
        if isinstance(view, Declined):
            self._left_out[number] = view.reason
            return view.reason
        if not isinstance(view, LayerUpdate):
            words = f"round {number} is a {type(view).__name__}"
            raise InvalidUpdate([f"{words}, expected a LayerUpdate: call spear.observe first"])
        if view.rounds is not None:
            raise InvalidUpdate([f"round {number} is combined already: combine all views at once"])
        why = _unfit(view)
        if not why:
            kind = (view.layer, tuple(view.weight.shape))
            if kind not in self._groups:
                self._groups[kind] = _Accumulated(number, view)
            why = self._groups[kind].add(number, view)
        if why:
            self._left_out[number] = why
        return why

    def view(self) -> LayerUpdate:
        """All rounds so far as one view. The combination stays as it is, and may go on growing."""
        left_out = dict(self._left_out)
        if not self._groups:
            reasons = [f"round {number}: {why}" for number, why in left_out.items()]
            raise InvalidUpdate(reasons or ["expected at least one round, got none"])
        main = self._main
        for group in self._groups.values():
            if group is not main:
                what = f"{group.described}, others {main.described}"
                left_out.update({kept.number: f"it is of {what}" for kept in group.kept})
        return main.copy().view(left_out)

    def forget_oldest(self) -> None:
        """Let the oldest round go, with everything that only it has shown."""
        self._main.forget_oldest()
        oldest = self._main.kept[0].number if self._main.kept else self._last
        self._left_out = {n: why for n, why in self._left_out.items() if n > oldest}

    def sizes(self) -> dict[int, int]:
        """Bytes of every piece of memory that is held, by its address; others may hold it too."""
        held = (tensor for group in self._groups.values() for tensor in group.tensors())
        storages = (tensor.untyped_storage() for tensor in held)
        return {storage.data_ptr(): storage.nbytes() for storage in storages}


def _unfit(view: LayerUpdate) -> str:
    """Why a round cannot be combined with any other; empty if it can."""
    if view.relu != "after":
        return f"a ReLU {view.relu} the layer is not supported over rounds"
    if not view.protocol.is_sgd or looks_like_adam(view):
        return "it looks like an update of Adam, or of another optimiser than SGD"
    if view.trained and not view.protocol.one_step and view.protocol.lr is None:
        why = "it comes from several local steps, and their learning rate is not known (give lr=)"
        return f"{view.mistake}; {why}" if view.mistake else why
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
    moved: Tensor | None  # (m, k): weights minus the first round's
    weight: Tensor | None  # (m, n): the weights themselves instead, if they moved outside the basis
    bias: Tensor  # (m,)
    weight_lengths: Tensor  # (m,)
    rounding: float  # of an entry of the gradient
    noise: float  # of an entry, as far as it is known
    noisy: bool | None  # is that more than rounding? None where its own spectrum does not tell
    round: Round

    @property
    def energy(self) -> Tensor:
        """Squared length (m,) of each row of the gradient."""
        return self.gradient.square().sum(1) + self.outside

    def noise_of(self, energy: float, columns: int) -> float:
        """Noise of an entry if it has this energy in so many columns; half a rounding at least.

        Rounds that are weighed more are fitted better: without a limit, a few would outweigh all.
        """
        entries = int(self.gradient.any(1).sum()) * columns
        return max(math.sqrt(max(energy, 0.0) / max(entries, 1)), self.rounding / 2)

    def weights(self, first: Tensor, basis: Tensor) -> Tensor:
        """Its weights (m, k) in the basis (k, n), from the first round's (m, n)."""
        weights = double(first if self.weight is None else self.weight) @ basis.T
        return weights if self.moved is None else weights + self.moved

    def turned(self, change: Tensor) -> None:
        """To coordinates (k', k) in the old ones; what they leave out of the gradient is outside."""
        left = self.gradient @ change.T
        self.outside = self.outside + (self.gradient - left @ change).square().sum(1)
        self.gradient = left
        self.moved = None if self.moved is None else self.moved @ change.T

    def padded(self, count: int) -> None:
        """The same with this many more directions, in which it has nothing."""
        more = self.gradient.new_zeros(len(self.gradient), count)
        self.gradient = torch.cat([self.gradient, more], 1)
        self.moved = None if self.moved is None else torch.cat([self.moved, more], 1)


class _Accumulated:
    """The rounds of one layer so far."""

    def __init__(self, number: int, first: LayerUpdate) -> None:
        self.number, self.first, self.before = number, first, _before(first)
        self.weight = _own_weight(first)
        self.basis = double(self.weight[:0])
        self.kept: list[_Kept] = []
        self.limit = first.outputs  # directions of the basis above which it is cut
        self.live_columns = torch.zeros(first.inputs, dtype=torch.bool, device=self.basis.device)
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
        directions = _directions(rest, _NEW_DIRECTION * _eps(view) * float(G.norm()))
        _, directions = self._split(directions)  # faint ones were orthogonal only to rounding
        directions = torch.linalg.qr(directions.T).Q.T
        for kept in self.kept:
            kept.padded(len(directions))
        self.basis = torch.cat([self.basis, directions])
        found = rest @ directions.T
        outside = (rest - found @ directions).square().sum(1)
        gradient = torch.cat([gradient, found], 1)
        moved, moved_outside = self._split(W - double(self.weight))
        lengths = torch.linalg.vector_norm(W, dim=1)
        rounding = _MOVED_OUTSIDE * torch.finfo(view.weight.dtype).eps * lengths
        inside = bool((moved_outside.norm(dim=1) <= rounding).all())
        kept = _Kept(
            number,
            gradient,
            outside,
            double(view.bias_grad),
            moved if inside else None,
            None if inside else _own_weight(view),
            double(view.bias),
            lengths,
            *_own_noise(view, G),
            _round(number, view),
        )
        for other in self.kept:
            if _repeats(kept, other):
                return f"it repeats round {other.number}: the same update of the same weights"
        self.kept.append(kept)
        self.live_columns = self.live_columns | G.any(0)  # views made before keep theirs
        self.read_columns = self.read_columns | W.any(0)
        if len(self.basis) > self.limit:
            self._cut()
        return ""

    def copy(self) -> _Accumulated:
        """The same, sharing every tensor: what `view` does to one leaves the other as it is."""
        same = copy.copy(self)
        same.kept = [copy.copy(kept) for kept in self.kept]
        return same

    def forget_oldest(self) -> None:
        """Drop the oldest round, and directions that no other round has."""
        oldest, *self.kept = self.kept
        if oldest.number == self.number:  # only what says how to read the others stays
            nothing = self.first.weight_grad.new_zeros(1)
            self.first = dataclasses.replace(
                self.first,
                weight_grad=nothing.expand(self.weight.shape),
                bias_grad=nothing.expand(len(self.weight)),
                others={},
            )
        if not self.kept:
            self.basis = self.basis[:0]
            return
        rows = torch.cat([kept.gradient for kept in self.kept])
        self._turn(_directions(rows, _NEW_DIRECTION * _eps(self.first) * float(rows.norm())))
        self._cut()

    def tensors(self) -> Iterator[Tensor]:
        """Everything that is held of the rounds and of their models."""
        first = self.first
        yield from (self.weight, self.basis, self.live_columns, self.read_columns)
        yield from (first.weight, first.weight_grad, *first.others.values())
        models = [first.model]
        for kept in self.kept:
            yield from (part for part in vars(kept).values() if isinstance(part, Tensor))
            yield from kept.round.others.values()
            behind = kept.round.behind
            models += [] if isinstance(behind, Declined) else [behind]
        for model in models:
            yield from () if model is None else model.parameters()

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
        if all(kept.noisy for kept in self.kept):  # noise of deviation one ends at its edge
            edge = math.sqrt(live_rows) + math.sqrt(self._columns)
            return s, Vt, int((s > _ABOVE_EDGE * edge).sum())
        values = with_unseen(s, outside, min(live_rows, self._columns))
        eps = min(_eps(self.first), *(torch.finfo(k.round.precision).eps for k in self.kept))
        return s, Vt, batch_size_from(values, live_rows, self._columns, eps)

    def _assume_noise(self) -> None:
        """Take rounds that do not tell their noise to be as loud as most others are, until weighed.

        Gradients shrink as training goes on, and the same noise then hides where the samples end.
        """
        loud = sorted(kept.noise for kept in self.kept if kept.noisy)
        for kept in self.kept if 2 * len(loud) > len(self.kept) else ():
            if kept.noisy is None:
                kept.noise, kept.noisy = max(kept.noise, loud[len(loud) // 2]), True

    def _cut(self) -> None:
        """Drop directions that are noise, if the spectrum shows which."""
        self._assume_noise()
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
        self._assume_noise()
        for _ in range(_WEIGHINGS):
            s, Vt, rank = self._spectrum()
            if not rank or rank >= min(self._columns, len(Vt)):
                return
            lone = self._lone_rounds(s[:rank], Vt[:rank])
            alien = [kept for kept, energy in lone if energy > _FOREIGN * float(kept.energy.sum())]
            if alien and len(alien) < len(self.kept):
                self.kept = [kept for kept in self.kept if kept not in alien]
                left_out.update({kept.number: _NOTHING_IN_COMMON for kept in alien})
                continue
            noise = {id(kept): kept.noise_of(energy, self._columns - rank) for kept, energy in lone}
            for kept in self.kept if not lone else ():
                rest = kept.gradient - (kept.gradient @ Vt[:rank].T) @ Vt[:rank]
                energy = float(rest.square().sum() + kept.outside.sum())
                noise[id(kept)] = kept.noise_of(energy, self._columns - rank)
            change = [noise.get(id(kept), kept.noise) / kept.noise for kept in self.kept]
            for kept in self.kept:
                kept.noise = noise.get(id(kept), kept.noise)
            if max(change) <= _UNEVEN_NOISE * min(change):
                return

    def _lone_rounds(self, s: Tensor, Vt: Tensor) -> list[tuple[_Kept, float]]:
        """Rounds that share no direction with the others, and their energy outside the others' span.

        With U S V^T of all rounds, the left vectors of the others have U_o^T U_o = 1 - U_r^T U_r. So a
        direction y with |U_r y| = 1 is seen in round r alone, and belongs to inputs along V S^-1 y.
        """
        lone = []
        for kept in self.kept:
            left = kept.gradient @ Vt.T / s / kept.noise  # (m, rank)
            _, own, Yt = torch.linalg.svd(left, full_matrices=False)
            alone, shown = int((own >= 1 - _SEEN_ONCE).sum()), int((own > _SEEN_ONCE).sum())
            if 0 < shown < len(s) and alone == shown:
                span = torch.linalg.qr((Yt[:alone] / s @ Vt).T).Q  # (k, alone)
                lone.append((kept, float((kept.gradient @ span).square().sum())))
        return lone

    def _without_loud_rounds(self, left_out: dict[int, str]) -> None:
        """Leave out rounds whose noise drowns what they add, if the others show as many samples."""
        _, _, rank = self._spectrum()
        everyone, quietest = self.kept, min(kept.noise for kept in self.kept)
        self.kept = [kept for kept in everyone if kept.noise <= _LOUD * quietest]
        if len(self.kept) == len(everyone):
            return
        if self._spectrum()[2] != rank:
            self.kept = everyone
            return
        for kept in everyone:
            if kept not in self.kept:
                left_out[kept.number] = (
                    f"its noise is {kept.noise / quietest:.0e} times that of others, so that it adds "
                    "nothing"
                )

    def view(self, left_out: dict[int, str]) -> LayerUpdate:
        """All rounds as one view."""
        self.weigh(left_out)
        self._without_loud_rounds(left_out)
        if len(self.kept) == 1 and self.kept[0].number == self.number:
            return dataclasses.replace(self.first, notes=(*self.first.notes, *_words(left_out)))
        _, Vt, rank = self._spectrum()
        self._turn(Vt if rank is None else Vt[: 2 * rank + _SPARE_DIRECTIONS])
        quietest = min(kept.noise for kept in self.kept)
        rounds, start = [], 0
        for kept in self.kept:
            rows = slice(start, start + len(kept.bias))
            rounds.append(dataclasses.replace(kept.round, rows=rows, factor=quietest / kept.noise))
            start = rows.stop
        first, factors = self.first, [each.factor for each in rounds]
        words = _words(left_out)
        together = Rounds(
            tuple(rounds),
            self.basis,
            torch.cat([f * k.outside.sqrt() for f, k in zip(factors, self.kept, strict=True)]),
            torch.cat([kept.weight_lengths for kept in self.kept]),
            rank,
            self.live_columns,
            bool((self.live_columns & ~self.read_columns).any()),
            min((r.precision for r in rounds), key=lambda dtype: torch.finfo(dtype).eps),
            first.weight.dtype,
            next((each.grid for each in rounds if each.grid is not None), None),
            words,
        )
        return LayerUpdate(
            weight=torch.cat([kept.weights(self.weight, self.basis) for kept in self.kept]),
            bias=torch.cat([kept.bias for kept in self.kept]),
            weight_grad=torch.cat(
                [f * k.gradient for f, k in zip(factors, self.kept, strict=True)]
            ),
            bias_grad=torch.cat([f * k.bias_grad for f, k in zip(factors, self.kept, strict=True)]),
            relu=first.relu,
            dropout=first.dropout,
            layer=first.layer,
            considered=first.considered,
            protocol=_shared_protocol(first.protocol, rounds),
            model=first.model,
            traced=first.traced,
            mistake=first.mistake,
            notes=(*first.notes, *words),
            rounds=together,
            home=first.home,
        )


def _own_weight(view: LayerUpdate) -> Tensor:
    """The layer's weights as they are now: those of `observe` are a copy already, and shared."""
    weight = view.weight.detach()
    return weight if view.considered else weight.clone()


def _words(left_out: dict[int, str]) -> tuple[str, ...]:
    return tuple(f"round {n} is left out: {why}" for n, why in sorted(left_out.items()))


_NOTHING_IN_COMMON = (
    "its samples are in no other round (another client's, other data, or loud noise): invert it on its "
    "own"
)


def _directions(rows: Tensor, level: float) -> Tensor:
    """Orthonormal directions (k, n) of rows (m, n), above a level."""
    Q, R = torch.linalg.qr(rows.T)  # an SVD of the triangle is far cheaper than one of the rows
    _, s, Vt = torch.linalg.svd(R.T, full_matrices=False)
    directions: Tensor = Vt[s > level] @ Q.T
    return directions


def _own_noise(view: LayerUpdate, G: Tensor) -> tuple[float, float, bool | None]:
    """Rounding of an entry, the noise that one round shows by itself, and is that more, if it tells?"""
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
        return noise, noise, None
    rest = float(s[rank:].norm()) / math.sqrt((rows - rank) * (columns - rank))
    return noise, max(noise, rest), rest > MARGIN * noise


def _repeats(one: _Kept, other: _Kept) -> bool:
    """Is it the same round again, as far as the basis holds both?"""
    if not (torch.equal(one.bias, other.bias) and torch.equal(one.bias_grad, other.bias_grad)):
        return False
    apart = float((one.gradient - other.gradient).square().sum())
    lost = float(one.outside.sum() + other.outside.sum())
    return apart <= _SAME_ROWS**2 * float(one.energy.sum()) + 2 * lost


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
        view.protocol.rate if view.trained and not view.protocol.one_step else 0.0,
        view.protocol.steps is not None or view.protocol.mini_batches,
    )


def _shared_protocol(first: Protocol, rounds: Sequence[Round]) -> Protocol:
    """What holds of all rounds together: gradients, and the samples if every round told the same."""
    told = {each.samples for each in rounds}
    if len(told) > 1:  # data that grows, or a round with part of it: nobody told of all
        first = dataclasses.replace(first, samples=None)
    none = Protocol()
    local = {name: getattr(none, name) for name in LOCAL_TRAINING}
    return dataclasses.replace(first, sends="gradient", **local)


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
