"""The files of a step, their names, and the stacks; without torch."""

from __future__ import annotations

import errno
import json
import math
import os
from pathlib import Path
from typing import Any

import pytest

from ddpstats.dump.collect._stacks import StackBook
from ddpstats.dump.format._names import backward_of, file_name, module_base
from ddpstats.dump.format._writer import StepWriter

HEADER = {"task": "statistics", "level": "mix", "dump_data_dir": None}
ENTRY: dict[str, Any] = {"input_args": [{"Max": math.nan, "Min": -math.inf}], "output": []}


def written(path: Path, *, at_once: bool, header: dict[str, Any] = HEADER) -> StepWriter:
    writer = StepWriter(path, header, at_once=at_once)
    here, there = writer.new_stack(["a line", "another"]), writer.new_stack(["of nobody"])
    writer.add("Torch.add.0.forward", ENTRY, here, "Module.root.Net.forward.0")
    writer.add("Module.root.Net.forward.0", {"output": ['"quoted"\n']}, here, None)
    assert there == 1
    return writer


def test_files_are_the_same_whether_written_at_once_or_at_the_end(tmp_path: Path) -> None:
    texts = []
    for at_once in (True, False):
        path = tmp_path / str(at_once)
        writer = written(path, at_once=at_once)
        assert (path / "dump.jsonl").exists() == at_once
        writer.finish()
        assert sorted(one.name for one in path.iterdir()) == ["construct.json", "dump.json", "stack.json"]
        texts.append({one.name: one.read_text() for one in path.iterdir()})
    assert texts[0] == texts[1]
    dump = json.loads(texts[0]["dump.json"])
    assert list(dump["data"]) == ["Torch.add.0.forward", "Module.root.Net.forward.0"]
    assert math.isnan(dump["data"]["Torch.add.0.forward"]["input_args"][0]["Max"])
    names = ["Torch.add.0.forward", "Module.root.Net.forward.0"]
    assert json.loads(texts[0]["stack.json"]) == {"0": [names, ["a line", "another"]]}
    assert json.loads(texts[0]["construct.json"]) == dict(zip(names, ["Module.root.Net.forward.0", None], strict=True))


def test_only_its_owner_may_look_into_it(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        written(tmp_path / "step0" / "rank0", at_once=True).finish()
    finally:
        os.umask(before)
    assert (tmp_path / "step0" / "rank0").stat().st_mode & 0o777 == 0o700


def test_dump_json_says_its_format(tmp_path: Path) -> None:
    written(tmp_path / "rank0", at_once=False).finish()
    assert json.loads((tmp_path / "rank0" / "dump.json").read_text())["ddpstats"] == 1


def test_lines_are_complete_records(tmp_path: Path) -> None:
    written(tmp_path, at_once=True)
    header, first, second = map(json.loads, (tmp_path / "dump.jsonl").read_text().splitlines())
    assert header == {**HEADER, "ddpstats": 1}
    assert list(first) == ["name", "entry", "stack", "parent"]
    assert first["stack"] == second["stack"] == ["a line", "another"]


def test_a_step_goes_on_after_its_files_were_made(tmp_path: Path) -> None:
    for at_once in (True, False):
        path = tmp_path / str(at_once)
        writer = written(path, at_once=at_once)
        writer.finish()
        writer.reopen()
        writer.add("Torch.add.1.forward", {}, 1, None)
        if at_once:
            assert len((path / "dump.jsonl").read_text().splitlines()) == 4
        writer.finish()
        found = json.loads((path / "dump.json").read_text())["data"]
        assert list(found) == ["Torch.add.0.forward", "Module.root.Net.forward.0", "Torch.add.1.forward"]
        assert found["Module.root.Net.forward.0"] == {"output": ['"quoted"\n']}


def test_a_step_without_entries_is_legal(tmp_path: Path) -> None:
    writer = StepWriter(tmp_path, {**HEADER, "level": "L1"}, at_once=True)
    writer.finish()
    assert json.loads((tmp_path / "dump.json").read_text())["data"] == {}
    assert json.loads((tmp_path / "construct.json").read_text()) == {}


def test_names() -> None:
    assert module_base("", "Net") == "Module.root.Net"
    assert backward_of("Functional.linear.3.forward") == "Functional.linear.3.backward"
    assert backward_of("Module.forward.Net.forward.3") == "Module.forward.Net.backward.3"
    assert file_name("Torch.add.0.forward", "input.0") == "Torch.add.0.forward.input.0.pt"


def test_different_tensors_have_different_files() -> None:
    names = ["x/y", "x y", "n" * 300, "n" * 299 + "m", "é" * 200, "é" * 199 + "è", "x_y"]
    files = [file_name(name, path) for name in names for path in ("input.0", "output.0", "input_kwargs." + "k" * 300)]
    assert len(set(files)) == len(files)
    assert all(len(file.encode()) < 240 and file.isascii() for file in files)
    assert file_name("a b", "input.0").endswith(".input.0.pt")


def test_a_disk_that_is_full_for_a_moment_costs_no_entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write

    def full(file: int, data: bytes) -> int:
        if len(data) > 20:
            return write(file, data[:20])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    writer = written(tmp_path, at_once=True)
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with pytest.raises(OSError, match="No space"):
            writer.add("Torch.add.1.forward", ENTRY, 0, None)
        patch.setattr("ddpstats.dump.format._writer.put_file", lambda path, fill: full(0, b""))
        with pytest.raises(OSError, match="No space"):
            writer.finish()
    assert writer._file is None  # its descriptor is given back
    writer.reopen()
    writer.add("Torch.add.2.forward", {}, 0, None)
    assert [json.loads(line).get("name") for line in (tmp_path / "dump.jsonl").read_text().splitlines()] == [
        None, "Torch.add.0.forward", "Module.root.Net.forward.0", "Torch.add.2.forward"
    ]  # fmt: skip
    writer.finish()
    assert list(json.loads((tmp_path / "dump.json").read_text())["data"]) == [
        "Torch.add.0.forward", "Module.root.Net.forward.0", "Torch.add.1.forward", "Torch.add.2.forward"
    ]  # fmt: skip


@pytest.mark.parametrize("at_once", [True, False])
def test_a_directory_is_one_writers(tmp_path: Path, at_once: bool) -> None:
    first = written(tmp_path, at_once=True)
    with pytest.raises(FileExistsError):
        written(tmp_path, at_once=at_once).finish()
    first.finish()
    text = (tmp_path / "dump.json").read_text()
    with pytest.raises(FileExistsError):
        written(tmp_path, at_once=at_once).finish()
    assert (tmp_path / "dump.json").read_text() == text
    assert not (tmp_path / "dump.jsonl").exists()


def test_an_entry_that_cannot_be_read_again_is_no_half_entry(tmp_path: Path) -> None:
    writer = written(tmp_path, at_once=True)
    os.truncate(tmp_path / "dump.jsonl", 150)
    with pytest.raises(OSError, match="could not be read again"):
        writer.finish()
    assert not (tmp_path / "dump.json").exists()


def test_equal_stacks_have_one_number() -> None:
    books: list[list[str]] = []

    def new(lines: list[str]) -> int:
        books.append(lines)
        return len(books) - 1

    book = StackBook(new)

    def call() -> int:
        return book.here()

    numbers = [call() for _ in range(3)]
    assert numbers == [0, 0, 0]
    other = call()
    assert other == 1
    assert books[0][0].startswith(f"File {__file__}, line ")
    assert books[0][0].endswith(", in call,\n    return book.here()")
    assert len(StackBook(new)._lines(None)) == 0
