"""A file of `torch.save` that claims more than it holds is refused before torch reads it (SECURITY.md)."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ddpstats._rerun.archive import check_archive

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
