"""The ranks of the environment that torchrun sets: where they meet, and what is measured between them.

1. Each rank puts its facts into the store and waits until all have (`FailureDetector.meet`), which names those that
   do not come. Facts do not travel over gloo, for what keeps gloo from connecting is among them.
2. gloo connects the ranks. Where it cannot, each rank puts into the store why, and that is reported.
3. Round trips are timed. Rank 0 asks each other rank for its clock several times, as NTP does: the answer was given
   between question and receipt, so the quickest one says most.
4. Rank 0 makes a file of a random name, and all look for it. Where it cannot, each rank says whether it can, and which
   directory that is. What was measured comes together by `gather_trees`.
5. Rank 0, which may serve the store, waits until the others need it no more.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ddpstats._base.text import first_line
from ddpstats._ranks.comm import attempt_prefix, slice_sec
from ddpstats._ranks.failure import FailureDetector
from ddpstats._ranks.gather import decode, encode, gather_trees
from ddpstats._ranks.gloo import part_of
from ddpstats._ranks.store import STORE_ERRORS, BoundedStore, growing_polls
from ddpstats.doctor.report import CLOCK, UNCONNECTED, Told
from ddpstats.errors import ConfigError, DdpstatsError, ProtocolMismatch, RankMissing

_TIMES = 20
_LOOK_SEC = 5.0  # for a file that another host has made: network file systems take their time
_NEEDED = ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def examine(facts: Told, directory: Path, timeout_sec: float) -> list[Told] | None:
    """Each rank's facts and what was measured on it; None on other ranks than rank 0.

    Collective over the job that RANK speaks of; without RANK this process is alone, and nothing is measured.

    Raises:
        ConfigError: RANK is set, and another variable is not, or one is no number that it can be.
        RankMissing: a rank did not come within ``timeout_sec`` seconds, or is gone.
        DdpstatsError: the store does not answer.
    """
    if "RANK" not in os.environ:
        return [facts]
    rank, size = _place()
    if size == 1:
        return [facts]
    try:
        return _Job(rank, size, timeout_sec).examine(facts, directory)
    except (OSError, dist.DistError) as error:
        raise DdpstatsError(f"rank {rank}: the store does not answer: {first_line(error)}") from error


def _place() -> tuple[int, int]:
    """Rank and world size of this process."""
    lacking = [name for name in _NEEDED if name not in os.environ]
    if lacking:
        raise ConfigError(f"RANK is set without {', '.join(lacking)}. torchrun sets them; so must any other launcher.")
    given = {name: os.environ[name] for name in ("RANK", "WORLD_SIZE", "MASTER_PORT")}
    with contextlib.suppress(ValueError):
        rank, size, port = map(int, given.values())
        if 0 <= rank < size and 0 < port < 1 << 16:
            return rank, size
    told = ", ".join(f"{name}={value!r}" for name, value in given.items())
    raise ConfigError(f"{told}: RANK is a number from 0 to WORLD_SIZE - 1, MASTER_PORT one from 1 to 65535.")


class _Job:
    """All ranks of one job, at its store."""

    def __init__(self, rank: int, size: int, timeout_sec: float) -> None:
        self._rank, self._size, self._timeout_sec = rank, size, timeout_sec
        self._store = _store(rank, timeout_sec)

    def examine(self, facts: Told, directory: Path) -> list[Told] | None:
        self._store.set(f"facts/{self._rank}", bytes(encode(facts)))
        self._meet("begin", wait=True)
        try:
            self._connect()
            measured = [{"measured": one} for one in self._measured(directory)]
            dist.destroy_process_group()
        except RankMissing:
            raise
        except (*STORE_ERRORS, ProtocolMismatch) as error:  # the last where ranks have different versions of ddpstats
            self._store.renew()
            self._store.set(f"error/{self._rank}", first_line(error))
            measured = []
        self._meet("end", wait=self._rank == 0)
        if self._rank != 0:
            return None
        measured = measured or [{"measured": {UNCONNECTED: self._error_of(rank)}} for rank in range(self._size)]
        told = self._store.multi_get([f"facts/{rank}" for rank in range(self._size)])
        return [decode(payload) | one for payload, one in zip(told, measured, strict=True)]

    def _error_of(self, rank: int) -> str:
        return (self._store.find(f"error/{rank}") or b"no error of its own").decode(errors="replace")

    def _meet(self, name: str, wait: bool) -> None:
        """Say that this rank has come so far, and ``wait`` for the others. Raises `RankMissing`."""
        what = f"the check of {self._size} ranks"
        detector = FailureDetector(
            self._store.part(name), self._rank, range(self._size), what, timeout_name="--timeout-sec"
        )
        if not wait:
            detector.members.join()
            return
        verdict = detector.meet(time.monotonic() + self._timeout_sec, slice_sec(self._timeout_sec))
        if verdict is not None:
            raise RankMissing(verdict.message, missing_ranks=verdict.missing)

    def _connect(self) -> None:
        """The default process group."""

        def connect(store: Any, prefix: str) -> None:
            met, limit = dist.distributed_c10d.PrefixStore(f"{prefix}gloo", store), timedelta(seconds=self._timeout_sec)
            dist.init_process_group("gloo", store=met, rank=self._rank, world_size=self._size, timeout=limit)

        self._store.use(connect, self._timeout_sec + slice_sec(self._timeout_sec))

    # -- what is measured ---------------------------------------------------------------------------------------------

    def _measured(self, directory: Path) -> list[dict[str, Any]]:
        number = torch.zeros(1, dtype=torch.float64)
        mine: dict[str, Any] = {
            "store round trip": _median_ms(self._ask_store),
            "all_reduce of 8 bytes": _median_ms(lambda: dist.all_reduce(number)),
        }
        clocks = [[0.0, 0.0], *filter(None, map(self._clock, range(1, self._size)))]
        with _file(directory) if self._rank == 0 else contextlib.nullcontext(["", ""]) as (made, _):
            file = {"name": made, "host": socket.gethostname(), "device": _device(directory)}
            of_rank_0 = gather_trees(file, name="ddpstats doctor: file", timeout_sec=self._timeout_sec)[0]
            name = of_rank_0["name"]
            mine["same directory"] = _seen(directory / name) if name else _without_file(directory, of_rank_0)
            told = gather_trees(mine, name="ddpstats doctor", timeout_sec=self._timeout_sec)
        return [{**one, CLOCK: clock} for one, clock in zip(told, clocks, strict=self._rank == 0)]

    def _ask_store(self) -> None:
        key = f"round trip/{self._rank}"
        self._store.set(key, "1")
        self._store.delete_key(key)

    def _clock(self, other: int) -> list[float] | None:
        """By how many ms the clock of ``other`` is ahead, and by how many that may be wrong; on rank 0 alone."""
        clock, asked = torch.zeros(1, dtype=torch.int64), []
        for _ in range(_TIMES):
            if self._rank == other:
                dist.recv(clock, 0)
                clock[0] = time.time_ns()
                dist.send(clock, 0)
            elif self._rank == 0:
                sent = time.time_ns()
                dist.send(clock, other)
                dist.recv(clock, other)
                received = time.time_ns()
                asked.append((received - sent, clock.item() - (sent + received) / 2))
        if not asked:
            return None
        round_trip, ahead = min(asked)
        return [ahead / 1e6, round_trip / 2 / 1e6]


def _store(rank: int, timeout_sec: float) -> BoundedStore:
    """Served by torchrun, or by rank 0. Not torch's own rendezvous: it waits on rank 0, and names nobody."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    is_torchruns = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    stores: Any = dist
    try:
        store = stores.TCPStore(
            *(address, port, None, rank == 0 and not is_torchruns, timedelta(seconds=timeout_sec)),
            wait_for_workers=False,
        )
    except (RuntimeError, OSError) as error:
        raise RankMissing(
            f"rank {rank}: no store at {address}:{port} (MASTER_ADDR, MASTER_PORT), which "
            f"{'torchrun' if is_torchruns else 'rank 0'} serves: {first_line(error)}",
            missing_ranks=[] if is_torchruns or rank == 0 else [0],
        ) from None
    mine = part_of(store, f"ddpstats-doctor{attempt_prefix()}")
    return BoundedStore(lambda: mine, host_rank=None if is_torchruns else 0, limit_sec=timeout_sec)


def _median_ms(call: Callable[[], object]) -> float:
    seconds = []
    for _ in range(1 + _TIMES):  # the first one has more to do
        began = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - began)
    return 1e3 * statistics.median(seconds[1:])


@contextlib.contextmanager
def _file(directory: Path) -> Iterator[list[str]]:
    """The name of a file, which is there inside of it, and why there is none."""
    path = directory / f".ddpstats-doctor-{secrets.token_hex(8)}"
    # With SIGTERM torchrun ends this rank where another one died: the file does not stay behind then.
    before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    why_none = ""
    try:
        try:
            path.touch(exist_ok=False)
        except OSError as error:
            why_none = error.strerror or str(error)
        yield ["" if why_none else path.name, why_none]
    finally:
        with contextlib.suppress(OSError):
            path.unlink()
        signal.signal(signal.SIGTERM, before)


def _without_file(directory: Path, of_rank_0: dict[str, Any]) -> str:
    """What this rank can do there, and what may be compared: of other hosts the inode, for devices are theirs alone."""
    try:
        inode = directory.stat().st_ino
    except OSError as error:
        return f"no ({error.strerror})"
    with _file(directory) as (name, why_none):
        can = "can write there" if name else f"cannot write there ({why_none})"
    is_another = socket.gethostname() == of_rank_0["host"] and of_rank_0["device"] not in ("", _device(directory))
    return f"unknown: {can}, inode {inode}{' of another device than on rank 0' if is_another else ''}"


def _device(directory: Path) -> str:
    try:
        return str(directory.stat().st_dev)
    except OSError:
        return ""


def _seen(path: Path) -> str:
    """Yes or no, and why: of one and the same directory a mount may be stale on some host."""
    deadline = time.monotonic() + _LOOK_SEC
    for poll_sec in growing_polls(0.2):
        try:
            path.stat()
            return "yes"
        except FileNotFoundError:
            found = "no"
        except OSError as error:
            found = f"no ({error.strerror})"
        if time.monotonic() >= deadline:
            break
        time.sleep(poll_sec)
    return found
