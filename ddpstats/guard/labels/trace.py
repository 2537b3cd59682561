"""Where a value came from, in the text of one function: the keys that it was taken from its containers by.

A *value* is followed through everything that makes a new one of it: assignments, calls, operators, attributes. What it
was taken out of, a *container*, is followed through other names for it alone: else ``stats = forward(utterance)`` would
give every loss the utterance's name. Where the function does not tell, the route leaves it by a parameter, or by a
variable of an enclosing function, and goes on in the frame of the caller.
"""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from types import CodeType
from typing import Literal

from ddpstats.guard.labels.bindings import Binding, Bindings, bindings_of, nearest
from ddpstats.guard.labels.calls import (
    argument_for,
    argument_names,
    arguments_of,
    gets_a_collective,
    is_passed_as_function,
    mentions,
    ordered_by,
    sorts,
    tensor_argument,
    unwrapped,
)
from ddpstats.guard.labels.source import Comprehension, Function, Loop, SourceFile, names_in

_MAX_HOPS = 16
_MAX_ROUTES = 8
_TAKERS = frozenset({"get", "pop", "setdefault", "__getitem__"})
_IN_PLACE = re.compile(r"[a-z]\w*[^_]_$")  # `div_`, which gives the tensor itself


Chooser = Literal["loop", "sorted", "caller", ""]


@dataclass(frozen=True, eq=False)
class Step:
    """One step out of a container.

    ``names``: expressions whose values may name the element. Where none does, the element itself is searched for in the
    container: the value of ``element``, or what was passed to the function that was called (None). ``chosen_by``: as in
    `event.Evidence`.
    """

    names: tuple[ast.expr, ...]
    element: ast.expr | None
    container: ast.expr | None
    loop: ast.AST | None = None
    chosen_by: Chooser = "loop"


@dataclass(frozen=True, eq=False)
class Route:
    """Steps from the value outwards. ``fresh``: the tensor was made of the element, and is not the element itself.

    ``leaves``: how the route goes on: by the parameter ``name``, by the positional argument ``position`` that the
    function passed on in its ``*args``, by the variable ``name`` of the enclosing ``scope``, or not at all.
    ``container``: what left was the container, and only other names for it are followed. ``is_beside``: the name only
    stands beside what is done with the result.
    """

    steps: tuple[Step, ...] = ()
    fresh: bool = False
    leaves: Literal["", "parameter", "position", "variable"] = ""
    name: str = ""
    position: int = 0
    scope: ast.AST | None = None
    container: bool = False
    is_beside: bool = False


class LabelTracer:
    """Traces in one file; bindings are found once a function."""

    def __init__(self, file: SourceFile) -> None:
        self.file = file
        self._bindings: dict[ast.AST, Bindings] = {}

    # -- where a route begins -----------------------------------------------------------------------------------------

    def of_argument(self, call: ast.expr) -> tuple[Route, ...]:
        """Of the tensor that a call of a collective gets; ``call`` may be one of ``map``, which gets the collective."""
        if gets_a_collective(call):
            return self._some(self._of_consumed(call))
        argument = tensor_argument(call)
        if argument is None:
            return ()
        return self._some(itertools.chain(self.value(argument, False, 0), self._named_after(call)))

    def of_parameter(self, call: ast.expr, callee: CodeType, route: Route) -> tuple[Route, ...]:
        """Of what ``call`` passed to the function with the code ``callee``, as the parameter that ``route`` left by."""
        if not isinstance(call, ast.Call):
            return ()
        if is_passed_as_function(call, callee):
            return self._some(self._of_consumed(call))
        starred = route.position if route.leaves == "position" else None
        place = argument_for(call, callee, route.name, starred)
        if isinstance(place, tuple):
            return (Route((), False, "position", *place, container=route.container),)
        if isinstance(place, ast.Starred):
            return self._some(self.container(place.value, 0))
        if route.container:
            return () if place is None else self._some(self.container(place, 0))
        of_value = iter(()) if place is None else self.value(place, False, 0)
        return self._some(itertools.chain(of_value, self._named_after(call)))

    def of_variable(self, name: str, at: ast.expr, container: bool) -> tuple[Route, ...]:
        """Of a variable that a nested function reads, where the enclosing one is at ``at``."""
        return self._some(self._name(name, at, container, False, 0))

    def _some(self, routes: Iterator[Route]) -> tuple[Route, ...]:
        return tuple(itertools.islice(routes, _MAX_ROUTES))

    # -- values -------------------------------------------------------------------------------------------------------

    def value(self, expr: ast.expr, fresh: bool, hops: int) -> Iterator[Route]:
        """Routes of a value, the likeliest first."""
        if hops > _MAX_HOPS:
            return
        hops += 1
        if isinstance(expr, ast.Name):
            yield from self._name(expr.id, expr, False, fresh, hops)
        elif isinstance(expr, ast.Subscript):
            yield from self._subscript(expr, fresh, hops)
        elif isinstance(expr, ast.Call):
            yield from self._call(expr, fresh, hops)
        elif isinstance(expr, (ast.Attribute, ast.Await, ast.Starred, ast.NamedExpr)):
            yield from self.value(expr.value, fresh, hops)
        elif isinstance(expr, Comprehension):
            for generator in expr.generators:
                source = unwrapped(generator.iter)
                if source is not None:
                    yield from self.value(source, True, hops)
        else:
            fresh = fresh or isinstance(expr, (ast.BinOp, ast.UnaryOp))
            for part in _parts(expr):
                yield from self.value(part, fresh, hops)

    def _subscript(self, expr: ast.Subscript, fresh: bool, hops: int) -> Iterator[Route]:
        index = expr.slice
        if isinstance(index, ast.Constant) and isinstance(index.value, int):
            # `pair[1]` of a pair whose first part is the name
            yield from self._out(Step((expr.value,), None, None, self._loop_of(expr.value)), fresh, hops)
            yield from self.value(expr.value, fresh, hops)
        elif isinstance(index, (ast.Slice, ast.Tuple)) and not _is_key_tuple(index):
            for node in names_in(index):  # a column of a tensor, picked by the loop
                yield from self.value(node, True, hops)
            yield from self.value(expr.value, True, hops)
        else:
            yield from self._out(self._taken(index, expr.value), fresh, hops)
            yield from self.value(expr.value, fresh, hops)

    def _call(self, call: ast.Call, fresh: bool, hops: int) -> Iterator[Route]:
        called = call.func
        if isinstance(called, ast.Attribute) and called.attr in _TAKERS and call.args:
            key = call.args[0]
            yield from self._out(self._taken(key, called.value), fresh, hops)
        elif isinstance(called, ast.Name) and called.id == "getattr" and len(call.args) >= 2:
            key = call.args[1]
            yield from self._out(self._taken(key, call.args[0]), fresh, hops)
        receiver = [called.value] if isinstance(called, ast.Attribute) else []
        given = arguments_of(call)
        of_self = bool(receiver) and _root(receiver[0]) in ("self", "cls")
        in_place = receiver if isinstance(called, ast.Attribute) and _IN_PLACE.match(called.attr) else []
        for part in [*given, *receiver] if of_self else [*receiver, *given]:
            if not isinstance(part, ast.Constant):
                yield from self.value(part, fresh if part in in_place else True, hops)

    # -- containers ---------------------------------------------------------------------------------------------------

    def container(self, expr: ast.expr | None, hops: int) -> Iterator[Route]:
        """Routes of a container, through other names for it; one without a step where nothing is known."""
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
        """The step, and what can be told of its container beyond."""
        further = False
        for route in itertools.islice(self.container(step.container, hops), 2):
            further = True
            yield Route(
                (step, *route.steps), fresh, route.leaves, route.name, route.position, route.scope, container=True
            )
        if not further:
            yield Route((step,), fresh)

    # -- variables ----------------------------------------------------------------------------------------------------

    def _name(self, name: str, at: ast.expr, container: bool, fresh: bool, hops: int) -> Iterator[Route]:
        binding = self._binding_of(name, at)
        if binding is None:
            yield from self._of_enclosing(name, self.file.scope_of(at), container, fresh)
        elif binding.kind == "parameter":
            yield Route((), fresh, "parameter", name, container=container)
        elif binding.kind == "loop":
            yield from self._looped(binding, fresh, hops)
        elif binding.kind == "value" and binding.value is not None:
            yield from self._assigned(binding, binding.value, container, fresh, hops)

    def _assigned(self, binding: Binding, value: ast.expr, container: bool, fresh: bool, hops: int) -> Iterator[Route]:
        if binding.beside:
            loop = self._loop_around(binding.name) if binding.name is not None else None
            yield from self._out(Step(binding.beside, None, None, loop, self._chooser(value, loop)), fresh, hops)
        if container:
            yield from self.container(value, hops)
        else:
            yield from self.value(value, fresh, hops)

    def _looped(self, binding: Binding, fresh: bool, hops: int) -> Iterator[Route]:
        names = binding.beside if binding.name is None else (*binding.beside, binding.name)
        source = unwrapped(binding.value)
        loop = binding.loop
        chosen_by: Chooser = "sorted" if self._is_sorted(binding.value) else "loop"
        yield from self._out(Step(names, binding.name, source, loop, chosen_by), fresh, hops)

    def _of_enclosing(self, name: str, scope: ast.AST, container: bool, fresh: bool) -> Iterator[Route]:
        for outer in self.file.around(scope):
            if isinstance(outer, (*Function, ast.Module)):
                bindings = self._bindings_of(outer).get(name, [])
                if bindings:
                    if any(self._may_tell(binding, container) for binding in bindings):
                        yield Route((), fresh, "variable", name, scope=outer, container=container)
                    return

    def _may_tell(self, binding: Binding, container: bool) -> bool:
        """Whether it is worth looking for the frame that has this binding."""
        if binding.kind == "value" and binding.value is not None:
            return any(self._assigned(binding, binding.value, container, False, 0))
        return binding.kind != "other"

    # -- results ------------------------------------------------------------------------------------------------------

    def _named_after(self, call: ast.expr) -> Iterator[Route]:
        """By the name under which the program stores the result, or that it passes on beside it."""
        yield from self._stored(call, call)
        for around in self.file.around(call):
            if isinstance(around, Function) or not isinstance(around, ast.expr):
                break
            if isinstance(around, ast.Call) and call is not around.func:
                yield from self._logged(around, call)
        carriers = frozenset(argument_names(call)) | frozenset(self._assigned_to(call))
        loop = self._loop_around(call)
        for node in ast.walk(loop if loop is not None else self.file.scope_of(call)) if carriers else ():
            if isinstance(node, ast.Assign) and mentions(node.value, carriers):
                yield from self._stored(node.value, call)
            elif isinstance(node, ast.Call) and node is not call and any(mentions(arg, carriers) for arg in node.args):
                yield from self._logged(node, call)

    def _assigned_to(self, call: ast.expr) -> Iterator[str]:
        statement = next((around for around in self.file.around(call) if not isinstance(around, ast.expr)), None)
        if isinstance(statement, ast.Assign):
            yield from (target.id for target in statement.targets if isinstance(target, ast.Name))

    def _stored(self, value: ast.expr, call: ast.expr) -> Iterator[Route]:
        for around in self.file.around(value):
            if isinstance(around, ast.DictComp):
                yield Route((Step((around.key,), None, None, around),), fresh=True)
            elif not isinstance(around, ast.expr):
                break
        else:
            return
        for target in around.targets if isinstance(around, ast.Assign) else ():
            if isinstance(target, ast.Subscript) and not isinstance(target.slice, ast.Slice):
                yield Route((Step((target.slice,), None, None, self._loop_around(call)),), fresh=True)

    def _logged(self, logging: ast.Call, call: ast.expr) -> Iterator[Route]:
        """``writer.add_scalar("loss", result, step)``"""
        first = logging.args[0] if logging.args else None
        if isinstance(first, (ast.Constant, ast.JoinedStr, ast.Name)) and len(logging.args) > 1:
            yield Route((Step((first,), None, None, self._loop_around(call)),), fresh=True, is_beside=True)

    def _taken(self, key: ast.expr, container: ast.expr) -> Step:
        """One element by its key: a single look-up where neither a loop nor a caller chose it, nor the text itself."""
        loop = self._loop_of(key)
        return Step((key,), None, container, loop, self._chooser(key, loop))

    def _chooser(self, key: ast.expr, loop: ast.AST | None) -> Chooser:
        """What sets the variables of a key, or of what it is a part of."""
        if isinstance(key, ast.Constant):
            return "loop"
        if isinstance(loop, (*Loop, ast.While)):
            walked = [binding.value for binding in self._bindings_in(key) if binding.loop is loop]
            if not walked and isinstance(loop, (ast.For, ast.AsyncFor)):
                walked = [loop.iter]
            return "sorted" if any(map(self._is_sorted, walked)) else "loop"
        return "caller" if self._is_given(key) else ""

    def _is_sorted(self, walked: ast.expr | None) -> bool:
        """Whether what a loop walks was sorted, there or where the variables were set that it came from."""
        for _ in range(_MAX_HOPS):
            walked = ordered_by(walked)
            if not isinstance(walked, ast.Name):
                break
            binding = self._binding_of(walked.id, walked)
            walked = binding.value if binding is not None and binding.kind == "value" else None
        return sorts(walked)

    def _is_given(self, key: ast.expr) -> bool:
        """Whether a parameter is part of the key."""
        return any(binding.kind == "parameter" for binding in self._bindings_in(key))

    # -- loops --------------------------------------------------------------------------------------------------------

    def _loop_of(self, key: ast.expr) -> ast.AST | None:
        """The loop that sets the variables of a key; None where none does."""
        for binding in self._bindings_in(key):
            if binding.kind == "loop":
                return binding.loop
            if binding.kind == "value" and binding.name is not None:
                around = self._loop_around(binding.name)
                if around is not None:
                    return around
        return None

    def _bindings_in(self, key: ast.expr) -> Iterator[Binding]:
        """Those of the variables in a key."""
        for name in names_in(key):
            binding = self._binding_of(name.id, name)
            if binding is not None:
                yield binding

    def _binding_of(self, name: str, at: ast.expr) -> Binding | None:
        return nearest(self._bindings_of(self.file.scope_of(at)), name, at, self.file)

    def _loop_around(self, node: ast.AST) -> ast.AST | None:
        for around in self.file.around(node):
            if isinstance(around, (*Loop, ast.While)):
                return around
            if isinstance(around, Function):
                return None
        return None

    def _bindings_of(self, scope: ast.AST) -> Bindings:
        found = self._bindings.get(scope)
        if found is None:
            found = self._bindings[scope] = bindings_of(scope)
        return found

    # -- functions that others call -----------------------------------------------------------------------------------

    def _of_consumed(self, call: ast.Call) -> Iterator[Route]:
        """``map(reduce, stats.values())``: what was passed is an element of one of the other arguments."""
        for node in ast.walk(call):
            if isinstance(node, ast.Call):
                for argument in node.args:
                    source = unwrapped(argument)
                    if isinstance(source, (ast.Name, ast.Attribute)):
                        yield from self._out(Step((), None, source, node), False, 0)


# -- the text alone ---------------------------------------------------------------------------------------------------


def _parts(expr: ast.expr) -> list[ast.expr]:
    if isinstance(expr, ast.BinOp):
        return [expr.left, expr.right]
    if isinstance(expr, ast.UnaryOp):
        return [expr.operand]
    if isinstance(expr, ast.IfExp):
        return [expr.body, expr.orelse]
    if isinstance(expr, (ast.List, ast.Tuple, ast.Set)):
        return list(expr.elts)
    if isinstance(expr, ast.BoolOp):
        return list(expr.values)
    return []


def _root(expr: ast.expr) -> str:
    while isinstance(expr, (ast.Attribute, ast.Subscript, ast.Call)):
        expr = expr.func if isinstance(expr, ast.Call) else expr.value
    return expr.id if isinstance(expr, ast.Name) else ""


def _is_key_tuple(index: ast.expr) -> bool:
    """Whether a tuple between brackets may be a key, and is no indexing of a tensor."""
    return isinstance(index, ast.Tuple) and all(isinstance(part, (ast.Name, ast.Attribute)) for part in index.elts)
