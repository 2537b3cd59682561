"""What one rank concluded, for the others of its host: a file, for the case that the store is gone.

The first to post wins; all others, and a late one, read its words. The name is a secret that the ranks share, so nobody
else finds the file first. Whoever leaves signs it, and who finds that all others have signed or died takes it down.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from ddpstats._base.files import open_regular, read_at_most, require_regular

_MOST_BYTES = 2 << 20  # a verdict has at most half of that


class Process(Protocol):
    """Another rank of this host."""

    @property
    def pid(self) -> int: ...

    def is_dead(self) -> bool: ...


class Board:
    """``token``: shared by the ranks of one group, and by nobody else. ``others``: the other ranks of this host."""

    def __init__(self, token: str, others: Sequence[Process]) -> None:
        self._path = Path(tempfile.gettempdir()) / f"ddpstats-{token}"
        weakref.finalize(self, _leave, self._path, others, os.getpid())

    def post(self, text: str) -> str:
        """Post ``text``, one line, unless something is there; what is there now."""
        mine = self._path.with_name(f"{self._path.name}.{os.getpid()}")
        try:
            with open(os.open(mine, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                file.write(text + "\n")
            try:
                os.link(mine, self._path)
            finally:
                mine.unlink()
        except OSError:  # somebody was first; or there is no such directory, or no room in it
            pass
        return self.read() or text

    def read(self) -> str | None:
        """What is there, if anything."""
        lines = _lines(self._path)
        return lines[0] if lines else None


def _lines(path: Path) -> list[str]:
    try:
        with open_regular(path, follow=False) as file:
            if os.fstat(file.fileno()).st_uid != os.getuid():
                return []
            return read_at_most(file, _MOST_BYTES).decode(errors="replace").splitlines()
    except (OSError, ValueError):
        return []


def _leave(path: Path, others: Sequence[Process], process: int) -> None:
    if os.getpid() != process:  # forked from it
        return
    with contextlib.suppress(OSError):
        flags = os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK
        with open(require_regular(os.open(path, flags), path), "w") as file:
            file.write(f"{os.getpid()}\n")
        signed = _lines(path)[1:]
        if all(str(other.pid) in signed or other.is_dead() for other in others):
            path.unlink()
