"""Where a call was made: the user's lines, innermost first, without those of torch and of this package.

To format a stack costs more than most calls that have one. A program makes its calls in the same few places over and
over, so the frames are only compared (by code object and instruction), and formatted the first time.
"""

from __future__ import annotations

import linecache
import os
import sys
from collections.abc import Callable
from types import CodeType, FrameType

from ddpstats._observe.frames import plan_of

_MOST_FRAMES = 200


class StackBook:
    """Numbers stacks.

    Args:
        new: given the lines of a stack that was not seen before, makes its number.
    """

    def __init__(self, new: Callable[[list[str]], int]) -> None:
        self._new = new
        self._is_shown: dict[int, bool] = {}  # id of a code object
        self._codes: list[CodeType] = []  # so that their ids are not given again
        self._numbers: dict[tuple[int, ...], int] = {}

    def here(self) -> int:
        """The number of the stack that this is called from."""
        frame: FrameType | None = sys._getframe(1)
        key: list[int] = []
        is_shown = self._is_shown
        add = key.append
        while frame is not None and len(key) < 2 * _MOST_FRAMES:
            place = id(frame.f_code)
            shown = is_shown.get(place)
            if shown is None:
                self._codes.append(frame.f_code)
                shown = is_shown[place] = not plan_of(frame).internal
            if shown:
                add(place)
                add(frame.f_lasti)
            frame = frame.f_back
        found = self._numbers.get(tuple(key))
        if found is None:
            found = self._numbers[tuple(key)] = self._new(self._lines(sys._getframe(1)))
        return found

    def _lines(self, frame: FrameType | None) -> list[str]:
        lines: list[str] = []
        while frame is not None and len(lines) < _MOST_FRAMES:
            code = frame.f_code
            if self._is_shown.get(id(code), False):
                file, line = os.path.abspath(code.co_filename), frame.f_lineno
                text = linecache.getline(file, line).strip()
                lines.append(f"File {file}, line {line}, in {code.co_name},\n    {text}")
            frame = frame.f_back
        return lines
