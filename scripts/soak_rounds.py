"""The rounds of `soak`, on each rank: random stats, windows and watched training, and what the process holds then."""

from __future__ import annotations

import contextlib
import functools
import gc
import hashlib
import logging
import os
import random
import threading
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import ddpstats
from ddpstats import StatsReducer, Sum
from ddpstats.errors import SchemaConflict
from tests.interference.programs import PROGRAMS, Program
from tests.interference.runs import hooks_of
from tests.interference.watching import Everything
from tests.reduction.reduce_pairs import check_one, drawn_by, reduced
from tests.reduction.window_pairs import Draw, check, flushed

QUANTITIES = ("memory", "threads", "files", "groups", "hooks", "shared memory")
_NAMES = ("first", "second", "third")
_TRAIN_EVERY, _GROUP_EVERY, _CONFLICT_EVERY = 10, 7, 5
_leaked: list[Any] = []


@dataclass
class RankReport:
    """One rank's report. ``holds``: memory in MiB, all others counted. ``digests``: of the results of the rounds."""

    holds: dict[str, float] = field(default_factory=dict)
    digests: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    done: dict[str, int] = field(default_factory=dict)


def rounds(seed: int, numbers: Sequence[int], directory: str, leak: Sequence[str] = ()) -> RankReport:
    """Play these rounds; every rank must call. A wrong result is in the report, so that all ranks go on."""
    report = RankReport(done=dict.fromkeys(("reductions", "windows", "conflicts", "groups", "watched steps"), 0))
    with _quiet():
        for number in numbers:
            _round(seed, number, Path(directory), report)
            for what in leak:
                _leak(what)
    report.holds = holds()
    return report


def _round(seed: int, number: int, directory: Path, report: RankReport) -> None:
    ranks, rank = dist.get_world_size(), dist.get_rank()
    looks = number % ranks == rank  # ranks take turns in asking the oracle; that they agree is checked for all
    drawn = next(drawn_by(1_000_000 * seed + 2 * number, ranks, 1))
    name = random.Random(number).choice(_NAMES)
    answer = reduced(functools.partial(ddpstats.reduce_stats, name=name), rank, drawn)
    _judge(report, f"reduction {number}", answer, looks, lambda: check_one(drawn, [answer]))
    report.done["reductions"] += 1
    window_policy, by_rank = Draw(1_000_000 * seed + 2 * number + 1).window(ranks)
    answer = flushed(by_rank[rank], window_policy, name)
    _judge(report, f"window {number}", answer, looks, lambda: check(by_rank, [answer], window_policy))
    report.done["windows"] += 1
    if number % _CONFLICT_EVERY == 1:
        _conflict(report, number)
    if number % _GROUP_EVERY == 2:
        _group(report, number)
    if number % _TRAIN_EVERY == 3:
        _train(report, directory / f"round{number}", number)


def _judge(report: RankReport, what: str, answer: Any, looks: bool, ask: Any) -> None:
    report.digests.append(hashlib.sha256(repr(answer).encode()).hexdigest())
    if looks:
        try:
            ask()
        except AssertionError as error:
            report.wrong.append(f"{what}: {str(error)[:2000]}")


def _conflict(report: RankReport, number: int) -> None:
    """Reduce two reduce ops: the error is the same on all ranks, and everything goes on."""
    try:
        ddpstats.reduce_stats({"x": Sum(1.0) if dist.get_rank() else 1.0}, name=_NAMES[0])
    except SchemaConflict as error:
        report.digests.append(str(error))
        report.done["conflicts"] += 1
    else:
        report.wrong.append(f"conflict {number}: no error")


def _group(report: RankReport, number: int) -> None:
    """Make a group, reduce in it, and destroy it."""
    group: Any = dist.new_group()
    with StatsReducer(group=group) as reducer:
        values = reducer({"x": float(dist.get_rank())}).values
    dist.destroy_process_group(group)
    ranks = dist.get_world_size()
    if values != {"x": (ranks - 1) / 2}:
        report.wrong.append(f"group {number}: {values}")
    report.done["groups"] += 1


@functools.cache
def _trained() -> Program:
    """Return the one program: what each new model of torch leaves behind is not the question here."""
    torch.manual_seed(0)
    return PROGRAMS["no_sync"]()


def _train(report: RankReport, directory: Path, number: int) -> None:
    """Train four steps with all that watches, one of them with a NaN on rank 1; then remove all of it."""
    program, together = _trained(), number % 20 == 3
    with contextlib.ExitStack() as stack:
        watch = Everything(program.parts, directory, "step" if together else "strict", together, stack)
        for step in range(4):
            watch.begin()
            watch.end(step, program.step(watch, step))
    if watch.did["bad verdicts"] != 1:
        report.wrong.append(f"training {number}: {watch.did}")
    report.done["watched steps"] += 4


def holds() -> dict[str, float]:
    """Return what this process holds of each quantity."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    maps = Path("/proc/self/maps").read_text().splitlines()
    return {
        "memory": pages * os.sysconf("SC_PAGE_SIZE") / 2**20,
        "threads": len(os.listdir("/proc/self/task")) - _lingering(),
        "files": len(os.listdir("/proc/self/fd")),
        "groups": len(dist.distributed_c10d._world.pg_map),
        "hooks": sum(hooks_of(part.module) for part in _trained().parts),
        "shared memory": sum("/dev/shm/" in line or "/memfd:" in line for line in maps),
    }


def _lingering() -> int:
    """Count the threads that ask the store: they end by themselves, some time after the last question."""
    return sum(thread.name == "ddpstats-store" for thread in threading.enumerate())


def _leak(what: str) -> None:
    """Leak on purpose, to show that it is seen."""
    if what == "memory":
        _leaked.append(bytearray(os.urandom(2**20)))
    elif what == "threads":
        threading.Thread(target=threading.Event().wait, daemon=True).start()
    elif what == "files":
        _leaked.append(os.open("/dev/null", os.O_RDONLY))
    elif what == "groups":
        _leaked.append(dist.new_group())
    elif what == "hooks":
        _trained().parts[0].module.register_forward_hook(lambda *_: None)
    else:
        _leaked.append(torch.ones(1).share_memory_())


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Drop what captures and sentinels say of a NaN that is wanted."""
    logger = logging.getLogger("ddpstats")
    logger.disabled = True
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.disabled = False
