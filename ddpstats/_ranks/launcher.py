"""Which ranks of this host have no process any more, from what whoever started them left in their environment.

A rank that died before it used anything of ours has told nobody which process it was. But torchrun, and what imitates
it, starts each rank with RANK, LOCAL_RANK and LOCAL_WORLD_SIZE, and these stay readable in /proc as long as the process
lives. Where they are not set, or cannot be read, nobody is called dead.

torchrun also says how often it has restarted a job, whose ranks then meet on the store of the attempt before.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

_JOB = (
    *("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "LOCAL_WORLD_SIZE"),
    *("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"),
)


def attempt() -> str:
    """What tells this attempt of the job from those before; the same on all ranks, and empty where there was none.

    Each of torchrun's agents counts for itself (torch 2.13: one whose ranks were ended because those of another host
    had died counts nothing), so on several hosts the numbers say nothing.
    """
    here, everywhere = os.environ.get("LOCAL_WORLD_SIZE"), os.environ.get("WORLD_SIZE")
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return f"attempt{restarts}" if here == everywhere and restarts != "0" else ""


def ended(ranks: Iterable[int], rank: int, all_started: bool) -> set[int]:
    """Those of ``ranks`` that were started on this host beside ``rank``, this process, and whose process is gone.

    Unless ``all_started``, some may still be about to start, except where torchrun starts them all at once.
    """
    mine = _environ("self")
    if not all_started and "TORCHELASTIC_RUN_ID" not in mine:
        return set()
    if os.getppid() <= 1 or _number(mine, "RANK") != rank:  # alone in a container, say: nobody else can be seen
        return set()
    place, size = _number(mine, "LOCAL_RANK"), _number(mine, "LOCAL_WORLD_SIZE")
    if place is None or size is None or "MASTER_PORT" not in mine:
        return set()
    started = set(ranks) & set(range(rank - place, rank - place + size))
    alive = _alive(mine) if started else None
    return set() if alive is None else started - alive


def _alive(mine: dict[str, str]) -> set[int] | None:
    """The ranks of this job that have a process; None where one of them may hide what it was started with."""
    job = [mine.get(name) for name in _JOB]
    found = set()
    for pid in filter(str.isdigit, os.listdir("/proc")):
        theirs = _environ(pid)
        if [theirs.get(name) for name in _JOB] == job:
            found.add(_number(theirs, "RANK"))
        elif "RANK" not in theirs and _is_sibling(pid):  # as setproctitle() leaves it
            return None
    return {rank for rank in found if rank is not None}


def _is_sibling(pid: str) -> bool:
    """Whether the same parent started the same program there."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            parent = int(file.read().rpartition(b")")[2].split()[1])
        return parent == os.getppid() and os.readlink(f"/proc/{pid}/exe") == os.readlink("/proc/self/exe")
    except OSError:
        return False


def _environ(pid: str) -> dict[str, str]:
    """What the process was started with; nothing where it is gone, a zombie, or somebody else's."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            entries = file.read().decode(errors="replace").split("\0")
    except OSError:
        return {}
    return dict(entry.split("=", 1) for entry in entries if "=" in entry)


def _number(environ: dict[str, str], name: str) -> int | None:
    text = environ.get(name, "")
    return int(text) if text.isdecimal() else None
