"""Tables of a comparison are harmless to spreadsheet programs."""

from __future__ import annotations

from typing import Any

import pytest

from ddpstats.dump.analyze.report import escape_formula


@pytest.mark.parametrize("cell", ["=1+1", "+A1", "-A1", "@x", "\t=1", "\r=1"])
def test_cell_that_begins_a_formula_is_quoted(cell: str) -> None:
    assert escape_formula(cell) == f"'{cell}"


@pytest.mark.parametrize("cell", ["-1.5", "-inf", "+3", -2.5, None, "a=1", ""])
def test_cell_that_is_a_number_or_a_word_is_not_quoted(cell: Any) -> None:
    assert escape_formula(cell) == cell
