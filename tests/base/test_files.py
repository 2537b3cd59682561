"""Files are complete or absent; untrusted files and texts are refused at once, in little memory (SECURITY.md)."""

from __future__ import annotations

import errno
import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import pytest

from ddpstats._base.files import (
    bounded_lines,
    explain_version,
    open_regular,
    parse_json,
    read_at_most,
    replace_file,
    replace_files,
)

# -- writing -----------------------------------------------------------------------------------------------------------


def test_replaced_file_holds_the_new_content_alone_and_has_the_mode_of_any_other(tmp_path: Path) -> None:
    path, plain = tmp_path / "file", tmp_path / "plain"
    path.write_bytes(b"older and longer")
    plain.write_bytes(b"")
    replace_file(path, lambda file: file.write(b"new"))
    assert path.read_bytes() == b"new"
    assert path.stat().st_mode == plain.stat().st_mode
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["file", "plain"]


def test_private_file_can_be_read_by_its_owner_alone_under_any_umask(tmp_path: Path) -> None:
    umask = os.umask(0)
    try:
        replace_file(tmp_path / "file", lambda file: file.write(b"new"), private=True)
    finally:
        os.umask(umask)
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o600


def test_writing_a_file_leaves_the_umask_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The umask is the whole process's: for a moment, files of other threads would be open to everybody."""
    monkeypatch.setattr(os, "umask", lambda mask: pytest.fail("the umask was set"))
    replace_file(tmp_path / "file", lambda file: file.write(b""))


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
def test_error_while_writing_leaves_the_old_file_and_no_other(tmp_path: Path, error: BaseException) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")

    def write(file: BinaryIO) -> None:
        file.write(b"half")
        raise error

    with pytest.raises(type(error)):
        replace_file(path, write)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_disk_that_is_full_at_the_end_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        replace_file(tmp_path / "file", lambda file: file.write(b"new"))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("durable", [True, False])
def test_several_files_get_their_names_after_all_are_written(
    durable: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    calls: list[str] = []

    def noted(name: str) -> None:
        function = getattr(os, name)

        def call(*args: object) -> None:
            calls.append(name)
            function(*args)

        monkeypatch.setattr(os, name, call)

    noted("fsync")
    noted("replace")
    writes = {first: lambda file: file.write(b"1"), second: lambda file: file.write(b"22")}
    assert replace_files(writes, durable=durable) == [1, 2]
    assert calls == (["fsync", "fsync", "replace", "replace", "fsync"] if durable else ["replace", "replace"])
    assert (first.read_bytes(), second.read_bytes()) == (b"1", b"22")


@pytest.mark.parametrize("failing", ["write", "fsync", "replace"])
def test_error_in_one_of_several_files_leaves_all_old_ones(
    failing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"

    def fail(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    replace_files({first: lambda file: file.write(b"1"), second: lambda file: file.write(b"22")})
    writes = {first: lambda file: file.write(b"3"), second: lambda file: file.write(b"4")}
    if failing == "write":
        writes[second] = fail
    else:
        monkeypatch.setattr(os, failing, fail)
    with pytest.raises(OSError, match="No space"):
        replace_files(writes, durable=True)
    assert (first.read_bytes(), second.read_bytes()) == (b"1", b"22")
    assert sorted(tmp_path.iterdir()) == [first, second]


# -- reading untrusted bytes -------------------------------------------------------------------------------------------


def test_regular_file_is_opened_also_through_a_link_unless_links_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"text")
    (tmp_path / "link").symlink_to("file")
    for name in ("file", "link"):
        with open_regular(tmp_path / name) as file:
            assert file.read() == b"text"
    with pytest.raises(OSError, match="symbolic links"):
        open_regular(tmp_path / "link", follow=False)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (os.mkfifo, "Not a regular file"),  # a reader would wait for ever
        (lambda path: path.symlink_to("/dev/zero"), "Not a regular file"),  # it never ends
        (os.mkdir, "Is a directory"),
        (lambda path: path.symlink_to(path), "symbolic links"),
        (lambda path: None, "No such file"),
    ],
    ids=["pipe", "device", "directory", "endless link", "nothing"],
)
def test_path_that_is_no_regular_file_is_an_error_at_once(
    tmp_path: Path, make: Callable[[Path], object], reason: str
) -> None:
    path = tmp_path / "it"
    make(path)
    with pytest.raises(OSError, match=reason) as caught:
        open_regular(path)
    assert str(path) in str(caught.value)


def test_file_that_claims_a_petabyte_is_read_no_further_than_the_limit(tmp_path: Path) -> None:
    with (tmp_path / "sparse").open("wb") as file:
        try:
            file.truncate(1 << 50)
        except OSError:  # the file system has no files as large
            file.truncate(1 << 40)
    with open_regular(tmp_path / "sparse") as sparse, pytest.raises(ValueError, match="more than 1,000 bytes"):
        read_at_most(sparse, 1000)
    with open_regular(tmp_path / "sparse") as sparse, pytest.raises(ValueError, match="a line of more than 1,000"):
        list(bounded_lines(sparse, 1000))


def test_bounded_lines_are_the_lines_of_the_file() -> None:
    assert list(bounded_lines(io.BytesIO(b"a\n\nbc"), 3)) == [b"a\n", b"\n", b"bc"]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (b"[" * 200_000, "nested too deeply"),
        (b"9" * 5000, "digits"),
        (b'{"a": NaN}', "NaN is no JSON"),
        (b'{"a": -Infinity}', "-Infinity is no JSON"),
        (b'{"a": {"b": 1, "c": 1, "b": 2}}', "'b' occurs twice"),
        (b'"\xff"', "decode"),
        (b"", "Expecting value"),
    ],
    ids=["deep", "long", "NaN", "infinity", "twice", "not UTF-8", "empty"],
)
def test_text_that_is_no_json_is_a_value_error(text: bytes, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        parse_json(text)


def test_nan_of_other_tools_is_read_where_json_need_not_be_strict() -> None:
    assert parse_json("[1, NaN]", strict=False)[0] == 1


@pytest.mark.parametrize(
    ("version", "reason"),
    [
        (3, None),
        (4, "written by a newer ddpstats: format 4, this one reads 3; upgrade ddpstats"),
        (2, "of format 2, which is unknown: this ddpstats reads 3"),
        (True, "of format True"),
        ("3", "of format 3, which is unknown"),
        (3.0, "of format 3.0"),
        (None, "of format None"),
        ([9] * 1000, "of format [9, 9, 9, 9, 9, 9, 9, 9, 9, 9, 9, 9, 9, , which"),
    ],
)
def test_version_other_than_the_known_one_is_explained(version: object, reason: str | None) -> None:
    text = explain_version(version, 3)
    assert text is reason if reason is None else text is not None and text.startswith(reason)
