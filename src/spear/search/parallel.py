"""Work spread over processes: the same pieces, and so the same bits, on any number of workers.

A finder cuts its work into pieces whose number and content depend on the problem alone, and hands
them to `Watch.map`. An executor's workers compute them, or this process if there is none; results
come back in the order of the pieces either way.
"""

from __future__ import annotations

import io
import itertools
import multiprocessing
import os
import pickle
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from numpy.typing import NDArray
from torch import Tensor

from spear.errors import InvalidOption
from spear.search.deadline import TimeIsUp

# Multiplications from which work is cut and sent (a third of a second on one core): reaching a worker
# takes 5 to 20 ms.
MIN_PARALLEL_WORK = 1 << 32
COLUMNS = 64  # of products, at least: with fewer, reading the matrix takes longer than multiplying
_PIECES = 12  # that large work is cut into, at least: two, three or four workers get equal shares
# Pieces under way at a time, enough for as many workers. A constant, because a lazy piece may depend on
# the results that came back before it.
_MAX_IN_FLIGHT = 16
# Bytes of a tensor that a worker first makes and drops: from then on glibc keeps blocks of up to that
# size instead of returning and fetching each one, which takes a sixth of the time of a draw.
_PREALLOCATED_BYTES = 30 << 20

T = TypeVar("T")
Piece = tuple[Any, ...]


def worth_distributing(multiplications: float) -> bool:
    """Is it worth cutting and sending?"""
    return multiplications >= MIN_PARALLEL_WORK


def piece_length(items: int, multiplications: float, fewest: int = 1) -> int:
    """Items per piece: a twelfth of large work, all of small work."""
    return max(fewest, -(-items // _PIECES) if worth_distributing(multiplications) else items)


def cut(step: int, *tensors: Tensor, dim: int = 1) -> list[Piece]:
    """Pieces of tensors that belong together, `step` columns of each at a time, or rows."""
    parts = zip(*(torch.split(tensor, step, dim) for tensor in tensors), strict=True)
    return [tuple(part.contiguous() for part in piece) for piece in parts]


def workers(count: int) -> ProcessPoolExecutor:
    """Processes for `invert(..., executor=)`, one thread each, started when first needed.

    They are spawned, so a script that uses them needs the guard `if __name__ == "__main__":`.

    >>> import spear, torch
    >>> net = torch.nn.Sequential(torch.nn.Linear(30, 40), torch.nn.ReLU(), torch.nn.Linear(40, 5))
    >>> loss = net(torch.randn(2, 30)).square().mean()
    >>> view = spear.observe(net, torch.autograd.grad(loss, list(net.parameters())))
    >>> with spear.workers(2) as executor:
    ...     spear.invert(view, executor=executor).batch_size
    2
    """
    if count < 1:
        raise InvalidOption(f"expected at least one worker, got {count}")
    context = multiprocessing.get_context("spawn")  # forks of a process with threads may hang
    return ProcessPoolExecutor(count, mp_context=context, initializer=one_thread)


def one_thread() -> None:
    """Prepare a worker process: one thread, Ctrl-C left to its parent, ends with its parent."""
    torch.set_num_threads(1)
    torch.empty(_PREALLOCATED_BYTES, dtype=torch.uint8)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """Python's pools leave their workers waiting for ever if the parent is killed."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


@dataclass(eq=False)
class ParallelMap:
    """Computes pieces of work: an executor's workers do it as long as they serve, else this process."""

    executor: Executor | None = None
    failure: str = ""  # why the workers are no longer asked

    @property
    def has_workers(self) -> bool:
        """Are there workers?"""
        return self.executor is not None and not self.failure

    def run(
        self,
        function: Callable[..., T],
        shared: Piece,
        pieces: Iterable[Piece],
        seconds_left: Callable[[], float | None],
        *,
        complete: bool = False,
    ) -> Iterator[T]:
        """`function(*shared, *piece)` for every piece, in order, until the time is up.

        The function may raise `TimeIsUp` itself. It is passed on if nothing is done by then, or not all
        that must be.

        Args:
            function: top-level, so that a worker can import it; takes and returns tensors, numbers, and
                tuples or dataclasses of these.
            shared: arguments common to all pieces.
            pieces: the other arguments, taken as needed: the next once the result of the 16th before it
                has been dealt with.
            seconds_left: None for no limit.
            complete: is it of no use to have only some of the results?
        """
        packed = pack(shared) if self.has_workers else b""
        waiting, under_way = iter(pieces), deque[tuple[Piece, Future[bytes] | None]]()
        left, nothing = seconds_left(), True
        try:
            while left is None or left > 0:
                for piece in itertools.islice(waiting, _MAX_IN_FLIGHT - len(under_way)):
                    under_way.append((piece, self._sent(function, packed, piece)))
                if not under_way:
                    return
                piece, future = under_way[0]
                try:
                    answer = self._answer(future, left)
                except TimeoutError:
                    left = seconds_left()
                    continue
                under_way.popleft()
                yield function(*shared, *piece) if answer is None else unpack(answer)
                left, nothing = seconds_left(), False
        except TimeIsUp:
            pass  # below
        finally:
            for _, future in under_way:
                if future is not None:
                    future.cancel()
        if complete or nothing:
            raise TimeIsUp

    def _sent(
        self, function: Callable[..., Any], shared: bytes, piece: Piece
    ) -> Future[bytes] | None:
        """A worker's answer to come; None if the piece is to be computed here."""
        if self.executor is None or self.failure:
            return None
        try:
            return self.executor.submit(_work, function, shared, pack(piece))
        except Exception as error:  # an executor that is broken or shut down
            self._failed(error)
            return None

    def _answer(self, future: Future[bytes] | None, seconds: float | None) -> bytes | None:
        """What the worker says; None if it failed, `TimeoutError` if it takes too long."""
        if future is None or self.failure:
            return None
        try:
            return future.result(seconds)
        except Exception as error:  # whatever goes wrong elsewhere, compute it here
            if isinstance(error, TimeoutError) and not future.done():
                raise
            self._failed(error)
            return None

    def _failed(self, error: Exception) -> None:
        lines = str(error).strip().splitlines() or ["no message"]
        self.failure = (
            f"a worker failed ({type(error).__name__}: {lines[0][:120]}), so its work and all that "
            "followed was done without workers"
        )


def _work(function: Callable[..., Any], shared: bytes, piece: bytes) -> bytes:
    """What a worker does with one piece."""
    return pack(function(*unpack(shared), *unpack(piece)))


def pack(thing: object) -> bytes:
    """Bytes that any process can read, tensors by value: torch would pass handles to shared memory."""
    buffer = io.BytesIO()
    _Pickler(buffer, protocol=pickle.HIGHEST_PROTOCOL).dump(thing)
    return buffer.getvalue()


def unpack(packed: bytes) -> Any:
    """What was packed, by this process or by one of its workers, so it is trusted."""
    return pickle.loads(packed)  # noqa: S301


class _Pickler(pickle.Pickler):
    def reducer_override(self, thing: Any) -> Any:
        if not isinstance(thing, Tensor):
            return NotImplemented
        # Keep the order in memory: products of the same numbers in another order round differently.
        order = sorted(range(thing.ndim), key=thing.stride, reverse=True)
        return _tensor, (thing.detach().permute(order).contiguous().numpy(), order)


def _tensor(entries: NDArray[Any], order: list[int]) -> Tensor:
    """A tensor whose dimension order[i] is the array's i-th; a copy, so that it is aligned."""
    back = sorted(range(len(order)), key=order.__getitem__)
    return torch.tensor(entries).permute(back)
