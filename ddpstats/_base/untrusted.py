"""Bytes that somebody else may have written: opened, bounded and parsed so that the caller meets OSError or ValueError.

1. `open_regular` opens a file, and no pipe or device, which would block or never end: looked at after it was opened, so
   that nothing can take the file's place in between.
2. `read_at_most` and `bounded_lines` never hold more than was said, however large a file claims to be.
3. `parse_json` raises nothing but ValueError, however deep, long or odd the text is.
4. `refused_version` is the one answer to a format that this ddpstats does not read.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

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
