"""One entry of a dump: a call or a module's pass, and the tensors and plain values it took and gave.

An entry's tensors have paths: ``input.0``, ``input_kwargs.mask``, ``parameters.weight``, ``output.0``; where an
argument is a list or dict, its index or key comes after it: ``input.1.0``. Of a ``parameters_grad`` entry the
parameter's name is the path.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, TypeVar

from ddpstats.errors import DumpError

STATISTICS = ("Max", "Min", "Mean", "Norm")
T = TypeVar("T")

_SECTIONS = ("input_args", "input", "input_kwargs", "parameters", "output")  # others are gradients of parameters
_WORDS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf, "infinity": math.inf, "-infinity": -math.inf}
_DEEPEST = 64
_KINDS: dict[str, tuple[type, str]] = {
    **dict.fromkeys(("data_name", "md5", "device"), (str, "a string")),
    **dict.fromkeys(("nan_count", "inf_count", "data_ptr", "storage_offset"), (int, "a whole number")),
    **dict.fromkeys(("storage_ptr", "storage_bytes", "storage_id"), (int, "a whole number")),
    **dict.fromkeys(("stride", "first_bad"), (list, "a list of whole numbers")),
}
_TENSOR = "torch.Tensor"
_NULL: Mapping[str, Any] = {"type": "None", "value": None}


def number(value: Any) -> float | None:
    """A statistic as a float: JSON's NaN and Infinity, the words for them, a bool, null. Raises ValueError."""
    if value is None or type(value) is float:
        return value
    if isinstance(value, (int, bool)):
        return float(value) if abs(value) < 1 << 1000 else (math.inf if value > 0 else -math.inf)
    if isinstance(value, str) and value.lower() in _WORDS:
        return _WORDS[value.lower()]
    if value in ("N/A", "None", "null"):
        return None
    raise ValueError(f"{value!r} is not a number")


class _Given(Generic[T]):
    """A field of a leaf, None where it has none; ``read`` converts its JSON."""

    def __init__(self, key: str, read: Callable[[Any], T | None] | None = None) -> None:
        self._key, self._read = key, read

    def __get__(self, leaf: DumpLeaf, kind: object) -> T | None:
        value: T | None = leaf.raw.get(self._key)
        return value if value is None or self._read is None else self._read(value)


@dataclass(frozen=True, slots=True)
class DumpLeaf:
    """A tensor, or a plain value, of an entry. What the dump does not have is None; a tensor has no ``value``."""

    raw: Mapping[str, Any]

    value = _Given[Any]("value")
    max = _Given[float]("Max", number)
    min = _Given[float]("Min", number)
    mean = _Given[float]("Mean", number)
    norm = _Given[float]("Norm", number)
    requires_grad = _Given[bool]("requires_grad")
    data_name = _Given[str]("data_name")
    md5 = _Given[str]("md5")
    nan_count = _Given[int]("nan_count")
    inf_count = _Given[int]("inf_count")
    first_bad = _Given[tuple[int, ...]]("first_bad", tuple)
    device = _Given[str]("device")
    stride = _Given[tuple[int, ...]]("stride", tuple)
    data_ptr = _Given[int]("data_ptr")
    storage_offset = _Given[int]("storage_offset")
    storage_ptr = _Given[int]("storage_ptr")
    storage_bytes = _Given[int]("storage_bytes")
    storage_id = _Given[int]("storage_id")
    stream = _Given[int]("stream")

    @property
    def type(self) -> str:
        return str(self.raw.get("type"))

    @property
    def is_tensor(self) -> bool:
        return is_tensor(self.raw)

    @property
    def is_finite(self) -> bool:
        return not (self.has_nan or self.has_infinity)

    @property
    def has_nan(self) -> bool:
        return self._has(self.nan_count, math.isnan)

    @property
    def has_infinity(self) -> bool:
        return self._has(self.inf_count, math.isinf)

    def _has(self, count: int | None, is_such: Callable[[float], bool]) -> bool:
        """Decide by the count, or where there is none by Max and Min: a norm may overflow where no element does."""
        if count is not None:
            return count > 0
        return any(value is not None and is_such(value) for value in (self.max, self.min))

    @property
    def dtype(self) -> str:
        return str(self.raw.get("dtype", f"<class '{self.type}'>"))

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.raw.get("shape") or ())


def is_tensor(raw: Mapping[str, Any]) -> bool:
    return raw.get("type") == _TENSOR or "dtype" in raw


@dataclass(frozen=True)
class DumpEntry:
    """An entry: its NAME, and what the dump has under it. Walking it raises `DumpError` where a field is not usable."""

    name: str
    raw: Mapping[str, Any]
    source: str = ""  # the file, for messages

    @property
    def is_recompute(self) -> bool:
        return self.raw.get("is_recompute") is True

    @cached_property
    def inputs(self) -> list[tuple[str, DumpLeaf]]:
        """Tensors that went in, arguments by name included; parameters are not among them."""
        return [item for item in self._tensors if item[0].partition(".")[0] in ("input", "input_kwargs")]

    @cached_property
    def outputs(self) -> list[tuple[str, DumpLeaf]]:
        return [item for item in self._tensors if item[0].partition(".")[0] == "output"]

    def leaves(self) -> Iterator[tuple[str, DumpLeaf]]:
        """Yield all tensors, in the order of the dump."""
        return iter(self._tensors)

    @cached_property
    def _tensors(self) -> list[tuple[str, DumpLeaf]]:
        return [item for item in self.values() if item[1].is_tensor]

    def values(self, *, nulls: bool = False) -> Iterator[tuple[str, DumpLeaf]]:
        """Yield all tensors and plain values, in the order of the dump; with ``nulls`` those that are None too."""
        for key, section in self.raw.items():
            if key not in _SECTIONS and isinstance(section, list) and len(section) == 1:
                section = section[0]  # a parameter's gradient: {"weight": [leaf]}
            for path, raw in _leaves(section, "input" if key == "input_args" else key, _DEEPEST, nulls):
                if (problem := _problem(raw)) is not None:
                    raise DumpError(
                        f"{self.source or 'dump'}: {self.name}: {path}: {problem}. The file is damaged, or no "
                        "statistics dump: dump the step again.",
                        path=self.source or None,
                    )
                yield path, DumpLeaf(raw)


def _leaves(held: Any, path: str, depth: int, nulls: bool) -> Iterator[tuple[str, Mapping[str, Any]]]:
    if not depth:
        raise DumpError(
            f"{path[:100]} is nested more than {_DEEPEST} deep. The file is damaged, or no statistics dump."
        )
    if isinstance(held, dict):
        if isinstance(held.get("type"), str):
            yield path, held
        else:
            for key, value in held.items():
                yield from _leaves(value, f"{path}.{key}", depth - 1, nulls)
    elif held is None and nulls and depth < _DEEPEST:  # an argument, not a section that is not there
        yield path, _NULL
    elif isinstance(held, list):
        for index, value in enumerate(held):
            yield from _leaves(value, f"{path}.{index}", depth - 1, nulls)


def _problem(raw: Mapping[str, Any]) -> str | None:
    """Return what is wrong with a leaf's fields, if anything."""
    if _is_deep(raw):
        return f"it is nested more than {_DEEPEST} deep"
    if not is_tensor(raw):
        return None
    shape = raw.get("shape", [])
    if not isinstance(shape, list) or not all(type(size) is int and size >= 0 for size in shape):
        return f"shape is {shape!r}, and should be a list of sizes"
    for key in STATISTICS:
        try:
            number(raw.get(key))
        except ValueError as error:
            return f"{key}: {error}"
    for key, (kind, words) in _KINDS.items():
        value = raw.get(key)
        parts = value if kind is list and isinstance(value, list) else ()
        if value is not None and not (isinstance(value, kind) and all(type(part) is int for part in parts)):
            return f"{key} is {value!r}, and should be {words}"
    return None


def _is_deep(raw: Mapping[str, Any]) -> bool:
    """Return whether something in it is nested so deep that walking it would exhaust the stack."""
    level: list[Any] = [value for value in raw.values() if isinstance(value, (list, dict)) and value]
    for _ in range(_DEEPEST):
        if not level:
            return False
        parts = (value.values() if isinstance(value, dict) else value for value in level)
        level = [value for part in parts for value in part if isinstance(value, (list, dict))]
    return True
