"""A step is written line by line and never over another; its files are complete or not there."""

from __future__ import annotations

import errno
import json
import math
import os
import resource
from pathlib import Path
from typing import Any

import pytest
import torch

from ddpstats.dump import writer as writer_module
from ddpstats.dump.msprobe import file_name
from ddpstats.dump.writer import StepWriter, TensorFiles, as_json

HEADER = {"task": "statistics", "level": "mix", "dump_data_dir": None}
ENTRY: dict[str, Any] = {"input_args": [{"Max": as_json(math.nan), "Min": as_json(-math.inf)}], "output": []}


def written(path: Path) -> StepWriter:
    writer = StepWriter(path, HEADER)
    stack = writer.new_stack(["a line", "another"])
    writer.new_stack(["of no entry"])
    writer.add("Torch.add.0.forward", ENTRY, stack, "Module.root.Net.forward.0")
    writer.add("Module.root.Net.forward.0", {"output": ['"quoted"\n']}, stack, None)
    return writer


def names_in(path: Path) -> list[str | None]:
    return [json.loads(line).get("name") for line in path.read_text().splitlines()]


@pytest.mark.parametrize("text", ["plain", "\u00e9", "\ud800"])
def test_entry_is_ascii_and_its_numbers_are_all_kept(text: str, tmp_path: Path) -> None:
    numbers = [0.1, -0.0, 5e-324, 1e22, 2**70, math.nan, math.inf, -math.inf, True, None]
    writer = StepWriter(tmp_path, HEADER)
    entry = {"output": [as_json(value) if isinstance(value, float) else value for value in numbers], "text": text}
    writer.add("Torch.add.0.forward", entry, writer.new_stack([]), None)
    writer.finish()
    dump = (tmp_path / "dump.json").read_bytes()
    assert dump.isascii()
    read = json.loads(dump)["data"]["Torch.add.0.forward"]
    assert repr(read) == repr({"output": numbers, "text": text})


def test_directory_is_readable_by_its_owner_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        written(tmp_path / "step0" / "rank0").finish()
    finally:
        os.umask(before)
    assert (tmp_path / "step0" / "rank0").stat().st_mode & 0o777 == 0o700


def test_files_of_different_tensors_have_different_names() -> None:
    names = ["x/y", "x y", "n" * 300, "n" * 299 + "m", "é" * 200, "é" * 199 + "è", "x_y"]
    files = [file_name(name, path) for name in names for path in ("input.0", "output.0", "input_kwargs." + "k" * 300)]
    assert len(set(files)) == len(files)
    assert all(len(file.encode()) < 240 and file.isascii() for file in files)
    assert file_name("a b", "input.0").endswith(".input.0.pt")


@pytest.mark.parametrize("has_links", [True, False])
def test_equal_tensors_have_one_file_with_several_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_links: bool
) -> None:
    """Each file has all of its tensor, also where the file system has no links, and whatever is overwritten later."""
    if not has_links:
        monkeypatch.setattr("os.link", refuse_link)
    x = torch.tensor([1.0, math.nan])
    overwritten = torch.ones(2)
    tensors = [x, x.clone(), x.double(), x[None], overwritten, torch.tensor([0.0, 0.0]), torch.tensor([0.0, -0.0])]
    files, saved = TensorFiles(tmp_path, at_once=True), []
    for number, tensor in enumerate([*tensors, overwritten]):
        if number == len(tensors):
            overwritten.zero_()
        path = tmp_path / files.save(tensor, f"Torch.add.{number}.forward", "output.0")
        saved.append(path)
        assert torch.equal(torch.load(path).view(torch.uint8), tensor.view(torch.uint8))
    inodes = [path.stat().st_ino for path in saved]
    assert [inodes.index(inode) for inode in inodes] == ([0, 0, 2, 3, 4, 5, 6, 5] if has_links else list(range(8)))


@pytest.mark.parametrize("at_once", [True, False])
def test_tensor_that_cannot_be_written_leaves_no_file_and_costs_no_other_one(tmp_path: Path, at_once: bool) -> None:
    files, failed = TensorFiles(tmp_path, at_once=at_once), []
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, before[1]))
    try:
        for number, elements in enumerate([10, 1 << 20, 20]):
            try:
                files.save(torch.full((elements,), float(number)), f"Torch.add.{number}.forward", "output")
            except (OSError, RuntimeError) as error:
                failed.append(error)
        try:
            files.flush()
        except (OSError, RuntimeError) as error:
            failed.append(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert len(failed) == 1
    assert sorted(os.listdir(tmp_path)) == ["Torch.add.0.forward.output.pt", "Torch.add.2.forward.output.pt"]


def refuse_link(source: str, target: str) -> None:
    raise OSError(errno.EPERM, os.strerror(errno.EPERM))


def full(file: int, data: bytes) -> int:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_entry_that_a_full_disk_lost_leaves_an_incomplete_dump(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write
    writer = written(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda file, data: write(file, data[:20]) if len(data) > 20 else full(file, data))
        with pytest.raises(OSError, match="No space"):
            writer.add("Torch.add.1.forward", ENTRY, 0, None)
    writer.add("Torch.add.2.forward", {}, 0, None)
    with pytest.raises(OSError, match="No space"):
        writer.finish()
    names = ["Torch.add.0.forward", "Module.root.Net.forward.0", "Torch.add.2.forward"]
    assert names_in(tmp_path / "dump.jsonl") == [None, *names]
    assert [path.name for path in tmp_path.iterdir()] == ["dump.jsonl"]
    assert writer._file is None  # its descriptor is given back


def test_files_that_a_full_disk_does_not_take_leave_the_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = written(tmp_path)
    monkeypatch.setattr("ddpstats.dump.writer.replace_files", lambda writes: full(0, b""))
    with pytest.raises(OSError, match="No space"):
        writer.finish()
    assert len(names_in(tmp_path / "dump.jsonl")) == 3


def test_directory_of_another_writer_is_refused(tmp_path: Path) -> None:
    first = written(tmp_path)
    with pytest.raises(FileExistsError):
        written(tmp_path)
    first.finish()
    text = (tmp_path / "dump.json").read_text()
    with pytest.raises(FileExistsError):
        written(tmp_path)
    assert (tmp_path / "dump.json").read_text() == text
    assert not (tmp_path / "dump.jsonl").exists()


def test_lost_line_leaves_no_dump_json(tmp_path: Path) -> None:
    writer = written(tmp_path)
    os.truncate(tmp_path / "dump.jsonl", 150)
    with pytest.raises(OSError, match="could not be read again"):
        writer.finish()
    assert not (tmp_path / "dump.json").exists()


def test_entry_that_is_too_large_to_be_read_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = written(tmp_path)
    monkeypatch.setattr(writer_module, "LARGEST_ENTRY_BYTES", 100)
    with pytest.raises(ValueError, match=r"the entry takes 1\d\d bytes, of which readers take 100"):
        writer.add("Torch.stack.0.forward", ENTRY, 0, None)
    writer.finish()
    names = ["Torch.add.0.forward", "Module.root.Net.forward.0"]
    assert list(json.loads((tmp_path / "dump.json").read_text())["data"]) == names
    assert json.loads((tmp_path / "stack.json").read_text()) == {"0": [names, ["a line", "another"]]}


def test_file_without_its_first_line_does_not_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(file: int, line: bytes) -> int:
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(os, "write", write)
    with pytest.raises(OSError, match="no space"):
        StepWriter(tmp_path, HEADER).open()
    assert not [*tmp_path.iterdir()]
