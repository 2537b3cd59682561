"""Files are complete or absent; untrusted files and texts are refused at once, in little memory (SECURITY.md)."""

from __future__ import annotations

import errno
import hashlib
import io
import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import pytest
import torch

from ddpstats._base.files import (
    Written,
    bounded_lines,
    check_archive,
    explain_version,
    open_regular,
    parse_json,
    read_at_most,
    replace_file,
    summarize,
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


def test_summary_is_of_the_content_even_after_a_seek(tmp_path: Path) -> None:
    def write(file: BinaryIO) -> Written:
        file.write(b"xxcd")
        file.seek(0)
        file.write(b"ab")
        return summarize(file)

    assert replace_file(tmp_path / "file", write) == Written(4, hashlib.sha256(b"abcd").hexdigest())
    assert (tmp_path / "file").read_bytes() == b"abcd"


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


# -- files of torch.save -----------------------------------------------------------------------------------------------

DTYPES = [
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16),
    *(torch.float32, torch.float64, torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.uint16),
]
SHARED = torch.arange(10.0)


@pytest.mark.parametrize(
    "content",
    [
        {str(dtype): torch.ones(2, 3).to(dtype) for dtype in DTYPES},
        [SHARED[1:], SHARED[2:], SHARED.view(2, 5).t()],
        torch.eye(3).to_sparse(),
        [torch.nn.Parameter(torch.ones(2)), torch.zeros(0), torch.ones(3, device="meta")],
        pytest.param({f"layer.{i}.weight": torch.zeros(1) for i in range(20_000)}, marks=pytest.mark.slow),
        {"deep": [{"a": (1, 2.5, None, True, "text", 10**30)}] * 3, "many": list(range(2000))},
    ],
    ids=["every dtype", "shared", "sparse", "of some kinds", "many", "plain"],
)
def test_file_that_torch_writes_passes(content: Any, tmp_path: Path) -> None:
    torch.save(content, tmp_path / "file.pt")
    with (tmp_path / "file.pt").open("rb") as file:
        check_archive(file)
        assert file.tell() == 0


def saved_entries(content: Any) -> dict[str, bytes]:
    buffer = io.BytesIO()
    torch.save(content, buffer)
    with zipfile.ZipFile(buffer) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def write_archive(entries: dict[str, bytes], directory: Path, **options: Any) -> Path:
    path = directory / "file.pt"
    with zipfile.ZipFile(path, "w", **options) as archive:
        for name, content in entries.items():
            archive.writestr(name, content)
    return path


def expect_refusal(path: Path, reason: str) -> None:
    with path.open("rb") as file, pytest.raises(ValueError, match=reason):
        check_archive(file)


def claiming(elements: bytes) -> Callable[[bytes], bytes]:
    """Claim another size for a storage of four elements: the number is pushed just before its tuple ends."""
    return lambda pickled: pickled.replace(b"K\x04t", elements + b"t", 1)


def claiming_from_memo(pickled: bytes) -> bytes:
    """Claim a size that was put into the memo before, in a slot that another value had."""
    return pickled.replace(b"}q\x00", b"}q\x00J\x00\x10\x00\x00q\x630", 1).replace(b"K\x04t", b"h\x63t", 1)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (claiming(b"J\x00\x10\x00\x00"), "claims 16,384 bytes, and has fewer"),
        (claiming(b"\x8a\x07\x00\x00\x00\x00\x00\x00\x10"), "claims 18,014,398,509,481,984 bytes"),
        (claiming_from_memo, "claims 16,384 bytes"),
        (claiming(b"J\xff\xff\xff\xff"), "in a way that torch.save does not"),
        (claiming(b"\x88"), "in a way that torch.save does not"),  # True
        (claiming(b"K\x04K\x04"), "in a way that torch.save does not"),
        (claiming(b"]K\x04"), "in a way that torch.save does not"),
        (lambda pickled: pickled.replace(b"FloatStorage", b"OtherStorage"), "in a way that torch.save does not"),
        (lambda pickled: pickled[:40], "."),
    ],
    ids=["more", "a petabyte", "from memo", "negative", "a flag", "six", "made", "of a kind", "cut"],
)
def test_storage_that_claims_more_than_its_entry_is_refused(
    change: Callable[[bytes], bytes], reason: str, tmp_path: Path
) -> None:
    entries = saved_entries({"x": torch.ones(4)})
    (name,) = (name for name in entries if name.endswith("data.pkl"))
    changed = change(entries[name])
    assert changed != entries[name]
    expect_refusal(write_archive({**entries, name: changed}, tmp_path), reason)


def test_packed_archive_is_refused(tmp_path: Path) -> None:
    entries = saved_entries({"x": torch.zeros(100_000)})
    expect_refusal(write_archive(entries, tmp_path, compression=zipfile.ZIP_DEFLATED), "unpacks to more than it holds")


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_archive_with_two_entries_of_one_name_is_refused(tmp_path: Path) -> None:
    path = write_archive(saved_entries({"x": torch.ones(4)}), tmp_path)
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr(next(name for name in archive.namelist() if name.endswith("data/0")), b"")
    expect_refusal(path, "two entries of one name")


def test_archive_behind_an_older_file_is_refused(tmp_path: Path) -> None:
    """Torch would read the beginning, and a reader of archives the end."""
    path = write_archive(saved_entries({"x": torch.ones(4)}), tmp_path)
    older = io.BytesIO()
    torch.save({"x": torch.ones(4)}, older, _use_new_zipfile_serialization=False)
    path.write_bytes(older.getvalue() + path.read_bytes())
    expect_refusal(path, "no archive of torch.save")


def test_archive_without_a_pickle_is_refused(tmp_path: Path) -> None:
    expect_refusal(write_archive({"archive/version": b"3"}, tmp_path), "no data.pkl")


@pytest.mark.slow
def test_pickle_of_more_than_64_mib_is_refused(tmp_path: Path) -> None:
    path = write_archive({"archive/data.pkl": b"\x80\x02" + b"N" * (64 << 20) + b"."}, tmp_path)
    expect_refusal(path, r"its data\.pkl has 67,108,867 bytes, and more than 67,108,864 are not read")
