"""Programs as files, run to their end as torchrun runs them: by torchrun itself, or with what it tells a rank."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Protocol

from ddpstats.testing._rank_main import RankSpec
from ddpstats.testing._rank_process import rank_environ
from ddpstats.testing._rank_team import serve_store
from tests.scripts import python, start

LIMIT_SEC = 150
_TERM_AFTER_SEC = 3.0  # torchrun does so within a tenth, and what a rank ends with then is chance
COMMAND = str(Path(__file__).with_name("command.py"))
"""The command `ddpstats`, as a script."""


@dataclasses.dataclass(frozen=True)
class Ended:
    """How the ranks ended. ``stderr``: of all of them.

    ``first``: what torchrun tells, in one line, as the root cause; ``failure``: the file that it has this from.
    """

    statuses: list[int]
    stdout: str
    stderr: str
    first: str = ""
    failure: str = ""


class Run(Protocol):
    """Two ranks run a script with these arguments and variables: `by_torchrun` or `forked`."""

    def __call__(self, script: str, *args: str, **env: str) -> Ended: ...


def by_torchrun(script: str, *args: str, ranks: int = 2, **env: str) -> Ended:
    """``torchrun SCRIPT ARGS...``. The statuses are of those ranks that did not end in 0."""
    command = [python(), "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", script]
    own = {**os.environ, "OMP_NUM_THREADS": "1", **env}
    return of_torchrun(
        subprocess.run([*command, *args], capture_output=True, text=True, timeout=LIMIT_SEC, check=False, env=own)
    )


def of_torchrun(done: subprocess.CompletedProcess[str]) -> Ended:
    """What torchrun's own stderr says of the ranks."""
    statuses = [int(found) for found in re.findall(r"exitcode +: (-?\d+)", done.stderr)]
    assert bool(statuses) == bool(done.returncode), done.stderr
    of_the_ranks = done.stderr.partition("failed (exitcode")[0]
    return Ended(
        statuses, done.stdout, of_the_ranks, *re.findall("traceback : (.*)", done.stderr.rpartition("Root Cause")[2])
    )


def forked(script: str, *args: str, ranks: int = 2, **env: str) -> Ended:
    """The ranks of ``torchrun SCRIPT ARGS...``, and what it would say of them."""
    store = serve_store()
    with tempfile.TemporaryDirectory() as scratch:
        paths = [Path(scratch, str(rank)) for rank in range(ranks)]
        environs = [
            rank_environ(
                RankSpec(rank, ranks, store.port, 0, 0, 0),
                {"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_ERROR_FILE": str(paths[rank]), **env},
            )
            for rank in range(ranks)
        ]
        ended = _run([script, *args], environs)
        failures = [path.read_text() for path in paths if path.exists()]
    if failures:  # torchrun takes what happened first; of one second, that of the lowest rank
        first = min(failures, key=lambda failure: int(json.loads(failure)["message"]["extraInfo"]["timestamp"]))
        ended = dataclasses.replace(ended, first=json.loads(first)["message"]["message"], failure=first)
    return ended


def alone(script: str, *args: str, **env: str) -> Ended:
    """``python SCRIPT ARGS...``, forked: no rank of anything."""
    inherited = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    return _run([script, *args], [{**inherited, "OMP_NUM_THREADS": "1", **env}])


def _run(command: list[str], environs: list[dict[str, str]]) -> Ended:
    with contextlib.ExitStack() as stack:
        files = [[stack.enter_context(tempfile.TemporaryFile("w+")) for _ in range(2)] for _ in environs]
        processes = []
        try:
            for environ, (out, err) in zip(environs, files, strict=True):
                processes.append(start(command, environ, out, err))
            _watch(processes)
            statuses = [process.wait() for process in processes]
        finally:
            for process in processes:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
        return Ended(statuses, *("".join(map(_text, column)) for column in zip(*files, strict=True)))


def _watch(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Until all have ended. As torchrun does, end the others when one has failed."""
    deadline, failed_at = time.monotonic() + LIMIT_SEC, 0.0
    while None in (statuses := [process.poll() for process in processes]):
        now = time.monotonic()
        assert now < deadline, f"a rank still runs: {statuses}"
        if any(statuses):
            failed_at = failed_at or now
            if now > failed_at + _TERM_AFTER_SEC:
                _end(processes)
        time.sleep(0.02)


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        if process.poll() is None:
            os.kill(process.pid, signal.SIGTERM)


def _text(file: IO[str]) -> str:
    file.seek(0)
    return file.read()
