"""Messages shorten lists, name ranks and count things in one way.

A report reaches terminals, spreadsheet programs, JSON parsers and browsers as text, and its file as a whole.

A progress bar is written to a terminal, and to no other stream.
"""

from __future__ import annotations

import io
import math
import os
import stat
import subprocess
import sys
import threading
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from ddpstats._base import text
from ddpstats._base.text import (
    ProgressBar,
    Section,
    VerbReport,
    check_writable,
    count_of,
    dtype_name,
    harmless,
    listed,
    printable,
    ranks_text,
    write_file,
)
from ddpstats.errors import DdpstatsError

# -- wording -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("things", "text"),
    [([], ""), (["a"], "a"), (["a", "b"], "a, b"), ("abc", "a, b and 1 more"), (range(5), "0, 1 and 3 more")],
)
def test_a_long_list_is_cut_short(things: list[object], text: str) -> None:
    assert listed(things, 2) == text


def test_eight_ranks_are_named() -> None:
    assert ranks_text([3]) == "rank 3"
    assert ranks_text(range(10)) == "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 2 more"


def test_count_has_separators_and_the_noun_its_plural() -> None:
    assert [count_of(1, "entries in both"), count_of(1024, "tensors")] == ["1 entry in both", "1,024 tensors"]


def test_dtypes_of_tensors_and_of_files() -> None:
    assert [dtype_name("torch.float32"), dtype_name("int64")] == ["float32", "int64"]


# -- report ------------------------------------------------------------------------------------------------------------


def test_control_characters_are_written_out() -> None:
    assert printable(["a\x1b[2Jb\n", "\ud800 \u202e é"]) == "a\\x1b[2Jb\\n\n\\ud800 \\u202e é"


@pytest.mark.parametrize("cell", ["=1+1", "+A1", "-A1", "@x", "\t=1", "\r=1"])
def test_formulas_are_quoted(cell: str) -> None:
    assert harmless(cell) == f"'{cell}"


@pytest.mark.parametrize("cell", ["-1.5", "-inf", "+3", -2.5, None, "a=1", ""])
def test_numbers_and_words_are_not_quoted(cell: Any) -> None:
    assert harmless(cell) == cell


def test_a_report_is_text_or_legal_json(capsys: pytest.CaptureFixture[str]) -> None:
    report = VerbReport(1, lambda: "DIFFERENT", lambda: {"worst": (math.nan, -math.inf), "rank": 0})
    assert [report.show(as_json=False), report.show(as_json=True)] == [1, 1]
    assert capsys.readouterr().out == 'DIFFERENT\n{"worst": ["NaN", "-Infinity"], "rank": 0}\n'


def test_a_text_cannot_command_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    VerbReport(0, lambda: "one\x1b[2J\r\ntwo\x07", dict).show(as_json=False)
    assert capsys.readouterr().out == "one\\x1b[2J\\r\ntwo\\x07\n"


def test_a_page_has_the_text_and_a_table_of_each_section(tmp_path: Path) -> None:
    sections = [
        Section(["Name"], [(["<x>"], "red", 'a "b"')], "rank 0"),
        Section((), (), "rank 1", ["No row differs."]),
    ]
    VerbReport(1, lambda: "1 < 2", dict).write_page(tmp_path / "t.html", "A & B", sections)
    page = (tmp_path / "t.html").read_text()
    assert "<h1>A &amp; B</h1>\n<pre>1 &lt; 2</pre>\n<h2>rank 0</h2>\n<table><tr><th>Name</th></tr>\n" in page
    assert '<tr class="red" title="a &quot;b&quot;"><td>&lt;x&gt;</td></tr>\n</table>\n' in page
    assert page.endswith("<h2>rank 1</h2>\n<p>No row differs.</p>\n</body></html>\n")


def written(path: Path) -> None:
    check_writable(path)
    write_file(path, lambda file: file.write("new"))


def test_a_file_behind_a_link_is_what_is_written(tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    for target in (tmp_path / "kept" / "there", tmp_path / "kept" / "not yet"):
        link = tmp_path / f"link to {target.name}"
        link.symlink_to(target)
        (tmp_path / "kept" / "there").write_text("old")
        written(link)
        assert (link.is_symlink(), target.read_text()) == (True, "new")


def test_a_link_that_leads_into_no_directory(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "none" / "file")
    with pytest.raises(DdpstatsError, match=f"no directory {tmp_path}/none"):
        check_writable(tmp_path / "link")


@pytest.mark.parametrize(("mode", "is_refused"), [(0o1777, True), (0o777, False), (0o1755, False)])
def test_a_link_of_a_stranger_in_a_directory_for_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int, is_refused: bool
) -> None:
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared").chmod(mode)
    (tmp_path / "mine").write_text("old")
    (tmp_path / "shared" / "theirs").symlink_to(tmp_path / "mine")
    (tmp_path / "link").symlink_to("shared/theirs")
    written(tmp_path / "link")
    assert (tmp_path / "mine").read_text() == "new"

    def of_another(path: Path) -> os.stat_result:
        fields = list(os.lstat(path))
        fields[stat.ST_UID] += path.name == "theirs"
        return os.stat_result(fields)

    monkeypatch.setattr(Path, "lstat", of_another)
    (tmp_path / "mine").write_text("old")
    with pytest.raises(DdpstatsError, match="theirs is a link of another user") if is_refused else nullcontext():
        written(tmp_path / "link")
    assert (tmp_path / "mine").read_text() == ("old" if is_refused else "new")


def test_a_pipe_is_written_into_and_stays(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    read: list[str] = []
    reader = threading.Thread(target=lambda: read.append((tmp_path / "pipe").read_text()), daemon=True)
    reader.start()
    written(tmp_path / "pipe")
    reader.join(10)
    assert ((tmp_path / "pipe").is_fifo(), read) == (True, ["new"])


def test_a_link_to_an_open_pipe(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    (tmp_path / "link").symlink_to(f"/proc/self/fd/{writing}")
    written(tmp_path / "link")
    os.close(writing)
    with os.fdopen(reading) as pipe:
        assert (pipe.read(), (tmp_path / "link").is_symlink()) == ("new", True)


def test_a_pipe_whose_reader_has_gone(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with pytest.raises(DdpstatsError, match=r"cannot be written: Broken pipe\."):
        write_file(Path(f"/proc/self/fd/{writing}"), lambda file: file.write("new"))
    os.close(writing)


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
@pytest.mark.parametrize("by_name", [False, True])
@pytest.mark.parametrize(
    ("stream", "redirect", "expected"),
    [
        (1, ">>", "old\nbefore\nfile\nafter\n"),
        (1, ">", "before\nfile\nafter\n"),
        (2, "2>>", "old\nfile\n"),
        (2, "2>", "file\n"),
    ],
)
def test_the_file_that_a_stream_goes_to_keeps_what_is_in_it(
    tmp_path: Path, by_name: bool, stream: int, redirect: str, expected: str
) -> None:
    log = tmp_path / "log.txt"
    log.write_text("old\n")
    named = log if by_name else f"/dev/fd/{stream}"
    command = f'"$0" -c "$1" {named} {redirect} {log}'
    subprocess.run(["sh", "-c", command, sys.executable, _TO_STDOUT], stdout=subprocess.DEVNULL, check=True, timeout=60)
    assert log.read_text() == expected
    assert os.listdir(tmp_path) == ["log.txt"]


# -- progress ----------------------------------------------------------------------------------------------------------


class Stream(io.StringIO):
    def __init__(self, *, terminal: bool) -> None:
        super().__init__()
        self._terminal = terminal

    def isatty(self) -> bool:
        return self._terminal


@pytest.mark.parametrize("terminal", [True, False])
def test_a_bar_on_a_terminal(terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Stream(terminal=terminal)
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(text, "_EVERY_SEC", 0.0)
    with ProgressBar(1000) as bar:
        bar.add(500)
    shown = stream.getvalue()
    assert ("[###############               ]  50%" in shown) is terminal
    assert shown.endswith("\r\x1b[K") is terminal
