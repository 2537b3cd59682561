"""`check_archive` lets through what ``torch.save`` writes, and refuses archives that claim more than they hold."""

from __future__ import annotations

import io
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ddpstats._base.tensor_archive import check_archive

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
