"""Run a function on real torch.distributed ranks: processes on this machine, joined by gloo over loopback.

`run_ranks` starts the ranks, calls the function once on each, and ends them. `RankPool` keeps them for many calls.

1. The parent serves the rendezvous store on a port that the system picks; the ranks are its clients.
2. Each rank is forked from a process that has imported torch (`_forkserver`) and ends with the parent. It runs in a
   session of its own, with the parent's `sys.path`, and says when it is ready.
3. The function and its arguments go to each rank by pickle, the answers come back the same way, over a socket pair that
   only the two hold: nothing from outside ever reaches pickle.
4. When the time limit passes, the ranks that still run give their stacks and are killed with all their children.
5. Whatever ends the parent ends the ranks.
"""

from __future__ import annotations

import dataclasses
import functools
import pickle
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any

from ddpstats.testing import _rank_main
from ddpstats.testing._rank_outcomes import RankOutcome, RankOutcomes
from ddpstats.testing._rank_team import RankTeam

_PROBE_TIMEOUT_SEC = 5.0


@dataclasses.dataclass(frozen=True)
class PerRank:
    """An argument that differs by rank: `run_ranks(fn, 2, PerRank([a, b]))` calls `fn(a)` on rank 0, `fn(b)` on rank 1.

    Only as an argument itself, not inside another one. Each rank is sent its own value alone.
    """

    values: Sequence[Any]


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout_sec: float = 60.0,
    env: Mapping[str, str] | None = None,
    **kwargs: Any,
) -> RankOutcomes:
    """Call `fn(*args, **kwargs)` on `world_size` fresh ranks. Blocks until all have ended, and leaves none of them.

    The default process group (gloo, on the CPU) is there when `fn` is called; `fn` finds its rank in it. OpenMP and
    torch use one thread per rank. A rank's stdout is the parent's; its stderr is kept, and shown if it dies.

    Args:
        fn: a function at the top level of an importable module, not of `__main__`.
        world_size: number of ranks.
        args, kwargs: anything that pickles; a `PerRank` gives each rank its own value.
        timeout_sec: seconds from the moment all ranks are ready: starting and importing torch has a limit of its own,
            120 seconds.
        env: environment variables for the ranks, on top of the parent's and of torchrun's.

    Returns:
        One outcome per rank, in rank order, with the process's real exit code. A rank's failure is an outcome, and
        only `.values()` raises for it.

    Raises:
        ValueError: `fn` belongs to `__main__`, or a `PerRank` has not `world_size` values, or a number is not positive.
        pickle.PicklingError, AttributeError, TypeError: `fn` or an argument cannot be pickled.

    Example:
        >>> run_ranks(my_module.sum_of_ranks, 2).values()  # rank 0 and rank 1 both return 0 + 1
        [1, 1]
    """
    pool = RankPool(world_size, timeout_sec=timeout_sec, env=env)
    try:
        outcomes = pool._call(fn, args, kwargs, timeout_sec)
        exit_codes = pool._stop()
    except BaseException:
        pool._kill()
        raise
    return RankOutcomes(map(_with_final_exit, outcomes, exit_codes or [one.exit_code for one in outcomes]))


class RankPool:
    """Ranks that stay for many calls: a call of an empty function costs well below 5 ms. Not thread-safe.

    The processes start with the first `run`. What `fn` leaves behind in them (modules, patches, threads, groups) is
    there in the next run; the environment variables are as they were before. After a run in which a rank died or timed
    out, the pool is killed and the next `run` starts a fresh one. After a run in which a rank raised, or the ranks did
    not issue the same number of collectives, or the default group was destroyed, the next `run` begins with a small
    all_reduce, which decides whether the pool still works, and starts fresh ranks if not. Not noticed: a subgroup out
    of step, a changed directory; call `restart` after those.

    Args:
        world_size: number of ranks.
        timeout_sec: the limit of each `run` that gives none, in seconds, not counting the start.
        env: environment variables for the ranks.

    Example:
        >>> with RankPool(2) as pool:
        ...     for tree in trees:
        ...         pool.run(my_module.reduce_it, PerRank([tree, None])).values()
    """

    def __init__(self, world_size: int, *, timeout_sec: float = 60.0, env: Mapping[str, str] | None = None) -> None:
        if world_size < 1:
            raise ValueError(f"world_size must be at least 1, not {world_size}")
        self.world_size = world_size
        self._timeout_sec = _positive(timeout_sec)
        self._env = dict(env or {})
        self._team: RankTeam | None = None
        self._is_suspect = False
        self._closed = False

    def run(self, fn: Callable[..., Any], *args: Any, timeout_sec: float | None = None, **kwargs: Any) -> RankOutcomes:
        """Call `fn(*args, **kwargs)` on every rank; blocks until all have answered. As `run_ranks`, but the ranks stay.

        Raises:
            RuntimeError: the pool is closed. Otherwise as `run_ranks`.
        """
        if self._closed:
            raise RuntimeError("this RankPool is closed")
        limit_sec = self._timeout_sec if timeout_sec is None else _positive(timeout_sec)
        self._drop_unusable()
        outcomes = self._call(fn, args, kwargs, limit_sec)
        # Send and receive count as collectives on those ranks alone, so unequal counts are a suspicion and no proof.
        self._is_suspect = self._team is not None and not (self._team.in_step and not outcomes.errors())
        return outcomes

    def restart(self) -> None:
        """End the ranks; the next `run` starts fresh ones. Blocks until they are gone."""
        if self._is_suspect:  # a rank that another has left alone in a collective does not end by itself
            self._kill()
        else:
            self._stop()

    def close(self) -> None:
        """End the ranks for good and leave nothing behind. Blocks until they are gone. May be called twice."""
        self._closed = True
        self.restart()

    def __enter__(self) -> RankPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _call(
        self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], limit_sec: float
    ) -> RankOutcomes:
        if _rank_main.is_opening:  # else each of its ranks would start ranks, which start ranks
            raise RuntimeError(
                "ranks are started when a module is imported, and a rank imports it to find its function: "
                "start them in a function, or under `if __name__ == '__main__':`"
            )
        payloads = _payloads(fn, args, kwargs, self.world_size)
        team = self._living_team()
        failed = team.failed_start()
        return team.run(payloads, limit_sec) if failed is None else failed

    def _drop_unusable(self) -> None:
        """Asked before the ranks are used again, and not before: who restarts them need not wait for the answer."""
        team = self._team
        if self._is_suspect and team is not None and team.alive and not _works(team, self.world_size):
            self._kill()

    def _living_team(self) -> RankTeam:
        if self._team is None or not self._team.alive:
            self._team = RankTeam(self.world_size, self._env)
        return self._team

    def _stop(self) -> list[int | None]:
        team, self._team = self._team, None
        self._is_suspect = False
        return team.stop() if team is not None else []

    def _kill(self) -> None:
        team, self._team = self._team, None
        self._is_suspect = False
        if team is not None:
            team.kill()


def _payloads(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], world_size: int) -> list[bytes]:
    """Return what each rank is sent; the same bytes for all unless an argument is a `PerRank`."""
    _check_importable(fn)
    varying = [one for one in (*args, *kwargs.values()) if isinstance(one, PerRank)]
    for one in varying:
        if len(one.values) != world_size:
            raise ValueError(f"PerRank holds {len(one.values)} values, but there are {world_size} ranks")
    if not varying:
        return [pickle.dumps((fn, args, kwargs))] * world_size
    return [pickle.dumps((fn, *_arguments_of(rank, args, kwargs))) for rank in range(world_size)]


def _arguments_of(rank: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return tuple(_pick(one, rank) for one in args), {name: _pick(one, rank) for name, one in kwargs.items()}


def _pick(argument: Any, rank: int) -> Any:
    return argument.values[rank] if isinstance(argument, PerRank) else argument


def _check_importable(fn: Callable[..., Any]) -> None:
    while isinstance(fn, functools.partial):
        fn = fn.func
    if getattr(fn, "__module__", None) == "__main__":
        name = getattr(fn, "__qualname__", repr(fn))
        raise ValueError(
            f"{name} is defined in __main__, which the ranks do not run: move it to a module that can be imported"
        )


def _positive(timeout_sec: float) -> float:
    if not timeout_sec > 0:
        raise ValueError(f"timeout_sec must be positive, not {timeout_sec}")
    return timeout_sec


def _works(team: RankTeam, world_size: int) -> bool:
    """Return whether the team's default process group still adds up."""
    payload = pickle.dumps((_rank_main.probe_group, (_PROBE_TIMEOUT_SEC,), {}))
    answers = team.run([payload] * world_size, _PROBE_TIMEOUT_SEC + 1.0)
    return [one.value for one in answers] == [float(world_size)] * world_size


def _with_final_exit(outcome: RankOutcome, exit_code: int | None) -> RankOutcome:
    return dataclasses.replace(outcome, exit_code=exit_code)
