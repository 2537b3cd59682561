"""Keys and containers, read off frames and objects without running any code of the program's.

No property, ``__getitem__``, ``__eq__``, ``__iter__`` or ``repr`` of a user's class is called: attributes come out of
instance dictionaries and slots, items out of dicts by dict's own methods, and only objects of exactly known types are
taken for keys.
"""

from __future__ import annotations

import ast
import dis
import enum
import re
import sys
from collections import OrderedDict, UserDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import methodcaller
from types import FrameType, GetSetDescriptorType, MemberDescriptorType
from typing import Any

MISSING: Any = object()
PLAIN_DICTS = frozenset({dict, OrderedDict, defaultdict})
_MAX_SEARCHED = 4096
_MAX_KEY_PARTS = 4
_MAX_INDEX = 64  # elements of a list that are looked at for the place of one
_MAX_CHARS = 120
_MAX_CODE = 100_000
_SNAPSHOTS = sys.version_info < (3, 13)
_OWN_REFERENCES = 3  # the frame's, the variable of who counts, and `getrefcount`'s own
_CO_OPTIMIZED = 0x1
_KINDS_OF_VARIABLES = (dict, type((lambda: sys._getframe().f_locals)()))  # from 3.13 on a view
_LOOKERS = frozenset({"locals", "eval", "exec"})
_LOOKERS_WITHOUT_ARGUMENT = frozenset({"vars", "dir"})
_WRAPPERS = re.compile(
    r"(?:^|(?<=\.))(?:module|_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module|_forward_module)\."
)
_HAS_LETTER = re.compile(r"[^\W_]")
_mro_of: Callable[[type], tuple[type, ...]] = type.__dict__["__mro__"].__get__

_META_CODE = frozenset({"__eq__", "__hash__", "__getattribute__", "__dict__", "__name__"})

Reader = Callable[["Variables"], Any]


# -- classes ----------------------------------------------------------------------------------------------------------


def kind_of(value: Any) -> type:
    """The class of a value; ``object`` where its metaclass has code that would run when the class is looked at."""
    kind = type(value)
    meta = type(kind)
    return kind if meta is type or _is_plain(meta) else object


def _is_plain(meta: type) -> bool:
    found = _metas.get(id(meta))
    if found is None or found[0] is not meta:
        if len(_metas) > 1024:
            _metas.clear()
        plain = type(meta) is type and not any(_META_CODE & base.__dict__.keys() for base in _mro_of(meta)[:-2])
        found = _metas[id(meta)] = meta, plain
    return found[1]


_metas: dict[int, tuple[type, bool]] = {}


# -- variables --------------------------------------------------------------------------------------------------------


class Variables:
    """The variables of one activation: of a function's frame, and of the comprehensions that run inside of it.

    Before Python 3.13 reading a frame's variables makes a copy of them that the frame keeps, and that would keep
    tensors alive for longer than the program means to: `give_back` empties it. Functions that may look at that copy
    themselves are left alone.
    """

    __slots__ = ("_frames", "_read")

    def __init__(self, frames: Sequence[FrameType]) -> None:
        self._frames, self._read = frames, _variables_of(frames)

    def get(self, name: str) -> Any:
        for _, variables in self._read:
            if name in variables:
                return variables[name]
        return dict.get(self._frames[-1].f_globals, name, MISSING)

    def values(self) -> list[Any]:
        """Those of the frames' own variables."""
        return [value for _, variables in self._read for value in list(variables.values())]

    def give_back(self) -> None:
        read, self._read = self._read, []
        while _SNAPSHOTS and read:
            frame, variables = read.pop()
            # Not the module's own dict, and not a copy that somebody else holds.
            if frame.f_code.co_flags & _CO_OPTIMIZED and sys.getrefcount(variables) <= _OWN_REFERENCES:
                variables.clear()


def _variables_of(frames: Sequence[FrameType]) -> list[tuple[FrameType, dict[str, Any]]]:
    """Of those that may be read. Code that was executed may have been given something else than a dict."""
    read: list[tuple[FrameType, dict[str, Any]]] = []
    for frame in frames:
        if is_readable(frame):
            variables = frame.f_locals
            if type(variables) in _KINDS_OF_VARIABLES:
                read.append((frame, variables))
    return read


def is_readable(frame: FrameType) -> bool:
    """Whether nothing in the function looks at its variables as a dict."""
    code = frame.f_code
    found = _readable.get(id(code))
    if found is None or found[0] is not code:
        if len(_readable) > 4096:
            _readable.clear()
        readable = not (code.co_flags & _CO_OPTIMIZED) or not _looks_at_its_variables(code)
        found = _readable[id(code)] = code, readable
    return found[1]


_readable: dict[int, tuple[Any, bool]] = {}


def _looks_at_its_variables(code: Any) -> bool:
    """Whether the code loads ``locals`` and the like, or calls ``vars`` or ``dir`` without an argument."""
    if not ({*_LOOKERS, *_LOOKERS_WITHOUT_ARGUMENT} & {*code.co_names}):
        return False
    if len(code.co_code) > _MAX_CODE:
        return True  # the library would need minutes
    steps = [step for step in dis.get_instructions(code) if step.opname not in ("CACHE", "PRECALL", "PUSH_NULL")]
    for step, following in zip(steps, [*steps[1:], None], strict=True):
        if step.opname not in ("LOAD_GLOBAL", "LOAD_NAME"):
            continue
        if step.argval in _LOOKERS:
            return True
        is_called_bare = following is not None and following.opname.startswith("CALL") and following.arg == 0
        if step.argval in _LOOKERS_WITHOUT_ARGUMENT and is_called_bare:
            return True
    return False


# -- expressions ------------------------------------------------------------------------------------------------------


def reader_of(expr: ast.expr | None) -> Reader:
    """A function that gives an expression's value where that takes no code of the program's, else `MISSING`."""
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
        parts = [_part_reader(part) for part in expr.values]
        return lambda variables: _joined(part(variables) for part in parts)
    if isinstance(expr, ast.BinOp) and isinstance(expr.op, ast.Add):
        left, right = reader_of(expr.left), reader_of(expr.right)
        return lambda variables: _joined((left(variables), right(variables)), (str,))
    if isinstance(expr, (ast.Tuple, ast.List)):
        elements = [reader_of(element) for element in expr.elts]
        return lambda variables: tuple(element(variables) for element in elements)
    return lambda variables: MISSING


def _part_reader(part: ast.expr) -> Reader:
    if isinstance(part, ast.FormattedValue):
        return reader_of(part.value) if part.format_spec is None and part.conversion == -1 else reader_of(None)
    return reader_of(part)


def _joined(parts: Iterable[Any], kinds: tuple[type, ...] = (str, int)) -> Any:
    text = []
    for part in parts:
        if kind_of(part) not in kinds:
            return MISSING
        text.append(str(part))
    return "".join(text)


def _element(container: Any, index: Any) -> Any:
    kind = kind_of(container)
    if kind in (list, tuple) and type(index) is int and -len(container) <= index < len(container):
        return container[index]
    if kind in PLAIN_DICTS and kind_of(index) in (str, int):
        return dict.get(container, index, MISSING)
    return MISSING


def attribute_of(owner: Any, name: str) -> Any:
    """An attribute that simply stands there: in the instance, a slot, or the class; never a property."""
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
    for table in ("_parameters", "_buffers", "_modules"):  # of a torch.nn.Module
        entries = _table(instance, table)
        if entries is not None and name in entries:
            return entries[name]
    return MISSING


def _table(instance: dict[str, Any] | None, name: str) -> dict[str, Any] | None:
    """One of the dicts in which a torch.nn.Module keeps what it has."""
    found = None if instance is None else instance.get(name)
    return found if kind_of(found) in (dict, OrderedDict) else None


def instance_dict(owner: Any) -> dict[str, Any] | None:
    """The instance's own ``__dict__``, however its class treats attributes."""
    for kind in _mro_of(kind_of(owner)):
        found = kind.__dict__.get("__dict__")
        if type(found) is GetSetDescriptorType:
            value = found.__get__(owner)
            return value if type(value) is dict else None
    return None


# -- keys -------------------------------------------------------------------------------------------------------------


def key_text(value: Any) -> str | None:
    """The text of a key that names something: a str, an enum member, or a tuple with such parts. None for others.

    What wrappers of a model put before the names of its parameters is left out.
    """
    kind = type(value)
    if kind is str:
        text = _WRAPPERS.sub("", value) if "." in value else value
        return text[:_MAX_CHARS] if text[:1].isalnum() or _HAS_LETTER.search(text) else None  # "_" names nothing
    kind = kind_of(value)
    sort = _sorts.get(kind)
    if sort is None:
        if len(_sorts) > 1024:
            _sorts.clear()
        sort = _sorts[kind] = _sort_of(kind)
    if sort == "other":
        return None
    if sort in ("tuple", "fields"):
        parts = tuple.__iter__(value) if sort == "tuple" else (instance_dict(value) or {}).values()
        texts = [text for _, part in zip(range(_MAX_KEY_PARTS), parts, strict=False) if (text := _part_text(part))]
        return ",".join(texts) if any(not text.isdigit() for text in texts) else None
    if sort == "enum":
        name = (instance_dict(value) or {}).get("_name_")
        return f"{kind.__name__}.{name}" if type(name) is str else None
    return key_text(str.__str__(value))  # str's own, whatever the subclass defines


def _part_text(part: Any) -> str | None:
    return str(part) if type(part) is int else key_text(part)


_sorts: dict[type, str] = {}


def _sort_of(kind: type) -> str:
    """What objects of a class are as names: "tuple", "fields" (of a dataclass), "enum", "str", or "other"."""
    if tuple in _mro_of(kind):
        return "tuple"
    if "__dataclass_fields__" in kind.__dict__:
        return "fields"
    if enum.EnumMeta in _mro_of(type(kind)):
        return "enum"
    return "str" if str in _mro_of(kind) else "other"


# -- containers -------------------------------------------------------------------------------------------------------


def entries_of(container: Any) -> Any:
    """A dict that holds what the container holds under names; None for what has none, or hides them in code."""
    if type(container) is dict:
        return container
    kind = kind_of(container)
    if kind in PLAIN_DICTS:
        return container
    bases = _mro_of(kind)
    if dict in bases:
        return container
    instance = instance_dict(container)
    if instance is None:
        return None
    if UserDict in bases:
        held = instance.get("data")
        return held if type(held) is dict else None
    for table in ("_modules", "_parameters"):
        entries = _table(instance, table)
        if entries and any(base.__name__.endswith("Dict") for base in bases):
            return entries
    return None


def names_in(container: Any) -> tuple[str, ...]:
    """The names of a container's elements, in its own order: of a dict's keys, or the texts of a list."""
    entries = entries_of(container)
    if entries is not None:
        return tuple(_texts(dict.__iter__(entries)))
    if kind_of(container) in (list, tuple):
        return tuple(_texts(_firsts(container)))
    if tuple in _mro_of(kind_of(container)):
        return tuple(_texts(_fields_of(kind_of(container))))
    if is_module(container):
        return tuple(parameter_names(container))
    return tuple(_texts(instance_dict(container) or ()))


def _texts(keys: Iterable[Any]) -> Iterator[str]:
    for _, key in zip(range(_MAX_SEARCHED), keys, strict=False):
        text = f"[{key}]" if kind_of(key) in (int, float) else key_text(key)
        if text is not None:
            yield text


def aliases_in(entries: Any) -> dict[str, tuple[str, ...]]:
    """The names of tensors that a dict holds under several: tied weights."""
    keys_of: dict[int, list[Any]] = {}
    for _, (key, value) in zip(range(_MAX_SEARCHED), dict.items(entries), strict=False):
        if kind_of(value).__name__ in ("Tensor", "Parameter"):
            keys_of.setdefault(id(value), []).append(key)
    tied = [tuple(_texts(keys)) for keys in keys_of.values() if len(keys) > 1]
    return {name: names for names in tied for name in names}


def _fields_of(kind: type) -> tuple[Any, ...]:
    """Of a namedtuple's class."""
    fields = kind.__dict__.get("_fields")
    return fields if type(fields) is tuple else ()


def is_module(owner: Any) -> bool:
    """Whether this is a torch.nn.Module, by the tables that it has."""
    instance = instance_dict(owner)
    return _table(instance, "_parameters") is not None and _table(instance, "_modules") is not None


def _firsts(elements: list[Any] | tuple[Any, ...]) -> Iterator[Any]:
    """Of a list of names, the names; of a list of pairs, what stands first."""
    for element in elements[:_MAX_SEARCHED]:
        first = element[0] if type(element) is tuple and element else element
        yield None if type(first) is int else first


def parameter_names(module: Any, prefix: str = "", depth: int = 0) -> Iterator[str]:
    """Of a torch.nn.Module, read from its tables."""
    instance = instance_dict(module)
    parameters, modules = _table(instance, "_parameters"), _table(instance, "_modules")
    if parameters is None or modules is None or depth > 20:
        return
    for name in dict.__iter__(parameters):
        if type(name) is str:
            yield prefix + name
    for name in dict.__iter__(modules):
        if type(name) is str:
            yield from parameter_names(modules[name], f"{prefix}{name}.", depth + 1)


def key_by_identity(container: Any, wanted: Any) -> Any:
    """The key under which a container has this very object; `MISSING` if it has not."""
    if kind_of(container) in (list, tuple):
        return next((index for index, value in enumerate(container[:_MAX_INDEX]) if value is wanted), MISSING)
    entries = entries_of(container)
    if entries is None:
        instance = instance_dict(container)
        entries = instance if instance is not None else {}
    for _, (key, value) in zip(range(_MAX_SEARCHED), dict.items(entries), strict=False):
        if value is wanted and (kind_of(key) in (int, float) or key_text(key) is not None):
            return key
    return MISSING
