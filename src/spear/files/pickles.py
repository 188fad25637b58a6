"""Untrusted pickles: what loading one would cost, worked out without building any of it."""

from __future__ import annotations

import io
import pickletools
from dataclasses import dataclass

_MOST_STEPS = 10**6  # a tensor takes 40, a CIFAR batch 90,000 in all
_MOST_VALUES = 2**22  # built or hashed, of some 64 bytes each
_BYTES_A_VALUE = 64
_DEEPEST = 64  # levels of nested values
_REPEATS = 16  # how often a pickle may use each byte of its text
_TOO_MUCH = "loading it would take far more memory or time than its size"
_INTO = {
    "APPEND",
    "APPENDS",
    "SETITEM",
    "SETITEMS",
    "ADDITEMS",
    "BUILD",
}  # they change the value below their arguments


@dataclass(eq=False)
class _Cost:
    """The cost of one value: how many values are in it, shared ones counted each time, and how deep."""

    values: int
    depth: int = 0


def check_pickle(stream: io.BytesIO) -> set[str]:
    """Read past one pickle; return the names it mentions, such as "os.system".

    An unpickler that calls nothing harmful can still be made to overflow the stack (by hashing a
    tuple that is nested deeply), to compute for ever (by hashing one that holds the same tuple twice,
    sixty levels deep), or to take gigabytes (by copying one long list again and again, or for a memo
    of 2**31 entries).

    Raises:
        ValueError, LookupError: it is damaged, or would cost far more than its size allows.
    """
    stack: list[_Cost | None] = []  # None is a mark
    memo: dict[int, _Cost] = {}
    names, spent = set(), 0
    most = _MOST_VALUES + _REPEATS * stream.getbuffer().nbytes // _BYTES_A_VALUE
    for step, (opcode, argument, _) in enumerate(pickletools.genops(stream)):
        if step > _MOST_STEPS:
            raise ValueError(_TOO_MUCH)
        if opcode.name.endswith("PUT") or opcode.name == "MEMOIZE":
            index = len(memo) if argument is None else int(str(argument))
            if index > step:
                raise ValueError(f"it asks for a memo of {index:,} values")
            memo[index] = _top(stack)
        elif opcode.name.endswith("GET"):
            stack.append(memo[int(str(argument))])
        elif opcode.stack_after == [pickletools.markobject]:
            stack.append(None)
        else:
            made = _done(stack, opcode, argument)
            spent += made.values
            if spent > most or made.depth > _DEEPEST:
                raise ValueError(_TOO_MUCH)
        if opcode.name in ("GLOBAL", "INST"):
            names.add(str(argument).replace(" ", "."))
    return names


def _taken(stack: list[_Cost | None], opcode: pickletools.OpcodeInfo) -> list[_Cost]:
    """What an opcode takes off the stack, the top first."""
    before, taken = opcode.stack_before, []
    count = len(before)
    if pickletools.markobject in before:
        count = before.index(pickletools.markobject)
        while (value := stack.pop()) is not None:
            taken.append(value)
    for _ in range(count):
        taken.append(_top(stack))
        stack.pop()
    return taken


def _top(stack: list[_Cost | None]) -> _Cost:
    if not stack or stack[-1] is None:
        raise ValueError("it takes a value from an empty stack")
    return stack[-1]


def _done(stack: list[_Cost | None], opcode: pickletools.OpcodeInfo, argument: object) -> _Cost:
    """Apply an opcode to the stack of costs; return the cost that it adds."""
    taken = _taken(stack, opcode)
    into = taken.pop() if opcode.name in _INTO else _Cost(0)
    text = len(argument) if isinstance(argument, str | bytes | bytearray) else 0
    added = _Cost(
        1 + text // _BYTES_A_VALUE + sum(value.values for value in taken),
        max((1 + value.depth for value in taken), default=0),
    )
    into.values, into.depth = into.values + added.values, max(into.depth, added.depth)
    stack += [into] * len(opcode.stack_after)
    return added
