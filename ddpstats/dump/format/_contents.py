"""What stands in one rank's files: the entries as text, the stacks, and the modules' passes around them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ddpstats.dump.format._layout import CONSTRUCT, STACK
from ddpstats.dump.format._scan import Member, Progress, Scanner, parse
from ddpstats.errors import DumpError


def header(path: Path) -> dict[str, Any]:
    """What stands before the entries."""
    return _lines_header(path) if path.suffix == ".jsonl" else _header(path)


def members(path: Path, progress: Progress | None) -> Iterator[Member]:
    """The entries as text, in execution order."""
    return _lines(path, progress) if path.suffix == ".jsonl" else _members(path, progress)


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


def _header(path: Path) -> dict[str, Any]:
    """What stands before ``data`` in a dump.json."""
    with path.open("rb") as file:
        scanner = Scanner(file, path)
        scanner.enter()
        return {member.key: _parsed(member, path) for member in scanner.members(stop_at="data")}


def _members(path: Path, progress: Progress | None) -> Iterator[Member]:
    with path.open("rb") as file:
        scanner = Scanner(file, path, progress)
        scanner.enter()
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
        with path.open("rb") as file:
            scanner = Scanner(file, path)
            scanner.enter()
            yield from scanner.members()


def _parsed(member: Member, path: Path) -> Any:
    try:
        return member.value()
    except ValueError as error:
        raise damaged(path, f"{member.key} is not JSON: {error}") from None


def _lines_header(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        line = file.readline()
    try:
        header = parse(line.decode("latin-1"))
    except ValueError:
        header = None
    if not isinstance(header, dict):
        raise damaged(path, "its first line is no JSON object with task and level")
    return header


def _records(path: Path, progress: Progress | None = None) -> Iterator[tuple[dict[str, Any], str, int]]:
    """The lines of a dump.jsonl after the first, parsed, with their text and place. A broken last line is left out."""
    with path.open("rb") as file:
        offset = len(file.readline())
        for line in file:
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
            if progress is not None:
                progress(len(line))


def _lines(path: Path, progress: Progress | None) -> Iterator[Member]:
    for record, text, offset in _records(path, progress):
        yield _Line(record["name"], text, offset)


class _Line(Member):
    """A whole line; its value is the entry in it."""

    __slots__ = ()

    def value(self) -> Any:
        return parse(self.text).get("entry")
