"""One rank of a job whose rank 0 serves the store and dies: what the others are told. Run by `test_store_host`.

python -m tests.transport.store_host_rank RANK WORLD_SIZE PORT PHASE VICTIM

Or as a function on ranks that are there already: `forked`.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ddpstats
from ddpstats._agreement.gather import gather_trees
from ddpstats.errors import DdpstatsError

TIMEOUT_SEC = 6.0


def calls() -> dict[str, Callable[[], Any]]:
    """Each on a group of its own, so that none is told by another one."""
    groups = {
        name: dist.new_group() for name in ("start", "any_rank", "all_ranks", "recursive_average", "reduce_stats")
    }
    starter = ddpstats.StatsReducer(group=groups["start"])
    return {
        "reduce_stats": lambda: ddpstats.reduce_stats({"a": 1.0}, group=groups["reduce_stats"]),
        "start": lambda: starter.start({"a": 1.0}).result(),
        "any_rank": lambda: ddpstats.any_rank(True, group=groups["any_rank"]),
        "all_ranks": lambda: ddpstats.all_ranks(True, group=groups["all_ranks"]),
        "recursive_average": lambda: ddpstats.recursive_average(
            {"a": torch.tensor(1.0)}, torch.tensor(1.0), True, group=groups["recursive_average"]
        ),
    }


def attempt(call: Callable[[], Any]) -> dict[str, Any]:
    started = time.monotonic()
    try:
        value = str(call())
        return {"raised": None, "text": value, "missing": [], "after_sec": time.monotonic() - started}
    except Exception as error:
        return {
            "raised": type(error).__name__ if isinstance(error, DdpstatsError) else repr(type(error)),
            "text": str(error),
            "missing": list(getattr(error, "missing_ranks", ())),
            "after_sec": time.monotonic() - started,
        }


def guarded(mode: Any) -> Callable[[], Any]:
    """A group whose collectives are watched from now on; the next one, and what the guard says of it on leaving."""
    return guarded_call(mode, "all_reduce", TIMEOUT_SEC)


def guarded_call(mode: Any, name: str, timeout_sec: float) -> Callable[[], Any]:
    """One call under a guard that has seen the group before, and what the guard says of it on leaving.

    ``name``: one of `GUARDED`.
    """
    group = dist.new_group()
    guard = ddpstats.collective_guard(mode, timeout_sec=timeout_sec)
    guard.__enter__()
    for watched in (group, None):
        dist.all_reduce(torch.ones(1), group=watched)
    found: list[BaseException] = []

    def call() -> None:
        if found:
            raise found[0]
        try:
            with contextlib.ExitStack() as leaving:
                leaving.push(guard)
                GUARDED[name](group)
                guard.step()
        except BaseException as error:
            found.append(error)
            raise

    return call


def _exchange() -> None:
    """Ranks 0 and 1 to each other, so that each waits for the other one."""
    rank = dist.get_rank()
    if rank < 2:
        arrives = dist.irecv(torch.ones(1), 1 - rank)
        dist.send(torch.ones(1), 1 - rank)
        _received(arrives)
    else:
        dist.recv(torch.ones(1), 0)


def _received(work: Any) -> None:
    work.wait()


def _pass_on() -> None:
    """Rank 1 sends to rank 2: both live, and cannot compare what they do."""
    if dist.get_rank() == 1:
        dist.send(torch.ones(1), 2)
    elif dist.get_rank() == 2:
        dist.recv(torch.ones(1), 1)


GUARDED: dict[str, Callable[[Any], Any]] = {
    "all_reduce": lambda group: dist.all_reduce(torch.ones(1), group=group),
    "barrier": lambda group: dist.barrier(),
    "async": lambda group: dist.all_reduce(torch.ones(1), group=group, async_op=True).wait(),
    "gather": lambda group: dist.all_gather_object([None] * dist.get_world_size(), "x"),
    "send": lambda group: dist.send(torch.ones(1), 0),
    "recv": lambda group: dist.recv(torch.ones(1), 0),
    "recv from anybody": lambda group: dist.recv(torch.ones(1)),
    "irecv": lambda group: _received(dist.irecv(torch.ones(1), 0)),
    "exchange": lambda group: _exchange(),
    "between survivors": lambda group: _pass_on(),
    "step alone": lambda group: None,
}


def watchers() -> dict[str, Callable[[], Any]]:
    """What judges a step, each on a group of its own."""
    model = torch.nn.Linear(2, 1)
    groups = {name: dist.new_group() for name in ("NaNCapture.check", "Sentinel.step", "gather_trees")}
    capture = ddpstats.NaNCapture(tempfile.gettempdir(), model=model, group=groups["NaNCapture.check"])
    return {
        "NaNCapture.check": capture.check,
        "Sentinel.step": ddpstats.Sentinel(model, mode=1, group=groups["Sentinel.step"]).step,
        "gather_trees": lambda: gather_trees({"a": 1}, name="a test", group=groups["gather_trees"]),
    }


def bundle(where: str, directory: str) -> Callable[[], Any]:
    """A step that is not finite; rank 0 dies while its bundle is written, at the function ``where`` of `_publish`."""
    model = torch.nn.Linear(2, 1)
    capture = ddpstats.NaNCapture(directory, model=model)

    def call() -> None:
        model.weight.grad, model.bias.grad = torch.full((1, 2), torch.nan), torch.zeros(1)
        with pytest.MonkeyPatch.context() as patch:
            if dist.get_rank() == 0:
                patch.setattr(f"ddpstats.capture._publish.{where}", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
            capture.check()

    return call


def serve(rank: int, world_size: int, address: str, port: int) -> None:
    """Rank 0 serves the store from now on."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"tcp://{address}:{port}", rank=rank, world_size=world_size, timeout=timedelta(seconds=60)
    )


def end(phase: str) -> None:
    """Of the victim."""
    time.sleep(2.5 if phase == "during" else 0.5)  # for whoever still sets things up
    os.kill(os.getpid(), signal.SIGKILL)


def survive(todo: dict[str, Callable[[], Any]], phase: str) -> dict[str, Any]:
    """What the calls raise, twice, and what they leave behind."""
    if phase != "during":
        time.sleep(1.0)
    told = {name: attempt(call) for name, call in todo.items()}
    again = {name: attempt(call) for name, call in todo.items()}
    deadline = time.monotonic() + 5.0
    while time.monotonic() < deadline and threads_of_store():  # which end a moment after their last request
        time.sleep(0.05)
    return {"told": told, "again": again, "left": threads_of_store()}


def threads_of_store() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "ddpstats-store"]


def main(rank: int, world_size: int, port: int, phase: str, victim: int) -> None:
    os.environ["DDPSTATS_TIMEOUT_SEC"] = str(TIMEOUT_SEC)
    serve(rank, world_size, "127.0.0.1", port)
    todo = {phase: guarded(phase)} if phase in ("strict", "step") else calls()
    if phase not in ("before", "strict", "step"):
        for call in todo.values():
            call()
    dist.barrier()
    if rank == victim:
        end(phase)
    print(json.dumps(survive(todo, phase)), flush=True)


def serve_anew(port: int) -> int:
    """On a rank of `run_ranks`: joins another default group, whose store rank 0 serves."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    dist.barrier()  # none leaves while another one still connects
    dist.destroy_process_group()
    os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)  # else rank 0 is a client as well
    os.environ["DDPSTATS_TIMEOUT_SEC"] = str(TIMEOUT_SEC)
    serve(rank, world_size, "127.0.0.1", port)
    return rank


def forked(port: int, phase: str, name: str, directory: str) -> dict[str, Any]:
    """On a rank of `run_ranks`. ``name``: of the one call, or "" for all."""
    rank = serve_anew(port)
    if phase == "bundle":
        todo = {name: bundle(name, directory)}
    elif phase in ("strict", "step"):
        todo = {name: guarded_call(phase, name, TIMEOUT_SEC)}
    else:
        todo = {key: call for key, call in watchers().items() if name in ("", key)}
    if phase in ("between", "during"):
        for call in todo.values():
            call()
    dist.barrier()
    if rank == 0 and phase != "bundle":
        end(phase)
    return survive(todo, phase)


def left_alone(port: int) -> dict[str, Any]:
    """Rank 1 dies, and the launcher ends rank 0's group while its reduction waits, as Ray Train does."""
    rank = serve_anew(port)
    with ddpstats.StatsReducer() as reducer:
        reducer({"a": 1.0})
        dist.barrier()
        if rank == 1:
            time.sleep(1.0)
            os.kill(os.getpid(), signal.SIGKILL)
        waiting = reducer.start({"a": 1.0})
        time.sleep(0.3)
        dist.destroy_process_group()
        return attempt(waiting.result)


def stopped(port: int) -> dict[str, Any]:
    """Rank 0 is stopped, and goes on when the others have given up."""
    rank = serve_anew(port)
    with ddpstats.StatsReducer() as reducer:
        pid = torch.tensor(float(os.getpid()))
        dist.broadcast(pid, 0)
        reducer({"a": 1.0})
        dist.barrier()
        if rank == 0:
            os.kill(os.getpid(), signal.SIGSTOP)
        told = attempt(lambda: reducer({"a": 1.0}))
        if rank == 1:
            time.sleep(1.0)  # for the others, which give up at the same time
            os.kill(int(pid), signal.SIGCONT)
        return told


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], int(sys.argv[5]))
