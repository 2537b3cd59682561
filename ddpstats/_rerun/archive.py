"""A look at a file of ``torch.save`` before torch reads it.

``torch.load(weights_only=True)`` builds only tensors and plain containers, but believes the sizes that the file claims,
and torch 2.6 reads memory behind a storage that is too short.
"""

from __future__ import annotations

import os
import pickletools
import zipfile
from collections.abc import Iterator
from typing import Any, BinaryIO

_MAGIC = b"PK\x03\x04"
_MOST_PICKLED_BYTES = 64 << 20
# What torch's unpickler knows of these; it refuses the opcodes of later pickle protocols.
_PUTS, _GETS = ("BINPUT", "LONG_BINPUT"), ("BINGET", "LONG_BINGET")
_PUSHES = ("BININT", "BININT1", "BININT2", "LONG1", "BINUNICODE", "GLOBAL")

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
    """Check an open file of ``torch.save``, and leave it at its beginning.

    Raises ValueError, and what `zipfile` raises, unless it is a zip archive from its first byte on (torch reads any
    other in an older format, which has no sizes), its entries are stored unpacked under distinct names, ``data.pkl`` is
    at most 64 MiB, and no storage is larger than its entry.
    """
    file.seek(0)
    if file.read(len(_MAGIC)) != _MAGIC:
        raise ValueError("it is no archive of torch.save")
    archive = zipfile.ZipFile(file)
    entries = archive.infolist()
    are_stored = all(
        entry.compress_type == zipfile.ZIP_STORED and entry.compress_size == entry.file_size for entry in entries
    )
    if not are_stored or sum(entry.file_size for entry in entries) > os.fstat(file.fileno()).st_size:
        raise ValueError("it unpacks to more than it holds")
    by_name = {entry.filename.partition("/")[2]: entry for entry in entries}
    if len(by_name) != len(entries) or len({entry.filename.partition("/")[0] for entry in entries}) > 1:
        raise ValueError("it has two entries of one name")
    if "data.pkl" not in by_name:
        raise ValueError("it has no data.pkl")
    pickle_bytes = by_name["data.pkl"].file_size
    if pickle_bytes > _MOST_PICKLED_BYTES:
        raise ValueError(f"its data.pkl has {pickle_bytes:,} bytes, and more than {_MOST_PICKLED_BYTES:,} are not read")
    for name, size in _claimed_storages(archive.read(by_name["data.pkl"])):
        entry = by_name.get(f"data/{name}")
        if entry is None or size > entry.file_size:
            raise ValueError(f"its tensor {name[:40]!r} claims {size:,} bytes, and has fewer")
    file.seek(0)


def _claimed_storages(pickled: bytes) -> Iterator[tuple[str, int]]:
    """Yield the name of each storage that a pickle refers to, and the bytes that it claims.

    Nothing is unpickled: opcodes are read as text. A storage must be referred to as ``torch.save`` does it, by a tuple
    of plain values each of which is pushed alone.
    """
    memo: dict[int, Any] = {}
    top: Any = None  # of the stack; None for any value that is not plain
    items: list[Any] | None = None  # pushed since the last mark; None after an opcode that does more than that
    argument: Any
    for opcode, argument, _ in pickletools.genops(pickled):
        name = opcode.name
        if name in _PUTS:
            memo[argument] = top
        elif name in _PUSHES or name in _GETS:
            value = _Global(argument) if name == "GLOBAL" else argument
            top = memo.get(argument) if name in _GETS else value
            if items is not None:
                items.append(top)
        elif name == "MARK":
            top, items = None, []
        elif name == "TUPLE":
            top, items = None if items is None else tuple(items), None
        else:
            if name == "BINPERSID":
                yield _claimed_storage(top)
            top = items = None


class _Global(str):
    """The module and the name of a class, which no string in the file equals in type."""


def _claimed_storage(reference: Any) -> tuple[str, int]:
    if type(reference) is tuple and list(map(type, reference)) == [str, _Global, str, str, int]:
        word, kind, name, _, elements = reference
        if word == "storage" and kind in _ELEMENT_BYTES and elements >= 0:
            return name, elements * _ELEMENT_BYTES[kind]
    raise ValueError("it names a tensor in a way that torch.save does not")
