"""Mutation testing of the modules that decide: does a test notice each small fault?

    python tools/mutate.py                        # all mutants that have no row yet
    python tools/mutate.py --only certificate     # of one module
    python tools/mutate.py --again survived       # once more those that survived, after new tests
    python tools/mutate.py --summary              # the table

One process imports everything and collects the tests once. It first runs every test with a trace, to
see which lines it reaches. Then each mutant gets a fork: the changed function's code is put in place of
the original, and the tests that reach it run, quickest first, until one fails or the budget of test
time is spent. A mutant that uses many times the processor time of the tests is ended: it counts as
noticed. Needs Linux or macOS (fork), and the development extra.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import json
import os
import re
import resource
import signal
import sys
import threading
import time
import types
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from _pytest.runner import runtestprotocol

from mutations import Mutant, mutants

ROOT = Path(__file__).resolve().parent.parent
ROWS = ROOT / "benchmarks" / "rows" / "mutants.jsonl"
LISTED = ROOT / "tools" / "mutants.md"
MODULES = {  # and the package of each
    "certificate": "judge",
    "selection": "judge",
    "factorisation": "factors",
    "spectrum": "factors",
    "kernels": "search",
    "dual": "search",
}
OWN_TESTS = {"factorisation": "factors"}  # else the module's own name
TESTS = (
    *("certificate", "selection", "factors", "spectrum", "dual", "verdicts", "verdict"),
    *("inversion", "finders", "cascade", "kernels", "sampling", "noisy", "fedavg", "settings"),
    *("features", "defences", "update", "partial"),
)
_SLOW = 8.0  # seconds; a test that takes longer is left out
_MORE = 4.0  # times the tests' own time, after which a mutant counts as endless


def main() -> None:
    options = parsed()
    if options.summary:
        return show_summary()
    os.chdir(ROOT)
    tests = [str(path) for name in options.tests for path in ROOT.glob(f"tests/**/test_{name}.py")]
    quiet = ["-q", "-o", "addopts=", "-p", "no:cacheprovider", "-p", "no:xdist"]
    sys.exit(pytest.main([*quiet, *tests], plugins=[Campaign(options)]))


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", default=list(MODULES), choices=MODULES)
    parser.add_argument("--again", nargs="+", default=[], help="statuses to run once more")
    parser.add_argument("--tests", nargs="+", default=list(TESTS), help="names of test files")
    parser.add_argument("--budget", type=float, default=8.0, help="seconds of tests per mutant")
    parser.add_argument("--every", type=int, default=1, help="take only each n-th mutant")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--reach", type=Path, default=ROOT / ".mutate-reach.json")
    parser.add_argument("--summary", action="store_true")
    return parser.parse_args()


# Rows


def rows() -> dict[str, dict[str, object]]:
    """The newest row of each mutant."""
    if not ROWS.exists():
        return {}
    found = [json.loads(line) for line in ROWS.read_text(encoding="utf-8").splitlines()]
    return {row["key"]: row for row in found}


def explained() -> set[str]:
    """Mutants that were looked at and cannot, or need not, be noticed: tools/mutants.md says why."""
    text = LISTED.read_text(encoding="utf-8") if LISTED.exists() else ""
    return set(re.findall(r"^- `(.+?)`(?=:|$)", text, re.MULTILINE))


def source_of(module: str) -> Path:
    return ROOT / "src" / "spear" / MODULES[module] / f"{module}.py"


def all_mutants(modules: list[str]) -> list[Mutant]:
    found = []
    for module in modules:
        source = source_of(module).read_text(encoding="utf-8")
        found += mutants(f"{module}.py", source)
    return found


def show_summary() -> None:
    """Counts per file of the mutants that there are today; rows of others are left out."""
    known, listed = rows(), explained()
    print(
        "| file | mutants | noticed | endless | survived, listed | survived, not listed | not run |"
    )
    print("|---|---|---|---|---|---|---|")
    for module in MODULES:
        count: Counter[str] = Counter()
        for mutant in all_mutants([module]):
            status = str(known.get(mutant.key, {}).get("status", "not run"))
            if status == "survived" and mutant.key in listed:
                status = "listed"
            count[status] += 1
        columns = ("killed", "timeout", "listed", "survived", "not run")
        cells = " | ".join(str(count[name]) for name in columns)
        print(f"| `{module}.py` | {count.total()} | {cells} |")


# Forks


class Fork:
    """A child that answers with one JSON value, or with None if it ends otherwise."""

    def __init__(self, work: Callable[[], object], cpu_seconds: float, seconds: float) -> None:
        self.until = time.monotonic() + seconds
        self.answer, write = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(self.answer)
            limit = int(cpu_seconds) + 1
            resource.setrlimit(resource.RLIMIT_CPU, (limit, limit))
            os.setsid()
            try:
                value = work()
                with os.fdopen(write, "w") as stream:
                    json.dump(value, stream)
            finally:
                os._exit(0)
        os.close(write)

    def result(self) -> object:
        """Wait for it, and end it with all it started when its time is over."""
        timer = threading.Timer(self.until - time.monotonic(), self._end)
        timer.start()
        with os.fdopen(self.answer) as stream:
            text = stream.read()
        timer.cancel()
        os.waitpid(self.pid, 0)
        return json.loads(text) if text else None

    def _end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)


# Putting a fault in place


def functions(namespace: dict[str, object], module: str) -> Iterator[types.FunctionType]:
    """Functions, methods and properties that a module defines."""
    for value in list(namespace.values()):
        if isinstance(value, type) and value.__module__ == module:
            yield from functions(dict(vars(value)), module)
            continue
        inner = getattr(value, "fget", None) or getattr(value, "func", None)
        inner = inner or getattr(value, "__func__", None) or value
        if isinstance(inner, types.FunctionType) and inner.__module__ == module:
            yield inner


def put_in_place(mutant: Mutant) -> None:
    """Change the functions and constants of the module that is loaded, for all who imported them."""
    own = mutant.file.removesuffix(".py")
    name = f"spear.{MODULES[own]}.{own}"
    module = importlib.import_module(name)
    fresh = types.ModuleType(name)
    fresh.__file__ = module.__file__
    sys.modules[name] = fresh  # dataclasses look their module up
    exec(compile(mutant.tree, str(module.__file__), "exec"), vars(fresh))
    sys.modules[name] = module
    changed = {function.__qualname__: function for function in functions(vars(fresh), name)}
    for function in functions(vars(module), name):
        other = changed[function.__qualname__]
        if len(other.__code__.co_freevars) == len(function.__code__.co_freevars):
            function.__code__ = other.__code__
        function.__defaults__, function.__kwdefaults__ = other.__defaults__, other.__kwdefaults__
    for constant, value in vars(fresh).items():
        if isinstance(value, int | float | tuple) and getattr(module, constant) != value:
            for user in [m for n, m in sys.modules.items() if n.startswith("spear")]:
                if vars(user).get(constant) == getattr(module, constant) and user is not module:
                    setattr(user, constant, value)
            setattr(module, constant, value)


# The campaign


class Campaign:
    """Takes pytest's loop over: the tests are collected once, and run in forks."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.killers: dict[str, list[str]] = defaultdict(list)
        self.lines: dict[str, set[int]] = {}

    def pytest_configure(self) -> None:
        from hypothesis import Phase, settings

        phases = (Phase.explicit, Phase.generate)  # no shrinking
        settings.register_profile("mutate", derandomize=True, database=None, phases=phases)
        settings.load_profile("mutate")

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        self.items = {item.nodeid: item for item in session.items}
        self.reach = self.reached()
        known, listed = rows(), explained()
        again = set(self.options.again)
        waiting = [
            mutant
            for mutant in all_mutants(self.options.only)[:: self.options.every]
            if mutant.key not in known
            or (known[mutant.key]["status"] in again and mutant.key not in listed)
        ]
        print(f"{len(waiting)} mutants, {len(self.items)} tests", flush=True)
        turns = iter(waiting)
        lock = threading.Lock()
        workers = [
            threading.Thread(target=self.work, args=(turns, lock)) for _ in range(self.options.jobs)
        ]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        return True

    def work(self, turns: Iterator[Mutant], lock: threading.Lock) -> None:
        while True:
            with lock:
                mutant = next(turns, None)
                if mutant is None:
                    return
                tests = self.tests_for(mutant)
                need = sum(self.reach[test]["seconds"] for test in tests)
                began = time.monotonic()
                fork = Fork(
                    functools.partial(self.judge, mutant, tests),
                    _MORE * need + 10,
                    3 * _MORE * need + 60,
                )
            answer = fork.result()
            with lock:
                self.note(mutant, answer, len(tests), time.monotonic() - began)

    def note(self, mutant: Mutant, answer: object, tests: int, seconds: float) -> None:
        row = {"key": mutant.key, "line": mutant.line, "tests": tests, "seconds": round(seconds, 1)}
        row |= answer if isinstance(answer, dict) else {"status": "timeout"}
        if row.get("by"):
            killers = self.killers[mutant.function]
            killers[:] = [row["by"], *[k for k in killers if k != row["by"]]][:5]
        with ROWS.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(row) + "\n")
        print(f"{row['status']:9} {seconds:5.1f} s {mutant.line:4} {mutant.key[:150]}", flush=True)

    def judge(self, mutant: Mutant, tests: list[str]) -> dict[str, str]:
        """In a fork: which test fails first with the fault in place?"""
        try:
            put_in_place(mutant)
        except Exception as problem:
            return {"status": "killed", "by": "", "how": f"import: {problem!r}"[:100]}
        chosen = [self.items[test] for test in tests]
        for item, following in zip(chosen, [*chosen[1:], None], strict=True):
            for report in runtestprotocol(item, nextitem=following, log=False):
                if report.failed:
                    return {"status": "killed", "by": item.nodeid}
        return {"status": "survived"}

    def tests_for(self, mutant: Mutant) -> list[str]:
        """Those that reach the line: what caught its neighbours first, then one of every kind."""
        module = mutant.file.removesuffix(".py")
        own_tests = f"test_{OWN_TESTS.get(module, module)}.py"
        everywhere = mutant.function == "<module>"
        line = self.traced_line(mutant)
        reaching = [
            (test, seen["seconds"])
            for test, seen in self.reach.items()
            if test in self.items
            and seen["seconds"] < _SLOW
            and (
                seen["lines"].get(mutant.file)
                if everywhere
                else line in seen["lines"].get(mutant.file, ())
            )
        ]
        kinds: Counter[str] = Counter()
        order = []
        for test, seconds in sorted(reaching, key=lambda pair: pair[1]):
            kind = test.split("[")[0]
            kinds[kind] += 1
            rank = 0 if own_tests in test else kinds[kind]  # its own tests first, all of them
            order.append((test not in self.killers[mutant.function], rank, seconds, test))
        chosen, spent = [], 0.0
        for *_, seconds, test in sorted(order):
            if spent + seconds <= self.options.budget:
                chosen.append(test)
                spent += seconds
        return chosen

    def traced_line(self, mutant: Mutant) -> int:
        """The line that a trace shows: of an expression over several lines not all do."""
        if mutant.file not in self.lines:
            every = (seen["lines"].get(mutant.file, ()) for seen in self.reach.values())
            self.lines[mutant.file] = set().union(*every)
        return max((n for n in self.lines[mutant.file] if n <= mutant.line), default=0)

    # Which test reaches which line

    def reached(self) -> dict[str, dict[str, object]]:
        path = self.options.reach
        known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        new = [test for test in self.items if test not in known]
        for start in range(0, len(new), 40):  # a fork for some of them, since traces add up
            part = new[start : start + 40]
            answer = Fork(functools.partial(self.trace, part), 3600, 3600).result()
            known |= answer if isinstance(answer, dict) else {}
            path.write_text(json.dumps(known), encoding="utf-8")
            print(f"{start + len(part)} of {len(new)} tests traced", flush=True)
        broken = [test for test, seen in known.items() if seen["failed"]]
        if broken:
            print(f"left out, since they fail as it is: {broken}", flush=True)
        return {test: seen for test, seen in known.items() if not seen["failed"]}

    def trace(self, tests: list[str]) -> dict[str, dict[str, object]]:
        """In a fork: the lines of the modules that each test reaches, and its time."""
        files = {str(source_of(name)): f"{name}.py" for name in MODULES}
        found = {}
        chosen = [self.items[test] for test in tests]
        for item, following in zip(chosen, [*chosen[1:], None], strict=True):
            lines: dict[str, set[int]] = defaultdict(set)
            trace = functools.partial(_trace, files, lines)
            began = time.process_time()
            sys.settrace(trace)
            threading.settrace(trace)
            reports = runtestprotocol(item, nextitem=following, log=False)
            sys.settrace(None)
            threading.settrace(None)  # type: ignore[arg-type]
            found[item.nodeid] = {
                "seconds": round(time.process_time() - began, 3),
                "failed": any(report.failed for report in reports),
                "lines": {name: sorted(reached) for name, reached in lines.items()},
            }
        return found


def _trace(files, lines, frame, event, argument):
    name = files.get(frame.f_code.co_filename)
    if name is None:
        return None
    lines[name].add(frame.f_lineno)
    return functools.partial(_trace, files, lines)


if __name__ == "__main__":
    main()
