"""Trace in the text of one function where a tensor came from, and what becomes of its result.

1. `bindings_of`, `nearest`: which statement gave a variable its value.
2. `LabelTracer`: routes of keys. A *value* is followed through everything that makes a new value of it: assignments,
   calls, operators, attributes. What it was taken out of, a *container*, is followed through other names for it alone:
   in ``stats = forward(utterance)`` no loss is called after the utterance. Where a route comes to a parameter, it goes
   on in the frame of the caller.
3. `use_of`: whether a loop keeps each result under its key, or pools them.
"""

from __future__ import annotations

import ast
import functools
import itertools
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import CodeType
from typing import Literal

from ddpstats.guard.labels.source import (
    Comprehension,
    Function,
    SourceFile,
    argument_for,
    called_name,
    end_of,
    find_parameters,
    is_behind_output,
    mentions,
    names_in,
    tensor_argument,
    unwrap_container,
    variable_of,
)

_MAX_HOPS = 16
_MAX_ROUTES = 8
_IN_PLACE = re.compile(r"[a-z]\w*([^_]_|_inplace)$")  # `div_`, which gives the tensor itself
_OTHER_THAN_VALUES = frozenset({"device", "dtype", "shape", "layout", "ndim", "generator", "requires_grad"})
_CONVERTERS = frozenset({"to", "cuda", "xpu", "type"})  # methods that take a device or a dtype
# Expressions that hand on their operands, and operators, which make a new value of them.
_HANDS_ON = (ast.Attribute, ast.NamedExpr, ast.Await, ast.Starred, ast.BoolOp, ast.List, ast.Tuple)
_OPERATORS = (ast.BinOp, ast.UnaryOp)
_Assignment = (ast.Assign, ast.AnnAssign, ast.NamedExpr)
_TOTALS = frozenset({"sum", "mean", "max", "min", "fsum", "prod", "any", "all", "median", "norm", "stack", "cat"})
_KEEPERS = frozenset({"append", "extend", "insert", "appendleft", "put"})
_STORERS = frozenset({"setattr", "update", "setdefault", "__setitem__"})
_text = functools.lru_cache(1 << 16)(ast.unparse)  # the same expressions are compared again and again

# -- variables --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Binding:
    """One statement that gives a variable its value: ``value``, or an element of it if there is a ``loop``.

    ``value`` is None for a parameter. ``beside``: the other names of the same target, for ``for key, value in ...``.
    ``loop``: the statement or comprehension that loops.
    """

    name: ast.Name | None = None
    value: ast.expr | None = None
    beside: tuple[ast.Name, ...] = ()
    loop: ast.AST | None = None

    @property
    def position(self) -> tuple[int, int]:
        """Return from where on the variable has this value."""
        if isinstance(self.loop, Comprehension):
            return self.loop.lineno, self.loop.col_offset
        return (0, 0) if self.value is None else end_of(self.value)


Bindings = dict[str, list[Binding]]


def bindings_of(scope: ast.AST) -> Bindings:
    """Return all bindings of a function's or module's own variables, in the order of the text."""
    bindings: Bindings = {}
    if isinstance(scope, Function):
        for argument in (*scope.args.posonlyargs, *scope.args.args, *scope.args.kwonlyargs):
            bindings.setdefault(argument.arg, []).append(Binding())
    for node in _own_nodes(scope):
        for name, binding in _bound_by(node):
            bindings.setdefault(name, []).append(binding)
    for of_name in bindings.values():
        of_name.sort(key=lambda binding: binding.position)
    return bindings


def nearest(bindings: Bindings, name: str, at: ast.expr, file: SourceFile) -> Binding | None:
    """Return the last binding before ``at``, or None where this scope does not bind ``name``.

    Branches are not distinguished. A loop binds its variables only inside of it.
    """
    before: list[Binding] = []
    after: list[Binding] = []
    for binding in bindings.get(name, []):
        # The iterable of a comprehension is read before its variable is there.
        is_iterable = isinstance(binding.loop, Comprehension) and binding.value and file.is_inside(at, binding.value)
        if binding.loop is None or (file.is_inside(at, binding.loop) and not is_iterable):
            (before if binding.position <= (at.lineno, at.col_offset) else after).append(binding)
    # Without one before: a value that an earlier turn of a loop has left.
    return before[-1] if before else after[-1] if after else None


def _own_nodes(scope: ast.AST) -> Iterator[ast.AST]:
    """Yield all nodes that run as part of ``scope`` itself."""
    body = getattr(scope, "body", [])
    stack: list[ast.AST] = list(body) if isinstance(body, list) else [body]
    while stack:
        node = stack.pop()
        yield node
        if not isinstance(node, (*Function, ast.ClassDef)):
            stack.extend(ast.iter_child_nodes(node))


def _bound_by(node: ast.AST) -> Iterator[tuple[str, Binding]]:
    if isinstance(node, ast.Assign):
        for target in node.targets:
            yield from _targets(target, node.value)
    elif isinstance(node, (ast.AnnAssign, ast.NamedExpr)) and node.value is not None:
        # Not of `v /= n`, which keeps what v was made of: the augmented value comes from v itself as well.
        yield from _targets(node.target, node.value)
    elif isinstance(node, (ast.For, ast.AsyncFor)):
        yield from _targets(node.target, node.iter, node)
    elif isinstance(node, Comprehension):
        for generator in node.generators:
            yield from _targets(generator.target, generator.iter, node)


def _targets(target: ast.expr, value: ast.expr, loop: ast.AST | None = None) -> Iterator[tuple[str, Binding]]:
    """Yield the names in a target; in ``a, b = x, y`` each has its own value."""
    if loop is None and isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
        for part, its_value in zip(target.elts, value.elts, strict=False):
            yield from _targets(part, its_value)
        return
    names = [name for name in names_in(target) if isinstance(name.ctx, ast.Store)]
    for name in names:
        beside = tuple(sibling for sibling in names if sibling is not name)
        yield name.id, Binding(name, value, beside, loop)


# -- routes -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class KeyStep:
    """One step out of a container.

    ``names``: expressions whose values may name the element. Where none does, the value of ``element`` is the name, or
    is searched for in the container. ``loop``: the loop that chooses the key; None where no loop does.
    """

    names: tuple[ast.expr, ...]
    element: ast.expr | None
    container: ast.expr | None
    loop: ast.AST | None = None


@dataclass(frozen=True, eq=False)
class Route:
    """Steps from the value outwards.

        ``fresh``: what is overwritten was made of the element, and is not the element itself. ``parameter``: where the
    route goes on, if it does. ``of_container``: the parameter has the container, and only other names for it are
    followed.
    """

    steps: tuple[KeyStep, ...] = ()
    fresh: bool = False
    parameter: str = ""
    of_container: bool = False

    @cached_property
    def variables(self) -> list[str]:
        """The variables that hold the key and the container of the only step; not two where it reads others."""
        nodes = [*self.steps[0].names, self.steps[0].container] if len(self.steps) == 1 else []
        return [node.id for node in nodes if isinstance(node, ast.Name)] if len(nodes) == 2 else []


class LabelTracer:
    """Traces values in one file; the bindings of each function are kept."""

    def __init__(self, file: SourceFile) -> None:
        self.file = file
        self._bindings: dict[ast.AST, Bindings] = {}

    def of_argument(self, call: ast.expr, is_functional: bool) -> tuple[Route, ...]:
        """Return the routes of the tensor that a collective reads."""
        argument = tensor_argument(call)
        if argument is None or (called_name(call) == "all_gather" and not self._sums_gathered(call)):
            return ()
        fresh = (is_functional and not _IN_PLACE.match(called_name(call))) or is_behind_output(call)
        return self._some(itertools.chain(self._value(argument, fresh, 0), self._find_stored(call)))

    def of_parameter(self, call: ast.expr, callee: CodeType, route: Route) -> tuple[Route, ...]:
        """Return the routes of what ``call`` passed to ``callee`` as the parameter at which ``route`` ended."""
        argument = argument_for(call, callee, route.parameter)
        if route.of_container:
            return self._some(self._container(argument, 0))
        binding = self._binding_of(argument) if isinstance(argument, ast.Name) else None
        origin = argument if binding is None or binding.loop is not None else binding.value
        is_made = isinstance(origin, ast.Call) and called_name(origin) not in ("getattr", "get")
        # What an object computes does not bear the names that it was made with.
        routes = self._value(None if is_made and route.parameter == "self" else argument, False, 0)
        return self._some(itertools.chain(routes, self._find_stored(call)))

    def _some(self, routes: Iterator[Route]) -> tuple[Route, ...]:
        """Return the likeliest routes: what a method's object holds comes last."""
        some = list(itertools.islice(routes, _MAX_ROUTES))
        return tuple(sorted(some, key=lambda route: route.parameter == "self" and not route.steps))

    def _sums_gathered(self, call: ast.expr) -> bool:
        """Say whether the function adds up what the ranks sent, as espnet does: then it is a reduction."""
        gathered = variable_of(call.args[0]) if isinstance(call, ast.Call) and call.args else ""
        nodes = ast.walk(self.file.scope_of(call))
        return any(called_name(node) in ("sum", "mean") and mentions(node, {gathered}) for node in nodes)

    def _value(self, expr: ast.expr | None, fresh: bool, hops: int) -> Iterator[Route]:
        """Yield the routes of a value, the likeliest first."""
        if expr is None or hops > _MAX_HOPS:
            return
        hops += 1
        parts: list[ast.expr] = []
        if isinstance(expr, ast.Name):
            yield from self._name(expr, False, fresh, hops)
        elif isinstance(expr, ast.Subscript):
            yield from self._out(self._take_by_key(expr.slice, expr.value), fresh, hops)
            parts = [expr.value]
        elif isinstance(expr, ast.Call):
            if called_name(expr) == "getattr" and len(expr.args) >= 2:
                yield from self._out(self._take_by_key(expr.args[1], expr.args[0]), fresh, hops)
            if isinstance(expr.func, ast.Attribute):
                yield from self._value(expr.func.value, fresh or not _IN_PLACE.match(expr.func.attr), hops)
            keywords = [keyword.value for keyword in expr.keywords if keyword.arg not in _OTHER_THAN_VALUES]
            is_method = isinstance(expr.func, ast.Attribute) and any(map(self._binding_of, names_in(expr.func.value)))
            parts = keywords if is_method and called_name(expr) in _CONVERTERS else [*expr.args, *keywords]
            fresh = True
        elif isinstance(expr, ast.IfExp):
            parts = [expr.body, expr.orelse]
        elif isinstance(expr, Comprehension):
            parts, fresh = [unwrap_container(generator.iter) for generator in expr.generators], True
        elif isinstance(expr, (*_HANDS_ON, *_OPERATORS)) and getattr(expr, "attr", "") not in _OTHER_THAN_VALUES:
            parts = [part for part in ast.iter_child_nodes(expr) if isinstance(part, ast.expr)]
            fresh = fresh or isinstance(expr, _OPERATORS)
        for part in parts:
            yield from self._value(part, fresh, hops)

    def _container(self, expr: ast.expr | None, hops: int) -> Iterator[Route]:
        """Yield the routes of a container, through other names for it; none where nothing is known."""
        expr = None if expr is None else unwrap_container(expr)
        if hops > _MAX_HOPS:
            return
        if isinstance(expr, ast.Name):
            yield from self._name(expr, True, False, hops + 1)
        elif isinstance(expr, ast.Subscript):
            yield from self._out(self._take_by_key(expr.slice, expr.value), False, hops + 1)

    def _out(self, step: KeyStep, fresh: bool, hops: int) -> Iterator[Route]:
        """Yield the step, followed by the steps by which its container was taken out of others."""
        further = next(self._container(step.container, hops), Route())
        yield Route((step, *further.steps), fresh, further.parameter, True)

    def _name(self, name: ast.Name, is_container: bool, fresh: bool, hops: int) -> Iterator[Route]:
        binding = self._binding_of(name)
        if binding is None:
            return
        if binding.value is None:
            yield Route((), fresh, name.id, is_container)
        elif binding.name is not None and binding.loop is not None:
            step = KeyStep(binding.beside, binding.name, unwrap_container(binding.value), binding.loop)
            yield from self._out(step, fresh, hops)
        elif is_container:
            yield from self._container(binding.value, hops)
        else:
            yield from self._value(binding.value, fresh, hops)

    def _find_stored(self, call: ast.expr) -> Iterator[Route]:
        """Yield the names under which the program stores the result of a call."""
        loop = self.file.loop_around(call)
        carriers = {variable_of(tensor_argument(call))}
        for around in self.file.around(call):
            carriers.update(_plain_targets(around) if isinstance(around, _Assignment) else ())
        for node in ast.walk(loop or self.file.scope_of(call)):
            if isinstance(node, ast.Assign) and (self.file.is_inside(call, node) or mentions(node.value, carriers)):
                for target in node.targets:
                    if isinstance(target, ast.Subscript):
                        yield Route((KeyStep((target.slice,), None, None, loop),), fresh=True)

    def _take_by_key(self, key: ast.expr, container: ast.expr) -> KeyStep:
        """One element, taken by its key."""
        return KeyStep((key,), None, container, self._loop_of(key))

    def _loop_of(self, key: ast.expr) -> ast.AST | None:
        """Return the loop that sets the variables of a key; None where none does."""
        for name in names_in(key):
            binding = self._binding_of(name)
            if binding is not None and binding.name is not None:
                loop = binding.loop or self.file.loop_around(binding.name)
                if loop is not None:
                    return loop
        return None

    def _binding_of(self, name: ast.Name) -> Binding | None:
        scope = self.file.scope_of(name)
        if scope not in self._bindings:
            self._bindings[scope] = bindings_of(scope)
        return nearest(self._bindings[scope], name.id, name, self.file)


# -- what becomes of the result ---------------------------------------------------------------------------------------

Use = Literal["stored", "element", "pooled", "pooled element", ""]
# What one expression does with a result. "kept": it leaves it with its key. "open": it may do anything with it.
_Read = Literal["stored", "pooled", "kept", "open"]


@dataclass(frozen=True)
class Turn:
    """One function's part in a turn of the loop.

    ``call``: what leads to the collective. ``within``: the loop, or the function. ``names``: the variables that hold
    the key here. ``results``: the texts of the expressions that hold the reduced tensor after the call. ``has_result``:
    the call returns it, too.
    """

    file: SourceFile
    call: ast.expr
    within: ast.AST
    names: frozenset[str]
    results: frozenset[str]
    has_result: bool


# File, call and calling function of each, the collective first.
CallChain = Sequence[tuple[SourceFile | None, ast.expr | None, CodeType]]


def use_of(step: KeyStep, calls: CallChain, is_element: bool) -> Use:
    """Return what the loop of a step does with its results.

    "stored": the result goes back under the key. "element": the element itself is overwritten. "pooled": the results
    of all turns are combined, so the keys do not matter. "pooled element": one of the first two, and they are, or may
    be, combined as well. "": none of these.

    ``calls``: up to where the step was taken.
    """
    turns = _turns_of(step, calls, is_element)
    reads = {read for turn in turns for node in ast.walk(turn.within) for read in _reads(node, turn)}
    if is_element and "stored" not in reads and turns and step.container is not None:
        is_pooled = "open" in reads or _is_totalled(_text(step.container), turns[0])
        reads.add("pooled" if is_pooled else "kept")
    if "pooled" in reads:
        return "pooled element" if is_element or "stored" in reads else "pooled"
    return "stored" if "stored" in reads else "element" if is_element else ""


def _turns_of(step: KeyStep, calls: CallChain, is_element: bool) -> list[Turn]:
    """Return the part of each function, from the one that takes the step to the collective."""
    names = frozenset(node.id for key in step.names for node in names_in(key))
    loop, turns = step.loop, list[Turn]()
    for index, (file, call, _) in reversed(list(enumerate(calls))):
        if file is not None and isinstance(call, ast.Call):
            within = loop if loop is not None and file.is_inside(call, loop) else file.scope_of(call)
            results = {_text(argument) for argument in call.args} if is_element else set()
            if index == 0:
                results |= {variable_of(tensor_argument(call)), *map(variable_of, call.args[:1])}
            results = _further(results, file, call, within) - names
            turns.append(Turn(file, call, within, names, frozenset(results), index > 0 or not is_element))
            names = find_parameters(call, calls[index - 1][2], names) if index else names
        loop = None
    return turns


def _further(results: set[str], file: SourceFile, call: ast.expr, within: ast.AST) -> set[str]:
    """Return the results, and the variables that are assigned from them."""
    nodes = [node for node in ast.walk(within) if isinstance(node, _Assignment)]
    assignments = [(node, node.value) for node in nodes if node.value is not None]
    for _ in range(2):  # twice: a chain of assignments, whatever order they are visited in
        for node, value in assignments:
            parts = list(ast.walk(value))
            if call in parts or any(_is_one_of(part, results) for part in parts):
                results |= {name for name in _plain_targets(node) if not _goes_on(name, value, file, call)}
    return results


def _goes_on(name: str, value: ast.expr, file: SourceFile, call: ast.expr) -> bool:
    """Say whether a variable's new value is made of its old one, as in ``total = total + reduced(value)``."""
    return any(part.id == name and not file.is_inside(part, call) for part in names_in(value))


def _reads(node: ast.AST, turn: Turn) -> Iterator[_Read]:
    """Yield what becomes of a result where this node reads it."""
    is_result = turn.has_result if node is turn.call else _is_after(node, turn.call) and _is_one_of(node, turn.results)
    if not is_result:
        return
    inner, is_receiver, has_key_beside = node, True, False
    for outer in turn.file.around(node):
        if isinstance(outer, ast.stmt):
            is_over = isinstance(outer, ast.Expr) and (is_receiver or has_key_beside)
            yield "kept" if is_over or isinstance(outer, ast.Return) else _read_by_statement(outer, node, turn)
            return
        if outer is turn.within:
            yield _read_of_collection(outer, turn) if isinstance(outer, Comprehension) else "kept"
            return
        if isinstance(outer, Function):
            yield "open"
            return
        beside = [part for part in ast.iter_child_nodes(outer) if part is not inner]
        name = called_name(outer)
        has_key_beside = has_key_beside or any(_has_key(part, turn) for part in beside)
        is_pair = isinstance(outer, (ast.Tuple, ast.Dict)) and not isinstance(turn.file.parents[outer], ast.Assign)
        if has_key_beside and (is_pair or name in _KEEPERS | _STORERS):
            yield "stored"
            return
        if name in _KEEPERS and isinstance(outer, ast.Call) and isinstance(outer.func, ast.Attribute):
            yield _read_of_collection(outer.func.value, turn)
            return
        is_receiver = is_receiver and (isinstance(outer, ast.Attribute) or inner is getattr(outer, "func", None))
        inner = outer


def _read_by_statement(statement: ast.stmt, node: ast.AST, turn: Turn) -> _Read:
    """Return what a statement does with the result that it reads by ``node``."""
    if not isinstance(statement, (ast.Assign, ast.AnnAssign, ast.AugAssign)) or statement.value is None:
        return "open"
    target = statement.targets[0] if isinstance(statement, ast.Assign) else statement.target
    text = _text(target)
    if text in turn.results and (text == _text(node) or not isinstance(target, ast.Name)):
        return "kept"  # mean = mean / 2, stats[key] /= 2
    if isinstance(statement, ast.AugAssign):
        return "stored" if _has_key(target, turn) else "pooled"
    if isinstance(target, ast.Name):
        return "pooled" if _goes_on(target.id, statement.value, turn.file, turn.call) else "kept"
    if isinstance(target, (ast.Subscript, ast.Attribute)) and _has_key(target, turn):
        if not _is_totalled(_text(target.value), turn):
            return "stored"
        return "pooled" if isinstance(target.value, ast.Name) else "open"  # others may read an attribute's elements
    return "open"


def _read_of_collection(made: ast.expr, turn: Turn) -> _Read:
    """Return what becomes of the results in a list, set or dict that a comprehension or a method puts them into."""
    parent = turn.file.parents.get(made)
    while isinstance(parent, ast.Call) and called_name(parent) in ("list", "tuple"):
        made, parent = parent, turn.file.parents.get(parent)
    is_keyed = isinstance(made, ast.DictComp) or called_name(parent) == "zip"
    names = _plain_targets(parent) if isinstance(parent, _Assignment) else iter(())
    collection = next(names, _text(made))
    if called_name(parent) in _TOTALS or _is_totalled(collection, turn):
        return "pooled"
    if is_keyed or isinstance(parent, ast.Expr):
        return "stored" if is_keyed else "kept"
    readers = {called_name(turn.file.parents.get(read)) for read in _later_reads(collection, turn)}
    return "kept" if readers & {"zip", "enumerate"} else "open"  # beside their names again, or anywhere


def _has_key(node: ast.AST, turn: Turn) -> bool:
    return mentions(node, turn.names)


def _is_one_of(node: ast.AST, texts: Collection[str]) -> bool:
    return isinstance(getattr(node, "ctx", None), ast.Load) and _text(node) in texts


def _is_totalled(collection: str, turn: Turn) -> bool:
    """Say whether the function combines the elements of a collection after the loop."""
    for read in _later_reads(collection, turn):
        for outer in turn.file.around(read):
            if called_name(outer) in _TOTALS or (isinstance(outer, ast.For) and _adds_up(outer, read, turn)):
                return True
    return False


def _adds_up(loop: ast.For, read: ast.AST, turn: Turn) -> bool:
    """Say whether a loop adds numbers that it reads from a collection to one variable."""
    file, targets = turn.file, {name.id for name in names_in(loop.target)}
    held = set(targets) if file.is_inside(read, loop.iter) else set[str]()
    for node in ast.walk(loop):
        if not isinstance(node, (ast.Assign, ast.AugAssign)) or _makes_text(node.value):
            continue
        names = set[str]() if isinstance(node, ast.AugAssign) else set(_plain_targets(node)) - targets
        if mentions(node.value, held) or file.is_inside(read, node.value):
            is_sum = isinstance(node, ast.AugAssign) and not mentions(node.target, targets)
            if is_sum or any(_goes_on(name, node.value, file, turn.call) for name in names):
                return True
            held |= names
    return False


def _makes_text(expr: ast.expr) -> bool:
    """Say whether an expression makes a text or a list."""
    if isinstance(expr, ast.BinOp):
        return _makes_text(expr.left) or _makes_text(expr.right)
    is_text = isinstance(expr, (ast.JoinedStr, ast.List)) or isinstance(getattr(expr, "value", None), str)
    return is_text or called_name(expr) in ("format", "join", "str", "repr")


def _later_reads(collection: str, turn: Turn) -> list[ast.AST]:
    """Return where the function reads a collection after the loop."""
    nodes = ast.walk(turn.file.scope_of(turn.call))
    return [node for node in nodes if _is_after(node, turn.within) and _is_one_of(node, {collection})]


def _is_after(node: ast.AST, earlier: ast.AST) -> bool:
    if not isinstance(node, (ast.expr, ast.stmt)) or not isinstance(earlier, (ast.expr, ast.stmt)):
        return False
    return (node.lineno, node.col_offset) >= end_of(earlier)


def _plain_targets(node: ast.Assign | ast.AnnAssign | ast.NamedExpr) -> Iterator[str]:
    """Yield the variables that an assignment sets."""
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    parts = (part for target in targets for part in getattr(target, "elts", [target]))
    return (part.id for part in parts if isinstance(part, ast.Name))
