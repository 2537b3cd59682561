"""Tools to test distributed programs: real ranks, threads that act as ranks, faults, and uneven stats.

- `run_ranks`, `RankPool`, `PerRank`: a function on real gloo processes, with a hard time limit; no rank is left behind.
- `run_threads`: the same for reductions of this library over hundreds of ranks in one process.
- `count_collectives`, `die`: what really went over the wire, and how ranks fail.
- `inject_bit_flips`, `BitFlip`: what faulty hardware does, one bit of a named weight, activation, gradient or matrix
  product, before or after the reduce, once or stuck.
- `ddpstats.testing.strategies`: hypothesis strategies for stats that differ between ranks (needs
  ``ddpstats[testing]``).
- ``@pytest.mark.ranks(2)``: a test of pytest's on real ranks (`ddpstats.testing.pytest_plugin`).

Names are loaded when first used: pytest imports this package for its plugin, and need not import torch with it.

Functions and their results travel between the parent and its own children by pickle, over private pipes; nothing from
outside ever gets there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpstats._base.lazy import lazy_names as _lazy_names

if TYPE_CHECKING:
    from ddpstats.testing.faults import (
        CollectiveCount as CollectiveCount,
        count_collectives as count_collectives,
        die as die,
    )
    from ddpstats.testing.flips import (
        AppliedFlip as AppliedFlip,
        BitFlip as BitFlip,
        FlipInjector as FlipInjector,
        inject_bit_flips as inject_bit_flips,
    )
    from ddpstats.testing.outcomes import (
        RankDied as RankDied,
        RankError as RankError,
        RankOutcome as RankOutcome,
        RankOutcomes as RankOutcomes,
        RanksFailed as RanksFailed,
        RankTimedOut as RankTimedOut,
        RankUnpicklable as RankUnpicklable,
    )
    from ddpstats.testing.ranks import PerRank as PerRank, RankPool as RankPool, run_ranks as run_ranks
    from ddpstats.testing.threads import ThreadGroup as ThreadGroup, run_threads as run_threads

_HOMES = {
    "faults": ("CollectiveCount", "count_collectives", "die"),
    "flips": ("AppliedFlip", "BitFlip", "FlipInjector", "inject_bit_flips"),
    "outcomes": (
        *("RankDied", "RankError", "RankOutcome", "RankOutcomes"),
        *("RanksFailed", "RankTimedOut", "RankUnpicklable"),
    ),
    "ranks": ("PerRank", "RankPool", "run_ranks"),
    "threads": ("ThreadGroup", "run_threads"),
}
_HOME_OF = {name: f"testing.{module}" for module, names in _HOMES.items() for name in names}

__all__ = sorted(_HOME_OF)
__getattr__, __dir__ = _lazy_names(__name__, _HOME_OF)
