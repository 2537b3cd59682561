"""Python programs in processes of their own, forked where that is the same as a fresh interpreter."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from tests.warm_python import Server

# With it comes triton, where torch has that, which complains on stderr at the end of each fork (torch 2.15).
_DYNAMO = () if importlib.util.find_spec("triton") else ("torch._dynamo",)
PRELOADED = (*_DYNAMO, "torch.distributed.launcher.api", "pytest")
"""What optimizers and DDP import at their first use, torchrun, and the tests' own modules."""


@functools.cache
def server() -> Server:
    """This session's. Made when it is first needed: libraries that tests import set variables of the environment."""
    return Server(PRELOADED)


def python() -> str:
    """For a command in place of `sys.executable`: what it costs to start is a tenth. With OMP_NUM_THREADS=1."""
    return server().executable if sys.platform == "linux" else sys.executable


def without_gloo(stdout: str) -> str:
    """Up to 2.10, torch's gloo writes a line to stdout for each group that is made."""
    return "".join(line for line in stdout.splitlines(keepends=True) if not line.startswith("[Gloo] Rank "))


def start(
    command: Sequence[str], environ: Mapping[str, str], out: IO[Any], err: IO[Any], cwd: str | Path = "."
) -> subprocess.Popen[bytes]:
    """``python COMMAND...``, in a session of its own; it imports what can be imported here."""
    paths = [environ.get("PYTHONPATH", ""), *map(os.path.abspath, sys.path)]
    own = {**environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    return subprocess.Popen([python(), *command], env=own, stdout=out, stderr=err, cwd=cwd, start_new_session=True)


def run(
    command: Sequence[str], *, timeout: float, cwd: str | Path = ".", **environ: str
) -> subprocess.CompletedProcess[str]:
    """As `subprocess.run` with captured text, of `start`; ``environ`` comes on top of this process's."""
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
