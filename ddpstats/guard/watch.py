"""``ddpstats watch DIR``, and what ``ddpstats run --watch`` prints: what each rank does now, and which is waited for.

The flight records of the ranks (`recording`) are read twice a second, from where the last look ended; no rank is asked.
``ddpstats watch`` draws a table on a terminal, with `rich`. Otherwise lines are printed when the state of a rank
changes, and after ten seconds.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import struct
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from ddpstats._base.files import open_regular, parse_json
from ddpstats._base.text import VerbReport, count_of, printable, ranks_text
from ddpstats._ranks.failure import ProcessId
from ddpstats.errors import DdpstatsError
from ddpstats.guard.event import MESSAGES, Event
from ddpstats.guard.record import MAX_BYTES, MAX_LINE_BYTES, checked_group, checked_head, parsed
from ddpstats.guard.status import LEFT

EVERY_SEC = 0.5
_LINES_EVERY_SEC = 10.0
_LINES_APART_SEC = 1.0
_SHOWN_RANKS = 16
_WIDE = 100  # of a terminal: a narrower one has no column of how many collectives there were
_MOST_LINES = 8  # about keys that ranks hold no more
_ALARM = "ALARM: "
_EVENT = re.compile(rb'\{"group":"((?:[^"\\]|\\.)*)","seq":(\d{1,16}),')


# -- what a record says now -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RankNow:
    """A rank's newest state. ``process``: "stopped", "gone", or empty where it lives, or that is not known.

    ``waits_since``: of a wait that goes on; None otherwise. ``groups``: the number of ranks and of the last collective.
    """

    rank: int
    world_size: int
    process: str = ""
    groups: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    event: Event | None = None
    left: str = ""
    steps: int = 0
    waits_since: float | None = None
    renegotiations: int = 0
    new_keys: str = ""
    not_held: str = ""
    alarms: tuple[str, ...] = ()


class _Follower:
    """One rank's record, of which each look reads what was appended since."""

    def __init__(self, path: Path) -> None:
        self._path, self._offset = path, 0
        self._first_line = b""
        self._forget()

    def _forget(self) -> None:
        self.head: Mapping[str, Any] = {}
        self._sizes: dict[str, int] = {}  # of groups
        self._numbers: dict[bytes, int] = {}  # group -> number of the last collective
        self._last, self._left = b"", ""
        self._now: dict[str, Any] = {}

    def look(self) -> None:
        """Raises OSError or ValueError for what is no record."""
        with open_regular(self._path, follow=False) as file:
            if os.fstat(file.fileno()).st_size > 2 * MAX_BYTES:
                raise ValueError("too long for a record")
            first_line = file.readline(MAX_LINE_BYTES)
            if first_line != self._first_line:  # another file has taken its place
                self._first_line, self._offset = first_line, 0
            file.seek(self._offset)
            whole_lines, newline, _ = file.read(2 * MAX_BYTES).rpartition(b"\n")
        self._offset += len(whole_lines) + len(newline)
        for line in whole_lines.splitlines():
            self._take(line)

    def _take(self, line: bytes) -> None:
        numbered = _EVENT.match(line)
        if numbered is not None:
            self._numbers[numbered[1]], self._last = int(numbered[2]), line
        elif not line.startswith(b'{"mark"'):
            entry = parsed(line)
            if "ddpstats" in entry:
                head = checked_head(entry)
                if head.get("run") != self.head.get("run"):
                    self._forget()
                self.head, self._left = head, ""
            elif "new_group" in entry:
                self._sizes[str(entry["new_group"])] = len(checked_group(entry)["ranks"])
            elif "end" in entry:
                self._left = LEFT if entry["end"] == "left" else f"{LEFT} by {entry['end']}"
            elif "now" in entry:
                self._now.update(entry["now"])

    def rank_now(self) -> RankNow:
        """Raises `DdpstatsError` for a record of another machine, and `_PROBLEMS` for one that is malformed."""
        now, process = self._now, ProcessId.unpack(bytes.fromhex(self.head["process"]))
        if process.machine != ProcessId.mine().machine:
            raise DdpstatsError("the records are of another machine, or container: watch the ranks there")
        last = {name: value for name, value in parsed(self._last).items() if name != "evidence"} if self._last else None
        numbers = {str(parse_json(b'"%b"' % name)): number for name, number in self._numbers.items()}
        groups = {name: (self._sizes.get(name, 0), numbers[name]) for name in numbers if not name.endswith(MESSAGES)}
        waits_since = now.get("waits_since")
        return RankNow(
            self.head["rank"],
            self.head["world_size"],
            _state_of(process),
            groups,
            None if last is None else Event.from_dict(last),
            self._left,
            int(now.get("steps", 0)),
            None if waits_since is None else float(waits_since),
            int(now.get("renegotiations", 0)),
            str(now.get("new_keys", "")),
            str(now.get("not_held", "")),
            tuple(str(text) for name, text in now.items() if name.startswith("alarm ")),
        )


_PROBLEMS = (OSError, ValueError, LookupError, TypeError, AttributeError, OverflowError, struct.error)


class Records:
    """The records of a directory, of which only the newest run is shown."""

    def __init__(self, directory: str | Path) -> None:
        self._directory = Path(directory)
        self._followers: dict[Path, _Follower] = {}

    def look(self) -> list[RankNow]:
        """Return the ranks of the newest run, by rank, without what cannot be read.

        Raises `DdpstatsError` where no record can be read, or all are of another machine, or container.
        """
        found: list[tuple[Mapping[str, Any], RankNow]] = []
        refused: DdpstatsError | None = None
        for path in self._directory.glob("rank*.jsonl"):
            if path.name.endswith(".old.jsonl"):
                continue
            follower = self._followers.setdefault(path, _Follower(path))
            try:
                follower.look()
                if follower.head:
                    found.append((follower.head, follower.rank_now()))
            except DdpstatsError as error:
                refused = error
            except _PROBLEMS as error:
                refused = DdpstatsError(f"{path} cannot be read as a record: {error}")
        if refused is not None and not found:
            raise refused
        run = max(found, key=lambda pair: pair[0].get("time", 0.0))[0].get("run") if found else None
        return sorted((rank for head, rank in found if head.get("run") == run), key=lambda rank: rank.rank)


def _state_of(process: ProcessId) -> str:
    if process.is_dead():
        return "gone"
    try:
        with open(f"/proc/{process.pid}/stat", "rb") as file:
            return "stopped" if file.read().rpartition(b")")[2].split()[0] in (b"T", b"t") else ""
    except (OSError, IndexError):
        return ""


# -- what is shown ----------------------------------------------------------------------------------------------------


class Row(NamedTuple):
    """One rank. ``behind``: how many collectives of some group another rank has issued, and this one has not yet."""

    rank: int
    step: int
    collectives: int
    behind: int
    state: str
    last_collective: str
    at: str


class Picture(NamedTuple):
    """All that is shown. ``late``: ranks that are waited for. ``news``: a change of it is shown at once."""

    heading: str
    rows: list[Row]
    remarks: list[str]
    late: list[int]
    news: object


def picture_of(ranks: Sequence[RankNow]) -> Picture:
    """Return what is shown of these; the ranks that are furthest behind where there are too many."""
    furthest: dict[str, tuple[int, int]] = {}
    for rank in ranks:
        for name, held in rank.groups.items():
            furthest[name] = max(held, furthest.get(name, held), key=lambda held: held[1])
    rows = [_row(rank, _behind(rank, furthest), len(furthest) > 1) for rank in ranks]
    shown = rows if len(rows) <= _SHOWN_RANKS else sorted(rows, key=lambda row: -row.behind)[:_SHOWN_RANKS]
    states = [_state(rank) for rank in ranks]
    waiting = [rank.rank for rank, state in zip(ranks, states, strict=True) if state == "waits"]
    late = [row.rank for row in rows if waiting and row.behind and row.rank not in waiting]
    absent = sorted(set(range(min(ranks[0].world_size, 1 << 16))) - {rank.rank for rank in ranks})
    heading = f"{len(ranks)} of {ranks[0].world_size} ranks, step {max(rank.steps for rank in ranks)}"
    if late:
        heading += f"; {ranks_text(waiting)} {'wait' if len(waiting) > 1 else 'waits'} for {ranks_text(late)}"
    remarks = [f"no collective yet, or on another host: {ranks_text(absent)}"] if absent else []
    remarks += [f"{len(rows) - len(shown)} more ranks are no further behind"] if len(shown) < len(rows) else []
    newest = max(ranks, key=lambda rank: rank.renegotiations)
    if newest.renegotiations:
        remarks.append(f"renegotiations: {newest.renegotiations}; new keys of the last: {newest.new_keys}")
    remarks += _not_held_lines(ranks)
    alarms = list(dict.fromkeys(alarm for rank in ranks for alarm in rank.alarms))
    remarks += [f"{_ALARM}{alarm}" for alarm in alarms]
    return Picture(heading, shown, remarks, late, ([rank.rank for rank in ranks], states, alarms))


def _row(rank: RankNow, behind: int, has_several_groups: bool) -> Row:
    state, now, event = _state(rank), time.time(), rank.event
    collectives = sum(number for _, number in rank.groups.values())
    if event is None:
        return Row(rank.rank, rank.steps, collectives, behind, state, "", "")
    since = f"(last began {now - event.started:.0f} s ago)"
    if state == "waits" and rank.waits_since is not None:
        since = f"for {now - rank.waits_since:.0f} s"
    of_group = f" of group {event.group!r}" if has_several_groups else ""
    last = f"number {event.seq}{of_group}, {event}" if event.peer is None else str(event)
    return Row(rank.rank, rank.steps, collectives, behind, f"{state} {since}", last, str(event.site))


def _state(rank: RankNow) -> str:
    """Return what the rank does, without numbers."""
    if rank.process == "gone":
        return f"ended{rank.left.removeprefix(LEFT)}" if rank.left else "killed, or ended without a word"
    if rank.process or rank.left:
        return rank.process or rank.left
    if rank.event is None:
        return "no collective yet"
    return "runs" if rank.waits_since is None else "waits"


def _behind(rank: RankNow, furthest: Mapping[str, tuple[int, int]]) -> int:
    """Return by how many collectives the rank is behind in some group.

    A group in which it has issued nothing counts where all ranks are in it: of others nothing says whether it is.
    """
    most = 0
    for name, (size, number) in furthest.items():
        if name in rank.groups or size == rank.world_size:
            most = max(most, number - rank.groups.get(name, (size, 0))[1])
    return most


def _not_held_lines(ranks: Sequence[RankNow]) -> list[str]:
    """Return a line for each set of keys. Ranks that lack the same share one; no rank has two."""
    by_text: dict[str, list[int]] = {}
    for rank in ranks:
        if rank.not_held:
            by_text.setdefault(rank.not_held, []).append(rank.rank)
    lines = [f"not held any more by {ranks_text(lacking)}: {text}" for text, lacking in by_text.items()]
    return lines if len(lines) <= _MOST_LINES else [*lines[:_MOST_LINES], "and other keys by other ranks"]


def lines_of(picture: Picture) -> list[str]:
    """Return the picture as text."""
    rows = [
        f"  rank {row.rank}: step {row.step}, {row.collectives} collectives, {row.behind} behind, {row.state}"
        + (f": {row.last_collective}, at {row.at}" if row.at else "")
        for row in picture.rows
    ]
    return [picture.heading, *rows, *(f"  {remark}" for remark in picture.remarks)]


class Lines:
    """A view for a stream that is no terminal."""

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._shown_at = stream, 0.0
        self._news: object = None

    def show(self, picture: Picture, *, is_last: bool = False) -> None:
        """Print the picture where it is new, or ten seconds have gone by."""
        is_new, now = picture.news != self._news, time.monotonic()
        since_sec = now - self._shown_at
        if since_sec > _LINES_EVERY_SEC or (is_new and (is_last or since_sec > _LINES_APART_SEC)):
            self._shown_at, self._news = now, picture.news
            print(printable(f"ddpstats watch: {line}" for line in lines_of(picture)), file=self._stream, flush=True)


class Table:
    """A view for a terminal."""

    def __init__(self, live: Any) -> None:
        self._live = live

    def show(self, picture: Picture, *, is_last: bool = False) -> None:
        """Draw the picture in the place of the one before."""
        height = sys.maxsize if is_last else self._live.console.size.height
        self._live.update(_table(picture, self._live.console.size.width, height), refresh=True)


def _table(picture: Picture, width: int, height: int) -> Any:
    """Return a table that fits: alarms above the ranks, and first the ranks that are waited for, then waiting ones."""
    from rich.console import Group
    from rich.table import Table as RichTable

    alarms = [remark for remark in picture.remarks if remark.startswith(_ALARM)]
    others = [remark for remark in picture.remarks if not remark.startswith(_ALARM)][: height // 4]
    rows = sorted(picture.rows, key=lambda row: (row.rank not in picture.late, row.state[:5] != "waits", row.rank))
    room = max(
        2, height - 3 - len(alarms) - len(others)
    )  # a line each for heading, columns and the terminal's last one
    if len(rows) > room:
        others = [f"and {count_of(len(rows) - room + 1, 'more ranks')}", *others]
        rows = rows[: room - 1]
    table = RichTable(box=None, padding=(0, 1, 0, 0), expand=True)
    columns = [name for name in Row._fields if width >= _WIDE or name != "collectives"]
    for name in columns:
        is_long = name in ("last_collective", "at")
        table.add_column(
            _one_line(name.replace("_", " ")), no_wrap=not is_long, max_width=30 if name == "state" else None
        )
    for row in rows:
        cells = (_one_line(str(getattr(row, name))) for name in columns)
        table.add_row(*cells, style="bold red" if row.rank in picture.late else None)
    return Group(*map(_one_line, [picture.heading, *alarms]), table, *map(_one_line, others))


def _one_line(text: str) -> Any:
    """Return as much of the text as one line has room for."""
    from rich.text import Text

    return Text(printable([text]), no_wrap=True, overflow="ellipsis")


@contextlib.contextmanager
def _view_on(stream: TextIO) -> Iterator[Lines | Table]:
    """Yield a table where `rich` is installed and the stream is a terminal that can draw; otherwise lines."""
    if stream.isatty() and os.environ.get("TERM", "dumb") != "dumb":
        try:
            from rich.console import Console
            from rich.live import Live
        except ImportError:
            pass
        else:
            with Live(console=Console(file=stream), auto_refresh=False) as live:
                yield Table(live)
            return
    yield Lines(stream)


# -- the verb ---------------------------------------------------------------------------------------------------------


EPILOG = """examples, in another terminal than `ddpstats run --nproc 2 --watch-dir records train.py`:
  ddpstats watch records                      until the ranks have ended
  ddpstats watch records --json               once, and now

exit status: 0 no alarm, 1 an alarm, or a rank that was killed or failed, 2 it could not run"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", metavar="DIR", help="the --watch-dir or --record-dir of the ranks")


def run(args: argparse.Namespace) -> int:
    """Watch until the ranks have ended. Raises `DdpstatsError` where there are no records."""
    records = Records(args.directory)
    ranks = records.look()
    if not ranks:
        how = "Ranks write them: torchrun ... -m ddpstats run --watch-dir DIR train.py; give that DIR."
        raise DdpstatsError(f"{args.directory} holds no records of ranks. {how}")
    if args.json:
        picture = picture_of(ranks)
        shown = {"ranks": [row._asdict() for row in picture.rows], "late": picture.late, "remarks": picture.remarks}
        return VerbReport(_status(ranks), str, lambda: shown).show(True)
    with _view_on(sys.stdout) as view:
        while any(rank.process != "gone" for rank in ranks):
            view.show(picture_of(ranks))
            time.sleep(EVERY_SEC)
            ranks = records.look()
            if not ranks:
                raise DdpstatsError(f"the records in {args.directory} are gone: another process has removed them.")
        view.show(picture_of(ranks), is_last=True)
    return _status(ranks)


def _status(ranks: Sequence[RankNow]) -> int:
    return int(any(rank.alarms or (rank.process == "gone" and rank.left != LEFT) for rank in ranks))
