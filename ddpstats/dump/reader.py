"""The files of a dump on disk: which ranks there are, and what stands in the files of one.

::

    dump_path/step{N}/rank{R}/dump.json  stack.json  construct.json  dump_tensor_data/*.pt
                              dump.jsonl      instead of the three while the step runs, or after a crash in it

``rank`` without a number is that of a process without torch.distributed. If both dump.json and dump.jsonl are there,
dump.json is read: it takes its place before the other one is removed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from ddpstats._base.files import bounded_lines, explain_version, open_regular
from ddpstats._base.text import printable, shorten
from ddpstats.dump.entries import DumpEntry
from ddpstats.dump.msprobe import (
    CONSTRUCT,
    DUMP,
    FORMAT,
    LINES,
    RANK_DIRECTORY,
    STACK,
    STEP_DIRECTORY,
    TENSORS,
    VERSION,
)
from ddpstats.dump.scan import LARGEST_VALUE_BYTES, Member, Scanner, parse
from ddpstats.errors import DumpError

_SHOWN = 8
T = TypeVar("T")


@dataclass(frozen=True)
class RankDump:
    """What one rank dumped of one step.

    Attributes:
        path: dump.json, or dump.jsonl.
        rank: from the directory's name; None where it says none.
        step: likewise.
        task: ``statistics`` or ``tensor``.
        level: ``L0``, ``L1`` or ``mix``; empty where the file does not say.
        complete: False if the run ended inside this step: the newest entries may be missing.
        notes: what could not be read besides the entries; filled in by `stack_of` and `parent_of`.
    """

    path: Path
    rank: int | None
    step: int | None
    task: str
    level: str
    complete: bool
    notes: list[str] = field(default_factory=list, init=False, compare=False)

    @property
    def directory(self) -> Path:
        return self.path.parent

    def members(self) -> Iterator[Member]:
        """The entries as text, in execution order, without parsing more than their ends; `entry` parses one."""
        if self.complete:
            return _members(self.path)
        return (Member(record["name"], text, offset) for record, text, offset in _records(self.path))

    def reread(self, key: str, offset: int, size: int) -> Member:
        """A member of which only the place was kept."""
        with open_regular(self.path) as file:
            file.seek(offset)
            return Member(key, file.read(size).decode("latin-1"), offset)

    def entries(self) -> Iterator[DumpEntry]:
        """All entries in execution order; one is in memory at a time.

        Raises:
            DumpError: for a damaged file, when its damage is reached.
        """
        return (self.entry(member) for member in self.members())

    def entry(self, member: Member) -> DumpEntry:
        raw = _parsed(member, self.path)
        if not self.complete:  # a whole line, with the entry in it
            raw = raw.get("entry")
        if not isinstance(raw, dict):
            raise damaged(self.path, f"{member.key} is {str(raw)[:60]!r}, and should be an object")
        return DumpEntry(member.key, raw, str(self.path))

    def stack_of(self, name: str) -> list[str]:
        """Where the call was made, innermost line first; empty where the dump does not say."""
        return self._stacks.get(name, [])

    def parent_of(self, name: str) -> str | list[str] | None:
        """The module's pass that a call was made in; None at the root, and where the dump does not say."""
        return self._parents.get(name)

    def place_of(self, name: str) -> list[str]:
        """In words: the module's pass that a call was made in, and the first three lines of its stack."""
        parent = self.parent_of(name)
        inside = [f"inside {parent if isinstance(parent, str) else ', '.join(parent)}"] if parent else []
        return [*inside, *(" ".join(line.split()) for line in self.stack_of(name)[:3])]

    @cached_property
    def _stacks(self) -> dict[str, list[str]]:
        return self._beside(STACK, read_stacks)

    @cached_property
    def _parents(self) -> dict[str, str | list[str] | None]:
        return self._beside(CONSTRUCT, read_parents)

    def _beside(self, what: str, read: Callable[[Path], dict[str, T]]) -> dict[str, T]:
        """Damage beside sound entries costs what it hit, and a note, not the verdict on the entries."""
        try:
            return read(self.path)
        except DumpError as error:
            self.notes.append(f"without what {what} says: {error}")
            return {}

    def tensor_file(self, data_name: str) -> Path:
        """The file of a saved tensor. Raises `DumpError` for one that is not there, or lies outside the dump."""
        root = (self.directory / TENSORS).resolve()
        path = root if "\0" in data_name else (root / data_name).resolve()
        if path.parent != root:
            raise damaged(self.path, f"data_name {data_name!r} leads out of {TENSORS}")
        if path.exists() and not path.is_file():
            raise DumpError(f"{path} is no regular file, and {self.path} names it. Copy it again.", path=str(path))
        if not path.is_file():
            raise DumpError(f"{path} is not there, and {self.path} names it. Copy {TENSORS} too.", path=str(path))
        return path


def find_ranks(path: str | Path) -> list[RankDump]:
    """All ranks of one step.

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
    steps = steps_in(path)
    if len(steps) > 1:
        names = shorten((f"step{step}" for step in steps), _SHOWN, ", ...")
        raise DumpError(
            f"{path} has {len(steps)} steps: {names}. Give the directory of one; compare takes --step N too.",
            path=str(path),
        )
    step = next(iter(steps.values())) if steps else path
    ranks = [child for child in _rank_directories(step) if _file_in(child) is not None]
    if not ranks:
        raise DumpError(f"{path}: {_what_is_there(path)}", path=str(path))
    dumps = sorted(map(open_rank, ranks), key=rank_of)
    for one, other in pairwise(dumps):
        if rank_of(one) == rank_of(other):
            raise DumpError(
                f"{path} has two dumps of rank {rank_of(one)}: {one.directory.name} and {other.directory.name}. They "
                "are of different runs: move one away, or give one of the two.",
                path=str(path),
            )
    return dumps


def rank_of(dump: RankDump) -> int:
    """0 for a process without torch.distributed."""
    return dump.rank if dump.rank is not None else 0


def ranks_without_dump(step: Path) -> list[str]:
    """Rank directories of a step in which there is no dump: the rank ended early, or was not copied."""
    return sorted(
        child.name for child in _children(step) if RANK_DIRECTORY.fullmatch(child.name) and _file_in(child) is None
    )


def steps_in(path: Path) -> dict[int, Path]:
    """The step directories of a dump's root, ascending."""
    found = {int(match[1]): child for child in _children(path) if (match := STEP_DIRECTORY.fullmatch(child.name))}
    return dict(sorted(found.items()))


def open_rank(path: str | Path) -> RankDump:
    """One rank's dump: its directory, or its dump.json or dump.jsonl. Raises `DumpError` naming path and fix."""
    given, path = Path(path), Path(path)
    if path.is_dir():
        path = _file_in(path) or path
    if not path.is_file():
        raise DumpError(f"{given}: {_what_is_there(given)}", path=str(given))
    said = header(path)
    directory = path.absolute().parent
    rank, step = RANK_DIRECTORY.fullmatch(directory.name), STEP_DIRECTORY.fullmatch(directory.parent.name)
    return RankDump(
        path,
        int(rank[1]) if rank is not None and rank[1] else None,
        int(step[1]) if step is not None else None,
        _word(said, "task") or "statistics",
        _word(said, "level"),
        path.suffix != ".jsonl",
    )


def _file_in(directory: Path) -> Path | None:
    return next((directory / name for name in (DUMP, LINES) if (directory / name).is_file()), None)


def _children(path: Path) -> list[Path]:
    return [child for child in path.iterdir() if child.is_dir()] if path.is_dir() else []


def _rank_directories(step: Path) -> list[Path]:
    return [child for child in _children(step) if RANK_DIRECTORY.fullmatch(child.name)]


def _what_is_there(path: Path) -> str:
    if not path.exists():
        return "there is no such file or directory. Give the dump_path of the run, or its step or rank directory."
    names = shorten(sorted(child.name for child in path.iterdir()), _SHOWN, "") if path.is_dir() else ""
    return (
        f"no dump here: a rank's directory holds {DUMP} or {LINES}, a step's directory rank directories "
        f"({'it has ' + names if names else 'it is empty'}). Give the dump_path of the run, or dump a step: "
        "ddpstats.StatsDump(config, model=model)."
    )


def _word(header: dict[str, Any], key: str) -> str:
    value = header.get(key)
    return value if isinstance(value, str) else ""


def notes_of(dumps: Iterable[RankDump]) -> list[str]:
    """What could not be read of them, with their names."""
    return [f"{dump.path}: {note}" for dump in dumps for note in dump.notes]


@contextlib.contextmanager
def sayable_errors() -> Iterator[None]:
    """For the whole of a verb that reads dumps: what cannot be read is a `DumpError` that a terminal can show."""
    try:
        yield
    except DumpError as error:  # it may quote names from a dump
        raise DumpError(printable([str(error)]), path=error.path) from None
    except BrokenPipeError:  # the reader of our output has gone, which is no fault of the dump
        raise
    except OSError as error:
        where = "" if error.filename is None else f"{error.filename}: "
        raise DumpError(f"{where}{error.strerror or error}. Check the path and its permissions.") from None


# -- what stands in one rank's files -----------------------------------------------------------------------------------


def header(path: Path) -> dict[str, Any]:
    """What stands before the entries. Raises `DumpError`, also for a format that this ddpstats does not read."""
    if path.suffix == ".jsonl":
        found = _lines_header(path)
    else:
        with _object_in(path) as scanner:
            found = {member.key: _parsed(member, path) for member in scanner.members(stop_at="data")}
    refused = explain_version(found[VERSION], FORMAT) if VERSION in found else None  # other tools' dumps have none
    if refused is not None:
        raise DumpError(f"{path}: {refused}", path=str(path))
    return found


def read_stacks(path: Path) -> dict[str, list[str]]:
    """NAME -> lines of its stack, one list shared by all that have it. Both forms of stack.json are understood."""
    shared: dict[tuple[str, ...], list[str]] = {}

    def share(lines: list[str]) -> list[str]:
        """There are many calls, and few places in the program that make them."""
        return shared.setdefault(tuple(lines), lines)

    if path.suffix == ".jsonl":
        return {record["name"]: share(_strings(record.get("stack"))) for record, *_ in _records(path)}
    file = path.parent / STACK
    stacks: dict[str, list[str]] = {}
    for member in _members_of(file):
        held = _parsed(member, file)
        if isinstance(held, list) and len(held) == 2 and all(isinstance(part, list) for part in held):
            lines = _strings(held[1])
            stacks.update(dict.fromkeys(_strings(held[0]), lines))
        else:
            stacks[member.key] = share(_strings(held))
    return stacks


def read_parents(path: Path) -> dict[str, str | list[str] | None]:
    """NAME -> that of the module's pass around it: a name, a list of names, or None at the root."""
    if path.suffix == ".jsonl":
        return {record["name"]: _parent(record.get("parent")) for record, *_ in _records(path)}
    file = path.parent / CONSTRUCT
    return {member.key: _parent(_parsed(member, file)) for member in _members_of(file)}


def _parent(held: Any) -> str | list[str] | None:
    return held if isinstance(held, str) else _strings(held) or None


def _strings(held: Any) -> list[str]:
    return [line for line in held if isinstance(line, str)] if isinstance(held, list) else []


def damaged(path: Path, problem: str) -> DumpError:
    return DumpError(f"{path}: {problem}. It is damaged, or no statistics dump: dump the step again.", path=str(path))


@contextlib.contextmanager
def _object_in(path: Path) -> Iterator[Scanner]:
    with open_regular(path) as file:
        scanner = Scanner(file, path)
        scanner.enter()
        yield scanner


def _members(path: Path) -> Iterator[Member]:
    with _object_in(path) as scanner:
        for _ in scanner.members(stop_at="data"):
            pass
        if scanner.at_end():
            raise damaged(path, 'it has no "data"')
        scanner.enter()
        yield from scanner.members()
        scanner.rest_of_braces()


def _members_of(path: Path) -> Iterator[Member]:
    """The members of a file; none where it is not there."""
    if path.is_file():
        with _object_in(path) as scanner:
            yield from scanner.members()


def _parsed(member: Member, path: Path) -> Any:
    try:
        return member.value()
    except ValueError as error:
        raise damaged(path, f"{member.key} is not JSON: {error}") from None


def _lines_header(path: Path) -> dict[str, Any]:
    try:
        with open_regular(path) as file:
            header = parse(next(bounded_lines(file, LARGEST_VALUE_BYTES), b"").decode("latin-1"))
    except ValueError:
        header = None
    if not isinstance(header, dict):
        raise damaged(path, "its first line is no JSON object with task and level")
    return header


def _records(path: Path) -> Iterator[tuple[dict[str, Any], str, int]]:
    """The lines of a dump.jsonl after the first, parsed, with their text and place. A broken last line is left out."""
    with open_regular(path) as file:
        offset = len(file.readline(LARGEST_VALUE_BYTES))
        for line in _bounded(file, path):
            text = line.decode("latin-1")
            try:
                record = parse(text)
                if not isinstance(record, dict) or not isinstance(record.get("name"), str):
                    raise ValueError("no object with a name")
            except ValueError as error:
                if not line.endswith(b"\n") or not file.read(1):  # killed while it was written
                    return
                raise damaged(path, f"the line at byte {offset:,} is not one of a dump: {error}") from None
            yield record, text, offset
            offset += len(line)


def _bounded(file: BinaryIO, path: Path) -> Iterator[bytes]:
    try:
        yield from bounded_lines(file, LARGEST_VALUE_BYTES)
    except ValueError as error:
        raise damaged(path, str(error)) from None
