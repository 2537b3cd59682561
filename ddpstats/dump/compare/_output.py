"""Files that a report goes to: they are there complete, or not at all."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, TextIO

from ddpstats._base.atomic_files import TEMPORARY_PREFIX, replace_file
from ddpstats.errors import DumpError


def check_writable(*paths: Path | None) -> None:
    """Raises `DumpError` for a file that could not be written, before the work is done that would fill it."""
    for path in paths:
        if path is None:
            continue
        if path.is_dir():
            raise DumpError(f"{path} is a directory, and should be a file. Give a name in it.", path=str(path))
        if not path.parent.is_dir():
            raise DumpError(f"{path}: there is no directory {path.parent}. Make it.", path=str(path))
        if not os.access(path.parent, os.W_OK | os.X_OK):
            raise DumpError(f"{path}: {path.parent} is not writable. Give another place.", path=str(path))


def write_file(path: Path, write: Callable[[TextIO], object]) -> None:
    """A text file. Raises `DumpError` naming it where it cannot be written, and what ``write`` raises."""

    def encoded(file: BinaryIO) -> None:
        with _as_text(file) as text:
            write(text)

    try:
        replace_file(path, encoded)
    except OSError as error:  # of the temporary file, whose name nobody gave, or of a full disk, which has none
        if error.filename is not None and not Path(error.filename).name.startswith(TEMPORARY_PREFIX):
            raise
        raise DumpError(f"{path} cannot be written: {error.strerror or error}.", path=str(path)) from None


@contextlib.contextmanager
def _as_text(file: BinaryIO) -> Iterator[TextIO]:
    # a name in a dump may hold half a character, which no encoding has
    text = io.TextIOWrapper(file, encoding="utf-8", errors="backslashreplace", newline="")
    try:
        yield text
        text.flush()
    finally:
        text.detach()
