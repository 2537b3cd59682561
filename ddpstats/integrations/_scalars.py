"""What loggers get of a reduction, a number for each name; and of a window, whenever a trainer logs."""

from __future__ import annotations

from ddpstats._reduction.result import Reduced
from ddpstats._reduction.window import StatsWindow
from ddpstats.errors import ConfigError


def scalars_of(reduced: Reduced, *, prefix: str, per_rank: bool) -> dict[str, float]:
    """Every path under its name; with ``per_rank`` also its minimum, its maximum and their ranks."""
    scalars = {**reduced.flat(), **_extremes(reduced)} if per_rank else reduced.flat()
    return {prefix + name: value for name, value in scalars.items()}


class WindowScalars:
    """A window's scalars by the step of a trainer, which every rank's trainer counts alike."""

    def __init__(self, window: StatsWindow, *, prefix: str, per_rank: bool) -> None:
        self._window, self._prefix, self._per_rank = window, prefix, per_rank
        self._flushed_at: int | None = None

    def flush(self, step: int) -> dict[str, float]:
        """What was added since the last flush. Collective."""
        self._flushed_at = step
        reduced = self._window.flush(per_rank=self._per_rank)
        return scalars_of(reduced, prefix=self._prefix, per_rank=self._per_rank)

    def rest(self, step: int) -> dict[str, float]:
        """What training left behind at its last ``step``: nothing where that was flushed. Collective else."""
        found = {} if step == self._flushed_at else self.flush(step)
        self._flushed_at = None  # the trainer may train again, and count from 0
        return found


def _extremes(reduced: Reduced) -> dict[str, float]:
    if reduced.by_rank is None:
        raise ConfigError("nothing is known of single ranks: reduce with per_rank=True, as reduce_stats() takes it")
    found: dict[str, float] = {}
    for name, held in reduced.flat_by_rank().items():
        for which, rank in (("min", held.min_rank), ("max", held.max_rank)):
            value = None if rank is None else held.values[held.ranks.index(rank)]
            if rank is not None and value is not None:
                found |= {f"{name}/{which}": float(value), f"{name}/{which}_rank": float(rank)}
    taken = sorted(found.keys() & reduced.flat().keys())
    if taken:
        raise ConfigError(f"per_rank=True would write {taken[0]!r} twice, since a path has that name: rename it")
    return found
