"""Messages share their words; reports are harmless to terminals, tables and browsers; files are complete or absent."""

from __future__ import annotations

import errno
import math
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from ddpstats._base.text import (
    check_writable,
    count_of,
    dtype_name,
    print_report,
    printable,
    ranks_text,
    shorten,
    write_file,
)
from ddpstats.errors import DdpstatsError

# -- words of messages -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("things", "expected"),
    [([], ""), (["a"], "a"), (["a", "b"], "a, b"), ("abc", "a, b and 1 more"), (range(5), "0, 1 and 3 more")],
)
def test_long_list_names_the_first_and_counts_the_rest(things: list[object], expected: str) -> None:
    assert shorten(things, 2) == expected


def test_at_most_eight_ranks_are_named() -> None:
    assert ranks_text([3]) == "rank 3"
    assert ranks_text(range(10)) == "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 2 more"


def test_count_has_separators_and_its_noun_the_right_number() -> None:
    assert [count_of(1, "entries in both"), count_of(1024, "tensors")] == ["1 entry in both", "1,024 tensors"]


def test_dtype_name_lacks_the_prefix_of_torch() -> None:
    assert [dtype_name("torch.float32"), dtype_name("int64")] == ["float32", "int64"]


# -- reports -----------------------------------------------------------------------------------------------------------


def test_control_characters_in_lines_are_escaped() -> None:
    assert printable(["a\x1b[2Jb\n", "\ud800 \u202e é"]) == "a\\x1b[2Jb\\n\n\\ud800 \\u202e é"


def test_report_is_shown_as_text_or_legal_json_and_returns_its_status(capsys: pytest.CaptureFixture[str]) -> None:
    for as_json in (False, True):
        assert print_report(1, as_json, lambda: "DIFFERENT", lambda: {"worst": (math.nan, -math.inf), "rank": 0}) == 1
    assert capsys.readouterr().out == 'DIFFERENT\n{"worst": ["NaN", "-Infinity"], "rank": 0}\n'


def test_shown_text_cannot_command_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    print_report(0, False, lambda: "one\x1b[2J\r\ntwo\x07", dict)
    assert capsys.readouterr().out == "one\\x1b[2J\\r\ntwo\\x07\n"


def written(path: Path) -> None:
    check_writable(path)
    write_file(path, lambda file: file.write("new"))


def test_link_is_replaced_and_the_file_that_it_leads_to_stays(tmp_path: Path) -> None:
    (tmp_path / "old").write_text("old")
    for target in ("old", "none"):
        link = tmp_path / f"link to {target}"
        link.symlink_to(target)
        written(link)
        assert (link.is_symlink(), link.read_text()) == (False, "new")
    assert ((tmp_path / "old").read_text(), (tmp_path / "none").exists()) == ("old", False)


def test_missing_directory_is_refused_before_the_work(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("old")
    for parent in ("none", "file"):
        with pytest.raises(DdpstatsError, match=f"no directory {tmp_path}/{parent}"):
            check_writable(tmp_path / parent / "x.html")


def test_pipe_is_written_into_and_stays(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    read: list[str] = []
    reader = threading.Thread(target=lambda: read.append((tmp_path / "pipe").read_text()), daemon=True)
    reader.start()
    written(tmp_path / "pipe")
    reader.join(10)
    assert ((tmp_path / "pipe").is_fifo(), read) == (True, ["new"])


def test_link_to_an_open_pipe_is_written_into_and_stays(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    (tmp_path / "link").symlink_to(f"/proc/self/fd/{writing}")
    written(tmp_path / "link")
    os.close(writing)
    with os.fdopen(reading) as pipe:
        assert (pipe.read(), (tmp_path / "link").is_symlink()) == ("new", True)


def test_file_that_cannot_be_written_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(DdpstatsError, match=r"^/dev/full cannot be written: No space left on device\.$"):
        write_file(Path("/dev/full"), lambda file: file.write("new"))
    with pytest.raises(DdpstatsError, match=r"none/file cannot be written: No such file or directory\.$") as caught:
        write_file(tmp_path / "none" / "file", lambda file: file.write("new"))
    assert caught.value.path == str(tmp_path / "none" / "file")


def test_error_while_the_text_is_made_is_raised_as_it_is_and_leaves_the_old_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("old")

    def write(file: Any) -> None:
        file.write("half")
        raise FileNotFoundError(errno.ENOENT, "No such file", "another")

    with pytest.raises(FileNotFoundError, match="another"):
        write_file(tmp_path / "file", write)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"file": "old"}


_TO_STDOUT = """
import sys
from pathlib import Path
from ddpstats._base.text import check_writable, write_file

path = Path(sys.argv[1])
check_writable(path)
print("before")
write_file(path, lambda file: file.write("file\\n"))
print("after")
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "redirect", "expected"),
    [
        ("/dev/stdout", ">>", "old\nbefore\nfile\nafter\n"),
        ("/dev/stdout", ">", "before\nfile\nafter\n"),
        ("/dev/stderr", "2>>", "old\nfile\n"),
    ],
)
def test_standard_stream_is_written_after_what_was_printed(
    tmp_path: Path, name: str, redirect: str, expected: str
) -> None:
    log = tmp_path / "log.txt"
    log.write_text("old\n")
    command = f'"$0" -c "$1" {name} {redirect} {log}'
    subprocess.run(["sh", "-c", command, sys.executable, _TO_STDOUT], stdout=subprocess.DEVNULL, check=True, timeout=60)
    assert log.read_text() == expected
    assert os.listdir(tmp_path) == ["log.txt"]
