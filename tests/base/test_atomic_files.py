"""`replace_file` leaves a complete new file, or the old one and no other."""

from __future__ import annotations

import errno
import hashlib
import os
from pathlib import Path
from typing import BinaryIO

import pytest

from ddpstats._base.atomic_files import replace_file


def test_what_was_written_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"older and longer")
    written = replace_file(path, lambda file: file.write(b"new"))
    assert path.read_bytes() == b"new"
    assert (written.bytes, written.sha256) == (3, hashlib.sha256(b"new").hexdigest())
    assert [one.name for one in tmp_path.iterdir()] == ["file"]


def test_the_hash_is_of_what_stands_there_even_after_a_seek(tmp_path: Path) -> None:
    def write(file: BinaryIO) -> None:
        file.write(b"xxcd")
        file.seek(0)
        file.write(b"ab")

    assert replace_file(tmp_path / "file", write).sha256 == hashlib.sha256(b"abcd").hexdigest()


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
def test_an_error_leaves_the_old_file_and_no_other(tmp_path: Path, error: BaseException) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")

    def write(file: BinaryIO) -> None:
        file.write(b"half")
        raise error

    with pytest.raises(type(error)):
        replace_file(path, write)
    assert path.read_bytes() == b"old"
    assert [one.name for one in tmp_path.iterdir()] == ["file"]


def test_a_disk_that_is_full_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        replace_file(tmp_path / "file", lambda file: file.write(b"new"))
    assert list(tmp_path.iterdir()) == []


def test_others_may_read_it_as_any_file(tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    plain.write_bytes(b"")
    replace_file(tmp_path / "file", lambda file: file.write(b"new"))
    assert (tmp_path / "file").stat().st_mode == plain.stat().st_mode
