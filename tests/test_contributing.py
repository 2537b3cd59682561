"""CONTRIBUTING.md names rooms, files and functions that there are."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "ddpstats"
TEXT = (ROOT / "CONTRIBUTING.md").read_text()
REFERENCES = sorted(set(re.findall(r"`([\w/]+\.py): ([\w.]+)`", " ".join(TEXT.split()))))
CHANGES = ("marker", "trainer", "collective", "statistic", "sentinel", "missing", "differ", "verb", "format", "torch")


@cache
def names_in(file: Path) -> frozenset[str]:
    """Return the names that a module defines: functions, classes, variables, and ``Class.member``."""
    body = ast.parse(file.read_text()).body
    members = [(f"{node.name}.", part) for node in body if isinstance(node, ast.ClassDef) for part in node.body]
    return frozenset(
        prefix + name for prefix, node in [*(("", node) for node in body), *members] for name in _bound(node)
    )


def _bound(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return [node.name]
    if isinstance(node, ast.Assign):
        return [ast.unparse(target) for target in node.targets]
    return [ast.unparse(node.target)] if isinstance(node, ast.AnnAssign) else []


def section(title: str) -> str:
    return TEXT.split(f"# {title}\n")[1].split("\n## ")[0]


@pytest.mark.parametrize(("file", "name"), REFERENCES)
def test_a_function_that_is_named_is_there(file: str, name: str) -> None:
    assert (PACKAGE / file).exists(), f"there is no ddpstats/{file}"
    assert name in names_in(PACKAGE / file), f"ddpstats/{file} has no {name}"


@pytest.mark.parametrize("name", sorted(set(re.findall(r"`([\w/.]+\.(?:py|txt|cfg|toml|html|md))`", TEXT))))
def test_a_file_that_is_named_is_there(name: str) -> None:
    assert (PACKAGE / name).exists() or (ROOT / name).exists()


def test_the_test_above_can_fail() -> None:
    assert "Reduction.no_such" not in names_in(PACKAGE / "_reduction" / "reduce.py")


def test_every_room_is_named_and_there_is_no_other() -> None:
    cells = [line.split("|")[1] for line in section("Rooms").splitlines() if line.startswith("| `")]
    named = {room.rstrip("/") for cell in cells for room in re.findall(r"`([^`]+)`", cell)}
    rooms = {path.name for path in PACKAGE.iterdir() if path.suffix == ".py" or any(path.glob("*.py"))}
    assert named == rooms - {"__init__.py", "__pycache__"}


def test_no_two_types_of_the_package_have_one_name() -> None:
    """A leading underscore makes no other name. A type is a class, or a name in CamelCase for what annotations say."""
    homes: dict[str, list[str]] = {}
    for file in PACKAGE.rglob("*.py"):
        tree = ast.parse(file.read_text())
        names = [node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
        names += [name for node in tree.body if not isinstance(node, ast.ClassDef) for name in _bound(node)]
        for name in names:
            if re.fullmatch(r"_*[A-Z]\w*[a-z]\w*", name):
                homes.setdefault(name.lstrip("_"), []).append(str(file.relative_to(PACKAGE)))
    assert {"Event", "Structure"} <= homes.keys()
    assert {name: files for name, files in homes.items() if len(files) > 1} == {}


def test_files_and_folders_to_open_are_there() -> None:
    rows = [line for line in section("To change X, open Y").splitlines() if line.startswith("| ")][1:]
    for row in rows:
        for name in re.findall(r"`([\w/.]+(?:/|\.py|\.txt|\.cfg))`", row):
            assert (PACKAGE / name).exists() or (ROOT / name).exists(), name
    assert all(any(word in row.split("|")[1] for row in rows) for word in CHANGES)
    assert len(rows) == len(CHANGES), "what lives in one room is said in its docstring, and needs no row"
