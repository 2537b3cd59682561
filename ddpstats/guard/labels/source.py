"""Find the call that a frame is executing, in the parsed source. Knows nothing of torch, and runs nothing.

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
from contextlib import suppress
from types import CodeType, FrameType
from typing import Any

from ddpstats._base.caches import EmptiedCache

Function = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
Comprehension = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
Loop = (ast.For, ast.AsyncFor, ast.While, *Comprehension)
# Names of the code objects that comprehensions have before Python 3.12.
COMPREHENSION_NAMES = frozenset({"<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>"})
_MAX_FILES = 256
_MAX_BYTES = 4 << 20

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
_TENSOR_KEYWORDS = frozenset({"input", "input_list", "input_tensor", "tensor", "tensors", "self"})


# -- files ------------------------------------------------------------------------------------------------------------


class SourceFile:
    """One parsed file: each node's parent, and its calls and comprehensions by where they end."""

    def __init__(self, tree: ast.Module) -> None:
        self.parents: dict[ast.AST, ast.AST] = {}
        self.ends: dict[tuple[int, int], list[ast.expr]] = {}
        self.calls_of_line: dict[int, list[ast.Call]] = {}
        stack: list[ast.AST] = [tree]
        while stack:
            node = stack.pop()
            for child in ast.iter_child_nodes(node):
                self.parents[child] = node
                stack.append(child)
            if isinstance(node, (ast.Call, *Comprehension)):
                self.ends.setdefault(end_of(node), []).append(node)
            if isinstance(node, ast.Call):
                for line in range(node.lineno, end_of(node)[0] + 1):
                    self.calls_of_line.setdefault(line, []).append(node)

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
        innermost = next((outer for outer in self.around(node) if isinstance(outer, (*Loop, *Function))), None)
        return innermost if isinstance(innermost, Loop) else None

    def is_inside(self, node: ast.AST, outer: ast.AST) -> bool:
        """Say whether ``outer`` is or contains ``node``."""
        return node is outer or any(around is outer for around in self.around(node))


_parsing = threading.RLock()  # two threads at once may end in a SystemError (CPython's gh-106905)
_files: EmptiedCache[str, SourceFile | None] = EmptiedCache(_MAX_FILES)


def source_of(code: CodeType, module_globals: dict[str, Any]) -> SourceFile | None:
    """Return the parsed file of a code object; None where there is no text, or none that parses."""
    name = code.co_filename
    if name not in _files:
        text = "".join(linecache.getlines(name, module_globals if type(module_globals) is dict else None))
        file: SourceFile | None = None
        with suppress(SyntaxError, ValueError, SystemError), _parsing:
            file = SourceFile(ast.parse(text)) if text and len(text) <= _MAX_BYTES else None
        return _files.keep(name, file)
    return _files[name]


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
    return not name or name in known or (name.startswith("__") and any(mangled.endswith(name) for mangled in known))


# -- expressions ------------------------------------------------------------------------------------------------------


def end_of(node: ast.expr | ast.stmt) -> tuple[int, int]:
    """Return the line and the column behind a piece of the text."""
    return (node.end_lineno or node.lineno, node.end_col_offset or node.col_offset)


def names_in(node: ast.AST) -> Iterator[ast.Name]:
    """Yield the variables in a piece of the text."""
    return (part for part in ast.walk(node) if isinstance(part, ast.Name))


def mentions(node: ast.AST, names: Collection[str]) -> bool:
    """Say whether one of these variables is part of the node."""
    return any(name.id in names for name in names_in(node))


def called_name(call: ast.AST | None) -> str:
    """Return the last name of what is called: ``all_reduce`` of ``dist.all_reduce(x)``; empty if it is no call."""
    called = call.func if isinstance(call, ast.Call) else None
    return called.id if isinstance(called, ast.Name) else called.attr if isinstance(called, ast.Attribute) else ""


def unwrap_container(expr: ast.expr) -> ast.expr:
    """Return the container itself, without ``.items()``, ``sorted(...)``, ``enumerate(...)`` and the like around it."""
    while isinstance(expr, ast.Call):
        name = called_name(expr)
        if isinstance(expr.func, ast.Attribute) and name in _COPIES and not expr.args:
            expr = expr.func.value
        elif name in _PASSES_ON and expr.args:
            expr = expr.args[0]
        elif name == "filter" and len(expr.args) == 2:
            expr = expr.args[1]
        else:
            break
    return expr


# -- what a call passes -----------------------------------------------------------------------------------------------


def tensor_argument(call: ast.expr) -> ast.expr | None:
    """Return the tensor that a collective reads; None for what is no call of one."""
    if not isinstance(call, ast.Call):
        return None
    for keyword in call.keywords:
        if keyword.arg in _TENSOR_KEYWORDS:
            return keyword.value
    return next(iter(call.args[1 if is_behind_output(call) else 0 :]), None)


def is_behind_output(call: ast.expr | None) -> bool:
    """Say whether a collective writes into another tensor than it reads, which is its second argument."""
    name = called_name(call)
    # by parts of the name, which collectives of objects and functions of libraries share with torch's
    return "reduce_scatter" in name or "all_gather" in name


def variable_of(expr: ast.expr | None) -> str:
    """Return the variable whose tensor an expression is: ``x`` of ``x``, ``x.div_(2)``, ``x.grad``; or nothing."""
    if isinstance(expr, ast.NamedExpr):
        expr = expr.target
    while isinstance(expr, (ast.Call, ast.Attribute)):
        expr = expr.func if isinstance(expr, ast.Call) else expr.value
    return expr.id if isinstance(expr, ast.Name) else ""


def find_parameters(call: ast.expr, callee: CodeType, names: Collection[str]) -> frozenset[str]:
    """Return the parameters of ``callee`` to which the call passes an expression with one of these variables."""
    parameters = callee.co_varnames[: callee.co_argcount + callee.co_kwonlyargcount]
    arguments = ((parameter, argument_for(call, callee, parameter)) for parameter in parameters)
    return frozenset(parameter for parameter, expr in arguments if expr is not None and mentions(expr, names))


def argument_for(call: ast.expr, callee: CodeType, parameter: str) -> ast.expr | None:
    """Return what the call passes for the parameter, as Python binds it; None where the text does not show it."""
    if not isinstance(call, ast.Call):
        return None
    for keyword in call.keywords:
        if keyword.arg == parameter:
            return keyword.value
    positional = callee.co_varnames[: callee.co_argcount]
    if parameter not in positional:
        return None
    index = positional.index(parameter) - (positional[0] in ("self", "cls"))  # which the method is called on
    if index < 0:
        return call.func.value if isinstance(call.func, ast.Attribute) else call.func
    is_shown = not any(isinstance(argument, ast.Starred) for argument in call.args[: index + 1])
    return call.args[index] if is_shown and index < len(call.args) else None
