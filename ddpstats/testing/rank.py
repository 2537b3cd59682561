"""The main function of a rank that `run_ranks` or `RankPool` started.

1. Make Python stacks available, on the stderr that the process has from its parent: on SIGUSR1, and on a fatal signal.
2. Join the process group; then, per frame: call the function, send the answer.
3. On an empty frame: leave the process group and end as any Python process does.
"""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import multiprocessing
import os
import pickle
import signal
import sys
import traceback
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # not in __all__

from ddpstats._observe.groups import count_groups, read_collective_count
from ddpstats.testing.outcomes import RankOutcome, RankUnpicklable

END = b""

_STORE_TIMEOUT = datetime.timedelta(seconds=60)


class RankAnswer(NamedTuple):
    """A rank's pickled `RankOutcome`, and on what all ranks of a healthy default process group agree after a run."""

    outcome: bytes
    group: tuple[int, ...] | None


def main(rank: int, world_size: int, store_port: int, control: Connection) -> None:
    """Serve the parent until it says "end" or is gone."""
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, file=os.dup(2), all_threads=True)  # the function may change stderr
    if os.environ.get("DDPSTATS_GUARD"):  # the server imported ddpstats without it, so this process begins the guard
        from ddpstats.guard import ending

        ending.start()
    with control, contextlib.suppress(EOFError):
        _join_group(rank, world_size, store_port)
        while request := control.recv_bytes():
            environ = dict(os.environ)
            outcome = RankOutcome.of(rank, _call, request)
            if os.environ != environ:  # Lightning takes WORLD_SIZE away when a fit ends
                os.environ.clear()
                os.environ.update(environ)
            sys.stdout.flush()  # the parent may kill this process
            control.send(RankAnswer(_pickle(outcome), _group_state(world_size)))
    if dist.is_initialized():
        dist.destroy_process_group()


def _join_group(rank: int, world_size: int, store_port: int) -> None:
    # Always a client: the server lives in the parent, so that no dying rank takes the store along.
    client = TCPStore("127.0.0.1", store_port, None, False, _STORE_TIMEOUT)
    store = PrefixStore("ddpstats-testing", client)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    # gloo fails a rank that still connects to one whose function has left the group already
    store.set(f"joined by {rank}", "")
    store.wait([f"joined by {member}" for member in range(world_size)], _STORE_TIMEOUT)


def _call(request: bytes) -> Any:
    process = multiprocessing.current_process()
    process._inheriting = True  # type: ignore[attr-defined]  # a module that starts processes when imported is an error
    try:
        fn, args, kwargs = pickle.loads(request)
    finally:
        del process._inheriting  # type: ignore[attr-defined]
    return fn(*args, **kwargs)


def _pickle(outcome: RankOutcome) -> bytes:
    """Pickle an outcome, or a `RankUnpicklable` in place of what pickle does not carry unchanged.

    An exception whose `__init__` builds its message pickles well and comes back with the message built twice, or does
    not come back at all; a test that looks at the message must not see a distorted one.
    """
    try:
        data = pickle.dumps(outcome)
        if str(pickle.loads(data).error) == str(outcome.error):
            return data
        reason = "A copy of it has another message."
    except Exception:
        reason = traceback.format_exc()
    kind, thing = ("return value", outcome.value) if outcome.ok else ("exception", outcome.error)
    error = RankUnpicklable(outcome.rank, kind, type(thing).__qualname__, outcome.traceback + reason)
    return pickle.dumps(RankOutcome(outcome.rank, error=error, traceback=error.reason))


def _group_state(world_size: int) -> tuple[int, ...] | None:
    """Return how many collectives and groups the default group has had; None if it is not that of all ranks."""
    if not dist.is_initialized() or dist.get_world_size() != world_size:
        return None
    try:
        collectives = read_collective_count(dist.group.WORLD)
    except RuntimeError:  # what a backend without numbers raises
        collectives = 0
    return collectives, count_groups()
