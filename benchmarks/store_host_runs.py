"""What runs on ranks whose rank 0 serves the store and is killed: guarded calls, checks of a step, bundles."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ddpstats
from ddpstats._ranks.gather import gather_trees
from tests.ranks.store_host_runs import TIMEOUT_SEC, Calls, Survivor, kill_rank, serve_anew, survive


def guarded(mode: Any, name: str, timeout_sec: float = TIMEOUT_SEC) -> Calls:
    """Return one call, of `GUARDED`, under a guard that has seen the group before.

    What the guard raises on leaving is what the call raises; called again, it raises the same.
    """
    group = dist.new_group()
    guard = ddpstats.collective_guard(mode, timeout_sec=timeout_sec)
    guard.__enter__()
    for watched in (group, None):
        dist.all_reduce(torch.ones(1), group=watched)
    raised: list[BaseException] = []

    def call() -> None:
        if raised:
            raise raised[0]
        try:
            with contextlib.ExitStack() as leaving:
                leaving.push(guard)
                GUARDED[name](group)
                guard.step()
        except BaseException as error:
            raised.append(error)
            raise

    return {name: call}


def _exchange() -> None:
    """Send between ranks 0 and 1, so that each waits for the other one."""
    rank = dist.get_rank()
    if rank < 2:
        arrives = dist.irecv(torch.ones(1), 1 - rank)
        dist.send(torch.ones(1), 1 - rank)
        _wait(arrives)
    else:
        dist.recv(torch.ones(1), 0)


def _wait(work: Any) -> None:
    work.wait()


def _pass_on() -> None:
    """Send from rank 1 to rank 2: both live, and cannot compare what they do."""
    if dist.get_rank() == 1:
        dist.send(torch.ones(1), 2)
    elif dist.get_rank() == 2:
        dist.recv(torch.ones(1), 1)


GUARDED: dict[str, Callable[[Any], Any]] = {
    "all_reduce": lambda group: dist.all_reduce(torch.ones(1), group=group),
    "barrier": lambda group: dist.barrier(),
    "async": lambda group: _wait(dist.all_reduce(torch.ones(1), group=group, async_op=True)),
    "gather": lambda group: dist.all_gather_object([None] * dist.get_world_size(), "x"),
    "send": lambda group: dist.send(torch.ones(1), 0),
    "recv": lambda group: dist.recv(torch.ones(1), 0),
    "recv from any rank": lambda group: dist.recv(torch.ones(1)),
    "irecv": lambda group: _wait(dist.irecv(torch.ones(1), 0)),
    "exchange": lambda group: _exchange(),
    "between survivors": lambda group: _pass_on(),
    "step alone": lambda group: None,
}


def lose_rank_0_under_guard(port: int, mode: str, name: str) -> Survivor:
    serve_anew(port)
    return kill_rank(0, guarded(mode, name), "guarded")


def checks(directory: str) -> Calls:
    """Return what judges a step, each on a group of its own."""
    model = torch.nn.Linear(2, 1)
    groups = {name: dist.new_group() for name in ("NaNCapture.check", "Sentinel.step", "gather_trees")}
    capture = ddpstats.NaNCapture(directory, model=model, group=groups["NaNCapture.check"])
    return {
        "NaNCapture.check": capture.check,
        "Sentinel.step": ddpstats.Sentinel(model, mode=1, group=groups["Sentinel.step"]).step,
        "gather_trees": lambda: gather_trees({"a": 1}, name="a test", group=groups["gather_trees"]),
    }


def lose_rank_0_of_checks(port: int, phase: str, name: str, directory: str) -> Survivor:
    """``name``: of the one check, or "" for all."""
    serve_anew(port)
    return kill_rank(0, {key: call for key, call in checks(directory).items() if name in ("", key)}, phase)


def lose_rank_0_in_bundle(port: int, where: str, directory: str) -> Survivor:
    """Kill rank 0 at the function ``where`` of `bundle`, while the bundle of a step that is not finite is written."""
    rank = serve_anew(port)
    model = torch.nn.Linear(2, 1)
    capture = ddpstats.NaNCapture(directory, model=model)

    def call() -> None:
        model.weight.grad, model.bias.grad = torch.full((1, 2), torch.nan), torch.zeros(1)
        with pytest.MonkeyPatch.context() as patch:
            if rank == 0:
                patch.setattr(f"ddpstats.capture.bundle.{where}", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
            capture.check()

    return survive({where: call})
