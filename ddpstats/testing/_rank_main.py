"""What runs inside a rank that `run_ranks` or `RankPool` started.

1. Tie this process and its children to the parent's life.
2. Make Python stacks available: on SIGUSR1 into the parent's file, on a fatal signal to stderr.
3. Say "ready"; then, per frame: join the process group (first time only), call the function, send the reply.
4. On an empty frame: leave the process group and end as any Python process does.
"""

from __future__ import annotations

import datetime
import faulthandler
import fcntl
import os
import pickle
import select
import signal
import socket
import sys
import threading
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # not in __all__

from ddpstats._base import config
from ddpstats._observe.torch_groups import collectives_issued, groups_made
from ddpstats.testing._rank_wire import (
    READY,
    GroupState,
    Reply,
    error_reply,
    recv_frame,
    send_frame,
    value_reply,
)

_STORE_TIMEOUT = datetime.timedelta(seconds=60)


class RankSpec(NamedTuple):
    """What the parent tells a rank on its command line. It alone holds the other end of the pipe `life_fd`."""

    rank: int
    world_size: int
    store_port: int
    control_fd: int
    life_fd: int
    stack_fd: int


def main(spec: RankSpec) -> None:
    """Serve the parent until it says "end" or is gone."""
    for fd in (spec.control_fd, spec.life_fd, spec.stack_fd):
        os.set_inheritable(fd, False)
    die_with_parent(spec.life_fd)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, file=spec.stack_fd, all_threads=True)
    torch.set_num_threads(1)
    if os.environ.get(config.GUARD):  # of a server that has imported ddpstats, this process begins it for itself
        from ddpstats.guard import _ending

        _ending.start()
    with socket.socket(fileno=spec.control_fd) as control:
        _serve(control, spec)
    if dist.is_initialized():
        dist.destroy_process_group()


def _serve(control: socket.socket, spec: RankSpec) -> None:
    send_frame(control, READY)
    joined = False
    while request := recv_frame(control):
        reply = _perform(request, None if joined else spec)
        joined = True
        send_frame(control, pickle.dumps(reply))


def _perform(request: bytes, to_join: RankSpec | None) -> Reply:
    """Call what was asked for. BaseException: `SystemExit` and pytest's outcomes are answers too."""
    environ = dict(os.environ)
    try:
        if to_join is not None:
            _join_group(to_join)
        fn, args, kwargs = pickle.loads(request)
        value = fn(*args, **kwargs)
    except BaseException as error:
        return error_reply(error, group_state())
    finally:
        if os.environ != environ:  # Lightning takes WORLD_SIZE away when a fit ends
            os.environ.clear()
            os.environ.update(environ)
    return value_reply(value, group_state())


def _join_group(spec: RankSpec) -> None:
    # Always a client: the server lives in the parent, so that no dying rank takes the store along.
    client = TCPStore("127.0.0.1", spec.store_port, None, False, _STORE_TIMEOUT)
    store = PrefixStore("ddpstats-testing", client)
    dist.init_process_group("gloo", store=store, rank=spec.rank, world_size=spec.world_size)


def group_state() -> GroupState | None:
    """What the parent compares between ranks after each run; None if there is no default process group."""
    if not dist.is_initialized():
        return None
    world = dist.group.WORLD
    assert world is not None
    try:
        collectives = collectives_issued(world)
    except RuntimeError:  # what a backend without numbers raises
        collectives = 0
    return GroupState(dist.get_world_size(), collectives, groups_made())


def probe_group(timeout_sec: float) -> float:
    """Collective: prove that the default process group still adds up. Returns the world size it counted."""
    world = dist.group.WORLD
    if world is None:
        return 0.0
    ones = torch.ones(1)
    options = dist.AllreduceOptions()
    options.timeout = datetime.timedelta(seconds=timeout_sec)
    world.allreduce([ones], options).wait()
    return ones.item()


def die_with_parent(life_fd: int) -> None:
    """Arrange that the parent's end, by SIGKILL too, is the end of this process and of its process group.

    Not `prctl(PR_SET_PDEATHSIG)`: that signal follows the parent's thread that started us, which may end long before
    the parent does, and it spares our own children.
    """
    try:
        _kill_group_at_close(life_fd)
    except OSError:  # a system that only imitates Linux
        threading.Thread(target=_end_with_pipe, args=(life_fd,), daemon=True).start()
    if _is_closed(life_fd):  # the parent died before any of this was in place
        os.killpg(os.getpgrp(), signal.SIGKILL)


def _kill_group_at_close(life_fd: int) -> None:
    """Have the kernel send SIGKILL to the whole group when the pipe's last writer is gone.

    Needs neither a thread nor the interpreter lock, so that it works inside any stuck C code.
    """
    if sys.platform != "linux":
        raise OSError
    fcntl.fcntl(life_fd, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(life_fd, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(life_fd, fcntl.F_SETFL, fcntl.fcntl(life_fd, fcntl.F_GETFL) | os.O_ASYNC)


def _is_closed(life_fd: int) -> bool:
    poll = select.poll()  # not select(): the number comes from the parent and may be beyond 1024
    poll.register(life_fd)
    return bool(poll.poll(0))


def _end_with_pipe(life_fd: int) -> None:
    os.read(life_fd, 1)
    os.killpg(os.getpgrp(), signal.SIGKILL)
