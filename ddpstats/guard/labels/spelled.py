"""Whether the text of the program spells a name out: then it is the program's own, and not a piece of data.

Read when ranks differ, and in mode "step" at the first call of a label: all string constants, field, keyword and
attribute names of the modules that are not installed packages, and of the packages that called the collective.
"""

from __future__ import annotations

import ast
import re
import sys
import sysconfig
from collections.abc import Iterator
from typing import Any, Literal

from ddpstats.guard.labels.source import parsed

_SEPARATORS = re.compile(r"[/_.:,\-\s\[\]()]+")
_MAX_CHARS = 80
_INSTALLED = tuple(sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib"))
_Texts = tuple[frozenset[str], frozenset[str]]
_NO_TEXTS: _Texts = (frozenset(), frozenset())
_MAX_PROGRAMS = 64
_texts_of: dict[str, _Texts] = {}
_programs: dict[frozenset[str], tuple[tuple[str, ...], _Texts]] = {}  # with the modules that there were


Spelled = Literal["whole", "parts", ""]


def spells(name: str, files: frozenset[str]) -> Spelled:
    """Whether the program's text has ``name``, or all its parts. ``files``: those that the label was found through."""
    texts, parts = _program_texts(files)
    if name in texts:
        return "whole"
    words = [word for word in _SEPARATORS.split(name) if word and not word.isdigit()]
    return "parts" if words and all(word in texts or word in parts for word in words) else ""


def _program_texts(files: frozenset[str]) -> _Texts:
    """(Whole texts, and what stands between separators in them and in formatted texts.)"""
    modules = tuple(sys.modules)
    known = _programs.get(files)
    if known is None or known[0] != modules:
        if len(_programs) >= _MAX_PROGRAMS:
            _programs.clear()
        known = _programs[files] = modules, _read_program(files)
    return known[1]


def _read_program(files: frozenset[str]) -> _Texts:
    packages = {name for module in list(sys.modules.values()) if (name := _package_of(module, files)) is not None}
    read = set(files)
    for module in list(sys.modules.values()):
        file = _file_of(module)
        if file is None:
            continue
        package = str(getattr(module, "__name__", "")).partition(".")[0]
        if package not in ("torch", "ddpstats", "numpy") and (package in packages or not file.startswith(_INSTALLED)):
            read.add(file)
    both = [_texts_in(file) for file in read]
    return frozenset().union(*(texts for texts, _ in both)), frozenset().union(*(parts for _, parts in both))


def _package_of(module: Any, files: frozenset[str]) -> str | None:
    file = _file_of(module)
    return None if file is None or file not in files else str(getattr(module, "__name__", "")).partition(".")[0]


def _file_of(module: Any) -> str | None:
    try:
        file = module.__dict__.get("__file__")
    except AttributeError:  # something else that a program has put among the modules
        return None
    return file if type(file) is str and file.endswith(".py") else None


def _texts_in(file: str) -> _Texts:
    found = _texts_of.get(file)
    if found is None:
        try:
            tree = parsed(file)
        except RecursionError:
            tree = None
        found = _texts_of[file] = _NO_TEXTS if tree is None else _collect(tree)
    return found


def _collect(tree: ast.Module) -> _Texts:
    whole: set[str] = set()
    formatted: set[str] = set()
    in_formatted = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        kept = formatted if id(node) in in_formatted else whole
        kept.update(text for text in _texts_at(node) if text and len(text) <= _MAX_CHARS)
    words = (text for text in (*whole, *formatted) if " " not in text)
    parts = {part for text in words for part in _SEPARATORS.split(text) if part}
    return frozenset(whole), frozenset(parts)


def _texts_at(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    elif isinstance(node, ast.keyword) and node.arg is not None:
        yield node.arg
    elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
        yield node.attr
    elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        yield node.name
    elif isinstance(node, ast.ClassDef):
        yield node.name
        for statement in node.body:
            targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
            for target in targets:
                if isinstance(target, ast.Name):
                    yield target.id
