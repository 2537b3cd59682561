"""Untrusted files and texts are refused with one kind of error each, at once, and in little memory (SECURITY.md)."""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from ddpstats._base.untrusted import bounded_lines, open_regular, parse_json, read_at_most, refused_version


def test_a_file_is_opened_also_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"text")
    (tmp_path / "link").symlink_to("file")
    for name in ("file", "link"):
        with open_regular(tmp_path / name) as file:
            assert file.read() == b"text"


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (os.mkfifo, "Not a regular file"),  # whose reader would wait for ever
        (lambda path: path.symlink_to("/dev/zero"), "Not a regular file"),  # which never ends
        (os.mkdir, "Is a directory"),
        (lambda path: path.symlink_to(path), "symbolic links"),
        (lambda path: None, "No such file"),
    ],
    ids=["pipe", "device", "directory", "endless link", "nothing"],
)
def test_what_is_no_file_is_said_at_once(tmp_path: Path, make: Callable[[Path], object], said: str) -> None:
    path = tmp_path / "it"
    make(path)
    with pytest.raises(OSError, match=said) as caught:
        open_regular(path)
    assert str(path) in str(caught.value)


def test_a_link_is_not_followed_where_none_should_be(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("/etc/hostname")
    with pytest.raises(OSError, match="symbolic links"):
        open_regular(tmp_path / "link", follow=False)


def test_a_file_that_claims_a_petabyte_is_read_no_further_than_said(tmp_path: Path) -> None:
    with (tmp_path / "sparse").open("wb") as file:
        try:
            file.truncate(1 << 50)
        except OSError:  # the file system has no files as large
            file.truncate(1 << 40)
    with open_regular(tmp_path / "sparse") as sparse, pytest.raises(ValueError, match="more than 1,000 bytes"):
        read_at_most(sparse, 1000)
    with open_regular(tmp_path / "sparse") as sparse, pytest.raises(ValueError, match="a line of more than 1,000"):
        list(bounded_lines(sparse, 1000))


def test_lines_are_those_of_the_file() -> None:
    assert list(bounded_lines(io.BytesIO(b"a\n\nbc"), 3)) == [b"a\n", b"\n", b"bc"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"[" * 200_000, "nested too deeply"),
        (b"9" * 5000, "digits"),
        (b'{"a": NaN}', "NaN is no JSON"),
        (b'{"a": -Infinity}', "-Infinity is no JSON"),
        (b'{"a": {"b": 1, "b": 2}}', "'b' stands there twice"),
        (b'"\xff"', "decode"),
        (b"", "Expecting value"),
    ],
    ids=["deep", "long", "NaN", "infinity", "twice", "not UTF-8", "empty"],
)
def test_what_is_no_json_is_a_value_error(text: bytes, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        parse_json(text)


def test_other_tools_write_nan() -> None:
    assert parse_json("[1, NaN]", strict=False)[0] == 1


@pytest.mark.parametrize(
    ("found", "said"),
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
def test_a_version_is_the_one_that_is_known(found: object, said: str | None) -> None:
    refused = refused_version(found, 3)
    assert refused is said if said is None else refused is not None and refused.startswith(said)
