"""Work spread over processes: the same bits with and without workers, and nothing lost if they die."""

import itertools
import os
import signal
import subprocess
import sys
import time
from contextlib import nullcontext

import pytest
import torch

import spear
from spear.search import Deadline, TimeIsUp, parallel, sampling, starts
from spear.search.parallel import ParallelMap, _work, pack, unpack
from support.judgements import bits
from support.planted import plant, seeded, truth


@pytest.fixture(scope="module")
def pool():
    with spear.workers(2) as executor:
        yield executor


@pytest.fixture
def small_pieces(monkeypatch):
    """Also split problems that are too small to be worth it: a large one takes a minute."""
    monkeypatch.setattr(parallel, "MIN_PARALLEL_WORK", 1)
    monkeypatch.setattr(starts, "_COLUMNS", 32)
    monkeypatch.setattr(sampling, "_FIRST_STEPS", 3)


def inverted(planted, finder, executor, **options):
    return spear.invert(
        planted.view,
        model=planted.model,
        finder=finder,
        generator=seeded(1),
        executor=executor,
        **options,
    )


def counted(result):
    return {k: v for k, v in result.stats.items() if isinstance(v, int)}


class Counting:
    """An executor that records what it is given: `submit` is all an executor needs."""

    def __init__(self, executor):
        self.executor, self.sent = executor, []

    def submit(self, function, *args):
        self.sent.append(args[0].__name__)
        return self.executor.submit(function, *args)


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("finder", ["cascade", spear.SamplingFinder(at_once=200)])
def test_the_same_bits_with_and_without_workers(finder, pool):
    planted = plant(24, m=120) if finder == "cascade" else plant(8, m=40)
    alone = inverted(planted, finder, None)
    assert alone.outcome is spear.Outcome.EXACT
    counting = Counting(pool)
    result = inverted(planted, finder, counting)
    steps = {"_descend", "_refine", "_kernels_near", "_round", "_fit_signs"}
    assert set(counting.sent) == (steps if finder == "cascade" else {"_seeded_kernels"})
    assert bits(result) == bits(alone)
    assert torch.equal(result.predicted_error, alone.predicted_error)
    assert counted(result) == counted(alone)


def test_small_problems_stay_in_this_process(pool):
    counting = Counting(pool)
    assert inverted(plant(8), "cascade", counting).outcome is spear.Outcome.EXACT
    assert not counting.sent


@pytest.mark.usefixtures("small_pieces")
def test_an_executor_that_is_shut_down_is_told():
    executor = spear.workers(1)
    executor.shutdown()
    result = inverted(plant(24, m=120), "cascade", executor)
    assert result.outcome is spear.Outcome.EXACT
    assert "a worker failed (RuntimeError: cannot schedule new futures" in result.explanation


@pytest.mark.usefixtures("small_pieces")
def test_an_interrupt_returns_what_there_is_and_frees_the_workers(pool):
    def interrupt(progress):
        if progress.done > 20_000:
            raise KeyboardInterrupt

    result = inverted(plant(16, m=60), "sampling", pool, on_progress=interrupt)
    assert "interrupted" in result.stats
    assert pool.submit(abs, -1).result(10) == 1


def only_here(home, x):
    if os.getpid() != home:
        raise ValueError(f"cannot do {x} elsewhere")
    return x.square()


def test_an_exception_of_a_worker_is_told_and_its_work_done_here(pool):
    work = ParallelMap(pool)
    pieces = [(torch.tensor(float(i)),) for i in range(20)]
    results = work.run(only_here, (os.getpid(),), pieces, lambda: None)
    assert [float(r) for r in results] == [i * i for i in range(20)]
    assert "ValueError: cannot do 0" in work.failure


def test_an_exception_here_is_raised(pool):
    with pytest.raises(ValueError, match="cannot do"):
        list(ParallelMap(pool).run(only_here, (-1,), [(torch.ones(1),)], lambda: None))


def doze(x):
    time.sleep(0.2)
    return x


@pytest.mark.parametrize("has_workers", [False, True])
def test_pieces_end_with_the_time(has_workers, pool):
    list(ParallelMap(pool).run(doze, (), [(0,)] * 2, lambda: None))  # both are up
    work = ParallelMap(pool if has_workers else None)
    began = time.monotonic()
    done = list(work.run(doze, (), [(i,) for i in range(200)], lambda: 0.7 - since(began)))
    assert done == list(range(len(done)))
    assert 1 <= len(done) < 30
    assert since(began) < 5
    assert not work.failure


def since(began):
    return time.monotonic() - began


@pytest.mark.parametrize("count", [0, 3])
@pytest.mark.parametrize("complete", [False, True])
def test_nothing_or_not_enough_by_the_end_of_the_time_is_raised(pool, count, complete):
    for work in (ParallelMap(), ParallelMap(pool)):
        left, done = itertools.chain([1.0] * count, itertools.repeat(0.0)), []
        raises = pytest.raises(TimeIsUp) if complete or not count else nullcontext()
        with raises:
            pieces = [(i,) for i in range(9)]
            done.extend(work.run(abs, (), pieces, lambda left=left: next(left), complete=complete))
        assert done == list(range(count))


def cut_short(deadline, x):
    deadline.check()
    return x


def test_a_piece_may_end_by_itself_here_or_in_a_worker(pool):
    for work in (ParallelMap(), ParallelMap(pool)):
        pieces = [(Deadline.after(60), 0), (Deadline.after(60), 1), (Deadline.after(-1), 2)]
        assert list(work.run(cut_short, (), pieces, lambda: None)) == [0, 1]
        with pytest.raises(TimeIsUp):
            list(work.run(cut_short, (), pieces, lambda: None, complete=True))
        assert not work.failure


def test_pieces_are_taken_at_the_same_time_with_and_without_workers(pool):
    def pieces(log):
        for i in range(40):
            log.append(f"take {i}")
            yield (-i,)

    logs = []
    for executor in (None, pool):
        logs.append([])
        for result in ParallelMap(executor).run(abs, (), pieces(logs[-1]), lambda: None):
            logs[-1].append(f"got {result}")
    assert logs[0] == logs[1]
    assert logs[0].index("take 16") == logs[0].index("got 0") + 1


def test_packing_keeps_numbers_and_their_order_in_memory():
    known = truth(plant(5))
    side = known.factors.outputs
    cube = torch.randn(3, 4, 5)
    for tensor in (cube.permute(2, 0, 1), cube[:, 1], cube > 0, cube[:0], cube.sum(), side.basis):
        again = unpack(pack(tensor))
        assert torch.equal(again, tensor)
        assert again.dtype == tensor.dtype
        assert again.data_ptr() % 64 == 0 or not again.numel()
    assert unpack(pack(cube.permute(2, 0, 1))).stride() == cube.permute(2, 0, 1).stride()
    assert len(pack(cube[:, 0])) < len(pack(cube))  # a view does not drag its storage along
    assert torch.equal(unpack(pack((side, 1)))[0].white, side.white)


ORPHANS = """
import os, signal, spear
if __name__ == "__main__":
    executor = spear.workers(1)
    executor.submit(os.getpid).result()
    print(*executor._processes, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="needs SIGKILL")
def test_workers_end_when_their_parent_is_killed(tmp_path):
    script = tmp_path / "orphans.py"
    script.write_text(ORPHANS)
    # The worker inherits stdout, so that the output ends when it does.
    command = [sys.executable, str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == -signal.SIGKILL
    assert len(done.stdout.split()) == 1


@pytest.mark.parametrize("executor", ["two", 2, object()])
def test_what_is_no_executor_is_refused(executor):
    with pytest.raises(spear.InvalidOption, match=r"expected an executor such as spear\.workers"):
        spear.invert(plant(3).view, executor=executor)


def test_no_workers_are_refused():
    with pytest.raises(spear.InvalidOption, match="at least one worker, got 0"):
        spear.workers(0)


def test_a_worker_computes_what_this_process_would():
    a, b, c = torch.randn(3), torch.randn(3), torch.randn(3)
    answer = _work(torch.addcmul, pack((a,)), pack((b, c)))
    assert torch.equal(unpack(answer), torch.addcmul(a, b, c))


@pytest.mark.usefixtures("small_pieces")
def test_killed_workers_do_not_lose_the_inversion(pool):
    """The last test: it takes the pool down."""
    planted = plant(12, m=50)
    finder = spear.SamplingFinder(max_samples=60_000, at_once=200)
    alone = inverted(planted, finder, None)
    counting = Counting(pool)

    def kill(progress):
        if len(counting.sent) == 20:  # some have come back, others are under way
            for process in list((pool._processes or {}).values()):
                process.kill()

    result = inverted(planted, finder, counting, on_progress=kill)
    assert "a worker failed (BrokenProcessPool" in result.explanation
    assert "a worker failed" not in alone.explanation
    assert torch.equal(result.inputs, alone.inputs)
    assert counted(result) == counted(alone)
