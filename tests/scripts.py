"""Python programs in processes of their own, forked where that is the same as a fresh interpreter."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from ddpstats.testing._rank_main import RankSpec
from ddpstats.testing._rank_process import rank_environ
from ddpstats.testing._rank_server import Forked, RankServer

PRELOADED = ("torch._dynamo", "numpy", "pytest")
"""What optimizers and DDP import at their first use, and the tests' own modules. Nothing of ddpstats: programs are also
about how it is imported."""


@functools.cache
def server() -> RankServer:
    """This session's. Made when it is first needed: libraries that tests import set variables of the environment."""
    return RankServer(rank_environ(RankSpec(0, 1, 0, 0, 0, 0), {}), PRELOADED)


def start(
    command: Sequence[str], environ: Mapping[str, str], out: IO[Any], err: IO[Any], cwd: str | Path = "."
) -> subprocess.Popen[bytes] | Forked:
    """``python COMMAND...``, the path of a program and its arguments, in a session of its own."""
    if server().serves(environ):
        return server().start_script(command, environ, out.fileno(), err.fileno(), os.path.abspath(cwd))
    whole = [sys.executable, *command]
    return subprocess.Popen(whole, env=dict(environ), stdout=out, stderr=err, cwd=cwd, start_new_session=True)


def run(
    command: Sequence[str], *, timeout: float, cwd: str | Path = ".", **environ: str
) -> subprocess.CompletedProcess[str]:
    """As `subprocess.run` with captured text, of ``python COMMAND...``; ``environ`` comes on top of this process's."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = start(command, {**os.environ, "OMP_NUM_THREADS": "1", **environ}, out, err, cwd)
        try:
            status = process.wait(timeout)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        for file in (out, err):
            file.seek(0)
        return subprocess.CompletedProcess(list(command), status, out.read(), err.read())
