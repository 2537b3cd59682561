"""What the loop around a collective does with the result: the strongest sign of whether a name matters.

"keyed": it is stored, logged, returned or, if nothing else is done with it, printed under the name. "in place": the
named element itself was overwritten, which is as good as keyed. "pooled": it is added to what all turns of the loop
share, or decides what they do, so the names do not matter. "kept": it is kept without the name. "unused": none of
these.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from ddpstats.guard.labels.calls import arguments_of, called_name, mentions
from ddpstats.guard.labels.source import Comprehension, Function, SourceFile, names_in

Fate = Literal["keyed", "in place", "pooled", "kept", "unused"]
Use = Literal[Fate, "printed", "decides"]
_KEEPERS = frozenset({"append", "add", "extend", "insert", "appendleft", "put", "update"})
_TOTALS = frozenset({"sum", "mean", "max", "min", "fsum", "prod", "any", "all", "median", "norm"})
_POOLERS = _TOTALS | {"stack", "cat"}
# What is written for people to read, and read by nothing.
_PRINTERS = frozenset({"print", "debug", "info", "warning", "set_description"})


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
    """Of the turns of all functions from the loop (first) to the collective (last)."""
    uses = {use for turn in turns for use in _uses(turn, turn is turns[0])}
    ranked: tuple[tuple[Use, Fate], ...] = (
        ("keyed", "keyed"),
        ("in place", "in place"),
        ("pooled", "pooled"),
        ("printed", "keyed"),
        ("kept", "kept"),
    )
    if fate := next((fate for use, fate in ranked if use in uses), None):
        return fate
    if not fresh:
        return "in place"
    return "pooled" if "decides" in uses else "unused"


def _uses(turn: Turn, is_outermost: bool) -> Iterator[Use]:
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
        if is_outermost or not isinstance(node, ast.Return) or _is_named(node, turn):  # else the caller has it
            yield from _use(node, turn, carriers)
    if turn.call in ast.walk(turn.within):
        yield from _expression_uses(turn)


def _use(node: ast.AST, turn: Turn, carriers: set[str]) -> Iterator[Use]:
    """What one statement or call does with the result."""
    if isinstance(node, ast.Assign) and _carries_at(node, node.value, turn, carriers):
        for target in node.targets:
            yield from _store(target, node.value, turn)
    elif isinstance(node, ast.AugAssign) and _carries_at(node, node.value, turn, carriers):
        target = node.target
        if isinstance(target, ast.Subscript) and _is_named(target.slice, turn):
            yield "keyed"
        elif not (isinstance(target, ast.Name) and target.id in carriers and target.id in turn.carriers):
            yield "pooled"
    elif isinstance(node, (ast.Return, ast.Yield)) and node.value is not None and _carries(node.value, turn, carriers):
        yield "keyed" if _is_named(node.value, turn) else "kept"
    elif isinstance(node, ast.Call) and node is not turn.call and turn.call not in ast.walk(node):
        yield from _passed(node, turn, carriers)
    elif isinstance(node, ast.DictComp) and _carries(node.value, turn, carriers):
        yield "keyed"
    elif isinstance(node, (ast.If, ast.While, ast.IfExp, ast.Assert)) and _carries_at(
        node.test, node.test, turn, carriers
    ):
        yield "decides"


def _passed(call: ast.Call, turn: Turn, carriers: set[str]) -> Iterator[Use]:
    """What another call does that is given the result."""
    given = arguments_of(call)
    if not any(_carries_at(call, argument, turn, carriers) for argument in given):
        return
    if any(_is_named(part, turn) for part in (*given, call.func)):
        yield "printed" if called_name(call) in _PRINTERS else "keyed"
    elif isinstance(call.func, ast.Attribute) and call.func.attr in _KEEPERS:
        keeper = call.func.value
        yield _kept_in(keeper.id, turn) if isinstance(keeper, ast.Name) else "kept"


def _kept_in(name: str, turn: Turn) -> Use:
    """What becomes of a list of results after the loop: put beside names again, or added up."""
    names, uses = {name}, set()
    after = [node for node in ast.walk(turn.file.scope_of(turn.call)) if _is_after(node, turn.within)]
    for node in after:
        if isinstance(node, ast.Assign) and mentions(node.value, names):
            names.update(one for target in node.targets for one in _plain_names(target))
    for node in after:
        if isinstance(node, ast.Call) and mentions(node, names):
            uses.add(called_name(node))
    if uses & {"zip", "dict"}:
        return "keyed"
    return "pooled" if uses & {*_TOTALS, "reduce"} else "kept"


def _store(target: ast.expr, value: ast.expr, turn: Turn) -> Iterator[Use]:
    if isinstance(target, ast.Subscript):
        yield "keyed" if _is_named(target.slice, turn) or _is_named(target.value, turn) else "kept"
    elif isinstance(target, ast.Attribute):
        yield "in place" if isinstance(target.value, ast.Name) else "kept"
    elif isinstance(target, ast.Name):
        own = {node.id for node in names_in(value)}
        if target.id in own and target.id not in turn.carriers:
            yield "pooled"


def _expression_uses(turn: Turn) -> Iterator[Use]:
    """What the expression around the call makes of its result, out to the loop or the statement."""
    inner: ast.AST = turn.call
    for outer in turn.file.around(turn.call):
        if isinstance(outer, (ast.stmt, *Function)):
            return
        if isinstance(outer, ast.DictComp) and inner is outer.value:
            yield "keyed"
            return
        if isinstance(outer, ast.Call) and inner is not outer.func:
            if any(_is_named(argument, turn) for argument in outer.args if argument is not inner):
                yield "keyed"
                return
            if called_name(outer) in _POOLERS:
                yield "pooled"
                return
        if isinstance(outer, ast.Call) and called_name(outer) == "zip":
            yield "keyed"  # put beside the names again
            return
        if isinstance(outer, ast.Tuple) and any(_is_named(part, turn) for part in outer.elts if part is not inner):
            yield "keyed"
            return
        if isinstance(outer, Comprehension):
            around = turn.file.parents.get(outer)
            pooled = isinstance(around, ast.Call) and called_name(around) in _POOLERS
            yield "pooled" if pooled else "kept"
            return
        inner = outer


def _carries(node: ast.AST, turn: Turn, carriers: set[str]) -> bool:
    """Whether the result is part of an expression."""
    return mentions(node, carriers) or turn.call in ast.walk(node)


def _carries_at(statement: ast.AST, node: ast.expr, turn: Turn, carriers: set[str]) -> bool:
    """Whether the result is part of an expression there: of what stands before the call, only the tensor itself is."""
    if not _is_after(turn.call, statement):
        return _carries(node, turn, carriers)
    if isinstance(node, (ast.Tuple, ast.List, ast.Dict)):
        parts = node.values if isinstance(node, ast.Dict) else node.elts
        return any(_carries_at(statement, part, turn, carriers) for part in parts)
    return isinstance(node, ast.Name) and node.id in carriers


def _is_after(node: ast.AST, other: ast.AST) -> bool:
    if not isinstance(node, (ast.expr, ast.stmt)) or not isinstance(other, (ast.expr, ast.stmt)):
        return False
    end = other.end_lineno or other.lineno, other.end_col_offset or other.col_offset
    return (node.lineno, node.col_offset) >= end


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
