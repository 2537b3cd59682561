"""The files of one rank's step: a line per entry while it runs, the files of the format when it is over.

1. `StepWriter.open` makes the file of lines. It is also the claim on the directory: a second process cannot make it.
2. `StepWriter.add` writes one JSON line in one system call: a process that is killed loses no entry that was added.
3. `StepWriter.finish` makes dump.json, stack.json and construct.json, each of them complete or absent, and then removes
   the lines. Entries are copied as they are: nothing is encoded twice.

A line: ``{"name": NAME, "entry": {...}, "stack": [line, ...], "parent": NAME or null}``; the first one is a header.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import math
import os
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import msgspec
import torch
from torch import Tensor

from ddpstats._base.files import TEMPORARY_PREFIX, make_private_directory, replace_files
from ddpstats._observe.torch_compat import without_tensor_classes
from ddpstats._ranks.device import bytes_in
from ddpstats.dump.msprobe import CONSTRUCT, DUMP, FORMAT, LARGEST_ENTRY_BYTES, LINES, STACK, VERSION, file_name

encode: Callable[[Any], str] = json.JSONEncoder(separators=(",", ":"), check_circular=False, default=float).encode
_encode_plain = msgspec.json.Encoder().encode
_FLAGS = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | getattr(os, "O_CLOEXEC", 0)


def as_json(number: float) -> Any:
    """Return a number of an entry. Of those that are not finite msgspec makes null, Python's JSON a word for each."""
    return number if math.isfinite(number) else msgspec.Raw(encode(number).encode())


def _encode_entry(entry: Mapping[str, Any]) -> bytes:
    """Return an entry as JSON, in ASCII; msgspec takes an eighth of the time that Python takes."""
    with contextlib.suppress(UnicodeEncodeError, TypeError):  # surrogates, and subclasses of str
        if (text := _encode_plain(entry)).isascii():
            return text
    return encode(entry).encode()


class _Line(NamedTuple):
    """An entry in the file of lines: ``size`` bytes of JSON from ``offset``."""

    name: str
    stack: int
    parent: str | None
    offset: int
    size: int


class StepWriter:
    """Writes the entries of one rank's step into its directory.

    Args:
        directory: of this step and rank.
        header: ``task``, ``level`` and ``dump_data_dir``.
    """

    def __init__(self, directory: Path, header: Mapping[str, Any]) -> None:
        self.directory = directory
        self._header = {**header, VERSION: FORMAT}
        self._file: int | None = None
        self._lines: list[_Line] = []
        self._stacks: list[tuple[list[str], bytes]] = []  # lines, and their text
        self._size = 0  # of the file
        self._append_error: OSError | None = None

    def open(self) -> int:
        """Make the directory and the file of lines, once. Raises FileExistsError where the directory has a dump."""
        if self._file is not None:
            return self._file
        make_private_directory(self.directory)
        lines, dump = self.directory / LINES, self.directory / DUMP
        file = os.open(lines, _FLAGS, 0o666)
        if dump.exists():  # another process has finished: its lines are gone
            os.close(file)
            lines.unlink()
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(dump))
        self._file = file
        try:
            self._append(file, encode(self._header).encode() + b"\n")
        except OSError:
            self.close()
            lines.unlink()
            raise
        return file

    def new_stack(self, lines: list[str]) -> int:
        """Return a number by which `add` can refer to the lines of a stack."""
        self._stacks.append((lines, encode(lines).encode()))
        return len(self._stacks) - 1

    def add(self, name: str, entry: Mapping[str, Any], stack: int, parent: str | None) -> None:
        """Write an entry that is complete, with numbers by `as_json`.

        Raises OSError, or ValueError for one that is too large to be read again; the dump lacks it then.
        """
        file, text = self.open(), _encode_entry(entry)
        head = b'{"name":%s,"entry":' % encode(name).encode()
        tail = b',"stack":%s,"parent":%s}\n' % (self._stacks[stack][1], encode(parent).encode())
        line = _Line(name, stack, parent, self._size + len(head), len(text))
        if (size := len(head) + len(text) + len(tail)) > LARGEST_ENTRY_BYTES:
            raise ValueError(f"the entry takes {size:,} bytes, of which readers take {LARGEST_ENTRY_BYTES:,}")
        self._append(file, head + text + tail)
        self._lines.append(line)

    def finish(self) -> None:
        """Put the files of the format in the place of the lines. Raises OSError; the lines stay then."""
        file = self.open()
        try:
            if self._append_error is not None:
                raise self._append_error
            writes: dict[str, Callable[[BinaryIO], object]] = {
                STACK: lambda output: output.write(self._stack_text()),
                CONSTRUCT: lambda output: output.write(self._construct_text()),
                DUMP: lambda output: self._write_dump(file, output),
            }
            replace_files({self.directory / name: write for name, write in writes.items()})
        finally:
            self.close()
        (self.directory / LINES).unlink()

    def close(self) -> None:
        """Leave the lines as they are."""
        file, self._file = self._file, None
        if file is not None:
            os.close(file)

    def _append(self, file: int, line: bytes) -> None:
        """Write all of it, or nothing."""
        rest = line
        try:
            while rest:
                rest = rest[os.write(file, rest) :]
        except OSError as error:
            self._append_error = error
            with contextlib.suppress(OSError):
                os.ftruncate(file, self._size)
            raise
        self._size += len(line)

    def _write_dump(self, file: int, output: BinaryIO) -> None:
        head = {"task": None, "level": None, "framework": "pytorch", "dump_data_dir": None, **self._header}
        output.write(encode(head)[:-1].encode() + b',"data":{\n')
        for number, line in enumerate(self._lines):
            text = os.pread(file, line.size, line.offset)
            if len(text) != line.size:
                raise OSError(errno.EIO, "an entry that was written could not be read again")
            output.write(b"%s%s: %s" % (b",\n" if number else b"", encode(line.name).encode(), text))
        output.write(b"\n}}\n")

    def _stack_text(self) -> bytes:
        names: list[list[str]] = [[] for _ in self._stacks]
        for line in self._lines:
            names[line.stack].append(line.name)
        used = [(entries, lines) for entries, (lines, _) in zip(names, self._stacks, strict=True) if entries]
        return encode({str(number): stack for number, stack in enumerate(used)}).encode()

    def _construct_text(self) -> bytes:
        has_modules = self._header.get("level") != "L1"
        return encode({line.name: line.parent for line in self._lines if has_modules}).encode()


# -- tensors ----------------------------------------------------------------------------------------------------------


class TensorFiles:
    """Saves tensors, at once or when `flush` is called, as `StatsDump.stop` does.

    What one call returns is often what others take: equal tensors have one file with several names (hard links).

    Args:
        directory: made with the first file.
        at_once: False keeps a copy, on the tensor's own device, until `flush`: nothing waits and nothing is written.
    """

    def __init__(self, directory: Path, *, at_once: bool) -> None:
        self.directory = directory
        self._at_once = at_once
        self._is_made = False
        self._kept: list[tuple[str, Tensor]] = []
        self._saved: dict[tuple[Any, ...], str] = {}  # by what is in them

    def save(self, tensor: Tensor, name: str, path: str) -> str:
        """Return the name of the file. Raises OSError, and TypeError for a tensor that consists of others."""
        if type(tensor) is not Tensor:
            tensor = _without_class(tensor)
        file = file_name(name, path)
        if self._at_once:
            self._write(tensor, file)
        else:
            self._kept.append((file, without_repeats(tensor.detach())[0].clone().expand(tensor.shape)))
        return file

    def flush(self) -> None:
        """Write all that was kept. Raises what the first write that failed has raised, after the others."""
        kept, self._kept = self._kept, []
        first: Exception | None = None  # of the others each would keep a tensor on the host
        for file, tensor in kept:
            try:
                self._write(tensor, file)
            except Exception as error:
                first = first or error
        if first is not None:
            try:
                raise first
            finally:
                del first  # it holds this frame, and so all that was kept

    def _write(self, tensor: Tensor, file: str) -> None:
        if tensor.is_meta:
            return
        plain = tensor.detach()
        if not _is_all_of_its_storage(plain):
            plain = plain.to("cpu", copy=True, memory_format=torch.contiguous_format)
        if not self._is_made:
            make_private_directory(self.directory)
            self._is_made = True
        path, content = f"{self.directory}/{file}", (plain.dtype, plain.shape, hashlib.sha256(bytes_in(plain)).digest())
        if content in self._saved:
            with contextlib.suppress(OSError):  # a file system without links, or not as many
                os.link(self._saved[content], path)
                return
        unfinished = f"{self.directory}/{TEMPORARY_PREFIX}{file}"
        try:
            torch.save(plain, unfinished)
            os.replace(unfinished, path)  # without waiting for the disk: there are too many of them
        except BaseException:
            with contextlib.suppress(OSError):  # which keeps a full disk full
                os.unlink(unfinished)
            raise
        self._saved[content] = path


def _is_all_of_its_storage(tensor: Tensor) -> bool:
    """Return whether what torch saves of a tensor, which is its whole storage, is these elements in order."""
    is_in_order = tensor.is_cpu and tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())
    return is_in_order and tensor.nbytes == tensor.untyped_storage().nbytes()


def _without_class(tensor: Tensor) -> Tensor:
    """Return a tensor as a plain one, where its class adds nothing but a name; TypeError for one made of others."""
    kind: Any = type(tensor)
    if kind.__torch_dispatch__ is not Tensor.__torch_dispatch__:
        raise TypeError(f"a {kind.__name__} is no plain tensor, and is not saved")
    with without_tensor_classes():
        return tensor.detach().as_subclass(Tensor)


def without_repeats(tensor: Tensor) -> tuple[Tensor, int]:
    """Return what is in memory of an expanded tensor, with as many dimensions; and how often each element is there."""
    repeats = 1
    for dimension, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if stride == 0 and size > 1:
            tensor, repeats = tensor.narrow(dimension, 0, 1), repeats * size
    return tensor, repeats


def is_dense(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Return whether the elements are in memory without gaps, and each once."""
    expected = 1
    for step, size in sorted(zip(stride, shape, strict=True)):
        if size > 1 and step != expected:
            return False
        expected *= size
    return True


def checksum(tensor: Tensor) -> str:
    """Return the CRC-32 of the elements' bytes in order, as 8 hex digits. Waits for a device."""
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return f"{zlib.crc32(bytes_in(plain)):08x}"
