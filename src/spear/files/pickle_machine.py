"""Pickles, read without running anything: a machine that can build nothing but data."""

from __future__ import annotations

import io
import pickletools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import IO, Any

_LINE = 2**16  # bytes of one
_MARK = object()


class Refused(Exception):
    """The pickle wants more than it may have."""


@dataclass(frozen=True)
class Name:
    """A name that a pickle mentions. It is not imported: it stands for what is done instead."""

    called: str


class Bounded(io.BytesIO):
    """A stream of which no more than so many bytes are read, whatever a pickle in it asks for."""

    def __init__(self, stream: IO[bytes], most: int) -> None:
        super().__init__()
        self.stream, self.left = stream, most

    def read(self, count: int | None = -1) -> bytes:
        if count is None or count < 0:
            raise ValueError("expected a number of bytes to read")
        self._spend(count)
        return self.stream.read(count)

    def readline(self, count: int | None = -1) -> bytes:
        line = self.stream.readline(_LINE)
        if len(line) == _LINE:
            raise Refused("expected short lines, got one without end")
        self._spend(len(line))
        return line

    def tell(self) -> int:
        return self.stream.tell()

    def _spend(self, count: int) -> None:
        self.left -= count
        if self.left < 0:
            raise Refused("expected a short pickle, got one that asks for more than there can be")


class PickleMachine:
    """Knows no import, no call and no class. What a file may mention is for the subclass to say.

    The standard `Unpickler` with a strict `find_class` runs no code either, but a file of a few bytes
    can make it allocate gigabytes (a high memo index) or overflow the stack (the hash of a deep tuple).
    """

    names: Mapping[str, str] = {}
    most_steps = 10**6
    expected = "nothing but data"

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}
        self.steps = self._steps()

    def load(self, pickled: bytes | Bounded) -> Any:
        """What the pickle holds.

        Raises:
            Refused: it wants more than data.
            ValueError, IndexError, KeyError: it is none, or a damaged one.
        """
        for count, (opcode, argument, _) in enumerate(pickletools.genops(pickled)):
            if opcode.name == "STOP":
                return self.stack.pop()
            if count == self.most_steps:
                raise Refused(f"expected {self.expected}, got over {count:,} steps to build it")
            if opcode.name not in self.steps:
                raise Refused(f"the file asks for {opcode.name}: expected {self.expected}")
            self.steps[opcode.name](argument)
        raise ValueError("no end")

    def made(self, called: str, arguments: Any) -> Any:
        """What stands for the call of one of the names."""
        raise Refused(f"the file wants to make something else: expected {self.expected}")

    def build(self, target: Any, state: Any) -> None:
        """What stands for giving an object its state."""
        raise Refused(f"the file wants to change something: expected {self.expected}")

    def kept(self, identity: Any) -> Any:
        """What stands for something that is kept outside of the pickle."""
        raise Refused(f"the file asks for BINPERSID: expected {self.expected}")

    def key(self, key: Any) -> Any:
        """A key as dicts get it. Others than text may take for ever to hash."""
        if not isinstance(key, str | bytes):
            raise Refused("expected keys that are text")
        return text(key)

    def set(self, items: list[Any]) -> None:
        """Put keys and values into the dict on top of the stack."""
        if not isinstance(self.stack[-1], dict) or len(items) % 2:
            raise ValueError("no dict")
        for key, value in zip(items[::2], items[1::2], strict=True):
            self.stack[-1][self.key(key)] = value

    def _steps(self) -> dict[str, Callable[[Any], None]]:
        push = self.stack.append
        numbers = "INT BININT BININT1 BININT2 LONG LONG1 LONG4 FLOAT BINFLOAT"
        texts = "UNICODE BINUNICODE SHORT_BINUNICODE BINUNICODE8"
        raw = "BINBYTES SHORT_BINBYTES BINBYTES8 BYTEARRAY8"
        return {
            **dict.fromkeys(f"{numbers} {texts} {raw}".split(), push),
            # Python 2 wrote bytes so; pickletools hands them over as text.
            **dict.fromkeys(
                ("STRING", "BINSTRING", "SHORT_BINSTRING"), lambda s: push(s.encode("latin1"))
            ),
            **dict.fromkeys(("PROTO", "FRAME"), lambda _: None),
            **dict.fromkeys(("PUT", "BINPUT", "LONG_BINPUT"), self._remember),
            **dict.fromkeys(("GET", "BINGET", "LONG_BINGET"), lambda i: push(self.memo[i])),
            "MEMOIZE": lambda _: self._remember(len(self.memo)),
            "NONE": push,
            "NEWTRUE": lambda _: push(True),
            "NEWFALSE": lambda _: push(False),
            "MARK": lambda _: push(_MARK),
            "EMPTY_TUPLE": lambda _: push(()),
            "TUPLE1": lambda _: push(tuple(self._taken(1))),
            "TUPLE2": lambda _: push(tuple(self._taken(2))),
            "TUPLE3": lambda _: push(tuple(self._taken(3))),
            "TUPLE": lambda _: push(tuple(self._since_mark())),
            "EMPTY_LIST": lambda _: push([]),
            "EMPTY_SET": lambda _: push([]),  # as a list: nothing is hashed
            "LIST": lambda _: push(self._since_mark()),
            "APPEND": lambda _: self._extend(self._taken(1)),
            "APPENDS": lambda _: self._extend(self._since_mark()),
            "ADDITEMS": lambda _: self._extend(self._since_mark()),
            "EMPTY_DICT": lambda _: push({}),
            "DICT": lambda _: self._new_dict(self._since_mark()),
            "SETITEM": lambda _: self.set(self._taken(2)),
            "SETITEMS": lambda _: self.set(self._since_mark()),
            "GLOBAL": self._name,
            "STACK_GLOBAL": lambda _: self._name(" ".join(map(_word, self._taken(2)))),
            "REDUCE": lambda _: push(self._called(*self._taken(2))),
            "BUILD": lambda _: self._build(*self._taken(1)),
            "BINPERSID": lambda _: push(self.kept(*self._taken(1))),
        }

    def _remember(self, index: int) -> None:
        self.memo[index] = self.stack[-1]

    def _taken(self, count: int) -> list[Any]:
        if len(self.stack) < count:
            raise IndexError("empty stack")
        items = self.stack[-count:]
        del self.stack[-count:]
        return items

    def _since_mark(self) -> list[Any]:
        items = []
        while (item := self.stack.pop()) is not _MARK:
            items.append(item)
        return items[::-1]

    def _extend(self, items: list[Any]) -> None:
        if not isinstance(self.stack[-1], list):
            raise ValueError("no list")
        self.stack[-1].extend(items)

    def _new_dict(self, items: list[Any]) -> None:
        self.stack.append({})
        self.set(items)

    def _name(self, name: str) -> None:
        if name not in self.names:
            shown = name.replace(" ", ".")[:80]
            raise Refused(f"the file wants to load {shown}: expected {self.expected}")
        self.stack.append(Name(self.names[name]))

    def _called(self, name: Any, arguments: Any) -> Any:
        if not isinstance(name, Name) or not isinstance(arguments, tuple):
            raise Refused(f"the file wants to make something else: expected {self.expected}")
        return self.made(name.called, arguments)

    def _build(self, state: Any) -> None:
        self.build(self.stack[-1], state)


def text(words: str | bytes) -> str:
    """Text that Python 2 wrote as bytes, or text."""
    return words.decode("latin1") if isinstance(words, bytes) else words


def _word(part: Any) -> str:
    """Half of a name; what is no text, and may be nested without end, is not looked at."""
    return part if isinstance(part, str) else "?"
