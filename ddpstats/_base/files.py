"""A file that is there complete, or not at all.

1. Write under a temporary name in the same directory (a rename does not cross file systems).
2. Flush, and fsync the file: its content must be on the disk before its name is.
3. Read it back for its size and SHA-256, for those who ask for them (`replace_file`; `put_file` does not).
4. `os.replace` to the name, and fsync of the directory, so that the name survives a crash too.

Whatever goes wrong, the temporary file is removed, a file that had the name before is untouched, and the error goes on.

Bytes that somebody else may have written: opened, bounded and parsed so that the caller meets OSError or ValueError.

1. `open_regular` opens a file, and no pipe or device, which would block or never end: looked at after it was opened, so
   that nothing can take the file's place in between.
2. `read_at_most` and `bounded_lines` never hold more than was said, however large a file claims to be.
3. `parse_json` raises nothing but ValueError, however deep, long or odd the text is.
4. `refused_version` is the one answer to a format that this ddpstats does not read.

A file of ``torch.save`` looked at before torch reads it: that its tensors take no more memory than it has bytes, and
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

import contextlib
import errno
import hashlib
import io
import json
import os
import pickletools
import stat
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NoReturn, TypeVar

# -- atomic files ------------------------------------------------------------------------------------------------------

_CHUNK_BYTES = 1 << 20
_NO_DIRECTORY_FSYNC = {errno.EINVAL, errno.ENOTSUP, errno.EBADF, errno.EACCES}  # some network file systems have none

TEMPORARY_PREFIX = ".writing-"
_T = TypeVar("_T")


@dataclass(frozen=True)
class Written:
    """What stands in a file."""

    bytes: int
    sha256: str


def replace_file(path: Path, write: Callable[[BinaryIO], object], *, private: bool = False) -> Written:
    """Let ``write`` fill a file that then takes the place of ``path``. Raises what ``write`` raises, and OSError.

    ``private``: for its owner alone (mode 0600); else as any new file, by the umask.
    """
    return _replaced(path, write, summary, private)


def put_file(path: Path, write: Callable[[BinaryIO], object], *, private: bool = False) -> None:
    """As `replace_file`, where nobody wants size and hash: the file is not read once more."""
    _replaced(path, write, lambda _: None, private)


def make_private_directory(path: Path, *, exist_ok: bool = True) -> None:
    """For its owner alone (mode 0700); one that is there already stays as it is. Raises OSError.

    The directories above it are made as any new ones: they are the user's own place.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    path.mkdir(mode=0o700, exist_ok=exist_ok)


def _replaced(path: Path, write: Callable[[BinaryIO], object], look: Callable[[BinaryIO], _T], private: bool) -> _T:
    descriptor, name = tempfile.mkstemp(prefix=f"{TEMPORARY_PREFIX}{path.name}-", dir=path.parent)
    try:
        with os.fdopen(descriptor, "w+b") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
            seen = look(file)
        if not private:
            os.chmod(name, 0o666 & ~_UMASK)  # mkstemp's files are for their owner only
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise
    _sync_directory(path.parent)
    return seen


def summary(file: BinaryIO) -> Written:
    """Size and hash of an open file, from its beginning; leaves it at its end."""
    file.seek(0)
    digest, size = hashlib.sha256(), 0
    while chunk := file.read(_CHUNK_BYTES):
        digest.update(chunk)
        size += len(chunk)
    return Written(size, digest.hexdigest())


def _umask() -> int:
    mask = os.umask(0)  # there is no way to read it without setting it
    os.umask(mask)
    return mask


_UMASK = _umask()  # once, at import: later other threads may create files in between


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NO_DIRECTORY_FSYNC:
            raise
    finally:
        os.close(descriptor)


# -- untrusted ---------------------------------------------------------------------------------------------------------

LATEST_TIME_SEC = 1e12  # since 1970; what claims to be later is no time
NO_REGULAR_FILE = "Not a regular file but a pipe, a socket or a device"


def open_regular(path: str | Path, *, follow: bool = True) -> BinaryIO:
    """To be read, as bytes. Raises OSError, also for what is no regular file, and without ``follow`` for a link."""
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW)
    return os.fdopen(checked_regular(os.open(path, flags), path), "rb")


def checked_regular(descriptor: int, path: str | Path) -> int:
    """``descriptor`` of an open file, which is closed where that is no regular one: OSError, naming ``path``."""
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return descriptor
    os.close(descriptor)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise OSError(errno.EINVAL, NO_REGULAR_FILE, str(path))


def read_at_most(file: BinaryIO, most_bytes: int) -> bytes:
    """The rest of the file. Raises ValueError where that is more."""
    content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise ValueError(f"it has more than {most_bytes:,} bytes")
    return content


def bounded_lines(file: BinaryIO, most_bytes: int) -> Iterator[bytes]:
    """Each line with its end, as iterating over the file gives it. Raises ValueError for one that is longer."""
    while line := file.readline(most_bytes + 1):
        if len(line) > most_bytes:
            raise ValueError(f"a line of more than {most_bytes:,} bytes")
        yield line


def parse_json(text: str | bytes, *, strict: bool = True) -> Any:
    """What ``json.loads`` makes of it. Raises ValueError, whatever is wrong.

    Args:
        strict: refuse NaN and infinities, which are no JSON, and a key that an object has twice: two readers may take
            it for two things.
    """
    try:
        if strict:
            return json.loads(text, parse_constant=_no_constant, object_pairs_hook=_unique)
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"the key {twice[:80]!r} stands there twice")
    return found


def refused_version(found: Any, known: int) -> str | None:
    """Why a format of version ``found`` is not read where ``known`` is the one that is; None where it is that."""
    if type(found) is int and found == known:
        return None
    if type(found) is int and found > known:
        return f"written by a newer ddpstats: format {found}, this one reads {known}; upgrade ddpstats"
    return f"of format {str(found)[:40]}, which is unknown: this ddpstats reads {known}"


# -- tensor archive ----------------------------------------------------------------------------------------------------

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
