"""Tools to test distributed programs: real ranks, threads that act as ranks, faults, and uneven stats.

- `run_ranks`, `RankPool`, `PerRank`: a function on real gloo processes, with a hard time limit and nothing left behind.
- `run_threads`: the same for reductions of this library over hundreds of ranks in one process.
- `count_collectives`, `die`, `sleep_past`: what really went over the wire, and how ranks fail.
- `inject_bit_flips`, `BitFlip`: what faulty hardware does, one bit of a named weight, activation, gradient or matrix
  product, before or after the reduce, once or stuck.
- `ddpstats.testing.strategies`: hypothesis strategies for stats that differ between ranks (needs
  ``ddpstats[testing]``).

Functions and their results travel between the parent and its own children by pickle, over private pipes; nothing from
outside ever gets there.
"""

from __future__ import annotations

from ddpstats.testing._bit_flips import inject_bit_flips as inject_bit_flips
from ddpstats.testing._faults import (
    CollectiveCount as CollectiveCount,
    count_collectives as count_collectives,
    die as die,
    sleep_past as sleep_past,
)
from ddpstats.testing._flip_fault import AppliedFlip as AppliedFlip, BitFlip as BitFlip, FlipInjector as FlipInjector
from ddpstats.testing._rank_outcomes import (
    RankDied as RankDied,
    RankError as RankError,
    RankNotRun as RankNotRun,
    RankOutcome as RankOutcome,
    RankOutcomes as RankOutcomes,
    RanksFailed as RanksFailed,
    RankTimedOut as RankTimedOut,
    RankUnpicklable as RankUnpicklable,
)
from ddpstats.testing._ranks import PerRank as PerRank, RankPool as RankPool, run_ranks as run_ranks
from ddpstats.testing._threads import ThreadGroup as ThreadGroup, run_threads as run_threads
