"""A progress bar is written to a terminal, and to no other stream."""

from __future__ import annotations

import io
import sys

import pytest

from ddpstats._base import progress
from ddpstats._base.progress import ProgressBar


class Stream(io.StringIO):
    def __init__(self, *, terminal: bool) -> None:
        super().__init__()
        self._terminal = terminal

    def isatty(self) -> bool:
        return self._terminal


@pytest.mark.parametrize("terminal", [True, False])
def test_a_bar_on_a_terminal(terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Stream(terminal=terminal)
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(progress, "_EVERY_SEC", 0.0)
    with ProgressBar(1000) as bar:
        bar.add(500)
    shown = stream.getvalue()
    assert ("[###############               ]  50%" in shown) is terminal
    assert shown.endswith("\r\x1b[K") is terminal
