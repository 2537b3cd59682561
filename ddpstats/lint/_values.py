"""What is wrong with the tensor that is reduced: it has a second name that is read later, or it is a mean already."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence

from ddpstats.lint._collectives import Collective, Collectives
from ddpstats.lint._flow import RANGES, Accusation
from ddpstats.lint._origins import names_data
from ddpstats.lint._program import Function, dotted, last_name, parameters_of, parts_of, text_of
from ddpstats.lint._rules import ALIASED_REDUCE, MEAN_OF_MEANS

_IN_PLACE = frozenset({"all_reduce", "reduce"})
_READS_NO_VALUE = frozenset(
    {"backward", "dtype", "device", "shape", "size", "ndim", "dim", "numel", "stride", "is_cuda", "layout"}
    | {"requires_grad", "element_size", "is_floating_point", "nelement"}
)
_OWN_MEAN = re.compile(
    r"(?i)(np|numpy|statistics)\.mean\(.*|.* / (len\(.*(loss|batch|sample|pred|result|output|score|target|utt|data).*\)"
    r"|(num_?|n_?|total_?|_)*(samples?|examples?|tokens?|count|utts?|correct|seen|total|images|frames|items))"
)


def value_accusations(
    statements: Sequence[ast.stmt], collectives: Collectives, owner: ast.ClassDef | None
) -> Iterator[Accusation]:
    """Of one function, or of a module's own statements."""
    run = collectives.among(statements, owner)
    nodes = list(parts_of(*statements)) if run else []
    for one in (one for one in run if one.op in _IN_PLACE):
        function = collectives.program.function_called(one.call, owner) if one.via else None
        for name in _also_changed(nodes, one, function, collectives):
            if (
                names_data(name)
                and _is_used_itself(nodes, one)
                and (line := _read_after(nodes, name, one.call.end_lineno or 0))
            ):
                reason = f"{one.via or one.op}() changes `{name}` in place, which line {line} reads as this rank's own."
                yield Accusation(ALIASED_REDUCE, one.call, reason)
        mean = "" if one.via or collectives.program.has_equal_parts else _own_mean(nodes, one, run)
        if mean:
            yield Accusation(MEAN_OF_MEANS, one.call, f"`{mean}` is a mean already, and is averaged over ranks.")


def _also_changed(
    nodes: Sequence[ast.AST], one: Collective, function: Function | None, collectives: Collectives
) -> Iterator[str]:
    """Other names of the reduced tensor: ``loss``, where it is ``x = loss``, or what a function was handed as ``x``."""
    if function is None:
        values = _assigned(nodes, dotted(one.in_place)) if isinstance(one.in_place, ast.Name) else []
        for value in values if len(values) == 1 else ():
            func = value.func if isinstance(value, ast.Call) else None
            yield dotted(func.value if isinstance(func, ast.Attribute) and func.attr == "detach" else value)
        return
    inside = collectives.among(function.body, collectives.program.owner[function])
    changed = {dotted(its.in_place) for its in inside if its.op in _IN_PLACE and its.in_place and not its.via}
    targets = {dotted(node.targets[0]) for node in nodes if isinstance(node, ast.Assign) and node.value is one.call}
    for argument, parameter in zip(one.call.args, parameters_of(function), strict=False):
        anew = _assigned([*parts_of(*function.body)], parameter)
        if parameter in changed and not anew and targets and dotted(argument) not in targets:
            yield dotted(argument)


def _assigned(nodes: Sequence[ast.AST], name: str) -> list[ast.expr]:
    """What a variable is given, in the order of the text."""
    found = (node for node in nodes if isinstance(node, ast.Assign))
    return [node.value for node in found if any(dotted(target) == name for target in node.targets)]


def _read_after(nodes: Sequence[ast.AST], name: str, line: int) -> int:
    """The line of the first use of a variable's value behind a line, unless it is set anew before; else 0."""
    quiet = {id(node.value) for node in nodes if isinstance(node, ast.Attribute) and node.attr in _READS_NO_VALUE}
    quiet |= {id(node.value) for node in nodes if isinstance(node, ast.Return)}
    for node in nodes:
        if isinstance(node, ast.Compare) and isinstance(node.ops[0], (ast.Is, ast.IsNot)):
            quiet |= {id(side) for side in (node.left, *node.comparators)}
        elif isinstance(node, ast.Call) and last_name(node.func) in ("len", "id", "type"):
            quiet |= {id(argument) for argument in node.args}
    names = (node for node in nodes if isinstance(node, ast.Name) and node.id == name and id(node) not in quiet)
    first = min((node for node in names if node.lineno > line), key=lambda node: node.lineno, default=None)
    return first.lineno if first is not None and isinstance(first.ctx, ast.Load) else 0


def _is_used_itself(nodes: Sequence[ast.AST], one: Collective) -> bool:
    """Whether the reduced tensor is read later by its own name; if not, it is reduced for its other name's sake."""
    name = dotted(one.in_place) if one.in_place else ""
    reads = (node for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load))
    return bool(one.via) or any(node.id == name and node.lineno > (one.call.end_lineno or 0) for node in reads)


def _own_mean(nodes: Sequence[ast.AST], one: Collective, run: Sequence[Collective]) -> str:
    """The text of what is reduced, where it is a mean over what this rank has, and is averaged; else empty."""
    name = dotted(one.in_place) if one.in_place else ""
    before = [node for node in nodes if getattr(node, "lineno", one.call.lineno) < one.call.lineno]
    given = _assigned(before, name)[-1:] if name else []
    while given and isinstance(given[0], ast.Call) and last_name(given[0].func) in ("tensor", "as_tensor"):
        given = given[0].args[:1]
    if not given or not _OWN_MEAN.fullmatch(ast.unparse(given[0])) or _is_shared(given[0], before, run):
        return ""
    averages = re.compile(rf"{re.escape(name)} /=? .*(world_?size|num_processes|get_size\(\))|.*ReduceOp\.AVG")
    texts = (ast.unparse(node) for node in nodes if isinstance(node, (ast.BinOp, ast.AugAssign)) or node is one.call)
    return text_of(given[0]) if any(averages.match(text) for text in texts) else ""


def _is_shared(mean: ast.expr, before: Sequence[ast.AST], run: Sequence[Collective]) -> bool:
    """Whether ranks divide by the same: a count that was reduced itself, or what a loop of fixed length has met."""
    parts = _names_in(mean)
    reduced = [one.call for one in run if one.call.lineno < mean.lineno]
    if any(parts & _names_in(call) for call in reduced):
        return True
    loops = (node for node in before if isinstance(node, ast.For) and (node.end_lineno or 0) < mean.lineno)
    counted = (loop for loop in loops if isinstance(loop.iter, ast.Call) and last_name(loop.iter.func) in RANGES)
    return any(parts & _names_in(statement) for loop in counted for statement in loop.body)


def _names_in(node: ast.AST) -> set[str]:
    return {one.id for one in ast.walk(node) if isinstance(one, ast.Name)} - {
        "np",
        "numpy",
        "torch",
        "dist",
        "sum",
        "len",
    }
