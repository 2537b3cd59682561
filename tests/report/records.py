"""Records of ranks that never ran, written by the code that writes those of ranks that do."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ddpstats._base.marks import Mark
from ddpstats.guard.event import Event, Signature, digest_of, label_word
from ddpstats.guard.recording import Identity, Recording
from ddpstats.report import read_directories
from ddpstats.report.timeline import report_of

BEGAN = 1795380798.0


def report_on(directory: Path) -> dict[str, Any]:
    """Return what ``ddpstats report --json`` would print."""
    return report_of(read_directories([directory]))


def recording_of(directory: Path, rank: int, ranks: int, run: str = "run", max_bytes: int = 32 << 20) -> Recording:
    """Return the record of a rank, which has begun."""
    recording = Recording(directory, max_bytes=max_bytes)
    recording.begin(Identity(run, rank, ranks))
    return recording


def event(
    seq: int, label: str | None, rank: int = 0, *, op: str = "all_reduce", group: str = "0", **more: object
) -> Event:
    """Return a collective of a loop over keys: its number in its group, and the key."""
    signature = Signature(op, "sum" if op == "all_reduce" else None, None, ((1,),), ("float32",))
    fields: dict[str, object] = {
        "site": "train.py:31 in reduce_stats",
        "read_source": "dist.all_reduce(stats[key])",
        "started": BEGAN + seq * 1e-3 + rank * 2e-5,
        **more,
    }
    return Event(group, seq, signature, label, label_word(label), digest=digest_of(signature), **fields)  # type: ignore[arg-type]


def write_rank(
    directory: Path,
    rank: int,
    ranks: int,
    events: Iterable[Event],
    *,
    marks: Iterable[Mark] = (),
    end: str | None = "left",
    max_bytes: int = 32 << 20,
) -> None:
    """Write a rank's record. ``end`` is None for a killed process; a small ``max_bytes`` drops older events."""
    writer = recording_of(directory, rank, ranks, "run", max_bytes)
    writer.write({"new_group": "0", "words": f"the default group of {ranks} ranks", "ranks": list(range(ranks))})
    for written in events:
        writer.write(written.as_dict())
    for mark in marks:
        writer.take_mark(mark)
    if end is not None:
        writer.write({"end": end})
    writer.close()


def write(directory: Path, ranks: int, rounds: int, *, parts: bool = True) -> Path:
    """Write ``rounds`` over the keys loss and acc for each rank; with ``parts`` the last rank ends with another key."""
    for rank in range(ranks):
        events = [event(seq, ("acc", "loss")[seq % 2], rank) for seq in range(1, 2 * rounds + 1)]
        if parts and rank == ranks - 1:
            events[-1] = event(2 * rounds, "snr_loss", rank, site="train.py:34 in reduce_stats")
        marks = []
        for turn in range(rounds):
            values = {"loss": 1.0 / (turn + 1) + 0.1 * rank, "acc": None if rank == 1 else turn / rounds}
            marks.append(Mark("values", "train", BEGAN + (2 * turn + 2) * 1e-3, values=values))
        write_rank(directory, rank, ranks, events, marks=marks)
    return directory
