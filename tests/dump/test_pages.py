"""Tables and pages of a comparison are harmless to spreadsheet programs and browsers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ddpstats.dump.compare._pages import Section, escape_formula, write_page


@pytest.mark.parametrize("cell", ["=1+1", "+A1", "-A1", "@x", "\t=1", "\r=1"])
def test_cell_that_begins_a_formula_is_quoted(cell: str) -> None:
    assert escape_formula(cell) == f"'{cell}"


@pytest.mark.parametrize("cell", ["-1.5", "-inf", "+3", -2.5, None, "a=1", ""])
def test_cell_that_is_a_number_or_a_word_is_not_quoted(cell: Any) -> None:
    assert escape_formula(cell) == cell


def test_page_holds_the_text_and_a_table_for_each_section_escaped(tmp_path: Path) -> None:
    sections = [
        Section(["Name"], [(["<x>"], "red", 'a "b"')], "rank 0"),
        Section((), (), "rank 1", ["No row differs."]),
    ]
    write_page(tmp_path / "t.html", "A & B", "1 < 2", sections)
    page = (tmp_path / "t.html").read_text()
    assert "<h1>A &amp; B</h1>\n<pre>1 &lt; 2</pre>\n<h2>rank 0</h2>\n<table><tr><th>Name</th></tr>\n" in page
    assert '<tr class="red" title="a &quot;b&quot;"><td>&lt;x&gt;</td></tr>\n</table>\n' in page
    assert page.endswith("<h2>rank 1</h2>\n<p>No row differs.</p>\n</body></html>\n")
