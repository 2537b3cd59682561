"""The call that a frame is in, as parsed source. Knows nothing of torch, and runs nothing.

A code object says for each instruction which part of the text it was compiled from. Each file is parsed once. Where the
text is not the code's (the file was edited since, or the code was generated), no call is returned.
"""

from __future__ import annotations

import ast
import itertools
import linecache
import sys
import threading
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Any

Function = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
Comprehension = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
Loop = (ast.For, ast.AsyncFor, *Comprehension)
# Names of the code objects that comprehensions have before Python 3.12.
COMPREHENSION_NAMES = frozenset({"<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>"})
_MAX_FILES = 256
_MAX_BYTES = 4 << 20
_MAX_TRIES = 16
_STARRED_ARGUMENTS = 0x04  # the flag of a code object whose function has ``*args``

# Calls that give the elements of their first argument.
_PASSES_ON = frozenset(
    {
        *("sorted", "list", "tuple", "reversed", "iter", "set", "frozenset", "dict", "OrderedDict", "tqdm", "islice"),
        *("deque", "enumerate", "zip", "vars", "asdict", "fields"),
    }
)
# Methods that give the elements of the object they are called on.
_COPIES = frozenset(
    {
        *("copy", "items", "keys", "values", "_asdict", "state_dict"),
        *("named_parameters", "named_buffers", "named_children", "named_modules", "parameters", "buffers"),
    }
)
# Calls that give the elements of their second argument.
_CONSUMERS = frozenset({"map", "starmap", "filter", "reduce"})
_TENSOR_KEYWORDS = frozenset({"input", "input_list", "input_tensor", "tensor", "tensors", "self"})


# -- files ------------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class SourceFile:
    """One parsed file: each node's parent, and its calls and comprehensions by where they end."""

    parents: dict[ast.AST, ast.AST] = field(default_factory=dict)
    ends: dict[tuple[int, int], list[ast.expr]] = field(default_factory=dict)
    calls_of_line: dict[int, list[ast.Call]] = field(default_factory=dict)

    @classmethod
    def of(cls, tree: ast.Module) -> SourceFile:
        """Index a syntax tree."""
        file = cls()
        stack: list[ast.AST] = [tree]
        while stack:
            node = stack.pop()
            for child in ast.iter_child_nodes(node):
                file.parents[child] = node
                stack.append(child)
            if isinstance(node, (ast.Call, *Comprehension)):
                file.ends.setdefault((node.end_lineno or 0, node.end_col_offset or 0), []).append(node)
            if isinstance(node, ast.Call):
                for line in range(node.lineno, (node.end_lineno or node.lineno) + 1):
                    file.calls_of_line.setdefault(line, []).append(node)
        return file

    def around(self, node: ast.AST) -> Iterator[ast.AST]:
        """Yield the nodes that contain ``node``, from the inside out."""
        outer = self.parents.get(node)
        while outer is not None:
            yield outer
            outer = self.parents.get(outer)

    def scope_of(self, node: ast.AST) -> ast.AST:
        """Return the function, class or module whose variables ``node`` sees; comprehensions count as a part of it."""
        scopes = (outer for outer in self.around(node) if isinstance(outer, (*Function, ast.ClassDef, ast.Module)))
        return next(scopes, node)

    def loop_around(self, node: ast.AST) -> ast.AST | None:
        """Return the innermost loop or comprehension of the same function that contains ``node``."""
        for outer in self.around(node):
            if isinstance(outer, (*Loop, ast.While)):
                return outer
            if isinstance(outer, Function):
                return None
        return None

    def is_inside(self, node: ast.AST, outer: ast.AST) -> bool:
        """Say whether ``outer`` is or contains ``node``."""
        return node is outer or any(around is outer for around in self.around(node))


_parsing = threading.RLock()  # two threads at once may end in a SystemError (CPython's gh-106905)
_files: dict[str, SourceFile | None] = {}
_tries: dict[str, int] = {}


def source_of(code: CodeType, module_globals: dict[str, Any]) -> SourceFile | None:
    """Return the parsed file of a code object; None where there is no text, or none that parses."""
    name = code.co_filename
    if name in _files:
        return _files[name]
    if len(_files) >= _MAX_FILES:
        _files.clear()
    try:
        _files[name] = _parse(name, module_globals if type(module_globals) is dict else None)
    except RecursionError:  # maybe of the program's own depth: then another try may succeed
        _tries[name] = _tries.get(name, 0) + 1
        if _tries[name] < _MAX_TRIES:
            raise
        _files[name] = None
    return _files[name]


def _parse(name: str, module_globals: dict[str, Any] | None) -> SourceFile | None:
    text = "".join(linecache.getlines(name, module_globals))
    try:
        with _parsing:
            return SourceFile.of(ast.parse(text)) if text and len(text) <= _MAX_BYTES else None
    except (SyntaxError, ValueError, SystemError):
        return None


# -- the call of a frame ----------------------------------------------------------------------------------------------


def call_of(frame: FrameType) -> tuple[SourceFile, ast.expr] | None:
    """Return the call (or the comprehension, which Python 3.11 calls too) that the frame is executing."""
    code, instruction = frame.f_code, frame.f_lasti
    file = source_of(code, frame.f_globals)
    if file is None or instruction < 0:
        return None
    node = _by_position(file, code, instruction)
    if node is None or not _is_of(node, code):
        # Without positions (Python 3.10, rewritten code): the only call in the line that the code could make.
        nodes = [node for node in file.calls_of_line.get(frame.f_lineno, []) if _is_of(node, code)]
        node = nodes[0] if len(nodes) == 1 else None
    return None if node is None else (file, node)


def _by_position(file: SourceFile, code: CodeType, instruction: int) -> ast.expr | None:
    if sys.version_info < (3, 11):
        return None
    positions = itertools.islice(code.co_positions(), instruction // 2, None)
    start_line, end_line, _, end_column = next(positions, (None, None, None, None))
    if end_line is None or end_column is None:
        return None
    # By the end: where calls are chained, the instruction's position begins at the last method's name.
    nodes = [node for node in file.ends.get((end_line, end_column), []) if node.lineno <= (start_line or end_line)]
    return nodes[0] if len(nodes) == 1 else None


def _is_of(node: ast.expr, code: CodeType) -> bool:
    """Say whether the code mentions the name that is called: otherwise the text is not this code's."""
    name = called_name(node)
    known = (*code.co_names, *code.co_varnames, *code.co_cellvars, *code.co_freevars)
    return not name or name in known or (name.startswith("__") and any(other.endswith(name) for other in known))


# -- expressions ------------------------------------------------------------------------------------------------------


def names_in(node: ast.AST) -> Iterator[ast.Name]:
    """Yield the variables in a piece of the text."""
    return (part for part in ast.walk(node) if isinstance(part, ast.Name))


def mentions(node: ast.AST, names: Collection[str]) -> bool:
    """Say whether one of these variables is part of the node."""
    return any(name.id in names for name in names_in(node))


def called_name(call: ast.AST | None) -> str:
    """Return the last name of what is called: ``all_reduce`` of ``dist.all_reduce(x)``; empty where there is none."""
    called = call.func if isinstance(call, ast.Call) else None
    return called.id if isinstance(called, ast.Name) else called.attr if isinstance(called, ast.Attribute) else ""


def unwrapped(expr: ast.expr | None) -> ast.expr | None:
    """Return the container itself, without ``.items()``, ``sorted(...)``, ``enumerate(...)`` and the like around it."""
    while isinstance(expr, ast.Call):
        name = called_name(expr)
        if isinstance(expr.func, ast.Attribute) and name in _COPIES and not expr.args:
            expr = expr.func.value
        elif name in _PASSES_ON and expr.args:
            expr = expr.args[0]
        elif name in _CONSUMERS and len(expr.args) > 1:
            expr = expr.args[1]
        else:
            return expr
    return expr.value if isinstance(expr, (ast.Starred, ast.NamedExpr)) else expr


# -- what a call passes -----------------------------------------------------------------------------------------------


def passes_function(call: ast.expr, names: Collection[str]) -> bool:
    """Say whether a function of one of these names is an argument of the call, as of ``map``."""
    if not isinstance(call, ast.Call):
        return False
    called = {id(node.func) for node in ast.walk(call) if isinstance(node, ast.Call)}
    return any(_function_name(node) in names for node in ast.walk(call) if id(node) not in called)


def _function_name(node: ast.AST) -> str:
    if isinstance(node, ast.Lambda):
        return "<lambda>"
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def tensor_argument(call: ast.expr) -> ast.expr | None:
    """Return the tensor that a collective reads; None for what is no call of one."""
    if not isinstance(call, ast.Call):
        return None
    for keyword in call.keywords:
        if keyword.arg in _TENSOR_KEYWORDS:
            return keyword.value
    name = called_name(call)
    index = 1 if "reduce_scatter" in name or "all_gather" in name else 0
    if len(call.args) <= index or any(isinstance(argument, ast.Starred) for argument in call.args[:index]):
        return call.args[0] if call.args else None
    return call.args[index]


def variable_of(expr: ast.expr | None) -> str | None:
    """Return the variable whose tensor an expression is: ``x`` of ``x``, ``x.div_(2)``, ``x.grad`` and ``[x]``."""
    if isinstance(expr, ast.NamedExpr):
        expr = expr.target
    while isinstance(expr, (ast.Call, ast.Attribute)):
        expr = expr.func if isinstance(expr, ast.Call) else expr.value
    if isinstance(expr, (ast.List, ast.Tuple)) and len(expr.elts) == 1:
        expr = expr.elts[0]
    return expr.id if isinstance(expr, ast.Name) else None


def parameters_given(call: ast.expr, callee: CodeType, names: Collection[str], texts: bool) -> frozenset[str]:
    """Return the parameters of ``callee`` to which the call passes the variables ``names``, or a text if ``texts``."""
    if not isinstance(call, ast.Call):
        return frozenset()
    parameters = {keyword.arg for keyword in call.keywords if keyword.arg and mentions(keyword.value, names)}
    for index, argument in enumerate(call.args, _offset(call, callee)):
        is_text = texts and isinstance(argument, (ast.Constant, ast.JoinedStr))
        if index < callee.co_argcount and (is_text or mentions(argument, names)):
            parameters.add(callee.co_varnames[index])
    return frozenset(parameters)


OwnArgument = tuple[str, int]
"""(name of ``*args``, index in it) of the calling function, which passes it on."""


def argument_for(
    call: ast.Call, callee: CodeType, parameter: str, starred: int | None
) -> ast.expr | OwnArgument | None:
    """Return what the call passes for the parameter, as Python binds it.

    ``starred``: the index of the argument that is meant among those that ``callee`` has in its ``*parameter``.
    """
    names, named = callee.co_varnames, callee.co_argcount + callee.co_kwonlyargcount
    has_starred = bool(callee.co_flags & _STARRED_ARGUMENTS) and names[named] == parameter
    if starred is not None:
        if not has_starred:
            return None
        position = callee.co_argcount + starred
    elif parameter in names[:named]:
        for keyword in call.keywords:
            if keyword.arg == parameter:
                return keyword.value
        position = names.index(parameter)
        if position >= callee.co_argcount:
            return None
    elif has_starred:
        rest = call.args[max(0, callee.co_argcount - _offset(call, callee)) :]
        passed_on = [argument for argument in rest if isinstance(argument, ast.Starred)]
        return passed_on[0] if passed_on else rest[0] if len(rest) == 1 else None
    else:
        return None
    position -= _offset(call, callee)
    if position < 0:
        return call.func.value if isinstance(call.func, ast.Attribute) else call.func
    if position >= len(call.args) and called_name(call) != callee.co_name:
        position -= callee.co_argcount - len(call.args)  # a `partial` has the first arguments
    return _positional(call, position) if position >= 0 else None


def _offset(call: ast.Call, callee: CodeType) -> int:
    """1 where the first parameter is the object that the method is called on."""
    first = callee.co_varnames[0] if callee.co_argcount else ""
    if first not in ("self", "cls"):
        return 0
    is_method = isinstance(call.func, ast.Attribute) or callee.co_name in ("__call__", "forward", "__init__")
    return 1 if is_method or called_name(call) != callee.co_name else 0


def _positional(call: ast.Call, position: int) -> ast.expr | OwnArgument | None:
    for index, argument in enumerate(call.args[: position + 1]):
        if isinstance(argument, ast.Starred):
            return (argument.value.id, position - index) if isinstance(argument.value, ast.Name) else argument
    return call.args[position] if position < len(call.args) else None
