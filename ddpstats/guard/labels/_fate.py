"""What the loop around a collective does with the result: the strongest sign of whether a name matters.

"keyed": it is stored, logged or returned under the name. "in place": the named element itself was overwritten, which is
as good as keyed. "pooled": it is added to what all turns of the loop share, so the names do not matter. "kept": it is
kept without the name. "unused": none of these.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from ddpstats.guard.labels._source import Comprehension, Function, SourceFile

Fate = Literal["keyed", "in place", "pooled", "kept", "unused"]
_KEEPERS = frozenset({"append", "add", "extend", "insert", "appendleft", "put", "update"})
_POOLERS = frozenset({"sum", "mean", "max", "min", "stack", "cat", "fsum", "prod", "any", "all", "median"})


@dataclass(frozen=True)
class Turn:
    """One function's part in a turn of the loop.

    ``call``: what leads to the collective. ``names``: the variables that hold the name here, ``texts``: constants that
    are the name. ``carriers``: variables that hold the tensor that is reduced. ``within``: the loop, or the function.
    """

    file: SourceFile
    call: ast.expr
    within: ast.AST
    names: frozenset[str]
    texts: frozenset[str]
    carriers: frozenset[str]


def fate_of(turns: list[Turn], fresh: bool) -> Fate:
    """Of the turns of all functions between the loop (last) and the collective (first)."""
    uses = {use for turn in turns for use in _uses(turn)}
    if "keyed" in uses:
        return "keyed"
    if "in place" in uses:
        return "in place"
    if "pooled" in uses:
        return "pooled"
    if "kept" in uses:
        return "kept"
    return "unused" if fresh else "in place"


def _uses(turn: Turn) -> Iterator[Fate]:
    carriers = set(turn.carriers)
    for _ in range(2):  # twice: a chain of assignments, whatever order they are visited in
        for node in ast.walk(turn.within):
            if not isinstance(node, (ast.Assign, ast.AnnAssign, ast.NamedExpr)) or node.value is None:
                continue
            if _carries(node.value, turn, carriers):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                carriers.update(name for target in targets for name in _plain_names(target))
    carriers -= turn.names
    for node in ast.walk(turn.within):
        yield from _use(node, turn, carriers)
    if turn.call in ast.walk(turn.within):
        yield from _expression_uses(turn)


def _use(node: ast.AST, turn: Turn, carriers: set[str]) -> Iterator[Fate]:
    """What one statement or call does with the result."""
    if isinstance(node, ast.Assign) and _carries(node.value, turn, carriers):
        for target in node.targets:
            yield from _store(target, node.value, turn)
    elif isinstance(node, ast.AugAssign) and _carries(node.value, turn, carriers):
        target = node.target
        if isinstance(target, ast.Subscript) and _is_named(target.slice, turn):
            yield "keyed"
        elif not (isinstance(target, ast.Name) and target.id in carriers and target.id in turn.carriers):
            yield "pooled"
    elif isinstance(node, (ast.Return, ast.Yield)) and node.value is not None and _carries(node.value, turn, carriers):
        yield "keyed" if _is_named(node.value, turn) else "kept"
    elif isinstance(node, ast.Call) and node is not turn.call and turn.call not in ast.walk(node):
        given = [*node.args, *(keyword.value for keyword in node.keywords)]
        if any(_carries(argument, turn, carriers) for argument in given):
            if any(_is_named(part, turn) for part in (*given, node.func)):
                yield "keyed"
            elif isinstance(node.func, ast.Attribute) and node.func.attr in _KEEPERS:
                yield "kept"
    elif isinstance(node, ast.DictComp) and _carries(node.value, turn, carriers):
        yield "keyed"


def _store(target: ast.expr, value: ast.expr, turn: Turn) -> Iterator[Fate]:
    if isinstance(target, ast.Subscript):
        yield "keyed" if _is_named(target.slice, turn) or _is_named(target.value, turn) else "kept"
    elif isinstance(target, ast.Attribute):
        yield "in place" if isinstance(target.value, ast.Name) else "kept"
    elif isinstance(target, ast.Name):
        own = {node.id for node in ast.walk(value) if isinstance(node, ast.Name)}
        if target.id in own and target.id not in turn.carriers:
            yield "pooled"


def _expression_uses(turn: Turn) -> Iterator[Fate]:
    """What the expression around the call makes of its result, out to the loop or the statement."""
    inner: ast.AST = turn.call
    outer = turn.file.parents.get(inner)
    while outer is not None and not isinstance(outer, (ast.stmt, *Function)):
        if isinstance(outer, ast.DictComp) and inner is outer.value:
            yield "keyed"
            return
        if isinstance(outer, ast.Call) and inner is not outer.func:
            if any(_is_named(argument, turn) for argument in outer.args if argument is not inner):
                yield "keyed"
                return
            if _called(outer) in _POOLERS:
                yield "pooled"
                return
        if isinstance(outer, ast.Call) and _called(outer) == "zip":
            yield "keyed"  # put beside the names again
            return
        if isinstance(outer, ast.Tuple) and any(_is_named(part, turn) for part in outer.elts if part is not inner):
            yield "keyed"
            return
        if isinstance(outer, Comprehension):
            around = turn.file.parents.get(outer)
            pooled = isinstance(around, ast.Call) and _called(around) in _POOLERS
            yield "pooled" if pooled else "kept"
            return
        inner, outer = outer, turn.file.parents.get(outer)


def _carries(node: ast.AST, turn: Turn, carriers: set[str]) -> bool:
    """Whether the result is part of an expression."""
    return any(part is turn.call or (isinstance(part, ast.Name) and part.id in carriers) for part in ast.walk(node))


def _is_named(node: ast.AST, turn: Turn) -> bool:
    """Whether the name is part of an expression."""
    for part in ast.walk(node):
        if isinstance(part, ast.Name) and part.id in turn.names:
            return True
        if isinstance(part, ast.Constant) and part.value in turn.texts:
            return True
    return False


def _plain_names(target: ast.expr) -> Iterator[str]:
    for part in target.elts if isinstance(target, (ast.Tuple, ast.List)) else [target]:
        if isinstance(part, ast.Name):
            yield part.id


def _called(call: ast.Call) -> str:
    called = call.func
    return called.id if isinstance(called, ast.Name) else called.attr if isinstance(called, ast.Attribute) else ""
