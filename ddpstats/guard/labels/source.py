"""The call that a frame is in, found in the source text. Knows nothing of torch, and runs nothing.

A code object tells for each instruction which part of the text it was compiled from. The text is parsed once per file.
Where the text is not the code's (a file that was edited since, generated code), nothing is found.
"""

from __future__ import annotations

import ast
import dis
import linecache
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Any

Function = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
Comprehension = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
Loop = (ast.For, ast.AsyncFor, *Comprehension)
_MAX_FILES = 256
_MAX_BYTES = 4 << 20
_MAX_TRIES = 3


@dataclass(eq=False)
class SourceFile:
    """One parsed file: every node's parent, and its calls and comprehensions by where they end."""

    parents: dict[ast.AST, ast.AST] = field(default_factory=dict)
    ends: dict[tuple[int, int], list[ast.expr]] = field(default_factory=dict)
    calls_of_line: dict[int, list[ast.Call]] = field(default_factory=dict)

    @classmethod
    def of(cls, tree: ast.Module) -> SourceFile:
        found = cls()
        stack: list[ast.AST] = [tree]
        while stack:
            node = stack.pop()
            for child in ast.iter_child_nodes(node):
                found.parents[child] = node
                stack.append(child)
            if isinstance(node, (ast.Call, *Comprehension)):
                found.ends.setdefault((node.end_lineno or 0, node.end_col_offset or 0), []).append(node)
            if isinstance(node, ast.Call):
                for line in range(node.lineno, (node.end_lineno or node.lineno) + 1):
                    found.calls_of_line.setdefault(line, []).append(node)
        return found

    def scope_of(self, node: ast.AST) -> ast.AST:
        """The function, class or module whose variables ``node`` sees first; comprehensions have none of their own."""
        scopes = (outer for outer in self.around(node) if isinstance(outer, (*Function, ast.ClassDef, ast.Module)))
        return next(scopes, node)

    def around(self, node: ast.AST) -> Iterator[ast.AST]:
        """What the node stands in, from the inside out."""
        outer = self.parents.get(node)
        while outer is not None:
            yield outer
            outer = self.parents.get(outer)

    def is_inside(self, node: ast.AST, outer: ast.AST) -> bool:
        return node is outer or any(around is outer for around in self.around(node))


def names_in(node: ast.AST) -> Iterator[ast.Name]:
    """The variables in a piece of the text."""
    return (part for part in ast.walk(node) if isinstance(part, ast.Name))


_parsing = threading.RLock()  # two threads at once may end in a SystemError (CPython's gh-106905)
_files: dict[str, SourceFile | None] = {}
_tries: dict[str, int] = {}


def source_of(code: CodeType, module_globals: dict[str, Any]) -> SourceFile | None:
    """The parsed file of a code object; None where there is no text, or none that parses."""
    name = code.co_filename
    if name in _files:
        return _files[name]
    if len(_files) >= _MAX_FILES:
        _files.clear()
    try:
        tree = parsed(name, module_globals if type(module_globals) is dict else None)
        _files[name] = None if tree is None else SourceFile.of(tree)
    except RecursionError:  # of the program's own depth, maybe: then it is worth another try, but not for ever
        _tries[name] = _tries.get(name, 0) + 1
        if _tries[name] < _MAX_TRIES:
            raise
        _files[name] = None
    return _files[name]


def parsed(file: str, module_globals: dict[str, Any] | None = None) -> ast.Module | None:
    """The syntax tree of a file; None where there is no text, or none that parses. Raises RecursionError."""
    text = "".join(linecache.getlines(file, module_globals))
    try:
        with _parsing:
            return ast.parse(text) if text and len(text) <= _MAX_BYTES else None
    except (SyntaxError, ValueError, SystemError):
        return None


def node_at(frame: FrameType) -> tuple[SourceFile, ast.expr] | None:
    """The call (or the comprehension, which Python 3.11 calls too) that the frame is executing."""
    code, instruction = frame.f_code, frame.f_lasti
    file = source_of(code, frame.f_globals)
    if file is None or instruction < 0:
        return None
    node = _by_position(file, code, instruction)
    if node is None or not _is_of(node, code):
        node = _by_line(file, code, frame.f_lineno, instruction)
    return None if node is None else (file, node)


def _by_position(file: SourceFile, code: CodeType, instruction: int) -> ast.expr | None:
    if sys.version_info < (3, 11):
        return None
    positions = list(code.co_positions())
    index = instruction // 2
    if index >= len(positions):
        return None
    start_line, end_line, _, end_column = positions[index]
    if end_line is None or end_column is None:
        return None
    # By the end: where calls are chained, the instruction's position begins at the last method's name.
    found = [node for node in file.ends.get((end_line, end_column), []) if node.lineno <= (start_line or end_line)]
    return found[0] if len(found) == 1 else None


def _by_line(file: SourceFile, code: CodeType, line: int, instruction: int) -> ast.expr | None:
    """Where positions do not help (Python 3.10, rewritten code): the only call in the line that the code could make."""
    found = [node for node in file.calls_of_line.get(line, []) if _is_of(node, code)]
    return found[0] if len(found) == 1 else _by_order(file, code, line, instruction)


def _by_order(file: SourceFile, code: CodeType, line: int, instruction: int) -> ast.expr | None:
    """The n-th call that begins in a line, where the code makes its n-th call of that line. Inner ones come first."""
    calls = []
    here = code.co_firstlineno
    for step in dis.get_instructions(code):
        here = step.starts_line if type(step.starts_line) is int else here
        if here == line and step.opname.startswith("CALL_"):
            calls.append(step.offset)
    of_line = [
        node
        for _, nodes in sorted(file.ends.items())
        for node in nodes
        if node.lineno == line and _scope_name(file, node) == code.co_name
    ]
    if len(calls) != len(of_line) or instruction not in calls:
        return None
    node = of_line[calls.index(instruction)]
    return node if _is_of(node, code) else None


def _scope_name(file: SourceFile, node: ast.AST) -> str:
    """The name that the code around a node has in Python 3.10."""
    inner = node
    for here in file.around(node):
        if isinstance(here, Comprehension) and not (here.generators and file.is_inside(inner, here.generators[0].iter)):
            return COMPREHENSION_NAMES[type(here)]
        if isinstance(here, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            return here.name
        if isinstance(here, ast.Lambda):
            return "<lambda>"
        inner = here
    return "<module>"


COMPREHENSION_NAMES: dict[type[ast.AST], str] = {
    ast.ListComp: "<listcomp>",
    ast.SetComp: "<setcomp>",
    ast.DictComp: "<dictcomp>",
    ast.GeneratorExp: "<genexpr>",
}


def _is_of(node: ast.expr, code: CodeType) -> bool:
    """Whether the code mentions the name that is called: else the text is not this code's."""
    if not isinstance(node, ast.Call):
        return True
    called = node.func
    name = called.id if isinstance(called, ast.Name) else called.attr if isinstance(called, ast.Attribute) else None
    if name is None:
        return True
    known = (*code.co_names, *code.co_varnames, *code.co_cellvars, *code.co_freevars)
    return name in known or (name.startswith("__") and any(other.endswith(name) for other in known))
