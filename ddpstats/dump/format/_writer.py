"""The files of one rank's step: a line per entry while it runs, the files of the format when it has ended.

1. `StepWriter.add` writes one JSON line in one system call: a process that is killed has lost no entry that was added.
2. `StepWriter.finish` makes dump.json, stack.json and construct.json, each of them complete or not there, and then
   takes the lines away. Entries are copied as they stand: nothing is encoded twice.
3. `StepWriter.reopen` goes back from 2 to 1, for a step that is collected in several pieces.

A line: ``{"name": NAME, "entry": {...}, "stack": [line, ...], "parent": NAME or null}``; the first one is a header.
An asynchronous step has no lines: `add` keeps the text, and nothing touches the disk before `finish`.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from ddpstats._atomic import replace_file

DUMP, LINES, STACK, CONSTRUCT, ERRORS = "dump.json", "dump.jsonl", "stack.json", "construct.json", "dump_error_info.log"
FORMAT = "ddpstats 1"

encode: Callable[[Any], str] = json.JSONEncoder(separators=(",", ":"), check_circular=False).encode


class StepWriter:
    """Writes one directory.

    Args:
        directory: of this step and rank; it is made when the first thing is written.
        header: ``task``, ``level`` and ``dump_data_dir``.
        at_once: whether every entry is on the disk when `add` returns; otherwise all are, after `finish`.
    """

    def __init__(self, directory: Path, header: Mapping[str, Any], *, at_once: bool) -> None:
        self.directory = directory
        self._header = dict(header)
        self._at_once = at_once
        self._file: int | None = None
        self._names: list[str] = []
        self._entries: list[tuple[int, int] | bytes] = []  # place and length in the lines, or the text itself
        self._stacks: list[tuple[list[str], bytes]] = []  # lines, and their text
        self._stack_of: list[int] = []
        self._parents: list[str | None] = []
        self._offset = 0
        if at_once:
            self._open()

    def new_stack(self, lines: list[str]) -> int:
        """Lines of a stack that `add` can refer to by this number."""
        self._stacks.append((lines, encode(lines).encode()))
        return len(self._stacks) - 1

    def add(self, name: str, entry: Mapping[str, Any], stack: int, parent: str | None) -> None:
        """One entry that is complete. Raises OSError."""
        text = encode(entry).encode()
        self._names.append(name)
        self._stack_of.append(stack)
        self._parents.append(parent)
        if self._file is None:
            self._entries.append(text)
            return
        self._line(self._file, name, text, stack, parent)

    def finish(self) -> None:
        """Put the files of the format in place. Raises OSError."""
        self.directory.mkdir(parents=True, exist_ok=True)
        replace_file(self.directory / STACK, lambda file: file.write(self._stack_text()))
        replace_file(self.directory / CONSTRUCT, lambda file: file.write(self._construct_text()))
        places: list[tuple[int, int] | bytes] = []
        replace_file(self.directory / DUMP, lambda file: places.extend(self._write_dump(file)))
        self._entries = places
        if self._file is not None:
            os.close(self._file)
            self._file = None
            (self.directory / LINES).unlink(missing_ok=True)

    def reopen(self) -> None:
        """The step goes on after `finish`."""
        if self._at_once and self._file is None:
            self._open()

    def leave_lines(self) -> None:
        """The process ends inside the step: what there is stays as lines, which readers know as incomplete."""
        self._open()
        assert self._file is not None
        os.close(self._file)
        self._file = None

    def _open(self) -> None:
        if self._file is not None:
            return
        self.directory.mkdir(parents=True, exist_ok=True)
        file = os.open(self.directory / LINES, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND | _CLOSE, 0o666)
        self._file, self._offset = file, 0
        self._put(file, encode({**self._header, "format": FORMAT}).encode() + b"\n")
        before, self._entries = self._entries, []
        with self._finished() as dump:
            texts = _texts(before, dump)
            for name, text, stack, parent in zip(self._names, texts, self._stack_of, self._parents, strict=True):
                self._line(file, name, text, stack, parent)
        (self.directory / DUMP).unlink(missing_ok=True)  # readers would take it for all there is

    @contextlib.contextmanager
    def _finished(self) -> Iterator[int | None]:
        """The dump.json of the pieces before this one, to read from; None where there is none."""
        path = self.directory / DUMP
        file = os.open(path, os.O_RDONLY) if path.exists() else None
        try:
            yield file
        finally:
            if file is not None:
                os.close(file)

    def _line(self, file: int, name: str, text: bytes, stack: int, parent: str | None) -> None:
        head = b'{"name":%s,"entry":' % encode(name).encode()
        tail = b',"stack":%s,"parent":%s}\n' % (self._stacks[stack][1], encode(parent).encode())
        self._entries.append((self._offset + len(head), len(text)))
        self._put(file, head + text + tail)

    def _put(self, file: int, line: bytes) -> None:
        self._offset += len(line)
        while line:
            line = line[os.write(file, line) :]

    def _write_dump(self, file: BinaryIO) -> Iterator[tuple[int, int]]:
        """Yields where each entry stands."""
        head = {"task": None, "level": None, "framework": "pytorch", "dump_data_dir": None, **self._header}
        file.write(encode(head)[:-1].encode() + b',"data":{\n')
        separator = b""
        with self._finished() as before:
            source = before if self._file is None else self._file
            for name, entry in zip(self._names, _texts(self._entries, source), strict=True):
                file.write(b"%s%s: " % (separator, encode(name).encode()))
                yield file.tell(), len(entry)
                file.write(entry)
                separator = b",\n"
        file.write(b"\n}}\n")

    def _stack_text(self) -> bytes:
        names: list[list[str]] = [[] for _ in self._stacks]
        for name, stack in zip(self._names, self._stack_of, strict=True):
            names[stack].append(name)
        used = [(these, lines) for these, (lines, _) in zip(names, self._stacks, strict=True) if these]
        return encode({str(number): stack for number, stack in enumerate(used)}).encode()

    def _construct_text(self) -> bytes:
        has_modules = self._header.get("level") != "L1"
        return encode(dict(zip(self._names, self._parents, strict=True)) if has_modules else {}).encode()


def _texts(entries: list[tuple[int, int] | bytes], file: int | None) -> Iterator[bytes]:
    """Of entries that are in memory, or stand in ``file``; one at a time is in memory then."""
    for entry in entries:
        if isinstance(entry, bytes):
            yield entry
        else:
            assert file is not None
            yield os.pread(file, entry[1], entry[0])


_CLOSE = getattr(os, "O_CLOEXEC", 0)
