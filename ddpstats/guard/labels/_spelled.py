"""Whether the text of the program spells a name out: then it is the program's own, and not a piece of data.

Read when ranks differ, not before: all string constants, field, keyword and attribute names of the modules that are not
installed packages, and of the packages that called the collective.
"""

from __future__ import annotations

import ast
import linecache
import re
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from typing import Any

_SEPARATORS = re.compile(r"[/_.:,\-\s\[\]()]+")
_MAX_CHARS = 80
_MAX_BYTES = 2 << 20
_INSTALLED = tuple(sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib"))
_texts_of: dict[str, frozenset[str]] = {}


def spells(name: str, files: Iterable[str]) -> bool:
    """Whether the program's text has ``name``, or all its parts. ``files``: those that the label was found through."""
    texts = _program_texts(frozenset(files))
    if name in texts:
        return True
    parts = [part for part in _SEPARATORS.split(name) if part and not part.isdigit()]
    return bool(parts) and all(part in texts for part in parts)


def _program_texts(files: frozenset[str]) -> set[str]:
    packages = {name for module in list(sys.modules.values()) if (name := _package_of(module, files)) is not None}
    found: set[str] = set()
    for module in list(sys.modules.values()):
        file = _file_of(module)
        if file is None:
            continue
        package = str(getattr(module, "__name__", "")).partition(".")[0]
        if package not in ("torch", "ddpstats", "numpy") and (package in packages or not file.startswith(_INSTALLED)):
            found |= _texts_in(file)
    for file in files:
        found |= _texts_in(file)
    return found


def _package_of(module: Any, files: frozenset[str]) -> str | None:
    file = _file_of(module)
    return None if file is None or file not in files else str(getattr(module, "__name__", "")).partition(".")[0]


def _file_of(module: Any) -> str | None:
    try:
        file = module.__dict__.get("__file__")
    except AttributeError:  # something else that a program has put among the modules
        return None
    return file if type(file) is str and file.endswith(".py") else None


def _texts_in(file: str) -> frozenset[str]:
    found = _texts_of.get(file)
    if found is None:
        try:
            text = "".join(linecache.getlines(file))
            found = frozenset(_collect(ast.parse(text))) if len(text) <= _MAX_BYTES else frozenset()
        except (SyntaxError, ValueError, RecursionError):
            found = frozenset()
        _texts_of[file] = found
    return found


def _collect(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        for text in _texts_at(node):
            if text and len(text) <= _MAX_CHARS and " " not in text:
                yield text
                yield from _SEPARATORS.split(text)


def _texts_at(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    elif isinstance(node, ast.keyword) and node.arg is not None:
        yield node.arg
    elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
        yield node.attr
    elif isinstance(node, ast.ClassDef):
        yield node.name
        for statement in node.body:
            targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
            for target in targets:
                if isinstance(target, ast.Name):
                    yield target.id
