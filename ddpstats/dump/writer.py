"""The files of one rank's step: a line per entry while it runs, the files of the format when it has ended.

1. `StepWriter.add` writes one JSON line in one system call: a process that is killed has lost no entry that was added.
2. `StepWriter.finish` makes dump.json, stack.json and construct.json, each of them complete or not there, and then
   takes the lines away. Entries are copied as they stand: nothing is encoded twice.
3. `StepWriter.reopen` goes back from 2 to 1, for a step that is collected in several pieces.

A line: ``{"name": NAME, "entry": {...}, "stack": [line, ...], "parent": NAME or null}``; the first one is a header.
An asynchronous step has no lines: `add` keeps the text, and nothing touches the disk before `finish`.

The lines' file is also the claim on the directory: of two processes that were told to write the same one, the second
gets FileExistsError. A disk that is full costs lines, and no entry: those whose line was not written stay in memory.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from ddpstats._base.files import make_private_directory, replace_file
from ddpstats.dump.msprobe import CONSTRUCT, DUMP, FORMAT, LINES, STACK, VERSION

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
        self._header = {**header, VERSION: FORMAT}
        self._at_once = at_once
        self._file: int | None = None
        self._added: list[tuple[str, int, str | None]] = []  # of each entry its name, its stack and its parent
        self._entries: list[tuple[int, int] | bytes] = []  # place and length in the lines, or the text itself
        self._stacks: list[tuple[list[str], bytes]] = []  # lines, and their text
        self._offset = 0
        self._is_claimed = False
        self._are_lines_left = False  # `finish` has failed: entries are in the lines still
        if at_once:
            self._open()

    @property
    def is_empty(self) -> bool:
        return not self._added

    def new_stack(self, lines: list[str]) -> int:
        """Lines of a stack that `add` can refer to by this number."""
        self._stacks.append((lines, encode(lines).encode()))
        return len(self._stacks) - 1

    def add(self, name: str, entry: Mapping[str, Any], stack: int, parent: str | None) -> None:
        """One entry that is complete. Raises OSError; `finish` has the entry nevertheless."""
        text = encode(entry).encode()
        self._added.append((name, stack, parent))
        if self._file is None:
            self._entries.append(text)
            return
        self._line(self._file, name, text, stack, parent)

    def finish(self) -> None:
        """Put the files of the format in place. Raises OSError; after `reopen` it can be tried again."""
        lines = self.directory / LINES
        has_lines = self._file is not None
        try:
            make_private_directory(self.directory)
            if not self._is_claimed:
                os.close(self._create())
            replace_file(self.directory / STACK, lambda file: file.write(self._stack_text()))
            replace_file(self.directory / CONSTRUCT, lambda file: file.write(self._construct_text()))
            places: list[tuple[int, int] | bytes] = []
            replace_file(self.directory / DUMP, lambda file: places.extend(self._write_dump(file)))
            self._entries = places
        except BaseException:
            self._are_lines_left = has_lines
            if self._is_claimed and not has_lines:
                lines.unlink(missing_ok=True)
            raise
        finally:
            self._close()
        lines.unlink(missing_ok=True)

    def reopen(self) -> None:
        """The step goes on after `finish`."""
        if self._at_once:
            self._open()

    def leave_lines(self) -> None:
        """The process ends inside the step: what there is stays as lines, which readers know as incomplete."""
        self._open()
        self._close()

    def abandon(self) -> None:
        """Nothing was collected, and nothing will be: the claim on the directory is given back. Raises OSError."""
        if not self._added:
            self._close()
            if self._is_claimed:
                (self.directory / LINES).unlink(missing_ok=True)

    def _close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            os.close(file)

    def forget(self) -> None:
        """In a process that was forked from the one that writes: nothing here is this one's, nor used again."""
        with contextlib.suppress(OSError):
            self._close()

    def _open(self) -> None:
        if self._file is not None:
            return
        if self._are_lines_left:
            self._file, self._are_lines_left = os.open(self.directory / LINES, _FLAGS), False
            return
        make_private_directory(self.directory)
        file = self._file = self._create()
        self._offset = 0
        self._put(file, encode(self._header).encode() + b"\n")
        before, self._entries = self._entries, []
        with self._finished() as dump:
            for (name, stack, parent), text in zip(self._added, _texts(before, dump), strict=True):
                self._line(file, name, text, stack, parent)
        (self.directory / DUMP).unlink(missing_ok=True)  # readers would take it for all there is

    def _create(self) -> int:
        """The lines' file. Raises FileExistsError where the directory is another's."""
        lines, dump = self.directory / LINES, self.directory / DUMP
        file = os.open(lines, _FLAGS | os.O_CREAT | os.O_EXCL, 0o666)
        if not self._is_claimed and dump.exists():  # the other has finished: its lines are gone
            os.close(file)
            lines.unlink()
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(dump))
        self._is_claimed = True
        return file

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
        place = self._offset + len(head), len(text)
        self._entries.append(text)
        self._put(file, head + text + tail)
        self._entries[-1] = place

    def _put(self, file: int, line: bytes) -> None:
        """All of it, or nothing."""
        rest = line
        try:
            while rest:
                rest = rest[os.write(file, rest) :]
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(file, self._offset)
            self._offset = os.fstat(file).st_size
            raise
        self._offset += len(line)

    def _write_dump(self, file: BinaryIO) -> Iterator[tuple[int, int]]:
        """Yields where each entry stands."""
        head = {"task": None, "level": None, "framework": "pytorch", "dump_data_dir": None, **self._header}
        file.write(encode(head)[:-1].encode() + b',"data":{\n')
        separator = b""
        with self._finished() as before:
            source = before if self._file is None else self._file
            for (name, *_), entry in zip(self._added, _texts(self._entries, source), strict=True):
                file.write(b"%s%s: " % (separator, encode(name).encode()))
                yield file.tell(), len(entry)
                file.write(entry)
                separator = b",\n"
        file.write(b"\n}}\n")

    def _stack_text(self) -> bytes:
        names: list[list[str]] = [[] for _ in self._stacks]
        for name, stack, _ in self._added:
            names[stack].append(name)
        used = [(these, lines) for these, (lines, _) in zip(names, self._stacks, strict=True) if these]
        return encode({str(number): stack for number, stack in enumerate(used)}).encode()

    def _construct_text(self) -> bytes:
        has_modules = self._header.get("level") != "L1"
        return encode({name: parent for name, _, parent in self._added if has_modules}).encode()


def _texts(entries: list[tuple[int, int] | bytes], file: int | None) -> Iterator[bytes]:
    """Of entries that are in memory, or stand in ``file``; one at a time is in memory then."""
    for entry in entries:
        if isinstance(entry, bytes):
            yield entry
        else:
            assert file is not None
            text = os.pread(file, entry[1], entry[0])
            if len(text) != entry[1]:
                raise OSError(errno.EIO, "an entry that was written could not be read again")
            yield text


_FLAGS = os.O_RDWR | os.O_APPEND | os.O_NOFOLLOW | getattr(os, "O_CLOEXEC", 0)
