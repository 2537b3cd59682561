"""Every contract in contracts.md has a test, and every test that the table names exists."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from tests.needs import ROOT

ROWS = [
    line.strip("| ").split(" | ")
    for line in Path(__file__).with_name("contracts.md").read_text().splitlines()
    if line.startswith("| ") and not line.startswith("| contract |")
]


@cache
def names_of_tests(file: Path) -> frozenset[str]:
    """Return the names of the tests in a file."""
    functions = (node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.FunctionDef))
    return frozenset(function.name for function in functions if function.name.startswith("test_"))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_contract_names_tests_that_exist(row: list[str]) -> None:
    _, tests = row
    references = re.findall(r"`([\w/]+\.py)(?:::(\w+))?`", tests)
    assert references, "a contract without a test"
    for path, name in references:
        file = ROOT / path if path.startswith("benchmarks/") else ROOT / "tests" / path
        assert file.is_file(), f"there is no {file}"
        assert not name or name in names_of_tests(file), f"{path} has no test {name}"
