"""The main function of a rank that `run_ranks` or `RankPool` started.

1. Make Python stacks available: on SIGUSR1 into the parent's file, on a fatal signal to stderr.
2. Say "ready"; then, per frame: join the process group (first time only), call the function, send the reply.
3. On an empty frame: leave the process group and end as any Python process does.
"""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import functools
import os
import pickle
import signal
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # not in __all__

from ddpstats._base import config
from ddpstats._observe.groups import collectives_issued, groups_made
from ddpstats.testing.outcomes import RankOutcome, RankUnpicklable

READY = b"ready"
END = b""

_REPR_CHARS = 2000


class GroupState(NamedTuple):
    """The facts on which all ranks of a healthy default process group agree after a run."""

    world_size: int
    collectives: int
    groups_created: int


class Reply(NamedTuple):
    """The answer of a rank: the pickled value or exception, or (`payload` None) why that could not be pickled."""

    ok: bool
    payload: bytes | None
    summary: str
    traceback: str
    group_state: GroupState | None


def value_reply(value: Any, state: GroupState | None) -> Reply:
    """Wrap what the function returned, on the rank."""
    try:
        return Reply(True, pickle.dumps(value), type(value).__qualname__, "", state)
    except Exception:
        return Reply(True, None, _safe_repr(value), traceback.format_exc(), state)


def error_reply(error: BaseException, state: GroupState | None) -> Reply:
    """Wrap what the function raised, on the rank."""
    text = "".join(traceback.format_exception(error))
    return Reply(False, _faithful_pickle(error), _safe_repr(error), text, state)


def outcome_of(rank: int, reply: Reply) -> RankOutcome:
    """Open a reply, in the parent. What cannot be opened becomes a `RankUnpicklable`."""
    what = "return value" if reply.ok else "exception"
    if reply.payload is None:
        return _unpicklable(rank, what, reply.summary, reply.traceback)
    try:
        thing = pickle.loads(reply.payload)
    except Exception:
        return _unpicklable(rank, what, reply.summary, reply.traceback + traceback.format_exc())
    if reply.ok:
        return RankOutcome(rank, thing, None, "", None)
    return RankOutcome(rank, None, thing, reply.traceback, None)


def _unpicklable(rank: int, what: str, summary: str, reason: str) -> RankOutcome:
    return RankOutcome(rank, None, RankUnpicklable(rank, what, summary, reason), reason, None)


def _faithful_pickle(error: BaseException) -> bytes | None:
    """Pickle an exception, or None if a copy would differ.

    An exception whose `__init__` builds its message pickles well and comes back with the message built twice, or does
    not come back at all; a test that looks at the message must not see a distorted one.
    """
    try:
        payload = pickle.dumps(error)
        copy = pickle.loads(payload)
        return payload if type(copy) is type(error) and str(copy) == str(error) else None
    except Exception:
        return None


def _safe_repr(thing: Any) -> str:
    try:
        return repr(thing)[:_REPR_CHARS]
    except Exception as error:
        return f"<{type(thing).__qualname__} whose repr raised {type(error).__qualname__}>"


_STORE_TIMEOUT = datetime.timedelta(seconds=60)

is_opening = False
"""Whether this process is a rank that imports the function it is to call."""


def main(rank: int, world_size: int, store_port: int, *, control_fd: int, stack_fd: int) -> None:
    """Serve the parent until it says "end" or is gone."""
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, file=stack_fd, all_threads=True)
    if os.environ.get(config.GUARD):  # the server has imported ddpstats without it, so this process begins the guard
        from ddpstats.guard import ending

        ending.start()
    with Connection(control_fd) as control, contextlib.suppress(EOFError):
        _serve(control, functools.partial(_join_group, rank, world_size, store_port))
    if dist.is_initialized():
        dist.destroy_process_group()


def _serve(control: Connection, join_group: Callable[[], None]) -> None:
    control.send_bytes(READY)
    joined = False
    while request := control.recv_bytes():
        reply = _perform(request, None if joined else join_group)
        joined = True
        control.send_bytes(pickle.dumps(reply))


def _perform(request: bytes, join_group: Callable[[], None] | None) -> Reply:
    """Call what was asked for. BaseException: `SystemExit` and pytest's outcomes are answers too."""
    environ = dict(os.environ)
    try:
        if join_group is not None:
            join_group()
        fn, args, kwargs = _opened(request)
        value = fn(*args, **kwargs)
    except BaseException as error:
        return error_reply(error, group_state())
    finally:
        if os.environ != environ:  # Lightning takes WORLD_SIZE away when a fit ends
            os.environ.clear()
            os.environ.update(environ)
    return value_reply(value, group_state())


def _opened(request: bytes) -> Any:
    global is_opening
    is_opening = True
    try:
        return pickle.loads(request)
    finally:
        is_opening = False


def _join_group(rank: int, world_size: int, store_port: int) -> None:
    # Always a client: the server lives in the parent, so that no dying rank takes the store along.
    client = TCPStore("127.0.0.1", store_port, None, False, _STORE_TIMEOUT)
    store = PrefixStore("ddpstats-testing", client)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    # gloo fails a rank that still connects to one whose function has left the group already
    store.set(f"joined by {rank}", "")
    store.wait([f"joined by {other}" for other in range(world_size)], _STORE_TIMEOUT)


def group_state() -> GroupState | None:
    """Return what the parent compares between ranks after each run; None if there is no default process group."""
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
