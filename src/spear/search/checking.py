"""A user's finder: what it must offer, and what it may yield.

The judge rests on what a pool says of its directions. Of our own finders that is tested; of others it
is checked here, pool by pool, so that no mistake in a finder can lead to a false verdict.
"""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from spear.errors import InvalidExtension
from spear.factors import Factors
from spear.search.directions import Directions, Finder
from spear.search.kernels import redundancy, smallest_singular, unit
from spear.search.watch import Watch
from spear.tolerances import UNDECIDED

_UNIT = 1e-6  # a vector's length may differ from one by this much: single precision, divided once
_EXPECTED = "expected Directions(side, vectors, zeros, redundancy), see: spear docs extending"


def made_finder(found: Any, name: str) -> Finder:
    """A finder: what was found under a name, or what it returns if it is a class or a function."""
    finder: Finder = made(found, name, "a finder", ("search", "satisfied"))
    return finder


def made(found: Any, name: str, what: str, methods: Sequence[str]) -> Any:
    """An object with these methods: the one found, or what it returns if it is a class or function."""
    result = found
    if isinstance(found, type) or (callable(found) and not hasattr(found, methods[0])):
        try:
            result = found()
        except (Exception, SystemExit) as error:  # the user's code may raise anything
            start = getattr(found, "__init__", found) if isinstance(found, type) else found
            raise InvalidExtension(
                f"calling {name} for {what} failed{_place(error, start)} ({type(error).__name__}: "
                f"{error}): expected options with defaults, or name an object with its options set"
            ) from error
    lacks = [method for method in methods if not callable(getattr(result, method, None))]
    if lacks:
        raise InvalidExtension(
            f"expected {name} to be {what}, with {' and '.join(methods)}; this "
            f"{type(result).__name__} has no {' and no '.join(lacks)}"
        )
    return result


def pools_of(
    finder: Finder, factors: Factors, *, generator: torch.Generator, watch: Watch
) -> Iterator[Directions]:
    """What a finder yields; of a user's finder, each pool checked before anybody relies on it."""
    if _is_ours(finder):
        yield from finder.search(factors, generator=generator, watch=watch)
        return
    check = _Check(finder, factors)
    with check.errors("search"):
        found: Any = finder.search(factors, generator=generator, watch=watch)
    if not isinstance(found, Iterable) or isinstance(found, Tensor):
        check.refuse(
            f"search returned {_kind(found)}, expected an iterator: yield pools as they grow"
        )
    pools, end = iter(found), object()
    while True:
        with check.errors("search"):
            pool = next(pools, end)
        check.untouched()
        if pool is end:
            return
        yield check.checked(pool)


def is_satisfied(finder: Finder, factors: Factors, match: float) -> bool:
    """Does the finder say that a sparsity match this high is worth stopping at?"""
    if _is_ours(finder):
        return finder.satisfied(factors, match)
    check = _Check(finder, factors)
    with check.errors("satisfied"):
        answer: Any = finder.satisfied(factors, match)
    if not isinstance(answer, bool | np.bool_):
        check.refuse(f"satisfied returned {_kind(answer)}, expected True or False")
    return bool(answer)


def users_name(finder: Finder) -> str:
    """What a user's finder is called; empty for one of ours."""
    return "" if _is_ours(finder) else type(finder).__name__


def _is_ours(finder: Finder) -> bool:
    return type(finder).__module__.split(".")[0] == "spear"


class _Check:
    """Checks one search of a user's finder, and says where it went wrong."""

    def __init__(self, finder: Finder, factors: Factors) -> None:
        self.finder, self.factors = finder, factors
        self.name = users_name(finder)
        self.count, self.last = 0, (factors.outputs, 0)  # pools, and the size of the last one
        self.known: dict[bytes, tuple[Tensor, int]] = {}  # directions seen so far
        parts = (factors, factors.view, factors.outputs)
        tensors = {n: t for part in parts for n, t in vars(part).items() if isinstance(t, Tensor)}
        self.versions = {n: (t, t._version) for n, t in tensors.items() if not t.is_inference()}

    def refuse(self, words: str) -> NoReturn:
        raise InvalidExtension(f"the finder {self.name}: {words}")

    @contextmanager
    def errors(self, method: str) -> Iterator[None]:
        """Within, whatever the user's code raises is said with its place."""
        try:
            yield
        except (Exception, SystemExit) as error:
            function = getattr(self.finder, method, None)
            after = f" after {self.count} pools" if self.count else ""
            raise InvalidExtension(
                f"the finder {self.name}: {method} failed{after}{_place(error, function)} "
                f"({type(error).__name__}: {error})"
            ) from error

    def untouched(self) -> None:
        """The judge reads the same tensors."""
        changed = [name for name, (t, before) in self.versions.items() if t._version != before]
        if changed:
            self.refuse(f"search changed {', '.join(changed)} in place: clone before changing")

    def checked(self, pool: Any) -> Directions:
        """A copy that is what it says: vectors and redundancy are read anew from the zeros."""
        self.count += 1
        if not isinstance(pool, Directions):
            self.refuse(f"pool {self.count} is {_kind(pool)}, {_EXPECTED}")
        problems = self._problems(pool)
        if problems:
            self.refuse(f"pool {self.count}: {'; '.join(problems)}")
        known = [self._read(pool, j) for j in range(len(pool))]
        told, read = pool.redundancy.clamp(0, 2), [count for _, count in known]
        self.last = (pool.side, len(pool))
        vectors = [q for q, _ in known]
        return Directions(
            pool.side,
            torch.stack(vectors, 1) if vectors else pool.vectors.detach().clone(),
            pool.zeros.clone(),
            torch.minimum(told, told.new_tensor(read)),
        )

    def _read(self, pool: Directions, j: int) -> tuple[Tensor, int]:
        """The direction that the zeros of column j hold, and how many of them it can spare."""
        side, q, zeros = pool.side, pool.vectors[:, j].detach().clone(), pool.zeros[:, j]
        key = pickle.dumps((side.name, q.tolist(), zeros.cpu().numpy().tobytes()))
        if key not in self.known:
            spare = redundancy(side, unit(q * side.scales), zeros)
            if spare:  # the kernel, as exact as the zeros give it
                kernel, _ = smallest_singular(side.basis[zeros])
                q = kernel * torch.sign(kernel @ q)
            self.known[key] = q, spare
        return self.known[key]

    def _problems(self, pool: Directions) -> list[str]:
        """What is wrong with a pool, in words."""
        factors, side = self.factors, pool.side
        name = getattr(side, "name", "")
        if name not in {"outputs", "inputs"} or side is not getattr(factors, name):
            return ["expected side to be factors.outputs or factors.inputs itself"]
        b, rows, basis = factors.b, len(side.basis), side.basis
        known = isinstance(pool.vectors, Tensor) and pool.vectors.ndim == 2
        count = pool.vectors.shape[-1] if known else None  # without it, any c will do
        c = "c" if count is None else str(count)
        wrong = [
            *_shape("vectors", pool.vectors, (b, count), f"(b, c) = ({b}, c)", basis),
            *_shape("zeros", pool.zeros, (rows, count), f"(rows, c) = ({rows}, {c})", basis),
            *_shape("redundancy", pool.redundancy, (count,), f"(c,) = ({c},)", basis),
        ]
        kinds = {"vectors": basis.dtype, "zeros": torch.bool, "redundancy": torch.int64}
        for part, dtype in kinds.items() if not wrong else ():
            if getattr(pool, part).dtype != dtype:
                wrong.append(f"expected {part} of {dtype}, got {getattr(pool, part).dtype}")
        wrong = wrong or _wrong_entries(pool)
        before, size = self.last
        if not wrong and side is before and len(pool) < size and _rank(pool) < b:
            wrong.append(
                f"it has {len(pool)} directions, the one before had {size}: expected all that were "
                "found so far, not the new ones alone"
            )
        return wrong


def _shape(
    name: str, tensor: Any, shape: tuple[int | None, ...], words: str, basis: Tensor
) -> list[str]:
    if not isinstance(tensor, Tensor):
        return [f"expected {name} as a tensor {words}, got {_kind(tensor)}"]
    wrong = []
    fits = all(size in (None, own) for own, size in zip(tensor.shape, shape, strict=False))
    if tensor.ndim != len(shape) or not fits:
        wrong.append(f"expected {name} {words}, got {tuple(tensor.shape)}")
    if tensor.device != basis.device:
        wrong.append(f"expected {name} on {basis.device}, got it on {tensor.device}")
    return wrong


def _wrong_entries(pool: Directions) -> list[str]:
    """What is wrong with the numbers in tensors of the right shape, in words."""
    vectors, side = pool.vectors, pool.side
    if not bool(vectors.isfinite().all()):
        return ["expected finite vectors, got NaN or infinity"]
    off = (vectors.norm(dim=0) - 1).abs() > _UNIT
    if bool(off.any()):
        j = int(off.nonzero()[0])
        length = float(vectors[:, j].norm())
        return [f"expected vectors of unit length, got {length:.6g} in column {j}"]
    entries = (side.basis @ vectors).abs().masked_fill(~pool.zeros, 0.0)  # (rows, c)
    above = entries.amax(0) / side.zero if len(entries) else vectors.new_zeros(0)
    if bool((above > UNDECIDED).any()):
        j = int(above.argmax())
        return [
            f"zeros marks a row of column {j} where |side.basis @ vector| is {float(above[j]):.3g} "
            f"times side.zero: expected up to {UNDECIDED:g}, as CandidatePool rounds directions"
        ]
    return []


def _rank(pool: Directions) -> int:
    return int(torch.linalg.matrix_rank(pool.vectors)) if len(pool) else 0


def _kind(found: Any) -> str:
    if isinstance(found, Tensor):
        return f"a tensor {tuple(found.shape)}"
    return "None" if found is None else f"a {type(found).__name__}"


def _place(error: BaseException, function: Any) -> str:
    """Where it was raised, in the file of the user's function; where that begins if it was not entered,
    as with arguments that it does not take. Empty if it has no file."""
    frames = traceback.extract_tb(error.__traceback__)
    code = getattr(function, "__code__", None)
    if code is None:
        return ""
    inside = (f.lineno for f in reversed(frames) if f.filename == code.co_filename)
    return f" at {Path(code.co_filename).name}, line {next(inside, code.co_firstlineno)}"
