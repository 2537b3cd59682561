"""A Python that has imported torch once, and forks for everyone who would start one. Runs in a process of its own.

Not imported: `RankServer` hands this file's text to ``python -c``, so that what is forked has imported no more of the
package under test than it was told to preload. A fork is safe as long as nothing here starts a thread: torch and numpy
start none where they are told to use one, and no accelerator is touched.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import select
import socket
import sys
import threading
from collections.abc import Sequence
from typing import Any, NoReturn

MAX_BYTES = 1 << 20  # of a request: an environment, above all
MAX_FDS = 8


def serve(fd: int) -> tuple[dict[str, Any], list[int]] | None:
    """Answer the parent until it is gone (None). In a forked process: what it is asked to be, and its descriptors."""
    server = socket.socket(fileno=fd)
    pids: dict[int, int] = {}  # of those that run, by a descriptor that tells of their end
    poll = select.poll()
    poll.register(server, select.POLLIN)
    while True:
        for ready, _ in poll.poll():
            if ready != fd:
                poll.unregister(ready)
                os.close(ready)
                pid, status = os.waitpid(pids.pop(ready), 0)
                if not _tell(server, {"pid": pid, "exit_code": os.waitstatus_to_exitcode(status)}):
                    return None
                continue
            message, fds, _, _ = socket.recv_fds(server, MAX_BYTES, MAX_FDS)
            if not message:
                return None
            pid = os.fork()
            if pid == 0:
                for inherited in (fd, *pids):
                    os.close(inherited)
                server.detach()
                request: dict[str, Any] = json.loads(message)
                return request, fds
            for passed in fds:
                os.close(passed)
            end = os.pidfd_open(pid)
            pids[end] = pid
            poll.register(end, select.POLLIN)
            if not _tell(server, {"pid": pid, "exit_code": None}):
                return None


def _tell(server: socket.socket, answer: dict[str, Any]) -> bool:
    try:
        server.send(json.dumps(answer).encode())
    except OSError:
        return False
    return True


def become(request: dict[str, Any], fds: list[int]) -> None:
    """Be the fresh interpreter that was asked for, up to the code that it runs."""
    os.setsid()
    stdout, stderr, *_ = fds
    os.dup2(stdout, 1)
    os.dup2(stderr, 2)
    os.close(stdout)
    os.close(stderr)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["environ"])
    sys.path[:] = request["paths"]
    sys.modules["torch"].default_generator.seed()  # each process draws its own numbers, as each does that starts
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()


def end() -> NoReturn:
    """End as a process that `multiprocessing` has forked does: what an interpreter takes apart is the server's.

    To take a copy of it apart costs ten times what the fork did.
    """
    threading._shutdown()  # type: ignore[attr-defined]  # waits for the threads that are no daemons
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def main(fd: int, preload: Sequence[str]) -> tuple[dict[str, Any], list[int]]:
    """Returns in the forked processes alone."""
    for module in ("torch", "torch.distributed", *preload):
        importlib.import_module(module)
    gc.collect()
    gc.freeze()  # what is shared with every process stays shared
    asked = serve(fd)
    if asked is None:
        os._exit(0)
    become(*asked)
    return asked
