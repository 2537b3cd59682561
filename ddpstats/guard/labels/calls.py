"""A call in the text: what is called, what is passed, and as which parameter of the function that then runs."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator
from types import CodeType
from typing import TypeGuard

from ddpstats.guard.labels.source import Comprehension, names_in

_COLLECTIVES = frozenset({"all_reduce", "reduce", "reduce_scatter", "reduce_scatter_tensor"})
# What gives the elements of its argument, in whatever order.
_PASSES_ON = frozenset(
    {
        *("sorted", "list", "tuple", "reversed", "iter", "set", "frozenset"),
        *("dict", "OrderedDict", "tqdm", "islice", "deque"),
    }
)
_COPIES = frozenset(
    {
        *("copy", "items", "keys", "values", "_asdict", "state_dict"),
        *("named_parameters", "named_buffers", "named_children", "named_modules", "parameters", "buffers"),
    }
)
_FIELDS_OF = frozenset({"vars", "asdict", "fields"})
_SORTERS = frozenset({"sorted", "nlargest", "nsmallest", "most_common"})
# What gives the elements of its first argument, or their numbers, in their order or in the reverse one.
_KEEPS_ORDER = (_PASSES_ON | {"enumerate", "zip", "range", "len"}) - {"set", "frozenset"}
_CONSUMERS = frozenset({"map", "starmap", "filter", "reduce"})
_STARRED_ARGUMENTS = 0x04  # the flag of a code object whose function has ``*args``

OwnArgument = tuple[str, int]
"""(name of ``*args``, position in it) of the calling function, which passes it on."""


def called_name(call: ast.Call) -> str:
    """The last name of what is called: ``all_reduce`` of ``dist.all_reduce(x)``."""
    called = call.func
    return called.id if isinstance(called, ast.Name) else called.attr if isinstance(called, ast.Attribute) else ""


def arguments_of(call: ast.Call) -> list[ast.expr]:
    return [*call.args, *(keyword.value for keyword in call.keywords)]


def gets_a_collective(call: ast.expr) -> TypeGuard[ast.Call]:
    """Whether a collective is passed, as to ``map``."""
    return isinstance(call, ast.Call) and any(_names_one_of(part, _COLLECTIVES) for part in _given(call))


def _given(call: ast.Call) -> Iterator[ast.AST]:
    """Everything in the arguments of a call that may be a function; not what is called in them."""
    called = {id(node.func) for node in ast.walk(call) if isinstance(node, ast.Call)}
    return (node for node in ast.walk(call) if id(node) not in called)


def _names_one_of(node: ast.AST, names: frozenset[str]) -> bool:
    name = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
    return name in names


def is_passed_as_function(call: ast.Call, callee: CodeType) -> bool:
    """Whether what runs was an argument of the call: the call is of ``map``, ``list``, a tree walk, ..."""
    name = callee.co_name
    if name == called_name(call):
        return False
    if name == "<lambda>":
        return any(isinstance(part, ast.Lambda) for part in _given(call))
    return any(_names_one_of(part, frozenset({name})) for part in _given(call))


def tensor_argument(call: ast.expr) -> ast.expr | None:
    """The tensor that a collective reads; None for what is no call of one."""
    if not isinstance(call, ast.Call):
        return None
    name = called_name(call)
    wanted = {"input", "input_list", "input_tensor", "tensor", "tensors", "self"}
    index = 1 if "reduce_scatter" in name or "all_gather" in name else 0
    for keyword in call.keywords:
        if keyword.arg in wanted:
            return keyword.value
    if len(call.args) <= index or any(isinstance(argument, ast.Starred) for argument in call.args[:index]):
        return call.args[0] if call.args else None
    return call.args[index]


def argument_names(call: ast.expr) -> Iterator[str]:
    """The variable that a collective reduces, if it is one: ``x`` in ``all_reduce(x)``, ``all_reduce(x.div_(2))``."""
    argument = tensor_argument(call)
    if isinstance(argument, ast.NamedExpr):
        argument = argument.target
    while isinstance(argument, (ast.Call, ast.Attribute)):
        argument = argument.func if isinstance(argument, ast.Call) else argument.value
    if isinstance(argument, (ast.List, ast.Tuple)) and len(argument.elts) == 1:
        argument = argument.elts[0]
    if isinstance(argument, ast.Name):
        yield argument.id


def names_passed(call: ast.expr, callee: CodeType, names: frozenset[str], texts: bool) -> frozenset[str]:
    """The parameters of ``callee`` to which a call gives the variables ``names``; or a text, if ``texts``."""
    if not isinstance(call, ast.Call):
        return frozenset()
    found = set()
    for index, argument in enumerate(call.args, _offset(call, callee)):
        is_text = texts and isinstance(argument, (ast.Constant, ast.JoinedStr))
        if index < callee.co_argcount and (is_text or mentions(argument, names)):
            found.add(callee.co_varnames[index])
    for keyword in call.keywords:
        if keyword.arg is not None and mentions(keyword.value, names):
            found.add(keyword.arg)
    return frozenset(found)


def mentions(node: ast.AST, names: Collection[str]) -> bool:
    """Whether one of these variables is part of it."""
    return any(name.id in names for name in names_in(node))


def argument_for(
    call: ast.Call, callee: CodeType, parameter: str, starred: int | None
) -> ast.expr | OwnArgument | None:
    """What the call passes for the parameter, as Python binds it.

    ``starred``: which one is meant of those that ``callee`` has in its ``*parameter``.
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
        given = call.args[max(0, callee.co_argcount - _offset(call, callee)) :]
        passed_on = [argument for argument in given if isinstance(argument, ast.Starred)]
        return passed_on[0] if passed_on else given[0] if len(given) == 1 else None
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


def sorts(expr: ast.AST | None) -> bool:
    """Whether it is a call whose result stands in an order that depends on what was in the container."""
    return isinstance(expr, ast.Call) and called_name(expr) in _SORTERS


def ordered_by(expr: ast.expr | None) -> ast.expr | None:
    """What the elements of a container have their order from: a call that sorts, or what else is left without
    ``list(...)``, ``.items()``, ``[:3]`` and the like around it. Of a comprehension, it is what that walks first."""
    while expr is not None and not sorts(expr):
        inner = _walked_first(expr)
        if inner is None:
            break
        expr = inner
    return expr


def _walked_first(expr: ast.expr) -> ast.expr | None:
    """The part whose order the elements keep; None where there is none."""
    if isinstance(expr, Comprehension):
        return None if isinstance(expr, ast.SetComp) else expr.generators[0].iter
    if isinstance(expr, (ast.Starred, ast.NamedExpr)) or (
        isinstance(expr, ast.Subscript) and isinstance(expr.slice, ast.Slice)
    ):
        return expr.value
    if not isinstance(expr, ast.Call):
        return None
    name = called_name(expr)
    if isinstance(expr.func, ast.Attribute) and name in _COPIES and not expr.args:
        return expr.func.value
    place = 1 if name in ("map", "filter", "starmap") else 0 if name in _KEEPS_ORDER else None
    return expr.args[place] if place is not None and len(expr.args) > place else None


def unwrapped(expr: ast.expr | None) -> ast.expr | None:
    """The container itself, without ``.items()``, ``sorted(...)``, ``enumerate(...)`` and the like around it."""
    while isinstance(expr, ast.Call):
        name = called_name(expr)
        if isinstance(expr.func, ast.Attribute) and name in _COPIES and not expr.args:
            expr = expr.func.value
        elif name in ("enumerate", "zip", *_FIELDS_OF, *_PASSES_ON) and expr.args:
            expr = expr.args[0]
        elif name in _CONSUMERS and len(expr.args) > 1:
            expr = expr.args[1]
        else:
            return expr
    return expr.value if isinstance(expr, (ast.Starred, ast.NamedExpr)) else expr
