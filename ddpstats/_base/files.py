"""Files: written so that they are complete or absent, and read although the contents are untrusted.

1. `replace_file` writes under a temporary name in the same directory, because a rename does not cross file systems, and
   calls fsync before the rename: the content must be on disk before its name is. Whatever fails, the temporary file is
   removed and a file that had the name before is untouched. `replace_files` does without fsync: its files are complete
   or absent when a process dies, but not when the machine does.
2. `open_regular` opens no pipe or device, which would block or never end. It checks the open file, so that nothing can
   be put in its place in between. `read_at_most` and `bounded_lines` bound the memory that a file takes, and
   `parse_json` raises nothing but ValueError.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NoReturn, TypeVar

T = TypeVar("T")

TEMPORARY_PREFIX = ".writing-"
NO_REGULAR_FILE = "Not a regular file but a pipe, a socket or a device"
LATEST_TIME_SEC = 1e12  # since 1970; a later time in a file is invalid

_NO_DIRECTORY_FSYNC = {errno.EINVAL, errno.ENOTSUP, errno.EBADF, errno.EACCES}  # some network file systems lack it


# -- writing -----------------------------------------------------------------------------------------------------------


def replace_file(path: Path, write: Callable[[BinaryIO], T], *, private: bool = False) -> T:
    """Let ``write`` fill a new file, rename it to ``path``, and return what ``write`` returned.

    Raises OSError, and what ``write`` raises. ``private``: only the owner may read the file (mode 0600); otherwise the
    umask decides.
    """
    return replace_files({path: write}, private=private, durable=True)[0]


def replace_files(
    writes: Mapping[Path, Callable[[BinaryIO], T]], *, private: bool = False, durable: bool = False
) -> list[T]:
    """Do as `replace_file` for each of the files; none has its name before all of them are written.

    They get their names in this order: where the last one is there, all are. ``durable``: call fsync, so that this
    holds after a power failure too.
    """
    unfinished = {path: path.parent / f"{TEMPORARY_PREFIX}{path.name}-{os.urandom(6).hex()}" for path in writes}
    results = []
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        with contextlib.ExitStack() as opened:
            files = []
            for path, write in writes.items():
                descriptor = os.open(unfinished[path], flags, 0o600 if private else 0o666)
                files.append(opened.enter_context(os.fdopen(descriptor, "w+b")))
                results.append(write(files[-1]))
                files[-1].flush()
            if durable:
                for file in files:
                    os.fsync(file.fileno())
        for path, complete in unfinished.items():
            os.replace(complete, path)
    except BaseException:
        for incomplete in unfinished.values():
            with contextlib.suppress(OSError):
                incomplete.unlink()
        raise
    if durable:
        for directory in {path.parent for path in writes}:
            _sync_directory(directory)
    return results


def make_private_directory(path: Path, *, exist_ok: bool = True) -> None:
    """Make a directory that only its owner may enter (mode 0700). Raises OSError.

    An existing one stays as it is, and the directories above are made by the umask: they are the user's.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    path.mkdir(mode=0o700, exist_ok=exist_ok)


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NO_DIRECTORY_FSYNC:
            raise
    finally:
        os.close(descriptor)


# -- reading untrusted bytes -------------------------------------------------------------------------------------------


def open_regular(path: str | Path, *, follow: bool = True) -> BinaryIO:
    """Open a regular file to read its bytes. Raises OSError for any other, and without ``follow`` for a link."""
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW)
    return os.fdopen(require_regular(os.open(path, flags), path), "rb")


def require_regular(descriptor: int, path: str | Path) -> int:
    """Return ``descriptor`` if it is of a regular file; otherwise close it and raise OSError that names ``path``."""
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return descriptor
    os.close(descriptor)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise OSError(errno.EINVAL, NO_REGULAR_FILE, str(path))


def read_at_most(file: BinaryIO, most_bytes: int) -> bytes:
    """Return the rest of the file. Raises ValueError if it is longer than ``most_bytes``."""
    content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise ValueError(f"it has more than {most_bytes:,} bytes")
    return content


def read_regular(path: str | Path, most_bytes: int) -> bytes:
    """Return the bytes of a regular file. Raises as `open_regular` and `read_at_most` do."""
    with open_regular(path) as file:
        return read_at_most(file, most_bytes)


def bounded_lines(file: BinaryIO, most_bytes: int) -> Iterator[bytes]:
    """Yield each line with its end, as iterating over the file does. Raises ValueError for a longer line."""
    while line := file.readline(most_bytes + 1):
        if len(line) > most_bytes:
            raise ValueError(f"a line of more than {most_bytes:,} bytes")
        yield line


def parse_json(text: str | bytes, *, strict: bool = True) -> Any:
    """Return what ``json.loads`` returns. Raises ValueError, whatever is wrong.

    Args:
        strict: refuse NaN and infinities, which are no JSON, and a key that an object has twice, which two readers may
            understand in two ways.
    """
    try:
        if strict:
            return json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=_unique_keys)
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    mapping = dict(pairs)
    if len(mapping) != len(pairs):
        ((key, _),) = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"the key {key[:80]!r} occurs twice")
    return mapping


def explain_version(version: Any, known: int) -> str | None:
    """Return why a file of format ``version`` is not read by this ddpstats, which reads ``known``; None if it is."""
    if type(version) is int and version == known:
        return None
    if type(version) is int and version > known:
        return f"written by a newer ddpstats: format {version}, this one reads {known}; upgrade ddpstats"
    return f"of format {str(version)[:40]}, which is unknown: this ddpstats reads {known}"
