"""The label of a collective: the routes of its tensor, followed through the frames that called it.

A call reads the few variables that its place names. Where the text has no key, it costs a look into a dict for each
frame.
"""

from __future__ import annotations

import ast
import logging
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from ddpstats._observe.frames import user_frame
from ddpstats.guard.labels.fate import Fate
from ddpstats.guard.labels.places import MAX_FRAMES, Asked, CallText, ReadyRoute, ReadyStep, activation, place_of
from ddpstats.guard.labels.read import (
    MISSING,
    PLAIN_DICTS,
    Variables,
    entries_of,
    key_by_identity,
    key_text,
    kind_of,
)
from ddpstats.guard.labels.siblings import Containers, Siblings
from ddpstats.guard.labels.source import Function
from ddpstats.guard.labels.trace import Route, Step

_MAX_CHAINS = 8192
_MAX_LABELS = 4096
_MAX_LABEL_CHARS = 200
# Functions of this name reduce stats under their keys: espnet's, detectron2's, DETR's, and copies of them.
REDUCES_NAMED = frozenset(
    {
        *("recursive_sum", "recursive_average", "reduce_dict", "reduce_loss_dict", "reduce_losses", "reduce_metrics"),
        *("all_reduce_dict", "average_dict", "reduce_stats", "sync_stats", "reduce_tree"),
    }
)
_BESIDE = Step((), None, None)

log = logging.getLogger("ddpstats")


# -- what is found ----------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Chain:
    """The places that a label was found through, from the collective outwards; one object for each such chain.

    ``steps``: those that gave a name, innermost first, and the index of the place of each; ``containers``: what each
    took its name from. The rest is kept from one call to the next.
    """

    places: tuple[CallText, ...]
    steps: tuple[tuple[Step, int], ...]
    fresh: bool
    is_known: bool
    containers: tuple[Containers, ...]
    fates: dict[int, Fate] = field(default_factory=dict)


@dataclass(eq=False, slots=True)
class Inferred:
    """A label; one object for all calls that are alike. ``keys``: the names in it, innermost first, each with what
    stood beside it in its container (``levels``). ``beside``: a name that was only passed beside the tensor."""

    path: str
    keys: tuple[str, ...]
    levels: tuple[Siblings, ...]
    chain: Chain
    beside: bool = False


@dataclass(slots=True)
class _Found:
    """What was found so far. ``keys``: all of them, from the tensor outwards; ``names``: those that are names, each
    with its container; ``steps``: as of a `Chain`, whose places are ``named_at``."""

    places: tuple[CallText, ...] = ()
    keys: tuple[str, ...] = ()
    names: tuple[tuple[str, Any], ...] = ()
    steps: tuple[tuple[Step, int], ...] = ()
    named_at: tuple[CallText, ...] = ()
    fresh: bool = False
    beside: bool = False
    is_known: bool = False

    def add(self, key: str, step: Step, container: Any) -> None:
        """A key that is a name."""
        self.keys += (key,)
        self.names += ((key, container),)
        self.steps += ((step, len(self.places) - 1),)
        self.named_at = self.places


Passed = tuple[FrameType | None, Any]
"""What was passed: a function's frame and the name of its parameter; or None and the value."""

_chains: dict[tuple[Any, ...], Chain] = {}
_labels: dict[tuple[Any, ...], Inferred] = {}


def infer(tensor: Any, frame: FrameType) -> Inferred | None:
    """The label of ``tensor`` in the collective that ``frame`` is calling; None where the text gives it no name."""
    try:
        place = place_of(frame, None)
        if not place.routes and place.file is not None:
            return None
        frames = activation(frame)
        found = _follow(place, frames, (None, tensor), _Found(), 0)
        if found is None and place.file is None:
            found = _without_source(tensor, frames, place)
        return None if found is None else _inferred(found)
    except RecursionError:  # the program's own stack is nearly used up: nothing is left for a message either
        return None
    except Exception:  # whatever is odd about a program, its collective runs
        log.debug("no label could be inferred", exc_info=True)
        return None


def _inferred(found: _Found) -> Inferred:
    chain = _chains.get((found.named_at, found.steps)) or _new_chain(found)
    levels = tuple([last.siblings(*name) for last, name in zip(chain.containers, found.names, strict=True)])
    key = chain, found.keys, levels, found.beside
    label = _labels.get(key)
    if label is None:
        if len(_labels) >= _MAX_LABELS:
            _labels.clear()
        names = tuple(name for name, _ in found.names)
        label = _labels[key] = Inferred(_spell(found.keys), names, levels, chain, found.beside)
    return label


def _new_chain(found: _Found) -> Chain:
    if len(_chains) > _MAX_CHAINS:
        _chains.clear()
    containers = tuple(Containers() for _ in found.steps)
    chain = Chain(found.named_at, found.steps, found.fresh, found.is_known, containers)
    _chains[found.named_at, found.steps] = chain
    return chain


def _spell(keys: tuple[str, ...]) -> str:
    text = ""
    for key in reversed(keys):
        text += key if key.startswith("[") or not text else f"/{key}"
    return text[:_MAX_LABEL_CHARS]


# -- following a route ------------------------------------------------------------------------------------------------


def _follow(
    place: CallText, frames: tuple[FrameType, ...], passed: Passed | None, found: _Found, depth: int
) -> _Found | None:
    """Follow the routes of one activation, and those of its callers; None where none comes to a name."""
    best = found if found.names else None
    if depth > MAX_FRAMES:
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
    ready: ReadyRoute, place: CallText, frames: tuple[FrameType, ...], passed: Passed | None, before: _Found, depth: int
) -> _Found | None:
    route = ready.asked.route
    now = _Found(
        (*before.places, place),
        before.keys,
        before.names,
        before.steps,
        before.named_at,
        before.fresh or (not before.names and route.fresh),
        before.beside,
        before.is_known or place.owner.co_name in REDUCES_NAMED,
    )
    if ready.steps:
        variables = Variables(frames)
        try:
            for step in ready.steps:
                _read(step, variables, passed, now)
        finally:
            variables.give_back()
    now.beside = now.beside or (route.is_beside and bool(now.names) and not before.names)
    if not route.leaves:
        return now if now.names else None
    return _leave(ready.asked, frames[-1], now, depth)


def _read(ready: ReadyStep, variables: Variables, passed: Passed | None, found: _Found) -> None:
    """Take one step: its key joins the path."""
    container: Any = MISSING
    text: str | None = None
    number: Any = None
    tensor = passed[1] if passed is not None and passed[0] is None else MISSING
    for reader in ready.names:
        value = reader(variables)
        if value is tensor:
            continue
        part = key_text(value)
        if part is not None:
            text = part if text is None or text == part else f"{text},{part}"
        elif kind_of(value) in (int, float) and number is None:
            number = value
    if text is None and ready.container is not None:
        wanted = _value_of(passed) if ready.element is None else ready.element(variables)
        container = ready.container(variables)
        key = MISSING if wanted is MISSING or container is MISSING else key_by_identity(container, wanted)
        text, number = key_text(key), key if kind_of(key) in (int, float) else number
        if text is None and number is not None and entries_of(container) is not None:
            text = f"[{number}]"  # a dict's key, and no place in a list
    if text is not None:
        if container is MISSING and ready.container is not None:
            container = ready.container(variables)
        found.add(text, ready.step, container)
    elif type(number) is int:
        found.keys += (f"[{number}]",)


def _leave(asked: Asked, owner: FrameType, found: _Found, depth: int) -> _Found | None:
    """Go on in the caller, or in the enclosing function."""
    route = asked.route
    passed: Passed | None = None
    if route.leaves == "variable":
        outer = _frame_of_scope(owner, route)
    else:
        outer = user_frame(owner.f_back)
        passed = (owner, route.name) if route.leaves == "parameter" else None
        if found.fresh and not found.names and not route.container:
            text = key_text(_value_of(passed))
            if text is not None:  # the tensor was made from a name that the caller chose
                found.add(text, _BESIDE, MISSING)
                found.beside = True
                return found
    if outer is not None:
        place = place_of(outer, asked)
        further = _follow(place, activation(outer), passed, found, depth + 1) if place.routes else None
        if further is not None:
            return further
    return found if found.names else None


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


def _without_source(tensor: Any, frames: tuple[FrameType, ...], place: CallText) -> _Found | None:
    """The key of a dict of the frame that has this very tensor, where a variable holds the key or the tensor."""
    variables = Variables(frames)
    held = variables.values()
    try:
        for container in [value for value in held if kind_of(value) in PLAIN_DICTS]:
            text = key_text(key := key_by_identity(container, tensor))
            if text is not None and any(value is tensor or value is key for value in held):
                found = _Found((place,), beside=True)
                found.add(text, _BESIDE, container)
                return found
        return None
    finally:
        held.clear()
        variables.give_back()


def _frame_of_scope(frame: FrameType, route: Route) -> FrameType | None:
    """The running frame of the function (or module) that ``route`` leaves to."""
    scope, here = route.scope, frame.f_back
    name = scope.name if isinstance(scope, (ast.FunctionDef, ast.AsyncFunctionDef)) else "<module>"
    if isinstance(scope, ast.Lambda):
        name = "<lambda>"
    for _ in range(MAX_FRAMES):
        if here is None:
            return None
        code = here.f_code
        is_it = code.co_name == name and code.co_filename == frame.f_code.co_filename
        if is_it and (not isinstance(scope, Function) or scope.lineno >= code.co_firstlineno):
            return here
        here = here.f_back
    return None
