"""Dumps on disk, as ``ddpstats compare`` and ``ddpstats nan-origin`` read them: the ranks, their files, their entries.

Our dump.json has an entry a line, which is read when it is needed; what another tool wrote is parsed whole. If both
dump.json and dump.jsonl are there, dump.json is read: it is complete before the other one is removed.

An entry's tensors have paths: ``input.0``, ``input_kwargs.mask``, ``parameters.weight``, ``output.0``; where an
argument is a list or dict, its index or key comes after it: ``input.1.0``. Of a ``parameters_grad`` entry the
parameter's name is the path.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO, Generic, TypeVar

from ddpstats._base.files import bounded_lines, explain_version, open_regular, parse_json, read_at_most
from ddpstats._base.text import printable, shorten
from ddpstats.dump import msprobe, statistics
from ddpstats.dump.msprobe import LARGEST_ENTRY_BYTES
from ddpstats.errors import DumpError

LARGEST_FILE_BYTES = 1 << 30  # of a file that is parsed whole

_SHOWN = 8
_HEADER = re.compile(rb'\{.*"data": ?\{\r?\n')
_ENTRY = re.compile(r'("[^"\\]*(?:\\.[^"\\]*)*"): ?(\{.*\}),?\r?\n')
_END = re.compile(r"\}\}\s*")


@dataclass(frozen=True, slots=True)
class EntryText:
    """One entry of a file, in JSON.

    Attributes:
        key: its NAME.
        offset, size: of what `RankDump.reread` needs to read again, in bytes.
    """

    key: str
    text: str
    offset: int
    size: int


@dataclass(frozen=True)
class RankDump:
    """The dump of one rank and one step.

    Attributes:
        path: dump.json, or dump.jsonl.
        rank: from the directory's name; None where it says none.
        step: likewise.
        header: the fields before the entries.
        complete: False if the run ended inside this step: the newest entries may be missing.
        foreign: the entries of another tool's dump, in JSON.
        notes: what could not be read besides the entries; filled in by `stack_of` and `parent_of`.
    """

    path: Path
    rank: int | None
    step: int | None
    header: Mapping[str, Any]
    complete: bool
    foreign: Mapping[str, str] | None = field(default=None, repr=False)
    notes: list[str] = field(default_factory=list, init=False, compare=False)

    @property
    def directory(self) -> Path:
        return self.path.parent

    @property
    def task(self) -> str:
        """``statistics`` or ``tensor``."""
        return str(self.header.get("task") or "statistics")

    @property
    def level(self) -> str:
        """``L0``, ``L1`` or ``mix``; empty where the file does not say."""
        return str(self.header.get("level") or "")

    def entry_texts(self) -> Iterator[EntryText]:
        """Yield the entries as text, in execution order; `parse` parses one.

        Raises:
            DumpError: for a damaged file, when its damage is reached.
        """
        if self.foreign is not None:
            yield from (EntryText(key, text, 0, 0) for key, text in self.foreign.items())
            return
        if not self.complete:
            for offset, size, record in _records(self.path):
                yield EntryText(record["name"], json.dumps(record.get("entry")), offset, size)
            return
        with open_regular(self.path) as file:
            for offset, line in _lines(file, self.path):
                match = _ENTRY.fullmatch(line)
                if match is None:
                    if not offset or line.isspace():
                        continue
                    if _END.fullmatch(line) and not file.read(1):
                        return
                    raise explain_damage(self.path, f"the line at byte {offset:,} is no entry, or the file ends in it")
                yield EntryText(json.loads(match[1], strict=False), match[2], offset + match.start(2), len(match[2]))
        raise explain_damage(self.path, "it ends in the middle of its JSON")

    def reread(self, key: str, offset: int, size: int) -> EntryText:
        """Read an entry again of which only the position was kept."""
        if self.foreign is not None:
            return EntryText(key, self.foreign[key], 0, 0)
        with open_regular(self.path) as file:
            file.seek(offset)
            text = file.read(size).decode("ascii", "replace")
        if not self.complete:
            text = json.dumps(json.loads(text).get("entry"))
        return EntryText(key, text, offset, size)

    def entries(self) -> Iterator[DumpEntry]:
        """Yield all entries in execution order; one is in memory at a time. Raises what `entry_texts` raises."""
        return map(self.parse, self.entry_texts())

    def parse(self, member: EntryText) -> DumpEntry:
        try:
            raw = parse_json(member.text, strict=False)
        except ValueError as error:
            raise explain_damage(self.path, f"{member.key} is not JSON: {error}") from None
        _check_mapping(self.path, member.key, raw)
        return DumpEntry(member.key, raw, str(self.path))

    def stack_of(self, name: str) -> list[str]:
        """Return where the call was made, innermost line first; empty where the dump does not say."""
        return self._stacks.get(name, [])

    def parent_of(self, name: str) -> str | list[str] | None:
        """Return the module's pass that a call was made in; None at the root, and where the dump does not say."""
        return self._parents.get(name)

    @cached_property
    def _stacks(self) -> dict[str, list[str]]:
        stacks: dict[str, list[str]] = {}
        shared: dict[tuple[str, ...], list[str]] = {}  # few lines of a program make many calls
        for key, stack in self._read_beside(msprobe.STACK, "stack"):
            names, lines = msprobe.stack_of_names(key, stack)
            stacks.update(dict.fromkeys(names, shared.setdefault(tuple(lines), lines)))
        return stacks

    @cached_property
    def _parents(self) -> dict[str, str | list[str] | None]:
        return {
            name: parent if isinstance(parent, str) else msprobe.strings_in(parent) or None
            for name, parent in self._read_beside(msprobe.CONSTRUCT, "parent")
        }

    def _read_beside(self, name: str, key: str) -> Iterable[tuple[str, Any]]:
        """Return the members of the object in another file of the rank, or what the lines have under ``key``.

        Damage in another file costs a note, not the verdict on the entries.
        """
        if not self.complete:
            return ((record["name"], record.get(key)) for *_, record in _records(self.path))
        path = self.directory / name
        try:
            return _parse_whole(path).items() if path.is_file() else ()
        except DumpError as error:
            self.notes.append(f"without what {name} says: {error}")
            return ()

    def tensor_file(self, data_name: str) -> Path:
        """Return the file of a saved tensor. Raises `DumpError` for one that is not there, or lies outside the dump."""
        root = (self.directory / msprobe.TENSORS).resolve()
        path = root if "\0" in data_name else (root / data_name).resolve()
        if path.parent != root:
            raise explain_damage(self.path, f"data_name {data_name!r} leads out of {msprobe.TENSORS}")
        if not os.path.isfile(path):  # Path.is_file raises for a name that is too long
            raise explain_damage(self.path, f"{path} is not there, or no regular file")
        return path


def find_ranks(path: str | Path) -> list[RankDump]:
    """Open all ranks of one step.

    Args:
        path: a step's directory, a dump's root with one step in it, a rank's directory, or a rank's file.

    Returns:
        By ascending rank.

    Raises:
        DumpError: if there is no dump, or a root has several steps; it names what there is.
    """
    path = Path(path)
    if path.is_file() or _file_in(path) is not None:
        return [open_rank(path)]
    steps = msprobe.steps_in(path)
    if len(steps) > 1:
        names = shorten((f"step{step}" for step in steps), _SHOWN, ", ...")
        raise DumpError(
            f"{path} has {len(steps)} steps: {names}. Give the directory of one; compare takes --step N too.",
            path=str(path),
        )
    step = next(iter(steps.values())) if steps else path
    ranks = [child for child in _rank_directories(step) if _has_dump(child)]
    if not ranks:
        raise _explain_no_dump(path)
    dumps = sorted(map(open_rank, ranks), key=rank_of)
    for lower, upper in pairwise(dumps):
        if rank_of(lower) == rank_of(upper):
            names = f"{lower.directory.name} and {upper.directory.name}"
            raise DumpError(f"{path} has two dumps of rank {rank_of(lower)}: {names}. Give one.", path=str(path))
    return dumps


def rank_of(dump: RankDump) -> int:
    """Return the rank; 0 for a process without torch.distributed."""
    return dump.rank if dump.rank is not None else 0


def ranks_without_dump(step: Path) -> list[str]:
    """Return the rank directories without a dump: the rank ended early, or was not copied."""
    return sorted(child.name for child in _rank_directories(step) if not _has_dump(child))


def open_rank(path: str | Path) -> RankDump:
    """Open one rank's directory, dump.json or dump.jsonl. Raises `DumpError` naming path and fix."""
    path = _file_in(Path(path)) or Path(path)
    if not path.is_file():
        raise _explain_no_dump(path)
    header, foreign = _read_contents(path)
    version = header.get(msprobe.VERSION, msprobe.FORMAT)  # other tools' dumps have none
    if (refused := explain_version(version, msprobe.FORMAT)) is not None:
        raise DumpError(f"{path}: {refused}", path=str(path))
    directory = path.absolute().parent
    rank = msprobe.RANK_DIRECTORY.fullmatch(directory.name)
    step = msprobe.STEP_DIRECTORY.fullmatch(directory.parent.name)
    return RankDump(
        path,
        int(rank[1]) if rank is not None and rank[1] else None,
        int(step[1]) if step is not None else None,
        header,
        path.suffix != ".jsonl",
        foreign,
    )


def _has_dump(directory: Path) -> bool:
    """Return False also where the process ended before it had written the first line."""
    path = _file_in(directory)
    if path is None or path.suffix != ".jsonl":
        return path is not None
    with open_regular(path) as file:
        return file.readline(LARGEST_ENTRY_BYTES).endswith(b"\n")


def _file_in(directory: Path) -> Path | None:
    return next((directory / name for name in (msprobe.DUMP, msprobe.LINES) if (directory / name).is_file()), None)


def _rank_directories(step: Path) -> list[Path]:
    children = step.iterdir() if step.is_dir() else ()
    return [child for child in children if child.is_dir() and msprobe.RANK_DIRECTORY.fullmatch(child.name)]


def _explain_no_dump(path: Path) -> DumpError:
    content = "no such file or directory"
    if path.exists():
        names = shorten(sorted(child.name for child in path.iterdir()), _SHOWN, "") if path.is_dir() else ""
        content = f"it has {names}" if names else "it is empty"
    return DumpError(
        f"{path}: no dump here: {content}. Give the dump_path of the run, or its step or rank directory.",
        path=str(path),
    )


def notes_of(dumps: Iterable[RankDump]) -> list[str]:
    """Return what could not be read of the dumps, and which logs say what could not be recorded."""
    notes = [(dump, f"{dump.path}: {note}") for dump in dumps for note in dump.notes]
    logs = {dump.directory / msprobe.ERRORS: None for dump in dumps}
    return [note for _, note in notes] + [f"{log} says what could not be recorded" for log in logs if log.is_file()]


@contextlib.contextmanager
def printable_errors() -> Iterator[None]:
    """Raise what cannot be read as a `DumpError` that a terminal can show; around a verb that reads dumps."""
    try:
        yield
    except DumpError as error:  # it may quote names from a dump
        raise DumpError(printable([str(error)]), path=error.path) from None
    except BrokenPipeError:  # the reader of our output has gone, which is no fault of the dump
        raise
    except OSError as error:
        where = "" if error.filename is None else f"{error.filename}: "
        raise DumpError(f"{where}{error.strerror or error}. Check the path and its permissions.") from None


# -- the files of one rank ---------------------------------------------------------------------------------------------


def _read_contents(path: Path) -> tuple[dict[str, Any], dict[str, str] | None]:
    """Return the fields before the entries and, of another tool's dump, the entries in JSON."""
    with open_regular(path) as file:
        first = file.readline(LARGEST_ENTRY_BYTES)
    if path.suffix != ".jsonl":
        if _HEADER.fullmatch(first) is None:
            return _read_foreign(path)
        first += b"}}"
    try:
        header = parse_json(first, strict=False)
    except ValueError as error:
        raise explain_damage(path, f"its first line is no JSON object: {error}") from None
    _check_mapping(path, "its first line", header)
    return header, None


def _read_foreign(path: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the fields before the entries and, in JSON, the entries: parsed they take three times the memory."""
    header = _parse_whole(path)
    data = header.pop("data", None)
    _check_mapping(path, '"data"', data)
    for name, entry in data.items():
        _check_mapping(path, name, entry)
    try:
        return header, {name: json.dumps(entry) for name, entry in data.items()}
    except RecursionError:
        raise explain_damage(path, "it is nested too deeply") from None


def _parse_whole(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file, which is parsed whole. Raises `DumpError`."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > LARGEST_FILE_BYTES:
            raise DumpError(
                f"{path} has {size:,} bytes, and a file that has not ddpstats' own layout is read only up to "
                f"{LARGEST_FILE_BYTES:,}. Dump fewer entries, by list or scope.",
                path=str(path),
            )
        try:
            whole = parse_json(read_at_most(file, LARGEST_FILE_BYTES), strict=False)
        except ValueError as error:
            raise explain_damage(path, f"it is not JSON: {error}") from None
    _check_mapping(path, "it", whole)
    return whole  # type: ignore[no-any-return]


def _check_mapping(path: Path, what: str, value: Any) -> None:
    if not isinstance(value, dict):
        raise explain_damage(path, f"{what} is {str(value)[:60]!r}, and should be an object")


def explain_damage(path: Path, problem: str) -> DumpError:
    return DumpError(
        f"{path}: {problem}. It is damaged, not copied completely, or no statistics dump: copy it again, or dump the "
        "step again.",
        path=str(path),
    )


def _lines(file: BinaryIO, path: Path) -> Iterator[tuple[int, str]]:
    """Yield the lines, each with the byte at which it begins."""
    offset = 0
    try:
        for line in bounded_lines(file, LARGEST_ENTRY_BYTES):
            yield offset, line.decode("ascii")
            offset += len(line)
    except ValueError as error:
        raise explain_damage(path, f"at byte {offset:,}: {error}") from None


def _records(path: Path) -> Iterator[tuple[int, int, dict[str, Any]]]:
    """Yield the lines of a dump.jsonl after the first: offset, size and object. A broken last line is left out."""
    with open_regular(path) as file:
        for offset, line in _lines(file, path):
            try:
                record = parse_json(line, strict=False)
                if offset and not isinstance(record["name"], str):
                    raise ValueError("its name is no string")
            except (ValueError, TypeError, KeyError) as error:
                if not line.endswith("\n") or not file.read(1):  # killed while it was written
                    return
                raise explain_damage(path, f"the line at byte {offset:,} is not one of a dump: {error!r}") from None
            if offset:
                yield offset, len(line), record


# -- one entry ---------------------------------------------------------------------------------------------------------

T = TypeVar("T")

_SECTIONS = ("input_args", "input", "input_kwargs", "parameters", "output")  # others are gradients of parameters
_STATISTICS = statistics.statistic_keys()
_DEEPEST = 64
_READ: dict[str, Callable[[Any], Any]] = {  # by a tensor's fields beside its statistics
    **dict.fromkeys(("data_name", "md5", "device"), statistics.read_text),
    **dict.fromkeys(("data_ptr", "storage_offset", "storage_ptr", "storage_bytes"), statistics.read_count),
    **dict.fromkeys(("storage_id", "stream", "moment"), statistics.read_count),
    "stride": statistics.read_index,
}
_TENSOR = "torch.Tensor"
_NULL: Mapping[str, Any] = {"type": "None", "value": None}


class _Field(Generic[T]):
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

    value = _Field[Any]("value")
    max = _Field[float]("Max", statistics.read_number)
    min = _Field[float]("Min", statistics.read_number)
    requires_grad = _Field[bool]("requires_grad")
    data_name = _Field[str]("data_name")
    md5 = _Field[str]("md5")
    nan_count = _Field[int]("nan_count")
    inf_count = _Field[int]("inf_count")
    device = _Field[str]("device")
    stride = _Field[tuple[int, ...]]("stride", tuple)
    data_ptr = _Field[int]("data_ptr")
    storage_offset = _Field[int]("storage_offset")
    storage_ptr = _Field[int]("storage_ptr")
    storage_bytes = _Field[int]("storage_bytes")
    storage_id = _Field[int]("storage_id")
    stream = _Field[int]("stream")
    moment = _Field[int]("moment")

    @property
    def type(self) -> str:
        return str(self.raw.get("type"))

    @property
    def is_tensor(self) -> bool:
        return self.raw.get("type") == _TENSOR or "dtype" in self.raw

    @property
    def has_numbers(self) -> bool:
        """Return whether it was measured, or has no elements that could be; nothing is known of another tensor."""
        return 0 in self.shape or any(self.raw.get(key) is not None for key in _STATISTICS)

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
        """Decide by the count, or without a count by Max and Min: a norm may overflow where no element does."""
        if count is not None:
            return count > 0
        return any(value is not None and is_such(value) for value in (self.max, self.min))

    @property
    def dtype(self) -> str:
        return str(self.raw.get("dtype", f"<class '{self.type}'>"))

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.raw.get("shape") or ())


@dataclass(frozen=True)
class DumpEntry:
    """An entry: its NAME, and what the dump has under it. Walking it raises `DumpError` where a field is not usable."""

    name: str
    raw: Mapping[str, Any]
    source: str = ""  # the file, for messages

    @property
    def is_recompute(self) -> bool:
        return self.raw.get("is_recompute") is True

    @property
    def is_dropped(self) -> bool:
        """Return whether a dump had no memory left for its tensors."""
        return self.raw.get("dropped") is True

    @cached_property
    def has_gradients_of_parameters(self) -> bool:
        return msprobe.parse_name(self.name).direction == msprobe.GRADIENTS

    @cached_property
    def inputs(self) -> list[tuple[str, DumpLeaf]]:
        """Tensors that went in, arguments by name included; parameters are not among them."""
        return self._of_sections("input", "input_kwargs")

    @cached_property
    def outputs(self) -> list[tuple[str, DumpLeaf]]:
        return self._of_sections("output")

    def _of_sections(self, *sections: str) -> list[tuple[str, DumpLeaf]]:
        if self.has_gradients_of_parameters:  # whose names may be those of sections
            return []
        return [item for item in self._tensors if item[0].partition(".")[0] in sections]

    def leaves(self) -> Iterator[tuple[str, DumpLeaf]]:
        """Yield all tensors, in the order of the dump."""
        return iter(self._tensors)

    @cached_property
    def _tensors(self) -> list[tuple[str, DumpLeaf]]:
        return [item for item in self.values() if item[1].is_tensor]

    def values(self, *, nulls: bool = False) -> Iterator[tuple[str, DumpLeaf]]:
        """Yield all tensors and plain values, in the order of the dump; with ``nulls`` those that are None too."""
        if _is_deep(self.raw):
            raise self._explain_damage(f"it is nested more than {_DEEPEST} deep")
        for key, section in self.raw.items():
            is_gradient = self.has_gradients_of_parameters
            if (is_gradient or key not in _SECTIONS) and isinstance(section, list) and len(section) == 1:
                section = section[0]  # {"weight": [leaf]}
            for path, raw in _leaves(section, "input" if key == "input_args" and not is_gradient else key, nulls):
                leaf = DumpLeaf(raw)
                if leaf.is_tensor and (problem := _find_problem(raw)) is not None:
                    raise self._explain_damage(f"{path}: {problem}")
                yield path, leaf

    def _explain_damage(self, problem: str) -> DumpError:
        return DumpError(
            f"{self.source or 'dump'}: {self.name}: {problem}. The file is damaged, or no statistics dump: dump the "
            "step again.",
            path=self.source or None,
        )


def _leaves(held: Any, path: str, nulls: bool) -> Iterator[tuple[str, Mapping[str, Any]]]:
    if isinstance(held, dict) and isinstance(held.get("type"), str):
        yield path, held
    elif isinstance(held, (dict, list)):
        for key, value in held.items() if isinstance(held, dict) else enumerate(held):
            yield from _leaves(value, f"{path}.{key}", nulls)
    elif held is None and nulls and "." in path:  # an argument, not a section that is not there
        yield path, _NULL


def _find_problem(raw: Mapping[str, Any]) -> str | None:
    """Return what is wrong with a tensor's fields, if anything."""
    shape = raw.get("shape", [])
    if not isinstance(shape, list) or not all(type(size) is int and size >= 0 for size in shape):
        return f"shape is {shape!r}, and should be a list of sizes"
    for key, read in (*((row.key, row.read) for row in statistics.STATISTICS), *_READ.items()):
        try:
            read(raw.get(key))
        except ValueError as error:
            return f"{key}: {error}"
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
