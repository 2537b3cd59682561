"""What the text tells of a call in a function: worked out once for each place, and ready to be read."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from types import CodeType, FrameType

from ddpstats.guard.labels.read import Reader, reader_of
from ddpstats.guard.labels.source import COMPREHENSION_NAMES, SourceFile, node_at
from ddpstats.guard.labels.trace import LabelTracer, Route, Step

MAX_FRAMES = 60
_MAX_PLACES = 8192
_COMPREHENSIONS = frozenset(COMPREHENSION_NAMES.values())


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
class CallText:
    """What the text tells of one call in one function. ``node``: the call; None where the source is not to be had.

    ``owner``: the function's code where ``code`` is that of a comprehension in it.
    """

    code: CodeType
    owner: CodeType
    asked: Asked | None
    file: SourceFile | None
    node: ast.expr | None
    routes: tuple[ReadyRoute, ...]


# By ids; what they stand for is kept alive by the place. (The hash of a code object goes over all of its constants.)
_places: dict[tuple[int, int, int], CallText] = {}
_tracers: dict[int, tuple[SourceFile, LabelTracer]] = {}


def _tracer_of(file: SourceFile) -> LabelTracer:
    found = _tracers.get(id(file))
    if found is None or found[0] is not file:
        found = _tracers[id(file)] = file, LabelTracer(file)
    return found[1]


def activation(frame: FrameType) -> tuple[FrameType, ...]:
    """The frames of one activation: comprehensions, which have frames of their own before 3.12, and their owner."""
    if frame.f_code.co_name not in _COMPREHENSIONS:
        return (frame,)
    frames, owner = [frame], frame.f_back
    for _ in range(MAX_FRAMES):
        if owner is None:
            break
        if frames[-1].f_code in owner.f_code.co_consts:
            frames.append(owner)
            if owner.f_code.co_name not in _COMPREHENSIONS:
                break
        owner = owner.f_back
    return tuple(frames)


def place_of(frame: FrameType, asked: Asked | None) -> CallText:
    """The place that a frame is at; ``asked``: whose route left to it, None for the collective itself."""
    key = id(frame.f_code), frame.f_lasti, id(asked)
    place = _places.get(key)
    if place is None or place.code is not frame.f_code:
        if len(_places) >= _MAX_PLACES:
            _places.clear()
        place = _places[key] = _find_place(activation(frame), asked)
    return place


def _find_place(frames: tuple[FrameType, ...], asked: Asked | None) -> CallText:
    frame, owner = frames[0], frames[-1].f_code
    found = node_at(frame)
    if found is None:
        return CallText(frame.f_code, owner, asked, None, None, ())
    file, node = found
    tracer = _tracer_of(file)
    if asked is None:
        routes = tracer.of_argument(node)
    elif asked.route.leaves == "variable":
        routes = tracer.of_variable(asked.route.name, node, asked.route.container)
    else:
        routes = tracer.of_parameter(node, asked.callee, asked.route)
    return CallText(frame.f_code, owner, asked, file, node, tuple(_ready(owner, route) for route in routes))


def _ready(code: CodeType, route: Route) -> ReadyRoute:
    steps = []
    for step in route.steps:
        element = None if step.element is None else reader_of(step.element)
        container = None if step.container is None else reader_of(step.container)
        steps.append(ReadyStep(step, tuple(map(reader_of, step.names)), element, container))
    return ReadyRoute(Asked(code, route), tuple(steps))
