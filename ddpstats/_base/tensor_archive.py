"""A file of ``torch.save`` looked at before torch reads it: that its tensors take no more memory than it has bytes, and
what its pickle holds besides them no more than a gigabyte.

``torch.load(weights_only=True)`` builds only tensors and plain containers, and still believes what a file says of its
sizes. Refused here, with ValueError:

1. What is no zip archive from its first byte on: torch would read it in an older format, which says nothing of sizes.
2. An entry that is packed, or that stands there twice: a few bytes may unpack to all memory.
3. A tensor's storage that is to be larger than its entry. Torch 2.6 takes that for granted, and reads what lies behind
   it in memory.
4. A pickle of more than 64 MiB, or of which more is made than of any that torch writes in as many bytes: one byte may
   stand for a whole list.

Nothing is unpickled: `_storages` goes through the opcodes as text. What names a storage must look as ``torch.save``
writes it: a tuple of plain values, each pushed by itself.
"""

from __future__ import annotations

import io
import os
import pickletools
import zipfile
from collections.abc import Iterator
from typing import Any, BinaryIO

_MAGIC = b"PK\x03\x04"
_MOST_PICKLED_BYTES = 64 << 20
_MOST_MADE = 8_000_000  # of a dict of 100,000 tensors 2.1 million are made, from 12 MB
_ALWAYS_MADE, _BYTES_OF_ONE = 1000, 3  # torch writes six for an empty list and its place in the memo, but for the first
_PUTS = ("BINPUT", "LONG_BINPUT", "PUT", "MEMOIZE")
_GETS = ("BINGET", "LONG_BINGET", "GET")
_NUMBERS = ("BININT", "BININT1", "BININT2", "BINFLOAT", "NONE", "NEWTRUE", "NEWFALSE")
_PUSHES = ("BININT", "BININT1", "BININT2", "LONG1", "LONG4", "BINUNICODE", "SHORT_BINUNICODE", "GLOBAL")
_FILLS = ("APPEND", "APPENDS", "SETITEM", "SETITEMS", "EMPTY_TUPLE")
_MADE_BY = {**dict.fromkeys((*_NUMBERS, *_GETS, *_FILLS), 0), "EMPTY_SET": 4}  # any other: 1

_ELEMENT_BYTES = {
    "torch ComplexDoubleStorage": 16,
    **dict.fromkeys(("torch DoubleStorage", "torch LongStorage", "torch ComplexFloatStorage"), 8),
    **dict.fromkeys(("torch FloatStorage", "torch IntStorage", "torch QInt32Storage"), 4),
    **dict.fromkeys(("torch HalfStorage", "torch BFloat16Storage", "torch ShortStorage"), 2),
    **dict.fromkeys(("torch CharStorage", "torch ByteStorage", "torch BoolStorage", "torch QInt8Storage"), 1),
    **dict.fromkeys(("torch QUInt8Storage", "torch QUInt4x2Storage", "torch QUInt2x4Storage"), 1),
    **dict.fromkeys(("torch.storage UntypedStorage", "torch UntypedStorage"), 1),
}


def check_archive(file: BinaryIO) -> None:
    """Look at an open file; leaves it at its beginning. Raises ValueError, and what `zipfile` raises for no archive."""
    file.seek(0)
    if file.read(len(_MAGIC)) != _MAGIC:
        raise ValueError("it is no archive of torch.save")
    archive = zipfile.ZipFile(file)
    entries = archive.infolist()
    stored = all(one.compress_type == zipfile.ZIP_STORED and one.compress_size == one.file_size for one in entries)
    if not stored or sum(one.file_size for one in entries) > os.fstat(file.fileno()).st_size:
        raise ValueError("it unpacks to more than it holds")
    sizes = {one.filename.partition("/")[2]: one.file_size for one in entries}
    if len(sizes) != len(entries) or len({one.filename.partition("/")[0] for one in entries}) != 1:
        raise ValueError("it has two entries of one name")
    pickled = next((one for one in entries if one.filename.partition("/")[2] == "data.pkl"), None)
    if pickled is None:
        raise ValueError("it has no data.pkl")
    if pickled.file_size > _MOST_PICKLED_BYTES:
        raise ValueError(
            f"its data.pkl has {pickled.file_size:,} bytes, and more than {_MOST_PICKLED_BYTES:,} are not read"
        )
    for name, size in _storages(archive.read(pickled)):
        if size > sizes.get(f"data/{name}", -1):
            raise ValueError(f"its tensor {name[:40]!r} claims {size:,} bytes, and has fewer")
    file.seek(0)


def _storages(pickled: bytes) -> Iterator[tuple[str, int]]:
    """The name of each storage that is asked for, and how many bytes it is to have."""
    memo: dict[int, Any] = {}
    top: Any = None  # of the stack; None for what is no plain value
    since_mark: list[Any] | None = None  # what was pushed since the last mark; None where more than that was done
    limit = left = min(_MOST_MADE, _ALWAYS_MADE + len(pickled) // _BYTES_OF_ONE)
    argument: Any
    for opcode, argument, _ in pickletools.genops(io.BytesIO(pickled)):
        name = opcode.name
        left -= _MADE_BY.get(name, 1)
        if left < 0:
            raise ValueError(f"more than {limit:,} things would be made of its data.pkl of {len(pickled):,} bytes")
        if name in _PUTS:
            memo[len(memo) if name == "MEMOIZE" else argument] = top
        elif name in _PUSHES or name in _GETS:
            top = memo.get(argument) if name in _GETS else _Global(argument) if name == "GLOBAL" else argument
            if since_mark is not None:
                since_mark.append(top)
        elif name == "MARK":
            top, since_mark = None, []
        elif name == "TUPLE":
            top, since_mark = None if since_mark is None else tuple(since_mark), None
        elif name in ("BINPERSID", "PERSID"):
            yield _storage(top if name == "BINPERSID" else argument)
            top = since_mark = None
        else:
            top = since_mark = None


class _Global(str):
    """The module and name of a class, which no text in the file can pass for."""


def _storage(told: Any) -> tuple[str, int]:
    if type(told) is tuple and list(map(type, told)) == [str, _Global, str, str, int] and told[0] == "storage":
        _, kind, name, _, elements = told
        if kind in _ELEMENT_BYTES and elements >= 0:
            return name, elements * _ELEMENT_BYTES[kind]
    raise ValueError("it names a tensor in a way that torch.save does not")
