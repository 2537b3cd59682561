"""Dicts, lists, tuples, text and numbers out of a pickle, by a reader of our own: no unpickler, no name is looked up.

torch writes the Flight Recorder's dumps as pickles, and a pickle may run any program when it is unpickled. Only the
opcodes of plain values are known here; every other one is refused with ValueError, and so is a key that is neither text
nor a number. What is made is counted, so that it takes at most 32 times the memory of the file, or 32 MB: one byte may
make a container, or an entry of the memo, where a pickle keeps what it needs once more. A dump has fewer containers,
texts and entries of the memo than one for each four of its bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

_CONSTANTS: dict[int, Callable[[], Any]] = {
    ord("N"): lambda: None,
    0x88: lambda: True,
    0x89: lambda: False,
    ord("}"): dict,
    ord("]"): list,
    ord(")"): tuple,
}
_FIXED = {ord(code): struct.Struct(form) for code, form in (("K", "<B"), ("M", "<H"), ("J", "<i"), ("G", ">d"))}
_LONG, _TUPLES = 0x8A, {0x85: 1, 0x86: 2, 0x87: 3}
_TEXTS = {ord("X"): struct.Struct("<I"), 0x8C: struct.Struct("<B")}
_PUTS = {ord("q"): struct.Struct("<B"), ord("r"): struct.Struct("<I")}
_GETS = {ord("h"): struct.Struct("<B"), ord("j"): struct.Struct("<I")}
_MEMOIZE, _MARK, _STOP = 0x94, ord("("), ord(".")
_SKIPPED = {0x80: 1, 0x95: 8}  # the protocol, and the length of a frame
_COUNTED = frozenset((*b"}](tsu", *_TEXTS, *_TUPLES, *_PUTS, _MEMOIZE))
_ALWAYS_MADE, _BYTES_OF_ONE = 100_000, 4


def check_made(made: int, size: int) -> None:
    """Raises ValueError where that many containers and texts are too many for so many bytes."""
    if made > _ALWAYS_MADE + size // _BYTES_OF_ONE:
        raise ValueError("more lists and texts would be made of it than of any dump")


def plain_value(data: bytes) -> Any:
    """What stands in the pickle. Raises ValueError for anything but plain values."""
    try:
        return _Reader(data).value()
    except (IndexError, KeyError, struct.error, TypeError, AttributeError) as error:
        raise ValueError(f"it does not hold plain values, pickled: {type(error).__name__}") from None


class _Reader:
    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: dict[int, Any] = {}
        self._made = 0

    def value(self) -> Any:
        data, stack = self._data, self._stack
        while True:
            code = data[self._at]
            self._at += 1
            if code in _COUNTED:
                self._made += 1
                check_made(self._made, len(data))
            if code in _TEXTS:
                stack.append(self._bytes(self._number(_TEXTS[code])).decode("utf-8", "surrogatepass"))
            elif code in _PUTS:
                self._memo[self._number(_PUTS[code])] = stack[-1]
            elif code in _GETS:
                stack.append(self._memo[self._number(_GETS[code])])
            elif code in _FIXED:
                stack.append(self._number(_FIXED[code]))
            elif code in _CONSTANTS:
                stack.append(_CONSTANTS[code]())
            elif code == _MARK:
                self._marks.append(len(stack))
            elif code == _STOP:
                return stack.pop()
            else:
                self._rarer(code)

    def _rarer(self, code: int) -> None:
        stack = self._stack
        if code == _LONG:
            stack.append(int.from_bytes(self._bytes(self._number(_FIXED[ord("K")])), "little", signed=True))
        elif code in (ord("u"), ord("s")):
            held = self._since_mark() if code == ord("u") else [stack.pop(-2), stack.pop()]
            if not all(type(key) in (str, int, float) for key in held[::2]):
                raise ValueError("a key that is neither text nor a number")
            stack[-1].update(zip(held[::2], held[1::2], strict=True))
        elif code in (ord("e"), ord("a")):
            held = self._since_mark() if code == ord("e") else [stack.pop()]
            stack[-1].extend(held)
        elif code == ord("t"):
            stack.append(tuple(self._since_mark()))
        elif code in _TUPLES:
            size = _TUPLES[code]
            stack[-size:] = [tuple(stack[-size:])]
        elif code == _MEMOIZE:
            self._memo[len(self._memo)] = stack[-1]
        elif code in _SKIPPED:
            self._bytes(_SKIPPED[code])
        else:
            raise ValueError(f"it holds more than plain values: the opcode {bytes([code])!r} at byte {self._at - 1}")

    def _number(self, form: struct.Struct) -> Any:
        found = form.unpack_from(self._data, self._at)[0]
        self._at += form.size
        return found

    def _bytes(self, size: int) -> bytes:
        found = self._data[self._at : self._at + size]
        if len(found) < size:
            raise ValueError("it ends too early")
        self._at += size
        return found

    def _since_mark(self) -> list[Any]:
        place = self._marks.pop()
        held = self._stack[place:]
        del self._stack[place:]
        return held
