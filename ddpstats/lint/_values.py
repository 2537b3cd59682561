"""What is wrong with the tensor that is reduced: it has a second name that is read later, or it is a mean already."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence

from ddpstats.lint._backwards import WITHOUT_VALUE
from ddpstats.lint._collectives import Collective, Collectives
from ddpstats.lint._flow import Accusation
from ddpstats.lint._origins import names_data
from ddpstats.lint._program import RANGES, Function, blocks_of, dotted, last_name, parameters_of, parts_of, text_of
from ddpstats.lint._rules import ALIASED_REDUCE, MEAN_OF_MEANS

_IN_PLACE = frozenset({"all_reduce", "reduce"})
_READS_NO_VALUE = WITHOUT_VALUE | {"backward"}
_OWN_MEAN = re.compile(
    r"(?i)(np|numpy|statistics)\.mean\(.*|.* / (len\(.*(loss|batch|sample|pred|result|output|score|target|utt|data).*\)"
    r"|(num_?|n_?|total_?|_)*(samples?|examples?|tokens?|count|utts?|correct|seen|total|images|frames|items))"
)
_LIBRARIES = frozenset({"np", "numpy", "torch", "dist", "sum", "len"})


class _Variables:
    """Of one function: what each is given, and where it is named, in the order of the text."""

    def __init__(self, statements: Sequence[ast.stmt]) -> None:
        self.nodes = list(parts_of(*statements))
        self.given: dict[str, list[ast.expr]] = {}
        self.named: dict[str, list[ast.Name]] = {}
        self._quiet: set[ast.AST] = set()  # what is named without reading its value
        for node in self.nodes:
            if isinstance(node, ast.Assign):
                for target in node.targets:
                    self.given.setdefault(dotted(target), []).append(node.value)
            elif isinstance(node, ast.Name):
                self.named.setdefault(node.id, []).append(node)
            elif isinstance(node, (ast.Attribute, ast.Return)):
                reads = isinstance(node, ast.Attribute) and node.attr not in _READS_NO_VALUE
                self._quiet.update(() if reads or node.value is None else (node.value,))
            elif isinstance(node, ast.Compare) and isinstance(node.ops[0], (ast.Is, ast.IsNot)):
                self._quiet.update((node.left, *node.comparators))
            elif isinstance(node, ast.Call) and last_name(node.func) in ("len", "id", "type"):
                self._quiet.update(node.args)

    def read_after(self, name: str, call: ast.Call) -> int:
        """The line where a variable's value is first used behind a call's statement, of a compound one behind its head.

        0 where it is set anew before.
        """
        statements = (one for one in self.nodes if isinstance(one, ast.stmt))  # those in a block before its own
        around = next(one for one in statements if not _is_before(one, call) and not _is_before(call, one))
        block = next(blocks_of(around), [])
        named = [node for node in self.named.get(name, ()) if node not in self._quiet]
        names = [node for node in named if (not _is_before(node, block[0]) if block else _is_before(around, node))]
        first = min(names, key=lambda node: (node.lineno, node.col_offset), default=None)
        return first.lineno if first is not None and isinstance(first.ctx, ast.Load) else 0

    def is_used_itself(self, one: Collective) -> bool:
        """Whether what is reduced is read later by its own name; if not, it is reduced for its other name's sake."""
        names = self.named.get(dotted(one.in_place) if one.in_place else "", ())
        behind = (node for node in names if _is_before(one.call, node))
        return bool(one.via) or any(isinstance(node.ctx, ast.Load) for node in behind)


def value_accusations(
    statements: Sequence[ast.stmt], collectives: Collectives, owner: ast.ClassDef | None
) -> Iterator[Accusation]:
    """Of one function, or of a module's own statements."""
    run = collectives.among(statements, owner)
    variables = _Variables(statements if run else [])
    for one in (one for one in run if one.op in _IN_PLACE):
        function = collectives.program.function_called(one.call, owner) if one.via else None
        for name in _also_changed(variables, one, function, collectives):
            line = variables.read_after(name, one.call) if names_data(name) else 0
            if line and variables.is_used_itself(one):
                reason = f"{one.via or one.op}() changes `{name}` in place, which line {line} reads as this rank's own."
                yield Accusation(ALIASED_REDUCE, one.call, reason)
        mean = "" if one.via or collectives.program.has_equal_parts else _own_mean(variables, one, run)
        if mean:
            yield Accusation(MEAN_OF_MEANS, one.call, f"`{mean}` is a mean already, and is averaged over ranks.")


def _also_changed(
    variables: _Variables, one: Collective, function: Function | None, collectives: Collectives
) -> Iterator[str]:
    """Other names of the reduced tensor: ``loss``, where it is ``x = loss``, or what a function was handed as ``x``."""
    if function is None:
        values = variables.given.get(dotted(one.in_place), []) if isinstance(one.in_place, ast.Name) else []
        for value in values if len(values) == 1 else ():
            func = value.func if isinstance(value, ast.Call) else None
            yield dotted(func.value if isinstance(func, ast.Attribute) and func.attr == "detach" else value)
        return
    inside = collectives.among(function.body, collectives.program.owner[function])
    changed = {dotted(its.in_place) for its in inside if its.op in _IN_PLACE and its.in_place and not its.via}
    targets = {name for name, values in variables.given.items() if one.call in values}
    anew = _Variables(function.body).given if changed and targets else {}
    for argument, parameter in zip(one.call.args, parameters_of(function), strict=False):
        if parameter in changed and parameter not in anew and targets and dotted(argument) not in targets:
            yield dotted(argument)


def _own_mean(variables: _Variables, one: Collective, run: Sequence[Collective]) -> str:
    """The text of what is reduced, where it is a mean over what this rank has, and is averaged; else empty."""
    name = dotted(one.in_place) if one.in_place else ""
    given = [value for value in variables.given.get(name, ()) if name and _is_before(value, one.call)][-1:]
    while given and isinstance(given[0], ast.Call) and last_name(given[0].func) in ("tensor", "as_tensor"):
        given = given[0].args[:1]
    if not given or not _OWN_MEAN.fullmatch(ast.unparse(given[0])) or _is_shared(given[0], variables, run):
        return ""
    averages = re.compile(rf"{re.escape(name)} /=? .*(world_?size|num_processes|get_size\(\))|.*\bAVG\b")
    divisions = (node for node in variables.nodes if isinstance(node, (ast.BinOp, ast.AugAssign)) or node is one.call)
    return text_of(given[0]) if any(averages.match(ast.unparse(node)) for node in divisions) else ""


def _is_shared(mean: ast.expr, variables: _Variables, run: Sequence[Collective]) -> bool:
    """Whether ranks divide by the same: a count that was reduced itself, or what a loop of fixed length has met."""
    parts = _names_in(mean)
    if any(parts & _names_in(one.call) for one in run if _is_before(one.call, mean)):
        return True
    loops = (one for one in variables.nodes if isinstance(one, ast.For) and _is_before(one, mean))
    counted = (loop for loop in loops if isinstance(loop.iter, ast.Call) and last_name(loop.iter.func) in RANGES)
    return any(parts & _names_in(statement) for loop in counted for statement in loop.body)


def _is_before(one: ast.expr | ast.stmt, other: ast.expr | ast.stmt) -> bool:
    """Whether it ends where the other one has not begun, also on one line."""
    return (one.end_lineno or 0, one.end_col_offset or 0) <= (other.lineno, other.col_offset)


def _names_in(node: ast.AST) -> set[str]:
    return {one.id for one in ast.walk(node) if isinstance(one, ast.Name)} - _LIBRARIES
