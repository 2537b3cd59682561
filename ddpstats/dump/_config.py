"""What to dump: the configuration file, and the errors it can hold.

1. The file is read as JSON; a key given twice is an error, for only one of the two could count.
2. Every key is checked for its name, then its type, then its value; then what goes together is checked.

The keys and their meaning are those of the dump configurations of other tools, so that a file written for one of them
can be used unchanged. What cannot be done here is refused, and never ignored in silence.
"""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn, cast

from ddpstats._base.wording import listed
from ddpstats.errors import ConfigError

Task = Literal["statistics", "tensor"]
Level = Literal["L0", "L1", "mix"]
Precision = Literal["high", "low"]
SummaryMode = Literal["statistics", "md5"]

ASYNC_MAX_BYTES = 1 << 30
ALL_MODES = frozenset({"forward", "backward", "input", "output"})

_TASKS, _LEVELS = ("statistics", "tensor"), ("L0", "L1", "mix")
_SECTIONS = {
    "statistics": ("scope", "list", "tensor_list", "data_mode", "summary_mode"),
    "tensor": ("scope", "list", "data_mode", "summary_mode", "file_format"),
}
_OTHER_TASKS = (
    "run_ut",
    "overflow_check",
    "free_benchmark",
    "grad_probe",
    "structure",
    "exception_dump",
)
_KEYS = (
    "task", "dump_path", "rank", "step", "level", "enable_dataloader", "async_dump", "async_max_bytes", "precision",
)  # fmt: skip
_RANGE = re.compile(r"(\d{1,18})-(\d{1,18})", re.ASCII)
_MAX_RANGE = 1_000_000
_MAX_DIGITS = 18
_SHOWN = 8


@dataclass(frozen=True)
class DumpConfig:
    """What is dumped, when and where to. Made by `read_config`.

    Attributes:
        task: "statistics" of every tensor, or the "tensor" itself as well.
        dump_path: the directory that gets ``step{N}/rank{R}/``.
        ranks, steps: which; None is all.
        level: "L0" modules, "L1" functions, "mix" both.
        async_dump: nothing is written, and no device is waited for, before the step has ended. A run that a signal
            kills in the step leaves nothing of it.
        precision: accepted for the sake of existing files, without a difference: statistics are always computed in
            float32 or better, for the norm of a large float16 tensor overflows in its own type.
        scope: (first, last) name, both included, in execution order; None is all.
        names: names, or parts of names, of what is wanted; empty is all.
        tensor_names: parts of the names of which the tensors are saved too, under the task "statistics".
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
    precision: Precision = "low"
    scope: tuple[str, str] | None = None
    names: tuple[str, ...] = ()
    tensor_names: tuple[str, ...] = ()
    data_mode: frozenset[str] = ALL_MODES
    summary_mode: SummaryMode = "statistics"
    async_max_bytes: int = ASYNC_MAX_BYTES

    def wants_rank(self, rank: int | None) -> bool:
        """Whether this rank dumps; a program without ranks (None) counts as rank 0."""
        return self.ranks is None or (rank or 0) in self.ranks

    def wants_step(self, step: int) -> bool:
        return self.steps is None or step in self.steps

    def problems(self, world_size: int) -> list[str]:
        """What is chosen, and will never come, in a sentence each; to be told when a run starts."""
        beyond = sorted(rank for rank in self.ranks or () if rank >= world_size)
        if not beyond:
            return []
        counted = "is 1 rank" if world_size == 1 else f"are {world_size} ranks"
        return [f"rank chooses {listed(beyond, _SHOWN, ', ...')}, and there {counted}, counted from 0"]


# -- reading ----------------------------------------------------------------------------------------------------------


def read_config(source: str | os.PathLike[str] | Mapping[str, object]) -> DumpConfig:
    """The configuration in a JSON file, or in a mapping of the same keys.

    Raises:
        ConfigError: names the file, the key, what was given, and the legal values.
    """
    if isinstance(source, Mapping):
        return _Reader("the configuration given").config(source)
    try:
        path = os.fspath(source)
        path.encode()  # a path of bytes has no such thing
    except (TypeError, AttributeError, UnicodeEncodeError):
        raise ConfigError(
            f"the configuration is {shown(source)}, but must be the path of a JSON file, or a mapping"
        ) from None
    return _Reader(path).config(load(path))


class _Reader:
    """Reads one source, and knows how to complain about it."""

    def __init__(self, where: str) -> None:
        self._where = where

    def fail(self, key: str, given: object, needs: str) -> NoReturn:
        raise ConfigError(f"{self._where}: {key!r} is {shown(given)}, but must be {needs}")

    def config(self, given: Mapping[str, object]) -> DumpConfig:
        self.check_keys(given, (*_KEYS, *_SECTIONS), hidden=_OTHER_TASKS)
        task = cast(Task, self._task(given))
        section = self._section(given, task)
        self._dataloader(given)
        config = self._config(given, section, task)
        self._check_other_section(given, task, config)
        self._check_together(config)
        return config

    def _config(self, given: Mapping[str, object], section: Mapping[str, object], task: Task) -> DumpConfig:
        return DumpConfig(
            task=task,
            dump_path=self._dump_path(given),
            ranks=self._numbers(given, "rank"),
            steps=self._numbers(given, "step"),
            level=cast(Level, self._level(given)),
            async_dump=self._flag(given, "async_dump"),
            precision=cast(Precision, self._choice(given, "precision", ("low", "high"))),
            scope=self._scope(section, task),
            names=self._names(section, task, "list"),
            tensor_names=self._names(section, task, "tensor_list"),
            data_mode=self._data_mode(section, task),
            summary_mode=cast(SummaryMode, self._summary_mode(section, task)),
            async_max_bytes=self._async_max_bytes(given),
        )

    def check_keys(self, given: Mapping[str, object], legal: Sequence[str], within: str = "", hidden: Any = ()) -> None:
        for key in given:
            if key in legal or key in hidden:
                continue
            close = difflib.get_close_matches(str(key), legal, 1)
            hint = f": did you mean {within + close[0]!r}?" if close else "."
            raise ConfigError(f"{self._where}: unknown key {within + str(key)!r}{hint} Legal keys: {', '.join(legal)}")

    def _task(self, given: Mapping[str, object]) -> str:
        task = given.get("task", "statistics")
        if task in _OTHER_TASKS:
            self.fail("task", task, "'statistics' or 'tensor': ddpstats has no other task")
        return self._choice(given, "task", _TASKS)

    def _section(self, given: Mapping[str, object], task: str) -> Mapping[str, object]:
        for name in (*_SECTIONS, *_OTHER_TASKS):
            if name in given and not isinstance(given[name], Mapping):
                self.fail(name, given[name], "an object: what the task of this name needs")
        for name, legal in _SECTIONS.items():
            self.check_keys(cast(Mapping[str, object], given.get(name, {})), legal, f"{name}.")
        tensor = cast(Mapping[str, object], given.get("tensor", {}))
        if "file_format" in tensor and tensor["file_format"] not in ("npy", "bin"):
            self.fail("tensor.file_format", tensor["file_format"], "'npy' or 'bin' (files are .pt in any case)")
        return cast(Mapping[str, object], given.get(task, {}))

    def _check_other_section(self, given: Mapping[str, object], task: Task, config: DumpConfig) -> None:
        """A file may have both, as templates do; but a selection in the one that is not read would do nothing."""
        other: Task = "tensor" if task == "statistics" else "statistics"
        section = cast(Mapping[str, object], given.get(other, {}))
        ignored = self._config(given, section, other)
        for key, chosen, plain in _selecting(ignored):
            if chosen != plain and not any(mine != default for _, mine, default in _selecting(config)):
                raise ConfigError(
                    f"{self._where}: {other + '.' + key!r} is {shown(section[key])}, but the task {task!r} reads the "
                    f"section {task!r}, which chooses nothing: write it there, or choose the task {other!r}"
                )

    def _dataloader(self, given: Mapping[str, object]) -> None:
        if self._flag(given, "enable_dataloader"):
            self.fail("enable_dataloader", True, "false: call step() at the end of every step instead")

    def _dump_path(self, given: Mapping[str, object]) -> Path:
        if "dump_path" not in given:
            raise ConfigError(f"{self._where}: 'dump_path' is missing: the directory to write to, as in {EXAMPLE}")
        path = given["dump_path"]
        text = os.fspath(path) if isinstance(path, (str, os.PathLike)) else None
        if not isinstance(text, str) or not text:  # a path may be one of bytes
            self.fail("dump_path", path, "the path of a directory")
        if "\0" in text:
            self.fail("dump_path", path, "the path of a directory: this has a NUL character in it")
        try:
            return Path(text).expanduser() if text.startswith("~") else Path(text)
        except RuntimeError:
            self.fail("dump_path", path, "the path of a directory: there is no such user, or it has no home")

    def _level(self, given: Mapping[str, object]) -> str:
        if given.get("level") == "L2":
            self.fail("level", "L2", "one of 'L0', 'L1', 'mix': L2, kernels, needs the profiler of the device")
        return self._choice(given, "level", _LEVELS, default="L1")

    def _choice(
        self, given: Mapping[str, object], key: str, legal: Sequence[str], default: str = "", within: str = ""
    ) -> str:
        value = given.get(key, default or legal[0])
        if not isinstance(value, str) or value not in legal:
            close = _closest(value, legal) if isinstance(value, str) else []
            hint = f"; did you mean {close[0]!r}?" if close else ""
            self.fail(within + key, value, "one of " + ", ".join(map(repr, legal)) + hint)
        return value

    def _flag(self, given: Mapping[str, object], key: str) -> bool:
        value = given.get(key, False)
        if not isinstance(value, bool):
            self.fail(key, value, "true or false")
        return value

    def _numbers(self, given: Mapping[str, object], key: str) -> frozenset[int] | None:
        value = given.get(key, [])
        needs = 'a list of whole numbers from 0 and of ranges such as "2-5"; [] is all'
        if not isinstance(value, (list, tuple)):
            self.fail(key, value, needs)
        found: set[int] = set()
        for item in value:
            if isinstance(item, int) and not isinstance(item, bool) and 0 <= item < 10**_MAX_DIGITS:
                found.add(item)
            elif isinstance(item, str) and (match := _RANGE.fullmatch(item.replace(" ", ""))):
                found.update(self._range(key, item, int(match[1]), int(match[2])))
            else:
                self.fail(key, value, f"{needs}; {shown(item)} is neither")
        return frozenset(found) or None

    def _range(self, key: str, item: str, first: int, last: int) -> range:
        if first > last:
            self.fail(key, [item], f"a range from the smaller to the larger number: write '{last}-{first}'")
        if last - first > _MAX_RANGE:
            self.fail(key, [item], f"a range of at most {_MAX_RANGE:,} numbers; [] is all")
        return range(first, last + 1)

    def _names(self, section: Mapping[str, object], task: str, key: str) -> tuple[str, ...]:
        value = section.get(key, [])
        if not isinstance(value, (list, tuple)) or not all(isinstance(item, str) and item for item in value):
            self.fail(f"{task}.{key}", value, "a list of names, or of parts of names, such as 'Functional.linear.3'")
        return tuple(value)

    def _scope(self, section: Mapping[str, object], task: str) -> tuple[str, str] | None:
        value = section.get("scope", [])
        needs = "[first, last], two full names such as 'Functional.linear.0.forward', or [] for everything"
        if not isinstance(value, (list, tuple)) or not all(isinstance(item, str) and item for item in value):
            self.fail(f"{task}.scope", value, needs)
        if len(value) not in (0, 2):
            self.fail(f"{task}.scope", value, f"{needs}; this has {len(value)}")
        return (value[0], value[1]) if value else None

    def _data_mode(self, section: Mapping[str, object], task: str) -> frozenset[str]:
        value, key = section.get("data_mode", ["all"]), f"{task}.data_mode"
        needs = "['all'], or a list of some of 'forward', 'backward', 'input', 'output'"
        if not isinstance(value, (list, tuple)):
            self.fail(key, value, needs)
        for item in value:
            if not isinstance(item, str) or item not in {*ALL_MODES, "all"}:
                self.fail(key, value, f"{needs}; {shown(item)} is none of them")
        modes = set(value) or {"all"}
        if "all" in modes:
            if len(modes) > 1:
                self.fail(key, value, f"{needs}; 'all' stands alone")
            return ALL_MODES
        for pair in ({"forward", "backward"}, {"input", "output"}):
            modes |= pair if not modes & pair else set()
        return frozenset(modes)

    def _summary_mode(self, section: Mapping[str, object], task: str) -> str:
        return self._choice(section, "summary_mode", ("statistics", "md5"), within=f"{task}.")

    def _async_max_bytes(self, given: Mapping[str, object]) -> int:
        value = given.get("async_max_bytes", ASYNC_MAX_BYTES)
        if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
            self.fail("async_max_bytes", value, f"a whole number of bytes above 0; {ASYNC_MAX_BYTES} where not given")
        return value

    def _check_together(self, config: DumpConfig) -> None:
        if not config.async_dump:
            return
        if config.summary_mode == "md5":
            self.fail(
                f"{config.task}.summary_mode", "md5", "'statistics' with async_dump: a checksum waits for the device"
            )
        if config.task == "tensor" and not config.names:
            self.fail(
                "tensor.list",
                [],
                "a list of names that is not empty, for async_dump holds all these tensors in memory until the step "
                "ends. Dump the task 'statistics' first, and take the names from there",
            )


def _selecting(config: DumpConfig) -> list[tuple[str, object, object]]:
    """The keys of a section that choose something: what they are, and what they are where nobody chose."""
    return [
        ("scope", config.scope, None),
        ("list", config.names, ()),
        ("tensor_list", config.tensor_names, ()),
        ("data_mode", config.data_mode, ALL_MODES),
        ("summary_mode", config.summary_mode, "statistics"),
    ]


def _closest(value: str, legal: Sequence[str]) -> list[str]:
    """By letters, whether large or small."""
    same = [word for word in legal if word.lower() == value.lower()]
    return same or difflib.get_close_matches(value, legal, 1, 0.5)


EXAMPLE = '{"task": "statistics", "dump_path": "dump", "step": [0], "level": "mix"}'


def load(path: str) -> Mapping[str, object]:
    """The object in a JSON file. Raises `ConfigError`, which names the file and what is wrong with it."""
    try:
        with open(path, encoding="utf-8-sig") as file:
            given = json.load(file, object_pairs_hook=lambda pairs: _once(path, pairs))
    except ConfigError:
        raise
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}. Is this the right path?") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: is not a text file in UTF-8") from None
    except json.JSONDecodeError as error:
        hint = _python_word(error)
        raise ConfigError(
            f"{path}: is not legal JSON: {error.msg}, at line {error.lineno}, column {error.colno}{hint}"
        ) from None
    except RecursionError:
        raise ConfigError(f"{path}: is nested too deep; it must hold one JSON object, as in {EXAMPLE}") from None
    except ValueError as error:  # a path with a NUL in it, a number of thousands of digits
        raise ConfigError(f"{path!r}: cannot be read: {error}") from None
    if not isinstance(given, dict):
        raise ConfigError(f"{path}: holds {shown(given)}, but must hold one JSON object, as in {EXAMPLE}")
    return given


def _once(path: str, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ConfigError(
                f"{path}: key {key!r} is given twice, as {shown(found[key])} and as {shown(value)}; "
                "leave one of them out"
            )
        found[key] = value
    return found


def _python_word(error: json.JSONDecodeError) -> str:
    """What JSON writes in place of the word of Python's at which it stopped; empty where there is none."""
    word = re.match(r"True|False|None", error.doc[error.pos :])
    written = {"True": "true", "False": "false", "None": "null"}
    return f": JSON writes {written[word[0]]}, not {word[0]}" if word else ""


def shown(value: object) -> str:
    """As it stands in JSON, and not too long."""
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        text = f"a {type(value).__name__} that cannot be shown" if isinstance(value, (int, list, dict)) else repr(value)
    return text if len(text) <= 120 else text[:117] + "..."
