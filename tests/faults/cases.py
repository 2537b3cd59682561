"""Plays a case with real processes, and says where it falls short of what is promised.

1. Each rank is a process that ends by itself; its last line says what it saw.
2. A rank that stopped is sent SIGCONT after the timeout.
3. `shortfalls` compares: the same error on all that live, in time, naming the victim; nothing that stays behind.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ddpstats.capture.bundle import Bundle
from ddpstats.dump.analyze import open_rank
from ddpstats.errors import BundleError, DumpError
from ddpstats.testing.ranks import rank_environ, serve_store
from tests.faults.injuries import FAULTS, Case, small_disk
from tests.faults.phases import PHASES
from tests.programs import Program, reserved_port

SLACK_SEC = 5.0
_START_SEC = 120.0
_EXIT_SEC = 15.0  # from a rank's last word to its end
_OVERSLEPT_SEC = 2.0  # beyond the timeout, of a rank that was stopped


@dataclass(frozen=True)
class Seen:
    """``ranks``: each rank's report, None where it made none. ``exits``: its exit code and the seconds it took.

    ``happened``: when the victim was hurt; 0 where it was not. ``stays``: processes, shared memory, files.
    """

    ranks: list[dict[str, Any] | None]
    exits: list[tuple[int, float]]
    stderr: list[str]
    happened: float
    stays: list[str]

    def survivors(self, case: Case) -> list[dict[str, Any]]:
        """Return the reports of the ranks that were not hurt, and the victim's where it takes part."""
        return [
            report or {} for rank, report in enumerate(self.ranks) if not (case.ends_in_error and rank == case.victim)
        ]

    def known_after_sec(self, case: Case) -> float:
        """Return the seconds from the fault until the last of the other ranks knew of it."""
        reports = [report for rank, report in enumerate(self.ranks) if rank != case.victim and report]
        return max((report["first"]["at"] for report in reports), default=0.0) - self.happened


def play(case: Case) -> Seen:
    """Play the case. Raises `CannotMount` where no disk can be mounted for it."""
    with tempfile.TemporaryDirectory(prefix="ddpstats-fault-") as scratch, contextlib.ExitStack() as stack:
        directory = Path(scratch)
        disk = directory / "disk"
        disk.mkdir()
        if FAULTS[case.fault].on_disk:
            stack.enter_context(small_disk(disk))
        (disk / "tmp").mkdir()
        processes = _started(case, directory, stack)
        with ThreadPoolExecutor(case.ranks + 1) as pool:
            if case.fault == "stop":
                pool.submit(_go_on_later, case, directory)
            ended = list(pool.map(_ended, processes))
        happened = directory / "happened"
        return Seen(
            [report for report, _, _ in ended],
            [exit for _, exit, _ in ended],
            [stderr for _, _, stderr in ended],
            float(happened.read_text()) if happened.exists() else 0.0,
            [*_processes(directory), *_shared_memory(directory), *_files(case, disk)],
        )


def _started(case: Case, directory: Path, stack: contextlib.ExitStack) -> list[Program]:
    store = None if FAULTS[case.fault].serves else serve_store()
    stack.callback(lambda: store)  # which serves until then
    port = stack.enter_context(reserved_port()) if store is None else store.port
    command = ["-m", "tests.faults.rank", json.dumps(asdict(case))]
    programs = []
    for rank in range(case.ranks):
        environ = rank_environ(rank, case.ranks, port, {"TORCH_CPP_LOG_LEVEL": "FATAL"})
        if store is None:
            environ.pop("TORCHELASTIC_USE_AGENT_STORE")
        program = Program([*command, str(rank), str(port), str(directory)], environ)
        programs.append(stack.enter_context(program))
    return programs


def _ended(program: Program) -> tuple[dict[str, Any] | None, tuple[int, float], str]:
    try:
        status = program.wait(_START_SEC)
    except subprocess.TimeoutExpired:
        os.kill(program.pid, signal.SIGKILL)
        status = program.wait()
    at, lines = time.monotonic(), program.output().splitlines()
    report = json.loads(lines[-1]) if lines and lines[-1].startswith("{") else None
    return report, (status, at - report["ended"] if report else 0.0), program.errors()


def _go_on_later(case: Case, directory: Path) -> None:
    deadline = time.monotonic() + _START_SEC
    while not (directory / "happened").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(case.timeout_sec + _OVERSLEPT_SEC + case.ranks / 4)  # ranks do not begin to wait all at once
    with contextlib.suppress(OSError):
        os.kill(_pids(directory)[case.victim], signal.SIGCONT)


def _pids(directory: Path) -> dict[int, int]:
    return {int(path.name[3:]): int(path.read_text()) for path in directory.glob("pid*")}


# -- what stays behind -----------------------------------------------------------------------------------------------


def _processes(directory: Path) -> Iterator[str]:
    """Yield the processes that are left in the sessions of the ranks."""
    sessions = set(_pids(directory).values())
    for status in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = status.read_text().rpartition(")")[2].split()
            if int(fields[3]) in sessions and fields[0] != "Z":
                yield f"process {status.parent.name}"


def _shared_memory(directory: Path) -> list[str]:
    """Return torch's shared memory, which has names. That of ddpstats has none: ranks look for it themselves."""
    pids = list(map(str, _pids(directory).values()))
    names = [path.name for path in Path("/dev/shm").iterdir()]
    return [f"/dev/shm/{name}" for name in names if any(pid in name.split("_") for pid in pids)]


def _files(case: Case, disk: Path) -> Iterator[str]:
    """Yield files that claim to be whole and are not, and what ranks left in the temporary directory."""
    for path in (disk / "tmp").iterdir():
        yield f"{path.name} in the temporary directory"
    writes = PHASES[case.phase].writes
    for bundle in disk.glob("capture-*"):
        if (why := _bundle_at_fault(bundle)) is not None:
            yield f"{bundle.name}: {why}"
    for rank in disk.glob("step*/rank*") if writes else ():
        if (why := _dump_at_fault(case, rank)) is not None:
            yield f"{rank.relative_to(disk)}: {why}"


def _bundle_at_fault(path: Path) -> str | None:
    try:
        bundle = Bundle.open(path)
    except BundleError:
        return None  # it does not load
    try:
        for rank in bundle.manifest.ranks_present:
            bundle.rank_part(rank)
        for rank in bundle.manifest.model_files:
            bundle.parameters(rank)
    except BundleError as error:
        return f"its manifest names what does not load: {error}"
    everyone = set(bundle.manifest.ranks) == set(bundle.manifest.ranks_present)
    return None if everyone or not bundle.manifest.complete else "complete without all ranks"


def _dump_at_fault(case: Case, path: Path) -> str | None:
    try:
        dump = open_rank(path)
    except DumpError:
        return None
    entries = len(list(dump.entries()))
    return None if not dump.complete or entries >= 4 else f"complete with {entries} entries"


# -- judging ---------------------------------------------------------------------------------------------------------


def shortfalls(case: Case, seen: Seen) -> list[str]:
    """Return how what was seen falls short of what is promised."""
    ranks = seen.survivors(case)
    if any("first" not in report for report in ranks):
        return [f"a rank said nothing: {seen.exits} {seen.stderr}"]
    faults = [*seen.stays, *_exits(case, seen)]
    firsts = [report["first"] for report in ranks]
    if case.ends_in_error:
        faults += _missed(case, seen, ranks)
    else:
        expected = "DumpError" if case.is_own_error else ""
        faults += [f"raised {report['raised']}: {report['text']}" for report in firsts if report["raised"] != expected]
    # Without the store, or in an error about its own file, each rank speaks for itself.
    speaks_alone = case.is_own_error or FAULTS[case.fault].serves
    if len({json.dumps([report["raised"], speaks_alone or report["text"], report["value"]]) for report in firsts}) != 1:
        faults.append(
            f"not the same on all ranks: {[[report['raised'], report['text'], report['value']] for report in firsts]}"
        )
    return faults + [f"rank leaves behind {report['left']}" for report in ranks if report["left"]]


def _missed(case: Case, seen: Seen, ranks: list[dict[str, Any]]) -> Iterator[str]:
    for report in ranks:
        first = report["first"]
        if not first["ours"] or first["missing"] != [case.victim]:
            yield f"names {first['missing']}: {first['raised']}: {first['text']}"
        if report["again"] is not None and report["again"]["missing"] != [case.victim]:
            yield f"raises another error at the next call: {report['again']['raised']}: {report['again']['text']}"
        if report["leaves"]["text"] != first["text"]:
            yield f"leaves by another error: {report['leaves']['raised']}: {report['leaves']['text']}"
    late = seen.ranks[case.victim]
    if case.fault == "stop" and late is not None:  # it may come in time for this call, and gets the error at the next
        texts = [report["text"] for report in (late["first"], late["again"], late["leaves"]) if report is not None]
        if ranks[0]["first"]["text"] not in texts:
            yield f"the rank that was stopped gets another error: {texts}"
    is_gone = case.fault in ("kill", "host")  # which the others see on this host within a second
    latest_sec = 2 * 1.0 + SLACK_SEC if is_gone else case.limit_sec + SLACK_SEC
    if not 0 <= seen.known_after_sec(case) <= latest_sec:
        yield f"known after {seen.known_after_sec(case):.1f} s"


def _exits(case: Case, seen: Seen) -> Iterator[str]:
    killed = case.fault in ("kill", "host")
    for rank, (code, after_sec) in enumerate(seen.exits):
        expected = -signal.SIGKILL if killed and rank == case.victim else 0
        if code != expected:
            yield f"rank {rank} ended with {code} after {after_sec:.1f} s: {seen.stderr[rank][-2000:]}"
        elif after_sec > _EXIT_SEC:
            yield f"rank {rank} took {after_sec:.1f} s to end"
