"""The label of a collective: the routes of its tensor, followed through the frames that called it.

1. Values are read off frames and objects without running any code of the program's: no property, ``__getitem__``,
   ``__eq__``, ``__iter__`` or ``repr`` of a user's class is called. Attributes come out of instance dictionaries and
   slots, items out of dicts by dict's own methods, and only objects of exactly known types are taken for keys.
2. `call_routes`: what the text says of one call (`trace`), worked out once for each place in the program.
3. `infer`: the routes followed; one `Inferred` label for all equal calls.
"""

from __future__ import annotations

import ast
import dis
import enum
import itertools
import logging
import re
import sys
from collections import OrderedDict, UserDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from operator import methodcaller
from types import CodeType, FrameType, GetSetDescriptorType, MemberDescriptorType
from typing import Any

from ddpstats._base.caches import BoundedCache
from ddpstats._observe.frames import user_frame
from ddpstats.guard.event import Evidence
from ddpstats.guard.labels.source import (
    COMPREHENSION_NAMES,
    Function,
    SourceFile,
    call_of,
    called_name,
)
from ddpstats.guard.labels.trace import LabelTracer, Route, Step, Use, turns_of, use_of

MISSING: Any = object()
PLAIN_DICTS = frozenset({dict, OrderedDict, defaultdict})
_MAX_SEARCHED = 4096
_MAX_KEY_PARTS = 4
_MAX_INDEX = 64  # elements of a list that are compared with the tensor
_MAX_CHARS = 200
_MAX_CODE = 100_000
_MAX_FRAMES = 60
_MAX_WRAPPERS = 3
_MAX_KEPT = 4096
_MAX_NAMES = 1 << 16  # in all containers that are kept
_MAX_EVIDENCE_NAMES = 256
_SNAPSHOTS = sys.version_info < (3, 13)
_OWN_REFERENCES = 3  # the frame's, the variable of the caller, and `getrefcount`'s own
_CO_OPTIMIZED = 0x1
_KINDS_OF_VARIABLES = (dict, type((lambda: sys._getframe().f_locals)()))  # from 3.13 on a view
_LOOKERS = frozenset({"locals", "eval", "exec"})
_LOOKERS_WITHOUT_ARGUMENT = frozenset({"vars", "dir"})
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
    if owner is MISSING:
        return MISSING
    instance = instance_dict(owner)
    if instance is not None and name in instance:
        return instance[name]
    for kind in _mro_of(kind_of(owner)):
        value = kind.__dict__.get(name, MISSING)
        if type(value) is MemberDescriptorType:
            try:
                return value.__get__(owner)
            except AttributeError:  # an empty slot
                return MISSING
        if value is not MISSING:
            return MISSING  # a method, a property, a class's default: nothing that is the instance's own
    tables = (_table(instance, name) for name in ("_parameters", "_buffers", "_modules"))  # of a torch.nn.Module
    return next((table[name] for table in tables if table is not None and name in table), MISSING)


def instance_dict(owner: Any) -> dict[str, Any] | None:
    """Return the instance's own ``__dict__``, however its class treats attributes."""
    for kind in _mro_of(kind_of(owner)):
        descriptor = kind.__dict__.get("__dict__")
        if type(descriptor) is GetSetDescriptorType:
            value = descriptor.__get__(owner)
            return value if type(value) is dict else None
    return None


def _table(instance: dict[str, Any] | None, name: str) -> dict[str, Any] | None:
    """Return one of the dicts in which a torch.nn.Module keeps what it has."""
    table = None if instance is None else instance.get(name)
    return table if kind_of(table) in (dict, OrderedDict) else None


# -- variables --------------------------------------------------------------------------------------------------------


class Variables:
    """The variables of one activation: of a function's frame, and of the comprehensions that run inside of it.

    Before Python 3.13 reading a frame's variables makes a copy of them that the frame keeps, and that would keep
    tensors alive for longer than the program means to: `give_back` empties it. Functions that may look at that copy
    themselves are not read. Code that was executed may have other variables than a dict: they are not read, either.
    """

    def __init__(self, frames: Sequence[FrameType]) -> None:
        self._globals = frames[-1].f_globals
        readable = ((frame, frame.f_locals) for frame in frames if is_readable(frame))
        self._read = [(frame, variables) for frame, variables in readable if type(variables) in _KINDS_OF_VARIABLES]

    def get(self, name: str) -> Any:
        """Return the value of a variable, or `MISSING`."""
        for _, variables in self._read:
            if name in variables:
                return variables[name]
        return dict.get(self._globals, name, MISSING)

    def give_back(self) -> None:
        """Empty the copies. Nothing may be read afterwards."""
        read, self._read = self._read, []
        while _SNAPSHOTS and read:
            frame, variables = read.pop()
            # Not the module's own dict, and not a copy that the program holds.
            if frame.f_code.co_flags & _CO_OPTIMIZED and sys.getrefcount(variables) <= _OWN_REFERENCES:
                variables.clear()


_readable: dict[int, tuple[Any, bool]] = {}  # by id, and the code kept with it: its hash goes over all its constants


def is_readable(frame: FrameType) -> bool:
    """Say whether nothing in the function looks at its variables as a dict."""
    code = frame.f_code
    known = _readable.get(id(code))
    if known is None:
        if len(_readable) > _MAX_KEPT:
            _readable.clear()
        is_optimized = bool(code.co_flags & _CO_OPTIMIZED)
        known = _readable[id(code)] = code, not (is_optimized and _looks_at_its_variables(code))
    return known[1]


def _looks_at_its_variables(code: CodeType) -> bool:
    """Say whether the code loads ``locals`` and the like, or calls ``vars`` or ``dir`` without an argument."""
    if not ({*_LOOKERS, *_LOOKERS_WITHOUT_ARGUMENT} & {*code.co_names}):
        return False
    if len(code.co_code) > _MAX_CODE:
        return True  # the library would need minutes
    steps = [step for step in dis.get_instructions(code) if step.opname not in ("CACHE", "PRECALL", "PUSH_NULL")]
    for step, following in itertools.pairwise(steps):
        is_called_bare = following.opname.startswith("CALL") and following.arg == 0
        if step.opname in ("LOAD_GLOBAL", "LOAD_NAME") and (
            step.argval in _LOOKERS or (step.argval in _LOOKERS_WITHOUT_ARGUMENT and is_called_bare)
        ):
            return True
    return False


# -- expressions ------------------------------------------------------------------------------------------------------

Reader = Callable[[Variables], Any]


def reader_of(expr: ast.expr | None) -> Reader:
    """Return a function that gives an expression's value, or `MISSING` where that takes code of the program's."""
    if isinstance(expr, ast.Name):
        return methodcaller("get", expr.id)
    if isinstance(expr, ast.Constant):
        value = expr.value
        return lambda variables: value
    if isinstance(expr, ast.Attribute):
        owner, attribute = reader_of(expr.value), expr.attr
        return lambda variables: attribute_of(owner(variables), attribute)
    if isinstance(expr, ast.Subscript):
        container, index = reader_of(expr.value), reader_of(expr.slice)
        return lambda variables: _element(container(variables), index(variables))
    if isinstance(expr, ast.JoinedStr):
        parts = list(map(reader_of, expr.values))
        return lambda variables: _joined([part(variables) for part in parts], (str, int))
    if isinstance(expr, ast.FormattedValue) and expr.format_spec is None and expr.conversion == -1:
        return reader_of(expr.value)
    if isinstance(expr, ast.BinOp) and isinstance(expr.op, ast.Add):
        left, right = reader_of(expr.left), reader_of(expr.right)
        return lambda variables: _joined([left(variables), right(variables)], (str,))
    if isinstance(expr, (ast.Tuple, ast.List)):
        elements = list(map(reader_of, expr.elts))
        return lambda variables: tuple(element(variables) for element in elements)
    return lambda variables: MISSING


def _joined(parts: list[Any], kinds: tuple[type, ...]) -> Any:
    return "".join(map(str, parts)) if all(kind_of(part) in kinds for part in parts) else MISSING


def _element(container: Any, index: Any) -> Any:
    kind = kind_of(container)
    if kind in (list, tuple) and type(index) is int and -len(container) <= index < len(container):
        return container[index]
    if kind in PLAIN_DICTS and kind_of(index) in (str, int):
        return dict.get(container, index, MISSING)
    return MISSING


# -- keys -------------------------------------------------------------------------------------------------------------


def key_text(value: Any) -> str | None:
    """Return the text of a key that names something: a str, an enum member, a tuple or dataclass with such parts.

    Without what wrappers of a model put before the names of its parameters. None for other keys.
    """
    kind = type(value)
    if kind is str:
        text = _WRAPPERS.sub("", value) if "." in value else value
        return text[:_MAX_CHARS] if text[:1].isalnum() or _HAS_LETTER.search(text) else None  # "_" names nothing
    kind = kind_of(value)
    bases = _mro_of(kind)
    if tuple in bases:
        return _text_of_parts(tuple.__iter__(value))
    if "__dataclass_fields__" in kind.__dict__:
        return _text_of_parts((instance_dict(value) or {}).values())
    if enum.EnumMeta in _mro_of(type(kind)):
        name = (instance_dict(value) or {}).get("_name_")
        return f"{kind.__name__}.{name}" if type(name) is str else None
    return key_text(str.__str__(value)) if str in bases else None  # str's own, whatever the subclass defines


def _text_of_parts(parts: Iterable[Any]) -> str | None:
    some = itertools.islice(parts, _MAX_KEY_PARTS)
    texts = [text for part in some if (text := str(part) if type(part) is int else key_text(part))]
    return ",".join(texts) if any(not text.isdigit() for text in texts) else None


def _texts(keys: Iterable[Any]) -> tuple[str, ...]:
    some = itertools.islice(keys, _MAX_SEARCHED)
    texts = (f"[{key}]" if kind_of(key) in (int, float) else key_text(key) for key in some)
    return tuple(text for text in texts if text is not None)


# -- containers -------------------------------------------------------------------------------------------------------


def entries_of(container: Any) -> Any:
    """Return a dict of what the container holds by name; None where it has no names, or hides them in code."""
    if type(container) is dict:
        return container
    bases = _mro_of(kind_of(container))
    if dict in bases:
        return container
    instance = instance_dict(container)
    if instance is None:
        return None
    if UserDict in bases:
        held = instance.get("data")
        return held if type(held) is dict else None
    is_dict_of_modules = any(base.__name__.endswith("Dict") for base in bases)
    tables = [_table(instance, name) for name in ("_modules", "_parameters") if is_dict_of_modules]
    return next((table for table in tables if table), None)


def key_by_identity(container: Any, wanted: Any) -> Any:
    """Return the key under which a container has this very object; `MISSING` if it has not."""
    if kind_of(container) in (list, tuple):
        return next((index for index, value in enumerate(container[:_MAX_INDEX]) if value is wanted), MISSING)
    entries = entries_of(container)
    if entries is None:
        entries = instance_dict(container) or {}
    for key, value in itertools.islice(dict.items(entries), _MAX_SEARCHED):
        if value is wanted and (kind_of(key) in (int, float) or key_text(key) is not None):
            return key
    return MISSING


@dataclass(frozen=True, eq=False)
class Siblings:
    """The names in a container, in its order, and the container's class. ``aliases``: of tensors with several names."""

    names: tuple[str, ...] = ()
    source: str = ""
    aliases: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


_NO_SIBLINGS = Siblings()
_kept_siblings: BoundedCache[tuple[Any, ...], Siblings] = BoundedCache(_MAX_KEPT, _MAX_NAMES)


class LastContainer:
    """The names of the container that a step took its element of last; a program walks one dict again and again.

    They are read again for a container that is another object or has another size, and at the first of its names:
    there the next walk begins.
    """

    def __init__(self) -> None:
        # One tuple, for several threads may be at this place: id, size, siblings, all names but the first, keys.
        self._last: tuple[int, int, Siblings, frozenset[str], Any] = 0, 0, _NO_SIBLINGS, frozenset(), None

    def siblings(self, name: str, container: Any) -> Siblings:
        """Return the names beside ``name``."""
        if container is MISSING:
            return _NO_SIBLINGS
        entries = entries_of(container)
        sized = entries if entries is not None else instance_dict(container) or {}
        size = len(container) if kind_of(container) in (list, tuple) else dict.__len__(sized)
        last_id, last_size, siblings, later, last_keys = self._last
        if last_id == id(container) and last_size == size and name in later:
            return siblings
        keys = _plain_keys(container) if type(container) is dict else None
        if keys is None or keys != last_keys:
            siblings = _read_siblings(container, entries, name)
            later = frozenset(siblings.names[1:])
        self._last = id(container), size, siblings, later, keys
        return siblings


def _plain_keys(container: dict[Any, Any]) -> tuple[str, ...] | None:
    """Return the keys of a dict if all are texts and no two have the same value."""
    keys = tuple(container)
    are_plain = all(type(key) is str for key in keys) and len(set(map(id, container.values()))) == len(keys)
    return keys if are_plain else None


def _read_siblings(container: Any, entries: Any, name: str) -> Siblings:
    kind, aliases = kind_of(container), _aliases_in(entries if entries is not None else {})
    source, names = kind.__name__, _names_in(container, entries)
    if _table(instance_dict(container), "_parameters") is not None:
        source = "Module"
        names = names if entries is not None and name in entries else tuple(_parameter_names(container))
    key = names, source, *aliases.items()
    return _kept_siblings.get(key) or _kept_siblings.put(key, Siblings(names, source, aliases), len(names))


def _names_in(container: Any, entries: Any) -> tuple[str, ...]:
    """Return the names of a container's elements, in its own order: of a dict's keys, or the texts of a list."""
    kind = kind_of(container)
    if entries is not None:
        return _texts(dict.__iter__(entries))
    if kind in (list, tuple):  # of names, or of pairs that begin with them
        firsts = (part[0] if type(part) is tuple and part else part for part in container[:_MAX_SEARCHED])
        return _texts(first for first in firsts if type(first) is not int)
    fields = kind.__dict__.get("_fields")  # of a namedtuple
    return _texts(fields if type(fields) is tuple else instance_dict(container) or ())


def _aliases_in(entries: Any) -> dict[str, tuple[str, ...]]:
    """Return the names of tensors that a dict holds under several: tied weights."""
    keys_of: dict[int, list[Any]] = {}
    for key, value in itertools.islice(dict.items(entries), _MAX_SEARCHED):
        keys_of.setdefault(id(value), []).append((key, value))
    tied = [pairs for pairs in keys_of.values() if len(pairs) > 1]
    tensors = [pairs for pairs in tied if kind_of(pairs[0][1]).__name__ in ("Tensor", "Parameter")]
    names = [_texts(key for key, _ in pairs) for pairs in tensors]
    return {name: of_tensor for of_tensor in names for name in of_tensor}


def _parameter_names(module: Any, prefix: str = "", depth: int = 0) -> Iterator[str]:
    """Yield the names of a torch.nn.Module's parameters and buffers, read from its tables."""
    instance = instance_dict(module)
    parameters, buffers, modules = (_table(instance, name) for name in ("_parameters", "_buffers", "_modules"))
    if parameters is None or modules is None or depth > 20:
        return
    yield from (prefix + name for name in (*parameters, *(buffers or ())) if type(name) is str)
    for name in modules:
        if type(name) is str:
            yield from _parameter_names(modules[name], f"{prefix}{name}.", depth + 1)


# -- what the text says of a call -------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Departure:
    """A route that left the function with the code ``callee``, and goes on where that was called."""

    callee: CodeType
    route: Route


@dataclass(frozen=True, eq=False)
class ReadyStep:
    """A step whose expressions are compiled to readers."""

    step: Step
    names: tuple[Reader, ...]
    element: Reader | None
    container: Reader | None


ReadyRoute = tuple[Departure, tuple[ReadyStep, ...]]
Frames = tuple[FrameType, ...]


@dataclass(frozen=True, eq=False)
class CallRoutes:
    """The routes of one call in one function. ``node``: the call; None where the source is not to be had.

    ``owner``: the function's code where ``code`` is that of a comprehension in it. ``departure``: whose route led to
    the call, which is kept alive so that its id stays its own; None for the collective itself.
    """

    code: CodeType
    owner: CodeType
    departure: Departure | None
    file: SourceFile | None
    node: ast.expr | None
    routes: tuple[ReadyRoute, ...]


_call_routes: dict[tuple[int, int, int], CallRoutes] = {}
_tracers: dict[int, LabelTracer] = {}


def call_routes(frame: FrameType, departure: Departure | None) -> CallRoutes:
    """Return the routes at the call that a frame is executing."""
    key = id(frame.f_code), frame.f_lasti, id(departure)
    known = _call_routes.get(key)
    if known is None:
        if len(_call_routes) >= _MAX_KEPT:
            _call_routes.clear()
            _tracers.clear()
        known = _call_routes[key] = _trace_call(frame, departure)
    return known


def _trace_call(frame: FrameType, departure: Departure | None) -> CallRoutes:
    owner = activation(frame)[-1].f_code
    call = call_of(frame)
    if call is None:
        return CallRoutes(frame.f_code, owner, departure, None, None, ())
    file, node = call
    tracer = _tracers.get(id(file))
    if tracer is None or tracer.file is not file:
        tracer = _tracers[id(file)] = LabelTracer(file)
    if departure is None:
        routes = tracer.of_argument(node)
    elif departure.route.leaves == "variable":
        routes = tracer.of_variable(departure.route.name, node, departure.route.container)
    else:
        routes = tracer.of_parameter(node, departure.callee, departure.route)
    ready = tuple((Departure(owner, route), tuple(map(_ready, route.steps))) for route in routes)
    return CallRoutes(frame.f_code, owner, departure, file, node, ready)


def _ready(step: Step) -> ReadyStep:
    element = None if step.element is None else reader_of(step.element)
    container = None if step.container is None else reader_of(step.container)
    return ReadyStep(step, tuple(map(reader_of, step.names)), element, container)


def activation(frame: FrameType) -> Frames:
    """Return the frames of one activation: comprehensions, which have their own before 3.12, and their owner."""
    if frame.f_code.co_name not in COMPREHENSION_NAMES:
        return (frame,)
    frames, owner = [frame], frame.f_back
    for _ in range(_MAX_FRAMES):
        if owner is None:
            break
        if frames[-1].f_code in owner.f_code.co_consts:
            frames.append(owner)
            if owner.f_code.co_name not in COMPREHENSION_NAMES:
                break
        owner = owner.f_back
    return tuple(frames)


# -- labels -----------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Chain:
    """The calls that a label was found through, from the collective outwards; one object for each such chain.

    ``steps``: those that gave a name, innermost first, and the index of the call of each. ``is_element``: the tensor is
    the innermost element itself, or an attribute of it. ``containers``: what each step took its name from last.
    """

    calls: tuple[CallRoutes, ...]
    steps: tuple[tuple[Step, int], ...]
    is_element: bool
    containers: tuple[LastContainer, ...]
    uses: dict[int, Use] = field(default_factory=dict)

    def use(self, level: int) -> Use:
        """Return what the program does with the results of the loop that set the name of this level."""
        if level not in self.uses:
            step, outermost = self.steps[level]
            calls = [(call.file, call.node, call.owner) for call in self.calls[: outermost + 1]]
            self.uses[level] = use_of(turns_of(step, calls), self.is_element)
        return self.uses[level]


@dataclass(eq=False)
class Inferred:
    """A label; one object for all equal calls. ``keys``: the names in it, innermost first, each with the names
    in its container (``levels``)."""

    path: str
    keys: tuple[str, ...]
    levels: tuple[Siblings, ...]
    chain: Chain

    @cached_property
    def evidence(self) -> Evidence:
        """The evidence for the innermost name, and through it of those further out. Worked out when asked for."""
        evidence: Evidence | None = None
        for level in range(len(self.levels) - 1, -1, -1):
            key, siblings = self.keys[level], self.levels[level]
            names, aliases = siblings.names[:_MAX_EVIDENCE_NAMES], siblings.aliases.get(key, ())
            set_by = self.chain.steps[level][0].set_by
            evidence = Evidence(key, names, siblings.source, self.chain.use(level), aliases, set_by, evidence)
        assert evidence is not None
        return evidence


_chains: dict[tuple[Any, ...], Chain] = {}
_labels: dict[tuple[Any, ...], Inferred] = {}

Passed = tuple[FrameType | None, Any]
"""What was passed: a function's frame and the name of its parameter; or None and the value."""


@dataclass(slots=True)
class _Path:
    """A route as far as it was followed. ``keys``: all of them, from the tensor outwards; ``names``: those that are
    names, each with its container; ``steps``: as of a `Chain`."""

    calls: tuple[CallRoutes, ...] = ()
    keys: tuple[str, ...] = ()
    names: tuple[tuple[str, Any], ...] = ()
    steps: tuple[tuple[Step, int], ...] = ()
    fresh: bool = False


def infer(tensor: Any, frame: FrameType) -> Inferred | None:
    """Return the label of ``tensor`` in the collective that ``frame`` calls; None where the text gives it no name."""
    try:
        call = call_routes(frame, None)
        if not call.routes:
            return None
        path = _follow(call, activation(frame), (None, tensor), _Path())
        return None if path is None else _inferred(path)
    except RecursionError:  # the program's own stack is nearly used up: nothing is left for a message either
        return None
    except Exception:  # whatever is odd about a program, its collective runs
        log.debug("no label could be inferred", exc_info=True)
        return None


def _inferred(path: _Path) -> Inferred:
    is_element = not path.fresh and path.keys[0] == path.names[0][0]
    key = path.calls[: path.steps[-1][1] + 1], path.steps, is_element
    chain = _chains.get(key)
    if chain is None:
        if len(_chains) >= _MAX_KEPT:
            _chains.clear()
        chain = _chains[key] = Chain(*key, tuple(LastContainer() for _ in path.steps))
    levels = tuple([last.siblings(*name) for last, name in zip(chain.containers, path.names, strict=True)])
    label = _labels.get((chain, path.keys, levels))
    if label is None:
        if len(_labels) >= _MAX_KEPT:
            _labels.clear()
        text = "".join(key if key.startswith("[") else f"/{key}" for key in reversed(path.keys))
        names = tuple(name for name, _ in path.names)
        label = Inferred(text.removeprefix("/")[:_MAX_CHARS], names, levels, chain)
        _labels[chain, path.keys, levels] = label
    return label


def _follow(call: CallRoutes, frames: Frames, passed: Passed | None, before: _Path) -> _Path | None:
    """Follow the routes of one activation, and those of its callers; None where no route comes to a name."""
    for route in call.routes if len(before.calls) <= _MAX_FRAMES else ():
        path = _take(route, call, frames, passed, before)
        if path is not None:
            return path
    return before if before.names else None


def _take(ready: ReadyRoute, call: CallRoutes, frames: Frames, passed: Passed | None, before: _Path) -> _Path | None:
    departure, steps = ready
    fresh = before.fresh or (not before.names and departure.route.fresh)
    path = _Path((*before.calls, call), before.keys, before.names, before.steps, fresh)
    if steps:
        variables = Variables(frames)
        try:
            for step in steps:
                _read(step, variables, passed, path)
        finally:
            variables.give_back()
    if departure.route.leaves:
        return _leave(departure, frames[-1], path)
    return path if path.names else None


def _read(ready: ReadyStep, variables: Variables, passed: Passed | None, path: _Path) -> None:
    """Take one step: its key joins the path."""
    text: str | None = None
    number: Any = None
    tensor = passed[1] if passed is not None and passed[0] is None else MISSING
    container = MISSING if ready.container is None else ready.container(variables)
    for reader in ready.names:
        value = reader(variables)
        if value is tensor:
            continue
        part = key_text(value)
        if part is not None:
            text = part if text is None or text == part else f"{text},{part}"
        elif kind_of(value) in (int, float) and number is None:
            number = value
    if text is None and container is not MISSING:
        wanted = _value_of(passed) if ready.element is None else ready.element(variables)
        key = MISSING if wanted is MISSING else key_by_identity(container, wanted)
        text, number = key_text(key), key if kind_of(key) in (int, float) else number
        if text is None and number is not None and entries_of(container) is not None:
            text = f"[{number}]"  # a dict's key, and no index of a list
    if text is not None:
        path.keys += (text,)
        path.names += ((text, container),)
        path.steps += ((ready.step, len(path.calls) - 1),)
    elif type(number) is int:
        path.keys += (f"[{number}]",)


def _leave(departure: Departure, owner: FrameType, path: _Path) -> _Path | None:
    """Go on in the caller, or in the enclosing function."""
    route = departure.route
    passed: Passed | None = (owner, route.name) if route.leaves == "parameter" else None
    is_variable = route.leaves == "variable"
    outer = _frame_of_scope(owner, route.scope) if is_variable else user_frame(owner.f_back)
    for wrapper in range(_MAX_WRAPPERS):
        call = None if outer is None else call_routes(outer, departure)
        if outer is None or call is None:
            break
        # A wrapper may hold the bound method, and so not pass on its object: that is what the wrapper was called on.
        if wrapper == 0 or called_name(call.node) == departure.callee.co_name:
            further = _follow(call, activation(outer), passed, path)
            if further is not None and further.names != path.names:
                return further
        if route.name != "self":
            break
        outer = user_frame(outer.f_back)
    return path if path.names else None


def _value_of(passed: Passed | None) -> Any:
    """Return the value of a parameter now."""
    frame, name = passed or (None, MISSING)
    if frame is None:
        return name
    variables = Variables((frame,))
    try:
        return variables.get(name)
    finally:
        variables.give_back()


def _frame_of_scope(frame: FrameType, scope: ast.AST | None) -> FrameType | None:
    """Return the running frame of the function (or module) that encloses ``frame``'s."""
    name = scope.name if isinstance(scope, (ast.FunctionDef, ast.AsyncFunctionDef)) else "<module>"
    name = "<lambda>" if isinstance(scope, ast.Lambda) else name
    outer = frame.f_back
    for _ in range(_MAX_FRAMES):
        if outer is None:
            return None
        code = outer.f_code
        is_it = code.co_name == name and code.co_filename == frame.f_code.co_filename
        if is_it and (not isinstance(scope, Function) or scope.lineno >= code.co_firstlineno):
            return outer
        outer = outer.f_back
    return None
