"""What of a name reaches a terminal, and a spreadsheet program."""

from __future__ import annotations

from typing import Any

import pytest

from ddpstats._base.report import harmless, printable


def test_control_characters_are_written_out() -> None:
    assert printable(["a\x1b[2Jb\n", "\ud800 \u202e é"]) == "a\\x1b[2Jb\\n\n\\ud800 \\u202e é"


@pytest.mark.parametrize("cell", ["=1+1", "+A1", "-A1", "@x", "\t=1", "\r=1"])
def test_formulas_are_quoted(cell: str) -> None:
    assert harmless(cell) == f"'{cell}"


@pytest.mark.parametrize("cell", ["-1.5", "-inf", "+3", -2.5, None, "a=1", ""])
def test_numbers_and_words_are_not(cell: Any) -> None:
    assert harmless(cell) == cell
