"""Find where a tensor came from, and what becomes of its result, in the text of one function.

1. `bindings_of`, `nearest`: which statement gave a variable its value.
2. `LabelTracer`: routes of keys. A *value* is followed through everything that makes a new one of it: assignments,
   calls, operators, attributes. What it was taken out of, a *container*, is followed through other names for it alone:
   in ``stats = forward(utterance)`` no loss is called after the utterance. Where the function has no answer, the route
   leaves it by a parameter, or by a variable of an enclosing function, and goes on in the frame of the caller.
3. `use_of`: whether the loop stores the result under the key, or pools it.
"""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import CodeType
from typing import Literal

from ddpstats.guard.labels.source import (
    Comprehension,
    Function,
    SourceFile,
    argument_for,
    called_name,
    mentions,
    names_in,
    parameters_given,
    passes_function,
    tensor_argument,
    unwrapped,
    variable_of,
)

_MAX_HOPS = 16
_MAX_ROUTES = 8
_REDUCES = frozenset({"all_reduce", "reduce", "reduce_scatter", "reduce_scatter_tensor"})
_TAKERS = frozenset({"get", "pop", "setdefault", "__getitem__"})
_IN_PLACE = re.compile(r"[a-z]\w*[^_]_$")  # `div_`, which gives the tensor itself
_OTHER_THAN_VALUES = frozenset({"device", "dtype", "shape", "layout", "ndim", "generator", "requires_grad"})
_TOTALS = frozenset({"sum", "mean", "max", "min", "fsum", "prod", "any", "all", "median", "norm", "stack", "cat"})
_KEEPERS = frozenset({"append", "add", "extend", "insert", "appendleft", "put"})
_STORERS = frozenset({"setattr", "update", "setdefault", "__setitem__"})
_COMBINERS = _TOTALS | {"reduce", "len"}  # what may be done with a list of results that are one number in the end
_VALUES = frozenset({"values", "parameters", "buffers", "children", "modules"})  # methods that give no names
_PAIRS = frozenset({"zip", "dict"})

# -- variables --------------------------------------------------------------------------------------------------------

Position = tuple[int, int]


@dataclass(frozen=True, eq=False)
class Binding:
    """One place where a variable gets its value.

    ``kind`` "value": set to ``value``; "loop": an element of the iterable ``value``; "parameter": the caller's.
    ``beside``: the other names of the same target, for ``for key, value in ...`` and ``key, value = ...``.
    ``loop``: the statement or comprehension that loops.
    """

    kind: Literal["value", "loop", "parameter"]
    name: ast.Name | None
    value: ast.expr | None
    position: Position
    beside: tuple[ast.Name, ...] = ()
    loop: ast.AST | None = None


Bindings = dict[str, list[Binding]]


def bindings_of(scope: ast.AST) -> Bindings:
    """Return all bindings of a function's or module's own variables, in the order of the text."""
    bindings: Bindings = {}
    if isinstance(scope, Function):
        args = scope.args
        starred = [argument for argument in (args.vararg, args.kwarg) if argument is not None]
        for argument in (*args.posonlyargs, *args.args, *args.kwonlyargs, *starred):
            bindings.setdefault(argument.arg, []).append(Binding("parameter", None, None, (0, 0)))
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
    inside = [binding for binding in bindings.get(name, []) if binding.loop is None or file.is_inside(at, binding.loop)]
    comprehended = [binding for binding in inside if isinstance(binding.loop, Comprehension)]
    # The iterable of a comprehension is read before its variable is there.
    bound = [binding for binding in comprehended if not (binding.value and file.is_inside(at, binding.value))]
    if bound:
        return bound[-1]
    statements = [binding for binding in inside if binding not in comprehended]
    before = [binding for binding in statements if binding.position <= (at.lineno, at.col_offset)]
    # Without one before: a value that an earlier turn of a loop has left.
    return before[-1] if before else statements[-1] if statements else None


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


def _targets(
    target: ast.expr,
    value: ast.expr,
    kind: Literal["value", "loop"],
    position: Position,
    loop: ast.AST | None = None,
) -> Iterator[tuple[str, Binding]]:
    """Yield the names in a target; in ``a, b = x, y`` each has its own value."""
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


# -- routes -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Step:
    """One step out of a container.

    ``names``: expressions whose values may name the element. Where none does, the element itself is searched for in the
    container: the value of ``element``, or what was passed to the function that was called (None). ``set_by``: what
    chose the key: a "loop", the program's "text" or a parameter, or "" for a look-up under a key of the rank's own.
    """

    names: tuple[ast.expr, ...]
    element: ast.expr | None
    container: ast.expr | None
    loop: ast.AST | None = None
    set_by: Literal["loop", "text", ""] = "loop"


@dataclass(frozen=True, eq=False)
class Route:
    """Steps from the value outwards. ``fresh``: the tensor was made of the element, and is not the element itself.

    ``leaves``: how the route goes on: by the parameter ``name``, by the positional argument ``position`` that the
    function passed on in its ``*args``, by the variable ``name`` of the enclosing ``scope``, or not at all.
    ``container``: what left was the container, and only other names for it are followed.
    """

    steps: tuple[Step, ...] = ()
    fresh: bool = False
    leaves: Literal["", "parameter", "position", "variable"] = ""
    name: str = ""
    position: int = 0
    scope: ast.AST | None = None
    container: bool = False


class LabelTracer:
    """Traces values in one file; the bindings of each function are kept."""

    def __init__(self, file: SourceFile) -> None:
        self.file = file
        self._bindings: dict[ast.AST, Bindings] = {}

    # -- where a route begins -----------------------------------------------------------------------------------------

    def of_argument(self, call: ast.expr) -> tuple[Route, ...]:
        """Return the routes of the tensor that a collective gets; ``call`` may be one of ``map``."""
        if passes_function(call, _REDUCES):
            return self._some(self._of_consumed(call))
        argument = tensor_argument(call)
        if argument is None or (called_name(call) == "all_gather" and not self._sums_gathered(call)):
            return ()
        return self._some(itertools.chain(self.value(argument, False, 0), self._stored(call)))

    def of_parameter(self, call: ast.expr, callee: CodeType, route: Route) -> tuple[Route, ...]:
        """Return the routes of what ``call`` passed to ``callee`` as the parameter by which ``route`` left."""
        if not isinstance(call, ast.Call):
            return ()
        if callee.co_name != called_name(call) and passes_function(call, {callee.co_name}):
            return self._some(self._of_consumed(call))
        starred = route.position if route.leaves == "position" else None
        argument = argument_for(call, callee, route.name, starred)
        if isinstance(argument, tuple):
            return (Route((), False, "position", *argument, container=route.container),)
        if isinstance(argument, ast.Starred):
            return self._some(self.container(argument.value, 0))
        if route.container:
            return () if argument is None else self._some(self.container(argument, 0))
        of_value = iter(()) if argument is None else self.value(argument, False, 0)
        return self._some(itertools.chain(of_value, self._stored(call)))

    def of_variable(self, name: str, at: ast.expr, container: bool) -> tuple[Route, ...]:
        """Return the routes of a variable that a nested function reads, where the enclosing one is at ``at``."""
        return self._some(self._name(name, at, container, False, 0))

    def _some(self, routes: Iterator[Route]) -> tuple[Route, ...]:
        return tuple(itertools.islice(routes, _MAX_ROUTES))

    def _of_consumed(self, call: ast.AST) -> Iterator[Route]:
        """``map(reduce, stats.values())``: what was passed is an element of one of the other arguments."""
        for node in ast.walk(call):
            for argument in node.args if isinstance(node, ast.Call) else ():
                source = unwrapped(argument)
                if isinstance(source, (ast.Name, ast.Attribute)):
                    yield from self._out(Step((), None, source, node), False, 0)

    def _sums_gathered(self, call: ast.expr) -> bool:
        """Say whether the function adds up what the ranks sent, as espnet does: then it is a reduction."""
        gathered = variable_of(call.args[0]) if isinstance(call, ast.Call) and call.args else None
        nodes = ast.walk(self.file.scope_of(call)) if gathered else ()
        return any(called_name(node) in ("sum", "mean") and mentions(node, (gathered or "",)) for node in nodes)

    # -- values -------------------------------------------------------------------------------------------------------

    def value(self, expr: ast.expr, fresh: bool, hops: int) -> Iterator[Route]:
        """Yield the routes of a value, the likeliest first."""
        if hops > _MAX_HOPS:
            return
        hops += 1
        if isinstance(expr, ast.Name):
            yield from self._name(expr.id, expr, False, fresh, hops)
        elif isinstance(expr, ast.Subscript):
            yield from self._subscript(expr, fresh, hops)
        elif isinstance(expr, ast.Call):
            yield from self._call(expr, fresh, hops)
        elif isinstance(expr, ast.Attribute) and expr.attr in _OTHER_THAN_VALUES:
            return
        elif isinstance(expr, (ast.Attribute, ast.Await, ast.Starred, ast.NamedExpr)):
            yield from self.value(expr.value, fresh, hops)
        elif isinstance(expr, Comprehension):
            for generator in expr.generators:
                source = unwrapped(generator.iter)
                if source is not None:
                    yield from self.value(source, True, hops)
        elif isinstance(expr, (ast.BinOp, ast.UnaryOp, ast.BoolOp, ast.IfExp, ast.List, ast.Tuple, ast.Set)):
            fresh = fresh or isinstance(expr, (ast.BinOp, ast.UnaryOp))
            for part in ast.iter_child_nodes(expr):
                is_test = isinstance(expr, ast.IfExp) and part is expr.test
                if isinstance(part, ast.expr) and not is_test:
                    yield from self.value(part, fresh, hops)

    def _subscript(self, expr: ast.Subscript, fresh: bool, hops: int) -> Iterator[Route]:
        index = expr.slice
        if isinstance(index, ast.Constant) and isinstance(index.value, int):
            # `pair[1]` of a pair whose first part is the name
            yield from self._out(Step((expr.value,), None, None, self._loop_of(expr.value)), fresh, hops)
        elif isinstance(index, (ast.Slice, ast.Tuple)) and not _is_key_tuple(index):
            for node in names_in(index):  # a column of a tensor, picked by the loop
                yield from self.value(node, True, hops)
            fresh = True
        else:
            yield from self._out(self._taken(index, expr.value), fresh, hops)
        yield from self.value(expr.value, fresh, hops)

    def _call(self, call: ast.Call, fresh: bool, hops: int) -> Iterator[Route]:
        called = call.func
        if isinstance(called, ast.Attribute) and called.attr in _TAKERS and call.args:
            yield from self._out(self._taken(call.args[0], called.value), fresh, hops)
        elif called_name(call) == "getattr" and len(call.args) >= 2:
            yield from self._out(self._taken(call.args[1], call.args[0]), fresh, hops)
        receiver = [called.value] if isinstance(called, ast.Attribute) else []
        keywords = (keyword.value for keyword in call.keywords if keyword.arg not in _OTHER_THAN_VALUES)
        of_self = bool(receiver) and _root(receiver[0]) in ("self", "cls")
        in_place = receiver if isinstance(called, ast.Attribute) and _IN_PLACE.match(called.attr) else []
        for part in [*call.args, *keywords, *receiver] if of_self else [*receiver, *call.args, *keywords]:
            if not isinstance(part, ast.Constant):
                yield from self.value(part, fresh if part in in_place else True, hops)

    # -- containers ---------------------------------------------------------------------------------------------------

    def container(self, expr: ast.expr | None, hops: int) -> Iterator[Route]:
        """Yield the routes of a container, through other names for it; one without a step where nothing is known."""
        expr = unwrapped(expr)
        if expr is None or hops > _MAX_HOPS:
            return
        hops += 1
        if isinstance(expr, ast.Name):
            yield from self._name(expr.id, expr, True, False, hops)
        elif isinstance(expr, ast.Attribute):
            yield from self.container(expr.value, hops)
        elif isinstance(expr, ast.Subscript) and not isinstance(expr.slice, ast.Slice):
            yield from self._out(self._taken(expr.slice, expr.value), False, hops)

    def _out(self, step: Step, fresh: bool, hops: int) -> Iterator[Route]:
        """Yield the step, followed by the steps that its container was taken out of others by."""
        routes = list(itertools.islice(self.container(step.container, hops), 2))
        for route in routes:
            yield Route((step, *route.steps), fresh, route.leaves, route.name, route.position, route.scope, True)
        if not routes:
            yield Route((step,), fresh)

    # -- variables ----------------------------------------------------------------------------------------------------

    def _name(self, name: str, at: ast.expr, container: bool, fresh: bool, hops: int) -> Iterator[Route]:
        binding = self._binding_of(name, at)
        if binding is None:
            yield from self._of_enclosing(name, self.file.scope_of(at), container, fresh)
        elif binding.kind == "parameter":
            yield Route((), fresh, "parameter", name, container=container)
        elif binding.kind == "loop":
            has_values = any(called_name(node) in _VALUES for node in ast.walk(binding.value or at))
            own = () if binding.name is None or has_values else (binding.name,)
            step = Step((*binding.beside, *own), binding.name, unwrapped(binding.value), binding.loop)
            yield from self._out(step, fresh, hops)
        else:
            yield from self._assigned(binding, container, fresh, hops)

    def _assigned(self, binding: Binding, container: bool, fresh: bool, hops: int) -> Iterator[Route]:
        value = binding.value
        assert value is not None
        if binding.beside:
            loop = self.file.loop_around(binding.name) if binding.name is not None else None
            step = Step(binding.beside, None, None, loop, self._set_by(value, loop))
            yield from self._out(step, fresh, hops)
        if container:
            yield from self.container(value, hops)
        else:
            yield from self.value(value, fresh, hops)

    def _of_enclosing(self, name: str, scope: ast.AST, container: bool, fresh: bool) -> Iterator[Route]:
        for outer in self.file.around(scope):
            if isinstance(outer, (*Function, ast.Module)):
                bindings = self._bindings_of(outer).get(name, [])
                if any(self._has_route(binding, container) for binding in bindings):
                    yield Route((), fresh, "variable", name, scope=outer, container=container)
                if bindings:
                    return

    def _has_route(self, binding: Binding, container: bool) -> bool:
        """Say whether it is worth looking for the frame that has this binding."""
        return binding.kind != "value" or any(self._assigned(binding, container, False, 0))

    # -- keys ---------------------------------------------------------------------------------------------------------

    def _stored(self, call: ast.expr) -> Iterator[Route]:
        """Yield the names under which the program stores the result of a call."""
        statement: ast.AST = call
        for around in self.file.around(call):
            statement = around
            if isinstance(around, ast.DictComp):
                yield Route((Step((around.key,), None, None, around),), fresh=True)
            if not isinstance(around, ast.expr):
                break
        loop = self.file.loop_around(call)
        carriers = {variable_of(tensor_argument(call)) or "", *_plain_targets(statement)}
        for node in ast.walk(loop or self.file.scope_of(call)):
            if isinstance(node, ast.Assign) and (node is statement or mentions(node.value, carriers)):
                for target in node.targets:
                    if isinstance(target, ast.Subscript) and not isinstance(target.slice, ast.Slice):
                        step = Step((target.slice,), None, None, loop, self._set_by(target.slice, loop))
                        yield Route((step,), fresh=True)

    def _taken(self, key: ast.expr, container: ast.expr) -> Step:
        """One element, taken by its key."""
        loop = self._loop_of(key)
        return Step((key,), None, container, loop, self._set_by(key, loop))

    def _set_by(self, key: ast.expr, loop: ast.AST | None) -> Literal["loop", "text", ""]:
        if loop is not None:
            return "loop"
        return "text" if isinstance(key, ast.Constant) or self._is_given(key, 0) else ""

    def _is_given(self, key: ast.expr, hops: int) -> bool:
        """Say whether a key depends on a parameter."""
        bindings = list(self._bindings_in(key)) if hops < _MAX_HOPS else []
        values = [binding.value for binding in bindings if binding.kind == "value" and binding.value is not None]
        has_parameter = any(binding.kind == "parameter" for binding in bindings)
        return has_parameter or any(self._is_given(value, hops + 4) for value in values)

    def _loop_of(self, key: ast.expr) -> ast.AST | None:
        """Return the loop that sets the variables of a key; None where none does."""
        for binding in self._bindings_in(key):
            if binding.kind == "loop":
                return binding.loop
            if binding.kind == "value" and binding.name is not None:
                around = self.file.loop_around(binding.name)
                if around is not None:
                    return around
        return None

    def _bindings_in(self, key: ast.expr) -> Iterator[Binding]:
        for name in names_in(key):
            binding = self._binding_of(name.id, name)
            if binding is not None:
                yield binding

    def _binding_of(self, name: str, at: ast.expr) -> Binding | None:
        return nearest(self._bindings_of(self.file.scope_of(at)), name, at, self.file)

    def _bindings_of(self, scope: ast.AST) -> Bindings:
        bindings = self._bindings.get(scope)
        if bindings is None:
            bindings = self._bindings[scope] = bindings_of(scope)
        return bindings


def _root(expr: ast.expr) -> str:
    while isinstance(expr, (ast.Attribute, ast.Subscript, ast.Call)):
        expr = expr.func if isinstance(expr, ast.Call) else expr.value
    return expr.id if isinstance(expr, ast.Name) else ""


def _is_key_tuple(index: ast.expr) -> bool:
    """Say whether a tuple between brackets may be a key, and is no indexing of a tensor."""
    return isinstance(index, ast.Tuple) and all(isinstance(part, (ast.Name, ast.Attribute)) for part in index.elts)


# -- what becomes of the result ---------------------------------------------------------------------------------------

Use = Literal["stored", "element", "pooled", "pooled element", ""]


@dataclass(frozen=True)
class Turn:
    """One function's part in a turn of the loop.

    ``call``: what leads to the collective. ``names``: the variables that hold the key here, ``texts``: constants that
    are the key. ``carriers``: variables that hold the reduced tensor. ``within``: the loop, or the function.
    ``container``: what the element is taken out of.
    """

    file: SourceFile
    call: ast.expr
    within: ast.AST
    names: frozenset[str]
    texts: frozenset[str]
    carriers: frozenset[str]
    container: ast.expr | None = None

    def has_key(self, node: ast.AST) -> bool:
        """Say whether the key is part of an expression."""
        return mentions(node, self.names) or any(
            isinstance(part, ast.Constant) and part.value in self.texts for part in ast.walk(node)
        )

    def has_result(self, node: ast.AST, carriers: set[str]) -> bool:
        """Say whether the result is part of an expression; before the call, only the tensor itself is."""
        if _is_after(node, self.call) or self.file.is_inside(self.call, node):
            return mentions(node, carriers) or self.file.is_inside(self.call, node)
        if isinstance(node, (ast.Tuple, ast.List, ast.Dict)):
            return any(self.has_result(part, carriers) for part in ast.iter_child_nodes(node))
        return isinstance(node, ast.Name) and node.id in carriers


def turns_of(step: Step, calls: Sequence[tuple[SourceFile | None, ast.expr | None, CodeType]]) -> list[Turn]:
    """Return the part of each function, from the one that takes the step in to the collective.

    ``calls``: file, call and calling function, the collective first.
    """
    keys = [name for name in step.names if name is not step.element or len(step.names) == 1]
    names = frozenset(node.id for key in keys for node in names_in(key))
    texts = frozenset(key.value for key in keys if isinstance(key, ast.Constant) and isinstance(key.value, str))
    container, loop, turns = step.container, step.loop, list[Turn]()
    for index, (file, call, _) in reversed(list(enumerate(calls))):
        if file is not None and call is not None:
            within = loop if loop is not None and file.is_inside(call, loop) else file.scope_of(call)
            carriers = frozenset(_carriers(call)) if index == 0 else frozenset()
            turns.append(Turn(file, call, within, names - carriers, texts, carriers, container))
            names = parameters_given(call, calls[index - 1][2], names, bool(texts)) if index else names
        container = loop = None
    return turns


def _carriers(call: ast.expr) -> Iterator[str]:
    """Yield the variables that a collective reads its tensor from, or writes its result to."""
    first = call.args[:1] if isinstance(call, ast.Call) else []
    yield from (name for name in map(variable_of, [tensor_argument(call), *first]) if name is not None)


def use_of(turns: Sequence[Turn], is_element: bool) -> Use:
    """Return what a loop does with its results; ``turns`` go from the function that loops to the collective.

    "stored": the result goes back under the key. "element": the element itself is overwritten. "pooled": the results
    of all turns are combined, so the keys do not matter. "pooled element": one of the first two, and they are, or may
    be, combined as well. "": none of these.
    """
    uses = {use for turn in turns for use in _uses(turn, turn is turns[0])}
    if "pooled" in uses:
        return "pooled element" if is_element or "stored" in uses else "pooled"
    if "stored" in uses:
        return "stored"
    if is_element:
        is_pooled = any(_later(turn, turn.container) == "pooled" or _is_read_without_key(turn) for turn in turns)
        return "pooled element" if is_pooled else "element"
    return ""


def _uses(turn: Turn, is_outermost: bool) -> Iterator[Use]:
    nodes = list(ast.walk(turn.within))
    carriers = set(turn.carriers)
    for _ in range(2):  # twice: a chain of assignments, whatever order they are visited in
        for node in nodes:
            value = getattr(node, "value", None)
            if isinstance(value, ast.expr) and (mentions(value, carriers) or turn.file.is_inside(turn.call, value)):
                carriers.update(_plain_targets(node))
    carriers -= turn.names
    for node in nodes:
        yield from _use(node, turn, carriers)
    yield from _uses_around_call(turn, is_outermost)


def _use(node: ast.AST, turn: Turn, carriers: set[str]) -> Iterator[Use]:
    """Yield what one statement or call does with the result."""
    if isinstance(node, ast.Assign) and turn.has_result(node.value, carriers):
        for target in node.targets:
            yield from _stored_in(target, node.value, turn)
    elif isinstance(node, ast.AugAssign) and turn.has_result(node.value, carriers):
        target = node.target
        if isinstance(target, ast.Subscript) and turn.has_key(target.slice):
            yield "stored"
        elif not (isinstance(target, ast.Name) and target.id in carriers):
            yield "pooled"
    elif isinstance(node, ast.Call) and not turn.file.is_inside(turn.call, node):
        arguments = [*node.args, *(keyword.value for keyword in node.keywords)]
        if any(turn.has_result(argument, carriers) for argument in arguments):
            yield from _passed_to(node, arguments, turn)
    elif isinstance(node, (ast.DictComp, ast.Yield)) and node.value is not None:
        is_pair = isinstance(node.value, ast.Tuple) and turn.has_key(node.value)
        if turn.has_result(node.value, carriers) and (is_pair or isinstance(node, ast.DictComp)):
            yield "stored"


def _stored_in(target: ast.expr, value: ast.expr, turn: Turn) -> Iterator[Use]:
    if isinstance(target, ast.Subscript) and (turn.has_key(target.slice) or turn.has_key(target.value)):
        later, is_local = _later(turn, target.value), isinstance(target.value, ast.Name)
        # Other functions may read the elements of an attribute.
        yield "" if later == "pooled" and not is_local else later or "stored"
    elif isinstance(target, ast.Name) and target.id not in turn.carriers and mentions(value, {target.id}):
        yield "pooled"  # total = total + result


def _passed_to(call: ast.Call, arguments: Sequence[ast.expr], turn: Turn) -> Iterator[Use]:
    """Yield what another call does that is given the result."""
    receiver = call.func.value if isinstance(call.func, ast.Attribute) else None
    is_keeper = receiver is not None and called_name(call) in _KEEPERS
    has_key = any(turn.has_key(part) for part in arguments)
    if (receiver is not None and turn.has_key(receiver)) or (has_key and (is_keeper or called_name(call) in _STORERS)):
        yield "stored"
    elif is_keeper:
        yield _later(turn, receiver)


def _later(turn: Turn, collection: ast.expr | None) -> Use:
    """Return what becomes of a collection of results after the loop: "stored" where it is put beside names again,
    "pooled" where all that follows combines its elements."""
    if not _text(collection):
        return ""
    texts, calls, others = {_text(collection)}, set[str](), False
    after = [node for node in ast.walk(turn.file.scope_of(turn.call)) if _is_after(node, turn.within)]
    for node in after:
        parts = list(ast.walk(node.value)) if isinstance(node, ast.Assign) else []
        if any(_text(part) in texts for part in parts) and not any(called_name(part) in _TOTALS for part in parts):
            texts.update(_plain_targets(node))
    for node in after:
        if _text(node) in texts and isinstance(getattr(node, "ctx", None), ast.Load):
            around = [called_name(outer) for outer in turn.file.around(node) if isinstance(outer, ast.expr)]
            calls.update(around)
            others = others or not _COMBINERS.intersection(around)
    if calls & _PAIRS:
        return "stored"
    return "pooled" if calls and not others else ""


def _text(node: ast.AST | None) -> str:
    """Return the text of a variable or an attribute; empty for other nodes."""
    return ast.unparse(node) if isinstance(node, (ast.Name, ast.Attribute)) else ""


def _uses_around_call(turn: Turn, is_outermost: bool) -> Iterator[Use]:
    """Yield what the expression around the call makes of its result, out to the loop or the statement."""
    inner: ast.AST = turn.call
    maps = any(called_name(argument) == "map" for argument in getattr(turn.call, "args", ()))
    if is_outermost and maps and called_name(turn.call) in _TOTALS:
        yield "pooled"  # math.fsum(map(reduced, tensors.values()))
    for outer in turn.file.around(turn.call):
        if isinstance(outer, (ast.stmt, *Function)):
            return
        name = called_name(outer)
        beside = [part for part in ast.iter_child_nodes(outer) if part is not inner]
        is_pair = (isinstance(outer, ast.Tuple) or name in _STORERS) and any(turn.has_key(part) for part in beside)
        if is_pair or name == "zip" or (isinstance(outer, ast.DictComp) and inner is outer.value):
            yield "stored"
        elif is_outermost and name in _TOTALS and inner is not getattr(outer, "func", None):
            yield "pooled"
        inner = outer


def _is_read_without_key(turn: Turn) -> bool:
    """Say whether the loop reads the element after the call for something that has no part of the key.

    Such a read may pool the elements of all turns, in whatever way: ``worst = max(worst, d[k])``.
    """
    arguments = turn.call.args if isinstance(turn.call, ast.Call) else []
    texts = {ast.unparse(argument) for argument in arguments} - turn.names
    for node in ast.walk(turn.within):
        is_load = isinstance(getattr(node, "ctx", None), ast.Load) and _is_after(node, turn.call)
        if is_load and ast.unparse(node) in texts and not _stays_with_key(node, turn):
            return True
    return False


def _stays_with_key(node: ast.AST, turn: Turn) -> bool:
    """Say whether a read of the element overwrites it, returns it, keeps it in a list, or has the key beside it."""
    inner = node
    for outer in turn.file.around(node):
        if outer is turn.within:
            return False
        name = called_name(outer)
        if inner is getattr(outer, "func", None) and name.endswith("_"):
            return True  # in place: v.div_(2)
        is_kept = name in _KEEPERS and name != "add"  # torch.add(total, v, out=total)
        if is_kept or any(turn.has_key(part) for part in ast.iter_child_nodes(outer) if part is not inner):
            return True
        if isinstance(outer, ast.stmt):
            return isinstance(outer, ast.Return)
        inner = outer
    return False


def _is_after(node: ast.AST, other: ast.AST) -> bool:
    if not isinstance(node, (ast.expr, ast.stmt)) or not isinstance(other, (ast.expr, ast.stmt)):
        return False
    return (node.lineno, node.col_offset) >= _end(other)


def _plain_targets(node: ast.AST) -> Iterator[str]:
    """Yield the variables that an assignment sets."""
    targets = node.targets if isinstance(node, ast.Assign) else []
    if isinstance(node, (ast.AnnAssign, ast.NamedExpr)):
        targets = [node.target]
    for target in targets:
        for part in target.elts if isinstance(target, (ast.Tuple, ast.List)) else [target]:
            if isinstance(part, ast.Name):
                yield part.id
