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

from ddpstats._base.files import open_regular, read_at_most
from ddpstats._base.text import shorten
from ddpstats.errors import ConfigError

Task = Literal["statistics", "tensor"]
Level = Literal["L0", "L1", "mix"]
Precision = Literal["high", "low"]
SummaryMode = Literal["statistics", "md5"]

ASYNC_MAX_BYTES = 1 << 30
ALL_MODES = frozenset({"forward", "backward", "input", "output"})

_SECTIONS = {
    "statistics": ("scope", "list", "tensor_list", "data_mode", "summary_mode"),
    "tensor": ("scope", "list", "data_mode", "summary_mode", "file_format"),
}
_OTHER_TASKS = ("run_ut", "overflow_check", "free_benchmark", "grad_probe", "structure", "exception_dump")
_KEYS = (
    "task", "dump_path", "rank", "step", "level", "enable_dataloader", "async_dump", "async_max_bytes", "precision",
)  # fmt: skip
_RANGE = re.compile(r"(\d{1,18})-(\d{1,18})", re.ASCII)
_MAX_RANGE = 1_000_000
_MAX_DIGITS = 18
_MOST_BYTES = 16 << 20  # of a file
_SHOWN = 8
_NAMES = "a list of names, or of parts of names, such as 'Functional.linear.3'"


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
        return [f"rank chooses {shorten(beyond, _SHOWN, ', ...')}, and there {counted}, counted from 0"]


# -- reading ----------------------------------------------------------------------------------------------------------


def read_config(source: str | os.PathLike[str] | Mapping[str, object]) -> DumpConfig:
    """The configuration in a JSON file, or in a mapping of the same keys.

    Raises:
        ConfigError: names the file, the key, what was given, and the legal values.
    """
    if isinstance(source, Mapping):
        return _config(_Section("the configuration given", source))
    try:
        path = os.fspath(source)
        path.encode()  # a path of bytes has no such thing
    except (TypeError, AttributeError, UnicodeEncodeError):
        raise ConfigError(
            f"the configuration is {shown(source)}, but must be the path of a JSON file, or a mapping"
        ) from None
    return _config(_Section(path, load(path)))


def _config(top: _Section) -> DumpConfig:
    top.check_keys((*_KEYS, *_SECTIONS), hidden=_OTHER_TASKS)
    if top.given.get("task") in _OTHER_TASKS:
        top.fail("task", top.given["task"], "'statistics' or 'tensor': ddpstats has no other task")
    task: Task = top.choice("task", ("statistics", "tensor"))
    sections = _sections(top)
    if top.flag("enable_dataloader"):
        top.fail("enable_dataloader", True, "false: call step() at the end of every step instead")
    config = _read(top, sections[task], task)
    _check_other_section(top, sections, config)
    _check_together(sections[task], config)
    return config


def _read(top: _Section, section: _Section, task: Task) -> DumpConfig:
    if top.given.get("level") == "L2":
        top.fail("level", "L2", "one of 'L0', 'L1', 'mix': L2, kernels, needs the profiler of the device")
    return DumpConfig(
        task=task,
        dump_path=top.directory("dump_path"),
        ranks=top.numbers("rank"),
        steps=top.numbers("step"),
        level=top.choice("level", ("L0", "L1", "mix"), default="L1"),
        async_dump=top.flag("async_dump"),
        precision=top.choice("precision", ("low", "high")),
        scope=section.scope(),
        names=section.strings("list", _NAMES),
        tensor_names=section.strings("tensor_list", _NAMES),
        data_mode=section.data_mode(),
        summary_mode=section.choice("summary_mode", ("statistics", "md5")),
        async_max_bytes=top.bytes("async_max_bytes", ASYNC_MAX_BYTES),
    )


def _sections(top: _Section) -> dict[str, _Section]:
    for name in (*_SECTIONS, *_OTHER_TASKS):
        if name in top.given and not isinstance(top.given[name], Mapping):
            top.fail(name, top.given[name], "an object: what the task of this name needs")
    found = {}
    for name, legal in _SECTIONS.items():
        found[name] = _Section(top.where, cast(Mapping[str, object], top.given.get(name, {})), f"{name}.")
        found[name].check_keys(legal)
    files = found["tensor"].given.get("file_format", "npy")
    if files not in ("npy", "bin"):
        found["tensor"].fail("file_format", files, "'npy' or 'bin' (files are .pt in any case)")
    return found


def _check_other_section(top: _Section, sections: Mapping[str, _Section], config: DumpConfig) -> None:
    """A file may have both, as templates do; but a selection in the one that is not read would do nothing."""
    task = config.task
    other: Task = "tensor" if task == "statistics" else "statistics"
    ignored = _read(top, sections[other], other)  # which may have mistakes in it
    if any(mine != default for _, mine, default in _selecting(config)):
        return
    for key, chosen, plain in _selecting(ignored):
        if chosen != plain:
            raise ConfigError(
                f"{top.where}: {other + '.' + key!r} is {shown(sections[other].given[key])}, but the task {task!r} "
                f"reads the section {task!r}, which chooses nothing: write it there, or choose the task {other!r}"
            )


def _check_together(section: _Section, config: DumpConfig) -> None:
    if config.async_dump and config.summary_mode == "md5":
        section.fail("summary_mode", "md5", "'statistics' with async_dump: a checksum waits for the device")
    if config.async_dump and config.task == "tensor" and not config.names:
        section.fail(
            "list",
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


class _Section:
    """One object of a configuration: reads the values of its keys, and complains of them by their whole names."""

    def __init__(self, where: str, given: Mapping[str, object], prefix: str = "") -> None:
        self.where, self.given, self._prefix = where, given, prefix

    def fail(self, key: str, given: object, needs: str) -> NoReturn:
        raise ConfigError(f"{self.where}: {self._prefix + key!r} is {shown(given)}, but must be {needs}")

    def check_keys(self, legal: Sequence[str], hidden: Sequence[str] = ()) -> None:
        for key in self.given:
            if key in legal or key in hidden:
                continue
            close = difflib.get_close_matches(str(key), legal, 1)
            hint = f": did you mean {self._prefix + close[0]!r}?" if close else "."
            unknown = f"unknown key {self._prefix + str(key)!r}"
            raise ConfigError(f"{self.where}: {unknown}{hint} Legal keys: {', '.join(legal)}")

    def directory(self, key: str) -> Path:
        if key not in self.given:
            raise ConfigError(f"{self.where}: {key!r} is missing: the directory to write to, as in {EXAMPLE}")
        path = self.given[key]
        text = os.fspath(path) if isinstance(path, (str, os.PathLike)) else None
        if not isinstance(text, str) or not text:  # a path may be one of bytes
            self.fail(key, path, "the path of a directory")
        if "\0" in text:
            self.fail(key, path, "the path of a directory: this has a NUL character in it")
        try:
            return Path(text).expanduser() if text.startswith("~") else Path(text)
        except RuntimeError:
            self.fail(key, path, "the path of a directory: there is no such user, or it has no home")

    def choice(self, key: str, legal: Sequence[str], default: str = "") -> Any:
        """One of the words of a Literal."""
        value = self.given.get(key, default or legal[0])
        if not isinstance(value, str) or value not in legal:
            close = _closest(value, legal) if isinstance(value, str) else []
            hint = f"; did you mean {close[0]!r}?" if close else ""
            self.fail(key, value, "one of " + ", ".join(map(repr, legal)) + hint)
        return value

    def flag(self, key: str) -> bool:
        value = self.given.get(key, False)
        if not isinstance(value, bool):
            self.fail(key, value, "true or false")
        return value

    def bytes(self, key: str, default: int) -> int:
        value = self.given.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
            self.fail(key, value, f"a whole number of bytes above 0; {default} where not given")
        return value

    def numbers(self, key: str) -> frozenset[int] | None:
        needs = 'a list of whole numbers from 0 and of ranges such as "2-5"; [] is all'
        found: set[int] = set()
        for item in self._list(key, needs):
            if isinstance(item, int) and not isinstance(item, bool) and 0 <= item < 10**_MAX_DIGITS:
                found.add(item)
            elif isinstance(item, str) and (match := _RANGE.fullmatch(item.replace(" ", ""))):
                found.update(self._range(key, item, int(match[1]), int(match[2])))
            else:
                self.fail(key, self.given[key], f"{needs}; {shown(item)} is neither")
        return frozenset(found) or None

    def _range(self, key: str, item: str, first: int, last: int) -> range:
        if first > last:
            self.fail(key, [item], f"a range from the smaller to the larger number: write '{last}-{first}'")
        if last - first > _MAX_RANGE:
            self.fail(key, [item], f"a range of at most {_MAX_RANGE:,} numbers; [] is all")
        return range(first, last + 1)

    def strings(self, key: str, needs: str) -> tuple[str, ...]:
        value = self._list(key, needs)
        if not all(isinstance(item, str) and item for item in value):
            self.fail(key, value, needs)
        return tuple(value)

    def scope(self) -> tuple[str, str] | None:
        needs = "[first, last], two full names such as 'Functional.linear.0.forward', or [] for everything"
        ends = self.strings("scope", needs)
        if len(ends) not in (0, 2):
            self.fail("scope", ends, f"{needs}; this has {len(ends)}")
        return (ends[0], ends[1]) if ends else None

    def data_mode(self) -> frozenset[str]:
        needs = "['all'], or a list of some of 'forward', 'backward', 'input', 'output'"
        value = self._list("data_mode", needs)
        for item in value:
            if not isinstance(item, str) or item not in {*ALL_MODES, "all"}:
                self.fail("data_mode", value, f"{needs}; {shown(item)} is none of them")
        modes = set(value) or {"all"}
        if "all" in modes:
            if len(modes) > 1:
                self.fail("data_mode", value, f"{needs}; 'all' stands alone")
            return ALL_MODES
        for pair in ({"forward", "backward"}, {"input", "output"}):
            modes |= pair if not modes & pair else set()
        return frozenset(modes)

    def _list(self, key: str, needs: str) -> Sequence[Any]:
        value = self.given.get(key, [])
        if not isinstance(value, (list, tuple)):
            self.fail(key, value, needs)
        return value


def _closest(value: str, legal: Sequence[str]) -> list[str]:
    """By letters, whether large or small."""
    same = [word for word in legal if word.lower() == value.lower()]
    return same or difflib.get_close_matches(value, legal, 1, 0.5)


EXAMPLE = '{"task": "statistics", "dump_path": "dump", "step": [0], "level": "mix"}'


def load(path: str) -> Mapping[str, object]:
    """The object in a JSON file. Raises `ConfigError`, which names the file and what is wrong with it."""
    try:
        with open_regular(path) as file:
            text = read_at_most(file, _MOST_BYTES).decode("utf-8-sig")
        given = json.loads(text, object_pairs_hook=lambda pairs: _once(path, pairs))
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
