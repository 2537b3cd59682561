"""Follow the routes of a collective's tensor through the frames that called it, and read its label off them.

1. Values are read off frames and objects without running any code of the program's: no property, ``__getitem__``,
   ``__eq__``, ``__iter__`` or ``repr`` of a user's class is called. Attributes come out of instance dictionaries, items
   out of dicts by the methods of dict, and only objects of exactly known types are taken for keys.
2. `call_routes`: what the text says of one call (`trace`), worked out once for each call site.
3. `infer`: follows the routes, and returns one `Inferred` label for all equal calls.
"""

from __future__ import annotations

import ast
import enum
import itertools
import logging
import operator
import re
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import CodeType, FrameType, GetSetDescriptorType, MemberDescriptorType
from typing import Any

from ddpstats._base.caches import EmptiedCache
from ddpstats._observe.frames import user_frame
from ddpstats.guard.event import Evidence
from ddpstats.guard.labels.source import COMPREHENSION_NAMES, SourceFile, call_of, mentions
from ddpstats.guard.labels.trace import KeyStep, LabelTracer, Route, Use, use_of

MISSING: Any = object()
_MAX_SEARCHED = 4096
_MAX_KEY_PARTS = 4
_MAX_CHARS = 200
_MAX_FRAMES = 60
_MAX_KEPT = 4096
_MAX_TRACERS = 256
_MAX_NAMES = 1 << 16  # in all containers that are kept
_MAX_EVIDENCE_NAMES = 256
_SNAPSHOTS = sys.version_info < (3, 13)
_OWN_REFERENCES = 3  # the frame's, the variable of the caller, and `getrefcount`'s own
_CO_OPTIMIZED = 0x1
_LOOKERS = frozenset({"locals", "eval", "exec"})  # functions that use them see the copy that a look at them makes
_KINDS_OF_VARIABLES = (dict, type((lambda: sys._getframe().f_locals)()))  # from 3.13 on a view
_WRAPPERS = re.compile(
    r"(?:^|(?<=\.))(?:module|_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module|_forward_module)\."
)
_HAS_LETTER = re.compile(r"[^\W_]")
_META_CODE = frozenset({"__eq__", "__hash__", "__getattribute__", "__dict__", "__name__"})
_mro_of: Callable[[type], tuple[type, ...]] = type.__dict__["__mro__"].__get__

log = logging.getLogger("ddpstats")


# -- classes and attributes -------------------------------------------------------------------------------------------


def kind_of(value: Any) -> type:
    """Return the class of a value; ``object`` where a look at the class would run code of its metaclass."""
    kind = type(value)
    meta = type(kind)
    if meta is type:
        return kind
    is_plain = type(meta) is type and not any(_META_CODE & base.__dict__.keys() for base in _mro_of(meta)[:-2])
    return kind if is_plain else object


def attribute_of(owner: Any, name: str) -> Any:
    """Return an attribute that the instance or a slot holds; never a property's value."""
    attributes = attributes_of(owner)
    if name in attributes:
        return attributes[name]
    slot = next((kind.__dict__[name] for kind in _mro_of(kind_of(owner)) if name in kind.__dict__), None)
    try:
        return slot.__get__(owner) if type(slot) is MemberDescriptorType else MISSING
    except AttributeError:  # an empty slot
        return MISSING


def attributes_of(owner: Any) -> dict[str, Any]:
    """Return the instance's own ``__dict__``, however its class treats attributes; empty where it has none."""
    for kind in _mro_of(kind_of(owner)):
        descriptor = kind.__dict__.get("__dict__")
        if type(descriptor) is GetSetDescriptorType:
            value = descriptor.__get__(owner)
            return value if type(value) is dict else {}
    return {}


# -- variables --------------------------------------------------------------------------------------------------------


class Variables:
    """The variables of one activation: of a function's frame, and of the comprehensions that run inside of it.

    Before Python 3.13 reading a frame's variables makes a copy of them that the frame keeps, and that would keep
    tensors alive for longer than the program means to: `give_back` empties it. Code that was executed may have other
    variables than a dict: they are not read.
    """

    def __init__(self, frames: Sequence[FrameType]) -> None:
        self._globals = frames[-1].f_globals
        self._read: list[tuple[FrameType, Any]] = []
        for frame in frames:
            variables = frame.f_locals
            if type(variables) in _KINDS_OF_VARIABLES:
                self._read.append((frame, variables))

    def value(self, expr: ast.expr) -> Any:
        """Return the value of an expression, or `MISSING` where that takes code of the program's."""
        if isinstance(expr, ast.Name):
            for _, variables in self._read:
                if expr.id in variables:
                    return variables[expr.id]
            return dict.get(self._globals, expr.id, MISSING)
        if isinstance(expr, ast.Constant):
            return expr.value
        if isinstance(expr, ast.Attribute):
            return attribute_of(self.value(expr.value), expr.attr)
        if isinstance(expr, ast.Subscript):
            container, key = self.value(expr.value), self.value(expr.slice)
            kind = kind_of(container)
            if kind in (list, tuple) and type(key) is int:
                return container[key] if -len(container) <= key < len(container) else MISSING
            is_plain = kind in (dict, OrderedDict) and kind_of(key) in (str, int)
            return dict.get(container, key, MISSING) if is_plain else MISSING
        if isinstance(expr, ast.JoinedStr):
            parts = [self.value(part.value if isinstance(part, ast.FormattedValue) else part) for part in expr.values]
            return "".join(map(str, parts)) if all(kind_of(part) in (str, int) for part in parts) else MISSING
        if isinstance(expr, ast.BinOp) and isinstance(expr.op, ast.Add):
            left, right = self.value(expr.left), self.value(expr.right)
            return left + right if type(left) is type(right) is str else MISSING
        if isinstance(expr, ast.Tuple):
            return tuple(map(self.value, expr.elts))
        return MISSING

    def give_back(self) -> None:
        """Empty the copies. Nothing may be read afterwards."""
        while _SNAPSHOTS and self._read:
            frame, variables = self._read.pop()
            # Not the module's own dict, and not a copy that the program holds.
            if frame.f_code.co_flags & _CO_OPTIMIZED and sys.getrefcount(variables) <= _OWN_REFERENCES:
                variables.clear()


# -- keys -------------------------------------------------------------------------------------------------------------


def key_text(value: Any) -> str | None:
    """Return the text of a key that names something: a str, an enum member, a tuple or dataclass of such parts.

    Without what wrappers of a model put before the names of its parameters. None for other keys.
    """
    if type(value) is str:
        text = _WRAPPERS.sub("", value) if "." in value else value
        return text[:_MAX_CHARS] if text[:1].isalnum() or _HAS_LETTER.search(text) else None  # "_" names nothing
    kind = kind_of(value)
    bases = _mro_of(kind)
    is_dataclass = "__dataclass_fields__" in kind.__dict__
    if tuple in bases or is_dataclass:
        parts = attributes_of(value).values() if is_dataclass else tuple.__iter__(value)
        some = itertools.islice(parts, _MAX_KEY_PARTS)
        named = [name for part in some if (name := str(part) if type(part) is int else key_text(part))]
        return ",".join(named) if any(not name.isdigit() for name in named) else None
    if enum.EnumMeta in _mro_of(type(kind)):
        name = attributes_of(value).get("_name_")
        return f"{kind.__name__}.{name}" if type(name) is str else None
    return key_text(str.__str__(value)) if str in bases else None  # str's own, whatever the subclass defines


def _texts(keys: Iterable[Any]) -> tuple[str, ...]:
    return tuple([text for key in itertools.islice(keys, _MAX_SEARCHED) if (text := _text_in_dict(key)) is not None])


def _text_in_dict(key: Any) -> str | None:
    return f"[{key}]" if kind_of(key) in (int, float) else key_text(key)


# -- containers -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Siblings:
    """The names in a container, in its order, and the container's class. ``aliases``: of tensors with several names."""

    names: tuple[str, ...] = ()
    source: str = ""
    aliases: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


_NO_SIBLINGS = Siblings()
_kept_siblings: EmptiedCache[tuple[Any, ...], Siblings] = EmptiedCache(_MAX_KEPT, _MAX_NAMES)


class LastContainer:
    """The names of the container that a step used last; a program walks the same container again and again.

    They are read again where the container is another object or has another size, and at its first name, where the next
    walk begins, if it has other keys by then, or a tensor under two of them.
    """

    def __init__(self) -> None:
        # One tuple, for several threads may be at this place: id, size, siblings, all names but the first.
        self._last: tuple[int, int, Siblings, frozenset[str]] = 0, 0, _NO_SIBLINGS, frozenset()

    def siblings(self, name: str, container: Any) -> Siblings:
        """Return the names beside ``name``."""
        if container is MISSING:
            return _NO_SIBLINGS
        size = len(container) if type(container) is dict else _size_of(container)
        last_id, last_size, siblings, later = self._last
        is_same = last_id == id(container) and last_size == size
        if not is_same or (name not in later and not _has_still(container, siblings)):
            siblings = _siblings_in(container)
            self._last = id(container), size, siblings, frozenset(siblings.names[1:])
        return siblings


def _has_still(container: Any, siblings: Siblings) -> bool:
    """Return whether it is a dict whose keys are these very names, and none of its values has two of them."""
    is_plain = type(container) is dict and siblings.source == "dict" and not siblings.aliases
    is_same = is_plain and len(container) == len(siblings.names) and all(map(operator.is_, container, siblings.names))
    return is_same and len({*map(id, container.values())}) == len(container)


def is_dict(container: Any) -> bool:
    return type(container) is dict or dict in _mro_of(kind_of(container))


def _size_of(container: Any) -> int:
    if is_dict(container):
        return dict.__len__(container)
    return len(container if kind_of(container) in (list, tuple) else attributes_of(container))


def _siblings_in(container: Any) -> Siblings:
    kind = kind_of(container)
    source, names, aliases = kind.__name__, tuple[str, ...](), dict[str, tuple[str, ...]]()
    if is_dict(container):
        names, aliases = _texts(dict.__iter__(container)), _aliases_in(container)
    elif kind in (list, tuple):  # of names, or of pairs that begin with them
        names = _texts(part[0] if type(part) is tuple and part else part for part in container[:_MAX_SEARCHED])
    elif "_parameters" in attributes_of(container):
        source, names = "Module", tuple(_parameter_names(container))
    else:
        fields = kind.__dict__.get("_fields")  # of a namedtuple
        names = _texts(fields if type(fields) is tuple else attributes_of(container))
    key = names, source, *aliases.items()
    return _kept_siblings.get(key) or _kept_siblings.keep(key, Siblings(names, source, aliases), len(names))


def _aliases_in(entries: Any) -> dict[str, tuple[str, ...]]:
    """Return the names of tensors that a dict holds under several: tied weights."""
    pairs_of: dict[int, list[tuple[Any, Any]]] = {}
    for pair in itertools.islice(dict.items(entries), _MAX_SEARCHED):
        pairs_of.setdefault(id(pair[1]), []).append(pair)
    tied = [pairs for pairs in pairs_of.values() if len(pairs) > 1]
    tensors = [pairs for pairs in tied if kind_of(pairs[0][1]).__name__ in ("Tensor", "Parameter")]
    names = [_texts(key for key, _ in pairs) for pairs in tensors]
    return {name: of_tensor for of_tensor in names for name in of_tensor}


def _parameter_names(module: Any, prefix: str = "", depth: int = 0) -> Iterator[str]:
    """Yield the names of a torch.nn.Module's parameters and buffers, read from its tables."""
    tables = [attributes_of(module).get(name, {}) for name in ("_parameters", "_buffers", "_modules")]
    if depth > 20 or not all(kind_of(table) in (dict, OrderedDict) for table in tables):
        return
    parameters, buffers, modules = tables
    yield from (f"{prefix}{name}" for name in (*parameters, *buffers) if type(name) is str)
    for name, part in modules.items():
        if type(name) is str:
            yield from _parameter_names(part, f"{prefix}{name}.", depth + 1)


# -- what the text says of a call -------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class CallRoutes:
    """The routes of one call in one function. ``node``: the call; None where the source is not to be had.

    ``owner``: the function's code where ``code`` is that of a comprehension in it; both are kept alive, as the call is
    known by the id of its code. ``is_wrapper``: the call passes on what its function was given, as a decorator's does.
    """

    code: CodeType
    owner: CodeType
    file: SourceFile | None = None
    node: ast.expr | None = None
    routes: tuple[Route, ...] = ()
    is_wrapper: bool = False

    @cached_property
    def chain(self) -> Chain:
        """The chain of this call alone, which issues a collective."""
        return Chain((self,))

    @cached_property
    def walk(self) -> DictWalk | None:
        """The walk over a dict that names the tensor; None where the first route is another one, or goes on."""
        route = self.routes[0] if self.routes else Route()
        is_plain = self.code.co_flags & _CO_OPTIMIZED and self.code.co_name not in COMPREHENSION_NAMES
        return DictWalk(route) if is_plain and len(route.variables) == 2 and not route.parameter else None


class DictWalk:
    """The labels of a call in a loop over a dict: while the dict has the same keys, the key alone decides.

    ``labels``: by key, those that were inferred and have only the name that this walk gives (``steps``).
    """

    def __init__(self, route: Route) -> None:
        self._key, self._container = route.variables
        self.steps = ((route.steps[0], 0),)
        self.labels: EmptiedCache[str, Inferred] = EmptiedCache(_MAX_KEPT)

    def label(self, frame: FrameType) -> Inferred | None:
        """Return the label; None where it was not inferred yet for this key and the same keys beside it."""
        values = frame.f_locals
        key, container = values.get(self._key), values.get(self._container, dict.get(frame.f_globals, self._container))
        if _SNAPSHOTS and sys.getrefcount(values) <= _OWN_REFERENCES:
            values.clear()
        label = self.labels.get(key) if type(key) is str and type(container) is dict else None
        if label is None or label.chain.containers[0].siblings(label.keys[0], container) is not label.levels[0]:
            return None
        return label


_call_routes: EmptiedCache[tuple[int, int, Route | None, bool], CallRoutes] = EmptiedCache(_MAX_KEPT)
_tracers: EmptiedCache[SourceFile, LabelTracer] = EmptiedCache(_MAX_TRACERS)


def call_routes(frame: FrameType, route: Route | None, callee: CodeType, is_functional: bool = False) -> CallRoutes:
    """Return the routes at the call that a frame is executing: of the collective's tensor, or of what ``route`` needs.

    ``callee``: the function that ``route`` left by its parameter.
    """
    key = id(frame.f_code), frame.f_lasti, route, is_functional
    return _call_routes.get(key) or _call_routes.keep(key, _trace_call(frame, route, callee, is_functional))


def _trace_call(frame: FrameType, route: Route | None, callee: CodeType, is_functional: bool) -> CallRoutes:
    owner, call = activation(frame)[-1].f_code, call_of(frame)
    if call is None or (owner.co_flags & _CO_OPTIMIZED and mentions(call[0].scope_of(call[1]), _LOOKERS)):
        return CallRoutes(frame.f_code, owner)
    file, node = call
    tracer = _tracers.get(file) or _tracers.keep(file, LabelTracer(file))
    routes = tracer.of_argument(node, is_functional) if route is None else tracer.of_parameter(node, callee, route)
    is_wrapper = not routes and any(isinstance(argument, ast.Starred) for argument in getattr(node, "args", ()))
    return CallRoutes(frame.f_code, owner, file, node, routes, is_wrapper)


def activation(frame: FrameType) -> tuple[FrameType, ...]:
    """Return the frames of one activation: comprehensions, which have their own before 3.12, and their owner."""
    frames, owner = [frame], frame.f_back
    while frames[-1].f_code.co_name in COMPREHENSION_NAMES and owner is not None and len(frames) < _MAX_FRAMES:
        if frames[-1].f_code in owner.f_code.co_consts:
            frames.append(owner)
        owner = owner.f_back
    return tuple(frames)


# -- labels -----------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Chain:
    """The calls and steps of a route as far as it was followed; one object for each such way.

    ``calls``: from the collective outwards. ``steps``: those that gave a name, innermost first, and the index of the
    call of each. ``is_fresh``: what is overwritten is not the innermost element itself, nor an attribute of it.
    ``containers``: what each step took its name from last.
    """

    calls: tuple[CallRoutes, ...]
    steps: tuple[tuple[KeyStep, int], ...] = ()
    is_fresh: bool = False
    containers: tuple[LastContainer, ...] = ()

    def with_call(self, call: CallRoutes, route: Route) -> Chain:
        """Return the chain that ``route`` leads to: out of its function, to ``call``."""
        is_fresh = self.is_fresh or (route.fresh and not self.steps)
        return _chains.keep((self, call), Chain((*self.calls, call), self.steps, is_fresh, self.containers))

    def with_step(self, step: KeyStep, route: Route) -> Chain:
        """Return the chain whose last name a ``step`` of the route gives."""
        steps, is_fresh = (*self.steps, (step, len(self.calls) - 1)), self.is_fresh or (route.fresh and not self.steps)
        return _chains.keep((self, step), Chain(self.calls, steps, is_fresh, (*self.containers, LastContainer())))

    @cached_property
    def uses(self) -> list[Use]:
        """Return what the program does with the results of the loop that set each name."""
        calls = [(call.file, call.node, call.owner) for call in self.calls]
        return [use_of(step, calls[: index + 1], not self.is_fresh) for step, index in self.steps]


@dataclass(eq=False)
class Inferred:
    """A label; one object for all equal calls.

    ``keys``: the names in it, innermost first. ``levels``: of each, the names in its container.
    """

    keys: tuple[str, ...]
    levels: tuple[Siblings, ...]
    chain: Chain

    @cached_property
    def path(self) -> str:
        return "/".join(reversed(self.keys))[:_MAX_CHARS]

    @cached_property
    def evidence(self) -> Evidence:
        """Return the evidence for the innermost name, which leads to that of the outer ones. Slow: for differences."""
        evidence: Evidence | None = None
        levels = zip(self.keys, self.levels, self.chain.steps, self.chain.uses, strict=True)
        for key, siblings, (step, _), use in reversed(list(levels)):
            names, aliases = siblings.names[:_MAX_EVIDENCE_NAMES], siblings.aliases.get(key, ())
            set_by = "text" if step.loop is None else "loop"
            evidence = Evidence(key, names, siblings.source, use, aliases, set_by, evidence)
        assert evidence is not None
        return evidence


_chains: EmptiedCache[tuple[Chain, CallRoutes | KeyStep], Chain] = EmptiedCache(_MAX_KEPT)  # one call or step longer
_labels: EmptiedCache[tuple[Any, ...], Inferred] = EmptiedCache(_MAX_KEPT)
# A route as far as it was followed: the names that it came to, innermost first, and the container of each.
_FollowedRoute = tuple[Chain, tuple[str, ...], tuple[Any, ...]]


def infer(frame: FrameType, is_functional: bool = False) -> Inferred | None:
    """Return the label of the tensor that ``frame`` calls a collective with; None where the text gives it no name.

    ``is_functional``: the collective returns a new tensor, and overwrites none.
    """
    try:
        call = call_routes(frame, None, frame.f_code, is_functional)
        walk = call.walk
        label = None if walk is None else walk.label(frame)
        if label is not None:
            return label
        path = _follow((call.chain, (), ()), frame) if call.routes else None
        if path is None:
            return None
        chain, keys, containers = path
        levels = tuple(map(LastContainer.siblings, chain.containers, keys, containers))
        label = _labels.get(known_by := (chain, keys, levels)) or _labels.keep(known_by, Inferred(keys, levels, chain))
        if walk is not None and chain.steps == walk.steps:
            walk.labels.keep(keys[0], label)
        return label
    except RecursionError:  # the program's own stack is nearly used up: nothing is left for a message either
        return None
    except Exception:  # whatever is odd about a program, its collective runs
        log.debug("no label could be inferred", exc_info=True)
        return None


def _follow(before: _FollowedRoute, frame: FrameType) -> _FollowedRoute | None:
    """Follow the routes of the path's last call, and those of its callers; None where no route comes to a name."""
    frames = activation(frame) if frame.f_code.co_name in COMPREHENSION_NAMES else (frame,)
    for route in before[0].calls[-1].routes if len(before[0].calls) <= _MAX_FRAMES else ():
        chain, keys, containers = before
        for step, name, container in _names_along(route, frames) if route.steps else ():
            chain = _chains.get((chain, step)) or chain.with_step(step, route)
            keys, containers = (*keys, name), (*containers, container)
        further = _leave(route, frames[-1], (chain, keys, containers)) if route.parameter else None
        if further is not None and len(further[1]) > len(keys):
            return further
        if keys:  # what gives no further name is no part of the chain: the label is one object for all callers
            return chain, keys, containers
    return None


def _names_along(route: Route, frames: Sequence[FrameType]) -> list[tuple[KeyStep, str, Any]]:
    """Return the steps that give a name, with the name and the container."""
    variables, names = Variables(frames), list[tuple[KeyStep, str, Any]]()
    try:
        for step in route.steps:
            container = MISSING if step.container is None else variables.value(step.container)
            name = _name_of(step, variables, container)
            if name is not None:
                names.append((step, name, container))
    finally:
        variables.give_back()
    return names


def _name_of(step: KeyStep, variables: Variables, container: Any) -> str | None:
    """Return the name that a step gives, if any."""
    text: str | None = None
    key: Any = MISSING
    for name in step.names:
        value = variables.value(name)
        part = key_text(value)
        if part is not None:
            text = part if text is None or text == part else f"{text},{part}"
        elif kind_of(value) in (int, float):
            key = value
    if text is None and step.element is not None:
        element = variables.value(step.element)
        if type(element) is str or not is_dict(container):
            text = key_text(element)
        else:
            pairs = itertools.islice(dict.items(container), _MAX_SEARCHED)
            key = next((key for key, value in pairs if value is element), key)
    return _text_in_dict(key) if text is None and is_dict(container) else text


def _leave(route: Route, frame: FrameType, path: _FollowedRoute) -> _FollowedRoute | None:
    """Go on in the frame of the caller."""
    chain, keys, containers = path
    outer = user_frame(frame.f_back)
    while outer is not None:
        call = call_routes(outer, route, chain.calls[-1].owner)
        if call.routes:
            return _follow((_chains.get((chain, call)) or chain.with_call(call, route), keys, containers), outer)
        outer = user_frame(outer.f_back) if call.is_wrapper else None
    return None
