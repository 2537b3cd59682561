"""The configuration of a dump, and which entries of a step it chooses.

The keys and their meaning are msprobe's, so that its files can be used unchanged. A key that ddpstats does not have is
named in a warning; a value that ddpstats cannot carry out is a `ConfigError`.
"""

from __future__ import annotations

import json
import os
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn

from ddpstats._base.files import parse_json, read_regular
from ddpstats._base.text import shorten
from ddpstats.errors import ConfigError

Task = Literal["statistics", "tensor"]
Level = Literal["L0", "L1", "mix"]
SummaryMode = Literal["statistics", "md5"]

ASYNC_MAX_BYTES = 1 << 30
ALL_MODES = frozenset({"forward", "backward", "input", "output"})
EXAMPLE = '{"task": "statistics", "dump_path": "dump", "step": [0], "level": "mix"}'

_MOST_BYTES = 16 << 20  # of a file
_RANGE = re.compile(r"(\d{1,18})-(\d{1,18})", re.ASCII)
_LONGEST_RANGE = 1_000_000
_SHOWN = 8


@dataclass(frozen=True)
class DumpConfig:
    """A configuration, made by `read_config`: what is dumped, when and where to.

    Attributes:
        task: "statistics" of every tensor, or the "tensor" itself as well.
        dump_path: the directory that gets ``step{N}/rank{R}/``.
        ranks, steps: which; None is all.
        level: "L0" modules, "L1" functions, "mix" both.
        async_dump: nothing is written, and no device is waited for, before `StatsDump.stop` (which `StatsDump.step`
            calls where it was left out). A run that a signal kills before that leaves nothing of what it recorded since
            `StatsDump.start`.
        scope: (first, last) name, both included, in execution order; None is all.
        names: names, parts of names or ``name-regex(...)`` of what is wanted; empty is all.
        tensor_names: the same, of entries whose tensors are saved too, under the task "statistics".
        data_mode: some of "forward" and "backward", and some of "input" and "output"; never none of either pair.
        summary_mode: "md5" adds a checksum of the bytes (which is a CRC-32: the name is older than the method).
        async_max_bytes: how much an asynchronous dump may hold at once, in bytes.
    """

    task: Task
    dump_path: Path
    ranks: frozenset[int] | None = None
    steps: frozenset[int] | None = None
    level: Level = "L1"
    async_dump: bool = False
    scope: tuple[str, str] | None = None
    names: tuple[str, ...] = ()
    tensor_names: tuple[str, ...] = ()
    data_mode: frozenset[str] = ALL_MODES
    summary_mode: SummaryMode = "statistics"
    async_max_bytes: int = ASYNC_MAX_BYTES

    def wants_rank(self, rank: int | None) -> bool:
        """Return whether this rank dumps; a program without ranks (None) counts as rank 0."""
        return self.ranks is None or (rank or 0) in self.ranks

    def wants_step(self, step: int) -> bool:
        return self.steps is None or step in self.steps

    def problems(self, world_size: int) -> list[str]:
        """Return a sentence for ranks that are chosen and do not exist."""
        beyond = sorted(rank for rank in self.ranks or () if rank >= world_size)
        if not beyond:
            return []
        counted = "is 1 rank" if world_size == 1 else f"are {world_size} ranks"
        return [f"rank chooses {shorten(beyond, _SHOWN, ', ...')}, and there {counted}, counted from 0"]


# -- the keys ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Setting:
    """A key and how it is read: ``read`` raises ValueError for a value that is not ``legal``; null is the default."""

    read: Callable[[Any], Any]
    default: Any
    legal: str


def _choice(*legal: str, default: str = "", why: str = "") -> _Setting:
    words = "one of " + ", ".join(map(repr, legal)) + why
    return _Setting(lambda value: legal[legal.index(value)], default or legal[0], words)


def _read_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else _refuse()


def _refuse() -> NoReturn:
    raise ValueError


def _read_numbers(value: Any) -> frozenset[int] | None:
    numbers: set[int] = set()
    for item in _read_list(value):
        if type(item) is int and item >= 0:
            numbers.add(item)
            continue
        match = _RANGE.fullmatch(item.replace(" ", "")) if isinstance(item, str) else None
        first, last = (int(match[1]), int(match[2])) if match is not None else _refuse()
        if not first <= last <= first + _LONGEST_RANGE:
            _refuse()
        numbers.update(range(first, last + 1))
    return frozenset(numbers) or None


def _read_strings(value: Any) -> tuple[str, ...]:
    strings = tuple(_read_list(value))
    return strings if all(isinstance(item, str) and item for item in strings) else _refuse()


def _read_names(value: Any) -> tuple[str, ...]:
    names = _read_strings(value)
    try:
        for name in names:
            pattern_of(name)
    except (re.error, OverflowError, RecursionError):
        _refuse()
    return names


def _read_scope(value: Any) -> tuple[str, ...] | None:
    ends = _read_strings(value)
    return (ends or None) if len(ends) in (0, 2) else _refuse()


def _read_data_mode(value: Any) -> frozenset[str]:
    modes = set(_read_strings(value)) or {"all"}
    if modes == {"all"}:
        return ALL_MODES
    if not modes <= ALL_MODES:
        _refuse()
    for pair in ({"forward", "backward"}, {"input", "output"}):
        modes |= pair if not modes & pair else set()
    return frozenset(modes)


_NAMES = "a list of names, of parts of names such as 'Functional.linear.3', or of 'name-regex(...)'"
_NUMBERS = 'a list of whole numbers from 0 and of ranges such as "2-5" (of at most 1,000,000); [] is all'


def _only(legal: Any, words: str) -> _Setting:
    """A key of msprobe with the one value at which ddpstats does the same without it."""
    return _Setting(lambda value: None if value == legal else _refuse(), None, words)


_SECTION_KEY = _Setting(lambda value: value if isinstance(value, Mapping) else _refuse(), {}, "an object")
_KEYS = {
    "task": _choice("statistics", "tensor", why=": ddpstats has no other task"),
    "dump_path": _Setting(
        lambda value: Path(value) if isinstance(value, (str, Path)) and str(value) else _refuse(),
        None,
        f"the path of a directory, as in {EXAMPLE}",
    ),
    "rank": _Setting(_read_numbers, None, _NUMBERS),
    "step": _Setting(_read_numbers, None, _NUMBERS),
    "level": _choice(
        "L0", "L1", "mix", default="L1", why=": L2 needs the profiler of the device, and only msprobe has debug"
    ),
    "async_dump": _Setting(lambda value: value if isinstance(value, bool) else _refuse(), False, "true or false"),
    "async_max_bytes": _Setting(
        lambda value: value if type(value) is int and value > 0 else _refuse(),
        ASYNC_MAX_BYTES,
        "a whole number of bytes above 0",
    ),
    "enable_dataloader": _only(False, "false: call step() at the end of every step instead"),
    "dump_enable": _only(True, "true or left out: ddpstats reads the configuration once"),
    "load": _only({}, "left out: ddpstats does not replace what the program computes"),
    "statistics": _SECTION_KEY,
    "tensor": _SECTION_KEY,
}
_SECTION = {
    "scope": _Setting(
        _read_scope, None, "[first, last], two full names such as 'Functional.linear.0.forward', or [] for everything"
    ),
    "list": _Setting(_read_names, (), _NAMES),
    "tensor_list": _Setting(_read_names, (), _NAMES),
    "data_mode": _Setting(
        _read_data_mode, ALL_MODES, "['all'], or a list of some of 'forward', 'backward', 'input', 'output'"
    ),
    "summary_mode": _choice("statistics", "md5", why=": 'md5' adds a checksum, and only msprobe has xor"),
    "slice": _only([], "left out: ddpstats describes whole tensors"),
    "request_id": _only("", "left out: ddpstats does not know requests"),
}

_FIELDS = {"rank": "ranks", "step": "steps", "list": "names", "tensor_list": "tensor_names"}  # of `DumpConfig`, by key


def read_config(source: str | os.PathLike[str] | Mapping[str, object]) -> DumpConfig:
    """Return the configuration in a JSON file, or in a mapping of the same keys.

    Raises:
        ConfigError: names the file, the key, the value, and the legal ones.
    """
    where, top = ("the configuration given", source) if isinstance(source, Mapping) else _load(os.fspath(source))
    unknown: list[str] = []
    values = _values(where, "", top, _KEYS, unknown)
    task = values["task"]
    chosen = _values(where, f"{task}.", values[task], _SECTION, unknown)
    if unknown:
        warnings.warn(
            f"ddpstats: {where}: ignores keys that ddpstats does not have: {', '.join(sorted(unknown))}", stacklevel=3
        )
    if values["dump_path"] is None:
        raise ConfigError(f"{where}: 'dump_path' is missing: it must be {_KEYS['dump_path'].legal}")
    fields = DumpConfig.__dataclass_fields__
    named = {_FIELDS.get(key, key): value for key, value in {**values, **chosen}.items()}
    config = DumpConfig(**{field: value for field, value in named.items() if field in fields})
    if config.async_dump and config.summary_mode == "md5":
        raise ConfigError(
            f"{where}: '{task}.summary_mode' is \"md5\", but must be 'statistics' with async_dump: a checksum waits "
            "for the device"
        )
    if config.async_dump and task == "tensor" and not config.names:
        raise ConfigError(
            f"{where}: 'tensor.list' is [], but must name something with async_dump, which holds all these tensors in "
            "memory until the step ends. Dump the task 'statistics' first, and take the names from there"
        )
    return config


def _values(
    where: str, prefix: str, settings: Mapping[str, Any], keys: Mapping[str, _Setting], unknown: list[str]
) -> dict[str, Any]:
    """Return a value for every key; names that are no key are added to ``unknown``. Raises `ConfigError`."""
    unknown += [f"{prefix}{name}" for name in settings.keys() - keys.keys()]
    values = {}
    for name, key in keys.items():
        value = settings.get(name)
        try:
            values[name] = key.default if value is None else key.read(value)
        except ValueError:
            raise ConfigError(f"{where}: {prefix + name!r} is {_show(value)}, but must be {key.legal}") from None
    return values


def _load(path: str) -> tuple[str, Mapping[str, Any]]:
    """Return the path and the JSON object in its file. Raises `ConfigError`."""
    try:
        settings = parse_json(read_regular(path, _MOST_BYTES).decode("utf-8-sig"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}. Is this the right path?") from None
    except ValueError as error:
        raise ConfigError(f"{path}: is not legal JSON: {error}") from None
    if not isinstance(settings, dict):
        raise ConfigError(f"{path}: holds {_show(settings)}, but must hold one JSON object, as in {EXAMPLE}")
    return path, settings


def _show(value: object) -> str:
    """Return the value in JSON, and not too long."""
    text = json.dumps(value, ensure_ascii=False, default=repr)
    return text if len(text) <= 120 else text[:117] + "..."


# -- which entries are chosen ------------------------------------------------------------------------------------------


class DumpSelection:
    """The entries of one step that are wanted. One object per step; ask it about every entry, in execution order."""

    def __init__(self, config: DumpConfig) -> None:
        self._scope, self._modes = config.scope, config.data_mode
        self._patterns = {name: pattern_of(name) for name in config.names}
        self._inside = [] if config.level == "L1" else [pattern_of(n) for n in config.names if n.startswith("Module.")]
        self._begun, self._ending = config.scope is None, False
        self._unmatched = dict.fromkeys(config.names)
        self._seen: set[str] = set()  # of the scope's two names

    def wants(self, name: str, parents: Sequence[str]) -> bool:
        """Return whether to collect ``name``, which runs inside the modules ``parents``.

        Asked of every entry as it begins, wanted or not: a scope opens with one name and closes with another. What
        runs inside the module that closes the scope still belongs to it.
        """
        return self._in_scope(name, parents) and direction_of(name) in self._modes and self._is_listed(name, parents)

    def _in_scope(self, name: str, parents: Sequence[str]) -> bool:
        if self._scope is None:
            return True
        first, last = self._scope
        if name in self._scope and (name == first or self._begun):
            self._seen.add(name)
        if self._ending and name != last and last not in parents:
            self._begun = self._ending = False
        self._begun = self._begun or name == first
        self._ending = self._ending or (self._begun and name == last)
        return self._begun

    def _is_listed(self, name: str, parents: Sequence[str]) -> bool:
        if not self._patterns:
            return True
        matched = [part for part, pattern in self._patterns.items() if pattern.search(name)]
        for part in matched:
            self._unmatched.pop(part, None)
        return bool(matched) or any(pattern.search(parent) for pattern in self._inside for parent in parents)

    def problems(self) -> list[str]:
        """Return a sentence for names that this step did not have: they may be misspelt."""
        missing = {"scope": [name for name in self._scope or () if name not in self._seen], "list": self._unmatched}
        return [
            f"{key} has {shorten(names, _SHOWN, ', ...')}, which came in no entry that could be collected"
            for key, names in missing.items()
            if names
        ]


_REGEX = re.compile(r"name-regex\((.*)\)", re.DOTALL)


def pattern_of(part: str) -> re.Pattern[str]:
    """Compile ``part``, which may be anywhere in a name, or the expression of a ``name-regex(...)``. Raises `re.error`.

    A number at the end is the whole number: "linear.1" is not in "linear.10".
    """
    if (match := _REGEX.fullmatch(part)) is not None:
        return re.compile(match[1])
    if part.startswith("name-regex("):
        raise re.error("the parenthesis is not closed")
    return re.compile(re.escape(part) + (r"(?!\d)" if part[-1:].isdigit() else ""))


def direction_of(name: str) -> str:
    """Return "forward" or "backward"; gradients of parameters belong to "backward"."""
    return "forward" if "forward" in name.split(".")[-2:] else "backward"
