"""A file that is there complete, or not at all.

1. Write under a temporary name in the same directory (a rename does not cross file systems).
2. Flush, and fsync the file: its content must be on the disk before its name is.
3. Read it back for its size and SHA-256, for those who ask for them (`replace_file`; `put_file` does not).
4. `os.replace` to the name, and fsync of the directory, so that the name survives a crash too.

Whatever goes wrong, the temporary file is removed, a file that had the name before is untouched, and the error goes on.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, TypeVar

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
