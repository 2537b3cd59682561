"""``ddpstats watch DIR``, and what ``ddpstats run --watch`` prints: what each rank does now, and which is waited for.

The flight records of the ranks (`recording`) are read twice a second, from where the last look ended; no rank is asked.
``ddpstats watch`` draws a table on a terminal, with `rich`. Otherwise lines are printed when the state of a rank
changes, and after ten seconds.
"""

from __future__ import annotations

import argparse
import contextlib
import struct
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from ddpstats._base.files import open_regular, parse_json
from ddpstats._base.text import count_of, holders_lines, print_report, printable, ranks_text
from ddpstats._ranks.failure import ProcessId
from ddpstats.errors import DdpstatsError
from ddpstats.guard.diagnosis import LEFT
from ddpstats.guard.event import Event
from ddpstats.guard.record import MAX_BYTES, MAX_LINE_BYTES, check_group, check_head

EVERY_SEC = 0.5
_LINES_EVERY_SEC = 10.0
_MOST_ROWS = 16
_MOST_REMARKS = 12
_PROBLEMS = (OSError, ValueError, LookupError, TypeError, AttributeError, OverflowError, struct.error)


# -- what a record says now -------------------------------------------------------------------------------------------


@dataclass
class RankNow:
    """A rank's newest state, as far as its record was read.

    ``groups``: the number of its last collective in each group. ``described``: words for each group, and its ranks.
    ``waits_since``: of a wait that goes on. ``remarks``: all other state that it records.
    """

    rank: int
    world_size: int
    process: ProcessId
    run: str = ""
    began: float = 0.0
    groups: dict[str, int] = field(default_factory=dict)
    described: dict[str, dict[str, Any]] = field(default_factory=dict)
    event: Event | None = None
    left: str = ""
    steps: int = 0
    waits_since: float | None = None
    remarks: dict[str, str] = field(default_factory=dict)

    @property
    def alarms(self) -> list[str]:
        """The names of its remarks that are alarms."""
        return [name for name in self.remarks if name.startswith("ALARM")]

    @property
    def state(self) -> str:
        """The rank's state in words, without numbers."""
        if self.left or self.process.is_dead():
            return self.left or "killed, or ended without an end mark"
        return "runs" if self.waits_since is None else "waits"

    def take(self, entry: Mapping[str, Any]) -> None:
        """Take a line of the record that is no collective."""
        if "new_group" in entry:
            self.described[str(entry["new_group"])] = check_group(entry)
        elif "end" in entry:
            self.left = LEFT if entry["end"] == "left" else f"{LEFT} by {entry['end']}"
        for name, value in entry.get("now", {}).items():
            if name == "steps":
                self.steps = int(value)
            elif name == "waits_since":
                self.waits_since = None if value is None else float(value)
            else:
                self.remarks[name] = str(value)


class _Follower:
    """One rank's record, of which each look reads what was appended since. ``now``: None before its first line."""

    def __init__(self, path: Path) -> None:
        self._path, self._offset, self._first_line = path, 0, b""
        self.now: RankNow | None = None

    def look(self) -> None:
        """Raises `_PROBLEMS` for what is no record, or that of another machine."""
        with open_regular(self._path, follow=False) as file:
            first_line = file.readline(MAX_LINE_BYTES)
            if first_line != self._first_line:  # another file has taken its place
                self._first_line, self._offset = first_line, 0
            file.seek(self._offset)
            whole_lines, newline, _ = file.read(MAX_BYTES).rpartition(b"\n")
        self._offset += len(whole_lines) + len(newline)
        event: dict[str, Any] | None = None
        for line in whole_lines.splitlines():
            entry = parse_json(line, strict=False)
            if "ddpstats" in entry:
                self._begin(check_head(entry))
            elif self.now is None:
                raise ValueError("it does not begin as a record does")
            elif "seq" in entry:
                event, self.now.groups[str(entry["group"])] = entry, int(entry["seq"])
            else:
                self.now.take(entry)
        if event is not None and self.now is not None:
            event.pop("evidence", None)  # omitted where it is that of the event before
            self.now.event = Event.from_dict(event)

    def _begin(self, head: Mapping[str, Any]) -> None:
        process = ProcessId.unpack(bytes.fromhex(head["process"]))
        if process.machine != ProcessId.mine().machine:
            raise ValueError("the ranks are on another machine, or in another container: watch them there")
        if self.now is None or self.now.run != head.get("run", ""):
            self.now = RankNow(head["rank"], head["world_size"], process, head.get("run", ""))
        self.now.began, self.now.process, self.now.left = head.get("time", 0.0), process, ""


class Records:
    """The records of a directory, of which only the newest run is shown."""

    def __init__(self, directory: str | Path) -> None:
        self._directory = Path(directory)
        self._followers: dict[Path, _Follower] = {}

    def look(self) -> list[RankNow]:
        """Return the ranks of the newest run, by rank, without what cannot be read.

        Raises `DdpstatsError` where there is no record that can be read, or all are of another machine, or container.
        """
        ranks: list[RankNow] = []
        refused: DdpstatsError | None = None
        for path in self._directory.glob("rank*[0-9].jsonl"):
            follower = self._followers.setdefault(path, _Follower(path))
            try:
                follower.look()
                if follower.now is not None:
                    ranks.append(follower.now)
            except _PROBLEMS as error:
                refused = DdpstatsError(f"{path} cannot be read as a record: {error}")
        if not ranks:
            how = "Ranks write them: torchrun ... -m ddpstats run --watch-dir DIR train.py; give that DIR."
            raise refused or DdpstatsError(f"{self._directory} holds no records of ranks. {how}")
        newest = max(ranks, key=lambda rank: rank.began).run
        return sorted((rank for rank in ranks if rank.run == newest), key=lambda rank: rank.rank)


# -- what is shown ----------------------------------------------------------------------------------------------------


class RankLine(NamedTuple):
    """One rank. ``behind``: how many collectives of some group another rank has issued, and this one has not yet."""

    rank: int
    step: int
    behind: int
    state: str
    last_collective: str


class Picture(NamedTuple):
    """All that is shown. ``late``: ranks that are waited for. ``news``: a change of it is shown at once."""

    heading: str
    rows: list[RankLine]
    remarks: list[str]
    late: list[int]
    news: object


def picture_of(ranks: Sequence[RankNow]) -> Picture:
    """Return what is shown of these; the ranks that are furthest behind where there are too many."""
    members = {name: group["ranks"] for rank in ranks for name, group in rank.described.items()}
    furthest = {name: max(rank.groups.get(name, 0) for rank in ranks) for name in members}
    rows = [_row(rank, [name for name, group in members.items() if rank.rank in group], furthest) for rank in ranks]
    waiting = [rank.rank for rank in ranks if rank.state == "waits"]
    late = [row.rank for row in rows if waiting and row.behind and row.rank not in waiting]
    heading = f"{len(ranks)} of {ranks[0].world_size} ranks, step {max(rank.steps for rank in ranks)}"
    if late:
        heading += f"; {ranks_text(waiting)} {'wait' if len(waiting) > 1 else 'waits'} for {ranks_text(late)}"
    remarks = []
    for name in sorted({name for rank in ranks for name in rank.remarks}):  # alarms come first
        texts = {rank.rank: rank.remarks[name] for rank in ranks if rank.remarks.get(name)}
        remarks += [f"{name}, {line.strip()}" for line in holders_lines(texts)]
    if len(rows) > _MOST_ROWS:
        remarks.append(f"{count_of(len(rows) - _MOST_ROWS, 'more ranks')} no further behind")
        rows = sorted(rows, key=lambda row: -row.behind)[:_MOST_ROWS]
    absent = sorted(set(range(min(ranks[0].world_size, 1 << 16))) - {rank.rank for rank in ranks})
    if absent:
        remarks.append(f"no collective yet, or on another host: {ranks_text(absent)}")
    news = [(rank.rank, rank.state, rank.alarms) for rank in ranks]
    return Picture(heading, rows, remarks[:_MOST_REMARKS], late, news)


def _row(rank: RankNow, groups: Sequence[str], furthest: Mapping[str, int]) -> RankLine:
    event, now = rank.event, time.time()
    behind = max((furthest[name] - rank.groups.get(name, 0) for name in groups), default=0)
    if event is None:
        return RankLine(rank.rank, rank.steps, behind, rank.state, "no collective yet")
    waits_since = rank.waits_since if rank.state == "waits" else None
    since = f"(last began {now - event.started:.0f} s ago)" if waits_since is None else f"for {now - waits_since:.0f} s"
    words = rank.described.get(event.group, {}).get("words", "")
    return RankLine(rank.rank, rank.steps, behind, f"{rank.state} {since}", event.in_full(words))


def lines_of(picture: Picture) -> list[str]:
    """Return the picture as text."""
    rows = [
        f"  rank {row.rank}: step {row.step}, {row.behind} behind, {row.state}: {row.last_collective}"
        for row in picture.rows
    ]
    return [picture.heading, *rows, *(f"  {remark}" for remark in picture.remarks)]


class Lines:
    """A view for a stream that is no terminal."""

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._shown_at = stream, 0.0
        self._news: object = None

    def show(self, picture: Picture) -> None:
        """Print the picture where it is new, or ten seconds have gone by."""
        now = time.monotonic()
        if picture.news != self._news or now - self._shown_at > _LINES_EVERY_SEC:
            self._shown_at, self._news = now, picture.news
            print(printable(f"ddpstats watch: {line}" for line in lines_of(picture)), file=self._stream, flush=True)


def table_of(picture: Picture) -> Any:
    """Return the picture for `rich`, which cuts off at the bottom what the terminal has no room for."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    def one_line(text: object) -> Text:
        return Text(printable([str(text)]), no_wrap=True, overflow="ellipsis")

    table = Table(box=None, padding=(0, 1, 0, 0), expand=True)
    for name in RankLine._fields:
        table.add_column(one_line(name.replace("_", " ")), max_width=30 if name == "state" else None)
    for row in sorted(picture.rows, key=lambda row: row.rank not in picture.late):
        table.add_row(*map(one_line, row), style="bold red" if row.rank in picture.late else None)
    return Group(*map(one_line, [picture.heading, *picture.remarks]), table)


def _open_view(stream: TextIO, stack: contextlib.ExitStack) -> Callable[[Picture], None]:
    """Return what shows a picture: as a table where `rich` is installed and the stream is a terminal; or as lines."""
    with contextlib.suppress(ImportError):
        from rich.console import Console
        from rich.live import Live

        console = Console(file=stream)
        if console.is_terminal and not console.is_dumb_terminal:
            live = stack.enter_context(Live(console=console, auto_refresh=False))
            return lambda picture: live.update(table_of(picture), refresh=True)
    return Lines(stream).show


# -- the verb ---------------------------------------------------------------------------------------------------------


EPILOG = """examples, in another terminal than `ddpstats run --nproc 2 --watch-dir records train.py`:
  ddpstats watch records                      until the ranks have ended
  ddpstats watch records --json               once, and now"""
EXIT_STATUS = "0 no alarm, 1 an alarm, or a rank that was killed or failed, 2 it could not run"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", metavar="DIR", help="the --watch-dir or --record-dir of the ranks")


def run(args: argparse.Namespace) -> int:
    """Watch until the ranks have ended. Raises `DdpstatsError` where there are no records."""
    records = Records(args.directory)
    ranks = records.look()
    if args.json:
        picture = picture_of(ranks)
        shown = {"ranks": [row._asdict() for row in picture.rows], "late": picture.late, "remarks": picture.remarks}
        return print_report(_status(ranks), True, str, lambda: shown)
    with contextlib.ExitStack() as stack:
        show = _open_view(sys.stdout, stack)
        show(picture_of(ranks))
        while not all(rank.process.is_dead() for rank in ranks):
            time.sleep(EVERY_SEC)
            ranks = records.look()
            show(picture_of(ranks))
    return _status(ranks)


def _status(ranks: Sequence[RankNow]) -> int:
    return int(any(rank.alarms or (rank.process.is_dead() and rank.left != LEFT) for rank in ranks))
