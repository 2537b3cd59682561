"""``ddpstats watch DIR``, and what ``ddpstats run --watch`` shows: what each rank does now, and who is waited for.

The ranks write notes (`live_notes`), which are read twice a second; nothing is asked of a rank. On a terminal a table
shows them (`screen`); elsewhere lines do, when the state of a rank changes, and after ten seconds.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TextIO

from ddpstats._base.text import VerbReport, printable, ranks_text
from ddpstats.errors import DdpstatsError
from ddpstats.guard.live_notes import RankNow, read_notes
from ddpstats.guard.status import LEFT
from ddpstats.guard.tidings import not_held_lines

EVERY_SEC = 0.5
_LINES_EVERY_SEC = 10.0
_LINES_APART_SEC = 1.0
_LONG_SEC = 2.0  # a shorter wait is how ranks meet
_SHOWN_RANKS = 16
ALARM = "ALARM: "


class Row(NamedTuple):
    """Of one rank. ``behind``: how many collectives of some group it has not come to yet, which another rank has."""

    rank: int
    step: int
    collectives: int
    behind: int
    state: str
    last_collective: str
    at: str


class Picture(NamedTuple):
    """All that is shown. ``late``: ranks that are waited for. ``news``: what is told at once where it changes."""

    heading: str
    rows: list[Row]
    remarks: list[str]
    late: list[int]
    news: object


def picture_of(notes: Sequence[RankNow]) -> Picture:
    """The ranks that are furthest behind come first where there are too many to be shown."""
    furthest: dict[str, tuple[int, int]] = {}
    for note in notes:
        for name, held in (note.groups or {}).items():
            furthest[name] = max(held, furthest.get(name, held))
    rows = [_row(note, _behind(note, furthest), len(furthest) > 1) for note in notes]
    shown = rows if len(rows) <= _SHOWN_RANKS else sorted(rows, key=lambda row: -row.behind)[:_SHOWN_RANKS]
    words = [_word(note) for note in notes]
    waits = [note.rank for note, word in zip(notes, words, strict=True) if word == "waits"]
    late = [row.rank for row in rows if waits and row.behind and row.rank not in waits]
    heading = f"{len(notes)} of {notes[0].world_size} ranks, step {max(note.steps for note in notes)}"
    heading += f"; {ranks_text(waits)} {'wait' if len(waits) > 1 else 'waits'} for {ranks_text(late)}" if late else ""
    remarks = [f"{len(rows) - len(shown)} more ranks are no further behind"] if len(shown) < len(rows) else []
    last = max(notes, key=lambda note: note.renegotiations)
    if last.renegotiations:
        remarks.append(f"renegotiations: {last.renegotiations}; new keys of the last: {last.new_keys}")
    remarks += not_held_lines({note.rank: note.not_held for note in notes})
    alarms = list(dict.fromkeys(alarm for note in notes for alarm in note.alarms))
    remarks += [f"{ALARM}{alarm}" for alarm in alarms]
    return Picture(heading, shown, remarks, late, ([note.rank for note in notes], words, alarms))


def _row(note: RankNow, behind: int, several_groups: bool) -> Row:
    word, now = _word(note), time.monotonic()
    if note.event is None:
        return Row(note.rank, note.steps, note.collectives, behind, word, "", "")
    since = f"for {now - note.waits_since:.0f} s" if word == "waits" else f"(last began {now - note.begun:.0f} s ago)"
    of_group = f" of group {note.event.group!r}" if several_groups else ""
    last = f"number {note.event.seq}{of_group}, {note.event}" if note.event.peer is None else str(note.event)
    return Row(note.rank, note.steps, note.collectives, behind, f"{word} {since}", last, str(note.event.site))


def _word(note: RankNow) -> str:
    """What it does, without numbers."""
    if note.process == "gone":
        return f"ended{note.left.removeprefix(LEFT)}" if note.left else "killed, or ended without a word"
    if note.process or note.left:
        return note.process or note.left
    if note.event is None:
        return "no collective yet"
    return "waits" if note.waits_since and time.monotonic() - note.waits_since > _LONG_SEC else "runs"


def _behind(note: RankNow, furthest: Mapping[str, tuple[int, int]]) -> int:
    """A group in which it has issued nothing counts where all ranks are in it: of others nobody knows whether it is."""
    groups, found = note.groups or {}, 0
    for name, (size, seq) in furthest.items():
        if name in groups or size == note.world_size:
            found = max(found, seq - groups.get(name, (size, 0))[1])
    return found


def lines_of(picture: Picture) -> list[str]:
    rows = [
        f"  rank {row.rank}: step {row.step}, {row.collectives} collectives, {row.behind} behind, {row.state}"
        + (f": {row.last_collective}, at {row.at}" if row.at else "")
        for row in picture.rows
    ]
    return [picture.heading, *rows, *(f"  {remark}" for remark in picture.remarks)]


class Lines:
    """A view for what is no terminal."""

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._shown_at = stream, 0.0
        self._news: object = None

    def __enter__(self) -> Lines:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def show(self, picture: Picture, *, is_last: bool = False) -> None:
        is_new, now = picture.news != self._news, time.monotonic()
        since_sec = now - self._shown_at
        if since_sec > _LINES_EVERY_SEC or (is_new and (is_last or since_sec > _LINES_APART_SEC)):
            self._shown_at, self._news = now, picture.news
            print(printable(f"ddpstats watch: {line}" for line in lines_of(picture)), file=self._stream, flush=True)


# -- the verb ---------------------------------------------------------------------------------------------------------


EPILOG = """examples, in another terminal than `ddpstats run --nproc 2 --watch-dir notes train.py`:
  ddpstats watch notes                        until the ranks have ended
  ddpstats watch notes --json                 once, and now

exit status: 0 no alarm, 1 an alarm, or a rank that was killed or failed, 2 it could not run"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", metavar="DIR", help="the --watch-dir of the ranks")


def run(args: argparse.Namespace) -> int:
    """Until the ranks have ended. Raises `DdpstatsError` where there are no notes."""
    from ddpstats.guard.screen import view_on

    notes = read_notes(args.directory)
    if not notes:
        how = "Ranks write them: torchrun ... -m ddpstats run --watch-dir DIR train.py; give that DIR."
        raise DdpstatsError(f"{args.directory} holds no notes of ranks. {how}")
    if args.json:
        picture = picture_of(notes)
        told = {"ranks": [row._asdict() for row in picture.rows], "late": picture.late, "remarks": picture.remarks}
        return VerbReport(_status(notes), str, lambda: told).show(True)
    with view_on(sys.stdout) as view:
        while any(note.process != "gone" for note in notes):
            view.show(picture_of(notes))
            time.sleep(EVERY_SEC)
            notes = read_notes(args.directory) or _left_out(args.directory, notes)
        view.show(picture_of(notes), is_last=True)
    return _status(notes)


def _left_out(directory: str, notes: list[RankNow]) -> list[RankNow]:
    """The notes as they were, for now none can be read. Raises `DdpstatsError` where none are there any more."""
    if any(Path(directory).glob("rank*.live")):
        return notes
    raise DdpstatsError(f"the notes in {directory} are gone: whoever started the ranks has removed them.")


def _status(notes: Sequence[RankNow]) -> int:
    return int(any(note.alarms or (note.process == "gone" and note.left != LEFT) for note in notes))
