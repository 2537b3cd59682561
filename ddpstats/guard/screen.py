"""Ranks on a terminal: a table that `rich` keeps below what the program prints.

The program gets a terminal of its own (a pseudo-terminal), so that it prints as it would without the table, and what
comes from there is printed above: whole lines for good, one without an end just above the table (a progress bar).
"""

from __future__ import annotations

import codecs
import contextlib
import fcntl
import math
import os
import select
import signal
import subprocess
import sys
import termios
import time
import tty
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TextIO

from ddpstats._base.text import count_of, printable
from ddpstats.errors import DdpstatsError
from ddpstats.guard.live_notes import read_notes
from ddpstats.guard.watch import ALARM, EVERY_SEC, Lines, Picture, Row, picture_of

_CHUNK_BYTES = 1 << 16
_LONGEST_TAIL = 4096
_LOOK_SEC = 0.1
_WIDE = 100  # of a terminal: a narrower one has no column of how many collectives there were
ENDING_SEC = 40.0  # torchrun kills ranks that have not ended 30 s after an interrupt


def view_on(stream: TextIO) -> Lines | Screen:
    """A table where `rich` is installed, and the stream is a terminal that can move its cursor; else lines."""
    if stream.isatty() and os.environ.get("TERM", "dumb") != "dumb":
        with contextlib.suppress(ImportError):
            return Screen(stream)
    return Lines(stream)


class Screen:
    """Use it in a ``with``: that gives the cursor back, however it ends."""

    def __init__(self, stream: TextIO) -> None:
        from rich.ansi import AnsiDecoder
        from rich.console import Console
        from rich.live import Live

        console = Console(file=stream, force_terminal=True)
        self._live = Live(console=console, auto_refresh=False, redirect_stdout=False, redirect_stderr=False)
        self._styled, self._decoded = AnsiDecoder(), codecs.getincrementaldecoder("utf-8")("replace")
        self._table: Any = ""
        self._tail = ""  # a line that has not ended yet

    def __enter__(self) -> Screen:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._tail:
            self.above(b"\n")
        self._live.stop()

    def show(self, picture: Picture, *, is_last: bool = False) -> None:
        self._table = _table(picture, self._live.console, is_last=is_last)
        self.above(b"")

    def above(self, output: bytes) -> None:
        """What the program has written. Its colors stay; nothing else of it commands the terminal."""
        from rich.ansi import AnsiDecoder
        from rich.console import Group

        *lines, tail = (self._tail + self._decoded.decode(output)).split("\n")
        self._tail = tail[tail.rfind("\r", 0, -1) + 1 :][-_LONGEST_TAIL:]
        if lines:
            texts = (self._styled.decode_line(line.rstrip("\r")) for line in lines)
            self._live.console.print(*texts, sep="\n", soft_wrap=True)
        unfinished = [AnsiDecoder().decode_line(self._tail)] if self._tail else []
        for text in unfinished:
            text.no_wrap, text.overflow = True, "ellipsis"  # the table takes the lines that are left
        self._live.update(Group(*unfinished, self._table), refresh=True)


def _table(picture: Picture, console: Any, *, is_last: bool = False) -> Any:
    """As high as the terminal but for one line, which a line of the program that has no end yet may take; the last
    table shows all.

    What is found stands above the ranks, and of these those first that are waited for, and then those that wait.
    """
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    width, height = console.size.width, sys.maxsize if is_last else console.size.height - 1
    alarms = [remark for remark in picture.remarks if remark.startswith(ALARM)]
    others = [remark for remark in picture.remarks if not remark.startswith(ALARM)]
    above = [*_wrapped([picture.heading], console, height // 4), *_wrapped(alarms, console, height // 3)]
    rows = sorted(picture.rows, key=lambda row: (row.rank not in picture.late, not _waits(row), row.rank))
    room = height - len(above) - 1  # a line for the names of the columns
    most = min(height // 4, room - min(2, len(rows)))  # a rank, and how many more there are, come before other remarks
    below = _wrapped(others, console, most) if most > 0 else []
    room -= len(below)
    if len(rows) > room:
        rows = rows[: max(1, room - 1)]
        below = [Text(f"and {count_of(len(picture.rows) - len(rows), 'more ranks')}"), *below]
    table = Table(box=None, padding=(0, 1, 0, 0), expand=True)
    shown = [name for name in Row._fields if width >= _WIDE or name != "collectives"]
    for name in shown:
        is_long = name in ("last_collective", "at")
        words = Text(name.replace("_", " "), no_wrap=True, overflow="ellipsis")
        table.add_column(words, no_wrap=not is_long, max_width=30 if name == "state" else None)
    for row in rows:
        cells = (Text(printable([str(getattr(row, name))]), no_wrap=True, overflow="ellipsis") for name in shown)
        table.add_row(*cells, style="bold red" if row.rank in picture.late else None)
    return Group(*above, table, *below)


def _waits(row: Row) -> bool:
    return row.state.startswith("waits")


def _wrapped(texts: Sequence[str], console: Any, most: int) -> list[Any]:
    """Their lines at the width of the terminal: of more than ``most`` the first, and what is left out is seen."""
    from rich.text import Text

    lines = [line for text in texts for line in Text(printable([text])).wrap(console, console.size.width)]
    return lines if len(lines) <= most else [*lines[: max(0, most - 1)], Text("...")]


# -- a program, and its ranks below it --------------------------------------------------------------------------------


def run_watched(command: Sequence[str], environ: Mapping[str, str], directory: str) -> int:
    """Run it, and show on stderr what its ranks note in ``directory``; its exit status.

    After an interrupt waits for it to end, for torchrun has got that from a terminal, too, and ends its ranks. One that
    was sent to this process alone has not reached it: then, or at a second one, the program gets SIGTERM.
    """
    interrupted, ends_at = False, math.inf
    view = view_on(sys.stderr)
    with _terminal() if isinstance(view, Screen) else contextlib.nullcontext() as ends, view:
        ours, its = ends or (None, None)
        stdout = its if sys.stdout.isatty() else None  # where it leads elsewhere, it stays the program's own
        process = subprocess.Popen(command, env=environ, stdout=stdout, stderr=its)
        with ending_with_us(process):
            while process.returncode is None:
                try:
                    if time.monotonic() >= ends_at:
                        ends_at = math.inf
                        process.terminate()  # a torchrun that is killed would leave its ranks behind
                    _show(view, directory)
                    if ours is not None and isinstance(view, Screen):
                        _pass_on(ours, view, process)
                    else:
                        with contextlib.suppress(subprocess.TimeoutExpired):
                            process.wait(EVERY_SEC)
                except KeyboardInterrupt:
                    ends_at = time.monotonic() + (0.0 if interrupted else ENDING_SEC)
                    interrupted = True
        _show(view, directory, is_last=True)
    if interrupted:
        raise KeyboardInterrupt
    return process.returncode


@contextlib.contextmanager
def ending_with_us(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """SIGTERM is passed on, for torchrun then ends its ranks, and so is an error of ours: no rank is left behind."""
    before = signal.signal(signal.SIGTERM, lambda *_: process.terminate())
    try:
        yield
    finally:
        if process.returncode is None:
            process.terminate()
        signal.signal(signal.SIGTERM, before)


def _show(view: Lines | Screen, directory: str, *, is_last: bool = False) -> None:
    with contextlib.suppress(
        DdpstatsError, OSError
    ):  # notes of a stranger, a stderr that is closed: the program goes on
        notes = read_notes(directory)
        if notes:
            view.show(picture_of(notes), is_last=is_last)


@contextlib.contextmanager
def _terminal() -> Iterator[tuple[int, int]]:
    """Our end, and the one that the program takes for the terminal."""
    ours, its = os.openpty()
    try:
        tty.setraw(its)
        fcntl.ioctl(its, termios.TIOCSWINSZ, fcntl.ioctl(sys.stderr.fileno(), termios.TIOCGWINSZ, bytes(8)))
        yield ours, its
    finally:
        os.close(ours)
        os.close(its)


def _pass_on(ours: int, screen: Screen, process: subprocess.Popen[bytes]) -> None:
    """What comes until it is time to look at the notes again; once the program has ended, all that is left."""
    until = time.monotonic() + EVERY_SEC
    while True:
        has_ended = process.poll() is not None  # asked first: what it wrote before is read below
        while select.select([ours], [], [], 0.0 if has_ended else _LOOK_SEC)[0]:
            screen.above(os.read(ours, _CHUNK_BYTES))
            if time.monotonic() > until:  # also of a program that has ended: one that it has left may print for ever
                return
        if has_ended or time.monotonic() > until:
            return
