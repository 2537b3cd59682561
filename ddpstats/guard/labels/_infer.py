"""The label of a collective: the routes of its tensor, followed through the frames that called it.

What the text tells is worked out once for each place (a code object and an instruction), and kept. A call then reads
the few variables that its place names; where the text has no key, it costs a look into a dict for each frame.
"""

from __future__ import annotations

import ast
import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Any

from ddpstats._events import Evidence
from ddpstats.guard import _frames
from ddpstats.guard.labels._fate import Fate, Turn, fate_of
from ddpstats.guard.labels._reading import (
    MISSING,
    PLAIN_DICTS,
    Reader,
    Variables,
    entries_of,
    is_module,
    key_by_identity,
    key_text,
    names_in,
    parameter_names,
    reader_of,
)
from ddpstats.guard.labels._source import Function, SourceFile, node_at
from ddpstats.guard.labels._spelled import Spelled, spells
from ddpstats.guard.labels._trace import Route, Step, Tracer, argument_names, names_passed

_MAX_FRAMES = 60
_MAX_PLACES = 8192
_MAX_LABEL_CHARS = 200
_MAX_SIBLINGS = 256
_COMPREHENSIONS = frozenset({"<listcomp>", "<dictcomp>", "<setcomp>", "<genexpr>"})
# Functions of this name reduce stats under their keys: espnet's, detectron2's, DETR's, and copies of them.
REDUCES_NAMED = frozenset(
    {
        *("recursive_sum", "recursive_average", "reduce_dict", "reduce_loss_dict", "reduce_losses", "reduce_metrics"),
        *("all_reduce_dict", "average_dict", "reduce_stats", "sync_stats", "reduce_tree"),
    }
)

log = logging.getLogger("ddpstats")


# -- places -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class ReadyStep:
    """A step whose expressions are compiled to readers."""

    step: Step
    names: tuple[Reader, ...]
    element: Reader | None
    container: Reader | None


@dataclass(frozen=True, eq=False)
class Asked:
    """A route that left the function with the code ``callee``, and goes on where that was called."""

    callee: CodeType
    route: Route


@dataclass(frozen=True, eq=False)
class ReadyRoute:
    asked: Asked
    steps: tuple[ReadyStep, ...]


@dataclass(frozen=True, eq=False)
class Place:
    """What the text tells of one call in one function. ``node``: the call; None where the source is not to be had.

    ``owner``: the function's code where ``code`` is that of a comprehension in it.
    """

    code: CodeType
    owner: CodeType
    asked: Asked | None
    file: SourceFile | None
    node: ast.expr | None
    routes: tuple[ReadyRoute, ...]


@dataclass(eq=False)
class Chain:
    """The places that a label was found through, from the collective outwards; one object for each such chain.

    ``step`` is that of the innermost name, in ``places[at]``. ``is_muted``: its names are each rank's own.
    """

    places: tuple[Place, ...]
    step: Step
    fresh: bool
    at: int
    is_known: bool
    is_muted: bool = False
    siblings: tuple[tuple[int, int, Any], dict[str, bool], tuple[str, ...]] = ((0, 0, None), {}, ())
    fate: Fate | None = None  # once asked for
    spelled: dict[str, Spelled] = field(default_factory=dict)


@dataclass(eq=False, slots=True)
class Inferred:
    """A label that was found. ``siblings``: the names in the container that the innermost name is from, in its order.

    ``source``: the class of that container. ``beside``: the name was only passed beside the tensor.
    """

    path: str
    key: str
    siblings: tuple[str, ...]
    source: str
    chain: Chain
    beside: bool = False


# By ids; what they stand for is kept alive by the place. (The hash of a code object goes over all of its constants.)
_places: dict[tuple[int, int, int], Place] = {}
_tracers: dict[int, tuple[SourceFile, Tracer]] = {}
_chains: dict[tuple[int, ...], Chain] = {}


def _tracer_of(file: SourceFile) -> Tracer:
    found = _tracers.get(id(file))
    if found is None or found[0] is not file:
        found = _tracers[id(file)] = file, Tracer(file)
    return found[1]


def _place(frames: tuple[FrameType, ...], asked: Asked | None) -> Place:
    """The place that an activation is at; ``asked``: whose route left to it, None for the collective itself."""
    frame = frames[0]
    key = id(frame.f_code), frame.f_lasti, id(asked)
    place = _places.get(key)
    if place is None or place.code is not frame.f_code:
        if len(_places) >= _MAX_PLACES:
            _places.clear()
            _chains.clear()
        place = _places[key] = _find_place(frames, asked)
    return place


def _find_place(frames: tuple[FrameType, ...], asked: Asked | None) -> Place:
    frame, owner = frames[0], frames[-1].f_code
    found = node_at(frame)
    if found is None:
        return Place(frame.f_code, owner, asked, None, None, ())
    file, node = found
    tracer = _tracer_of(file)
    if asked is None:
        routes = tracer.of_argument(node)
    elif asked.route.leaves == "variable":
        routes = tracer.of_variable(asked.route.name, node, asked.route.container)
    else:
        routes = tracer.of_parameter(node, asked.callee, asked.route)
    return Place(frame.f_code, owner, asked, file, node, tuple(_ready(owner, route) for route in routes))


def _ready(code: CodeType, route: Route) -> ReadyRoute:
    steps = []
    for step in route.steps:
        element = None if step.element is None else reader_of(step.element)
        container = None if step.container is None else reader_of(step.container)
        steps.append(ReadyStep(step, tuple(map(reader_of, step.names)), element, container))
    return ReadyRoute(Asked(code, route), tuple(steps))


# -- following a route ------------------------------------------------------------------------------------------------


@dataclass
class _Found:
    """Keys from the tensor outwards, and where the innermost name was found."""

    keys: list[str] = field(default_factory=list)
    places: list[Place] = field(default_factory=list)
    step: Step | None = None
    at: int = 0
    fresh: bool = False
    container: Any = MISSING
    key: str = ""
    beside: bool = False
    is_known: bool = False

    def copy(self, place: Place) -> _Found:
        """To go on with, in ``place``: other routes begin where this one did."""
        return _Found(
            [*self.keys], [*self.places, place], self.step, self.at, self.fresh, self.container, self.key, self.beside,
            self.is_known,
        )  # fmt: skip


Passed = tuple[FrameType | None, Any]
"""What was passed: a function's frame and the name of its parameter; or None and the value."""

_BESIDE = Step((), None, None)


def infer(tensor: Any, frame: FrameType) -> Inferred | None:
    """The label of ``tensor`` in the collective that ``frame`` is calling; None where the text gives it no name."""
    try:
        frames = _activation(frame)
        found = _follow(frames, None, (None, tensor), _Found(), 0)
        if found is None and _place(frames, None).file is None:
            found = _without_source(tensor, frames)
    except Exception:  # whatever is odd about a program, its collective runs
        log.debug("no label could be inferred", exc_info=True)
        return None
    return None if found is None or found.step is None else _inferred(found)


def _activation(frame: FrameType) -> tuple[FrameType, ...]:
    """The frames of one activation: comprehensions, which have frames of their own before 3.12, and their owner."""
    if frame.f_code.co_name not in _COMPREHENSIONS:
        return (frame,)
    frames, owner = [frame], frame.f_back
    for _ in range(_MAX_FRAMES):
        if owner is None:
            break
        if frames[-1].f_code in owner.f_code.co_consts:
            frames.append(owner)
            if owner.f_code.co_name not in _COMPREHENSIONS:
                break
        owner = owner.f_back
    return tuple(frames)


def _follow(
    frames: tuple[FrameType, ...], asked: Asked | None, passed: Passed | None, found: _Found, depth: int
) -> _Found | None:
    """Follow the routes of one activation, and those of its callers; None where none comes to a name."""
    place = _place(frames, asked)
    best = found if found.step is not None else None
    if depth > _MAX_FRAMES:
        return best
    for ready in place.routes:
        taken = _take(ready, place, frames, passed, found, depth)
        if taken is None:
            continue
        if not taken.beside:
            return taken
        best = best or taken
    return best


def _take(
    ready: ReadyRoute, place: Place, frames: tuple[FrameType, ...], passed: Passed | None, before: _Found, depth: int
) -> _Found | None:
    route = ready.asked.route
    now = before.copy(place)
    now.fresh = before.fresh or (before.step is None and route.fresh)
    now.is_known = before.is_known or frames[-1].f_code.co_name in REDUCES_NAMED
    if ready.steps:
        variables = Variables(frames)
        try:
            for step in ready.steps:
                _read(step, variables, passed, now)
        finally:
            variables.give_back()
    if not route.leaves:
        return now if now.step is not None else None
    return _leave(ready.asked, frames[-1], now, depth)


def _read(ready: ReadyStep, variables: Variables, passed: Passed | None, found: _Found) -> None:
    """Take one step: its key joins the path."""
    container: Any = MISSING
    text: str | None = None
    number: int | None = None
    for reader in ready.names:
        value = reader(variables)
        part = key_text(value)
        if part is not None:
            text = part if text is None or text == part else f"{text},{part}"
        elif type(value) is int and number is None:
            number = value
    if text is None and ready.container is not None:
        wanted = _value_of(passed) if ready.element is None else ready.element(variables)
        container = ready.container(variables)
        key = MISSING if wanted is MISSING or container is MISSING else key_by_identity(container, wanted)
        text, number = key_text(key), key if type(key) is int else number
    if text is None and number is not None and ready.container is not None:
        container = ready.container(variables) if container is MISSING else container
        text = f"[{number}]" if entries_of(container) is not None else None  # a dict's key, and no place in a list
    if text is None and number is None:
        return
    found.keys.append(f"[{number}]" if text is None else text)
    if text is not None and found.step is None:
        found.step, found.at, found.key = ready.step, len(found.places) - 1, text
        if container is MISSING and ready.container is not None:
            container = ready.container(variables)
        found.container = container


def _leave(asked: Asked, owner: FrameType, found: _Found, depth: int) -> _Found | None:
    """Go on in the caller, or in the enclosing function."""
    route = asked.route
    passed: Passed | None = None
    if route.leaves == "variable":
        outer = _frame_of_scope(owner, route)
    else:
        outer = _frames.user_frame(owner.f_back)
        passed = (owner, route.name) if route.leaves == "parameter" else None
        if found.fresh and found.step is None and not route.container:
            text = key_text(_value_of(passed))
            if text is not None:  # the tensor was made from a name that the caller chose
                found.keys.append(text)
                found.step, found.at, found.key, found.beside = _BESIDE, len(found.places) - 1, text, True
                return found
    if outer is not None:
        further = _follow(_activation(outer), asked, passed, found, depth + 1)
        if further is not None:
            return further
    return found if found.step is not None else None


def _value_of(passed: Passed | None) -> Any:
    """The value of a parameter now."""
    if passed is None:
        return MISSING
    frame, name = passed
    if frame is None:
        return name
    variables = Variables((frame,))
    try:
        return variables.get(name)
    finally:
        variables.give_back()


def _without_source(tensor: Any, frames: tuple[FrameType, ...]) -> _Found | None:
    """The key of a dict of the frame that has this very tensor, where a variable holds the key or the tensor."""
    variables = Variables(frames)
    try:
        held = variables.values()
        for container in [value for value in held if type(value) in PLAIN_DICTS]:
            text = key_text(key := key_by_identity(container, tensor))
            if text is not None and any(value is tensor or value is key for value in held):
                place = _place(frames, None)
                return _Found([text], [place], _BESIDE, container=container, key=text, beside=True)
        return None
    finally:
        held = []
        variables.give_back()


def _frame_of_scope(frame: FrameType, route: Route) -> FrameType | None:
    """The running frame of the function (or module) that ``route`` leaves to."""
    scope, here = route.scope, frame.f_back
    name = scope.name if isinstance(scope, (ast.FunctionDef, ast.AsyncFunctionDef)) else "<module>"
    if isinstance(scope, ast.Lambda):
        name = "<lambda>"
    for _ in range(_MAX_FRAMES):
        if here is None:
            return None
        code = here.f_code
        is_it = code.co_name == name and code.co_filename == frame.f_code.co_filename
        if is_it and (not isinstance(scope, Function) or scope.lineno >= code.co_firstlineno):
            return here
        here = here.f_back
    return None


# -- what was found ---------------------------------------------------------------------------------------------------


def _inferred(found: _Found) -> Inferred:
    assert found.step is not None
    key = (*map(id, found.places), id(found.step))
    chain = _chains.get(key)
    if chain is None:
        chain = _chains[key] = Chain(tuple(found.places), found.step, found.fresh, found.at, found.is_known)
    container, source = found.container, ""
    siblings: tuple[str, ...] = ()
    if container is not MISSING:
        kind = type(container)
        source = kind.__name__ if kind in PLAIN_DICTS or not is_module(container) else "Module"
        siblings = _siblings(chain, container, found.key)
    return Inferred(_spell(found.keys), found.key, siblings, source, chain, found.beside)


def _siblings(chain: Chain, container: Any, key: str) -> tuple[str, ...]:
    """`names_in`, read again when the container may have changed since, at the latest at the first of its names."""
    entries = entries_of(container)
    if entries is None:
        return names_in(container)
    if type(container) not in PLAIN_DICTS and is_module(container) and key not in entries:
        return tuple(parameter_names(container))
    first = next(dict.__iter__(entries), None)
    now = id(container), len(entries), first
    kept, known, names = chain.siblings
    if kept[:2] == now[:2] and kept[2] is first and key in known and known[key]:
        return names
    names = names_in(container)
    known = dict.fromkeys(names, True)
    known[names[0] if names else ""] = False  # the next walk begins with it
    chain.siblings = now, known, names
    return names


def _spell(keys: list[str]) -> str:
    text = ""
    for key in reversed(keys):
        text += key if key.startswith("[") or not text else f"/{key}"
    return text[:_MAX_LABEL_CHARS]


def evidence_of(found: Inferred) -> Evidence:
    """All that is known of the label. Takes a while where it is asked for the first time."""
    chain = found.chain
    if chain.fate is None:
        chain.fate = fate_of(_turns(chain), chain.fresh)
    spelled = chain.spelled.get(found.key)
    if spelled is None:
        files = [place.code.co_filename for place in chain.places]
        spelled = chain.spelled[found.key] = spells(found.key, files)
    return Evidence(
        found.key, found.siblings[:_MAX_SIBLINGS], found.source, chain.fate, spelled, found.beside, chain.is_known
    )


def _turns(chain: Chain) -> list[Turn]:
    """The functions from the collective out to the one whose loop has the name."""
    names = frozenset(node.id for name in chain.step.names for node in ast.walk(name) if isinstance(node, ast.Name))
    texts = frozenset(
        name.value for name in chain.step.names if isinstance(name, ast.Constant) and isinstance(name.value, str)
    )
    turns: list[Turn] = []
    for index in range(chain.at, -1, -1):
        place = chain.places[index]
        if place.file is None or place.node is None:
            continue
        scope = place.file.scope_of(place.node)
        loop = chain.step.loop if index == chain.at else None
        within = loop if loop is not None and place.file.is_inside(place.node, loop) else scope
        carriers = frozenset(argument_names(place.node)) if index == 0 else frozenset()
        turns.append(Turn(place.file, place.node, within, names - carriers, texts, carriers))
        if index > 0:
            names = names_passed(place.node, chain.places[index - 1].owner, names, bool(texts))
    return turns


def frames_of(found: Inferred) -> Iterator[str]:
    """The places that the label was found through, as lines, for tests and `DEBUG` logging."""
    for place in found.chain.places:
        line = "?" if place.node is None else place.node.lineno
        yield f"{place.code.co_filename}:{line} in {place.code.co_name}"
