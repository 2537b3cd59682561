"""Which statement gave a variable the value that it has at some place of the text: the nearest one before it.

Branches are not told apart: the assignment that stands last before the use counts. A loop binds its variables only for
what stands inside of it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from ddpstats.guard.labels.source import Comprehension, Function, SourceFile, names_in

Position = tuple[int, int]


@dataclass(frozen=True, eq=False)
class Binding:
    """``kind`` "value": set to ``value``; "loop": an element of the iterable ``value``; "parameter": the caller's.

    ``beside``: the other names of the same target, for ``for key, value in ...`` and ``key, value = ...``.
    ``loop``: the statement or comprehension that loops.
    """

    kind: Literal["value", "loop", "parameter", "other"]
    name: ast.Name | None
    value: ast.expr | None
    position: Position
    beside: tuple[ast.Name, ...] = ()
    loop: ast.AST | None = None


Bindings = dict[str, list[Binding]]


def bindings_of(scope: ast.AST) -> Bindings:
    """All bindings of a function's or module's own variables, comprehensions included, in the order of the text."""
    found: Bindings = {}
    if isinstance(scope, Function):
        for argument in _arguments(scope.args):
            found.setdefault(argument.arg, []).append(Binding("parameter", None, None, (0, 0)))
    for node in _own_nodes(scope):
        for name, binding in _bound_by(node):
            found.setdefault(name, []).append(binding)
    for bindings in found.values():
        bindings.sort(key=lambda binding: binding.position)
    return found


def nearest(bindings: Bindings, name: str, at: ast.expr, file: SourceFile) -> Binding | None:
    """What gave ``name`` the value that it has at ``at``; None where this scope does not bind it."""
    use = (at.lineno, at.col_offset)
    inside = [binding for binding in bindings.get(name, []) if binding.loop is None or file.is_inside(at, binding.loop)]
    in_comprehension = [
        binding
        for binding in inside
        if isinstance(binding.loop, Comprehension) and not _is_read_before(at, binding, file)
    ]
    if in_comprehension:
        return in_comprehension[-1]
    statements = [binding for binding in inside if not isinstance(binding.loop, Comprehension)]
    before = [binding for binding in statements if binding.position <= use]
    if before:
        return before[-1]
    return statements[-1] if statements else None  # a value that an earlier turn of a loop has left


def _is_read_before(at: ast.expr, binding: Binding, file: SourceFile) -> bool:
    """The iterable of a comprehension is read before its variable is there."""
    return binding.value is not None and file.is_inside(at, binding.value)


def _arguments(args: ast.arguments) -> list[ast.arg]:
    starred = [argument for argument in (args.vararg, args.kwarg) if argument is not None]
    return [*args.posonlyargs, *args.args, *args.kwonlyargs, *starred]


def _own_nodes(scope: ast.AST) -> Iterator[ast.AST]:
    """All nodes that run as part of ``scope`` itself."""
    body: list[ast.AST] = list(scope.body) if isinstance(scope, (ast.Module, ast.ClassDef)) else []
    if isinstance(scope, (ast.FunctionDef, ast.AsyncFunctionDef)):
        body = list(scope.body)
    elif isinstance(scope, ast.Lambda):
        body = [scope.body]
    stack = body
    while stack:
        node = stack.pop()
        yield node
        if not isinstance(node, (*Function, ast.ClassDef)):
            stack.extend(ast.iter_child_nodes(node))


def _bound_by(node: ast.AST) -> Iterator[tuple[str, Binding]]:
    if isinstance(node, ast.Assign):
        for target in node.targets:
            yield from _targets(target, node.value, "value", _end(node))
    elif isinstance(node, (ast.AnnAssign, ast.NamedExpr)) and node.value is not None:
        # Not of `v /= n`, which keeps what v was made of: the augmented value comes from v itself as well.
        yield from _targets(node.target, node.value, "value", _end(node))
    elif isinstance(node, (ast.For, ast.AsyncFor)):
        yield from _targets(node.target, node.iter, "loop", _end(node.iter), node)
    elif isinstance(node, Comprehension):
        for generator in node.generators:
            yield from _targets(generator.target, generator.iter, "loop", _end(generator.iter), node)
    elif isinstance(node, (ast.With, ast.AsyncWith)):
        for item in node.items:
            if item.optional_vars is not None:
                yield from _targets(item.optional_vars, item.context_expr, "value", _end(item.context_expr))
    elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        yield node.name, Binding("other", None, None, _end(node))
    elif isinstance(node, (ast.Import, ast.ImportFrom)):
        for alias in node.names:
            yield (alias.asname or alias.name).split(".")[0], Binding("other", None, None, _end(node))


def _targets(
    target: ast.expr,
    value: ast.expr,
    kind: Literal["value", "loop"],
    position: Position,
    loop: ast.AST | None = None,
) -> Iterator[tuple[str, Binding]]:
    """The names in a target; in ``a, b = x, y`` each has its own value."""
    if kind == "value" and isinstance(target, (ast.Tuple, ast.List)) and isinstance(value, (ast.Tuple, ast.List)):
        pairs = list(zip(target.elts, value.elts, strict=False))
        starred = any(isinstance(element, ast.Starred) for element in (*target.elts, *value.elts))
        if len(target.elts) == len(value.elts) and not starred:
            for part, its_value in pairs:
                yield from _targets(part, its_value, kind, position, loop)
            return
    names = [name for name in names_in(target) if isinstance(name.ctx, ast.Store)]
    for name in names:
        beside = tuple(other for other in names if other is not name)
        yield name.id, Binding(kind, name, value, position, beside, loop)


def _end(node: ast.expr | ast.stmt) -> Position:
    return (node.end_lineno or node.lineno, node.end_col_offset or node.col_offset)
