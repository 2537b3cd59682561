"""`replace_file` leaves a complete new file, or the old one and no other.

Untrusted files and texts are refused with one kind of error each, at once, and in little memory (SECURITY.md).

`check_archive` lets through what ``torch.save`` writes, and refuses archives that claim more than they hold.
"""

from __future__ import annotations

import errno
import hashlib
import io
import os
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import pytest
import torch

from ddpstats._base.files import (
    bounded_lines,
    check_archive,
    open_regular,
    parse_json,
    read_at_most,
    refused_version,
    replace_file,
)

# -- atomic files ------------------------------------------------------------------------------------------------------


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


# -- untrusted ---------------------------------------------------------------------------------------------------------


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


# -- tensor archive ----------------------------------------------------------------------------------------------------

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
        pytest.param(
            {"parameters": {f"layer.{i}.weight": torch.zeros(1) for i in range(20_000)}}, marks=pytest.mark.slow
        ),
        {"deep": [{"a": (1, 2.5, None, True, "text", 10**30)}] * 3, "many": list(range(2000))},
        {"text": [f"word {i} " * 100 for i in range(20_000)]},
        pytest.param([[[True]] for _ in range(300_000)], marks=pytest.mark.slow),
        pytest.param([{} for _ in range(1000)] + [[] for _ in range(300_000)], marks=pytest.mark.slow),
    ],
    ids=["every dtype", "shared", "sparse", "of some kinds", "many", "plain", "texts", "short lists", "empty lists"],
)
def test_file_that_torch_writes_passes(content: Any, tmp_path: Path) -> None:
    torch.save(content, tmp_path / "file.pt")
    with (tmp_path / "file.pt").open("rb") as file:
        check_archive(file)
        assert file.tell() == 0


def entries(content: Any) -> dict[str, bytes]:
    saved = io.BytesIO()
    torch.save(content, saved)
    with zipfile.ZipFile(saved) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def with_another_pickle(change: Callable[[bytes], bytes]) -> dict[str, bytes]:
    found = entries({"x": torch.ones(4)})
    (name,) = (name for name in found if name.endswith("data.pkl"))
    changed = change(found[name])
    assert changed != found[name]
    return {**found, name: changed}


def claiming(elements: bytes) -> Callable[[bytes], bytes]:
    """Of the tensor's storage, which has four: the number is pushed just before the tuple that names it ends."""
    return lambda pickled: pickled.replace(b"K\x04t", elements + b"t", 1)


def behind_a_copy(pickled: bytes) -> bytes:
    """The number is one that was kept before, under a place that now stands for another."""
    return pickled.replace(b"}q\x00", b"}q\x00J\x00\x10\x00\x00q\x630", 1).replace(b"K\x04t", b"h\x63t", 1)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (claiming(b"J\x00\x10\x00\x00"), "claims 16,384 bytes, and has fewer"),
        (claiming(b"\x8a\x07\x00\x00\x00\x00\x00\x00\x10"), "claims 18,014,398,509,481,984 bytes"),
        (behind_a_copy, "claims 16,384 bytes"),
        (claiming(b"J\xff\xff\xff\xff"), "in a way that torch.save does not"),
        (claiming(b"\x88"), "in a way that torch.save does not"),  # True
        (claiming(b"K\x04K\x04"), "in a way that torch.save does not"),
        (claiming(b"]K\x04"), "in a way that torch.save does not"),
        (lambda pickled: pickled.replace(b"FloatStorage", b"OtherStorage"), "in a way that torch.save does not"),
        (lambda pickled: pickled[:40], "."),
    ],
    ids=["more", "a petabyte", "kept", "negative", "a flag", "six", "made", "of a kind", "cut"],
)
def test_a_storage_larger_than_its_entry(change: Callable[[bytes], bytes], said: str, tmp_path: Path) -> None:
    refuse(archive(with_another_pickle(change), tmp_path), said)


def archive(found: dict[str, bytes], directory: Path, **options: Any) -> Path:
    path = directory / "file.pt"
    with zipfile.ZipFile(path, "w", **options) as made:
        for name, content in found.items():
            made.writestr(name, content)
    return path


def refuse(path: Path, said: str) -> None:
    with path.open("rb") as file, pytest.raises(ValueError, match=said):
        check_archive(file)


def test_an_archive_that_is_packed(tmp_path: Path) -> None:
    found = entries({"x": torch.zeros(100_000)})
    refuse(archive(found, tmp_path, compression=zipfile.ZIP_DEFLATED), "unpacks to more than it holds")


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_an_entry_that_stands_there_twice(tmp_path: Path) -> None:
    path = archive(entries({"x": torch.ones(4)}), tmp_path)
    with zipfile.ZipFile(path, "a") as made:
        made.writestr(next(name for name in made.namelist() if name.endswith("data/0")), b"")
    refuse(path, "two entries of one name")


def test_an_archive_behind_something_else(tmp_path: Path) -> None:
    """Torch would read the beginning, and a reader of archives the end."""
    path = archive(entries({"x": torch.ones(4)}), tmp_path)
    older = io.BytesIO()
    torch.save({"x": torch.ones(4)}, older, _use_new_zipfile_serialization=False)
    path.write_bytes(older.getvalue() + path.read_bytes())
    refuse(path, "no archive of torch.save")


def test_an_archive_without_a_pickle(tmp_path: Path) -> None:
    refuse(archive({"archive/version": b"3"}, tmp_path), "no data.pkl")


@pytest.mark.slow
@pytest.mark.parametrize("made", [b"N" + b"\x94" * (1 << 20), b"]" * (1 << 20), b"\x8f" * (1 << 20)])
def test_a_pickle_of_which_much_is_made(made: bytes, tmp_path: Path) -> None:
    path = archive({"archive/data.pkl": b"\x80\x02" + made + b"."}, tmp_path)
    tracemalloc.start()
    try:
        refuse(path, r"more than 350,\d\d\d things would be made of its data\.pkl of 1,048,\d\d\d bytes")
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.slow
def test_a_pickle_too_large_to_be_read(tmp_path: Path) -> None:
    path = archive({"archive/data.pkl": b"\x80\x02" + b"N" * (64 << 20) + b"."}, tmp_path)
    refuse(path, r"its data\.pkl has 67,108,867 bytes, and more than 67,108,864 are not read")
